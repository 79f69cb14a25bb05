"""What each method costs in bits and bytes, and in perplexity.

    python eval_ppl.py --method kvsink
    python eval_ppl.py --method all --bits 3 --scheme token-static --protocol stream
    python eval_ppl.py --method pfn,kvsink --scheme kvquant --outliers 0,0.1,0.5,1
    python eval_ppl.py --model path/to/Llama-2-7b-hf --data wikitext2 --context 4096 --method pfn,kvsink
    torchrun --nproc-per-node 4 eval_ppl.py --method all
"""
if __name__ == "__main__":
    from tinykv import stop_early
    stop_early("eval_ppl.py")  # torch takes seconds to import

import math
import platform
from pathlib import Path

import torch

from tinykv import UserError, cli, hf
from tinykv.cache import PROTOCOLS
from tinykv.calibrate import calibrate
from tinykv.data import load_windows
from tinykv.evaluate import evaluate
from tinykv.runs import add_settings, build_runs, list_methods, own_errors, own_settings
from tinykv.storage import CalibrationFile, write_json
from tinykv.weights import weight_bytes


def parser(more_settings=None):
    """more_settings: those of methods in files of the user's, as `runs.SETTINGS`."""
    p = cli.Parser(
        description="Perplexity, answer recall and true size of the KV cache under each method, "
                    "beside fp16.",
        epilog="A setting reaches every method that takes it; it is an error if no method asked for "
               "does. A method asked for alone is shown beside those it is compared with, if they can "
               "take its settings.")
    p.add_argument("--method", metavar="NAME[,NAME...]", default="kvsink",
                   help="names from --list-methods, 'all', or path/to/file.py:Class")
    p.add_argument("--list-methods", action="store_true",
                   help="print the methods and their settings, and stop")
    p.add_argument("--protocol", choices=PROTOCOLS, default="paper",
                   help="paper: tokens are quantized before any query reads them; stream: as in "
                        "generation")
    p.add_argument("--prompt", metavar="P", type=int,
                   help="the first P tokens of a window arrive at once, the others as in generation; "
                        "protocol paper quantizes the prompt before it is read")
    cli.add_model(p)
    cli.add_windows(p, windows=16, longest=4096)
    cli.add_bos(p)
    cli.add_calibration(p)
    p.add_argument("--batch", metavar="B", type=int,
                   help="windows at a time (default: about 4096 tokens)")
    cli.add_attention(p, triton=True)
    p.add_argument("--seed", type=int, default=0, help="which tales are read")
    p.add_argument("--json", metavar="PATH", help="also write the table as JSON")
    p.add_argument("--at-bits", metavar="B", type=float,
                   help="also compare at B true bits: between the two nearest rows of each method that "
                        "differ in bits alone")
    p.add_argument("--wide", action="store_true",
                   help="print all columns of the table, also on a narrow terminal")
    p.add_argument("--plot", metavar="FILE",
                   help="also draw perplexity against true bits, or against kept tokens if "
                        "--preserve is a list (.png)")
    cli.add_weights(p, several=True)
    add_settings(p, more_settings or {})
    return p


def check(args):
    """What can be seen to be wrong before anything is loaded."""
    cli.check_counts(args, 2, "context")
    cli.check_counts(args, 1, "windows", "calib-windows", "batch", "prompt")
    if hasattr(args, "choose") and not args.prompt:
        raise UserError("--choose is for a text with a prompt; give --prompt, too")
    if args.plot and Path(args.plot).suffix != ".png":
        raise UserError(f"--plot writes a PNG; give a name that ends in .png and not {args.plot}")
    for flag in ("json", "calibration", "plot"):
        cli.check_folder(flag, getattr(args, flag))
    cli.check_different(json=args.json, calibration=args.calibration, plot=args.plot)


