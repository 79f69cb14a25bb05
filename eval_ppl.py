"""What each method costs in bits and bytes, and in perplexity.

    python eval_ppl.py --method kvsink
    python eval_ppl.py --method all --bits 3 --scheme token-static --protocol stream
    python eval_ppl.py --method pfn,kvsink --scheme kvquant --outliers 0,0.1,0.5,1
    python eval_ppl.py --model path/to/Llama-2-7b-hf --data wikitext2 --context 4096 --method pfn,kvsink
"""
import argparse
import importlib.util
import inspect
import itertools
import json
import os
import platform
import sys
import traceback
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from tinykv import UserError, checkpoint, figures, files
from tinykv.cache import PROTOCOLS, KVCache
from tinykv.calibrate import Learned
from tinykv.command import (
    Parser,
    add_bos,
    add_calibration,
    add_model,
    add_weights,
    add_windows,
    bar,
    batch_of,
    calibration_text,
    check_counts,
    check_folder,
    context_of,
    dtype_of,
    figure,
    list_of,
    one_line,
    print_columns,
    quantized,
    quantizers_of,
    weights_in_words,
)
from tinykv.data import load_windows
from tinykv.evaluate import evaluate
from tinykv.intact import open_prefix
from tinykv.methods import METHODS
from tinykv.methods.base import Method
from tinykv.methods.intactkv import EXACT
from tinykv.schemes import SCHEMES, settings_of_scheme
from tinykv.weights import weight_bytes


def parser(own=None):
    """own: settings of methods in files of the user's, as SETTINGS."""
    p = Parser(
        description="Perplexity, answer recall and true size of the KV cache under each method, beside fp16.",
        epilog="A setting reaches every method that takes it; one that no method asked for takes is an error. "
               "One method asked for alone is shown beside those it is compared with, if they can take its settings.")
    p.add_argument("--method", metavar="NAME[,NAME...]", default="kvsink",
                   help="names from --list-methods, 'all', or path/to/file.py:Class")
    p.add_argument("--list-methods", action="store_true", help="print the methods and their settings, and stop")
    p.add_argument("--protocol", choices=PROTOCOLS, default="paper",
                   help="paper: every token is read as its code at once; stream: as in generation")
    add_model(p)
    add_windows(p, windows=16, longest=4096)
    add_bos(p)
    add_calibration(p)
    p.add_argument("--batch", metavar="B", type=int, help="windows at a time (default: about 4096 tokens)")
    p.add_argument("--backend", choices=("torch", "triton"), default="torch",
                   help="how attention reads the cache. torch: decode it, then attend; triton: the kernels of "
                        "kernels.py, from the packed codes, on a GPU (calibration stays torch)")
    p.add_argument("--seed", type=int, default=0, help="which tales are read")
    p.add_argument("--json", metavar="PATH", help="also write the table as JSON")
    p.add_argument("--plot", metavar="FILE",
                   help="also draw perplexity against true bits, or against kept tokens if --preserve is a list (.png)")
    add_weights(p, several=True)
    s = p.add_argument_group(
        "settings of the methods",
        "Defaults: see --list-methods. A list, such as --preserve 1,5,10, makes a row of each.")
    settings = {"bits": (float, "B", "of keys and values both"), **SETTINGS, **(own or {})}
    p.set_defaults(settings=list(settings))
    for name, (kind, metavar, words) in settings.items():
        s.add_argument("--" + name.replace("_", "-"), metavar=f"{metavar}[,...]", type=list_of(kind), help=words,
                       default=argparse.SUPPRESS)
    return p


