"""The command as a user meets it: the table, the JSON, and one clear line for what is wrong."""
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import eval_ppl
import train_intact
from tinykv.analysis import __main__ as analysis
from tinykv.calibrate import calibrate
from tinykv.methods.registry import METHODS
from tinykv.run.cli import EMBEDDED, print_columns
from tinykv.run.runs import SETTINGS, settings_of
from tinykv.run.table import at_bits

ROOT = Path(__file__).parent.parent
SMALL = ["--context", "64", "--windows", "2", "--calib-windows", "2"]
KEYS = {"label", "method", "settings", "scheme", "k_bits", "v_bits", "preserve", "protocol", "ppl", "ppl_se",
        "delta_ppl", "kld", "top1", "recall", "bits_nominal", "bits_true", "bits_128k", "cache_bytes", "tokens_per_s",
        "seconds", "offline_bytes"}


def run(module, capsys, monkeypatch, *words):
    """A command in this process: (status, stdout, stderr)."""
    monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", *map(str, words)])
    try:
        module.main()
        status = 0
    except SystemExit as end:
        status = end.code or 0
    out = capsys.readouterr()
    return status, out.out, out.err


@pytest.fixture
def command(capsys, monkeypatch):
    return lambda *words: run(eval_ppl, capsys, monkeypatch, *words)


def refused(command, *words):
    """The one line with which the command refuses."""
    status, out, err = command(*words)
    assert status == 2 and err.count("\n") == 1 and re.match(r"\w+\.py: error: ", err), (status, err)
    assert "Traceback" not in err
    return err


def table(out):
    """{label: {column: text}} of the printed table, whose columns are at least two blanks apart."""
    head, *lines = [re.split(" {2,}", line.strip()) for line in out.split("\n\n")[-1].splitlines()]
    assert all(len(line) == len(head) for line in lines) and len({line[0] for line in lines}) == len(lines)
    return {line[0]: dict(zip(head, line)) for line in lines}


def test_kvsink_is_shown_beside_what_it_is_compared_with(command):
    status, out, err = command("--method", "kvsink", *SMALL)
    rows = table(out)
    assert status == 0 and list(rows) == ["fp16", "rtn", "pfn", "kvsink"]
    assert rows["fp16"]["ppl"] != rows["rtn"]["ppl"]
    assert rows["fp16"]["delta"] == "+0.000" and rows["kvsink"]["keep"] == rows["pfn"]["keep"] == "5"
    assert "kvsink: emergence layer" in out
    assert err == ""  # no bar where nobody watches


@pytest.mark.parametrize("words, heading, chosen", [
    (["--prompt", "32"], "protocol paper, prompt 32", {"kvsink": "prompt"}),
    (["--prompt", "32", "--choose", "always,prompt", "--protocol", "stream"], "protocol stream, prompt 32",
     {"kvsink choose=always": "always", "kvsink choose=prompt": "prompt"}),
    (["--protocol", "stream"], "protocol stream, seed", {"kvsink": "always"})])
def test_every_table_says_when_tokens_are_chosen(command, tmp_path, words, heading, chosen):
    path = tmp_path / "out.json"
    status, out, _ = command("--method", "kvsink", *words, "--json", str(path), *SMALL)
    rows = {row["label"]: row for row in json.loads(path.read_text())["rows"]}
    assert status == 0 and heading in out
    for label, when in chosen.items():
        said = {"prompt": "once, after the prompt", "always": "at each quantization"}[when]
        assert f"{label}: the tokens to keep are chosen {said}" in out
        assert rows[label]["choose"] == when and rows[label]["prompt"] == (32 if "--prompt" in words else None)
    assert rows["pfn"]["choose"] is None


def test_a_list_shows_what_was_asked_for(command):
    _, out, _ = command("--method", "rtn,pfn", "--scheme", "token-dynamic", *SMALL)
    assert list(table(out)) == ["fp16", "rtn", "pfn"]


def test_json_has_the_table(command, tmp_path):
    path = tmp_path / "out.json"
    status, out, _ = command("--method", "all", "--bits", "3", "--preserve", "2", "--protocol", "stream", "--seed", "3",
                             "--json", str(path), *SMALL)
    assert "cq is left out: " in out and "antkv is left out: " in out  # the paper has no format of 3 bits
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
    assert table(out)["rtn"]["bits"] == "4/1.5"


def test_a_plot_of_bits_and_a_plot_of_kept_tokens(command, tmp_path):
    for words in (["--method", "rtn,kivi", "--bits", "2,4"], ["--method", "pfn,kvsink", "--preserve", "1,5"]):
        path = tmp_path / "plot.png"
        status, out, _ = command(*words, "--plot", str(path), *SMALL)
        assert status == 0 and path.read_bytes().startswith(b"\x89PNG") and out.split("\n\n")[-1].count("=") == 4
        path.unlink()


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
    assert status == 0 and all(f"\n{name} " in f"\n{out}" for name in METHODS)
    for setting in ("preserve=5", "outlier_num=3", "v_block", "outliers=1.0", "clip=both", "scheme=channel-static"):
        assert setting in out


def test_every_setting_of_every_method_is_an_option():
    """And every option belongs to a method."""
    taken = {name for cls in METHODS.values() for name in settings_of(cls)}
    assert taken == set(SETTINGS)


# ---- the methods in the table

@pytest.mark.one_in(3)
@pytest.mark.parametrize("name, beside", [
    ("kivi", ["rtn group_size=32"]), ("ott", ["kivi group_size=128 recent=32"]), ("skvq", ["kivi"]),
    ("kvquant", ["rtn"])])
def test_a_new_method_is_shown_beside_what_it_is_compared_with(command, name, beside):
    status, out, err = command("--method", name, *SMALL)
    rows = table(out)
    assert (status, err) == (0, "") and list(rows) == ["fp16", *beside, name]
    assert float(rows[name]["true"]) > float(rows[name]["bits"]) == 2


