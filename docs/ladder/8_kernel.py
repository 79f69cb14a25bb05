"""Attention in a kernel, on one page: it reads 2-bit codes and never writes a decoded row. Read 7_topk.py first.

    python docs/ladder/8_kernel.py           some seconds on a CPU.   The same in the package, and faster: kernels.py

For each new token, a model reads its whole cache and does little with each number, so it waits for memory. 2_window.py
writes decoded rows and reads them again; here a code is loaded, decoded and multiplied in a GPU's registers. Softmax
can be split: with s = x log2(e), the output is sum(2**s V) / sum(2**s), added up piece by piece. To keep 2**s from
overflowing, both are relative to 2**top, and `top` is the largest score so far: if a larger one comes, the sums shrink.
Shapes: one text of S tokens, C of them in codes; H query heads, Hkv heads of keys and values, R = H / Hkv; d channels.
"""
import math
import os
import sys

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported: kernels run on the CPU, line by line
try:
    import triton
    import triton.language as tl
except ModuleNotFoundError:
    sys.exit("this page needs Triton, which runs on Linux; on Windows use WSL, or a notebook of Colab")

sys.path.insert(0, __file__.rpartition("docs")[0] or ".")
from tinykv import hf
from tinykv.cache import KVCache
from tinykv.codecs.affine import Affine
from tinykv.lab.data import load_windows
from tinykv.methods.fp16 import FP16
from tinykv.methods.kivi import KIVI

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GROUP = 128  # tokens that are quantized at a time; in each channel, their keys share a grid
PIECE = 256  # tokens of a program. A GPU runs hundreds of programs at once, and a model has few heads
N = 64  # tokens at a time: as many as fit into a program's registers


# In torch: attention to a piece of a text, and what many pieces amount to
def attend(q, K, V):  # q (H, d), K and V (H, n, d) -> its two sums, (H, d) and (H, 1), and between them the top (H, 1)
    s = (K @ q[:, :, None])[..., 0] * (math.log2(math.e) / math.sqrt(q.shape[1]))  # (H, n). A GPU is fast at 2**x
    top = s.amax(1, keepdim=True)  # (H, 1)
    p = torch.exp2(s - top)  # (H, n): 1 at most. Softmax has e**x, which is 2**(x log2(e))
    return (p[:, None] @ V)[:, 0], top, p.sum(1, keepdim=True)


def merge(sums, top, total):  # of all pieces: (H, pieces, d) and twice (H, pieces, 1) -> the output (H, d)
    fade = torch.exp2(top - top.amax(1, keepdim=True))  # (H, pieces, 1): from a piece's top to the top of all
    return (sums * fade).sum(1) / (total * fade).sum(1)


# The same in a kernel, of codes. D is d; a row has W bytes
@triton.jit
def decode(codes, row, scale, zero, D: tl.constexpr, W: tl.constexpr, BITS: tl.constexpr):  # which rows (N) -> (N, D)
    c = tl.arange(0, D)  # (D): the channels. With 2 bits, a byte of the W holds c, c + W, c + 2W and c + 3W
    byte, shift = c % W, c // W * BITS  # (D) both: where a channel's code is
    x = tl.load(codes + row[:, None] * W + byte[None])  # (N, D): each byte several times, sent by memory once
    return scale * (x >> shift[None] & (2 ** BITS - 1)).to(tl.float32) + zero


