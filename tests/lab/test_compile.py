"""The compile gate: every Triton kernel through the compiler for two GPUs, without one at hand."""
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
PROGRAMS = Path(__file__).parents[2] / "docs" / "programs"


def run(*words, **variables):
    """Python in a process of its own, as this one interprets."""
    env = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(PROGRAMS), **variables}
    return subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True)


@pytest.mark.whole  # the compiler takes seconds a kernel
def test_no_kernel_spills(tmp_path):
    """The table has each kernel on each GPU, with registers, shared memory and instructions that are numbers of a real
    kernel. Nothing is taken from an earlier run."""
    done = run(str(PROGRAMS / "bench_kernels.py"), "compile", "--quick", TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0 and done.stderr == "", done.stdout + done.stderr
    found = set()
    for line in done.stdout.splitlines()[3:]:
        kernel, *case, gpu, d, R, T, _, regs, spills, shared, each = line.split()
        found.add((kernel, gpu))
        assert 16 <= int(regs) <= 255 and spills == "0" and 0 <= float(shared) < 228
        assert 1 < float(each) < 200 if kernel == "attend" else each == "-"
        if "2-bit per token" in " ".join(case) and (gpu, R, T) == ("sm_90", "4", "1"):
            assert float(each) <= 2 or d == "80"  # as kernels.py says
    assert found == {(name, gpu) for name in ("attend", "merge", "anchor", "topk") for gpu in ("sm_80", "sm_90")}


GROWING = """
import torch, bench_kernels
from kernels import attend_kernel, merge_kernel
bench_kernels.taken_apart = lambda cubin: {"registers": 0, "spills": 0, "loop": 0}
bench_kernels.driver.set_active(bench_kernels.Pretend(90))
config = bench_kernels.config_of("LLaMA-3-8B", 1)
layer = bench_kernels.new_layer("2-bit per token", config, 1, 256, "cpu", torch.bfloat16)
q, new = torch.zeros(1, 32, 1, 128).bfloat16(), torch.zeros(1, 8, 1, 128).bfloat16()
for step in range(20):
    layer.attended(q)
    layer.append(new, new)
    caches = [*attend_kernel.device_caches.values(), *merge_kernel.device_caches.values()]
    print(sum(len(cache[0]) for cache in caches))
"""


@pytest.mark.whole
def test_a_text_that_grows_compiles_nothing_anew():
    """Codes, recent rows, merge: three, whatever the length. Triton compiles anew where a number
    becomes divisible by 16, unless it is told not to."""
    done = run("-c", GROWING)
    assert done.stdout.split() == ["3"] * 20, done.stdout + done.stderr
