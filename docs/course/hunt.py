"""An assignment in which a student finds a fault with the debugger: `python -m docs.course.hunt NAME FOLDER --seed N`.

With --students, each gets FOLDER/<student>/page.py: an assignment's page of docs/ladder with one fault of those in
tests/lab/course/NAME.py that change what it prints, drawn by the seed and the student's name. So are its names: a
`diff` with the public page shows most lines. hunt.md says what they hand in. Without --students, the files of FOLDER
are graded, under the grader's limits.
"""
import ast
import difflib
import random
import re
import runpy
import textwrap
from pathlib import Path

from docs.course import grade
from docs.course.assignments import PAGE, ROOT, answer_of, key_of, naming
from docs.course.compiles import above_table
from tinykv import UserError
from tinykv.lab.cli import Parser, one_line, printable

NAMES = "affine", "kvsink", "ott"
OTHERS = {  # the names that stand for a page's own
    "codes": ("marks", "labels"), "high": ("most", "peak"), "kept": ("saved", "spared"), "kind": ("side", "part"),
    "layer": ("stage", "floor"), "low": ("least", "bottom"), "rows": ("lines", "vectors"), "scale": ("step", "width"),
    "size": ("extent", "reach"), "x": ("numbers", "given"), "zero": ("base", "origin")}
ABOVE = 'LINE = 0  # the number of the line that was wrong, as this file counts\nWHY = ""  # see docs/course/hunt.md\n'
MOST = 10  # lines that a student changes; another seed's page mostly differs by 20 and more


def main():
    p = Parser(prog="python -m docs.course.hunt", description=__doc__.split("\n\n")[0])
    p.add_argument("name", choices=NAMES, help="the assignment whose page it is")
    p.add_argument("folder", type=Path, metavar="FOLDER", help="has, or gets, a folder for each student")
    p.add_argument("--seed", type=int, required=True, help="draws the faults; the same for handing out and grading")
    p.add_argument("--students", nargs="+", metavar="WHO", default=(), help="write the files of these")
    with one_line(p):
        args = p.parse_args()
        for student in args.students:
            target = args.folder / student / "page.py"
            if target.exists():
                print(f"{target} is there already, and stays as it is")
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(planted(args.name, student, args.seed)[0], encoding="utf-8")
        if not args.students:
            words = [str(args.folder), "--assignment", args.name + PAGE, "--seed", str(args.seed)]
            files = grade.submissions(args.folder, args.name + PAGE)
            reports = grade.grade_all(files, grade.parser().parse_args(words))
            rows = [checked(args.name, report, args.seed) for report in reports]
            for student, points, why in rows:
                print(f"{student}: {points or 'not graded'}", textwrap.indent(textwrap.fill(why, 92), "    "), sep="\n")
            if not any(points for _, points, _ in rows):
                raise UserError(f"{args.folder} has no page that a student got with --seed {args.seed}; give the seed "
                                "that wrote the files, and put each into a folder with its student's name")


def planted(name, student, seed):
    """The page with a student's fault -> its text, that of the right page, and the indices of the lines that differ."""
    draws, page = random.Random(key_of(f"{seed} {name} {student}")), answer_of(name + PAGE).read_text(encoding="utf-8")
    faults = runpy.run_path(str(ROOT / "tests" / "lab" / "course" / f"{name}.py"))
    old, new = faults["PAGE"][draws.choice(faults["PRINTED"])]
    names = {word: draws.choice(others) for word, others in OTHERS.items()}

    def handed_out(page):
        summary, quotes, rest = page.partition('"""\n')
        summary = re.sub(r"    (python|diff) .*\n", "", summary)  # commands, for the public page
        rest = re.sub(rf"\b({'|'.join(names)})\b", lambda word: names[word[0]], rest)
        return naming(name + PAGE, f"{summary}{quotes}{ABOVE}{rest}")
    wrong, right = handed_out(page.replace(old, new)), handed_out(page)
    return wrong, right, changed(right, wrong)


def changed(before, after):
    """The indices of the lines of `after` that `before` has otherwise."""
    blocks = difflib.SequenceMatcher(None, before.splitlines(), after.splitlines(), False).get_opcodes()
    return {line for what, *_, first, end in blocks if what != "equal" for line in range(first, max(end, first + 1))}


def checked(name, report, seed):
    """A student; points for the line, and for a page that is right and has no other line changed; and WHY, for the
    instructor to judge, or why there are no points."""
    student = printable(report["student"])
    if report["fault"]:
        return student, "", printable(report["fault"])
    wrong, _, lines = planted(name, report["student"], seed)
    text = Path(report["file"]).read_text(encoding="utf-8", errors="replace")
    above = {i for i, code in enumerate(wrong.splitlines()) if f"{code}\n" in ABOVE.splitlines(True)}
    mended = changed(text, wrong) - above
    if len(mended) > MOST:
        return student, "", f"{len(mended)} lines differ from the page that --seed {seed} gives {student}"
    line = re.search(r"^LINE = \W?(\d{1,6})\b", text, re.MULTILINE)
    why = re.search(r"(?ms)^WHY = (.*?)(# see docs.*?)?(?=^import |\Z)", text)
    whole = 0 < report["points"] == report["of"] and steps_of(text) == steps_of(wrong)
    right = line and int(line[1]) - 1 in lines, whole and mended <= lines
    points = "line {}/3, mended {}/3; ".format(*(3 * bool(part) for part in right))
    points += "the fault is in line " + " or ".join(str(line + 1) for line in sorted(lines))
    return student, points, printable(" ".join(why[1].split()) if why else "none")


def steps_of(page):
    """How many statements stand above a page's table."""
    return len(ast.parse(above_table(page)).body)


if __name__ == "__main__":
    main()
