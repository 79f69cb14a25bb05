"""Assignments: their folders, the functions that are their answers, their starters, and a copy of the repository
without answers. `python -m docs.course.assignments` writes the starters."""
import ast
import codecs
import hashlib
import re
import threading
from contextlib import suppress
from pathlib import Path

from tinykv import UserError
from tinykv.lab.cli import Parser, one_line
from tinykv.lab.files import check_regular

ROOT = Path(__file__).parents[2]
LARGEST = 2 ** 20  # bytes of a submission
PARSES = threading.Lock()  # Python 3.11 makes one tree at a time

OF_INSTRUCTORS = ("answer.py", "answers.md", "authors.md", "instructors.md", "workflow.yml", "hunt.py", "gradescope.py",
                  "similar.py", "notebook.py", "handout.py", "AGENTS.md")
ALL = None  # every function of a file but the constructors
ANSWERS = {  # by assignment, where the project's own code is the answer: {file: its functions}
    "affine": {"tinykv/codecs/affine.py": ALL,
               "tinykv/codecs/base.py": ("pack", "unpack")},
    "cache": {"tinykv/cache.py": ALL, "tinykv/methods/pfn.py": ALL},
    "kvsink": {"tinykv/methods/kvsink.py": ALL},
    "ott": {"tinykv/methods/ott.py": ALL},
    "intactkv": {"tinykv/methods/intactkv.py": ALL, "train_intact.py": ALL},
    "skvq": {"tinykv/methods/skvq.py": ALL, "tinykv/codecs/clipped.py": ALL},
    "antkv": {"tinykv/methods/antkv.py": ALL, "tinykv/codecs/codebook.py": ALL,
              "tinykv/kmeans.py": ("kmeans", "plus_plus", "nearest", "distance", "lloyd")},
    "triton": {"kernels.py": ALL, "tinykv/lab/triton_cache.py": ALL},
}
# what other assignments run, and would be part of an answer to this one: its grader's copy is without it
REFUSED = {"ott": ("tinykv/methods/kivi.py",)}
CORE = ("affine", "cache")  # on which everything else runs
PAGE = "_page"  # how the name of an assignment's first part ends
PAGES = {  # by assignment, the page of docs/ladder that is its first part, and the functions that are written there
    "affine": ("1_sinks.py", ("grid", "decode")),
    "cache": ("2_window.py", ("Cache.update", "Cache.write", "Cache.read")),
    "kvsink": ("1_sinks.py", ("pfn", "kvsink")),
    "ott": ("3_pool.py", ("grid_of", "ott")),
    "intactkv": ("9_prefix.py", ("rounded", "Cache.update", "prefix_of", "loss_of")),
    "skvq": ("4_groups.py", ("grid", "Cache.write")),
    "antkv": ("6_codebooks.py", ("vectors", "decode", "antkv")),
    "triton": ("8_kernel.py", ("decode", "attend_kernel")),
}


def folders():
    """{name: its folder} of all assignments, an instructor's own among them."""
    return {path.name.split("-")[1]: path for path in sorted((ROOT / "docs" / "course").glob("*-*"))}


def folder_of(name):
    """An assignment's folder. UserError if there is none of this name."""
    found = folders()
    if name.removesuffix(PAGE) not in found:
        raise UserError(f"there is no assignment {name!r}; there are {', '.join(found)}")
    return found[name.removesuffix(PAGE)]


def parts_of(name):
    """An assignment's page, if it has one, and the assignment."""
    return (name + PAGE, name) if name in PAGES else (name,)


def answer_of(name):
    """The file that is right, of an assignment or of its first part."""
    if name.endswith(PAGE):
        if name.removesuffix(PAGE) not in PAGES:
            raise UserError(f"there is no assignment {name!r}, as {name.removesuffix(PAGE)} has no page")
        return ROOT / "docs" / "ladder" / PAGES[name.removesuffix(PAGE)][0]
    return folder_of(name) / "answer.py"


def assignment_of(path):
    """The assignment that a file names. UserError if it names none."""
    if path.suffix != ".py":
        there = ", ".join(sorted(file.name for file in path.rglob("*")))
        raise UserError(f"{path.name}: no Python file was handed in" + (there and f", but {there}"))
    name = named(path, "ASSIGNMENT")
    if name is None:
        raise UserError(f"{path.name} names no assignment; it needs a line such as ASSIGNMENT = \"kvsink\"")
    return name


def named(path, word):
    """The name in a file's line such as ASSIGNMENT = "kvsink"; None if there is no line with this word."""
    if path.is_symlink():
        raise UserError(f"{path.name} is a link; hand in the file itself")
    check_regular(path, LARGEST)
    data = path.read_bytes()
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise UserError(f"{path.name} is UTF-16, which Python does not read; save it as UTF-8")
    text = data.decode("utf-8-sig", errors="replace")
    line = re.search(rf"^{word}\s*(?::.*)?=\s*[\"'](\w+)[\"']", text, re.MULTILINE)
    return line and line[1]


def key_of(seed):
    """What a seed is in the process of a submission, which does not tell it."""
    return hashlib.sha256(str(seed).encode()).hexdigest()


# A starter: an answer without its lines

