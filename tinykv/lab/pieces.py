"""Codes as a compiled loop reads them: what a codec's `decode` gives, a few neighbouring channels at a time.

Where `decode` writes all numbers to memory, a compiled loop has these in registers. A codec that has no function here
is decoded as a whole, so a codec of your own needs none.
"""
import math

import torch

from tinykv.codecs.affine import Affine
from tinykv.codecs.base import TERNARY, largest_code, sections, to_rows, unpack
from tinykv.codecs.clipped import ClippedGroups
from tinykv.codecs.codebook import Codebook
from tinykv.codecs.nonuniform import NonUniform
from tinykv.codecs.rotated import Rotated

PIECE = 16  # neighbours of a row that are decoded at a time, at most: fp32 numbers of a vector register


def pieces(codec, codes, width):
    """What `decode` gives: for each block of heads a list of pieces (B, heads, tokens, w), in the channels' order. No
    piece crosses a multiple of `width`. tokens: n, or groups and tokens of a group.

    A `Rotated` codec's are of rows times `rotation`: a query times it reads them, and a sum of values is turned back.
    """
    return PIECES.get(type(codec), decoded)(codec, codes, width)


def decoded(codec, codes, width):
    x = codec.decode(codes).float()  # (B, Hkv, n, d)
    return [x.split(math.gcd(PIECE, width, x.shape[-1]), dim=-1)]


def affine(codec, codes, width):
    n = codes.packed.shape[2]
    if n % codec.tokens_per_group:  # the last group is not full
        return decoded(codec, codes, width)
    grid, packed = codec if codec.static else codes, codes.packed  # (B, Hkv, n, bytes)
    s, z = grid.scale.float(), grid.zero.float()
    if codec.axis == "channel":
        packed = packed.unflatten(2, (s.shape[-3], codec.group or n))  # (B, Hkv, n/G, G, bytes)
    else:
        width = math.gcd(width, codec.group)
    of_all = []
    for i, code in pieces_of(packed, codec.bits, codec.width, width):
        # the grid of these channels: (B, Hkv, n, 1) or (B, Hkv, n/G, 1, w)
        own = (..., i // codec.group, slice(None)) if codec.axis == "token" else (..., slice(i, i + code.shape[-1]))
        s_own, z_own = s[own], z[own]
        of_all.append(code * s_own + z_own if codec.formula == "offset" else (code - z_own) * s_own)
    return [of_all]


def clipped(codec, codes, width):
    h, z = codes.scale.float(), codes.zero.float()  # (B, 1, T, n) both
    of_all = []
    for i, code in pieces_of(codes.packed, codec.bits, codec.channels, math.gcd(width, codec.width)):
        group = codec.group[i:i + code.shape[-1]]  # (w): a channel has what its group has
        h_own, z_own = h[..., :1], z[..., :1]  # (B, 1, T, 1) both
        for g in range(1, h.shape[-1]):
            h_own = torch.where(group == g, h[..., g:g + 1], h_own)  # (B, 1, T, w)
            z_own = torch.where(group == g, z[..., g:g + 1], z_own)  # (B, 1, T, w)
        of_all.append(code * h_own + z_own)
    return by_heads(of_all, codec.channels // codec.width)


def codebook(codec, codes, width):
    codebooks = codec.centroids.float().flatten(0, 1)  # (slots * m, n)
    per_head = codec.width // codec.n
    of_all = []
    for i, code in pieces_of(codes.packed, codec.code_bits, codec.slots, per_head):
        for slot, index in enumerate(code.unbind(-1), i):  # (B, 1, T)
            x = codebooks[slot * codec.m + index]  # (B, 1, T, n)
            of_all += x.split(math.gcd(codec.n, width), dim=-1)
    return by_heads(of_all, codec.slots // per_head)


def non_uniform(codec, codes, width):
    grid, levels = codes if codec.axis == "token" else codec, codec.levels.float()
    mid, half = grid.mid.float(), grid.half.float()  # (B, 1, T, 1) or (C), both
    of_all = []
    for i, code in pieces_of(codes.packed, codec.bits, codec.channels, math.gcd(width, codec.width)):
        own = ... if codec.axis == "token" else slice(i, i + code.shape[-1])
        level = levels[0] if len(levels) <= 16 else levels[code]
        for j in range(1, len(levels) if len(levels) <= 16 else 0):  # selects are faster than a few lookups
            level = torch.where(code == j, levels[j], level)  # (B, 1, T, w)
        of_all.append(level * half[own] + mid[own])
    return by_heads(of_all, codec.channels // codec.width)


def rotated(codec, codes, width):
    blocks = pieces(codec.codec, codes, width)
    if codec.scaled:
        tokens = blocks[0][0].shape[2:-1]  # (n), or (n/G, G)
        norm = codes.norm.unflatten(2, tokens)  # (B, 1, n/G, G, 1)
        blocks = [[piece * norm for piece in of_block] for of_block in blocks]
    return blocks


PIECES = {Affine: affine, ClippedGroups: clipped, Codebook: codebook, NonUniform: non_uniform, Rotated: rotated}
SIMDLEN = {Codebook: 256}  # bits of a register, which the numbers of a sub-vector fill; else the compiler's choice


def rotation(codec):
    """The matrix (d, d), its own inverse, that rows are multiplied by; or None."""
    return codec.H.float() if type(codec) is Rotated else None


def apart(codec, codes):
    """What `pieces` leave out: its places in (B, Hkv, n, d), as indices in one list, and how much; or None."""
    if type(codec) is not NonUniform or not codec.outliers:
        return None
    plain = torch.cat([torch.cat(of_block, dim=-1) for of_block in pieces(codec, codes, 0)], dim=1)  # (B, Hkv, n, d)
    more = codec.decode(codes) - plain  # (B, Hkv, n, d)
    places = codes.places(codec.channels)  # (outliers): in (B, n, C)
    at = torch.arange(more.numel(), device=more.device).view(more.shape)  # (B, Hkv, n, d)
    at = to_rows(at).flatten()[places]  # (outliers)
    return at, more.flatten()[at]


# Rows of codes

def pieces_of(packed, bits, n, width):
    """The n codes of each row, a piece of neighbours at a time: the first one's index, and codes (..., w) int32. packed
    (..., bytes of a row). No piece crosses a multiple of `width`."""
    parts = sections(n, bits)
    w = math.gcd(PIECE, width, *(part.size for part in parts))
    if w < 4 or bits == TERNARY:  # neighbours lie in different bytes, or no shift takes them apart
        codes, w = unpack(packed, bits, n).int(), math.gcd(PIECE, width)
        for i in range(0, n, w):
            yield i, codes[..., i:i + w]
        return
    for i in range(0, n, w):
        code = 0
        for part in parts:
            plane, first = divmod(i, part.size)
            byte = packed[..., part.first + first:part.first + first + w].int()  # (..., w)
            code = code | (byte >> plane * part.bits & largest_code(part.bits)) << part.low
        yield i, code


def by_heads(of_rows, heads):
    """Pieces of rows of all heads -> those of each head."""
    n = len(of_rows) // heads
    return [of_rows[i:i + n] for i in range(0, len(of_rows), n)]
