"""Measure the rows behind docs/results.md, and what its tables say of them; docs/programs/pages.py writes them.

    python docs/programs/results.py --measure embedded       measure the rows that the data have not yet
    python docs/programs/results.py --measure SmolLM2 --model path/to/SmolLM2-135M-Instruct --data wikitext2-test.txt
    python docs/programs/results.py --plot                   draw figures/loss.png and figures/length.png

docs/results.json has each row's loss and KL divergence from fp16, window by window and draw by draw, as `eval_ppl.py
--json` gives them, in units of 1e-5 nats a token. It is written after each row, so a run that was stopped goes on where
it was. To measure a row again, delete its line.

A claim is a difference between two rows in nats a token; a negative one means that the first row loses less. Its rule:
the losses differ if p < .01; if not, the KL divergences are asked the same; if neither differs, there is no difference
to be seen ("none") if p of the loss is above .05, else the claim is open.
"""
import argparse
import json
import re
import sys
from functools import partial
from pathlib import Path
from statistics import fmean as mean
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from tinykv import hf, plots  # noqa: E402
from tinykv.calibrate import calibrate  # noqa: E402
from tinykv.data import Windows, load_windows  # noqa: E402
from tinykv.differences import paired  # noqa: E402
from tinykv.evaluate import measure  # noqa: E402
from tinykv.methods.registry import METHODS  # noqa: E402
from tinykv.run import flags  # noqa: E402
from tinykv.run.entries import build_entries, calibrate_all  # noqa: E402

DATA = ROOT / "docs" / "results.json"
UNIT = 1e-5  # nats a token
UNEQUAL = 0.19  # true bits: where the rows of a claim differ by more, both are told
TOGETHER = 8  # rows that are calibrated together: their codecs hold what they saw
# of each model: the text, and what a row has for a name in braces. Rows of which something is calibrated are measured
# over DRAWS draws and WINDOWS windows, the others over twice as many windows
COMMAND = {"embedded": "", "SmolLM2": "--context 512 --calib-windows 8 --batch 4"}
DRAWS, WINDOWS = 6, 8
NAMES = {"embedded": {"bits": "2", "group": "16", "codebook": "--bits 1", "windows": "", "late": "",
                      "mark": "0.3", "other": "fables"},
         "SmolLM2": {"bits": "3", "group": "32", "codebook": "--bits 2 --calib-windows 16",
                     "windows": "--calib-windows 16", "late": "--emergence-layer 11 --outlier-channel 507",
                     "mark": "0.1", "other": "tales"}}


class Claim(NamedTuple):
    says: str
    first: str  # a row: the method, and flags of its own
    second: str
    flags: str  # of both rows
    paper: str = ""  # the sign of the difference: "-", "+", "none"; "" where the paper has no such comparison
    where: str = ""  # in the paper


