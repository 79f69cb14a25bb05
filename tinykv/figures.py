"""The figures. Lines differ in marker as well as in colour, and the colours are those that all eyes tell apart."""
from tinykv import files

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#000000", "#56b4e9", "#e69f00", "#7f7f7f", "#8c564b", "#17806d")
MARKERS = "osD^vP*Xdh"
FINE = [digit * 10 ** i for i in range(-6, 7) for digit in (1, 2, 5)]
TICKS = (1, 1.5, 2, 2.5, 3, 4, 5, 7, 10, 15, 20, 30, 50, 100, 200, 500, 1000)


def pyplot():
    """matplotlib, drawing into files; imported only where a figure is asked for."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    return plt


def save(figure, path):
    """Write a figure as PNG, whole or not at all."""
    files.write(path, lambda part: figure.savefig(part, format="png", dpi=150))
    pyplot().close(figure)


def perplexity(rows, path):
    """Perplexity against true bits, or against kept tokens where their number was varied; a line for each method.

    rows: of `eval_ppl.rows_of`, fp16's first. Written as PNG, whole or not at all.
    """
    plt = pyplot()
    kept = any("preserve=" in row["label"] for row in rows)
    x, words = ("preserve", "tokens kept in full precision") if kept else ("bits_true", "true bits of a cached number")
    lines = {}
    for row in rows[1:]:
        lines.setdefault(row["method"], []).append(row)
    figure, axes = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
    for i, (method, points) in enumerate(lines.items()):
        points.sort(key=lambda row: row[x])
        axes.errorbar(
            [p[x] for p in points], [p["ppl"] for p in points], [p["ppl_se"] or 0 for p in points], label=method,
            marker=MARKERS[i % 10], color=COLOURS[i % 10], linestyle="-" if i < 5 else "--", markersize=5)
    axes.axhline(rows[0]["ppl"], color="grey", linewidth=1, linestyle=":", label="fp16")
    axes.set(xlabel=words, ylabel="perplexity (bars: standard error)", yscale="log")
    plain_ticks(axes, TICKS)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    save(figure, path)


def plain_ticks(axes, choices):
    """Numbers as one writes them along a logarithmic y axis."""
    low, high = axes.get_ylim()
    ticks = [t for t in choices if low <= t <= high]
    axes.set_yticks(ticks, [f"{t:g}" for t in ticks])
    axes.minorticks_off()


def panels(rows, columns, width, height):
    """A figure of rows x columns axes, as a flat list, with a light grid."""
    figure, axes = pyplot().subplots(rows, columns, figsize=(width, height), layout="constrained", squeeze=False)
    for one in axes.flat:
        one.grid(alpha=0.3)
    return figure, list(axes.flat)


def by_layer(panel, rows, lines):
    """A line over the layers for each {column: label}; what is missing leaves a gap."""
    for i, (name, label) in enumerate(lines.items()):
        values = [float("nan") if row[name] is None else row[name] for row in rows]
        panel.plot([row["layer"] for row in rows], values, label=label, marker=MARKERS[i], color=COLOURS[i],
                   markersize=5)
    panel.set(xlabel="layer")
    panel.xaxis.get_major_locator().set_params(integer=True)
    panel.legend(fontsize="small")


def tokens_and_sinks(panel, values, marks, words):
    """values (T) by position, the sinks among them apart."""
    at = marks.nonzero()[:, 0].tolist()
    panel.scatter(range(len(values)), values.tolist(), s=5, color=COLOURS[5], linewidths=0, label="tokens")
    panel.scatter(at, values[marks].tolist(), s=32, color=COLOURS[1], marker="D", label="sinks")
    panel.set(xlabel="position (tokens)", ylabel=words)


def sinks(rows, example, path):
    """Figure 1a: each token's sink score in every layer, and the attention map of the middle layer."""
    from matplotlib.colors import LogNorm
    figure, (left, right) = panels(1, 2, 9.2, 3.8)
    scores = example["scores"].tolist()  # (L, T)
    for layer, score in enumerate(scores):
        points = left.scatter(range(len(score)), score, s=9, c=[layer] * len(score), cmap="viridis", linewidths=0,
                              vmin=0, vmax=max(1, len(scores) - 1))
    figure.colorbar(points, ax=left, label="layer").locator.set_params(integer=True)
    left.set(xlabel="position (tokens)", ylabel="sink score: attention received", ylim=(-0.02, 1.02))
    T, size = len(example["marks"]), len(example["map"])
    cells = example["map"].cpu().clamp(min=1e-5).numpy()  # (size, size)
    image = right.imshow(cells, norm=LogNorm(1e-4, 1), cmap="viridis", extent=(0, T, T, 0), interpolation="nearest")
    figure.colorbar(image, ax=right, label="attention, mean over heads")
    right.grid(False)
    right.set(xlabel="position of the key (tokens)", ylabel="position of the query (tokens)",
              title=f"layer {len(scores) // 2}; largest in cells of {T // size} x {T // size}" if T > size else
              f"layer {len(scores) // 2}")
    right.title.set_fontsize("medium")
    save(figure, path)


