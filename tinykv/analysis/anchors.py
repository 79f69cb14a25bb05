"""AnTKV's scores: how well they rank the tokens by the damage that quantizing each alone does to the
attention output, and to the attention weights, which leaves V out (its Appendix D, Figure 9), by rank
correlation and by the damage in the top 1%; by layer, and the mean. The last row of each part is
ranked by the damage itself, which no score can exceed.

The damage of a token is how much the attention output changes, in L1, if this token alone is
quantized. Theorem 1 bounds it for small errors; the scores of Eq. 5, by which AnTKV chooses, are a
short form of the bound: see `methods/antkv.py`. No T x S matrix is ever whole.
"""
import torch

from tinykv import UserError
from tinykv.analysis.figures import COLOURS, legend, new_figure, pooled, title
from tinykv.analysis.walk import mean, means, walk
from tinykv.calibrate import calibrate
from tinykv.methods.antkv import AnTKV, anchor_scores, attention_tiles, score_tiles

DECADES = 1e9  # of the figure's axes, below the largest number

COLUMNS = {"of": ("of", ""), "ranked by": ("ranked by", ""), "rank by layer": ("rank correlation", ".2f"),
           "rank": ("mean", ".2f"), "top by layer": ("damage in the top 1%", ".0%"), "top": ("mean", ".0%")}


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


# How well the scores rank the tokens: Appendix D

def ranks(x):
    """x (..., n) -> the rank of each number, (..., n)."""
    return x.argsort(-1).argsort(-1).float()


def rank_correlation(a, b):
    """Spearman's rank correlation over the last dimension. a, b (..., n) -> (...)."""
    middle = (a.shape[-1] - 1) / 2
    a, b = ranks(a) - middle, ranks(b) - middle
    return (a * b).sum(-1) / (a.pow(2).sum(-1) * b.pow(2).sum(-1)).sqrt()


def check(config, context):
    """UserError if the damage cannot be measured in this model."""
    sliding = config.sliding_window
    if sliding is not None and sliding < context:
        raise UserError(
            "anchors: the damage of a token is measured where a query sees all tokens before it, and "
            f"in this model it sees {sliding}; give a --context of at most that")


def rankings(at, codecs, rope):
    """{what is damaged: (the damage, {what the tokens are ranked by: numbers})}, (Hkv, T) each."""
    # read each key, stored before RoPE, and each value from its codes
    positions = torch.arange(at.k.shape[2], device=at.k.device)  # (T)
    quantized_k = codecs.k.decode(codecs.k.encode(at.k_pre)).to(at.k.dtype)  # (1, Hkv, T, d)
    quantized_k = rope.rotate(quantized_k, positions)  # (1, Hkv, T, d)
    quantized_v = codecs.v.decode(codecs.v.encode(at.v))  # (1, Hkv, T, d)

    # (Hkv, T) each
    by_k, by_v, of_weights = (x[0] for x in damage(at.q, at.k, at.v, quantized_k, quantized_v))
    score_k, score_v = (x[0] for x in anchor_scores(at.q, at.k))
    bound = theorem_1(at.q, at.k, at.v)[0]
    error_k = (quantized_k - at.k)[0].abs().sum(-1)
    error_v = (quantized_v - at.v)[0].abs().sum(-1)
    return {
        "K": (by_k, {"score": score_k, "bound": bound, "score x error": score_k * error_k,
                     "bound x error": bound * error_k, "itself (ceiling)": by_k}),
        "K, without V": (of_weights, {"score": score_k, "score x error": score_k * error_k,
                                      "itself (ceiling)": of_weights}),
        "V": (by_v, {"score": score_v, "score x error": score_v * error_v, "itself (ceiling)": by_v}),
    }