CLAIMS = {
    "KVSink": [
        Claim("first tokens help", "pfn", "rtn", "--bits {bits}", "-", "Figure 9, if by an offset"),
        Claim("found tokens help more", "kvsink", "pfn", "--bits {bits}", "-", "Figure 9, if by an offset"),
        Claim("first tokens at 4 bits", "pfn", "rtn", "--bits 4", "-", "Figure 9, if by an offset"),
        Claim("found tokens at 4 bits", "kvsink", "pfn", "--bits 4", "-", "Figure 9, if by an offset"),
        Claim("first tokens, integer zero point", "pfn", "rtn", "--bits {bits} --formula integer-zero", "-",
              "Figure 9, if by Eq. 10-13"),
        Claim("found tokens, integer zero point", "kvsink", "pfn", "--bits {bits} --formula integer-zero", "-",
              "Figure 9, if by Eq. 10-13"),
        Claim("another zero point, not other tokens", "pfn --formula integer-zero", "kvsink", "--bits {bits}"),
        Claim("first tokens, only values", "pfn", "rtn", "--k-bits 16 --v-bits {bits}"),
        Claim("found tokens, only values", "kvsink", "pfn", "--k-bits 16 --v-bits {bits}"),
        Claim("first tokens, only keys", "pfn", "rtn", "--k-bits {bits} --v-bits 16"),
        Claim("found tokens, only keys", "kvsink", "pfn", "--k-bits {bits} --v-bits 16"),
        Claim("first tokens after a prompt", "pfn", "rtn", "--bits {bits} --prompt 128"),
        Claim("found tokens after a prompt", "kvsink", "pfn", "--bits {bits} --prompt 128"),
        Claim("one found token is not enough", "kvsink --preserve 1", "kvsink", "--bits {bits}"),
        Claim("one found token, or the first", "kvsink", "pfn", "--bits {bits} --preserve 1"),
        Claim("twenty first tokens, or five", "pfn --preserve 20", "pfn", "--bits {bits}"),
        Claim("twenty found tokens", "kvsink", "pfn", "--bits {bits} --preserve 20", "-",
              "Figure 9, if by an offset"),
        Claim("all marked tokens, or five", "kvsink --threshold {mark}", "kvsink", "--bits {bits}"),
        Claim("first tokens, a grid a token", "pfn", "rtn", "--bits {bits} --scheme token-dynamic", "-", "Figure 9"),
        Claim("found tokens, a grid a token", "kvsink", "pfn", "--bits {bits} --scheme token-dynamic", "-",
              "Figure 9"),
        Claim("first tokens, a fixed grid for all tokens", "pfn", "rtn", "--bits {bits} --scheme token-static", "-",
              "Figure 9"),
        Claim("found tokens, a fixed grid for all tokens", "kvsink", "pfn", "--bits {bits} --scheme token-static",
              "-", "Figure 9")],
    "OTT": [
        Claim("the pool helps", "ott", "kivi", "--bits 2 --group-size 128 --recent 32", "-", "its tasks"),
        Claim("groups of 32", "ott", "kivi", "--bits 2 --group-size 32 --recent 32", "-", "its tasks"),
        Claim("in generation", "ott", "kivi", "--bits 2 --group-size 128 --recent 32 --protocol stream", "-",
              "its tasks"),
        Claim("in generation, groups of 32", "ott", "kivi", "--bits 2 --group-size 32 --recent 32 --protocol stream",
              "-", "its tasks"),
        Claim("its groups of 32, or of 128, in generation", "ott --group-size 32", "ott --group-size 128",
              "--bits 2 --recent 32 --protocol stream", "none", "its ablation"),
        Claim("one in the pool, or none", "ott --outlier-num 1", "kivi", "--bits 2 --group-size 128 --recent 32", "-",
              "its ablation"),
        Claim("three in the pool, or one", "ott", "ott --outlier-num 1", "--bits 2 --group-size 128 --recent 32",
              "none", "its ablation"),
        Claim("six in the pool, or three", "ott --outlier-num 6", "ott", "--bits 2 --group-size 128 --recent 32",
              "none", "its ablation"),
        Claim("the largest keys, or the smallest", "ott --select largest", "ott",
              "--bits 2 --group-size 128 --recent 32", "+", "its ablation"),
        Claim("in generation, KIVI with its own window of 128", "ott --recent 32", "kivi --recent 128",
              "--bits 2 --group-size 128 --protocol stream", "-", "its tasks"),
        Claim("a pool, or small groups", "ott --group-size 128", "kivi --group-size 32", "--bits 2 --recent 32"),
        Claim("a pool, or small groups, in generation", "ott --group-size 128", "kivi --group-size 32",
              "--bits 2 --recent 32 --protocol stream")],
    "SKVQ": [
        Claim("regrouped channels", "skvq", "skvq --reorder off",
              "--bits 2 --group-size {group} --metadata fp16 --preserve 0 --clip none", "-", "the ingredients"),
        Claim("clipping after that", "skvq", "skvq --clip none",
              "--bits 2 --group-size {group} --metadata fp16 --preserve 0", "-", "the ingredients"),
        Claim("five kept tokens after that", "skvq --preserve 5", "skvq --preserve 0",
              "--bits 2 --group-size {group} --metadata fp16", "-", "the ingredients"),
        Claim("scales in FP8, or in FP16", "skvq --metadata fp8", "skvq --metadata fp16",
              "--bits 2 --group-size {group} --preserve 0", "none", "the ingredients"),
        Claim("values at 1.5 bits, or at 2", "skvq --k-bits 2 --v-bits 1.5", "skvq --bits 2",
              "--group-size {group} --metadata fp16 --preserve 0", "none", "LongBench"),
        Claim("in generation, a window of 128, or none", "skvq --recent 128", "skvq --recent 0",
              "--bits 2 --group-size {group} --protocol stream", "-", "the ingredients")],
    "KVQuant": [
        Claim("first five, or its first token", "pfn --scheme kvquant", "kvquant", "--bits 2 --outliers 0"),
        Claim("found five, or its first token", "kvsink --scheme kvquant", "kvquant", "--bits 2 --outliers 0",
              "-", "KVSink, Table 2"),
        Claim("found five, or the first five", "kvsink", "pfn", "--scheme kvquant --bits 2 --outliers 0"),
        Claim("found five, or its first token, 0.1% of outliers", "kvsink --scheme kvquant", "kvquant",
              "--bits 2 --outliers 0.1", "-", "KVSink, Table 2"),
        Claim("found five and 0.1% of outliers, or 0.5%", "kvsink --scheme kvquant --outliers 0.1",
              "kvquant --outliers 0.5", "--bits 2", "none", "KVSink, Table 2")],
    "CQ and AnTKV": [
        Claim("Fisher weights", "cq", "cq --sensitivity none", "{codebook} --recent 0", "-", "CQ"),
        Claim("token weights, or none", "antkv --anchors 0", "cq --sensitivity none", "{codebook} --recent 0"),
        Claim("token weights, or Fisher weights", "antkv --anchors 0", "cq", "{codebook} --recent 0", "+",
              "AnTKV, Table 1, nine of twelve cells"),
        Claim("anchors, 1%", "antkv --anchors 1%", "antkv --anchors 0", "{codebook} --recent 0", "-", "AnTKV, Table 1"),
        Claim("anchors, 5%", "antkv --anchors 5%", "antkv --anchors 0", "{codebook} --recent 0", "-",
              "AnTKV, Figure 11"),
        Claim("anchors, or as many first tokens", "antkv", "docs/programs/chance.py:First",
              "--anchors 1% {codebook} --recent 0"),
        Claim("anchors, or as many by chance", "antkv", "docs/programs/chance.py:Random",
              "--anchors 1% {codebook} --recent 0"),
        Claim("keys before RoPE, or after", "antkv", "antkv --rope post",
              "--anchors 1% {codebook} --recent 0", "-", "AnTKV, Appendix B"),
        Claim("calibrated on another text, or on more of this one", "antkv --calib-data {other}", "antkv",
              "--anchors 1% {codebook} --recent 0", "none", "AnTKV, Table 3")],
    "IntactKV": [
        *(Claim(f"exact BOS, {name} weights", "intactkv", "fp16", f"--weights {name.lower()} --w-bits 3", "-", where)
          for name, where in (("RTN", "the released code"), ("AWQ", "Tables 1, 7"), ("GPTQ", "the released code"),
                              ("OmniQuant", "Table 6: MT-Bench"))),
        *(Claim(f"exact BOS, the cache at {bits} bits", "intactkv", "rtn",
                f"--scheme token-dynamic --formula integer-zero --bits {bits}", "-", "Figure 4: MMLU, rounded weights")
          for bits in (3, 4)),
        *(Claim(f"exact BOS, weights at 3 bits and the cache at {bits}", "intactkv", "rtn",
                f"--weights rtn --w-bits 3 --scheme token-dynamic --formula integer-zero --bits {bits}", "-",
                "Figure 4: MMLU")
          for bits in (3, 4))],
}
WIDE = "--bits 2 --group-size 128 --recent 32"
CLAIMS["Length"] = [
    Claim("all marked tokens, or five", "kvsink --threshold 0.1", "kvsink", "--bits 3 --context 4096"),
    Claim("another zero point, or all marked tokens", "kvsink --formula integer-zero", "kvsink --threshold 0.1",
          "--bits 3 --context 4096"),
    Claim("another zero point, or five", "kvsink --formula integer-zero", "kvsink", "--bits 3 --context 4096"),
    Claim("the 41 largest marks, or all marked tokens", "kvsink --preserve 41", "kvsink --threshold 0.1",
          "--bits 3 --context 4096"),
    Claim("41 first tokens, or five", "pfn --preserve 41", "pfn", "--bits 3 --context 4096"),
    Claim("five found, or the first five", "kvsink", "pfn", "--bits 3 --context 4096"),
    Claim("the same, integer zero point", "kvsink --formula integer-zero", "pfn --formula integer-zero",
          "--bits 3 --context 4096"),
    Claim("six in OTT's pool, or three", "ott --outlier-num 6", "ott", f"{WIDE} --context 4096"),
    Claim("32 in OTT's pool, or three", "ott --outlier-num 32", "ott", f"{WIDE} --context 4096")]
