"""From the flags of eval_ppl.py to its entries: which methods, with which settings, on which weights.

A setting is an argument of a method's constructor, so a new method brings its flags along. A flag with several values,
such as `--preserve 1,5`, makes an entry for each, for every method that takes it.
"""
import copy
import itertools
from dataclasses import dataclass, field

from tinykv import UserError, did_you_mean
from tinykv.cache import check_method
from tinykv.lab.prefixes import open_prefix
from tinykv.lab.run.settings import constructor_arguments, is_made, load_class, names_of, settings_of
from tinykv.lab.shared_flags import quantizers_of
from tinykv.methods.registry import METHODS


@dataclass
class Entry:
    """A row of the table: a method with its settings, on a model whose weights may be quantized."""
    label: str  # in the table: "pfn preserve=5"
    name: str  # of the method: "pfn", or "Mine" of mine.py:Mine
    methods: list = ()  # of the method, one for each draw of the calibration, where there is something to calibrate
    settings: dict = field(default_factory=dict)  # all that the method takes, {name: value}; none of an instance
    weights: str | None = None  # the weight quantizer's label: "awq-3"; None: full precision
    quantizer: object = None  # of the weights
    beside: str = ""  # settings it was given to match the method it is a baseline for
    results: list = field(default_factory=list)  # of its evaluation: a `Result` of each of its methods
    error: Exception | None = None  # what calibration or evaluation ended with

    @property
    def method(self):
        return self.methods[0]

    @property
    def title(self):
        """In messages, where no column names the weights: "pfn preserve=5 awq-3"."""
        return f"{self.label} {self.weights}" if self.weights else self.label


def build_entries(args, config, tokenizer, check=None):
    """The entries, {title: Entry}, fp16 first; and what is left out for its settings, {what: why}.

    Every method runs on each quantized model, and fp16 also on the full-precision model. Without --weights all run on
    the latter. check: another check that each method has to pass, by a UserError. A combination of settings that is not
    possible is an error where the method was asked for by its name, and left out where it was not.
    """
    # 1. The methods: fp16, those that a single method is compared with, those that were asked for
    asked = [name for method in args.method for name in (METHODS if method == "all" else [method])]
    compared = load_class(asked[0]).beside if len(asked) == 1 else {}
    names = names_of(["fp16", *compared, *asked])  # {method: name}, each method once

    # 2. The settings of each, [{setting: value}]. Refuse one that none of those asked for takes
    given = {name: getattr(args, name) for name in args.settings if hasattr(args, name)}
    if "prefix" in given:
        given["prefix"] = [open_prefix(str(what), tokenizer) for what in given["prefix"]]
    combined = {method: [{}] if is_made(method) else combinations(load_class(method), given, compared.get(method, {}))
                for method in names}
    left_out = {}
    for setting in given:
        flag = "--" + setting.replace("_", "-")
        others = [names[method] for method in asked if not any(setting in chosen for chosen in combined[method])]
        if len(others) == len(asked):
            raise UserError(f"{flag} is not a setting of {', '.join(others)} with these flags; see --list-methods")
        if others:
            left_out[flag] = f"no setting of {', '.join(others)} as asked for"

    # 3. An entry for each, on each weights
    entries, quantizers = {}, quantizers_of(args)
    for weights in [None, *quantizers]:
        run_here = {"fp16": "fp16"} if quantizers and weights is None else names
        for method, name in run_here.items():
            for chosen in combined[method]:
                entry = Entry(label_of(name, chosen, given), name, weights=weights, quantizer=quantizers.get(weights))
                try:
                    make_method(entry, method, chosen, compared.get(method, {}), config)
                    if check is not None:
                        check(entry.method)
                except UserError as error:
                    if method in args.method:
                        raise
                    left_out[entry.label] = error
                    continue
                if entry.title in entries:
                    of_name = list(names.values()).count(name)
                    raise UserError(f"two rows are called {entry.title}; give each "
                                    + ("value only once" if of_name == 1 else "method another `name`"))
                entries[entry.title] = entry
    return entries, left_out


def make_method(entry, asked, chosen, beside, config):
    """Give an entry its method, and what the method takes. asked: a name, a class, or an instance with its settings.
    chosen: a combination of settings. beside: settings to match the method it is a baseline for."""
    cls = load_class(asked)
    takes = settings_of(cls, chosen.get("scheme"))
    matched = {setting: value for setting, value in beside.items() if setting in takes and setting not in chosen}
    arguments = {**matched, **constructor_arguments(cls, chosen)}
    if is_made(asked):
        method = copy.deepcopy(asked)
    else:  # each has a prefix of its own, which holds keys and values of one model
        method = cls(config, **{setting: copy.copy(value) for setting, value in arguments.items()})
        entry.settings = {**settings_of(cls), **arguments}
    for setting in ("preserve", "recent", "block", "choose"):
        if arguments.get(setting) not in (None, getattr(method, setting)):
            given = ", ".join(f"{name}={value}" for name, value in arguments.items())
            raise UserError(f"{entry.name} is given {given}, and has {setting} {getattr(method, setting)}: leave out "
                            f"one of them, or, in a method of your own, set self.{setting} in its constructor")
    check_method(method)
    entry.methods = [method]
    entry.beside = ", ".join(f"{setting}={value}" for setting, value in matched.items())


def combinations(cls, given, beside):
    """Every combination of the given values that reach a method, [{setting: value}].

    given: {setting: [value, ...]}. A scheme's own settings are combined with that scheme only. beside: other defaults
    than the method's, {setting: value}.
    """
    defaults = {**settings_of(cls), **beside}
    schemes = given.get("scheme", [defaults["scheme"]]) if "scheme" in defaults else [None]
    combined = []
    for scheme in schemes:
        # the settings that the method takes under this scheme, each with its given values
        takes = settings_of(cls, scheme)
        values = {name: [scheme] if name == "scheme" else options for name, options in given.items()
                  if name in takes or name == "bits" and "k_bits" in takes}
        combined += [dict(zip(values, combination)) for combination in itertools.product(*values.values())]
    return combined


def label_of(name, chosen, given):
    """The name of an entry in the table: the method, and each setting that was given several values."""
    words = [name]
    for setting, value in chosen.items():
        if len(given[setting]) > 1:
            text = format(value, ".12g") if isinstance(value, int | float) else str(value)
            words.append(f"{setting}={text}")
    return " ".join(words)


def check_entries(args, entries):
    """Refuse entries that are visibly wrong, before the model is loaded."""
    context = args.context
    for title, entry in entries.items():
        if entry.method.preserve > context:
            raise UserError(f"{title} keeps {entry.method.preserve} tokens, and a window has {context}; keep fewer")
        prefix = len(entry.method.prefix.ids) if entry.method.prefix else 0
        if args.prompt and not prefix < args.prompt < context:
            raise UserError(f"--prompt {args.prompt} has to be longer than the prefix of {title}, {prefix} tokens, "
                            f"and shorter than a window, {context}")
    if args.vs is not None and args.vs not in entries and args.vs not in [title.split()[0] for title in entries]:
        raise UserError(f"--vs {args.vs}: the table has no such row or method; it has {', '.join(entries)}"
                        + did_you_mean(args.vs, entries))
