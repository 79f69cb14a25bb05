"""The calibration of SKVQ and KVQuant, against numpy.

Most tests run on `Planted`: not a Llama, but an object with its interface whose keys, values and gradients are ours.
So groups, ranges, levels and clips have a truth to be compared with.
"""
import copy
import itertools
import math
from functools import lru_cache

import numpy as np
import oracles
import pytest
import torch
import torch.nn.functional as F

from tinykv import UserError
from tinykv.calibrate import calibrate, check_window, record
from tinykv.codecs.clipped import ClippedGroups
from tinykv.codecs.nonuniform import BINS, Histogram, NonUniform
from tinykv.methods.kvquant import KVQuant
from tinykv.methods.kvsink import KVSink
from tinykv.methods.registry import METHODS
from tinykv.methods.rtn import RTN
from tinykv.methods.skvq import SKVQ
from tinykv.model import Llama, LlamaConfig
from tinykv.tracing import Trace

Hkv, d, L, V, D = 2, 16, 2, 23, 12  # of Planted
h = Hkv * d
CONFIG = LlamaConfig(V, D, 24, L, 2, Hkv, d, 4096)


class Still:
    """A rotation by nothing."""
    def rotate(self, x, positions=None):
        return x


class Planted:
    """rows: for each window, for each layer, (k, v), each (Hkv, T, d). A window's first token is its number.

    Every token's hidden state is linear in its own keys and values, so that its gradients are its own affair.
    """
    config, rope = CONFIG, Still()

    def __init__(self, rows, gain=None):
        rng = torch.Generator().manual_seed(11)
        self.rows = rows
        self.mix = torch.randn(L, 2, h, D, generator=rng) * 0.1  # of layer and kind
        if gain is not None:
            self.mix *= gain[..., None]  # gain (L, 2, h): how much a channel counts
        self.lm_head = torch.nn.Linear(D, V, bias=False)
        self.lm_head.weight.data = torch.randn(V, D, generator=rng)

    def windows(self):
        T = self.rows[0][0][0].shape[1]
        tokens = torch.randint(V, (len(self.rows), T), generator=torch.Generator().manual_seed(12))
        tokens[:, 0] = torch.arange(len(self.rows))
        return tokens

    def __call__(self, tokens, cache, logits=True):
        assert not logits
        out = 0
        for layer, pair in enumerate(self.rows[int(tokens[0, 0])]):
            new = cache.update(layer, None, *(x[None] for x in pair), torch.arange(tokens.shape[1]))
            out = out + sum(x.float().transpose(1, 2).flatten(2) @ m for x, m in zip(new, self.mix[layer]))  # (1, T, D)
            cache.observe(layer, out)
        return out

    def gradients(self):
        """Of each window's mean loss by layer and kind: {(layer, kind): (W, T, h)}, by hand and in double."""
        found = {}
        for window, rows in zip(self.windows().numpy(), self.rows):
            state = sum(flat(x) @ m.double().numpy() for pair, mix in zip(rows, self.mix) for x, m in zip(pair, mix))
            head = self.lm_head.weight.detach().double().numpy()
            scores = state @ head.T  # (T, V)
            p = np.exp(scores - scores.max(1, keepdims=True))
            p /= p.sum(1, keepdims=True)  # (T, V)
            p[np.arange(len(p) - 1), window[1:]] -= 1
            p[-1] = 0  # the last token has nothing to foretell
            by_state = p @ head / (len(p) - 1)  # (T, D)
            for layer, mix in enumerate(self.mix.double().numpy()):
                for kind, m in zip("kv", mix):
                    found.setdefault((layer, kind), []).append(by_state @ m.T)
        return {key: np.stack(g) for key, g in found.items()}

    def numbers(self, layer, kind):
        """(W, T, h) in double"""
        return np.stack([flat(rows[layer]["kv".index(kind)]) for rows in self.rows])