def run(args, ranks=None):
    """Measure and print what args ask for -> the rows of the table, as the JSON has them.

    ranks: the module `tinykv.ranks` where torchrun started several processes, else None; of these,
    the first has the rows, and the others None.
    """
    check(args)
    if ranks:
        ranks.prepare(args)
    device = hf.usable_device(args.device)
    dtype = cli.dtype_of(args.dtype, device)

    # 1. The runs, each a method with its settings: they need only the config and the tokenizer
    config = hf.load_config(args.model)
    context = cli.context_of(args, config, 4096)
    tokenizer = hf.load_tokenizer(args.model, config)
    quantizers = cli.quantizers_of(args, config)
    runs, left_out = build_runs(args, config, tokenizer, quantizers)
    calibrates = needs_calibration(runs, quantizers)
    check_runs(args, runs, context, calibrates)
    methods = {title: r.method for title, r in runs.items()}
    cache_class = cli.cache_class_of(args.attention, methods.values(), device)

    # 2. The model, and the windows, which all begin with the longest prefix
    model = hf.load_model(args.model, device, dtype)
    prefixes = [r.method.prefix.ids for r in runs.values() if r.method.prefix]
    prefix = max(prefixes, key=len, default=[])
    if len(prefix) == 1:
        prefix = []  # BOS alone takes the place of a window's first token
    windows = load_windows(args.data, tokenizer, context, args.windows, "test", args.seed, args.bos,
                           prefix, whole=cli.two_texts(args))
    if args.prompt:
        windows = windows.predicted_from(args.prompt)

    # 3. Calibrate: the weights first, since a method is calibrated on the model that it runs on
    text = text_of_weights = None  # windows (W, T)
    data = ""  # a label of them
    if calibrates:
        most = max(r.method.calibration_windows for r in runs.values())
        text, data = cli.calibration_text(args, tokenizer, context, device, most)
        text_of_weights = text[:args.calib_windows or cli.CALIBRATION_WINDOWS]
    open_calibration = ranks.SharedCalibration if ranks else CalibrationFile
    calibration_file = open_calibration(args.calibration, model, data)
    models = {None: model}  # {weights: Llama}
    for weights, quantizer in quantizers.items():
        models[weights] = cli.quantized_model(model, weights, quantizer, text_of_weights,
                                              calibration_file)
    for m in models.values():
        m.use_attention("fused" if args.attention == "triton" else args.attention)
    for r in runs.values():
        if r.method.needs_calibration:
            asked = args.calib_windows or r.method.calibration_windows
            calibrate_run(r, models[r.weights], text[:asked], calibration_file)
    calibration_file.save()

    # 4. Fill the prefixes with the keys and values of the full-precision model
    for r in runs.values():
        if r.method.prefix:
            label = cli.weights_label(r.weights, quantizers, data)
            r.method.prefix.fill(model, models[r.weights], label)
    print_heading(args, model, dtype, device, context, windows, models, runs, left_out)

    # 5. Evaluate
    for m in models.values():
        m.use_attention(args.attention)
    models_of = {title: models[r.weights] for title, r in runs.items()}
    batch = cli.batch_of(args, context)
    share = ranks.share(windows, batch) if ranks else windows
    with cli.bar(None, "evaluating", len(runs) * len(share.tokens)) as progress:
        results = evaluate(model, methods, share, args.protocol, batch, progress, models_of,
                           cache_class, args.prompt)
    if ranks:
        results = ranks.gather(results)
        if results is None:
            return None  # rank 0 prints and writes

    # 6. The table
    rows = [row_of(r, results[title], results["fp16"], args) for title, r in runs.items()]
    print_claims(runs, results)
    print()
    print_table(rows, cli.room_for_table(args.wide))
    for row in rows:
        if row["fault"]:
            print(f"{row['label']}: {row['fault']}")
    if args.at_bits is not None:
        print()
        print_at_bits([row for row in rows if not row["fault"]], args.at_bits)
    if args.plot:
        from tinykv.analysis import figures
        figures.save(figures.perplexity([row for row in rows if not row["fault"]]), args.plot)
    if args.json:
        versions = {"python": platform.python_version(), "torch": torch.__version__}
        write_json(args.json, {
            "rows": rows, "model": args.model, "data": args.data, "context": context,
            "windows": args.windows, "seed": args.seed, "versions": versions})
    return rows


def needs_calibration(runs, quantizers):
    """Whether a method, or a weight quantizer, is calibrated on text."""
    methods = any(r.method.needs_calibration for r in runs.values())
    weights = any(quantizer.needs_text for quantizer in quantizers.values())
    return methods or weights


def check_runs(args, runs, context, calibrates):
    """What can be seen to be wrong with the runs before the model is loaded."""
    for title, r in runs.items():
        if not r.method.keeps_share and r.method.preserve > context:
            raise UserError(f"{title} keeps {r.method.preserve} tokens, and a window has "
                            f"{context}; keep fewer")
        prefix = len(r.method.prefix.ids) if r.method.prefix else 0
        if args.prompt and not prefix < args.prompt < context:
            raise UserError(f"--prompt {args.prompt} leaves nothing to read: it has to be longer than "
                            f"the prefix of {title}, {prefix} tokens, and shorter than a window, "
                            f"{context}")
    flag = cli.calibration_flag(args)
    if flag and not calibrates:
        raise UserError(f"{flag}: none of {', '.join(runs)} needs calibration")


