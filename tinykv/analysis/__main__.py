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
import inspect
import platform
import textwrap
from pathlib import Path

import torch

from tinykv import UserError, hf, storage
from tinykv.analysis import anchors, figures, page, sinks, timeline
from tinykv.analysis.walk import Text
from tinykv.codecs import make_codecs
from tinykv.codecs.affine import FORMULAS
from tinykv.codecs.base import CALIBRATION_WINDOWS
from tinykv.data.windows import halves, load_windows
from tinykv.methods.antkv import AnTKV
from tinykv.run import cli
from tinykv.run.prefix import open_prefix
from tinykv.run.runs import SETTINGS, all_settings_of, constructor_arguments, load_class
from tinykv.weights import quantize

LONGEST = 1024  # tokens of a window, unless told otherwise

NAMES = ("sinks", "outliers", "norms", "cosine", "bias", "keys", "errors", "widths", "prefix", "anchors", "maps",
         "timeline")
PHENOMENA = {name: importlib.import_module(f"tinykv.analysis.{name}") for name in NAMES}  # each is a file
NEED_SINKS = ("outliers", "norms", "cosine", "bias", "widths", "prefix")
NEED_CALIBRATION = ("errors", "widths", "prefix", "anchors", "timeline", "page")

#   the flags that only some phenomena take
FLAGS = {"group_size": ("errors", "widths"), "formula": ("errors", "widths"), "vq": ("anchors",),
         "method": ("timeline", "page"), "prefix": ("prefix",), "weights": ("prefix",), "w_bits": ("prefix",),
         "w_group_size": ("prefix",)}


# The command

class HelpWithTable(cli.Help, argparse.RawDescriptionHelpFormatter):
    """Leaves the lines of the description and the epilog as they are."""


def parser():
    shown = []
    for name, module in {**PHENOMENA, "page": page}.items():
        text = f"{name:10}" + " ".join(module.__doc__.split("\n\n")[0].split())
        shown.append(textwrap.fill(text, 100, initial_indent="  ", subsequent_indent=" " * 12))
    p = cli.Parser(
        prog="python -m tinykv.analysis", formatter_class=HelpWithTable,
        description=__doc__.split("\n\n")[0],
        epilog="what to look at:\n" + "\n".join(shown) + "\n  all       all but the page\n\n"
               "A token is a sink if its attention received reaches --threshold in a tenth of all heads "
               "of all layers.")
    p.add_argument("what", nargs="+", metavar="WHAT", help=f"{', '.join(PHENOMENA)}, page, or all: see below")
    cli.add_model(p)
    cli.add_attention(p)
    cli.add_windows(p, windows=4, longest=LONGEST)
    cli.add_bos(p)
    p.add_argument("--text", metavar="FILE",
                   help="look at this text, whole and as it is, in the place of windows of --data")
    p.add_argument("--layer", metavar="L", type=int,
                   help="the layer that figures show (default: the middle one)")
    p.add_argument("--threshold", metavar="X", type=float, default=sinks.THRESHOLD,
                   help="attention received from which a token is a sink of a head")
    p.add_argument("--group-size", metavar="G", type=int, default=16,
                   help="errors, widths: channels, or tokens, of a group (default: 16, the paper's)")
    p.add_argument("--formula", choices=FORMULAS, default="offset", help="errors, widths: the zero point")
    p.add_argument("--prefix", metavar="bos|FILE",
                   help="prefix: a text that all windows begin with, of which 0, 1, .. all tokens are exact")
    p.add_argument("--vq", metavar="dNmM", default="d8m256", help="anchors: format of the codebooks")
    p.add_argument("--method", metavar="NAME[,...]",
                   help='timeline, page: methods with their settings, such as "rtn,kivi recent=64" (default: several)')
    cli.add_weights(p, several=False)
    p.add_argument("--out", metavar="DIR|FILE",
                   help="draw each as DIR/WHAT.png (default: nothing is drawn); page: the file (default: cache.html)")
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
        if name not in PHENOMENA and names != ["page"]:
            raise UserError(f"unknown phenomenon {name!r}; there are {', '.join(PHENOMENA)}, all, and page alone")
    defaults = parser().parse_args(args.what)
    for flag, takers in FLAGS.items():
        given = getattr(args, flag) != getattr(defaults, flag)
        if given and not set(takers) & set(names):
            raise UserError(f"--{flag.replace('_', '-')} is a setting of {' and '.join(takers)}, "
                            f"and not of {', '.join(names)}")
    cli.check_counts(args, 2, "context")
    cli.check_counts(args, 1, "windows", "calib-windows", "group-size", "w-group-size")
    if not 0 < args.threshold <= 1:
        raise UserError("--threshold is a share of the attention, above 0 and up to 1; "
                        f"got {args.threshold:g}")
    if args.text is not None and args.prefix is not None:
        raise UserError("--prefix begins windows of --data, and --text is a whole text; give one of them")
    cli.check_folder("json", args.json)
    if names == ["page"]:
        args.out = args.out or "cache.html"
        cli.check_folder("out", args.out)
    elif args.out and Path(args.out).exists() and not Path(args.out).is_dir():
        raise UserError(f"--out {args.out} is a file; give a folder")


