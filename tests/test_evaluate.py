"""The evaluator against perplexity, KL and answers computed one token at a time in plain Python."""
import csv
import json
import math
import sys
from statistics import fmean
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from eval_ppl import compare
from tinykv import UserError, evaluate, hf
from tinykv.cache import KVCache
from tinykv.calibrate import calibrate
from tinykv.evaluate import FAR, Result, add_predictions, measure
from tinykv.lab.data import Windows
from tinykv.lab.differences import delta_error, p_value, paired
from tinykv.lab.run import comparisons, flags
from tinykv.lab.run.entries import build_entries
from tinykv.methods.intactkv import Prefix
from tinykv.methods.registry import METHODS
from tinykv.model import Llama, LlamaConfig

CONFIG = LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, head_dim=8, max_position_embeddings=64)


def random_model(config, seed=0):
    """With weights so large that tokens differ."""
    torch.manual_seed(seed)
    model = Llama(config)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.4) if p.dim() == 2 else None
    return model.eval()


@pytest.fixture(scope="module")
def model():
    return random_model(CONFIG)


@pytest.fixture(scope="module")
def windows():
    tokens = torch.randint(0, 50, (5, 21), generator=torch.Generator().manual_seed(1))
    answers = [[(3, 4)], [(5, 7), (10, 11)], [], [(20, 21)], [(1, 2)]]
    return Windows(tokens, answers)


FP16, RTN = METHODS["fp16"](CONFIG), METHODS["rtn"](CONFIG, 2, 2, "token-dynamic")


def log_probabilities(logits):
    """Plain lists: the log-softmax of a row."""
    top = max(logits)
    total = math.log(sum(math.exp(x - top) for x in logits)) + top
    return [x - total for x in logits]


def figures_by_hand(logits, reference, tokens, answers, start):
    """Of one window: the targets' losses, sum of KL and predictions that agree with fp16's over targets, answers got
    right.

    logits (T, vocab), and fp16's as reference; tokens: a list.
    """
    own, exact = ([log_probabilities(row) for row in rows.double().tolist()] for rows in (logits, reference))
    best, best_exact = ([row.index(max(row)) for row in rows] for rows in (own, exact))
    targets = range(start, len(tokens))
    losses = [-own[t - 1][tokens[t]] for t in targets]
    kl = sum(math.exp(p) * (p - q) for t in targets for p, q in zip(exact[t - 1], own[t - 1]))
    agree = sum(best[t - 1] == best_exact[t - 1] for t in targets)
    return losses, kl, agree, sum(all(best[i - 1] == tokens[i] for i in range(a, b)) for a, b in answers)


def assert_by_hand(result, runs, method, model, windows):
    """The figures of a method, and of the model that it runs on, beside fp16 on `model`: one token at a time."""
    rows = []
    for window, answers in zip(windows.tokens, windows.answers):
        with torch.no_grad():
            exact = model(window[None], KVCache(model, METHODS["fp16"](model.config)))[0]
            own = runs(window[None], KVCache(runs, method, "paper"))[0]
        own = torch.cat([exact[:len(exact) - len(own)], own])  # at a prefix's positions fp16 predicts
        rows.append(figures_by_hand(own, exact, window.tolist(), answers, windows.start))
    losses, kl, agree, right = zip(*rows)
    nll = [fmean(of_window) for of_window in losses]
    for found, of_window in zip(result.nll_along, losses, strict=True):
        parts = [of_window[i:i + evaluate.STRETCH] for i in range(0, len(of_window), evaluate.STRETCH)]
        assert found == pytest.approx([fmean(part) for part in parts], rel=1e-4)
    assert result.nll == pytest.approx(nll, rel=1e-4)
    assert result.ppl == pytest.approx(math.exp(sum(nll) / len(rows)), rel=1e-4)
    assert sum(result.kl) == pytest.approx(sum(kl), rel=1e-3, abs=1e-4)
    assert (result.agree, result.right) == (sum(agree), sum(right))
    n_windows, T = windows.tokens.shape
    assert result.answers == sum(map(len, windows.answers))
    assert result.targets == n_windows * (T - windows.start)