def outliers(rows, example, path):
    """Figure 4: the largest magnitude in the four places by layer, and the outlier's channel, signs and all."""
    places = {"d_in": "input of down-projection", "d_out": "output of down-projection",
              "mid": "H', after attention", "out": "H, after the block"}
    figure, (left, middle, right) = panels(1, 3, 11.5, 3.8)
    middle.sharey(left)
    by_layer(left, rows, places)
    by_layer(middle, rows, {f"{place} others": label for place, label in places.items()})
    for panel, title in ((left, "at the sinks"), (middle, "at all other tokens")):
        panel.set(yscale="log", ylabel="largest magnitude")
        panel.set_title(title, fontsize="medium")
    middle.legend_.remove()
    by_layer(right, rows, {"d_out c": "output of down-projection", "out c": "H, after the block"})
    right.axhline(0, color="grey", linewidth=1)
    right.set(ylabel="value, mean over the sinks")
    right.set_title(f"channel {rows[0]['channel']} at the sinks", fontsize="medium")
    save(figure, path)


def norms(rows, example, path):
    """Figures 2 and 5: norms of queries, keys and values by token in the middle layer, and of the sinks by layer."""
    figure, axes = panels(2, 2, 9.2, 6)
    for panel, kind, name in zip(axes, "qkv", ("queries", "keys", "values")):
        tokens_and_sinks(panel, example[kind], example["marks"], f"norm of {name}, mean of heads")
        panel.set(ylim=(0, None))
        panel.set_title(f"layer {len(rows) // 2}", fontsize="medium")
    axes[0].legend(fontsize="small")
    by_layer(axes[3], rows, {"q sinks": "queries", "k sinks": "keys", "v sinks": "values"})
    axes[3].axhline(1, color="grey", linewidth=1, linestyle=":")
    axes[3].set(ylim=(0, None), ylabel="norm: sinks / other tokens")
    save(figure, path)


def cosine(rows, example, path):
    """Figure 5a: cosine of queries with the keys of sinks and of other tokens, by layer, and their spread in one."""
    figure, (left, right) = panels(1, 2, 9.2, 3.8)
    lines = {"first": "first sink", "later": "later sinks", "others": "other tokens"}
    by_layer(left, rows, lines)
    left.set(ylabel="cosine of query and key", ylim=(-1, 1))
    left.legend(fontsize="small", loc="lower left")
    counts = example["counts"]  # (3, bins)
    edges = [-1 + 2 * i / counts.shape[1] for i in range(counts.shape[1] + 1)]
    for i, (count, label) in enumerate(zip(counts, lines.values())):
        right.stairs((count / count.sum().clamp(min=1) * len(count) / 2).tolist(), edges, label=label, color=COLOURS[i],
                     linestyle=("-", ":", "--")[i], linewidth=1.6)
    right.set(xlabel="cosine of query and key", ylabel="density", xticks=(-1, -0.5, 0, 0.5, 1))
    right.set_title(f"layer {len(rows) // 2}", fontsize="medium")
    right.legend(fontsize="small")
    save(figure, path)


def bias(rows, example, path):
    """Figure 6: each head's consistency of the bias and of the rest of the output, and the bias of one head."""
    figure, axes = panels(1, 3, 11.5, 3.8)
    for panel, values, title in zip(axes, example["heads"].cpu().numpy(), ("bias of Eq. 9", "rest of the output")):
        image = panel.imshow(values, vmin=0, vmax=1, cmap="viridis", aspect="auto", interpolation="nearest")
        panel.set(xlabel="head", ylabel="layer")
        panel.set_title(title, fontsize="medium")
        for axis in (panel.xaxis, panel.yaxis):
            axis.get_major_locator().set_params(integer=True)
    figure.colorbar(image, ax=axes[:2], label="mean cosine of all pairs of tokens")
    limit = example["bias"].abs().quantile(0.99).item()
    image = axes[2].imshow(example["bias"].cpu().numpy(), vmin=-limit, vmax=limit, cmap="PuOr", aspect="auto",
                           interpolation="nearest")
    axes[2].set(xlabel="channel", ylabel="position (tokens)")
    axes[2].set_title(f"bias: layer {len(rows) // 2}, head {example['head']}", fontsize="medium")
    figure.colorbar(image, ax=axes[2], label="bias")
    for panel in axes:
        panel.grid(False)
    save(figure, path)


