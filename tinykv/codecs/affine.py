"""Rounding to b-bit integers, with one scale and one zero point per group. RTN, KIVI, OTT and others build on it.

The numbers of a group share a scale. With axis "token", a group is G consecutive channels of one token. With axis
"channel", it is G consecutive tokens of one channel.

    formula "offset" (KIVI): the zero point is the group's minimum, a real number
        s = (max - min) / (2^b - 1)
        code = clamp(round((x - min) / s), 0, 2^b - 1)
        x' = s code + min
    formula "integer-zero" (KVSink Eq. 10-13, IntactKV): the zero point is an integer
        s = (max - min) / (2^b - 1)
        z = -round(min / s)
        code = clamp(round(x / s) + z, 0, 2^b - 1)
        x' = s (code - z)

A dynamic range comes from the numbers that are quantized, a static range from calibration text.

Paper and practice. s and z are rounded to the 16 bits in which they are stored, so codes need the clamp under "offset"
as well. In a constant group max = min, and s = 0 would give 0 / 0 = NaN, so s is at least 1e-5. Under "integer-zero" s
is also at least 2^-13 of the group's largest |x|, which keeps |z| below about 2^13; 16-bit numbers near that |x| are no
more precise than such a step. The papers have no such floor. A clip of z to 1e4 instead would decode a constant group
of 1.0 to 0.1. KVSink's equations also clip max and min; here neither is clipped.
"""
import torch
from torch.nn.functional import pad

from tinykv import one_of
from tinykv.codecs.base import Codec, Codes, channel_ranges, known_bits, largest_code, pack, unpack

FORMULAS = ("offset", "integer-zero")


