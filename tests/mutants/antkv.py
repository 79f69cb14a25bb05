"""AnTKV with other anchors, or other scores.

`ANCHOR_MUTANTS` fail `check_anchors` of test_selection.py.
"""
import torch
from invariants import (
    check_batch_rows_are_independent,
    check_bytes,
    check_cache_holds_the_expected_rows,
    check_chunks_equal_single_tokens,
    check_scores,
)

from mutants.common import KeptAgainAsDecoded, KeptRowsOfTheFirstSequence
from mutants.mutant import DOUBLE, LONG, PAPER, Mutant
from tinykv.cache import CachedRows
from tinykv.methods.antkv import AnTKV, attention_tiles

# ---- anchors


class SmallestAnchors(AnTKV):
    def largest(self, rows, n, length):
        own = rows.recent_scores, rows.kept_scores
        rows.recent_scores, rows.kept_scores = (None if scores is None else -scores for scores in own)
        positions = super().largest(rows, n, length)
        rows.recent_scores, rows.kept_scores = own
        return positions


class FirstAnchorsForGood(AnTKV):
    """Those of the first event are never replaced."""

    def largest(self, rows, n, length):
        first = rows.kept_positions
        return super().largest(rows, n, length) if first is None else first


class OnlyTheNewestAnchors(AnTKV):
    """The anchors of now do not compete."""

    def largest(self, rows, n, length):
        own, rows.kept_positions = rows.kept_positions, None
        positions = super().largest(rows, n, length)
        rows.kept_positions = own
        return positions


class AnchorsOfTheWindowToo(AnTKV):
    """Tokens that are not quantized yet compete as well."""

    def largest(self, rows, n, length):
        return super().largest(rows, rows.recent.shape[2], length)


class TiesToTheNewestAnchor(AnTKV):
    def largest(self, rows, n, length):
        own = rows.kept_scores
        rows.kept_scores = None if own is None else own - 1e-3
        positions = super().largest(rows, n, length)
        rows.kept_scores = own
        return positions


class ShareOfTheBlock(AnTKV):
    def largest(self, rows, n, length):
        return super().largest(rows, n, n)


class ShareRoundedDown(AnTKV):
    def largest(self, rows, n, length):
        return super().largest(rows, n, max(1, length - 4))


class OneHeadsAnchors(AnTKV):
    """The first head's, in all heads."""

    def largest(self, rows, n, length):
        positions = super().largest(rows, n, length)
        return None if positions is None else positions[:, :1].expand_as(positions)


#                 method, numbers of anchors at which check_anchors has to notice
ANCHOR_MUTANTS = [(SmallestAnchors, ["2", "30%"]), (FirstAnchorsForGood, ["2", "30%"]),
                  (OnlyTheNewestAnchors, ["2", "30%"]), (AnchorsOfTheWindowToo, ["2", "30%"]),
                  (TiesToTheNewestAnchor, ["2", "3"]), (ShareOfTheBlock, ["20%", "30%"]),
                  (ShareRoundedDown, ["20%", "30%"]), (OneHeadsAnchors, ["2", "30%"])]


# ---- scores

class OtherScores(AnTKV):
    """Eq. 5, to be changed in one of its two terms. A (B, H, tile, seen), norm (B, H, tile, 1)."""

    def score(self, layer_cache, q, K):
        of_keys = torch.zeros(*q.shape[:2], K.shape[2])  # (B, H, S)
        of_values = torch.zeros_like(of_keys)
        for tile, A in attention_tiles(q, K):
            norm = q[:, :, tile].float().norm(dim=-1, keepdim=True)
            of_keys[..., :A.shape[-1]] += self.term_of_keys(A, norm).sum(2)
            of_values[..., :A.shape[-1]] += self.term_of_values(A, norm).sum(2)
        Hkv = K.shape[1]
        return of_keys.unflatten(1, (Hkv, -1)).sum(2), of_values.unflatten(1, (Hkv, -1)).sum(2)

    def term_of_keys(self, A, norm):
        return A * (1 - A) * norm

    def term_of_values(self, A, norm):
        return A


class LengthOfTheQueryLeftOut(OtherScores):
    def term_of_keys(self, A, norm):
        return A * (1 - A)


class OneMinusALeftOut(OtherScores):
    def term_of_keys(self, A, norm):
        return A * norm


class ValuesWeighTheQuery(OtherScores):
    def term_of_values(self, A, norm):
        return A * norm


class MeansOverTheQueries(OtherScores):
    """A key that all queries see does not count more than one that few see."""

    def term_of_values(self, A, norm):
        return A / (A > 0).sum(2, keepdim=True).clamp(min=1)


class KeyScoresForValues(AnTKV):
    def score(self, layer_cache, q, K):
        of_keys, _ = super().score(layer_cache, q, K)
        return of_keys, of_keys


class ValueScoresForKeys(AnTKV):
    def score(self, layer_cache, q, K):
        _, of_values = super().score(layer_cache, q, K)
        return of_values, of_values


class HeadsOfAnotherGroup(AnTKV):
    """Query heads are added up as if every Hkv-th belonged together."""

    def score(self, layer_cache, q, K):
        heads_per_kv = q.shape[1] // K.shape[1]
        scores = super().score(layer_cache, q, K.repeat_interleave(heads_per_kv, dim=1))  # (B, H, S) both
        return [x.unflatten(1, (heads_per_kv, -1)).sum(1) for x in scores]