@pytest.mark.whole  # seconds each; test_json_has_the_table is a table of all, too
@pytest.mark.parametrize("words", [["--protocol", "paper"], ["--protocol", "stream"],
                                   ["--protocol", "paper", "--outliers", "1"], ["--protocol", "paper", "--bits", "4"]])
def test_all_methods_in_one_table(command, tmp_path, words):
    path = tmp_path / "out.json"
    status, out, err = command("--method", "all", *words, "--json", str(path), *SMALL[:-1], "20")
    rows = json.loads(path.read_text())["rows"]
    assert (status, err) == (0, "") and list(table(out)) == [row["label"] for row in rows] == list(METHODS)
    assert "nan" not in out.lower() and "NaN" not in path.read_text()
    for row in rows:
        assert row["method"] == row["label"] and row["ppl"] > 1
        assert set(row["settings"]) == set(settings_of(METHODS[row["method"]]))


@pytest.mark.whole
def test_where_nothing_is_quantized_yet_all_methods_are_fp16(command, tmp_path):
    """64 tokens are less than a block, or than the recent tokens: fp16's result to the last bit.

    After a prefix matrix products have other shapes, and other last bits.
    """
    path = tmp_path / "out.json"
    command("--method", "all", "--protocol", "stream", "--json", str(path), *SMALL[:-1], "20")
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == len(METHODS)
    for row in rows:
        figures, exact = [row[key] for key in ("ppl", "delta_ppl", "kld", "top1")], [rows[0]["ppl"], 0, 0, 1]
        off = 1e-5 if "prefix" in row["settings"] else 0
        assert figures == pytest.approx(exact, rel=off, abs=off), row["label"]
        score = 32 / 32 if row["method"] == "antkv" else 0  # held beside each exact row of 32 channels
        assert (row["bits_true"], row["bits_128k"]) == (16 + score, 16)


# ---- lists of settings

def rows_of(command, tmp_path, *words):
    path = tmp_path / "out.json"
    status, out, err = command(*words, "--json", str(path), *SMALL)
    assert (status, err) == (0, "")
    rows = json.loads(path.read_text())["rows"]
    assert list(table(out)) == [row["label"] for row in rows]
    return rows


def test_a_list_makes_a_row_of_each(command, tmp_path):
    rows = rows_of(command, tmp_path, "--method", "pfn", "--preserve", "0,5,10")
    assert [row["label"] for row in rows] == ["fp16", "rtn", "pfn preserve=0", "pfn preserve=5", "pfn preserve=10"]
    assert [row["method"] for row in rows] == ["fp16", "rtn", "pfn", "pfn", "pfn"]
    assert [row["preserve"] for row in rows] == [0, 0, 0, 5, 10]
    assert [row["settings"].get("preserve") for row in rows] == [None, None, 0, 5, 10]
    assert rows[2]["ppl"] == rows[1]["ppl"] != rows[3]["ppl"] != rows[4]["ppl"]


def test_a_list_reaches_every_method_that_takes_it(command, tmp_path):
    """The methods asked for and those beside; one that does not take it has one row."""
    rows = rows_of(command, tmp_path, "--method", "kvsink", "--preserve", "2,5", "--k-bits", "3")
    assert [row["label"] for row in rows] == ["fp16", "rtn", "pfn preserve=2", "pfn preserve=5", "kvsink preserve=2",
                                              "kvsink preserve=5"]
    assert {(row["k_bits"], row["v_bits"]) for row in rows[1:]} == {(3, 2)}
    rows = rows_of(command, tmp_path, "--method", "kivi,ott,pfn", "--outlier-num", "1,3")
    assert [row["label"] for row in rows] == ["fp16", "kivi", "ott outlier_num=1", "ott outlier_num=3", "pfn"]


def test_a_list_of_bits_is_for_keys_and_values(command, tmp_path):
    rows = rows_of(command, tmp_path, "--method", "rtn", "--bits", "2,1.5,3")
    assert [row["label"] for row in rows] == ["fp16", "rtn bits=2", "rtn bits=1.5", "rtn bits=3"]
    assert [(row["k_bits"], row["v_bits"]) for row in rows[1:]] == [(2, 2), (1.5, 1.5), (3, 3)]
    assert [(row["settings"]["k_bits"], row["settings"]["v_bits"]) for row in rows[1:]] == [(2, 2), (1.5, 1.5), (3, 3)]


def test_bits_of_keys_alone_go_before_those_of_both(command, tmp_path):
    rows = rows_of(command, tmp_path, "--method", "rtn,kivi", "--bits", "2,3", "--k-bits", "4")
    assert [(row["label"], row["k_bits"], row["v_bits"]) for row in rows[1:]] == [
        ("rtn bits=2", 4, 2), ("rtn bits=3", 4, 3), ("kivi bits=2", 4, 2), ("kivi bits=3", 4, 3)]


def test_two_lists_make_every_combination(command, tmp_path):
    rows = rows_of(command, tmp_path, "--method", "pfn,rtn", "--preserve", "1,2", "--bits", "2,3", "--rope", "pre")
    assert [row["label"] for row in rows] == ["fp16", "pfn bits=2 preserve=1", "pfn bits=2 preserve=2",
                                              "pfn bits=3 preserve=1", "pfn bits=3 preserve=2", "rtn bits=2",
                                              "rtn bits=3"]
    assert all(row["settings"]["rope"] == "pre" for row in rows[1:])
    assert [(row["k_bits"], row["preserve"]) for row in rows[1:5]] == [(2, 1), (2, 2), (3, 1), (3, 2)]


@pytest.mark.whole
def test_a_schemes_own_setting_multiplies_only_its_rows(command, tmp_path):
    rows = rows_of(command, tmp_path, "--method", "pfn", "--scheme", "channel-static,kvquant", "--outliers", "0,1")
    schemes = ["scheme=channel-static", "scheme=kvquant outliers=0", "scheme=kvquant outliers=1"]
    assert [row["label"] for row in rows] == ["fp16", *[f"rtn {s}" for s in schemes], *[f"pfn {s}" for s in schemes]]
    assert [row["scheme"] for row in rows[1:]] == ["channel-static", "kvquant", "kvquant"] * 2
    assert [row["settings"]["outliers"] for row in rows[1:]] == [None, 0, 1] * 2
    assert len({row["ppl"] for row in rows}) == len(rows)
    assert rows[2]["bits_true"] < rows[3]["bits_true"]


