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
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("cache"))}
    return subprocess.run([sys.executable, str(ROOT / "kernels.py"), "compile", "--quick"], env=env,
                          capture_output=True, text=True)


def test_no_kernel_spills(done):
    assert done.returncode == 0 and done.stderr == "", done.stdout + done.stderr


def test_the_table_has_each_kernel_on_each_gpu(done):
    """With registers, shared memory and instructions that are numbers of a real kernel."""
    rows = [line.split() for line in done.stdout.splitlines()[3:]]
    found = {(row[0], gpu) for row in rows for gpu in ("sm_80", "sm_90") if gpu in row}
    assert found == {(kernel, gpu) for kernel in ("attend", "merge", "anchor") for gpu in ("sm_80", "sm_90")}
    for row in rows:
        regs, spills, shared, each = row[-4:]
        assert 16 <= int(regs) <= 255 and spills == "0" and 0 <= float(shared) < 228
        assert 1 < float(each) < 200 if row[0] == "attend" else each == "-"
