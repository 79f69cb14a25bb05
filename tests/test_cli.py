"""The command as a user meets it: the table, the JSON, and one clear line for what is wrong."""
import json
import math
import os
import re
import resource
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

import eval_ppl
from tinykv import UserError, hf
from tinykv.calibrate import calibrate
from tinykv.codecs import clipped, codebook, nonuniform
from tinykv.data import load_windows
from tinykv.evaluate import delta_error, measure, paired
from tinykv.files import write_json
from tinykv.methods.registry import METHODS
from tinykv.model import Llama, LlamaConfig
from tinykv.run import entries, flags
from tinykv.run import table as table_of_rows
from tinykv.run.cli import EMBEDDED
from tinykv.run.comparisons import at_bits
from tinykv.run.entries import build_entries
from tinykv.run.settings import flags_of, settings_of
from tinykv.weights import QUANTIZERS

ROOT = Path(__file__).parent.parent
SMALL = ["--context", "64", "--windows", "2", "--calib-windows", "2"]
DEFAULT = ["method", "scheme", "keep", "ppl", "delta", "+-", "recall", "true"]  # columns
KEYS = {"label", "method", "settings", "scheme", "k_bits", "v_bits", "preserve", "protocol", "ppl", "delta_ppl",
        "delta_se", "kld", "top1", "recall", "bits_nominal", "bits_true", "bits_128k", "cache_bytes", "tokens_per_s",
        "seconds", "offline_bytes", "windows", "window_nll", "window_kl"}


@pytest.fixture
def command(run):
    return partial(run, eval_ppl)


def refused(command, *words):
    """The one line with which the command refuses."""
    status, _, err = command(*words)
    err = re.sub("^(calibrating|evaluating|quantizing weights) .*\n", "", err, flags=re.MULTILINE)
    assert status == 2 and err.count("\n") == 1 and re.match(r"\w+\.py: error: ", err), (status, err)
    return err


def table(out):
    """{label: {column: text}} of the printed table, whose columns are at least two blanks apart."""
    head, *lines = [re.split(" {2,}", line.strip()) for line in out.split("\n\n")[-1].splitlines()]
    assert all(len(line) == len(head) for line in lines) and len({line[0] for line in lines}) == len(lines)
    return {line[0]: dict(zip(head, line)) for line in lines}


def entries_of(words):
    """The entries that a command line asks for, without a model: {title: Entry}."""
    args = flags.parse(words.split())
    config = hf.load_config(EMBEDDED)
    return build_entries(args, config, None)[0]


# ---- the table

def test_kvsink_is_shown_beside_what_it_is_compared_with(command):
    status, out, err = command("--method", "kvsink", *SMALL)
    rows = table(out)
    assert status == 0 and list(rows) == ["fp16", "rtn", "pfn", "kvsink"]
    assert rows["fp16"]["delta"] == "+0.000" and rows["kvsink"]["keep"] == rows["pfn"]["keep"] == "5"
    assert "kvsink: emergence layer" in out
    # no bar where nobody watches, but a line a step
    steps = ["calibrating rtn", "calibrating pfn", "calibrating kvsink"]
    assert err.splitlines() == steps + [f"evaluating {name}" for name in rows]


def test_the_heading_comes_before_calibration(command, monkeypatch):
    def stop(*_):
        raise UserError("stopped")
    monkeypatch.setattr(eval_ppl, "calibrate_all", stop)
    status, out, _ = command("--method", "pfn", *SMALL)
    assert status == 2 and [line.split()[0] for line in out.splitlines()] == ["model", "data"]


