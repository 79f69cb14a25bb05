"""The papers' tables: a command for each number, which the program takes, and the same shape in every row."""
import json
import re
from types import SimpleNamespace

import paper
import pytest

import eval_ppl
from tinykv import UserError, hf
from tinykv.methods.registry import METHODS
from tinykv.run import flags
from tinykv.run.entries import build_entries
from tinykv.run.settings import flags_of

CELLS = [(name, cell) for name, table in paper.TABLES.items() for cell in paper.cells(table)]


def test_every_row_has_a_number_for_each_column():
    for name, table in paper.TABLES.items():
        for row, _, numbers in table["rows"]:
            of_row = [float(number) for number in numbers.split()]
            missing = len(table["columns"]) - len(of_row)  # KVSink's static errors have no column of sinks
            assert missing == (", static, " in row), (name, row)
    assert len({(name, cell.model, cell.what, cell.command) for name, cell in CELLS}) == len(CELLS)


@pytest.mark.parametrize("command", dict.fromkeys(
    re.sub(r"--(model|context|device) \S+", "", cell.command) for _, cell in CELLS if "eval_ppl.py" in cell.command))
def test_every_command_makes_its_method(command):
    """With its bits and its group, on a model of the papers' shape."""
    args = flags.parse(command.split()[2:])
    config = hf.load_config(hf.EMBEDDED)
    config.head_dim, config.num_hidden_layers = 128, 32
    *_, entry = build_entries(args, config, None)[0].values()
    assert entry.name == args.method[0] and args.windows in (None, 256)
    if found := re.search(r"--bits (\S+)", command):
        assert entry.method.k_bits == entry.method.v_bits == float(found[1])


def test_lm_eval_is_given_settings_that_are_there():
    for _, cell in CELLS:
        if "lm_eval" in cell.command:
            given = dict(word.split("=") for word in cell.command.split("--model_args ")[1].split(","))
            assert given.pop("method") in METHODS
            assert given.keys() <= {*flags_of(METHODS), "bits", "model", "protocol", "prompt", "data", "weights",
                                    "w_bits", "w_group_size"}


@pytest.fixture
def run_paper(run):
    return lambda *words: run(paper, *words)


def test_cells_are_printed_with_commands_and_with_what_is_not_known(run_paper):
    status, out, _ = run_paper("KVSink", "Table 2", "--only", "LLaMA-2-7B", "--only", "wikitext2")
    lines = out.splitlines()
    assert status == 0 and "7.46" in lines[2] and lines[2].endswith("--method kvquant --bits 2 --outliers 0")
    assert sum("eval_ppl.py" in line for line in lines) == 9 and lines[-1].startswith("unknown: ")


def test_cells_are_measured_as_the_command_measures_them(run_paper, run, tmp_path):
    words = "IntactKV", "Table 1", "--only", "LLaMA-2-7B"
    status, out, _ = run_paper(*words, "--only", "RTN", "--try")
    _, cell, *_ = out.splitlines()
    assert status == 0 and cell.split()[:3] == ["LLaMA-2-7B", "RTN", "8.79"]
    rtn, = (cell for _, cell in CELLS if (cell.model, cell.what, cell.number) == ("LLaMA-2-7B", "RTN", "8.79"))
    command = f"{rtn.command.replace('128', '16')} {paper.SMALL} --model {hf.EMBEDDED} --json {tmp_path / 'a.json'}"
    assert run(eval_ppl, *command.split()[2:])[0] == 0
    row = json.loads((tmp_path / "a.json").read_text())["rows"][-1]
    assert cell.split()[3:] == [f"{row['ppl']:.3f}", f"{row['bits_true']:.2f}"]


def test_a_cell_that_cannot_be_run_says_why(run_paper, monkeypatch):
    monkeypatch.setattr(paper, "SMALL", paper.SMALL.replace("--windows 1", "--windows all"))
    status, out, _ = run_paper("KVSink", "Figure 9", "--try")
    assert status == 0 and "all of tales are more than" in out.splitlines()[1]
    assert "lm_eval" in run_paper("OTT", "outlier num")[1].splitlines()[1]


def test_wrong_words(run_paper):
    assert "there are KVSink, Table 2" in run_paper("KVSink", "Table 3")[2]
    assert "the models are LLaMA-2-7B" in run_paper("KVSink", "Table 2", "--only", "GPT")[2]
    with pytest.raises(UserError, match="called as on the hub"):
        paper.chosen(paper.TABLES["KVSink, Table 2"], SimpleNamespace(only=[], model="path/to/other"))
