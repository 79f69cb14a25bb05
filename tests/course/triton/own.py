"""Assignment 7: the project's own kernels. Theirs is another packing, of which the rows of these
functions are made."""
import torch
import triton
import triton.language as tl

import kernels
from kernels import topk_kernel  # noqa: F401
from tinykv.codecs.affine import Affine
from tinykv.codecs.base import Codes, pack
from tinykv.triton_cache import affine_rows

ASSIGNMENT = "triton"


def codes_of(packed):
    """The assignment's bytes (.., W) -> codes (.., 4 W)."""
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)
    return (packed[..., None] >> shifts & 3).flatten(-2)


def rows_of(packed, scale, zero, N):
    """PackedRows of (Hkv, T, W)."""
    codec = Affine(2, 4 * packed.shape[-1], "channel", N)
    codes = Codes(pack(codes_of(packed), 2)[None], scale[None, :, :, None], zero[None, :, :, None])
    return affine_rows(codec, codes, "k", 1)


@triton.jit
def planes_kernel(k, codes, d: tl.constexpr, N: tl.constexpr, size: tl.constexpr):
    j = tl.program_id(0) * N + tl.arange(0, N)
    ok = j < size
    words = kernels.words_of(k, 0, 0, j, ok)
    for i in tl.static_range(kernels.count(k.planes)):
        channel, there = kernels.channels_of(k, i)
        larger = 0.5 ** kernels.of_plane(k.planes, i, "low")
        code = kernels.codes_of_plane(k, words, i).to(tl.float32) * (kernels.TO_INTEGER * larger)
        tl.store(codes + j[:, None] * d + channel[None], code.to(tl.uint8), ok[:, None] & there[None])


@triton.jit
def project_scores(q, k, out, tokens, R: tl.constexpr, d: tl.constexpr, N: tl.constexpr):
    piece, head = tl.program_id(0), tl.program_id(1)
    j = piece * N + tl.arange(0, N)
    parts = ()
    for i in tl.static_range(kernels.count(k.planes)):
        channel, there = kernels.channels_of(k, i)
        parts = parts + (tl.load(q + head * d + channel, there, 0)[:, None] * d ** -0.5,)
    s = kernels.scores_by_channel(parts, k, 0, head // R, piece * N, j, j < tokens, tl.float32)
    tl.store(out + head * tokens + j[:, None], s, (j < tokens)[:, None])


class Launched:
    """A function of the arguments that a kernel of the assignment has."""

    def __init__(self, function):
        self.function = function

    def __getitem__(self, grid):
        return self.function


@Launched
def unpack_kernel(packed, codes, tokens, W, N):
    ones = torch.ones(1, triton.cdiv(tokens, 16), 4 * W).half()
    rows = rows_of(packed[None], ones, ones, 16)
    planes_kernel[(triton.cdiv(tokens, N),)](rows, codes, 4 * W, N, tokens)


def fold(q, scale, zero):
    """`fold_lines` with the codes of one channel at a time, and with none."""
    d = len(scale)
    p, token = torch.zeros(len(q), d), torch.ones(d, 1)
    folded = kernels.fold_lines(q, p, torch.eye(d), token, token, scale[None], 0 * zero[None])[1]
    offset = kernels.fold_lines(q, p, torch.zeros(d, d), token, token, scale[None], zero[None])[1][:, 0]
    return folded, offset


@Launched
def scores_kernel(q, packed, scale, zero, out, tokens, R, W, N):
    rows = rows_of(packed, scale, zero, N)
    assert rows.fold.value == "channel"
    project_scores[triton.cdiv(tokens, N), len(q)](q, rows, out, tokens, R, 4 * W, N)
