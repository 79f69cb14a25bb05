"""Grade a submission, or a folder of them: `python -m docs.course.grade FILE|FOLDER`.

Each of a file's tests runs in a process of its own, in a copy of the repository without the answers, and only notes
what the file gives. What is right is noted by a run of answer.py elsewhere, and compared here. So the process of a
submission knows neither right values nor points.
"""
import csv
import io
import json
import math
import os
import re
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from shutil import copyfile, copytree
from tempfile import TemporaryDirectory

from tqdm import tqdm

from docs.course import assignments, compiles, confine
from docs.course.assignments import PAGE, ROOT, answer_of, assignment_of, folder_of, key_of, named
from docs.course.compare import complaints, short, shortest
from docs.course.confine import hole
from tinykv import UserError
from tinykv.lab.cli import Columns, Parser, one_line, printable
from tinykv.lab.files import check_target, read_text, write, write_json

LONGEST = 300  # seconds of a submission; each of its tests has a time of its own


def parser():
    p = Parser(prog="python -m docs.course.grade", description=__doc__.split("\n\n")[0])
    p.add_argument("submission", type=Path, metavar="FILE|FOLDER", help="a student's file, or a folder of them")
    p.add_argument("--assignment", metavar="NAME", help="the only one that a file may be for")
    p.add_argument("--all", action="store_true", help="show what is wrong in every failed test")
    p.add_argument("--students", nargs="+", metavar="WHO", help="of a folder, these alone")
    p.add_argument("--seed", type=int, default=0, help="draws other models, sizes and inputs")
    p.add_argument("--json", type=Path, metavar="F", help="write a record of everything to F")
    p.add_argument("--points", type=Path, metavar="F", help="of a folder, write a line for each student, with a total, "
                   "to F; what F has of other students and assignments stays")
    p.add_argument("--unconfined", action="store_true", help="grade also where a submission can read the answers")
    return p


def main():
    p = parser()
    with one_line(p):
        args = p.parse_args()
        if args.assignment:
            folder_of(args.assignment)
        if args.submission.is_dir():
            files = submissions(args.submission, args.assignment)
            students = [student_of(file, args.submission) for file in files]
            if missing := {*(args.students or students)}.difference(students):
                raise UserError(f"{args.submission} has no files of {', '.join(sorted(missing))}")
            chosen = [file for file, name in zip(files, students) if name in (args.students or students)]
            print_table(grade_all(chosen, args), args.submission)
        else:
            if args.points:
                raise UserError("--points is for a folder of students; --students grades one of them again")
            if line := assignments.write_missing(args.submission):
                print(line)
            if not args.submission.exists():
                raise UserError(f"there is no file or folder {args.submission}")
            print_report(grade_all([args.submission], args)[0], args.all)


def submissions(folder, assignment=None):
    """The Python files of a folder; beside one that counts, none of the same student that names another assignment, or
    none, unless it is called a page or a starter. Of a student without a Python file, the folder, or the file: a
    notebook, say."""
    def is_aside(file):
        with suppress(UserError):
            name = named(file, "ASSIGNMENT")
            if name is None:
                return not re.search("page|starter", file.name)
            return assignment not in (None, name, name.removesuffix(PAGE))
        return False
    files = [file for file in sorted(folder.rglob("*.py"))  # what an editor, or a Mac, has put there is nobody's
             if not any(part.startswith((".", "__")) for part in file.relative_to(folder).parts)]
    handed_in = {student_of(file, folder) for file in files if not is_aside(file)}
    if not handed_in:
        raise UserError(f'no Python file in {folder} says ASSIGNMENT = "{assignment or "kvsink"}"; give a file, or a '
                        'folder of them')
    files = [file for file in files if not is_aside(file) or student_of(file, folder) not in handed_in]
    students = {student_of(file, folder) for file in files}
    others = [path for path in folder.glob("[!._]*") if path.suffix not in (".csv", ".json")]
    return sorted(files + [path for path in others if path.name.removesuffix(".py") not in students])


def student_of(file, submission):
    """Who has handed in a file: the name of the folder of theirs in a folder of submissions, or else of the file."""
    path = file.relative_to(submission) if submission.is_dir() else Path(file.name)
    return path.parts[0].removesuffix(".py")


# near the beginning of a report
SIGNS = {"json": '"student"', "points": "student,total"}


