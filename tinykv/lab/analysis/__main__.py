"""Look at what the methods stand on, on any model and text: tables, figures, and the numbers behind them.

    python -m tinykv.lab.analysis sinks
    python -m tinykv.lab.analysis all --out docs/figures --json numbers.json
    python -m tinykv.lab.analysis norms keys --model path/to/Llama-2-7b-hf --data wikitext2 --out .

`python -m tinykv.lab.analysis.page` writes a page to click on.
"""
import importlib
from pathlib import Path

from tinykv import UserError, hf
from tinykv.lab import cli, files, plots, shared_flags
from tinykv.lab.analysis.load import add_flags, load_model
from tinykv.lab.analysis.sinks import THRESHOLD, find_sinks
from tinykv.lab.analysis.walk import Text, print_table, rows_of
from tinykv.lab.data import load_windows
from tinykv.lab.hf.hub import local_folder

LONGEST = 1024  # tokens of a window, unless told otherwise

NAMES = ("sinks", "outliers", "norms", "cosine", "bias", "keys", "errors", "prefix", "anchors")
PHENOMENA = {name: importlib.import_module(f"tinykv.lab.analysis.{name}") for name in NAMES}  # each is a file
NEED_SINKS = ("outliers", "norms", "cosine", "bias", "errors", "prefix")
NEED_CALIBRATION = ("errors", "anchors")


# The command

def parser():
    about = [f"{name}\n{module.__doc__}\n" for name, module in PHENOMENA.items()]
    p = cli.Parser(
        prog="python -m tinykv.lab.analysis", description=__doc__, epilog="\n".join([
            *about, f"A token is a sink if its attention received reaches {THRESHOLD} in a tenth of all heads."]))
    p.add_argument("what", nargs="+", metavar="WHAT", choices=(*NAMES, "all"),
                   help=f"{', '.join(NAMES)}, or all: see below")
    add_flags(p, windows=4, longest=LONGEST)
    p.add_argument("--layer", metavar="L", type=int, help="the layer that figures show (default: the middle one)")
    p.add_argument("--out", metavar="DIR", help="draw the figures, as DIR/WHAT.png (default: nothing is drawn)")
    p.add_argument("--json", metavar="PATH", help="also write the numbers as JSON")
    return p


def check(args, names, config):
    """Errors that can be found before anything is computed."""
    if not 0 <= (args.layer or 0) < config.num_hidden_layers:
        raise UserError(f"--layer {args.layer}: this model has layers 0 to {config.num_hidden_layers - 1}")
    shared_flags.check_outputs(args, json="tinykv-numbers", out="folder")
    for name in names if args.out else ():
        files.check_target(Path(args.out, f"{name}.png"), plots.KIND)


# What is looked at

def load_text(args, names, model):
    """The windows and their sinks, and what the phenomena need besides."""
    windows = load_windows(args.data, args.tokenizer, args.context, args.windows, "test", bos=args.bos)
    windows = windows.tokens.to(args.device)  # (W, T)
    calibration = shared_flags.calibration_text(args) if {*names} & {*NEED_CALIBRATION} else None  # (C, T)
    layer = model.config.num_hidden_layers // 2 if args.layer is None else args.layer
    return Text(model, windows, find_sinks(model, windows), layer, calibration)


def look(args):
    # 1. the model
    names = NAMES if "all" in args.what else tuple(dict.fromkeys(args.what))  # each once
    check(args, names, hf.load_config(local_folder(args.model)))
    model, tokenizer = load_model(args, LONGEST), args.tokenizer

    # 2. the text and its sinks
    text = load_text(args, names, model)
    print(f"{args.data}: {args.windows} windows of {args.context} tokens")
    sinks_at = [marks.nonzero()[:, 0].tolist() for marks in text.marks]  # positions in each window
    for w, (window, positions) in enumerate(zip(text.windows.tolist(), sinks_at)):
        words = ["<s>" if token == tokenizer.bos_id else repr(tokenizer.decode([token])) for token in window]
        of_window = [f"{position} {words[position]}" for position in positions]
        print(f"sinks of window {w}: {', '.join(of_window) or 'none'}")

    # 3. a table for each name, and a figure
    tables = {}  # {name: rows}
    for name in names:
        print()
        module = PHENOMENA[name]
        if name in NEED_SINKS and not text.marks.any():
            print(f"{name}: no token of this text is a sink of this model")
            tables[name] = None
            continue
        tables[name] = rows_of(module, text)
        print_table(tables[name], module.COLUMNS)
        if args.out and hasattr(module, "draw"):
            plots.save(module.draw(text, tables[name]), Path(args.out, f"{name}.png"))

    # 4. the numbers
    if args.json:
        numbers = {"model": args.model, "data": args.data, "context": args.context, "windows": args.windows,
                   "sinks at": sinks_at, **tables}
        files.write_json(args.json, numbers, "tinykv-numbers")


def main():
    cli.run(parser(), look)


if __name__ == "__main__":
    main()