#   name:           (type, metavar, what it is)
SETTINGS = {
    "k_bits": (float, "B", "of keys: 1, 1.5 (three levels), 2 to 8, 16"),
    "v_bits": (float, "B", "of values"),
    "scheme": (str, "NAME", "rtn, pfn, kvsink: token-dynamic, token-static, channel-static, channel-dynamic, kvquant"),
    "group_size": (int, "G", "tokens (per channel), or channels (per token), of a group"),
    "rope": (str, "pre|post", "store keys before or after RoPE"),
    "formula": (str, "NAME", "uniform schemes: offset or integer-zero, the zero point"),
    "preserve": (int, "N", "tokens kept in full precision"),
    "recent": (int, "R", "newest tokens that stay exact (protocol stream)"),
    "block": (int, "N", "skvq: tokens coded at a time (protocol stream)"),
    "v_block": (int, "N", "kivi: values coded at a time, where not as many as keys"),
    "emergence_layer": (int, "L", "kvsink: the block whose output is looked at"),
    "outlier_channel": (int, "C", "kvsink: the channel that is looked at"),
    "outlier_num": (int, "N", "ott: tokens in the pool"),
    "extra_pool": (int, "N", "ott: places for tokens that have to leave the pool"),
    "skip_layers": (int, "N", "ott: first layers without a pool"),
    "scope": (str, "head|layer", "ott: whose pool it is"),
    "select": (str, "NAME", "ott: keep the smallest or the largest keys"),
    "reorder": (str, "on|off", "skvq: regroup the channels"),
    "clip": (str, "NAME", "skvq: both, endpoint, centre or none"),
    "metadata": (str, "fp8|fp16", "skvq: scales and offsets"),
    "outliers": (float, "P", "kvquant: per cent of the numbers that are stored apart"),
    "sensitivity": (str, "NAME", "what weighs. kvquant: fisher-range, fisher, none; cq, antkv: token, fisher, none"),
    "vq": (str, "dNmM", "cq, antkv: N channels share one of M centroids"),
    "sharing": (str, "own|layer", "cq, antkv: codebooks for each head and place, or for a layer's K and V"),
    "anchors": (str, "N|P%", "antkv: tokens kept, a count or a share"),
    "prefix": (str, "bos|FILE", "intactkv: what texts begin with: BOS, a text, or what train_intact.py wrote"),
    "q_norm": (str, "on|off", "kvquant: levels with the mean and deviation of the numbers"),
}


def own_settings(methods):
    """As SETTINGS, of methods in files of the user's: what their constructors take beyond those."""
    found = {}
    for name in methods.split(","):
        if ".py:" in name:
            for setting, value in settings_of(load_class(name.strip())).items():
                kind = type(value) if type(value) in (int, float) else str
                found[setting] = kind, setting.upper(), f"of {name.strip()}"
    return {setting: words for setting, words in found.items() if setting not in SETTINGS}


def settings_of(cls):
    """{name: default} of a method's settings: its constructor's arguments after config, and its parent's for **name."""
    parameters = list(inspect.signature(cls.__init__).parameters.values())[2:]
    settings = {p.name: p.default for p in parameters if p.kind is not p.VAR_KEYWORD}
    if len(settings) < len(parameters):
        settings = {**settings_of(cls.__base__), **settings}
    return settings


def list_methods():
    for name, cls in METHODS.items():
        module = sys.modules[cls.__module__]
        settings = ", ".join(k if v is None else f"{k}={v}" for k, v in settings_of(cls).items())
        print(f"{name:8} {module.__doc__.splitlines()[0]}\n{'':8} {settings or 'no settings'}")


@cache
def load_class(name):
    """A method's class from its name, or from path/to/file.py:Class, which is run once."""
    if name in METHODS:
        return METHODS[name]
    path, _, attribute = name.rpartition(":")
    if not path.endswith(".py"):
        raise UserError(f"unknown method {name!r}; there are {', '.join(METHODS)}, or path/to/file.py:Class")
    if not os.path.isfile(path):
        raise UserError(f"--method {name}: there is no file {path}")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.path.append(str(Path(path).absolute().parent))  # for what it imports from beside it
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        where = error if isinstance(error, SyntaxError) else traceback.extract_tb(error.__traceback__)[-1]
        raise UserError(f"--method {name}: {where.filename}, line {where.lineno}: {type(error).__name__}: "
                        f"{getattr(error, 'msg', error)}") from None
    cls = getattr(module, attribute, None)
    if not (inspect.isclass(cls) and issubclass(cls, Method)):
        raise UserError(f"--method {name}: {path} has no subclass of tinykv.methods.base.Method named {attribute!r}")
    return cls


@dataclass
class Contender:
    """A row of the table to be: a method, under which name and settings, and how the weights are quantized, if so."""
    method: Method
    name: str
    settings: dict
    weights: str | None = None


def build_methods(args, config, tokenizer):
    """{label: Contender}, fp16 first: what was asked for, and what a single method is compared with.

    A setting with several values makes a method of each; the label then says which. Returns also {label: why} for what
    nobody asked for by name and cannot take the settings.
    """
    words = [word.strip() for word in args.method.split(",")]
    asked = [name for word in words for name in (METHODS if word == "all" else [word])]
    classes = {name: load_class(name) for name in asked}
    given = {name: getattr(args, name) for name in args.settings if hasattr(args, name)}
    if "prefix" in given:
        given["prefix"] = [open_prefix(what, tokenizer, config) for what in given["prefix"]]
    if len(asked) == 1:
        classes = {**{name: METHODS[name] for name in classes[asked[0]].compare}, **classes}
    methods, left_out, reached = {}, {}, set()
    for name, cls in {"fp16": METHODS["fp16"], **classes}.items():
        for chosen in variants(cls, given):
            label = " ".join([name, *(f"{k}={in_words(v)}" for k, v in chosen.items() if len(given[k]) > 1)])
            reached |= chosen.keys() if name in asked else set()
            if "bits" in chosen and "bits" not in settings_of(cls):
                bits = chosen.pop("bits")
                chosen = {"k_bits": bits, "v_bits": bits, **chosen}
            try:
                methods[label] = Contender(cls(config, **chosen), name, {**settings_of(cls), **chosen})
            except UserError as error:
                if name in words:
                    raise
                left_out[label] = error
    for setting in given:
        if setting not in reached:
            flag = "--" + setting.replace("_", "-")
            raise UserError(f"{flag} is not a setting of {', '.join(asked)} as asked for; see --list-methods")
    if len(methods) == 1 < len(asked):
        raise next(iter(left_out.values()))
    return methods, left_out


