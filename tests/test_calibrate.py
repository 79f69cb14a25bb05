"""Calibration: what codecs and methods are shown, what is kept is not learned from, and windows that teach nothing.

Most tests run on `Planted` (planted.py).
"""
import copy
import itertools
import math
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
import wrong_methods
from cases import model_of, tokens_of
from planted import CONFIG, L, Planted, changed, d, few_tries, random_rows, same, tables

from tinykv import UserError
from tinykv.cache import KVCache, made_with
from tinykv.calibrate import Text, calibrate, check, shown
from tinykv.codecs import clipped, codebook, nonuniform
from tinykv.lab.tables import tables_of
from tinykv.methods.intactkv import Prefix
from tinykv.methods.kvquant import KVQuant
from tinykv.methods.registry import METHODS
from tinykv.methods.skvq import SKVQ
from tinykv.model import Trace, turned


def recorded(model, method, windows, gradients=False):
    """(layer, kind, rows, kept, gradient) of each layer and kind, as codecs see them."""
    text, cache = Text(model, windows, gradients), KVCache(model, method)
    for layer in range(L):
        for kind, (_, *learned_from) in zip("kv", shown(cache, layer, text[layer])):
            yield layer, kind, *learned_from


def small(name):
    """Settings: codebooks for which a short text is enough."""
    return {"vq": "d8m4"} if name in ("cq", "antkv") else {}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    few_tries(monkeypatch)


# ---- gradients

class Leaves(Trace):
    """The keys, as attention reads them, and the values are leaves of the graph."""
    def update(self, layer, q, k, v, seen):
        self.k.append(self.rope.rotate(k, seen).detach().requires_grad_())
        self.v.append(v.detach().requires_grad_())
        return self.k[-1], self.v[-1]


@pytest.mark.parametrize("rope", ["pre", "post"])
def test_gradients_are_those_of_what_is_stored(rope):
    """In the last layer: after RoPE that of the keys that attention reads; before RoPE the same, turned back."""
    model, window = model_of(2, torch.float64), tokens_of(1, 9)[0]
    trace = Leaves(model)
    loss = F.cross_entropy(model(window[None], trace)[0, :-1], window[1:])
    of_keys, of_values = torch.autograd.grad(loss, [trace.k[-1], trace.v[-1]])  # (1, Hkv, T, d) both
    if rope == "pre":
        cos, sin = model.rope.cos_sin(0, 9, of_keys.device)
        of_keys = turned(of_keys, cos, -sin)
    parts = list(recorded(model, KVQuant(model.config, rope=rope), window[None], gradients=True))
    for (*_, rows, kept, gradient), expected in zip(parts[-2:], (of_keys, of_values)):
        assert gradient.shape == rows.shape == (1, 2, 9, d) and kept[0].tolist() == [[True] + [False] * 8] * 2
        assert torch.allclose(gradient, expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item())


# ---- what is kept is not learned from

def per_head(name):
    """A method that keeps other tokens in each head."""
    at = [[2, 0], [7, 7]]
    return type(name, (METHODS[name],), {"at": at, "keep_keys": lambda self, layer_cache, n: torch.tensor([at])})


@pytest.mark.parametrize("cls, options", [
    (KVQuant, {"outliers": 4.0}), (per_head("kvquant"), {"sensitivity": "none", "outliers": 4.0}),
    (KVQuant, {"sensitivity": "fisher", "outliers": 0.0}), (SKVQ, {"clip": "centre"}), (per_head("pfn"), {}),
    (SKVQ, {"reorder": "off", "metadata": "fp16", "clip": "endpoint"}),
    (METHODS["pfn"], {"scheme": "token-static"}), (METHODS["pfn"], {"scheme": "channel-static"}),
], ids=str)
def test_kept_tokens_are_not_learned_from(cls, options):
    """Whatever they hold. Their own loss may be huge; a planted token's gradient is its own."""
    at = getattr(cls, "at", [[0, 1, 2]] * 2)
    learned = []
    plain = random_rows(2, 10)
    for rows in (plain, changed(plain, at), changed(plain, [[3], [3]])):
        model, method = Planted(rows), cls(CONFIG, **{"preserve": 3, **options})
        calibrate(model, method, model.windows())
        learned.append(tables(method))
    assert learned[0] and same(*learned[:2]) and not same(learned[0], learned[2])


