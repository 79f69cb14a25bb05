"""The evaluator against perplexity, KL and recall computed one token at a time in plain Python."""
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tinykv import UserError
from tinykv.analysis import figures
from tinykv.cache import KVCache
from tinykv.data import Windows
from tinykv.evaluate import FAR, compare, evaluate
from tinykv.methods.registry import METHODS
from tinykv.model import Llama, LlamaConfig

CONFIG = LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, head_dim=8, max_position_embeddings=64)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = Llama(CONFIG)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.4) if p.dim() == 2 else None
    return model.eval()


@pytest.fixture(scope="module")
def windows():
    tokens = torch.randint(0, 50, (5, 21), generator=torch.Generator().manual_seed(1))
    answers = [[(3, 4)], [(5, 7), (10, 11)], [], [(20, 21)], [(1, 2)]]
    return Windows(tokens, answers, "random")


def methods(protocol_scheme="token-dynamic"):
    return {"fp16": METHODS["fp16"](CONFIG), "rtn": METHODS["rtn"](CONFIG, 2, 2, protocol_scheme)}


def log_probabilities(logits):
    """Plain lists: the log-softmax of a row."""
    top = max(logits)
    total = math.log(sum(math.exp(x - top) for x in logits)) + top
    return [x - total for x in logits]


def by_hand(model, method, windows, protocol):
    """Per window, per target: the log-probabilities of every token."""
    rows = []
    for window in windows.tokens:
        with torch.no_grad():
            logits = model(window[None], KVCache(model, method, protocol))[0]
        rows.append([log_probabilities(row) for row in logits[:-1].double().tolist()])
    return rows


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_all_figures_against_plain_python(model, windows, batch):
    found = evaluate(model, methods(), windows, "paper", batch)
    truth = {name: by_hand(model, m, windows, "paper") for name, m in methods().items()}
    tokens = windows.tokens.tolist()
    for name, result in found.items():
        losses, kl, agree, right = [], 0.0, 0, 0
        for w, rows in enumerate(truth[name]):
            losses.append(-sum(row[tokens[w][t + 1]] for t, row in enumerate(rows)) / len(rows))
            best = [max(range(50), key=row.__getitem__) for row in rows]
            for t, (p, q) in enumerate(zip(truth["fp16"][w], rows)):
                kl += sum(math.exp(a) * (a - b) for a, b in zip(p, q))
                agree += best[t] == max(range(50), key=p.__getitem__)
            right += sum(all(best[i - 1] == tokens[w][i] for i in range(a, b)) for a, b in windows.answers[w])
        mean = sum(losses) / 5
        spread = math.sqrt(sum((x - mean) ** 2 for x in losses) / 4 / 5)
        assert result.ppl == pytest.approx(math.exp(mean), rel=1e-4)
        assert result.ppl_se == pytest.approx(math.exp(mean) * spread, rel=1e-3)
        assert result.kl == pytest.approx(kl, rel=1e-3, abs=1e-4)
        assert (result.agree, result.right, result.answers) == (agree, right, 5)
        assert result.targets == 5 * 20 and result.tokens == 5 * 21
    assert found["rtn"].kl > 0.1  # the two methods do differ


def test_slices_of_the_vocabulary_change_nothing(model, windows, monkeypatch):
    whole = evaluate(model, methods(), windows, "paper")
    monkeypatch.setattr("tinykv.evaluate.SLICE", 3 * 50)  # three positions at a time
    sliced = evaluate(model, methods(), windows, "paper")
    for name in whole:
        assert sliced[name].nll == pytest.approx(whole[name].nll, rel=1e-5)
        assert sliced[name].right == whole[name].right


def test_text_without_answers_has_no_recall(model, windows):
    result = evaluate(model, methods(), Windows(windows.tokens, [[]] * 5, "x"), "paper")["rtn"]
    assert result.recall is None


def kivi(recent=4, v_block=None):
    return METHODS["kivi"](CONFIG, 4, 2, group_size=8, recent=recent, v_block=v_block)


