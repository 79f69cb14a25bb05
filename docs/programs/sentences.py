"""What pages say of data: a few words of a sentence, with its figures as expressions. pages.py checks and writes them.

    seen(what, column, layers)     docs/analysis.json: [number, error] of each row, or of some layers
    loss, bits, ends, less         docs/results.json: the rows of `results.py --measure`
    cell(page, row, column)        a table, or what a command has printed, in a page
    so(condition, words)           words, as long as the data bear them out
"""
import json
import math
import re
from functools import cache
from statistics import fmean as mean

import needles
import results
import torch
from phenomena import RECORD
from results import CLAIMS, DRAWS, EIGHT, FORMATS, POINTS, PREFIX, ROOT, SERVED, UNIT, WINDOWS, compared, finding, named

from tinykv import cli
from tinykv.analysis import outliers, walk
from tinykv.analysis.sinks import FEWEST, SPAN, THRESHOLD
from tinykv.codecs.base import CALIBRATION_WINDOWS
from tinykv.codecs.clipped import ClippedGroups
from tinykv.hf import EMBEDDED
from tinykv.outlier import find_layer

ANALYSIS, DATA = json.loads(RECORD.read_text(encoding="utf-8")), results.read_data()
SMOL, TALES = DATA["SmolLM2"], json.loads((EMBEDDED / "config.json").read_text())
NUMBER = re.compile(r"[+-]?\d+(?:[.,]\d+)*")
WORDS = "no one two three four five six seven eight nine ten eleven twelve".split()
PARTS = {4: "quarter", 5: "fifth", 6: "sixth", 10: "tenth", 20: "twentieth"}
RTN, PFN, KVSINK, KIVI4 = "rtn --bits 3", "pfn --bits 3", "kvsink --bits 3", "kivi --bits 4 --group-size 64"
ZERO, MARKED = " --formula integer-zero", "kvsink --bits 3 --threshold 0.1"


# Figures

def seen(what, column, layers=None, model="embedded", **where):
    """Of the rows of these layers, or where other columns have these values."""
    table = ANALYSIS[model][what]
    rows = [i for i in range(len(table[column])) if all(table[name][i] == value for name, value in where.items())]
    return [table[column][row] for row in (rows if layers is None else layers)]


def loss(row, model="SmolLM2"):
    """Nats above fp16."""
    rows, row = DATA[model], named(row, model)
    return compared(rows[row], results.fp16_of(row, rows))[0]


def bits(row):
    return SMOL[named(row, "SmolLM2")]["bits"]


def ends(row):
    """Nats above fp16 in the first 512 tokens of windows of 4,096, and in the last: "0.379", "1.006"."""
    losses = SMOL[results.at(row)]["along"]
    return f"{UNIT * losses[0]:.3f}", f"{UNIT * losses[-1]:.3f}"


def less(first, second, form=".3f"):
    """How much less the first row loses: "1.535 ± 0.111"; with the form "+.3f" the difference, with its sign."""
    difference, error, _ = compared(*(SMOL[named(row, "SmolLM2")] for row in (first, second)))
    words = f"{difference if '+' in form else -difference:{form}} ± {error:.3f}"
    return so("+" in form or difference < 0, words)


def cell(page, row, column):
    """The number, or numbers, of a cell of a page's tables and outputs."""
    text = (ROOT / page).read_text(encoding="utf-8").replace("`", "")
    lines = [[part.strip() for part in re.split(r"\||  +", line.strip("|"))] for line in text.splitlines()]
    heads = [i for i, cells in enumerate(lines) if column in cells]
    found = [cells for cells in lines[heads[0]:] if cells[0] == row][0][lines[heads[0]].index(column)]
    numbers = [float(number.replace(",", "")) for number in NUMBER.findall(found)]
    return numbers if len(numbers) > 1 else numbers[0]


# Words

def plain(numbers):
    """Without their errors."""
    return [number[0] if isinstance(number, list) and len(number) == 2 else number for number in numbers]


def each(numbers, form=".2f", join=" and "):
    """0.54 and 0.81 ± 0.02: the largest of their errors, unless it is below their digits."""
    error = f"{max((number[1] for number in numbers if isinstance(number, list)), default=0):{form}}"
    words = join.join(f"{number:{form}}" for number in plain(numbers))
    return f"{words} ± {error.lstrip('+')}" if re.search("[1-9]", error) else words


def span(numbers, form=".2f"):
    """0.61 to 0.70 ± 0.02"""
    low, *_, high = sorted(plain(numbers))
    error = max((number[1] for number in numbers if isinstance(number, list)), default=0)
    return each([[low, error], [high, error]], form, " to ")


