"""Attention sinks in full precision: where they are, and what goes with them.

Sections 3 and 4.2 of KVSink (Su and Yuan, 2025), on any model and text; and OTT's sorted keys.

A function takes a model, windows (W, T) of tokens, and marks (W, T) that are True at the sinks,
from `find_sinks`. It returns the rows of a table, one for each layer, and an example: what a figure
shows of the first window, where it shows one layer of that which is `shown`: the middle one, if
None. A number in a row is a mean over windows, or None where there is nothing to average.

Notation of the paper: S the sinks; p_i^t, here A[t, i], the attention of query t to key i; v_i the
value of token i.
"""
import torch
import torch.nn.functional as F

from tinykv.analysis.walk import LayerMeans, finite_or_none, mean_of, recorded_calls, walk
from tinykv.methods.antkv import attention_tiles, score_tiles

SPAN = 64  # queries that a sink score is averaged over (Gu et al., 2024)
FEWEST = 16  # a token that fewer queries see is not judged: it attends to itself
OUTLIER = 0.1  # of the largest channel: the share from which a channel has outliers, too
HEADS = 0.1  # the share of all heads in which a token has to be a sink, to be called one


def shown_layer(model, shown):
    """The layer that figures show."""
    return model.config.num_hidden_layers // 2 if shown is None else shown


# Where sinks are: KVSink Figure 1a

def sink_scores(q, k, sliding=None):
    """The attention that each token receives, averaged over the SPAN queries from its own on.

    q (1, H, T, d), k (1, Hkv, T, d), both rotated -> (H, T). sliding: the size of a sliding window.
    Where fewer queries see a token, as at the end of the text, the average is over those that do.
    """
    _, H, T, _ = q.shape
    span = min(SPAN, sliding or SPAN)
    positions = torch.arange(T, device=q.device)  # (T)
    received = torch.zeros(H, T, device=q.device)  # (H, T)
    for tile, A in attention_tiles(q, k, window=sliding):  # A (1, H, tile, seen)
        seen = A.shape[-1]
        # is the query one of the key's SPAN?
        near = positions[tile, None] < positions[:seen] + span  # (tile, seen)
        received[:, :seen] += (A[0] * near).sum(1)
    n_queries = (T - positions).clamp(max=span)  # (T)
    return received / n_queries


def n_judged(T, sliding=None):
    """How many of T tokens are seen by enough queries to be judged; the first one always is."""
    return max(1, T - min(FEWEST, sliding or FEWEST) + 1)


@torch.no_grad()
def find_sinks(model, windows, threshold=0.3, progress=iter):
    """-> scores (W, L, H, T) by `sink_scores`, and marks (W, T), True at the sinks.

    A token is a sink of one head if its score there is at least `threshold`; 0.3 is Gu et al.'s
    (2024). It is called a sink of the text if it is one in a tenth of all heads of all layers.
    """
    sliding = model.config.sliding_window

    # 1. the score of each token in each head
    scores = []
    for window in progress(windows):
        of_window = [sink_scores(at.q, at.k, sliding) for at in walk(model, window)]  # L of (H, T)
        scores.append(torch.stack(of_window))
    scores = torch.stack(scores)  # (W, L, H, T)

    # 2. in how many heads is it a sink?
    share_of_heads = (scores >= threshold).float().mean((1, 2))  # (W, T)
    marks = share_of_heads >= HEADS  # (W, T)
    marks[:, n_judged(windows.shape[1], sliding):] = False
    return scores, marks


@torch.no_grad()
def attention_received(model, windows, marks, scores, threshold=0.3, shown=None):
    """KVSink Figure 1a: sink scores, averaged over heads.

    `first`: of the first token; `later`: of the sinks after it; `others`: of all other judged
    tokens; `largest other`: the largest of those. `heads`: the share of heads in which a sink has
    at least `threshold` (Gu et al.'s sink rate), averaged over sinks. The example: scores of the
    judged tokens, (L, judged), and an `attention_map`.
    """
    W, L, _, T = scores.shape
    judged = n_judged(T, model.config.sliding_window)
    table = LayerMeans(L, ("first", "later", "others", "largest other", "heads"))
    for w in range(W):
        # the first token has a column of its own, whether it is a sink or not
        later = marks[w].clone()  # (T)
        later[0] = False
        others = ~marks[w, :judged]  # (judged)
        others[0] = False
        for layer in range(L):
            # over heads: the scores; over sinks: the share of heads
            score = scores[w, layer].mean(0)  # (T)
            score_of_others = score[:judged][others]  # (n)
            is_sink_of_head = scores[w, layer][:, marks[w]] >= threshold  # (H, sinks)
            table.add(layer, {
                "first": score[0].item(),
                "later": mean_of(score[later]),
                "others": mean_of(score_of_others),
                "largest other": score_of_others.max().item() if score_of_others.numel() else None,
                "heads": mean_of(is_sink_of_head),
            })
    example = {
        "scores": scores[0, :, :, :judged].mean(1),  # (L, judged)
        "marks": marks[0],  # (T)
        "map": attention_map(model, windows[0], shown),  # (size, size)
        "layer": shown_layer(model, shown),
    }
    return table.rows(), example