@pytest.mark.parametrize("method", [
    METHODS["rtn"](CONFIG, 2, 2, "channel-dynamic", group_size=8), kivi(), kivi(v_block=1), kivi(v_block=6), kivi(0),
    METHODS["ott"](CONFIG, 2, 2, group_size=8, recent=3, outlier_num=2, extra_pool=2, skip_layers=1),
    METHODS["skvq"](CONFIG, 2, 2, recent=3, block=5, reorder="off", clip="none"),
], ids=["rtn", "kivi", "kivi v_block 1", "kivi v_block 6", "kivi recent 0", "ott", "skvq"])
def test_stream_equals_tokens_one_by_one(model, windows, method):
    """The evaluator's chunks are those whose borders are the method's own."""
    found = evaluate(model, {"only": method}, windows, "stream", batch=5)["only"]
    cache, losses = KVCache(model, method, "stream"), torch.zeros(5)
    with torch.no_grad():
        for t in range(20):
            logp = model(windows.tokens[:, t:t + 1], cache)[:, 0].log_softmax(-1)
            losses -= logp.gather(1, windows.tokens[:, t + 1:t + 2])[:, 0]
    assert found.nll == pytest.approx((losses / 20).tolist(), rel=1e-4)


@pytest.mark.parametrize("method, protocol, sizes", [
    (METHODS["rtn"](CONFIG, 2, 2, "channel-dynamic", group_size=8), "stream", [8, 8, 5]),
    (kivi(), "stream", [12, 8, 1]),
    (kivi(v_block=6), "stream", [10, 2, 4, 4, 1]),  # keys at 12 and 20, values at 10 and 16
    (kivi(v_block=1), "stream", [5, *[1] * 16]),
    (kivi(v_block=16), "stream", [12, 8, 1]),
    (kivi(recent=13), "stream", [21]),
    (kivi(recent=12), "stream", [20, 1]),
    (METHODS["fp16"](CONFIG), "stream", [21]),
    (kivi(v_block=1), "paper", [21]),
])
def test_a_stream_comes_in_chunks_that_end_where_blocks_do(model, windows, monkeypatch, method, protocol, sizes):
    chunks, outputs, forward = [], [], model.forward

    def recorded(tokens, cache, logits):
        chunks.append(tokens)
        outputs.append(forward(tokens, cache, logits))
        return outputs[-1]

    monkeypatch.setattr(model, "forward", recorded)
    evaluate(model, {"only": method}, windows, protocol, batch=5)
    assert [c.shape[1] for c in chunks] == sizes and torch.equal(torch.cat(chunks, 1), windows.tokens)
    assert torch.cat(outputs, 1).shape == (5, 21, 32)


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_keys_and_values_may_be_quantized_up_to_different_tokens(model, windows, batch):
    """kivi that quantizes a value each step: 16 of the 21 keys are quantized, two groups of 8, and 17 of the values."""
    found = evaluate(model, {"kivi": kivi(recent=4, v_block=1)}, windows, "stream", batch)["kivi"]
    layers, heads, d, full, metadata = 2, 2, 8, 2, 4  # 2 bytes a number; a scale and a zero point of 2 bytes each
    k_coded = 16 * heads * d * 4 / 8 + 16 / 8 * heads * d * metadata  # bytes of a layer
    v_coded = 17 * heads * d * 2 / 8 + 17 * heads * metadata
    k_recent, v_recent = 5 * heads * d * full, 4 * heads * d * full
    assert found.cache_bytes == layers * (k_coded + v_coded + k_recent + v_recent)
    k_bits, v_bits = 8 * k_coded / (16 * heads * d), 8 * v_coded / (17 * heads * d)
    assert (k_bits, v_bits) == (8, 6)
    # the recent part at its mean: of keys 4 to 11 tokens, of values always 4
    k_mean, v_mean = sum(range(4, 12)) / 8, 4
    for length, bits in ((21, found.bits), (FAR, found.bits_far)):
        of_keys = (k_bits * (length - k_mean) + 16 * k_mean) / length
        of_values = (v_bits * (length - v_mean) + 16 * v_mean) / length
        assert bits == pytest.approx((of_keys + of_values) / 2)


def test_where_nothing_is_quantized_there_are_sixteen_bits_at_128k_too(model, windows):
    """Keys all in full precision, values quantized: the keys' group is longer than the text."""
    found = evaluate(model, {"kivi": METHODS["kivi"](CONFIG, 2, 2, group_size=32, recent=4, v_block=8)}, windows,
                     "stream")["kivi"]
    mean = sum(range(4, 12)) / 8  # values: 4 to 11 recent tokens
    assert found.bits == pytest.approx((16 + (6 * (21 - mean) + 16 * mean) / 21) / 2)
    assert found.bits_far == pytest.approx((16 + (6 * (FAR - mean) + 16 * mean) / FAR) / 2)


