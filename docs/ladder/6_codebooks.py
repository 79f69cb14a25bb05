"""CQ and AnTKV on one page: several channels share a code. "NEW" marks what is new beside 1_sinks.py.

    python docs/ladder/6_codebooks.py        in the repository's folder; less than a minute on a CPU
    diff docs/ladder/1_sinks.py docs/ladder/6_codebooks.py     the same in the package: tinykv/methods/cq.py, antkv.py

Neighbouring channels depend on each other, so not all combinations of their numbers occur. CQ rounds n channels
together to the nearest of 2**n vectors, its codebook: still 1 bit a number. K-means puts the vectors where combinations
occur and where errors cost most. AnTKV keeps the 1% of the tokens whose error would change attention's output most.
This page prints CQ with 1, 2, 4 and 8 channels a code, all at 1 bit (8 channels: about 8.51), then AnTKV (8.39). It
leaves out other bits, a text that grows (with AnTKV's 32 newest tokens), scores in tiles, and a draw: if there are more
vectors than k-means needs, the package draws 64 for each of the 2**n, which changes the first three figures.
Shapes: B texts, T tokens each; H query heads, Hkv heads of keys and values, d channels; slots = Hkv * d/n codebooks.
"""
import math
import sys

import torch

sys.path.insert(0, __file__.rpartition("docs")[0] or ".")
from tinykv import hf
from tinykv.kmeans import kmeans, nearest
from tinykv.lab.data import load_windows


# Code: NEW: n numbers are read as the nearest vector of their codebook
def vectors(x, n):  # numbers (B, Hkv, T, d) -> n at a time, (slots, B * T, n)
    x = x.unflatten(-1, (-1, n)).permute(1, 3, 0, 2, 4)  # (Hkv, d/n, B, T, n)
    return x.flatten(2, 3).flatten(0, 1)


