"""Codecs that are wrong on purpose, each with the check of test_codecs.py that has to notice it.

`Affine` passes the check, and the wrong codec must fail it. A mutant that survives is a hole in the tests.
"""
import torch

from tinykv.codecs.affine import Affine
from tinykv.codecs.base import TERNARY, Codes, pack, unpack


class RoundsHalfUp(Affine):
    def encode(self, x, ignore=None):
        return super().encode(x.float() + 1e-4, ignore)


class OneLevelTooMany(Affine):
    """2**bits steps between the smallest and the largest number: the largest does not fit."""
    def __init__(self, *settings):
        super().__init__(*settings)
        self.max_code += 1


class IgnoresNothing(Affine):
    def range_of(self, g, T, ignore):
        return super().range_of(g, T, None)


class FillCounts(Affine):
    """The zeros that fill up the last group stretch its range."""
    def range_of(self, g, T, ignore):
        lo, hi = super().range_of(g, T, ignore)
        if self.axis == "channel" and g.shape[2] * g.shape[3] > T:
            lo[:, :, -1].clamp_(max=0)
            hi[:, :, -1].clamp_(min=0)
        return lo, hi


class NoFloor(Affine):
    def grid(self, lo, hi):
        scale = ((hi - lo) / self.max_code).half()
        if self.formula == "offset":
            return scale, lo.half()
        return scale, (-lo / scale.float()).round().short()


class ClippedZero(Affine):
    """The papers' formula to the letter: a constant group of 1.0 comes back as 0.1."""
    def grid(self, lo, hi):
        scale = ((hi - lo) / self.max_code).clamp(1e-5, 1e4).half()
        zero = (-lo / scale.float()).clamp(-1e4, 1e4).round()
        return scale, zero.short()


class RoundsTheGridTooLate(Affine):
    """Codes are computed on the exact grid, and the metadata rounded only when it is stored."""
    def grid(self, lo, hi):
        return ((hi - lo) / self.max_code).clamp(1e-5, 6e4), lo

    def encode(self, x, ignore=None):
        codes = super().encode(x, ignore)
        return Codes(codes.packed, codes.scale.half(), codes.zero.half())


class SwapsScaleAndZero(Affine):
    def decode(self, codes):
        return super().decode(Codes(codes.packed, codes.zero.half(), codes.scale.to(codes.zero.dtype)))


class OneGridForAllHeads(Affine):
    def set_range(self, lo, hi):
        lo = lo.amin(0, keepdim=True).expand_as(lo)  # (Hkv, d)
        hi = hi.amax(0, keepdim=True).expand_as(hi)  # (Hkv, d)
        super().set_range(lo, hi)


class OtherAxis(Affine):
    def __init__(self, bits, width, axis, *settings):
        super().__init__(bits, width, {"token": "channel", "channel": "token"}[axis], *settings)


class CodesWithoutLaterMetadata(Codes):
    def append(self, other):
        packed = torch.cat([self.packed, other.packed], dim=2)
        return CodesWithoutLaterMetadata(packed, self.scale, self.zero)


class LosesMetadata(Affine):
    def encode(self, x, ignore=None):
        codes = super().encode(x, ignore)
        return CodesWithoutLaterMetadata(codes.packed, codes.scale, codes.zero)


#                 codec, name of a function of test_codecs.py, its other arguments
CODEC_MUTANTS = [
    (RoundsHalfUp, "check_half_to_even", ("offset",)),
    (RoundsHalfUp, "check_half_to_even", ("integer-zero",)),
    (OneLevelTooMany, "check_formula", (2, "token", "offset", 8, False)),
    (OneLevelTooMany, "check_formula", (TERNARY, "token", "integer-zero", 8, False)),
    (IgnoresNothing, "check_ignored_rows_do_not_count", ("integer-zero",)),
    (IgnoresNothing, "check_formula", (2, "channel", "offset", 8, False)),
    (FillCounts, "check_formula", (2, "channel", "offset", 8, False)),
    (NoFloor, "check_formula", (2, "channel", "offset", 8, False)),
    (NoFloor, "check_constant", ("integer-zero", "token", 2, 1.0)),
    (ClippedZero, "check_constant", ("integer-zero", "token", 2, 1.0)),
    (ClippedZero, "check_constant", ("integer-zero", "channel", 4, -1000.0)),
    (RoundsTheGridTooLate, "check_formula", (8, "token", "offset", 8, False)),
    (SwapsScaleAndZero, "check_formula", (2, "channel", "offset", 8, False)),
    (OneGridForAllHeads, "check_formula", (2, "channel", "offset", 8, True)),
    (OtherAxis, "check_formula", (2, "channel", "offset", 8, False)),
    (LosesMetadata, "check_append", (2, "channel", False)),
]


def packs_high_first(codes, bits):
    return pack(codes.flip(-1), bits)


def unpacks_high_first(packed, bits, n):
    return unpack(packed, bits, n).flip(-1)


def packs_whole_words(codes, bits):
    """As if rows were filled up to whole words: more bytes than the bits need."""
    return torch.nn.functional.pad(pack(codes, bits), (0, 1))


def packs_three_levels_in_two_bits(codes, bits):
    return pack(codes, 2 if bits == TERNARY else bits)


def unpacks_three_levels_from_two_bits(packed, bits, n):
    return unpack(packed, 2 if bits == TERNARY else bits, n)


PACK_MUTANTS = [
    (packs_high_first, unpacks_high_first, 2),
    (packs_whole_words, unpack, 3),
    (packs_three_levels_in_two_bits, unpacks_three_levels_from_two_bits, TERNARY),
]
