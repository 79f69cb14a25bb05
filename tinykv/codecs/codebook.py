"""Vector quantization: the codec of CQ and AnTKV, whose codebooks are found by weighted k-means.

A format is "d{n}m{m}": n neighbouring channels share one of m centroids, log2(m) / n bits a number. Keys are quantized
before RoPE. Calibration's k-means

    minimizes  sum_j  w_j |x_j - centroid(x_j)|^2

over the sub-vectors x_j of calibration tokens. `sensitivity` says what w_j is, from the gradient g of the loss:

    "none"     1
    "fisher"   the squared norm of g over the sub-vector, the diagonal Fisher information (CQ)
    "token"    the norm of g over the token's whole row of a KV head, the same for all its
               sub-vectors (AnTKV)
    "fisher-root", "token-squared"   the same with the other's exponent: CQ's norm is squared, AnTKV's is not

In each window the largest thousandth of the weights is clamped to the next largest; otherwise the sinks' gradients
alone would determine the codebooks. Gradients are uneven all the same: N weighted sub-vectors fix the centroids no
better than (sum w)^2 / sum w^2 of equal weight would (Kish's effective sample size), and that is a few in a hundred of
N or fewer. So weighted codebooks are calibrated on more text, and the table prints the effective number, with a warning
where it is below FEWEST for each centroid (`CodebookMethod`).

Each slot of each KV head, of K or V of a layer, has a codebook of its own. Together they take 2 C m numbers a layer,
whatever n, where C = Hkv * d: as much as m tokens of 16 bits.
"""
import re
from typing import Annotated

import torch

from tinykv import UserError, one_of
from tinykv.codecs.base import Codec, Codes, Pair, pack, to_heads, to_rows, unpack
from tinykv.kmeans import kmeans, nearest

# AnTKV's formats, by their bits
FORMATS = {4: "d2m256", 2: "d4m256", 1: "d8m256", 0.75: "d16m4096", 0.375: "d32m4096"}
SENSITIVITIES = ("none", "fisher", "token", "fisher-root", "token-squared")
SAMPLES = 2 ** 16  # tokens that k-means sees, at most
DRAWN = 64  # sub-vectors of a centroid that k-means sees, at most, in each slot
FEWEST = 4  # effective sub-vectors of a centroid; fewer are warned of


