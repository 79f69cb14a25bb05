"""Assignment 1: affine codes, and packing them into bytes."""
import math

import torch

from tinykv.course.check import check, expect, expect_tensor, normal, shown

NUMBER, TITLE = 1, "affine codes and packing"
ANSWERS = ("tinykv.codecs", "tinykv.weights", "tinykv.triton_cache", "kernels")
BLANKS = {"tinykv/codecs/affine.py": ("Affine.encode", "Affine.decode", "Affine.range_of", "Affine.grid"),
          "tinykv/codecs/base.py": ("pack", "unpack")}


def max_code(bits):
    return 2 if bits == 1.5 else 2 ** bits - 1


def near(a, b, tolerance=2e-3):
    """Whether two numbers agree as 16-bit numbers do."""
    return math.isfinite(a) and abs(a - b) <= tolerance * abs(b) + 1e-7


# ---- task 1: grid

def try_grid(submission, lo, hi, bits, formula, scale, zero, hint):
    given = submission.grid(torch.tensor([lo, lo]), torch.tensor([hi, hi]), bits, formula)
    expect(isinstance(given, tuple) and len(given) == 2,
           f"grid has to return two tensors (scale, zero); yours gives {given!r}.")
    tried = f"grid for numbers from {lo:g} to {hi:g} with {bits} bits, formula {formula}:"
    for name, tensor, kind in zip(("scale", "zero"), given,
                                  ("numbers", "numbers" if formula == "offset" else "integers")):
        expect_tensor(tensor, kind, (2,), f"The {name} of two groups ({formula})")
    dtypes = (torch.float16, torch.float16 if formula == "offset" else torch.int16)
    for name, tensor, dtype in zip(("scale", "zero"), given, dtypes):
        expect(tensor.dtype == dtype,
               f"{tried} {name} is {tensor.dtype}; it should be {dtype}. It is rounded here to what is "
               "stored, so that encoder and decoder work on the same grid.")
    got_scale, got_zero = given[0][0].item(), given[1][0].item()
    expect(near(got_scale, scale), f"{tried} the scale is {got_scale:.4g}; it should be {scale:.4g}. {hint}")
    expect(near(got_zero, zero), f"{tried} the zero point is {got_zero:.4g}; it should be {zero:.4g}. {hint}")


@check(points=4)
def grid_offset(submission, rng):
    """grid: scale and zero point of the formula "offset\""""
    for bits in (2, 3, 8, 1.5):
        lo, step = rng.randint(-8, 8) / 2, rng.choice((0.25, 0.5, 1.0, 2.0))
        try_grid(submission, lo, lo + step * max_code(bits), bits, "offset", step, lo,
                 f"There are {max_code(bits)} steps between {max_code(bits) + 1} levels, and z is min X.")


@check(points=3)
def grid_constant(submission, rng):
    """grid: a constant group has no scale of 0"""
    lo = rng.randint(1, 40) / 4
    for bits in (2, 4):
        try_grid(submission, lo, lo, bits, "offset", 1e-5, lo,
                 "max - min is 0, so the scale takes its floor of 1e-5: 0/0 would be no number.")


@check(points=5)
def grid_integer_zero(submission, rng):
    """grid: scale and zero point of the formula "integer-zero\""""
    for bits in (2, 3, 1.5):
        step, below = rng.choice((0.5, 1.0, 2.0)), rng.randint(0, 2)
        lo = -step * (below + rng.choice((0.2, -0.2, 0.3)))
        try_grid(submission, lo, lo + step * max_code(bits), bits, "integer-zero", step, below,
                 "z is -round(min X / s), a number of steps.")
    step, above = rng.choice((0.5, 1.0)), rng.randint(4, 9)
    try_grid(submission, step * above, step * (above + 3), 2, "integer-zero", step, -above,
             "z is -round(min X / s), below 0 where all numbers are above 0: it is not clamped to the codes.")


