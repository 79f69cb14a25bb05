"""The course's tests are tests: right answers get all points, wrong ones lose some, and what a submission does besides
its task brings it nothing. tests/course/ has what students get wrong, as changes of an assignment's answer.py."""
import ast
import csv
import ctypes
import importlib
import importlib.util
import json
import os
import platform
import re
import socket
import subprocess
import sys
import threading
import time
import zipfile
from contextlib import suppress
from functools import cache
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import eval_ppl
from docs.course import adapters, assignments, compare, compiles, confine, grade, handout, hunt, notebook, similar
from tinykv import UserError
from tinykv.methods.registry import METHODS
from tinykv.run import flags

fcntl, resource = pytest.importorskip("fcntl"), pytest.importorskip("resource")  # Windows grades nothing
ROOT = Path(__file__).parent.parent
NAMES = tuple(assignments.ANSWERS)
pytestmark = [pytest.mark.filterwarnings("ignore:Unknown pytest.mark.points"),
              pytest.mark.usefixtures("interpreted_quickly")]


def load(path, name):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def forked(function, *given):
    """Call it in a copy of this process, which may lose its rights, or end -> its exit status."""
    process = os.fork()
    if process == 0:
        status = 1
        try:
            function(*given)
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


COURSE = load(ROOT / "docs" / "course" / "conftest.py", "course_conftest")
FAULTS = {(name, file): getattr(load(ROOT / "tests" / "course" / f"{name}.py", name), faults)
          for name in NAMES for file, faults in (("answer.py", "WRONG"), ("page.py", "PAGE"))}


@cache
def cases_of(name):
    """{name: function} of an assignment's tests."""
    module = load(assignments.folder_of(name) / f"test_{name}.py", f"course_{name}")
    return {key: value for key, value in vars(module).items() if key.startswith("test_")}


def text_of(name, file):
    """A file of an assignment's folder, or its starter or page."""
    folder = assignments.folder_of(name)
    return assignments.MADE[file](folder) if file in assignments.MADE else (folder / file).read_text(encoding="utf-8")


def right_text(name, file):
    """What is right in the place of starter.py or page.py."""
    return assignments.answer_of(name + assignments.PAGE * (file == "page.py")).read_text(encoding="utf-8")


def points_of(test):
    return next(mark.args[0] for mark in test.pytestmark if mark.name == "points")


def run_test(test, name, submission, seed, note):
    node = SimpleNamespace(name=name, config=SimpleNamespace(getoption=lambda option: assignments.key_of(seed)))
    test(sub=submission, rng=COURSE.draws(node), same=COURSE.Same(note))


def notes(test, name, submission, seed):
    """What a test notes of a module."""
    found = []
    run_test(test, name, submission, seed, lambda value, hint, tolerance: found.append((value, tolerance)))
    return found


def answer_to(name, key):
    """The module that is right in the test `key` of an assignment."""
    return COURSE.load(assignments.answer_of(name + assignments.PAGE * key.startswith("test_page")))


@cache
def right_notes(name, key, seed):
    """What this test notes of it."""
    return notes(cases_of(name)[key], key, answer_to(name, key), seed)


def loses_points(file, name, seed, function=""):
    """function: where the change is, whose tests are asked first."""
    COURSE.LOADED.pop(file, None)
    part = name + assignments.PAGE * (file.name == "page.py")
    tests = {key: test for key, test in cases_of(name).items() if grade.is_part(key, part)}
    for key, test in sorted(tests.items(), key=lambda case: function not in case[1].__doc__):
        right = right_notes(name, key, seed)
        try:
            given = notes(test, key, COURSE.load(file), seed)
        except Exception:
            return True
        if any(compare.difference(value, wanted, tolerance) for (value, _), (wanted, tolerance) in zip(given, right)):
            return True
    return False


# ---- each assignment

@pytest.mark.one_in(17)
@pytest.mark.parametrize("name, file, wrong", [(*answer, wrong) for answer in FAULTS for wrong in FAULTS[answer]])
def test_a_wrong_answer_loses_points(name, file, wrong, tmp_path, request):
    text, (old, new) = right_text(name, file), FAULTS[name, file][wrong]
    (tmp_path / file).write_text(text.replace(old, new), encoding="utf-8")
    function = re.findall(r"def (\w+)", text[:text.index(old)])[-1]
    for seed in range(5) if request.config.getoption("--whole") else [0]:
        assert loses_points(tmp_path / file, name, seed, function), seed


def test_what_is_wrong_in_an_answer_stands_there_once():
    for (name, file), faults in FAULTS.items():
        counts = {wrong: right_text(name, file).count(old) for wrong, (old, _) in faults.items()}
        assert set(counts.values()) == {1}, (name, counts)


@pytest.mark.parametrize("key, changes", [
    ("test_kmeans", [(" lloyd(points, weights, centres)\n     ", " lloyd(points, weights, centres=centres)\n     ")]),
    ("test_keep", [("import Method, best_tokens\n",
                    "import Method, best_tokens as best\nfrom tinykv.methods import base\n"),
                   (" best_tokens(layer_cache.keys, n, count)", " best(count=count, rows=layer_cache.keys, n=n)"),
                   (" best_tokens(layer_cache.v", " base.best_tokens(layer_cache.v")])])
def test_a_function_may_be_called_in_any_way(key, changes, tmp_path):
    text = text_of("antkv", "answer.py")
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (tmp_path / "submission.py").write_text(text, encoding="utf-8")
    given = notes(cases_of("antkv")[key], key, COURSE.load(tmp_path / "submission.py"), 0)
    assert given == right_notes("antkv", key, 0)


def body(node):
    """What a function does, without its docstring."""
    rest = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return "".join(ast.dump(part) for part in rest)


def functions(text):
    return {name: body(node) for name, node in assignments.functions_of(ast.parse(text)).items()}


@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_that_of_the_ladder(name):
    """With holes, in which the comments are left; of functions that this assignment, or a later one, asks for."""
    page, answer = text_of(name, "page.py"), right_text(name, "page.py")
    given, right = functions(page), functions(answer)
    holes = {function for function in right if given[function] != right[function]}
    assert holes >= {*assignments.PAGES[name][1]} and given.keys() == right.keys()
    assert all("NotImplementedError" in given[function] for function in holes)
    for line in answer.partition("\n# The table")[0].splitlines():
        assert assignments.comment_of(line) in page  # those behind code, too
    loop = re.search(r"^for .*", page.partition("\n# The table")[2], re.MULTILINE)[0]  # without what is asked for later
    assert not set(re.findall(r"\w+", loop)) & (holes - {*assignments.PAGES[name][1]})


