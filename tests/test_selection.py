"""Which tokens kvsink, ott and antkv choose, chunk by chunk, against plain lists (oracles.py).

Scores are small whole numbers, so there are many ties.
"""
from types import SimpleNamespace

import numpy as np
import oracles
import pytest
import torch
from cases import D, L, d, model_of
from hypothesis import example, given
from hypothesis import strategies as st

from tinykv.cache import KVCache, LayerCache
from tinykv.methods.antkv import AnTKV
from tinykv.methods.base import CodecMethod, best_tokens
from tinykv.methods.kvsink import KVSink
from tinykv.methods.ott import OTT


def new_layer(method, layer):
    return LayerCache(layer, method, model_of(2).rope, "stream", SimpleNamespace())


def quantize(layer, n):
    """What `LayerCache.update` does when n tokens are to be quantized."""
    layer.keep(n, n)
    layer.keys.quantize(n)
    layer.values.quantize(n)


# ---- kvsink: the k largest so far

def check_running_top_k(cls, chunks, k=3):
    """After each chunk the sinks are what plain lists say. chunks: for each, a list of whole
    numbers a sequence."""
    method = cls(model_of(1).config, preserve=k, emergence_layer=1, outlier_channel=2)
    cache = SimpleNamespace(shared=SimpleNamespace(), layers=[SimpleNamespace(length=0) for _ in range(L)])
    cache.top_k = lambda x, k: KVCache.top_k(cache, x, k)
    method.begin(cache)
    seen = [[] for _ in chunks[0]]
    for chunk in chunks:
        # other channels, and other layers, do not count
        hidden = torch.full((len(chunk), len(chunk[0]), D), 1e4)
        hidden[..., 2] = torch.tensor(chunk, dtype=torch.float)
        for layer in cache.layers:
            layer.length += hidden.shape[1]
        before = cache.shared.sinks
        method.observe(cache, 0, hidden)
        assert cache.shared.sinks is before, "looked at another layer"
        method.observe(cache, 1, hidden)
        for sizes, new in zip(seen, chunk):
            sizes += [abs(x) for x in new]
        assert cache.shared.sinks.tolist() == [oracles.top_k(sizes, k) for sizes in seen]


@st.composite
def chunks_of_sizes(draw):
    B = draw(st.integers(1, 3))
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    size = st.integers(-4, 4)
    return [[draw(st.lists(size, min_size=n, max_size=n)) for _ in range(B)] for n in lengths]


@given(chunks_of_sizes(), st.integers(1, 8))
def test_running_top_k(chunks, k):
    check_running_top_k(KVSink, chunks, k)


# ---- ott: the pool, and those evicted from it

def check_pools(cls, blocks, size=2, room=2, select="smallest"):
    """The pools after each block that is quantized are what plain lists say, and in their places.

    blocks: for each, whole numbers by sequence, head and token: the magnitude of the token's key.
    """
    # in groups of one token, so that a block of any size has whole groups
    method = cls(model_of(2).config, group_size=1, outlier_num=size, extra_pool=room, skip_layers=1, select=select)
    skipped, layer = new_layer(method, 0), new_layer(method, 1)
    so_far, events = torch.empty(len(blocks[0]), 2, 0, dtype=torch.long), []
    for block in blocks:
        magnitudes = torch.tensor(block)  # (B, Hkv, n)
        so_far = torch.cat([so_far, magnitudes], dim=2)  # (B, Hkv, T)
        n, T = magnitudes.shape[2], so_far.shape[2]
        events.append(oracles.Event(first=T - n, end=T, seen=T))
        keys = torch.stack([magnitudes, -magnitudes, 2 * magnitudes, 0 * magnitudes], dim=-1).half()
        keys = torch.nn.functional.pad(keys, (0, d - 4))  # (B, Hkv, n, d)
        for each in (skipped, layer):
            each.keys.append(keys)
            each.values.append(-keys)
            each.length += n
            quantize(each, n)

        assert skipped.keys.kept_positions is None and skipped.values.kept_positions is None
        for b, h in np.ndindex(so_far.shape[:2]):
            pool, extra = oracles.pools(so_far[b, h].tolist(), events, size, room, select)
            for rows, sign in ((layer.keys, 1), (layer.values, -1)):
                positions = rows.kept_positions[b, h].tolist()
                assert set(positions[:len(pool)]) == set(pool)
                of_extra = [i for i in positions[len(pool):] if i != positions[0]]  # an empty slot repeats the first
                assert set(of_extra) == set(extra)
                assert len(pool) + len(extra) == len({*positions[:len(pool)]}) + len(of_extra), "a token is held twice"
                held = rows.kept_rows[b, h, :, 0].tolist()
                assert all(x == sign * so_far[b, h, i] for i, x in zip(positions, held))


@st.composite
def blocks_of_magnitudes(draw):
    B, lengths = draw(st.integers(1, 2)), draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    magnitude = st.integers(0, 5)
    return [[[draw(st.lists(magnitude, min_size=n, max_size=n)) for _ in range(2)] for _ in range(B)] for n in lengths]


@given(blocks_of_magnitudes(), st.integers(1, 4), st.integers(0, 4), st.sampled_from(["smallest", "largest"]))
@example([[[[5], [5]]], [[[1, 2, 3], [0, 9, 9]]]], 2, 1, "smallest")  # a pool that is not full yet
def test_pools(blocks, size, room, select):
    check_pools(OTT, blocks, size, room, select)


def test_scores_of_large_keys_are_not_rounded():
    """In 16 bits 2049 is 2048, and a sum beyond 65504 is no number."""
    keys = torch.tensor([[2048, 1], [2048, 0], [60000, 60000]]).half()  # (tokens, d)
    assert OTT(model_of(2).config).size(keys).tolist() == [2049, 2048, 120000]