def test_bits_are_those_of_the_bytes_held(model, windows):
    pfn = METHODS["pfn"](CONFIG, k_bits=2, v_bits=4, scheme="token-dynamic", preserve=3)
    found = evaluate(model, {"fp16": METHODS["fp16"](CONFIG), "pfn": pfn}, windows, "paper")
    assert found["fp16"].bits == found["fp16"].bits_far == 16
    assert found["fp16"].cache_bytes == 21 * 2 * 2 * 2 * 8 * 2  # tokens, K and V, layers, KV heads, channels, bytes
    meta = 32 / 8  # a scale and a zero point of 16 bits for each 8 channels
    kept = 3 * (16 + 32 / (2 * 8))  # rows, and an index of 32 bits for both heads of a layer's K, or V
    assert found["pfn"].bits == pytest.approx((2 + 4) / 2 + meta + kept / 21)
    assert found["pfn"].bits_far == pytest.approx((2 + 4) / 2 + meta + kept / FAR)


@pytest.mark.parametrize("name, settings, protocol", [
    ("rtn", {"scheme": "token-dynamic"}, "stream"), ("kivi", {"group_size": 8, "recent": 3}, "stream"),
    ("fp16", {}, "stream"), ("rtn", {"scheme": "token-dynamic"}, "paper")])
def test_no_length_flatters_a_method(model, name, settings, protocol):
    """True bits times length grow by the same at every further token, whatever is recent at that length."""
    method, costs = METHODS[name](CONFIG, **settings), []
    method.block = 8
    for T in range(16, 40):
        windows = Windows(torch.randint(50, (2, T), generator=torch.Generator().manual_seed(T)), [[], []], "random")
        costs.append(T * evaluate(model, {"only": method}, windows, protocol)["only"].bits)
    steps = [after - before for before, after in zip(costs, costs[1:])]
    bits = 16 if name == "fp16" else 2 + 4  # of a scale and a zero point in each 8 numbers, 4 a number
    assert steps == pytest.approx([bits] * len(steps))


MEMORY = """
import resource, sys, torch
from tinykv.data import Windows
from tinykv.evaluate import evaluate
from tinykv.methods.registry import METHODS
from tinykv.model import Llama, LlamaConfig
torch.set_num_threads(1)
config = LlamaConfig(2000, 32, 48, 2, 4, 2, 8, 256)
model = Llama(config)
W = int(sys.argv[1])
windows = Windows(torch.randint(0, 2000, (W, 256)), [[]] * W, "x")
rtn = METHODS["rtn"](config, 2, 2, "token-dynamic")
evaluate(model, {"fp16": METHODS["fp16"](config), "rtn": rtn}, windows, "paper")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.whole  # two processes
def test_memory_does_not_grow_with_the_number_of_windows():
    root = Path(__file__).parent.parent
    peak = [int(subprocess.run([sys.executable, "-c", MEMORY, str(n)], cwd=root, capture_output=True, text=True,
                               check=True).stdout) for n in (4, 60)]  # KiB
    logits = 256 * 2000 * 4 / 1024  # KiB of one window under one method
    assert peak[1] - peak[0] < 10 * logits  # keeping them would take 2 x 56


# For Python and notebooks

def test_compare_returns_the_rows_of_the_command(tmp_path):
    """And is shown as the command prints it; fp16 comes first, and a list is a list."""
    path = tmp_path / "rows.json"
    table = compare("pfn", bits=3, preserve=[1, 2], windows=1, context=128, calib_windows=1, plot=None, json=path)
    assert table == json.loads(path.read_text())["rows"]
    assert [row["label"] for row in table] == ["fp16", "rtn", "pfn preserve=1", "pfn preserve=2"]
    assert {row["k_bits"] for row in table} == {16, 3}
    lines = repr(table).splitlines()
    assert lines[-5].split()[:3] == ["method", "scheme", "keep"] and lines[-1].startswith("pfn preserve=2 ")
    assert figures.perplexity(table).axes[0].get_xlabel() == "tokens kept in full precision"


@pytest.mark.parametrize("flags, said", [({"bitz": 2}, "--bitz"), ({"bits": "x"}, "'x' is no number"),
                                         ({"windows": 0}, "--windows must be at least 1")])
def test_compare_refuses_what_the_command_refuses(flags, said):
    with pytest.raises(UserError, match=said) as caught:
        compare("pfn", **flags)
    assert "\n" not in str(caught.value)


def test_compare_reads_an_edited_file_anew(tmp_path):
    path = tmp_path / "mine.py"
    labels = []
    for kept in (1, 2):
        path.write_text("from tinykv.methods.pfn import PFN\n\nclass Mine(PFN):\n"
                        f"    def __init__(self, config, preserve={kept}):\n"
                        "        super().__init__(config, preserve)\n")
        table = compare(f"{path}:Mine", windows=1, context=64, calib_windows=1)
        labels.append(table[-1]["preserve"])
    assert labels == [1, 2]
