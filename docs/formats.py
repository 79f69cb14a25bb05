"""The number formats in which vLLM, SGLang and llama.cpp store keys and values, as three schemes.

own_codec.md measures them. A token's numbers of one head are cut into blocks of neighbouring channels, and a block has
a scale s: x' = s times the number that a code stands for. No format needs calibration text.

    --scheme  --bits   codes    a block   its scale                               as in
    nvfp      8        E4M3     -         none: s = 1                             vLLM and SGLang, fp8
    nvfp      4        E2M1     16        E4M3, max |x| / 6                       SGLang and TensorRT-LLM, nvfp4
    mxfp      8, 4     the same 32        a power of two, the largest that        OCP MX, mxfp8 and mxfp4
                                          lets max |x| / s reach the top binade
    ggml      8        integer  32        fp16, max |x| / 127                     llama.cpp, q8_0
    ggml      4        integer  32        fp16: the number farthest from 0 is -8  llama.cpp, q4_0

E4M3 is a float of 8 bits: a sign, 4 bits of exponent and 3 of mantissa. E2M1 has 4 bits. Their codes are rounded half
to even, and beyond the largest number, 448 or 6, to that.

Paper and practice. The formats say how a code is read, and leave the choice of scales and codes to who writes them.
Here floats are written as the OCP MX standard and NVIDIA write them, and integers as llama.cpp does: its codes come
from the scale before that is rounded to fp16, and half goes away from 0 (8 bits) or up (4 bits). nvfp4 and fp8 have
another scale, one for a whole tensor, which is 1 where no calibration has set it.
"""
from functools import partial
from typing import Annotated

import torch

from tinykv import UserError, one_of
from tinykv.codecs.base import Codec, Codes, known_bits, pack, unpack
from tinykv.codecs.schemes import SCHEMES
from tinykv.methods.pfn import PFN

E4M3 = torch.float8_e4m3fn
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])  # what the low three bits of a code stand for; the high one is a sign


def to_float(y, bits):
    """The codes of the nearest floats: y, in any shape -> uint8."""
    if bits == 8:
        return y.clamp(-448, 448).to(E4M3).view(torch.uint8)
    size = y.abs().contiguous()
    edges = ((E2M1[1:] + E2M1[:-1]) / 2).to(y.device)  # (7)
    # on an edge there are two nearest: take the even code
    below = torch.bucketize(size, edges)
    above = torch.bucketize(size, edges, right=True)
    code = torch.where(below % 2 == 0, below, above)
    return (code + 8 * y.signbit()).to(torch.uint8)


def from_float(code, bits):
    """The inverse: codes -> fp32."""
    if bits == 8:
        return code.view(E4M3).float()
    size = E2M1.to(code.device)[(code & 7).long()]
    return torch.where(code < 8, size, -size)


class Blocks(Codec):
    """Blocks of channels that share a scale. A format says how a block is coded, and how it is read."""
    size = 32  # G, the channels of a block

    def __init__(self, bits, width):
        self.bits, _ = known_bits(bits, (4, 8))
        self.width, self.size = width, min(self.size, width)

    def encode(self, x, ignore=None):  # no block has numbers of two tokens, so kept tokens cannot matter
        g = x.float().unflatten(-1, (-1, self.size))  # (B, Hkv, T, d/G, G)
        code, scale = self.code_of(g)  # (B, Hkv, T, d/G, G), (B, Hkv, T, d/G, 1)
        return Codes(pack(code.flatten(-2), self.bits), scale=scale)

    def decode(self, codes):
        code = unpack(codes.packed, self.bits, self.width)  # (B, Hkv, T, d)
        code = code.unflatten(-1, (-1, self.size))  # (B, Hkv, T, d/G, G)
        return self.read(code, codes.scale).flatten(-2)  # (B, Hkv, T, d)


class FP8(Codec):
    bits = 8

    def __init__(self, bits, width):
        pass

    def encode(self, x, ignore=None):
        return Codes(to_float(x.float(), 8))

    def decode(self, codes):
        return from_float(codes.packed, 8)


class NVFP4(Blocks):
    size = 16

    def code_of(self, g):
        scale = to_float(g.abs().amax(-1, keepdim=True) / 6, 8)  # as it is stored
        s = from_float(scale, 8)
        y = torch.where(s == 0, 0, g / s)
        return to_float(y, 4), scale

    def read(self, code, scale):
        return from_float(code, 4) * from_float(scale, 8)


class MXFP(Blocks):
    def code_of(self, g):
        # max |x| = m 2^e with 1/2 <= m < 1, and 6 = 3/4 2^3, 448 = 7/8 2^9
        _, e = torch.frexp(g.abs().amax(-1, keepdim=True))
        scale = e - {8: 9, 4: 3}[self.bits]  # of s = 2^scale
        scale = scale.clamp(-127, 127)
        return to_float(torch.ldexp(g, -scale), self.bits), (scale + 127).to(torch.uint8)

    def read(self, code, scale):
        return torch.ldexp(from_float(code, self.bits), scale.int() - 127)


class GGML(Blocks):
    def code_of(self, g):
        if self.bits == 8:
            s = g.abs().amax(-1, keepdim=True) / 127
        else:
            s = g.gather(-1, g.abs().argmax(-1, keepdim=True)) / -8
        y = g * torch.where(s == 0, 0, 1 / s)
        if self.bits == 8:
            code = 128 + y.sign() * torch.floor(y.abs() + 0.5)
        else:
            code = torch.floor(y + 8.5).clamp(max=15)
        return code.to(torch.uint8), s.clamp(-65504, 65504).half()

    def read(self, code, scale):
        return scale.float() * (code.float() - 2 ** (self.bits - 1))


class Rotated(Codec):
    """A codec of rows times a Hadamard matrix, which spreads what one channel has over all. The sums are in float64, so
    that codes do not depend on how many tokens come at once."""

    def __init__(self, codec, d):
        H = torch.ones(1, 1, dtype=torch.float64)
        while len(H) < d:
            H = torch.cat([torch.cat([H, H], 1), torch.cat([H, -H], 1)])
        if len(H) != d:
            raise UserError(f"a Hadamard matrix has a power of two rows, and a head has {d} channels")
        self.codec, self.bits, self.H = codec, codec.bits, H / d ** 0.5  # (d, d), its own inverse

    def encode(self, x, ignore=None):
        return self.codec.encode(x.double() @ self.H.to(x.device))

    def decode(self, codes):
        x = self.codec.decode(codes)
        return (x.double() @ self.H.to(x.device)).float()


def formats(makers, config, kind, bits,
            hadamard: Annotated[str, "nvfp, mxfp, ggml: multiply each row by a Hadamard matrix: off or on"] = "off"):
    one_of(("off", "on"), hadamard=hadamard)
    known_bits(bits, makers)
    codec = makers[bits](bits, config.head_dim)
    return Rotated(codec, config.head_dim) if hadamard == "on" else codec


SCHEMES["nvfp"] = partial(formats, {8: FP8, 4: NVFP4}), "post"  # keys are quantized after RoPE
SCHEMES["mxfp"] = partial(formats, {8: MXFP, 4: MXFP}), "post"
SCHEMES["ggml"] = partial(formats, {8: GGML, 4: GGML}), "post"


class Formats(PFN):
    beside = {"kivi": {}}

    def __init__(self, config, scheme="nvfp", preserve=0, k_bits=4, v_bits=4, **codec):
        super().__init__(config, preserve, scheme=scheme, k_bits=k_bits, v_bits=v_bits, **codec)
