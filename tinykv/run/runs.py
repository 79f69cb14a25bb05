"""From the flags of eval_ppl.py to its runs: which methods, with which settings, on which weights; all calibrated.

A setting is an argument of a method's constructor, so a new method brings its flags along. A flag
with several values, such as `--preserve 1,5`, makes a run of each, for every method that takes it.
"""
import copy
import itertools
import sys
from bdb import BdbQuit
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from tinykv import UserError, calibrate, codecs, kmeans, outlier
from tinykv import cli
from tinykv.codecs.base import CALIBRATION_WINDOWS
from tinykv.evaluate import Result
from tinykv.methods.base import Method
from tinykv.methods.registry import METHODS
from tinykv.run import ranks
from tinykv.run.check import check_codecs, check_method
from tinykv.prefix import fill_prefix, open_prefix
from tinykv.run.settings import all_settings_of, constructor_arguments, is_made, load_class, name_of, settings_of
from tinykv.storage import identity, sources


@dataclass
class Run:
    """A row of the table: a method with its settings, on a model whose weights may be quantized."""
    label: str  # in the table: "pfn preserve=5"
    name: str  # of the method, as it was asked for: "pfn", or "mine.py:Mine"
    method: Method
    settings: dict  # all that the method takes, {name: value}
    weights: str | None = None  # the weight quantizer's label: "awq-3"; None: full precision
    quantizer: object = None  # of the weights
    beside: str = ""  # settings that it has for the sake of the method that it is shown beside
    result: Result | None = None  # of its evaluation
    error: Exception | None = None  # what calibration or evaluation ended with

    @property
    def title(self):
        """In messages, where no column names the weights: "pfn preserve=5 awq-3"."""
        return f"{self.label} {self.weights}" if self.weights else self.label

    @property
    def calibration_name(self):
        """Of its tables in a calibration file: the method, all of its settings, the weights."""
        return f"{self.name} {self.settings} weights {self.weights}"

    def calibrate(self, model, windows, file):
        """Calibrate the method on windows (C, T), or take its tables from a `CalibrationFile`, which is given new
        ones."""
        made_of = self.made_of(windows) if file.path else None  # a class of a notebook has no source
        tables = file.get(self.calibration_name, made_of)
        if tables is None:
            calibrate.calibrate(model, self.method, windows, partial(cli.bar, what=f"calibrating {self.title}"))
            file.put(self.calibration_name, made_of, self.method.calibrated())
        else:
            self.method.restore(tables)
        check_codecs(self.method, model.config)

    def made_of(self, windows):
        """The identity of what makes the tables: the windows, and the code that calibrates."""
        makers = [self.method, *(codec for _, _, codec in self.method.each_codec())]
        return identity(windows, calibrate, codecs, kmeans, outlier, *sources(*makers, *filter(None, [self.quantizer])))

    @contextmanager
    def step(self, doing):
        """Around a step of the run. An exception fails this run, and the others go on; it ends the command where
        fp16 fails, with which they are compared, where other processes wait, and where a debugger is left."""
        if not sys.stderr.isatty():  # where no bar is shown
            print(f"{doing} {self.title}", file=sys.stderr, flush=True)
        try:
            yield
        except Exception as error:
            _, n_ranks = ranks.here()
            if self.name == "fp16" or n_ranks > 1 or isinstance(error, BdbQuit):
                raise
            self.error = error


# Runs

def build_runs(args, config, tokenizer):
    """The runs, {title: Run}, fp16 first; and what is left out for its settings, {what: why}.

    Every method runs on each quantized model, and fp16 also on the full-precision model. Without --weights all run on
    the latter.
    """
    # 1. The methods: fp16, those that a single method is compared with, those that were asked for
    asked = []
    for method in args.method:
        asked += METHODS if method == "all" else [method]
    compared = load_class(asked[0]).beside if len(asked) == 1 else {}
    methods = dict.fromkeys(["fp16", *compared, *asked])  # each once

    # 2. A run of each, on each weights
    given = {name: getattr(args, name) for name in args.settings if hasattr(args, name)}
    runs, left_out = {}, {}
    quantizers = cli.quantizers_of(args)
    if quantizers:
        runs["fp16"] = Run("fp16", "fp16", METHODS["fp16"](config), {})
    for weights in quantizers or [None]:
        if "prefix" in given:  # opened anew: a prefix holds keys and values of one model
            given["prefix"] = [open_prefix(str(what), tokenizer) for what in given["prefix"]]
        for method in methods:
            beside = {} if method in asked else compared.get(method, {})
            for run in runs_of(method, beside, given, config, left_out, method in args.method):
                run.weights, run.quantizer = weights, quantizers.get(weights)
                if run.title in runs:
                    raise UserError(f"two rows are called {run.title}; give one of them another `name`")
                runs[run.title] = run

    # 3. A table of fp16 alone is a mistake, and so is a setting that no method asked for takes
    if len(runs) == 1 and left_out:
        raise next(iter(left_out.values()))
    for setting in given:
        flag = "--" + setting.replace("_", "-")
        others = [name_of(method) for method in asked
                  if is_made(method)
                  or not any(setting in chosen for chosen in combinations(load_class(method), given, {}))]
        if len(others) == len(asked):
            raise UserError(f"{flag} is not a setting of {', '.join(others)} as asked for; see --list-methods")
        if others:
            left_out[flag] = f"no setting of {', '.join(others)} as asked for"
    return runs, left_out


