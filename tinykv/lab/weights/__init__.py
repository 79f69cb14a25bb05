"""Weight-only quantization, for IntactKV: the quantizers, a file each, and the walk over blocks."""
import copy

import torch
from torch import nn

from tinykv import all_finite
from tinykv.lab.weights.awq import AWQ
from tinykv.lab.weights.base import BlockRunner
from tinykv.lab.weights.gptq import GPTQ
from tinykv.lab.weights.linear import QuantLinear
from tinykv.lab.weights.omniquant import OmniQuant
from tinykv.lab.weights.rtn import RTN

QUANTIZERS = {"rtn": RTN, "awq": AWQ, "gptq": GPTQ, "omniquant": OmniQuant}


@torch.no_grad()
def quantize(model, quantizer, windows=None, progress=None):
    """A Llama with the linear layers of its blocks quantized. It shares all else with the model.

    windows (W, T): calibration text, if `quantizer.needs_text`. progress: wraps the loop over the blocks, as tqdm does.
    The model itself is not changed.
    """
    run = BlockRunner(model)
    layers = model.model["layers"]

    # what the next block reads, in the full-precision model and in the one quantized so far
    full = quantized = None
    if quantizer.needs_text:
        full = quantized = model.model["embed_tokens"](windows)  # (W, T, D)

    new_blocks = nn.ModuleList()
    for block in layers if progress is None else progress(layers):
        new = copy.deepcopy(block)
        if quantizer.needs_text:
            output = run(block, full)  # (W, T, D)
            all_finite(f"outputs of block {len(new_blocks)} in full precision", output)
        quantizer.quantize(new, run, full, quantized)
        if quantizer.needs_text:
            full, quantized = output, run(new, quantized)  # (W, T, D) both
            all_finite(f"outputs of quantized block {len(new_blocks)}", quantized)
        new_blocks.append(new)

    # a Llama of these blocks, and of the model's other parts, which deepcopy takes to be copied already
    parts = model.model["embed_tokens"], model.model["norm"], model.lm_head, model.rope, model.config
    return copy.deepcopy(model, {id(layers): new_blocks, **{id(part): part for part in parts}})


def restore(model, quantizer, tensors):
    """What `quantize(model, quantizer, ...)` gave, from the tensors of its blocks, {name: tensor}."""
    # 1. blocks of the right shapes; of a layer's tensors, only the gain may be there or not
    new = quantize(model, RTN(quantizer.bits, quantizer.group_size))
    blocks = new.model["layers"]
    for name, module in blocks.named_modules():
        if isinstance(module, QuantLinear):
            module.gain = tensors.get(f"{name}.gain")

    # 2. fill them in
    blocks.load_state_dict(tensors, assign=True)
    return new


def weight_bytes(model):
    """Bytes of the model's tensors."""
    return sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
