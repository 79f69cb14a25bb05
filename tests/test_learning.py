"""The calibration of SKVQ and KVQuant, against numpy; a file of its tables; and what all of it costs in bits.

Most tests run on `Planted`: not a Llama, but an object with its interface whose keys, values and gradients are ours.
So groups, ranges, levels and clips have a truth to be compared with. The oracles share no code with the product.
"""
import math
from functools import lru_cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import chunk_of
from hypothesis import given, settings
from hypothesis import strategies as st

from tinykv import UserError
from tinykv.cache import PROTOCOLS, KVCache
from tinykv.calibrate import calibrate, record
from tinykv.codecs.clipped import ClippedGroups
from tinykv.codecs.nonuniform import BINS, SENSITIVITIES, Histogram, Tails
from tinykv.evaluate import FAR, Result, count_bits
from tinykv.methods.kvquant import KVQuant
from tinykv.methods.kvsink import KVSink
from tinykv.methods.registry import METHODS
from tinykv.methods.rtn import RTN
from tinykv.methods.skvq import SKVQ
from tinykv.model import Llama, LlamaConfig
from tinykv.storage import CalibrationFile

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
            p = np.exp(state @ head.T)
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


def random_rows(windows=4, T=48, seed=0, shape=None):
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


def kinds(pair):
    """The two codecs of a layer, with their names."""
    return zip("kv", pair)


def read_back(codec, x, ignore=None):
    """x as it is read after quantization."""
    return codec.decode(codec.encode(x, ignore))