def encode(x, codebook):  # numbers (B, Hkv, T, d), codebook (slots, 2**n, n) -> codes of n bits, (B, Hkv, T, d/8)
    (B, Hkv, T, d), n = x.shape, codebook.shape[2]
    code = nearest(vectors(x, n), codebook)  # (slots, B * T)
    code = code.view(Hkv, d // n, B, T).permute(2, 0, 3, 1)  # (B, Hkv, T, d/n)
    code = code.unflatten(-1, (-1, 8 // n))  # (B, Hkv, T, d/8, 8/n): those that share a byte
    return (code << torch.arange(0, 8, n)).sum(-1).to(torch.uint8)


def decode(codes, codebook):  # codes (B, Hkv, T, d/8) -> numbers (B, Hkv, T, d)
    n = codebook.shape[2]
    code = codes[..., None] >> torch.arange(0, 8, n) & 2 ** n - 1  # (B, Hkv, T, d/8, 8/n)
    slot = torch.arange(len(codebook)).view(codes.shape[1], 1, -1)  # (Hkv, 1, d/n): which codebook, at each place
    return codebook[slot, code.flatten(-2)].flatten(-2)  # of (B, Hkv, T, d/n, n)


# Keep: a method marks the tokens of a layer that stay in 16 bits. NEW: of keys and of values, kept (2, B, Hkv, T), by
# the queries q (B, H, T, d) and the keys K (B, Hkv, T, d), with their positions
def cq(q, K, kept):  # coupled quantization: none
    pass


def antkv(q, K, kept):  # NEW: the anchors, 1% of the tokens
    # the attention A that each query pays to each key
    heads_per_kv = q.shape[1] // K.shape[1]
    K = K.repeat_interleave(heads_per_kv, dim=1)  # (B, H, T, d)
    scores = q @ K.transpose(-2, -1) / math.sqrt(q.shape[-1])  # (B, H, T, T)
    later = torch.ones_like(scores, dtype=torch.bool).triu(1)  # keys that come after the query
    A = scores.masked_fill(later, -torch.inf).softmax(-1)  # (B, H, T, T)
    # Eq. 5: how far an error moves the outputs of all queries. A value's is multiplied by A. A key's moves its score by
    # up to |q| times as much, and A by A (1 - A) times that. Left out: sqrt(d), how far its value is from the output
    of_key, of_value = (A * (1 - A) * q.norm(dim=-1, keepdim=True)).sum(2), A.sum(2)  # (B, H, T) both
    score = torch.stack([of_key, of_value]).unflatten(2, (-1, heads_per_kv)).sum(3)  # (2, B, Hkv, T)
    anchors = score.topk(math.ceil(score.shape[-1] / 100)).indices  # (2, B, Hkv, 1% of T)
    kept.scatter_(3, anchors, True)


# The cache: attention stores a text's keys and values in it, and then uses what it reads back
class Cache:
    def __init__(self, rope, method, codebooks):
        self.rope, self.method, self.codebooks = rope, method, codebooks  # {(layer, "k" or "v"): (slots, 2**n, n)}
        self.stored = {}  # {(layer, "k" or "v"): codes, where the kept rows are, the kept rows}

    def update(self, layer, q, k, v, seen):  # q (B, H, T, d), k, v (B, Hkv, T, d)
        kept = torch.zeros(2, *k.shape[:3], dtype=torch.bool)  # (2, B, Hkv, T), NEW: of keys, and of values
        self.method(self.rope.rotate(q), self.rope.rotate(k.half().float()), kept)  # Keep
        self.write(layer, "k", k, kept[0])  # Code
        self.write(layer, "v", v, kept[1])
        # attention reads what is stored, even of the token that asks
        K, V = self.read(layer, "k"), self.read(layer, "v")  # (B, Hkv, T, d) both
        return self.rope.rotate(K), V  # RoPE gives keys their positions

    def write(self, layer, kind, x, kept):
        x = x.half()  # (B, Hkv, T, d): no method sees more than 16 bits
        codes = encode(x.float(), self.codebooks[layer, kind])  # (B, Hkv, T, d/8): a kept token has codes, too
        where = kept.nonzero(as_tuple=True)  # text, head and token of the kept rows
        self.stored[layer, kind] = codes, where, x[where]  # the last (rows, d)

    def read(self, layer, kind):
        codes, where, rows = self.stored[layer, kind]
        x = decode(codes, self.codebooks[layer, kind])  # (B, Hkv, T, d)
        x[where] = rows.float()  # in the place of what their codes say
        return x

    def observe(self, layer, output):  # the model shows it each layer's output
        pass

    def expect(self, tokens):  # the model asks which tokens are new, and how many the cache already holds
        return tokens, 0

    def bits(self):  # of a number. NEW: a kept row has 4 bytes for its position, and 4 for its score in a longer text
        held = sum(codes.nbytes + rows.nbytes + 8 * len(rows) for codes, _, rows in self.stored.values())
        return 8 * held / sum(8 * codes.numel() for codes, _, _ in self.stored.values())  # a byte: 8 numbers


class Exact(Cache):  # holds the texts of the calibration as they are
    def update(self, layer, q, k, v, seen):  # NEW: of which a gradient will be asked
        self.stored[layer, "k"], self.stored[layer, "v"] = k.requires_grad_(), v.requires_grad_()
        return self.rope.rotate(k), v


def weights(g, n, method):  # NEW: what an error costs, by the loss's gradient g (B, Hkv, T, d): (slots, B * T)
    weight = vectors(g, n).square().sum(-1)  # cq: the Fisher information of each vector
    if method is antkv:  # the norm of the gradient of its whole token
        weight = vectors(g.norm(dim=-1, keepdim=True).expand_as(g), n)[..., 0]
    weight = weight.unflatten(1, (len(g), -1))  # (slots, B, T): in each text, the largest thousandth is clamped
    largest = weight.transpose(0, 1).flatten(1).quantile(0.999, dim=1, interpolation="lower")  # (B)
    return weight.minimum(largest[:, None]).flatten(1)


# The table: perplexity of 16 texts, or as many as the command says
torch.set_grad_enabled(False)
model, tokenizer = hf.load(hf.EMBEDDED)
texts = int(sys.argv[1]) if sys.argv[1:] else 16
test = load_windows("tales", tokenizer, 1024, texts, "test").tokens  # (B, T)
other = load_windows("tales", tokenizer, 1024, 16, "calibration").tokens  # (B, T)

exact = Exact(model.rope, cq, None)
with torch.enable_grad():
    logits = model(other, exact)  # (B, T, vocabulary)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), other[:, 1:].flatten())
gradients = torch.autograd.grad(loss, list(exact.stored.values()))  # (B, Hkv, T, d) each
for n, method in ((1, cq), (2, cq), (4, cq), (8, cq), (8, antkv)):
    codebooks = {}  # NEW: in the place of grids
    for (what, x), g in zip(exact.stored.items(), gradients):
        points = vectors(x.half().float(), n)  # (slots, B * T, n): what would be coded
        codebooks[what] = kmeans(points, 2 ** n, weights(g, n, method), tolerance=1e-3).half().float()
    cache = Cache(model.rope, method, codebooks)
    logits = model(test, cache)  # (B, T, vocabulary)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), test[:, 1:].flatten())
    print(f"{method.__name__:5} {n} {loss.exp():8.3f} {cache.bits():6.2f}")
