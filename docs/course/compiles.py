"""Which Triton kernels of a file compile for a GPU, which need not be there: `python -m docs.course.compiles FILE`.

A process of its own, as Triton's interpreter and its compiler exclude each other. It reads {kernel: [types of the
arguments, values of the constants]} and writes {kernel: what the compiler says against it, or ""}, both as JSON.
"""
import importlib.util
import json
import os
import sys
from contextlib import suppress

GPU = "cuda", 80, 32  # sm_80, threads of a warp


def main():
    os.environ.pop("TRITON_INTERPRET", None)  # of the process that asks
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    triton.knobs.runtime.interpret = False  # whatever the file asks for
    spec = importlib.util.spec_from_file_location("submission", sys.argv[1])
    module, told = importlib.util.module_from_spec(spec), {}
    with suppress(Exception):  # lines at its end may run a kernel, for which there is no GPU
        spec.loader.exec_module(module)
    for name, (types, constants) in json.load(sys.stdin).items():
        try:
            kernel = getattr(module, name)
            signature = {argument: types.get(argument, "constexpr") for argument in kernel.arg_names}
            places = {(kernel.arg_names.index(key),): value for key, value in constants.items()}
            triton.compile(ASTSource(kernel, signature, places), target=GPUTarget(*GPU))
            told[name] = ""
        except Exception as error:
            told[name] = " ".join([type(error).__name__, *str(error).splitlines()[-1:]])
    print("\n" + json.dumps(told))


if __name__ == "__main__":
    main()
