"""The Triton kernels: attention that reads the packed cache, and AnTKV's anchor scores. Each beside its torch lines.

    python eval_ppl.py --method all --backend triton      the kernels in place of torch, on a GPU
    python kernels.py compile                             every kernel for sm_80 and sm_90, without a GPU
    python kernels.py check                               every format's attention beside torch's, on this GPU
    python kernels.py bench                               time, bandwidth, tokens a second; without a GPU byte limits

Decoding reads every cached row once for each new token, so its time is bytes over bandwidth, and packed codes are fewer
bytes. That holds only if no decoded row is ever written: a code has to become a number between its load and its product
with the query. In the order of this file:

    Side              one side of the cache, keys or values, as a kernel sees it: pointers, strides, how codes lie
    attend_kernel     attention of the new queries to a piece of the text: packed or exact rows, any codec
    merge_kernel      the pieces' partial results, and pinned values, to the output and each query's log-sum-exp
    anchor_kernel     Eq. 5 of AnTKV for a block of keys, from that log-sum-exp
    TritonCache       the cache whose attention is these kernels

Shapes: B sequences, H query heads, Hkv KV heads of R = H / Hkv query heads each, T new queries, S tokens in all, d
channels of a head. In a kernel: M rows of queries, N tokens, W channels of a tile. Everything is computed in fp32;
products take 16-bit operands where the model has 16 bits. Scores are in base 2: log2(e) / sqrt(d) q.k.
"""
import hashlib
import itertools
import math
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from tqdm import tqdm
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from tinykv import UserError, at_least
from tinykv.cache import KVCache, LayerCache
from tinykv.codecs import TERNARY, Affine, Codebook, Exact, NonUniform
from tinykv.command import Parser, one_line
from tinykv.methods import METHODS
from tinykv.methods.base import Method
from tinykv.methods.skvq import ClippedGroups
from tinykv.model import Llama, LlamaConfig, Rope

LOG2E, LN2 = 1 / math.log(2), math.log(2)
INTERPRETED = triton.knobs.runtime.interpret  # decided once, here: kernels run line by line on the CPU
FMA = {"enable_fp_fusion": True}  # a * b + c in one instruction, which not every version of Triton does by default
TILE = 64  # tokens that a program reads at a time, at most


# ---- 1. A side of the cache

class Side(NamedTuple):
    """Keys, or values, of a range of tokens. A row of codes is read as one of four kinds:

    exact     16-bit numbers
    planes    P codes fill a byte, or three: a head's row is P planes, channels 0, P, 2P, ..., then channels 1, P + 1,
              ... A plane is one shift and one mask away from the bytes, and nothing has to move: q and the output are
              cut into the same planes instead.
    numbers   any other code of 1 to 8 bits or three levels: a load, or two, for every number
    book      numbers of vectors, 1 to 12 bits, looked up in a table of centroids

    A code c stands for c * scale + zero, or levels[c] * scale + zero. `tokens` and `channels` say how many of them
    share a scale, 0 for all. Strides and offsets are in elements.
    """
    kind: tl.constexpr
    bits: tl.constexpr  # 0: three levels
    more: tl.constexpr  # bytes after the first that a number may reach into
    planes: tl.constexpr  # P; 1 for the other kinds
    unit: tl.constexpr  # bytes that P codes fill
    codes: torch.Tensor  # uint8, or the rows themselves
    batch: int  # strides of `codes`: of a sequence, of a head (0 where all heads are one row), of a token, of a byte
    head: int
    token: int
    byte: tl.constexpr  # a constant: only of neighbouring bytes that are known as such does a load take 16 at once
    first: int  # places that a head takes in a row of all heads, or 0
    start: int = 0  # position of its first token
    scale: torch.Tensor | None = None
    zero: torch.Tensor | None = None
    grid_batch: int = 0  # strides of `scale` and `zero`
    grid_head: int = 0
    grid_token: int = 0
    grid_channel: int = 0
    tokens: tl.constexpr = tl.constexpr(0)
    channels: tl.constexpr = tl.constexpr(0)
    fold: tl.constexpr = tl.constexpr("")  # a scale goes to a "token"'s score, to a "channel" of q, or to each code
    form: tl.constexpr = tl.constexpr("offset")  # "integer": scale * (c - zero); "fp8": both as bytes of e4m3
    levels: torch.Tensor | None = None  # (2**bits)
    place: torch.Tensor | None = None  # (h) int32: where a channel's code lies in the row of all heads
    group: torch.Tensor | None = None  # (h) int32: the scale of each place
    end: torch.Tensor | None = None  # (B, T) int32: where each token's outliers end, see `codecs.SparseCodes`
    sequences: int = 0  # B
    length: int = 0  # T
    value: torch.Tensor | None = None
    channel: torch.Tensor | None = None
    books: torch.Tensor | None = None  # (places or 1, m, n)
    n: tl.constexpr = tl.constexpr(1)  # channels of a vector
    u: tl.constexpr = tl.constexpr(1)  # of those, how many are one load
    m: tl.constexpr = tl.constexpr(1)  # centroids of a book
    shared: tl.constexpr = tl.constexpr(False)  # one book for all places


def strides(rows):
    """The four strides of a Side."""
    return *rows.stride()[:3], tl.constexpr(rows.stride(3))


def exact_side(rows, start=0):
    """rows (B, Hkv, T, d) as they are, the first at position `start`."""
    return Side(*packing("exact", 16), rows, *strides(rows), 0, start)


PLANES = {1: (8, 1), 2: (4, 1), 4: (2, 1), 8: (1, 1), 3: (8, 3), 6: (4, 3), TERNARY: (5, 1)}  # bits: P, bytes


def layout(bits, width, halves):
    """Whether a head's row, or each half of it, is planes: "planes" or "numbers"."""
    planes, _ = PLANES.get(bits, (width + 1, 0))
    return "planes" if width // halves % planes == 0 or (halves == 1 and bits == TERNARY) else "numbers"


def packing(kind, bits):
    """The first five fields of a Side."""
    more = 0 if bits == TERNARY or 8 % bits == 0 or kind == "exact" else (bits + 6) // 8
    planes, unit = PLANES[bits] if kind == "planes" else (1, 1)
    return [tl.constexpr(x) for x in (kind, 0 if bits == TERNARY else bits, more, planes, unit)]


def affine_side(codec, codes, halves):
    c, d = tl.constexpr, codec.width
    scale, zero = (codec.scale, codec.zero) if codec.static else (codes.scale, codes.zero)
    if codec.static:
        scale, zero = scale[None], zero[None]  # (1, Hkv, 1, d/G, 1) or (1, Hkv, 1, 1, d)
    b, h, t, channel_group, channel = scale.stride()
    per_token, kind, fold = codec.axis == "token", layout(codec.bits, d, halves), ""
    if kind == "planes" and halves == 1:
        if per_token:
            fold = "token" if codec.group == d else ""
        elif codec.static or math.gcd(codec.group or codes.q.shape[2], TILE) >= 16:
            fold = "channel"
    return Side(
        *packing(kind, codec.bits), codes.q, *strides(codes.q), 0, 0, scale, zero, 0 if codec.static else b, h, t,
        channel_group if per_token else channel,
        tokens=c(0 if codec.static else 1 if per_token else codec.group or codes.q.shape[2]),
        channels=c((0 if codec.group == d else codec.group) if per_token else 1),
        fold=c(fold), form=c("integer" if codec.formula == "integer-zero" else "offset"))


def nonuniform_side(codec, codes, halves):
    c, static, kind = tl.constexpr, codec.axis == "channel", layout(codec.bits, codec.width, halves)
    batch, _, token, byte = strides(codes.q)
    head = codec.width * codec.bits // 8 * byte.value if kind == "planes" else 0
    scale, zero = (codec.half, codec.mid) if static else (codes.scale, codes.zero)
    steps = (0, codec.width, 0, 1) if static else (scale.stride(0), 0, scale.stride(2), 0)
    sparse = {}
    if codec.outliers and len(codes.value):
        end = codes.end[:, 0, :, 0].contiguous()  # (B, T)
        sparse = dict(end=end, sequences=end.shape[0], length=end.shape[1], value=codes.value, channel=codes.channel)
    return Side(*packing(kind, codec.bits), codes.q, batch, head, token, byte, codec.width,
                0, scale, zero, *steps, tokens=c(0 if static else 1), channels=c(1 if static else 0),
                levels=codec.levels, **sparse)


@lru_cache(maxsize=1024)
def inverse(order):
    """order (h) of a codec -> the place of each channel (h) int32."""
    return order.argsort().to(torch.int32)