def check_settings(args, names, config):
    """Errors of settings that do not fit the model: before anything is computed."""
    cli.quantizers_of(args, config)
    if args.layer is not None and not 0 <= args.layer < config.num_hidden_layers:
        raise UserError(f"--layer {args.layer}: this model has layers 0 to {config.num_hidden_layers - 1}")
    if "timeline" in names or "page" in names:
        args.methods = methods_of(args.method or (timeline if "timeline" in names else page).EXAMPLES, config)
    if "anchors" in names:
        AnTKV(config, args.vq)
        anchors.check(config, args.context)
    if "errors" in names or "widths" in names:
        make_codecs(config, "token-dynamic", 2, 2, group_size=args.group_size, formula=args.formula)


def methods_of(words, config):
    """"rtn,kivi recent=64" -> {"rtn": Method, "kivi": Method}."""
    methods = {}
    for word in words.split(","):
        name, *settings = word.split()
        cls, chosen = load_class(name), {}
        for setting in settings:
            key, _, value = setting.partition("=")
            if key not in all_settings_of(cls) or key == "prefix":
                raise UserError(f"--method {word}: {key} is no setting of {name}")
            kind, *_ = SETTINGS.get(key, (str,))
            try:
                chosen[key] = kind(value)
            except ValueError:
                raise UserError(f"--method {word}: {key} is a number; got {value!r}") from None
        methods[name if name not in methods else word] = cls(config, **constructor_arguments(cls, chosen))
    return methods


def ids_of(path, tokenizer, bos):
    """A text file whole, as ids, with `<s>` before it unless bos is "none"."""
    first, second = halves(path)
    ids = tokenizer.encode(first + second)
    if bos == "replace" and tokenizer.bos_id is not None:
        ids = [tokenizer.bos_id, *ids]
    if len(ids) < 2:
        raise UserError(f"{path} has {len(ids)} tokens; give a text of 2 or more")
    return ids


# What is looked at

def load_text(args, names, model, tokenizer):
    """The windows and their sinks, and what the phenomena need besides."""
    device = model.lm_head.weight.device
    begin = [] if args.prefix is None else open_prefix(args.prefix, tokenizer, model.config).ids

    def load(n, split, prefix=()):
        """n windows of a split: (n, T)."""
        windows = load_windows(args.data, tokenizer, args.context, n, split, bos=args.bos, prefix=prefix)
        return windows.tokens.to(device)

    def find_sinks(windows):
        return sinks.find_sinks(model, windows, args.threshold, progress)

    if args.text is None:
        windows = load(args.windows, "test", begin)  # (W, T)
    else:
        windows = torch.tensor([args.text_ids], device=device)  # (1, T)
    layer = model.config.num_hidden_layers // 2 if args.layer is None else args.layer
    text = Text(model, windows, find_sinks(windows), layer, progress, prefix=len(begin))
    if set(names) & set(NEED_CALIBRATION):
        text.calibration = load(args.calib_windows or CALIBRATION_WINDOWS, "calibration")  # (C, T)
    if "errors" in names or "widths" in names:
        text.calibration_marks = find_sinks(text.calibration)  # (C, T)
    if "prefix" in names:
        quantizer, = cli.quantizers_of(args, model.config).values()
        text.quantized = quantize(model, quantizer, text.calibration)
    return text


