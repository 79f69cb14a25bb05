"""An assignment as a notebook, a task a cell with a check below it: `python -m docs.course.notebook kvsink F.ipynb`.

In it `check("outlier")` runs the tests of a function, and of those above it, on what the cells have defined, and tells
of each that fails the shortest input, your result and the right one. `hand_in("starter.py")` writes the cells as a file
for the grader.
"""
import ast
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

from docs.course import conftest
from docs.course.assignments import folder_of, key_of, starter
from docs.course.compare import difference, short

BEGIN = """import sys
from pathlib import Path
sys.path[:0] = [str(folder) for folder in Path.cwd().parents if (folder / "tinykv").is_dir()]
from docs.course.notebook import Checks
check, hand_in = (checks := Checks("{name}", globals())).check, checks.hand_in"""


def notebook(name, text):
    """What a .ipynb file holds: the handout's sections, and the cells of a starter's text."""
    handout, tests = ((folder_of(name) / file).read_text("utf-8") for file in ("handout.md", f"test_{name}.py"))
    before, questions = handout.split("\n## Questions\n")
    cells = [("markdown", part) for part in re.split(r"^(?=## )", before, flags=re.MULTILINE)]
    cells += [("code", BEGIN.format(name=name)), *tasks(text, tests), ("code", 'check("all of it")'),
              ("code", 'hand_in("starter.py")'), ("markdown", f"## Questions\n{questions}")]
    ran, kernel = {"outputs": [], "execution_count": None}, {"name": "python3", "display_name": "Python 3"}
    return {"nbformat": 4, "nbformat_minor": 5, "metadata": {"kernelspec": kernel}, "cells": [
        {"cell_type": kind, "id": f"cell-{i}", "metadata": {}, "source": source} | (ran if kind == "code" else {})
        for i, (kind, source) in enumerate(cells)]}


def tasks(text, tests):
    """A cell for each function or class, with what stands above it, and one that checks what its tests are about."""
    lines, first = text.splitlines(), ast.parse(text).body[0].end_lineno  # behind the docstring
    tested = {titles.split(", ")[-1] for titles in re.findall(r'^    """([\w, ]+):', tests, re.MULTILINE)}
    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield "code", "\n".join(lines[first:node.end_lineno]).strip("\n")
            first = node.end_lineno
            names = [part.name for part in ast.walk(node) if isinstance(part, ast.FunctionDef) and part.name in tested]
            yield from [("code", "\n".join(f'check("{name}")' for name in names))] if names else ()


class Checks:
    """An assignment's tests, on what a notebook has defined."""

    def __init__(self, name, defined):
        self.folder, self.defined = folder_of(name), defined
        self.tests = conftest.load(self.folder / f"test_{name}.py")

    def check(self, function):
        """Run the tests in whose first line a function is the last that is named, and print what each gives."""
        for key, test in vars(self.tests).items():
            names = test.__doc__.partition(":")[0] if key.startswith("test_") else ""
            if function == names.split(", ")[-1] and not key.startswith("test_page"):
                wrong, (points,) = self.wrong(key, test), test.pytestmark[0].args
                print("FAIL 0" if wrong else f"pass {points}", f"/{points}  ", test.__doc__.split("\n")[0], sep="")
                if wrong:
                    print(f"\n{wrong}\n")

    def wrong(self, key, test):
        """What is wrong in a test; "" if nothing is."""
        given, raised = self.notes(key, test, SimpleNamespace(**self.defined))
        stored, answer = self.folder / "expected.json", self.folder / "answer.py"
        if answer.is_file():
            right, _ = self.notes(key, test, conftest.load(answer))
        else:
            right = json.loads(stored.read_text(encoding="utf-8"))["tests"][key]["notes"]
        told = [f"{hint}\n{off}" for (value, hint, tolerance), (wanted, *_) in zip(given, right)
                if (off := difference(value, wanted, tolerance))]
        return short(min(told or [raised], key=len))

    def notes(self, key, test, module):
        """What a test notes of a module, and what then was raised."""
        noted, node = [], SimpleNamespace(name=key, config=SimpleNamespace(getoption=lambda option: key_of(0)))
        try:
            test(sub=module, rng=conftest.draws(node), same=conftest.Same(lambda *note: noted.append(note)))
        except Exception as error:
            return noted, f"{type(error).__name__}: {error}"
        return noted, ""

    def hand_in(self, path):
        """Write what the cells define as one file."""
        cells = [cell for cell in self.defined["In"] if not re.search(r"^(check|hand_in)\b", cell, re.MULTILINE)]
        Path(path).write_text("\n\n".join(cells) + "\n", encoding="utf-8")
        print(f"{path}: hand this in")


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(notebook(sys.argv[1], starter(folder_of(sys.argv[1]))), indent=1), "utf-8")
