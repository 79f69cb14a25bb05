"""How a submission runs: each check in a process of its own, with limits of time and memory.

The grader forks, once for each check. The child loads the submission, runs the check and sends the
outcome through a pipe; what the submission prints goes nowhere. So an endless loop, an exit, a
crash, or a change to the project's own objects costs the check in which it happens, and no other.

This protects from mistakes. It does not protect from an attack: a submission has the rights of the
user who grades it, can read files and open connections, and can find the check's own frames. An
instructor who fears that grades in a container.
"""
import ast
import importlib.util
import json
import linecache
import os
import re
import resource
import secrets
import select
import signal
import sys
import tempfile
import time
import traceback
import types
from dataclasses import dataclass
from pathlib import Path

import torch

from tinykv import UserError
from tinykv.course import check
from tinykv.course.check import Wrong
from tinykv.storage import check_regular, first_line

ROOT = Path(__file__).parents[2]
MEMORY = 2 * 2 ** 30  # bytes that a check may ask for
FILE_SIZE = 16 * 2 ** 20  # bytes of a file that it may write
TOTAL = 60  # seconds of a submission; checks that are left after that do not run
WAIT = 6  # a process may wait, or be kept waiting, for this many times its seconds of computing
LARGEST_SUBMISSION = 2 ** 20  # bytes
LONGEST = 2000  # characters of a message
ALWAYS_CLOSED = ("tinykv.course", "tinykv.methods.registry", "tests")  # modules that no submission may import


@dataclass
class Outcome:
    """Of one check."""
    name: str
    title: str
    of: int  # points that it gives
    passed: bool = False
    message: str = ""  # to the student, if it failed
    seconds: float = 0.0

    @property
    def points(self):
        return self.of if self.passed else 0


@dataclass
class Report:
    """Of one submission."""
    file: str
    assignment: str
    seed: int
    outcomes: list
    fault: str = ""  # why no check could run

    @property
    def points(self):
        return sum(outcome.points for outcome in self.outcomes)

    @property
    def of(self):
        return sum(outcome.of for outcome in self.outcomes)


# A submission

class Submission(types.ModuleType):
    """The module that a student's file makes."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        raise Wrong(f"The file has no `{name}`. The starter has one: keep its names.")


def assignment_of(path):
    """The assignment that a file names. UserError if it names none."""
    check_regular(path, LARGEST_SUBMISSION)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({first_line(error)})") from None
    line = re.search(r"^ASSIGNMENT\s*=\s*[\"'](\w+)[\"']", text, re.MULTILINE)
    if line is None:
        raise UserError(f"{path} names no assignment; it needs a line such as "
                        f"ASSIGNMENT = \"kvsink\", with one of {', '.join(check.names())}")
    assignment = check.load(line[1])
    for package in assignment.needs:
        if importlib.util.find_spec(package) is None:
            raise UserError(f"assignment {assignment.number}, {assignment.name}, needs {package}, which is not "
                            f"installed here; pip install {package}")
    return assignment


def load_file(path):
    """Run a student's file -> the module that it makes."""
    module = Submission("submission")
    module.__file__ = str(path)
    sys.modules["submission"] = module
    linecache.checkcache(str(path))
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), vars(module))
    return module


# One check, here

def run_here(path, assignment, name, seed, closed=None):
    """Run a check in this process -> the message of its fault; "" if it passes."""
    rng = check.rng_of(seed, assignment.name, name)
    torch.manual_seed(0)  # what a submission draws by itself is the same at every run
    try:
        assignment.checks[name](load_file(path), rng)
    except Wrong as wrong:
        message = str(wrong)
    except (Exception, SystemExit) as error:
        message = explain(error, path)
    else:
        message = ""
    return closed.message if closed and closed.message else message