# in no claim: the rows of the figure, {label: rows}
FORMATS, TURBOQUANT = "docs/examples/formats.py:Formats", "docs/examples/turboquant.py:TurboQuant"
LINES = {name: [f"{name} --bits {bits}" for bits in (2, 3, 4)]
         for name in ("rtn", "pfn", "kvsink", "kvquant", "kivi", "ott", "skvq", TURBOQUANT)}
LINES |= {name: [f"{name} --bits {bits} --recent 0 {{windows}}" for bits in (1, 2, 4)]
          for name in ("cq", "antkv --anchors 1%")}
POINTS = {f"{name}{rotated}": f"{FORMATS} --hadamard {on} --scheme {name}"
          for name in ("nvfp4", "mxfp4", "q4_0") for on, rotated in (("off", ""), ("on", ", rotated"))}
EIGHT = {name: f"{FORMATS} --scheme {name}" for name in ("fp8", "mxfp8", "q8_0")}
SHOWN = [*(row for rows in LINES.values() for row in rows), *POINTS.values(), *EIGHT.values()]
MORE = ["fp16 --prompt 128", "kvsink --bits {bits} {late}",
        *(f"{FORMATS} --scheme {k} --v-scheme {v}" for name in ("nvfp4", "mxfp4", "q4_0")
          for k, v in ((name, "fp16"), ("fp16", name))),
        *(f"{TURBOQUANT} --bits {bits} --qjl on" for bits in (3, 4))]

