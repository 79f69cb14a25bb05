"""The cache of 2_window.py, read by a kernel: attention to 2-bit codes, of which no decoded row is ever written.

    python docs/ladder/8_kernel.py           in the repository's folder; some seconds on a CPU
    python -m pdb docs/ladder/8_kernel.py    then `b decode` and `c`: without a GPU a kernel can be stepped through, too

For a new token a model reads its whole cache, and does little with each number. So this takes as long as the bytes take
to arrive, and 2 bits are few bytes. But 2_window.py decodes the codes, writes the rows to memory, and attention reads
them there: more bytes than 16 bits take. A kernel does both at once, and a code is decoded between load and product.

Triton: a kernel is a function that many programs run at the same time. `kernel[6, 2](...)` starts twelve, and
tl.program_id(0) and (1) tell a program which it is. A tensor arrives as a pointer to its first number, without a shape.
tl.arange(0, N) are N numbers, N a power of two; tl.load reads what lies so far behind the pointer, all N at once, or
those whose mask is True. What is loaded or computed stays in registers. Only tl.store writes to memory.

Shapes: one text of T tokens, C of them in codes; H query heads, Hkv heads of keys and values, R = H / Hkv, d channels
(D in the kernel).
"""
import math
import os
import sys

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported: kernels run on the CPU, line by line
import triton
import triton.language as tl

sys.path.insert(0, ".")
from tinykv import hf
from tinykv.cache import KVCache
from tinykv.codecs.affine import Affine
from tinykv.data import load_windows
from tinykv.methods.fp16 import FP16
from tinykv.methods.kivi import KIVI

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GROUP = 128  # tokens that are quantized at a time; in each channel, their keys share a grid
PIECE = 256  # tokens of a program: a GPU runs hundreds at once, and a model has few heads
N = 64  # of them at a time: what fits into a program's registers


# Attention in torch, of a few tokens: q (H, d), K and V (H, n, d) -> what `merge` needs of them
def attend(q, K, V):
    s = (K @ q[:, :, None])[..., 0] * (math.log2(math.e) / math.sqrt(q.shape[1]))  # (H, n)
    top = s.amax(1, keepdim=True)  # (H, 1): relative to the largest score no weight overflows
    p = torch.exp2(s - top)  # (H, n): e**x is 2**(x log2(e)), and 2**x is one instruction
    return (p[:, None] @ V)[:, 0], top, p.sum(1, keepdim=True)  # (H, d), (H, 1) twice. Not yet divided


def merge(sums, top, total):  # pieces of a text, (H, pieces, d) and twice (H, pieces, 1) -> the output (H, d)
    fade = torch.exp2(top - top.amax(1, keepdim=True))  # (H, pieces, 1): from a piece's largest score to that of all
    return (sums * fade).sum(1) / (total * fade).sum(1)