def progress(windows):
    """Wraps a loop over windows in a progress bar."""
    return cli.bar(windows, "analysis")


def settings_of(name, args):
    """What a phenomenon is told besides the text: the arguments of its `measure`."""
    _, *settings = inspect.signature(PHENOMENA[name].measure).parameters
    return {setting: getattr(args, setting) for setting in settings}


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


def draw(text, name, rows, args):
    """The figure of a phenomenon; of the timeline, a small one for each method besides."""
    module = PHENOMENA[name]
    shown = rows[:6] if name == "timeline" and args.method is None else rows
    figures.save(module.draw(text, shown), Path(args.out, f"{name}.png"))
    if name == "timeline":
        for row in rows:
            figures.save(timeline.draw_small(text, row), Path(args.out, f"timeline-{row['method']}.png"))


def print_sinks(text, tokenizer):
    """Which tokens of each window are sinks."""
    for w, (window, marks) in enumerate(zip(text.windows.tolist(), text.marks)):
        found = []
        for position in marks.nonzero()[:, 0].tolist():
            token = window[position]
            word = "<s>" if token == tokenizer.bos_id else repr(tokenizer.decode([token]))
            found.append(f"{position} {word}")
        print(f"sinks of window {w}: {storage.listed(found) or 'none'}")


def run(args):
    # 1. check what can be checked before anything is loaded
    names = names_of(args.what)
    check(args, names)
    device = hf.usable_device(args.device)
    dtype = cli.dtype_of(args.dtype, device)
    config = hf.load_config(args.model)
    tokenizer = hf.load_tokenizer(args.model, config)
    if args.text is None:
        args.context = cli.context_of(args, config, LONGEST)
    else:
        args.text_ids = ids_of(args.text, tokenizer, args.bos)
        args.context, args.windows = len(args.text_ids), 1
        cli.check_context(args.context, config, "text")
    check_settings(args, names, config)

    # 2. the model, the text and its sinks
    model = hf.load_model(args.model, device, dtype)
    model.use_attention(args.attention)
    text = load_text(args, names, model, tokenizer)
    n_parameters = sum(p.numel() for p in model.parameters())
    print(f"model {args.model}: {n_parameters:,} parameters, {dtype}, {device}")
    if args.text is None:
        print(f"data {args.data}: {args.windows} windows of {args.context} tokens")
    else:
        print(f"text {args.text}: {args.context} tokens")
    print_sinks(text, tokenizer)

    # 3. the page; or a table for each name, and a figure
    if names == ["page"]:
        about = f"Model {Path(args.model).resolve().name}; where the keys of layer {text.layer} are."
        page.write(args.out, text, args.methods, tokenizer, about)
        print(f"wrote {args.out}")
        return
    found = {}  # {name: rows}
    for name in names:
        print()
        if name in NEED_SINKS and not text.marks.any() and not (name == "prefix" and text.prefix):
            print(f"{name}: no token of this text is a sink of this model; "
                  "a lower --threshold may find some")
            found[name] = None
            continue
        module = PHENOMENA[name]
        found[name] = module.measure(text, **settings_of(name, args))
        print_table(found[name], module.COLUMNS)
        if args.out:
            draw(text, name, found[name], args)

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
    with cli.one_line(p):
        run(p.parse_args())


if __name__ == "__main__":
    main()
