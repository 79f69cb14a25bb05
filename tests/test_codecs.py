"""The codecs against plain Python: bit strings for packing, and every formula number by number.

The oracles share no code with the codecs: see plain.py. Each `check_` takes what it checks as an argument, so that
the wrong codecs at the end of this file can be checked, too.
"""
import itertools
import math

import pytest
import torch
from codec_mutants import CODEC_MUTANTS, PACK_MUTANTS
from hypothesis import given, settings
from hypothesis import strategies as st
from plain import f16, f32, max_code, plain_code, plain_grid

from tinykv import UserError
from tinykv.codecs.affine import FORMULAS, Affine
from tinykv.codecs.base import TERNARY, Codec, Codes, Exact, pack, row_bytes, unpack
from tinykv.codecs.nonuniform import NonUniform, SparseCodes

BITS = [1, TERNARY, 2, 3, 4, 5, 6, 7, 8]
AXES = ["token", "channel"]
D = 16  # channels of a row


def plain_pack(codes, bits):
    """One row of codes as bytes. Where a byte holds whole codes, byte i of n has the codes i, i + n, i + 2n, ..., the
    first in the lowest digit; else they are a string of bits, the lowest first."""
    if bits == TERNARY or 8 % bits == 0:
        base, digits = (3, 5) if bits == TERNARY else (2 ** bits, 8 // bits)
        n = math.ceil(len(codes) / digits)
        return [sum(c * base ** i for i, c in enumerate(codes[j::n])) for j in range(n)]
    string = "".join(format(c, f"0{bits}b")[::-1] for c in codes)
    return [int(string[j:j + 8][::-1], 2) for j in range(0, len(string), 8)]


def groups_of(T, axis, group):
    """The cells (token, channel) of each group of T rows."""
    if axis == "token":
        return [[(t, c) for c in range(i, i + group)] for t in range(T) for i in range(0, D, group)]
    return [[(t, c) for t in range(i, min(i + group, T))] for i in range(0, T, group) for c in range(D)]


def plain_rows(x, ignore, bits, axis, group, formula, static=None):
    """One head's rows x (lists) -> codes, decoded rows and grids (lists). static: the static grid of each channel."""
    code, read, grids = [[0] * D for _ in x], [[0.0] * D for _ in x], []
    for cells in groups_of(len(x), axis, group):
        counted = [x[t][c] for t, c in cells if axis == "token" or not ignore[t]]
        s, z = plain_grid(counted, bits, formula) if static is None else static[cells[0][1]]
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


def none_ignored(x):
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
    code = st.integers(0, max_code(bits))
    return draw(st.lists(st.lists(code, min_size=n, max_size=n), min_size=1, max_size=3)), bits


@given(rows_of_codes())
def test_packing_is_the_plain_one(case):
    check_pack(pack, unpack, *case)


@pytest.mark.parametrize("bits", BITS)
def test_a_row_takes_the_bytes_of_its_bits(bits):
    for n in range(1, 41):
        expected = math.ceil(n / 5) if bits == TERNARY else len(range(0, n * bits, 8))
        packed = pack(torch.zeros(2, n, dtype=torch.long), bits)
        assert row_bytes(n, bits) == expected == packed.shape[-1]


def static_grids(lo, hi, span, bits, formula):
    """The static grid of each channel, ranges shared by `span` channels. lo, hi (D)."""
    bounds = list(zip(lo.tolist(), hi.tolist()))
    return [plain_grid(sum(bounds[c - c % span:c - c % span + span], ()), bits, formula) for c in range(D)]


def check_formula(codec, bits, axis, formula, group, static, T=13):
    """Codes, metadata and decoded rows of a codec equal the plain ones. Some groups hold ignored rows."""
    x = rows(seed=T, T=T)
    B, Hkv = x.shape[:2]
    ignore = none_ignored(x)  # (B, Hkv, T)
    ignore[0, :, T // 2] = ignore[1, :, :1] = True
    c = codec(bits, D, axis, group, formula, static)
    size = group or (D if axis == "token" else T)
    static_of = [None] * Hkv  # the static grids of each head
    if static:
        known = rows(seed=99).float()
        lo, hi = known.amin((0, 2)), known.amax((0, 2))  # (Hkv, D) both
        c.set_range(lo, hi)
        span = size if axis == "token" else 1  # channels that share a range
        static_of = [static_grids(lo[h], hi[h], span, bits, formula) for h in range(Hkv)]

    codes = c.encode(x, ignore)
    read = c.decode(codes)
    for b, h in itertools.product(range(B), range(Hkv)):
        one, ignored = x[b, h].tolist(), ignore[b, h].tolist()
        expected, decoded, grids = plain_rows(one, ignored, bits, axis, size, formula, static_of[h])
        if not static:
            scales, zeros = codes.scale[b, h].flatten().tolist(), codes.zero[b, h].flatten().tolist()
            assert list(zip(scales, zeros)) == grids
        assert codes.packed[b, h].tolist() == [plain_pack(row, bits) for row in expected]
        assert read[b, h].tolist() == decoded

    metadata = 0 if static else 4 * len(groups_of(T, axis, size))  # 16 bits each, two a group
    assert codes.nbytes == B * Hkv * (T * row_bytes(D, bits) + metadata)
    shared = Hkv * (D // size if axis == "token" else D)
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


def with_tables(codec, x):
    """The codec with all its tables, from the ranges of rows x."""
    lo, hi = x.float().amin((0, 2)), x.float().amax((0, 2))  # (Hkv, d) both
    if isinstance(codec, NonUniform):
        codec.levels = torch.linspace(-1, 1, 2 ** codec.bits).half()
        if codec.axis == "channel":
            codec.set_range(lo.flatten(), hi.flatten())
    else:
        codec.set_range(lo, hi)
    return codec


def codecs_to_calibrate():
    return [*[Affine(2, D, axis, 8, formula, static=True) for axis in AXES for formula in FORMULAS],
            *[NonUniform(3, 2, D, axis, 0.1) for axis in AXES]]


def test_a_codec_without_calibration_is_refused():
    for codec in codecs_to_calibrate():
        assert codec.passes > 0
        assert codec.calibrated() == {} and codec.offline_bytes == 0
        with pytest.raises(UserError, match="calibrate"):
            codec.encode(rows(13))


def test_calibrated_tables_serve_another_codec():
    """`calibrated` gives all that calibration found, at its true size; `tables` names it, and `restore` takes it."""
    x = rows(13)
    for codec, other in zip(codecs_to_calibrate(), codecs_to_calibrate()):
        tables = with_tables(codec, x).calibrated()
        assert isinstance(codec, Codec) and set(tables) <= set(codec.tables)
        assert codec.offline_bytes == sum(t.untyped_storage().nbytes() for t in tables.values()) > 0
        assert all(t.element_size() == 2 for t in tables.values())
        other.restore(tables)
        assert torch.equal(other.decode(other.encode(x)), codec.decode(codec.encode(x)))


def test_only_declared_tables_are_restored():
    """A file of tables cannot set anything else of a codec."""
    for codec in codecs_to_calibrate():
        before = dict(vars(codec))
        codec.restore({"bits": torch.tensor(8), "encode": torch.tensor(0), "__class__": torch.tensor(0)})
        assert vars(codec) == before


def test_nothing_is_calibrated_where_there_is_nothing_to_calibrate():
    for codec in (Exact(), Affine(2, D), Affine(2, D, "channel", 8, "integer-zero")):
        codec.encode(rows(13))
        assert codec.passes == 0
        assert codec.calibrated() == {} and codec.offline_bytes == 0


@pytest.mark.parametrize("n_windows", [1, 3])
@pytest.mark.parametrize("axis", AXES)
def test_a_static_range_leaves_kept_tokens_out(axis, n_windows):
    """Windows one after the other, with some tokens kept: the range of all the other tokens."""
    windows = rows(14, B=n_windows)  # (W, Hkv, T, d)
    kept = none_ignored(windows)  # (W, Hkv, T)
    kept[0, 0, 2] = kept[-1, :, 6] = True
    codec = Affine(2, D, axis, 8, "offset", static=True)
    codec.begin(0, *kept.shape[::2])
    for window, kept_here in zip(windows, kept):
        codec.collect(0, window, kept_here if kept_here.any() else None, None)
    codec.fit(0)

    other = Affine(2, D, axis, 8, "offset", static=True)
    lo = windows.float().masked_fill(kept[..., None], math.inf).amin((0, 2))  # (Hkv, d)
    hi = windows.float().masked_fill(kept[..., None], -math.inf).amax((0, 2))  # (Hkv, d)
    other.set_range(lo, hi)
    assert torch.equal(codec.scale, other.scale) and torch.equal(codec.zero, other.zero)
    assert not codec.needs_gradient(0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits_change_nothing(dtype):
    x = rows(1, dtype=dtype)
    codes = Exact().encode(x, none_ignored(x))
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
    step = (width / max_code(bits)).clamp(min=1e-5)
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
    c.set_range(x.float().amin((0, 2)), x.float().amax((0, 2)))
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


@pytest.mark.one_in(5)
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


@pytest.mark.one_in(5)
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
        assert (read - x).abs().max() <= size / max_code(bits) * 2.1


def check_ignored_rows_do_not_count(codec, formula, bits=2):
    """Per channel, what a ignored row holds changes neither the grid nor the codes of the other rows."""
    x = rows(8)
    ignore = none_ignored(x)
    ignore[0, 0, 0] = ignore[0, 1, 3:6] = ignore[1, :, 12] = ignore[1, 1, 8:12] = True
    other = x.masked_fill(ignore[..., None], 60000.0)
    c = codec(bits, D, "channel", 8, formula)
    a, b = c.encode(x, ignore), c.encode(other, ignore)
    assert torch.equal(a.scale, b.scale) and torch.equal(a.zero, b.zero)
    assert torch.equal(a.packed[~ignore], b.packed[~ignore])
    first = c.encode(x[:1, :1, 1:8])  # the first group of head 0 without its ignored row
    assert torch.equal(a.scale[:1, :1, :1], first.scale) and torch.equal(a.packed[:1, :1, 1:8], first.packed)


@pytest.mark.parametrize("formula", FORMULAS)
def test_ignored_rows_do_not_count(formula):
    check_ignored_rows_do_not_count(Affine, formula)


@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("axis", AXES)
def test_all_rows_ignored(axis, formula):
    x = rows(9)
    c = Affine(2, D, axis, 8, formula)
    codes = c.encode(x, torch.ones(x.shape[:3], dtype=torch.bool))
    assert torch.isfinite(c.decode(codes)).all()
    assert torch.isfinite(codes.scale).all()


def check_append(codec, bits, axis, static):
    """Blocks encoded one after the other are the blocks encoded at once; only the last may be partial."""
    x = rows(10, T=21)
    c = codec(bits, D, axis, 8, "offset", static)
    if static:
        c.set_range(x.float().amin((0, 2)), x.float().amax((0, 2)))
    whole = c.encode(x)
    parts = c.encode(x[:, :, :8]).append(c.encode(x[:, :, 8:16])).append(c.encode(x[:, :, 16:]))
    for name in ("packed", "scale", "zero"):
        a, b = getattr(whole, name), getattr(parts, name)
        assert (a is None and b is None) if static and name != "packed" else torch.equal(a, b)
    assert torch.equal(c.decode(parts), c.decode(whole))
    assert parts.nbytes == whole.nbytes


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("bits", BITS)
def test_append_is_concatenation(bits, axis, static):
    check_append(Affine, bits, axis, static)


def test_append_of_exact_rows():
    x = rows(11)
    assert torch.equal(Exact().encode(x[:, :, :5]).append(Exact().encode(x[:, :, 5:])).packed, x)


def test_codes_hold_what_they_say():
    """nbytes is the storage behind the tensors: nothing decoded, nothing hidden behind a view."""
    for formula, zero in (("offset", torch.float16), ("integer-zero", torch.int16)):
        codes = Affine(2, D, "channel", 8, formula).encode(rows(12))
        held = [codes.packed, codes.scale, codes.zero]
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


# Non-uniform levels and sparse outliers

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


def plain_token(row, ignored, axis, share, static):
    """One token's numbers, ignored or not: (x' of all, the channels of its outliers, the grid of each channel)."""
    counted = [c for c in range(len(row)) if not ignored[c]]
    if axis == "token":
        out = furthest(row, counted, round(share * len(row)))
        inside = [row[c] for c in counted if c not in out]
        if not counted:  # the whole token is ignored: the range of all its numbers
            inside = row
        grid = [plain_range(inside)] * len(row)
    else:
        grid = static
        out = {c for c in counted if share and f32(abs(row[c] - grid[c][0])) > grid[c][1]}
    normal = [f32(f32(x - mid) / half) for x, (mid, half) in zip(row, grid)]
    return normal, out, grid


def plain_level(x, levels):
    """The number of the nearest level, of two as near the lower."""
    return min(range(len(levels)), key=lambda i: (abs(x - levels[i]), i))


@st.composite
def non_uniform_cases(draw):
    """(codec, rows (B, Hkv, T, d), ignore (B, Hkv, T) or None). Half of the numbers are small integers: many ties."""
    bits, heads, width = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.sampled_from([4, 8]))
    axis = draw(st.sampled_from(AXES))
    codec = NonUniform(bits, heads, width, axis, draw(st.sampled_from([0, 0.01, 0.05, 0.1, 0.2, 0.3])))
    step = 1 / 32
    places = draw(st.lists(st.integers(-32, 32), min_size=2 ** bits, max_size=2 ** bits, unique=True))
    codec.levels = torch.tensor(sorted(places)).half() * step
    shape = draw(st.integers(1, 3)), heads, draw(st.integers(1, 5)), width
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2 ** 30)))
    whole = torch.randint(-8, 9, shape, generator=rng).float()
    x = torch.where(torch.rand(shape, generator=rng) < 0.5, whole, 4 * torch.randn(shape, generator=rng))
    x = x.to(draw(st.sampled_from([torch.float16, torch.bfloat16])))
    if axis == "channel":
        lo = torch.randint(-6, 3, (heads * width,), generator=rng).float()
        codec.set_range(lo, lo + torch.randint(0, 9, lo.shape, generator=rng) / 2)
    share = draw(st.sampled_from([None, 0.2, 0.8, 1.0]))
    return codec, x, None if share is None else torch.rand(shape[:3], generator=rng) < share