def calibrate_run(r, model, windows, calibration_file):
    """Calibrate a run's method on windows (W, T), unless the file has its tables."""
    def calibrated():
        calibrate(model, r.method, windows, lambda loop: cli.bar(loop, f"calibrating {r.title}"))
        return r.method.calibrated()

    name = f"{r.calibration_name} on {len(windows)} windows"
    tables = calibration_file.take(name, calibrated)
    if not calibration_file.path:
        r.method.restore(tables)
        return
    # a file may hold tables of the method as it was before its code was changed
    try:
        r.method.restore(tables)
        fits = r.method.calibrated().keys() == tables.keys() and reads_rows(r.method, model)
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError):  # of a codec
        fits = False
    if not fits:
        raise UserError(f"{calibration_file.path} holds tables of {r.title} that do not fit; remove "
                        "it to calibrate again")


def reads_rows(method, model):
    """Whether each codec gives back rows of the shape that it was given."""
    config = model.config
    rows = torch.zeros(1, config.num_key_value_heads, 1, config.head_dim)  # (1, Hkv, 1, d)
    rows = rows.to(model.lm_head.weight.device)
    codecs = [codec for pair in method.codecs for codec in pair]
    return all(codec.decode(codec.encode(rows)).shape == rows.shape for codec in codecs)


def print_heading(args, model, dtype, device, context, windows, models, runs, left_out):
    """What the table is of: the model, the text, the weights, and what calibration found."""
    parameters = sum(p.numel() for p in model.parameters())
    attention = "" if args.attention == "fused" else f", attention {args.attention}"
    prompt = f", prompt {args.prompt}" if args.prompt else ""
    print(f"model {args.model}: {parameters:,} parameters, {dtype}, {device}")
    whole = " (whole)" if windows.name.endswith("(whole)") else ""
    print(f"data {args.data}{whole}: {args.windows} windows of {context} tokens, "
          f"protocol {args.protocol}{prompt}, seed {args.seed}{attention}")
    for weights, smaller in models.items():
        if weights:
            print(f"weights {weights}: {weight_bytes(smaller) / 1e6:.2f} MB instead of "
                  f"{weight_bytes(model) / 1e6:.2f} MB")
    if windows.start > 1:
        what = "prompt" if args.prompt else "prefix"
        print(f"{what}: the first {windows.start} tokens of every window, which are not predicted")
    for label, why in left_out.items():
        print(f"{label} is left out: {why}")
    for title, r in runs.items():
        if r.method.describe():
            print(f"{title}: {r.method.describe()}")
        if choice_of(r, args) and (args.prompt or args.protocol == "stream"):
            when = {"prompt": "once, after the prompt", "always": "at each quantization"}
            print(f"{title}: the tokens to keep are chosen {when[choice_of(r, args)]}")


def choice_of(r, args):
    """When a run's method chooses the tokens to keep: "prompt", "always", or None where it has no
    such setting."""
    if "choose" not in r.settings:
        return None
    return r.method.choose if args.prompt else "always"


def print_claims(runs, results):
    """Say where codes take much more than the bits that the method claims."""
    for title, r in runs.items():
        claimed, held = (r.method.k_bits + r.method.v_bits) / 2, results[title].coded_bits
        if held > 1.5 * claimed + 1.5:
            print(f"{title}: {claimed:g} bits are claimed, and its codes hold {held:.1f}")


def row_of(r, result, fp16, args):
    """A row of the table, as the JSON has it. result, fp16: the `Result`s of run r and of fp16."""
    settings = {}
    for name, value in r.settings.items():
        settings[name] = value if isinstance(value, int | float | None) else str(value)
    row = {
        "label": r.label,
        "method": r.name,
        "settings": settings,
        "weights": r.weights,
        "scheme": r.method.scheme,
        "k_bits": r.method.k_bits,
        "v_bits": r.method.v_bits,
        "preserve": r.method.preserve,
        "protocol": args.protocol,
        "prompt": args.prompt,  # tokens of it, or None
        "choose": choice_of(r, args),
        "bits_nominal": (r.method.k_bits + r.method.v_bits) / 2,
        "offline_bytes": r.method.offline_bytes,
        "fault": result.fault,  # what is not finite; then nothing was measured
    }
    return {**row, **measure(result, fp16)}


def measure(result, fp16):
    """What a run cost in predictions, what its cache takes, and how long it took; None each where
    there is a fault."""
    if result.fault:
        return dict.fromkeys(measure(fp16, fp16))
    return {
        "ppl": result.ppl,
        "ppl_se": result.ppl_se,
        "delta_ppl": result.ppl - fp16.ppl,
        "kld": max(0.0, result.kl / result.targets),
        "top1": result.agree / result.targets,
        "recall": result.recall,
        "bits_true": result.bits,
        "bits_128k": result.bits_far,
        "cache_bytes": result.cache_bytes,
        "tokens_per_s": result.tokens / result.seconds,
        "seconds": result.seconds,
    }


