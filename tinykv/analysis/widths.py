"""What 2 to 8 bits, static per token, do to sinks (KVSink Figure 7): attention to the sinks, and its
mean change; the bias of Eq. 9: its mean change over its size, and its cosine with the exact one; with
nothing kept, and with the sinks kept. Queries are exact; means are over tokens that are no sinks.
"""
import torch

from tinykv.analysis.bias import split_output, unit
from tinykv.analysis.errors import read_back, static_codecs
from tinykv.analysis.figures import COLOURS, label_ends, legend, new_figure, style, title, whole_numbers
from tinykv.analysis.walk import mean, means

WIDTHS = (2, 3, 4, 5, 6, 7, 8)  # in bits

COLUMNS = {"kept": ("kept", ""), "bits": ("bits", "d"), "attention": ("attention", ".3f"),
           "change": ("change", ".4f"), "bias change": ("bias change", ".3f"), "cosine": ("cosine", ".3f")}


def measure(text, group_size=16, formula="offset"):
    """The row of 16 bits is what is exact. `by layer`: the attention."""
    # 1. codecs of each width, calibrated with the sinks and without
    codecs = {}
    for kept in ("nothing", "sinks"):
        calibrated = static_codecs(text, "token-static", WIDTHS, kept == "sinks",
                                   group_size=group_size, formula=formula)
        for bits, pairs in calibrated.items():
            codecs[bits, kept] = pairs

    # 2. attention to sinks and bias, exact and from quantized keys and values
    def look(at, sinks):
        if not sinks.any():
            return {}
        bias, _, attention = split_output(at, sinks)  # (H, T, d), (H, T)
        sees_sink = (attention > 0) & ~sinks  # (H, T)
        bias, attention = bias[sees_sink], attention[sees_sink]  # (n, d), (n)
        found = {(16, "nothing", "attention", at.layer): attention.mean()}
        for (bits, kept), pairs in codecs.items():
            # quantize all keys and values, or all but the sinks'
            k = read_back(pairs[at.layer].k, at.k)  # (1, Hkv, T, d)
            v = read_back(pairs[at.layer].v, at.v)  # (1, Hkv, T, d)
            if kept == "sinks":
                k = torch.where(sinks[:, None], at.k.float(), k)
                v = torch.where(sinks[:, None], at.v.float(), v)
            # how much do attention and bias change?
            new_bias, _, new_attention = split_output(at, sinks, k, v)
            new_bias, new_attention = new_bias[sees_sink], new_attention[sees_sink]  # (n, d), (n)
            change_of_bias = (new_bias - bias).norm(dim=-1)  # (n)
            numbers = {
                "attention": new_attention.mean(),
                "change": (new_attention - attention).abs().mean(),
                "bias change": change_of_bias.mean() / bias.norm(dim=-1).mean(),
                "cosine": (unit(new_bias) * unit(bias)).sum(-1).mean(),
            }
            for name, number in numbers.items():
                found[bits, kept, name, at.layer] = number
        return found

    # 3. means over the layers
    found, rows = means(text, look), []
    for bits, kept in ((16, "nothing"), *codecs):
        row = {"bits": bits, "kept": kept}
        for name in ("attention", "change", "bias change", "cosine"):
            layers = [found.get((bits, kept, name, layer)) for layer in range(text.model.config.num_hidden_layers)]
            row[name] = mean([x for x in layers if x is not None])
            if name == "attention":
                row["by layer"] = layers
        rows.append(row)
    return rows


def draw(text, rows):
    """Attention to the sinks by layer at several widths; and by bits, how much it and the bias change."""
    of = {(row["bits"], row["kept"]): row for row in rows}
    figure, (left, right) = new_figure(
        1, 2, 11, 4.2, f"At 4 bits attention to the sinks changes by {of[4, 'nothing']['change']:.3f}, the bias by "
        f"{of[4, 'nothing']['bias change']:.0%} of its size; with the sinks kept by "
        f"{of[4, 'sinks']['bias change']:.0%}")
    lines = ((16, "nothing", 4), (4, "nothing", 2), (3, "nothing", 0), (2, "nothing", 1), (2, "sinks", 1))
    for i, (bits, kept, colour) in enumerate(lines):
        label = "exact" if bits == 16 else f"{bits} bits"
        dashed = kept == "sinks"
        left.plot(of[bits, kept]["by layer"], label=f"{label}, sinks kept" if dashed else label,
                  **{**style(i), "color": COLOURS[colour]}, linestyle="--" if dashed else "-")
    left.set(xlabel="layer", ylabel="attention to the sinks", ylim=(0, 1))
    whole_numbers(left.xaxis)
    legend(left)
    title(left, "attention to the sinks")

    for i, (column, label) in enumerate({"change": "attention, absolute", "bias change": "bias, relative"}.items()):
        for kept, dash in (("nothing", "-"), ("sinks", "--")):
            line = [row for row in rows if row["kept"] == kept and row["bits"] < 16]
            right.plot([row["bits"] for row in line], [row[column] for row in line],
                       label=label if kept == "nothing" else f"{label}, sinks kept", linestyle=dash, **style(i))
    right.set(yscale="log", xlabel="bits of keys and values", ylabel="mean change")
    title(right, "change")
    label_ends(right)
    return figure
