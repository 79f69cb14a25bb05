"""What every codec shares: packed codes, the interface of a codec, and the codec that keeps 16 bits.

A codec quantizes the keys, or the values, of one layer. Its input is x (B, Hkv, T, d): B sequences, Hkv KV heads, T
tokens, d channels. Codes are packed along the channels, so each token is a row of whole bytes and later tokens can be
appended. Scales and zero points are rounded to the precision in which they are stored *before* the codes are computed,
so the encoder and the decoder work on the same grid. Rounding is half to even everywhere.

Only `pack` and `unpack` shift bits.
"""
import math
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from tinykv import UserError

BLOCK = 128  # tokens quantized at a time in a stream, and in a channel group by default
CALIBRATION_WINDOWS = 16  # where neither the user nor a method asks for another number
TERNARY = 1.5  # nominal bits of three levels: five codes fit a byte (1.6 bits); log2(3) is 1.585


# Codes

class Codes:
    """Quantized keys, or values, of one layer: `packed`, and what else the codec stores, under names of its own.

    Dimension 2 of each tensor grows with the text: along tokens, their groups, or outliers. packed (B, Hkv, T, bytes of
    a row) uint8, or (B, Hkv, T, d) in 16 bits where nothing is quantized. Codecs that treat all heads of a token as
    one row have 1 instead of Hkv.
    """
    gone = 0  # the first tokens, whose codes were dropped because no later query sees them

    def __init__(self, packed, **others):
        self.packed = packed
        vars(self).update(others)

    def followed_by(self, other):
        """These codes followed by others of the same codec. Only the last block may end in a partial group."""
        return type(self)(**{name: torch.cat([mine, vars(other)[name]], dim=2) for name, mine in vars(self).items()})

    @property
    def nbytes(self):
        """Bytes that the tensors hold."""
        return sum(tensor.nbytes for tensor in vars(self).values())

    def __repr__(self):
        shapes = [f"{name} {tuple(tensor.shape)}" for name, tensor in vars(self).items()]
        return f"{type(self).__name__}({', '.join(shapes)}: {self.nbytes} bytes)"


# Packing

WORDS = torch.int64, torch.int32, torch.int16, torch.uint8  # `unpack` takes the widest that divides a row


class Section(NamedTuple):
    """The bytes of a packed row that hold some of the bits of every code."""
    first: int  # byte of the row
    size: int  # in bytes
    bits: int  # of each code; as many codes as fit lie in a byte
    low: int  # the lowest of these bits, in the code


def sections(n, bits):
    """How n codes lie in a row. 3 bits are 2 and 1: first come the two low bits of all codes, then the high bit of all
    codes. So no code lies across two bytes."""
    if bits == TERNARY:  # five codes in base 3 fit a byte
        return [Section(0, math.ceil(n / 5), TERNARY, 0)]
    of_row, first, low = [], 0, 0
    for width in (8, 4, 2, 1):
        if int(bits) & width:
            size = math.ceil(n * width / 8)
            of_row.append(Section(first, size, width, low))
            first, low = first + size, low + width
    return of_row


def pack(codes, bits):
    """Codes (..., n), integers below 2**bits (below 3 if ternary) -> (..., bytes of a row) uint8.

    A row of n = 128 codes of 2 bits takes 32 bytes. The first 32 codes lie in the lowest bits of these bytes, the next
    32 codes above them, and so on.
    """
    if codes.numel():
        low, high = torch.stack(codes.aminmax()).tolist()  # waits for a GPU once
        if not 0 <= low <= high <= largest_code(bits):
            raise UserError(f"codes of {bits:g} bits go from 0 to {largest_code(bits)}; these go from {low:g} to "
                            f"{high:g}")
    codes = codes.to(torch.uint8 if bits <= 8 else torch.int32)
    packed = []
    for section in sections(codes.shape[-1], bits):
        part = codes  # (..., n)
        if bits != section.bits:  # these bits of each code
            part = (codes >> section.low & largest_code(section.bits)).to(torch.uint8)
        # fill the last byte up with zeros
        factors = factors_of(section.bits)
        part = pad(part, (0, -part.shape[-1] % len(factors)))  # (..., codes of a byte * bytes)
        # add the codes of each byte, each times its factor
        planes = part.unflatten(-1, (len(factors), -1))  # (..., codes of a byte, bytes)
        total = planes.new_zeros(planes[..., 0, :].shape)  # (..., bytes), each row in one piece
        for i, factor in enumerate(factors):
            total += planes[..., i, :] * factor
        packed.append(total)
    return torch.cat(packed, dim=-1)


