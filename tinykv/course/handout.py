"""Write a repository to hand out: `python -m tinykv.course.handout DIR`.

It is a copy of what git tracks here, without the answers of the assignments: where the project's own
code is an answer, a function keeps its signature and its docstring, and raises NotImplementedError
with the assignment's name. The worked examples of those methods, the tests of the answers and the
answers of tests/course/ are gone. A test that needs what is not written yet is skipped, with the
assignment's name, and runs as soon as it is there.
"""
import ast
import re
import subprocess
from pathlib import Path

from tinykv import UserError
from tinykv.course import check
from tinykv.run.cli import Parser, one_line

ROOT = Path(__file__).parents[2]
GONE = ("tests/course/", "tests/test_course.py", "docs/course/authors.md")
METHODS_PAGE, COURSE_PAGE, CONFTEST = "docs/methods.md", "docs/course/README.md", "tests/conftest.py"
HOOK = """

from tinykv.course.unwritten import (  # noqa: E402, F401
    pytest_runtest_makereport,
    pytest_sessionstart,
)
"""


def parser():
    p = Parser(prog="python -m tinykv.course.handout", description=__doc__.split("\n\n")[0])
    p.add_argument("folder", type=Path, metavar="DIR", help="a new folder, or an empty one")
    p.add_argument("--assignments", metavar="NAMES",
                   default=",".join(name for name in check.names() if check.load(name).number > 2),
                   help="whose answers are taken out; without `affine` and `cache`, on which all "
                        "else runs, unless you name them")
    return p


def main():
    p = parser()
    args = p.parse_args()
    with one_line(p, "stopped; the folder is not whole"):
        assignments = [check.load(name) for name in args.assignments.split(",")]
        n_blank = write_handout(args.folder, assignments)
        names = ", ".join(assignment.name for assignment in assignments)
        print(f"{args.folder}: {n_blank} functions of {names} are left to write")


def write_handout(folder, assignments):
    """Write the repository -> how many functions were taken out."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is not empty; give a new folder")
    blanks, removed = {}, set()  # {file: {function: what it raises}}, and files
    for assignment in assignments:
        label = f"assignment {assignment.number}, {assignment.name}"
        for file, functions in assignment.blanks.items():
            if functions is None:
                removed.add(file)
                continue
            raises = {function: f"{label}: {function}" for function in functions}
            blanks.setdefault(file, {}).update(raises)

    for file in tracked():
        if file in removed or file.startswith(GONE):
            continue
        content = (ROOT / file).read_bytes()
        if file in blanks:
            content = blanked(content.decode(), blanks[file], file).encode()
        elif file == METHODS_PAGE:
            content = without_examples(content.decode(), assignments).encode()
        elif file == COURSE_PAGE:
            content = content.partition(b"\n## For instructors")[0]
        elif file == CONFTEST:
            content += HOOK.encode()
        target = folder / file
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        target.chmod((ROOT / file).stat().st_mode)
    return sum(map(len, blanks.values()))


def tracked():
    """The files that git tracks."""
    result = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True)
    files = result.stdout.split("\0")[:-1]
    if result.returncode or not files:
        raise UserError(f"{ROOT} is no clone of a git repository; run this in one")
    return [file for file in files if (ROOT / file).is_file()]


def blanked(source, raises, file):
    """Source with functions that only raise. raises: {"Class.function": the message}."""
    lines = source.splitlines(keepends=True)
    nodes = functions_of(ast.parse(source))
    for name in sorted(raises, key=lambda name: -nodes[name].lineno if name in nodes else 0):
        if name not in nodes:
            raise UserError(f"{file} has no function {name}, which an assignment takes out of it")
        node = nodes[name]
        first = node.body[0]
        start = first.lineno - 1  # of the lines that go
        if ast.get_docstring(node) is not None:
            start = first.end_lineno
        indent = " " * first.col_offset
        lines[start:node.end_lineno] = [f'{indent}raise NotImplementedError("{raises[name]}")\n']
    return "".join(lines)


def functions_of(tree, prefix=""):
    """{"function" or "Class.function": its node}."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            found |= functions_of(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            found[prefix + node.name] = node
    return found


def without_examples(text, assignments):
    """docs/methods.md without the worked examples of the methods that are asked for."""
    for assignment in assignments:
        for file in assignment.blanks:
            name = Path(file).stem
            section = re.search(rf"^## {name}$.*?(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
            if file.startswith("tinykv/methods/") and section:
                page = f"course/{assignment.number}-{assignment.name}/handout.md"
                instead = f"**Eight numbers** to do by hand: [assignment {assignment.number}]({page}).\n\n"
                short = re.sub(r"^\*\*Eight numbers\*\*.*?(?=^\*\*In the code)", instead, section[0],
                               flags=re.MULTILINE | re.DOTALL)
                text = text.replace(section[0], short)
    return text


if __name__ == "__main__":
    main()
