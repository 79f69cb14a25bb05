"""The methods by name. To add one, write a file here that is named like its class, and list the class below."""
from tinykv.methods.antkv import AnTKV
from tinykv.methods.cq import CQ
from tinykv.methods.fp16 import FP16
from tinykv.methods.intactkv import IntactKV
from tinykv.methods.kivi import KIVI
from tinykv.methods.kvquant import KVQuant
from tinykv.methods.kvsink import KVSink
from tinykv.methods.oscar import OScaR
from tinykv.methods.ott import OTT
from tinykv.methods.pfn import PFN
from tinykv.methods.rtn import RTN
from tinykv.methods.skvq import SKVQ

METHODS = {cls.__name__.lower(): cls
           for cls in (FP16, RTN, PFN, KVSink, KIVI, OTT, OScaR, SKVQ, IntactKV, KVQuant, CQ, AnTKV)}
