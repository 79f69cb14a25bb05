"""The tour as a notebook: docs/tour.ipynb, made from docs/tour.md.

    python docs/programs/notebook.py

Examples and commands become cells that run, and so does a file to be saved. What needs a debugger's prompt, or an
editor, stays text.
"""
import json
import re
from doctest import DocTestParser
from pathlib import Path

DOCS = Path(__file__).parents[1]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
FIRST = '''# The cells run in the repository's folder
import os
if not os.path.exists("eval_ppl.py"):
    os.chdir("..")
'''


def code_of(kind, block, before):
    """The cells that run in the place of a block; none where it stays text. before: the text above it."""
    lines = block.splitlines()
    if kind == "python" and ">>>" in block:
        cells = [""]  # a cell shows its last line's value, so each value that the page shows ends a cell
        for example in DocTestParser().get_examples(block):
            cells[-1] += example.source
            cells += [""] if example.want else []
        return [cell for cell in cells if cell]
    if saved := kind == "python" and re.findall(r"Save it as\s+`(\w+\.py)`", before):
        return [f"%%writefile {saved[-1]}\n{block}"]
    if kind == "console" and "(Pdb)" not in block:
        lines = [line[2:] for line in lines if line.startswith("$ ")]
    elif kind or not lines[0].startswith(("pip ", "python ", "pytest ")):
        return []
    return ["\n".join(f"%{line}" if line.startswith("pip ") else f"!{line}" for line in lines)]


def cells_of(page):
    """A page's text -> [(type of the cell, its text)]."""
    cells, text, end = [], "", 0
    for block in BLOCK.finditer(page):
        text += page[end:block.start()]
        end, found = block.end(), code_of(*block.groups(), text)
        if found:
            cells += [("markdown", text), *(("code", code) for code in found)]
            text = ""
        else:
            text += block[0]
    cells.append(("markdown", text + page[end:]))
    title, intro = cells[0][1].split("\n\n", 1)
    return [("markdown", title), ("code", FIRST), ("markdown", intro), *cells[1:]]


def notebook(cells):
    """A notebook's text. cells: [(type of the cell, its text)]."""
    cells = [{"cell_type": kind, "id": f"cell-{i}", "metadata": {}, "source": text.strip("\n").splitlines(True),
              **({"execution_count": None, "outputs": []} if kind == "code" else {})}
             for i, (kind, text) in enumerate(cells) if text.strip()]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    found = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    (DOCS / "tour.ipynb").write_text(notebook(cells_of((DOCS / "tour.md").read_text("utf-8"))), "utf-8")
