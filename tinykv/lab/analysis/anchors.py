"""AnTKV's scores: how well they rank the tokens by the damage that quantizing each alone does to the attention output
(its Appendix D), by rank correlation and by the damage in the top 1%; by layer (of more than 8 the first, middle and
last two), and the mean. The last row of each part is ranked by the damage itself, which no score can exceed.

The damage of a token is how much the attention output changes, in L1, if this token alone is quantized. Theorem 1
bounds it for small errors; the scores of Eq. 5, by which AnTKV chooses, are a short form of the bound: see
`methods/antkv.py`. No T x S matrix is ever whole.
"""
import torch
import torch.nn.functional as F

from tinykv.calibrate import calibrate
from tinykv.lab import cli
from tinykv.lab.analysis.walk import by_layer, mean
from tinykv.lab.plots import COLOURS, legend, new_figure, title
from tinykv.methods.antkv import AnTKV, anchor_scores, score_tiles

COLUMNS = {"of": ("of", ""), "ranked by": ("ranked by", ""), "rank by layer": ("rank correlation", ".2f"),
           "rank": ("mean", ".2f"), "top by layer": ("damage in the top 1%", ".0%"), "top": ("mean", ".0%")}


def damage(q, k, v, quantized_k, quantized_v, window=None):
    """The L1 change of the attention output if token j alone is quantized, for every j: by its key, and by its value.

    q (B, H, T, d), k, v (B, Hkv, S, d), q and k rotated; quantized_k, quantized_v: the same rows as they are read from
    their codes. Returns (B, Hkv, S) twice, summed over queries and query heads. This is exact: if the score of
    key j changes by delta, its weight and the output do by

        A_ij' - A_ij = m_ij (1 - A_ij)       where m_ij = A_ij (e^delta - 1) / (1 + A_ij (e^delta - 1))
        O_i' - O_i = m_ij (V_j - O_i)

    in 64 bits, so that a weight near 1 does no harm.
    """
    heads_per_kv, d = q.shape[1] // k.shape[1], q.shape[-1]
    dk = (quantized_k.double() - k.double()).repeat_interleave(heads_per_kv, dim=1)  # (B, H, S, d)
    dv = (quantized_v.double() - v.double()).repeat_interleave(heads_per_kv, dim=1)  # (B, H, S, d)
    v = v.double().repeat_interleave(heads_per_kv, dim=1)  # (B, H, S, d)
    by_k, received = torch.zeros(2, *dk.shape[:3], dtype=v.dtype, device=v.device)  # (B, H, S) each
    for tile, scores in score_tiles(q, k, window):  # (B, H, tile, seen)
        seen = scores.shape[-1]
        A = scores.double().softmax(-1)  # (B, H, tile, seen)
        distance = torch.cdist(A @ v[:, :, :seen], v[:, :, :seen], p=1)  # (B, H, tile, seen): |V_j - O_i|
        # how much the score of each key changes, and how far the output moves towards its value
        delta = q[:, :, tile].double() @ dk[:, :, :seen].transpose(-2, -1) * d ** -0.5  # (B, H, tile, seen)
        moved = A * delta.expm1() / ((1 - A) + A * delta.exp())  # (B, H, tile, seen)
        by_k[..., :seen] += (moved.abs() * distance).sum(2)
        received[..., :seen] += A.sum(2)
    # a value's error reaches each output in proportion to the attention
    by_v = received * dv.abs().sum(-1)
    # the query heads of each KV head
    return [x.unflatten(1, (k.shape[1], -1)).sum(2).float() for x in (by_k, by_v)]  # (B, Hkv, S) both


# How well the scores rank the tokens: Appendix D

def rank_correlation(a, b):
    """Spearman's rank correlation over the last dimension. a, b (..., n) -> (...)."""
    middle = (a.shape[-1] - 1) / 2
    a, b = (x.argsort(-1).argsort(-1) - middle for x in (a, b))  # the rank of each number
    return F.cosine_similarity(a, b, dim=-1)


