"""CQ (Zhang et al., 2024): coupled quantization. Neighbouring channels share one code.
The same on a page that runs alone: docs/ladder/6_codebooks.py.

    Keep: nothing.
    Code: a codebook for each layer, K or V, KV head and group of n channels; K before RoPE.
    When: at once; in a stream, in blocks.

The channels of a key, or of a value, depend on each other: their joint entropy is lower than the sum of their own. So n
of them, quantized together to the nearest of m centroids, lose less than each channel alone at the same log2(m) / n
bits. The paper's "4c8b" is d4m256 here. AnTKV has the same codebooks, so they are in `codecs/codebook.py`:
1. Cut each calibration row into sub-vectors x_j of n neighbouring channels.
2. Weigh each one by the squared norm of the loss's gradient g over it, its diagonal Fisher information: w_j = |g_j|^2.
3. k-means finds the m centroids of each slot: it minimizes sum_j w_j |x_j - centroid(x_j)|^2.
4. Quantize: a sub-vector's code is the index of the nearest centroid, of log2(m) bits. Decode: look the centroid up.

Paper and practice. We found no released code. AnTKV reports that CQ quantizes keys before RoPE, and that each group of
channels has its own codebook. Bits are quoted without the codebooks, which count apart.
"""
from tinykv.codecs.base import BLOCK
from tinykv.methods.codebooks import CodebookMethod


class CQ(CodebookMethod):
    """Codebooks, and nothing is kept."""
    beside = {"rtn": {}}
    block = BLOCK

    def __init__(self, config, vq=None, recent=0, rope="pre", **codebooks):
        super().__init__(config, vq, **codebooks)
        self.recent, self.rope = recent, rope
