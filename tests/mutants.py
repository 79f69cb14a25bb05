"""Methods and caches that are wrong on purpose, each with the check that has to notice.

`real` passes `check` in `cell`, and the same cell with the wrong method or cache fails it. A mutant that
survives is a hole in the tests. `CODEC_MUTANTS` and `PACK_MUTANTS` do the same for test_codecs.py.
"""
from dataclasses import dataclass, field

import torch

from tinykv import codecs
from tinykv.cache import KVCache, LayerCache, Part
from tinykv.calibrate import kv_ranges
from tinykv.codecs import Affine, Codes
from tinykv.methods.fp16 import FP16
from tinykv.methods.kvsink import KVSink
from tinykv.methods.pfn import PFN
from tinykv.methods.rtn import RTN


@dataclass(frozen=True)
class Mutant:
    real: type
    check: str  # the name of a function of test_methods.py
    cls: type | None = None  # in place of `real`
    cache: type | None = None  # in place of KVCache
    cell: dict = field(default_factory=dict)

    @property
    def name(self):
        return f"{(self.cls or self.cache).__name__}-{self.check.removeprefix('check_')}"


# ---- wrong methods

class NoOpCodec(RTN):
    """Codes nothing: perplexity would be fp16's at any number of bits."""
    def encode(self, layer, kind, rows, skip):
        return Codes(rows.clone())

    def decode(self, layer, kind, codes):
        return codes.q


class SwappedScaleAndZero(RTN):
    def encode(self, layer, kind, rows, skip):
        codes = super().encode(layer, kind, rows, skip)
        return Codes(codes.q, codes.zero.half(), codes.scale.short())


class SwappedKeysAndValues(RTN):
    def encode(self, layer, kind, rows, skip):
        return super().encode(layer, {"k": "v", "v": "k"}[kind], rows, skip)

    def decode(self, layer, kind, codes):
        return super().decode(layer, {"k": "v", "v": "k"}[kind], codes)


class Unpacked(RTN):
    """Codes of 2 and 3 bits, a whole byte each."""
    def encode(self, layer, kind, rows, skip):
        codes = super().encode(layer, kind, rows, skip)
        bits = self.k_bits if kind == "k" else self.v_bits
        return Codes(codecs.unpack(codes.q, bits, rows.shape[-1]), codes.scale, codes.zero)

    def decode(self, layer, kind, codes):
        bits = self.k_bits if kind == "k" else self.v_bits
        return super().decode(layer, kind, Codes(codecs.pack(codes.q, bits), codes.scale, codes.zero))


class Remembers(RTN):
    """Holds what it has seen of one text for the next: the range only grows."""
    largest = 0

    def encode(self, layer, kind, rows, skip):
        self.largest = max(self.largest, rows.abs().max().item())
        return super().encode(layer, kind, (rows.float() + self.largest * 1e-2).to(rows.dtype), skip)


class RangeOverTheBatch(RTN):
    """One grid for all sequences."""
    def encode(self, layer, kind, rows, skip):
        codes = super().encode(layer, kind, rows, skip)
        if codes.scale is None:
            return codes
        joined = rows.transpose(0, 2).transpose(2, 1).flatten(0, 1)  # only its extremes matter
        high = joined.amax(0)[None, :, None].expand_as(rows[:, :, :1])
        rows = torch.where(rows == rows.amax(2, keepdim=True), high, rows)
        return super().encode(layer, kind, rows, skip)


class PinsOffByOne(PFN):
    def keep(self, cache, state):
        index = super().keep(cache, state)
        return (index + 1).clamp(max=cache.length - 1)


class PinsOnlyInTheFirstLayer(PFN):
    def keep(self, cache, state):
        return super().keep(cache, state) if cache.layer == 0 else None


class PinnedRowsStretchTheRange(PFN):
    def encode(self, layer, kind, rows, skip):
        return super().encode(layer, kind, rows, None)