def explain(error, path):
    """What an exception says to the student whose file is at `path`."""
    # (function, file, line) of each frame; sources are not opened, since some files are closed
    frames = [(frame.f_code.co_qualname, frame.f_code.co_filename, line)
              for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [frame for frame in frames if frame[1] == str(path)]
    function, file, line = (own or frames)[-1]
    if isinstance(error, NotImplementedError):
        return f"Not written yet: `{function}`."
    if isinstance(error, SystemExit):
        return "Your code called exit, which ends the process."
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        return (f"Your code asked for more than {MEMORY // 2 ** 30} GiB of memory. The inputs are "
                "small: look for a tensor that grows.")
    what = f"{type(error).__name__}: {first_line(error)}"
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f"Line {error.lineno} of your file is not Python. {what}"
    if own:
        text = linecache.getline(file, line).strip()
        return f"Line {line} of your file, `{text}`, raised {what}"
    where = os.path.relpath(file, ROOT) if file.startswith(str(ROOT)) else os.path.basename(file)
    return f"What your code gave could not be used: line {line} of {where} raised {what}"


# One check, in a process of its own

def run_apart(work, seconds, folder):
    """Run `work`, a function that returns a message, in a child process -> the message.

    seconds: of computing. folder: where the child stands, for files that it may write.
    """
    token = secrets.token_hex(16)  # what the child's message begins with
    read_end, write_end = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        run_as_child(work, seconds, folder, write_end, token)
    os.close(write_end)
    try:
        line = read_line(read_end, WAIT * seconds)
    finally:
        os.close(read_end)
        stop(pid)
        _, status = os.waitpid(pid, 0)
    if line is None:
        return f"Your code did not end within {WAIT * seconds} seconds. {LOOP}"
    if line.startswith(token):
        return json.loads(line.removeprefix(token))
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number == signal.SIGXCPU:
            return f"Your code did not end within {seconds} seconds of computing. {LOOP}"
        if line == "":
            return f"Your code crashed the process ({signal.Signals(number).name})."
    return "Your code ended the process before the check was over."


LOOP = ("A right answer needs less than half of that: look for a loop without an end, or a Python "
        "loop over single numbers.")


def run_as_child(work, seconds, folder, write_end, token):
    """The child's life, which ends here."""
    try:
        os.setsid()  # a group of its own, which the parent can stop as a whole
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        os.closerange(3, write_end)
        os.closerange(write_end + 1, 1024)
        sys.stdout = sys.stderr = open(os.devnull, "w")
        os.chdir(folder)
        limit(seconds)
        try:
            message = work()
        except BaseException as error:  # one that is neither an Exception nor an exit
            message = f"Your code raised {type(error).__name__}."
        os.write(write_end, (token + json.dumps(message[:LONGEST]) + "\n").encode())
    finally:
        os._exit(0)


def limit(seconds):
    """Limits of this process: time of computing, memory, the size of files, no core dump."""
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_SIZE, FILE_SIZE))
    statm = Path("/proc/self/statm")
    if statm.exists():  # on other systems memory is not limited
        now = int(statm.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, now + MEMORY))


def read_line(file, seconds):
    """What comes from a pipe up to a line's end, or to its own; None if that takes too long."""
    deadline, received = time.monotonic() + seconds, b""
    while not received.endswith(b"\n") and len(received) < 2 ** 16:
        ready, _, _ = select.select([file], [], [], max(0, deadline - time.monotonic()))
        if not ready:
            return None
        part = os.read(file, 2 ** 16)
        if not part:
            break
        received += part
    return received.decode(errors="replace").rstrip("\n")


