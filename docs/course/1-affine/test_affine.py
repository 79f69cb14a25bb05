"""Assignment 1, affine codes: grids, groups, packing.

Numbers are round, so that ties of rounding and all bounds are met exactly."""
import pytest
import torch

FORMULAS = ("offset", "integer-zero")
BITS = (1, 1.5, 2, 3, 4, 5, 6, 7, 8)
AXES = "; text, head, token or group, channel or group"  # of tensors
EIGHT = [-3.0, -2.2, -1.2, -1.0, -0.2, 0.8, 1.6, 3.0]


def top(bits):
    """The largest code."""
    return 2 if bits == 1.5 else 2 ** bits - 1


# The page

@pytest.mark.points(14)
def test_page(sub, rng, same):
    """the page: grid, decode"""
    for _ in range(20):
        B, H, T, W = rng.sizes(2, 2, 3, 3)
        low = rng.normal(1, H, 1, 8) * 3
        high = low + rng.of((0.5, 0.7, 3, 50), 1, H, 1, 8)  # each third is far from a tie, or fp16 has it
        same.call(sub.grid, low, high, hint="Both are numbers that fp16 has, as they are stored, in fp32. Four levels "
                  "are three steps apart.", tolerance=0, names="scale|zero")
        codes, d = rng.of(range(256), B, H, T, W).to(torch.uint8), rng.choice((1, 4 * W))  # a value's grid, or a key's
        scale, zero = rng.of((0.5, 1, 3), 1, H, 1, d), rng.normal(1, H, 1, d)
        same.call(sub.decode, codes, scale, zero, hint="`encode` says which channel's code is where in a byte.")


# Task 1

@pytest.mark.points(4)
def test_eight_numbers(sub, rng, same):
    """grid, encode, decode: the handout's eight numbers, and four"""
    for numbers, bits, formula in ((EIGHT, 2, "offset"), (EIGHT[:7] + [59.0], 2, "offset"),
                                   ([-0.8, 0.3, 1.3, 2.2], 2, "integer-zero"),
                                   ([-0.8, 0.3, 1.3, 2.2], 1.5, "integer-zero"), (rng.normal(8).tolist(), 3, "offset")):
        x = torch.tensor(numbers)
        scale, zero = same.call(sub.grid, x.min(), x.max(), bits, formula, hint="The largest code is 2^b - 1.",
                              names="scale|zero")
        codes = sub.encode(x, scale, zero, bits, formula)
        same([codes, sub.decode(codes, scale, zero, formula)], f"{numbers}, one group, in {bits} bits, {formula}: "
             "codes, uint8, and what they are read as, fp32", names="codes|what they are read as")


@pytest.mark.points(10)
def test_grid(sub, rng, same):
    """grid: both formulas, and every bound"""
    ends = (0.0, 1e-6, 0.01, 1.0, 3.0, 5.5, 100.0, 4000.0, 6e4, 7e4, 3e5, 1e7, 1e9)
    spans = (0.0, 1e-6, 1e-4, 0.01, 0.5, 1.0, 3.0, 7.0, 255.0, 1e4, 6e4, 2e5, 1e7)
    for case in range(150):
        bits, formula = rng.choice(BITS), rng.choice(FORMULAS)
        lo = rng.of(ends, 6) * rng.of((-1, 1), 6)
        hi = lo + rng.of(spans, 6)
        if case == 0:  # both bounds of the scale at once
            formula, lo, hi = "integer-zero", torch.tensor([1e9, -1e9]), torch.tensor([1e9, -1e9])
        elif rng.random() < 0.2:  # lo in the middle between two steps
            step = rng.of((0.5, 1, 4), 6)
            lo = (rng.of(range(-9, 9), 6) + 0.5) * step
            hi = lo + top(bits) * step
        tried = list(zip(lo.tolist(), hi.tolist()))
        scale, zero = sub.grid(lo, hi, bits, formula)
        for i, ends in enumerate(tried):  # one by one: a small number is compared as a small one
            same([scale[i], zero[i], lo[i], hi[i]], f"grid of (lo, hi) = {ends}, {bits} bits, {formula}. The zero "
                 "point is computed from the stored scale.", names="scale|zero|lo|hi")


@pytest.mark.points(10)
def test_codes(sub, rng, same):
    """encode, decode: half to even, clamped to 0 and the largest code, in fp32"""
    scale, steps = torch.tensor(rng.sample(range(1, 60), 30))[:, None].half() / 100, torch.arange(15) + 0.5
    same.call(sub.encode, scale.float() * steps, scale, 0 * scale, 4, "offset", hint="(x - z) / s is a division.")
    for _ in range(120):
        bits, formula = rng.choice(BITS), rng.choice(FORMULAS)
        n = top(bits)
        scale = rng.of((0.25, 0.5, 1, 2), 3, 1).half()
        steps = rng.of((-1000, -200, -n, -1, 0, 1, 3), 3, 1)
        zero = steps.to(torch.int16) if formula == "integer-zero" else (steps * scale).half()
        origin = -zero * scale.float() if formula == "integer-zero" else zero.float()
        quarters = rng.of((*range(-8, 4 * n + 9), 2 ** 18), 3, 8)  # of a step: ties, too, and one that is far off
        x = origin + scale.float() * (quarters / 4)
        same.call(sub.encode, x, scale, zero, bits, formula, hint="Codes are rounded half to even.")
        odd = (scale * rng.of((1, 1.1), 3, 1)).half()  # fp16 does not have all multiples of the second
        same.call(sub.decode, rng.of(range(n + 1), 3, 8).to(torch.uint8), odd, zero, formula, hint="In fp32.")


