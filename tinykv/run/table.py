"""The table that `eval_ppl.py` prints: its heading, its rows, and what compares them.

A row is a dict, as the JSON has it. The first one is fp16's, with which the others are compared.
"""
import json
import math
import platform
import traceback
from operator import itemgetter

import torch

from tinykv import UserError, storage
from tinykv.evaluate import delta_error, mean, paired
from tinykv.run import cli
from tinykv.weights import weight_bytes

# settings that change a method's bits and nothing else; a method may declare others, `bits_settings`
BITS_SETTINGS = ("bits", "k_bits", "v_bits", "vq")

# column: (width, key of a row, format)
COLUMNS = {
    "weights": (7, "weights", ""),
    "method": (8, "label", ""),
    "scheme": (6, "scheme", ""),
    "keep": (4, "preserve", ""),
    "ppl": (7, "ppl", ".3f"),
    "delta": (7, "delta_ppl", "+.3f"),
    "+-": (6, "delta_se", ".3f"),
    "recall": (6, "recall", ".1%"),
    "KL": (6, "kld", ".4f"),
    "top-1": (6, "top1", ".1%"),
    "bits": (5, "bits", ""),
    "true": (5, "bits_true", ".2f"),
    "128K": (5, "bits_128k", ".2f"),
    "cache KB": (8, "cache_kb", ".0f"),
    "s": (6, "seconds", ".1f"),
}
WIDE_ONLY = ("KL", "top-1", "bits", "128K", "cache KB", "s")


def print_heading(args, model, windows, models, runs, left_out):
    """What the table is of: the model, the text, the weights, and what calibration found."""
    parameters = sum(p.numel() for p in model.parameters())
    attention = "" if args.attention == "fused" else f", attention {args.attention}"
    prompt = f", prompt {args.prompt}" if args.prompt else ""
    print(f"model {args.model}: {parameters:,} parameters, {args.dtype}, {args.device}")
    print(f"data {args.data}: {args.windows} windows of {args.context} tokens, "
          f"protocol {args.protocol}{prompt}, seed {args.seed}{attention}")
    for weights, smaller in models.items():
        if weights:
            megabytes, instead_of = weight_bytes(smaller) / 1e6, weight_bytes(model) / 1e6
            print(f"weights {weights}: {megabytes:.2f} MB instead of {instead_of:.2f} MB")
    if windows.start > 1:
        what = "prompt" if args.prompt else "prefix"
        print(f"{what}: the first {windows.start} tokens of every window, which are not predicted")
    for what, why in left_out.items():
        print(f"{what} is left out: {why}")
    for title, r in runs.items():
        if r.beside:
            print(f"{title}: {r.beside}, as the method that it is shown beside")
        if r.error is None and r.method.describe():
            print(f"{title}: {r.method.describe()}")
        if choice_of(r, args) and (args.prompt or args.protocol == "stream"):
            when = {"prompt": "once, after the prompt", "always": "at each quantization"}
            print(f"{title}: the tokens to keep are chosen {when[choice_of(r, args)]}")
    print()


def choice_of(r, args):
    """When a run's method chooses the tokens to keep: "prompt", "always", or None where it has no
    such setting."""
    if "choose" not in r.settings:
        return None
    return r.method.choose if args.prompt else "always"


# A row

def row_of(r, fp16, args):
    """A row of the table, as the JSON has it. fp16: its `Result`."""
    settings = {}
    for name, value in r.settings.items():
        settings[name] = value if isinstance(value, int | float | None) else str(value)
    row = {
        "label": r.label,
        "method": r.name,
        "settings": settings,
        "weights": r.weights,
        "scheme": r.method.scheme,
        "k_bits": r.method.k_bits,
        "v_bits": r.method.v_bits,
        "preserve": r.method.preserve,
        "protocol": args.protocol,
        "prompt": args.prompt,  # tokens of it, or None
        "choose": choice_of(r, args),
        "bits_settings": [*BITS_SETTINGS, *r.method.bits_settings],
        "bits_nominal": (r.method.k_bits + r.method.v_bits) / 2,
        "offline_bytes": r.method.offline_bytes,
        "windows": args.windows,
        "fault": r.error and f"failed: {cli.reason(r.error)}",  # then nothing was measured
    }
    if row["fault"]:
        return {**row, **dict.fromkeys(figures_of(fp16, fp16))}
    return {**row, **figures_of(r.result, fp16)}


