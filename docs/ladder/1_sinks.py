"""KV cache quantization on one page: RTN, PFN and KVSink, and the first table of README.

    python docs/ladder/1_sinks.py            in the repository's folder; some seconds on a CPU
    python -m pdb docs/ladder/1_sinks.py     then `b 72, self.method is pfn` and `c`: `pfn` gets a text

In every layer, a language model computes a key and a value for each token and stores them for later tokens to attend
to: the KV cache. At 2 bits a number, the worst error is that of a sink, a token that others attend to when they have
nothing to look up. Its value is nearly 0, but no level of the grid that all tokens share is. RTN keeps no token in 16
bits, PFN the first ones, and KVSink the sinks, which it finds by one huge number. README lists other ways out. The same
in the package: tinykv/methods/kvsink.py, pfn.py. The page prints fp16 8.178, rtn 53.944, pfn 26.698, kvsink 10.182.
Shapes: B texts, T tokens each, Hkv heads of keys and values, d channels (the numbers of a row: a head's key or value).
"""
import sys

import torch

sys.path.insert(0, __file__.rpartition("docs")[0] or ".")
from tinykv import hf
from tinykv.lab.data import load_windows

N = 5  # tokens that `pfn` and `kvsink` keep
LAYER, CHANNEL = 1, 49  # where this model's sinks show. KVSink's Table 3 has others; methods/kvsink.py finds them


# Code: a number is rounded to one of four levels, and read as scale * code + zero
def grid(low, high):  # the smallest and the largest of the numbers that share it
    scale, zero = (high - low) / 3, low  # four levels, three steps
    return scale.half().float(), zero.half().float()  # stored in 16 bits


def encode(x, scale, zero):  # numbers (B, Hkv, T, d) -> codes 0 to 3, four in a byte, (B, Hkv, T, d/4)
    code = torch.round((x - zero) / scale)  # (B, Hkv, T, d)
    code = code.clamp(0, 3).to(torch.uint8)
    c0, c1, c2, c3 = code.chunk(4, dim=-1)  # (B, Hkv, T, d/4) each
    return c0 | c1 << 2 | c2 << 4 | c3 << 6


def decode(codes, scale, zero):  # codes (B, Hkv, T, d/4) -> numbers (B, Hkv, T, d)
    code = torch.cat([codes & 3, codes >> 2 & 3, codes >> 4 & 3, codes >> 6], dim=-1)  # (B, Hkv, T, d)
    return scale * code + zero


# Keep: a method marks the tokens of a layer that stay in 16 bits, in kept (B, Hkv, T), all False before. A sink's value
# is nearly 0, so that it adds nothing. In layer 3 its norm is 0.5 (that of other tokens 12); after rounding it is 13
def fp16(cache, layer, kept):  # all
    kept[:] = True


def rtn(cache, layer, kept):  # round to nearest: none
    pass


def pfn(cache, layer, kept):  # preserve the first N: the very first is a sink
    kept[:, :, :N] = True


def kvsink(cache, layer, kept):  # find the sinks, wherever they are: one channel of an early layer's output is huge
    if layer > LAYER:  # a layer stores its keys and values before its output is known
        size = cache.outputs[LAYER][..., CHANNEL].abs()  # (B, T)
        sinks = size.topk(N, dim=1).indices  # (B, N)
        kept.scatter_(2, sinks[:, None].expand(-1, kept.shape[1], -1), True)  # at (B, Hkv, N): in all heads


