"""SKVQ (Duanmu et al., 2024): channels regrouped by range, clipped groups, FP8 metadata, a window.
The same on a page that runs alone: docs/ladder/4_groups.py.

    Keep: the first 5 tokens.
    Code: the pair of codecs `skvq`: K and V per token, in groups of similar channels, clipped, with
          FP8 scales; K before RoPE.
    When: the 128 newest tokens stay in full precision.

Calibration, for the keys and the values of each layer, then a token at a time (`codecs/clipped.py`):
1. Reorder. k-means puts channels of similar (smallest, largest) value into one group, over all KV heads.
2. Clip. Each group gets the alpha of 1.00, 0.98, .. 0.60 (0.20 for 1 and 1.5 bits) that leaves the smallest sum of
   w (X - X')^2 over the calibration tokens, where w is the norm of the loss's gradient with respect to the token's row.
3. Quantize a token's numbers X of a group to N bits, on a grid of their own:
       h = alpha (max(X) - min(X)) / (2^N - 1)             h and z are first rounded to FP8
       code = clamp(round((X - z) / h), 0, 2^N - 1)        z: the lower end of the clipped range
       X' = h code + z

Paper and practice.
- The paper leaves open which old tokens are filtered out of quantization, and names the first ones as its choice.
  `--method kvsink --scheme skvq` keeps the tokens of KVSink for the same codec.
- In the released code the window moves before attention, one token a step; here after it, `block` tokens at a time.
- `codecs/clipped.py` lists the differences in the codec itself.
"""
from tinykv.methods.base import CodecMethod, first_tokens


class SKVQ(CodecMethod):
    beside = {"kivi": {}}

    def __init__(self, config, k_bits=2, v_bits=2, preserve=5, recent=128, block=16, rope="pre", **skvq):
        super().__init__(config, k_bits, v_bits, "skvq", rope, block, **skvq)
        self.preserve, self.recent = preserve, recent

    def describe(self):
        for codec in self.codecs[0]:  # either may be `Exact`, which needs no text
            if codec.needs_text and codec.reorder and codec.group_size == codec.channels:
                return f"one group is all {codec.channels} channels of a token: nothing to regroup (see --group-size)"

    def keep_keys(self, layer_cache, n):
        return first_tokens(layer_cache, self.preserve)  # (B, 1, preserve)
