"""Look at what the methods stand on, on any model and text: tables, figures, and the numbers behind them.

    python -m tinykv.inspect sinks
    python -m tinykv.inspect all --out docs/figures --json numbers.json
    python -m tinykv.inspect norms keys --model path/to/Llama-2-7b-hf --data wikitext2 --out .
"""
import argparse
import platform
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from tinykv import UserError, checkpoint, effects, figures, files, phenomena
from tinykv.calibrate import Learned
from tinykv.codecs import FORMULAS
from tinykv.command import (
    Help,
    Parser,
    add_bos,
    add_model,
    add_weights,
    add_windows,
    bar,
    check_folder,
    context_of,
    dtype_of,
    figure,
    one_line,
    print_columns,
    quantized,
    quantizers_of,
)
from tinykv.data import load_windows
from tinykv.schemes import codec


@dataclass
class Phenomenon:
    """compute(model, text, args) -> rows, example; draw(rows, example, path) a figure of them."""
    words: str  # what it shows, and the place in the paper
    compute: Callable
    draw: Callable
    columns: dict  # of the table: name in a row -> (head, format)
    needs_sinks: bool = True  # there is nothing to look at without them
    calibrates: bool = False  # it needs other text to learn from


class Text:
    """The windows that are looked at, and the sinks in them; calibration windows, and the sinks in those."""

    def __init__(self, model, tokenizer, args, calibrates):
        self.model, self.tokenizer, self.args = model, tokenizer, args
        self.windows = self.load(args.windows, "test")
        self.calibration = self.load(args.calib_windows, "calibration") if calibrates else None
        self.scores, self.marks = self.find_sinks(self.windows)

    def load(self, windows, split):
        text = load_windows(self.args.data, self.tokenizer, self.args.context, windows, split, bos=self.args.bos)
        return text.tokens.to(self.model.lm_head.weight.device)  # (W, T)

    def find_sinks(self, windows):
        return phenomena.find_sinks(self.model, windows, self.args.threshold, progress("finding sinks"))

    @cached_property
    def calibration_marks(self):
        return self.find_sinks(self.calibration)[1]

    def quantized(self):
        """The model with its weights as --weights says."""
        (name, quantizer), = quantizers_of(self.args, self.model.config).items()
        return quantized(self.model, name, quantizer, self.calibration, Learned(None, self.model, ""))

    def with_calibration(self):
        """What `errors` and `widths` take."""
        return self.windows, self.marks, self.calibration, self.calibration_marks


def progress(what):
    return lambda windows: bar(windows, what)


