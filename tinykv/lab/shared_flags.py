"""The flags that several commands have, their checks, defaults that depend on the model or the device, and the texts to
evaluate and to calibrate on."""
import importlib.util
import os
from pathlib import Path

import torch

from tinykv import UserError, at_least, hf, one_of
from tinykv.codecs.base import CALIBRATION_WINDOWS
from tinykv.hf.config import Unsupported
from tinykv.lab.data import load_windows, share_text
from tinykv.lab.files import check_target
from tinykv.lab.hf.hub import local_folder
from tinykv.lab.weights import QUANTIZERS

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TRUTH = ["false", "true"]


def add_model(p):
    p.add_argument("--model", metavar="DIR|OWNER/NAME", default=str(hf.EMBEDDED),
                   help="a checkpoint folder, or a model on the Hugging Face hub (default: the embedded model)")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu",
                   help="cpu, cuda, cuda:1; several divide the blocks: cuda:0,cuda:1")
    p.add_argument("--dtype", choices=DTYPES, help="of the model (default: fp32 on a CPU, bf16 elsewhere)")


def add_attention(p, *others):
    """--attention. others: those besides plain and fused that the command knows: triton, compiled."""
    words = {"plain": "attention line by line, for stepping through", "fused": "torch's own",
             "triton": "the kernels of kernels.py, from the packed codes, on a GPU",
             "compiled": "also from the packed codes, a token at a time, in loops that torch compiles"}
    choices = ["plain", "fused", *others]
    p.add_argument("--attention", choices=choices, default="fused",
                   help="; ".join(f"{word}: {words[word]}" for word in choices))


def add_windows(p, windows, longest, count=int):
    """count: what makes --windows of its word."""
    p.add_argument("--data", metavar="tales|fables|wikitext2|c4|FILE", default="tales", help="a text, or a UTF-8 file")
    p.add_argument("--context", metavar="T", type=int, help=f"tokens a window (default: the model's, up to {longest})")
    p.add_argument("--windows", metavar="W", type=count, default=windows,
                   help="windows to evaluate on" + ", or all of a text" * (count is not int))
    p.add_argument("--calib-windows", metavar="C", type=int,
                   help=f"windows to calibrate on (default: {CALIBRATION_WINDOWS}; more for codebooks with weights)")


def add_bos(p, *others):
    """--bos. others: those besides replace and none that the command knows: given."""
    p.add_argument("--bos", choices=("replace", *others, "none"), default="replace",
                   help="replace: each window's first token becomes <s>; none: windows as cut"
                        + "; given: as replace, but the token after <s> is not predicted" * len(others))


def add_calibration(p):
    p.add_argument("--calib-context", metavar="T", type=int,
                   help="tokens of a window to calibrate on (default: --context)")
    p.add_argument("--calib-data", metavar="tales|...|FILE",
                   help="to calibrate on (default: another part of --data; of a file, its second half)")
    p.add_argument("--calibration", metavar="DIR",
                   help="read calibrated tables from this folder; what it lacks is calibrated and added")


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


def count_or_all(text):
    """An argparse type: "all" -> None."""
    return None if text == "all" else int(text)


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
    """UserError if an output of the command, {flag: kind of file}, cannot be written, or would replace what the program
    did not write, or another output."""
    places = {}  # {path: flag}
    for flag, kind in kinds.items():
        path = getattr(args, flag)
        if path is not None and (other := places.setdefault(os.path.realpath(path), flag)) != flag:
            raise UserError(f"--{flag} {path}: --{other} writes there, too; give each a file of its own")
        if path is None or kind == "folder" and os.path.isdir(path):  # which may hold all tables, read-only
            continue
        if not os.access(f"{Path(path).resolve().parent}/", os.W_OK):  # nor for a file in the place of a folder
            raise UserError(f"--{flag} {path}: no file can be written there; give a file name in a folder that exists")
        if kind != "folder":
            check_target(path, kind)
        elif os.path.exists(path):
            raise UserError(f"--{flag} {path} is a file, and no folder; give a folder")


def check_context(context, config, flag="context"):
    longest = config.positions
    if context > longest:
        raise UserError(f"--{flag} {context} is longer than the {longest} positions that this model was made for")


