"""The cache of 2_window.py with groups of channels: SKVQ. "NEW" marks what is new.

    python docs/ladder/4_groups.py           in the repository's folder; half a minute on a CPU
    diff docs/ladder/2_window.py docs/ladder/4_groups.py

All heads of a token are a row of C channels. Each line that this prints adds an idea: G neighbours share a grid
(perplexity 8.426; 16 bits have 8.178); channels of like ranges do, as k-means finds in other texts (8.332); ranges are
clipped (8.258); a grid takes 2 bytes, not 4 (8.279); the 128 newest tokens wait (8.220), the first five stay (8.248).

Shapes: B texts; T new tokens, S in all; C channels of a row in n groups; Hkv heads of keys and values, d channels each.
"""
import sys
from collections import defaultdict

import torch

sys.path.insert(0, ".")
from tinykv import hf
from tinykv.data import load_windows
from tinykv.kmeans import kmeans, nearest

G, BLOCK = 16, 16  # NEW: channels of a group, on average; and tokens that are quantized at a time
FP8 = torch.float8_e4m3fn  # NEW: a sign, four bits of exponent, three of mantissa: 1.125, 1.25, ..


# Code: a number is rounded to one of four levels, and read as scale * code + zero. NEW: a grid for each token and group
def ranges(x, group):  # NEW: of numbers (B, T, C), whose groups are (C), the smallest and the largest: (B, T, n) both
    groups = [x[..., group == g] for g in range(group.max() + 1)]  # n of (B, T, channels of the group)
    return torch.stack([g.amin(-1) for g in groups], -1), torch.stack([g.amax(-1) for g in groups], -1)


def grid(low, high, alpha, dtype):  # NEW: a share alpha (n) of the range around its middle; the rest is clipped
    low, high = (alpha * end + (1 - alpha) * (low + high) / 2 for end in (low, high))
    scale = ((high - low) / 3).clamp(2 ** -9)  # four levels, three steps; NEW: FP8 has no smaller number above 0
    return scale.to(dtype), low.to(dtype)  # NEW: stored in 16 bits or 8


def encode(x, scale, zero, group):  # numbers (B, T, C) -> codes 0 to 3, four in a byte, (B, T, C/4)
    code = torch.round((x - zero.float()[..., group]) / scale.float()[..., group])  # (B, T, C)
    code = code.clamp(0, 3).to(torch.uint8)
    c0, c1, c2, c3 = code.chunk(4, dim=-1)  # (B, T, C/4) each
    return c0 | c1 << 2 | c2 << 4 | c3 << 6


def decode(codes, scale, zero, group):  # codes (B, T, C/4) -> numbers (B, T, C)
    code = torch.cat([codes & 3, codes >> 2 & 3, codes >> 4 & 3, codes >> 6], dim=-1)  # (B, T, C)
    return scale.float()[..., group] * code + zero.float()[..., group]


