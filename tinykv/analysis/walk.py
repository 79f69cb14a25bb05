"""The one loop of the measurements: every window of a text, layer by layer, seen from inside.

A phenomenon is a file that has

    COLUMNS           of its table: {name in a row: (head, format)}
    measure(text)     -> the rows of the table, which --json writes whole
    draw(text, rows)  -> its figure

and its docstring says what it shows. Most have a function `look(at, sinks)`, too: what there is to
measure in one block of one window. A number in a row is the mean over windows, each counted once.

Memory holds one window's activations, of all layers. No T x T matrix of attention is ever whole.
"""
import math
from collections import defaultdict
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from tinykv import UserError
from tinykv.cache_parts.tracing import Trace


@dataclass
class Text:
    """What is looked at: windows of a text, and which of their tokens are sinks."""
    model: torch.nn.Module
    windows: torch.Tensor  # (W, T)
    marks: torch.Tensor  # (W, T): True at the sinks
    layer: int  # that figures show
    progress: Callable = iter  # wraps a loop over windows
    calibration: torch.Tensor | None = None  # (C, T)
    calibration_marks: torch.Tensor | None = None  # (C, T)
    quantized: torch.nn.Module | None = None  # the model with quantized weights
    prefix: int = 0  # tokens that all windows begin with

    def shown(self):
        """What figures show: the first window in the shown layer, and its sinks (T)."""
        return walk(self.model, self.windows[0])[self.layer], self.marks[0]

    def begin(self, n):
        """The first n tokens of the window with the most sinks among them, and their marks: (n) both."""
        w = int(self.marks[:, :n].sum(1).argmax())
        return self.windows[w, :n], self.marks[w, :n]


@dataclass
class Block:
    """What passes through one block of the model in one forward of a window."""
    layer: int
    sliding: int | None  # the size of the model's sliding window
    q: torch.Tensor  # (1, H, T, d), rotated
    k: torch.Tensor  # (1, Hkv, T, d), rotated
    v: torch.Tensor  # (1, Hkv, T, d)
    k_pre: torch.Tensor  # (1, Hkv, T, d), before RoPE
    attention: torch.Tensor  # (T, H * d): the attention output, before o_proj
    mid: torch.Tensor  # (T, D): the residual H' after attention
    d_in: torch.Tensor  # (T, M): the input of the down-projection
    d_out: torch.Tensor  # (T, D): its output
    hidden: torch.Tensor  # (T, D): the residual H after the block


@torch.no_grad()
def walk(model, window):
    """One forward over window (T) in full precision -> [Block], one for each block of the model.

    UserError where the model computes numbers that are not finite.
    """
    # 1. run the model; the trace keeps q, k and v before RoPE, and each block's output
    blocks = model.model["layers"]
    trace = Trace(model)
    with (recorded([block.self_attn.o_proj for block in blocks]) as attention,
          recorded([block.post_attention_layernorm for block in blocks]) as norms,
          recorded([block.mlp.down_proj for block in blocks]) as down):
        model(window[None], trace, logits=False)

    # 2. rotate q and k, layer by layer
    positions = torch.arange(len(window), device=window.device)  # (T)
    found = []
    for layer, hidden in enumerate(trace.hidden):  # (1, T, D)
        check_finite(layer, hidden, trace.k[layer], trace.v[layer])
        (heads, _), (mid, _), (d_in, d_out) = attention[layer], norms[layer], down[layer]
        found.append(Block(
            layer, model.config.sliding_window,
            q=model.rope.rotate(trace.q[layer], positions),
            k=model.rope.rotate(trace.k[layer], positions),
            v=trace.v[layer],
            k_pre=trace.k[layer],
            attention=heads[0],
            mid=mid[0],
            d_in=d_in[0],
            d_out=d_out[0],
            hidden=hidden[0]))
    return found


def check_finite(layer, hidden, k, v):
    """A cache holds keys and values in 16 bits, so they have to be finite there."""
    dtype = k.dtype if k.dtype.itemsize == 2 else torch.float16
    if not all(x.isfinite().all() for x in (hidden, k.to(dtype), v.to(dtype))):
        raise UserError(f"layer {layer} computes numbers that are not finite, or too large for 16 bits; "
                        "use another --dtype or model")


@contextmanager
def recorded(modules):
    """Record what modules are given and what they return: [(input, output)], in the order of calls."""
    calls = []
    hooks = [module.register_forward_hook(lambda module, args, output: calls.append((args[0], output)))
             for module in modules]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


# The loop, and its averages

@torch.no_grad()
def means(text, look):
    """look(at, sinks) -> {key: number or tensor}, of each `Block` of each window -> {key: mean}.

    sinks (T): True at them. What is not finite, such as the mean of no token, does not count.
    """
    numbers = defaultdict(list)
    for window, sinks in zip(text.progress(text.windows), text.marks):
        for at in walk(text.model, window):
            for key, number in look(at, sinks).items():
                numbers[key].append(number)
    return {key: mean(of_key) for key, of_key in numbers.items()}


def by_layer(text, look):
    """look(at, sinks) -> {name: number} -> a row for each layer: [{"layer": 0, name: mean, ..}, ..]."""
    def look_in_layer(at, sinks):
        return {(at.layer, name): number for name, number in look(at, sinks).items()}

    rows = [{"layer": layer} for layer in range(text.model.config.num_hidden_layers)]
    for (layer, name), number in means(text, look_in_layer).items():
        rows[layer][name] = number
    return rows


def mean(numbers):
    """The mean of those numbers, or tensors, that are finite, as a number or list; None if none is."""
    tensors = [torch.as_tensor(x).double().cpu() for x in numbers]
    finite = [x for x in tensors if x.isfinite().all()]
    return torch.stack(finite).mean(0).tolist() if finite else None


def largest(x):
    """The largest magnitude in a tensor; NaN if it is empty."""
    return x.abs().max() if x.numel() else math.nan
