"""The attention bias, which is the sinks' part of the attention output, b_t = sum_{i in S} p_i^t v_i (KVSink Eq. 9,
Figure 6): attention to the sinks; size of the bias over that of the output; its consistency, the mean cosine over all
pairs of tokens, and that of the rest of the output. With a single sink every b_t is a multiple of one v, and
consistent.
"""
import torch
import torch.nn.functional as F

from tinykv.methods.antkv import attention_tiles

COLUMNS = {"layer": ("layer", "d"), "attention": ("attention", ".2f"), "size": ("size", ".2f"),
           "consistency": ("consistency", ".2f"), "rest": ("rest", ".2f")}


def split_output(at, sinks):
    """Eq. 9: the attention output as the sinks' part and all other tokens' part, (H, T, d) both, and the attention to
    the sinks, (H, T).

    sinks (T), True at them.
    """
    heads_per_kv = at.q.shape[1] // at.v.shape[1]
    v = at.v[0].float().repeat_interleave(heads_per_kv, dim=0)  # (H, T, d)
    bias = torch.zeros_like(v)  # (H, T, d)
    others = torch.zeros_like(v)  # (H, T, d)
    attention = torch.zeros(v.shape[:2], device=v.device)  # (H, T)
    for tile, A in attention_tiles(at.q, at.k, window=at.sliding):
        A = A[0]  # (H, tile, seen)
        seen = A.shape[-1]
        # b_t = sum_{i in S} p_i^t v_i, and the sum over all other tokens
        to_sinks = A[..., sinks[:seen]]  # (H, tile, sinks seen)
        bias[:, tile] = to_sinks @ v[:, :seen][:, sinks[:seen]]
        others[:, tile] = A @ v[:, :seen] - bias[:, tile]
        attention[:, tile] = to_sinks.sum(-1)
    return bias, others, attention


def consistency(x):
    """The mean cosine of all pairs of each head's T vectors: x (H, T, d) -> (H); NaN where there is no pair.

    Vectors that are 0 are left out. The sum of cosines over all pairs, each vector with itself included, is |sum of the
    unit vectors|^2.
    """
    n = (x != 0).any(-1).sum(-1)  # (H): vectors that are not 0
    unit = F.normalize(x.double(), dim=-1, eps=1e-30)  # (H, T, d); 0 stays 0
    of_pairs = unit.sum(1).square().sum(-1) - n  # (H): without each vector's with itself
    return of_pairs / (n * (n - 1))


def look(at, sinks):
    if not sinks.any():
        return {}
    # Eq. 9, and the sizes of the bias and of the output, at tokens that are no sinks
    bias, others, attention = split_output(at, sinks)
    size_of_bias = bias[:, ~sinks].norm(dim=-1)  # (H, n)
    size_of_output = (bias + others)[:, ~sinks].norm(dim=-1)  # (H, n)
    return {
        "attention": attention[:, ~sinks].mean(),
        "size": size_of_bias.mean() / size_of_output.mean(),
        "consistency": consistency(bias).mean(),
        "rest": consistency(others).mean(),
    }
