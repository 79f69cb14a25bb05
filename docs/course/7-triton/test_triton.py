"""Assignment 7, Triton: kernels run in the interpreter, so cases are few and small.

Around each tensor lies memory that a kernel must not touch; what lies behind a text is larger than anything in it."""
import math
import os
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from docs.course.compiles import ASKED, BELOW

os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when it is imported
pytest.importorskip("triton", reason="Triton runs on Linux; on Windows use WSL, or a notebook of Colab")


def guarded(x, fill, n=512):
    """A copy of x with n numbers `fill` before and after it -> the copy, and these numbers."""
    whole = torch.full((x.numel() + 2 * n,), fill, dtype=x.dtype)
    whole[n:-n] = x.flatten()
    return whole[n:-n].view(x.shape), [whole[:n], whole[-n:]]


def places(x):
    """Where the numbers of x are in memory."""
    storage = x.untyped_storage()
    index = torch.arange(storage.nbytes() // x.itemsize).as_strided(x.shape, x.stride(), x.storage_offset())
    return (storage.data_ptr() + index * x.itemsize).flatten().tolist()


@contextmanager
def loads(*tensors, backwards):
    """A list that gets where a kernel loads numbers that are none of these tensors'. backwards: the last program runs
    first; on a GPU any may. And an argmax that may find any of equal numbers finds the last."""
    import triton.runtime.interpreter as interpreter  # the submission has asked for it
    from triton.language.standard import _argmax_combine_tie_break_fast as finds_any
    builder, reduction = interpreter.InterpreterBuilder, interpreter.ReduceOps
    known = {place for x in tensors for place in places(x)}
    strays, load, start, min_max = [], builder.create_masked_load, builder.set_grid_idx, reduction.min_max

    def watched(self, pointers, mask, *more):
        strays.extend({*pointers.data[mask.data].tolist()} - known)
        return load(self, pointers, mask, *more)

    def last_first(self, *program):
        start(self, *(n - 1 - i if backwards else i for n, i in zip(self.grid_dim, program)))

    def last_of_equals(self, given, val_reduce_op, idx_reduce_op=None):
        def last(x, **along):
            return np.size(x, along["axis"]) - 1 - idx_reduce_op(np.flip(x, along["axis"]), **along)
        return min_max(self, given, val_reduce_op, last if self.combine_fn is finds_any else idx_reduce_op)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "create_masked_load", watched)
        patch.setattr(builder, "set_grid_idx", last_first)
        patch.setattr(reduction, "min_max", last_of_equals)
        yield strays


# of each kernel: the types of its arguments, values of its constants, and how many numbers a program reads
KERNELS = {
    "attend_kernel": ({"q": "*fp32", "k": "*u8", "k_scale": "*fp16", "k_zero": "*fp16", "v": "*u8", "v_scale": "*fp16",
                       "v_zero": "*fp16", "sums": "*fp32", "top": "*fp32", "total": "*fp32", "C": "i32",
                       "factor": "fp32"}, {"R": 4, "D": 128, "W": 32, "N": 64, "GROUP": 128, "PIECE": 256}),
    "topk_kernel": ({"h": "*fp32", "score": "*fp32", "position": "*i32", "tokens": "i32", "sequence": "i32",
                     "token": "i32"}, {"K": 4, "N": 16}),
    "unpack_kernel": ({"packed": "*u8", "codes": "*u8", "tokens": "i32"}, {"W": 8, "N": 16}),
    "scores_kernel": ({"q": "*fp32", "packed": "*u8", "scale": "*fp16", "zero": "*fp16", "out": "*fp32",
                       "tokens": "i32"}, {"R": 4, "W": 32, "P": 32, "N": 128}, 16384),  # 128 tokens of 128 channels
}


# The page