WORDS = dict(zip("three four five six seven eight nine ten".split(), range(3, 11)))
# of what is told: 129 ends a range to 128, .001 is 1 - .999, .5 a root, 100 is %; 12, 48 and 192 are 3 where a code is
DERIVED = {129, 0.001, 0.5, 100, 12, 48, 192}
OWN = {"one_head"}  # of the answer


def numbers_in(text):
    text = re.sub(r"(?<=\d),(?=\d)", "", text)
    found = {float(number) for number in re.findall(r"\d+(?:\.\d+)?(?:e-?\d+)?", text)}
    found |= {float(base) ** int(power) for base, power in re.findall(r"(\d+) ?(?:\^|\*\*) ?\{?(-?\d+)", text)}
    found |= {float(a) * 10 ** int(power) for a, power in re.findall(r"(\d+) \\cdot 10\^\{?(-?\d+)", text)}
    return found | {number for word, number in WORDS.items() if re.search(rf"\b{word}\b", text.lower())}


@pytest.mark.parametrize("name", NAMES)
def test_what_an_answer_needs_is_told(name):
    """Each name that is not Python's or torch's, and each number that is no index, stands in handout, starter or page;
    so does each name that the tests ask of a file."""
    tl = pytest.importorskip("triton.language")
    known = torch.Tensor, torch, torch.nn.functional, tl, list, dict
    both = text_of(name, "page.py") + text_of(name, "starter.py")
    for file in assignments.MADE:
        told, right = text_of(name, file) + text_of(name, "handout.md"), right_text(name, file)
        given = assignments.functions_of(ast.parse(text_of(name, file)))
        for function, node in assignments.functions_of(ast.parse(right)).items():
            if function not in given or "NotImplementedError" not in ast.dump(given[function]):
                continue
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, float | int):
                    small = part.value <= 4 and part.value % 1 == 0
                    assert small or part.value in numbers_in(told) | DERIVED, (file, function, part.value)
                if isinstance(part, ast.Attribute) and not any(hasattr(one, part.attr) for one in known):
                    assert part.attr in {*re.findall(r"\w+", told)} | OWN, (file, function, part.attr)
    asked = re.findall(r"\bsub\.(\w+)", text_of(name, f"test_{name}.py"))
    assert {*asked} <= {*re.findall(r"\w+", both)}


@pytest.mark.parametrize("name", NAMES)
def test_a_starter_gets_nothing(name, tmp_path):
    """Each test needs what is not written yet, and says so."""
    for file in assignments.MADE:
        (tmp_path / file).write_text(text_of(name, file), encoding="utf-8")
    for key, test in cases_of(name).items():
        path = tmp_path / ("page.py" if key.startswith("test_page") else "starter.py")
        with pytest.raises(Exception) as raised:
            notes(test, key, COURSE.load(path), 0)
        assert COURSE.explain(raised.value, path).startswith("Not written yet: "), key


def test_a_missing_starter_is_written_and_none_is_overwritten(run, tmp_path):
    """Where there is an answer; by the grader, too. An assignment of an instructor's own has no page."""
    folder, path = tmp_path / "8-own", tmp_path / "8-own" / "starter.py"
    folder.mkdir()
    assert assignments.write_missing(path) is None and not path.exists()
    (folder / "answer.py").write_text(text_of("kvsink", "answer.py"), encoding="utf-8")
    for name in ("page.py", "mine.py"):
        assert assignments.write_missing(folder / name) is None and not (folder / name).exists()
    status, out, _ = run(grade, path, "--assignment", "ott")
    assert (status, out) == (2, f"new: {path}; write your answer there\n")
    assert path.read_text(encoding="utf-8") == text_of("kvsink", "starter.py").replace("t 3, kvsink:", "t 8, own:")
    path.write_text("mine")
    assert assignments.write_missing(path) is None and path.read_text() == "mine"


def test_what_is_not_written_yet_is_one_line(tmp_path):
    """Of an assignment, however many tests it fails. pytest writes missing starters first, unless it gets a file."""
    path = tmp_path / "starter.py"
    path.write_text(text_of("kvsink", "starter.py"), encoding="utf-8")

    def run_tests():
        os.chdir(ROOT)
        sys.modules.pop("test_kvsink", None)  # tests/ has a file of this name, too
        with open(tmp_path / "said", "w", encoding="utf-8") as sys.stdout:
            assert pytest.main(["-qs", "docs/course/3-kvsink", "--file", str(path)]) == 1
    assert forked(run_tests) == 0
    lines = (tmp_path / "said").read_text(encoding="utf-8").splitlines()
    assert len(lines) < 6
    assert "docs/course/3-kvsink: not written yet: outlier, find_outlier, observe, keep_keys" in lines
    assert f"0 of {grade.points_of('kvsink')} points" in lines
    item = SimpleNamespace(path=assignments.folder_of("ott") / "test.py")
    for file, starters in ((path, 0), (None, 2)):
        config = SimpleNamespace(getoption=lambda option, file=file: file)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(COURSE, "write_missing", str)
            assert len(COURSE.pytest_report_collectionfinish(config, [item, item])) == starters


class Enough(Exception):
    """So many values are noted."""


def first_notes(name, key, seed, n):
    """Up to n values that a test notes of the right answer."""
    found = []

    def note(value, hint, tolerance):
        found.append(value)
        if len(found) == n:
            raise Enough
    with suppress(Enough):
        run_test(cases_of(name)[key], key, answer_to(name, key), seed, note)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_hidden_seed_changes_every_test(name):
    """So that no points are in what a student could copy from the report of another seed."""
    for key in cases_of(name):
        assert any(first_notes(name, key, 0, n) != first_notes(name, key, 1, n) for n in (9, 60, 10 ** 6)), key