def so(condition, words):
    return words if condition else f"[not so] {words}"


# The pages

def readme():
    draws, fp16 = DATA["embedded"]["rtn --bits 2"]["nll"], DATA["embedded"]["fp16"]["nll"][0]

    def delta(draw):
        return math.exp(UNIT * mean(draw)) - math.exp(UNIT * mean(fp16[:len(draw)]))

    def of(model, *columns):
        return [cell("docs/real_models.md", model, column) for column in columns]
    token, weights = of("LLaMA-2-7B", "cache of a token, KiB", "weights, GiB")
    size, codebooks = 32 * token / 1024, math.prod(of("SmolLM2-135M", "layers", "KV heads", "head")) * 2 * 256 * 2
    cq = loss("cq --bits 2 {windows} --recent 0")
    others = [loss(f"{name} --bits 2") for name in ("rtn", "pfn", "kvsink", "kvquant", "kivi", "ott", "skvq")]
    per_token, nvfp4, q4_0 = (SERVED[name] for name in ("quanto, MLX: 4 bits", "nvfp4", "q4_0, rotated"))
    five, exact = ends(KVSINK), math.exp(UNIT * mean(fp16))
    table = [cell("README.md", row, "ppl") for row in ("rtn", "pfn", "kvsink")]
    return [
        so(size > weights, f"{size:g} GiB, more than the weights ({weights} GiB)"),
        f"the same cache takes {size / 8:g} GiB",
        f"{WORDS[len(draws)]} draws, on {WORDS[len(draws[0])]} of these pieces, its delta runs from "
        f"{span([delta(draw) for draw in draws], '.0f')}",
        f"over {len(fp16)} pieces",
        f"fp16 - 0 {exact:.3f}",
        *(f"{ppl:.3f} {ppl - exact:+.3f}" for ppl in table),
        f"the {TALES['head_dim']} coordinates",
        f"lowers the loss by {less(PFN, RTN)}",
        f"by a further {less(KVSINK, PFN)}",
        f"by only {less(PFN + ZERO, RTN + ZERO)}",
        f"no more ({less(KVSINK + ZERO, PFN + ZERO, '+.3f')})",
        f"at 3 bits loses {five[0]} in the first 512 and {five[1]} in the last",
        f"it loses {ends(MARKED)[1]} there, in {bits(results.at(MARKED)):.2f} true bits",
        f"five are enough: {ends(KVSINK + ZERO)[1]}",
        so(cq < min(others), f"`cq` loses {cq:.3f}"),
        f"{codebooks / 1e6:.0f} MB for all texts",
        f"`kvquant` {loss('kvquant --bits 2'):.3f} with {bits('kvquant --bits 2'):.2f} true bits",
        so(len({bits(row) for row in (KIVI4, per_token, nvfp4, q4_0)}) == 1, f"At {bits(KIVI4)} bits"),
        f"loses {loss(KIVI4):.3f}. With a scale per token, integers lose {loss(per_token):.3f}, NVIDIA's nvfp4 "
        f"{loss(nvfp4):.3f}",
        so(loss(KIVI4) < loss(q4_0) < loss(nvfp4), f"first, {loss(q4_0):.3f}"),
    ]


