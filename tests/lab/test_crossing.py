"""docs/programs/apart.py, the schemes and marked tokens of docs/crossing.md; docs/programs/crossed.py, its numbers."""
from unittest.mock import patch

import crossed
import crossing
import pytest
import torch

from tinykv import hf
from tinykv.cache import KVCache
from tinykv.calibrate import calibrate, record
from tinykv.codecs.rotated import hadamard
from tinykv.codecs.schemes import SCHEMES
from tinykv.lab.data import load_windows


@pytest.fixture(scope="module")
def apart():
    with patch.dict(SCHEMES):
        import apart
        yield apart


@pytest.fixture(scope="module")
def caches(apart):
    """{settings: the cache of a text}; the model and the calibration text."""
    model, tokenizer = hf.load(hf.EMBEDDED)
    test, other = (load_windows("tales", tokenizer, 256, 2, split).tokens for split in ("test", "calibration"))
    settings = {marked: apart.Marked(model.config, marked=marked) for marked in ("exact", "own", "range")}
    settings["rotated"] = apart.Plain(model.config, scheme="channel-static-rotated")
    calibrate(model, list(settings.values()), other)
    found = {"model": model, "other": other}
    for name, method in settings.items():
        found[name] = KVCache(model, method, "paper")
        with torch.no_grad():
            model(test, found[name])
    return found


def test_marked_tokens_get_what_the_setting_says(caches):
    """`exact` keeps them, `own` keeps what their own grid makes of them, `range` keeps nothing; the grids of the others
    are the same."""
    rows = {name: caches[name].layers[2].values for name in ("exact", "own", "range")}
    exact, own = rows["exact"].kept_rows.float(), rows["own"].kept_rows.float()  # (B, Hkv, k, d)
    assert rows["range"].kept_positions is None
    assert torch.equal(rows["exact"].kept_positions, rows["own"].kept_positions)
    step = (exact.amax(-1, keepdim=True) - exact.amin(-1, keepdim=True)) / 3  # of four levels
    assert 0 < (own - exact).abs().max() and ((own - exact).abs() <= step / 2 + 1e-3).all()
    assert all(len(set(row)) <= 4 for row in own.flatten(0, 2).tolist())
    scales = [caches[name].layers[2].keys.codec.scale for name in rows]  # of channels that small keys would widen
    assert torch.equal(scales[0], scales[1]) and torch.equal(scales[0], scales[2])


def test_with_as_many_steps_as_levels_one_lies_in_the_middle(caches, apart):
    """From -1 to 1: -1, -1/2, 0, 1/2."""
    codec = apart.Quarter(2, 4, "token", static=True)
    codec.set_range(-torch.ones(1, 4), torch.ones(1, 4))
    x = torch.tensor([-1, -0.5, 0.0, 1]).view(1, 1, 1, 4)
    assert codec.decode(codec.encode(x)).flatten().tolist() == [-1, -0.5, 0, 0.5]


def test_a_static_grid_of_rotated_rows(caches):
    """Its range is theirs in the calibration text, and what is read lies on it."""
    model, other, keys = caches["model"], caches["other"], caches["rotated"].layers[0].keys
    H, codec = hadamard(32), keys.codec
    seen = torch.cat([record(model, window).of(0)["k"] for window in other]).double() @ H  # (W, Hkv, T, d)
    assert torch.allclose(codec.zero[:, 0].double(), seen.amin((0, 2)), atol=2e-3)
    assert torch.allclose(codec.scale[:, 0].double(), (seen.amax((0, 2)) - seen.amin((0, 2))) / 3, atol=2e-3)
    code = (keys.read().double() @ H - codec.zero) / codec.scale  # (B, Hkv, T, d)
    assert (code - code.round()).abs().max() < 1e-2 and code.round().unique().tolist() == [0, 1, 2, 3]


def test_every_cell_has_one_row(apart):
    rows = [row for row in crossing.crossed(3)]
    assert len(set(rows)) == len(rows) == 24


def test_numbers_of_the_page_are_differences_of_pairs(monkeypatch):
    rows = {"a": [1, 2, 3], "b": [2, 4, 6], "c": [1, 3, 3], "d": [1, 2, 9]}
    monkeypatch.setattr(crossed, "row_of",
                        lambda name, *_: {"windows": "", "nll": [[100000 * loss for loss in rows[name[0]]]]})
    assert crossed.changed(("a", "b")) == "+2.000 ± 0.577"


def test_factors_multiply_and_their_error_is_that_of_a_logarithm(monkeypatch):
    """8 nats fall to 4 and to 2 alone, and to 1 with both: the product. With half a nat, they help each other."""
    rows = {"a": [6, 10, 8], "b": [3, 5, 4], "c": [1.5, 2.5, 2], "d": [0.74, 1.26, 1], "e": [0.37, 0.63, 0.5],
            "f": [1, 3, 2], "g": [1.19, 2.01, 1.6], "h": [0.5, 1.6, 0.8], "fp16": [0, 0, 0]}
    monkeypatch.setattr(crossed, "row_of", lambda name, *_: {"nll": [[1e5 * n for n in rows[name.split()[0]]]]})
    monkeypatch.setattr(crossed, "beside_fp16", lambda name, _: map(crossed.row_of, (name, "fp16")))
    assert crossed.factor(["a"], ["b"])[:2] == pytest.approx((2, 0))  # the same pairs are hard for both
    assert crossed.factor(["a"], ["f"])[:2] == pytest.approx((4, 4 * 0.25 / 3 ** 0.5))  # -1/4, 1/4, 0 less -1/2, 1/2, 0
    assert crossed.product("abcd") == "8.00" and crossed.beyond_product("abcd").startswith("1.00 ± 0.0")
    assert [crossed.verdict(f"abc{both}") for both in "degcb"] == [
        "multiply", "**help each other**", "overlap", "second replaces", "harm each other"]
    assert crossed.verdict("aacc") == "open"  # the first idea gains nothing alone
    assert crossed.verdict("abch") == "open"  # the product, but with an error of a third
