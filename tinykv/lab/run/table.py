"""The table of `eval_ppl.py`: its heading, its rows, and what compares them.

A row is a dict, as the JSON has it. The first one is fp16's, with which the others are compared.
"""
import contextlib
import csv
import platform
import re
import traceback
from collections import defaultdict
from html import escape
from statistics import fmean as mean

import torch

from tinykv import UserError, hf
from tinykv.evaluate import Result
from tinykv.lab import cli, files, plots
from tinykv.lab.data.windows import VOCABULARIES
from tinykv.lab.differences import delta_error, paired
from tinykv.lab.run import comparisons
from tinykv.lab.tables import table_bytes, tables_of
from tinykv.lab.weights import weight_bytes

# column: (width, key of a row, format)
COLUMNS = {
    "weights": (7, "weights", ""),
    "method": (8, "label", ""),
    "scheme": (6, "scheme", ""),
    "keep": (4, "preserve", "g"),
    "ppl": (7, "ppl", ".3f"),
    "delta": (7, "delta_ppl", "+.3f"),
    "+-": (6, "delta_se", ".3f"),
    "answers": (7, "answers", ".1%"),
    "KL": (6, "kld", ".4f"),
    "top-1": (6, "top1", ".1%"),
    "bits": (5, "bits", ""),
    "true": (5, "bits_true", ".2f"),
    "128K": (5, "bits_128k", ".2f"),
    "cache KB": (8, "cache_kb", ".0f"),
    "s": (6, "seconds", ".1f"),
}
WIDE_ONLY = ("KL", "top-1", "bits", "128K", "cache KB", "s")