def errors(rows, example, path):
    """Table 1: mean squared error by bits, with and without sinks."""
    figure, axes = panels(2, 3, 10, 6)
    groups = {}
    for row in rows:
        groups.setdefault((row["scheme"], row["of"]), []).append(row)
    for panel, ((scheme, kind), of) in zip(axes, groups.items()):
        static = "static" in scheme
        lines = {"overall": "overall", "without": "without sinks" if static else "groups without a sink",
                 "with": "groups with a sink"}
        for i, (name, label) in enumerate(lines.items()):
            if of[0][name] is not None:
                panel.plot([row["bits"] for row in of], [100 * row[name] for row in of], label=label,
                           marker=MARKERS[i], color=COLOURS[i], linestyle=("-", "--", ":")[i], markersize=6)
        panel.set(yscale="log", xlabel="bits", ylabel="mean squared error x 100",
                  xticks=sorted(row["bits"] for row in of))
        plain_ticks(panel, FINE)
        axis, kind = scheme.split("-")[0], {"K": "keys", "V": "values"}[kind]
        panel.set_title(f"{kind} per {axis}, {'static' if static else 'dynamic'}", fontsize="medium")
    for panel in axes[2], axes[5]:
        panel.legend(fontsize="small")
    save(figure, path)


def widths(rows, example, path):
    """Figure 7: attention to sinks by layer at several widths, and how far off it and the bias are, by bits."""
    figure, (left, right) = panels(1, 2, 9.2, 3.8)
    for i, bits in enumerate((16, 4, 3, 2)):
        left.plot(example[bits, False], label="exact" if bits == 16 else f"{bits} bits", marker=MARKERS[i],
                  color=COLOURS[(4, 2, 0, 1)[i]], markersize=5)
    left.plot(example[2, True], label="2 bits, sinks kept", marker=MARKERS[4], color=COLOURS[1], linestyle="--",
              markersize=5)
    left.set(xlabel="layer", ylabel="attention to the sinks", ylim=(0, 1))
    left.xaxis.get_major_locator().set_params(integer=True)
    for i, (name, label) in enumerate((("off", "attention, absolute"), ("bias off", "bias, relative"))):
        for kept in (False, True):
            line = [row for row in rows if row["kept"] is kept and row["bits"] < 16]
            right.plot([row["bits"] for row in line], [row[name] for row in line], marker=MARKERS[i],
                       color=COLOURS[i], linestyle="--" if kept else "-", markersize=5,
                       label=label + (", sinks kept" if kept else ""))
    right.set(yscale="log", xlabel="bits of keys and values", ylabel="mean change")
    right.set_ylim(right.get_ylim()[0] / 10)  # room for the legend
    for panel in (left, right):
        panel.legend(fontsize="small", loc="lower left" if panel is right else "best")
    save(figure, path)


def keys(rows, example, path):
    """OTT: sorted magnitudes of the keys, and of one channel of them, with the sinks marked; KV head 0."""
    figure, (left, right) = panels(1, 2, 9.2, 3.8)
    words = ("sum of magnitudes over a key's channels", f"magnitude in channel {int(example['number'][0])}")
    for panel, name, label in zip((left, right), ("total", "channel"), words):
        values, marks = example[name][0], example[f"{name} sinks"][0]  # (T) both
        rank, at = range(1, len(values) + 1), (marks.nonzero()[:, 0] + 1).tolist()
        panel.plot(rank, values.tolist(), color=COLOURS[0], marker=".", markersize=4, linewidth=1, label="keys, sorted")
        panel.scatter(at, values[marks].tolist(), s=40, color=COLOURS[1], marker="D", zorder=3, label="sinks")
        panel.set(xscale="log", xlabel="rank, the smallest first", ylabel=label, ylim=(0, None))
        panel.set_title(f"layer {len(rows) // 2}, KV head 0", fontsize="medium")
    left.legend(fontsize="small")
    save(figure, path)


def prefixes(rows, example, path):
    """IntactKV's Figure 2: the error that is left by the number of tokens that are exact, sinks marked."""
    figure, axes = panels(1, 2, 9.2, 3.6)
    for panel, name, words in zip(axes, ("last", "attention"), ("output of the last block", "what attention adds")):
        for sink in example["sinks"]:
            panel.axvline(sink, color=COLOURS[1], linewidth=1, linestyle="--")
        panel.plot([row["n"] for row in example["rows"]], [row[name] for row in example["rows"]], color=COLOURS[0],
                   marker=MARKERS[0], markersize=3)
        panel.set(xlabel="tokens whose keys and values are exact (dashed: sinks)",
                  ylabel=f"squared error, {words}", ylim=(0, None))
    save(figure, path)


def anchors(rows, table, path):
    """AnTKV's Appendix D: each token's short score beside the damage that coding it does; the middle layer, KV head 0.

    table: of `effects.anchor_damage`.
    """
    figure, axes = panels(1, 2, 8.4, 3.8)
    layer = len(table["k"]["score"]) // 2
    for panel, kind, words in zip(axes, "kv", ("AnS(K), short score of the key", "AnS(V), short score of the value")):
        score, damage = (table[kind][name][layer, 0].cpu() for name in ("score", "damage"))  # (T) both
        top = score.topk(max(1, len(score) // 100)).indices
        panel.scatter(score, damage, s=7, color=COLOURS[5], linewidths=0, label="tokens")
        panel.scatter(score[top], damage[top], s=26, color=COLOURS[1], marker="D", label="anchors, the top 1%")
        panel.set(xscale="log", yscale="log", xlabel=words, ylabel="damage: L1 change of the attention output")
    axes[0].legend(fontsize="small")
    save(figure, path)
