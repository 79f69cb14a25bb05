"""Attention sinks and what goes with them, in full precision: Sections 3 and 4.2 of KVSink (Su and Yuan, 2025), on any
model and text; and OTT's sorted keys. What quantization does to them is in `effects.py`.

Each function takes a model, windows (W, T) of tokens and, from `find_sinks`, marks (W, T) that are True at the sinks.
It returns rows for a table, and of the first window what a figure needs. A row's numbers are means over the windows,
None where there is nothing to average.

Notation of the paper: S the sinks; p_i^t, here A_ti, the attention of query t to key i; v_i the value of token i.
Memory holds one block of one window at a time, and of its attention one tile: no T x T matrix is ever whole.
"""
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tinykv import UserError
from tinykv.anchors import attention_tiles, score_tiles

SPAN = 64  # the queries that a sink score is averaged over, as Gu et al. (2024) do
FEWEST = 16  # a token that fewer queries see is not judged: its own attention to itself would count too much
HEADS = 0.1  # the share of all heads in which a sink has to be one


@dataclass
class Passing:
    """What passes through one block, of one window. The four places of Section 3.1 by the paper's names for them."""
    q: torch.Tensor  # (1, H, T, d), rotated
    k: torch.Tensor  # (1, Hkv, T, d), rotated
    v: torch.Tensor  # (1, Hkv, T, d)
    k_pre: torch.Tensor  # (1, Hkv, T, d), before RoPE
    d_in: torch.Tensor  # (T, M): input of the down-projection, Eq. 7
    d_out: torch.Tensor  # (T, D): its output, Eq. 8
    mid: torch.Tensor  # (T, D): H', the residual after attention, Eq. 2
    out: torch.Tensor  # (T, D): H, the residual after the block, Eq. 1


PLACES = ("d_in", "d_out", "mid", "out")


@torch.no_grad()
def walk(model, window):
    """The forward of `Llama.hidden` over window (T), block by block in full precision; yields a Passing of each."""
    positions = torch.arange(len(window), device=window.device)  # (T)
    mask = model.mask(0, len(positions), positions.device)  # (T, T) or None
    h = model.model["embed_tokens"](window[None])  # (1, T, D)
    for layer, block in enumerate(model.model["layers"]):
        x = block.input_layernorm(h)  # (1, T, D)
        q, k, v = block.self_attn.qkv(x)  # (1, H, T, d), (1, Hkv, T, d) twice
        mid = h + block.self_attn(x, model.rope, positions, mask, layer)  # (1, T, D)
        x = block.post_attention_layernorm(mid)  # (1, T, D)
        d_in = block.mlp.gated(x)  # (1, T, M)
        d_out = block.mlp.down_proj(d_in)  # (1, T, D)
        h = mid + d_out  # (1, T, D)
        if not torch.isfinite(h).all():
            raise UserError(f"layer {layer} computes numbers that are not finite; use another --dtype or model")
        yield Passing(model.rope.rotate(q, positions), model.rope.rotate(k, positions), v, k, d_in[0], d_out[0],
                      mid[0], h[0])


def mean(numbers):
    """Of a list, leaving out what is None; None if nothing is left."""
    numbers = [x for x in numbers if x is not None]
    return sum(numbers) / len(numbers) if numbers else None


def mean_of(x):
    """Of a tensor; None if it is empty."""
    return x.float().mean().item() if x.numel() else None


def rows_of(found, layers):
    """found {name: per window a list over layers} -> a row of each layer, every number the mean over the windows."""
    return [{"layer": layer, **{name: mean([window[layer] for window in windows]) for name, windows in found.items()}}
            for layer in range(layers)]


# Where sinks are: Figure 1a

def sink_scores(q, k, sliding=None):
    """The attention that each token receives, averaged over the SPAN queries from its own on: (H, T).

    q (1, H, T, d), k (1, Hkv, T, d), both rotated. At the end of the text, and where a window slides, over as many
    queries as there are.
    """
    T, span = q.shape[2], min(SPAN, sliding or SPAN)
    total = torch.zeros(q.shape[1], T, device=q.device)  # (H, T)
    for tile, A in attention_tiles(q, k, window=sliding):  # (1, H, tile, seen)
        query = torch.arange(tile.start, tile.stop, device=q.device)[:, None]  # (tile, 1)
        near = query < torch.arange(A.shape[-1], device=q.device) + span  # (tile, seen)
        total[:, :A.shape[-1]] += (A[0] * near).sum(1)
    return total / (T - torch.arange(T, device=q.device)).clamp(max=span)


def judged(T, sliding=None):
    """How many tokens of a text enough queries see; the first one always is judged."""
    return max(1, T - min(FEWEST, sliding or FEWEST) + 1)


