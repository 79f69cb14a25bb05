"""The cache whose attention is the kernels of kernels.py: `--attention triton`.

    PackedRows     keys or values as the kernels read them, made from a codec and its codes
    attention      new queries to all tokens: a launch for each range of tokens that lie alike
    TritonLayer    a `LayerCache` that attends from its packed codes, and decodes none
    TritonCache    a `KVCache` of such layers, which `model.Attention` asks for its output
"""
import math
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

import kernels
from kernels import FMA, LIFT, LOG2E, Plane
from tinykv import UserError
from tinykv.cache import KVCache, LayerCache
from tinykv.codecs.affine import Affine
from tinykv.codecs.base import TERNARY, Exact
from tinykv.codecs.clipped import ClippedGroups
from tinykv.codecs.codebook import Codebook
from tinykv.codecs.nonuniform import NonUniform
from tinykv.methods.antkv import AnTKV

TILE = 64  # tokens that a program reads at a time, at most


# What a kernel reads

BITS = (1, TERNARY, 2, 3, 4, 8)  # of codes that the kernels read


class Grid(NamedTuple):
    """x = code * scale + zero. So many `tokens` and `channels` share a scale; 0: all tokens."""
    scale: torch.Tensor
    zero: torch.Tensor
    batch: int  # strides, in numbers: from one sequence to the next
    head: int
    token: tl.constexpr  # from a group of tokens to the next
    channel: tl.constexpr
    tokens: tl.constexpr
    channels: tl.constexpr
    form: tl.constexpr  # "offset"; "integer": x = scale * (code - zero); "fp8": bytes of e4m3


class PackedRows(NamedTuple):
    """The keys, or the values, of a range of tokens, as a kernel reads them.

    What is tl.constexpr is a constant of the compiled kernel. The stride of a token is: only then
    can the compiler load 16 bytes at once. What grows with the text is not.
    """
    codec: tl.constexpr  # name of the codec's class
    # scales leave the products: of each "token", of each "channel"; "": numbers are decoded
    fold: tl.constexpr
    width: tl.constexpr  # d, channels of a head
    data: torch.Tensor  # words: uint8; uint16, two bytes of codes at a time; or 16-bit numbers
    batch: int  # strides, in words: from one sequence to the next
    head: int  # 0 where the heads of a token are one row
    token: tl.constexpr
    start: int  # position of the first token
    bits: tl.constexpr  # of a code; 2 for three levels
    row: tl.constexpr  # bytes of a row
    planes: tl.constexpr  # where numbers are decoded: the head, or its two halves
    words: tl.constexpr  # of a plane
    tile: tl.constexpr  # W: the next power of 2, at least the 16 that a product takes
    step: tl.constexpr  # channels from a word of a plane to the next
    size: tl.constexpr  # strides from a word to the next: 3 for words of three bytes
    groups: tl.constexpr  # scales of a token that leave the products, each of as many planes
    grid: Grid | None = None
    ternary: torch.Tensor | None = None  # of three levels, five to a byte: `ternary_table`
    tables: tuple | None = None  # Levels, Order or Book: what else a codec decodes by


def made(kind, **fields):
    """A tuple of class `kind`. What that declares as tl.constexpr becomes a constant of the
    compiled kernel.
    """
    declared = kind.__annotations__
    return kind(**{name: tl.constexpr(x) if declared[name] is tl.constexpr else x
                   for name, x in fields.items()})


def made_rows(codec, data, width, start=0, **fields):
    """PackedRows of words `data` (B, heads, T, words of a row), 1 head where those of a token are
    one row; the first token at position `start`.
    """
    batch, head, token, word = data.stride()
    assert word == 1 or data.shape[3] == 1, "the words of a row have to be neighbours"
    head = 0 if data.shape[1] == 1 else head
    tile = max(16, triton.next_power_of_2(fields["words"]))
    if fields["bits"] == TERNARY:
        fields.update(bits=2, ternary=ternary_table(data.device))
    return made(PackedRows, codec=codec, width=width, data=data, batch=batch, head=head,
                token=token, start=start, row=data.shape[3], tile=tile, **fields)


