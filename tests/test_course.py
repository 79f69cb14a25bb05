"""The course's grader is a grader: right answers get all points, wrong ones lose the points that they should, with the
message that names the fault, and nothing that a submission does spoils the run.

tests/course/ has a folder for each assignment: own.py is the project's own code behind the starter's names, second.py
a second answer, written from the handout, and wrong.py the changes that make it wrong.
"""
import csv
import importlib.util
import json
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import eval_ppl
from tinykv import UserError
from tinykv.course import check, handout, runner
from tinykv.course import grade as grade_command
from tinykv.course.runner import Checking, Closed, Loading, grade, run_apart
from tinykv.methods.registry import METHODS

ROOT = Path(__file__).parent.parent
ANSWERS = Path(__file__).parent / "course"
NAMES = check.names()


def starter(name):
    return ROOT / "docs" / "course" / f"{check.load(name).number}-{name}" / "starter.py"


def wrong_of(name):
    """The table of an assignment's wrong.py."""
    spec = importlib.util.spec_from_file_location("wrong", ANSWERS / name / "wrong.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.WRONG


def failed(report):
    """{name: message} of the checks that failed."""
    return {outcome.name: outcome.message for outcome in report.outcomes if not outcome.passed}


# ---- each assignment

@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.whole) for seed in range(1, 10))])
@pytest.mark.parametrize("answer", ["own", "second"])
@pytest.mark.parametrize("name", NAMES)
def test_right_answers_get_all_points(name, answer, seed):
    report = grade(ANSWERS / name / f"{answer}.py", seed, here=True)
    assert failed(report) == {}


@pytest.mark.parametrize("name, wrong", [(name, wrong) for name in NAMES for wrong in wrong_of(name)])
def test_wrong_answers_lose_the_points_they_should(name, wrong, tmp_path, request):
    old, new, expected = wrong_of(name)[wrong]
    text = (ANSWERS / name / "second.py").read_text(encoding="utf-8")
    assert text.count(old) == 1, "the text to be changed has to occur once"
    file = tmp_path / "submission.py"
    file.write_text(text.replace(old, new), encoding="utf-8")
    for seed in range(3) if request.config.getoption("--whole") else [0]:
        messages = failed(grade(file, seed, here=True))
        assert set(messages) == set(expected), messages
        for key, words in expected.items():
            assert words in messages[key]


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_starter_gets_nothing(name):
    report = grade(starter(name), here=True)
    assert report.points == 0
    for message in failed(report).values():
        assert message.startswith("Not written yet"), message


@pytest.mark.parametrize("name", NAMES)
def test_an_assignment_is_whole(name):
    """Its points are 80, it has ten wrong answers at least, its handout has every part, and it is on the course's
    page."""
    assert check.load(name).points == 80
    assert len(wrong_of(name)) >= 10
    page = (ROOT / "docs" / "course" / "README.md").read_text(encoding="utf-8")
    assert f"({starter(name).parent.name}/handout.md)" in page
    handout = (starter(name).parent / "handout.md").read_text(encoding="utf-8")
    for part in ("## Aim", "## Background", "## Eight numbers", "## Tasks", "## Questions", "## Time"):
        assert part in handout
    assert f"python -m tinykv.course.grade docs/course/{starter(name).parent.name}/starter.py" in handout


@pytest.mark.parametrize("name", NAMES)
def test_commands_of_a_handout_can_be_given(name):
    handout = (starter(name).parent / "handout.md").read_text(encoding="utf-8")
    for command in re.findall(r"^ *python eval_ppl.py (.*)$", handout, re.MULTILINE):
        args = eval_ppl.parser().parse_args(command.split())
        for method in args.method.split(","):
            assert method in METHODS or (ROOT / method.split(":")[0]).is_file(), method


def test_a_package_that_is_missing_is_told_in_one_line(monkeypatch):
    monkeypatch.setattr(runner.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"^assignment 7, triton, needs triton, which is not installed here; pip inst"):
        runner.assignment_of(starter("triton"))


# ---- what a submission may do

SECOND = (ANSWERS / "kvsink" / "second.py").read_text(encoding="utf-8")
MASSIVE = "    candidates = range(blocks - 1)\n"  # a line of its find_outlier

