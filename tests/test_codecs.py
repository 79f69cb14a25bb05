"""The codecs against numpy (oracles.py), number by number: packing, integers, levels with outliers.
"""
import itertools
import math

import numpy as np
import oracles
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from invariants import memory_of

from tinykv.codecs.affine import FORMULAS, Affine
from tinykv.codecs.base import TERNARY, pack, unpack
from tinykv.codecs.clipped import ClippedGroups
from tinykv.codecs.nonuniform import NonUniform
from tinykv.codecs.rotated import Rotated

BITS = [1, TERNARY, 2, 3, 4, 5, 6, 7, 8]
AXES = ["token", "channel"]
D = 16  # channels of a row


def rows(seed, B=2, Hkv=2, T=13, dtype=torch.float16):
    """Rows (B, Hkv, T, D) with channels of all sizes, one-signed, zero and constant, and an outlier token."""
    x = torch.randn(B, Hkv, T, D, generator=torch.Generator().manual_seed(seed))
    x = x * torch.logspace(-2, 1.5, D)
    x[..., 3] = x[..., 3].abs() + 1
    x[..., 4] = -x[..., 4].abs() - 20
    x[..., 5] = 0
    x[..., 6] = -0.75
    x[..., 7] += 50  # far from 0, and in a narrow range
    x[:, :, T // 2] *= 30
    return x.to(dtype)


def with_tables(codec, x):
    """The codec with all its tables, from the ranges of rows x."""
    lo, hi = x.float().amin((0, 2)), x.float().amax((0, 2))  # (Hkv, d) both
    if isinstance(codec, NonUniform):
        codec.levels = torch.linspace(-1, 1, 2 ** codec.bits).half()
        if codec.axis == "channel":
            codec.mid, codec.half = codec.middle(lo.flatten(), hi.flatten())
    elif codec.needs_text:
        codec.set_range(lo, hi)
    return codec


# ---- packing

def plain_pack(codes, bits):
    """One row of codes as bytes. Byte i of n has the codes i, i + n, i + 2n, ..., the first in the lowest digit. Codes
    that do not fill a byte are cut: first come rows of 8 bits of each code, then of 4, of 2 and of 1, the low bits of
    the code first."""
    if bits != TERNARY and 8 % bits:
        low = next(width for width in (8, 4, 2, 1) if width < bits)
        rest = plain_pack([c // 2 ** low for c in codes], bits - low)
        return plain_pack([c % 2 ** low for c in codes], low) + rest
    base, digits = (3, 5) if bits == TERNARY else (2 ** bits, 8 // bits)
    n = math.ceil(len(codes) / digits)
    return [sum(c * base ** i for i, c in enumerate(codes[j::n])) for j in range(n)]


@pytest.mark.parametrize("bits", [*BITS, 9, 10, 12])
def test_packing_is_the_plain_one(bits):
    """All codes from 0 to the largest, in two rows of n."""
    largest = int(oracles.max_code(bits))
    for n in range(1, 26):
        codes = [[i * 7 % (largest + 1) for i in range(n)], [largest] * n]
        packed = pack(torch.tensor(codes), bits)
        assert packed.dtype == torch.uint8
        assert packed.tolist() == [plain_pack(row, bits) for row in codes]
        assert packed.shape[-1] == oracles.code_bytes(n, bits)
        assert unpack(packed, bits, n).tolist() == codes


# ---- integers

GROUPS = [(4, 3), (4, 4), (4, 5), (16, 13), (None, 13), (1, 5)]  # sizes, whole and partial


@pytest.mark.parametrize("bits, static, group, T", [
    *((bits, static, 8, 13) for static in (False, True) for bits in BITS), *((3, False, *of) for of in GROUPS)])
@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("axis", AXES)
def test_integers_are_the_plain_formula(axis, formula, bits, static, group, T):
    """What rows decode to, some of them ignored, is the oracle's, and their bytes are those of the formula."""
    x = rows(seed=T, T=T)
    B, Hkv = x.shape[:2]
    # no two heads and sequences ignore the same tokens
    ignore = torch.zeros(x.shape[:3], dtype=torch.bool)
    ignore[0, 0, 0] = ignore[0, 1, 3:6] = ignore[1, :, 12:] = ignore[1, 1, 8:12] = True
    ignore[0, :, T // 2] = True
    known = rows(seed=99).float()
    codec = with_tables(Affine(bits, D, axis, group, formula, static), known)
    ranges = (known.amin((0, 2)).numpy(), known.amax((0, 2)).numpy()) if static else None  # (Hkv, D) both
    codes = codec.encode(x, ignore)

    size = group or (D if axis == "token" else T)
    want = oracles.affine(x.float().numpy(), ignore.numpy(), bits, axis, formula, size, ranges)
    assert np.array_equal(codec.decode(codes).numpy(), want)
    groups = T * D // size if axis == "token" else math.ceil(T / size) * D
    metadata = 0 if static else 4 * groups  # 16 bits each, two a group
    assert codes.nbytes == memory_of(vars(codes).values()) == B * Hkv * (T * oracles.code_bytes(D, bits) + metadata)
    shared = Hkv * (D // size if axis == "token" else D)
    assert sum(table.nbytes for table in codec.calibrated().values()) == (4 * shared if static else 0)
    if not static:
        assert codes.scale.dtype == torch.float16 and codes.scale.min() > 0
        assert codes.zero.dtype == (torch.float16 if formula == "offset" else torch.int16)


@pytest.mark.parametrize("size", [1e-30, 1e-7, 1e3, 6e4, 1e6, 1e30])
@pytest.mark.parametrize("axis", AXES)
def test_any_magnitude_stays_finite(axis, size):
    """Beyond what 16 bits hold numbers may saturate, as bf16 rows could, but not turn into inf or NaN."""
    x = rows(7).float()
    x = (x / x.abs().max() * size).bfloat16().float()
    for bits, formula in itertools.product((1, 3), FORMULAS):
        codec = Affine(bits, D, axis, 8, formula)
        read = codec.decode(codec.encode(x))
        assert torch.isfinite(read).all()
        if 1e-5 < size < 6e4:
            assert (read - x).abs().max() <= size / oracles.max_code(bits) * 2.1
    clipped = ClippedGroups(3, 2, D, 8, reorder=False, clip="none")
    for codec in (with_tables(NonUniform(3, 2, D, axis, 0.1), x), clipped):
        assert torch.isfinite(codec.decode(codec.encode(x))).all()


def test_a_head_that_ignores_a_token_has_no_part_in_its_norm():
    """Of keys that are rotated and divided by their norms: they read as the oracle says, whatever it holds."""
    codec, x = Rotated(Affine(3, D, "channel", 4), D, scaled=True), rows(11, T=8)
    ignore = torch.zeros(x.shape[:3], dtype=torch.bool)
    ignore[:, 0, 2:4] = ignore[0, :, 5] = True  # of the last token, both heads
    want = oracles.rotated(x.float().numpy(), ignore.numpy(), 3, "channel", "offset", 4, True, True)
    for held in (x, x.masked_fill(ignore[..., None], 6e4)):
        read = codec.decode(codec.encode(held, ignore)).numpy()
        assert np.allclose(read[~ignore], want[~ignore], rtol=1e-5, atol=1e-5 * np.abs(want).max())


def test_ignored_heads_do_not_count():
    """Groups of channels that cross heads, of which one head is ignored: what it holds does not matter to the other;
    a group of nothing else, and a token that is ignored as a whole, are read in their own range."""
    codec, x = ClippedGroups(4, 2, D, 8, "fp16", reorder=False, clip="none"), rows(9)
    codec.regroup(torch.arange(2 * D) % 7 % 4 + 4 * (torch.arange(2 * D) < 3))  # the last has channels of head 0 alone
    ignore = torch.zeros(x.shape[:3], dtype=torch.bool)
    ignore[:, 0, 2:] = ignore[0, :, 5] = True
    read = codec.decode(codec.encode(x, ignore))
    other = codec.decode(codec.encode(x.masked_fill(ignore[..., None], 60000.0), ignore))
    assert torch.equal(read[~ignore], other[~ignore]) and torch.isfinite(read).all()
    plain = codec.decode(codec.encode(x))
    assert torch.equal(read[0, :, 5], plain[0, :, 5]) and torch.equal(read[:, 0, 2:, :3], plain[:, 0, 2:, :3])
    assert not torch.equal(read, plain)


# ---- levels and sparse outliers

@st.composite
def non_uniform_cases(draw):
    """(codec, rows (B, Hkv, T, d), ignore (B, Hkv, T)). Half of the numbers are small integers: many ties. Levels, too,
    may be equal."""
    bits, heads, width = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.sampled_from([4, 8]))
    axis = draw(st.sampled_from(AXES))
    codec = NonUniform(bits, heads, width, axis, draw(st.sampled_from([0, 0.01, 0.05, 0.1, 0.2, 0.3])))
    places = draw(st.lists(st.integers(-32, 32), min_size=2 ** bits, max_size=2 ** bits))
    codec.levels = torch.tensor(sorted(places)).half() / 32
    shape = draw(st.integers(1, 3)), heads, draw(st.integers(1, 5)), width
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2 ** 30)))
    whole = torch.randint(-8, 9, shape, generator=rng).float()
    x = torch.where(torch.rand(shape, generator=rng) < 0.5, whole, 4 * torch.randn(shape, generator=rng))
    x = x.to(draw(st.sampled_from([torch.float16, torch.bfloat16])))
    if axis == "channel":
        lo = torch.randint(-6, 3, (heads * width,), generator=rng).float()
        codec.mid, codec.half = codec.middle(lo, lo + torch.randint(0, 9, lo.shape, generator=rng) / 2)
    return codec, x, torch.rand(shape[:3], generator=rng) < draw(st.sampled_from([0, 0.2, 0.8, 1.0]))


@given(non_uniform_cases())
def test_levels_and_outliers_are_the_plain_ones(case):
    """What rows decode to, their outliers in CSR format, and their bytes are the oracle's."""
    codec, x, ignore = case
    (B, _, T, _), C = x.shape, codec.channels
    codes = codec.encode(x, ignore if ignore.any() else None)
    tables = (None, None) if codec.mid is None else (codec.mid.float().numpy(), codec.half.float().numpy())
    read, outlier = oracles.nonuniform(x.float().numpy(), ignore.numpy(), codec.levels.double().numpy(),
                                       codec.outliers, *tables)
    got = codec.decode(codes)
    assert got.dtype == torch.float32 and np.array_equal(got.numpy(), read)

    count = 0
    if codec.outliers:
        numbers, in_order, ends = oracles.to_rows(x.float().numpy()), [], []
        for t, b in np.ndindex(T, B):  # token by token, then sequence by sequence
            in_order += [(numbers[b, t, c], c) for c in np.flatnonzero(outlier[b, t])]
            ends.append(len(in_order))
        count = len(in_order)
        assert list(zip(codes.values[0, 0].tolist(), codes.columns[0, 0].tolist())) == in_order
        assert codes.row_end.shape == (B, 1, T, 1) and codes.row_end[:, 0, :, 0].T.flatten().tolist() == ends
        assert (codes.values.dtype, codes.columns.dtype) == (x.dtype, torch.int16)

    # bytes: of each token its codes, its metadata, and where its outliers end; 4 bytes an outlier
    of_token = oracles.code_bytes(C, codec.bits) + (4 if codec.axis == "token" else 0) + (4 if codec.outliers else 0)
    assert codes.nbytes == B * T * of_token + 4 * count
    assert B * T == 1 or codes.nbytes == memory_of(vars(codes).values())
