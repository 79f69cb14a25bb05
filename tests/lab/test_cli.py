"""The command as a user meets it: the table, the JSON, and one clear line for what is wrong."""
import json
import math
import re
import sys
from functools import partial
from pathlib import Path
from unittest.mock import DEFAULT, Mock

import pytest
import torch

import eval_ppl
from tinykv import hf
from tinykv.calibrate import calibrate
from tinykv.codecs.affine import Affine
from tinykv.codecs.schemes import SCHEMES
from tinykv.evaluate import measure
from tinykv.hf import EMBEDDED
from tinykv.lab import shared_flags, tables
from tinykv.lab.data import load_windows
from tinykv.lab.differences import delta_error, paired
from tinykv.lab.run import calibration, flags
from tinykv.lab.run.entries import build_entries
from tinykv.lab.run.settings import flags_of, settings_of
from tinykv.lab.weights import QUANTIZERS
from tinykv.methods.registry import METHODS

ROOT = Path(__file__).parents[2]
SMALL = ["--context", "32", "--windows", "2", "--calib-windows", "2"]
GPTQ = dict(weights="gptq", w_bits=2, context=32, windows=2, calib_windows=1)
COLUMNS = ["method", "scheme", "keep", "ppl", "delta", "+-", "answers", "true"]  # by default


def refused(command, *words):
    """The one line with which the command refuses."""
    status, _, err = command(*words)
    err = re.sub("^(calibrating|evaluating|quantizing weights) .*\n", "", err, flags=re.MULTILINE)
    assert status == 2 and err.count("\n") == 1 and re.match(r"(\w+\.py|python -m [\w.]+): error: ", err), (status, err)
    return err


def cells(out):
    """The words of the last table that is printed, whose columns are at least two blanks apart, by line."""
    return [re.split(" {2,}", line.strip()) for line in out.split("\n\n")[-1].splitlines() if "  " in line]


def table(out):
    """{label: {column: text}} of the printed table."""
    head, *lines = cells(out)
    assert all(len(line) == len(head) for line in lines) and len({line[0] for line in lines}) == len(lines)
    return {line[0]: dict(zip(head, line)) for line in lines}


def entries_of(words):
    """The entries that a command line asks for, without a model: {title: Entry}."""
    return build_entries(flags.parse(words.split()), hf.load_config(EMBEDDED), None)[0]


# ---- the table

def test_kvsink_is_shown_beside_what_it_is_compared_with(command):
    status, out, err = command("--model", EMBEDDED, "--method", "kvsink", *SMALL)
    rows = table(out)
    assert status == 0 and list(rows) == ["fp16", "rtn", "pfn", "kvsink"]
    assert rows["fp16"]["delta"] == "+0.000" and rows["kvsink"]["keep"] == rows["pfn"]["keep"] == "5"
    assert "kvsink: emergence layer" in out
    # no bar where nobody watches, but a line a step
    assert err.splitlines() == ["calibrating rtn, pfn, kvsink"] + [f"evaluating {name}" for name in rows]
    assert "kivi: group_size=128, recent=32, as the method" in command("--method", "ott", *SMALL)[1]


def test_json_has_the_table_and_the_table_fits_80_columns(rows_of, tmp_path):
    status, out, rows = rows_of("--method", "all", "--bits", "3", "--preserve", "2", "--protocol", "stream",
                                "--seed", "3", *SMALL)
    assert status == 0 and all(len(line) <= 80 for line in out.split("\n\n")[-1].splitlines() if "  " in line)
    assert list(table(out)["fp16"]) == COLUMNS
    assert "cq is left out: " in out and "antkv is left out: " in out  # the paper has no format of 3 bits
    keep_none = [name for name, cls in METHODS.items() if "preserve" not in settings_of(cls)]
    assert re.search(f"^--preserve is left out: no setting of {', '.join(keep_none)} as asked for$", out, re.M)
    written = json.loads((tmp_path / "rows.json").read_text())
    assert (written["context"], written["windows"], written["seed"]) == (32, 2, 3)
    assert rows["kvsink"]["preserve"] == 2 and rows["kvsink"]["k_bits"] == 3 and rows["rtn"]["protocol"] == "stream"
    assert f"{rows['pfn']['ppl']:.3f}" == table(out)["pfn"]["ppl"]


