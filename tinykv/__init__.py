"""tinykv: every method of five papers on KV-cache quantization, small enough to read."""
import difflib
import importlib.util
import os
import sys

# before torch is imported: its threads wait for each other asleep. Awake, they hold the cores that other programs need
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

if sys.version_info < (3, 11):  # noqa: UP036
    print("tinykv needs Python 3.11 or newer; this is Python " + sys.version.split()[0], file=sys.stderr)
    sys.exit(2)
if importlib.util.find_spec("torch") is None:
    print("tinykv needs the package torch; pip install -r requirements.txt", file=sys.stderr)
    sys.exit(2)


class UserError(ValueError):
    """Bad input. One line: what was found, what was expected, what to do. Commands print it and exit with status 2."""

    def _render_traceback_(self):
        """What a notebook shows: that line."""
        return [f"UserError: {self}"]


def at_least(least, **settings):
    """UserError unless each setting is None or a whole number from `least` to 2^31 - 1."""
    for name, value in settings.items():
        if value is not None and not (hasattr(value, "__index__") and least <= value < 2 ** 31):
            raise UserError(f"{name.replace('_', ' ')} must be a whole number of at least {least}; got {value!r}")


def one_of(choices, **settings):
    """UserError if a setting is none of its choices; None is no setting."""
    for name, value in settings.items():
        if value is not None and value not in choices:
            name = name.replace("_", " ")
            raise UserError(f"{name} is one of {', '.join(choices)}; got {value!r}{did_you_mean(value, choices)}")


def all_finite(what, numbers):
    """UserError if numbers that a model computed are not all finite."""
    if not numbers.isfinite().all():
        raise UserError(f"{what} are not finite, or too large for 16 bits; use another --dtype, model or codec")


def first_line(error):
    """What an exception says, on one line."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return text.strip().splitlines()[0][:200]


def did_you_mean(word, words):
    """The end of a message about a misspelt word: "; did you mean kivi?", or "" if none is near."""
    word = str(word).lower()
    near = ([other for other in words if len(word) > 3 and other.startswith(word)]
            or difflib.get_close_matches(word, words, n=1, cutoff=0.7))
    return f"; did you mean {near[0]}?" if near else ""
