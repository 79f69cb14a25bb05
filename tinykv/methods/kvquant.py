"""KVQuant (Hooper et al., 2024): non-uniform levels where errors matter, and sparse outliers.
The same on a page that runs alone: docs/ladder/5_levels.py.

    Keep: the first N = 1 tokens. They count in no calibrated range and no level.
    Code: the pair of codecs `kvquant`; K before RoPE, per channel and static; V per token, dynamic.
    When: at once; in a stream, in blocks.

Calibration, for the keys and the values of each layer, then a token at a time (`codecs/nonuniform.py`):
1. Ranges. A channel of the keys keeps its range before RoPE, so its percentiles are calibrated; mid and half are the
   middle and the half of that range. A row of values takes them from its own numbers.
2. Outliers. One number in a hundred lies outside its range, and would stretch it: it is stored apart in 16 bits.
3. Levels. Normalized numbers x' = (x - mid) / half share 2^b levels. Weighted k-means puts these where the numbers are,
   and where the loss feels an error: it minimizes sum_e w_e (x'_e - level)^2 with w = (dL/dx)^2 half^2 (Appendix E).
4. Quantize. q is the index of the nearest level, and x'' = half * level[q] + mid. At 2 bits, Q-Norm shifts and scales
   the levels, so that decoded numbers keep their mean and standard deviation.

Paper and practice. The first token is kept because it is an attention sink. Other sinks are not kept, which is where
KVSink comes in: with `--method pfn,kvsink --scheme kvquant`, the tokens that those methods keep are left out of the
calibration, as the first token is here. Differences in the codec itself are in `codecs/nonuniform.py`.
"""
from tinykv.methods.base import CodecMethod, first_tokens


class KVQuant(CodecMethod):
    beside = {"rtn": {}}

    def __init__(self, config, k_bits=2, v_bits=2, preserve=1, rope="pre", **kvquant):
        super().__init__(config, k_bits, v_bits, "kvquant", rope, **kvquant)
        self.preserve = preserve

    def keep_keys(self, layer_cache, n):
        return first_tokens(layer_cache, self.preserve)  # (B, 1, N)
