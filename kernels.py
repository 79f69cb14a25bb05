"""The Triton kernels: attention that reads the packed cache, and the scores of KVSink and AnTKV.

Each stands below its equivalent in plain torch, or names it. The idea is in docs/ladder/: 7_topk.py says what a kernel
is, and 8_kernel.py is a simple one that attends to 2-bit codes. Sections 3 to 6 make it fast; each trick says what it
saves. The tests run the kernels in Triton's interpreter; docs/kernels.md has what compilers make of them.

Why kernels? Decoding reads every cached token once per new token, so its time is bytes over bandwidth, and packed codes
are fewer bytes, if no decoded row is written to memory: a code becomes a number between its load and its product.

Shapes: B sequences, H query heads, Hkv KV heads of R = H / Hkv query heads each, T new queries, S tokens in all, d
channels of a head. In a kernel: M rows of queries, N tokens, W channels; D is d rounded up to a power of two. Many
programs run a kernel at once: `kernel[a, b](...)` starts a * b, and each asks `tl.program_id` for its number. A tensor
comes as a pointer, and its strides. `constexpr`: known when the kernel is compiled, as the length of a block must be.
"""
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

LOG2E, LN2 = 1 / math.log(2), math.log(2)
FMA = {"enable_fp_fusion": True}  # a * b + c in one instruction: not every Triton's default
INTERPRETED = triton.knobs.runtime.interpret  # TRITON_INTERPRET=1: on the CPU, line by line


# ---- 1. The k largest of some numbers, the earlier of equals: `KVCache.top_k`, which finds KVSink's sinks

@triton.jit
def topk_kernel(x, score, position, T, x_batch, x_token, K: tl.constexpr, N: tl.constexpr):
    # One program: N tokens of one sequence, of which it writes the K best.
    #   x (B, T)    score (B, pieces, K) fp32, position (B, pieces, K) int32
    piece, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    # the program's numbers; a place after the end of the text gets one below all others
    t = piece * N + tl.arange(0, N)  # (N)
    s = tl.load(x + b * x_batch + t.to(tl.int64) * x_token, mask=t < T, other=0).to(tl.float32)  # (N)
    s = tl.where(s == s, s, float("inf"))  # NaN is the largest, as in torch
    s = tl.where(t < T, tl.maximum(s, -3.4e38), float("-inf"))  # (N)
    # K times: take the largest (of equal ones the earliest), write it, cross it out
    first = (b * tl.num_programs(0) + piece) * K
    for i in range(K):
        largest = tl.max(s, 0)
        earliest = tl.min(tl.where(s == largest, t, T), 0)
        tl.store(score + first + i, largest)
        tl.store(position + first + i, earliest)
        s = tl.where(t == earliest, float("-inf"), s)  # (N)


def topk(x, k, N=1024):
    """x (B, T) -> positions (B, up to k): each program finds the k best of N tokens, and torch the best of these."""
    B, T = x.shape
    k, pieces = min(k, T), triton.cdiv(T, N)
    score = torch.empty(B, pieces * k, dtype=torch.float32, device=x.device)
    position = torch.empty(B, pieces * k, dtype=torch.int32, device=x.device)
    topk_kernel[pieces, B](x, score, position, T, *x.stride(), k, N, **FMA)
    order = score.sort(dim=1, descending=True, stable=True).indices[:, :k]  # (B, k)
    return position.gather(1, order).long()


# ---- 2. Rows of 2-bit codes
# A row of d = 128 channels is 32 bytes. Byte i holds the codes of four channels, 32 apart:
#     bits         7 6       5 4       3 2       1 0
#              +---------+---------+---------+---------+
#     byte i   | i + 96  | i + 64  | i + 32  |    i    |   channels
#              +---------+---------+---------+---------+
#                  1 1       0 0       1 0       0 1       0b11001001: channel i has the code 1, i + 32 has 2
# Channel c lies in byte c % 32. Shift that right by c // 32 * 2 bits, and keep the lowest two. A number
# is code * scale + zero: with the token's scale 0.5 and zero -1, channel i of this byte is -0.5, channel i + 32 is 0.
# docs/ladder/8_kernel.py attends to such rows in 30 lines, with 11 instructions a number. What follows has 2.