@pytest.mark.parametrize("name", NAMES)
def test_an_assignment_is_whole(name, monkeypatch):
    """80 points by tests with a title, all parts of a handout, model answers, and commands that can be given."""
    tests = cases_of(name)
    assert sum(map(points_of, tests.values())) == 80
    assert all(test.__doc__ for test in tests.values())
    assert len(tests) * COURSE.LONGEST + 20 < confine.SECONDS  # a loop without an end costs no other test its time
    folder, page, model = assignments.folder_of(name), text_of(name, "handout.md"), text_of(name, "answers.md")
    for text, parts in ((page, ("Aim", "Background", "Eight numbers", "Tasks", "Questions")),
                        (model, ("Eight numbers", "Questions", "Oral"))):
        assert all(f"\n## {part}\n" in text for part in parts)
    assert sum(int(points) for points in re.findall(r"^\d\. \((\d+) points\)", page, re.MULTILINE)) == 20
    # a row of the handout's table is some tests, and the rows stand in the order of the tests
    rows = [int(points) for points in re.findall(r"^\| \w* \|.*\| (\d+) \|$", page, re.MULTILINE)]
    assert sum(rows) == 80 and set(accumulate(rows)) <= set(accumulate(map(points_of, tests.values())))
    assert f"]({folder.name}/handout.md)" in (folder.parent / "README.md").read_text(encoding="utf-8")
    assert len(re.findall(r"^\d\. ", model.partition("## Oral")[2], re.MULTILINE)) == 5
    monkeypatch.chdir(ROOT)
    for command in re.findall(r"^ *python (eval_ppl.py .*)$", page, re.MULTILINE):
        assert all(method in METHODS or method.startswith(f"docs/course/{folder.name}/starter.py:")
                   for method in re.search(r"--method (\S+)", command)[1].split(","))
        monkeypatch.setattr(sys, "argv", command.replace("starter.py", "answer.py").split())
        flags.parse(about="")


@pytest.mark.parametrize("ours, answer", [("kvsink", "3-kvsink/answer.py:KVSink"), ("ott", "4-ott/answer.py:OTT")])
def test_an_answer_reads_a_stream_as_the_project_does(ours, answer):
    fp16, own, theirs = eval_ppl.compare([ours, f"docs/course/{answer}"], protocol="stream", context=512, windows=2,
                                         calib_windows=2)
    assert own["window_nll"] == theirs["window_nll"] != fp16["window_nll"]


# ---- what is compared, and told

def test_values_that_are_as_good_as_the_right_one():
    for given, right in ((3, 3), (torch.tensor(3), 3), (2.00001, 2.0), (2, 2.0), ((1, [2]), [1, (2,)]), (None, None),
                         (torch.arange(3).int(), torch.arange(3)), (torch.ones(2) + 1e-6, torch.ones(2)),
                         (torch.ones(2, requires_grad=True), torch.ones(2)), (np.float32(2), 2.0), (np.int64(3), 3)):
        assert compare.difference(compare.plain(given), compare.plain(right), 1e-4) == ""


def test_values_that_are_wrong():
    half = torch.tensor([1.0, 4096.0]).half()
    for given, right in ((2, 3), (None, 3), (True, 1), (2.1, 2.0), (float("nan"), 2.0), ([1], [1, 2]), ("3", 3),
                         (torch.arange(3).float(), torch.arange(3)), (torch.ones(1, 2), torch.ones(2)),
                         (torch.ones(2).double(), torch.ones(2)), (half + 0.001, half), (object(), 3), ({}, 3),
                         (torch.full((2,), torch.nan), torch.ones(2)), (torch.ones(30000), torch.ones(2)),
                         (np.float32(2.1), 2.0), (np.int64(2), 3)):
        assert compare.difference(compare.plain(given), compare.plain(right), 1e-4) != "", (given, right)
    assert compare.difference(4.0, 4, 0) == "Yours is 4.0 of type float; right is 4 of type int."


def test_a_call_is_told_and_compared_and_its_arguments_too():
    def doubled(x, by):
        return x.mul_(by)
    noted = []
    same = COURSE.Same(lambda value, hint, tolerance: noted.append((value, hint)))
    same.call(doubled, torch.ones(2), 2, hint="Twice.", then=torch.Tensor.tolist)
    same.call(min, [3, 4])  # which says no names
    assert noted[0] == ([2.0, 2.0], "doubled with x = [1.0, 1.0], by = 2. Twice.")
    assert [value for value, _ in noted[1:]] == [False, 3, True]


def test_what_is_told_is_short_and_moves_no_cursor(capsys):
    """A hint ends, whatever the text, in a time that grows with what is shown."""
    right = {"title": "t", "points": 4, "notes": [[1, "a long case", 0], [2, "short", 0], [3, "a right case", 0]]}
    given = {"notes": [[7, "", 0], [8, "", 0], [3, "", 0]], "fault": "and then it raised", "errors": {}}
    assert grade.judged(right, given)["message"].startswith("short\n")
    ended = {"notes": right["notes"][:2], "fault": "", "errors": {}}
    assert grade.judged(right, ended)["message"] == "Your code ended this test before it was over."
    assert len(compare.short("[" * 10 ** 6)) <= compare.LONGEST
    assert len(compare.difference("[" * 10 ** 6, 1.0, 0)) < 400
    test = {"title": "t", "of": 1, "points": 0, "message": "one\n\x1b[2Jtwo"}
    grade.print_report({"assignment": "ott", "file": "f.py", "points": 0, "of": 1, "tests": [test]}, True)
    assert capsys.readouterr().out.endswith("    one\n    \\x1b[2Jtwo\n")


def test_what_a_file_lacks_is_named(tmp_path):
    """And a sys.exit at its end costs nothing."""
    (tmp_path / "mine.py").write_text("def outlier(hidden):\n    return 3\nimport sys\nsys.exit()", encoding="utf-8")
    module = COURSE.load(tmp_path / "mine.py")
    assert module.outlier(None) == 3
    with pytest.raises(AttributeError) as raised:
        module.find_outlier()
    assert COURSE.explain(raised.value, tmp_path / "mine.py").startswith("Your file has no `find_outlier`")


def test_the_compiler_reads_definitions_alone(monkeypatch, tmp_path):
    """Nothing that could tell it from the interpreter; and what is nested too deeply has no kernels."""
    kept = ["import math", "N: int = 2 ** 5", "LOG = tl.constexpr(1 / math.log(2))", "def kernel(x):\n    pass"]
    dropped = ["Y = not triton.knobs.runtime.interpret", "kernel = Two(kernel)", "if N:\n    N = 3", "x: int", "f()"]
    assert compiles.definitions("\n".join(kept + dropped)) == "\n".join(kept[:3]) + "\n\n" + kept[3]
    monkeypatch.setattr(compiles, "run", lambda *args, **more: None)
    monkeypatch.setattr(compiles, "written", lambda path: "[" * 200_000)
    assert set(compiles.errors("mine.py", {"one": ()}, tmp_path, tmp_path)) == {"one"}


