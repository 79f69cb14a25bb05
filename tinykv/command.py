"""What the commands share: flags, checks of what was asked for, the progress bar, quantized weights."""
import argparse
import errno
import os
import sys
from contextlib import contextmanager
from pathlib import Path

import torch
from tqdm import tqdm

from tinykv import UserError, at_least, one_of
from tinykv.data import load_windows
from tinykv.weights import QUANTIZERS, quantize, restore, tensors_of
from tinykv.weights.linear import group_of

EMBEDDED = Path(__file__).parent / "assets" / "tales"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def __init__(self, **settings):
        super().__init__(**{"formatter_class": Help, **settings})

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {message}; see --help\n")


@contextmanager
def one_line(p, stopped="stopped"):
    """How a command ends: what the user can mend is one line, and exit status 2; Ctrl-C one line, too."""
    try:
        yield
        sys.stdout.flush()
    except UserError as error:
        p.exit(2, f"{p.prog}: error: {error}\n")
    except KeyboardInterrupt:
        p.exit(130, f"\n{p.prog}: {stopped}\n")
    except OSError as error:  # of what is printed, as every file is opened where its faults are known
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python tries again when it ends
        if error.errno == errno.ENOSPC:
            p.exit(2, f"{p.prog}: error: no space is left for what is printed\n")
        sys.exit(1)  # whoever read it has seen enough, as `head` does


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Says a flag's default, where there is one, and its help does not say it in words."""

    def _get_help_string(self, action):
        if action.default is None or action.default is False or "(default: " in action.help:
            return action.help
        return super()._get_help_string(action)


def add_model(p):
    p.add_argument("--model", metavar="DIR", default=str(EMBEDDED),
                   help="a Hugging Face checkpoint folder (default: the embedded model)")
    add_device(p)
    p.add_argument("--dtype", choices=DTYPES, help="of the model (default: fp32 on a CPU, bf16 elsewhere)")


def add_device(p):
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda, cuda:1, ...")


def add_windows(p, windows, longest):
    p.add_argument("--data", metavar="tales|wikitext2|c4|FILE", default="tales", help="the text, or a UTF-8 file")
    p.add_argument("--context", metavar="T", type=int,
                   help=f"tokens of a window (default: the model's, up to {longest})")
    p.add_argument("--windows", metavar="W", type=int, default=windows, help="windows to evaluate on")
    p.add_argument("--calib-windows", metavar="C", type=int, default=16, help="windows to calibrate on")


def add_bos(p):
    p.add_argument("--bos", choices=("replace", "none"), default="replace",
                   help="replace: each window's first token becomes <s>; none: windows as they are cut")


def add_calibration(p):
    p.add_argument("--calib-data", metavar="tales|...|FILE", help="to calibrate on (default: another part of --data)")
    p.add_argument("--calibration", metavar="FILE",
                   help="read what was learned from this file; learn and add to it what it does not have yet")


def dtype_of(name, device):
    """The dtype of a name; without one fp32 on a CPU, where half-precision products are slow, and bf16 elsewhere."""
    return DTYPES[name or ("fp32" if device.type == "cpu" else "bf16")]


def check_context(context, config, flag="context"):
    if context > config.max_position_embeddings:
        raise UserError(f"--{flag} {context} is longer than the {config.max_position_embeddings} positions that this "
                        "model was made for; ask for fewer tokens")


def context_of(args, config, longest):
    """--context, or as many tokens as the model was made for, up to `longest`."""
    context = args.context or min(config.max_position_embeddings, longest)
    check_context(context, config)
    return context


