"""The cache of 1_sinks.py with levels where the numbers are, and outliers apart: KVQuant. "NEW" marks what is new.

    python docs/ladder/5_levels.py           in the repository's folder; some seconds on a CPU
    diff docs/ladder/1_sinks.py docs/ladder/5_levels.py

All keys of a layer share four levels between -1 and 1, and so do its values; each number's range becomes -1 to 1. That
of a key is its channel's, from other texts; that of a value is its token's own. Each line that this prints adds an
idea: levels of equal distance (perplexity 9.140; 16 bits have 8.178); k-means places them (8.544), where each number
weighs what its error would cost (8.504); 1 in 32 is an outlier in 16 bits (8.268); so is the first token (8.304).

Shapes: B texts, T tokens each, Hkv heads of keys and values, d channels; C = Hkv * d channels of a token's row.
"""
import sys

import torch

sys.path.insert(0, ".")
from tinykv import hf
from tinykv.data import load_windows
from tinykv.kmeans import kmeans


# Code: a number is rounded to one of four levels. NEW: they lie anywhere from -1 to 1, and its range becomes that
def encode(normal, levels):  # numbers from -1 to 1 (B, T, C) -> codes 0 to 3, four in a byte, (B, T, C/4)
    borders = (levels[1:] + levels[:-1]) / 2  # (3)
    code = torch.bucketize(normal, borders).to(torch.uint8)  # (B, T, C): how many borders lie below
    c0, c1, c2, c3 = code.chunk(4, dim=-1)  # (B, T, C/4) each
    return c0 | c1 << 2 | c2 << 4 | c3 << 6


def decode(codes, levels):  # codes (B, T, C/4) -> numbers from -1 to 1 (B, T, C)
    code = torch.cat([codes & 3, codes >> 2 & 3, codes >> 4 & 3, codes >> 6], dim=-1)  # (B, T, C)
    return levels[code.int()]


def range_of(x, ends, share):  # NEW: numbers (B, T, C) -> middle and half of their range; outliers (B, T, C)
    if ends is not None:  # keys: each channel's
        low, high = ends  # (C) both
    else:  # values: what a token has without the numbers that are furthest from its median
        distance = (x - x.median(-1, keepdim=True).values).abs()  # (B, T, C)
        order = distance.sort(descending=True, stable=True).indices  # (B, T, C); of equals, the first
        furthest = order[..., :round(share * x.shape[-1])]  # (B, T, one in 32)
        outlier = torch.zeros_like(x, dtype=torch.bool).scatter(-1, furthest, True)  # (B, T, C)
        low = x.masked_fill(outlier, torch.inf).amin(-1, keepdim=True)  # (B, T, 1)
        high = x.masked_fill(outlier, -torch.inf).amax(-1, keepdim=True)  # (B, T, 1)
    middle, half = ((low + high) / 2).half().float(), ((high - low) / 2).half().float()  # stored in 16 bits
    if ends is not None:
        outlier = ((x - middle).abs() > half) & (share > 0)  # (B, T, C)
    return middle, half, outlier