def analysis():
    """The embedded model; SmolLM2 in the last column of the table."""
    def at(what, column, layers=(2, 3)):
        return seen(what, column, layers)

    def smol(what, column, layers=range(3, 10)):
        return seen(what, column, layers, "SmolLM2")

    def of(what, column, **where):
        return plain(seen(what, column, **where))

    def change(scheme, form="+.0%", **where):
        low, *_, high = sorted(of("errors", "change", scheme=scheme, **where), key=abs)
        return f"{low:{form}} to {high:{form}}"

    def anchors(column, kind, by, form=".2f"):
        return each(seen("anchors", column, of=kind, **{"ranked by": by}), form)
    tales, small, late, kept = ANALYSIS["embedded"], ANALYSIS["SmolLM2"], range(12, 29), range(3, 11)
    table = [[walk.cell(number, form) for number, (_, form) in zip(row, outliers.COLUMNS.values())]
             for row in zip(*(plain(seen("outliers", column)) for column in outliers.COLUMNS))]
    n_second = sum(len(found) > 1 for found in small["sinks at"])  # windows with a second sink
    ratio, out = (plain(smol("outliers", column, range(30))) for column in ("ratio", "out"))
    bias, bias_kept = (dict(zip(of("widths", "bits", kept=kept), of("widths", "bias change", kept=kept)))
                       for kept in ("nothing", "sinks"))
    two, two_kept = (of("widths", "change", kept=kept, bits=2)[0] for kept in ("nothing", "sinks"))
    (of_sinks,), (of_others,) = (of("errors", column, scheme="token-static", of="V", bits=2)
                                 for column in ("with", "without"))
    n_exact, left = of("prefix", "n"), of("prefix", "last")
    score, times, best = "score", "score x error", "itself (ceiling)"
    return [
        f"on {WORDS[tales['windows']]} windows of {tales['context']:,} tokens",
        f"on {WORDS[small['windows']]} windows of {small['context']} WikiText-2 tokens",
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
        f"{min(plain(smol('bias', 'consistency', [*kept, *late]))):.2f} and more in layers 3 to 10 and 12 to 28",
        so(0.9 < bias[4] < 1.1,
           f"off by {each(seen('widths', 'change', kept='nothing', bits=4), '.3f')}, the bias by its whole size"),
        f"the largest step is a factor of {max(of('keys', 'cliff')):.1f}",
        f"a factor of {span(smol('keys', 'cliff', late), '.1f')} in layers 12 to 28, and "
        f"{span(smol('keys', 'sinks', late), '.0%')} of the keys below it are sinks'",
        f"rank correlation {anchors('rank', 'K', score)} (K) and {anchors('rank', 'V', score)} (V); times the row's "
        f"error, {anchors('rank', 'K', times)} and {anchors('rank', 'V', times)}",
        # sinks
        f"from {SPAN} queries: its own and the next {SPAN - 1}",
        f"score reaches {THRESHOLD} in a tenth of all heads. The last {FEWEST - 1} tokens",
        f"tokens that reach {THRESHOLD} in a tenth",
        f"Each window has {span([len(found) for found in tales['sinks at']], 'd')} sinks",
        f"has a score of {each(at('sinks', 'first'))}, later sinks {each(at('sinks', 'later'))}, other tokens at most "
        f"{max(plain(at('sinks', 'largest other'))):.2f}",
        so(not any(plain(at("sinks", "sinks", (0, 1)))), "Layers 0 and 1 have no sinks"),
        # the outlier, norms, the bias
        str(cli.Columns([head for head, _ in outliers.COLUMNS.values()], table, 0)),
        so(of("outliers", "out c")[2] < 1.1 * of("outliers", "out c")[1],
           f"the outlier into channel {at('outliers', 'channel')[0]} (emergence), layer 2 adds little"),
        f"values have {each(at('norms', 'v sinks'))} of the others' norm, and their queries "
        f"{each(at('norms', 'q sinks'))}",
        f"Their keys have {each(at('norms', 'k sinks'))}",
        f"a sink's in {each(at('cosine', 'largest'), '.0%')} of cases",
        f"as consistent ({each(at('bias', 'rest', [0]))})",
        f"receive {each(at('bias', 'attention'))} of the attention, but the bias has only {each(at('bias', 'size'))}",
        # errors
        f"| K {change('token-dynamic', of='K')}, V {change('token-dynamic', of='V')} |",
        f"| {change('channel-dynamic')} |",
        f"V -44% to -68% | {min(of('errors', 'change', scheme='token-static')):.0%} to 0% |",
        so([k < 1 for k in plain(at("norms", "k sinks"))] == [True, False], "sinks have small keys in layer 2 only"),
        f"because in {CALIBRATION_WINDOWS} windows",
        so(1.6 < of_sinks / of_others < 2, "nearly twice the error of the others"),
        so(bias[8] < 0.1 < bias[7], "falls below a tenth of its size only at 8 bits"),
        f"it is {bias_kept[4]:.2f} at 4 bits",
        f"keeping them removes only a {PARTS[round(two / (two - two_kept))]}",
        # OTT, IntactKV, AnTKV
        so(plain(at("keys", "sinks"))[1] == 0 and plain(at("norms", "k sinks"))[1] > 1,
           f"In layer 2, {each(at('keys', 'sinks', [2]), '.0%')} of the keys"),
        so(left[2] - left[3] > 3 * (left[1] - left[2]), f"as the {n_exact[2] - n_exact[1]:.0f} tokens between"),
        f"ranks highest hold {anchors('top', 'K', score, '.0%')} of the damage, and the 1% with the most damage "
        f"{anchors('top', 'K', best, '.0%')}",
        so(anchors("top", "V", times) == anchors("top", "V", best),
           f"the score finds {anchors('top', 'K', times, '.0%')} for keys"),
    ]


