"""docs/ladder/: each page prints the package's own figures, by code of its own."""
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

from eval_ppl import compare

ROOT = Path(__file__).parent.parent
PAGES = sorted(ROOT.glob("docs/ladder/*.py"))


def printed(page, texts, monkeypatch, capsys, columns=2):
    """[(method, perplexity)] of a page, or more columns, on so many texts."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [page, str(texts)])
    monkeypatch.setattr(sys, "path", sys.path[:])
    with torch.no_grad():  # a page turns gradients off; afterwards they are as they were
        runpy.run_path(f"docs/ladder/{page}")
    return [tuple(line.split()[:columns]) for line in capsys.readouterr().out.splitlines()]


def measured(methods, columns=2, **given):
    """The same of the package."""
    return [(row["label"], f"{row['ppl']:.3f}", f"{row['bits_true']:.2f}")[:columns]
            for row in compare(methods, **given)]


def test_sinks(monkeypatch, capsys):
    """fp16, rtn, pfn, kvsink, and the bits that they store."""
    assert printed("1_sinks.py", 2, monkeypatch, capsys, 3) == measured("kvsink", 3, windows=2)


def test_stream(monkeypatch, capsys):
    """KIVI without a window of recent tokens, as it is, and beside OTT."""
    rows = []
    for method, group, recent in (("kivi", 128, 0), ("kivi", 32, 128), ("kivi", 128, 32), ("ott", 128, 32)):
        rows += measured(f"fp16,{method}", windows=2, protocol="stream", group_size=group, recent=recent)[1:]
    assert printed("2_stream.py", 2, monkeypatch, capsys) == rows


@pytest.mark.whole  # seconds of k-means
def test_codebooks(monkeypatch, capsys):
    """Without weights in k-means, which need gradients."""
    assert printed("3_codebooks.py", 2, monkeypatch, capsys, 3) == measured(
        "fp16,cq,antkv", 3, windows=2, sensitivity="none")[1:]


@pytest.mark.whole
@pytest.mark.parametrize("page", ["2_stream.py", "3_codebooks.py"])
def test_a_page_says_what_it_prints(page, monkeypatch, capsys):
    """To its last digit, or what k-means makes of another machine's rounding."""
    said = (ROOT / "docs/ladder" / page).read_text().split('"""')[1]
    lines = printed(page, 16, monkeypatch, capsys, 3)[-2:]
    figures = [float(number) for line in lines for number in line[1:] if re.match(r"\d+\.\d+", number)]
    said = [float(number) for number in re.findall(r"\d+\.\d+", said) if number != "8.178"]
    assert said == (figures if page == "2_stream.py" else pytest.approx(figures, rel=0.005))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_breakpoints_are_in_update(page):
    """The number of a line that the page, or the tour, gives to the debugger: where `update` begins."""
    lines = page.read_text().splitlines()
    numbers = re.findall(r"`b (\d+)", page.read_text())
    if page.name == "1_sinks.py":
        numbers += re.findall(r"\(Pdb\) b (\d+)", (ROOT / "docs/tour.md").read_text())
    for number in numbers:
        begin = next(i for i, line in enumerate(lines) if "def update" in line)
        assert "kept = " in lines[int(number) - 1] and begin < int(number) - 1 <= begin + 2
