"""A paper's table beside ours, cell by cell.

    python docs/programs/paper.py --list                                            name the tables
    python docs/programs/paper.py KVSink "Table 2" --model path/to/Llama-2-7b-hf    measure its columns of this model
    python docs/programs/paper.py KVSink "Table 2" --only 8B --only c4              print the commands of some cells
    python docs/programs/paper.py AnTKV "Table 1" --try                             try them on the embedded model

docs/paper_tables.json has the papers' numbers, and the flags that come closest to what each paper says it did. Below
the table is what the paper leaves open, what is known to differ here, and the paper's own slips. Compare the row of 16
bits first: it has no method in it. A number is a perplexity, or the mean of tasks' accuracies in per cent, of
which lm_eval's command is printed.
"""
import json
import re
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from eval_ppl import evaluate  # noqa: E402
from tinykv import UserError, hf  # noqa: E402
from tinykv.lab import cli  # noqa: E402
from tinykv.lab.run import flags  # noqa: E402

TABLES = json.loads((ROOT / "docs" / "paper_tables.json").read_text(encoding="utf-8"))
HUB = TABLES.pop("hub")  # {a model in the papers: on the hub}
# --try: short texts; small groups, as small layers need, and few centroids, of the same bits; questions of its own
SMALL = "--data tales --calib-data fables --context 256 --calib-context 256 --windows 1 --calib-windows 4"
SMALLER = {r"group(.)size([ =])\d+": r"group\1size\g<2>16", "--bits 0.75": "--vq d8m64", "--bits 0.375": "--vq d16m64"}
NOT_SAID = r"--calib-data \S+|--(?:data|tasks|num_fewshot)|--context \S+|--windows \S+"  # of a column


class Cell(NamedTuple):
    model: str
    what: str  # the row, and what else the column says
    number: str  # in the paper
    command: str


def cells(table):
    for row, of_row, numbers in table["rows"]:
        for (model, of_column), number in zip(table["columns"], numbers.split()):
            what = " ".join([row, *re.sub(NOT_SAID, "", of_column).split()])
            command = table["command"].format(model=HUB[model], column=of_column, row=of_row)
            yield Cell(model, what, number, command)


def chosen(table, args):
    """The cells that have the words of --only and, with --model, are of this model: called as on the hub, or the only
    one."""
    found = [cell for cell in cells(table) if all(word in " ".join(cell[:2]) for word in args.only)]
    models = {cell.model for cell in found}
    if args.model and len(models) > 1:
        found = [cell for cell in found if HUB[cell.model].split("/")[1].lower() == Path(args.model).name.lower()]
    if not found:
        raise UserError(f"no such cell; the models are {', '.join(dict(table['columns']))}: give a folder that is "
                        "called as on the hub, or name one with --only")
    return found


def perplexity(words, loaded):
    """The perplexity and the true bits that a command of eval_ppl.py prints. UserError with the reason why it does not.
    """
    words = [f"fp16,{word}" if before == "--method" else word for before, word in zip(["", *words], words)]  # no others
    *_, row = evaluate(flags.set_up(flags.parse(words), loaded))
    if row["fault"]:
        raise UserError(row["fault"])
    return f"{row['ppl']:.3f}", f"{row['bits_true']:.2f}"


def show(table, args):
    """Print a table, a cell as soon as it is measured."""
    loaded = hf.load(hf.EMBEDDED) if args.small else None
    print(f"{'model':22}{'row':46}{'paper':>8}{'here':>9}{'true bits':>11}")
    for cell in chosen(table, args):
        command = cell.command.replace(HUB[cell.model], args.model or HUB[cell.model])
        here, bits, why = "-", "-", f"  {table.get('why', '')} {command}"
        if "why" not in table and "lm_eval" not in command and (args.small or args.model):
            if args.small:
                for given, smaller in SMALLER.items():
                    command = re.sub(given, smaller, command)
            try:
                words = shlex.split(f"{command} {SMALL if args.small else ''}")[2:]
                words += ["--calibration", args.calibration] * bool(args.calibration)
                loaded = loaded or load(words)
                here, bits = perplexity(words, loaded)
                why = ""
            except UserError as error:
                why = f"  {error}"
        print(f"{cell.model:22}{cell.what:46}{cell.number:>8}{here:>9}{bits:>11}{why}", flush=True)
    for what in ("unknown", "gaps", "slips"):
        for said in table.get(what, []):
            print(f"{what}: {said}")


def load(words):
    args = flags.set_up(flags.parse(words))
    return hf.load_model(args.folder, args.devices, args.dtype), args.tokenizer


def main():
    p = cli.Parser(description=__doc__)
    p.add_argument("paper", nargs="?", help="KVSink, OTT, IntactKV or AnTKV")
    p.add_argument("table", nargs="?", help="such as \"Table 1\"; see --list")
    p.add_argument("--list", action="store_true", help="the tables, and stop")
    p.add_argument("--model", metavar="DIR|OWNER/NAME", help="the model to measure; without it, print commands")
    p.add_argument("--only", metavar="WORD", action="append", default=[], help="cells whose line has this word")
    p.add_argument("--calibration", metavar="DIR", help="a folder for calibrated tables, as in eval_ppl.py")
    p.add_argument("--try", dest="small", action="store_true", help="measure on the embedded model and a short text")
    with cli.one_line(p):
        args = p.parse_args()
        if args.list:
            for name, table in TABLES.items():
                _, *program = table["command"].replace("-m ", "").split()
                print(f"{name}: {len([*cells(table)])} cells, by {program[0]}")
        elif f"{args.paper}, {args.table}" not in TABLES:
            asked = ", ".join(word for word in (args.paper, args.table) if word) or "paper and table given"
            raise UserError(f"no {asked}; there are {'; '.join(TABLES)} (AnTKV's Table 1 has SKVQ)")
        else:
            show(TABLES[f"{args.paper}, {args.table}"], args)


if __name__ == "__main__":
    main()