@pytest.mark.whole
def test_a_label_says_what_differs_and_no_more(command, tmp_path):
    rows = rows_of(command, tmp_path, "--method", "kvquant,skvq", "--outliers", "0.1,1", "--clip", "none")
    assert [row["label"] for row in rows] == ["fp16", "kvquant outliers=0.1", "kvquant outliers=1", "skvq"]
    assert rows[3]["settings"]["clip"] == "none"


# ---- the calibration file

CALIBRATING = ["--method", "rtn,pfn,kvsink,skvq,kvquant"]


@pytest.fixture
def kept(tmp_path):
    return tmp_path / "tables.safetensors"


def names_in(path):
    with safe_open(path, "pt") as file:
        return json.loads(json.loads(file.metadata()["notes"])["names"])


def no_more_calibration(monkeypatch, *names):
    """From here on it is an error to calibrate one of these methods; or any, without names."""
    def refuse(model, method, *arguments):
        if not names or type(method) in [METHODS[name] for name in names]:
            raise AssertionError(f"{type(method).__name__} calibrated again")
        calibrate(model, method, *arguments)
    monkeypatch.setattr(eval_ppl, "calibrate", refuse)


def without_seconds(out):
    """What was said, and the table without its last column."""
    said = out.split("\n\n")[0]
    return said, {label: {k: v for k, v in row.items() if k != "s"} for label, row in table(out).items()}


@pytest.mark.whole  # five methods, three times
def test_calibrated_tables_are_read_again(command, monkeypatch, kept):
    status, out, err = command(*CALIBRATING, "--calibration", str(kept), *SMALL)
    assert (status, err) == (0, "") and kept.exists() and not list(kept.parent.glob("*.tmp"))
    plain = command(*CALIBRATING, *SMALL)[1]
    bytes_before = kept.read_bytes()
    no_more_calibration(monkeypatch)
    status, again, err = command(*CALIBRATING, "--calibration", str(kept), *SMALL)
    assert (status, err) == (0, "") and without_seconds(again) == without_seconds(out) == without_seconds(plain)
    assert kept.read_bytes() == bytes_before


def test_the_other_protocol_and_more_windows_read_the_same_file(command, monkeypatch, kept):
    command("--method", "kvquant", "--calibration", str(kept), *SMALL)
    no_more_calibration(monkeypatch)
    words = ["--context", "64", "--calib-windows", "2", "--windows", "3", "--protocol", "stream"]
    assert command("--method", "kvquant", "--calibration", str(kept), *words)[0] == 0


@pytest.mark.whole
def test_a_method_that_the_file_lacks_is_added(command, monkeypatch, kept):
    command("--method", "fp16,kvquant", "--calibration", str(kept), *SMALL)
    first = load_file(kept)
    no_more_calibration(monkeypatch, "kvquant")
    status, out, _ = command("--method", "pfn,kvquant", "--calibration", str(kept), *SMALL)
    both = load_file(kept)
    assert status == 0 and set(first) < set(both) and all((both[name] == first[name]).all() for name in first)
    assert [name.split()[0] for name in names_in(kept)] == ["kvquant", "pfn"]
    no_more_calibration(monkeypatch)
    assert without_seconds(command("--method", "pfn,kvquant", "--calibration", str(kept), *SMALL)[1]) == \
        without_seconds(out)


def test_other_settings_are_calibrated_anew(command, monkeypatch, kept):
    """And each row of a list has its own tables."""
    command("--method", "pfn,fp16", "--preserve", "1,2", "--calibration", str(kept), *SMALL)
    assert len(names_in(kept)) == 2
    command("--method", "pfn,fp16", "--preserve", "2,3", "--calibration", str(kept), *SMALL)
    assert len(names_in(kept)) == 3
    no_more_calibration(monkeypatch)
    assert command("--method", "pfn,fp16", "--preserve", "3,1", "--calibration", str(kept), *SMALL)[0] == 0
    with pytest.raises(AssertionError, match="calibrated again"):
        command("--method", "pfn,fp16", "--preserve", "4", "--calibration", str(kept), *SMALL)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name, words", [
    ("kvquant", ["--bits", "2"]), ("kvquant", ["--k-bits", "2", "--outliers", "1"]), ("rtn", ["--v-bits", "2.0"]),
    ("pfn", ["--preserve", "5"]), ("skvq", ["--clip", "both", "--bits", "2"])])
def test_a_default_that_is_asked_for_is_not_calibrated_again(command, monkeypatch, kept, name, words):
    command("--method", f"fp16,{name}", "--calibration", str(kept), *SMALL)
    no_more_calibration(monkeypatch)
    assert command("--method", f"fp16,{name}", *words, "--calibration", str(kept), *SMALL)[0] == 0


def test_tables_of_a_method_of_ones_own_are_kept_too(command, monkeypatch, kept):
    own = kept.parent / "own.py"
    own.write_text("from tinykv.methods.pfn import PFN\n\n\nclass Last(PFN):\n    pass\n")
    words = ["--method", f"{own}:Last,fp16", "--calibration", str(kept), *SMALL]
    _, out, _ = command(*words)
    no_more_calibration(monkeypatch)
    status, again, _ = command(*words)
    assert status == 0 and without_seconds(again) == without_seconds(out)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("words", [["--seed", "1"], ["--bos", "none"], ["--calib-windows", "3"], ["--context", "63"],
                                   ["--data", "TEXT"]])
