"""Look at what the methods stand on, on any model and text: tables, figures, and the numbers behind
them.

    python -m tinykv.analysis sinks
    python -m tinykv.analysis all --out docs/figures --json numbers.json
    python -m tinykv.analysis norms keys --model path/to/Llama-2-7b-hf --data wikitext2 --out .
"""
import argparse
import platform
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from tinykv import UserError, did_you_mean, hf, storage
from tinykv.analysis import anchors, figures, maps, prefixes, quantization, sinks
from tinykv.cache import KVCache
from tinykv.codecs import make_codecs
from tinykv.codecs.affine import FORMULAS
from tinykv.codecs.base import CALIBRATION_WINDOWS
from tinykv.data.windows import halves, load_windows
from tinykv.evaluate import fault_of
from tinykv.methods.fp16 import FP16
from tinykv.run.cli import (
    Help,
    Parser,
    add_attention,
    add_bos,
    add_model,
    add_weights,
    add_windows,
    bar,
    check_context,
    check_counts,
    check_folder,
    context_of,
    dtype_of,
    figure,
    one_line,
    print_columns,
    quantized_model,
    quantizers_of,
)
from tinykv.run.prefix import open_prefix

LONGEST = 1024  # tokens of a window, unless told otherwise


class Text:
    """Windows to look at and their sinks, and calibration windows and theirs."""

    def __init__(self, model, tokenizer, args, calibrates):
        """calibrates: whether calibration windows are needed; if they are not, none is read."""
        self.model, self.tokenizer, self.args = model, tokenizer, args
        self.prefix = []  # tokens that all windows begin with
        if args.prefix is not None:
            self.prefix = open_prefix(args.prefix, tokenizer, model.config).ids
        self.windows = self.load(args.windows, "test")  # (W, T)
        check_finite(model, self.windows)
        self.calibration = None
        if calibrates:
            n = args.calib_windows or CALIBRATION_WINDOWS
            self.calibration = self.load(n, "calibration")  # (C, T)
        self.scores, self.marks = self.find_sinks(self.windows)  # (W, L, H, T), (W, T)

    def load(self, n, split):
        """n windows of a split, (n, T), on the model's device; of the test split, --text if given."""
        if split == "test" and self.args.text is not None:
            tokens = torch.tensor([self.args.text_ids])  # (1, T)
        else:
            prefix = self.prefix if split == "test" else []
            tokens = load_windows(self.args.data, self.tokenizer, self.args.context, n, split,
                                  bos=self.args.bos, prefix=prefix).tokens  # (n, T)
        return tokens.to(self.model.lm_head.weight.device)

    def find_sinks(self, windows):
        return sinks.find_sinks(self.model, windows, self.args.threshold, progress("finding sinks"))

    @cached_property
    def calibration_marks(self):
        _, marks = self.find_sinks(self.calibration)  # (C, T)
        return marks

    def with_quantized_weights(self):
        """The model with its weights quantized as --weights says."""
        (name, quantizer), = quantizers_of(self.args, self.model.config).items()
        in_memory = storage.CalibrationFile(None, self.model)
        return quantized_model(self.model, name, quantizer, self.calibration, in_memory)


@torch.no_grad()
def check_finite(model, windows):
    """UserError if the model computes numbers that are not finite on a window of these (W, T)."""
    for window in windows:
        cache = KVCache(model, FP16(model.config), "paper")
        hidden = model(window[None], cache, logits=False)  # (1, T, D)
        fault = fault_of(cache, [hidden])
        if fault:
            raise UserError(fault)


def progress(what):
    """Wraps a loop over windows in a progress bar."""
    return lambda windows: bar(windows, what)


# What to look at. Each function returns the rows of a table, and an example for the figure.

def look_at_sinks(model, text, args):
    return sinks.attention_received(model, text.windows, text.marks, text.scores, args.threshold,
                                    args.layer)


def look_at_outliers(model, text, args):
    return sinks.outliers(model, text.windows, text.marks, progress("outliers"))


def look_at_norms(model, text, args):
    return sinks.norms(model, text.windows, text.marks, progress("norms"), shown=args.layer)


def look_at_cosines(model, text, args):
    return sinks.cosines(model, text.windows, text.marks, progress("cosine"), shown=args.layer)


def look_at_bias(model, text, args):
    return sinks.biases(model, text.windows, text.marks, progress("bias"), shown=args.layer)


