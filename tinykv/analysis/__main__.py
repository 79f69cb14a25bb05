"""Look at what the methods stand on, on any model and text: tables, figures, and the numbers behind them.

    python -m tinykv.analysis sinks
    python -m tinykv.analysis all --out docs/figures --json numbers.json
    python -m tinykv.analysis norms keys --model path/to/Llama-2-7b-hf --data wikitext2 --out .
    python -m tinykv.analysis page --out cache.html
    python -m tinykv.analysis page --text texts.txt --data calibration.txt --model path/to/a/model
"""
import argparse
import importlib
import os
import sys
from pathlib import Path

from tinykv import UserError, cli, files, hf, plots
from tinykv.analysis import page
from tinykv.analysis.sinks import THRESHOLD, find_sinks
from tinykv.analysis.walk import Text, print_table
from tinykv.codecs.base import CALIBRATION_WINDOWS
from tinykv.data import load_windows
from tinykv.data.questions import Questions, read_questions

LONGEST = 1024  # tokens of a window, unless told otherwise
WINDOWS = 4  # the same

NAMES = ("sinks", "outliers", "norms", "cosine", "bias", "keys", "errors", "widths", "prefix", "anchors")
PHENOMENA = {name: importlib.import_module(f"tinykv.analysis.{name}") for name in NAMES}  # each is a file
NEED_SINKS = ("outliers", "norms", "cosine", "bias", "errors", "widths", "prefix")
NEED_CALIBRATION = ("errors", "widths", "anchors")


# The command

def parser(words=()):
    """words: of the command line; its help is about the names among them, or about all."""
    about = {**PHENOMENA, "page": page, "all": None}
    named = [name for name in about if {name, "all"} & {*words}] or list(about)
    shown = [f"{name}\n{about[name].__doc__ if about[name] else 'all but the page'}\n" for name in named]
    p = cli.Parser(
        prog="python -m tinykv.analysis", description=__doc__, epilog="\n".join(shown) + "\n"
               f"A token is a sink if its attention received reaches {THRESHOLD} in a tenth of all heads of all "
               f"layers.\nThe default of --windows is {WINDOWS}, and {page.WINDOWS} for the page.")
    p.add_argument("what", nargs="+", metavar="WHAT", choices=(*NAMES, "page", "all"),
                   help=f"{', '.join(NAMES)}, page, or all: see below")
    cli.add_model(p)
    cli.add_windows(p, windows=None, longest=LONGEST)
    cli.add_bos(p)
    p.add_argument("--layer", metavar="L", type=int, help="the layer that figures show (default: the middle one)")
    p.add_argument("--text", metavar="FILE",
                   help="page: texts to choose from, a blank line between them; the last word of each is the answer to "
                        "its question (default: windows of --data)")
    p.add_argument("--out", metavar="DIR|FILE",
                   help="draw each as DIR/WHAT.png (default: nothing is drawn); page: the file (default: cache.html)")
    p.add_argument("--json", metavar="PATH", help="also write the numbers as JSON")
    of = {"text": {"page"}, "layer": {*NAMES}, "calib_windows": {*NEED_CALIBRATION, "page"}}
    for action in p._actions:
        if of.get(action.dest, about.keys()).isdisjoint(named):
            action.help = argparse.SUPPRESS
    return p


def check(args, names, config):
    """Errors that can be found before anything is computed."""
    cli.check_counts(args, 1, "windows", "calib-windows")
    cli.check_counts(args, 2, "context")
    if not 0 <= (args.layer or 0) < config.num_hidden_layers:
        raise UserError(f"--layer {args.layer}: this model has layers 0 to {config.num_hidden_layers - 1}")
    if "page" in names and len(names) > 1:
        raise UserError("page is written alone")
    if args.text and "page" not in names:
        raise UserError("--text is for page")
    cli.check_outputs(args, json="tinykv-numbers")
    if "page" in names:
        cli.check_outputs(args, out="tinykv-page")
    elif args.out:
        there = next(path for path in Path(args.out, "x").resolve().parents if path.exists())
        if not os.access(f"{there}/", os.W_OK):  # nor is a file a folder
            raise UserError(f"--out {args.out}: no figures can be written there; give a folder")
        for name in names:
            files.check_target(Path(args.out, f"{name}.png"), plots.KIND)