def stop(pid):
    """End a child, and what it has started in its group."""
    # a child that has sent its message, or closed the pipe by ending, may need a moment to be gone
    for _ in range(100):
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            break
        time.sleep(0.001)
    for target in (-pid, pid):
        try:
            os.kill(target, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass


# The answer is closed

class Closed:
    """Modules that a submission may not import, and files that it may not open."""

    def __init__(self, modules):
        self.modules = (*modules, *ALWAYS_CLOSED)
        self.files = [ROOT / module.replace(".", "/") for module in self.modules]
        self.message = ""  # of the first attempt

    def holds(self, module):
        return any(module == name or module.startswith(name + ".") for name in self.modules)

    def imported_by(self, path):
        """The message if a file has a line that imports one of the modules; "" if not."""
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            return ""
        for node in ast.walk(tree):
            found = []
            if isinstance(node, ast.Import):
                found = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                found = [node.module or ""]
                found += [f"{node.module}.{alias.name}" for alias in node.names]
            for module in found:
                if self.holds(module):
                    return f"Line {node.lineno} imports {module}, {CLOSED}"
        return ""

    def hide(self):
        """Forget what was imported of the modules, and watch this process from now on."""
        for module in [name for name in sys.modules if self.holds(name)]:
            del sys.modules[module]
            package, _, name = module.rpartition(".")
            if package in sys.modules:
                vars(sys.modules[package]).pop(name, None)
        sys.addaudithook(self.watch)

    def watch(self, event, arguments):
        if event == "import" and self.holds(arguments[0]):
            self.refuse(f"Your code imports {arguments[0]}")
        if event == "open" and isinstance(arguments[0], str) and not in_linecache():
            path = Path(os.path.abspath(arguments[0]))
            if path.parent.name == "__pycache__":  # what Python has compiled counts as its source
                path = path.parents[1] / (path.name.split(".")[0] + ".py")
            for file in self.files:
                if path == file.with_suffix(".py") or path.is_relative_to(file):
                    self.refuse(f"Your code opens {path.relative_to(ROOT)}")

    def refuse(self, what):
        self.message = self.message or f"{what}, {CLOSED}"
        raise ImportError(self.message)


def in_linecache():
    """Whether Python reads a line of source, for a warning or a stack: that is no attempt."""
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_filename != linecache.__file__:
        frame = frame.f_back
    return frame is not None


CLOSED = "which holds the answer of this assignment or its checks. No points are given for that."


# A whole submission

def grade(path, seed=0, here=False):
    """A student's file -> its Report. here: without processes, limits and closed modules, so that
    `breakpoint()` and `print` work."""
    assignment = assignment_of(path)
    closed = Closed(assignment.answers)
    path = path.resolve()
    report = Report(str(path), assignment.name, seed, [
        Outcome(name, first_line(function.__doc__), function.points)
        for name, function in assignment.checks.items()])
    if here:
        for outcome in report.outcomes:
            outcome.message = run_here(path, assignment, outcome.name, seed)
            outcome.passed = not outcome.message
        return report

    with tempfile.TemporaryDirectory() as folder:
        report.fault = closed.imported_by(path) or run_apart(Loading(path, closed), 8, folder)
        start = time.monotonic()
        for outcome in report.outcomes:
            begun = time.monotonic()
            if report.fault:
                outcome.message = report.fault
            elif begun - start > TOTAL:
                outcome.message = f"Not run: the checks before took more than {TOTAL} seconds."
            else:
                work = Checking(path, assignment, outcome.name, seed, closed)
                seconds = assignment.checks[outcome.name].seconds
                outcome.message = run_apart(work, seconds, folder)
            outcome.passed = not outcome.message
            outcome.seconds = round(time.monotonic() - begun, 3)
    return report


@dataclass
class Loading:
    """What a child does first: load the file, to see that it can be."""
    path: Path
    closed: Closed

    def __call__(self):
        self.closed.hide()
        try:
            load_file(self.path)
        except (Exception, SystemExit) as error:
            return self.closed.message or explain(error, self.path)
        return self.closed.message


@dataclass
class Checking:
    """What a child does then: one check."""
    path: Path
    assignment: check.Assignment
    name: str
    seed: int
    closed: Closed

    def __call__(self):
        self.closed.hide()
        return run_here(self.path, self.assignment, self.name, self.seed, self.closed)