def grade_all(files, args):
    """The reports of files, as many at a time as there are cores. Each is written as it comes, beside those that are
    there of other students and assignments."""
    before = dict.fromkeys(SIGNS, "")
    for flag, sign in SIGNS.items():
        if path := getattr(args, flag):
            check_target(path, "report", sign)
            before[flag] = read_text(path, math.inf) if path.exists() else ""
    opening = hole(ROOT)
    if opening and (folder_of("affine") / "answer.py").is_file():
        if not args.unconfined:
            raise UserError(f"{opening}; grade elsewhere, or give --unconfined")
        print(f"unconfined: {opening}", file=sys.stderr)
    reports = []
    with TemporaryDirectory(ignore_cleanup_errors=True) as temporary, ThreadPoolExecutor(os.cpu_count()) as pool:
        given = Given(args, Path(temporary), files)
        for report in tqdm(pool.map(given.report, files), "grading", len(files), False, unit="file", disable=None):
            if report["fault"] and not args.submission.is_dir():
                raise UserError(report["fault"])
            reports.append({"student": printable(student_of(Path(report["file"]), args.submission)), **report})
            if args.json:
                now = {(report["student"], name) for report in reports for name in (report["assignment"], "-")}
                write_json(args.json, [old for old in json.loads(before["json"] or "[]")
                                       if (old["student"], old["assignment"]) not in now] + reports)
            if args.points:
                write(args.points, lambda part: part.write_text(totals(reports, before["points"]), encoding="utf-8"))
    return reports


# One submission

class Given:
    """What the submissions of one run share: for each assignment a copy of the repository, and the right values."""

    def __init__(self, args, folder, files):
        self.seed, self.folder = args.seed, folder
        self.names, self.right = {}, {}  # {file: its assignment, or why it has none}, {assignment: its tests}
        for file in files:
            try:
                self.names[file] = name = assignment_of(file)
                if args.assignment not in (None, name, name.removesuffix(PAGE)):
                    raise UserError(f"{file.name} is for the assignment {name}, and {args.assignment} was asked for")
                if name not in self.right:
                    self.right[name] = right_values(name, self.seed, folder)
            except UserError as error:
                self.names[file] = error

    def report(self, file):
        """The record of one file."""
        name = self.names[file]
        report = {"file": str(file), "assignment": "-", "seed": self.seed, "points": 0, "of": 0}
        if isinstance(name, UserError):
            return report | {"fault": str(name), "tests": []}
        given = record_of(file, name, self.seed, self.folder)
        try:
            tests = [judged(test, given.get(key)) for key, test in self.right[name].items()]
        except Exception:  # the file has written a record of its own, of another form
            tests = [judged(test, None) for test in self.right[name].values()]
        return report | {"assignment": name, "points": sum(test["points"] for test in tests), "fault": "",
                         "of": sum(test["of"] for test in tests), "tests": tests}


def judged(test, given):
    """What a test gives: all of its points, or none and why, by the shortest of what is wrong. test: the answer's
    record; given: the submission's."""
    result = {"title": test["title"], "of": test["points"], "points": 0}
    if given is None:
        return result | {"message": "Your code ended the process, or took too long, before this test was over. If "
                         "no test has points, look at what the file does when it is imported."}
    if told := [*complaints(given["notes"], test["notes"], lambda: given["errors"])]:
        return result | {"message": shortest(told)}
    if given["fault"] or len(given["notes"]) != len(test["notes"]):
        return result | {"message": short(str(given["fault"])) or "Your code ended this test before it was over."}
    return result | {"points": test["points"], "message": ""}


def right_values(name, seed, folder):
    """{test: what answer.py notes in it}. It runs as a submission does, so what this machine lacks costs no student
    points. folder: gets the copy of the repository in which the assignment's files run."""
    copy(folder / f"{name}-copy", name)
    answer, stored = answer_of(name), folder_of(name) / "expected.json"
    if not answer.is_file():
        expected = json.loads(stored.read_text(encoding="utf-8"))
        if seed != expected["seed"]:
            raise UserError(f"this repository has right values for --seed {expected['seed']} alone; got {seed}")
        return {key: test for key, test in expected["tests"].items() if is_part(key, name)}
    right = record_of(answer, name, seed, folder)
    faults = [test["fault"] for test in right.values()]
    faults += [compiles.verdict(note, test["errors"]) for test in right.values() for note, *_ in test["notes"]]
    if sum(test["points"] for test in right.values()) != points_of(name) or any(faults):
        faults = [*filter(None, faults), "it ended, or took too long"]
        raise UserError(f"this machine cannot grade {name}, as its own answer fails here: {faults[0][:200]}; `pytest "
                        f"{folder_of(name).relative_to(ROOT)} --file {answer.relative_to(ROOT)}` may show why")
    return right


def is_part(test, name):
    """Whether a test belongs to an assignment, or to its page."""
    return test.startswith("test_page") == name.endswith(PAGE)


def points_of(name):
    """The points of all tests of an assignment, or of its page."""
    return sum(tests_in(name).values())


def tests_in(name):
    """{test: its points}, of an assignment, or of its page."""
    tests = tests_of(name).read_text(encoding="utf-8")
    found = re.findall(r"^@(?:pytest\.mark\.)?points\((\d+)\)\n(?:@.*\n)*def (\w+)", tests, re.MULTILINE)
    return {test: int(points) for points, test in found if is_part(test, name)}


