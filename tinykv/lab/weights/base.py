"""What a weight quantizer is: it quantizes the linear layers of one block after the other.

AWQ and OmniQuant also use equivalent transformations. The inputs of a linear layer are divided by s, and the columns of
its weight are multiplied by s: in full precision nothing changes, but the weights round differently. The division is
folded into the layer before: the weight of a norm, or the rows of another linear layer.
"""
import torch
from torch import nn

from tinykv import UserError
from tinykv.lab.weights.linear import LINEARS, QuantLinear


class Quantizer:
    """bits: 2 to 8. group_size: inputs that share a scale; None: the largest divisor up to 128."""
    needs_text = False  # True: `quantize` looks at what the blocks read

    def __init__(self, bits=4, group_size=None):
        if bits not in range(2, 9):
            raise UserError(f"weights take 2 to 8 bits; got {bits}")
        self.bits = int(bits)
        self.group_size = group_size

    def quantize(self, block, run, full, quantized):
        """Replace the linear layers of block, a copy that may be changed, by `QuantLinear`.

        run: `BlockRunner`, which runs the block or its attention. full, quantized (W, T, D): what the block reads in
        the full-precision model, and in the model whose blocks before it are quantized; None unless `needs_text`.
        """
        raise NotImplementedError

    def replace(self, block, names=LINEARS, grids=None, gains=None):
        """Quantize the linear layers `names`.

        grids {name: (scale, zero)}: the grid of a layer; without one it is rounded to nearest. gains {name: (out)}: by
        how much the outputs of a layer have been scaled, if they have.
        """
        grids, gains = grids or {}, gains or {}
        for name in names:
            linear = block.get_submodule(name)
            scale, zero = grids.get(name, (None, None))
            new = QuantLinear(linear, self.bits, self.group_size, scale, zero, gains.get(name))
            block.set_submodule(name, new)


class BlockRunner:
    """Runs a block, or its attention, on hidden states (W, T, D), a few windows at a time."""

    def __init__(self, model, batch=4):
        self.model = model
        self.batch = batch

    def __call__(self, module, h):
        """Run a block, its `Attention`, or a function with the same arguments, on h (W, T, D)."""
        T = h.shape[1]
        mask = self.model.mask(0, T, h.device)  # (T, T), or None for a plain causal square
        parts = [module(part, self.model.rope, 0, mask, 0) for part in h.split(self.batch)]
        return torch.cat(parts)

    def heads(self, attention, h):
        """The outputs of the heads side by side, (W, T, H * d): what o_proj reads."""
        o_proj = attention.o_proj
        attention.o_proj = nn.Identity()  # the attention returns what o_proj would read
        heads = self(attention, h)  # (W, T, H * d)
        attention.o_proj = o_proj
        return heads


# Equivalent transformations

FOLDS = {
    # name: (what produces the channels, what reads them)
    "attention": ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    "values": ("self_attn.v_proj", ("self_attn.o_proj",)),
    "mlp": ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
    "gated": ("mlp.up_proj", ("mlp.down_proj",)),
}


def transformed(block, scales):
    """The parameters of an equivalent block that change, {name: new value}, in fp32.

    scales {name in FOLDS: s (channels)}: the producer of the channels divides them by s, and the columns of its readers
    are multiplied by s. The s of "values" is (Hkv * d): the query heads of a KV head share it.
    """
    # 1. the parameters as they are; one may belong to two transformations
    new = {}
    for name in scales:
        producer, readers = FOLDS[name]
        for module in (producer, *readers):
            new[f"{module}.weight"] = block.get_parameter(f"{module}.weight").float()
        if getattr(block.get_submodule(producer), "bias", None) is not None:
            new[f"{producer}.bias"] = block.get_parameter(f"{producer}.bias").float()

    # 2. each transformation in turn
    for name, s in scales.items():
        producer, readers = FOLDS[name]
        weight = new[f"{producer}.weight"]  # (channels) of a norm, (channels, in) of a linear layer
        new[f"{producer}.weight"] = weight / s if weight.dim() == 1 else weight / s[:, None]
        if f"{producer}.bias" in new:
            new[f"{producer}.bias"] = new[f"{producer}.bias"] / s  # (channels)
        if name == "values":
            kv_heads, heads = block.self_attn.n_kv_heads, block.self_attn.n_heads
            s = s.view(kv_heads, -1).repeat_interleave(heads // kv_heads, dim=0).flatten()  # (H * d)
        for reader in readers:
            new[f"{reader}.weight"] = new[f"{reader}.weight"] * s  # (out, channels)
    return new


def transform(block, scales):
    """Make block the equivalent one."""
    for name, value in transformed(block, scales).items():
        parameter = block.get_parameter(name)
        parameter.data = value.detach().to(parameter.dtype)
