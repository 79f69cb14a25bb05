"""What pages say of data: a few words of a sentence, with its figures as expressions. pages.py checks and writes them.

    seen(what, column, layers)       docs/analysis.json: (number, error) of each row, or of some layers
    loss, bits, ends, apart, less    docs/results.json: the rows of `results.py --measure`
    cell(page, row, column)          a table, or what a command has printed, in a page
    so(condition, words)             words, as long as the data bear them out
"""
import json
import math
import re
from functools import cache
from statistics import fmean as mean

import results
import torch
from phenomena import RECORD
from results import CLAIMS, DRAWS, ROOT, UNIT, WINDOWS, compared, finding, fp16_of, named

from tinykv.analysis.sinks import FEWEST, HEADS, SPAN, THRESHOLD
from tinykv.codecs.base import CALIBRATION_WINDOWS
from tinykv.codecs.clipped import ClippedGroups
from tinykv.hf import EMBEDDED
from tinykv.outlier import find_layer

ANALYSIS, DATA = json.loads(RECORD.read_text(encoding="utf-8")), results.read_data()
TALES = json.loads((EMBEDDED / "config.json").read_text())
NUMBER = re.compile(r"[+-]?\d+(?:[.,]\d+)*")
WORDS = "no one two three four five six seven eight nine ten eleven twelve".split()
PARTS = {4: "quarter", 5: "fifth", 6: "sixth", 10: "tenth", 20: "twentieth"}
KIVI4, STATIC = "kivi --bits 4 --group-size 64", "--bits 3 --formula integer-zero"


# Figures

def seen(what, column, layers=None, model="embedded", **where):
    """Of the rows of these layers, or where other columns have these values."""
    table = ANALYSIS[model][what]
    rows = [i for i in range(len(table[column])) if all(table[name][i] == value for name, value in where.items())]
    return [table[column][row] for row in (rows if layers is None else layers)]


def loss(row, model="SmolLM2"):
    """Nats above fp16."""
    rows, row = DATA[model], named(row, model)
    return compared(rows[row], fp16_of(row, rows))[0]


def bits(row):
    return DATA["SmolLM2"][named(row, "SmolLM2")]["bits"]


def ends(row):
    """Nats above fp16 in the first 512 tokens of windows of 4,096, and in the last: "0.379", "1.006"."""
    losses = results.along(results.at(row, 4096), DATA["SmolLM2"])
    return f"{losses[0]:.3f}", f"{losses[-1]:.3f}"


def apart(first, second, sign=False):
    """How much less, or more, the first row loses: "1.535 ± 0.111 less", or "-1.535 ± 0.111"."""
    difference, error, _ = compared(*(DATA["SmolLM2"][named(row, "SmolLM2")] for row in (first, second)))
    if sign:
        return f"{difference:+.3f} ± {error:.3f}"
    return f"{abs(difference):.3f} ± {error:.3f} {'less' if difference < 0 else 'more'}"


def less(first, second):
    """As `apart`, without its last word."""
    return apart(first, second).removesuffix(" less")


def cell(page, row, column, next=0):
    """The number, or numbers, of a cell of a page's tables and outputs, or of the one so many columns after it."""
    head = []
    for line in (ROOT / page).read_text(encoding="utf-8").splitlines():
        cells = line.replace("`", "").strip("|").split("|") if line[:1] == "|" else line.split()
        cells = [text.strip() for text in cells]
        if column in cells:
            head = cells
        elif cells[:1] == [row] and len(cells) == len(head):
            found = [float(number.replace(",", "")) for number in NUMBER.findall(cells[head.index(column) + next])]
            return found if len(found) > 1 else found[0]
    raise KeyError(f"{page} has no row {row} with a column {column}")


# Words

def plain(numbers):
    """Without their errors."""
    return [number[0] if isinstance(number, list) else number for number in numbers]


def with_error(words, numbers, form):
    """Words, and the largest error of the numbers in them, "0.54 and 0.81 ± 0.02", unless it is below their digits."""
    error = f"{max((number[1] for number in numbers if isinstance(number, list)), default=0):{form}}"
    return f"{words} ± {error}" if re.search("[1-9]", error) else words


def each(numbers, form=".2f"):
    return with_error(" and ".join(f"{number:{form}}" for number in plain(numbers)), numbers, form)


def span(numbers, form=".2f"):
    """0.61 to 0.70"""
    return with_error(f"{min(plain(numbers)):{form}} to {max(plain(numbers)):{form}}", numbers, form)


def so(condition, words):
    return words if condition else f"[not so] {words}"


# The pages