def cells(codec, x, ignore):
    """Each token of a case: (b, t, its h numbers, which of them are ignored)."""
    ignore = none_ignored(x) if ignore is None else ignore
    for b, t in itertools.product(range(x.shape[0]), range(x.shape[2])):
        numbers = x[b, :, t].flatten().tolist()  # all heads of the token are one row
        ignored = ignore[b, :, t].repeat_interleave(codec.width).tolist()
        yield b, t, numbers, ignored


def static_of(codec):
    return list(zip(codec.mid.tolist(), codec.half.tolist())) if codec.axis == "channel" else None


def check_normalize(codec, x, ignore):
    normal, out, mid, half = codec.normalize(x, ignore)
    for b, t, row, ignored in cells(codec, x, ignore):
        expected, outliers, grid = plain_token(row, ignored, codec.axis, codec.outliers, static_of(codec))
        assert normal[b, t].tolist() == expected
        assert outliers == set(out[b, t].nonzero().flatten().tolist())
        if codec.axis == "token":
            assert (mid[b, t].item(), half[b, t].item()) == grid[0]
            assert mid.dtype == half.dtype == torch.float16


def check_non_uniform(codec, x, ignore):
    """Codes, outliers, metadata, decoded rows and bytes are the plain ones. An ignored number may be any finite one."""
    (B, _, T, _), h = x.shape, codec.channels
    codes = codec.encode(x, ignore)
    read = codec.decode(codes).transpose(1, 2).flatten(2)  # (B, T, h)
    assert read.dtype == torch.float32 and torch.isfinite(read).all()
    code = unpack(codes.packed[:, 0], codec.bits, h)  # (B, T, h)
    levels = codec.levels.tolist()

    # codes, decoded numbers and metadata, token by token
    outliers_of = {}  # (t, b): [(number, channel)] of each token's outliers
    for b, t, row, ignored in cells(codec, x, ignore):
        normal, out, grid = plain_token(row, ignored, codec.axis, codec.outliers, static_of(codec))
        outliers_of[t, b] = [(row[c], c) for c in sorted(out)]
        for c in range(h):
            if ignored[c]:
                continue
            mid, half = grid[c]
            level = plain_level(normal[c], levels)
            assert code[b, t, c] == level
            assert read[b, t, c] == (row[c] if c in out else f32(f32(levels[level] * half) + mid))
        if codec.axis == "token":
            assert (codes.zero[b, 0, t].item(), codes.scale[b, 0, t].item()) == grid[0]
    if codec.axis == "channel":
        assert codes.scale is None and codes.zero is None

    # the outliers as a CSR matrix: token by token, then text by text
    count = 0
    if codec.outliers:
        in_order, row_end = [], {}
        for key in sorted(outliers_of):
            in_order += outliers_of[key]
            row_end[key] = len(in_order)
        count = len(in_order)
        assert list(zip(codes.values.tolist(), codes.columns.tolist())) == in_order
        assert [codes.row_end[b, 0, t, 0] for t, b in row_end] == list(row_end.values())
        assert codes.row_end.shape == (B, 1, T, 1)
        assert codes.values.dtype == x.dtype
        assert codes.columns.dtype == torch.int16 and codes.row_end.dtype == torch.int32

    # bytes: of each token its codes, its metadata, and where its outliers end; 4 bytes an outlier
    of_token = row_bytes(h, codec.bits) + (4 if codec.axis == "token" else 0) + (4 if codec.outliers else 0)
    assert codes.nbytes == B * T * of_token + 4 * count
    assert B * T == 1 or codes.nbytes == storage(codes)  # a single row: see below


