"""Where sinks are: the attention that tokens receive from the 64 queries that begin with their own, averaged over heads
(KVSink Figure 1a); sinks: how many tokens are sinks of this layer, as each layer has its own; heads: the share of its
heads in which they receive at least a threshold of 0.3.
"""
import torch

from tinykv.lab import cli
from tinykv.lab.analysis.walk import largest, walk
from tinykv.lab.plots import draw_map, new_figure, pooled, span, title, tokens_and_sinks
from tinykv.methods.antkv import attention_tiles

THRESHOLD = 0.3  # the score from which a token is a sink of a head: that of Gu et al. (2024)
SPAN = 64  # queries that a sink score is averaged over (Gu et al., 2024)
FEWEST = 16  # a token that fewer queries see is not judged: it attends to itself
HEADS = 0.1  # the share of the heads in which a token has to be a sink, to be called one

COLUMNS = {"layer": ("layer", "d"), "sinks": ("sinks", ".1f"), "first": ("first token", ".3f"),
           "later": ("later sinks", ".3f"), "others": ("other tokens", ".3f"),
           "largest other": ("largest of them", ".3f"), "heads": ("heads", ".0%")}


def sink_scores(at):
    """The attention that each token receives, averaged over the SPAN queries from its own on: (H, T).

    Where fewer queries see a token, as at the end of the text, the average is over those that do.
    """
    _, H, T, _ = at.q.shape
    seen_by = min(SPAN, at.sliding or SPAN)
    positions = torch.arange(T, device=at.q.device)  # (T)
    received = torch.zeros(H, T, device=at.q.device)  # (H, T)
    for tile, A in attention_tiles(at.q, at.k, window=at.sliding):  # A (1, H, tile, seen)
        seen = A.shape[-1]
        # is the query one of the key's SPAN?
        near = positions[tile, None] < positions[:seen] + seen_by  # (tile, seen)
        received[:, :seen] += (A[0] * near).sum(1)
    n_queries = (T - positions).clamp(max=seen_by)  # (T)
    return received / n_queries


def n_judged(T, sliding):
    """How many of T tokens are seen by enough queries to be judged; the first one always is."""
    return max(1, T - min(FEWEST, sliding or FEWEST) + 1)


def sinks_of(scores, sliding):
    """scores (heads, T) -> (T), True at the sinks of these heads: the tokens whose score is at least THRESHOLD in a
    tenth of them."""
    marks = (scores >= THRESHOLD).float().mean(0) >= HEADS  # (T)
    marks[n_judged(len(marks), sliding):] = False
    return marks


@torch.no_grad()
def find_sinks(model, windows):
    """windows (W, T) -> marks (W, T), True at the sinks of the text, those of all heads of all layers."""
    marks = []
    for window in cli.bar(windows, "looking for sinks"):
        scores = torch.cat([sink_scores(at) for at in walk(model, window)])  # (L * H, T)
        marks.append(sinks_of(scores, model.config.sliding_window))
    return torch.stack(marks)  # (W, T)


def look(at, _):
    """The sinks of a row are those of its own layer."""
    by_head = sink_scores(at)  # (H, T)
    score, sinks = by_head.mean(0), sinks_of(by_head, at.sliding)  # (T) both
    # the first token has a column of its own, whether it is a sink or not
    later, others = sinks.clone(), ~sinks  # (T) both
    later[0] = others[0] = False
    others[n_judged(len(sinks), at.sliding):] = False
    return {
        "sinks": sinks.sum(),
        "first": score[0],
        "later": score[later].mean(),
        "others": score[others].mean(),
        "largest other": largest(score[others]),
        "heads": (by_head[:, sinks] >= THRESHOLD).float().mean(),
    }


# The figure

def attention_map(at, size=128):
    """A layer's attention, averaged over heads, as (size, size) cells.

    A cell holds the largest of its keys' means over its queries. A sink is a line one token wide, and so it stays
    visible where the map is drawn small.
    """
    T = at.q.shape[2]
    size = min(size, T)
    cell_of = torch.arange(T, device=at.q.device) * size // T  # (T): the cell of each query
    means = torch.zeros(size, T, device=at.q.device)  # (size, T): over the queries of each cell
    for tile, A in attention_tiles(at.q, at.k, window=at.sliding):
        means[:, :A.shape[-1]].index_add_(0, cell_of[tile], A[0].mean(0))
    means /= cell_of.bincount()[:, None]
    return pooled(means.T, size).T  # (size, size): the largest over the keys of each cell


def draw(text, rows):
    """Each token's sink score in the shown layer of the first window, with the layer's sinks, and the attention map."""
    from matplotlib.colors import LogNorm
    (at, _), T = text.shown(), text.windows.shape[1]
    by_head, judged = sink_scores(at), n_judged(T, at.sliding)  # (H, T)
    sinks = sinks_of(by_head, at.sliding)  # (T)
    figure, (left, right) = new_figure(
        1, 2, 9.2, 4, f"By layer, {span([row['sinks'] for row in rows], '.2g')} of {T:,} tokens are sinks, and "
        f"the first token receives {span([row['first'] for row in rows])} of the attention")
    tokens_and_sinks(left, by_head.mean(0)[:judged], sinks[:judged], "sink score: attention received")
    cells = attention_map(at).clamp(min=1e-5)  # (size, size): a query a row
    draw_map(right, cells, "position of the key (tokens)", "attention, mean over heads", norm=LogNorm(1e-4, 1),
             extent=(0, T, T, 0))
    right.set(ylabel="position of the query (tokens)")
    for panel in (left, right):
        title(panel, f"layer {text.layer}")
    return figure
