"""OScaR (Su et al., 2026): KIVI's codes, of rotated keys that all have the same length.

    Keep: nothing.
    Code: K per channel in groups of G tokens, V per token in groups of G channels, both rotated; keys
    are divided by their token's norm (`codecs/rotated.py`).
    When: the R newest tokens stay in full precision, older ones are quantized G at a time.

A sink has a small key, so it stretches the range of every channel of its group. KVSink and OTT keep such tokens out of
the group. OScaR makes all of a group's tokens equally long instead, and stores how long they were: then none has to be
looked for. Alone, this would make outliers of what a short key has in its few large channels, so a rotation first
spreads each head's numbers over all of its channels:
    y = H k,  n = |y|,  Q(y / n) as in KIVI,  k' = n H^T Q'
A rotation changes no attention score if queries are rotated, too; here keys are rotated back when they are read.

Paper and practice. We read the abstract of the paper (arXiv 2605.19660) and the released code (fake quantization and
kernels), which settles what follows.
- n is the L2 norm over all KV heads of a token, after the rotation. Values are rotated and not divided.
- Both are quantized after RoPE, G = 32 and R = 128, and the zero point is an integer, as here by default. With
  `formula="offset"` it is the minimum, as in `kivi`, so that 0 has no level; on SmolLM2, 2 bits lose less then.
- The released code quantizes its whole window of R tokens each time it is full, as KIVI's does. Here it is G at a time.
- `rotate="off"`, `scale_tokens="off"`: the paper's ablations. With both off, and "offset", this is `kivi`.
"""
from tinykv.methods.base import CodecMethod


class OScaR(CodecMethod):
    beside = {"kivi": {"group_size": 32, "recent": 128}}

    def __init__(self, config, k_bits=2, v_bits=2, group_size=32, recent=128, formula="integer-zero", **oscar):
        super().__init__(config, k_bits, v_bits, "oscar", group_size=group_size, block=group_size, formula=formula,
                         **oscar)
        self.recent = recent