class CalibratesWithKeptTokens(PFN):
    def calibrate(self, model, windows, progress=None):
        blind = RTN(model.config, self.k_bits, self.v_bits, self.scheme.name, None, self.rope)
        self.scheme.fit(kv_ranges(model, blind, windows))


class CalibratesOnTheLastWindow(PFN):
    def calibrate(self, model, windows, progress=None):
        super().calibrate(model, windows[-1:], progress)


class CalibratesKeysBeforeRope(RTN):
    """Ranges of the keys before RoPE for keys that are stored after it."""
    def calibrate(self, model, windows, progress=None):
        blind = RTN(model.config, self.k_bits, self.v_bits, self.scheme.name, None, "pre")
        self.scheme.fit(kv_ranges(model, blind, windows))


class KeepsFromTheEmergenceLayerOn(KVSink):
    def keep(self, cache, state):
        if cache.layer == self.layer:  # S of this layer's own tokens is not known yet: take the first
            return torch.arange(min(self.preserve, cache.length)).expand(len(cache.k.recent), 1, -1)
        return super().keep(cache, state)


class NextChannel(KVSink):
    def observe(self, state, layer, hidden, start):
        return super().observe(state, layer, hidden.roll(1, -1), start)


class OneIndexForTheBatch(KVSink):
    """The first sequence's sinks, in all sequences."""
    def keep(self, cache, state):
        index = super().keep(cache, state)
        return None if index is None else index[:1].expand_as(index)


class SinksOfTheFirstChunk(KVSink):
    """Chosen once and never again."""
    def observe(self, state, layer, hidden, start):
        return super().observe(state, layer, hidden, start) if start == 0 else state


class PositionsFromTheChunk(KVSink):
    """Counts a sink's position from the start of its chunk."""
    def observe(self, state, layer, hidden, start):
        return super().observe(state, layer, hidden, 0)


class TiesToTheLater(KVSink):
    def observe(self, state, layer, hidden, start):
        state = super().observe(state, layer, hidden, start)
        if layer != self.layer:
            return state
        return state[0], state[1].where(state[0] > state[0][:, -1:], state[1].amax(1, keepdim=True))


class SmallestScores(KVSink):
    def observe(self, state, layer, hidden, start):
        return super().observe(state, layer, 1 / (hidden.abs() + 1), start)


class SignedScores(KVSink):
    def observe(self, state, layer, hidden, start):
        return super().observe(state, layer, hidden.clamp(min=0), start)


class ForgetsOldScores(KVSink):
    def observe(self, state, layer, hidden, start):
        return super().observe(None if layer == self.layer else state, layer, hidden, start)


class AnyLayer(KVSink):
    def observe(self, state, layer, hidden, start):
        return super().observe(state, self.layer, hidden, start)


TOP_K_MUTANTS = [NextChannel, SinksOfTheFirstChunk, PositionsFromTheChunk, TiesToTheLater, SmallestScores,
                 SignedScores, ForgetsOldScores, AnyLayer]


# ---- wrong caches

class WithParts(KVCache):
    """A cache whose layers, or their parts, are of another class."""
    layer_class, part_class = LayerCache, Part

    def reset(self):
        super().reset()
        self.layers = [self.layer_class(x.layer, x.method, x.rope, x.protocol) for x in self.layers]
        for x in self.layers:
            x.k, x.v = self.part_class(x.method, x.layer, "k"), self.part_class(x.method, x.layer, "v")


class UnpinnedPart(Part):
    def read(self):
        index, self.index = self.index, None
        rows = super().read()
        self.index = index
        return rows


class PinsIgnoredOnReading(WithParts):
    part_class = UnpinnedPart


class SharedPinsPart(Part):
    def read(self):
        """Every sequence gets the first one's pinned rows, though in its own positions."""
        own = self.pinned
        self.pinned = None if own is None else own[:1].expand_as(own)
        rows = super().read()
        self.pinned = own
        return rows