def unpack(packed, bits, n):
    """Bytes of rows (..., bytes) -> the n codes (..., n): uint8, int16 from 9 bits on."""
    for section in sections(n, bits):
        part = packed[..., section.first:section.first + section.size]  # (..., bytes)
        # take the codes of each byte apart
        factors = factors_of(section.bits)
        if bits == TERNARY:
            part = torch.cat([part // factor for factor in factors], dim=-1) % 3  # (..., codes of a byte * bytes)
        elif section.bits < 8:
            # shift whole words of up to 8 bytes: in each byte the bits that came from the next one are masked out
            word = next(dtype for dtype in WORDS if section.size % dtype.itemsize == 0)
            part = part.clone(memory_format=torch.contiguous_format)  # a slice may begin, or end, within a word
            words = part.view(word)  # (..., words)
            shifts = torch.arange(0, 8, section.bits, dtype=word, device=words.device)  # (codes of a byte)
            words = words[..., None, :] >> shifts[:, None]  # (..., codes of a byte, words)
            words &= int.from_bytes([largest_code(section.bits)] * word.itemsize, "little")  # the same in every byte
            part = words.flatten(-2).view(torch.uint8)  # (..., codes of a byte * bytes)
        part = part[..., :n]
        # put the bits of each code together
        if section.low == 0:
            codes = part if bits <= 8 else part.to(torch.int16)  # (..., n)
        else:
            codes = codes | part.to(codes.dtype) << section.low
    return codes


def factors_of(bits):
    """What each code of a byte is multiplied by: [1, 4, 16, 64] for 2 bits."""
    if bits == TERNARY:
        return [1, 3, 9, 27, 81]
    return [2 ** i for i in range(0, 8, bits)]


# Settings

def known_bits(bits, known=(1, TERNARY, 2, 3, 4, 5, 6, 7, 8)):
    """Bits of a code, as an integer or 1.5. UserError for others."""
    if bits not in known:
        raise UserError(f"bits are one of {', '.join(map(str, known))} (1.5: three levels), or 16, which is "
                        f"the codec `Exact`; got {bits}")
    return bits if bits == TERNARY else int(bits)


def largest_code(bits):
    """Codes go from 0 to this."""
    return 2 if bits == TERNARY else 2 ** int(bits) - 1


# Codecs

class Codec:
    """How the keys, or the values, of one layer are quantized: `encode` and `decode`, and `fit` if it needs text.

    A scheme makes them: a function of a config, the kind ("k" or "v") and bits. SCHEMES[name] = function, "pre" or
    "post" (keys are stored before RoPE, or after it, unless --rope says) gives it a name. Its further arguments,
    Annotated[type, help], are settings, each with a flag of its name; the codec keeps them under the same names, as
    tables serve only a codec that was made in the same way.
    """
    bits = None  # nominal bits of a number, which every codec says
    tokens_per_group = 1  # tokens that share a scale: codes are appended only after whole groups
    window = None  # tokens that a query sees, where older codes are dropped
    needs_text = False  # True: calibration has to call `fit` before the first text
    needs_gradient = False  # True: `fit` is given the gradient of the loss
    tables = ()  # names of the tensors that `fit` sets (None before it): only these are restored and counted

    def fit(self, rows, kept, gradient=None, seed=0):
        """Find the tables, given the keys, or values, of W windows of calibration text.

        rows (W, Hkv, T, d): in full precision, as the method stores them. kept (W, Hkv, T): True at tokens that the
        method keeps and never quantizes. gradient (W, Hkv, T, d): of each window's loss with respect to rows. seed: of
        k-means.
        """

    def encode(self, x, ignore=None):
        """x (B, Hkv, T, d) -> Codes. ignore (B, Hkv, T): True at kept tokens, which must not matter for the others."""
        raise NotImplementedError

    def decode(self, codes):
        """Codes -> (B, Hkv, T, d), in any floating-point type."""
        raise NotImplementedError

    def calibrated(self):
        """The tables that are there, {name: tensor}."""
        tables = {name: getattr(self, name) for name in self.tables}
        return {name: table for name, table in tables.items() if table is not None}

    def __repr__(self):
        return f"{type(self).__name__}({self.bits:g} bits)"


def sixteen_bits(x):
    """A key or a value as caches store it: in the model's dtype, or fp16 if the model runs in fp32."""
    return x if x.dtype.itemsize == 2 else x.half()


class Exact(Codec):
    """16 bits: nothing is quantized."""
    bits = 16

    def encode(self, x, ignore=None):
        return Codes(x.clone())  # a view would keep the whole tensor around it alive

    def decode(self, codes):
        return codes.packed


def to_rows(x):
    """All heads of a token as one row: x (B, Hkv, T, d) -> (B, T, C)."""
    return x.transpose(1, 2).flatten(2)


def to_heads(rows, width):
    """The inverse: rows (B, T, C) -> (B, Hkv, T, d), d = width."""
    return rows.unflatten(-1, (-1, width)).transpose(1, 2)


class Pair(NamedTuple):
    """The two codecs of one layer."""
    k: Codec
    v: Codec


# Calibration

def channel_ranges(rows, kept):
    """The smallest and the largest number of each channel, (Hkv, d) both. rows (W, Hkv, T, d), without the tokens that
    are kept, (W, Hkv, T)."""
    lo = rows.float().masked_fill(kept[..., None], float("inf"))  # (W, Hkv, T, d)
    hi = rows.float().masked_fill(kept[..., None], float("-inf"))  # (W, Hkv, T, d)
    return lo.amin((0, 2)), hi.amax((0, 2))
