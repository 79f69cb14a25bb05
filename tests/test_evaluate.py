"""The evaluator against perplexity, KL and recall computed one token at a time in plain Python."""
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tinykv.cache import KVCache
from tinykv.data import Windows
from tinykv.evaluate import FAR, evaluate
from tinykv.methods import METHODS
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


def test_stream_equals_tokens_one_by_one(model, windows):
    """The evaluator's chunks are those whose borders are the method's own."""
    method = METHODS["rtn"](CONFIG, 2, 2, "channel-dynamic", group_size=8)
    found = evaluate(model, {"rtn": method}, windows, "stream", batch=5)["rtn"]
    cache, losses = KVCache(model, method, "stream"), torch.zeros(5)
    with torch.no_grad():
        for t in range(20):
            logp = model(windows.tokens[:, t:t + 1], cache)[:, 0].log_softmax(-1)
            losses -= logp.gather(1, windows.tokens[:, t + 1:t + 2])[:, 0]
    assert found.nll == pytest.approx((losses / 20).tolist(), rel=1e-4)


def test_bits_are_those_of_the_bytes_held(model, windows):
    found = evaluate(model, {"fp16": METHODS["fp16"](CONFIG), "pfn": METHODS["pfn"](CONFIG, 2, 4, "token-dynamic",
                                                                                     preserve=3)}, windows, "paper")
    assert found["fp16"].bits == found["fp16"].bits_far == 16
    assert found["fp16"].cache_bytes == 21 * 2 * 2 * 2 * 8 * 2  # tokens, K and V, layers, KV heads, channels, bytes
    meta = 32 / 8  # a scale and a zero point of 16 bits for each 8 channels
    pinned = 3 * (16 + 32 / (2 * 8))  # rows, and an index of 32 bits for both heads of a layer's K, or V
    assert found["pfn"].bits == pytest.approx((2 + 4) / 2 + meta + pinned / 21)
    assert found["pfn"].bits_far == pytest.approx((2 + 4) / 2 + meta + pinned / FAR)


MEMORY = """
import resource, sys, torch
from tinykv.data import Windows
from tinykv.evaluate import evaluate
from tinykv.methods import METHODS
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


def test_memory_does_not_grow_with_the_number_of_windows():
    root = Path(__file__).parent.parent
    peak = [int(subprocess.run([sys.executable, "-c", MEMORY, str(n)], cwd=root, capture_output=True, text=True,
                               check=True).stdout) for n in (4, 60)]  # KiB
    logits = 256 * 2000 * 4 / 1024  # KiB of one window under one method
    assert peak[1] - peak[0] < 10 * logits  # keeping them would take 2 x 56
