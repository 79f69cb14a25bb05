"""Weight-only quantization, for IntactKV: the quantizers, one file each, and the walk through the blocks."""
import copy
from functools import partial

import torch
from torch import nn

from tinykv import UserError
from tinykv.model import Block, Llama
from tinykv.weights.awq import AWQ
from tinykv.weights.base import Reader
from tinykv.weights.gptq import GPTQ
from tinykv.weights.linear import QuantLinear
from tinykv.weights.omniquant import OmniQuant
from tinykv.weights.rtn import RTN

QUANTIZERS = {
    "rtn": RTN,
    "awq": AWQ,
    "gptq": GPTQ,
    "omniquant": OmniQuant,
}


@torch.no_grad()
def quantize(model, quantizer, windows=None, progress=None):
    """A Llama with the linear layers of its blocks quantized; model stays as it is, and shares all else with it.

    windows (W, T): calibration text, where `quantizer.needs_text`. progress: what to wrap a loop over the blocks in.
    """
    read, full, coded, blocks = Reader(model), None, None, []
    if quantizer.needs_text:
        full = coded = model.model["embed_tokens"](windows)  # (W, T, D)
    layers = model.model["layers"]
    for block in layers if progress is None else progress(layers):
        new = copy.deepcopy(block)
        if not quantizer.needs_text:
            quantizer.quantize(new, read, None, None)
        else:
            after = finite(read(block, full), len(blocks))  # (W, T, D)
            quantizer.quantize(new, read, full, coded)
            full, coded = after, finite(read(new, coded), len(blocks))  # (W, T, D) both
        blocks.append(new)
    return assemble(model, blocks)


def finite(h, block):
    """h, the output of a block."""
    if not torch.isfinite(h).all():
        raise UserError(f"block {block} computes numbers that are not finite; use another --dtype")
    return h


def assemble(model, blocks):
    """A Llama of these blocks, and everything else of model's."""
    with torch.device("meta"):
        new = Llama(model.config, QuantLinear)
    new.model["layers"] = nn.ModuleList(blocks)
    new.model["embed_tokens"], new.model["norm"], new.lm_head = (
        model.model["embed_tokens"], model.model["norm"], model.lm_head)
    new.rope = model.rope
    return new


def tensors_of(model):
    """What `quantize` made, {name: tensor}: the blocks' tensors, to be saved."""
    return model.model["layers"].state_dict()


def restore(model, quantizer, tensors):
    """What `quantize(model, quantizer, ...)` gave, from its `tensors_of`."""
    linear = partial(QuantLinear, bits=quantizer.bits, group_size=quantizer.group_size)
    with torch.device("meta"):
        blocks = nn.ModuleList(Block(model.config, linear) for _ in model.model["layers"])
    for name, tensor in tensors.items():
        owner, _, leaf = name.rpartition(".")
        owner = blocks.get_submodule(owner)
        setattr(owner, leaf, nn.Parameter(tensor, False) if leaf in owner._parameters else tensor)
    return assemble(model, blocks)


def weight_bytes(model):
    """Bytes that the model's tensors hold."""
    return sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
