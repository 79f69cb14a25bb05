"""KIVI on one page: the newest tokens wait in 16 bits. "NEW" marks what is new beside 1_sinks.py.

    python docs/ladder/2_window.py           in the repository's folder; some seconds on a CPU
    diff docs/ladder/1_sinks.py docs/ladder/2_window.py           the same in the package: tinykv/methods/kivi.py

A few channels of the keys are large in all tokens, so each channel gets its own grid. Values have no such channels, so
each token gets its own. That is why no sink is kept here: in layer 3, the first token's value has norm 0.50. It is read
back with norm 0.57, but with norm 13 in 1_sinks.py, where all tokens share a grid. A channel's grid needs many tokens,
so the newest ones wait in 16 bits until they fill a block. Waiting helps by itself, because the newest tokens get most
of the attention.

So there is a third question besides Keep and Code: When? How many tokens stay in 16 bits for now (`recent`), and how
many are quantized at a time (`block`)? A model writes a text token by token, and attention comes first: a new token
reads itself and the recent ones in 16 bits, and then the oldest of these are quantized. The grids are made from the
block itself, so nothing is calibrated. But a grid's 32 bits are stored: with blocks of 128, they take 0.25 bit for each
number of a key, and 1 bit for each of a value's 32. The table varies `recent` and `block`. With 32 and 128, perplexity
is 8.35; with a 16-bit cache it is 8.18. No token is kept for good here; 3_pool.py keeps some.

Shapes: B texts; T new tokens, S in all; Hkv heads of keys and values, d channels.
"""
import sys
from collections import defaultdict

import torch

sys.path.insert(0, __file__.rpartition("docs")[0] or ".")
from tinykv import hf
from tinykv.lab.data import load_windows


# Code: a number is rounded to one of four levels, and read as scale * code + zero
def grid(low, high):  # the smallest and the largest of the numbers that share it
    scale = ((high - low) / 3).clamp(1e-5)  # four levels, three steps; NEW: more than 0, if all numbers are the same
    return scale.half(), low.half()  # scale and zero are stored in 16 bits


def encode(x, scale, zero):  # numbers (B, Hkv, T, d) -> codes 0 to 3, four in a byte, (B, Hkv, T, d/4)
    code = torch.round((x - zero) / scale)  # (B, Hkv, T, d)
    code = code.clamp(0, 3).to(torch.uint8)
    c0, c1, c2, c3 = code.chunk(4, dim=-1)  # (B, Hkv, T, d/4) each
    return c0 | c1 << 2 | c2 << 4 | c3 << 6


def decode(codes, scale, zero):  # codes (B, Hkv, T, d/4) -> numbers (B, Hkv, T, d)
    code = torch.cat([codes & 3, codes >> 2 & 3, codes >> 4 & 3, codes >> 6], dim=-1)  # (B, Hkv, T, d)
    return scale.float() * code + zero


def grid_of(x, kind):  # NEW: the grids of a block, from its own numbers x (B, Hkv, block, d)
    # keys: a grid for each channel, (B, Hkv, 1, d); values: one for each token, (B, Hkv, block, 1)
    dim = 2 if kind == "k" else 3
    return grid(x.amin(dim, keepdim=True), x.amax(dim, keepdim=True))


# The cache: attention hands it the keys and values of new tokens, and computes with those that it gets back
class Cache:
    def __init__(self, rope, recent, block):
        self.rope, self.n_recent, self.block = rope, recent, block
        self.blocks = defaultdict(list)  # NEW {(layer, "k" or "v"): [(codes, scale, zero) of each block]}
        self.recent = {}  # NEW {(layer, "k" or "v"): (B, Hkv, r, d) in 16 bits}
        self.length = 0  # NEW: S

    def update(self, layer, q, k, v, seen):  # k, v (B, Hkv, T, d), after `seen` others
        # NEW: new tokens, in 16 bits, join the recent ones. KIVI stores keys as attention reads them, turned by RoPE
        self.append(layer, "k", self.rope.rotate(k.half(), seen))
        self.append(layer, "v", v.half())
        # NEW: attention reads before anything is quantized
        K, V = self.read(layer, "k"), self.read(layer, "v")  # (B, Hkv, S, d) both
        self.length = K.shape[2]
        # NEW When: as soon as there is a block besides the tokens that stay recent (no chunk goes beyond)
        if self.recent[layer, "k"].shape[2] == self.n_recent + self.block:
            self.write(layer, "k")
            self.write(layer, "v")
        return K, V

    def append(self, layer, kind, x):  # NEW
        before = self.recent.get((layer, kind), x[:, :, :0])
        self.recent[layer, kind] = torch.cat([before, x], dim=2)  # (B, Hkv, r, d)

    def write(self, layer, kind):  # NEW: the oldest `block` of the recent tokens
        old, recent = self.recent[layer, kind].tensor_split([self.block], dim=2)
        x = old.float()  # (B, Hkv, block, d)
        scale, zero = grid_of(x, kind)
        self.blocks[layer, kind].append((encode(x, scale, zero), scale, zero))
        self.recent[layer, kind] = recent

    def read(self, layer, kind):  # NEW: blocks | recent
        decoded = [decode(*block) for block in self.blocks[layer, kind]]
        return torch.cat([*decoded, self.recent[layer, kind].float()], dim=2)  # (B, Hkv, S, d)

    def observe(self, layer, output):  # the model shows it each layer's output
        pass

    def expect(self, tokens):  # the model asks which tokens are new, and how many the cache already holds
        return tokens, self.length

    def bits(self):  # of a number. NEW: codes and grids in blocks, and 16 bits in the window
        blocks = [block for blocks in self.blocks.values() for block in blocks]
        coded = 8 * sum(x.nbytes for block in blocks for x in block) / sum(4 * codes.numel() for codes, *_ in blocks)
        share = (self.n_recent + (self.block - 1) / 2) / self.length  # in the window, on average: it grows by a block
        return coded * (1 - share) + 16 * share


# The table: perplexity of 16 texts, or as many as the command says
torch.set_grad_enabled(False)
model, tokenizer = hf.load(hf.EMBEDDED)
texts = int(sys.argv[1]) if sys.argv[1:] else 16
test = load_windows("tales", tokenizer, 1024, texts, "test").tokens  # (B, T)

for recent, block in ((0, 128), (128, 32), (32, 128)):
    cache = Cache(model.rope, recent, block)
    # read in chunks that end where a block is full, which is faster than token by token and computes the same
    first, rest = test.split([recent + block, 1024 - recent - block], dim=1)
    logits = torch.cat([model(tokens, cache) for tokens in (first, *rest.split(block, dim=1))], dim=1)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), test[:, 1:].flatten())
    print(f"kivi     {loss.exp():7.3f} {cache.bits():6.2f}  recent {recent}, block {block}")
