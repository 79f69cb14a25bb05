"""What `python -m tinykv.analysis` prints, draws and writes; the numbers themselves are tested in test_analysis.py."""
import base64
import gzip
import json
import re
from pathlib import Path

import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from tinykv import cli, hf, plots, shared_flags
from tinykv.analysis import __main__ as command
from tinykv.analysis import anchors, bias, outliers, page, sinks, walk
from tinykv.data.windows import load_windows
from tinykv.methods import antkv
from tinykv.run import comparisons

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
    """All figures are made, and these are written; what takes long has a bar."""
    save, bar, bars = plots.save, cli.bar, []
    monkeypatch.setattr(plots, "save", lambda figure, path: save(figure, path) if path.stem in written else
                        path.write_bytes(PNG))
    monkeypatch.setattr(cli, "bar", lambda over, what, *more: (bars.append(what), bar(over, what, *more))[1])
    monkeypatch.setattr(anchors.measure, "__defaults__", ("d8m16",))
    _, printed, _ = analyse("all", "--out", tmp_path, "--json", tmp_path / "out.json", "--calib-windows", 3)
    assert list(dict.fromkeys(bars)) == [
        "measuring", "looking for sinks", "calibrating token-static", "calibrating channel-static", "calibrating antkv"]
    numbers = json.loads((tmp_path / "out.json").read_text())
    assert numbers["sinks at"] == [[0, 9], [0, 9]] and "sinks of window 1: 0 <s>, 9 " in printed
    blocks = printed.split("\n\n")[1:]
    for block, name in zip(blocks, command.NAMES, strict=True):
        module = command.PHENOMENA[name]
        assert (tmp_path / f"{name}.png").read_bytes().startswith(PNG)
        lines, rows = block.splitlines(), numbers[name]
        assert len(lines) == len(rows) + 1 and len({len(line) for line in lines}) == 1
        assert lines[0].split() == " ".join(head for head, _ in module.COLUMNS.values()).split()
        for line, row in zip(lines[1:], rows):
            words = [walk.cell(row[column], form) for column, (_, form) in module.COLUMNS.items()]
            assert re.split("  +", line.strip()) == words


def numbers_of(path):
    """What a page holds."""
    packed = re.search(r"H4sI[\w+/=]+", path.read_text())[0]  # gzip's first bytes, in base64
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def test_the_page_of_the_command(analyse, tmp_path, monkeypatch):
    monkeypatch.setattr(page, "SHOWN", {name: page.SHOWN[name] for name in ("rtn", "kvsink")})
    _, out, _ = analyse("--out", tmp_path / "cache.html", "--calib-windows", 2, program=page)
    assert f"wrote {tmp_path / 'cache.html'}" in out and (tmp_path / "cache.html").stat().st_size < 600_000
    numbers = numbers_of(tmp_path / "cache.html")
    assert numbers["texts"] == 2 and len(numbers["tokens"]) == 64 and numbers["model"].startswith("model")
    # of texts of one's own
    (tmp_path / "texts.txt").write_text("Once there was a baker. His name was Nob\n\nWho sings? The singer")
    analyse("--text", tmp_path / "texts.txt", "--out", tmp_path / "own.html", "--calib-windows", 2, program=page)
    numbers = numbers_of(tmp_path / "own.html")
    assert numbers["answers"] == 2 and "".join(numbers["tokens"][1:]).endswith(("Nob", "singer"))


def test_a_cell():
    cells = [walk.cell(x, ".1f") for x in (None, "word", 1.25, [1.0, None], [])]
    assert cells == ["-", "word", "1.2", "1.0 -", "none"]
    assert walk.cell([*range(8)], "d") == "0 1 2 3 4 5 6 7"
    assert walk.cell([*range(9)], "d") == "0 1 .. 3 4 .. 7 8"  # of many layers
    assert walk.cell([*range(30)], "d") == "0 1 .. 14 15 .. 28 29"


def test_a_model_without_sinks_is_told_of(analyse, tmp_path):
    """What needs no sinks is shown, the rest says why not."""
    _, out, _ = analyse("keys", "norms", "widths", "--out", tmp_path, "--json", tmp_path / "out.json")
    numbers = json.loads((tmp_path / "out.json").read_text())
    assert re.search("window 0: .*none", out) and numbers["sinks at"] == [[], []]
    for name in ("keys", "norms", "widths"):
        needs = name in command.NEED_SINKS
        assert (re.search(rf"^{name}: .*sink", out, re.M) is not None) == needs == (numbers[name] is None)
        assert (tmp_path / f"{name}.png").exists() != needs


def test_several_names_each_once_and_half_precision(analyse, some_sinks):
    _, out, _ = analyse("norms", "keys", "norms", "--dtype", "bf16", "--device", "cpu")
    assert out.count("\n\n") == 2 and "torch.bfloat16" in out and out.index("Q others") < out.index("cliff")


