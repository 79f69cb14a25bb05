"""The course's tests are tests: right answers get all points, wrong ones lose some, and what a submission does besides
its task brings it nothing. tests/lab/course/ has what students get wrong, as changes of an assignment's answer.py."""
import ast
import ctypes
import importlib
import json
import multiprocessing
import os
import platform
import re
import runpy
import socket
import subprocess
import sys
import threading
import time
import zipfile
from contextlib import nullcontext, suppress
from functools import cache
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import eval_ppl
from docs.course import assignments, compare, compiles, confine, grade, gradescope, handout, hunt, notebook, similar
from docs.course import conftest as course
from docs.course.assignments import PAGE
from docs.course.restrict import run as run_restricted
from tinykv import UserError

fcntl, resource = pytest.importorskip("fcntl"), pytest.importorskip("resource")  # Windows grades nothing
ROOT = Path(__file__).parents[2]
NAMES = tuple(assignments.ANSWERS)
PARTS = [name + part for name in NAMES for part in ("", PAGE)]
points_in, kernels_in = cache(grade.tests_in), cache(compiles.kernels_in)
pytestmark = [pytest.mark.filterwarnings("ignore:Unknown pytest.mark.points"),
              pytest.mark.usefixtures("interpreted_quickly")]


confined = pytest.mark.skipif(confine.landlock is None, reason="needs landlock and pyseccomp")


# {part: {name: (old text, new text)}}, of what is right
FAULTS = {part: runpy.run_path(str(ROOT / "tests" / "lab" / "course" / f"{part.removesuffix(PAGE)}.py"))[
    "PAGE" if part.endswith(PAGE) else "WRONG"] for part in PARTS}


def forked(function, *given):
    """Call it in a copy of this process, which may lose its rights, or end -> its exit status."""
    process = multiprocessing.get_context("fork").Process(target=function, args=given)
    process.start()
    process.join()
    return process.exitcode


def read(name, file):
    """The text of a file in an assignment's folder."""
    return (assignments.folder_of(name) / file).read_text(encoding="utf-8")


def given_text(part):
    """What a student begins with: an assignment's starter, or its page."""
    return assignments.MADE["page.py" if part.endswith(PAGE) else "starter.py"](assignments.folder_of(part))


def right_text(part):
    return assignments.answer_of(part).read_text(encoding="utf-8")


@cache
def cases_of(part):
    """{name: function} of the tests of an assignment, or of its page."""
    module = f"docs.course.{assignments.folder_of(part).name}.test_{part.removesuffix(PAGE)}"
    tests = vars(importlib.import_module(module))
    return {key: test for key, test in tests.items() if key.startswith("test_") and grade.is_part(key, part)}


def record(file, part, key, seed):
    """What a process of the grader writes of a test; here it compiles no kernel."""
    node = SimpleNamespace(name=key, config=SimpleNamespace(getoption=lambda option: assignments.key_of(seed)))
    test, notes, fault = cases_of(part)[key], [], ""
    try:
        test(sub=course.load(file), rng=course.draws(node), same=course.Same(lambda *note: notes.append(note)))
    except Exception as error:
        fault = course.explain(error, file)
    kernels = kernels_in(grade.tests_of(part))
    return {"title": test.__doc__.split("\n")[0], "points": points_in(part)[key], "notes": notes, "fault": fault,
            "errors": dict.fromkeys(kernels, "") | {kernel + compiles.COUNTED: 0 for kernel in kernels}}


@cache
def right_record(part, key, seed):
    return record(assignments.answer_of(part), part, key, seed)


def right_here(part, seed, folder):
    """As `grade.right_values`, in this process, and without a copy of the repository."""
    return {key: right_record(part, key, seed) for key in cases_of(part)}


def record_here(file, part, seed, folder):
    """As `grade.record_of`."""
    return {key: record(file, part, key, seed) for key in cases_of(part)}


def has_points(file, part, key, seed=0):
    course.load.cache_clear()
    return grade.judged(right_record(part, key, seed), record(file, part, key, seed))["points"] > 0


# ---- each assignment

@pytest.mark.one_in(17)
@pytest.mark.parametrize("part, wrong", [(part, wrong) for part in PARTS for wrong in FAULTS[part]])
def test_a_wrong_answer_loses_points(part, wrong, tmp_path, request):
    text, (old, new) = right_text(part), FAULTS[part][wrong]
    assert text.count(old) == 1
    (tmp_path / "mine.py").write_text(text.replace(old, new), encoding="utf-8")
    changed = re.findall(r"def (\w+)", text[:text.index(old)])[-1]
    keys = sorted(cases_of(part), key=lambda key: changed not in cases_of(part)[key].__doc__)  # its own tests first
    for seed in range(5) if request.config.getoption("--whole") else [0]:
        assert not all(has_points(tmp_path / "mine.py", part, key, seed) for key in keys), seed


