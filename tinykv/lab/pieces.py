"""Codes as a compiled loop reads them: what a codec's `decode` gives, a few neighbouring channels at a time.

Where `decode` writes all numbers to memory, a compiled loop has these in registers. A codec that has no function here
is decoded as a whole, so a codec of your own needs none.
"""
import math
from functools import reduce
from operator import or_

import torch

from tinykv.codecs.affine import Affine
from tinykv.codecs.base import TERNARY, largest_code, sections, unpack
from tinykv.codecs.clipped import ClippedGroups
from tinykv.codecs.codebook import Codebook
from tinykv.codecs.nonuniform import NonUniform
from tinykv.codecs.rotated import Rotated

PIECE = 16  # neighbours of a row that are decoded at a time, at most: fp32 numbers of a vector register


def pieces(codec, codes, width):
    """What `decode` gives, each row in P pieces of w neighbours: (B, Hkv, tokens, P, w). No piece crosses a multiple of
    `width`. tokens: n, or groups and tokens of a group.

    A `Rotated` codec's are of rows times `rotation`: a query times it reads them, and a sum of values is turned back.
    """
    return PIECES.get(type(codec), decoded)(codec, codes, width)


def decoded(codec, codes, width):
    x = codec.decode(codes).float()  # (B, Hkv, n, d)
    return x.unflatten(-1, (-1, math.gcd(PIECE, width, x.shape[-1])))


def affine(codec, codes, width):
    n = codes.packed.shape[2]
    if n % codec.tokens_per_group:  # the last group is not full
        return decoded(codec, codes, width)
    grid, packed = codec if codec.static else codes, codes.packed  # (B, Hkv, n, bytes)
    s, z = grid.scale.float(), grid.zero.float()
    if codec.axis == "channel":
        packed = packed.unflatten(2, (s.shape[-3], codec.group_size or n))  # (B, Hkv, n/G, G, bytes)
        code = codes_of(packed, codec.bits, codec.width, width)  # (B, Hkv, n/G, G, P, w)
        s, z = (x.unflatten(-1, code.shape[-2:]) for x in (s, z))  # (B, Hkv, n/G, 1, P, w) both
    else:
        code = codes_of(packed, codec.bits, codec.width, math.gcd(width, codec.group_size))  # (B, Hkv, n, P, w)
        code = code.unflatten(-2, (s.shape[-2], -1))  # (B, Hkv, n, d/G, G/w, w)
        s, z = s[..., None], z[..., None]  # (B, Hkv, n, d/G, 1, 1) both
    x = code * s + z if codec.formula == "offset" else (code - z) * s
    return x if codec.axis == "channel" else x.flatten(-3, -2)


def clipped(codec, codes, width):
    code = by_heads(codes_of(codes.packed, codec.bits, codec.channels, math.gcd(width, codec.width)), codec.width)
    h, z = codes.scale.float()[..., None, None], codes.zero.float()[..., None, None]  # (B, 1, T, n, 1, 1) both
    group = codec.group.view(code.shape[1], 1, *code.shape[3:])  # (Hkv, 1, P, w): a channel has what its group has
    h_own, z_own = h[:, :, :, 0], z[:, :, :, 0]  # (B, 1, T, 1, 1) both
    for g in range(1, h.shape[3]):
        h_own = torch.where(group == g, h[:, :, :, g], h_own)  # (B, Hkv, T, P, w)
        z_own = torch.where(group == g, z[:, :, :, g], z_own)  # (B, Hkv, T, P, w)
    return code * h_own + z_own


def codebook(codec, codes, width):
    per_head = codec.width // codec.n
    code = codes_of(codes.packed, codec.code_bits, codec.slots, per_head)  # (B, 1, T, .., ..)
    code = by_heads(code, per_head).flatten(-2)  # (B, Hkv, T, d/n)
    first = torch.arange(0, codec.slots * codec.m, codec.m, device=code.device)  # (slots): centroids of those before
    x = codec.centroids.float().flatten(0, 1)[first.view(-1, 1, per_head) + code]  # (B, Hkv, T, d/n, n)
    return x.flatten(-2).unflatten(-1, (-1, math.gcd(codec.n, width)))


