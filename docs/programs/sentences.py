"""What pages say of data: a few words of a sentence, with its figures as expressions. pages.py checks and writes them.

    seen(what, column, layers)     docs/analysis.json: [number, error] of each row, or of some layers
    loss, bits, ends, less         docs/results.json: the rows of `results.py --measure`
    so(condition, words)           words, as long as the data bear them out
"""
import json
import math
import re
from collections import Counter
from functools import cache
from statistics import fmean as mean

import embedded_sinks
import tables
from conclusions import KVQUANT, OFFSET, OSCAR, OTHER_TEXT
from crossed import HELP, KIVIS, SHORT, TALES, TWO, change, factor, hits, more_answers, share_left, verdict
from crossing import OWN_FILE, QUARTER, cell
from phenomena import RECORD
from results import ANTKV, CHANCE, CLAIMS, CQ, DRAWS, FORMATS, MARKED, PREFIX, SERVED, TURBOQUANT, UNIT, compared
from tables import DATA, NEEDLES, SMOL, along, beside_fp16, bits, finding, lines, of_p, row_of

ANALYSIS = json.loads(RECORD.read_text(encoding="utf-8"))
NUMBER = re.compile(r"[+-]?\d+(?:[.,]\d+)*")
WORDS = "no one two three four five six seven eight nine ten eleven twelve".split()
NOT_SO = "[not so]"  # stands before what the data no longer bear out, and fails the check
CODEBOOK = 16 * 256  # bits for each channel: 256 vectors in fp16 for each of its groups
PARTS = {4: "quarter", 5: "fifth", 6: "sixth", 10: "tenth", 20: "twentieth"}
RTN, PFN, KVSINK, KIVI4 = "rtn --bits 3", "pfn --bits 3", "kvsink --bits 3", "kivi --bits 4 --group-size 64"
ZERO, LONGER = " --formula integer-zero", " --context 4096"
ROOT = "cq --sensitivity fisher-root --vq d8m64 {windows} --recent 0"


# Figures

def seen(what, column, layers=None, model="embedded", **where):
    """[number, error] in the rows of these layers, or where other columns have these values."""
    table = ANALYSIS[model][what]
    rows = [i for i in range(len(table[column])) if all(table[name][i] == value for name, value in where.items())]
    found = [table[column][row] for row in (rows if layers is None else layers)]
    return [number if isinstance(number, list) else [number, 0] for number in found]


def loss(row, model="SmolLM2"):
    """Nats above fp16."""
    return compared(*beside_fp16(row, model))[0]


def ends(row):
    """Nats above fp16 in the first 512 tokens of windows of 4,096, and in the last: "0.379", "1.006"."""
    return [along(row + LONGER, part) for part in (0, -1)]


def less(first, second):
    """How much less the first row loses: "1.535 ± 0.111"."""
    difference, error, _ = compared(row_of(first), row_of(second))
    return so(difference < 0, f"{-difference:.3f} ± {error:.3f}")


# Words

def plain(numbers):
    """Without their errors."""
    return [number for number, _ in numbers]


def each(numbers, form=".2f", join=" and "):
    """0.54 and 0.81 ± 0.02: the largest of their errors, unless it is below their digits."""
    error = f"{max(error for _, error in numbers):{form.lstrip('+')}}"
    words = join.join(dict.fromkeys(f"{number:{form}}" for number in plain(numbers)))
    return f"{words} ± {error}" if re.search("[1-9]", error) else words


def span(numbers, form=".2f"):
    """0.61 to 0.70 ± 0.02"""
    error = max(error for _, error in numbers)
    return each([[f(plain(numbers)), error] for f in (min, max)], form, " to ")


def so(condition, words):
    return words if condition else f"{NOT_SO} {words}"


# The pages

