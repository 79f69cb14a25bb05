"""Assignment 5, IntactKV: a prefix of exact rows, Eq. 2, and its training."""
from types import SimpleNamespace

import pytest
import torch

from tinykv.model import Llama, LlamaConfig

AXES = "; row, column; text or layer, head, token, channel"  # of tensors


def models(rng):
    """A small model, and the same with other weights."""
    torch.manual_seed(rng.getrandbits(30))
    config = LlamaConfig(vocab_size=24, hidden_size=16, intermediate_size=24, num_hidden_layers=rng.randint(2, 3),
                         num_attention_heads=4, num_key_value_heads=2, head_dim=4, max_position_embeddings=64)
    full, quantized = Llama(config), Llama(config)
    with torch.no_grad():
        for ours, theirs in zip(full.parameters(), quantized.parameters()):
            ours.add_(0.3 * torch.randn_like(ours))
            theirs.copy_(ours + 0.05 * torch.randn_like(ours))
    return full, quantized


# The page

class Steps:
    """A stand-in for a model: its layers' keys and values are its tokens, plus numbers of their own."""

    def __init__(self, rng):
        self.rope, self.own = turn(1), rng.normal(3, 2, 2, 1, 4)  # (L, k or v, Hkv, 1, d)

    def __call__(self, tokens, cache):
        for layer, (k, v) in enumerate(self.own):
            x = tokens[:, None, :, None].float()  # (B, 1, T, 1)
            cache.update(layer, None, k + x, v - x, 0)


def turn(step):
    """A stand-in for RoPE that can be followed by eye: position p multiplies by p + step."""
    def rotate(x, positions=0):  # all of them, or the first
        return x * (step + (positions if torch.is_tensor(positions) else positions + torch.arange(x.shape[2])))[:, None]
    return SimpleNamespace(rotate=rotate)


@pytest.mark.points(16)
def test_page(sub, rng, same):
    """the page: rounded, Cache.update, prefix_of, loss_of"""
    for size, middle in ((8, 0), (88, -3), (128, 3), (192, 0), (258, 0)):
        weight = rng.normal(3, size) * rng.choice((0.1, 0.5)) + middle
        same.call(sub.rounded, weight, hint="One of eight levels is 0, whatever the sign of a group.")
    halves = (torch.tensor([rng.sample(range(8), 8)]) - 1.5) * rng.choice((0.5, 1, 2))  # the range is -1.5 to 5.5 steps
    same.call(sub.rounded, halves, hint="A code is none of nine.")
    same(sub.prefix_of(Steps(rng)), "prefix_of a model: keys, before RoPE, and values, (L, Hkv, n, d), of the token "
         "BOS alone", names="keys|values")
    for n, bits in ((1, 16), (2, 16), (2, 32), (0, 16), (0, 32)):
        rows = [rng.normal(3, 2, n, 4) for _ in "kv"] if n else None
        step, (B, T) = rng.randint(1, 4), rng.sizes(3, 4)
        cache = sub.Cache(turn(step), rows, bits)
        for layer in range(3):
            k, v = rng.normal(2, B, 2, T, 4)
            same([cache.update(layer, None, k, v, n), cache.rows[layer], k, v], f"Cache.update, layer {layer}, prefix "
                 f"of {n} rows, {bits} bits; rotation to position p multiplies by p + {step}",
                 names="attention|held|given k|given v, keys|values")
    for _ in range(4):
        same.call(sub.loss_of, *rng.normal(2, 3, 2, 4, 5), hint="It is half of the sum of the layers' means.")


# Task 1

@pytest.mark.points(8)
def test_exact_rows(sub, rng, same):
    """exact_rows: keys before RoPE and values of one text from its start, rounded to fp16"""
    for n in (1, 2, 4):
        full, _ = models(rng)
        ids = rng.choices(range(24), k=n)
        rows = same.call(sub.exact_rows, full, ids, tolerance=1e-3, names="keys|values")
        same([[x.requires_grad, x - x.half().float()] for x in rows], f"exact_rows of the tokens {ids}: whether they "
             "require a gradient, and what rounding to fp16 takes from them", names="keys|values")


@pytest.mark.points(4)
def test_without_prefix(sub, rng, same):
    """without_prefix: the texts behind it; ValueError where there is none, or nothing is behind it"""
    def without_prefix(tokens, ids):
        try:
            return sub.without_prefix(tokens, ids)
        except ValueError:
            return "ValueError"
    a, b, c = ids = rng.sample(range(3, 99), 3)
    for tokens in ([[a, b, 1, 2]], [[a, b, 1], [a, b, a]], [[a, b]], [[a]], [[a, b, 1], [a, 2, 1]], [[1, b, a]],
                   [[b, a, b]], [[a, 2, b], [a, b, b]]):
        same.call(without_prefix, torch.tensor(tokens), [a, b])
    for tokens in ([[a, b]], [[a]], [[a, b, c, 1]], [[a, 1, c, 1]], [[a, b, c, 2], [a, 2, c, 2]]):
        same.call(without_prefix, torch.tensor(tokens), ids)


@pytest.mark.points(2)
def test_text_positions(sub, rng, same):
    """text_positions: a text goes on where its prefix ends"""
    for n in range(10):
        same.call(sub.text_positions, n, rng.randint(1, 9))