def storage(codes):
    """Bytes behind the tensors, also where one is a view."""
    return sum(t.untyped_storage().nbytes() for t in vars(codes).values() if t is not None)


@pytest.mark.parametrize("bits", BITS)
def test_a_single_row_holds_no_more_than_its_bytes(bits):
    """Codes of one row that ends within a word: no bytes are held after its last."""
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
    codec, x, ignore = case
    cuts = sorted(c for c in cuts if c < x.shape[2])
    ignores = [None] * (len(cuts) + 1) if ignore is None else ignore.tensor_split(cuts, dim=2)
    codes, *later = [codec.encode(part, s) for part, s in zip(x.tensor_split(cuts, dim=2), ignores)]
    for part in later:
        codes = codes.append(part)
    whole = codec.encode(x, ignore)
    assert type(codes) is type(whole) is (SparseCodes if codec.outliers else Codes)
    for name, tensor in vars(whole).items():
        other = getattr(codes, name)
        assert other is None if tensor is None else torch.equal(tensor, other) and tensor.dtype == other.dtype, name
    assert torch.equal(codec.decode(codes), codec.decode(whole)) and codes.nbytes == whole.nbytes


@given(non_uniform_cases())
def test_what_an_ignored_row_holds_does_not_matter(case):
    codec, x, ignore = case
    ignore = none_ignored(x) if ignore is None else ignore
    a, b = codec.encode(x, ignore), codec.encode(x.masked_fill(ignore[..., None], 60000.0), ignore)
    assert torch.equal(codec.decode(a)[~ignore], codec.decode(b)[~ignore])
    for name in ("row_end", "values", "columns"):
        one, other = getattr(a, name, None), getattr(b, name, None)
        assert other is None if one is None else torch.equal(one, other), name
    for name in ("scale", "zero"):
        one, other = getattr(a, name), getattr(b, name)  # (B, 1, T, 1), or None
        some = ~ignore.all(1, keepdim=True)  # (B, 1, T): a token that is ignored as a whole has a range of its own
        assert other is None if one is None else torch.equal(one[some], other[some]), name