class PinnedRowsOfTheFirstSequence(WithParts):
    part_class = SharedPinsPart


class StalePart(Part):
    def pin(self, index, first):
        """Takes every row from among the recent ones, also those that were pinned long ago."""
        self.index = None
        super().pin(index, first)


class PinsTakenFromRecent(WithParts):
    part_class = StalePart


class KeepsDecodedPart(Part):
    def code(self, n, first):
        super().code(n, first)
        self.copy = self.read()

    def tensors(self):
        held = super().tensors()
        return held | {"coded": [*held["coded"], *([self.copy] if self.coded else [])]}


class KeepsADecodedCopy(WithParts):
    part_class = KeepsDecodedPart


class HiddenViewPart(Part):
    def code(self, n, first):
        """Holds on to the coded rows behind a view of the recent ones."""
        whole = self.recent
        super().code(n, first)
        self.recent = whole[:, :, n:]


class HoldsRowsBehindAView(WithParts):
    part_class = HiddenViewPart


class LateLayer(LayerCache):
    def code(self, n, state):
        super().code(n - 1 if self.protocol == "stream" else n, state)


class FlushesOneTooFew(WithParts):
    layer_class = LateLayer


class EarlyLayer(LayerCache):
    def code(self, n, state):
        """With every block, all that is recent but the newest token."""
        super().code(max(n, self.length - self.first - 1), state)


class FlushesTooMuch(WithParts):
    layer_class = EarlyLayer


class RaggedLayer(LayerCache):
    def code(self, n, state):
        super().code(self.length - self.first - self.method.recent, state)


class FlushesPartialBlocks(WithParts):
    layer_class = RaggedLayer


class EagerLayer(LayerCache):
    def append(self, k, v, positions):
        """A stream that codes before it reads: a block's range is known to its first token's query."""
        super().append(k, v, positions)
        due = self.length - self.first - self.method.recent
        if self.protocol == "stream" and due >= self.method.block:
            self.code(due - due % self.method.block, None)


class StreamCodesFirst(WithParts):
    layer_class = EagerLayer


class LazyLayer(LayerCache):
    def update(self, q, k, v, positions, state):
        if self.protocol == "stream":
            return super().update(q, k, v, positions, state)
        self.append(k, v, positions)
        K, V = self.read()
        self.code(self.length, state)
        return K.to(k.dtype), V.to(v.dtype)


class PaperReadsFirst(WithParts):
    layer_class = LazyLayer


class UnrotatedLayer(LayerCache):
    def read(self):
        return self.k.read(), self.v.read()


class PreRopeKeysLeftUnrotated(WithParts):
    layer_class = UnrotatedLayer


class ShiftedLayer(LayerCache):
    def append(self, k, v, positions):
        super().append(k, v, positions - positions[0])


class ChunkPositionsFromZero(WithParts):
    layer_class = ShiftedLayer


class ExactIn32Bits(WithParts):
    """Rows of the model's own 32 bits in a cache that says 16."""
    class layer_class(LayerCache):
        def append(self, k, v, positions):
            self.k.append(self.rope.rotate(k, positions) if self.method.rope == "post" else k)
            self.v.append(v)
            self.length += k.shape[2]


class AlwaysHalf(WithParts):
    """fp16 also where the model runs in bf16."""
    class layer_class(LayerCache):
        def append(self, k, v, positions):
            super().append(k.half(), v.half(), positions)


class ResetKeepsState(KVCache):
    def reset(self):
        state = getattr(self, "state", None)
        super().reset()
        self.state = state


class ResetKeepsLayers(KVCache):
    def reset(self):
        layers = getattr(self, "layers", None)
        super().reset()
        if layers:
            self.layers[0] = layers[0]


class ReadsOn(KVCache):
    def update(self, layer, q, k, v, positions):
        return self.layers[layer].update(q, k, v, positions, self.state)