def functions(text):
    """{name: what a function does, without its docstring}"""
    return {name: "".join(map(ast.dump, node.body[ast.get_docstring(node) is not None:]))
            for name, node in assignments.functions_of(ast.parse(text)).items()}


@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_that_of_the_ladder(name):
    """With holes, in which the comments are left; of functions that this assignment, or a later one, asks for."""
    page, answer = given_text(name + PAGE), right_text(name + PAGE)
    given, right = functions(page), functions(answer)
    holes = {function for function in right if given[function] != right[function]}
    assert holes >= {*assignments.PAGES[name][1]} and given.keys() == right.keys()
    assert all("NotImplementedError" in given[function] for function in holes)
    for line in answer.partition("\n# The table")[0].splitlines():
        assert assignments.comment_of(line) in page  # those behind code, too
    loop = re.search(r"^for .*", page.partition("\n# The table")[2], re.MULTILINE)[0]  # without what is asked for later
    assert not set(re.findall(r"\w+", loop)) & (holes - {*assignments.PAGES[name][1]})


@pytest.mark.parametrize("part", PARTS)
def test_what_is_handed_out_gets_nothing(part, tmp_path):
    """Each test needs what is not written yet, and says so."""
    (tmp_path / "mine.py").write_text(given_text(part), encoding="utf-8")
    for key in cases_of(part):
        assert record(tmp_path / "mine.py", part, key, 0)["fault"].startswith("Not written yet: "), key


@pytest.mark.parametrize("part", PARTS)
def test_a_hidden_seed_changes_every_test(part):
    """So that no points are in what a student could copy from the report of another seed."""
    for key in cases_of(part):
        zero, one = ([value for value, *_ in right_record(part, key, seed)["notes"]] for seed in (0, 1))
        assert zero != one, key


def test_a_missing_starter_is_written_and_none_is_overwritten(run, tmp_path):
    """Where there is an answer; by the grader, too. An assignment of an instructor's own has no page."""
    folder, path = tmp_path / "8-own", tmp_path / "8-own" / "starter.py"
    folder.mkdir()
    assert assignments.write_missing(path) is None and not path.exists()
    (folder / "answer.py").write_text(right_text("kvsink"), encoding="utf-8")
    for name in ("page.py", "mine.py"):
        assert assignments.write_missing(folder / name) is None and not (folder / name).exists()
    assert run(grade, path, "--assignment", "ott")[:2] == (2, f"new: {path}; write your answer there\n")
    assert path.read_text(encoding="utf-8") == given_text("kvsink").replace("t 3, kvsink:", "t 8, own:")
    path.write_text("mine")
    assert assignments.write_missing(path) is None and path.read_text() == "mine"
    with pytest.raises(UserError, match="own has no page"):
        assignments.answer_of("own_page")


@pytest.mark.parametrize("name", NAMES)
def test_an_assignment_is_whole(name):
    """80 points by tests and 20 by questions, and a row of the handout's table for some tests."""
    points = [*grade.tests_in(name + PAGE).values(), *grade.tests_in(name).values()]  # in the order of the tests
    assert sum(points) == 80
    assert len(points) * course.LONGEST + 20 < grade.LONGEST  # a loop without an end costs no other test its time
    page = read(name, "handout.md")
    assert sum(map(int, re.findall(r"^\d\. \((\d+) points\)", page, re.MULTILINE))) == 20
    rows = [int(points) for points in re.findall(r"^\| \w* \|.*\| (\d+) \|$", page, re.MULTILINE)]
    assert sum(rows) == 80 and set(accumulate(rows)) <= set(accumulate(points))


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
    for given, right in ((2, 3), (None, 3), (True, 1), (True, 1.0), (2.1, 2.0), (float("nan"), 2.0), ([1], [1, 2]),
                         ("3", 3), (torch.arange(3).float(), torch.arange(3)), (torch.ones(1, 2), torch.ones(2)),
                         (torch.arange(3), torch.arange(3).byte()), (torch.ones(2).double(), torch.ones(2)),
                         (half + 0.001, half), (object(), 3), ({}, 3), (torch.full((2,), torch.nan), torch.ones(2)),
                         (torch.ones(30000), torch.ones(2)), (np.float32(2.1), 2.0), (np.int64(2), 3)):
        assert compare.difference(compare.plain(given), compare.plain(right), 1e-4) != "", (given, right)
    assert compare.difference(4.0, 4, 0) == "Yours is 4.0 of type float; right is 4 of type int."
    assert compare.difference([1, [[2, 3]]], [1, [[2, 4]]], 0) == (
        "Value [1][0][1], counted from 0: Yours is 3; right is 4.")
    assert compare.difference([1, [[2, 3]]], [1, [[2, 4]]], 0, "length|held, text") == (
        "Held, text 0, value [1], counted from 0: Yours is 3; right is 4.")
    cube = torch.arange(8).view(2, 2, 2)
    given, right = compare.plain([0, cube.where(cube != 5, 9)]), compare.plain([0, cube])
    for names, place in (("layer; head, channel; token, head, channel", "Layer 1, token 1, head 0, channel 1: "),
                         ("keys|values; head, channel", "Values, at [1, 0, 1], counted from 0: ")):
        assert compare.difference(given, right, 0, names).startswith(place + "yours is 9; right is 5.")
    right = compare.plain(torch.ones(2))
    assert compare.difference(right | {"numbers": []}, right, 1e-4)  # which only a record of the file's own can say