@torch.no_grad()
def attention_map(model, window, shown=None, size=128):
    """The shown layer's attention, averaged over heads, as (size, size) cells.

    A cell holds the largest of its keys' means over its queries. A sink is a line one token wide,
    and so it stays visible where the map is drawn small.
    """
    T = len(window)
    size = min(size, T)
    at = walk(model, window)[shown_layer(model, shown)]
    cell_of = torch.arange(T, device=window.device) * size // T  # (T): the cell of each token

    # 1. means over the queries of each cell
    means = torch.zeros(size, T, device=window.device)  # (size, T)
    for tile, A in attention_tiles(at.q, at.k, window=model.config.sliding_window):
        means[:, :A.shape[-1]].index_add_(0, cell_of[tile], A[0].mean(0))
    means /= cell_of.bincount()[:, None]

    # 2. the largest over the keys of each cell
    columns = [means[:, cell_of == cell].amax(1) for cell in range(size)]
    return torch.stack(columns, dim=1)  # (size, size)


# The outlier's way through the layers: KVSink Section 3.1, Figure 4

PLACES = ("d_in", "d_out", "mid", "out")


@torch.no_grad()
def four_places(model, window):
    """What the four places of Section 3.1 hold: [{place: (T, M or D)}], by layer.

    d_in: the input of the down-projection (Eq. 7); d_out: its output (Eq. 8); mid: the residual H'
    after attention (Eq. 2); out: the residual H after the block (Eq. 1).
    """
    blocks = model.model["layers"]
    norm_layers = [block.post_attention_layernorm for block in blocks]
    down_projections = [block.mlp.down_proj for block in blocks]
    with recorded_calls(norm_layers) as norm_calls, recorded_calls(down_projections) as down_calls:
        activations = walk(model, window)
    places = []
    for (mid, _), (d_in, d_out), at in zip(norm_calls, down_calls, activations):
        places.append({"d_in": d_in[0], "d_out": d_out[0], "mid": mid[0], "out": at.hidden})
    return places


