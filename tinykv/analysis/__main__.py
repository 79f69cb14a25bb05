"""Look at what the methods stand on, on any model and text: tables, figures, and the numbers behind
them.

    python -m tinykv.analysis sinks
    python -m tinykv.analysis all --out docs/figures --json numbers.json
    python -m tinykv.analysis norms keys --model path/to/Llama-2-7b-hf --data wikitext2 --out .
    python -m tinykv.analysis timeline --method "rtn,kivi recent=64" --out .
    python -m tinykv.analysis page --out cache.html
"""
import argparse
import importlib
from pathlib import Path

import torch

from tinykv import UserError, hf, one_of, storage
from tinykv.analysis import figures, page, timeline
from tinykv.analysis.sinks import find_sinks
from tinykv.analysis.walk import Text
from tinykv.codecs.base import CALIBRATION_WINDOWS
from tinykv.data.windows import halves, load_windows
from tinykv.run import cli
from tinykv.run.prefix import open_prefix
from tinykv.run.runs import SETTINGS, all_settings_of, constructor_arguments, load_class

LONGEST = 1024  # tokens of a window, unless told otherwise

NAMES = ("sinks", "outliers", "norms", "cosine", "bias", "keys", "errors", "widths", "prefix", "anchors", "maps",
         "timeline")
PHENOMENA = {name: importlib.import_module(f"tinykv.analysis.{name}") for name in NAMES}  # each is a file
NEED_SINKS = ("outliers", "norms", "cosine", "bias", "widths", "prefix")
NEED_CALIBRATION = ("errors", "widths", "anchors", "timeline", "page")


# The command

class AsWritten(cli.Help, argparse.RawDescriptionHelpFormatter):
    """Leaves the lines of the description and the epilog as they are."""


def parser():
    shown = [f"{name}\n{module.__doc__}" for name, module in {**PHENOMENA, "page": page}.items()]
    p = cli.Parser(
        prog="python -m tinykv.analysis", description=__doc__, formatter_class=AsWritten,
        epilog="\n".join(shown) + "\nall\nall but the page\n\n"
               "A token is a sink if its attention received reaches --threshold in a tenth of all heads "
               "of all layers.")
    p.add_argument("what", nargs="+", metavar="WHAT", choices=(*NAMES, "page", "all"),
                   help=f"{', '.join(NAMES)}, page, or all: see below")
    cli.add_model(p)
    cli.add_attention(p)
    cli.add_windows(p, windows=4, longest=LONGEST)
    cli.add_bos(p)
    own = p.add_mutually_exclusive_group()
    own.add_argument("--text", metavar="FILE",
                     help="look at this text, whole and as it is, in the place of windows of --data")
    own.add_argument("--prefix", metavar="bos|FILE",
                     help="a text that all windows begin with; prefix: of which 0, 1, .. all tokens are exact")
    p.add_argument("--layer", metavar="L", type=int,
                   help="the layer that figures show (default: the middle one)")
    p.add_argument("--threshold", metavar="X", type=float, default=Text.threshold,
                   help="attention received from which a token is a sink of a head")
    p.add_argument("--method", metavar="NAME[,...]",
                   help='timeline, page: methods with their settings, such as "rtn,kivi recent=64" (default: several)')
    p.add_argument("--out", metavar="DIR|FILE",
                   help="draw each as DIR/WHAT.png (default: nothing is drawn); page: the file (default: cache.html)")
    p.add_argument("--json", metavar="PATH", help="also write the numbers as JSON")
    return p


def names_of(args):
    """The phenomena that were asked for, each once: names, or all; or the page alone."""
    names = NAMES if "all" in args.what else tuple(dict.fromkeys(args.what))
    if "page" in names and len(names) > 1:
        raise UserError("page is written alone")
    if args.method and not {"timeline", "page"} & set(names):
        raise UserError("--method is for timeline and page")
    return names


def check(args, config):
    """Errors that can be found before anything is computed."""
    cli.check_counts(args, 1, "windows", "calib-windows")
    if not 0 < args.threshold <= 1:
        raise UserError(f"--threshold is a share of the attention, above 0 and up to 1; got {args.threshold:g}")
    if not 0 <= (args.layer or 0) < config.num_hidden_layers:
        raise UserError(f"--layer {args.layer}: this model has layers 0 to {config.num_hidden_layers - 1}")
    cli.check_folder("json", args.json)
    if args.what == ["page"]:
        cli.check_folder("out", args.out)
    elif args.out and Path(args.out).is_file():
        raise UserError(f"--out {args.out} is a file; give a folder")


def methods_of(words, config):
    """"rtn,kivi recent=64" -> {"rtn": Method, "kivi": Method}."""
    methods = {}
    for word in words.split(","):
        name, *settings = word.split() or [""]
        cls, chosen = load_class(name), {}
        for setting in settings:
            key, _, value = setting.partition("=")
            one_of([x for x in all_settings_of(cls) if x != "prefix"], **{f"a setting of {name}": key})
            kind, *_ = SETTINGS.get(key, (str,))
            try:
                chosen[key] = kind(value)
            except ValueError:
                raise UserError(f"--method {word}: {key} is a number; got {value!r}") from None
        methods[name if name not in methods else word] = cls(config, **constructor_arguments(cls, chosen))
    return methods


