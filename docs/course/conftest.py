"""How an assignment's tests run.

    pytest docs/course/3-kvsink                        grades the starter, and writes it first if it is not there
    pytest docs/course/3-kvsink --file F --seed N      another file, with other numbers

A test gets the student's module as `sub`, all its numbers from `rng`, and hands what the student's code gave to
`same(value, hint)`, or lets `same.call(function, ..)` do so. It never says what is right: that is what answer.py gives
in the same test, or, in a repository without answers, what expected.json has of it. So nothing that a student's code
can reach holds a right value.
"""
import ast
import math
import os
import random
import re
import sys
import traceback
from functools import cache
from json import dumps, loads
from pathlib import Path

import pytest
import torch

from docs.course import restrict
from docs.course.assignments import PAGE, answer_of, folder_of, key_of, named, write_missing
from docs.course.compare import called, complaints, parameters_of, plain, shortest
from docs.course.compiles import definitions, errors_here, kernels_in, source_of
from docs.course.confine import confine
from tinykv import UserError

LONGEST = 5  # seconds of computing, of a test that is recorded; a right answer needs one
TOO_LONG = f"No end within {LONGEST} seconds, or a crash: look for a loop without an end, or over single numbers."


def pytest_addoption(parser):
    parser.addoption("--file", type=Path, help="the student's file (default: the starter)")
    parser.addoption("--seed", default="0", help="draws other numbers and sizes; -: its key is read from stdin")
    parser.addoption("--record", type=int, help="judge nothing: write what a limited process gives to this open file")


def pytest_configure(config):
    config.addinivalue_line("markers", "points(n): what a test gives")
    torch.set_num_threads(1)
    seed = config.option.seed
    config.option.seed = sys.stdin.readline().strip() if seed == "-" else key_of(int(seed))


def pytest_collection_modifyitems(config, items):
    """Of a file's tests those of its part: a page's begin with test_page. Without a file, not those of a page that has
    not been handed out yet."""
    file = config.getoption("--file")
    part, here = file and is_page(file), Path(__file__).parent

    def asked(item):
        if here not in item.path.parents:
            return True
        of_page = item.name.startswith("test_page")
        return of_page == part if file else not of_page or any(
            (item.path.parent / name).exists() for name in ("page.py", "answer.py"))
    config.hook.pytest_deselected(items=[item for item in items if not asked(item)])
    items[:] = [item for item in items if asked(item)]


def is_page(file):
    """Whether a file is an assignment's page: it says so, or is one of docs/ladder."""
    return (named(file, "ASSIGNMENT") or PAGE).endswith(PAGE)


class Draws(random.Random):
    """A test's random numbers, which are the same for the same seed and test."""

    def normal(self, *shape):
        return torch.randn(shape, generator=torch.Generator().manual_seed(self.getrandbits(60)))

    def sizes(self, *largest):
        """A number from 1 up to each of these."""
        return [self.randint(1, n) for n in largest]

    def of(self, numbers, *shape):
        """A tensor of a shape, of some of these numbers."""
        kind = torch.float32 if any(isinstance(n, float) for n in numbers) else None
        return torch.tensor(self.choices(numbers, k=math.prod(shape)), dtype=kind).view(shape)


def draws(node):
    torch.manual_seed(0)
    return Draws(f"{node.config.getoption('--seed')} {node.name}")


@cache
def load(path):
    """The module that a file makes; of a file with kernels, what a compiler sees of it."""
    name = named(path, "ASSIGNMENT")
    of_kernels = name and kernels_in(*folder_of(name).glob("test_*.py"))
    return restrict.run(path, definitions(path) if of_kernels else ast.parse(source_of(path), str(path)))


def path_of(item):
    """The file that a test grades. A starter that is not there is written."""
    own = "page.py" if item.name.startswith("test_page") else "starter.py"
    path = (item.config.getoption("--file") or item.path.parent / own).resolve()
    write_missing(path)
    return path


@pytest.fixture
def sub(request):
    return load(path_of(request.node))


@pytest.fixture
def rng(request):
    return draws(request.node)


class Same:
    """What a test hands over. note: a function of a value as JSON holds it, a hint, a tolerance, and `names`."""

    def __init__(self, note, axes=""):
        self.note, self.axes = note, axes

    def __call__(self, value, hint="", tolerance=1e-4, names=""):
        """`value` has to be what the answer gives. hint: what was tried, for the student. names: of the levels of a
        list in lists, as `compare.place_of` takes them."""
        self.note(plain(value), hint, tolerance, names + self.axes)

    def call(self, function, *given, hint="", tolerance=1e-4, names="", then=lambda result: result):
        """So has what a function makes of its arguments, or what `then` makes of that, and then the arguments, which it
        leaves as they are. -> the function's result"""
        tried, parameters = called(function, given), "|".join(parameters_of(function, given))
        result = function(*given)
        self(then(result), f"{tried}. {hint}", tolerance, names)
        self(given, f"{function.__name__}: its arguments afterwards, which it leaves as they are.", 1e-5,
             f"{parameters}|")  # some come from an earlier call
        return result


