"""Assignment 7: kernels in Triton's interpreter."""
import os
from importlib.util import find_spec

import torch

from tinykv.course.check import check, expect, expect_tensor, normal, shown

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
os.environ["TRITON_FRONT_END_DEBUGGING"] = "1"  # what a kernel raises arrives as it is
if find_spec("triton"):  # once, for the processes of all checks
    import triton.language  # noqa: F401

NUMBER, TITLE = 7, "Triton"
NEEDS = ("triton",)
ANSWERS = ("kernels", "tinykv.triton_cache")
BLANKS = {"kernels.py": ("topk_lines", "topk_kernel", "fold_lines", "codes_of_plane", "scores_by_token",
                         "plane_by_channel", "scores_by_channel")}

GUARD = 64  # numbers before and after a tensor, which a kernel must not touch


# ---- what these checks share

def guarded(x, fill):
    """A copy of x with GUARD numbers `fill` before and after it -> the copy, and all of it."""
    whole = torch.full((x.numel() + 2 * GUARD,), fill, dtype=x.dtype)
    whole[GUARD:-GUARD] = x.flatten()
    return whole[GUARD:-GUARD].view(x.shape), whole


def expect_untouched(whole, fill, what):
    outside = torch.cat([whole[:GUARD], whole[-GUARD:]])
    expect(bool((outside == fill).all()),
           f"{what} Your kernel writes before or after its tensor. Either no mask leaves out the tokens that are "
           "not there, or an offset is wrong: look at what program_id(0) and program_id(1) count.")