@pytest.mark.parametrize("batch, at_a_time, start", [(1, 20, 1), (2, 3, 4), (5, 20, 1)])
def test_all_figures_against_plain_python(model, windows, monkeypatch, batch, at_a_time, start):
    """However many windows are read, and however many positions are predicted, at a time, and from whichever token."""
    windows = windows.predicted_from(start)
    monkeypatch.setattr("tinykv.evaluate.SLICE", at_a_time)
    monkeypatch.setattr("tinykv.evaluate.STRETCH", 7)
    fp16 = measure(model, FP16, windows, "paper", batch)
    rtn = measure(model, RTN, windows, "paper", batch, fp16)
    assert_by_hand(fp16, model, FP16, model, windows)
    assert_by_hand(rtn, model, RTN, model, windows)
    assert sum(rtn.kl) > 0.1  # the two methods do differ
    assert fp16.exact and not rtn.exact  # memory: predictions are kept of one method


def test_losses_are_of_the_models_own_logits(windows):
    """Whatever the head does to them: a bias, and a cap as Gemma 2's."""
    model = random_model(CONFIG)
    model.lm_head.bias = torch.nn.Parameter(torch.linspace(-3, 3, 50))
    model.lm_head.register_forward_hook(lambda module, args, logits: 2 * torch.tanh(logits / 2))
    fp16 = measure(model, FP16, windows)
    assert_by_hand(fp16, model, FP16, model, windows)
    assert_by_hand(measure(model, RTN, windows, fp16=fp16), model, RTN, model, windows)
    found = measure(model.to(torch.bfloat16), FP16, windows)  # whose head runs in fp32, with all that it has
    assert found.nll == pytest.approx(fp16.nll, abs=0.1)


def test_without_fp16_nothing_is_said_of_its_agreement(model, windows):
    result = measure(model, METHODS["kivi"](model.config), windows)
    assert (result.kl, result.agree) == ([], None) and len(result.nll) == len(windows.tokens)


def test_logits_that_are_not_finite_are_told(windows):
    """Also where those of the text's own tokens are."""
    model = random_model(CONFIG)
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(50))
    model.lm_head.bias.data[min(set(range(50)) - set(windows.tokens.flatten().tolist()))] = -math.inf
    with pytest.raises(UserError, match="logits are not finite"):
        measure(model, FP16, windows)


def test_an_answer_is_right_if_all_of_its_tokens_are():
    """States that are logits already: 1, 2 and 3 are the most likely ones where they come, and 4 is not."""
    model = SimpleNamespace(lm_head=torch.nn.Linear(5, 5, bias=False))
    model.lm_head.weight.data = torch.eye(5)
    hidden, result = torch.eye(5)[[1, 2, 3, 0, 0]][None], Result()  # (1, T, vocab)
    add_predictions(result, model, hidden, None, torch.arange(5)[None], [[(1, 3), (3, 5), (4, 5)]])
    assert (result.right, result.answers) == (1, 3)


def kivi(recent=4, v_block=None):
    return METHODS["kivi"](CONFIG, 4, 2, group_size=8, recent=recent, v_block=v_block)