# The cache: attention stores a text's keys and values in it, and then uses what it reads back
class Cache:  # the model calls `expect`, and then in each layer `update` and `observe`
    def __init__(self, rope, method, grids):
        self.rope, self.method, self.grids = rope, method, grids  # grids {(layer, "k" or "v"): (scale, zero)}
        self.stored = {}  # {(layer, "k" or "v"): codes, where the kept rows are, the kept rows}
        self.outputs = []  # each layer's, (B, T, channels of a layer's output)

    def update(self, layer, q, k, v, seen):  # k, v (B, Hkv, T, d); q and seen are for other pages
        kept = torch.zeros(k.shape[:3], dtype=torch.bool)  # (B, Hkv, T)
        self.method(self, layer, kept)  # Keep
        self.write(layer, "k", k, kept)  # Code
        self.write(layer, "v", v, kept)
        # attention reads what is stored, even of the token that asks
        K, V = self.read(layer, "k"), self.read(layer, "v")  # (B, Hkv, T, d) both
        return self.rope.rotate(K), V  # RoPE gives keys their positions

    def write(self, layer, kind, x, kept):
        x = x.half()  # (B, Hkv, T, d): no method sees more than 16 bits
        codes = encode(x.float(), *self.grids[layer, kind])  # (B, Hkv, T, d/4): a kept token has codes, too
        where = kept.nonzero(as_tuple=True)  # text, head and token of the n kept rows
        self.stored[layer, kind] = codes, where, x[where]  # the last (n, d)

    def read(self, layer, kind):
        codes, where, rows = self.stored[layer, kind]
        x = decode(codes, *self.grids[layer, kind])  # (B, Hkv, T, d)
        x[where] = rows.float()  # in the place of what their codes say
        return x

    def observe(self, layer, output):  # the model shows it each layer's output
        self.outputs.append(output)

    def expect(self, tokens):  # the model asks which tokens are new, and how many the cache already holds
        return tokens, 0

    def bits(self):  # of a number: codes, kept rows in 16 bits, and 4 bytes for a kept token's place, one for all heads
        held = sum(c.nbytes + rows.nbytes + 4 * len(rows) / c.shape[1] for c, _, rows in self.stored.values())
        return 8 * held / sum(4 * c.numel() for c, _, _ in self.stored.values())  # c: codes, four numbers in a byte


# Calibration: the grids, from the range of the tokens that a method does not keep, in other texts
class Exact(Cache):  # holds these texts as they are
    def write(self, layer, kind, x, kept):
        self.stored[layer, kind] = x

    def read(self, layer, kind):
        return self.stored[layer, kind]


def calibrate(exact, method):
    grids = {}
    for (layer, kind), x in exact.stored.items():
        x = x.half().float()  # (B, Hkv, T, d): what would be coded
        kept = torch.zeros(x.shape[:3], dtype=torch.bool)  # (B, Hkv, T)
        (rtn if method is fp16 else method)(exact, layer, kept)  # of fp16 nobody reads codes: any grid will do
        # keys: a grid for each channel; values: one for all channels of a head
        dims = (0, 2) if kind == "k" else (0, 2, 3)
        low = x.masked_fill(kept[..., None], torch.inf).amin(dims, keepdim=True)  # (1, Hkv, 1, d or 1)
        high = x.masked_fill(kept[..., None], -torch.inf).amax(dims, keepdim=True)  # (1, Hkv, 1, d or 1)
        grids[layer, kind] = grid(low, high)
    return grids


# The table: perplexity of 16 texts, or as many as the command says
torch.set_grad_enabled(False)
model, tokenizer = hf.load(hf.EMBEDDED)
texts = int(sys.argv[1]) if sys.argv[1:] else 16
test = load_windows("tales", tokenizer, 1024, texts, "test").tokens  # (B, T)
other = load_windows("tales", tokenizer, 1024, 16, "calibration").tokens  # (B, T)

exact = Exact(model.rope, fp16, None)
model(other, exact)
for method in (fp16, rtn, pfn, kvsink):
    grids = calibrate(exact, method)
    cache = Cache(model.rope, method, grids)
    logits = model(test, cache)  # (B, T, vocabulary)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), test[:, 1:].flatten())
    print(f"{method.__name__:8} {loss.exp():7.3f} {16 if method is fp16 else cache.bits():6.2f}")
