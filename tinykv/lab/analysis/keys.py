"""OTT's sorted key magnitudes, sum_c |K[i, c]| after RoPE: the smallest over the median, the cliff (the largest ratio
of neighbours among the 32 smallest), the number of tokens below it, and the share of these that are sinks.
"""
import torch

from tinykv.lab.plots import COLOURS, legend, new_figure, span, title

MOST = 32  # of the smallest keys, in which the cliff is looked for: the size of OTT's extra pool

COLUMNS = {"layer": ("layer", "d"), "smallest": ("smallest", ".3f"), "cliff": ("cliff", ".2f"),
           "below": ("below", ".1f"), "sinks": ("sinks", ".0%")}


def look(at, sinks):
    # 1. magnitudes of the keys, the smallest first
    size = at.k[0].float().abs().sum(-1)  # (Hkv, T)
    size, order = size.sort(dim=-1)  # (Hkv, T) both
    # 2. the cliff: the largest step from one to the next
    ratios = size[:, 1:] / size[:, :-1]  # (Hkv, T - 1)
    cliff, last_below = ratios[:, :MOST].max(-1)  # (Hkv) both
    # 3. the tokens below it
    is_below = torch.arange(len(sinks), device=sinks.device) <= last_below[:, None]  # (Hkv, T)
    return {
        "smallest": (size[:, 0] / size.median(-1).values).mean(),
        "cliff": cliff.mean(),
        "below": (last_below + 1).float().mean(),
        "sinks": sinks[order][is_below].float().mean(),
    }


def draw(text, rows):
    """Sorted magnitudes of the keys, with the sinks marked: KV head 0 of the shown layer."""
    at, sinks = text.shown()
    shown = rows[at.layer]
    figure, (panel,) = new_figure(
        1, 1, 9.2, 4, f"Layer {at.layer}: {shown['below']:.1f} keys lie below a cliff of factor {shown['cliff']:.1f}, "
        f"and {shown['sinks']:.0%} of them are sinks; cliffs by layer: {span([row['cliff'] for row in rows], '.1f')}")
    size, order = at.k[0, 0].float().abs().sum(1).cpu().sort()  # (T) both
    is_sink = sinks.cpu()[order]  # (T)
    panel.plot(range(1, len(order) + 1), size, label="keys, sorted", color=COLOURS[0], marker=".", linewidth=1)
    panel.scatter(is_sink.nonzero()[:, 0] + 1, size[is_sink], label="sinks", s=40, color=COLOURS[1], marker="D",
                  zorder=3)
    panel.set(xscale="log", xlabel="rank, the smallest first", ylabel="sum of magnitudes over a key's channels",
              ylim=(0, None))
    title(panel, f"layer {at.layer}, KV head 0")
    legend(panel)
    return figure
