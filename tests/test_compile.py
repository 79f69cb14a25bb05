"""The compile gate: every Triton kernel through the compiler for two GPUs, without one at hand."""
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A process of its own, as this one interprets; nothing is taken from an earlier run."""
    cache = str(tmp_path_factory.mktemp("cache"))
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": cache}
    command = [sys.executable, str(ROOT / "docs" / "programs" / "bench_kernels.py"), "compile", "--quick"]
    return subprocess.run(command, env=env, capture_output=True, text=True)


@pytest.mark.whole  # the compiler takes seconds a kernel
def test_no_kernel_spills(done):
    assert done.returncode == 0 and done.stderr == "", done.stdout + done.stderr


@pytest.mark.whole
def test_the_table_has_each_kernel_on_each_gpu(done):
    """With registers, shared memory and instructions that are numbers of a real kernel."""
    rows = [line.split() for line in done.stdout.splitlines()[3:]]
    gpus = ("sm_80", "sm_90")
    found = {(row[0], gpu) for row in rows for gpu in gpus if gpu in row}
    assert found == {(name, gpu) for name in ("attend", "merge", "anchor", "topk") for gpu in gpus}
    for row in rows:
        regs, spills, shared, each = row[-4:]
        assert 16 <= int(regs) <= 255 and spills == "0" and 0 <= float(shared) < 228
        assert 1 < float(each) < 200 if row[0] == "attend" else each == "-"
        if "2-bit per token" in " ".join(row) and row[-7:-5] == ["4", "1"] and "sm_90" in row:
            assert float(each) <= 3.5 or "80" in row  # half of what the first version took


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
    env = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT / "docs" / "programs")}
    done = subprocess.run([sys.executable, "-c", GROWING], env=env, capture_output=True, text=True)
    assert done.stdout.split() == ["3"] * 20, done.stdout + done.stderr