def test_a_call_is_told_and_compared_and_its_arguments_too():
    def doubled(x, by):
        return x.mul_(by)
    noted = []
    same = course.Same(lambda *note: noted.append(note))
    same.call(doubled, torch.ones(2), 2, hint="Twice.", then=torch.Tensor.tolist)
    same.call(min, 3, 4)  # which says no names
    assert compare.called(doubled, (torch.nn.Linear(1, 1), object())) == "doubled with x = Linear, by = object"
    assert noted[0][:2] == ([2.0, 2.0], "doubled with x = [1.0, 1.0], by = 2. Twice.")
    left = (compare.plain([torch.ones(2), 2]), *noted[1][1:])  # what a function that writes elsewhere notes
    assert [*compare.complaints(noted[1:2], [left], dict)] == [
        "doubled: its arguments afterwards, which it leaves as they are.\nX, at [0], counted from 0: yours is 2; right "
        "is 1. That row: yours [2, 2]; right [1, 1]. 2 of 2 numbers are off."]
    assert [(value, names) for value, _, _, names in noted[2:]] == [(3, ""), ([3, 4], "an argument|an argument|")]


def test_what_is_told_is_short_and_moves_no_cursor(capsys):
    """A hint ends, whatever the text, in a time that grows with what is shown."""
    right = {"title": "t", "points": 4, "notes": [[1, "grid of a long case", 0, ""], [2, "grid of two", 0, ""],
                                                [4, "fit", 0, ""], [3, "grid", 0, ""]]}
    given = {"notes": [[7, "", 0], [8, "", 0], [5, "", 0], [3, "", 0]], "fault": "then it raised", "errors": {}}
    assert grade.judged(right, given)["message"].startswith("grid of two\n")  # the first is about the grid
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
    module = course.load(tmp_path / "mine.py")
    assert module.outlier(None) == 3
    with pytest.raises(AttributeError) as raised:
        module.find_outlier()
    assert course.explain(raised.value, tmp_path / "mine.py").startswith("Your file has no `find_outlier`")


def test_the_compiler_reads_definitions_alone(tmp_path):
    """Nothing that could tell it from the interpreter, and no line that runs a function of the file."""
    kept = ["import math", "N: int = 2 ** 5", "LOG = tl.constexpr(1 / math.log(2))", "def kernel(x):\n    pass"]
    dropped = ["Y = not triton.knobs.runtime.interpret", "kernel = Two(kernel)", "if N:\n    N = 3", "x: int",
               "f()", "def kernel(x=globals().update(N=3)):\n    pass", "tl.load = LOAD", "@TWO", kept[3], "N = F(2)",
               "import builtins as math", "N = (F)(2)", "N: F() = 2", "# The table", "N = 3"]
    (tmp_path / "mine.py").write_text("\n".join(kept + dropped), encoding="utf-8")
    said = ast.unparse(compiles.definitions(tmp_path / "mine.py"))
    assert said == "\n".join(kept[:3]) + f"\n\n{kept[3]}\n\n{kept[3]}"


def test_a_kernel_reads_nothing_that_tells_the_compiler_from_the_interpreter():
    """Neither in the branch that is not compiled, nor in a kernel that it calls."""
    scope = {}
    exec("import math, os, triton, triton.language as tl\nN, E = map(tl.constexpr, (4, os.environ))", scope)

    def read(line):
        source = f"def kernel(x, K: tl.constexpr):\n    y = tl.load(x + N).to(tl.float32)\n    {line}"
        return compiles.told_apart(SimpleNamespace(src=source, fn=SimpleNamespace(__globals__=scope)))
    for line in "y * triton.cdiv(K, N)", "math.log2(N) + tl.math.exp2(y)", "max(K, int(y.shape[0]))":
        assert read(line) == "", line
    for line in ("triton.knobs.runtime.interpret", "y.handle", "E", "os", "isinstance", "tl.core", "tl", "y.__class__",
                 "lambda os: 0", "tl.max_constancy"):
        assert read(f"if K == N: {line}") == line
    for loop in "for i in range(4)", "while K", "for i in tl.range(K)", "for i in tl.static_range(K)":
        kernel = SimpleNamespace(src=f"def kernel(K):\n    {loop}: pass", fn=SimpleNamespace(__globals__={}))
        caller = SimpleNamespace(src="kernel(3)", fn=SimpleNamespace(__globals__={"kernel": kernel}))
        assert compiles.has_loop(kernel) == compiles.has_loop(caller) == ("static" not in loop)