class Table(list):
    """The rows, and the lines around them, shown as they come. `pandas.json_normalize(table)` is a DataFrame.

    args: of `flags.set_up`. show: is handed each line.
    """

    def __init__(self, args, show=lambda line: None):
        super().__init__()
        self.args, self.show, self.parts, self.columns = args, show, [], None

    def say(self, *parts):
        """Lines, or `cli.Columns`."""
        for part in parts:
            self.parts.append(part)
            self.show(part)

    # As they come

    def begin(self, model):
        """What the table is of, the model and the text."""
        args = self.args
        parameters = sum(p.numel() for p in model.parameters())
        attention = "" if args.attention == "fused" else f", attention {args.attention}"
        prompt = f", prompt {args.prompt}" if args.prompt else ""
        self.say(f"model {args.model}: {parameters:,} parameters, {args.dtype}, {args.device}")
        if hasattr(model, "heading"):  # it runs through transformers
            self.say(model.heading())
        self.say(f"data {args.data}: {args.windows} windows of {args.context} tokens, "
                 f"protocol {args.protocol}{prompt}, seed {args.seed}{attention}")
        self.say(*self.of_other_text())

    def of_other_text(self):
        """A line, if the text was written for another model."""
        args = self.args
        if args.data in VOCABULARIES and args.model != str(hf.EMBEDDED):
            yield f"{args.data} was written for the embedded model; --data wikitext2 or a file is a text for others"

    def say_what_was_found(self, model, models, windows):
        """What the rows are measured with, the weights, what calibration found, when tokens are chosen; and the head of
        the rows, as wide as the longest name."""
        args, entries = self.args, self.args.entries.values()
        if any(tables_of(entry.method) for entry in entries):
            many = f"{args.draws} calibrations, each on text of its own: means; +- and t are over draws and windows"
            self.say("one calibration: +- and t are over windows" if args.draws == 1 else many)
        once = ", quantized once" if args.draws > 1 else ""
        for weights, smaller in models.items():
            if weights:
                megabytes, instead_of = weight_bytes(smaller) / 1e6, weight_bytes(model) / 1e6
                self.say(f"weights {weights}: {megabytes:.2f} MB instead of {instead_of:.2f} MB{once}")
        if windows.start > 1:
            what = "prompt" if args.prompt else "bos given" if windows.start == 2 and args.bos == "given" else "prefix"
            self.say(f"{what}: the first {windows.start} tokens of every window, which are not predicted")
        self.say(*(f"{what} is left out: {why}" for what, why in args.left_out.items()))
        for entry in entries:
            self.say(*(f"{entry.title}: {said}" for said in said_of(entry, args)))

        columns = [column for column in COLUMNS if args.wide or column not in WIDE_ONLY]
        if not any(entry.weights for entry in entries):
            columns.remove("weights")
        longest = {"method": max(len(entry.label) for entry in entries),
                   "scheme": max(len(entry.method.scheme or "") for entry in entries),
                   "weights": max(len(entry.weights or "") for entry in entries)}
        widths = [max(COLUMNS[column][0], longest.get(column, 0)) for column in columns]
        self.columns = cli.Columns(columns, [], columns.index("keep"), widths)
        self.say("", self.columns)

    def add(self, entry):
        """The row of an entry."""
        row = row_of(entry, self.args)
        self.append(row)
        bits = dict.fromkeys([f"{row['k_bits']:g}", f"{row['v_bits']:g}"])  # once, where they are equal
        shown = {**row, "bits": "/".join(bits), "cache_kb": row["cache_bytes"] and row["cache_bytes"] / 1024}
        if row["fault"]:
            shown["ppl"] = "failed"
        words = [cli.figure(shown[key], form) for _, key, form in map(COLUMNS.get, self.columns.head)]
        self.columns.lines.append(words)
        self.show(self.columns.line(words))
        with contextlib.suppress(UserError):  # a full disk is reported at the end
            self.write()

    def end(self):
        """What failed, what says nothing new, and what --vs compares; then the files."""
        for entry in self.args.entries.values():
            if entry.error is not None:
                self.say(f"{entry.title} failed: {cli.reason(entry.error)}")
                if not isinstance(entry.error, UserError):
                    self.say("".join(traceback.format_exception(entry.error)).rstrip())
        self.say(*no_news(self.measured()), *self.of_other_text())  # the latter again, as the head scrolls away
        if self.args.vs is not None:
            self.say("", comparisons.compared_with_one(self.measured(), self.args.vs))
        if self.args.plot:
            plots.save(self.plot(), self.args.plot)
        self.write()

    # What is made of the rows

    def measured(self):
        return [row for row in self if not row["fault"]]

    def vs(self):
        """What --vs compares, a dict of each row; none without --vs."""
        return comparisons.differences(self.measured(), self.args.vs) if self.args.vs is not None else []

    def write(self):
        """The rows so far, to --json FILE."""
        args, versions = self.args, {"python": platform.python_version(), "torch": torch.__version__}
        if args.json is not None:
            content = {"rows": self, "vs": self.vs(), "model": args.model, "data": args.data, "context": args.context,
                       "windows": args.windows, "draws": args.draws, "seed": args.seed, "versions": versions}
            files.write_json(args.json, content, "tinykv-table")

    def to_csv(self, path):
        """The figures of each row, for a spreadsheet."""
        names = [name for name, value in self[0].items() if not isinstance(value, list | dict)]
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, names, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(self)

    def to_latex(self):
        """The rows as a table of a paper: true bits, perplexity, nats a token above fp16 with their paired error."""
        lines = [r"\begin{tabular}{lrrr}", r"method & true bits & perplexity & nats above fp16 \\", r"\hline"]
        for row in self.measured():
            title = re.sub(r"([%_&#$])", r"\\\1", comparisons.title_of(row))
            error = "" if row["nats_se"] is None else rf" \pm {row['nats_se']:.3f}"
            lines.append(rf"{title} & {row['bits_true']:.2f} & {row['ppl']:.3f} & ${row['nats']:.3f}{error}$ \\")
        return "\n".join([*lines, r"\end{tabular}"])

    def plot(self):
        """The Figure of --plot."""
        return comparisons.perplexity(self.measured())

    def __repr__(self):
        return "\n".join(map(str, self.parts))

    def _repr_html_(self):
        """What a notebook shows."""
        return "\n".join(part._repr_html_() if isinstance(part, cli.Columns) else f"{escape(part)}<br>"
                         for part in self.parts if part)


# Around the rows

def said_of(entry, args):
    """Lines: what an entry shares with another, what its calibration found, and when it chooses tokens."""
    if entry.beside:
        yield f"{entry.beside}, as the method that it is shown beside"
    if entry.error is None:
        yield from filter(None, dict.fromkeys(method.describe() for method in entry.methods))  # of each draw
    if choice_of(entry, args) and (args.prompt or args.protocol == "stream"):
        when = {"prompt": "once, after the prompt", "always": "at each quantization"}
        yield f"the tokens to keep are chosen {when[choice_of(entry, args)]}"