@pytest.mark.parametrize("seconds, said", [(5.9, None), (6.1, "about 2 minutes"), (45, "about 8 minutes")])
def test_a_table_of_minutes_begins_with_an_estimate(command, monkeypatch, seconds, said):
    """Every batch takes so many seconds: two of fp16, and two for each of two calibrations of rtn and of pfn."""
    now = iter(100 + seconds * i for i in range(100))
    monkeypatch.setattr(table_of_rows, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    status, _, err = command("--method", "rtn,pfn", "--draws", "2", "--windows", "4", "--batch", "2", "--context", "64",
                             "--calib-windows", "1")
    lines = err.splitlines()
    at = [i for i, line in enumerate(lines) if "minutes" in line]
    assert status == 0 and at == ([lines.index("evaluating fp16") + 1] if said else [])
    if said:
        assert lines[at[0]].startswith(said) and "calibration is not counted" in lines[at[0]]


def test_json_has_the_table_and_the_table_fits_80_columns(command, tmp_path):
    path = tmp_path / "out.json"
    status, out, _ = command("--method", "all", "--bits", "3", "--preserve", "2", "--protocol", "stream", "--seed", "3",
                             "--json", str(path), *SMALL)
    assert status == 0 and all(len(line) <= 80 for line in out.split("\n\n")[-1].splitlines())
    assert list(table(out)["fp16"]) == DEFAULT
    assert "cq is left out: " in out and "antkv is left out: " in out  # the paper has no format of 3 bits
    assert "--preserve is left out: no setting of fp16, rtn, kivi, ott, intactkv" in out
    written = json.loads(path.read_text())
    assert {"rows", "model", "data", "context", "windows", "seed", "versions"} <= set(written)
    assert (written["context"], written["windows"], written["seed"]) == (64, 2, 3)
    rows = {row["method"]: row for row in written["rows"]}
    assert KEYS <= set(rows["fp16"])
    assert rows["kvsink"]["preserve"] == 2 and rows["kvsink"]["k_bits"] == 3 and rows["rtn"]["protocol"] == "stream"
    assert f"{rows['pfn']['ppl']:.3f}" == table(out)["pfn"]["ppl"]
    assert [len(draw) for draw in rows["pfn"]["window_nll"]] == [2]
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("words, heading, chosen", [
    (["--prompt", "32"], "protocol paper, prompt 32", {"kvsink": "prompt"}),
    (["--prompt", "32", "--choose", "always,prompt", "--protocol", "stream"], "protocol stream, prompt 32",
     {"kvsink choose=always": "always", "kvsink choose=prompt": "prompt"})])
def test_every_table_says_when_tokens_are_chosen(command, tmp_path, words, heading, chosen):
    path = tmp_path / "out.json"
    status, out, _ = command("--method", "kvsink", *words, "--json", str(path), *SMALL)
    rows = {row["label"]: row for row in json.loads(path.read_text())["rows"]}
    assert status == 0 and heading in out
    for label, when in chosen.items():
        said, = re.findall(rf"^{label}: .*chosen (.*)$", out, re.M)
        assert ("once" in said) == (when == "prompt")
        assert rows[label]["choose"] == when and rows[label]["prompt"] == 32
    assert rows["pfn"]["choose"] is None


def test_wide_has_all_columns_and_json_goes_to_stdout(command):
    words = ["--method", "rtn", "--k-bits", "4", "--v-bits", "1.5", "--scheme", "token-dynamic", "--windows", "1",
             "--context", "64", "--json", "-"]
    _, out, _ = command("--wide", *words)
    heading, printed, content = out.split("\n\n")
    row = table(printed)["rtn"]
    assert set(DEFAULT) < set(row) and row["bits"] == "4/1.5"
    content = json.loads(content)["rows"]
    assert f"{content[1]['kld']:.4f}" == row["KL"]
    assert row["+-"] == "-" and content[1]["delta_se"] is None  # one window has no spread


def test_a_plot_of_bits_and_a_plot_of_kept_tokens(command, tmp_path):
    for words in ["--method", "rtn,kivi", "--bits", "2,4"], ["--method", "pfn,fp16,rtn", "--preserve", "1,5,2"]:
        path = tmp_path / "plot.png"
        status, out, _ = command(*words, "--scheme", "token-dynamic", "--plot", str(path), *SMALL)
        assert status == 0 and path.read_bytes().startswith(b"\x89PNG") and out.split("\n\n")[-1].count("=") >= 3
        path.unlink()


def test_rows_are_compared_window_by_window(command):
    _, out, _ = command("--method", "rtn,kivi", "--scheme", "token-dynamic", "--vs", "rtn", *SMALL)
    head, *lines = [re.split(" {2,}", line) for line in out.split("\n\n")[-1].splitlines()]
    assert head == ["method", "vs", "nats a token", "+-", "t", "t of KL", "better on"]
    assert [line[:2] for line in lines] == [["fp16", "rtn"], ["kivi", "rtn"]]
    assert re.fullmatch("[012] of 2", lines[0][6])
    _, out, _ = command("--method", "rtn,pfn", "--scheme", "token-dynamic", "--bits", "3,2", "--vs", "rtn", *SMALL)
    _, *lines = [re.split(" {2,}", line) for line in out.split("\n\n")[-1].splitlines()]
    assert [line[:2] for line in lines] == [["pfn bits=3", "rtn bits=3"], ["pfn bits=2", "rtn bits=2"]]
    assert "--vs kvi" in refused(command, "--method", "rtn", "--vs", "kvi", *SMALL)


def test_same_seed_same_table_other_seed_another(command):
    figures = []
    for seed in ("0", "0", "1"):
        _, out, _ = command("--method", "fp16", "--seed", seed, *SMALL)
        figures.append(table(out)["fp16"]["ppl"])
    assert figures[0] == figures[1] != figures[2]


def test_the_method_that_readme_shows(command, tmp_path):
    own = tmp_path / "mine.py"
    own.write_text(re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1])
    status, out, _ = command("--method", f"{own}:Hundredth", "--bits", "2", *SMALL)
    row = table(out)["Hundredth"]
    assert status == 0 and float(row["true"]) > 2 and row["keep"] == "1"  # of 64 tokens, as the cache counts


@pytest.mark.parametrize("files, classes, titles", [
    (["a", "b"], ["Mine", "Other"], ["Mine", "Other"]),
    (["a", "b"], ["Mine", "Mine"], ["{a}:Mine", "{b}:Mine"]),  # else nobody could tell them apart
    (["a", "b"], ["pfn", "Mine"], ["{a}:pfn", "Mine"])])
def test_a_row_is_titled_by_the_class_where_that_is_clear(tmp_path, files, classes, titles):
    paths = {file: str(tmp_path / f"{file}.py") for file in files}
    for path, cls in zip(paths.values(), classes):
        Path(path).write_text(f"from tinykv.methods.pfn import PFN\n\nclass {cls}(PFN):\n    pass\n")
    methods = [f"{path}:{cls}" for path, cls in zip(paths.values(), classes)]
    entries = entries_of(f"--method pfn,{','.join(methods)}")
    assert list(entries) == ["fp16", "pfn", *[title.format(**paths) for title in titles]]


def test_list_methods(command):
    status, out, _ = command("--list-methods")
    assert status == 0 and all(f"\n{name} " in f"\n{out}" for name in METHODS)
    for setting in ("preserve=5", "outlier_num=3", "v_block", "outliers=1.0", "clip=both", "scheme=channel-static"):
        assert setting in out


def test_every_setting_of_every_method_says_what_it_is():
    for name, (_, _, help) in flags_of(METHODS).items():
        assert help.split(": ")[-1], name


