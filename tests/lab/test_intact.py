"""IntactKV: the rows of a prefix, its files, its training, the commands.

That every cache begins with the prefix, and quantizes what follows it, is in the matrix of test_methods.py. Models are
random and tiny, except where the commands run.
"""
import copy
import dataclasses
import json
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from test_cli import cells, refused
from test_evaluate import assert_by_hand
from test_weights import fold, text, tiny

import train_intact
from tinykv import UserError, hf
from tinykv.cache import KVCache
from tinykv.evaluate import measure
from tinykv.hf import EMBEDDED
from tinykv.lab.analysis.walk import walk
from tinykv.lab.data import Windows, load_windows
from tinykv.lab.data.stories import stories
from tinykv.lab.data.windows import encode_documents
from tinykv.lab.hf.save import save
from tinykv.lab.prefixes import load_prefix, open_prefix, save_prefix
from tinykv.lab.run import flags
from tinykv.lab.run.calibration import fill_prefix
from tinykv.lab.run.entries import build_entries
from tinykv.lab.tables import fingerprint
from tinykv.lab.weights import quantize
from tinykv.lab.weights.awq import AWQ
from tinykv.lab.weights.omniquant import OmniQuant
from tinykv.lab.weights.rtn import RTN as RTNWeights
from tinykv.methods.fp16 import FP16
from tinykv.methods.intactkv import IntactKV, Prefix
from tinykv.model import Llama, LlamaConfig, Trace

ROOT = Path(__file__).parents[2]
IDS = [1, 30, 7, 7, 22, 3, 9, 14, 2, 40, 5, 5, 1, 17, 28, 33, 12, 6]


def prefix_of(full, n, coded=None):
    prefix = Prefix("some tokens", IDS[:n])
    prefix.fill(full, coded or full)
    return prefix


def begun(n, T, batch=1, seed=3):
    """Random texts (B, T) that begin with n tokens of IDS."""
    tokens = text(batch, T, seed)
    tokens[:, :n] = torch.tensor(IDS[:n])
    return tokens


def test_theorem_1_holds_and_explains_little():
    """Of the last of 64 tokens, with weights of 3 bits: how much each head's output changes, and the bound, with token
    0 quantized and exact. docs/methods.md has the means."""
    model, tokenizer = hf.load(EMBEDDED)
    n, d, norm = 64, model.config.head_dim, partial(torch.linalg.matrix_norm, ord=2)
    window = load_windows("tales", tokenizer, n, 1, "test").tokens[0]
    found = {0: [], 1: []}  # {exact tokens: (change, bound, bound with 1 for n^(3/2)) of each layer's heads}
    for at, coarse in zip(walk(model, window), walk(quantize(model, RTNWeights(3)), window)):
        W_O = model.model["layers"][at.layer].self_attn.o_proj.weight.detach().T.split(d)  # a head's (d, D)
        K, V = at.k[0, 0], at.v[0, 0]  # (n, d) both
        for q, W in zip(at.q[0, :, -1], W_O):  # q (d)
            for exact, rows in found.items():
                dK, dV = coarse.k[0, 0] - K, coarse.v[0, 0] - V
                dK[:exact] = dV[:exact] = 0
                h, changed = ((q @ k.T / d ** 0.5).softmax(-1) @ v @ W for k, v in ((K, V), (K + dK, V + dV)))  # (D)
                by_score = q.norm() * dK.norm(dim=1).max() / d ** 0.5 * norm(W) * (dV.norm() + norm(V))
                by_value = norm(W) * dV.norm()
                rows.append(torch.stack([(changed - h).norm(), n ** 1.5 * by_score + by_value, by_score + by_value]))
    found = {exact: torch.stack(rows) for exact, rows in found.items()}  # (8, 3)
    assert all((rows[:, 0] < rows[:, 2]).all() for rows in found.values())
    assert found[0].mean(0).tolist() == pytest.approx([1.40, 156_800, 331], rel=0.005)
    assert found[1].mean(0).tolist() == pytest.approx([0.44, 156_600, 331], rel=0.006)
    assert 39_000 < (found[0][:, 1] / found[0][:, 0]).min()


# ---- rows of a transformed model

