"""Assignment 4: KIVI's codecs and window, and OTT's pool of tokens with small keys."""
from types import SimpleNamespace

import torch

from tinykv.cache import LayerCache
from tinykv.course.check import check, expect, expect_tensor, normal, shown
from tinykv.model import LlamaConfig

NUMBER, TITLE = 4, "KIVI's window and OTT's pool"
ANSWERS = ("tinykv.methods.kivi", "tinykv.methods.ott")
BLANKS = {"tinykv/methods/ott.py": ("OTT.keep_keys", "OTT.size")}

D = 8  # channels of a head


# ---- what these checks share

def config_of(heads, layers=4):
    return LlamaConfig(vocab_size=24, hidden_size=2 * heads * D, intermediate_size=48,
                       num_hidden_layers=layers, num_attention_heads=2 * heads, num_key_value_heads=heads,
                       head_dim=D, max_position_embeddings=512)


def drawn_group(rng, size, bits):
    """A group of numbers, and what they are read as in `bits` bits: two lists. Its scale and its zero point are
    exact in 16 bits, and no number is near the middle between two codes."""
    scale, zero, top = rng.choice((0.25, 0.5, 1.0)), rng.randint(-20, 20), 2 ** bits - 1
    codes = [0, top, *(rng.randint(1, top - 1) for _ in range(size - 2))]
    shifts = [0, 0, *(rng.choice((-0.25, 0.25)) for _ in range(size - 2))]
    order = rng.sample(range(size), size)
    return [scale * (codes[i] + shifts[i]) + zero for i in order], [scale * codes[i] + zero for i in order]


def right_size(keys):
    """What `size` has to give, so that `keep_keys` is graded by itself."""
    return keys.float().abs().sum(-1)


def keys_with(rng, scores):
    """Keys (B, Hkv, T, D) whose magnitudes add up to given scores, [sequence][head][token]."""
    signs = normal(rng, *torch.tensor(scores).shape, D).sign()
    return signs * torch.tensor(scores)[..., None] / D


def layer_of(submission, scores, rng, layer=3, n_coded=0, kept=None, pool=2, extra=4, skip=2):
    """A method and one layer's cache that holds tokens with these scores.

    n_coded: of the oldest tokens, how many are quantized already. kept [sequence][head][entry]: the positions
    that are kept, the pool first.
    """
    heads = len(scores[0])
    method = submission.OTT(config_of(heads), group_size=4, recent=0, outlier_num=pool, extra_pool=extra,
                            skip_layers=skip)
    method.size = right_size
    cache = LayerCache(layer, method, rope=None, protocol="stream", shared=SimpleNamespace())
    keys = keys_with(rng, scores)
    cache.keys.append(keys)
    cache.values.append(keys)
    cache.length = keys.shape[2]
    for rows in (cache.keys, cache.values):
        if kept is not None:
            rows.keep(torch.tensor(kept), rows.read())
        if n_coded:
            rows.quantize(n_coded)
    return method, cache


def kept_by(method, cache, n, tried):
    """What keep_keys keeps: [sequence][head] -> sorted positions."""
    B, heads = cache.keys.recent.shape[:2]
    given = method.keep_keys(cache, n)
    expect(given is not None, f"{tried} keep_keys gives None; it should keep tokens.")
    fits = isinstance(given, torch.Tensor) and given.dim() == 3
    expect_tensor(given, "integers", (B, heads, given.shape[2] if fits else method.preserve),
                  f"What keep_keys gives (p + e entries a row, p = {method.preserve}, e >= 0)")
    return [[sorted({i for i in head if i >= 0}) for head in row] for row in given.tolist()]


def halves(rng, n, low=2.0, high=20.0):
    """n different numbers, in steps of a half, in any order."""
    return [x / 2 for x in rng.sample(range(int(2 * low), int(2 * high)), n)]


def smallest(scores, p, start=0):
    """The positions of the p smallest of a list."""
    return sorted(start + i for i in sorted(range(len(scores)), key=lambda i: scores[i])[:p])


# ---- task 1: KIVI