def test_a_kernel_compiles_and_has_fewer_instructions_than_asked():
    one, compiled = compiles.ASKED + "one", {"one": "", "one" + compiles.COUNTED: 6.0}
    asked = one + compiles.BELOW + "6"
    assert "takes 6.0 instructions" in compiles.verdict(asked, compiled)
    assert compiles.verdict(asked, compiled | {"one" + compiles.COUNTED: 5.9}) == ""
    assert compiles.verdict(asked, {"one": "refused"}) == compiles.verdict(one, {"one": "refused"}) == "refused"
    noted = {"title": "t", "points": 4, "notes": [[one, "", 0, ""]], "fault": "", "errors": {"one": "refused"}}
    assert grade.judged(noted, noted) == {"title": "t", "of": 4, "points": 0, "message": "refused"}


# ---- what a submission may do: the lines that do it, and whether the rest of the file is right

GIVEN = (
    "import torch.nn.functional as F; F.pad", "import numpy as np; np.linalg.norm", "from tinykv import hf",
    "from tinykv.codecs.base import Codec", "sys.path.insert(0, '')", "raise SystemExit",
    "class A(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n        self._x = 1\nA.b = 2\n"
    "del A.b\nA().c = 3\nsetattr(A(), 'd', 4)\ngetattr(A, 'e', 5)\nassert type(A()) is A")
NOT_GIVEN = (
    "f.__globals__", "def g():\n    yield g.gi_frame", "'{0.__class__}'.format(f)", "getattr(f, '__co' + 'de__')",
    "hasattr(f, '__code__')", "match f:\n    case object(__globals__=x): pass", "class A:\n    __match_args__ = ()",
    "class A:\n    def __getattr__(self, x): pass", "__own__ = len", "torch.Tensor.sum = f", "torch.pi = 3",
    "(lambda x: setattr(x, 'sum', f))(torch.Tensor)", "del torch.nn.Linear.forward", "class A(torch.Tensor): pass",
    "type('A', (), {})", "from functools import wraps", "torch.load", "import types; types.CodeType", "eval('1')",
    "open('x')", "vars(f)", "next(iter(sys.modules))", "torch.zeros(1).numpy().ctypes", "torch.zeros(1).sum = f",
    "torch.nn.Linear(1, 1).forward = f", "type(int)", "import copy; copy.dispatch_table", "f().gi_code",
    "import numbers; numbers.ABCMeta", "import triton.language as tl; tl.extra.modules['sys']",
    "import triton.language as tl; tl.math.wraps", "from typing import assert_type as __own__",
    "import triton.language.extra as e; e.modules['sys']", "torch.zeros(1).numpy().tofile")


@pytest.mark.parametrize("lines", GIVEN + NOT_GIVEN)
def test_what_a_file_is_given_of_python(lines):
    tree = ast.parse(f"from __future__ import annotations\nimport sys, torch\ndef f(): pass\n{lines}")
    with pytest.raises(Exception) if lines in NOT_GIVEN else nullcontext():
        run_restricted("mine.py", tree)


DEEDS = {  # and the points that a right answer has with it
    "takes memory": ("x = torch.ones(2 ** 32)", 0), "has no end": ("def outlier(x):\n    while True: pass", 58),
    "writes a file": ("torch.PyTorchFileWriter('a')", 0), "ends": ("raise SystemExit", 66)}


@confined
def test_what_a_submission_does_brings_it_nothing(run, monkeypatch, tmp_path):
    """Only what is right gets points, and nothing is written."""
    def right_values(name, seed, folder):
        grade.copy(folder / f"{name}-copy", name)
        return right_here(name, seed, folder)
    monkeypatch.setattr(grade, "right_values", right_values)
    (tmp_path / "all").mkdir()
    for deed, (lines, _) in DEEDS.items():
        (tmp_path / "all" / f"{deed}.py").write_text(f"{right_text('kvsink')}\n{lines}\n", encoding="utf-8")
    status, _, err = run(grade, tmp_path / "all", "--json", tmp_path / "r.json", "--seed", 20391)
    points = {report["student"]: report["points"] for report in json.loads((tmp_path / "r.json").read_text())}
    assert (status, err) == (0, "")
    assert points == {deed: left for deed, (_, left) in DEEDS.items()}


@pytest.mark.parametrize("name", NAMES)
def test_the_graders_copy_has_no_answer(name, tmp_path):
    """Of this assignment, also where all else runs on it, and nothing else that would be a part of it."""
    grade.copy(tmp_path, name)
    assert not any((tmp_path / file).exists() for file in assignments.REFUSED.get(name, ()))
    for file, chosen in assignments.ANSWERS[name].items():
        if (tmp_path / file).exists():
            does = functions((tmp_path / file).read_text(encoding="utf-8"))
            asked = chosen or [function for function in does if not function.endswith("__init__")]
            assert all("NotImplementedError" in does[function] for function in asked), file


