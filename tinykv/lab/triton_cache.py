"""The cache whose attention is the kernels of kernels.py: `--attention triton`.

    coded_rows     keys or values as the kernels read them, made where tokens are quantized
    kept_tokens    the kept tokens' rows, which are read instead of their codes
    TritonLayer    a `LayerCache` that attends from its packed codes, and decodes none
        plan       the kernel's launches: one for each range of tokens that are stored alike, one for the kept tokens
        attended   the attention of new queries to all tokens: run these launches and merge their outputs
    TritonCache    a `KVCache` of such layers, which `model.Attention` asks for its output
"""
import math
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import NamedTuple

import torch
import triton
import triton.language as tl

import kernels
from kernels import FMA, LIFT, LOG2E, Codebooks, Grid, Kept, PackedRows, Plane, Turn
from tinykv import UserError
from tinykv.cache import KVCache, LayerCache
from tinykv.codecs.affine import Affine
from tinykv.codecs.base import TERNARY, Exact, factors_of, largest_code, sections
from tinykv.codecs.codebook import Codebook
from tinykv.methods.antkv import AnTKV
from tinykv.model import turned

TILE = 64  # tokens that a program reads at a time, at most
PIECE = 256  # tokens of a piece, at least: each piece writes d + 2 numbers, which the merge reads
WARPS = 8  # of all programs, on each of a GPU's processors
MERGED = 32  # pieces that are added at a time


# What a kernel reads

def made(kind, **fields):
    """A tuple of class `kind`. Fields declared as tl.constexpr become constants of the compiled kernel."""
    declared = kind.__annotations__
    return kind(**{name: tl.constexpr(x) if declared[name] is tl.constexpr else x for name, x in fields.items()})


