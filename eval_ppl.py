"""What each method costs in bits and bytes, and in perplexity.

    python eval_ppl.py --method kvsink
    python eval_ppl.py --method pfn,kvsink --scheme kvquant --outliers 0,0.1,0.5,1
    python eval_ppl.py --model path/to/Llama-2-7b-hf --data wikitext2 --context 4096 --method pfn,kvsink
    torchrun --nproc-per-node 4 eval_ppl.py --method all

In Python, or in a notebook, `compare("pfn,kvsink", bits=2)` does the same.
"""
import contextlib
import io

from tinykv import cli, hf
from tinykv.evaluate import measure
from tinykv.run import check, flags, ranks, settings, table
from tinykv.run.entries import attempt, build_entries, calibrate_all


def evaluate(args, loaded=None):
    """Load, calibrate, evaluate, print -> the rows of the table, as the JSON has them.

    loaded: a (model, tokenizer) in the place of those of --model.
    """
    # 1. Load: first the config and the tokenizer, as the methods need no more
    setup = flags.set_up(args, loaded)
    entries, left_out = build_entries(args, setup.config, setup.tokenizer)
    check.check_entries(setup, entries)
    cache_class = flags.cache_class_of(setup, entries)
    model = loaded[0] if loaded else hf.load_model(args.model, setup.devices, setup.dtype)
    windows = flags.load_test(setup, entries)

    table.print_heading(setup, model)

    # 2. Calibrate: first the weights, as a method is calibrated on the model that it runs on
    models = calibrate_all(setup, model, entries, windows.tokens)  # {label of weights: Llama}

    # 3. Evaluate and print: a row as soon as it is measured. fp16 is the first, with which the others are compared
    table.print_found(setup, model, windows, models, entries, left_out)
    printed, fp16 = table.Table(setup, entries), entries["fp16"]
    mine = ranks.own_windows(windows, setup.batch)  # all windows, unless torchrun started several processes
    clock = table.Clock(len(mine.tokens) * sum(len(entry.methods) for entry in entries.values()))
    for title, entry in entries.items():
        model = models[entry.weights]
        model.use_attention(args.attention)
        if entry.error is None:  # it has been calibrated
            exact = fp16.results[0] if fp16.results else None
            total = len(entry.methods) * len(mine.tokens)
            with attempt(f"evaluating {title}", entry), cli.bar(None, f"evaluating {title}", total) as clock.bar:
                for method in entry.methods:  # one for each draw of the calibration
                    result = measure(model, method, mine, protocol=args.protocol, batch=setup.batch,
                                     fp16=exact, bar=clock, cache_class=cache_class, prompt=args.prompt)
                    entry.results.append(ranks.gather(result))
        printed.add(entry, fp16)

    # 4. What compares the rows, and what went wrong
    printed.print_rest()
    return printed.rows


def compare(methods, model=None, **given):
    """What the command measures -> a list of its rows, shown as the command prints them.

        compare("pfn,kvsink", bits=2, preserve=[1, 5])
        compare(["pfn", Mine, KVSink(config)], model=hf.load("path/to/Llama-2-7b-hf"), protocol="stream")

    methods: names, a class, a method, or a list of these. model: a folder, or a (model, tokenizer). given: flags of the
    command, with `_` for `-`; True is a flag that takes no value, and a list makes a row of each of its values.
    """
    loaded = model if isinstance(model, tuple) else None
    flags.check_effect(given, *(["device", "dtype"] if loaded else []))  # those of the model that is given
    with contextlib.redirect_stdout(io.StringIO()) as text:
        args = flags.parse(methods=methods, given={"model": "given" if loaded else model, **given})
        rows = evaluate(args, loaded=loaded)
    return table.Rows(rows, text.getvalue().rstrip())


def main():
    with cli.one_line(cli.Parser()), ranks.joined():
        args = flags.parse(about=__doc__)
        if args.list_methods:
            return settings.list_methods()
        rows = evaluate(args)
        if any(row["fault"] for row in rows):
            raise SystemExit(1)


if __name__ == "__main__":
    main()
