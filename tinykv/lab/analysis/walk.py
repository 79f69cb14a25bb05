"""The one loop of the measurements: every window of a text, layer by layer, seen from inside.

A phenomenon is a file that has

    COLUMNS           of its table: {name in a row: (head, format)}
    look(at, sinks)   -> what there is to measure at one layer of one window, of what `walk` returns; or, where a row is
                         something else than the means of a layer,
    measure(text)     -> the rows of the table, which --json writes whole
    draw(text, rows)  -> its figure, where it has one

and its docstring says what it shows. A number in a row is the mean over windows, each counted once.

Memory holds one window's activations, of all layers. No T x T matrix of attention is ever whole.
"""
import math
from collections import defaultdict
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch

from tinykv import all_finite
from tinykv.codecs.base import sixteen_bits
from tinykv.lab import cli
from tinykv.model import Trace


@dataclass
class Text:
    """What is looked at: windows of a text, and which of their tokens are sinks."""
    model: torch.nn.Module
    windows: torch.Tensor  # (W, T)
    marks: torch.Tensor  # (W, T): True at the sinks
    layer: int  # that figures show
    calibration: torch.Tensor | None = None  # (C, T)
    calibration_marks: torch.Tensor | None = None  # (C, T): True at its sinks; found when first needed
    calibrated: dict = field(default_factory=dict)  # what `errors.codecs_of` made; a text of other windows shares it

    def shown(self):
        """What figures show: the first window in the shown layer, and its sinks (T)."""
        return walk(self.model, self.windows[0])[self.layer], self.marks[0]


@torch.no_grad()
def walk(model, window):
    """One forward over window (T) in full precision -> what passes through each layer of the model, [layer].

    UserError where the model computes numbers that are not finite.
    """
    # 1. run the model; the trace keeps q, k and v before RoPE, and each layer's output
    trace, modules = Trace(model), []
    for layer in model.model["layers"]:
        modules += [layer.post_attention_layernorm, layer.mlp.down_proj]
    calls = recorded(modules, lambda: model(window[None], trace, logits=False))

    # 2. rotate q and k, layer by layer
    layers = []
    for layer, hidden in enumerate(trace.hidden):  # (1, T, D)
        for x in (hidden, sixteen_bits(trace.k[layer]), sixteen_bits(trace.v[layer])):  # as a cache holds them
            all_finite(f"numbers of layer {layer}", x)
        (mid, _), (d_in, d_out) = calls[2 * layer:2 * layer + 2]
        layers.append(SimpleNamespace(
            layer=layer,
            sliding=model.config.sliding_window,  # of the model, or None
            q=model.rope.rotate(trace.q[layer]),  # (1, H, T, d)
            k=model.rope.rotate(trace.k[layer]),  # (1, Hkv, T, d)
            v=trace.v[layer],  # (1, Hkv, T, d)
            k_pre=trace.k[layer],  # (1, Hkv, T, d), before RoPE
            mid=mid[0],  # (T, D): the residual H' after attention
            d_in=d_in[0],  # (T, M): the input of the down-projection
            d_out=d_out[0],  # (T, D): its output
            hidden=hidden[0]))  # (T, D): the residual H after the layer
    return layers


def recorded(modules, forward):
    """What modules are given and what they return in a forward: [(input, output)], in the order of calls."""
    calls = []
    hooks = [module.register_forward_hook(lambda module, args, output: calls.append((args[0], output)))
             for module in modules]
    forward()
    for hook in hooks:
        hook.remove()
    return calls


# The loop, and its averages

@torch.no_grad()
def by_layer(text, look):
    """look(at, sinks) -> {name: number or tensor}, of each layer of each window -> a row of means for each layer:
    [{"layer": 0, name: mean, ..}, ..].

    sinks (T): True at them. What is not finite, such as the mean of no token, does not count.
    """
    numbers = [defaultdict(list) for _ in text.model.model["layers"]]
    for window, sinks in zip(cli.bar(text.windows, "measuring"), text.marks):
        for at in walk(text.model, window):
            for name, number in look(at, sinks).items():
                numbers[at.layer][name].append(number)
    return [{"layer": layer, **{name: mean(of_name) for name, of_name in of_layer.items()}}
            for layer, of_layer in enumerate(numbers)]


def rows_of(phenomenon, text):
    """The rows of a phenomenon's table."""
    return phenomenon.measure(text) if hasattr(phenomenon, "measure") else by_layer(text, phenomenon.look)


def mean(numbers):
    """The mean of those numbers, or tensors, that are finite, as a number or list; None if none is."""
    tensors = [torch.as_tensor(x).double().cpu() for x in numbers if x is not None]
    finite = [x for x in tensors if x.isfinite().all()]
    return torch.stack(finite).mean(0).tolist() if finite else None


def largest(x):
    """The largest magnitude in a tensor; NaN if it is empty."""
    return x.abs().max() if x.numel() else math.nan


# The table

def print_table(rows, columns):
    lines = [[cell(row[name], form) for name, (_, form) in columns.items()] for row in rows]
    n_words = sum(form == "" for _, form in columns.values())  # columns of words, which come first
    print(cli.Columns([head for head, _ in columns.values()], lines, n_words))


def cell(value, form):
    """A number, or a list of them, formatted for a table: of more than 8 the two first, middle and last ones."""
    if isinstance(value, list):
        words = [cli.figure(x, form) for x in value]
        if len(words) > 8:
            words = [*words[:2], "..", *words[len(words) // 2 - 1:][:2], "..", *words[-2:]]
        return " ".join(words) or "none"
    return cli.figure(value, form)