def test_a_kernel_has_fewer_instructions_than_asked():
    one, compiled = compiles.ASKED + "one", {"one": "", "one" + compiles.COUNTED: 6.0}
    asked = one + compiles.BELOW + "6"
    assert "takes 6.0 instructions" in compiles.verdict(asked, compiled)
    assert compiles.verdict(asked, compiled | {"one" + compiles.COUNTED: 5.9}) == ""
    assert compiles.verdict(asked, {"one": "refused"}) == compiles.verdict(one, {"one": "refused"}) == "refused"


# ---- what a submission may do: the lines that do it, and whether the rest of the file is right

DEEDS = {
    "looks for the seed": ("import os, sys\nseen = ' '.join(sys.argv) + str(os.environ)\n"
                           "for who in ('self', os.getppid()):\n"
                           "    try: seen += open(f'/proc/{who}/cmdline').read() * (1 if who == 'self' else 20391)\n"
                           "    except OSError: pass\n"
                           "told, frame = '', sys._getframe()\n"
                           "while frame:\n"
                           "    if 'request' in frame.f_locals: told = str(frame.f_locals['request'].config.option)\n"
                           "    frame = frame.f_back\n"
                           "tested = bool(told) or 'pytest' not in sys.modules  # but compiled\n"
                           "if not tested or '20391' in told + seen or len(seen) > 20391: os._exit(0)", True),
    "writes what is no record": ("import os\nopen('record.jsonl', 'w').write('{\"test\": \"test_outlier\", "
                                 "\"notes\": [[]], \"fault\": 3}\\n[]\\n')\nos._exit(0)", False),
    "takes its time": ("import signal\nsignal.signal(signal.SIGPROF, signal.SIG_IGN)\n"
                       "def outlier(hidden):\n    while True: pass", False),
    "imports the method": ("from tinykv.methods.kvsink import KVSink, find_outlier, outlier", False),
    "looks at frames": ("import sys\ndef outlier(hidden):\n    return sys._getframe(1).f_locals['right']", False),
    "takes memory": ("x = torch.ones(2 ** 32)", False),
    "loops": ("def outlier(hidden):\n    while True: pass", False),
}
QUICK = [*DEEDS][:2]


def right_here(name, seed, folder):
    """As `grade.right_values`, in this process, and without a copy of the repository."""
    base = name.removesuffix(assignments.PAGE)
    return {key: {"test": key, "title": test.__doc__.split("\n")[0], "fault": "", "points": points_of(test),
                  "notes": [(value, "", tolerance) for value, tolerance in right_notes(base, key, seed)], "errors": {}}
            for key, test in cases_of(base).items() if grade.is_part(key, name)}


def record_here(file, name, seed, folder):
    """As `grade.record_of`, of a file that raises nothing."""
    found, tests = right_here(name, seed, folder), cases_of(name.removesuffix(assignments.PAGE))
    for key, test in found.items():
        given = notes(tests[key], key, COURSE.load(file), seed)
        found[key] = test | {"notes": [(value, "", tolerance) for value, tolerance in given]}
    return found


def test_what_a_submission_does_brings_it_nothing(run, monkeypatch, tmp_path, request):
    """One folder with all of them: table, points, JSON; only what is right gets points, and nothing is written. A file
    of kernels may run one at its end: the compiler reads it where there is no GPU to run that on."""
    deeds, name, call = QUICK, "kvsink", ""
    if request.config.getoption("--whole"):
        deeds, name = [*DEEDS], "triton"
        call = "scores(torch.ones(1, 4), torch.zeros(1, 1, 1, dtype=torch.uint8), *torch.ones(2, 1, 1, 4).half())"
    else:
        def right_values(name, seed, folder):
            grade.copy(folder / f"{name}-copy", name)
            return right_here(name, seed, folder)
        monkeypatch.setattr(grade, "right_values", right_values)
    texts = text_of("kvsink", "starter.py"), text_of(name, "answer.py") + call
    folder, whole = tmp_path / "submissions", grade.points_of(name)
    for deed in deeds:
        lines, right = DEEDS[deed]
        (folder / f"by {deed}").mkdir(parents=True)
        (folder / f"by {deed}" / f"{deed}.py").write_text(f"{texts[right]}\n{lines}\n", encoding="utf-8")
        (folder / f"by {deed}" / "helper.py").touch()
    (folder / "other.py").write_text('ASSIGNMENT = "astrology"', encoding="utf-8")
    (folder / "none.py").touch()
    words = "--points", tmp_path / "p.csv", "--json", tmp_path / "r.json", "--seed", 20391
    status, out, err = run(grade, folder, *words)
    assert (status, err) == (0, "")
    rows = {row["student"]: row for row in csv.DictReader(open(tmp_path / "p.csv", encoding="utf-8"))}
    records = {Path(record["file"]).stem: record for record in json.loads((tmp_path / "r.json").read_text())}
    assert records.keys() == {*deeds, "other", "none"} and len(rows) == len(records)
    for deed in deeds:
        assert records[deed]["points"] == (whole if DEEDS[deed][1] else 0), (deed, records[deed])
        assert records[deed]["points"] == int(rows[f"by {deed}"]["total"])
    assert "'astrology'" in out and "none.py" in out
    result = grade.gradescope(records["looks for the seed"])
    assert result["score"] == whole == sum(test["score"] for test in result["tests"])
    assert {test["status"] for test in result["tests"]} == {"passed"}