def readme():
    draws, fp16 = DATA["embedded"]["rtn --bits 2"]["nll"], DATA["embedded"]["fp16"]["nll"][0]

    def delta(draw):
        return math.exp(UNIT * mean(draw)) - math.exp(UNIT * mean(fp16[:len(draw)]))

    def of_7b(column):
        return cell("docs/real_models.md", "LLaMA-2-7B", column)
    size, weights = 32 * of_7b("cache of a token, KiB") / 1024, of_7b("weights, GiB")  # GiB of 32K tokens
    layers, heads, width = (int(cell("docs/real_models.md", "SmolLM2-135M", name))
                            for name in ("layers", "KV heads", "head"))
    cq = loss("cq --bits 2 {windows} --recent 0")
    others = [loss(f"{name} --bits 2") for name in ("rtn", "pfn", "kvsink", "kvquant", "kivi", "ott", "skvq")]
    per_token, nvfp4, q4_0 = (results.SERVED[name] for name in ("quanto, MLX: 4 bits", "nvfp4", "q4_0, rotated"))
    rtn, pfn, kvsink = (f"{name} --bits 3" for name in ("rtn", "pfn", "kvsink"))
    rtn_0, pfn_0, kvsink_0 = (f"{name} {STATIC}" for name in ("rtn", "pfn", "kvsink"))
    five, marked = ends(kvsink), "kvsink --bits 3 --threshold 0.1"
    return [
        so(size > weights, f"{size:g} GiB, more than the weights ({weights} GiB)"),
        f"the same cache takes {size / 8:g} GiB",
        f"{WORDS[len(draws)]} draws, on {WORDS[len(draws[0])]} of these pieces, its delta runs from "
        f"{span([delta(draw) for draw in draws], '.0f')}",
        f"over {len(fp16)} pieces",
        f"fp16 - 0 {math.exp(UNIT * mean(fp16)):.3f}",
        f"the {TALES['head_dim']} coordinates",
        so(loss(pfn) < loss(rtn), f"lowers the loss by {less(pfn, rtn)}"),
        so(loss(kvsink) < loss(pfn), f"by a further {less(kvsink, pfn)}"),
        so(loss(pfn_0) < loss(rtn_0), f"by only {less(pfn_0, rtn_0)}"),
        f"no more ({apart(kvsink_0, pfn_0, sign=True)})",
        f"at 3 bits loses {five[0]} in the first 512 and {five[1]} in the last",
        f"it loses {ends(marked)[1]} there, in {bits(results.at(marked, 4096)):.2f} true bits",
        f"five are enough: {ends(kvsink_0)[1]}",
        so(cq < min(others), f"`cq` loses {cq:.3f}"),
        f"{layers * 2 * heads * width * 256 * 2 / 1e6:.0f} MB for all texts",
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

    def change(scheme, kind):
        found = of("errors", "change", scheme=scheme, of=kind)
        return f"{min(found, key=abs):+.0%} to {max(found, key=abs):+.0%}"

    def anchors(column, kind, by, form=".2f"):
        return each(seen("anchors", column, of=kind, **{"ranked by": by}), form)
    tales, small, late, kept = ANALYSIS["embedded"], ANALYSIS["SmolLM2"], range(12, 29), range(3, 11)
    n_sinks = [len(found) for found in tales["sinks at"]]
    n_second = sum(len(found) > 1 for found in small["sinks at"])  # windows with a second sink
    ratio, out = (plain(smol("outliers", column, range(30))) for column in ("ratio", "out"))
    nothing, sinks = ({bits: of("widths", column, kept=kept, bits=bits)[0] for bits in (2, 4, 7, 8)}
                      for kept, column in (("nothing", "bias change"), ("sinks", "bias change")))
    with_sinks = of("widths", "change", kept="sinks", bits=2)[0] / of("widths", "change", kept="nothing", bits=2)[0]
    (static_with,), (static_without,) = (of("errors", column, scheme="token-static", of="V", bits=2)
                                         for column in ("with", "without"))
    n_exact, left = of("prefix", "n"), of("prefix", "last")
    times, best = "score x error", "itself (ceiling)"
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
        so(0.9 < nothing[4] < 1.1, "at 4 bits: attention off by "
           f"{each(seen('widths', 'change', kept='nothing', bits=4), '.3f')}, the bias by its whole size"),
        f"the largest step is a factor of {max(of('keys', 'cliff')):.1f}",
        f"a factor of {span(smol('keys', 'cliff', late), '.1f')} in layers 12 to 28",
        f"rank correlation {anchors('rank', 'K', 'score')} (K) and {anchors('rank', 'V', 'score')} (V); times the "
        f"row's error, {anchors('rank', 'K', times)} and {anchors('rank', 'V', times)}",
        # sinks
        f"from {SPAN} queries: its own and the next {SPAN - 1}",
        so(HEADS == 0.1, f"score reaches {THRESHOLD} in a tenth of all heads. The last {FEWEST - 1} tokens"),
        f"tokens that reach {THRESHOLD} in a tenth",
        f"Each window has {span(n_sinks, 'd')} sinks",
        f"has a score of {each(at('sinks', 'first'))}, later sinks {each(at('sinks', 'later'))}, other tokens at most "
        f"{max(plain(at('sinks', 'largest other'))):.2f}",
        so(not any(plain(at("sinks", "sinks", (0, 1)))), "Layers 0 and 1 have no sinks"),
        # the outlier, norms, the bias
        so(of("outliers", "out c")[2] < 1.1 * of("outliers", "out c")[1],
           f"the outlier into channel {at('outliers', 'channel')[0]} (emergence), layer 2 adds little"),
        f"values have {each(at('norms', 'v sinks'))} of the others' norm, and their queries "
        f"{each(at('norms', 'q sinks'))}",
        f"Their keys have {each(at('norms', 'k sinks'))}",
        f"a sink's in {each(at('cosine', 'largest'), '.0%')} of cases",
        f"as consistent ({each(at('bias', 'rest', [0]))})",
        f"receive {each(at('bias', 'attention'))} of the attention, but the bias has only {each(at('bias', 'size'))}",
        # errors
        f"| K {change('token-dynamic', 'K')}, V {change('token-dynamic', 'V')} |",
        f"| {change('channel-dynamic', 'K')} |",
        f"| {min(of('errors', 'change', scheme='token-static')):.0%} to "
        f"{max(of('errors', 'change', scheme='token-static')):.0%} |",
        so([k < 1 for k in plain(at("norms", "k sinks"))] == [True, False], "sinks have small keys in layer 2 only"),
        f"because in {CALIBRATION_WINDOWS} windows",
        so(1.6 < static_with / static_without < 2, "nearly twice the error of the others"),
        so(nothing[8] < 0.1 < nothing[7], "falls below a tenth of its size only at 8 bits"),
        f"it is {sinks[4]:.2f} at 4 bits. At 2 bits, keeping them removes only a {PARTS[round(1 / (1 - with_sinks))]}",
        # OTT, IntactKV, AnTKV
        so(plain(at("keys", "sinks"))[1] == 0 and plain(at("norms", "k sinks"))[1] > 1,
           f"In layer 2, {each(at('keys', 'sinks', [2]), '.0%')} of the keys"),
        so(left[2] - left[3] > 3 * (left[1] - left[2]), f"as the {n_exact[2] - n_exact[1]:.0f} tokens between"),
        f"ranks highest hold {anchors('top', 'K', 'score', '.0%')} of the damage, and the 1% with the most damage "
        f"{anchors('top', 'K', best, '.0%')}",
        so(anchors("top", "V", times) == anchors("top", "V", best),
           f"the score finds {anchors('top', 'K', times, '.0%')} for keys"),
    ]


