"""Assignment 3, KVSink: the search for the outlier, `observe` and `keep_keys`.

Random cases draw from short lists of round numbers, so that every bound of a rule is met, missed and hit."""
import copy
from types import SimpleNamespace

import pytest
import torch

from tinykv.model import LlamaConfig

AXES = "; text, place; text, head, token; layer, text, token, channel"  # of tensors


# The page

@pytest.mark.points(14)
def test_page(sub, rng, same):
    """the page: pfn, kvsink"""
    for _ in range(6):
        (B, H), T = rng.sizes(3, 2), rng.randint(9, 12)
        outputs = [rng.normal(B, T, 64).argsort(1) - rng.choice((4.25, 3000.0)) for _ in range(4)]
        for name in ("pfn", "kvsink"):
            for layer in range(4):
                cache, kept = SimpleNamespace(outputs=outputs[:layer]), torch.zeros(B, H, T, dtype=torch.bool)
                getattr(sub, name)(cache, layer, kept)
                same([kept, torch.stack(outputs)], f"{name} in layer {layer}, {B} texts of {T} tokens and {H} heads. A "
                     "layer's output is known to later layers alone; each text has its own sinks, the same for all "
                     "heads.", names="kept|outputs")


@pytest.mark.points(8)
def test_outlier(sub, rng, same):
    """outlier: the largest |h| of a hidden state, its ratio to the median token's largest |h|, its channel"""
    for _ in range(60):
        T, D = rng.randint(1, 6), rng.randint(2, 5)  # an even T has two middle numbers: the lower one
        unit = rng.choice((1, 1.001, 1 / 64, 1000))
        numbers = [unit * n * rng.choice((-1, 1)) for n in rng.sample(range(1, 90), T * D)]
        hidden = torch.tensor(numbers).float().view(1, T, D)
        same.call(sub.outlier, hidden, hint="Take magnitudes first, and the lower of two middle ones. The ratio is to "
                  "the median of the T largest magnitudes, one of each token.", names="largest|ratio|channel")


# Task 1: find_outlier. Each list begins with the embedding; blocks 0, 1, ... follow

EXAMPLES = [
    ([1, 2, 50, 65, 20], [2, 2, 9, 12, 3], "stands out: the first block with a ratio of at least 5 counts, though a "
     "later one is larger; column l + 1 belongs to block l."),
    ([1, 50, 59, 20], [2, 9, 8, 3], "stands out: block 0 may be the one."),
    ([1, 50, 59, 65, 20], [9, 4, 5, 8, 3], "stands out: the ratio after block 0 is below 5, after block 1 it is 5. The "
     "embedding is no block."),
    ([1, 10, 21, 30, 20], [2, 6, 9, 9, 3], "stays: after block 0 the largest number still doubles, from 10 to 21."),
    ([1, 10, 20, 20, 3], [2, 6, 9, 9, 3], "stays: 20 is not more than twice 10."),
    ([1, 10, 12, 14, 24, 24, 3], [2, 6, 7, 8, 9, 9, 3], "stays: 24, in the third block after block 0, is more than "
     "twice 10, and not more than twice 12."),
    ([1, 10, 12, 14, 16, 90, 90, 3], [2, 6, 7, 8, 9, 9, 9, 3], "stays: 90 comes in the fourth block after block 0, "
     "which does not count."),
    ([1, 10, 12, 90], [2, 6, 7, 90], "stays: the last block is left out, so its 90 says nothing about block 0."),
    ([1, 2, 20, 25, 5], [2, 2, 4, 4, 2], "none: all ratios are below 5."),
    ([1, 1, 1, 1, 5000], [2, 2, 2, 2, 5000], "none: no block after the last could keep its tokens."),
    ([1, 5000], [2, 5000], "none: the only block is the last one."),
]


def search(sub, same, largest, ratio, channel, hint):
    tensors = torch.tensor(largest).float(), torch.tensor(ratio).float(), torch.tensor(channel)
    same.call(sub.find_outlier, *tensors, hint=hint, names="layer|channel")


def windows(rng, W):
    """What W windows of a model may measure: largest numbers, and ratios."""
    L = rng.randint(1, 7)
    numbers = rng.choice((((1, 10, 20, 21), (2, 4, 5, 30)), ((1, 2, 40, 60), (2, 4, 5, 6))))
    typical = [rng.choices(some, k=L + 1) for some in numbers]
    return ([[x if rng.random() < 0.7 else rng.choice(some) for x in row] for _ in range(W)]
            for row, some in zip(typical, numbers))