@check(points=3)
def grid_integer_far(submission, rng):
    """grid: numbers far from 0, close together, with the formula "integer-zero\""""
    value = 8.0 * rng.randint(60, 200)
    scale = value / 2 ** 13
    try_grid(submission, value, value, 2, "integer-zero", scale, -2 ** 13,
             "The scale has to be at least max(|min|, |max|) / 2**13; else z is a huge integer.")


# ---- task 1: encode and decode

def numbers_on(rng, scale, zero, bits, formula, n=8):
    """n numbers, none of them halfway between two levels, and their codes."""
    levels, top = [], max_code(bits)
    codes = [0, top, *(rng.randint(0, top) for _ in range(n - 2))]
    for code in codes:
        level = code * scale + zero if formula == "offset" else (code - zero) * scale
        levels.append(level + scale * rng.uniform(-0.4, 0.4))
    return levels, codes


def dtype_of_zero(formula):
    return torch.float16 if formula == "offset" else torch.int16


def try_encode(submission, x, scale, zero, bits, formula, codes, hint):
    given = submission.encode(torch.tensor(x), torch.tensor([scale]).half(),
                              torch.tensor([zero]).to(dtype_of_zero(formula)), bits, formula)
    expect_tensor(given, "integers", (len(x),), "What encode gives")
    expect(given.dtype == torch.uint8, f"Codes are uint8; encode gives {given.dtype}.")
    expect(given.tolist() == codes,
           f"encode of {shown(x)} with scale {scale:g}, zero {zero:g}, {bits} bits, formula {formula} "
           f"gives {given.tolist()}; it should be {codes}. {hint}")


@check(points=4)
def encode_codes(submission, rng):
    """encode: the codes of eight numbers"""
    for bits, formula in ((2, "offset"), (3, "integer-zero"), (1.5, "offset"), (8, "offset"),
                          (2, "integer-zero")):
        scale = rng.choice((0.25, 0.5, 2.0))
        zero = rng.randint(-8, 8) / 2 if formula == "offset" else rng.randint(1, 2)
        x, codes = numbers_on(rng, scale, zero, bits, formula)
        try_encode(submission, x, scale, zero, bits, formula, codes,
                   "q = round((x - z) / s)." if formula == "offset" else "q = round(x / s) + z.")


@check(points=3)
def encode_clamps(submission, rng):
    """encode: a number beyond the grid has the nearest code that there is"""
    for bits in (2, 1.5):
        far, top = float(rng.randint(20, 90)), max_code(bits)
        try_encode(submission, [-far, 0.0, 1.0, far], 1.0, 0.0, bits, "offset", [0, 0, 1, top],
                   f"Codes are clamped to 0 .. {top}: beyond it they would not fit.")


@check(points=2)
def encode_half_to_even(submission, rng):
    """encode: halfway between two levels, the even code"""
    scale, zero = rng.choice((0.5, 1.0, 2.0)), float(rng.randint(-4, 4))
    x = [scale * (code + 0.5) + zero for code in range(7)]
    try_encode(submission, x, scale, zero, 3, "offset", [0, 2, 2, 4, 4, 6, 6],
               "torch.round takes the even neighbour; adding 0.5 and cutting off does not.")


@check(points=4)
def decode_codes(submission, rng):
    """decode: what codes are read as"""
    for formula in ("offset", "integer-zero"):
        scale, zero = rng.choice((0.25, 0.5, 2.0)), rng.randint(1, 3)
        codes = [rng.randint(0, 7) for _ in range(6)] + [0, 7]
        want = [c * scale + zero if formula == "offset" else (c - zero) * scale for c in codes]
        given = submission.decode(torch.tensor(codes, dtype=torch.uint8), torch.tensor([scale]).half(),
                                  torch.tensor([zero]).to(dtype_of_zero(formula)), formula)
        expect_tensor(given, "numbers", (8,), "What decode gives")
        expect(given.dtype == torch.float32, f"decode gives {given.dtype}; it should be torch.float32.")
        expect(given.tolist() == want,
               f"decode of {codes} with scale {scale:g}, zero {zero}, formula {formula} gives "
               f"{shown(given)}; it should be {shown(want)}. The formula is "
               + ("X' = s Q + z." if formula == "offset" else
                  "X' = s (Q - z); in uint8 the difference wraps around, so convert first."))