@torch.no_grad()
def outliers(model, windows, marks, progress=iter):
    """KVSink Figure 4: the largest magnitude in each of the four places, and how it comes and goes.

    A place's name: at the sinks; with `others`: at all other tokens. `ratio`: the largest |H| at
    the sinks over the median |H|. `channel`: that of the outlier, where H is largest in most blocks
    but the last. In that channel, means over the sinks: `d_out c`, what the down-projection adds,
    and `out c`, what H holds after it, both with their signs; `size c`, |H|, and `ratio c`, that
    over the median |H|. `channels`: all outlier channels, the largest first: those where |H| at the
    sinks, its mean over the blocks but the last, is at least OUTLIER of that in the largest
    channel, and twice the mean at other tokens or more; the paper's Table 3 lists two to four
    channels. The example: the means of H at the sinks in these channels, {channel: [of each
    layer]}.
    """
    L = model.config.num_hidden_layers
    others = [f"{place} others" for place in PLACES]
    table = LayerMeans(L, (*PLACES, *others, "ratio", "d_out c", "out c", "size c", "ratio c"))
    largest_channels = []  # of each window, and each block but the last
    sizes = torch.zeros(2, model.config.hidden_size)  # of |H|: sums at sinks, and at other tokens
    signed = torch.zeros(L, model.config.hidden_size)  # of H at sinks
    n_tokens = torch.zeros(2)  # sinks, and other tokens
    at_sinks = []  # of each window with sinks, and each layer: (layer, d_out, H, median |H|)
    for window, sinks in zip(progress(windows), marks):
        for layer, places in enumerate(four_places(model, window)):
            # the largest magnitude in each place, at the sinks and at all other tokens
            for place, x in places.items():
                size = x.abs()  # (T, M or D)
                table.add(layer, {f"{place} others": size[~sinks].max().item()})
                if sinks.any():
                    table.add(layer, {place: size[sinks].max().item()})
            # the channel where H is largest; the last block does not vote
            size = places["out"].abs()  # (T, D)
            if layer < max(1, L - 1):
                largest_channels.append(size.argmax().item() % size.shape[1])
            # by channel, at sinks and at other tokens
            out = places["out"].float().cpu()  # (T, D)
            is_sink = sinks.cpu()
            signed[layer] += out[is_sink].sum(0)
            if layer < max(1, L - 1):
                sizes += torch.stack([out[is_sink].abs().sum(0), out[~is_sink].abs().sum(0)])
                n_tokens += torch.stack([is_sink.sum(), (~is_sink).sum()])
            # the outlier over the median, and what the channel needs, which is known later
            if sinks.any():
                median = size.float().median().item()
                table.add(layer, {"ratio": size[sinks].max().item() / median})
                d_out, out = places["d_out"][sinks].float(), places["out"][sinks].float()
                at_sinks.append((layer, d_out, out, median))  # d_out, out (sinks, D)

    # the channel is the one with most votes
    channel = int(torch.tensor(largest_channels).mode().values)
    for layer, d_out, out, median in at_sinks:
        size = out[:, channel].abs().mean().item()
        table.add(layer, {
            "d_out c": d_out.mean(0)[channel].item(),
            "out c": out.mean(0)[channel].item(),
            "size c": size,
            "ratio c": size / median,
        })
    channels = outlier_channels(*(sizes / n_tokens.clamp(min=1)[:, None]))
    rows = [{**row, "channel": channel, "channels": channels} for row in table.rows()]
    n_sinks = max(1, int(marks.sum()))
    return rows, {c: (signed[:, c] / n_sinks).tolist() for c in channels}


def outlier_channels(at_sinks, at_others):
    """The channels with outliers, the largest first. at_sinks, at_others (D): the mean |H| there."""
    is_outlier = (at_sinks >= OUTLIER * at_sinks.max()) & (at_sinks >= 2 * at_others)  # (D)
    order = at_sinks.argsort(descending=True)  # (D)
    return [c for c in order.tolist() if is_outlier[c]]


# Small queries, keys and values: "QKV suppression" of KVSink Section 3.2, Figures 2 and 5

@torch.no_grad()
def norms(model, windows, marks, progress=iter, shown=None):
    """KVSink Figures 2 and 5: norms of queries, keys and values.

    `q`, `k`, `v`: the median over heads and all other tokens; `q sinks` and so on: the mean at the
    sinks over that median. The example: norms of the shown layer, averaged over heads, (T) each.
    """
    L = model.config.num_hidden_layers
    table = LayerMeans(L, ("q", "q sinks", "k", "k sinks", "v", "v sinks"))
    shown = shown_layer(model, shown)
    example = {"marks": marks[0], "layer": shown}
    for w, (window, sinks) in enumerate(zip(progress(windows), marks)):
        for layer, at in enumerate(walk(model, window)):
            for kind, x in (("q", at.q), ("k", at.k), ("v", at.v)):
                # the median over all other tokens, and the sinks as a multiple of it
                norm = x[0].float().norm(dim=-1)  # (H or Hkv, T)
                median = norm[:, ~sinks].median().item()
                table.add(layer, {kind: median})
                if sinks.any():
                    table.add(layer, {f"{kind} sinks": norm[:, sinks].mean().item() / median})
                if w == 0 and layer == shown:
                    example[kind] = norm.mean(0)  # (T)
    return table.rows(), example


# Queries point at the sinks' keys: KVSink Section 3.2, Figure 5a