def flat(x):
    """(Hkv, T, d) -> (T, h)"""
    return x.double().transpose(0, 1).flatten(1).numpy()


def random_rows(windows=4, T=32, seed=0, shape=None):
    """Rows in 16 bits, with channels of all sizes and offsets. shape(layer, kind, numbers (T, h)) may change them."""
    rng, out = torch.Generator().manual_seed(seed), []
    for _ in range(windows):
        out.append([])
        for layer in range(L):
            pair = []
            for kind in "kv":
                x = torch.randn(T, h, generator=rng)
                x = shape(layer, kind, x) if shape else x * torch.logspace(-1, 1, h) + torch.linspace(-2, 5, h)
                pair.append(x.half().float().unflatten(1, (Hkv, d)).transpose(0, 1))
            out[-1].append(tuple(pair))
    return out


def recorded(model, method, windows, gradients=False):
    """(layer, kind, rows, kept, gradient) of each window, layer and kind, as codecs see them."""
    for window in windows:
        recorder = record(model, method, window, gradients)
        for layer in range(len(recorder.layers)):
            for kind in "kv":
                yield layer, kind, *recorder.of(layer, kind)


def codecs_of(method):
    """(layer, kind, codec) of all codecs."""
    return [(layer, kind, getattr(pair, kind)) for layer, pair in enumerate(method.codecs) for kind in "kv"]


