"""Assignment 2, the cache: three parts, two protocols, PFN.

The codec rounds to whole numbers, so that what is read can be followed by eye. Where a token is ignored it reads as 99.
"""
import random
from itertools import product
from types import SimpleNamespace
from weakref import WeakKeyDictionary

import pytest
import torch

AXES = "; text, place; text, head, token; text, head, token, channel"  # of tensors
STATE = "what is read|what is held|what the codec ignored"  # the parts of `state`
TOLD = WeakKeyDictionary()  # what a codec or a method was told, call by call, where no file reaches
EIGHT = [0.3, 1.6, 2.2, 3.4, 4.7, 5.1, 6.6, 7.4]


def eights(rng):
    """The handout's eight numbers, and others."""
    return EIGHT, [rng.randint(-99, 99) / 10 for _ in EIGHT]


class Coarse:
    def encode(self, x, ignore=None):
        ignore = torch.zeros(x.shape[:3], dtype=torch.bool) if ignore is None else ignore
        TOLD.setdefault(self, []).append(ignore.long())  # by sequence, head and position
        return CoarseCodes(x.float().round().masked_fill(ignore[..., None], 99).to(torch.int8))

    def decode(self, codes):
        return codes.numbers.float()


class CoarseCodes:
    def __init__(self, numbers):
        self.numbers, self.nbytes = numbers, numbers.nbytes  # (B, H, n, d) int8

    def followed_by(self, other):
        return CoarseCodes(torch.cat([self.numbers, other.numbers], dim=2))


def state(rows):
    """What is read of rows; how many are coded, the recent ones, and the kept ones in the order of their positions; and
    what the codec was told to ignore, call by call."""
    kept = None
    if rows.kept_positions is not None:
        order = rows.kept_positions.int().sort(1)
        index = order.indices[:, None, :, None].expand_as(rows.kept_rows)
        kept = [order.values, rows.kept_rows.gather(2, index)]
    return [rows.read(), [rows.n_coded, rows.recent, kept], TOLD.get(rows.codec, [])]


def keys(numbers, B=1, H=1):
    return torch.tensor(numbers).view(1, 1, -1, 1).expand(B, H, -1, 1)


# The page

def turn(step):
    """A stand-in for RoPE that can be followed by eye: position p adds p steps."""
    return SimpleNamespace(rotate=lambda x, seen=0: x + step * torch.arange(seen, seen + x.shape[2])[:, None])


@pytest.mark.points(16)
def test_page(sub, rng, same):
    """the page: Cache.update, Cache.write, Cache.read"""
    for _ in range(8):
        recent, block, (B, H) = rng.randint(0, 5), rng.randint(2, 4), rng.sizes(2, 2)
        step, seen = rng.randint(1, 4), 0
        cache = sub.Cache(turn(step), recent, block)
        for chunk in (recent + block, block, 1, block - 1, block):
            for layer in range(2):
                tried = f"recent = {recent}, block = {block}; layer {layer}, {chunk} new tokens after {seen}"
                same.call(cache.update, layer, None, *rng.normal(2, B, H, chunk, 4), seen, hint=f"{tried}; "
                          f"position p is rotated by adding {step} p.", names="keys|values")
                held = [[cache.recent[layer, kind], list(map(list, cache.blocks[layer, kind]))] for kind in "kv"]
                names = "held|length|bits, keys|values, recent rows|blocks, block, codes|scale|zero"
                same([held, cache.expect(None)[1]], tried, names=names)
            seen += chunk
        same([held, cache.expect(None)[1], cache.bits()], f"{tried}: and bits of a number", 1e-5, names)


# Task 1

@pytest.mark.points(4)
def test_append(sub, rng, same):
    """append, read: recent rows, in fp16"""
    rows = sub.Rows(Coarse())
    for T, dtype in ((3, torch.float32), (1, torch.bfloat16), (2, torch.float16), (4, torch.float64)):
        same.call(rows.append, rng.normal(2, 3, T, 4).to(dtype), then=lambda _: state(rows),
                  hint=f"The rows are {dtype}.", names=STATE)


