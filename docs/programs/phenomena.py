r"""Measure what docs/analysis.md says, and keep it in docs/analysis.json: the rows of `python -m tinykv.analysis`, and
for each number its standard error over windows, from each window by itself.

    python docs/programs/phenomena.py embedded
    python docs/programs/phenomena.py SmolLM2 --model path/to/SmolLM2-135M-Instruct --data wikitext2-test.txt \
        --context 512 --only sinks outliers norms cosine bias keys
"""
import argparse
import json
from dataclasses import replace
from pathlib import Path
from statistics import stdev

from results import ROOT

from tinykv import hf
from tinykv.analysis.__main__ import PHENOMENA
from tinykv.analysis.sinks import find_sinks
from tinykv.analysis.walk import Text, rows_of
from tinykv.data import load_windows

RECORD = ROOT / "docs" / "analysis.json"
WINDOWS, CALIBRATION = 8, 16


def measured(module, text):
    """{column: [number, error] of each row}; what has no error, as words and lists, by itself."""
    of_windows = [rows_of(module, replace(text, windows=text.windows[w:w + 1], marks=text.marks[w:w + 1]))
                  for w in range(WINDOWS)]
    found = {column: [row[column] for row in rows_of(module, text)] for column in module.COLUMNS}
    for column, numbers in found.items():
        for i, number in enumerate(numbers):
            seen = [rows[i][column] for rows in of_windows if i < len(rows) and isinstance(rows[i][column], float)]
            if len(seen) > 1:
                numbers[i] = [float(f"{number:.5g}"), float(f"{stdev(seen) / len(seen) ** 0.5:.2g}")]
    return found


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("name", choices=("embedded", "SmolLM2"))
    p.add_argument("--model", type=Path, default=hf.EMBEDDED)
    p.add_argument("--data", default="tales")
    p.add_argument("--context", type=int, default=1024)
    p.add_argument("--only", nargs="*", default=PHENOMENA)
    args = p.parse_args()
    model, tokenizer = hf.load(args.model)
    windows, calibration = (load_windows(args.data, tokenizer, args.context, n, split).tokens
                            for n, split in ((WINDOWS, "test"), (CALIBRATION, "calibration")))
    text = Text(model, windows, find_sinks(model, windows), model.config.num_hidden_layers // 2, calibration)
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    record[args.name] |= {"context": args.context, "windows": WINDOWS,
                          "sinks at": [marks.nonzero()[:, 0].tolist() for marks in text.marks]}
    record[args.name] |= {name: measured(PHENOMENA[name], text) for name in args.only}
    models = [",\n".join(f"{json.dumps(what)}: {json.dumps(rows)}" for what, rows in of_model.items())
              for of_model in record.values()]
    text = ",\n".join(f'"{name}": {{\n{of_model}}}' for name, of_model in zip(record, models))
    RECORD.write_text(f"{{{text}}}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
