"""What compares the rows of a table.

A row is a dict; each function says what it reads of it. Rows of failed methods are left out.
"""
import math

from tinykv.lab import cli, plots
from tinykv.lab.differences import paired

# settings that change a method's bits and nothing else
BITS_SETTINGS = ("bits", "k_bits", "v_bits", "vq")
MARKED = ("kvsink", "pfn", "antkv")  # always in colour: the papers' question is whether the first two differ
FLOOR = 0.01  # per cent: a smaller loss is drawn here, as a few windows cannot tell it from none


def title_of(row):
    """In messages, where no column names the weights: "pfn preserve=5 awq-3"."""
    return f"{row['label']} {row['weights']}" if row["weights"] else row["label"]


# --vs

def differences(rows, name):
    """Each row's loss beside that of another, draw by draw and window by window, as the JSON has it: nats a token, and
    of KL t and p; better: on how many of the losses. name: see `compared_with`."""
    found, rows = [], {title_of(row): row for row in rows}
    for title, row in rows.items():
        other = compared_with(title, name, rows)
        if other in (None, title):
            continue
        losses = row["window_nll"]  # (draws, windows)
        nats, error, t, p, better = paired(losses, rows[other]["window_nll"])
        _, _, t_of_kl, p_of_kl, _ = paired(row["window_kl"], rows[other]["window_kl"])
        found.append({"label": title, "vs": other, "nats": nats, "se": error, "t": finite(t), "p": p,
                      "t_of_kl": finite(t_of_kl), "p_of_kl": p_of_kl, "better": better,
                      "losses": len(losses) * len(losses[0]),
                      "bits_true": row["bits_true"] - rows[other]["bits_true"]})
    return found


def finite(t):
    """None for an infinite t, which JSON does not know: an error of 0."""
    return t if t is None or math.isfinite(t) else None


def compared_with_one(rows, name):
    """`differences` as a table."""
    lines = []
    for of_row in differences(rows, name):
        cells = zip((".4f", "+.1f", ".1g", "+.1f", ".1g"), map(of_row.get, ("se", "t", "p", "t_of_kl", "p_of_kl")))
        lines.append([of_row["label"], of_row["vs"], f"{of_row['bits_true']:+.2f}", f"{of_row['nats']:+.4f}",
                      *(cli.figure(value, form) for form, value in cells), f"{of_row['better']} of {of_row['losses']}"])
    head = ["method", "vs", "true", "nats a token", "+-", "t", "p", "t of KL", "p", "better on"]
    return cli.Columns(head, lines, left=2)


def compared_with(title, name, titles):
    """The row that --vs NAME compares a row with: the row of that title, or, of the method of that name, the row that
    shares most settings and has no other; None if there is none."""
    if name in titles and " " in name:
        return name
    settings = set(title.split()[1:])
    same = [other for other in titles if other.split()[0] == name and settings >= set(other.split()[1:])]
    return max(same, key=lambda other: len(other.split()), default=None)


# --plot

def lines_of(rows, varied):
    """{name of a line: its rows}.

    A row's title is its method, the settings that were swept, and the weights: "pfn scheme=kvquant bits=2". The rows of
    a line differ in one setting: the first in their title that is one of `varied`.
    """
    lines = {}
    for row in rows:
        words = title_of(row).split(" ")
        along_the_line = [word for word in words if word.partition("=")[0] in varied]
        if along_the_line:
            words.remove(along_the_line[0])
        lines.setdefault(" ".join(words), []).append(row)
    return lines


def perplexity(rows):
    """How much each method's perplexity is above fp16's, in per cent, against true bits.

    Where the number of kept tokens was varied, against that number instead.

    rows: those of eval_ppl.py, fp16's in full precision first; what is read of each is "label", "weights", "ppl",
    "bits_true" and "preserve". A line joins rows that differ only in bits (or only in kept tokens). A line is in colour
    if its method is in MARKED, or if the title names it: no other row has both less loss and fewer bits than one of
    its rows. A loss below FLOOR, or a gain, is drawn at FLOOR. Standard errors are not drawn: they come from
    the windows, which all methods share.
    """
    fp16, *measured = rows
    x, label, varied = "bits_true", "true bits of a cached number", BITS_SETTINGS
    if any("preserve=" in row["label"] for row in measured):
        x, label, varied = "preserve", "tokens kept in full precision", ("preserve",)

    def is_best(row):
        return not any(other["ppl"] < row["ppl"] and other[x] <= row[x] for other in measured)

    lines = lines_of(measured, varied)
    best = [name for name, points in lines.items() if any(is_best(row) for row in points)]
    figure, (panel,) = plots.new_figure(1, 1, 8, 4.8, f"The least loss for its {x.split('_')[0]}: {', '.join(best)}")
    in_colour = [name for name in lines if name in best or name.split()[0] in MARKED]
    # lines in colour come first, so that no grey line has the marker of one; markers tell grey lines apart
    for i, name in enumerate(dict.fromkeys([*in_colour, *lines])):
        points = sorted(lines[name], key=lambda row: row[x])
        losses = [max(100 * (row["ppl"] / fp16["ppl"] - 1), FLOOR) for row in points]
        grey = {} if name in in_colour else {"color": plots.GREY, "linewidth": 1, "zorder": 1}
        panel.plot([row[x] for row in points], losses, label=name, **plots.style(i, name.split()[0]) | grey)
    panel.set(yscale="log", xlabel=label, ylabel="perplexity above fp16's (%)")
    plots.plain_ticks(panel)
    plots.label_ends(panel)
    return figure