@torch.no_grad()
def cosines(model, windows, marks, progress=iter, bins=100, shown=None):
    """KVSink Figure 5a: the cosine of a query with the keys that it sees, both after RoPE.

    The queries of sinks do not count. Means over the keys of all `sinks`, of the `first` sink of
    the text, of the sinks after it (`later`), and of all `others`. `largest`: how often the key
    with the largest cosine is a sink's. The example: how many cosines of the shown layer, of all
    windows, lie in each of the bins from -1 to 1; (3, bins): first, later, others.
    """
    L, sliding = model.config.num_hidden_layers, model.config.sliding_window
    table = LayerMeans(L, ("sinks", "first", "later", "others", "largest"))
    counts = torch.zeros(3, bins)  # (3, bins)
    shown = shown_layer(model, shown)
    for window, sinks in zip(progress(windows), marks):
        # 1 at the first sink, 2 at the second, ...; 0 at all other tokens
        number = sinks.cumsum(0).where(sinks, 0)  # (T)
        for layer, at in enumerate(walk(model, window)):
            # of first, later, others: the sum of the cosines, and their number
            totals = torch.zeros(3, 2, dtype=torch.double)
            largest_is_sink = []
            for tile, cosine in cosine_tiles(at.q, at.k, sliding):  # (1, H, tile, seen)
                # leave out the queries of sinks
                cosine = cosine[0][:, ~sinks[tile]]  # (H, queries, seen)
                # sum up by the kind of key
                seen = number[:cosine.shape[-1]]  # (seen)
                for i, keys in enumerate((seen == 1, seen > 1, seen == 0)):
                    values = cosine[..., keys]  # (H, queries, n)
                    values = values[values.isfinite()]  # (pairs): what a query does not see is -inf
                    totals[i, 0] += values.sum(dtype=torch.double).item()
                    totals[i, 1] += values.numel()
                    if layer == shown:
                        counts[i] += values.histc(bins, -1, 1).cpu()
                # is the key with the largest cosine a sink's?
                largest_is_sink.append(seen[cosine.argmax(-1)].flatten() > 0)  # (H * queries)
            first, later, others = totals
            table.add(layer, {
                "sinks": ratio_of(first + later),
                "first": ratio_of(first),
                "later": ratio_of(later),
                "others": ratio_of(others),
                "largest": mean_of(torch.cat(largest_is_sink)),
            })
    return table.rows(), {"counts": counts, "layer": shown}


def cosine_tiles(q, k, sliding):
    """As `score_tiles`, which divides by sqrt(d), with cosines in the place of scores."""
    q = F.normalize(q.float(), dim=-1) * q.shape[-1] ** 0.5  # (1, H, T, d)
    k = F.normalize(k.float(), dim=-1)  # (1, Hkv, T, d)
    return score_tiles(q, k, sliding)


def ratio_of(total):
    """total (2): a sum and how many numbers it is of -> their mean, or None."""
    return (total[0] / total[1]).item() if total[1] else None


# The attention bias: KVSink Eq. 9, Figure 6

def split_output(q, k, v, sinks, sliding=None):
    """Eq. 9: the attention output as the sinks' part and all other tokens' part.

    q (1, H, T, d), k and v (1, Hkv, T, d), q and k rotated; sinks (T), True at them. Returns the
    two parts, (H, T, d) both, and the attention to the sinks, (H, T).
    """
    heads_per_kv = q.shape[1] // v.shape[1]
    v = v[0].float().repeat_interleave(heads_per_kv, dim=0)  # (H, T, d)
    bias = torch.zeros_like(v)  # (H, T, d)
    others = torch.zeros_like(v)  # (H, T, d)
    attention = torch.zeros(v.shape[:2], device=v.device)  # (H, T)
    for tile, A in attention_tiles(q, k, window=sliding):
        A = A[0]  # (H, tile, seen)
        seen = A.shape[-1]
        # b_t = sum_{i in S} p_i^t v_i, and the sum over all other tokens
        to_sinks = A[..., sinks[:seen]]  # (H, tile, sinks seen)
        bias[:, tile] = to_sinks @ v[:, :seen][:, sinks[:seen]]
        others[:, tile] = A @ v[:, :seen] - bias[:, tile]
        attention[:, tile] = to_sinks.sum(-1)
    return bias, others, attention


def unit(x):
    """x (..., d) over its norm, however small that is; 0 stays 0."""
    return F.normalize(x.double(), dim=-1, eps=1e-30)


