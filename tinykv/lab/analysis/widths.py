"""What 2 to 8 bits, static per token, do to sinks (KVSink Figure 7): attention to the sinks, and its mean change; the
bias of Eq. 9: its mean change over its size, and its cosine with the exact one; with nothing kept, and with the sinks
kept. Queries are exact; means are over tokens that are no sinks.
"""
import torch

from tinykv.lab.analysis.bias import split_output, unit
from tinykv.lab.analysis.errors import codecs_of, read_back
from tinykv.lab.analysis.walk import by_layer, mean
from tinykv.lab.plots import label_ends, new_figure, plain_ticks, style

WIDTHS = (2, 3, 4, 5, 6, 7, 8)  # in bits
NUMBERS = ("attention", "change", "bias change", "cosine")

COLUMNS = {"kept": ("kept", ""), "bits": ("bits", "d"), "attention": ("attention", ".3f"),
           "change": ("change", ".4f"), "bias change": ("bias change", ".3f"), "cosine": ("cosine", ".3f")}


def measure(text):
    """The row of 16 bits is what is exact."""
    codecs = codecs_of(text, "token-static", WIDTHS)

    # 1. attention to sinks and bias, exact and from quantized keys and values
    def look(at, sinks):
        if not sinks.any():
            return {}
        bias, _, attention = split_output(at, sinks, at.k, at.v)  # (H, T, d), (H, T)
        sees_sink = (attention > 0) & ~sinks  # (H, T)
        bias, attention = bias[sees_sink], attention[sees_sink]  # (n, d), (n)
        numbers_at = {(16, False): [attention.mean()]}
        for (bits, kept), pairs in codecs.items():
            # quantize all keys and values, or all but the sinks'
            k = read_back(pairs[at.layer].k, at.k)  # (1, Hkv, T, d)
            v = read_back(pairs[at.layer].v, at.v)  # (1, Hkv, T, d)
            if kept:
                k = torch.where(sinks[:, None], at.k.float(), k)
                v = torch.where(sinks[:, None], at.v.float(), v)
            # how much do attention and bias change?
            new_bias, _, new_attention = split_output(at, sinks, k, v)
            new_bias, new_attention = new_bias[sees_sink], new_attention[sees_sink]  # (n, d), (n)
            change = (new_attention - attention).abs().mean()
            change_of_bias = (new_bias - bias).norm(dim=-1).mean() / bias.norm(dim=-1).mean()
            cosine = (unit(new_bias) * unit(bias)).sum(-1).mean()
            numbers_at[bits, kept] = [new_attention.mean(), change, change_of_bias, cosine]
        return {key: torch.tensor(numbers) for key, numbers in numbers_at.items()}

    # 2. means over the layers
    layers, rows = by_layer(text, look), []
    for bits, kept in ((16, False), *codecs):
        numbers = mean([layer[bits, kept] for layer in layers])  # (4), or of the attention alone
        rows.append({"bits": bits, "kept": "sinks" if kept else "nothing", **dict.fromkeys(NUMBERS),
                     **dict(zip(NUMBERS, numbers))})
    return rows


def draw(text, rows):
    """By bits, how much attention to the sinks and the bias change."""
    at = {(row["bits"], row["kept"]): row for row in rows}
    figure, (panel,) = new_figure(
        1, 1, 9.2, 4.2, f"At 4 bits attention to the sinks changes by {at[4, 'nothing']['change']:.3f}, the bias by "
        f"{at[4, 'nothing']['bias change']:.0%} of its size; with the sinks kept by "
        f"{at[4, 'sinks']['bias change']:.0%}")
    for i, (column, label) in enumerate({"change": "attention, absolute", "bias change": "bias, relative"}.items()):
        for kept, dash, more in (("nothing", "-", ""), ("sinks", "--", ", sinks kept")):
            changes = [at[bits, kept][column] for bits in WIDTHS]
            panel.plot(WIDTHS, changes, label=label + more, linestyle=dash, **style(i))
    panel.set(yscale="log", xlabel="bits of keys and values", ylabel="mean change")
    plain_ticks(panel)
    label_ends(panel)
    return figure