# Task 2

@pytest.mark.points(5)
def test_groups_of_eight_numbers(sub, rng, same):
    """quantize, dequantize: which numbers share a grid"""
    x, other = torch.tensor(EIGHT), rng.normal(8)
    for axis, group, shaped in (("token", 8, x.view(1, 1, 1, 8)), ("token", 4, x.view(1, 1, 1, 8)),
                                ("channel", 4, x.view(1, 1, 8, 1)), ("channel", 3, x.view(1, 1, 8, 1)),
                                ("token", 2, x.view(1, 1, 2, 4)), ("channel", 2, x.view(1, 1, 4, 2)),
                                ("token", 4, other.view(1, 1, 1, 8)), ("channel", 3, other.view(1, 1, 8, 1))):
        codes = sub.quantize(shaped, 2, axis, group)
        same([codes, sub.dequantize(*codes, axis, group)], f"quantize and dequantize x = {shaped.tolist()} in 2 bits, "
             f"axis {axis}, groups of {group}. A short last group has its own range.",
             names="quantize|dequantize, codes|scale|zero")
    ignore = torch.tensor([[[True, False, False, False, True, True, True, True]]])
    for formula in FORMULAS:
        same.call(sub.quantize, x.view(1, 1, 8, 1), 2, "channel", 4, formula, ignore,
                  then=lambda found: [found[0][:, :, 1:4], found[1].clamp(min=1e-5), found[2]],
                  hint="A group of nothing but ignored tokens has the range 0 .. 0.", names="codes|scale|zero")


@pytest.mark.points(14)
def test_groups(sub, rng, same):
    """quantize, dequantize: any shape, both axes, ignored tokens"""
    for _ in range(80):
        B, H, groups = rng.sizes(2, 3, 3)
        bits, formula, axis = rng.choice(BITS[:5]), rng.choice(FORMULAS), rng.choice(("token", "channel"))
        group, T = rng.choice(((2, 2), (2, 6), (4, 3), (4, 4), (4, 5), (4, 7), (4, 11)))  # 5: one number alone
        # numbers of a group differ by more than `grid`'s bounds, of which another test asks
        x = rng.normal(B, H, T, groups * group) / 4 + 2 * (torch.arange(groups * group) + torch.arange(T)[:, None]) % 8
        x = (x + rng.choice((-20, 0, 0, 7))) * rng.choice((0.01, 1, 50, 400))
        ignore = None
        if axis == "channel" and group == 4 and rng.random() < 0.8:
            ignore = torch.arange(T) % 4 == rng.of(range(4), B, H, 1)  # (B, H, T): one of each four
            x[ignore] *= 100
        unseen = torch.tensor(False) if ignore is None else ignore[..., None]
        same.call(sub.quantize, x, bits, axis, group, formula, ignore, hint="Codes are 0 here where they are ignored.",
                  then=lambda found, unseen=unseen: [found[0].masked_fill(unseen, 0), *found[1:]],
                  names="codes|scale|zero")
        codes = rng.of(range(top(bits) + 1), *x.shape).to(torch.uint8)
        numbers = -(-T // group) if axis == "channel" else groups
        shape = (B, H, T, numbers) if axis == "token" else (B, H, numbers, groups * group)
        scale, zero = rng.of((0.5, 1, 3), *shape).half(), rng.of((-5, 0, 2), *shape)
        zero = zero.half() if formula == "offset" else zero.to(torch.int16)
        same.call(sub.dequantize, codes, scale, zero, axis, group, formula)


# Task 3

@pytest.mark.points(5)
def test_bytes_of_eight_numbers(sub, rng, same):
    """pack, unpack: the first code in the lowest bits"""
    for codes, bits in (([0, 0, 1, 1, 1, 2, 2, 3], 2), ([1, 0, 1], 1), ([5, 1, 7, 2], 3), ([2, 0, 1, 0, 0, 2], 1.5),
                        (rng.choices(range(4), k=8), 2)):
        packed = sub.pack(torch.tensor(codes, dtype=torch.uint8), bits)
        same([packed, sub.unpack(packed, bits, len(codes))], f"pack and unpack {codes} in {bits} bits; the end of the "
             "bytes is filled up with 0", names="packed|unpacked")


@pytest.mark.points(14)
def test_packing(sub, rng, same):
    """pack, unpack: 1 to 8 bits and three levels, any length and shape"""
    for i in range(90):
        bits, n, shape = BITS[i % 9], rng.randint(1, 21), rng.choice(((), (3,), (2, 1, 3)))
        same.call(sub.pack, rng.of(range(top(bits) + 1), *shape, n).to(torch.uint8), bits)
        width = -(-n // 5) if bits == 1.5 else -(-n * bits // 8)
        same.call(sub.unpack, rng.of(range(243 if bits == 1.5 else 256), *shape, width).to(torch.uint8), bits, n)


# Task 4

@pytest.mark.points(4)
def test_stored_bits(sub, rng, same):
    """stored_bits: packed codes in rows of whole bytes, and 32 bits for each group"""
    for _ in range(60):
        bits, axis, group = rng.choice(BITS), rng.choice(("token", "channel")), rng.choice((4, 8, 16))
        T, d = rng.randint(1, 50), group * rng.randint(1, 5)
        same.call(sub.stored_bits, T, d, bits, axis, group, tolerance=1e-6)