def rankings(at, codecs, rope):
    """{what is damaged: (the damage, the scores of the tokens, the errors of their rows)}, (Hkv, T) each."""
    # read each key, stored before RoPE, and each value from its codes
    quantized_k = codecs.k.decode(codecs.k.encode(at.k_pre)).to(at.k.dtype)  # (1, Hkv, T, d)
    quantized_k = rope.rotate(quantized_k)  # (1, Hkv, T, d)
    quantized_v = codecs.v.decode(codecs.v.encode(at.v))  # (1, Hkv, T, d)

    # (Hkv, T) each
    by_k, by_v = (x[0] for x in damage(at.q, at.k, at.v, quantized_k, quantized_v, at.sliding))
    score_k, score_v = (x[0] for x in anchor_scores(at.q, at.k, at.sliding))
    error_k = (quantized_k - at.k)[0].abs().sum(-1)
    error_v = (quantized_v - at.v)[0].abs().sum(-1)
    return {"K": (by_k, score_k, error_k), "V": (by_v, score_v, error_v)}


def measure(text, vq="d8m256"):
    """Means over KV heads and windows. `first window`: the damage and the score of its tokens in KV head 0 of the shown
    layer. vq: the format of the codebooks."""
    method = AnTKV(text.model.config, vq)
    calibrate(text.model, method, text.calibration, lambda over: cli.bar(over, "calibrating antkv"))
    first = {}

    def look(at, sinks):
        quality = {}
        for kind, (damaged, score, error) in rankings(at, method.codecs[at.layer], text.model.rope).items():
            ranked = {"score": score, "score x error": score * error, "itself (ceiling)": damaged}  # (Hkv, T) each
            for by, x in ranked.items():
                top = x.topk(max(1, x.shape[-1] // 100), dim=-1).indices  # (Hkv, 1%)
                of_top = damaged.gather(-1, top).sum(-1) / damaged.sum(-1)  # (Hkv)
                quality[kind, by] = torch.stack([rank_correlation(x, damaged).mean(), of_top.mean()])
                if at.layer == text.layer:
                    first.setdefault((kind, by), {"damage": damaged[0].tolist(), "score": x[0].tolist()})
        return quality

    layers, rows = by_layer(text, look), []
    for kind, by in first:
        rank, top = zip(*(layer[kind, by] for layer in layers))
        rows.append({"of": kind, "ranked by": by, "rank by layer": list(rank), "rank": mean(rank),
                     "top by layer": list(top), "top": mean(top), "first window": first[kind, by]})
    return rows


def draw(text, rows):
    """Each token's score beside the damage of quantizing it, and the damage by position (AnTKV Figure 1), of the shown
    layer's KV head 0."""
    by = {(row["of"], row["ranked by"]): row for row in rows}
    figure, (of_keys, of_values, by_position) = new_figure(
        1, 3, 13, 4, f"The 1% with the largest scores hold {by['K', 'score']['top']:.0%} of the keys' damage and "
        f"{by['V', 'score']['top']:.0%} of the values'")
    for panel, kind, name, colour in ((of_keys, "K", "keys", COLOURS[0]), (of_values, "V", "values", COLOURS[1])):
        first = by[kind, "score"]["first window"]
        score, damaged = torch.tensor(first["score"]), torch.tensor(first["damage"])  # (T) both
        top = score.topk(max(1, len(score) // 100)).indices
        panel.scatter(score, damaged, s=7, color=COLOURS[5], linewidths=0, label="tokens")
        panel.scatter(score[top], damaged[top], s=26, color=COLOURS[1], marker="D", label="anchors, the top 1%")
        panel.set(xscale="log", yscale="log", xlabel=f"AnS({kind})", ylabel="damage: L1 change of the output")
        title(panel, f"{name}, layer {text.layer}, KV head 0")
        by_position.scatter(range(len(damaged)), damaged, s=7, color=colour, linewidths=0, label=name)
    legend(of_keys)
    by_position.set(yscale="log", xlabel="position (tokens)", ylabel="damage: L1 change of the output")
    title(by_position, f"damage by position, layer {text.layer}, KV head 0")
    legend(by_position)
    return figure
