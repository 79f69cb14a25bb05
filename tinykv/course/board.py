"""A leaderboard of students' own methods: `python -m tinykv.course.board FOLDER --seed N`.

FOLDER has a folder for each student, with a method.py whose class is `Mine`. A method's place is its KL from fp16, at 2
or 3 bits, whichever is better within the budget of true bits. Who is not worse than the leader of a rank by a paired
test shares that rank.

A file runs in two processes, under the grader's limits. The first reads the text, and writes codes and kept rows, whose
bytes are the true bits. The second has not seen the text, and writes the keys and values that these stand for. With
them the board itself reads the text and measures: no figure can be forged, and a row that is not in the bytes is lost.
"""
import json
import subprocess
import sys
from pathlib import Path
from shutil import copyfile
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file, save_file

from tinykv import UserError, hf
from tinykv.cache import KVCache
from tinykv.calibrate import calibrate
from tinykv.cli import Parser, bar, check_counts, one_line, print_columns
from tinykv.course.assignments import ROOT
from tinykv.course.confine import confine
from tinykv.course.grade import confined_environment
from tinykv.data import load_windows
from tinykv.evaluate import Result, add_predictions, measure, paired
from tinykv.files import first_line
from tinykv.methods.registry import METHODS
from tinykv.run.settings import constructor_arguments, load_class

BASELINES = "rtn", "kivi", "kvsink"
LONGEST = 600  # seconds of a process
BITS = 2, 3


def parser():
    p = Parser(prog="python -m tinykv.course.board", description=__doc__.split("\n\n")[0])
    p.add_argument("folder", type=Path, metavar="FOLDER")
    p.add_argument("--budget", type=float, default=3.0, help="true bits of a number, at most")
    p.add_argument("--seed", type=int, default=0, help="which text; a large number, secret until the last day")
    p.add_argument("--windows", type=int, default=16, help="of 1,024 tokens; as many calibrate")
    p.add_argument("--draws", type=int, default=3, help="of the calibration text")
    return p


def main():
    p = parser()
    args = p.parse_args()
    with one_line(p):
        check_counts(args, 1, "windows", "draws")
        files = sorted(args.folder.glob("*/method.py"))
        if not files:
            raise UserError(f"there is no */method.py in {args.folder}")
        text = Text(args.windows, args.draws, args.seed)
        entries = [(f"({name})", name) for name in BASELINES]
        entries += [(file.parent.name, f"{file.resolve()}:Mine") for file in files]
        board, out = [], []
        for student, name in bar(entries, "measuring", unit="method"):
            try:
                rows = [row for row in text.measured(name) if row["bits_true"] <= args.budget]
                if not rows:
                    raise UserError(f"no row within {args.budget:g} true bits")
                board.append((student, min(rows, key=lambda row: row["kld"])))
            except Exception as error:  # whatever its files hold
                out.append((student, first_line(error)))
        print_columns(["rank", "who", "KL", "true bits"], lines_of(board), left=2)
        for student, why in out:
            print(f"-  {student}: {why}")


def lines_of(board):
    """Ranks, the best first: who cannot be told from a rank's leader (paired, p > .05) shares it."""
    lines, rank, leader = [], 0, None
    for place, (student, row) in enumerate(sorted(board, key=lambda entry: entry[1]["kld"]), 1):
        if leader is None or not shared(row, leader):
            rank, leader = place, row
        lines.append([str(rank), student, f"{row['kld']:.4f}", f"{row['bits_true']:.2f}"])
    return lines


def shared(row, leader):
    *_, p, _ = paired(row["window_kl"], leader["window_kl"])
    return p is None or p > 0.05


class Text:
    """The text that is measured on, and the calibration's."""

    def __init__(self, windows, draws, seed):
        self.model, tokenizer = hf.load(hf.EMBEDDED)
        self.test = load_windows("tales", tokenizer, 1024, windows, "test", seed)
        calibration = load_windows("tales", tokenizer, 1024, windows * draws, "calibration", seed).tokens
        self.calibration = calibration.unflatten(0, (draws, windows))  # (draws, C, T)
        self.exact = measure(self.model, METHODS["fp16"](self.model.config), self.test)

    def measured(self, name):
        """A row for each of BITS."""
        with TemporaryDirectory(ignore_cleanup_errors=True) as work:
            first, second = Path(work, "first"), Path(work, "second")
            run(encode, name, first, {"calibration": self.calibration, "test": self.test.tokens})
            second.mkdir()
            for file in first.glob("codes-*"):
                copyfile(file, second / file.name)
            run(decode, name, second, {"calibration": self.calibration})
            return [self.row(second, bits) for bits in BITS]

    @torch.inference_mode()
    def row(self, folder, bits):
        """What `compare` says of a method, from its codes and rows of each draw."""
        tokens, row = self.test.tokens, {"bits_true": 0, "window_kl": []}
        for draw in range(len(self.calibration)):
            rows, result = load_file(folder / f"rows-{bits}-{draw}"), Result()
            hidden = self.model(tokens, Given(rows), logits=False)  # (W, T, D)
            add_predictions(result, self.model, hidden, torch.stack(self.exact.hidden), tokens, self.test.answers)
            row["window_kl"].append([kl * len(tokens) / result.targets for kl in result.kl])
            held = sum(x.nbytes for x in load_file(folder / f"codes-{bits}-{draw}").values())
            numbers = sum(x.numel() for x in rows.values())
            row["bits_true"] += 8 * held / numbers / len(self.calibration)
        return {**row, "kld": torch.tensor(row["window_kl"]).mean().item()}