def tables(method):
    return {name: t.clone() for name, t in method.calibrated().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ---- percentiles

@settings(max_examples=80)
@given(st.integers(0, 9999), st.lists(st.integers(1, 40), min_size=1, max_size=5),
       st.sampled_from([0.0, 0.0005, 0.005, 0.05, 0.2, 0.49]))
def test_percentiles_are_numpys(seed, pieces, p):
    """In pieces, with other tokens left out in each head; ties and few tokens included."""
    rng = torch.Generator().manual_seed(seed)
    size = int(p * sum(pieces)) + 2  # as `NonUniform` chooses it
    tails, left = Tails(size), [[] for _ in range(2)]
    for i, n in enumerate(pieces):
        rows = torch.randn(2, n, 3, generator=rng)
        rows = rows.round() if seed % 2 else rows
        kept = torch.rand(2, n, generator=rng) < 0.3
        kept[:, 0] &= i > 0  # something is left
        tails.add(rows.half(), kept if seed % 3 else None)
        for head in range(2):
            left[head].append(rows[head].half()[~kept[head]] if seed % 3 else rows[head].half())
    lo, hi = tails.percentiles(p)
    for head in range(2):
        x = torch.cat(left[head]).double().numpy()
        assert tails.count[head].tolist() == [len(x)] * 3
        assert np.allclose(lo[head * 3:head * 3 + 3], np.quantile(x, p, axis=0), atol=2e-5)
        assert np.allclose(hi[head * 3:head * 3 + 3], np.quantile(x, 1 - p, axis=0), atol=2e-5)
        if p == 0:
            assert lo[head * 3:head * 3 + 3].tolist() == x.min(0).tolist()


def test_tails_hold_no_more_than_they_need():
    tails = Tails(3)
    for i in range(5):
        tails.add(torch.full((2, 50, 4), float(i)), None)
    assert tails.low.shape == tails.high.shape == (2, 3, 4)
    assert tails.low.eq(0).all() and tails.high.eq(4).all()


def test_a_head_of_which_nothing_is_left_counts_nothing():
    tails = Tails(3)
    tails.add(torch.ones(2, 4, 3), torch.tensor([[True] * 4, [False] * 4]))
    assert tails.count.tolist() == [[0] * 3, [4] * 3]


# ---- gradients

class Nudged:
    """An exact cache that adds `by` to one number of one layer's keys (as the method stores them) or values."""

    def __init__(self, model, rope, layer, kind, place, by):
        self.rope, self.stored, self.at, self.place, self.by = model.rope, rope, (layer, kind), place, by

    def __len__(self):
        return 0

    def without_prefix(self, tokens):
        return tokens

    def observe(self, layer, hidden):
        pass

    def update(self, layer, q, k, v, positions):
        k, v = k.clone(), v.clone()
        if self.stored == "pre" and self.at == (layer, "k"):
            k[0][self.place] += self.by
        K = self.rope.rotate(k, positions)
        if self.stored == "post" and self.at == (layer, "k"):
            K[0][self.place] += self.by
        if self.at == (layer, "v"):
            v[0][self.place] += self.by
        return K, v


@lru_cache
def llama(dtype=torch.float32, size=1.0, **changes):
    torch.manual_seed(7)
    model = Llama(LlamaConfig(**{"vocab_size": 31, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 3,
                                 "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
                                 "max_position_embeddings": 256, **changes}))
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.normal_(std=size * p.shape[1] ** -0.5)
        model.model["embed_tokens"].weight.normal_()
    return model.to(dtype)


def random_tokens(n, T, seed=0, model=None):
    vocab = (model or llama()).config.vocab_size
    return torch.randint(vocab, (n, T), generator=torch.Generator().manual_seed(seed))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("rope", ["pre", "post"])
def test_gradients_against_finite_differences(rope):
    """Of the window's mean loss by a stored number: one that is changed where it is stored, and nowhere else."""
    model, window = llama(torch.float64, 1.5), random_tokens(1, 9)[0]
    method = KVQuant(model.config, rope=rope)

    def loss(*where):
        with torch.no_grad():
            hidden = model(window[None], Nudged(model, rope, *where), logits=False)
            return F.cross_entropy(model.lm_head(hidden[0, :-1]), window[1:]).item()

    rng, step = torch.Generator().manual_seed(1), 1e-2
    parts = list(recorded(model, method, window[None], gradients=True))
    assert [(layer, kind) for layer, kind, *_ in parts] == [(i, kind) for i in range(3) for kind in "kv"]
    for layer, kind, rows, kept, gradient in parts:
        assert gradient.shape == rows.shape == (2, 9, 8)
        assert kept.tolist() == [[True] + [False] * 8] * 2
        assert gradient[:, -1].eq(0).all()
        for _ in range(6):
            place = tuple(int(torch.randint(n, (), generator=rng)) for n in (2, 8, 8))
            ends = [loss(layer, kind, place, by) for by in (2 * step, step, -step, -2 * step)]
            slope = (8 * (ends[1] - ends[2]) - (ends[0] - ends[3])) / (12 * step)
            small = 0.01 * gradient.abs().max().item()  # rotations, norms and the loss are computed in 32 bits
            assert gradient[place].item() == pytest.approx(slope, rel=0.01, abs=small), (layer, kind, place)


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


def shaped(windows=6, T=48):
    """Numbers at the ends count most."""
    gain = torch.where(torch.arange(h) % 2 == 0, 0.3, 3.0).expand(L, 2, h).clone()
    return Planted(random_rows(windows, T, 3, shapes), gain)


def normalized(model, layer, kind, codec, share, first):
    """In numpy: x', half and use, each (W, T, h); use is False at outliers and at the first tokens."""
    x = model.numbers(layer, kind)
    use = np.ones(x.shape, dtype=bool)
    if kind == "k":
        mid, half = (t.double().numpy() + np.zeros_like(x) for t in (codec.mid, codec.half))
        if share:
            use &= np.abs(x - mid) <= half
    else:
        mid, half = np.zeros_like(x), np.zeros_like(x)
        for w, t in np.ndindex(x.shape[:2]):
            row = x[w, t]
            far = np.abs(row - sorted(row)[(h - 1) // 2])
            use[w, t, sorted(range(h), key=lambda c, far=far: (-far[c], c))[:round(share * h)]] = False
            lo, hi = row[use[w, t]].min(), row[use[w, t]].max()
            mid[w, t] = np.float16((lo + hi) / 2)
            half[w, t] = np.float16(max((hi - lo) / 2, 1e-5))
    use[:, :first] = False
    return (x - mid) / half, half, use


def coding_loss(x, w, levels):
    return float((w * ((x[:, None] - levels[None]) ** 2).min(1)).sum() / w.sum())


def lloyd_step(x, w, levels):
    at = np.abs(x[:, None] - levels[None]).argmin(1)
    return np.array([np.average(x[at == i], weights=w[at == i]) for i in range(len(levels))])


def kvquant_on(model, **changed):
    method = KVQuant(CONFIG, **{"k_bits": 2, "v_bits": 3, "outliers": 4.0, "q_norm": "off", **changed})
    calibrate(model, method, model.windows())
    return method


@pytest.mark.one_in(3)
@pytest.mark.parametrize("outliers", [0.0, 1.0, 4.0, 20.0])
@pytest.mark.parametrize("preserve", [0, 1, 5])
def test_ranges_of_keys(outliers, preserve):
    model = Planted(random_rows())
    method = kvquant_on(model, outliers=outliers, preserve=preserve, sensitivity="none")
    for layer in range(L):
        codec = method.codecs[layer].k
        x = model.numbers(layer, "k")[:, preserve:].reshape(-1, h)
        lo, hi = np.quantile(x, [outliers / 200, 1 - outliers / 200], axis=0)
        assert codec.mid.dtype == codec.half.dtype == codec.levels.dtype == torch.float16
        assert np.allclose(codec.mid.double(), (lo + hi) / 2, rtol=1e-3, atol=1e-4)
        assert np.allclose(codec.half.double(), (hi - lo) / 2, rtol=1e-3, atol=1e-4)
        assert method.codecs[layer].v.mid is None


@pytest.mark.one_in(6)
@pytest.mark.parametrize("outliers", [0.0, 4.0])
@pytest.mark.parametrize("sensitivity", SENSITIVITIES)
def test_levels_are_a_fixed_point_on_the_raw_numbers(sensitivity, outliers):
    """A histogram's levels are as good as those of the numbers themselves: another step moves none by a bin's width."""
    model = shaped()
    method = kvquant_on(model, sensitivity=sensitivity, outliers=outliers)
    gradients = model.gradients()
    for layer in range(L):
        for kind, codec in kinds(method.codecs[layer]):
            x, half, use = normalized(model, layer, kind, codec, outliers / 100, 1)
            w = {"none": 1, "fisher": gradients[layer, kind] ** 2,
                 "fisher-range": (gradients[layer, kind] * half) ** 2}[sensitivity] * np.ones_like(x)
            x, w, levels = x[use], w[use], codec.levels.double().numpy()
            assert len(levels) == 2 ** codec.bits and (np.diff(levels) > 0).all() and np.abs(levels).max() <= 1.001
            moved = lloyd_step(x, w, levels)
            assert np.abs(moved - levels).max() < 2 / BINS + 2 ** -11, (kind, moved - levels)
            best = moved
            for _ in range(100):
                best = lloyd_step(x, w, best)
            assert coding_loss(x, w, levels) <= coding_loss(x, w, best) * 1.01


@pytest.mark.whole
def test_each_weight_is_served_best_by_its_own_levels():
    model = shaped()
    methods = {s: kvquant_on(model, v_bits=2, sensitivity=s) for s in SENSITIVITIES}
    gradients = model.gradients()
    for layer in range(L):
        for kind in "kv":
            levels = {s: getattr(m.codecs[layer], kind).levels.double().numpy() for s, m in methods.items()}
            x, half, use = normalized(model, layer, kind, getattr(methods["none"].codecs[layer], kind), 0.04, 1)
            fisher = gradients[layer, kind] ** 2
            for own, w in (("none", np.ones_like(x)), ("fisher", fisher), ("fisher-range", fisher * half ** 2)):
                losses = {s: coding_loss(x[use], w[use], t) for s, t in levels.items()}
                assert all(losses[own] < 0.99 * losses[s] for s in SENSITIVITIES if s != own), (layer, kind, own)


def least_loss(x, w, n):
    """The smallest loss of n levels on numbers in ascending order: by a dynamic programme over where a cell ends."""
    sums = [np.concatenate([[0], np.cumsum(y)]) for y in (w, w * x, w * x * x)]
    a, b = np.triu_indices(len(x) + 1, 1)
    mass, first, second = (y[b] - y[a] for y in sums)
    cell = np.full((len(x) + 1,) * 2, np.inf)  # the loss of the numbers a .. b - 1 on one level
    cell[a, b] = second - first ** 2 / mass
    best = cell[0]
    for _ in range(n - 1):
        best = (best[:, None] + cell).min(0)
    return best[-1] / w.sum()


@pytest.mark.parametrize("bits, slack", [(1, 1.01), (2, 1.02), (3, 1.1), (4, 1.2)])
def test_levels_are_nearly_the_best_there_are(bits, slack):
    """Of all levels, not only of those that further steps lead to; k-means may miss those by some per cent."""
    rng = np.random.default_rng(bits)
    for _ in range(3):
        middles, spreads = rng.uniform(-0.9, 0.9, 4), rng.uniform(0.02, 0.4, 4)
        x = np.sort(np.concatenate([rng.normal(m, s, 100) for m, s in zip(middles, spreads)]).clip(-1, 1))
        w = rng.exponential(size=400) ** 2
        histogram = Histogram()
        histogram.add(torch.tensor(x), torch.tensor(w))
        levels = histogram.levels(2 ** bits, q_norm=False).double().numpy()
        assert coding_loss(x, w, levels) <= least_loss(x, w, 2 ** bits) * slack + BINS ** -2


@pytest.mark.one_in(4)
@pytest.mark.parametrize("weights", ["none", "random", "zero"])
@pytest.mark.parametrize("n", [2, 4, 16])
def test_a_histogram_against_the_numbers(n, weights):
    rng = np.random.default_rng(n)
    x = np.concatenate([rng.normal(-0.4, 0.1, 3000), rng.uniform(-1, 1, 2000), [-1.0, 1.0, 1.0]]).clip(-1, 1)
    w = {"none": np.ones_like(x), "random": rng.exponential(size=x.shape) ** 2 * 1e-9, "zero": 0 * x}[weights]
    histogram = Histogram()
    for part in np.array_split(np.arange(len(x)), 7):
        histogram.add(torch.tensor(x[part]), torch.tensor(w[part]))
    levels = histogram.levels(n, q_norm=False).double().numpy()
    w = w if w.any() else np.ones_like(x)  # no gradient at all: all count alike
    assert np.abs(lloyd_step(x, w, levels) - levels).max() < 2 / BINS + 2 ** -11
    best = np.linspace(-1, 1, n)
    for _ in range(200):
        best = lloyd_step(x, w, best)
    assert coding_loss(x, w, levels) <= coding_loss(x, w, best) * 1.03


def test_numbers_of_one_bin_weigh_there_too():
    """A bin stands for its weighted mean, not for its middle nor for its plain mean."""
    histogram = Histogram()
    histogram.add(torch.tensor([0.0005, 0.0015, -0.5]), torch.tensor([1.0, 3.0, 1.0]))
    assert (histogram.sums[0] > 0).sum() == 2
    assert histogram.levels(2, q_norm=False).tolist() == pytest.approx([-0.5, 0.00125], rel=1e-3)


def test_fewer_numbers_than_levels():
    histogram = Histogram()
    histogram.add(torch.tensor([-0.5, 0.25, 0.25]), torch.tensor([1.0, 2.0, 3.0]))
    for norm in (False, True):
        levels = histogram.levels(8, norm)
        assert levels.shape == (8,) and torch.isfinite(levels).all()
        assert min((levels + 0.5).abs()) < 1e-3 and min((levels - 0.25).abs()) < 1e-3


def test_q_norm_keeps_mean_and_deviation():
    """k-means alone makes numbers of less spread than those that it codes; weights shift their mean.

    Exactly, if each number keeps the level that it had; a few are nearer to another one, once the levels have moved.
    """
    model = shaped()
    off, on = kvquant_on(model, v_bits=2), kvquant_on(model, v_bits=2, q_norm="on")
    for layer in range(L):
        for kind in "kv":
            x, _, use = normalized(model, layer, kind, getattr(off.codecs[layer], kind), 0.04, 1)
            x, before, after = x[use], *(getattr(m.codecs[layer], kind).levels.double().numpy() for m in (off, on))
            at, then = (np.abs(x[:, None] - levels[None]).argmin(1) for levels in (before, after))
            plain, kept, read = before[at], after[at], after[then]
            assert kept.mean() == pytest.approx(x.mean(), abs=3e-3) and kept.std() == pytest.approx(x.std(), rel=3e-3)
            assert abs(read.mean() - x.mean()) < 0.02 and read.std() == pytest.approx(x.std(), rel=0.05)
            assert abs(plain.std() - x.std()) + abs(plain.mean() - x.mean()) > 0.01


@pytest.mark.whole
def test_q_norm_is_for_two_bits():
    model = shaped(3, 32)
    for bits, used in ((2, "on"), (3, "off")):
        of = {q: tables(kvquant_on(model, k_bits=bits, v_bits=bits, q_norm=q)) for q in (None, "on", "off")}
        assert same(of[None], of[used])
        assert not same(of["on"], of["off"])


@pytest.mark.parametrize("outliers", [0.0, 4.0])
def test_an_ignored_row_of_values_can_still_be_read(outliers):
    """A stream may evict a kept token later (kvsink): then its codes are read, on a grid from its own numbers."""
    model = shaped(2, 32)
    method, x = kvquant_on(model, outliers=outliers), model.rows[1][0][1][None]
    ignore = torch.zeros(1, Hkv, 32, dtype=torch.bool)
    ignore[:, :, [0, 9]] = ignore[:, 0, 20] = True  # the last in one head only
    read, plain = (read_back(method.codecs[0].v, x, some) for some in (ignore, None))
    assert torch.isfinite(read).all()
    others = [t for t in range(32) if t not in (0, 9, 20)]
    assert torch.equal(read[:, :, others], plain[:, :, others])
    assert not outliers or (plain == x).any()
    levels, rows = method.codecs[0].v.levels.double(), x.transpose(1, 2).flatten(2)[0].double()  # (T, h)
    for t in (0, 9):
        lo, hi = rows[t].min(), rows[t].max()
        grid = levels * (hi - lo) / 2 + (hi + lo) / 2
        best = (rows[t][:, None] - grid).abs().min(1).values
        error = (read.transpose(1, 2).flatten(2)[0, t] - rows[t]).abs()
        assert (error - best).abs().max() < 0.01 * (hi - lo)


# ---- what is kept is not learned from

class PerHead(KVQuant):
    """Keeps other tokens in each head."""
    at = [[2, 0], [7, 7]]

    def keep_keys(self, layer_cache, n):
        return torch.tensor([self.at])


def changed(rows, at, by=None):
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


@pytest.mark.one_in(7)
@pytest.mark.parametrize("cls, options", [
    *((KVQuant, {"sensitivity": s, "outliers": o}) for s in SENSITIVITIES for o in (0.0, 4.0)),
    *((PerHead, {"sensitivity": "none", "outliers": o}) for o in (0.0, 4.0, 20.0)),
    (SKVQ, {}), (SKVQ, {"clip": "none"}), (SKVQ, {"reorder": "off", "metadata": "fp16"}),
    *((METHODS["pfn"], {"scheme": s}) for s in ("token-static", "channel-static", "kvquant")),
], ids=str)
def test_kept_tokens_are_not_learned_from(cls, options):
    """Whatever they hold. Their own loss may be huge; a planted token's gradient is its own."""
    at = PerHead.at if cls is PerHead else [[0, 1, 2]] * 2
    learned = []
    for rows in (random_rows(), changed(random_rows(), at)):
        model = Planted(rows)
        method = cls(CONFIG, **{"preserve": 3, **options})
        calibrate(model, method, model.windows())
        learned.append(tables(method))
    assert learned[0] and same(*learned)
    model = Planted(changed(random_rows(), [[3], [3]]))
    calibrate(model, method, model.windows())
    assert not same(learned[0], tables(method))


# ---- skvq: groups

#          smallest, largest, channels
CLUSTERS = [(-1.0, 1.0, 9), (-20.0, -10.0, 5), (5.0, 8.0, 7), (-40.0, 60.0, 11)]


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


@pytest.mark.parametrize("clip", ["none", "both"])
def test_channels_of_like_range_share_a_group(clip):
    """Groups are the clusters themselves: their sizes differ, their channels come from both heads."""
    model = Planted(random_rows(shape=clustered))
    method = SKVQ(CONFIG, group_size=8, clip=clip)
    calibrate(model, method, model.windows())
    for layer in range(L):
        for kind, codec in kinds(method.codecs[layer]):
            of = cluster_of(layer, kind)
            order, group = codec.order.tolist(), codec.group.tolist()
            assert sorted(order) == list(range(h)) and group == sorted(group)
            found = {frozenset(c for c, g in zip(order, group) if g == i) for i in range(4)}
            assert found == {frozenset(c for c in range(h) if of[c] == i) for i in range(4)}
            assert [len(codec.alpha), len(codec.centre)] == [4, 4]


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
    for codec in (codec for pair in method.codecs for codec in pair):
        groups = {frozenset(c for c, g in zip(codec.order.tolist(), codec.group.tolist()) if g == i) for i in (0, 1)}
        assert frozenset([1, 5, 30, 2, 9, 31]) in groups


def test_groups_are_numbered_without_gaps():
    """A cluster that has lost all its channels takes no metadata."""
    codec = ClippedGroups(2, 1, 8, 2, "fp16")
    codec.regroup(torch.tensor([7, 2, 7, 2, 4, 2, 4, 7]))
    assert codec.order.tolist() == [1, 3, 5, 4, 6, 0, 2, 7]
    assert codec.group.tolist() == [0, 0, 0, 1, 1, 2, 2, 2]
    assert codec.alpha.tolist() == [1, 1, 1] and codec.centre.tolist() == [0, 0, 0]
    assert codec.encode(torch.randn(1, 1, 5, 8)).scale.shape == (1, 1, 5, 3)


@pytest.mark.parametrize("clip", ["none", "both"])
@pytest.mark.parametrize("group_size", [4, 32])
def test_without_reordering_groups_are_neighbours(clip, group_size):
    model = Planted(random_rows(shape=clustered))
    method = SKVQ(CONFIG, group_size=group_size, reorder="off", clip=clip)
    calibrate(model, method, model.windows())
    for codec in (codec for pair in method.codecs for codec in pair):
        codec.encode(model.rows[0][0][0][None])  # with nothing to calibrate, groups are made at first use
        assert codec.order.tolist() == list(range(h))
        assert codec.group.tolist() == [c // group_size for c in range(h)]


def test_fewer_sorts_of_channels_than_groups():
    """Channels that are all alike make one group; the others stay empty and cost nothing."""
    model = Planted(random_rows(shape=lambda layer, kind, x: 1 + (torch.arange(len(x)) % 2)[:, None] * torch.ones(h)))
    method = SKVQ(CONFIG, group_size=8)
    calibrate(model, method, model.windows())
    for codec in (codec for pair in method.codecs for codec in pair):
        assert len(codec.alpha) == int(codec.group.max()) + 1 == len(set(codec.group.tolist()))
    x = model.rows[0][0][0][None]
    assert torch.equal(read_back(method.codecs[0].k, x), x)


@pytest.mark.parametrize("options", [{}, {"reorder": "off"}, {"clip": "none"}], ids=str)
def test_calibrating_again_forgets_the_first_time(options):
    one, two = Planted(random_rows(2, shape=clustered)), Planted(random_rows(2, seed=5))
    method, fresh = (SKVQ(CONFIG, group_size=8, **options) for _ in range(2))
    calibrate(one, method, one.windows())
    for m in (method, fresh):
        calibrate(two, m, two.windows())
    assert same(tables(method), tables(fresh))


@pytest.mark.parametrize("reorder", ["on", "off"])
def test_eight_bits_reordered_are_nearly_the_rows_themselves(reorder):
    """Gathered by range, coded and put back where they came from: half a step of 255 off, and metadata's rounding."""
    model = Planted(random_rows(shape=clustered))
    method = SKVQ(CONFIG, 8, 8, group_size=8, reorder=reorder, clip="none", metadata="fp16")
    calibrate(model, method, model.windows())
    for layer in range(L):
        for kind, x in zip("kv", model.rows[1][layer]):
            read = read_back(getattr(method.codecs[layer], kind), x[None])[0]
            widest = max(hi - lo for lo, hi, _ in CLUSTERS) if reorder == "on" else 101
            assert (read - x).abs().max() < widest / 255 * 0.5 + 0.04
            of = torch.tensor(cluster_of(layer, kind)).view(Hkv, 1, d).expand_as(x)
            if reorder == "on":  # a channel pays for its own kind only
                assert (read - x).abs()[of == 0].max() < 2.1 / 255 * 0.5 + 1e-3
            else:
                assert (read - x).abs()[of == 0].max() > 0.05


# ---- skvq: clips

def f8(x):
    """e4m3, in numpy"""
    x = np.asarray(x, dtype=float)
    step = 2.0 ** (np.maximum(np.frexp(np.abs(x))[1] - 1, -6) - 3)
    return np.round(x / step) * step


def clipped_error(rows, alpha, centre, levels, metadata, weights=1.0):
    """rows (N, channels of a group) -> the sum of squares that this clip leaves. In double but for what is stored.

    weights (N): of the rows.
    """
    lo, hi = rows.min(1, keepdims=True), rows.max(1, keepdims=True)
    towards = centre * (lo + hi) / 2
    lo, hi = alpha * lo + (1 - alpha) * towards, alpha * hi + (1 - alpha) * towards
    s = (hi - lo) / levels
    s, z = (f8(np.clip(s, 2 ** -9, 448)), f8(np.clip(lo, -448, 448))) if metadata == "fp8" else \
        (np.float16(np.clip(s, 1e-5, 65504)).astype(float), np.float16(lo).astype(float))
    read = np.clip(np.round((rows - z) / s), 0, levels) * s + z
    return (((rows - read) ** 2).sum(1) * weights).sum()


@pytest.mark.one_in(5)
@pytest.mark.parametrize("metadata", ["fp8", "fp16"])
@pytest.mark.parametrize("clip, centres", [("both", (0, 1)), ("endpoint", (0,)), ("centre", (1,))])
@pytest.mark.parametrize("reorder", ["on", "off"])
@pytest.mark.parametrize("sensitivity", ["token", "none"])
def test_clips_are_the_best_of_the_grid(sensitivity, reorder, clip, centres, metadata):
    """By brute force over the calibration rows beside the first tokens, which would have had a say of their own.

    A row weighs as much as the norm of its true gradient.
    """
    c = torch.arange(h)  # every other group has half its channels at 0, which a shift would cost
    rows = random_rows(shape=lambda layer, kind, x: torch.where(c % 16 < 8, (c % 8 > 3) * (3 + 0.5 * x), x + 4))
    model = Planted(changed(rows, [[0, 1, 2]] * 2))
    method = SKVQ(CONFIG, 2, 1.5, group_size=8, preserve=3, reorder=reorder, clip=clip, metadata=metadata,
                  sensitivity=sensitivity)
    calibrate(model, method, model.windows())
    gradients = model.gradients()
    seen, clear = set(), 0
    for layer in range(L):
        for kind, codec in kinds(method.codecs[layer]):
            x = model.numbers(layer, kind)[:, 3:].reshape(-1, h)
            w = np.linalg.norm(np.array(gradients[layer, kind])[:, 3:].reshape(-1, h), axis=1)
            w = w if sensitivity == "token" else np.ones(len(x))
            for i, (alpha, centre) in enumerate(zip(codec.alpha.tolist(), codec.centre.tolist())):
                rows = x[:, [c for c, g in zip(codec.order.tolist(), codec.group.tolist()) if g == i]]
                losses = {(float(np.float16(a / 100)), c):
                          clipped_error(rows, float(np.float16(a / 100)), c, 3 if kind == "k" else 2, metadata, w)
                          for a in range(60 if kind == "k" else 20, 101, 2) for c in centres}
                best = sorted(losses, key=losses.get)
                assert (alpha, centre) in losses
                assert losses[alpha, centre] <= losses[best[0]] * (1 + 1e-3)
                if losses[best[1]] > losses[best[0]] * (1 + 1e-3):
                    assert (alpha, centre) == best[0]
                    clear += 1
                seen.add((alpha, centre))
    assert len(seen) > 2 and clear > 8 and {c for _, c in seen} == set(centres)


def test_losses_leave_out_what_is_kept_in_each_head():
    """In whatever order the channels are."""
    codec, x = ClippedGroups(2, Hkv, d, 8, "fp16"), random_rows(1, 20)[0][0][0]
    codec.regroup(torch.randint(4, (h,), generator=torch.Generator().manual_seed(0)))
    kept = torch.rand(Hkv, 20, generator=torch.Generator().manual_seed(1)) < 0.4
    error = (codec.decode(codec.encode(x[None]))[0] - x).square().masked_fill(kept[..., None], 0)  # (Hkv, T, d)
    error, expected = error.sum(1).flatten().tolist(), [0] * 4
    for c, g in zip(codec.order.tolist(), codec.group.tolist()):
        expected[g] += error[c]
    assert codec.losses(x, kept, [(1.0, 0.0)], torch.ones(20))[0].tolist() == pytest.approx(expected, rel=1e-4)


def test_clip_none_leaves_ranges_whole():
    model = Planted(random_rows())
    method = SKVQ(CONFIG, group_size=8, clip="none")
    calibrate(model, method, model.windows())
    for codec in (codec for pair in method.codecs for codec in pair):
        assert codec.alpha.eq(1).all() and codec.centre.eq(0).all()


def mse_of(alpha, centre, offset, metadata, sd=0.5):
    codec = ClippedGroups(2, 1, 64, 64, metadata, reorder=False, centres=())
    x = sd * torch.randn(1, 1, 4000, 64, generator=torch.Generator().manual_seed(0)) + offset
    codec.rows(x)
    codec.alpha[:], codec.centre[:] = alpha, centre
    return (codec.decode(codec.encode(x)) - x).square().mean().item()


@pytest.mark.parametrize("offset", [-10, 10])
def test_shrinking_a_one_signed_range_towards_zero_shifts_it(offset):
    """A group of one sign: offset 10, deviation 0.5, groups of 64, 2 bits. Towards its middle it gets better."""
    assert mse_of(1, 0, offset, "fp16") == pytest.approx(0.0505, rel=0.03)
    assert mse_of(0.92, 0, offset, "fp16") == pytest.approx(0.0852, rel=0.03)
    assert mse_of(0.92, 1, offset, "fp16") == pytest.approx(0.0425, rel=0.03)
    assert mse_of(1, 0, offset, "fp8") == pytest.approx(0.0519, rel=0.1)  # rounded first: codes make up for it
    assert mse_of(0.92, 0, 0, "fp16", 1.0) == pytest.approx(mse_of(0.92, 1, 0, "fp16", 1.0), rel=0.02)
    assert mse_of(1, 0, 0, "fp16", 1.0) == pytest.approx(0.2029, rel=0.03)
    assert mse_of(0.92, 0, 0, "fp16", 1.0) == pytest.approx(0.1711, rel=0.03)


def released(rows, alpha, levels):
    """As the released code reads back: ends times alpha, codes from exact metadata, decoded with e4m3."""
    lo, hi = alpha * rows.min(1, keepdims=True), alpha * rows.max(1, keepdims=True)
    s = np.clip((hi - lo) / levels, 2 ** -9, 448)
    q = np.clip(np.round((rows - lo) / s), 0, levels)
    return q * f8(s) + f8(lo)


@pytest.mark.parametrize("bits, levels", [(2, 3), (1.5, 2)])
def test_the_released_settings(bits, levels):
    """--alpha 0.92 --clip endpoint --metadata-order codes-first."""
    model = Planted(random_rows(shape=clustered))
    method = SKVQ(CONFIG, bits, bits, group_size=8, alpha=0.92, clip="endpoint", metadata_order="codes-first")
    calibrate(model, method, model.windows())
    differs = 0
    for layer in range(L):
        for kind, codec in kinds(method.codecs[layer]):
            assert set(codec.alpha.tolist()) == {float(np.float16(0.92))} and not codec.centre.any()
            x = model.rows[1][layer]["kv".index(kind)]
            read = read_back(codec, x[None])[0].transpose(0, 1).flatten(1).double().numpy()  # (T, h)
            rows = x.transpose(0, 1).flatten(1).double().numpy()
            for i in set(codec.group.tolist()):
                channels = [c for c, g in zip(codec.order.tolist(), codec.group.tolist()) if g == i]
                want = released(rows[:, channels], float(np.float16(0.92)), levels)
                assert np.isclose(read[:, channels], want, rtol=1e-4, atol=1e-4).mean() > 0.99  # but for ties
                differs += np.abs(clipped_read(rows[:, channels], 0.92, levels) - want).max() > 0.1
    assert differs


def clipped_read(rows, alpha, levels):
    """The same with metadata rounded first."""
    lo, hi = alpha * rows.min(1, keepdims=True), alpha * rows.max(1, keepdims=True)
    s, z = f8(np.clip((hi - lo) / levels, 2 ** -9, 448)), f8(lo)
    return np.clip(np.round((rows - z) / s), 0, levels) * s + z


def test_a_given_alpha_may_choose_its_kind_of_clip():
    model = Planted(random_rows(shape=clustered))
    method = SKVQ(CONFIG, group_size=8, alpha=0.7, sensitivity="none")
    calibrate(model, method, model.windows())
    for layer in range(L):
        for kind, codec in kinds(method.codecs[layer]):
            x = model.numbers(layer, kind)[:, 5:].reshape(-1, h)
            assert set(codec.alpha.tolist()) == {float(np.float16(0.7))}
            for i, centre in enumerate(codec.centre.tolist()):
                rows = x[:, [c for c, g in zip(codec.order.tolist(), codec.group.tolist()) if g == i]]
                here, other = (clipped_error(rows, float(np.float16(0.7)), c, 3, "fp8") for c in (centre, 1 - centre))
                assert here <= other * (1 + 1e-3)


@pytest.mark.parametrize("settings", [{"alpha": 0.0}, {"alpha": 1.1}, {"alpha": 0.9, "clip": "none"},
                                      {"metadata_order": "last"}], ids=str)
def test_clips_that_cannot_be_are_refused(settings):
    with pytest.raises(UserError, match="alpha|metadata order"):
        SKVQ(CONFIG, group_size=8, **settings)


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


# ---- bits

def fed(method, config, protocol, T, B=1, seed=0):
    """A cache that has seen T tokens of random rows, and its figures."""
    class Model:
        pass
    model = Model()
    model.config, model.rope = config, Still()
    cache, result, rng = KVCache(model, method, protocol), Result(), torch.Generator().manual_seed(seed)
    chunk = torch.arange(T).split(T if protocol == "paper" else chunk_of(method))
    for layer in range(config.num_hidden_layers):
        shape = B, config.num_key_value_heads, T, config.head_dim
        k, v = torch.randn(2, *shape, generator=rng)
        k = k + torch.linspace(-3, 3, shape[-1])
        for at in chunk:
            cache.update(layer, None, k[:, :, at], v[:, :, at], at)
    count_bits(result, cache, torch.zeros(B, T, dtype=torch.long))
    return cache, result


def wide(heads, width, layers=3):
    return LlamaConfig(V, 64, 24, layers, heads, heads, width, 4096)


def share_coded(method, protocol, T):
    return 1.0 if protocol == "paper" else (T - method.recent) // method.block * method.block / T


def mean_share_coded(method, protocol, T):
    """Over the lengths T, T + 1, .. of one cycle, but of a text of T tokens."""
    if protocol == "paper":
        return 1.0
    recent = [length - round(share_coded(method, protocol, length) * length) for length in range(T, T + method.block)]
    return 1 - sum(recent) / len(recent) / T


@pytest.mark.one_in(6)
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("bits", [1, 2, 3])
def test_bits_of_kivi(bits, protocol):
    T, G = 2048, 32
    method = METHODS["kivi"](wide(2, 64), bits, bits, group_size=G, recent=100)
    _, result = fed(method, wide(2, 64), protocol, T, B=2)
    coded = mean_share_coded(method, protocol, T)
    assert result.bits == pytest.approx(coded * (bits + 32 / G) + (1 - coded) * 16, rel=1e-3)
    window = (1 - coded) * T / FAR
    assert result.bits_far == pytest.approx((bits + 32 / G) * (1 - window) + 16 * window, rel=1e-6)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("scope", ["head", "layer"])
def test_bits_of_ott(scope, protocol):
    """Kept rows come on top, 16 bits a number, and a 32-bit position for each."""
    T, G, heads, width = 2048, 32, 2, 64
    method = METHODS["ott"](wide(heads, width), group_size=G, recent=32, outlier_num=3, extra_pool=8, scope=scope)
    cache, result = fed(method, wide(heads, width), protocol, T, B=2)
    coded, pool = mean_share_coded(method, protocol, T), [layer.keys.kept_positions for layer in cache.layers]
    assert pool[:2] == [None, None]
    slots = pool[2].shape[2]
    assert slots == 3 if protocol == "paper" else 3 < slots <= 11
    rows = slots * (2 * heads * width * 16 + 2 * (heads if scope == "head" else 1) * 32)  # of the one layer that keeps
    numbers = 3 * 2 * heads * width
    assert result.bits == pytest.approx(coded * (2 + 32 / G) + (1 - coded) * 16 + rows / (numbers * T), rel=1e-3)
    window = (1 - coded) * T / FAR
    far = (2 + 32 / G) * (1 - window) + 16 * window + rows / numbers / FAR
    assert result.bits_far == pytest.approx(far, rel=1e-6)


@pytest.mark.one_in(7)
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("k_bits, v_bits, stored", [(2, 2, (2, 2)), (2, 1.5, (2, 1.6)), (1.5, 1.5, (1.6, 1.6))])
@pytest.mark.parametrize("metadata, of_group", [("fp8", 16), ("fp16", 32)])
def test_bits_of_skvq(metadata, of_group, k_bits, v_bits, stored, protocol):
    T, G, n, heads, width = 2048, 32, 5, 4, 40  # 160 channels are 32 bytes of five levels of three
    method = SKVQ(wide(heads, width, 1), k_bits, v_bits, G, reorder="off", clip="none", metadata=metadata, block=64)
    cache, result = fed(method, wide(heads, width, 1), protocol, T)
    coded = mean_share_coded(method, protocol, T)
    window = (1 - coded) * T
    formula = coded * (sum(stored) / 2 + of_group / G) + (n + window) * 16 / T
    assert result.bits == pytest.approx(formula, rel=1e-3)
    rows = (n + window) * 16 + n * 32 / (heads * width)  # the position of a kept token, too
    codes = (sum(stored) / 2 + of_group / G) * (1 - window / FAR)
    assert result.bits_far == pytest.approx(codes + rows / FAR, rel=1e-6)
    assert sum(cache.part_bytes("k").values()) + sum(cache.part_bytes("v").values()) == cache.nbytes


@pytest.mark.one_in(12)
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("outliers", [0.0, 1.0, 5.0])
@pytest.mark.parametrize("bits", [2, 3])
def test_bits_of_kvquant(bits, outliers, protocol):
    """K: b; V: b and 32 a token; outliers 32 bits each, and 32 a token; their number is counted by other means."""
    T, preserve, B = 2048, 4, 2
    model = Planted(random_rows(4, 64))
    method = KVQuant(CONFIG, bits, bits, preserve=preserve, outliers=outliers, sensitivity="none")
    calibrate(model, method, model.windows())
    cache, result = fed(method, CONFIG, protocol, T, B)
    per_token = h * (2 * bits) + 32 + (64 if outliers else 0)  # of keys and values of a layer
    coded = round(share_coded(method, protocol, T) * T)
    total = 0
    for layer, parts in enumerate(cache.layers):
        rng, shape = torch.Generator().manual_seed(0), (B, Hkv, T, d)
        for _ in range(layer + 1):
            k = torch.randn(2, *shape, generator=rng)[0] + torch.linspace(-3, 3, d)
        codec, kept = method.codecs[layer].k, preserve
        x = k.half().double().transpose(1, 2).flatten(2).numpy()[:, kept:coded]
        beyond = (np.abs(x - codec.mid.double().numpy()) > codec.half.double().numpy()).sum() if outliers else 0
        of_values = B * (coded - kept) * round(outliers / 100 * h)
        if outliers:
            assert [len(parts.keys.codes.values), len(parts.values.codes.values)] == [beyond, of_values]
        total += B * coded * per_token + 32 * (beyond + of_values)
    kept = L * preserve * (B * 2 * h * 16 + B * 2 * 32)
    assert 8 * cache.nbytes == pytest.approx(total + L * B * (T - coded) * 2 * h * 16 + kept, rel=1e-3)
    share = mean_share_coded(method, protocol, T)
    mean = total / coded * T * share + L * B * T * (1 - share) * 2 * h * 16 + kept
    assert result.bits == pytest.approx(mean / (2 * L * B * T * h), rel=1e-3)


@pytest.mark.parametrize("name", ["skvq", "kvquant"])
def test_what_is_learned_is_counted_apart(name):
    """16 bits a level, of each channel's range, and of each clip; 32 of each channel's place and of its group."""
    model = Planted(random_rows(2, 32))
    method = SKVQ(CONFIG, group_size=8, reorder="off") if name == "skvq" else KVQuant(CONFIG, 2, 3)
    calibrate(model, method, model.windows())
    groups = h // 8
    each = {"skvq": 2 * (8 * h + 3 * groups), "kvquant": 2 * (4 + 8) + 2 * 2 * h}[name]
    assert method.offline_bytes == L * each


# ---- a file of what was learned

FILE_CASES = [
    ("rtn", {"scheme": "channel-static"}), ("rtn", {"scheme": "token-static"}), ("rtn", {"scheme": "kvquant"}),
    ("pfn", {"scheme": "channel-static"}), ("pfn", {"scheme": "kvquant", "outliers": 0.0}),
    ("kvsink", {"scheme": "token-dynamic"}), ("kvsink", {"scheme": "channel-static"}),
    ("kvsink", {"scheme": "kvquant"}),
    ("skvq", {}), ("skvq", {"reorder": "off"}), ("skvq", {"clip": "none", "k_bits": 16}),
    ("kvquant", {}), ("kvquant", {"outliers": 0.0, "sensitivity": "none", "v_bits": 3}), ("kvquant", {"v_bits": 16}),
]


def new(name, options, model):
    options = {**({"group_size": 4} if name == "skvq" else {}), **options}
    return METHODS[name](model.config, **options)


@lru_cache
def sinking():
    """A Llama in which one token has an outlier, for kvsink to find."""
    model = Llama(LlamaConfig(31, 24, 32, 4, 4, 2, 8, 256))
    torch.manual_seed(8)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.normal_(std=p.shape[1] ** -0.5)
        embedding = model.model["embed_tokens"].weight.normal_()
        embedding[:, 0] = 0
        embedding[30] = 0
        embedding[30, 0] = 3.0
        for block in model.model["layers"]:
            block.self_attn.o_proj.weight[[0, 9]] = 0
            block.mlp.down_proj.weight[[0, 9]] = 0
        mlp = model.model["layers"][1].mlp
        mlp.gate_proj.weight[0], mlp.up_proj.weight[0], mlp.down_proj.weight[:, 0] = 0, 0, 0
        mlp.gate_proj.weight[0, 0] = mlp.up_proj.weight[0, 0] = mlp.down_proj.weight[9, 0] = 4.0
    return model


def run(model, method, protocol, tokens):
    cache = KVCache(model, method, protocol)
    size = tokens.shape[1] if protocol == "paper" else 4
    with torch.no_grad():
        return torch.cat([model(chunk, cache) for chunk in tokens.split(size, dim=1)], dim=1)


@pytest.mark.one_in(7)
@pytest.mark.parametrize("name, options, outlier", [
    *((name, options, False) for name, options in FILE_CASES),
    *((name, options, True) for name, options in FILE_CASES if name == "kvsink")], ids=str)
def test_a_file_gives_back_what_was_learned(tmp_path, name, options, outlier):
    """Bit by bit, in both protocols, to a method that is not calibrated; many in one file, whatever their names."""
    model = sinking() if outlier else llama()
    windows, text = random_tokens(3, 40, 1), random_tokens(2, 150, 2)
    windows[:, 7] = text[:, [5, 90]] = 30
    method, fresh = new(name, options, model), new(name, options, model)
    assert method.needs_calibration
    calibrate(model, method, windows)
    if name == "kvsink":
        assert (method.layer, method.channel) == ((1, 9) if outlier else (None, None))
    with pytest.raises(UserError, match="calibrate"):
        run(model, fresh, "paper", text)
    path, label = tmp_path / "deep" / "learned.safetensors", f'{name} {{"a/b": "{options}"}}'
    file = CalibrationFile(path, model)
    file.put("other", "", {"0.k.levels": torch.zeros(3)})
    file.put(label, "", method.calibrated())
    learned = CalibrationFile(path, model).tables
    assert set(learned) == {"other", label} and learned["other"].keys() == {"0.k.levels"}
    assert same(learned[label], method.calibrated())
    fresh.restore(learned[label])
    assert same(fresh.calibrated(), method.calibrated()) and fresh.offline_bytes == method.offline_bytes
    assert fresh.describe() == method.describe()
    for protocol in PROTOCOLS:
        expected = run(model, method, protocol, text)
        assert torch.equal(run(model, fresh, protocol, text), expected)
        assert not torch.equal(run(model, METHODS["fp16"](model.config), protocol, text), expected)
    again = new(name, options, model)  # learning is the same every time
    calibrate(model, again, windows)
    assert same(again.calibrated(), method.calibrated())


# ---- numbers that are no numbers

FOUR = [("kivi", {"group_size": 4, "recent": 3}), ("ott", {"group_size": 4, "recent": 3, "skip_layers": 0}),
        ("skvq", {"recent": 3, "block": 4}), ("skvq", {"recent": 3, "block": 4, "metadata": "fp16", "v_bits": 1.5}),
        ("kvquant", {}), ("kvquant", {"outliers": 0.0, "preserve": 0}), ("kvquant", {"outliers": 40.0, "v_bits": 1}),
        ("kvquant", {"sensitivity": "none", "q_norm": "on"})]


def constant(size):
    """A Llama whose keys are the same everywhere, all its values too: weights 0, biases of one size."""
    model = llama(attention_bias=True, rope_theta=10000.0 + size)
    with torch.no_grad():
        for block in model.model["layers"]:
            for proj in (block.self_attn.k_proj, block.self_attn.v_proj):
                proj.weight.zero_()
                proj.bias.fill_(size)
    return model


def calibrated(name, options, model, windows):
    method = new(name, options, model)
    if method.needs_calibration:
        calibrate(model, method, windows)
    return method


@pytest.mark.one_in(3)
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name, options", FOUR, ids=str)
@pytest.mark.parametrize("size", [0.0, 1.5, -300.0])
def test_constant_keys_and_values(name, options, size, protocol):
    model = constant(size)
    method = calibrated(name, options, model, random_tokens(2, 20, 1))
    logits = run(model, method, protocol, random_tokens(2, 30, 2))
    assert torch.isfinite(logits).all()
    exact = run(model, METHODS["fp16"](model.config), protocol, random_tokens(2, 30, 2))
    if options.get("metadata") != "fp8" and name != "skvq":
        assert torch.allclose(logits, exact, atol=0.02 * exact.abs().max().item())


@pytest.mark.one_in(3)
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name, options", FOUR, ids=str)
def test_a_text_of_one_token_over_and_over(name, options, protocol):
    model, text = llama(), torch.full((2, 30), 5)
    for windows in (text, random_tokens(2, 20, 1)):
        logits = run(model, calibrated(name, options, model, windows), protocol, text)
        assert torch.isfinite(logits).all()
    assert torch.isfinite(run(model, calibrated(name, options, model, text), protocol, random_tokens(2, 30))).all()


@pytest.mark.one_in(5)
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name, options", FOUR, ids=str)
@pytest.mark.parametrize("T", range(1, 8))
def test_short_texts(name, options, protocol, T):
    model, text = llama(), random_tokens(2, T, T)
    method = calibrated(name, options, model, random_tokens(2, 20, 1))
    logits = run(model, method, protocol, text)
    assert torch.isfinite(logits).all()
    if T <= method.preserve or (protocol == "stream" and T <= method.recent):
        assert torch.equal(logits, run(model, METHODS["fp16"](model.config), protocol, text))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name, options", [
    ("skvq", {}), ("skvq", {"clip": "none"}), ("skvq", {"reorder": "off"}), ("skvq", {"k_bits": 16}),
    ("kvquant", {"preserve": 5}), ("kvquant", {"preserve": 5, "sensitivity": "none"}),
    ("kvquant", {"preserve": 5, "k_bits": 16}), ("kvquant", {"preserve": 5, "outliers": 0.0}),
    ("pfn", {"scheme": "token-static"}), ("pfn", {"scheme": "kvquant"})], ids=str)
def test_windows_of_which_nothing_is_left(name, options):
    """Nothing was seen, so nothing can be calibrated; one token more will do."""
    model = llama()
    for T in (2, 5):
        with pytest.raises(UserError, match="hold no token that the method does not keep"):
            calibrate(model, new(name, options, model), random_tokens(3, T))
    method = calibrated(name, options, model, random_tokens(3, 7))
    assert all(torch.isfinite(t.float()).all() for t in method.calibrated().values())


@pytest.mark.one_in(5)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("sensitivity", SENSITIVITIES)
@pytest.mark.parametrize("name", ["skvq", "kvquant"])
def test_a_broken_model_teaches_nothing(name, sensitivity, bad):
    """Rather than tables of NaN: it would be the text's perplexity that shows it, if anything."""
    model = llama(rope_theta=9999.0)
    good = model.model["layers"][1].mlp.down_proj.weight.data.clone()
    try:
        model.model["layers"][1].mlp.down_proj.weight.data[0, 0] = bad
        method = new(name, {"sensitivity": sensitivity} if name == "kvquant" else {}, model)
        with pytest.raises(UserError):
            calibrate(model, method, random_tokens(2, 20))
    finally:
        model.model["layers"][1].mlp.down_proj.weight.data = good
    calibrate(model, method, random_tokens(2, 20))


def test_a_loss_without_gradient_says_where():
    model = llama(rope_theta=9998.0)
    model.lm_head.weight.data[3, 3] = math.nan
    with pytest.raises(UserError, match="no finite gradient in layer"):
        calibrate(model, KVQuant(model.config), random_tokens(2, 20))
