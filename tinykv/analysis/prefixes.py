"""What an exact prefix leaves of the error of quantized weights: Figure 2 and Theorem 1 of IntactKV
(Liu et al., 2024).

The weights are quantized, the cache is not. The first n tokens' keys and values are those of the
full-precision model.
"""
import math
from dataclasses import dataclass

import torch

from tinykv.analysis.sinks import shown_layer
from tinykv.analysis.walk import mean, recorded_calls
from tinykv.cache_parts.trace import Trace
from tinykv.methods.intactkv import exact_rows, value_gain

MOST = 3  # sinks that are looked at


# Figure 2

@torch.no_grad()
def prefixes(full, quantized, windows, marks, points=32, progress=iter, shown=None):
    """IntactKV Figure 2: what is left of the error if the first n tokens are exact.

    full, quantized: the model, and the model with quantized weights; windows, marks (W, T). Rows of
    `errors_by_length`, for n = 0, and for n just short of, and just past, each of the first sinks
    that all windows have. Errors are of the tokens after the last of these. The example: of the
    first window, the same for `points` values of n.
    """
    sinks_at = [sinks.nonzero()[:, 0].tolist() for sinks in marks]  # positions, of each window
    n_sinks = min(MOST, *(len(positions) for positions in sinks_at))
    rows_of_windows, example = [], None
    for window, positions in zip(progress(windows), sinks_at):
        # prefixes that end just before a sink, and just after it
        lengths = {"nothing": 0}
        for i, position in enumerate(positions[:n_sinks], 1):
            lengths[f"up to sink {i}"] = position
            lengths[f"sink {i} too"] = position + 1
        start = max(lengths.values())
        # more of them for the figure
        extra = []
        if example is None:
            extra = [round(start * i / points) for i in range(points)]
        rows = errors_by_length(full, quantized, window, sorted({*lengths.values(), *extra}), start, shown)
        if example is None:
            example = {"rows": rows, "sinks": positions[:n_sinks]}
        by_length = {row["n"]: row for row in rows}
        rows_of_windows.append({kept: by_length[n] for kept, n in lengths.items()})

    # means over the windows
    table = []
    for kept, row in rows_of_windows[0].items():
        if kept != "nothing" and row["n"] == 0:
            continue  # the first token is a sink: nothing comes before it
        row_of_means = {"kept": kept}
        for name in row:
            row_of_means[name] = mean([rows[kept][name] for rows in rows_of_windows])
        table.append(row_of_means)
    return table, example


@torch.no_grad()
def prefix_lengths(full, quantized, windows, marks, n, progress=iter, shown=None):
    """IntactKV Figure 2 for a prefix of n tokens that all windows (W, T) begin with: what is left
    of the error if its first 0, 1 .. n tokens are exact.

    Rows of `errors_by_length`, means over the windows. Errors are of the tokens after the prefix.
    The example: the same rows, and the sinks in the prefix of the first window, by marks (W, T).
    """
    rows_of_windows = []
    for window in progress(windows):
        rows_of_windows.append(errors_by_length(full, quantized, window, range(n + 1), n, shown))
    table = []
    for rows in zip(*rows_of_windows):
        means = {name: mean([row[name] for row in rows]) for name in rows[0]}
        table.append({"kept": "the first", **means})
    return table, {"rows": table, "sinks": marks[0, :n].nonzero()[:, 0].tolist()}


@dataclass
class Forward:
    """A forward of a model after an exact prefix of n tokens."""
    model: torch.nn.Module
    trace: Trace
    attention: list  # what the attention of each layer adds to the residual: L of (1, T - n, D)


def run_after_prefix(full, model, window, n):
    """Run `model` on window (T) from token n on, after the first n tokens as `full` computes
    them."""
    keys, values = exact_rows(full, model, window[:n].tolist())  # (L, Hkv, n, d) both
    trace = Trace(model, keys, values)
    with recorded_calls([block.self_attn.o_proj for block in model.model["layers"]]) as calls:
        model(window[None, n:], trace, logits=False)
    return Forward(model, trace, attention=[output for _, output in calls])


