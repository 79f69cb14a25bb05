"""A linear layer with its weight in b-bit integers, and the grid that all four quantizers use.

A group is G consecutive inputs of one output. Its weights share a scale s and a zero point z. A weight w is stored as
code = clamp(round(w / s) + z), and decoded to w' = s (code - z).
"""
import torch
import torch.nn.functional as F
from torch import nn

from tinykv import UserError
from tinykv.codecs.base import pack, unpack

# of a decoder layer; the embedding, the norms and the head stay as they are
LINEARS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
           "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def group_of(in_features, group_size=None):
    """How many inputs share a scale: group_size, or if None the largest divisor up to 128."""
    if group_size is None:
        divisors = [g for g in range(1, min(128, in_features) + 1) if in_features % g == 0]
        return max(divisors)
    if group_size < 1 or in_features % group_size:
        raise UserError(f"groups of {group_size} weights do not divide the {in_features} inputs of a linear layer")
    return group_size


def groups_of(weight, group_size=None):
    """weight (out, in) -> (out, in/G, G) fp32; group_size as above."""
    return weight.float().unflatten(1, (-1, group_of(weight.shape[1], group_size)))


def grid(lo, hi, bits, round=torch.round):
    """The range lo, hi of each group -> its scale, and its zero point, an integer. Both fp32.

        s = (max - min) / (2**b - 1),  z = -round(min / s)
    The scale is rounded to the 16 bits in which it is stored. The range is made to include 0, so z is one of the codes
    (AWQ clamps z instead, and a group whose weights have one sign saturates).
    """
    max_code = 2 ** bits - 1
    lo = lo.float().clamp(max=0)
    hi = hi.float().clamp(min=0)
    scale = (hi - lo).clamp(min=1e-5) / max_code
    scale = scale.clamp(max=6e4).half().float()  # 16 bits end at 65504
    zero = clamp(round(-lo / scale), max_code)
    return scale, zero


def codes_of(groups, scale, zero, bits, round=torch.round):
    """The weights of groups -> their codes, clamp(round(w / s) + z), fp32."""
    codes = round(groups / scale) + zero
    return clamp(codes, 2 ** bits - 1)


def clamp(codes, max_code):
    """codes within [0, max_code]. The smallest and the largest code have a gradient, which not
    every version of torch.clamp gives them."""
    codes = torch.where(codes < 0, 0, codes)
    return torch.where(codes > max_code, max_code, codes)


def rounded(groups, bits):
    """The weights of groups (.., G) -> rounded to nearest and decoded again, (.., G) fp32."""
    lo = groups.amin(-1, keepdim=True)  # (.., 1)
    hi = groups.amax(-1, keepdim=True)  # (.., 1)
    scale, zero = grid(lo, hi, bits)  # (.., 1) both
    codes = codes_of(groups, scale, zero, bits)  # (.., G)
    return (codes - zero) * scale  # (.., G)


class QuantLinear(nn.Module):
    """As nn.Linear, with the weight packed. Every forward decodes it.

    No decoded weight is kept, except by autograd: while a prefix is trained, it holds the decoded weights of all layers
    until the backward pass.
    """

    def __init__(self, linear, bits, group_size, scale=None, zero=None, gain=None):
        """An nn.Linear, quantized on the grid scale, zero (out, in/G); else rounded to nearest."""
        super().__init__()
        self.bits, self.in_features = bits, linear.in_features
        groups = groups_of(linear.weight.detach(), group_size)  # (out, in/G, G)
        self.group_size = groups.shape[-1]
        if scale is None:
            scale, zero = grid(groups.amin(-1), groups.amax(-1), bits)  # (out, in/G) both
        codes = codes_of(groups, scale[..., None], zero[..., None], bits)  # (out, in/G, G)

        self.register_buffer("code", pack(codes.flatten(1), bits))  # (out, bytes of a row)
        self.register_buffer("zero", pack(zero, bits))  # (out, bytes of a row of zero points)
        self.register_buffer("scale", scale.half())  # (out, in/G)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().clone())  # (out)
        # its outputs are the original layer's times this
        self.register_buffer("gain", None if gain is None else gain.detach().float().clone())  # (out)

    @property
    def weight(self):
        """(out, in) fp32, decoded."""
        codes = unpack(self.code, self.bits, self.in_features).float()  # (out, in)
        codes = codes.unflatten(1, (-1, self.group_size))  # (out, in/G, G)
        zero = unpack(self.zero, self.bits, self.scale.shape[1]).float()  # (out, in/G)
        decoded = (codes - zero[..., None]) * self.scale.float()[..., None]  # (out, in/G, G)
        return decoded.flatten(1)

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype), self.bias)
