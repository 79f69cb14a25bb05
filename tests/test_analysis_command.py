"""What `python -m tinykv.analysis` prints, draws and writes; the numbers themselves are tested in test_analysis.py."""
import json
import re
import subprocess
import sys

import pytest
import torch

from tinykv import hf
from tinykv.analysis import __main__ as command
from tinykv.analysis import figures, sinks
from tinykv.data.windows import load_windows
from tinykv.methods import antkv
from tinykv.model import Llama
from tinykv.run.cli import EMBEDDED

SMALL = ["--context", "128", "--windows", "2", "--calib-windows", "4"]
PNG = b"\x89PNG"


def run(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["analysis", *words])
    command.main()


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """`all` on the embedded model, windows of two stories and more: what was printed, the JSON, the folder."""
    folder = tmp_path_factory.mktemp("all")
    with pytest.MonkeyPatch.context() as patch:
        lines = []
        patch.setattr("builtins.print", lambda *words: lines.append(" ".join(map(str, words))))
        run(patch, "all", "--context", "1024", "--windows", "2", "--calib-windows", "4", "--vq", "d8m16", "--out",
            str(folder), "--json", str(folder / "out.json"))
    return "\n".join(lines), json.loads((folder / "out.json").read_text()), folder


@pytest.mark.whole  # the fixture `everything` takes a minute
def test_all_gives_a_table_a_figure_and_numbers_of_each(everything):
    printed, numbers, folder = everything
    blocks = printed.split("\n\n")[1:]
    assert len(blocks) == len(command.PHENOMENA)
    for block, (name, phenomenon) in zip(blocks, command.PHENOMENA.items()):
        assert (folder / f"{name}.png").read_bytes().startswith(PNG)
        lines, rows = block.splitlines(), numbers[name]
        if name == "anchors":
            assert len(lines) == 2 * (len(rows) + 2)
            continue
        assert len(lines) == len(rows) + 1 and len({len(line) for line in lines}) == 1
        assert lines[0].split() == " ".join(head for head, _ in phenomenon.columns.values()).split()
        for line, row in zip(lines[1:], rows):
            for word, (column, (_, form)) in zip(re.split("  +", line.strip()), phenomenon.columns.items()):
                if isinstance(row[column], float):
                    factor = 100 if name == "errors" and column != "change" else 1
                    assert word == format(factor * row[column], form)
                elif row[column] is None:
                    assert word == "-"
    assert {path.name for path in folder.iterdir()} == {*(f"{name}.png" for name in command.PHENOMENA), "out.json"}


@pytest.mark.whole
def test_the_sinks_of_the_embedded_model_are_the_beginnings_of_its_stories(everything):
    printed, numbers, _ = everything
    _, tokenizer = hf.load(EMBEDDED)
    tokens = load_windows("tales", tokenizer, 1024, 2).tokens
    begins = [(window == tokenizer.bos_id).nonzero()[:, 0].tolist() for window in tokens]
    assert numbers["sinks at"] == begins and any(len(of) > 1 for of in begins)
    assert f"sinks of window 0: {', '.join(f'{i} <s>' for i in begins[0])}" in printed
    for row in numbers["sinks"][1:]:
        assert min(row["first"], row["later"]) > 0.5 and row["largest other"] < 0.2 and row["heads"] > 0.8


