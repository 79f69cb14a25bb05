"""Measure the rows behind docs/results_data.md, whose tables docs/programs/pages.py writes.

    python docs/programs/results.py --measure embedded       measure the rows that the data have not yet
    python docs/programs/results.py --measure SmolLM2 --model path/to/SmolLM2-135M-Instruct --data wikitext2-test.txt
    python docs/programs/results.py --plot                   draw figures/loss.png and figures/length.png

docs/results.json has each row's loss and KL divergence from fp16, window by window and draw by draw, as `eval_ppl.py
--json` gives them, in units of 1e-5 nats a token. It is written after each row, so a run that was stopped goes on where
it was. To measure a row again, delete its line.

What is measured is what the pages speak of: the claims in the tables of docs/results_data.md, and the rows below.
"""
import argparse
import hashlib
import json
import re
import sys
from collections import defaultdict
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from statistics import fmean as mean
from typing import NamedTuple

import torch
from crossing import CELLS, EMBEDDED

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from tinykv import UserError, hf  # noqa: E402
from tinykv.calibrate import calibrate  # noqa: E402
from tinykv.evaluate import measure  # noqa: E402
from tinykv.lab import plots, shared_flags  # noqa: E402
from tinykv.lab.data import Windows, load_windows  # noqa: E402
from tinykv.lab.differences import paired  # noqa: E402
from tinykv.lab.run import flags  # noqa: E402
from tinykv.lab.run.calibration import calibrate_all  # noqa: E402
from tinykv.lab.run.entries import build_entries  # noqa: E402
from tinykv.methods.registry import METHODS  # noqa: E402

DATA = ROOT / "docs" / "results.json"
UNIT = 1e-5  # nats a token
TOGETHER = 8  # rows that are calibrated together: their codecs hold what they saw
# of each model: the text, and what a row has for a name in braces. Rows of which something is calibrated are measured
# over DRAWS draws and WINDOWS windows, the others over twice as many windows
COMMAND = {"embedded": "", "SmolLM2": "--context 512 --calib-windows 8 --batch 4"}
DRAWS, WINDOWS = 6, 8
LATE = "--emergence-layer 11 --outlier-channel 507"
NAMES = {"embedded": {"bits": "2", "windows": "", "late": "", "mark": "--emergence-layer 1 --outlier-channel 49"},
         "SmolLM2": {"bits": "3", "windows": "--calib-windows 16", "late": LATE,
                     "mark": "--emergence-layer 2 --outlier-channel 507"}}


# The claims

class Claim(NamedTuple):
    """The first two cells of a line of the tables in docs/results_data.md. "`2 / 3`", or "`--bits 2` / `--bits 3`": on
    the embedded model, and on SmolLM2."""
    rows: str  # what it says: `first row` - `second row`, `flags of both`
    paper: str  # what the first row loses there, and where: "less (Figure 9)", "more (..)", "none (..)", or "-"


def claims_of(table):
    """The claims in a table's text; none if it has no column `claim`."""
    lines = [[cell.strip() for cell in line.split("|")[1:3]] for line in table.splitlines()]
    return [Claim(*cells) for cells in lines[2:]] if lines[0][:1] == ["claim"] else []


def pair(claim, model):
    """The two rows of a claim."""
    word = r"(`[^`]+`|[^\s`]+)"
    of_model = re.sub(f"{word} / {word}", rf"\{1 + list(NAMES).index(model)}", claim.rows)
    first, second, *flags_of_both = re.findall("`(.+?)`", of_model)
    return [named(" ".join([row, *flags_of_both]), model) for row in (first, second)]


WRITTEN = re.compile(r"<!-- written: (.+?) -->\n(.*?)<!-- end -->", re.DOTALL)
TABLES = dict(table for page in ROOT.glob("docs/*.md") for table in WRITTEN.findall(page.read_text(encoding="utf-8")))
CLAIMS = {section: claims for section, table in TABLES.items() if (claims := claims_of(table))}
WIDE = "--bits 2 --group-size 128 --recent 32"