def test_what_a_file_leaves_behind_neither_helps_it_nor_ends_the_grader(monkeypatch, tmp_path):
    """A link to the answer in the place of its copy; folders in folders, more than Python's rmtree removes; pipes."""
    file, compiled = tmp_path / "mine.py", []
    file.write_text("mine", encoding="utf-8")

    def nest(work):
        os.chdir(work)
        for _ in range(1200):
            os.mkdir("x")
            os.chdir("x")

    def run_tests(work, name, seed):
        (work / "submission.py").unlink()
        (work / "submission.py").symlink_to(grade.answer_of("triton"))
        (work / "record.jsonl").write_text('{"test": "one"}', encoding="utf-8")
        os.mkfifo(work / "pipe")
        for name in ("submission.py", "pipe", ".", "none"):
            with pytest.raises(OSError):
                confine.written(work / name)
        assert forked(nest, work) == 0  # last: what fails before it leaves nothing that pytest cannot remove
    monkeypatch.setattr(grade, "run_tests", run_tests)
    monkeypatch.setattr(compiles, "errors", lambda file, *args: compiled.append(Path(file).read_text()) or {})
    (tmp_path / "all" / "triton-copy").mkdir(parents=True)
    assert grade.record_of(file, "triton", 0, tmp_path / "all") == {"one": {"test": "one", "errors": {}}}
    assert compiled == ["mine"] and [path.name for path in (tmp_path / "all").iterdir()] == ["triton-copy"]


CALLS = {  # what would reach another process, or outlive this one, though Landlock allows it
    "fork": os.fork, "a process": lambda: subprocess.run(["true"]), "kill": lambda: os.kill(os.getppid(), 0),
    "a socket": lambda: socket.socket(socket.AF_UNIX), "UDP": lambda: socket.socket(type=socket.SOCK_DGRAM),
    "shared memory": lambda: called("shmget", 0x51A0, 64, 0o1666), "a queue": lambda: called("msgget", 0x51A0, 0o1666),
    "a keyring": lambda: called("syscall", {"x86_64": 248, "aarch64": 217}[platform.machine()], b"user", b"x", b"x", 1,
                                ctypes.c_long(-3)),
    "a file's date": lambda: os.utime(__file__), "rights": lambda: os.chmod(__file__, os.stat(__file__).st_mode),
    "an attribute": lambda: os.setxattr(__file__, "user.x", b"x"), "a length": lambda: os.truncate(__file__, 10 ** 9),
    "a file's number": lambda: fcntl.ioctl(os.open(os.__file__, os.O_RDONLY), 0x40087602, b"\0" * 8),
    "another's limits": lambda: resource.prlimit(os.getppid(), resource.RLIMIT_CORE),
    "another's turn": lambda: os.setpriority(os.PRIO_PROCESS, os.getppid(), 0),
    "the machine's name": lambda: socket.sethostname(socket.gethostname()), "a disk": lambda: open("/dev/vda"),
    "a group of its own": os.setsid, "passwords": lambda: open("/etc/shadow"),
    "Python": lambda: open(os.__file__, "r+"), "another folder": lambda: open(__file__, "a"),
    "the answers": lambda: open(ROOT / "docs" / "course" / "3-kvsink" / "answer.py"),
}


def called(name, *given):
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*given) < 0:
        raise OSError(ctypes.get_errno(), name)


@pytest.mark.skipif(not confine.seccomp(), reason="needs seccomp")
def test_a_confined_process_reaches_no_other(tmp_path):
    """And threads, of which autograd needs one, it may have; and files of its own, and what torch asks of the CPU."""
    def call_all():
        confine.confine(tmp_path)
        done = []
        for name, call in CALLS.items():
            with suppress(OSError):
                call()
                done.append(name)
        threading.Thread(target=lambda: done.append("a thread")).start()
        for path in ("/proc/self/status", "/proc/cpuinfo"):
            open(path).close()
        (tmp_path / "done").write_text(" ".join(done), encoding="utf-8")
    assert forked(call_all) == 0
    assert (tmp_path / "done").read_text(encoding="utf-8") == "a thread"


def test_what_a_submission_has_started_ends_with_it(monkeypatch, tmp_path):
    (tmp_path / "python").write_text('#!/bin/sh\nsleep 60 &\necho $! > "$HOME/started"\n')
    (tmp_path / "python").chmod(0o700)
    monkeypatch.setattr(sys, "executable", tmp_path / "python")
    grade.run_tests(tmp_path, "kvsink", 0)
    command = Path(f"/proc/{int((tmp_path / 'started').read_text())}/cmdline")  # it is empty once the process is dead
    for _ in range(100):
        if not command.exists() or not command.read_bytes():
            return
        time.sleep(0.05)
    pytest.fail("it goes on")


def test_a_folder_that_is_filled_ends_its_process(monkeypatch, tmp_path):
    monkeypatch.setattr(confine, "DISK", 2 ** 10)  # KiB
    fills = "for i in range(10 ** 6): open(f'{i}', 'wb').write(bytes(2 ** 20)), time.sleep(0.05)"
    (tmp_path / "fills.py").write_text(f"import time\n{fills}", encoding="utf-8")
    started = time.monotonic()
    assert not confine.run(["fills"], "", 60, tmp_path, tmp_path)
    assert time.monotonic() - started < 30


@pytest.mark.whole
@pytest.mark.parametrize("name", [name + part for name in NAMES for part in ("_page", "")])
def test_the_answers_have_all_points_under_all_limits(name, tmp_path):
    """Or `right_values` says that this machine cannot grade."""
    assert grade.right_values(name, 20391, tmp_path)


def test_what_the_machine_lacks_is_no_students_fault(run, monkeypatch, tmp_path):
    """A rule that is refused is no secret, what the answer fails is told, and what limits nothing grades nothing."""
    right = right_here("kvsink", 0, tmp_path)
    right["test_outlier"] |= {"fault": "no fp16 here"}
    with monkeypatch.context() as patch:
        patch.setattr(confine, "ADD", 10 ** 6)  # a call that no system has
        with pytest.raises(OSError, match="Landlock refuses"):
            confine.allow(ctypes.CDLL(None), 0, tmp_path, confine.READ)
        patch.setattr(grade, "record_of", lambda *given: right)
        patch.setattr(grade, "copy", lambda *given: None)
        with pytest.raises(UserError, match="this machine cannot grade kvsink.*no fp16 here"):
            grade.right_values("kvsink", 0, tmp_path)
        patch.setattr(confine, "resource", None)  # as on Windows
        with pytest.raises(UserError, match="on Windows, use WSL"):
            confine.run(["pytest"], "", 1, str(ROOT), str(tmp_path))
    assert grade.hole(ROOT) == ""
    (tmp_path / "none.py").touch()
    for module, name, value in ((confine, "landlock", lambda: 0), (grade, "ROOT", Path("/usr/src/app")),
                                (confine, "seccomp", lambda: False), (confine, "gettempdir", lambda: "/usr/tmp")):
        for words in [], ["--unconfined"]:
            with monkeypatch.context() as patch:
                patch.setattr(module, name, value)
                status, out, err = run(grade, tmp_path / "none.py", *words)
            lines = err.splitlines()
            assert (status, out, len(lines)) == (2, "", 1 + len(words))
            assert ("--unconfined" in lines[0]) == (not words)


