"""The cache of 1_sinks.py in a stream: KIVI and OTT. "NEW" marks what is new.

    python docs/ladder/2_stream.py           in the repository's folder; some seconds on a CPU
    diff docs/ladder/1_sinks.py docs/ladder/2_stream.py

A text that a model writes comes token by token. So besides Keep and Code there is a third question, When: how many of
the newest tokens stay in 16 bits for now (`recent`), and how many are quantized at a time (`block`)? Attention comes
first: a new token reads itself and the recent ones in 16 bits. Then the oldest of these are quantized. Their grids come
from the block itself, so there is no calibration. They are stored, too: in blocks of 128, a number of the keys takes a
quarter of a bit more, and one of the values a whole bit. This prints 8.351 for kivi and 8.337 for ott (16 bits: 8.178).

Shapes: B texts; T new tokens, S in all, C of them no longer recent; Hkv heads of keys and values, d channels.
"""
import sys
from collections import defaultdict

import torch

sys.path.insert(0, ".")
from tinykv import hf
from tinykv.data import load_windows

POOL = 3  # NEW: tokens that `ott` chooses


# Code: a number is rounded to one of four levels, and read as scale * code + zero
def grid(low, high):  # the smallest and the largest of the numbers that share it
    scale = (high - low) / 3  # four levels, three steps
    scale = scale.clamp(1e-5)  # NEW: these numbers may be all the same
    zero = low
    return scale.half().float(), zero.half().float()  # stored in 16 bits


def encode(x, scale, zero):  # numbers (B, Hkv, T, d) -> codes 0 to 3, four in a byte, (B, Hkv, T, d/4)
    code = torch.round((x - zero) / scale)  # (B, Hkv, T, d)
    code = code.clamp(0, 3).to(torch.uint8)
    c0, c1, c2, c3 = code.chunk(4, dim=-1)  # (B, Hkv, T, d/4) each
    return c0 | c1 << 2 | c2 << 4 | c3 << 6


def decode(codes, scale, zero):  # codes (B, Hkv, T, d/4) -> numbers (B, Hkv, T, d)
    code = torch.cat([codes & 3, codes >> 2 & 3, codes >> 4 & 3, codes >> 6], dim=-1)  # (B, Hkv, T, d)
    return scale * code + zero


def grid_of(x, kind, kept):  # NEW: the grids of a block. x (B, Hkv, block, d), kept (B, Hkv, block)
    if kind == "v":  # one for each token
        return grid(x.amin(3, keepdim=True), x.amax(3, keepdim=True))  # (B, Hkv, block, 1) both
    # one for each channel, from the tokens that are not kept
    low = x.masked_fill(kept[..., None], torch.inf).amin(2, keepdim=True)  # (B, Hkv, 1, d)
    high = x.masked_fill(kept[..., None], -torch.inf).amax(2, keepdim=True)  # (B, Hkv, 1, d)
    return grid(low, high)


# Keep: a method marks the tokens of a layer that stay in 16 bits. NEW: kept (B, Hkv, C) says which did so far
def kivi(cache, layer, kept):  # none
    pass


def ott(cache, layer, kept):  # NEW: the tokens with the smallest keys so far
    # a channel that is large in all other keys is near 0 in these, which widens the channel's grid for the others. A
    # token that a smaller one pushes out of the three stays in 16 bits, too: OTT allows 32 of them, here are 18 at most
    if layer >= 2:  # the first two layers have no keys of this kind
        keys = cache.read(layer, "k")[:, :, :kept.shape[2]]  # (B, Hkv, C, d)
        rival = kept.clone()  # (B, Hkv, C): the kept ones, and the block that is about to be quantized
        rival[:, :, -cache.block:] = True
        size = keys.abs().sum(-1).masked_fill(~rival, torch.inf)  # (B, Hkv, C)
        smallest = size.topk(POOL, largest=False).indices  # (B, Hkv, POOL)
        kept.scatter_(2, smallest, True)


