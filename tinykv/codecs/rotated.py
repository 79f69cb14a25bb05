"""Keys and values that are rotated before another codec rounds them: OScaR's pair of codecs.

    encode    y = H x            H: a Hadamard matrix, which spreads what one channel has over all of a head's
              n = |y|            of a token's keys in all heads together, in 16 bits
              codes of y / n     by `affine.py`: K per channel in groups of tokens, V per token (there n = 1)
    decode    x' = n H^T y'
"""
import math
from functools import cache

import torch

from tinykv import UserError
from tinykv.codecs.base import Codec


@cache
def hadamard(d):
    """The Hadamard matrix (d, d), its own inverse. UserError unless d is a power of two."""
    if d & (d - 1):
        raise UserError(f"a Hadamard matrix has a power of two rows, and a head has {d} channels")
    H = torch.ones(1, 1, dtype=torch.float64)
    while len(H) < d:
        H = torch.cat([torch.cat([H, H], 1), torch.cat([H, -H], 1)])
    return H / math.sqrt(d)


class Rotated(Codec):
    """Another codec, of rotated rows, each divided by its token's norm if `scaled`. Sums are in float64, so that the
    codes do not depend on how many tokens come at once."""

    def __init__(self, codec, width, rotate=True, scaled=False):
        self.codec, self.rotate, self.scaled = codec, rotate, scaled
        self.bits, self.tokens_per_group = codec.bits, codec.tokens_per_group
        self.H = hadamard(width) if rotate else torch.eye(width, dtype=torch.float64)  # (d, d)

    def encode(self, x, ignore=None):
        y = x.double() @ self.H.to(x.device)  # (B, Hkv, T, d)
        if not self.scaled:
            return self.codec.encode(y.float(), ignore)
        counted = y
        if ignore is not None:  # heads that keep the token do not count, unless all of them do
            some = ignore & ~ignore.all(1, keepdim=True)  # (B, Hkv, T)
            counted = y.masked_fill(some[..., None], 0)  # (B, Hkv, T, d)
        norm = counted.norm(dim=(1, 3), keepdim=True).clamp(1e-5, 6e4).half()  # (B, 1, T, 1), as it is stored
        codes = self.codec.encode((y / norm).float(), ignore)
        codes.norm = norm
        return codes

    def decode(self, codes):
        y = self.codec.decode(codes).double()  # (B, Hkv, T, d)
        if self.scaled:
            y *= codes.norm
        return (y @ self.H.to(y.device)).float()
