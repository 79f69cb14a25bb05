"""The model against transformers' logits (tests/references/, made by their make.py), with and without a cache."""
import json
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from test_evaluate import random_model

from tinykv import UserError
from tinykv.cache import KVCache
from tinykv.hf import load_model
from tinykv.methods.intactkv import Prefix
from tinykv.methods.registry import METHODS
from tinykv.model import LlamaConfig, Trace, pick_token

REFERENCES = Path(__file__).parent / "references"
VARIANTS = sorted(json.loads((REFERENCES / "manifest.json").read_text())["variants"])

class ExactCache:
    """The least that the model asks of a cache. It keeps every key and value."""

    def __init__(self, model):
        self.rope, self.rows = model.rope, {}  # by layer: k rotated and v, (B, Hkv, S, d) both

    def __len__(self):
        return self.rows[0][0].shape[2] if self.rows else 0

    def expect(self, tokens):
        return tokens, len(self)

    def update(self, layer, q, k, v, seen):
        rows = self.rope.rotate(k, seen), v  # (B, Hkv, T, d) both
        if layer in self.rows:
            rows = [torch.cat([before, new], dim=2) for before, new in zip(self.rows[layer], rows)]
        self.rows[layer] = rows
        return rows

    def observe(self, layer, hidden):
        pass


def expected(variant):
    reference = load_file(REFERENCES / variant / "expected.safetensors")
    return reference["tokens"].long(), reference["logits"]  # (B, T), (B, T, vocab)


def tiny(seed=0, **changes):
    sizes = dict(vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, head_dim=4, max_position_embeddings=64)
    return random_model(LlamaConfig(**sizes | changes), seed)


# Against transformers

@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_transformers_whatever_the_attention(variant):
    tokens, logits = expected(variant)
    model, found = load_model(REFERENCES / variant), {}
    for attention in ("plain", "fused"):
        model.use_attention(attention)
        found[attention] = model(tokens)  # (B, T, vocab)
        torch.testing.assert_close(found[attention], logits, atol=1e-4, rtol=0)
    torch.testing.assert_close(found["plain"], found["fused"], atol=1e-5, rtol=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_twenty_greedy_tokens_are_those_of_transformers(variant):
    text = load_file(REFERENCES / variant / "expected.safetensors")["greedy"].long()  # (B, 9 + 20)
    model = load_model(REFERENCES / variant)
    for cache in (ExactCache(model), None):
        assert torch.equal(model.generate(text[:, :-20], 20, cache), text)


def test_each_word_for_attention_runs_its_own_lines(monkeypatch):
    """Otherwise the test above could compare one of the two with itself."""
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", Mock(side_effect=ArithmeticError))
    model = tiny()
    model.use_attention("plain")
    model(PROMPT)
    model.use_attention("fused")
    with pytest.raises(ArithmeticError):
        model(PROMPT)
    with pytest.raises(UserError, match="plain, fused, triton, compiled"):
        model.use_attention("flash")


# The model by itself

def test_a_sliding_window_counts_the_token_itself():
    model = tiny(sliding_window=3, model_type="mistral")
    assert model.mask(0, 5, "cpu").int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [0, 1, 1, 1, 0],
        [0, 0, 1, 1, 1]]
    assert model.mask(0, 3, "cpu") is None  # the window hides nothing yet
    assert model.mask(4, 1, "cpu").int().tolist() == [[0, 0, 1, 1, 1]]


# The model and a cache

@pytest.mark.parametrize("attention", ["plain", "fused"])
@pytest.mark.parametrize("chunk", [1, 5, 48])
@pytest.mark.parametrize("variant", ["gqa", "mistral"])
def test_reading_through_a_cache_in_chunks_equals_one_forward(variant, chunk, attention):
    tokens, logits = expected(variant)
    model = load_model(REFERENCES / variant)
    model.use_attention(attention)
    cache = ExactCache(model)
    with torch.no_grad():
        parts = [model(part, cache) for part in tokens.split(chunk, dim=1)]  # (B, chunk, vocab) each
    assert len(cache) == tokens.shape[1]
    torch.testing.assert_close(torch.cat(parts, dim=1), logits, atol=1e-4, rtol=0)


@torch.no_grad()
def test_a_trace_changes_nothing_and_keeps_what_passes():
    model = tiny().double()
    trace = Trace(model)
    assert torch.equal(model(PROMPT, trace), model(PROMPT))
    assert [q.shape for q in trace.q] == [(2, 4, 4, 4)] * 2  # (B, H, T, d), by layer
    assert [k.shape for k in trace.k] == [v.shape for v in trace.v] == [(2, 2, 4, 4)] * 2  # (B, Hkv, T, d)
    assert torch.equal(model.model["norm"](trace.hidden[-1]), model(PROMPT, logits=False))

    # the same window after its first tokens' keys and values, of which there are fewer than others, or as many
    for n in (1, 2):
        keys = torch.stack(trace.k)[:, :1, :, :n]  # (L, 1, Hkv, n, d)
        values = torch.stack(trace.v)[:, :1, :, :n]  # (L, 1, Hkv, n, d)
        after = Trace(model, keys[:, 0], values[:, 0])
        torch.testing.assert_close(model(PROMPT[:1, n:], after), model(PROMPT[:1])[:, n:], atol=1e-5, rtol=0)


