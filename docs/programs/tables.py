"""What the tables of the pages say of docs/results.json. pages.py writes them.

A claim is a difference between two rows in nats a token; a negative one means that the first row loses less. Its rule:
the losses differ if p < .01; if not, the KL divergences decide by the same rule. If neither differs, there is no
difference ("none") if p of the loss is above .05 and its 95% interval lies within MARGIN on either side of 0. Otherwise
the claim is open: these windows might have missed a difference with which a paper argues.
"""
import re
from functools import cache, partial
from statistics import fmean as mean
from statistics import stdev
from typing import NamedTuple

import needles
import results
from results import CLAIMS, LONG, NAMES, OWN, SERVED, STREAM, compared, named, pair, read_data

DATA = read_data()
SMOL, NEEDLES, COPIED = DATA["SmolLM2"], read_data(needles.RECORD), read_data(needles.COPIED)
UNEQUAL = 0.19  # true bits: if the rows of a claim differ by more, the cell has both
MARGIN = 0.05  # nats: two thirds of the smallest gain that a paper reports for a claim of the tables (KVSink's Table 2)


def table(head, lines, *columns):
    """A table's text. lines: {first cell: what the others are of}; columns: functions of this, each giving a cell. One
    that needs a row that was not measured gives "-"."""
    cells = [[first, *(cell(column, of) for column in columns)] for first, of in lines.items()]
    marks = "|" + "---|" * (head.count("|") + 1)
    return "\n".join([f"| {head} |", marks, *(f"| {' | '.join(line)} |" for line in cells)])


def cell(column, of):
    try:
        return column(of)
    except KeyError:
        return "-"


def lines(*patterns, to=50):
    """Of files of the package, with their comments, rounded so that not every change moves them."""
    files = [path for pattern in patterns for path in results.ROOT.glob(f"tinykv/{pattern}")]
    return f"{to * round(sum(len(path.read_text(encoding='utf-8').splitlines()) for path in files) / to):,}"


# A row

def row_of(row, model="SmolLM2"):
    """What was measured of it; KeyError if nothing was."""
    rows = DATA[model]
    return rows[row if row in rows else named(row, model)]


def beside_fp16(row, model="SmolLM2"):
    """A row, and fp16's on the same tokens, or transformers' own cache in 16 bits."""
    exact = "fp16" + "".join(re.findall(r" --(?:context|prompt) \d+| --data \w+", row))
    return row_of(row, model), row_of(f"{OWN}plain" if row.startswith(OWN) else exact, model)


def lost(row, model="SmolLM2"):
    """Nats a token above fp16, with their error; of a single window, or pair, without one."""
    found, fp16 = beside_fp16(row, model)
    difference, error, _ = compared(found, fp16)
    if found is fp16:
        return "0"
    return f"{difference:.3f}" + ("" if error is None else f" ± {error:.3f}")


def bits(row, model="SmolLM2"):
    return f"{row_of(row, model)['bits']:.2f}"


def along(row, part):
    """Nats above fp16 in the first 512 tokens of longer windows (part 0), or the last (-1)."""
    return f"{results.along(row_of(row))[part][0]:.3f}"


def pairs(row):
    return str(len(row_of(row)["nll"][0]))


def longer(column, tokens):
    """The column of the row in longer windows."""
    return lambda row: column(f"{row} --context {tokens}")


# A claim

class Finding(NamedTuple):
    text: str  # a cell of the table
    sign: str  # "less", "more", "none" or "open"


def finding(claim, model):
    """What a model says of a claim; KeyError where its rows are not measured."""
    rows = [row_of(row, model) for row in pair(claim, model)]
    difference, error, p = compared(*rows)
    of_kl, _, p_of_kl = compared(*rows, "kl")
    more = ""
    if p_of_kl < 0.01 <= p or p_of_kl < 0.05 and difference * of_kl < 0:  # KL decides, or it says the opposite
        more = f"; KL {of_kl:+.3f}, {of_p(p_of_kl)}"
    first, second = (row["bits"] for row in rows)
    if abs(first - second) >= UNEQUAL:
        more += f"; {first:.2f} and {second:.2f} bits"
    return Finding(f"{difference:+.3f} ± {error:.3f} ({of_p(p)}, {windows_of(*rows)}{more})", sign_of(*rows))


def sign_of(row, other):
    """What the first row loses beside the other: "less", "more", "none" or "open"."""
    for kind in ("nll", "kl"):
        difference, _, p = compared(row, other, kind)
        if p < 0.01:
            return "less" if difference < 0 else "more"
    return "none" if compared(row, other)[2] > 0.05 and is_small(row, other) else "open"


