"""The papers' tables: a command for each number, which the program takes, and each row tried on the embedded model."""
import json
import re
from types import SimpleNamespace

import paper
import pytest

import eval_ppl
from tinykv import hf
from tinykv.lab.run import flags
from tinykv.lab.run.entries import build_entries

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
        assert entry.method.bits_of("k") == entry.method.bits_of("v") == float(found[1])


@pytest.fixture
def run_paper(run):
    return lambda *words: run(paper, *words)


ROWS = {(name, cell.what): cell for name, cell in reversed(CELLS) if "why" not in paper.TABLES[name]
        and "lm_eval" not in cell.command}


@pytest.mark.one_in(29)
@pytest.mark.parametrize("name, what", ROWS)
def test_every_row_is_tried(name, what, monkeypatch, capsys):
    """It is measured, at the bits that its command says."""
    cell = ROWS[name, what]
    monkeypatch.setattr(paper, "chosen", lambda *_: [cell])
    paper.show(paper.TABLES[name], SimpleNamespace(small=True, model=None, calibration=None))
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith(cell.model))
    number, here, bits = line[len(f"{'':22}{what:46}"):].split()  # and no reason why not
    assert number == cell.number and float(here) > 0
    if found := re.search(r"--bits (\S+)", cell.command):
        assert 0 <= float(bits) - float(found[1]) < 4


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


def test_wrong_words(run_paper):
    assert "no KVSink, Table 3; there are KVSink, Table 2" in run_paper("KVSink", "Table 3")[2]
    assert "the models are LLaMA-2-7B" in run_paper("KVSink", "Table 2", "--only", "GPT")[2]
