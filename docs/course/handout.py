"""Write a repository to hand out: `python -m docs.course.handout DIR`.

It is a copy of what git tracks here, without the answers: where the project's own code is one, functions keep signature
and docstring, and raise NotImplementedError with the assignment's name. docs/course/ has no answer.py, and in its place
expected.json, the right values at seed 0. The project's tests, and the pages that explain the methods, are left out;
`pytest` runs the assignments' tests there, and so does a workflow on GitHub.
"""
import json
import os
import re
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

from docs.course.assignments import ANSWERS, CORE, MADE, ROOT, folder_of, folders, parts_of, write
from docs.course.grade import right_values
from docs.course.notebook import cells_of
from docs.programs.notebook import notebook
from tinykv import UserError
from tinykv.lab.cli import Parser, one_line

LEFT_OUT = ("tests/", "docs/", ".ci/", ".github/", ".pytest.ini")
KEPT = ("docs/course/", "docs/embedded_model.md", "docs/huggingface.md", "docs/real_models.md", "docs/words.md")
README = """# tinykv: the course

Quantization of an LLM's KV cache, in code small enough to read. Begin with [the course](docs/course/README.md).

In a virtual environment (`python -m venv .venv && . .venv/bin/activate`), with Python 3.11 or newer:

    pip install torch --index-url https://download.pytorch.org/whl/cpu  # only on Linux without a GPU: saves gigabytes
    pip install -r requirements.txt && pytest docs/course/1-affine
"""
NOTEBOOKS = "affine", "kvsink"  # whose tasks are also handed out as cells of a notebook
PYTEST = "[pytest]\ntestpaths = docs/course\npythonpath = .\n"
# for editors that open a repository in a container
CONTAINER = '{"image": "python:3.12", "postCreateCommand": "pip install -r requirements.txt"}\n'


def main():
    p = Parser(prog="python -m docs.course.handout", description=__doc__.split("\n\n")[0])
    p.add_argument("folder", type=Path, metavar="DIR", help="a new folder, or an empty one")
    p.add_argument("--pages", metavar="NAMES", default="affine",
                   help="whose page.py is handed out; a later page shows what earlier ones ask for")
    p.add_argument("--assignments", metavar="NAMES", default=",".join(name for name in ANSWERS if name not in CORE),
                   help="whose answers are taken out; those of `affine` and `cache` only if you name them")
    with one_line(p, "stopped; the folder is not whole"):
        args = p.parse_args()
        names, pages = args.assignments.split(","), args.pages.split(",")
        for name in names + pages:
            folder_of(name)
        if args.folder.exists() and (not args.folder.is_dir() or any(args.folder.iterdir())):
            raise UserError(f"{args.folder} is not empty; give a new folder")
        files = [file for file in tracked() if file.startswith(KEPT) or not file.startswith(LEFT_OUT)]
        here = {name: folder.relative_to(ROOT) for name, folder in folders().items()}
        for folder in here.values():
            if f"{folder.as_posix()}/handout.md" not in files:
                raise UserError(f"{folder}/handout.md is handed out, but git has it not; `git add {folder}` first")
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # before a file is written, as an answer may be wrong
            right = [*tqdm(pool.map(expected, here), "right values", len(here), False, unit="assignment", disable=None)]
        write(args.folder, files, names)
        around = {}  # {file: its text}
        for (name, folder), tests in zip(here.items(), right):
            texts = {file: made(ROOT / folder) for file, made in MADE.items() if file == "starter.py" or name in pages}
            texts["expected.json"] = json.dumps({"seed": 0, "tests": tests})
            if name in NOTEBOOKS:
                texts["notebook.ipynb"] = notebook(cells_of(name, texts["starter.py"]))
            around |= {folder / file: text for file, text in texts.items()}
        workflow = (ROOT / "docs" / "course" / "workflow.yml").read_text(encoding="utf-8")
        numbered = ", ".join(folder.name for folder in here.values())
        ignored = (ROOT / ".gitignore").read_text(encoding="utf-8")
        around |= {
            "README.md": README, ".pytest.ini": PYTEST, ".devcontainer/devcontainer.json": CONTAINER,
            ".gitignore": re.sub("docs/course/.*\n", "", ignored),  # there, git carries starters and answers
            ".github/workflows/assignments.yml": re.sub(r"assignment: \[.*\]", f"assignment: [{numbered}]", workflow),
            "AGENTS.md": (ROOT / "docs" / "course" / "AGENTS.md").read_text(encoding="utf-8")}
        for file, text in around.items():
            (args.folder / file).parent.mkdir(parents=True, exist_ok=True)
            (args.folder / file).write_text(text, encoding="utf-8")
        print(f"{args.folder}: a repository without the answers of {', '.join(names)}")


def tracked():
    """The files that git tracks."""
    result = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True)
    files = result.stdout.split("\0")[:-1]
    if result.returncode or not files:
        raise UserError(f"{ROOT} is no clone of a git repository; run this in one")
    return [file for file in files if (ROOT / file).is_file()]


def expected(name):
    """The right values of an assignment, and of its page, at seed 0."""
    with tempfile.TemporaryDirectory() as temporary:
        right = [right_values(part, 0, Path(temporary)) for part in parts_of(name)]
    return {test: given for tests in right for test, given in tests.items()}


if __name__ == "__main__":
    main()