def consistency(x, group=None):
    """The mean cosine of all pairs of each head's T vectors: x (H, T, d) -> (H).

    NaN where there is no pair. Vectors that are 0 are left out. group (T), numbers from 0 on: only
    pairs within a group count. The sum of cosines over all pairs, each vector with itself included,
    is |sum of the unit vectors|^2.
    """
    if group is None:
        group = torch.zeros(x.shape[1], dtype=torch.long, device=x.device)  # (T)
    x = unit(x)  # (H, T, d)
    in_group = F.one_hot(group).double()  # (T, groups)
    n = (x != 0).any(-1).double() @ in_group  # (H, groups): vectors that are not 0
    sums = in_group.T @ x  # (H, groups, d)
    cosines = (sums.square().sum(-1) - n).sum(-1)  # (H): without each vector's with itself
    pairs = (n * (n - 1)).sum(-1)  # (H): each counted twice, as in the sum of cosines
    return cosines.where(pairs > 0, float("nan")) / pairs


@torch.no_grad()
def biases(model, windows, marks, progress=iter, shown=None):
    """KVSink Figure 6: the sinks' part of the attention output, b_t = sum_{i in S} p_i^t v_i.

    Is it a bias, nearly the same for all tokens t? Windows without a sink do not count.

    `attention`: sum_{i in S} p_i^t, of tokens t that are no sinks; `size`: the mean |b_t| of these
    over the mean |output|; `consistency`: the mean cosine of b_t and b_t' over all pairs of tokens,
    averaged over heads; `lowest`: of the head where it is lowest; `within`: over pairs that see the
    same sinks; `rest`: of the other tokens' part of the output. With a single sink every b_t is a
    multiple of one v, and consistent. The example: the bias of one head of the shown layer, and
    the consistency by layer and head of the bias and of the other part, (2, L, H).
    """
    L, sliding = model.config.num_hidden_layers, model.config.sliding_window
    table = LayerMeans(L, ("attention", "size", "consistency", "lowest", "within", "rest"))
    shown = shown_layer(model, shown)
    example = {"layer": shown}
    for window, sinks in zip(progress(windows), marks):
        if not sinks.any():
            continue
        n_sinks_seen = sinks.long().cumsum(0)  # (T)
        by_head = []  # of each layer (2, H)
        for layer, at in enumerate(walk(model, window)):
            # Eq. 9, and the sizes of the bias and of the output, at tokens that are no sinks
            bias, others, attention = split_output(at.q, at.k, at.v, sinks, sliding)
            output = bias + others  # (H, T, d)
            size_of_bias = bias[:, ~sinks].norm(dim=-1)  # (H, n)
            size_of_output = output[:, ~sinks].norm(dim=-1)  # (H, n)
            # does it point the same way for all tokens?
            consistency_of_bias = consistency(bias)  # (H)
            consistency_of_others = consistency(others)  # (H)
            table.add(layer, {
                "attention": finite_or_none(attention[:, ~sinks].mean()),
                "size": finite_or_none(size_of_bias.mean() / size_of_output.mean()),
                "consistency": finite_or_none(consistency_of_bias.mean()),
                "lowest": finite_or_none(consistency_of_bias.min()),
                "within": finite_or_none(consistency(bias, n_sinks_seen).mean()),
                "rest": finite_or_none(consistency_of_others.mean()),
            })
            by_head.append(torch.stack([consistency_of_bias, consistency_of_others]))
            if layer == shown and "bias" not in example:
                head = int(attention.mean(1).argmax())  # the one that attends to the sinks most
                example.update(marks=sinks, head=head, bias=bias[head])  # (T, d)
        example.setdefault("heads", torch.stack(by_head, dim=1))  # (2, L, H)
    return table.rows(), example


# Sorted keys and their cliff: OTT