def test_a_file_of_other_data_is_refused(command, kept, words):
    text = kept.parent / "long.txt"
    text.write_text("Balo lives in Eastwick. " * 400)
    command("--method", "fp16,rtn", "--calibration", str(kept), *SMALL)
    before = kept.read_bytes()
    small = [w for pair in zip(SMALL[::2], SMALL[1::2]) if pair[0] not in words for w in pair]
    words = [str(text) if w == "TEXT" else w for w in words]
    line = refused(command, "--method", "fp16,rtn", "--calibration", str(kept), *small, *words)
    assert str(kept) in line and "other data" in line and kept.read_bytes() == before


def test_a_file_of_another_model_is_refused(command, tmp_path, kept):
    folder = tmp_path / "model"
    shutil.copytree(EMBEDDED, folder)
    words = ["--method", "fp16,rtn", "--calibration", str(kept), "--model", str(folder), *SMALL]
    assert command(*words)[0] == 0
    with safe_open(folder / "model.safetensors", "pt") as file:
        notes = file.metadata()
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][7] += 1
    save_file(weights, folder / "model.safetensors", notes)
    line = refused(command, *words)
    assert str(kept) in line and "another model" in line
    assert "another model" in refused(command, "--method", "fp16,rtn", "--calibration", str(kept), "--dtype", "bf16",
                                      *SMALL)


def test_a_damaged_calibration_file_is_refused(command, kept):
    words = ["--method", "fp16,rtn", "--calibration", str(kept), *SMALL]
    command(*words)
    whole = kept.read_bytes()
    for damaged in (whole[:-100], whole[:20], b"", b"no such thing" * 100, b"\xff" * 64):
        kept.write_bytes(damaged)
        assert str(kept) in refused(command, *words)
        assert kept.read_bytes() == damaged


def test_a_file_of_another_kind_is_refused(command, tmp_path):
    weights = EMBEDDED / "model.safetensors"
    path = tmp_path / "model.safetensors"
    shutil.copy(weights, path)
    assert str(path) in refused(command, "--method", "rtn", "--calibration", str(path), *SMALL)
    assert path.read_bytes() == weights.read_bytes()
    assert str(tmp_path) in refused(command, "--method", "rtn", "--calibration", str(tmp_path), *SMALL)


@pytest.mark.parametrize("words", [["fp16"], ["kivi,ott"], ["rtn,fp16", "--scheme", "token-dynamic"],
                                   ["skvq,fp16", "--reorder", "off", "--clip", "none"]])
def test_there_is_nothing_to_keep_where_nothing_is_calibrated(command, kept, words):
    assert "--calibration" in refused(command, "--method", *words, "--calibration", str(kept), *SMALL)
    assert not kept.exists()


# ---- what is wrong


def test_a_file_is_read_as_a_whole_where_calibration_has_another(command, tmp_path):
    """Half of it would be too short; and the other way round."""
    path = tmp_path / "text.txt"
    path.write_text("Vehul Ravfield. Vehul owl. Mara Norton. " * 20)
    words = "--context", "64", "--windows", "4", "--calib-windows", "2", "--data", str(path)
    assert "windows of 64" in command("--method", "kivi", *words)[2]
    for method in ("kivi", "cq --vq d4m16"):
        status, out, _ = command("--method", *method.split(), "--calib-data", "fables", *words)
        assert status == 0 and f"data {path} (whole): 4 windows" in out


