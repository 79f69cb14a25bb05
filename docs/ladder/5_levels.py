"""KVQuant on one page: levels where the numbers are, and outliers apart. "NEW" marks what is new beside 1_sinks.py.

    python docs/ladder/5_levels.py           in the repository's folder; some seconds on a CPU
    diff docs/ladder/1_sinks.py docs/ladder/5_levels.py           the same in the package: tinykv/methods/kvquant.py

Most numbers are near the middle of their range, so four levels at equal distances are too coarse there. K-means places
them where the numbers are, and where an error costs most. A few numbers are far outside and would stretch the range of
all others. These outliers are stored apart, in 32 bits: 1 in 32 here, because a row has 32 numbers (the paper: 1 in
100). Perplexity by row (16 bits: 8.18): 9.14, 8.54, 8.50, 8.27 and 8.30. A kept first token gains nothing. This page
leaves out Q-Norm, widths other than 2 bits, a text that grows, and the floor under the range of a constant channel.
Shapes: B texts, T tokens each; Hkv heads of d channels, in a row of C = Hkv * d channels.
"""
import sys

import torch

sys.path.insert(0, __file__.rpartition("docs")[0] or ".")
from tinykv import hf
from tinykv.kmeans import kmeans
from tinykv.lab.data import load_windows


# Code: NEW: the middle of a range becomes 0, its ends -1 and 1. A number is rounded to the nearest of four levels there
def encode(normal, levels):  # numbers from -1 to 1 (B, T, C) -> codes 0 to 3, four in a byte, (B, T, C/4)
    borders = (levels[1:] + levels[:-1]) / 2  # NEW: (3)
    code = torch.bucketize(normal, borders).to(torch.uint8)  # NEW: (B, T, C): how many borders lie below
    c0, c1, c2, c3 = code.chunk(4, dim=-1)  # (B, T, C/4) each
    return c0 | c1 << 2 | c2 << 4 | c3 << 6


def decode(codes, levels):  # codes (B, T, C/4) -> numbers from -1 to 1 (B, T, C)
    code = torch.cat([codes & 3, codes >> 2 & 3, codes >> 4 & 3, codes >> 6], dim=-1)  # (B, T, C)
    return levels[code.int()]  # NEW


def range_of(x, ends, share, first):  # NEW: numbers (B, T, C) -> middle and half of their ranges, and which are kept
    if ends is None:  # values: the outliers of a token are a share of its numbers, those furthest from their median
        distance = (x - x.median(-1, keepdim=True).values).abs()  # (B, T, C)
        order = distance.sort(descending=True, stable=True).indices[..., :round(share * x.shape[2])]
        kept = torch.zeros_like(x, dtype=torch.bool).scatter(-1, order, True)  # (B, T, C)
        low = x.masked_fill(kept, torch.inf).amin(-1, keepdim=True)  # (B, T, 1)
        high = x.masked_fill(kept, -torch.inf).amax(-1, keepdim=True)  # (B, T, 1)
    else:  # keys: the ends of a channel's range are known, from other texts
        low, high = ends  # (C) both
    middle, half = ((low + high) / 2).half().float(), ((high - low) / 2).half().float()  # stored in 16 bits
    if ends is not None:  # the outliers of a channel lie outside its range
        kept = ((x - middle).abs() > half) & (share > 0)  # (B, T, C)
    kept[:, :first] = True  # Keep
    return middle, half, kept


