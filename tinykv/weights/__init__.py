"""Weight-only quantization, for IntactKV: the quantizers, a file each, and the walk over blocks."""
import copy
from functools import partial

import torch
from torch import nn

from tinykv import UserError
from tinykv.model import Block, Llama
from tinykv.weights.awq import AWQ
from tinykv.weights.base import BlockRunner
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
    """A Llama with the linear layers of its blocks quantized. It shares all else with the model.

    windows (W, T): calibration text, if `quantizer.needs_text`. progress: wraps the loop over the
    blocks, as tqdm does. The model itself is not changed.
    """
    run = BlockRunner(model)
    layers = model.model["layers"]

    # what the next block reads, in the full-precision model and in the one quantized so far
    full = quantized = None
    if quantizer.needs_text:
        full = quantized = model.model["embed_tokens"](windows)  # (W, T, D)

    new_blocks = []
    for block in layers if progress is None else progress(layers):
        new = copy.deepcopy(block)
        if quantizer.needs_text:
            next_full = check_finite(run(block, full), len(new_blocks))  # (W, T, D)
            quantizer.quantize(new, run, full, quantized)
            full = next_full
            quantized = check_finite(run(new, quantized), len(new_blocks))  # (W, T, D)
        else:
            quantizer.quantize(new, run, None, None)
        new_blocks.append(new)
    return assemble(model, new_blocks)


def check_finite(h, block):
    """h, the output of a block; UserError if it is not finite."""
    if not torch.isfinite(h).all():
        raise UserError(f"block {block} computes numbers that are not finite; use another --dtype")
    return h


def assemble(model, blocks):
    """A Llama of these blocks, and of everything else of the model's."""
    with torch.device("meta"):
        new = Llama(model.config, QuantLinear)
    new.model["layers"] = nn.ModuleList(blocks)
    new.model["embed_tokens"] = model.model["embed_tokens"]
    new.model["norm"] = model.model["norm"]
    new.lm_head = model.lm_head
    new.rope = model.rope
    return new


def tensors_of(model):
    """The tensors of a quantized model's blocks, {name: tensor}: what a file has to keep of it."""
    return model.model["layers"].state_dict()


def restore(model, quantizer, tensors):
    """What `quantize(model, quantizer, ...)` gave, from its `tensors_of`."""
    # 1. blocks of the right shapes, without memory
    linear = partial(QuantLinear, bits=quantizer.bits, group_size=quantizer.group_size)
    with torch.device("meta"):
        blocks = nn.ModuleList(Block(model.config, linear) for _ in model.model["layers"])
    blocks.requires_grad_(False)
    for new, old in zip(blocks, model.model["layers"]):
        new.self_attn.attention = old.self_attn.attention

    # 2. of a layer's tensors, only the gain may be there or not
    for name, module in blocks.named_modules():
        if isinstance(module, QuantLinear) and f"{name}.gain" in tensors:
            module.gain = torch.empty(module.out_features, device="meta")

    # 3. fill them in
    try:
        blocks.load_state_dict(tensors, assign=True)
    except RuntimeError:  # torch names every tensor, over many lines
        raise UserError("the quantized weights in the calibration file do not fit this model; "
                        "remove the file to calibrate again") from None
    return assemble(model, blocks)


def weight_bytes(model):
    """Bytes of the model's tensors."""
    return sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
