"""RTN: round each weight to the nearest of its group's integers.

    s = (max - min) / (2**b - 1),  z = -round(min / s)
    code = clamp(round(w / s) + z),  w' = s (code - z)

A group is up to 128 consecutive inputs of one output. Nothing is calibrated: RTN is the baseline of the other three.
"""
from tinykv.lab.weights.base import Quantizer


class RTN(Quantizer):
    def quantize(self, block, run, full, quantized):
        self.replace(block)