class FirstHeadOfTheGroup(AnTKV):
    def score(self, layer_cache, q, K):
        return super().score(layer_cache, q[:, ::q.shape[1] // K.shape[1]], K)


class QueriesNotRotated(AnTKV):
    def score(self, layer_cache, q, K):
        T, S = q.shape[2], K.shape[2]
        return super().score(layer_cache, layer_cache.rope.rotate(q, -torch.arange(S - T, S)), K)


class ScoresOfTheLastQuery(AnTKV):
    def score(self, layer_cache, q, K):
        return super().score(layer_cache, q[:, :, -1:], K)


# ---- scores that the cache holds

class ScoresOfTheLastChunk(CachedRows):
    def add_scores(self, scores):
        if self.recent_scores is not None:
            self.recent_scores = torch.zeros_like(self.recent_scores)
        if self.kept_scores is not None:
            self.kept_scores = torch.zeros_like(self.kept_scores)
        super().add_scores(scores)


class KeptScoresStandStill(CachedRows):
    def add_scores(self, scores):
        own = self.kept_scores
        super().add_scores(scores)
        self.kept_scores = own


class ScoresOfCodedRowsHeld(CachedRows):
    """After those of recent tokens."""

    def quantize(self, n):
        own = self.recent_scores
        super().quantize(n)
        self.recent_scores = torch.cat([self.recent_scores, own[:, :, :n]], dim=2)


class NewestScoresDropped(CachedRows):
    """In place of those of the tokens that were quantized."""

    def quantize(self, n):
        own = self.recent_scores
        super().quantize(n)
        self.recent_scores = own[:, :, :own.shape[2] - n].clone()


class ScoresOneChunkLate(CachedRows):
    """A chunk's scores are added with the next chunk, after the event that they should decide
    on."""
    late = None

    def add_scores(self, scores):
        late, self.late = self.late, scores
        if late is not None:
            super().add_scores(torch.nn.functional.pad(late, (0, scores.shape[-1] - late.shape[-1])))


SHARE = {"settings": (("anchors", "20%"),)}

MUTANTS = [
    Mutant(AnTKV, check_cache_holds_the_expected_rows, SmallestAnchors, PAPER),
    Mutant(AnTKV, check_cache_holds_the_expected_rows, SmallestAnchors),
    Mutant(AnTKV, check_cache_holds_the_expected_rows, FirstAnchorsForGood, LONG),
    Mutant(AnTKV, check_scores, AnchorsOfTheWindowToo, {"recent": 5}),
    Mutant(AnTKV, check_cache_holds_the_expected_rows, OnlyTheNewestAnchors, LONG),
    Mutant(AnTKV, check_cache_holds_the_expected_rows, OneHeadsAnchors, PAPER),
    Mutant(AnTKV, check_bytes, ShareOfTheBlock, SHARE),
    Mutant(AnTKV, check_cache_holds_the_expected_rows, LengthOfTheQueryLeftOut, PAPER),
    Mutant(AnTKV, check_scores, LengthOfTheQueryLeftOut, PAPER),
    Mutant(AnTKV, check_cache_holds_the_expected_rows, OneMinusALeftOut, PAPER),
    Mutant(AnTKV, check_cache_holds_the_expected_rows, ValuesWeighTheQuery, PAPER),
    Mutant(AnTKV, check_cache_holds_the_expected_rows, MeansOverTheQueries, PAPER),
    Mutant(AnTKV, check_cache_holds_the_expected_rows, KeyScoresForValues, PAPER),
    Mutant(AnTKV, check_cache_holds_the_expected_rows, KeyScoresForValues),
    Mutant(AnTKV, check_cache_holds_the_expected_rows, ValueScoresForKeys, PAPER),
    Mutant(AnTKV, check_cache_holds_the_expected_rows, HeadsOfAnotherGroup, PAPER),
    Mutant(AnTKV, check_cache_holds_the_expected_rows, FirstHeadOfTheGroup, PAPER),
    Mutant(AnTKV, check_cache_holds_the_expected_rows, QueriesNotRotated, PAPER),
    Mutant(AnTKV, check_cache_holds_the_expected_rows, ScoresOfTheLastQuery, PAPER),
    Mutant(AnTKV, check_chunks_equal_single_tokens, ScoresOfTheLastQuery, DOUBLE),
    Mutant(AnTKV, check_cache_holds_the_expected_rows, ScoresOfTheLastChunk, LONG),
    Mutant(AnTKV, check_chunks_equal_single_tokens, ScoresOfTheLastChunk, DOUBLE),
    Mutant(AnTKV, check_cache_holds_the_expected_rows, KeptScoresStandStill, LONG),
    Mutant(AnTKV, check_bytes, ScoresOfCodedRowsHeld, PAPER),
    Mutant(AnTKV, check_scores, NewestScoresDropped, {"recent": 5}),
    Mutant(AnTKV, check_cache_holds_the_expected_rows, NewestScoresDropped, {"recent": 6} | LONG),
    Mutant(AnTKV, check_cache_holds_the_expected_rows, ScoresOneChunkLate, LONG),
    Mutant(AnTKV, check_cache_holds_the_expected_rows, KeptAgainAsDecoded, LONG),
    Mutant(AnTKV, check_batch_rows_are_independent, KeptRowsOfTheFirstSequence, DOUBLE),
]
