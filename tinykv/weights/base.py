"""What a weight quantizer is: it turns one block after the other into its quantized self.

An equivalent transformation divides the inputs of a linear layer by s and multiplies the weight's columns by it: in
full precision nothing changes, but the weights round differently. The division goes into what comes before, a norm's
weight or the rows of another linear layer. AWQ and OmniQuant both do this, so it is done here.
"""
import torch

from tinykv import UserError
from tinykv.weights.linear import LINEARS, QuantLinear


class Quantizer:
    """bits: 2 to 8; group_size: inputs that share a scale, by default the largest divisor up to 128."""
    needs_text = False  # True: `quantize` looks at what the blocks read

    def __init__(self, bits=4, group_size=None):
        if bits not in range(2, 9):
            raise UserError(f"weights take 2 to 8 bits; got {bits}")
        self.bits, self.group_size = int(bits), group_size

    def quantize(self, block, read, full, coded):
        """Replace the linear layers of block, a copy of the model's that may be changed, by `QuantLinear`.

        read: `Reader`, which runs the block or its parts. full, coded (W, T, D): what the block reads in the
        full-precision model, and in the model of which all blocks before are quantized; None unless `needs_text`.
        """
        raise NotImplementedError

    def replace(self, block, names=LINEARS, grids=None, gains=None):
        """Write down the linear layers `names`; grids {name: (scale, zero)} and gains {name: (out)}, if any."""
        for name in names:
            scale, zero = (grids or {}).get(name, (None, None))
            block.set_submodule(name, QuantLinear.of(block.get_submodule(name), self.bits, self.group_size, scale, zero,
                                                     (gains or {}).get(name)))


class Reader:
    """Runs a block, or a part of it, on windows of hidden states (W, T, D), a few at a time."""

    def __init__(self, model, batch=4):
        self.model, self.batch = model, batch

    def __call__(self, module, h):
        """A block, or its `Attention`, or that's `heads`, on h (W, T, D)."""
        positions = torch.arange(h.shape[1], device=h.device)  # (T)
        mask = self.model.mask(0, len(positions), positions.device)
        return torch.cat([module(part, self.model.rope, positions, mask, 0) for part in h.split(self.batch)])


#   name:       (what hands the channels on, what reads them)
FOLDS = {
    "attention": ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    "values": ("self_attn.v_proj", ("self_attn.o_proj",)),
    "mlp": ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
    "gated": ("mlp.up_proj", ("mlp.down_proj",)),
}


def transformed(block, scales):
    """An equivalent block: {parameter's name: its new value}, fp32. scales {name in FOLDS: s (channels)}.

    What hands the channels on divides them by s, what reads them has its columns multiplied. s of "values" is
    (Hkv * d): the query heads of a KV head share it.
    """
    new = {}

    def now(name):
        return new[name] if name in new else block.get_parameter(name).float()

    for name, s in scales.items():
        giver, readers = FOLDS[name]
        weight = now(f"{giver}.weight")  # (channels), or (channels, in)
        new[f"{giver}.weight"] = weight / s.view(-1, *[1] * (weight.dim() - 1))
        if getattr(block.get_submodule(giver), "bias", None) is not None:
            new[f"{giver}.bias"] = now(f"{giver}.bias") / s
        if name == "values":
            attn = block.self_attn
            s = s.view(attn.n_kv_heads, -1).repeat_interleave(attn.n_heads // attn.n_kv_heads, dim=0)  # (H, d)
            s = s.flatten()  # (H * d)
        for reader in readers:
            new[f"{reader}.weight"] = now(f"{reader}.weight") * s  # (out, channels)
    return new


def transform(block, scales):
    """Make block the equivalent one."""
    for name, value in transformed(block, scales).items():
        parameter = block.get_parameter(name)
        parameter.data = value.detach().to(parameter.dtype)