@triton.jit  # constexpr: a number that is known when the kernel is compiled
def attend_kernel(q, k, k_scale, k_zero, v, v_scale, v_zero, sums, top, total, C, factor, R: tl.constexpr,
                  D: tl.constexpr, W: tl.constexpr, N: tl.constexpr, GROUP: tl.constexpr, PIECE: tl.constexpr):
    kv, piece = tl.program_id(0), tl.program_id(1)  # this program: one head of keys and values, PIECE of its tokens
    # the R queries that read this head. A product takes 16 rows at least: the mask says which of them exist
    c, r = tl.arange(0, D), tl.arange(0, 16)
    head, mask = (kv * R + r)[:, None], (r < R)[:, None]  # (16, 1) both
    query = tl.load(q + head * D + c[None], mask=mask, other=0) * factor  # (16, D)
    acc, weight = tl.zeros((16, D), tl.float32), tl.zeros((16, 1), tl.float32)
    largest = tl.full((16, 1), float("-inf"), tl.float32)
    for first in range(piece * PIECE, tl.minimum(piece * PIECE + PIECE, C), N):  # C is a multiple of N: no mask
        row = kv * C + first + tl.arange(0, N)  # (N): each row is read and decoded once, for all queries
        grid = (kv * C + first) // GROUP * D + c  # (D): one for each channel, of the group of these tokens
        K = decode(k, row, tl.load(k_scale + grid)[None], tl.load(k_zero + grid)[None], D, W, 8 * W // D)  # (N, D)
        s = tl.dot(query, tl.trans(K))  # (16, N): scores. A GPU rounds both factors to 11 bits
        new = tl.maximum(largest, tl.max(s, 1, keep_dims=True))  # (16, 1): the running maximum
        fade, p = tl.exp2(largest - new), tl.exp2(s - new)  # (16, 1), (16, N)
        V = decode(v, row, tl.load(v_scale + row)[:, None], tl.load(v_zero + row)[:, None], D, W, 8 * W // D)  # (N, D)
        acc = acc * fade + tl.dot(p, V)  # (16, D)
        weight = weight * fade + tl.sum(p, 1, keep_dims=True)  # (16, 1)
        largest = new
    out = head * tl.num_programs(1) + piece  # (16, 1)
    tl.store(sums + out * D + c[None], acc, mask=mask)
    tl.store(top + out, largest, mask=mask)
    tl.store(total + out, weight, mask=mask)


def attend_codes(q, keys, values):  # q (H, d), codes of the package -> as `attend`, of all pieces: (H, pieces, d), ..
    (H, d), (_, Hkv, C, W) = q.shape, keys.packed.shape
    pieces = triton.cdiv(C, PIECE)  # rounded up
    sums, top, total = (q.new_empty(H, pieces, size) for size in (d, 1, 1))
    stored = keys.packed, keys.scale, keys.zero, values.packed, values.scale, values.zero
    attend_kernel[Hkv, pieces](q, *stored, sums, top, total, C, math.log2(math.e) / math.sqrt(d),
                               H // Hkv, d, W, N, GROUP, PIECE)
    return sums, top, total


# The cache: the package's own. Where the model's attention is "triton", it asks the cache for the output
class KernelCache(KVCache):
    def attend(self, layer, q, k, v, seen):  # q (1, H, 1, d), k and v (1, Hkv, 1, d): a new token after `seen` others
        cache = self.layers[layer]
        cache.append(k, v)
        q = self.rope.rotate(q, seen)[0, :, 0]  # (H, d)
        of_codes = attend_codes(q, cache.keys.codes, cache.values.codes)
        K, V = cache.keys.recent[0].float(), cache.values.recent[0].float()  # (Hkv, S - C, d) both
        K, V = (x.repeat_interleave(len(q) // len(x), 0) for x in (K, V))  # (H, S - C, d): of each query's head
        of_recent = [x[:, None] for x in attend(q, K, V)]  # one more piece
        cache.quantize()
        out = merge(*(torch.cat(parts, dim=1) for parts in zip(of_codes, of_recent)))  # (H, d)
        return out[None, :, None]  # (1, H, 1, d)


# The table: perplexity of a text's last 10 tokens, and the bytes that the last of them moves
torch.set_grad_enabled(False)
model, tokenizer = hf.load(hf.EMBEDDED, DEVICE)
text = load_windows("tales", tokenizer, 1024, 1, "test").tokens.to(DEVICE)  # (1, S)
last = int(sys.argv[1]) if sys.argv[1:] else 10
kivi = KIVI(model.config, group_size=GROUP, recent=32)
for name, method in (("fp16", FP16(model.config)), ("decoded", kivi), ("kernel", kivi)):
    cache = KernelCache(model, method)
    model.use_attention("fused")
    for chunk in text[:, :-last].split(32, dim=1):
        logits = [model(chunk, cache)[:, -1]]  # (1, vocabulary): of the next token
    model.use_attention("triton" if name == "kernel" else "fused")
    logits += [model(token, cache)[:, -1] for token in text[:, -last:].split(1, dim=1)]
    loss = torch.nn.functional.cross_entropy(torch.cat(logits[:-1]), text[0, -last:])
    moved = cache.nbytes
    if name == "decoded":  # and the decoded rows, which are written and read
        moved += 2 * sum(rows.nbytes for layer in cache.layers for rows in layer.read())
    print(f"{name:8} {loss.exp():7.3f} {moved:9,}")
if DEVICE == "cuda":  # microseconds of a step of one layer of LLaMA-3-8B, after 32,768 tokens
    q, k, v = (torch.randn(1, heads, T, 128, device="cuda") for heads, T in ((32, 1), (8, 32768), (8, 32768)))
    half, sdpa = (q.half(), k.half(), v.half()), torch.nn.functional.scaled_dot_product_attention
    of_keys, of_values = Affine(2, 128, "channel", GROUP), Affine(2, 128)
    codes = of_keys.encode(k), of_values.encode(v)
    for name, step in (
            ("fp16", lambda: sdpa(*half, enable_gqa=True)),
            ("decoded", lambda: sdpa(q, of_keys.decode(codes[0]), of_values.decode(codes[1]), enable_gqa=True)),
            ("kernel", lambda: merge(*attend_codes(q[0, :, 0], *codes)))):
        print(f"{name:8} {1000 * triton.testing.do_bench(step):7.1f} us")
