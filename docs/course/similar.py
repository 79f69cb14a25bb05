"""How alike are answers? `python -m docs.course.similar FOLDER`.

For each pair of files, and each file with the project's answer, which is public: the share of the smaller one's code
that the other has, whatever its names, without the lines that are given. It says with whom to have a conversation.
Of 33 answers written apart, no two came above 38%; pairs that share less than half are left out.
"""
import ast
import sys
from itertools import combinations
from pathlib import Path

from docs.course.assignments import MADE, PAGE, answer_of, assignment_of, folder_of
from tinykv import UserError
from tinykv.lab.cli import Parser, one_line, printable

LEAST = 0.5  # of the smaller file's code
K = 12  # neighbouring nodes of a function's tree


def shingles(text):
    """K neighbouring nodes at a time of what a file's functions compute: kinds, attributes and constants, no names."""
    found = set()
    for node in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)):
        parts = [part for step in node.body[ast.get_docstring(node) is not None:] for part in ast.walk(step)]
        kinds = [(type(part).__name__, getattr(part, "attr", repr(getattr(part, "value", None)) if isinstance(
            part, ast.Constant) else "")) for part in parts]
        found |= {tuple(kinds[i:i + K]) for i in range(max(1, len(kinds) - K + 1))}
    return found


def alike(folder):
    """[share, assignment, file, file], the most alike first, of all files that name an assignment, and can be read."""
    answers, found = {}, []
    for file in sorted(Path(folder).rglob("*.py")):
        try:
            name, parts = assignment_of(file), shingles(file.read_bytes())
            folder_of(name)
            answers.setdefault(name, {})[str(file.relative_to(folder))] = parts
        except (UserError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
            print(printable(f"left out: {file}: {error}"), file=sys.stderr)
    for name, parts in answers.items():
        given = shingles(MADE["page.py" if name.endswith(PAGE) else "starter.py"](folder_of(name)))
        right = answer_of(name).read_text(encoding="utf-8").partition("\n\n\n# answer: helpers\n")[0]
        own = {file: part - given for file, part in (parts | {"the project's": shingles(right)}).items()}
        for a, b in combinations(own, 2):
            found.append((len(own[a] & own[b]) / max(1, min(len(own[a]), len(own[b]))), name, a, b))
    return sorted(found, reverse=True)


if __name__ == "__main__":
    p = Parser(prog="python -m docs.course.similar", description=__doc__.split("\n\n")[1])
    p.add_argument("folder", type=Path, metavar="FOLDER", help="what was handed in")
    with one_line(p):
        args = p.parse_args()
        found = alike(args.folder)
        if not found:
            raise UserError(f"{args.folder} has no Python file that names an assignment")
        shown = [f"{share:4.0%}  " + "  ".join(map(printable, names)) for share, *names in found if share >= LEAST]
        print("\n".join(shown) or f"no two files are alike by {LEAST:.0%}")