def single_rows(codec, packed, bits, width, halves, start=0, **more):
    """PackedRows of numbers that are loaded one by one: a plane is a head, or half of one."""
    words = width // halves
    planes = tuple(Plane(half * words, 0, 0, 0) for half in range(halves))
    return made_rows(codec, packed, width, start, fold="", bits=bits, planes=planes, words=words,
                     step=1, size=1, groups=1, **more)


def exact_rows(rows, halves, start=0):
    """rows (B, Hkv, T, d) as they are, the first at position `start`."""
    return single_rows("Exact", rows, 16, rows.shape[3], halves, start)


def planes_of(packed, bits, width, piece):
    """How codes `packed` of `width` channels a head are cut into planes: the words, and fields of
    PackedRows.

    No plane has channels of two pieces: of the groups that share a scale, or of the halves of a
    head. None if that cannot be.
    """
    size, step = 1, 1
    if bits == 3:  # eight codes in a word of three bytes
        if piece % 8:
            return None, None
        size, step, slices, words = 3, 8, width // piece, piece // 8
        # (first channel, slice, bit)
        places = [(n * piece + i, n, 3 * i) for n in range(slices) for i in range(8)]
    else:
        # the lowest bits of a row's bytes are `run` channels
        run = packed.shape[3]
        codes, apart = (5, 2) if bits == TERNARY else (8 // bits, bits)
        if piece < width and (run * codes != width or run % piece and piece % run):
            return None, None
        slices = max(1, run // piece)
        words = run // slices
        even = all(x % 2 == 0 for x in (packed.storage_offset(), *packed.stride()[:3]))
        if words % 32 == 0 and even and bits != TERNARY:  # two bytes are a word
            words, step, packed = words // 2, 2, packed.view(torch.uint16)
        places = [(i * run + n * words * step + byte, n, i * apart + 8 * byte)
                  for i in range(codes) for n in range(slices) for byte in range(step)]
    ten = 10 // math.ceil(bits) * math.ceil(bits)  # bits of the codes that are subnormal numbers
    planes = tuple(Plane(channel, n, bit // ten * ten, bit % ten) for channel, n, bit in places)
    return packed, dict(bits=bits, planes=planes, words=words, step=step, size=size)


@lru_cache
def ternary_table(device):
    """(256) uint16: the five codes of a byte in base 3, in two bits each."""
    byte = torch.arange(256)
    digits = [byte // 3 ** i % 3 * 4 ** i for i in range(5)]
    return sum(digits).to(torch.uint16).to(device)


def affine_rows(codec, codes, kind, halves):
    d, T = codec.width, codes.packed.shape[2]
    scale, zero = codes.scale, codes.zero  # (B, Hkv, T, d/G, 1) or (B, Hkv, T/G, 1, d) both
    if codec.static:
        scale, zero = codec.scale[None], codec.zero[None]  # (1, Hkv, 1, ...) both
    batch, head, token, channel_group, channel = scale.stride()

    # which tokens, and which channels, share a scale
    if codec.axis == "token":
        tokens, channels, channel = 1, codec.group, channel_group
    else:
        tokens, channels = codec.group or T, 1
    if codec.static:
        tokens, batch = 0, 0
    form = "integer" if codec.formula == "integer-zero" else "offset"
    grid = made(Grid, scale=scale, zero=zero, batch=batch, head=head, token=token, channel=channel,
                tokens=tokens, channels=channels, form=form)

    # whether scales leave the products: a token's; of keys a channel's, before RoPE if static
    fields = fold = None
    if codec.axis == "token" and halves == 1:
        fold, groups = "token", d // codec.group
        data, fields = planes_of(codes.packed, codec.bits, d, codec.group)
    elif kind == "k" and codec.axis == "channel" and (
            codec.static or halves == 1 and math.gcd(tokens, TILE) >= 16):
        fold, groups = "channel", 1
        data, fields = planes_of(codes.packed, codec.bits, d, d // halves)
    if fields is None:
        return single_rows("Affine", codes.packed, codec.bits, d, halves, grid=grid)
    return made_rows("Affine", data, d, fold=fold, groups=groups, grid=grid, **fields)


class Levels(NamedTuple):
    """KVQuant's levels, in the place of 0, 1, 2, ..., and its outliers; see `SparseCodes`."""
    levels: torch.Tensor  # (2**bits)
    row_end: torch.Tensor | None = None  # (T, B) int32
    numbers: torch.Tensor | None = None
    columns: torch.Tensor | None = None
    sequences: int = 0  # B


def nonuniform_rows(codec, codes, kind, halves):
    if codec.axis == "channel":
        grid = made(Grid, scale=codec.half, zero=codec.mid, batch=0, head=codec.width, token=0,
                    channel=1, tokens=0, channels=1, form="offset")
    else:
        grid = made(Grid, scale=codes.scale, zero=codes.zero, batch=codes.scale.stride(0), head=0,
                    token=codes.scale.stride(2), channel=0, tokens=1, channels=codec.width,
                    form="offset")
    tables = Levels(codec.levels)
    if codec.outliers and len(codes.values):
        row_end = codes.row_end[:, 0, :, 0].T.contiguous()  # (T, B)
        tables = Levels(codec.levels, row_end, codes.values, codes.columns, row_end.shape[1])
    return single_rows("NonUniform", codes.packed, codec.bits, codec.width, halves, grid=grid,
                       tables=tables)


class Order(NamedTuple):
    """SKVQ's channels: each one's place in the row of all heads, and the group of each place."""
    place: torch.Tensor  # (h) int32
    group: torch.Tensor  # (h) int32


def clipped_rows(codec, codes, kind, halves):
    scale, zero, form = codes.scale, codes.zero, "offset"
    if scale.itemsize == 1:
        scale, zero, form = scale.view(torch.uint8), zero.view(torch.uint8), "fp8"
    grid = made(Grid, scale=scale, zero=zero, batch=scale.stride(0), head=0, token=scale.stride(2),
                channel=1, tokens=1, channels=1, form=form)
    return single_rows("ClippedGroups", codes.packed, codec.bits, codec.width, halves, grid=grid,
                       tables=Order(inverse(codec.order), codec.group))


@lru_cache(maxsize=1024)
def inverse(order):
    """order (h): the channel at each place -> the place of each channel, (h) int32."""
    return order.argsort().to(torch.int32)


class Book(NamedTuple):
    """Centroids of n channels each, m of them in a book."""
    centroids: torch.Tensor  # (places or 1, m, n)
    n: tl.constexpr
    m: tl.constexpr
    side: tl.constexpr  # channels of a centroid that lie side by side in a tile, too: one load
    shared: tl.constexpr  # one book for all places


def codebook_rows(codec, codes, kind, halves):
    centroids = codec.centroids.contiguous()
    side = math.gcd(codec.n, codec.width // halves, 2 ** 20)
    book = made(Book, centroids=centroids, n=codec.n, m=centroids.shape[1], side=side,
                shared=len(centroids) == 1)
    return single_rows("Codebook", codes.packed, codec.code_bits, codec.width, halves, tables=book)


ROWS = {Affine: affine_rows, NonUniform: nonuniform_rows, ClippedGroups: clipped_rows,
        Codebook: codebook_rows}


def packed_rows(rows, begin, halves):
    """The coded, or the recent, tokens of a CachedRows: those that `begin` is one of."""
    if begin >= rows.n_coded:
        return exact_rows(rows.recent, halves, rows.n_coded)
    if type(rows.codec) is Exact:
        return exact_rows(rows.codes.packed, halves)
    return ROWS[type(rows.codec)](rows.codec, rows.codes, rows.kind, halves)


def check_method(method):
    """UserError for a method whose codes, or scores, no kernel knows."""
    name = type(method).__name__
    instead = "use --attention fused"
    for codec in {codec for pair in method.codecs for codec in pair}:
        if type(codec) not in (Exact, *ROWS):
            known = ", ".join(kind.__name__ for kind in (Exact, *ROWS))
            raise UserError(f"{name} quantizes by {type(codec).__name__}, for which there is no "
                            f"kernel; there are {known}; {instead}")
        if type(codec) is Codebook and codec.n & codec.n - 1:
            raise UserError(f"{name}: the kernels look up vectors of 1, 2, 4, 8 ... channels; "
                            f"these have {codec.n}; {instead}")
        if type(codec) in (Affine, NonUniform, ClippedGroups) and codec.bits not in BITS:
            bits = ", ".join(f"{bits:g}" for bits in BITS)
            raise UserError(f"{name}: the kernels read codes of {bits} and 16 bits; these have "
                            f"{codec.bits}; {instead}")
    own_score = type(method).score is not AnTKV.score
    if method.uses_scores and (own_score or not method.scores_attention):
        raise UserError(f"{name} has its own `score`, which reads all keys, and the kernels never "
                        f"write them; {instead}, or the scores of AnTKV")
    if method.uses_scores and method.v_block not in (None, method.block):
        raise UserError(f"{name} quantizes values at another pace than keys, and the kernels score "
                        f"both at once; {instead}")


# Launching the kernels

class Tile(NamedTuple):
    """M rows of queries, N tokens, warps of a program, stages of loads that are under way.

    maxnreg: registers of a thread, where the compiler would take fewer and spill.
    """
    M: int
    N: int
    warps: int
    stages: int
    maxnreg: int | None = None


# How the tiles are cut, by what is hardest to read. No kernel spills a register with these.
TILES = {  # decoding, and many queries at once
    # nothing is decoded: many loads have to be under way
    "exact": (Tile(16, 64, 4, 3), Tile(32, 64, 4, 3)),
    # a warp alone never waits for another, and its sums over tokens stay within it
    "token": (Tile(16, 64, 1, 3, 255), Tile(16, 64, 4, 3)),
    # the same, and the scales of channels
    "channel": (Tile(16, 64, 1, 3, 255), Tile(16, 64, 4, 3)),
    # a table is read for each byte: one warp would spill
    "ternary": (Tile(16, 64, 2, 3), Tile(16, 64, 4, 3)),
    # two products for each number, and the tables of cosines and sines
    "rotated": (Tile(16, 32, 1, 1), Tile(16, 64, 4, 1)),
    # one stage: only then are centroids loaded through the L1 cache
    "Codebook": (Tile(16, 64, 4, 1), Tile(16, 64, 4, 1)),
    # an address, a level, or outliers for every channel
    "single": (Tile(16, 32, 4, 3), Tile(16, 32, 8, 3)),
}


def kind_of(rows, halves):
    """What of TILES these PackedRows are; halves: 2 for keys before RoPE."""
    if rows.codec.value == "Codebook":
        return "Codebook"
    if rows.fold.value and rows.ternary is not None:
        return "ternary"
    if rows.codec.value == "Exact" or rows.fold.value:
        return "rotated" if halves == 2 else rows.fold.value or "exact"
    return "single"


def tiling(keys, values, halves, rows):
    """The Tile for `rows` rows of queries, which lies in one group of tokens: N divides it.

    Where a group is shorter than the 16 tokens that a product takes, scales go to each number
    instead.
    """
    kinds = list(TILES)
    hardest = max(kind_of(keys, halves), kind_of(values, 1), key=kinds.index)
    few = 4 if hardest == "rotated" else 16  # rows of queries, as in decoding
    tile = TILES[hardest][rows > few]
    groups = [side.grid.tokens.value for side in (keys, values) if side.grid is not None]
    group = math.gcd(tile.N, *(tokens for tokens in groups if tokens > 1))
    N = group if group >= 16 else tile.N
    return tile._replace(M=min(tile.M, triton.next_power_of_2(rows)), N=N)


class Launch(NamedTuple):
    """One run of attend_kernel: the tokens begin .. end, which lie alike in memory."""
    begin: int
    end: int
    keys: PackedRows
    values: PackedRows
    tile: Tile
    tiles: int  # of query rows
    split: int  # tokens of a piece
    first: int  # its first piece, among those of all launches
    pieces: int


class Attended(NamedTuple):
    """out (B, H, T, d); lse (B, H, T): the natural log-sum-exp of each query's scores; of kept
    keys and values the scores in base 2, (B, H, T, n), or None."""
    out: torch.Tensor
    lse: torch.Tensor
    key_scores: torch.Tensor | None
    value_scores: torch.Tensor | None


def attention(q, keys, values, rope=None, window=None, slots=None):
    """Attention of the T newest tokens to all: q (B, H, T, d), rotated; keys and values: CachedRows
    -> Attended.

    Equals reading keys and values, and scaled_dot_product_attention, and writes neither. rope:
    where keys are stored before it. window: of a model with a sliding window. slots: in the place
    of `slots_of`.
    """
    B, H, T, d = q.shape
    Hkv, S = keys.recent.shape[1], keys.n_coded + keys.recent.shape[2]
    R, halves, q = H // Hkv, 1 if rope is None else 2, q.contiguous()
    k_kept = kept_of(keys, q, slots, kept_scores(keys, q, rope))
    v_kept = kept_of(values, q, slots, None)

    # cut the text where keys, or values, begin to be recent; cut each part into pieces that fill
    # the GPU
    launches, first = [], 0
    cuts = sorted({0, keys.n_coded, values.n_coded, S})
    for begin, end in zip(cuts, cuts[1:]):
        k, v = packed_rows(keys, begin, halves), packed_rows(values, begin, 1)
        tile = tiling(k, v, halves, T * R)
        # a head of 80 channels is padded to 128: one warp has too few registers for it
        if d & d - 1 and tile.warps == 1:
            tile = tile._replace(warps=2)
        # fp32: no tensor cores, and tiles fill shared memory
        if q.dtype.itemsize > 2 and not kernels.INTERPRETED:
            tile = tile._replace(M=min(tile.M, 16), stages=1)
        tiles = triton.cdiv(T * R, tile.M)
        wanted = min(triton.cdiv(programs(q.device, tile.warps), tiles * B * Hkv),
                     triton.cdiv(end - begin, 4 * tile.N))
        split = triton.cdiv(triton.cdiv(end - begin, wanted), tile.N) * tile.N
        pieces = triton.cdiv(end - begin // tile.N * tile.N, split)
        launches.append(Launch(begin, end, k, v, tile, tiles, split, first, pieces))
        first += pieces

    acc = torch.empty(first, B, H, T, d, dtype=torch.float32, device=q.device)
    # (pieces, B, H, T) both
    top, total = torch.empty(2, first, B, H, T, dtype=torch.float32, device=q.device)
    for x in launches:
        dtype = product_type(q, x.keys, x.values)
        turn = Turn()
        if rope is not None:
            turn = turn_of(rope, x.tile.N, triton.next_power_of_2(triton.cdiv(S, x.tile.N)), dtype,
                           LIFT.value if x.keys.fold.value else 1, q.device)
        kernels.attend_kernel[x.tiles * B * Hkv, x.pieces](
            q, x.keys, x.values, turn, k_kept if x.begin < keys.n_coded else Kept(),
            v_kept if x.begin < values.n_coded else Kept(), acc[x.first:], top[x.first:],
            total[x.first:], *q.stride()[:3], x.begin, x.end, x.split, T, S, window or S, x.tiles,
            B * H * T, LOG2E / math.sqrt(d), H, R, x.tile.M, x.tile.N,
            DTYPES[dtype], num_warps=x.tile.warps, num_stages=x.tile.stages,
            maxnreg=x.tile.maxnreg, **FMA)

    out, lse = torch.empty_like(q), torch.empty(B, H, T, dtype=torch.float32, device=q.device)
    M, N = min(16, triton.next_power_of_2(T)), min(64, max(16, triton.next_power_of_2(v_kept.n)))
    kept = values.kept_rows if v_kept.slot is not None else None
    strides = (0, 0, 0) if kept is None else kept.stride()[:3]
    tiles = triton.cdiv(T, M)
    kernels.merge_kernel[tiles * B * H,](
        acc, top, total, v_kept.score, kept, out, lse, first, B * H * T, T, v_kept.n, tiles,
        *strides, H, R, d, triton.next_power_of_2(d), M, N, **FMA)
    return Attended(out, lse, k_kept.score, v_kept.score)


def programs(device, warps):
    """Programs that fill a GPU: 8 warps for each of its processors. In the interpreter some
    pieces, to be merged.
    """
    if device.type != "cuda":
        return 8
    return torch.cuda.get_device_properties(device).multi_processor_count * 8 // warps


class Kept(NamedTuple):
    """Kept rows of the keys, or of the values.

    A kept key takes the place of its slot as a *score*, which is known before. For a kept value
    the kernel writes the slot's score, and `merge_kernel` adds the row. So a token's key may be
    kept where its value is quantized.
    """
    # (B, 1 or Hkv, S) int32: number of a token's kept row, or -1
    slot: torch.Tensor | None = None
    batch: int = 0  # strides of `slot`
    head: int = 0
    score: torch.Tensor | None = None  # (B * H * T, n) fp32: of keys read, of values written
    n: int = 0


def kept_of(rows, q, slots, score):
    """Kept of keys or values whose slots may be coded, or none. score: of keys (B, H, T, n); of
    values None.
    """
    if rows.kept_positions is None or rows.n_coded == 0:
        return Kept()
    n = rows.kept_positions.shape[-1]
    slot = (slots or slots_of)(rows, len(q))  # (B, 1 or Hkv, coded and more)
    if score is None:
        score = torch.full((*q.shape[:3], n), float("-inf"), dtype=torch.float32, device=q.device)
    return Kept(slot, slot.stride(0), 0 if slot.shape[1] == 1 else slot.stride(1), score, n)


def slots_of(rows, B):
    """Of each coded token the number of its kept row, or -1: (B, 1 or Hkv, coded and more) int32.

    A multiple of 16 long, or the kernels would be compiled anew where a stride becomes one.
    """
    positions, coded = rows.kept_positions, rows.n_coded
    size = triton.cdiv(coded + 1, 16) * 16
    is_coded = (positions >= 0) & (positions < coded)  # (B or 1, h, n)
    place = positions.where(is_coded, coded).long().expand(B, -1, -1)  # (B, h, n)
    number = torch.arange(positions.shape[-1], dtype=torch.int32, device=positions.device)  # (n)
    slot = torch.full((B, place.shape[1], size), -1, dtype=torch.int32, device=positions.device)
    return slot.scatter_(2, place, number.expand_as(place))


def kept_scores(keys, q, rope):
    """(B, H, T, n) fp32, in base 2: of the kept keys, whether a query sees them or not; None if
    there are none.
    """
    if keys.kept_positions is None or keys.n_coded == 0:
        return None
    rows = keys.kept_rows.float()  # (B, Hkv, n, d)
    if rope is not None:
        at = keys.kept_positions.expand(rows.shape[:3]).flatten()  # (B * Hkv * n)
        rows = rope.rotate(rows.flatten(0, 2), at).view_as(rows)
    grouped = q.float().unflatten(1, (rows.shape[1], -1)).flatten(2, 3)  # (B, Hkv, R * T, d)
    s = grouped @ rows.transpose(-2, -1) * (LOG2E / math.sqrt(q.shape[-1]))  # (B, Hkv, R * T, n)
    return s.unflatten(2, (-1, q.shape[2])).flatten(1, 2).contiguous()


class Turn(NamedTuple):
    """RoPE's tables for keys that are stored before it: no angle is computed for a key."""
    # of places 0 .. N - 1 in a tile (N, d/2), LIFT times larger where keys are codes
    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None
    tile_cos: torch.Tensor | None = None  # (tiles, d/2), of positions 0, N, 2N, ...
    tile_sin: torch.Tensor | None = None


@lru_cache(maxsize=8)
def turn_of(rope, N, tiles, dtype, lift, device):
    """The tables of Turn, angles as in `Rope.rotate`; those of a tile in `dtype`."""
    freq = rope.freq.to(device)  # (d/2)
    place = torch.arange(N, device=device)[:, None].float() * freq  # (N, d/2)
    first = torch.arange(0, tiles * N, N, device=device)[:, None].float() * freq  # (tiles, d/2)
    cos, sin = (lift * place.cos()).to(dtype), (lift * place.sin()).to(dtype)  # (N, d/2) both
    return Turn(cos, sin, first.cos(), first.sin())


def anchor_scores(q, k, lse, window=None):
    """AnS(K) and AnS(V), (B, Hkv, S) both, as `anchor_lines`. lse may be over more keys than
    these, the newest.
    """
    (B, H, T, d), (Hkv, S) = q.shape, k.shape[1:3]
    q, norm = q.contiguous(), q.float().norm(dim=-1)  # (B, H, T)
    of_k, of_v = torch.empty(2, B, Hkv, S, dtype=torch.float32, device=q.device)
    # rows of fp32 fill the registers
    most = 64 if q.dtype.itemsize == 2 or kernels.INTERPRETED else 16
    M, N, D = min(most, triton.next_power_of_2(T * H // Hkv)), 64, triton.next_power_of_2(d)
    tiles = triton.cdiv(S, N)
    kernels.anchor_kernel[tiles * B * Hkv,](
        q, norm, lse.contiguous(), k, of_k, of_v, *k.stride()[:3], T, S, window or S, tiles,
        LOG2E / math.sqrt(d), H, H // Hkv, d, D, M, N, DTYPES[product_type(q)], num_warps=4,
        num_stages=2, **FMA)
    return of_k, of_v


DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def product_type(q, *sides):
    """What the operands of a product are rounded to: fp16 for codes, which are fp16; else the
    model's own 16 bits.
    """
    if q.dtype.itemsize > 2 or kernels.INTERPRETED:  # the interpreter cannot multiply bf16
        return torch.float32
    return torch.float16 if any(rows.fold.value for rows in sides) else q.dtype


# The cache

class TritonLayer(LayerCache):
    """A layer whose reading is the kernels' attention."""

    def __init__(self, layer, method, rope, protocol, shared, prompt, window):
        super().__init__(layer, method, rope, protocol, shared, prompt)
        self.window = window  # of a model with a sliding window
        # {kind: (positions, coded tokens, slots)}, made anew only where these change
        self.known_slots = {}

    def read(self, q, positions):
        """The attention of the newest tokens, q (B, H, T, d), to all: `Attended`. Nothing is decoded."""
        q = self.rope.rotate(q, positions)  # (B, H, T, d)
        rope = self.rope if self.method.rope == "pre" else None
        return attention(q, self.keys, self.values, rope, self.window, self.slots)

    def slots(self, rows, B):
        """`slots_of` keys or values, kept until something is quantized or kept."""
        positions, coded, slots = self.known_slots.get(rows.kind, (None, 0, None))
        if positions is not rows.kept_positions or coded != rows.n_coded:
            slots = slots_of(rows, B)
            self.known_slots[rows.kind] = rows.kept_positions, rows.n_coded, slots
        return slots

    def score(self, q, positions, attended):
        """Eq. 5 for the tokens in full precision. The kept ones' weights come from the attention itself."""
        q = self.rope.rotate(q, positions)  # (B, H, T, d)
        Hkv, window = self.keys.recent.shape[1], self.window or self.length
        recent = self.keys.recent  # (B, Hkv, r, d)
        if self.method.rope == "pre":
            recent = self.rope.rotate(recent,
                                      torch.arange(self.keys.n_coded, self.length, device=q.device))
        of_keys, of_values = anchor_scores(q, recent, attended.lse, self.window)  # (B, Hkv, r) both

        lse = attended.lse[..., None] * LOG2E  # (B, H, T, 1), in base 2
        kept_keys = kept_values = None
        if attended.key_scores is not None:
            # (B, 1 or Hkv, T, n)
            seen = self.keys.kept_positions[:, :, None] > positions[:, None] - window
            seen = seen.repeat_interleave(q.shape[1] // seen.shape[1], dim=1)  # (B, H, T, n)
            A = torch.exp2(attended.key_scores - lse) * seen  # (B, H, T, n)
            norm = q.float().norm(dim=-1)[..., None]  # (B, H, T, 1)
            of_heads = (norm * A * (1 - A)).sum(2)  # (B, H, n)
            kept_keys = of_heads.unflatten(1, (Hkv, -1)).sum(2)  # (B, Hkv, n)
        if attended.value_scores is not None:
            A = torch.exp2(attended.value_scores - lse)  # (B, H, T, n)
            kept_values = A.sum(2).unflatten(1, (Hkv, -1)).sum(2)  # (B, Hkv, n)
        self.keys.accumulate(of_keys, kept_keys)
        self.values.accumulate(of_values, kept_values)


class TritonCache(KVCache):
    """A KVCache that `Attention` asks for its output, and not for keys and values."""

    def __init__(self, model, method, protocol="stream", prompt=None):
        check_device(model.lm_head.weight.device)
        check_method(method)
        super().__init__(model, method, protocol, prompt)

    def new_layer(self, layer):
        return TritonLayer(layer, self.method, self.rope, self.protocol, self.shared, self.prompt,
                           self.config.sliding_window)

    def attend(self, layer, q, k, v, positions):
        """Add new tokens to a layer; returns the attention's output for them, (B, H, T, d)."""
        return self.layers[layer].update(q, k, v, positions).out


def check_device(device):
    """UserError where the kernels cannot run."""
    if device.type != "cuda" and not kernels.INTERPRETED:
        raise UserError(f"--attention triton needs a GPU, and the model is on {device.type}; use "
                        "--attention fused, or set TRITON_INTERPRET=1 to run the kernels slowly, "
                        "line by line")
