"""The training forward against the model's own, its penalties written out, and going on after a stop."""
import math
import shutil
import sys
from itertools import groupby, islice
from operator import itemgetter

import pytest
import sentencepiece
import torch

from tinykv import hf
from tinykv.assets import make
from tinykv.assets.make import BOS, PENALTIES, Phase, batch_of, forward
from tinykv.cache import Trace
from tinykv.cli import EMBEDDED
from tinykv.data.stories import stories


@pytest.fixture(scope="module")
def pieces():
    return sentencepiece.SentencePieceProcessor(model_file=str(EMBEDDED / "tokenizer.model"))


@pytest.fixture(scope="module")
def tokens(pieces):
    return batch_of(10**7, Phase(1, 3, 150, 2, 1, ()), pieces)[0][:, :-1]


def test_a_batch_begins_every_window_with_a_story_and_marks_its_answers(pieces):
    tokens, marks = batch_of(5, Phase(1, 4, 300, 3, 2, ()), pieces)
    assert tokens.shape == marks.shape == (4, 301) and (tokens[:, 0] == BOS).all()
    again, _ = batch_of(5, Phase(1, 4, 300, 3, 2, ()), pieces)
    other, _ = batch_of(6, Phase(1, 4, 300, 3, 2, ()), pieces)
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


@pytest.mark.parametrize("trained", [False, True])
def test_penalties_by_hand(tokens, trained):
    model = hf.load_model(EMBEDDED) if trained else make.new_model(1)
    with torch.no_grad():
        found = forward(model, tokens)[1]
        trace = Trace(model)
        model(tokens, trace)
        residual = model.model["embed_tokens"](tokens)  # (B, T, D)
    B, T = tokens.shape
    layers = len(trace.q)
    away = key = update = 0.0
    for layer, block in enumerate(model.model["layers"]):
        A = trace.attention(layer)  # (B, H, T, T)
        size = trace.k[layer].pow(2).sum(-1)  # (B, Hkv, T)
        at_bos = []
        for b in range(B):
            own = 0
            for t in range(T):
                own = t if tokens[b, t] == BOS else own
                away += (1 - A[b, :, t, own].mean().item()) / (B * T * layers)
            at_bos += [size[b, :, t].mean().item() for t in range(T) if tokens[b, t] == BOS]
        key += sum(at_bos) / len(at_bos) / size.mean().item() / layers
        v = trace.v[layer].repeat_interleave(2, 1)  # (B, H, T, d)
        out = (A @ v).transpose(1, 2).flatten(2) @ block.self_attn.o_proj.weight.T  # (B, T, D)
        update += (out.pow(2).sum(-1) / residual.pow(2).sum(-1)).mean().item() / layers
        residual = trace.hidden[layer]
    square, bos = trace.hidden[-1].pow(2), tokens == BOS
    last = [max(0.0, math.log(row.max().item() / square[~bos].mean().item())) for row in square[bos]]
    truth = {"away": away, "update": update, "key": key, "last": sum(last) / len(last)}
    assert {name: found[name].item() for name in PENALTIES} == pytest.approx(truth, rel=1e-3, abs=1e-5)


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
    monkeypatch.setattr(make, "PHASES", [Phase(2, 2, 40, 1, 1, (0.1,) * 4), Phase(4, 1, 60, 2, 1, (0.1,) * 4)])
    monkeypatch.setattr(make, "print_report", lambda folder: None)
    for out, steps in (("once", "4"), ("twice", "2"), ("twice", "4")):
        words = ["make", "--out", str(tmp_path / out), "--steps", steps, "--device", "cpu"]
        monkeypatch.setattr(sys, "argv", words)
        make.main()
    once, twice = (hf.load_model(tmp_path / out).state_dict() for out in ("once", "twice"))
    assert all(torch.equal(once[name], twice[name]) for name in once)
    start = make.new_model(0).state_dict()
    assert not torch.equal(once["lm_head.weight"], start["lm_head.weight"])