@pytest.mark.points(9)
def test_rows_of_eight_numbers(sub, rng, same):
    """quantize, keep, read: eight tokens, step by step"""
    steps = (("quantize", 2), ("keep", [[2, 6]]), ("quantize", 3), ("keep", [[2, 7]]), ("quantize", 3))
    for numbers in eights(rng):
        rows = sub.Rows(Coarse())
        rows.append(keys(numbers))
        for i, (name, argument) in enumerate(steps):
            getattr(rows, name)(torch.tensor(argument) if name == "keep" else argument)
            same(state(rows), f"keys {numbers}, then {steps[:i + 1]}. What is held are n_coded, recent rows and kept "
                 "ones: what `read` gives at their positions, not codes. The codec ignores the kept ones of its block.",
                 names=STATE)


@pytest.mark.points(11)
def test_rows(sub, rng, same):
    """append, quantize, keep, read: in any order, for batches and heads"""
    for _ in range(40):
        B, H, d = rng.randint(1, 3), rng.randint(1, 2), rng.choice((1, 2))
        rows = sub.Rows(Coarse())
        rows.append(rng.normal(B, H, rng.randint(1, 6), d) * 5)
        length, n_coded, kept, done = rows.recent.shape[2], 0, [[] for _ in range(B)], []
        for _ in range(7):
            what = rng.choice(("append", "quantize", "keep"))
            if what == "append":
                new = rng.normal(B, H, rng.randint(1, 3), d) * 5
                length += new.shape[2]
                rows.append(new)
            elif what == "quantize" and n_coded < length:
                n = rng.randint(1, length - n_coded)
                n_coded += n
                rows.quantize(n)
            elif what == "keep":
                free = [sorted({*old, *range(n_coded, length)}) for old in kept]
                p = min(rng.randint(1, 3), *map(len, free))
                if p == 0:
                    continue
                kept = [rng.sample(row, p) for row in free]
                rows.keep(torch.tensor(kept))
            done.append(what if what != "keep" else f"keep {kept}")
            same(state(rows), f"{B} sequences, {H} heads; after {', '.join(done)}", names=STATE)


@pytest.mark.points(6)
def test_nbytes(sub, rng, same):
    """nbytes, quantize: what is held, and no more"""
    same(sub.Rows(Coarse()).nbytes, "nbytes of rows that hold nothing")
    for B, H, n, kept in ((2, 3, 7, [[1, 8, 3], [0, 2, 4]]), (1, 1, 7, [[0, 1, 2]]), (2, 1, 9, [[0, 1, 2]] * 2)):
        rows, d = sub.Rows(Coarse()), rng.randint(3, 12)
        rows.append(rng.normal(B, H, 9, d))
        held = [rows.nbytes]
        rows.keep(torch.tensor(kept))
        held.append(rows.nbytes)
        rows.quantize(n)
        held.append(rows.nbytes)
        tried = f"9 tokens with B = {B}, H = {H}, d = {d}; then {kept} are kept; then {n} are quantized."
        same(held, tried, names="bytes at first|bytes with kept ones|bytes with quantized ones")
        same([type(part) is torch.Tensor and part.untyped_storage().nbytes() <= 2 * part.nbytes
              for part in map(vars(rows).get, ("recent", "kept_rows"))], f"{tried} A slice keeps all memory alive.",
             names="whether `recent` has memory of its own|whether kept rows have memory of their own")


# Task 2

class Script:
    """A method that keeps tokens at random, of those that may be kept, and notes what it was asked. What it keeps does
    not depend on how often it was asked."""

    def __init__(self, rng, recent, block, keeps):
        self.seed, self.recent, self.block, self.keeps = rng.random(), recent, block, keeps
        self.kept = None

    def keep(self, layer, n):
        n_coded, recent = layer.keys.n_coded, [rows.recent.shape[2] for rows in (layer.keys, layer.values)]
        TOLD.setdefault(self, []).append([n, layer.length, n_coded, *recent])
        rng = random.Random(f"{self.seed} {layer.length}")
        if rng.random() >= self.keeps:
            return None
        B = len(layer.keys.recent)
        before = [[]] * B if self.kept is None else self.kept.tolist()
        self.kept = torch.tensor([rng.sample(sorted({*row, *range(n_coded, layer.length)}), 1) for row in before])
        return self.kept


