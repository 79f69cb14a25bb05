"""The model against transformers' logits (tests/references/, made by make_references.py), with and without a cache."""
import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tinykv.checkpoint import load_model
from tinykv.model import Llama, LlamaConfig, Rope, pick_token

REFERENCES = Path(__file__).parent / "references"
VARIANTS = sorted(json.loads((REFERENCES / "manifest.json").read_text())["variants"])
NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight", "model.norm.weight")
BIASES = tuple(f"{name}_proj.bias" for name in ("q", "k", "v", "o", "gate", "up", "down"))


class ExactCache:
    """The least that the model asks of a cache: it forgets nothing, and writes down what it was shown."""

    def __init__(self, model):
        self.rope = model.rope
        self.rows = [None] * model.config.num_hidden_layers  # (k rotated, v) of each layer, (B, Hkv, S, d)
        self.seen = []  # (layer, shape of hidden)

    def __len__(self):
        return 0 if self.rows[-1] is None else self.rows[-1][0].shape[2]

    def update(self, layer, q, k, v, positions):
        assert q.shape[2] == len(positions) and q.shape[1] % k.shape[1] == 0
        new = self.rope.rotate(k, positions), v  # (B, Hkv, T, d) both
        if self.rows[layer] is not None:
            new = tuple(torch.cat(pair, dim=2) for pair in zip(self.rows[layer], new))  # (B, Hkv, S, d) both
        self.rows[layer] = new
        return new

    def observe(self, layer, hidden):
        self.seen.append((layer, tuple(hidden.shape)))


class AdjacentRope(Rope):
    """The other convention, of Meta's own files: channel 2i turns with channel 2i + 1."""

    def rotate(self, x, positions):
        halves = torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)  # (..., T, d)
        return super().rotate(halves, positions)


def expected(variant):
    e = load_file(REFERENCES / variant / "expected.safetensors")
    return e["tokens"].long(), e["logits"]  # (B, T), (B, T, vocab)


def logits_of(model, tokens):
    with torch.no_grad():
        return model(tokens)  # (B, T, vocab)


def rebuilt(model, **changes):
    """The same weights under another configuration."""
    other = Llama(dataclasses.replace(model.config, **changes))
    other.load_state_dict(model.state_dict())
    return other


def zeroed(model, suffix, value=0.0):
    """Every parameter whose name ends so set to one value."""
    found = [p for name, p in model.named_parameters() if name.endswith(suffix)]
    assert found
    for p in found:
        p.data.fill_(value)
    return model


def tiny(seed=0, **changes):
    torch.manual_seed(seed)
    sizes = dict(vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, head_dim=4, max_position_embeddings=64)
    model = Llama(LlamaConfig(**sizes | changes))
    for p in model.parameters():
        if p.dim() == 2:
            torch.nn.init.normal_(p, std=0.4)
    return model


# Against transformers

