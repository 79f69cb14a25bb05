"""Assignment 4: KIVI's codecs and window, and OTT's two pools."""
import copy
import math
from types import SimpleNamespace

import pytest
import torch

from tinykv.model import LlamaConfig

AXES = "; text, head, token; text, head, token or group, channel or group"  # of tensors
D = 8  # channels of a head
CONFIG = LlamaConfig(vocab_size=8, hidden_size=16, intermediate_size=8, num_hidden_layers=4, num_attention_heads=2,
                     num_key_value_heads=2, head_dim=D, max_position_embeddings=64)


# The page

@pytest.mark.points(14)
def test_page(sub, rng, same):
    """the page: grid_of, ott"""
    for _ in range(8):
        (B, H), block, n = rng.sizes(2, 2), 4, 4 * rng.randint(2, 4)
        x, kept = rng.normal(B, H, block, 8), rng.of((False, False, True), B, H, block)
        for kind in "kv":
            same.call(sub.grid_of, x, kind, kept, hint="All of a group count, but a kept key's.", names="scale|zero")
        sizes = torch.tensor(rng.sample(range(1, 999), B * H * (n + 3))).view(B, H, n + 3, 1) / 32
        shares = torch.tensor([[1, 1, 1, 1], [4, 0, 0, 0], [0, 2, 2, 0], [1, 0, 0, 3]])[rng.of(range(4), B, H, n + 3)]
        keys = sizes * shares * rng.of((-1, 1), B, H, n + 3, 4)  # other norms order them otherwise
        before = rng.of((False, True), B, H, n)
        before[..., -block:] = False
        for layer in (1, 2, rng.randint(3, 9)):
            pool, now = rng.randint(1, 3), before.clone()
            rows = {(layer, "k"): keys, (layer, "v"): keys.flip(2), (layer - 1, "k"): keys.flip(2)}
            cache = SimpleNamespace(block=block, pool=pool)
            cache.read = lambda layer, kind, rows=rows: rows[layer, kind].clone()
            sub.ott(cache, layer, now)
            same(now, f"ott in layer {layer}, pool = {pool}, block = {block}, kept so far {before.tolist()}, sums of "
                 f"magnitudes {keys.abs().sum(-1).tolist()}: what is kept now. The smallest of those that are "
                 "still in 16 bits stay, as many as the pool has, and so does what was kept before.")


# Task 1

@pytest.mark.points(4)
def test_kivi_codecs(sub, rng, same):
    """kivi_codecs: a key's grid spans G tokens of one channel, a value's G channels of one token"""
    for _ in range(12):
        k_bits, v_bits = rng.sample((1, 2, 3, 4), 2)
        G = rng.choice((2, 4, 8, 16, 32))
        pair = sub.kivi_codecs(k_bits, v_bits, D, G)
        x = rng.normal(1, 2, 2 * G, D)
        for what, codec in zip(("keys", "values"), pair):
            same(codec.decode(codec.encode(x)), f"kivi_codecs({k_bits}, {v_bits}, {D}, {G}): what the codec of the "
                 f"{what} reads {2 * G} tokens as. A group of values is never longer than a head.")


@pytest.mark.points(8)
def test_due(sub, rng, same):
    """due: whole blocks, none twice, and never one of the newest R"""
    same.call(sub.due, 6, 0, 2, 4, hint="This is the handout's example.")
    for _ in range(150):
        R, G = rng.randint(0, 9), rng.randint(1, 6)
        n_coded = rng.choice((G * rng.randint(0, 3), rng.randint(0, 3 * G)))
        same.call(sub.due, n_coded + rng.randint(0, 20), n_coded, R, G)


@pytest.mark.points(7)
def test_kivi_bits(sub, rng, same):
    """kivi_bits: codes, two numbers of 16 bits a group, and the tokens that wait"""
    for _ in range(60):
        G = rng.choice((8, 16, 32))
        T, d, bits, R = rng.randint(1, 150), G * rng.randint(1, 4), rng.choice((1, 2, 4)), rng.randint(0, 50)
        same.call(sub.kivi_bits, T, d, bits, G, R, tolerance=1e-6)


