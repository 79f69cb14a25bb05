"""Assignment 6: AnTKV. Learn codebooks by weighted k-means, and keep the anchor tokens.

handout.md explains the tasks. Replace each `raise NotImplementedError`; the lines that are given
work as they stand. Names, arguments and shapes stay as they are. To grade this file:

    python -m tinykv.course.grade docs/course/6-antkv/starter.py

Shapes: N points of n numbers, k centres; B sequences, T tokens, H query heads, Hkv KV heads, d
channels of a head. A sub-vector is n neighbouring channels of a head, so a token has
places = Hkv * d/n of them. All are counted from 0.
"""
import torch

from tinykv.codecs import Pair
from tinykv.codecs.base import Codec, Codes, pack, unpack
from tinykv.methods.base import Method, best_tokens  # noqa: F401

ASSIGNMENT = "antkv"


# Task 1: weighted k-means

def nearest(points, centres):
    """The number of the centre that is nearest to each point, of equally near ones the first.

    points (N, n), centres (k, n) -> (N), integers.
    """
    raise NotImplementedError("assignment 6, antkv: nearest")


def plus_plus(points, weights, u):
    """The k-means++ start: centres (k, n), each a copy of a point.

    points (N, n), weights (N). u: a list of k numbers between 0 and 1, one for each draw; the
    handout says how they are used.
    """
    raise NotImplementedError("assignment 6, antkv: plus_plus")


def lloyd(points, weights, centres):
    """One step of weighted k-means -> the moved centres, (k, n).

    points (N, n), weights (N), centres (k, n).
    """
    raise NotImplementedError("assignment 6, antkv: lloyd")


def kmeans(points, weights, centres, steps=25):
    """`lloyd` from the given centres, until no centre moves, `steps` times at most -> (k, n)."""
    raise NotImplementedError("assignment 6, antkv: kmeans")


# Task 2: a codebook

def token_weights(gradient):
    """What each token weighs in k-means. gradient (Hkv, T, d): of the loss, with respect to the
    keys, or values, of a layer.

    Returns (Hkv, T): the norm of each row, the largest thousandth clamped; 1 everywhere if the
    whole gradient is 0. The handout has the rule.
    """
    raise NotImplementedError("assignment 6, antkv: token_weights")


def sub_vectors(x, n):  # given
    """x (B, Hkv, T, d) -> (places, B * T, n): place h * d/n + i is the i-th sub-vector of head h,
    and column b * T + t is token t of sequence b."""
    x = x.float().unflatten(-1, (-1, n))  # (B, Hkv, T, d/n, n)
    return x.permute(1, 3, 0, 2, 4).flatten(2, 3).flatten(0, 1)  # (places, B * T, n)


def encode(x, centroids):
    """The codes of keys or values: at each place, the number of the nearest centroid of its own.

    x (B, Hkv, T, d), centroids (places, m, n) -> (B, T, places), integers.
    """
    raise NotImplementedError("assignment 6, antkv: encode")


def decode(codes, centroids, heads):
    """What codes are read as. codes (B, T, places), integers; centroids (places, m, n); heads: Hkv.

    Returns (B, Hkv, T, d), d = places * n / Hkv.
    """
    raise NotImplementedError("assignment 6, antkv: decode")


class Codebook(Codec):  # given: calibration and packing, which call your functions
    passes = 1
    tables = ("centroids",)  # (places, m, n)
    samples = 2048  # tokens that k-means sees, at most

    def __init__(self, n, m, heads):
        self.n, self.m, self.heads = n, m, heads
        self.code_bits = m.bit_length() - 1  # m is a power of two
        self.bits = self.code_bits / n
        self.centroids = None

    def needs_gradient(self, step):
        return True

    def begin(self, step, W, T):
        self.rows, self.weights = [], []

    def collect(self, step, rows, kept, gradient):
        weights = token_weights(gradient)  # (Hkv, T)
        self.rows.append(rows)
        self.weights.append(weights if kept is None else weights * ~kept)

    def fit(self, step):
        rows, weights = torch.cat(self.rows, dim=1), torch.cat(self.weights, dim=1)
        self.rows = self.weights = None
        some = torch.linspace(0, rows.shape[1] - 1, min(rows.shape[1], self.samples)).long()
        vectors = sub_vectors(rows[None, :, some], self.n)  # (places, N, n)
        weights = weights[:, some].repeat_interleave(len(vectors) // self.heads, dim=0)  # (places, N)
        u = torch.rand(self.m, generator=torch.Generator().manual_seed(0)).tolist()
        self.centroids = torch.stack([kmeans(points, weight, plus_plus(points, weight, u))
                                      for points, weight in zip(vectors, weights)])

    def encode(self, x, ignore=None):
        return Codes(pack(encode(x.float(), self.centroids), self.code_bits)[:, None])

    def decode(self, codes):
        q = unpack(codes.packed[:, 0], self.code_bits, len(self.centroids))  # (B, T, places)
        return decode(q.long(), self.centroids, self.heads)


# Task 3: anchors

def anchor_scores(q, k):
    """AnS(K) and AnS(V) of Eq. 5, (B, Hkv, S) both.

    q (B, H, T, d), k (B, Hkv, S, d), both after RoPE. The T queries are those of the T newest of S
    tokens. A KV head's score is the sum of those of its H / Hkv query heads, which are neighbours.
    """
    raise NotImplementedError("assignment 6, antkv: anchor_scores")


class AnTKV(Method):
    uses_scores = True  # the cache asks `score` at every update, and adds up what it gives
    rope = "pre"  # keys are quantized before RoPE

    # given: settings

    def __init__(self, config, vq="d4m64", anchors="1%", recent=32, block=32):
        """vq: d4m64 are 64 centroids for each 4 channels."""
        n, m = map(int, vq[1:].split("m"))
        heads = config.num_key_value_heads
        self.codecs = [Pair(Codebook(n, m, heads), Codebook(n, m, heads))
                       for _ in range(config.num_hidden_layers)]
        self.scheme, self.k_bits, self.v_bits = vq, self.codecs[0].k.bits, self.codecs[0].v.bits
        self.percent = int(anchors.rstrip("%"))  # of the text, that are anchors
        self.recent, self.block = recent, block

    def score(self, layer_cache, q, K):
        return anchor_scores(q.float(), K.float())

    def keep_keys(self, layer_cache, n):
        """Which keys to keep in full precision, asked when the n oldest recent tokens of a layer
        are about to be quantized: positions (B, Hkv, count), those with the largest scores.

        count is `self.percent` percent of the `layer_cache.length` tokens seen, rounded up.
        `best_tokens(layer_cache.keys, n, count)` chooses among the tokens that are due and those
        that are anchors already.
        """
        raise NotImplementedError("assignment 6, antkv: keep_keys")

    def keep_values(self, layer_cache, n):
        """The same for values, which have anchors of their own: `layer_cache.values`."""
        raise NotImplementedError("assignment 6, antkv: keep_values")
