"""What docs/crossing.md says of its cells (crossing.py): its tables, which pages.py writes."""
import itertools
import math
from functools import partial
from statistics import stdev

import torch
from crossing import APART, GRIDS, KEPT, NORMED, SIZE, SMALL, TURNS, ZEROS, cell
from results import ANTKV, CQ, SERVED, UNIT, compared, named, shape_of
from tables import NEEDLES, SMOL, beside_fp16, bits, lost, row_of, table

from tinykv.lab.differences import paired, standard_error

SHORT, TALES = " --context 512", " --context 512 --data tales"
KIVIS = "KIVI's"
COLUMNS = {f"{zero}, {kept} kept": (zero, kept) for zero in ZEROS for kept in KEPT}
LINES = {f"{grid}{', rotated' * turn}": (grid, turn) for turn in TURNS for grid in GRIDS}


def of_cell(line, column, width=3):
    """The row of a line and a column of the first table, at so many bits."""
    (grid, turn), (zero, kept) = LINES[line], COLUMNS[column]
    return cell(width, grid, zero, kept, turn)


def here(*rows):
    """Rows in pairs of 512 tokens; if one of them was not measured so, all as results_data.md has them."""
    where = SHORT if all(named(row + SHORT, "SmolLM2") in SMOL for row in rows) else ""
    return [row + where for row in rows]


def change(first, second, where=SHORT, model="SmolLM2", kind="nll"):
    """What the second row loses beyond the first, its error and p."""
    return compared(row_of(second + where, model), row_of(first + where, model), kind)


def changed(of):
    difference, error, _ = change(*of, where="")
    return f"{difference:+.3f} ± {error:.3f}"


def share_left(first, second, where=SHORT):
    """The share of the first row's loss that is left in the second, and its error: that of the difference between the
    second's loss and this share of the first's, over pairs."""
    rows = [row_of(row + where) for row in (first, second, "fp16")]
    _, n = shape_of(*rows)
    of_first, of_second, fp16 = (torch.tensor(row["nll"], dtype=torch.float64)[:, :n] for row in rows)  # (1, pairs)
    of_first, of_second = of_first - fp16, of_second - fp16
    share = of_second.mean() / of_first.mean()
    error, _ = standard_error(of_second - share * of_first)
    return share.item(), error / of_first.mean().item()


def factor(over, under, model="SmolLM2", beyond=1.0):
    """The losses of some rows, multiplied, over those of others: a number, its standard error, and p that it is
    `beyond`.

    To first order, a pair adds its loss, as a share of the mean loss, to the logarithm of that mean. On the embedded
    model, a window in a draw of the calibration is a pair.
    """
    where = SHORT if model == "SmolLM2" else ""
    rows = [(sign, *beside_fp16((row if where else embedded(row)) + where, model))
            for sign, group in ((1, over), (-1, under)) for row in group]
    C, W = shape_of(*(row for _, row, _ in rows), rows[0][2])
    logs = torch.zeros(C, W, dtype=torch.float64)
    for sign, *both in rows:
        losses, fp16 = (UNIT * torch.tensor(row["nll"], dtype=torch.float64)[:C, :W] for row in both)  # (C or 1, W)
        mean = (losses - fp16).mean()
        logs += sign * (mean.log() + (losses - fp16) / mean - 1)
    log, error, _, p, _ = paired(logs.tolist(), [[math.log(beyond)] * W] * C)
    log += math.log(beyond)
    return math.exp(log), math.exp(log) * error, p


def hits(row):
    """Whether each answer is right, in the first five texts of 1,024 tokens."""
    found = NEEDLES["1024"].get(row) or NEEDLES["1024"][named(row, "SmolLM2")]
    return [hit for _, hit, _ in found[:100]]


def answers(row):
    return f"{sum(hits(row))} of {len(hits(row))}"


def more_answers(first, second):
    """How many more answers of the second row are right, with the standard error over answers."""
    more = [b - a for a, b in zip(hits(first), hits(second))]
    return f"{sum(more):+d} ± {stdev(more) * len(more) ** 0.5:.0f}"


def embedded(row):
    """A row of 3 bits as the embedded model has it."""
    return row.replace("--bits 3", "--bits 2")


HELP = "**help each other**"
FIFTH = 1.2  # two ideas multiply if they reach their product within this factor
CHOICES = {"keep marked": {"kept": "marked"}, "level at 0": {"zero": "integer"}, "rotation": {"rotated": True}}


