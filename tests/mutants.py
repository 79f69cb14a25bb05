"""Methods and caches that are wrong on purpose, each with the check that has to notice.

`real` passes `check` in `cell`, and the same cell with the wrong method or cache fails it. A mutant that
survives is a hole in the tests. `CODEC_MUTANTS` and `PACK_MUTANTS` do the same for test_codecs.py.
"""
import copy
from dataclasses import dataclass, field

import torch

from tinykv import anchors, codecs
from tinykv.cache import KVCache, LayerCache, Part
from tinykv.codecs import Affine, Codebook, Codes, NonUniform, SparseCodes
from tinykv.methods.antkv import AnTKV
from tinykv.methods.cq import CQ
from tinykv.methods.fp16 import FP16
from tinykv.methods.intactkv import IntactKV, Prefix, exact_rows
from tinykv.methods.kivi import KIVI
from tinykv.methods.kvquant import KVQuant
from tinykv.methods.kvsink import KVSink
from tinykv.methods.ott import OTT
from tinykv.methods.pfn import PFN
from tinykv.methods.rtn import RTN
from tinykv.methods.skvq import SKVQ, ClippedGroups
from tinykv.weights import RTN as RTNWeights
from tinykv.weights import quantize


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
    def keep(self, cache, kind, n, state):
        index = super().keep(cache, kind, n, state)
        return (index + 1).clamp(max=cache.length - 1)


class PinsOnlyInTheFirstLayer(PFN):
    def keep(self, cache, kind, n, state):
        return super().keep(cache, kind, n, state) if cache.layer == 0 else None


class PinnedRowsStretchTheRange(PFN):
    def encode(self, layer, kind, rows, skip):
        return super().encode(layer, kind, rows, None)


class CalibratesWithKeptTokens(PFN):
    def calibrate(self, model, windows, progress=None):
        blind = RTN(model.config, self.k_bits, self.v_bits, self.scheme.name, rope=self.rope)
        self.scheme.calibrate(model, blind, windows)


class CalibratesOnTheLastWindow(PFN):
    def calibrate(self, model, windows, progress=None):
        super().calibrate(model, windows[-1:], progress)


class CalibratesKeysBeforeRope(RTN):
    """Ranges of the keys before RoPE for keys that are stored after it."""
    def calibrate(self, model, windows, progress=None):
        blind = RTN(model.config, self.k_bits, self.v_bits, self.scheme.name, rope="pre")
        self.scheme.calibrate(model, blind, windows)


class KeepsFromTheEmergenceLayerOn(KVSink):
    def keep(self, cache, kind, n, state):
        if cache.layer == self.layer:  # S of this layer's own tokens is not known yet: take the first
            return torch.arange(min(self.preserve, cache.length)).expand(len(cache.k.recent), 1, -1)
        return super().keep(cache, kind, n, state)


class NextChannel(KVSink):
    def observe(self, state, layer, hidden, start):
        return super().observe(state, layer, hidden.roll(1, -1), start)


class OneIndexForTheBatch(KVSink):
    """The first sequence's sinks, in all sequences."""
    def keep(self, cache, kind, n, state):
        index = super().keep(cache, kind, n, state)
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


# ---- wrong methods with a window, a pool, learned groups or learned levels

class WindowOffByOne(KIVI):
    def __init__(self, config, **settings):
        super().__init__(config, **settings)
        self.recent += 1


class ValuesAtTheKeysPace(KIVI):
    def __init__(self, config, v_block=None, **settings):
        super().__init__(config, **settings)


class KeysAtTheValuesPace(KIVI):
    def __init__(self, config, v_block=None, **settings):
        super().__init__(config, **settings)
        self.block = v_block or self.block


class KeysGroupedByChannels(KIVI):
    """Of one token, as transformers' cache of that name does."""
    def __init__(self, config, group_size=32, **settings):
        super().__init__(config, group_size=group_size, **settings)
        for layer in self.codecs:
            layer["k"] = Affine(self.k_bits, config.head_dim, "token", group_size)


class ChunksOfWholeBlocks(KIVI):
    """A stream that arrives too coarsely: values wait for the keys."""
    @property
    def chunk(self):
        return self.block


class KeepsTheLargest(OTT):
    def _score(self, keys):
        return -super()._score(keys)


class ForgetsTheEvicted(OTT):
    def keep(self, cache, kind, n, state):
        index = super().keep(cache, kind, n, state)
        return None if index is None else index[..., :self.preserve]


class ElectsWithoutThePool(OTT):
    """The smallest of the new tokens, whatever is in the pool; what was there is let go."""
    def keep(self, cache, kind, n, state):
        if kind == "v" or cache.layer < self.skip_layers or cache.k.index is None:
            return super().keep(cache, kind, n, state)
        best = self._score(cache.k.recent[:, :, :n]).sort(dim=-1, stable=True).indices[..., :self.preserve]
        return torch.cat([cache.k.first + best, cache.k.index[..., :self.extra_pool]], -1)


class PositionsFromTheBlock(OTT):
    """A token's number in its block, for its position."""
    def keep(self, cache, kind, n, state):
        first, cache.k.first = cache.k.first, 0
        index = super().keep(cache, kind, n, state)
        cache.k.first = first
        return index


class NeverFull(OTT):
    def __init__(self, config, extra_pool=32, **settings):
        super().__init__(config, extra_pool=1000, **settings)


