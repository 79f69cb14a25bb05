"""The figures. Each function returns a matplotlib Figure; `save` writes one as PNG.

Figures are made without pyplot, so the backend of a notebook stays as it is; after
`%matplotlib inline` a notebook shows a Figure that is the last line of a cell. Lines differ in
marker as well as in colour, and all eyes can tell the colours apart.
"""
from tinykv import storage
from tinykv.analysis.maps import pooled
from tinykv.run.table import lines_of

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#000000",
           "#56b4e9", "#e69f00", "#7f7f7f", "#8c564b", "#17806d")
MARKERS = "osD^vP*Xdh"
LINES = ("-", "--", ":")


# What the figures share

def new_figure(rows, columns, width, height):
    """A Figure of rows x columns panels with a light grid, and the panels as a list.

    width, height: in inches.
    """
    from matplotlib.figure import Figure  # only now: nothing else needs matplotlib
    figure = Figure(figsize=(width, height), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False)
    for panel in panels.flat:
        panel.grid(alpha=0.3)
    return figure, list(panels.flat)


def save(figure, path):
    """Write a Figure as PNG, whole or not at all."""
    storage.write(path, lambda part: figure.savefig(part, format="png", dpi=150))


def style(i):
    """Colour and marker of line i."""
    colour = COLOURS[i % len(COLOURS)]
    marker = MARKERS[i % len(MARKERS)]
    return {"color": colour, "marker": marker, "markersize": 5}


def title(panel, text):
    panel.set_title(text, fontsize="medium")


def legend(panel, **where):
    panel.legend(fontsize="small", **where)


def whole_numbers(axis):
    axis.get_major_locator().set_params(integer=True)


def plain_ticks(panel):
    """1, 2, 5, 10, 20, ... along a logarithmic y axis, written as plain numbers."""
    low, high = panel.get_ylim()
    ticks = [digit * 10.0 ** power for power in range(-6, 7) for digit in (1, 2, 5)]
    ticks = [tick for tick in ticks if low <= tick <= high]
    panel.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    panel.minorticks_off()


def lines_by_layer(panel, rows, labels):
    """A line over the layers for each column in labels {column: label}.

    A missing number leaves a gap.
    """
    layers = [row["layer"] for row in rows]
    for i, (column, label) in enumerate(labels.items()):
        numbers = [float("nan") if row[column] is None else row[column] for row in rows]
        panel.plot(layers, numbers, label=label, **style(i))
    panel.set(xlabel="layer")
    whole_numbers(panel.xaxis)
    legend(panel)


def tokens_and_sinks(panel, numbers, sinks, label):
    """A dot for each token by position, the sinks among them larger. numbers, sinks (T)."""
    positions = sinks.nonzero()[:, 0].tolist()
    panel.scatter(range(len(numbers)), numbers.tolist(), label="tokens",
                  s=5, color=COLOURS[5], linewidths=0)
    panel.scatter(positions, numbers[sinks].tolist(), label="sinks",
                  s=32, color=COLOURS[1], marker="D")
    panel.set(xlabel="position (tokens)", ylabel=label)


# eval_ppl.py --plot

FLOOR = 0.01  # per cent: a smaller loss is drawn here, as a few windows cannot tell it from none


