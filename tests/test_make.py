"""The training forward against the model's own, its penalties and noise written out, going on after a stop, and the
losses of the first steps against those of the run that made the embedded model."""
import argparse
import json
import math
import shutil
import sys
from dataclasses import replace
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path

import pytest
import sentencepiece
import torch

from tinykv import hf
from tinykv.assets import make
from tinykv.assets.make import BOS, PENALTIES, PHASES, Penalties, Phase, batch_of, forward
from tinykv.cache_parts.trace import Trace
from tinykv.data.stories import stories
from tinykv.run.cli import EMBEDDED

LOG = Path(__file__).parent / "training.jsonl"  # what the run that made the embedded model has logged


@pytest.fixture(scope="module")
def pieces():
    return sentencepiece.SentencePieceProcessor(model_file=str(EMBEDDED / "tokenizer.model"))


@pytest.fixture(scope="module")
def tokens(pieces):
    return batch_of(10**7, phase_of(3, 150, 2, 1), pieces)[0][:, :-1]


def phase_of(rows, length, people, rounds, until=1, **settings):
    penalties = Penalties(*[0.1] * len(PENALTIES))
    return Phase(until, rows, length, people, rounds, rate=0.5, penalties=penalties, **settings)


def test_a_batch_begins_every_window_with_a_story_and_marks_its_answers(pieces):
    tokens, marks = batch_of(5, phase_of(4, 300, 3, 2), pieces)
    assert tokens.shape == marks.shape == (4, 301) and (tokens[:, 0] == BOS).all()
    again, _ = batch_of(5, phase_of(4, 300, 3, 2), pieces)
    other, _ = batch_of(6, phase_of(4, 300, 3, 2), pieces)
    assert torch.equal(tokens, again) and not torch.equal(tokens, other)
    source = stories("train", 5, 3, 2)
    for row, mark in zip(tokens.tolist(), marks.tolist()):
        told = [story.text[start:end] for story in islice(source, row.count(BOS)) for _, start, end in story.answers]
        runs = [[i for i, _ in run] for inside, run in groupby(zip(row, mark), key=itemgetter(1)) if inside]
        found = [pieces.decode(run) for run in runs]
        assert len(found) > 3 and found[:-1] == told[:len(found) - 1]
        assert told[len(found) - 1].startswith(found[-1])  # the window's end may have cut it