@pytest.mark.whole
def test_what_docs_say_of_the_embedded_model(everything):
    """The page about this command in numbers, each sentence with a margin."""
    _, numbers, _ = everything
    outliers, norms, cosine, bias, keys = (numbers[name] for name in ("outliers", "norms", "cosine", "bias", "keys"))
    middle = slice(1, -1)
    assert outliers[0]["d_out c"] * outliers[-1]["d_out c"] < 0  # it comes with one sign and goes with the other
    assert abs(outliers[0]["d_out c"] + outliers[-1]["d_out c"]) < abs(outliers[0]["d_out c"]) / 4
    assert all(row["out"] > row["out others"] for row in outliers[:4])
    assert all(row["out"] < row["out others"] for row in outliers[4:])
    assert all(row["d_out c"] < outliers[0]["d_out c"] / 10 for row in outliers[middle])  # it stays as it is
    assert all(30 < row["ratio"] < 55 for row in outliers[:-1])
    assert all(row["k sinks"] < 0.15 and row["v sinks"] < 0.4 and row["q sinks"] < 0.7 for row in norms[1:])
    assert all(row["first"] < -0.1 and row["others"] < -0.1 and -0.1 < row["later"] < 0.5 for row in cosine[1:])
    assert all(row["first"] < row["later"] - 0.1 for row in cosine[1:])
    assert all(row["attention"] > 0.6 and row["within"] > 0.95 for row in bias[1:])
    assert all(row["consistency"] > 0.7 and row["rest"] < 0.4 for row in bias[1:])
    assert all(row["cliff"] > 4 and row["sinks"] == 1 and row["longer"] > 1.8 for row in keys[1:])
    assert keys[0]["cliff"] < 1.2
    errors = {(row["scheme"], row["of"], row["bits"]): row["change"] for row in numbers["errors"]}
    for bits in (4, 3, 2):
        assert errors["token-dynamic", "K", bits] < -0.9 and errors["token-dynamic", "V", bits] < -0.9
        assert errors["channel-dynamic", "K", bits] > 8
        assert abs(errors["token-static", "K", bits]) < 0.02 and errors["channel-static", "K", bits] < -0.7
    widths = {(row["bits"], row["kept"]): row for row in numbers["widths"]}
    assert widths[4, False]["bias off"] > 0.4 > 0.05 > widths[4, True]["bias off"]
    for kept in (False, True):
        changes = [widths[bits, kept]["bias off"] for bits in range(2, 9)]
        assert changes == sorted(changes, reverse=True)


def test_anchors_are_ranked_by_their_damage(monkeypatch, tmp_path, capsys):
    """On the embedded model: the short score with the error of the row nearly ranks as the damage does."""
    run(monkeypatch, "anchors", *SMALL[:-1], "8", "--json", str(tmp_path / "out.json"))  # 256 different keys of block 0
    rows = {(r["of"], r["ranked by"]): r for r in json.loads((tmp_path / "out.json").read_text())["anchors"]}
    out, err = capsys.readouterr()
    assert "rank correlation" in out and err == ""
    for kind in "KV":
        plain, weighed = (rows[kind, by]["rank correlation"] for by in ("score", "score x error"))
        assert len(plain) == 6 and sum(plain[1:]) / 5 > 0.6 and sum(weighed) / 6 > 0.85
    assert min(rows["V", "score x error"]["rank correlation"]) > 0.99  # of values the bound of one token is exact
    assert all(0 <= x <= 1 for r in rows.values() for x in r["damage in the top 1%"])
    for of in ("K", "K, without V", "V"):  # no rank holds more of the damage than that by the damage itself
        ceiling = rows[of, "itself (ceiling)"]
        assert min(ceiling["rank correlation"]) > 0.999
        others = [r for (of_row, by), r in rows.items() if of_row == of]
        for layer, most in enumerate(ceiling["damage in the top 1%"]):
            assert all(r["damage in the top 1%"][layer] <= most + 1e-6 for r in others) and most > 0.05


@pytest.mark.whole
def test_a_model_without_sinks_is_told_of(monkeypatch, tmp_path, capsys):
    """No token is a sink if more than all heads have to agree. What needs none is shown, the rest says why not."""
    monkeypatch.setattr(sinks, "HEADS", 1.1)
    run(monkeypatch, "all", "--vq", "d8m16", *SMALL, "--out", str(tmp_path), "--json",
        str(tmp_path / "out.json"))
    out, numbers = capsys.readouterr().out, json.loads((tmp_path / "out.json").read_text())
    assert "sinks of window 0: none" in out and numbers["sinks at"] == [[], []]
    for name, phenomenon in command.PHENOMENA.items():
        assert (f"{name}: no token of this text is a sink" in out) == phenomenon.needs_sinks
        assert (numbers[name] is None) == phenomenon.needs_sinks == (not (tmp_path / f"{name}.png").exists())


