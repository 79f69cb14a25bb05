"""docs/examples/turboquant.py and docs/examples/neighbours.py: each formula against plain Python, and the tests of all
methods on a few cells (test_own_method.py: on all that an author's own method goes through)."""
import math
import re
import statistics
from pathlib import Path

import invariants
import oracles
import pytest
import torch
from cases import Case, example_of, model_of, tokens_of

from tinykv import UserError
from tinykv.cache import KVCache
from tinykv.codecs.base import unpack
from tinykv.lab.run.settings import load_class

ROOT = Path(__file__).parents[2]
METHOD = f"{ROOT / 'docs' / 'examples' / 'turboquant.py'}:TurboQuant"


@pytest.fixture(autouse=True, scope="module")
def turboquant():
    """The file, which adds a scheme that other tests do not know."""
    with example_of(METHOD) as module:
        yield module


# the mean squared errors are those of Max, 1960, right to three digits
@pytest.mark.parametrize("bits, error", [(1, 0.3634), (2, 0.1175), (3, 0.03454), (4, 0.009497)])
def test_each_level_is_the_mean_of_its_cell(turboquant, bits, error):
    """A log-concave density has one such set of levels, and it is the best."""
    levels, normal = turboquant.lloyd_max(2 ** bits).tolist(), statistics.NormalDist()
    assert levels == sorted(levels) and len(levels) == 2 ** bits
    edges = [-10, *((a + b) / 2 for a, b in zip(levels, levels[1:])), 10]  # beyond 10 there is nothing
    shares = [normal.cdf(b) - normal.cdf(a) for a, b in zip(edges, edges[1:])]
    means = [(normal.pdf(a) - normal.pdf(b)) / share for a, b, share in zip(edges, edges[1:], shares)]
    assert levels == pytest.approx(means, abs=1e-6)
    # the mean of x^2 is 1, and of levels that are means of x it is less by the error
    assert 1 - sum(share * level ** 2 for share, level in zip(shares, levels)) == pytest.approx(error, rel=1e-3)


# ---- the rotation and the codec

@pytest.mark.parametrize("d", [16, 32, 64])
def test_the_rotation_is_orthogonal(turboquant, d):
    R = turboquant.rotation(d, 0)
    assert (R @ R.T - torch.eye(d)).abs().max() < 1e-12 and not torch.equal(R, turboquant.rotation(d, 1))


def rows(T, d=16):
    return torch.randn(1, 1, T, d, generator=torch.Generator().manual_seed(0)) * torch.arange(1, d + 1)


@pytest.mark.parametrize("bits", range(1, 9))
def test_codes_and_decoded_numbers_by_hand(turboquant, bits):
    """Memory is b bits a number and 16 a token and head; QJL has 16 more for the norm of the rest."""
    codec, x = turboquant.Turbo(bits, 16, draw=3), rows(3)
    codes = codec.encode(x)
    assert codes.nbytes == invariants.memory_of(vars(codes).values()) == 3 * (2 * bits + 2)
    if bits > 1:
        codes_of_qjl = turboquant.QJL(bits, 16).encode(x)
        assert codes_of_qjl.nbytes == invariants.memory_of(vars(codes_of_qjl).values()) == 3 * (2 * bits + 4)
    R, levels = codec.R.tolist(), codec.levels.tolist()
    for t, (row, decoded) in enumerate(zip(x[0, 0].tolist(), codec.decode(codes)[0, 0].tolist())):
        norm = torch.tensor(math.hypot(*row)).half().item()
        y = [4 * sum(a * b for a, b in zip(direction, row)) / norm for direction in R]
        q = [min(range(2 ** bits), key=lambda j: abs(y_i - levels[j])) for y_i in y]  # noqa: B023
        assert unpack(codes.packed, bits, 16)[0, 0, t].tolist() == q and codes.norm[0, 0, t].item() == norm
        expected = [norm / 4 * sum(levels[q_i] * direction[c] for q_i, direction in zip(q, R)) for c in range(16)]
        assert decoded == pytest.approx(expected, abs=1e-4)


def test_qjl_is_right_on_average_where_plain_levels_are_not(turboquant):
    """p . x over draws of R and S. Levels alone shrink it by Max's error, as each is the mean of its cell."""
    x, p = torch.randn(2, 1, 1, 32, 16, generator=torch.Generator().manual_seed(1))  # 32 of either
    x += p  # so that p . x is not small
    exact = (p * x).sum().item()

    def mean_and_error(codec, bits, draws):
        codecs = [codec(bits, 16, draw) for draw in range(draws)]
        found = [(p * one.decode(one.encode(x))).sum().item() for one in codecs]
        return statistics.mean(found), statistics.stdev(found) / math.sqrt(draws)
    mean, error = mean_and_error(turboquant.QJL, 2, 200)
    assert error < 0.01 * exact and abs(mean - exact) < 4 * error
    mean, error = mean_and_error(turboquant.Turbo, 1, 30)
    assert exact - mean > 10 * error


def test_qjl_of_one_bit_is_refused(turboquant):
    with pytest.raises(UserError, match="k bits must be a whole number of at least 2"):
        turboquant.TurboQuant(model_of(1).config, k_bits=1, qjl="on")


# ---- the methods

def neighbour(name):
    return load_class(f"{ROOT / 'docs' / 'examples' / 'neighbours.py'}:{name}")


@pytest.mark.parametrize("check", invariants.OF_CODECS)
@pytest.mark.parametrize("settings", [(), (("qjl", "on"),), (("centre", "on"), ("preserve", 3))])
def test_turboquant_is_a_method(turboquant, check, settings):
    case = Case(turboquant.TurboQuant, "turboquant", heads_per_kv=2, settings=settings, dtype=torch.float64)
    getattr(invariants, f"check_{check}")(case)


@pytest.mark.parametrize("name", ["H2O", "Sinks"])
def test_what_its_neighbours_keep(name):
    """Under `paper`, in the first layer: the first tokens, or those that receive most attention."""
    model, tokens = model_of(1), tokens_of(1, 24)
    cache = KVCache(model, neighbour(name)(model.config, preserve=3, group_size=8), "paper")
    seen = []
    update = cache.update
    cache.update = lambda layer, q, k, v, n: seen.append((q, k)) or update(layer, q, k, v, n)
    with torch.no_grad():
        model(tokens, cache)
    received = oracles.attention(*(cache.rope.rotate(x).numpy() for x in seen[0])).sum(2)[0]  # (H, 24)
    kept = cache.layers[0].keys.kept_positions.expand(1, 4, -1)[0]  # (H, 3)
    for positions, of_head in zip(kept.tolist(), received.tolist()):
        assert sorted(positions) == (sorted(oracles.top_k(of_head, 3)) if name == "H2O" else [0, 1, 2])


def test_the_page_shows_the_files():
    code = "".join((ROOT / name).read_text(encoding="utf-8") for name in (
        "docs/examples/turboquant.py", "docs/examples/formats.py", "tinykv/codecs/centred.py"))
    shown = re.findall(r"```py\n(.*?)```", (ROOT / "docs" / "own_codec.md").read_text(encoding="utf-8"), re.S)
    assert shown and all(block in code for block in shown)