# The cache: attention stores a text's keys and values in it, and then uses what it reads back
class Cache:
    def __init__(self, rope, tables, share, first):
        self.rope, self.tables, self.share, self.first = rope, tables, share, first
        self.stored = {}  # {(layer, "k" or "v"): codes, middle and half, where numbers in 16 bits are, and these}

    def update(self, layer, q, k, v, seen):  # k, v (B, Hkv, T, d)
        self.write(layer, "k", k.half().transpose(1, 2).flatten(2))  # (B, T, C). NEW: all heads of a token are one row
        self.write(layer, "v", v.half().transpose(1, 2).flatten(2))
        # attention reads what is stored, even of the token that asks
        K, V = (self.read(layer, kind).unflatten(-1, (-1, k.shape[-1])).transpose(1, 2) for kind in "kv")
        return self.rope.rotate(K), V  # (B, Hkv, T, d) both. RoPE gives keys their positions

    def write(self, layer, kind, x):  # x (B, T, C) in 16 bits
        ends, levels = self.tables[layer, kind]
        middle, half, kept = range_of(x.float(), ends, self.share)
        kept[:, :self.first] = True  # Keep
        codes = encode((x.float() - middle) / half, levels)  # (B, T, C/4)
        where = kept.nonzero(as_tuple=True)  # text, token and channel of the n numbers that stay in 16 bits
        self.stored[layer, kind] = codes, middle, half, where, x[where]  # the last (n)

    def read(self, layer, kind):
        codes, middle, half, where, numbers = self.stored[layer, kind]
        x = half * decode(codes, self.tables[layer, kind][1]) + middle  # (B, T, C)
        x[where] = numbers.float()  # in the place of what their codes say
        return x

    def observe(self, layer, output):  # the model shows it each layer's output
        pass

    def expect(self, tokens):  # the model asks: which of a text's tokens are new, and how many does it hold?
        return tokens, 0

    def bits(self):  # of a number: codes and those in 16 bits
        held = 0
        for (_, kind), (codes, _, _, (_, token, _), numbers) in self.stored.items():
            B, T, _ = codes.shape
            # NEW: 2 bytes for an outlier's channel; 4 for where a kept token is, or a token's outliers end; 4: a range
            held += codes.nbytes + numbers.nbytes + 2 * (token >= self.first).sum() + 4 * B * self.first
            held += 4 * B * T * ((self.share > 0) + (kind == "v"))
        return 8 * held / sum(4 * codes.numel() for codes, *_ in self.stored.values())  # four numbers in a byte


# Calibration: NEW: the channels' ranges, and the levels, in other texts
class Exact(Cache):  # holds these texts as they are
    def update(self, layer, q, k, v, seen):
        for kind, x in (("k", k), ("v", v)):  # (B, Hkv, T, d)
            x.requires_grad_().retain_grad()  # the loss's gradient says what an error of each number would cost
            self.stored[layer, kind] = x
        return self.rope.rotate(k), v


def calibrate(kind, x, place, weigh, share, first):  # x (B, Hkv, T, d), with its gradient
    gradient = x.grad.transpose(1, 2).flatten(2)  # (B, T, C)
    x = x.detach().half().float().transpose(1, 2).flatten(2)  # (B, T, C): what would be coded
    # half of the outliers are below a channel's range, and half above
    ends = x[:, first:].flatten(0, 1).quantile(torch.tensor([share / 2, 1 - share / 2]), dim=0) if kind == "k" else None
    middle, half, kept = range_of(x, ends, share)
    kept[:, :first] = True
    # k-means of the normalized numbers, in 1024 bins, each with its weight: Fisher information, and the error's size
    normal = ((x - middle) / half)[~kept].double()  # (n)
    weight = (gradient * half)[~kept].double().square() if weigh else torch.ones_like(normal)  # (n)
    bins = ((normal + 1) * 512).long().clamp(0, 1023)  # (n)
    weights = torch.bincount(bins, weight, 1024)
    means, filled = torch.bincount(bins, weight * normal, 1024) / weights, weights > 0  # (1024) both
    points, weights = means[None, filled, None], weights[None, filled] / weights.max()
    levels = kmeans(points, 4, weights, iterations=100, tries=40)[0, :, 0] if place else torch.linspace(-1, 1, 4)
    return ends, levels.sort().values.half().float()


# The table: perplexity of 16 texts, or as many as the command says
torch.set_grad_enabled(False)
model, tokenizer = hf.load("tinykv/assets/tales")
texts = int(sys.argv[1]) if sys.argv[1:] else 16
test = load_windows("tales", tokenizer, 1024, texts, "test").tokens  # (B, T)
other = load_windows("tales", tokenizer, 1024, 16, "calibration").tokens  # (B, T)

exact = Exact(model.rope, None, 0, 0)
with torch.enable_grad():
    logits = model(other, exact)  # (B, T, vocabulary)
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), other[:, 1:].flatten()).backward()
for name, place, weigh, share, first in (("grid", False, False, 0, 0), ("levels", True, False, 0, 0),
                                         ("fisher", True, True, 0, 0), ("outliers", True, True, 1 / 32, 0),
                                         ("first", True, True, 1 / 32, 1)):
    tables = {at: calibrate(at[1], x, place, weigh, share, first) for at, x in exact.stored.items()}
    cache = Cache(model.rope, tables, share, first)
    logits = model(test, cache)  # (B, T, vocabulary)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), test[:, 1:].flatten())
    print(f"{name:8} {loss.exp():7.3f} {cache.bits():6.2f}")
