"""Norms of queries, keys and values: the median over heads and all other tokens, and the mean at
sinks as a multiple of it (KVSink Section 3.2, Figures 2 and 5).
"""
from tinykv.analysis.figures import legend, lines_by_layer, new_figure, span, title, tokens_and_sinks
from tinykv.analysis.walk import by_layer

COLUMNS = {"layer": ("layer", "d"), "q": ("Q others", ".2f"), "q sinks": ("x at sinks", ".2f"),
           "k": ("K others", ".2f"), "k sinks": ("x at sinks", ".2f"), "v": ("V others", ".2f"),
           "v sinks": ("x at sinks", ".2f")}


def norms_of(at):
    """The norm of each token's query, key and value: (H or Hkv, T) each."""
    return {kind: x[0].float().norm(dim=-1) for kind, x in (("q", at.q), ("k", at.k), ("v", at.v))}


def look(at, sinks):
    row = {}
    for kind, norm in norms_of(at).items():
        median = norm[:, ~sinks].median()
        row[kind] = median
        row[f"{kind} sinks"] = norm[:, sinks].mean() / median
    return row


def measure(text):
    return by_layer(text, look)


def draw(text, rows):
    """Norms by token in the shown layer, averaged over heads; and those of the sinks by layer."""
    at, sinks = text.shown()
    figure, panels = new_figure(
        2, 2, 9.2, 6.2, "Norms at the sinks, as multiples of the other tokens', by layer: keys "
        f"{span([row['k sinks'] for row in rows], '.2f')}, values {span([row['v sinks'] for row in rows], '.2f')}")
    for panel, norm, name in zip(panels, norms_of(at).values(), ("queries", "keys", "values")):
        tokens_and_sinks(panel, norm.mean(0), sinks, f"norm of {name}, mean over heads")
        panel.set(ylim=(0, None))
        title(panel, f"{name} of layer {at.layer}")
    legend(panels[0])
    lines_by_layer(panels[3], rows, {"q sinks": "queries", "k sinks": "keys", "v sinks": "values"})
    panels[3].axhline(1, color="grey", linewidth=1, linestyle=":")
    panels[3].set(ylim=(0, None), ylabel="norm: sinks / other tokens")
    title(panels[3], "all layers")
    legend(panels[3])
    return figure
