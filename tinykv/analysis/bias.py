"""The attention bias, which is the sinks' part of the attention output, b_t = sum_{i in S} p_i^t v_i
(KVSink Eq. 9, Figure 6): attention to the sinks; size of the bias over that of the output; its
consistency, the mean cosine over all pairs of tokens: mean and lowest of the heads, over pairs that
see the same sinks, and of the rest of the output. With a single sink every b_t is a multiple of one
v, and consistent.
"""
import torch
import torch.nn.functional as F

from tinykv.analysis.figures import new_figure, span, title, whole_numbers
from tinykv.analysis.walk import by_layer
from tinykv.methods.antkv import attention_tiles

COLUMNS = {"layer": ("layer", "d"), "attention": ("attention", ".2f"), "size": ("size", ".2f"),
           "consistency": ("consistency", ".2f"), "lowest": ("lowest", ".2f"),
           "within": ("same sinks", ".2f"), "rest": ("rest", ".2f")}


def split_output(at, sinks, k=None, v=None):
    """Eq. 9: the attention output as the sinks' part and all other tokens' part, (H, T, d) both, and
    the attention to the sinks, (H, T).

    sinks (T), True at them. k, v (1, Hkv, T, d): in the place of the block's own, k rotated.
    """
    k, v = at.k if k is None else k, at.v if v is None else v
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


def consistency(x, group=None):
    """The mean cosine of all pairs of each head's T vectors: x (H, T, d) -> (H).

    NaN where there is no pair. Vectors that are 0 are left out. group (T), numbers from 0 on: only
    pairs within a group count. The sum of cosines over all pairs, each vector with itself included,
    is |sum of the unit vectors|^2.
    """
    if group is None:
        group = torch.zeros(x.shape[1], dtype=torch.long, device=x.device)  # (T)
    x = unit(x)  # (H, T, d)
    in_group = F.one_hot(group).double()  # (T, groups)
    n = (x != 0).any(-1).double() @ in_group  # (H, groups): vectors that are not 0
    sums = in_group.T @ x  # (H, groups, d)
    cosines = (sums.square().sum(-1) - n).sum(-1)  # (H): without each vector's with itself
    pairs = (n * (n - 1)).sum(-1)  # (H): each counted twice, as in the sum of cosines
    return cosines.where(pairs > 0, float("nan")) / pairs


def look(at, sinks):
    if not sinks.any():
        return {}
    # Eq. 9, and the sizes of the bias and of the output, at tokens that are no sinks
    bias, others, attention = split_output(at, sinks)
    size_of_bias = bias[:, ~sinks].norm(dim=-1)  # (H, n)
    size_of_output = (bias + others)[:, ~sinks].norm(dim=-1)  # (H, n)
    # does it point the same way for all tokens?
    of_bias = consistency(bias)  # (H)
    of_others = consistency(others)  # (H)
    n_sinks_seen = sinks.long().cumsum(0)  # (T)
    return {
        "attention": attention[:, ~sinks].mean(),
        "size": size_of_bias.mean() / size_of_output.mean(),
        "consistency": of_bias.mean(),
        "lowest": of_bias.min(),
        "within": consistency(bias, n_sinks_seen).mean(),
        "rest": of_others.mean(),
        "by head": torch.stack([of_bias, of_others]),  # (2, H)
    }


def measure(text):
    rows = by_layer(text, look)
    return [{**dict.fromkeys(COLUMNS), **row} for row in rows]


def draw(text, rows):
    """Each head's consistency of the bias and of the rest of the output, and the bias of the head of
    the shown layer that attends to the sinks most."""
    figure, panels = new_figure(
        1, 3, 11.5, 4, f"The sinks' part of the output points one way (mean cosine "
        f"{span([row['consistency'] for row in rows], '.2f')} by layer); the rest: "
        f"{span([row['rest'] for row in rows], '.2f')}")
    by_head = torch.tensor([row["by head"] for row in rows])  # (L, 2, H)
    for panel, numbers, text_of in zip(panels, by_head.unbind(1), ("bias of Eq. 9", "rest of the output")):
        image = panel.imshow(numbers.numpy(), vmin=0, vmax=1, cmap="viridis", aspect="auto",
                             interpolation="nearest")
        panel.set(xlabel="head", ylabel="layer")
        whole_numbers(panel.xaxis)
        whole_numbers(panel.yaxis)
        title(panel, text_of)
    figure.colorbar(image, ax=panels[:2], label="mean cosine of all pairs of tokens")

    at, sinks = text.shown()
    bias, _, attention = split_output(at, sinks)
    head = int(attention.mean(1).argmax())
    limit = bias[head].abs().quantile(0.99).item()
    image = panels[2].imshow(bias[head].cpu().numpy(), vmin=-limit, vmax=limit, cmap="PuOr", aspect="auto",
                             interpolation="nearest")
    panels[2].set(xlabel="channel", ylabel="position (tokens)")
    title(panels[2], f"bias: layer {at.layer}, head {head}")
    figure.colorbar(image, ax=panels[2], label="bias")
    for panel in panels:
        panel.grid(False)
    return figure
