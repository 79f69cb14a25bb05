"""OTT's pool, and those evicted from it, block by block, against plain lists (oracles.py).

Scores are small whole numbers, so there are many ties.
"""

import numpy as np
import oracles
import torch
from cases import d, model_of, new_layer, quantize_oldest
from hypothesis import example, given
from hypothesis import strategies as st

from tinykv.methods.ott import OTT


@st.composite
def blocks_of_magnitudes(draw):
    """For each block, whole numbers by sequence, head and token: the magnitude of the token's key."""
    B, lengths = draw(st.integers(1, 2)), draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    magnitude = st.integers(0, 5)
    return [[[draw(st.lists(magnitude, min_size=n, max_size=n)) for _ in range(2)] for _ in range(B)] for n in lengths]


@given(blocks_of_magnitudes(), st.integers(1, 4), st.integers(0, 4), st.sampled_from(["smallest", "largest"]))
@example([[[[4, 4, 5, 6], [3, 9, 9, 9]]], [[[4, 2, 7, 9], [1, 2, 8, 7]]], [[[0, 1, 1, 0], [0, 0, 5, 5]]]], 2, 2,
         "smallest")
@example([[[[5], [5]]], [[[1, 2, 3], [0, 9, 9]]]], 2, 1, "smallest")  # a pool that is not full yet
def test_pools(blocks, size, room, select):
    """The pools after each block that is quantized are what plain lists say, and in their places."""
    # in groups of one token, so that a block of any size has whole groups
    method = OTT(model_of(2).config, group_size=1, outlier_num=size, extra_pool=room, skip_layers=1, select=select)
    method.rope = "pre"  # keys are stored as they are
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
            each.append(keys, -keys)
            quantize_oldest(each, n)

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


def test_scores_of_large_keys_are_not_rounded():
    """In 16 bits 2049 is 2048, and a sum beyond 65504 is no number."""
    keys = torch.tensor([[2048, 1], [2048, 0], [60000, 60000]]).half()  # (tokens, d)
    assert OTT(model_of(2).config).size(keys).tolist() == [2049, 2048, 120000]
