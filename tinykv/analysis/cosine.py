"""Cosine of queries with the keys that they see, both after RoPE: means over the keys of sinks, of
the first sink, of later ones, and of other tokens; largest: how often a sink's key has the largest
(KVSink Section 3.2, Figure 5a). The queries of sinks do not count.
"""
import torch
import torch.nn.functional as F

from tinykv.analysis.figures import label_ends, lines_by_layer, new_figure, span
from tinykv.analysis.walk import by_layer
from tinykv.methods.antkv import score_tiles

COLUMNS = {"layer": ("layer", "d"), "sinks": ("sinks", ".2f"), "first": ("first sink", ".2f"),
           "later": ("later sinks", ".2f"), "others": ("other tokens", ".2f"), "largest": ("largest", ".0%")}


def cosine_tiles(at, sinks):
    """A tile of queries at a time: their cosines with the keys seen, (H, queries, seen), -inf where a
    query does not see a key, and the number of each key seen: 1 for the first sink, 2 for the second,
    0 for other tokens."""
    number = sinks.cumsum(0).where(sinks, 0)  # (T)
    q = F.normalize(at.q.float(), dim=-1) * at.q.shape[-1] ** 0.5  # scores are divided by sqrt(d)
    k = F.normalize(at.k.float(), dim=-1)  # (1, Hkv, T, d)
    for tile, cosine in score_tiles(q, k, at.sliding):  # (1, H, tile, seen)
        yield cosine[0][:, ~sinks[tile]], number[:cosine.shape[-1]]


def kinds(number):
    """Which keys are the first sink's, later sinks', and other tokens': (seen) each."""
    return {"first": number == 1, "later": number > 1, "others": number == 0}


def look(at, sinks):
    sums = dict.fromkeys(("first", "later", "others"), 0)  # of each kind (2): the sum, and of how many
    n_largest = n_queries = 0
    for cosine, number in cosine_tiles(at, sinks):
        for kind, keys in kinds(number).items():
            x = cosine[..., keys]  # (H, queries, n)
            x = x[x.isfinite()].double()  # (pairs)
            sums[kind] = sums[kind] + torch.tensor([x.sum(), x.numel()])
        # is the key with the largest cosine a sink's?
        n_largest += (number[cosine.argmax(-1)] > 0).sum()
        n_queries += cosine.shape[0] * cosine.shape[1]
    sums["sinks"] = sums["first"] + sums["later"]
    return {**{kind: total / n for kind, (total, n) in sums.items()}, "largest": n_largest / n_queries}


def measure(text):
    return by_layer(text, look)


def draw(text, rows):
    labels = {"first": "first sink", "later": "later sinks", "others": "other tokens"}
    figure, (panel,) = new_figure(
        1, 1, 9.2, 4, f"Cosine of a query with a sink's key: {span([row['sinks'] for row in rows], '.2f')} by layer; "
        f"with another's: {span([row['others'] for row in rows], '.2f')}")
    lines_by_layer(panel, rows, labels)
    panel.set(ylabel="cosine of query and key, mean", ylim=(-1, 1))
    label_ends(panel)
    return figure
