"""A text with a prompt: what KVSink and AnTKV keep, and when tokens are quantized, against plain lists.

The lists know no tensors: a token is exact, or it is read as its codes (oracles.py).
"""
import itertools
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
from tinykv.evaluate import measure
from tinykv.lab.data import Windows
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
    """What attention sees in the last layer after each chunk: keys, and values, [lists by token and channel]."""
    q, k, v, hidden = numbers(seed)
    cache, seen = KVCache(Rows, method, protocol, prompt), ([], [])
    for end in itertools.accumulate(sizes):
        new = slice(len(cache), end)
        for layer in range(L):
            both = cache.update(layer, q[None, :, new], k[None, None, new], v[None, None, new], new.start)
            cache.observe(layer, hidden[None, new])
        for read, x in zip(seen, both):
            read.append(x[0, 0].tolist())
    return seen, cache


# The same in lists

def coded(row):
    row = np.array(row, dtype=np.float32)
    return oracles.affine_group(row, row.min(), row.max(), oracles.max_code(2), "offset").tolist()


def largest(scores, positions, k):
    return set(sorted(positions, key=lambda t: (-scores[t], t))[:k])


def read_by_lists(rows, scores, protocol, prompt, sizes, recent, block, k, choose):
    """[rows as attention sees them] after each chunk. scores: by token, of what is kept; k: a number of tokens."""
    rows = oracles.float16(rows.numpy()).tolist()
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


def compared(method, protocol, prompt, seed, scores, k):
    """A cache that read what the lists say, a prompt and then tokens one by one. scores: of keys, of values."""
    sizes = [prompt] + [1] * (T - prompt)
    seen, cache = read_by_cache(method, protocol, prompt, sizes, seed)
    for read, rows, of_tokens in zip(seen, numbers(seed)[1:3], scores):
        given = protocol, prompt, sizes, method.recent, method.block, k, method.choose
        assert read == read_by_lists(rows, of_tokens, *given)
    return cache


@pytest.mark.one_in(5)
@pytest.mark.parametrize("choose", ["prompt", "always"])
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("prompt", [3, 16, 20])
@pytest.mark.parametrize("block", [1, BLOCK])
def test_kvsinks_algorithm_1_and_decoding_after_it(protocol, prompt, choose, block):
    """Sinks 17 and 30 come after a prompt of 16 tokens: S has them only where it goes on being chosen."""
    method = METHODS["kvsink"](CONFIG, 2, choose, EMERGENCE, CHANNEL, scheme="token-dynamic", block=block)
    outlier = numbers(1)[3][:, CHANNEL].abs().tolist()
    cache = compared(method, protocol, prompt, 1, [outlier] * 2, 2)
    sinks = set(cache.shared.sinks[0].tolist())
    assert sinks == ({17, 30} if choose == "always" else largest(outlier, range(prompt), 2))
    assert cache.layers[EMERGENCE].keys.kept_positions is None  # it has stored its keys before S is known


@pytest.mark.one_in(3)
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("prompt, recent, block", [(3, 8, 1), (20, 8, 1), (20, 8, BLOCK), (20, 0, BLOCK), (9, 32, 1)])
def test_antkvs_anchors_are_of_the_prefill_alone(protocol, prompt, recent, block):
    """Among all tokens of the prompt, of keys and of values; later tokens have the window alone."""
    method = METHODS["antkv"](CONFIG, vq="d2m4", anchors="15%", recent=recent, block=block)
    method.codecs = [Pair(Affine(2, WIDTH), Affine(2, WIDTH))] * L  # codes that can be computed by hand
    q, keys, _, _ = numbers(2)
    exact = oracles.float16(keys[:prompt].numpy())  # (prompt, d)
    scores = oracles.equation_5(q[None, :, :prompt].double().numpy(), exact[None, None])  # of keys, of values
    padded = [of_tokens[0, 0].tolist() + [-1.0] * (T - prompt) for of_tokens in scores]
    for layer in compared(method, protocol, prompt, 2, padded, math.ceil(0.15 * prompt)).layers:
        assert layer.keys.recent_scores is layer.values.kept_scores is None  # no score is held any more


def test_a_group_that_is_not_full_waits_for_the_tokens_after_the_prompt():
    """Four keys, or values, share a scale; the others wait with them."""
    for turned in (False, True):
        method = METHODS["kivi"](CONFIG, group_size=4, recent=0)
        if turned:
            method.codecs = [Pair(k=pair.v, v=pair.k) for pair in method.codecs]
        _, cache = read_by_cache(method, "paper", 7, [7], 1)
        assert [(layer.keys.n_coded, layer.values.n_coded) for layer in cache.layers] == [(4, 4)] * L


def test_keys_and_values_are_cut_where_groups_of_both_end():
    method = METHODS["kivi"](CONFIG, group_size=6, recent=0)
    method.codecs = [Pair(Affine(2, WIDTH, "channel", 3), Affine(2, WIDTH, "channel", 2))] * L
    _, cache = read_by_cache(method, "paper", 9, [9], 1)
    assert [(layer.keys.n_coded, layer.values.n_coded) for layer in cache.layers] == [(6, 6)] * L


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
