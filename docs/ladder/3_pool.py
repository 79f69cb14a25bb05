"""OTT on one page: a pool of tokens with small keys stays in 16 bits. "NEW" marks what is new beside 2_window.py.

    python docs/ladder/3_pool.py             in the repository's folder; some seconds on a CPU
    diff docs/ladder/2_window.py docs/ladder/3_pool.py            the same in the package: tinykv/methods/ott.py

In a channel where all other keys are large, a key near 0 widens the grid for the whole block. Such a key is small in
all of its channels, so the sum of their magnitudes finds it. Each head keeps a pool of the smallest keys so far, with
their values: they stay in 16 bits, and grids are made without them.
A block about to be quantized competes with the pool for its few places, each of which costs 16 bits a number. A token
that is driven out also stays in 16 bits, because its block's grid was made without it. OTT has 32 such places; 18 would
do here. Pools of no token (KIVI), one or three lose alike (8.351, 8.356, 8.337); on SmolLM2, three save 0.247 nats.

Shapes: B texts; T new tokens, S in all, C of them no longer recent; Hkv heads of keys and values, d channels.
"""
import sys
from collections import defaultdict

import torch

sys.path.insert(0, __file__.rpartition("docs")[0] or ".")
from tinykv import hf
from tinykv.lab.data import load_windows


# Code: a number is rounded to one of four levels, and read as scale * code + zero
def grid(low, high):  # the smallest and the largest of the numbers that share it
    scale = ((high - low) / 3).clamp(1e-5)  # four levels, three steps; more than 0, if all numbers are the same
    return scale.half(), low.half()  # scale and zero are stored in 16 bits


def encode(x, scale, zero):  # numbers (B, Hkv, T, d) -> codes 0 to 3, four in a byte, (B, Hkv, T, d/4)
    code = torch.round((x - zero) / scale)  # (B, Hkv, T, d)
    code = code.clamp(0, 3).to(torch.uint8)
    c0, c1, c2, c3 = code.chunk(4, dim=-1)  # (B, Hkv, T, d/4) each
    return c0 | c1 << 2 | c2 << 4 | c3 << 6


def decode(codes, scale, zero):  # codes (B, Hkv, T, d/4) -> numbers (B, Hkv, T, d)
    code = torch.cat([codes & 3, codes >> 2 & 3, codes >> 4 & 3, codes >> 6], dim=-1)  # (B, Hkv, T, d)
    return scale.float() * code + zero


def grid_of(x, kind, kept):  # the grids of a block, from its own numbers. x (B, Hkv, block, d), kept (B, Hkv, block)
    # keys: a grid for each channel, (B, Hkv, 1, d); values: one for each token, (B, Hkv, block, 1)
    dim = 2 if kind == "k" else 3
    # NEW: a kept key does not widen the grids that it shares; a value shares none
    out = kept[..., None] & (kind == "k")  # (B, Hkv, block, 1)
    low, high = x.masked_fill(out, torch.inf), x.masked_fill(out, -torch.inf)  # (B, Hkv, block, d) both
    return grid(low.amin(dim, keepdim=True), high.amax(dim, keepdim=True))


# Keep: NEW: a method marks the tokens of a layer that stay in 16 bits, in kept (B, Hkv, C): True where they did so far
def ott(cache, layer, kept):  # the smallest keys so far
    if layer >= 2:  # the first two layers have no such keys
        keys = cache.read(layer, "k")[:, :, :kept.shape[2]]  # (B, Hkv, C, d)
        # those that are in 16 bits now: kept, or in the block that is about to be quantized
        rival = kept.clone()  # (B, Hkv, C)
        rival[:, :, -cache.block:] = True
        size = keys.abs().sum(-1).masked_fill(~rival, torch.inf)  # (B, Hkv, C)
        smallest = size.topk(cache.pool, largest=False).indices  # (B, Hkv, pool)
        kept.scatter_(2, smallest, True)