def is_small(row, other):
    """Whether the 95% interval of a difference lies within the margin: both of its ends can be told from it."""
    above, below = (compared(row, other, beyond=end) for end in (-MARGIN, MARGIN))
    return abs(above[0]) < MARGIN and max(above[2], below[2]) < 0.05


def holm(ps, level=0.05):
    """How many of the p-values are significant together: Holm's correction."""
    ps = sorted(ps)
    return next((i for i, p in enumerate(ps) if p >= level / (len(ps) - i)), len(ps))


def of_p(p):
    return "p < .001" if p < 0.001 else f"p {p:.3f}".replace("0.", ".")


def windows_of(*rows):
    """Over what rows are compared."""
    draws, windows = results.shape_of(*rows)
    return f"{windows} pairs" if "along" in rows[0] else f"{draws} x {windows}"


def verdict(claim):
    """What SmolLM2 says beside what the paper says."""
    sign, paper = finding(claim, "SmolLM2").sign, claim.paper.split()[0]
    if sign == "open" or paper == "-":
        return sign
    if sign != paper:
        return f"**other**: {sign}"
    return "none, as there" if sign == "none" else "same"


def marked_verdict(claim):
    """With a mark where it tells of a difference that Holm's correction does not keep."""
    of_loss = compared(*(row_of(row) for row in pair(claim, "SmolLM2")))[2]
    alone = finding(claim, "SmolLM2").sign in ("less", "more") and of_loss > kept_by_holm()[-1]
    return verdict(claim) + " †" * alone


def count():
    """How often the two models agree."""
    claims = [claim for claims in CLAIMS.values() for claim in claims
              if all(row in DATA[model] for model in NAMES for row in pair(claim, model))]
    signs = [tuple(finding(claim, model).sign for model in NAMES) for claim in claims]  # (embedded, SmolLM2)
    decided = [both for both in signs if "open" not in both]
    agree, neither = sum(a == b for a, b in decided), decided.count(("none", "none"))
    of_smol, of_embedded = (sum(both[i] == "none" != both[1 - i] for both in decided) for i in (0, 1))
    opposite, undecided = len(decided) - agree - of_smol - of_embedded, len(signs) - len(decided)
    return (f"The models agree on {agree} of the {len(signs)} comparisons that both have; on {neither} of these, "
            f"neither shows a difference.\n{of_smol} differences are SmolLM2's alone and {of_embedded} the embedded "
            f"model's; {opposite} have opposite signs; {undecided} are open on one of them.")


@cache
def ps_of_claims():
    """Of SmolLM2's losses."""
    pairs = [pair(claim, "SmolLM2") for claims in CLAIMS.values() for claim in claims]
    return sorted(compared(SMOL[a], SMOL[b])[2] for a, b in pairs if a in SMOL and b in SMOL)


def kept_by_holm():
    ps = ps_of_claims()
    return ps[:holm(ps)]


def corrected():
    """How many of SmolLM2's differences there would be by Holm's correction."""
    ps, kept = ps_of_claims(), kept_by_holm()
    told = sum(p < 0.01 for p in ps)
    return (f"p of the loss is below .01 in {told} of SmolLM2's {len(ps)} claims; without any difference, it would be "
            f"in one of a hundred.\nHolm's correction keeps the chance that any of the verdicts is wrong below 5%: it "
            f"leaves {len(kept)} claims, those of p up\nto {kept[-1]:.4f}. A † marks a verdict that rests on a "
            "difference that it does not leave.")


# The tables

def claims_table(section):
    return table(f"claim | the paper | {' | '.join(NAMES)} | verdict",
                 {" | ".join(claim): claim for claim in CLAIMS[section]},
                 *(partial(lambda claim, model: finding(claim, model).text, model=model) for model in NAMES),
                 marked_verdict)


def short_table():
    """The claims whose paper and first words the page gives, without their flags."""
    known = {(section, claim.rows.split(":")[0]): claim for section, claims in CLAIMS.items() for claim in claims}
    named_here = re.findall(r"^\| (.+?) \| (.+?) \|", results.TABLES["short"], re.MULTILINE)[1:]
    return table("paper | claim | the paper | SmolLM2 | verdict | embedded",
                 {" | ".join(words): known[words] for words in named_here},
                 lambda claim: claim.paper.split()[0], lambda claim: finding(claim, "SmolLM2").text.split(" (")[0],
                 marked_verdict, lambda claim: finding(claim, "embedded").sign)


