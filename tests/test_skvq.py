"""SKVQ's groups and clips, as calibration finds them, against numpy."""
import numpy as np
import oracles
import pytest
import torch
from planted import CONFIG, Hkv, L, Planted, changed, d, few_tries, flat, h, random_rows, same, tables

from tinykv.calibrate import calibrate
from tinykv.codecs.clipped import ClippedGroups
from tinykv.lab.tables import table_bytes
from tinykv.methods.cq import CQ
from tinykv.methods.kvquant import KVQuant
from tinykv.methods.rtn import RTN
from tinykv.methods.skvq import SKVQ

#          smallest, largest, channels
CLUSTERS = [(-1.0, 8.0, 9), (-20.0, -10.0, 5), (5.0, 8.0, 7), (-20.0, 60.0, 11)]


def clustered(layer, kind, x):
    """Channels of four ranges, in an order that differs by layer and kind and pays no heed to heads."""
    of = cluster_of(layer, kind)
    lo, hi = (torch.tensor([CLUSTERS[i][end] for i in of]) for end in (0, 1))
    unit = torch.rand(x.shape, generator=torch.Generator().manual_seed(int(x[0, 0] * 1e6) % 10 ** 6))
    unit[0], unit[1] = 0, 1
    return lo + (hi - lo) * unit * (1 + 0.01 * torch.rand(h, generator=torch.Generator().manual_seed(layer)))


def cluster_of(layer, kind):
    of = torch.cat([torch.full((n,), i) for i, (_, _, n) in enumerate(CLUSTERS)])
    return of[torch.randperm(h, generator=torch.Generator().manual_seed(2 * layer + "kv".index(kind)))].tolist()


def members(codec):
    """The channels of each group, [set]."""
    group = codec.group.tolist()
    return [{c for c, g in enumerate(group) if g == i} for i in range(max(group) + 1)]


def test_channels_of_like_range_share_a_group():
    """Groups are the clusters themselves: their sizes differ, their channels come from both heads."""
    model = Planted(random_rows(shape=clustered))
    method = SKVQ(CONFIG, group_size=8, clip="none")
    calibrate(model, method, model.windows())
    for layer, kind, codec in method.each_codec():
        of = cluster_of(layer, kind)
        clusters = [{c for c in range(h) if of[c] == i} for i in range(4)]
        assert sorted(map(sorted, members(codec))) == sorted(map(sorted, clusters))
        assert codec.alpha.tolist() == [1] * 4 and codec.to_middle.tolist() == [0] * 4
    # 16 bits of each clip, 8 of each to_middle, 32 of each channel's group
    assert table_bytes(method) == 2 * L * (4 * h + 3 * 4)


