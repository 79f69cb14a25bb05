"""CQ with other codebooks, or codes in another order."""
from invariants import (
    check_bytes,
    check_cache_holds_the_expected_rows,
    check_calibration_order_is_no_matter,
    check_what_is_calibrated_can_be_restored,
)

from mutants.common import KeysLeftUnrotated
from mutants.mutant import PAPER, Mutant
from tinykv.codecs.base import Codes, pack, unpack
from tinykv.codecs.codebook import Codebook
from tinykv.methods.cq import CQ


class HeadsPackedInAnotherOrder(Codebook):
    """The last head's codes come first, and are read as the first one's."""

    def encode(self, x, ignore=None):
        q = unpack(super().encode(x, ignore).packed, self.code_bits, self.places)  # (B, 1, T, places)
        q = q.unflatten(-1, (x.shape[1], -1)).flip(-2).flatten(-2)
        return Codes(pack(q, self.code_bits))


class BooksOfAnotherHead(Codebook):
    """The nearest centroid is looked for in the next head's book."""

    def encode(self, x, ignore=None):
        own, self.centroids = self.centroids, self.centroids.roll(self.width // self.n, 0)
        codes = super().encode(x, ignore)
        self.centroids = own
        return codes


class LastPlaceDropped(Codebook):
    def encode(self, x, ignore=None):
        q = unpack(super().encode(x, ignore).packed, self.code_bits, self.places)  # (B, 1, T, places)
        q[..., -1] = 0
        return Codes(pack(q, self.code_bits))


class PlacesBeforeHeads(Codebook):
    """Books in the order of places, then heads."""

    def decode(self, codes):
        own, heads = self.centroids, self.places * self.n // self.width
        self.centroids = own.unflatten(0, (heads, -1)).transpose(0, 1).flatten(0, 1)
        x = super().decode(codes)
        self.centroids = own
        return x


class EveryOtherChannel(Codebook):
    """Channels i, i + d/n, .. share a code, in place of neighbours."""

    def encode(self, x, ignore=None):
        return super().encode(x.unflatten(-1, (self.n, -1)).transpose(-1, -2).flatten(-2), ignore)


class CodesOfWholeBytes(Codebook):
    def encode(self, x, ignore=None):
        return Codes(unpack(super().encode(x, ignore).packed, self.code_bits, self.places))

    def decode(self, codes):
        return super().decode(Codes(pack(codes.packed, self.code_bits)))


class HeadsPackedApart(Codebook):
    """Each head's codes fill up their last byte."""

    def encode(self, x, ignore=None):
        q = unpack(super().encode(x, ignore).packed, self.code_bits, self.places)[:, 0]  # (B, T, places)
        return Codes(pack(q.unflatten(-1, (x.shape[1], -1)).transpose(1, 2), self.code_bits))

    def decode(self, codes):
        heads = codes.packed.shape[1]
        q = unpack(codes.packed, self.code_bits, self.places // heads)  # (B, Hkv, T, d/n)
        return super().decode(Codes(pack(q.transpose(1, 2).flatten(2), self.code_bits)[:, None]))


class CalibratesOnTheLastWindow(Codebook):
    def collect(self, step, rows, kept, gradient):
        self.rows, self.weights = [], []
        super().collect(step, rows, kept, gradient)


class SwapsTheBooksOfKeysAndValues(CQ):
    def restore(self, tables):
        other = {"k": "v", "v": "k"}
        swapped = {}
        for name, table in tables.items():
            layer, kind, what = name.split(".")
            swapped[f"{layer}.{other[kind]}.{what}"] = table
        super().restore(swapped)


FEW = {"settings": (("vq", "d4m4"),)}

MUTANTS = [
    Mutant(CQ, check_cache_holds_the_expected_rows, HeadsPackedInAnotherOrder, PAPER),
    Mutant(CQ, check_cache_holds_the_expected_rows, BooksOfAnotherHead, PAPER),
    Mutant(CQ, check_cache_holds_the_expected_rows, LastPlaceDropped, PAPER),
    Mutant(CQ, check_cache_holds_the_expected_rows, LastPlaceDropped, {"heads_per_kv": 4}),
    Mutant(CQ, check_cache_holds_the_expected_rows, PlacesBeforeHeads, PAPER),
    Mutant(CQ, check_cache_holds_the_expected_rows, EveryOtherChannel, PAPER),
    Mutant(CQ, check_bytes, CodesOfWholeBytes),
    Mutant(CQ, check_bytes, HeadsPackedApart),
    Mutant(CQ, check_calibration_order_is_no_matter, CalibratesOnTheLastWindow, FEW),
    Mutant(CQ, check_what_is_calibrated_can_be_restored, SwapsTheBooksOfKeysAndValues),
    Mutant(CQ, check_cache_holds_the_expected_rows, KeysLeftUnrotated),
]
