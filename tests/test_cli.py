"""The command as a user meets it: the table, the JSON, and one clear line for what is wrong."""
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import eval_ppl

ROOT = Path(__file__).parent.parent
SMALL = ["--context", "64", "--windows", "2", "--calib-windows", "2"]
KEYS = {"method", "scheme", "k_bits", "v_bits", "preserve", "protocol", "ppl", "ppl_se", "delta_ppl", "kld", "top1",
        "recall", "bits_nominal", "bits_true", "bits_128k", "cache_bytes", "tokens_per_s"}


def run(capsys, monkeypatch, *words):
    """The command in this process: (status, stdout, stderr)."""
    monkeypatch.setattr(sys, "argv", ["eval_ppl.py", *words])
    try:
        eval_ppl.main()
        status = 0
    except SystemExit as end:
        status = end.code or 0
    out = capsys.readouterr()
    return status, out.out, out.err


@pytest.fixture
def command(capsys, monkeypatch):
    return lambda *words: run(capsys, monkeypatch, *words)


def refused(command, *words):
    """The one line with which the command refuses."""
    status, out, err = command(*words)
    assert status == 2 and err.count("\n") == 1 and err.startswith("eval_ppl.py: error: "), (status, err)
    assert "Traceback" not in err
    return err


def table(out):
    """{method: {column: text}} of the printed table."""
    lines = out.split("\n\n")[-1].splitlines()
    head = lines[0].split()
    return {line.split()[0]: dict(zip(head, line.split())) for line in lines[1:]}


def test_kvsink_is_shown_beside_what_it_is_compared_with(command):
    status, out, err = command("--method", "kvsink", *SMALL)
    rows = table(out)
    assert status == 0 and list(rows) == ["fp16", "rtn", "pfn", "kvsink"]
    assert rows["fp16"]["ppl"] != rows["rtn"]["ppl"]
    assert rows["fp16"]["delta"] == "+0.000" and rows["kvsink"]["keep"] == rows["pfn"]["keep"] == "5"
    assert "kvsink: emergence layer" in out
    assert err == ""  # no bar where nobody watches


def test_a_list_shows_what_was_asked_for(command):
    _, out, _ = command("--method", "rtn,pfn", "--scheme", "token-dynamic", *SMALL)
    assert list(table(out)) == ["fp16", "rtn", "pfn"]


def test_json_has_the_table(command, tmp_path):
    path = tmp_path / "out.json"
    status, out, _ = command("--method", "all", "--bits", "3", "--preserve", "2", "--protocol", "stream", "--seed", "3",
                             "--json", str(path), *SMALL)
    written = json.loads(path.read_text())
    assert status == 0 and KEYS <= set(written["rows"][0])
    assert {"rows", "model", "data", "context", "windows", "seed", "versions"} <= set(written)
    assert (written["context"], written["windows"], written["seed"]) == (64, 2, 3)
    rows = {row["method"]: row for row in written["rows"]}
    assert rows["kvsink"]["preserve"] == 2 and rows["kvsink"]["k_bits"] == 3 and rows["rtn"]["protocol"] == "stream"
    assert f"{rows['pfn']['ppl']:.3f}" == table(out)["pfn"]["ppl"]
    assert not list(tmp_path.glob("*.tmp"))


def test_keys_and_values_may_differ_in_bits(command):
    _, out, _ = command("--method", "rtn", "--k-bits", "4", "--v-bits", "1.5", "--scheme", "token-dynamic", *SMALL)
    assert table(out)["rtn"]["bits"] == "2.75"


def test_one_window_has_no_standard_error(command, tmp_path):
    path = tmp_path / "out.json"
    _, out, _ = command("--method", "fp16", "--windows", "1", "--context", "64", "--json", str(path))
    assert table(out)["fp16"]["+-"] == "-" and json.loads(path.read_text())["rows"][0]["ppl_se"] is None
    assert "NaN" not in path.read_text()


def test_same_seed_same_table_other_seed_another(command):
    figures = []
    for seed in ("0", "0", "1"):
        _, out, _ = command("--method", "rtn", "--seed", seed, *SMALL)
        figures.append(table(out)["rtn"]["ppl"])
    assert figures[0] == figures[1] != figures[2]


