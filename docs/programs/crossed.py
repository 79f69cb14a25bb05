"""What docs/crossing.md says of docs/crossing.json: the cells of its tables, which pages.py writes, and its figure.

    python docs/programs/crossed.py          draw docs/figures/crossing.png

Losses are nats a token above fp16, with their standard error over windows; each window has a calibration of its own.
"""
from statistics import fmean as mean
from statistics import stdev

import needles
from results import ROOT, read_data

from tinykv import plots

DATA = read_data(ROOT / "docs" / "crossing.json")
LONG = " long"  # of cells in windows of 2,048 tokens
COLUMNS = "offset none", "offset marked", "integer none", "integer marked"
GRIDS = {f"{label}{', rotated' if turn else ''}": (grid, turn) for turn in ("", " rotated") for grid, label in (
    ("static", "static: a channel, a head"), ("kivi128", "KIVI: 128 of a channel, a token"), ("token", "a token"))}
MODELS = {"SmolLM2": 3, "embedded": 2}  # bits at which they are shown
# what each idea is worth: {idea: (cell, the same with it)}, the weakest surroundings first
KEEP, ZERO, GRID, TURN = "keep marked tokens", "integer zero point", "KIVI's grid", "rotation"
IDEAS = {
    KEEP: [("static offset none", "static offset marked"), ("static integer none", "static integer marked"),
           ("kivi128 offset none", "kivi128 offset marked"),
           ("kivi128 offset none rotated", "kivi128 offset marked rotated")],
    ZERO: [("static offset none", "static integer none"), ("static offset marked", "static integer marked"),
           ("kivi128 offset none", "kivi128 integer none")],
    GRID: [("static offset none", "kivi128 offset none"), ("static offset marked", "kivi128 offset marked"),
           ("static integer marked", "kivi128 integer marked")],
    TURN: [("static offset none", "static offset none rotated"),
           ("static integer none", "static integer none rotated"),
           ("static offset marked", "static offset marked rotated"),
           ("token offset none", "token offset none rotated"), ("kivi128 offset none", "kivi128 offset none rotated"),
           ("kivi128 offset marked", "kivi128 offset marked rotated")]}
RECIPES = [
    "2 kivi128 offset none", "2 kivi128 offset none rotated", "2 kivi128 offset found",
    "2 kivi128 offset small", "2 kivi128 offset marked", "2 kivi128 offset marked rotated", "2 kivi32 offset none",
    "2 kivi32 offset none rotated normed", "3 static integer none",
    "3 static offset marked rotated", "3 kivi128 offset none", "3 kivi128 offset none rotated",
    "3 kivi128 offset marked rotated", "4 kivi128 offset none"]
APART = {"none": "none", "range": "out of the range of others, but coded with their grid", "own": "a grid of their own",
         "marked": "16 bits"}


def losses(cell, model):
    """Of each window; KeyError if the cell was not measured."""
    rows = DATA[model]
    exact = rows["fp16" + (LONG if cell.endswith(LONG) else "")]
    return [mean(parts) - mean(of_fp16) for parts, of_fp16 in zip(rows[cell]["nll"], exact["nll"])]


def with_error(numbers, form=".3f"):
    return f"{mean(numbers):{form}} ± {stdev(numbers) / len(numbers) ** 0.5:.3f}"


def lost(cell, model):
    """Nats above fp16."""
    return with_error(losses(cell, model))


def crossed(label, column, model):
    grid, turn = GRIDS[label]
    return lost(f"{MODELS[model]} {grid} {column}{turn}", model)


def apart(label, zero, model):
    """Marked tokens treated apart in static grids."""
    keep = next(keep for keep, said in APART.items() if said == label)
    return lost(f"{MODELS[model]} static {zero} {keep}", model)


def idea(cells, model, kind="nll"):
    """What the second cell loses beyond the first, or its KL divergence from 16 bits."""
    first, second = (f"{MODELS[model]} {cell}" for cell in cells)
    if kind == "kl":
        pairs = zip(DATA[model][first]["kl"], DATA[model][second]["kl"])
    else:
        pairs = zip(losses(first, model), losses(second, model))
    return with_error([b - a for a, b in pairs], "+.3f")


def facts(row):
    """Right answers, nats lost before the questions, and nats lost of an answer."""
    found, exact = DATA["facts"][row], DATA["facts"]["fp16"]
    hay, answer = (mean(a[i] - b[i] for a, b in zip(found, exact)) for i in (0, 2))
    return f"{sum(right for _, right, _ in found)} of {len(found) * needles.FACTS} | {hay:.3f} | {answer:+.2f}"


FACT_ROWS = [row for row in DATA.get("facts", {}) if row != "fp16"]


def draw(path):
    """A heat map of each model: a line a grid, a column what is done about sinks."""
    figure, panels = plots.new_figure(1, 2, 11, 4.4, "Nats a token above fp16: grid by zero point and kept tokens")
    for panel, (model, bits) in zip(panels, MODELS.items()):
        cells = [[mean(losses(f"{bits} {grid} {column}{turn}", model)) for column in COLUMNS]
                 for grid, turn in GRIDS.values()]
        panel.imshow([[max(loss, 0.01) for loss in line] for line in cells], cmap="OrRd", norm="log", aspect="auto")
        for y, line in enumerate(cells):
            for x, loss in enumerate(line):
                panel.text(x, y, f"{loss:.2f}", ha="center", va="center",
                           color="white" if loss > 0.3 * max(map(max, cells)) else "black")
        panel.set(xticks=range(len(COLUMNS)), yticks=range(len(GRIDS)), title=f"{model}, {bits} bits")
        panel.set_xticklabels([column.replace(" ", ",\n") + " kept" for column in COLUMNS])
        panel.set_yticklabels(GRIDS if panel is panels[0] else [])
        panel.grid(False)
    plots.save(figure, path)


if __name__ == "__main__":
    draw(ROOT / "docs" / "figures" / "crossing.png")
