"""Grade a submission, or a folder of them: `python -m tinykv.course.grade FILE|FOLDER`.

Prints the points of each check, and what is wrong where the first one failed. docs/course/ has the
assignments.
"""
import csv
import io
import textwrap
from dataclasses import asdict
from pathlib import Path

import torch
from tqdm import tqdm

from tinykv import UserError
from tinykv.course import check
from tinykv.course.runner import Report, grade
from tinykv.run.cli import Parser, one_line, print_columns
from tinykv.storage import write, write_json


def parser():
    p = Parser(prog="python -m tinykv.course.grade", description=__doc__.split("\n\n")[0])
    p.add_argument("submission", type=Path, metavar="FILE|FOLDER",
                   help="a student's file, or a folder of them")
    p.add_argument("--all", action="store_true", help="show what is wrong at every failed check")
    p.add_argument("--seed", type=int, default=0, help="draws other models, sizes and inputs")
    p.add_argument("--here", action="store_true",
                   help="run in this process, without limits: print and breakpoint() work")
    p.add_argument("--json", type=Path, metavar="F", help="write a record of everything to F")
    p.add_argument("--csv", type=Path, metavar="F", help="write a line for each submission to F")
    return p


def main():
    p = parser()
    args = p.parse_args()
    torch.set_num_threads(1)
    with one_line(p, "stopped; nothing is written"):
        run(args)


def run(args):
    if args.submission.is_dir():
        reports = grade_folder(args.submission, args.seed, args.here)
        print_table(reports, args.submission)
    else:
        reports = [grade(args.submission, args.seed, args.here)]
        print_report(reports[0], args.all)
    if args.json:
        write_json(args.json, [record(report) for report in reports])
    if args.csv:
        text = table(reports)
        write(args.csv, lambda part: part.write_text(text, encoding="utf-8"))


def grade_folder(folder, seed, here):
    """The reports of all Python files in a folder, and in its folders."""
    files = sorted(folder.rglob("*.py"))
    if not files:
        raise UserError(f"there is no Python file in {folder}; give a file, or a folder of them")
    reports = []
    for file in tqdm(files, "grading", unit="file", leave=False, disable=None):
        try:
            reports.append(grade(file, seed, here))
        except UserError as error:
            reports.append(Report(str(file), "-", seed, [], str(error)))
    return reports


# What is printed

def print_report(report, show_all):
    assignment = check.load(report.assignment)
    print(f"Assignment {assignment.number}, {assignment.title}: {report.file}\n")
    for outcome in report.outcomes:
        mark = "pass" if outcome.passed else "FAIL"
        points = f"{outcome.points}/{outcome.of}"
        print(f"  {mark}  {points:>5}  {outcome.title}")
    print(f"\n{report.points} of {report.of} points")

    failed = [outcome for outcome in report.outcomes if not outcome.passed]
    if report.fault:
        print_message("No check could run.", report.fault)
        return
    for outcome in failed if show_all else failed[:1]:
        print_message(outcome.title, outcome.message)
    if failed[1:] and not show_all:
        print(f"\n--all shows what is wrong at the other {len(failed) - 1}.")


def print_message(title, message):
    print(f"\n{title}")
    print(textwrap.fill(message, 96, initial_indent="    ", subsequent_indent="    ",
                        break_long_words=False, break_on_hyphens=False))


def print_table(reports, folder):
    lines = []
    for report in reports:
        failed = [outcome.name for outcome in report.outcomes if not outcome.passed]
        fault = report.fault.replace(report.file, "it") or ", ".join(failed)
        lines.append([relative(report.file, folder), report.assignment,
                      f"{report.points}/{report.of}", textwrap.shorten(fault, 70)])
    print_columns(["submission", "assignment", "points", "what failed"], lines, left=4)


def relative(file, folder):
    file, folder = Path(file).resolve(), folder.resolve()
    return str(file.relative_to(folder)) if file.is_relative_to(folder) else str(file)


# What is written

def record(report):
    """A report as JSON has it."""
    checks = [{**asdict(outcome), "points": outcome.points} for outcome in report.outcomes]
    return {"file": report.file, "assignment": report.assignment, "seed": report.seed,
            "points": report.points, "of": report.of, "fault": report.fault, "checks": checks}


def table(reports):
    """A line of CSV for each submission: its points in all, and at each check."""
    columns = ["file", "assignment", "seed", "points", "of"]
    rows = []
    for report in reports:
        row = {key: record(report)[key] for key in columns}
        row |= {f"{report.assignment}.{outcome.name}": outcome.points for outcome in report.outcomes}
        rows.append(row)
    names = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


if __name__ == "__main__":
    main()
