"""SKVQ with another codec, window or other kept tokens."""
import torch
from invariants import check_bytes, check_cache_holds_the_expected_rows, check_keeping_everything_is_exact

from mutants.common import KeysLeftUnrotated
from mutants.mutant import PAPER, Mutant
from tinykv.codecs.clipped import ClippedGroups
from tinykv.methods.skvq import SKVQ


class OrderNotUndone(ClippedGroups):
    """Channels come back in the order of their groups."""

    def decode(self, codes):
        x = super().decode(codes)  # (B, Hkv, T, d)
        rows = x.transpose(1, 2).flatten(2)[..., self.order]  # (B, T, C)
        return rows.unflatten(-1, (-1, self.width)).transpose(1, 2)


class MetadataRoundedTooLate(ClippedGroups):
    """Codes from the exact grid, as the released code computes them."""

    def quantize(self, rows, h, z):
        lo, hi = self.ranges(rows)
        middle, alpha = self.centre * (lo + hi) / 2, self.alpha.float()
        lo, hi = (alpha * end + (1 - alpha) * middle for end in (lo, hi))
        return super().quantize(rows, ((hi - lo) / self.max_code).clamp(self.floor), lo)


class ClipIgnored(ClippedGroups):
    def encode(self, x, ignore=None):
        own, self.alpha = self.alpha, torch.ones_like(self.alpha)
        codes = super().encode(x, ignore)
        self.alpha = own
        return codes


class ClipsTowardsZero(ClippedGroups):
    """Also the groups that were to shrink around their middle."""

    def encode(self, x, ignore=None):
        own, self.centre = self.centre, torch.zeros_like(self.centre)
        codes = super().encode(x, ignore)
        self.centre = own
        return codes


class ScalesOfSixteenBits(ClippedGroups):
    """Whatever the metadata should be."""

    def stored(self, h, z):
        return h.half(), z.half()


class WindowIgnored(SKVQ):
    def __init__(self, config, recent=128, **settings):
        super().__init__(config, recent=0, **settings)


class FirstTokensIgnored(SKVQ):
    def keep_keys(self, layer_cache, n):
        return None


class FirstKeysOnly(SKVQ):
    def keep_values(self, layer_cache, n):
        return None


MUTANTS = [
    Mutant(SKVQ, check_cache_holds_the_expected_rows, OrderNotUndone, PAPER),
    Mutant(SKVQ, check_cache_holds_the_expected_rows, OrderNotUndone),
    Mutant(SKVQ, check_cache_holds_the_expected_rows, MetadataRoundedTooLate, PAPER),
    Mutant(SKVQ, check_cache_holds_the_expected_rows, ClipIgnored, PAPER),
    Mutant(SKVQ, check_cache_holds_the_expected_rows, ClipsTowardsZero, PAPER),
    Mutant(SKVQ, check_bytes, ScalesOfSixteenBits, PAPER),
    Mutant(SKVQ, check_cache_holds_the_expected_rows, WindowIgnored, {"recent": 6}),
    Mutant(SKVQ, check_cache_holds_the_expected_rows, FirstTokensIgnored),
    Mutant(SKVQ, check_keeping_everything_is_exact, FirstTokensIgnored, PAPER),
    Mutant(SKVQ, check_cache_holds_the_expected_rows, FirstKeysOnly, PAPER),
    Mutant(SKVQ, check_cache_holds_the_expected_rows, KeysLeftUnrotated),
]
