"""CQ (Zhang et al., 2024): coupled quantization, neighbouring channels share one code.

    Keep: nothing.   Code: a codebook for each layer, K or V, KV head and group of n channels; K before RoPE.
    When: at once, in blocks in a stream.

Channels of a key or value depend on each other: their joint entropy is below the sum of their own. So n of them, coded
together by the nearest of m centroids, lose less than each alone at the same log2(m) / n bits. The paper's "4c8b" is
d4m256 here. Centroids are found by k-means on calibration text, weighted by the diagonal Fisher information
(`sensitivity`): see `vectors.py`.

Paper and practice. No released code was found; that keys are coded before RoPE, and each group of channels has a book
of its own, is AnTKV's account of it. Bits are quoted without the codebooks, which `offline_bytes` counts.
"""
from tinykv.methods.base import Method, at_least
from tinykv.schemes import BLOCK
from tinykv.vectors import VectorScheme


class CQ(Method):
    compare = ("rtn",)
    rope, block, needs_calibration = "pre", BLOCK, True

    def __init__(self, config, vq=None, bits=None, sensitivity="fisher", sharing="own", recent=0):
        at_least(0, recent=recent)
        self.scheme = VectorScheme(config, vq, bits, sensitivity, sharing)
        self.codecs, self.k_bits, self.v_bits = self.scheme.codecs, self.scheme.bits, self.scheme.bits
        self.recent = recent

    def calibrate(self, model, windows, progress=None):
        self.scheme.calibrate(model, self, windows, progress)

    def describe(self):
        return self.scheme.describe()