class FullBeforeItIs(OTT):
    """Admits none where not all fit."""
    def keep(self, cache, kind, n, state):
        index, old = super().keep(cache, kind, n, state), cache.k.index
        if kind == "v" or index is None or old is None:
            return index
        own, self.extra_pool = self.extra_pool, 1000
        whole = super().keep(cache, kind, n, state)
        self.extra_pool = own
        return index if torch.equal(whole, index) else old


class TiesToTheNewcomer(OTT):
    def _score(self, keys):
        score = super()._score(keys)
        return score - 1e-3 if keys.shape[2] > self.preserve else score


class ScoresOfEuclid(OTT):
    """The length of a key in place of its sum of magnitudes."""
    def _score(self, keys):
        return keys.float().norm(dim=-1)


class PoolsInAllLayers(OTT):
    def __init__(self, config, skip_layers=2, **settings):
        super().__init__(config, skip_layers=0, **settings)


class OneHeadForAll(OTT):
    """The first head's pool, in all heads."""
    def keep(self, cache, kind, n, state):
        index = super().keep(cache, kind, n, state)
        return None if index is None else index[:, :1].expand_as(index)


class OneHeadForTheLayer(OTT):
    """A layer's pool by the scores of its first head."""
    def _score(self, keys):
        return super()._score(keys[:, :1] if self.scope == "layer" else keys)


class KeptTokensStretchTheRange(OTT):
    def encode(self, layer, kind, rows, skip):
        return super().encode(layer, kind, rows, None)


POOL_MUTANTS = [KeepsTheLargest, ForgetsTheEvicted, ElectsWithoutThePool, PositionsFromTheBlock, NeverFull,
                FullBeforeItIs, TiesToTheNewcomer, PoolsInAllLayers, OneHeadForAll]


class WithGroups(SKVQ):
    """SKVQ whose codecs are of another class."""
    codec = ClippedGroups

    def __init__(self, config, **settings):
        super().__init__(config, **settings)
        for c in (c for layer in self.codecs for c in layer.values() if isinstance(c, ClippedGroups)):
            c.__class__ = self.codec


class OrderNotUndone(WithGroups):
    """Channels come back in the order of their groups."""
    class codec(ClippedGroups):
        def decode(self, codes):
            x = super().decode(codes).transpose(1, 2).flatten(2)[..., self.order]  # (B, T, h)
            return x.unflatten(-1, (-1, self.width)).transpose(1, 2)


class MetadataRoundedTooLate(WithGroups):
    """Codes from the exact grid, as the released code computes them."""
    class codec(ClippedGroups):
        def codes(self, rows, h, z):
            lo, hi = self.ranges(rows)
            middle, alpha = self.centre * (lo + hi) / 2, self.alpha.float()
            lo, hi = (alpha * end + (1 - alpha) * middle for end in (lo, hi))
            return super().codes(rows, ((hi - lo) / self.levels).clamp(self.floor), lo)


class ClipIgnored(WithGroups):
    class codec(ClippedGroups):
        def encode(self, x, skip=None):
            own, self.alpha = self.alpha, torch.ones_like(self.alpha)
            codes = super().encode(x, skip)
            self.alpha = own
            return codes


class ClipsTowardsZero(WithGroups):
    """Also the groups that were to shrink around their middle."""
    class codec(ClippedGroups):
        def encode(self, x, skip=None):
            own, self.centre = self.centre, torch.zeros_like(self.centre)
            codes = super().encode(x, skip)
            self.centre = own
            return codes


class ScalesOfSixteenBits(WithGroups):
    """Whatever the metadata should be."""
    class codec(ClippedGroups):
        def grid(self, lo, hi, alpha, centre):
            return tuple(t.half() for t in super().grid(lo, hi, alpha, centre))


class WindowIgnored(SKVQ):
    def __init__(self, config, recent=128, **settings):
        super().__init__(config, recent=0, **settings)


class FirstTokensIgnored(SKVQ):
    def keep(self, cache, kind, n, state):
        return None


class FirstKeysOnly(SKVQ):
    def keep(self, cache, kind, n, state):
        return super().keep(cache, kind, n, state) if kind == "k" else None


class WithLevels(KVQuant):
    """KVQuant whose codecs are of another class."""
    codec = NonUniform

    def __init__(self, config, **settings):
        super().__init__(config, **settings)
        for c in (c for layer in self.codecs for c in layer.values() if isinstance(c, NonUniform)):
            c.__class__ = self.codec


class OutliersNotPutBack(WithLevels):
    class codec(NonUniform):
        def decode(self, codes):
            return super().decode(SparseCodes(codes.q, codes.scale, codes.zero, codes.end, codes.value[:0]))


class OutliersOffByAHead(WithLevels):
    class codec(NonUniform):
        def decode(self, codes):
            channel = (codes.channel + self.width) % self.channels
            return super().decode(SparseCodes(codes.q, codes.scale, codes.zero, codes.end, codes.value, channel))


class OutliersOfAnotherSequence(WithLevels):
    """As if the lists held one sequence after the other."""
    class codec(NonUniform):
        def decode(self, codes):
            B, _, T, _ = codes.end.shape
            end = codes.end.flatten().view(T, B).T[:, None, :, None]
            return super().decode(SparseCodes(codes.q, codes.scale, codes.zero, end, codes.value, codes.channel))