def tables(method):
    return {name: t.clone() for name, t in method.calibrated().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ---- gradients

@lru_cache
def llama(dtype=torch.float32, size=1.0):
    torch.manual_seed(7)
    model = Llama(LlamaConfig(31, 24, 32, 3, 4, 2, 8, 256))
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.normal_(std=size * p.shape[1] ** -0.5)
        model.model["embed_tokens"].weight.normal_()
    return model.to(dtype)


def random_tokens(n, T, seed=0):
    return torch.randint(31, (n, T), generator=torch.Generator().manual_seed(seed))


class Leaves(Trace):
    """The keys, as attention reads them, and the values are leaves of the graph."""
    def update(self, layer, q, k, v, positions):
        self.k.append(self.rope.rotate(k, positions).detach().requires_grad_())
        self.v.append(v.detach().requires_grad_())
        return self.k[-1], self.v[-1]


@pytest.mark.parametrize("rope", ["pre", "post"])
def test_gradients_are_those_of_what_is_stored(rope):
    """In the last layer: after RoPE that of the keys that attention reads; before RoPE the same, turned back."""
    model, window = llama(torch.float64), random_tokens(1, 9)[0]
    trace = Leaves(model)
    loss = F.cross_entropy(model(window[None], trace)[0, :-1], window[1:])
    of_keys, of_values = torch.autograd.grad(loss, [trace.k[-1], trace.v[-1]])  # (1, Hkv, T, d) both
    if rope == "pre":
        of_keys = model.rope.rotate(of_keys, -torch.arange(9))
    parts = list(recorded(model, KVQuant(model.config, rope=rope), window[None], gradients=True))
    assert [(layer, kind) for layer, kind, *_ in parts] == [(i, kind) for i in range(3) for kind in "kv"]
    for (*_, rows, kept, gradient), expected in zip(parts[-2:], (of_keys, of_values)):
        assert gradient.shape == rows.shape == (2, 9, 8) and kept.tolist() == [[True] + [False] * 8] * 2
        assert torch.allclose(gradient, expected[0], rtol=1e-3, atol=1e-4 * expected.abs().max().item())


@pytest.mark.parametrize("rope", ["pre", "post"])
@pytest.mark.parametrize("gradients", [False, True])
def test_recorded_rows_are_those_that_are_stored(rope, gradients):
    """With gradients the forward is exact, without it runs on 16 bits: rows of the first layer know no difference."""
    model, windows = llama(), random_tokens(2, 9)
    method = KVQuant(model.config, rope=rope, preserve=2)
    parts = list(recorded(model, method, windows, gradients=gradients))
    assert len(parts) == 2 * 3 * 2
    for i, window in enumerate(windows):
        block = model.model["layers"][0]
        with torch.no_grad():
            _, k, v = block.self_attn.qkv(block.input_layernorm(model.model["embed_tokens"](window[None])))
        k = k.half() if rope == "pre" else model.rope.rotate(k.half(), torch.arange(9))
        for (_, _, rows, kept, gradient), expected in zip(parts[6 * i:6 * i + 2], (k, v.half())):
            assert torch.equal(rows, expected[0]) and (gradient is None) != gradients
            assert kept.tolist() == [[True] * 2 + [False] * 7] * 2


def test_planted_gradients_are_right():
    """The oracle of the levels below and the product's gradients come to the same."""
    model = Planted(random_rows())
    truth = model.gradients()
    for i, (layer, kind, rows, _, gradient) in enumerate(recorded(model, KVQuant(CONFIG), model.windows(),
                                                                  gradients=True)):
        assert np.allclose(flat(gradient), truth[layer, kind][i // (2 * L)], rtol=1e-3, atol=1e-7)
        assert np.array_equal(flat(rows), model.numbers(layer, kind)[i // (2 * L)])


# ---- kvquant: ranges and levels

def shapes(layer, kind, x):
    """Four sorts of channels: wide or narrow, around the middle or at both ends; in every other token values are wide.

    So where levels belong depends on which numbers count.
    """
    c, t = torch.arange(h), torch.arange(len(x))[:, None]
    ends = torch.where(x > 0, 1.0, -1.0) + 0.15 * x
    x = torch.where(c % 2 == 0, 0.5 * x, ends)
    if kind == "k":
        return x * torch.where(c % 2 == 0, 4.0, 0.2) + torch.linspace(-3, 3, h)
    return torch.where(t % 2 == 0, x, 8 * torch.randn(x.shape, generator=torch.Generator().manual_seed(len(x))))


def shaped(windows=6, T=32):
    """Numbers at the ends count most."""
    gain = torch.where(torch.arange(h) % 2 == 0, 0.3, 3.0).expand(L, 2, h).clone()
    return Planted(random_rows(windows, T, 3, shapes), gain)


def normalized(model, layer, kind, codec, share, first):
    """In numpy: x', half and use, each (W, T, h); use is False at outliers and at the first tokens."""
    x = model.numbers(layer, kind)
    mid, half, use = np.zeros_like(x), np.zeros_like(x), np.ones(x.shape, dtype=bool)
    if kind == "k":
        mid[:], half[:] = codec.mid.double().numpy(), codec.half.double().numpy()
        use = (np.abs(x - mid) <= half) | (share == 0)
    else:
        for w, t in np.ndindex(x.shape[:2]):
            mid[w, t], half[w, t], outlier = oracles.token_range(x[w, t], np.arange(h), share)
            use[w, t] = ~outlier
    use[:, :first] = False
    return (x - mid) / half, half, use


def lloyd_step(x, w, levels):
    at = np.abs(x[:, None] - levels[None]).argmin(1)
    return np.array([np.average(x[at == i], weights=w[at == i]) for i in range(len(levels))])


def kvquant_on(model, **changed):
    method = KVQuant(CONFIG, **{"k_bits": 2, "v_bits": 3, "outliers": 4.0, "q_norm": "off", **changed})
    calibrate(model, method, model.windows())
    return method


@pytest.mark.parametrize("outliers, preserve", [(0.0, 0), (1.0, 5), (20.0, 1)])
def test_ranges_of_keys(outliers, preserve):
    model = Planted(random_rows())
    method = kvquant_on(model, outliers=outliers, preserve=preserve, sensitivity="none")
    for layer, pair in enumerate(method.codecs):
        x = model.numbers(layer, "k")[:, preserve:].reshape(-1, h)
        lo, hi = np.quantile(x, [outliers / 200, 1 - outliers / 200], axis=0)
        assert pair.k.mid.dtype == pair.k.half.dtype == pair.k.levels.dtype == torch.float16
        assert np.allclose(pair.k.mid.double(), (lo + hi) / 2, rtol=1e-3, atol=1e-4)
        assert np.allclose(pair.k.half.double(), (hi - lo) / 2, rtol=1e-3, atol=1e-4)
        assert pair.v.mid is None


@pytest.mark.parametrize("sensitivity, outliers", [("none", 0.0), ("fisher", 4.0), ("fisher-range", 4.0),
                                                   pytest.param("fisher-range", 0.0, marks=pytest.mark.whole)])
def test_levels_are_a_fixed_point_on_the_raw_numbers(sensitivity, outliers):
    """A histogram's levels are as good as those of the numbers themselves: another step moves none by a bin's width."""
    model = shaped()
    method, gradients = kvquant_on(model, sensitivity=sensitivity, outliers=outliers), model.gradients()
    for layer, kind, codec in codecs_of(method):
        x, half, use = normalized(model, layer, kind, codec, outliers / 100, 1)
        w = {"none": 1, "fisher": gradients[layer, kind] ** 2,
             "fisher-range": (gradients[layer, kind] * half) ** 2}[sensitivity] * np.ones_like(x)
        x, w, levels = x[use], w[use], codec.levels.double().numpy()
        assert len(levels) == 2 ** codec.bits and (np.diff(levels) > 0).all() and np.abs(levels).max() <= 1.001
        moved = lloyd_step(x, w, levels)
        assert np.abs(moved - levels).max() < 2 / BINS + 2 ** -11, (kind, moved - levels)


def test_two_levels_are_the_best_there_are():
    """Of all cuts of the numbers into two."""
    rng = np.random.default_rng(1)
    for _ in range(8):
        middles, spreads = rng.uniform(-0.9, 0.9, 4), rng.uniform(0.02, 0.4, 4)
        x = np.sort(np.concatenate([rng.normal(m, s, 100) for m, s in zip(middles, spreads)]).clip(-1, 1))
        w = rng.exponential(size=400) ** 2
        histogram = Histogram()
        histogram.add(torch.tensor(x), torch.tensor(w))
        levels = histogram.levels(2, q_norm=False).double().numpy()
        found = (w * np.abs(x[:, None] - levels).min(1) ** 2).sum()
        cuts = [(slice(0, i), slice(i, 400)) for i in range(1, 400)]
        best = min(sum((w[of] * (x[of] - np.average(x[of], weights=w[of])) ** 2).sum() for of in cut) for cut in cuts)
        assert found <= best * 1.01 + w.sum() * BINS ** -2


@pytest.mark.parametrize("numbers, weights, n, levels", [
    # a bin stands for its weighted mean, not for its middle nor for its plain mean
    ([0.0005, 0.0015, -0.5], [1.0, 3.0, 1.0], 2, [-0.5, 0.00125]),
    ([0.0005, 0.0015, -0.5], [0.0, 0.0, 0.0], 2, [-0.5, 0.001]),  # no gradient at all: all count alike
    ([-1.0, 1.0, 1.0], [1.0, 1.0, 1.0], 2, [-1.0, 1.0])])
def test_levels_of_a_few_numbers(numbers, weights, n, levels):
    histogram = Histogram()
    histogram.add(torch.tensor(numbers), torch.tensor(weights))
    assert histogram.levels(n, q_norm=False).tolist() == pytest.approx(levels, rel=1e-3)
    for q_norm in (False, True):  # fewer numbers than levels
        many = histogram.levels(8, q_norm)
        assert many.shape == (8,) and torch.isfinite(many).all()


def test_q_norm_keeps_mean_and_deviation():
    """k-means alone makes numbers of less spread than those that it codes; weights shift their mean.

    Exactly, if each number keeps the level that it had; a few are nearer to another one, once the levels have moved.
    """
    model = shaped()
    off, on = kvquant_on(model, v_bits=2), kvquant_on(model, v_bits=2, q_norm="on")
    for (layer, kind, codec), (_, _, corrected) in zip(codecs_of(off), codecs_of(on)):
        x, _, use = normalized(model, layer, kind, codec, 0.04, 1)
        x, before, after = x[use], codec.levels.double().numpy(), corrected.levels.double().numpy()
        at = np.abs(x[:, None] - before[None]).argmin(1)
        assert after[at].mean() == pytest.approx(x.mean(), abs=3e-3)
        assert after[at].std() == pytest.approx(x.std(), rel=3e-3)
        assert abs(before[at].std() - x.std()) + abs(before[at].mean() - x.mean()) > 0.01


def test_q_norm_takes_a_bin_for_the_mean_of_its_numbers():
    """Not for their weighted mean: the border between two levels, 0.001, may lie between the two."""
    numbers = torch.tensor([-0.498] * 50 + [0.5] * 50 + [0.0001] * 90 + [0.0018])
    histogram = Histogram()
    histogram.add(numbers, torch.tensor([1.0] * 100 + [0.0] * 90 + [1e-3]))
    before, after = histogram.levels(2, False).double(), histogram.levels(2, True).double()
    read = after[(numbers > before.mean()).long()]  # (191)
    assert read.mean().item() == pytest.approx(numbers.mean().item(), abs=5e-3)
    assert read.std().item() == pytest.approx(numbers.std().item(), rel=1e-2)


@pytest.mark.parametrize("q_norm, bits, used", [(None, 2, True), (None, 3, False), ("on", 3, True), ("off", 2, False)])
def test_q_norm_is_for_two_bits(q_norm, bits, used):
    assert NonUniform(bits, 2, 8, "token", 0.01, q_norm=q_norm).q_norm == used


# ---- what is kept is not learned from

class PerHead(KVQuant):
    """Keeps other tokens in each head."""
    at = [[2, 0], [7, 7]]

    def keep_keys(self, layer_cache, n):
        return torch.tensor([self.at])


def changed(rows, at):
    """rows with the tokens at[head] of each head replaced by something huge."""
    out = []
    for window in rows:
        out.append([])
        for k, v in window:
            pair = []
            for i, x in enumerate((k, v)):
                x = x.clone()
                for head, tokens in enumerate(at):
                    x[head, tokens] = 500.0 + 70 * i + torch.arange(float(d))
                pair.append(x)
            out[-1].append(tuple(pair))
    return out


@pytest.mark.parametrize("cls, options", [
    (KVQuant, {"outliers": 4.0}), (PerHead, {"sensitivity": "none", "outliers": 4.0}),
    (KVQuant, {"sensitivity": "fisher", "outliers": 0.0}), (SKVQ, {}), (SKVQ, {"reorder": "off", "metadata": "fp16"}),
    (METHODS["pfn"], {"scheme": "token-static"}), (METHODS["pfn"], {"scheme": "channel-static"}),
], ids=str)
def test_kept_tokens_are_not_learned_from(cls, options):
    """Whatever they hold. Their own loss may be huge; a planted token's gradient is its own."""
    at = PerHead.at if cls is PerHead else [[0, 1, 2]] * 2
    learned = []
    for rows in (random_rows(2), changed(random_rows(2), at), changed(random_rows(2), [[3], [3]])):
        model, method = Planted(rows), cls(CONFIG, **{"preserve": 3, **options})
        calibrate(model, method, model.windows())
        learned.append(tables(method))
    assert learned[0] and same(*learned[:2]) and not same(learned[0], learned[2])


# ---- skvq: groups

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
    for layer, kind, codec in codecs_of(method):
        of = cluster_of(layer, kind)
        clusters = [{c for c in range(h) if of[c] == i} for i in range(4)]
        assert sorted(map(sorted, members(codec))) == sorted(map(sorted, clusters))
        assert codec.alpha.tolist() == [1] * 4 and codec.centre.tolist() == [0] * 4
    # 16 bits of each clip, 8 of each centre, 32 of each channel's group
    assert method.offline_bytes == 2 * L * (4 * h + 3 * 4)


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
    assert all({1, 5, 30, 2, 9, 31} in members(codec) for _, _, codec in codecs_of(method))


def test_groups_are_numbered_without_gaps():
    """A cluster that has lost all its channels takes no metadata."""
    codec = ClippedGroups(2, 1, 8, 2, "fp16")
    codec.regroup(torch.tensor([7, 2, 7, 2, 4, 2, 4, 7]))
    assert codec.group.tolist() == [2, 0, 2, 0, 1, 0, 1, 2]
    assert codec.alpha.tolist() == [1, 1, 1] and codec.centre.tolist() == [0, 0, 0]
    assert codec.encode(torch.randn(1, 1, 5, 8)).scale.shape == (1, 1, 5, 3)


@pytest.mark.parametrize("clip", ["none", "endpoint"])
@pytest.mark.parametrize("group_size", [4, 32])
def test_without_reordering_groups_are_neighbours(clip, group_size):
    model = Planted(random_rows(1, shape=clustered))
    method = SKVQ(CONFIG, group_size=group_size, reorder="off", clip=clip)
    calibrate(model, method, model.windows())
    for _, _, codec in codecs_of(method):
        codec.encode(model.rows[0][0][0][None])  # with nothing to calibrate, groups are made at first use
        assert codec.group.tolist() == [c // group_size for c in range(h)]


def test_calibrating_again_forgets_the_first_time():
    one, two = Planted(random_rows(2, shape=clustered)), Planted(random_rows(2, seed=5))
    groups, neighbours = {"group_size": 8}, {"group_size": 8, "reorder": "off"}
    for cls, options in ((SKVQ, groups), (SKVQ, neighbours), (KVQuant, {}), (RTN, {})):
        method, fresh = (cls(CONFIG, **options) for _ in range(2))
        calibrate(one, method, one.windows())
        for m in (method, fresh):
            calibrate(two, m, two.windows())
        assert same(tables(method), tables(fresh))


# ---- skvq: clips

def read_by_oracle(codec, x, metadata="fp8", alpha=None, centre=None):
    """What rows x (Hkv, T, d) read as in a codec's groups, by numpy: (T, h). alpha, centre: others for all groups."""
    alpha, centre = (own.float().numpy() if given is None else np.full(len(own), given, np.float32)
                     for own, given in ((codec.alpha, alpha), (codec.centre, centre)))
    read = oracles.clipped_groups(x[None].numpy(), codec.bits, metadata, codec.group.numpy(), alpha, centre)
    return oracles.to_rows(read)[0]


def check_clips(sensitivity, reorder, clip, metadata, alpha=None):
    """By brute force over the calibration rows beside the first tokens, which would have had a say of their own.

    A row weighs as much as the norm of its true gradient.
    """
    c = torch.arange(h)  # every other group has half its channels at 0, which a shift would cost
    rows = random_rows(shape=lambda layer, kind, x: torch.where(c % 16 < 8, (c % 8 > 3) * (3 + 0.5 * x), x + 4))
    model = Planted(changed(rows, [[0, 1, 2]] * 2))
    method = SKVQ(CONFIG, 2, 1.5, group_size=8, preserve=3, reorder=reorder, clip=clip, metadata=metadata,
                  sensitivity=sensitivity, alpha=alpha)
    calibrate(model, method, model.windows())
    gradients, seen = model.gradients(), set()
    for layer, kind, codec in codecs_of(method):
        w = np.linalg.norm(gradients[layer, kind], axis=-1) if sensitivity == "token" else np.ones((4, 32))
        alphas = [alpha] if alpha else [a / 100 for a in range(60 if kind == "k" else 20, 101, 2)]
        losses = {}  # (alpha, centre): of each group
        for a, centre in [(float(np.float16(a)), centre) for a in alphas for centre in CENTRES[clip]]:
            loss = np.zeros(h)
            for window, pairs in enumerate(model.rows):
                x = pairs[layer]["kv".index(kind)]
                error = read_by_oracle(codec, x, metadata, a, centre) - flat(x)  # (T, h)
                loss += (error[3:] ** 2 * w[window, 3:, None]).sum(0)
            losses[a, centre] = [loss[list(channels)].sum() for channels in members(codec)]
        for i, chosen in enumerate(zip(codec.alpha.tolist(), codec.centre.tolist())):
            assert losses[chosen][i] <= min(of[i] for of in losses.values()) * (1 + 1e-3)
            seen.add(chosen)
    assert {centre for _, centre in seen} == set(CENTRES[clip]) and (alpha or len(seen) > 2)


CENTRES = {"both": (0, 1), "endpoint": (0,), "centre": (1,)}


@pytest.mark.parametrize("sensitivity, reorder, clip, metadata, alpha", [
    ("token", "on", "both", "fp8", None), ("none", "off", "both", "fp16", None),
    pytest.param("token", "off", "centre", "fp16", None, marks=pytest.mark.whole),
    pytest.param("none", "on", "endpoint", "fp8", None, marks=pytest.mark.whole), ("none", "on", "both", "fp8", 0.7)])
def test_clips_are_the_best_of_the_grid(sensitivity, reorder, clip, metadata, alpha):
    check_clips(sensitivity, reorder, clip, metadata, alpha)


def test_losses_weigh_tokens_and_leave_out_what_is_kept_in_each_head():
    """In whatever order the channels are. A token weighs the norm of its gradient."""
    codec, x = ClippedGroups(2, Hkv, d, 8, "fp16", reorder=False, centres=(0,), alpha=1.0), random_rows(1, 20)[0][0][0]
    codec.regroup(torch.randint(4, (h,), generator=torch.Generator().manual_seed(0)))
    kept = torch.rand(Hkv, 20, generator=torch.Generator().manual_seed(1)) < 0.4
    gradient = torch.randn(Hkv, 20, d, generator=torch.Generator().manual_seed(2)) * torch.arange(20.0)[:, None]
    error = (codec.decode(codec.encode(x[None]))[0] - x).square().masked_fill(kept[..., None], 0)  # (Hkv, T, d)
    error = oracles.to_rows(error[None].numpy())[0] * np.linalg.norm(flat(gradient), axis=1)[:, None]  # (T, h)
    codec.loss = 0
    codec.collect(0, x, kept, gradient)
    assert codec.loss[0].tolist() == pytest.approx([error[:, list(group)].sum() for group in members(codec)], rel=1e-4)


@pytest.mark.parametrize("bits, lowest", [(1, 0.2), (1.5, 0.2), (2, 0.6), (4, 0.6)])
def test_codes_of_two_or_three_levels_may_be_clipped_further(bits, lowest):
    alphas = [alpha for alpha, _ in ClippedGroups(bits, Hkv, d, 8).choices]
    assert (min(alphas), max(alphas)) == (pytest.approx(lowest, abs=1e-3), 1)


def test_the_released_settings():
    """--alpha 0.92 --clip endpoint."""
    model = Planted(random_rows(1, shape=clustered))
    method = SKVQ(CONFIG, 2, 1.5, group_size=8, alpha=0.92, clip="endpoint")
    calibrate(model, method, model.windows())
    for layer, kind, codec in codecs_of(method):
        x = model.rows[0][layer]["kv".index(kind)]
        read = flat(codec.decode(codec.encode(x[None]))[0])  # (T, h)
        want, other = (read_by_oracle(codec, x, alpha=np.float16(alpha), centre=0) for alpha in (0.92, 1))
        assert np.isclose(read, want, rtol=1e-4, atol=1e-4).mean() > 0.99  # but for ties
        assert np.abs(other - want).max() > 0.1


def test_skvq_s_codec_under_kvsink_s_tokens():
    """`kvsink --scheme skvq`: the same codec as skvq's, with the tokens of another rule left out of its calibration."""
    model = Planted(random_rows())
    sinks = KVSink(CONFIG, preserve=2, emergence_layer=0, outlier_channel=0, scheme="skvq", group_size=8)
    assert sinks.rope == "pre" and sinks.scheme == "skvq"
    mine, plain = SKVQ(CONFIG, group_size=8, preserve=0), RTN(CONFIG, scheme="skvq", group_size=8)
    for method in (mine, plain):
        calibrate(model, method, model.windows())
    assert same(tables(mine), tables(plain))
    assert [type(codec) for pair in sinks.codecs for codec in pair] == [type(codec) for p in mine.codecs for codec in p]


# ---- what cannot be learned from

@pytest.mark.parametrize("name, options", [
    ("skvq", {"group_size": 4}), ("kvquant", {"preserve": 5}), ("kvquant", {"preserve": 5, "k_bits": 16}),
    ("pfn", {"scheme": "token-static"})], ids=str)
def test_windows_of_which_nothing_is_left(name, options):
    """Nothing was seen, so nothing can be calibrated; one token more will do."""
    model = llama()
    for T in (2, 5):
        with pytest.raises(UserError, match="hold no token that the method does not keep"):
            calibrate(model, METHODS[name](model.config, **options), random_tokens(3, T))
    method = METHODS[name](model.config, **options)
    calibrate(model, method, random_tokens(3, 7))
    assert all(torch.isfinite(t.float()).all() for t in method.calibrated().values())


def test_a_head_of_which_nothing_is_left():
    """One is enough: it has a range, or a codebook, of its own."""
    kept = torch.tensor([[True, True], [True, False]])
    with pytest.raises(UserError, match="hold no token that the method does not keep"):
        check_window(0, torch.zeros(2, 2, d), kept, None)
    check_window(0, torch.zeros(2, 2, d), kept[1:].expand(2, -1), None)


@pytest.mark.parametrize("name", ["skvq", "kvquant", "kvsink"])
def test_a_broken_model_teaches_nothing(name):
    """Rather than tables of NaN: it would be the text's perplexity that shows it, if anything."""
    for bad, weight in itertools.product((math.nan, math.inf), ("mlp.down_proj", "self_attn.v_proj")):
        model = copy.deepcopy(llama())
        model.model["layers"][1].get_submodule(weight).weight.data[0, 0] = bad
        with pytest.raises(UserError, match="finite"):
            calibrate(model, METHODS[name](model.config), random_tokens(2, 20))


def test_a_loss_without_gradient_says_where():
    model = copy.deepcopy(llama())
    model.lm_head.weight.data[3, 3] = math.nan
    with pytest.raises(UserError, match="gradients of layer"):
        calibrate(model, KVQuant(model.config), random_tokens(2, 20))


def test_a_method_is_shown_each_window_block_by_block():
    seen = []

    class Looks(RTN):
        passes = 2

        def collect(self, step, layer, hidden):
            seen.append((step, layer, tuple(hidden.shape)))

        def fit(self, step):
            seen.append(step)

    config = LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2,
                         num_key_value_heads=1, head_dim=4, max_position_embeddings=8)
    model = Llama(config)
    calibrate(model, Looks(config, scheme="token-dynamic", group_size=4), torch.randint(9, (3, 5)))
    a_pass = [[(step, layer, (1, 5, 8)) for _ in range(3) for layer in (-1, 0, 1)] + [step] for step in (0, 1)]
    assert seen == [*a_pass[0], *a_pass[1]]