def test_what_a_method_is_shown_beside_has_settings_for_it():
    found = entries_of("--method ott --recent 16")
    assert list(found) == ["fp16", "kivi", "ott"] and found["kivi"].beside == "group_size=128"
    assert (found["kivi"].settings["group_size"], found["kivi"].settings["recent"]) == (128, 16)
    assert entries_of("--method ott,kivi")["kivi"].settings["group_size"] == 32  # asked for, it is itself
    for cls in METHODS.values():  # by default the same as the method that it is shown beside
        for settings in cls.beside.values():
            assert settings.items() - {("scheme", "token-dynamic")} <= settings_of(cls).items()


# ---- the help

def test_help_begins_with_examples_and_the_flags_that_one_needs_first(command):
    _, out, _ = command("--help")
    examples = re.findall("^    .*eval_ppl.py .*$", eval_ppl.__doc__, re.M)
    assert examples and all(f"\n{example}\n" in out for example in examples)
    parts = re.split(r"^[a-z].*:$", out, flags=re.M)[1:]
    groups = [re.findall(r"^  (?:-h, )?(--[\w-]+)", part, re.M) for part in parts]
    assert groups[:2] == [["--help"], ["--method", "--list-methods", "--model", "--device", "--dtype", "--data",
                                       "--context", "--windows", "--calib-windows", "--protocol"]]
    flat = sum(groups, [])
    assert len(groups) == 6 and len(set(flat)) == len(flat) and max(map(len, groups[:-1])) <= 10
    assert {"--" + name.replace("_", "-") for name in flags_of(METHODS)} == set(groups[-1])
    assert re.search(r"--model .*OWNER/NAME", out)


# ---- lists of settings

@pytest.mark.parametrize("words, titles", [
    ("--method pfn --preserve 0,5,10", ["rtn", "pfn preserve=0", "pfn preserve=5", "pfn preserve=10"]),
    ("--method kvsink --preserve 2,5 --k-bits 3",
     ["rtn", "pfn preserve=2", "pfn preserve=5", "kvsink preserve=2", "kvsink preserve=5"]),
    ("--method kivi,ott,pfn --outlier-num 1,3", ["kivi", "ott outlier_num=1", "ott outlier_num=3", "pfn"]),
    ("--method rtn,pfn --bits 2,1.5", ["rtn bits=2", "rtn bits=1.5", "pfn bits=2", "pfn bits=1.5"]),
    ("--method pfn,rtn --preserve 1,2 --bits 2,3 --rope pre",
     ["pfn bits=2 preserve=1", "pfn bits=2 preserve=2", "pfn bits=3 preserve=1", "pfn bits=3 preserve=2",
      "rtn bits=2", "rtn bits=3"]),
    ("--method pfn,fp16 --scheme channel-static,kvquant --outliers 0,1",
     ["pfn scheme=channel-static", "pfn scheme=kvquant outliers=0", "pfn scheme=kvquant outliers=1"]),
    ("--method kvquant,skvq --outliers 0.1,1 --clip none",
     ["kvquant outliers=0.1", "kvquant outliers=1", "skvq"])])
def test_a_list_makes_a_row_of_each_value_for_every_method_that_takes_it(words, titles):
    found = entries_of(words)
    assert list(found) == ["fp16", *titles]
    for title, r in found.items():
        for setting in title.split()[1:]:
            name, _, value = setting.partition("=")
            names = ["k_bits", "v_bits"] if name == "bits" else [name]
            assert all(f"{r.settings[name]:g}" == value if name != "scheme" else r.settings[name] == value
                       for name in names)


def test_bits_of_keys_alone_go_before_those_of_both():
    found = list(entries_of("--method rtn,kivi --bits 2,3 --k-bits 4").values())[1:]
    assert [(r.label, r.method.k_bits, r.method.v_bits) for r in found] == [
        ("rtn bits=2", 4, 2), ("rtn bits=3", 4, 3), ("kivi bits=2", 4, 2), ("kivi bits=3", 4, 3)]


# ---- the calibration file

@pytest.fixture
def kept(tmp_path):
    return tmp_path / "tables.safetensors"


@pytest.fixture
def calibrated(monkeypatch):
    """The methods that the command calibrates, by the name of their class."""
    found = []

    def note(model, method, *more, **seed):
        found.append(type(method).__name__)
        calibrate(model, method, *more, **seed)
    monkeypatch.setattr(entries.calibrate, "calibrate", note)
    return found


def test_calibrated_tables_are_read_again(command, calibrated, kept):
    """For the other protocol, too; what the file lacks is added."""
    words = ["--calibration", str(kept), *SMALL]
    _, out, _ = command("--method", "pfn,kvquant", *words)
    _, again, _ = command("--method", "pfn,kvquant", *words)
    assert calibrated == ["PFN", "KVQuant"] and table(again) == table(out)
    first = load_file(kept)
    assert command("--method", "kvsink,kvquant", "--protocol", "stream", *words)[0] == 0
    both = load_file(kept)
    assert calibrated == ["PFN", "KVQuant", "KVSink"] and not list(kept.parent.glob("*.tmp"))
    assert set(first) < set(both) and all((both[name] == first[name]).all() for name in first)


def test_what_is_asked_for_decides_what_is_calibrated(command, calibrated, kept):
    """Other settings are calibrated anew, each row of a list by itself; a default that is asked for is not."""
    words = ["--calibration", str(kept), *SMALL]
    for asked, n in (["--preserve", "1,5"], 2), (["--preserve", "5"], 2), (["--preserve", "4,1"], 3):
        command("--method", "pfn,fp16", *asked, *words)
        assert len(calibrated) == n