def planes_of(packed, bits, width, piece):
    """The planes of codes (B, Hkv, T, bytes) of heads of `width` channels; their words, and the step, as in
    `PackedRows`. Each plane lies within one piece, which is a group of channels that share a scale, or half a head.
    None if the codes do not lie so."""
    of_row = sections(width, bits)
    size, apart = of_row[0].size, math.ceil(of_row[0].bits)  # of the first section: bytes; bits from a code to the next
    end = size * len(factors_of(of_row[0].bits))  # channels that the first section has room for
    run = of_row[-1].size  # channels in the same bits of all bytes; the last section has the fewest
    if len(of_row) > 1 or piece < width:
        if end != width or width % run or run % piece and piece % run:
            return None

    # 1. a slice: channels of one run and one piece. If it is long enough, its bytes are read in pairs, and it makes two
    #    planes: the low bytes hold channels 0, 2, 4 .., the high bytes channels 1, 3, 5 ..
    span = min(run, piece)
    words, step = span, 1
    even = all(x % 2 == 0 for x in (packed.storage_offset(), *packed.stride()[:3]))
    if span % 32 == 0 and even and bits != TERNARY:
        words, step = span // 2, 2

    # 2. a masked code must lie within the ten lowest bits; codes above them are shifted down
    low_bits = (10 - math.ceil(bits)) // apart * apart + apart  # codes begin below this bit
    planes = []
    for first in range(0, end, span):
        for byte in range(step):
            low = (first // size * apart + 8 * byte) % low_bits  # where the plane's codes begin after the shift
            slices = tuple((s.first + first % s.size) // span for s in of_row)
            begins = [first // s.size * math.ceil(s.bits) + 8 * byte for s in of_row]  # where its parts begin
            shifts = tuple(begin - low - s.low for begin, s in zip(begins, of_row))
            masks = tuple(largest_code(math.ceil(s.bits)) << low + s.low for s in of_row)
            planes.append(Plane(first + byte, low, slices, shifts, masks))
    return tuple(planes), words, step


def made_rows(data, width, halves, of_row=(), cut=None, fold="", groups=1, start=0, grid=None, books=None):
    """PackedRows of data (B, heads, T, bytes or 16-bit numbers of a row); heads is 1 where all heads of a token form
    one row. of_row: the sections of a row of codes, or () of 16-bit numbers. cut: what `planes_of` gives; without it,
    numbers are decoded one by one, and a plane is a whole head, or half of one."""
    if cut is None:
        words = width // halves
        cut = tuple(Plane(first, 0, (), (), ()) for first in range(0, width, words)), words, 1
    planes, words, step = cut
    if step == 2:
        data = data.view(torch.uint16)
    batch, head, token, word = data.stride()
    assert word == 1 or data.shape[3] == 1, "the words of a row must be contiguous"
    if data.shape[1] == 1:
        head = 0
    # a table turns the five ternary codes of a byte into two bits each
    ternary = ternary_table(data.device) if any(s.bits == TERNARY for s in of_row) else None
    of_row = tuple(s._replace(bits=math.ceil(s.bits)) for s in of_row)
    return made(PackedRows, fold=fold, width=width, data=data, batch=batch, head=head, token=token, start=start,
                sections=of_row, planes=planes, words=words, tile=max(16, triton.next_power_of_2(words)), step=step,
                groups=groups, grid=grid, ternary=ternary, books=books)


@lru_cache
def ternary_table(device):
    """(256) uint16: the five codes of a byte in base 3, in two bits each."""
    byte = torch.arange(256)
    digits = [byte // 3 ** i % 3 * 4 ** i for i in range(5)]
    return sum(digits).to(torch.uint16).to(device)


def side_by_side(grid):
    """Put each scale and its zero point into one word -> the words, in the shape of the scales.

    grid: has the tensors `scale` and `zero`, which become views of the words, so that nothing is held twice.
    """
    pairs = torch.stack([grid.scale, grid.zero.view(torch.float16)], dim=-1)  # (..., 2)
    grid.scale, grid.zero = pairs[..., 0], pairs[..., 1].view(grid.zero.dtype)
    return pairs.view(torch.int32)[..., 0]


def exact_rows(x, halves, start=0):
    """Numbers in 16 bits x (B, Hkv, T, d), the first of the token `start`, as the kernels read them."""
    return made_rows(x, x.shape[3], halves, start=start)


def affine_rows(codec, codes, kind, halves):
    d, packed, of_row = codec.width, codes.packed, sections(codec.width, codec.bits)
    held = SimpleNamespace(scale=codec.scale[None], zero=codec.zero[None]) if codec.static else codes
    words = side_by_side(held)  # (B, Hkv, T, d/G, 1) or (B, Hkv, T/G, 1, d); of a static grid B and T are 1

    # which tokens, and which channels, share a scale
    if codec.axis == "token":
        words, tokens, channels = words[..., 0], 1, codec.group_size
    else:
        words, tokens, channels = words[..., 0, :], codec.group_size or packed.shape[2], 1
    batch, head, token, channel = words.stride()
    batch, head = batch * (words.shape[0] > 1), head * (words.shape[1] > 1)  # 0: one for all
    grid = made(Grid, words=words, batch=batch, head=head, token=token, channel=channel, channels=channels,
                tokens=0 if codec.static else tokens, integer=codec.formula == "integer-zero")

    # which scales leave the products: those of tokens; for keys, also those of channels (before RoPE only if static)
    fold, groups, cut = "", 1, None
    if codec.axis == "token" and halves == 1:
        fold, groups, cut = "token", d // codec.group_size, planes_of(packed, codec.bits, d, codec.group_size)
    elif kind == "k" and codec.axis == "channel":
        if codec.static or halves == 1 and math.gcd(tokens, TILE) >= 16:
            fold, cut = "channel", planes_of(packed, codec.bits, d, d // halves)
    if cut is None:  # numbers are decoded one by one
        fold, groups = "", 1
    return made_rows(packed, d, halves, of_row, cut, fold, groups, grid=grid)


def codebook_rows(codec, codes, kind, halves):
    of_row, centroids = sections(codec.slots, codec.code_bits), codec.centroids.contiguous()
    books = made(Codebooks, centroids=centroids, n=codec.n, m=codec.m,
                 side=math.gcd(codec.n, codec.width // halves))
    return made_rows(codes.packed, codec.width, halves, of_row, books=books)


ROWS = {Exact: lambda codec, codes, kind, halves: exact_rows(codes.packed, halves),
        Affine: affine_rows, Codebook: codebook_rows}


def coded_rows(rows, halves):
    """The codes of a CachedRows, as the kernels read them."""
    return ROWS[type(rows.codec)](rows.codec, rows.codes, rows.kind, halves)


def check_kernels(method):
    """UserError if no kernel implements the method's codes, or its scores."""
    unknown = None
    for codec in {codec for pair in method.codecs for codec in pair}:
        if type(codec) not in ROWS:  # KVQuant and SKVQ need a lookup for each number, which would save no time
            unknown = f"the codec {type(codec).__name__}"
        elif type(codec) is Codebook and codec.n & codec.n - 1:
            unknown = f"vectors of {codec.n} channels, which is no power of two"
    if method.uses_scores:
        if type(method).score is not AnTKV.score:
            unknown = "scores other than AnTKV's"
        elif method.block_of("v") != method.block:
            unknown = "scores of values that are quantized at another pace than keys"
    if unknown:
        raise UserError(f"no kernel knows {unknown}, which {type(method).__name__} has; use --attention fused")


# Launching the kernels

class Tile(NamedTuple):
    """M query rows, N tokens, warps of a program, pipeline stages, and the registers of a thread where fewer, which the
    compiler would take, spill."""
    M: int
    N: int
    warps: int
    stages: int
    maxnreg: int | None = None


# The tiles, by the kind of rows that is hardest to read. With these, no kernel spills a register.
TILES = {  # for decoding, and for many queries at once
    # nothing is decoded: loads must overlap
    "exact": (Tile(16, 64, 4, 2), Tile(32, 64, 4, 3)),
    # codes in products: one warp waits for no other, and sums over tokens without shared memory
    "codes": (Tile(16, 64, 1, 3, 255), Tile(16, 64, 4, 3)),
    # two products for each number, and the tables of cosines and sines
    "rotated": (Tile(16, 32, 1, 1), Tile(16, 64, 4, 1)),
    # with one stage, centroids are loaded through the L1 cache
    "Codebook": (Tile(16, 64, 4, 1), Tile(16, 64, 4, 1)),
    # an address for every channel
    "single": (Tile(16, 32, 4, 3, 255), Tile(16, 32, 8, 3)),
}


def kind_of(rows, halves):
    """The key in TILES of these PackedRows. halves: 2 for keys before RoPE."""
    if rows.books is not None:
        return "Codebook"
    if rows.grid is not None and not rows.fold.value:
        return "single"
    if halves == 2:
        return "rotated"
    return "codes" if rows.fold.value else "exact"


def tiling(keys, values, halves, n_queries):
    """The Tile for `n_queries` rows of queries. Its N tokens lie in one group, except where groups are shorter than the
    16 tokens that a product takes: there each number gets its scale.
    """
    kinds = list(TILES)
    hardest = max(kind_of(keys, halves), kind_of(values, 1), key=kinds.index)
    few = 4 if hardest == "rotated" else 16  # query rows, as in decoding
    tile = TILES[hardest][n_queries > few]
    # one warp has too few registers for 8 bits, for a table lookup of each byte, or for 80 channels, padded to 128
    d, bits = keys.width.value, {sum(s.bits for s in side.sections.value) for side in (keys, values)}
    ternary = any(side.ternary is not None for side in (keys, values))
    if (d & d - 1 or 8 in bits or ternary) and tile.warps == 1:
        tile = tile._replace(warps=2)
    # four warps have too few for 64 tokens of 5 or 7 bits and many queries
    if bits & {5, 7} and tile.warps == 4:
        tile = tile._replace(N=32)
    of_keys, of_values = (side.grid.tokens.value if side.grid is not None else 0 for side in (keys, values))
    group = math.gcd(tile.N, *(tokens for tokens in (of_keys, of_values) if tokens > 1))
    N = group if group >= 16 else tile.N
    # in decoding, keys whose groups are half a tile: two of them at a time, see `scores_of_groups`. With many queries,
    # four warps have too few registers for that
    two_groups = tile.warps < 4 and of_keys == N == tile.N // 2 and of_values <= 1
    if keys.fold.value == "channel" and halves == 1 and two_groups:
        N = tile.N
    return tile._replace(M=min(tile.M, triton.next_power_of_2(n_queries)), N=N)


def programs(device, warps):
    """How many programs fill the GPU. In the interpreter a few, so that there is something to merge."""
    if device.type != "cuda":
        return 8
    return torch.cuda.get_device_properties(device).multi_processor_count * WARPS // warps


class KeptTokens(NamedTuple):
    """The tokens whose key or value is kept. Kernels skip their codes and read their rows as a piece of its own."""
    positions: torch.Tensor  # (B, 1 or Hkv, n) int32, ascending; a position may occur twice
    keys: torch.Tensor  # (B, Hkv, n, d): kept, recent or decoded
    values: torch.Tensor  # the same
    left_out: Kept
    piece: Kept


def kept_tokens(keys, values):
    """KeptTokens of two CachedRows; None if no coded token is kept."""
    coded = max(keys.n_coded, values.n_coded)
    kept = [rows.kept_positions for rows in (keys, values) if rows.kept_positions is not None]
    if not kept or coded == 0:
        return None
    if len(kept) == 2 and torch.equal(*kept):
        kept = kept[:1]
    heads = max(positions.shape[1] for positions in kept)
    kept = [positions.expand(-1, heads, -1) for positions in kept]
    positions = torch.cat(kept, dim=2).sort(dim=2).values  # (B, 1 or Hkv, n)

    # repeated and recent tokens get a position that no query sees
    again = torch.nn.functional.pad(positions[:, :, 1:] == positions[:, :, :-1], (1, 0))  # (B, 1 or Hkv, n)
    seen_once = positions.masked_fill(again | (positions >= coded), torch.iinfo(torch.int32).max)
    # the mask of codes to skip, padded to a multiple of 16: Triton recompiles when divisibility by 16 changes
    size = triton.cdiv(coded + 1, 16) * 16
    index = positions.clamp(max=coded).long()  # (B, 1 or Hkv, n): recent tokens mark a place after the codes
    left_out = torch.zeros(*index.shape[:2], size, dtype=torch.int8, device=index.device).scatter_(2, index, 1)

    def of_kernel(name, x):
        return Kept(**{name: x}, batch=x.stride(0), head=x.stride(1) * (heads > 1))
    return KeptTokens(positions, rows_at(keys, positions), rows_at(values, positions),
                      of_kernel("left_out", left_out), of_kernel("position", seen_once))


def rows_at(rows, positions):
    """The rows (B, Hkv, n, d) of a CachedRows that attention reads at positions (B, 1 or Hkv, n)."""
    B, Hkv, _, d = rows.recent.shape
    parts = [rows.recent] if rows.kept_positions is None else [rows.recent, rows.kept_rows]
    index, is_exact = rows.find(positions)  # (B, 1 or Hkv, n) both
    if not is_exact.all():  # the others are decoded, and stand after these
        index = torch.where(is_exact, index, sum(part.shape[2] for part in parts) + positions)
        parts.append(rows.codec.decode(rows.codes))  # (B, Hkv, n_coded, d)
    index = index.long().expand(B, Hkv, -1)[..., None]  # (B, Hkv, n, 1)
    return torch.cat(parts, dim=2).gather(2, index.expand(-1, -1, -1, d))


def rotated(kept, rope, S):
    """The keys of KeptTokens, rotated: (B, Hkv, n, d)."""
    if rope is None:
        return kept.keys
    cos, sin = rope.cos_sin(0, S, kept.keys.device)  # (S, d) both
    return turned(kept.keys.float(), cos[kept.positions], sin[kept.positions])


@lru_cache(maxsize=8)
def turn_of(freq, N, tiles, dtype, lift, device):
    """The tables of Turn, angles as in `Rope.rotate`; those within a tile in `dtype`. freq: d/2 numbers."""
    freq = torch.tensor(freq, dtype=torch.float32, device=device)  # (d/2)
    within = torch.arange(N, device=device)[:, None].float() * freq  # (N, d/2)
    first = torch.arange(0, tiles * N, N, device=device)[:, None].float() * freq  # (tiles, d/2)
    cos, sin = (lift * within.cos()).to(dtype), (lift * within.sin()).to(dtype)  # (N, d/2) both
    return Turn(cos, sin, first.cos(), first.sin())


def anchor_scores(q, seen, lse, k, positions, window=None):
    """AnS(K) and AnS(V), (B, Hkv, n) both, of n tokens: `equation_5`.

    q (B, H, T, d), rotated, from the position `seen` on, with their log-sum-exp over all keys (B, H, T). k (B, Hkv, n,
    d): the tokens' keys, rotated. positions (B, Hkv, n) int32: their positions, in any order."""
    (B, H, T, d), (Hkv, n) = q.shape, k.shape[1:3]
    q, k, norm = q.contiguous(), k.contiguous(), q.norm(dim=-1, dtype=torch.float32)  # (B, H, T)
    of_k, of_v = torch.empty(2, B, Hkv, n, dtype=torch.float32, device=q.device)
    most = 128 if q.dtype.itemsize == 2 or kernels.INTERPRETED else 16  # rows of fp32 fill the registers
    M, N, D = min(most, triton.next_power_of_2(T * H // Hkv)), 64, triton.next_power_of_2(d)
    kernels.anchor_kernel[triton.cdiv(n, N) * B * Hkv,](
        q, norm, lse.contiguous(), k, positions.contiguous(), of_k, of_v, T, seen, n, window or seen + T,
        LOG2E / math.sqrt(d), H // Hkv, d, D, M, N, DTYPES[product_type(q)], num_warps=4, num_stages=2, **FMA)
    return of_k, of_v


DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def product_type(q, *sides):
    """What a product's operands are rounded to: fp16 for codes, the centroids' for codebooks, else the model's."""
    if q.dtype.itemsize > 2 or kernels.INTERPRETED:  # the interpreter cannot multiply bf16
        return torch.float32
    if any(rows.fold.value for rows in sides):
        return torch.float16
    books = [rows.books for rows in sides if rows.books is not None]
    return books[0].centroids.dtype if books else q.dtype


# The cache

class Made(NamedTuple):
    """What the kernels read of the coded tokens. It is made anew whenever tokens are quantized."""
    n_coded: tuple  # coded keys and values when it was made
    k: PackedRows | None  # None if there are no codes
    v: PackedRows | None
    kept: KeptTokens | None


class Attended(NamedTuple):
    """q (B, H, T, d), rotated; out (B, H, T, d); lse (B, H, T): the natural log-sum-exp of each query's scores; and the
    keys of KeptTokens, (B, Hkv, n, d), rotated, or None."""
    q: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    kept_keys: torch.Tensor | None


class TritonLayer(LayerCache):
    """A layer whose `update` returns the attention's output, which kernels compute from the packed codes."""

    made = None

    def for_attention(self, q, seen):
        """The attention of the new queries (B, H, T, d) to all tokens: `Attended`."""
        return self.attended(self.rope.rotate(q, seen))

    def attended(self, q):
        """The same for rotated queries. It equals scaled_dot_product_attention on decoded keys and values, without
        writing these to memory."""
        q, (B, H, T, d) = q.contiguous(), q.shape
        rope = self.rope if self.method.rope == "pre" else None
        # what the kernels read of the coded tokens
        n_coded = self.keys.n_coded, self.values.n_coded
        if self.made is None or self.made.n_coded != n_coded:
            k = coded_rows(self.keys, 1 if rope is None else 2) if n_coded[0] else None
            v = coded_rows(self.values, 1) if n_coded[1] else None
            self.made = Made(n_coded, k, v, kept_tokens(self.keys, self.values))
        kept_keys = rotated(self.made.kept, rope, self.length).to(q.dtype) if self.made.kept else None

        # the sums of each piece of the text
        launches = self.plan(q, rope, kept_keys)
        n_pieces, first = sum(pieces for pieces, _ in launches), 0
        acc = torch.empty(n_pieces, B, H, T, d, dtype=torch.float32, device=q.device)
        top, total = torch.empty(2, n_pieces, B, H, T, dtype=torch.float32, device=q.device)  # (pieces, B, H, T) both
        for pieces, launch in launches:
            launch(accs=acc[first:], tops=top[first:], totals=total[first:])
            first += pieces
        # the pieces together
        out, lse = torch.empty_like(q), torch.empty(B, H, T, dtype=torch.float32, device=q.device)
        kernels.merge_kernel[B * H * T,](acc, top, total, out, lse, n_pieces, d, triton.next_power_of_2(d), MERGED,
                                         **FMA)
        return Attended(q, out, lse, kept_keys)

    def plan(self, q, rope, kept_keys):
        """The launches of attend_kernel: [(pieces, a function of accs, tops and totals)]. The text is cut where keys,
        or values, begin to be recent; kept rows are a part of their own. rope: if keys are stored before it."""
        (B, H, T, d), keys, values, made = q.shape, self.keys, self.values, self.made
        Hkv, S, kept = keys.recent.shape[1], self.length, made.kept
        parts = []  # (begin, end, k, v, RoPE, Kept)
        cuts = sorted({0, *made.n_coded, S})
        for begin, end in zip(cuts, cuts[1:]):
            k = made.k if begin < keys.n_coded else exact_rows(keys.recent, 1 if rope is None else 2, keys.n_coded)
            v = made.v if begin < values.n_coded else exact_rows(values.recent, 1, values.n_coded)
            skipped = kept.left_out if kept and begin < max(made.n_coded) else Kept()
            parts.append((begin, end, k, v, rope, skipped))
        if kept:
            k, v = exact_rows(kept_keys, 1), exact_rows(kept.values.to(q.dtype), 1)
            parts.append((0, kept_keys.shape[2], k, v, None, kept.piece))

        launches, n_queries = [], T * H // Hkv  # rows of queries of a KV head
        for begin, end, k, v, rope, of_kept in parts:
            tile = tiling(k, v, 1 if rope is None else 2, n_queries)
            if q.dtype.itemsize > 2 and not kernels.INTERPRETED:  # fp32: no tensor cores, and tiles fill shared memory
                tile = tile._replace(M=min(tile.M, 16), stages=1)
            heads = triton.cdiv(n_queries, tile.M) * B * Hkv
            # no more pieces than run at once: a few left over would take as long as all others
            wanted = max(1, min(programs(q.device, tile.warps) // heads, (end - begin) // PIECE))
            length = end - begin // tile.N * tile.N  # pieces begin at a multiple of N
            split = triton.cdiv(triton.cdiv(length, wanted), tile.N) * tile.N
            pieces, turn, dtype = triton.cdiv(length, split), Turn(), product_type(q, k, v)
            if rope is not None:
                turn = turn_of(tuple(rope.freq.tolist()), tile.N, triton.next_power_of_2(triton.cdiv(S, tile.N)), dtype,
                               LIFT.value if k.fold.value else 1, q.device)
            launches.append((pieces, partial(
                kernels.attend_kernel[heads, pieces], q, k, v, turn, of_kept, begin=begin, end=end, split=split, T=T,
                S=S, window=self.method.config.sliding_window or S, factor=LOG2E / math.sqrt(d), HKV=Hkv, R=H // Hkv,
                M=tile.M, N=tile.N, DOT=DTYPES[dtype], num_warps=tile.warps, num_stages=tile.stages,
                maxnreg=tile.maxnreg, **FMA)))
        return launches

    def score(self, q, seen, attended):
        """Eq. 5 for the tokens in full precision, recent and kept. Weights come from the attention's log-sum-exp."""
        q, kept, (B, Hkv, r, _) = attended.q, self.made.kept, self.keys.recent.shape
        keys = self.keys.recent.to(q.dtype)  # (B, Hkv, r, d): not rounded again to 16 bits when it is rotated
        if self.method.rope == "pre":
            keys = self.rope.rotate(keys, self.length - r)
        positions = torch.arange(self.length - r, self.length, dtype=torch.int32, device=q.device)  # (r)
        positions = positions.expand(B, Hkv, r)
        if kept is not None:
            keys = torch.cat([keys, attended.kept_keys], dim=2)  # (B, Hkv, r + n, d)
            positions = torch.cat([positions, kept.positions.expand(B, Hkv, -1)], dim=2)  # (B, Hkv, r + n)
        scores = anchor_scores(q, seen, attended.lse, keys, positions, self.method.config.sliding_window)

        for rows, of_all in zip((self.keys, self.values), scores):  # (B, Hkv, r + n)
            of_kept = None
            if kept is not None:  # AnTKV keeps keys and values, but not always of the same tokens
                index = torch.searchsorted(kept.positions, rows.kept_positions.contiguous())  # (B, 1 or Hkv, count)
                of_kept = of_all[:, :, r:].gather(2, index.expand(B, Hkv, -1))  # (B, Hkv, count)
            rows.accumulate(of_all[:, :, :r], of_kept)


class TritonCache(KVCache):
    """A KVCache that returns the output of attention instead of keys and values."""
    layer_class = TritonLayer

    def reset(self):
        check_device(self.model.lm_head.weight.device)
        check_kernels(self.method)
        super().reset()

    def attend(self, layer, q, k, v, seen):
        """Add new tokens to a layer; returns the attention's output for them, (B, H, T, d)."""
        return self.layers[layer].update(q, k, v, seen).out

    def top_k(self, x, k):
        return kernels.topk(x, k)


def check_device(device):
    """UserError where the kernels cannot run."""
    if device.type != "cuda" and not kernels.INTERPRETED:
        raise UserError(f"--attention triton needs a GPU, and the model is on {device.type}; use --attention fused, or "
                        "set TRITON_INTERPRET=1 to run the kernels slowly, line by line")
