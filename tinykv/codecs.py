"""How rows are written down: as they are, as integers, as non-uniform levels with sparse outliers, as codebooks.

Rows are x (B, Hkv, T, d): B sequences, Hkv KV heads, T tokens, d channels. Codes are packed along the channels, so a
token's row is whole bytes and rows can be appended. Metadata is rounded to the precision it is stored in *before* the
codes are computed, so encoder and decoder work on the same grid. Rounding is half to even everywhere. The only bit
shifts live here.
"""
import math
from dataclasses import dataclass, fields

import torch

from tinykv import UserError
from tinykv.kmeans import nearest

TERNARY = 1.5  # the nominal bits of three levels; five fit a byte (1.6 bits), their entropy is log2(3) = 1.585


@dataclass
class Codes:
    """Rows of one layer's keys or values, written down. Every tensor's dimension 2 runs along the tokens."""
    q: torch.Tensor  # (B, Hkv, T, bytes of a row) uint8; or (B, Hkv, T, d) in 16 bits where nothing is coded
    scale: torch.Tensor | None = None  # dynamic codes only, one a group: (B, Hkv, T, d/G, 1) or (B, Hkv, T/G, 1, d)
    zero: torch.Tensor | None = None  # as scale; codecs that treat all heads as one row have 1 in the place of Hkv

    def append(self, other):
        """These codes followed by others of the same codec. Only the last may end in a group that is not full."""
        pairs = [(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)]
        return type(self)(*[None if a is None else torch.cat([a, b], dim=2) for a, b in pairs])

    @property
    def nbytes(self):
        """Bytes really held."""
        return sum(t.nbytes for t in (getattr(self, f.name) for f in fields(self)) if t is not None)


@dataclass
class SparseCodes(Codes):
    """Codes, and the outliers among the numbers as they are: token by token, within a token sequence by sequence."""
    end: torch.Tensor | None = None  # (B, 1, T, 1) int32: where each token's outliers end in the two lists
    value: torch.Tensor | None = None  # (outliers) in 16 bits
    channel: torch.Tensor | None = None  # (outliers) int16, counted over all heads

    def append(self, other):
        codes = Codes.append(Codes(self.q, self.scale, self.zero), Codes(other.q, other.scale, other.zero))
        return SparseCodes(codes.q, codes.scale, codes.zero,
                           torch.cat([self.end, other.end + len(self.value)], dim=2),
                           torch.cat([self.value, other.value]), torch.cat([self.channel, other.channel]))


def row_bytes(width, bits):
    """Bytes that `width` packed codes take."""
    return math.ceil(width / 5) if bits == TERNARY else math.ceil(width * bits / 8)


