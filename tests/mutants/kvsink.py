"""KVSink that looks for its sinks in the wrong place, or forgets some.

`TOP_K_MUTANTS` also fail `check_running_top_k` of test_selection.py.
"""
from invariants import (
    check_batch_rows_are_independent,
    check_cache_holds_the_expected_rows,
    check_chunks_equal_single_tokens,
    check_keeping_everything_is_exact,
    check_same_twice_and_after_reset,
)

from mutants.mutant import DOUBLE, PAPER, TOKEN, Mutant
from tinykv.cache import KVCache
from tinykv.methods.base import first_tokens
from tinykv.methods.kvsink import KVSink


class KeepsFromTheEmergenceLayerOn(KVSink):
    """In the emergence layer, where its sinks are not known yet, the first tokens."""

    def keep_keys(self, layer_cache, n):
        if layer_cache.layer == self.layer:
            return first_tokens(layer_cache, self.preserve)
        return super().keep_keys(layer_cache, n)


class OnePositionForTheBatch(KVSink):
    """The first sequence's sinks, in all sequences."""

    def keep_keys(self, layer_cache, n):
        positions = super().keep_keys(layer_cache, n)
        return None if positions is None else positions[:1].expand_as(positions)


class NextChannel(KVSink):
    def observe(self, cache, layer, hidden):
        super().observe(cache, layer, hidden.roll(1, -1))


class SinksOfTheFirstChunk(KVSink):
    """Chosen once and never again."""

    def observe(self, cache, layer, hidden):
        if cache.shared.sinks is None:
            super().observe(cache, layer, hidden)


class PositionsFromTheChunk(KVSink):
    """Counts a sink's position from the start of its chunk."""

    def observe(self, cache, layer, hidden):
        own, cache.layers[layer].length = cache.layers[layer].length, hidden.shape[1]
        super().observe(cache, layer, hidden)
        cache.layers[layer].length = own


class TiesToTheLater(KVSink):
    """Of the sinks that are as small as the smallest, all stand at the latest position."""

    def observe(self, cache, layer, hidden):
        super().observe(cache, layer, hidden)
        if layer == self.layer:
            sinks, sizes = cache.shared.sinks, cache.shared.sink_sizes
            latest = sinks.amax(1, keepdim=True)
            cache.shared.sinks = sinks.where(sizes > sizes[:, -1:], latest)


class SmallestScores(KVSink):
    def observe(self, cache, layer, hidden):
        super().observe(cache, layer, 1 / (hidden.abs() + 1))


class SignedScores(KVSink):
    def observe(self, cache, layer, hidden):
        super().observe(cache, layer, hidden.clamp(min=0))


class ForgetsOldScores(KVSink):
    def observe(self, cache, layer, hidden):
        if layer == self.layer:
            cache.shared.sinks = None
        super().observe(cache, layer, hidden)


class AnyLayer(KVSink):
    def observe(self, cache, layer, hidden):
        super().observe(cache, self.layer, hidden)


class ShowsTheFirstChunkOnly(KVCache):
    """The method sees the emergence layer's output for the first chunk, and for none later."""

    def observe(self, layer, hidden):
        if layer != self.method.layer or self.layers[layer].length == hidden.shape[1]:
            super().observe(layer, hidden)


class ResetKeepsSinks(KVCache):
    def reset(self):
        shared = getattr(self, "shared", None)
        super().reset()
        if shared is not None:
            vars(self.shared).update(vars(shared))


TOP_K_MUTANTS = [NextChannel, SinksOfTheFirstChunk, PositionsFromTheChunk, TiesToTheLater, SmallestScores, SignedScores,
                 ForgetsOldScores, AnyLayer]

MUTANTS = [
    Mutant(KVSink, check_cache_holds_the_expected_rows, KeepsFromTheEmergenceLayerOn, TOKEN),
    Mutant(KVSink, check_keeping_everything_is_exact, KeepsFromTheEmergenceLayerOn, TOKEN | PAPER),
    Mutant(KVSink, check_cache_holds_the_expected_rows, NextChannel, TOKEN | PAPER),
    Mutant(KVSink, check_cache_holds_the_expected_rows, OnePositionForTheBatch, TOKEN | PAPER),
    Mutant(KVSink, check_batch_rows_are_independent, OnePositionForTheBatch, TOKEN | DOUBLE),
    Mutant(KVSink, check_cache_holds_the_expected_rows, SinksOfTheFirstChunk, TOKEN),
    Mutant(KVSink, check_chunks_equal_single_tokens, SinksOfTheFirstChunk, TOKEN | DOUBLE),
    Mutant(KVSink, check_cache_holds_the_expected_rows, PositionsFromTheChunk, TOKEN),
    Mutant(KVSink, check_cache_holds_the_expected_rows, ForgetsOldScores, TOKEN),
    Mutant(KVSink, check_cache_holds_the_expected_rows, ShowsTheFirstChunkOnly, TOKEN),
    Mutant(KVSink, check_same_twice_and_after_reset, ResetKeepsSinks, TOKEN | PAPER),
]
