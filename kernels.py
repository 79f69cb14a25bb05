"""The Triton kernels: attention that reads the packed cache, and the scores of KVSink and AnTKV.

From easy to hard, each kernel under the torch lines that it equals:

    1. topk_kernel     the k largest |h| of one channel, KVSink's scores; a first Triton kernel
    2. tiny            a code is a number: from packed bytes to fp16
    3. scores_by_...   scales and zero points leave the products
    4. attend_kernel   attention of new queries to a piece of the text
    5. decode_...      keys before RoPE, and codecs whose numbers have to be decoded one by one
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
INTERPRETED = triton.knobs.runtime.interpret  # TRITON_INTERPRET=1: on the CPU, line by line
PAIRS = tl.constexpr(not INTERPRETED)  # a GPU unpacks codes two at a time


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


class Plane(NamedTuple):
    """The codes that one mask leaves of all words of a slice of a row.

    A byte of 2-bit codes holds the channels i, i + d/4, i + d/2 and i + 3d/4, so its four planes
    are four quarters of the head. The row is never put together again: q and the output are cut
    into planes, too.
    """
    channel: int  # the first
    slice: int  # a row is one slice of words, or several, where a plane would have two scales
    # An integer below 2**10 is subnormal in fp16. So codes in the ten low bits of a word stay where
    # they are, as numbers that are 2**low times larger; one shift brings the next ten there.
    shift: int
    low: int


# What many functions take. rows, or k and v: PackedRows, see triton_cache.py. b, h: sequence and KV
# head. j0: the first token of the tile, j (N): its tokens, ok (N): which of these are read. i: a
# plane; its word n holds the channel of_plane(rows.planes, i, "channel") + n * step.


@triton.constexpr_function
def count(planes):
    return len(planes)


@triton.constexpr_function
def of_plane(planes, i, field):
    return getattr(planes[i], field)


@triton.jit
def channels_of(rows, i: tl.constexpr):
    # The channels (W) of plane i, and which of them there are.
    word = tl.arange(0, rows.tile)
    channel = word * rows.step + of_plane(rows.planes, i, "channel")
    return channel, (word < rows.words) & (channel < rows.width)


@triton.jit
def row_of(rows, b, h, j):
    # Pointers to the tokens' rows: (N, 1).
    token = (j - rows.start).to(tl.int64)
    return rows.data + b * rows.batch + h * rows.head + token[:, None] * rows.token


@triton.jit
def words_of(rows, b, h, j, ok, TURNED: tl.constexpr = False):
    # The words of each slice, (N, W), or TURNED (W, N).
    first = tl.arange(0, rows.tile)  # (W): the words of the first slice
    slices = ()
    for n in tl.static_range(of_plane(rows.planes, -1, "slice") + 1):  # up to the last plane's
        word = row_of(rows, b, h, j) + ((first + n * rows.words) * rows.size)[None]  # (N, W)
        live = ok[:, None] & (first < rows.words)[None]
        if TURNED:
            word, live = tl.trans(word), tl.trans(live)
        words = tl.load(word, live, 0)
        if rows.size == 3:  # 3 bits: eight codes fill three bytes
            middle, high = tl.load(word + 1, live, 0), tl.load(word + 2, live, 0)
            words = words.to(tl.int32) | middle.to(tl.int32) << 8 | high.to(tl.int32) << 16
        if rows.ternary is not None:  # five codes in base 3: the table has two bits of each
            words = tl.load(rows.ternary + words)
        slices = slices + (words,)
    return slices


@triton.constexpr_function
def pair_of_codes(bits, planes, i):
    # PTX: the codes of a plane in two 16-bit words at once. The compiler takes two for each.
    mask = ((2 ** bits - 1) << planes[i].low) * 0x10001
    return f"{{ .reg .b32 x; shr.b32 x, $1, {planes[i].shift}; and.b32 $0, x, {mask:#x}; }}"


@triton.jit
def tiny(rows, slices, i: tl.constexpr):
    # The codes of plane i as fp16, TINY times smaller and 2**low larger: `number_lines`.
    words = slices[of_plane(rows.planes, i, "slice")]
    if PAIRS and rows.size == 1:
        PTX: tl.constexpr = pair_of_codes(rows.bits, rows.planes, i)
        return tl.inline_asm_elementwise(PTX, "=r,r", [words.to(tl.uint16)], dtype=tl.float16,
                                         is_pure=True, pack=2)
    mask: tl.constexpr = (2 ** rows.bits - 1) << of_plane(rows.planes, i, "low")
    code = words >> of_plane(rows.planes, i, "shift") & mask
    return code.to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def grid_of(grid, b, h, j0, j, ok, column, there):
    # Scales and zero points of the tokens, in some columns of the grid: (N or 1, columns) both.
    at = (column * grid.channel)[None] + b * grid.batch + h * grid.head
    mask = there[None]
    if grid.tokens % j.shape[0] != 0:
        at += (j // grid.tokens).to(tl.int64)[:, None] * grid.token
        mask = mask & ok[:, None]
    elif grid.tokens > 0:  # a tile begins at a multiple of N, so it lies in one group
        at += j0 // grid.tokens * grid.token
    scale, zero = tl.load(grid.scale + at, mask, 1), tl.load(grid.zero + at, mask, 0)
    if grid.form == "fp8":
        return fp8_number(scale), fp8_number(zero)
    scale, zero = scale.to(tl.float32), zero.to(tl.float32)
    if grid.form == "integer":
        zero = -scale * zero
    return scale, zero


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
def grid_of_tokens(rows, b, h, j0, j, ok):
    # Scales and zero points of the tokens: of each group of channels (N or 1, 1) both.
    scales, zeros = (), ()
    for g in tl.static_range(rows.groups):
        column, there = tl.full((1,), g, tl.int32), tl.full((1,), 1, tl.int1)
        scale, zero = grid_of(rows.grid, b, h, j0, j, ok, column, there)
        scales, zeros = scales + (scale,), zeros + (zero,)
    return scales, zeros


@triton.jit
def scores_by_token(q, q_sum, k, b, h, j0, j, ok, DOT: tl.constexpr):
    # The first line, transposed: K q^T (N, M). q: (W, M) of each plane, q_sum: (M) of each group
    PLANES: tl.constexpr = count(k.planes) // k.groups
    words = words_of(k, b, h, j, ok)
    scale, zero = grid_of_tokens(k, b, h, j0, j, ok)
    s = tl.full((j.shape[0], q[0].shape[1]), 0.0, tl.float32)
    for g in tl.static_range(k.groups):
        part = tl.full(s.shape, 0.0, tl.float32)
        for i in tl.static_range(g * PLANES, g * PLANES + PLANES):
            x = q[i] * 0.5 ** of_plane(k.planes, i, "low")  # (W, M): `tiny` is so much larger
            part = tl.dot(tiny(k, words, i).to(DOT), x.to(DOT), part, input_precision="ieee")
        s += part * (scale[g] * TINY) + q_sum[g][None] * zero[g]
    return s


@triton.jit
def scores_by_channel(q, k, b, h, j0, j, ok, DOT: tl.constexpr):
    # The second line, transposed.
    words = words_of(k, b, h, j, ok)
    s = tl.full((j.shape[0], q[0].shape[1]), 0.0, tl.float32)
    offset = tl.full(q[0].shape, 0.0, tl.float32)  # (W, M)
    for i in tl.static_range(count(k.planes)):
        channel, there = channels_of(k, i)
        scale, zero = grid_of(k.grid, b, h, j0, j, ok, channel, there)  # (1, W)
        offset += q[i] * tl.trans(zero)
        x = q[i] * tl.trans(scale) * 0.5 ** of_plane(k.planes, i, "low")
        s = tl.dot(tiny(k, words, i).to(DOT), x.to(DOT), s, input_precision="ieee")
    return s * TINY + tl.sum(offset, 0)[None]


# ---- 4. Attention over a piece of the text

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
def attend_kernel(q, k, v, turn, k_pins, v_pins, acc, top, total, q_batch, q_head, q_token, begin,
                  end, split, queries, length, window, tiles, lines, factor, H: tl.constexpr,
                  R: tl.constexpr, M: tl.constexpr, N: tl.constexpr, DOT: tl.constexpr):
    # One program: `split` of the tokens begin .. end, one KV head, M of the T * R query rows that
    # share it. It reads the packed rows of these tokens once, and writes d + 2 numbers a row.
    #   q (B, H, T, d)    k, v: PackedRows    turn, k_pins, v_pins: sections 5 and 6
    #   acc (pieces, B * H * T, d), top and total (pieces, B * H * T) fp32
    piece, bh = tl.program_id(1), (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    b, h = bh // (H // R), bh % (H // R)
    row = tile * M + tl.arange(0, M)  # (M)
    t, live = row // R, row < queries * R
    at = length - queries + t  # (M): positions
    head = h * R + row % R  # (M)
    line = (b * H + head) * queries + t  # (M)

    # the queries, cut into the planes of the keys; and their sums over the channels of each group
    K_PLANES: tl.constexpr = count(k.planes) // k.groups
    parts, q_sum = (), ()
    for g in tl.static_range(k.groups):
        group_sum = tl.full((M,), 0.0, tl.float32)
        for i in tl.static_range(g * K_PLANES, g * K_PLANES + K_PLANES):
            channel, there = channels_of(k, i)
            at_q = b * q_batch + (head * q_head + t * q_token)[None] + channel[:, None]  # (W, M)
            x = tl.load(q + at_q, live[None] & there[:, None], 0).to(tl.float32) * factor
            if k.fold == "token":
                x = x.to(DOT).to(tl.float32)  # rounded once, for the products and for the sum
            parts = parts + (x,)
            group_sum += tl.sum(x, 0)
        q_sum = q_sum + (group_sum,)
    # what is summed up over the tokens: of each plane of the values, and of each row
    V_PLANES: tl.constexpr = count(v.planes) // v.groups
    out, zeros = (), ()
    for _ in tl.static_range(count(v.planes)):
        out = out + (tl.full((v.tile, M), 0.0, tl.float32),)
    for _ in tl.static_range(v.groups):
        zeros = zeros + (tl.full((M,), 0.0, tl.float32),)
    m, norm = tl.full((M,), float("-inf"), tl.float32), tl.full((M,), 0.0, tl.float32)

    # the tokens of this piece that a query of this tile sees; tiles begin at multiples of N
    low = begin // N * N + piece * split
    high = tl.minimum(tl.minimum(low + split, end), length - queries + (tile * M + M - 1) // R + 1)
    oldest = length - queries + tile * M // R - window + 1  # what the first row still sees
    low = tl.maximum(low, tl.maximum(oldest, 0) // N * N)
    for j0 in range(low, high, N):
        j = j0 + tl.arange(0, N)  # (N)
        ok = (j >= begin) & (j < high)
        # 1. scores (N, M)
        if turn.cos is not None:
            s = rotated_scores(parts, k, turn, b, h, j0, j, ok, DOT)
        elif k.fold == "token":
            s = scores_by_token(parts, q_sum, k, b, h, j0, j, ok, DOT)
        elif k.fold == "channel":
            s = scores_by_channel(parts, k, b, h, j0, j, ok, DOT)
        else:
            keys = decoded(k, b, h, j0, j, ok, 0).to(DOT)  # (N, W)
            s = tl.dot(keys, parts[0].to(DOT), input_precision="ieee")
        if k_pins.slot is not None:
            s = scores_of_pins(k_pins, s, b, h, j, ok, line, live)
        seen = ok[:, None] & (j[:, None] <= at[None]) & (j[:, None] > at[None] - window)
        s = tl.where(seen, s, float("-inf"))

        # 2. weights, and their sum. `base` is what the largest score was so far. Where each value
        # has a scale, it is the largest score + log2(scale): the *scaled* weights are rounded to 16
        # bits, and the largest of these has to be 1
        size = s
        if v.fold == "token":
            scale, zero = grid_of_tokens(v, b, h, j0, j, ok)
            largest = scale[0]  # (N or 1, 1)
            for g in tl.static_range(1, v.groups):
                largest = tl.maximum(largest, scale[g])
            size = s + rough_log2(largest)
        new = tl.maximum(m, tl.max(size, 0))  # (M)
        base = tl.where(new == float("-inf"), 0.0, new)
        p, fade = tl.exp2(s - base[None]), tl.exp2(m - base)  # (N, M), (M)
        m, norm = new, norm * fade + tl.sum(p, 0)
        if v_pins.slot is not None:
            p = without_pins(v_pins, s, p, b, h, j, ok, line, live)

        # 3. the output so far fades, and the weighted values join it, plane by plane
        new_out, new_zeros = (), ()
        if v.fold == "token":  # the third line of `fold_lines`
            words = words_of(v, b, h, j, ok, TURNED=True)  # (W, N) each
            for g in tl.static_range(v.groups):
                new_zeros = new_zeros + (zeros[g] * fade + tl.sum(p * zero[g], 0),)
                weights = (p * scale[g]).to(DOT)
                for i in tl.static_range(g * V_PLANES, g * V_PLANES + V_PLANES):
                    values, faded = tiny(v, words, i).to(DOT), out[i] * fade[None]  # (W, N), (W, M)
                    new_out += (tl.dot(values, weights, faded, input_precision="ieee"),)
            zeros = new_zeros
        else:
            values, faded = tl.trans(decoded(v, b, h, j0, j, ok, 0)).to(DOT), out[0] * fade[None]
            new_out = (tl.dot(values, p.to(DOT), faded, input_precision="ieee"),)
        out = new_out

    line = piece * lines + line  # (M)
    for i in tl.static_range(count(v.planes)):
        channel, there = channels_of(v, i)
        x = out[i]
        if v.fold == "token":
            x = x * (TINY * 0.5 ** of_plane(v.planes, i, "low")) + zeros[i // V_PLANES][None]
        tl.store(acc + line[None] * v.width + channel[:, None], x, live[None] & there[:, None])
    tl.store(top + line, m, live)
    tl.store(total + line, norm, live)


@triton.jit
def rough_log2(x):
    # log2 of a positive number, up to 0.09: its bits are its exponent, then its digits.
    return x.to(tl.int32, bitcast=True).to(tl.float32) * 0.5 ** 23 - 127


# ---- 5. Keys before RoPE, and numbers that have to be decoded

def rotated_lines(q, k, cos, sin):
    """Scores q.R(k), (M, N), of queries q (M, d) and keys k (N, d) before RoPE; cos, sin (N, d/2).

    R(k) is (x cos - y sin, y cos + x sin). Nothing but products of a key with cos and with sin has
    to be computed for each key: the sums are those of the products with q.
    """
    low, high = q.chunk(2, dim=-1)  # (M, d/2) both
    x, y = k.chunk(2, dim=-1)  # (N, d/2) both
    by_cos = low @ (x * cos).T + high @ (y * cos).T
    by_sin = high @ (x * sin).T - low @ (y * sin).T
    return by_cos + by_sin


# What cos and sin are multiplied by where they meet codes: the product is no subnormal number.
LIFT = tl.constexpr(2.0 ** 15)


@triton.jit
def rotated_scores(q, k, turn, b, h, j0, j, ok, DOT: tl.constexpr):
    # The same transposed, (N, M), of codes or of decoded numbers. Channel c turns with c + d/2, and
    # plane i with plane i + HALF. RoPE goes in two steps: q turns back by the position of the first
    # token of the tile, a key forward by its place in the tile: one small table serves all tiles.
    HALF: tl.constexpr = count(k.planes) // 2
    s = tl.full((j.shape[0], q[0].shape[1]), 0.0, tl.float32)
    offset = tl.full((j.shape[0], q[0].shape[1]), 0.0, tl.float32)
    words = ()
    if k.fold == "channel":
        words = words_of(k, b, h, j, ok)
    for i in tl.static_range(HALF):
        channel, there = channels_of(k, i)
        first = (channel + j0 // j.shape[0] * (k.width // 2))[:, None]  # (W, 1)
        c = tl.load(turn.tile_cos + first, there[:, None], 0)
        z = tl.load(turn.tile_sin + first, there[:, None], 0)
        low = q[i] * c + q[i + HALF] * z  # (W, M)
        high = q[i + HALF] * c - q[i] * z
        place = (j - j0)[:, None] * (k.width // 2) + channel[None]  # (N, W)
        cos = tl.load(turn.cos + place, there[None], 0)
        sin = tl.load(turn.sin + place, there[None], 0)
        if k.fold == "channel":  # the second line of `fold_lines`
            x, y = tiny(k, words, i).to(DOT), tiny(k, words, i + HALF).to(DOT)
            X, X0 = grid_of(k.grid, b, h, j0, j, ok, channel, there)  # (1, W)
            Y, Y0 = grid_of(k.grid, b, h, j0, j, ok, channel + k.width // 2, there)
            by_cos = low * tl.trans(X0) + high * tl.trans(Y0)  # (W, M)
            by_sin = high * tl.trans(X0) - low * tl.trans(Y0)
            offset = tl.dot(cos, by_cos.to(DOT), offset, input_precision="ieee")
            offset = tl.dot(sin, by_sin.to(DOT), offset, input_precision="ieee")
            X = tl.trans(X) * 0.5 ** of_plane(k.planes, i, "low")  # (W, 1)
            Y = tl.trans(Y) * 0.5 ** of_plane(k.planes, i + HALF, "low")
        else:
            x = decoded(k, b, h, j0, j, ok, i).to(DOT)
            y = decoded(k, b, h, j0, j, ok, i + HALF).to(DOT)
            X, Y = 1.0, 1.0
        s = tl.dot(x * cos, (low * X).to(DOT), s, input_precision="ieee")
        s = tl.dot(y * cos, (high * Y).to(DOT), s, input_precision="ieee")
        s = tl.dot(x * sin, (high * X).to(DOT), s, input_precision="ieee")
        s = tl.dot(y * sin, (-low * Y).to(DOT), s, input_precision="ieee")
    if k.fold == "channel":
        s = s * (TINY / LIFT) + offset / LIFT
    return s


@triton.jit
def decoded(rows, b, h, j0, j, ok, i: tl.constexpr):
    # The numbers (N, W) fp32 of the tokens j, and of the channels of a head, or of its half i.
    channel, there = channels_of(rows, i)
    if rows.codec == "Exact":
        number = row_of(rows, b, h, j) + channel[None]  # (N, W) pointers
        x = tl.load(number, ok[:, None] & there[None], 0).to(tl.float32)
    elif rows.codec == "Affine":
        x = decode_affine(rows, b, h, j0, j, ok, channel, there)
    elif rows.codec == "NonUniform":
        x = decode_nonuniform(rows, b, h, j0, j, ok, channel, there)
    elif rows.codec == "ClippedGroups":
        x = decode_clipped(rows, b, h, j0, j, ok, channel, there)
    else:
        x = decode_codebook(rows, b, h, j, ok, i)
    return x


@triton.jit
def decode_affine(rows, b, h, j0, j, ok, channel, there):
    # code * scale + zero
    code = code_at(rows, b, h, j, ok, channel[None], there[None])
    scale, zero = grid_of(rows.grid, b, h, j0, j, ok, channel // rows.grid.channels, there)
    return code.to(tl.float32) * scale + zero


@triton.jit
def decode_nonuniform(rows, b, h, j0, j, ok, channel, there):
    # levels[code] * half + mid; then the token's outliers, one after the other, take their places
    code = code_at(rows, b, h, j, ok, (channel + h * rows.width)[None], there[None])
    level = tl.load(rows.tables.levels + code).to(tl.float32)  # (N, W)
    half_range, mid = grid_of(rows.grid, b, h, j0, j, ok, channel // rows.grid.channels, there)
    x = level * half_range + mid
    sparse = rows.tables
    if sparse.row_end is not None:
        row = j * sparse.sequences + b  # (N)
        stop = tl.load(sparse.row_end + row, ok, 0)  # (N)
        start = tl.load(sparse.row_end + row - 1, ok & (row > 0), 0)  # (N)
        for i in range(0, tl.max(stop - start, 0)):
            here = start + i < stop  # (N)
            column = tl.load(sparse.columns + start + i, here, -1) - h * rows.width  # (N)
            value = tl.load(sparse.numbers + start + i, here, 0).to(tl.float32)  # (N)
            x = tl.where((column[:, None] == channel[None]) & there[None], value[:, None], x)
    return x


@triton.jit
def decode_clipped(rows, b, h, j0, j, ok, channel, there):
    # a channel's code lies at `place` in the row of all heads, in the group of that place
    place = tl.load(rows.tables.place + h * rows.width + channel, there, 0)  # (W)
    group = tl.load(rows.tables.group + place, there, 0)  # (W)
    code = code_at(rows, b, h, j, ok, place[None], there[None])  # (N, W)
    scale, zero = grid_of(rows.grid, b, h, j0, j, ok, group, there)  # (N, W)
    return code.to(tl.float32) * scale + zero


@triton.jit
def decode_codebook(rows, b, h, j, ok, i: tl.constexpr):
    # a code is the number of a centroid of n channels; SIDE of these are loaded at once
    SIDE: tl.constexpr = rows.tables.side
    unit = tl.arange(0, rows.tile // SIDE) * SIDE  # (W / SIDE): the first channel of each
    there = ok[:, None] & (unit < rows.words)[None]  # (N, W / SIDE)
    channel = unit + of_plane(rows.planes, i, "channel") + h * rows.width  # (W / SIDE)
    place = channel // rows.tables.n  # (W / SIDE): of the vector in the row of all heads
    centroid = code_at(rows, b, h, j, ok, place[None], there)  # (N, W / SIDE)
    if not rows.tables.shared:
        centroid += place[None] * rows.tables.m
    at = centroid * rows.tables.n + (channel % rows.tables.n)[None]
    at = at[:, :, None] + tl.arange(0, SIDE)[None, None]  # (N, W / SIDE, SIDE)
    x = tl.load(rows.tables.centroids + at, there[:, :, None], 0).to(tl.float32)
    return tl.reshape(x, (j.shape[0], rows.tile))


@triton.jit
def code_at(rows, b, h, j, ok, place, there):
    # The codes at `place` in their rows, each loaded alone: (N, W) int32.
    row, live = row_of(rows, b, h, j), ok[:, None] & there
    if rows.bits == 3 or rows.bits > 8:  # one after the other: a code may go on in the next bytes
        bit = place * rows.bits
        word = tl.load(row + bit // 8, live, 0).to(tl.int32)
        for i in tl.static_range(1, (rows.bits + 14) // 8):
            reaches = live & (8 * i < bit % 8 + rows.bits)
            word |= tl.load(row + bit // 8 + i, reaches, 0).to(tl.int32) << 8 * i
        return word >> bit % 8 & 2 ** rows.bits - 1
    byte = tl.load(row + place % rows.row, live, 0)
    if rows.ternary is not None:
        byte = tl.load(rows.ternary + byte)
    return byte.to(tl.int32) >> place // rows.row * rows.bits & 2 ** rows.bits - 1


# ---- 6. The pieces together, and the pinned values

@triton.jit
def scores_of_pins(pins, s, b, h, j, ok, line, live):
    # Scores s (N, M), with those of pinned keys in their slots.
    slot = tl.load(pins.slot + b * pins.batch + h * pins.head + j, ok, -1)[:, None]  # (N, 1)
    known = tl.load(pins.score + line[None] * pins.n + slot, live[None] & (slot >= 0), 0)  # (N, M)
    return tl.where(slot >= 0, known, s)


@triton.jit
def without_pins(pins, s, p, b, h, j, ok, line, live):
    # Weights p (N, M), 0 where the value is pinned. Its score is written for `merge_kernel`.
    slot = tl.load(pins.slot + b * pins.batch + h * pins.head + j, ok, -1)[:, None]  # (N, 1)
    tl.store(pins.score + line[None] * pins.n + slot, s, live[None] & (slot >= 0))
    return tl.where(slot >= 0, 0.0, p)


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
                 pinned_batch, pinned_head, pinned_row, H: tl.constexpr, R: tl.constexpr,
                 DIM: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    # One program: M queries of one head. Bytes: what the pieces wrote, and the pinned values.
    #   acc, top, total: of attend_kernel    pinned (B, Hkv, n, d)    out (B, H, T, d)
    #   score (B * H * T, n) fp32: of the pinned values' slots, or -inf
    #   lse (B, H, T) fp32: natural log of the sum of e**score
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
            at, known = (line * n)[:, None] + slot[None], live[:, None] & there[None]  # (M, N) both
            p = tl.load(score + at, known, float("-inf"))
            at, known = slot[:, None] * pinned_row + c[None], there[:, None] & (c < DIM)[None]
            rows = tl.load(row + at, known, 0)  # (N, D)
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
                  tiles, factor, H: tl.constexpr, R: tl.constexpr, DIM: tl.constexpr,
                  D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, DOT: tl.constexpr):
    # One program: N keys of one KV head, and all queries that see them: no other program adds to
    # their sums. Bytes: the keys once, the queries once a block of keys; two numbers a key written.
    # Products: half those of the attention.
    #   q (B, H, T, d)    norm, lse (B, H, T) fp32    k (B, Hkv, S, d), rotated
    #   of_k, of_v (B, Hkv, S) fp32
    bh, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    b, h = bh // (H // R), bh % (H // R)
    j = tile * N + tl.arange(0, N)  # (N)
    c = tl.arange(0, D)
    place = b * k_batch + h * k_head + j.to(tl.int64)[:, None] * k_token + c[None]  # (N, D)
    x = tl.load(k + place, (j < keys)[:, None] & (c < DIM)[None], 0)  # (N, D)
    x = tl.trans(x.to(tl.float32)).to(DOT)  # (D, N)
    sum_k, sum_v = tl.full((N,), 0.0, tl.float32), tl.full((N,), 0.0, tl.float32)
    # the rows of queries, of all query heads, that see any of these keys
    first = tl.maximum(tile * N - (keys - queries), 0) * R // M * M
    last = tl.minimum(tile * N + N - 1 - (keys - queries) + window, queries) * R
    for row0 in range(first, last, M):
        row = row0 + tl.arange(0, M)  # (M)
        t, live = row // R, row < queries * R
        line = (b * H + h * R + row % R) * queries + t  # (M)
        mask = live[:, None] & (c < DIM)[None]
        rows = tl.load(q + line[:, None] * DIM + c[None], mask, 0)  # (M, D)
        s = tl.dot((rows.to(tl.float32) * factor).to(DOT), x, input_precision="ieee")  # (M, N)
        at = keys - queries + t  # (M): positions
        seen = live[:, None] & (j[None] <= at[:, None]) & (j[None] > at[:, None] - window)
        # the attention weights, from each query's log-sum-exp; log2(e) turns that to base 2
        s -= tl.load(lse + line, live, 0)[:, None] * 1.4426950408889634
        A = tl.exp2(tl.where(seen, s, float("-inf")))  # (M, N)
        sum_v += tl.sum(A, 0)
        sum_k += tl.sum(tl.load(norm + line, live, 0)[:, None] * A * (1 - A), 0)
    tl.store(of_k + bh * keys + j, sum_k, j < keys)
    tl.store(of_v + bh * keys + j, sum_v, j < keys)