# in no claim: the rows of the figure, {label: rows}, which the table "rows" has, too
FORMATS, TURBOQUANT = "docs/examples/formats.py:Formats", "docs/examples/turboquant.py:TurboQuant"
LINES = {name: [f"{name} --bits {bits}" for bits in (2, 3, 4)]
         for name in ("rtn", "pfn", "kvsink", "kvquant", "kivi", "ott", "oscar", "skvq")}
LINES["kivi"].append("kivi --bits 4 --group-size 64")
LINES["TurboQuant"] = [f"{TURBOQUANT} --bits {bits}" for bits in (2, 3, 4)]
LINES |= {row.split()[0]: [f"{row} --bits {bits} --recent 0 {{windows}}" for bits in (1, 2, 4)]
          for row in ("cq", "antkv --anchors 1%")}
POINTS = {f"{name}{rotated}": f"{FORMATS} --hadamard {on} --scheme {name}"
          for name in ("nvfp4", "mxfp4", "q4_0") for on, rotated in (("off", ""), ("on", ", rotated"))}
EIGHT = {name: f"{FORMATS} --scheme {name}" for name in ("fp8", "mxfp8", "q8_0")}
MORE = ["fp16 --prompt 128", "kvsink --bits {bits} {late}",
        *(f"{FORMATS} --scheme {k} --v-scheme {v}" for name in ("nvfp4", "mxfp4", "q4_0")
          for k, v in ((name, "fp16"), ("fp16", name))),
        *(f"{TURBOQUANT} --bits {bits} --qjl on" for bits in (3, 4))]

# the table of serving.md, {what an engine calls it, or a method: row}, by what they lose
SERVED = {"q8_0, rotated": f"{FORMATS} --hadamard on --scheme q8_0",
          "fp8": EIGHT["fp8"],
          "q8_0 keys, q4_0 values, both rotated": f"{FORMATS} --hadamard on --scheme q8_0 --v-scheme q4_0",
          "q5_1, rotated": f"{FORMATS} --hadamard on --scheme q5_1",
          "q4_0, rotated": POINTS["q4_0, rotated"], "nvfp4": POINTS["nvfp4"], "q4_0": POINTS["q4_0"],
          "quanto, MLX: 4 bits": "rtn --bits 4 --group-size 64 --scheme token-dynamic",
          "mxfp4": POINTS["mxfp4"],
          "KIVI, 4 bits": "kivi --bits 4 --group-size 64", "KIVI, 2 bits": "kivi --bits 2"}

# SmolLM2's rows in longer windows are measured in pairs of a window and a draw of the calibration: window i is read
# with the tables of draw i, those of the rows at 512 (keys are calibrated before RoPE). So each pair has a window and a
# draw of its own, and the error of their mean is that of both
FIVE, MARKED = "kvsink --bits 3", "kvsink --bits 3 --threshold 0.1"
ZERO, ZERO4 = (f"--bits {width} --formula integer-zero" for width in (3, 4))
CHANCE = "docs/programs/chance.py:Chance --bits 3 --threshold 0.1"
CQ, ANTKV = (f"{name} --bits 2 --recent 0 --calib-windows 16" for name in ("cq", "antkv --anchors 1%"))
OTHER_TEXT = " --calib-data pydoc.txt"  # Python's reference in English; of Python 3.11.7
# what begins the name of a row that train_intact.py measured, or a program that is gone
OWN, PREFIX, PLANTED = "QuantizedCache: ", "prefix of 46 tokens, rtn-3: ", "key bias "
# formats that were once measured with a planted bias of the keys, and without one
BIASED = ("q8_0, rotated", "fp8", "int8_per_token_head", "KIVI, 4 bits", "OTT, 4 bits", "q4_0, rotated", "nvfp4",
          "quanto, MLX: 4 bits", "q4_0, rotated, centred", "nvfp4, centred", "KIVI, 4 bits, centred")
