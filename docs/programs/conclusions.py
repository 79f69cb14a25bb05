"""The conclusions that pages print in bold, each as predicates over docs/*.json.

    less(a, b, c)          each row loses less than the next, by the rule of the claims (tables.py)
    none(a, b)             two rows do not differ, by the same rule: within its margin
    share_left(a, b)       [share of b's loss that is left in a, its error]; below(share, limit): by two errors
    verdict(..)            what two ideas do together, by crossed.py's rule
    sign_of_claim(..)      what a claim of results_data.md comes out as: "less", "more", "none" or "open"
    grows(row)             the loss grows along windows of 4,096 tokens
    finds_more(a, b)       b finds more of 100 facts than a, by two errors
    both_models(less, ..)  also on the embedded model; other_calibration(less, ..): also calibrated on another text

pages.py fails where the data do not bear out a bold conclusion, or where it has no predicate. What predicates cannot
say is written without bold.
"""
import re
from itertools import pairwise

from crossed import HELP, KIVIS, TWO, embedded, here, hits, share_left, verdict
from crossing import APART, NORMED, QUARTER, cell
from results import ANTKV, CHANCE, CLAIMS, CQ, FIVE, FORMATS, MARKED, OTHER_TEXT, SERVED, biased, compared, pair
from tables import NEEDLES, row_of, sign_of

TERMS = {  # bold, and no conclusion: what is defined, and what heads a paragraph
    "README.md": {"KV cache", "sink", "Keep it in 16 bits", "Put a level at 0", "Give it its own grid",
                  "Leave it out of its group's range", "Make all tokens alike", "Let a head attend to nothing"},
    "results.md": {"same", "other"},
    "crossing.md": set(),
    "serving.md": {"What this table cannot tell you.", "transformers' <code>QuantizedCache</code>"}}
LONGER, ZERO, OFFSET = " --context 4096", " --formula integer-zero", " --formula offset"
RTN, PFN, OSCAR, KVQUANT = "rtn --bits 3", "pfn --bits 3", "oscar --bits 2", "kvquant --bits 2"
KIVI4, Q4_0, NVFP4 = (SERVED[name] for name in ("KIVI, 4 bits", "q4_0, rotated", "nvfp4"))


# The language

def sign(first, second, model="SmolLM2"):
    rows = here(first, second) if model == "SmolLM2" else map(embedded, (first, second))
    return sign_of(*(row_of(row, model) for row in rows))


def less(*rows, **model):
    return all(sign(*both, **model) == "less" for both in pairwise(rows))


def none(first, second, **model):
    return sign(first, second, **model) == "none"


def below(share, limit):
    return share[0] + 2 * share[1] < limit


def claim_of(section, words):
    """SmolLM2's rows of the claim that begins with these words."""
    return [row_of(row) for row in pair(next(c for c in CLAIMS[section] if c.rows.startswith(words)), "SmolLM2")]


def sign_of_claim(section, words):
    return sign_of(*claim_of(section, words))


def gain(section, words):
    return -compared(*claim_of(section, words))[0]


def grows(row):
    pairs = row_of(row + LONGER)["along"]
    difference, _, p = compared(*({"nll": [[losses[part] for losses in pairs]]} for part in (-1, 0)))
    return difference > 0 and p < 0.01


def finds_more(first, second):
    more = [b - a for a, b in zip(hits(first), hits(second))]
    n = len(more)
    return sum(more) > 2 * (sum(x * x for x in more) - sum(more) ** 2 / n) ** 0.5


def both_models(said, *rows):
    return said(*rows) and said(*rows, model="embedded")


def other_calibration(said, *rows):
    return said(*rows) and said(*(row + OTHER_TEXT for row in rows))


# The pages: {the words in bold: predicates, all of which hold}