# The cache: attention stores a text's keys and values in it, and then uses what it reads back
class Cache:
    def __init__(self, rope, tables, share, first):
        self.rope, self.tables = rope, tables  # tables {(layer, "k" or "v"): (ends (C) of keys or None, levels (4))}
        self.share, self.first = share, first  # NEW: which share of the numbers is outliers, how many tokens are kept
        self.stored = {}  # {(layer, "k" or "v"): codes, middle and half, where numbers in 16 bits are, and these}

    def update(self, layer, q, k, v, seen):  # k, v (B, Hkv, T, d)
        for kind, x in (("k", k), ("v", v)):
            self.write(layer, kind, x.half().transpose(1, 2).flatten(2))  # (B, T, C). NEW: all heads are one row
        # attention reads what is stored, even of the token that asks
        K, V = self.read(layer, "k", k.shape[3]), self.read(layer, "v", k.shape[3])  # (B, Hkv, T, d) both
        return self.rope.rotate(K), V  # RoPE gives keys their positions

    def write(self, layer, kind, x):  # x (B, T, C) in 16 bits
        ends, levels = self.tables[layer, kind]
        middle, half, kept = range_of(x.float(), ends, self.share, self.first)
        codes = encode((x.float() - middle) / half, levels)  # (B, T, C/4)
        where = kept.nonzero(as_tuple=True)  # text, token and channel of the n numbers that stay in 16 bits
        self.stored[layer, kind] = codes, middle, half, where, x[where]  # the last (n)

    def read(self, layer, kind, d):
        codes, middle, half, where, numbers = self.stored[layer, kind]
        x = half * decode(codes, self.tables[layer, kind][1]) + middle  # (B, T, C)
        x[where] = numbers.float()  # in the place of what their codes say
        return x.unflatten(2, (-1, d)).transpose(1, 2)  # (B, Hkv, T, d)

    def observe(self, layer, output):  # the model shows it each layer's output
        pass

    def expect(self, tokens):  # the model asks which tokens are new, and how many the cache already holds
        return tokens, 0

    def bits(self):  # of a number
        held, (B, T, _) = 0, self.stored[0, "k"][0].shape
        for (_, kind), (codes, _, _, (_, token, _), numbers) in self.stored.items():
            held += codes.nbytes + numbers.nbytes + 4 * B * self.first  # with 4 bytes for the place of a kept token
            held += 4 * B * T * (kind == "v")  # NEW: a token's middle and half
            # NEW: 2 bytes for each outlier's channel (with its number: 32 bits), and 4 a token, for where its list ends
            held += (2 * (token >= self.first).sum() + 4 * B * T) * (self.share > 0)
        return 8 * held / sum(4 * codes.numel() for codes, *_ in self.stored.values())  # four numbers in a byte


# Calibration: NEW: the ranges of keys, and the levels, from other texts
class Exact(Cache):  # holds these texts as they are
    def update(self, layer, q, k, v, seen):
        for kind, x in (("k", k), ("v", v)):  # (B, Hkv, T, d)
            x.requires_grad_().retain_grad()  # by the gradient of the loss we know what an error of a number costs
            self.stored[layer, kind] = x
        return self.rope.rotate(k), v


def calibrate(kind, x, place, weigh, share, first):  # x (B, Hkv, T, d), with its gradient -> what `Cache.tables` has
    gradient = x.grad.transpose(1, 2).flatten(2)  # (B, T, C)
    x, ends = x.detach().half().float().transpose(1, 2).flatten(2), None  # (B, T, C): what would be coded
    if kind == "k":  # half of the outliers lie below a channel's range, and half above
        ends = x[:, first:].flatten(0, 1).quantile(torch.tensor([share / 2, 1 - share / 2]), dim=0)  # (2, C)
    levels = torch.linspace(-1, 1, 4)
    if place:
        middle, half, kept = range_of(x, ends, share, first)
        normal = ((x - middle) / half)[~kept].double()  # (n)
        # an error e of `normal` is half * e in x, and costs by the gradient there: the weight is that product's square
        weight = (gradient * half)[~kept].double().square() if weigh else torch.ones_like(normal)  # (n)
        # k-means, as in 4_groups.py, of the weighted means of 1024 bins, as there are too many numbers
        bins = ((normal + 1) * 512).long().clamp(0, 1023)  # (n)
        weights = torch.bincount(bins, weight, 1024)  # (1024)
        means, some = torch.bincount(bins, weight * normal, 1024) / weights, weights > 0  # (1024) both
        levels = kmeans(means[None, some, None], 4, weights[None, some] / weights.max(), iterations=100, tries=40)
    return ends, levels.flatten().sort().values.half().float()


# The table: perplexity of 16 texts, or as many as the command says
torch.set_grad_enabled(False)
model, tokenizer = hf.load(hf.EMBEDDED)
texts = int(sys.argv[1]) if sys.argv[1:] else 16
test = load_windows("tales", tokenizer, 1024, texts, "test").tokens  # (B, T)
other = load_windows("tales", tokenizer, 1024, 16, "calibration").tokens  # (B, T)
exact = Exact(model.rope, None, 0, 0)
with torch.enable_grad():
    logits = model(other, exact)  # (B, T, vocabulary)
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), other[:, 1:].flatten()).backward()
for name, place, weigh, share, first in (  # levels by k-means? by cost (fisher-range)? outliers, first tokens
        ("equal", False, False, 0, 0), ("k-means", True, False, 0, 0), ("fisher", True, True, 0, 0),
        ("outliers", True, True, 1 / 32, 0), ("first", True, True, 1 / 32, 1)):
    tables = {at: calibrate(at[1], x, place, weigh, share, first) for at, x in exact.stored.items()}
    cache = Cache(model.rope, tables, share, first)
    logits = model(test, cache)  # (B, T, vocabulary)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), test[:, 1:].flatten())
    print(f"{name:8} {loss.exp():7.3f} {cache.bits():6.2f}")
