"""Assignment 6, AnTKV: weighted k-means, codebooks, anchor scores.

Where distances may be equal, points are whole numbers, so that they are equal for everyone."""
from types import SimpleNamespace

import pytest
import torch

from tinykv.model import LlamaConfig

AXES = "; centre, number; text, head, token; text, head, token, channel"  # of tensors
CONFIG = LlamaConfig(vocab_size=24, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, head_dim=4, max_position_embeddings=64)
EIGHT = torch.tensor([[0.0], [1], [2], [3], [6], [7], [8], [9]])
WEIGHTS = torch.tensor([1.0, 1, 1, 1, 1, 1, 1, 5])


# The page

@pytest.mark.points(16)
def test_page(sub, rng, same):
    """the page: vectors, decode, antkv"""
    for i in range(12):
        (B, T, parts), H, n = rng.sizes(2, 4, 3), 1 + i % 2, (1, 2, 4, 8)[i // 3]
        x = rng.of(range(99), B, H, T, parts * 8).float()
        same.call(sub.vectors, x, n, hint="(B, Hkv, T, d) becomes (slots, B * T, n), the slots of a head next to each "
                  "other.", names="; place, vector, number")
        codebook, codes = rng.normal(H * parts * 8 // n, 2 ** n, n), rng.of(range(256), B, H, T, parts).to(torch.uint8)
        same.call(sub.decode, codes, codebook, hint="The first code of a byte is in its lowest bits; each place has "
                  "its codebook.")
        T, R = (5, 100, 101, 130)[i % 4], 1 + i % 3
        q, K, kept = rng.normal(B, H * R, T, 8), rng.normal(B, H, T, 8), torch.zeros(2, B, H, T, dtype=torch.bool)
        q = q * rng.of((0.25, 1, 4), B, H * R, T, 1)
        sub.antkv(q, K, kept)
        same([list(kept), q, K], f"antkv of {T} tokens, {H * R} heads of queries and {H} of keys. Of each text and "
             "head 1% is kept, rounded up. A query reads no later key.", names="kept|q|K, keys|values")


# Task 1

@pytest.mark.points(5)
def test_nearest(sub, rng, same):
    """nearest: of equally near centres the first"""
    for _ in range(80):
        N, k, n = rng.sizes(9, 5, 3)
        x, centres = rng.of(range(-4, 5), N, n).float(), rng.of(range(-4, 5), k, n).float()
        same.call(sub.nearest, x, centres)


@pytest.mark.points(8)
def test_plus_plus(sub, rng, same):
    """plus_plus: draws by weight, and by weight times squared distance"""
    same.call(sub.plus_plus, EIGHT, WEIGHTS, [0.5, 0.1], hint="This is the handout's example.")
    for _ in range(80):
        n, k = rng.randint(1, 2), rng.randint(1, 4)
        x = torch.tensor(rng.sample([[a] + [b] * (n - 1) for a in range(9) for b in (0, 3)][:: 3 - n], 8)).float()
        weights = rng.of(rng.choice(((0, 1, 1, 2, 5), (0, 0, 0, 3))), 8) * rng.choice((1.0, 2.0 ** -30))
        same.call(sub.plus_plus, x, weights, [rng.randint(0, 15) / 16 for _ in range(k)], hint="Take the first point "
                  "at which the sum of the odds is larger than u times the sum of all; the last where all odds are 0.")


@pytest.mark.points(8)
def test_lloyd(sub, rng, same):
    """lloyd: weighted means, and centres without points"""
    for start in ([0.0, 3], [0.0, 20], [20.0, 20, 20]):
        centres = torch.tensor(start)[:, None]
        same.call(sub.lloyd, EIGHT, WEIGHTS, centres, then=lambda moved: moved[:2], hint="Of the handout's points. "
                  "Compared: the first two centres.")
    for _ in range(80):
        N, n, k = rng.randint(6, 10), rng.randint(1, 3), rng.randint(1, 5)
        x, weights = rng.normal(N, n), rng.of((0, 0.5, 1, 3), N) * rng.choice((1, 2 ** -28))  # as gradients' norms
        if (weights > 0).sum() < k:
            continue
        centres = torch.stack([rng.choice((x[rng.randrange(N)], rng.normal(n) * 4)) for _ in range(k)])
        same.call(sub.lloyd, x, weights, centres, hint="A centre whose points weigh nothing moves to the point that is "
                  "furthest from its own, as distances were before the step.")


@pytest.mark.points(6)
def test_kmeans(sub, rng, same):
    """kmeans: until no centre moves, `steps` times at most"""
    same.call(sub.kmeans, EIGHT, WEIGHTS, torch.tensor([[0.0], [3]]), hint="This is the handout's example.")
    x = torch.tensor(rng.sample([8, 8 + 2 ** -11, 12 + 2 ** -14, 20 - 2 ** -14], 4))[:, None]
    same.call(sub.kmeans, x, torch.ones(4), torch.tensor([[8.0], [16]]), hint="The first step moves a centre by "
              "2 ** -12, the second by more than 1.")
    for _ in range(40):
        x, weights = rng.normal(20, 2) * rng.choice((1, 1e-4)), rng.of((1, 2, 5), 20).float()
        centres, steps = x[: rng.randint(2, 5)].clone(), rng.choice((1, 2, 3, 25))
        same.call(sub.kmeans, x, weights, centres, steps)


# Task 2

@pytest.mark.points(10)
def test_token_weights(sub, rng, same):
    """token_weights: the norm of each row, the largest thousandth clamped; 1 everywhere without a gradient"""
    for shape in [(1, 6, 2), (2, 3, 4), (1, 1, 3), (3, 40, 2), (2, 900, 2), (1, 1500, 3), (3, 1100, 1)] * 2:
        gradient = rng.normal(*shape) ** 3 * rng.choice((1e-18, 1e-12, 1e-6, 1))
        gradient[:, rng.randrange(shape[1])] *= 100
        gradient[0, 0] = 0
        if shape == (2, 3, 4):
            gradient[rng.randrange(2)] = 0
        same.call(sub.token_weights, gradient, hint="All heads are sorted together.", names="; head, token")
    same.call(sub.token_weights, torch.zeros(2, 3, 4))


@pytest.mark.points(8)
def test_codes(sub, rng, same):
    """encode, decode: a codebook for each place"""
    x, centroids = rng.of(range(400), 1, 1, 5, 1).float(), torch.arange(400.0)[None, :, None]
    same.call(sub.encode, x, centroids, hint="Of 400 centroids 0, 1, ... 399.", then=torch.Tensor.long)
    for _ in range(40):
        (B, H, T), n, m = rng.sizes(3, 3, 4), rng.choice((1, 2, 4)), rng.choice((2, 4))
        places = H * (4 // n)
        x, centroids = rng.of(range(-3, 4), B, H, T, 4).float(), rng.of(range(-3, 4), places, m, n).float()
        same.call(sub.encode, x, centroids, names="; text, token, place")
        same.call(sub.decode, rng.of(range(m), B, T, places), centroids, H)


# Task 3

@pytest.mark.points(14)
def test_anchor_scores(sub, rng, same):
    """anchor_scores: both scores of Eq. 5"""
    for k in ([-20.0, -15.0], [rng.uniform(-30, -20), rng.uniform(-19, -10)]):
        # the last two are near each other: the largest score is no number so small that fp32 rounds it
        q, k = torch.full((1, 1, 3, 1), 20.0), torch.tensor([*k, k[1] + 0.0625]).view(1, 1, 3, 1)
        same.call(sub.anchor_scores, q, k, hint="Exponentials of such scores are no numbers.", names="keys|values")
    for _ in range(40):
        (B, Hkv, shared, T), d = rng.sizes(2, 3, 3, 5), rng.choice((1, 4, 9))
        S = T + rng.choice((0, 0, 1, 4))
        q, k = 2 * rng.normal(B, Hkv * shared, T, d), rng.normal(B, Hkv, S, d)
        same.call(sub.anchor_scores, q, k, hint="The queries are those of the newest tokens.", names="keys|values")


@pytest.mark.points(5)
def test_keep(sub, rng, same):
    """keep_keys, keep_values: 1% of the text, rounded up, of each"""
    for percent in (0, 1, 2, 5, 7):
        method = sub.AnTKV(CONFIG, vq="d2m4", anchors=f"{percent}%")
        for length in (1, 50, 100, 101, 140, rng.randint(1000, 9000)):
            keys, values = (SimpleNamespace(n_coded=0, recent_scores=rng.normal(2, 2, length), kept_positions=None)
                            for _ in "kv")
            layer, n = SimpleNamespace(layer=0, length=length, keys=keys, values=values), length - length // 4
            for keep in (method.keep_keys, method.keep_values):
                given = keep(layer, n)
                same([] if given is None else given.sort().values.tolist(), f"{keep.__name__}, {percent}% of {length} "
                     f"tokens, {n} about to be quantized: the positions, sorted", names="text, head, place")
