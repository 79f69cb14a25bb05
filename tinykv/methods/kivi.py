"""KIVI (Liu et al., 2024): keys per channel, values per token, the newest tokens in full precision.
The same on a page that runs alone: docs/ladder/2_window.py.

    Keep: nothing.   Code: K per channel in groups of G tokens, V per token in groups of G channels.
    When: the R newest tokens stay in full precision, older ones are quantized G at a time.

A few channels of the keys are large in all tokens. With a grid for each channel they cost the other channels nothing.
Values have no such channels; a grid for each token keeps an error within that token. Keys are quantized after RoPE, and
so need no rotation when they are read. RoPE widens a channel's range, but within 32 tokens two thirds of the channels
make less than a quarter of a turn (theta = 10,000, 64 or 128 channels).
Both grids are dynamic:
    z = min(X),  s = (max(X) - min(X)) / (2^B - 1),  Q(X) = round((X - z) / s),  X' = s Q(X) + z
This is the scheme `channel-dynamic`; KIVI adds the window of recent tokens.

Paper and practice.
- The released code has no floor under s. A constant group divides 0 by 0 and is read as NaN.
- The released code quantizes its whole window of R keys each time the window is full, and one value a step: attention
  sees 1 to R keys in full precision, and R + 1 values. Here values are quantized together with the keys, G at a time,
  and attention sees R + 1 to R + G of both (the new token among them). `recent=0, group_size=R` is the released way
  with the keys, `v_block=1` the released way with the values. They cannot be combined: `recent` is that of both.
- G and R are 32 and 128, as in the released LongBench table; the released command line has 128 and 128. Its authors
  advise 4 bits for grouped-query attention. Where a head is shorter than G, the values' group is the head.
- KIVI reports no perplexity of its own. Under the `paper` protocol there is no window, and the last group of a text is
  shorter.
"""
from typing import Annotated

from tinykv import at_least
from tinykv.methods.base import CodecMethod


class KIVI(CodecMethod):
    # in the same groups, but per token: at the same bits
    beside = {"rtn": {"scheme": "token-dynamic", "group_size": 32}}

    def __init__(self, config, k_bits=2, v_bits=2, group_size=32, recent=128,
                 v_block: Annotated[int | None, "values quantized at a time, where not as many as keys"] = None):
        super().__init__(config, k_bits, v_bits, "channel-dynamic", group_size=group_size, block=group_size)
        at_least(1, v_block=v_block)
        self.recent, self.v_block = recent, v_block

    def block_of(self, kind):
        return self.v_block if kind == "v" and self.v_block is not None else self.block