def test_what_is_no_record_and_no_file_is_not_read(tmp_path):
    lines = '{"test": "one"}\n[]\n{}\nno JSON\n{"test": "one", "a": 1}'
    (tmp_path / "record").write_text(lines, encoding="utf-8")
    assert grade.read_record(tmp_path / "record") == {"one": {"test": "one"}}
    assert confine.written(tmp_path / "record").decode() == lines
    (tmp_path / "link").symlink_to("record")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe", ".", "none"):
        with pytest.raises(OSError):
            confine.written(tmp_path / name)


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
    "the machine's name": lambda: socket.sethostname(socket.gethostname()), "a group of its own": os.setsid,
    "Python": lambda: open(os.__file__, "r+"), "another folder": lambda: open(__file__, "a"),
    "the answers": lambda: open(ROOT / "docs/course/3-kvsink/answer.py"), "passwords": lambda: open("/etc/shadow"),
}


def called(name, *given):
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*given) < 0:
        raise OSError(ctypes.get_errno(), name)


@confined
def test_a_confined_process_reaches_no_other(tmp_path):
    """And threads, of which autograd needs one, it may have; and files of its own, and what torch asks of the CPU."""
    def call_all():
        confine.confine([], 5, tmp_path)
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
    grade.run_tests(tmp_path, tmp_path, tmp_path, "kvsink", 0, tmp_path / "record")
    command = Path(f"/proc/{int((tmp_path / 'started').read_text())}/cmdline")  # it is empty once the process is dead
    deadline = time.monotonic() + 5
    while command.exists() and command.read_bytes():
        assert time.monotonic() < deadline, "it goes on"
        time.sleep(0.05)


@confined
def test_what_the_machine_lacks_is_no_students_fault(run, monkeypatch, tmp_path):
    """What the answer fails is told, and what limits nothing grades nothing."""
    right = right_here("kvsink", 0, tmp_path)
    right["test_outlier"] |= {"fault": "no fp16 here"}
    with monkeypatch.context() as patch:
        patch.setattr(grade, "record_of", lambda *given: right)
        patch.setattr(grade, "copy", lambda *given: None)
        with pytest.raises(UserError, match="this machine cannot grade kvsink.*no fp16 here"):
            grade.right_values("kvsink", 0, tmp_path)
        patch.setattr(confine, "resource", None)  # as on Windows
        with pytest.raises(UserError, match="on Windows, use WSL"):
            confine.run(["pytest"], "", 1, str(ROOT), str(tmp_path))
    assert grade.hole(ROOT) == ""
    (tmp_path / "none.py").touch()
    for module, name, value in ((confine, "landlock", None), (grade, "ROOT", Path("/usr/src/app")),
                                (confine, "gettempdir", lambda: "/usr/tmp")):
        for words in [], ["--unconfined"]:
            with monkeypatch.context() as patch:
                patch.setattr(module, name, value)
                status, out, err = run(grade, tmp_path / "none.py", *words)
            lines = err.splitlines()
            assert (status, out, len(lines)) == (2, "", 1 + len(words))
            assert ("--unconfined" in lines[0]) == (not words)


# ---- files, and what is written of them

@confined
def test_every_student_has_a_line(run, tmp_path, monkeypatch):
    """Also one who hands in what cannot be graded: the line says what it is. What lies beside an answer has none. No
    name moves the cursor."""
    right, other = 'ASSIGNMENT: str = "kvsink"', 'ASSIGNMENT = "ott"'
    for file, text in (("ann/starter.ipynb", "{}"), ("bob/a b/a.py", right), ("bob/helper.py", ""),
                       ("bob/ott.py", other), ("bob/.ipynb_checkpoints/a.py", right), ("bob/__MACOSX/._a.py", right),
                       ("cat/a.py", right), ("dan/hw/x.zip", ""), ("eve.zip", ""), ("fay.py", other),
                       ("gus/a.py", right), ("gus/page (1).py", ""), ("gus/\x1bé.py", right), ("ivy.py", ""),
                       ("points.csv", ""), ("z\udcff/a.py", right)):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text, encoding="utf-16" if file.startswith("cat") else "utf-8")
    (tmp_path / "hal").mkdir()
    (tmp_path / "new.csv").write_text("student,total\nzoe,3\n", encoding="utf-8-sig")  # as Excel saves it
    monkeypatch.setattr(grade, "right_values", lambda *given: {})
    monkeypatch.setattr(grade, "record_of", lambda *given: {})
    status, out, err = run(grade, tmp_path, "--assignment", "kvsink", "--points", tmp_path / "new.csv")
    told = {line.split("  ")[0]: line for line in out.splitlines()}
    assert (status, err) == (0, "") and list(told) == [
        "submission", "ann", "bob/a b/a.py", "cat/a.py", "dan", "eve.zip", "fay.py", "gus/\\x1bé.py", "gus/a.py",
        "gus/page (1).py", "hal", "ivy.py",
        "z\\udcff/a.py"]
    for name, why in (("ann", "no Python file was handed in, but starter.ipynb"), ("cat/a.py", "UTF-16"),
                      ("dan", "no Python file was handed in, but hw, x.zip"), ("eve.zip", "no Python file"),
                      ("fay.py", "for the assignment ott"), ("hal", "no Python file was handed in"),
                      ("gus/page (1).py", "names no assignment"), ("ivy.py", "names no assignment")):
        assert why in told[name]


