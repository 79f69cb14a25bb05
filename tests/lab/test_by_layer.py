"""docs/examples/by_layer.py: what a codec gains, by the definition; which codecs get more bits; and the tests of all
methods on a few cells."""
from pathlib import Path

import invariants
import pytest
import torch
from cases import Case, example_of, model_of, tokens_of

from tinykv import UserError
from tinykv.cache import KVCache
from tinykv.calibrate import Text, calibrate
from tinykv.codecs.schemes import SCHEMES

FILE = Path(__file__).parents[2] / "docs" / "examples" / "by_layer.py"


@pytest.fixture(autouse=True, scope="module")
def by_layer():
    """The file, and formats.py with it, which adds schemes that other tests do not know."""
    with example_of(f"{FILE}:ByLayer") as module:
        yield module


def calibrated(by_layer, **settings):
    model, method = model_of(1), by_layer.ByLayer(model_of(1).config, **settings)
    calibrate(model, method, tokens_of(3, 24))
    return model, method


def test_a_gain_is_what_the_loss_would_move_less(by_layer):
    model, method = calibrated(by_layer)
    text = Text(model, tokens_of(3, 24), gradients=True)
    for layer, pair in enumerate(method.codecs):
        x, g = text[layer]["v"].float(), text[layer]["gradient of v"].float()  # (W, Hkv, T, d) both
        moved = []
        for name in ("nvfp4", "fp8"):
            codec, _ = SCHEMES[name]
            codec = codec(model.config, "v", {"nvfp4": 4, "fp8": 8}[name])
            moved.append(sum(float(a @ b) ** 2 for a, b in zip(
                g.flatten(0, 2), (codec.decode(codec.encode(x)) - x).flatten(0, 2))))
        assert float(pair.v.gain) == pytest.approx(moved[0] - moved[1], rel=1e-3)


def test_the_codecs_that_gain_most_have_the_large_format(by_layer):
    model, method = calibrated(by_layer, larger=1)
    each = [codec for *_, codec in method.each_codec()]
    best = max(each, key=lambda codec: codec.gain)
    assert [codec.bits for codec in each] == [8 if codec is best else 4 for codec in each]
    assert method.describe().count(" of layer ") == 1 and method.k_bits + method.v_bits == 10
    cache = KVCache(model, method, "paper")
    model(tokens_of(1, 16), cache)
    held = [rows.codes for layer in cache.layers for rows in (layer.keys, layer.values)]
    assert [hasattr(codes, "scale") for codes in held] == [codec is not best for codec in each]


@pytest.mark.parametrize("by", ["loss", "ends", "chance"])
def test_tables_serve_any_number_and_every_rule(by_layer, by):
    model, method = calibrated(by_layer)
    for larger in range(5):
        other = by_layer.ByLayer(model.config, larger=larger, by=by)
        other.restore(method.calibrated(), model)
        assert len(other.best()) == larger and not other.needs_calibration
    with pytest.raises(UserError, match="by is one of loss, ends, chance"):
        by_layer.ByLayer(model.config, by="layer")


def test_the_first_and_the_last_layers_come_first(by_layer):
    config = model_of(1).config
    method = by_layer.ByLayer(config, by="ends", larger=2)
    assert method.best() == list(method.codecs[0])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("check", invariants.OF_CODECS)
def test_it_is_a_method(by_layer, check):
    case = Case(by_layer.ByLayer, None, heads_per_kv=2, settings=(("larger", 2),), dtype=torch.float64)
    getattr(invariants, f"check_{check}")(case)