# ---- 3. Now make it fast: rows of any codec, and codes that are numbers
# The bits of an integer below 1,024, read as fp16, are a subnormal number: that integer times 2**-24. So a code is
# masked in place and used in a product as it is. If it begins at bit `low`, it is 2**low times too large, and q, or the
# output, is divided by that. Saves shifting and converting.
# Codes of 3 bits are 2 and 1: first come the two low bits of all codes, as above, then all high bits. Of 128 channels:
#     byte i       |  i + 96   |  i + 64   |  i + 32   |     i     |   i = 0 .. 31: two low bits
#     byte 32 + i  | 112 |  96 |  80 |  64 |  48 |  32 |  16 |  i  |   i = 0 .. 15: the high bits of i, i + 16, ...
# If byte 8 is 0b00000100 and byte 40 is 0b00000100, channel 40 = 8 + 32 = 8 + 2 * 16 has the bits 1, 01: the code 5.
TWO_AT_ONCE = tl.constexpr(not INTERPRETED)  # see `two_words`: the interpreter knows no PTX
TO_INTEGER = tl.constexpr(2.0 ** 24)  # undoes the subnormal numbers after the product
LIFT = tl.constexpr(2.0 ** 15)  # what cos and sin are multiplied by, so that their products with codes are normal


class Plane(NamedTuple):
    """The codes that one mask selects from all words of a row; a word is 1 or 2 bytes of codes. Saves loading a byte
    for each code. The four planes of 2-bit codes are quarters of the head, and q and the output are cut likewise."""
    channel: int  # the first
    low: int  # the bit where a masked code begins, of the ten that a subnormal number has
    slices: tuple  # of each section of a row: which of its slices of words has the codes
    shifts: tuple  # how far to the right they are shifted, to `low` or above another section's bits
    masks: tuple  # their bits after the shift


class Grid(NamedTuple):
    """x = code * scale + zero. A scale and its zero point, 16 bits each, are one word. Saves every second load, and
    waiting: words of 32 bits are loaded ahead of time, those of 16 bits are not."""
    words: torch.Tensor  # int32
    batch: int  # strides, in words: from one sequence to the next
    head: int
    token: tl.constexpr  # from a group of tokens to the next
    channel: tl.constexpr
    tokens: tl.constexpr  # so many share a scale; 0: all
    channels: tl.constexpr
    integer: tl.constexpr  # whether zero points are integers: x = scale * (code - zero)


class Codebooks(NamedTuple):
    """The centroids of each vector of a token."""
    centroids: torch.Tensor  # (vectors of a token, m, n)
    n: tl.constexpr  # channels of a centroid
    m: tl.constexpr  # centroids of a book
    side: tl.constexpr  # channels of a centroid that are neighbours in a tile, and so take one load


class PackedRows(NamedTuple):
    """The keys, or the values, of a range of tokens. Whatever grows with the text is a runtime argument. The stride of
    a token is a constant, which allows loads of 16 bytes."""
    fold: tl.constexpr  # whose scales leave the products: each "token"'s, each "channel"'s; "": numbers are decoded
    width: tl.constexpr  # d, channels of a head
    data: torch.Tensor  # words: uint8; uint16, two bytes of codes at a time; or 16-bit numbers
    batch: int  # words from a sequence to the next
    head: int  # words from a head to the next; 0 where the heads of a token are one row
    token: tl.constexpr  # words from a token to the next
    start: int  # position of the first token
    sections: tl.constexpr  # tuple of Section (tinykv/codecs/base.py): the bytes of a row; () of 16-bit numbers
    planes: tl.constexpr  # tuple of Plane; where numbers are decoded a plane is the head, or half of it
    words: tl.constexpr  # words of a plane
    tile: tl.constexpr  # W: the next power of 2, at least the 16 that a product takes
    step: tl.constexpr  # channels from a word of a plane to the next
    groups: tl.constexpr  # scales of a token that leave the products; each covers as many planes
    grid: Grid | None = None
    ternary: torch.Tensor | None = None  # of three levels, five to a byte: `ternary_table`
    books: Codebooks | None = None


# The arguments of the functions below:
#   rows, or k and v: PackedRows; `.value` of its planes and sections, which are constants, is plain Python
#   b, h: sequence and KV head    i: number of a plane
#   j (N): the tokens of a tile, j0: the first, ok (N): which of them are read
#   channel (W): channels of a head, there (W): which exist    query (M): rows of queries, live (M): which exist

@triton.jit
def channels_of(rows, i: tl.constexpr):
    # The channels (W) of plane i, and which of them exist: W is rounded up to a power of two.
    word = tl.arange(0, rows.tile)
    channel = word * rows.step + rows.planes.value[i].channel
    return channel, (word < rows.words) & (channel < rows.width)