def test_a_random_model_has_no_sinks(tmp_path, monkeypatch, capsys):
    torch.manual_seed(1)
    model = Llama(hf.load_config(EMBEDDED))
    hf.save(model, EMBEDDED / "tokenizer.model", tmp_path)
    run(monkeypatch, "sinks", "outliers", *SMALL, "--model", str(tmp_path))
    assert "sinks of window 0: none" in capsys.readouterr().out


def test_several_names_each_once_and_half_precision(monkeypatch, capsys):
    run(monkeypatch, "norms", "keys", "norms", "--dtype", "bf16", "--context", "32", "--device", "cpu")
    out = capsys.readouterr().out
    assert out.count("\n\n") == 2 and "torch.bfloat16" in out and out.index("Q others") < out.index("cliff")


def test_no_calibration_text_is_read_for_what_needs_none(monkeypatch, tmp_path, capsys):
    text = tmp_path / "short.txt"
    text.write_text("Once there was a baker who lived in Ravfield. " * 60)
    short = ["--data", str(text), "--context", "128", "--windows", "2", "--calib-windows", "500"]
    run(monkeypatch, "norms", *short)
    with pytest.raises(SystemExit):
        run(monkeypatch, "norms", "errors", *short)
    assert "Q others" in capsys.readouterr().out.split("model")[1]


def test_no_attention_matrix_is_ever_whole(monkeypatch):
    """With tiles of one query no tensor of T x T numbers is seen by softmax, whatever is asked for."""
    seen, T = [], 128
    softmax = torch.Tensor.softmax
    monkeypatch.setattr(torch.Tensor, "softmax", lambda x, *a: (seen.append(x.shape[-2]), softmax(x, *a))[1])
    monkeypatch.setattr(antkv, "MAX_SCORES", 1)
    monkeypatch.setattr(antkv, "MIN_QUERIES", 1)
    model, tokenizer = hf.load(EMBEDDED)
    window = load_windows("tales", tokenizer, T, 1).tokens
    _, marks = sinks.find_sinks(model, window)
    sinks.biases(model, window, marks)
    sinks.attention_map(model, window[0])
    assert set(seen) == {1}


def test_help_names_every_phenomenon(monkeypatch, capsys):
    with pytest.raises(SystemExit) as end:
        run(monkeypatch, "--help")
    out = capsys.readouterr().out
    assert end.value.code == 0 and all(f"\n  {name} " in out for name in [*command.PHENOMENA, "all"])
    for place in ("Figure 1a", "Section 3.1", "Figure 4", "Figures 2 and 5", "Figure 5a", "Eq. 9", "Figure 6",
                  "Table 1", "Figure 7", "Appendix D"):
        assert place in " ".join(out.split())


@pytest.mark.one_in(4)
@pytest.mark.parametrize("words", [
    ["--vq", "d3m8"], ["--context", "100000"], ["--model", "no/folder"], ["--calib-windows", "0"], ["--windows", "0"],
    ["--json", "no/such/folder/x.json"], ["--vq", "d8m4096"], ["nothing"],
    ["errors", "--weights", "awq"], ["--formula", "integer-zero"], ["errors", "--group-size", "0"],
    ["--windows", "9" * 30], ["--context", "9" * 30], ["errors", "--group-size", "9" * 30],
    ["--calib-windows", "9" * 30],
    ["widths", "--group-size", "3"], ["--threshold", "0"], ["--threshold", "nan"], ["--out", __file__],
    ["--out", f"{__file__}/x"], ["--context", "1"], ["--device", "nowhere"], ["--data", "no/file"]])