def test_a_row_that_is_ignored_as_a_whole_can_still_be_read():
    """A token that is evicted later is read as its codes, so these codes must stand for its own numbers."""
    codec = level_codec("token", [i / 8 for i in range(-8, 8)], outliers=0.2, heads=2)
    x = torch.randn(1, 2, 3, 4, generator=torch.Generator().manual_seed(0)).half()
    ignore = torch.zeros(1, 2, 3, dtype=torch.bool)
    ignore[:, :, 1] = True
    codes = codec.encode(x, ignore)
    assert codes.row_end.flatten().tolist() == [2, 2, 4]
    error = (codec.decode(codes) - x)[:, :, 1].abs().max()
    assert error <= (x[:, :, 1].max() - x[:, :, 1].min()) / 16 + 0.01


def level_codec(axis, levels, outliers=0.0, heads=1, width=4):
    """A codec of given levels; per channel with the range -1 .. 1."""
    codec = NonUniform((len(levels) - 1).bit_length(), heads, width, axis, outliers)
    codec.levels = torch.tensor(levels).half()
    if axis == "channel":
        codec.set_range(-torch.ones(heads * width), torch.ones(heads * width))
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
        assert 777.0 in codes.values.tolist() and len(codes.values) == (1 if axis == "channel" else 10)
        assert torch.equal(codec.decode(codes).half(), x)