@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_transformers(variant):
    tokens, logits = expected(variant)
    torch.testing.assert_close(logits_of(load_model(REFERENCES / variant), tokens), logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_visible_attention_equals_the_fused_call(variant):
    tokens, _ = expected(variant)
    model = load_model(REFERENCES / variant)
    fused = logits_of(model, tokens)
    for block in model.model["layers"]:
        block.self_attn.fused = False
    torch.testing.assert_close(logits_of(model, tokens), fused, atol=1e-5, rtol=0)


@pytest.mark.parametrize("variant, changes", [
    ("rope_llama3", {"rope_scaling": None}),
    ("rope_llama3", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    ("rope_linear", {"rope_scaling": None}),
    ("rope_theta", {"rope_theta": 10000.0}),
    ("mistral", {"sliding_window": None}),
    ("mistral", {"sliding_window": 7}),
    ("mistral", {"sliding_window": 9}),
    ("mha", {"rms_norm_eps": 1e-6})])
def test_the_reference_tells_a_config_value_that_is_ignored(variant, changes):
    tokens, logits = expected(variant)
    wrong = rebuilt(load_model(REFERENCES / variant), **changes)
    assert (logits_of(wrong, tokens) - logits).abs().max() > 1e-2


@pytest.mark.parametrize("variant, suffix, value",
                         [("biases", name, 0.0) for name in BIASES] + [("mha", name, 1.0) for name in NORMS])
def test_the_reference_tells_a_bias_or_norm_that_is_ignored(variant, suffix, value):
    tokens, logits = expected(variant)
    wrong = zeroed(load_model(REFERENCES / variant), suffix, value)
    assert (logits_of(wrong, tokens) - logits).abs().max() > 1e-2


def test_the_reference_tells_the_two_rope_conventions_apart():
    tokens, logits = expected("mha")
    model = load_model(REFERENCES / "mha")
    model.rope = AdjacentRope(model.config)
    assert (logits_of(model, tokens) - logits).abs().max() > 1e-2


def test_the_reference_tells_which_query_heads_share_a_kv_head():
    tokens, logits = expected("gqa")
    model = load_model(REFERENCES / "gqa")
    for block in model.model["layers"]:  # heads 0 and 2 on the first KV head, 1 and 3 on the second
        q, o = block.self_attn.q_proj.weight, block.self_attn.o_proj.weight
        q.data = q.data.view(4, 8, 32)[[0, 2, 1, 3]].reshape(32, 32)  # (H d, D)
        o.data = o.data.view(32, 4, 8)[:, [0, 2, 1, 3]].reshape(32, 32)  # (D, H d)
    assert (logits_of(model, tokens) - logits).abs().max() > 1e-2


def test_the_reference_tells_a_scale_from_the_wrong_head_size():
    tokens, logits = expected("head_dim")
    model = load_model(REFERENCES / "head_dim")
    assert model.config.head_dim != model.config.hidden_size // model.config.num_attention_heads
    for block in model.model["layers"]:
        block.self_attn.q_proj.weight.data *= math.sqrt(model.config.head_dim / 16)
    assert (logits_of(model, tokens) - logits).abs().max() > 1e-2


# The model by itself

def test_tied_ends_are_one_parameter():
    model = load_model(REFERENCES / "tied")
    assert model.lm_head.weight is model.model["embed_tokens"].weight


@pytest.mark.parametrize("window", [None, 3])
def test_no_token_sees_a_later_one(window):
    model = tiny(sliding_window=window, model_type="mistral")
    tokens = torch.randint(31, (1, 12), generator=torch.Generator().manual_seed(1))  # (1, T)
    before = logits_of(model, tokens)
    tokens[0, 7] = (tokens[0, 7] + 1) % 31
    after = logits_of(model, tokens)
    assert torch.equal(before[:, :7], after[:, :7]) and not torch.allclose(before[:, 7], after[:, 7])


def test_a_sliding_window_counts_the_token_itself():
    model = tiny(sliding_window=3, model_type="mistral")
    assert model.mask(0, 5, "cpu").int().tolist() == [
        [1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [0, 1, 1, 1, 0], [0, 0, 1, 1, 1]]
    assert model.mask(0, 3, "cpu") is None  # the window hides nothing yet
    assert model.mask(4, 1, "cpu").int().tolist() == [[0, 0, 1, 1, 1]]


def test_rope_keeps_lengths_and_depends_on_distance_alone():
    rope = tiny().rope
    q, k = torch.randn(2, 1, 4, generator=torch.Generator().manual_seed(2))  # (1, d) both
    def score(i, j):
        return rope.rotate(q, torch.tensor([i])) @ rope.rotate(k, torch.tensor([j])).T
    torch.testing.assert_close(score(5, 2), score(45, 42), atol=1e-5, rtol=0)
    assert (score(5, 2) - score(5, 3)).abs() > 1e-3
    torch.testing.assert_close(rope.rotate(q, torch.tensor([9])).norm(), q.norm())
    assert torch.equal(rope.rotate(q, torch.tensor([0])), q)


def test_half_precision_stays_half_precision_and_near():
    model = tiny()
    tokens = torch.randint(31, (2, 12), generator=torch.Generator().manual_seed(3))  # (B, T)
    full = logits_of(model, tokens)
    half = logits_of(model.to(torch.bfloat16), tokens)
    assert half.dtype == torch.bfloat16
    assert (half.float() - full).abs().max() < 0.05 * full.abs().max()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("chunk", [1, 5, 48])
@pytest.mark.parametrize("variant", ["mha", "gqa", "rope_llama3", "mistral"])
def test_reading_through_a_cache_in_chunks_equals_one_forward(variant, chunk, fused):
    tokens, logits = expected(variant)
    model = load_model(REFERENCES / variant)
    for block in model.model["layers"]:
        block.self_attn.fused = fused
    cache = ExactCache(model)
    with torch.no_grad():
        parts = [model(part, cache) for part in tokens.split(chunk, dim=1)]  # (B, chunk, vocab) each
    assert len(cache) == tokens.shape[1]
    torch.testing.assert_close(torch.cat(parts, dim=1), logits, atol=1e-4, rtol=0)


def test_the_cache_is_shown_the_output_of_every_block_in_order():
    model = tiny()
    cache = ExactCache(model)
    logits_of(model, torch.zeros(2, 3, dtype=torch.long))
    assert cache.seen == []
    with torch.no_grad():
        model(torch.zeros(2, 3, dtype=torch.long), cache)
        model(torch.zeros(2, 1, dtype=torch.long), cache)
    assert cache.seen == [(0, (2, 3, 16)), (1, (2, 3, 16)), (0, (2, 1, 16)), (1, (2, 1, 16))]


# Generation

PROMPT = torch.tensor([[1, 7, 3, 9], [4, 4, 20, 11]])  # (B, T)


def test_greedy_generation_is_the_argmax_of_full_forwards():
    model, want = tiny(), PROMPT
    for _ in range(12):
        want = torch.cat([want, logits_of(model, want)[:, -1].argmax(-1, keepdim=True)], dim=1)  # (B, T + 1)
    assert len(want[:, 4:].unique()) > 4  # a text, not one token over and over
    assert torch.equal(model.generate(PROMPT, 12), want)
    assert torch.equal(model.generate(PROMPT, 12, ExactCache(model)), want)
    assert torch.equal(model.generate(PROMPT, 0), PROMPT)


@pytest.mark.parametrize("settings", [{"top_p": 1e-6, "temperature": 1.0}, {"temperature": 1e-4}])
def test_a_tiny_nucleus_or_temperature_is_greedy(settings):
    model = tiny()
    assert torch.equal(model.generate(PROMPT, 12, seed=1, **settings), model.generate(PROMPT, 12))


def test_a_seed_repeats_a_sample_and_another_does_not():
    model = tiny()
    first, again, other = (model.generate(PROMPT, 12, temperature=1.0, seed=seed) for seed in (5, 5, 6))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(first, model.generate(PROMPT, 12, ExactCache(model), temperature=1.0, seed=5))


def test_the_nucleus_ends_with_the_token_that_crosses_top_p():
    logits = torch.tensor([0.2, 0.5, 0.05, 0.25]).log().expand(4000, 4)  # (B, vocab)
    def shares(temperature, top_p):
        picks = pick_token(logits, temperature, top_p, torch.Generator().manual_seed(0))
        return torch.bincount(picks[:, 0], minlength=4) / len(logits)
    torch.testing.assert_close(shares(1.0, 1.0), torch.tensor([0.2, 0.5, 0.05, 0.25]), atol=0.03, rtol=0)
    torch.testing.assert_close(shares(1.0, 0.6), torch.tensor([0, 2 / 3, 0, 1 / 3]), atol=0.03, rtol=0)
    squares = torch.tensor([0.04, 0.25, 0.0025, 0.0625])  # temperature 1/2 squares the probabilities
    torch.testing.assert_close(shares(0.5, 1.0), squares / squares.sum(), atol=0.03, rtol=0)


@pytest.mark.parametrize("settings", [
    {"temperature": -0.1}, {"temperature": math.nan}, {"temperature": math.inf}, {"top_p": 0.0}, {"top_p": 1.1},
    {"top_p": math.nan}])
def test_impossible_sampling_settings_are_refused(settings):
    with pytest.raises(ValueError, match="temperature|top_p"):
        tiny().generate(PROMPT, 1, **settings)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("seed", [6, 8])  # with 6 the second row never ends, with 8 each row ends at its own time
def test_generation_stops_when_every_row_has_ended(seed, cached):
    model = tiny(seed)
    free = model.generate(PROMPT, 12)[:, 4:]  # (B, 12)
    eos = int(free[0, {6: 5, 8: 4}[seed]])
    ends = [row.index(eos) + 1 if eos in row else 12 for row in free.tolist()]
    assert ends == {6: [6, 12], 8: [5, 7]}[seed]
    stopped = model.generate(PROMPT, 12, ExactCache(model) if cached else None, eos=eos)[:, 4:]  # (B, longest)
    assert stopped.shape == (2, max(ends))
    for row, end in enumerate(ends):
        assert torch.equal(stopped[row, :end], free[row, :end]) and (stopped[row, end:] == eos).all()
    assert torch.equal(model.generate(PROMPT[:1], 12, eos=eos)[:, 4:], free[:1, :ends[0]])
