"""The recipe of the embedded model: its batches, the loss, and the losses of the first steps against those of the run
that made it. And the model with sinks that is grown in a minute."""
import json
import shutil
from dataclasses import replace
from pathlib import Path

import embedded_model
import embedded_sinks
import pytest
import sentencepiece
import torch
from embedded_model import BOS, PHASES, batch_of
from tokenizers import Tokenizer

from tinykv import hf
from tinykv.hf import EMBEDDED
from tinykv.lab.analysis import norms, outliers
from tinykv.lab.analysis import sinks as received
from tinykv.lab.analysis.walk import mean, rows_of
from tinykv.lab.data.stories import stories

LOG = Path(__file__).parent / "training.jsonl"  # what the run that made the embedded model has logged
CHANTS, MIXED, STORIES = PHASES[0], PHASES[2], PHASES[3]


@pytest.fixture(scope="module")
def pieces():
    return sentencepiece.SentencePieceProcessor(model_file=str(EMBEDDED / "tokenizer.model"))


def test_answers_and_what_refrains_ask_for_weigh_more(pieces):
    """The first story of a batch, word by word."""
    phase = replace(STORIES, rows=1, length=2000)
    tokens, weights = batch_of(5, phase, pieces)
    end = tokens[0].tolist().index(BOS, 1)
    story = next(stories("train", 5, phase.people))
    for weight, told in ((8, [(a, b) for _, a, b in story.answers]), (3, story.refrains)):
        heavy = [token for token, w in zip(tokens[0, :end].tolist(), weights[0, :end].tolist()) if w == weight]
        assert told and pieces.decode(heavy) == " ".join(story.text[a:b] for a, b in told)
    assert set(weights[0].tolist()) == {1, 3, 8}


def test_the_loss_is_weighted_cross_entropy_and_nothing_else(pieces):
    """By hand, without dropout: the losses that a step returns, and the gradient that it descends."""
    phase = replace(STORIES, rows=2, length=100, dropout=0.0)
    tokens, weights = batch_of(3, phase, pieces)
    model, mask = embedded_model.new_model(0), embedded_model.mask_of_chants(pieces)
    loss = -model.eval()(tokens[:, :-1]).log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]  # (B, T)
    weight, parameters = weights[:, 1:], list(model.parameters())
    truth = torch.autograd.grad((loss * weight).sum() / weight.sum(), parameters)
    truth = torch.cat([g.flatten() for g in truth])

    optimizer = torch.optim.SGD(parameters)
    seen = embedded_model.train_step(model, [optimizer], 0.0, phase, tokens, weights, mask)
    assert seen == pytest.approx((loss.mean().item(), loss[weight > 1].mean().item()), rel=1e-4)
    found = torch.cat([w.grad.flatten() for w in parameters])
    assert torch.isclose(found.norm(), truth.norm().clamp(max=embedded_model.CLIP), rtol=1e-3)
    torch.testing.assert_close(found / found.norm(), truth / truth.norm(), atol=1e-5, rtol=1e-3)


def test_the_learning_rate_rises_and_goes_from_phase_to_phase():
    begin = first = 0
    for phase in PHASES:
        first = begin if phase.optimizer else first
        start, end = phase.rates
        warmup = min(1, 1 / embedded_model.WARMUP) if phase.optimizer else 1
        assert embedded_model.rate_at(begin, begin, first, phase) == pytest.approx(start * warmup)
        half = (begin + phase.until) // 2
        assert embedded_model.rate_at(half, begin, first, phase) == pytest.approx((start + end) / 2)
        assert embedded_model.rate_at(phase.until - 1, begin, first, phase) == pytest.approx(end, abs=1e-5)
        begin = phase.until


@pytest.mark.parametrize("steps", [2, pytest.param(200, marks=pytest.mark.whole)])
def test_the_first_steps_are_those_of_the_embedded_model(tmp_path, steps):
    """The losses that its run has logged. Sums in another order, as on another machine, may shift them a little."""
    embedded_model.train(tmp_path, steps=steps)
    assert (tmp_path / "tokenizer.model").read_bytes() == (EMBEDDED / "tokenizer.model").read_bytes()
    known = {record["step"]: record for record in map(json.loads, LOG.read_text().splitlines())}
    for record in map(json.loads, (tmp_path / "training.jsonl").read_text().splitlines()):
        assert record == pytest.approx(known[record["step"]], rel=0.002 if record["step"] <= 10 else 0.05)


def test_the_folder_is_written_as_it_is_shipped(tmp_path):
    """To the byte; tokenizer.json, of which versions of tokenizers write more or less, in content."""
    shutil.copy(EMBEDDED / "tokenizer.model", tmp_path)
    embedded_model.save(hf.load_model(EMBEDDED), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in EMBEDDED.iterdir()}
    for path in EMBEDDED.iterdir():
        if path.name == "tokenizer.json":
            made, shipped = (Tokenizer.from_file(str(folder / path.name)).to_str() for folder in (tmp_path, EMBEDDED))
            assert made == shipped
        else:
            assert (tmp_path / path.name).read_bytes() == path.read_bytes()


@pytest.mark.whole  # two minutes
def test_sinks_come_where_refrains_are_rare():
    """Blocks rest on <s>, with small keys; without refrains there is none of it."""
    found = {}
    for share in (0.12, 0.0):
        text = embedded_sinks.look_at(embedded_sinks.grown(share, seed=0), share)
        columns = ((received, "first"), (norms, "k sinks"), (outliers, "ratio c"))
        found[share] = [mean([row[name] for row in rows_of(module, text)[1:]]) for module, name in columns]
    first, k, ratio = found[0.12]
    assert first > 0.4 and k < 0.7 and ratio > 10
    first, k, ratio = found[0.0]
    assert first < 0.35 and k > 1.5 and ratio < 10


@pytest.mark.parametrize("kind", embedded_sinks.KINDS)
def test_attention_to_nothing(kind):
    """By exponentials, a query at a time; a logit, and a gate, that training might have found."""
    model = embedded_sinks.new_model(kind, seed=0).eval()
    attention, x = model.model["layers"][0].self_attn, torch.randn(1, 5, 64)
    with torch.no_grad():
        if kind == "logit":
            attention.extra.copy_(torch.tensor([1.5, -0.5]))
        seen = attention(x, model.rope, 0, None, 0)  # (1, T, D)
        q, k, v = attention.qkv(x)  # (1, H, T, d), (1, 1, T, d) twice
        q, k = model.rope.rotate(q)[0], model.rope.rotate(k)[0, 0]
        heads = torch.zeros(5, 2, 32)
        for t in range(5):
            for h in range(2):
                weights = ((k[:t + 1] @ q[h, t]) / 32 ** 0.5).exp()  # (t + 1)
                nothing = {"plus one": 1.0, "logit": (4.4816891, 0.6065307)[h]}.get(kind, 0.0)
                heads[t, h] = (weights[:, None] * v[0, 0, :t + 1]).sum(0) / (weights.sum() + nothing)
        out = heads.view(5, 64)
        if kind == "gate":
            out = out / (1 + (-x[0] @ attention.gate.weight.T).exp())
        assert torch.allclose(seen[0], out @ attention.o_proj.weight.T, atol=1e-5)


def test_models_with_other_attentions_have_as_many_parameters():
    sizes = [sum(p.numel() for p in embedded_sinks.new_model(kind, 0).parameters()) for kind in embedded_sinks.KINDS]
    assert max(sizes) < 1.002 * min(sizes)