def runs_of(asked, beside, given, config, left_out, by_name):
    """The runs of one method, for each combination of the values that it takes.

    asked: a name, a class, or a method, which has its settings. beside: settings for the sake of the method that it is
    shown beside. left_out: where a combination goes that the method refuses; if it was asked for by name, that is an
    error.
    """
    name, cls = name_of(asked), load_class(asked)
    if is_made(asked):
        check_method(asked, config)
        return [Run(name, name, copy.deepcopy(asked), {})]
    found = []
    for chosen in combinations(cls, given, beside):
        label = label_of(name, chosen, given)
        arguments = {**beside, **constructor_arguments(cls, chosen)}
        try:
            method = cls(config, **arguments)
        except UserError as error:
            if by_name:
                raise
            left_out[label] = error
            continue
        check_method(method, config)
        words = ", ".join(f"{setting}={arguments[setting]}" for setting in beside if setting not in chosen)
        found.append(Run(label, name, method, {**settings_of(cls), **arguments}, beside=words))
    return found


def combinations(cls, given, beside):
    """Every combination of the given values that reach a method, [{setting: value}].

    given: {setting: [value, ...]}. A scheme's own settings are combined with that scheme only. beside:
    other defaults than the method's, {setting: value}.
    """
    defaults = {**settings_of(cls), **beside}
    schemes = given.get("scheme", [defaults["scheme"]]) if "scheme" in defaults else [None]
    found = []
    for scheme in schemes:
        # the settings that the method takes under this scheme, each with its given values
        takes = all_settings_of(cls, scheme)
        values = {name: given[name] for name in given if name in takes}
        if "scheme" in values:
            values["scheme"] = [scheme]
        for combination in itertools.product(*values.values()):
            found.append(dict(zip(values, combination)))
    return found


def label_of(name, chosen, given):
    """What the table calls a run: the method, and each setting with several given values."""
    words = [name]
    for setting, value in chosen.items():
        if len(given[setting]) > 1:
            text = format(value, ".12g") if isinstance(value, int | float) else str(value)
            words.append(f"{setting}={text}")
    return " ".join(words)


# Calibration

def calibrate_all(setup, model, runs):
    """Quantize the weights, and calibrate each method of {title: Run} on the model that it runs on.

    Returns {label of weights: Llama}; None is the model itself.
    """
    args = setup.args
    # calibration is read in full precision: there are no codes for triton
    model.use_attention("fused" if args.attention == "triton" else args.attention)

    # 1. The text. Each of them sees its first windows
    text, data = None, ""
    if any(r.method.needs_calibration or r.quantizer and r.quantizer.needs_text for r in runs.values()):
        most = max(r.method.calibration_windows for r in runs.values())
        text, data = cli.calibration_text(args, setup.tokenizer, setup.context, setup.device, most)  # (W, T), its label
    file = ranks.SharedCalibration(setup.file("calibration"), model)

    # 2. The weights
    models = {None: model}
    for r in runs.values():
        if r.weights not in models:
            windows = text[:args.calib_windows or CALIBRATION_WINDOWS] if r.quantizer.needs_text else None  # (C, T)
            models[r.weights] = cli.quantized_model(model, r.weights, r.quantizer, windows, file)

    # 3. The methods
    for r in runs.values():
        if r.method.needs_calibration:
            windows = text[:args.calib_windows or r.method.calibration_windows]  # (C, T)
            with r.step("calibrating"):
                r.calibrate(models[r.weights], windows, file)
        if r.method.prefix:  # its keys and values come from the full-precision model
            label = cli.weights_label(r.weights, r.quantizer, data)
            fill_prefix(r.method.prefix, model, models[r.weights], label)
    return models
