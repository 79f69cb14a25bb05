"""The cache whose attention is the kernels of kernels.py: `--attention triton`.

    attention      new queries to all tokens, in as many launches of the kernels as the tokens lie
    in different ways TritonLayer    a `LayerCache` that attends from its packed codes, and decodes
    none TritonCache    a `KVCache` of such layers, which `model.Attention` asks for its output
"""
import math
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

import kernels
from kernels import FMA, LOG2E, Book, Grid, Order, Outliers, PackedRows, Pins, Place, Turn
from tinykv import UserError
from tinykv.cache import KVCache, LayerCache
from tinykv.codecs.affine import Affine
from tinykv.codecs.base import TERNARY, Exact
from tinykv.codecs.clipped import ClippedGroups
from tinykv.codecs.codebook import Codebook
from tinykv.codecs.nonuniform import NonUniform
from tinykv.methods.antkv import AnTKV

TILE = 64  # tokens that a program reads at a time, at most


# From a codec and its codes to what a kernel reads

# bits: codes of a word, its bytes
PLANES = {1: (8, 1), 2: (4, 1), 4: (2, 1), 8: (1, 1), 3: (8, 3), TERNARY: (5, 1)}


def made(kind, **fields):
    """A tuple of class `kind`. What that declares as tl.constexpr becomes a constant of the
    compiled kernel.
    """
    declared = kind.__annotations__
    return kind(**{name: tl.constexpr(x) if declared[name] is tl.constexpr else x for name,
                   x in fields.items()})


def place_of_rows(words, head=None, start=0):
    batch, per_head, token, word = words.stride()
    return made(Place, words=words, batch=batch, head=per_head if head is None else head,
                token=token, word=word,
                start=start)


def exact_rows(rows, start=0):
    """rows (B, Hkv, T, d) as they are, the first at position `start`."""
    return made(PackedRows, codec="Exact", fold="", bits=16, planes=1, size=0, width=0,
                place=place_of_rows(rows, start=start))


def packing(packed, bits, width, halves):
    """Codes `packed` of `width` channels a head -> the words to read them by, and the fields of
    PackedRows on that.
    """
    planes, size = PLANES[bits]
    width = width // halves
    fields = {"bits": 2,
              "ternary": ternary_table(packed.device)} if bits == TERNARY else {"bits": bits}
    if width % planes and not (bits == TERNARY and halves == 1):
        # a word would hold codes of two halves, or of two heads
        return packed, dict(planes=1, size=0, **fields)
    even = all(s % 2 == 0 for s in (packed.storage_offset(), packed.shape[-1],
                                    *packed.stride()[:3]))
    if 8 % bits == 0 and width % (32 * planes) == 0 and even and packed.stride(3) == 1:
        # two bytes are a word
        return packed.view(torch.uint16), dict(planes=2 * planes, size=1, **fields)
    return packed, dict(planes=planes, size=size, **fields)