def look_at_keys(model, text, args):
    return sinks.sorted_keys(model, text.windows, text.marks, progress("keys"), shown=args.layer)


def look_at_errors(model, text, args):
    return quantization.errors(
        model, text.windows, text.marks, text.calibration, text.calibration_marks,
        args.group_size, args.formula, progress("errors"))


def look_at_widths(model, text, args):
    return quantization.widths(
        model, text.windows, text.marks, text.calibration, text.calibration_marks,
        args.group_size, args.formula, progress("widths"))


def look_at_prefixes(model, text, args):
    quantized = text.with_quantized_weights()
    if text.prefix:
        return prefixes.prefix_lengths(model, quantized, text.windows, text.marks, len(text.prefix),
                                       progress("prefix"), args.layer)
    return prefixes.prefixes(
        model, quantized, text.windows, text.marks, progress=progress("prefix"), shown=args.layer)


def look_at_anchors(model, text, args):
    return anchors.anchor_report(
        model, text.windows, text.calibration, args.vq, progress("anchors"), args.layer)


def look_at_maps(model, text, args):
    return maps.maps(model, text.windows, progress("maps"), args.layer)


@dataclass
class Phenomenon:
    help: str  # what it shows, and the place in the paper
    look: Callable  # (model, text, args) -> rows, example
    draw: Callable  # (rows, example) -> Figure
    columns: dict  # of the table: {name in a row: (head, format)}
    needs_sinks: bool = True  # where no token is a sink, there is nothing to look at
    calibrates: bool = False  # it needs calibration windows