# Task 2

def method_of(sub, pool, extra, skip_layers=2):
    return sub.OTT(CONFIG, group_size=4, recent=0, outlier_num=pool, extra_pool=extra, skip_layers=skip_layers)


@pytest.mark.points(6)
def test_size(sub, rng, same):
    """size: the sum of magnitudes, added up in fp32"""
    method = method_of(sub, 2, 4)
    for scale, dtype in ((1, torch.float32), (1, torch.float16), (20000, torch.float16), (1, torch.bfloat16)):
        keys = (scale * rng.normal(2, 2, 5, D).clamp(-3, 3)).to(dtype)
        same.call(method.size, keys, hint=f"They are {dtype}; their sums are fp32.")


# Task 3. Keys are whole numbers, so that scores are exact

def keys_with(rng, scores):
    """Keys (B, Hkv, T, D), fp16, whose magnitudes add up to scores, (B, Hkv, T) whole numbers."""
    keys = torch.zeros(*scores.shape, D)
    for part in range(3):  # split over channels at random: other norms order tokens otherwise
        channel = rng.of(range(D), *scores.shape, 1)
        share = scores // 3 if part else scores - 2 * (scores // 3)
        keys.scatter_add_(-1, channel, share[..., None].float())
    return (keys * rng.of((-1, 1), *keys.shape)).half()


def unequal(rng, numbers, *shape):
    """Scores of which no two of a head are equal."""
    heads = [rng.sample(numbers, shape[-1]) for _ in range(math.prod(shape[:-1]))]
    return torch.tensor(heads).view(shape)


def pools(given, p):
    """What keep_keys gave: by sequence and head, the pool and the extra pool, sorted."""
    return given if given is None else [[[sorted(row[:p]), sorted(x for x in row[p:] if x != row[0])] for row in heads]
                                        for heads in given.tolist()]


def blocks_of(method, keys, blocks, same, hint, newer=2):
    """keys (B, Hkv, T, D) come, and are quantized in blocks. Compares the pools after each, and yields."""
    B, H, _, _ = keys.shape
    rows, values = (SimpleNamespace(n_coded=0, kept_positions=None, kept_rows=None) for _ in range(2))
    layer = SimpleNamespace(layer=3, keys=rows, values=values, length=0, shared=SimpleNamespace())
    scores = keys.float().abs().sum(-1).tolist()
    for n in blocks:
        layer.length = min(rows.n_coded + n + newer, keys.shape[2])
        rows.recent = keys[:, :, rows.n_coded:layer.length].clone()
        values.recent = rows.recent.flip(2)  # a value's size says nothing about its key's
        before = copy.deepcopy(rows)
        of_copy = method.keep_keys(copy.deepcopy(layer), n)  # its pools are the text's, and say nothing about these
        given = method.keep_keys(layer, n)
        unchanged = [x is None or torch.equal(getattr(rows, name), x) for name, x in vars(before).items()
                     if name != "n_coded"]
        told = f"{hint} p = {method.preserve}, E = {method.extra_pool}; scores by sequence and head {scores}; blocks "
        told += f"of {blocks}, now n = {n}: tokens {rows.n_coded} to {rows.n_coded + n - 1}."
        same([*(pools(kept, method.preserve) for kept in (given, of_copy)), unchanged], f"{told} Both pools are sorted "
             "here.", names="kept|of a copy|whether the keys are unchanged, text, head, pool|extra pool, place")
        same([torch.is_floating_point(given), *given.shape[:2]], told, names="whether floats|texts|heads")
        rows.kept_positions = given
        index = given.long()[..., None].expand(B, H, -1, D)
        rows.kept_rows, values.kept_rows = keys.gather(2, index), keys.flip(2).gather(2, index)
        rows.n_coded, values.n_coded, values.kept_positions = rows.n_coded + n, rows.n_coded + n, given
        yield