MINE = """
from tinykv.codecs import Pair
from tinykv.methods.base import Method

class Mine(Method):
    def __init__(self, config):
        self.codecs = [Pair(*(Own(2, config.head_dim, "token", None, "offset", True) for _ in "kv"))
                       for _ in range(config.num_hidden_layers)]
"""


def test_tables_of_a_method_are_known_by_its_settings_however_it_was_given(calibrated, kept):
    config, small = hf.load_config(EMBEDDED), {"context": 64, "windows": 2, "calib_windows": 2}
    found = {}
    for preserve in (5, 0, 0):
        row = eval_ppl.compare([METHODS["pfn"](config, preserve=preserve)], calibration=kept, **small)[-1]
        assert found.setdefault(preserve, row["ppl"]) == row["ppl"]
    assert calibrated == ["RTN", "PFN", "PFN"]
    assert found[0] == eval_ppl.compare("pfn", preserve=0, **small)[-1]["ppl"] != found[5]


def test_a_method_that_was_calibrated_on_another_model_is_refused():
    (model, tokenizer), small = hf.load(EMBEDDED), {"context": 64, "windows": 2, "calib_windows": 2}
    method = METHODS["rtn"](model.config)
    calibrate(model, method, torch.arange(128).view(2, 64))
    assert eval_ppl.compare(method, **small)[-1]["ppl"]  # the same weights, loaded again
    model.model["norm"].weight.data[7] += 1
    with pytest.raises(UserError, match="RTN was calibrated on another model"):
        eval_ppl.compare(method, model=(model, tokenizer), **small)


def test_a_class_of_a_notebook_is_calibrated_and_its_tables_are_not_kept(monkeypatch, kept):
    class Cell(METHODS["pfn"]):
        pass
    Cell.__module__, small = "__main__", {"context": 64, "windows": 1, "calib_windows": 1}
    monkeypatch.setitem(sys.modules, "__main__", type(sys)("__main__"))
    assert eval_ppl.compare(Cell, **small)[-1]["fault"] is None
    assert "Cell stands in no file" in eval_ppl.compare(Cell, calibration=kept, **small)[-1]["fault"]


@pytest.mark.parametrize("what", ["text", "seed", "windows", "method", "codec", "helper"])
def test_tables_that_something_else_has_made_are_made_anew(command, calibrated, kept, what):
    """Another content under the same name, or an edited source: the name is not what counts."""
    text, own, codec = (kept.parent / name for name in ("text.txt", "own.py", f"{what}_codec.py"))
    text.write_text("Balo lives in Eastwick. " * 400)
    helper = kept.parent / f"{what}_helper.py"
    helper.write_text("KEEP = 5\n")
    codec.write_text("from tinykv.codecs.affine import Affine\n\nclass Own(Affine):\n    pass\n")
    own.write_text(f"from {what}_codec import Own\nfrom {what}_helper import KEEP\n{MINE}")
    words = {**dict(zip(SMALL[::2], SMALL[1::2])), "--method": f"{own}:Mine", "--calibration": str(kept),
             "--data": "tales" if what == "seed" else str(text)}

    def again():
        for name in ("codec", "helper"):
            sys.modules.pop(f"{what}_{name}", None)
        status, out, _ = command(*(word for pair in words.items() for word in pair))
        assert status == 0
        return table(out)
    assert again() == again() and calibrated == ["Mine"]
    if what == "text":
        text.write_text("Vehul lives in Norton. " * 400)
    elif what in ("seed", "windows"):
        words |= {"seed": {"--seed": "1"}, "windows": {"--calib-windows": "3"}}[what]
    else:
        edited = {"method": own, "codec": codec, "helper": helper}[what]
        edited.write_text(edited.read_text() + "\n# edited\n")
    again()
    assert calibrated == ["Mine", "Mine"]


def test_tables_on_quantized_weights_are_known_by_the_quantizer():
    r, windows = entries_of("--method rtn")["rtn"], torch.zeros(2, 8)
    found = []
    for r.quantizer in (None, *(quantizer(3) for quantizer in QUANTIZERS.values())):
        found.append(r.made_of(r.method, windows))
    assert len(set(found)) == len(found) == 5


def test_a_file_of_another_model_is_refused(command, tmp_path, kept):
    folder = tmp_path / "model"
    shutil.copytree(EMBEDDED, folder)
    words = ["--method", "fp16,rtn", "--calibration", str(kept), "--model", str(folder), *SMALL]
    assert command(*words)[0] == 0
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][7] += 1
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    line = refused(command, *words)
    assert str(kept) in line and "model" in line


# ---- what is wrong

def test_a_file_is_read_as_a_whole_where_calibration_has_another(command, tmp_path):
    """Half of it would be too short."""
    path = tmp_path / "text.txt"
    path.write_text("Vehul Ravfield. Vehul owl. Mara Norton. " * 20)
    words = "--method", "kivi", "--context", "64", "--windows", "4", "--data", str(path)
    assert "windows of 64" in command(*words)[2]
    status, out, _ = command("--calib-data", "fables", *words)
    assert status == 0 and f"data {path}: 4 windows" in out
    assert table(out)["fp16"]["recall"] == "-"  # it asks nothing