def methods():
    sinks, first = (seen("outliers", "out", layers, "SmolLM2") for layers in (range(2, 8), range(11, 28)))
    late, pfn = loss("kvsink --bits 3 {late}"), loss("pfn --bits 3")
    clips = [min(ClippedGroups(bits=bits, heads=1, width=8, group_size=4).choices)[0] for bits in (2, 1)]
    return [
        so([find_layer(torch.ones(6), torch.full([6], ratio)) for ratio in (5, 4.99)] == [0, None],
           "at least 5 times the tokens' median"),
        f"several tokens have {span(sinks, '.0f')} after layers 2 to 7, the first token {span(first, ',.0f')} after "
        "layers 11 to 27",
        so(late > pfn, f"at 3 bits is {late - pfn:.2f} nats worse"),
        f"from 1.00 to {clips[0]:.2f}, or to {clips[1]:.2f} for codes",
        f"windows by default, not {CALIBRATION_WINDOWS}",
    ]


def results_md():
    def straight(at):
        """The loss on the line of log loss through cq's rows at 2 and 4 bits."""
        low, high = (math.log(loss(f"cq --bits {width} {{windows}} --recent 0")) for width in (2, 4))
        return math.exp(low + (at - 2) / 2 * (high - low))
    few = [row for row in DATA["SmolLM2"].values() if 1 < len(row["nll"]) < DRAWS]
    one, five = (f"antkv --anchors {share} --bits 2 {{windows}} --recent 0" for share in ("1%", "5%"))
    kivi, stream = "kivi --bits 2 --group-size 32 --recent 32", "--protocol stream"
    (small, small_5), (large, large_5) = (cell("docs/real_models.md", f"{model}, WikiText-2", "0% outliers")
                                          for model in ("LLaMA-2-7B", "LLaMA-3-8B"))
    pool = [finding(claim, "embedded", DATA).sign for claim in CLAIMS["OTT"] if claim.second.startswith("kivi")][:4]
    values_harm = all(loss(f"rtn --k-bits 16 --v-bits {n}", model) > 2 * loss(f"rtn --k-bits {n} --v-bits 16", model)
                      for model, n in (("embedded", 2), ("SmolLM2", 3)))
    return [
        f'the cell "{apart("kvsink --bits 3", "pfn --bits 3", sign=True)} (p < .001, {DRAWS} x {WINDOWS})"',
        f'"{DRAWS} x {WINDOWS}" is {WORDS[DRAWS]} calibrations',
        f"and {WORDS[WINDOWS]} windows of the test text",
        f'"1 x {2 * WINDOWS}" is sixteen windows',
        f"differ by more than {results.UNEQUAL}",
        f"{WORDS[len(few)].capitalize()} rows at 1 bit have {WORDS[len(few[0]['nll'])]} calibrations",
        f"perplexity at 16 bits is {math.exp(UNIT * mean(DATA['SmolLM2']['fp16']['nll'][0])):.1f}",
        so(values_harm, "Most of the harm is in the values"),
        f"from {small} to {small_5}, by {math.log(small / small_5):.3f} nats, and LLaMA-3-8B's from {large} to "
        f"{large_5}, by {math.log(large / large_5):.3f}",
        f"a loss of {straight(bits(one)):.3f} (1%) and {straight(bits(five)):.3f} (5%)",
        so(straight(bits(one)) < loss(one) and straight(bits(five)) < loss(five),
           f"the worse use of these bits: {loss(one):.3f} and {loss(five):.3f}"),
        f"of the text, loses {ends('kvsink --bits 3 --preserve 41')[1]}, and `pfn` with the first 41 tokens "
        f"{ends('pfn --bits 3 --preserve 41')[1]}",
        f"`kvsink` takes {bits('kvsink --bits 3'):.2f} true bits in 512 tokens and "
        f"{bits(results.at('kvsink --bits 3', 4096)):.2f} in 4,096; with all that are marked, "
        f"{bits(results.at('kvsink --bits 3 --threshold 0.1', 4096)):.2f}",
        f"`kivi` at 2 bits loses {loss(f'{kivi} {stream}'):.3f} instead of {loss(kivi):.3f}, in "
        f"{bits(f'{kivi} {stream}'):.2f} true bits instead of {bits(kivi):.2f}",
        so(set(pool) == {"none"}, f"no gain by OTT's pool ({2 * WINDOWS} windows)"),
    ]