# The cache: attention hands it the keys and values of new tokens, and computes with those that it gets back
class Cache:
    def __init__(self, rope, tables, dtype, recent, n_kept):
        self.rope, self.n_recent, self.n_kept = rope, recent, n_kept
        self.tables, self.dtype = tables, dtype  # NEW {(layer, "k" or "v"): (group (C), alpha (n))}
        self.blocks = defaultdict(list)  # {(layer, "k" or "v"): [(codes, scale, zero) of each block]}
        self.kept = {}  # NEW {(layer, "k" or "v"): (B, n_kept, C) in 16 bits}
        self.recent = {}  # {(layer, "k" or "v"): (B, r, C) in 16 bits}
        self.length = 0  # S

    def update(self, layer, q, k, v, seen):  # k, v (B, Hkv, T, d), after `seen` others
        # new tokens join the recent ones. NEW: keys before RoPE, which would mix a channel with another
        for kind, x in (("k", k), ("v", v)):
            x = x.half().transpose(1, 2).flatten(2)  # (B, T, C)
            self.recent[layer, kind] = torch.cat([self.recent.get((layer, kind), x[:, :0]), x], dim=1)  # (B, r, C)
        # attention reads before anything is quantized
        K, V = (self.read(layer, kind).unflatten(-1, (-1, k.shape[-1])).transpose(1, 2) for kind in "kv")
        self.length = K.shape[2]  # K and V (B, Hkv, S, d)
        # When: as soon as there is a block besides the tokens that stay recent (no chunk goes beyond)
        if self.recent[layer, "k"].shape[1] == self.n_recent + BLOCK:
            self.write(layer, "k")
            self.write(layer, "v")
        return self.rope.rotate(K), V  # NEW: RoPE gives keys their positions

    def write(self, layer, kind):  # the oldest `block` of the recent tokens
        old, recent = self.recent[layer, kind].tensor_split([BLOCK], dim=1)
        self.kept.setdefault((layer, kind), old[:, :self.n_kept])  # NEW Keep: a text's first tokens
        x = old.float()  # (B, block, C)
        group, alpha = self.tables[layer, kind]
        scale, zero = grid(*ranges(x, group), alpha, self.dtype)  # (B, block, n) both
        self.blocks[layer, kind].append((encode(x, scale, zero, group), scale, zero))
        self.recent[layer, kind] = recent

    def read(self, layer, kind):  # blocks | recent
        x = self.recent[layer, kind].float()  # (B, r, C)
        if (layer, kind) in self.kept:  # NEW: all blocks at once, as a token's grids are its own
            codes, scale, zero = (torch.cat(tensors, dim=1) for tensors in zip(*self.blocks[layer, kind]))
            x = torch.cat([decode(codes, scale, zero, self.tables[layer, kind][0]), x], dim=1)  # (B, S, C)
            x[:, :self.n_kept] = self.kept[layer, kind].float()  # in the place of what their codes say
        return x

    def observe(self, layer, output):  # the model shows it each layer's output
        pass

    def expect(self, tokens):  # the model asks: which of a text's tokens are new, and how many does it hold?
        return tokens, self.length

    def bits(self):  # of a number: codes and grids in blocks, and 16 bits in the window
        blocks = [block for blocks in self.blocks.values() for block in blocks]
        coded = 8 * sum(x.nbytes for block in blocks for x in block) / sum(4 * codes.numel() for codes, *_ in blocks)
        share = (self.n_recent + (BLOCK - 1) / 2) / self.length  # in the window, on average: it grows by a block
        kept = 16 + 32 / self.recent[0, "k"].shape[-1]  # NEW: with 4 bytes for the token's place
        return coded * (1 - share) + 16 * share + kept * self.n_kept / self.length


# Calibration: NEW: groups, and how far each is clipped, from the tokens that are not kept, in other texts
def calibrate(x, regroup, clip, dtype):  # x (B, T, C)
    group = torch.arange(x.shape[-1]) // G  # (C): neighbours
    if regroup:
        ends = torch.stack([x.amin((0, 1)), x.amax((0, 1))], dim=-1)[None]  # (1, C, 2): each channel is a point
        group = nearest(ends, kmeans(ends, len(group) // G, tries=10))[0]  # (C)
    low, high = ranges(x, group)  # (B, T, n) both
    alphas = torch.tensor([percent / 100 for percent in range(100, 58 if clip else 98, -2)]).half().float()
    errors = []
    for alpha in alphas:
        of_grid = *grid(low, high, alpha, dtype), group
        error = (x - decode(encode(x, *of_grid), *of_grid)).square().sum((0, 1))  # (C)
        errors.append(torch.zeros(low.shape[-1]).index_add(0, group, error))  # (n)
    return group, alphas[torch.stack(errors).argmin(0)]  # (C), (n): the alpha of the smallest error


# The table: perplexity of 16 texts, or as many as the command says
torch.set_grad_enabled(False)
model, tokenizer = hf.load("tinykv/assets/tales")
texts = int(sys.argv[1]) if sys.argv[1:] else 16
test = load_windows("tales", tokenizer, 1024, texts, "test").tokens  # (B, T)
other = load_windows("tales", tokenizer, 1024, 16, "calibration").tokens  # (B, T)

exact = Cache(model.rope, None, None, torch.inf, 0)  # all tokens stay recent
model(other, exact)
for name, regroup, clip, dtype, recent, n_kept in (
        ("groups", False, False, torch.half, 0, 0), ("alike", True, False, torch.half, 0, 0),
        ("clipped", True, True, torch.half, 0, 0), ("fp8", True, True, FP8, 0, 0),
        ("window", True, True, FP8, 128, 0), ("first", True, True, FP8, 128, 5)):
    tables = {at: calibrate(x[:, n_kept:].float(), regroup, clip, dtype) for at, x in exact.recent.items()}
    cache = Cache(model.rope, tables, dtype, recent, n_kept)
    # read in chunks that end where a block is full, which is faster than token by token and computes the same
    first, rest = test.split([recent + BLOCK, 1024 - recent - BLOCK], dim=1)
    logits = torch.cat([model(tokens, cache) for tokens in (first, *rest.split(BLOCK, dim=1))], dim=1)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), test[:, 1:].flatten())
    print(f"{name:8} {loss.exp():7.3f} {cache.bits():6.2f}")
