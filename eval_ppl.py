"""What each method costs in bits and bytes, and in perplexity.

    python eval_ppl.py --method kvsink
    python eval_ppl.py --method pfn,kvsink --scheme kvquant --outliers 0,0.1,0.5,1
    python eval_ppl.py --model path/to/Llama-2-7b-hf --data wikitext2 --context 4096 --method pfn,kvsink

In Python, or in a notebook, `compare("pfn,kvsink", bits=2)` does the same.
"""
from tinykv import hf
from tinykv.evaluate import measure
from tinykv.lab import cli, shared_flags
from tinykv.lab.run import flags, settings
from tinykv.lab.run.calibration import attempt, calibrate_all
from tinykv.lab.run.table import Table


def evaluate(args, show=lambda line: None):
    """Load, calibrate, evaluate -> the `Table`. args: of `flags.set_up`. show: is handed each line as soon as it is
    there."""
    table = Table(args, show)

    # 1. Load
    model = args.loaded[0] if args.loaded else hf.load_model(args.folder, args.devices, args.dtype)
    windows = shared_flags.test_text(args, args.entries)
    table.begin(model)

    # 2. Calibrate: first the weights, as a method is calibrated on the model that it runs on
    models = calibrate_all(args, model, args.entries, windows.tokens)  # {label of weights: Llama}
    table.say_what_was_found(model, models, windows)

    # 3. Evaluate: a row as soon as it is measured. fp16 is the first, with which the others are compared
    fp16, *_ = entries = args.entries.values()
    total = len(windows.tokens) * sum(len(entry.methods) for entry in entries)
    with cli.bar(None, "evaluating", total) as bar:  # of all rows, as fp16's time tells much about the others'
        for entry in entries:
            model = models[entry.weights]
            model.use_attention(args.attention)
            if entry.error is None:  # it has been calibrated
                exact = fp16.results[0] if fp16.results else None
                bar.set_description(f"evaluating {entry.title}", refresh=False)
                with attempt(f"evaluating {entry.title}", entry):
                    for method in entry.methods:  # one for each draw of the calibration
                        result = measure(model, method, windows, protocol=args.protocol, batch=args.batch, fp16=exact,
                                         bar=bar, cache_class=args.cache_class, prompt=args.prompt)
                        entry.results.append(result)
            bar.clear()
            table.add(entry)
    table.end()
    return table


def compare(methods, model=None, **given):
    """What the command measures -> the `Table`, a list of rows that a notebook shows as the command does.

        compare("pfn,kvsink", bits=2, preserve=[1, 5])
        compare(["pfn", Mine, KVSink(config)], model=hf.load("path/to/Llama-2-7b-hf"), protocol="stream")

    methods: names, a class, a method, or a list of these. model: a folder, or a (model, tokenizer). given: flags of the
    command, with `_` for `-`; True is a flag that takes no value, and a list makes a row of each of its values.
    """
    loaded = model if isinstance(model, tuple) else None
    flags.check_effect(given, *(["device", "dtype"] if loaded else []))  # those of the model that is given
    args = flags.parse(methods=methods, given={"model": "given" if loaded else model, "wide": True, **given})
    return evaluate(flags.set_up(args, loaded))


def main():
    with cli.one_line(cli.Parser()):
        args = flags.parse(about=__doc__)
        if args.list_methods:
            return settings.list_methods()
        rows = evaluate(flags.set_up(args), show=print)
        if any(row["fault"] for row in rows):
            raise SystemExit(1)


if __name__ == "__main__":
    main()