def test_of_a_prefix_nothing_is_learned():
    """Its rows stand before a window's; a codec is shown the window, of which nothing is kept."""
    model, windows = model_of(2), tokens_of(2, 10)
    method = METHODS["intactkv"](model.config, Prefix("three tokens", [1, 2, 3]), 2, 2)
    method.prefix.fill(model, model)
    shown, plain = (list(recorded(model, one, windows)) for one in (method, METHODS["rtn"](model.config)))
    for (_, kind, rows, kept, _), (_, _, of_window, _, _) in zip(shown, plain, strict=True):
        assert rows.shape == of_window.shape and kept.shape == rows.shape[:3] and not kept.any()
        assert kind == "k" or torch.equal(rows, of_window)  # its keys are rotated here


# ---- what cannot be learned from

@pytest.mark.parametrize("name, options", [
    ("skvq", {"group_size": 4}), ("kvquant", {"preserve": 5}), ("kvquant", {"preserve": 5, "k_bits": 16}),
    ("pfn", {"scheme": "token-static"})], ids=str)
def test_windows_of_which_nothing_is_left(name, options):
    """Nothing was seen, so nothing can be calibrated; one token more will do."""
    model = model_of(2)
    method = METHODS[name](model.config, **options)
    for T in (2, 5):
        with pytest.raises(UserError, match="keep"):
            calibrate(model, method, tokens_of(3, T))
    calibrate(model, method, tokens_of(3, 7))
    assert all(torch.isfinite(t.float()).all() for t in tables_of(method).values())


def test_a_head_of_which_nothing_is_left():
    """One is enough: it has a range, or a codebook, of its own."""
    with pytest.raises(UserError, match="keep"):
        check(0, torch.zeros(1, 2, 2, d), torch.tensor([[[True, True], [True, False]]]), None)


@pytest.mark.parametrize("name, weight, named", [
    *((name, f"model.layers.1.{part}", "finite")
      for name in ("skvq", "kvquant", "kvsink") for part in ("mlp.down_proj", "self_attn.v_proj")),
    ("kvquant", "lm_head", "gradient")])  # where only the loss is not finite
def test_a_broken_model_teaches_nothing(name, weight, named):
    """Rather than tables of NaN: it would be the text's perplexity that shows it, if anything."""
    for bad in (math.nan, math.inf):
        model = copy.deepcopy(model_of(2))
        model.get_submodule(weight).weight.data[0, 0] = bad
        with pytest.raises(UserError, match=named):
            calibrate(model, METHODS[name](model.config), tokens_of(2, 20))


def test_a_method_is_shown_all_windows():
    """The embedding, and each layer's output."""
    model, windows, seen = model_of(2), tokens_of(3, 5), []
    method, trace = METHODS["fp16"](model.config), Trace(model)
    method.needs_text, method.fit = True, seen.extend
    calibrate(model, method, windows)
    model(windows, trace)
    for found, expected in zip(seen, [model.model["embed_tokens"](windows), *trace.hidden], strict=True):
        torch.testing.assert_close(found, expected)


# ---- several methods

def test_a_list_finds_what_each_method_finds_alone():
    """Whatever they need: gradients, keys before RoPE, a look of their own. Each window is read once, for
    all of them."""
    model, windows, count = copy.deepcopy(model_of(2)), tokens_of(2, 40), []
    model.register_forward_hook(lambda *given: count.append(1))
    names = ["rtn", "pfn", "kvsink", "kvquant", "skvq", "cq", "antkv"]
    apart, together = [[METHODS[name](model.config, **small(name)) for name in names] for _ in range(2)]
    for method in apart:
        calibrate(model, method, windows)
    count.clear()
    calibrate(model, together, windows)
    assert len(count) == len(windows) + 1  # and what the model is known by
    for one, other in zip(apart, together):
        assert made_with(one) == made_with(other) and same(tables_of(one), tables_of(other))