def test_the_outliers_of_a_token():
    """round(outliers * h) of them, furthest from the median and not from the mean; of equals the lower channel."""
    x = torch.tensor([[0, 0, 0, 100, 0, 0, -60, 0], [5, 0, -5, 5, -5, 1, 1, 1], [2] * 8]).half().view(1, 1, 3, 8)
    for outliers, expected in ((0.05, [[], [], []]), (0.125, [[3], [2], [0]]), (0.25, [[3, 6], [2, 4], [0, 1]]),
                               (0.3, [[3, 6], [2, 4], [0, 1]]), (0.4, [[0, 3, 6], [0, 2, 4], [0, 1, 2]])):
        codes = level_codec("token", [-1.0, 1.0], outliers, width=8).encode(x)
        ends = [0, *codes.row_end.flatten().tolist()]
        assert [codes.columns.tolist()[a:b] for a, b in zip(ends, ends[1:])] == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("axis", AXES)
def test_outliers_keep_their_sixteen_bits(axis, dtype):
    """Numbers with the whole precision of either type, some beyond fp16's range or below its smallest."""
    x = torch.linspace(-0.4, 0.4, 8).to(dtype).repeat(2, 1)
    odd = [1.0078125, -60928.0] if dtype == torch.float16 else [3.0 * 2 ** 100, -1.0078125]
    x[0, 2], x[1, 5] = odd
    codec = level_codec(axis, [-1.0, 1.0], 1 / 8, width=8)
    codes = codec.encode(x.view(1, 1, 2, 8))
    assert codes.values.dtype == dtype and codes.values.tolist() == odd
    read = codec.decode(codes)[0, 0]
    assert [read[0, 2].item(), read[1, 5].item()] == odd