@torch.no_grad()
def errors_by_length(full, quantized, window, lengths, start, shown=None):
    """What is left of the error if the first n tokens' keys and values are exact.

    A row for each n of `lengths`. window (T); errors are means over the tokens from position
    `start` on, which is at least the largest n. `last`: the squared error of the last block's
    output; `attention`: that of what attention adds, summed over layers (Figure 2); `change` and
    `bound`: of a head's output by `theorem_1`, for the window's last query, averaged over the heads
    of the `shown` layer.
    """
    exact = run_after_prefix(full, full, window, 0)
    rows = []
    for n in lengths:
        run = run_after_prefix(full, quantized, window, n)
        # token t of the window is token t - n of the run
        last = squared_error(run.trace.hidden[-1][:, start - n:], exact.trace.hidden[-1][:, start:])
        attention = 0.0
        for output, exact_output in zip(run.attention, exact.attention):
            attention += squared_error(output[:, start - n:], exact_output[:, start:])
        change, bound = head_changes(exact, run, shown_layer(full, shown))
        rows.append({
            "n": n,
            "last": last,
            "attention": attention,
            "change": change,
            "bound": bound,
        })
    return rows


def squared_error(x, exact):
    error = x.float() - exact.float()
    return error.pow(2).mean().item()


# Theorem 1

def head_changes(exact, run, layer):
    """Theorem 1 for the last query of `exact`, if K and V are those of `run`.

    exact, run: of `run_after_prefix`. Returns |dh|_2 and its bound, means over heads.
    """
    attn = exact.model.model["layers"][layer].self_attn
    heads_per_kv = attn.n_heads // attn.n_kv_heads

    # the query, and the keys and values of both; the quantizer's scale of V is taken out again
    T = exact.trace.q[layer].shape[2]
    positions = torch.arange(T, device=exact.trace.q[layer].device)  # (T)
    q = exact.model.rope.rotate(exact.trace.q[layer], positions)[0, :, -1].float()  # (H, d)
    K, V = rotated_rows(exact, layer)  # (Hkv, T, d) both
    run_K, run_V = rotated_rows(run, layer)  # (Hkv, T, d) both
    run_V = run_V / value_gain(run.model.model["layers"][layer])
    dK = (run_K - K).repeat_interleave(heads_per_kv, dim=0)  # (H, T, d)
    dV = (run_V - V).repeat_interleave(heads_per_kv, dim=0)  # (H, T, d)
    K = K.repeat_interleave(heads_per_kv, dim=0)  # (H, T, d)
    V = V.repeat_interleave(heads_per_kv, dim=0)  # (H, T, d)

    # each head's columns of o_proj
    W_o = attn.o_proj.weight.float().unflatten(1, (attn.n_heads, -1)).transpose(0, 1)  # (H, D, d)
    change, bound = theorem_1(q, K, V, dK, dV, W_o)  # (H) both
    return change.mean().item(), bound.mean().item()


def rotated_rows(run, layer):
    """A layer's keys, rotated, and values, of prefix and window: (Hkv, T, d) fp32 both."""
    trace = run.trace
    k, v = trace.k[layer][0], trace.v[layer][0]  # (Hkv, T - n, d) both
    k = torch.cat([trace.keys[layer].to(k.dtype), k], dim=1)  # (Hkv, T, d)
    v = torch.cat([trace.values[layer].to(v.dtype), v], dim=1)  # (Hkv, T, d)
    positions = torch.arange(k.shape[1], device=k.device)  # (T)
    return run.model.rope.rotate(k, positions).float(), v.float()


def theorem_1(q, K, V, dK, dV, W_o):
    """How much a head's output h changes if K and V do, and the bound of Theorem 1: |dh|_2 and

        C1 |dK|_2,inf |dV|_F + C2 |dK|_2,inf + C3 |dV|_F

    q (.., d), K, V, dK, dV (.., n, d), of one head and one query each; W_o (.., D, d), the head's
    columns of o_proj. The proof uses the condition number of softmax, so the bound holds for small
    changes.
    """
    n, d = K.shape[-2:]

    # the constants
    C3 = torch.linalg.matrix_norm(W_o, 2)  # (..)
    C1 = n ** 1.5 / math.sqrt(d) * C3 * q.norm(dim=-1)  # (..)
    C2 = C1 * torch.linalg.matrix_norm(V, 2)  # (..)

    # the bound
    dK_2_inf = dK.norm(dim=-1).amax(-1)  # (..)
    dV_F = dV.norm(dim=(-2, -1))  # (..)
    bound = C1 * dK_2_inf * dV_F + C2 * dK_2_inf + C3 * dV_F  # (..)

    # the change
    change = head_output(q, K + dK, V + dV, W_o) - head_output(q, K, V, W_o)  # (.., D)
    return change.norm(dim=-1), bound


def head_output(q, K, V, W_o):
    """What one head adds to the residual for one query: (.., D)."""
    scores = (K @ q[..., None])[..., 0] / math.sqrt(q.shape[-1])  # (.., n)
    p = scores.softmax(-1)[..., None, :]  # (.., 1, n)
    h = p @ V @ W_o.transpose(-2, -1)  # (.., 1, D)
    return h[..., 0, :]
