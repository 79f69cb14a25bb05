"""Assignment 1: affine codes, and packing them into bytes.

Shapes: B sequences, H heads, T tokens, d channels of a head, G numbers in a group. `bits` is 1, 2,
3, 4, 5, 6, 7 or 8, or 1.5 for three levels, whose codes are 0, 1 and 2. `formula` is "offset" or
"integer-zero".
"""
import math

import torch

ASSIGNMENT = "affine"


# Task 1: the grid, and rounding

def grid(lo, hi, bits, formula):
    """The scale and the zero point of groups whose numbers lie between lo and hi (fp32 tensors of
    one shape, which may have no dimensions).

    Returns (scale, zero), of the shape of lo, in the precision in which they are stored: both fp16
    with "offset"; fp16 and int16 with "integer-zero". The handout has the formulas and the bounds.
    """
    # answer
    scale = (hi - lo) / top(bits)
    if formula == "offset":
        return scale.clamp(min=1e-5, max=6e4).half(), lo.clamp(min=-65504, max=65504).half()
    least = torch.maximum(lo.abs(), hi.abs()) / 8192
    scale = torch.maximum(scale, least).clamp(min=1e-5, max=1e4).half()
    zero = -torch.round(lo / scale.float())
    return scale, zero.clamp(min=-10000, max=10000).to(torch.int16)


def encode(x, scale, zero, bits, formula):
    """The codes of numbers x (fp32) on a grid: uint8, of the shape of x, from 0 to the largest
    code. scale and zero, as `grid` gives them, have a shape that broadcasts to that of x.

    Compute in fp32. Rounding is half to even, as in torch.round.
    """
    # answer
    s, z = scale.float(), zero.float()
    q = torch.round((x - z) / s) if formula == "offset" else torch.round(x / s) + z
    return q.clamp(0, top(bits)).to(torch.uint8)


def decode(codes, scale, zero, formula):
    """What codes are read as: fp32, of the shape of codes (uint8)."""
    # answer
    s, z, q = scale.float(), zero.float(), codes.float()
    return q * s + z if formula == "offset" else (q - z) * s


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
    # answer
    B, H, T, d = x.shape
    if axis == "token":
        parts = x.reshape(B, H, T, d // group, group)
        lo, hi = parts.min(dim=-1).values, parts.max(dim=-1).values
    else:
        low, high = x, x
        if ignore is not None:
            low = x.masked_fill(ignore.unsqueeze(-1), math.inf)
            high = x.masked_fill(ignore.unsqueeze(-1), -math.inf)
        lo = torch.stack([part.amin(dim=2) for part in low.split(group, dim=2)], dim=2)
        hi = torch.stack([part.amax(dim=2) for part in high.split(group, dim=2)], dim=2)
        nothing = lo > hi
        lo, hi = lo.masked_fill(nothing, 0.0), hi.masked_fill(nothing, 0.0)
    scale, zero = grid(lo, hi, bits, formula)
    codes = encode(x, spread(scale, axis, group, T), spread(zero, axis, group, T), bits, formula)
    return codes, scale, zero


def dequantize(codes, scale, zero, axis, group, formula="offset"):
    """What `quantize` gave -> (B, H, T, d), fp32."""
    # answer
    T = codes.shape[2]
    return decode(codes, spread(scale, axis, group, T), spread(zero, axis, group, T), formula)


# Task 3: packing

def pack(codes, bits):
    """Codes (..., n), uint8 -> bytes (..., ceil(n * bits / 8)), uint8; with 1.5 bits five codes to
    a byte, (..., ceil(n / 5)). The first code has the lowest bits; the end is filled up with 0.
    """
    # answer
    n = codes.shape[-1]
    if bits == 1.5:
        digits = torch.nn.functional.pad(codes.int(), (0, -n % 5)).unflatten(-1, (-1, 5))
        return (digits * torch.tensor([1, 3, 9, 27, 81])).sum(-1).to(torch.uint8)
    stream = torch.stack([codes.int() >> i & 1 for i in range(bits)], dim=-1).flatten(-2)
    stream = torch.nn.functional.pad(stream, (0, -n * bits % 8)).unflatten(-1, (-1, 8))
    return (stream * 2 ** torch.arange(8)).sum(-1).to(torch.uint8)


def unpack(packed, bits, n):
    """What `pack` gave -> the n codes, (..., n), uint8."""
    # answer
    if bits == 1.5:
        digits = [packed.int() // place % 3 for place in (1, 3, 9, 27, 81)]
        return torch.stack(digits, dim=-1).flatten(-2)[..., :n].to(torch.uint8)
    stream = torch.stack([packed.int() >> i & 1 for i in range(8)], dim=-1).flatten(-2)
    stream = stream[..., :n * bits].unflatten(-1, (n, bits))
    return (stream * 2 ** torch.arange(bits)).sum(-1).to(torch.uint8)


# Task 4: what it costs

def stored_bits(T, d, bits, axis, group):
    """Bits that a number takes in memory, a float: of the T * d numbers of one head, with packed
    codes (each token is a row of whole bytes), and 16 bits for each scale and each zero point."""
    # answer
    row = math.ceil(d / 5) if bits == 1.5 else math.ceil(d * bits / 8)
    groups = T * (d // group) if axis == "token" else math.ceil(T / group) * d
    return (8 * T * row + 32 * groups) / (T * d)


# answer: helpers

def top(bits):
    return 2 if bits == 1.5 else 2 ** bits - 1


def spread(per_group, axis, group, T):
    if axis == "token":
        return per_group.repeat_interleave(group, dim=3)
    return per_group.repeat_interleave(group, dim=2)[:, :, :T]
