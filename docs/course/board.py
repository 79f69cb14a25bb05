"""A leaderboard of students' own methods: `python -m docs.course.board FOLDER --seed N`.

FOLDER has a folder for each student, with a method.py whose class is `Mine`. A method's place is its KL from fp16, at 2
or 3 bits, whichever is better within the budget of true bits. Who is not worse than the leader of a rank by a paired
test shares that rank.

A file runs in processes under the grader's limits. The first reads the text, and writes codes and kept rows: their
bytes are the true bits. For each number of bits and each calibration, another one, which has seen neither the text nor
other codes, writes the keys and values that these stand for. With them the board itself reads the text and measures: no
figure can be forged, and a row that is not in the bytes is lost. What stays open is a method that stores the text, or
its seed, and lets the model read it again: read the files of the first ranks. So is a bit here and there, by what a
process leaves in the machine's memory of files.
"""
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load, load_file, save_file

from docs.course import confine
from docs.course.assignments import ROOT
from tinykv import UserError, first_line, hf
from tinykv.cache import KVCache
from tinykv.calibrate import calibrate
from tinykv.cli import Columns, Parser, bar, one_line, printable
from tinykv.data import load_windows
from tinykv.differences import paired
from tinykv.evaluate import Result, add_predictions, measure
from tinykv.methods.registry import METHODS
from tinykv.run.settings import constructor_arguments, load_class
from tinykv.shared_flags import check_counts

BASELINES = "rtn", "kivi", "kvsink"
LONGEST = 600  # seconds of a process
BITS = 2, 3


def parser():
    p = Parser(prog="python -m docs.course.board", description=__doc__.split("\n\n")[0])
    p.add_argument("folder", type=Path, metavar="FOLDER")
    p.add_argument("--budget", type=float, default=3.0, help="true bits of a number, at most")
    p.add_argument("--seed", type=int, default=0, help="which text; a large number, secret until the last day")
    p.add_argument("--windows", type=int, default=16,
                   help="of 1,024 tokens; as many calibrate. With few, nearly all share a rank")
    p.add_argument("--draws", type=int, default=3, help="of the calibration text")
    return p


def main():
    p = parser()
    with one_line(p):
        args = p.parse_args()
        check_counts(args, 1, "windows", "draws")
        files = sorted(args.folder.resolve().glob("*/method.py"))
        if not files:
            raise UserError(f"there is no */method.py in {args.folder}")
        if opening := confine.hole(ROOT):
            raise UserError(f"{opening}; measure elsewhere")
        text = Text(args.windows, args.draws, args.seed)
        entries = [(f"({name})", name) for name in BASELINES]
        entries += [(file.parent.name, f"{file}:Mine") for file in files]
        board, out = [], []
        for student, name in bar(entries, "measuring", unit="method"):
            try:
                file = Path(name.rpartition(":")[0])
                if file.resolve() != file.absolute():
                    raise UserError("method.py, or its folder, is a link; hand in the file itself")
                rows = [row for row in text.measured(name) if round(row["bits_true"], 2) <= args.budget]
                if not rows:
                    raise UserError(f"no row within {args.budget:g} true bits")
                board.append((student, min(rows, key=lambda row: row["kld"])))
            except Exception as error:  # whatever its files hold
                out.append((student, first_line(error)))
        print(Columns(["rank", "who", "KL", "true bits"], lines_of(board), left=2))
        for student, why in out:
            print(f"-  {printable(student)}: {printable(why)}")


def lines_of(board):
    """Ranks, the best first: who cannot be told from a rank's leader (paired, p > .05) shares it."""
    lines, rank, leader = [], 0, None
    for place, (student, row) in enumerate(sorted(board, key=lambda entry: entry[1]["kld"]), 1):
        if leader is None or not shared(row, leader):
            rank, leader = place, row
        lines.append([str(rank), printable(student), f"{row['kld']:.4f}", f"{row['bits_true']:.2f}"])
    return lines


def shared(row, leader):
    *_, p, _ = paired(row["window_kl"], leader["window_kl"])
    return p is None or p > 0.05