BEFORE = "student,total,ott,id,skvq\nann,60,50,a1,10.5\n'=bob,7,,2,7\n"


@pytest.mark.parametrize("handed_in, before, after", [
    ("ann ott 50, ann ott 40, ann ott_page 14, =bob - 0", "", "student,total,ott,ott_page\nann,64,50,14\n'=bob,0,,\n"),
    ("ann ott 3", BEFORE, "student,total,ott,id,skvq\nann,13.5,3,a1,10.5\n'=bob,7,,2,7\n"),
    ("=bob cache 3", BEFORE, "student,total,ott,id,skvq,cache\nann,60.5,50,a1,10.5,\n'=bob,10,,2,7,3\n")])
def test_a_students_total_has_the_better_of_two_files(handed_in, before, after):
    """And no name is a formula. A run changes what it has graded, to less, too, and nothing else."""
    reports = [dict(zip(("student", "assignment", "points"), of.split())) for of in handed_in.split(", ")]
    reports = [of | {"points": int(of["points"]), "fault": "a link" * (of["assignment"] == "-")} for of in reports]
    assert grade.totals(reports, before) == after


@pytest.mark.parametrize("messages, told", [
    (["odd\x1b", "odd\x1b"], "odd\\x1b"), (["odd", "another"], "one, two"), (["odd", ""], "one"),
    (["Not written yet: f.", "Not written yet: g."], "Not written yet")])
def test_one_reason_for_all_that_failed_is_told(messages, told, capsys):
    """A table says what is wrong with the file; else it says in which functions."""
    tests = [{"title": f"{name}: of it", "points": not text, "message": text}
             for name, text in zip(("one", "two"), messages)]
    points = sum(test["points"] for test in tests)
    grade.print_table([{"file": "all/f.py", "student": "f", "assignment": "ott", "fault": "", "points": points, "of": 2,
                        "tests": tests}], Path("all"))
    assert capsys.readouterr().out.splitlines()[1].endswith(f"{points}/2     {told}")


# ---- other platforms, and who is alike

@confined
def test_a_wrong_word_or_file_is_told_in_a_line(run, tmp_path, monkeypatch):
    """And an earlier file of the same command is written anew; no report takes another file's place, no link is
    followed, and no answer is for another assignment."""
    monkeypatch.chdir(tmp_path)
    files = {"mine": "name,points\n", "of.json": "[]", "4.md": "# Assignment 4",
             "odd.py": 'ASSIGNMENT = "x"', "a.py": right_text("affine")}
    for file, text in files.items():
        Path(file).write_text(text, encoding="utf-8")
    Path("link.py").symlink_to("a.py")
    for folder in "class", "empty":
        Path(folder).mkdir()
    Path("class/a.py").write_text(files["a.py"], encoding="utf-8")
    for program, words, told in (
            (notebook, "ott a.ipynb", ""), (notebook, "ott a.ipynb", ""), (notebook, "ott 4.md", "4.md already exists"),
            (gradescope, "ott 1 a.zip", ""),
            (gradescope, "ott 1 a.zip", ""), (gradescope, "ott 1 .", "no submission_metadata"),
            (gradescope, "ott 1 mine", "mine already exists"), (gradescope, "otto 1 b.zip", "no assignment 'otto'"),
            (grade, "class --points mine", "mine already exists, and is no report that this program wrote"),
            (grade, "a.py --json of.json", "of.json already exists"), (grade, "link.py", "is a link"),
            (grade, "no.py", "no file or folder no.py"), (grade, "mine", "no Python file"),
            (grade, "a.py --assignment aff", "no assignment 'aff'"), (grade, "a.py --points p.csv", "for a folder"),
            (grade, "class --students a b --points p.csv", "class has no files of b"),
            (grade, "empty", "no Python file in empty"),
            (grade, "class --assignment ott --points p.csv", 'no Python file in class says ASSIGNMENT = "ott"'),
            (grade, "a.py --assignment ott", "for the assignment affine, and ott"),
            (grade, "odd.py", "no assignment 'x'")):
        status, out, err = run(program, *words.split())
        assert (status, out, err.count("\n")) == (2 * bool(told), "", bool(told)) and told in err, words
    assert {file: Path(file).read_text(encoding="utf-8") for file in files} == files and not Path("p.csv").exists()
    with zipfile.ZipFile("a.zip") as file:
        assert {"setup.sh", "tinykv/docs/course/3-kvsink/answer.py"} <= {*file.namelist()}
        assert file.getinfo("run_autograder").external_attr >> 16 == 0o755


