"""Where sinks are: the attention that tokens receive from the 64 queries that begin with their own,
averaged over heads (KVSink Figure 1a); heads: the share of heads in which a sink receives at least
--threshold.
"""
import torch

from tinykv.analysis import norms, outliers
from tinykv.analysis.figures import new_figure, span, title
from tinykv.analysis.walk import Text, by_layer, largest, walk
from tinykv.methods.antkv import attention_tiles

SPAN = 64  # queries that a sink score is averaged over (Gu et al., 2024)
FEWEST = 16  # a token that fewer queries see is not judged: it attends to itself
HEADS = 0.1  # the share of all heads in which a token has to be a sink, to be called one
THRESHOLD = 0.3  # the score from which a token is a sink of a head: Gu et al.'s

COLUMNS = {"layer": ("layer", "d"), "first": ("first token", ".3f"), "later": ("later sinks", ".3f"),
           "others": ("other tokens", ".3f"), "largest other": ("largest of them", ".3f"),
           "heads": ("heads", ".0%")}


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


@torch.no_grad()
def find_sinks(model, windows, threshold=THRESHOLD, progress=iter):
    """windows (W, T) -> marks (W, T), True at the sinks.

    A token is a sink of one head if its score there is at least `threshold`. It is called a sink of
    the text if it is one in a tenth of all heads of all layers.
    """
    marks = []
    for window in progress(windows):
        scores = torch.stack([sink_scores(at) for at in walk(model, window)])  # (L, H, T)
        share_of_heads = (scores >= threshold).float().mean((0, 1))  # (T)
        marks.append(share_of_heads >= HEADS)
    marks = torch.stack(marks)  # (W, T)
    marks[:, n_judged(windows.shape[1], model.config.sliding_window):] = False
    return marks


def look(at, sinks, threshold=THRESHOLD):
    by_head = sink_scores(at)  # (H, T)
    score = by_head.mean(0)  # (T)
    # the first token has a column of its own, whether it is a sink or not
    later, others = sinks.clone(), ~sinks  # (T) both
    later[0] = others[0] = False
    others[n_judged(len(sinks), at.sliding):] = False
    return {
        "first": score[0],
        "later": score[later].mean(),
        "others": score[others].mean(),
        "largest other": largest(score[others]),
        "heads": (by_head[:, sinks] >= threshold).float().mean(),
    }


def measure(text, threshold=THRESHOLD):
    return by_layer(text, lambda at, sinks: look(at, sinks, threshold))


def sink_report(model, windows, marks):
    """What is special about some tokens, in one row for each layer: {"channel": the outlier's,
    "layers": [row]}. For a model that is being trained.

    `first`, `later`: the sink score of marked tokens at position 0 and after it; `outlier`: |H| of
    the outlier's channel, and `ratio`, that over the median |H|; `q`, `k`, `v`: the mean norm over
    the median norm of all other tokens. marks (W, T): not necessarily sinks.
    """
    text = Text(model, windows, marks, layer=0)
    layers = []
    for score, outlier, norm in zip(measure(text), outliers.measure(text), norms.measure(text)):
        layers.append({
            "first": score["first"], "later": score["later"],
            "outlier": outlier["size c"], "ratio": outlier["ratio c"],
            "q": norm["q sinks"], "k": norm["k sinks"], "v": norm["v sinks"],
        })
    return {"channel": outlier["channel"], "layers": layers}


# The figure

def attention_map(at, size=128):
    """A layer's attention, averaged over heads, as (size, size) cells.

    A cell holds the largest of its keys' means over its queries. A sink is a line one token wide,
    and so it stays visible where the map is drawn small.
    """
    T = at.q.shape[2]
    size = min(size, T)
    cell_of = torch.arange(T, device=at.q.device) * size // T  # (T): the cell of each token

    # 1. means over the queries of each cell
    means = torch.zeros(size, T, device=at.q.device)  # (size, T)
    for tile, A in attention_tiles(at.q, at.k, window=at.sliding):
        means[:, :A.shape[-1]].index_add_(0, cell_of[tile], A[0].mean(0))
    means /= cell_of.bincount()[:, None]

    # 2. the largest over the keys of each cell
    columns = [means[:, cell_of == cell].amax(1) for cell in range(size)]
    return torch.stack(columns, dim=1)  # (size, size)


def draw_map(panel, cells, T):
    """cells (size, size) of the attention of T queries to T keys."""
    from matplotlib.colors import LogNorm
    image = panel.imshow(cells.cpu().clamp(min=1e-5).numpy(), norm=LogNorm(1e-4, 1), cmap="viridis",
                         extent=(0, T, T, 0), interpolation="nearest")
    panel.figure.colorbar(image, ax=panel, label="attention, mean over heads")
    panel.grid(False)
    panel.set(xlabel="position of the key (tokens)", ylabel="position of the query (tokens)")


def draw(text, rows):
    """Each token's sink score in every layer of the first window, and the attention map of the shown
    layer."""
    blocks, n_sinks = walk(text.model, text.windows[0]), int(text.marks[0].sum())
    T, judged = text.windows.shape[1], n_judged(text.windows.shape[1], text.model.config.sliding_window)
    figure, (left, right) = new_figure(
        1, 2, 9.2, 4, f"{n_sinks} of {T:,} tokens are sinks; the first token receives "
        f"{span([row['first'] for row in rows])} of the attention, by layer")
    for at in blocks:
        points = left.scatter(range(judged), sink_scores(at).mean(0)[:judged].tolist(), c=[at.layer] * judged,
                              s=9, linewidths=0, cmap="viridis", vmin=0, vmax=max(1, len(blocks) - 1))
    figure.colorbar(points, ax=left, label="layer").locator.set_params(integer=True)
    left.set(xlabel="position (tokens)", ylabel="sink score: attention received", ylim=(-0.02, 1.02))
    draw_map(right, attention_map(blocks[text.layer]), T)
    title(right, f"layer {text.layer}")
    return figure