def non_uniform(codec, codes, width):
    code = by_heads(codes_of(codes.packed, codec.bits, codec.channels, math.gcd(width, codec.width)), codec.width)
    levels = codec.levels.float()
    level = levels[0] if len(levels) <= 16 else levels[code]
    for j in range(1, len(levels) if len(levels) <= 16 else 0):  # selects are faster than a few lookups
        level = torch.where(code == j, levels[j], level)  # (B, Hkv, T, P, w)
    if codec.axis == "token":
        mid, half = codes.mid[..., None], codes.half[..., None]  # (B, 1, T, 1, 1) both
    else:
        mid, half = (x.view(code.shape[1], 1, *code.shape[3:]) for x in (codec.mid, codec.half))  # (Hkv, 1, P, w) both
    return level * half.float() + mid.float()


def rotated(codec, codes, width):
    x = pieces(codec.codec, codes, width)
    if codec.scaled:
        x = x * codes.norm.unflatten(2, x.shape[2:-2])[..., None]  # norm (B, 1, tokens, 1, 1)
    return x


PIECES = {Affine: affine, ClippedGroups: clipped, Codebook: codebook, NonUniform: non_uniform, Rotated: rotated}
SIMDLEN = {Codebook: 256}  # bits of a register, which the numbers of a sub-vector fill; else the compiler's choice


def rotation(codec):
    """The matrix (d, d), its own inverse, that rows are multiplied by; or None."""
    return codec.H.float() if type(codec) is Rotated else None


def apart(codec, codes):
    """What `pieces` leave out: its places in (B, Hkv, n, d), as indices in one list, and how much; or None."""
    if type(codec) is not NonUniform or not codec.outliers:
        return None
    C, places = codec.channels, codes.places(codec.channels)  # (outliers): in (B, n, C)
    row, channel = places // C, places % C  # (outliers) both
    code = unpack(codes.packed[:, 0], codec.bits, C).flatten()[places].int()  # (outliers)
    if codec.axis == "token":
        mid, half = codes.mid.flatten()[row], codes.half.flatten()[row]  # (outliers) both
    else:
        mid, half = codec.mid[channel], codec.half[channel]  # (outliers) both
    more = codes.values[0, 0].float() - (codec.levels.float()[code] * half.float() + mid.float())  # (outliers)
    n, d, head = codes.packed.shape[2], codec.width, channel // codec.width
    at = ((row // n * (C // d) + head) * n + row % n) * d + channel % d  # (outliers)
    return at, more


# Rows of codes

def codes_of(packed, bits, n, width):
    """packed (..., bytes of a row) -> the n codes of each row in pieces of w neighbours, (..., n/w, w) int32. No piece
    crosses a multiple of `width`."""
    parts = sections(n, bits)
    w = math.gcd(PIECE, width, *(part.size for part in parts))
    if w < 4 or bits == TERNARY:  # neighbours lie in different bytes, or no shift takes them apart
        return unpack(packed, bits, n).int().unflatten(-1, (-1, math.gcd(PIECE, width)))
    of_parts = []
    for part in parts:
        code = packed[..., part.first:part.first + part.size].int().unflatten(-1, (-1, w))  # (..., pieces, w)
        if part.bits < 8:
            shifts = torch.arange(0, 8, part.bits, dtype=torch.int32, device=packed.device)  # (planes)
            code = code[..., None, :, :] >> shifts[:, None, None] & largest_code(part.bits)  # (..., planes, pieces, w)
            code = code.flatten(-3, -2)[..., :n // w, :]  # (..., n/w, w)
        of_parts.append(code << part.low if part.low else code)
    return reduce(or_, of_parts)


def by_heads(code, width):
    """Codes of rows of all heads (B, 1, T, C/w, w) -> (B, Hkv, T, width/w, w)."""
    return code[:, 0].unflatten(2, (-1, width // code.shape[-1])).transpose(1, 2)