@pytest.mark.parametrize("words, named", [
    ("--choose always", ["--choose", "--prompt"]),
    ("--prompt 64", ["--prompt 64", "shorter than a window, 64"]),
    ("--method intactkv --prefix docs/prompt.txt --prompt 9", ["the prefix", "tokens"]),
    ("--method kvsnik", ["kvsnik", "did you mean kvsink?"]),
    ("--metod rtn", ["--metod", "did you mean --method?"]),
    ("--contex=64", ["--contex", "did you mean --context?"]),
    ("--method eval_ppl.py", ["eval_ppl.py:Class"]),  # a file without its class
    ("--method nowhere.py", ["no file nowhere.py"]),
    ("--method pfn --preserve 65", ["pfn keeps 65", "64"]),
    ("--method rtn --preserve 5", ["--preserve", "rtn"]),
    ("--method rtn --bits 2,nan", ["nan"]),
    ("--method rtn --scheme token-static --group-size 24", ["24", "32"]),
    ("--method kvsink --emergence-layer 9 --outlier-channel 1", ["9", "layers"]),
    ("--method pfn --scheme channel-static,kvqant", ["kvqant", "kvquant", "token-static"]),
    ("--method kivi --scheme token-static", ["--scheme", "kivi"]),  # rtn, beside it, takes one
    ("--method rtn --outliers 1", ["--outliers", "rtn"]),  # not a setting of its scheme
    ("--method pfn,kvsink --outliers 0,1 --scheme token-static", ["--outliers", "pfn", "kvsink"]),
    ("--context 2048", ["2048", "1024"]),
    ("--windows 0", ["0"]),
    ("--calib-windows 0", ["0"]),
    ("--batch 0", ["0"]),
    ("--prompt 0", ["--prompt"]),
    ("--at-bits nan", ["--at-bits", "nan"]),
    ("--data nothing.txt", ["nothing.txt", "tales"]),
    ("--model no/folder", ["no/folder"]),
    ("--method nowhere.py:X", ["no file nowhere.py"]),
    ("--method eval_ppl.py:Nothing", ["Nothing", "Method"]),
    ("--json no/such/folder/out.json --method fp16", ["no/such/folder"]),
    (f"--method fp16 --data {'x' * 5000}", ["xxx..."]),
    ("--device cuda:9", ["cuda:9"]),
    ("--bits two --method rtn", ["argument --bits"]),
    ("--data line\nbreak.txt", ["line\\nbreak"]),
])
def test_bad_input_is_one_clear_line(command, monkeypatch, words, named):
    monkeypatch.chdir(ROOT)
    words = words.split(" ")
    small = [w for pair in zip(SMALL[::2], SMALL[1::2]) if pair[0] not in words for w in pair]
    line = refused(command, *words, *small)
    assert len(line) < 1000 and all(name in line for name in named), line


OWN = """
from tinykv.codecs import Pair
from tinykv.codecs.base import Codec, Codes
from tinykv.methods.base import CodecMethod, Method

class Every(CodecMethod):
    def __init__(self, config, every=100, word="a", **scheme):
        super().__init__(config, **scheme)
        self.every, self.preserve = every, every

class Half(Codec):
    def encode(self, x, ignore=None):
        return Codes((x / 2).round())

    def decode(self, codes):
        return codes.packed * 2

class Halves(Method):
    name = "halves"
    block = 16

    def __init__(self, config):
        self.codecs = [Pair(Half(), Half()) for _ in range(config.num_hidden_layers)]

class Bad(Halves):
    name = "bad"

    def begin(self, cache):
        return {}["no"]
"""


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    return str(tmp_path / "mine.py")


def test_a_setting_of_ones_own_is_a_flag(command, mine):
    small = [*SMALL, "--scheme", "token-dynamic"]
    status, out, _ = command("--method", f"{mine}:Every", "--every", "10,50", *small)
    rows = table(out)
    assert status == 0 and [row["keep"] for row in rows.values()] == ["0", "10", "50"]
    assert "Every every=10" in rows
    assert "--every" in refused(command, "--method", f"{mine}:Every", "--every", "x", *small)
    assert "--every" in refused(command, "--method", "rtn", "--every", "10", *small)


@pytest.mark.parametrize("protocol", ["paper", "stream"])
def test_a_method_that_is_written_by_hand(command, mine, protocol):
    """Nothing but a codec: it has the name that it gives itself, and 16 bits, as it was not told otherwise."""
    status, out, _ = command("--method", f"{mine}:Halves", "--wide", "--protocol", protocol, *SMALL)
    row = table(out)["halves"]
    assert status == 0 and row["bits"] == "16" and float(row["delta"]) > 0


def test_a_method_that_fails_is_a_row_and_the_others_go_on(command, mine, tmp_path):
    path = tmp_path / "o.json"
    words = ["--method", f"rtn,{mine}:Bad,kivi", "--scheme", "token-dynamic", "--json", str(path)]
    status, out, _ = command(*words, *SMALL)
    rows = json.loads(path.read_text())["rows"]
    assert status == 1 and [row["label"] for row in rows] == ["fp16", "rtn", "bad", "kivi"]
    assert [row["ppl"] is None for row in rows] == [False, False, True, False]
    assert rows[2]["fault"] == "failed: KeyError: 'no'" and set(rows[2]) == set(rows[3])
    printed = out.split("\n\n")[-1]
    assert re.search(r"^bad .* failed ", printed, re.M) and re.search(r"^kivi .*\nbad failed: KeyError", printed, re.M)
    assert "Traceback" in printed and 'return {}["no"]' in printed


