"""The codecs against plain Python: bit strings for packing, and every formula number by number.

The oracles share no code with the codecs. They compute in Python floats and round each step to 32 or 16 bits,
as the codecs do, so codes and metadata have to be equal, not close. Each `check_` takes what it checks as an
argument, so that `mutants.py` can hand it something wrong.
"""
import itertools
import math
import struct

import mutants
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tinykv import UserError, codecs
from tinykv.codecs import FORMULAS, TERNARY, Affine, Codec, Codes, Exact, NonUniform, SparseCodes, row_bytes

BITS = [1, TERNARY, 2, 3, 4, 5, 6, 7, 8]
AXES = ["token", "channel"]
D = 16  # channels of a row


def levels_of(bits):
    return 2 if bits == TERNARY else 2 ** bits - 1


def f32(x):
    return struct.unpack("f", struct.pack("f", x))[0]


def f16(x):
    return struct.unpack("e", struct.pack("e", x))[0]


def clip(x, lo, hi):
    return min(max(x, lo), hi)


def plain_pack(codes, bits):
    """One row of codes as bytes: a string of bits, or five base-3 digits a byte; the lowest first in both."""
    if bits == TERNARY:
        return [sum(c * 3 ** i for i, c in enumerate(codes[j:j + 5])) for j in range(0, len(codes), 5)]
    string = "".join(format(c, f"0{bits}b")[::-1] for c in codes)
    return [int(string[j:j + 8][::-1], 2) for j in range(0, len(string), 8)]


def plain_grid(values, bits, formula):
    """The scale and zero point of one group, from the values that count; if none does, as if all were 0."""
    lo, hi = (min(values), max(values)) if values else (0.0, 0.0)
    step = f32(f32(hi - lo) / levels_of(bits))
    if formula == "offset":
        return f16(clip(step, f32(1e-5), 6e4)), f16(clip(lo, -65504.0, 65504.0))
    step = max(step, max(abs(lo), abs(hi)) / 2 ** 13)
    s = f16(clip(step, f32(1e-5), 1e4))
    return s, round(clip(f32(-lo / s), -1e4, 1e4))


def plain_code(x, s, z, bits, formula):
    """-> the code of x and what it is read as. Python's round is half to even."""
    code = round(f32(f32(x - z) / s)) if formula == "offset" else round(f32(x / s)) + z
    code = clip(code, 0, levels_of(bits))
    return code, f32(f32(s * code) + z) if formula == "offset" else f32(s * (code - z))


def groups_of(T, axis, group):
    """The cells (token, channel) of each group of T rows."""
    if axis == "token":
        return [[(t, c) for c in range(i, i + group)] for t in range(T) for i in range(0, D, group)]
    return [[(t, c) for t in range(i, min(i + group, T))] for i in range(0, T, group) for c in range(D)]


def plain_rows(x, skip, bits, axis, group, formula, fixed=None):
    """One head's rows x (lists) -> codes, decoded rows and grids (lists). fixed: static grids, by channel."""
    code, read, grids = [[0] * D for _ in x], [[0.0] * D for _ in x], []
    for cells in groups_of(len(x), axis, group):
        counted = [x[t][c] for t, c in cells if axis == "token" or not skip[t]]
        s, z = plain_grid(counted, bits, formula) if fixed is None else fixed[cells[0][1]]
        grids.append((s, z))
        for t, c in cells:
            code[t][c], read[t][c] = plain_code(x[t][c], s, z, bits, formula)
    return code, read, grids


