"""An assignment in which a student finds a fault with the debugger: `python -m docs.course.hunt NAME FOLDER --seed N`.

With --students, each gets FOLDER/<student>/page.py: an assignment's page of docs/ladder with one fault of those in
tests/lab/course/NAME.py that change what it prints, drawn by the seed and the student's name. So are its names: a
`diff` with the public page shows most lines. hunt.md says what they hand in. Without --students, the files of FOLDER
are graded, under the grader's limits.
"""
import difflib
import random
import re
import runpy
from pathlib import Path

from docs.course import grade
from docs.course.assignments import PAGE, ROOT, answer_of, key_of
from tinykv.lab.cli import Columns, Parser, one_line, printable

NAMES = "affine", "kvsink", "ott"
OTHERS = {  # the names that stand for a page's own
    "codes": ("marks", "labels"), "high": ("most", "peak"), "kept": ("saved", "spared"), "kind": ("side", "part"),
    "layer": ("stage", "floor"), "low": ("least", "bottom"), "rows": ("lines", "vectors"), "scale": ("step", "width"),
    "size": ("extent", "reach"), "x": ("numbers", "given"), "zero": ("base", "origin")}
ABOVE = 'LINE = 0  # the number of the line that was wrong, as this file counts\nWHY = ""  # see docs/course/hunt.md\n'


def parser():
    p = Parser(prog="python -m docs.course.hunt", description=__doc__.split("\n\n")[0])
    p.add_argument("name", choices=NAMES, help="the assignment whose page it is")
    p.add_argument("folder", type=Path, metavar="FOLDER", help="has, or gets, a folder for each student")
    p.add_argument("--seed", type=int, required=True, help="draws the faults; the same for handing out and grading")
    p.add_argument("--students", metavar="WHO", help="names with commas: write their files")
    return p


def main():
    p = parser()
    with one_line(p):
        args = p.parse_args()
        for student in args.students.split(",") if args.students else ():
            target = args.folder / student / "page.py"
            if target.exists():
                print(f"{target} is there already, and stays as it is")
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(planted(args.name, student, args.seed)[0], encoding="utf-8")
        if not args.students:
            words = [str(args.folder), "--assignment", args.name + PAGE, "--seed", str(args.seed)]
            reports = grade.grade_all(sorted(args.folder.glob("*/page.py")), grade.parser().parse_args(words))
            lines = [checked(args.name, report, args.seed) for report in reports]
            print(Columns(["student", "line", "mended", "why"], lines, left=1))


def planted(name, student, seed):
    """The page with a student's fault -> its text, that of the right page, and the indices of the lines that differ."""
    draws, page = random.Random(key_of(f"{seed} {name} {student}")), answer_of(name + PAGE).read_text(encoding="utf-8")
    faults = runpy.run_path(str(ROOT / "tests" / "lab" / "course" / f"{name}.py"))
    old, new = faults["PAGE"][draws.choice(faults["PRINTED"])]
    names = {word: draws.choice(others) for word, others in OTHERS.items()}

    def handed_out(page):
        summary, quotes, rest = page[3:].partition('"""\n')
        summary = re.sub(r"    (python|diff) .*\n", "", summary)  # commands, for the public page
        rest = re.sub(rf"\b({'|'.join(names)})\b", lambda word: names[word[0]], rest)
        return f'"""{summary}{quotes}ASSIGNMENT = "{name}{PAGE}"\n{ABOVE}{rest}'
    wrong, right = handed_out(page.replace(old, new)), handed_out(page)
    return wrong, right, changed(right, wrong)


def changed(before, after):
    """The indices of the lines of `after` that `before` has otherwise."""
    blocks = difflib.SequenceMatcher(None, before.splitlines(), after.splitlines(), False).get_opcodes()
    return {line for what, *_, first, end in blocks if what != "equal" for line in range(first, max(end, first + 1))}


def checked(name, report, seed):
    """A line of the table: points for the line, and for a page that is right and has no other line changed. What stands
    in WHY is for the instructor to judge."""
    wrong, _, lines = planted(name, report["student"], seed)
    text = Path(report["file"]).read_text(encoding="utf-8", errors="replace")
    said, why = (re.search(f"^{word} = (.*)", text, re.MULTILINE) for word in ("LINE", "WHY"))
    line = said and re.match(r"\d+", said[1])
    above = {i for i, code in enumerate(wrong.splitlines()) if f"{code}\n" in ABOVE.splitlines(True)}
    mended = 0 < report["points"] == report["of"] and changed(text, wrong) - above <= lines
    points = [f"{3 * bool(right)}/3" for right in (line and int(line[0]) - 1 in lines, mended)]
    return [printable(report["student"]), *points, printable(why[1] if why else "none")]


if __name__ == "__main__":
    main()
