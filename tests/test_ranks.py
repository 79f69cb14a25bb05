"""The same evaluation by several processes that torchrun starts: the same figures, and one line where it fails."""
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from cases import model_of, tokens_of
from torch.multiprocessing import start_processes

import eval_ppl
from tinykv.data import Windows
from tinykv.evaluate import measure, sum_of
from tinykv.methods.fp16 import FP16
from tinykv.methods.rtn import RTN

ROOT = Path(__file__).parent.parent
SMALL = ["--context", "100", "--calib-windows", "12"]
TIMES = {"seconds", "tokens_per_s"}


def start(*words, ranks=None):
    """eval_ppl.py in a process of its own, or by torchrun in several."""
    python = [sys.executable]
    if ranks:
        python += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*python, ROOT / "eval_ppl.py", *map(str, words)], cwd=ROOT, env=environment,
                          capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout, done.stderr


def fork(*words, ranks):
    """The same without torchrun, from this process, which has torch already: the rank's environment is all it takes."""
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


def test_two_ranks_give_the_figures_of_one(tmp_path, monkeypatch, capfd, one_layer):
    """With a method that is calibrated twice, and batches that do not divide the windows."""
    files = [tmp_path / "one.json", tmp_path / "two.json"]
    words = ["--model", one_layer, "--context", 32, "--calib-windows", 2, "--method", "kvsink", "--draws", 2,
             "--windows", 5, "--batch", 2, "--json"]
    monkeypatch.setattr(sys, "argv", ["eval_ppl.py", *map(str, words), str(files[0])])
    eval_ppl.main()
    one = capfd.readouterr().out
    assert fork(*words, files[1], ranks=2) == [0, 0]
    assert capfd.readouterr().out == one  # rank 1 prints nothing
    assert_same(files)


def test_tables_of_a_file_reach_the_others_whatever_is_lacking(tmp_path, monkeypatch, capfd, one_layer):
    """The file has the second method of three that are calibrated together."""
    files = [tmp_path / "one.json", tmp_path / "two.json"]
    words = ["--model", one_layer, "--context", 32, "--calib-windows", 2, "--windows", 2, "--calibration",
             tmp_path / "tables.safetensors"]
    assert fork(*words, "--method", "pfn,fp16", ranks=2) == [0, 0]
    assert fork(*words, "--method", "kvsink", "--json", files[1], ranks=2) == [0, 0]
    monkeypatch.setattr(sys, "argv", ["eval_ppl.py", *map(str, words[:-2]), "--method", "kvsink", "--json",
                                      str(files[0])])
    eval_ppl.main()
    assert_same(files)


@pytest.mark.whole
@pytest.mark.parametrize("ranks, words", [
    (2, ["--windows", 2]),
    (3, ["--windows", 5, "--batch", 1, "--protocol", "stream"]),
    (3, ["--windows", 4, "--batch", 4, "--weights", "awq", "--w-bits", 3]),  # two ranks have no batch
])
def test_all_methods(ranks, words, tmp_path):
    files, printed = [tmp_path / "one.json", tmp_path / "several.json"], []
    for file, n in zip(files, (None, ranks)):
        status, out, err = start(*SMALL, "--method", "all", *words, "--json", file, ranks=n)
        assert status == 0, err
        printed.append(out)
    assert printed[0] == printed[1]
    assert_same(files)


@pytest.mark.whole
def test_rank_0_calibrates_and_writes_the_file(tmp_path):
    """And tables that a file holds reach the others."""
    files = [tmp_path / "one.safetensors", tmp_path / "two.safetensors"]
    words = [*SMALL, "--method", "kvquant", "--windows", 2]
    for file, ranks in zip(files, (None, 2)):
        for _ in range(2):
            status, _, err = start(*words, "--calibration", file, ranks=ranks)
            assert status == 0, err
    assert files[0].read_bytes() == files[1].read_bytes()


def test_what_is_wrong_is_one_line_though_every_rank_sees_it(capfd):
    assert fork(*SMALL, "--method", "kvsnik", ranks=2) == [2, 2]
    out, err = capfd.readouterr()
    assert not out and err.count("eval_ppl.py: ") == 1 and "kvsnik" in err


def test_parts_add_up_to_the_whole():
    """Digit by digit, wherever the windows are divided."""
    model = model_of(1)
    tokens = tokens_of(4, 40)

    def of(part):
        """The figures of rtn on some of the windows, beside fp16."""
        windows = Windows(part, [[]] * len(part), "noise")
        fp16 = measure(model, FP16(model.config), windows)
        return measure(model, RTN(model.config, scheme="token-dynamic"), windows, fp16=fp16)
    whole = of(tokens)
    for first in range(5):
        total = sum_of([of(tokens[:first]), of(tokens[first:])])
        total.seconds = whole.seconds
        assert total == whole
