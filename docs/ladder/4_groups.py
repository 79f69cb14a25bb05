"""SKVQ on one page: channels of similar range share a grid. "NEW" marks what is new beside 2_window.py.

    python docs/ladder/4_groups.py           in the repository's folder; some seconds on a CPU
    diff docs/ladder/2_window.py docs/ladder/4_groups.py          the same in the package: tinykv/methods/skvq.py

The same channels are large in every token, and a grid as wide as they need is too coarse for the others. So channels
of similar range form a group, which has its own grid in each token. Few numbers are near a range's ends: clipping them
makes finer steps. The first tokens and the newest get most of the attention, so they stay in 16 bits. Perplexity by row
(16 bits: 8.18): 8.76, 8.60, 8.38, 8.43, 8.50, 8.23. First tokens gain nothing here; on SmolLM2, 0.125 nats.

Shapes: B texts; T new tokens, S in all; Hkv heads of d channels, in a row of C = Hkv * d channels; n groups of these.
"""
import sys
from collections import defaultdict

import torch

sys.path.insert(0, __file__.rpartition("docs")[0] or ".")
from tinykv import hf
from tinykv.kmeans import kmeans, nearest
from tinykv.lab.data import load_windows

G = 16  # NEW: channels of a group, on average
FP8 = torch.float8_e4m3fn  # NEW: a number in a byte, with 3 bits of fraction: from 1 to 2 there are 1.125, 1.25, ..


# Code: a number is rounded to one of four levels, and read as scale * code + zero
def grid(x, group, alpha, dtype):  # NEW: x (B, T, C), group (C): of each channel
    groups = [x[..., group == g] for g in range(len(alpha))]  # n of (B, T, channels of the group)
    low = torch.stack([numbers.amin(-1) for numbers in groups], dim=-1)  # (B, T, n)
    high = torch.stack([numbers.amax(-1) for numbers in groups], dim=-1)
    middle = (low + high) / 2  # NEW: the ends are clipped; a share alpha (n) of the range is left, around its middle
    low, high = alpha * low + (1 - alpha) * middle, alpha * high + (1 - alpha) * middle
    scale = ((high - low) / 3).clamp(2 ** -9)  # four levels, three steps. NEW: FP8 has no smaller number above 0
    return scale.to(dtype), low.to(dtype)  # (B, T, n) both. NEW: stored in 16 bits or 8


def encode(x, scale, zero, group):  # numbers (B, T, C) -> codes 0 to 3, four in a byte, (B, T, C/4)
    scale, zero = scale.float()[..., group], zero.float()[..., group]  # NEW: what each channel's group has, (B, T, C)
    code = torch.round((x - zero) / scale)  # (B, T, C)
    code = code.clamp(0, 3).to(torch.uint8)
    c0, c1, c2, c3 = code.chunk(4, dim=-1)  # (B, T, C/4) each
    return c0 | c1 << 2 | c2 << 4 | c3 << 6


def decode(codes, scale, zero, group):  # codes (B, T, C/4) -> numbers (B, T, C)
    code = torch.cat([codes & 3, codes >> 2 & 3, codes >> 4 & 3, codes >> 6], dim=-1)  # (B, T, C)
    return scale.float()[..., group] * code + zero.float()[..., group]