class ForgetsTheNewestState(KVCache):
    """The choice of a chunk is made known one chunk late."""
    def observe(self, layer, hidden):
        start = self.layers[layer].length - hidden.shape[1]
        if start == 0 or layer != self.method.layer:
            super().observe(layer, hidden)
        else:
            self.late = hidden


ROWS, SEEN, SIZE = "check_cache_holds_the_expected_rows", "check_attention_sees_the_cache", "check_bytes"
TOKEN, CHANNEL = {"scheme": "token-dynamic"}, {"scheme": "channel-dynamic"}
T_STATIC, C_STATIC = {"scheme": "token-static"}, {"scheme": "channel-static"}
PAPER, DOUBLE = {"protocol": "paper"}, {"dtype": torch.float64}

MUTANTS = [
    Mutant(RTN, ROWS, NoOpCodec, cell=TOKEN),
    Mutant(RTN, "check_low_bits_matter", NoOpCodec, cell=TOKEN | PAPER),
    Mutant(RTN, "check_low_bits_matter", NoOpCodec, cell=TOKEN),
    Mutant(RTN, "check_the_trap", NoOpCodec, cell=TOKEN),
    Mutant(RTN, "check_sixteen_bits_of_one_kind", NoOpCodec, cell=TOKEN | PAPER),
    Mutant(RTN, ROWS, SwappedScaleAndZero, cell=CHANNEL),
    Mutant(RTN, ROWS, SwappedKeysAndValues, cell=TOKEN),
    Mutant(RTN, "check_sixteen_bits_of_one_kind", SwappedKeysAndValues, cell=TOKEN | PAPER),
    Mutant(RTN, SIZE, Unpacked, cell=TOKEN),
    Mutant(RTN, "check_same_twice_and_after_reset", Remembers, cell=TOKEN | PAPER),
    Mutant(RTN, "check_batch_rows_are_independent", RangeOverTheBatch, cell=TOKEN | PAPER | DOUBLE),
    Mutant(RTN, ROWS, RangeOverTheBatch, cell=CHANNEL),
    Mutant(PFN, ROWS, PinsOffByOne, cell=TOKEN),
    Mutant(PFN, ROWS, PinsOnlyInTheFirstLayer, cell=C_STATIC | PAPER),
    Mutant(PFN, "check_keeping_everything_is_exact", PinsOffByOne, cell=TOKEN | PAPER),
    Mutant(PFN, "check_keeping_everything_is_exact", PinsOnlyInTheFirstLayer, cell=TOKEN | PAPER),
    Mutant(PFN, "check_placeholders_do_not_matter", PinnedRowsStretchTheRange, cell=CHANNEL),
    Mutant(PFN, ROWS, PinnedRowsStretchTheRange, cell=CHANNEL | PAPER),
    Mutant(PFN, "check_static_ranges", CalibratesWithKeptTokens, cell=C_STATIC),
    Mutant(PFN, "check_static_ranges", CalibratesWithKeptTokens, cell=T_STATIC),
    Mutant(PFN, "check_static_ranges", CalibratesOnTheLastWindow, cell=T_STATIC),
    Mutant(PFN, "check_calibration_order_is_no_matter", CalibratesOnTheLastWindow, cell=T_STATIC),
    Mutant(RTN, "check_static_ranges", CalibratesKeysBeforeRope, cell=T_STATIC),
    Mutant(KVSink, ROWS, KeepsFromTheEmergenceLayerOn, cell=TOKEN),
    Mutant(KVSink, "check_keeping_everything_is_exact", KeepsFromTheEmergenceLayerOn, cell=TOKEN | PAPER),
    Mutant(KVSink, ROWS, NextChannel, cell=TOKEN | PAPER),
    Mutant(KVSink, ROWS, OneIndexForTheBatch, cell=TOKEN | PAPER),
    Mutant(KVSink, "check_batch_rows_are_independent", OneIndexForTheBatch, cell=TOKEN | DOUBLE),
    Mutant(KVSink, ROWS, SinksOfTheFirstChunk, cell=TOKEN),
    Mutant(KVSink, "check_chunks_equal_single_tokens", SinksOfTheFirstChunk, cell=TOKEN | DOUBLE),
    Mutant(KVSink, ROWS, PositionsFromTheChunk, cell=TOKEN),
    Mutant(KVSink, ROWS, ForgetsOldScores, cell=TOKEN),
    Mutant(KVSink, ROWS, cache=ForgetsTheNewestState, cell=TOKEN),
    Mutant(PFN, ROWS, cache=PinsIgnoredOnReading, cell=TOKEN),
    Mutant(PFN, "check_placeholders_do_not_matter", cache=PinsIgnoredOnReading, cell=CHANNEL | PAPER),
    Mutant(PFN, "check_batch_rows_are_independent", cache=PinnedRowsOfTheFirstSequence, cell=TOKEN | DOUBLE),
    Mutant(PFN, ROWS, cache=PinsTakenFromRecent, cell=TOKEN),
    Mutant(RTN, SIZE, cache=KeepsADecodedCopy, cell=TOKEN),
    Mutant(FP16, SIZE, cache=HoldsRowsBehindAView, cell={"batch": 1, "sharing": 4, "recent": 5}),
    Mutant(RTN, ROWS, cache=FlushesOneTooFew, cell=TOKEN),
    Mutant(RTN, SIZE, cache=FlushesOneTooFew, cell=TOKEN),
    Mutant(RTN, ROWS, cache=FlushesTooMuch, cell=TOKEN | {"recent": 5}),
    Mutant(RTN, "check_uneven_chunks", cache=FlushesPartialBlocks, cell=CHANNEL),
    Mutant(RTN, SEEN, cache=StreamCodesFirst, cell=TOKEN),
    Mutant(RTN, "check_no_future_leak", cache=StreamCodesFirst, cell=CHANNEL),
    Mutant(RTN, "check_low_bits_matter", cache=StreamCodesFirst, cell=TOKEN),
    Mutant(RTN, "check_the_trap", cache=StreamCodesFirst, cell=TOKEN),
    Mutant(RTN, "check_chunks_equal_single_tokens", cache=StreamCodesFirst, cell=TOKEN | DOUBLE),
    Mutant(RTN, SEEN, cache=PaperReadsFirst, cell=TOKEN | PAPER),
    Mutant(RTN, "check_the_trap", cache=PaperReadsFirst, cell=TOKEN),
    Mutant(RTN, "check_sixteen_bits_are_fp16", cache=PreRopeKeysLeftUnrotated, cell=TOKEN | PAPER),
    Mutant(RTN, ROWS, cache=PreRopeKeysLeftUnrotated, cell=C_STATIC),
    Mutant(FP16, "check_uneven_chunks_of_exact_rows", cache=ChunkPositionsFromZero, cell=DOUBLE),
    Mutant(RTN, ROWS, cache=ChunkPositionsFromZero, cell=TOKEN),
    Mutant(FP16, SIZE, cache=ExactIn32Bits),
    Mutant(FP16, "check_sixteen_bit_models_cache_what_they_compute", cache=AlwaysHalf, cell=PAPER),
    Mutant(KVSink, "check_same_twice_and_after_reset", cache=ResetKeepsState, cell=TOKEN),
    Mutant(RTN, "check_same_twice_and_after_reset", cache=ResetKeepsLayers, cell=TOKEN),
    Mutant(RTN, "check_paper_refuses_a_second_forward", cache=ReadsOn, cell=TOKEN | PAPER),
    Mutant(RTN, "check_generation", cache=FlushesOneTooFew, cell=TOKEN),
]