def readme():
    learned = mean(map(embedded_sinks.lost("rtn"), embedded_sinks.models("logit"))) / mean(
        map(embedded_sinks.lost("rtn"), embedded_sinks.models("softmax")))
    def found(row):
        return sum(right for _, right, _ in NEEDLES["1024"][row])
    price = row_of(MARKED + LONGER)["bits"] - row_of(KVSINK + LONGER)["bits"]
    found_with_zero, *_ = compared(row_of(KVSINK + ZERO), row_of(PFN + ZERO))
    q4_0 = SERVED["q4_0, rotated"]
    read = "codecs/affine", "cache", "methods/base", "methods/kvsink", "model", "calibrate", "evaluate"
    of_reference = lines("*.py", "codecs/*.py", "methods/*.py", "hf/*.py", to=500)
    return [
        f"a small model loses a {PARTS[round(1 / learned)]} as much at 2 bits",
        f"the reference, about {of_reference} lines with their comments",
        *(f"| `tinykv/{name}.py` | {lines(f'{name}.py')} |" for name in read),
        f"`kvsink` loses {less(KVSINK, PFN)} less than `pfn`, " + so(abs(found_with_zero) < 0.01, "and no less once"),
        f"{found('fp16')} at 16 bits, {found(KIVI4)} with `kivi` at 4, and {found(KVSINK)} with `kvsink` at 3",
        so(1.6 < loss(KVSINK + LONGER) / loss(MARKED + LONGER) < 2.5, "halves `kvsink`'s loss for ")
        + f"{price:.2f} bits more",
        so(loss(KVSINK + ZERO + LONGER) < loss(MARKED + LONGER), "with five kept tokens loses less still"),
        f"`cq` loses {loss(CQ):.3f}",
        f"it loses {loss(CQ + OTHER_TEXT):.3f}, and `kvquant` {loss(KVQUANT + OTHER_TEXT):.3f}",
        so(bits(KIVI4) == bits(q4_0), f"At {float(bits(KIVI4))} bits, `kivi` loses {loss(KIVI4):.3f}, ")
        + so(0.4 < loss(KIVI4) / loss(q4_0) < 0.6, "about half of"),
    ]


def embedded_model():
    fp16 = DATA["embedded"]["fp16"]["nll"][0]
    draws = [math.exp(UNIT * mean(draw)) - math.exp(UNIT * mean(fp16[:len(draw)]))
             for draw in DATA["embedded"]["rtn --bits 2"]["nll"]]
    return [f"its `delta` ranges from {min(draws):.0f} to {max(draws):.0f}"]


