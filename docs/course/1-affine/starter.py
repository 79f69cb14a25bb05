"""Assignment 1: affine codes, and packing them into bytes.

handout.md explains the tasks. Replace each `raise NotImplementedError`. Names, arguments and shapes
stay as they are. To grade this file:

    python -m tinykv.course.grade docs/course/1-affine/starter.py

Shapes: B sequences, H heads, T tokens, d channels of a head, G numbers in a group. `bits` is 1, 2,
3, 4, 5, 6, 7 or 8, or 1.5 for three levels, whose codes are 0, 1 and 2. `formula` is "offset" or
"integer-zero".
"""
import torch  # noqa: F401

ASSIGNMENT = "affine"


# Task 1: the grid, and rounding

def grid(lo, hi, bits, formula):
    """The scale and the zero point of groups whose numbers lie between lo and hi (fp32 tensors of
    one shape).

    Returns (scale, zero), of the shape of lo, in the precision in which they are stored: both fp16
    with "offset"; fp16 and int16 with "integer-zero". The handout has the formulas and the bounds.
    """
    raise NotImplementedError("assignment 1, affine: grid")


def encode(x, scale, zero, bits, formula):
    """The codes of numbers x (fp32) on a grid: uint8, of the shape of x, from 0 to the largest
    code. scale and zero, as `grid` gives them, have a shape that broadcasts to that of x.

    Compute in fp32. Rounding is half to even, as in torch.round.
    """
    raise NotImplementedError("assignment 1, affine: encode")


def decode(codes, scale, zero, formula):
    """What codes are read as: fp32, of the shape of codes (uint8)."""
    raise NotImplementedError("assignment 1, affine: decode")


# Task 2: groups

def quantize(x, bits, axis, group, formula="offset", ignore=None):
    """Quantize keys or values x (B, H, T, d), fp32.

    axis "token": each token's channels are split into groups of G = `group`, which divides d.
    axis "channel": each channel's tokens are split into groups of G; the last may be shorter.
    ignore (B, H, T), booleans or None, for axis "channel": tokens whose numbers must not count for
    the range of their group. Their codes may be anything. A group of nothing but ignored tokens has
    the range 0 .. 0.

    Returns (codes, scale, zero): codes (B, H, T, d) uint8; scale and zero one number for each group,
    (B, H, T, d/G) with axis "token", (B, H, ceil(T/G), d) with axis "channel".
    """
    raise NotImplementedError("assignment 1, affine: quantize")


def dequantize(codes, scale, zero, axis, group, formula="offset"):
    """What `quantize` gave -> (B, H, T, d), fp32."""
    raise NotImplementedError("assignment 1, affine: dequantize")


# Task 3: packing

def pack(codes, bits):
    """Codes (..., n), uint8 -> bytes (..., ceil(n * bits / 8)), uint8; with 1.5 bits five codes to
    a byte, (..., ceil(n / 5)). The first code has the lowest bits; the end is filled up with 0.
    """
    raise NotImplementedError("assignment 1, affine: pack")


def unpack(packed, bits, n):
    """What `pack` gave -> the n codes, (..., n), uint8."""
    raise NotImplementedError("assignment 1, affine: unpack")


# Task 4: what it costs

def stored_bits(T, d, bits, axis, group):
    """Bits that a number takes in memory, a float: of the T * d numbers of one head, with packed
    codes (each token is a row of whole bytes), and 16 bits for each scale and each zero point."""
    raise NotImplementedError("assignment 1, affine: stored_bits")