# The cache: attention hands it the keys and values of new tokens, and computes with those that it gets back
class Cache:
    def __init__(self, rope, method, recent, block):
        self.rope, self.method, self.n_recent, self.block = rope, method, recent, block
        self.blocks = defaultdict(list)  # NEW {(layer, "k" or "v"): [(codes, scale, zero) of each block]}
        self.recent = {}  # NEW {(layer, "k" or "v"): (B, Hkv, r, d) in 16 bits}
        self.kept_rows = {}  # {(layer, "k" or "v"): where the kept rows are, the kept rows}
        self.length = 0  # NEW: S

    def update(self, layer, q, k, v, seen):  # k, v (B, Hkv, T, d), after `seen` others
        # NEW: new tokens join the recent ones. KIVI and OTT store keys as attention reads them, after RoPE
        self.append(layer, "k", self.rope.rotate(k.half(), seen))
        self.append(layer, "v", v.half())
        # NEW: attention reads before anything is quantized
        K, V = self.read(layer, "k"), self.read(layer, "v")  # (B, Hkv, S, d) both
        self.length = K.shape[2]
        # NEW When: as soon as there is a block besides the tokens that stay recent (no chunk goes beyond)
        if self.recent[layer, "k"].shape[2] == self.n_recent + self.block:
            # Keep
            kept = torch.zeros_like(K[:, :, :self.length - self.n_recent, 0], dtype=torch.bool)  # (B, Hkv, C)
            if (layer, "k") in self.kept_rows:
                kept[self.kept_rows[layer, "k"][0]] = True
            self.method(self, layer, kept)
            # Code
            self.write(layer, "k", K, kept)
            self.write(layer, "v", V, kept)
        return K, V

    def append(self, layer, kind, x):  # NEW
        if (layer, kind) in self.recent:
            x = torch.cat([self.recent[layer, kind], x], dim=2)
        self.recent[layer, kind] = x  # (B, Hkv, r, d)

    def write(self, layer, kind, x, kept):  # NEW: the last `block` of C tokens
        old = x[:, :, kept.shape[2] - self.block:kept.shape[2]]  # (B, Hkv, block, d)
        scale, zero = grid_of(old, kind, kept[:, :, -self.block:])
        self.blocks[layer, kind].append((encode(old, scale, zero), scale, zero))
        where = kept.nonzero(as_tuple=True)  # text, head and token of the n kept rows
        self.kept_rows[layer, kind] = where, x[where].half()  # the last (n, d)
        self.recent[layer, kind] = self.recent[layer, kind][:, :, self.block:]

    def read(self, layer, kind):  # NEW: blocks | recent
        decoded = [decode(*block) for block in self.blocks[layer, kind]]
        x = torch.cat([*decoded, self.recent[layer, kind].float()], dim=2)  # (B, Hkv, S, d)
        if (layer, kind) in self.kept_rows:
            where, rows = self.kept_rows[layer, kind]
            x[where] = rows.float()  # in the place of what their codes say
        return x

    def observe(self, layer, output):  # the model shows it each layer's output
        pass

    def expect(self, tokens):  # the model asks: which of a text's tokens are new, and how many does it hold?
        return tokens, self.length


# The table: perplexity of 16 texts, or as many as the command says
torch.set_grad_enabled(False)
model, tokenizer = hf.load("tinykv/assets/tales")
texts = int(sys.argv[1]) if sys.argv[1:] else 16
test = load_windows("tales", tokenizer, 1024, texts, "test").tokens  # (B, T)

for method, recent, block in ((kivi, 0, 128), (kivi, 128, 32), (kivi, 32, 128), (ott, 32, 128)):
    cache = Cache(model.rope, method, recent, block)
    # read in chunks that end where a block is full, which is faster than token by token and computes the same
    first, rest = test.split([recent + block, 1024 - recent - block], dim=1)
    logits = torch.cat([model(tokens, cache) for tokens in (first, *rest.split(block, dim=1))], dim=1)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), test[:, 1:].flatten())
    print(f"{method.__name__:8} {loss.exp():7.3f}  recent {recent}, block {block}")