def try_codec(codec, groups, x_of, bits, what, hint):
    """Whether a codec reads groups as it should. groups: [(numbers, what they are read as)]; x_of: makes a tensor
    (1, 1, T, D) of a list of groups."""
    x, wanted = (x_of(list(lists)) for lists in zip(*groups))
    found = codec.decode(codec.encode(x.clone()))
    expect_tensor(found, "numbers", x.shape, f"What the codec of the {what} gives")
    for token, (row, want, got) in enumerate(zip(x[0, 0].tolist(), wanted[0, 0].tolist(), found[0, 0].tolist())):
        for channel in range(D):
            expect(abs(want[channel] - got[channel]) < 0.01,
                   f"In {bits} bits, channel {channel} of token {token} of the {what} is {row[channel]:g}. It is read "
                   f"as {got[channel]:g}; it should be {want[channel]:g}. {hint}")


@check(points=6)
def codec_of_keys(submission, rng):
    """kivi_codecs: a key's grid spans G tokens of one channel"""
    bits, G = rng.choice((2, 3)), 4
    pair = submission.kivi_codecs(bits, 4, D, G)
    try_codec(pair[0], [drawn_group(rng, G, bits) for _ in range(3 * D)],
              lambda groups: torch.tensor(groups).view(3, D, G).transpose(1, 2).reshape(1, 1, 3 * G, D),
              bits, f"keys with G = {G}",
              "A group of the keys is G consecutive tokens of one channel: axis=\"channel\".")