@pytest.mark.parametrize("words, named", [
    (["--choose", "always"], ["--choose", "--prompt"]),
    (["--prompt", "64"], ["--prompt 64", "shorter than a window, 64"]),
    (["--prompt", "0"], ["--prompt"]),
    (["--method", "intactkv", "--prefix", "docs/prompt.txt", "--prompt", "54"], ["the prefix", "54 tokens"]),
    (["--method", "pfn", "--prompt", "32", "--choose", "prompt"], ["--choose", "pfn"]),
    (["--method", "kvsnik"], ["kvsnik", "kvsink", "rtn"]),
    (["--method", "antkv", "--anchors", "65"], ["antkv keeps 65", "64"]),
    (["--method", "pfn", "--preserve", "65"], ["pfn keeps 65", "64"]),
    (["--method", "antkv", "--anchors", "many"], ["many", "1%"]),
    (["--method", "cq", "--vq", "d3m16"], ["d3m16", "32"]),
    (["--method", "cq", "--vq", "d4m100"], ["100", "power of two"]),
    (["--method", "cq", "--bits", "3"], ["3", "0.375"]),
    (["--method", "cq", "--bits", "2", "--vq", "d4m16"], ["not both"]),
    (["--method", "antkv", "--vq", "d4m256"], ["256 centroids", "126 vectors"]),
    (["--method", "fp16", "--calib-data", "tales"], ["--calib-data", "fp16"]),
    (["--method", "cq", "--calib-data", "nothing.txt"], ["nothing.txt"]),
    (["--plot", "figure.pdf"], ["figure.pdf", ".png"]),
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
    (["--calibration", "no/such/folder/tables", "--method", "rtn"], ["no/such/folder"]),
    (["--method", "kivi", "--recent", "-1"], ["recent", "-1"]),
    (["--method", "kivi", "--v-block", "0"], ["v block", "0"]),
    (["--method", "kivi", "--group-size", "0"], ["group size", "0"]),
    (["--method", "kivi", "--group-size", "24"], ["24", "32"]),
    (["--method", "ott", "--outlier-num", "-1"], ["outlier num", "-1"]),
    (["--method", "ott", "--extra-pool", "-1"], ["extra pool", "-1"]),
    (["--method", "ott", "--skip-layers", "-1"], ["skip layers", "-1"]),
    (["--method", "ott", "--recent", "-1"], ["recent", "-1"]),
    (["--method", "ott", "--scope", "x"], ["scope", "x", "head", "layer"]),
    (["--method", "ott", "--select", "x"], ["select", "x", "smallest", "largest"]),
    (["--method", "skvq", "--clip", "x"], ["clip", "x", "both", "endpoint", "centre", "none"]),
    (["--method", "skvq", "--metadata", "x"], ["metadata", "x", "fp8", "fp16"]),
    (["--method", "skvq", "--reorder", "maybe"], ["reorder", "maybe", "on", "off"]),
    (["--method", "skvq", "--rope", "x"], ["rope", "x", "pre", "post"]),
    (["--method", "skvq", "--block", "0"], ["block", "0"]),
    (["--method", "skvq", "--preserve", "-1"], ["preserve", "-1"]),
    (["--method", "skvq", "--group-size", "24"], ["24"]),
    (["--method", "fp16,skvq", "--group-size", "24"], ["24", "64"]),
    (["--method", "fp16,skvq", "--group-size", "128"], ["128", "64"]),
    (["--method", "fp16,skvq", "--bits", "9"], ["bits", "9"]),
    (["--method", "fp16,skvq", "--bits", "2.5"], ["bits", "2.5"]),
    (["--method", "kvquant", "--outliers", "60"], ["outliers", "60", "50"]),
    (["--method", "kvquant", "--outliers", "-1"], ["outliers", "-1"]),
    (["--method", "kvquant", "--outliers", "nan"], ["outliers", "nan"]),
    (["--method", "kvquant", "--sensitivity", "x"], ["sensitivity", "x", "fisher-range", "fisher", "none"]),
    (["--method", "kvquant", "--q-norm", "x"], ["q norm", "x", "on", "off"]),
    (["--method", "kvquant", "--rope", "x"], ["rope", "x", "pre", "post"]),
    (["--method", "kvquant", "--preserve", "-1"], ["preserve", "-1"]),
    (["--method", "kvquant", "--bits", "1.5"], ["bits", "1.5"]),
    (["--method", "fp16,kvquant", "--bits", "1.5"], ["bits", "1.5"]),
    (["--method", "fp16,kvquant", "--bits", "9"], ["bits", "9"]),
    (["--method", "rtn", "--scheme", "kvquant", "--k-bits", "2.5"], ["bits", "2.5"]),
    (["--method", "rtn", "--bits", "2,9"], ["bits", "9"]),
    (["--method", "rtn", "--bits", "inf"], ["bits", "inf"]),
    (["--method", "rtn", "--bits", "nan"], ["bits", "nan"]),
    (["--method", "fp16,skvq", "--bits", "inf"], ["bits", "inf"]),
    (["--method", "fp16,kvquant", "--bits", "nan"], ["bits", "nan"]),
    (["--method", "pfn", "--preserve", "5,-1"], ["preserve", "-1"]),
    (["--method", "pfn", "--scheme", "channel-static,kvqant"], ["kvqant", "kvquant", "token-static"]),
    (["--method", "kivi", "--scheme", "token-static"], ["--scheme", "kivi"]),  # rtn, beside it, takes one
    (["--method", "kivi,ott", "--preserve", "5"], ["--preserve", "kivi", "ott"]),
    (["--method", "rtn", "--outliers", "1"], ["--outliers", "rtn"]),  # not a setting of its scheme
    (["--method", "pfn,kvsink", "--outliers", "0,1", "--scheme", "token-static"], ["--outliers", "pfn", "kvsink"]),
    (["--method", "kvsink", "--scheme", "kvquant", "--group-size", "32"], ["--group-size", "kvsink"]),
    (["--method", "skvq", "--formula", "offset"], ["--formula", "skvq"]),
    (["--method", "kvquant", "--emergence-layer", "1,2"], ["--emergence-layer", "kvquant"]),
    (["--device", "cuda:9"], ["cuda:9"]),
    (["--device", "toaster"], ["toaster"]),
])
def test_bad_input_is_one_clear_line(command, monkeypatch, words, named):
    monkeypatch.chdir(ROOT)
    small = [w for pair in zip(SMALL[::2], SMALL[1::2]) if pair[0] not in words for w in pair]
    line = refused(command, *words, *small)
    for name in named:
        assert name in line, line


@pytest.mark.parametrize("words", [["--bits", "two"], ["--preserve", "1.5"], ["--preserve", "0,5,"], ["--bits", ""],
                                   ["--outliers", "1%"], ["--context", "many"], ["--protocol", "quick"]])
def test_words_where_numbers_belong(command, words):
    assert f"argument {words[0]}: " in refused(command, "--method", "pfn", *words)


MINE = """
import torch
from tinykv.codecs import Pair
from tinykv.codecs.base import Codec, Codes
from tinykv.methods.base import CodecMethod, Method

class Every(CodecMethod):
    def __init__(self, config, every=100, word="a", **scheme):
        super().__init__(config, **scheme)
        self.every, self.preserve = every, every

    def keep_keys(self, layer_cache, n):
        positions = torch.arange(0, layer_cache.length, self.every)
        return positions.expand(len(layer_cache.keys.recent), 1, -1)

class Listed(CodecMethod):
    def keep_keys(self, layer_cache, n):
        return [0, 1]

class Mask(CodecMethod):
    def keep_keys(self, layer_cache, n):
        return torch.ones(len(layer_cache.keys.recent), 1, layer_cache.length, dtype=torch.bool)

class Half(Codec):
    def encode(self, x, ignore=None):
        return Codes((x / 2).round())

    def decode(self, codes):
        return codes.packed * 2

class Halves(Method):
    block = 16

    def __init__(self, config):
        self.codecs = [Pair(Half(), Half()) for _ in range(config.num_hidden_layers)]
"""


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    return str(tmp_path / "mine.py")


def test_a_setting_of_ones_own_is_a_flag(command, mine):
    small = [*SMALL, "--scheme", "token-dynamic"]
    status, out, _ = command("--method", f"{mine}:Every", "--every", "10,50", *small)
    rows = table(out)
    assert status == 0 and [row["keep"] for row in rows.values()] == ["0", "10", "50"]
    assert f"{mine}:Every every=10" in rows
    assert "'x'" in refused(command, "--method", f"{mine}:Every", "--every", "x", *small)
    assert "--every" in refused(command, "--method", "rtn", "--every", "10", *small)