def test_a_copy_is_told_from_an_answer_of_ones_own(tmp_path):
    """Whatever names and comments it has; of the lines that are given, both have all."""
    copy = re.sub(r" *# answer\n", "", right_text("kvsink").replace("known", "best").replace("votes", "ballots"))
    for name, of in (("copy", copy), ("empty", given_text("kvsink")), ("helper", ""), ("broken", f"{copy}("),
                     ("unknown", 'ASSIGNMENT = "KVSink"')):
        (tmp_path / f"{name}.py").write_text(of, encoding="utf-8-sig" if name == "copy" else "utf-8")
    shares = {(a, b): share for share, _, a, b in similar.alike(tmp_path)}
    assert {file for pair in shares for file in pair} == {"copy.py", "empty.py", "the project's"}
    assert shares["copy.py", "the project's"] > 0.9 and max(
        share for pair, share in shares.items() if "empty.py" in pair) < 0.1


def test_a_notebook_hands_in_what_its_cells_define():
    """The last of each name, with the comments above it, and neither experiments nor what Python cannot read."""
    f = "# one\n@g\ndef f():\n    return 2  # two"
    cells = ["def hand_in(): 1", "import torch\n\nEPS = 1", f.replace(":", ""), f.replace("2", "3"), f, "EPS = 1e-6",
             "get_ipython().system('ls')\nfiles = get_ipython().getoutput('ls')\n# look\ncheck('f')"]
    assert assignments.definitions_in(cells) == f"import torch\n\n\nEPS = 1e-6\n\n\n{f}\n"


# ---- the hunt

HUNTERS = {  # the page that each hands in, how far off the line that they name is, and their points for line and page
    "right": (lambda wrong, right: right, 0, r"line 3/3, mended 3/3; .* \d+\n    \('b 62: x is' '6'\)"),
    "elsewhere": (lambda wrong, right: right, 1, "line 0/3, mended 3/3"),
    "mended too much": (lambda wrong, right: right.replace("clamp(0, 3)", "clamp(0, 3.0)"), 0, "line 3/3, mended 0/3"),
    "not mended": (lambda wrong, right: wrong, 0, "line 3/3, mended 0/3"),
    "not mended, below an end": (lambda wrong, right: wrong.replace(hunt.ABOVE, "\n".join((
        hunt.ABOVE, compiles.above_table(right_text("affine_page")), "raise SystemExit", ""))), 0, ".*mended 0/3"),
}


@confined
def test_a_hunt_is_graded_by_line_and_change(run, monkeypatch, tmp_path, request):
    """A right answer, and others that are not. A diff with the public page shows most lines, whoever's page it is."""
    if not request.config.getoption("--whole"):
        monkeypatch.setattr(grade, "right_values", right_here)
        monkeypatch.setattr(grade, "record_of", record_here)
    run(hunt, "affine", tmp_path, "--seed", 7, "--students", "right")
    assert "stays as it is" in run(hunt, "affine", tmp_path, "--seed", 7, "--students", *HUNTERS)[1]
    for student, (mend, off, _) in HUNTERS.items():
        (wrong, right, lines), file = hunt.planted("affine", student, 7), tmp_path / student / "page.py"
        of_public = hunt.changed(right_text("affine_page"), wrong)
        assert file.read_text(encoding="utf-8") == wrong and len(lines) == 1
        assert len(of_public) > 40 and lines < of_public
        said = f"LINE = {min(lines) + 1 + off}\nWHY = ('b 62: x is'\n'6')\n"
        file.write_text(mend(wrong, right).replace(hunt.ABOVE, said), encoding="utf-8")
    assert len({hunt.planted("affine", student, 7)[0] for student in HUNTERS}) == len(HUNTERS)
    (tmp_path / "right" / "page.py").rename(tmp_path / "right" / "page (1).py")
    run(hunt, "affine", tmp_path, "--seed", 8, "--students", "another")
    (tmp_path / "none").mkdir()
    status, out, err = run(hunt, "affine", tmp_path, "--seed", 7)
    assert (status, err) == (0, "")
    others = {"another": "not graded\n    .* lines differ", "none": "not graded\n    none: no Python file"}
    for student, told in ({student: told for student, (_, _, told) in HUNTERS.items()} | others).items():
        assert re.search(rf"^{student}: {told}", out, re.MULTILINE), (student, out)
    assert "no page that a student got with --seed 9" in run(hunt, "affine", tmp_path, "--seed", 9)[2]