@pytest.mark.one_in(2)
@pytest.mark.parametrize("quantizer, sharing", [(AWQ(3, 16), 1), (AWQ(3, 16), 2), (OmniQuant(3, 16), 1),
                                                (OmniQuant(3, 16), 4), (RTNWeights(3, 16), 1)],
                         ids=["awq-mha", "awq-gqa", "omniquant-mha", "omniquant-gqa", "rtn"])
def test_rows_are_the_transformed_models(monkeypatch, quantizer, sharing):
    """In the scale that the quantized model has its values in; but not rounded as its weights are."""
    monkeypatch.setattr("tinykv.lab.weights.omniquant.EPOCHS", 2)
    model, n = tiny(sharing, bias=True), 6
    coded, equivalent = fold(monkeypatch, model, quantizer, text())
    assert all(block.self_attn.k_proj.gain is None for block in coded.model["layers"])
    cache = KVCache(coded, IntactKV(model.config, prefix_of(model, n, coded)))
    exact, rough = (KVCache(m, FP16(model.config)) for m in (equivalent, coded))
    for m, other in ((equivalent, exact), (coded, rough)):
        m(torch.tensor([IDS[:n]]), other)
    for layers in zip(cache.layers, exact.layers, rough.layers):
        for found, wanted, off in zip(*(layer.read() for layer in layers)):
            error = (found - wanted).float().norm() / wanted.float().norm()
            assert error < 2e-3 and (off - wanted).float().norm() / wanted.float().norm() > 20 * error + 0.01


# ---- the evaluator

@pytest.mark.one_in(3)
@pytest.mark.parametrize("n, start", [(1, 1), (3, 1), (3, 3), (1, 4)])
@pytest.mark.parametrize("batch", [1, 3])
def test_figures_of_a_quantized_model_with_a_prefix(n, start, batch):
    """At the prefix's positions fp16 predicts; what is not a target counts for no method."""
    model = tiny(2)
    coded = quantize(model, RTNWeights(3, 16))
    windows = Windows(begun(n, 21, batch=3), [[(5, 7), (10, 11)], [(20, 21)], [(4, 5)]], start)
    fp16, intact = FP16(model.config), IntactKV(model.config, prefix_of(model, n, coded))
    exact = measure(model, fp16, windows, "paper", batch)
    rough, found = (measure(coded, method, windows, "paper", batch, exact) for method in (fp16, intact))
    assert_by_hand(exact, model, fp16, model, windows)
    assert_by_hand(rough, coded, fp16, model, windows)
    assert_by_hand(found, coded, intact, model, windows)
    assert sum(found.kl) != pytest.approx(sum(rough.kl), rel=1e-2)


@pytest.fixture(scope="module")
def tokenizer():
    return hf.load_tokenizer(EMBEDDED, hf.load_config(EMBEDDED))


@pytest.mark.parametrize("n", [1, 5])
def test_windows_with_a_prefix_have_the_same_text_after_it(tokenizer, n):
    """And the same answers: the same tokens, n further on."""
    plain = load_windows("tales", tokenizer, 600, 30, bos="none")
    ours = load_windows("tales", tokenizer, 600 + n, 30, prefix=IDS[:n])
    assert ours.start == max(1, n) and plain.start == 1 and sum(map(len, plain.answers)) > 20
    assert torch.equal(ours.tokens[:, n:], plain.tokens) and (ours.tokens[:, :n] == torch.tensor(IDS[:n])).all()
    assert ours.answers == [[(i + n, j + n) for i, j in of_window] for of_window in plain.answers]


def test_a_fact_at_the_start_of_a_window_is_known_after_a_prefix(tokenizer):
    """BOS takes no token's place there."""
    _, marks = encode_documents(stories("test", 0), tokenizer, 2000)
    fact, start, end = next(mark for mark in marks if mark[2] <= 2 * mark[0])  # the second of two windows begins there
    answer = start - fact, end - fact
    assert answer in load_windows("tales", tokenizer, fact, 2, bos="none").answers[1]
    assert answer not in load_windows("tales", tokenizer, fact, 2).answers[1]
    assert (answer[0] + 3, answer[1] + 3) in load_windows("tales", tokenizer, fact + 3, 2, prefix=IDS[:3]).answers[1]


def test_bos_is_the_default():
    method = IntactKV(dataclasses.replace(tiny().config, bos_token_id=4))
    found = method.prefix.ids, method.preserve, *map(method.bits_of, "kv"), method.scheme
    assert found == ([4], 1, 16, 16, "token-dynamic")
    assert IntactKV(tiny().config, Prefix("two", [1, 2]), k_bits=4).codecs[0].k.formula == "integer-zero"