def test_a_method_of_ones_own(command, tmp_path):
    own = tmp_path / "own.py"
    own.write_text("from tinykv.methods.pfn import PFN\n\n\nclass Last(PFN):\n    pass\n")
    status, out, _ = command("--method", f"{own}:Last", "--preserve", "7", *SMALL)
    assert status == 0 and table(out)[f"{own}:Last"]["keep"] == "7"


def test_the_method_that_readme_shows(command, tmp_path):
    own = tmp_path / "mine.py"
    own.write_text(re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1])
    status, out, _ = command("--method", f"{own}:Hundredth", "--bits", "2", *SMALL)
    assert status == 0 and float(table(out)[f"{own}:Hundredth"]["true"]) > 2


def test_list_methods(command):
    status, out, _ = command("--list-methods")
    assert status == 0 and all(name in out for name in ("fp16", "rtn", "pfn", "kvsink", "preserve=5"))


@pytest.mark.parametrize("words, named", [
    (["--method", "kvsnik"], ["kvsnik", "kvsink", "rtn"]),
    (["--method", "rtn", "--preserve", "5"], ["--preserve", "rtn"]),
    (["--method", "fp16", "--bits", "3"], ["--bits", "fp16"]),
    (["--method", "rtn", "--bits", "9"], ["9"]),
    (["--method", "rtn", "--bits", "2.5"], ["2.5"]),
    (["--method", "rtn", "--scheme", "token-static", "--group-size", "24"], ["24", "32"]),
    (["--method", "rtn", "--group-size", "0"], ["0"]),
    (["--method", "pfn", "--preserve", "-1"], ["-1"]),
    (["--method", "kvsink", "--preserve", "0"], ["0", "rtn"]),
    (["--method", "kvsink", "--emergence-layer", "1"], ["channel"]),
    (["--method", "kvsink", "--emergence-layer", "9", "--outlier-channel", "1"], ["9", "6 layers"]),
    (["--context", "2048"], ["2048", "1024"]),
    (["--context", "-3"], ["-3"]),
    (["--windows", "0"], ["0"]),
    (["--calib-windows", "0"], ["0"]),
    (["--batch", "0"], ["0"]),
    (["--data", "nothing.txt"], ["nothing.txt", "tales"]),
    (["--model", "no/folder"], ["no/folder"]),
    (["--method", "nowhere.py:X"], ["nowhere.py"]),
    (["--method", "eval_ppl.py:Nothing"], ["Nothing", "Method"]),
    (["--json", "no/such/folder/out.json", "--method", "fp16"], ["no/such/folder"]),
    (["--device", "cuda:9"], ["cuda:9"]),
    (["--device", "toaster"], ["toaster"]),
])
def test_bad_input_is_one_clear_line(command, monkeypatch, words, named):
    monkeypatch.chdir(ROOT)
    small = [w for pair in zip(SMALL[::2], SMALL[1::2]) if pair[0] not in words for w in pair]
    line = refused(command, *words, *small)
    for name in named:
        assert name in line, line


def test_a_text_shorter_than_a_window(command, tmp_path):
    text = tmp_path / "short.txt"
    text.write_text("Too short. " * 3)
    assert "64" in refused(command, "--data", str(text), "--method", "fp16", *SMALL)


def test_a_text_of_ones_own(command, tmp_path):
    text = tmp_path / "long.txt"
    text.write_text("Balo lives in Eastwick. " * 400)
    status, out, _ = command("--data", str(text), "--method", "rtn", *SMALL)
    assert status == 0 and table(out)["rtn"]["recall"] == "-"


def test_a_damaged_checkpoint(command, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(eval_ppl.EMBEDDED, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert "model.safetensors" in refused(command, "--model", str(folder), *SMALL)


def test_as_a_process():
    """Through the real command line, where stderr is no terminal: no bar, no traceback, status 2."""
    done = subprocess.run([sys.executable, "eval_ppl.py", "--method", "rnt"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "rnt" in done.stderr and done.stdout == ""
