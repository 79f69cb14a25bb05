"""The Triton kernels: attention that reads the packed cache, and the scores of KVSink and AnTKV.

From easy to hard, each kernel under the torch lines that it equals:

    1. topk_kernel     the k largest |h| of one channel, KVSink's scores; a first Triton kernel
    2. code_of, tiny   a code is a number: from packed bytes to fp16
    3. folded_scores   scales and zero points leave the products
    4. attend_kernel   attention of new queries to a piece of the text
    5. decode_...      codecs whose numbers have to be decoded one by one, and keys before RoPE
    6. merge_kernel    the pieces, and the pinned values, become the output
    7. anchor_kernel   AnTKV's Eq. 5

`tinykv/triton_cache.py` launches them, `tests/bench_kernels.py` compiles, checks and times them.
Nothing here was run on a GPU: the tests run the kernels in Triton's interpreter, on a CPU, and
compile them for two GPUs.

Why kernels? Decoding reads every cached token once per new token, so its time is bytes over
bandwidth, and packed codes are fewer bytes. That holds only if no decoded row is ever written to
memory: a code has to become a number between its load and its product with the query.

Shapes: B sequences, H query heads, Hkv KV heads of R = H / Hkv query heads each, T new queries, S
tokens in all, d channels of a head. In a kernel: M rows of queries, N tokens, W channels. A kernel
is one program, of which many run at once; each asks `tl.program_id` for its number. Sums are in
fp32; products take 16-bit operands where the model has 16 bits (DOT). Scores are in base 2, log2(e)
/ sqrt(d) q.k, so that a weight is 2**score.
"""
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

LOG2E, LN2 = 1 / math.log(2), math.log(2)
FMA = {"enable_fp_fusion": True}  # a * b + c in one instruction: not every Triton's default
# TRITON_INTERPRET=1: kernels run on the CPU, line by line
INTERPRETED = triton.knobs.runtime.interpret
# where there is a GPU's assembler, codes are unpacked two at a time
PAIRS = tl.constexpr(not INTERPRETED)


# ---- 1. The k largest |h| of one channel: KVSink's scores

def topk_lines(hidden, channel, k):
    """hidden (B, T, D) -> the k largest |h| of a channel and their positions, (B, k) both."""
    score = hidden[..., channel].float().abs()  # (B, T)
    score, position = score.sort(dim=1, descending=True, stable=True)  # (B, T), ties: the earlier
    return score[:, :k], position[:, :k]


@triton.jit
def topk_kernel(h, score, position, tokens, sequence, token, K: tl.constexpr, N: tl.constexpr):
    # One program: N tokens of one sequence, of which it writes the K best. It reads one number a
    # token.
    #   h: the channel in question of the first token    sequence, token: how far apart they lie
    #   score (B, pieces, K) fp32, position (B, pieces, K) int32
    piece, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    # load |h| of the program's tokens; those after the end of the text get a score below all others
    t = piece * N + tl.arange(0, N)  # (N)
    x = tl.load(h + b * sequence + t.to(tl.int64) * token, mask=t < tokens, other=0)  # (N)
    x = tl.where(t < tokens, tl.abs(x.to(tl.float32)), -1.0)  # (N)
    # K times: take the largest (of equal ones the earliest), write it, cross it out
    place = (b * tl.num_programs(0) + piece) * K
    for i in range(K):
        largest = tl.max(x, 0)
        at = tl.min(tl.where(x == largest, t, tokens), 0)
        tl.store(score + place + i, largest)
        tl.store(position + place + i, at)
        x = tl.where(t == at, -1.0, x)  # (N)


def topk_outliers(hidden, channel, k, N=1024):
    """As `topk_lines`: each program finds the k best of N tokens, and torch the best of these."""
    B, T, _ = hidden.shape
    k, pieces = min(k, T), triton.cdiv(T, N)
    score = torch.empty(B, pieces * k, dtype=torch.float32, device=hidden.device)
    position = torch.empty(B, pieces * k, dtype=torch.int32, device=hidden.device)
    h = hidden[..., channel]  # (B, T)
    topk_kernel[pieces, B](h, score, position, T, *h.stride(), k, N, **FMA)
    order = score.sort(dim=1, descending=True, stable=True).indices[:, :k]  # (B, k)
    return score.gather(1, order), position.gather(1, order).long()


# ---- 2. A code is a number

def number_lines(code):
    """The bits of a small integer are, read as fp16, the integer times 2**-24: a subnormal."""
    return code.to(torch.int16).view(torch.float16)


TINY = tl.constexpr(2.0 ** 24)  # what such a number is multiplied by: once, after the product


class Place(NamedTuple):
    """Where packed rows lie. Strides count words.

    Two strides are constants of the compiled kernel. Only so does the compiler know that
    neighbouring words lie side by side, and load 16 bytes at once. The other two grow with the
    text, and would compile the kernel anew.
    """
    # uint8, or uint16: two bytes of codes at a time; or the 16-bit numbers themselves
    words: torch.Tensor
    batch: int  # from one sequence to the next
    head: int  # from one head to the next; 0 where the heads of a token are one row
    token: tl.constexpr
    word: tl.constexpr
    start: int = 0  # position of the first token