LAYER = {"layer": ("layer", "d")}
PHENOMENA = {
    "sinks": Phenomenon(
        "where sinks are: the attention that tokens receive from the 64 queries that begin with their own, averaged "
        "over heads (KVSink Figure 1a); heads: in how many of them a sink has at least --threshold",
        lambda model, text, args: phenomena.attention_received(
            model, text.windows, text.marks, text.scores, args.threshold),
        figures.sinks,
        {**LAYER, "first": ("first token", ".3f"), "later": ("later sinks", ".3f"), "others": ("other tokens", ".3f"),
         "largest other": ("largest of them", ".3f"), "heads": ("heads", ".0%")}, needs_sinks=False),
    "outliers": Phenomenon(
        "the outlier's way through the layers: the largest magnitude in the four places of KVSink Section 3.1, at the "
        "sinks and at other tokens (Figure 4); ratio: H's to its median; channel: that of the outlier, and X_d,out and "
        "H in it at the sinks",
        lambda model, text, args: phenomena.outliers(model, text.windows, text.marks, progress("outliers")),
        figures.outliers,
        {**LAYER, "d_in": ("X_d,in", ".1f"), "d_in others": ("others", ".1f"), "d_out": ("X_d,out", ".1f"),
         "d_out others": ("others", ".1f"), "mid": ("H'", ".1f"), "mid others": ("others", ".1f"), "out": ("H", ".1f"),
         "out others": ("others", ".1f"), "ratio": ("ratio", ".0f"), "channel": ("channel", "d"),
         "d_out c": ("X_d,out", ".1f"), "out c": ("H", ".1f")}, needs_sinks=False),
    "norms": Phenomenon(
        "norms of queries, keys and values: the median of a head's at all other tokens, and the mean at sinks as a "
        "multiple of that (KVSink Section 3.2, Figures 2 and 5)",
        lambda model, text, args: phenomena.norms(model, text.windows, text.marks, progress("norms")), figures.norms,
        {**LAYER, **{name: (head, ".2f") for kind in "qkv" for name, head in (
            (kind, f"{kind.upper()} others"), (f"{kind} sinks", "x at sinks"))}}),
    "cosine": Phenomenon(
        "cosine of queries with the keys that they see: means over the keys of sinks, of the first sink, of later "
        "ones, and of other tokens; largest: how often a sink's key has the largest (KVSink Section 3.2, Figure 5a)",
        lambda model, text, args: phenomena.cosines(model, text.windows, text.marks, progress("cosine")),
        figures.cosine,
        {**LAYER, "sinks": ("sinks", ".2f"), "first": ("first sink", ".2f"), "later": ("later sinks", ".2f"),
         "others": ("other tokens", ".2f"), "largest": ("largest", ".0%")}),
    "bias": Phenomenon(
        "the attention bias, the sinks' part of the attention output (KVSink Eq. 9, Figure 6): attention to the sinks, "
        "size of the bias over that of the output, and its consistency, the mean cosine over all pairs of tokens: mean "
        "and lowest of the heads, over pairs within the reach of the same sinks, and of the rest of the output",
        lambda model, text, args: phenomena.biases(model, text.windows, text.marks, progress("bias")), figures.bias,
        {**LAYER, "attention": ("attention", ".2f"), "size": ("size", ".2f"), "consistency": ("consistency", ".2f"),
         "lowest": ("lowest", ".2f"), "within": ("same sinks", ".2f"), "rest": ("rest", ".2f")}),
    "keys": Phenomenon(
        "OTT's sorted key magnitudes: the smallest over the median, the cliff (the largest ratio of neighbours among "
        "the 32 smallest), the number of tokens below it, and how many of those are sinks",
        lambda model, text, args: phenomena.sorted_keys(model, text.windows, text.marks, progress("keys")),
        figures.keys,
        {**LAYER, "smallest": ("smallest", ".3f"), "cliff": ("cliff", ".2f"), "below": ("below", ".1f"),
         "sinks": ("sinks", ".0%")}, needs_sinks=False),
    "errors": Phenomenon(
        "mean squared error x 100 with and without sinks (KVSink Table 1). Dynamic grids: of groups without and with a "
        "sink, change from one to the other. Static grids: overall, and with sinks left out of ranges and numbers, "
        "change from one to the other",
        lambda model, text, args: effects.errors(
            model, *text.with_calibration(), args.group_size, args.formula, progress("errors")), figures.errors,
        {"scheme": ("scheme", ""), "of": ("of", ""), "bits": ("bits", "d"), "overall": ("overall", ".3f"),
         "without": ("without", ".3f"), "with": ("with", ".3f"), "change": ("change", "+.1%")},
        needs_sinks=False, calibrates=True),
    "widths": Phenomenon(
        "what 2 to 8 bits, static per token, do to sinks (KVSink Figure 7): attention to the sinks, its mean change, "
        "the bias of Eq. 9: its mean change over its size, and cosine with the exact one; with nothing kept, and with "
        "the sinks kept",
        lambda model, text, args: effects.widths(
            model, *text.with_calibration(), args.group_size, args.formula, progress("widths")), figures.widths,
        {"bits": ("bits", "d"), "kept": ("kept", ""), "attention": ("attention", ".3f"), "off": ("change", ".4f"),
         "bias off": ("bias change", ".3f"), "cosine": ("cosine", ".3f")}, calibrates=True),
    "prefix": Phenomenon(
        "what is left of the error of quantized weights (--weights) if the first n tokens' keys and values are exact: "
        "squared error of the last block's output, and of what attention adds, summed over layers (IntactKV Figure 2); "
        "change of a head's output and Theorem 1's bound, in the middle layer for the last token",
        lambda model, text, args: effects.prefixes(
            model, text.quantized(), text.windows, text.marks, progress=progress("prefix")), figures.prefixes,
        {"kept": ("exact", ""), "n": ("n", ".0f"), "last": ("last block", ".3f"), "attention": ("attention", ".4f"),
         "change": ("change", ".3f"), "bound": ("bound", ".1e")}, calibrates=True),
    "anchors": Phenomenon(
        "AnTKV's scores: how well they rank the tokens by the damage that coding each alone does to the attention "
        "output (its Appendix D), by rank correlation and by the damage in the top 1%",
        lambda model, text, args: effects.report_anchors(
            model, text.windows, text.calibration, args.vq, progress("anchors")), figures.anchors, {},
        needs_sinks=False, calibrates=True),
}


#     flag: of what
OWN = {"group_size": ("errors", "widths"), "formula": ("errors", "widths"), "vq": ("anchors",), "weights": ("prefix",),
       "w_bits": ("prefix",), "w_group_size": ("prefix",)}


def print_rows(name, rows):
    """The table of a phenomenon; errors times 100, as in Table 1."""
    if name == "anchors":
        return print_anchors(rows)
    lines = []
    for row in rows:
        if name == "widths":
            row = {**row, "kept": "sinks" if row["kept"] else "nothing"}
        if name == "errors":
            row = {**row, **{x: row[x] and 100 * row[x] for x in ("overall", "without", "with")}}
        lines.append([figure(row[column], form) for column, (_, form) in PHENOMENA[name].columns.items()])
    left = {"errors": 2, "prefix": 1}.get(name, 0)
    print_columns([head for head, _ in PHENOMENA[name].columns.values()], lines, left)


def print_anchors(rows):
    layers = len(rows[0]["rank correlation"])
    for name, form in (("rank correlation", ".2f"), ("damage in the top 1%", ".0%")):
        print(f"{name} with the damage, by layer" if form == ".2f" else f"{name} of the tokens, by layer")
        print("of  ranked by      " + "".join(f"{layer:7}" for layer in range(layers)) + "     mean")
        for row in rows:
            numbers = "".join(f"{x:7{form}}" for x in row[name])
            print(f"{row['of']:3} {row['ranked by']:15}{numbers}  {sum(row[name]) / layers:7{form}}")


