"""What each method costs in bits and bytes, and in perplexity.

    python eval_ppl.py --method kvsink
    python eval_ppl.py --method all --bits 3 --scheme token-static --protocol stream
    python eval_ppl.py --model path/to/Llama-2-7b-hf --data wikitext2 --context 4096 --method pfn,kvsink
"""
import argparse
import importlib.util
import inspect
import json
import os
import platform
import sys
from pathlib import Path

import torch
from tqdm import tqdm

from tinykv import UserError, checkpoint
from tinykv.cache import PROTOCOLS
from tinykv.codecs import FORMULAS
from tinykv.data import load_windows
from tinykv.evaluate import evaluate
from tinykv.methods import METHODS
from tinykv.methods.base import Method
from tinykv.schemes import SCHEMES

EMBEDDED = Path(__file__).parent / "tinykv" / "assets" / "tales"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def parser():
    p = argparse.ArgumentParser(
        description="Perplexity, answer recall and true size of the KV cache under each method, beside fp16.",
        epilog="A setting reaches every method that takes it; one that no method asked for takes is an error. "
               "One method asked for alone is shown beside the methods it is compared with.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("--model", metavar="DIR", default=str(EMBEDDED), help="a Hugging Face checkpoint folder")
    p.add_argument("--data", metavar="tales|wikitext2|c4|FILE", default="tales", help="the text, or a UTF-8 file")
    p.add_argument("--method", metavar="NAME[,NAME...]", default="kvsink",
                   help="names from --list-methods, 'all', or path/to/file.py:Class")
    p.add_argument("--list-methods", action="store_true", help="print the methods and their settings, and stop")
    p.add_argument("--protocol", choices=PROTOCOLS, default="paper",
                   help="paper: every token is read as its code at once; stream: as in generation")
    p.add_argument("--context", metavar="T", type=int, help="tokens of a window (default: the model's, up to 4096)")
    p.add_argument("--windows", metavar="W", type=int, default=16, help="windows to evaluate on")
    p.add_argument("--calib-windows", metavar="C", type=int, default=16, help="windows to calibrate on")
    p.add_argument("--bos", choices=("replace", "none"), default="replace",
                   help="replace: each window's first token becomes <s>; none: windows as they are cut")
    p.add_argument("--batch", metavar="B", type=int, help="windows at a time (default: about 4096 tokens)")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda, cuda:1, ...")
    p.add_argument("--dtype", choices=DTYPES, help="of the model (default: fp32 on a CPU, bf16 elsewhere)")
    p.add_argument("--seed", type=int, default=0, help="which tales are read")
    p.add_argument("--json", metavar="PATH", help="also write the table as JSON")
    s = p.add_argument_group("settings of the methods (defaults: see --list-methods)")
    s.add_argument("--bits", metavar="B", type=float, help="of keys and values: 1, 1.5 (three levels), 2 to 8, 16")
    s.add_argument("--k-bits", metavar="B", type=float, help="of keys")
    s.add_argument("--v-bits", metavar="B", type=float, help="of values")
    s.add_argument("--scheme", choices=SCHEMES, help="which axis shares a grid, and whether it is learned beforehand")
    s.add_argument("--group-size", metavar="G", type=int, help="channels (per token), or tokens (per channel), a group")
    s.add_argument("--formula", choices=FORMULAS, help="the zero point: the minimum itself, or an integer")
    s.add_argument("--preserve", metavar="N", type=int, help="tokens kept in full precision")
    s.add_argument("--rope", choices=("pre", "post"), help="store keys before or after RoPE")
    s.add_argument("--emergence-layer", metavar="L", type=int, help="kvsink: the block whose output is looked at")
    s.add_argument("--outlier-channel", metavar="C", type=int, help="kvsink: the channel that is looked at")
    return p


SETTINGS = ("k_bits", "v_bits", "scheme", "group_size", "rope", "formula", "preserve", "emergence_layer",
            "outlier_channel")


def settings_of(cls):
    """{name: default} of a method's settings: its constructor's arguments after config."""
    parameters = list(inspect.signature(cls).parameters.values())[1:]
    return {p.name: p.default for p in parameters}


def list_methods():
    for name, cls in METHODS.items():
        module = sys.modules[cls.__module__]
        settings = ", ".join(f"{k}={v}" for k, v in settings_of(cls).items())
        print(f"{name:8} {module.__doc__.splitlines()[0]}\n{'':8} {settings or 'no settings'}")


def load_class(name):
    """A method's class from its name, or from path/to/file.py:Class."""
    if name in METHODS:
        return METHODS[name]
    path, _, attribute = name.rpartition(":")
    if not path.endswith(".py"):
        raise UserError(f"unknown method {name!r}; there are {', '.join(METHODS)}, or path/to/file.py:Class")
    if not os.path.isfile(path):
        raise UserError(f"--method {name}: there is no file {path}")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    cls = getattr(module, attribute, None)
    if not (inspect.isclass(cls) and issubclass(cls, Method)):
        raise UserError(f"--method {name}: {path} has no subclass of tinykv.methods.base.Method named {attribute!r}")
    return cls


def build_methods(args, config):
    """{name: Method}, fp16 first: the methods asked for, and those that a single one is compared with."""
    asked = list(METHODS) if args.method == "all" else args.method.split(",")
    classes = {name: load_class(name) for name in asked}
    given = {name: getattr(args, name) for name in SETTINGS if getattr(args, name) is not None}
    if args.bits is not None:
        given = {"k_bits": args.bits, "v_bits": args.bits, **given}
    for setting in given:
        if not any(setting in settings_of(cls) for cls in classes.values()):
            flag = "--" + (setting if setting not in ("k_bits", "v_bits") or args.bits is None else "bits")
            raise UserError(f"{flag.replace('_', '-')} is not a setting of {', '.join(classes)}; see --list-methods")
    if len(asked) == 1:
        classes = {**{name: METHODS[name] for name in classes[asked[0]].compare}, **classes}
    classes = {"fp16": METHODS["fp16"], **classes}
    return {name: cls(config, **{k: v for k, v in given.items() if k in settings_of(cls)})
            for name, cls in classes.items()}


def rows_of(methods, results, protocol):
    """The results as plain rows, in the order of the table."""
    base = next(iter(results.values())).ppl
    rows = []
    for name, r in results.items():
        m = methods[name]
        rows.append({
            "method": name, "scheme": m.scheme.name if hasattr(m, "scheme") else None, "k_bits": m.k_bits,
            "v_bits": m.v_bits, "preserve": getattr(m, "preserve", 0), "protocol": protocol, "ppl": r.ppl,
            "ppl_se": r.ppl_se, "delta_ppl": r.ppl - base, "kld": r.kl / r.targets, "top1": r.agree / r.targets,
            "recall": r.recall, "bits_nominal": (m.k_bits + m.v_bits) / 2, "bits_true": r.bits,
            "bits_128k": r.bits_far, "cache_bytes": r.cache_bytes, "tokens_per_s": r.tokens / r.seconds,
            "seconds": r.seconds, "offline_bytes": m.offline_bytes})
    return rows


def figure(value, form):
    return "-" if value is None else format(value, form)


def print_table(rows):
    head = ("method", "scheme", "keep", "ppl", "+-", "delta", "KL", "top-1", "recall", "bits", "true", "128K",
            "cache KB", "s")
    lines = [[r["method"], r["scheme"] or "-", str(r["preserve"]), f"{r['ppl']:.3f}", figure(r["ppl_se"], ".3f"),
              f"{r['delta_ppl']:+.3f}", f"{r['kld']:.4f}", f"{r['top1']:.1%}", figure(r["recall"], ".1%"),
              f"{r['bits_nominal']:g}", f"{r['bits_true']:.2f}", f"{r['bits_128k']:.2f}",
              f"{r['cache_bytes'] / 1024:.0f}", f"{r['seconds']:.1f}"] for r in rows]
    widths = [max(len(line[i]) for line in [head, *lines]) for i in range(len(head))]
    for line in [head, *lines]:
        print("  ".join(c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths))))


