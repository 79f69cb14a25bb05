"""The number formats in which serving engines store keys and values: a scheme each, under the engines' own names.

serving.md says which engine has which, and own_codec.md measures them. A token's numbers of one head are cut into
blocks of neighbouring channels, and a block has a scale s: x' = s times the number that a code stands for. No format
needs calibration text.

    --scheme             codes   a block  its scale                               as in
    fp8                  E4M3    -        none: s = 1                             vLLM, SGLang, TensorRT-LLM
    mxfp8                E4M3    32       a power of two, the largest that        OCP MX
                                          lets max |x| / s reach the top binade
    int8_per_token_head  8 bits  a head   fp32, max |x| / 127                     vLLM
    q8_0                 8 bits  32       fp16, max |x| / 127                     llama.cpp
    q5_1, q4_1           5, 4    32       fp16, (max - min) / 31 or 15; and min   llama.cpp
    q5_0, q4_0           5, 4    32       fp16: the number farthest from 0        llama.cpp
                                          is -16 or -8
    nvfp4                E2M1    16       E4M3, max |x| / 6                       vLLM, SGLang, TensorRT-LLM
    mxfp4                E2M1    32       as mxfp8                                OCP MX; SGLang, in blocks of 16

E4M3 is a float of 8 bits: a sign, 4 bits of exponent and 3 of mantissa. E2M1 has 4 bits. Their codes are rounded half
to even, and beyond the largest number, 448 or 6, to that. q5_1 and q4_1 add the minimum: x' = s times the code + min.

Paper and practice. The formats say how a code is read, and leave the choice of scales and codes to whoever writes them.
Here floats are written as the OCP MX standard and NVIDIA write them (mxfp8 and mxfp4 as torchao's FLOOR does, while
llm-compressor rounds their scale, and has a smaller error), and integers as llama.cpp does: its codes come from the
scale before that is rounded to fp16, and half goes away from 0 (8 bits) or up (5 and 4 bits). vLLM rounds its 8 bits
half to even. nvfp4 and fp8 have another scale, one for a whole tensor, which is 1 unless it was calibrated.
"""
from functools import partial
from typing import Annotated

import torch

from tinykv import UserError, one_of
from tinykv.codecs.base import BLOCK, Codec, Codes, Exact, Pair, known_bits, pack, unpack
from tinykv.codecs.centred import Centred
from tinykv.codecs.rotated import Rotated
from tinykv.codecs.schemes import SCHEMES
from tinykv.methods.base import Method
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
        self.bits = known_bits(bits, (4, 5, 8))
        self.width, self.size = width, min(self.size, width)
        if width % self.size:
            raise UserError(f"this format has blocks of {self.size} channels, which do not divide a head's {width}")

    def encode(self, x, ignore=None):  # no block has numbers of two tokens, so kept tokens cannot matter
        g = x.float().unflatten(-1, (-1, self.size))  # (B, Hkv, T, d/G, G)
        code, stored = self.code_of(g)  # (B, Hkv, T, d/G, G), {name: (B, Hkv, T, d/G, 1)}
        return Codes(pack(code.flatten(-2), self.bits), **stored)

    def decode(self, codes):
        code = unpack(codes.packed, self.bits, self.width)  # (B, Hkv, T, d)
        code = code.unflatten(-1, (-1, self.size))  # (B, Hkv, T, d/G, G)
        return self.read(code, codes).flatten(-2)  # (B, Hkv, T, d)


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
        return to_float(y, 4), {"scale": scale}

    def read(self, code, stored):
        return from_float(code, 4) * from_float(stored.scale, 8)


class MXFP(Blocks):
    def code_of(self, g):
        # max |x| = m 2^e with 1/2 <= m < 1, and 6 = 3/4 2^3, 448 = 7/8 2^9
        _, e = torch.frexp(g.abs().amax(-1, keepdim=True))
        scale = e - {8: 9, 4: 3}[self.bits]  # of s = 2^scale
        scale = scale.clamp(-127, 127)
        return to_float(torch.ldexp(g, -scale), self.bits), {"scale": (scale + 127).to(torch.uint8)}

    def read(self, code, stored):
        return torch.ldexp(from_float(code, self.bits), stored.scale.int() - 127)


