"""Which Triton kernels of a file compile for a GPU, which need not be there.

`errors` is asked for {kernel: [types of the arguments, values of the constants]}, and gives {kernel: what the compiler
says against it, or ""}. With a third entry, the numbers that a program reads, it gives how many instructions each
takes, too, as COUNTED. A test runs what is compiled: both begin with `definitions`.

It is a process of its own, as Triton's interpreter and its compiler exclude each other, with the limits of a
submission. The file's functions do not run in it.
"""
import ast
import builtins
import importlib.util
import json
import re
import subprocess
import sys
from contextlib import suppress
from functools import cache, reduce
from pathlib import Path
from tempfile import TemporaryDirectory

from docs.course import restrict
from docs.course.assignments import tree_of
from docs.course.confine import confine, run, written

GPU = "cuda", 90, 32  # sm_90, threads of a warp
LONGEST = 120  # seconds of all kernels of a file
# what a test notes that asks for it: this and the kernel's name, and maybe how many instructions are too many
ASKED, BELOW = "compiled for a GPU: ", ", a number's instructions below "
COUNTED = ", instructions a number"
# of a file, which a kernel may read: numbers, and what is computed of them, of others' names and of `math`
CONSTANT = r"(?:tl\.constexpr|math\.(?>\w+)|\b(?>[A-Z]\w*)(?!\()|(?>\d[\d.e]*)|\)(?!\()|[ +*/(-])+"


def main():
    import torch  # noqa: F401  # before memory is limited: a GPU's build of it maps gigabytes
    folder, file = sys.argv[1:]
    confine([file, Path(__file__).parents[2]], LONGEST, folder, starts=True)  # a copy without answers
    found = compiled(folder, file, json.load(sys.stdin))
    Path(folder, "made").write_text(json.dumps(found), encoding="utf-8")


def source_of(file):
    """What counts of a file: of a page, what stands above its table."""
    return above_table(importlib.util.decode_source(file.read_bytes()))


def above_table(text):
    return text.rpartition("\n# The table")[0] or text


def definitions(file):
    """The tree of a file's imports, functions and constants. None of its own code runs before a function is called."""
    def is_definition(node):
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            plain = all(isinstance(part, ast.Name) for part in [*targets, getattr(node, "annotation", targets[0])])
            return plain and node.value is not None and re.fullmatch(CONSTANT, ast.unparse(node.value))
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = [part for part in node.decorator_list if ast.unparse(part) == "triton.jit"]
            head = [part for part in (node.args, node.returns) if part for part in ast.walk(part)]
            return not any(isinstance(part, (ast.Call, ast.comprehension)) for part in head)
        names = [part.asname or part.name for part in getattr(node, "names", ())]
        return isinstance(node, (ast.Import, ast.ImportFrom)) and (
            "math" not in names or ast.unparse(node) == "import math")
    tree, body = ast.parse(source_of(file)), []
    for node in tree.body:
        body += node.body if isinstance(node, ast.Try) else [node]  # an import that may fail is one as well
    tree.body = [*filter(is_definition, body)]
    return tree