def attention(sub, rng, same, R, D, bits, groups, hint):
    """`attend_kernel` on two heads of keys and values, of 2 or 4 bits: what `attend_codes` does, in lines that are not
    the file's."""
    H, W, G, P, C = 2 * R, D * bits // 8, sub.GROUP, sub.PIECE, sub.GROUP * groups
    q, stored, pieces = rng.normal(H, D), [], -(-C // P)
    for shape in ((1, 2, C // G, D), (1, 2, C, 1)):  # keys and values
        stored.append(rng.of(range(256), 1, 2, C, W).to(torch.uint8))
        stored += [rng.of((0.125, 0.25, 0.5), *shape).half(), rng.normal(*shape).half()]
    stored[2] -= 1000 * (groups > 2)  # scores are far from 0
    (sums, top, total), around = zip(*(guarded(torch.zeros(H, pieces, n), -7.0, 16 * pieces * n) for n in (D, 1, 1)))
    with loads(q, *stored, backwards=False) as strays:
        sub.attend_kernel[2, pieces](q, *stored, sums, top, total, C, 1.4427 / math.sqrt(D), R, D, W, sub.N, G, P)
    fade = torch.exp2(top - top.amax(1, keepdim=True))
    untouched = [bool((x == -7).all()) for parts in around for x in parts]
    same([(sums * fade).sum(1) / (total * fade).sum(1), sums, total, q, untouched, len(strays)], "attend_kernel on "
         f"{C} tokens, {H} heads of queries, D = {D}, {bits} bits, GROUP = {G}, PIECE = {P}. {hint}", 1e-3, names="the "
         "output|each piece's sums|weights|queries|whether memory around the results stays as it is|how many numbers "
         "are read elsewhere")


@pytest.mark.points(12)
def test_page(sub, rng, same):
    """the page: decode, attend_kernel"""
    for R, D, bits, groups in ((1, 16, 2, 3), (3, 16, 4, 4), (4, 32, 2, 1), (4, 128, 2, 1)):  # compiled, too
        attention(sub, rng, same, R, D, bits, groups, "decode: of 2 bits a byte has c, c + W, c + 2W, c + 3W.")


@pytest.mark.points(4)
def test_page_compiles(sub, rng, same):
    """the page: right for one head a group, and attend_kernel compiles for a GPU"""
    attention(sub, rng, same, 1, 16, 2, 1, "")
    same(ASKED + "attend_kernel")


# Task 1

def topk(sub, same, rows, K, N, hint, stride=1, dtype=torch.float32):
    """rows: the numbers of each sequence. stride: from a token to the next."""
    B, T = len(rows), len(rows[0])
    hidden = torch.full((B, T + N, stride), 6e4, dtype=dtype)  # larger in other channels, and behind the text
    h = hidden[:, :T, -1]
    h.copy_(torch.tensor(rows))
    pieces = -(-T // N)
    score, around_scores = guarded(torch.zeros(B, pieces, K), -7.0)
    position, around_positions = guarded(torch.zeros(B, pieces, K, dtype=torch.int32), -7)
    with loads(h, score, position, backwards=T % 2 == 0) as strays:
        sub.topk_kernel[pieces, B](h, score, position, T, h.stride(0), h.stride(1), K, N)
    there = torch.tensor([min(N, T - piece * N) for piece in range(pieces)])  # tokens of each piece
    real = (torch.arange(K) < there[:, None]).expand(B, -1, -1)
    hint = f"topk_kernel with K = {K}, N = {N}, T = {T}, strides {h.stride()}, {dtype}: h = {rows}. {hint} "
    same([score.where(real, -1.0), position.where(real, -1)], hint + "Both (B, pieces, K); -1 here where a piece has "
         "fewer than K tokens", tolerance=0, names="scores|positions; text, piece, place")
    same([bool((score < 0)[~real].all()), around_scores, around_positions, h, len(strays)], hint + "Nothing else is "
         "written.", names="whether the scores that are left are negative|memory around scores|memory around positions|"
         "numbers of h|how many numbers are loaded that are not the text's, before|behind")


EIGHT = [2.0, -9, 4, 4, 0, 1, -7, 3]


@pytest.mark.points(10)
def test_topk_of_eight_numbers(sub, rng, same):
    """topk_kernel: magnitudes, pieces, ties, the end of the text"""
    topk(sub, same, [EIGHT], 2, 4, "Positions are counted from the start of the sequence.")
    topk(sub, same, [rng.sample(range(-90, 90), 40)], 4, 16, "These K and N are compiled.")
    topk(sub, same, [EIGHT], 3, 8, "Of equal numbers the earlier token comes first.")
    topk(sub, same, [rng.sample(range(-90, 90), 8)], 2, 4, "Magnitudes, of whatever sign.")
    topk(sub, same, [[0.0] * 7], 2, 8, "A token that is not there loses to a 0.")
    topk(sub, same, [[5.0, 0.0, 0.0]], 3, 2, "The second piece has fewer than K tokens.")
    topk(sub, same, [rng.sample(range(-900, 900), 300)], 2, 128, "A long text.")


@pytest.mark.points(5)
def test_topk_compiles(sub, rng, same):
    """topk_kernel: right for one sequence, and it compiles for a GPU"""
    topk(sub, same, [rng.sample(range(-90, 90), 8)], 2, 4, "")
    same(ASKED + "topk_kernel")


@pytest.mark.points(10)
def test_topk(sub, rng, same):
    """topk_kernel: any lengths, strides and dtypes"""
    for _ in range(14):
        B, T, N = rng.randint(1, 3), rng.randint(1, 20), rng.choice((2, 4, 8))
        numbers, dtype = rng.choice(((range(-9, 10), torch.half), (range(-9, 10), torch.float32),
                                     (range(-400, 400), torch.half), (range(9000, 9040), torch.float32)))
        rows = rng.of(numbers, B, T).float().tolist()
        K, stride = rng.sizes(min(4, N), 3)
        topk(sub, same, rows, K, N, "", stride, dtype)


# Task 2

@pytest.mark.points(4)
def test_unpack_compiles(sub, rng, same):
    """unpack_kernel: right for eight codes, and it compiles for a GPU"""
    packed, codes = rng.of(range(256), 2, 1).to(torch.uint8), torch.zeros(2, 4, dtype=torch.uint8)
    sub.unpack_kernel[(1,)](packed, codes, 2, 1, 2)
    same(codes, f"unpack_kernel with T = 2, W = 1, N = 2 of the bytes {packed.tolist()}")
    same(ASKED + "unpack_kernel")


@pytest.mark.points(6)
def test_unpack(sub, rng, same):
    """unpack_kernel: four codes of a byte, the first in the lowest bits; nothing behind the last token"""
    for T, W, N in ((2, 1, 2), (1, 2, 4), (5, 2, 2), (7, 4, 4), (9, 1, 8), (3, 8, 2), (8, 2, 4), (20, 8, 16),
                    (2, 32, 1)):
        packed = rng.of(range(256), T + N, W).to(torch.uint8)[:T]
        codes, around = guarded(torch.full((T, 4 * W), 99, dtype=torch.uint8), 77)
        with loads(packed, codes, backwards=T > 2) as strays:
            sub.unpack_kernel[(-(-T // N),)](packed, codes, T, W, N)
        same([codes, around, len(strays)], f"unpack_kernel with T = {T}, W = {W}, N = {N} of the bytes "
             f"{packed.tolist()}. A code 99 is not written; memory before and behind codes stays 77.", names=
             "codes|memory|how many numbers are loaded that are no bytes of the text, before|behind")


# Task 3

@pytest.mark.points(7)
def test_fold(sub, rng, same):
    """fold: q.(c * scale + zero) = folded.c + offset"""
    q, scale, zero = torch.tensor([[1.0, 2, -1, 2]]), torch.tensor([1.0, 2, 1, 0.5]), torch.tensor([-1.0, 0, 0, 2])
    same.call(sub.fold, q, scale, zero, hint="This is the handout's head.", names="folded|offset")
    for _ in range(20):
        same.call(sub.fold, rng.normal(rng.randint(1, 4), 8), rng.normal(8).abs(), rng.normal(8), names="folded|offset")


# Task 4

def one_head(sub, rng, same, below=""):
    for T, W in ((2, 1), (128, 32)):  # the latter as it is compiled
        q, out, scale = rng.normal(4, 4 * W), torch.zeros(4, T), torch.ones(1, 1, 4 * W).half()
        packed = rng.of(range(256), 1, T, W).to(torch.uint8)
        sub.scores_kernel[1, 4](q, packed, scale, -scale, out, T, 4, W, W, T)
        same(out, f"scores_kernel with T = N = {T}, W = {W}, four heads of queries: q = {q.tolist()}, packed = "
             f"{packed.tolist()}, scales 1, zero points -1")
    same(ASKED + "scores_kernel" + below)


@pytest.mark.points(4)
def test_scores_compiles(sub, rng, same):
    """scores_kernel: right for one head of keys, and it compiles for a GPU"""
    one_head(sub, rng, same)


@pytest.mark.points(4)
def test_scores_below_8(sub, rng, same):
    """scores_kernel: right for one head of keys, and below 8 instructions a number"""
    one_head(sub, rng, same, BELOW + "8")


@pytest.mark.points(4)
def test_scores_below_6(sub, rng, same):
    """scores_kernel: right for one head of keys, and below 6 instructions a number"""
    one_head(sub, rng, same, BELOW + "6")


@pytest.mark.points(10)
def test_scores(sub, rng, same):
    """scores_kernel: fold, planes, groups, heads, the end of the text"""
    for T, W, N, heads, R in ((2, 1, 2, 1, 1), (8, 2, 4, 1, 2), (5, 4, 4, 2, 1), (7, 1, 4, 2, 2), (9, 3, 8, 2, 3),
                              (3, 2, 8, 1, 1), (2, 1, 2, 2, 8), (6, 5, 4, 2, 1), (130, 32, 128, 1, 4)):
        d, pieces, P = 4 * W, -(-T // N), 2 ** (W - 1).bit_length()
        q, _ = guarded(rng.normal(heads * R, d), 1e4)
        packed, _ = guarded(rng.of(range(256), heads, T, W).to(torch.uint8), 255)
        scale, _ = guarded(rng.of((0.25, 0.5, 1, 3, 200), heads, pieces, d).half(), 1e4)
        zero, _ = guarded(rng.of(range(-4, 5), heads, pieces, d).half(), 1e4)
        out, around = guarded(torch.full((heads * R, T), 99.0), -7.0)
        with loads(q, packed, scale, zero, out, backwards=T > 5) as strays:
            sub.scores_kernel[pieces, heads * R](q, packed, scale, zero, out, T, R, W, P, N)
        same([out, around, q, len(strays)], f"scores_kernel with T = {T}, W = {W}, P = {P}, N = {N}, Hkv = {heads}, R "
             f"= {R}: q = {q.tolist()}, packed = {packed.tolist()}, scale = {scale.tolist()}, zero = {zero.tolist()}. "
             "A 99 in out is not written; nothing else is written.", names="out|memory|numbers of q|how many numbers "
             "are loaded that are none of these tensors', before|behind; head, token or channel")