# ---- task 2: quantize

def groups_of(shape, axis, group):
    """[((b, h, i, j), tokens, channels)]: where a group's scale stands, and its tokens and
    channels."""
    B, H, T, d = shape
    found = []
    for b in range(B):
        for h in range(H):
            if axis == "token":
                found += [((b, h, t, j // group), [t], list(range(j, j + group)))
                          for t in range(T) for j in range(0, d, group)]
            else:
                found += [((b, h, t // group, c), list(range(t, min(t + group, T))), [c])
                          for t in range(0, T, group) for c in range(d)]
    return found


def try_quantize(submission, x, bits, axis, group, formula, ignore=None, hint=""):
    """Each group is held against the submission's own `grid` and `encode`, so that a fault of those
    costs their own points only."""
    B, H, T, d = x.shape
    given = submission.quantize(x.clone(), bits, axis, group, formula,
                                None if ignore is None else ignore.clone())
    expect(isinstance(given, tuple) and len(given) == 3,
           f"quantize has to return (codes, scale, zero); yours gives {type(given).__name__}.")
    codes, scale, zero = given
    small = (B, H, T, d // group) if axis == "token" else (B, H, -(-T // group), d)
    tried = (f"x of shape ({B}, {H}, {T}, {d}), {bits} bits, axis {axis}, groups of {group}, formula "
             f"{formula}:")
    expect_tensor(codes, "integers", x.shape, f"{tried} codes")
    expect_tensor(scale, "numbers", small, f"{tried} scale")
    expect_tensor(zero, "numbers" if formula == "offset" else "integers", small, f"{tried} zero")
    for where, tokens, channels in groups_of(x.shape, axis, group):
        b, h = where[:2]
        if ignore is not None:
            counted = [t for t in tokens if not ignore[b, h, t]]
        else:
            counted = tokens
        numbers = x[b, h][counted][:, channels].flatten()
        lo, hi = (numbers.min(), numbers.max()) if len(numbers) else (torch.zeros(()),) * 2
        want_scale, want_zero = submission.grid(lo[None], hi[None], bits, formula)
        what = (f"{tried} the group of tokens {tokens} and channels {channels} (sequence {b}, head {h})"
                f" has numbers from {lo:.3g} to {hi:.3g}")
        if len(counted) < len(tokens):
            what += f" without the ignored tokens {sorted(set(tokens) - set(counted))}"
        for name, got, want in (("scale", scale[where], want_scale), ("zero", zero[where], want_zero)):
            expect(near(float(got), float(want)),
                   f"{what}. Its {name} is {float(got):.4g}; your own grid gives {float(want):.4g} for "
                   f"this range. {hint}")
        got = codes[b, h][counted][:, channels].flatten()
        want = submission.encode(numbers, scale[where], zero[where], bits, formula)
        expect(torch.equal(got.int(), want.int()),
               f"{what}. Its codes are {got.tolist()}; your own encode gives {want.tolist()} on this "
               f"grid. {hint}")


def rows(rng, B, H, T, d):
    """Numbers whose range differs from token to token and from channel to channel."""
    token = torch.tensor([2.0 ** rng.randint(-2, 2) for _ in range(T)]).view(T, 1)
    channel = torch.tensor([2.0 ** rng.randint(-2, 3) for _ in range(d)])
    return normal(rng, B, H, T, d) * token * channel


@check(points=6)
def quantize_tokens(submission, rng):
    """quantize: a grid for each token and group of channels"""
    d = rng.choice((8, 12))
    for bits, formula in ((2, "offset"), (3, "integer-zero")):
        try_quantize(submission, rows(rng, 2, 2, 3, d), bits, "token", 4, formula,
                     hint="A group is G neighbouring channels of one token.")


@check(points=6)
def quantize_channels(submission, rng):
    """quantize: a grid for each channel and group of tokens"""
    for bits, formula in ((2, "offset"), (3, "integer-zero")):
        try_quantize(submission, rows(rng, 2, 2, 8, rng.choice((2, 3))), bits, "channel", 4, formula,
                     hint="A group is one channel of G neighbouring tokens.")


@check(points=4)
def quantize_short_group(submission, rng):
    """quantize: the last group of tokens may be shorter"""
    T = rng.choice((5, 6, 7))
    x = rows(rng, 1, 2, T, 3).abs() + 5
    try_quantize(submission, x, 2, "channel", 4, "offset", hint="What fills up the last group must not "
                 "count: a 0 is no number of the text.")
    x = rows(rng, 1, 1, 3, 2)
    try_quantize(submission, x, 2, "channel", 4, "offset", hint="A text may be shorter than a group.")


@check(points=5)
def quantize_ignored(submission, rng):
    """quantize: ignored tokens do not count for the range of their group"""
    x = rows(rng, 1, 2, 8, 2).abs() + 5
    ignore = torch.zeros(1, 2, 8, dtype=torch.bool)
    for head in range(2):
        t = rng.randint(0, 3)
        ignore[0, head, t], x[0, head, t] = True, 500.0
    try_quantize(submission, x, 2, "channel", 4, "offset", ignore,
                 "Only tokens that are not ignored have a say in the smallest and the largest number.")
    ignore[0, 0, :4] = True
    try_quantize(submission, x, 2, "channel", 4, "offset", ignore,
                 "A group of nothing but ignored tokens has the range 0 .. 0: no inf, no NaN.")


@check(points=4)
def dequantize_groups(submission, rng):
    """dequantize: every number from its own group's grid"""
    T, d = rng.choice((6, 7)), 8
    for axis, formula in (("token", "offset"), ("channel", "offset"), ("channel", "integer-zero")):
        codes = torch.tensor([[[[rng.randint(0, 3) for _ in range(d)] for _ in range(T)]] * 2])
        small = (1, 2, T, d // 4) if axis == "token" else (1, 2, -(-T // 4), d)
        scale = 2.0 ** torch.randint(-3, 4, small)
        zero = torch.randint(-4, 5, small).to(dtype_of_zero(formula))
        given = submission.dequantize(codes.to(torch.uint8), scale.half(), zero, axis, 4, formula)
        expect_tensor(given, "numbers", (1, 2, T, d), "What dequantize gives")
        for where, tokens, channels in groups_of((1, 2, T, d), axis, 4):
            b, h = where[:2]
            got = given[b, h][tokens][:, channels].flatten()
            of_group = codes[b, h][tokens][:, channels].flatten().to(torch.uint8)
            want = submission.decode(of_group, scale[where].half(), zero[where], formula)
            expect(torch.allclose(got, want, rtol=1e-5),
                   f"dequantize, axis {axis}, groups of 4, formula {formula}: tokens {tokens} and "
                   f"channels {channels} with codes {of_group.tolist()}, scale {scale[where]:g} and zero "
                   f"{zero[where]:g} are read as {shown(got)}; your own decode gives {shown(want)}.")


# ---- task 3: pack and unpack

def packed_by_hand(codes, bits):
    """The bytes of a list of codes."""
    if bits == 1.5:
        codes = codes + [0] * (-len(codes) % 5)
        return [sum(code * 3 ** i for i, code in enumerate(codes[at:at + 5]))
                for at in range(0, len(codes), 5)]
    stream = sum(code << (bits * i) for i, code in enumerate(codes))
    return [stream >> (8 * i) & 255 for i in range(-(-len(codes) * bits // 8))]


def try_pack(submission, codes, bits, hint):
    """codes: nested lists, (..., n)."""
    tensor = torch.tensor(codes, dtype=torch.uint8)
    given = submission.pack(tensor.clone(), bits)
    want = [packed_by_hand(row, bits) for row in tensor.flatten(0, -2).tolist()]
    expect_tensor(given, "integers", (*tensor.shape[:-1], len(want[0])), f"{bits} bits: what pack gives")
    expect(given.dtype == torch.uint8, f"Bytes are uint8; pack gives {given.dtype}.")
    for row, got, right in zip(tensor.flatten(0, -2).tolist(), given.flatten(0, -2).tolist(), want):
        expect(got == right, f"pack of {row} with {bits} bits gives {got}; it should be {right}. {hint}")


def draw_codes(rng, bits, rows, n):
    return [[rng.randint(0, max_code(bits)) for _ in range(n)] for _ in range(rows)]


@check(points=5)
def pack_whole_bytes(submission, rng):
    """pack: 1, 2, 4 and 8 bits, the first code in the lowest bits"""
    for bits in (2, 1, 4, 8):
        codes = draw_codes(rng, bits, 2, 8)
        codes[0][:2] = [max_code(bits), 0]  # high first would give another byte
        try_pack(submission, codes, bits, "The first code of a byte has its lowest bits.")


@check(points=3)
def pack_last_byte(submission, rng):
    """pack: rows that do not fill their last byte, in any number of dimensions"""
    for bits, n in ((2, 5), (4, 3), (1, 9)):
        codes = draw_codes(rng, bits, 4, n)
        try_pack(submission, [[codes[:2], codes[2:]]], bits,
                 "Each row ends with a byte of its own, filled up with 0.")


@check(points=4)
def pack_three_levels(submission, rng):
    """pack: three levels, five codes to a byte"""
    for n in (5, 10, 7):
        try_pack(submission, draw_codes(rng, 1.5, 2, n), 1.5,
                 "Code i of a byte counts 3**i: 1, 3, 9, 27, 81. The largest byte is 242.")


@check(points=5)
def pack_across_bytes(submission, rng):
    """pack: 3, 5, 6 and 7 bits, where a code may lie across two bytes"""
    for bits in (3, 5, 6, 7):
        for n in (8, rng.choice((3, 5))):
            try_pack(submission, draw_codes(rng, bits, 2, n), bits,
                     "The bits of all codes make one stream, lowest first, cut into bytes.")


@check(points=6)
def unpack_codes(submission, rng):
    """unpack: the codes, from bytes that were packed right"""
    for bits, n in ((2, 8), (4, 5), (1, 9), (8, 3), (1.5, 7), (3, 8), (5, 3), (6, 4), (7, 5)):
        codes = draw_codes(rng, bits, 2, n)
        packed = torch.tensor([packed_by_hand(row, bits) for row in codes], dtype=torch.uint8)
        given = submission.unpack(packed.clone(), bits, n)
        expect_tensor(given, "integers", (2, n), f"{bits} bits, n = {n}: what unpack gives")
        for row, got, right in zip(packed.tolist(), given.tolist(), codes):
            expect(got == right, f"unpack of {row} with {bits} bits and n = {n} gives {got}; it should "
                   f"be {right}.")


# ---- task 4: stored_bits

@check(points=4)
def bits_in_memory(submission, rng):
    """stored_bits: codes and metadata"""
    T, d = rng.choice((64, 96)), rng.choice((32, 64))
    row = {2: d // 4, 3: -(-3 * d // 8), 1.5: -(-d // 5)}
    for bits, axis, group in ((2, "token", 16), (3, "channel", 32), (1.5, "token", 32)):
        groups = T * d // group
        want = (8 * T * row[bits] + 32 * groups) / (T * d)
        given = float(submission.stored_bits(T, d, bits, axis, group))
        expect(abs(given - want) < 1e-6,
               f"stored_bits for T = {T}, d = {d}, {bits} bits, axis {axis}, groups of {group} gives "
               f"{given:.4f}; it should be {want:.4f}: {T} rows of {row[bits]} bytes, and {groups} groups "
               "of 16 + 16 bits.")
    want = (8 * 5 * row[2] + 32 * 2 * d) / (5 * d)
    given = float(submission.stored_bits(5, d, 2, "channel", 4))
    expect(abs(given - want) < 1e-6,
           f"stored_bits for T = 5, d = {d}, 2 bits, axis channel, groups of 4 gives {given:.4f}; it should "
           f"be {want:.4f}: the short group has a scale and a zero point, too.")