# the table of own_codec.md
CODECS = [*EIGHT.values(), *POINTS.values(),
          f"{FORMATS} --scheme nvfp4 --v-scheme fp16", f"{FORMATS} --scheme fp16 --v-scheme nvfp4",
          "kivi --bits 4 --group-size 64",
          *(f"{TURBOQUANT} --bits {bits}" for bits in (4, 3)), f"{TURBOQUANT} --bits 4 --qjl on"]
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
# draw of its own, and the error of their mean is that of both. The numbers of pairs were fixed beforehand
FIVE, MARKED = "kvsink --bits 3", "kvsink --bits 3 --threshold 0.1"
ZERO = "--bits 3 --formula integer-zero"
CHANCE = "docs/programs/chance.py:Chance --bits 3 --threshold 0.1"
# what begins the name of a row that another program measures: quantized_cache.py, train_intact.py
OWN, PREFIX = "QuantizedCache: ", "prefix of 46 tokens, rtn-3: "
LENGTHS = "", " --context 2048", " --context 4096", " --context 8192"
STREAM = "--context 4096 --prompt 3840"
LONG = {  # {flags of the windows: {row: pairs}}
    "--context 4096": {
        **dict.fromkeys([FIVE, MARKED, f"kvsink {ZERO}"], 8),
        **dict.fromkeys(["rtn --bits 3", "pfn --bits 3", "pfn --bits 3 --preserve 41", CHANCE,
                         "kvsink --bits 3 --preserve 41", f"rtn {ZERO}", f"pfn {ZERO}", "kivi --bits 2",
                         f"kivi {WIDE}", f"ott {WIDE}", f"ott {WIDE} --outlier-num 6", f"ott {WIDE} --outlier-num 32",
                         POINTS["nvfp4"], SERVED["q4_0, rotated"]], 3),
        **dict.fromkeys(["skvq --bits 2", "kvquant --bits 2", "cq --bits 2 --recent 0 --calib-windows 16",
                         "antkv --anchors 1% --bits 2 --recent 0 --calib-windows 16", POINTS["mxfp4"], EIGHT["fp8"],
                         SERVED["KIVI, 4 bits"]], 2)},
    "--context 2048": dict.fromkeys([FIVE, MARKED, f"kvsink {ZERO}", "pfn --bits 3"], 3),
    "--context 8192": dict.fromkeys([FIVE, MARKED, f"kvsink {ZERO}"], 1),
    STREAM: dict.fromkeys([FIVE, MARKED], 2)}
PAIRS = LONG["--context 4096"]
CURVES = {"pfn: 5 kept": "pfn --bits 3", "kvsink: 5 kept": FIVE, "kvsink: 5 kept, others by chance": CHANCE,
          "kvsink: all marked": MARKED, "kvsink: integer zero": f"kvsink {ZERO}", "kivi, 2 bits": "kivi --bits 2",
          "nvfp4": POINTS["nvfp4"]}  # of the figure by position, {label: row}

