"""What `python -m tinykv.lab.analysis` prints, draws and writes, and how figures look; test_analysis.py tests the
numbers themselves."""
import json
import re
from pathlib import Path

import pytest
import torch

from tinykv.lab import plots
from tinykv.lab.analysis import __main__ as command
from tinykv.lab.analysis import anchors, page, walk
from tinykv.lab.run import comparisons

PNG = b"\x89PNG"


@pytest.fixture
def analyse(run, one_layer):
    """Run a command on the model of one layer: (status, stdout, stderr)."""
    def analyse(*words, program=command):
        small = {"--model": one_layer, "--context": 64, "--windows": 2, "--calib-windows": 6}
        return run(program, *words, *(word for flag in small.items() if flag[0] not in words for word in flag))
    return analyse


@pytest.fixture
def some_sinks(monkeypatch):
    """A random model has no sinks: the first tokens are called sinks here."""
    def find_sinks(model, windows):
        marks = torch.zeros_like(windows, dtype=torch.bool)
        marks[:, [0, 9]] = True
        return marks
    monkeypatch.setattr(command, "find_sinks", find_sinks)


@pytest.mark.parametrize("written", [("norms", "keys"), pytest.param(command.NAMES, marks=pytest.mark.whole)])
def test_a_table_a_figure_and_numbers_of_each(analyse, some_sinks, monkeypatch, tmp_path, written):
    """All figures are made, and these are written."""
    save = plots.save
    monkeypatch.setattr(plots, "save", lambda figure, path: save(figure, path) if path.stem in written else
                        path.write_bytes(PNG))
    monkeypatch.setattr(anchors.measure, "__defaults__", ("d8m16",))
    _, printed, _ = analyse("all", "--out", tmp_path, "--json", tmp_path / "out.json", "--calib-windows", 3)
    numbers = json.loads((tmp_path / "out.json").read_text())
    assert numbers["sinks at"] == [[0, 9], [0, 9]] and "sinks of window 1: 0 <s>, 9 " in printed
    blocks = printed.split("\n\n")[1:]
    for block, name in zip(blocks, command.NAMES, strict=True):
        columns = command.PHENOMENA[name].COLUMNS
        assert not hasattr(command.PHENOMENA[name], "draw") or (
            tmp_path / f"{name}.png").read_bytes().startswith(PNG)
        lines, rows = block.splitlines(), numbers[name]
        assert len(lines) == len(rows) + 1 and len({len(line) for line in lines}) == 1
        assert lines[0].split() == " ".join(head for head, _ in columns.values()).split()
        for line, row in zip(lines[1:], rows):
            assert re.split("  +", line.strip()) == [walk.cell(row[name], form) for name, (_, form) in columns.items()]


@pytest.mark.parametrize("value, form, text", [
    (None, ".1f", "-"), ("word", ".1f", "word"), (1.25, ".1f", "1.2"), ([1.0, None], ".1f", "1.0 -"),
    ([], ".1f", "none"), ([*range(8)], "d", "0 1 2 3 4 5 6 7"),
    ([*range(9)], "d", "0 1 .. 3 4 .. 7 8"), ([*range(30)], "d", "0 1 .. 14 15 .. 28 29")])  # of many layers
def test_a_cell(value, form, text):
    assert walk.cell(value, form) == text


def test_a_model_without_sinks_is_told_of(analyse, tmp_path):
    """What needs no sinks is shown, the rest says why not."""
    _, out, _ = analyse("keys", "norms", "bias", "--out", tmp_path, "--json", tmp_path / "out.json")
    numbers = json.loads((tmp_path / "out.json").read_text())
    assert re.search("window 0: .*none", out) and numbers["sinks at"] == [[], []]
    for name in ("keys", "norms", "bias"):
        needs = name in command.NEED_SINKS
        assert (re.search(rf"^{name}: .*sink", out, re.M) is not None) == needs == (numbers[name] is None)
        assert (tmp_path / f"{name}.png").exists() != needs


@pytest.mark.parametrize("program, words, named", [
    (command, ["norms", "--out", f"{__file__}/figures"], f"{__file__}/figures"),
    (command, ["norms", "--out", __file__], __file__), (command, ["norms", "--out", "."], "norms.png"),
    (page, ["--out", "no/folder/x.html"], "no/folder/x.html"), (page, [], "cache.html")])
def test_an_output_that_cannot_be_written_is_said_before_the_work(analyse, monkeypatch, tmp_path, program, words,
                                                                  named):
    monkeypatch.chdir(tmp_path)
    for name in ("cache.html", "norms.png"):
        Path(name).write_text("of somebody")
    monkeypatch.setattr(command.hf, "load_model", lambda *_: pytest.fail("the model is loaded"))
    status, _, err = analyse(*words, program=program)
    assert status == 2 and err.count("\n") == 1 and named in err


# The figure of eval_ppl.py

def row(label, ppl, bits=2.0, preserve=0, weights=None):
    return {"label": label, "weights": weights, "ppl": ppl, "bits_true": bits, "preserve": preserve}


FP16 = row("fp16", 2.0, 16.0)


def drawn(rows):
    """{label: line} of the figure."""
    panel, = comparisons.perplexity([FP16, *rows]).axes
    lines = {line.get_label(): line for line in panel.lines}
    assert {note.get_text() for note in panel.texts} == set(lines)
    return lines


def points_of(line):
    return [tuple(point) for point in line.get_xydata().tolist()]


def test_perplexity_is_drawn_above_fp16_s_in_per_cent():
    line, = drawn([row("rtn bits=4", 2.002, 4.0), row("rtn bits=2", 3.0), row("rtn bits=8", 1.99, 8.0)]).values()
    assert line.get_label() == "rtn" and line.axes.get_yscale() == "log"
    assert points_of(line) == [pytest.approx(point) for point in ((2, 50), (4, 0.1), (8, comparisons.FLOOR))]


def test_a_line_joins_what_differs_in_bits_alone():
    rows = [row(f"pfn scheme={scheme} bits={bits}", 2 + 1 / bits, bits, 5, weights)
            for bits in (4, 2) for scheme in ("kvquant", "token-static") for weights in (None, "awq-3")]
    lines = drawn([*rows, row("cq vq=d4m256", 2.2), row("cq vq=d8m256", 2.3, 1.0),
                   *(row(f"rtn k_bits={k} v_bits={v}", 3, (k + v) / 2) for k in (2, 4) for v in (2, 4))])
    assert lines.keys() == {"pfn scheme=kvquant", "pfn scheme=kvquant awq-3", "pfn scheme=token-static",
                            "pfn scheme=token-static awq-3", "cq", "rtn v_bits=2", "rtn v_bits=4"}
    assert all([x for x, _ in points_of(line)] == [2, 4] for name, line in lines.items() if name.startswith("pfn"))


def test_where_kept_tokens_were_varied_they_are_the_x_axis():
    rows = [row(f"pfn preserve={n} bits={bits}", 2 + 1 / n / bits, bits, n) for n in (5, 1) for bits in (2, 3)]
    lines = drawn([*rows, row("antkv", 2.1, preserve=5.5), row("rtn bits=2", 3.0)])
    assert {name: [x for x, _ in points_of(line)] for name, line in lines.items()} == {
        "pfn bits=2": [1, 5], "pfn bits=3": [1, 5], "antkv": [5.5], "rtn bits=2": [0]}


# What figures share

def test_a_map_keeps_the_largest_magnitude_and_its_sign():
    x = torch.tensor([[1.0, -3], [2, -1], [-1, 0], [0, 2]])
    assert plots.pooled(x, 2).tolist() == [[2, -3], [-1, 2]]