def figures_of(result, fp16):
    """What a run cost in predictions, what its cache takes, and how long it took."""
    targets = result.targets / len(result.nll)  # of a window
    return {
        "ppl": result.ppl,
        "delta_ppl": result.ppl - fp16.ppl,
        "delta_se": delta_error(result, fp16),
        "kld": max(0.0, sum(result.kl) / result.targets),
        "top1": result.agree / result.targets,
        "recall": result.right / result.answers if result.answers else None,
        "bits_true": mean(result.bits),
        "bits_128k": mean(result.bits_far),
        "cache_bytes": result.cache_bytes,
        "tokens_per_s": result.tokens / result.seconds,
        "seconds": result.seconds,
        "window_nll": result.nll,  # nats a token, window by window
        "window_kl": [kl / targets for kl in result.kl],  # the same
    }


class Rows(list):
    """Rows of `compare`. They are shown as the command prints them."""

    def __init__(self, rows, printed):
        super().__init__(rows)
        self.printed = printed

    def __repr__(self):
        return self.printed


class Table:
    """Prints rows as they come, in columns as wide as the longest name of {title: Run}, and writes them to --json."""

    def __init__(self, args, runs):
        self.args, self.runs, self.rows = args, runs, []
        self.columns = [column for column in COLUMNS if args.wide or column not in WIDE_ONLY]
        if not any(r.weights for r in runs.values()):
            self.columns.remove("weights")
        longest = {"method": max(len(r.label) for r in runs.values()),
                   "scheme": max(len(r.method.scheme or "") for r in runs.values()),
                   "weights": max(len(r.weights or "") for r in runs.values())}
        self.widths = [max(COLUMNS[column][0], longest.get(column, 0)) for column in self.columns]
        self.print(self.columns)

    def print(self, words):
        print(cli.in_columns(words, self.widths, left=self.columns.index("keep")), flush=True)

    def add(self, r, fp16):
        """The row of a run that is measured, or that has failed. fp16: its `Result`."""
        self.rows.append(row_of(r, fp16, self.args))
        self.print_row(self.rows[-1])
        if self.args.json not in (None, "-"):
            storage.write_json(self.args.json, self.content())

    def print_row(self, row):
        """A row; "-" for what it has not, as where its method has failed."""
        bits = dict.fromkeys([f"{row['k_bits']:g}", f"{row['v_bits']:g}"])  # once, where they are equal
        row = {**row, "bits": "/".join(bits), "cache_kb": row["cache_bytes"] and row["cache_bytes"] / 1024}
        if row["fault"]:
            row["ppl"] = "failed"
        words = []
        for column in self.columns:
            _, key, form = COLUMNS[column]
            words.append(cli.figure(row[key], form))
        self.print(words)

    def content(self):
        """The rows so far, as the JSON that --json asks for."""
        args, versions = self.args, {"python": platform.python_version(), "torch": torch.__version__}
        return {"rows": self.rows, "model": args.model, "data": args.data, "context": args.context,
                "windows": args.windows, "seed": args.seed, "versions": versions}

    def print_rest(self):
        """What went wrong, and what compares the rows: --vs, --at-bits, --json -, --plot."""
        args = self.args
        for title, r in self.runs.items():
            if r.error is not None:
                print(f"{title} failed: {cli.reason(r.error)}")
                if not isinstance(r.error, UserError):
                    print("".join(traceback.format_exception(r.error)).rstrip())
        measured = {title: row for title, row in zip(self.runs, self.rows) if not row["fault"]}
        if args.vs is not None:
            print()
            print_vs(measured, args.vs)
        if args.at_bits is not None:
            print()
            print_at_bits(list(measured.values()), args.at_bits)
        if args.json == "-":
            print()
            print(json.dumps(self.content(), indent=2, allow_nan=False))
        if args.plot:
            from tinykv.analysis import figures  # only now: it needs matplotlib
            figures.save(figures.perplexity(list(measured.values())), args.plot)


