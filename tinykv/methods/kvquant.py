"""KVQuant (Hooper et al., 2024): non-uniform levels, learned where errors matter, and sparse outliers.

    Keep: the first N = 1 tokens, out of codes, ranges and levels.
    Code: `nonuniform.py`, the scheme `kvquant`: K before RoPE per channel and static, V per token and dynamic.
    When: at once, in blocks in a stream.

The idea in three steps. Before RoPE a key's channel keeps its range, so it can be learned beforehand. Levels lie where
numbers lie, and where the loss feels an error, by weighted k-means. And a hundredth of the numbers, which would stretch
every range, is stored apart, exact.

Paper and practice. Attention sinks are what the first token is kept for; other sinks stay in, which KVSink uses: with
`--method pfn,kvsink --scheme kvquant` the tokens that those keep are left out of all that is learned, just as here.
What differs in the code itself is told in `nonuniform.py`.
"""
from tinykv import at_least
from tinykv.methods.base import SchemeMethod, first_tokens


class KVQuant(SchemeMethod):
    compare = ("rtn",)

    def __init__(self, config, k_bits=2, v_bits=2, preserve=1, outliers=1.0, sensitivity="fisher-range", q_norm=None,
                 rope="pre"):
        super().__init__(config, k_bits, v_bits, "kvquant", outliers=outliers, sensitivity=sensitivity, q_norm=q_norm,
                         rope=rope)
        at_least(0, preserve=preserve)
        self.preserve = preserve

    def keep(self, cache, kind, n, state):
        return first_tokens(cache, self.preserve)  # (B, 1, N)
