"""What quantization makes of attention sinks, and sinks of it: Table 1 and Figure 7 of KVSink (Su and Yuan, 2025);
IntactKV's prefixes of every length (its Figure 2); and AnTKV's scores beside the damage that they stand for (its
Appendix D).

Each function takes what those of `phenomena.py` take, and returns what they return.
"""
import torch

from tinykv import UserError, anchors
from tinykv.intact import errors_by_length
from tinykv.methods.antkv import AnTKV
from tinykv.phenomena import mean, mean_of, rows_of, split_output, unit, walk
from tinykv.schemes import UNIFORM, codec
from tinykv.sinks import Probe

BITS = (4, 3, 2)  # of Table 1
WIDTHS = (2, 3, 4, 5, 6, 7, 8)  # of Figure 7


# What sinks do to quantization: Table 1

@torch.no_grad()
def ranges(model, windows, marks, progress=iter):
    """Per layer {"k", "k_pre", "v"}: the smallest and the largest value of each channel over the windows, of all tokens
    and of all but the sinks: (2, 2, Hkv, d), all tokens first."""
    found = [{} for _ in range(model.config.num_hidden_layers)]
    for window, sink in zip(progress(windows), marks):
        for layer, at in enumerate(walk(model, window)):
            for kind in ("k", "k_pre", "v"):
                x = getattr(at, kind)[0].float()  # (Hkv, T, d)
                lo = torch.stack([x.amin(1), x[:, ~sink].amin(1)])  # (2, Hkv, d)
                hi = torch.stack([x.amax(1), x[:, ~sink].amax(1)])  # (2, Hkv, d)
                if kind in found[layer]:
                    lo = torch.minimum(lo, found[layer][kind][:, 0])
                    hi = torch.maximum(hi, found[layer][kind][:, 1])
                found[layer][kind] = torch.stack([lo, hi], 1)
    return found


TABLE_1 = (("token-dynamic", "k"), ("token-dynamic", "v"), ("channel-dynamic", "k"),
           ("token-static", "k"), ("token-static", "v"), ("channel-static", "k"))


def static_codec(bits, width, axis, group, formula, limits):
    """A codec with the grid of the given limits, (2, Hkv, d)."""
    made = codec(bits, width, axis, group, formula, True)
    made.fix(*limits)
    return made


def squared_errors(x, codec, chosen):
    """Sum of the squared errors at the chosen tokens (T) of x (1, Hkv, T, d), and how many numbers those are: (2)."""
    error = (codec.decode(codec.encode(x)) - x.float())[:, :, chosen].double()  # (1, Hkv, n, d)
    return torch.tensor([error.square().sum().item(), error.numel()], dtype=torch.double)


@torch.no_grad()
def errors(model, windows, marks, calibration, calibration_marks, group=16, formula="offset", progress=iter):
    """Table 1: mean squared error of the coded numbers, all layers together, with and without sinks.

    Dynamic grids: `with`, of the groups that hold a sink; `without`, of the other groups; `change`, from without to
    with. Static grids, whose ranges are those of the calibration windows: `overall`, sinks in ranges and codes;
    `without`, sinks in neither; `change`, from overall to without. Keys are coded where the scheme does it in
    `schemes.py`, before RoPE or after. The figure needs nothing else.
    """
    limits = ranges(model, calibration, calibration_marks, progress)
    width = model.config.head_dim
    sums = {}  # (scheme, kind, bits, column): (2), squared errors and numbers
    for window, sink in zip(progress(windows), marks):
        block = torch.arange(len(window), device=sink.device) // group  # (T): the group of tokens that each is in
        touched = torch.isin(block, block[sink])  # (T): shares a group of tokens with a sink
        for layer, at in enumerate(walk(model, window)):
            for scheme, kind in TABLE_1:
                k_axis, v_axis, static, rope = UNIFORM[scheme]
                axis = k_axis if kind == "k" else v_axis
                place = "k_pre" if kind == "k" and rope == "pre" else kind
                hit = sink if axis == "token" else touched  # (T)
                for bits in BITS:
                    if static:
                        all_in, sinks_out = (static_codec(bits, width, axis, group, formula, x)
                                             for x in limits[layer][place])
                        parts = {"overall": (all_in, sink | ~sink), "without": (sinks_out, ~sink)}
                    else:
                        made = codec(bits, width, axis, group, formula, False)
                        parts = {"overall": (made, sink | ~sink), "without": (made, ~hit), "with": (made, hit)}
                    for column, (made, chosen) in parts.items():
                        key = scheme, kind, bits, column
                        sums[key] = sums.get(key, 0) + squared_errors(getattr(at, place), made, chosen)
    rows = []
    for scheme, kind in TABLE_1:
        for bits in BITS:
            row = {"scheme": scheme, "of": kind.upper(), "bits": bits}
            for column in ("overall", "without", "with"):
                total, n = sums.get((scheme, kind, bits, column), torch.zeros(2)).tolist()
                row[column] = total / n if n and (column == "overall" or marks.any()) else None
            before, after = ("overall", "without") if "static" in scheme else ("without", "with")
            row["change"] = row[after] / row[before] - 1 if row[after] is not None and row[before] else None
            rows.append(row)
    return rows, None