def methods():
    sinks, first = (seen("outliers", "out", layers, "SmolLM2") for layers in (range(2, 8), range(11, 28)))
    late = loss("kvsink --bits 3 {late}") - loss(PFN)
    clips = [min(ClippedGroups(bits=bits, heads=1, width=8, group_size=4).choices)[0] for bits in (2, 1)]
    return [
        so([find_layer(torch.ones(6), torch.full([6], ratio)) for ratio in (5, 4.99)] == [0, None],
           "at least 5 times the tokens' median"),
        f"several tokens have {span(sinks, '.0f')} after layers 2 to 7, the first token {span(first, ',.0f')} after "
        "layers 11 to 27",
        so(late > 0, f"at 3 bits is {late:.2f} nats worse"),
        f"from 1.00 to {clips[0]:.2f}, or to {clips[1]:.2f} for codes",
        f"windows by default, not {CALIBRATION_WINDOWS}",
    ]


def results_():
    def straight(at):
        """The loss on the line of log loss through cq's rows at 2 and 4 bits."""
        low, high = (math.log(loss(f"cq --bits {width} {{windows}} --recent 0")) for width in (2, 4))
        return math.exp(low + (at - 2) / 2 * (high - low))
    few = [found for row, found in SMOL.items() if 1 < len(found["nll"]) < DRAWS and "--bits 1 " in row]
    marked = len(SMOL[MARKED]["nll"])
    by_chance, error, p = compared(*(SMOL[results.at(row)] for row in (results.CHANCE, MARKED)))
    one, five = (f"antkv --anchors {share} --bits 2 {{windows}} --recent 0" for share in ("1%", "5%"))
    kivi, stream = "kivi --bits 2 --group-size 32 --recent 32", "--protocol stream"
    (small, small_5), (large, large_5) = (cell("docs/real_models.md", f"{model}, WikiText-2", "0% outliers")
                                          for model in ("LLaMA-2-7B", "LLaMA-3-8B"))
    pool = [finding(claim, "embedded", DATA).sign for claim in CLAIMS["OTT"] if claim.second.startswith("kivi")][:4]
    of_values = all(loss(f"rtn --k-bits 16 --v-bits {n}", model) > 2 * loss(f"rtn --k-bits {n} --v-bits 16", model)
                    for model, n in (("embedded", 2), ("SmolLM2", 3)))
    right = {row: sum(hit for _, hit, _ in found) for row, found in results.read_data(needles.RECORD)["4096"].items()}
    n_seeds = len(SMOL[PREFIX + "trained"]["nll"])

    def fewer(first, second):
        """What a row of `train_intact.py` loses less than another."""
        difference, error, _ = compared(*(SMOL[PREFIX + row] for row in (first, second)))
        return f"{-difference:.3f} ± {error:.3f}"
    return [
        f'the cell "{less(KVSINK, PFN, "+.3f")} (p < .001, {DRAWS} x {WINDOWS})"',
        f'"{DRAWS} x {WINDOWS}" is {WORDS[DRAWS]} calibrations',
        f"and {WORDS[WINDOWS]} windows of the test text",
        f'"1 x {2 * WINDOWS}" is sixteen windows',
        f"differ by more than {results.UNEQUAL}",
        f"{WORDS[len(few)].capitalize()} rows at 1 bit have {WORDS[len(few[0]['nll'])]} calibrations",
        f"at 3 bits has {WORDS[marked]}",
        f"perplexity at 16 bits is {math.exp(UNIT * mean(SMOL['fp16']['nll'][0])):.1f}",
        so(of_values, "Most of the harm is in the values"),
        f"from {small} to {small_5}, by {math.log(small / small_5):.3f} nats, and LLaMA-3-8B's from {large} to "
        f"{large_5}, by {math.log(large / large_5):.3f}",
        f"a loss of {straight(bits(one)):.3f} (1%) and {straight(bits(five)):.3f} (5%)",
        so(straight(bits(one)) < loss(one) and straight(bits(five)) < loss(five),
           f"the worse use of these bits: {loss(one):.3f} and {loss(five):.3f}"),
        f"from {ends(KVSINK)[0]} in the first 512 tokens to {ends(KVSINK)[1]} in the last, and in one window of 8,192 "
        f"to {UNIT * SMOL[results.at(KVSINK, '--context 8192')]['along'][-1]:.3f}",
        f"the last 512 of 4,096 lose {ends(MARKED)[1]} and {ends(KVSINK + ZERO)[1]}",
        f"(`pfn`) lose {ends(PFN + ' --preserve 41')[1]}",
        "`fp8` goes from {} to {}".format(*ends(EIGHT["fp8"])),
        "`mxfp4` from {} to {}".format(*ends(POINTS["mxfp4"])),
        "`skvq` from {} to {}".format(*ends("skvq --bits 2")),
        so(float(ends(results.CHANCE)[1]) > 2 * float(ends(MARKED)[1]), "Which tokens are kept matters, not how many"),
        f"`Chance` loses {ends(results.CHANCE)[1]}",
        f"a hundredth of the text, {ends(KVSINK + ' --preserve 41')[1]}",
        f"loses {by_chance:.3f} ± {error:.3f} more than the marked ones ({results.of_p(p)})",
        f"`kvsink` takes {bits(KVSINK):.2f} true bits in 512 tokens and {bits(results.at(KVSINK)):.2f} in 4,096; with "
        f"all that are marked, {bits(MARKED):.2f} and {bits(results.at(MARKED)):.2f}",
        f"`kivi` at 2 bits loses {loss(f'{kivi} {stream}'):.3f} instead of {loss(kivi):.3f}, in "
        f"{bits(f'{kivi} {stream}'):.2f} true bits instead of {bits(kivi):.2f}",
        f"Eight windows lose {fewer('exact', 'none')} less",
        f"a further {fewer('trained', 'exact')} if",
        f"({n_seeds} x 8: {WORDS[n_seeds]} orders",
        f"fp16 finds {right['fp16']} of 60 numbers, `kivi` at 4 bits {right[KIVI4]}, `q4_0` "
        f"{right[SERVED['q4_0, rotated']]}, and `kvsink` at 3 bits {right[KVSINK]} with five kept tokens and "
        f"{right[MARKED]} with all",
        so(1.6 < loss(KVSINK + " --context 4096") / loss(MARKED + " --context 4096") < 2.5, "these halve its loss"),
        so(set(pool) == {"none"}, f"no gain by OTT's pool ({2 * WINDOWS} windows)"),
    ]