# The cache: attention hands it the keys and values of new tokens, and computes with those that it gets back
class Cache:
    def __init__(self, rope, tables, dtype, n_kept, n_recent):
        self.rope, self.n_kept, self.n_recent = rope, n_kept, n_recent
        self.tables, self.dtype = tables, dtype  # NEW {(layer, "k" or "v"): (group, alpha)}, and the grids' type
        self.blocks = defaultdict(list)  # {(layer, "k" or "v"): [(codes, scale, zero) of each block]}
        self.kept = {}  # NEW {(layer, "k" or "v"): the first tokens, (B, n_kept, C) in 16 bits}
        self.recent = {}  # {(layer, "k" or "v"): (B, r, C) in 16 bits}
        self.length = 0  # S

    def update(self, layer, q, k, v, seen):  # k, v (B, Hkv, T, d), after `seen` others
        # new tokens join the recent ones. NEW: all heads of a token are a row, and keys have no positions yet
        for kind, x in (("k", k), ("v", v)):
            x = x.half().transpose(1, 2).flatten(2)  # (B, T, C)
            before = self.recent.get((layer, kind), x[:, :0])
            self.recent[layer, kind] = torch.cat([before, x], dim=1)  # (B, r, C)
        if self.n_recent == 0:  # NEW When: of a text that comes at once, attention reads the codes
            self.write(layer)
        K, V = self.read(layer, "k", k.shape[3]), self.read(layer, "v", k.shape[3])  # (B, Hkv, S, d) both
        self.length = K.shape[2]
        # When: of a text that grows, it reads the recent tokens before they are quantized
        if self.recent[layer, "k"].shape[1] > self.n_recent:
            self.write(layer)
        return self.rope.rotate(K), V  # NEW: RoPE, which mixes two channels, comes after the codes

    def write(self, layer):  # all recent tokens but the newest
        for kind in "kv":
            recent = self.recent[layer, kind]  # (B, r, C)
            old, self.recent[layer, kind] = recent.tensor_split([recent.shape[1] - self.n_recent], dim=1)
            self.kept.setdefault((layer, kind), old[:, :self.n_kept])  # NEW Keep: the first tokens of the text
            x, (group, alpha) = old.float(), self.tables[layer, kind]  # (B, block, C), and (C), (n)
            scale, zero = grid(x, group, alpha, self.dtype)  # (B, block, n) both
            self.blocks[layer, kind].append((encode(x, scale, zero, group), scale, zero))

    def read(self, layer, kind, d):  # blocks | recent
        decoded = [decode(*block, self.tables[layer, kind][0]) for block in self.blocks[layer, kind]]
        x = torch.cat([*decoded, self.recent[layer, kind].float()], dim=1)  # (B, S, C)
        x[:, :self.n_kept] = self.kept.get((layer, kind), x[:, :self.n_kept])  # NEW: in the place of what codes say
        return x.unflatten(2, (-1, d)).transpose(1, 2)  # (B, Hkv, S, d)

    def observe(self, layer, output):  # the model shows it each layer's output
        pass

    def expect(self, tokens):  # the model asks which tokens are new, and how many the cache already holds
        return tokens, self.length

    def bits(self):  # of a number: codes and grids in blocks, and 16 bits in the window and, NEW, of kept tokens
        blocks = [block for blocks in self.blocks.values() for block in blocks]
        coded = 8 * sum(x.nbytes for block in blocks for x in block) / sum(4 * codes.numel() for codes, *_ in blocks)
        share = max(0, 1.5 * self.n_recent - 0.5) / self.length  # in the window, on average: it grows to twice its size
        kept = 16 + 32 / self.kept[0, "k"].shape[2]  # 4 bytes for the place of a row
        return coded * (1 - share) + 16 * share + kept * self.n_kept / self.length


# Calibration: NEW: groups (C) and their clips (n), from tokens x (B, T, C) of other texts that are not kept
def calibrate(x, similar, clipped, dtype):
    group = torch.arange(x.shape[2]) // G  # (C): neighbours
    if similar:
        # k-means. A channel is a point: its smallest and its largest number. Begin with n points as centroids. Then
        # assign each point to the nearest centroid, and move each centroid to the mean of its points, until none moves
        points = torch.stack([x.amin((0, 1)), x.amax((0, 1))], dim=-1)[None]  # (1, C, 2)
        centroids = kmeans(points, x.shape[2] // G, tries=10)  # (1, n, 2): the best of ten beginnings
        group = nearest(points, centroids)[0]  # (C)
    # of the shares 1.00, 0.98, .. 0.60 each group takes that of the smallest error
    alphas, errors = (torch.arange(100, 58 if clipped else 98, -2) / 100).half().float(), []
    for alpha in alphas:
        scale, zero = grid(x, group, alpha.expand(group.max() + 1), dtype)  # (B, T, n) both
        read = decode(encode(x, scale, zero, group), scale, zero, group)  # (B, T, C)
        error = (x - read).square().sum((0, 1))  # (C)
        errors.append(torch.zeros(scale.shape[2]).index_add(0, group, error))  # (n): summed over a group's channels
    return group, alphas[torch.stack(errors).argmin(0)]


# The table: perplexity of 16 texts, or as many as the command says
torch.set_grad_enabled(False)
model, tokenizer = hf.load(hf.EMBEDDED)
texts = int(sys.argv[1]) if sys.argv[1:] else 16
test = load_windows("tales", tokenizer, 1024, texts, "test").tokens  # (B, T)
other = load_windows("tales", tokenizer, 1024, 4, "calibration").tokens  # (B, T)
exact = Cache(model.rope, None, None, 0, torch.inf)  # all tokens stay recent
model(other, exact)
for name, similar, clipped, dtype, n_kept, n_recent in (  # groups by range? clipped? grids' type; kept, recent
        ("neighbours", False, False, torch.half, 0, 0), ("similar", True, False, torch.half, 0, 0),
        ("clipped", True, True, torch.half, 0, 0), ("fp8", True, True, FP8, 0, 0),
        ("first", True, True, FP8, 5, 0), ("window", True, True, FP8, 5, 128)):
    tables = {at: calibrate(x[:, n_kept:].float(), similar, clipped, dtype) for at, x in exact.recent.items()}
    cache = Cache(model.rope, tables, dtype, n_kept, n_recent)
    logits = torch.cat([model(tokens, cache) for tokens in test.split(n_recent or 1024, dim=1)], dim=1)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), test[:, 1:].flatten())
    print(f"{name:10} {loss.exp():7.3f} {cache.bits():6.2f}")
