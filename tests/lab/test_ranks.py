"""The same evaluation by several processes that torchrun starts: the same figures, and one line where it fails."""
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from torch.multiprocessing import start_processes

import eval_ppl
from tinykv.evaluate import Result, sum_of

ROOT = Path(__file__).parents[2]
TIMES = {"seconds"}


def fork(*words, ranks):
    """What torchrun does, from this process, which has torch already: the rank's environment is all it takes."""
    if not hasattr(os, "fork"):
        pytest.skip("this system has no fork")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = start_processes(as_rank, (ranks, port, words), ranks, join=False, start_method="fork").processes
    for process in processes:
        process.join(60)
        process.kill()
    return [process.exitcode for process in processes]


def as_rank(rank, ranks, port, words):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": str(port)}
    sys.argv = ["eval_ppl.py", *map(str, words)]
    eval_ppl.main()


def assert_same(files):
    """What several processes wrote is what one wrote, but for the seconds."""
    one, several = [json.loads(file.read_text()) for file in files]
    for of_one, of_several in zip(one.pop("rows"), several.pop("rows"), strict=True):
        assert of_one.keys() == of_several.keys() and of_one["ppl"]
        for key in of_one.keys() - TIMES:
            assert of_one[key] == of_several[key], (of_one["label"], key)
    assert one == several


def test_two_ranks_give_the_figures_of_one(tmp_path, capfd, one_layer):
    """With a method that is calibrated twice, and batches that do not divide the windows. Rank 0 alone prints, and
    writes files."""
    words = ["--model", one_layer, "--context", 32, "--calib-windows", 2, "--method", "kvsink", "--draws", 2,
             "--windows", 5, "--batch", 2]
    printed = []
    for ranks, name in (1, "one"), (2, "two"):
        outputs = ["--calibration", tmp_path / name, "--json", tmp_path / f"{name}.json"]
        assert fork(*words, *outputs, ranks=ranks) == [0] * ranks
        printed.append(capfd.readouterr().out)
    tables = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("one", "two")]
    assert printed[0] == printed[1] != "" and tables[0] == tables[1]
    assert_same([tmp_path / "one.json", tmp_path / "two.json"])
    for row in json.loads((tmp_path / "one.json").read_text())["rows"]:
        assert all(len(of_draw) == 5 for of_draw in row["window_nll"])  # of the last batch, too


def test_kept_tables_reach_the_others_whatever_is_lacking(tmp_path, one_layer):
    """The folder has the second method of three that are calibrated together. One of the ranks has no batch."""
    files = [tmp_path / "one.json", tmp_path / "two.json"]
    words = ["--model", one_layer, "--context", 32, "--calib-windows", 2, "--windows", 2, "--method"]
    kept = ["--calibration", tmp_path / "tables"]
    assert fork(*words, "pfn,fp16", *kept, ranks=2) == [0, 0]
    assert fork(*words, "kvsink", *kept, "--json", files[1], ranks=2) == [0, 0]
    assert fork(*words, "kvsink", "--json", files[0], ranks=1) == [0]
    assert_same(files)


@pytest.mark.whole
@pytest.mark.parametrize("ranks, words", [
    (2, ["--windows", 2]),
    (3, ["--windows", 5, "--batch", 1, "--protocol", "stream"]),
    (3, ["--windows", 4, "--batch", 4, "--weights", "awq", "--w-bits", 3]),  # two ranks have no batch
])
def test_all_methods(ranks, words, tmp_path):
    """By torchrun itself, and in one process without it."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    files, printed = [tmp_path / "one.json", tmp_path / "several.json"], []
    for file, started_by in zip(files, ([], torchrun)):
        command = [sys.executable, *started_by, ROOT / "eval_ppl.py", "--context", 100, "--calib-windows", 12,
                   "--method", "all", *words, "--json", file]
        done = subprocess.run(list(map(str, command)), cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"},
                              capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    assert printed[0] == printed[1]
    assert_same(files)


def test_what_is_wrong_is_one_line_though_every_rank_sees_it(capfd):
    assert fork("--method", "kvsnik", ranks=2) == [2, 2]
    out, err = capfd.readouterr()
    assert not out and err.count("eval_ppl.py: ") == 1 and "kvsnik" in err


def test_parts_add_up_to_the_whole():
    """Every figure; a part may be empty."""
    one = Result([1.0], [[1.0]], [2.0], [3.0], [4.0], [5.0], agree=1, right=2, answers=3, targets=4,
                 seconds=6.0, cache_bytes=7, reads_codes=1)
    two = Result([1.5], [[1.5]], [2.5], [3.5], [4.5], [5.5], agree=10, right=20, answers=30, targets=40,
                 seconds=60.0, cache_bytes=6, reads_codes=2)
    whole = Result([1.0, 1.5], [[1.0], [1.5]], [2.0, 2.5], [3.0, 3.5], [4.0, 4.5], [5.0, 5.5], 11, 22, 33, 44,
                   66.0, 7, 3)
    assert sum_of([Result(), one, two]) == whole