def test_no_calibration_text_is_read_for_what_needs_none(analyse, some_sinks, tmp_path):
    text = tmp_path / "short.txt"
    text.write_text("Once there was a baker who lived in Ravfield. " * 60)
    assert "Q others" in analyse("norms", "--data", text, "--calib-windows", 500)[1]
    assert analyse("norms", "errors", "--data", text, "--calib-windows", 500)[0] == 2


def test_no_attention_matrix_is_ever_whole(monkeypatch, one_layer):
    """With tiles of one query no tensor of T x T numbers is seen by softmax, whatever is asked for."""
    seen = []
    softmax = torch.Tensor.softmax
    monkeypatch.setattr(torch.Tensor, "softmax", lambda x, *a: (seen.append(x.shape[-2]), softmax(x, *a))[1])
    monkeypatch.setattr(antkv, "MAX_SCORES", 1)
    monkeypatch.setattr(antkv, "MIN_QUERIES", 1)
    model, tokenizer = hf.load(one_layer)
    windows = load_windows("tales", tokenizer, 64, 1).tokens
    text = walk.Text(model, windows, sinks.find_sinks(model, windows), layer=0)
    walk.rows_of(bias, text)
    sinks.attention_map(text.shown()[0])
    assert set(seen) == {1}


@pytest.mark.parametrize("program, has", [
    (command, ["--layer", *(f"\n{name}\n" for name in command.PHENOMENA)]), (page, ["--text", "every method"])])
def test_help_names_every_phenomenon(analyse, program, has):
    status, out, _ = analyse("--help", program=program)
    assert status == 0 and all(word in out for word in has)


@pytest.mark.parametrize("program, words", [
    (command, ["norms", "--out", f"{__file__}/figures"]), (command, ["norms", "--out", __file__]),
    (page, ["--out", "no/folder/x.html"]), (page, [])])
