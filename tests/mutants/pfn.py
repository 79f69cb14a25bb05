"""PFN that keeps other tokens, or calibrates on what it keeps."""
from invariants import (
    check_cache_holds_the_expected_rows,
    check_calibration_order_is_no_matter,
    check_keeping_everything_is_exact,
    check_placeholders_do_not_matter,
    check_static_ranges,
)

from mutants.common import KeptTokensCount
from mutants.mutant import C_STATIC, CHANNEL, PAPER, T_STATIC, TOKEN, Mutant
from tinykv.codecs.affine import Affine
from tinykv.methods.pfn import PFN


class PinsOffByOne(PFN):
    def keep_keys(self, layer_cache, n):
        positions = super().keep_keys(layer_cache, n)
        return (positions + 1).clamp(max=layer_cache.length - 1)


class PinsOnlyInTheFirstLayer(PFN):
    def keep_keys(self, layer_cache, n):
        return super().keep_keys(layer_cache, n) if layer_cache.layer == 0 else None


class CalibratesWithKeptTokens(Affine):
    def collect(self, step, rows, kept, gradient):
        super().collect(step, rows, None, gradient)


class CalibratesOnTheLastWindow(Affine):
    def collect(self, step, rows, kept, gradient):
        self.lo = self.hi = None
        super().collect(step, rows, kept, gradient)


MUTANTS = [
    Mutant(PFN, check_cache_holds_the_expected_rows, PinsOffByOne, TOKEN),
    Mutant(PFN, check_keeping_everything_is_exact, PinsOffByOne, TOKEN | PAPER),
    Mutant(PFN, check_cache_holds_the_expected_rows, PinsOnlyInTheFirstLayer, C_STATIC | PAPER),
    Mutant(PFN, check_keeping_everything_is_exact, PinsOnlyInTheFirstLayer, TOKEN | PAPER),
    Mutant(PFN, check_placeholders_do_not_matter, KeptTokensCount, CHANNEL),
    Mutant(PFN, check_cache_holds_the_expected_rows, KeptTokensCount, CHANNEL | PAPER),
    Mutant(PFN, check_static_ranges, CalibratesWithKeptTokens, C_STATIC),
    Mutant(PFN, check_static_ranges, CalibratesWithKeptTokens, T_STATIC),
    Mutant(PFN, check_static_ranges, CalibratesOnTheLastWindow, T_STATIC),
    Mutant(PFN, check_calibration_order_is_no_matter, CalibratesOnTheLastWindow, T_STATIC),
]