STREAM = "--context 4096 --prompt 3840"
LONG = {  # {flags of the windows: {row: pairs}}
    "--context 4096": {
        **dict.fromkeys([FIVE, MARKED, f"kvsink {ZERO}", "pfn --bits 3", "pfn --bits 3 --preserve 41", CHANCE], 8),
        **dict.fromkeys(["rtn --bits 3", "kvsink --bits 3 --preserve 41", f"rtn {ZERO}", f"pfn {ZERO}", "pfn --bits 4",
                         "kvsink --bits 4", f"pfn {ZERO4}", f"kvsink {ZERO4}", f"kivi {WIDE}", f"ott {WIDE}",
                         f"ott {WIDE} --outlier-num 6", f"ott {WIDE} --outlier-num 32",
                         "oscar --bits 2 --formula offset", "ott --bits 2 --group-size 32 --recent 32",
                         *SERVED.values()], 3),
        **dict.fromkeys(["oscar --bits 2", "skvq --bits 2", "kvquant --bits 2", CQ, ANTKV], 2)},
    "--context 2048": dict.fromkeys([FIVE, MARKED, f"kvsink {ZERO}", "pfn --bits 3"], 3),
    "--context 8192": dict.fromkeys([FIVE, MARKED, f"kvsink {ZERO}"], 2),
    STREAM: dict.fromkeys([FIVE, MARKED], 2)}
CURVES = {"pfn: 5 kept": "pfn --bits 3", "kvsink: 5 kept": FIVE, "kvsink: 5 kept, others by chance": CHANCE,
          "kvsink: all marked": MARKED, "kvsink: integer zero": f"kvsink {ZERO}", "kivi, 2 bits": "kivi --bits 2",
          "nvfp4": POINTS["nvfp4"]}  # of the figure by position, {label: row}


def rows_in(table, model="SmolLM2"):
    """The rows that the first cells of a page's table name, as the model has them."""
    rows = re.findall(r"^\|[^|]*`(.+?)`", TABLES[table], re.MULTILINE)
    return list(map(of_embedded, rows)) if model == "embedded" else rows


def of_embedded(row):
    """The row of the embedded model for one of SmolLM2."""
    return row.replace(f" {NAMES['SmolLM2']['windows']}", "")


# The data: {model: {row: {"bits": true bits, "nll": [[loss of each window] of each draw], "kl": the same,
#                          "along": [nats above fp16 of each 512 targets] of each pair, of longer windows}}}. In
# older rows, "along" has one list, the mean of all pairs

def rows_of(model):
    """The rows of a model, each a method and flags."""
    rows = [row for claims in CLAIMS.values() for claim in claims for row in pair(claim, model)]
    rows += [*rows_in("rows", model), *(named(row, model) for row in [*MORE, *SERVED.values()])]
    rows = [row for row in rows if "--context" not in row]
    if model == "embedded":
        return list(dict.fromkeys(["fp16", *rows, *(named(row, model) for row in EMBEDDED)]))
    long = [at(row, where) for group in (LONG, CELLS) for where, pairs in group.items() for row in ["fp16", *pairs]]
    return list(dict.fromkeys(["fp16", *rows, *long]))


def at(row, where="--context 4096"):
    """A row of SmolLM2 in longer windows."""
    return named(f"{row} {where}", "SmolLM2")


def biased(label, size):
    """The name of a row with a planted bias. Without one, it is that of the table of serving.md where that has it."""
    return SERVED[label] if size == 0 and label in SERVED else f"{PLANTED}{size}: {label}"


def named(row, model):
    """A method, and its flags in alphabetical order, so that equal rows are written alike."""
    method, *words = row.format(**NAMES[model]).split()
    return " ".join([method, *sorted(map(" ".join, zip(words[::2], words[1::2])))])


def read_data(path=DATA):
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write_data(data, path=DATA):
    """A row a line, in the order of the claims."""
    models, packed = [], partial(json.dumps, separators=(",", ":"), ensure_ascii=False)
    for model, rows in data.items():
        lines = [f"{packed(row)}: {packed(rows[row])}" for row in rows]
        models.append(f"{json.dumps(model)}: {{\n" + ",\n".join(lines) + "\n}")
    path.write_text("{\n" + ",\n".join(models) + "\n}\n", encoding="utf-8")