def readme():
    return {
        "Some overlap, others multiply.": [
            verdict(TWO["static, 3 bits | keep marked | level at 0"]) == "overlap",
            verdict(TWO["static, 3 bits | keep marked | rotation"]) == HELP,
            verdict(TWO["per token, 3 bits | keep marked | rotation"]) == "multiply"],
        "At 3 bits, the zero point decides.": [
            both_models(less, FIVE, PFN, RTN), both_models(less, PFN + ZERO, RTN + ZERO),
            both_models(none, FIVE + ZERO, PFN + ZERO), other_calibration(none, FIVE + ZERO, PFN + ZERO),
            less(PFN + ZERO, FIVE),
            none(cell(3, KIVIS, "integer"), cell(3, KIVIS))],
        "In long texts, five kept tokens are too few.": [
            grows(FIVE), not grows(MARKED), not grows(FIVE + ZERO), less(FIVE + ZERO + LONGER, MARKED + LONGER,
                                                                         FIVE + LONGER)],
        "At 2 bits, codebooks lose least on text like that of their calibration": [
            less(CQ, KVQUANT), less(CQ, OSCAR), not other_calibration(less, CQ, KVQUANT)],
        "A scale per key channel beats clever formats.": [
            both_models(less, KIVI4, Q4_0), both_models(less, KIVI4, NVFP4)]}


def results():
    right = {row: sum(hit for _, hit, _ in found) for row, found in NEEDLES["4096"].items()}
    first, *others = (gain("SKVQ", words) for words in ("regrouped", "clipping", "five kept"))
    return {
        "KVSink: found tokens help only if no level is at 0.": [less(FIVE, PFN, RTN), none(FIVE + ZERO, PFN + ZERO)],
        "OTT: the pool helps in every setting.": [
            all(sign_of_claim("OTT", claim.rows) == "less" for claim in CLAIMS["OTT"][:4])],
        "OScaR: rotate first, then divide keys by their norms.": [
            sign_of_claim("OScaR", words) == sign for words, sign in (
                ("of one length after that", "less"), ("of one length only", "more"), ("rotated only", "open"),
                ("rotated, and", "less"), ("or a pool", "open"), ("or calibrated", "more"))],
        "SKVQ: putting similar channels into one group does most of the work.": [first > 2 * sum(others)],
        "KVQuant: found tokens add nothing to its levels.": [
            sign_of_claim("KVQuant", "found five, or its") == "none",
            sign_of_claim("KVQuant", "found five and 0.1% of outliers") == "more"],
        "CQ and AnTKV: codebooks need weights, and text like their calibration text.": [
            sign_of_claim("CQ and AnTKV", words) == sign for words, sign in (
                ("Fisher", "less"), ("token weights, or none", "less"), ("calibrated on another text, or", "more"),
                ("calibrated on another text, CQ", "more"), ("the same, calibrated on another text", "more"),
                ("the exponent of Fisher weights", "less"), ("token weights, or Fisher weights, 0.75", "less"))] + [
            sign_of_claim("CQ and AnTKV", f"calibrated on another text, {what}") != "more"
            for what in ("KVQuant", "static")],
        "IntactKV: an exact BOS helps some quantized weights.": [
            sign_of_claim("IntactKV", f"exact BOS, {weights} weights") == sign for weights, sign in (
                ("AWQ", "less"), ("GPTQ", "less"), ("RTN", "more"), ("OmniQuant", "more"))],
        "The mark of a sink comes back.": [grows(FIVE), not grows(MARKED), not grows(FIVE + ZERO)],
        "Which tokens are kept matters, not how many.": [
            *(less(MARKED + LONGER, row + LONGER) for row in (CHANCE, PFN + " --preserve 41")),
            none(FIVE + " --preserve 41" + LONGER, MARKED + LONGER)],
        "A small loss does not mean that facts can still be looked up.": [
            less(MARKED + LONGER, FIVE + LONGER), right[MARKED] <= right[FIVE] < right["fp16"] / 2]}


