"""Assignment 6: AnTKV. Learn codebooks by weighted k-means, and keep the anchor tokens.

Shapes: N points of n numbers, k centres; B sequences, T tokens, H query heads, Hkv KV heads, d
channels of a head. A sub-vector is n neighbouring channels of a head, so a token has
places = Hkv * d/n of them. All are counted from 0.
"""
import torch

from tinykv.codecs.base import Codec, Codes, Pair, pack, unpack
from tinykv.methods.base import Method, best_tokens

ASSIGNMENT = "antkv"


# Task 1: weighted k-means

def nearest(points, centres):
    """The index of the centre that is nearest to each point, of equally near ones the first.

    points (N, n), centres (k, n) -> (N), integers.
    """
    # answer
    square = ((points[:, None] - centres[None]) ** 2).sum(-1)  # (N, k)
    return square.argmin(dim=1)


def plus_plus(points, weights, u):
    """The k-means++ start: centres (k, n), each a copy of a point.

    points (N, n), weights (N). u: a list of k numbers between 0 and 1, one for each draw; the
    handout says how they are used.
    """
    # answer
    chosen, odds = [], weights.double()
    for number in u:
        sums = odds.cumsum(0)
        at = int((sums <= number * sums[-1]).sum())
        chosen.append(min(at, len(points) - 1))
        square = ((points[:, None] - points[chosen]) ** 2).sum(-1)  # (N, drawn)
        odds = weights.double() * square.min(dim=1).values
    return points[chosen]


def lloyd(points, weights, centres):
    """One step of weighted k-means -> the moved centres, (k, n) fp32.

    points (N, n), weights (N), centres (k, n).
    """
    # answer
    index = nearest(points, centres)
    moved = centres.clone()
    far = ((points - centres[index]) ** 2).sum(-1)
    far[weights == 0] = -1
    spare = far.argsort(descending=True).tolist()
    for c in range(len(centres)):
        mine = index == c
        if weights[mine].sum() > 0:
            moved[c] = (points[mine] * weights[mine, None]).sum(0) / weights[mine].sum()
        else:
            moved[c] = points[spare.pop(0)]
    return moved


def kmeans(points, weights, centres, steps=25):
    """`lloyd` from the given centres, until a call of it moves no centre, `steps` times at most -> (k, n)."""
    # answer
    for _ in range(steps):
        before, centres = centres, lloyd(points, weights, centres)
        if torch.equal(before, centres):
            break
    return centres


# Task 2: a codebook

def token_weights(gradient):
    """What each token weighs in k-means. gradient (Hkv, T, d): of the loss, with respect to the
    keys, or values, of a layer.

    Returns (Hkv, T): the norm of each row, the largest thousandth clamped; 1 everywhere if the
    whole gradient is 0. The handout has the rule.
    """
    # answer
    norm = gradient.pow(2).sum(-1).sqrt()
    if norm.max() == 0:
        return torch.ones_like(norm)
    ordered = sorted(norm.flatten().tolist())
    return norm.clamp(max=ordered[int(0.999 * (len(ordered) - 1))])


def sub_vectors(x, n):  # given
    """x (B, Hkv, T, d) -> (places, B * T, n): place h * d/n + i is the i-th sub-vector of head h,
    and column b * T + t is token t of sequence b."""
    x = x.float().unflatten(-1, (-1, n))  # (B, Hkv, T, d/n, n)
    return x.permute(1, 3, 0, 2, 4).flatten(2, 3).flatten(0, 1)  # (places, B * T, n)


def encode(x, centroids):
    """The codes of keys or values: at each place, the index of the nearest centroid of its own.

    x (B, Hkv, T, d), centroids (places, m, n) -> (B, T, places), integers.
    """
    # answer
    B = len(x)
    vectors = sub_vectors(x, centroids.shape[-1])
    q = torch.stack([nearest(points, book) for points, book in zip(vectors, centroids)], dim=-1)
    return q.view(B, -1, len(centroids))


def decode(codes, centroids, heads):
    """What codes are read as. codes (B, T, places), integers; centroids (places, m, n); heads: Hkv.

    Returns (B, Hkv, T, d), d = places * n / Hkv.
    """
    # answer
    B, T, places = codes.shape
    x = torch.stack([centroids[p][codes[..., p]] for p in range(places)], dim=2)  # (B, T, places, n)
    return x.reshape(B, T, heads, -1).transpose(1, 2)


class Codebook(Codec):  # given: calibration and packing, which call your functions
    needs_text = needs_gradient = True  # of calibration
    tables = ("centroids",)  # (places, m, n)
    samples = 2048  # tokens that k-means sees, at most

    def __init__(self, n, m, heads):
        self.n, self.m, self.heads = n, m, heads
        self.code_bits = m.bit_length() - 1  # m is a power of two
        self.bits = self.code_bits / n
        self.centroids = None

    def fit(self, rows, kept, gradient, seed=0):
        weights = torch.cat([token_weights(g) * ~k for g, k in zip(gradient, kept)], dim=1)  # (Hkv, N)
        rows = rows.transpose(0, 1).flatten(1, 2)  # (Hkv, N, d)
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
    # answer
    B, H, T, d = q.shape
    Hkv, S = k.shape[1], k.shape[2]
    every = k.repeat_interleave(H // Hkv, dim=1)  # (B, H, S, d)
    s = q @ every.transpose(2, 3) / d ** 0.5  # (B, H, T, S)
    seen = torch.arange(S)[None] <= torch.arange(S - T, S)[:, None]
    A = s.masked_fill(~seen, float("-inf")).softmax(dim=-1)
    norm = q.norm(dim=-1)[..., None]  # (B, H, T, 1)
    of_keys = (A * (1 - A) * norm).sum(dim=2)  # (B, H, S)
    of_values = A.sum(dim=2)  # (B, H, S)
    return (of_keys.view(B, Hkv, -1, S).sum(2), of_values.view(B, Hkv, -1, S).sum(2))


class AnTKV(Method):
    uses_scores = True  # the cache asks `score` at every update, and adds up what it gives
    rope = "pre"  # keys are quantized before RoPE

    # given: settings

    def __init__(self, config, vq="d4m64", anchors="1%", recent=32, block=32):
        """vq: d4m64 are 64 centroids for each 4 channels."""
        super().__init__(config)
        n, m = map(int, vq[1:].split("m"))
        heads = config.num_key_value_heads
        self.codecs = [Pair(Codebook(n, m, heads), Codebook(n, m, heads))
                       for _ in range(config.num_hidden_layers)]
        self.scheme = vq
        self.percent = int(anchors.rstrip("%"))  # of the text, that are anchors
        self.recent, self.block = recent, block

    def score(self, layer_cache, q, K):
        return anchor_scores(q.float(), K.float())

    def keep_keys(self, layer_cache, n):
        """Which keys to keep in full precision, asked when the n oldest recent tokens of a layer
        are about to be quantized: positions (B, Hkv, count), those with the largest scores.

        count is `self.percent` percent of the `layer_cache.length` tokens seen, rounded up. Call
        `best_tokens(layer_cache.keys, n, count)`, which chooses among the tokens that are due and
        those that are anchors already.
        """
        # answer
        count = -(-self.percent * layer_cache.length // 100)
        return best_tokens(layer_cache.keys, n, count)

    def keep_values(self, layer_cache, n):
        """The same for values, which have anchors of their own: `layer_cache.values`."""
        # answer
        share = -(-self.percent * layer_cache.length // 100)
        return best_tokens(layer_cache.values, n, share)
