"""A student's place on Gradescope's leaderboard, of the table that eval_ppl.py has written of a method:
`python -m docs.course.leaderboard table.json results.json`.

The figures are those of a process that ran the student's file, so they can be forged, and a file that stores the text
has a KL of 0 in half a bit: read the files of the first places, and measure them again with another seed.
"""
import json
import sys
from pathlib import Path

BUDGET = 3.0  # true bits of a number, at most


def main(table, results):
    """Of the rows within the budget, which fp16's is not, the one with the lowest KL. No table: the method failed."""
    rows = json.loads(Path(table).read_text(encoding="utf-8"))["rows"] if Path(table).exists() else []
    rows = [row for row in rows if round(row["bits_true"], 2) <= BUDGET]
    result = {"score": 0, "output": f"no place: the method failed, or no row is within {BUDGET:g} true bits"}
    if rows:
        best = min(rows, key=lambda row: row["kld"])
        result = {"score": 0, "output": f"KL {best['kld']:.4f} at {best['bits_true']:.2f} true bits", "leaderboard": [
            {"name": "KL from fp16", "value": best["kld"], "order": "asc"},
            {"name": "true bits", "value": best["bits_true"], "order": "asc"}]}
    Path(results).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
