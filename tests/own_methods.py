"""What is said to the author of a method that `--method` puts through the matrix of test_methods.py."""
import inspect
import os
import shlex
import traceback

import pytest

from tinykv import UserError


def check(methods, like):
    """pytest.UsageError, one line, where the classes of --method or the name of --as will not do."""
    from tinykv.methods.registry import METHODS  # here, as no other test needs it when pytest begins
    try:
        if like is not None and like not in METHODS:
            raise UserError(f"--as {like}: there are {', '.join(METHODS)}")
        if like is not None and not methods:
            raise UserError(f"--as {like} compares a method of your own; give --method, too")
        for name in methods:
            check_one(name, METHODS.get(like), like)
    except UserError as error:
        raise pytest.UsageError(str(error)) from None


def check_one(name, built_in, like):
    """UserError if a class of --method has not the settings of --as, or cannot be made."""
    from cases import SETTINGS, model_of

    from tinykv.lab.run.settings import load_class, settings_of
    cls = load_class(name)
    settings = settings_of(cls)

    # 1. its settings
    missing = [setting for setting in (settings_of(built_in) if built_in else {}) if setting not in settings]
    if missing:
        raise UserError(f"--as {like}: {name} does not take {', '.join(missing)}, as {like} does; give its constructor "
                        "these arguments, or **settings that it passes on")
    needed = [setting for setting, default in settings.items() if default is inspect.Parameter.empty]
    for setting in needed:
        if setting not in SETTINGS:
            raise UserError(f"--method {name}: give the setting {setting} a default")

    # 2. its constructor
    config = model_of(2).config
    cls(config, **{setting: SETTINGS[setting] for setting in needed}).check()


def explained(item, error):
    """What failed, for the author of the method: what was tried, what has to hold, what came."""
    case, option = item.funcargs["case"], item.config.option
    rule = broken_rule(error) if isinstance(error, AssertionError) else ""
    again = ["pytest", item.nodeid]
    for name in option.method:
        again += ["--method", name]
    again += ["--as", item.config.getoption("--as")] if case.like else []
    again += ["--whole", "--pdb"] if option.whole else ["--pdb"]
    said = {"tried": case.describe(), "rule": rule, "found": found(error, option.method), "again": shlex.join(again)}
    return "\n".join(["", *(f"{what:8}{words}" for what, words in said.items() if words)])


def broken_rule(error):
    """The first sentence of the check that failed, the innermost of several."""
    text = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name.startswith("check_"):
            text = frame.f_globals[frame.f_code.co_name].__doc__ or ""
    return " ".join(text.split("\n\n")[0].split())


def found(error, methods):
    """What a check says; of another exception, also the last line of the user's files that it came through. methods:
    those of --method."""
    if isinstance(error, AssertionError):
        return str(error) or "it does not hold"
    files = {os.path.abspath(name.rpartition(":")[0]) for name in methods}
    places = [place for place in traceback.extract_tb(error.__traceback__) if os.path.abspath(place.filename) in files]
    where = f"{places[-1].filename}, line {places[-1].lineno}, in {places[-1].name}: " if places else ""
    return f"{where}{type(error).__name__}: {error}"