@check(points=6)
def codec_of_values(submission, rng):
    """kivi_codecs: a value's grid spans G channels of one token"""
    bits, G, T = rng.choice((2, 3)), 4, 4
    pair = submission.kivi_codecs(4, bits, D, G)
    try_codec(pair[1], [drawn_group(rng, G, bits) for _ in range(T * D // G)],
              lambda groups: torch.tensor(groups).view(1, 1, T, D), bits, f"values with G = {G}",
              "A group of the values is G consecutive channels of one token, axis=\"token\", in v_bits.")
    pair = submission.kivi_codecs(4, bits, D, 4 * D)
    try_codec(pair[1], [drawn_group(rng, D, bits) for _ in range(T)],
              lambda groups: torch.tensor(groups).view(1, 1, T, D), bits, f"values with G = {4 * D} and d = {D}",
              "A group of values is never longer than a head.")


def try_due(submission, length, n_coded, recent, block, expected, hint):
    found = submission.due(length, n_coded, recent, block)
    expect(found == expected, f"{length} tokens so far, {n_coded} of them quantized; R = {recent}, G = {block}. "
           f"due gives {found}; it should be {expected}. {hint}")


@check(points=5)
def due_blocks(submission, rng):
    """due: whole blocks, and none twice"""
    G = rng.randint(3, 8)
    rest = rng.randint(1, G - 1)
    try_due(submission, 2 * G + rest, 0, 0, G, 2 * G, "A text may come at once: all whole blocks are due.")
    try_due(submission, 3 * G + rest, G, 0, G, 2 * G, "Tokens that are quantized already are not due.")
    try_due(submission, 2 * G + rest, 2 * G, 0, G, 0, "A block that is not full waits.")


@check(points=5)
def due_window(submission, rng):
    """due: the newest R tokens wait"""
    G, R = rng.randint(3, 5), rng.randint(6, 9)
    try_due(submission, 2 * G + R, G, R, G, G, "The window is full, and the block before it, too.")
    try_due(submission, 2 * G + R - 1, G, R, G, 0, "One of the block's tokens is still among the newest R.")
    try_due(submission, rng.randint(1, R - G), 0, R, G, 0, "There are fewer tokens than the window holds.")


@check(points=6)
def true_bits(submission, rng):
    """kivi_bits: codes, scales, zero points and the window"""
    bits, G = rng.choice((2, 4)), rng.choice((4, 8))
    for R, blocks, rest in ((0, rng.randint(2, 5), 0), (rng.randint(3, 9), rng.randint(2, 5), rng.randint(1, 3)),
                            (20, 0, -rng.randint(3, 9))):
        T = G * blocks + R + rest
        C = G * blocks  # quantized
        stored = 2 * C * D * bits + 2 * (C // G) * D * 32 + 2 * (T - C) * D * 16
        expected = stored / (2 * T * D)
        found = submission.kivi_bits(T, D, bits, G, R)
        expect(abs(found - expected) < 1e-6,
               f"T = {T} tokens of d = {D} channels, {bits} bits, G = {G}, R = {R}: {C} tokens are quantized. "
               f"kivi_bits gives {found:.4g}; it should be {expected:.4g}. Each group of G has a scale and a zero "
               "point of 16 bits, each number that waits has 16 bits, and K and V count alike.")


# ---- task 2: the score

@check(points=5)
def size_of_keys(submission, rng):
    """size: the sum of magnitudes"""
    method = submission.OTT(config_of(2), group_size=4)
    keys = normal(rng, 2, 2, 3, D)
    found = method.size(keys.clone())
    expect_tensor(found, "numbers", (2, 2, 3), f"size of keys (2, 2, 3, {D})")
    wanted = [sum(abs(x) for x in row) for row in keys.flatten(0, 2).tolist()]
    for row, want, got in zip(keys.flatten(0, 2).tolist(), wanted, found.flatten().tolist()):
        expect(abs(want - got) < 1e-4, f"The key {shown(row)} has size {got:.4g}; it should be {want:.4g}. It is the "
               "sum over the channels of |K[i, c]|.")


@check(points=3)
def size_in_fp32(submission, rng):
    """size: added up in fp32, though keys have 16 bits"""
    method = submission.OTT(config_of(1), group_size=4)
    large = 8192.0 + 8 * rng.randint(1, 9)
    keys = torch.tensor([[large] * D, [-large] * D]).half()[None, None]  # (1, 1, 2, D)
    found = method.size(keys)
    expect_tensor(found, "numbers", (1, 1, 2), f"size of keys (1, 1, 2, {D})")
    expect(found.tolist() == [[[large * D] * 2]],
           f"A key of {D} times {large:g}, in fp16, has size {found.flatten()[0]:g}; it should be {large * D:g}. "
           "fp16 ends at 65504, and sums are coarse long before that: use keys.float().")


# ---- task 3: keep_keys

@check(points=6)
def first_pool(submission, rng):
    """keep_keys: the first pool is the p smallest keys of those that are due"""
    p = rng.randint(2, 3)
    scores = halves(rng, 8)
    scores[7] = 1.0  # the smallest of all, but not due
    method, cache = layer_of(submission, [[scores]], rng, pool=p)
    tried = f"p = {p}; tokens 0 to 3 are about to be quantized, and of eight tokens the scores are {shown(scores)}."
    found = kept_by(method, cache, 4, tried)[0][0]
    want = smallest(scores[:4], p)
    hint = "Only the n oldest recent tokens compete." if 7 in found else "The smallest scores win."
    expect(found == want, f"{tried} keep_keys keeps {found}; it should keep {want}. {hint}")


@check(points=4)
def heads_and_sequences(submission, rng):
    """keep_keys: each head of each sequence has its own pool"""
    scores = [[halves(rng, 4) for _ in range(2)] for _ in range(2)]
    pairs = rng.sample([(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)], 4)
    for (b, h), pair in zip(((0, 0), (0, 1), (1, 0), (1, 1)), pairs):
        scores[b][h][pair[0]], scores[b][h][pair[1]] = 0.5, 1.0
    method, cache = layer_of(submission, scores, rng)
    tried = f"p = 2; two sequences of two heads, four tokens, with scores {shown(scores)}."
    found = kept_by(method, cache, 4, tried)
    want = [[smallest(head, 2) for head in row] for row in scores]
    expect(found == want, f"{tried} By sequence and head, keep_keys keeps {found}; it should keep {want}.")


@check(points=3)
def ties(submission, rng):
    """keep_keys: of equal scores the earlier token wins"""
    first, second, third = sorted(rng.sample(range(4), 3))
    scores = halves(rng, 8)
    scores[first] = scores[second] = scores[third] = 1.0
    method, cache = layer_of(submission, [[scores]], rng)
    tried = f"p = 2, and four tokens with scores {shown(scores[:4])} are about to be quantized."
    found = kept_by(method, cache, 4, tried)[0][0]
    expect(found == [first, second], f"{tried} keep_keys keeps {found}; it should keep {[first, second]}. Sort with "
           "stable=True: of equal numbers the first comes first.")
    scores = [1.0, 2.0, 9.0, 9.0, 8.0, 8.0, 8.0, 8.0]
    scores[4 + rng.randint(0, 3)] = 2.0
    method, cache = layer_of(submission, [[scores]], rng, n_coded=4, kept=[[[0, 1]]])
    tried = f"Tokens 0 and 1 are the pool; scores are {shown(scores)}, and tokens 4 to 7 are due."
    found = kept_by(method, cache, 4, tried)[0][0]
    expect(found == [0, 1], f"{tried} keep_keys keeps {found}; it should keep [0, 1]: a newcomer of equal score does "
           "not take a place.")


def second_block(rng, newcomers):
    """Scores of eight tokens, of which the first four are quantized and two of them are the pool.

    Returns the scores, the pool (smaller score first), and the positions of the newcomers, tokens whose scores
    are smaller than the pool's, the smallest first.
    """
    scores = halves(rng, 8, low=10.0)
    order = rng.sample(range(4), 4)
    pool, new = order[:2], [4 + i for i in order[2:2 + newcomers]]
    scores[pool[0]], scores[pool[1]] = 5.0, 6.0
    for i, position in enumerate(new):
        scores[position] = 1.0 + i
    return scores, pool, new


def told(scores, pool, more=""):
    return (f"p = 2. Eight tokens have scores {shown(scores)}; tokens 0 to 3 are quantized, {sorted(pool)} are the "
            f"pool{more}, and tokens 4 to 7 are due.")


@check(points=3)
def pool_stays(submission, rng):
    """keep_keys: a pool that no newcomer beats stays"""
    scores, pool, _ = second_block(rng, 0)
    method, cache = layer_of(submission, [[scores]], rng, n_coded=4, kept=[[pool]])
    tried = told(scores, pool)
    found = kept_by(method, cache, 4, tried)[0][0]
    expect(found == sorted(pool), f"{tried} keep_keys keeps {found}; it should keep {sorted(pool)}. The pool's own "
           "keys, `kept_rows`, compete with the new ones.")


@check(points=8)
def eviction(submission, rng):
    """keep_keys: a newcomer takes a place, and who loses it stays in the extra pool"""
    scores, pool, (new,) = second_block(rng, 1)
    method, cache = layer_of(submission, [[scores]], rng, n_coded=4, kept=[[pool]])
    tried = told(scores, pool)
    found = kept_by(method, cache, 4, tried)[0][0]
    tried = f"{tried} keep_keys keeps {found}; it should keep {sorted([*pool, new])}."
    expect(new - 4 not in set(found) - set(pool), f"{tried} The first recent token has position "
           "layer_cache.keys.n_coded = 4, not 0.")
    expect(new in found, f"{tried} Token {new} has the smallest score of all.")
    expect(pool[1] in found, f"{tried} Token {pool[1]} lost its place, and goes to the extra pool: the range of its "
           "group was chosen without it.")
    expect(found == sorted([*pool, new]), tried)
    # once more, from there: the extra pool has a token now
    scores += halves(rng, 4, low=10.0)
    scores[8 + rng.randint(0, 3)] = 0.5
    newest = scores.index(0.5)
    kept = [[[new, pool[0], pool[1]]]]
    method, cache = layer_of(submission, [[scores]], rng, n_coded=8, kept=kept)
    tried = (f"p = 2. Scores are {shown(scores)}; tokens 0 to 7 are quantized, {[new, pool[0]]} are the pool, "
             f"{[pool[1]]} the extra pool, and tokens 8 to 11 are due.")
    found, want = kept_by(method, cache, 4, tried)[0][0], sorted([*pool, new, newest])
    expect(found == want, f"{tried} keep_keys keeps {found}; it should keep {want}. A token never leaves the extra "
           "pool.")


@check(points=6)
def little_room(submission, rng):
    """keep_keys: as many newcomers as the extra pool has room for, the best first"""
    scores, pool, new = second_block(rng, 2)
    old = next(i for i in range(4) if i not in pool)
    method, cache = layer_of(submission, [[scores]], rng, n_coded=4, kept=[[[*pool, old]]], extra=2)
    tried = told(scores, pool, f", [{old}] the extra pool, which takes 2 tokens")
    found, want = kept_by(method, cache, 4, tried)[0][0], sorted([*pool, old, new[0]])
    expect(found == want, f"{tried} keep_keys keeps {found}; it should keep {want}. Both {sorted(new)} have smaller "
           f"scores than the pool, but there is room for one evicted token, so only {new[0]}, the smaller, comes in.")


@check(points=5)
def no_room(submission, rng):
    """keep_keys: with the extra pool full the pool stays; an unused entry takes no room"""
    scores, pool, (new,) = second_block(rng, 1)
    old = next(i for i in range(4) if i not in pool)
    both = [[scores, list(scores)]]  # two heads
    method, cache = layer_of(submission, both, rng, n_coded=4, kept=[[[*pool, old], [*pool, -1]]], extra=1)
    tried = told(scores, pool, f", in both of two heads. The extra pool takes 1 token; in head 0 it is {old}, in "
                 "head 1 the entry is -1, unused")
    found = kept_by(method, cache, 4, tried)[0]
    want = [sorted([*pool, old]), sorted([*pool, new])]
    expect(found[0] == want[0], f"{tried} In head 0 keep_keys keeps {found[0]}; it should keep {want[0]}. The extra "
           "pool is full, so the pool stays as it is.")
    expect(found[1] == want[1], f"{tried} In head 1 keep_keys keeps {found[1]}; it should keep {want[1]}.")


@check(points=3)
def layers_without_a_pool(submission, rng):
    """keep_keys: the first layers have no pool, and p = 0 is no pool"""
    skip = rng.randint(1, 3)
    for layer in range(4):
        scores = halves(rng, 4)
        method, cache = layer_of(submission, [[scores]], rng, layer=layer, skip=skip)
        given = method.keep_keys(cache, 4)
        expect((given is None) == (layer < skip), f"skip_layers = {skip}. In layer {layer} keep_keys gives {given}; "
               f"it should {'be None' if layer < skip else 'keep tokens'}. Layers are counted from 0.")
    method, cache = layer_of(submission, [[scores]], rng, pool=0)
    given = method.keep_keys(cache, 4)
    expect(given is None or given.numel() == 0 or bool((given < 0).all()),
           f"With outlier_num = 0 keep_keys gives {given}; it should be None.")


# ---- all of it

class NoTurn:
    """A rotary embedding that leaves keys as they are."""

    def rotate(self, x, positions):
        return x


def pools(scores, blocks, p, room):
    """What is kept after blocks of tokens: a set of positions. scores: a list."""
    pool, extra = [], []
    for block in blocks:
        for i in sorted(block, key=lambda i: (scores[i], i)):
            if len(pool) < p:
                pool.append(i)
                continue
            worst = max(pool, key=lambda j: (scores[j], j))
            if scores[i] < scores[worst] and len(extra) < room and worst not in block:
                pool.remove(worst)
                pool.append(i)
                extra.append(worst)
    return set(pool + extra)


@check(points=6)
def stream(submission, rng):
    """A stream, token by token: the right keys and values are in full precision"""
    G, R, p, room = 4, rng.randint(2, 3), 2, 3
    method = submission.OTT(config_of(2), group_size=G, recent=R, outlier_num=p, extra_pool=room)
    cache = LayerCache(2, method, rope=NoTurn(), protocol="stream", shared=SimpleNamespace())
    T = 6 * G + R
    keys = torch.stack([torch.stack([normal(rng, T, D) * torch.linspace(2, 0.5, T)[:, None] for _ in range(2)])
                        for _ in range(2)]).half().float()  # (B, Hkv, T, D), ever smaller
    values = normal(rng, 2, 2, T, D).half().float()
    for i in range(T):
        now = slice(i, i + 1)
        cache.update(keys[:, :, now], keys[:, :, now], values[:, :, now], torch.tensor([i]))
    blocks = [range(start, start + G) for start in range(0, T - R, G)]
    tried = f"{T} tokens come one by one; G = {G}, R = {R}, p = {p}, and an extra pool of {room}."
    expect(cache.keys.kept_positions is not None, f"{tried} At the end nothing is in full precision.")
    read_k, read_v = cache.keys.read(), cache.values.read()
    sizes = keys.abs().sum(-1)  # (B, Hkv, T)
    for b in range(2):
        for h in range(2):
            want = pools(sizes[b, h].tolist(), blocks, p, room)
            found = {i for i in cache.keys.kept_positions[b, h].tolist() if i >= 0}
            expect(found == want, f"{tried} At the end head {h} of sequence {b} keeps {sorted(found)}; it should keep "
                   f"{sorted(want)}. Both pools, and the heads, have their own checks.")
            for i in want:
                same = (read_k[b, h, i] == keys[b, h, i]).all() and (read_v[b, h, i] == values[b, h, i]).all()
                expect(same, f"{tried} Token {i}, which is kept, is not read in full precision.")