# What is looked at

def load_text(args, names, model, tokenizer):
    """The windows and their sinks, and what the phenomena need besides."""
    config, device = model.config, model.lm_head.weight.device
    prefix, calibration = [], None
    if args.prefix:
        prefix = open_prefix(args.prefix, tokenizer).ids
    if args.text:  # whole, as one window
        args.windows = 1
        ids = tokenizer.encode("".join(halves(args.text)))
        if args.bos == "replace" and tokenizer.bos_id is not None:
            ids = [tokenizer.bos_id, *ids]
        args.context = len(ids)
        windows = torch.tensor([ids])  # (1, T)
    cli.check_counts(args, 2, "context")
    args.context = cli.context_of(args, config, LONGEST)
    if not args.text:
        windows = load_windows(args.data, tokenizer, args.context, args.windows, "test", bos=args.bos,
                               prefix=prefix).tokens  # (W, T)
    if set(names) & set(NEED_CALIBRATION):
        n = args.calib_windows or CALIBRATION_WINDOWS
        calibration = load_windows(args.data, tokenizer, args.context, n, "calibration", bos=args.bos).tokens.to(device)
    layer = config.num_hidden_layers // 2 if args.layer is None else args.layer
    windows = windows.to(device)
    marks = find_sinks(model, windows, args.threshold)
    return Text(model, windows, marks, layer, args.threshold, len(prefix), calibration)


# What is printed

def print_table(rows, columns):
    lines = [[cell(row[name], form) for name, (_, form) in columns.items()] for row in rows]
    n_words = sum(form == "" for _, form in columns.values())  # columns of words, which come first
    cli.print_columns([head for head, _ in columns.values()], lines, n_words)


def cell(value, form):
    """A number, or a list of them, formatted for a table."""
    if isinstance(value, list):
        return " ".join(cli.figure(x, form) for x in value) or "none"
    return cli.figure(value, form)


def print_sinks(text, tokenizer):
    """Which tokens of each window are sinks."""
    for w, (window, marks) in enumerate(zip(text.windows.tolist(), text.marks)):
        found = []
        for position in marks.nonzero()[:, 0].tolist():
            token = window[position]
            word = "<s>" if token == tokenizer.bos_id else repr(tokenizer.decode([token]))
            found.append(f"{position} {word}")
        print(f"sinks of window {w}: {', '.join(found) or 'none'}")


def run(args):
    # 1. the model, the text and its sinks
    names = names_of(args)
    device = hf.usable_device(args.device)
    config = hf.load_config(args.model)
    check(args, config)
    methods = {}
    if "timeline" in names:
        methods = methods_of(args.method or timeline.EXAMPLES, config)
    if "page" in names:
        methods = methods_of(args.method or page.EXAMPLES, config)
    tokenizer = hf.load_tokenizer(args.model, config)
    model = hf.load_model(args.model, device, cli.dtype_of(args.dtype, device))
    model.use_attention(args.attention)
    text = load_text(args, names, model, tokenizer)
    text.methods = methods
    print(f"model {args.model}, {model.lm_head.weight.dtype}, {device}")
    print(f"{args.text or args.data}: {args.windows} windows of {args.context} tokens")
    print_sinks(text, tokenizer)

    # 2. the page; or a table for each name, and a figure
    if names == ("page",):
        path = args.out or "cache.html"
        page.write(path, text, tokenizer, Path(args.model).resolve().name)
        print(f"wrote {path}")
        return
    found = {}  # {name: rows}
    for name in names:
        print()
        if name in NEED_SINKS and not text.marks.any() and not (name == "prefix" and text.prefix):
            print(f"{name}: no token of this text is a sink of this model; "
                  "a lower --threshold may find some")
            found[name] = None
            continue
        found[name] = PHENOMENA[name].measure(text)
        print_table(found[name], PHENOMENA[name].COLUMNS)
        if args.out:
            figures.save(PHENOMENA[name].draw(text, found[name]), Path(args.out, f"{name}.png"))
    if args.out:  # the small ones
        for row in found.get("timeline", []):
            figures.save(timeline.draw_small(text, row), Path(args.out, f"timeline-{row['method']}.png"))

    # 3. the numbers
    if args.json:
        sinks = [marks.nonzero()[:, 0].tolist() for marks in text.marks]
        storage.write_json(args.json, {"model": args.model, "data": args.text or args.data, "context": args.context,
                                       "windows": args.windows, "sinks at": sinks, **found})


def main():
    p = parser()
    with cli.one_line(p):
        run(p.parse_args())


if __name__ == "__main__":
    main()
