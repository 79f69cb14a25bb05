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

import platform
from pathlib import Path

import torch

from tinykv import UserError, hf
from tinykv.cache import PROTOCOLS
from tinykv.calibrate import calibrate
from tinykv.codecs.base import CALIBRATION_WINDOWS
from tinykv.data import load_windows
from tinykv.evaluate import evaluate
from tinykv.run import cli
from tinykv.run.prefix import fill_prefix
from tinykv.run.runs import add_settings, build_runs, list_methods, own_errors, own_settings
from tinykv.run.table import print_at_bits, print_claims, print_heading, print_table, row_of
from tinykv.storage import CalibrationFile, write_json


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

    ranks: the module `tinykv.run.ranks` where torchrun started several processes, else None; of these,
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
        text_of_weights = text[:args.calib_windows or CALIBRATION_WINDOWS]
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
            fill_prefix(r.method.prefix, model, models[r.weights], label)
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


def main():
    p = parser()
    with cli.one_line(p, torchrun=True), cli.ranks() as ranks:
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
