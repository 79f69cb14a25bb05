"""Mean squared error x 100 of quantized keys and values, with and without sinks (KVSink Table 1).
Dynamic grids: of groups without and with a sink, change from one to the other. Static grids, with
ranges from calibration windows: overall, and with sinks left out of ranges and errors, change from
one to the other.
"""
import torch

from tinykv.analysis.figures import LINES, new_figure, plain_ticks, style, title
from tinykv.analysis.walk import means, walk
from tinykv.codecs import SCHEMES, make_codecs

TABLE_1 = (("token-dynamic", "k"), ("token-dynamic", "v"), ("channel-dynamic", "k"),
           ("token-static", "k"), ("token-static", "v"), ("channel-static", "k"))
BITS = (4, 3, 2)
LABELS = {"overall": "all tokens", "without": "without sinks", "with": "groups with a sink"}

COLUMNS = {"scheme": ("scheme", ""), "of": ("of", ""), "bits": ("bits", "d"), "overall": ("overall", ".3f"),
           "without": ("without", ".3f"), "with": ("with", ".3f"), "change": ("change", "+.1%")}


def is_static(scheme):
    return scheme.endswith("static")


def stored_keys(at, scheme):
    """The keys where the scheme quantizes them, before RoPE or after: (1, Hkv, T, d)."""
    _, rope = SCHEMES[scheme]
    return at.k_pre if rope == "pre" else at.k


def read_back(codec, x):
    """x (1, Hkv, T, d) as it is read from its codes."""
    codes = codec.encode(x)
    return codec.decode(codes)  # (1, Hkv, T, d)


@torch.no_grad()
def static_codecs(text, scheme, all_bits, kept, **settings):
    """{bits: [Pair of each layer]}, with ranges from the calibration windows.

    kept: True leaves the sinks out of the ranges, as they are for a method that keeps them.
    """
    codecs = {bits: make_codecs(text.model.config, scheme, bits, bits, **settings) for bits in all_bits}
    for pairs in codecs.values():
        for pair in pairs:
            pair.k.begin(0, *text.calibration.shape)
            pair.v.begin(0, *text.calibration.shape)
    for window, sinks in zip(text.progress(text.calibration), text.calibration_marks):
        ignored = (sinks & kept).expand(text.model.config.num_key_value_heads, -1)  # (Hkv, T)
        for at in walk(text.model, window):
            for pairs in codecs.values():
                pairs[at.layer].k.collect(0, stored_keys(at, scheme)[0], ignored, None)
                pairs[at.layer].v.collect(0, at.v[0], ignored, None)
    for pairs in codecs.values():
        for pair in pairs:
            pair.k.fit(0)
            pair.v.fit(0)
    return codecs


def measure(text, group_size=16, formula="offset"):
    # 1. codecs by scheme and whether sinks are kept
    settings = {"group_size": group_size, "formula": formula}
    codecs = {}
    for scheme in dict.fromkeys(scheme for scheme, _ in TABLE_1):
        if is_static(scheme):
            codecs[scheme, False] = static_codecs(text, scheme, BITS, False, **settings)
            codecs[scheme, True] = static_codecs(text, scheme, BITS, True, **settings)
        else:
            codecs[scheme, False] = {bits: make_codecs(text.model.config, scheme, bits, bits, **settings)
                                     for bits in BITS}

    # 2. squared errors by scheme, "k" or "v", bits and column: their sum, and of how many numbers
    def look(at, sinks):
        found = {}
        for scheme, kind in TABLE_1:
            x = stored_keys(at, scheme) if kind == "k" else at.v  # (1, Hkv, T, d)
            # groups of channels are of one token each, and groups of tokens have a sink or none
            hit = shares_token_group(sinks, group_size) if scheme == "channel-dynamic" else sinks  # (T)
            # {column: (sinks kept, which tokens count)}
            columns = {"overall": (False, sinks | True), "without": (is_static(scheme), ~hit)}
            if not is_static(scheme):
                columns["with"] = False, hit
            for bits in BITS:
                for column, (kept, tokens) in columns.items():
                    codec = getattr(codecs[scheme, kept][bits][at.layer], kind)
                    error = read_back(codec, x) - x.float()  # (1, Hkv, T, d)
                    square = 100 * error[:, :, tokens].double().square()  # (1, Hkv, n, d)
                    found[scheme, kind, bits, column] = torch.tensor([square.sum(), square.numel()])
        return found

    # 3. the table
    found, rows = means(text, look), []
    for scheme, kind in TABLE_1:
        for bits in BITS:
            row = {"scheme": scheme, "of": kind.upper(), "bits": bits, "change": None}
            for column in ("overall", "without", "with"):
                total, n = found.get((scheme, kind, bits, column), (0, 0))
                row[column] = total / n if n and (column == "overall" or text.marks.any()) else None
            before, after = ("overall", "without") if is_static(scheme) else ("without", "with")
            if row[after] is not None and row[before]:
                row["change"] = row[after] / row[before] - 1
            rows.append(row)
    return rows


def shares_token_group(sinks, group):
    """sinks (T) -> (T): True where one of the `group` tokens of a token's group is a sink."""
    group_of = torch.arange(len(sinks), device=sinks.device) // group  # (T)
    return torch.isin(group_of, group_of[sinks])


def draw(text, rows):
    """The errors by bits, a panel for each scheme, of K or V; its title has the change."""
    figure, panels = new_figure(2, 3, 11, 6.6, "How sinks change the mean squared error of keys and values")
    for panel, (scheme, kind) in zip(panels, TABLE_1):
        of_panel = [row for row in rows if (row["scheme"], row["of"]) == (scheme, kind.upper())]
        for i, column in enumerate(("overall", "without", "with")):
            if of_panel[0][column] is not None:
                panel.plot([row["bits"] for row in of_panel], [row[column] for row in of_panel],
                           label=LABELS[column], linestyle=LINES[i], **style(i))
        panel.set(yscale="log", xlabel="bits", ylabel="mean squared error x 100", xticks=sorted(BITS))
        plain_ticks(panel)
        if all(row["without"] and abs(row["overall"] / row["without"] - 1) < 0.02 for row in of_panel):
            panel.text(0.97, 0.95, "all tokens and without sinks:\nthe same", transform=panel.transAxes, ha="right",
                       va="top", fontsize="small")
        axis, ranges = scheme.split("-")
        which = "without sinks" if is_static(scheme) else "with a sink"
        change = of_panel[-1]["change"]
        result = "" if change is None else f"\n{which} {change:+.0%}, at {of_panel[-1]['bits']} bits"
        title(panel, f"{'keys' if kind == 'k' else 'values'} per {axis}, {ranges} ranges{result}")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize="small")
    return figure