@pytest.mark.parametrize("words, heading, chosen", [
    (["--prompt", "16", "--choose", "always,prompt"], "protocol paper, prompt 16",
     {"kvsink choose=always": "always", "kvsink choose=prompt": "prompt"}),
    (["--protocol", "stream"], "protocol stream, seed 0", {"kvsink": "always"})])
def test_every_table_says_when_tokens_are_chosen(rows_of, words, heading, chosen):
    _, out, rows = rows_of("--method", "kvsink", *words, *SMALL)
    said = dict(re.findall("^(kvsink.*): .*chosen (once)?", out, re.M))
    assert heading in out and ("prompt: the first 16 tokens of every window" in out) == ("--prompt" in words)
    assert {label: "prompt" if once else "always" for label, once in said.items()} == chosen
    assert {label: row["choose"] for label, row in rows.items() if row["choose"]} == chosen


def test_wide_has_all_columns(rows_of):
    _, out, rows = rows_of("--method", "rtn", "--k-bits", "4", "--v-bits", "1.5", "--scheme", "token-dynamic", "--wide",
                           *SMALL, "--windows", "1")
    row = table(out)["rtn"]
    assert set(COLUMNS) < set(row) and row["bits"] == "4/1.5" and f"{rows['rtn']['kld']:.4f}" == row["KL"]
    assert row["+-"] == "-" and rows["rtn"]["delta_se"] is None  # one window has no spread


def test_same_seed_same_table_other_seed_another(command):
    first, again, other = (table(command("--method", "fp16", "--seed", seed, *SMALL)[1]) for seed in (0, 0, 1))
    assert first == again and first["fp16"]["ppl"] != other["fp16"]["ppl"]


def test_the_method_that_readme_shows(command, tmp_path):
    own = tmp_path / "mine.py"
    own.write_text(re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1])
    status, out, _ = command("--method", f"{own}:Hundredth", "--bits", "2", *SMALL)
    row = table(out)["Hundredth"]
    assert status == 0 and float(row["true"]) > 2 and row["keep"] == "1"


@pytest.mark.parametrize("classes, titles", [
    (["Mine", "Other"], ["Mine", "Other"]), (["pfn", "Mine"], ["{a}:pfn", "Mine"]),
    (["Mine", "Mine"], ["{a}:Mine", "{b}:Mine"])])  # else nobody could tell them apart
def test_a_row_is_titled_by_the_class_where_that_is_clear(tmp_path, classes, titles):
    paths, methods = {"a": tmp_path / "a.py", "b": tmp_path / "b.py"}, ["pfn"]
    for path, cls in zip(paths.values(), classes):
        path.write_text(f"from tinykv.methods.pfn import PFN\n\nclass {cls}(PFN):\n    pass\n")
        methods.append(f"{path}:{cls}")
    assert list(entries_of(f"--method {','.join(methods)}")) == ["fp16", "pfn", *(t.format(**paths) for t in titles)]


def test_list_methods(command):
    status, out, _ = command("--list-methods")
    wanted = [*METHODS, "preserve=5", "outlier_num=3", "v_block", "outliers=1.0", "clip=both", "scheme=channel-static"]
    assert status == 0 and set(wanted) <= set(re.findall("[^ ,\n]+", out))


def test_every_setting_of_every_method_says_what_it_is():
    assert [name for name, (_, help) in flags_of(METHODS).items() if not help.split(": ")[-1]] == []


def test_what_a_method_is_shown_beside_has_settings_for_it():
    found = entries_of("--method ott --recent 16")
    assert list(found) == ["fp16", "kivi", "ott"] and found["kivi"].beside == "group_size=128"
    assert (found["kivi"].settings["group_size"], found["kivi"].settings["recent"]) == (128, 16)
    assert entries_of("--method ott,kivi")["kivi"].settings["group_size"] == 32  # asked for, it is itself
    for cls in METHODS.values():  # by default the same as the method that it is shown beside
        for settings in cls.beside.values():
            assert settings.items() - {("scheme", "token-dynamic")} <= settings_of(cls).items()


# ---- the help