@pytest.mark.parametrize("name, readings", [("kvquant", L), ("kvsink", 2 * L), ("cq", L)])
def test_some_layers_at_a_time_find_the_same(name, readings, monkeypatch):
    """Where memory is short: the text is read again for other layers, and KVSink's search reads it by itself."""
    model, windows, count = copy.deepcopy(model_of(2)), tokens_of(2, 40), []
    model.register_forward_hook(lambda *given: count.append(1))
    found = []
    for held, n in ((1, readings), (2 ** 40, 1)):
        monkeypatch.setattr("tinykv.calibrate.HELD", held)
        count.clear()
        calibrate(model, method := METHODS[name](model.config, **small(name)), windows)
        assert len(count) == n * len(windows) + 1  # and what the model is known by
        found.append(tables(method))
    assert found[0] and same(*found)


def test_what_is_held_has_a_bound(monkeypatch):
    """Of the layers that are held at a time all tensors, whatever the model's dtype; one layer is always held."""
    for dtype, gradients, n in itertools.product((torch.float32, torch.bfloat16), (False, True), (1, 2)):
        model = copy.deepcopy(model_of(2)).to(dtype)
        whole = Text(model, tokens_of(2, 40), gradients)
        assert whole.at_once >= L and whole[0]["k"].dtype == (torch.bfloat16 if dtype.itemsize == 2 else torch.float16)
        of_layer = sum(x.nbytes for window in whole.held[0] for x in window.values())
        for bound in (n * of_layer, (n + 1) * of_layer - 1):
            monkeypatch.setattr("tinykv.calibrate.HELD", bound)
            assert Text(model, tokens_of(2, 40), gradients).at_once == n
        monkeypatch.undo()


def test_a_calibration_that_was_interrupted_is_none():
    """Some layers have its tables, and some have still another text's."""
    model, method = model_of(2), METHODS["kvquant"](model_of(2).config)
    calibrate(model, method, tokens_of(2, 40))
    method.codecs[1].k.fit = Mock(side_effect=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        calibrate(model, method, tokens_of(2, 40, seed=1))
    with pytest.raises(UserError, match="not calibrated"):
        model(tokens_of(1, 9), KVCache(model, method))


def test_a_second_calibration_finds_what_a_first_one_would():
    """Also where a method chooses by its codes: while it is calibrated, no table is another text's."""
    model = model_of(2)
    once, twice = (wrong_methods.WorstCoded(model.config, scheme="token-static") for _ in range(2))
    calibrate(model, twice, tokens_of(2, 40))
    first = tables(twice)
    for method in (once, twice):
        calibrate(model, method, tokens_of(2, 40, seed=1))
    assert same(tables(once), tables(twice)) and not same(first, tables(twice))


def test_a_copied_method_has_tables_of_its_own():
    """And it is the same as ever where tokens are int32, or no gradients are recorded around it."""
    model, method = model_of(2), KVQuant(model_of(2).config)
    calibrate(model, method, tokens_of(2, 40))
    found, other = tables(method), copy.copy(method)
    calibrate(model, other, tokens_of(2, 40, seed=1))
    assert same(tables(method), found) and not same(tables(other), found)
    with torch.inference_mode():
        calibrate(model, other, tokens_of(2, 40).int())
    assert same(tables(other), found)


# ---- a notebook that computes in another dtype

@pytest.mark.parametrize("name", ["kvsink", "oscar", "skvq", "kvquant", "antkv"])
def test_torchs_default_dtype_changes_nothing(name):
    """Neither what calibration finds nor what is read."""
    model, tokens, found = model_of(2), tokens_of(4, 40), []
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            method = METHODS[name](model.config, **small(name))
            if method.needs_calibration:
                calibrate(model, method, tokens)
            found.append([*tables_of(method).values(), model(tokens, KVCache(model, method, "paper"))])
        finally:
            torch.set_default_dtype(torch.float32)
    exact, *others = found
    assert all(torch.equal(*pair) for other in others for pair in zip(exact, other, strict=True))


# ---- draws

@pytest.mark.parametrize("name, module", [("kvquant", nonuniform), ("skvq", clipped), ("cq", codebook)])
def test_the_seed_of_a_draw_is_that_of_all_k_means(name, module, monkeypatch):
    seen, kmeans = [], module.kmeans
    monkeypatch.setattr(module, "kmeans", lambda *given, seed, **more: seen.append(seed) or kmeans(*given, **more))
    model = Planted(random_rows(1, 10))
    calibrate(model, METHODS[name](CONFIG, **small(name)), model.windows(), seed=5)
    assert seen == [5] * 2 * L  # K and V of each layer