# The data: {model: {row: {"bits": true bits, "nll": [[loss of each window] of each draw], "kl": the same,
#                          "along": [nats above fp16 of each 512 targets, the mean of all pairs], of longer windows}}}

def rows_of(model):
    """The rows of a model, each a method and flags."""
    rows = [row for claims in CLAIMS.values() for claim in claims for row in pair(claim, model)]
    rows += [named(row, model) for row in [*SHOWN, *MORE, *SERVED.values()]]
    rows = [row for row in rows if "--context" not in row]
    long = [at(row, where) for where, pairs in LONG.items() for row in ["fp16", *pairs] if model == "SmolLM2"]
    return list(dict.fromkeys(["fp16", *rows, *long]))


def at(row, where="--context 4096"):
    """A row of SmolLM2 in longer windows."""
    return named(f"{row} {where}", "SmolLM2")


def pair(claim, model):
    """The two rows of a claim."""
    return [named(f"{row} {claim.flags}", model) for row in (claim.first, claim.second)]


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


def measure_all(model, loaded, text, data):
    """Measure the rows that the data have not. Rows that read the same text in the same way are measured together, so
    that they share the forwards of the calibration."""
    rows = data.setdefault(model, {})
    groups = {}  # {what is not a method's own: [(row, its flags, its entry)]}
    for row in rows_of(model):
        if row not in rows and "--context" not in row:
            method, *words = row.split()
            given = [*COMMAND[model].split(), *(["--data", text] if text else []), *words]
            args = flags.parse(given, ["fp16"] if method == "fp16" else ["fp16", method])
            entry = list(build_entries(args, loaded[0].config, loaded[1])[0].values())[-1]
            calibrates = entry.method.needs_calibration
            args.draws, args.windows = (DRAWS, WINDOWS) if calibrates else (1, 2 * WINDOWS)
            shared = args.protocol, args.prompt, args.context, args.calib_windows, args.calib_data, calibrates
            groups.setdefault(shared, []).append((row, args, entry))
    for group in sorted(groups.values(), key=lambda group: group[0][1].draws == 1):  # what is calibrated decides most
        for i in range(0, len(group), TOGETHER):
            measure_group(model, loaded, group[i:i + TOGETHER], data)


def measure_group(model, loaded, group, data):
    """Measure rows that share flags, [(row, flags, entry)], and write each as soon as it is there."""
    args = group[0][1]
    setup = flags.set_up(args, loaded)
    entries = {row: entry for row, _, entry in group}
    windows = flags.load_test(setup, entries)
    models = calibrate_all(setup, loaded[0], entries, windows.tokens)
    loaded[0].use_attention("fused")
    read = partial(measure, windows=windows, protocol=args.protocol, batch=setup.batch, prompt=args.prompt)
    exact = read(loaded[0], METHODS["fp16"](loaded[0].config))
    for row, entry in entries.items():
        if entry.error:
            raise entry.error
        found = [read(models[entry.weights], method, fp16=exact) for method in entry.methods]
        targets = found[0].targets / len(found[0].nll)  # of a window
        data[model][row] = {"bits": round(mean(found[0].bits), 3),
                            "nll": [[round(loss / UNIT) for loss in draw.nll] for draw in found],
                            "kl": [[round(kl / targets / UNIT) for kl in draw.kl] for draw in found]}
        write_data(data)
        print(f"{model}: {row}: {UNIT * mean(map(mean, data[model][row]['nll'])):.3f}", flush=True)


def measure_long(loaded, text, data):
    """Measure SmolLM2's rows in longer windows, pair by pair, and write each as soon as it is there."""
    for where, pairs in LONG.items():
        for i in range(max(pairs.values())):
            lacking = [row for row in pairs if i < pairs[row] and n_measured(row, where, data) == i]
            if lacking:
                measure_pair(loaded, text, where, i, lacking, data)


