"""The capstone, a method of one's own against a budget: `python -m tinykv.course.capstone FILE.py:Class|FOLDER`.

Of the methods that take at most 2.5 true bits a number at 128K tokens, and at most 3 in a window, the one with the
smallest KL divergence from fp16 wins. The seed chooses the texts and the model: the embedded one with its channels in
another order, which computes the same, so that a channel known by heart is of no use. docs/course/README.md says how to
read the table.
"""
import json
import math
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from shutil import copyfile

import torch

from eval_ppl import compare
from tinykv import UserError, hf
from tinykv.course.assignments import ROOT, named
from tinykv.course.confine import confine
from tinykv.course.grade import confined_environment
from tinykv.run.cli import EMBEDDED, Parser, one_line, print_columns

FAR, NEAR = 2.5, 3.0  # true bits of a number that a method may take: at 128K tokens, and in a window
REFERENCE = "kvsink"
WINDOWS = 16  # of text to measure on
LONGEST = 1200  # seconds of a method


def parser():
    p = Parser(prog="python -m tinykv.course.capstone", description=__doc__.split("\n\n")[0])
    p.add_argument("submission", metavar="FILE.py:Class|FOLDER",
                   help="a method, or a folder of files that each have a line CAPSTONE = \"Class\"")
    p.add_argument("--seed", type=int, default=0, help="chooses texts, and the order of the model's channels")
    return p


def main():
    p = parser()
    args = p.parse_args()
    with one_line(p):
        rows = [measured(method, args.seed) for method in [REFERENCE, *methods_of(args.submission)]]
        print_rows(sorted(rows, key=lambda row: (bool(row["fault"]), row["kld"])))


def methods_of(submission):
    """["FILE.py:Class"]: one, or those of a folder."""
    if not Path(submission).is_dir():
        file, _, name = submission.rpartition(":")
        if not name.isidentifier() or not Path(file).is_file():
            raise UserError(f"{submission} is neither FILE.py:Class nor a folder")
        return [submission]
    found = []
    for file in sorted(Path(submission).rglob("*.py")):
        name = named(file, "CAPSTONE")
        found += [f"{file}:{name}"] if name else []
    if not found:
        raise UserError(f"no Python file in {submission} has a line such as CAPSTONE = \"MyMethod\"")
    return found


def measured(method, seed):
    """A method's row, measured in a process of its own that can write into a temporary folder alone."""
    with tempfile.TemporaryDirectory() as folder:
        folder, inside = Path(folder), method
        if method != REFERENCE:
            file, _, name = method.rpartition(":")
            copyfile(file, folder / "method.py")
            inside = f"{folder / 'method.py'}:{name}"
        words = [sys.executable, "-c", "from tinykv.course.capstone import measure; measure()", inside, seed, folder]
        row = {"fault": f"it ended without a result, or took more than {LONGEST} seconds"}
        with suppress(subprocess.TimeoutExpired, OSError, ValueError):
            subprocess.run(list(map(str, words)), cwd=ROOT, env=confined_environment(folder), timeout=LONGEST,
                           stdin=subprocess.DEVNULL, capture_output=True)
            row = json.loads((folder / "row.json").read_text())
    row = {"kld": math.inf, **row, "submission": method}
    if not row["fault"] and (row["bits_128k"] > FAR or row["bits_true"] > NEAR):
        row["fault"] = "over the budget"
    return row


def measure():
    """The process of one method: writes its row."""
    method, seed, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    model, tokenizer = hf.load(EMBEDDED)
    reorder_channels(model, seed)
    confine(folder, readable=[ROOT])
    try:
        row = compare(method, model=(model, tokenizer), seed=seed, windows=WINDOWS)[-1]
        names = ("kld", "window_kl", "ppl", "bits_true", "bits_128k", "offline_bytes", "seconds", "fault")
        row = {name: row[name] for name in names}
    except Exception as error:
        row = {"fault": f"{type(error).__name__}: {error}".split("\n")[0][:200]}
    (folder / "row.json").write_text(json.dumps(row))


@torch.no_grad()
def reorder_channels(model, seed):
    """Put the channels of the hidden state in another order. The model computes what it did."""
    order = torch.randperm(model.config.hidden_size, generator=torch.Generator().manual_seed(seed))
    for name, weight in model.named_parameters():
        if weight.dim() == 1 or "o_proj" in name or "down_proj" in name:  # a norm, or what writes into the hidden state
            weight.copy_(weight[order])
        else:  # what reads from it, and the embedding
            weight.copy_(weight[:, order])


def print_rows(rows):
    """The leaderboard. behind: how much larger the KL is than the first one's, paired over windows, and its error."""
    lines, best = [], None
    for row in rows:
        if "window_kl" not in row:
            lines.append([row["submission"], *["-"] * 6, row["fault"] or ""])
            continue
        kl = torch.tensor(row["window_kl"][0], dtype=torch.float64)  # (W), of the one calibration
        best = kl if best is None else best
        behind = kl - best
        error = behind.std() / len(kl) ** 0.5 if len(kl) > 1 else math.nan
        lines.append([row["submission"], f"{row['kld']:.4f}", f"{behind.mean():.4f}", f"{error:.4f}",
                      f"{row['ppl']:.3f}", f"{row['bits_true']:.2f}", f"{row['bits_128k']:.2f}", row["fault"] or ""])
    print_columns(["method", "KL", "behind", "+-", "ppl", "true", "128K", "note"], lines, left=1)


if __name__ == "__main__":
    main()