@pytest.mark.parametrize("protocol", ["paper", "stream"])
def test_a_method_that_is_written_by_hand(command, mine, protocol):
    """Nothing but a codec: the table says 16 bits, as it was not told otherwise."""
    status, out, _ = command("--method", f"{mine}:Halves", "--protocol", protocol, *SMALL)
    rows = table(out)
    assert status == 0 and rows[f"{mine}:Halves"]["bits"] == "16" and float(rows[f"{mine}:Halves"]["delta"]) > 0


@pytest.mark.parametrize("name, found", [("Listed", "class 'list'"), ("Mask", "torch.bool")])
def test_what_keep_may_not_give_is_named(command, mine, name, found):
    line = refused(command, "--method", f"{mine}:{name}", "--scheme", "token-dynamic", *SMALL)
    assert f"`keep_keys` and `keep_values` of {name}" in line and found in line and "(B, 1 or Hkv, p)" in line


@pytest.mark.parametrize("text, words", [("def f(:\n", ["line 1", "SyntaxError"]),
                                         ("\n1 / 0\n", ["line 2", "ZeroDivision"]),
                                         ("import nothere\n", ["line 1", "No module named 'nothere'"])])
def test_a_file_that_cannot_be_imported(command, tmp_path, text, words):
    (tmp_path / "broken.py").write_text(text)
    line = refused(command, "--method", f"{tmp_path / 'broken.py'}:X", *SMALL)
    assert all(word in line for word in ["broken.py", *words]), line


def test_a_file_imports_from_beside_it(command, tmp_path):
    (tmp_path / "beside_it.py").write_text("from tinykv.methods.rtn import RTN\n")
    (tmp_path / "method.py").write_text("from beside_it import RTN as Mine\n")
    status, out, _ = command("--method", f"{tmp_path / 'method.py'}:Mine", "--scheme", "token-dynamic", *SMALL)
    assert status == 0 and len(table(out)) == 2


def test_methods_with_all_and_with_blanks(command):
    status, out, _ = command("--method", "rtn, pfn", "--scheme", "token-dynamic", *SMALL)
    assert status == 0 and list(table(out)) == ["fp16", "rtn", "pfn"]


@pytest.mark.parametrize("flag", ["--json", "--calibration", "--plot"])
def test_a_folder_in_the_place_of_a_file(command, tmp_path, flag):
    """Before anything is computed."""
    folder = tmp_path / "folder.png"
    folder.mkdir()
    for path in (str(folder), ""):
        line = refused(command, "--method", "rtn", flag, path, *SMALL)
        assert flag in line and ("folder" in line or "png" in line)