@pytest.mark.points(3)
def test_begin_with(sub, rng, same):
    """begin_with: the prefix first, keys rotated to their own positions, values not at all"""
    for _ in range(15):
        (B, H, n, T), d = rng.sizes(3, 2, 3, 4), 2
        prefix_k, prefix_v = rng.of(range(-5, 6), 2, H, n, d).float()
        k, v = rng.of(range(-5, 6), 2, B, H, T, d).float()
        step = rng.randint(1, 4)
        same.call(sub.begin_with, prefix_k, prefix_v, k, v, turn(step), hint="Rotation to position p multiplies by "
                  f"p + {step} here.", names="keys|values")


# Task 2

@pytest.mark.points(5)
def test_scaled_values(sub, rng, same):
    """scaled_values: each layer's, head's and channel's own factor"""
    for _ in range(15):
        L, H, n, d = rng.sizes(3, 3, 3, 3)
        same.call(sub.scaled_values, rng.of(range(-5, 6), L, H, n, d).float(), rng.of((0.5, 1, 2, 3), L, H * d))


# Task 3

@pytest.mark.points(6)
def test_loss_of_eight_numbers(sub, rng, same):
    """block_loss: the handout's example"""
    targets = torch.tensor([[9.0, 1, 2, 3], [9, 0, 1, 1]])[..., None]
    outputs = torch.tensor([[5.0, 1, 4, 2], [7, 0, 1, 4]])[..., None]
    counts = torch.tensor([[False, True, False], [True, True, True]])
    others = rng.of(range(9), 2, 4, 1).float()
    for given, n, chosen in ((outputs, 1, None), (outputs, 0, None), (outputs, 1, counts), (others, 1, None)):
        same.call(sub.block_loss, [given], [targets], n, chosen, hint="It is half of the mean over texts of each "
                  "text's own mean.")


@pytest.mark.points(11)
def test_block_loss(sub, rng, same):
    """block_loss: blocks, texts, channels, tokens that count"""
    for _ in range(30):
        (blocks, B, T, D), n = rng.sizes(3, 3, 4, 3), rng.randint(0, 2)
        outputs, targets = ([rng.normal(B, n + T, D) for _ in range(blocks)] for _ in range(2))
        counts = None
        if rng.random() < 0.7:
            counts = rng.of((False, True), B, T)
            counts[torch.arange(B), rng.of(range(T), B)] = True
        same.call(sub.block_loss, outputs, targets, n, counts)


# Task 4

@pytest.mark.points(3)
def test_clipped(sub, rng, same):
    """clipped: one factor for all, and none where the norm is small enough"""
    for largest in (1.0, 4.9, 5.0, 5.1, 50.0):
        same.call(sub.clipped, [torch.tensor([3.0]), torch.tensor([4.0])], largest)
    for unit in 10 * (1, 1e-6):
        gradients = [rng.normal(2, 2) * rng.choice((0, 0.1, 1, 10)) * unit for _ in range(rng.randint(1, 3))]
        same.call(sub.clipped, gradients, rng.choice((0.1, 1.0, 3.0)) * unit, hint="No norm is too small to clip.")


@pytest.mark.points(6)
def test_adam_step(sub, rng, same):
    """adam_step: several steps, with the correction for the first ones"""
    for _ in range(8):
        x, lr = rng.normal(3), rng.choice((0.001, 0.1, 1.0))
        first = rng.choice((0, 0, 20))  # or a state in the middle
        state = first * rng.normal(3) / 100, first * rng.normal(3).abs() / 100, first
        for _ in range(5):
            gradient = rng.normal(3) * rng.choice((1e-8, 0.01, 1, 100))
            before = x.clone()
            x, state = same.call(sub.adam_step, x, gradient, state, lr, tolerance=1e-3, hint="First of all is "
                                 "what it adds to x.", then=lambda found, before=before: [found[0] - before, *found],
                                 names="step|x|state, m|v|t")


@pytest.mark.points(10)
def test_train(sub, rng, same):
    """train: the prefix of the quantized model alone; no weight changes"""
    for updates, clip in ((0, 1.0), (1, 100.0), (3, 100.0), (3, 1e-7)):  # Adam hardly feels a larger clip
        full, quantized = models(rng)
        L = full.config.num_hidden_layers
        keys, values = rng.normal(2, L, 2, 2, 4)
        tokens = rng.of(range(24), 3, 5)
        lr = rng.choice((0.02, 0.1))
        trained = sub.train(full, quantized, tokens, keys, values, updates, lr, clip)
        tried = f"train with {updates} updates, lr = {lr}, clip = {clip}. "
        added = [rows - old for rows, old in zip(trained, (keys, values))]
        same([[rows.requires_grad for rows in trained], added, trained], tried, 2e-3,
             names="whether a gradient is required by|what was added to|the prefix, keys|values")
        weights = [[*model.parameters()] for model in (full, quantized)]
        same([*weights, keys, keys.requires_grad, any(x.grad is not None for x in sum(weights, []))], tried, 0,
             "weights of full|of quantized|given keys|whether these require a gradient|whether a weight has one")


# Task 5

@pytest.mark.points(6)
def test_costs(sub, rng, same):
    """prefix_bytes, bits_of_a_number: what a prefix costs"""
    for _ in range(30):
        (L, H, T), d, n = rng.sizes(9, 9, 99), rng.choice((8, 32, 64)), rng.randint(0, 9)
        same.call(sub.prefix_bytes, L, H, d, n)
        same.call(sub.bits_of_a_number, rng.choice((2, 3, 4)), d, n, T, tolerance=1e-5)