def test_help_has_examples_and_every_setting(command):
    _, out, _ = command("--help")
    examples = re.findall("^    .*eval_ppl.py .*$", eval_ppl.__doc__, re.M)
    assert examples and all(f"\n{example}\n" in out for example in examples)
    assert {f"--{name.replace('_', '-')}" for name in flags_of(METHODS)} <= set(re.findall(r"--[\w-]+", out))


# ---- lists of settings

@pytest.mark.parametrize("words, titles", [
    ("--method kvsink --preserve 2,5 --k-bits 3",
     ["rtn", "pfn preserve=2", "pfn preserve=5", "kvsink preserve=2", "kvsink preserve=5"]),
    ("--method kivi,ott,pfn --outlier-num 1,3", ["kivi", "ott outlier_num=1", "ott outlier_num=3", "pfn"]),
    ("--method rtn,pfn --bits 2,1.5", ["rtn bits=2", "rtn bits=1.5", "pfn bits=2", "pfn bits=1.5"]),
    ("--method pfn,rtn --preserve 1,2 --bits 2,3 --rope pre",
     ["pfn bits=2 preserve=1", "pfn bits=2 preserve=2", "pfn bits=3 preserve=1", "pfn bits=3 preserve=2",
      "rtn bits=2", "rtn bits=3"]),
    ("--method pfn,fp16 --scheme channel-static,kvquant --outliers 0,1",
     ["pfn scheme=channel-static", "pfn scheme=kvquant outliers=0", "pfn scheme=kvquant outliers=1"]),
    ("--method kvquant,skvq --outliers 0.1,1 --clip none", ["kvquant outliers=0.1", "kvquant outliers=1", "skvq"])])
def test_a_list_makes_a_row_of_each_value_for_every_method_that_takes_it(words, titles):
    found = entries_of(words)
    assert list(found) == ["fp16", *titles]
    for title, r in found.items():
        for setting in title.split()[1:]:
            name, _, value = setting.partition("=")
            names = ["k_bits", "v_bits"] if name == "bits" else [name]
            assert {str(r.settings[name]).removesuffix(".0") for name in names} == {value}


def test_bits_of_keys_alone_go_before_those_of_both():
    _, *found = entries_of("--method rtn,kivi --bits 2,3 --k-bits 4").values()
    assert [(r.label, *map(r.method.bits_of, "kv")) for r in found] == [
        ("rtn bits=2", 4, 2), ("rtn bits=3", 4, 3), ("kivi bits=2", 4, 2), ("kivi bits=3", 4, 3)]


# ---- calibrated tables

@pytest.fixture
def kept(tmp_path):
    return tmp_path / "tables"


@pytest.fixture
def calibrated(monkeypatch):
    """The methods that the command calibrates, by the name of their class."""
    def note(model, methods, *more):
        found.extend(type(method).__name__ for method in methods)
        calibrate(model, methods, *more)
    found = []
    monkeypatch.setattr(calibration.calibrate, "calibrate", note)
    return found


def test_calibrated_tables_are_read_again(command, calibrated, kept):
    """For the other protocol, too, and as defaults where they were asked for. What the folder lacks is added: other
    settings, each row of a list by itself, other methods, and other draws."""
    files, printed = {}, {}
    for words, n in (("--preserve 1,5", 2), ("--protocol stream", 2), ("--preserve 4,1", 3), ("--method kvsink,pfn", 4),
                     ("--draws 3", 6), ("--draws 2", 6), ("--draws 3", 6)):
        status, out, _ = command("--method", "pfn,fp16", "--calibration", kept, *SMALL, *words.split())
        before, files = files, {path.name: path.read_bytes() for path in kept.iterdir()}
        assert status == 0 and len(calibrated) == len(files) == n and before.items() <= files.items()
        assert printed.setdefault(words, out) == out
    assert len(set(printed.values())) == len(printed)


