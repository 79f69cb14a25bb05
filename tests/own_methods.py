"""What the classes of `--method` have to be, before they go through the matrix of test_methods.py."""
import inspect

import pytest

from tinykv import UserError
from tinykv.cache import check_method


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
    check_method(cls(config, **{setting: SETTINGS[setting] for setting in needed}))