def measure_pair(loaded, text, where, i, rows, data):
    """Measure rows in window i with the tables of draw i. where: the flags of the windows."""
    model, tokenizer = loaded
    model.use_attention("fused")
    args = flags.parse(where.split(), ["fp16"])
    windows = load_windows(text, tokenizer, args.context, i + 1)
    window = Windows(windows.tokens[i:], windows.answers[i:], windows.name, args.prompt or 1)
    methods = calibrate_pair(loaded, text, rows, i)
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
    methods, groups = {}, {}  # the latter {windows of a draw: [Method]}
    for row in rows:
        name, *words = row.split()
        args = flags.parse([*COMMAND["SmolLM2"].split(), *words], [name])
        methods[row] = list(build_entries(args, model.config, tokenizer)[0].values())[-1].method
        if methods[row].needs_calibration:
            groups.setdefault(args.calib_windows, []).append(methods[row])
    for n, group in groups.items():
        calibration = load_windows(text, tokenizer, 512, n * (draw + 1), "calibration").tokens
        calibrate(model, group, calibration[-n:], seed=draw)
    return methods


def add_pair(row, where, result, exact, data):
    """Add what was measured in a pair to its row. exact: fp16's Result."""
    parts = list(zip(result.nll_along[0], exact.nll_along[0]))  # (loss, fp16's) of each 512 targets
    empty = {"bits": 0, "nll": [[]], "kl": [[]], "along": [0] * len(parts)}
    found = data["SmolLM2"].setdefault(at(row, where), empty)
    losses, n = found["nll"][0], len(found["nll"][0])
    losses.append(round(result.nll[0] / UNIT))
    found["kl"][0].append(round(result.kl[0] / result.targets / UNIT))
    found["bits"] = round((n * found["bits"] + result.bits[0]) / (n + 1), 3)
    for part, (loss, of_fp16) in enumerate(parts):
        found["along"][part] = round((n * found["along"][part] + (loss - of_fp16) / UNIT) / (n + 1))
    write_data(data)
    print(f"{at(row, where)}: {result.nll[0]:.3f}, pair {n + 1}", flush=True)


def shape_of(*rows):
    """Draws and windows over which rows are compared: those of both. A row that was measured once is the same in every
    draw."""
    draws = [len(row["nll"]) for row in rows if len(row["nll"]) > 1]
    return min(draws, default=1), min(len(row["nll"][0]) for row in rows)


def in_words(*rows):
    """The same, for a table."""
    draws, windows = shape_of(*rows)
    return f"{windows} pairs" if "along" in rows[0] else f"{draws} x {windows}"


def compared(row, other, kind="nll"):
    """Two rows -> mean difference, its error, p, over the draws and windows of both."""
    C, W = shape_of(row, other)
    both = []
    for each in (row, other):
        draws = each[kind] if len(each[kind]) > 1 else C * each[kind]
        both.append([[UNIT * loss for loss in draw[:W]] for draw in draws[:C]])
    difference, error, _, p, _ = paired(*both)
    return difference, error, p


# The claims

class Finding(NamedTuple):
    text: str  # a cell of the table
    sign: str  # "-", "+", "none" or "open"


def finding(claim, model, data):
    """What a model says of a claim; None where its rows are not measured."""
    rows = [data.get(model, {}).get(row) for row in pair(claim, model)]
    if None in rows:
        return None
    difference, error, p = compared(*rows)
    of_kl, _, p_of_kl = compared(*rows, "kl")
    sign, more = "none" if p > 0.05 else "open", ""
    kl_decides = p_of_kl < 0.01 <= p
    if p < 0.01 or kl_decides:
        sign = "-" if (of_kl if kl_decides else difference) < 0 else "+"
    if kl_decides or p_of_kl < 0.05 and difference * of_kl < 0:  # or it says the opposite
        more = f"; KL {of_kl:+.3f}, {of_p(p_of_kl)}"
    bits, others = (row["bits"] for row in rows)
    if abs(bits - others) >= UNEQUAL:
        more += f"; {bits:.2f} and {others:.2f} bits"
    return Finding(f"{difference:+.3f} ± {error:.3f} ({of_p(p)}, {in_words(*rows)}{more})", sign)


def of_p(p):
    return "p < .001" if p < 0.001 else f"p {p:.3f}".replace("0.", ".")


def verdict(claim, found):
    """What SmolLM2 says beside what the paper says."""
    if found is None:
        return "not measured"
    seen = {"-": "less", "+": "more"}.get(found.sign, found.sign)
    if not claim.paper:
        return f"{seen}; not in the paper"
    if found.sign == "open":
        return "open"
    if found.sign == claim.paper:
        return f"none, as there ({claim.where})" if seen == "none" else f"same ({claim.where})"
    return f"**other**: {seen} ({claim.where})"