def test_what_is_the_users_own_is_calibrated_anew_and_said(monkeypatch, capsys, calibrated, kept, one_layer):
    """A class, a method that was made, a scheme, a patch of the package: whatever was edited, no table is stale."""
    class Own(METHODS["pfn"]):
        __module__ = "__main__"  # of a notebook

    class OwnCodec(Affine):
        pass
    monkeypatch.setitem(SCHEMES, "mine",
                        (lambda config, kind, bits: OwnCodec(bits, config.head_dim, static=True), "post"))
    made = METHODS["pfn"](hf.load_config(one_layer), preserve=3)
    set_range = Affine.set_range
    for method, more in ((Own, {}), (made, {}), ("pfn", {"scheme": "mine"}), ("pfn", {})):
        if not more and method == "pfn":  # as a notebook's cell may
            monkeypatch.setattr(Affine, "set_range", lambda codec, lo, hi: set_range(codec, lo / 2, hi / 2))
        calibrated.clear()
        for n in (1, 2):
            eval_ppl.compare(["fp16", method], one_layer, context=32, windows=1, calib_windows=1, calibration=kept,
                             **more)
            assert len(calibrated) == n
            assert "keeps no tables of code, or of an instance, of your own" in capsys.readouterr().err
        assert not kept.exists()


def test_tables_are_known_by_all_that_made_them(monkeypatch):
    """Windows, the draw, settings, the weights' quantizer and code: equal ones have an equal hash, and no others."""
    a, b = torch.zeros(2, 8), torch.ones(2, 8)
    made = [("pfn", None, a, 0), ("pfn", None, b, 0), ("pfn", None, a, 1), ("kvsink", None, a, 0),
            ("kvsink --emergence-layer 1 --outlier-channel 2", None, a, 0),
            *(("pfn", make(bits), a, 0) for make in QUANTIZERS.values() for bits in (3, 4))]

    def hashes():
        found = []
        for words, quantizer, *of in made:
            *_, entry = entries_of(f"--method fp16,{words}").values()
            entry.quantizer = quantizer
            found.append(calibration.made_of(entry, *of))
        return found
    first = hashes()
    assert len(set(first)) == len(made) and hashes() == first
    monkeypatch.setattr(tables, "PACKAGE", "of an edited file")
    assert set(hashes()).isdisjoint(first)


def test_weights_are_quantized_on_the_text_of_the_first_draw(one_layer):
    """However many draws there are of what methods are calibrated on."""
    one, two = ([row["window_nll"][0] for row in eval_ppl.compare("rtn", one_layer, draws=draws, **GPTQ)
                 if row["weights"]] for draws in (1, 2))
    assert one == two


def test_quantized_weights_are_known_by_the_text_that_they_saw(one_layer, kept, monkeypatch):
    """What the file has of another text is made anew; what it has of this one is not."""
    def losses(data, folder):
        return eval_ppl.compare("fp16", one_layer, calib_data=data, calibration=folder, **GPTQ)[-1]["window_nll"]
    assert losses("tales", kept) != losses("fables", kept) == losses("fables", None)
    monkeypatch.setattr(calibration, "quantize", Mock(side_effect=AssertionError("quantized again")))
    losses("fables", kept)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_the_label_of_weights_says_which_text_they_saw(name):
    """All of it. By the label a trained prefix knows them."""
    quantizer, texts = QUANTIZERS[name](3), [torch.tensor(ids) for ids in ([[12]], [[13]], [[12], [13]], [[12], [14]])]
    labels = {calibration.weights_label(f"{name}-3", quantizer, "tales", windows) for windows in texts}
    assert len(labels) == (4 if quantizer.needs_text else 1) and all(label.startswith(f"{name}-3") for label in labels)
    assert calibration.weights_label(None, None, "tales", None) == "full precision"


# ---- what is wrong

def test_half_of_a_file_is_read_also_where_calibration_has_another(rows_of, command, tmp_path, monkeypatch):
    """So rows of both are pairs. `--windows all` reads each window once."""
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("".join(f"{n * n} " for n in range(300)))
    words = "--method", "fp16,rtn", "--scheme", "token-dynamic", "--data", "a.txt", "--context", 64
    (status, out, half), (_, _, other) = (rows_of(*words, "--windows", "all", *more)
                                          for more in ([], ["--calib-data", "fables"]))
    n = half["rtn"]["windows"]
    assert status == 0 and f"data a.txt: {n} windows of 64 tokens" in out
    assert table(out)["fp16"]["answers"] == "-"  # it asks nothing
    assert n > 2 and other["rtn"]["window_nll"] == half["rtn"]["window_nll"]
    assert half["rtn"]["window_nll"] == rows_of(*words, "--windows", n)[2]["rtn"]["window_nll"]
    assert f"{n + 1} windows need" in refused(command, *words, "--windows", n + 1)


