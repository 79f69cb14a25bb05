"""How the commands begin and end, what they say on the way, and the columns of their tables."""
import argparse
import os
import re
import sys
from contextlib import contextmanager
from html import escape

from tqdm import tqdm

from tinykv import UserError, did_you_mean, first_line

# How a command begins and ends

class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Adds a flag's default to its help, unless there is none or the help says it itself."""

    def _get_help_string(self, action):
        if action.default is None or action.default is False or "(default: " in action.help:
            return action.help
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """Its errors are `UserError`s, and it knows no abbreviations of flags. meant: {what people write: what they mean}.
    """
    meant = {}

    def __init__(self, **settings):
        super().__init__(**{"formatter_class": Help, "allow_abbrev": False, **settings})

    def parse_known_args(self, words=None, namespace=None):
        # a home directory that no shell has put in, as it was quoted, or stands behind "="
        words = sys.argv[1:] if words is None else words
        words = [re.sub(r"(?<![^=])~(?=/)", os.path.expanduser("~"), word) for word in words]
        return super().parse_known_args(words, namespace)

    def error(self, message):
        """UserError, with what a misspelt flag, or choice, may have been."""
        flags = self._option_string_actions
        unknown = set(re.findall(r"--[\w-]+", message)) - {*flags, *self.meant}
        near = [did_you_mean(word, flags) for word in sorted(unknown)]
        near += [f"; did you mean {mean}?" for word, mean in self.meant.items() if word in re.split("[ =]", message)]
        if choice := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            near.append(did_you_mean(choice[1], re.findall(r"[\w-]+", choice[2])))
        raise UserError(f"{printable(message)}{next(filter(None, near), '')}; see --help") from None


@contextmanager
def one_line(p, stopped="stopped"):
    """Around a command's body: what the user can mend ends it with one line and exit status 2."""
    if sys.stderr is None:  # closed, as a daemon's
        sys.stderr = open(os.devnull, "w")
    if sys.stdout is None:
        p.exit(2, f"{p.prog}: error: stdout is closed, so there is no place for what this prints\n")
    for stream in (sys.stdout, sys.stderr):  # write each line at once; escape what a terminal has no characters for
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace", line_buffering=True)
    try:
        yield
    except KeyboardInterrupt:
        p.exit(130, f"\n{p.prog}: {stopped}\n")
    except BrokenPipeError:  # the reader of the pipe has seen enough, as `head` has
        os._exit(1)
    except Exception as error:
        if not isinstance(error, UserError | ModuleNotFoundError | OSError) and not is_out_of_memory(error):
            raise
        p.exit(2, f"{p.prog}: error: {reason(error)}\n")


def run(p, body, stopped="stopped"):
    """A command whose parser is p: body(args), within `one_line`."""
    with one_line(p, stopped):
        body(p.parse_args())


def reason(error):
    """What an exception says, on one line."""
    if isinstance(error, UserError):
        return printable(str(error))
    text = printable(first_line(error))
    if is_out_of_memory(error):
        return f"not enough memory ({text}); use a smaller --batch, --context or model"
    if isinstance(error, ModuleNotFoundError):
        where = ", on Linux: Triton runs nowhere else" if error.name == "triton" else ""
        return f"{text}; install it, or what this project needs: pip install -r requirements.txt{where}"
    return f"{type(error).__name__}: {text}"


def is_out_of_memory(error):
    """Whether memory ran out: Python's, a GPU's or a CPU's, for which torch has no exception class."""
    return isinstance(error, MemoryError) or re.search("out of memory|allocate memory", str(error)) is not None


def printable(text):
    """A text on one line, whatever the names in it: control characters escaped, long words cut."""
    escaped = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return re.sub(r"\S{300,}", lambda word: f"{word[0][:100]}...", escaped)


# Output

def bar(windows, what, total=None, unit="window"):
    """A progress bar on stderr, shown after one second, and only in a terminal."""
    return tqdm(windows, what, total, leave=False, unit=unit, delay=1, file=sys.stderr, disable=not shows_bars())


def step(doing):
    """Say on stderr which step begins, where no bar shows it."""
    if not shows_bars():
        note(doing)


def note(text):
    """Tell the user on stderr."""
    print(text, file=sys.stderr, flush=True)


def shows_bars():
    """Whether this is a terminal, or a notebook."""
    return sys.stderr is not None and sys.stderr.isatty() or "ipykernel" in sys.modules


def figure(value, form):
    """A number formatted for a table; a word as it is; "-" where there is none."""
    if value is None or isinstance(value, str):
        return value or "-"
    return format(value, form)


class Columns:
    """A table of words, the first `left` columns flush left. widths: of the columns, where lines are still to come."""

    def __init__(self, head, lines, left, widths=None):
        self.head, self.lines, self.left = head, lines, left
        self.widths = widths or [max(len(line[i]) for line in [head, *lines]) for i in range(len(head))]

    def line(self, words):
        """Words as a line of the table."""
        cells = [word.ljust(width) if i < self.left else word.rjust(width)
                 for i, (word, width) in enumerate(zip(words, self.widths))]
        return "  ".join(cells).rstrip()

    def __str__(self):
        return "\n".join(map(self.line, [self.head, *self.lines]))

    def _repr_html_(self):
        lines = ["".join(f"<td>{escape(word)}</td>" for word in words) for words in [self.head, *self.lines]]
        return f"<table>{''.join(f'<tr>{row}</tr>' for row in lines)}</table>"