def claims_table(section, data):
    """A claim a line; where the models' rows differ, in bits, say, both are named: 2 / 3."""
    lines = ["| claim | embedded | SmolLM2 | verdict |", "|---|---|---|---|"]
    names = {name: " / ".join(NAMES[model][name] for model in NAMES) for name in NAMES["SmolLM2"]}
    for claim in CLAIMS[section]:
        both = [finding(claim, model, data) for model in NAMES]
        rows = f"`{claim.first}` - `{claim.second}`, `{claim.flags}`".format(**names)
        says = f"{claim.says}: {rows}"
        lines.append(f"| {says} | {' | '.join(found.text if found else '-' for found in both)} | "
                     f"{verdict(claim, both[1])} |")
    return "\n".join(lines)


def count(data):
    """How often the two models agree."""
    found = [[finding(claim, model, data) for model in NAMES] for claims in CLAIMS.values() for claim in claims]
    signs = [tuple(of_model.sign for of_model in both) for both in found if None not in both]  # (embedded, SmolLM2)
    decided = [both for both in signs if "open" not in both]
    agree, neither = sum(a == b for a, b in decided), decided.count(("none", "none"))
    of_smol, of_embedded = (sum(both[i] == "none" != both[1 - i] for both in decided) for i in (0, 1))
    opposite, undecided = len(decided) - agree - of_smol - of_embedded, len(signs) - len(decided)
    return (f"Of {len(signs)} comparisons that both models have, they agree on {agree}; on {neither} of these neither "
            f"shows a difference.\n{of_smol} differences are SmolLM2's alone and {of_embedded} the embedded model's; "
            f"{opposite} have opposite signs; {undecided} are open on one of them.")


def fp16_of(row, rows):
    """The row above which a row's loss is measured: fp16 on the same tokens."""
    return rows["fp16" + "".join(re.findall(r" --(?:prompt|context) \d+", row))]


def rows_table(model, data, names):
    """What rows lose above fp16. A format stands before its row."""
    rows, formats = data.get(model, {}), {row: f"{label}: " for label, row in (EIGHT | POINTS).items()}
    lines = ["| row | true bits | nats | KL | draws x windows |", "|---|---|---|---|---|"]
    for row in (named(name, model) for name in names):
        title = f"{formats.get(row, '')}`{row}`"
        if row not in rows:
            lines.append(f"| {title} | - | not measured | | |")
            continue
        fp16 = fp16_of(row, rows)
        difference, error, _ = compared(rows[row], fp16)
        kl, _, _ = compared(rows[row], fp16, "kl")
        lines.append(f"| {title} | {rows[row]['bits']:.2f} | {difference:.3f} ± {error:.3f} | {kl:.3f} | "
                     f"{in_words(rows[row], fp16)} |")
    return "\n".join(lines)


def lengths_table(data):
    """What rows lose above fp16 in windows of 512 tokens and in longer ones, by position in those of 4096."""
    rows = data["SmolLM2"]
    lines = ["| row | 512 | 2,048 | 4,096 | its first 512 | its last 512 | 8,192 | its last 512 | bits: 512, 4,096 | "
             "pairs |", "|---|---|---|---|---|---|---|---|---|---|"]
    for name in PAIRS:
        short, middle, long, longest = (rows.get(named(name + where, "SmolLM2")) for where in LENGTHS)
        cells = [lost(name + where, rows) for where in LENGTHS]
        last = f"{UNIT * longest['along'][-1]:.3f}" if longest else "-"
        first_and_last = [f"{UNIT * long['along'][i]:.3f}" if long else "-" for i in (0, -1)]
        bits = ", ".join(f"{row['bits']:.2f}" if row else "-" for row in (short, long))
        pairs = ", ".join(str(len(row["nll"][0])) for row in (middle, long, longest) if row)
        lines.append(f"| `{name}` | {' | '.join([*cells[:3], *first_and_last, cells[3], last, bits, pairs])} |")
    return "\n".join(lines)


def prompts_table(data):
    """What rows lose above fp16 in 256 tokens that are read one after the other, after a prompt of 3,840."""
    lines = ["| row | nats lost | true bits | pairs |", "|---|---|---|---|"]
    for name in LONG[STREAM]:
        row = data["SmolLM2"].get(at(name, STREAM), {"bits": 0, "nll": [[]]})
        cells = lost(f"{name} {STREAM}", data["SmolLM2"]), f"{row['bits']:.2f}", str(len(row["nll"][0]))
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def lost(row, rows):
    """What a row of SmolLM2 loses above fp16, with its error over windows, or pairs, where there are several."""
    row = named(row, "SmolLM2")
    if row not in rows:
        return "-"
    difference, error, _ = compared(rows[row], fp16_of(row, rows))
    return f"{difference:.3f}" + ("" if error is None else f" ± {error:.3f}")