def choice_of(entry, args):
    """When an entry's method chooses the tokens to keep: "prompt", "always", or None where it has no such setting."""
    if "choose" not in entry.settings:
        return None
    return entry.method.choose if args.prompt else "always"


def no_news(rows):
    """Lines about rows that say nothing about their method, or nothing new."""
    same = defaultdict(list)  # {(method, weights, losses): [title]}
    for row in rows:
        title = comparisons.title_of(row)
        same[row["method"], row["weights"], str(row["window_nll"])].append(title)
        quantizes = row["bits_nominal"] < 16
        if quantizes and not row["reads_codes"]:
            yield f"{title}: in windows this short no query reads a code; use a longer --context"
        elif quantizes and row["preserve"] and not row["kept"]:
            yield f"{title}: the method says that it keeps {row['preserve']} tokens, and keeps none"
    for titles in same.values():
        if len(titles) > 1:
            yield f"{', '.join(titles)}: identical losses; the settings in which they differ have no effect here"


# A row

def row_of(entry, args):
    """A row of the table, as the JSON has it."""
    settings = {name: value if isinstance(value, int | float | None) else str(value)
                for name, value in entry.settings.items()}
    method = entry.method
    row = {
        "label": entry.label,
        "method": entry.name,
        "settings": settings,
        "weights": entry.weights,
        "scheme": method.scheme,
        "k_bits": method.bits_of("k"),
        "v_bits": method.bits_of("v"),
        "preserve": method.preserve,
        "protocol": args.protocol,
        "prompt": args.prompt,  # tokens of it, or None
        "choose": choice_of(entry, args),
        "bits_nominal": (method.bits_of("k") + method.bits_of("v")) / 2,
        "offline_bytes": table_bytes(method),
        "windows": args.windows,
        "fault": entry.error and f"failed: {cli.reason(entry.error)}",  # then nothing was measured
    }
    # a `Result` for each draw; what has nothing to calibrate was evaluated once
    fp16, *_ = args.entries.values()
    results, exact = (e.results * (args.draws // len(e.methods)) for e in (entry, fp16))
    if row["fault"]:
        return {**row, **dict.fromkeys(figures_of(exact, exact))}
    figures = figures_of(results, exact)
    return {**row, **figures, "preserve": row["preserve"] or figures["kept"]}  # of one's own, what the cache keeps


def sum_of(results):
    """The sum of the `Result`s of the draws of a calibration."""
    kinds = {(result.method, result.settings) for result in results}
    if len(kinds) != 1:
        raise UserError("a sum is of Results of one method, with the same settings, protocol and prompt; these are of "
                        + (", ".join(sorted(method for method, _ in kinds)) or "none"))
    total = Result(method=results[0].method, settings=results[0].settings)
    for result in results:
        for name in ("nll", "nll_along", "kl", "bits", "bits_far", "kept", "agree", "right", "answers", "targets",
                     "reads_codes", "seconds"):
            setattr(total, name, getattr(total, name) + getattr(result, name))
        total.cache_bytes = max(total.cache_bytes, result.cache_bytes)
    return total


def figures_of(results, exact):
    """What an entry cost in predictions, what its cache takes, and how long it took: means over draws of the
    calibration. results, exact: a `Result` for each draw, of the entry and of fp16."""
    result, fp16 = sum_of(results), sum_of(exact)
    targets = result.targets / len(result.nll)  # of a window
    nll, nll_exact = ([draw.nll for draw in draws] for draws in (results, exact))
    nats, nats_se, *_ = paired(nll, nll_exact)  # above fp16
    return {
        "ppl": result.ppl,
        "delta_ppl": result.ppl - fp16.ppl,
        "delta_se": delta_error(nll, nll_exact),
        "nats": nats,
        "nats_se": nats_se,
        "kld": max(0.0, sum(result.kl) / result.targets),
        "top1": result.agree / result.targets,
        "answers": result.right / result.answers if result.answers else None,
        "kept": round(mean(result.kept), 1),
        "reads_codes": result.reads_codes > 0,  # whether a query has read a code of an older token
        "bits_true": mean(result.bits),
        "bits_128k": mean(result.bits_far),
        "cache_bytes": result.cache_bytes,
        "seconds": result.seconds / len(results),
        "window_nll": nll,  # nats a token: a list of draws, each a list of windows
        "window_kl": [[kl / targets for kl in draw.kl] for draw in results],  # the same
        "window_nll_along": [draw.nll_along for draw in results],  # of each window a list: of each 512 targets
    }