def analysis():
    """The embedded model; SmolLM2 in the last column of the table."""
    def at(what, column, layers=(2, 3)):
        return seen(what, column, layers)

    def smol(what, column, layers=range(3, 10)):
        return seen(what, column, layers, "SmolLM2")

    def of(what, column, **where):
        return plain(seen(what, column, **where))

    def changes(scheme, model, **where):
        return seen("errors", "change", scheme=scheme, model=model, **where)

    def change(scheme, **where):
        low, *_, high = sorted(plain(changes(scheme, "embedded", **where)), key=abs)
        return f"{low:+.0%} to {high:+.0%}"

    def smol_change(scheme, form="+.0%", **where):
        return span(changes(scheme, "SmolLM2", **where), form)

    def anchors(column, kind, by, form=".2f", model="embedded"):
        return each(seen("anchors", column, model=model, of=kind, **{"ranked by": by}), form)

    def ranks(model):
        K, V, times_K, times_V = (anchors("rank", kind, by, model=model) for by in (score, times) for kind in "KV")
        return f"rank correlation {K} (K) and {V} (V); times the row's error, {times_K} and {times_V}"
    small, late = ANALYSIS["SmolLM2"], range(12, 29)
    at_sinks = [*range(3, 11), *late]  # layers
    n_second = sum(len(found) > 1 for found in small["sinks at"])  # windows with a second sink
    out, consistency = plain(smol("outliers", "out", range(30))), min(plain(smol("bias", "consistency", at_sinks)))
    n_exact, left = of("prefix", "n"), of("prefix", "last")
    none_exact, first_exact = of("prefix", "last", model="SmolLM2")

    score, times, best = "score", "score x error", "itself (ceiling)"
    return [
        # the table
        f"in {WORDS[n_second]} of {WORDS[small['windows']]} windows",
        f"| {each(at('outliers', 'ratio', [1]), '.0f')} times the median |",
        f"{each(smol('outliers', 'ratio', [2]), '.0f')} times the median after layer 2, "
        f"{each(smol('outliers', 'ratio', [11]), ',.0f')} times after layer 11; cut to a "
        f"{PARTS[round(out[27] / out[29])]} by the last two layers",
        f"values fall to a {PARTS[round(1 / of('norms', 'v sinks')[3], -1)]} of the others' norm",
        f"queries have {span(smol('norms', 'q sinks'))} of the others' norm, keys {span(smol('norms', 'k sinks'))}, "
        f"values {span(smol('norms', 'v sinks'))} (layers 3 to 9)",
        f"cosine {each(at('cosine', 'sinks'))}, others {each(at('cosine', 'others'))}",
        f"{span(smol('cosine', 'sinks'))}, others {span(smol('cosine', 'others'))} (layers 3 to 9)",
        f"cosine {min(of('bias', 'consistency')):.2f} and more, the rest {span(seen('bias', 'rest'))}",
        f"{consistency:.2f} and more in layers 3 to 10 and 12 to 28",
        f"removes {1 - first_exact / none_exact:.0%} of the last layer's error |",
        f"the largest step is a factor of {max(of('keys', 'cliff')):.1f}",
        f"a factor of {span(smol('keys', 'cliff', late), '.1f')} in layers 12 to 28, and "
        f"{span(smol('keys', 'sinks', late), '.0%')} of the keys below it are sinks'",
        f"partly | {ranks('embedded')} | {ranks('SmolLM2')} |",
        # sinks, norms, the bias
        f"has a score of {each(at('sinks', 'first'))}, later sinks {each(at('sinks', 'later'))}, other tokens at most "
        f"{max(plain(at('sinks', 'largest other'))):.2f}",
        f"values have {each(at('norms', 'v sinks'))} of the others' norm, and their queries "
        f"{each(at('norms', 'q sinks'))}",
        f"Their keys have {each(at('norms', 'k sinks'))}",
        f"a sink's in {each(at('cosine', 'largest'), '.0%')} of cases",
        f"as consistent ({each(at('bias', 'rest', [0]))})",
        f"receive {each(at('bias', 'attention'))} of the attention, but the bias has only {each(at('bias', 'size'))}",
        # errors
        f"| K {change('token-dynamic', of='K')}, V {change('token-dynamic', of='V')} | "
        f"K {smol_change('token-dynamic', of='K')}, V {smol_change('token-dynamic', of='V')} |",
        f"| {change('channel-dynamic')} | {smol_change('channel-dynamic')} |",
        f"V -44% to -68% | {min(of('errors', 'change', scheme='token-static')):.0%} to 0% | "
        f"{smol_change('token-static', '.0%')} |".replace("-0%", "0%"),
        f"| 0% | {smol_change('channel-static', '.0%')} |",
        # OTT, IntactKV, AnTKV
        f"In layer 2, {each(at('keys', 'sinks', [2]), '.0%')} of the keys",
        so(left[2] - left[3] > 3 * (left[1] - left[2]), f"as the {n_exact[2] - n_exact[1]:.0f} tokens between"),
        f"ranks highest hold {anchors('top', 'K', score, '.0%')} of the damage, and the 1% with the most damage "
        f"{anchors('top', 'K', best, '.0%')}",
        so(anchors("top", "V", times) == anchors("top", "V", best),
           f"the score finds {anchors('top', 'K', times, '.0%')} for keys"),
    ]


def methods():
    sinks, first = (seen("outliers", "out", layers, "SmolLM2") for layers in (range(2, 8), range(11, 28)))
    return [f"several tokens have {span(sinks, '.0f')} after layers 2 to 7, the first token {span(first, ',.0f')} "
            "after layers 11 to 27",
            f"at 3 bits is {loss('kvsink --bits 3 {late}') - loss(PFN):.2f} nats worse"]


