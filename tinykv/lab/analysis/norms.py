"""Norms of queries, keys and values: the median over heads and all other tokens, and the mean at sinks as a multiple of
it (KVSink Section 3.2, Figures 2 and 5).
"""
from tinykv.lab.plots import legend, new_figure, span, title, tokens_and_sinks

COLUMNS = {"layer": ("layer", "d"), "q": ("Q others", ".2f"), "q sinks": ("x at sinks", ".2f"),
           "k": ("K others", ".2f"), "k sinks": ("x at sinks", ".2f"), "v": ("V others", ".2f"),
           "v sinks": ("x at sinks", ".2f")}


def look(at, sinks):
    row = {}
    for kind, x in (("q", at.q), ("k", at.k), ("v", at.v)):
        norm = x[0].float().norm(dim=-1)  # (H or Hkv, T)
        row[kind] = norm[:, ~sinks].median()
        row[f"{kind} sinks"] = norm[:, sinks].mean() / row[kind]
    return row


def draw(text, rows):
    """Norms by token in the shown layer, averaged over heads."""
    at, sinks = text.shown()
    figure, panels = new_figure(
        1, 3, 12, 3.6, "Norms at the sinks, as multiples of the other tokens', by layer: keys "
        f"{span([row['k sinks'] for row in rows], '.2f')}, values {span([row['v sinks'] for row in rows], '.2f')}")
    for panel, (name, x) in zip(panels, {"queries": at.q, "keys": at.k, "values": at.v}.items()):
        tokens_and_sinks(panel, x[0].float().norm(dim=-1).mean(0), sinks, f"norm of {name}, mean over heads")
        title(panel, f"{name} of layer {at.layer}")
    legend(panels[0])
    return figure
