"""What other platforms need of an assignment.

    python -m docs.course.adapters gradescope kvsink 2039187523 kvsink.zip    an autograder; or kvsink_page, or project
    python -m docs.course.adapters classroom kvsink ott > classroom.yml       a workflow for GitHub Classroom
    python -m docs.course.adapters leaderboard table.json results.json        of the project, in Gradescope's autograder
"""
import json
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile, ZipInfo

from docs.course.assignments import PAGE, ROOT
from docs.course.grade import tests_in, tests_of

BUDGET = 3.0  # true bits of a number that a method of the project may take
SETUP = """#!/bin/bash
pip install torch --index-url https://download.pytorch.org/whl/cpu
pip install -r /autograder/source/tinykv/requirements.txt
"""
RUN = """#!/bin/bash
cd /autograder/source/tinykv
python -m docs.course.grade --assignment {name} "$(ls /autograder/submission/*.py | head -1)" --seed {seed} \\
    --gradescope /autograder/results/results.json
"""
PROJECT = """#!/bin/bash
cd /autograder/source/tinykv
python eval_ppl.py --method /autograder/submission/method.py:Mine --bits 2,3 --draws 3 --seed {seed} \\
    --json /autograder/table.json
python -m docs.course.adapters leaderboard /autograder/table.json /autograder/results/results.json
"""
WORKFLOW = """name: Autograding
on: [push, repository_dispatch]
permissions: {{checks: write, actions: read, contents: read}}
jobs:
  run-autograding-tests:
    runs-on: ubuntu-latest
    if: github.actor != 'github-classroom[bot]'
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with: {{python-version: "3.12", cache: pip}}
      - run: pip install -r requirements.txt
{steps}
      - uses: classroom-resources/autograding-grading-reporter@v1
        env: {{{results}}}
        with: {{runners: "{ids}"}}
"""
STEP = """      - id: {id}
        uses: classroom-resources/autograding-command-grader@v1
        with: {{test-name: {id}, command: "pytest {file}::{test}", timeout: 10, max-score: {points}}}"""


def gradescope(name, seed, path):
    """Write a zip with what git has of this repository, and the two scripts that Gradescope runs."""
    archive = ["git", "-C", ROOT, "archive", "--format=zip", "--prefix=tinykv/", "-o", path, "HEAD"]
    subprocess.run(archive, check=True)
    run = (PROJECT if name == "project" else RUN).format(name=name, seed=seed)
    with ZipFile(path, "a") as file:
        for script, text in (("setup.sh", SETUP), ("run_autograder", run)):
            entry = ZipInfo(script)
            entry.external_attr = 0o755 << 16  # it may be run
            file.writestr(entry, text)


def classroom(*names):
    """Print a workflow in which each test of these assignments, and of their pages, is a step with its points."""
    steps = {}
    for part in (part for name in names for part in (name + PAGE, name)):
        for test, points in tests_in(part).items():
            steps[f"{part}_{test}"] = {"file": tests_of(part).relative_to(ROOT), "test": test, "points": points}
    results = ", ".join(f'{key.upper()}_RESULTS: "${{{{steps.{key}.outputs.result}}}}"' for key in steps)
    print(WORKFLOW.format(steps="\n".join(STEP.format(id=key, **step) for key, step in steps.items()), results=results,
                          ids=",".join(steps)), end="")


def leaderboard(table, results):
    """Write a student's place, by the table that eval_ppl.py has written of a method: the lowest KL within the budget.

    The figures are those of a process that ran the student's file, so they can be forged, and a file that stores the
    text has a KL of 0 in half a bit: read the files of the first places, and measure them with another seed.
    """
    rows = json.loads(Path(table).read_text(encoding="utf-8"))["rows"] if Path(table).exists() else []  # it may fail
    rows = [row for row in rows if round(row["bits_true"], 2) <= BUDGET]  # without fp16
    result = {"score": 0, "output": f"no place: the method failed, or no row is within {BUDGET:g} true bits"}
    if rows:
        best = min(rows, key=lambda row: row["kld"])
        result = {"score": 0, "output": f"KL {best['kld']:.4f} at {best['bits_true']:.2f} true bits", "leaderboard": [
            {"name": "KL from fp16", "value": best["kld"], "order": "asc"},
            {"name": "true bits", "value": best["bits_true"], "order": "asc"}]}
    Path(results).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    {made.__name__: made for made in (gradescope, classroom, leaderboard)}[sys.argv[1]](*sys.argv[2:])