def test_a_channel_counts_with_its_extremes_over_all_windows():
    """Each window shows another part of a channel's range; only together do they tell channels apart."""
    rows = random_rows(2, 8, shape=lambda layer, kind, x: 0.1 * x)
    for half, channels in ((0, [1, 5, 30]), (1, [2, 9, 31])):
        for k, v in rows[half]:
            for c in channels:
                k[c // d, 7, c % d], v[c // d, 6, c % d] = 9.0, -9.0
    method = SKVQ(CONFIG, group_size=16, clip="none", preserve=2)
    model = Planted(rows)
    calibrate(model, method, model.windows())
    assert all({1, 5, 30, 2, 9, 31} in members(codec) for _, _, codec in method.each_codec())


def test_groups_are_numbered_without_gaps():
    """A cluster that has lost all its channels takes no metadata."""
    codec = ClippedGroups(2, 1, 8, 2, "fp16")
    codec.regroup(torch.tensor([7, 2, 7, 2, 4, 2, 4, 7]))
    assert codec.group.tolist() == [2, 0, 2, 0, 1, 0, 1, 2]
    assert codec.alpha.tolist() == [1, 1, 1] and codec.to_middle.tolist() == [0, 0, 0]
    assert codec.encode(torch.randn(1, 1, 5, 8)).scale.shape == (1, 1, 5, 3)


@pytest.mark.parametrize("clip", ["none", "endpoint"])
@pytest.mark.parametrize("group_size", [4, 32])
def test_without_reordering_groups_are_neighbours(clip, group_size):
    model = Planted(random_rows(1, shape=clustered))
    method = SKVQ(CONFIG, group_size=group_size, reorder="off", clip=clip)
    calibrate(model, method, model.windows())
    for _, _, codec in method.each_codec():
        codec.encode(model.rows[0][0][0][None])  # with nothing to calibrate, groups are made at first use
        assert codec.group.tolist() == [c // group_size for c in range(h)]


def test_calibrating_again_forgets_the_first_time(monkeypatch):
    few_tries(monkeypatch)
    one, two = Planted(random_rows(2, 8, shape=clustered)), Planted(random_rows(2, 8, seed=5))
    groups, neighbours = {"group_size": 8}, {"group_size": 8, "reorder": "off"}
    for cls, options in ((SKVQ, groups), (SKVQ, neighbours), (KVQuant, {}), (RTN, {}), (CQ, {"vq": "d2m4"})):
        method, fresh = (cls(CONFIG, **options) for _ in range(2))
        calibrate(one, method, one.windows())
        for m in (method, fresh):
            calibrate(two, m, two.windows())
        assert same(tables(method), tables(fresh))


# ---- clips

MIDDLES = {"both": (0, 1), "endpoint": (0,), "centre": (1,)}


@pytest.mark.parametrize("sensitivity, reorder, clip, metadata, alpha", [
    ("token", "on", "both", "fp8", None), ("none", "off", "both", "fp16", None),
    pytest.param("token", "off", "centre", "fp16", None, marks=pytest.mark.whole),
    pytest.param("none", "on", "endpoint", "fp8", None, marks=pytest.mark.whole),
    ("none", "on", "both", "fp8", 0.7), ("token", "on", "endpoint", "fp8", 0.92)])  # the last: the released settings
def test_clips_are_the_best_of_the_grid(sensitivity, reorder, clip, metadata, alpha):
    """By brute force over the calibration rows beside the first tokens, which would have had a say of their own.

    A row weighs as much as the norm of its true gradient.
    """
    c = torch.arange(h)  # every other group has half its channels at 0, which a shift would cost
    rows = random_rows(2, 20, shape=lambda layer, kind, x: torch.where(c % 16 < 8, (c % 8 > 3) * (3 + 0.5 * x), x + 4))
    model = Planted(changed(rows, [[0, 1, 2]] * 2))
    method = SKVQ(CONFIG, 2, 1.5, group_size=8, preserve=3, reorder=reorder, clip=clip, metadata=metadata,
                  sensitivity=sensitivity, alpha=alpha)
    calibrate(model, method, model.windows())
    gradients, seen = model.gradients(), set()
    for layer, kind, codec in method.each_codec():
        w = np.linalg.norm(gradients[layer, kind], axis=-1) if sensitivity == "token" else np.ones((2, 20))
        alphas = [alpha] if alpha else [a / 100 for a in range(60 if kind == "k" else 20, 101, 2)]
        x, losses = model.stacked(layer, kind), {}  # (alpha, to_middle): of each group
        for a, m in [(float(np.float16(a)), m) for a in alphas for m in MIDDLES[clip]]:
            of_groups = (np.full(len(codec.alpha), number, np.float32) for number in (a, m))
            read = oracles.clipped_groups(x.numpy(), codec.bits, metadata, codec.group.numpy(), *of_groups)
            error = oracles.to_rows(read) - model.numbers(layer, kind)  # (W, T, h)
            loss = (error[:, 3:] ** 2 * w[:, 3:, None]).sum((0, 1))  # (h)
            losses[a, m] = [loss[list(channels)].sum() for channels in members(codec)]
        for i, chosen in enumerate(zip(codec.alpha.tolist(), codec.to_middle.tolist())):
            assert losses[chosen][i] <= min(of[i] for of in losses.values()) * (1 + 1e-3)
            seen.add(chosen)
    assert {m for _, m in seen} == set(MIDDLES[clip]) and (alpha or len(seen) > 2)


def test_losses_weigh_tokens_and_leave_out_what_is_kept_in_each_head():
    """In whatever order the channels are. A token weighs the norm of its gradient."""
    codec = ClippedGroups(2, Hkv, d, 8, "fp16", reorder=False, clip="endpoint", alpha=1.0)
    x = random_rows(1, 20)[0][0][0]
    codec.regroup(torch.randint(4, (h,), generator=torch.Generator().manual_seed(0)))
    kept = torch.rand(Hkv, 20, generator=torch.Generator().manual_seed(1)) < 0.4
    gradient = torch.randn(Hkv, 20, d, generator=torch.Generator().manual_seed(2)) * torch.arange(20.0)[:, None]
    error = (codec.decode(codec.encode(x[None]))[0] - x).square().masked_fill(kept[..., None], 0)  # (Hkv, T, d)
    error = oracles.to_rows(error[None].numpy())[0] * np.linalg.norm(flat(gradient), axis=1)[:, None]  # (T, h)
    loss = codec.losses(x, kept, codec.weigh(x, gradient))
    assert loss[0].tolist() == pytest.approx([error[:, list(group)].sum() for group in members(codec)], rel=1e-4)


def test_without_any_gradient_tokens_weigh_the_same():
    """Weights of 0 would leave every clip without a loss, and the first would be taken."""
    codec, x = ClippedGroups(2, Hkv, d, 8, "fp16", reorder=False), random_rows(1, 20)[0][0][0]
    assert codec.weigh(x, torch.zeros_like(x)).tolist() == [1] * 20


@pytest.mark.parametrize("bits, lowest", [(1, 0.2), (1.5, 0.2), (2, 0.6), (4, 0.6)])
def test_codes_of_two_or_three_levels_may_be_clipped_further(bits, lowest):
    alphas = [alpha for alpha, _ in ClippedGroups(bits, Hkv, d, 8).choices]
    assert (min(alphas), max(alphas)) == (pytest.approx(lowest, abs=1e-3), 1)


def test_codes_make_up_for_a_rounded_zero_point_in_the_smallest_steps_of_fp8():
    """A constant 0.53: its zero point is 0.5 in e4m3, and 15 steps of 2^-9 are missing."""
    codec = ClippedGroups(8, 1, 8, 8, "fp8", reorder=False, clip="none")
    read = codec.decode(codec.encode(torch.full((1, 1, 2, 8), 0.53)))
    assert set(read.flatten().tolist()) == {0.5 + 15 / 512}


@pytest.mark.parametrize("bits, group_size, said", [
    ({}, h, True), ({"k_bits": 16}, h, True), ({"v_bits": 16}, h, True),  # 16 bits have no groups
    ({"k_bits": 16, "v_bits": 16}, h, False), ({}, h // 2, False), ({"reorder": "off"}, h, False)])
def test_one_group_is_told(bits, group_size, said):
    assert bool(SKVQ(CONFIG, group_size=group_size, **bits).describe()) == said
