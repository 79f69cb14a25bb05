"""A text with a prompt: what KVSink and AnTKV keep, and when tokens are quantized, against plain lists.

The lists know no tensors: a token is exact, or it is read as its codes (oracles.py).
"""
import math

import numpy as np
import oracles
import pytest
import torch
from planted import Still
from test_evaluate import random_model

from tinykv.cache import PROTOCOLS, KVCache
from tinykv.codecs.affine import Affine
from tinykv.codecs.base import Pair
from tinykv.data import Windows
from tinykv.evaluate import measure
from tinykv.methods.intactkv import Prefix
from tinykv.methods.registry import METHODS
from tinykv.model import LlamaConfig

T, D, H, HKV, WIDTH, L = 40, 12, 2, 1, 4, 3
CONFIG = LlamaConfig(29, D, 24, L, H, HKV, WIDTH, 128)
BLOCK, EMERGENCE, CHANNEL = 4, 0, 5


class Rows:
    """An object with a model's config and rope: its keys, values and hidden states are ours."""
    config, rope = CONFIG, Still()


def numbers(seed):
    """q (H, T, d), k and v (T, d), hidden (T, D), the same in every layer; some tokens stand out."""
    rng = torch.Generator().manual_seed(seed)
    q = torch.randn(H, T, WIDTH, generator=rng)
    k, v = torch.randn(2, T, WIDTH, generator=rng)
    hidden = torch.randn(T, D, generator=rng)
    for t in (0, 9, 17, 30):
        k[t] *= 4
        hidden[t, CHANNEL] = 50 + t
    return q, k, v, hidden


def read_by_cache(method, protocol, prompt, sizes, seed):
    """What attention sees in the last layer after each chunk: [(keys, values)], lists by token and channel."""
    q, k, v, hidden = numbers(seed)
    cache, start, seen = KVCache(Rows, method, protocol, prompt), 0, []
    for n in sizes:
        new = slice(start, start + n)
        for layer in range(L):
            K, V = cache.update(layer, q[None, :, new], k[None, None, new], v[None, None, new], start)
            cache.observe(layer, hidden[None, new])
        seen.append((K[0, 0].tolist(), V[0, 0].tolist()))
        start += n
    return seen, cache


# The same in lists

def in_16_bits(rows):
    return oracles.float16(rows.numpy()).tolist()


def coded(row):
    row = np.array(row, dtype=np.float32)
    return oracles.affine_group(row, row.min(), row.max(), oracles.max_code(2), "offset").tolist()


def largest(scores, positions, k):
    return set(sorted(positions, key=lambda t: (-scores[t], t))[:k])


def read_by_lists(rows, scores, protocol, prompt, sizes, recent, block, k, choose):
    """[rows as attention sees them] after each chunk. scores: by token, of what is kept; k: a number of tokens."""
    rows = in_16_bits(rows)
    n_coded, kept, length, out = 0, set(), 0, []
    for n in sizes:
        before = n_coded, kept
        length += n
        in_prompt = length <= prompt
        if protocol == "paper" and in_prompt:
            n_coded = length
        else:
            while length - n_coded - recent >= block:
                n_coded += block
        if in_prompt and choose == "prompt":
            kept = largest(scores, range(length), k)
        elif choose == "always" and n_coded > before[0]:
            kept = largest(scores, range(length), k)
        border, exact = (n_coded, kept) if protocol == "paper" and in_prompt else before
        out.append([row if t >= border or t in exact else coded(row) for t, row in enumerate(rows[:length])])
    return out


# KVSink

@pytest.mark.one_in(5)
@pytest.mark.parametrize("choose", ["prompt", "always"])
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("prompt", [3, 16, 20])
@pytest.mark.parametrize("block", [1, BLOCK])
def test_algorithm_1_and_decoding_after_it(protocol, prompt, choose, block):
    """Sinks 17 and 30 come after a prompt of 16 tokens: S has them only where it goes on being chosen."""
    k, sizes = 2, [prompt] + [1] * (T - prompt)
    method = METHODS["kvsink"](CONFIG, k, choose, EMERGENCE, CHANNEL, scheme="token-dynamic", block=block)
    seen, cache = read_by_cache(method, protocol, prompt, sizes, 1)
    _, keys, values, hidden = numbers(1)
    sizes_of_outlier = hidden[:, CHANNEL].abs().tolist()
    for i, rows in enumerate((keys, values)):
        expected = read_by_lists(rows, sizes_of_outlier, protocol, prompt, sizes, 0, block, k, choose)
        assert [both[i] for both in seen] == expected
    sinks = set(cache.shared.sinks[0].tolist())
    assert sinks == ({17, 30} if choose == "always" else largest(sizes_of_outlier, range(prompt), k))
    assert cache.layers[EMERGENCE].keys.kept_positions is None  # it has stored its keys before S is known


# AnTKV

