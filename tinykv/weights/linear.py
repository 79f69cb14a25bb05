"""A linear layer whose weight is stored as b-bit integers, and the grid that all four quantizers use."""
import torch
import torch.nn.functional as F
from torch import nn

from tinykv import UserError
from tinykv.codecs import pack, row_bytes, unpack

LINEARS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
           "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # of a block; embedding, norms and head stay as they are


def group_of(in_features, group_size=None):
    """The inputs that share a scale: group_size, which must divide; or by default the largest divisor up to 128."""
    if group_size is None:
        return next(g for g in range(min(128, in_features), 0, -1) if in_features % g == 0)
    if group_size < 1 or in_features % group_size:
        raise UserError(f"groups of {group_size} weights do not divide the {in_features} inputs of a linear layer; "
                        "leave the group size out to get the largest that does, up to 128")
    return group_size


def grid(lo, hi, bits, round=torch.round):
    """Range of each group -> scale, in the 16 bits that it is stored in, and integer zero point; both fp32.

        s = (max - min) / (2**b - 1),  z = -round(min / s)
    The range is made to include 0, so z is one of the codes (AWQ clamps z instead, and a group of one sign saturates).
    """
    levels = 2 ** bits - 1
    lo, hi = lo.float().clamp(max=0), hi.float().clamp(min=0)
    scale = ((hi - lo).clamp(min=1e-5) / levels).clamp(max=6e4).half().float()
    return scale, round(-lo / scale).clamp(0, levels)


def codes_of(groups, scale, zero, bits, round=torch.round):
    """Weights of groups -> code = clamp(round(w / s) + z), fp32."""
    return (round(groups / scale) + zero).clamp(0, 2 ** bits - 1)


def rounded(weight, bits, group_size):
    """weight (out, in) -> the same as a quantized layer would read it, w' = s (code - z); round to nearest."""
    groups = weight.float().unflatten(1, (-1, group_size))  # (out, in/G, G)
    scale, zero = grid(groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True), bits)  # (out, in/G, 1) both
    return ((codes_of(groups, scale, zero, bits) - zero) * scale).flatten(1)  # (out, in) fp32


class QuantLinear(nn.Module):
    """As nn.Linear, with the weight packed. It is decoded in every forward.

    Nothing decoded is held, but by autograd: while a prefix is trained, all layers' weights until the backward pass.
    """

    def __init__(self, in_features, out_features, bias=False, bits=4, group_size=None):
        super().__init__()
        self.in_features, self.out_features, self.bits = in_features, out_features, bits
        self.group_size = group_of(in_features, group_size)
        groups = in_features // self.group_size
        self.register_buffer("code", torch.empty(out_features, row_bytes(in_features, bits), dtype=torch.uint8))
        self.register_buffer("zero", torch.empty(out_features, row_bytes(groups, bits), dtype=torch.uint8))
        self.register_buffer("scale", torch.empty(out_features, groups, dtype=torch.float16))
        self.register_buffer("bias", torch.empty(out_features) if bias else None)
        self.register_buffer("gain", None)  # (out), where outputs are the original layer's times this

    @classmethod
    def of(cls, linear, bits, group_size, scale=None, zero=None, gain=None):
        """An nn.Linear written down: on the grid scale, zero (out, in/G) where given, else rounded to nearest."""
        new = cls(linear.in_features, linear.out_features, linear.bias is not None, bits, group_size)
        new = new.to(linear.weight.device)
        groups = linear.weight.detach().float().unflatten(1, (-1, new.group_size))  # (out, in/G, G)
        if scale is None:
            scale, zero = grid(groups.amin(-1), groups.amax(-1), bits)  # (out, in/G) both
        codes = codes_of(groups, scale[..., None], zero[..., None], bits).flatten(1)  # (out, in)
        new.code, new.zero, new.scale = pack(codes, bits), pack(zero, bits), scale.half()
        new.bias = None if linear.bias is None else linear.bias.detach().clone()
        new.gain = None if gain is None else gain.detach().float().clone()
        return new

    @property
    def weight(self):
        """(out, in) fp32, decoded."""
        zero = unpack(self.zero, self.bits, self.scale.shape[1]).float()[..., None]  # (out, in/G, 1)
        groups = unpack(self.code, self.bits, self.in_features).float().unflatten(1, (-1, self.group_size))
        return ((groups - zero) * self.scale.float()[..., None]).flatten(1)

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype), self.bias)