PHENOMENA = {
    "sinks": Phenomenon(
        "where sinks are: the attention that tokens receive from the 64 queries that begin with "
        "their own, averaged over heads (KVSink Figure 1a); heads: the share of heads in which "
        "a sink receives at least --threshold",
        look_at_sinks, figures.sinks,
        {"layer": ("layer", "d"), "first": ("first token", ".3f"), "later": ("later sinks", ".3f"),
         "others": ("other tokens", ".3f"), "largest other": ("largest of them", ".3f"),
         "heads": ("heads", ".0%")},
        needs_sinks=False),
    "outliers": Phenomenon(
        "the outlier's way through the layers: the largest magnitude in the four places of "
        "KVSink Section 3.1, at the sinks and at other tokens (Figure 4); ratio: of H's to its "
        "median; channel: that of the outlier, and X_d,out and H in it at the sinks; outliers in: all "
        "channels that have some",
        look_at_outliers, figures.outliers,
        {"layer": ("layer", "d"), "d_in": ("X_d,in", ".1f"), "d_in others": ("others", ".1f"),
         "d_out": ("X_d,out", ".1f"), "d_out others": ("others", ".1f"), "mid": ("H'", ".1f"),
         "mid others": ("others", ".1f"), "out": ("H", ".1f"), "out others": ("others", ".1f"),
         "ratio": ("ratio", ".0f"), "channel": ("channel", "d"), "d_out c": ("X_d,out", ".1f"),
         "out c": ("H", ".1f"), "channels": ("outliers in", "")},
        needs_sinks=False),
    "norms": Phenomenon(
        "norms of queries, keys and values: the median over heads and all other tokens, and the "
        "mean at sinks as a multiple of it (KVSink Section 3.2, Figures 2 and 5)",
        look_at_norms, figures.norms,
        {"layer": ("layer", "d"), "q": ("Q others", ".2f"), "q sinks": ("x at sinks", ".2f"),
         "k": ("K others", ".2f"), "k sinks": ("x at sinks", ".2f"), "v": ("V others", ".2f"),
         "v sinks": ("x at sinks", ".2f")}),
    "cosine": Phenomenon(
        "cosine of queries with the keys that they see: means over the keys of sinks, of the "
        "first sink, of later ones, and of other tokens; largest: how often a sink's key has "
        "the largest (KVSink Section 3.2, Figure 5a)",
        look_at_cosines, figures.cosine,
        {"layer": ("layer", "d"), "sinks": ("sinks", ".2f"), "first": ("first sink", ".2f"),
         "later": ("later sinks", ".2f"), "others": ("other tokens", ".2f"),
         "largest": ("largest", ".0%")}),
    "bias": Phenomenon(
        "the attention bias, which is the sinks' part of the attention output (KVSink Eq. 9, "
        "Figure 6): attention to the sinks; size of the bias over that of the output; its "
        "consistency, the mean cosine over all pairs of tokens: mean and lowest of the heads, "
        "over pairs that see the same sinks, and of the rest of the output",
        look_at_bias, figures.bias,
        {"layer": ("layer", "d"), "attention": ("attention", ".2f"), "size": ("size", ".2f"),
         "consistency": ("consistency", ".2f"), "lowest": ("lowest", ".2f"),
         "within": ("same sinks", ".2f"), "rest": ("rest", ".2f")}),
    "keys": Phenomenon(
        "OTT's sorted key magnitudes: the smallest over the median, the cliff (the largest "
        "ratio of neighbours among the 32 smallest), the number of tokens below it, and the "
        "share of these that are sinks; stretched: the share of channel ranges, of groups of 128 "
        "tokens, that sinks stretch, and by what factor",
        look_at_keys, figures.keys,
        {"layer": ("layer", "d"), "smallest": ("smallest", ".3f"), "cliff": ("cliff", ".2f"),
         "below": ("below", ".1f"), "sinks": ("sinks", ".0%"),
         "stretched": ("stretched", ".0%"), "longer": ("by", ".2f")},
        needs_sinks=False),
    "errors": Phenomenon(
        "mean squared error x 100 with and without sinks (KVSink Table 1). Dynamic grids: of "
        "groups without and with a sink, change from one to the other. Static grids: overall, "
        "and with sinks left out of ranges and errors, change from one to the other",
        look_at_errors, figures.errors,
        {"scheme": ("scheme", ""), "of": ("of", ""), "bits": ("bits", "d"),
         "overall": ("overall", ".3f"), "without": ("without", ".3f"), "with": ("with", ".3f"),
         "change": ("change", "+.1%")},
        needs_sinks=False, calibrates=True),
    "widths": Phenomenon(
        "what 2 to 8 bits, static per token, do to sinks (KVSink Figure 7): attention to the "
        "sinks, and its mean change; the bias of Eq. 9: its mean change over its size, and its "
        "cosine with the exact one; with nothing kept, and with the sinks kept",
        look_at_widths, figures.widths,
        {"bits": ("bits", "d"), "kept": ("kept", ""), "attention": ("attention", ".3f"),
         "off": ("change", ".4f"), "bias off": ("bias change", ".3f"), "cosine": ("cosine", ".3f")},
        calibrates=True),
    "prefix": Phenomenon(
        "what is left of the error of quantized weights (--weights) if the first n tokens' keys "
        "and values are exact: squared error of the last block's output, and of what attention "
        "adds, summed over layers (IntactKV Figure 2); change of a head's output and Theorem "
        "1's bound, in the middle layer for the last token",
        look_at_prefixes, figures.prefixes,
        {"kept": ("exact", ""), "n": ("n", ".0f"), "last": ("last block", ".3f"),
         "attention": ("attention", ".4f"), "change": ("change", ".3f"), "bound": ("bound", ".1e")},
        calibrates=True),
    "anchors": Phenomenon(
        "AnTKV's scores: how well they rank the tokens by the damage that quantizing each alone "
        "does to the attention output, and to the attention weights, which leaves V out (its "
        "Appendix D, Figure 9), by rank correlation and by the damage in the top 1%",
        look_at_anchors, figures.anchors, {}, needs_sinks=False, calibrates=True),
    "maps": Phenomenon(
        "one layer whole: H, attention output, keys and values, token by channel, and the attention "
        "of the first 64 tokens (KVSink Figures 1b and 5f, IntactKV Figure 1); the largest H of each "
        "layer; and the share of the keys' variance that lies within channels, before RoPE and after "
        "it (AnTKV Appendix B, Figure 8)",
        look_at_maps, figures.maps,
        {"layer": ("layer", "d"), "largest": ("largest H", ".1f"), "token": ("at token", "d"),
         "channel": ("channel", "d"), "pre": ("K before RoPE", ".2f"), "post": ("K after", ".2f")},
        needs_sinks=False),
}

#   flag: the phenomena that take it
FLAGS = {
    "group_size": ("errors", "widths"),
    "formula": ("errors", "widths"),
    "vq": ("anchors",),
    "prefix": ("prefix",),
    "weights": ("prefix",),
    "w_bits": ("prefix",),
    "w_group_size": ("prefix",),
}


# Tables