class INT8(Blocks):
    def __init__(self, bits, width):
        self.size = width
        super().__init__(bits, width)

    def code_of(self, g):
        s = g.abs().amax(-1, keepdim=True).clamp(min=127e-6) / 127
        code = 128 + torch.round(g * (1 / s))
        return code.to(torch.uint8), {"scale": s}

    def read(self, code, stored):
        return stored.scale * (code.float() - 128)


class GGML(Blocks):
    def code_of(self, g):
        middle = 2 ** (self.bits - 1)  # the code that stands for 0
        if self.bits == 8:
            s = g.abs().amax(-1, keepdim=True) / 127
        else:
            s = g.gather(-1, g.abs().argmax(-1, keepdim=True)) / -middle
        y = g * torch.where(s == 0, 0, 1 / s)
        if self.bits == 8:
            code = middle + y.sign() * torch.floor(y.abs() + 0.5)
        else:
            code = torch.floor(y + middle + 0.5).clamp(max=2 * middle - 1)
        return code.to(torch.uint8), {"scale": s.clamp(-65504, 65504).half()}

    def read(self, code, stored):
        return stored.scale.float() * (code.float() - 2 ** (self.bits - 1))


class GGMLWithMinimum(Blocks):
    def code_of(self, g):
        low, high = g.aminmax(dim=-1, keepdim=True)
        s = (high - low) / (2 ** self.bits - 1)
        y = (g - low) * torch.where(s == 0, 0, 1 / s)
        code = torch.floor(y + 0.5)
        stored = {"scale": s.clamp(max=65504).half(), "low": low.clamp(-65504, 65504).half()}
        return code.to(torch.uint8), stored

    def read(self, code, stored):
        return stored.scale.float() * code.float() + stored.low.float()


#          {name: (what makes its codec, bits of a code)}
FORMATS = {"fp8": (FP8, 8), "mxfp8": (MXFP, 8), "int8_per_token_head": (INT8, 8), "q8_0": (GGML, 8),
           "q5_1": (GGMLWithMinimum, 5), "q5_0": (GGML, 5), "q4_1": (GGMLWithMinimum, 4), "q4_0": (GGML, 4),
           "nvfp4": (NVFP4, 4), "mxfp4": (MXFP, 4), "fp16": (None, 16)}


def format_codec(name, config, kind, bits,
                 hadamard: Annotated[str, "multiply each row by a Hadamard matrix: off or on"] = "off"):
    one_of(("off", "on"), hadamard=hadamard)
    make, own_bits = FORMATS[name]
    if bits != own_bits:
        raise UserError(f"{name} has {own_bits} bits; give --bits {own_bits}")
    if make is None:
        return Exact()
    codec = make(bits, config.head_dim)
    return Rotated(codec, config.head_dim) if hadamard == "on" else codec


for name in FORMATS:
    SCHEMES[name] = partial(format_codec, name), "post"  # keys are quantized after RoPE


class Formats(Method):
    """Keys and values in a format, or in one each. The first `preserve` tokens stay in 16 bits. With `centre`, keys are
    quantized before RoPE, where a bias of `k_proj` is the same for all tokens."""
    beside = {"kivi": {"k_bits": 4, "v_bits": 4, "group_size": 64}}  # in the true bits of nvfp4 and q4_0
    block = BLOCK
    keep_keys = PFN.keep_keys

    def __init__(self, config, scheme="fp8",
                 v_scheme: Annotated[str | None, "the format of values, where it is not that of keys"] = None,
                 hadamard="off", centre="off", preserve=0):
        super().__init__(config)
        one_of(FORMATS, scheme=scheme, v_scheme=v_scheme)
        one_of(("off", "on"), centre=centre)
        v_scheme = v_scheme or scheme
        self.scheme = scheme if v_scheme == scheme else f"{scheme}/{v_scheme}"
        self.codecs = [Pair(k=format_codec(scheme, config, "k", FORMATS[scheme][1], hadamard),
                            v=format_codec(v_scheme, config, "v", FORMATS[v_scheme][1], hadamard))
                       for _ in range(config.num_hidden_layers)]
        if centre == "on" and self.bits_of("k") < 16:
            self.codecs = [Pair(k=Centred(pair.k), v=pair.v) for pair in self.codecs]
        self.preserve, self.rope = preserve, "pre" if centre == "on" else "post"