def pieces_of(T, N):
    return -(-T // N)


# ---- task 1: top-k

def run_topk(submission, rows, k, N, tried, h=None):
    """rows: |h| is taken of these lists, one for each sequence. Compares score and position."""
    B, T = len(rows), len(rows[0])
    h = torch.tensor(rows) if h is None else h
    if h.is_contiguous():  # what lies beyond is larger than anything
        h, _ = guarded(h, 1e6)
    pieces = pieces_of(T, N)
    score, all_scores = guarded(torch.full((B, pieces, k), -9.0), -7.0)
    position, all_positions = guarded(torch.full((B, pieces, k), -9, dtype=torch.int32), -7)
    submission.topk_kernel[pieces, B](h, score, position, T, h.stride(0), h.stride(1), k, N)
    expect_untouched(all_scores, -7, tried)
    expect_untouched(all_positions, -7, tried)
    wanted = {(piece, b): sorted(range(piece * N, min(T, piece * N + N)), key=lambda i: -abs(row[i]))[:k]
              for b, row in enumerate(rows) for piece in range(pieces)}
    for b, row in enumerate(rows):
        for piece in range(pieces):
            best = wanted[piece, b]
            got, sizes = position[b, piece].tolist(), score[b, piece].tolist()
            where = f"{tried} Program ({piece}, {b})"
            expect(got != [-9] * k, f"{where} writes no position, or another place of the tensor.")
            others = [program for program, theirs in wanted.items() if theirs == got != best]
            why = f" Those are the positions of program {others[0]}: where does each one write?" if others else ""
            expect(got[:len(best)] == best,
                   f"{where} writes the positions {got}; they should be {best}, where |h| is "
                   f"{shown([abs(row[i]) for i in best])}.{why}")
            want = [abs(row[i]) for i in best]
            expect(all(abs(a - b) < 1e-4 for a, b in zip(sizes, want)),
                   f"{where} writes the scores {shown(sizes)}; they should be {shown(want)} (-9: nothing was written).")
            expect(all(size < 0 for size in sizes[len(best):]),
                   f"{where} has {len(best)} of the text's tokens, and writes the scores {shown(sizes)} for K = {k}; "
                   "those that are left should be negative.")


def sizes_of(rng, T, top=9.0):
    """T numbers between 0.1 and `top`, all different."""
    return [x / 10 for x in rng.sample(range(1, int(top * 10)), T)]


@check(points=7)
def topk_of_one_piece(submission, rng):
    """topk_kernel: the K largest numbers of one piece, the largest first"""
    row, k = sizes_of(rng, 8), rng.randint(2, 3)
    run_topk(submission, [row], k, 8, f"K = {k}, N = 8, one sequence of 8 tokens: h = {shown(row)}.")


@check(points=4)
def topk_of_magnitudes(submission, rng):
    """topk_kernel: a number far below zero is large, too"""
    row = sizes_of(rng, 8, top=5.0)
    row[rng.randint(0, 7)] *= -1
    row[rng.randint(0, 7)] = -30.0
    run_topk(submission, [row], 2, 8, f"K = 2, N = 8, one sequence of 8 tokens: h = {shown(row)}. "
             "The magnitude counts.")


@check(points=4)
def topk_of_equals(submission, rng):
    """topk_kernel: of equal numbers, the earlier token"""
    row = sizes_of(rng, 8, top=5.0)
    for i in rng.sample(range(8), 4):
        row[i] = 20.0
    run_topk(submission, [row], 3, 8, f"K = 3, N = 8, one sequence of 8 tokens: h = {shown(row)}. Of equal ones the "
             "earlier comes first, and each is taken once.")


@check(points=7)
def topk_of_pieces(submission, rng):
    """topk_kernel: each piece has its own, with positions from the start of the sequence"""
    row = sizes_of(rng, 24)
    run_topk(submission, [row], 2, 8, f"K = 2, N = 8, one sequence of 24 tokens, so three pieces: h = {shown(row)}.")


@check(points=6)
def topk_of_a_batch(submission, rng):
    """topk_kernel: sequences, and a tensor whose numbers are not neighbours"""
    B, T = 3, 8
    rows = [sizes_of(rng, T) for _ in range(B)]
    hidden = normal(rng, T, B, 5) * 50  # (T, B, D): the tokens are outermost
    hidden[..., 2] = torch.tensor(rows).T
    h = hidden[..., 2].T  # (B, T)
    run_topk(submission, rows, 2, T, f"K = 2, N = 8, three sequences of 8 tokens: h = {shown(rows)}. The next token is "
             f"{h.stride(1)} numbers away, the next sequence {h.stride(0)}.", h)


@check(points=6)
def topk_at_the_end(submission, rng):
    """topk_kernel: tokens after the end of the text are nobody"""
    T = rng.randint(3, 6)
    row = sizes_of(rng, T)
    run_topk(submission, [row], 2, 8, f"K = 2, N = 8, and only {T} tokens: h = {shown(row)}. What lies behind them in "
             "memory is no token, nor is a 0 that stands for it.")
    run_topk(submission, [[3.0]], 3, 8, "K = 3, N = 8, and only one token: h = [3].")


# ---- task 2: unpack

def bytes_of(codes):
    """Codes (.., d) -> bytes (.., d/4), the first of four codes in the lowest bits."""
    four = codes.unflatten(-1, (-1, 4)).int()
    return (four * torch.tensor([1, 4, 16, 64], dtype=torch.int32)).sum(-1).to(torch.uint8)


def draw_codes(rng, *shape):
    generator = torch.Generator().manual_seed(rng.getrandbits(62))
    return torch.randint(0, 4, shape, generator=generator)


def try_unpack(submission, rng, T, N):
    d = rng.choice((16, 32))
    codes = draw_codes(rng, T, d)
    codes[0, :4] = torch.tensor([3, 0, 1, 2])
    packed, _ = guarded(bytes_of(codes), 255)
    given, whole = guarded(torch.full((T, d), 9, dtype=torch.uint8), 7)
    submission.unpack_kernel[(pieces_of(T, N),)](packed, given, T, d // 4, N)
    tried = f"{T} tokens of {d} channels, N = {N}."
    expect_untouched(whole, 7, tried)
    wrong = (given != codes).nonzero()
    if len(wrong):
        t, channel = wrong[0].tolist()
        first = channel // 4 * 4
        planes = codes.unflatten(-1, (-1, 4)).mT.flatten(-2)
        why = (" This comes if codes i of all bytes are written beside each other; their channels are i, 4 + i, "
               "8 + i, ..." if torch.equal(given.long(), planes) else "")
        expect(False, f"{tried} Byte {first // 4} of token {t} is {packed[t, first // 4].item()}, with the codes "
               f"{codes[t, first:first + 4].tolist()} of channels {first} to {first + 3}; your kernel writes "
               f"{given[t, first:first + 4].tolist()} there (9: nothing was written). The first code has the lowest "
               f"two bits.{why}")


@check(points=9)
def unpack_codes(submission, rng):
    """unpack_kernel: four codes of a byte, the first in the lowest bits"""
    try_unpack(submission, rng, 8, 4)


@check(points=5)
def unpack_at_the_end(submission, rng):
    """unpack_kernel: the last program has fewer tokens"""
    try_unpack(submission, rng, 4 + rng.randint(1, 3), 4)


# ---- task 3: fold

@check(points=8)
def fold_into_the_query(submission, rng):
    """fold: scale and zero point leave the product"""
    H, d = rng.randint(2, 3), 8
    q, scale, zero = normal(rng, H, d), normal(rng, d).abs() + 0.1, normal(rng, d) * 3
    given = submission.fold(q.clone(), scale.clone(), zero.clone())
    expect(isinstance(given, (tuple, list)) and len(given) == 2, "fold has to return two tensors, folded and offset.")
    expect_tensor(given[0], "numbers", (H, d), "folded")
    expect_tensor(given[1], "numbers", (H,), "offset")
    for codes in (torch.zeros(d), draw_codes(rng, d).float()):
        want = q @ (codes * scale + zero)
        got = given[0] @ codes + given[1]
        expect(torch.allclose(got, want, atol=1e-4),
               f"For the codes {shown(codes.int())} q.(c s + z) is {shown(want)}, and folded.c + offset is "
               f"{shown(got)}. Write out the sum over the channels: what is multiplied by c, and what is not?")


# ---- task 4: scores

def plain_scores(q, codes, scale, zero, N, slip=None):
    """(H, T), the decoded keys times q. slip: a fault."""
    (H, d), (Hkv, T, _) = q.shape, codes.shape
    group = torch.arange(T) // N
    if slip == "group":
        group = group * 0
    head = torch.arange(H) * Hkv // H
    if slip == "head":
        head = torch.arange(H) % Hkv
    k = codes.double() * scale.double()[:, group] + (0 if slip == "zero" else zero.double()[:, group])
    if slip == "order":
        k = codes.unflatten(-1, (-1, 4)).flip(-1).flatten(-2) * scale.double()[:, group] + zero.double()[:, group]
    return torch.einsum("hd,htd->ht", q.double(), k[head]) / {"root": 1, "bytes": (d / 4) ** 0.5}.get(slip, d ** 0.5)


SLIPS = {"root": "the scores are not divided by sqrt(d)", "bytes": "the scores are divided by sqrt(d/4)",
         "zero": "the zero points are left out",
         "group": "every group has the scale of group 0",
         "head": "query head h reads KV head h % Hkv",
         "order": "the first code of a byte is taken from its highest bits"}


def try_scores(submission, rng, H, Hkv, T, tried, N=16, d=16):
    q, codes = normal(rng, H, d), draw_codes(rng, Hkv, T, d)
    groups = pieces_of(T, N)
    scale = (normal(rng, Hkv, groups, d).abs() + 0.2).half()
    zero = (2 * normal(rng, Hkv, groups, d)).half()
    packed, _ = guarded(bytes_of(codes), 255)
    out, whole = guarded(torch.full((H, T), -99.0), -7.0)
    submission.scores_kernel[groups, H](q.clone(), packed, scale, zero, out, T, H // Hkv, d // 4, N)
    tried = f"{tried} d = {d}, N = {N}."
    expect_untouched(whole, -7, tried)

    want = plain_scores(q, codes, scale, zero, N)
    wrong = (~torch.isclose(out.double(), want, atol=1e-3)).nonzero()
    if not len(wrong):
        return
    h, j = wrong[0].tolist()
    why = "".join(f" This comes if {words}." for slip, words in SLIPS.items()
                  if torch.allclose(out[h].double(), plain_scores(q, codes, scale, zero, N, slip)[h], atol=1e-3))
    expect(False, f"{tried} Query head {h} and token {j} have the score {out[h, j].item():.4g} (-99: nothing was "
           f"written); it should be {want[h, j].item():.4g}.{why}")


@check(points=8)
def scores_of_one_group(submission, rng):
    """scores_kernel: q.k / sqrt(d) of one head and one group"""
    try_scores(submission, rng, 1, 1, 16, "One head, 16 tokens.")


@check(points=6)
def scores_of_groups(submission, rng):
    """scores_kernel: each group has its own scales and zero points"""
    try_scores(submission, rng, 1, 1, 48, "One head, 48 tokens, so three groups.")


@check(points=5)
def scores_of_heads(submission, rng):
    """scores_kernel: query heads share a KV head"""
    try_scores(submission, rng, 4, 2, 16, "Four query heads, two KV heads, 16 tokens.")


@check(points=5)
def scores_at_the_end(submission, rng):
    """scores_kernel: the last group is shorter"""
    T = 16 + rng.randint(3, 13)
    try_scores(submission, rng, 1, 1, T, f"One head, {T} tokens: the last group has {T - 16}.")
