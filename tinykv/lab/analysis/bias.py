"""The attention bias, which is the sinks' part of the attention output, b_t = sum_{i in S} p_i^t v_i (KVSink Eq. 9,
Figure 6): attention to the sinks; size of the bias over that of the output; its consistency, the mean cosine over all
pairs of tokens, and that of the rest of the output. With a single sink every b_t is a multiple of one v, and
consistent.
"""
import torch
import torch.nn.functional as F

from tinykv.lab.plots import legend, lines_by_layer, new_figure, span
from tinykv.methods.antkv import attention_tiles

COLUMNS = {"layer": ("layer", "d"), "attention": ("attention", ".2f"), "size": ("size", ".2f"),
           "consistency": ("consistency", ".2f"), "rest": ("rest", ".2f")}


def split_output(at, sinks, k, v):
    """Eq. 9: the attention output as the sinks' part and all other tokens' part, (H, T, d) both, and the attention to
    the sinks, (H, T).

    sinks (T), True at them; k, v (1, Hkv, T, d), k rotated: the layer's own, or what is read of them.
    """
    heads_per_kv = at.q.shape[1] // v.shape[1]
    v = v[0].float().repeat_interleave(heads_per_kv, dim=0)  # (H, T, d)
    bias = torch.zeros_like(v)  # (H, T, d)
    others = torch.zeros_like(v)  # (H, T, d)
    attention = torch.zeros(v.shape[:2], device=v.device)  # (H, T)
    for tile, A in attention_tiles(at.q, k, window=at.sliding):
        A = A[0]  # (H, tile, seen)
        seen = A.shape[-1]
        # b_t = sum_{i in S} p_i^t v_i, and the sum over all other tokens
        to_sinks = A[..., sinks[:seen]]  # (H, tile, sinks seen)
        bias[:, tile] = to_sinks @ v[:, :seen][:, sinks[:seen]]
        others[:, tile] = A @ v[:, :seen] - bias[:, tile]
        attention[:, tile] = to_sinks.sum(-1)
    return bias, others, attention


def unit(x):
    """x (..., d) over its norm, however small that is; 0 stays 0."""
    return F.normalize(x.double(), dim=-1, eps=1e-30)


def consistency(x):
    """The mean cosine of all pairs of each head's T vectors: x (H, T, d) -> (H); NaN where there is no pair.

    Vectors that are 0 are left out. The sum of cosines over all pairs, each vector with itself included, is |sum of the
    unit vectors|^2.
    """
    n = (x != 0).any(-1).sum(-1)  # (H): vectors that are not 0
    of_pairs = unit(x).sum(1).square().sum(-1) - n  # (H): without each vector's with itself
    return of_pairs / (n * (n - 1))


def look(at, sinks):
    if not sinks.any():
        return {}
    # Eq. 9, and the sizes of the bias and of the output, at tokens that are no sinks
    bias, others, attention = split_output(at, sinks, at.k, at.v)
    size_of_bias = bias[:, ~sinks].norm(dim=-1)  # (H, n)
    size_of_output = (bias + others)[:, ~sinks].norm(dim=-1)  # (H, n)
    return {
        "attention": attention[:, ~sinks].mean(),
        "size": size_of_bias.mean() / size_of_output.mean(),
        "consistency": consistency(bias).mean(),
        "rest": consistency(others).mean(),
    }


def draw(text, rows):
    """The consistency by layer."""
    figure, (panel,) = new_figure(
        1, 1, 9.2, 4, f"The sinks' part of the output points one way (mean cosine "
        f"{span([row['consistency'] for row in rows], '.2f')} by layer); the rest: "
        f"{span([row['rest'] for row in rows], '.2f')}")
    lines_by_layer(panel, rows, {"consistency": "bias of Eq. 9", "rest": "rest of the output"})
    panel.set(ylabel="mean cosine of all pairs of tokens", ylim=(0, 1.02))
    legend(panel)
    return figure