def measure(text, vq="d8m256"):
    """Means over KV heads and windows. `first window`: the damage and the score of its tokens in KV
    head 0 of the shown layer. vq: the format of the codebooks."""
    check(text.model.config, text.windows.shape[1])
    method = AnTKV(text.model.config, vq)
    calibrate(text.model, method, text.calibration, text.progress)
    first = {}

    def look(at, sinks):
        found = {}
        for of, (damaged, ranked) in rankings(at, method.codecs[at.layer], text.model.rope).items():
            for by, x in ranked.items():
                top = x.topk(max(1, x.shape[-1] // 100), dim=-1).indices  # (Hkv, 1%)
                of_top = damaged.gather(-1, top).sum(-1) / damaged.sum(-1)  # (Hkv)
                found[of, by, at.layer] = torch.stack([rank_correlation(x, damaged).mean(), of_top.mean()])
                if at.layer == text.layer:
                    first.setdefault((of, by), {"damage": damaged[0].tolist(), "score": x[0].tolist()})
        return found

    found, rows = means(text, look), []
    for of, by in first:
        numbers = [found[of, by, layer] for layer in range(text.model.config.num_hidden_layers)]
        rank, top = ([x[i] for x in numbers] for i in (0, 1))
        rows.append({"of": of, "ranked by": by, "rank by layer": rank, "rank": mean(rank), "top by layer": top,
                     "top": mean(top), "first window": first[of, by]})
    return rows


def draw(text, rows):
    """Each token's score beside the damage of quantizing it, and the damage by position (AnTKV Figure
    1), of the shown layer's KV head 0; and the scores by position, of all heads (Figure 10)."""
    of = {(row["of"], row["ranked by"]): row for row in rows}
    figure, (of_keys, of_values, by_position, by_head) = new_figure(
        2, 2, 9.2, 7.4, f"The 1% with the largest scores hold {of['K', 'score']['top']:.0%} of the keys' damage and "
        f"{of['V', 'score']['top']:.0%} of the values'")
    for i, (panel, kind) in enumerate(((of_keys, "K"), (of_values, "V"))):
        first = of[kind, "score"]["first window"]
        score, damaged = torch.tensor(first["score"]), torch.tensor(first["damage"])  # (T) both
        top = score.topk(max(1, len(score) // 100)).indices
        panel.scatter(score, damaged, s=7, color=COLOURS[5], linewidths=0, label="tokens")
        panel.scatter(score[top], damaged[top], s=26, color=COLOURS[1], marker="D", label="anchors, the top 1%")
        panel.set(xscale="log", yscale="log", xlabel=f"AnS({kind})", ylabel="damage: L1 change of the output",
                  xlim=(score.max() / DECADES, None), ylim=(damaged.max() / DECADES, None))
        title(panel, f"{'keys' if kind == 'K' else 'values'}, layer {text.layer}, KV head 0")
        by_position.scatter(range(len(damaged)), damaged, s=7, color=COLOURS[i], linewidths=0,
                            label="keys" if kind == "K" else "values")
    legend(of_keys)
    by_position.set(yscale="log", xlabel="position (tokens)", ylabel="damage: L1 change of the output",
                    ylim=(damaged.max() / DECADES, None))
    title(by_position, f"damage by position, layer {text.layer}, KV head 0")
    legend(by_position)

    from matplotlib.colors import LogNorm
    scores = [anchor_scores(at.q, at.k)[1][0] for at in walk(text.model, text.windows[0])]  # L of (Hkv, T)
    scores = torch.cat(scores).cpu()  # (L * Hkv, T)
    cells = pooled(scores.T).T  # (L * Hkv, up to 128)
    image = by_head.imshow(cells.clamp(min=1e-3).numpy(), norm=LogNorm(), cmap="viridis", aspect="auto",
                           extent=(0, scores.shape[1], len(scores), 0), interpolation="nearest")
    by_head.grid(False)
    by_head.set(xlabel="position (tokens)", ylabel="KV head, of all layers in turn")
    title(by_head, "AnS(V) by position")
    figure.colorbar(image, ax=by_head, label="score, the largest of a cell")
    return figure
