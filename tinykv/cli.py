"""What the commands share: errors in one line, flags and their checks, quantized weights, columns."""
import argparse
import os
import re
import sys
from contextlib import contextmanager
from functools import partial
from html import escape
from pathlib import Path

import torch
from tqdm import tqdm

from tinykv import UserError, at_least, did_you_mean, hf, one_of
from tinykv.codecs.base import CALIBRATION_WINDOWS
from tinykv.data import load_windows, share_text
from tinykv.files import check_target, first_line, identity
from tinykv.weights import QUANTIZERS, quantize

FULL_PRECISION = "full precision"  # the label of weights that are not quantized
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TRUTH = ["false", "true"]


# How a command begins and ends

class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Adds a flag's default to its help, unless there is none or the help says it itself."""

    def _get_help_string(self, action):
        if action.default is None or action.default is False or "(default: " in action.help:
            return action.help
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """Reports an error in one line, and knows no abbreviations of flags. meant: {what people write: what they mean}."""
    meant = {}

    def __init__(self, **settings):
        super().__init__(**{"formatter_class": Help, "allow_abbrev": False, **settings})

    def parse_known_args(self, words=None, namespace=None):
        # a home directory that no shell has put in, as it was quoted, or stands behind "="
        words = sys.argv[1:] if words is None else words
        words = [re.sub(r"(?<![^=])~(?=/)", os.path.expanduser("~"), word) for word in words]
        for word in words:
            if word.endswith("=--"):  # which argparse takes for no value
                self.error(f"{word}: -- is no value")
        return super().parse_known_args(words, namespace)

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {self.said(message)}; see --help\n")

    def said(self, message):
        """A message on one line, with what a misspelt flag, or choice, may have been."""
        flags = self._option_string_actions
        unknown = set(re.findall(r"--[\w-]+", message)) - {*flags, *self.meant}
        near = [did_you_mean(word, flags) for word in sorted(unknown)]
        near += [f"; did you mean {mean}?" for word, mean in self.meant.items() if word in re.split("[ =]", message)]
        if choice := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            near.append(did_you_mean(choice[1], re.findall(r"[\w-]+", choice[2])))
        return printable(message) + next(filter(None, near), "")


@contextmanager
def one_line(p, stopped="stopped"):
    """Around a command's body: what the user can mend ends it with one line and exit status 2."""
    sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))  # None: closed
    try:
        yield
        sys.stdout.flush()
    except KeyboardInterrupt:
        p.exit(130, f"\n{p.prog}: {stopped}\n")
    except OSError as error:  # what is printed has nowhere to go: the disk is full
        if not isinstance(error, BrokenPipeError):  # the reader of the pipe has seen enough, as `head` has
            print(f"{p.prog}: error: {reason(error)}", file=sys.stderr, flush=True)
        os._exit(1)
    except Exception as error:
        if not isinstance(error, UserError | ModuleNotFoundError) and not is_out_of_memory(error):
            raise
        p.exit(2, f"{p.prog}: error: {reason(error)}\n")


def reason(error):
    """What an exception says, on one line."""
    if isinstance(error, UserError):
        return printable(str(error))
    text = printable(first_line(error))
    if is_out_of_memory(error):
        return f"not enough memory ({text}); use a smaller --batch, --context or model"
    if isinstance(error, ModuleNotFoundError):
        return f"{text}; pip install -r requirements.txt"
    return f"{type(error).__name__}: {text}"