# ---- files

LABEL = "rtn-3, groups of 16"  # of quantized weights


@pytest.fixture
def trained(tmp_path):
    """(path, model, prefix) of a file as training writes it."""
    model, path = tiny(), tmp_path / "trained.safetensors"
    prefix = prefix_of(model, 3)
    prefix.keys, prefix.values = (prefix.keys + 1).half(), (prefix.values * 2).half()
    prefix.trained_for = {"model": fingerprint(model), "weights": LABEL}
    save_prefix(path, prefix)
    return path, model, prefix


def test_a_prefix_is_read_as_it_was_written(trained):
    path, model, prefix = trained
    found = load_prefix(path)
    assert (found.ids, found.trained_for, str(found)) == (prefix.ids, prefix.trained_for, str(path))
    assert torch.equal(found.keys, prefix.keys) and torch.equal(found.values, prefix.values)
    fill_prefix(found, model, quantize(model, RTNWeights(3, 16)), LABEL)
    assert torch.equal(found.keys, prefix.keys)  # as trained, and not computed anew
    cache = KVCache(model, IntactKV(model.config, found))
    assert torch.equal(cache.layers[1].values.read(), prefix.values[1][None])


@pytest.mark.parametrize("seed, weights, named", [(0, "rtn-4, groups of 16", "rtn-4"),
                                                  (0, "full precision", "full precision"), (1, LABEL, "rtn-3")])
def test_a_prefix_of_another_model_or_other_weights_is_refused(trained, seed, weights, named):
    path, model, _ = trained
    other = tiny(seed=seed)
    with pytest.raises(UserError, match=f"model.*weights.*{named}"):
        fill_prefix(load_prefix(path), other, other, weights)


def test_what_a_prefix_may_be(tokenizer, tmp_path):
    path = tmp_path / "system.txt"
    path.write_text("Balo lives in Eastwick.\n")
    bos, found = open_prefix("bos", tokenizer), open_prefix(str(path), tokenizer)
    assert bos.ids == [tokenizer.bos_id] and str(found) == str(path)
    assert found.ids == [tokenizer.bos_id, *tokenizer.encode("Balo lives in Eastwick.")]


# ---- training

@torch.no_grad()
def traced(model, tokens):
    """Of one forward over all tokens, without a prefix."""
    trace = Trace(model)
    model(tokens, trace, logits=False)
    return trace


def own_rows(model, ids):
    """Keys before RoPE, and values, (L, Hkv, n, d) both: not rounded."""
    trace = traced(model, torch.tensor([ids]))
    return torch.cat(trace.k), torch.cat(trace.v)


def double(sharing, n):
    model = tiny(sharing).double()
    coded = copy.deepcopy(model)
    for block in coded.model["layers"]:
        block.mlp.up_proj.weight.mul_(1.1)
        block.self_attn.v_proj.weight.mul_(0.9)
    return model, coded, begun(n, 17, batch=3)


@pytest.mark.parametrize("sharing, n", [(1, 1), (2, 4), (4, 3)])
def test_the_loss_is_the_mean_of_what_blocks_are_off_by(sharing, n):
    """With each model's own rows both are as if they had read the whole text in one forward."""
    model, coded, tokens = double(sharing, n)
    exact, rows = own_rows(model, IDS[:n]), own_rows(coded, IDS[:n])
    found = train_intact.block_loss(model, coded, tokens[:, n:], exact, rows).item()
    whole = [traced(of, tokens).hidden for of in (model, coded)]
    errors = [(a[:, n:] - b[:, n:]).square().mean().item() for a, b in zip(*whole)]
    assert len(errors) == 2 and found == pytest.approx(sum(errors) / 2, rel=1e-5)
    assert train_intact.block_loss(model, model, tokens[:, n:], exact, exact).item() == 0
    assert train_intact.block_loss(model, coded, tokens[:, n:], exact, exact).item() != pytest.approx(found, rel=1e-3)