def perplexity(rows):
    """How much each method's perplexity is above fp16's, in per cent, against true bits.

    Where the number of kept tokens was varied, against that number instead.

    rows: those of eval_ppl.py, fp16's in full precision first; what is read of each is "label",
    "weights", "ppl", "bits_true" and "preserve". A line joins rows that differ in bits alone (or in
    kept tokens alone). A loss below FLOOR, or a gain, is an open marker at FLOOR. Standard errors
    are not drawn: they come from the windows, which all methods share. Where kept tokens are
    varied, a method that keeps a share of the text is left out.
    """
    against_kept = any("preserve=" in row["label"] for row in rows)
    if against_kept:
        x, label, varied = "preserve", "tokens kept in full precision", ("preserve",)
        rows = [row for row in rows if row is rows[0] or not isinstance(row[x], str)]
    else:
        x, label, varied = "bits_true", "true bits of a cached number", None
    base = rows[0]["ppl"]

    figure, (panel,) = new_figure(1, 1, 7.2, 4.6)
    for i, (name, points) in enumerate(lines_of(rows[1:], varied).items()):
        points = sorted(points, key=lambda row: row[x])
        losses = [100 * (row["ppl"] / base - 1) for row in points]
        drawn = [max(loss, FLOOR) for loss in losses]
        along_x = [row[x] for row in points]
        panel.plot(along_x, drawn, label=name, linestyle=LINES[i // 5 % len(LINES)], **style(i))
        # open markers on top, where the loss is below the floor
        below = [at for at, loss in zip(along_x, losses) if loss < FLOOR]
        panel.plot(below, [FLOOR] * len(below), linestyle="", markerfacecolor="white", zorder=3,
                   **style(i))
    panel.set(yscale="log", xlabel=label, ylabel="perplexity above fp16's (%)")
    plain_ticks(panel)
    panel.grid(which="minor", visible=False)
    legend(panel, ncols=2 if len(panel.lines) > 12 else 1)
    return figure


# sinks

def sinks(rows, example):
    """KVSink Figure 1a: each token's sink score in every layer, and the attention map of the middle
    layer."""
    figure, (left, right) = new_figure(1, 2, 9.2, 3.8)
    scores_by_position(left, example["scores"].tolist())
    attention_map(right, example["map"], T=len(example["marks"]), layer=example["layer"])
    return figure


def scores_by_position(panel, scores):
    """scores: of each layer, a number for each token."""
    for layer, score in enumerate(scores):
        points = panel.scatter(range(len(score)), score, c=[layer] * len(score), s=9, linewidths=0,
                               cmap="viridis", vmin=0, vmax=max(1, len(scores) - 1))
    colour_bar = panel.figure.colorbar(points, ax=panel, label="layer")
    colour_bar.locator.set_params(integer=True)
    panel.set(xlabel="position (tokens)", ylabel="sink score: attention received")
    panel.set(ylim=(-0.02, 1.02))


def attention_map(panel, cells, T, layer):
    """cells (size, size) of the attention of T queries to T keys."""
    from matplotlib.colors import LogNorm
    size = len(cells)
    image = panel.imshow(cells.cpu().clamp(min=1e-5).numpy(), norm=LogNorm(1e-4, 1), cmap="viridis",
                         extent=(0, T, T, 0), interpolation="nearest")
    panel.figure.colorbar(image, ax=panel, label="attention, mean over heads")
    panel.grid(False)
    panel.set(xlabel="position of the key (tokens)", ylabel="position of the query (tokens)")
    text = f"layer {layer}"
    if T > size:
        text += f"; largest in cells of {T // size} x {T // size}"
    title(panel, text)


# outliers

def outliers(rows, example):
    """KVSink Figure 4: the largest magnitude in the four places by layer, and the outlier's channel
    with its sign."""
    places = {
        "d_in": "input of down-projection",
        "d_out": "output of down-projection",
        "mid": "H', after attention",
        "out": "H, after the block",
    }
    figure, (left, middle, right) = new_figure(1, 3, 11.5, 3.8)

    middle.sharey(left)
    lines_by_layer(left, rows, places)
    lines_by_layer(middle, rows, {f"{place} others": label for place, label in places.items()})
    left.legend_.remove()  # the same as in the middle, where there is room
    legend(middle, loc="lower right")
    left.set(yscale="log", ylabel="largest magnitude")
    middle.set(yscale="log", ylabel="largest magnitude")
    title(left, "at the sinks")
    title(middle, "at all other tokens")

    channel = rows[0]["channel"]
    lines_by_layer(right, rows, {"d_out c": f"{channel}, output of down-projection",
                                 "out c": f"{channel}, H after the block"})
    # the other channels with outliers
    for i, (c, of_layers) in enumerate(example.items(), 2):
        if c != channel:
            right.plot(of_layers, label=f"{c}, H after the block", **style(i))
    legend(right)
    right.axhline(0, color="grey", linewidth=1)
    right.set(ylabel="value, mean over the sinks")
    title(right, "outlier channels at the sinks")
    return figure


# norms

def norms(rows, example):
    """KVSink Figures 2 and 5: norms of queries, keys and values in the middle layer, and of the
    sinks by layer."""
    figure, panels = new_figure(2, 2, 9.2, 6)
    for panel, kind, name in zip(panels, "qkv", ("queries", "keys", "values")):
        tokens_and_sinks(panel, example[kind], example["marks"], f"norm of {name}, mean over heads")
        panel.set(ylim=(0, None))
        title(panel, f"layer {example['layer']}")
    legend(panels[0])
    lines_by_layer(panels[3], rows, {"q sinks": "queries", "k sinks": "keys", "v sinks": "values"})
    panels[3].axhline(1, color="grey", linewidth=1, linestyle=":")
    panels[3].set(ylim=(0, None), ylabel="norm: sinks / other tokens")
    return figure


# cosine

def cosine(rows, example):
    """KVSink Figure 5a: cosines of queries with the keys of sinks and of other tokens: by layer,
    and the distribution in the middle layer."""
    labels = {"first": "first sink", "later": "later sinks", "others": "other tokens"}
    figure, (left, right) = new_figure(1, 2, 9.2, 3.8)
    lines_by_layer(left, rows, labels)
    left.set(ylabel="cosine of query and key", ylim=(-1, 1))
    legend(left, loc="lower left")

    counts = example["counts"]  # (3, bins)
    bins = counts.shape[1]
    edges = [-1 + 2 * i / bins for i in range(bins + 1)]
    for i, (count, label) in enumerate(zip(counts, labels.values())):
        density = count / count.sum().clamp(min=1) * bins / 2  # (bins)
        right.stairs(density.tolist(), edges, label=label,
                     color=COLOURS[i], linestyle=("-", ":", "--")[i], linewidth=1.6)
    right.set(xlabel="cosine of query and key", ylabel="density", xticks=(-1, -0.5, 0, 0.5, 1))
    title(right, f"layer {example['layer']}")
    legend(right)
    return figure


# bias

def bias(rows, example):
    """KVSink Figure 6: each head's consistency of the bias and of the rest of the output, and the
    bias of one head."""
    figure, panels = new_figure(1, 3, 11.5, 3.8)
    for panel in panels:
        panel.grid(False)

    consistency = example["heads"].cpu().numpy()  # (2, L, H)
    for panel, by_head, text in zip(panels, consistency, ("bias of Eq. 9", "rest of the output")):
        image = panel.imshow(by_head, vmin=0, vmax=1,
                             cmap="viridis", aspect="auto", interpolation="nearest")
        panel.set(xlabel="head", ylabel="layer")
        whole_numbers(panel.xaxis)
        whole_numbers(panel.yaxis)
        title(panel, text)
    figure.colorbar(image, ax=panels[:2], label="mean cosine of all pairs of tokens")

    limit = example["bias"].abs().quantile(0.99).item()
    image = panels[2].imshow(example["bias"].cpu().numpy(), vmin=-limit, vmax=limit,
                             cmap="PuOr", aspect="auto", interpolation="nearest")
    panels[2].set(xlabel="channel", ylabel="position (tokens)")
    title(panels[2], f"bias: layer {example['layer']}, head {example['head']}")
    figure.colorbar(image, ax=panels[2], label="bias")
    return figure


# keys

def keys(rows, example):
    """OTT: the sorted magnitudes of keys, and of one channel of them, with the sinks marked; KV
    head 0."""
    figure, (left, right) = new_figure(1, 2, 9.2, 3.8)
    sorted_magnitudes(left, example["total"][0], example["total sinks"][0])
    sorted_magnitudes(right, example["channel"][0], example["channel sinks"][0])
    left.set(ylabel="sum of magnitudes over a key's channels")
    right.set(ylabel=f"magnitude in channel {int(example['number'][0])}")
    for panel in (left, right):
        title(panel, f"layer {example['layer']}, KV head 0")
    legend(left)
    return figure


def sorted_magnitudes(panel, magnitudes, is_sink):
    """magnitudes (T) in ascending order, is_sink (T)."""
    ranks = range(1, len(magnitudes) + 1)
    sink_ranks = (is_sink.nonzero()[:, 0] + 1).tolist()
    panel.plot(ranks, magnitudes.tolist(), label="keys, sorted",
               color=COLOURS[0], marker=".", markersize=4, linewidth=1)
    panel.scatter(sink_ranks, magnitudes[is_sink].tolist(), label="sinks",
                  s=40, color=COLOURS[1], marker="D", zorder=3)
    panel.set(xscale="log", xlabel="rank, the smallest first", ylim=(0, None))


# errors

def errors(rows, example):
    """KVSink Table 1: mean squared error by bits, with and without sinks; a panel for each scheme,
    of K or V."""
    figure, panels = new_figure(2, 3, 10, 6)
    by_panel = {}
    for row in rows:
        by_panel.setdefault((row["scheme"], row["of"]), []).append(row)
    for panel, ((scheme, kind), of_panel) in zip(panels, by_panel.items()):
        errors_of_scheme(panel, of_panel)
        axis, ranges = scheme.split("-")
        title(panel, f"{'keys' if kind == 'K' else 'values'} per {axis}, {ranges}")
    lines, labels = panels[0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside lower center", ncols=3, fontsize="small")
    return figure


def errors_of_scheme(panel, rows):
    labels = {"overall": "overall", "without": "without sinks", "with": "groups with a sink"}
    bits = [row["bits"] for row in rows]
    for i, (column, label) in enumerate(labels.items()):
        if rows[0][column] is not None:
            numbers = [100 * row[column] for row in rows]
            panel.plot(bits, numbers, label=label, linestyle=LINES[i], **style(i))
    panel.set(yscale="log", xlabel="bits", ylabel="mean squared error x 100", xticks=sorted(bits))
    plain_ticks(panel)


# widths

def widths(rows, example):
    """KVSink Figure 7: attention to the sinks by layer at several widths; and by bits, how much it
    and the bias change.
    """
    figure, (left, right) = new_figure(1, 2, 9.2, 3.8)
    attention_by_width(left, example)
    change_by_width(right, rows)
    return figure


def attention_by_width(panel, attention):
    """attention {(bits, kept): of each layer}."""
    lines = [  # bits, sinks kept, colour
        (16, False, COLOURS[4]),
        (4, False, COLOURS[2]),
        (3, False, COLOURS[0]),
        (2, False, COLOURS[1]),
        (2, True, COLOURS[1]),
    ]
    for i, (bits, kept, colour) in enumerate(lines):
        label = "exact" if bits == 16 else f"{bits} bits"
        if kept:
            label += ", sinks kept"
        panel.plot(attention[bits, kept], label=label, linestyle="--" if kept else "-",
                   color=colour, marker=MARKERS[i], markersize=5)
    panel.set(xlabel="layer", ylabel="attention to the sinks", ylim=(0, 1))
    whole_numbers(panel.xaxis)
    legend(panel)


def change_by_width(panel, rows):
    labels = {"off": "attention, absolute", "bias off": "bias, relative"}
    for i, (column, label) in enumerate(labels.items()):
        for kept in (False, True):
            line = [row for row in rows if row["kept"] is kept and row["bits"] < 16]
            panel.plot([row["bits"] for row in line], [row[column] for row in line],
                       label=f"{label}, sinks kept" if kept else label,
                       linestyle="--" if kept else "-", **style(i))
    panel.set(yscale="log", xlabel="bits of keys and values", ylabel="mean change")
    panel.set_ylim(panel.get_ylim()[0] / 10)  # room for the legend
    legend(panel, loc="lower left")


# prefix

def prefixes(rows, example):
    """IntactKV Figure 2: the error that is left, by the number of exact tokens; dashed lines at the
    sinks."""
    figure, panels = new_figure(1, 2, 9.2, 3.6)
    lengths = [row["n"] for row in example["rows"]]
    labels = {"last": "output of the last block", "attention": "what attention adds"}
    for panel, (column, label) in zip(panels, labels.items()):
        for sink in example["sinks"]:
            panel.axvline(sink, color=COLOURS[1], linewidth=1, linestyle="--")
        errors_left = [row[column] for row in example["rows"]]
        panel.plot(lengths, errors_left, color=COLOURS[0], marker="o", markersize=3)
        panel.set(xlabel="tokens whose keys and values are exact (dashed: sinks)",
                  ylabel=f"squared error, {label}", ylim=(0, 1.05 * max(errors_left)))
    return figure


# anchors

def anchors(rows, example):
    """AnTKV Appendix D: each token's score beside the damage of quantizing it, and the damage by
    position (its Figure 1), of one layer's KV head 0; and the scores by position, of all heads
    (Figure 10).

    example: of `anchors.anchor_report`.
    """
    figure, (of_keys, of_values, by_position, by_head) = new_figure(2, 2, 9.2, 7)
    layer = example["layer"]
    for panel, kind in ((of_keys, "k"), (of_values, "v")):
        score = example[kind]["score"][layer, 0].cpu()  # (T)
        damage = example[kind]["damage"][layer, 0].cpu()  # (T)
        score_and_damage(panel, score, damage)
        title(panel, f"layer {layer}, KV head 0")
    of_keys.set(xlabel="AnS(K), score of the key")
    of_values.set(xlabel="AnS(V), score of the value")
    legend(of_keys)

    for i, (kind, name) in enumerate((("k", "keys"), ("v", "values"))):
        damage = example[kind]["damage"][layer, 0].cpu()  # (T)
        by_position.scatter(range(len(damage)), damage, s=7, color=COLOURS[i], linewidths=0, label=name)
    by_position.set(yscale="log", xlabel="position (tokens)",
                    ylabel="damage: L1 change of the attention output")
    title(by_position, f"layer {layer}, KV head 0")
    legend(by_position)

    from matplotlib.colors import LogNorm
    scores = example["v"]["score"].flatten(0, 1).cpu()  # (L * Hkv, T)
    cells = pooled(scores.T).T  # (L * Hkv, up to 128)
    image = by_head.imshow(cells.clamp(min=1e-3).numpy(), norm=LogNorm(), cmap="viridis", aspect="auto",
                           extent=(0, scores.shape[1], len(scores), 0), interpolation="nearest")
    by_head.grid(False)
    by_head.set(xlabel="position (tokens)", ylabel="KV head, of all layers in turn")
    title(by_head, "AnS(V) by position")
    figure.colorbar(image, ax=by_head, label="score, the largest of a cell")
    return figure


# maps

def maps(rows, example):
    """KVSink Figures 1b and 5f, IntactKV Figure 1, AnTKV Figure 8: magnitudes, token by channel,
    and the attention among the first tokens."""
    figure, panels = new_figure(2, 3, 12, 7)
    names = [name for name in example if name not in ("attention", "layer", "tokens")]
    for panel, name in zip(panels, names):
        cells = example[name].cpu()  # (rows, channels)
        image = panel.imshow(cells.numpy(), cmap="viridis", aspect="auto", interpolation="nearest",
                             vmax=cells.max().item(), vmin=0,
                             extent=(0, cells.shape[1], example["tokens"], 0))
        panel.grid(False)
        panel.set(xlabel="channel", ylabel="position (tokens)")
        title(panel, f"layer {example['layer']}: {name}")
        figure.colorbar(image, ax=panel, label="magnitude")
    attention_map(panels[5], example["attention"], T=len(example["attention"]), layer=example["layer"])
    return figure


def score_and_damage(panel, score, damage):
    """score, damage (T)."""
    one_percent = max(1, len(score) // 100)
    top = score.topk(one_percent).indices
    panel.scatter(score, damage, s=7, color=COLOURS[5], linewidths=0, label="tokens")
    panel.scatter(score[top], damage[top], s=26, color=COLOURS[1], marker="D",
                  label="anchors, the top 1%")
    panel.set(xscale="log", yscale="log", ylabel="damage: L1 change of the attention output")
