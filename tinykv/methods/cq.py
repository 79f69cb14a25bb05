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
from tinykv.methods.base import VectorMethod


class CQ(VectorMethod):
    """A codebook, and nothing to add to it."""
    compare = ("rtn",)