# What quantization does to sinks: Figure 7

@torch.no_grad()
def widths(model, windows, marks, calibration, calibration_marks, group=16, formula="offset", progress=iter):
    """Figure 7: keys and values coded per token with static grids, and what that does to a layer's attention to sinks
    and to its bias of Eq. 9; the queries are exact. Means over layers, heads and tokens that are no sinks.

    `attention`: sum_{i in S} p_i^t; `off`: mean |change| of it; `bias off`: mean |change of b_t| over the mean |b_t|;
    `cosine`: of b_t before and after. `kept`: False, every token is coded, and the ranges are of all; True, the sinks
    are exact and out of the ranges. The row of 16 bits is what is exact. The example: `attention` by width and layer.
    """
    L, width, sliding = model.config.num_hidden_layers, model.config.head_dim, model.config.sliding_window
    limits = ranges(model, calibration, calibration_marks, progress)
    cases = [(bits, kept) for kept in (False, True) for bits in WIDTHS]
    names = ("attention", "off", "bias off", "cosine")
    found = {case: {name: [[None] * L for _ in windows] for name in names} for case in [(16, False), *cases]}
    for w, window in enumerate(progress(windows)):
        if not marks[w].any():
            continue
        for layer, at in enumerate(walk(model, window)):
            bias, _, mass = (x[:, ~marks[w]] for x in split_output(at.q, at.k, at.v, marks[w], sliding))
            seen = mass > 0  # (H, n): the queries that see a sink
            found[16, False]["attention"][w][layer] = mean_of(mass[seen])
            for bits, kept in cases:
                coded = []
                for kind in "kv":
                    x = getattr(at, kind)  # (1, Hkv, T, d)
                    made = static_codec(bits, width, "token", group, formula, limits[layer][kind][int(kept)])
                    rows = made.decode(made.encode(x))  # (1, Hkv, T, d)
                    coded.append(torch.where(marks[w][:, None], x.float(), rows) if kept else rows)
                now, _, weight = (x[:, ~marks[w]] for x in split_output(at.q, *coded, marks[w], sliding))
                numbers = (weight[seen].mean(), (weight - mass)[seen].abs().mean(),
                           (now - bias)[seen].norm(dim=-1).mean() / bias[seen].norm(dim=-1).mean(),
                           (unit(now[seen]) * unit(bias[seen])).sum(-1).mean())
                for name, x in zip(names, numbers):
                    found[bits, kept][name][w][layer] = x.item() if x.isfinite() else None
    rows, example = [], {}
    for (bits, kept), of in found.items():
        layers = rows_of(of, L)
        rows.append({"bits": bits, "kept": kept, **{name: mean([row[name] for row in layers]) for name in names}})
        example[bits, kept] = [row["attention"] for row in layers]
    return rows, example


# What a prefix in full precision leaves of quantized weights' error: Figure 2 of IntactKV

MOST = 3  # sinks that are looked at


@torch.no_grad()
def prefixes(full, coded, windows, marks, points=32, progress=iter):
    """Figure 2: what is left of the error if the first n tokens' keys and values are exact; see `errors_by_length`.

    Rows: for n = 0, and for n just short of, and just past, each of the first sinks that all windows have; errors of
    the tokens behind the last of these. The figure has `points` lengths more, of the first window.
    """
    at = [mark.nonzero()[:, 0].tolist() for mark in marks]  # per window: where sinks are
    most = min(MOST, *(len(sinks) for sinks in at))
    events = [("nothing", lambda sinks: 0)]
    for i in range(most):
        events += [(f"up to sink {i + 1}", lambda sinks, i=i: sinks[i]),
                   (f"sink {i + 1} too", lambda sinks, i=i: sinks[i] + 1)]
    found, example = [], None
    for window, sinks in zip(progress(windows), at):
        lengths = [length(sinks) for _, length in events]
        more = [] if example else [round(max(lengths) * i / points) for i in range(points)]
        rows = errors_by_length(full, coded, window, sorted({*lengths, *more}), behind=max(lengths))
        by_length = {row["n"]: row for row in rows}
        found.append([by_length[n] for n in lengths])
        example = example or {"rows": list(by_length.values()), "sinks": sinks[:most]}
    return [{"kept": words, **{name: mean([rows[i][name] for rows in found]) for name in found[0][0]}}
            for i, (words, _) in enumerate(events) if i == 0 or found[0][i]["n"] > 0], example