def test_work_is_not_lost_where_a_later_method_ends_the_run(command, calibrated, kept, monkeypatch, tmp_path):
    """Killed in the third method's calibration, or while it is evaluated."""
    words = ["--method", "rtn,pfn,kvsink", "--calibration", str(kept), "--json", str(tmp_path / "o.json"), *SMALL]

    def stop_at_the_third(function):
        def stop(*arguments, **settings):
            if type(arguments[1]).__name__ == "KVSink":
                raise KeyboardInterrupt
            return function(*arguments, **settings)
        return stop
    with monkeypatch.context() as patch:
        patch.setattr(entries.calibrate, "calibrate", stop_at_the_third(entries.calibrate.calibrate))
        assert command(*words)[0] == 130 and calibrated == ["RTN", "PFN"]
    with monkeypatch.context() as patch:
        patch.setattr(eval_ppl, "measure", stop_at_the_third(eval_ppl.measure))
        status, out, _ = command(*words)
    assert status == 130 and calibrated == ["RTN", "PFN", "KVSink"] and list(table(out)) == ["fp16", "rtn", "pfn"]
    assert [row["label"] for row in json.loads((tmp_path / "o.json").read_text())["rows"]] == ["fp16", "rtn", "pfn"]


@pytest.mark.parametrize("found", [{"WORLD_SIZE": "2"}, {"WORLD_SIZE": "-1"}, {"RANK": "x"}, {"RANK": "2"},
                                   {"MASTER_PORT": ""}])
def test_half_of_torchrun_is_one_line(command, monkeypatch, found):
    whole = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_PORT": "29500", "MASTER_ADDR": "localhost"}
    for name, value in (found if found == {"WORLD_SIZE": "2"} else whole | found).items():
        monkeypatch.setenv(name, value)
    line = refused(command)
    assert "torchrun" in line and all(f"{name}={value}" in line for name, value in found.items())


@pytest.mark.parametrize("words", [
    "--data text.txt --json text.txt", "--json model/config.json --model model", "--json mine.py --method mine.py:Mine",
    "--calibration model/model.safetensors", "--plot text.txt", "--json pipe", "--json /dev/null",
    "--json new --plot new", "--json new --calibration ./new", "--data table.json --json table.json"])
def test_outputs_replace_nothing_that_the_command_did_not_write(command, monkeypatch, tmp_path, words):
    """Nor what it reads; and the line comes before any work."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(EMBEDDED, "model")
    Path("text.txt").write_text("Balo lives in Eastwick. " * 400)
    Path("mine.py").write_text(f"from tinykv.methods.pfn import PFN as Mine{' ' * 5000}")
    write_json(Path("table.json"), {"rows": []}, "tinykv-table")
    os.mkfifo("pipe")
    before = {path: (path.lstat(), path.is_file() and path.read_bytes()) for path in tmp_path.rglob("*")}
    line = refused(command, *words.split(), *SMALL)
    assert re.search("that this program wrote|another flag", line)
    assert before.keys() == {path for path in tmp_path.rglob("*") if "__pycache__" not in path.parts}
    for path, (stat, content) in before.items():
        assert not path.is_file() or (path.lstat().st_ino, path.read_bytes()) == (stat.st_ino, content)


def test_a_command_replaces_what_it_wrote(command, tmp_path):
    outputs = ["--json", tmp_path / "a", "--plot", tmp_path / "b", "--calibration", tmp_path / "c"]
    for _ in range(2):
        assert command("--method", "rtn", *outputs, *SMALL)[0] == 0


@pytest.mark.parametrize("words, said", [
    ("--data pipe", "pipe is no file"), ("--data /dev/zero", "/dev/zero is no file"),
    ("--data sparse", "sparse has more"), ("--method intactkv --prefix long.txt", "long.txt has more"),
    ("--method intactkv --prefix pipe", "pipe is no file"),
    ("--method intactkv --prefix p.safetensors", "p.safetensors is no file"),
    ("--windows 1000000000", "1000000000 windows of 1024 tokens"),
    ("--windows 1 --calib-windows 1000000000 --method rtn", "1000000000 windows"), ("--data=--", "--data=--"),
    ("--preserve=--", "--preserve=--"), ("--method=--", "--method=--")])
def test_what_never_ends_is_refused_before_the_work(command, monkeypatch, tmp_path, words, said):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    os.mkfifo("p.safetensors")
    Path("long.txt").write_text("x" * 7_000_000)
    with open("sparse", "wb") as file:
        file.truncate(2 ** 40)
    assert said in refused(command, *words.split())


def test_an_error_is_one_line_in_a_notebook():
    with pytest.raises(UserError) as caught:
        eval_ppl.compare("kvsnk")
    line, = caught.value._render_traceback_()  # which IPython asks for
    assert line.startswith("UserError: there is no method 'kvsnk'") and "did you mean kvsink?" in line


@pytest.mark.parametrize("error, status, said", [
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"), 2, ".*memory"),
    (MemoryError(), 2, ".*memory"), (ModuleNotFoundError("No module named 'triton'"), 2, ".*pip install -r"),
    (KeyboardInterrupt(), 130, None)])
def test_what_the_machine_lacks_and_ctrl_c_are_one_line(command, monkeypatch, error, status, said):
    def fail(*_):
        raise error
    monkeypatch.setattr(eval_ppl, "evaluate", fail)
    wanted = rf"eval_ppl\.py: error: {said}.*\n" if said else r"\neval_ppl\.py: stopped\n"
    found, _, err = command("--method", "rtn")
    assert found == status and re.fullmatch(wanted, err), err


@pytest.mark.whole  # a process of its own each
def test_as_processes():
    """Through the real command line: memory, a missing package, `head`."""
    def of(words, **how):
        return subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, **how)
    done = of(["eval_ppl.py", "--method", "rtn", "--windows", "64", "--batch", "64"],
              preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (900 * 2 ** 20,) * 2))
    assert done.returncode == 2 and "memory" in done.stderr.splitlines()[-1]
    done = of(["-S", "eval_ppl.py"])
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "pip install -r requirements.txt" in done.stderr
    done = subprocess.run(f"{sys.executable} eval_ppl.py --list-methods | head -1", shell=True, cwd=ROOT,
                          capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and len(done.stdout.splitlines()) == 1


def test_triton_without_a_gpu_says_what_is_missing(command, monkeypatch):
    kernels = pytest.importorskip("kernels", reason="needs triton")
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    err = refused(command, "--attention", "triton", "--device", "cpu", *SMALL)
    assert "GPU" in err and "--attention fused" in err
    monkeypatch.setitem(sys.modules, "tinykv.triton_cache", None)
    monkeypatch.delattr("tinykv.triton_cache", raising=False)
    assert "pip install -r" in refused(command, "--attention", "triton", *SMALL)


@pytest.mark.parametrize("attention", ["plain", pytest.param("triton", marks=pytest.mark.whole)])
def test_every_attention_prints_the_same_table(command, attention):
    if attention == "triton":
        pytest.importorskip("kernels", reason="needs triton")
    words = ["--method", "kivi", "--context", "48", "--windows", "1", "--group-size", "16", "--recent", "8",
             "--protocol", "stream"]
    fused, other = (table(command(*words, "--attention", word)[1]) for word in ("fused", attention))
    for label in fused:
        assert fused[label]["true"] == other[label]["true"]
        assert abs(float(fused[label]["ppl"]) / float(other[label]["ppl"]) - 1) < 0.02


# ---- draws of the calibration

CODEBOOKS = {"vq": "d8m4", "sensitivity": "token"}  # calibrated on 64 windows, and others on 16


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory):
    """The folder of a random model, which is calibrated in no time."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    hf.save(Llama(LlamaConfig(1024, 16, 24, 1, 2, 1, 8, 128, bos_token_id=1)), EMBEDDED / "tokenizer.model", folder)
    return folder