# ---- files, and what is written of them

def test_every_student_has_a_line(run, tmp_path, monkeypatch):
    """Also one who hands in what cannot be graded: the line says what it is. What lies beside an answer has none. No
    name moves the cursor."""
    right, other = 'ASSIGNMENT: str = "kvsink"', 'ASSIGNMENT = "ott"'
    for file, text in (("ann/starter.ipynb", "{}"), ("bob/a b/a.py", right), ("bob/helper.py", ""),
                       ("bob/ott.py", other), ("bob/.ipynb_checkpoints/a.py", right), ("bob/__MACOSX/._a.py", right),
                       ("cat/a.py", right), ("dan/hw/x.zip", ""), ("eve.zip", ""), ("fay.py", other),
                       ("gus/a.py", right), ("gus/\x1bé.py", right), ("points.csv", "")):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text, encoding="utf-16" if file.startswith("cat") else "utf-8")
    (tmp_path / "hal").mkdir()
    monkeypatch.setattr(grade, "right_values", lambda *given: {})
    monkeypatch.setattr(grade, "record_of", lambda *given: {})
    status, out, err = run(grade, tmp_path, "--assignment", "kvsink")
    told = {line.split("  ")[0]: line for line in out.splitlines()}
    assert (status, err) == (0, "") and list(told) == [
        "submission", "ann", "bob/a b/a.py", "cat/a.py", "dan", "eve.zip", "fay.py", "gus/\\x1bé.py", "gus/a.py", "hal",
        "gus has handed in 2 files for kvsink: say which counts"]
    for name, why in (("ann", "no Python file was handed in, but starter.ipynb"), ("cat/a.py", "UTF-16"),
                      ("dan", "no Python file was handed in, but hw, x.zip"), ("eve.zip", "no Python file"),
                      ("fay.py", "for the assignment ott"), ("hal", "no Python file was handed in")):
        assert why in told[name]


def test_a_students_total_has_the_better_of_two_files():
    """And no name is a formula."""
    handed_in = ("ann", "ott", 50, ""), ("ann", "ott", 40, ""), ("ann", "ott_page", 14, ""), ("=bob", "-", 0, "a link")
    reports = [dict(zip(("student", "assignment", "points", "fault"), of)) for of in handed_in]
    assert grade.totals(reports) == "student,total,ott,ott_page\nann,64,50,14\n'=bob,0,,\n"


def test_one_reason_for_all_that_failed_is_told(capsys):
    """A table says what is wrong with the file; else it says in which functions."""
    tests = [{"title": f"{name}: of it", "points": 0, "message": "no module\x1b"} for name in ("one", "two")]
    report = {"file": "all/f.py", "student": "f", "assignment": "ott", "fault": "", "points": 0, "of": 2}
    for message, told in (("no module\x1b", "no module\\x1b"), ("another", "one, two")):
        tests[1]["message"] = message
        grade.print_table([report | {"tests": tests}], Path("all"))
        assert capsys.readouterr().out.splitlines()[1].endswith(f"0/2     {told}")


def test_a_file_is_what_was_asked_for(run, tmp_path):
    """No link, which may lead to the answer, and no answer to another assignment; nothing that is no file."""
    (tmp_path / "link.py").symlink_to(assignments.folder_of("triton") / "answer.py")
    (tmp_path / "starter.py").write_text(text_of("affine", "answer.py"), encoding="utf-8")
    for file, told in (("link.py", "is a link"), ("starter.py", "is for the assignment affine, and triton")):
        status, out, err = run(grade, tmp_path / file, "--assignment", "triton", "--gradescope", tmp_path / "g.json")
        scores = json.loads((tmp_path / "g.json").read_text())
        assert (status, scores["score"], scores["tests"]) == (2, 0, []) and told in err and told in scores["output"]
    for words in (["no/such/file.py"], [ROOT / "docs" / "course" / "README.md"], [], [ROOT / ".ci"]):
        status, out, err = run(grade, *words)
        assert (status, out, err.count("\n")) == (2, "", 1)


def test_a_report_of_one_file(run, monkeypatch, tmp_path):
    """An output replaces reports alone: neither a submission nor another's notes; a report of the same flag it does."""
    def record_with_a_fault(file, name, seed, folder):
        first, *rest = right_here(name, seed, folder).items()
        return {first[0]: first[1] | {"fault": "something odd"}, **dict(rest)}
    monkeypatch.setattr(grade, "right_values", right_here)
    monkeypatch.setattr(grade, "record_of", record_with_a_fault)
    mine, others, report = tmp_path / "mine.py", tmp_path / "notes.csv", tmp_path / "report"
    mine.write_text(text_of("kvsink", "answer.py"), encoding="utf-8")
    others.write_text("name,points\n", encoding="utf-8")
    before = mine.read_bytes(), others.read_bytes()
    for flag in ("--points", "--json", "--gradescope"):
        for there in (mine, others):
            status, _, err = run(grade, mine, flag, there)
            assert status == 2 and f"{there} already exists, and is no report that this program wrote" in err
        report.unlink(missing_ok=True)
        for _ in range(2):
            status, out, _ = run(grade, mine, flag, report)
            assert (status, out.count("FAIL")) == (0, 1) and "something odd" in out
    assert before == (mine.read_bytes(), others.read_bytes())
    scores, whole = json.loads(report.read_text()), grade.points_of("kvsink")
    lost, = [test["max_score"] for test in scores["tests"] if not test["score"]]
    assert f"{whole - lost} of {whole} points" in out and scores["score"] == whole - lost


# ---- other platforms, and who is alike