@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("outliers", [0, 0.1, 0.49])
@pytest.mark.parametrize("value", [0.0, 1.0, -0.1, 6e-8, 65504.0, -65504.0])
@pytest.mark.parametrize("axis", AXES)
def test_a_constant_row_gives_no_nan(axis, value, outliers, ignored):
    """All numbers the same, and all rows ignored: finite, and where they are not ignored, what they were."""
    codec = NonUniform(2, 2, D, axis, outliers)
    codec.levels = torch.tensor([-1, -0.25, 0.25, 1]).half()
    x = torch.full((2, 2, 3, D), value).half()
    if axis == "channel":
        codec.set_range(x[0, :, 0].flatten().float(), x[0, :, 0].flatten().float())
    codes = codec.encode(x, ~none_ignored(x) if ignored else None)
    read = codec.decode(codes)
    assert torch.isfinite(read).all() and all(torch.isfinite(t).all() for t in codec.normalize(x)[2:])
    if not ignored:
        assert ((read - x.float()).abs() <= 1.01e-5).all()
    elif outliers:
        assert len(codes.values) == 0


@pytest.mark.parametrize("outliers", [0, 0.1])
@pytest.mark.parametrize("size", [1e-30, 1e-7, 1e3, 6e4, 1e6, 1e30])
@pytest.mark.parametrize("axis", AXES)
def test_any_magnitude_stays_finite_in_non_uniform_codes(axis, size, outliers):
    """As for integers: bf16 rows beyond what 16-bit metadata hold may saturate, but not turn into inf or NaN."""
    x = rows(7).float()
    x = (x / x.abs().max() * size).bfloat16()
    codec = with_tables(NonUniform(3, 2, D, axis, outliers), x)
    codes = codec.encode(x)
    assert torch.isfinite(codec.decode(codes)).all()


# The tests are tested

def named(x):
    return getattr(x, "__name__", None)


@pytest.mark.parametrize("codec, check, arguments", CODEC_MUTANTS, ids=named)
def test_mutant_fails(codec, check, arguments):
    globals()[check](Affine, *arguments)
    with pytest.raises(AssertionError):
        globals()[check](codec, *arguments)


@pytest.mark.parametrize("wrong_pack, wrong_unpack, bits", PACK_MUTANTS, ids=named)
def test_pack_mutant_fails(wrong_pack, wrong_unpack, bits):
    codes = [[i % (max_code(bits) + 1) for i in range(11)], [max_code(bits)] * 11]
    check_pack(pack, unpack, codes, bits)
    with pytest.raises(AssertionError):
        check_pack(wrong_pack, wrong_unpack, codes, bits)