@torch.no_grad()
def find_sinks(model, windows, threshold=0.3, progress=iter):
    """scores (W, L, H, T), see `sink_scores`, and marks (W, T).

    A token is a sink of one head from the score 0.3 on (Gu et al., 2024), and is called a sink of the text if it is one
    in a tenth of all heads of all layers.
    """
    sliding = model.config.sliding_window
    scores = torch.stack([torch.stack([sink_scores(at.q, at.k, sliding) for at in walk(model, window)])
                          for window in progress(windows)])  # (W, L, H, T)
    marks = (scores >= threshold).float().mean((1, 2)) >= HEADS  # (W, T)
    marks[:, judged(windows.shape[1], sliding):] = False
    return scores, marks


@torch.no_grad()
def attention_received(model, windows, marks, scores, threshold=0.3):
    """Figure 1a, per layer: the sink score, averaged over heads, of the first token, of sinks further on and of others.

    `heads`: the share of heads in which a sink has `threshold` or more, averaged over sinks (Gu et al.'s sink rate).
    """
    W, L, _, T = scores.shape
    last = judged(T, model.config.sliding_window)
    found = {name: [[None] * L for _ in range(W)] for name in ("first", "later", "others", "largest other", "heads")}
    for w in range(W):
        others = ~marks[w, :last]  # (judged)
        others[0] = False
        later = marks[w].clone()  # (T)
        later[0] = False
        for layer in range(L):
            score = scores[w, layer].mean(0)  # (T)
            rest = score[:last][others]  # (n)
            found["first"][w][layer] = score[0].item()
            found["later"][w][layer] = mean_of(score[later])
            found["others"][w][layer] = mean_of(rest)
            found["largest other"][w][layer] = rest.max().item() if rest.numel() else None
            found["heads"][w][layer] = mean_of(scores[w, layer][:, marks[w]] >= threshold)
    example = {"scores": scores[0, :, :, :last].mean(1), "marks": marks[0], "map": attention_map(model, windows[0])}
    return rows_of(found, L), example