@pytest.fixture(scope="module")
def by_hand(one_layer):
    """{name: a Result of each of two draws} of fp16, pfn and cq on two windows of 32 tokens, calibrated on two parts of
    a stream."""
    model, tokenizer = hf.load(one_layer)
    test = load_windows("tales", tokenizer, 32, 2)
    stream = load_windows("tales", tokenizer, 32, 128, "calibration").tokens
    fp16 = measure(model, METHODS["fp16"](model.config), test)
    found = {"fp16": [fp16, fp16]}
    for name, n, settings in (("pfn", 16, {}), ("cq", 64, CODEBOOKS)):
        found[name] = []
        for draw, windows in enumerate([stream[:n], stream[n:2 * n]]):
            method = METHODS[name](model.config, **settings)
            calibrate(model, method, windows, seed=draw)
            found[name].append(measure(model, method, test, fp16=fp16))
    return found


@pytest.mark.parametrize("draws", [1, 2])
def test_draws_are_calibrations_by_hand(command, tmp_path, one_layer, by_hand, draws):
    """On parts of a stream that share no window, as many windows as each method asks for. One draw is the first."""
    path = tmp_path / "o.json"
    words = [word for name, value in CODEBOOKS.items() for word in (f"--{name}", value)]
    status, out, _ = command("--model", one_layer, "--method", "pfn,cq", *words, "--context", "32", "--windows", "2",
                             "--draws", draws, "--vs", "pfn", "--json", path)
    said = ["one calibration: +- and t are over windows",
            "2 calibrations, each on text of its own: means; +- and t are over draws and windows"]
    assert status == 0 and said[draws - 1] in out.splitlines()
    content = json.loads(path.read_text())
    rows = {row["label"]: row for row in content["rows"]}
    assert content["draws"] == draws and rows.keys() == by_hand.keys()
    exact = [fp16.nll for fp16 in by_hand["fp16"][:draws]]
    for name, row in rows.items():
        results = by_hand[name][:draws]
        nll = [result.nll for result in results]
        targets, cells = 31, 2 * draws  # targets of a window
        assert row["window_nll"] == nll
        assert row["window_kl"] == [[kl / targets for kl in result.kl] for result in results]
        assert row["ppl"] == pytest.approx(math.exp(sum(map(sum, nll)) / cells), rel=1e-12)
        assert row["delta_ppl"] == row["ppl"] - rows["fp16"]["ppl"]
        assert row["delta_se"] == delta_error(nll, exact)
        assert row["kld"] == pytest.approx(sum(sum(result.kl) for result in results) / (cells * targets))
        assert row["top1"] == sum(result.agree for result in results) / (cells * targets)
        assert row["bits_true"] == pytest.approx(sum(sum(result.bits) for result in results) / cells)
    # --vs: t of the loss and of KL
    difference, error, t, better = paired(*(rows[name]["window_nll"] for name in ("cq", "pfn")))
    line = [line for line in out.splitlines() if re.match("cq +pfn ", line)][0].split()[2:]
    _, _, t_of_kl, _ = paired(*(rows[name]["window_kl"] for name in ("cq", "pfn")))
    assert line == [f"{difference:+.4f}", f"{error:.4f}", f"{t:+.1f}", f"{t_of_kl:+.1f}", str(better), "of", f"{cells}"]


