"""One forward of a window in full precision, seen from inside; and averages of what was seen there.

Memory holds one window's queries, keys, values and residuals, of all layers. No T x T matrix of
attention is ever whole.
"""
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from tinykv import UserError
from tinykv.cache_parts.trace import Trace

# The forward

@dataclass
class Activations:
    """What passes through one block."""
    q: torch.Tensor  # (1, H, T, d), rotated
    k: torch.Tensor  # (1, Hkv, T, d), rotated
    v: torch.Tensor  # (1, Hkv, T, d)
    k_pre: torch.Tensor  # (1, Hkv, T, d), before RoPE
    hidden: torch.Tensor  # (T, D): the residual after the block


@torch.no_grad()
def walk(model, window):
    """One forward over window (T) in full precision -> [Activations], one for each block.

    UserError where the model computes numbers that are not finite.
    """
    # 1. run the model; the trace keeps q, k and v before RoPE, and each block's output
    trace = Trace(model)
    model(window[None], trace, logits=False)

    # 2. rotate q and k, layer by layer
    positions = torch.arange(len(window), device=window.device)  # (T)
    blocks = []
    for layer, hidden in enumerate(trace.hidden):  # (1, T, D)
        if not torch.isfinite(hidden).all():
            raise UserError(f"layer {layer} computes numbers that are not finite; "
                            "use another --dtype or model")
        q = model.rope.rotate(trace.q[layer], positions)  # (1, H, T, d)
        k = model.rope.rotate(trace.k[layer], positions)  # (1, Hkv, T, d)
        blocks.append(Activations(q, k, trace.v[layer], trace.k[layer], hidden[0]))
    return blocks


@contextmanager
def recorded_calls(modules):
    """Record what modules are given and what they return: [(input, output)] in the order of their
    calls.

        with recorded_calls([block.mlp for block in blocks]) as calls:
            walk(model, window)
        x, y = calls[2]  # what the MLP of layer 2 reads and writes
    """
    calls = []

    def record(module, arguments, output):
        calls.append((arguments[0], output))

    hooks = [module.register_forward_hook(record) for module in modules]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


# Averages

def mean(numbers):
    """The mean of a list of numbers; None if it is empty."""
    return sum(numbers) / len(numbers) if numbers else None


def mean_of(x):
    """The mean of a tensor as a number; None if the tensor is empty."""
    return x.float().mean().item() if x.numel() else None


def finite_or_none(x):
    """A tensor with one element as a number; None if it is not finite."""
    return x.item() if x.isfinite() else None


class LayerMeans:
    """Numbers by layer and name, averaged over windows. A number that is None does not count."""

    def __init__(self, n_layers, names):
        self.numbers = [{name: [] for name in names} for _ in range(n_layers)]

    def add(self, layer, numbers):
        """numbers {name: number or None}: those of one window."""
        for name, number in numbers.items():
            if number is not None:
                self.numbers[layer][name].append(number)

    def rows(self):
        """[{"layer": 0, name: mean, ...}, ...]: a row of each layer. Where no window has a number,
        the mean is None."""
        rows = []
        for layer, numbers in enumerate(self.numbers):
            means = {name: mean(of_name) for name, of_name in numbers.items()}
            rows.append({"layer": layer, **means})
        return rows