def print_sinks(text, tokenizer):
    """Which tokens are sinks; says so where there are none."""
    for w, (window, marks) in enumerate(zip(text.windows.tolist(), text.marks)):
        at = marks.nonzero()[:, 0].tolist()
        words = [f"{i} {'<s>' if window[i] == tokenizer.bos_id else repr(tokenizer.decode([window[i]]))}" for i in at]
        print(f"sinks of window {w}: {files.listed(words) or 'none'}")


class Pages(Help, argparse.RawDescriptionHelpFormatter):
    pass


def parser():
    shown = "\n".join(textwrap.fill(f"{name:10}{p.words}", 100, initial_indent="  ", subsequent_indent=" " * 12)
                      for name, p in PHENOMENA.items())
    p = Parser(
        prog="python -m tinykv.inspect", formatter_class=Pages,
        description=__doc__.split("\n\n")[0], epilog=f"what to look at:\n{shown}\n  all       all of these\n\n"
        "A token is a sink if its attention received reaches --threshold in a tenth of all heads of all layers.")
    p.add_argument("what", nargs="+", metavar="WHAT", help=f"{', '.join(PHENOMENA)}, or all: see below")
    add_model(p)
    add_windows(p, windows=4, longest=1024)
    add_bos(p)
    p.add_argument("--threshold", metavar="X", type=float, default=0.3,
                   help="attention received from which a token is a sink of a head")
    p.add_argument("--group-size", metavar="G", type=int, default=16,
                   help="errors, widths: channels, or tokens, of a group (default: 16, the paper's)")
    p.add_argument("--formula", choices=FORMULAS, default="offset", help="errors, widths: the zero point")
    p.add_argument("--vq", metavar="dNmM", default="d8m256", help="anchors: format of the codebooks")
    add_weights(p, several=False)
    p.add_argument("--out", metavar="DIR", help="draw each as DIR/WHAT.png (default: nothing is drawn)")
    p.add_argument("--json", metavar="PATH", help="also write the numbers as JSON")
    return p


def check(args, names):
    """What can be seen to be wrong before anything is loaded."""
    for name in names:
        if name not in PHENOMENA:
            raise UserError(f"unknown phenomenon {name!r}; there are {', '.join(PHENOMENA)}, all")
    defaults = parser().parse_args(args.what)
    for flag, of in OWN.items():
        if getattr(args, flag) != getattr(defaults, flag) and not set(of) & set(names):
            raise UserError(f"--{flag.replace('_', '-')} is a setting of {' and '.join(of)}, and not of "
                            f"{', '.join(names)}")
    if not 0 < args.threshold <= 1:
        raise UserError(f"--threshold is a share of the attention, above 0 and up to 1; got {args.threshold:g}")
    check_folder("json", args.json)
    if args.out and Path(args.out).exists() and not Path(args.out).is_dir():
        raise UserError(f"--out {args.out} is a file; give a folder")


def run(args):
    names = list(dict.fromkeys(name for word in args.what for name in (PHENOMENA if word == "all" else [word])))
    check(args, names)
    device = checkpoint.usable(args.device)
    dtype = dtype_of(args.dtype, device)
    config = checkpoint.load_config(args.model)
    args.context = context_of(args, config, 1024)
    # What these two cannot take shows before anything is computed.
    quantizers_of(args, config)
    if "anchors" in names:
        effects.anchor_method(config, args.context, args.vq)
    if {"errors", "widths"} & set(names):
        codec(2, config.head_dim, "token", args.group_size, args.formula, static=False)
    model, tokenizer = checkpoint.load(args.model, device, dtype)
    text = Text(model, tokenizer, args, any(PHENOMENA[name].calibrates for name in names))
    print(f"model {args.model}: {sum(p.numel() for p in model.parameters()):,} parameters, {dtype}, {device}")
    print(f"data {args.data}: {args.windows} windows of {args.context} tokens")
    print_sinks(text, tokenizer)
    found = {}
    for name in names:
        phenomenon = PHENOMENA[name]
        print()
        if phenomenon.needs_sinks and not text.marks.any():
            print(f"{name}: no token of this text is a sink of this model; a lower --threshold may find some")
            found[name] = None
            continue
        found[name], example = phenomenon.compute(model, text, args)
        print_rows(name, found[name])
        if args.out:
            phenomenon.draw(found[name], example, Path(args.out, f"{name}.png"))
    if args.json:
        table = {"model": args.model, "data": args.data, "context": args.context, "windows": args.windows,
                 "sinks at": [marks.nonzero()[:, 0].tolist() for marks in text.marks], **found,
                 "versions": {"python": platform.python_version(), "torch": torch.__version__}}
        files.write_json(args.json, table)


def main():
    p = parser()
    with one_line(p):
        run(p.parse_args())


if __name__ == "__main__":
    main()