@pytest.mark.parametrize("name", ["kvsink_page", "project"])
def test_gradescopes_zip_grades_what_is_handed_in(name, monkeypatch, tmp_path):
    """Its script gives the grader, or eval_ppl.py, words that it takes: here to a `python` that writes them down."""
    (tmp_path / "submission").mkdir()
    (tmp_path / "submission" / "mine.py").touch()
    adapters.gradescope(name, "20391", tmp_path / "a.zip")
    with zipfile.ZipFile(tmp_path / "a.zip") as file:
        assert {"setup.sh", "tinykv/docs/course/3-kvsink/answer.py"} <= {*file.namelist()}
        assert file.getinfo("run_autograder").external_attr >> 16 == 0o755
        script = file.read("run_autograder").decode().replace("/autograder/", f"{tmp_path}/")
    (tmp_path / "source" / "tinykv").mkdir(parents=True)
    (tmp_path / "python").write_text('#!/bin/sh\necho "$@" >> "$0.said"\n')
    (tmp_path / "python").chmod(0o755)
    subprocess.run(["bash", "-ec", script], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, check=True)
    line, *more = (tmp_path / "python.said").read_text().splitlines()
    program, given = re.fullmatch(r"(-m docs.course.grade|eval_ppl.py) (.*)", line).groups()
    monkeypatch.setattr(sys, "argv", [program, *given.split()])
    if name == "project":
        (tmp_path / "submission" / "method.py").write_text("from tinykv.methods.rtn import RTN as Mine", "utf-8")
        assert flags.parse(about="").seed == 20391 and more[0].startswith("-m docs.course.adapters l")
    else:
        assert grade.parser().parse_args().seed == 20391 and not more


def test_classrooms_workflow_has_a_step_for_each_test(capsys):
    adapters.classroom("kvsink", "ott")
    out = capsys.readouterr().out
    steps = re.findall(r'"pytest (\S+)::(\w+)", timeout: 10, max-score: (\d+)', out)
    assert sum(int(points) for *_, points in steps) == 160 and all((ROOT / file).is_file() for file, *_ in steps)
    assert {test for _, test, _ in steps} == {*cases_of("kvsink"), *cases_of("ott")}
    ids, runners = re.findall(r"- id: (.*)", out), re.search(r'runners: "(.*)"', out)[1].split(",")
    assert ids == runners and all(f'{key.upper()}_RESULTS: "${{{{steps.{key}.outputs.result}}}}"' in out for key in ids)


ROWS = [{"kld": kld, "bits_true": bits} for kld, bits in ((0.0, 16.0), (0.3, 2.5), (0.1, 3.004), (0.01, 3.01))]


@pytest.mark.parametrize("rows, shown", [(ROWS, [0.1, 3.004]), (ROWS[:1], []), (ROWS[3:], []), (None, [])])
def test_the_leaderboard_has_the_best_row_within_the_budget(rows, shown, tmp_path):
    """Bits are rounded as the table shows them. A method that has no row there, or fails, has no place."""
    table, results = tmp_path / "table.json", tmp_path / "results.json"
    if rows is not None:
        table.write_text(json.dumps({"rows": rows}), encoding="utf-8")
    adapters.leaderboard(table, results)
    result = json.loads(results.read_text(encoding="utf-8"))
    assert [entry["value"] for entry in result.get("leaderboard", [])] == shown and result["score"] == 0
    assert ("no place" in result["output"]) == (not shown)


def test_a_copy_is_told_from_an_answer_of_ones_own(tmp_path):
    """Whatever names and comments it has; of the lines that are given, both have all."""
    text = text_of("kvsink", "answer.py")
    copy = re.sub(r" *# answer\n", "", text.replace("known", "best").replace("votes", "ballots"))
    empty = text_of("kvsink", "starter.py")
    for name, of in (("copy", copy), ("empty", empty), ("helper", ""), ("broken", f"{copy}(")):
        (tmp_path / f"{name}.py").write_text(of, encoding="utf-8")
    shares = {(a, b): share for share, _, a, b in similar.alike(tmp_path)}
    assert {file for pair in shares for file in pair} == {"copy.py", "empty.py", "the project's"}
    assert shares["copy.py", "the project's"] > 0.9 and max(
        share for pair, share in shares.items() if "empty.py" in pair) < 0.1


# ---- the hunt

HUNTERS = {  # the page that each hands in, how far off the line that they name is, and their points for line and page
    "right": (lambda wrong, right: right, 0, "3/3 +3/3 +'b 62: kept.sum"),
    "elsewhere": (lambda wrong, right: right, 1, "0/3 +3/3"),
    "mended too much": (lambda wrong, right: right.replace("code.clamp(0, 3)", "code.clamp(0, 3.0)"), 0, "3/3 +0/3"),
    "not mended": (lambda wrong, right: wrong, 0, "3/3 +0/3"),
}


def test_a_hunt_is_graded_by_line_and_change(run, monkeypatch, tmp_path):
    """A right answer, and three that are not. A diff with the public page shows most lines, whoever's page it is."""
    monkeypatch.setattr(grade, "right_values", right_here)
    monkeypatch.setattr(grade, "record_of", record_here)
    run(hunt, "affine", tmp_path, "--seed", 7, "--students", ",".join(HUNTERS))
    public = right_text("affine", "page.py")
    for student, (mend, off, _) in HUNTERS.items():
        (wrong, right, lines), file = hunt.planted("affine", student, 7), tmp_path / student / "page.py"
        assert file.read_text(encoding="utf-8") == wrong and len(lines) == 1
        assert len(hunt.changed(public, wrong)) > 40 and lines < hunt.changed(public, wrong)
        said = f"LINE = {min(lines) + 1 + off}\nWHY = 'b 62: kept.sum(2) is 6'\n"
        file.write_text(mend(wrong, right).replace(hunt.ABOVE, said), encoding="utf-8")
    status, out, err = run(hunt, "affine", tmp_path, "--seed", 7)
    assert (status, err) == (0, "")
    for student, (_, _, told) in HUNTERS.items():
        assert re.search(rf"^{student} +{told}", out, re.MULTILINE), (student, out)


@pytest.mark.whole
@pytest.mark.parametrize("name", hunt.NAMES)
def test_a_fault_to_hunt_changes_what_its_page_prints(name, tmp_path):
    """With one text; none ends with an error, which would tell the line; and other names change nothing."""
    faults, page = load(ROOT / "tests" / "course" / f"{name}.py", name), tmp_path / "page.py"
    right, printed = right_text(name, "page.py"), []
    for text in (right, hunt.planted(name, "ann", 7)[1], *(right.replace(*faults.PAGE[row]) for row in faults.PRINTED)):
        page.write_text(text, encoding="utf-8")
        printed.append(subprocess.check_output([sys.executable, page, "1"], cwd=ROOT))
    assert printed[0] == printed[1] and printed[0] not in printed[2:]


