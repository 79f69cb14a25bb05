"""Gradescope's autograder of an assignment, or of the project.

    python -m docs.course.gradescope zip kvsink 2039187523 kvsink.zip    what to upload; or kvsink_page, or project
    python -m docs.course.gradescope grade kvsink 2039187523             in Gradescope's container
    python -m docs.course.gradescope place                               there, of the project
"""
import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from zipfile import ZipFile, ZipInfo

from docs.course import grade
from docs.course.assignments import PAGE, PAGES, ROOT, folder_of, key_of
from tinykv import UserError

BUDGET = 3.0  # true bits of a number that a method of the project may take
HOME = Path("/autograder")
SETUP = """#!/bin/bash
set -e
curl -LsSf https://astral.sh/uv/install.sh | env UV_INSTALL_DIR=/usr/local/bin sh
uv venv --python 3.12 /autograder/python
uv pip install --python /autograder/python --torch-backend cpu -r /autograder/source/tinykv/requirements.txt \\
    landlock==1.0.0.dev5 pyseccomp
"""
RUN = """#!/bin/bash
cd /autograder/source/tinykv
"""
GRADE = "/autograder/python/bin/python -m docs.course.gradescope grade {name} {seed}\n"
PROJECT = """/autograder/python/bin/python eval_ppl.py --method /autograder/submission/method.py:Mine --bits 2,3 \\
    --draws 3 --seed {seed} --json /autograder/table.json
/autograder/python/bin/python -m docs.course.gradescope place
"""


def make(name, seed, path):
    """Write a zip with what git has of this repository, and the two scripts that Gradescope runs."""
    if name != "project":
        folder_of(name)
    archive = ["git", "-C", ROOT, "archive", "--format=zip", "--prefix=tinykv/", "-o", path, "HEAD"]
    subprocess.run(archive, check=True)
    run = RUN + (PROJECT if name == "project" else GRADE).format(name=name, seed=int(seed))
    with ZipFile(path, "a") as file:
        for script, text in (("setup.sh", SETUP), ("run_autograder", run)):
            entry = ZipInfo(script)
            entry.external_attr = 0o755 << 16  # it may be run
            file.writestr(entry, text)


def graded(name, seed, *flags):
    """Write the results of all that a student has handed in for an assignment. Each submission draws numbers of its
    own: a message shows a right value, and may be read as often as one hands in."""
    submission = json.loads((HOME / "submission_metadata.json").read_text(encoding="utf-8"))["id"]
    seed = int(key_of(f"{seed} {submission}")[:15], 16)
    args = grade.parser().parse_args([str(HOME / "submission"), "--assignment", name, "--seed", str(seed), *flags])
    files = []
    with suppress(UserError):  # there is no Python file
        files = grade.submissions(args.submission, name)
    reports, tests = grade.grade_all(files, args), []
    told = [f"{Path(report['file']).name}: {report['fault']}" for report in reports if report["fault"]]
    if not files:
        there = ", ".join(sorted(path.name for path in args.submission.rglob("*")))
        told.append("no Python file was handed in" + (there and f", but {there}"))
    for part in (name + PAGE, name) if name in PAGES else (name,):
        found = [report for report in reports if report["assignment"] == part]
        if found:
            tests += max(found, key=lambda report: report["points"])["tests"]
        else:
            tests.append({"title": part, "points": 0, "of": grade.points_of(part), "message": "not handed in"})
    tests = [{"name": test["title"], "score": test["points"], "max_score": test["of"], "output": test["message"],
              "status": "passed" if test["points"] else "failed"} for test in tests]
    score = sum(test["score"] for test in tests)
    write({"score": score, "output": "\n".join(told), "visibility": "visible", "tests": tests})


def place():
    """Write a student's place, by the table that eval_ppl.py has written of a method: the lowest KL within the budget.

    The figures are those of a process that ran the student's file, so they can be forged, and a file that stores the
    text has a KL of 0 in half a bit: read the files of the first places, and measure them with another seed.
    """
    table = HOME / "table.json"
    rows = json.loads(table.read_text(encoding="utf-8"))["rows"] if table.exists() else []  # the method may fail
    rows = [row for row in rows if round(row["bits_true"], 2) <= BUDGET]  # without fp16
    result = {"score": 0, "output": f"no place: the method failed, or no row is within {BUDGET:g} true bits"}
    if rows:
        best = min(rows, key=lambda row: row["kld"])
        result = {"score": 0, "output": f"KL {best['kld']:.4f} at {best['bits_true']:.2f} true bits", "leaderboard": [
            {"name": "KL from fp16", "value": best["kld"], "order": "asc"},
            {"name": "true bits", "value": best["bits_true"], "order": "asc"}]}
    write(result)


def write(result):
    (HOME / "results" / "results.json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    {"zip": make, "grade": graded, "place": place}[sys.argv[1]](*sys.argv[2:])