def test_draws_of_a_file_are_parts_of_its_second_half(command, tmp_path, one_layer, monkeypatch):
    """And each codec's k-means has the draw as its seed."""
    path, seen, seeds = tmp_path / "text.txt", [], {}
    path.write_text("Vehul Ravfield. Vehul owl. Mara Norton. " * 400)

    def note(model, method, windows, *more, **seed):
        seen.append(windows)
        calibrate(model, method, windows, *more, **seed)

    def seeded(name, kmeans):
        def record(*given, **settings):
            seeds.setdefault(name, []).append(settings["seed"])
            return kmeans(*given, **settings)
        return record
    monkeypatch.setattr(entries.calibrate, "calibrate", note)
    for module in (clipped, codebook, nonuniform):
        monkeypatch.setattr(module, "kmeans", seeded(module.__name__, module.kmeans))
    words = ["--model", one_layer, "--method", "skvq,cq,kvquant", "--vq", "d8m4", "--data", path, "--draws", "2",
             *SMALL]
    assert command(*words)[0] == 0
    _, tokenizer = hf.load(one_layer)
    stream = load_windows(str(path), tokenizer, 64, 4, "calibration").tokens
    assert [windows.tolist() for windows in seen] == [part.tolist() for part in stream.split(2)] * 3
    assert len(seeds) == 3 and all(set(found) == {0, 1} for found in seeds.values())
    assert "--draws must be at least 1" in refused(command, *words, "--draws", "0")
    assert "1000 windows need" in refused(command, *words, "--draws", "500")


def test_a_calibration_file_holds_each_draw(command, calibrated, kept):
    """More draws add theirs, and fewer find theirs."""
    outputs = {}
    for draws, n in ((2, 2), (1, 2), (3, 3), (2, 3)):
        status, out, _ = command("--method", "pfn,fp16", "--calibration", kept, "--draws", draws, *SMALL)
        assert status == 0 and len(calibrated) == n
        assert outputs.setdefault(draws, out) == out
    assert len(set(outputs.values())) == 3


def test_a_draw_that_fails_fails_its_row(command, monkeypatch, tmp_path):
    def fail_once(model, method, windows, progress, seed, fingerprint_of):
        if seed == 1 and type(method).__name__ == "PFN":
            raise KeyError("no")
        calibrate(model, method, windows, progress, seed, fingerprint_of)
    monkeypatch.setattr(entries.calibrate, "calibrate", fail_once)
    path = tmp_path / "o.json"
    status, out, _ = command("--method", "pfn,kivi,rtn", "--draws", "2", "--json", path, *SMALL)
    rows = {row["label"]: row for row in json.loads(path.read_text())["rows"]}
    assert status == 1 and rows["pfn"]["ppl"] is None and rows["pfn"]["fault"] == "failed: KeyError: 'no'"
    assert rows["rtn"]["window_nll"][0] != rows["rtn"]["window_nll"][1]
    for name in ("fp16", "kivi"):  # nothing to calibrate: the same twice
        assert rows[name]["window_nll"][0] == rows[name]["window_nll"][1]


# ---- the number of calibration windows, and tables at equal true bits

def test_each_method_sees_the_windows_that_it_asks_for(command, monkeypatch):
    """By default cq with weights 64, without them 16, and rtn 16: the first ones of the same text."""
    seen = {}

    def note(model, method, windows, progress, seed, fingerprint_of):
        seen[type(method).__name__, method.codecs[0].k.__dict__.get("sensitivity")] = windows
        raise ValueError("that is enough")

    monkeypatch.setattr(entries.calibrate, "calibrate", note)
    words = ["--method", "rtn,cq", "--vq", "d2m8", "--sensitivity", "none,token", "--context", "32", "--windows", "1"]
    assert command(*words)[0] == 1
    sizes = {name: len(windows) for name, windows in seen.items()}
    assert sizes == {("RTN", None): 16, ("CQ", "none"): 16, ("CQ", "token"): 64}
    assert all(windows.equal(seen["CQ", "token"][:len(windows)]) for windows in seen.values())


def test_methods_at_equal_true_bits():
    def row(label, bits, ppl, kld, tables, **more):
        return {"label": label, "weights": None, "bits_true": bits, "ppl": ppl, "kld": kld, "offline_bytes": tables,
                **more}

    rows = [row("fp16", 16.0, 2.0, 0.0, 0), row("a vq=d8m256 x=1", 1.0, 4.0, 0.4, 1024),
            row("a vq=d4m256 x=1", 2.0, 2.5, 0.1, 2048), row("a vq=d2m256 x=1", 4.0, 2.1, 0.02, 4096),
            row("a vq=d8m256 x=2", 1.5, 3.0, 0.3, 1024), row("b bits=3", 3.0, 2.2, 0.05, 0)]
    by_label = {found["label"]: found for found in at_bits(rows, 1.5)}
    assert by_label.keys() == {"a x=1", "a x=2"}
    one = by_label["a x=1"]
    assert one["ppl"] == pytest.approx((4.0 * 2.5) ** 0.5) and one["kld"] == pytest.approx(0.25)
    assert one["between"] == (1.0, 2.0) and one["tables"] == (1024, 2048)
    assert by_label["a x=2"]["ppl"] == pytest.approx(3.0)
    nearer = {found["label"]: found for found in at_bits(rows, 1.25)}["a x=1"]
    assert nearer["ppl"] == pytest.approx(4.0 ** 0.75 * 2.5 ** 0.25) and nearer["kld"] == pytest.approx(0.325)
    assert {found["label"] for found in at_bits(rows, 3.0)} == {"a x=1", "b"}
    assert at_bits(rows, 5.0) == []


def test_a_table_at_equal_true_bits_says_what_it_leaves_out(command):
    status, out, _ = command("--method", "rtn,pfn", "--preserve", "1", "--bits", "2,4", "--at-bits", "2", *SMALL)
    head, line, left_out = out.split("\n\n")[-1].splitlines()
    assert status == 0 and head.split() == "at 2 true bits ppl delta KL from to tables KB to".split()
    assert line.split()[0] == "rtn" and line.split()[4:6] == ["2.00", "2.00"]
    assert left_out.endswith("differ in bits alone: pfn")