@pytest.mark.one_in(3)
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("prompt, recent, block", [(3, 8, 1), (20, 8, 1), (20, 8, BLOCK), (20, 0, BLOCK), (9, 32, 1)])
def test_anchors_from_the_prefill_alone(protocol, prompt, recent, block):
    """Among all tokens of the prompt, of keys and of values; later tokens have the window alone."""
    method = METHODS["antkv"](CONFIG, vq="d2m4", anchors="15%", recent=recent, block=block)
    method.codecs = [Pair(Affine(2, WIDTH), Affine(2, WIDTH))] * L  # codes that can be computed by hand
    sizes, share = [prompt] + [1] * (T - prompt), 0.15
    seen, cache = read_by_cache(method, protocol, prompt, sizes, 2)
    q, keys, values, _ = numbers(2)
    exact = np.array(in_16_bits(keys[:prompt]))  # (prompt, d)
    scores = oracles.equation_5(q[None, :, :prompt].double().numpy(), exact[None, None])  # of keys, of values
    for i, rows in enumerate((keys, values)):
        padded = scores[i][0, 0].tolist() + [-1.0] * (T - prompt)
        expected = read_by_lists(rows, padded, protocol, prompt, sizes, recent, block,
                                 math.ceil(share * prompt), "prompt")
        assert [both[i] for both in seen] == expected
    for layer in cache.layers:  # no score is held any more
        assert layer.keys.recent_scores is layer.values.kept_scores is None


def test_a_group_that_is_not_full_waits_for_the_tokens_after_the_prompt():
    """Four keys, or values, share a scale; the others wait with them."""
    for turned in (False, True):
        method = METHODS["kivi"](CONFIG, group_size=4, recent=0)
        if turned:
            method.codecs = [Pair(k=pair.v, v=pair.k) for pair in method.codecs]
        _, cache = read_by_cache(method, "paper", 7, [7], 1)
        assert [(layer.keys.n_coded, layer.values.n_coded) for layer in cache.layers] == [(4, 4)] * L


# The order in which a text arrives

def test_the_prompt_is_the_first_forward():
    for protocol in PROTOCOLS:
        cache = KVCache(Rows, METHODS["fp16"](CONFIG), protocol, prompt=4)
        for other in (3, 5):
            with pytest.raises(ValueError, match=f"4 tokens; it got {other}"):
                cache.expect(torch.zeros(1, other, dtype=torch.long))


@pytest.fixture(scope="module")
def model():
    return random_model(CONFIG).double()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_of_a_prompt_the_prefix_is_cut_off_and_of_what_follows_nothing(model, protocol):
    rows = torch.zeros(L, HKV, 2, WIDTH)
    method = METHODS["intactkv"](CONFIG, Prefix("two", [3, 4], rows, rows))
    cache, tokens = KVCache(model, method, protocol, prompt=5), torch.tensor([[3, 4, 5, 6, 7, 8, 9]])
    assert cache.expect(tokens[:, :5])[0].tolist() == [[5, 6, 7]]
    assert [model(part, cache).shape[1] for part in (tokens[:, :5], tokens[:, 5:])] == [3, 2]
    assert len(cache) == 7


@pytest.mark.one_in(3)
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("prompt", [7, 18])
@pytest.mark.parametrize("method", [
    METHODS["kivi"](CONFIG, group_size=4, recent=3), METHODS["kivi"](CONFIG, group_size=8, recent=2, v_block=3),
    METHODS["ott"](CONFIG, group_size=4, recent=3, outlier_num=2, skip_layers=0),
    METHODS["kvsink"](CONFIG, 2, "always", EMERGENCE, CHANNEL, scheme="token-dynamic", block=5),
    METHODS["kvsink"](CONFIG, 2, "prompt", EMERGENCE, CHANNEL, scheme="token-dynamic", block=5)],
    ids=["kivi", "kivi v_block", "ott", "kvsink always", "kvsink prompt"])
def test_the_evaluator_reads_a_prompt_and_then_what_single_tokens_read(model, method, prompt, protocol):
    T = 30
    tokens = torch.randint(29, (2, T), generator=torch.Generator().manual_seed(5))
    windows = Windows(tokens, [[(2, 3), (prompt - 1, prompt + 1), (25, 26)], []]).predicted_from(prompt)
    assert (windows.start, windows.answers) == (prompt, [[(25, 26)], []])
    found = measure(model, method, windows, protocol, batch=2, prompt=prompt)
    assert (found.targets, found.answers) == (2 * (T - prompt), 1)
    cache, losses = KVCache(model, method, protocol, prompt), torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for chunk in [tokens[:, :prompt], *tokens[:, prompt:-1].split(1, dim=1)]:
            logp = model(chunk, cache)[:, -1].double().log_softmax(-1)
            losses -= logp.gather(1, tokens[:, len(cache), None])[:, 0]
    assert found.nll == pytest.approx((losses / (T - prompt)).tolist(), rel=1e-6)
