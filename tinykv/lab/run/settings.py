"""Methods by name, and their settings: the arguments of a method's constructor, each with its default there.

A setting's type is that of its annotation, if it has one, or else of its default. The text in
`layer: Annotated[int | None, "the layer to look at"] = None` is its help. Settings of several methods are annotated
once: as attributes of `Method`, or where their codecs are made.
"""
import argparse
import inspect
import os
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Annotated, get_args, get_origin

from tinykv import UserError, did_you_mean, one_of
from tinykv.codecs.codebook import make_codebooks
from tinykv.codecs.schemes import SCHEMES
from tinykv.lab import shared_flags
from tinykv.methods.base import CodecMethod, Method
from tinykv.methods.registry import METHODS

VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)  # *args, and **settings
VALUES = {bool: "true|false", int: "N", float: "X", str: "NAME"}  # how the help writes a value of each type


def settings_of(cls, scheme=None):
    """A method's settings, {name: default}: the arguments of its constructor after `config`.

    A constructor that ends in **settings hands them to its parent, and the parent's settings are included;
    `CodecMethod` hands them to the scheme's codecs. One that ends in **skvq, a scheme, hands them to that scheme,
    whose settings are included. scheme: leave out settings that only other schemes have.
    """
    arguments = list(inspect.signature(cls.__init__).parameters.values())[2:]  # after self and config
    settings = {argument.name: argument.default for argument in arguments if argument.kind not in VARIABLE}
    if arguments and arguments[-1].kind is inspect.Parameter.VAR_KEYWORD:
        if arguments[-1].name in SCHEMES:
            inherited = settings_of_scheme(arguments[-1].name)
        elif cls is CodecMethod:
            inherited = settings_of_codecs() if scheme is None else dict.fromkeys(settings_of_scheme(scheme))
        else:
            inherited = settings_of(cls.__base__, scheme)
        settings = {**settings, **inherited, **settings}  # its own defaults go before
    return settings


def settings_of_scheme(name):
    """A scheme's settings, {name: default}. UserError for a scheme that is not there."""
    one_of(SCHEMES, scheme=name)
    return settings_of_maker(SCHEMES[name][0])


def settings_of_codecs():
    """The settings that any scheme has, {name: None}: None stands for the scheme's own default."""
    for name, scheme in SCHEMES.items():  # a file of one's own may have added one
        if not (isinstance(scheme, tuple) and callable(scheme[0]) and scheme[1:] in (("pre",), ("post",))):
            raise UserError(f'SCHEMES["{name}"] must be a function and "pre" or "post"; got {scheme!r}')
    return dict.fromkeys(setting for make, _ in SCHEMES.values() for setting in settings_of_maker(make))


def settings_of_maker(make_codec):
    """The arguments of what makes a codec after config, kind and bits, {name: default}."""
    arguments = list(inspect.signature(make_codec).parameters.values())[3:]
    return {argument.name: argument.default for argument in arguments}


def annotations_of(classes):
    """{setting: its annotation}, of all that declares settings: `Method`, functions that make codecs, constructors."""
    makers = [Method, make_codebooks, *(getattr(make, "func", make) for make, _ in SCHEMES.values())]
    makers += [parent.__init__ for cls in classes for parent in cls.__mro__]
    annotations = {}
    for make in dict.fromkeys(makers):
        annotations = inspect.get_annotations(make, eval_str=True) | annotations  # the first one that declares it
    return annotations


def kind_and_help(hint, default):
    """The type of a setting, which is int for `int | None`, and the text in its annotation."""
    help = ""
    if get_origin(hint) is Annotated:
        hint, help = get_args(hint)
    kind = next((kind for kind in (hint, *get_args(hint), type(default)) if kind in VALUES), str)
    return kind, help