class NewestOutliersFirst(WithLevels):
    """A block's outliers go before those of earlier blocks."""
    class Sparse(SparseCodes):
        def append(self, other):
            codes = super().append(other)
            codes.value = torch.cat([other.value, self.value])
            return codes

    class codec(NonUniform):
        def encode(self, x, skip=None):
            return NewestOutliersFirst.Sparse(**vars(super().encode(x, skip)))


class KeptTokensHaveOutliers(WithLevels):
    class codec(NonUniform):
        def encode(self, x, skip=None):
            return super().encode(x, None)


class LevelsBelow(WithLevels):
    """The largest level that is not above, in place of the nearest."""
    class codec(NonUniform):
        def encode(self, x, skip=None):
            codes, (normal, _, _, _) = super().encode(x, skip), self.normalize(x, skip)
            code = torch.bucketize(normal, self.levels.float()[1:])  # (B, T, h)
            codes.q = codecs.pack(code, self.bits)[:, None]
            return codes


class MidAndHalfSwapped(WithLevels):
    class codec(NonUniform):
        def decode(self, codes):
            if self.mid is not None:
                return super().decode(codes)
            return super().decode(SparseCodes(**(vars(codes) | {"scale": codes.zero, "zero": codes.scale})))


class RangeOfOutliersToo(WithLevels):
    """A value's range is that of the whole token."""
    class codec(NonUniform):
        def _range_of_tokens(self, x, skip):
            _, _, out = super()._range_of_tokens(x, skip)
            own, self.outliers = self.outliers, 0
            mid, half, _ = super()._range_of_tokens(x, skip)
            self.outliers = own
            return mid, half, out


class OutliersOnOneSide(WithLevels):
    """The largest numbers, in place of those far from the median."""
    class codec(NonUniform):
        def _range_of_tokens(self, x, skip):
            return super()._range_of_tokens(x.clamp(min=0), skip)


class LearnsFromKeptTokens(KVQuant):
    def calibrate(self, model, windows, progress=None):
        preserve, self.preserve = self.preserve, 0
        super().calibrate(model, windows, progress)
        self.preserve = preserve


class RestoresTheFirstLayer(KVQuant):
    """In all layers."""
    def restore(self, learned):
        super().restore({name: learned["0" + name[1:]] for name in learned})


# ---- wrong codebooks

class WithBooks(CQ):
    """CQ whose codecs are of another class."""
    codec = Codebook

    def __init__(self, config, **settings):
        super().__init__(config, **settings)
        for c in (c for layer in self.codecs for c in layer.values()):
            c.__class__ = self.codec


class HeadsPackedInAnotherOrder(WithBooks):
    """The last head's codes come first, and are read as the first one's."""
    class codec(Codebook):
        def encode(self, x, skip=None):
            number = codecs.unpack(super().encode(x, skip).q, self.bits, self.places)  # (B, 1, T, places)
            number = number.unflatten(-1, (x.shape[1], -1)).flip(-2).flatten(-2)
            return Codes(codecs.pack(number, self.bits))