def rows_table(name, **more):
    """What SmolLM2's rows lose above fp16 that the page names. A format stands before its row. more: {head: column}"""
    labels = {row: f"{label}: " for label, row in (results.EIGHT | results.POINTS).items()}
    return table(" | ".join(["row", "true bits", "nats", "KL", "draws x windows", *more]),
                 {f"{labels.get(row, '')}`{row}`": row for row in results.rows_in(name)},
                 bits, lost, lambda row: f"{compared(*beside_fp16(row), 'kl')[0]:.3f}",
                 lambda row: windows_of(*beside_fp16(row)), *more.values())


def of_embedded(column):
    """The column of the embedded model."""
    return lambda row: column(results.of_embedded(row), "embedded")


def lengths_table():
    """What rows lose above fp16 in windows of 512 tokens and in longer ones, by position in those of 4096."""
    def pairs_of_lengths(row):
        found = [cell(longer(pairs, tokens), row) for tokens in (2048, 4096, 8192)]
        return ", ".join(n for n in found if n != "-")
    first, last = partial(along, part=0), partial(along, part=-1)
    return table("row | 512 | 2,048 | 4,096 | first 512 of 4,096 | last 512 of 4,096 | 8,192 | last 512 of 8,192 | "
                 "bits: 512, 4,096 | pairs", {f"`{row}`": row for row in LONG["--context 4096"]},
                 lost, longer(lost, 2048), longer(lost, 4096), longer(first, 4096), longer(last, 4096),
                 longer(lost, 8192), longer(last, 8192),
                 lambda row: f"{cell(bits, row)}, {cell(longer(bits, 4096), row)}", pairs_of_lengths)


def served_table():
    """What a format holds of LLaMA-3-8B's cache, and what it loses on SmolLM2 in windows of 512 and 4,096 tokens."""
    def size_of(tokens):
        return lambda row: f"{2 * 32 * 8 * 128 * tokens * row_of(row)['bits'] / 8 / 2 ** 30:.2f}"
    return table("format | true bits | GiB: 8K | 32K | 128K | nats lost: 512 | 4,096", {"16 bits": "fp16", **SERVED},
                 bits, *map(size_of, (2 ** 13, 2 ** 15, 2 ** 17)), lost, longer(lost, 4096))


def bias_table():
    """What formats lose with a bias of the keys, and without one, on the same windows."""
    def column(size):
        def lost_with(label):
            difference, error, _ = compared(row_of(results.biased(label, size)), row_of(results.biased("fp16", size)))
            return f"{difference:.3f} ± {error:.3f}"
        return lost_with
    lines = {label: label for label in results.BIASED}
    return table("format | without a bias | with one", lines, *map(column, (0, 600)))


def needles_table():
    """Right answers by length, and what an answer's tokens lose above fp16, with the error over texts."""
    def column(tokens):
        def answers(row):
            found, exact = NEEDLES[tokens][row], NEEDLES[tokens]["fp16"]
            words = f"{sum(right for _, right, _ in found)} of {len(found)}"
            more = [loss - of_fp16 for (_, _, loss), (_, _, of_fp16) in zip(found, exact)]
            of_texts = [mean(more[i:i + needles.FACTS]) for i in range(0, len(more), needles.FACTS)]
            error = stdev(of_texts) / len(of_texts) ** 0.5
            return words if row == "fp16" else f"{words}; {mean(of_texts):+.2f} ± {error:.2f}"
        return answers
    return table(f"row | {' | '.join(f'{tokens:,} tokens' for tokens in needles.CONTEXTS)}", needles.ROWS,
                 *(column(str(tokens)) for tokens in needles.CONTEXTS))


def copied_table():
    """Tokens of a table's copy before the first wrong one, with the error over tables."""
    def tokens(row):
        found = COPIED[row]
        return f"{mean(found):.0f} ± {stdev(found) / len(found) ** 0.5:.0f}"
    return table("row | tokens copied", needles.COPIES, tokens)


# {what stands in the page's mark: what writes it}
WRITTEN = {
    "count": count, "corrected": corrected, "short": short_table, "lengths": lengths_table, "served": served_table,
    "biased": bias_table, "needles": needles_table, "copied": copied_table,
    "rows": partial(rows_table, "rows", **{"embedded: bits": of_embedded(bits), "nats ": of_embedded(lost)}),
    "codecs": partial(rows_table, "codecs"),
    **{section: partial(claims_table, section) for section in CLAIMS},
    "prompts": partial(table, "row | nats lost | true bits | pairs",
                       {f"`{row}`": f"{row} {STREAM}" for row in LONG[STREAM]}, lost, bits, pairs),
    "quantized": partial(table, "| true bits at the end | nats lost",
                         {row.removeprefix(OWN): row for row in SMOL if row.startswith(OWN) and "plain" not in row},
                         bits, lost)}