def entry_of(row, model, loaded, *given):
    """The flags of a row, and its entry."""
    method, *words = row.split()
    args = flags.parse([*COMMAND[model].split(), *given, *words], list(dict.fromkeys(["fp16", method])))
    return args, list(build_entries(args, loaded[0].config, loaded[1])[0].values())[-1]


def measure_all(model, loaded, text, data):
    """Measure the rows that the data have not. Rows that read the same text in the same way are measured together, so
    that they share the forwards of the calibration."""
    rows, few = data.setdefault(model, {}), {named(row, model) for row in EMBEDDED}
    groups = defaultdict(list)  # {what is not a method's own: [(row, its flags, its entry)]}
    for row in rows_of(model):
        if row not in rows and "--context" not in row:
            args, entry = entry_of(row, model, loaded, *(["--data", text] if text else []))
            calibrates = entry.method.needs_calibration
            args.draws, args.windows = (DRAWS, WINDOWS) if calibrates else (1, 2 * WINDOWS)
            if calibrates and (row in few or OTHER_TEXT in row):
                args.draws = 3
            shared = args.protocol, args.prompt, args.context, args.calib_windows, args.calib_data, args.draws
            groups[shared].append((row, args, entry))
    for group in sorted(groups.values(), key=lambda group: group[0][1].draws == 1):  # what is calibrated decides most
        for i in range(0, len(group), TOGETHER):
            measure_group(model, loaded, group[i:i + TOGETHER], data)


def measure_group(model, loaded, group, data):
    """Measure rows that share flags, [(row, flags, entry)], and write each as soon as it is there."""
    args = group[0][1]
    flags.set_up(args, loaded)
    entries = {row: entry for row, _, entry in group}
    windows = shared_flags.test_text(args, entries)
    models = calibrate_all(args, loaded[0], entries, windows.tokens)
    loaded[0].use_attention("fused")
    read = partial(measure, windows=windows, protocol=args.protocol, batch=args.batch, prompt=args.prompt)
    exact = read(loaded[0], METHODS["fp16"](loaded[0].config))
    for row, entry in entries.items():
        if entry.error:
            raise entry.error
        found = [read(models[entry.weights], method, fp16=exact) for method in entry.methods]
        targets = found[0].targets / len(found[0].nll)  # of a window
        data[model][row] = {"bits": round(mean(found[0].bits), 3),
                            "windows": witness(windows.tokens),
                            "nll": [[round(loss / UNIT) for loss in draw.nll] for draw in found],
                            "kl": [[round(kl / targets / UNIT) for kl in draw.kl] for draw in found]}
        write_data(data)
        print(f"{model}: {row}: {UNIT * mean(map(mean, data[model][row]['nll'])):.3f}", flush=True)


def measure_long(loaded, text, data):
    """Measure SmolLM2's rows in pairs, pair by pair, and write each as soon as it is there."""
    for where, pairs in [*LONG.items(), *CELLS.items()]:
        for i in range(max(pairs.values())):
            lacking = [named(row, "SmolLM2") for row in pairs if i < pairs[row] and n_measured(row, where, data) == i]
            if lacking:
                measure_pair(loaded, text, where, i, lacking, data)


def measure_pair(loaded, text, where, i, rows, data):
    """Measure rows in window i with the tables of draw i. where: the flags of the windows."""
    model, tokenizer = loaded
    model.use_attention("fused")
    args = flags.parse(["--data", text, *where.split()], ["fp16"])
    windows = load_windows(args.data, tokenizer, args.context, i + 1)
    window = Windows(windows.tokens[i:], windows.answers[i:], args.prompt or 1)
    methods = calibrate_pair(loaded, args.data, rows, i)
    exact = measure(model, METHODS["fp16"](model.config), window)
    if n_measured("fp16", where, data) == i:
        add_pair("fp16", where, exact, exact, data)
    for row in rows:
        add_pair(row, where, measure(model, methods[row], window, fp16=exact, prompt=args.prompt), exact, data)


def n_measured(row, where, data):
    """In how many pairs a row was measured."""
    found = data["SmolLM2"].get(at(row, where))
    return len(found["nll"][0]) if found else 0