@pytest.mark.points(6)
def test_due(sub, rng, same):
    """due: all under paper; in a stream whole blocks, and never one of the newest"""
    for _ in range(80):
        protocol, recent, block = rng.choice(("paper", "stream", "stream")), rng.randint(0, 5), rng.randint(1, 5)
        layer = sub.Layer(Coarse(), Coarse(), Script(rng, recent, block, 0), protocol)
        coded = block * rng.randint(0, 3)
        layer.keys.n_coded = layer.values.n_coded = coded
        layer.length = coded + rng.randint(0, 14)
        layer.keys.recent = layer.values.recent = torch.zeros(1, 1, layer.length - coded, 1, dtype=torch.float16)
        same(layer.due(), f"due under {protocol} with {layer.length} tokens, {coded} of them coded, recent = {recent}, "
             f"block = {block}")


@pytest.mark.points(5)
def test_update_of_eight_numbers(sub, rng, same):
    """update: what a query reads, under both protocols"""
    for (protocol, chunk), numbers in product((("paper", 8), ("stream", 1), ("stream", 3)), eights(rng)):
        layer = sub.Layer(Coarse(), Coarse(), Script(rng, 1, 3, 0), protocol)
        for part in keys(numbers).split(chunk, dim=2):
            given = layer.update(part, 10 * part)
            same([given, layer.length, layer.keys.n_coded], f"keys {numbers}, {chunk} at a time, under {protocol}, "
                 "recent = 1, block = 3, nothing kept. A stream reads before it quantizes; under paper it is the other "
                 "way round.", names="attention|length|n_coded, keys|values")


@pytest.mark.points(17)
def test_update(sub, rng, same):
    """update: both protocols, chunks, a method that keeps tokens; two layers in turns"""
    for _ in range(25):
        B, H, protocol = rng.randint(1, 3), rng.randint(1, 2), rng.choice(("paper", "stream", "stream"))
        recent, block = rng.randint(0, 4), rng.randint(1, 4)
        layers = [sub.Layer(Coarse(), Coarse(), Script(rng, recent, block, rng.choice((0, 0.5, 0.5, 1))), protocol)
                  for _ in range(2)]
        for i in range(4 if protocol == "paper" else 10):
            layer = layers[i % 2]
            k, v = rng.normal(2, B, H, rng.choice((1, rng.randint(1, 6))), 2) * 9
            tried = f"{protocol}, recent = {recent}, block = {block}, chunk {i // 2} of text {i % 2}"
            same.call(layer.update, k, v, hint=f"{tried}.", names="keys|values")
            same([layer.length, TOLD.get(layer.method, []), state(layer.keys), state(layer.values)], f"After `update` "
                 f"with {k.shape[2]} tokens: {tried}. `keep` gets (n, length, n_coded, recent keys, recent values).",
                 names="length|keep|keys|values")


# Task 3

@pytest.mark.points(6)
def test_pfn(sub, rng, same):
    """PFN.keep: the first N tokens of each sequence"""
    for N in (0, 1, 3, rng.randint(4, 40)):
        method = sub.PFN(N)  # for three texts: it stores nothing about one
        for B, length, n in ((3, 2, 2), (2, 8, 1), (3, rng.randint(8, 40), 5)):
            layer = sub.Layer(Coarse(), Coarse(), method, "stream")
            layer.length = length
            layer.keys.recent = torch.zeros(B, 2, max(n, length - 3), 4, dtype=torch.float16)
            layer.keys.n_coded = layer.values.n_coded = length - layer.keys.recent.shape[2]
            given = method.keep(layer, n)
            same(given if given is None else given.sort(-1).values, f"PFN with N = {N}, asked about {n} of {length} "
                 f"tokens of {B} sequences: positions, sorted")