@torch.no_grad()
def attention_map(model, window, size=128):
    """The middle layer's attention, averaged over heads, in size x size cells: a cell's largest mean over its queries.

    So a sink, which is a line of one pixel, is not lost when the map is drawn small.
    """
    layers, T = model.config.num_hidden_layers, len(window)
    at = next(at for layer, at in enumerate(walk(model, window)) if layer == layers // 2)
    size = min(size, T)
    row = torch.arange(T, device=window.device) * size // T  # (T): the cell of each token
    means = torch.zeros(size, T, device=window.device)  # (size, T)
    for tile, A in attention_tiles(at.q, at.k, window=model.config.sliding_window):
        means[:, :A.shape[-1]].index_add_(0, row[tile], A[0].mean(0))
    means /= row.bincount()[:, None]
    return torch.stack([means[:, row == cell].amax(1) for cell in range(size)], 1)  # (size, size)


# The outlier's way through the layers: Section 3.1, Figure 4

@torch.no_grad()
def outliers(model, windows, marks, progress=iter):
    """Figure 4, per layer: the largest magnitude in each of the four places, and how it comes and goes.

    A place's name: at the sinks; with `others`: at all other tokens. `ratio`: H's at the sinks over H's median.
    `channel`: the outlier's, where H is largest most often, the last block apart. `d_out c`, `out c`: what the
    down-projection adds to it at the sinks, and what then stands there, signs and all. The figure needs nothing else.
    """
    L = model.config.num_hidden_layers
    names = (*PLACES, *(f"{place} others" for place in PLACES), "ratio")
    found = {name: [[None] * L for _ in windows] for name in names}
    channels = torch.zeros(len(windows), L, dtype=torch.long)  # (W, L)
    at_sinks = {"d_out": {}, "out": {}}  # by window and layer, (D): means over the sinks
    for w, window in enumerate(progress(windows)):
        for layer, at in enumerate(walk(model, window)):
            for place in PLACES:
                size = getattr(at, place).abs()  # (T, M or D)
                found[f"{place} others"][w][layer] = size[~marks[w]].max().item()
                if marks[w].any():
                    found[place][w][layer] = size[marks[w]].max().item()
            channels[w, layer] = size.argmax() % size.shape[1]  # of the last place, H
            if marks[w].any():
                found["ratio"][w][layer] = found["out"][w][layer] / size.float().median().item()
                for place, means in at_sinks.items():
                    means[w, layer] = getattr(at, place)[marks[w]].float().mean(0)
    channel = int(channels[:, :max(1, L - 1)].flatten().mode().values)
    for place, means in at_sinks.items():
        found[f"{place} c"] = [[means[w, layer][channel].item() if (w, layer) in means else None for layer in range(L)]
                               for w in range(len(windows))]
    return [{**row, "channel": channel} for row in rows_of(found, L)], None


# Small queries, keys and values: "QKV suppression" of Section 3.2, Figures 2 and 5

@torch.no_grad()
def norms(model, windows, marks, progress=iter):
    """Per layer and of q, k and v: the median norm of a head's row at all other tokens, and at the sinks the mean norm
    over that median. The figure's norms are averages over heads."""
    L = model.config.num_hidden_layers
    found = {name: [[None] * L for _ in windows] for kind in "qkv" for name in (kind, f"{kind} sinks")}
    example = {}
    for w, window in enumerate(progress(windows)):
        for layer, at in enumerate(walk(model, window)):
            for kind in "qkv":
                norm = getattr(at, kind)[0].float().norm(dim=-1)  # (H or Hkv, T)
                other = norm[:, ~marks[w]].median().item()
                found[kind][w][layer] = other
                found[f"{kind} sinks"][w][layer] = norm[:, marks[w]].mean().item() / other if marks[w].any() else None
                if w == 0 and layer == L // 2:
                    example[kind] = norm.mean(0)  # (T)
    return rows_of(found, L), {**example, "marks": marks[0]}


# Queries point at the sinks' keys: Section 3.2, Figure 5a

@torch.no_grad()
def cosines(model, windows, marks, progress=iter, bins=100):
    """Per layer: the cosine of a query, not a sink's own, with the keys that it sees, all after RoPE.

    Means over the keys of sinks, of the first sink of the text, of the sinks after it (`later`), and of all other
    tokens (`others`). `largest`: how often the key with the largest cosine is a sink's. The example counts cosines from
    -1 to 1 in bins, (3, bins): first, later, others; of the middle layer of all windows.
    """
    L, sliding = model.config.num_hidden_layers, model.config.sliding_window
    found = {name: [[None] * L for _ in windows] for name in ("sinks", "first", "later", "others", "largest")}
    counts = torch.zeros(3, bins)  # (3, bins)
    for w, window in enumerate(progress(windows)):
        rank = marks[w].cumsum(0).where(marks[w], 0)  # (T): 1 at the first sink, more at later ones, 0 elsewhere
        for layer, at in enumerate(walk(model, window)):
            q = F.normalize(at.q.float(), dim=-1) * at.q.shape[-1] ** 0.5  # score_tiles takes this factor out again
            sums, largest = torch.zeros(3, 2, dtype=torch.double), []  # first, later, others: (sum, number of pairs)
            for tile, c in score_tiles(q, F.normalize(at.k.float(), dim=-1), sliding):
                c = c[0][:, ~marks[w, tile]]  # (H, queries, seen)
                seen = rank[:c.shape[-1]]  # (seen)
                for i, of in enumerate((seen == 1, seen > 1, seen == 0)):
                    values = c[..., of]  # (H, queries, n)
                    values = values[values.isfinite()]  # (pairs)
                    sums[i] += torch.tensor([values.sum(dtype=torch.double).item(), values.numel()])
                    if layer == L // 2:
                        counts[i] += values.histc(bins, -1, 1).cpu()
                largest.append(seen[c.argmax(-1)].flatten() > 0)  # (H * queries)
            for name, of in (("sinks", sums[:2].sum(0)), ("first", sums[0]), ("later", sums[1]), ("others", sums[2])):
                found[name][w][layer] = (of[0] / of[1]).item() if of[1] else None
            found["largest"][w][layer] = mean_of(torch.cat(largest))
    return rows_of(found, L), {"counts": counts}


# The attention bias: Eq. 9, Figure 6

def split_output(q, k, v, marks, sliding=None):
    """Eq. 9: the attention output as the sinks' part and the rest, (H, T, d) both, and the attention to sinks (H, T).

    q (1, H, T, d), k and v (1, Hkv, T, d), q and k rotated; marks (T).
    """
    v = v[0].float().repeat_interleave(q.shape[1] // v.shape[1], dim=0)  # (H, T, d)
    bias, rest, mass = torch.zeros_like(v), torch.zeros_like(v), torch.zeros(v.shape[:2], device=v.device)
    for tile, A in attention_tiles(q, k, window=sliding):  # (1, H, tile, seen)
        sink, seen = marks[:A.shape[-1]], v[:, :A.shape[-1]]  # (seen), (H, seen, d)
        bias[:, tile] = A[0][..., sink] @ seen[:, sink]
        rest[:, tile] = A[0] @ seen - bias[:, tile]
        mass[:, tile] = A[0][..., sink].sum(-1)
    return bias, rest, mass


def unit(x):
    """x (..., d) over its norm, also where that is tiny; 0 stays 0."""
    return F.normalize(x.double(), dim=-1, eps=1e-30)


def consistency(x, group=None):
    """x (H, T, d) -> per head the mean cosine of all pairs of its T vectors, (H), NaN where there is no pair.

    Vectors that are 0 are left out. group (T), numbers from 0 on: only pairs within a group. |sum of unit vectors|^2 is
    the sum over all pairs, each vector with itself included.
    """
    x = unit(x)  # (H, T, d)
    group = torch.zeros(x.shape[1], dtype=torch.long, device=x.device) if group is None else group  # (T)
    one_hot = F.one_hot(group).double()  # (T, groups)
    n = (x != 0).any(-1).double() @ one_hot  # (H, groups)
    sums = one_hot.T @ x  # (H, groups, d)
    pairs = (n * (n - 1)).sum(-1)  # (H): each counted twice
    return (sums.square().sum(-1) - n).sum(-1).where(pairs > 0, float("nan")) / pairs


@torch.no_grad()
def biases(model, windows, marks, progress=iter):
    """Figure 6, per layer: the bias b_t = sum_{i in S} p_i^t v_i of Eq. 9, and whether it is one.

    `attention`: sum_{i in S} p_i^t of tokens t that are no sinks; `size`: mean |b_t| over the mean |output| of those;
    `consistency`: mean cosine of b_t and b_t' over all pairs of tokens, averaged over heads, and the `lowest` head's;
    `within`: the same over pairs that see the same sinks; `rest`: over all pairs, of the rest of the output. Of a
    single sink every b_t is a multiple of one v, and consistent. The example: of the first window that has sinks.
    """
    L, sliding = model.config.num_hidden_layers, model.config.sliding_window
    names = ("attention", "size", "consistency", "lowest", "within", "rest")
    found = {name: [[None] * L for _ in windows] for name in names}
    example = {}
    for w, window in enumerate(progress(windows)):
        if not marks[w].any():
            continue
        heads = []
        for layer, at in enumerate(walk(model, window)):
            bias, rest, mass = split_output(at.q, at.k, at.v, marks[w], sliding)
            sizes = bias[:, ~marks[w]].norm(dim=-1), (bias + rest)[:, ~marks[w]].norm(dim=-1)  # (H, n) both
            alike, unlike = consistency(bias), consistency(rest)  # (H) both
            numbers = (mass[:, ~marks[w]].mean(), sizes[0].mean() / sizes[1].mean(), alike.mean(), alike.min(),
                       consistency(bias, marks[w].long().cumsum(0)).mean(), unlike.mean())
            for name, x in zip(names, numbers):
                found[name][w][layer] = x.item() if x.isfinite() else None
            heads.append(torch.stack([alike, unlike]))  # (2, H)
            if layer == L // 2 and not example:
                head = int(mass.mean(1).argmax())
                example = {"marks": marks[w], "head": head, "bias": bias[head]}  # (T, d)
        example.setdefault("heads", torch.stack(heads, 1))  # (2, L, H): consistency of the bias, and of the rest
    return rows_of(found, L), example


# Sorted keys and their cliff: OTT

@torch.no_grad()
def sorted_keys(model, windows, marks, progress=iter, most=32):
    """Per layer: OTT's magnitudes sum_c |K[i, c]| of each KV head's keys after RoPE, sorted, and the cliff in them.

    The cliff is the largest ratio of two neighbours among the `most` smallest, OTT's extra pool. `smallest`: the
    smallest magnitude over the median; `cliff`: that ratio; `below`: how many tokens lie below it; `sinks`: which share
    of these are sinks. The example: sorted magnitudes, and sorted |K| of the channel where that is largest on average,
    both (Hkv, T), of the middle layer, and which of them are sinks'.
    """
    L = model.config.num_hidden_layers
    found = {name: [[None] * L for _ in windows] for name in ("smallest", "cliff", "below", "sinks")}
    example = {}
    for w, window in enumerate(progress(windows)):
        for layer, at in enumerate(walk(model, window)):
            size = at.k[0].float().abs()  # (Hkv, T, d)
            total, order = size.sum(-1).sort(dim=-1)  # (Hkv, T) both
            rise = (total[:, 1:] / total[:, :-1])[:, :most]  # (Hkv, up to most)
            cliff, below = rise.max(-1)  # (Hkv) both
            under = torch.arange(len(window), device=window.device) <= below[:, None]  # (Hkv, T)
            numbers = total[:, 0] / total.median(-1).values, cliff, below + 1, marks[w][order][under]
            for name, x in zip(found, numbers):
                found[name][w][layer] = mean_of(x)
            if w == 0 and layer == L // 2:
                channel = size.mean(1).argmax(-1)  # (Hkv)
                one, at_one = size.gather(2, channel[:, None, None].expand(-1, len(window), 1))[..., 0].sort(dim=-1)
                example = {"total": total, "total sinks": marks[w][order], "channel": one,
                           "channel sinks": marks[w][at_one], "number": channel}
    return rows_of(found, L), example