@lru_cache
def ternary_table(device):
    """(256) uint16: the five codes of a byte in base 3, in two bits each."""
    byte = torch.arange(256)
    digits = [byte // 3 ** i % 3 * 4 ** i for i in range(5)]
    return sum(digits).to(torch.uint16).to(device)


def affine_rows(codec, codes, halves):
    d, T = codec.width, codes.packed.shape[2]
    words, fields = packing(codes.packed, codec.bits, d, halves)
    scale, zero = codes.scale, codes.zero  # (B, Hkv, T, d/G, 1) or (B, Hkv, T/G, 1, d) both
    if codec.static:
        scale, zero = codec.scale[None], codec.zero[None]  # (1, Hkv, 1, ...) both
    batch, head, token, channel_group, channel = scale.stride()
    if codec.static:
        batch = 0

    # which tokens, and which channels, share a scale
    tokens, channels, fold = codec.group or T, 1, ""
    if codec.axis == "token":
        tokens, channel = 1, channel_group
        channels = 0 if codec.group == d else codec.group
    if codec.static:
        tokens = 0

    # whether it can leave the product: one scale a token, or a tile of tokens that share theirs
    if fields["size"] and halves == 1:
        if channels == 0:
            fold = "token"
        elif codec.axis == "channel" and (codec.static or math.gcd(tokens, TILE) >= 16):
            fold = "channel"

    form = "integer" if codec.formula == "integer-zero" else "offset"
    grid = made(Grid, scale=scale, zero=zero, batch=batch, head=head, token=token, channel=channel,
                tokens=tokens, channels=channels, form=form)
    return made(PackedRows, codec="Affine", fold=fold, width=0, place=place_of_rows(words),
                grid=grid, **fields)


def nonuniform_rows(codec, codes, halves):
    words, fields = packing(codes.packed, codec.bits, codec.width, halves)
    # heads are parts of one row
    head = codec.width // fields["planes"] * fields["size"] * words.stride(3)
    if codec.axis == "channel":
        grid = made(Grid, scale=codec.half, zero=codec.mid, batch=0, head=codec.width, token=0,
                    channel=1, tokens=0,
                    channels=1, form="offset")
    else:
        grid = made(Grid, scale=codes.scale, zero=codes.zero, batch=codes.scale.stride(0), head=0,
                    token=codes.scale.stride(2), channel=0, tokens=1, channels=0, form="offset")
    outliers = None
    if codec.outliers and len(codes.values):
        row_end = codes.row_end[:, 0, :, 0].contiguous()  # (B, T)
        outliers = Outliers(row_end, codes.values, codes.columns, *row_end.shape)  # B, T
    return made(PackedRows, codec="NonUniform", fold="", width=codec.width,
                place=place_of_rows(words, head), grid=grid,
                levels=codec.levels, outliers=outliers, **fields)


def clipped_rows(codec, codes, halves):
    scale, zero, form = codes.scale, codes.zero, "offset"
    if scale.itemsize == 1:
        scale, zero, form = scale.view(torch.uint8), zero.view(torch.uint8), "fp8"
    grid = made(Grid, scale=scale, zero=zero, batch=scale.stride(0), head=0, token=scale.stride(2),
                channel=1, tokens=1, channels=1, form=form)
    _, fields = packing(codes.packed, codec.bits, codec.width, halves)
    fields.update(planes=1, size=0)  # neighbours in the row are no neighbours in the head
    return made(PackedRows, codec="ClippedGroups", fold="", width=codec.width,
                place=place_of_rows(codes.packed, 0), grid=grid,
                order=Order(inverse(codec.order), codec.group), **fields)


@lru_cache(maxsize=1024)
def inverse(order):
    """order (h): the channel at each place -> the place of each channel, (h) int32."""
    return order.argsort().to(torch.int32)


def codebook_rows(codec, codes, halves):
    centroids = codec.centroids.contiguous()
    side = math.gcd(codec.n, codec.width // halves, 2 ** 20)
    book = made(Book, centroids=centroids, n=codec.n, m=centroids.shape[1], side=side,
                shared=len(centroids) == 1)
    return made(PackedRows, codec="Codebook", fold="", bits=codec.code_bits, planes=1, size=0,
                width=codec.width,
                place=place_of_rows(codes.packed, 0), book=book)


ROWS = {Affine: affine_rows, NonUniform: nonuniform_rows, ClippedGroups: clipped_rows,
        Codebook: codebook_rows}


def packed_rows(rows, begin, halves):
    """The coded, or the recent, tokens of a CachedRows: those that `begin` is one of."""
    if begin >= rows.n_coded:
        return exact_rows(rows.recent, rows.n_coded)
    if type(rows.codec) is Exact:
        return exact_rows(rows.codes.packed)
    return ROWS[type(rows.codec)](rows.codec, rows.codes, halves)


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
        if type(codec) in (Affine, NonUniform, ClippedGroups) and codec.bits not in PLANES:
            bits = ", ".join(f"{bits:g}" for bits in sorted(PLANES))
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
    "folded": (Tile(16, 64, 1, 3), Tile(16, 64, 4, 3)),
    # the scales of channels take registers, too
    "channel": (Tile(16, 64, 2, 3), Tile(16, 64, 4, 3)),
    # as "folded", with a product for each number
    "planes": (Tile(16, 64, 1, 3, 255), Tile(16, 64, 4, 3)),
    # two halves of a row at once, and their angles
    "rotated": (Tile(16, 32, 2, 1), Tile(16, 32, 4, 1)),
    # one stage: only then are centroids loaded through the L1 cache
    "book": (Tile(16, 64, 4, 1), Tile(16, 64, 8, 1)),
    # as "book", with an address for every two or three channels
    "pairs": (Tile(16, 64, 4, 1), Tile(16, 64, 8, 1)),
    # an address, a level, or outliers for every channel
    "single": (Tile(16, 32, 8, 3), Tile(16, 32, 8, 3)),
}


def kind_of(rows, halves):
    """What of TILES these PackedRows are; halves: 2 for keys before RoPE."""
    if rows.codec.value == "Exact":
        return "exact" if halves == 1 else "rotated"
    if rows.codec.value == "Codebook":
        return "book" if rows.book.side.value >= 4 else "pairs"
    if rows.size.value == 0 or rows.levels is not None:
        return "single"
    if halves == 2:
        return "rotated"
    return {"token": "folded", "channel": "channel", "": "planes"}[rows.fold.value]


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
    """out (B, H, T, d); lse (B, H, T): the natural log-sum-exp of each query's scores; of pinned
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
    k_pins = pins_of(keys, q, slots, pinned_scores(keys, q, rope))
    v_pins = pins_of(values, q, slots, None)

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
        turn = Turn()
        if rope is not None:
            turn = turn_of(rope, x.tile.N, triton.next_power_of_2(triton.cdiv(S, x.tile.N)),
                           q.device)
        widths = plane_width(d // halves, x.keys), plane_width(d, x.values)
        kernels.attend_kernel[x.tiles * B * Hkv, x.pieces](
            q, x.keys, x.values, turn, k_pins if x.begin < keys.n_coded else Pins(),
            v_pins if x.begin < values.n_coded else Pins(), acc[x.first:], top[x.first:],
            total[x.first:], *q.stride()[:3], x.begin, x.end, x.split, T, S, window or S, x.tiles,
            B * H * T, LOG2E / math.sqrt(d), H, R, d, halves, *widths, x.tile.M, x.tile.N,
            product_type(q, x.keys, x.values), num_warps=x.tile.warps, num_stages=x.tile.stages,
            maxnreg=x.tile.maxnreg, **FMA)

    out, lse = torch.empty_like(q), torch.empty(B, H, T, dtype=torch.float32, device=q.device)
    M, N = min(16, triton.next_power_of_2(T)), min(64, max(16, triton.next_power_of_2(v_pins.n)))
    pinned = values.pinned_rows if v_pins.slot is not None else None
    strides = (0, 0, 0) if pinned is None else pinned.stride()[:3]
    tiles = triton.cdiv(T, M)
    kernels.merge_kernel[tiles * B * H,](
        acc, top, total, v_pins.score, pinned, out, lse, first, B * H * T, T, v_pins.n, tiles,
        *strides, H, R, d, triton.next_power_of_2(d), M, N, **FMA)
    return Attended(out, lse, k_pins.score, v_pins.score)


def plane_width(channels, rows):
    """Channels of a plane in a tile: a power of 2, and at least the 16 that a product takes."""
    return max(16, triton.next_power_of_2(triton.cdiv(channels, rows.planes.value)))


def programs(device, warps):
    """Programs that fill a GPU: 8 warps for each of its processors. In the interpreter some
    pieces, to be merged.
    """
    if device.type != "cuda":
        return 8
    return torch.cuda.get_device_properties(device).multi_processor_count * 8 // warps


def pins_of(rows, q, slots, score):
    """Pins of keys or values whose slots may be coded, or none. score: of keys (B, H, T, n); of
    values None.
    """
    if rows.pinned_positions is None or rows.n_coded == 0:
        return Pins()
    n = rows.pinned_positions.shape[-1]
    slot = (slots or slots_of)(rows, len(q))  # (B, 1 or Hkv, coded and more)
    if score is None:
        score = torch.full((*q.shape[:3], n), float("-inf"), dtype=torch.float32, device=q.device)
    return Pins(slot, slot.stride(0), 0 if slot.shape[1] == 1 else slot.stride(1), score, n)


def slots_of(rows, B):
    """Of each coded token the number of its pinned row, or -1: (B, 1 or Hkv, coded and more) int32.

    A multiple of 16 long, or the kernels would be compiled anew where a stride becomes one.
    """
    positions, coded = rows.pinned_positions, rows.n_coded
    size = triton.cdiv(coded + 1, 16) * 16
    is_coded = (positions >= 0) & (positions < coded)  # (B or 1, h, n)
    place = positions.where(is_coded, coded).long().expand(B, -1, -1)  # (B, h, n)
    number = torch.arange(positions.shape[-1], dtype=torch.int32, device=positions.device)  # (n)
    slot = torch.full((B, place.shape[1], size), -1, dtype=torch.int32, device=positions.device)
    return slot.scatter_(2, place, number.expand_as(place))


def pinned_scores(keys, q, rope):
    """(B, H, T, n) fp32, in base 2: of the pinned keys, whether a query sees them or not; None if
    there are none.
    """
    if keys.pinned_positions is None or keys.n_coded == 0:
        return None
    rows = keys.pinned_rows.float()  # (B, Hkv, n, d)
    if rope is not None:
        at = keys.pinned_positions.expand(rows.shape[:3]).flatten()  # (B * Hkv * n)
        rows = rope.rotate(rows.flatten(0, 2), at).view_as(rows)
    grouped = q.float().unflatten(1, (rows.shape[1], -1)).flatten(2, 3)  # (B, Hkv, R * T, d)
    s = grouped @ rows.transpose(-2, -1) * (LOG2E / math.sqrt(q.shape[-1]))  # (B, Hkv, R * T, n)
    return s.unflatten(2, (-1, q.shape[2])).flatten(1, 2).contiguous()


@lru_cache(maxsize=8)
def turn_of(rope, N, tiles, device):
    """The tables of Turn, angles as in `Rope.rotate`."""
    freq = rope.freq.to(device)  # (d/2)
    place = torch.arange(N, device=device)[:, None].float() * freq  # (N, d/2)
    first = torch.arange(0, tiles * N, N, device=device)[:, None].float() * freq  # (tiles, d/2)
    return Turn(place.cos(), place.sin(), first.cos(), first.sin())


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
        LOG2E / math.sqrt(d), H, H // Hkv, d, D, M, N, product_type(q), num_warps=4, num_stages=2,
        **FMA)
    return of_k, of_v


def product_type(q, *sides):
    """What the operands of a product are rounded to: fp16 for planes, which are fp16; else the
    model's own 16 bits.
    """
    if q.dtype.itemsize > 2 or kernels.INTERPRETED:  # the interpreter cannot multiply bf16
        return tl.float32
    if q.dtype == torch.float16 or any(rows.size.value for rows in sides):
        return tl.float16
    return tl.bfloat16


# The cache

class TritonLayer(LayerCache):
    """A layer whose reading is the kernels' attention."""

    def __init__(self, layer, method, rope, protocol, shared, prompt, window):
        super().__init__(layer, method, rope, protocol, shared, prompt)
        self.window = window  # of a model with a sliding window
        # {kind: (positions, coded tokens, slots)}, made anew only where these change
        self.known_slots = {}

    def attend(self, q, k, v, positions):
        """As `update`, but returns the attention's output, (B, H, T, d), and decodes nothing.

        Append; attend and score, where the method scores. Under `paper` quantize, then attend.
        Under `stream`, and after a prompt, attend, then quantize.
        """
        self.append(k, v, positions)
        q = self.rope.rotate(q, positions)  # (B, H, T, d)
        scores = self.method.uses_scores and self.is_choosing
        if scores or not self.quantizes_first:
            attended = self.attention(q)
        if scores:
            self.add_scores(q, attended)
        self.quantize()
        if self.quantizes_first:
            attended = self.attention(q)
        return attended.out

    def attention(self, q):
        """Attention of the newest tokens, q (B, H, T, d) rotated, to all: `Attended`."""
        rope = self.rope if self.method.rope == "pre" else None
        return attention(q, self.keys, self.values, rope, self.window, self.slots)

    def slots(self, rows, B):
        """`slots_of` keys or values, kept until something is quantized or pinned."""
        positions, coded, slots = self.known_slots.get(rows.kind, (None, 0, None))
        if positions is not rows.pinned_positions or coded != rows.n_coded:
            slots = slots_of(rows, B)
            self.known_slots[rows.kind] = rows.pinned_positions, rows.n_coded, slots
        return slots

    def add_scores(self, q, attended):
        """Eq. 5 for the tokens in full precision. The pinned ones' weights come from the attention
        itself.
        """
        Hkv, window = self.keys.recent.shape[1], self.window or self.length
        recent = self.keys.recent  # (B, Hkv, r, d)
        if self.method.rope == "pre":
            recent = self.rope.rotate(recent,
                                      torch.arange(self.keys.n_coded, self.length, device=q.device))
        of_keys, of_values = anchor_scores(q, recent, attended.lse, self.window)  # (B, Hkv, r) both

        lse = attended.lse[..., None] * LOG2E  # (B, H, T, 1), in base 2
        pinned_keys = pinned_values = None
        if attended.key_scores is not None:
            # (T): positions
            at = torch.arange(self.length - q.shape[2], self.length, device=q.device)
            # (B, 1 or Hkv, T, n)
            seen = self.keys.pinned_positions[:, :, None] > at[:, None] - window
            seen = seen.repeat_interleave(q.shape[1] // seen.shape[1], dim=1)  # (B, H, T, n)
            A = torch.exp2(attended.key_scores - lse) * seen  # (B, H, T, n)
            norm = q.float().norm(dim=-1)[..., None]  # (B, H, T, 1)
            of_heads = (norm * A * (1 - A)).sum(2)  # (B, H, n)
            pinned_keys = of_heads.unflatten(1, (Hkv, -1)).sum(2)  # (B, Hkv, n)
        if attended.value_scores is not None:
            A = torch.exp2(attended.value_scores - lse)  # (B, H, T, n)
            pinned_values = A.sum(2).unflatten(1, (Hkv, -1)).sum(2)  # (B, Hkv, n)
        self.keys.accumulate(of_keys, pinned_keys)
        self.values.accumulate(of_values, pinned_values)

    def quantize(self):
        """The second half of `LayerCache.update`; pinned rows come from rows in full precision."""
        n_keys = self.due(self.keys, self.method.block)
        n_values = self.due(self.values, self.method.v_block or self.method.block)
        keep_keys, keep_values = self.to_keep(n_keys, n_values)
        for rows, n, positions in ((self.keys, n_keys, keep_keys),
                                   (self.values, n_values, keep_values)):
            if positions is not None:
                pin(rows, positions)
            if n:
                rows.quantize(n)
        if self.chooses_once:
            self.forget_scores()


def pin(rows, positions):
    """As `CachedRows.pin`, from pinned and recent rows alone. positions (B or 1, 1 or Hkv, p):
    each one of these.
    """
    B, Hkv, r, d = rows.recent.shape
    positions = positions.expand(B, -1, -1)  # (B, 1 or Hkv, p)
    if rows.recent_scores is not None:
        at = positions.clamp(min=0).long().expand(B, Hkv, -1)  # (B, Hkv, p)
        rows.pinned_scores = rows.read_scores().gather(2, at)  # (B, Hkv, p)
    # where each token is among `pinned rows | recent rows`
    exact, n, at = rows.recent, 0, positions - rows.n_coded  # (B, 1 or Hkv, p)
    if rows.pinned_positions is not None:
        exact = torch.cat([rows.pinned_rows, rows.recent], dim=2)  # (B, Hkv, n + r, d)
        n = rows.pinned_positions.shape[-1]
        same = positions[..., :, None] == rows.pinned_positions[..., None, :]  # (B, 1 or Hkv, p, n)
        at = torch.where(same.any(-1) & (at < 0), same.int().argmax(-1), n + at)  # (B, 1 or Hkv, p)
    at = at.clamp(0, n + r - 1).long()  # an empty slot: any row
    rows.pinned_rows = exact.gather(2, at[..., None].expand(B, Hkv, -1, d))  # (B, Hkv, p, d)
    rows.pinned_positions = positions.to(torch.int32, copy=True)


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
        self.check_order(layer, v.shape[2])
        return self.layers[layer].attend(q, k, v, positions)


def check_device(device):
    """UserError where the kernels cannot run."""
    if device.type != "cuda" and not kernels.INTERPRETED:
        raise UserError(f"--attention triton needs a GPU, and the model is on {device.type}; use "
                        "--attention fused, or set TRITON_INTERPRET=1 to run the kernels slowly, "
                        "line by line")