def is_out_of_memory(error):
    """Whether memory ran out: Python's, a GPU's, or a CPU's, of which torch raises a plain RuntimeError."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error)


def printable(text):
    """A text on one line, whatever the names in it: control characters escaped, long words cut."""
    escaped = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return re.sub(r"\S{300,}", lambda word: f"{word[0][:100]}...", escaped)


# Flags

def add_model(p):
    p.add_argument("--model", metavar="DIR|OWNER/NAME", default=str(hf.EMBEDDED),
                   help="a checkpoint folder, or a model on the Hugging Face hub (default: the embedded model)")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu",
                   help="cpu, cuda, cuda:1; several divide the blocks: cuda:0,cuda:1")
    p.add_argument("--dtype", choices=DTYPES, help="of the model (default: fp32 on a CPU, bf16 elsewhere)")


def add_attention(p, *others):
    """--attention. others: those besides plain and fused that the command knows: triton."""
    p.add_argument("--attention", choices=["plain", "fused", *others], default="fused",
                   help="plain: attention line by line, for stepping through; fused: torch's own"
                        + "; triton: the kernels of kernels.py, from the packed codes, on a GPU" * len(others))


def add_windows(p, windows, longest):
    p.add_argument("--data", metavar="tales|fables|wikitext2|c4|FILE", default="tales", help="a text, or a UTF-8 file")
    p.add_argument("--context", metavar="T", type=int, help=f"tokens a window (default: the model's, up to {longest})")
    p.add_argument("--windows", metavar="W", type=int, default=windows, help="windows to evaluate on")
    p.add_argument("--calib-windows", metavar="C", type=int,
                   help=f"windows to calibrate on (default: {CALIBRATION_WINDOWS}; more for codebooks with weights)")


def add_bos(p):
    p.add_argument("--bos", choices=("replace", "none"), default="replace",
                   help="replace: each window's first token becomes <s>; none: windows as cut")


def add_calibration(p):
    p.add_argument("--calib-data", metavar="tales|...|FILE",
                   help="to calibrate on (default: another part of --data; of a file, its second half)")
    p.add_argument("--calibration", metavar="DIR",
                   help="read calibrated tables from this folder; what it lacks is calibrated and added")


def list_of(kind, several=True):
    """An argparse type: "a,b,c" -> [a, b, c]; with several=False a text is one value."""
    def values(text):
        words = text.split(",") if several else [text]
        return [bool(TRUTH.index(word.strip().lower())) if kind is bool else kind(word.strip()) for word in words]
    values.__name__ = kind.__name__  # for argparse's error
    return values


# Checks, and defaults that depend on the model or the device

def check_counts(args, least, *flags):
    """UserError for a flag whose number is below `least`. Needs no model, so it is called first."""
    at_least(least, **{f"--{flag}": getattr(args, flag.replace("-", "_")) for flag in flags})


def check_outputs(args, **kinds):
    """UserError if an output of the command, {flag: kind of file}, cannot be written, would replace what the program
    did not write, or is what another flag names."""
    named = [os.path.realpath(word) for word in vars(args).values() if isinstance(word, str) and "\0" not in word]
    for flag, kind in kinds.items():
        path = getattr(args, flag)
        if path in (None, "-"):
            continue
        if not os.access(Path(path).resolve().parent, os.W_OK):
            raise UserError(f"--{flag} {path}: no file can be written there; give a file name in a folder that exists")
        if named.count(os.path.realpath(path)) > 1:
            raise UserError(f"--{flag} {path}: another flag names this file, too; give each a file of its own")
        if kind != "folder":
            check_target(path, kind)
        elif os.path.exists(path) and not os.path.isdir(path):
            raise UserError(f"--{flag} {path} is a file, and no folder; give a folder")


def check_context(context, config, flag="context"):
    longest = config.max_position_embeddings
    if context > longest:
        raise UserError(f"--{flag} {context} is longer than the {longest} positions that this model was made for")


def context_of(args, config, longest):
    """--context, or as many tokens as the model was made for, up to `longest`."""
    context = args.context or min(config.max_position_embeddings, longest)
    check_context(context, config)
    return context


def batch_of(args, tokens):
    """--batch, or as many texts of so many tokens as 4096 tokens are."""
    return args.batch or max(1, 4096 // tokens)


def dtype_of(name, device):
    """The dtype of a name, or of a device: half-precision products are slow on a CPU."""
    return DTYPES[name or ("fp32" if device.type == "cpu" else "bf16")]


# Text to calibrate on

def calibration_text(args, tokenizer, context, device, test, most=CALIBRATION_WINDOWS, draws=1):
    """The calibration windows, tokens (W, T), and a label of those that weights see, for files. UserError if they share
    text with the test's (W', T'); test: None where they are not known.

    most: the number of windows that what is calibrated asks for, at most; --calib-windows goes before it. What asks for
    fewer takes the first ones. draws: how many times as many are read.
    """
    source = args.calib_data or args.data
    n = draws * (args.calib_windows or most)
    whole = args.calib_data is not None  # of a file: the test is another text
    windows = load_windows(source, tokenizer, context, n, "calibration", args.seed, args.bos, whole=whole)
    if whole and test is not None and share_text(windows.tokens, test):
        raise UserError(f"--calib-data {source} holds text of the test, --data {args.data}; give another text, or "
                        "leave it out, to calibrate on another part of --data")
    of_weights = windows.tokens[:args.calib_windows or CALIBRATION_WINDOWS]
    return windows.tokens.to(device), f"{source} {identity(of_weights)[:16]}"


# Quantized weights

def add_weights(p, several):
    """The flags of weight quantization.

    several: --weights and --w-bits take lists; without --weights, weights are not quantized.
    """
    more = "[,...]" if several else ""
    group = p.add_argument_group("quantized weights")
    group.add_argument("--weights", metavar=f"NAME{more}", type=list_of(str, several),
                       default=None if several else "rtn",
                       help=f"how the linear layers' weights are quantized: {', '.join(QUANTIZERS)}")
    group.add_argument("--w-bits", metavar=f"B{more}", type=list_of(int, several),
                       default=None if several else "3", help="2 to 8" + " (default: 4)" * several)
    group.add_argument("--w-group-size", metavar="G", type=int,
                       help="inputs that share a scale (default: the largest divisor of a layer's inputs up to 128)")


def quantizers_of(args):
    """Each of --weights at each of --w-bits, by label: {"awq-3": Quantizer}; "awq-3-g64" with groups."""
    if not args.weights and (args.w_bits or args.w_group_size):
        raise UserError("--w-bits and --w-group-size are for quantized weights; give --weights, too")
    quantizers = {}
    groups = f"-g{args.w_group_size}" if args.w_group_size else ""
    for name in args.weights or []:
        one_of(QUANTIZERS, weights=name)
        for bits in args.w_bits or [4]:
            quantizers[f"{name}-{bits}{groups}"] = QUANTIZERS[name](bits, args.w_group_size)
    return quantizers


def weights_label(weights, quantizer, data):
    """How weights are quantized, for a prefix's file: the quantizer's label, None for full precision, and its
    calibration data."""
    if weights is None:
        return FULL_PRECISION
    return f"{weights}, {data}" if quantizer.needs_text else weights


def quantized_blocks(model, name, quantizer, windows, kept):
    """The tensors of the model's blocks with quantized weights, for `weights.restore`. Calibrated ones are taken from
    kept `Tables`, or added to them. windows (W, T): to calibrate on, where `quantizer.needs_text`."""
    made_of = identity(windows, quantizer) if quantizer.needs_text else None
    tensors = kept.get(made_of)
    if tensors is None:
        step(f"quantizing weights {name}")
        coded = quantize(model, quantizer, windows, partial(bar, what=name, unit="block"))
        tensors = coded.model["layers"].state_dict()
        kept.put(made_of, tensors)
    return tensors


# Output

def show(line):
    """Print a line, or `Columns`, at once."""
    print(line, flush=True)


def bar(windows, what, total=None, unit="window"):
    """A progress bar on stderr, shown after one second, and only where somebody looks on."""
    return tqdm(windows, what, total, leave=False, unit=unit, delay=1, file=sys.stderr, disable=not shows_bars())


def step(doing):
    """Say on stderr which step begins, where no bar shows it."""
    if not shows_bars():
        note(doing)


def note(text):
    """Tell the user on stderr."""
    print(text, file=sys.stderr, flush=True)


def shows_bars():
    """Whether this is a terminal, or a notebook."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules


def figure(value, form):
    """A number formatted for a table; a word as it is; "-" where there is none."""
    if value is None or isinstance(value, str):
        return value or "-"
    return format(value, form)


class Columns:
    """A table of words, the first `left` columns flush left. widths: of the columns, where lines are still to come."""

    def __init__(self, head, lines, left, widths=None):
        self.head, self.lines, self.left = head, lines, left
        self.widths = widths or [max(len(line[i]) for line in [head, *lines]) for i in range(len(head))]

    def line(self, words):
        """Words as a line of the table."""
        cells = [word.ljust(width) if i < self.left else word.rjust(width)
                 for i, (word, width) in enumerate(zip(words, self.widths))]
        return "  ".join(cells).rstrip()

    def __str__(self):
        return "\n".join(map(self.line, [self.head, *self.lines]))

    def _repr_html_(self):
        rows = ["".join(f"<td>{escape(word)}</td>" for word in words) for words in [self.head, *self.lines]]
        return f"<table>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"
