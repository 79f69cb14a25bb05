"""AnTKV's anchor scores beside the damage that they stand for (Li et al., 2025, Theorem 1 and
Appendix D).

The damage of a token is how much the attention output changes, in L1, if this token alone is
quantized. Theorem 1 bounds it for small errors; the scores of Eq. 5, by which AnTKV chooses, are a
short form of the bound. See `methods/antkv.py` for both. The attention goes in tiles of queries: no
T x S matrix is ever whole.
"""
import torch

from tinykv import UserError
from tinykv.analysis.sinks import shown_layer
from tinykv.analysis.walk import walk
from tinykv.calibrate import calibrate
from tinykv.methods.antkv import AnTKV, anchor_scores, attention_tiles, score_tiles

# The bound, and what it bounds

def theorem_1(q, k, v):
    """The factor of |dK_j|_1 in Theorem 1, sum_i A_ij |V_j - O_i|_1 |Q_i|_2: (B, Hkv, S), summed
    over query heads.

    q (B, H, T, d), k, v (B, Hkv, S, d); q and k rotated. For comparison: it takes the distance of
    each output O_i to each value V_j, which the score of Eq. 5 leaves out.
    """
    B, H, T, _ = q.shape
    Hkv, S = k.shape[1:3]
    v = v.float().repeat_interleave(H // Hkv, dim=1)  # (B, H, S, d)
    norm = q.float().norm(dim=-1)[..., None]  # (B, H, T, 1)
    factor = torch.zeros(B, H, S, device=q.device)  # (B, H, S)
    for tile, A in attention_tiles(q, k):  # A (B, H, tile, seen)
        seen = A.shape[-1]
        output = A @ v[:, :, :seen]  # (B, H, tile, d)
        distance = torch.cdist(output, v[:, :, :seen], p=1)  # (B, H, tile, seen)
        factor[..., :seen] += (A * distance * norm[:, :, tile]).sum(2)
    return factor.unflatten(1, (Hkv, -1)).sum(2)  # (B, Hkv, S)


def damage(q, k, v, quantized_k, quantized_v):
    """The L1 change of the attention output if token j alone is quantized, for every j: by its key,
    and by its value; and that of the attention weights A, by its key.

    q (B, H, T, d), k, v (B, Hkv, S, d), q and k rotated; quantized_k, quantized_v: the same rows as
    they are read from their codes. Returns (B, Hkv, S) three times, summed over queries and query
    heads. This is exact: if the score of key j changes by delta, the log-odds of its weight do, and
    with R_ij, the output of query i without key j,

        A_ij' = sigmoid(log(A_ij / (1 - A_ij)) + delta)
        O_i' - O_i = (A_ij' - A_ij) (V_j - R_ij),   where R_ij = (O_i - A_ij V_j) / (1 - A_ij)
        |A_i' - A_i|_1 = 2 |A_ij' - A_ij|
    """
    B, H, T, d = q.shape
    Hkv, S = k.shape[1:3]
    heads_per_kv = H // Hkv
    dk = quantized_k.float() - k.float()  # (B, Hkv, S, d)
    dv = quantized_v.float() - v.float()  # (B, Hkv, S, d)
    dk = dk.repeat_interleave(heads_per_kv, dim=1).transpose(-2, -1)  # (B, H, d, S)
    dv = dv.abs().sum(-1).repeat_interleave(heads_per_kv, dim=1)  # (B, H, S)
    v = v.float().repeat_interleave(heads_per_kv, dim=1)  # (B, H, S, d)
    by_k = torch.zeros(B, H, S, device=q.device)
    of_weights = torch.zeros(B, H, S, device=q.device)  # the change of A
    received = torch.zeros(B, H, S, device=q.device)  # the attention to each token
    for tile, scores in score_tiles(q, k):  # (B, H, tile, seen)
        seen = scores.shape[-1]
        A = scores.softmax(-1)  # (B, H, tile, seen)
        v_seen = v[:, :, :seen]  # (B, H, seen, d)
        # log-odds, and |V_j - R_ij| = |V_j - O_i| / (1 - A_ij)
        log_odds = scores - scores.logsumexp(-1, keepdim=True) - (-A).log1p()  # (B, H, tile, seen)
        distance = torch.cdist(A @ v_seen, v_seen, p=1) / (1 - A)  # (B, H, tile, seen)
        # the same for the largest weight, which may round to 1: from the attention without its key
        top = scores.argmax(-1, keepdim=True)  # (B, H, tile, 1)
        others = scores.scatter(-1, top, float("-inf"))  # (B, H, tile, seen)
        top_odds = scores.gather(-1, top) - others.logsumexp(-1, keepdim=True)  # (B, H, tile, 1)
        rest = others.softmax(-1).nan_to_num() @ v_seen  # (B, H, tile, d): 0 where there is no other key
        top_v = v_seen.gather(2, top.expand(-1, -1, -1, d))  # (B, H, tile, d)
        top_distance = (top_v - rest).abs().sum(-1, keepdim=True)  # (B, H, tile, 1)
        log_odds = log_odds.scatter(-1, top, top_odds)
        distance = distance.scatter(-1, top, top_distance)
        # how much the score of each key changes, and then its weight
        delta = q[:, :, tile].float() @ dk[..., :seen] * d ** -0.5  # (B, H, tile, seen)
        change = ((log_odds + delta).sigmoid() - log_odds.sigmoid()).abs()  # (B, H, tile, seen)
        by_k[..., :seen] += (change * distance).sum(2)
        of_weights[..., :seen] += 2 * change.sum(2)
        received[..., :seen] += A.sum(2)
    # a value's error reaches each output in proportion to the attention
    by_v = received * dv
    # the query heads of each KV head
    by_k = by_k.unflatten(1, (Hkv, -1)).sum(2)  # (B, Hkv, S)
    by_v = by_v.unflatten(1, (Hkv, -1)).sum(2)  # (B, Hkv, S)
    of_weights = of_weights.unflatten(1, (Hkv, -1)).sum(2)  # (B, Hkv, S)
    return by_k, by_v, of_weights


@torch.no_grad()
def anchor_damage(model, window, method):
    """The damage of every token of a window (T), and what is said of it: {"k": {...}, "v": {...}},
    (L, Hkv, T) each.

    `damage`; `score`, AnS of Eq. 5; `error`, |d|_1 of its key or value; of keys only: `bound`, the
    factor of Theorem 1, and `weights`, the damage to the attention weights.
    """
    tables = {"k": {"damage": [], "weights": [], "score": [], "error": [], "bound": []},
              "v": {"damage": [], "score": [], "error": []}}
    positions = torch.arange(len(window), device=window.device)  # (T)
    for at, codecs in zip(walk(model, window), method.codecs):
        # read each key, stored before RoPE, and each value from its codes
        quantized_k = codecs.k.decode(codecs.k.encode(at.k_pre)).to(at.k.dtype)  # (1, Hkv, T, d)
        quantized_k = model.rope.rotate(quantized_k, positions)  # (1, Hkv, T, d)
        quantized_v = codecs.v.decode(codecs.v.encode(at.v))  # (1, Hkv, T, d)

        # (1, Hkv, T) each
        damage_k, damage_v, of_weights = damage(at.q, at.k, at.v, quantized_k, quantized_v)
        score_k, score_v = anchor_scores(at.q, at.k)  # (1, Hkv, T) both
        columns = {
            "k": {"damage": damage_k, "weights": of_weights, "score": score_k,
                  "error": (quantized_k - at.k).abs().sum(-1),
                  "bound": theorem_1(at.q, at.k, at.v)},
            "v": {"damage": damage_v, "score": score_v,
                  "error": (quantized_v - at.v).abs().sum(-1)},
        }
        for kind, of_kind in columns.items():
            for name, x in of_kind.items():
                tables[kind][name].append(x[0].float())  # (Hkv, T)
    for of_kind in tables.values():
        for name, layers in of_kind.items():
            of_kind[name] = torch.stack(layers)  # (L, Hkv, T)
    return tables


# How well the scores rank the tokens: Appendix D

def ranks(x):
    """x (..., n) -> the rank of each number, (..., n)."""
    return x.argsort(-1).argsort(-1).float()


def rank_correlation(a, b):
    """Spearman's rank correlation over the last dimension. a, b (..., n) -> (...)."""
    middle = (a.shape[-1] - 1) / 2
    a, b = ranks(a) - middle, ranks(b) - middle
    return (a * b).sum(-1) / (a.pow(2).sum(-1) * b.pow(2).sum(-1)).sqrt()


def anchor_method(config, context, vq):
    """The method whose scores are looked at. UserError if the damage cannot be measured in this
    model."""
    sliding = config.sliding_window
    if sliding is not None and sliding < context:
        raise UserError(
            "anchors: the damage of a token is measured where a query sees all tokens before it, and "
            f"in this model it sees {sliding}; give a --context of at most that")
    return AnTKV(config, vq)


#   damage:        (of keys or values, column of `anchor_damage`, what the tokens are ranked by).
# The last rank is by the damage itself: the ceiling, which no score can exceed.
DAMAGES = {
    "K": ("k", "damage", ("score", "bound", "score x error", "bound x error", "damage")),
    "K, without V": ("k", "weights", ("score", "score x error", "weights")),
    "V": ("v", "damage", ("score", "score x error", "damage")),
}


def anchor_report(model, windows, calibration, vq, progress=iter, shown=None):
    """How well scores and bounds rank the tokens by damage: rows with, by layer, the `rank
    correlation`, and the share of the `damage in the top 1%` of the tokens; averaged over KV heads
    and windows. The damage of keys is measured twice: at the attention output, and at the attention
    weights, which leaves V out, as the paper's Figure 9 does.

    windows, calibration (W, T); vq: the format of the codebooks. The example: `anchor_damage` of
    the first window, and the `layer` to show.
    """
    method = anchor_method(model.config, windows.shape[1], vq)
    calibrate(model, method, calibration, progress)
    tables = [anchor_damage(model, window, method) for window in progress(windows)]
    rows = []
    for of, (kind, damage_name, names) in DAMAGES.items():
        for name in names:
            # the mean over windows of what ranking by this column gives
            correlations, shares = [], []  # of each window (L)
            for table in tables:
                damage_of_token = table[kind][damage_name]  # (L, Hkv, T)
                x = table[kind][name.removesuffix(" x error")]  # (L, Hkv, T)
                if name.endswith(" x error"):
                    x = x * table[kind]["error"]
                correlations.append(rank_correlation(x, damage_of_token).mean(1))
                one_percent = max(1, x.shape[-1] // 100)
                top = x.topk(one_percent, dim=-1).indices  # (L, Hkv, 1%)
                damage_of_top = damage_of_token.gather(-1, top).sum(-1)  # (L, Hkv)
                shares.append((damage_of_top / damage_of_token.sum(-1)).mean(1))
            rows.append({
                "of": of,
                "ranked by": "itself (ceiling)" if name == damage_name else name,
                "rank correlation": torch.stack(correlations).mean(0).tolist(),
                "damage in the top 1%": torch.stack(shares).mean(0).tolist(),
            })
    return rows, {**tables[0], "layer": shown_layer(model, shown)}
