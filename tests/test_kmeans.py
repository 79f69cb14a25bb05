"""k-means against every partition there is, on problems small enough for that, and one Lloyd step in plain Python."""
import itertools

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tinykv import kmeans as module
from tinykv.kmeans import kmeans, lloyd, nearest, plus_plus

coarse = st.integers(-12, 12).map(lambda i: i / 4)  # sums and squares of these are exact in 32 bits


def problem(points, weights=None):
    """Numbers, or rows of numbers -> (1, N, n) and, given weights, (1, N)."""
    points = torch.tensor(points, dtype=torch.float)
    points = points.view(1, len(points), -1)
    return points if weights is None else (points, torch.tensor([weights], dtype=torch.float))


def loss(points, weights, centroids):
    """The weighted squared distance of one problem, in double."""
    points, centroids = (np.asarray(x, dtype=float).reshape(len(x), -1) for x in (points, centroids))
    square = ((points[:, None] - centroids[None]) ** 2).sum(-1)  # (N, k)
    return float((square.min(1) * np.asarray(weights, dtype=float)).sum())


def best_loss(points, weights, k):
    """The smallest loss of all cuts of the sorted numbers into k runs; no other partition of numbers is better."""
    order = np.argsort(points)
    x, w = np.asarray(points, dtype=float)[order], np.asarray(weights, dtype=float)[order]
    x, w = x[w > 0], w[w > 0]
    least = np.inf
    for cuts in itertools.combinations(range(1, len(x)), min(k, len(x)) - 1):
        total = 0.0
        for a, b in zip((0, *cuts), (*cuts, len(x))):
            mean = (x[a:b] * w[a:b]).sum() / w[a:b].sum()
            total += (w[a:b] * (x[a:b] - mean) ** 2).sum()
        least = min(least, total)
    return least


# ---- the whole

@st.composite
def problems(draw, numbers=coarse, widths=(1, 2, 3), weights=(0.0, 0.5, 1.0, 3.0), **more):
    """Points and centroids, of which each is a list of numbers, and the points' weights."""
    n, width = draw(st.integers(1, 8)), draw(st.sampled_from(widths))
    row = st.lists(numbers, min_size=width, max_size=width)
    points, centroids = draw(st.lists(row, min_size=n, max_size=n, **more)), draw(st.lists(row, min_size=1, max_size=4))
    return points, draw(st.lists(st.sampled_from(weights), min_size=n, max_size=n)), centroids


@given(problems(st.floats(-4, 4, width=32), widths=[1], weights=range(1, 6)))
def test_with_enough_tries_nothing_is_better(case):
    points, weights, centroids = case
    p, w = problem(points, weights)
    found = kmeans(p, len(centroids), w, tries=40)[0]
    least = best_loss([x for x, in points], weights, len(centroids))
    assert loss(points, weights, found.tolist()) <= least + 1e-6 * (1 + sum(weights))


@given(problems(widths=[1, 2], weights=range(1, 5), unique_by=tuple), st.integers(0, 99))
def test_an_integer_weight_is_as_many_copies(case, seed):
    """From the same start, bit by bit: the draw falls on a copy of the point that it falls on."""
    rows, weights, centroids = case
    k = min(len(centroids), len(rows))
    points, w = problem(rows, weights)
    copied = problem([row for row, n in zip(rows, weights) for _ in range(n)])
    assert torch.equal(kmeans(points, k, w, seed=seed), kmeans(copied, k, seed=seed))