# The cache: attention hands it the keys and values of new tokens, and computes with those that it gets back
class Cache:
    def __init__(self, rope, pool, recent, block):
        self.rope, self.pool, self.n_recent, self.block = rope, pool, recent, block
        self.blocks = defaultdict(list)  # {(layer, "k" or "v"): [(codes, scale, zero) of each block]}
        self.recent = {}  # {(layer, "k" or "v"): (B, Hkv, r, d) in 16 bits}
        self.kept, self.rows = {}, {}  # NEW {layer: (B, Hkv, C)}, {(layer, "k" or "v"): the n kept rows (n, d)}
        self.length = 0  # S

    def update(self, layer, q, k, v, seen):  # k, v (B, Hkv, T, d), after `seen` others
        # new tokens join the recent ones. OTT, like KIVI, stores keys as attention reads them, after RoPE
        self.append(layer, "k", self.rope.rotate(k.half(), seen))
        self.append(layer, "v", v.half())
        # attention reads before anything is quantized
        K, V = self.read(layer, "k"), self.read(layer, "v")  # (B, Hkv, S, d) both
        self.length = K.shape[2]
        # When: as soon as there is a block besides the tokens that stay recent (no chunk goes beyond)
        if self.recent[layer, "k"].shape[2] == self.n_recent + self.block:
            # NEW Keep: the tokens of the block join the others, and then some are marked
            so_far = self.kept.get(layer, K[:, :, :0, 0].bool())  # (B, Hkv, C - block)
            kept = torch.nn.functional.pad(so_far, (0, self.block))  # (B, Hkv, C)
            ott(self, layer, kept)
            self.kept[layer] = kept
            # Code
            self.write(layer, "k", K)
            self.write(layer, "v", V)
        return K, V

    def append(self, layer, kind, x):
        before = self.recent.get((layer, kind), x[:, :, :0])
        self.recent[layer, kind] = torch.cat([before, x], dim=2)  # (B, Hkv, r, d)

    def write(self, layer, kind, x):  # the oldest `block` of the recent tokens. NEW: all tokens x (B, Hkv, S, d)
        kept = self.kept[layer]  # (B, Hkv, C)
        self.rows[layer, kind] = x[:, :, :kept.shape[2]][kept].half()  # (n, d)
        old, recent = self.recent[layer, kind].tensor_split([self.block], dim=2)
        x = old.float()  # (B, Hkv, block, d)
        scale, zero = grid_of(x, kind, kept[:, :, -self.block:])
        self.blocks[layer, kind].append((encode(x, scale, zero), scale, zero))
        self.recent[layer, kind] = recent

    def read(self, layer, kind):  # blocks | recent
        decoded = [decode(*block) for block in self.blocks[layer, kind]]
        x = torch.cat([*decoded, self.recent[layer, kind].float()], dim=2)  # (B, Hkv, S, d)
        if (layer, kind) in self.rows:  # NEW: in the place of what their codes say
            kept = self.kept[layer]  # (B, Hkv, C)
            x[:, :, :kept.shape[2]][kept] = self.rows[layer, kind].float()
        return x

    def observe(self, layer, output):  # the model shows it each layer's output
        pass

    def expect(self, tokens):  # the model asks which tokens are new, and how many the cache already holds
        return tokens, self.length

    def bits(self):  # of a number: codes and grids in blocks, and 16 bits in the window and, NEW, of kept rows
        blocks = [block for blocks in self.blocks.values() for block in blocks]
        coded = 8 * sum(x.nbytes for block in blocks for x in block) / sum(4 * codes.numel() for codes, *_ in blocks)
        share = (self.n_recent + (self.block - 1) / 2) / self.length  # in the window, on average: it grows by a block
        # a head has as many places as the fullest needs, with 4 bytes for a position
        places = sum(kept.sum(-1).max() for kept in self.kept.values()) / len(self.kept)  # the mean over layers
        d = 4 * blocks[0][0].shape[3]
        return coded * (1 - share) + 16 * share + (16 + 32 / d) * places / self.length


# The table: perplexity of 16 texts, or as many as the command says
torch.set_grad_enabled(False)
model, tokenizer = hf.load(hf.EMBEDDED)
texts = int(sys.argv[1]) if sys.argv[1:] else 16
test = load_windows("tales", tokenizer, 1024, texts, "test").tokens  # (B, T)
for pool in (0, 1, 3):
    cache = Cache(model.rope, pool, recent=32, block=128)
    # read in chunks that end where a block is full, which is faster than token by token and computes the same
    first, rest = test.split([32 + 128, 864], dim=1)
    logits = torch.cat([model(tokens, cache) for tokens in (first, *rest.split(128, dim=1))], dim=1)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), test[:, 1:].flatten())
    print(f"pool {pool}   {loss.exp():7.3f} {cache.bits():6.2f}")
