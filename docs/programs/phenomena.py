r"""Measure what docs/analysis.md says, and keep it in docs/analysis.json: the rows of `python -m tinykv.lab.analysis`,
and for each number its standard error over windows, from each window by itself.

    python docs/programs/phenomena.py all
    python docs/programs/phenomena.py sinks outliers norms cosine bias keys --model path/to/SmolLM2-135M-Instruct \
        --data wikitext2-test.txt --context 512
"""
from dataclasses import replace
from statistics import stdev

from results import ROOT, read_data, write_data

from tinykv import hf
from tinykv.lab.analysis.__main__ import LONGEST, NAMES, PHENOMENA, load_text, parser
from tinykv.lab.analysis.load import load_model
from tinykv.lab.analysis.walk import rows_of

RECORD = ROOT / "docs" / "analysis.json"


def measured(module, text):
    """{column: [number, error] of each row}; what has no error, as words and lists, by itself."""
    of_windows = [rows_of(module, replace(text, windows=text.windows[w:w + 1], marks=text.marks[w:w + 1]))
                  for w in range(len(text.windows))]
    found = {column: [row[column] for row in rows_of(module, text)] for column in module.COLUMNS}
    for column, numbers in found.items():
        for i, number in enumerate(numbers):
            seen = [rows[i][column] for rows in of_windows if i < len(rows) and isinstance(rows[i][column], float)]
            if len(seen) > 1:
                numbers[i] = [float(f"{number:.5g}"), float(f"{stdev(seen) / len(seen) ** 0.5:.2g}")]
    return found


def main():
    p = parser()
    p.set_defaults(windows=8, calib_windows=16)
    args = p.parse_args()
    names = NAMES if "all" in args.what else args.what
    text = load_text(args, names, load_model(args, LONGEST))
    record = read_data(RECORD)
    of_model = record["embedded" if args.model == str(hf.EMBEDDED) else "SmolLM2"]
    of_model |= {"context": args.context, "windows": args.windows,
                 "sinks at": [marks.nonzero()[:, 0].tolist() for marks in text.marks]}
    for name in names:
        of_model[name] = measured(PHENOMENA[name], text)
        write_data(record, RECORD)


if __name__ == "__main__":
    main()