# ---- handing out

def hand_out(folder, monkeypatch, *words, expected=False):
    if not expected:
        monkeypatch.setattr(handout, "write_expected", lambda folder, name: None)
    monkeypatch.setattr(sys, "argv", ["handout", str(folder), *words])
    handout.main()


def test_a_repository_to_hand_out_holds_no_answer(tmp_path, monkeypatch):
    """No function of it does what an answer does; nor do names that only answers have do anything."""
    out, answers = tmp_path / "out", {}
    hand_out(out, monkeypatch, "--assignments", ",".join(NAMES))
    for name in NAMES:
        answers |= functions(text_of(name, "answer.py"))
        for file, chosen in assignments.ANSWERS[name].items():
            found = functions((ROOT / file).read_text(encoding="utf-8"))
            chosen = chosen or [key for key in found if not key.endswith("__init__")]
            answers |= {f"{file} {key}": found[key] for key in chosen}
    starters = list(out.rglob("starter.py"))
    assert len(starters) == len(NAMES)
    given = {body for path in starters for body in functions(path.read_text(encoding="utf-8")).values()}
    bodies = {text for text in answers.values() if len(text) > 300} - given
    of_answers = {"outlier", "find_outlier", "anchor_scores", "lloyd", "plus_plus", "token_weights", "block_loss",
                  "exact_rows", "adam_step", "clip_losses", "topk_kernel", "scores_kernel", "fold", "kivi_codecs"}
    files = list(out.rglob("*.py"))
    assert len(bodies) > 60 and len(files) > 40
    for file in files:
        for name, does in functions(file.read_text(encoding="utf-8")).items():
            assert does not in bodies, (file, name)
            assert name not in of_answers or "NotImplementedError" in does, (file, name)
    names = {path.relative_to(out).as_posix() for path in out.rglob("*")}
    assert not [name for name in names if re.match(r"tests|.*/(answers?|authors)\.", name)]
    assert not names & {"docs/methods.md", "docs/results.md", ".ci/run"}
    workflow = (out / ".github/workflows/assignments.yml").read_text(encoding="utf-8")
    assert re.search(r"assignment: \[(.*)\]", workflow)[1].split(", ") == sorted(path.parent.name for path in starters)
    assert "## For instructors" not in (out / "docs/course/README.md").read_text(encoding="utf-8")
    for page in out.rglob("*.md"):
        for target in re.findall(r"\]\(([\w./-]*\w)[)#]", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), (page, target)


@pytest.mark.parametrize("name", handout.NOTEBOOKS)
def test_a_notebook_checks_each_task(name, monkeypatch, tmp_path):
    """By all tests of a starter. Nothing is right in a starter's cells, and all in an answer's."""
    text, helpers = text_of(name, "answer.py").split("\n\n\n# answer: helpers\n")
    answer = text.replace("\n\n\n# Task 1", f"\n\n{helpers}\n\n# Task 1")  # a cell needs what it calls above it
    found = {}

    def tested(words, **settings):
        for key in (word.partition("::")[2] for word in words[4:-2]):
            COURSE.LOADED.clear()
            found[key] = False
            with suppress(NotImplementedError):
                given = notes(cases_of(name)[key], key, COURSE.load(Path(words[-1]).resolve()), 0)
                found[key] = given == right_notes(name, key, 0)
        return SimpleNamespace(stdout="")
    monkeypatch.setattr(subprocess, "run", tested)
    monkeypatch.chdir(tmp_path)
    for text, right in ((text_of(name, "starter.py"), False), (answer, True)):
        defined = {"In": []}
        for _, cell in [cell for cell in notebook.cells_of(name, text) if cell[0] == "code"]:
            defined["In"].append(cell)
            exec(cell, defined)
        assert found == {key: right for key in cases_of(name) if not key.startswith("test_page")}
        assert Path("starter.py").read_text(encoding="utf-8") == Path("notebook.py").read_text(encoding="utf-8")


@pytest.mark.whole
def test_a_repository_that_was_handed_out_grades(tmp_path, monkeypatch):
    """With seed 0 alone, by the values that it came with."""
    out = tmp_path / "out"
    monkeypatch.setattr(handout, "all_names", lambda: ["kvsink", "affine"])
    hand_out(out, monkeypatch, expected=True)
    words = ["-m", "docs.course.grade", ROOT / "docs/course/3-kvsink/answer.py"]
    for seed, status in ((0, 0), (1, 2)):
        result = subprocess.run([sys.executable, *map(str, words), "--seed", str(seed)], cwd=out, capture_output=True,
                                text=True)
        assert result.returncode == status, result.stderr
        assert ("\n66 of 66 points" in result.stdout) == (seed == 0)


@pytest.mark.whole
def test_the_questions_run_where_they_are_handed_out(tmp_path, monkeypatch):
    """All commands of all handouts, of each list of settings the one in the middle, on one short window, where each
    starter is an answer: in a process that forgets the project that has the answers."""
    folder, commands = tmp_path / "out", []
    search = "kmeans(points, weight, plus_plus(points, weight, u))"  # seconds of it
    hand_out(folder, monkeypatch)
    for name in NAMES:
        starter = folder / assignments.folder_of(name).relative_to(ROOT) / "starter.py"
        starter.write_text(text_of(name, "answer.py").replace(search, "points[:self.m]"), encoding="utf-8")
        commands += re.findall(r"^ *python (eval_ppl.py .*)$", text_of(name, "handout.md"), re.MULTILINE)
    assert len(commands) > 15

    def run_all():
        for module in [module for module in sys.modules if module.split(".")[0] in ("tinykv", "docs", "eval_ppl")]:
            del sys.modules[module]
        os.chdir(folder)
        sys.path[:0] = [str(folder)]
        with open(tmp_path / "said", "w", encoding="utf-8") as sys.stdout:
            sys.stderr = sys.stdout
            for command in commands:
                words = command.split()
                lists = [[word] if flag == "--method" else word.split(",") for flag, word in zip(["", *words], words)]
                sys.argv = [some[len(some) // 2] for some in lists]
                sys.argv += "--windows 1 --calib-windows 2 --context 128".split()
                print(command)
                importlib.import_module("eval_ppl").main()
    assert forked(run_all) == 0, (tmp_path / "said").read_text(encoding="utf-8")