class Affine(Codec):
    """b-bit integers (1.5 bits: three levels).

    group_size: G, how many numbers share a scale; the last group of a text may be shorter.
        axis "token"              channels of a head; by default all d
        axis "channel", dynamic   tokens
        axis "channel", static    no groups: all tokens share a channel's range
    """
    tables = ("scale", "zero")  # static grids only: (Hkv, 1, d/G, 1) or (Hkv, 1, 1, d)

    def __init__(self, bits, width, axis="token", group_size=None, formula="offset", static=False):
        """width: d, the channels of a head."""
        one_of(("token", "channel"), axis=axis)
        one_of(FORMULAS, formula=formula)
        self.bits = known_bits(bits)
        self.width, self.axis, self.formula, self.static = width, axis, formula, static
        self.needs_text = static
        self.scale = self.zero = None
        if axis == "token":
            self.group_size = group_size or width
        else:
            self.group_size = None if static else group_size
            self.tokens_per_group = self.group_size or 1  # codes are appended in multiples of this many tokens

    def encode(self, x, ignore=None):
        g = self.to_groups(x.float())  # (B, Hkv, T, d/G, G) or (B, Hkv, T/G, G, d)

        # 1. the grid: a scale and a zero point for each group
        if self.static:
            scale, zero = self.scale, self.zero
        else:
            lo, hi = self.range_of(g, x.shape[2], ignore)
            scale, zero = self.grid(lo, hi)  # (B, Hkv, T, d/G, 1) or (B, Hkv, T/G, 1, d), both
        s, z = scale.float(), zero.float()

        # 2. round to the nearest code
        if self.formula == "offset":  # z is the group's minimum
            code = torch.round((g - z) / s)
        else:  # z is an integer, counted in steps of s
            code = torch.round(g / s) + z
        code = code.clamp(0, largest_code(self.bits)).to(torch.uint8)

        # 3. pack each token's codes into bytes
        code = self.from_groups(code, x.shape[2])  # (B, Hkv, T, d)
        packed = pack(code, self.bits)  # (B, Hkv, T, bytes)
        return Codes(packed) if self.static else Codes(packed, scale=scale, zero=zero)

    def decode(self, codes):
        """Codes -> (B, Hkv, n, d) fp32."""
        # 1. back to codes, in their groups
        n = codes.packed.shape[2]
        code = unpack(codes.packed, self.bits, self.width)  # (B, Hkv, n, d) uint8
        g = self.to_groups(code.float())  # (B, Hkv, n, d/G, G) or (B, Hkv, n/G, G, d)
        # 2. the codes become numbers, in place: to write to new memory takes longer than to compute
        grid = self if self.static else codes
        s, z = grid.scale.float(), grid.zero.float()
        if self.formula == "offset":
            g *= s
            g += z
        else:
            g -= z
            g *= s
        return self.from_groups(g, n)

    def grid(self, lo, hi):
        """The range of each group -> scale and zero point, in the 16 bits that are stored."""
        s = (hi - lo) / largest_code(self.bits)
        if self.formula == "offset":
            scale = s.clamp(1e-5, 6e4).half()
            zero = lo.clamp(-65504, 65504).half()
        else:
            floor = torch.maximum(lo.abs(), hi.abs()) / 2 ** 13
            scale = torch.maximum(s, floor).clamp(1e-5, 1e4).half()
            zero = -lo / scale.float()
            # the clamp acts only where |lo| is above 1e8, as the scale has a ceiling of 1e4
            zero = torch.round(zero.clamp(-1e4, 1e4)).short()
        return scale, zero

    # Groups

    def to_groups(self, x):
        """x (B, Hkv, T, d) -> (B, Hkv, T, d/G, G), or with axis "channel" (B, Hkv, T/G, G, d), where zeros fill up the
        last group."""
        if self.axis == "token":
            return x.unflatten(-1, (-1, self.group_size))
        size = self.group_size or x.shape[2]
        missing = -x.shape[2] % size
        if missing:  # `pad` copies also where nothing is
            x = pad(x, (0, 0, 0, missing))  # (B, Hkv, T/G * G, d)
        return x.unflatten(2, (-1, size))

    def from_groups(self, g, T):
        """The inverse of `to_groups`: groups -> (B, Hkv, T, d)."""
        return g.reshape(*g.shape[:2], -1, self.width)[:, :, :T]

    def range_of(self, g, T, ignore):
        """The smallest and the largest number of each group. With axis "channel", ignored tokens do not count, and a
        group that has no others gets 0 and 0."""
        if self.axis == "token":  # no group has numbers of two tokens, so `ignore` changes nothing
            return g.amin(-1, keepdim=True), g.amax(-1, keepdim=True)  # (B, Hkv, T, d/G, 1) both
        # leave ignored tokens out, and the zeros that fill up the last group
        B, Hkv, groups, size, _ = g.shape
        if ignore is None:
            ignore = torch.zeros(B, Hkv, T, dtype=torch.bool, device=g.device)
        ignore = pad(ignore, (0, groups * size - T), value=True)
        ignore = ignore.view(B, Hkv, groups, size, 1)  # (B, Hkv, T/G, G, 1)
        lo = g.masked_fill(ignore, float("inf")).amin(3, keepdim=True)  # (B, Hkv, T/G, 1, d)
        hi = g.masked_fill(ignore, float("-inf")).amax(3, keepdim=True)  # (B, Hkv, T/G, 1, d)
        # a group with no number left has the range inf .. -inf: make it 0 .. 0
        nothing = ignore.all(3, keepdim=True)  # (B, Hkv, T/G, 1, 1)
        return lo.masked_fill(nothing, 0), hi.masked_fill(nothing, 0)

    # Calibration: the range of a static grid

    def fit(self, rows, kept, gradient=None, seed=0):
        self.set_range(*channel_ranges(rows, kept))

    def set_range(self, lo, hi):
        """Fix the static grid. lo, hi (Hkv, d): each channel's smallest and largest number."""
        # as if they were two tokens: the smallest number of a group, and the largest
        lo, _ = self.range_of(self.to_groups(lo[None, :, None]), 1, None)
        _, hi = self.range_of(self.to_groups(hi[None, :, None]), 1, None)
        self.scale, self.zero = self.grid(lo[0], hi[0])  # (Hkv, 1, d/G, 1) or (Hkv, 1, 1, d), both