def crossing():
    corners = [cell(3, "static", zero, kept) for zero in ("offset", "integer") for kept in ("none", "marked")]
    static, kept, level, _ = corners
    kivis, kivis_kept, kivis_both = (
        cell(3, KIVIS, "offset", kept, turn) for kept, turn in (("none", False), ("marked", False), ("marked", True)))
    turned, kept_turned = (cell(3, "static", kept=which, rotated=True) for which in ("none", "marked"))
    level_turned = cell(3, "static", "integer", rotated=True)
    in_range, own, quarter = (row.format(bits=3) for row in (*APART.values(), QUARTER))
    return {
        "At 3 bits, only rotation and kept tokens help each other": [
            list(map(verdict, TWO.values())).count(HELP) == 1],
        "Rotation and kept tokens help each other": [
            verdict([static, kept, turned, kept_turned]) == HELP,
            verdict(TWO["per token, 3 bits | keep marked | rotation"]) == "multiply",
            {verdict(of, "embedded") for words, of in TWO.items() if "marked | rotation" in words} == {"open"}],
        "Kept tokens and a level at 0 overlap.": [
            verdict(corners) == "overlap", verdict(corners, "embedded") == "second replaces"],
        "KIVI's grid replaces a level at 0, not kept tokens.": [
            verdict(TWO["static, 3 bits | level at 0 | KIVI's grid"]) == "second replaces",
            verdict(TWO["static, 3 bits | level at 0 | KIVI's grid"], "embedded") == "second replaces",
            verdict(TWO["static, 3 bits | keep marked | KIVI's grid"]) == "overlap",
            none(cell(3, KIVIS, "integer"), kivis), less(kivis_kept, kivis), below(share_left(kivis, kivis_kept), 0.8)],
        "In a static grid, rotation needs the sinks out of the way": [
            less(kept_turned, kept), less(level, level_turned), less(level_turned, level, model="embedded")],
        "The grid matters, not the 16 bits.": [
            both_models(less, own, in_range), below(share_left(static, own), 0.25), not less(in_range, static)],
        "A small loss does not mean that facts can still be looked up.": [
            less(kivis_kept, kivis), not finds_more(kivis, kivis_kept), finds_more(ANTKV, kivis)],
        "Combine at 3 bits": [less(kivis_kept, kivis), finds_more(kivis, kivis_both)],
        "Do not combine": [verdict([static, level, turned, level_turned]) == "harm each other",
                           verdict([static, level, turned, level_turned], "embedded") == HELP],
        "The `/ 4` bug.": [less(quarter, static, model="embedded"), less(level, quarter)],
        "About 2.3 bits": [less(CQ, KVQUANT), less(CQ, OSCAR), not other_calibration(less, CQ, KVQUANT)],
        "About 3 bits": [less(KVQUANT, OSCAR, "kivi --bits 2"),
                         less(KVQUANT + OTHER_TEXT, OSCAR), less(kivis, NORMED)],
        "About 4.5 bits": [less(KIVI4, Q4_0), finds_more(Q4_0, KIVI4)]}


def serving():
    def suffers(label):
        """Whether a bias makes a format lose more than five times as much."""
        plain, planted = (compared(row_of(biased(label, size)), row_of(biased("fp16", size)))[0] for size in (0, 600))
        return planted > 5 * plain

    def lost(row):
        return compared(row_of(row), row_of("fp16"))[0]
    q8_0, mixed, fp8 = (SERVED[name] for name in (
        "q8_0, rotated", "q8_0 keys, q4_0 values, both rotated", "fp8"))
    keys, of_values = (f"{FORMATS} --scheme {k} --v-scheme {v}" for k, v in (("nvfp4", "fp16"), ("fp16", "nvfp4")))
    return {
        "If you run Qwen2 or Qwen2.5, look for a [bias in the keys](#a-bias-in-the-keys) first.": [
            all(map(suffers, ("q4_0, rotated", "quanto, MLX: 4 bits", "int8_per_token_head"))),
            not suffers("KIVI, 4 bits")],
        "Start with 8 bits": [abs(lost(q8_0)) < 0.001, lost(fp8) < 0.01],
        "If that is too large, take 4 bits for the values.": [
            less(mixed, Q4_0), less(mixed + LONGER, Q4_0 + LONGER), less(of_values, keys), lost(mixed) < 0.01],
        "If both must have 4 bits": [less(KIVI4, Q4_0, SERVED["q4_0"]), less(KIVI4, NVFP4)]}


OF_PAGE = {"README.md": readme, "results.md": results, "crossing.md": crossing, "serving.md": serving}


def wrong_in(name, text):
    """Bold words of a page that its predicates do not bear out, and those without any. text: without its tables."""
    if name not in OF_PAGE:
        return []
    bold = {re.sub(r"\s+", " ", words) for words in re.findall(r"\*\*(.+?)\*\*", text, re.DOTALL)} - TERMS[name]
    said = OF_PAGE[name]()
    return [*(f"bold, and without a predicate in conclusions.py: {words}" for words in sorted(bold - said.keys())),
            *(f"conclusions.py has, but the page has not in bold: {words}" for words in said.keys() - bold),
            *(f"the data do not bear out: {words} {holds}" for words, holds in said.items() if not all(holds))]