def served_table(data):
    """What a format holds of LLaMA-3-8B's cache, and what it loses on SmolLM2 in windows of 512 and 4,096 tokens."""
    rows = data["SmolLM2"]
    lines = ["| format | true bits | GiB: 8K | 32K | 128K | nats lost: 512 | 4,096 |", "|---|---|---|---|---|---|---|"]
    for label, row in {"16 bits": "fp16", **SERVED}.items():
        if named(row, "SmolLM2") not in rows:
            lines.append(f"| {label} | - | | | | not measured | |")
            continue
        bits, both = rows[named(row, "SmolLM2")]["bits"], "0 | 0"
        sizes = [2 * 32 * 8 * 128 * tokens * bits / 8 / 2 ** 30 for tokens in (2 ** 13, 2 ** 15, 2 ** 17)]
        if row != "fp16":
            both = f"{lost(row, rows)} | {lost(row + ' --context 4096', rows)}"
        lines.append(f"| {label} | {bits:.2f} | {sizes[0]:.2f} | {sizes[1]:.2f} | {sizes[2]:.2f} | {both} |")
    return "\n".join(lines)


def quantized_table(data):
    """What transformers' own quantized cache loses above its plain one, beside KIVI, by `quantized_cache.py`."""
    rows = {row.removeprefix(OWN): found for row, found in data["SmolLM2"].items() if row.startswith(OWN)}
    lines = ["| | true bits at the end | nats lost |", "|---|---|---|"]
    for row in list(rows)[1:]:
        difference, error, _ = compared(rows[row], rows["plain"])
        lines.append(f"| {row} | {rows[row]['bits']:.2f} | {difference:+.3f} ± {error:.3f} |")
    return "\n".join(lines)


def draw(data, path):
    """The figure of SmolLM2's losses by true bits: a line a method, a point a format."""
    rows = data["SmolLM2"]
    title = ("SmolLM2-135M on WikiText-2, all of it read from the cache\n"
             f"{WINDOWS} windows of 512 tokens x {DRAWS} calibrations (1 bit: 3; uncalibrated: {2 * WINDOWS} windows)")
    figure, (panel,) = plots.new_figure(1, 1, 7.4, 5.6, title)
    names = {re.split("[/:]", name)[-1].split()[0]: names for name, names in LINES.items()}
    for i, (label, of_line) in enumerate((names | {label: [name] for label, name in POINTS.items()}).items()):
        found = [rows[row] for row in (named(name, "SmolLM2") for name in of_line) if row in rows]
        points = sorted((row["bits"], *compared(row, rows["fp16"])[:2]) for row in found)  # (bits, nats, error)
        if points:
            bits, nats, errors = zip(*points)
            how = plots.style(i)
            if label in POINTS:  # a marker a format, open unless it is rotated
                how = {"color": plots.GREY, "marker": dict(nvfp4="s", mxfp4="^", q4_0="o")[label.split(",")[0]],
                       "mfc": None if "rotated" in label else "white", "ls": "none", "markersize": 6}
            panel.plot(bits, nats, label=label, **how)
            panel.errorbar(bits, nats, errors, fmt="none", ecolor=how["color"], zorder=1)
    panel.set(yscale="log", ylim=(0.003, None), xlim=(None, 5.2), ylabel="nats per token above fp16 (± standard error)",
              xlabel="true bits per number: codes, scales, kept tokens")
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
            losses = [UNIT * loss for loss in rows[at(name)]["along"]]
            panel.plot([512 * part + 256 for part in range(len(losses))], losses, label=label, **plots.style(i))
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
        loaded = hf.load(args.model or hf.EMBEDDED)
        measure_all(args.measure, loaded, args.data, data)
        if args.measure == "SmolLM2":
            measure_long(loaded, args.data, data)
    if args.plot:
        draw(data, ROOT / "docs" / "figures" / "loss.png")
        draw_along(data, ROOT / "docs" / "figures" / "length.png")


if __name__ == "__main__":
    main()