@pytest.mark.parametrize("method, protocol, prompt, sizes", [
    (METHODS["rtn"](CONFIG, 2, 2, "channel-dynamic", group_size=8), "stream", None, [8, 8, 5]),
    (kivi(), "stream", None, [12, 8, 1]),
    (kivi(v_block=6), "stream", None, [10, 2, 4, 4, 1]),  # keys at 12 and 20, values at 10 and 16
    (kivi(v_block=1), "stream", None, [5, *[1] * 16]),
    (kivi(v_block=16), "stream", None, [12, 8, 1]),
    (kivi(recent=13), "stream", None, [21]),
    (kivi(recent=12), "stream", None, [20, 1]),
    (METHODS["fp16"](CONFIG), "stream", None, [21]),
    (kivi(v_block=1), "paper", None, [21]),
    # a block of 8 is full when 3 + 8 tokens are: after the prompt, of which `paper` quantizes a group, or of the text
    (kivi(recent=3), "paper", 10, [10, 9, 8, 8, 5]),
    (kivi(recent=3), "stream", 10, [10, 1, 8, 8, 8, 5]),
    # the first chunk holds a prefix, which is longer than two blocks
    (METHODS["intactkv"](CONFIG, Prefix("twenty", [3] * 20, *torch.zeros(2, 2, 2, 20, 8)), 2, 2, "channel-dynamic", 8),
     "stream", None, [24, 8, 8]),
])
def test_a_stream_comes_in_chunks_that_end_where_blocks_do(model, method, protocol, prompt, sizes):
    found, windows = [], Windows(torch.full((1, sum(sizes)), 3), [[]]).predicted_from(prompt or 1)

    class Noting(KVCache):
        def expect(self, tokens):
            found.append(tokens.shape[1])
            return super().expect(tokens)
    measure(model, method, windows, protocol, fp16=measure(model, FP16, windows), cache_class=Noting, prompt=prompt)
    assert found == sizes


MEAN = sum(range(4, 12)) / 8  # from 4 to 11 recent tokens


@pytest.mark.parametrize("method, protocol, prompt, k, v", [
    # bits of what is quantized, a scale and a zero point counted, and how many tokens are recent
    (kivi(v_block=1), "stream", None, (8, MEAN), (6, 4)),  # 16 of the 21 keys are quantized, and 17 of the values
    (kivi(), "stream", None, (8, MEAN), (6, MEAN)), (kivi(), "stream", 8, (8, MEAN), (6, MEAN)),
    (kivi(), "paper", 8, (8, MEAN), (6, MEAN)),
    # the keys' group is longer than the text: 16 bits at 128K, too
    (METHODS["kivi"](CONFIG, 2, 2, group_size=32, recent=4, v_block=8), "stream", None, (16, 0), (6, MEAN))])
@pytest.mark.parametrize("batch", [1, 5])
def test_the_recent_part_counts_at_its_mean(model, windows, method, protocol, prompt, k, v, batch):
    """Keys and values may be quantized up to different tokens."""
    found = measure(model, method, windows.predicted_from(prompt or 1), protocol, batch, prompt=prompt)
    for length, bits in ((21, found.bits[0]), (FAR, found.bits_far[0])):
        of_keys, of_values = ((coded * (length - recent) + 16 * recent) / length for coded, recent in (k, v))
        assert bits == pytest.approx((of_keys + of_values) / 2)


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_bits_are_those_of_the_bytes_held(model, windows, batch):
    pfn = METHODS["pfn"](CONFIG, k_bits=2, v_bits=4, scheme="token-dynamic", preserve=3)
    exact, found = (measure(model, method, windows, batch=batch) for method in (FP16, pfn))
    assert set(exact.bits) == set(exact.bits_far) == {16}
    assert exact.cache_bytes == 21 * 2 * 2 * 2 * 8 * 2  # tokens, K and V, layers, KV heads, channels, bytes
    meta = 32 / 8  # a scale and a zero point of 16 bits for each 8 channels
    kept = 3 * (16 + 32 / (2 * 8))  # rows, and an index of 32 bits for both heads of a layer's K, or V
    assert found.bits[0] == pytest.approx((2 + 4) / 2 + meta + kept / 21)
    assert found.bits_far[0] == pytest.approx((2 + 4) / 2 + meta + kept / FAR)


def anchored(model, **settings):
    """AnTKV, with codes of a bit for four channels."""
    method = METHODS["antkv"](CONFIG, vq="d4m2", **settings)
    calibrate(model, method, torch.randint(50, (4, 40), generator=torch.Generator().manual_seed(1)))
    return method


@pytest.mark.parametrize("choose, grown", [("prompt", 0), ("always", 1)])
def test_a_share_chosen_once_does_not_grow_with_the_text(model, choose, grown):
    """A quarter of the tokens is kept: of a prompt of 16 four, of a long text a quarter only if it is chosen on."""
    method = anchored(model, anchors="25%", recent=0, block=8, choose=choose)
    windows = Windows(torch.randint(50, (1, 24), generator=torch.Generator().manual_seed(2)), [[]], 16)
    found = measure(model, method, windows, "stream", prompt=16)
    codes, row = 8 / 16, 2 * (16 + (32 + 32) / 8)  # bits a number: one byte a token; rows, positions and scores of both
    recent = 7 / 2 * 16 / FAR
    assert found.bits_far[0] == pytest.approx(codes + recent + grown * row / 2 / 4, abs=2e-3)