def flags_of(methods):
    """{setting: (type, help)} of all settings. methods: {name: class}."""
    of_all = "bits per number in keys and values; --k-bits and --v-bits override it"
    flags = {"bits": (float, of_all, [*methods])}  # {setting: (type, help, methods that take it)}
    hints = annotations_of(methods.values())
    for name, cls in methods.items():
        for setting, default in settings_of(cls).items():
            if setting not in flags:
                flags[setting] = *kind_and_help(hints.get(setting), default), []
            flags[setting][-1].append(name)
    return {setting: (kind, help if len(names) > 3 else f"{', '.join(names)}: {help}")
            for setting, (kind, help, names) in flags.items()}


def add_settings(p, asked=()):
    """The flags of all settings, also of the user's own methods among those that are asked for."""
    own = [method for method in asked if inspect.isclass(method) or isinstance(method, str) and ".py:" in method]
    flags = flags_of({**METHODS, **{name: load_class(method) for method, name in names_of(own).items()}})
    group = p.add_argument_group(
        "settings of the methods",
        "Defaults: see --list-methods. A list, such as --preserve 1,5,10, makes a row of each.")
    taken = {"help", "settings", *vars(p.parse_known_args([])[0])}
    for name, (kind, help) in flags.items():
        if name in taken:
            raise UserError(f"a setting cannot be called {name}: the command uses that name itself; rename the setting")
        group.add_argument("--" + name.replace("_", "-"), metavar=f"{VALUES[kind]}[,...]",
                           type=shared_flags.list_of(kind), help=help, default=argparse.SUPPRESS)
    p.set_defaults(settings={name: kind for name, (kind, _) in flags.items()})


def constructor_arguments(cls, chosen):
    """A combination as the constructor takes it: bits become k_bits and v_bits."""
    arguments = dict(chosen)
    if "bits" in chosen and "bits" not in settings_of(cls):
        bits = arguments.pop("bits")
        arguments = {"k_bits": bits, "v_bits": bits, **arguments}
    return arguments


def list_methods():
    """Print each method: its name, the first line of its file, its settings."""
    for method, cls in METHODS.items():
        settings = [name if value is None else f"{name}={value}" for name, value in settings_of(cls).items()]
        first_line, *_ = (inspect.getmodule(cls).__doc__ or cls.__name__).splitlines()
        print(f"{method:8} {first_line}")
        print(f"{'':8} {', '.join(settings) or 'no settings'}")


# Methods by name

def names_of(methods):
    """The name of each method in the table, {method: name}: its own `name`, the built-in one, or its class's. Methods
    that would share a name keep the words by which they were asked for."""
    names = {}
    for method in methods:
        cls = load_class(method)
        own = getattr(method, "name", cls.name)
        names[method] = own or (method if method in METHODS else cls.__name__)
    shared = Counter(names.values())
    return {method: method if isinstance(method, str) and shared[name] > 1 else name for method, name in names.items()}


def is_made(method):
    """Whether this is an instance of a method, not its class or name."""
    return not isinstance(method, str) and not inspect.isclass(method)


@cache
def load_class(name):
    """The class of a method, given as a name, path/to/file.py:Class, a class or an instance. A file is imported
    once."""
    if not isinstance(name, str):
        return type(name) if is_made(name) else name
    if name in METHODS:
        return METHODS[name]
    path, _, attribute = name.rpartition(":") if ".py:" in name else (name, "", "")
    if not path.endswith(".py"):
        near = f"; did you mean {name.replace(':', '.py:', 1)}?" if ":" in name else did_you_mean(name, METHODS)
        raise UserError(f"there is no method {name!r}; there are {', '.join(METHODS)}, or path/to/file.py:Class{near}")
    if not os.path.isfile(path):
        raise UserError(f"no file {path}; give path/to/file.py:Class")
    file = Path(path).absolute()
    sys.path.append(str(file.parent))  # the file may import from its own folder
    module = sys.modules[path] = ModuleType(path)
    module.__file__ = str(file)
    exec(compile(file.read_bytes(), file, "exec"), vars(module))  # an import might read an older version's .pyc
    cls = getattr(module, attribute, None)
    if not (inspect.isclass(cls) and issubclass(cls, Method)):
        raise UserError(f"{path} has no subclass of tinykv.methods.base.Method named {attribute!r}; give {path}:Class")
    return cls
