"""The methods, one file each. To add one: its file, and a line here."""
from tinykv.methods.fp16 import FP16
from tinykv.methods.kvsink import KVSink
from tinykv.methods.pfn import PFN
from tinykv.methods.rtn import RTN

METHODS = {
    "fp16": FP16,
    "rtn": RTN,
    "pfn": PFN,
    "kvsink": KVSink,
}