# ---- antkv: the anchors

def check_anchors(cls, chunks, anchors="2"):
    """The anchors, and all scores held, after each chunk are what plain lists say, ties included.

    chunks: for each the tokens that come, the tokens that are quantized then, and for every
    sequence, head, and K or V, whole numbers: what the chunk adds to the score of each token so
    far.
    """
    method = cls(model_of(2).config, "d4m8", anchors=anchors)
    for codec in (codec for pair in method.codecs for codec in pair):
        codec.centroids = torch.zeros(codec.slots, codec.m, codec.n).half()
    layer, seen, quantized, events, added = new_layer(method, 0), 0, 0, [], []
    for new, n, scores in chunks:
        scores = torch.tensor(scores, dtype=torch.float)  # (B, Hkv, 2, seen)
        B, Hkv = scores.shape[:2]
        positions = torch.arange(seen, seen + new)
        rows = (1 + positions)[:, None].expand(B, Hkv, new, d).half()  # each token holds its position
        layer.append(rows, -rows, positions)
        seen += new
        added.append(scores)
        layer.keys.add_scores(scores[:, :, 0])
        layer.values.add_scores(scores[:, :, 1])
        if n:
            quantize(layer, n)
            events.append(oracles.Event(quantized, quantized + n, seen))
            quantized += n

        for kind, b, h in np.ndindex(2, B, Hkv):
            rows, sign = ((layer.keys, 1), (layer.values, -1))[kind]
            kept, total = oracles.anchors(anchors, [x[b, h, kind].tolist() for x in added], events)
            assert rows.recent_scores[b, h].tolist() == [total[i] for i in range(quantized, seen)]
            if events:
                assert rows.kept_positions[b, h].tolist() == kept
                assert rows.kept_scores[b, h].tolist() == [total[i] for i in kept]
                assert rows.kept_rows[b, h, :, 0].tolist() == [sign * (1 + i) for i in kept]


@st.composite
def chunks_with_scores(draw):
    B, seen, quantized, chunks = draw(st.integers(1, 2)), 0, 0, []
    for _ in range(draw(st.integers(1, 5))):
        new = draw(st.integers(1, 5))
        seen += new
        n = draw(st.integers(0, seen - quantized))
        quantized += n
        row = st.lists(st.integers(0, 5), min_size=seen, max_size=seen)
        chunks.append((new, n, [[[draw(row) for _ in "kv"] for _ in range(2)] for _ in range(B)]))
    return chunks


@given(chunks_with_scores(), st.sampled_from(["1", "2", "4", "10%", "30%", "50%", "100%"]))
def test_anchors(chunks, anchors):
    check_anchors(AnTKV, chunks, anchors)


@pytest.mark.parametrize("percent", [1, 7, 14, 55])
def test_a_share_of_a_hundred_tokens(percent):
    """As many as it says, and not one more by the rounding of a float."""
    check_anchors(AnTKV, [(100, 100, [[[list(range(100))] * 2] * 2])], f"{percent}%")


# ---- the helper for one's own methods

class LargestNumbers(CodecMethod):
    """Keeps the tokens whose first channel is largest: a score of the key itself."""

    def keep_keys(self, layer_cache, n):
        return best_tokens(layer_cache.keys, n, 3, score=lambda keys: keys[..., 0].float())


@given(blocks_of_magnitudes())
def test_best_tokens_by_a_score_of_the_key(blocks):
    """Of all that was ever due, the three best, ties to the earlier one: what has lost cannot come back."""
    layer, seen = new_layer(LargestNumbers(model_of(2).config, scheme="token-dynamic"), 0), None
    for block in blocks:
        numbers = torch.tensor(block)  # (B, Hkv, n)
        seen = numbers if seen is None else torch.cat([seen, numbers], dim=2)
        rows = numbers[..., None].expand(*numbers.shape, d).half()
        layer.keys.append(rows)
        layer.values.append(rows)
        layer.length += rows.shape[2]
        quantize(layer, rows.shape[2])
        for b, h in np.ndindex(seen.shape[:2]):
            assert layer.keys.kept_positions[b, h].tolist() == oracles.top_k(seen[b, h].tolist(), 3)


def test_nothing_is_best_where_nothing_has_a_score():
    layer = new_layer(LargestNumbers(model_of(2).config, scheme="token-dynamic"), 0)
    layer.keys.append(torch.zeros(1, 2, 4, d).half())
    assert best_tokens(layer.keys, 4, 3) is None


# ---- texts that show every fault of faults.py

SIZES = [[[1, -3, 2, 3, 0, 3]], [[2, 3, -4]]]
BLOCKS = [[[[4, 4, 5, 6], [3, 9, 9, 9]]], [[[4, 2, 7, 9], [1, 2, 8, 7]]], [[[0, 1, 1, 0], [0, 0, 5, 5]]]]
CHUNKS = [(3, 0, [[[[4, 1, 2], [0, 1, 5]], [[2, 2, 2], [9, 1, 0]]]]),
          (3, 4, [[[[0, 1, 1, 6, 0, 0], [1, 1, 1, 3, 4, 4]], [[0, 0, 1, 0, 0, 0], [0, 0, 9, 9, 0, 0]]]]),
          (4, 4, [[[[0, 0, 0, 0, 6, 7, 6, 9, 9, 9], [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]],
                   [[0, 0, 1, 0, 4, 5, 2, 3, 1, 1], [1, 2, 3, 0, 9, 9, 9, 9, 9, 9]]]])]