# The same in a kernel, of codes
@triton.jit
def decode(codes, row, scale, zero, D: tl.constexpr):  # row (N): which rows -> numbers (N, D), as in 2_window.py
    c = tl.arange(0, D)  # (D): a byte has channels c, c + D/4, c + D/2 and c + 3D/4
    byte, shift = c % (D // 4), c // (D // 4) * 2  # (D) both: where a channel's code is
    x = tl.load(codes + row[:, None] * (D // 4) + byte[None])  # (N, D): each byte four times; memory sends it once
    return scale * (x >> shift[None] & 3).to(tl.float32) + zero


@triton.jit  # constexpr: a number that is known when the kernel is compiled
def attend_kernel(q, k, k_scale, k_zero, v, v_scale, v_zero, sums, top, total, C, factor,
                  R: tl.constexpr, D: tl.constexpr, N: tl.constexpr, GROUP: tl.constexpr, PIECE: tl.constexpr):
    kv, piece = tl.program_id(0), tl.program_id(1)  # a head of keys and values, and PIECE of its tokens
    # the R queries that read it, in one product, which takes 16 rows at least: the mask says which of them exist
    c, r = tl.arange(0, D), tl.arange(0, 16)
    head, mask = (kv * R + r)[:, None], (r < R)[:, None]  # (16, 1) both
    query = tl.load(q + head * D + c[None], mask=mask, other=0) * factor  # (16, D)
    acc, weight = tl.zeros((16, D), tl.float32), tl.zeros((16, 1), tl.float32)
    largest = tl.full((16, 1), float("-inf"), tl.float32)
    for first in range(piece * PIECE, tl.minimum(piece * PIECE + PIECE, C), N):  # C is a multiple of N: no mask
        row = kv * C + first + tl.arange(0, N)  # (N): each row is read and decoded once
        grid = (kv * C + first) // GROUP * D + c  # (D): each channel's, of the group in which these tokens lie
        K = decode(k, row, tl.load(k_scale + grid)[None], tl.load(k_zero + grid)[None], D)  # (N, D)
        s = tl.dot(query, tl.trans(K))  # (16, N). A GPU rounds both to 11 bits
        # softmax, before all scores are known: when a larger one comes, what was summed so far fades
        new = tl.maximum(largest, tl.max(s, 1, keep_dims=True))  # (16, 1)
        fade, p = tl.exp2(largest - new), tl.exp2(s - new)  # (16, 1), (16, N)
        V = decode(v, row, tl.load(v_scale + row)[:, None], tl.load(v_zero + row)[:, None], D)  # (N, D)
        acc = acc * fade + tl.dot(p, V)  # (16, D)
        weight = weight * fade + tl.sum(p, 1, keep_dims=True)  # (16, 1)
        largest = new
    out = head * tl.num_programs(1) + piece  # (16, 1)
    tl.store(sums + out * D + c[None], acc, mask=mask)
    tl.store(top + out, largest, mask=mask)
    tl.store(total + out, weight, mask=mask)


def attend_codes(q, keys, values):  # q (H, d), codes of the package -> as `attend`, of all pieces: (H, pieces, d), ..
    (H, d), (_, Hkv, C, _) = q.shape, keys.packed.shape
    pieces = triton.cdiv(C, PIECE)  # rounded up
    sums, top, total = (q.new_empty(H, pieces, size) for size in (d, 1, 1))
    stored = keys.packed, keys.scale, keys.zero, values.packed, values.scale, values.zero
    attend_kernel[Hkv, pieces](q, *stored, sums, top, total, C, math.log2(math.e) / math.sqrt(d),
                               H // Hkv, d, N, GROUP, PIECE)
    return sums, top, total


# The cache: the package's own. Where the model's attention is "triton", it asks the cache for the output
class KernelCache(KVCache):
    def attend(self, layer, q, k, v, seen):  # q (1, H, 1, d), k and v (1, Hkv, 1, d): a new token after `seen` others
        cache = self.layers[layer]
        cache.append(k, v)
        q = self.rope.rotate(q, seen)[0, :, 0]  # (H, d)
        recent = [rows.recent[0].float().repeat_interleave(len(q) // k.shape[1], 0)  # (H, S - C, d)
                  for rows in (cache.keys, cache.values)]
        parts = [attend_codes(q, cache.keys.codes, cache.values.codes), [x[:, None] for x in attend(q, *recent)]]
        cache.quantize()
        return merge(*(torch.cat(x, dim=1) for x in zip(*parts)))[None, :, None]  # (1, H, 1, d)


# The table: perplexity of a text's last 10 tokens, and the bytes that the last of them moves
torch.set_grad_enabled(False)
model, tokenizer = hf.load("tinykv/assets/tales", DEVICE)
text = load_windows("tales", tokenizer, 1024, 1, "test").tokens.to(DEVICE)  # (1, S)
last = int(sys.argv[1]) if sys.argv[1:] else 10
kivi = KIVI(model.config, group_size=GROUP, recent=32)
for name, method in (("fp16", FP16(model.config)), ("torch", kivi), ("kernel", kivi)):
    cache = KernelCache(model, method)
    model.use_attention("fused")
    for chunk in text[:, :-last].split(32, dim=1):
        logits = [model(chunk, cache)[:, -1]]  # (1, vocabulary): of the next token
    model.use_attention("triton" if name == "kernel" else "fused")
    logits += [model(token, cache)[:, -1] for token in text[:, -last:].split(1, dim=1)]
    loss = torch.nn.functional.cross_entropy(torch.cat(logits[:-1]), text[0, -last:])
    moved = cache.nbytes
    if name == "torch":  # and the decoded rows, written and read
        moved += 2 * sum(rows.nbytes for layer in cache.layers for rows in layer.read())
    print(f"{name:8} {loss.exp():7.3f} {moved:9,}")

if DEVICE == "cuda":  # microseconds of a step of one layer of LLaMA-3-8B, after 32,768 tokens
    q, k, v = (torch.randn(1, heads, T, 128, device="cuda") for heads, T in ((32, 1), (8, 32768), (8, 32768)))
    codes, half = (Affine(2, 128, "channel", GROUP).encode(k), Affine(2, 128).encode(v)), (q.half(), k.half(), v.half())
    for name, step in (("fp16", lambda: torch.nn.functional.scaled_dot_product_attention(*half, enable_gqa=True)),
                       ("kernel", lambda: merge(*attend_codes(q[0, :, 0], *codes)))):
        print(f"{name:8} {1000 * triton.testing.do_bench(step):7.1f} us")
