"""The tests are tested: what is wrong on purpose (faults.py) is noticed.

A fault is planted in the running project: the functions of its file get the code that they would have.
"""
import importlib
import types
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import cases
import expected
import pytest
from faults import FAULTS

import tinykv

ROOT = Path(tinykv.__file__).parent


def functions(module):
    """{(class or module, name): function} of a module's own functions, methods and properties."""
    found = {}
    for owner in [module, *vars(module).values()]:
        if owner is module or isinstance(owner, type) and owner.__module__ == module.__name__:
            for name, x in vars(owner).items():
                x = getattr(x, "fget", getattr(x, "__wrapped__", x))
                if isinstance(x, types.FunctionType) and x.__module__ == module.__name__:
                    found[owner.__name__, name] = x
    return found


def forget():
    """Methods that were calibrated, and what else the matrix holds for the next cell."""
    for module in (cases, expected):
        for x in vars(module).values():
            if hasattr(x, "cache_clear") and x is not cases.model_of:
                x.cache_clear()


@contextmanager
def planted(file, old, new):
    """The project with a fault in a file."""
    text = (ROOT / file).read_text()
    assert text.count(old) == 1, "the old text has to occur once"
    name = "tinykv." + file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    wrong = types.ModuleType(name)
    exec(compile(text.replace(old, new), file, "exec"), vars(wrong))
    now, then = functions(importlib.import_module(name)), functions(wrong)
    right = {key: (function.__code__, function.__defaults__) for key, function in now.items()}
    forget()
    try:
        for key, function in now.items():
            function.__code__, function.__defaults__ = then[key].__code__, then[key].__defaults__
        yield
    finally:
        for key, function in now.items():
            function.__code__, function.__defaults__ = right[key]
        forget()


def notices(check):
    try:
        check()
    except (Exception, pytest.fail.Exception):
        return True
    return False


def named(check):
    return " ".join([check.func.__name__, *map(str, check.args)]) if isinstance(check, partial) else check.__name__


CHECKS = {named(check): check for faults in FAULTS.values() for _, _, *checks in faults for check in checks}


@pytest.mark.whole
@pytest.mark.parametrize("check", CHECKS)
def test_nothing_is_noticed_where_nothing_is_wrong(check):
    CHECKS[check]()


@pytest.mark.whole
@pytest.mark.parametrize("file, old, new, checks", [
    pytest.param(file, old, new, checks, id=f"{file}: {new}") for file, faults in FAULTS.items()
    for old, new, *checks in faults])
def test_a_fault_is_noticed(file, old, new, checks):
    with planted(file, old, new):
        for check in checks:
            assert notices(check)