def test_forward_is_the_models_own(tokens):
    model = make.new_model(0)
    with torch.no_grad():
        torch.testing.assert_close(forward(model, tokens)[0], model(tokens), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("trained, first_block", [(False, 0), (True, 1)])
def test_penalties_by_hand(tokens, trained, first_block):
    model = hf.load_model(EMBEDDED) if trained else make.new_model(1)
    with torch.no_grad():
        found = forward(model, tokens, first_block=first_block)[1]
        trace = Trace(model)
        model(tokens, trace)
        residual = model.model["embed_tokens"](tokens)  # (B, T, D)
    B, T = tokens.shape
    layers = range(first_block, len(trace.q))
    truth = dict.fromkeys(PENALTIES, 0.0)
    for layer, block in enumerate(model.model["layers"]):
        A = trace.attention(layer)  # (B, H, T, T)
        k, v = trace.k[layer], trace.v[layer]
        out = (A @ v.repeat_interleave(2, 1)).transpose(1, 2).flatten(2) @ block.self_attn.o_proj.weight.T  # (B, T, D)
        away, at_bos, distances = [], [], []
        for b in range(B):
            own = 0
            for t in range(T):
                own = t if tokens[b, t] == BOS else own
                away += (1 - A[b, :, t, own]).tolist()
                if tokens[b, t] == BOS:
                    at_bos += k[b, :, t].pow(2).sum(-1).tolist()
                else:
                    slow = [*range(12, 16), *range(28, 32)]  # of the lowest frequencies, in both halves of RoPE's pairs
                    for row in k[b, :, t].tolist():
                        rms = math.sqrt(sum(x * x for x in row) / 32)
                        distances += [(row[c] / rms - 2.5) ** 2 for c in slow]
        if layer == 0:
            truth["early"] = A[..., tokens[0] == BOS].sum(-1)[:1].mean().item() / B
            truth["early"] += sum(A[b][..., tokens[b] == BOS].sum(-1).mean().item() / B for b in range(1, B))
        if layer in layers:
            n = len(layers)
            truth["away"] += sum(away) / len(away) / n
            truth["update"] += (out.pow(2).sum(-1) / residual.pow(2).sum(-1)).mean().item() / n
            truth["key"] += sum(at_bos) / len(at_bos) / k.pow(2).sum(-1).mean().item() / n
            truth["steady"] += sum(distances) / len(distances) / n
        residual = trace.hidden[layer]
    square, bos = trace.hidden[-1].pow(2), tokens == BOS
    last = [max(0.0, math.log(row.max().item() / square[~bos].mean().item())) for row in square[bos]]
    truth["last"] = sum(last) / len(last)
    assert {name: found[name].item() for name in PENALTIES} == pytest.approx(truth, rel=1e-3, abs=1e-5)


def test_noise_is_the_rounding_of_a_static_grid(tokens):
    """Never at <s>; elsewhere at most half a step of four levels from the smallest to the largest other value, with one
    grid for each channel of K and each head of V. The same for the same step."""
    phase = phase_of(3, 150, 2, 1, noise=1.0)
    noise = make.noise_of(7, phase)
    assert torch.equal(noise, make.noise_of(7, phase)) and not torch.equal(noise, make.noise_of(8, phase))
    assert noise.shape == (6, 2, 3, 2, 150, 32) and make.noise_of(7, replace(phase, noise=0.0)) is None
    largest = [make.noise_of(step, phase).abs().max().item() for step in range(20)]
    assert max(largest) <= 0.5 and max(largest) > 0.4 and min(largest) < 0.1
    x = torch.randn(3, 2, 150, 32, generator=torch.Generator().manual_seed(1))
    is_bos = tokens == BOS
    x[is_bos[:, None].expand(-1, 2, -1)] = 100.0
    for shared in ((0, 2), (0, 2, 3)):
        out = make.add_noise(x, noise[0, 0], is_bos, shared)
        for head in range(2):
            rows, error = x[:, head][~is_bos], (out - x)[:, head][~is_bos]  # (n, 32)
            low, high = (rows.min(0)[0], rows.max(0)[0]) if shared == (0, 2) else (rows.min(), rows.max())
            expected = noise[0, 0][:, head][~is_bos] * (high - low) / 3
            torch.testing.assert_close(error, expected, atol=1e-5, rtol=1e-3)
            assert (out[:, head][is_bos] == 100.0).all()


def test_the_learning_rate_rises_and_goes_from_phase_to_phase():
    assert make.rate_at(0) == pytest.approx(1 / 200) and make.rate_at(199) == pytest.approx(1, abs=0.01)
    begin = 1.0
    for before, phase in zip([None, *PHASES], PHASES):
        start = before.until if before else 0
        half = (start + phase.until) // 2
        assert make.rate_at(half) == pytest.approx((begin + phase.rate) / 2, abs=0.001)
        begin = phase.rate
    assert make.rate_at(PHASES[-1].until - 1) == pytest.approx(PHASES[-1].rate, abs=0.001)


@pytest.mark.parametrize("words, named", [(["--steps", "0"], "steps"), (["--lr", "nan"], "lr"),
                                          (["--device", "toaster"], "toaster"), ([], "training.pt")])
def test_bad_input_is_one_clear_line_and_nothing_is_written(tmp_path, monkeypatch, capsys, words, named):
    """A finished model, of which no state is left, is not trained over."""
    shutil.copytree(EMBEDDED, tmp_path / "model")
    before = {file.name: file.read_bytes() for file in (tmp_path / "model").iterdir()}
    out = "model" if not words else "new"
    monkeypatch.setattr(sys, "argv", ["make", "--out", str(tmp_path / out), *words])
    with pytest.raises(SystemExit) as end:
        make.main()
    err = capsys.readouterr().err
    assert end.value.code == 2 and err.count("\n") == 1 and named in err and not (tmp_path / "new").exists()
    assert before == {file.name: file.read_bytes() for file in (tmp_path / "model").iterdir()}


@pytest.mark.whole  # seconds
def test_stopped_and_gone_on_is_the_same(tmp_path, monkeypatch, capsys):
    """Two steps and two more give the bits of four; what is written is a checkpoint that loads."""
    monkeypatch.setattr(torch, "compile", lambda function, **settings: function)
    monkeypatch.setattr(make, "PHASES", [phase_of(2, 40, 1, 1, until=2),
                                         phase_of(1, 60, 2, 1, until=4, noise=0.5, first_block=1)])
    monkeypatch.setattr(make, "print_report", lambda folder: None)
    for out, steps in (("once", "4"), ("twice", "2"), ("twice", "4")):
        words = ["make", "--out", str(tmp_path / out), "--steps", steps, "--device", "cpu"]
        monkeypatch.setattr(sys, "argv", words)
        make.main()
    once, twice = (hf.load_model(tmp_path / out).state_dict() for out in ("once", "twice"))
    assert all(torch.equal(once[name], twice[name]) for name in once)
    start = make.new_model(0).state_dict()
    assert not torch.equal(once["lm_head.weight"], start["lm_head.weight"])


@pytest.mark.parametrize("steps", [2, pytest.param(100, marks=pytest.mark.whole)])
def test_the_first_steps_are_those_of_the_embedded_model(tmp_path, monkeypatch, steps):
    """The losses and penalties that its run has logged; a hundred steps take a minute. Sums in another order, as on
    another machine, may shift them a little."""
    if steps == 2:  # compiling takes half a minute
        monkeypatch.setattr(torch, "compile", lambda function, **settings: function)
    factors = dict.fromkeys(PENALTIES, 1.0)
    args = argparse.Namespace(out=tmp_path, steps=steps, lr=6e-3, seed=0, device="cpu", **factors)
    make.train(args)
    assert (tmp_path / "tokenizer.model").read_bytes() == (EMBEDDED / "tokenizer.model").read_bytes()
    known = [json.loads(line) for line in LOG.read_text().splitlines()]
    known = {record.pop("step"): record for record in known}
    for line in (tmp_path / "training.jsonl").read_text().splitlines():
        record = json.loads(line)
        step = record.pop("step")
        assert record == pytest.approx(known[step], rel=0.002 if step <= 10 else 0.05)