def test_bad_input_is_one_clear_line(monkeypatch, capsys, words):
    small = [w for pair in zip(SMALL[::2], SMALL[1::2]) if pair[0] not in words for w in pair]
    with pytest.raises(SystemExit) as end:
        run(monkeypatch, "anchors", *words, *small)
    err = capsys.readouterr().err
    assert end.value.code == 2 and err.count("\n") == 1 and "error: " in err


def test_attention_line_by_line_gives_the_same(monkeypatch, tmp_path):
    """--attention plain runs the model's visible lines; PyTorch's own attention is not called."""
    small = ["norms", "outliers", "--context", "64", "--windows", "1", "--json"]
    run(monkeypatch, *small, str(tmp_path / "fused.json"))
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", None)
    run(monkeypatch, *small, str(tmp_path / "plain.json"), "--attention", "plain")
    plain, fused = (json.loads((tmp_path / f"{word}.json").read_text()) for word in ("plain", "fused"))
    for name in ("norms", "outliers"):
        for one, other in zip(plain[name], fused[name], strict=True):
            assert one.pop("channels", None) == other.pop("channels", None)  # a list, of whole numbers
            assert one == pytest.approx(other, rel=1e-3, abs=1e-4)


# Figures

@pytest.mark.whole  # a process of its own
def test_figures_leave_the_backend_of_a_notebook_alone(tmp_path):
    """No pyplot, so no backend is chosen; in a process of its own, as other tests may have imported it."""
    code = """
import sys
from tinykv.analysis import figures
fp16 = {"label": "fp16", "weights": None, "ppl": 2.0, "bits_true": 16.0, "preserve": 0}
rtn = {"label": "rtn bits=2", "weights": None, "ppl": 3.0, "bits_true": 2.0, "preserve": 0}
figures.save(figures.perplexity([fp16, rtn]), sys.argv[1])
assert "matplotlib" in sys.modules and "matplotlib.pyplot" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "x.png"], capture_output=True, text=True,
                          cwd=EMBEDDED.parents[2])
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "x.png").read_bytes().startswith(PNG)


def row(label, ppl, bits=2.0, preserve=0, weights=None):
    return {"label": label, "weights": weights, "ppl": ppl, "bits_true": bits, "preserve": preserve}


FP16 = row("fp16", 2.0, 16.0)


def drawn(rows):
    """{label: [(x, y)]} of the lines in the figure, and the points of the open markers."""
    panel, = figures.perplexity([FP16, *rows]).axes
    lines, below = {}, []
    for line in panel.lines:
        points = list(zip(*(values.tolist() for values in line.get_data())))
        if line.get_markerfacecolor() == "white":
            below += points
        else:
            lines[line.get_label()] = points
    assert panel.get_yscale() == "log"
    return lines, below


@pytest.mark.whole
def test_perplexity_is_drawn_above_fp16_s_in_per_cent():
    lines, below = drawn([row("rtn bits=2", 3.0), row("rtn bits=4", 2.002, 4.0), row("rtn bits=8", 1.99, 8.0)])
    assert lines.keys() == {"rtn"} and below == [(8.0, figures.FLOOR)]
    assert lines["rtn"] == [pytest.approx(point) for point in ((2, 50), (4, 0.1), (8, figures.FLOOR))]


def test_a_line_joins_what_differs_in_bits_alone():
    rows = [row(f"pfn scheme={scheme} bits={bits}", 2 + 1 / bits, bits, 5, weights)
            for bits in (4, 2) for scheme in ("kvquant", "token-static") for weights in (None, "awq-3")]
    lines, _ = drawn([*rows, row("cq vq=d4m256", 2.2), row("cq vq=d8m256", 2.3, 1.0), row("kivi", 2.1)])
    assert lines.keys() == {"pfn scheme=kvquant", "pfn scheme=kvquant awq-3", "pfn scheme=token-static",
                            "pfn scheme=token-static awq-3", "cq", "kivi"}
    assert all([x for x, _ in points] == [2, 4] for name, points in lines.items() if name.startswith("pfn"))


def test_where_keys_and_values_have_bits_of_their_own_no_line_goes_back_and_forth():
    rows = [row(f"rtn k_bits={k} v_bits={v}", 2 + 1 / k + 1 / v, (k + v) / 2) for k in (2, 4) for v in (2, 4)]
    lines, _ = drawn(rows)
    assert lines.keys() == {"rtn v_bits=2", "rtn v_bits=4"}


def test_where_kept_tokens_were_varied_they_are_the_x_axis():
    rows = [row(f"pfn preserve={n} bits={bits}", 2 + 1 / n / bits, bits, n) for n in (5, 1) for bits in (2, 3)]
    share = row("antkv", 2.1, preserve="1%")
    lines, _ = drawn([*rows, share, row("rtn bits=2", 3.0)])
    assert {name: [x for x, _ in points] for name, points in lines.items()} == {
        "pfn bits=2": [1, 5], "pfn bits=3": [1, 5], "rtn bits=2": [0]}


# ---- a whole text, a layer, a prefix

def test_a_text_is_looked_at_whole(monkeypatch, tmp_path, capsys):
    """All of its tokens, after <s>, in one window: nothing is put aside, and no window of --data is read."""
    path = tmp_path / "text.txt"
    path.write_text("Ada lives in the red house. " * 6)
    _, tokenizer = hf.load(EMBEDDED)
    n = 1 + len(tokenizer.encode(path.read_text()))
    run(monkeypatch, "maps", "norms", "--text", str(path), "--layer", "1", "--json", str(tmp_path / "out.json"),
        "--out", str(tmp_path))
    out, numbers = capsys.readouterr().out, json.loads((tmp_path / "out.json").read_text())
    assert f"text {path}: {n} tokens" in out and len(numbers["sinks at"]) == 1 and numbers["context"] == n
    assert all(0 <= row["token"] < n for row in numbers["maps"])
    assert (tmp_path / "maps.png").read_bytes().startswith(PNG)
    run(monkeypatch, "maps", "--text", str(path), "--bos", "none")
    assert f"text {path}: {n - 1} tokens" in capsys.readouterr().out


def test_a_prefix_is_exact_from_none_to_all_of_its_tokens(monkeypatch, tmp_path, capsys):
    path = tmp_path / "prompt.txt"
    path.write_text("Ada lives here.")
    _, tokenizer = hf.load(EMBEDDED)
    n = 1 + len(tokenizer.encode("Ada lives here."))
    run(monkeypatch, "prefix", "--prefix", str(path), *SMALL, "--json", str(tmp_path / "out.json"))
    rows = json.loads((tmp_path / "out.json").read_text())["prefix"]
    assert [row["n"] for row in rows] == list(range(n + 1)) and rows[1]["last"] < rows[0]["last"]
    assert len(capsys.readouterr().out.split("\n\n")[1].splitlines()) == n + 2


def test_the_layer_of_a_figure(tmp_path):
    model, tokenizer = hf.load(EMBEDDED)
    windows = load_windows("tales", tokenizer, 128, 1).tokens
    _, marks = sinks.find_sinks(model, windows)
    for shown, layer in ((None, 3), (1, 1)):
        _, example = sinks.norms(model, windows, marks, shown=shown)
        assert example["layer"] == layer
        figure = figures.norms(sinks.norms(model, windows, marks)[0], example)
        assert figure.axes[0].get_title() == f"layer {layer}"


@pytest.mark.parametrize("words, named", [
    (["norms", "--layer", "6"], "layers 0 to 5"), (["norms", "--prefix", "bos"], "--prefix is a setting of prefix"),
    (["norms", "--text", "no/file"], "no such file"), (["prefix", "--prefix", "bos", "--text", "README.md"], "--text")])
def test_what_does_not_go_together_is_refused(monkeypatch, capsys, words, named):
    with pytest.raises(SystemExit):
        run(monkeypatch, *words, *SMALL)
    err = capsys.readouterr().err
    assert named in err and err.count("\n") == 1
