"""What `python -m tinykv.inspect` prints and draws."""
import json
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tinykv import inspect

SMALL = ["--context", "128", "--windows", "2", "--calib-windows", "4"]


@given(st.permutations(range(7)), st.permutations(range(7)))
def test_rank_correlation_is_spearmans(a, b):
    """1 - 6 sum d^2 / (n (n^2 - 1)), whatever the numbers behind the ranks."""
    plain = 1 - 6 * sum((x - y) ** 2 for x, y in zip(a, b)) / (7 * 48)
    numbers = torch.tensor(a).float().exp(), torch.tensor(b).float() * 3 - 100
    assert inspect.rank_correlation(*numbers).item() == pytest.approx(plain, abs=1e-5)


def run(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["inspect", *words])
    inspect.main()


def test_anchors_are_ranked_by_their_damage(monkeypatch, tmp_path, capsys):
    """On the embedded model: the short score with the error of the row nearly ranks as the damage does."""
    run(monkeypatch, "anchors", *SMALL, "--out", str(tmp_path), "--json", str(tmp_path / "out.json"))
    rows = {(r["of"], r["ranked by"]): r for r in json.loads((tmp_path / "out.json").read_text())}
    assert (tmp_path / "anchors.png").read_bytes().startswith(b"\x89PNG")
    out, err = capsys.readouterr()
    assert "rank correlation" in out and err == ""
    for kind in "KV":
        plain, weighed = (rows[kind, by]["rank correlation"] for by in ("score", "score x error"))
        assert len(plain) == 6 and sum(plain[1:]) / 5 > 0.6 and sum(weighed) / 6 > 0.85
    assert min(rows["V", "score x error"]["rank correlation"]) > 0.99  # of values the bound of one token is exact
    assert all(0 <= x <= 1 for r in rows.values() for x in r["damage in the top 1%"])


@pytest.mark.parametrize("words", [["--vq", "d3m8"], ["--context", "100000"], ["--model", "no/folder"],
                                   ["--calib-windows", "0"], ["--windows", "0"], ["--json", "no/such/folder/x.json"],
                                   ["--vq", "d8m4096"]])
def test_bad_input_is_one_clear_line(monkeypatch, capsys, words):
    small = [w for pair in zip(SMALL[::2], SMALL[1::2]) if pair[0] not in words for w in pair]
    with pytest.raises(SystemExit) as end:
        run(monkeypatch, "anchors", *small, *words)
    err = capsys.readouterr().err
    assert end.value.code == 2 and err.count("\n") == 1 and "error: " in err