@triton.jit
def words_of(rows, b, h, j, ok, TRANSPOSED: tl.constexpr = False):
    # The words of each slice of a row: a tuple of (N, W), or TRANSPOSED (W, N). A slice is cut where a plane ends.
    row = rows.data + b * rows.batch + h * rows.head + j.to(tl.int64)[:, None] * rows.token  # (N, 1)
    word = tl.arange(0, rows.tile)
    slices = ()
    for n in tl.static_range(rows.planes.value[-1].slices[-1] + 1):  # those of the last plane are last
        pointer = row + (word + n * rows.words)[None]  # (N, W)
        mask = ok[:, None] & (word < rows.words)[None]  # (N, W)
        if TRANSPOSED:
            pointer, mask = tl.trans(pointer), tl.trans(mask)
        words = tl.load(pointer, mask, 0)
        if rows.ternary is not None:  # a byte is five digits in base 3: two bits for each
            words = tl.load(rows.ternary + words)
        slices = slices + (words,)
    return slices


@triton.jit
def codes_of_plane(rows, slices, i: tl.constexpr):
    # The codes of plane i as fp16, 2**24 times smaller and 2**low times larger.
    words, code = (), tl.zeros(slices[0].shape, tl.int32)
    for n in tl.static_range(len(rows.sections.value)):
        word = slices[rows.planes.value[i].slices[n]].to(tl.uint16)
        moved = word.to(tl.int32) << 8 >> 8 + rows.planes.value[i].shifts[n]  # to the left if negative
        words, code = words + (word,), code | moved & rows.planes.value[i].masks[n]
    if TWO_AT_ONCE:
        PTX: tl.constexpr = two_words(rows.planes, i)
        return tl.inline_asm_elementwise(PTX[0], PTX[1], words, tl.float16, is_pure=True, pack=2)
    return code.to(tl.uint16).to(tl.float16, bitcast=True)


@triton.constexpr_function
def two_words(planes, i):
    # PTX, a GPU's assembly: shift and mask of two 16-bit words in one 32-bit register. Saves every second mask. And the
    # registers: $0 is the result, $1, $2 .. are the words of each section.
    lines, registers = "", "=r"
    for n, shift in enumerate(planes[i].shifts):  # no tuple within a tuple: Triton 3.7 compiles none
        mask = planes[i].masks[n] * 0x10001
        lines += f"{'shr' if shift >= 0 else 'shl'}.b32 x, ${n + 1}, {abs(shift)}; and.b32 x, x, {mask:#x}; "
        lines += "or.b32 y, y, x; "
        registers += ",r"
    return f"{{ .reg .b32 x, y; mov.b32 y, 0; {lines}mov.b32 $0, y; }}", registers


@triton.jit
def grid_of(grid, b, h, j0, j, ok, column, there):
    # Scales and zero points of the tokens, in some columns of the grid: (N or 1, columns) both.
    offset, mask = (column * grid.channel)[None] + b * grid.batch + h * grid.head, there[None]
    if grid.tokens % j.shape[0] != 0:  # a row of the grid for each token; or one for the tile, which lies in one group
        offset += (j // grid.tokens).to(tl.int64)[:, None] * grid.token
        mask = mask & ok[:, None]
    elif grid.tokens > 0:  # a static grid has only one row
        offset += j0 // grid.tokens * grid.token
    word = tl.load(grid.words + offset, mask, 0)
    scale, zero = word.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32), word.to(tl.int32) >> 16
    if grid.integer:  # scale * (code - zero)
        return scale, -scale * zero.to(tl.float32)
    return scale, zero.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


# ---- 4. Scales and zero points leave the products: that saves a multiplication and an addition a number
# A query q (d), and weights p (N), times rows stored as codes c (N, d) of scales and zero points, never decoded:
#     of each token, s and z (N)      q.(c s + z) = (q.c) s + sum(q) z      sum p (c s + z) = sum (p s) c + sum p z
#     of each channel, s and z (d)    q.(c s + z) = (q s).c + q.z

@triton.jit
def product(a, b, acc, DOT: tl.constexpr):
    # acc + a @ b in fp32, of operands rounded to DOT; "ieee": those in fp32 are not rounded to TF32.
    return tl.dot(a.to(DOT), b.to(DOT), acc, input_precision="ieee")


@triton.jit
def grid_of_tokens(rows, b, h, j0, j, ok):
    # Scales and zero points of the tokens: two tuples, for each group of channels (N or 1, 1).
    scales, zeros = (), ()
    for g in tl.static_range(rows.groups):
        column, there = tl.full((1,), g, tl.int32), tl.full((1,), 1, tl.int1)
        scale, zero = grid_of(rows.grid, b, h, j0, j, ok, column, there)
        scales, zeros = scales + (scale,), zeros + (zero,)
    return scales, zeros