#   what find_outlier also does: (lines, words of the message; None: all is well)
DEEDS = {
    "loops": ("while True: pass", "Your code did not end within"),
    "sleeps": ("import time; time.sleep(60)", "did not end within 1 seconds. A right answer"),
    "exits": ("raise SystemExit", "Your code called exit"),
    "exits hard": ("import os; os._exit(0)", "Your code ended the process before the check was over"),
    "crashes": ("import ctypes; ctypes.string_at(0)", "Your code crashed the process (SIGSEGV)"),
    "is killed": ("import os; os.kill(os.getpid(), 9)", "Your code crashed the process (SIGKILL)"),
    "takes memory": ("x = torch.ones(2 ** 32)", "asked for more than 2 GiB of memory"),
    "takes memory in a list": ("x = [0] * 2 ** 40", "asked for more than 2 GiB of memory"),
    "raises": ("raise KeyError('x')", "of your file, `raise KeyError('x')`, raised KeyError: 'x'"),
    "interrupts": ("raise KeyboardInterrupt", "Your code raised KeyboardInterrupt"),
    "recurses": ("find_outlier(largest, ratio, channel)", "raised RecursionError"),
    "prints": ("print('pass' * 10 ** 6); import sys; print('5/5', file=sys.stderr)", None),
    "floods every file": ("import os\n    for fd in range(20):\n        try: os.write(fd, b'\"\"\\n')\n"
                          "        except OSError: pass", "Your code ended the process before the check was over"),
    "starts a process": ("import subprocess; subprocess.Popen(['sleep', '60'])", None),
    "writes a file": ("open('x', 'w').write('x')", None),
    "imports the answer": ("import importlib; importlib.import_module('tinykv.methods.kvsink')",
                           "Your code opens tinykv/methods/kvsink.py"),
    "imports it by the way": ("from tinykv.methods import registry", "Your code imports tinykv.methods.registry"),
    "and hides it": ("try: __import__('tinykv.methods.kvsink')\n    except Exception: pass",
                     "Your code imports tinykv.methods.kvsink"),
    "reads the answer": ("open(torch.__file__[:0] + ROOT + '/tinykv/methods/kvsink.py')", "Your code opens tinykv/m"),
    "reads the checks": ("open(ROOT + '/tinykv/course/checks/kvsink.py')", "Your code opens tinykv/course/checks"),
    "reads the tests": ("open(ROOT + '/tests/oracles.py')", "Your code opens tests/oracles.py"),
    "imports the project": ("from tinykv.methods.pfn import PFN", None),
    "changes the project": ("from tinykv.cache import KVCache; KVCache.update = None", None),
}


@pytest.mark.parametrize("deed", DEEDS)
def test_what_a_submission_does_costs_its_check_only(deed, tmp_path, monkeypatch):
    lines, words = DEEDS[deed]
    if deed == "sleeps":
        monkeypatch.setattr(runner, "WAIT", 1)
    file = tmp_path / "submission.py"
    file.write_text(SECOND.replace(MASSIVE, f"{MASSIVE}    ROOT = {str(ROOT)!r}\n    {lines}\n"), encoding="utf-8")
    assignment = check.load("kvsink")
    closed = Closed(assignment.answers)
    folder = tmp_path / "folder"
    folder.mkdir()
    message = run_apart(Checking(file, assignment, "massive_outlier", 0, closed), 1, folder)
    assert message == "" if words is None else words in message
    # the next check is as it was
    assert run_apart(Checking(file, assignment, "observe_top_k", 0, closed), 1, folder) == ""


@pytest.mark.parametrize("text, words", [
    ("def f(:", "Line 2 of your file is not Python"),
    ("import no_such_module", "raised ModuleNotFoundError"),
    ("while True: pass", "did not end within"),
    ("raise SystemExit(0)", "Your code called exit"),
    ("from tinykv.methods import kvsink", "Line 2 imports tinykv.methods.kvsink"),
    ("def f():\n    import tinykv.course.checks.kvsink", "Line 3 imports tinykv.course.checks.kvsink"),
    ("exec('import tinykv.methods.kvsink')", "Your code imports tinykv.methods.kvsink"),
])
def test_a_file_that_cannot_be_loaded_gets_nothing(text, words, tmp_path):
    file = tmp_path / "submission.py"
    file.write_text(f'ASSIGNMENT = "kvsink"\n{text}\n', encoding="utf-8")
    closed = Closed(check.load("kvsink").answers)
    assert words in (closed.imported_by(file) or run_apart(Loading(file, closed), 1, tmp_path))


def test_a_name_that_is_not_there_costs_its_checks(tmp_path):
    file = tmp_path / "submission.py"
    file.write_text(SECOND.replace("def find_outlier", "def find_outliers"), encoding="utf-8")
    message = failed(grade(file, here=True))["massive_outlier"]
    assert message == "The file has no `find_outlier`. The starter has one: keep its names."


# ---- the command

@pytest.fixture
def run_grader(monkeypatch, capsys, tmp_path):
    """-> a function that runs the command in a folder, and returns its exit status, stdout and stderr."""
    def run(*words, folder=tmp_path):
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "argv", ["grade", *map(str, words)])
        status = 0
        try:
            grade_command.main()
        except SystemExit as end:
            status = end.code
        printed = capsys.readouterr()
        return status, printed.out, printed.err
    return run