def test_calibration_sees_no_text_of_the_test(command, monkeypatch, tmp_path):
    """Whatever its file is called."""
    monkeypatch.chdir(tmp_path)
    numbers = [f"{n * n} " for n in range(2000)]
    texts = {"a": numbers[:300], "copy": ["A copy. ", *numbers[:300]], "other": numbers[1000:],
             "more": numbers[1000:] + numbers[:4]}  # few tokens are no text
    for name, words in texts.items():
        Path(name).write_text("".join(words))
    words = "--method", "fp16,rtn", "--data", "a", "--context", 64, "--windows", 12, "--calib-windows", 12
    for same in ("a", "copy"):
        assert "holds text of the test" in refused(command, *words, "--calib-data", same), same
    for more in [], ["--calib-data", "other"], ["--calib-data", "more"]:
        assert command(*words, *more)[0] == 0


def test_windows_to_calibrate_on_have_a_length_of_their_own(rows_of, kept):
    """And tables are kept by it."""
    found = []
    for words in ([], ["--calib-context", 32], ["--calib-context", 64], ["--calib-context", 64]):
        _, _, rows = rows_of("--method", "rtn", *SMALL, "--calibration", kept, *words)
        found.append((rows["rtn"]["ppl"], len(list(kept.iterdir()))))
    assert found[0] == found[1] != found[2] == found[3] and [n for _, n in found] == [1, 1, 2, 2]


def test_the_prediction_after_a_given_bos_does_not_count(rows_of, one_layer):
    _, out, rows = rows_of("--method", "fp16,rtn", "--scheme", "token-dynamic", "--bos", "given", *SMALL)
    model, tokenizer = hf.load(one_layer)
    windows = load_windows("tales", tokenizer, 32, 2, bos="given")
    assert windows.start == 2 and "bos given: the first 2 tokens of every window, which are not predicted" in out
    assert rows["fp16"]["window_nll"] == [measure(model, METHODS["fp16"](model.config), windows, batch=2).nll]


@pytest.mark.parametrize("bos", ["replace", "none"])
def test_windows_to_calibrate_on_begin_as_those_of_the_test(one_layer, bos):
    args = flags.set_up(flags.parse(["--context=64", "--seed=3", f"--bos={bos}"]), hf.load(one_layer))
    windows = shared_flags.calibration_text(args, 4)
    assert len(shared_flags.calibration_text(args)) == 16
    assert windows.equal(load_windows("tales", args.tokenizer, 64, 4, "calibration", 3, bos).tokens)
    assert (windows[:, 0] == args.tokenizer.bos_id).all() == (bos == "replace")


@pytest.mark.parametrize("context, said", [(128, True), (130, False)])
def test_a_row_whose_codes_no_query_reads_says_so(command, context, said):
    """The first block of 128 tokens is quantized after the last of them has been read."""
    _, out, _ = command("--model", EMBEDDED, "--method", "rtn", "--scheme", "token-dynamic", "--protocol", "stream",
                        "--windows", "1", "--context", context)
    assert (table(out)["rtn"]["delta"] == "+0.000") == said
    assert ("rtn: in windows this short no query reads a code" in out) == said and "fp16: in" not in out


def test_a_row_of_16_bits_is_not_said_to_keep_none(command):
    """IntactKV's by default: its BOS is as exact as all other tokens."""
    status, out, _ = command("--method", "intactkv", *SMALL)
    assert status == 0 and table(out)["intactkv"]["keep"] == "1" and "keeps none" not in out


def test_where_the_disk_is_full_the_table_is_printed(command, monkeypatch, tmp_path):
    """And the end says what was not written."""
    monkeypatch.setattr("os.replace", Mock(side_effect=OSError(28, "No space left on device")))
    status, out, err = command("--method", "rtn,pfn", "--calibration", tmp_path / "kept", "--json", tmp_path / "x.json",
                               *SMALL)
    assert status == 2 and list(table(out)) == ["fp16", "rtn", "pfn"] and "failed" not in out
    said = [line for line in err.splitlines() if "cannot be written (No space left on device)" in line]
    assert len(said) == 3 and said[-1].startswith("eval_ppl.py: error: ") and "x.json" in said[-1]


