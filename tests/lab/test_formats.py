"""docs/examples/formats.py: every code's number, every tie, every format against its definition in plain Python, and
the tests of all methods on a few cells.
"""
import math
from pathlib import Path

import invariants
import numpy as np
import pytest
import torch
from cases import Case, each_rows, example_of, kept_of, model_of

from tinykv import UserError
from tinykv.cache import KVCache
from tinykv.codecs.base import Exact
from tinykv.codecs.centred import Centred
from tinykv.codecs.schemes import SCHEMES
from tinykv.methods.registry import METHODS

FILE = Path(__file__).parents[2] / "docs" / "examples" / "formats.py"
#  scheme: bits of a number, with the scale
TRUE = {"fp8": 8, "nvfp4": 4.5, "mxfp8": 8.25, "mxfp4": 4.25, "q8_0": 8.5, "q4_0": 4.5, "q4_1": 5, "q5_0": 5.5,
        "q5_1": 6, "int8_per_token_head": 8.5}
BITS = {"fp8": 8, "mxfp8": 8, "q8_0": 8, "int8_per_token_head": 8, "q5_0": 5, "q5_1": 5}  # of a code, if not 4


@pytest.fixture(autouse=True, scope="module")
def formats():
    """The file, which adds schemes that other tests do not know. Its blocks are as short as the cells' own."""
    with example_of(f"{FILE}:Formats") as module:
        yield module


# ---- floats

EXPONENT = {4: 2, 8: 4}  # bits of it


def number(code, bits):
    """What a code stands for: sign, exponent, mantissa. None for the two codes that are no number."""
    exponents = EXPONENT[bits]
    mantissas = bits - 1 - exponents
    sign, exponent, mantissa = code >> bits - 1, code >> mantissas & 2 ** exponents - 1, code & 2 ** mantissas - 1
    bias = 2 ** (exponents - 1) - 1
    if bits == 8 and exponent == 15 and mantissa == 7:
        return None
    digits = mantissa + (2 ** mantissas if exponent > 0 else 0)
    size = math.ldexp(digits, max(1, exponent) - bias - mantissas)
    return -size if sign else size


def codes_of(formats, numbers, bits):
    return formats.to_float(torch.tensor(numbers, dtype=torch.float32), bits).tolist()


@pytest.mark.parametrize("bits", [4, 8])
def test_each_code_is_its_number(formats, bits):
    numbers = [number(code, bits) for code in range(2 ** bits)]
    found = formats.from_float(torch.arange(2 ** bits, dtype=torch.uint8), bits).tolist()
    for code, (x, y) in enumerate(zip(numbers, found)):
        assert math.isnan(y) if x is None else (x, math.copysign(1, x)) == (y, math.copysign(1, y)), code
        assert x is None or codes_of(formats, [x], bits) == [code]


@pytest.mark.parametrize("bits", [4, 8])
def test_between_two_numbers_the_nearer_and_in_the_middle_the_even(formats, bits):
    sizes = [number(code, bits) for code in range(2 ** (bits - 1)) if number(code, bits) is not None]
    assert sizes == sorted(sizes)
    sign = 2 ** (bits - 1)
    for code, (a, b) in enumerate(zip(sizes, sizes[1:])):
        middle = np.float32((a + b) / 2)
        below, above = (float(np.nextafter(middle, np.float32(x))) for x in (a, b))
        even = code + code % 2
        assert codes_of(formats, [below, float(middle), above], bits) == [code, even, code + 1]
        assert codes_of(formats, [-below, -float(middle), -above], bits) == [x + sign for x in (code, even, code + 1)]
    largest = len(sizes) - 1
    assert codes_of(formats, [sizes[-1] * 1.3, 1e30, -1e30], bits) == [largest, largest, largest + sign]


def nearest(x, bits):
    """The number of the format nearest to x, of two the one with an even code."""
    codes = [code for code in range(2 ** (bits - 1)) if number(code, bits) is not None]
    size = number(min(codes, key=lambda code: (abs(number(code, bits) - abs(x)), code % 2)), bits)
    return math.copysign(size, x)


# ---- formats

def by_hand(x, scheme):
    """What a row decodes to. x: a list of d numbers."""
    size, bits = {"nvfp4": 16, "int8_per_token_head": len(x)}.get(scheme, 32), BITS.get(scheme, 4)
    found = []
    for first in range(0, len(x), size):
        block = [np.float32(number) for number in x[first:first + size]]
        top = max(block, key=abs)
        if scheme == "fp8":
            found += [nearest(x, 8) for x in block]
        elif scheme == "nvfp4":
            s = np.float32(nearest(abs(top) / np.float32(6), 8))
            found += [float(s * nearest(x / s, 4)) if s else 0.0 for x in block]
        elif scheme in ("mxfp8", "mxfp4"):
            emax = {4: 2, 8: 8}[bits]
            s = 2.0 ** max(-127, math.floor(math.log2(abs(top))) - emax) if top else 1.0
            found += [s * nearest(float(x) / s, bits) for x in block]
        elif scheme == "int8_per_token_head":
            s = max(abs(top), np.float32(127e-6)) / np.float32(127)
            found += [float(s * np.float32(round(float(x * (np.float32(1) / s))))) for x in block]
        elif scheme in ("q4_1", "q5_1"):
            d = (max(block) - min(block)) / np.float32(2 ** bits - 1)
            inverse = np.float32(1) / d if d else np.float32(0)
            codes = [int((x - min(block)) * inverse + np.float32(0.5)) for x in block]
            found += [float(np.float32(np.float16(d)) * np.float32(code) + np.float32(np.float16(min(block))))
                      for code in codes]
        else:
            d = abs(top) / np.float32(127) if bits == 8 else top / np.float32(-2 ** (bits - 1))
            inverse = np.float32(1) / d if d else np.float32(0)
            half = 2 ** (bits - 1)
            for number in block:
                y = number * inverse
                code = math.copysign(math.floor(abs(y) + np.float32(0.5)), y) if bits == 8 else \
                    min(2 * half - 1, math.floor(y + np.float32(half + 0.5))) - half
                found.append(float(np.float32(np.float16(d)) * np.float32(code)))
    return found