def rows(seed, B=2, Hkv=2, T=13, dtype=torch.float16):
    """Rows (B, Hkv, T, D) with channels of all sizes, one-signed, zero and constant, and an outlier token."""
    x = torch.randn(B, Hkv, T, D, generator=torch.Generator().manual_seed(seed))
    x = x * torch.logspace(-2, 1.5, D)
    x[..., 3] = x[..., 3].abs() + 1
    x[..., 4] = -x[..., 4].abs() - 20
    x[..., 5] = 0
    x[..., 6] = -0.75
    x[:, :, T // 2] *= 30
    return x.to(dtype)


def no_skip(x):
    return torch.zeros(x.shape[:3], dtype=torch.bool)


def check_pack(pack, unpack, codes, bits):
    n = len(codes[0])
    packed = pack(torch.tensor(codes), bits)
    assert packed.dtype == torch.uint8
    assert packed.tolist() == [plain_pack(row, bits) for row in codes]
    assert packed.shape[-1] == row_bytes(n, bits)
    assert unpack(packed, bits, n).tolist() == codes


@st.composite
def rows_of_codes(draw):
    bits = draw(st.sampled_from(BITS))
    n = draw(st.integers(1, 40))
    code = st.integers(0, levels_of(bits))
    return draw(st.lists(st.lists(code, min_size=n, max_size=n), min_size=1, max_size=3)), bits


@given(rows_of_codes())
def test_packing_is_the_plain_bit_string(case):
    check_pack(codecs.pack, codecs.unpack, *case)


@pytest.mark.parametrize("bits", BITS)
def test_a_row_takes_the_bytes_of_its_bits(bits):
    for n in range(1, 41):
        expected = math.ceil(n / 5) if bits == TERNARY else len(range(0, n * bits, 8))
        packed = codecs.pack(torch.zeros(2, n, dtype=torch.long), bits)
        assert row_bytes(n, bits) == expected == packed.shape[-1]


def fixed_grids(lo, hi, span, bits, formula):
    """The static grid of each channel, ranges shared by `span` channels. lo, hi (D)."""
    bounds = list(zip(lo.tolist(), hi.tolist()))
    return [plain_grid(sum(bounds[c - c % span:c - c % span + span], ()), bits, formula) for c in range(D)]


def check_formula(codec, bits, axis, formula, group, static, T=13):
    """Codes, metadata and decoded rows of a codec equal the plain ones. Some groups hold skipped rows."""
    x = rows(seed=T, T=T)
    skip = no_skip(x)
    skip[0, :, T // 2] = skip[1, :, :1] = True
    c = codec(bits, D, axis, group, formula, static)
    size = group or (D if axis == "token" else T)
    if static:
        known = rows(seed=99)
        lo, hi = known.amin((0, 2)), known.amax((0, 2))  # (Hkv, D) both
        c.fix(lo.float(), hi.float())
    codes = c.encode(x, skip)
    read = c.decode(codes)
    for b in range(len(x)):
        for h in range(x.shape[1]):
            span = size if axis == "token" else 1
            fixed = fixed_grids(lo[h], hi[h], span, bits, formula) if static else None
            plain = plain_rows(x[b, h].tolist(), skip[b, h].tolist(), bits, axis, size, formula, fixed)
            expected, decoded, grids = plain
            if not static:
                metadata = (m[b, h].flatten().tolist() for m in (codes.scale, codes.zero))
                assert list(zip(*metadata)) == grids
            assert codes.q[b, h].tolist() == [plain_pack(row, bits) for row in expected]
            assert read[b, h].tolist() == decoded
    metadata = 0 if static else 4 * len(groups_of(T, axis, size))  # 16 bits each, two a group
    assert codes.nbytes == len(x) * x.shape[1] * (T * row_bytes(D, bits) + metadata)
    shared = x.shape[1] * (D // size if axis == "token" else D)
    assert c.offline_bytes == (4 * shared if static else 0)


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("bits", BITS)
def test_codes_equal_the_plain_formula(bits, axis, formula, static):
    check_formula(Affine, bits, axis, formula, 8, static)


@pytest.mark.parametrize("group, T", [(4, 1), (4, 3), (4, 4), (4, 5), (16, 13), (None, 13), (1, 5)])
@pytest.mark.parametrize("axis", AXES)
def test_group_sizes_and_partial_groups(axis, group, T):
    for formula in FORMULAS:
        check_formula(Affine, 3, axis, formula, group, False, T)


def test_a_setting_that_cannot_be_is_refused():
    for group in (5, 32, 0, -4):
        with pytest.raises(ValueError, match="group"):
            Affine(2, D, "token", group)
    with pytest.raises(ValueError, match="group"):
        Affine(2, D, "channel", 0)
    for bits in (0, 2.5, 9, 16, -1):
        with pytest.raises(ValueError, match="bits"):
            Affine(bits, D)
    for bits in (0, TERNARY, 2.5, 9, 16, -1):
        with pytest.raises(ValueError, match="bits"):
            NonUniform(bits, 2, D, "token", 0.01)


def learns(codec, x):
    """The codec with all its tables, from ranges that rows x have."""
    lo, hi = x.float().amin((0, 2)), x.float().amax((0, 2))  # (Hkv, d) both
    if isinstance(codec, NonUniform):
        codec.levels = torch.linspace(-1, 1, 2 ** codec.bits).half()
        if codec.axis == "channel":
            codec.fix(lo.flatten(), hi.flatten())
    else:
        codec.fix(lo, hi)
    return codec


def learning_codecs():
    return [*[Affine(2, D, axis, 8, formula, static=True) for axis in AXES for formula in FORMULAS],
            *[NonUniform(3, 2, D, axis, 0.1) for axis in AXES]]


def test_a_codec_that_has_learned_nothing_is_refused():
    for codec in learning_codecs():
        assert codec.learned() == {} and codec.offline_bytes == 0
        with pytest.raises(UserError, match="calibrate"):
            codec.encode(rows(13))


def test_what_was_learned_serves_another_codec():
    """`learned` is all that there is to know, at its true size; `tables` names it."""
    x = rows(13)
    for codec, other in zip(learning_codecs(), learning_codecs()):
        tables = learns(codec, x).learned()
        assert isinstance(codec, Codec) and set(tables) <= set(codec.tables)
        assert codec.offline_bytes == sum(t.untyped_storage().nbytes() for t in tables.values()) > 0
        assert all(t.element_size() == 2 for t in tables.values())
        for name, table in tables.items():
            setattr(other, name, table)
        assert torch.equal(other.decode(other.encode(x)), codec.decode(codec.encode(x)))


def test_nothing_is_learned_where_there_is_nothing_to_learn():
    for codec in (Exact(), Affine(2, D), Affine(2, D, "channel", 8, "integer-zero")):
        codec.encode(rows(13))
        assert codec.learned() == {} and codec.offline_bytes == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits_change_nothing(dtype):
    x = rows(1, dtype=dtype)
    codes = Exact().encode(x, no_skip(x))
    assert torch.equal(Exact().decode(codes), x)
    assert codes.nbytes == 2 * x.numel()
    assert Exact().offline_bytes == 0


def spread(x, axis, group):
    """The range of each value's group, shaped like x."""
    if axis == "token":
        g = x.unflatten(-1, (-1, group))
        return (g.amax(-1, keepdim=True) - g.amin(-1, keepdim=True)).expand_as(g).flatten(-2)
    parts = [p.amax(2, keepdim=True) - p.amin(2, keepdim=True) for p in x.split(group, dim=2)]
    return torch.cat([p.expand(-1, -1, n.shape[2], -1) for p, n in zip(parts, x.split(group, dim=2))], dim=2)


@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("bits", BITS)
def test_error_bound(bits, axis, formula):
    """Half a step for "offset"; a whole one for "integer-zero": rounding z shifts the grid by up to a half.

    Both beside what 16-bit metadata rounds: half a unit in the last place of the scale, at every level, and
    of the minimum (or the floor of 2**-13 of the largest |x|, halved).
    """
    x = rows(2).float()
    c = Affine(bits, D, axis, 8, formula)
    error = (c.decode(c.encode(x)) - x).abs()
    width = spread(x, axis, 8)
    step = (width / levels_of(bits)).clamp(min=1e-5)
    bound = step * (0.5 if formula == "offset" else 1.0) + width * 2 ** -11 + x.abs() * 2 ** -12 + 1e-6
    if formula == "offset":
        bound += (x.abs() + width) * 2 ** -11
    assert (error <= bound).all(), f"error {(error / bound).max():.2f} times the bound"


@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("bits", BITS)
def test_idempotent_on_its_own_grid(bits, axis, formula):
    x = rows(3)
    c = Affine(bits, D, axis, 8, formula, static=True)
    c.fix(x.float().amin((0, 2)), x.float().amax((0, 2)))
    once = c.decode(c.encode(x))
    assert torch.equal(c.decode(c.encode(once)), once)


@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("axis", AXES)
def test_more_bits_mean_less_error(axis, formula):
    x = torch.randn(2, 2, 64, D, generator=torch.Generator().manual_seed(4)).half().float()
    mse = []
    for bits in BITS:
        c = Affine(bits, D, axis, 16, formula)
        mse.append((c.decode(c.encode(x)) - x).square().mean().item())
    assert all(more < less for less, more in zip(mse, mse[1:])), mse


def check_constant(codec, formula, axis, bits, value):
    """A group of one value, or of one token: the error stays within 16 bits' rounding, or the floor of s."""
    for T in (1, 8, 9):
        x = torch.full((1, 2, T, D), value).half().float()
        c = codec(bits, D, axis, 8, formula)
        read = c.decode(c.encode(x))
        assert ((read - x).abs() <= x.abs() * 2 ** -11 + 1e-5).all(), read.flatten()[0]


@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, 0.1, 37.5, -1000.0, 65504.0, 6e-8])
def test_a_constant_group_comes_back(value, bits, axis, formula):
    check_constant(Affine, formula, axis, bits, value)


@pytest.mark.parametrize("formula", FORMULAS)
def test_a_single_token_is_nearly_exact_per_channel(formula):
    """A channel group of one token has one value a channel, however different the channels are."""
    x = rows(5, T=9).float()
    c = Affine(2, D, "channel", 8, formula)
    read = c.decode(c.encode(x))[:, :, 8]
    assert ((read - x[:, :, 8]).abs() <= x[:, :, 8].abs() * 2 ** -11 + 1e-5).all()


@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("offset", [100.0, -100.0])
def test_groups_of_one_sign_use_all_their_codes(offset, axis, formula):
    """The zero point may lie outside the codes: a group far from 0 has the error of a group around 0."""
    x = (torch.randn(1, 2, 16, D, generator=torch.Generator().manual_seed(6)) + offset).half().float()
    c = Affine(4, D, axis, 16, formula)
    error = (c.decode(c.encode(x)) - x).abs().max()
    assert error < spread(x, axis, 16).max() / 15 + abs(offset) * 2 ** -10


@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("size", [1e-30, 1e-7, 1e3, 6e4, 1e6, 1e30])
def test_any_magnitude_stays_finite(size, bits, axis, formula):
    """Beyond what 16 bits hold values may saturate, as bf16 rows could, but not turn into inf or NaN."""
    x = rows(7).float()
    x = x / x.abs().max() * size
    c = Affine(bits, D, axis, 8, formula)
    read = c.decode(c.encode(x))
    assert torch.isfinite(read).all()
    if 1e-5 < size < 6e4:
        assert (read - x).abs().max() <= size / levels_of(bits) * 2.1


def check_skipped_rows_do_not_count(codec, formula, bits=2):
    """Per channel, what a skipped row holds changes neither the grid nor the codes of the other rows."""
    x = rows(8)
    skip = no_skip(x)
    skip[0, 0, 0] = skip[0, 1, 3:6] = skip[1, :, 12] = skip[1, 1, 8:12] = True
    other = x.masked_fill(skip[..., None], 60000.0)
    c = codec(bits, D, "channel", 8, formula)
    a, b = c.encode(x, skip), c.encode(other, skip)
    assert torch.equal(a.scale, b.scale) and torch.equal(a.zero, b.zero)
    assert torch.equal(a.q[~skip], b.q[~skip])
    first = c.encode(x[:1, :1, 1:8])  # the first group of head 0 without its skipped row
    assert torch.equal(a.scale[:1, :1, :1], first.scale) and torch.equal(a.q[:1, :1, 1:8], first.q)


@pytest.mark.parametrize("formula", FORMULAS)
def test_skipped_rows_do_not_count(formula):
    check_skipped_rows_do_not_count(Affine, formula)


@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("axis", AXES)
def test_all_rows_skipped(axis, formula):
    x = rows(9)
    c = Affine(2, D, axis, 8, formula)
    codes = c.encode(x, torch.ones(x.shape[:3], dtype=torch.bool))
    assert torch.isfinite(c.decode(codes)).all()
    assert torch.isfinite(codes.scale).all()


def check_append(codec, bits, axis, static):
    """Blocks written one after the other are the blocks written at once; only the last may be partial."""
    x = rows(10, T=21)
    c = codec(bits, D, axis, 8, "offset", static)
    if static:
        c.fix(x.float().amin((0, 2)), x.float().amax((0, 2)))
    whole = c.encode(x)
    parts = c.encode(x[:, :, :8]).append(c.encode(x[:, :, 8:16])).append(c.encode(x[:, :, 16:]))
    for name in ("q", "scale", "zero"):
        a, b = getattr(whole, name), getattr(parts, name)
        assert (a is None and b is None) if static and name != "q" else torch.equal(a, b)
    assert torch.equal(c.decode(parts), c.decode(whole))
    assert parts.nbytes == whole.nbytes


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("bits", BITS)
def test_append_is_concatenation(bits, axis, static):
    check_append(Affine, bits, axis, static)


def test_append_of_exact_rows():
    x = rows(11)
    assert torch.equal(Exact().encode(x[:, :, :5]).append(Exact().encode(x[:, :, 5:])).q, x)


def test_codes_hold_what_they_say():
    """nbytes is the storage behind the tensors: nothing decoded, nothing hidden behind a view."""
    for formula, zero in (("offset", torch.float16), ("integer-zero", torch.int16)):
        codes = Affine(2, D, "channel", 8, formula).encode(rows(12))
        held = [codes.q, codes.scale, codes.zero]
        assert codes.nbytes == sum(t.untyped_storage().nbytes() for t in held)
        assert isinstance(codes, Codes)
        assert [t.dtype for t in held] == [torch.uint8, torch.float16, zero]


def check_half_to_even(codec, formula):
    """Values in the middle between two codes go to the even one. The grid 0, 1, .., 15 is exact."""
    c = codec(4, D, "token", D, formula)
    x = torch.tensor([0.0, 15.0] + [i + 0.5 for i in range(14)]).view(1, 1, 1, D)
    assert c.decode(c.encode(x)).flatten().tolist() == [0, 15] + [round(i + 0.5) for i in range(14)]
    assert c.decode(c.encode(x)).flatten().tolist()[2:6] == [0, 2, 2, 4]


@pytest.mark.parametrize("formula", FORMULAS)
def test_rounding_is_half_to_even(formula):
    check_half_to_even(Affine, formula)


# ---- non-uniform levels and sparse outliers

def plain_range(values):
    """mid and half of the values that count; if none does, as if all were 0."""
    lo, hi = (min(values), max(values)) if values else (0.0, 0.0)
    return f16(f32(f32(lo + hi) / 2)), f16(max(f32(f32(hi - lo) / 2), f32(1e-5)))


def furthest(row, counted, n):
    """The n channels of those that count that lie furthest from their (lower) median; the first of equals."""
    if not counted:
        return set()
    median = sorted(row[c] for c in counted)[(len(counted) - 1) // 2]
    return set(sorted(counted, key=lambda c: (-f32(abs(row[c] - median)), c))[:n])


def plain_token(row, skipped, axis, share, fixed):
    """One token's h numbers, skipped or not, before levels: (x' of all, outliers, grid of each channel)."""
    counted = [c for c in range(len(row)) if not skipped[c]]
    if axis == "token":
        out = furthest(row, counted, round(share * len(row)))
        inside = [row[c] for c in counted if c not in out] if counted else row  # skipped as a whole: its own range
        grid = [plain_range(inside)] * len(row)
    else:
        grid = fixed
        out = {c for c in counted if share and f32(abs(row[c] - grid[c][0])) > grid[c][1]}
    return [f32(f32(x - mid) / half) for x, (mid, half) in zip(row, grid)], out, grid


def plain_level(x, levels):
    """The number of the nearest level, of two as near the lower."""
    return min(range(len(levels)), key=lambda i: (abs(x - levels[i]), i))


@st.composite
def non_uniform_cases(draw):
    """(codec, rows (B, Hkv, T, d), skip (B, Hkv, T) or None). Half of the numbers are small integers: many ties."""
    bits, heads, width = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.sampled_from([4, 8]))
    axis = draw(st.sampled_from(AXES))
    codec = NonUniform(bits, heads, width, axis, draw(st.sampled_from([0, 0.01, 0.05, 0.1, 0.2, 0.3])))
    step = 1 / 32
    places = draw(st.lists(st.integers(-32, 32), min_size=2 ** bits, max_size=2 ** bits, unique=True))
    codec.levels = torch.tensor(sorted(places)).half() * step
    shape = draw(st.integers(1, 3)), heads, draw(st.integers(1, 5)), width
    dice = torch.Generator().manual_seed(draw(st.integers(0, 2 ** 30)))
    whole = torch.randint(-8, 9, shape, generator=dice).float()
    x = torch.where(torch.rand(shape, generator=dice) < 0.5, whole, 4 * torch.randn(shape, generator=dice))
    x = x.to(draw(st.sampled_from([torch.float16, torch.bfloat16])))
    if axis == "channel":
        lo = torch.randint(-6, 3, (heads * width,), generator=dice).float()
        codec.fix(lo, lo + torch.randint(0, 9, lo.shape, generator=dice) / 2)
    share = draw(st.sampled_from([None, 0.2, 0.8, 1.0]))
    return codec, x, None if share is None else torch.rand(shape[:3], generator=dice) < share


def cells(codec, x, skip):
    """Each token of a case: (b, t, its h numbers, which of them are skipped)."""
    skip = no_skip(x) if skip is None else skip
    for b, of_text in enumerate(x.tolist()):
        for t in range(x.shape[2]):
            yield (b, t, [v for head in of_text for v in head[t]],
                   [s for head in skip[b].tolist() for s in [head[t]] * codec.width])


def fixed_of(codec):
    return list(zip(codec.mid.tolist(), codec.half.tolist())) if codec.axis == "channel" else None


def check_normalize(codec, x, skip):
    normal, out, mid, half = codec.normalize(x, skip)
    most = codec.channels if codec.axis == "channel" and codec.outliers else round(codec.outliers * codec.channels)
    assert (out is None) == (most == 0)
    for b, t, row, skipped in cells(codec, x, skip):
        expected, outliers, grid = plain_token(row, skipped, codec.axis, codec.outliers, fixed_of(codec))
        assert normal[b, t].tolist() == expected
        assert outliers == (set() if out is None else {c for c, o in enumerate(out[b, t].tolist()) if o})
        if codec.axis == "token":
            assert (mid[b, t].item(), half[b, t].item()) == grid[0]
            assert mid.dtype == half.dtype == torch.float16


def check_non_uniform(codec, x, skip):
    """Codes, outliers, metadata, decoded rows and bytes are the plain ones. A skipped number may be any finite one."""
    (B, _, T, _), h = x.shape, codec.channels
    codes = codec.encode(x, skip)
    read = codec.decode(codes).transpose(1, 2).flatten(2)  # (B, T, h)
    assert read.dtype == torch.float32 and torch.isfinite(read).all()
    code = codecs.unpack(codes.q[:, 0], codec.bits, h)  # (B, T, h)
    levels, stored = codec.levels.tolist(), {}
    for b, t, row, skipped in cells(codec, x, skip):
        normal, out, grid = plain_token(row, skipped, codec.axis, codec.outliers, fixed_of(codec))
        stored[t, b] = [(row[c], c) for c in sorted(out)]
        for c in range(h):
            mid, half = grid[c]
            level = plain_level(normal[c], levels)
            if not skipped[c]:
                assert code[b, t, c] == level
                assert read[b, t, c] == (row[c] if c in out else f32(f32(levels[level] * half) + mid))
        if codec.axis == "token":
            assert (codes.zero[b, 0, t].item(), codes.scale[b, 0, t].item()) == grid[0]
    if codec.axis == "channel":
        assert codes.scale is None and codes.zero is None
    count = 0
    if codec.outliers:
        in_order = [pair for key in sorted(stored) for pair in stored[key]]  # token by token, then text by text
        assert list(zip(codes.value.tolist(), codes.channel.tolist())) == in_order
        assert codes.value.dtype == x.dtype and (codes.channel.dtype, codes.end.dtype) == (torch.int16, torch.int32)
        assert codes.end.flatten().tolist() == [sum(len(v) for k, v in stored.items() if k <= (t, b))
                                                for b in range(B) for t in range(T)]
        count = len(in_order)
    expected = B * T * (row_bytes(h, codec.bits) + (4 if codec.axis == "token" else 0) + (4 if codec.outliers else 0))
    assert codes.nbytes == expected + 4 * count
    assert B * T == 1 or codes.nbytes == storage(codes)  # a single row: see below


def storage(codes):
    """Bytes behind the tensors, also where one is a view."""
    return sum(t.untyped_storage().nbytes() for t in vars(codes).values() if t is not None)


@pytest.mark.parametrize("bits", BITS)
def test_a_single_row_holds_no_more_than_its_bytes(bits):
    """Codes of a row that ends within a word, alone: the rest of the word is let go."""
    codes = Affine(bits, 4).encode(torch.zeros(1, 1, 1, 4))
    assert codes.nbytes == storage(codes) == row_bytes(4, bits) + 4


@given(non_uniform_cases())
def test_normalizing_is_the_plain_formula(case):
    check_normalize(*case)


@given(non_uniform_cases())
@settings(max_examples=150)
def test_non_uniform_codes_equal_the_plain_ones(case):
    check_non_uniform(*case)


@given(non_uniform_cases(), st.sets(st.integers(1, 4), min_size=1))
def test_appending_non_uniform_codes_is_encoding_at_once(case, cuts):
    codec, x, skip = case
    cuts = sorted(c for c in cuts if c < x.shape[2])
    skips = [None] * (len(cuts) + 1) if skip is None else skip.tensor_split(cuts, dim=2)
    codes, *later = [codec.encode(part, s) for part, s in zip(x.tensor_split(cuts, dim=2), skips)]
    for part in later:
        codes = codes.append(part)
    whole = codec.encode(x, skip)
    assert type(codes) is type(whole) is (SparseCodes if codec.outliers else Codes)
    for name, tensor in vars(whole).items():
        other = getattr(codes, name)
        assert other is None if tensor is None else torch.equal(tensor, other) and tensor.dtype == other.dtype, name
    assert torch.equal(codec.decode(codes), codec.decode(whole)) and codes.nbytes == whole.nbytes


@given(non_uniform_cases())
def test_what_a_skipped_row_holds_does_not_matter(case):
    codec, x, skip = case
    skip = no_skip(x) if skip is None else skip
    a, b = codec.encode(x, skip), codec.encode(x.masked_fill(skip[..., None], 60000.0), skip)
    assert torch.equal(codec.decode(a)[~skip], codec.decode(b)[~skip])
    for name in ("end", "value", "channel"):
        one, other = getattr(a, name, None), getattr(b, name, None)
        assert other is None if one is None else torch.equal(one, other), name
    for name in ("scale", "zero"):
        one, other = getattr(a, name), getattr(b, name)  # (B, 1, T, 1), or None
        some = ~skip.all(1, keepdim=True)  # (B, 1, T): a token that is skipped as a whole has a range of its own
        assert other is None if one is None else torch.equal(one[some], other[some]), name


def test_a_row_that_is_skipped_as_a_whole_can_still_be_read():
    """A token that is let go later is read as its code, so this must not be the code of nothing."""
    codec = level_codec("token", [i / 8 for i in range(-8, 8)], outliers=0.2, heads=2)
    x = torch.randn(1, 2, 3, 4, generator=torch.Generator().manual_seed(0)).half()
    skip = torch.zeros(1, 2, 3, dtype=torch.bool)
    skip[:, :, 1] = True
    codes = codec.encode(x, skip)
    assert codes.end.flatten().tolist() == [2, 2, 4]
    error = (codec.decode(codes) - x)[:, :, 1].abs().max()
    assert error <= (x[:, :, 1].max() - x[:, :, 1].min()) / 16 + 0.01


def level_codec(axis, levels, outliers=0.0, heads=1, width=4):
    """A codec of given levels; per channel with the range -1 .. 1."""
    codec = NonUniform((len(levels) - 1).bit_length(), heads, width, axis, outliers)
    codec.levels = torch.tensor(levels).half()
    if axis == "channel":
        codec.fix(-torch.ones(heads * width), torch.ones(heads * width))
    return codec


def test_a_number_between_two_levels_goes_to_the_lower():
    codec = level_codec("channel", [-1.0, -0.5, 0.5, 1.0])
    read = codec.decode(codec.encode(torch.tensor([-0.75, 0.0, 0.75, 0.7505]).half().view(1, 1, 1, 4)))
    assert read.flatten().tolist() == [-1.0, -0.5, 0.5, 1.0]


def test_levels_that_fell_together():
    """Fewer different numbers than levels in the calibration text: the nearest is still the nearest."""
    codec = level_codec("channel", [-1.0, -1.0, 0.25, 0.25, 0.25, 0.25, 0.5, 1.0], width=8)
    x = torch.tensor([-1.0, -0.5, -0.25, 0.2, 0.25, 0.3, 0.4, 1.0]).half()
    assert codec.decode(codec.encode(x.view(1, 1, 1, 8))).flatten().tolist() == [-1, -1, 0.25, 0.25, 0.25, 0.25, 0.5, 1]


@pytest.mark.parametrize("axis", AXES)
def test_an_outlier_comes_back_at_its_own_place(axis):
    """One number of each text, token and head in turn: what is put back is put back there and nowhere else."""
    codec = level_codec(axis, [-1.0, -0.5, 0.5, 1.0], 1 / 12, heads=3)
    for place in itertools.product(range(2), range(3), range(5), range(4)):
        x = torch.full((2, 3, 5, 4), 0.5).half()
        x[place] = 777.0
        codes = codec.encode(x)
        assert 777.0 in codes.value.tolist() and len(codes.value) == (1 if axis == "channel" else 10)
        assert torch.equal(codec.decode(codes).half(), x)


def test_the_outliers_of_a_token():
    """round(outliers * h) of them, furthest from the median and not from the mean; of equals the lower channel."""
    x = torch.tensor([[0, 0, 0, 100, 0, 0, -60, 0], [5, 0, -5, 5, -5, 1, 1, 1], [2] * 8]).half().view(1, 1, 3, 8)
    for outliers, expected in ((0.05, [[], [], []]), (0.125, [[3], [2], [0]]), (0.25, [[3, 6], [2, 4], [0, 1]]),
                               (0.3, [[3, 6], [2, 4], [0, 1]]), (0.4, [[0, 3, 6], [0, 2, 4], [0, 1, 2]])):
        codes = level_codec("token", [-1.0, 1.0], outliers, width=8).encode(x)
        ends = [0, *codes.end.flatten().tolist()]
        assert [codes.channel.tolist()[a:b] for a, b in zip(ends, ends[1:])] == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("axis", AXES)
def test_outliers_keep_their_sixteen_bits(axis, dtype):
    """Numbers with the whole precision of either type, some beyond fp16's range or below its smallest."""
    x = torch.linspace(-0.4, 0.4, 8).to(dtype).repeat(2, 1)
    odd = [1.0078125, -60928.0] if dtype == torch.float16 else [3.0 * 2 ** 100, -1.0078125]
    x[0, 2], x[1, 5] = odd
    codec = level_codec(axis, [-1.0, 1.0], 1 / 8, width=8)
    codes = codec.encode(x.view(1, 1, 2, 8))
    assert codes.value.dtype == dtype and codes.value.tolist() == odd
    read = codec.decode(codes)[0, 0]
    assert [read[0, 2].item(), read[1, 5].item()] == odd


@pytest.mark.parametrize("skipped", [False, True])
@pytest.mark.parametrize("outliers", [0, 0.1, 0.49])
@pytest.mark.parametrize("value", [0.0, 1.0, -0.1, 6e-8, 65504.0, -65504.0])
@pytest.mark.parametrize("axis", AXES)
def test_a_constant_row_gives_no_nan(axis, value, outliers, skipped):
    """All numbers the same, and all rows skipped: finite, and where they are not skipped, what they were."""
    codec = NonUniform(2, 2, D, axis, outliers)
    codec.levels = torch.tensor([-1, -0.25, 0.25, 1]).half()
    x = torch.full((2, 2, 3, D), value).half()
    if axis == "channel":
        codec.fix(x[0, :, 0].flatten().float(), x[0, :, 0].flatten().float())
    codes = codec.encode(x, ~no_skip(x) if skipped else None)
    read = codec.decode(codes)
    assert torch.isfinite(read).all() and all(torch.isfinite(t).all() for t in codec.normalize(x)[2:])
    if not skipped:
        assert ((read - x.float()).abs() <= 1.01e-5).all()
    elif outliers:
        assert len(codes.value) == 0


@pytest.mark.parametrize("outliers", [0, 0.1])
@pytest.mark.parametrize("size", [1e-30, 1e-7, 1e3, 6e4, 1e6, 1e30])
@pytest.mark.parametrize("axis", AXES)
def test_any_magnitude_stays_finite_in_non_uniform_codes(axis, size, outliers):
    """As for integers: bf16 rows beyond what 16-bit metadata hold may saturate, but not turn into inf or NaN."""
    x = rows(7).float()
    x = (x / x.abs().max() * size).bfloat16()
    codec = learns(NonUniform(3, 2, D, axis, outliers), x)
    codes = codec.encode(x)
    assert torch.isfinite(codec.decode(codes)).all()


# ---- the tests are tested

def named(x):
    return getattr(x, "__name__", None)


@pytest.mark.parametrize("codec, check, arguments", mutants.CODEC_MUTANTS, ids=named)
def test_mutant_fails(codec, check, arguments):
    globals()[check](Affine, *arguments)
    with pytest.raises(AssertionError):
        globals()[check](codec, *arguments)


@pytest.mark.parametrize("pack, unpack, bits", mutants.PACK_MUTANTS, ids=named)
def test_pack_mutant_fails(pack, unpack, bits):
    codes = [[i % (levels_of(bits) + 1) for i in range(11)], [levels_of(bits)] * 11]
    check_pack(codecs.pack, codecs.unpack, codes, bits)
    with pytest.raises(AssertionError):
        check_pack(pack, unpack, codes, bits)
