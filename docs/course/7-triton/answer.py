"""Assignment 7: Triton. The top-k of a channel, and products of queries with 2-bit keys.

Kernels run in Triton's interpreter, on a CPU: no GPU is needed.

Shapes: B sequences, T tokens, D channels of a hidden state, H query heads, Hkv KV heads, d channels
of a head. N tokens belong to one program, and programs along the tokens are called pieces. N is a
power of 2, d a multiple of 4. An argument that is named like a tensor is a pointer to its first number.
"""
import os

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402

ASSIGNMENT = "triton"


# Task 1: top-k of a channel

@triton.jit
def topk_kernel(h, score, position, tokens, sequence, token, K: tl.constexpr, N: tl.constexpr):
    """Program (piece, b) finds the K largest |h| among tokens piece * N .. piece * N + N - 1 of
    sequence b.

    h: the channel in question, of token 0 of sequence 0. From there the next token is `token`
    numbers away, and the next sequence `sequence` numbers. tokens: T.
    score (B, pieces, K) fp32 and position (B, pieces, K) int32: what to write, the largest first;
    of equal ones, the earlier token first. A position is counted from the start of the sequence. If
    a piece has fewer than K tokens, the scores that are left are negative, their positions
    anything.
    """
    # answer
    piece, b = tl.program_id(0), tl.program_id(1)
    first = piece * N
    t = first + tl.arange(0, N)
    real = t < tokens
    x = tl.load(h + b * sequence + t * token, mask=real, other=0.0)
    x = tl.where(real, tl.abs(x), -1.0)
    row = (b * tl.num_programs(0) + piece) * K
    for i in range(K):
        at = tl.argmax(x, axis=0, tie_break_left=True)
        tl.store(score + row + i, tl.max(x, axis=0))
        tl.store(position + row + i, first + at)
        x = tl.where(tl.arange(0, N) == at, -2.0, x)


def topk_outliers(hidden, channel, k, N=16):  # given
    """hidden (B, T, D) -> the k largest |h| of a channel and their positions, (B, k) both."""
    B, T, _ = hidden.shape
    pieces = triton.cdiv(T, N)
    score = torch.empty(B, pieces, k)
    position = torch.empty(B, pieces, k, dtype=torch.int32)
    h = hidden[..., channel]  # (B, T)
    topk_kernel[pieces, B](h, score, position, T, h.stride(0), h.stride(1), k, N)
    score, position = score.flatten(1), position.flatten(1)  # (B, pieces * k)
    order = score.argsort(dim=1, descending=True, stable=True)[:, :k]  # (B, k)
    return score.gather(1, order), position.gather(1, order)


# Task 2: unpack

@triton.jit
def unpack_kernel(packed, codes, tokens, W: tl.constexpr, N: tl.constexpr):
    """Program `piece` unpacks the codes of N tokens.

    packed (T, W) uint8: W = d/4 bytes of a token, here a power of 2. codes (T, d) uint8: what to
    write. tokens: T.
    """
    # answer
    t = tl.program_id(0) * N + tl.arange(0, N)[:, None]
    w = tl.arange(0, W)[None]
    real = t + 0 * w < tokens
    byte = tl.load(packed + t * W + w, mask=real, other=0)
    for i in tl.static_range(4):
        tl.store(codes + t * 4 * W + 4 * w + i, (byte >> (2 * i)) & 3, mask=real)


# Task 3: fold

def fold(q, scale, zero):
    """Torch lines. q (H, d), scale and zero (d), fp32 -> folded (H, d) and offset (H), so that for
    any codes c (d)

        q.(c * scale + zero) = folded.c + offset
    """
    # answer
    return q * scale, q @ zero


# Task 4: scores

@triton.jit
def scores_kernel(q, packed, scale, zero, out, tokens, R: tl.constexpr, W: tl.constexpr,
                  P: tl.constexpr, N: tl.constexpr):
    """Program (piece, h) computes q.k / sqrt(d) of query head h with N tokens, a group. It folds
    scale and zero point into q; no key is decoded.

    q (H, d) fp32. packed (Hkv, T, W) uint8: W = d/4, and P is the least power of 2 that W does not
    exceed. scale and zero (Hkv, pieces, d) fp16: of each group of N tokens. out (H, T) fp32: what
    to write. tokens: T. R = H / Hkv neighbouring query heads share a KV head.
    """
    # answer
    piece, head = tl.program_id(0), tl.program_id(1)
    kv = head // R
    j = piece * N + tl.arange(0, N)
    w, c = tl.arange(0, P), tl.arange(0, 4 * P)
    real = (j < tokens)[:, None] & (w < W)[None]
    byte = tl.load(packed + (kv * tokens + j)[:, None] * W + w[None], mask=real, other=0)
    # all channels at once, next to each other in memory
    grid = (kv * tl.num_programs(0) + piece) * 4 * W
    x = tl.load(q + head * 4 * W + c, mask=c < 4 * W, other=0)
    folded = x * tl.load(scale + grid + c, mask=c < 4 * W, other=0).to(tl.float32)
    offset = tl.sum(x * tl.load(zero + grid + c, mask=c < 4 * W, other=0).to(tl.float32), axis=0)
    # the planes' channels, (P) each
    even, odd = tl.split(tl.reshape(folded, (P, 2, 2)))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    # a code stays where it is in its byte, 4, 16 or 64 times as large. The sum over channels comes once, at the end
    products = (byte & 3).to(tl.float32) * x0[None]
    products += (byte & 12).to(tl.float32) * (x1 / 4)[None]
    products += (byte & 48).to(tl.float32) * (x2 / 16)[None]
    products += (byte & 192).to(tl.float32) * (x3 / 64)[None]
    total = tl.sum(products, axis=1) + offset
    tl.store(out + head * tokens + j, total / tl.sqrt(4.0 * W), mask=j < tokens)


def scores(q, packed, scale, zero, N=16):  # given
    """q (H, d) fp32, packed (Hkv, T, d/4) uint8, scale and zero (Hkv, pieces, d) fp16 -> (H, T)."""
    H, (Hkv, T, W) = len(q), packed.shape
    out = torch.empty(H, T)
    P = triton.next_power_of_2(W)
    scores_kernel[triton.cdiv(T, N), H](q, packed, scale, zero, out, T, H // Hkv, W, P, N)
    return out