@torch.no_grad()
def sorted_keys(model, windows, marks, progress=iter, most=32, shown=None):
    """OTT's key magnitudes sum_c |K[i, c]|, after RoPE, in ascending order; and the cliff in them.

    The cliff is the largest ratio of two neighbours among the `most` smallest; 32 is the size of
    OTT's extra pool. `smallest`: the smallest magnitude over the median; `cliff`: that ratio;
    `below`: how many tokens are below the cliff; `sinks`: the share of these that are sinks.
    `stretched`: the share of all channel ranges, of groups of 128 tokens, that would be shorter
    without the sinks; `longer`: by what factor these are longer. No pool of sinks can mend more
    than these ranges. The example, of the shown layer: sorted magnitudes, sorted |K| in the
    channel where that is largest on average, both (Hkv, T), and which of them are the sinks'.
    """
    L, T = model.config.num_hidden_layers, windows.shape[1]
    table = LayerMeans(L, ("smallest", "cliff", "below", "sinks", "stretched", "longer"))
    shown = shown_layer(model, shown)
    example = {}
    for w, (window, sinks) in enumerate(zip(progress(windows), marks)):
        for layer, at in enumerate(walk(model, window)):
            # 1. magnitudes of the keys, the smallest first
            size = at.k[0].float().abs()  # (Hkv, T, d)
            magnitudes, order = size.sum(-1).sort(dim=-1)  # (Hkv, T) both
            # 2. the cliff: the largest step from one to the next
            ratios = magnitudes[:, 1:] / magnitudes[:, :-1]  # (Hkv, T - 1)
            cliff, last_below = ratios[:, :most].max(-1)  # (Hkv) both
            # 3. the tokens below it
            is_below = torch.arange(T, device=window.device) <= last_below[:, None]  # (Hkv, T)
            # 4. the ranges that the sinks stretch
            stretched, longer = stretched_ranges(at.k[0].float(), sinks)
            table.add(layer, {
                "stretched": stretched, "longer": longer,
                "smallest": mean_of(magnitudes[:, 0] / magnitudes.median(-1).values),
                "cliff": mean_of(cliff),
                "below": mean_of(last_below + 1),
                "sinks": mean_of(sinks[order][is_below]),
            })
            if w == 0 and layer == shown:
                example = {"total": magnitudes, "total sinks": sinks[order], "layer": shown}
                example.update(largest_channel(size, sinks))
    return table.rows(), example


def stretched_ranges(keys, sinks, group=128):
    """The share of channel ranges, each of a KV head's `group` tokens, that the sinks stretch, and
    the mean factor by which they do; None where they stretch none.

    keys (Hkv, T, d), sinks (T). A group of nothing but sinks has no range without them.
    """
    factors = []  # of each group with tokens that are no sinks: (Hkv, d)
    for rows, marks in zip(keys.split(group, dim=1), sinks.split(group)):
        others = rows[:, ~marks]  # (Hkv, n, d)
        if others.shape[1] > 1:
            whole = rows.amax(1) - rows.amin(1)  # (Hkv, d)
            without = others.amax(1) - others.amin(1)  # (Hkv, d)
            factors.append(whole / without)
    if not factors:
        return None, None
    factors = torch.stack(factors)  # (groups, Hkv, d)
    is_stretched = factors > 1
    return mean_of(is_stretched), mean_of(factors[is_stretched])


def largest_channel(size, sinks):
    """The channel where keys are largest on average, and its numbers sorted; for each KV head.

    size (Hkv, T, d): magnitudes of the keys; sinks (T).
    """
    T = size.shape[1]
    channel = size.mean(1).argmax(-1)  # (Hkv)
    numbers = size.gather(2, channel[:, None, None].expand(-1, T, 1))[..., 0]  # (Hkv, T)
    numbers, order = numbers.sort(dim=-1)  # (Hkv, T) both
    return {"number": channel, "channel": numbers, "channel sinks": sinks[order]}


# All of it in one table, for a model that is being trained

@torch.no_grad()
def sink_report(model, windows, marks):
    """The marked tokens in one row for each layer: {"channel": the outlier's, "layers": [row]}.

    `first`, `later`: the sink score, averaged over heads, of marked tokens at position 0 and after
    it; `outlier`: |H| of the outlier's channel, and `ratio`, that over the median |H|; `q`, `k`,
    `v`: the mean norm over the median norm of all other tokens. marks (W, T): not necessarily
    sinks; at least one in each window.
    """
    scores, _ = find_sinks(model, windows)  # (W, L, H, T)
    scores = scores.mean(2).transpose(1, 2)  # (W, T, L)
    first = scores[:, 0][marks[:, 0]]  # (n, L)
    later = scores[:, 1:][marks[:, 1:]]  # (n, L)
    outlier_rows, _ = outliers(model, windows, marks)
    norm_rows, _ = norms(model, windows, marks)
    layers = []
    for layer, (outlier, norm) in enumerate(zip(outlier_rows, norm_rows)):
        layers.append({
            "first": mean_of(first[:, layer]),
            "later": mean_of(later[:, layer]),
            "outlier": outlier["size c"],
            "ratio": outlier["ratio c"],
            "q": norm["q sinks"],
            "k": norm["k sinks"],
            "v": norm["v sinks"],
        })
    return {"channel": outlier_rows[0]["channel"], "layers": layers}
