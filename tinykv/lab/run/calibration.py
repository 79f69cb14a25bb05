"""What the entries run on: quantized weights, calibrated methods, prefixes with their keys and values."""
import copy
import inspect
from bdb import BdbQuit
from collections import defaultdict
from contextlib import contextmanager
from functools import partial

from tinykv import UserError, calibrate
from tinykv.cache import check_model, made_with
from tinykv.codecs.base import CALIBRATION_WINDOWS
from tinykv.lab import cli, shared_flags
from tinykv.lab.tables import Tables, fingerprint, hash_of, restore_tables, tables_of
from tinykv.lab.weights import quantize, restore

FULL_PRECISION = "full precision"  # the label of weights that are not quantized


def calibrate_all(args, model, entries, test=None):
    """Quantize the weights, and calibrate each method of {title: Entry} on the model that it runs on.

    test: the windows (W, T) to evaluate on. Returns {label of weights: Llama}; None is the model itself.
    """
    # calibration reads its text in full precision, so there are no codes to attend from
    model.use_attention("plain" if args.attention == "plain" else "fused")

    # 1. The text (W, T). Each of them sees its first windows
    text = of_weights = None
    if any(e.method.needs_calibration or e.quantizer and e.quantizer.needs_text for e in entries.values()):
        most = max(entry.method.calibration_windows for entry in entries.values())
        n = args.draws * (args.calib_windows or most)
        text = shared_flags.calibration_text(args, n, test)  # (n, T)
        of_weights = text[:args.calib_windows or CALIBRATION_WINDOWS]  # (C, T)
    kept = {None: Tables(args.calibration, model)}  # {label of weights: what is kept of calibrations on them}

    # 2. The weights
    models = {None: model}
    for entry in entries.values():
        if entry.weights not in models:
            models[entry.weights] = quantized_model(model, entry.weights, entry.quantizer, of_weights, kept[None])

    # 3. The methods: those that run on the same weights and see as many windows read them together
    together = defaultdict(list)  # {(label of weights, C): [Entry]}
    for entry in entries.values():
        if entry.method.needs_calibration:
            if args.calibration and is_own(entry):
                cli.note(f"{entry.title}: {args.calibration} keeps no tables of code, or of an instance, of your own")
            together[entry.weights, args.calib_windows or entry.method.calibration_windows].append(entry)
        check_model(entry.method, models[entry.weights])
    for (weights, C), group in together.items():
        if weights not in kept:
            kept[weights] = Tables(args.calibration, models[weights])
        calibrate_group(group, models[weights], text[:args.draws * C], args.draws, kept[weights])

    # 4. Prefixes: their keys and values come from the full-precision model
    for entry in entries.values():
        label = weights_label(entry.weights, entry.quantizer, args.calib_data or args.data, of_weights)
        for method in entry.methods:
            if method.prefix:
                fill_prefix(method.prefix, model, models[entry.weights], label)
    return models


def calibrate_group(group, model, text, draws, kept):
    """Calibrate entries on each draw of text (draws * C, T), or take their tables from kept `Tables`, which are given
    new ones. Draw d is windows d * C to d * C + C - 1, and k-means' random numbers of seed d."""
    for entry in group:
        entry.methods += [copy.deepcopy(entry.method) for _ in range(1, draws)]
    for draw, windows in enumerate(text.chunk(draws)):  # (C, T)
        lacking = []  # in what is kept
        for entry in group:
            tables = kept.get(made_of(entry, windows, draw))
            if tables is None:
                lacking.append(entry)
            else:
                restore_tables(entry.methods[draw], tables, model)
        if lacking:
            calibrate_together(lacking, draw, model, windows, kept)
        group = [entry for entry in group if not entry.error]


def calibrate_together(entries, draw, model, windows, kept):
    """Calibrate entries on the windows (C, T) of one draw; if one of them fails, each by itself."""
    titles, methods = ", ".join(entry.title for entry in entries), [entry.methods[draw] for entry in entries]
    unseen = copy.deepcopy(methods)
    with attempt(f"calibrating {titles}", *entries):
        calibrate.calibrate(model, methods, windows, partial(cli.bar, what=f"calibrating {titles}"), draw)
        for entry, method in zip(entries, methods):
            kept.put(made_of(entry, windows, draw), tables_of(method))
    if len(entries) > 1 and entries[0].error:
        for entry, method in zip(entries, unseen):
            entry.methods[draw], entry.error = method, None
            calibrate_together([entry], draw, model, windows, kept)


def quantized_model(model, name, quantizer, windows, kept):
    """The model with quantized weights. Calibrated ones are taken from kept `Tables`, or added to them. windows (W, T):
    to calibrate on, where `quantizer.needs_text`."""
    made_of = hash_of(windows, quantizer) if quantizer.needs_text else None
    tensors = kept.get(made_of)
    if tensors is not None:
        return restore(model, quantizer, tensors)
    cli.step(f"quantizing weights {name}")
    quantized = quantize(model, quantizer, windows, partial(cli.bar, what=name, unit="block"))
    kept.put(made_of, quantized.model["layers"].state_dict())
    return quantized


def weights_label(weights, quantizer, data, windows):
    """How weights are quantized, for a prefix's file: the quantizer's label, None for full precision, and what it was
    calibrated on, the text's name and its windows (W, T)."""
    if weights is None:
        return FULL_PRECISION
    return f"{weights}, {data} {hash_of(windows)[:16]}" if quantizer.needs_text else weights


def fill_prefix(prefix, full, quantized, weights=FULL_PRECISION):
    """Give a prefix its keys and values for `quantized`, whose weights have this label.

    A trained prefix has them already. UserError if it was trained for another model, or for other weights.
    """
    if prefix.trained_for is None:
        prefix.fill(full, quantized)
    elif prefix.trained_for != {"model": fingerprint(full), "weights": weights}:
        raise UserError(f"the prefix {prefix} was trained for another model or for other weights, "
                        f"{prefix.trained_for}; train it for {weights} of this model")


def made_of(entry, windows, draw):
    """A hash of all that a draw's tables depend on: windows, method, settings, weight quantizer, k-means' seed, and
    code. None for the user's own code, which is calibrated anew each time."""
    return None if is_own(entry) else hash_of(windows, draw, entry.name, entry.settings, entry.quantizer,
                                              made_with(entry.method))


def is_own(entry):
    """Whether the user wrote the class of the method or of a codec, or a function in it, or made the method: then
    nobody knows what its tables depend on."""
    makers = [entry.method, *(codec for *_, codec in entry.method.each_codec())]
    classes = {cls for maker in makers for cls in type(maker).__mro__[:-1]}  # without object
    functions = {part for cls in classes for part in vars(cls).values() if inspect.isfunction(part)}
    written = {*classes, *functions} - {copy.deepcopy}  # which is their `__copy__`
    return not entry.settings or not all(part.__module__.startswith("tinykv.") for part in written)


@contextmanager
def attempt(doing, *entries):
    """Do something for entries. If it raises, they fail and the others go on. The command ends if fp16 (the reference
    for all others) fails, or if the user quits the debugger."""
    cli.step(doing)
    try:
        yield
    except Exception as error:
        if isinstance(error, BdbQuit) or "fp16" in [entry.name for entry in entries]:
            raise
        for entry in entries:
            entry.error = error
        cli.note(f"{', '.join(entry.title for entry in entries)} failed: {cli.reason(error)}")
