"""RTN that is wrong: its codec, or which codec is whose. Other methods stand on the same codecs."""
import torch
from invariants import (
    check_batch_rows_are_independent,
    check_bytes,
    check_cache_holds_the_expected_rows,
    check_low_bits_matter,
    check_same_twice_and_after_reset,
    check_sixteen_bits_of_one_kind,
    check_static_ranges,
    check_the_trap,
)

from mutants.mutant import CHANNEL, DOUBLE, PAPER, T_STATIC, TOKEN, Mutant
from tinykv.codecs import Pair
from tinykv.codecs.affine import Affine
from tinykv.codecs.base import Codes, pack, unpack
from tinykv.methods.rtn import RTN


class NoOpCodec(Affine):
    """Quantizes nothing: perplexity would be fp16's at any number of bits."""

    def encode(self, x, ignore=None):
        return Codes(x.clone())

    def decode(self, codes):
        return codes.packed


class SwappedScaleAndZero(Affine):
    def encode(self, x, ignore=None):
        codes = super().encode(x, ignore)
        return Codes(codes.packed, codes.zero.half(), codes.scale.short())


class SwappedKeysAndValues(RTN):
    def __init__(self, config, **settings):
        super().__init__(config, **settings)
        self.codecs = [Pair(k=pair.v, v=pair.k) for pair in self.codecs]


class Unpacked(Affine):
    """Codes of 2 and 3 bits, a whole byte each."""

    def encode(self, x, ignore=None):
        codes = super().encode(x, ignore)
        return Codes(unpack(codes.packed, self.bits, self.width), codes.scale, codes.zero)

    def decode(self, codes):
        return super().decode(Codes(pack(codes.packed, self.bits), codes.scale, codes.zero))


class Remembers(Affine):
    """Holds what it has seen of one text for the next: the range only grows."""
    largest = 0

    def encode(self, x, ignore=None):
        self.largest = max(self.largest, x.abs().max().item())
        return super().encode((x.float() + self.largest * 1e-2).to(x.dtype), ignore)


class RangeOverTheBatch(Affine):
    """One grid for all sequences: the largest number of each is that of the batch."""

    def encode(self, x, ignore=None):
        largest = x.amax((0, 2), keepdim=True)  # (1, Hkv, 1, d)
        return super().encode(torch.where(x == x.amax(2, keepdim=True), largest, x), ignore)


class CalibratesKeysBeforeRope(RTN):
    """Takes the ranges of keys before RoPE for keys that are stored after it."""

    @property
    def rope(self):
        calibrated = self.codecs[0].k.scale is not None
        return "post" if calibrated else "pre"

    @rope.setter
    def rope(self, value):
        pass


MUTANTS = [
    Mutant(RTN, check_cache_holds_the_expected_rows, NoOpCodec, TOKEN),
    Mutant(RTN, check_low_bits_matter, NoOpCodec, TOKEN | PAPER),
    Mutant(RTN, check_low_bits_matter, NoOpCodec, TOKEN),
    Mutant(RTN, check_the_trap, NoOpCodec, TOKEN),
    Mutant(RTN, check_sixteen_bits_of_one_kind, NoOpCodec, TOKEN | PAPER),
    Mutant(RTN, check_cache_holds_the_expected_rows, SwappedScaleAndZero, CHANNEL),
    Mutant(RTN, check_cache_holds_the_expected_rows, SwappedKeysAndValues, TOKEN),
    Mutant(RTN, check_sixteen_bits_of_one_kind, SwappedKeysAndValues, TOKEN | PAPER),
    Mutant(RTN, check_bytes, Unpacked, TOKEN),
    Mutant(RTN, check_same_twice_and_after_reset, Remembers, TOKEN | PAPER),
    Mutant(RTN, check_batch_rows_are_independent, RangeOverTheBatch, TOKEN | PAPER | DOUBLE),
    Mutant(RTN, check_cache_holds_the_expected_rows, RangeOverTheBatch, CHANNEL),
    Mutant(RTN, check_static_ranges, CalibratesKeysBeforeRope, T_STATIC),
]
