"""The first kernel: KVSink's sinks by Triton. To be read before 8_kernel.py.

    python docs/ladder/7_topk.py             in the repository's folder; some seconds on a CPU

`kvsink` of 1_sinks.py keeps the tokens where one channel of an early layer's output is largest. Here a kernel finds
them. It prints them for each of 4 texts: by the kernel, and by torch.

A kernel is a function that many programs run at the same time, in any order: `kernel[4, 2](...)` starts eight, and
tl.program_id(0) and (1) tell a program which it is. A tensor arrives as a pointer to its first number, without a shape.
tl.arange(0, N) are N numbers at once, a block, N a power of two; pointer + block are N pointers, tl.load reads them. A
text ends anywhere, so a mask, N times True or False, says which of them exist. Only tl.store writes to memory.

Shapes: B texts, T tokens each, D channels of an output; K tokens are looked for, by programs of N tokens.
"""
import os
import sys

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported: kernels run on the CPU, line by line
import triton
import triton.language as tl

sys.path.insert(0, ".")
from tinykv import hf
from tinykv.data import load_windows
from tinykv.tracing import Trace

K, N = 5, 256
LAYER, CHANNEL = 1, 49  # where this model's sinks show, as in 1_sinks.py


# In torch
def topk_lines(h):  # h (B, T) -> (B, K)
    return h.abs().topk(K, dim=1).indices


# The same
@triton.jit  # constexpr: a number that is known when the kernel is compiled
def topk_kernel(h, size, place, T, to_text, to_token, K: tl.constexpr, N: tl.constexpr):
    piece, b = tl.program_id(0), tl.program_id(1)  # which tokens, of which text
    t = piece * N + tl.arange(0, N)  # (N)
    # a channel's numbers are `to_token` apart, as all other channels lie between them
    x = tl.load(h + b * to_text + t * to_token, mask=t < T, other=0)  # (N): 0 in the place of what does not exist
    x = tl.where(t < T, tl.abs(x), -1.0)  # which has to be smaller than all that does
    # there is no list to sort: K times, take the largest, write it, cross it out
    out = (b * tl.num_programs(0) + piece) * K
    for i in range(K):
        largest = tl.max(x, 0)
        earliest = tl.min(tl.where(x == largest, t, T), 0)  # of equal ones
        tl.store(size + out + i, largest)
        tl.store(place + out + i, earliest)
        x = tl.where(t == earliest, -1.0, x)  # (N)


def topk(h):  # each program finds the K largest of its tokens, and torch the K largest of these few
    B, T = h.shape
    pieces = triton.cdiv(T, N)  # rounded up
    size, place = h.new_empty(B, pieces * K), h.new_empty(B, pieces * K, dtype=torch.int64)
    topk_kernel[pieces, B](h, size, place, T, *h.stride(), K, N)
    return place.gather(1, size.topk(K, dim=1).indices)  # (B, K)


# The table
torch.set_grad_enabled(False)
model, tokenizer = hf.load("tinykv/assets/tales", "cuda" if torch.cuda.is_available() else "cpu")
texts = int(sys.argv[1]) if sys.argv[1:] else 4
tokens = load_windows("tales", tokenizer, 1000, texts, "test").tokens.to(model.lm_head.weight.device)  # (B, T)
trace = Trace(model)  # a cache that remembers each layer's output
model(tokens, trace)
h = trace.hidden[LAYER][..., CHANNEL]  # (B, T), of (B, T, D)
for row in zip(topk(h), topk_lines(h)):
    print(*(f"{str(found.tolist()):30}" for found in row))
