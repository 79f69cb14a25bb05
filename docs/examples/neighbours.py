"""Two methods on KIVI's codes, for own_codec.md: attention sinks, and H2O's heavy hitters.

Paper and practice. StreamingLLM and H2O drop all other tokens but the newest. Here KIVI codes them.
"""
from tinykv.methods.antkv import anchor_scores
from tinykv.methods.base import best_tokens, first_tokens
from tinykv.methods.kivi import KIVI


class Sinks(KIVI):
    """Keep the first tokens (Xiao et al., 2024)."""

    def __init__(self, config, preserve=4, **kivi):
        super().__init__(config, **kivi)
        self.preserve = preserve

    def keep_keys(self, layer_cache, n):
        return first_tokens(layer_cache, self.preserve)  # (B, 1, preserve)


class H2O(KIVI):
    """Keep the tokens that have received most attention so far (Zhang et al., 2023)."""
    uses_scores = True

    def __init__(self, config, preserve=20, **kivi):
        super().__init__(config, **kivi)
        self.preserve, self.window = preserve, config.sliding_window

    def score(self, layer_cache, q, K):
        _, received = anchor_scores(q, K, window=self.window)  # (B, Hkv, S)
        return received, received  # of keys, and of values

    def keep_keys(self, layer_cache, n):
        return best_tokens(layer_cache.keys, n, self.preserve)  # (B, Hkv, preserve)