class Text:
    """The text that is measured on, and the calibration's."""

    def __init__(self, windows, draws, seed):
        self.model, tokenizer = hf.load(hf.EMBEDDED)
        self.test = load_windows("tales", tokenizer, 1024, windows, "test", seed)
        # the same for every seed: from it nobody can tell which text is the test
        calibration = load_windows("tales", tokenizer, 1024, windows * draws, "calibration").tokens
        self.calibration = calibration.unflatten(0, (draws, windows))  # (draws, C, T)
        self.exact = measure(self.model, METHODS["fp16"](self.model.config), self.test)

    def measured(self, name):
        """A row for each of BITS."""
        given, draws = {"calibration": self.calibration}, range(len(self.calibration))
        codes = run(encode, name, [f"{bits}-{draw}" for bits in BITS for draw in draws],
                    {**given, "test": self.test.tokens})
        rows = []
        for bits in BITS:
            row = {"bits_true": 0, "window_kl": []}
            for entry in (f"{bits}-{draw}" for draw in draws):
                read = run(decode, name, [entry], {**given, **codes[entry]})[entry]
                row["window_kl"].append(self.kl(read))
                row["bits_true"] += self.bits(codes[entry]) / len(draws)
            rows.append({**row, "kld": torch.tensor(row["window_kl"]).mean().item()})
        return rows

    @torch.inference_mode()
    def kl(self, rows):
        """Of each window, with the keys and values that were decoded: what `compare` says of the method."""
        tokens, result = self.test.tokens, Result()
        hidden = self.model(tokens, Given(rows), logits=False)  # (W, T, D)
        add_predictions(result, self.model, hidden, self.exact.exact, tokens, self.test.answers)
        return [kl * len(tokens) / result.targets for kl in result.kl]

    def bits(self, codes):
        """True bits of a number: of all tensors, and of what their names, types and shapes could tell."""
        config, held = self.model.config, 0
        for name, x in codes.items():
            layer, _, part = name.partition(".")
            if layer not in map(str, range(config.num_hidden_layers)) or part[:2] not in ("k.", "v."):
                raise UserError(f"codes are called layer.kind.part, as 0.k.packed; got {name[:40]!r}")
            held += x.nbytes + len(part) + 1 + (2 if x.numel() else 8) * x.dim()
        of_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        return 8 * held / (self.test.tokens.numel() * of_token)


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

def run(part, name, entries, given):
    """Run `encode` or `decode` in a process that reads what is given, {name: tensor} -> what it makes of each entry,
    "bits-draw": {entry: {name: tensor}}. UserError if it fails."""
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        save_file(given, Path(folder, "given"))
        words = ["docs.course.board", "--confined", part.__name__]
        if not confine.run(words, json.dumps([name, folder, entries]), LONGEST, ROOT, folder):
            raise UserError(f"{part.__name__}: no end within {LONGEST} seconds")
        try:
            if said := confine.written(Path(folder, "said")):
                raise UserError(f"{part.__name__}: {first_line(said.decode(errors='replace'))}")
            return {entry: load(confine.written(Path(folder, entry))) for entry in entries}
        except OSError:
            raise UserError(f"{part.__name__}: it ended its process") from None


def confined(part):
    """In that process: give up all rights, then do the part, and say what went wrong."""
    name, folder, entries = json.load(sys.stdin)
    file = name.rpartition(":")[0]
    confine.confine(folder, [ROOT, *([Path(file).parent] if file else [])], LONGEST)
    said = ""
    try:
        given = load_file(Path(folder, "given"))
        for entry in entries:
            save_file(part(name, entry, given), Path(folder, entry))
    except (Exception, SystemExit) as error:
        said = first_line(error) or type(error).__name__
    Path(folder, "said").write_text(said, encoding="utf-8")


def cache_of(name, entry, calibration):
    """A cache of the method, calibrated. entry: "bits-draw"; calibration (draws, C, T)."""
    bits, draw = map(int, entry.split("-"))
    model, _ = hf.load(hf.EMBEDDED)
    cls = load_class(name)
    method = cls(model.config, **constructor_arguments(cls, {"bits": bits}))
    calibrate(model, method, calibration[draw], seed=draw)
    return KVCache(model, method, "paper")


@torch.no_grad()
def encode(name, entry, given):
    """What the cache holds of the test."""
    cache, held = cache_of(name, entry, given["calibration"]), {}
    cache.model(given["test"], cache, logits=False)
    for layer in cache.layers:
        for rows in (layer.keys, layer.values):
            parts = {**vars(rows.codes), "kept_positions": rows.kept_positions, "kept_rows": rows.kept_rows}
            held |= {f"{rows.layer}.{rows.kind}.{part}": x.clone() for part, x in parts.items() if x is not None}
    return held


@torch.no_grad()
def decode(name, entry, given):
    """What attention reads of it: keys, rotated, and values, in 16 bits."""
    cache, found = cache_of(name, entry, given["calibration"]), {}
    T, config = given["calibration"].shape[-1], cache.config
    for layer in cache.layers:
        for rows in (layer.keys, layer.values):
            begin = f"{rows.layer}.{rows.kind}."
            parts = {key.removeprefix(begin): x for key, x in given.items() if key.startswith(begin)}
            rows.kept_positions, rows.kept_rows = parts.pop("kept_positions", None), parts.pop("kept_rows", None)
            W = len(parts["packed"])
            rows.recent = torch.zeros(W, config.num_key_value_heads, 0, config.head_dim, dtype=torch.float16)
            like = torch.zeros(1, config.num_key_value_heads, T, config.head_dim)
            rows.codes, rows.n_coded = type(rows.codec.encode(like))(**parts), T
        layer.dtype = torch.float16
        K, V = layer.read()
        found |= {f"{layer.layer}.k": K.contiguous(), f"{layer.layer}.v": V.contiguous()}
    return found


if __name__ == "__main__":
    confined({"encode": encode, "decode": decode}[sys.argv[2]]) if sys.argv[1:2] == ["--confined"] else main()