# Generation

PROMPT = torch.tensor([[1, 7, 3, 9], [4, 4, 20, 11]])  # (B, T)


def test_a_seed_repeats_a_sample_and_another_does_not():
    model = tiny()
    first, again, other = (model.generate(PROMPT, 12, temperature=1.0, seed=seed) for seed in (5, 5, 6))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(first, model.generate(PROMPT, 12, ExactCache(model), temperature=1.0, seed=5))


def test_the_nucleus_ends_with_the_token_that_crosses_top_p():
    def shares(temperature, top_p, p):
        picks = pick_token(torch.tensor(p).log().expand(4000, -1), temperature, top_p, torch.Generator().manual_seed(0))
        return torch.bincount(picks[:, 0], minlength=len(p)) / 4000

    p = [0.2, 0.5, 0.05, 0.25]
    squares = torch.tensor(p) ** 2  # temperature 1/2 squares the probabilities
    for temperature, top_p, wanted in ((1.0, 1.0, torch.tensor(p)), (1.0, 0.6, torch.tensor([0, 2 / 3, 0, 1 / 3])),
                                       (0.5, 1.0, squares / squares.sum())):
        torch.testing.assert_close(shares(temperature, top_p, p), wanted, atol=0.03, rtol=0)
    # of two tokens of probability 1/2, one has all of top-p = 1/2; a little more takes both
    assert [shares(1.0, top_p, [0.5, 0.5]).count_nonzero() for top_p in (0.5, 0.51)] == [1, 2]


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("seed, at, ends", [(6, 5, [6, 12]),  # the second row never ends
                                            (8, 4, [5, 7])])
def test_generation_stops_when_every_row_has_ended(seed, at, ends, cached):
    """At one id, or at several, as of a config whose eos_token_id is a list; a row that is done repeats the first."""
    model = tiny(seed)
    free = model.generate(PROMPT, 12)[:, 4:]  # (B, 12)
    eos = int(free[0, at])
    never = min(set(range(31)) - set(free.flatten().tolist()))
    assert [row.index(eos) + 1 if eos in row else 12 for row in free.tolist()] == ends
    for given, filled in ((eos, eos), ([never, eos], never)):
        stopped = model.generate(PROMPT, 12, ExactCache(model) if cached else None, eos=given)[:, 4:]  # (B, longest)
        assert stopped.shape == (2, max(ends))
        for row, end in enumerate(ends):
            assert torch.equal(stopped[row, :end], free[row, :end]) and (stopped[row, end:] == filled).all()
        assert torch.equal(model.generate(PROMPT[:1], 12, eos=given)[:, 4:], free[:1, :ends[0]])


def test_a_text_longer_than_the_model_was_made_for_is_refused_before_the_work():
    model = tiny()
    model.config.max_position_embeddings = 15
    used = ExactCache(model)
    for cache in (None, used):
        assert model.generate(PROMPT, 12, cache).shape == (2, 16)  # the last token is not read
    for cache in (None, ExactCache(model)):
        with pytest.raises(UserError, match="16 tokens are more than the 15 positions"):
            model.generate(PROMPT, 13, cache)
    with pytest.raises(UserError, match="16 tokens are more than the 15 positions"):  # what the cache holds counts, too
        model.generate(PROMPT[:, :1], 1, used)
    model.config.rope_scaling = {"rope_type": "linear", "factor": 4.0}  # as Vicuna 16k, trained on 4096 positions
    assert model.config.positions == 60 and model(PROMPT.repeat(1, 15)).shape[1] == 60
    model.config.rope_scaling = None
    method = METHODS["intactkv"](model.config, Prefix("the first two", [1, 7]))
    method.prefix.fill(model, model)
    cache = KVCache(model, method)
    text = model.generate(PROMPT[:1], 12, cache)
    assert text.shape == (1, 16)  # and a prefix counts once
    with pytest.raises(UserError, match="16 tokens are more than the 15 positions"):
        model(text[:, -1:], cache)


# What is printed


@torch.no_grad()
def test_what_a_cache_prints():
    model = tiny()
    cache = KVCache(model, METHODS["pfn"](model.config, preserve=2, scheme="token-dynamic"), "paper")
    assert repr(cache.layers[1].keys) == "CachedRows(layer 1, K: 0 tokens: 0 coded, 0 recent)"
    model(PROMPT[:, :3], cache)
    assert repr(cache.layers[1].values) == "CachedRows(layer 1, V: 3 tokens: 3 coded (2 of them kept), 0 recent)"
    assert repr(cache).startswith("KVCache(PFN(token-dynamic, 2-bit K, 2-bit V), paper, 3 tokens: ")