class Given:
    """A cache whose keys, rotated, and values are given: {"0.k": (B, Hkv, S, d), ...}."""

    def __init__(self, rows):
        self.rows = rows

    def expect(self, tokens):
        return tokens, 0

    def update(self, layer, q, k, v, seen):
        K, V = (self.rows[f"{layer}.{kind}"].float() for kind in "kv")
        if K.shape != (len(q), k.shape[1], seen + q.shape[2], k.shape[3]) or V.shape != K.shape:
            raise UserError(f"layer {layer}'s keys and values have the wrong shape")
        return K, V

    def observe(self, layer, hidden):
        pass


# The processes of one file

def run(part, name, folder, texts):
    """Run `encode` or `decode` in a process that reads and writes this folder. UserError if it fails."""
    folder.mkdir(exist_ok=True)
    save_file(texts, folder / "texts")
    words = [sys.executable, "-m", "tinykv.course.board", "--confined", part.__name__]
    try:
        subprocess.run(words, input=json.dumps([name, str(folder)]), text=True, timeout=LONGEST, capture_output=True,
                       cwd=ROOT, env={**confined_environment(folder), "PYTHONPATH": str(ROOT)})
    except subprocess.TimeoutExpired:
        raise UserError(f"{part.__name__}: no end within {LONGEST} seconds") from None
    said = folder / "said"
    if not said.is_file() or said.read_text(encoding="utf-8"):
        why = said.read_text(encoding="utf-8") if said.is_file() else "it ended its process"
        raise UserError(f"{part.__name__}: {why}")


def confined(part):
    """In that process: give up all rights, then do the part, and say what went wrong."""
    name, folder = json.load(sys.stdin)
    file = name.rpartition(":")[0]
    confine(folder, [ROOT, *([Path(file).parent] if file else [])], LONGEST)
    said = ""
    try:
        part(name, Path(folder))
    except (Exception, SystemExit) as error:
        said = first_line(error) or type(error).__name__
    Path(folder, "said").write_text(said, encoding="utf-8")


def caches(name, folder):
    """{"bits-draw": a cache of the method, calibrated}, and the texts: one by one."""
    model, texts = hf.load(hf.EMBEDDED)[0], load_file(folder / "texts")
    for draw, windows in enumerate(texts["calibration"]):  # (C, T)
        for bits in BITS:
            cls = load_class(name)
            method = cls(model.config, **constructor_arguments(cls, {"bits": bits}))
            calibrate(model, method, windows, seed=draw)
            yield f"{bits}-{draw}", KVCache(model, method, "paper"), texts


@torch.no_grad()
def encode(name, folder):
    """Write what the cache holds of the test."""
    for entry, cache, texts in caches(name, folder):
        cache.model(texts["test"], cache, logits=False)
        held = {}
        for layer in cache.layers:
            for rows in (layer.keys, layer.values):
                parts = {**vars(rows.codes), "kept_positions": rows.kept_positions, "kept_rows": rows.kept_rows}
                held |= {f"{rows.layer}.{rows.kind}.{part}": x.clone() for part, x in parts.items() if x is not None}
        save_file(held, folder / f"codes-{entry}")


@torch.no_grad()
def decode(name, folder):
    """Write what attention reads of it: keys, rotated, and values, in 16 bits."""
    for entry, cache, texts in caches(name, folder):
        held, found = load_file(folder / f"codes-{entry}"), {}
        T = texts["calibration"].shape[-1]
        for layer in cache.layers:
            for rows in (layer.keys, layer.values):
                begin = f"{rows.layer}.{rows.kind}."
                parts = {key.removeprefix(begin): x for key, x in held.items() if key.startswith(begin)}
                rows.kept_positions, rows.kept_rows = parts.pop("kept_positions", None), parts.pop("kept_rows", None)
                config, W = cache.config, len(parts["packed"])
                rows.recent = torch.zeros(W, config.num_key_value_heads, 0, config.head_dim, dtype=torch.float16)
                like = torch.zeros(1, config.num_key_value_heads, T, config.head_dim)
                rows.codes, rows.n_coded = type(rows.codec.encode(like))(**parts), T
            layer.dtype = torch.float16
            K, V = layer.read()
            found |= {f"{layer.layer}.k": K.contiguous(), f"{layer.layer}.v": V.contiguous()}
        save_file(found, folder / f"rows-{entry}")


if __name__ == "__main__":
    confined({"encode": encode, "decode": decode}[sys.argv[2]]) if sys.argv[1:2] == ["--confined"] else main()
