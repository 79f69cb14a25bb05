"""The figures. Lines differ in marker as well as in colour, and the colours are those that all eyes tell apart."""
from pathlib import Path

from tinykv import checkpoint

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#000000", "#56b4e9", "#e69f00", "#7f7f7f", "#8c564b", "#17806d")
MARKERS = "osD^vP*Xdh"
TICKS = (1, 1.5, 2, 2.5, 3, 4, 5, 7, 10, 15, 20, 30, 50, 100, 200, 500, 1000)


def pyplot():
    """matplotlib, drawing into files; imported only where a figure is asked for."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    return plt


def save(figure, path):
    """Write a figure as PNG, whole or not at all."""
    checkpoint.write(Path(path), lambda part: figure.savefig(part, format="png", dpi=150))
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
    low, high = axes.get_ylim()
    ticks = [t for t in TICKS if low <= t <= high]
    axes.set_yticks(ticks, [f"{t:g}" for t in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    save(figure, path)


def anchors(table, path):
    """AnTKV's Appendix D: each token's short score beside the damage that coding it does; the middle layer, KV head 0.

    table: of `inspect.anchor_damage`.
    """
    plt = pyplot()
    figure, panels = plt.subplots(1, 2, figsize=(8.4, 3.8), layout="constrained")
    layer = len(table["k"]["score"]) // 2
    for panel, kind, words in zip(panels, "kv", ("AnS(K), short score of the key", "AnS(V), short score of the value")):
        score, damage = (table[kind][name][layer, 0].cpu() for name in ("score", "damage"))  # (T) both
        top = score.topk(max(1, len(score) // 100)).indices
        panel.scatter(score, damage, s=7, color=COLOURS[5], linewidths=0, label="tokens")
        panel.scatter(score[top], damage[top], s=26, color=COLOURS[1], marker="D", label="anchors, the top 1%")
        panel.set(xscale="log", yscale="log", xlabel=words, ylabel="damage: L1 change of the attention output")
        panel.grid(alpha=0.3)
    panels[0].legend(fontsize="small")
    save(figure, path)
