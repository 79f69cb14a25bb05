"""Cosine of queries with the keys that they see, both after RoPE: means over the keys of sinks, and of other tokens;
largest: how often a sink's key has the largest (KVSink Section 3.2, Figure 5a). The queries of sinks do not count.
"""
import torch.nn.functional as F

from tinykv.methods.antkv import score_tiles

COLUMNS = {"layer": ("layer", "d"), "sinks": ("sinks", ".2f"), "others": ("other tokens", ".2f"),
           "largest": ("largest", ".0%")}


def look(at, sinks):
    q = F.normalize(at.q.float(), dim=-1) * at.q.shape[-1] ** 0.5  # scores are divided by sqrt(d)
    k = F.normalize(at.k.float(), dim=-1)  # (1, Hkv, T, d)
    totals, counts = {"sinks": 0, "others": 0}, {"sinks": 0, "others": 0}  # of the cosines of each kind
    n_largest = n_queries = 0
    for tile, cosine in score_tiles(q, k, at.sliding):  # (1, H, tile, seen)
        cosine = cosine[0][:, ~sinks[tile]]  # (H, queries, seen): -inf where a query does not see a key
        is_sink = sinks[:cosine.shape[-1]]  # (seen)
        for kind, keys in (("sinks", is_sink), ("others", ~is_sink)):
            x = cosine[..., keys]  # (H, queries, n)
            x = x[x.isfinite()].double()  # (pairs)
            totals[kind] += x.sum()
            counts[kind] += x.numel()
        # is the key with the largest cosine a sink's?
        n_largest += is_sink[cosine.argmax(-1)].sum()
        n_queries += cosine.shape[0] * cosine.shape[1]
    return {"sinks": totals["sinks"] / counts["sinks"], "others": totals["others"] / counts["others"],
            "largest": n_largest / n_queries}