def test_an_output_that_cannot_be_written_is_said_before_the_work(analyse, monkeypatch, tmp_path, program, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cache.html").write_text("of somebody")
    monkeypatch.setattr(command.hf, "load_model", lambda *_: pytest.fail("the model is loaded"))
    status, _, err = analyse(*words, program=program)
    assert status == 2 and err.count("\n") == 1 and str(words[-1] if words else "cache.html") in err


# The figure of eval_ppl.py

def row(label, ppl, bits=2.0, preserve=0, weights=None):
    return {"label": label, "weights": weights, "ppl": ppl, "bits_true": bits, "preserve": preserve}


FP16 = row("fp16", 2.0, 16.0)


def drawn(rows):
    """{label: [(x, y)]} of the lines in the figure, and the lines in colour."""
    panel, = comparisons.perplexity([FP16, *rows]).axes
    lines = {line.get_label(): list(zip(*(values.tolist() for values in line.get_data()))) for line in panel.lines}
    assert panel.get_yscale() == "log" and {note.get_text() for note in panel.texts} == set(lines)
    return lines, {line.get_label() for line in panel.lines if line.get_color() != plots.GREY}


def test_perplexity_is_drawn_above_fp16_s_in_per_cent():
    lines, _ = drawn([row("rtn bits=2", 3.0), row("rtn bits=4", 2.002, 4.0), row("rtn bits=8", 1.99, 8.0)])
    assert lines.keys() == {"rtn"}
    assert lines["rtn"] == [pytest.approx(point) for point in ((2, 50), (4, 0.1), (8, comparisons.FLOOR))]


def test_losses_along_longer_windows_stand_below():
    """A line a row: the mean over draws and windows of what each stretch loses above fp16."""
    fp16 = FP16 | {"window_nll_along": [[[3.0, 2.0], [1.0, 2.0]]]}
    rtn = row("rtn", 3.0) | {"window_nll_along": [[[4.0, 4.0], [2.0, 3.0]], [[4.0, 6.0], [2.0, 7.0]]]}
    _, panel = comparisons.perplexity([fp16, rtn]).axes
    line, = panel.lines
    assert line.get_label() == "rtn" and [point.tolist() for point in line.get_data()] == [[1, 2], [1, 3]]


def test_what_loses_the_least_somewhere_has_a_colour():
    rows = [row("rtn bits=2", 9.0), row("rtn bits=4", 2.5, 4.0), row("kivi bits=2", 4.0), row("cq bits=1", 5.0, 1.0),
            row("kivi bits=4", 2.6, 4.1)]
    for more in ([], [row("ott bits=2", 4.1)]):
        assert drawn([*rows, *more])[1] == {"rtn", "kivi", "cq"}


def test_kvsink_pfn_and_antkv_have_colours_and_grey_lines_have_markers_of_their_own():
    names = ["rtn", "pfn scheme=token-static", "kvsink", "kivi", "ott", "skvq", "kvquant", "cq", "antkv"]
    rows = [row(f"{name} bits=2", 2.1 + i) for i, name in enumerate(names)]
    _, coloured = drawn(rows)
    assert coloured == {"rtn", "pfn scheme=token-static", "kvsink", "antkv"}  # rtn is the best of these
    panel, = comparisons.perplexity([FP16, *rows]).axes
    looks = [(line.get_color(), line.get_marker()) for line in panel.lines]
    assert len(set(looks)) == len(names)
    assert len({marker for colour, marker in looks if colour == plots.GREY}) == 5
    assert len({colour for colour, _ in looks}) == 5  # four, and grey


@pytest.mark.parametrize("n", [4, 30])
def test_a_quantity_has_one_colour_in_all_panels_of_the_outliers(n):
    keys = [f"{place}{more}" for place in ("d_in", "d_out", "mid", "out") for more in ("", " others")]
    keys += ["d_out c", "out c", "ratio c"]
    rows = [{"layer": layer, "channel": 7, **{key: 1.0 + layer for key in keys}} for layer in range(n)]
    figure = outliers.draw(None, rows)
    colours = {}
    for panel in figure.axes:
        for line in panel.lines:
            if not line.get_label().startswith("_"):
                colours.setdefault(line.get_label(), set()).add(line.get_color())
    assert len(colours) == 4 and all(len(found) == 1 for found in colours.values())
    assert len(set.union(*colours.values())) == 4


def test_a_line_joins_what_differs_in_bits_alone():
    rows = [row(f"pfn scheme={scheme} bits={bits}", 2 + 1 / bits, bits, 5, weights)
            for bits in (4, 2) for scheme in ("kvquant", "token-static") for weights in (None, "awq-3")]
    lines, _ = drawn([*rows, row("cq vq=d4m256", 2.2), row("cq vq=d8m256", 2.3, 1.0),
                         *(row(f"rtn k_bits={k} v_bits={v}", 3, (k + v) / 2) for k in (2, 4) for v in (2, 4))])
    assert lines.keys() == {"pfn scheme=kvquant", "pfn scheme=kvquant awq-3", "pfn scheme=token-static",
                            "pfn scheme=token-static awq-3", "cq", "rtn v_bits=2", "rtn v_bits=4"}
    assert all([x for x, _ in points] == [2, 4] for name, points in lines.items() if name.startswith("pfn"))


def test_where_kept_tokens_were_varied_they_are_the_x_axis():
    rows = [row(f"pfn preserve={n} bits={bits}", 2 + 1 / n / bits, bits, n) for n in (5, 1) for bits in (2, 3)]
    lines, _ = drawn([*rows, row("antkv", 2.1, preserve="1%"), row("rtn bits=2", 3.0)])
    assert {name: [x for x, _ in points] for name, points in lines.items()} == {
        "pfn bits=2": [1, 5], "pfn bits=3": [1, 5], "rtn bits=2": [0]}


def test_labels_lie_beside_the_ends_of_their_lines():
    """In the height of their own panel, left of the next one, and none on another."""
    figure, panels = plots.new_figure(1, 2, 9, 4)
    for panel, scale in zip(panels, ("linear", "log")):
        for i, end in enumerate((2000.0, 920.0, 900.0, 40.0)):
            panel.plot([0, 50, 100], [30.0, 5.0 * i + 20, end], label=f"a line of some length {i}", **plots.style(i))
        panel.set_yscale(scale)
        plots.label_ends(panel)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    for panel, right in zip(panels, (panels[1].get_tightbbox().x0, figure.bbox.x1)):
        area, boxes = panel.get_window_extent(), []
        for note, line in zip(sorted(panel.texts, key=lambda note: note.get_text()), panel.lines):
            box = Text.get_window_extent(note, canvas.get_renderer())  # without the arrow
            assert area.x1 < box.x0 and box.x1 <= right and area.y0 <= box.y0 and box.y1 <= area.y1, note.get_text()
            assert not any(box.overlaps(other) for other in boxes), note.get_text()
            boxes.append(box)
            end = panel.transData.transform((100, line.get_ydata()[-1]))
            assert abs((box.y0 + box.y1) / 2 - end[1]) < plots.BETWEEN * area.height, note.get_text()


def test_figures_leave_the_backend_of_a_notebook_alone():
    """What imports pyplot chooses one."""
    for file in Path(plots.__file__).parent.glob("*.py"):
        assert not re.search(r"import .*pyplot|from matplotlib.pyplot", file.read_text()), file


def test_a_map_keeps_the_largest_magnitude_and_its_sign():
    x = torch.tensor([[1.0, -3], [2, -1], [-1, 0], [0, 2]])
    assert plots.pooled(x, 2).tolist() == [[2, -3], [-1, 2]]


@pytest.mark.parametrize("bos", ["replace", "none"])
def test_windows_to_calibrate_on_are_cut_as_the_text_is(bos):
    args = command.parser().parse_args(["norms", "--calib-windows", "3", "--bos", bos])
    shared_flags.set_up(args, longest=32)
    found = shared_flags.calibration_text(args)
    assert found.equal(load_windows("tales", args.tokenizer, 32, 3, "calibration", bos=bos).tokens)
