"""KVQuant's ranges and levels, as calibration finds them, against numpy. Its codes are in test_codecs.py."""
from functools import lru_cache

import numpy as np
import oracles
import pytest
import torch
from planted import CONFIG, L, Planted, few_tries, h, random_rows

from tinykv.calibrate import calibrate
from tinykv.codecs.nonuniform import BINS, Histogram, NonUniform
from tinykv.methods.kvquant import KVQuant


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


@lru_cache
def shaped():
    """Numbers at the ends count most."""
    gain = torch.where(torch.arange(h) % 2 == 0, 0.3, 3.0).expand(L, 2, h).clone()
    return Planted(random_rows(4, 32, 3, shapes), gain)


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


@lru_cache
def kvquant_on(model, **changed):
    method = KVQuant(CONFIG, **{"k_bits": 2, "v_bits": 3, "outliers": 4.0, "q_norm": "off", **changed})
    calibrate(model, method, model.windows())
    return method


@pytest.mark.parametrize("outliers, preserve", [(0.0, 0), (1.0, 5), (20.0, 1)])
def test_ranges_of_keys(outliers, preserve, monkeypatch):
    few_tries(monkeypatch)
    model = Planted(random_rows())
    method = kvquant_on(model, outliers=outliers, preserve=preserve, sensitivity="none")
    for layer, pair in enumerate(method.codecs):
        x = model.numbers(layer, "k")[:, preserve:].reshape(-1, h)
        lo, hi = np.quantile(x, [outliers / 200, 1 - outliers / 200], axis=0)
        assert pair.k.mid.dtype == pair.k.half.dtype == torch.float16
        assert np.allclose(pair.k.mid.double(), (lo + hi) / 2, rtol=1e-3, atol=1e-4)
        assert np.allclose(pair.k.half.double(), (hi - lo) / 2, rtol=1e-3, atol=1e-4)
        assert pair.v.mid is None


@pytest.mark.parametrize("sensitivity, outliers", [("none", 0.0), ("fisher", 4.0), ("fisher-range", 4.0),
                                                   pytest.param("fisher-range", 0.0, marks=pytest.mark.whole)])
def test_levels_are_a_fixed_point_on_the_raw_numbers(sensitivity, outliers):
    """A histogram's levels are as good as those of the numbers themselves: another step moves none by a bin's width."""
    model = shaped()
    method, gradients = kvquant_on(model, sensitivity=sensitivity, outliers=outliers), model.gradients()
    for layer, kind, codec in method.each_codec():
        x, half, use = normalized(model, layer, kind, codec, outliers / 100, 1)
        w = {"none": 1, "fisher": gradients[layer, kind] ** 2,
             "fisher-range": (gradients[layer, kind] * half) ** 2}[sensitivity] * np.ones_like(x)
        assert codec.levels.dtype == torch.float16
        x, w, levels = x[use], w[use], codec.levels.double().numpy()
        assert len(levels) == 2 ** codec.bits and (np.diff(levels) > 0).all() and np.abs(levels).max() <= 1.001
        at = np.abs(x[:, None] - levels[None]).argmin(1)
        moved = np.array([np.average(x[at == i], weights=w[at == i]) for i in range(len(levels))])
        assert np.abs(moved - levels).max() < 2 / BINS + 2 ** -11, (kind, moved - levels)


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