# What stands under the table

def print_vs(rows, name):
    """Each row's loss beside that of another, window by window. rows: {title: row}. name: see `compared_with`."""
    lines = []
    for title, row in rows.items():
        other = compared_with(title, name, rows)
        if other in (None, title):
            continue
        difference, error, t, better = paired(row["window_nll"], rows[other]["window_nll"])
        _, _, t_of_kl, _ = paired(row["window_kl"], rows[other]["window_kl"])
        lines.append([title, other, f"{difference:+.4f}", cli.figure(error, ".4f"), cli.figure(t, "+.1f"),
                      cli.figure(t_of_kl, "+.1f"), f"{better} of {row['windows']}"])
    cli.print_columns(["method", "vs", "nats a token", "+-", "t", "t of KL", "better on"], lines, left=2)


def compared_with(title, name, titles):
    """The row that --vs NAME compares a row with: the row of that title, or, of the method of that name, the row that
    shares most settings and has no other; None if there is none."""
    if name in titles and " " in name:
        return name
    settings = set(title.split()[1:])
    same = [other for other in titles if other.split()[0] == name and settings >= set(other.split()[1:])]
    return max(same, key=len, default=None)


def lines_of(rows, varied=None):
    """{name of a line: its rows}.

    A row's label is its method, and then the settings that were swept: "pfn scheme=kvquant bits=2".
    The rows of a line differ in one setting: the first in their label that is one of `varied`, or of
    those that the method's bits hang on.
    """
    lines = {}
    for row in rows:
        words = row["label"].split(" ")
        settings = varied or row.get("bits_settings", BITS_SETTINGS)
        along_the_line = [word for word in words if word.partition("=")[0] in settings]
        if along_the_line:
            words.remove(along_the_line[0])
        if row["weights"]:
            words.append(row["weights"])
        lines.setdefault(" ".join(words), []).append(row)
    return lines


def at_bits(rows, bits):
    """What each method has at `bits` true bits: rows of `label`, `ppl`, `kld`, `between`, `tables`.

    rows: of the table, fp16's first. Rows of a method that differ in bits alone lie on a line. The
    loss and KL at `bits` are interpolated between the two nearest rows of the line, linearly in the
    bits. `between`: their true bits; `tables`: the bytes of their calibrated tables. A line that
    does not reach so far has no row.
    """
    found = []
    bits_of = itemgetter("bits_true")
    for label, line in lines_of(rows[1:]).items():
        below = [row for row in line if bits_of(row) <= bits]
        above = [row for row in line if bits_of(row) >= bits]
        if not below or not above:
            continue
        below, above = max(below, key=bits_of), min(above, key=bits_of)
        low, high = bits_of(below), bits_of(above)
        share = (bits - low) / (high - low) if high > low else 0.0  # of the upper row
        loss = (1 - share) * math.log(below["ppl"]) + share * math.log(above["ppl"])  # nats
        found.append({
            "label": label,
            "ppl": math.exp(loss),
            "kld": (1 - share) * below["kld"] + share * above["kld"],
            "between": (low, high),
            "tables": (below["offline_bytes"], above["offline_bytes"]),
        })
    return found


def print_at_bits(rows, bits):
    """The table of `at_bits`, and what it leaves out."""
    found = at_bits(rows, bits)
    lines = []
    for row in found:
        delta = row["ppl"] - rows[0]["ppl"]
        lines.append([row["label"], f"{row['ppl']:.3f}", f"{delta:+.3f}", f"{row['kld']:.4f}",
                      *(f"{x:.2f}" for x in row["between"]), *(f"{x / 1024:.0f}" for x in row["tables"])])
    if lines:
        head = [f"at {bits:g} true bits", "ppl", "delta", "KL", "from", "to", "tables KB", "to"]
        cli.print_columns(head, lines, left=1)
    left_out = lines_of(rows[1:]).keys() - {row["label"] for row in found}
    if left_out:
        print(f"no rows on both sides of {bits:g} true bits that differ in bits alone: "
              f"{', '.join(sorted(left_out))}")