def test_a_file(run_grader, tmp_path):
    """A wrong answer: its points, one fault, and a record of everything."""
    file = tmp_path / "submission.py"
    file.write_text(SECOND.replace(".abs()", ""), encoding="utf-8")
    status, out, err = run_grader(file, "--json", "out.json")
    assert (status, err) == (0, "")
    record, = json.loads((tmp_path / "out.json").read_text())
    points = sum(outcome["points"] for outcome in record["checks"])
    assert 0 < points == record["points"] < record["of"] == 80
    assert f"\n{points} of 80 points\n" in out
    wrong = [outcome for outcome in record["checks"] if not outcome["passed"]]
    assert out.count("FAIL") == len(wrong) > 1
    assert wrong[0]["message"] in " ".join(out.split(wrong[0]["title"])[-1].split())
    assert f"--all shows what is wrong at the other {len(wrong) - 1}." in out


def test_a_folder(run_grader, tmp_path):
    folder = tmp_path / "submissions"
    for name, text in {
        "right.py": SECOND, "sub/copied.py": (ANSWERS / "kvsink" / "own.py").read_text(encoding="utf-8"),
        "nothing.py": "", "other.py": 'ASSIGNMENT = "astrology"',
    }.items():
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text(text, encoding="utf-8")
    status, out, err = run_grader(folder, "--csv", "points.csv", "--seed", 3)
    assert (status, err) == (0, "")
    with open(tmp_path / "points.csv", encoding="utf-8") as file:
        rows = {Path(row["file"]).name: row for row in csv.DictReader(file)}
    points = {name: (row["points"], row["of"]) for name, row in rows.items()}
    assert points == {"right.py": ("80", "80"), "copied.py": ("0", "80"), "nothing.py": ("0", "0"),
                      "other.py": ("0", "0")}
    assert rows["right.py"]["kvsink.observe_chunks"] == "8" and rows["right.py"]["seed"] == "3"
    for words in ("right.py", "80/80", "Line 2 imports tinykv.methods", "names no assignment",
                  "there is no assignment 'astrology'"):
        assert words in out


@pytest.mark.parametrize("word", ["no/such/file.py", ".", ROOT / "README.md"])
def test_what_is_no_submission_is_told_in_one_line(run_grader, word):
    status, out, err = run_grader(word)
    assert (status, out, err.count("\n")) == (2, "", 1)


@pytest.mark.whole  # processes of their own
@pytest.mark.parametrize("name", NAMES)
def test_the_command_in_a_process_of_its_own(name, tmp_path):
    """Twenty submissions in less than five minutes: one in less than fifteen seconds of computing."""
    submission = shutil.copy(ANSWERS / name / "second.py", tmp_path)  # tests/ is closed to a submission
    words = [sys.executable, "-m", "tinykv.course.grade", submission]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (result.returncode, result.stderr) == (0, "")
    assert "80 of 80 points" in result.stdout
    assert after.ru_utime - before.ru_utime < 15


# ---- handing out

def answers_taken_out():
    """[(file, function)] of all assignments."""
    return [(file, function) for name in NAMES for file, functions in check.load(name).blanks.items()
            for function in functions or ()]


def test_a_repository_to_hand_out(tmp_path):
    """Every function is there, and raises with the assignment's name; the answers and their tests are gone."""
    folder = tmp_path / "handout"
    assignments = [check.load(name) for name in NAMES]
    assert handout.write_handout(folder, assignments) == len(set(answers_taken_out()))
    for assignment in assignments:
        assert (folder / starter(assignment.name).relative_to(ROOT)).is_file()
        for file, functions in assignment.blanks.items():
            if functions is None:
                assert not (folder / file).exists()
                continue
            source = (folder / file).read_text(encoding="utf-8")
            compile(source, file, "exec")
            label = f"assignment {assignment.number}, {assignment.name}"
            for function in functions:
                assert f'raise NotImplementedError("{label}: {function}")' in source
    for gone in ("tests/course", "tests/test_course.py", "docs/course/authors.md"):
        assert not (folder / gone).exists()
    assert "## For instructors" not in (folder / "docs/course/README.md").read_text(encoding="utf-8")
    page = (folder / "docs/methods.md").read_text(encoding="utf-8")
    assert "## kvsink" in page and "cache.shared.sinks.tolist()" not in page
    with pytest.raises(UserError, match="is not empty"):
        handout.write_handout(folder, assignments)


def test_a_function_that_is_not_there_cannot_be_taken_out():
    with pytest.raises(UserError, match="has no function g"):
        handout.blanked("def f():\n    pass\n", {"g": "assignment 1, x: g"}, "x.py")


@pytest.mark.whole
def test_the_tests_of_a_repository_that_was_handed_out(tmp_path):
    """What needs an answer is skipped with the assignment's name, and everything else passes."""
    handout.write_handout(tmp_path / "handout", [check.load("kvsink")])
    result = subprocess.run([sys.executable, "-m", "pytest", "-q", "tests/test_first.py", "tests/test_layout.py"],
                            cwd=tmp_path / "handout", capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    assert "not written yet: assignment 3, kvsink: KVSink." in result.stdout