def test_a_package_that_is_missing_is_named(command, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    assert "sentencepiece" in (line := refused(command, *SMALL)) and "pip install -r requirements.txt" in line


OWN = """
from tinykv.methods.base import CodecMethod

class Every(CodecMethod):
    def __init__(self, config, every=100, word="a", **scheme):
        super().__init__(config, **scheme)
        self.every, self.preserve = every, every

class Bad(CodecMethod):
    name = "bad"

    def begin(self, cache):
        return {}["no"]
"""


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    return str(tmp_path / "mine.py")


def test_a_setting_of_ones_own_is_a_flag(command, mine):
    status, out, _ = command("--method", f"{mine}:Every", "--every", "10,30", "--scheme", "token-dynamic", *SMALL)
    rows = table(out)
    assert status == 0 and [row["keep"] for row in rows.values()] == ["0", "10", "30"]
    assert "Every every=10" in rows and "fp16, " not in out
    assert "Every every=10, Every every=30: identical losses" in out  # the class does nothing with it
    assert "Every every=30: the method says that it keeps 30 tokens, and keeps none" in out


@pytest.mark.parametrize("protocol", ["paper", "stream"])
def test_a_method_that_is_written_by_hand(command, protocol):
    """Nothing but a codec: it has the name of its class, and the bits that it claims."""
    path = ROOT / "tests" / "wrong_methods.py"
    status, out, _ = command("--method", f"{path}:Silent", "--wide", "--protocol", protocol, *SMALL)
    row = table(out)["Silent"]
    assert status == 0 and row["bits"] == "16" and float(row["delta"]) != 0


def test_a_method_that_fails_is_a_row_and_the_others_go_on(rows_of, mine):
    """Its row has the name that it gives itself."""
    status, out, rows = rows_of("--method", f"rtn,{mine}:Bad,kivi", "--scheme", "token-dynamic", *SMALL)
    assert status == 1 and {label: bool(row["ppl"]) for label, row in rows.items()} == {
        "fp16": True, "rtn": True, "bad": False, "kivi": True}
    assert rows["bad"]["fault"] == "failed: KeyError: 'no'" and set(rows["bad"]) == set(rows["kivi"])
    printed = out.split("\n\n")[-1]
    assert re.search(r"^bad .* failed ", printed, re.M) and re.search(r"^kivi .*\nbad failed: KeyError", printed, re.M)
    assert "Traceback" in printed and 'return {}["no"]' in printed


def test_work_is_not_lost_where_the_run_ends_early(rows_of, command, calibrated, kept, monkeypatch):
    """Killed in the second draw of the calibration, or while the third method is evaluated."""
    words, methods = ["--method", "rtn,kvsink", "--draws", "2", "--calibration", kept, *SMALL], ["RTN", "KVSink"]
    with monkeypatch.context() as patch:
        stopped = Mock(wraps=calibration.calibrate.calibrate, side_effect=[DEFAULT, KeyboardInterrupt])
        patch.setattr(calibration.calibrate, "calibrate", stopped)
        status, out, _ = command(*words)
    assert status == 130 and calibrated == methods
    assert [line.split()[0] for line in out.splitlines()] == ["model", "data", "tales"]  # the heading, before the work
    stopped = Mock(wraps=eval_ppl.measure, side_effect=[*[DEFAULT] * 3, KeyboardInterrupt])
    monkeypatch.setattr(eval_ppl, "measure", stopped)  # once for fp16, and twice for rtn
    status, out, rows = rows_of(*words)
    assert status == 130 and calibrated == methods * 2 and list(table(out)) == list(rows) == ["fp16", "rtn"]


@pytest.mark.parametrize("words", ["--json text.txt", "--plot text.png", "--calibration text.txt",
                                   "--json mine.py --method mine.py:Mine"])
def test_outputs_replace_nothing_that_the_command_did_not_write(command, monkeypatch, tmp_path, words):
    """And the line comes before any work."""
    monkeypatch.chdir(tmp_path)
    files = {"text.txt": "Balo lives in Eastwick.", "text.png": "no picture",
             "mine.py": f"from tinykv.methods.pfn import PFN as Mine{' ' * 5000}"}
    for name, text in files.items():
        Path(name).write_text(text)
    status, out, err = command(*words.split(), *SMALL)
    assert status == 2 and not out and re.search("that this program wrote|give a folder", err)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == files


@pytest.mark.parametrize("plot, begins", [("b.png", b"\x89PNG"), ("b.PDF", b"%PDF"), ("b.svg", b"<?xml")])
def test_a_command_replaces_what_it_wrote(command, tmp_path, plot, begins):
    outputs = ["--json", tmp_path / "a", "--plot", tmp_path / plot, "--calibration", tmp_path / "c"]
    for _ in range(2):
        assert command("--method", "rtn", "--bits", "2,4", *outputs, *SMALL)[0] == 0
        assert (tmp_path / plot).read_bytes().startswith(begins)


@pytest.mark.parametrize("of_others, data, times", [(True, "tales", 2), (True, "tests/lab/prose.txt", 0),
                                                    (False, "tales", 0)])
def test_a_table_says_twice_that_the_text_is_not_the_models(of_others, data, times, one_layer):
    """Above its rows, and below them."""
    model = one_layer if of_others else EMBEDDED
    head, rows = repr(eval_ppl.compare("fp16", model, data=data, context=32, windows=1)).split("\n\n")
    assert [part.count("was written for the embedded model") for part in (head, rows)] == [times // 2] * 2


def test_a_notebook_shows_rows_as_tables_and_draws_them():
    rows = eval_ppl.compare("rtn", bits=[2, 4], vs="fp16", context=32, windows=2, calib_windows=2)
    html = rows._repr_html_()
    assert rows.plot()._repr_png_().startswith(b"\x89PNG")
    for table, printed in zip(re.findall("<table>(<tr>.*?)</table>", html), repr(rows).split("\n\n")[1:], strict=True):
        cells = [re.findall("<td>(.*?)</td>", line) for line in re.findall("<tr>(.*?)</tr>", table)]
        assert len({len(line) for line in cells}) == 1  # of as many columns each
        assert [" ".join(line) for line in cells] == [" ".join(line.split()) for line in printed.splitlines()]
    assert html.startswith("model ") and "windows of 32 tokens" in html
    assert [line.get_label() for line in rows.plot().axes[0].lines] == ["rtn"]


@pytest.mark.parametrize("error, status, said", [
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"), 2, ".*memory"),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), 2, ".*not enough memory"),
    (ModuleNotFoundError("No module named 'triton'", name="triton"), 2, ".*pip install -r .* on Linux"),
    (MemoryError(), 2, ".*memory"), (KeyboardInterrupt(), 130, None)])
def test_what_the_machine_lacks_and_ctrl_c_are_one_line(command, monkeypatch, error, status, said):
    monkeypatch.setattr(eval_ppl, "evaluate", Mock(side_effect=error))
    wanted = rf"eval_ppl\.py: error: {said}.*\n" if said else r"\neval_ppl\.py: stopped\n"
    found, _, err = command("--method", "rtn")
    assert found == status and re.fullmatch(wanted, err), err


def test_triton_without_a_gpu_says_what_is_missing(command, monkeypatch):
    kernels = pytest.importorskip("kernels", reason="needs triton")
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    err = refused(command, "--attention", "triton", "--device", "cpu", *SMALL)
    assert "GPU" in err and "--attention fused" in err


@pytest.mark.parametrize("attention", ["plain", "compiled", pytest.param("triton", marks=pytest.mark.whole)])
def test_every_attention_prints_the_same_table(command, attention):
    if attention == "triton":
        pytest.importorskip("kernels", reason="needs triton")
    words = "--method kivi --context 48 --windows 1 --group-size 16 --recent 8 --protocol stream --attention".split()
    fused, other = (table(command("--model", EMBEDDED, *words, word)[1]) for word in ("fused", attention))
    for label, row in fused.items():
        assert row["true"] == other[label]["true"]
        assert float(row["ppl"]) == pytest.approx(float(other[label]["ppl"]), rel=0.02)


# ---- draws of the calibration

@pytest.fixture(scope="module")
def by_hand(one_layer):
    """{label: a Result of each of two draws} on two windows of 16 tokens, calibrated on two parts of a stream: by
    default on 16 windows, and cq with weights on 64."""
    model, tokenizer = hf.load(one_layer)
    test = load_windows("tales", tokenizer, 16, 2)
    stream = load_windows("tales", tokenizer, 16, 128, "calibration").tokens
    fp16 = measure(model, METHODS["fp16"](model.config), test)
    found = {"fp16": [fp16, fp16]}
    make_cq = partial(METHODS["cq"], vq="d8m4")
    for label, n, make in (("pfn", 16, METHODS["pfn"]),
                           ("cq sensitivity=none", 16, partial(make_cq, sensitivity="none")),
                           ("cq sensitivity=token", 64, partial(make_cq, sensitivity="token"))):
        found[label] = []
        for draw, windows in enumerate([stream[:n], stream[n:2 * n]]):
            calibrate(model, method := make(model.config), windows, seed=draw)
            found[label].append(measure(model, method, test, fp16=fp16))
    return found


@pytest.mark.parametrize("draws", [1, 2])
def test_draws_are_calibrations_by_hand(rows_of, tmp_path, by_hand, draws):
    """On parts of a stream that share no window, as many windows as each method asks for. One draw is the first."""
    status, out, rows = rows_of("--method", "pfn,cq", "--vq", "d8m4", "--sensitivity", "none,token", "--context", "16",
                                "--windows", "2", "--draws", draws, "--vs", "pfn")
    said = ["one calibration: +- and t are over windows",
            "2 calibrations, each on text of its own: means; +- and t are over draws and windows"]
    assert status == 0 and said[draws - 1] in out.splitlines()
    assert json.loads((tmp_path / "rows.json").read_text())["draws"] == draws and rows.keys() == by_hand.keys()
    exact = [fp16.nll for fp16 in by_hand["fp16"][:draws]]
    for name, row in rows.items():
        results = by_hand[name][:draws]
        nll = [result.nll for result in results]
        targets, n = 15, 2 * draws  # targets of a window, windows of all draws
        assert row["window_nll"] == nll
        assert row["window_kl"] == [[kl / targets for kl in result.kl] for result in results]
        assert row["window_nll_along"] == [result.nll_along for result in results]
        assert row["ppl"] == pytest.approx(math.exp(sum(map(sum, nll)) / n), rel=1e-12)
        assert row["delta_ppl"] == row["ppl"] - rows["fp16"]["ppl"]
        assert row["delta_se"] == delta_error(nll, exact)
        assert row["kld"] == pytest.approx(sum(sum(result.kl) for result in results) / (n * targets))
        assert row["top1"] == sum(result.agree for result in results) / (n * targets)
        assert row["bits_true"] == pytest.approx(sum(sum(result.bits) for result in results) / n)
    # --vs: t of the loss and of KL
    difference, error, t, p, better = paired(row["window_nll"], rows["pfn"]["window_nll"])
    _, _, t_of_kl, p_of_kl, _ = paired(row["window_kl"], rows["pfn"]["window_kl"])
    assert cells(out)[-1] == [name, "pfn", f"{row['bits_true'] - rows['pfn']['bits_true']:+.2f}",
                              f"{difference:+.4f}", f"{error:.4f}", f"{t:+.1f}", f"{p:.1g}",
                              f"{t_of_kl:+.1f}", f"{p_of_kl:.1g}", f"{better} of {n}"]


def test_a_draw_that_fails_fails_its_row(rows_of, monkeypatch):
    """And not that of rtn and kvsink, which are calibrated with it, to the same tables as without it."""
    def fail_once(model, methods, windows, progress, seed):
        calibrate(model, methods, windows, progress, seed)
        if seed == 1 and any(type(method).__name__ == "PFN" for method in methods):
            raise KeyError("no")
    *_, without = rows_of("--method", "rtn,kvsink", "--draws", "2", *SMALL)
    monkeypatch.setattr(calibration.calibrate, "calibrate", fail_once)
    status, _, rows = rows_of("--method", "pfn,rtn,kvsink", "--draws", "2", *SMALL)
    assert status == 1 and (rows["pfn"]["ppl"], rows["pfn"]["fault"]) == (None, "failed: KeyError: 'no'")
    for name in ("rtn", "kvsink"):
        assert rows[name]["window_nll"] == without[name]["window_nll"]
