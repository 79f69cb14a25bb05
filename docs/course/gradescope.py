"""Gradescope's autograder of an assignment: `python -m docs.course.gradescope NAME SEED FILE.zip` writes the upload.

With a folder in the place of the zip, which is Gradescope's container, it grades what was handed in there.
"""
import json
import subprocess
from contextlib import suppress
from pathlib import Path
from zipfile import ZipFile, ZipInfo

from docs.course import grade
from docs.course.assignments import ROOT, folder_of, key_of, parts_of
from tinykv import UserError
from tinykv.lab.cli import Parser, one_line
from tinykv.lab.files import check_target, write

SETUP = """#!/bin/bash
set -e
curl -LsSf https://astral.sh/uv/install.sh | env UV_INSTALL_DIR=/usr/local/bin sh
uv venv --python 3.12 /autograder/python
uv pip install --python /autograder/python --torch-backend cpu -r /autograder/source/tinykv/requirements.txt \\
    landlock==1.0.0.dev5 pyseccomp
"""
RUN = """#!/bin/bash
cd /autograder/source/tinykv
/autograder/python/bin/python -m docs.course.gradescope {name} {seed} /autograder
"""


def main():
    p = Parser(prog="python -m docs.course.gradescope", description=__doc__)
    p.add_argument("name", help="an assignment, or its page: kvsink, kvsink_page")
    p.add_argument("seed", type=int, help="from which each submission draws numbers of its own")
    p.add_argument("path", type=Path, metavar="FILE.zip", help="a new file, or an earlier one of this command")
    p.add_argument("--unconfined", action="store_true", help="grade also where a submission can read the answers")
    with one_line(p):
        args = p.parse_args()
        folder_of(args.name)
        if args.path.is_dir():
            graded(args.name, args.seed, args.path, args.unconfined)
        else:
            make(args.name, args.seed, args.path)


def make(name, seed, path):
    """Write a zip with what git has of this repository, and the two scripts that Gradescope runs."""
    def fill(part):
        archive = subprocess.run(["git", "-C", ROOT, "archive", "--format=zip", "--prefix=tinykv/", "HEAD"],
                                 capture_output=True)
        if archive.returncode:
            raise UserError(f"{ROOT} is no clone of a git repository; run this in one")
        part.write_bytes(archive.stdout)
        with ZipFile(part, "a") as file:
            for script, text in (("setup.sh", SETUP), ("run_autograder", RUN.format(name=name, seed=seed))):
                entry = ZipInfo(script)
                entry.external_attr = 0o755 << 16  # it may be run
                file.writestr(entry, text)
    check_target(path, "zip for Gradescope", "run_autograder")
    write(path, fill)


def graded(name, seed, home, unconfined):
    """Write the results of all that a student has handed in for an assignment. Each submission draws numbers of its
    own: a message shows a right value, and may be read as often as one hands in."""
    metadata = home / "submission_metadata.json"
    if not metadata.is_file():
        raise UserError(f"{home} has no submission_metadata.json, which Gradescope writes; give the name of a zip")
    submission = json.loads(metadata.read_text(encoding="utf-8"))["id"]
    seed = int(key_of(f"{seed} {submission}")[:15], 16)
    words = [str(home / "submission"), "--assignment", name, "--seed", str(seed), *["--unconfined"] * unconfined]
    args, files = grade.parser().parse_args(words), []
    with suppress(UserError):  # there is no such file
        files = grade.submissions(args.submission, name)
    reports, tests = grade.grade_all(files, args), []
    none = f'no Python file that says ASSIGNMENT = "{name}" was handed in'
    told = [report["fault"] for report in reports if report["fault"]] if files else [none]
    for part in parts_of(name):
        found = [report for report in reports if report["assignment"] == part]
        if found:
            tests += max(found, key=lambda report: report["points"])["tests"]
        else:
            tests.append({"title": part, "points": 0, "of": grade.points_of(part), "message": "not handed in"})
    tests = [{"name": test["title"], "score": test["points"], "max_score": test["of"], "output": test["message"],
              "status": "passed" if test["points"] else "failed"} for test in tests]
    result = {"score": sum(test["score"] for test in tests), "output": "\n".join(told), "visibility": "visible",
              "tests": tests}
    (home / "results" / "results.json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