def in_words(value):
    return format(value, ".12g") if isinstance(value, int | float) else str(value)


def build_contenders(args, config, tokenizer, quantizers):
    """As `build_methods`; under quantized weights again for each quantizer, beside fp16 in full precision."""
    if not quantizers:
        return build_methods(args, config, tokenizer)
    contenders = {"fp16": Contender(METHODS["fp16"](config), "fp16", {})}
    for weights in quantizers:
        methods, left_out = build_methods(args, config, tokenizer)
        contenders |= {f"{label} {weights}": replace(c, weights=weights) for label, c in methods.items()}
    return contenders, left_out


def variants(cls, given):
    """The settings of each of a method's rows: every combination of the values given that reach it, {name: value}."""
    takes = settings_of(cls)
    if "k_bits" in takes:
        takes["bits"] = None
    for scheme in given.get("scheme", [takes["scheme"]]) if "scheme" in takes else [None]:
        belongs = given.keys() & takes.keys()
        if scheme is not None:  # not the settings of other schemes
            belongs -= {k for other in SCHEMES for k in settings_of_scheme(other)} - set(settings_of_scheme(scheme))
        names = [k for k in given if k in belongs]
        lists = [[scheme] if k == "scheme" else given[k] for k in names]
        yield from (dict(zip(names, values)) for values in itertools.product(*lists))


def calibrate(contenders, models, text, learned):
    """Let the methods learn what they need from windows `text`, or take it from `learned`; models {label: Llama}."""
    for label, c in contenders.items():
        if not c.method.needs_calibration:
            continue

        def learn(label=label, method=c.method):
            method.calibrate(models[label], text, lambda windows: bar(windows, f"calibrating {label}"))
            return method.learned()

        alike = {k: float(v) if isinstance(v, int) else v for k, v in c.settings.items()}  # 2 and 2.0 are one
        key = f"{c.name} {json.dumps(alike, sort_keys=True)}" + (f" weights {c.weights}" if c.weights else "")
        c.method.restore(learned.take(key, learn))


def rows_of(contenders, results, protocol):
    """The results as plain rows, in the order of the table."""
    base = next(iter(results.values())).ppl
    rows = []
    for label, r in results.items():
        m, c = contenders[label].method, contenders[label]
        settings = {k: v if isinstance(v, int | float | None) else str(v) for k, v in c.settings.items()}
        rows.append({
            "label": label.removesuffix(f" {c.weights}"), "method": c.name, "settings": settings, "weights": c.weights,
            "scheme": m.scheme.name if hasattr(m, "scheme") else None,
            "k_bits": m.k_bits, "v_bits": m.v_bits, "preserve": m.preserve, "protocol": protocol, "ppl": r.ppl,
            "ppl_se": r.ppl_se, "delta_ppl": r.ppl - base, "kld": max(0.0, r.kl / r.targets),
            "top1": r.agree / r.targets, "recall": r.recall,
            "bits_nominal": (m.k_bits + m.v_bits) / 2, "bits_true": r.bits,
            "bits_128k": r.bits_far, "cache_bytes": r.cache_bytes, "tokens_per_s": r.tokens / r.seconds,
            "seconds": r.seconds, "offline_bytes": m.offline_bytes})
    return rows


def print_table(rows):
    head = ("method", "scheme", "keep", "ppl", "+-", "delta", "KL", "top-1", "recall", "bits", "true", "128K",
            "cache KB", "s")
    lines = [[r["label"], r["scheme"] or "-", str(r["preserve"]), f"{r['ppl']:.3f}", figure(r["ppl_se"], ".3f"),
              f"{r['delta_ppl']:+.3f}", f"{r['kld']:.4f}", f"{r['top1']:.1%}", figure(r["recall"], ".1%"),
              f"{r['bits_nominal']:g}", f"{r['bits_true']:.2f}", f"{r['bits_128k']:.2f}",
              f"{r['cache_bytes'] / 1024:.0f}", f"{r['seconds']:.1f}"] for r in rows]
    if any(r["weights"] for r in rows):
        head = ("weights", *head)
        lines = [[r["weights"] or "-", *line] for r, line in zip(rows, lines)]
    print_columns(head, lines, left=len(head) - 12)