def print_table(name, rows):
    if name == "anchors":
        print_anchors(rows)
        return
    columns = PHENOMENA[name].columns
    lines = []
    for row in rows:
        row = printed_row(name, row)
        lines.append([figure(row[column], form) for column, (_, form) in columns.items()])
    heads = [head for head, _ in columns.values()]
    columns_of_words = {"errors": 2, "prefix": 1}.get(name, 0)
    print_columns(heads, lines, columns_of_words)


def printed_row(name, row):
    """A row as it is printed: kept tokens in words, errors times 100, as in Table 1."""
    row = dict(row)
    if name == "outliers":
        row["channels"] = ",".join(map(str, row["channels"])) or "none"
    if name == "widths":
        row["kept"] = "sinks" if row["kept"] else "nothing"
    if name == "errors":
        for column in ("overall", "without", "with"):
            if row[column] is not None:
                row[column] *= 100
    return row


def print_anchors(rows):
    """Two tables, of rank correlations and of shares of the damage, with a column for each
    layer."""
    for name, form, heading in (
            ("rank correlation", ".2f", "rank correlation with the damage, by layer"),
            ("damage in the top 1%", ".0%", "damage in the top 1% of the tokens, by layer")):
        n_layers = len(rows[0][name])
        print(heading)
        layers = "".join(f"{layer:7}" for layer in range(n_layers))
        print(f"of            ranked by       {layers}     mean")
        for row in rows:
            numbers = "".join(f"{x:7{form}}" for x in row[name])
            mean = sum(row[name]) / n_layers
            print(f"{row['of']:13} {row['ranked by']:16}{numbers}  {mean:7{form}}")


def print_sinks(text, tokenizer):
    """Which tokens of each window are sinks."""
    for w, (window, marks) in enumerate(zip(text.windows.tolist(), text.marks)):
        found = []
        for position in marks.nonzero()[:, 0].tolist():
            token = window[position]
            word = "<s>" if token == tokenizer.bos_id else repr(tokenizer.decode([token]))
            found.append(f"{position} {word}")
        print(f"sinks of window {w}: {storage.listed(found) or 'none'}")


# The command

class HelpWithTable(Help, argparse.RawDescriptionHelpFormatter):
    """Leaves the lines of the description and the epilog as they are."""


def parser():
    shown = []
    for name, phenomenon in PHENOMENA.items():
        text = f"{name:10}{phenomenon.help}"
        shown.append(textwrap.fill(text, 100, initial_indent="  ", subsequent_indent=" " * 12))
    p = Parser(
        prog="python -m tinykv.analysis", formatter_class=HelpWithTable,
        description=__doc__.split("\n\n")[0],
        epilog="what to look at:\n" + "\n".join(shown) + "\n  all       all of these\n\n"
               "A token is a sink if its attention received reaches --threshold in a tenth of all heads "
               "of all layers.")
    p.add_argument("what", nargs="+", metavar="WHAT",
                   help=f"{', '.join(PHENOMENA)}, or all: see below")
    add_model(p)
    add_attention(p)
    add_windows(p, windows=4, longest=LONGEST)
    add_bos(p)
    p.add_argument("--text", metavar="FILE",
                   help="look at this text, whole and as it is, in the place of windows of --data")
    p.add_argument("--layer", metavar="L", type=int,
                   help="the layer that figures show (default: the middle one)")
    p.add_argument("--threshold", metavar="X", type=float, default=0.3,
                   help="attention received from which a token is a sink of a head")
    p.add_argument("--group-size", metavar="G", type=int, default=16,
                   help="errors, widths: channels, or tokens, of a group (default: 16, the paper's)")
    p.add_argument("--formula", choices=FORMULAS, default="offset",
                   help="errors, widths: the zero point")
    p.add_argument("--prefix", metavar="bos|FILE",
                   help="prefix: a text that all windows begin with, of which 0, 1, .. all tokens are exact")
    p.add_argument("--vq", metavar="dNmM", default="d8m256",
                   help="anchors: format of the codebooks")
    add_weights(p, several=False)
    p.add_argument("--out", metavar="DIR",
                   help="draw each as DIR/WHAT.png (default: nothing is drawn)")
    p.add_argument("--json", metavar="PATH", help="also write the numbers as JSON")
    return p


def names_of(words):
    """The phenomena that were asked for, each once: names, or all."""
    names = []
    for word in words:
        names += PHENOMENA if word == "all" else [word]
    return list(dict.fromkeys(names))