@pytest.mark.parametrize("sharing, n", [(1, 1), (2, 4)])
def test_the_gradient_of_the_loss_by_finite_differences(sharing, n):
    """With respect to keys, before RoPE, and values, in a random direction."""
    model, coded, tokens = double(sharing, n)
    exact = own_rows(model, IDS[:n])

    def loss(*rows):
        return train_intact.block_loss(model, coded, tokens[:, n:], exact, rows)
    torch.manual_seed(0)
    assert torch.autograd.gradcheck(loss, [x.clone().requires_grad_() for x in exact], eps=3e-3, atol=0, rtol=2e-2,
                                    fast_mode=True)


# ---- train_intact.py

TINY = ["--samples", "8", "--tokens", "64", "--accumulate", "2", "--context", "64", "--windows", "1"]


@pytest.fixture
def training(run, one_layer, tmp_path):
    """Call it with more words: (status, stdout, stderr)."""
    return partial(run, train_intact, "--model", one_layer, "--out", tmp_path / "trained.safetensors", *TINY)


@pytest.fixture
def evaluating(command):
    return partial(command, "--context", 64, "--windows", 2)


@pytest.mark.whole
def test_what_was_trained_is_what_is_evaluated(training, evaluating, tmp_path):
    """And the loss is lower for it."""
    path, model = tmp_path / "trained.safetensors", ["--model", EMBEDDED, "--weights", "rtn", "--w-bits", 2]
    status, out, _ = training("--updates", 40, *model)
    head, *lines = cells(out)
    assert status == 0 and head == ["prefix", "loss", "held-out loss"]
    assert [line[0] for line in lines] == ["none", "exact", "trained"]
    none, exact, trained = ([float(x) for x in line[1:]] for line in lines)
    assert trained[0] < exact[0] < none[0]
    status, out, _ = evaluating("--method", "intactkv", *model, "--prefix", f"bos,{path}")
    assert status == 0 and f"intactkv prefix={path}" in out and "intactkv prefix=bos" in out
    assert "weights" in refused(evaluating, "--method", "intactkv", "--model", EMBEDDED, "--prefix", path)


def test_the_rows_of_each_model_are_its_own(training, tokenizer, monkeypatch, tmp_path):
    """awq folds scales into the values where each query head has its own KV head; only the quantized model has them.
    They are in what "none" reads, and not in what is trained for."""
    torch.manual_seed(0)
    save(Llama(LlamaConfig(1024, 16, 24, 2, 2, 2, 8, 128)), EMBEDDED / "tokenizer.model", tmp_path / "model")
    given = []
    monkeypatch.setattr(train_intact, "train", lambda *_: None)
    monkeypatch.setattr(train_intact, "mean_loss", lambda *words: given.append(words) or 0.0)
    assert training("--model", tmp_path / "model", "--weights", "awq", "--calib-windows", 1)[0] == 0
    (full, quantized, tokens, exact, none, _), _, (*_, scaled, _), *_ = given
    assert tokens.shape == (8, 63)  # BOS is the prefix's
    for model, rows in ((full, exact), (quantized, none)):
        for found, wanted in zip(rows, own_rows(model, [tokenizer.bos_id]), strict=True):
            assert (found - wanted).norm() < 2e-3 * wanted.norm()
    assert torch.equal(scaled[0], exact[0]) and not torch.allclose(scaled[1], exact[1], rtol=0.1)


def stop(patch, at):
    """Ctrl-C after so many updates in all."""
    update = train_intact.State.update

    def and_stop(state, clip):
        update(state, clip)
        if state.done == at:
            raise KeyboardInterrupt
    patch.setattr(train_intact.State, "update", and_stop)


