"""Mean squared error x 100 of quantized keys and values, with and without sinks (KVSink Table 1). Dynamic grids: of
groups without and with a sink, change from one to the other. Static grids, with ranges from calibration windows:
overall, and with sinks left out of ranges and errors, change from one to the other. With: of groups, and in static
grids of tokens, with a sink.
"""
import torch

from tinykv.codecs.schemes import SCHEMES, make_codecs
from tinykv.lab import cli
from tinykv.lab.analysis.sinks import find_sinks
from tinykv.lab.analysis.walk import by_layer, mean, walk

TABLE_1 = (("token-dynamic", "k"), ("token-dynamic", "v"), ("channel-dynamic", "k"),
           ("token-static", "k"), ("token-static", "v"), ("channel-static", "k"))
BITS = (4, 3, 2)
GROUP_SIZE = 16  # the paper's
COMPARED = {"dynamic": ("without", "with"), "static": ("overall", "without")}  # by the end of the scheme's name

COLUMNS = {"scheme": ("scheme", ""), "of": ("of", ""), "bits": ("bits", "d"), "overall": ("overall", ".3f"),
           "without": ("without", ".3f"), "with": ("with", ".3f"), "change": ("change", "+.1%")}


def stored_keys(at, scheme):
    """The keys where the scheme quantizes them, before RoPE or after: (1, Hkv, T, d)."""
    _, rope = SCHEMES[scheme]
    return at.k_pre if rope == "pre" else at.k


@torch.no_grad()
def codecs_of(text, scheme, all_bits):
    """{(bits, sinks kept): [Pair of each layer]}; static ranges from the calibration windows: of all of their tokens,
    and without the sinks, as for a method that keeps them. A text is calibrated on once."""
    if (scheme, *all_bits) in text.calibrated:
        return text.calibrated[scheme, *all_bits]
    pairs = {(bits, kept): make_codecs(text.model.config, scheme, bits, bits, group_size=GROUP_SIZE)
             for kept in (False, True) for bits in all_bits}
    if scheme.endswith("dynamic"):
        return pairs
    if text.calibration_marks is None:  # the same for all static schemes
        text.calibration_marks = find_sinks(text.model, text.calibration)
    seen = [[(stored_keys(at, scheme), at.v) for at in walk(text.model, window)]  # (1, Hkv, T, d) both
            for window in cli.bar(text.calibration, f"calibrating {scheme}")]
    for (_, kept), of_layers in pairs.items():
        for pair, parts in zip(of_layers, zip(*seen)):  # the windows of a layer
            for codec, rows in zip(pair, map(torch.cat, zip(*parts))):  # (W, Hkv, T, d)
                ignored = (text.calibration_marks & kept)[:, None].expand(rows.shape[:3])  # (W, Hkv, T)
                codec.fit(rows, ignored)
    text.calibrated[scheme, *all_bits] = pairs
    return pairs


def measure(text):
    codecs = {scheme: codecs_of(text, scheme, BITS) for scheme in dict.fromkeys(scheme for scheme, _ in TABLE_1)}

    # 1. squared errors by scheme, "k" or "v", bits and column: their sum, and of how many numbers
    def look(at, sinks):
        errors = {}
        group_of = torch.arange(len(sinks), device=sinks.device) // GROUP_SIZE  # (T)
        beside_sinks = torch.isin(group_of, group_of[sinks])  # (T): one of the group is a sink
        for scheme, kind in TABLE_1:
            x = stored_keys(at, scheme) if kind == "k" else at.v  # (1, Hkv, T, d)
            # groups of channels are of one token each, and groups of tokens have a sink or none
            hit = beside_sinks if scheme == "channel-dynamic" else sinks  # (T)
            # (column, sinks kept, which tokens count)
            columns = (("overall", False, sinks | True), ("without", True, ~hit), ("with", False, hit))
            for bits in BITS:
                for column, kept, tokens in columns:
                    codec = getattr(codecs[scheme][bits, kept][at.layer], kind)
                    read = codec.decode(codec.encode(x))  # (1, Hkv, T, d)
                    error = read - x.float()  # (1, Hkv, T, d)
                    square = 100 * error[:, :, tokens].double().square()  # (1, Hkv, n, d)
                    errors[scheme, kind, bits, column] = torch.tensor([square.sum(), square.numel()])
        return errors

    # 2. the table, over all layers
    layers, rows = by_layer(text, look), []
    for scheme, kind in TABLE_1:
        before, after = COMPARED[scheme.split("-")[1]]
        for bits in BITS:
            row = {"scheme": scheme, "of": kind.upper(), "bits": bits}
            for column in ("overall", "without", "with"):
                total, n = mean([layer[scheme, kind, bits, column] for layer in layers])
                row[column] = total / n
            row["change"] = row[after] / row[before] - 1
            rows.append(row)
    return rows
