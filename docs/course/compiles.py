"""Which Triton kernels of a file compile for a GPU, which need not be there.

`errors` is asked for {kernel: [types of the arguments, values of the constants]}, and gives {kernel: what the compiler
says against it, or ""}. With a third entry, the numbers that a program reads, it gives how many instructions each
takes, too, as COUNTED.

It takes two steps, each a process of its own, as Triton's interpreter and its compiler exclude each other, and with the
limits of a submission. `lower` runs the file, and writes its kernels in Triton's first language; `judge`, which runs
nothing of the file, compiles them.
"""
import ast
import contextlib
import importlib.util
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from docs.course.confine import confine, run, written

GPU = "cuda", 90, 32  # sm_90, threads of a warp
LONGEST = 120  # seconds of a step
# what a test notes that asks for it: this and the kernel's name, and maybe how many instructions are too many
ASKED, BELOW = "compiled for a GPU: ", ", a number's instructions below "
COUNTED = ", instructions a number"
# of a file, which a kernel may read: numbers, and what is computed of them, of others' names and of `math`
CONSTANT = r"(?:tl\.constexpr|math\.(?>\w+)|\b(?>[A-Z]\w*)|(?>\d[\d.e]*)|[ +*/()-])+"


def main():
    step, folder, *file = sys.argv[1:]
    given = json.load(sys.stdin)
    if step == "lower":
        import torch  # noqa: F401  # before memory is limited: a GPU's build of it maps gigabytes
        confine(folder, [*file, Path(__file__).parents[2]], LONGEST)  # a copy without answers
        made = lowered(folder, *file, given)
    else:
        confine(folder, seconds=LONGEST, starts=True)
        made = judged(*given)
    Path(folder, "made").write_text(json.dumps(made), encoding="utf-8")


def definitions(source):
    """Imports, functions and constants of a file, without all that could tell the compiler from the interpreter."""
    def is_definition(node):
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            return node.value is not None and re.fullmatch(CONSTANT, ast.unparse(node.value))
        return isinstance(node, (ast.Import, ast.ImportFrom, ast.FunctionDef))
    tree, body = ast.parse(source), []
    for node in tree.body:
        body += node.body if isinstance(node, ast.Try) else [node]  # an import that may fail is one as well
    tree.body = [*filter(is_definition, body)]
    return ast.unparse(tree)


def lowered(folder, file, kernels):
    """{kernel: [what the compiler says against it, the kernel in Triton's first language]}."""
    import triton
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    triton.knobs.runtime.interpret = False  # whatever the file asks for
    reduced = Path(folder, "submission.py")  # Triton reads a kernel's lines from its file
    reduced.write_text(definitions(Path(file).read_text(encoding="utf-8")), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("submission", reduced)
    module, found = importlib.util.module_from_spec(spec), {}
    with contextlib.suppress(Exception, SystemExit):  # lines at its end may run a kernel, for which there is no GPU
        spec.loader.exec_module(module)
    target = GPUTarget(*GPU)
    backend = make_backend(target)
    for name, (types, constants, *_) in kernels.items():
        try:
            kernel = getattr(module, name)
            signature = {argument: types.get(argument, "constexpr") for argument in kernel.arg_names}
            pointers = [i for i, name in enumerate(kernel.arg_names) if signature[name].startswith("*")]
            aligned = {(i,): [["tt.divisibility", 16]] for i in pointers}  # as torch's tensors are
            source = ASTSource(kernel, signature, constants, aligned)
            context = ir.context()
            ir.load_dialects(context)
            backend.load_dialects(context)
            options = backend.parse_options({})
            functions, modules = backend.get_codegen_implementation(options), backend.get_module_map()
            stages, first = {}, source.make_ir(target, options, functions, modules, context)
            backend.add_stages(stages, options, source.language)
            found[name] = ["", str(stages["ttir"](first, {}))]
        except Exception as error:
            found[name] = [told(error), ""]
    return found


def judged(found, kernels):
    """{kernel: what the compiler says against it, or ""}. found: what `lowered` has made of a file."""
    import triton
    from triton.backends.compiler import GPUTarget
    verdicts = {}
    with TemporaryDirectory() as folder:
        triton.knobs.cache.dir = folder
        for name, (_, _, *numbers) in kernels.items():
            verdicts[name], text = found[name]
            path = Path(folder, f"{len(verdicts)}.ttir")
            path.write_text(text, encoding="utf-8")
            try:
                if not verdicts[name]:
                    compiled = triton.compile(str(path), target=GPUTarget(*GPU))
                    for count in numbers:
                        threads = GPU[2] * compiled.metadata.num_warps
                        verdicts[name + COUNTED] = instructions(compiled.asm["cubin"], folder) * threads / count
            except Exception as failure:
                verdicts[name] = told(failure)
    return verdicts


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
    for node in ast.parse(tests.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "KERNELS":
            return ast.literal_eval(node.value)
    return {}


@cache
def errors_here(file, tests):
    """The `errors` of a file's kernels, as an assignment's tests have them, in this repository."""
    with TemporaryDirectory() as folder:
        return errors(file, kernels_in(tests), Path(__file__).parents[2], folder)


def errors(file, kernels, root, folder):
    """{kernel: what the compiler says against it, or ""}. root: a copy of the repository; folder: an empty one for both
    steps."""
    if not kernels:
        return {}

    def made(step, given, *file):
        work = Path(folder, step)
        work.mkdir()
        run(["docs.course.compiles", step, work, *file], json.dumps(given), LONGEST, root, work)
        return json.loads(written(work / "made"))
    try:
        found = made("lower", kernels, file)
        found = {name: [str(found[name][0]), str(found[name][1])] for name in kernels}
        return made("judge", [found, kernels])
    except (OSError, ValueError, TypeError, LookupError, RecursionError):  # of another form than `lowered` gives
        return dict.fromkeys(kernels, "the file ended the process, took too long, or filled its folder")


if __name__ == "__main__":
    main()