# How well AnTKV's scores rank the tokens: its Appendix D

def ranks(x):
    """x (..., n) -> the rank of each number, (..., n)."""
    return x.argsort(-1).argsort(-1).float()


def rank_correlation(a, b):
    """Spearman's, over the last dimension."""
    a, b = (ranks(x) - (x.shape[-1] - 1) / 2 for x in (a, b))
    return (a * b).sum(-1) / (a.pow(2).sum(-1) * b.pow(2).sum(-1)).sqrt()


@torch.no_grad()
def anchor_damage(model, window, method):
    """Of one window (T): scores and damage of every token, per layer and KV head.

    Returns {"k": {...}, "v": {...}} of tensors (L, Hkv, T): `damage`, the L1 change of the attention output if the
    token alone is read as its code; `score`, its AnS; `bound` (of keys only), the full factor of Theorem 1; `error`,
    |d|_1 of its row.
    """
    probe = Probe(model)
    model.hidden(window[None], probe)
    positions = torch.arange(len(window), device=window.device)
    found = {kind: {"damage": [], "score": [], "error": [], **({"bound": []} if kind == "k" else {})} for kind in "kv"}
    for layer, (q, k, v) in enumerate(zip(probe.q, probe.k, probe.v)):
        coded = [method.decode(layer, kind, method.encode(layer, kind, x, None)) for kind, x in (("k", k), ("v", v))]
        q, k, coded_k = (model.rope.rotate(x, positions) for x in (q, k, coded[0].to(k.dtype)))  # (1, H or Hkv, T, d)
        damage = anchors.damage(q, k, v, coded_k, coded[1])
        score = anchors.anchor_scores(q, k)
        errors = (coded_k - k).abs().sum(-1), (coded[1] - v).abs().sum(-1)  # (1, Hkv, T) both
        found["k"]["bound"].append(anchors.theorem_1(q, k, v)[0])
        for i, kind in enumerate("kv"):
            for name, x in (("damage", damage[i]), ("score", score[i]), ("error", errors[i])):
                found[kind][name].append(x[0].float())
    return {kind: {name: torch.stack(rows) for name, rows in of.items()} for kind, of in found.items()}


def anchor_method(config, context, vq):
    """The method whose scores are looked at. UserError if that cannot be done."""
    sliding = config.sliding_window
    if sliding is not None and sliding < context:
        raise UserError(f"anchors: the damage of a token is measured where a query sees all tokens before it, and in "
                        f"this model it sees {sliding}; give a --context of at most that")
    return AnTKV(config, vq)


def report_anchors(model, windows, calibration, vq, progress=iter):
    """The table, as rows of numbers, and what the figure needs: a window's damage and scores."""
    method = anchor_method(model.config, windows.shape[1], vq)
    method.calibrate(model, calibration, progress)
    tables = [anchor_damage(model, window, method) for window in progress(windows)]
    rows = []
    for kind in "kv":
        for name in ("score", "bound", "score x error", "bound x error"):
            if kind == "v" and name.startswith("bound"):
                continue
            values, shares = [], []
            for table in tables:
                of = table[kind]
                x = of[name.split()[0]] * (of["error"] if "error" in name else 1)  # (L, Hkv, T)
                values.append(rank_correlation(x, of["damage"]).mean(1))  # (L)
                top = x.topk(max(1, x.shape[-1] // 100), -1).indices  # (L, Hkv, 1%)
                shares.append((of["damage"].gather(-1, top).sum(-1) / of["damage"].sum(-1)).mean(1))  # (L)
            rows.append({"of": kind.upper(), "ranked by": name,
                         "rank correlation": torch.stack(values).mean(0).tolist(),
                         "damage in the top 1%": torch.stack(shares).mean(0).tolist()})
    return rows, tables[0]