def calibrate_pair(loaded, text, rows, draw):
    """{row: its method}, calibrated on a draw of the text of the rows at 512."""
    model, tokenizer = loaded
    methods, groups = {}, defaultdict(list)  # the latter {windows of a draw: [Method]}
    for row in rows:
        args, entry = entry_of(row, "SmolLM2", loaded)
        methods[row] = entry.method
        if entry.method.needs_calibration:
            groups[args.calib_windows].append(entry.method)
    for n, group in groups.items():
        calibration = load_windows(text, tokenizer, 512, n * (draw + 1), "calibration").tokens
        calibrate(model, group, calibration[-n:], seed=draw)
    return methods


def add_pair(row, where, result, exact, data):
    """Add what was measured in a pair to its row. exact: fp16's Result."""
    parts = [round((loss - of_fp16) / UNIT) for loss, of_fp16 in zip(result.nll_along[0], exact.nll_along[0])]
    empty = {"bits": 0, "windows": "", "nll": [[]], "kl": [[]], "along": []}
    found = data["SmolLM2"].setdefault(at(row, where), empty)
    losses, n = found["nll"][0], len(found["nll"][0])
    losses.append(round(result.nll[0] / UNIT))
    found["windows"] += witness(result.windows.tokens)
    found["kl"][0].append(round(result.kl[0] / result.targets / UNIT))
    found["bits"] = round((n * found["bits"] + result.bits[0]) / (n + 1), 3)
    if len(found["along"]) < n:  # one list, the mean of the pairs before, which becomes that of all
        found["along"] = [[round((n * before + more) / (n + 1)) for before, more in zip(*found["along"], parts)]]
    else:
        found["along"].append(parts)
    write_data(data)
    print(f"{at(row, where)}: {result.nll[0]:.3f}, pair {n + 1}", flush=True)


def witness(tokens):
    """Of windows (W, T), 4 digits each: what their tokens hash to."""
    return "".join(hashlib.blake2b(window.numpy().tobytes(), digest_size=2).hexdigest() for window in tokens)


def shape_of(*rows):
    """Draws and windows over which rows are compared: those of both. A row that was measured once is the same in every
    draw. UserError for rows of different windows."""
    W = min(len(row["nll"][0]) for row in rows)
    if len({row.get("windows", "")[:4 * W] for row in rows}) > 1:
        raise UserError("these rows read different windows, so their losses are no pairs")
    return min((len(row["nll"]) for row in rows if len(row["nll"]) > 1), default=1), W


def along(row):
    """[nats above fp16 of each 512 targets, their error over pairs] of longer windows; None where the pairs were not
    kept apart."""
    pairs = torch.tensor(row["along"], dtype=torch.float64) * UNIT  # (pairs, parts)
    if len(pairs) == 1 or len(pairs) < len(row["nll"][0]):
        return [(loss, None) for loss in pairs.mean(0).tolist()]
    return list(zip(pairs.mean(0).tolist(), (pairs.std(0) / len(pairs) ** 0.5).tolist()))


def compared(row, other, kind="nll", beyond=0.0):
    """Two rows -> mean difference, its error, p, over the draws and windows of both. p: that the difference is
    `beyond`, in nats, by chance."""
    C, W = shape_of(row, other)
    both = []
    for each in (row, other):
        draws = each[kind] if len(each[kind]) > 1 else C * each[kind]
        both.append([[UNIT * loss for loss in draw[:W]] for draw in draws[:C]])
    both[1] = [[loss + beyond for loss in draw] for draw in both[1]]
    difference, error, _, p, _ = paired(*both)
    return difference + beyond, error, p


# Figures

