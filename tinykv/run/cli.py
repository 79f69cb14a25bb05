"""What the commands share: flags and checks, errors in one line, quantized weights, tables."""
import argparse
import errno
import importlib.util
import math
import os
import re
import shutil
import signal
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

from tinykv import UserError, at_least, did_you_mean, one_of
from tinykv.cache import KVCache
from tinykv.codecs.base import CALIBRATION_WINDOWS
from tinykv.data import load_windows
from tinykv.data.windows import TEXTS
from tinykv.run.prefix import FULL_PRECISION
from tinykv.storage import first_line, is_special
from tinykv.weights import QUANTIZERS, quantize, restore, tensors_of
from tinykv.weights.linear import group_of

EMBEDDED = Path(__file__).parents[1] / "assets" / "tales"
LARGEST_COUNT = 2 ** 31 - 1  # of tokens, windows, bits, ...
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


# How a command begins and ends

class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Adds a flag's default to its help, unless there is none or the help says it itself."""

    def _get_help_string(self, action):
        if action.default is None or action.default is False or "(default: " in action.help:
            return action.help
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """Reports an error in one line, with the nearest word for one that is misspelt."""

    def __init__(self, **settings):
        settings.setdefault("formatter_class", Help)
        super().__init__(**settings)

    def error(self, message):
        end = "" if message.endswith("?") else "; see --help"
        self.exit(2, f"{self.prog}: error: {message}{end}\n")

    def parse_args(self, words=None, namespace=None):
        args, unknown = self.parse_known_args(words, namespace)
        if unknown:
            flag = unknown[0].partition("=")[0]
            flags = re.findall(r"--[\w-]+", self.format_usage())
            self.error(f"unknown argument {flag}{did_you_mean(flag, flags)}")
        return args

    def _check_value(self, action, value):
        if action.choices is not None and value not in action.choices:
            message = f"{value!r} is none of {', '.join(action.choices)}"
            raise argparse.ArgumentError(action, message + did_you_mean(value, action.choices))


@contextmanager
def one_line(p, stopped="stopped", torchrun=False):
    """Around a command's body: what the user can mend ends it with one line and exit status 2.

    torchrun: whether several processes can share the command's work.
    """
    if callable(signal.getsignal(signal.SIGINT)):  # as `stop_early` left it, and not ignored
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.stdout is None:  # it was closed
        sys.stdout = open(os.devnull, "w")
    if hasattr(sys.stdout, "reconfigure"):  # a name that this stdout cannot print is printed escaped
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        if not torchrun and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise UserError("this command is one process; start it without torchrun")
        yield
        sys.stdout.flush()
    except UserError as error:
        p.exit(2, f"{p.prog}: error: {error}\n")
    except (MemoryError, torch.OutOfMemoryError) as error:
        p.exit(2, f"{p.prog}: error: not enough memory ({first_line(error)}); use a smaller --batch, "
                  "--context or model\n")
    except KeyboardInterrupt:
        p.exit(130, f"\n{p.prog}: {stopped}\n")
    except OSError as error:
        # files report their own errors, so this one is about stdout: a closed pipe, or a full disk
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        # Python flushes again when it exits: let it flush into nothing
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.ENOSPC:
            p.exit(2, f"{p.prog}: error: no space is left for what is printed\n")
        sys.exit(1)  # the reader of the pipe has seen enough, as `head` has


@contextmanager
def ranks():
    """Around a command that torchrun may start: the module `ranks`, or None in a single process."""
    if "WORLD_SIZE" not in os.environ:
        yield None
        return
    from tinykv.run import ranks
    with ranks.joined():
        yield ranks


# Flags

def add_model(p):
    p.add_argument("--model", metavar="DIR", default=str(EMBEDDED),
                   help="a Hugging Face checkpoint folder (default: the embedded model)")
    add_device(p)
    p.add_argument("--dtype", choices=DTYPES,
                   help="of the model (default: fp32 on a CPU, bf16 elsewhere)")


def add_device(p):
    default = "cuda" if torch.cuda.is_available() else "cpu"
    p.add_argument("--device", default=default, help="cpu, cuda, cuda:1, ...")


def add_attention(p, triton=False):
    """--attention. triton: the command can also evaluate with the kernels."""
    words = ["plain", "fused"]
    help = "plain: attention line by line, for stepping through; fused: torch's own"
    if triton:
        words.append("triton")
        help += ("; triton: the kernels of kernels.py, from the packed codes, on a GPU "
                 "(calibration stays fused)")
    p.add_argument("--attention", choices=words, default="fused", help=help)


def add_windows(p, windows, longest):
    p.add_argument("--data", metavar="tales|fables|wikitext2|c4|FILE", default="tales",
                   help="the text, or a UTF-8 file")
    p.add_argument("--context", metavar="T", type=int,
                   help=f"tokens of a window (default: the model's, up to {longest})")
    p.add_argument("--windows", metavar="W", type=int, default=windows,
                   help="windows to evaluate on")
    p.add_argument("--calib-windows", metavar="C", type=int,
                   help=f"windows to calibrate on (default: {CALIBRATION_WINDOWS}; more for codebooks "
                        "with weights, whose vectors count unevenly)")