# What is looked at

def load_text(args, names, model, tokenizer):
    """The windows and their sinks, and what the phenomena need besides."""
    device = model.lm_head.weight.device
    windows = load_windows(args.data, tokenizer, args.context, args.windows, "test", bos=args.bos)
    windows = windows.tokens.to(device)  # (W, T)
    calibration = calibration_of(args, tokenizer, device) if {*names} & {*NEED_CALIBRATION} else None
    layer = model.config.num_hidden_layers // 2 if args.layer is None else args.layer
    return Text(model, windows, find_sinks(model, windows), layer, calibration)


def calibration_of(args, tokenizer, device):
    n = args.calib_windows or CALIBRATION_WINDOWS
    windows = load_windows(args.data, tokenizer, args.context, n, "calibration", bos=args.bos)
    return windows.tokens.to(device)  # (C, T)


# What is printed

def print_sinks(text, tokenizer):
    """Which tokens of each window are sinks."""
    for w, (window, marks) in enumerate(zip(text.windows.tolist(), text.marks)):
        words = ["<s>" if token == tokenizer.bos_id else repr(tokenizer.decode([token])) for token in window]
        found = [f"{position} {words[position]}" for position in marks.nonzero()[:, 0].tolist()]
        print(f"sinks of window {w}: {', '.join(found) or 'none'}")


def look(args):
    # 1. the model
    names = NAMES if "all" in args.what else tuple(dict.fromkeys(args.what))  # each once
    device = hf.usable_device(args.device)
    config = hf.load_config(args.model)
    is_page = names == ("page",)
    args.out = args.out or ("cache.html" if is_page else None)
    check(args, names, config)
    args.windows = args.windows or (page.WINDOWS if is_page else WINDOWS)
    args.context = cli.context_of(args, config, page.LONGEST if is_page else LONGEST)
    tokenizer = hf.load_tokenizer(args.model, config)
    model = hf.load_model(args.model, device, cli.dtype_of(args.dtype, device))
    print(f"model {args.model}, {model.lm_head.weight.dtype}, {device}")
    if is_page:
        return write_page(args, model, tokenizer)

    # 2. the text and its sinks
    text = load_text(args, names, model, tokenizer)
    print(f"{args.data}: {args.windows} windows of {args.context} tokens")
    print_sinks(text, tokenizer)

    # 3. a table for each name, and a figure
    found = {}  # {name: rows}
    for name in names:
        print()
        module = PHENOMENA[name]
        if name in NEED_SINKS and not text.marks.any():
            print(f"{name}: no token of this text is a sink of this model")
            found[name] = None
            continue
        found[name] = module.measure(text)
        print_table(found[name], module.COLUMNS)
        if args.out:
            plots.save(module.draw(text, found[name]), Path(args.out, f"{name}.png"))

    # 4. the numbers
    if args.json:
        sinks = [marks.nonzero()[:, 0].tolist() for marks in text.marks]
        numbers = {"model": args.model, "data": args.data, "context": args.context, "windows": args.windows,
                   "sinks at": sinks, **found}
        files.write_json(args.json, numbers, "tinykv-numbers")


def write_page(args, model, tokenizer):
    """The page, and its numbers."""
    device = model.lm_head.weight.device
    if args.text:
        texts = read_questions(args.text, tokenizer, page.LONGEST)
    else:
        windows = load_windows(args.data, tokenizer, args.context, args.windows, "test", bos=args.bos)
        texts = Questions(windows.tokens, [args.context] * args.windows, windows.answers)
    texts.tokens = texts.tokens.to(device)  # (W, T)
    content = {"model": Path(args.model).absolute().name,
               **page.content(model, tokenizer, texts, calibration_of(args, tokenizer, device))}
    page.write(args.out, content)
    print(f"wrote {args.out}")
    if args.json:
        files.write_json(args.json, content, "tinykv-numbers")


def main():
    p = parser(sys.argv[1:])
    with cli.one_line(p):
        look(p.parse_args())


if __name__ == "__main__":
    main()