def results():
    claimed = [claim for claims in CLAIMS.values() for claim in claims if claim.paper != "-"]
    verdicts = Counter(tables.cell(tables.verdict, claim).split(":")[0] for claim in claimed)
    right = {row: sum(hit for _, hit, _ in found) for row, found in NEEDLES["4096"].items()}
    return [
        f"{len(claimed) - verdicts['-']} claims that the papers make: {verdicts['same']} hold on SmolLM2, "
        f"{verdicts['**other**']} come out otherwise, and {verdicts['open']} are open",
        so(not verdicts["none, as there"], "hold on SmolLM2"),
        f"found tokens gain {less(KVSINK + OTHER_TEXT, PFN + OTHER_TEXT)} over the first five ("
        + so(compared(row_of(KVSINK + OTHER_TEXT), row_of(PFN + OTHER_TEXT))[2] > 0.05, "three calibrations, too few"),
        f"(`--formula offset`) it loses {less(OSCAR + OFFSET, OSCAR)} less",
        "`cq` loses {} instead of {}, and `kvquant` {} instead of {}".format(
            *(f"{loss(row + text):.3f}" for row in (CQ, KVQUANT) for text in (OTHER_TEXT, ""))),
        f"Fisher weights gain {less(ROOT, 'cq --vq d8m64 {windows} --recent 0')}",
        so(float(ends(KVSINK)[1]) > 2 * float(ends(KVSINK)[0]), "its loss doubles from the first 512 tokens"),
        so(1.6 < loss(KVSINK + LONGER) / loss(MARKED + LONGER) < 2.5, "halves the loss of `kvsink` at 3 bits"),
        f"only {right[MARKED]} of {len(NEEDLES['4096']['fp16'])} numbers, where fp16 finds {right['fp16']}",
        so(1 / 4 < sum(tables.COPIED[KIVI4]) / sum(tables.COPIED["fp16"]) < 2 / 5, f"`kivi` at 4 bits, which loses "
           f"{loss(KIVI4):.3f} nats a token, copies a third as many tokens as 16 bits"),
        so(finding(CLAIMS["IntactKV"][0], "embedded").sign == "less", "RTN weights it shows the opposite"),
    ]


def results_data():
    def fewer(first, second):
        """What a row of `train_intact.py` loses less than another."""
        return less(PREFIX + first, PREFIX + second)
    few = [found for row, found in SMOL.items() if 1 < len(found["nll"]) < DRAWS and "--bits 1 " in row]
    by_chance, error, p = compared(row_of(CHANCE + LONGER), row_of(MARKED + LONGER))
    kivi = "kivi --bits 2 --group-size 32 --recent 32"
    stream = f"{kivi} --protocol stream"
    n_seeds = len(SMOL[PREFIX + "trained"]["nll"])
    return [
        f'the cell "-{less(KVSINK, PFN)} (p < .001, 6 x 8)"',
        f"{WORDS[len(few)].capitalize()} rows at 1 bit have {WORDS[len(few[0]['nll'])]} calibrations",
        f"at 3 bits has {WORDS[len(SMOL[MARKED]['nll'])]}",
        f"perplexity at 16 bits is {math.exp(UNIT * mean(SMOL['fp16']['nll'][0])):.1f}",
        "`cq` loses {} instead of {}, `antkv` {} instead of {}, and `kvquant` {} instead of {}".format(
            *(f"{loss(row + text):.3f}" for row in (CQ, ANTKV, KVQUANT) for text in (OTHER_TEXT, ""))),
        f"calibrates nothing, loses {loss('oscar --bits 2'):.3f}",
        so(p < 0.001, f"loses {by_chance:.3f} ± {error:.3f} more than the marked ones, and"),
        f"the 41 first tokens lose {less(MARKED + LONGER, PFN + ' --preserve 41' + LONGER)} more",
        f"`kivi` at 2 bits loses {loss(stream):.3f} instead of {loss(kivi):.3f}, in {bits(stream)} true bits instead "
        f"of {bits(kivi)}",
        f"Eight windows lose {fewer('exact', 'none')} less",
        f"a further {fewer('trained', 'exact')} if",
        f"({n_seeds} x 8: {WORDS[n_seeds]} orders",
    ]