class Grid(NamedTuple):
    """x = code * scale + zero. `tokens` and `channels` share a scale; 0: all of them do."""
    scale: torch.Tensor
    zero: torch.Tensor
    batch: int  # strides, in numbers
    head: int
    token: tl.constexpr  # from a group of tokens to the next
    channel: tl.constexpr  # from a group of channels to the next
    tokens: tl.constexpr
    channels: tl.constexpr
    # "offset"; "integer": x = scale * (code - zero); "fp8": offset, both as bytes of e4m3
    form: tl.constexpr


class Outliers(NamedTuple):
    """KVQuant's sparse matrix of numbers kept in 16 bits, see `SparseCodes`."""
    row_end: torch.Tensor  # (B, T) int32
    numbers: torch.Tensor
    columns: torch.Tensor
    sequences: int  # B
    tokens: int  # T


class Order(NamedTuple):
    """SKVQ's channels: each one's place in the row of all heads, and the group of each place."""
    place: torch.Tensor  # (h) int32
    group: torch.Tensor  # (h) int32


class Book(NamedTuple):
    """Centroids of n channels each, m of them in a book."""
    centroids: torch.Tensor  # (places or 1, m, n)
    n: tl.constexpr
    m: tl.constexpr
    side: tl.constexpr  # channels of a centroid that lie side by side in a tile, too: one load
    shared: tl.constexpr  # one book for all places


class PackedRows(NamedTuple):
    """The keys, or the values, of a range of tokens, as a kernel reads them.

    A word holds P codes, so a row of a head is P planes: the channels 0, P, 2P, ..., then 1, P + 1,
    ... A plane is one mask away from the words, and nothing has to be rearranged: q and the output
    are cut into the same planes instead.
    """
    codec: tl.constexpr  # name of the codec's class: which of the decode functions
    # scales leave the products: of each "token", of each "channel"; "": they do not
    fold: tl.constexpr
    bits: tl.constexpr  # of a code; 2 for three levels
    planes: tl.constexpr  # P; 1: every code is loaded alone, or nothing is packed
    size: tl.constexpr  # strides from a word to the next: 3 for three bytes; 0: there are no planes
    width: int  # channels of a head, where the heads of a token are one row
    place: Place
    grid: Grid | None = None
    levels: torch.Tensor | None = None  # KVQuant: (2**bits) numbers, in the place of 0, 1, 2, ...
    outliers: Outliers | None = None
    # three levels, five to a byte: (256) uint16, see `ternary_table`
    ternary: torch.Tensor | None = None
    order: Order | None = None
    book: Book | None = None


@triton.constexpr_function
def shift_of(bits, plane):
    # A number below 2**10 is subnormal in fp16. So codes in the ten low bits of a word stay where
    # they are, as numbers that are 2**place_of times larger; one shift brings the next ten there.
    return plane // (10 // bits) * (10 // bits) * bits


@triton.constexpr_function
def place_of(bits, plane):
    return plane * bits - shift_of(bits, plane)