def test_where_the_recent_part_is_at_its_mean_all_that_is_held_counts(model):
    """Of 20 tokens 6 are recent, between 3 and 9. Each has a score in every head, as anchors have."""
    method = anchored(model, anchors=2, recent=3, block=7, choose="always")
    windows = Windows(torch.randint(50, (1, 20), generator=torch.Generator().manual_seed(2)), [[]])
    found = measure(model, method, windows, "stream")
    numbers = 2 * 2 * 2 * 8 * 20  # K and V of 2 layers, 2 heads of 8 channels
    assert found.bits[0] == pytest.approx(8 * found.cache_bytes / numbers)


# ---- differences, paired over windows and draws

@pytest.mark.parametrize("n", [16, 64])
@pytest.mark.parametrize("shift", [0.01, 0.5])
def test_the_error_of_delta_is_that_of_a_bootstrap(shift, n):
    """Of 10,000 draws of windows, in each of which both perplexities are computed anew."""
    rng = torch.Generator().manual_seed(0)
    exact = 2 + 0.5 * torch.randn(1, n, generator=rng, dtype=torch.float64)
    other = exact + shift + 0.02 * torch.randn(1, n, generator=rng, dtype=torch.float64)
    fp16, method = exact.tolist(), other.tolist()
    draws = torch.randint(n, (10_000, n), generator=torch.Generator().manual_seed(1))
    a, b = (torch.tensor(losses[0], dtype=torch.float64)[draws].mean(1).exp() for losses in (method, fp16))
    expected = (a - b).std().item() * math.sqrt(n / (n - 1))  # a bootstrap divides by n
    assert delta_error(method, fp16) == pytest.approx(expected, rel=0.1)
    assert delta_error(fp16, fp16) == 0
    assert delta_error([[2.0]], [[2.0]]) is None
    # a method that is measured once has the same error, however often its row is repeated
    assert delta_error(method * 3, fp16 * 3) == pytest.approx(delta_error(method, fp16))


def test_pairs_that_differ_alike_or_are_few():
    assert paired([[2.0, 3.0]], [[1.0, 2.0]]) == (1.0, 0.0, math.inf, 0.0, 0)
    assert paired([[1.0, 2.0]], [[2.0, 3.0]]) == (-1.0, 0.0, -math.inf, 0.0, 2)
    assert paired([[1.0]], [[2.0]]) == (-1.0, None, None, None, 1)
    assert paired([[1.0], [1.0]], [[2.0], [4.0]])[1] is None
    assert paired([[1.0, 2.0]], [[1.0, 2.0]]) == (0.0, 0.0, 0.0, pytest.approx(1), 0)
    for other in ([[1.0]], [[1.0, math.nan]], [[1.0, 2.0], [1.0, 2.0]]):
        with pytest.raises(UserError, match="no pairs"):
            paired([[1.0, 2.0]], other)


def crossed(D):
    """Mean squares of draws, of windows and of the rest of D (C, W), and their degrees of freedom."""
    C, W = D.shape
    draws, windows = D.mean(1) - D.mean(), D.mean(0) - D.mean()  # (C), (W)
    rest = D - D.mean() - draws[:, None] - windows  # (C, W)
    sums = W * np.sum(draws ** 2), C * np.sum(windows ** 2), np.sum(rest ** 2)
    df_draws = max(1, C - 1)  # the sums of one draw are zero
    df = df_draws, W - 1, df_draws * (W - 1)
    return [x / n for x, n in zip(sums, df)], df