# ---- wrong codecs

class RoundsHalfUp(Affine):
    def encode(self, x, skip=None):
        return super().encode(x.float() + 1e-4, skip)


class OneLevelTooMany(Affine):
    """2**bits steps between the smallest and the largest value: the largest does not fit."""
    def __init__(self, *settings):
        super().__init__(*settings)
        self.levels += 1


class SkipIgnored(Affine):
    def _range(self, g, T, skip):
        return super()._range(g, T, None)


class FillCounts(Affine):
    """The zeros that fill up the last group stretch its range."""
    def _range(self, g, T, skip):
        lo, hi = super()._range(g, T, skip)
        if self.axis == "channel" and g.shape[2] * g.shape[3] > T:
            lo[:, :, -1].clamp_(max=0)
            hi[:, :, -1].clamp_(min=0)
        return lo, hi


class NoFloor(Affine):
    def _grid(self, lo, hi):
        scale = ((hi - lo) / self.levels).half()
        return scale, lo.half() if self.formula == "offset" else (-lo / scale.float()).round().short()


class ClippedZero(Affine):
    """The papers' formula to the letter: a constant group of 1.0 comes back as 0.1."""
    def _grid(self, lo, hi):
        scale = ((hi - lo) / self.levels).clamp(1e-5, 1e4).half()
        return scale, (-lo / scale.float()).clamp(-1e4, 1e4).round().short()