class BooksOfAnotherHead(WithBooks):
    """The nearest centroid is looked for in the next head's book."""
    class codec(Codebook):
        def encode(self, x, skip=None):
            own, self.centroids = self.centroids, self.centroids.roll(self.width // self.n, 0)
            codes = super().encode(x, skip)
            self.centroids = own
            return codes


class LastPlaceDropped(WithBooks):
    class codec(Codebook):
        def encode(self, x, skip=None):
            number = codecs.unpack(super().encode(x, skip).q, self.bits, self.places)  # (B, 1, T, places)
            number[..., -1] = 0
            return Codes(codecs.pack(number, self.bits))


class PlacesBeforeHeads(WithBooks):
    """Books in the order of places, then heads."""
    class codec(Codebook):
        def decode(self, codes):
            own, heads = self.centroids, self.places * self.n // self.width
            self.centroids = own.unflatten(0, (heads, -1)).transpose(0, 1).flatten(0, 1)
            x = super().decode(codes)
            self.centroids = own
            return x


class EveryOtherChannel(WithBooks):
    """Channels i, i + d/n, .. share a code, in place of neighbours."""
    class codec(Codebook):
        def encode(self, x, skip=None):
            return super().encode(x.unflatten(-1, (self.n, -1)).transpose(-1, -2).flatten(-2), skip)


class CodesOfWholeBytes(WithBooks):
    class codec(Codebook):
        def encode(self, x, skip=None):
            return Codes(codecs.unpack(super().encode(x, skip).q, self.bits, self.places))

        def decode(self, codes):
            return super().decode(Codes(codecs.pack(codes.q, self.bits)))


class HeadsPackedApart(WithBooks):
    """Each head's codes fill up their last byte."""
    class codec(Codebook):
        def encode(self, x, skip=None):
            number = codecs.unpack(super().encode(x, skip).q, self.bits, self.places)[:, 0]  # (B, T, places)
            return Codes(codecs.pack(number.unflatten(-1, (x.shape[1], -1)).transpose(1, 2), self.bits))

        def decode(self, codes):
            heads = codes.q.shape[1]
            number = codecs.unpack(codes.q, self.bits, self.places // heads)  # (B, Hkv, T, d/n)
            return super().decode(Codes(codecs.pack(number.transpose(1, 2).flatten(2), self.bits)[:, None]))


class LearnsFromTheLastWindow(CQ):
    def calibrate(self, model, windows, progress=None):
        super().calibrate(model, windows[-1:], progress)


class SwapsTheBooksOfKeysAndValues(CQ):
    def restore(self, learned):
        super().restore({name.translate(str.maketrans("kv", "vk")): table for name, table in learned.items()})


# ---- wrong anchors

class SmallestAnchors(AnTKV):
    def keep(self, cache, kind, n, state):
        part = cache.k if kind == "k" else cache.v
        own = part.score, part.pinned_score
        part.score, part.pinned_score = (None if x is None else -x for x in own)
        index = super().keep(cache, kind, n, state)
        part.score, part.pinned_score = own
        return index


class FirstAnchorsForGood(AnTKV):
    """Those of the first coding event are never replaced."""
    def keep(self, cache, kind, n, state):
        index = (cache.k if kind == "k" else cache.v).index
        return super().keep(cache, kind, n, state) if index is None else index


class OnlyTheNewestAnchors(AnTKV):
    """Those of now do not compete."""
    def keep(self, cache, kind, n, state):
        part = cache.k if kind == "k" else cache.v
        own, part.index = part.index, None
        index = super().keep(cache, kind, n, state)
        part.index = own
        return index


class AnchorsOfTheWindowToo(AnTKV):
    """Tokens that are not coded yet compete as well."""
    def keep(self, cache, kind, n, state):
        part = cache.k if kind == "k" else cache.v
        return super().keep(cache, kind, n if part.score is None else part.score.shape[-1], state)


class TiesToTheNewestAnchor(AnTKV):
    def keep(self, cache, kind, n, state):
        part = cache.k if kind == "k" else cache.v
        own = part.pinned_score
        part.pinned_score = None if own is None else own - 1e-3
        index = super().keep(cache, kind, n, state)
        part.pinned_score = own
        return index


class ShareOfTheBlock(AnTKV):
    def keep(self, cache, kind, n, state):
        own, cache.length = cache.length, n
        index = super().keep(cache, kind, n, state)
        cache.length = own
        return index


class ShareRoundedDown(AnTKV):
    def keep(self, cache, kind, n, state):
        own, cache.length = cache.length, max(1, cache.length - 4)
        index = super().keep(cache, kind, n, state)
        cache.length = own
        return index


class OneHeadsAnchors(AnTKV):
    """The first head's, in all heads."""
    def keep(self, cache, kind, n, state):
        index = super().keep(cache, kind, n, state)
        return None if index is None else index[:, :1].expand_as(index)


#                 method, numbers of anchors with which check_anchors of test_methods.py has to notice
ANCHOR_MUTANTS = [(SmallestAnchors, ["2", "30%"]), (FirstAnchorsForGood, ["2", "30%"]),
                  (OnlyTheNewestAnchors, ["2", "30%"]), (AnchorsOfTheWindowToo, ["2", "30%"]),
                  (TiesToTheNewestAnchor, ["2", "3"]), (ShareOfTheBlock, ["20%", "30%"]),
                  (ShareRoundedDown, ["20%", "30%"]), (OneHeadsAnchors, ["2", "30%"])]


def sums_over_heads(q, K, score):
    """score(A, |Q|), (B, H, T, S) from attention weights and (B, H, T, 1), summed over queries and heads of a group."""
    terms = torch.zeros(*q.shape[:2], K.shape[2])  # (B, H, S)
    for tile, A in anchors.attention_tiles(q, K):
        terms[..., :A.shape[-1]] += score(A, q[:, :, tile].float().norm(dim=-1, keepdim=True)).sum(2)
    return terms.unflatten(1, (K.shape[1], -1)).sum(2)


class OtherScores(AnTKV):
    """Scores by other formulas."""
    def attend(self, cache, q, K, positions):
        q = cache.rope.rotate(q, positions)
        return sums_over_heads(q, K, self.of_keys), sums_over_heads(q, K, self.of_values)

    @staticmethod
    def of_keys(A, length):
        return A * (1 - A) * length

    @staticmethod
    def of_values(A, length):
        return A


class LengthOfTheQueryLeftOut(OtherScores):
    @staticmethod
    def of_keys(A, length):
        return A * (1 - A)


class OneMinusALeftOut(OtherScores):
    @staticmethod
    def of_keys(A, length):
        return A * length


class ValuesWeighTheQuery(OtherScores):
    @staticmethod
    def of_values(A, length):
        return A * length


class MeansOverTheQueries(OtherScores):
    """A key that all queries see does not count more than one that few see."""
    @staticmethod
    def of_values(A, length):
        return A / (A > 0).sum(2, keepdim=True).clamp(min=1)


class KeyScoresForValues(AnTKV):
    def attend(self, cache, q, K, positions):
        scores = super().attend(cache, q, K, positions)
        return scores[0], scores[0]


class ValueScoresForKeys(AnTKV):
    def attend(self, cache, q, K, positions):
        scores = super().attend(cache, q, K, positions)
        return scores[1], scores[1]


class HeadsOfAnotherGroup(AnTKV):
    """Query heads are added up as if every Hkv-th belonged together."""
    def attend(self, cache, q, K, positions):
        group = q.shape[1] // K.shape[1]
        scores = super().attend(cache, q, K.repeat_interleave(group, dim=1), positions)  # (B, H, S) both
        return tuple(score.unflatten(1, (group, -1)).sum(1) for score in scores)


class FirstHeadOfTheGroup(AnTKV):
    def attend(self, cache, q, K, positions):
        return super().attend(cache, q[:, ::q.shape[1] // K.shape[1]], K, positions)


class QueriesNotRotated(AnTKV):
    def attend(self, cache, q, K, positions):
        return super().attend(cache, q, K, torch.zeros_like(positions))


class ScoresOfTheLastQuery(AnTKV):
    def attend(self, cache, q, K, positions):
        return super().attend(cache, q[:, :, -1:], K, positions[-1:])


# ---- wrong caches

class WithRows(IntactKV):
    """IntactKV whose prefix takes its rows from elsewhere."""
    def __init__(self, config, prefix=None, **settings):
        super().__init__(config, prefix, **settings)
        self.prefix.__class__ = type("Wrong", (Prefix,), {"fill": lambda prefix, full, coded: self.fill(full, coded)})

    def fill(self, full, coded):
        self.prefix.keys, self.prefix.values = self.rows(full, coded, self.prefix.ids)


class RowsOfTheQuantizedModel(WithRows):
    def rows(self, full, coded, ids):
        return exact_rows(quantize(full, RTNWeights(3)), coded, ids)


class RowsOfTheNextPositions(WithRows):
    """As if there were a token before the prefix."""
    def rows(self, full, coded, ids):
        return [rows[:, :, 1:] for rows in exact_rows(full, coded, [0, *ids])]


class RowsRotatedTwice(WithRows):
    def rows(self, full, coded, ids):
        keys, values = exact_rows(full, coded, ids)
        return full.rope.rotate(keys, torch.arange(len(ids))), values


class RowsOfTokensAlone(WithRows):
    """Each token as if it were the first."""
    def rows(self, full, coded, ids):
        return [torch.cat(rows, dim=2) for rows in zip(*(exact_rows(full, coded, [token]) for token in ids))]


class RowsOfTheFirstLayer(WithRows):
    def rows(self, full, coded, ids):
        return [rows[:1].expand_as(rows) for rows in exact_rows(full, coded, ids)]


class RowsSwapped(WithRows):
    def rows(self, full, coded, ids):
        return exact_rows(full, coded, ids)[::-1]


class PrefixCoded(IntactKV):
    def keep(self, cache, kind, n, state):
        return None


class PrefixOneShort(IntactKV):
    def keep(self, cache, kind, n, state):
        return super().keep(cache, kind, n, state)[..., :-1]


class PrefixOneLong(IntactKV):
    """The first token of the text is kept, too."""
    def __init__(self, config, prefix=None, **settings):
        super().__init__(config, prefix, **settings)
        self.preserve += 1


class PrefixOfKeysOnly(IntactKV):
    def keep(self, cache, kind, n, state):
        return super().keep(cache, kind, n, state) if kind == "k" else None


class PrefixStretchesTheRange(IntactKV):
    def encode(self, layer, kind, rows, skip):
        return super().encode(layer, kind, rows, None)


class OffsetForInteger(IntactKV):
    """A real zero point where an integer is asked for, and the other way round."""
    def __init__(self, config, formula="integer-zero", **settings):
        super().__init__(config, formula={"offset": "integer-zero"}.get(formula, "offset"), **settings)


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
    def pin(self, index):
        """Takes every row from among the recent ones, also those that were pinned long ago."""
        self.index = None
        super().pin(index)


class PinsTakenFromRecent(WithParts):
    part_class = StalePart


class ForgetfulPart(Part):
    def add_score(self, score):
        self.score = self.pinned_score = None if self.score is None else self.score * 0
        if self.index is not None:
            self.pinned_score = torch.zeros(self.pinned.shape[:3])
        super().add_score(score)


class ScoresOfTheLastChunk(WithParts):
    part_class = ForgetfulPart


class FrozenPart(Part):
    def add_score(self, score):
        own = self.pinned_score
        super().add_score(score)
        self.pinned_score = own


class PinnedScoresStandStill(WithParts):
    part_class = FrozenPart


class HoardingPart(Part):
    """Keeps the scores of coded rows, behind those of recent ones."""
    def code(self, n):
        own = self.score
        super().code(n)
        if own is not None:
            self.score = torch.cat([self.score, own[:, :, :n]], dim=2)

    def add_score(self, score):
        if self.score is not None:
            self.score = self.score[:, :, :self.recent.shape[2]]
        super().add_score(score)


class ScoresOfCodedRowsHeld(WithParts):
    part_class = HoardingPart


class MisalignedPart(Part):
    """Drops the newest score rows, in place of those that were coded."""
    def code(self, n):
        own = self.score
        super().code(n)
        if own is not None:
            self.score = own[:, :, :own.shape[2] - n].clone()


class NewestScoresDropped(WithParts):
    part_class = MisalignedPart


class LateScoresLayer(LayerCache):
    """Scores are added after the coding that they should decide on."""
    def update(self, q, k, v, positions, state):
        late, self.late = getattr(self, "late", None), None
        attend = self.method.attend
        self.method = copy.copy(self.method)

        def note(*given):
            self.late = attend(*given)
            if late is None:
                return None
            return tuple(torch.nn.functional.pad(x, (0, self.length - x.shape[-1])) for x in late)

        self.method.attend = note
        read = super().update(q, k, v, positions, state)
        self.method = self.k.method
        return read


class ScoresOneChunkLate(WithParts):
    layer_class = LateScoresLayer


class KeepsDecodedPart(Part):
    def code(self, n):
        super().code(n)
        self.copy = self.read()

    def tensors(self):
        held = super().tensors()
        return held | {"coded": [*held["coded"], *([self.copy] if self.coded else [])]}


class KeepsADecodedCopy(WithParts):
    part_class = KeepsDecodedPart


class HiddenViewPart(Part):
    def code(self, n):
        """Holds on to the coded rows behind a view of the recent ones."""
        whole = self.recent
        super().code(n)
        self.recent = whole[:, :, n:]


class HoldsRowsBehindAView(WithParts):
    part_class = HiddenViewPart


class LateLayer(LayerCache):
    def code(self, part, n, state):
        super().code(part, n - 1 if self.protocol == "stream" else n, state)


class FlushesOneTooFew(WithParts):
    layer_class = LateLayer


class EarlyLayer(LayerCache):
    def code(self, part, n, state):
        """With every block, all that is recent but the newest token."""
        super().code(part, max(n, self.length - part.first - 1), state)


class FlushesTooMuch(WithParts):
    layer_class = EarlyLayer


class RaggedLayer(LayerCache):
    def code(self, part, n, state):
        super().code(part, self.length - part.first - self.method.recent, state)


class FlushesPartialBlocks(WithParts):
    layer_class = RaggedLayer


class EagerLayer(LayerCache):
    def append(self, k, v, positions):
        """A stream that codes before it reads: a block's range is known to its first token's query."""
        super().append(k, v, positions)
        due = self.length - self.k.first - self.method.recent
        if self.protocol == "stream" and due >= self.method.block:
            for part in (self.k, self.v):
                self.code(part, due - due % self.method.block, None)


class StreamCodesFirst(WithParts):
    layer_class = EagerLayer


class LazyLayer(LayerCache):
    def update(self, q, k, v, positions, state):
        if self.protocol == "stream":
            return super().update(q, k, v, positions, state)
        self.append(k, v, positions)
        K, V = self.read()
        for part in (self.k, self.v):
            self.code(part, self.length, state)
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


class ResetForgetsThePrefix(KVCache):
    """It is there the first time only."""
    def reset(self):
        again = hasattr(self, "layers")
        super().reset()
        if again:
            self.layers = [LayerCache(x.layer, x.method, x.rope, x.protocol) for x in self.layers]
            self.start = 0


class PrefixBehindItself(KVCache):
    """The text keeps the tokens that the cache begins with, and has them twice."""
    def rest(self, tokens):
        return tokens


class PrefixFromPositionOne(KVCache):
    def reset(self):
        super().reset()
        for layer in self.layers[:self.start * len(self.layers)]:
            layer.k.recent = self.rope.rotate(layer.k.recent, torch.ones(self.start))


class PrefixNotRotated(KVCache):
    def reset(self):
        super().reset()
        for layer in self.layers[:self.start * len(self.layers)]:
            layer.k.recent = self.rope.rotate(layer.k.recent, -torch.arange(self.start))


class PrefixOfTheFirstSequence(KVCache):
    """The other sequences of a batch begin with nothing."""
    def update(self, layer, q, k, v, positions):
        for part in (self.layers[layer].k, self.layers[layer].v):
            if part.recent is not None and len(part.recent) == 1 < len(k):
                part.recent = torch.nn.functional.pad(part.recent, (0, 0, 0, 0, 0, 0, 0, len(k) - 1))
        return super().update(layer, q, k, v, positions)


class TextFromPositionZero(KVCache):
    """The text's positions begin anew behind the prefix."""
    def update(self, layer, q, k, v, positions):
        return super().update(layer, q, k, v, positions - self.start)


class AnyBeginningWillDo(KVCache):
    """A text that does not begin with the prefix is cut all the same."""
    def rest(self, tokens):
        return tokens[:, self.start:]


ROWS, SEEN, SIZE = "check_cache_holds_the_expected_rows", "check_attention_sees_the_cache", "check_bytes"
TOKEN, CHANNEL = {"scheme": "token-dynamic"}, {"scheme": "channel-dynamic"}
T_STATIC, C_STATIC = {"scheme": "token-static"}, {"scheme": "channel-static"}
PAPER, DOUBLE = {"protocol": "paper"}, {"dtype": torch.float64}
FEW, SHARE = {"settings": (("vq", "d4m4"),)}, {"settings": (("anchors", "20%"),)}
V_BLOCK, LONG = {"settings": (("v_block", 2),)}, {"length": "6G+3"}

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
    Mutant(KIVI, ROWS, WindowOffByOne, cell={"recent": 5}),
    Mutant(KIVI, SIZE, WindowOffByOne, cell={"recent": 5}),
    Mutant(KIVI, ROWS, ValuesAtTheKeysPace, cell=V_BLOCK),
    Mutant(KIVI, ROWS, KeysAtTheValuesPace, cell=V_BLOCK),
    Mutant(KIVI, ROWS, KeysGroupedByChannels),
    Mutant(KIVI, "check_chunks_equal_single_tokens", ChunksOfWholeBlocks, cell=V_BLOCK | DOUBLE),
    Mutant(KIVI, ROWS, cache=FlushesOneTooFew),
    Mutant(OTT, ROWS, KeepsTheLargest, cell=PAPER),
    Mutant(OTT, ROWS, ForgetsTheEvicted),
    Mutant(OTT, "check_placeholders_do_not_matter", ForgetsTheEvicted),
    Mutant(OTT, ROWS, ElectsWithoutThePool),
    Mutant(OTT, ROWS, PositionsFromTheBlock),
    Mutant(OTT, ROWS, NeverFull, cell=LONG),
    Mutant(OTT, SIZE, NeverFull, cell=LONG),
    Mutant(OTT, ROWS, FullBeforeItIs, cell=LONG),
    Mutant(OTT, ROWS, ScoresOfEuclid),
    Mutant(OTT, ROWS, PoolsInAllLayers, cell=PAPER),
    Mutant(OTT, SIZE, PoolsInAllLayers),
    Mutant(OTT, ROWS, OneHeadForAll, cell=PAPER),
    Mutant(OTT, ROWS, OneHeadForTheLayer, cell=PAPER | {"settings": (("scope", "layer"),)}),
    Mutant(OTT, ROWS, KeptTokensStretchTheRange, cell=PAPER),
    Mutant(OTT, "check_placeholders_do_not_matter", KeptTokensStretchTheRange),
    Mutant(OTT, ROWS, cache=PinsTakenFromRecent),
    Mutant(SKVQ, ROWS, OrderNotUndone, cell=PAPER),
    Mutant(SKVQ, ROWS, OrderNotUndone),
    Mutant(SKVQ, ROWS, MetadataRoundedTooLate, cell=PAPER),
    Mutant(SKVQ, ROWS, ClipIgnored, cell=PAPER),
    Mutant(SKVQ, ROWS, ClipsTowardsZero, cell=PAPER),
    Mutant(SKVQ, SIZE, ScalesOfSixteenBits, cell=PAPER),
    Mutant(SKVQ, ROWS, WindowIgnored, cell={"recent": 6}),
    Mutant(SKVQ, ROWS, FirstTokensIgnored),
    Mutant(SKVQ, "check_keeping_everything_is_exact", FirstTokensIgnored, cell=PAPER),
    Mutant(SKVQ, ROWS, FirstKeysOnly, cell=PAPER),
    Mutant(SKVQ, ROWS, cache=PreRopeKeysLeftUnrotated),
    Mutant(KVQuant, ROWS, OutliersNotPutBack, cell=PAPER),
    Mutant(KVQuant, ROWS, OutliersOffByAHead, cell=PAPER),
    Mutant(KVQuant, ROWS, OutliersOfAnotherSequence, cell=PAPER),
    Mutant(KVQuant, "check_batch_rows_are_independent", OutliersOfAnotherSequence, cell=PAPER | DOUBLE),
    Mutant(KVQuant, ROWS, NewestOutliersFirst),
    Mutant(KVQuant, SIZE, KeptTokensHaveOutliers, cell=PAPER),
    Mutant(KVQuant, ROWS, LevelsBelow, cell=PAPER),
    Mutant(KVQuant, ROWS, MidAndHalfSwapped, cell=PAPER),
    Mutant(KVQuant, ROWS, RangeOfOutliersToo, cell=PAPER),
    Mutant(KVQuant, ROWS, OutliersOnOneSide, cell=PAPER),
    Mutant(KVQuant, "check_static_ranges", LearnsFromKeptTokens),
    Mutant(KVQuant, "check_what_is_learned_can_be_restored", RestoresTheFirstLayer),
    Mutant(KVQuant, ROWS, cache=PinsIgnoredOnReading),
    Mutant(CQ, ROWS, HeadsPackedInAnotherOrder, cell=PAPER),
    Mutant(CQ, ROWS, BooksOfAnotherHead, cell=PAPER),
    Mutant(CQ, ROWS, LastPlaceDropped, cell=PAPER),
    Mutant(CQ, ROWS, LastPlaceDropped, cell={"sharing": 4}),
    Mutant(CQ, ROWS, PlacesBeforeHeads, cell=PAPER),
    Mutant(CQ, ROWS, EveryOtherChannel, cell=PAPER),
    Mutant(CQ, SIZE, CodesOfWholeBytes),
    Mutant(CQ, SIZE, HeadsPackedApart),
    Mutant(CQ, "check_calibration_order_is_no_matter", LearnsFromTheLastWindow, cell=FEW),
    Mutant(CQ, "check_what_is_learned_can_be_restored", SwapsTheBooksOfKeysAndValues),
    Mutant(CQ, ROWS, cache=PreRopeKeysLeftUnrotated),
    Mutant(AnTKV, ROWS, SmallestAnchors, cell=PAPER),
    Mutant(AnTKV, ROWS, SmallestAnchors),
    Mutant(AnTKV, ROWS, FirstAnchorsForGood, cell=LONG),
    Mutant(AnTKV, "check_scores", AnchorsOfTheWindowToo, cell={"recent": 5}),
    Mutant(AnTKV, ROWS, OnlyTheNewestAnchors, cell=LONG),
    Mutant(AnTKV, ROWS, OneHeadsAnchors, cell=PAPER),
    Mutant(AnTKV, SIZE, ShareOfTheBlock, cell=SHARE),
    Mutant(AnTKV, ROWS, LengthOfTheQueryLeftOut, cell=PAPER),
    Mutant(AnTKV, "check_scores", LengthOfTheQueryLeftOut, cell=PAPER),
    Mutant(AnTKV, ROWS, OneMinusALeftOut, cell=PAPER),
    Mutant(AnTKV, ROWS, ValuesWeighTheQuery, cell=PAPER),
    Mutant(AnTKV, ROWS, MeansOverTheQueries, cell=PAPER),
    Mutant(AnTKV, ROWS, KeyScoresForValues, cell=PAPER),
    Mutant(AnTKV, ROWS, KeyScoresForValues),
    Mutant(AnTKV, ROWS, ValueScoresForKeys, cell=PAPER),
    Mutant(AnTKV, ROWS, HeadsOfAnotherGroup, cell=PAPER),
    Mutant(AnTKV, ROWS, FirstHeadOfTheGroup, cell=PAPER),
    Mutant(AnTKV, ROWS, QueriesNotRotated, cell=PAPER),
    Mutant(AnTKV, ROWS, ScoresOfTheLastQuery, cell=PAPER),
    Mutant(AnTKV, "check_chunks_equal_single_tokens", ScoresOfTheLastQuery, cell=DOUBLE),
    Mutant(AnTKV, ROWS, cache=ScoresOfTheLastChunk, cell=LONG),
    Mutant(AnTKV, "check_chunks_equal_single_tokens", cache=ScoresOfTheLastChunk, cell=DOUBLE),
    Mutant(AnTKV, ROWS, cache=PinnedScoresStandStill, cell=LONG),
    Mutant(AnTKV, SIZE, cache=ScoresOfCodedRowsHeld, cell=PAPER),
    Mutant(AnTKV, "check_scores", cache=NewestScoresDropped, cell={"recent": 5}),
    Mutant(AnTKV, ROWS, cache=NewestScoresDropped, cell={"recent": 6} | LONG),
    Mutant(AnTKV, ROWS, cache=ScoresOneChunkLate, cell=LONG),
    Mutant(AnTKV, ROWS, cache=PinsTakenFromRecent, cell=LONG),
    Mutant(AnTKV, "check_batch_rows_are_independent", cache=PinnedRowsOfTheFirstSequence, cell=DOUBLE),
    Mutant(IntactKV, ROWS, RowsOfTheQuantizedModel, cell=TOKEN),
    Mutant(IntactKV, "check_sixteen_bits_are_fp16", RowsOfTheQuantizedModel, cell=TOKEN),
    Mutant(IntactKV, "check_the_trap", RowsOfTheQuantizedModel, cell=TOKEN),
    Mutant(IntactKV, ROWS, RowsOfTheNextPositions, cell=TOKEN),
    Mutant(IntactKV, ROWS, RowsRotatedTwice, cell=TOKEN | PAPER),
    Mutant(IntactKV, "check_sixteen_bits_are_fp16", RowsRotatedTwice, cell=TOKEN | PAPER),
    Mutant(IntactKV, ROWS, RowsOfTokensAlone, cell=TOKEN),
    Mutant(IntactKV, ROWS, RowsOfTheFirstLayer, cell=TOKEN),
    Mutant(IntactKV, ROWS, RowsSwapped, cell=TOKEN),
    Mutant(IntactKV, ROWS, PrefixCoded, cell=TOKEN),
    Mutant(IntactKV, ROWS, PrefixCoded, cell=CHANNEL | PAPER),
    Mutant(IntactKV, SIZE, PrefixCoded, cell=TOKEN),
    Mutant(IntactKV, "check_placeholders_do_not_matter", PrefixCoded, cell=TOKEN),
    Mutant(IntactKV, ROWS, PrefixOneShort, cell=TOKEN),
    Mutant(IntactKV, SIZE, PrefixOneShort, cell=TOKEN | PAPER),
    Mutant(IntactKV, "check_placeholders_do_not_matter", PrefixOneShort, cell=TOKEN),
    Mutant(IntactKV, ROWS, PrefixOneLong, cell=TOKEN),
    Mutant(IntactKV, ROWS, PrefixOfKeysOnly, cell=TOKEN),
    Mutant(IntactKV, ROWS, PrefixStretchesTheRange, cell=CHANNEL),
    Mutant(IntactKV, "check_placeholders_do_not_matter", PrefixStretchesTheRange, cell=CHANNEL),
    Mutant(IntactKV, ROWS, OffsetForInteger, cell=TOKEN | {"formula": "integer-zero"}),
    Mutant(IntactKV, "check_same_twice_and_after_reset", cache=ResetForgetsThePrefix, cell=TOKEN),
    Mutant(IntactKV, ROWS, cache=PrefixBehindItself, cell=TOKEN),
    Mutant(IntactKV, ROWS, cache=PrefixFromPositionOne, cell=TOKEN),
    Mutant(IntactKV, SEEN, cache=PrefixFromPositionOne, cell=TOKEN),
    Mutant(IntactKV, ROWS, cache=PrefixNotRotated, cell=TOKEN),
    Mutant(IntactKV, ROWS, cache=PrefixOfTheFirstSequence, cell=TOKEN),
    Mutant(IntactKV, "check_batch_rows_are_independent", cache=PrefixOfTheFirstSequence, cell=TOKEN | DOUBLE),
    Mutant(IntactKV, ROWS, cache=TextFromPositionZero, cell=TOKEN),
    Mutant(IntactKV, "check_sixteen_bits_are_fp16", cache=TextFromPositionZero, cell=TOKEN),
    Mutant(IntactKV, "check_a_text_has_to_begin_with_the_prefix", cache=AnyBeginningWillDo, cell=TOKEN),
    Mutant(IntactKV, "check_paper_refuses_a_second_forward", cache=ReadsOn, cell=TOKEN | PAPER),
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