def told_apart(kernel):
    """What a kernel reads that could tell the compiler from the interpreter; "" if nothing."""
    tree, scope, inside = ast.parse(kernel.src), {**vars(builtins), **kernel.fn.__globals__}, set()
    nodes = [node for part in (tree.body[0].args, *tree.body[0].body) for node in ast.walk(part)]
    own = {getattr(node, "arg", None) or node.id for node in nodes
           if isinstance(node, ast.arg) or isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for node in nodes:  # in a.b.c, the whole of it comes first
        if isinstance(node, ast.Attribute):
            inside.add(node.value)
            if re.match("_|handle$|assume|inline|max_con|multiple_of", node.attr):  # or what a compiler only believes
                return ast.unparse(node)
        if re.match("bf16|fp8", str(getattr(node, "value", ""))):  # a type's name
            return ast.unparse(node)
        if isinstance(node, (ast.comprehension, ast.Lambda, ast.FunctionDef, ast.Global)):  # names of another scope
            return ast.unparse(node)
        if isinstance(node, (ast.Attribute, ast.Name)) and node not in inside:
            first, *rest = ast.unparse(node).split(".")
            of_file = re.fullmatch(r"[\w.]+", ast.unparse(node)) and first not in own
            if of_file and not may_read(reduce(getattr, rest, scope[first]), rest):
                return ast.unparse(node)
    return ""


def may_read(value, rest):
    """Whether a kernel may read what a name, and others behind it, stand for: numbers, kernels, and the language."""
    import triton
    value = value.value if isinstance(value, triton.language.constexpr) else value
    others = range, min, max, float, int, triton.cdiv, triton.next_power_of_2
    if re.match("bf16|fp8", str(value)):  # types to which the interpreter rounds otherwise
        return False
    return type(value) in (int, float)[len(rest):] or value in others or getattr(value, "__module__", "").startswith(
        ("triton.language", "math")) or isinstance(value, triton.JITFunction) and not told_apart(value)


def compiled(folder, file, kernels):
    """{kernel: what the compiler says against it, or ""}."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    triton.knobs.runtime.interpret = False  # whatever the file asks for
    triton.knobs.cache.dir = folder
    reduced, found = Path(folder, "reduced.py"), {}  # Triton reads a kernel's lines from its file
    reduced.write_text(ast.unparse(definitions(Path(file))), encoding="utf-8")
    module = restrict.run(reduced, ast.parse(reduced.read_text(encoding="utf-8")))  # as a test runs it
    for name, (types, constants, *numbers) in kernels.items():
        try:
            kernel = getattr(module, name)
            if seen := told_apart(kernel):
                raise ValueError(f"it reads {seen}, and may read arguments, numbers, other kernels, tl and math")
            if {*kernel.arg_names} != {*types, *constants}:
                raise ValueError("its arguments are other ones than the starter's")
            signature = {argument: types.get(argument, "constexpr") for argument in kernel.arg_names}
            pointers = [i for i, name in enumerate(kernel.arg_names) if signature[name].startswith("*")]
            aligned = {(i,): [["tt.divisibility", 16]] for i in pointers}  # as torch's tensors are
            made = triton.compile(ASTSource(kernel, signature, constants, aligned), target=GPUTarget(*GPU))
            found[name] = ""
            for count in numbers:
                if has_loop(kernel):
                    raise ValueError("its instructions cannot be counted, as it has a loop; tl.static_range is none")
                threads = GPU[2] * made.metadata.num_warps
                found[name + COUNTED] = instructions(made.asm["cubin"], folder) * threads / count
        except Exception as error:
            found[name] = told(error)
    return found


def has_loop(kernel):
    """Whether a loop stays one in a kernel, or in one that it calls."""
    nodes = [*ast.walk(ast.parse(kernel.src))]
    loops = [ast.unparse(node) for node in nodes if isinstance(node, (ast.For, ast.While))]
    called = [kernel.fn.__globals__.get(node.id) for node in nodes if isinstance(node, ast.Name)]
    return not all(re.match(r"for \w+ in tl\.static_range\(", loop) for loop in loops) or any(
        has_loop(part) for part in called if hasattr(part, "src"))


def instructions(cubin, folder):
    """Of a thread, in a kernel without a loop: all lines of its machine code."""
    import triton
    path = Path(folder, "kernel.cubin")
    path.write_bytes(cubin)
    code = subprocess.run([triton.knobs.nvidia.nvdisasm.path, "-c", path], capture_output=True, text=True, check=True)
    return len(re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+\S", code.stdout, re.MULTILINE))


def verdict(note, errors):
    """What stands against the kernel that a note asks for; "" if nothing, or if it asks for none."""
    if not str(note).startswith(ASKED):
        return ""
    name, _, most = note.removeprefix(ASKED).partition(BELOW)
    if errors[name] or not most:
        return errors[name]
    count = errors[name + COUNTED]
    return "" if count < float(most) else f"A number takes {count:.1f} instructions; it has to be less than {most}."


def told(error):
    words = " ".join([type(error).__name__, *str(error).splitlines()[-1:]])
    return f"It does not compile for a GPU (sm_90), though the interpreter may run it. {words}"


# For who asks

def kernels_in(tests):
    """KERNELS of an assignment's tests; none of one without kernels."""
    for node in tree_of(tests.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "KERNELS":
            return ast.literal_eval(node.value)
    return {}


@cache
def errors_here(file, tests):
    """The `errors` of a file's kernels, as an assignment's tests have them, in this repository."""
    with TemporaryDirectory() as folder:
        return errors(file, kernels_in(tests), Path(__file__).parents[2], folder)


def errors(file, kernels, root, folder):
    """{kernel: what the compiler says against it, or ""}. root: a copy of the repository; folder: an empty one."""
    if not kernels:
        return {}
    run(["docs.course.compiles", folder, file], json.dumps(kernels), LONGEST, root, folder)
    with suppress(OSError, ValueError, RecursionError):
        return json.loads(written(Path(folder, "made")))
    return dict.fromkeys(kernels, "its imports fail here, or the compiler took too long")


if __name__ == "__main__":
    main()