def print_table(rows, room):
    """Print the rows in lines of at most `room` characters."""
    head = ["method", "scheme", "keep", "ppl", "+-", "delta", "KL", "top-1", "recall",
            "bits", "true", "128K", "cache KB", "s"]
    lines = []
    for row in rows:
        if row["fault"]:
            lines.append([row["label"], row["scheme"] or "-", str(row["preserve"]), "not finite",
                          *["-"] * 10])
            continue
        bits = f"{row['k_bits']:g}"
        if row["v_bits"] != row["k_bits"]:
            bits += f"/{row['v_bits']:g}"
        lines.append([
            row["label"], row["scheme"] or "-", str(row["preserve"]),
            f"{row['ppl']:.3f}", cli.figure(row["ppl_se"], ".3f"), f"{row['delta_ppl']:+.3f}",
            f"{row['kld']:.4f}", f"{row['top1']:.1%}", cli.figure(row["recall"], ".1%"),
            bits, f"{row['bits_true']:.2f}", f"{row['bits_128k']:.2f}",
            f"{row['cache_bytes'] / 1024:.0f}", f"{row['seconds']:.1f}"])
    matter = ["method", "keep", "ppl", "delta", "recall", "bits", "true", "s"]
    if any(row["weights"] for row in rows):
        head.insert(0, "weights")
        matter.insert(0, "weights")
        for row, line in zip(rows, lines):
            line.insert(0, row["weights"] or "-")
    cli.print_columns(head, lines, len(head) - 12, matter, room)


BITS_SETTINGS = ("bits", "k_bits", "v_bits", "vq")


def at_bits(rows, bits):
    """What each method has at `bits` true bits: rows of `label`, `ppl`, `kld`, `between` and `tables`.

    rows: of the table, fp16's first. Rows of a method that differ in bits alone lie on a line. The
    loss and KL at `bits` are interpolated between the two nearest rows of the line, linearly in the
    bits. `between`: their true bits; `tables`: the bytes of their calibrated tables. A line that does
    not reach so far has no row.
    """
    lines = {}
    for row in rows[1:]:
        words = [word for word in row["label"].split(" ") if word.partition("=")[0] not in BITS_SETTINGS]
        words += [row["weights"]] if row["weights"] else []
        lines.setdefault(" ".join(words), []).append(row)
    found = []
    for label, line in lines.items():
        below = max((row for row in line if row["bits_true"] <= bits), default=None,
                    key=lambda row: row["bits_true"])
        above = min((row for row in line if row["bits_true"] >= bits), default=None,
                    key=lambda row: row["bits_true"])
        if below is None or above is None:
            continue
        low, high = below["bits_true"], above["bits_true"]
        share = (bits - low) / (high - low) if high > low else 0.0  # of the upper row
        loss = (1 - share) * math.log(below["ppl"]) + share * math.log(above["ppl"])  # nats
        found.append({
            "label": label,
            "ppl": math.exp(loss),
            "kld": (1 - share) * below["kld"] + share * above["kld"],
            "between": (low, high),
            "tables": (below["offline_bytes"], above["offline_bytes"]),
        })
    return found


def print_at_bits(rows, bits):
    """The table of `at_bits`, or why there is none."""
    found = at_bits(rows, bits)
    if not found:
        print(f"no method has rows on both sides of {bits:g} true bits that differ in bits alone; give "
              "a list of --bits, or of --vq")
        return
    lines = []
    for row in found:
        delta = row["ppl"] - rows[0]["ppl"]
        lines.append([row["label"], f"{row['ppl']:.3f}", f"{delta:+.3f}", f"{row['kld']:.4f}",
                      *(f"{x:.2f}" for x in row["between"]),
                      *(f"{x / 1024:.0f}" for x in row["tables"])])
    head = [f"at {bits:g} true bits", "ppl", "delta", "KL", "from", "to", "tables KB", "to"]
    cli.print_columns(head, lines, left=1)


def main():
    p = parser()
    with cli.one_line(p), cli.ranks() as ranks:
        # a method in a file of the user's has settings of its own, which become flags
        known, _ = p.parse_known_args()
        with own_errors(known.method):
            args = parser(own_settings(known.method)).parse_args()
            if args.list_methods:
                list_methods()
            else:
                run(args, ranks)


if __name__ == "__main__":
    main()