def pairs_of(bits, grid, ideas):
    """{in words: rows with neither, the first, the second, both} of each two of the ideas {words: what they choose}."""
    found = {}
    for one, other in itertools.combinations(ideas, 2):
        choices = {}, ideas[one], ideas[other], ideas[one] | ideas[other]
        found[f"{grid}, {bits} bits | {one} | {other}"] = [cell(bits, **({"grid": grid} | more)) for more in choices]
    return found


# Two ideas where neither is there yet: all pairs of the crossed cells, and KIVI's grid as an idea of its own
TWO = (pairs_of(3, "static", CHOICES | {"KIVI's grid": {"grid": KIVIS}}) | pairs_of(3, "per token", CHOICES)
       | pairs_of(3, KIVIS, CHOICES) | pairs_of(2, KIVIS, CHOICES))


# {label: row}, by true bits
RECIPES = {
    "`cq` (codebooks of 6 MB aside)": CQ, "`antkv`, 1% kept": ANTKV, "KIVI's, 2 bits": cell(2, KIVIS),
    "`kvquant`": "kvquant --bits 2",
    "static, integer, 3 bits": cell(3, "static", "integer"),
    "`oscar`": "oscar --bits 2",
    "KIVI's, 3 bits": cell(3, KIVIS), "KIVI's, 3 bits, rotated": cell(3, KIVIS, rotated=True),
    "static, integer, 3 bits, marked kept": cell(3, "static", "integer", "marked"),
    "KIVI's, 3 bits, marked kept": cell(3, KIVIS, kept="marked"),
    "KIVI's, 3 bits, marked kept, rotated": cell(3, KIVIS, "offset", "marked", True),
    "KIVI's, 4 bits": cell(4, KIVIS), "static, integer, 4 bits, marked kept": cell(4, "static", "integer", "marked"),
    "KIVI's of 64, 4 bits": SERVED["KIVI, 4 bits"], "llama.cpp's q4_0, rotated": SERVED["q4_0, rotated"],
    "KIVI's, 4 bits, marked kept, rotated": cell(4, KIVIS, "offset", "marked", True)}


def divides(row, more):
    """By what the loss of a row is divided in another: "5.46 ± 0.25"."""
    return "{:.2f} ± {:.2f}".format(*factor([row], [more])[:2])


def product(of):
    neither, one, other, _ = of
    return f"{factor([neither, neither], [one, other])[0]:.2f}"


def beyond_product(of):
    neither, one, other, both = of
    return "{:.2f} ± {:.2f}".format(*factor([one, other], [neither, both])[:2])


def verdict(of, model="SmolLM2"):
    """Whether two ideas multiply, by p of their product, of what each gains alone, and of what it gains last."""
    neither, one, other, both = of
    over, under = [one, other], [neither, both]
    ratio, _, p = factor(over, under, model)
    last = [factor([row], [both], model) for row in (other, one)]  # the first added to the second, and the reverse
    if p > 0.05:
        alone = [factor([neither], [row], model) for row in (one, other)]
        gain = all(change > 1 and p < 0.05 for change, _, p in alone)
        *_, p = max((factor(over, under, model, end) for end in (1 / FIFTH, FIFTH)), key=lambda found: found[2])
        return "multiply" if gain and 1 / FIFTH < ratio < FIFTH and p < 0.05 else "open"
    if ratio > 1:
        return HELP
    if any(change < 1 and p < 0.05 for change, _, p in last):
        return "harm each other"
    if all(change > 1 and p < 0.01 for change, _, p in last):
        return "overlap"
    return next((f"{words} replaces" for words, (_, _, p) in zip(("second", "first"), last) if p > 0.05), "open")


def factors_table():
    told = {words: of for words, of in TWO.items() if {verdict(of), verdict(of, "embedded")} != {"open"}}
    return table("grid, bits | first idea | second idea | first | second | product | both | both / product | they | "
                 "embedded, 2 bits", told,
                 *(lambda of, i=i: divides(of[0], of[i]) for i in (1, 2)), product, lambda of: divides(of[0], of[3]),
                 beyond_product, verdict, partial(verdict, model="embedded"))


def recipes_table():
    return table("recipe | true bits | nats lost | answers", RECIPES, lambda row: bits(*here(row)),
                 lambda row: lost(*here(row)), answers)


