"""Which Triton kernels of a file compile for a GPU, which need not be there: `python -m docs.course.compiles FILE`.

A process of its own, as Triton's interpreter and its compiler exclude each other. It reads {kernel: [types of the
arguments, values of the constants]} and writes {kernel: what the compiler says against it, or ""}, both as JSON. With
a third entry, the numbers that a program reads, it writes how many instructions each takes, too, as COUNTED.

The grader takes two steps, each with the limits of a submission. The first runs the file and writes its kernels in
Triton's first language (`--lower DIR`); the second, which runs nothing of the file, compiles them (`--judge DIR`).
"""
import ast
import contextlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from docs.course.confine import confine, environment, run, written

GPU = "cuda", 90, 32  # sm_90, threads of a warp
LONGEST = 120  # seconds of a step
# what a test notes that asks for it: this and the kernel's name, and maybe how many instructions are too many
ASKED, BELOW = "compiled for a GPU: ", ", a number's instructions below "
COUNTED = ", instructions a number"


def main():
    os.environ.pop("TRITON_INTERPRET", None)  # of the process that asks
    words, given = sys.argv[1:], json.load(sys.stdin)
    if "--judge" in words:
        confine(words[-1], seconds=LONGEST, starts=True)
        Path(words[-1], "judged").write_text(json.dumps(judged(*given)), encoding="utf-8")
    elif "--lower" in words:
        import torch  # noqa: F401  # before memory is limited: a GPU's build of it maps gigabytes
        confine(words[-1], [words[0], Path(__file__).parents[2]], LONGEST)  # a copy without answers
        Path(words[-1], "lowered").write_text(json.dumps(lowered(words[0], given)), encoding="utf-8")
    else:
        print("\n" + json.dumps(judged(lowered(words[0], given), given)))


def lowered(file, kernels):
    """{kernel: [what the compiler says against it, the kernel in Triton's first language]}."""
    import triton
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    triton.knobs.runtime.interpret = False  # whatever the file asks for
    spec = importlib.util.spec_from_file_location("submission", file)
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


def verdict(asked, verdicts):
    """What stands against a kernel that a test asks for; "" if nothing. asked: the note without ASKED."""
    name, _, most = asked.partition(BELOW)
    if verdicts[name] or not most:
        return verdicts[name]
    count = verdicts[name + COUNTED]
    return "" if count < float(most) else f"A number takes {count:.1f} instructions; it has to be less than {most}."


def told(error):
    words = " ".join([type(error).__name__, *str(error).splitlines()[-1:]])
    return f"It does not compile for a GPU (sm_90), though the interpreter may run it. {words}"


@cache
def errors_here(file, tests):
    """{kernel: what the compiler says against it, or ""}, of a file that one trusts. tests: the assignment's."""
    process = subprocess.run([sys.executable, "-m", "docs.course.compiles", file], capture_output=True, text=True,
                             input=json.dumps(kernels_in(tests)))
    if process.returncode:
        raise RuntimeError(f"Triton's compiler did not run: {process.stderr.strip().splitlines()[-1]}")
    return json.loads(process.stdout.splitlines()[-1])


# As the grader asks

def kernels_in(tests):
    """KERNELS of an assignment's tests; none of one without kernels."""
    for node in ast.parse(tests.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == "KERNELS":
            return ast.literal_eval(node.value)
    return {}


def errors(file, kernels, root, folder):
    """{kernel: what the compiler says against it, or ""}, of a file that runs in a confined process. root: a copy of
    the repository; folder: an empty one for both steps."""
    missing = dict.fromkeys(kernels, "the file ended the process, took too long, or filled its folder")
    try:
        found = step(file, "lower", kernels, root, folder)
        found = {name: [str(found[name][0]), str(found[name][1])] for name in kernels}
        return step(file, "judge", [found, kernels], root, folder)
    except (OSError, ValueError, TypeError, LookupError, RecursionError):  # of another form than `lowered` gives
        return missing


def step(file, name, given, root, folder):
    work = Path(folder, name)
    work.mkdir()
    run([sys.executable, "-m", "docs.course.compiles", file, f"--{name}", work], json.dumps(given), LONGEST, cwd=root,
        env={**environment(work), "PYTHONPATH": str(root)})
    return json.loads(written(work / {"lower": "lowered", "judge": "judged"}[name]))


if __name__ == "__main__":
    main()