@pytest.mark.whole
@pytest.mark.parametrize("name", hunt.NAMES)
def test_a_fault_to_hunt_changes_what_its_page_prints(name, tmp_path):
    """With one text; none ends with an error, which would tell the line; and other names change nothing."""
    printed, (page, faults) = [], (right_text(name + PAGE), FAULTS[name + PAGE])
    chosen = runpy.run_path(str(ROOT / "tests" / "lab" / "course" / f"{name}.py"))["PRINTED"]
    for text in (page, hunt.planted(name, "ann", 7)[1], *(page.replace(*faults[row]) for row in chosen)):
        (tmp_path / "page.py").write_text(text, encoding="utf-8")
        printed.append(subprocess.check_output([sys.executable, tmp_path / "page.py", "1"], cwd=ROOT))
    assert printed[0] == printed[1] and printed[0] not in printed[2:]


# ---- handing out

def test_a_repository_to_hand_out_holds_no_answer(run, tmp_path, monkeypatch):
    """No function of it does what an answer does. Links lead somewhere."""
    out, answers = tmp_path / "out", {}
    monkeypatch.setattr(grade, "record_of", lambda *given: {})  # as where an answer fails
    assert "cannot grade" in run(handout, out)[2] and not out.exists()
    monkeypatch.setattr(handout, "expected", lambda name: {})
    run(handout, out, "--assignments", ",".join(NAMES))
    for name in NAMES:
        answers |= functions(right_text(name))
        for file, chosen in assignments.ANSWERS[name].items():
            found = functions((ROOT / file).read_text(encoding="utf-8"))
            chosen = chosen or [key for key in found if not key.endswith("__init__")]
            answers |= {f"{file} {key}": found[key] for key in chosen}
    texts = {path.relative_to(out).as_posix(): path.read_text(encoding="utf-8") for path in out.rglob("*.py")}
    starters = sorted(file for file in texts if file.endswith("/starter.py"))
    given = {does for file in starters for does in functions(texts[file]).values()}
    secrets = {does for does in answers.values() if len(does) > 300} - given
    assert len(starters) == len(NAMES) and len(secrets) > 60 and len(texts) > 40
    for file, text in texts.items():
        for name, does in functions(text).items():
            assert does not in secrets, (file, name)
    names = {path.relative_to(out).as_posix() for path in out.rglob("*")}
    assert not [x for x in names if re.match(r"tests|.ci|docs/(method|result)s|.*/(answers?|authors|instructors)\.", x)]
    assert [name for name in names if re.match(r"docs/course/.*/page.py", name)] == ["docs/course/1-affine/page.py"]
    workflow = (out / ".github/workflows/assignments.yml").read_text(encoding="utf-8")
    assert re.search(r"assignment: \[(.*)\]", workflow)[1].split(", ") == [file.split("/")[2] for file in starters]
    container = json.loads((out / ".devcontainer/devcontainer.json").read_text(encoding="utf-8"))
    assert container["postCreateCommand"] in (out / "README.md").read_text(encoding="utf-8")
    assert "instructors" not in (out / "docs/course/README.md").read_text(encoding="utf-8")
    assert f"{out} is not empty" in run(handout, out)[2]
    for page in out.rglob("*.md"):
        for target in re.findall(r"\]\(([\w./-]*\w)[)#]", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), (page, target)
    for words in ("init", "-q"), ("add", "."):  # what a student clones, and what a push carries
        subprocess.run(["git", "-C", out, *words], check=True)
    cloned = subprocess.check_output(["git", "-C", out, "ls-files"], text=True).splitlines()
    assert {*starters, "docs/course/1-affine/page.py", "docs/course/1-affine/notebook.ipynb"} <= {*cloned}


@pytest.mark.whole
def test_the_questions_run_where_they_are_handed_out(run, tmp_path, monkeypatch):
    """All commands of all handouts, of each list of settings the one in the middle, on one short window, where each
    starter is an answer."""
    folder, commands = tmp_path / "out", []
    search = "kmeans(points, weight, plus_plus(points, weight, u))"  # seconds of it
    monkeypatch.setattr(handout, "expected", lambda name: {})
    run(handout, folder)
    for name in NAMES:
        starter = folder / assignments.folder_of(name).relative_to(ROOT) / "starter.py"
        starter.write_text(right_text(name).replace(search, "points[:self.m]"), encoding="utf-8")
        for command in re.findall(r"^ *python (eval_ppl.py .*)$", read(name, "handout.md"), re.MULTILINE):
            words = command.split()
            lists = [[word] if flag == "--method" else word.split(",") for flag, word in zip(["", *words], words)]
            commands.append([some[len(some) // 2] for some in lists])
    assert len(commands) > 15
    for command in commands:
        command += "--windows 1 --calib-windows 2 --context 128".split()
        result = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True)
        assert result.returncode == 0, (command, result.stderr)