def draw(data, path):
    """The figure of SmolLM2's losses by true bits: a colour a method, a point a format. A line joins rows that differ
    in nothing but their bits."""
    rows = data["SmolLM2"]
    title = ("SmolLM2-135M on WikiText-2, all of it read from the cache\n"
             f"{WINDOWS} windows of 512 tokens x {DRAWS} calibrations (1 bit: 3; uncalibrated: {2 * WINDOWS} windows)")
    figure, (panel,) = plots.new_figure(1, 1, 7.8, 5.8, title)
    for i, (label, of_label) in enumerate((LINES | {label: [name] for label, name in POINTS.items()}).items()):
        name = label.split(",")[0]
        how = plots.style(i, name)
        if label in POINTS:  # a marker a format, open unless it is rotated
            how |= {"marker": dict(nvfp4="s", mxfp4="^", q4_0="o")[name], "ls": "none",
                    "mfc": None if "rotated" in label else "white"}
        lines = defaultdict(list)  # {settings: [(bits, nats, error)]}
        for name in of_label:
            if (row := named(name, "SmolLM2")) in rows:
                point = rows[row]["bits"], *compared(rows[row], rows["fp16"])[:2]
                lines[re.sub(" --bits [^ ]+", "", row)].append(point)
        for n, points in enumerate(lines.values()):
            bits, nats, errors = zip(*sorted(points))
            panel.plot(bits, nats, label=f"{'_' * n}{label}", **how)
            panel.errorbar(bits, nats, errors, fmt="none", ecolor=how["color"], zorder=1)
            if label in ("cq", "antkv"):  # open: with codebooks, 256 vectors of 16 bits a number, in 8,192 tokens
                more = [width + 256 * 16 / 8192 for width in bits]
                panel.plot(more, nats, label="_", **how | {"mfc": "white", "ls": ":"})
    panel.set(yscale="log", ylim=(0.003, None), xlim=(None, 5.2), ylabel="nats per token above fp16 (± standard error)",
              xlabel="true bits per number: codes, scales, kept tokens")
    panel.text(1.2, 1.05, "open: with codebooks,\nin a text of 8,192 tokens", fontsize="small")
    formats = [line for line in panel.lines if line.get_label() in POINTS]
    plots.legend(panel, handles=formats, title="engines' formats", loc="lower left")
    for line in formats:
        line.set_label(f"_{line.get_label()}")  # which stands in the legend, not at the point
    plots.plain_ticks(panel)
    plots.label_ends(panel)
    plots.save(figure, path)


def draw_along(data, path):
    """The figure of SmolLM2's losses by position, in windows of 4096 tokens: a line a row."""
    rows = data["SmolLM2"]
    figure, (panel,) = plots.new_figure(1, 1, 7.4, 4.8, "SmolLM2-135M on WikiText-2, windows of 4,096 tokens")
    for i, (label, name) in enumerate(CURVES.items()):
        if at(name) in rows:
            losses, errors = zip(*along(rows[at(name)]))
            at_tokens = [512 * part + 256 for part in range(len(losses))]
            how = plots.style(i, re.split("[:,]", label)[0])
            panel.plot(at_tokens, losses, label=label, **how)
            if None not in errors:
                panel.errorbar(at_tokens, losses, errors, fmt="none", ecolor=how["color"], zorder=1)
    panel.set(yscale="log", xlim=(0, 4096), xticks=range(0, 4097, 512), ylabel="nats a token above fp16",
              xlabel="position in the text (tokens; means over 512)")
    plots.plain_ticks(panel)
    plots.label_ends(panel)
    plots.save(figure, path)


def main():
    p = argparse.ArgumentParser(description="Measure the rows of docs/results.json.")
    p.add_argument("--plot", action="store_true", help="draw the loss by bits, and by position")
    p.add_argument("--measure", choices=list(NAMES), help="measure the rows that docs/results.json has not")
    p.add_argument("--model", metavar="DIR", help="SmolLM2's folder")
    p.add_argument("--data", metavar="FILE", help="its text")
    args = p.parse_args()
    data = read_data()
    if args.measure:
        Path(OTHER_TEXT.split()[1]).write_text("\n".join([*topics.values(), ""]), encoding="utf-8")
        loaded = hf.load(args.model or hf.EMBEDDED)
        measure_all(args.measure, loaded, args.data, data)
        if args.measure == "SmolLM2":
            measure_long(loaded, args.data, data)
    if args.plot:
        draw(data, ROOT / "docs" / "figures" / "loss.png")
        draw_along(data, ROOT / "docs" / "figures" / "length.png")


if __name__ == "__main__":
    main()