def check(args, names):
    """Errors that can be found before anything is loaded."""
    for name in names:
        if name not in PHENOMENA:
            raise UserError(f"unknown phenomenon {name!r}; there are {', '.join(PHENOMENA)}, all"
                            f"{did_you_mean(name, PHENOMENA)}")
    defaults = parser().parse_args(args.what)
    for flag, takers in FLAGS.items():
        given = getattr(args, flag) != getattr(defaults, flag)
        if given and not set(takers) & set(names):
            raise UserError(f"--{flag.replace('_', '-')} is a setting of {' and '.join(takers)}, "
                            f"and not of {', '.join(names)}")
    check_counts(args, 2, "context")
    check_counts(args, 1, "windows", "calib-windows", "group-size", "w-group-size")
    if not 0 < args.threshold <= 1:
        raise UserError("--threshold is a share of the attention, above 0 and up to 1; "
                        f"got {args.threshold:g}")
    check_folder("json", args.json)
    if args.out and Path(args.out).exists() and not Path(args.out).is_dir():
        raise UserError(f"--out {args.out} is a file; give a folder")


def ids_of(path, tokenizer, bos):
    """A text file whole, as ids, with `<s>` before it unless bos is "none"."""
    first, second = halves(path)
    ids = tokenizer.encode(first + second)
    if bos == "replace" and tokenizer.bos_id is not None:
        ids = [tokenizer.bos_id, *ids]
    if len(ids) < 2:
        raise UserError(f"{path} has {len(ids)} tokens; give a text of 2 or more")
    return ids


def check_settings(args, names, config):
    """Errors of settings that do not fit the model: before anything is computed."""
    quantizers_of(args, config)
    if args.layer is not None and not 0 <= args.layer < config.num_hidden_layers:
        raise UserError(f"--layer {args.layer}: this model has layers 0 to {config.num_hidden_layers - 1}")
    if args.text is not None and args.prefix is not None:
        raise UserError("--prefix begins windows of --data, and --text is a whole text; give one of them")
    if "anchors" in names:
        anchors.anchor_method(config, args.context, args.vq)
    if "errors" in names or "widths" in names:
        make_codecs(config, "token-dynamic", 2, 2, group_size=args.group_size, formula=args.formula)


def run(args):
    # 1. check what can be checked before anything is loaded
    names = names_of(args.what)
    check(args, names)
    device = hf.usable_device(args.device)
    dtype = dtype_of(args.dtype, device)
    config = hf.load_config(args.model)
    tokenizer = hf.load_tokenizer(args.model, config)
    if args.text is None:
        args.context = context_of(args, config, LONGEST)
    else:
        args.text_ids = ids_of(args.text, tokenizer, args.bos)
        args.context, args.windows = len(args.text_ids), 1
        check_context(args.context, config, "text")
    check_settings(args, names, config)

    # 2. the model, the text and its sinks
    model = hf.load_model(args.model, device, dtype)
    model.use_attention(args.attention)
    calibrates = any(PHENOMENA[name].calibrates for name in names)
    text = Text(model, tokenizer, args, calibrates)
    n_parameters = sum(p.numel() for p in model.parameters())
    print(f"model {args.model}: {n_parameters:,} parameters, {dtype}, {device}")
    if args.text is None:
        print(f"data {args.data}: {args.windows} windows of {args.context} tokens")
    else:
        print(f"text {args.text}: {args.context} tokens")
    print_sinks(text, tokenizer)

    # 3. a table for each name, and a figure
    found = {}  # {name: rows}
    for name in names:
        print()
        phenomenon = PHENOMENA[name]
        if phenomenon.needs_sinks and not text.marks.any() and not (name == "prefix" and text.prefix):
            print(f"{name}: no token of this text is a sink of this model; "
                  "a lower --threshold may find some")
            found[name] = None
            continue
        found[name], example = phenomenon.look(model, text, args)
        print_table(name, found[name])
        if args.out:
            figures.save(phenomenon.draw(found[name], example), Path(args.out, f"{name}.png"))

    # 4. the numbers
    if args.json:
        storage.write_json(args.json, {
            "model": args.model, "data": args.data,
            "context": args.context, "windows": args.windows,
            "sinks at": [marks.nonzero()[:, 0].tolist() for marks in text.marks],
            **found,
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
        })


def main():
    p = parser()
    with one_line(p):
        run(p.parse_args())


if __name__ == "__main__":
    main()
