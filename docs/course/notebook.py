"""An assignment as a notebook, a task a cell with a check below it: `python -m docs.course.notebook kvsink F.ipynb`.

In it `check("outlier")` runs the tests of a function on what the cells so far define, as pytest does on a starter, and
`hand_in()` writes what they define as starter.py.
"""
import ast
import re
from pathlib import Path

from docs.course.assignments import folder_of, folders, starter
from docs.programs import notebook
from tinykv.lab.cli import Parser, one_line
from tinykv.lab.files import check_target, write

BEGIN = '''"""Assignment {number}, {name}, in a notebook that lies beside its tests."""
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path.cwd().parents[2]))  # the repository
from docs.course.assignments import definitions_in

TESTS = {tests}


def hand_in(file="starter.py"):
    """Write what the cells define as one file."""
    Path(file).write_text(definitions_in(In), encoding="utf-8")


def check(function):
    """Run the tests in whose first line this function is the last that is named."""
    hand_in("notebook.py")
    words = ["pytest", "-q", *TESTS[function], "--file", "notebook.py"]
    print(subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True).stdout)'''


def cells_of(name, text):
    """The handout's sections, and the cells of a starter's text: [(type of the cell, its text)]."""
    folder = folder_of(name)
    before, _, questions = (folder / "handout.md").read_text(encoding="utf-8").partition("\n## Questions\n")
    tests = tests_of(folder / f"test_{name}.py")
    begin = BEGIN.format(number=folder.name[0], name=name, tests=tests)
    return [*(("markdown", part) for part in re.split(r"^(?=## )", before, flags=re.MULTILINE)), ("code", begin),
            *tasks(text, tests), ("code", "hand_in()"), ("markdown", f"## Questions\n{questions}")]


def tests_of(path):
    """{the last function that a test's first line names: [its tests]}, without those of the page."""
    found, text = {}, path.read_text(encoding="utf-8")
    for test, told in re.findall(r'^def (test_(?!page)\w+).*\n    """(.*?)[:"\n]', text, re.MULTILINE):
        found.setdefault(told.split(", ")[-1], []).append(f"{path.name}::{test}")
    return found


def tasks(text, tests):
    """A cell for each function or class, with what stands above it, and one for each of its functions that has tests;
    last, one for each other name."""
    lines, first = text.splitlines(), ast.parse(text).body[0].end_lineno  # behind the docstring
    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield "code", "\n".join(lines[first:node.end_lineno]).strip("\n")
            first = node.end_lineno
            for part in ast.walk(node):
                if isinstance(part, ast.FunctionDef) and part.name in tests:
                    yield "code", f'check("{part.name}")'
    yield from (("code", f'check("{key}")') for key in tests if not key.isidentifier())


def main():
    p = Parser(prog="python -m docs.course.notebook", description=__doc__.split(":")[0] + ".")
    p.add_argument("name", choices=[*folders()], help="the assignment")
    p.add_argument("file", type=Path, metavar="F.ipynb", help="a new file, or an earlier one of this command")
    with one_line(p):
        args = p.parse_args()
        text = notebook.notebook(cells_of(args.name, starter(folder_of(args.name))))
        check_target(args.file, "notebook", '"# Assignment')
        write(args.file, lambda part: part.write_text(text, encoding="utf-8"))


if __name__ == "__main__":
    main()