def tests_of(name):
    return folder_of(name) / f"test_{name.removesuffix(PAGE)}.py"


def record_of(file, name, seed, folder):
    """What a file notes in an assignment's tests, under all limits."""
    with TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as both:  # in which some process may still write
        work, own, submission = Path(both, "copy"), Path(both, "own"), Path(both, "submission.py")
        copytree(folder / f"{name}-copy", work)
        copyfile(file, submission)
        own.mkdir()
        run_tests(submission, work, own, name, seed, Path(both, "record"))
        errors = compiles.errors(submission, compiles.kernels_in(tests_of(name)), work, own)
        return {test: {**given, "errors": errors} for test, given in read_record(Path(both, "record")).items()}


def copy(folder, name):
    """What a submission needs of the repository, without the answers."""
    files = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tinykv").rglob("*.py")]
    files += [path.relative_to(ROOT).as_posix() for path in (ROOT / "docs" / "course").glob("*.py")]
    files += [tests_of(name).relative_to(ROOT).as_posix(), ".pytest.ini"]
    files = [file for file in files if file not in assignments.REFUSED.get(name, ())]
    assignments.write(folder, files, {*assignments.ANSWERS} - ({*assignments.CORE} - {name.removesuffix(PAGE)}))


def run_tests(file, work, own, name, seed, record):
    """Run an assignment's tests on a file, in a copy of the repository and a process of its own, until it ends or its
    time is up. It reads the seed's key from stdin; -s leaves that to it. own: an empty folder; record: a file, to which
    it adds lines."""
    with open(record, "ab") as lines:
        words = ["pytest", "-q", "-s", "-p", "no:cacheprovider", folder_of(name).relative_to(ROOT), "--seed", "-",
                 "--file", file, "--record", str(lines.fileno())]
        confine.run(words, f"{key_of(seed)}\n", LONGEST, work, own, [lines.fileno()])


def read_record(path):
    """{test: its record}, the first one, without lines that are none."""
    found = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError, KeyError, TypeError, RecursionError):
            test = json.loads(line)
            found.setdefault(test["test"], test)
    return found


# What is printed and written

def print_report(report, show_all):
    print(f"Assignment {report['assignment']}: {printable(report['file'])}\n")
    for test in report["tests"]:
        points = f"{test['points']}/{test['of']}"
        print(f"  {'pass' if test['points'] else 'FAIL'}  {points:>5}  {test['title']}")
    print(f"\n{report['points']} of {report['of']} points")
    failed = [test for test in report["tests"] if not test["points"]]
    for test in failed if show_all else failed[:1]:
        print(f"\n{test['title']}")
        for line in test["message"].splitlines():  # some of it is the student's
            print(textwrap.fill(printable(line), 96, initial_indent="    ", subsequent_indent="    "))


def print_table(reports, folder):
    lines = []
    for report in reports:
        failed = [test for test in report["tests"] if not test["points"]]
        told = [report["fault"].replace(f"{folder}{os.sep}", "")] if report["fault"] else {
            re.sub("^(Not written yet): .*", r"\1", test["message"]) for test in failed}
        if len(told) > 1 or report["points"]:  # one reason for all stands for them
            told = dict.fromkeys(test["title"].split(":")[0] for test in failed)
        file = printable(str(Path(report["file"]).relative_to(folder)))
        points = f"{report['points']}/{report['of']}"
        lines.append([file, report["assignment"], points, textwrap.shorten(printable(", ".join(told)), 100)])
    print(Columns(["submission", "assignment", "points", "what failed"], lines, left=4))


def totals(reports, before=""):
    """A line of CSV for each student: all points, and those of each assignment; of several files for one, the best.
    before: a text of this form; what was not graded now, and columns of one's own, stay."""
    rows, best = {row["student"]: row for row in csv.DictReader(io.StringIO(before))}, {}
    for report in reports:
        student, name = cell(report["student"]), report["assignment"]
        row = rows.setdefault(student, {"student": student})
        if not report["fault"]:
            row[name] = best[student, name] = max(report["points"], best.get((student, name), 0))
    names = [*dict.fromkeys(key for row in rows.values() for key in row if key not in ("student", "total"))]
    known = assignments.folders()
    summed = [name for name in names if name.removesuffix(PAGE) in known]  # no column of one's own
    for row in rows.values():
        row["total"] = f"{sum(float(row.get(name) or 0) for name in summed):g}"
    text = io.StringIO()
    writer = csv.DictWriter(text, ["student", "total", *names], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows.values())
    return text.getvalue()


def cell(value):
    """As a spreadsheet shows it. It would compute a name that begins as a formula does."""
    return f"'{value}" if str(value).startswith(("=", "+", "-", "@", "\t", "\r")) and value != "-" else value


if __name__ == "__main__":
    main()
