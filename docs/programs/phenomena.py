r"""Measure what docs/analysis.md says, and keep it in docs/analysis.json: the rows of `python -m tinykv.analysis`, and
for each number its standard error over windows, from each window by itself.

    python docs/programs/phenomena.py embedded
    python docs/programs/phenomena.py SmolLM2 --model path/to/SmolLM2-135M-Instruct --data wikitext2-test.txt \
        --context 512 --only sinks outliers norms cosine bias keys
"""
import argparse
import json
from pathlib import Path
from statistics import fmean, stdev

from results import ROOT

from tinykv import hf
from tinykv.analysis.__main__ import PHENOMENA
from tinykv.analysis.sinks import find_sinks
from tinykv.analysis.walk import Text
from tinykv.data import load_windows

RECORD = ROOT / "docs" / "analysis.json"
WINDOWS, CALIBRATION = 8, 16
TOGETHER = ("outliers", "errors", "widths", "prefix", "anchors")  # are no plain means over windows


def measured(text, names):
    """{phenomenon: {column: [number, error] of each row}}"""
    parts = [Text(text.model, text.windows[w:w + 1], text.marks[w:w + 1], text.layer, text.calibration)
             for w in range(len(text.windows))]
    found = {}
    for name in names:
        of_parts = [PHENOMENA[name].measure(part) for part in parts]
        # means over windows that each layer's windows have, unless a row is of all windows together
        rows = PHENOMENA[name].measure(text) if name in TOGETHER else [None] * len(of_parts[0])
        found[name] = {column: [summary(row and row[column], [part[i][column] for part in of_parts if i < len(part)])
                                for i, row in enumerate(rows)] for column in PHENOMENA[name].COLUMNS}
        print(name, json.dumps(found[name]), flush=True)
    return found


def summary(number, of_windows):
    """A number, or the mean of its windows, in five digits, and its standard error in two; words and lists as they
    are."""
    seen = [x for x in of_windows if isinstance(x, float)]
    if len(seen) < 2:
        return of_windows[0] if number is None else number
    number = fmean(seen) if number is None else number
    return [float(f"{number:.5g}"), float(f"{stdev(seen) / len(seen) ** 0.5:.2g}")]


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("name", choices=("embedded", "SmolLM2"))
    p.add_argument("--model", type=Path, default=hf.EMBEDDED)
    p.add_argument("--data", default="tales")
    p.add_argument("--context", type=int, default=1024)
    p.add_argument("--only", nargs="*", default=list(PHENOMENA))
    args = p.parse_args()
    model, tokenizer = hf.load(args.model)
    windows, calibration = (load_windows(args.data, tokenizer, args.context, n, split).tokens
                            for n, split in ((WINDOWS, "test"), (CALIBRATION, "calibration")))
    marks = find_sinks(model, windows)
    text = Text(model, windows, marks, model.config.num_hidden_layers // 2, calibration)
    kept = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    of_model = kept.get(args.name, {}) | {"context": args.context, "windows": WINDOWS,
                                          "sinks at": [of_window.nonzero()[:, 0].tolist() for of_window in marks]}
    kept[args.name] = of_model | measured(text, args.only)
    lines = [f'"{name}": {{\n' + ",\n".join(f'"{what}": {json.dumps(rows)}' for what, rows in of_model.items()) + "}"
             for name, of_model in kept.items()]
    RECORD.write_text("{" + ",\n".join(lines) + "}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
