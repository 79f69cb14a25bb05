"""A leaderboard of students' own methods: `python -m tinykv.course.board FOLDER --seed N`.

FOLDER has a folder for each student, with a method.py whose class is `Mine`. A method's place is its KL from fp16 at
the best of its bit widths within the budget of true bits. Who is not worse than the leader of a rank by twice the
paired error shares that rank. Each file runs in a process of its own, under the grader's limits. That process measures
itself, so it could write any figure: read the files of the first ranks.
"""
import copy
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from tinykv import UserError
from tinykv.cli import Parser, one_line, print_columns
from tinykv.course.assignments import ROOT
from tinykv.course.confine import confine
from tinykv.course.grade import confined_environment
from tinykv.files import first_line
from tinykv.methods.registry import METHODS

BASELINES = "rtn", "kivi", "kvsink"
LONGEST = 600  # seconds of a submission


def parser():
    p = Parser(prog="python -m tinykv.course.board", description=__doc__.split("\n\n")[0])
    p.add_argument("folder", type=Path, metavar="FOLDER")
    p.add_argument("--budget", type=float, default=3.0, help="true bits of a number, at most")
    p.add_argument("--seed", type=int, default=0, help="which text; keep it secret until the last day")
    p.add_argument("--windows", type=int, default=16, help="of 1,024 tokens; as many calibrate")
    p.add_argument("--draws", type=int, default=3, help="of the calibration text")
    return p


def main():
    p = parser()
    args = p.parse_args()
    with one_line(p):
        files = sorted(args.folder.glob("*/method.py"))
        if not files:
            raise UserError(f"there is no */method.py in {args.folder}")
        entries = [(f"({name})", name) for name in BASELINES] + [(file.parent.name, f"{file}:Mine") for file in files]
        board, out = [], []
        for student, name in entries:
            rows = measured(name, args)
            if isinstance(rows, str):
                out.append([student, rows])
                continue
            rows = [row for row in rows if row["bits_true"] <= args.budget and not row["fault"]]
            if rows:
                board.append((student, min(rows, key=lambda row: row["kld"])))
            else:
                out.append([student, f"no row within {args.budget} true bits"])
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
    from tinykv.evaluate import paired
    *_, p, _ = paired(row["window_kl"], leader["window_kl"])
    return p is None or p > 0.05


# One submission

def measured(name, args):
    """What a process of its own writes: the rows of `compare`, or why there are none."""
    with TemporaryDirectory(ignore_cleanup_errors=True) as work:
        words = [sys.executable, "-m", "tinykv.course.board", "--one", work]
        settings = {"name": str(Path(name).resolve()) if ":" in name else name, "seed": args.seed,
                    "windows": args.windows, "draws": args.draws}
        try:
            subprocess.run(words, input=json.dumps(settings), text=True, timeout=LONGEST, capture_output=True,
                           cwd=ROOT, env={**confined_environment(work), "PYTHONPATH": str(ROOT)})
            return json.loads(Path(work, "rows.json").read_text(encoding="utf-8"))
        except subprocess.TimeoutExpired:
            return f"no end within {LONGEST} seconds"
        except (OSError, ValueError):
            return "it ended its process"


def one(work):
    """In that process: measure, after the process has given up its rights."""
    import eval_ppl
    settings = json.load(sys.stdin)
    name = settings.pop("name")
    file = name.rpartition(":")[0]
    confine(work, [ROOT, *([Path(file).parent] if file else [])], LONGEST)
    try:
        told = file and dishonest(file, settings["seed"])
        rows = told or eval_ppl.compare(name, bits=[2, 3], calib_windows=settings["windows"], context=1024, **settings)
        if not told:
            rows = [row for row in rows if (row["method"] not in {"fp16", *METHODS} if file else row["method"] == name)]
    except (Exception, SystemExit) as error:
        rows = first_line(error)
    Path(work, "rows.json").write_text(json.dumps(rows), encoding="utf-8")


def dishonest(file, seed):
    """Why codes do not hold what is read of them, in words, or "": a copy of the method, made before the text came, has
    to decode them alike."""
    from tinykv import hf
    from tinykv.cache import KVCache
    from tinykv.calibrate import calibrate
    from tinykv.hf import EMBEDDED
    spec = importlib.util.spec_from_file_location("mine", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = hf.load(EMBEDDED)[0]
    tokens = torch.randint(3, model.config.vocab_size, (1, 256), generator=torch.Generator().manual_seed(seed))
    method = module.Mine(model.config)
    calibrate(model, method, tokens)
    fresh, cache = copy.deepcopy(method), KVCache(model, method, "paper")
    with torch.no_grad():
        model(tokens, cache)
    for layer, pair in zip(cache.layers, fresh.codecs):
        for rows, codec in zip((layer.keys, layer.values), pair):
            try:
                same = rows.codes is None or torch.equal(codec.decode(rows.codes), rows.codec.decode(rows.codes))
            except Exception:  # what the copy never saw
                same = False
            if not same:
                return "its codes say something else to a fresh copy of the method: it keeps rows that nobody counts"
    return ""


if __name__ == "__main__":
    one(sys.argv[2]) if sys.argv[1:2] == ["--one"] else main()