class Codebook(Codec):
    """Of each n channels the index of the nearest of m centroids.

    All KV heads of a token form one packed row of codes, one for each of slots = Hkv * d/n sub-vectors. heads, width:
    Hkv, d.
    """
    # centroids (slots, m, n) in 16 bits. The others: two numbers, see `check`
    tables = ("centroids", "samples", "effective")
    needs_text = True

    def __init__(self, n, m, heads, width, sensitivity="fisher"):
        self.n, self.m, self.width, self.slots = n, m, width, heads * width // n
        self.code_bits = m.bit_length() - 1  # of the index of a centroid
        self.bits = self.code_bits / n
        self.name = f"d{n}m{m}"
        self.sensitivity = sensitivity
        self.needs_gradient = sensitivity != "none"
        self.centroids = self.samples = self.effective = None

    def encode(self, x, ignore=None):
        # the nearest centroid of each slot's codebook
        vectors = self.vectors(x)  # (slots, B * T, n)
        codes = nearest(vectors, self.centroids.float())  # (slots, B * T)
        # all slots of a token are one row
        codes = codes.T.unflatten(0, (len(x), -1))  # (B, T, slots)
        packed = pack(codes, self.code_bits)  # (B, T, bytes)
        return Codes(packed[:, None])  # (B, 1, T, bytes)

    def decode(self, codes):
        """Codes -> (B, Hkv, T, d) fp32."""
        code = unpack(codes.packed[:, 0], self.code_bits, self.slots)  # (B, T, slots)
        # look each code up in its slot's codebook
        slot = torch.arange(self.slots, dtype=torch.int32, device=code.device)  # (slots)
        index = slot * self.m + code  # (B, T, slots) int32: among the centroids of all codebooks
        x = torch.nn.functional.embedding(index, self.centroids.flatten(0, 1).float())  # (B, T, slots, n) fp32
        return to_heads(x.flatten(-2), self.width)

    def vectors(self, x):
        """The sub-vectors of each slot: x (B, Hkv, T, d) -> (slots, B * T, n) fp32."""
        x = to_rows(x.float()).unflatten(-1, (-1, self.n))  # (B, T, slots, n)
        return x.flatten(0, 1).transpose(0, 1).contiguous()  # (slots, B * T, n)

    # Calibration

    def fit(self, rows, kept, gradient=None, seed=0):
        # of many tokens some, evenly spread over each window
        W, _, T, _ = rows.shape
        n = max(1, min(T, SAMPLES // W))
        some = torch.linspace(0, T - 1, n, dtype=torch.float32, device=rows.device).long()  # (n)
        # the sub-vectors of each codebook, and their weights
        points = self.vectors(rows[:, :, some])  # (slots, N, n), N = W * tokens
        weights = [self.weigh(x, is_kept, None if gradient is None else gradient[w])[:, some]
                   for w, (x, is_kept) in enumerate(zip(rows, kept))]  # (slots, tokens) each
        weights = torch.cat(weights, dim=1)  # (slots, N)
        self.check(weights)
        # more of them than k-means needs are drawn from by their weights
        if points.shape[1] > DRAWN * self.m:
            points, weights = drawn(points, weights, DRAWN * self.m)
        # find the centroids
        centroids = kmeans(points, self.m, weights, seed=seed, tolerance=1e-3)  # (slots, m, n)
        self.centroids = centroids.to(rows.dtype)

    def check(self, weights):
        """Find the sub-vectors of the codebook that has the fewest, and how many of equal weight they are worth, of
        weights (slots, N). UserError if they are too few."""
        self.samples = (weights > 0).sum(1).min()
        if self.samples < self.m:
            raise UserError(f"{self.name}: {self.m} centroids cannot be learned from {self.samples} vectors; use more "
                            "or longer calibration windows, or fewer centroids")
        # Kish's effective sample size
        weights = weights.double()
        self.effective = (weights.sum(1).square() / weights.square().sum(1)).min()

    def weigh(self, rows, kept, gradient):
        """A window's rows and gradient (Hkv, T, d) -> the weights of its vectors, (slots, T): 0 where kept (Hkv, T)."""
        kept = kept.repeat_interleave(self.slots // len(kept), dim=0)  # (slots, T)
        if self.sensitivity == "none":
            return (~kept).float()
        # the squared norm of each sub-vector's gradient
        square = gradient.float().pow(2).unflatten(-1, (-1, self.n))  # (Hkv, T, d/n, n)
        weight = square.sum(-1)  # (Hkv, T, d/n)
        # or that of the token's row, for all its sub-vectors
        if self.sensitivity.startswith("token"):
            weight = weight.sum(-1, keepdim=True).expand_as(weight)  # (Hkv, T, d/n)
        if self.sensitivity in ("token", "fisher-root"):
            weight = weight.sqrt()
        weight = weight.transpose(1, 2).flatten(0, 1)  # (slots, T)
        if not weight.any():  # the loss does not depend on these keys, or values, at all
            return (~kept).float()
        # clamp the largest thousandth
        ascending = weight.flatten().sort().values  # (slots * T)
        largest = ascending[int(0.999 * (weight.numel() - 1))]
        return weight.clamp(max=largest) * ~kept


def drawn(points, weights, n):
    """n of N points, drawn in proportion to their weights: points (P, n, ..), weights (P, n).

    points (P, N, ..), weights (P, N). The draws are evenly spaced along the sum of the weights, so a point comes as
    often as its weight says, to within one. Each draw has the same weight, and their sum is that of all weights.
    """
    sums = weights.double().cumsum(1)  # (P, N)
    total = sums[:, -1:]  # (P, 1)
    middle = total * (torch.arange(n, dtype=torch.float32, device=sums.device) + 0.5) / n  # (P, n)
    index = torch.searchsorted(sums, middle).clamp(max=sums.shape[1] - 1)  # (P, n)
    points = points.gather(1, index[..., None].expand(-1, -1, points.shape[-1]))  # (P, n, ..)
    return points, (total / n).float().expand(-1, n)


def make_codebooks(config, vq: Annotated[str | None, "dNmM: N channels share one of M centroids"] = None, bits=None,
                   sensitivity: Annotated[str, "weights of the fit: token, token-squared, fisher, fisher-root, "
                                               "none; kvquant: fisher-range, fisher, none"] = "fisher"):
    """[Pair] of all layers.

    The format is given by its name (vq), or by one of the bits in FORMATS; the default is d8m256.
    """
    one_of(SENSITIVITIES, sensitivity=sensitivity)
    if bits is not None and (vq is not None or bits not in FORMATS):
        raise UserError(f"give the format (vq), such as d4m1024, or one of the bits {', '.join(map(str, FORMATS))}; "
                        f"got bits {bits} and vq {vq}")
    heads, width = config.num_key_value_heads, config.head_dim
    settings = *parse_format(vq or FORMATS[bits or 1], width), heads, width, sensitivity
    return [Pair(Codebook(*settings), Codebook(*settings)) for _ in range(config.num_hidden_layers)]


def parse_format(name, width):
    """"d8m256" -> (8, 256), channels and centroids. width: d, the channels of a head."""
    match = re.fullmatch(r"d([1-9]\d*)m(\d+)", name)
    n, m = (int(match[1]), int(match[2])) if match else (1, 0)
    if width % n or m not in [2 ** b for b in range(1, 13)]:
        raise UserError(f"a vector format is dNmM, such as d8m256, where N divides the {width} channels of a head, and "
                        f"M is a power of two from 2 to 4096; got {name!r}")
    return n, m