def starter(folder):
    """An assignment's answer.py, in which the lines under each `# answer` are still to be written."""
    number, name = folder.name.split("-")
    lines = (folder / "answer.py").read_text(encoding="utf-8").partition("\n\n\n# answer: helpers\n")[0].splitlines()
    functions = functions_of(ast.parse("\n".join(lines)))
    for function, node in reversed(functions.items()):
        marks = [i for i in range(node.lineno, node.end_lineno) if lines[i].strip() == "# answer"]
        if marks:
            what = f'raise NotImplementedError("assignment {number}, {name}: {function}")'
            lines[marks[0]:node.end_lineno] = [lines[marks[0]].replace("# answer", what)]
    return "\n".join(lines) + "\n"


def page(folder):
    """The page of docs/ladder that is an assignment's first part. Of the functions that are written in it, and in later
    assignments, the comments are left."""
    name = folder.name.split("-")[1]
    file, functions = PAGES[name]
    answer, target = answer_of(name + PAGE), f"docs/course/{folder.name}/page.py"
    lines = answer.read_text(encoding="utf-8").splitlines()
    later = [*PAGES][[*PAGES].index(name):]
    holes = {function: other for other in reversed(later) if PAGES[other][0] == file for function in PAGES[other][1]}
    for function, node in reversed(functions_of(ast.parse("\n".join(lines))).items()):
        if function in holes:
            indent, body = " " * node.body[0].col_offset, lines[node.body[0].lineno - 1:node.end_lineno]
            above = lines[node.lineno:node.body[0].lineno - 1]  # what stands between `def` and the first step
            told = above + [indent + comment for comment in map(comment_of, body) if comment]
            told.append(f'{indent}raise NotImplementedError("{holes[function]}: {function}")')
            lines[node.lineno:node.end_lineno] = told
    lines = [line for line in lines if not re.match("    (python -m pdb|diff) ", line)]
    for function in {*holes}.difference(functions):  # the page runs when it is right: its table does without later ones
        lines = [re.sub(f", {function}(?=[,)])", "", line) if line.startswith("for ") else line for line in lines]
    return naming(name + PAGE, "\n".join(lines + [""]).replace(f"python docs/ladder/{file}", f"python {target}"))


def naming(name, text):
    """A text, in which a line below its docstring says for which assignment it is."""
    return text.replace('"""\n', f'"""\nASSIGNMENT = "{name}"\n', 1)


def comment_of(line):
    """A line's comment; "" if it has none, or says no more than a shape."""
    found = re.search(r"(?:^|  ) *(# .*)$", line)
    return "" if found is None or re.fullmatch(r"# \(.*\)(?: both)?", found[1]) else found[1]


def definitions_in(cells):
    """What a notebook's cells import, define and assign, as one file: of each name what was run last. A cell that
    Python cannot read has been mended and run again; the first one has no part of the answer."""
    found = {}
    for cell in cells:
        nodes, lines, first = [], cell.splitlines(), 0
        with suppress(SyntaxError):
            nodes = ast.parse(cell).body if "def hand_in(" not in cell else []
        for node in nodes:
            text = "\n".join(lines[first:node.end_lineno]).strip("\n")  # with the comments above it
            kinds = ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.FunctionDef, ast.ClassDef
            if isinstance(node, kinds) and "get_ipython(" not in text:  # what `!ls` and `%time` become
                found[getattr(node, "name", ast.unparse(node).partition(" = ")[0])] = text
            first = node.end_lineno
    return "\n\n\n".join(found.values()) + "\n"


MADE = {"starter.py": starter, "page.py": page}


def write_missing(path):
    """Write the starter, or the page, that a path names, if it is not there. -> a line that says so, or None."""
    folder = path.absolute().parent
    made = MADE if folder.name.split("-")[-1] in PAGES else ["starter.py"]  # an instructor's own assignment has no page
    if path.name not in made or path.exists() or not (folder / "answer.py").is_file():
        return None
    path.write_text(MADE[path.name](folder), encoding="utf-8")
    return f"new: {path}; write your answer there"


# A copy without the answers

def write(folder, files, names):
    """Copy files, without the answers of the assignments `names`."""
    answers = {file: (name, functions) for name in names for file, functions in ANSWERS.get(name, {}).items()}
    for file in files:
        if Path(file).name in OF_INSTRUCTORS:
            continue
        content = (ROOT / file).read_bytes()
        if file in answers:
            content = blanked(content.decode(), *answers[file]).encode()
        elif file == "docs/course/README.md":
            content = content.partition(b"\n## On your own")[0]
        elif file.endswith(".md"):
            content = without_dead_links(content.decode(), Path(file).parent, files).encode()
        target = folder / file
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        target.chmod((ROOT / file).stat().st_mode)


def tree_of(source):
    """What a source says, in threads, too."""
    with PARSES:
        return ast.parse(source)


def blanked(source, name, functions):
    """Source with functions that only raise. functions: "f" and "Class.f"; ALL: every one but the constructors."""
    lines = source.splitlines(keepends=True)
    found = functions_of(tree_of(source))
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


def main():
    p = Parser(prog="python -m docs.course.assignments", description="Write all starters and pages that are missing.")
    with one_line(p):
        p.parse_args()
        written = [write_missing(folder / name) for folder in folders().values() for name in MADE]
        print("\n".join(filter(None, written)) or "none is missing; delete a file to have it anew")


if __name__ == "__main__":
    main()