def cache_of(backend):
    """The cache class of a backend. UserError if that is not installed."""
    if backend == "torch":
        return KVCache
    if importlib.util.find_spec("triton") is None:
        raise UserError("--backend triton needs the package triton (pip install triton, on Linux); or use torch")
    import kernels  # only now: nothing else needs triton
    return kernels.TritonCache


def check(args):
    """What can be seen to be wrong before anything is loaded."""
    check_counts(args, 2, "context")
    check_counts(args, 1, "windows", "calib-windows", "batch")
    if args.plot and Path(args.plot).suffix != ".png":
        raise UserError(f"--plot writes a PNG; give a name that ends in .png and not {args.plot}")
    for flag in ("json", "calibration", "plot"):
        check_folder(flag, getattr(args, flag))


def run(args):
    check(args)
    cache_class = cache_of(args.backend)
    device = checkpoint.usable(args.device)
    dtype = dtype_of(args.dtype, device)
    config = checkpoint.load_config(args.model)
    context = context_of(args, config, 4096)
    tokenizer = checkpoint.load_tokenizer(args.model, config)  # first: it is small, so its faults show at once
    quantizers = quantizers_of(args, config)
    contenders, left_out = build_contenders(args, config, tokenizer, quantizers)
    methods = {label: c.method for label, c in contenders.items()}
    for label, method in methods.items():
        if not method.keeps_share and method.preserve > context:
            raise UserError(f"{label} keeps {method.preserve} tokens, and a window has {context}; keep fewer")
    prefix = max((m.prefix.ids for m in methods.values() if m.prefix), key=len, default=[])
    if args.backend == "triton":
        for method in methods.values():
            cache_class.check(method, device)
    model = checkpoint.load_model(args.model, device, dtype)
    windows = load_windows(args.data, tokenizer, context, args.windows, "test", args.seed, args.bos,
                           prefix if len(prefix) > 1 else [])
    text, data = None, ""
    if any(x.needs_text for x in quantizers.values()) or any(m.needs_calibration for m in methods.values()):
        text, data = calibration_text(args, tokenizer, context, device)
    elif args.calibration or args.calib_data:
        flag = "--calibration" if args.calibration else "--calib-data"
        raise UserError(f"{flag}: none of {', '.join(contenders)} learns anything beforehand")
    learned = Learned(args.calibration, model, data)
    coded = {name: quantized(model, name, quantizer, text, learned) for name, quantizer in quantizers.items()}
    models = {label: coded[c.weights] if c.weights else model for label, c in contenders.items()}
    calibrate(contenders, models, text, learned)
    learned.save()
    for label, c in contenders.items():
        if c.method.prefix:
            words = weights_in_words(c.weights, quantizers[c.weights], data) if c.weights else EXACT
            c.method.prefix.fill(model, models[label], words)

    print(f"model {args.model}: {sum(p.numel() for p in model.parameters()):,} parameters, {dtype}, {device}")
    print(f"data {args.data}: {args.windows} windows of {context} tokens, protocol {args.protocol}, seed {args.seed}"
          + (", backend triton" if args.backend == "triton" else ""))
    for name, smaller in coded.items():
        print(f"weights {name}: {weight_bytes(smaller) / 1e6:.2f} MB instead of {weight_bytes(model) / 1e6:.2f} MB")
    if windows.start > 1:
        print(f"prefix: the first {windows.start} tokens of every window, which are not predicted")
    for label, why in left_out.items():
        print(f"{label} is left out: {why}")
    for label, method in methods.items():
        if method.describe():
            print(f"{label}: {method.describe()}")
    batch = batch_of(args, context)
    with bar(None, "evaluating", len(contenders) * args.windows) as progress:
        results = evaluate(model, methods, windows, args.protocol, batch, progress, models, cache_class)
    rows = rows_of(contenders, results, args.protocol)
    print()
    print_table(rows)
    if args.plot:
        figures.perplexity(rows, args.plot)
    if args.json:
        table = {"rows": rows, "model": args.model, "data": args.data, "context": context, "windows": args.windows,
                 "seed": args.seed, "versions": {"python": platform.python_version(), "torch": torch.__version__}}
        files.write_json(args.json, table)


def main():
    p = parser()
    with one_line(p):
        args = parser(own_settings(p.parse_known_args()[0].method)).parse_args()
        list_methods() if args.list_methods else run(args)


if __name__ == "__main__":
    main()