def test_an_update_is_a_step_of_adam_on_the_mean_loss_of_the_texts_that_come_next(training, monkeypatch, tmp_path):
    """By hand: each text once before any comes again; gradients of keys and values clipped together; no decay. Also in
    a run that goes on, and however many texts are read at a time."""
    runs, train, clip = [], train_intact.train, 1e-4

    def noted_before(*given):
        runs.append((*given, given[4].rows.detach().double()))
        train(*given)
    monkeypatch.setattr(train_intact, "train", noted_before)
    words = "--updates", 4, "--samples", 5, "--accumulate", 3, "--lr", 0.01, "--clip", clip
    with monkeypatch.context() as patch:
        stop(patch, 1)
        status, _, err = training(*words, "--batch", 2)
    assert status == 130 and err.endswith(": stopped; the same command goes on after the last update\n")
    assert [path.name for path in tmp_path.iterdir()] == ["trained.safetensors.state"]
    status, out, _ = training(*words, "--batch", 1)
    assert status == 0 and "going on after 1 updates" in out
    assert [path.name for path in tmp_path.iterdir()] == ["trained.safetensors"]
    (full, quantized, tokens, exact, *_, x), (*_, state, _, _) = runs
    order, m, v, norms = train_intact.text_order(5, 0, 12), 0, 0, []
    assert sorted(order[:5]) == sorted(order[5:10]) == list(range(5)) and order[:5] != order[5:10]
    for step in range(1, 5):
        rows = x.float().requires_grad_()
        losses = [train_intact.block_loss(full, quantized, tokens[i:i + 1], exact, rows)
                  for i in order[3 * (step - 1):3 * step]]
        g, = torch.autograd.grad(sum(losses) / 3, rows)
        norms.append(g.norm().item())
        g = g.double() * min(1, clip / (norms[-1] + 1e-6))  # as torch clips
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g ** 2
        x = x - 0.01 * (m / (1 - 0.9 ** step)) / ((v / (1 - 0.999 ** step)).sqrt() + 1e-8)
    assert min(norms) < clip < max(norms) and torch.allclose(state.rows.double(), x, rtol=0, atol=1e-5)


def test_the_state_of_another_run_or_a_damaged_one_is_refused_and_stays(training, monkeypatch, tmp_path):
    training = partial(training, "--updates", 2)
    path, state = tmp_path / "trained.safetensors", tmp_path / "trained.safetensors.state"
    with monkeypatch.context() as patch:
        stop(patch, 1)
        training()
    data = state.read_bytes()
    for words in ("--lr 1e-3", "--samples 9", "--clip 1", "--accumulate 3"):
        assert ".state" in refused(training, *words.split())
        assert state.read_bytes() == data and not path.exists()
    state.write_bytes(b"my notes")
    line = refused(training)
    assert str(state) in line and "tinykv-training" in line
    assert state.read_bytes() == b"my notes" and not path.exists()


# ---- eval_ppl.py

def rows_in(out):
    """{(weights, method): {column: text}} of the printed table, without the seconds."""
    head, *lines = cells(out)
    assert head[:2] == ["weights", "method"] and all(len(line) == len(head) for line in lines)
    return {tuple(line[:2]): dict(zip(head[2:-1], line[2:])) for line in lines}


def test_lists_of_quantizers_and_prefixes(evaluating, tmp_path):
    """A model for each quantizer and number of bits, each prefix filled for each; beside fp16 of the model itself.
    Other methods stand on quantized weights, too, and a quantized cache after a prefix."""
    system, out_json = tmp_path / "system.txt", tmp_path / "out.json"
    system.write_text("Balo lives in")
    status, out, _ = evaluating("--method", "rtn,pfn,intactkv", "--weights", "rtn,gptq", "--w-bits", "2,4", "--bits", 3,
                                "--scheme", "token-dynamic", "--prefix", f"bos,{system}", "--calib-windows", 2,
                                "--wide", "--json", out_json)
    rows, names = rows_in(out), ["rtn-2", "rtn-4", "gptq-2", "gptq-4"]
    kinds = ["fp16", "rtn", "pfn", "intactkv prefix=bos", f"intactkv prefix={system}"]
    assert status == 0 and list(rows) == [("-", "fp16"), *((w, m) for w in names for m in kinds)]
    assert all(f"weights {w}: " in out for w in names) and re.search(r"the first 9 tokens of every window", out)
    written = json.loads(out_json.read_text())["rows"]
    assert [(row["weights"], row["label"]) for row in written[1:]] == list(rows)[1:]
    assert len({row["ppl"] for row in written}) == len(rows) and written[4]["settings"]["prefix"] == "bos"
    assert rows["rtn-4", kinds[-1]]["bits"] == "3" and float(rows["rtn-4", kinds[-1]]["true"]) > 3


def test_each_quantizer_has_a_prefix_of_its_own(tokenizer):
    """Its rows are in the scale of one model's values."""
    args = flags.parser().parse_args(["--method", "intactkv", "--prefix", "bos", "--weights", "awq,omniquant"])
    found, _ = build_entries(args, hf.load_config(EMBEDDED), tokenizer)
    one, other = (found[f"intactkv {name}-4"].method for name in ("awq", "omniquant"))
    assert one is not other and one.prefix is not other.prefix and one.prefix.ids == other.prefix.ids
