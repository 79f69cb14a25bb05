"""How attention sinks and quantization error affect each other.

Table 1 and Figure 7 of KVSink (Su and Yuan, 2025). Functions take what those of `sinks.py` take,
and calibration windows with the marks of their sinks. They return what those of `sinks.py` return.
"""
import torch

from tinykv.analysis.sinks import split_output, unit
from tinykv.analysis.walk import LayerMeans, finite_or_none, mean, mean_of, walk
from tinykv.codecs import SCHEMES, make_codecs

TABLE_1 = (
    ("token-dynamic", "k"), ("token-dynamic", "v"), ("channel-dynamic", "k"),
    ("token-static", "k"), ("token-static", "v"), ("channel-static", "k"),
)
BITS = (4, 3, 2)  # of Table 1
WIDTHS = (2, 3, 4, 5, 6, 7, 8)  # of Figure 7, in bits


def is_static(scheme):
    return scheme.endswith("static")


def stored_keys(at, scheme):
    """The keys where the scheme quantizes them, before RoPE or after: (1, Hkv, T, d)."""
    _, rope = SCHEMES[scheme]
    return at.k_pre if rope == "pre" else at.k


def quantize_dequantize(codec, x):
    """x (1, Hkv, T, d) as it is read back from its codes."""
    codes = codec.encode(x)
    return codec.decode(codes)  # (1, Hkv, T, d)


@torch.no_grad()
def calibrate_static(model, codecs, windows, marks, progress=iter):
    """Set the ranges of static codecs. codecs {(scheme, bits, kept): [Pair of each layer]}.

    kept: True leaves the sinks out of the ranges, as they are for a method that keeps them.
    windows, marks (W, T).
    """
    for window, sinks in zip(progress(windows), marks):
        is_kept = sinks.expand(model.config.num_key_value_heads, -1)  # (Hkv, T)
        for layer, at in enumerate(walk(model, window)):
            for (scheme, _, kept), pairs in codecs.items():
                pair, ignored = pairs[layer], is_kept if kept else None
                pair.k.collect(0, stored_keys(at, scheme)[0], ignored, None)
                pair.v.collect(0, at.v[0], ignored, None)
    for pairs in codecs.values():
        for pair in pairs:
            pair.k.fit(0)
            pair.v.fit(0)


# What sinks do to quantization: Table 1

@torch.no_grad()
def errors(model, windows, marks, calibration, calibration_marks,
           group=16, formula="offset", progress=iter):
    """KVSink Table 1: mean squared errors of quantized keys and values, of all layers together.

    Dynamic grids: `overall`; `with`, in groups that hold a sink; `without`, in all other groups;
    `change`, from without to with. Static grids, with ranges from the calibration windows:
    `overall`, sinks count in the ranges and in the error; `without`, they count in neither;
    `change`, from overall to without. The figure needs nothing else.
    """
    # 1. codecs by (scheme, bits, sinks kept)
    static, dynamic = {}, {}
    for scheme, _ in TABLE_1:
        for bits in BITS:
            settings = {"k_bits": bits, "v_bits": bits, "group_size": group, "formula": formula}
            if is_static(scheme):
                static[scheme, bits, False] = make_codecs(model.config, scheme, **settings)
                static[scheme, bits, True] = make_codecs(model.config, scheme, **settings)
            else:
                dynamic[scheme, bits, False] = make_codecs(model.config, scheme, **settings)
    calibrate_static(model, static, calibration, calibration_marks, progress)
    codecs = {**static, **dynamic}

    # 2. squared errors by (scheme, "k" or "v", bits, column): their sum, and of how many numbers
    totals = {}
    for window, sinks in zip(progress(windows), marks):
        all_tokens = torch.ones_like(sinks)  # (T)
        in_group_with_sink = shares_token_group(sinks, group)  # (T)
        for layer, at in enumerate(walk(model, window)):
            for scheme, kind in TABLE_1:
                x = stored_keys(at, scheme) if kind == "k" else at.v  # (1, Hkv, T, d)
                # {column: (sinks kept, which tokens count)}
                columns = {"overall": (False, all_tokens)}
                if is_static(scheme):
                    columns["without"] = True, ~sinks
                elif scheme == "channel-dynamic":
                    columns["without"] = False, ~in_group_with_sink
                    columns["with"] = False, in_group_with_sink
                else:  # groups of one token each
                    columns["without"] = False, ~sinks
                    columns["with"] = False, sinks
                for bits in BITS:
                    for column, (kept, tokens) in columns.items():
                        codec = getattr(codecs[scheme, bits, kept][layer], kind)
                        key = scheme, kind, bits, column
                        totals[key] = totals.get(key, 0) + squared_error(codec, x, tokens)  # (2)

    # 3. the table
    rows = []
    for scheme, kind in TABLE_1:
        for bits in BITS:
            row = {"scheme": scheme, "of": kind.upper(), "bits": bits}
            for column in ("overall", "without", "with"):
                row[column] = None
                total, n = totals.get((scheme, kind, bits, column), torch.zeros(2)).tolist()
                if n and (column == "overall" or marks.any()):
                    row[column] = total / n
            before, after = ("overall", "without") if is_static(scheme) else ("without", "with")
            row["change"] = None
            if row[after] is not None and row[before]:
                row["change"] = row[after] / row[before] - 1
            rows.append(row)
    return rows, None