@triton.jit
def channels_of(rows, half: tl.constexpr, plane: tl.constexpr, DIM: tl.constexpr,
                HALVES: tl.constexpr, W: tl.constexpr):
    # The channels (W) of a plane of a head, or of half a head, and which of them there are.
    channel = tl.arange(0, W) * rows.planes + plane
    return channel + half * (DIM // HALVES), channel < DIM // HALVES


@triton.jit
def row_of(rows, b, h, j):
    # Pointers to the rows of the tokens j: (N, 1).
    place = rows.place
    token = (j - place.start).to(tl.int64)
    return place.words + b * place.batch + h * place.head + token[:, None] * place.token


@triton.jit
def words_of(rows, b, h, j, ok, half: tl.constexpr, DIM: tl.constexpr, HALVES: tl.constexpr,
             W: tl.constexpr, TURNED: tl.constexpr = False):
    # The words (N, W), or TURNED (W, N), of the tokens j that are `ok`; of half a head or a whole.
    i = tl.arange(0, W)
    C: tl.constexpr = (DIM // HALVES + rows.planes - 1) // rows.planes  # words of a row
    live = ok[:, None] & (i < C)[None]
    # (N, W) pointers
    word = row_of(rows, b, h, j) + ((i + half * C) * rows.size * rows.place.word)[None]
    if TURNED:
        word, live = tl.trans(word), tl.trans(live)
    words = tl.load(word, live, 0)
    if rows.size == 3:  # 3 bits: eight codes fill three bytes
        middle = tl.load(word + rows.place.word, live, 0)
        high = tl.load(word + 2 * rows.place.word, live, 0)
        words = words.to(tl.int32) | middle.to(tl.int32) << 8 | high.to(tl.int32) << 16
    # three levels: five codes in a byte, which the table puts into two bits each
    if rows.ternary is not None:
        words = tl.load(rows.ternary + words)
    return words


@triton.constexpr_function
def pair_of_codes(bits, plane):
    # PTX: the codes of a plane in two 16-bit words at once. The compiler takes two for each.
    mask = ((2 ** bits - 1) << place_of(bits, plane)) * 0x10001
    return f"{{ .reg .b32 x; shr.b32 x, $1, {shift_of(bits, plane)}; and.b32 $0, x, {mask:#x}; }}"


@triton.jit
def code_of(rows, words, plane: tl.constexpr):
    # The codes of a plane (N, W), each times 2**place_of: integers below 2**10.
    mask: tl.constexpr = (2 ** rows.bits - 1) << place_of(rows.bits, plane)
    return words >> shift_of(rows.bits, plane) & mask


@triton.jit
def tiny(rows, words, plane: tl.constexpr):
    # The same as fp16 numbers, TINY times smaller: `number_lines`.
    if PAIRS and rows.size == 1:
        PTX: tl.constexpr = pair_of_codes(rows.bits, plane)
        return tl.inline_asm_elementwise(PTX, "=r,r", [words.to(tl.uint16)], dtype=tl.float16,
                                         is_pure=True, pack=2)
    return code_of(rows, words, plane).to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def grid_of(grid, b, h, j0, ok, column, there, N: tl.constexpr):
    # Scale and zero point of the tile's N tokens and of channels `column` (W): (N or 1, W or 1), 1
    # where all share one.
    at = b * grid.batch + h * grid.head
    mask = tl.full((1, 1), True, tl.int1)
    at += tl.full((1, 1), 0, tl.int32)
    if grid.tokens == 0:
        pass
    elif grid.tokens % N == 0:  # a tile starts at a multiple of N, so it lies in one group
        at += j0 // grid.tokens * grid.token
    else:
        at += ((j0 + tl.arange(0, N)) // grid.tokens).to(tl.int64)[:, None] * grid.token
        mask = ok[:, None]
    if grid.channels != 0:
        at += (column // grid.channels)[None] * grid.channel
        mask = mask & there[None]
    scale, zero = tl.load(grid.scale + at, mask, 1), tl.load(grid.zero + at, mask, 0)
    if grid.form == "fp8":
        return fp8_number(scale), fp8_number(zero)
    scale, zero = scale.to(tl.float32), zero.to(tl.float32)
    if grid.form == "integer":
        zero = -scale * zero
    return scale, zero


@triton.jit
def rough_log2(x):
    # log2 of a positive number, up to 0.09: its bits are its exponent, then its digits.
    return x.to(tl.int32, bitcast=True).to(tl.float32) * 0.5 ** 23 - 127


@triton.jit
def fp8_number(x):
    # The bytes of e4m3 numbers. An fp16 with the same digits is 2**8 times smaller.
    x = x.to(tl.uint16)
    return ((x & 127) << 7 | (x & 128) << 8).to(tl.float16, bitcast=True).to(tl.float32) * 256


# ---- 3. Scales and zero points leave the products

def fold_lines(q, p, c, s, z, S, Z):
    """Queries q (M, d), and weights p (M, N), times rows stored as codes c (N, d), never decoded.

    s, z (N, 1): each token's scale and zero point. S, Z (1, d): each channel's.
    """
    # q.(c s + z) = (q.c) s + sum(q) z
    scores_by_token = (q @ c.T) * s.T + q.sum(1, keepdim=True) * z.T
    scores_by_channel = (q * S) @ c.T + (q * Z).sum(1, keepdim=True)  # q.(c S + Z) = (q S).c + q.Z
    # sum p (c s + z) = sum (p s) c + sum p z
    output_by_token = (p * s.T) @ c + (p * z.T).sum(1, keepdim=True)
    return scores_by_token, scores_by_channel, output_by_token


@triton.jit
def folded_scores(q, q_sum, k, b, h, j0, ok, DIM: tl.constexpr, W: tl.constexpr, M: tl.constexpr,
                  N: tl.constexpr, DOT: tl.constexpr):
    # The first two lines, on their side: K q^T (N, M). q: (W, M) of each plane; q_sum (M): the sums
    # of all channels
    words = words_of(k, b, h, j0 + tl.arange(0, N), ok, 0, DIM, 1, W)  # (N, W)
    s = tl.full((N, M), 0.0, tl.float32)
    offset = tl.full((W, M), 0.0, tl.float32)
    for plane in tl.static_range(k.planes):
        x = q[plane]
        if k.fold == "channel":
            channel, there = channels_of(k, 0, plane, DIM, 1, W)
            scale, zero = grid_of(k.grid, b, h, j0, ok, channel, there, N)  # (1, W)
            # q S is rounded, and q Z is made of that: two large terms, whose difference counts
            x = (x * tl.trans(scale)).to(DOT).to(tl.float32)
            offset += x * tl.trans(zero / scale)
        x *= 0.5 ** place_of(k.bits, plane)
        s = tl.dot(tiny(k, words, plane).to(DOT), x.to(DOT), s, input_precision="ieee")
    s *= TINY
    if k.fold == "channel":
        s += tl.sum(offset, 0)[None]
    else:
        scale, zero = grid_of(k.grid, b, h, j0, ok, ok, ok, N)  # (N or 1, 1)
        s = s * scale + q_sum[None] * zero
    return s


# ---- 4. Attention over a piece of the text

class Pins(NamedTuple):
    """Pinned rows of the keys, or of the values.

    A pinned key takes the place of its slot as a *score*, which is known before. For a pinned value
    the kernel writes the slot's score, and `merge_kernel` adds the row. So a token's key may be
    pinned where its value is coded.
    """
    # (B, 1 or Hkv, S) int32: number of a token's pinned row, or -1
    slot: torch.Tensor | None = None
    batch: int = 0  # strides of `slot`
    head: int = 0
    score: torch.Tensor | None = None  # (B * H * T, n) fp32: of keys read, of values written
    n: int = 0


class Turn(NamedTuple):
    """RoPE for keys that are stored before it, in two steps: q turns back by the position of the
    tile's first token, a key by its place in the tile. So one small table serves all tiles, and no
    angle is computed for a key."""
    cos: torch.Tensor | None = None  # (N, d/2), of places 0 .. N - 1
    sin: torch.Tensor | None = None
    tile_cos: torch.Tensor | None = None  # (tiles, d/2), of positions 0, N, 2N, ...
    tile_sin: torch.Tensor | None = None


def attend_lines(q, K, V, begin, end, window):
    """One piece of the text: q (B, H, T, d), K and V (B, H, S, d) fp32, tokens begin .. end of S.

    Returns acc (B, H, T, d), top and total (B, H, T): the sum of 2**(score - top) v, the largest
    score, the sum of 2**(score - top). (The kernel's `top` may be another number of about this
    size; `merge_lines` gives the same.)
    """
    T, S = q.shape[2], K.shape[2]
    # (B, H, T, end - begin)
    s = q @ K[:, :, begin:end].transpose(-2, -1) * (LOG2E / math.sqrt(q.shape[-1]))
    at = torch.arange(S - T, S, device=q.device)[:, None]  # (T, 1): positions
    j = torch.arange(begin, end, device=q.device)[None]  # (1, end - begin)
    s = s.masked_fill((j > at) | (j <= at - window), float("-inf"))
    top = s.amax(-1)  # (B, H, T)
    p = torch.exp2(s - top.nan_to_num(neginf=0)[..., None])  # (B, H, T, end - begin)
    return p @ V[:, :, begin:end], top, p.sum(-1)


# or a longer text would compile it anew
@triton.jit(do_not_specialize=["begin", "end", "length", "window"])
def attend_kernel(q, k, v, turn, k_pins, v_pins, acc, top, total,
                  q_batch, q_head, q_token, begin, end, split, queries, length, window, tiles,
                  lines, factor, H: tl.constexpr, R: tl.constexpr, DIM: tl.constexpr,
                  HALVES: tl.constexpr, KW: tl.constexpr, VW: tl.constexpr, M: tl.constexpr,
                  N: tl.constexpr, DOT: tl.constexpr):
    # One program: `split` of the tokens begin .. end, one KV head, M of the T * R query rows that
    # share it. It reads the packed rows of these tokens once, and writes d + 2 numbers a row.
    #   q (B, H, T, d)    k, v: PackedRows
    #   acc (pieces, B * H * T, d), top and total (pieces, B * H * T) fp32
    piece, bh = tl.program_id(1), (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    b, h = bh // (H // R), bh % (H // R)
    row = tile * M + tl.arange(0, M)  # (M)
    t, live = row // R, row < queries * R
    at = length - queries + t  # (M): positions
    head = h * R + row % R  # (M)

    # the queries, cut into the planes of the keys, with their sums
    parts, q_sum = (), tl.full((M,), 0.0, tl.float32)
    for half in tl.static_range(HALVES):
        for plane in tl.static_range(k.planes):
            channel, there = channels_of(k, half, plane, DIM, HALVES, KW)
            at_q = b * q_batch + (head * q_head + t * q_token)[None] + channel[:, None]  # (KW, M)
            x = tl.load(q + at_q, live[None] & there[:, None], 0).to(tl.float32) * factor
            if k.fold == "token":
                x = x.to(DOT).to(tl.float32)  # rounded once, for the products and for the sum
            parts = parts + (x,)
            q_sum += tl.sum(x, 0)
    # what is summed up over the tokens: of each plane of the values, and of each row
    out = ()
    for _ in tl.static_range(v.planes):
        out = out + (tl.full((VW, M), 0.0, tl.float32),)
    m, norm = tl.full((M,), float("-inf"), tl.float32), tl.full((M,), 0.0, tl.float32)
    zeros = tl.full((M,), 0.0, tl.float32)

    # the tokens of this piece that a query of this tile sees; tiles begin at multiples of N
    low = begin // N * N + piece * split
    high = tl.minimum(tl.minimum(low + split, end), length - queries + (tile * M + M - 1) // R + 1)
    oldest = length - queries + tile * M // R - window + 1  # what the first row still sees
    low = tl.maximum(low, tl.maximum(oldest, 0) // N * N)
    for j0 in range(low, high, N):
        j = j0 + tl.arange(0, N)  # (N)
        ok = (j >= begin) & (j < high)
        # 1. scores (N, M): of codes, of decoded keys, or of keys that have to be rotated; then
        # those of pinned keys
        if k.fold != "":
            s = folded_scores(parts, q_sum, k, b, h, j0, ok, DIM, KW, M, N, DOT)
        elif HALVES == 2:
            s = rotated_scores(parts, k, turn, b, h, j0, ok, DIM, KW, M, N, DOT)
        else:
            s = decoded_scores(parts, k, b, h, j0, ok, DIM, KW, M, N, DOT)
        if k_pins.slot is not None:
            slots = k_pins.slot + b * k_pins.batch + h * k_pins.head
            slot = tl.load(slots + j, ok, -1)[:, None]  # (N, 1)
            line = (b * H + head) * queries + t  # (M)
            known = live[None] & (slot >= 0)  # (N, M)
            pinned = tl.load(k_pins.score + line[None] * k_pins.n + slot, known, 0)
            s = tl.where(slot >= 0, pinned, s)
        seen = ok[:, None] & (j[:, None] <= at[None]) & (j[:, None] > at[None] - window)
        s = tl.where(seen, s, float("-inf"))

        # 2. weights, and their sum. `base` is what the largest score was so far. Where each value
        # has a scale, it is the largest score + log2(scale): the *scaled* weights are rounded to 16
        # bits, and the largest of these has to be 1
        size = s
        if v.fold == "token":
            scale, zero = grid_of(v.grid, b, h, j0, ok, ok, ok, N)  # (N or 1, 1)
            size = s + rough_log2(scale)
        new = tl.maximum(m, tl.max(size, 0))  # (M)
        base = tl.where(new == float("-inf"), 0.0, new)
        p, fade = tl.exp2(s - base[None]), tl.exp2(m - base)  # (N, M), (M)
        m, norm = new, norm * fade + tl.sum(p, 0)
        if v_pins.slot is not None:
            slots = v_pins.slot + b * v_pins.batch + h * v_pins.head
            slot = tl.load(slots + j, ok, -1)[:, None]  # (N, 1)
            line = (b * H + head) * queries + t  # (M)
            tl.store(v_pins.score + line[None] * v_pins.n + slot, s, live[None] & (slot >= 0))
            p = tl.where(slot >= 0, 0.0, p)

        # 3. the output so far fades, and the weighted values join it, plane by plane
        words = 0
        if v.size > 0:
            words = words_of(v, b, h, j, ok, 0, DIM, 1, VW, v.fold == "token")  # (VW, N) if so
        if v.fold == "token":  # the third line of `fold_lines`
            zeros = zeros * fade + tl.sum(p * zero, 0)
            p *= scale
        new_out = ()
        for plane in tl.static_range(v.planes):
            if v.fold == "token":
                values = tiny(v, words, plane)  # (VW, N)
            else:
                rows = decoded(v, b, h, j0, ok, words, 0, plane, DIM, 1, VW, N)  # (N, VW)
                values = tl.trans(rows)  # (VW, N)
            faded = out[plane] * fade[None]
            new_out = new_out + (tl.dot(values.to(DOT), p.to(DOT), faded, input_precision="ieee"),)
        out = new_out

    line = piece * lines + (b * H + head) * queries + t  # (M)
    for plane in tl.static_range(v.planes):
        channel, there = channels_of(v, 0, plane, DIM, 1, VW)
        x = out[plane]
        if v.fold == "token":
            x = x * (TINY * 0.5 ** place_of(v.bits, plane)) + zeros[None]
        tl.store(acc + line[None] * DIM + channel[:, None], x, live[None] & there[:, None])
    tl.store(top + line, m, live)
    tl.store(total + line, norm, live)


# ---- 5. Numbers that have to be decoded

@triton.jit
def decoded_scores(q, k, b, h, j0, ok, DIM: tl.constexpr, W: tl.constexpr, M: tl.constexpr,
                   N: tl.constexpr,
                   DOT: tl.constexpr):
    # K q^T (N, M) of keys that are decoded first. q: (W, M) of each plane
    words = 0
    if k.size > 0:
        words = words_of(k, b, h, j0 + tl.arange(0, N), ok, 0, DIM, 1, W)  # (N, W)
    s = tl.full((N, M), 0.0, tl.float32)
    for plane in tl.static_range(k.planes):
        x = decoded(k, b, h, j0, ok, words, 0, plane, DIM, 1, W, N)  # (N, W)
        s = tl.dot(x.to(DOT), q[plane].to(DOT), s, input_precision="ieee")
    return s


@triton.jit
def rotated_scores(q, k, turn, b, h, j0, ok, DIM: tl.constexpr, W: tl.constexpr, M: tl.constexpr,
                   N: tl.constexpr,
                   DOT: tl.constexpr):
    # K q^T (N, M) of keys before RoPE. Channel i turns with channel i + d/2: both halves of a row
    # are decoded
    j = j0 + tl.arange(0, N)
    low, high = 0, 0
    if k.size > 0:
        low = words_of(k, b, h, j, ok, 0, DIM, 2, W)  # (N, W)
        high = words_of(k, b, h, j, ok, 1, DIM, 2, W)  # (N, W)
    s = tl.full((N, M), 0.0, tl.float32)
    for plane in tl.static_range(k.planes):
        pair, there = channels_of(k, 0, plane, DIM, 2, W)
        # q turns back by the position of the tile's first token
        first = (j0 // N * (DIM // 2) + pair)[:, None]  # (W, 1)
        c = tl.load(turn.tile_cos + first, there[:, None], 0)
        z = tl.load(turn.tile_sin + first, there[:, None], 0)
        q_low, q_high = q[plane], q[k.planes + plane]  # (W, M)
        q_low, q_high = q_low * c + q_high * z, q_high * c - q_low * z
        # keys turn by their places in the tile
        place = tl.arange(0, N)[:, None] * (DIM // 2) + pair[None]  # (N, W)
        cos = tl.load(turn.cos + place, there[None], 0)
        sin = tl.load(turn.sin + place, there[None], 0)
        x = decoded(k, b, h, j0, ok, low, 0, plane, DIM, 2, W, N)  # (N, W)
        y = decoded(k, b, h, j0, ok, high, 1, plane, DIM, 2, W, N)
        s = tl.dot((x * cos - y * sin).to(DOT), q_low.to(DOT), s, input_precision="ieee")
        s = tl.dot((y * cos + x * sin).to(DOT), q_high.to(DOT), s, input_precision="ieee")
    return s


@triton.jit
def decoded(rows, b, h, j0, ok, words, half: tl.constexpr, plane: tl.constexpr, DIM: tl.constexpr,
            HALVES: tl.constexpr, W: tl.constexpr, N: tl.constexpr):
    # The numbers (N, W) fp32 of the tile's N tokens and the channels of a plane. words: of
    # `words_of`, where size > 0
    channel, there = channels_of(rows, half, plane, DIM, HALVES, W)
    if rows.codec == "Exact":
        x = decode_exact(rows, b, h, j0, ok, channel, there, N)
    elif rows.codec == "Affine":
        x = decode_affine(rows, b, h, j0, ok, words, plane, channel, there, N)
    elif rows.codec == "NonUniform":
        x = decode_nonuniform(rows, b, h, j0, ok, words, plane, channel, there, N)
    elif rows.codec == "ClippedGroups":
        x = decode_clipped(rows, b, h, j0, ok, channel, there, N)
    else:
        x = decode_codebook(rows, b, h, j0, ok, half, DIM, HALVES, W, N)
    return x


@triton.jit
def decode_exact(rows, b, h, j0, ok, channel, there, N: tl.constexpr):
    # (N, W) pointers
    number = row_of(rows, b, h, j0 + tl.arange(0, N)) + (channel * rows.place.word)[None]
    return tl.load(number, ok[:, None] & there[None], 0).to(tl.float32)


@triton.jit
def decode_affine(rows, b, h, j0, ok, words, plane: tl.constexpr, channel, there, N: tl.constexpr):
    # code * scale + zero
    if rows.size > 0:
        code = tiny(rows, words, plane).to(tl.float32) * TINY * 0.5 ** place_of(rows.bits, plane)
    else:
        code = code_at(rows, b, h, j0, ok, channel[None], there[None], N).to(tl.float32)
    scale, zero = grid_of(rows.grid, b, h, j0, ok, channel, there, N)
    return code * scale + zero


@triton.jit
def decode_nonuniform(rows, b, h, j0, ok, words, plane: tl.constexpr, channel, there,
                      N: tl.constexpr):
    # levels[code] * half + mid; then the token's outliers, one after the other, take their places
    if rows.size > 0:
        code = code_of(rows, words, plane) >> place_of(rows.bits, plane)
    else:
        code = code_at(rows, b, h, j0, ok, (h * rows.width + channel)[None], there[None], N)
    level = tl.load(rows.levels + code).to(tl.float32)  # (N, W)
    half_range, mid = grid_of(rows.grid, b, h, j0, ok, channel, there, N)
    x = level * half_range + mid
    if rows.outliers is not None:
        sparse, j = rows.outliers, j0 + tl.arange(0, N)
        stop = tl.load(sparse.row_end + b * sparse.tokens + j, ok, 0)  # (N)
        # the row before: the previous sequence at this token, or the last sequence at the previous
        # token
        before = tl.where(b > 0, (b - 1) * sparse.tokens + j,
                          (sparse.sequences - 1) * sparse.tokens + j - 1)
        start = tl.load(sparse.row_end + before, ok & (j + b > 0), 0)  # (N)
        for i in range(0, tl.max(stop - start, 0)):
            here = start + i < stop  # (N)
            column = tl.load(sparse.columns + start + i, here, -1) - h * rows.width  # (N)
            value = tl.load(sparse.numbers + start + i, here, 0).to(tl.float32)  # (N)
            x = tl.where((column[:, None] == channel[None]) & there[None], value[:, None], x)
    return x


@triton.jit
def decode_clipped(rows, b, h, j0, ok, channel, there, N: tl.constexpr):
    # a channel's code lies at `place` in the row of all heads, in the group of that place
    place = tl.load(rows.order.place + h * rows.width + channel, there, 0)  # (W)
    group = tl.load(rows.order.group + place, there, 0)  # (W)
    code = code_at(rows, b, h, j0, ok, place[None], there[None], N)  # (N, W)
    scale, zero = grid_of(rows.grid, b, h, j0, ok, group, there, N)  # (N, W)
    return code.to(tl.float32) * scale + zero


@triton.jit
def decode_codebook(rows, b, h, j0, ok, half: tl.constexpr, DIM: tl.constexpr,
                    HALVES: tl.constexpr, W: tl.constexpr,
                    N: tl.constexpr):
    # a code is the number of a centroid; SIDE of its channels are loaded at once
    SIDE: tl.constexpr = rows.book.side
    unit = tl.arange(0, W // SIDE) * SIDE  # (W / SIDE): the first channel of each
    there = ok[:, None] & (unit < DIM // HALVES)[None]  # (N, W / SIDE)
    unit += half * (DIM // HALVES)
    # (W / SIDE): of the vector in the row of all heads
    place = (h * rows.width + unit) // rows.book.n
    centroid = code_at(rows, b, h, j0, ok, place[None], there, N)  # (N, W / SIDE)
    if not rows.book.shared:
        centroid += place[None] * rows.book.m
    at = centroid * rows.book.n + (unit % rows.book.n)[None]
    at = at[:, :, None] + tl.arange(0, SIDE)[None, None]  # (N, W / SIDE, SIDE)
    x = tl.load(rows.book.centroids + at, there[:, :, None], 0).to(tl.float32)
    return tl.reshape(x, (N, W))


@triton.constexpr_function
def bytes_of(bits):
    # Bytes that a code can touch.
    return 1 if 8 % bits == 0 else 1 + (bits + 6) // 8


@triton.jit
def code_at(rows, b, h, j0, ok, place, there, N: tl.constexpr):
    # The codes at `place` in their rows, each loaded alone: (N, W) int32.
    row, live = row_of(rows, b, h, j0 + tl.arange(0, N)), ok[:, None] & there
    if rows.ternary is not None:
        byte = tl.load(row + place // 5 * rows.place.word, live, 0)
        return tl.load(rows.ternary + byte).to(tl.int32) >> place % 5 * 2 & 3
    bit = place * rows.bits
    word = tl.load(row + bit // 8 * rows.place.word, live, 0).to(tl.int32)
    for i in tl.static_range(1, bytes_of(rows.bits)):  # it may go on in the next byte, or in two
        reaches = live & (8 * i < bit % 8 + rows.bits)
        word |= tl.load(row + (bit // 8 + i) * rows.place.word, reaches, 0).to(tl.int32) << 8 * i
    return word >> bit % 8 & 2 ** rows.bits - 1


# ---- 6. The pieces together, and the pinned values

def merge_lines(acc, top, total, score=None, pinned=None):
    """Pieces of `attend_lines` -> output (B, H, T, d), log-sum-exp (B, H, T).

    score (B, H, T, n) and pinned (B, H, n, d): of the pinned values.
    """
    m = top.amax(0)  # (B, H, T)
    part = torch.exp2(top - m)  # (pieces, B, H, T)
    norm = (total * part).sum(0)  # (B, H, T)
    x = (acc * part[..., None]).sum(0)  # (B, H, T, d)
    if pinned is not None:
        x = x + torch.exp2(score - m[..., None]) @ pinned.float()
    return x / norm[..., None], (m + norm.log2()) * LN2


@triton.jit(do_not_specialize=["pieces", "n"])
def merge_kernel(acc, top, total, score, pinned, out, lse, pieces, lines, queries, n, tiles,
                 pinned_batch, pinned_head,
                 pinned_row, H: tl.constexpr, R: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr,
                 M: tl.constexpr, N: tl.constexpr):
    # One program: M queries of one head. Bytes: what the pieces wrote, and the pinned values.
    #   acc, top, total: of attend_kernel    score (B * H * T, n) fp32: of the pinned values' slots,
    #   or -inf
    #   pinned (B, Hkv, n, d)    out (B, H, T, d)    lse (B, H, T) fp32: natural log of the sum of
    #   e**score
    bh = (tl.program_id(0) // tiles).to(tl.int64)
    t = tl.program_id(0) % tiles * M + tl.arange(0, M)  # (M)
    live, line = t < queries, bh * queries + t  # (M) both
    c = tl.arange(0, D)
    mask = live[:, None] & (c < DIM)[None]  # (M, D)
    m, norm = tl.full((M,), float("-inf"), tl.float32), tl.full((M,), 0.0, tl.float32)
    x = tl.full((M, D), 0.0, tl.float32)
    # piece by piece, as in the online softmax
    for i in range(pieces):
        at = i * lines + line
        other = tl.load(top + at, live, 0)  # (M)
        new = tl.maximum(m, other)
        base = tl.where(new == float("-inf"), 0.0, new)
        old, add = tl.exp2(m - base), tl.exp2(other - base)  # (M) both
        norm = norm * old + tl.load(total + at, live, 1) * add
        x = x * old[:, None] + tl.load(acc + at[:, None] * DIM + c[None], mask, 0) * add[:, None]
        m = new
    # the pinned values, with the weights that their slots have
    if pinned is not None:
        row = pinned + bh // H * pinned_batch + bh % H // R * pinned_head
        for i0 in range(0, n, N):
            slot = i0 + tl.arange(0, N)  # (N)
            there = slot < n
            p = tl.load(score + (line * n)[:, None] + slot[None], live[:, None] & there[None],
                        float("-inf"))  # (M, N)
            rows = tl.load(row + slot[:, None] * pinned_row + c[None],
                           there[:, None] & (c < DIM)[None], 0)  # (N, D)
            x += tl.dot(tl.exp2(p - m[:, None]), rows.to(tl.float32), input_precision="ieee")
    tl.store(out + line[:, None] * DIM + c[None], x / norm[:, None], mask)
    tl.store(lse + line, (m + tl.log2(norm)) * 0.6931471805599453, live)  # ln 2


# ---- 7. AnTKV's anchor scores

def anchor_lines(q, k, lse, window=None):
    """Eq. 5: AnS(K) and AnS(V), (B, Hkv, S) both, of q (B, H, T, d), k (B, Hkv, S, d), rotated,
    and lse (B, H, T).
    """
    T, S, Hkv = q.shape[2], k.shape[2], k.shape[1]
    k = k.float().repeat_interleave(q.shape[1] // Hkv, dim=1)  # (B, H, S, d)
    s = q.float() @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])  # (B, H, T, S)
    at, j = torch.arange(S - T, S)[:, None], torch.arange(S)[None]  # (T, 1), (1, S): positions
    s = s.masked_fill((j > at) | (j <= at - (window or S)), float("-inf"))
    A = torch.exp(s - lse[..., None])  # (B, H, T, S)
    of_k = (A * (1 - A) * q.float().norm(dim=-1)[..., None]).sum(2)  # (B, H, S)
    of_v = A.sum(2)  # (B, H, S)
    return of_k.unflatten(1, (Hkv, -1)).sum(2), of_v.unflatten(1, (Hkv, -1)).sum(2)


@triton.jit(do_not_specialize=["queries", "keys", "window"])
def anchor_kernel(q, norm, lse, k, of_k, of_v, k_batch, k_head, k_token, queries, keys, window,
                  tiles, factor,
                  H: tl.constexpr, R: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr,
                  M: tl.constexpr, N: tl.constexpr, DOT: tl.constexpr):
    # One program: N keys of one KV head, and all queries that see them: no other program adds to
    # their sums. Bytes: the keys once, the queries once a block of keys; two numbers a key written.
    # Products: half those of the attention.
    #   q (B, H, T, d)    norm, lse (B, H, T) fp32    k (B, Hkv, S, d), rotated    of_k, of_v (B,
    #   Hkv, S) fp32
    bh, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    b, h = bh // (H // R), bh % (H // R)
    j = tile * N + tl.arange(0, N)  # (N)
    c = tl.arange(0, D)
    mask = (j < keys)[:, None] & (c < DIM)[None]
    x = tl.load(k + b * k_batch + h * k_head + j.to(tl.int64)[:, None] * k_token + c[None], mask,
                0)  # (N, D)
    x = tl.trans(x.to(tl.float32)).to(DOT)  # (D, N)
    sum_k, sum_v = tl.full((N,), 0.0, tl.float32), tl.full((N,), 0.0, tl.float32)
    # the rows of queries, of all query heads, that see any of these keys
    first = tl.maximum(tile * N - (keys - queries), 0) * R // M * M
    last = tl.minimum(tile * N + N - 1 - (keys - queries) + window, queries) * R
    for row0 in range(first, last, M):
        row = row0 + tl.arange(0, M)  # (M)
        t, live = row // R, row < queries * R
        line = (b * H + h * R + row % R) * queries + t  # (M)
        rows = tl.load(q + line[:, None] * DIM + c[None], live[:, None] & (c < DIM)[None],
                       0)  # (M, D)
        s = tl.dot((rows.to(tl.float32) * factor).to(DOT), x, input_precision="ieee")  # (M, N)
        at = keys - queries + t  # (M): positions
        seen = live[:, None] & (j[None] <= at[:, None]) & (j[None] > at[:, None] - window)
        # the attention weights, from each query's log-sum-exp; log2(e) turns that to base 2
        A = tl.exp2(tl.where(seen, s - tl.load(lse + line, live, 0)[:, None] * 1.4426950408889634,
                             float("-inf")))
        sum_v += tl.sum(A, 0)
        sum_k += tl.sum(tl.load(norm + line, live, 0)[:, None] * A * (1 - A), 0)
    tl.store(of_k + bh * keys + j, sum_k, j < keys)
    tl.store(of_v + bh * keys + j, sum_v, j < keys)
