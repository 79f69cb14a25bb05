"""TurboQuant (Zandieh et al., 2025): rotate, then round each number to the best levels of a normal one.

own_codec.md explains it and measures it. A token's key, or value, of one head is x, with d numbers.

    encode   n = |x|                    in 16 bits
             y = sqrt(d) R x / n        R: a random orthogonal matrix; the d numbers of y are nearly N(0, 1)
             c_i = argmin_j |y_i - l_j| l: the 2^b Lloyd-Max levels of N(0, 1)
    decode   x' = n R^T l_c / sqrt(d)

No number of this comes from calibration text. `qjl` is the paper's second variant, for keys: one bit less for c, and
that bit for the sign of a random projection S of the rest r = x - x'. Over draws of S it is exact on average:

    x'' = x' + sqrt(pi / 2) / d |r| S^T sign(S r),      E[p . x''] = p . x for any query p
"""
import math
from functools import cache
from typing import Annotated

import torch

from tinykv import at_least, one_of
from tinykv.codecs.base import Codec, Codes, known_bits, pack, unpack
from tinykv.codecs.schemes import SCHEMES
from tinykv.methods.pfn import PFN


@cache
def lloyd_max(n):
    """The n levels with the least mean squared error for a number that is N(0, 1), in ascending order: (n)."""
    # begin with the best density of many levels, that of N(0, 3)
    shares = (torch.arange(n, dtype=torch.float64) + 0.5) / n  # (n)
    levels = math.sqrt(3) * torch.special.ndtri(shares)  # (n)
    infinity = torch.tensor([math.inf])
    for _ in range(1000):
        # 1. a number goes to the nearest level: the edges lie halfway between levels
        middles = (levels[1:] + levels[:-1]) / 2
        edges = torch.cat([-infinity, middles, infinity])  # (n + 1)
        # 2. a level is the mean of N(0, 1) between its edges
        density = torch.exp(-edges ** 2 / 2) / math.sqrt(2 * math.pi)
        below = torch.special.ndtr(edges)  # the share of numbers below each edge
        levels = (density[:-1] - density[1:]) / (below[1:] - below[:-1])  # (n)
    return levels


@cache
def rotation(d, draw):
    """A random orthogonal matrix (d, d)."""
    random = torch.Generator().manual_seed(draw)
    Q, R = torch.linalg.qr(torch.randn(d, d, dtype=torch.float64, generator=random))
    return Q * R.diagonal().sign()  # without the signs, QR favours some rotations


class Turbo(Codec):
    """b bits for each rotated number, and 16 for a token's norm. All sums are in float64, so that the codes do not
    depend on how many tokens come at once."""

    def __init__(self, bits, width, draw=0):
        self.bits = known_bits(bits, range(1, 9))
        self.R, self.levels = rotation(width, draw), lloyd_max(2 ** self.bits)  # (d, d), (2^b)

    def encode(self, x, ignore=None):  # a token's norm is its own, so kept tokens cannot matter
        x, R, levels = x.double(), self.R.to(x.device), self.levels.to(x.device)
        # 1. the norm, as it is stored
        norm = x.norm(dim=-1, keepdim=True)  # (B, Hkv, T, 1)
        norm = norm.clamp(1e-5, 6e4).half()
        # 2. rotate: d numbers that are nearly N(0, 1)
        y = math.sqrt(len(R)) * x / norm @ R.T  # (B, Hkv, T, d)
        # 3. the index of the nearest level: how many edges lie below
        edges = (levels[1:] + levels[:-1]) / 2  # (2^b - 1)
        code = torch.bucketize(y, edges)  # (B, Hkv, T, d)
        return Codes(pack(code, self.bits), norm=norm)

    def decode(self, codes):
        R, levels = self.R.to(codes.packed.device), self.levels.to(codes.packed.device)
        code = unpack(codes.packed, self.bits, len(R))  # (B, Hkv, T, d)
        y = levels[code.long()]  # (B, Hkv, T, d)
        x = codes.norm * (y @ R) / math.sqrt(len(R))
        return x.float()


class QJL(Codec):
    """b - 1 bits of `Turbo`, and one bit for the sign of a random projection of the rest."""

    def __init__(self, bits, width, draw=0):
        self.bits, self.turbo = bits, Turbo(bits - 1, width, draw)
        random = torch.Generator().manual_seed(draw + 1)
        self.S = torch.randn(width, width, dtype=torch.float64, generator=random)  # (d, d)

    def encode(self, x, ignore=None):
        codes = self.turbo.encode(x)
        rest = (x - self.turbo.decode(codes)).double()  # r, (B, Hkv, T, d)
        codes.signs = pack(rest @ self.S.T.to(x.device) > 0, 1)  # (B, Hkv, T, d / 8)
        codes.rest = rest.norm(dim=-1, keepdim=True).clamp(max=6e4).half()  # |r|, (B, Hkv, T, 1)
        return codes

    def decode(self, codes):
        d = len(self.S)
        sign = 2.0 * unpack(codes.signs, 1, d) - 1  # (B, Hkv, T, d)
        rest = codes.rest * (sign.double() @ self.S.to(sign.device))  # |r| S^T sign(S r)
        return self.turbo.decode(codes) + math.sqrt(math.pi / 2) / d * rest.float()


def turboquant(config, kind, bits, draw: Annotated[int, "turboquant: which random rotation"] = 0,
               qjl: Annotated[str, "turboquant: one bit of each key for a projection of the rest: off or on"] = "off"):
    """The codec of a layer's keys (kind "k"), or values."""
    one_of(("off", "on"), qjl=qjl)
    if qjl == "on" and kind == "k":
        at_least(2, k_bits=int(bits))
        return QJL(bits, config.head_dim, draw)
    return Turbo(bits, config.head_dim, draw)


SCHEMES["turboquant"] = turboquant, "post"  # keys are quantized after RoPE


class TurboQuant(PFN):
    beside = {"kivi": {}}  # what it is shown with when it is asked for by itself

    def __init__(self, config, scheme="turboquant", preserve=0, **codec):
        super().__init__(config, preserve, scheme=scheme, **codec)