@triton.jit
def keys_of_plane(k, words, b, h, j0, j, ok, i: tl.constexpr):
    # Plane i of the keys, c s + z: c (N, W), and each channel's s and z, (W, 1) both, or one number for all.
    if k.fold == "":
        c, scale, zero = decoded(k, b, h, j0, j, ok, i), 1.0, 0.0
    else:  # codes are 2**low times larger, so s is smaller
        c, scale, zero = codes_of_plane(k, words, i), 0.5 ** k.planes.value[i].low, 1.0
    if k.fold == "channel":
        channel, there = channels_of(k, i)
        s, z = grid_of(k.grid, b, h, j0, j, ok, channel, there)  # (1, W) both
        scale, zero = tl.trans(s) * scale, tl.trans(z)
    return c, scale, zero


@triton.jit
def scores_of(q, k, b, h, j0, j, ok, DOT: tl.constexpr):
    # K q^T (N, M), of codes. q: the queries' planes, (W, M) each.
    PLANES: tl.constexpr = len(k.planes.value) // k.groups
    words, scales, zeros = words_of(k, b, h, j, ok), (1.0,), (1.0,)
    if k.fold == "token":
        scales, zeros = grid_of_tokens(k, b, h, j0, j, ok)
    s = tl.zeros((j.shape[0], q[0].shape[1]), tl.float32)
    for g in tl.static_range(k.groups):
        # (q s).c and q.z over the planes of the group
        by_codes, by_zeros = tl.zeros(s.shape, tl.float32), tl.zeros(q[0].shape, tl.float32)  # (N, M), (W, M)
        for i in tl.static_range(g * PLANES, g * PLANES + PLANES):
            codes, scale, zero = keys_of_plane(k, words, b, h, j0, j, ok, i)
            by_codes = product(codes, q[i] * scale, by_codes, DOT)
            by_zeros += q[i] * zero
        # times the token's scale and zero point: (q.c) s + sum(q) z
        s += by_codes * (scales[g] * TO_INTEGER) + tl.sum(by_zeros, 0)[None] * zeros[g]
    return s


@triton.jit
def scores_of_groups(q, k, b, h, j0, j, begin, stop, DOT: tl.constexpr):
    # The same where the tile's tokens are of two groups, each with its own scales of channels. Saves softmax and values
    # half of their overhead: they take the whole tile at once.
    HALF: tl.constexpr = j.shape[0] // 2
    first = j0 + tl.arange(0, HALF)  # (N / 2)
    second = first + HALF
    a = scores_of(q, k, b, h, j0, first, (first >= begin) & (first < stop), DOT)  # (N / 2, M)
    c = scores_of(q, k, b, h, j0 + HALF, second, (second >= begin) & (second < stop), DOT)
    return tl.reshape(tl.permute(tl.join(a, c), (2, 0, 1)), (j.shape[0], a.shape[1]))


# ---- 5. Attention over a piece of the text

def attend_lines(q, K, V, begin, end, window):
    """One piece of the text: q (B, H, T, d), K and V (B, H, S, d) fp32, tokens begin .. end of S -> the sum of
    2**(score - top) v (B, H, T, d), the largest score `top` (the kernel's is near it), the sum of 2**(score - top)."""
    T, S = q.shape[2], K.shape[2]
    # scores in base 2, (B, H, T, end - begin): the weight is 2**score, which is one instruction
    s = q @ K[:, :, begin:end].transpose(-2, -1) * (LOG2E / math.sqrt(q.shape[-1]))
    # a query sees no later token, and of a sliding window the newest
    position = torch.arange(S - T, S, device=q.device)[:, None]  # (T, 1): of each query
    j = torch.arange(begin, end, device=q.device)[None]  # (1, end - begin)
    s = s.masked_fill((j > position) | (j <= position - window), float("-inf"))
    # weights, not yet divided by their sum; a query that sees nothing here has the top -inf
    top = s.amax(-1)  # (B, H, T)
    p = torch.exp2(s - top.nan_to_num(neginf=0)[..., None])  # (B, H, T, end - begin)
    return p @ V[:, :, begin:end], top, p.sum(-1)


class Kept(NamedTuple):
    """In pieces of codes: which tokens are skipped because they are kept. In the piece of kept rows, which are in any
    order: the position of each."""
    left_out: torch.Tensor | None = None  # (B, 1 or Hkv, S) int8: 1 for a kept token
    position: torch.Tensor | None = None  # (B, 1 or Hkv, n) int32: of the piece's rows
    batch: int = 0  # strides of the one that is there
    head: int = 0