def shares_token_group(sinks, group):
    """sinks (T) -> (T): True where one of the `group` tokens of a token's group is a sink."""
    group_of = torch.arange(len(sinks), device=sinks.device) // group  # (T)
    return torch.isin(group_of, group_of[sinks])


def squared_error(codec, x, tokens):
    """The squared errors of some tokens: (2), their sum and how many numbers it is of.

    x (1, Hkv, T, d), tokens (T) bool.
    """
    error = quantize_dequantize(codec, x) - x.float()  # (1, Hkv, T, d)
    error = error[:, :, tokens].double()  # (1, Hkv, n, d)
    return torch.tensor([error.square().sum().item(), error.numel()], dtype=torch.double)


# What quantization does to sinks: Figure 7

@torch.no_grad()
def widths(model, windows, marks, calibration, calibration_marks,
           group=16, formula="offset", progress=iter):
    """KVSink Figure 7: what 2 to 8 bits do to the attention to sinks, and to the bias b_t of Eq. 9.

    Keys and values of a layer are quantized per token with static grids; queries are exact. Numbers
    are means over layers, heads and tokens that are no sinks.

    `attention`: sum_{i in S} p_i^t; `off`: its mean |change|; `bias off`: the mean |change of b_t|
    over the mean |b_t|; `cosine`: of b_t before and after. `kept`: with False every token is
    quantized, and counts in the ranges; with True neither holds for the sinks. The row of 16 bits
    is what is exact. The example: {(bits, kept): attention by layer}.
    """
    L, sliding = model.config.num_hidden_layers, model.config.sliding_window

    # 1. codecs of each width, calibrated with the sinks and without
    codecs = {}
    for kept in (False, True):
        for bits in WIDTHS:
            codecs["token-static", bits, kept] = make_codecs(
                model.config, "token-static", bits, bits, group_size=group, formula=formula)
    calibrate_static(model, codecs, calibration, calibration_marks, progress)

    # 2. attention to sinks and bias, exact and from quantized keys and values
    names = ("attention", "off", "bias off", "cosine")
    tables = {(16, False): LayerMeans(L, names)}
    for _, bits, kept in codecs:
        tables[bits, kept] = LayerMeans(L, names)
    for window, sinks in zip(progress(windows), marks):
        if not sinks.any():
            continue
        for layer, at in enumerate(walk(model, window)):
            # exact, for the queries that see a sink
            bias, _, attention = split_output(at.q, at.k, at.v, sinks, sliding)  # (H, T, d), (H, T)
            sees_sink = (attention > 0) & ~sinks  # (H, T)
            bias = bias[sees_sink]  # (n, d)
            attention = attention[sees_sink]  # (n)
            tables[16, False].add(layer, {"attention": mean_of(attention)})
            for (_, bits, kept), pairs in codecs.items():
                # quantize all keys and values, or all but the sinks'
                k = quantize_dequantize(pairs[layer].k, at.k)  # (1, Hkv, T, d)
                v = quantize_dequantize(pairs[layer].v, at.v)  # (1, Hkv, T, d)
                if kept:
                    k = torch.where(sinks[:, None], at.k.float(), k)
                    v = torch.where(sinks[:, None], at.v.float(), v)
                # how much do attention and bias change?
                new_bias, _, new_attention = split_output(at.q, k, v, sinks, sliding)
                new_bias = new_bias[sees_sink]  # (n, d)
                new_attention = new_attention[sees_sink]  # (n)
                change_of_bias = (new_bias - bias).norm(dim=-1)  # (n)
                cosine = (unit(new_bias) * unit(bias)).sum(-1)  # (n)
                tables[bits, kept].add(layer, {
                    "attention": finite_or_none(new_attention.mean()),
                    "off": finite_or_none((new_attention - attention).abs().mean()),
                    "bias off": finite_or_none(change_of_bias.mean() / bias.norm(dim=-1).mean()),
                    "cosine": finite_or_none(cosine.mean()),
                })

    # 3. means over the layers
    rows, example = [], {}
    for (bits, kept), table in tables.items():
        layers = table.rows()
        row = {"bits": bits, "kept": kept}
        for name in names:
            row[name] = mean([layer[name] for layer in layers if layer[name] is not None])
        rows.append(row)
        example[bits, kept] = [layer["attention"] for layer in layers]
    return rows, example