@pytest.fixture
def same(request):
    node, recorded = request.node, request.config.getoption("--record")
    node.notes, node.right = [], [] if recorded else right_notes(node)
    return noting(node.notes, node)


def noting(notes, node):
    """A `Same` that adds to a list, with the names that a file of tests has for tensors' dimensions."""
    return Same(lambda *note: notes.append(note), getattr(node.module, "AXES", ""))


def right_notes(node):
    """What the answer hands to `same` in this test."""
    name, seed = node.path.stem.removeprefix("test_"), node.config.getoption("--seed")
    answer = answer_of(name + PAGE * node.name.startswith("test_page"))
    stored = node.path.parent / "expected.json"
    if answer.is_file():
        notes = []
        node.function(sub=load(answer), rng=draws(node), same=noting(notes, node))
        return notes
    expected = loads(stored.read_text())
    if seed != key_of(expected["seed"]):
        pytest.fail(f"{stored} has right values for --seed {expected['seed']} alone", pytrace=False)
    return expected["tests"][node.name]["notes"]


# What becomes of it

def pytest_runtest_protocol(item):
    """What is recorded runs in a process of its own, so that a test costs no other its time, memory or state."""
    if record := item.config.getoption("--record"):
        if child := os.fork():
            if os.WIFSIGNALED(os.waitpid(child, 0)[1]):  # else it has noted what it gave
                note(record, item, TOO_LONG)
            return True
        sys.breakpointhook = lambda *_, **__: None  # a debugger would run a file's .pdbrc
        confine([Path(__file__).parents[2], path_of(item)], LONGEST)
    return None


def note(record, item, fault):
    line = {"test": item.name, "title": item.function.__doc__.split("\n")[0], "fault": fault,
            "points": item.get_closest_marker("points").args[0], "notes": getattr(item, "notes", [])}
    os.write(record, f"{dumps(line)}\n".encode())  # to which lines are only added: what is noted stays


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    try:
        return (yield)
    except Exception as error:
        if item.config.getoption("--record") or not isinstance(cause_of(error), NotImplementedError):
            raise
        item.user_properties.append(("unwritten", explain(error, path_of(item))))
        pytest.fail(pytrace=False)
    finally:  # also where the student's code has then raised something
        if wrong := [*complaints(item.notes, item.right, lambda: errors_here(path_of(item), item.path))]:
            pytest.fail(shortest(wrong), pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    record = item.config.getoption("--record")
    if record and (call.when == "call" or call.excinfo):
        note(record, item, explain(call.excinfo.value, item.config.getoption("--file")) if call.excinfo else "")
        os._exit(0)
    return report


def cause_of(error):
    """Triton's interpreter wraps what a kernel raises."""
    return cause_of(error.__cause__) if error.__cause__ else error


def explain(error, path):
    """What an exception says to the student whose file is at `path`."""
    error = cause_of(error)
    if isinstance(error, UserError):
        return f"{error}."
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path.resolve()]
    if isinstance(error, NotImplementedError):
        functions = [frame.name for frame in own if not frame.name.startswith("<")]  # no <listcomp>
        return f"Not written yet: {functions[-1] if functions else error}."
    if isinstance(error, AttributeError) and getattr(error.obj, "__name__", "") == "submission":
        return f"Your file has no `{error.name}`; names stay as they are in the starter."
    first = re.split(r"\n", str(error))[0]
    what = f"{type(error).__name__}: {first}"
    return f"Line {own[-1].lineno} of your file, `{own[-1].line}`, raised {what}" if own else f"It raised {what}"


def pytest_runtest_setup(item):
    item.user_properties.append(("points", item.get_closest_marker("points").args[0]))


def pytest_report_teststatus(report):
    if report.failed and report.when != "collect" and "unwritten" in dict(report.user_properties):
        return "unwritten", "n", "NOT WRITTEN"


def pytest_terminal_summary(terminalreporter):
    found = {key: [(report.nodeid.rpartition("/")[0], dict(report.user_properties)) for report in reports
                   if report.when != "collect"]  # a file of tests that cannot be read has no points
             for key, reports in terminalreporter.stats.items() if key in ("passed", "failed", "error", "unwritten")}
    for folder in dict.fromkeys(folder for folder, _ in found.get("unwritten", [])):
        told = dict.fromkeys(test["unwritten"] for where, test in found["unwritten"] if where == folder)
        names = [line.removeprefix("Not written yet: ").rstrip(".") for line in told]
        terminalreporter.write_line(f"{folder}: not written yet: {', '.join(names)}")
    points = {key: sum(test["points"] for _, test in tests) for key, tests in found.items()}
    terminalreporter.write_line(f"{points.get('passed', 0)} of {sum(points.values())} points")
