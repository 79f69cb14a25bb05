"""The methods by name. To add one: its file, and a line here."""
from tinykv.methods.antkv import AnTKV
from tinykv.methods.cq import CQ
from tinykv.methods.fp16 import FP16
from tinykv.methods.intactkv import IntactKV
from tinykv.methods.kivi import KIVI
from tinykv.methods.kvquant import KVQuant
from tinykv.methods.kvsink import KVSink
from tinykv.methods.ott import OTT
from tinykv.methods.pfn import PFN
from tinykv.methods.rtn import RTN
from tinykv.methods.skvq import SKVQ

METHODS = {
    "fp16": FP16,
    "rtn": RTN,
    "pfn": PFN,
    "kvsink": KVSink,
    "kivi": KIVI,
    "ott": OTT,
    "skvq": SKVQ,
    "intactkv": IntactKV,
    "kvquant": KVQuant,
    "cq": CQ,
    "antkv": AnTKV,
}