def halves(scheme):
    """What a format loses for the keys alone, and for the values alone."""
    return [loss(f"{FORMATS} --scheme {k} --v-scheme {v}") for k, v in ((scheme, "fp16"), ("fp16", scheme))]


def own_codec():
    turbo, (keys, of_values) = f"{results.TURBOQUANT} --bits 4", halves("nvfp4")
    return [so(keys > of_values, f"nvfp4 loses {less(KIVI4, POINTS['nvfp4'])} more than"),
            so(loss(f"{turbo} --qjl on") > loss(turbo), "and yet the loss is larger")]


def serving():
    row, (keys, of_values) = SERVED["q8_0 keys, q4_0 values, both rotated"], halves("nvfp4")
    as_fp8 = f"{loss(row):.3f}" == f"{loss(EIGHT['fp8']):.3f}"
    return [so(keys > of_values, "take 4 bits for the values first"),
            so(keys > of_values, "Most of the loss is in the keys"),
            so(keys > of_values, f"loses {keys:.3f} nats, with nvfp4 for the values alone {of_values:.3f}"),
            so(as_fp8, f"takes {bits(row)} bits and loses {loss(row):.3f}, as much as fp8")]


def tour():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    return [*(line for line in lines if re.match(r"(fp16|pfn|kvsink) {4,}", line)),
            f"`rtn` falls from {cell('README.md', 'rtn', 'ppl'):.1f}"]


def walkthrough():
    d = TALES["head_dim"]
    return [f"codes 0 to {d // 4 - 1}, the next two {d // 4} to {d // 2 - 1}", f"The {d} channels of a head take "
            f"{2 * d // 8} bytes instead of {2 * d}", f"channels 0, {d // 4}, {d // 2} and {3 * d // 4} of"]


def embedded_model():
    return [f"{TALES['num_hidden_layers']} layers, width {TALES['hidden_size']}, {TALES['num_attention_heads']} query "
            f"heads of {TALES['head_dim']} channels on {WORDS[TALES['num_key_value_heads']]} KV head, "
            f"{TALES['max_position_embeddings']:,} positions and a vocabulary of {TALES['vocab_size']:,}"]


PAGES = [readme, analysis, methods, results_, own_codec, serving, tour, walkthrough, embedded_model]
OF_PAGE = {f"{function.__name__.strip('_')}.md": function for function in PAGES}


@cache
def of_page(name):
    return OF_PAGE.get(name.replace("README", "readme"), list)()