def test_the_same_seed_gives_the_same_centroids():
    """And the caller's random numbers are left alone."""
    points = torch.randn(3, 60, 2, generator=torch.Generator().manual_seed(1))
    state = torch.get_rng_state()
    one, two, other = (kmeans(points, 5, iterations=1, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(one, two) and not torch.equal(one, other)


def test_each_problem_keeps_its_own_best_try():
    """Of tries that are laid out as problems of their own, each problem has the one with the smallest loss."""
    points = torch.randn(30, 40, 2, generator=torch.Generator().manual_seed(2))
    every = kmeans(points.repeat(5, 1, 1), 6).view(5, 30, 6, 2)
    losses = [[loss(p, [1] * 40, c) for p, c in zip(points, one)] for one in every]
    for i, centroids in enumerate(kmeans(points, 6, tries=5)):
        assert loss(points[i], [1] * 40, centroids) <= min(row[i] for row in losses) * (1 + 1e-6)
    assert sum(row[i] > min(r[i] for r in losses) * 1.001 for row in losses for i in range(30)) > 60  # tries do differ


def test_it_ends_once_a_step_gains_little():
    """For every problem: it takes the step after the first that gained less than the tolerance, and no more."""
    points = torch.randn(3, 100, 2, generator=torch.Generator().manual_seed(4))
    steps = [kmeans(points, 12, iterations=i) for i in range(16)]
    losses = [[loss(p, [1] * 100, c) for p, c in zip(points, centroids)] for centroids in steps]
    for tolerance in (0.05, 0.01):
        little = [all(a - b < tolerance * b for a, b in zip(*pair)) for pair in zip(losses, losses[1:])]
        last = little.index(True) + 2
        assert torch.equal(kmeans(points, 12, tolerance=tolerance), steps[last])
        assert last > 2 and all(not torch.equal(steps[last], steps[last + i]) for i in (-1, 1))


# ---- starting centroids


def test_odds_of_the_starting_centroids():
    """The first by weight, the second by weight times squared distance: counted over many problems side by side."""
    points = torch.tensor([0.0, 1.0, 3.0]).view(1, 3, 1).expand(8000, 3, 1)
    weights = torch.tensor([[2.0, 5.0, 1.0]]).expand(8000, 3)
    first, second = plus_plus(points, 2, weights, torch.Generator().manual_seed(0))[..., 0].T
    for x, odds in ((0.0, 2 / 8), (1.0, 5 / 8), (3.0, 1 / 8)):
        assert (first == x).float().mean().item() == pytest.approx(odds, abs=0.02)
    after = second[first == 1.0]  # 2 * 1 against 1 * 4
    assert (after == 3.0).float().mean().item() == pytest.approx(4 / 6, abs=0.02)
    assert not (after == 1.0).any()


# ---- the parts

@given(problems())
@example(([[0.0], [-1.0]], [1.0, 1.0], [[1.0], [-1.0]]))  # a tie
def test_one_step_against_plain_python(case):
    """Ties go to the first centroid. A centroid without weight moves to the point furthest from its own, each to
    another; none to one without weight."""
    points, weights, centroids = case
    square = [[sum((a - b) ** 2 for a, b in zip(p, c)) for c in centroids] for p in points]
    own = [[i for i, row in enumerate(square) if row.index(min(row)) == j] for j in range(len(centroids))]
    moved, before = lloyd(*problem(points, weights), problem(centroids))
    assert before.tolist() == [pytest.approx(sum(w * min(row) for w, row in zip(weights, square)), rel=1e-6)]
    empty = []
    for of, centroid in zip(own, moved[0].tolist()):
        total = sum(weights[i] for i in of)
        if total:
            mean = [sum(weights[i] * points[i][c] for i in of) / total for c in range(len(points[0]))]
            assert centroid == pytest.approx(mean, rel=1e-6, abs=1e-9)
        else:
            empty.append(centroid)
    assert all(e in points for e in empty)
    far = sorted((min(row) for row, w in zip(square, weights) if w), reverse=True)
    if len({tuple(p) for p in points}) == len(points):
        taken = [min(square[points.index(e)]) for e in empty]
        assert taken[:len(far)] == far[:len(taken)]


@pytest.mark.parametrize("tile", [1, 7, 100, 1000])
def test_tiles_change_nothing(monkeypatch, tile):
    """None is larger than it may be, unless a single point is; nor much smaller."""
    rng, sizes, argmax = torch.Generator().manual_seed(7), [], module.argmax
    points, centroids = torch.randn(3, 101, 2, generator=rng), torch.randn(3, 5, 2, generator=rng)
    index = nearest(points, centroids)
    monkeypatch.setattr(module, "MAX_DISTANCES", tile)
    monkeypatch.setattr(module, "argmax", lambda x: sizes.append(x.numel()) or argmax(x))
    assert torch.equal(nearest(points, centroids), index)
    assert min(tile, 3 * 101 * 5) / 3 < max(sizes) <= max(tile, 5)


def test_no_centroid_is_much_nearer_than_the_nearest():
    """It is found by products, which lose what numbers far from 0 have in common: as much as 32 bits do, no more."""
    rng = torch.Generator().manual_seed(9)
    for offset in (0.0, 1.0, 30.0, 1000.0):
        points = offset + torch.randn(2, 500, 4, generator=rng)
        centroids = offset + torch.randn(2, 40, 4, generator=rng)
        square = (points.double()[:, :, None] - centroids.double()[:, None]).pow(2).sum(-1)  # (2, 500, 40)
        found = square.gather(2, nearest(points, centroids)[..., None])[..., 0]
        assert (found <= square.amin(-1) + 4 * 2 ** -21 * (offset ** 2 + 20)).all()