def set_up(args, longest, loaded=None):
    """Add to a command's flags what its model and the machine decide: its `folder`, `config`, `tokenizer`, `dtype`,
    `context` and the `devices` that the layers are on. Tokens go to the first of these, `device`.

    longest: tokens of a window, unless told otherwise, or as many as the model was made for. loaded: a (model,
    tokenizer) to use instead of --model.
    """
    check_counts(args, 1, "windows", "calib-windows")
    check_counts(args, 2, "context", "calib-context")
    if not loaded:
        args.devices = hf.usable_devices(args.device)
        # half-precision products are slow on a CPU
        args.dtype = DTYPES[args.dtype or ("fp32" if args.devices[0].type == "cpu" else "bf16")]
        args.folder = local_folder(args.model)
        loaded = through_transformers(args)
    args.loaded = loaded
    if loaded:
        model, args.tokenizer = loaded
        if not hasattr(args.tokenizer, "bos_id"):
            raise UserError(f"model is a folder, or (model, tokenizer) as hf.load gives them; got "
                            f"{args.tokenizer!r} for a tokenizer")
        args.config, weight = model.config, model.lm_head.weight
        args.devices, args.dtype = [weight.device], weight.dtype
    else:
        args.config = hf.load_config(args.folder)
        args.tokenizer = hf.load_tokenizer(args.folder, args.config)
    args.device = args.devices[0]
    args.context = args.context or min(args.config.positions, longest)
    check_context(args.context, args.config)
    args.calib_context = args.calib_context or args.context
    check_context(args.calib_context, args.config, "calib-context")


def through_transformers(args):
    """What transformers makes of --model, (Decoder, Tokenizer): where --through asks for it, or tinykv does not
    implement the model. Else None."""
    through, why = getattr(args, "through", "tinykv"), "--through transformers"
    if through == "tinykv":
        return None
    try:
        hf.load_config(args.folder)
        if through is None:
            return None
    except Unsupported as error:
        why = str(error)
    if importlib.util.find_spec("transformers") is None:
        raise UserError(f"{why}; transformers runs other decoders: pip install transformers")
    refused = {"attention": args.attention != "fused", "weights": args.weights, "calibration": args.calibration,
               "device": len(args.devices) > 1 and "several devices"}
    for flag in filter(refused.get, refused):
        raise UserError(f"--{flag} is for models that tinykv runs, and this one runs through transformers ({why})")
    from tinykv.lab.hf import decoder  # only now: it needs transformers
    return decoder.load(args.folder, args.devices[0], args.dtype)


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


def calibration_text(args, n=None, test=None):
    """The windows that a command calibrates on, after `set_up`: tokens (n, T); n: --calib-windows, unless told
    otherwise. UserError if they share text with those that it tests on, (W, T)."""
    n = n or args.calib_windows or CALIBRATION_WINDOWS
    whole = args.calib_data is not None  # of a file: the test is another text
    source = args.calib_data if whole else args.data
    windows = load_windows(source, args.tokenizer, args.calib_context, n, "calibration", args.seed, args.bos,
                           whole=whole)
    tokens = windows.tokens.to(args.device)
    if whole and test is not None and share_text(tokens, test):
        raise UserError(f"--calib-data {source} holds text of the test, --data {args.data}; give another text, or "
                        "leave it out, to calibrate on another part of --data")
    return tokens


def test_text(args, entries):
    """The `Windows` to evaluate on, which all begin with the longest prefix."""
    prefixes = [entry.method.prefix for entry in entries.values() if entry.method.prefix]
    longest = max([p.ids for p in prefixes], key=len, default=[])
    for p in prefixes:
        if p.ids != longest[:len(p.ids)]:
            raise UserError("all methods read the same windows, so each prefix must be the beginning of the longest; "
                            f"{p} is not")
    longest = [] if longest == [args.tokenizer.bos_id] else longest  # BOS takes the place of a window's first token
    windows = load_windows(args.data, args.tokenizer, args.context, args.windows, "test", args.seed, args.bos,
                           longest)
    args.windows = len(windows.tokens)
    return windows.predicted_from(args.prompt or 1)


def batch_of(batch, tokens):
    """--batch, or as many texts of so many tokens as 4096 tokens are."""
    return batch or max(1, 4096 // tokens)
