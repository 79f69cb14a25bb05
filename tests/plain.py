"""Rounding in plain Python: what the oracles of test_codecs.py and test_streams.py are made of.

Nothing here is shared with the codecs. Each function computes in Python floats and rounds every step to 32, 16 or 8
bits, as the codecs do. So codes and metadata have to be equal, not close.
"""
import math
import struct


def f32(x):
    return struct.unpack("f", struct.pack("f", x))[0]


def f16(x):
    return struct.unpack("e", struct.pack("e", x))[0]


def f8(x):
    """e4m3: three binary digits after the leading one from 2**-6 on, steps of 2**-9 below."""
    if x == 0:
        return 0.0
    _, exponent = math.frexp(abs(x))
    step = 2.0 ** (max(exponent - 1, -6) - 3)
    return round(x / step) * step  # Python's round is half to even


def clip(x, lo, hi):
    return min(max(x, lo), hi)


def max_code(bits):
    """The largest code; 1.5 bits are three levels."""
    return 2 if bits == 1.5 else 2 ** bits - 1


def plain_grid(values, bits, formula):
    """The scale and zero point of one group, from the numbers that count; if none does, as if all were 0."""
    lo, hi = (min(values), max(values)) if values else (0.0, 0.0)
    step = f32(f32(hi - lo) / max_code(bits))
    if formula == "offset":
        return f16(clip(step, f32(1e-5), 6e4)), f16(clip(lo, -65504.0, 65504.0))
    floor = max(abs(lo), abs(hi)) / 2 ** 13
    s = f16(clip(max(step, floor), f32(1e-5), 1e4))
    return s, round(clip(f32(-lo / s), -1e4, 1e4))


def plain_code(x, s, z, bits, formula):
    """-> the code of x, and the number that the code is read as."""
    if formula == "offset":
        q = round(f32(f32(x - z) / s))
    else:
        q = round(f32(x / s)) + z
    q = clip(q, 0, max_code(bits))
    if formula == "offset":
        return q, f32(f32(s * q) + z)
    return q, f32(s * (q - z))