@pytest.mark.parametrize("C, W", [(2, 2), (3, 16), (5, 4), (1, 16)])
@pytest.mark.parametrize("of_draws, of_windows", [(2.0, 3.0), (0.0, 3.0), (2.0, 0.0), (0.0, 0.0)])
def test_the_error_over_draws_and_windows_is_that_of_crossed_effects(C, W, of_draws, of_windows):
    negative = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        D = of_draws * rng.normal(size=(C, 1)) + of_windows * rng.normal(size=W) + 0.1 * rng.normal(size=(C, W))
        squares, freedom = crossed(D)
        ms_draws, ms_windows, ms_rest = squares
        square = (ms_draws + ms_windows - ms_rest) / (C * W)
        if min(ms_draws, ms_windows) < ms_rest:  # a variance below zero is none
            negative += 1
            square = max(ms_draws, ms_windows, ms_rest) / (C * W)
        other = rng.normal(size=(C, W))
        difference, error, t, p, better = paired((D + other).tolist(), other.tolist())
        assert error == pytest.approx(math.sqrt(square)) and t == pytest.approx(difference / error)
        assert difference == pytest.approx(D.mean()) and better == (D < 0).sum()
        total = max(ms_draws, ms_rest) + max(ms_windows, ms_rest) - ms_rest  # Satterthwaite's degrees of freedom
        df = max(1, total ** 2 / sum(x ** 2 / n for x, n in zip(squares, freedom)))
        assert 0 <= p <= 1 and p == pytest.approx(p_value(t, df))
    assert C == 1 or (negative < 5 if of_draws and of_windows else negative > 0)


@pytest.mark.parametrize("df", [1, 2, 3, 4, 5.5, 8, 15, 30.1, 120])
def test_p_is_that_of_students_t(df):
    """Which is 1 less the density's integral from -t to t, here by many small steps."""
    scale = math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(df * math.pi)
    for t in (0, 0.3, 1, 2.5, 12.706):
        x = (np.arange(20_000) + 0.5) * t / 20_000
        expected = 1 - 2 * t * scale * ((1 + x ** 2 / df) ** (-(df + 1) / 2)).mean()
        assert p_value(t, df) == p_value(-t, df) == pytest.approx(expected, rel=1e-4, abs=1e-9)
    assert p_value(math.inf, df) == 0 and p_value(1000, 1) == pytest.approx(2 / math.pi * math.atan(1 / 1000))


@pytest.mark.parametrize("title, name, other", [
    ("pfn preserve=5 bits=2", "rtn", "rtn bits=2"), ("pfn preserve=5 bits=3", "rtn", "rtn"),
    ("pfn bits=2", "kvsink", None), ("pfn", "rtn bits=2", "rtn bits=2"),
    ("pfn block=8 rope=pre scheme=token-dynamic", "kivi", "kivi block=8 rope=pre")])
def test_a_row_is_compared_with_the_one_that_shares_most_settings_and_has_no_other(title, name, other):
    titles = ["fp16", "rtn", "rtn bits=2", "rtn bits=4", "kvsink preserve=5 bits=2",
              "kivi scheme=token-dynamic", "kivi block=8 rope=pre", title]
    assert comparisons.compared_with(title, name, titles) == other


# ---- for Python and notebooks

SMALL = {"windows": 1, "context": 64, "calib_windows": 1}
CELL = """
from tinykv.methods.base import CodecMethod, first_tokens

class Seven(CodecMethod):
    def keep_keys(self, layer_cache, n):
        return first_tokens(layer_cache, 7)
"""


def test_compare_takes_a_class_of_a_cell_a_method_and_a_loaded_model(monkeypatch, one_layer):
    """The rows are what a DataFrame and a CSV file take."""
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)  # a notebook is no file
    exec(compile(CELL, "<cell>", "exec"), cell := {"__name__": "__main__"})
    model, tokenizer = hf.load(one_layer)
    mine = METHODS["rtn"](model.config, scheme="token-dynamic")
    mine.name = "mine"
    table = compare(["rtn", mine, cell["Seven"]], model=(model, tokenizer), scheme="token-dynamic", **SMALL)
    assert [row["label"] for row in table] == ["fp16", "rtn", "mine", "Seven"]
    assert table[1]["ppl"] == table[2]["ppl"] != table[3]["ppl"]
    assert repr(table).splitlines()[-2].startswith("Seven ")  # the last line is about the text
    assert all(row.keys() == table[0].keys() and not row["fault"] for row in table)


