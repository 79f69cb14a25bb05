"""What is left of the error of weights quantized to 3 bits, rounded to nearest, if the first n tokens' keys and values
are exact, those of the full-precision model; the cache is not quantized. Squared error of the last layer's output, and
of what attention adds, summed over layers (IntactKV Figure 2).
"""
import torch

from tinykv.lab import cli
from tinykv.lab.analysis.walk import mean, recorded
from tinykv.lab.weights import RTN, quantize
from tinykv.methods.intactkv import exact_rows
from tinykv.model import Trace

BITS = 3
MOST = 3  # sinks that are looked at

COLUMNS = {"kept": ("exact", ""), "n": ("n", ".0f"), "last": ("last layer", ".3f"), "attention": ("attention", ".4f")}


def lengths_of(text):
    """{what is exact: n}, for each window: up to just before, and just after, each of the first sinks that all windows
    have."""
    sinks_at = [sinks.nonzero()[:, 0].tolist() for sinks in text.marks]  # positions, of each window
    n_sinks = min(MOST, *map(len, sinks_at))
    of_windows = []
    for positions in sinks_at:
        lengths = {"nothing": 0}
        for i, position in enumerate(positions[:n_sinks], 1):
            lengths[f"up to sink {i}"] = position
            lengths[f"sink {i} too"] = position + 1
        of_windows.append(lengths)
    return of_windows


def measure(text):
    """Errors are of the tokens after the longest prefix, and means over the windows."""
    quantized = quantize(text.model, RTN(BITS))
    by_kept = {}  # {what is exact: [a row for each window]}
    for window, lengths in zip(cli.bar(text.windows, "measuring"), lengths_of(text)):
        rows = errors_by_length(text.model, quantized, window, lengths.values(), max(lengths.values()))
        for kept, row in zip(lengths, rows):
            by_kept.setdefault(kept, []).append(row)
    table = []
    for kept, rows in by_kept.items():
        if kept != "up to sink 1" or rows[0]["n"] > 0:  # nothing comes before the first token
            table.append({"kept": kept, **{name: mean([row[name] for row in rows]) for name in rows[0]}})
    return table


@torch.no_grad()
def errors_by_length(model, quantized, window, lengths, start):
    """What is left of the error if the first n tokens of window (T) are exact: a row for each n.

    Errors are means over the tokens from position `start` on, which is at least the largest n. `last`: the squared
    error of the last layer's output; `attention`: that of what attention adds, summed over layers.
    """
    exact, exact_added = run_after_prefix(model, model, window, 0)
    rows = []
    for n in lengths:
        trace, added = run_after_prefix(model, quantized, window, n)
        # token t of the window is token t - n of the run
        last = squared_error(trace.hidden[-1][:, start - n:], exact.hidden[-1][:, start:])
        attention = [squared_error(x[:, start - n:], y[:, start:]) for x, y in zip(added, exact_added)]
        rows.append({"n": n, "last": last, "attention": sum(attention)})
    return rows


def run_after_prefix(full, model, window, n):
    """Run `model` on window (T) from token n on, after the first n tokens as `full` computes them -> the trace, and
    what the attention of each layer adds to the residual, L of (1, T - n, D)."""
    keys, values = exact_rows(full, model, window[:n].tolist())  # (L, Hkv, n, d) both
    trace = Trace(model, keys, values)
    modules = [layer.self_attn.o_proj for layer in model.model["layers"]]
    calls = recorded(modules, lambda: model(window[None, n:], trace, logits=False))
    return trace, [output for _, output in calls]


def squared_error(x, exact):
    error = x.float() - exact.float()
    return error.pow(2).mean().item()