def check(args):
    """What can be seen to be wrong before anything is loaded."""
    for flag in ("context", "windows", "calib_windows", "batch"):
        value = getattr(args, flag)
        if value is not None and value < (2 if flag == "context" else 1):
            raise UserError(f"--{flag.replace('_', '-')} must be at least {2 if flag == 'context' else 1}; got {value}")
    if args.json and not Path(args.json).absolute().parent.is_dir():
        raise UserError(f"--json {args.json}: there is no folder {Path(args.json).parent}")


def run(args):
    check(args)
    device = checkpoint.usable(args.device)
    dtype = DTYPES[args.dtype or ("fp32" if device.type == "cpu" else "bf16")]
    config = checkpoint.load_config(args.model)
    context = args.context or min(config.max_position_embeddings, 4096)
    if context > config.max_position_embeddings:
        raise UserError(f"--context {context} is longer than the {config.max_position_embeddings} positions that this "
                        "model was made for; ask for fewer tokens")
    methods = build_methods(args, config)
    model, tokenizer = checkpoint.load(args.model, device, dtype)
    windows = load_windows(args.data, tokenizer, context, args.windows, "test", args.seed, args.bos)
    if any(m.needs_calibration for m in methods.values()):
        text = load_windows(args.data, tokenizer, context, args.calib_windows, "calibration", args.seed, args.bos)
        for name, method in methods.items():
            if method.needs_calibration:
                method.calibrate(model, text.tokens.to(device), lambda w, name=name: bar(w, f"calibrating {name}"))
    print(f"model {args.model}: {sum(p.numel() for p in model.parameters()):,} parameters, {dtype}, {device}")
    print(f"data {args.data}: {args.windows} windows of {context} tokens, protocol {args.protocol}, seed {args.seed}")
    for name, method in methods.items():
        if method.describe():
            print(f"{name}: {method.describe()}")
    batch = args.batch or max(1, 4096 // context)
    with bar(None, "evaluating", len(methods) * args.windows) as progress:
        results = evaluate(model, methods, windows, args.protocol, batch, progress)
    rows = rows_of(methods, results, args.protocol)
    print()
    print_table(rows)
    if args.json:
        table = {"rows": rows, "model": args.model, "data": args.data, "context": context, "windows": args.windows,
                 "seed": args.seed, "versions": {"python": platform.python_version(), "torch": torch.__version__}}
        checkpoint.write(Path(args.json), lambda part: part.write_text(json.dumps(table, indent=1) + "\n"))


def bar(windows, what, total=None):
    """A progress bar on stderr: from the second second on, and only where somebody watches."""
    return tqdm(windows, what, total, leave=False, unit="window", delay=1, file=sys.stderr,
                disable=not sys.stderr.isatty())


def main():
    p = parser()
    args = p.parse_args()
    if args.list_methods:
        return list_methods()
    try:
        run(args)
    except UserError as error:
        p.exit(2, f"{p.prog}: error: {error}\n")


if __name__ == "__main__":
    main()