# these grow with the text: specializing on their values would recompile the kernel
@triton.jit(do_not_specialize=["begin", "end", "S", "window"])
def attend_kernel(q, k, v, turn, kept, accs, tops, totals, begin, end, split, T, S, window, factor, HKV: tl.constexpr,
                  R: tl.constexpr, M: tl.constexpr, N: tl.constexpr, DOT: tl.constexpr):
    # One program: M of the T * R query rows of one KV head, and `split` of the tokens begin .. end.
    #   q (B, H, T, d)    k, v: PackedRows    turn: Turn    kept: Kept    factor: log2(e) / sqrt(d)
    #   accs (pieces, B * H * T, d), tops and totals (pieces, B * H * T) fp32: of all pieces
    # All query heads of a KV head together: saves R - 1 of R loads. The text in pieces: saves idle processors.
    tiles = tl.cdiv(T * R, M)
    piece, bh, tile = tl.program_id(1), (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    b, h = bh // HKV, bh % HKV
    # the query rows: each new token's R query heads are neighbours
    row = tile * M + tl.arange(0, M)  # (M)
    t, live = row // R, row < T * R  # (M) both
    position = S - T + t  # (M)
    query = (bh * R + row % R) * T + t  # (M): index among all B * H * T

    # the queries, cut into the planes of the keys
    q_planes = ()
    for i in tl.static_range(len(k.planes.value)):
        channel, there = channels_of(k, i)
        x = tl.load(q + query[None] * k.width + channel[:, None], live[None] & there[:, None], 0)
        x = x.to(tl.float32) * factor  # (W, M)
        if k.fold == "token":
            x = x.to(DOT).to(tl.float32)  # rounded once, for the products and for the sum
        q_planes = q_planes + (x,)
    # sums over the tokens: weights times each plane's codes of the values, and times each group's zero points; weights
    V_PLANES: tl.constexpr = len(v.planes.value) // v.groups
    acc = (tl.zeros((v.tile, M), tl.float32),) * len(v.planes.value)
    acc_zeros = (tl.zeros((M,), tl.float32),) * v.groups
    top, total = tl.full((M,), float("-inf"), tl.float32), tl.zeros((M,), tl.float32)

    # the tokens of this piece, from a multiple of N on, that a query of this tile sees
    start = begin // N * N + piece * split
    stop = tl.minimum(start + split, end)
    if kept.position is None:
        oldest = S - T + tile * M // R - window + 1  # that the first row sees
        newest = S - T + (tile * M + M - 1) // R  # that the last row sees
        start, stop = tl.maximum(start, tl.maximum(oldest, 0) // N * N), tl.minimum(stop, newest + 1)
    for j0 in range(start, stop, N):
        j = j0 + tl.arange(0, N)  # (N)
        ok = (j >= begin) & (j < stop)
        at = j  # (N): their positions
        if kept.position is not None:
            at = tl.load(kept.position + b * kept.batch + h * kept.head + j, ok, 0)
        # 1. scores (N, M), -inf where a query does not see the token. Tokens are rows. Saves empty ones: a tensor core
        # takes 16 rows and 8 columns, and in decoding there are 64 tokens and 4 queries
        if turn.cos is not None:
            s = rotated_scores(q_planes, k, turn, b, h, j0, j, ok, DOT)
        elif k.fold == "":
            s = product(decoded(k, b, h, j0, j, ok, 0), q_planes[0], None, DOT)
        elif k.fold == "channel" and k.grid.tokens > 0 and k.grid.tokens < N:
            s = scores_of_groups(q_planes, k, b, h, j0, j, begin, stop, DOT)
        else:
            s = scores_of(q_planes, k, b, h, j0, j, ok, DOT)
        read = ok  # (N): which of them are read here
        if kept.left_out is not None:
            read = read & (tl.load(kept.left_out + b * kept.batch + h * kept.head + j, ok, 1) == 0)
        seen = read[:, None] & (at[:, None] <= position[None]) & (at[:, None] > position[None] - window)
        s = tl.where(seen, s, float("-inf"))

        # 2. weights 2**(s - top), and their sum; `top` is the largest score so far. If values have scales, it is the
        # largest score + log2(scale): step 3 rounds *scaled* weights to 16 bits, and the largest should be about 1
        size = s
        if v.fold == "token":
            scale, zero = grid_of_tokens(v, b, h, j0, j, ok)
            largest = scale[0]  # (N or 1, 1)
            for g in tl.static_range(1, v.groups):
                largest = tl.maximum(largest, scale[g])
            # log2, at most 0.09 off, from the bits of the number: exponent, then mantissa
            size = s + largest.to(tl.int32, bitcast=True).to(tl.float32) * 0.5 ** 23 - 127
        new_top = tl.maximum(top, tl.max(size, 0))  # (M)
        base = tl.where(new_top == float("-inf"), 0.0, new_top)  # -inf - -inf would be NaN
        p, fade = tl.exp2(s - base[None]), tl.exp2(top - base)  # (N, M), (M)
        top, total = new_top, total * fade + tl.sum(p, 0)

        # 3. the output so far fades, and the weighted values join it, plane by plane
        new_acc, new_zeros = (), ()
        if v.fold == "token":
            words = words_of(v, b, h, j, ok, TRANSPOSED=True)  # (W, N) each
            for g in tl.static_range(v.groups):
                new_zeros = new_zeros + (acc_zeros[g] * fade + tl.sum(p * zero[g], 0),)
                weights = (p * scale[g]).to(DOT)  # (N, M)
                for i in tl.static_range(g * V_PLANES, g * V_PLANES + V_PLANES):
                    codes = codes_of_plane(v, words, i)  # (W, N)
                    new_acc += (product(codes, weights, acc[i] * fade[None], DOT),)
            acc_zeros = new_zeros
        else:
            values = tl.trans(decoded(v, b, h, j0, j, ok, 0))  # (W, N)
            new_acc = (product(values, p, acc[0] * fade[None], DOT),)
        acc = new_acc

    # write the sums of this piece; those over codes get their powers of two and their zero points
    query += piece * (tl.num_programs(0) // tiles * R * T)  # (M): index among those of all pieces
    for i in tl.static_range(len(v.planes.value)):
        channel, there = channels_of(v, i)
        x = acc[i]  # (W, M)
        if v.fold == "token":
            unit = TO_INTEGER * 0.5 ** v.planes.value[i].low
            x = x * unit + acc_zeros[i // V_PLANES][None]
        tl.store(accs + query[None] * v.width + channel[:, None], x, live[None] & there[:, None])
    tl.store(tops + query, top, live)
    tl.store(totals + query, total, live)


# ---- 6. The pieces together

def merge_lines(accs, tops, totals):
    """Pieces of `attend_lines`, (pieces, B, H, T, d) and twice (pieces, B, H, T) -> output, log-sum-exp."""
    # what each piece found, relative to the largest score of all
    top = tops.amax(0)  # (B, H, T)
    fade = torch.exp2(tops - top)  # (pieces, B, H, T)
    total = (totals * fade).sum(0)  # (B, H, T)
    acc = (accs * fade[..., None]).sum(0)  # (B, H, T, d)
    return acc / total[..., None], (top + total.log2()) * LN2


@triton.jit(do_not_specialize=["pieces"])
def merge_kernel(accs, tops, totals, out, lse, pieces, DIM: tl.constexpr, D: tl.constexpr, N: tl.constexpr):
    # One program: one query of one head.
    #   accs, tops, totals: of attend_kernel    out (B, H, T, d), d = DIM
    #   lse (B, H, T) fp32: natural log of the sum of e**score
    query, all_queries, c = tl.program_id(0).to(tl.int64), tl.num_programs(0), tl.arange(0, D)
    # the largest score of all pieces first, N at a time. Saves waiting: no sum depends on the pieces before it
    top = float("-inf")
    for first in range(0, pieces, N):
        i = first + tl.arange(0, N)  # (N)
        top = tl.maximum(top, tl.max(tl.load(tops + i * all_queries + query, i < pieces, float("-inf")), 0))
    # the sums, each piece faded to it
    total, acc = 0.0, tl.zeros((D,), tl.float32)
    for first in range(0, pieces, N):
        i = first + tl.arange(0, N)  # (N)
        index, here = i * all_queries + query, i < pieces  # (N) both
        fade = tl.exp2(tl.load(tops + index, here, float("-inf")) - top)  # (N)
        total += tl.sum(tl.load(totals + index, here, 0) * fade, 0)
        sums = tl.load(accs + index[:, None] * DIM + c[None], here[:, None] & (c < DIM)[None], 0)  # (N, D)
        acc += tl.sum(sums * fade[:, None], 0)
    tl.store(out + query * DIM + c, acc / total, c < DIM)
    tl.store(lse + query, (top + tl.log2(total)) * 0.6931471805599453)  # ln 2


# ---- 7. Keys before RoPE
# RoPE turns a pair of channels (x, y) of a key, by a cosine c and a sine s, to (x c - y s, y c + x s). The key is only
# multiplied; sums and differences are left to the products with a query (qx, qy):
#     q.R(k) = qx.(x c) + qy.(y c) + qy.(x s) - qx.(y s)

class Turn(NamedTuple):
    """RoPE's tables for keys that are stored before it, in two steps: q is turned back by the position of the tile's
    first token, each key forward by its index in the tile. Saves angles: one small table serves all tiles."""
    cos: torch.Tensor | None = None  # of index 0 .. N - 1 in a tile (N, d/2); for codes LIFT times larger
    sin: torch.Tensor | None = None
    tile_cos: torch.Tensor | None = None  # (tiles, d/2), of positions 0, N, 2N, ...
    tile_sin: torch.Tensor | None = None


@triton.jit
def rotated_scores(q, k, turn, b, h, j0, j, ok, DOT: tl.constexpr):
    # Scores (N, M) of codes or decoded numbers. A channel turns with the one d/2 after it: plane i with plane i + HALF.
    HALF: tl.constexpr = len(k.planes.value) // 2
    s = tl.zeros((j.shape[0], q[0].shape[1]), tl.float32)
    by_zeros = tl.zeros(s.shape, tl.float32)  # (N, M): what zero points add
    words = words_of(k, b, h, j, ok) if k.fold == "channel" else ()
    for i in tl.static_range(HALF):
        channel, there = channels_of(k, i)
        # the queries, turned back
        offset = (channel + j0 // j.shape[0] * (k.width // 2))[:, None]  # (W, 1)
        tile_cos = tl.load(turn.tile_cos + offset, there[:, None], 0)
        tile_sin = tl.load(turn.tile_sin + offset, there[:, None], 0)
        qx = q[i] * tile_cos + q[i + HALF] * tile_sin  # (W, M)
        qy = q[i + HALF] * tile_cos - q[i] * tile_sin  # (W, M)
        # cos and sin of a key's index in the tile
        offset = (j - j0)[:, None] * (k.width // 2) + channel[None]  # (N, W)
        cos = tl.load(turn.cos + offset, there[None], 0)
        sin = tl.load(turn.sin + offset, there[None], 0)
        # the keys: codes, whose scales and zero points go to the queries, or decoded numbers
        x, x_scale, x_zero = keys_of_plane(k, words, b, h, j0, j, ok, i)
        y, y_scale, y_zero = keys_of_plane(k, words, b, h, j0, j, ok, i + HALF)
        x, y = x.to(DOT), y.to(DOT)  # (N, W) both
        # the four products
        s = product(x * cos, qx * x_scale, s, DOT)
        s = product(y * cos, qy * y_scale, s, DOT)
        s = product(x * sin, qy * x_scale, s, DOT)
        s = product(y * sin, -qx * y_scale, s, DOT)
        # and of the zero points, which are the same for all keys
        if k.fold == "channel":
            by_zeros = product(cos, qx * x_zero + qy * y_zero, by_zeros, DOT)
            by_zeros = product(sin, qy * x_zero - qx * y_zero, by_zeros, DOT)
    if k.fold == "channel":
        s = s * (TO_INTEGER / LIFT) + by_zeros / LIFT
    return s


# ---- 8. AnTKV's anchor scores

@triton.jit(do_not_specialize=["T", "seen", "n", "window"])
def anchor_kernel(q, norm, lse, k, positions, of_k, of_v, T, seen, n, window, factor, R: tl.constexpr,
                  DIM: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, DOT: tl.constexpr):
    # `equation_5` of tinykv/methods/antkv.py. One program: N keys of one KV head, and all queries that see them.
    #   q (B, H, T, d), d = DIM    norm |q|, lse (B, H, T) fp32    seen: position of the first query
    #   k (B, Hkv, n, d), rotated    positions (B, Hkv, n) int32: theirs, in any order
    #   of_k, of_v (B, Hkv, n) fp32    factor: log2(e) / sqrt(d)
    tiles = tl.cdiv(n, N)
    bh, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    j, c = tile * N + tl.arange(0, N), tl.arange(0, D)  # (N), (D)
    keys = tl.load(k + (bh * n + j)[:, None] * DIM + c[None], (j < n)[:, None] & (c < DIM)[None], 0)  # (N, D)
    at = tl.load(positions + bh * n + tl.minimum(j, n - 1))  # (N)
    sum_k, sum_v = tl.zeros((N,), tl.float32), tl.zeros((N,), tl.float32)
    # the query rows that see any of these keys; as in attend_kernel, R of them for each new token
    first = tl.maximum(tl.min(at, 0) - seen, 0) * R // M * M
    last = tl.minimum(tl.max(at, 0) - seen + window, T) * R
    for row0 in range(first, last, M):
        row = row0 + tl.arange(0, M)  # (M)
        t, live = row // R, row < T * R  # (M) both
        query = (bh * R + row % R) * T + t  # (M): index among all B * H * T
        # scores
        queries = tl.load(q + query[:, None] * DIM + c[None], live[:, None] & (c < DIM)[None], 0)  # (M, D)
        s = product(queries, tl.trans(keys), None, DOT) * factor  # (M, N)
        position = seen + t  # (M)
        sees = live[:, None] & (at[None] <= position[:, None]) & (at[None] > position[:, None] - window)
        # the attention weights, from each query's log-sum-exp; log2(e) turns that to base 2
        s -= tl.load(lse + query, live, 0)[:, None] * 1.4426950408889634
        A = tl.exp2(tl.where(sees, s, float("-inf")))  # (M, N)
        # the sums of Eq. 5
        sum_v += tl.sum(A, 0)
        sum_k += tl.sum(tl.load(norm + query, live, 0)[:, None] * A * (1 - A), 0)
    tl.store(of_k + bh * n + j, sum_k, j < n)
    tl.store(of_v + bh * n + j, sum_v, j < n)


# ---- 9. Numbers decoded one by one: 16-bit rows, codebooks, and groups too small for sections 3 and 4
# Only codebooks reach decode_codebook and Codebooks, only they and single numbers code_at, and only three levels the
# tables named ternary. On a GPU torch.compile makes loops of these, too (compiled_cache.py); which of the two is faster
# there has not been measured.

@triton.jit
def decoded(rows, b, h, j0, j, ok, i: tl.constexpr):
    # The numbers (N, W) of the tokens j; of plane i, which is a head, or half of one: fp32, or 16 bits of centroids.
    channel, there = channels_of(rows, i)
    if rows.books is not None:
        return decode_codebook(rows, b, h, j, ok, i)
    elif rows.grid is not None:
        code = code_at(rows, b, h, j, ok, channel, there)  # (N, W)
        scale, zero = grid_of(rows.grid, b, h, j0, j, ok, channel // rows.grid.channels, there)  # (N or 1, W) both
        return code.to(tl.float32) * scale + zero
    else:  # 16 bits
        row = rows.data + b * rows.batch + h * rows.head + (j - rows.start).to(tl.int64)[:, None] * rows.token
        return tl.load(row + channel[None], ok[:, None] & there[None], 0).to(tl.float32)


@triton.jit
def decode_codebook(rows, b, h, j, ok, i: tl.constexpr):
    # The code of n channels is the index of their centroid; a load takes SIDE of these channels.
    SIDE: tl.constexpr = rows.books.side
    unit = tl.arange(0, rows.tile // SIDE) * SIDE  # (W / SIDE): the first channel of each load
    there = unit < rows.words  # (W / SIDE)
    channel = unit + rows.planes.value[i].channel + h * rows.width  # (W / SIDE)
    # the centroid's index, in the book of its vector or in the only one
    n, index = rows.books.n, channel // rows.books.n  # (W / SIDE): of the vector in the row of all heads
    centroid = code_at(rows, b, h, j, ok, index, there) + index[None] * rows.books.m  # (N, W / SIDE)
    first = centroid * n + (channel % n)[None]  # (N, W / SIDE)
    offset = first[:, :, None] + tl.arange(0, SIDE)[None, None]  # (N, W / SIDE, SIDE)
    if rows.tile != rows.words:  # a head of 80 channels is padded to 128, which have no centroids
        x = tl.load(rows.books.centroids + offset, there[None, :, None], 0)
    else:  # tokens after the end have the code 0, and no weight. Saves a zero for each number
        x = tl.load(rows.books.centroids + offset)
    return tl.reshape(x, (j.shape[0], rows.tile))


@triton.jit
def code_at(rows, b, h, j, ok, index, there):
    # The codes (N, W) at `index` (W) in their rows, each loaded by itself; equals `unpack`.
    row = rows.data + b * rows.batch + h * rows.head + j.to(tl.int64)[:, None] * rows.token  # (N, 1)
    mask, index = ok[:, None] & there[None], index[None]
    code = tl.zeros(mask.shape, tl.int32)  # (N, W)
    for n in tl.static_range(len(rows.sections.value)):
        SIZE: tl.constexpr = rows.sections.value[n].size
        BITS: tl.constexpr = rows.sections.value[n].bits
        # the lowest codes of all bytes come first, then the next ones
        word = tl.load(row + rows.sections.value[n].first + index % SIZE, mask, 0)
        if rows.ternary is not None:
            word = tl.load(rows.ternary + word)
        code |= ((word.to(tl.int32) >> index // SIZE * BITS) & (2 ** BITS - 1)) << rows.sections.value[n].low
    return code