def halves(scheme):
    """What a format of docs/formats.py loses for the keys alone, and for the values alone."""
    return [loss(f"{results.FORMATS} --scheme {k} --v-scheme {v}") for k, v in ((scheme, "fp16"), ("fp16", scheme))]


def own_codec():
    turbo = f"{results.TURBOQUANT} --bits 4"
    return [
        so(halves("nvfp4")[0] > halves("nvfp4")[1], f"nvfp4 loses {apart(results.POINTS['nvfp4'], KIVI4)}"),
        so(loss(f"{turbo} --qjl on") > loss(turbo), "and yet the loss is larger"),
    ]


def real_models():
    def of(row, column="answers", next=0):
        return cell("docs/real_models.md", row, column, next)

    def lost(row):
        return of(row, "nats above fp16")[0]
    four = ("kivi", "antkv", "cq", "kvsink", "pfn")
    behind = [of("fp16", next=next) - of(f"{name}, 4 bits", next=next) for name in four for next in (0, 2)]
    rtn, antkv, pfn, kivi = "rtn, 4 bits", "antkv, 2 bits", "pfn, 3 bits", "kivi, 2 bits"
    return [
        f"within {max(behind):.0f} points of 16 bits",
        so(lost(rtn) > lost(antkv), f"({lost(rtn):.3f} and {lost(antkv):.3f}) but finds {of(rtn):.0f} facts, `antkv` "
                                    f"{of(antkv):.0f}"),
        so(lost(pfn) > lost(kivi), f"but finds {of(pfn):.0f} facts, `kivi` {of(kivi):.0f}"),
    ]


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


def serving():
    row, (keys, of_values) = results.SERVED["q8_0 keys, q4_0 values, both rotated"], halves("nvfp4")
    return [so(keys > of_values, f"loses {keys:.3f} nats, with nvfp4 for the values alone {of_values:.3f}"),
            so(f"{loss(row):.3f}" == f"{loss(results.EIGHT['fp8']):.3f}", f"takes {bits(row)} bits and loses "
                                                                          f"{loss(row):.3f}, as much as fp8")]


PAGES = {"README.md": readme, "analysis.md": analysis, "methods.md": methods, "results.md": results_md,
         "own_codec.md": own_codec, "real_models.md": real_models, "tour.md": tour, "walkthrough.md": walkthrough,
         "embedded_model.md": embedded_model, "serving.md": serving}


@cache
def of_page(name):
    return PAGES.get(name, list)()