class RoundsTheGridTooLate(Affine):
    """Codes from the exact grid, metadata rounded only when it is stored."""
    def _grid(self, lo, hi):
        return ((hi - lo) / self.levels).clamp(1e-5, 6e4), lo

    def encode(self, x, skip=None):
        codes = super().encode(x, skip)
        return Codes(codes.q, codes.scale.half(), codes.zero.half())


class SwapsScaleAndZero(Affine):
    def decode(self, codes):
        return super().decode(Codes(codes.q, codes.zero.half(), codes.scale.to(codes.zero.dtype)))


class OneGridForAllHeads(Affine):
    def fix(self, lo, hi):
        super().fix(lo.amin(0, keepdim=True).expand_as(lo), hi.amax(0, keepdim=True).expand_as(hi))


class OtherAxis(Affine):
    def __init__(self, bits, width, axis, *settings):
        super().__init__(bits, width, {"token": "channel", "channel": "token"}[axis], *settings)


class LosesMetadata(Affine):
    class Codes(Codes):
        def append(self, other):
            return type(self)(torch.cat([self.q, other.q], dim=2), self.scale, self.zero)

    def encode(self, x, skip=None):
        codes = super().encode(x, skip)
        return self.Codes(codes.q, codes.scale, codes.zero)


#                 codec, name of a function of test_codecs.py, its other arguments
CODEC_MUTANTS = [
    (RoundsHalfUp, "check_half_to_even", ("offset",)),
    (RoundsHalfUp, "check_half_to_even", ("integer-zero",)),
    (OneLevelTooMany, "check_formula", (2, "token", "offset", 8, False)),
    (OneLevelTooMany, "check_formula", (codecs.TERNARY, "token", "integer-zero", 8, False)),
    (SkipIgnored, "check_skipped_rows_do_not_count", ("integer-zero",)),
    (SkipIgnored, "check_formula", (2, "channel", "offset", 8, False)),
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
    return codecs.pack(codes.flip(-1), bits)


def unpacks_high_first(packed, bits, n):
    return codecs.unpack(packed, bits, n).flip(-1)


def packs_whole_words(codes, bits):
    """As if rows were filled up to whole words: more bytes than the bits need."""
    return torch.nn.functional.pad(codecs.pack(codes, bits), (0, 1))


def packs_three_levels_in_two_bits(codes, bits):
    return codecs.pack(codes, 2 if bits == codecs.TERNARY else bits)


def unpacks_three_levels_from_two_bits(packed, bits, n):
    return codecs.unpack(packed, 2 if bits == codecs.TERNARY else bits, n)


PACK_MUTANTS = [
    (packs_high_first, unpacks_high_first, 2),
    (packs_whole_words, codecs.unpack, 3),
    (packs_three_levels_in_two_bits, unpacks_three_levels_from_two_bits, codecs.TERNARY),
]