def _places(bits):
    """The value of each code's place in a byte that holds whole codes: 1, 3, 9, 27, 81 for three levels; or None."""
    if bits == TERNARY:
        return [3 ** i for i in range(5)]
    return [2 ** (int(bits) * i) for i in range(8 // int(bits))] if 8 % bits == 0 else None


def pack(codes, bits):
    """codes (..., n) integers below 2**bits (below 3 if ternary) -> (..., row_bytes(n, bits)) uint8, low bits first."""
    n, places = codes.shape[-1], _places(bits)
    if places is None:  # a code may lie across bytes: bit by bit
        every = (codes.int()[..., None] >> torch.arange(int(bits), device=codes.device)) & 1  # (..., n, bits)
        return pack(every.flatten(-2), 1)
    codes = torch.nn.functional.pad(codes.to(torch.uint8), (0, -n % len(places)))  # (..., n rounded up to whole bytes)
    codes = codes.unflatten(-1, (-1, len(places)))  # (..., bytes, codes of a byte)
    packed = codes[..., 0].clone()  # (..., bytes)
    for i, place in enumerate(places[1:], start=1):
        packed += codes[..., i] * place
    return packed


def unpack(packed, bits, n):
    """(..., row_bytes(n, bits)) uint8 -> the n codes (..., n): uint8, or int16 if they have more than 8 bits."""
    places = _places(bits)
    if places is None:
        every = unpack(packed, 1, n * int(bits)).unflatten(-1, (n, int(bits)))  # (..., n, bits)
        codes = torch.zeros(every.shape[:-1], dtype=torch.uint8 if bits <= 8 else torch.int16, device=packed.device)
        for i in range(int(bits)):
            codes |= every[..., i].to(codes.dtype) << i
        return codes  # (..., n)
    if bits == TERNARY:
        digits = [packed // place % 3 for place in places]
    else:
        digits = [(packed >> int(bits) * i) & (2 ** int(bits) - 1) for i in range(len(places))]
    return torch.stack(digits, dim=-1).flatten(-2)[..., :n]  # (..., n)


class Codec:
    """How one layer's keys, or values, are written down: `encode` and `decode`, and tables learned beforehand."""
    tables = ()  # the names of the attributes that hold those; each a tensor, or None as long as nothing is learned

    def encode(self, x, skip=None):
        """x (B, Hkv, T, d) -> Codes. skip (B, Hkv, T) is True at rows that are kept elsewhere: they must not matter."""
        raise NotImplementedError

    def decode(self, codes):
        """Codes -> (B, Hkv, T, d)."""
        raise NotImplementedError

    def learned(self):
        """{name: tensor}"""
        return {name: getattr(self, name) for name in self.tables if getattr(self, name) is not None}

    @property
    def offline_bytes(self):
        """Bytes learned once and shared by all texts."""
        return sum(t.nbytes for t in self.learned().values())


class Exact(Codec):
    """16 bits: rows as they are."""
    bits = 16

    def encode(self, x, skip=None):
        return Codes(x.clone())  # a copy: a view would hold on to the rows around it

    def decode(self, codes):
        return codes.q


FORMULAS = ("offset", "integer-zero")


class Affine(Codec):
    """b-bit integers, or three levels, with one scale and one zero point a group.

    axis "token": a group is `group` consecutive channels of one token. axis "channel": `group` consecutive tokens of
    one channel; the last group of a text may be shorter. Dynamic, or static with a range that `fix` is told beforehand:
    static "channel" has one group a channel, and static "token" one range a channel group, shared by all tokens.

    formula "offset": the zero point is the minimum itself, a real number (KIVI, SKVQ):
        s = (max - min) / levels,  code = round((x - min) / s),  x' = s * code + min
    formula "integer-zero": the zero point is an integer that may lie outside the codes (KVSink Eq. 10-13, IntactKV):
        s = (max - min) / levels,  z = -round(min / s),  code = clamp(round(x / s) + z),  x' = s * (code - z)
    s has the floor 1e-5 in both, so a constant group gives no NaN. In "integer-zero" its floor is also 2**-13 of the
    largest |x|, finer than 16 bits round: the papers clip z to 1e4 instead, which brings a constant group of 1.0, or a
    channel group of one token, back as 0.1.
    """

    tables = ("scale", "zero")  # static only: (Hkv, 1, d/G, 1) or (Hkv, 1, 1, d)

    def __init__(self, bits, width, axis="token", group=None, formula="offset", static=False):
        if bits not in (1, TERNARY, 2, 3, 4, 5, 6, 7, 8):
            raise ValueError(f"bits must be 1, 1.5 (three levels), 2 to 8 or 16; got {bits:g}")
        if group is not None and group < 1:
            raise ValueError(f"a group has at least 1 member; got group size {group}")
        if axis == "token" and width % (group or width):
            raise ValueError(f"group size {group} does not divide the {width} channels of a head")
        self.bits = bits if bits == TERNARY else int(bits)
        self.width, self.axis, self.formula, self.static = width, axis, formula, static
        self.group = group or (width if axis == "token" else None)  # None: all tokens at hand
        if static and axis == "channel":
            self.group = None
        self.levels = 2 if bits == TERNARY else 2 ** self.bits - 1
        self.scale = self.zero = None

    def fix(self, lo, hi):
        """Learn a static grid: lo, hi (Hkv, d) are the smallest and largest value of each channel."""
        if self.axis == "token":
            lo = lo.unflatten(-1, (-1, self.group)).amin(-1)[:, None, :, None]  # (Hkv, 1, d/G, 1)
            hi = hi.unflatten(-1, (-1, self.group)).amax(-1)[:, None, :, None]  # (Hkv, 1, d/G, 1)
        else:
            lo, hi = lo[:, None, None], hi[:, None, None]  # (Hkv, 1, 1, d)
        self.scale, self.zero = self._grid(lo, hi)

    def _grid(self, lo, hi):
        """Range of each group -> scale and zero point, in the 16 bits that they are stored in."""
        if self.formula == "offset":
            return ((hi - lo) / self.levels).clamp(1e-5, 6e4).half(), lo.clamp(-65504, 65504).half()
        floor = torch.maximum(lo.abs(), hi.abs()) / 2 ** 13
        scale = torch.maximum((hi - lo) / self.levels, floor).clamp(1e-5, 1e4).half()
        return scale, (-lo / scale.float()).clamp(-1e4, 1e4).round().short()

    def _groups(self, x):
        """x (B, Hkv, T, d) -> (B, Hkv, T, d/G, G), or (B, Hkv, T/G, G, d) with the last group filled up by zeros."""
        if self.axis == "token":
            return x.unflatten(-1, (-1, self.group))
        size = self.group or x.shape[2]
        return torch.nn.functional.pad(x, (0, 0, 0, -x.shape[2] % size)).unflatten(2, (-1, size))

    def encode(self, x, skip=None):
        if self.static and self.scale is None:
            raise UserError("a static grid is not learned yet; call the method's `calibrate` first")
        T = x.shape[2]
        g = self._groups(x.float())  # (B, Hkv, T, d/G, G) or (B, Hkv, T/G, G, d)
        scale, zero = self.scale, self.zero
        if not self.static:
            scale, zero = self._grid(*self._range(g, T, skip))
        s, z = scale.float(), zero.float()
        code = (g - z).div_(s).round_() if self.formula == "offset" else (g / s).round_().add_(z)
        code = code.clamp_(0, self.levels).to(torch.uint8)
        code = code.flatten(-2) if self.axis == "token" else code.flatten(2, 3)[:, :, :T]  # (B, Hkv, T, d)
        return Codes(pack(code, self.bits), *((None, None) if self.static else (scale, zero)))

    def _range(self, g, T, skip):
        """Smallest and largest value of each group, skipped and filled-up rows left out. All skipped: 0 and 0."""
        if self.axis == "token":
            return g.amin(-1, keepdim=True), g.amax(-1, keepdim=True)  # (B, Hkv, T, d/G, 1)
        if skip is None and g.shape[2] * g.shape[3] == T:
            return g.amin(3, keepdim=True), g.amax(3, keepdim=True)  # (B, Hkv, T/G, 1, d)
        if skip is None:
            skip = torch.zeros(*g.shape[:2], T, dtype=torch.bool, device=g.device)
        out = torch.nn.functional.pad(skip, (0, g.shape[2] * g.shape[3] - T), value=True)
        out = out.view(*g.shape[:4], 1)  # (B, Hkv, T/G, G, 1)
        lo = g.masked_fill(out, float("inf")).amin(3, keepdim=True)  # (B, Hkv, T/G, 1, d)
        hi = g.masked_fill(out, float("-inf")).amax(3, keepdim=True)
        return lo.nan_to_num(posinf=0), hi.nan_to_num(neginf=0)

    def decode(self, codes):
        """-> (B, Hkv, T, d) fp32."""
        code = unpack(codes.q, self.bits, self.width)  # (B, Hkv, T, d) uint8
        T = code.shape[2]
        g = self._groups(code.float())  # as in encode
        scale, zero = (self.scale, self.zero) if self.static else (codes.scale, codes.zero)
        s, z = scale.float(), zero.float()
        x = g.mul_(s).add_(z) if self.formula == "offset" else g.sub_(z).mul_(s)
        return x.flatten(-2) if self.axis == "token" else x.flatten(2, 3)[:, :, :T]


class NonUniform(Codec):
    """KVQuant's code: the nearest of 2**b levels that are learned, in a normalized range, and sparse exact outliers.

    All heads of a token are one row of h channels. A layer's keys, or values, share one table of levels in [-1, 1]:
        x' = (x - mid) / half,  code = the nearest level's number,  x'' = half * level + mid
    axis "channel" (keys): mid and half are static, of each channel; an outlier is what lies beyond them.
    axis "token" (values): mid and half are the token's own; the round(outliers * h) numbers that lie furthest from its
    median (of an even number, the lower of the two in the middle) are outliers, and the range is that of the others.
    """
    tables = ("levels", "mid", "half")  # (2**b); static only: (h), (h)

    def __init__(self, bits, heads, width, axis, outliers):
        if bits not in range(1, 9):
            raise ValueError(f"non-uniform levels take 1 to 8 bits, or 16 for no levels; got {bits:g}")
        self.bits, self.width, self.channels, self.axis, self.outliers = int(bits), width, heads * width, axis, outliers
        self.levels = self.mid = self.half = None

    def fix(self, lo, hi):
        """Learn the static range: lo and hi (h), the smallest and largest value of each channel that is no outlier."""
        self.mid, self.half = self._middle(lo, hi)

    def _middle(self, lo, hi):
        """The middle of a range and half its length, in the 16 bits that they are stored in."""
        lo, hi = lo.clamp(-65504, 65504), hi.clamp(-65504, 65504)
        return ((lo + hi) / 2).half(), ((hi - lo) / 2).clamp(min=1e-5).half()

    def normalize(self, x, skip=None):
        """x (B, Hkv, T, d) -> x' (B, T, h), outliers (B, T, h) or None, mid and half ((h), or (B, T, 1) and fp16)."""
        x = x.float().transpose(1, 2).flatten(2)  # (B, T, h)
        if skip is not None:
            skip = skip.transpose(1, 2).repeat_interleave(self.width, dim=2)  # (B, T, h)
        if self.axis == "channel":
            mid, half, out = self.mid, self.half, None
            if self.outliers:
                out = (x - mid.float()).abs() > half.float()  # (B, T, h)
                out = out if skip is None else out & ~skip
        else:
            mid, half, out = self._range_of_tokens(x, skip)
        return (x - mid.float()) / half.float(), out, mid, half

    def _range_of_tokens(self, x, skip):
        """mid and half (B, T, 1), and outliers (B, T, h) or None, of the channels that are not skipped."""
        count, out = round(self.outliers * self.channels), None
        gone = torch.zeros_like(x, dtype=torch.bool) if skip is None else skip  # (B, T, h)
        if count:
            median = x.masked_fill(gone, float("nan")).nanmedian(-1, keepdim=True).values  # (B, T, 1)
            distance = (x - median).abs().masked_fill(gone, -1).nan_to_num(-1)  # (B, T, h)
            order = distance.sort(dim=-1, descending=True, stable=True).indices[..., :count]  # (B, T, count)
            out = torch.zeros_like(gone).scatter_(-1, order, True)
            gone = gone | out
        if skip is not None:  # a row that is skipped as a whole may be let go later: it is read in its own range
            out = out if out is None else out & ~skip
            gone = gone & ~skip.all(-1, keepdim=True)
        lo = x.masked_fill(gone, float("inf")).amin(-1, keepdim=True).nan_to_num(posinf=0)  # (B, T, 1)
        hi = x.masked_fill(gone, float("-inf")).amax(-1, keepdim=True).nan_to_num(neginf=0)
        return *self._middle(lo, hi), out

    def encode(self, x, skip=None):
        if self.levels is None:
            raise UserError("the levels are not learned yet; call the method's `calibrate` first")
        normal, out, mid, half = self.normalize(x, skip)
        levels = self.levels.float()
        code = torch.bucketize(normal, (levels[1:] + levels[:-1]) / 2).to(torch.uint8)  # (B, T, h)
        q = pack(code, self.bits)[:, None]  # (B, 1, T, bytes)
        scale, zero = (None, None) if self.axis == "channel" else (half[:, None], mid[:, None])  # (B, 1, T, 1) both
        if not self.outliers:
            return Codes(q, scale, zero)
        if out is None:
            out = torch.zeros_like(normal, dtype=torch.bool)
        out = out.transpose(0, 1)  # (T, B, h)
        end = out.sum(-1).flatten().cumsum(0).view(out.shape[:2]).T[:, None, :, None]  # (B, 1, T, 1)
        value = x.transpose(1, 2).flatten(2).transpose(0, 1)[out]  # (outliers)
        channel = out.nonzero()[:, 2].to(torch.int16)  # (outliers)
        return SparseCodes(q, scale, zero, end.to(torch.int32).contiguous(), value, channel)

    def decode(self, codes):
        """-> (B, Hkv, T, d) fp32."""
        code = unpack(codes.q[:, 0], self.bits, self.channels)  # (B, T, h)
        mid, half = (self.mid, self.half) if self.axis == "channel" else (codes.zero[:, 0], codes.scale[:, 0])
        x = self.levels.float()[code.long()] * half.float() + mid.float()  # (B, T, h)
        if self.outliers and len(codes.value):
            end = codes.end[:, 0, :, 0].T.flatten()  # (T * B)
            row = torch.searchsorted(end, torch.arange(len(codes.value), device=end.device), right=True)  # (outliers)
            B = len(x)
            x[row % B, row // B, codes.channel.long()] = codes.value.float()
        return x.unflatten(-1, (-1, self.width)).transpose(1, 2)


class Codebook(Codec):
    """Vector quantization, "d{n}m{m}": of each n channels the number of the nearest of m centroids, log2(m) bits.

    All heads of a token are one packed row. There is a book of centroids for each KV head and each of the d/n places
    in it, or a single one for all (`shared`).
    """
    tables = ("centroids",)  # (Hkv * d/n, m, n) in 16 bits, or (1, m, n)

    def __init__(self, n, m, heads, width):
        self.n, self.m, self.width, self.places = n, m, width, heads * width // n
        self.bits = m.bit_length() - 1  # of a number
        self.centroids = None

    def vectors(self, x):
        """x (B, Hkv, T, d) -> (places, B * T, n) fp32."""
        return x.float().transpose(1, 2).unflatten(-1, (-1, self.n)).flatten(2, 3).flatten(0, 1).transpose(0, 1)

    def encode(self, x, skip=None):
        if self.centroids is None:
            raise UserError("the codebooks are not learned yet; call the method's `calibrate` first")
        books = self.centroids.float().expand(self.places, -1, -1)  # (places, m, n)
        number = nearest(self.vectors(x).contiguous(), books)  # (places, B * T)
        q = pack(number.T.unflatten(0, (len(x), -1)), self.bits)  # (B, T, bytes)
        return Codes(q[:, None])  # (B, 1, T, bytes)

    def decode(self, codes):
        number = unpack(codes.q[:, 0], self.bits, self.places).long()  # (B, T, places)
        at = torch.arange(self.places, device=number.device) % len(self.centroids)  # (places): the book of each place
        x = self.centroids[at, number]  # (B, T, places, n)
        return x.flatten(-2).unflatten(-1, (-1, self.width)).transpose(1, 2).float()  # (B, Hkv, T, d)
