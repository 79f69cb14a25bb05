"""KVQuant (Hooper et al., 2024): non-uniform levels where errors matter, and sparse outliers.
The same on a page that runs alone: docs/ladder/5_levels.py.

    Keep: the first N = 1 tokens. They count in no calibrated range and no level.
    Code: the pair of codecs `kvquant`; K before RoPE, per channel and static; V per token, dynamic.
    When: at once; in a stream, in blocks.

The idea has three steps. A key's channel keeps its range before RoPE, so the range can be calibrated. Levels lie where
the numbers lie, and where the loss feels an error, by weighted k-means. And one per cent of the numbers, which would
stretch every range, is stored apart in 16 bits. All of it is in `codecs/nonuniform.py`.

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
