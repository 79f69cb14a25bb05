"""Write a repository to hand out: `python -m tinykv.course.handout DIR`.

It is a copy of what git tracks here, without the answers: where the project's own code is one, functions keep signature
and docstring, and raise NotImplementedError with the assignment's name. docs/course/ has no answer.py, and in its place
expected.json, the right values at seed 0. The project's tests, and the pages that explain the methods, are left out.
"""
import ast
import json
import re
import subprocess
import tempfile
from pathlib import Path

from tinykv import UserError
from tinykv.cli import Parser, one_line
from tinykv.course.grade import ROOT, folder_of, right_values

LEFT_OUT = ("tests/", "docs/")
KEPT = ("docs/course/", "docs/embedded_model.md", "docs/huggingface.md", "docs/real_models.md")
OF_INSTRUCTORS = ("answer.py", "answers.md", "authors.md")

ALL = None  # every function of a file but the constructors
ANSWERS = {  # by assignment, where the project's own code is the answer: {file: its functions}
    "affine": {"tinykv/codecs/affine.py": ALL,
               "tinykv/codecs/base.py": ("pack", "unpack")},
    "cache": {"tinykv/cache.py": ALL, "tinykv/methods/pfn.py": ALL},
    "kvsink": {"tinykv/methods/kvsink.py": ALL, "tinykv/outlier.py": ALL},
    "ott": {"tinykv/methods/kivi.py": ALL, "tinykv/methods/ott.py": ALL},
    "intactkv": {"tinykv/methods/intactkv.py": ALL, "train_intact.py": ALL},
    "skvq": {"tinykv/methods/skvq.py": ALL, "tinykv/codecs/clipped.py": ALL},
    "antkv": {"tinykv/methods/antkv.py": ALL, "tinykv/codecs/codebook.py": ALL, "tinykv/kmeans.py": ALL},
    "triton": {"kernels.py": ALL, "tinykv/triton_cache.py": ALL},
}
CORE = ("affine", "cache")  # on which everything else runs


def parser():
    p = Parser(prog="python -m tinykv.course.handout", description=__doc__.split("\n\n")[0])
    p.add_argument("folder", type=Path, metavar="DIR", help="a new folder, or an empty one")
    p.add_argument("--assignments", metavar="NAMES", default=",".join(name for name in ANSWERS if name not in CORE),
                   help="whose answers are taken out; without `affine` and `cache`, on which all else runs, unless you "
                        "name them")
    return p


def main():
    p = parser()
    args = p.parse_args()
    with one_line(p, "stopped; the folder is not whole"):
        names = args.assignments.split(",")
        for name in names:
            folder_of(name)
        if args.folder.exists() and (not args.folder.is_dir() or any(args.folder.iterdir())):
            raise UserError(f"{args.folder} is not empty; give a new folder")
        files = [file for file in tracked() if file.startswith(KEPT) or not file.startswith(LEFT_OUT)]
        write(args.folder, files, names)
        for name in ANSWERS:
            write_expected(args.folder, name)
        print(f"{args.folder}: a repository without the answers of {', '.join(names)}")


def tracked():
    """The files that git tracks."""
    result = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True)
    files = result.stdout.split("\0")[:-1]
    if result.returncode or not files:
        raise UserError(f"{ROOT} is no clone of a git repository; run this in one")
    return [file for file in files if (ROOT / file).is_file()]


def write(folder, files, names):
    """Copy files, without the answers of the assignments `names`."""
    answers = {file: (name, functions) for name in names for file, functions in ANSWERS[name].items()}
    for file in files:
        if Path(file).name in OF_INSTRUCTORS:
            continue
        content = (ROOT / file).read_bytes()
        if file in answers:
            content = blanked(content.decode(), *answers[file]).encode()
        elif file == "docs/course/README.md":
            content = content.partition(b"\n## For instructors")[0]
        elif file.endswith(".md"):
            content = without_dead_links(content.decode(), Path(file).parent, files).encode()
        target = folder / file
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        target.chmod((ROOT / file).stat().st_mode)


def blanked(source, name, functions):
    """Source with functions that only raise. functions: "f" and "Class.f"; ALL: every one but the constructors."""
    lines = source.splitlines(keepends=True)
    found = functions_of(ast.parse(source))
    for function, node in reversed(found.items()):  # from the end of the file on, so that line numbers stay right
        if function.endswith("__init__") or functions is not ALL and function not in functions:
            continue
        first = node.body[0]
        start = first.lineno - 1 if ast.get_docstring(node) is None else first.end_lineno
        lines[start:node.end_lineno] = [f'{" " * first.col_offset}raise NotImplementedError("{name}: {function}")\n']
    return "".join(lines)


def functions_of(tree, prefix=""):
    """{"f" or "Class.f": its node}, in the order of the file."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            found |= functions_of(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            found[prefix + node.name] = node
    return found


def without_dead_links(text, folder, files):
    """A page whose links to pages that are left out are plain words."""
    def link(match):
        target = (ROOT / folder / match[2].partition("#")[0]).resolve()
        lost = target.is_file() and target.relative_to(ROOT).as_posix() not in files
        return match[1] if lost else match[0]
    return re.sub(r"\[([^\]]*)\]\(([\w./-]+(?:#[^)]*)?)\)", link, text)


def write_expected(folder, name):
    """The right values at seed 0, for a repository without answer.py."""
    with tempfile.TemporaryDirectory() as temporary:
        tests = right_values(name, 0, Path(temporary))
    target = folder / folder_of(name).relative_to(ROOT) / "expected.json"
    target.write_text(json.dumps({"seed": 0, "tests": tests}), encoding="utf-8")


if __name__ == "__main__":
    main()
