"""KVQuant with other outliers, ranges or levels."""
import torch
from invariants import (
    check_batch_rows_are_independent,
    check_bytes,
    check_cache_holds_the_expected_rows,
    check_static_ranges,
    check_what_is_calibrated_can_be_restored,
)

from mutants.common import PinsIgnoredOnReading
from mutants.mutant import DOUBLE, PAPER, Mutant
from tinykv.codecs.base import pack
from tinykv.codecs.nonuniform import NonUniform, SparseCodes
from tinykv.methods.kvquant import KVQuant


class OutliersNotPutBack(NonUniform):
    def decode(self, codes):
        return super().decode(SparseCodes(codes.packed, codes.scale, codes.zero, codes.row_end, codes.values[:0]))


class OutliersOffByAHead(NonUniform):
    def decode(self, codes):
        columns = (codes.columns + self.width) % self.channels
        return super().decode(SparseCodes(codes.packed, codes.scale, codes.zero, codes.row_end, codes.values, columns))


class OutliersOfAnotherSequence(NonUniform):
    """As if the lists held one sequence after the other."""

    def decode(self, codes):
        B, _, T, _ = codes.row_end.shape
        row_end = codes.row_end.flatten().view(T, B).T[:, None, :, None]
        return super().decode(SparseCodes(codes.packed, codes.scale, codes.zero, row_end, codes.values, codes.columns))


class NewestFirst(SparseCodes):
    """Codes whose appended outliers go before the earlier ones."""

    def append(self, other):
        codes = NewestFirst(**vars(super().append(other)))
        codes.values = torch.cat([other.values, self.values])
        return codes


class NewestOutliersFirst(NonUniform):
    def encode(self, x, ignore=None):
        return NewestFirst(**vars(super().encode(x, ignore)))


class KeptTokensHaveOutliers(NonUniform):
    def encode(self, x, ignore=None):
        return super().encode(x, None)


class LevelsBelow(NonUniform):
    """The largest level that is not above, in place of the nearest."""

    def encode(self, x, ignore=None):
        codes, (normal, _, _, _) = super().encode(x, ignore), self.normalize(x, ignore)
        below = torch.bucketize(normal, self.levels.float()[1:])  # (B, T, C)
        codes.packed = pack(below, self.bits)[:, None]
        return codes


class MidAndHalfSwapped(NonUniform):
    def decode(self, codes):
        if self.axis == "token":
            codes = SparseCodes(**{**vars(codes), "scale": codes.zero, "zero": codes.scale})
        return super().decode(codes)


class RangeOfOutliersToo(NonUniform):
    """A value's range is that of the whole token."""

    def range_of_tokens(self, x, ignore):
        _, _, outlier = super().range_of_tokens(x, ignore)
        own, self.outliers = self.outliers, 0
        mid, half, _ = super().range_of_tokens(x, ignore)
        self.outliers = own
        return mid, half, outlier


class OutliersOnOneSide(NonUniform):
    """The largest numbers, in place of those far from the median."""

    def range_of_tokens(self, x, ignore):
        return super().range_of_tokens(x.clamp(min=0), ignore)


class CalibratesOnKeptTokens(NonUniform):
    def collect(self, step, rows, kept, gradient):
        super().collect(step, rows, None, gradient)


class RestoresTheFirstLayer(KVQuant):
    """In all layers."""

    def restore(self, tables):
        super().restore({name: tables["0" + name[1:]] for name in tables})


MUTANTS = [
    Mutant(KVQuant, check_cache_holds_the_expected_rows, OutliersNotPutBack, PAPER),
    Mutant(KVQuant, check_cache_holds_the_expected_rows, OutliersOffByAHead, PAPER),
    Mutant(KVQuant, check_cache_holds_the_expected_rows, OutliersOfAnotherSequence, PAPER),
    Mutant(KVQuant, check_batch_rows_are_independent, OutliersOfAnotherSequence, PAPER | DOUBLE),
    Mutant(KVQuant, check_cache_holds_the_expected_rows, NewestOutliersFirst),
    Mutant(KVQuant, check_bytes, KeptTokensHaveOutliers, PAPER),
    Mutant(KVQuant, check_cache_holds_the_expected_rows, LevelsBelow, PAPER),
    Mutant(KVQuant, check_cache_holds_the_expected_rows, MidAndHalfSwapped, PAPER),
    Mutant(KVQuant, check_cache_holds_the_expected_rows, RangeOfOutliersToo, PAPER),
    Mutant(KVQuant, check_cache_holds_the_expected_rows, OutliersOnOneSide, PAPER),
    Mutant(KVQuant, check_static_ranges, CalibratesOnKeptTokens),
    Mutant(KVQuant, check_what_is_calibrated_can_be_restored, RestoresTheFirstLayer),
    Mutant(KVQuant, check_cache_holds_the_expected_rows, PinsIgnoredOnReading),
]