@pytest.mark.points(10)
def test_find_outlier_in_lists(sub, rng, same):
    """find_outlier: an outlier that stands out, one that stays, and none"""
    others = [(*window, "the same rules, on other numbers.") for _ in range(30) for window in zip(*windows(rng, 1))]
    for i, (largest, ratio, why) in enumerate(EXAMPLES + others):
        c = rng.randint(1, 30) if i else 0
        search(sub, same, [largest] * 2, [ratio] * 2, [[c] * len(largest)] * 2, why)


@pytest.mark.points(6)
def test_votes(sub, rng, same):
    """find_outlier: of the windows that have an outlier more than half have to name the channel"""
    some, none = [2, 2, 9, 9, 9], [2, 2, 3, 4, 9]  # ratios
    for n_some, n_none in ((8, 0), (4, 0), (4, 5), (1, 3)):
        c, other = rng.sample(range(30), 2)
        for against in range(n_some // 2 + 1):
            votes = [[c] * 5] * (n_some - against) + [[other] * 2 + [other, c, c]] * against + [[other] * 5] * n_none
            search(sub, same, [[1, 2, 40, 40, 5]] * len(votes), [some] * n_some + [none] * n_none, votes,
                   f"a window without an outlier has no vote, and {n_none} have none. Those that name {other} in the "
                   f"column of the block where the outlier emerges: {against} of {n_some}.")


@pytest.mark.points(9)
def test_find_outlier(sub, rng, same):
    """find_outlier: all four rules, on windows that differ"""
    for _ in range(500):
        largest, ratio = windows(rng, rng.randint(1, 6))
        odd = rng.choice((0, 0, 0.2))
        channel = [[7 if rng.random() >= odd else 3 for _ in row] for row in ratio]
        search(sub, same, largest, ratio, channel, "rules 1 to 4; the median is over windows that name the channel.")


# Tasks 2 and 3: a cache as a method sees it

CONFIG = LlamaConfig(vocab_size=8, hidden_size=6, intermediate_size=8, num_hidden_layers=5, num_attention_heads=2,
                     num_key_value_heads=1, head_dim=4, max_position_embeddings=64)


def method_of(sub, k, lE, c):
    return sub.KVSink(CONFIG, preserve=k, scheme="token-dynamic", emergence_layer=lE,
                      outlier_channel=None if lE is None else c)


def new_cache(method):
    shared = SimpleNamespace()
    layers = [SimpleNamespace(layer=i, length=0, shared=shared, keys=SimpleNamespace(recent=None))
              for i in range(CONFIG.num_hidden_layers)]
    cache = SimpleNamespace(layers=layers, shared=shared)
    method.begin(cache)
    return cache


def show(method, cache, sizes, rng, elsewhere=1.0):
    """New tokens pass the model: sizes (B, T) stand in channel c after block lE. -> all that was shown."""
    B, T = sizes.shape
    shown = []
    for layer in cache.layers:
        layer.length += T
        layer.keys.recent = torch.zeros(B, 1, layer.length, 4)
        hidden = rng.normal(B, T, 6) * elsewhere
        if layer.layer == method.layer:
            hidden[..., method.channel] = sizes
        method.observe(cache, layer.layer, hidden)
        shown.append(hidden)
    return torch.stack(shown)


def sinks_of(cache):
    """By sequence, the sinks and their sizes, in the order of the positions."""
    if cache.shared.sinks is None:
        return None
    order = cache.shared.sinks.sort(1)
    return [order.values, cache.shared.sink_sizes.gather(1, order.indices).float()]


def observe(sub, rng, same, k, chunks, hint, lE=1, elsewhere=1.0):
    method = method_of(sub, k, lE, rng.randrange(6))
    cache = new_cache(method)
    for sizes in chunks:
        show(method, cache, torch.tensor(sizes), rng, elsewhere)
        same(sinks_of(cache), f"k = {k}; after block lE channel c of the tokens, chunk after chunk, has {chunks}: "
             f"{hint}", names="positions|sizes")


@pytest.mark.points(7)
def test_observe_top_k(sub, rng, same):
    """observe: the k tokens with the largest |H[i, c]| of each sequence, after block lE and in channel c alone"""
    eight = [[22.0, 0.3, -0.8, 0.1, -32.0, 0.5, 1.1, -0.2]]
    observe(sub, rng, same, 2, [eight], "other channels and blocks have larger numbers.", elsewhere=300)
    observe(sub, rng, same, 2, [eight], "other channels and blocks have smaller numbers.", elsewhere=1e-3)
    observe(sub, rng, same, 1, [eight], "-32 has the largest magnitude.")
    observe(sub, rng, same, 5, [[[1.0, 3.0, 2.0]]], "of fewer than k tokens all are sinks.")
    observe(sub, rng, same, 3, [[rng.sample(range(-99, -50), 4) + rng.sample(range(50), 4)]], "magnitudes count.")
    observe(sub, rng, same, 9, [[[0.0, 0.125, 0.0]], [[0.0]]], "a token with a 0 there is a sink if there is room.")
    peaks = [[9.0, 1, 2, 8, 3, 4], [1, 9.0, 2, 3, 4, 8], [4, 1, -9.0, 3, 8, 2]]
    observe(sub, rng, same, 2, [rng.sample(peaks, 3)], "sort along the tokens, the last dimension of (B, T).")


@pytest.mark.points(7)
def test_observe_chunks(sub, rng, same):
    """observe: a text that comes in chunks has the sinks that it has as a whole"""
    chunks = [[[22.0, 0.3, -0.8, 0.1]], [[-32.0, 0.5, 1.1, -0.2]], [[3.0]], [[40.0, 25.0, 1.0]]]
    others = torch.tensor(rng.sample(range(1, 99), 12))[None].float().split(rng.randint(2, 5), dim=1)
    long = torch.zeros(1, 4200)
    long[0, [2049, 2050, 4099, rng.randrange(4100, 4200)]] = torch.tensor(rng.sample(range(1, 99), 4)).float()
    for text in (chunks, [chunk.tolist() for chunk in others], [part.tolist() for part in long.split(2100, dim=1)]):
        observe(sub, rng, same, 2, text, "new tokens compete with the sinks so far. Positions are counted from the "
                "start of the text.")


@pytest.mark.points(12)
def test_observe(sub, rng, same):
    """observe: two texts and copies of them in turns, with any k, lE and chunks"""
    for _ in range(25):
        k, B = rng.randint(1, 5), rng.randint(1, 2)
        method = method_of(sub, k, rng.choice((None, 0, 1, 2)), rng.randrange(6))
        caches = [new_cache(method), new_cache(method)]
        tokens = iter(rng.sample(range(1, 60000), 100))  # no two are of equal size
        for _ in range(8):
            cache = rng.choice(caches)
            caches.append(copy.deepcopy(cache))
            T, seen = rng.randint(1, 5), cache.layers[0].length
            sizes = torch.tensor([[next(tokens) / 32 * rng.choice((-1, 1)) for _ in range(T)] for _ in range(B)])
            shown = show(method, cache, sizes, rng)
            same([sinks_of(cache), shown], f"k = {k}, lE = {method.layer}, {T} tokens after {seen} of a text, with "
                 f"{sizes.tolist()} in channel c after block lE. One method serves several texts, and copies of them "
                 "that go on otherwise: what it knows of a text lives on the cache. It changes no hidden state.",
                 names="sinks|hidden states, positions|sizes")


@pytest.mark.points(7)
def test_keep_keys(sub, rng, same):
    """keep_keys: layers after lE keep the sinks, layers up to lE nothing; without lE the first k tokens are kept"""
    for lE in (0, 1, 2, None):
        k = rng.randint(2, 4)
        method = method_of(sub, k, lE, 3)
        cache = new_cache(method)
        cache.shared.sinks = sinks = torch.tensor([rng.sample(range(8), k), rng.sample(range(8), k)])
        cache.shared.sink_sizes = torch.ones(2, k)
        for layer in cache.layers:
            layer.length, layer.keys.recent = 8, torch.zeros(2, 1, 8, 4)
            given = method.keep_keys(layer, 8)
            same(given if given is None else given.sort(-1).values,
                 f"keep_keys, sorted, in layer {layer.layer}, with k = {k}, lE = {lE} and the sinks {sinks.tolist()}")
        same(cache.shared.sinks)