def test_compare_returns_the_rows_of_the_command(one_layer, tmp_path):
    """And is shown as the command prints it; fp16 comes first, and a list is a list."""
    path = tmp_path / "rows.json"
    table = compare("pfn", one_layer, bits=3, preserve=[1, 2], plot=None, json=path, **SMALL)
    assert table == json.loads(path.read_text())["rows"]
    assert [row["label"] for row in table] == ["fp16", "rtn", "pfn preserve=1", "pfn preserve=2"]
    assert {row["k_bits"] for row in table} == {16, 3}
    lines = repr(table).splitlines()
    assert lines[-6].split()[:3] == ["method", "scheme", "keep"] and lines[-2].startswith("pfn preserve=2 ")
    assert comparisons.perplexity(table).axes[0].get_xlabel() == "tokens kept in full precision"


def test_a_table_has_paired_differences_for_a_paper(one_layer, tmp_path):
    """In nats, of fp16 and of the row that `vs` names: in the JSON, as LaTeX, and as CSV."""
    path = tmp_path / "rows.json"
    table = compare("pfn", one_layer, scheme="token-dynamic", preserve=[1, 2], vs="rtn", json=path,
                    **SMALL | {"windows": 2})
    fp16, rtn, one, two = table
    assert (fp16["nats"], fp16["nats_se"]) == (0, 0)
    assert [one["nats"], one["nats_se"]] == list(paired(one["window_nll"], fp16["window_nll"])[:2])
    of_fp16, of_one, of_two = json.loads(path.read_text())["vs"]
    assert [of_one[name] for name in ("nats", "se", "t", "p", "better")] == list(
        paired(one["window_nll"], rtn["window_nll"]))
    assert of_two["label"] == "pfn preserve=2" and of_two["vs"] == "rtn" and of_two["losses"] == 2
    assert table.vs() == [of_fp16, of_one, of_two]
    assert table.to_latex().splitlines()[3] == rf"fp16 & 16.00 & {fp16['ppl']:.3f} & $0.000 \pm 0.000$ \\"
    table.to_csv(tmp_path / "rows.csv")
    with open(tmp_path / "rows.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["nats"]) for row in rows] == [row["nats"] for row in table]


class Typed(METHODS["fp16"]):
    name = "typed"

    def __init__(self, config, first=False, share: float = None, words: "str | None" = None, block: int = 3, what=None):
        super().__init__(config)
        self.block = block
        self.given = [first, share, words, block, what]


@pytest.mark.parametrize("given, found", [
    ({}, [False, None, None, 3, None]), ({"first": True}, [True, None, None, 3, None]),
    ({"first": "true"}, [True, None, None, 3, None]), ({"first": "False"}, [False, None, None, 3, None]),
    ({"share": 1}, [False, 1.0, None, 3, None]), ({"words": "2", "block": 4}, [False, None, "2", 4, None]),
    ({"what": 0.5}, [False, None, None, 3, 0.5]), ({"what": (max,)}, [False, None, None, 3, max])])
def test_a_setting_has_the_type_of_its_annotation_or_default(given, found):
    """From Python, which hands objects on as they are, and from a command line, where all are texts."""
    ways = [flags.parse(methods=[Typed], given=given)]
    if "what" not in given:
        ways.append(flags.parse([f"--{name}={value}" for name, value in given.items()], [Typed]))
    for args in ways:
        seen = build_entries(args, CONFIG, None)[0]["typed"].method.given
        assert seen == found and list(map(type, seen)) == list(map(type, found))


def test_compare_reads_an_edited_file_anew(tmp_path):
    path = tmp_path / "mine.py"
    for name in ("first", "second"):
        path.write_text(f"from tinykv.methods.fp16 import FP16\n\nclass Mine(FP16):\n    name = '{name}'\n")
        assert name in build_entries(flags.parse(methods=f"{path}:Mine", given={}), CONFIG, None)[0]