def apart_table():
    """Static grids: what marked tokens get."""
    none, marked = (cell("{bits}", "static", kept=kept) for kept in KEPT)
    lines = {"no treatment of their own": none, **APART, "16 bits": marked}
    return table("marked tokens get | SmolLM2, 3 bits, offset | embedded, 2 bits, offset", lines,
                 lambda row: lost(row + SHORT), partial(lost, model="embedded"))


def cells_table():
    """Losses at 3 bits by grid, and by zero point and kept tokens."""
    def column(name):
        return lambda line: lost(of_cell(line, name) + SHORT)
    return table(f"SmolLM2, 3 bits | {' | '.join(COLUMNS)}", {line: line for line in LINES}, *map(column, COLUMNS))


# What is left of a paper's idea: {paper and idea: [(where, row, row with it)] alone, and with others}
SKVQ, LEVEL = "skvq --bits 2 --group-size 32 --metadata fp16 --preserve", "--bits 3 --formula integer-zero --scheme"
STATIC_3, KIVI_2, KIVI_3 = (cell(3, "static"), cell(2, KIVIS), cell(3, KIVIS))
BOTH = cell(3, KIVIS, kept="marked", rotated=True)
ABSENT = "-", "-", "-"
PAPERS = {
    "PFN | first five tokens kept": [("static, 3 bits", STATIC_3, cell(3, "static", kept="first")),
                                     ("KIVI's, 2 bits", KIVI_2, cell(2, KIVIS, kept="first"))],
    "KVSink | marked tokens kept": [("static, 3 bits", STATIC_3, cell(3, "static", kept="marked")),
                                    ("KIVI's, rotated, 3 bits", cell(3, KIVIS, rotated=True), BOTH)],
    "KVSink | a level at 0": [("static, 3 bits", STATIC_3, cell(3, "static", "integer")),
                              ("KIVI's, 3 bits", KIVI_3, cell(3, KIVIS, "integer"))],
    "KIVI | its grid": [("static, 3 bits", STATIC_3, KIVI_3), ("static, rotated, marked kept, 3 bits",
                                                               cell(3, "static", kept="marked", rotated=True), BOTH)],
    "OTT | a pool of five small keys": [("KIVI's, 2 bits", KIVI_2, SMALL),
                                        ("KIVI's, five found instead, 2 bits", cell(2, KIVIS, kept="found"), SMALL)],
    "OScaR | rotation": [("per token, 3 bits", cell(3, "per token"), cell(3, "per token", rotated=True)),
                         ("KIVI's, marked kept, 3 bits", cell(3, KIVIS, kept="marked"), BOTH)],
    "OScaR | keys of one length": [("KIVI's, 2 bits", "kivi --bits 2", "oscar --bits 2 --formula offset --rotate off"),
                                   ("KIVI's of 32, rotated, 2 bits", cell(2, KIVIS, rotated=True, more=SIZE), NORMED)],
    "SKVQ | similar channels, clipped": [("per token, 2 bits", f"{SKVQ} 0 --clip none --reorder off", f"{SKVQ} 0"),
                                         ("KIVI's of 32 instead, 2 bits", "kivi --bits 2 --group-size 32 --recent 32",
                                          f"{SKVQ} 5")],
    "KVQuant | outliers apart, 1%": [ABSENT, ("its levels, 2 bits", "kvquant --bits 2 --outliers 0",
                                              "kvquant --bits 2")],
    "IntactKV | BOS kept": [ABSENT, ("per token, integer, 3 bits", f"rtn {LEVEL} token-dynamic",
                                     f"intactkv {LEVEL} token-dynamic")],
    "AnTKV | 1% of the tokens kept": [ABSENT, ("its codebooks, 2 bits", ANTKV.replace("1%", "0"), ANTKV)]}


def papers_table():
    def column(of, i):
        return lambda found: of(found[i])

    def nats(found):
        return changed(here(*found[1:]))

    def facts(found):
        return more_answers(*found[1:])

    def where(found):
        return found[0]
    return table("paper | its idea | alone, beside | nats | answers | with others: beside | nats | answers", PAPERS,
                 *(column(of, i) for i in (0, 1) for of in (where, nats, facts)))


WRITTEN = {"cells": cells_table, "factors": factors_table, "recipes": recipes_table,
           "apart": apart_table, "papers": papers_table}