def batch_of(args, tokens):
    """--batch, or as many texts of so many tokens as 4096 tokens are."""
    return args.batch or max(1, 4096 // tokens)


def check_counts(args, least, *flags):
    """What can be seen to be too small before anything is loaded."""
    at_least(least, **{f"--{flag}": getattr(args, flag.replace("-", "_")) for flag in flags})


def check_folder(flag, path):
    """The folder that a file is to be written to has to be there."""
    if path is None:
        return
    folder = Path(path).absolute().parent
    if not path or Path(path).is_dir():
        raise UserError(f"--{flag} {path!r} is a folder; give the name of a file")
    if not folder.is_dir():
        raise UserError(f"--{flag} {path}: there is no folder {Path(path).parent}")
    if not os.access(folder, os.W_OK):
        raise UserError(f"--{flag} {path}: the folder {Path(path).parent} cannot be written to; give another")


def bar(windows, what, total=None, unit="window"):
    """A progress bar on stderr: from the second second on, and only where somebody watches."""
    return tqdm(windows, what, total, leave=False, unit=unit, delay=1, file=sys.stderr,
                disable=not sys.stderr.isatty())


def list_of(kind, several=True):
    """How argparse reads "a,b,c", or a single "a"."""
    def values(text):
        words = text.split(",")
        try:
            if several or len(words) == 1:
                return [kind(word.strip()) for word in words]
        except ValueError:
            pass
        what = {int: "whole number", float: "number", str: "name"}[kind]
        raise argparse.ArgumentTypeError(f"{text!r} is no {what}" + (f", or list of {what}s" if several else ""))
    return values


def calibration_text(args, tokenizer, context, device):
    """The windows to calibrate on (W, T), and what they are, in words."""
    source = args.calib_data or args.data
    text = load_windows(source, tokenizer, context, args.calib_windows, "calibration", args.seed, args.bos)
    return (text.tokens.to(device),
            f"{source}, {args.calib_windows} windows of {context} tokens, seed {args.seed}, bos {args.bos}")


# Quantized weights

def add_weights(p, several):
    """The flags that say how weights are quantized; several: lists of names and of bits."""
    s = p.add_argument_group("quantized weights")
    kinds, more = (list_of(str, several), list_of(int, several)), "[,...]" if several else ""
    s.add_argument("--weights", metavar=f"NAME{more}", type=kinds[0], default=argparse.SUPPRESS if several else "rtn",
                   help=f"how the linear layers' weights are quantized: {', '.join(QUANTIZERS)}")
    s.add_argument("--w-bits", metavar=f"B{more}", type=kinds[1], default=argparse.SUPPRESS if several else "3",
                   help="2 to 8 (default: 4)" if several else "2 to 8")
    s.add_argument("--w-group-size", metavar="G", type=int,
                   help="inputs that share a scale (default: the largest divisor of a layer's inputs up to 128)")


def quantizers_of(args, config):
    """{"awq-3": Quantizer}: each of --weights at each of --w-bits; {"awq-3-g64": ...} where groups are given."""
    found = {}
    for flag in ("w_bits", "w_group_size"):
        if not hasattr(args, "weights") and getattr(args, flag, None) is not None:
            raise UserError(f"--{flag.replace('_', '-')} is for quantized weights; give --weights, too")
    for name in getattr(args, "weights", []):
        one_of(QUANTIZERS, weights=name)
        for inputs in (config.hidden_size, config.num_attention_heads * config.head_dim, config.intermediate_size):
            group_of(inputs, args.w_group_size)
        for bits in getattr(args, "w_bits", [4]):
            label = f"{name}-{bits}" + (f"-g{args.w_group_size}" if args.w_group_size else "")
            found[label] = QUANTIZERS[name](bits, args.w_group_size)
    return found


def weights_in_words(name, quantizer, data):
    """What a model with quantized weights is called, so that a prefix can say whom it was trained for."""
    return f"{name}, {data}" if quantizer.needs_text else name


def quantized(model, name, quantizer, windows, learned):
    """The model with its weights quantized, or what `learned` has of it: what is learned from no text is not kept."""
    def learn():
        return tensors_of(quantize(model, quantizer, windows, lambda blocks: bar(blocks, name, unit="block")))
    return restore(model, quantizer, learned.take(f"weights {name}", learn) if quantizer.needs_text else learn())


def figure(value, form):
    """A number as it stands in a table; "-" where there is none."""
    if isinstance(value, str):
        return value
    return "-" if value is None else format(value, form)


def print_columns(head, lines, left):
    """Lines of words under their heads, the first `left` columns flush left."""
    widths = [max(len(line[i]) for line in [head, *lines]) for i in range(len(head))]
    for line in [head, *lines]:
        print("  ".join(c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths))))