@pytest.mark.whole  # a process of its own
def test_a_pipe_that_is_closed_says_nothing():
    done = subprocess.run(f"{sys.executable} eval_ppl.py --list-methods | head -1; echo $? >&2", shell=True, cwd=ROOT,
                          capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == "0" and "Traceback" not in done.stderr and len(done.stdout.splitlines()) == 1


def test_what_is_one_process_refuses_torchrun(capsys, monkeypatch, tmp_path):
    """Each rank would train the same prefix, and write the same file."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    line = refused(partial(run, train_intact, capsys, monkeypatch), "--out", tmp_path / "x.safetensors")
    assert "without torchrun" in line and not list(tmp_path.iterdir())


def test_ctrl_c_is_one_line(command, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt
    monkeypatch.setattr(eval_ppl, "run", stop)
    status, _, err = command("--method", "rtn")
    assert status == 130 and err == "\neval_ppl.py: stopped\n"


@pytest.mark.parametrize("command", ["eval_ppl.py", "train_intact.py", "-m tinykv.analysis"])
def test_ctrl_c_while_torch_is_imported(tmp_path, command):
    """One that takes a minute to import."""
    (tmp_path / "torch.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    process = subprocess.Popen([sys.executable, *command.split()], cwd=ROOT, stdout=subprocess.PIPE, text=True,
                               stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(tmp_path)},
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130 and err == f"\n{'python ' if '-m' in command else ''}{command}: stopped\n"


@pytest.mark.whole  # a process of its own
def test_ctrl_c_later_on():
    """While it evaluates: the same line, after the handlers of a Ctrl-C have run."""
    process = subprocess.Popen([sys.executable, "eval_ppl.py", "--windows", "100000"], cwd=ROOT, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    time.sleep(8)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and err == "\neval_ppl.py: stopped\n"


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
    shutil.copytree(EMBEDDED, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert "model.safetensors" in refused(command, "--model", str(folder), *SMALL)


@pytest.mark.whole  # a process of its own, of which test_docs has others
def test_as_a_process():
    """Through the real command line, where stderr is no terminal: no bar, no traceback, status 2."""
    done = subprocess.run([sys.executable, "eval_ppl.py", "--method", "rnt"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "rnt" in done.stderr and done.stdout == ""


def test_triton_without_a_gpu_says_what_is_missing(command, monkeypatch):
    kernels = pytest.importorskip("kernels", reason="needs triton")
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    err = refused(command, "--attention", "triton", "--device", "cpu", *SMALL)
    assert "needs a GPU" in err and "--attention fused" in err


def test_triton_that_is_not_installed_is_named(command, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else find_spec(name))
    assert "needs the package triton" in refused(command, "--attention", "triton", *SMALL)


@pytest.mark.parametrize("attention", ["plain", pytest.param("triton", marks=pytest.mark.whole)])
def test_every_attention_prints_the_same_table(command, attention):
    if attention == "triton":
        pytest.importorskip("kernels", reason="needs triton")
    words = ["--method", "kivi", "--context", "48", "--windows", "1", "--group-size", "16", "--recent", "8",
             "--protocol", "stream"]
    fused, other = (table(command(*words, "--attention", word)[1]) for word in ("fused", attention))
    for label in fused:
        assert fused[label]["cache KB"] == other[label]["cache KB"]
        assert abs(float(fused[label]["ppl"]) / float(other[label]["ppl"]) - 1) < 0.02


@pytest.mark.whole  # a process of its own
def test_triton_is_imported_only_where_it_is_asked_for():
    code = "import sys, eval_ppl; sys.exit('triton' in sys.modules or 'kernels' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


# ---- no traceback, by class

OWN = """
from tinykv.methods.rtn import RTN

class Needs(RTN):
    def __init__(self, config, amount, **settings):
        super().__init__(config, **settings)

class Seed(RTN):
    def __init__(self, config, seed=1, **settings):
        super().__init__(config, **settings)

class Stars(RTN):
    def __init__(self, config, *more):
        super().__init__(config, scheme="token-dynamic")

class Raises(RTN):
    def __init__(self, config):
        super().__init__(config, scheme="token-dynamic")
    def begin(self, cache):
        return {}["no"]

class Exits(Raises):
    def begin(self, cache):
        raise SystemExit(0)

class Constructor(RTN):
    def __init__(self, config):
        1 / 0
"""


@pytest.mark.parametrize("name, words", [
    ("Needs", ["--amount", "no default"]), ("Seed", ["--seed", "another name"]),
    ("Raises", ["own.py", "line 20", "begin", "KeyError"]), ("Exits", ["own.py", "line 24", "SystemExit"]),
    ("Constructor", ["own.py", "line 28", "ZeroDivisionError"])])
def test_what_a_file_of_ones_own_raises_is_one_line(command, tmp_path, name, words):
    (tmp_path / "own.py").write_text(OWN)
    line = refused(command, "--method", f"{tmp_path / 'own.py'}:{name}", *SMALL)
    assert all(word in line for word in words), line


def test_arguments_without_names_are_no_settings(command, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    assert command("--method", f"{tmp_path / 'own.py'}:Stars", *SMALL)[0] == 0


def test_a_file_that_exits(command, tmp_path):
    (tmp_path / "exits.py").write_text("import sys\nsys.exit()\n")
    assert "line 2: SystemExit" in refused(command, "--method", f"{tmp_path / 'exits.py'}:X", *SMALL)


@pytest.mark.parametrize("words", [
    ["--anchors", "1/0%"], ["--anchors", "1e99999999%"], ["--vq", "d" + "9" * 5000 + "m2"], ["--recent", "9" * 30],
    ["--device", "meta"], ["--windows", "9" * 30], ["--seed", "9" * 30], ["--model", "x" * 5000],
    ["--data", "x" * 5000], ["--json", "x" * 5000], ["--calibration", "nul\0"], ["--data", "nul\0"]])
def test_far_too_much_is_refused_at_once(command, words):
    line = refused(command, "--method", "antkv", *SMALL, *words)
    assert len(line) < 6000


@pytest.mark.whole  # a process of its own
def test_a_name_that_stdout_cannot_print(tmp_path):
    """A file name that is not UTF-8, and a terminal that knows ASCII only."""
    data = tmp_path / "Bücher\udc80.txt"
    data.write_text("Balo lives in Eastwick. " * 100)
    done = subprocess.run([sys.executable, "eval_ppl.py", "--method", "fp16", "--data", str(data), *SMALL], cwd=ROOT,
                          capture_output=True, text=True, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, "") and "B\\xfccher" in done.stdout


@pytest.mark.whole  # a process of its own
def test_a_stdout_that_is_closed():
    done = subprocess.run(f"{sys.executable} eval_ppl.py --list-methods >&-", shell=True, cwd=ROOT,
                          capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("asked, meant", [
    ("--method kvsnik", "kvsink"), ("--method KIVI", "kivi"), ("--method rnt", "rtn"), ("--presreve 5", "--preserve"),
    ("--Preserve=5", "--preserve"), ("--group_size 5", "--group-size"), ("--protocol Strem", "stream"),
    ("--dtype FP61", "fp16"), ("--scheme kvqant", "kvquant"), ("--method skvq --reorder On", "on"),
    ("--weights AQW", "awq"), ("--data wikitxt2", "wikitext2"), ("--attention fuse", "fused")])
def test_what_is_misspelt_is_guessed(command, asked, meant):
    assert f"did you mean {meant}?" in refused(command, *SMALL, *asked.split())


@pytest.mark.parametrize("module, words", [(train_intact, ["--out", "x.safetensors", "--acumulate", "2"]),
                                           (analysis, ["norms", "--treshold", "0.1"]), (analysis, ["Nroms"])])
def test_on_the_other_commands_too(capsys, monkeypatch, module, words):
    status, _, err = run(module, capsys, monkeypatch, *words)
    assert status == 2 and err.count("\n") == 1
    assert re.search("did you mean (--accumulate|--threshold|norms)[?]$", err.strip())


def test_what_is_near_to_nothing_is_not_guessed(command):
    assert "did you mean" not in refused(command, "--xyzzy", "5", *SMALL)


@pytest.mark.parametrize("words, takers", [
    ("--method kivi --preserve 5", "it is one of pfn, kvsink, skvq, kvquant"),
    ("--method rtn --outliers 1", "it is one of kvquant, and of rtn, pfn, kvsink under --scheme kvquant"),
    ("--method fp16 --bits 3", "it is one of rtn, pfn, kvsink, kivi, ott, skvq, intactkv, kvquant, cq, antkv")])
def test_a_refused_setting_says_who_takes_it(command, words, takers):
    assert refused(command, *SMALL, *words.split()).strip().endswith(takers)


def test_help_says_which_flag_of_bits_goes_before(command):
    status, out, _ = command("--help")
    assert status == 0 and "--k-bits and --v-bits go before it" in " ".join(out.split())


def test_a_file_without_a_class_lists_its_classes(command, mine):
    line = refused(command, "--method", mine, *SMALL)
    assert "Every" in line and "Halves" in line


# ---- on a narrow terminal

HEAD = ["method", "scheme", "ppl", "delta", "s"]
LINES = [["fp16", "-", "6.125", "+0.000", "0.1"], ["kvsink", "channel-static", "6.25", "+0.125", "0.25"]]


@pytest.mark.parametrize("room, shown, hidden", [
    (1000, HEAD, []), (43, HEAD, []), (42, ["method", "ppl", "delta", "s"], ["scheme"]),
    (27, ["method", "ppl", "delta", "s"], ["scheme"]), (26, ["method", "ppl", "delta"], ["scheme", "s"]),
    (1, ["method"], ["scheme", "ppl", "delta", "s"])])
def test_columns_in_less_room(capsys, room, shown, hidden):
    """What is printed is the columns asked for, in their order, in no more than this room."""
    print_columns(HEAD, LINES, 2, ["method", "ppl", "delta", "s"], room)
    out = capsys.readouterr().out.splitlines()
    wanted = [[line[HEAD.index(name)] for name in shown] for line in [HEAD, *LINES]]
    assert [line.split() for line in out[:3]] == wanted
    assert max(map(len, out[:3])) <= max(room, 6)
    assert out[3:] == ([f"--wide or --json has {', '.join(hidden)}, too"] if hidden else [])


def on_a_terminal(columns, *words):
    """What the command prints where stdout is a terminal of so many columns."""
    pty, fcntl, struct, termios = map(pytest.importorskip, ("pty", "fcntl", "struct", "termios"))
    mine, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    env = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    done = subprocess.Popen([sys.executable, "eval_ppl.py", "--method", "rtn", "--scheme", "token-dynamic", *words,
                             *SMALL], cwd=ROOT, stdout=its, stderr=subprocess.DEVNULL, env=env)
    os.close(its)
    text = b""
    while True:
        try:
            text += os.read(mine, 65536)
        except OSError:  # the other end is closed
            break
    os.close(mine)
    assert done.wait(60) == 0
    return text.decode().replace("\r\n", "\n").split("\n\n")[-1].splitlines()


@pytest.mark.whole  # three processes
def test_a_narrow_terminal_has_the_columns_that_matter():
    narrow = on_a_terminal(80)
    assert {"method", "keep", "ppl", "delta", "recall", "bits", "true", "s"} <= set(narrow[0].split())
    assert all(len(line) <= 80 for line in narrow) and "--wide or --json" in narrow[-1]
    for wide in (on_a_terminal(200), on_a_terminal(80, "--wide")):
        assert "128K" in wide[0] and len(wide) == len(narrow) - 1 and len(wide[0]) > 80


def test_what_is_no_terminal_has_all_columns(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    assert len(table(command("--method", "fp16", *SMALL)[1])["fp16"]) == 14


# ---- the number of calibration windows, and tables at equal true bits

def test_each_method_sees_the_windows_that_it_asks_for(command, monkeypatch, tmp_path):
    """By default cq with weights 64, without them 16, and rtn 16: the first ones of the same text."""
    seen = {}

    def note(model, method, windows, progress=None):
        seen[type(method).__name__, method.codecs[0].k.__dict__.get("sensitivity")] = windows
        return calibrate(model, method, windows[:2].repeat(20, 1), progress)

    monkeypatch.setattr(eval_ppl, "calibrate", note)
    words = ["--method", "rtn,cq", "--vq", "d2m8", "--sensitivity", "none,token", "--context", "32", "--windows", "1"]
    assert command(*words, "--calibration", str(tmp_path / "tables"))[0] == 0
    sizes = {name: len(windows) for name, windows in seen.items()}
    assert sizes == {("RTN", None): 16, ("CQ", "none"): 16, ("CQ", "token"): 64}
    assert all(windows.equal(seen["CQ", "token"][:len(windows)]) for windows in seen.values())
    # what is asked for goes before; of the file, what was calibrated on as many is read again
    seen.clear()
    words += ["--calib-windows", "16", "--calibration", str(tmp_path / "tables")]
    assert command(*words)[0] == 0 and {name: len(windows) for name, windows in seen.items()} == {("CQ", "token"): 16}


def test_methods_at_equal_true_bits():
    def row(label, bits, ppl, kld, tables):
        return {"label": label, "weights": None, "bits_true": bits, "ppl": ppl, "kld": kld, "offline_bytes": tables}

    rows = [row("fp16", 16.0, 2.0, 0.0, 0), row("a vq=d8m256 x=1", 1.0, 4.0, 0.4, 1024),
            row("a vq=d4m256 x=1", 2.0, 2.5, 0.1, 2048), row("a vq=d2m256 x=1", 4.0, 2.1, 0.02, 4096),
            row("a vq=d8m256 x=2", 1.5, 3.0, 0.3, 1024), row("b bits=3", 3.0, 2.2, 0.05, 0)]
    by_label = {found["label"]: found for found in at_bits(rows, 1.5)}
    assert by_label.keys() == {"a x=1", "a x=2"}
    one = by_label["a x=1"]
    assert one["ppl"] == pytest.approx((4.0 * 2.5) ** 0.5) and one["kld"] == pytest.approx(0.25)
    assert one["between"] == (1.0, 2.0) and one["tables"] == (1024, 2048)
    assert by_label["a x=2"]["ppl"] == pytest.approx(3.0)
    assert {found["label"] for found in at_bits(rows, 3.0)} == {"a x=1", "b"}
    assert at_bits(rows, 5.0) == []


def test_a_table_at_equal_true_bits_is_printed_last(command):
    status, out, _ = command("--method", "rtn,pfn", "--preserve", "1", "--bits", "2,4", "--at-bits", "3", *SMALL)
    head, *lines = out.split("\n\n")[-1].splitlines()
    assert status == 0 and head.split() == "at 3 true bits ppl delta KL from to tables KB to".split()
    assert [line.split()[0] for line in lines] == ["rtn", "pfn"] and lines[0].split()[4:6] == ["2.00", "4.00"]
    _, out, _ = command("--method", "rtn", "--at-bits", "3", *SMALL)
    assert "no method has rows on both sides of 3 true bits" in out