def rows(d=64):
    """Rows with channels of all sizes, ties, zeros, and one number that is far larger than the others."""
    x = torch.randn(1, 1, 12, d, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 1, d)
    x[0, 0, 1] = 0
    x[0, 0, 2] = torch.arange(d) % 13 / 2 - 3  # ties of integers and of floats
    x[0, 0, 3] = torch.arange(d) % 17 - 8.0
    x[0, 0, 4, 5] = 300
    x[0, 0, 5] *= 1e-6
    x[0, 0, 6] = torch.arange(d) % 33 / 2 - 8  # scales of 1 and -1: halves between all codes of 4 bits, and 7.5
    x[0, 0, 7] = x[0, 0, 6]
    x[0, 0, 7, ::32] = 127  # the same for 8 bits
    return x


#                    as far up and down as fp32 and a scale of 8 bits reach
SIZES = dict.fromkeys(["mxfp8", "mxfp4"], [2.0 ** -149, 2.0 ** -126, 2.0 ** -20, 1, 2.0 ** 100, 2.0 ** 118])


@pytest.mark.parametrize("scheme", TRUE)
def test_a_format_by_hand(scheme):
    """And its bits are true."""
    make, _ = SCHEMES[scheme]
    codec = make(model_of(1, width=64).config, "k", BITS.get(scheme, 4))
    for size in SIZES.get(scheme, [1]):
        x = rows() * size
        codes = codec.encode(x)
        assert codes.nbytes == invariants.memory_of(vars(codes).values()) == 12 * 64 * TRUE[scheme] / 8
        for t, (row, decoded) in enumerate(zip(x[0, 0].tolist(), codec.decode(codes)[0, 0].tolist())):
            assert decoded == by_hand(row, scheme), (size, t)


@pytest.mark.parametrize("method, settings", [
    ("Formats", {"scheme": "q4_0"}), ("pfn", {"scheme": "q4_0", "k_bits": 4, "v_bits": 4}),
    ("rtn", {"scheme": "token-dynamic"})])
def test_centred_keys_are_quantized_before_rope(formats, method, settings):
    cls, config = getattr(formats, method, METHODS.get(method)), model_of(1).config
    plain, centred = cls(config, **settings), cls(config, **settings, centre="on")
    assert (plain.rope, centred.rope) == ("post", "pre")
    for (k, v), (centred_k, centred_v) in zip(plain.codecs, centred.codecs, strict=True):
        assert isinstance(centred_k, Centred) and type(centred_k.codec) is type(k) and type(centred_v) is type(v)


@pytest.mark.parametrize("method, width, settings, said", [
    *(("Formats", width, {"scheme": scheme}, f"blocks of {size} channels, which do not divide a head's {width}$")
      for width, scheme, size in ((40, "q8_0", 32), (80, "q5_1", 32), (80, "mxfp4", 32), (40, "nvfp4", 16))),
    ("Formats", 16, {"scheme": "fp4"}, "scheme is one of fp8"),
    ("Formats", 16, {"v_scheme": "q40"}, "v scheme is one of.*did you mean q4_0"),
    ("Formats", 16, {"hadamard": "yes"}, "off, on"),
    ("Formats", 12, {"hadamard": "on"}, "power of two rows, and a head has 12 channels"),
    ("kvsink", 16, {"scheme": "nvfp4"}, "nvfp4 has 4 bits; give --bits 4"),
    ("kvsink", 16, {"centre": "on"}, "centre=on takes a scheme without tables")])
def test_what_is_refused(formats, method, width, settings, said):
    with pytest.raises(UserError, match=said):
        getattr(formats, method, METHODS.get(method))(model_of(1, width=width).config, **settings)


def test_the_first_tokens_stay_in_16_bits(formats):
    model, tokens = model_of(1), torch.arange(24)[None]
    cache = KVCache(model, formats.Formats(model.config, preserve=3), "paper")
    model(tokens, cache)
    assert [kept_of(rows) for _, _, rows in each_rows(cache)] == [[[{0, 1, 2}] * 4]] * 4


def test_keys_and_values_may_differ(formats):
    method = formats.Formats(model_of(1).config, "q8_0", "q4_0")
    assert (method.codecs[0].k.bits, method.codecs[0].v.bits) == (*map(method.bits_of, "kv"),) == (8, 4)
    assert method.scheme == "q8_0/q4_0" and formats.Formats(model_of(1).config).scheme == "fp8"
    pair = formats.Formats(model_of(1).config, "fp16", "fp8").codecs[0]
    assert isinstance(pair.k, Exact) and isinstance(pair.v, formats.FP8)


@pytest.mark.one_in(7)
@pytest.mark.parametrize("check", invariants.OF_CODECS)
@pytest.mark.parametrize("scheme", TRUE)
def test_formats_are_a_method(formats, check, scheme):
    settings = (("v_scheme", "nvfp4"), ("hadamard", "on" if scheme in ("q8_0", "q4_0") else "off"),
                ("centre", "on" if scheme in ("q4_0", "nvfp4") else "off"))
    case = Case(formats.Formats, scheme, heads_per_kv=2, settings=settings, dtype=torch.float64)
    getattr(invariants, f"check_{check}")(case)
