"""KIVI (Liu et al., 2024): keys per channel, values per token, the newest tokens exact.

    Keep: nothing.   Code: K per channel in groups of G tokens, V per token in groups of G channels.
    When: the R newest tokens stay exact, older ones are coded G at a time.

A few channels of the keys are large in all tokens, so a grid for each channel wastes nothing on the others; values have
no such channels, and a grid for each token keeps an error within it. Keys are taken after RoPE. Both grids are dynamic:
    z = min(X),  s = (max(X) - min(X)) / (2^B - 1),  Q(X) = round((X - z) / s),  X' = s Q(X) + z
which is the scheme `channel-dynamic`; KIVI adds the window.

Paper and practice.
- The released code has no floor under s: a constant group divides 0 by 0, and the NaN's bits run over its neighbours'.
- It lets go of the keys' window as a whole, R tokens each time it is full, and of one value a step: attention sees 1 to
  R exact keys, and R + 1 exact values. Here values go with the keys, G at a time, and attention sees R + 1 to R + G of
  both; `recent=0, group_size=R` is its way with the keys, `v_block=1` its way with the values.
- G and R are 32 and 128 as in its LongBench table; its command line has 128 and 128. Where a head is shorter than G,
  the values' group is the head.
- It has no perplexity of its own. In the `paper` protocol there is no window, and the last group of a text is shorter.
"""
from tinykv import at_least
from tinykv.methods.base import SchemeMethod


class KIVI(SchemeMethod):
    compare = ("rtn",)

    def __init__(self, config, k_bits=2, v_bits=2, group_size=32, recent=128, v_block=None):
        super().__init__(config, k_bits, v_bits, "channel-dynamic", group_size)
        at_least(0, recent=recent)
        at_least(1, v_block=v_block)
        self.recent, self.v_block = recent, v_block
