"""What is said to the author of a method that `--method` puts through the matrix of test_methods.py."""
import inspect
import shlex
import traceback
from dataclasses import replace

import pytest

from tinykv import UserError


def check(methods, like):
    """pytest.UsageError, one line, where the classes of --method or the name of --as will not do."""
    # imported here: no other test needs them when pytest begins
    from cases import SETTINGS, model_of

    from tinykv.methods.registry import METHODS
    from tinykv.runs import load_class, own_errors, settings_of
    if like is not None and like not in METHODS:
        raise pytest.UsageError(f"--as {like}: there are {', '.join(METHODS)}")
    if like is not None and not methods:
        raise pytest.UsageError(f"--as {like} compares a method of your own; give --method, too")
    for name in methods:
        try:
            cls = load_class(name)
            settings = settings_of(cls)
            missing = [setting for setting in settings_of(METHODS[like]) if setting not in settings] if like else []
            if missing:
                raise UserError(f"--as {like}: {name} does not take {', '.join(missing)}, as {like} does; give its "
                                "constructor these arguments, or **settings that it passes on")
            needed = [setting for setting, default in settings.items()
                      if default is inspect.Parameter.empty and setting not in SETTINGS]
            if needed:
                raise UserError(f"--method {name}: give the setting {needed[0]} a default")
            with own_errors(name):
                config = model_of(2).config
                method = cls(config, **{key: SETTINGS[key] for key, default in settings.items()
                                        if default is inspect.Parameter.empty})
                if len(method.codecs) != config.num_hidden_layers:
                    raise UserError(f"--method {name}: `codecs` has {len(method.codecs)} pairs for a model of "
                                    f"{config.num_hidden_layers} layers; the constructor makes one for each")
        except UserError as error:
            raise pytest.UsageError(str(error)) from None


def explained(item, error):
    """What failed, for the author of the method: what was tried, what has to hold, what came."""
    case = item.funcargs["case"]
    lines = ["", f"tried   {case.describe()}"]
    rule = broken_rule(error)
    if rule and isinstance(error, AssertionError):
        lines.append(f"rule    {rule}")
    lines.append(f"found   {found(error, case.cls)}")
    if case.batch > 1 and holds(item.function, replace(case, batch=1)):
        lines.append("note    with one sequence it holds: look at what the method does for a batch")
    again = shlex.join([item.nodeid.split("/")[-1]])
    lines.append(f"again   pytest {shlex.quote('tests/' + again.strip(chr(39)))} "
                 f"--method {item.config.option.method[0]} --pdb")
    return "\n".join(lines)


def broken_rule(error):
    """The first sentence of the check that failed."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name.startswith("check_"):
            text = frame.f_globals[frame.f_code.co_name].__doc__ or ""
            return " ".join(text.split("\n\n")[0].split())
    return ""


def found(error, cls):
    """What a check says; of another exception, also the last place of the user's files that it came
    through. cls: the method."""
    if isinstance(error, AssertionError | UserError):
        return str(error) or "it does not hold"
    files = {part.__code__.co_filename for part in vars(cls).values() if hasattr(part, "__code__")}
    places = [place for place in traceback.extract_tb(error.__traceback__) if place.filename in files]
    where = f"{places[-1].filename}, line {places[-1].lineno}, in {places[-1].name}: " if places else ""
    return f"{where}{type(error).__name__}: {error}"


def holds(test, case):
    """Whether a test passes in another cell."""
    try:
        test(case)
    except Exception:
        return False
    return True