@pytest.mark.points(6)
def test_first_pool(sub, rng, same):
    """keep_keys: the first pool, of each sequence and head"""
    for _ in range(15):
        scores = unequal(rng, range(3, 60), rng.randint(1, 3), 2, 8)
        list(blocks_of(method_of(sub, rng.randint(1, 4), 4), keys_with(rng, scores), [rng.randint(4, 6)], same,
                       "Each sequence and KV head has its own pool."))


@pytest.mark.points(8)
def test_pool_of_eight_numbers(sub, rng, same):
    """keep_keys: the pool of the handout's example, and its second election"""
    for scores in ([9, 70, 5, 80, 3, 65, 4, 90], rng.sample(range(3, 99), 8)):
        for p, E in ((2, 1), (2, 0), (1, 3), (2, 5)):
            list(blocks_of(method_of(sub, p, E), keys_with(rng, torch.tensor([[scores]])), [4, 4], same, "The tokens "
                           "with the smallest scores win. One that loses its place goes to the extra pool; only as "
                           "many are admitted as that has room for."))


@pytest.mark.points(14)
def test_elections(sub, rng, same):
    """keep_keys: elections, evictions, a full extra pool"""
    for _ in range(60):
        blocks = [rng.randint(3, 5) for _ in range(rng.randint(2, 6))]
        scores = unequal(rng, range(3, 40), rng.randint(1, 2), 2, sum(blocks) + 2)
        scores += rng.choice((0, 4000))  # fp16 has no 4001
        if rng.random() < 0.5:  # later tokens are smaller, so that many places change hands
            scores = scores.sort(-1, descending=True).values
        keys = keys_with(rng, scores) * rng.choice((1, 1, 2 ** -9))  # sinks' keys are small, and near each other
        list(blocks_of(method_of(sub, rng.randint(1, 3), rng.randint(0, 5)), keys, blocks, same,
                       "A token of the extra pool never leaves it, and competes no more."))


@pytest.mark.points(6)
def test_ties(sub, rng, same):
    """keep_keys: of equal scores the earlier token wins"""
    for _ in range(30):
        scores = rng.of(range(3, 9), rng.randint(1, 2), 2, 14)
        list(blocks_of(method_of(sub, rng.randint(1, 3), rng.randint(0, 5)), keys_with(rng, scores), [4, 4, 4], same,
                       "Of equal scores the earlier token wins."))


@pytest.mark.points(3)
def test_layers_without_a_pool(sub, rng, same):
    """keep_keys: nothing in the first layers, and with no places"""
    for p, skip_layers in ((0, 2), (2, 2), (2, 0), (2, 1), (2, 3)):
        method = method_of(sub, p, 4, skip_layers)
        for layer in range(4):
            rows = SimpleNamespace(n_coded=0, kept_positions=None, kept_rows=None,
                                   recent=keys_with(rng, rng.of(range(3, 60), 1, 2, 6)))
            given = method.keep_keys(SimpleNamespace(layer=layer, keys=rows, values=rows, length=6), 4)
            same(pools(given, p), f"keep_keys in layer {layer} with n = 4, p = {p} and skip_layers = {skip_layers}",
                 names="text, head, pool|extra pool, place")


@pytest.mark.points(4)
def test_two_texts(sub, rng, same):
    """keep_keys: one method serves two texts in turns"""
    method = method_of(sub, 2, 3)
    for _ in range(3):
        texts = [blocks_of(method, keys_with(rng, unequal(rng, range(3, 60), 2, 2, 14)), [4, 4, 4], same,
                           f"Text {i} of two that come in turns, with the same method. What it knows of one lives on "
                           "the cache.") for i in range(2)]
        list(zip(*texts))