def crossing():
    def gains(first, second, where=SHORT):
        """What the second row loses less, with its error."""
        difference, error, _ = change(first, second, where)
        return so(difference < 0, f"{-difference:.2f} ± {error:.2f}")

    def left(first, second):
        return each([share_left(first, second)], ".0%")

    def found(row):
        return sum(hits(row))
    static, kivis = (cell(3, grid) for grid in ("static", KIVIS))
    kept, kivis_kept = (cell(3, grid, kept="marked") for grid in ("static", KIVIS))
    level, both = (cell(3, "static", "integer", kept=which) for which in ("none", "marked"))
    two, two_kept, two_turned, two_both = (cell(2, KIVIS, kept=which, rotated=turn)
                                           for turn in (False, True) for which in ("none", "marked"))
    replaced, error_replaced, p_replaced = factor([kept, level], [static, both])
    *_, p = change(kivis, cell(3, KIVIS, "integer"))
    turned = cell(3, KIVIS, rotated=True)
    p_turned, p_kl = (change(kivis, turned, kind=kind)[2] for kind in ("nll", "kl"))
    unknown = [words for words, of in TWO.items() if {verdict(of), verdict(of, "embedded")} == {"open"}]
    best = cell(3, KIVIS, "offset", "marked", True)
    still, error_still, _ = change(kivis_kept, best)
    worse, error_own, _ = change(two, OWN_FILE + ":Marked {mark} --bits 2 --scheme channel-dynamic --marked own")
    turned_static, both_static = (cell(3, "static", kept=which, rotated=True) for which in ("none", "marked"))
    together, error_together, _ = factor([static], [both_static])
    beyond, error_beyond, p_beyond = factor([kept, turned_static], [static, both_static])
    low = loss("oscar --bits 2"), loss("kvquant --bits 2")
    return [
        f"On tales, kept tokens gain {gains(static, kept, TALES)} nats in a static grid, and a level at 0 gains "
        f"{gains(static, level, TALES)}",
        so(p_beyond < 0.05 and beyond > 1, f"divide the loss by {together:.2f} ± {error_together:.2f}, more"),
        so(list(map(verdict, TWO.values())).count(HELP) == 1, "no other pair here does"),
        f"together they reach {beyond:.2f} ± {error_beyond:.2f} times their product",
        f"{WORDS[len(unknown)].capitalize()} pairs, "
        + so(all(KIVIS in words for words in unknown), "all with KIVI's grid"),
        so(p_replaced < 0.05, f"reach only {replaced:.2f} ± {error_replaced:.2f} of their product"),
        f"kept tokens gain {gains(static, kept, LONGER)} nats, and a level at 0 gains {gains(static, level, LONGER)}",
        so(p > 0.05, f"A level at 0 makes no visible difference in it ({of_p(p)})"),
        f"Marked tokens gain {gains(kivis, kivis_kept)} nats ({gains(kivis, kivis_kept, LONGER)} in windows of 4,096 "
        f"tokens), which leaves {left(kivis, kivis_kept)} of the loss",
        f"in a static grid they leave {left(static, kept)}",
        f"together they leave {left(kept, both)} of what kept tokens alone lose, and {left(level, both)} of what",
        f"Rotation may gain a little ({of_p(p_turned)}; by KL, {of_p(p_kl)})",
        f"but nothing if marked tokens are kept ({still:+.3f} ± {error_still:.3f})",
        so(verdict([two, two_kept, two_turned, two_both]) == "open", "at 2 bits because four pairs are too few"),
        so(verdict([static, level, turned_static, cell(3, "static", "integer", rotated=True)], "embedded") == HELP,
           "they harm each other (on the embedded model, they help)"),
        f"16 bits gain {gains(two, two_kept)}, and a grid of its own "
        + so(worse > -error_own, f"nothing ({worse:+.2f} ± {error_own:.2f})"),
        f"loses {loss(QUARTER, 'embedded'):.3f} on the embedded model at 2 bits, but {loss(QUARTER + SHORT):.3f} on "
        "SmolLM2 at 3",
        f"{CODEBOOK / 512:g} bits a number in a text of 512 tokens, and {CODEBOOK / 2 ** 17:.2f} in one of 128K",
        f"16 bits find {found('fp16')} of 100 facts",
        f"`antkv` at 2 bits loses {loss(ANTKV):.3f} and finds {found(ANTKV)}; KIVI's grid at 3 bits loses "
        f"{loss(kivis + SHORT):.3f} and finds {found(kivis)}",
        so(found(kivis_kept) == found(kivis), "marked tokens lower the loss but find no more"),
        f"a rotation alone finds more ({more_answers(kivis, turned)})",
        f"most are found ({more_answers(kivis, best)})",
        f"marked tokens in 16 bits ({row_of(best + SHORT)['bits'] - row_of(kivis + SHORT)['bits']:.2f} bits more)",
        so(found(best) > max(map(found, (kivis, turned, kivis_kept, level, both))),
           "no row at 3 bits finds more facts"),
        f"the loss is that of marked tokens without a rotation ({still:+.3f} ± {error_still:.3f})",
        so(loss(kivis + SHORT) < min(low) / 2, "less than half of their loss"),
    ]


