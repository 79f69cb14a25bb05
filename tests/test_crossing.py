"""docs/programs/crossing.py: its cells are the package's methods where it has them, and do what they say elsewhere."""
import crossed
import crossing
import pytest
import torch

from tinykv import hf
from tinykv.calibrate import calibrate
from tinykv.data import load_windows
from tinykv.evaluate import measure
from tinykv.methods.registry import METHODS

MARKS = crossing.MARKS["embedded"]


@pytest.fixture(scope="module")
def read():
    """The embedded model, a text, others to calibrate on, and the ranges that they have."""
    with torch.no_grad():
        model, tokenizer = hf.load(hf.EMBEDDED)
        model.use_attention("fused")
        texts = [load_windows("tales", tokenizer, 256, n, split) for n, split in ((1, "test"), (4, "calibration"))]
        calibration = crossing.Calibration(model, MARKS)
        model(texts[1].tokens, calibration, logits=False)
        yield model, *texts, calibration.ranges


@pytest.mark.parametrize("cell, method, settings", [
    ("2 static offset none", "rtn", {"scheme": "channel-static"}),
    ("2 static offset first", "pfn", {"scheme": "channel-static"}),
    ("2 static integer found", "kvsink", {"scheme": "channel-static", "formula": "integer-zero"}),
    ("3 static offset marked", "kvsink", {"scheme": "channel-static", "threshold": 0.1}),
    ("2 kivi128 offset none", "rtn", {"scheme": "channel-dynamic"}),
    ("2 kivi128 integer found", "kvsink", {"scheme": "channel-dynamic", "formula": "integer-zero"}),
    ("2 kivi32 offset none", "kivi", {"group_size": 32, "recent": 0}),
    ("3 token integer first", "pfn", {"scheme": "token-dynamic", "formula": "integer-zero"})])
def test_a_cell_is_the_package_s_method(cell, method, settings, read):
    model, test, other, ranges = read
    bits = int(cell[0])
    method = METHODS[method](model.config, k_bits=bits, v_bits=bits, **settings)
    if method.needs_calibration:
        calibrate(model, [method], other.tokens, seed=0)
    cache = crossing.Cache(model, MARKS, cell, ranges)
    parts, _, _ = crossing.measure(model, test.tokens[0], cache, parts=1)
    want = measure(model, method, test)
    assert parts[0] == pytest.approx(want.nll[0], abs=2e-3)
    bits = cache.true_bits(model.config.num_key_value_heads, model.config.head_dim)
    assert bits == pytest.approx(want.bits[0], abs=0.02)


@pytest.mark.parametrize("zero, there", [("offset", False), ("integer", True), ("symmetric", True)])
def test_where_a_level_lies_at_0(zero, there):
    low, high = torch.tensor(-1.3), torch.tensor(0.9)
    assert (crossing.read_back(torch.zeros(()), low, high, 2, zero).abs() < 1e-6) == there


def test_marked_tokens_are_treated_as_the_cell_says(read):
    """`own` and `range` store no token in 16 bits; with a grid of its own, a token is closer to what it was."""
    model, test, _, ranges = read
    errors = {}
    for keep in ("none", "range", "own", "marked"):
        cache = crossing.Cache(model, MARKS, f"2 static offset {keep}", ranges)
        cache.mark = torch.ones(1, 8)
        cache.mark[0, 3:] = 0
        v = torch.full((1, model.config.num_key_value_heads, 8, model.config.head_dim), 0.01).half().float()
        out = cache.apart(cache.keep, v)
        errors[keep] = (cache.read(3, "v", v, out[..., None]) - v)[:, :, :3].abs().max().item()
    assert errors["marked"] == 0 and errors["own"] < 1e-3 < errors["range"] and errors["none"] > 1e-3


def test_numbers_of_the_page_are_differences_of_windows(monkeypatch):
    rows = {"fp16": {"nll": [[1.0, 1.0], [2.0, 2.0]]}, "3 static offset none": {"nll": [[2.0, 4.0], [3.0, 3.0]]}}
    monkeypatch.setitem(crossed.DATA, "SmolLM2", rows)
    assert crossed.losses("3 static offset none", "SmolLM2") == [2, 1]
    assert crossed.lost("3 static offset none", "SmolLM2") == "1.500 ± 0.500"
