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

from tinykv import UserError, files, hf, one_of
from tinykv.analysis import page, timeline
from tinykv.analysis.sinks import THRESHOLD, find_sinks
from tinykv.analysis.walk import Text, print_table
from tinykv.codecs.base import CALIBRATION_WINDOWS
from tinykv.data import load_windows
from tinykv.methods.registry import METHODS
from tinykv.run import cli, plots
from tinykv.run.settings import all_settings_of, constructor_arguments, flags_of, load_class

LONGEST = 1024  # tokens of a window, unless told otherwise

NAMES = ("sinks", "outliers", "norms", "cosine", "bias", "keys", "errors", "widths", "prefix", "anchors", "maps",
         "timeline")
PHENOMENA = {name: importlib.import_module(f"tinykv.analysis.{name}") for name in NAMES}  # each is a file
NEED_SINKS = ("outliers", "norms", "cosine", "bias", "errors", "widths", "prefix")
NEED_CALIBRATION = ("errors", "widths", "anchors", "timeline", "page")


# The command

class AsWritten(cli.Help, argparse.RawDescriptionHelpFormatter):
    """Leaves the lines of the description and the epilog as they are."""


def parser():
    shown = [f"{name}\n{module.__doc__}" for name, module in {**PHENOMENA, "page": page}.items()]
    p = cli.Parser(
        prog="python -m tinykv.analysis", description=__doc__, formatter_class=AsWritten,
        epilog="\n".join(shown) + "\nall\nall but the page\n\n"
               f"A token is a sink if its attention received reaches {THRESHOLD} in a tenth of all heads "
               "of all layers.")
    p.add_argument("what", nargs="+", metavar="WHAT", choices=(*NAMES, "page", "all"),
                   help=f"{', '.join(NAMES)}, page, or all: see below")
    cli.add_model(p)
    cli.add_windows(p, windows=4, longest=LONGEST)
    cli.add_bos(p)
    p.add_argument("--layer", metavar="L", type=int,
                   help="the layer that figures show (default: the middle one)")
    p.add_argument("--method", metavar="NAME[,...]",
                   help='timeline, page: methods with their settings, such as "rtn,kivi recent=64" (default: several)')
    p.add_argument("--out", metavar="DIR|FILE",
                   help="draw each as DIR/WHAT.png (default: nothing is drawn); page: the file (default: cache.html)")
    p.add_argument("--json", metavar="PATH", help="also write the numbers as JSON")
    return p


def check(args, names, config):
    """Errors that can be found before anything is computed."""
    cli.check_counts(args, 1, "windows", "calib-windows")
    cli.check_counts(args, 2, "context")
    if not 0 <= (args.layer or 0) < config.num_hidden_layers:
        raise UserError(f"--layer {args.layer}: this model has layers 0 to {config.num_hidden_layers - 1}")
    if "page" in names and len(names) > 1:
        raise UserError("page is written alone")
    if args.method and not {"timeline", "page"} & set(names):
        raise UserError("--method is for timeline and page")
    cli.check_outputs(args, json="tinykv-numbers")
    if "page" in names:
        cli.check_outputs(args, out="tinykv-page")
    elif args.out:
        if Path(args.out).is_file():
            raise UserError(f"--out {args.out} is a file; give a folder")
        for name in names:
            files.check_target(Path(args.out, f"{name}.png"), plots.KIND)


def methods_of(words, config):
    """"rtn,kivi recent=64" -> {"rtn": Method, "kivi": Method}."""
    methods = {}
    for word in words.split(","):
        name, *settings = word.split() or [""]
        cls, chosen = load_class(name), {}
        for setting in settings:
            key, _, value = setting.partition("=")
            one_of([x for x in all_settings_of(cls) if x != "prefix"], **{f"a setting of {name}": key})
            kind, *_ = flags_of({**METHODS, name: cls})[key]
            try:
                chosen[key] = kind(value)
            except ValueError:
                raise UserError(f"--method {word}: {key} is a number; got {value!r}") from None
        methods[name if name not in methods else word] = cls(config, **constructor_arguments(cls, chosen))
    return methods


# What is looked at

def load_text(args, names, model, tokenizer):
    """The windows and their sinks, and what the phenomena need besides."""
    device = model.lm_head.weight.device
    windows = load_windows(args.data, tokenizer, args.context, args.windows, "test", bos=args.bos)
    windows = windows.tokens.to(device)  # (W, T)
    calibration = None
    if set(names) & set(NEED_CALIBRATION):
        n = args.calib_windows or CALIBRATION_WINDOWS
        calibration = load_windows(args.data, tokenizer, args.context, n, "calibration", bos=args.bos)
        calibration = calibration.tokens.to(device)  # (C, T)
    layer = model.config.num_hidden_layers // 2 if args.layer is None else args.layer
    return Text(model, windows, find_sinks(model, windows), layer, calibration)


# What is printed

def print_sinks(text, tokenizer):
    """Which tokens of each window are sinks."""
    for w, (window, marks) in enumerate(zip(text.windows.tolist(), text.marks)):
        found = []
        for position in marks.nonzero()[:, 0].tolist():
            token = window[position]
            word = "<s>" if token == tokenizer.bos_id else repr(tokenizer.decode([token]))
            found.append(f"{position} {word}")
        print(f"sinks of window {w}: {', '.join(found) or 'none'}")


def look(args):
    # 1. the model, the text and its sinks
    names = NAMES if "all" in args.what else tuple(dict.fromkeys(args.what))  # each once
    device = hf.usable_device(args.device)
    config = hf.load_config(args.model)
    check(args, names, config)
    args.context = cli.context_of(args, config, LONGEST)
    methods = {}  # {name: {label: Method}}
    for name, module in (("timeline", timeline), ("page", page)):
        if name in names:
            methods[name] = methods_of(args.method or module.EXAMPLES, config)
    tokenizer = hf.load_tokenizer(args.model, config)
    model = hf.load_model(args.model, device, cli.dtype_of(args.dtype, device))
    text = load_text(args, names, model, tokenizer)
    print(f"model {args.model}, {model.lm_head.weight.dtype}, {device}")
    print(f"{args.data}: {args.windows} windows of {args.context} tokens")
    print_sinks(text, tokenizer)

    # 2. a table for each name, and a figure; or the page
    found = {}  # {name: rows}
    for name in names:
        print()
        text.methods = methods.get(name)
        if name == "page":
            path = args.out or "cache.html"
            page.write(path, text, tokenizer, Path(args.model).resolve().name)
            print(f"wrote {path}")
            continue
        module = PHENOMENA[name]
        if name in NEED_SINKS and not text.marks.any():
            print(f"{name}: no token of this text is a sink of this model")
            found[name] = None
            continue
        found[name] = module.measure(text)
        print_table(found[name], module.COLUMNS)
        if args.out:
            plots.save(module.draw(text, found[name]), Path(args.out, f"{name}.png"))
    if args.out:  # the small ones
        for row in found.get("timeline", []):
            plots.save(timeline.draw_small(text, row), Path(args.out, f"timeline-{row['method']}.png"))

    # 3. the numbers
    if args.json:
        sinks = [marks.nonzero()[:, 0].tolist() for marks in text.marks]
        numbers = {"model": args.model, "data": args.data, "context": args.context, "windows": args.windows,
                   "sinks at": sinks, **found}
        files.write_json(args.json, numbers, "tinykv-numbers")


def main():
    p = parser()
    with cli.one_line(p):
        look(p.parse_args())


if __name__ == "__main__":
    main()
