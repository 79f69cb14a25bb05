"""Triton on one page: first kernels, one of which finds KVSink's sinks. Read this page before 8_kernel.py.

    python docs/ladder/7_topk.py             in the repository's folder; some seconds on a CPU
    python -m pdb docs/ladder/7_topk.py      then `b topk_kernel` and `c`: without a GPU a kernel can be stepped through
    kernels.py                               the same in the package

A GPU does thousands of things at the same time. Each torch operation is one launch, which reads its input from memory
and writes its output there. A kernel of your own reads once, does everything, and writes the result. The last one here
finds the tokens that `kvsink` of 1_sinks.py keeps: those with the largest number in one channel.

A kernel is a function, and a program is one run of it. `kernel[4, 2](...)` starts eight programs, in any order and many
at the same time. All get the same arguments. tl.program_id(0), from 0 to 3, and tl.program_id(1), 0 or 1, tell a
program which part of the work is its own. A tensor arrives as a pointer: the place of its first number in memory. There
are no shapes and no indices; `pointer + 5` is the place of the number five further on.

A program works on blocks. tl.arange(0, N) is the N numbers 0, 1, .. N - 1, and N is a power of two that is known when
the kernel is compiled (tl.constexpr). So pointer + tl.arange(0, N) is N places; tl.load reads all N, tl.store writes
them. A text rarely ends where a block does, so a mask, N times True or False, says which places exist.

Shapes: B texts, T tokens each, D channels of a layer's output; K tokens are looked for, by programs of N tokens.
"""
import os
import sys

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported: kernels run on the CPU, line by line
try:
    import triton
    import triton.language as tl
except ModuleNotFoundError:
    sys.exit("this page and the next need Triton, which runs on Linux; on Windows use WSL, or a notebook of Colab")

sys.path.insert(0, __file__.rpartition("docs")[0] or ".")
from tinykv import hf
from tinykv.lab.data import load_windows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
K, N = 5, 256
LAYER, CHANNEL = 1, 49  # where this model's sinks show, as in 1_sinks.py


# The first kernel: the magnitudes of n numbers that lie one after another
@triton.jit
def abs_kernel(x, out, n, N: tl.constexpr):  # x and out are pointers
    place = tl.program_id(0) * N + tl.arange(0, N)  # (N): this program's own
    mask = place < n  # (N): the last program has fewer
    numbers = tl.load(x + place, mask=mask)  # (N)
    tl.store(out + place, tl.abs(numbers), mask=mask)


def magnitudes(x):  # x (n) -> (n)
    out = torch.empty_like(x)
    programs = triton.cdiv(len(x), N)  # n / N, rounded up
    abs_kernel[programs,](x, out, len(x), N)
    return out


# The second: each program finds the K largest of its N tokens
@triton.jit
def topk_kernel(h, size, token, T, to_text, to_token, K: tl.constexpr, N: tl.constexpr):
    piece, b = tl.program_id(0), tl.program_id(1)  # which tokens, of which text
    t = piece * N + tl.arange(0, N)  # (N): the tokens
    # h points to one channel of the first token. Between two tokens lie the other channels: to_token is D, and to_text
    # is T * D. So the channel is read where it is, and nothing is copied before
    x = tl.load(h + b * to_text + t * to_token, mask=t < T, other=0)  # (N): 0 in the place of what does not exist
    x = tl.where(t < T, tl.abs(x), -1.0)  # (N): and now smaller than everything that does
    # blocks cannot be sorted by an index. So, K times: take the largest, write it, cross it out
    out = (b * tl.num_programs(0) + piece) * K  # where the K results of this program begin
    for i in range(K):
        largest = tl.max(x, 0)
        earliest = tl.min(tl.where(x == largest, t, T), 0)  # of equal ones
        tl.store(size + out + i, largest)
        tl.store(token + out + i, earliest)
        x = tl.where(t == earliest, -1.0, x)  # (N)


def topk(h):  # h (B, T) -> (B, K)
    B, T = h.shape
    pieces = triton.cdiv(T, N)
    size = h.new_empty(B, pieces * K)
    token = h.new_empty(B, pieces * K, dtype=torch.int64)
    topk_kernel[pieces, B](h, size, token, T, *h.stride(), K, N)
    # programs cannot wait for each other. What is left, K numbers a program, is little work for torch
    best = size.topk(K, dim=1).indices  # (B, K)
    return token.gather(1, best)


# The same in torch
def topk_lines(h):  # h (B, T) -> (B, K)
    return h.abs().topk(K, dim=1).indices


# The table: the sinks of 4 texts, or as many as the command says, by the kernel and by torch
torch.set_grad_enabled(False)
model, tokenizer = hf.load(hf.EMBEDDED, DEVICE)
texts = int(sys.argv[1]) if sys.argv[1:] else 4
tokens = load_windows("tales", tokenizer, 1000, texts, "test").tokens.to(DEVICE)  # (B, T)
outputs = []
model.model["layers"][LAYER].register_forward_hook(lambda layer, x, output: outputs.append(output))
model(tokens)  # each layer's output is (B, T, D)
x = outputs[0].flatten()  # (B T D)
wrong = (magnitudes(x) - x.abs()).abs().max()
print(f"magnitudes of {len(x):,} numbers by {triton.cdiv(len(x), N):,} programs; difference from torch: {wrong}")
h = outputs[0][..., CHANNEL]  # (B, T)
for of_kernel, of_torch in zip(topk(h), topk_lines(h)):
    print(f"kernel {of_kernel.tolist()}   torch {of_torch.tolist()}")