def add_bos(p):
    p.add_argument("--bos", choices=("replace", "none"), default="replace",
                   help="replace: each window's first token becomes <s>; none: windows as cut")


def add_calibration(p):
    p.add_argument("--calib-data", metavar="tales|...|FILE",
                   help="to calibrate on (default: another part of --data); with a text of its own, "
                        "no half of a file is put aside for calibration")
    p.add_argument("--calibration", metavar="FILE",
                   help="read calibrated tables from this file; what it lacks is calibrated and added")


def list_of(kind, several=True):
    """An argparse type: "a,b,c" -> [a, b, c]; with several=False only a single "a" -> [a]."""
    def values(text):
        words = text.split(",")
        # a number such as 1e99999999 would be computed for ever
        endless = re.search(r"\d[eE][+-]?\d{4}", text) or len(text) > 4096
        try:
            found = [kind(word.strip()) for word in words]
            too_large = kind is int and any(abs(value) > LARGEST_COUNT for value in found)
            if (several or len(words) == 1) and not endless and not too_large:
                return found
        except ValueError:
            pass
        text = text if len(text) <= 80 else text[:77] + "..."
        what = {int: "whole number", float: "number", str: "name"}[kind]
        or_list = f", or list of {what}s" if several else ""
        raise argparse.ArgumentTypeError(f"{text!r} is no {what}{or_list}")
    return values


# Checks, and defaults that depend on the model or the device

def check_counts(args, least, *flags):
    """UserError for a flag whose number is below `least`, or far too large. Needs no model, so it
    is called first."""
    counts = {f"--{flag}": getattr(args, flag.replace("-", "_")) for flag in flags}
    at_least(least, **counts)
    for flag, count in {**counts, "--seed": getattr(args, "seed", 0)}.items():
        if count is not None and abs(count) > LARGEST_COUNT:
            raise UserError(f"{flag} must be at most {LARGEST_COUNT}; got a number of "
                            f"{len(str(abs(count)))} digits")


def check_folder(flag, path):
    """UserError if a file could not be written to `path`, which --flag gave."""
    if path is None:
        return
    try:
        special = is_special(Path(path))  # raises for a name that no file can have
        folder = Path(path).resolve().parent
    except (OSError, ValueError) as error:
        raise UserError(f"--{flag} {path[:80]!r} cannot be the name of a file "
                        f"({first_line(error)}); give another") from None
    if not path or Path(path).is_dir():
        raise UserError(f"--{flag} {path!r} is a folder; give the name of a file")
    if special and os.access(path, os.W_OK):
        return
    if not folder.is_dir():
        raise UserError(f"--{flag} {path}: there is no folder {Path(path).parent}")
    if not os.access(folder, os.W_OK):
        raise UserError(f"--{flag} {path}: the folder {Path(path).parent} cannot be written to; "
                        "give another")


def check_different(**paths):
    """UserError if two flags name one file to write. paths: {flag: path or None}."""
    flag_of = {}
    for flag, path in paths.items():
        if path is not None:
            other = flag_of.setdefault(Path(path).resolve(), flag)
            if other != flag:
                raise UserError(f"--{other} and --{flag} are both {path}; give two files")


def check_context(context, config, flag="context"):
    if context > config.max_position_embeddings:
        raise UserError(f"--{flag} {context} is longer than the {config.max_position_embeddings} "
                        "positions that this model was made for; ask for fewer tokens")


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
    if name is None:
        name = "fp32" if device.type == "cpu" else "bf16"
    return DTYPES[name]


def cache_class_of(attention, methods, device):
    """The cache class that --attention evaluates with.

    UserError if triton is not installed, has no GPU, or has no kernel for a method's codec.
    """
    if attention != "triton":
        return KVCache
    if importlib.util.find_spec("triton") is None:
        raise UserError("--attention triton needs the package triton (pip install triton, on "
                        "Linux); or use --attention fused")
    from tinykv.triton_cache import (  # only now: they need triton
        TritonCache,
        check_device,
        check_method,
    )
    check_device(device)
    for method in methods:
        check_method(method)
    return TritonCache


# Text to calibrate on

def calibration_text(args, tokenizer, context, device, most=CALIBRATION_WINDOWS):
    """The calibration windows, tokens (W, T), and a label of them, for files.

    most: the number of windows that what is calibrated asks for, at most; --calib-windows goes
    before it. What asks for fewer takes the first ones.
    """
    source = args.calib_data or args.data
    whole = two_texts(args)
    windows = load_windows(source, tokenizer, context, args.calib_windows or most, "calibration",
                           args.seed, args.bos, whole=whole)
    if whole and source not in TEXTS:
        source = windows.name
    label = (f"{source}, {args.calib_windows or CALIBRATION_WINDOWS} windows of {context} tokens, "
             f"seed {args.seed}, bos {args.bos}")
    return windows.tokens.to(device), label


