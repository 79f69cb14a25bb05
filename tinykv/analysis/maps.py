"""Whole maps of one layer: the hidden state, keys, values and the attention output, token by
channel, and the attention among the first tokens.

KVSink's Figures 1b and 5f (Su and Yuan, 2025), IntactKV's Figure 1 (Liu et al., 2024), and AnTKV's
Figure 8 (Li et al., 2025), which sets keys before RoPE beside keys after it.
"""
import torch

from tinykv.analysis.sinks import shown_layer
from tinykv.analysis.walk import LayerMeans, recorded_calls, walk
from tinykv.cache_parts.trace import Trace

FIRST = 64  # tokens of the attention map
ROWS = 128  # of a map, at most


@torch.no_grad()
def maps(model, windows, progress=iter, shown=None):
    """A row for each layer, of the first window: the largest |H| and its `token` and `channel`; and
    how much of the variance of keys lies `within` their channels, before RoPE and after it, means
    over KV heads and windows.

    A codebook of channels that each keep their own level has less left to describe: the smaller the
    share within channels, the better (AnTKV, Appendix B). The example: {name: (rows, channels)},
    each the magnitudes of one thing in the shown layer, and "attention" (64, 64), the mean over
    heads.
    """
    shown = shown_layer(model, shown)
    table = LayerMeans(model.config.num_hidden_layers, ("pre", "post"))
    places, example = [], {}
    for w, window in enumerate(progress(windows)):
        with recorded_calls([block.self_attn.o_proj for block in model.model["layers"]]) as calls:
            blocks = walk(model, window)
        for layer, at in enumerate(blocks):
            table.add(layer, {"pre": share_within(at.k_pre[0]), "post": share_within(at.k[0])})
            if w == 0:
                places.append(largest(at.hidden))
        if w == 0:
            at = blocks[shown]
            outputs, _ = calls[shown]  # (1, T, H * d): what attention gives, before o_proj
            example = {
                "H, after the block": at.hidden,  # (T, D)
                "attention output": outputs[0],  # (T, H * d)
                "values": by_token(at.v),  # (T, Hkv * d)
                "keys before RoPE": by_token(at.k_pre),
                "keys after RoPE": by_token(at.k),
            }
            example = {name: pooled(x.float().abs()) for name, x in example.items()}
            example["attention"] = first_attention(model, window, shown)
            example["layer"], example["tokens"] = shown, len(window)
    rows = [{**row, **place} for row, place in zip(table.rows(), places)]
    return rows, example


def by_token(x):
    """x (1, Hkv, T, d) -> (T, Hkv * d)."""
    return x[0].transpose(0, 1).flatten(1)


def largest(hidden):
    """hidden (T, D) -> the number of the largest magnitude, and where it is."""
    at = int(hidden.abs().argmax())
    token, channel = divmod(at, hidden.shape[1])
    return {"largest": hidden[token, channel].item(), "token": token, "channel": channel}


def share_within(x):
    """x (Hkv, T, d) -> the variance over tokens of each channel's numbers, over that of all numbers
    of the head; the mean over heads."""
    x = x.double()
    within = x.var(1, correction=0).mean(1)  # (Hkv)
    whole = x.flatten(1).var(1, correction=0)  # (Hkv)
    return (within / whole).mean().item()


def pooled(x):
    """x (T, C) -> (up to ROWS, C): the largest of neighbouring tokens, so that a sink stays visible."""
    T = len(x)
    size = min(ROWS, T)
    cell = torch.arange(T, device=x.device) * size // T  # (T)
    return torch.stack([x[cell == i].amax(0) for i in range(size)])


def first_attention(model, window, layer):
    """A layer's attention among the first tokens, the mean over heads: (64, 64), or (T, T)."""
    trace = Trace(model)
    model(window[None, :FIRST], trace, logits=False)
    return trace.attention(layer)[0].mean(0)