def halves():
    """What nvfp4 loses for the keys alone, and for the values alone."""
    return [loss(f"{FORMATS} --scheme {k} --v-scheme {v}") for k, v in (("nvfp4", "fp16"), ("fp16", "nvfp4"))]


def own_codec():
    (keys, of_values), turbo = halves(), f"{TURBOQUANT} --bits 4"
    return [so(keys > of_values, f"nvfp4 loses {less(KIVI4, SERVED['nvfp4'])} more than"),
            so(loss(f"{turbo} --qjl on") > loss(turbo), "and yet the loss is larger")]


def serving():
    (row, fp8), (keys, of_values) = (SERVED[name] for name in ("q8_0 keys, q4_0 values, both rotated", "fp8")), halves()
    long, fp8_long = (loss(f"{name} --context 4096") for name in (row, fp8))
    as_fp8 = f"{loss(row):.3f}" == f"{loss(fp8):.3f}" and long < fp8_long
    return [so(keys > of_values, f"loses {keys:.3f} nats, with nvfp4 for the values alone {of_values:.3f}"),
            so(as_fp8, f"takes {float(bits(row))} bits. It loses {loss(row):.3f} in texts of 512 tokens, as fp8 does, "
               f"and {long:.3f} in texts of 4,096, where fp8 loses {fp8_long:.3f}")]


def pool():
    wide = "--bits 2 --group-size 128 --recent 32"
    return [f"on SmolLM2, three save {less(f'ott {wide}', f'kivi {wide}').split()[0]} nats"]


def groups():
    skvq = "skvq --bits 2 --group-size 32 --metadata fp16 --preserve"
    return [f"on SmolLM2, {less(f'{skvq} 5', f'{skvq} 0').split()[0]} nats"]


def sinkless():
    mark, sink, neither = embedded_sinks.first_at_half((embedded_sinks.mark, embedded_sinks.on_s))
    return [f"finds it in {WORDS[embedded_sinks.n_found('logit')]} of eight models with a learned logit (softmax: "
            f"{WORDS[embedded_sinks.n_found('softmax')]})",
            f"In {WORDS[mark]} seeds the mark reaches half of its final size first, in {WORDS[sink]} the sink, in "
            f"{WORDS[neither]} neither"]


OF_PAGE = {f"{page.__name__}.md": page for page in (
    readme, analysis, methods, results, results_data, own_codec, serving, crossing, embedded_model, sinkless)}
OF_PAGE |= {"ladder/3_pool.py": pool, "ladder/4_groups.py": groups}


@cache
def of_page(name):
    return OF_PAGE.get(name.replace("README", "readme"), list)()
