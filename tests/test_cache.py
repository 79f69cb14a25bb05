"""The parts of a cache, also for methods that keep other tokens in each head or leave slots empty."""
import copy
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from cases import model_of, tokens_of
from hypothesis import given
from hypothesis import strategies as st

from tinykv import UserError
from tinykv import model as of_model
from tinykv.cache import CachedRows, KVCache
from tinykv.calibrate import calibrate
from tinykv.codecs.base import Codec, Codes
from tinykv.evaluate import kept_tokens
from tinykv.methods.fp16 import FP16
from tinykv.methods.pfn import PFN


class Negating(Codec):
    """Whatever is quantized can be told by its sign."""

    def encode(self, x, ignore=None):
        return Codes(-x)

    def decode(self, codes):
        return codes.packed


@given(st.data())
def test_cached_rows_against_plain_lists(data):
    """Append, keep and quantize in any order; kept tokens may differ by sequence and head, come and go."""
    B, heads = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2))
    rows, exact, length, quantized = CachedRows(0, "k", Negating()), torch.empty(B, 2, 0, 2), 0, 0
    kept = [[set() for _ in range(2)] for _ in range(B)]
    for _ in range(data.draw(st.integers(1, 4))):
        # some tokens arrive
        n = data.draw(st.integers(1, 4))
        new = torch.arange(1.0, 1 + B * 2 * n * 2).view(B, 2, n, 2) + 100 * length
        rows.append(new)
        exact = torch.cat([exact, new], dim=2)
        length += n
        # some of those that are recent or kept are kept
        if data.draw(st.booleans()):
            slots = data.draw(st.integers(1, 3))
            positions = torch.empty(B, heads, slots, dtype=torch.long)
            for b in range(B):
                for h in range(heads):
                    able = kept[b][h] & kept[b][1] if heads == 1 else kept[b][h]
                    able = sorted(able | set(range(quantized, length)))
                    if not able:
                        return  # nothing is left that could be kept
                    chosen = data.draw(st.lists(st.sampled_from(able), min_size=slots, max_size=slots))
                    positions[b, h] = torch.tensor(chosen)
                    for other in range(2) if heads == 1 else [h]:
                        kept[b][other] = set(chosen)
            rows.keep(positions)
        # the oldest are quantized
        n = data.draw(st.integers(0, length - quantized))
        if n:
            rows.quantize(n)
            quantized += n

        assert rows.n_coded == quantized
        expected = exact.clone()
        for b in range(B):
            for h in range(2):
                for t in set(range(quantized)) - kept[b][h]:
                    expected[b, h, t] *= -1
        assert torch.equal(rows.read(), expected)


@pytest.mark.parametrize("position", [-1, 0, 2, 5])
def test_what_is_neither_recent_nor_kept_cannot_be_kept(position):
    """Tokens 0 to 2 are coded, of which 1 is kept; 3 and 4 are recent."""
    rows = CachedRows(0, "k", Negating())
    rows.append(torch.ones(1, 2, 5, 4))
    rows.keep(torch.tensor([[[1]]]))
    rows.quantize(3)
    rows.keep(torch.tensor([[[1, 3, 4]]]))
    with pytest.raises(UserError, match=f"token {position},"):
        rows.keep(torch.tensor([[[1, position]]]))


def test_a_token_that_is_repeated_is_kept_once():
    """A head that keeps fewer tokens than others names one again."""
    assert kept_tokens(SimpleNamespace(kept_positions=torch.tensor([[[4, 4, 4], [1, 2, 3]]]))) == 2


@torch.no_grad()
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_cache_that_is_copied_has_the_same_model_and_goes_on_by_itself(copied):
    model, tokens = model_of(2), tokens_of(1, 24)
    method = PFN(model.config, scheme="token-static", block=8)
    calibrate(model, method, tokens)
    cache = KVCache(model, method)
    model(tokens, cache)
    other = copied(cache)
    assert other.model is model and other.method is method
    expected = model(tokens[:, :9], cache)
    assert len(other) == 24 and torch.equal(model(tokens[:, :9], other), expected)


@pytest.mark.parametrize("where, n", [
    ("model.embed_tokens", 0), ("model.layers.0.self_attn.o_proj", 1), ("model.layers.1", 1), ("model.layers.1.mlp", 2),
    ("model.norm", 2), ("lm_head", 2), ("generate", 2), ("reset", 2)])  # layers that hold the tokens then
@pytest.mark.parametrize("protocol, read", [("stream", 0), ("stream", 5), ("paper", 0)])
def test_a_cache_that_was_interrupted_is_refused_until_it_is_reset(protocol, read, where, n):
    """As Ctrl-C does in a notebook, whose next cell goes on with the cache: in a forward, after the last one of a
    `generate`, of whose tokens the caller has got none, and in a reset."""
    model, tokens = copy.deepcopy(model_of(2)), tokens_of(1, 9)
    cache = KVCache(model, FP16(model.config), protocol)
    if read:
        model(tokens[:, :read], cache)
    call, (owner, name) = {
        "generate": (partial(model.generate, tokens[:, read:], 3, cache), (of_model, "pick_token")),
        "reset": (cache.reset, (cache.method, "begin")),
    }.get(where) or (partial(model, tokens[:, read:], cache), (model.get_submodule(where), "forward"))
    with patch.object(owner, name, side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        call()
    for go_on in model, partial(model.generate, max_new_tokens=1):
        with pytest.raises(UserError, match="begun and not ended" + ".* in 1 of 2 layers" * (n == 1)):
            go_on(tokens[:, read:], cache=cache)
    cache.reset()
    assert torch.equal(model(tokens, cache), model(tokens, KVCache(model, FP16(model.config), protocol)))


def test_an_empty_cache_is_true():
    cache = KVCache(model_of(2), FP16(model_of(2).config))
    assert cache and len(cache) == 0