def clipped_side(codec, codes, halves):
    c = tl.constexpr
    scale, zero, form = codes.scale, codes.zero, "offset"
    if scale.itemsize == 1:
        scale, zero, form = scale.view(torch.uint8), zero.view(torch.uint8), "fp8"
    return Side(*packing("numbers", codec.bits), codes.q, codes.q.stride(0), 0, *strides(codes.q)[2:],
                codec.width, 0, scale, zero, scale.stride(0), 0, scale.stride(2), 1,
                tokens=c(1), channels=c(1), form=c(form), place=inverse(codec.order), group=codec.group)


def book_side(codec, codes, halves):
    c = tl.constexpr
    books = codec.centroids.contiguous()
    return Side(*packing("book", codec.bits), codes.q, codes.q.stride(0), 0, *strides(codes.q)[2:], codec.width,
                books=books, n=c(codec.n), u=c(math.gcd(codec.n, codec.width // halves, 2 ** 20)), m=c(books.shape[1]),
                shared=c(len(books) == 1))


SIDES = {Affine: affine_side, NonUniform: nonuniform_side, ClippedGroups: clipped_side, Codebook: book_side}


def side_of(part, begin, halves):
    """The coded, or the recent, tokens of a Part: those that `begin` is one of."""
    if begin >= part.first:
        return exact_side(part.recent, part.first)
    codec = part.method.codecs[part.layer][part.kind]
    return exact_side(part.coded.q) if type(codec) is Exact else SIDES[type(codec)](codec, part.coded, halves)


# ---- 2. From codes to numbers, in registers

@triton.jit
def channels_of(side, half: tl.constexpr, plane: tl.constexpr, DIM: tl.constexpr, HALVES: tl.constexpr,
                W: tl.constexpr):
    # The channels (W) of a plane of half a head, or of all of it, and which of them exist.
    i = tl.arange(0, W)
    channel = i * side.planes + plane
    return channel + half * (DIM // HALVES), channel < DIM // HALVES


@triton.jit
def number_at(side, row, place, live):
    # row (N, 1) pointers, place and live (N, X) or (1, X) -> the numbers there (N, X) int32
    if side.bits == 0:  # three levels, five to a byte
        at = place % 5
        power = tl.where(at == 0, 1, tl.where(at == 1, 3, tl.where(at == 2, 9, tl.where(at == 3, 27, 81))))
        return tl.load(row + place // 5 * side.byte, live, 0).to(tl.int32) // power % 3
    bit = place * side.bits
    word = tl.load(row + bit // 8 * side.byte, live, 0).to(tl.int32)
    for i in tl.static_range(1, 1 + side.more):  # it may go on in the next byte, or two
        more = tl.load(row + (bit // 8 + i) * side.byte, live & (8 * i < bit % 8 + side.bits), 0)
        word |= more.to(tl.int32) << 8 * i
    return word >> bit % 8 & 2 ** side.bits - 1


@triton.jit
def fp8_number(x):
    # The bytes of e4m3 numbers: an fp16 with the same digits is 2**8 times smaller. Works where fp8 types do not.
    x = x.to(tl.uint16)
    return ((x & 127) << 7 | (x & 128) << 8).to(tl.float16, bitcast=True).to(tl.float32) * 256


@triton.jit
def grid_of(side, b, h, j0, ok, column, there, N: tl.constexpr):
    # Scale and zero point of the tile's tokens and of channels `column` (W): (N or 1, W or 1), 1 where all share one.
    at = b * side.grid_batch + h * side.grid_head
    if side.tokens == 0:
        at += tl.full((1, 1), 0, tl.int32)
        mask = tl.full((1, 1), True, tl.int1)
    elif side.tokens % N == 0:  # a tile starts at a multiple of N, so it lies in one group
        at += tl.full((1, 1), 0, tl.int32) + j0 // side.tokens * side.grid_token
        mask = tl.full((1, 1), True, tl.int1)
    else:
        at += ((j0 + tl.arange(0, N)) // side.tokens).to(tl.int64)[:, None] * side.grid_token
        mask = ok[:, None]
    if side.channels != 0:
        if side.group is not None:
            column = tl.load(side.group + column, there, 0)
        at += (column // side.channels)[None] * side.grid_channel
        mask = mask & there[None]
    scale, zero = tl.load(side.scale + at, mask, 0), tl.load(side.zero + at, mask, 0)
    if side.form == "fp8":
        return fp8_number(scale), fp8_number(zero)
    scale, zero = scale.to(tl.float32), zero.to(tl.float32)
    if side.form == "integer":
        zero = -scale * zero
    return scale, zero


@triton.jit
def bytes_of(side, b, h, j, ok, half: tl.constexpr, DIM: tl.constexpr, HALVES: tl.constexpr, W: tl.constexpr):
    # The bytes (N, W) that hold the planes of a head's row, or of a half of it; three to a word where they belong so.
    i = tl.arange(0, W)
    row = side.codes + b * side.batch + h * side.head + (j - side.start).to(tl.int64)[:, None] * side.token  # (N, 1)
    row += half * (DIM // HALVES) // side.planes * side.unit * side.byte
    live = ok[:, None] & (i < (DIM // HALVES + side.planes - 1) // side.planes)[None]
    word = tl.load(row + (i * side.unit * side.byte)[None], live, 0)
    if side.unit == 3:
        word = word.to(tl.int32) | tl.load(row + ((i * 3 + 1) * side.byte)[None], live, 0).to(tl.int32) << 8
        word |= tl.load(row + ((i * 3 + 2) * side.byte)[None], live, 0).to(tl.int32) << 16
    return word


@triton.jit
def plane_of(side, packed, plane: tl.constexpr):
    # One plane of codes (N, W).
    if side.bits == 0:
        return packed // 3 ** plane % 3
    return packed >> side.bits * plane & 2 ** side.bits - 1


@triton.jit
def tiny(code):
    # Codes as fp16 numbers, 2**24 times too small: the bits of a small integer *are* that subnormal. Costs nothing.
    return code.to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def rows_of(side, b, h, j0, ok, packed, half: tl.constexpr, plane: tl.constexpr,
            DIM: tl.constexpr, HALVES: tl.constexpr, W: tl.constexpr, N: tl.constexpr):
    # The tile's N tokens decoded, the channels of one plane: (N, W) fp32. packed: `bytes_of` where there are planes.
    channel, there = channels_of(side, half, plane, DIM, HALVES, W)
    j = j0 + tl.arange(0, N)
    live = ok[:, None] & there[None]  # (N, W)
    row = side.codes + b * side.batch + h * side.head + (j - side.start).to(tl.int64)[:, None] * side.token  # (N, 1)
    if side.kind == "exact":
        x = tl.load(row + (channel * side.byte)[None], live, 0).to(tl.float32)
    elif side.kind == "book":
        # u channels lie side by side both in the head and in a vector: one number, one load of u
        unit = tl.arange(0, W // side.u) * side.u  # (W / u)
        there = ok[:, None] & (unit < DIM // HALVES)[None]  # (N, W / u)
        unit += half * (DIM // HALVES)  # the first channel of each
        place = (h * side.first + unit) // side.n
        at = number_at(side, row, place[None], there)  # (N, W / u)
        if not side.shared:
            at += place[None] * side.m
        at = at * side.n + (unit % side.n)[None]
        at = at[:, :, None] + tl.arange(0, side.u)[None, None]  # (N, W / u, u)
        x = tl.load(side.books + at, there[:, :, None], 0).to(tl.float32)
        x = tl.reshape(x, (N, W))
    else:
        place = h * side.first + channel  # (W)
        if side.place is not None:
            place = tl.load(side.place + place, there, 0)
        if side.kind == "planes":
            code = plane_of(side, packed, plane)
        else:
            code = number_at(side, row, place[None], live)
        if side.levels is not None:
            x = tl.load(side.levels + code).to(tl.float32)
        else:
            x = tiny(code).to(tl.float32) * 16777216.0  # 2**24
        column = channel
        if side.group is not None:
            column = place
        scale, zero = grid_of(side, b, h, j0, ok, column, there, N)
        x = x * scale + zero
        if side.end is not None:
            stop = tl.load(side.end + b * side.length + j, ok, 0)  # (N)
            before = tl.where(b > 0, (b - 1) * side.length + j, (side.sequences - 1) * side.length + j - 1)
            start = tl.load(side.end + before, ok & (j + b > 0), 0)  # (N)
            for i in range(0, tl.max(stop - start, 0)):
                here = start + i < stop  # (N)
                outlier = tl.load(side.channel + start + i, here, -1) - h * side.first  # (N)
                value = tl.load(side.value + start + i, here, 0).to(tl.float32)
                x = tl.where((outlier[:, None] == channel[None]) & there[None], value[:, None], x)
    return x


# ---- 3. Attention over a piece of the text

class Turn(NamedTuple):
    """RoPE for keys stored before it, in two steps: q turns back by the tile's first position, a key by its place in
    the tile. Then one small table serves all tiles, and no angle of its own is computed, or read, for a key."""
    cos: torch.Tensor | None = None  # (N, d/2), of places 0 .. N - 1
    sin: torch.Tensor | None = None
    tile_cos: torch.Tensor | None = None  # (tiles, d/2), of positions 0, N, 2N, ...
    tile_sin: torch.Tensor | None = None


@lru_cache(maxsize=8)
def turn_of(rope, N, tiles, device):
    def angles(positions):
        return positions[:, None].float() * rope.freq.to(device)  # as `Rope.rotate`
    place, first = angles(torch.arange(N, device=device)), angles(torch.arange(0, tiles * N, N, device=device))
    return Turn(place.cos(), place.sin(), first.cos(), first.sin())


class Pins(NamedTuple):
    """Pinned rows of the keys, and of the values. A pinned key takes its slot's place as a *score*, which is known
    beforehand; for a pinned value the slot's score is written down, and the row itself is added by `merge_kernel`. So a
    token's key may be pinned and its value coded, and no tile of codes has to be mended."""
    slot: torch.Tensor | None = None  # (B, 1 or Hkv, S) int32: number of a token's pinned row, or -1
    batch: int = 0  # strides of `slot`
    head: int = 0
    score: torch.Tensor | None = None  # (B * H * T, n) fp32: of keys read, of values written
    n: int = 0


@triton.jit
def score_tile(parts, total, k, turn, b, h, j0, ok, DIM: tl.constexpr, HALVES: tl.constexpr, W: tl.constexpr,
               M: tl.constexpr, N: tl.constexpr, DOT: tl.constexpr):
    # q.k of M rows of queries and the tile's N keys. parts: q (M, W) of each plane; total (M): the sums of q's rows.
    s = tl.full((M, N), 0.0, tl.float32)
    j = j0 + tl.arange(0, N)
    low = 0
    if k.kind == "planes":
        low = bytes_of(k, b, h, j, ok, 0, DIM, HALVES, W)  # (N, W)
    if HALVES == 2:  # keys before RoPE: channel i turns with channel i + d/2
        high = 0
        if k.kind == "planes":
            high = bytes_of(k, b, h, j, ok, 1, DIM, HALVES, W)  # (N, W)
        for plane in tl.static_range(k.planes):
            pair, there = channels_of(k, 0, plane, DIM, HALVES, W)
            tile = j0 // N * (DIM // 2) + pair
            c = tl.load(turn.tile_cos + tile, there, 0)[None]  # (1, W)
            z = tl.load(turn.tile_sin + tile, there, 0)[None]  # (1, W)
            place = tl.arange(0, N)[:, None] * (DIM // 2) + pair[None]
            cos, sin = tl.load(turn.cos + place, there[None], 0), tl.load(turn.sin + place, there[None], 0)  # (N, W)
            x = rows_of(k, b, h, j0, ok, low, 0, plane, DIM, HALVES, W, N)
            y = rows_of(k, b, h, j0, ok, high, 1, plane, DIM, HALVES, W, N)
            p, q = parts[plane], parts[k.planes + plane]
            s = tl.dot((p * c + q * z).to(DOT), tl.trans(x * cos - y * sin).to(DOT), s, input_precision="ieee")
            s = tl.dot((q * c - p * z).to(DOT), tl.trans(y * cos + x * sin).to(DOT), s, input_precision="ieee")
    elif k.fold != "":
        # q.(c * scale + zero) without a product for each number: a scale is the token's, or goes into q
        offset = tl.full((M, 1), 0.0, tl.float32)
        for plane in tl.static_range(k.planes):
            q = parts[plane]
            if k.fold == "channel":
                channel, there = channels_of(k, 0, plane, DIM, HALVES, W)
                scale, zero = grid_of(k, b, h, j0, ok, channel, there, N)  # (1, W)
                offset += tl.sum(q * zero, 1)[:, None]
                q = q * scale
            s = tl.dot(q.to(DOT), tl.trans(tiny(plane_of(k, low, plane))).to(DOT), s, input_precision="ieee")
        s *= 16777216.0  # 2**24
        if k.fold == "token":
            scale, zero = grid_of(k, b, h, j0, ok, j, ok, N)  # (N or 1, 1)
            s = s * tl.trans(scale) + total[:, None] * tl.trans(zero)
        else:
            s += offset
    else:
        for plane in tl.static_range(k.planes):
            x = rows_of(k, b, h, j0, ok, low, 0, plane, DIM, HALVES, W, N)
            s = tl.dot(parts[plane].to(DOT), tl.trans(x).to(DOT), s, input_precision="ieee")
    return s


@triton.jit
def add_values(parts, zeros, p, v, b, h, j0, ok, DIM: tl.constexpr, W: tl.constexpr, N: tl.constexpr,
               DOT: tl.constexpr):
    # parts: p (M, N) times the tile's N values is added to the output (M, W) of each plane, and to zeros (M).
    packed = 0
    if v.kind == "planes":
        packed = bytes_of(v, b, h, j0 + tl.arange(0, N), ok, 0, DIM, 1, W)  # (N, W)
    new = ()
    if v.fold == "token":  # p.(c * scale + zero) = (p * scale).c + sum(p * zero)
        scale, zero = grid_of(v, b, h, j0, ok, ok, ok, N)  # (N or 1, 1)
        zeros += tl.sum(p * tl.trans(zero), 1)
        # Both sums are large and take each other away, so p * scale must not get lost among the small fp16 numbers.
        largest = tl.maximum(tl.max(scale), 1e-30) / 16384  # 2**14
        p = p * tl.trans(scale / largest)
        for plane in tl.static_range(v.planes):
            x = tiny(plane_of(v, packed, plane))
            new = new + (parts[plane] + tl.dot(p.to(DOT), x.to(DOT), input_precision="ieee") * largest,)
    else:
        for plane in tl.static_range(v.planes):
            x = rows_of(v, b, h, j0, ok, packed, 0, plane, DIM, 1, W, N)
            new = new + (tl.dot(p.to(DOT), x.to(DOT), parts[plane], input_precision="ieee"),)
    return new, zeros


@triton.jit(do_not_specialize=["begin", "end", "length", "window"])  # or a text's length would compile it anew
def attend_kernel(q, k, v, turn, k_pins, v_pins, acc, top, total,
                  q_batch, q_head, q_token, begin, end, split, queries, length, window, lines, factor,
                  H: tl.constexpr, R: tl.constexpr, DIM: tl.constexpr, HALVES: tl.constexpr, KW: tl.constexpr,
                  VW: tl.constexpr, M: tl.constexpr, N: tl.constexpr, DOT: tl.constexpr):
    # One program: `split` tokens of begin .. end, one KV head, M of the T * R query rows that share it. Bytes: the
    # packed rows of these tokens, once for each M rows, so once in decoding; d + 2 numbers written for each row.
    #   q (B, H, T, d)    k, v: Side    acc (pieces, B * H * T, d) fp32: this piece's sum of 2**(score - top) v
    #   top, total (pieces, B * H * T) fp32: the largest score, the sum of 2**(score - top)
    bh = tl.program_id(2).to(tl.int64)
    b, h = bh // (H // R), bh % (H // R)
    row = tl.program_id(1) * M + tl.arange(0, M)  # (M)
    t, live = row // R, row < queries * R
    at = length - queries + t  # (M): positions
    head = h * R + row % R
    line = (b * H + head) * queries + t  # (M): where the row's results go

    parts, whole = (), tl.full((M,), 0.0, tl.float32)
    for half in tl.static_range(HALVES):
        for plane in tl.static_range(k.planes):
            channel, there = channels_of(k, half, plane, DIM, HALVES, KW)
            mask = live[:, None] & there[None]
            x = tl.load(q + b * q_batch + (head * q_head + t * q_token)[:, None] + channel[None], mask, 0)
            x = x.to(tl.float32) * factor  # (M, KW)
            parts = parts + (x,)
            whole += tl.sum(x, 1)
    out, zeros = (), tl.full((M,), 0.0, tl.float32)
    for _ in tl.static_range(v.planes):
        out = out + (tl.full((M, VW), 0.0, tl.float32),)
    m, norm = tl.full((M,), float("-inf"), tl.float32), tl.full((M,), 0.0, tl.float32)

    low = begin // N * N + tl.program_id(0) * split  # a multiple of N
    high = tl.minimum(tl.minimum(low + split, end), length - queries + (tl.program_id(1) * M + M - 1) // R + 1)
    oldest = length - queries + tl.program_id(1) * M // R - window + 1  # what the first row still sees
    low = tl.maximum(low, tl.maximum(oldest, 0) // N * N)
    for j0 in range(low, high, N):
        j = j0 + tl.arange(0, N)  # (N)
        ok = (j >= begin) & (j < high)
        s = score_tile(parts, whole, k, turn, b, h, j0, ok, DIM, HALVES, KW, M, N, DOT)  # (M, N)
        if k_pins.slot is not None:
            slot = tl.load(k_pins.slot + b * k_pins.batch + h * k_pins.head + j, ok, -1)[None]  # (1, N)
            pinned = tl.load(k_pins.score + line[:, None] * k_pins.n + slot, live[:, None] & (slot >= 0), 0)
            s = tl.where(slot >= 0, pinned, s)
        seen = ok[None] & (j[None] <= at[:, None]) & (j[None] > at[:, None] - window)
        s = tl.where(seen, s, float("-inf"))
        new = tl.maximum(m, tl.max(s, 1))  # (M)
        base = tl.where(new == float("-inf"), 0.0, new)
        p, fade = tl.exp2(s - base[:, None]), tl.exp2(m - base)
        m, norm = new, norm * fade + tl.sum(p, 1)
        if v_pins.slot is not None:
            slot = tl.load(v_pins.slot + b * v_pins.batch + h * v_pins.head + j, ok, -1)[None]  # (1, N)
            tl.store(v_pins.score + line[:, None] * v_pins.n + slot, s, live[:, None] & (slot >= 0))
            p = tl.where(slot >= 0, 0.0, p)
        faded = ()
        for plane in tl.static_range(v.planes):
            faded = faded + (out[plane] * fade[:, None],)
        out, zeros = add_values(faded, zeros * fade, p, v, b, h, j0, ok, DIM, VW, N, DOT)

    line += tl.program_id(0) * lines
    for plane in tl.static_range(v.planes):
        channel, there = channels_of(v, 0, plane, DIM, 1, VW)
        x = out[plane]
        if v.fold == "token":
            x = x * 16777216.0 + zeros[:, None]  # 2**24
        tl.store(acc + line[:, None] * DIM + channel[None], x, live[:, None] & there[None])
    tl.store(top + line, m, live)
    tl.store(total + line, norm, live)


def attend_lines(q, K, V, begin, end, window, k_pins=None, v_pins=None):
    """What attend_kernel equals, for one piece: q (B, H, T, d), K and V (B, H, S, d) fp32, begin .. end of S tokens.

    Returns acc (B, H, T, d), top and total (B, H, T), as the kernel writes them.
    """
    T, S = q.shape[2], K.shape[2]
    s = q @ K[:, :, begin:end].transpose(-2, -1) * (LOG2E / math.sqrt(q.shape[-1]))  # (B, H, T, end - begin)
    at = torch.arange(S - T, S, device=q.device)[:, None]  # (T, 1): positions
    j = torch.arange(begin, end, device=q.device)[None]  # (1, end - begin)
    s = s.masked_fill((j > at) | (j <= at - window), float("-inf"))
    top = s.amax(-1)  # (B, H, T)
    p = torch.exp2(s - top.nan_to_num(neginf=0)[..., None])  # (B, H, T, end - begin)
    return p @ V[:, :, begin:end], top, p.sum(-1)


# ---- 4. The pieces together

@triton.jit(do_not_specialize=["pieces", "n"])
def merge_kernel(acc, top, total, score, pinned, out, lse, pieces, lines, queries, n, pinned_batch, pinned_head,
                 pinned_row, H: tl.constexpr, R: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, M: tl.constexpr,
                 N: tl.constexpr):
    # One program: M queries of one head. Bytes: what the pieces wrote, and the pinned values.
    #   acc, top, total: of attend_kernel    score (B * H * T, n) fp32: of the pinned values' slots, or -inf
    #   pinned (B, Hkv, n, d)    out (B, H, T, d)    lse (B, H, T) fp32: natural log of the sum of e**score
    bh = tl.program_id(0).to(tl.int64)
    t = tl.program_id(1) * M + tl.arange(0, M)  # (M)
    live, line = t < queries, bh * queries + t  # (M) both
    c = tl.arange(0, D)
    mask = live[:, None] & (c < DIM)[None]  # (M, D)
    m, norm = tl.full((M,), float("-inf"), tl.float32), tl.full((M,), 0.0, tl.float32)
    x = tl.full((M, D), 0.0, tl.float32)
    for i in range(pieces):
        at = i * lines + line
        other = tl.load(top + at, live, 0)  # (M)
        new = tl.maximum(m, other)
        base = tl.where(new == float("-inf"), 0.0, new)
        old, add = tl.exp2(m - base), tl.exp2(other - base)  # (M) both
        norm = norm * old + tl.load(total + at, live, 1) * add
        x = x * old[:, None] + tl.load(acc + at[:, None] * DIM + c[None], mask, 0) * add[:, None]
        m = new
    if pinned is not None:
        row = pinned + bh // H * pinned_batch + bh % H // R * pinned_head
        for i0 in range(0, n, N):
            slot = i0 + tl.arange(0, N)  # (N)
            there = slot < n
            p = tl.load(score + (line * n)[:, None] + slot[None], live[:, None] & there[None], float("-inf"))  # (M, N)
            rows = tl.load(row + slot[:, None] * pinned_row + c[None], there[:, None] & (c < DIM)[None], 0)  # (N, D)
            x += tl.dot(tl.exp2(p - m[:, None]), rows.to(tl.float32), input_precision="ieee")
    tl.store(out + line[:, None] * DIM + c[None], x / norm[:, None], mask)
    tl.store(lse + line, (m + tl.log2(norm)) * 0.6931471805599453, live)  # ln 2


def merge_lines(acc, top, total, score=None, pinned=None):
    """What merge_kernel equals. score (B, H, T, n) and pinned (B, H, n, d): of pinned values -> output, log-sum-exp."""
    m = top.amax(0)  # (B, H, T)
    part = torch.exp2(top - m)  # (pieces, B, H, T)
    norm = (total * part).sum(0)  # (B, H, T)
    x = (acc * part[..., None]).sum(0)  # (B, H, T, d)
    if pinned is not None:
        x = x + torch.exp2(score - m[..., None]) @ pinned.float()
    return x / norm[..., None], (m + norm.log2()) * LN2


def processors(device):
    """Streaming multiprocessors of a GPU; in the interpreter a few, so that there are pieces to merge."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def tiling(sides, halves, rows, pinned=False):
    """M, N and warps. With these no kernel spills a register, see `compile`. A tile lies in one group of tokens: N
    divides it, or, where it is shorter than the 16 tokens that a product takes, scales go to each number."""
    kinds = {s.kind.value for s in sides}
    M, N, warps = min(64, triton.next_power_of_2(rows)), TILE, 4
    if halves == 2 or kinds != {"exact"}:
        M = min(M, 16)
    if "book" in kinds or any(s.end is not None or s.levels is not None for s in sides):
        warps = 8 if any(s.kind.value != "book" or s.u.value < 4 for s in sides) else 4
    if "numbers" in kinds or (rows > 16 and any(s.end is not None for s in sides)):
        N, warps = TILE // 2, 8
    if "planes" in kinds and (halves == 2 or (rows > 16 and any(s.unit.value == 3 for s in sides))):
        N = TILE // 2
    if pinned and "book" in kinds:
        N, warps = TILE // 2, 4
    ternary = any(s.kind.value == "planes" and s.bits.value == 0 for s in sides)
    if (ternary and rows <= 16) or (pinned and "planes" in kinds and rows > 16):
        warps = 8
    group = math.gcd(N, *(s.tokens.value for s in sides if s.tokens.value > 1))
    return M, group if group >= 16 else N, warps


def slots_of(index, coded, B):
    """index (B or 1, h, n) of pinned tokens -> of each coded one the number of its row, or -1: (B, h, coded and more).

    A multiple of 16 long, or the kernels would be compiled anew where a stride becomes one.
    """
    size = triton.cdiv(coded + 1, 16) * 16
    place = index.where((index >= 0) & (index < coded), coded).long().expand(B, -1, -1)  # (B, h, n)
    row = torch.arange(index.shape[-1], dtype=torch.int32, device=index.device)  # (n)
    slot = torch.full((B, place.shape[1], size), -1, dtype=torch.int32, device=index.device)
    return slot.scatter_(2, place, row.expand_as(place))


def pins_of(layer, part, q, score):
    """Pins of a part whose slots may be coded, or none. score: (B, H, T, n), of keys; None: written by the kernel."""
    if part.index is None or part.first == 0:
        return Pins()
    n = part.index.shape[-1]
    slot = layer.slots(part, len(q)) if isinstance(layer, TritonLayer) else slots_of(part.index, part.first, len(q))
    if score is None:
        score = q.new_full((*q.shape[:3], n), float("-inf"), dtype=torch.float32)
    return Pins(slot, slot.stride(0), 0 if slot.shape[1] == 1 else slot.stride(1), score, n)


def pinned_keys(layer):
    """(B, Hkv, n, d) fp32, rotated."""
    rows = layer.k.pinned.float()
    if layer.method.rope == "post":
        return rows
    at = layer.k.index.expand(rows.shape[:3]).flatten()  # (B * Hkv * n)
    return layer.rope.rotate(rows.flatten(0, 2), at).view_as(rows)


def pinned_scores(layer, q):
    """(B, H, T, n) fp32, in base 2: of the pinned keys, whether a query sees them or not."""
    keys = pinned_keys(layer).transpose(-2, -1)  # (B, Hkv, d, n)
    rows = q.float().unflatten(1, (keys.shape[1], -1)).flatten(2, 3)  # (B, Hkv, R * T, d)
    s = rows @ keys * (LOG2E / math.sqrt(q.shape[-1]))  # (B, Hkv, R * T, n)
    return s.unflatten(2, (-1, q.shape[2])).flatten(1, 2).contiguous()


def attention(q, layer, window=None):
    """q (B, H, T, d) rotated, the T newest tokens of a LayerCache -> output (B, H, T, d), log-sum-exp (B, H, T), and
    the Pins of keys and of values, with their scores."""
    B, H, T, d = q.shape
    k, v, S = layer.k, layer.v, layer.length
    Hkv, q = k.recent.shape[1], q.contiguous()
    R, halves = H // Hkv, 2 if layer.method.rope == "pre" else 1
    k_pins = pins_of(layer, k, q, pinned_scores(layer, q) if k.index is not None and k.first else None)
    v_pins = pins_of(layer, v, q, None)
    launches, pieces = [], 0
    cuts = sorted({0, k.first, v.first, S})  # keys and values may be coded up to different tokens
    for begin, end in zip(cuts, cuts[1:]):
        sides = side_of(k, begin, halves), side_of(v, begin, 1)
        replaced = (k_pins.slot is not None and begin < k.first) or (v_pins.slot is not None and begin < v.first)
        M, N, warps = tiling(sides, halves, T * R, replaced)
        wide = q.dtype.itemsize > 2 and not INTERPRETED  # fp32: no tensor cores, and tiles fill shared memory
        M = min(M, 16) if wide else M
        tiles = triton.cdiv(T * R, M)
        wanted = min(triton.cdiv(2 * processors(q.device), tiles * B * Hkv), triton.cdiv(end - begin, 4 * N))
        split = triton.cdiv(triton.cdiv(end - begin, wanted), N) * N
        parts = triton.cdiv(end - begin // N * N, split)
        launches.append((begin, end, sides, M, N, warps, 1 if wide else 3, split, pieces, parts))
        pieces += parts
    acc = torch.empty(pieces, B, H, T, d, dtype=torch.float32, device=q.device)
    top, total = torch.empty(2, pieces, B, H, T, dtype=torch.float32, device=q.device)  # (pieces, B, H, T) both
    for begin, end, sides, M, N, warps, stages, split, first, parts in launches:
        turn = Turn()
        if halves == 2:
            turn = turn_of(layer.rope, N, triton.next_power_of_2(triton.cdiv(S, N)), q.device)
        dot = product_type(q, *sides)
        widths = [max(16, triton.next_power_of_2(triton.cdiv(d // n, side.planes.value)))
                  for n, side in zip((halves, 1), sides)]
        attend_kernel[parts, triton.cdiv(T * R, M), B * Hkv](
            q, *sides, turn, k_pins if begin < k.first else Pins(), v_pins if begin < v.first else Pins(),
            acc[first:], top[first:], total[first:], *q.stride()[:3], begin, end, split, T, S, window or S,
            B * H * T, LOG2E / math.sqrt(d), H, R, d, halves, *widths, M, N, dot, num_warps=warps, num_stages=stages,
            **FMA)
    out, lse = torch.empty_like(q), torch.empty(B, H, T, dtype=torch.float32, device=q.device)
    M = min(16, triton.next_power_of_2(T))
    pinned = v.pinned if v_pins.slot is not None else None
    merge_kernel[B * H, triton.cdiv(T, M)](
        acc, top, total, v_pins.score, pinned, out, lse, pieces, B * H * T, T, v_pins.n,
        *(pinned.stride()[:3] if pinned is not None else (0, 0, 0)), H, R, d, triton.next_power_of_2(d), M,
        min(64, max(16, triton.next_power_of_2(v_pins.n))), **FMA)
    return out, lse, k_pins, v_pins


def product_type(q, *sides):
    """What the operands of a product are rounded to: fp16 for planes, which are fp16; else the model's own 16 bits."""
    if q.dtype.itemsize > 2 or INTERPRETED:  # the interpreter cannot multiply bf16
        return tl.float32
    return tl.float16 if q.dtype == torch.float16 or any(s.kind.value == "planes" for s in sides) else tl.bfloat16


def dequant_attention(q, layer_cache, window=None):
    """Attention of the T newest tokens to all: q (B, H, T, d), rotated -> (B, H, T, d). window: of the model.

    Equals `K, V = layer_cache.read()` and scaled_dot_product_attention, and writes neither K nor V.
    """
    return attention(q, layer_cache, window)[0]


# ---- 5. AnTKV's anchor scores

@triton.jit(do_not_specialize=["queries", "keys", "window"])
def anchor_kernel(q, norm, lse, k, of_k, of_v, k_batch, k_head, k_token, queries, keys, window, factor,
                  H: tl.constexpr, R: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, M: tl.constexpr,
                  N: tl.constexpr, DOT: tl.constexpr):
    # One program: N keys of one KV head, and all queries that see them: no other program adds to their sums. Bytes: the
    # keys once, the queries once a block of keys; two numbers a key written. Products: half those of the attention.
    #   q (B, H, T, d)    norm, lse (B, H, T) fp32    k (B, Hkv, S, d), rotated    of_k, of_v (B, Hkv, S) fp32
    bh = tl.program_id(1).to(tl.int64)
    b, h = bh // (H // R), bh % (H // R)
    j = tl.program_id(0) * N + tl.arange(0, N)  # (N)
    c = tl.arange(0, D)
    mask = (j < keys)[:, None] & (c < DIM)[None]
    x = tl.load(k + b * k_batch + h * k_head + j.to(tl.int64)[:, None] * k_token + c[None], mask, 0)  # (N, D)
    x = tl.trans(x.to(tl.float32)).to(DOT)  # (D, N)
    sum_k, sum_v = tl.full((N,), 0.0, tl.float32), tl.full((N,), 0.0, tl.float32)
    first = tl.maximum(tl.program_id(0) * N - (keys - queries), 0) * R // M * M  # the first row that sees any of them
    last = tl.minimum(tl.program_id(0) * N + N - 1 - (keys - queries) + window, queries) * R
    for row0 in range(first, last, M):
        row = row0 + tl.arange(0, M)  # (M)
        t, live = row // R, row < queries * R
        line = (b * H + h * R + row % R) * queries + t  # (M)
        rows = tl.load(q + line[:, None] * DIM + c[None], live[:, None] & (c < DIM)[None], 0)  # (M, D)
        s = tl.dot((rows.to(tl.float32) * factor).to(DOT), x, input_precision="ieee")  # (M, N)
        at = keys - queries + t  # (M): positions
        seen = live[:, None] & (j[None] <= at[:, None]) & (j[None] > at[:, None] - window)
        A = tl.exp2(tl.where(seen, s - tl.load(lse + line, live, 0)[:, None] * 1.4426950408889634, float("-inf")))
        sum_v += tl.sum(A, 0)
        sum_k += tl.sum(tl.load(norm + line, live, 0)[:, None] * A * (1 - A), 0)
    tl.store(of_k + bh * keys + j, sum_k, j < keys)
    tl.store(of_v + bh * keys + j, sum_v, j < keys)


def anchor_scores(q, k, lse, window=None):
    """AnS(K) and AnS(V), (B, Hkv, S) both: what `tinykv.anchors.anchor_scores`, its torch lines, gives.

    q (B, H, T, d) and k (B, Hkv, S, d), rotated; lse (B, H, T) may be over more keys than these, the T newest's.
    """
    (B, H, T, d), (Hkv, S) = q.shape, k.shape[1:3]
    q, norm = q.contiguous(), q.float().norm(dim=-1)  # (B, H, T)
    of_k, of_v = torch.empty(2, B, Hkv, S, dtype=torch.float32, device=q.device)
    most = 64 if q.dtype.itemsize == 2 or INTERPRETED else 16  # rows of fp32 fill the registers
    M, N, D = min(most, triton.next_power_of_2(T * H // Hkv)), 64, triton.next_power_of_2(d)
    anchor_kernel[triton.cdiv(S, N), B * Hkv](
        q, norm, lse.contiguous(), k, of_k, of_v, *k.stride()[:3], T, S, window or S, LOG2E / math.sqrt(d),
        H, H // Hkv, d, D, M, N, product_type(q), num_warps=4, num_stages=2, **FMA)
    return of_k, of_v


# ---- 6. What stays torch

def topk_outliers(hidden, channel, k):
    """KVSink's scores: hidden (B, T, D) -> the k largest |h| of one channel, and where they are: (B, k) both.

    No kernel: it reads one 32-byte sector a token, 1 MB of 32K tokens, so the start of any kernel takes longer.
    """
    score, at = hidden[..., channel].float().abs().sort(dim=1, descending=True, stable=True)  # ties: the earlier
    return score[:, :k], at[:, :k]


def code_rows(codec, rows, skip=None):
    """New rows (B, Hkv, T, d) -> Codes. No kernel: a row is coded once and read by every token after it, in blocks."""
    return codec.encode(rows, skip)


# ---- 7. The cache

class TritonLayer(LayerCache):
    """A layer whose reading is the kernels' attention."""

    def __init__(self, layer, method, rope, protocol, window):
        super().__init__(layer, method, rope, protocol)
        self.window = window
        self.maps = {}  # kind: (index, coded tokens, slots): what `slots_of` says changes only where tokens are coded

    def slots(self, part, B):
        """`slots_of` a part, kept until something is coded or pinned."""
        index, coded, slot = self.maps.get(part.kind, (None, 0, None))
        if index is not part.index or coded != part.first:
            slot = slots_of(part.index, part.first, B)
            self.maps[part.kind] = part.index, part.first, slot
        return slot

    def attend(self, q, k, v, positions, state):
        """As `update`; returns what attention makes of it, (B, H, T, d)."""
        self.append(k, v, positions)
        q, scores = self.rope.rotate(q, positions), scores_of(self.method)
        if self.protocol == "stream" or scores:
            out, *seen = attention(q, self, self.window)
            if scores:
                self.add_scores(q, *seen)
        if self.protocol == "paper":
            self.code_all(state)
            return dequant_attention(q, self, self.window)
        self.code_due(state)
        return out

    def add_scores(self, q, lse, k_pins, v_pins):
        """Eq. 5 for the rows that are exact. Those of pinned rows are already there, as scores in base 2."""
        recent, Hkv = self.k.recent, self.k.recent.shape[1]
        if self.method.rope == "pre":
            recent = self.rope.rotate(recent, torch.arange(self.k.first, self.length, device=q.device))
        pinned_k = pinned_v = None
        at, norm = torch.arange(self.length - q.shape[2], self.length, device=q.device), q.float().norm(dim=-1)
        if k_pins.slot is not None:
            seen = self.k.index[:, :, None] > at[:, None] - (self.window or self.length)  # (B, h, T, n)
            seen = seen.repeat_interleave(q.shape[1] // seen.shape[1], dim=1)  # (B, H, T, n)
            A = torch.exp2(k_pins.score - lse[..., None] * LOG2E) * seen  # (B, H, T, n)
            pinned_k = (norm[..., None] * A * (1 - A)).sum(2).unflatten(1, (Hkv, -1)).sum(2)  # (B, Hkv, n)
        if v_pins.slot is not None:
            A = torch.exp2(v_pins.score - lse[..., None] * LOG2E)  # (B, H, T, n)
            pinned_v = A.sum(2).unflatten(1, (Hkv, -1)).sum(2)  # (B, Hkv, n)
        of_k, of_v = anchor_scores(q, recent, lse, self.window)  # (B, Hkv, recent) both
        self.k.add_exact(of_k, pinned_k)
        self.v.add_exact(of_v, pinned_v)


def check_device(device):
    if device.type != "cuda" and not INTERPRETED:
        raise UserError(f"the triton backend needs a GPU, and the model is on {device.type}; use --backend torch, "
                        "or set TRITON_INTERPRET=1 to go through the kernels slowly, line by line")


class TritonCache(KVCache):
    """A KVCache that `Attention` asks for its output, and not for keys and values."""

    def __init__(self, model, method, protocol="stream"):
        self.check(method, model.lm_head.weight.device)
        super().__init__(model, method, protocol)

    @staticmethod
    def check(method, device):
        """UserError for what the triton backend cannot do: it never falls back."""
        check_device(device)
        name = type(method).__name__
        for verb in ("encode", "decode"):
            if getattr(type(method), verb) is not getattr(Method, verb):
                raise UserError(f"{name} has its own `{verb}`, which the triton backend does not know; use --backend "
                                "torch")
        for codec in (codec for layer in method.codecs for codec in layer.values()):
            if type(codec) not in (Exact, *SIDES):
                raise UserError(f"{name} codes by {type(codec).__name__}, for which the triton backend has no kernel; "
                                f"it has {', '.join(c.__name__ for c in (Exact, *SIDES))}; use --backend torch")
            if type(codec) is Codebook and codec.n & codec.n - 1:
                raise UserError(f"{name}: the triton backend looks up vectors of 1, 2, 4, 8 ... channels; these have "
                                f"{codec.n}; use --backend torch")
        if scores_of(method) and method.v_block not in (None, method.block):
            raise UserError(f"{name} codes values at another pace than keys, and the triton backend scores both at "
                            "once; use --backend torch")

    def new_layer(self, layer):
        return TritonLayer(layer, self.method, self.rope, self.protocol, self.config.sliding_window)

    def attend(self, layer, q, k, v, positions):
        """Add new tokens to a layer; returns the attention's output for them, (B, H, T, d)."""
        self.check_one_window(layer)
        return self.layers[layer].attend(q, k, v, positions, self.state)


def scores_of(method):
    """Whether a method wants anchor scores. UserError if it looks at keys in a way that no kernel knows."""
    owner = next(cls for cls in type(method).__mro__ if "attend" in vars(cls))
    if owner is not Method and "anchor_scores" not in vars(owner):
        raise UserError(f"{owner.__name__}.attend reads all keys, and the triton backend never writes them; use "
                        "--backend torch, or the scores of AnTKV")
    return owner is not Method and method.anchor_scores


# ---- 8. The commands

#            name: (method, its settings)
FORMATS = {
    "fp16": ("fp16", {}),
    **{f"{bits:g}-bit per token": ("rtn", {"k_bits": bits, "v_bits": bits, "scheme": "token-dynamic"})
       for bits in (8, 4, 3, 2, 1.5, 1)},
    **{f"{bits}-bit kivi, groups of 128": ("kivi", {"k_bits": bits, "v_bits": bits, "group_size": 128})
       for bits in (4, 2)},
    "2-bit kivi, groups of 32": ("kivi", {}),
    "2-bit static, K before RoPE": ("rtn", {"scheme": "channel-static"}),
    "2-bit kvsink, 5 kept": ("kvsink", {"scheme": "token-dynamic", "emergence_layer": 0, "outlier_channel": 0}),
    "2-bit skvq": ("skvq", {}),
    "2-bit kvquant, 1% outliers": ("kvquant", {}),
    **{f"{bits:g}-bit codebooks {vq}": ("cq", {"vq": vq}) for vq, bits in
       (("d2m256", 4), ("d4m256", 2), ("d8m256", 1), ("d16m4096", 0.75))},
    "1-bit antkv, 1% kept": ("antkv", {"vq": "d8m256"}),
}
SHAPES = {  # L, D, MLP, H, Hkv, vocabulary, theta
    "LLaMA-3-8B": (32, 4096, 14336, 32, 8, 128256, 500000.0),
    "LLaMA-2-7B": (32, 4096, 11008, 32, 32, 32000, 10000.0),
}


def config_of(shape, layers=None, positions=2 ** 20):
    L, D, mlp, H, Hkv, vocab, theta = SHAPES[shape]
    return LlamaConfig(vocab, D, mlp, layers or L, H, Hkv, D // H, positions, rope_theta=theta)


def method_of(name, config, device):
    """A method of FORMATS, with tables of random numbers where it would learn them: they cost the same to read."""
    kind, settings = FORMATS[name]
    method = METHODS[kind](config, **settings)
    for codec in (codec for layer in method.codecs for codec in layer.values()):
        h = config.num_key_value_heads * config.head_dim
        wide = torch.full((h,), 2.5, device=device)  # (h): a hundredth of normal numbers lie beyond
        if type(codec) is Affine and codec.static:
            codec.fix(-wide.view(-1, config.head_dim), wide.view(-1, config.head_dim))
        elif type(codec) is NonUniform:
            codec.levels = torch.linspace(-1, 1, 2 ** codec.bits, device=device).half()  # (2**bits)
            codec.fix(-wide, wide)
        elif type(codec) is ClippedGroups:
            codec.regroup(torch.arange(h, device=device) % (h // codec.group_size))
        elif type(codec) is Codebook:
            m = int(settings["vq"].split("m")[1])
            codec.centroids = torch.randn(codec.places, m, codec.n, device=device).half()
    return method


def filled(layer, config, B, coded, device, dtype):
    """Put random tokens into a LayerCache: `coded` of them (256, 512, 1024, ...) in codes, then the recent ones.

    As many as the method keeps are pinned, evenly spread.
    """
    def rows(T):
        return torch.randn(B, config.num_key_value_heads, T, config.head_dim, device=device).to(dtype)
    method = layer.method
    n = max(1, coded // 100) if method.keeps_share else method.preserve
    for part in (layer.k, layer.v):
        if n:
            index = torch.arange(n, dtype=torch.int32, device=device) * (coded // n)  # (n)
            part.index = index.expand(B, config.num_key_value_heads if method.keeps_share else 1, n)
            part.pinned = rows(n)
        if method.anchor_scores:
            part.pinned_score = torch.zeros(B, config.num_key_value_heads, n, device=device)
            part.score = torch.zeros(B, config.num_key_value_heads, method.recent + 1, device=device)
        codes = method.encode(layer.layer, part.kind, rows(256), None)
        while codes.q.shape[2] < coded:
            codes = codes.append(codes)
        part.coded, part.first, part.recent = codes, coded, rows(method.recent + 1)
    layer.length = coded + method.recent + 1
    return layer


def new_layer(name, config, B, coded, device, dtype):
    method, rope = method_of(name, config, device), Rope(config)
    rope.freq = rope.freq.to(device)  # (d/2)
    return filled(TritonLayer(0, method, rope, "stream", None), config, B, coded, device, dtype)


class Pretend:
    """In the place of Triton's driver: kernels are compiled for `target` and taken apart, and nothing is launched."""

    def __init__(self, sm):
        self.sm, self.utils, self.kernels = sm, self, []

    def get_current_target(self):
        return GPUTarget("cuda", self.sm, 32)

    def get_current_device(self):
        return self.sm  # what is compiled is kept by device

    def get_current_stream(self, device):
        return 0

    def get_device_properties(self, device):
        return {"max_shared_mem": 166912 if self.sm == 80 else 232448}

    def launcher_cls(self, source, metadata):
        self.source, self.warps = source, metadata.num_warps
        return lambda *args: None

    def load_binary(self, name, cubin, shared, device):
        row = {"sm": self.sm, "kernel": name.removesuffix("_kernel"), "exact": True, "each": "-", "shared": shared,
               "cubin": hashlib.sha256(cubin).hexdigest(), **taken_apart(cubin)}
        if name == "attend_kernel":
            constants, names = self.source.constants, self.source.fn.arg_names
            row["exact"] = all(constants[names.index(side), 0].value == "exact" for side in "kv")
            row["halves"], N, d = (constants[names.index(x),] for x in ("HALVES", "N", "DIM"))
            row["each"] = f"{row['loop'] * 32 * self.warps / (2 * N * d):.1f}"
        self.kernels.append(row)
        return None, None, 0, 0, 1024


def taken_apart(cubin):
    """Registers of a thread, instructions that spill them, and the instructions of the longest loop."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = triton.knobs.nvidia
        usage = subprocess.check_output([tool.cuobjdump.path, "-res-usage", file.name], text=True)
        sass = subprocess.check_output([tool.nvdisasm.path, "-c", file.name], text=True, stderr=subprocess.DEVNULL)
    code, labels, loop, spills = 0, {}, 0, 0
    for line in sass.splitlines():
        if label := re.match(r"(\.L_\w+):", line):
            labels[label[1]] = code
        elif found := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z0-9]+)(.*)", line):
            code += 1
            spills += found[1] in ("STL", "LDL")
            back = re.search(r"\(?(\.L_\w+)\)?", found[2]) if found[1] == "BRA" else None
            if back and back[1] in labels:
                loop = max(loop, code - labels[back[1]])
    return {"registers": int(re.search(r"REG:(\d+)", usage)[1]), "spills": spills, "loop": loop}


UNCOMPILED = ("4-bit kivi, groups of 128", "2-bit codebooks d4m256", "0.75-bit codebooks d16m4096")  # as others are


def compiled(job):
    """(sm, name of a format, queries) -> a row for each kernel that this starts, for LLaMA-3-8B in bf16."""
    sm, name, T = job
    torch.set_num_threads(1)
    driver.set_active(Pretend(sm))
    config = config_of("LLaMA-3-8B", layers=1)
    layer = new_layer(name, config, 1, 256, "cpu", torch.bfloat16)
    q = torch.randn(1, config.num_attention_heads, T, config.head_dim).to(torch.bfloat16)
    attention(q, layer)
    if name == "fp16":
        anchor_scores(q, layer.k.recent, torch.zeros(q.shape[:3]))
    for row in driver.active.kernels:
        row["format"], row["queries"] = name, T
        if row["exact"]:
            row["format"] = {1: "16-bit rows", 2: "16-bit rows, K before RoPE"}.get(row.get("halves"), "")
    return driver.active.kernels


def compile_all(args):
    """Every kernel at its settings through ptxas, and a table. Exit status 1 if one spills."""
    at_least(1, **{"--jobs": args.jobs})
    names = ("fp16", "2-bit per token", "2-bit skvq", "1-bit codebooks d8m256") if args.quick else [
        name for name in FORMATS if name not in UNCOMPILED]
    jobs = [(sm, name, T) for sm in (90, 80) for name in names for T in (1, 128)]
    with ProcessPoolExecutor(args.jobs) as pool:
        rows = [row for rows in tqdm(pool.map(compiled, jobs), total=len(jobs), disable=not sys.stderr.isatty(),
                                     leave=False, unit="format") for row in rows]
    rows = list({(row["sm"], row["queries"], row["kernel"], row["format"]): row for row in rows}.values())  # each once
    rows.sort(key=lambda row: (-row["sm"], row["queries"], row["kernel"]))
    print("bf16, LLaMA-3-8B: d 128, 4 query heads a KV head. instr.: of the loop, a thread's, for each number\n")
    print(f"{'kernel':8}{'format':30}{'queries':>8}{'GPU':>7}{'regs':>6}{'spills':>8}{'shared KB':>11}{'instr.':>8}")
    for row in rows:
        print(f"{row['kernel']:8}{row['format']:30}{row['queries']:>8}{'sm_' + str(row['sm']):>7}"
              f"{row['registers']:>6}{row['spills']:>8}{row['shared'] / 1024:>11.1f}{row['each']:>8}")
    if any(row["spills"] for row in rows):
        sys.exit("kernels.py: error: a kernel spills registers")


# ---- 9. Right on this GPU?

def off_by(name, config, T, device, dtype):
    """How far the attention of T new queries in a format is from torch's on decoded rows, over the size of that."""
    layer = new_layer(name, config, 2, 512, device, dtype)
    q = torch.randn(2, config.num_attention_heads, T, config.head_dim, device=device).to(dtype)
    K, V = (x.float().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in layer.read())  # (B, H, S, d) both
    want, _ = merge_lines(*(x[None] for x in attend_lines(q.float(), K, V, 0, layer.length, layer.length)))
    return ((dequant_attention(q, layer).float() - want).norm() / want.norm()).item()


def check(shape, device, dtypes=(torch.float16, torch.bfloat16)):
    """Every format's attention beside torch's. UserError if one is further off than 16 bits explain."""
    torch.manual_seed(0)
    config = config_of(shape, layers=1)
    print(f"{shape}, distance from torch's attention: {'':14}" + "".join(f"{str(t)[6:]:>20}" for t in dtypes))
    print(f"{'format':54}" + f"{'1 query':>10}{'40':>10}" * len(dtypes))
    wrong = []
    for name in FORMATS:
        errors = [off_by(name, config, T, device, dtype) for dtype in dtypes for T in (1, 40)]
        wrong += [name] if not max(errors) < 0.03 else []  # and not for NaN
        print(f"{name:54}" + "".join(f"{error:>10.5f}" for error in errors), flush=True)
    if wrong:
        raise UserError(f"the kernels are wrong on this device for {', '.join(wrong)}")


# ---- 10. The benchmark

def byte_limits(shape):
    """What reading fewer bytes can gain at most: K and V of a token and KV head, without the recent rows."""
    torch.manual_seed(0)
    config = config_of(shape, layers=1)
    lines = []
    for name in FORMATS:
        layer = new_layer(name, config, 1, 4096, "cpu", torch.float16)
        held = sum(part.part_bytes()[which] for part in (layer.k, layer.v) for which in ("pinned", "coded"))
        held /= layer.k.first * config.num_key_value_heads
        lines.append((name, held, 4 * config.head_dim / held))
    return lines


def best_of(run):
    """Median milliseconds of a call on the GPU, the L2 cache flushed before each.

    It is replayed from a CUDA graph: the time that Python takes to start kernels is in `bench_decoding`, and not here.
    """
    run()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return triton.testing.do_bench(graph.replay, warmup=20, rep=100, return_mode="median")


def bench_attention(shape, contexts, batches, formats, device):
    """A line for each format: time, GB/s of what is held, share of the copy bandwidth, ratios to SDPA and to fp16."""
    config = config_of(shape, layers=1)
    block = torch.empty(2 ** 29 if device.type == "cuda" else 2 ** 10, dtype=torch.uint8, device=device)
    copy = 2 * block.nbytes / best_of(lambda: block.clone()) / 1e6  # GB/s, read and written
    print(f"\n{shape}, attention of one new token, copy bandwidth {copy:.0f} GB/s")
    print(f"{'context':>8}{'batch':>6}  {'format':30}{'ms':>9}{'GB/s':>8}{'of copy':>9}{'x SDPA':>8}{'x fp16':>8}")
    for context, B in itertools.product(contexts, batches):
        sdpa = fitting(time_sdpa, config, context, B, device)
        base = None
        for name in formats:
            found = fitting(time_attention, name, config, context, B, device)
            if found is None:
                print(f"{context:>8}{B:>6}  {name:30}{'does not fit':>9}")
                continue
            ms, held = found
            speed = held / ms / 1e6
            base = ms if name == "fp16" else base
            ratios = "".join(f"{x / ms:>8.2f}" if x else f"{'-':>8}" for x in (sdpa, base))
            print(f"{context:>8}{B:>6}  {name:30}{ms:>9.3f}{speed:>8.0f}{speed / copy:>9.0%}{ratios}", flush=True)


def one_query(config, B, device):
    return torch.randn(B, config.num_attention_heads, 1, config.head_dim, device=device).to(torch.bfloat16)


def time_sdpa(config, context, B, device):
    """Milliseconds of torch's attention to 16-bit rows."""
    K, V = torch.randn(2, B, config.num_key_value_heads, context, config.head_dim, device=device, dtype=torch.bfloat16)
    return best_of(partial(F.scaled_dot_product_attention, one_query(config, B, device), K, V, enable_gqa=True))


def time_attention(name, config, context, B, device):
    """Milliseconds of a format's attention, and the bytes that its cache holds."""
    layer = new_layer(name, config, B, context, device, torch.bfloat16)
    held = sum(sum(part.part_bytes().values()) for part in (layer.k, layer.v))
    return best_of(partial(dequant_attention, one_query(config, B, device), layer)), held


def bench_scores(shape, contexts, device):
    """Beside the attention forward of a prompt: its anchor scores; what stays torch beside it too."""
    config = config_of(shape, layers=1)
    print(f"\n{shape}, a prompt: ms of SDPA, anchor_scores, topk_outliers; code_rows of its keys in 2 bits")
    for T in contexts:
        q, k, v = (torch.randn(1, h, T, config.head_dim, device=device).to(torch.bfloat16) for h in
                   (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads))
        lse, hidden = torch.zeros(q.shape[:3], device=device), torch.randn(1, T, config.hidden_size, device=device)
        codec = method_of("2-bit per token", config, device).codecs[0]["k"]
        times = [best_of(run) for run in (
            partial(F.scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True),
            partial(anchor_scores, q, k, lse), partial(topk_outliers, hidden, 0, 5), partial(code_rows, codec, k))]
        print(f"{T:>8}" + "".join(f"{ms:>10.3f}" for ms in times), flush=True)


def decoding(model, name, B, context, steps, device):
    """Tokens a second of a model whose cache holds `context` random tokens in a format."""
    config = model.config
    cache = TritonCache(model, method_of(name, config, device))
    for layer in cache.layers:
        filled(layer, config, B, context, device, model.lm_head.weight.dtype)
    new = torch.zeros(B, 1, dtype=torch.long, device=device)
    model.generate(new, 2, cache)  # compiles what is not compiled yet
    if device.type == "cuda":
        torch.cuda.synchronize()
    clock = time.perf_counter()
    model.generate(new, steps, cache)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return B * steps / (time.perf_counter() - clock)


def bench_decoding(config, contexts, formats, device, steps=32, largest=4096):
    """Tokens a second; then the longest context of one sequence and the largest batch at 8K, both by doubling."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Llama(config).to(torch.bfloat16).requires_grad_(False)
    model.rope.freq = model.rope.freq.to(device)  # (d/2)
    print(f"\n{'format':30}" + "".join(f"{f'tok/s at {c}':>17}" for c in contexts) + f"{'longest':>10}{'batch':>7}")
    for name in formats:
        def speed(B, context, steps, name=name):
            return fitting(decoding, model, name, B, context, steps, device)
        line = f"{name:30}" + "".join(f"{speed(1, context, steps) or 0:>17.1f}" for context in contexts)
        longest = doubled(contexts[0], config.max_position_embeddings, lambda context: speed(1, context, 1))
        batch = doubled(1, largest, lambda B: speed(B, contexts[0], 1))
        print(f"{line}{longest:>10}{batch:>7}", flush=True)


def doubled(size, end, fits):
    """The largest of size, 2 size, ... below `end` that fits; 0 if none does."""
    found = 0
    while size < end and fits(size):
        found, size = size, 2 * size
    return found


def fitting(run, *args):
    """What run(*args) gives, or None if the GPU has no memory for it."""
    try:
        return run(*args)
    except torch.OutOfMemoryError:
        pass
    torch.cuda.empty_cache()  # only now: the exception held what had been allocated
    return None


def bench(args):
    if not torch.cuda.is_available():
        print("byte limits: K and V of one token and KV head, LLaMA-3-8B, recent rows and tables not counted\n")
        print(f"{'format':30}{'bytes':>9}{'at most':>9}")
        for name, held, limit in byte_limits("LLaMA-3-8B"):
            print(f"{name:30}{held:>9.1f}{limit:>8.2f}x")
        print("no GPU here: nothing was measured")
        return
    device, formats = torch.device("cuda"), list(FORMATS)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, bf16")
    check("LLaMA-3-8B", device)
    contexts = [2 ** i * 1024 for i in range(2, 8)]
    for shape in SHAPES:
        bench_attention(shape, contexts, (1, 8), formats, device)
    bench_scores("LLaMA-3-8B", contexts[:4], device)
    bench_decoding(config_of("LLaMA-3-8B", positions=2 ** 24), (8192, 32768), formats, device)


def parser():
    p = Parser(description=__doc__.splitlines()[0], epilog="eval_ppl.py --backend triton uses them.")
    commands = p.add_subparsers(dest="command", required=True)
    c = commands.add_parser("compile", help="compile every kernel for sm_80 and sm_90 and print its size; needs no GPU")
    c.add_argument("--jobs", type=int, default=2, help="processes (default: %(default)s)")
    c.add_argument("--quick", action="store_true", help="a few formats only")
    commands.add_parser("check", help="each format's attention beside torch's, on a GPU, or in Triton's interpreter")
    commands.add_parser("bench", help="on a GPU: that, then attention, scores and decoding measured; else byte limits")
    return p


def main():
    p = parser()
    with one_line(p):
        args = p.parse_args()
        if args.command == "compile":
            compile_all(args)
        elif args.command == "bench":
            bench(args)
        else:
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            check_device(device)
            check("LLaMA-3-8B", device)


if __name__ == "__main__":
    main()