def two_texts(args):
    """Whether calibration has a text of its own, so that all of --data may be the test."""
    return args.calib_data is not None and args.calib_data != args.data


def calibration_flag(args):
    """Which flag about calibration was given, or None. It is an error if nothing is calibrated."""
    if args.calibration:
        return "--calibration"
    # beside a file, it also says that all of the file is the test
    if args.calib_data and args.data in TEXTS:
        return "--calib-data"
    return None


# Quantized weights

def add_weights(p, several):
    """The flags of weight quantization.

    several: --weights and --w-bits take lists; without --weights, weights are not quantized.
    """
    group = p.add_argument_group("quantized weights")
    names = ", ".join(QUANTIZERS)
    if several:
        more, weights, bits, bits_help = "[,...]", argparse.SUPPRESS, argparse.SUPPRESS, " (default: 4)"
    else:
        more, weights, bits, bits_help = "", "rtn", "3", ""
    group.add_argument("--weights", metavar=f"NAME{more}", type=list_of(str, several),
                       default=weights, help=f"how the linear layers' weights are quantized: {names}")
    group.add_argument("--w-bits", metavar=f"B{more}", type=list_of(int, several),
                       default=bits, help=f"2 to 8{bits_help}")
    group.add_argument("--w-group-size", metavar="G", type=int,
                       help="inputs that share a scale (default: the largest divisor of a layer's "
                            "inputs up to 128)")


def quantizers_of(args, config):
    """Each of --weights at each of --w-bits, by label: {"awq-3": Quantizer}; "awq-3-g64" with groups."""
    # bits and groups belong to --weights
    for flag in ("w_bits", "w_group_size"):
        if not hasattr(args, "weights") and getattr(args, flag, None) is not None:
            raise UserError(f"--{flag.replace('_', '-')} is for quantized weights; give --weights, "
                            "too")
    quantizers = {}
    groups = f"-g{args.w_group_size}" if args.w_group_size else ""
    for name in getattr(args, "weights", []):
        one_of(QUANTIZERS, weights=name)
        # a group must divide the inputs of every linear layer
        heads = config.num_attention_heads * config.head_dim
        for inputs in (config.hidden_size, heads, config.intermediate_size):
            group_of(inputs, args.w_group_size)
        for bits in getattr(args, "w_bits", [4]):
            quantizers[f"{name}-{bits}{groups}"] = QUANTIZERS[name](bits, args.w_group_size)
    return quantizers


def weights_label(weights, quantizers, data):
    """How weights are quantized, for a prefix's file: the quantizer, and its calibration data.

    weights: the label of one of `quantizers`, or None for full precision.
    """
    if weights is None:
        return FULL_PRECISION
    return f"{weights}, {data}" if quantizers[weights].needs_text else weights


def quantized_model(model, name, quantizer, windows, calibration_file):
    """The model with its weights quantized; calibrated ones are read from the file, or added to it.

    windows (W, T): to calibrate on, where `quantizer.needs_text`.
    """
    def quantized_tensors():
        progress = partial(bar, what=name, unit="block")
        return tensors_of(quantize(model, quantizer, windows, progress))

    if quantizer.needs_text:
        tensors = calibration_file.take(f"weights {name}", quantized_tensors)
    else:
        tensors = quantized_tensors()
    return restore(model, quantizer, tensors)


# Output

def bar(windows, what, total=None, unit="window"):
    """A progress bar on stderr, shown after one second, and only on a terminal."""
    return tqdm(windows, what, total, leave=False, unit=unit, delay=1, file=sys.stderr,
                disable=not sys.stderr.isatty())


def figure(value, form):
    """A number formatted for a table; "-" where there is none."""
    if isinstance(value, str):
        return value
    return "-" if value is None else format(value, form)


def print_columns(head, lines, left, matter=(), room=math.inf):
    """A table of words: the heads, then the lines, the first `left` columns flush left.

    matter: heads, those first without which the table says least. In less room (in characters) than
    the table takes, they are printed as far as they fit, and then the others.
    """
    # a column is as wide as its longest word
    widths = [max(len(line[i]) for line in [head, *lines]) for i in range(len(head))]
    shown = columns_that_fit(head, widths, matter, room)
    for line in [head, *lines]:
        words = []
        for i in shown:
            words.append(line[i].ljust(widths[i]) if i < left else line[i].rjust(widths[i]))
        print("  ".join(words))
    hidden = [name for i, name in enumerate(head) if i not in shown]
    if hidden:
        print(f"--wide or --json has {', '.join(hidden)}, too")


def columns_that_fit(head, widths, matter, room):
    """The places in `head` of the columns that fit beside each other, in order."""
    order = [head.index(name) for name in matter]
    order += [i for i in range(len(head)) if i not in order]
    shown = []
    for i in order:
        room -= widths[i]
        if room < 0 and shown:
            break
        shown.append(i)
        room -= 2  # blanks between two columns
    return sorted(shown)


def room_for_table(wide):
    """Characters of a line: those of the terminal, and without one, or with --wide, any number."""
    if wide or not sys.stdout.isatty():
        return math.inf
    return shutil.get_terminal_size().columns
