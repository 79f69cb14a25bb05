"""What the pages say in sentences, each figure computed from what was recorded; pages.py checks and writes them.

A page has the sentence in plain words. Here are the same words, with the figures as expressions: f-strings. Figures
come from

    numbers(model, what, column, layers)    docs/analysis.json: what `python -m tinykv.analysis --json` has measured
    loss, bits, apart                       docs/results.json: the rows of `results.py --measure`
    cell(page, row, column)                 a table, or what a command has printed, in a page
    the package itself                      its constants

docs/typed.txt has the sentences that no record vouches for: of papers, of machines and programs that are gone, and
definitions. They are only typed twice, so that a change of one shows.

    python docs/programs/sentences.py embedded numbers.json    record what the analysis has written
"""
import json
import math
import re
import sys
from pathlib import Path
from statistics import fmean as mean

import results
import torch
from results import CLAIMS, DRAWS, ROOT, UNIT, WINDOWS, compared, finding, fp16_of, named

from tinykv.analysis.sinks import FEWEST, HEADS, SPAN, THRESHOLD
from tinykv.codecs.base import CALIBRATION_WINDOWS
from tinykv.codecs.clipped import ClippedGroups
from tinykv.hf import EMBEDDED
from tinykv.outlier import find_layer

RECORD, TYPED = ROOT / "docs" / "analysis.json", ROOT / "docs" / "typed.txt"
ANALYSIS = json.loads(RECORD.read_text(encoding="utf-8"))
DATA = results.read_data()
TALES = json.loads((EMBEDDED / "config.json").read_text())
NUMBER = re.compile(r"[+-]?\d+(?:[.,]\d+)*")
WORDS = "no one two three four five six seven eight nine ten eleven twelve".split()
PARTS = {4: "quarter", 5: "fifth", 6: "sixth", 10: "tenth", 20: "twentieth"}


def record(model, path):
    """Keep the rows of an analysis in five digits, without the lists that only figures need."""
    kept = {}
    for name, rows in json.loads(Path(path).read_text()).items():
        if isinstance(rows, list) and isinstance(rows[0], dict):
            kept[name] = [{column: float(f"{x:.5g}") if isinstance(x, float) else x for column, x in row.items()
                           if not isinstance(x, (dict, list))} for row in rows]
        elif name in ("context", "windows", "sinks at"):
            kept[name] = rows
    text = json.dumps(ANALYSIS | {model: kept})
    RECORD.write_text(re.sub(r'(?<=[]}]), (?=["{])', ",\n", text) + "\n", encoding="utf-8")  # a row a line


# Figures

def numbers(model, what, column, layers=None):
    """A column of a table of the analysis: of all its rows, or of some layers."""
    rows = ANALYSIS[model][what]
    return [row[column] for row in (rows if layers is None else [rows[layer] for layer in layers])]


def loss(row, model="SmolLM2"):
    """Nats above fp16."""
    rows, row = DATA[model], named(row, model)
    return compared(rows[row], fp16_of(row, rows))[0]


def bits(row, model="SmolLM2"):
    return DATA[model][named(row, model)]["bits"]


def ends(row, length=4096):
    """Nats above fp16 in the first 512 tokens of SmolLM2's longer windows, and in the last: "0.379", "1.006"."""
    losses = results.along(results.at(row, length), DATA["SmolLM2"])
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
    """Of a page's tables and outputs: the numbers of a cell, or of the one so many columns after it."""
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

def span(values, form=".2f"):
    """0.61 to 0.70"""
    return f"{min(values):{form}} to {max(values):{form}}"


def both(values, form=".2f"):
    """0.54 and 0.81"""
    one, other = values
    return f"{one:{form}} and {other:{form}}"


def so(condition, sentence):
    """A sentence, as long as the data say so."""
    return sentence if condition else f"[not so] {sentence}"


# The pages

def readme():
    def ppl(draw):
        return math.exp(UNIT * mean(draw))
    draws, fp16 = DATA["embedded"]["rtn --bits 2"]["nll"], DATA["embedded"]["fp16"]["nll"][0]
    deltas = [ppl(draw) - ppl(fp16[:len(draw)]) for draw in draws]
    size = 32 * cell("docs/real_models.md", "LLaMA-2-7B", "cache of a token, KiB") / 1024  # GiB of 32K tokens
    weights = cell("docs/real_models.md", "LLaMA-2-7B", "weights, GiB")
    zero = "--bits 3 --formula integer-zero"
    cq, others = loss("cq --bits 2 {windows} --recent 0"), ("rtn", "pfn", "kvsink", "kvquant", "kivi", "ott", "skvq")
    kivi, per_token = "kivi --bits 4 --group-size 64", "rtn --bits 4 --group-size 64 --scheme token-dynamic"
    nvfp4, q4_0 = results.POINTS["nvfp4"], results.POINTS["q4_0, rotated"]
    five, marked = ends("kvsink --bits 3"), "kvsink --bits 3 --threshold 0.1"
    return [
        so(size > weights, f"at 32K tokens it takes {size:g} GiB, more than the weights ({weights} GiB)"),
        f"stores each number of the cache in, say, 2 bits instead of 16. Then the same cache takes {size / 8:g} GiB",
        f"over {WORDS[len(draws)]} draws, on {WORDS[len(draws[0])]} of these pieces, its delta runs from "
        f"{span(deltas, '.0f')}",
        f"over {len(fp16)} pieces of text",
        f"one of the {TALES['head_dim']} coordinates of a vector",
        so(loss("pfn --bits 3") < loss("rtn --bits 3"),
           f"keeping the first five tokens (`pfn`) lowers the loss by {less('pfn --bits 3', 'rtn --bits 3')} relative "
           "to `rtn`"),
        so(loss("kvsink --bits 3") < loss("pfn --bits 3"),
           f"`kvsink` lowers it by a further {less('kvsink --bits 3', 'pfn --bits 3')}"),
        so(loss(f"pfn {zero}") < loss(f"rtn {zero}"),
           f"With this formula, `pfn` lowers it by only {less(f'pfn {zero}', f'rtn {zero}')}, and `kvsink` by no more "
           f"({apart(f'kvsink {zero}', f'pfn {zero}', sign=True)})"),
        f"In windows of 4,096 tokens, `kvsink` at 3 bits loses {five[0]} in the first 512 and {five[1]} in the last",
        f"it loses {ends(marked)[1]} there, in {bits(results.at(marked, 4096)):.2f} true bits. With an integer zero "
        f"point, five are enough: {ends(f'kvsink {zero}')[1]}",
        so(cq < min(loss(f"{name} --bits 2") for name in others), "**At few bits, codebooks lose least**"),
        f"`cq` loses {cq:.3f} (its codebooks, 6 MB for all texts, are not counted), and `kvquant` "
        f"{loss('kvquant --bits 2'):.3f} with {bits('kvquant --bits 2'):.2f} true bits",
        so(len({bits(row) for row in (kivi, per_token, nvfp4, q4_0)}) == 1, f"At {bits(kivi)} bits, `kivi`"),
        f"loses {loss(kivi):.3f}. With a scale per token, integers lose {loss(per_token):.3f}, NVIDIA's nvfp4 "
        f"{loss(nvfp4):.3f}, and llama.cpp's q4_0, which rotates tokens first, {loss(q4_0):.3f}",
    ]


def analysis():
    """The embedded model; SmolLM2 in the last column of the table."""
    def at(what, column, layers=(2, 3)):
        return numbers("embedded", what, column, layers)

    def smol(what, column, layers=range(3, 10)):
        return numbers("SmolLM2", what, column, layers)

    def change(scheme, of):
        found = [errors[scheme, of, width]["change"] for width in (4, 3, 2)]
        return f"{min(found, key=abs):+.0%} to {max(found, key=abs):+.0%}"
    tales, small = ANALYSIS["embedded"], ANALYSIS["SmolLM2"]
    all_layers, late = range(4), range(12, 30)
    n_second = sum(len(found) > 1 for found in small["sinks at"])  # windows with a second sink
    ratio, out = (smol("outliers", column, range(30)) for column in ("ratio", "out"))
    errors = {(row["scheme"], row["of"], row["bits"]): row for row in tales["errors"]}
    widths = {(row["kept"], row["bits"]): row for row in tales["widths"]}
    with_sinks = widths["sinks", 2]["change"] / widths["nothing", 2]["change"]
    values = errors["token-static", "V", 2]
    n_exact, error = ([row[column] for row in tales["prefix"]] for column in ("n", "last"))
    rank, top = ({(row["of"], row["ranked by"]): row[column] for row in tales["anchors"]} for column in ("rank", "top"))
    times = "score x error"
    return [
        f"on {WORDS[tales['windows']]} windows of {tales['context']:,} tokens",
        f"on {WORDS[small['windows']]} windows of {small['context']} WikiText-2 tokens",
        # the table
        so(min(smol("sinks", "first", late)) > max(smol("sinks", "first", range(12))),
           f"the first token, above all in layers 12 to 29; in {WORDS[n_second]} of {WORDS[small['windows']]} windows "
           "a second one"),
        f"{at('outliers', 'ratio', [1])[0]:.0f} times the median |",
        f"{round(ratio[2], -2):.0f} times the median after layer 2, {round(ratio[11], -2):,.0f} times after layer 11; "
        f"cut to a {PARTS[round(out[27] / out[29])]} by the last two layers",
        f"values fall to a {PARTS[round(1 / at('norms', 'v sinks')[1], -1)]} of the others' norm",
        f"queries have {span(smol('norms', 'q sinks'))} of the others' norm, keys {span(smol('norms', 'k sinks'))}, "
        f"values {span(smol('norms', 'v sinks'))} (layers 3 to 9)",
        f"cosine {both(at('cosine', 'sinks'))}, others {both(at('cosine', 'others'))}",
        f"{span(smol('cosine', 'sinks'))}, others about {abs(mean(smol('cosine', 'others'))):.0f} (layers 3 to 9)",
        f"cosine {min(at('bias', 'consistency', all_layers)):.2f} and more, the rest "
        f"{span(at('bias', 'rest', all_layers))}",
        f"{min(smol('bias', 'consistency', [*range(3, 11), *late])):.2f} and more in layers 3 to 10 and 12 to 29",
        so(round(widths["nothing", 4]["bias change"], 1) == 1,
           f"at 4 bits: attention off by {widths['nothing', 4]['change']:.3f}, the bias by its whole size"),
        f"the largest step is a factor of {max(at('keys', 'cliff', all_layers)):.1f}",
        so(min(smol("keys", "sinks", late)) == 1,
           f"yes: a factor of {span(smol('keys', 'cliff', late), '.1f')} in layers 12 to 29, with only sinks below it"),
        f"rank correlation {rank['K', 'score']:.2f} (K) and {rank['V', 'score']:.2f} (V); times the row's error, "
        f"{rank['K', times]:.2f} and {rank['V', times]:.2f}",
        # sinks
        f"from {SPAN} queries: its own and the next {SPAN - 1}",
        so(HEADS == 0.1, f"whose score reaches {THRESHOLD} in a tenth of all heads. The last {FEWEST - 1} tokens"),
        so(HEADS == 0.1, f"tokens that reach {THRESHOLD} in a tenth of its heads"),
        f"Each window has {span([len(found) for found in tales['sinks at']], 'd')} sinks",
        f"In layers 2 and 3 the first token has a score of {both(at('sinks', 'first'))}, later sinks "
        f"{both(at('sinks', 'later'))}, other tokens at most {max(at('sinks', 'largest other')):.2f}",
        so(not any(at("sinks", "sinks", (0, 1))), "Layers 0 and 1 have no sinks"),
        # the outlier, norms, the bias
        so(at("outliers", "out c", [2])[0] < 1.1 * at("outliers", "out c", [1])[0],
           f"the down-projections of layers 0 and 1 write the outlier into channel {at('outliers', 'channel')[0]} "
           "(emergence), layer 2 adds little (stabilization)"),
        f"In layers 2 and 3 the sinks' values have {both(at('norms', 'v sinks'))} of the others' norm, and their "
        f"queries {both(at('norms', 'q sinks'))}, as in",
        f"Their keys have {both(at('norms', 'k sinks'))}",
        f"the largest cosine is a sink's in {both(at('cosine', 'largest'), '.0%')} of cases",
        f"layer 0, where the rest is as consistent ({at('bias', 'rest', [0])[0]:.2f}), and nothing for a single sink "
        "(always 1)",
        f"In layers 2 and 3 sinks receive {both(at('bias', 'attention'))} of the attention, but the bias has only "
        f"{both(at('bias', 'size'))} of the output's size, because their values are small",
        # errors
        f"| K {change('token-dynamic', 'K')}, V {change('token-dynamic', 'V')} |",
        f"| {change('channel-dynamic', 'K')} |",
        so([k < 1 for k in at("norms", "k sinks")] == [True, False], "since sinks have small keys in layer 2 only"),
        f"because in {CALIBRATION_WINDOWS} windows some other token reaches as far",
        so(1.6 < values["with"] / values["without"] < 2,
           "in a static grid of 2 bits, their values have nearly twice the error of the others"),
        so(widths["nothing", 8]["bias change"] < 0.1 < widths["nothing", 7]["bias change"],
           "The bias's error falls below a tenth of its size only at 8 bits"),
        f"with the sinks kept, it is {widths['sinks', 4]['bias change']:.2f} at 4 bits. At 2 bits, keeping them "
        f"removes only a {PARTS[round(1 / (1 - with_sinks))]} of the attention's error",
        # OTT, IntactKV, AnTKV
        so(at("keys", "sinks")[1] == 0 and at("norms", "k sinks")[1] > 1,
           f"In layer 2, {at('keys', 'sinks')[0]:.0%} of the keys below the largest step are sinks'; in layer 3, where "
           "sinks have large keys, none is"),
        so(error[4] - error[5] > 2 * (error[3] - error[4]),
           "An exact third sink removes more than twice as much of the last layer's error as the "
           f"{n_exact[5] - n_exact[3]:.0f} tokens between it and the second"),
        f"the 1% of keys that it ranks highest hold {top['K', 'score']:.0%} of the damage, and the 1% with the most "
        f"damage {top['K', 'itself (ceiling)']:.0%}",
        so(top["V", times] == top["V", "itself (ceiling)"],
           f"the score finds {top['K', times]:.0%} for keys, the maximum for values"),
    ]


def methods():
    def clip(bits):
        return min(ClippedGroups(bits=bits, heads=1, width=8, group_size=4).choices)[0]
    sinks, first = (numbers("SmolLM2", "outliers", "out", layers) for layers in (range(2, 8), range(11, 28)))
    late, pfn = loss("kvsink --bits 3 {late}"), loss("pfn --bits 3")
    return [
        # what the examples do not print
        f"The step is {(7.0 - 0.5) / 3:.2f} with token 0 in the range and {(7.0 - 4.0) / 3:g} without it",
        f"A grid for each channel has steps of {(1.3 - 0.1) / 3:.1f} and {(11.0 - 8.0) / 3:g}. One grid for all eight "
        f"numbers has steps of {(11.0 - 0.1) / 3:.2f}",
        f"both channels have steps of {(5.5 - 4.0) / 3:g}, and the other tokens come back exactly. With it, steps grow "
        f"to {(5.5 - 0.5) / 3:.2f} and {(0.25 + 3.5) / 3:.2f}",
        f"moves the range to {0.9 * 8:.1f} to {0.9 * 11:.1f}",
        f"to {9.5 - 0.9 * 1.5:.2f} to {9.5 + 0.9 * 1.5:.2f}",
        # kvsink
        so([find_layer(torch.ones(6), torch.full([6], ratio)) for ratio in (5, 4.99)] == [0, None],
           "its largest $|h|$ is at least 5 times the tokens' median"),
        f"several tokens have {span(sinks, '.0f')} after layers 2 to 7, the first token {span(first, ',.0f')} after "
        "layers 11 to 27",
        so(late > pfn, f"found $l_E = 11$, with which `kvsink` at 3 bits is {late - pfn:.2f} nats worse than `pfn`"),
        # skvq, cq
        f"from 1.00 to {clip(2):.2f}, or to {clip(1):.2f} for codes of two or three levels",
        f"therefore see 64 calibration windows by default, not {CALIBRATION_WINDOWS}",
    ]


def results_md():
    def straight(at):
        """The loss on the line of log loss through cq's rows at 2 and 4 bits."""
        low, high = (math.log(loss(f"cq --bits {width} {{windows}} --recent 0")) for width in (2, 4))
        return math.exp(low + (at - 2) / 2 * (high - low))
    few = [row for row in DATA["SmolLM2"].values() if 1 < len(row["nll"]) < DRAWS]
    one, five = (f"antkv --anchors {share} --bits 2 {{windows}} --recent 0" for share in ("1%", "5%"))
    kivi, stream = "kivi --bits 2 --group-size 32 --recent 32", "--protocol stream"
    first, second = (cell("docs/real_models.md", f"{model}, WikiText-2", "0% outliers")
                     for model in ("LLaMA-2-7B", "LLaMA-3-8B"))
    pool = [finding(claim, "embedded", DATA).sign for claim in CLAIMS["OTT"] if claim.second.startswith("kivi")][:4]
    return [
        f'In the cell "{apart("kvsink --bits 3", "pfn --bits 3", sign=True)} (p < .001, {DRAWS} x {WINDOWS})"',
        f'"{DRAWS} x {WINDOWS}" is {WORDS[DRAWS]} calibrations, each on a text of its own, and {WORDS[WINDOWS]} '
        f'windows of the test text. "1 x {2 * WINDOWS}" is sixteen windows of rows that need no calibration',
        f"differ by more than {results.UNEQUAL}",
        f"{WORDS[len(few)].capitalize()} rows at 1 bit have {WORDS[len(few[0]['nll'])]} calibrations",
        f"perplexity at 16 bits is {math.exp(UNIT * mean(DATA['SmolLM2']['fp16']['nll'][0])):.1f}",
        so(all(loss(f"rtn --k-bits 16 --v-bits {n}", model) > 2 * loss(f"rtn --k-bits {n} --v-bits 16", model)
               for model, n in (("embedded", 2), ("SmolLM2", 3))), "Most of the harm is in the values"),
        f"LLaMA-2-7B's perplexity falls from {first[0]} to {first[1]}, by {math.log(first[0] / first[1]):.3f} nats, "
        f"and LLaMA-3-8B's from {second[0]} to {second[1]}, by {math.log(second[0] / second[1]):.3f}",
        so(straight(bits(one)) < loss(one) and straight(bits(five)) < loss(five),
           f"predicts a loss of {straight(bits(one)):.3f} (1%) and {straight(bits(five)):.3f} (5%). With anchors the "
           f"loss is larger, so anchors are the worse use of these bits: {loss(one):.3f} and {loss(five):.3f}"),
        f"with the 41 largest marks, a hundredth of the text, loses {ends('kvsink --bits 3 --preserve 41')[1]}, and "
        f"`pfn` with the first 41 tokens {ends('pfn --bits 3 --preserve 41')[1]}",
        f"`kvsink` takes {bits('kvsink --bits 3'):.2f} true bits in 512 tokens and "
        f"{bits(results.at('kvsink --bits 3', 4096)):.2f} in 4,096; with all that are marked, "
        f"{bits(results.at('kvsink --bits 3 --threshold 0.1', 4096)):.2f}",
        f"`kivi` at 2 bits loses {loss(f'{kivi} {stream}'):.3f} instead of {loss(kivi):.3f}, in "
        f"{bits(f'{kivi} {stream}'):.2f} true bits instead of {bits(kivi):.2f}",
        so(set(pool) == {"none"}, f"it shows no gain by OTT's pool ({2 * WINDOWS} windows)"),
    ]


def own_codec():
    formats, kivi = "docs/examples/formats.py:Formats", "kivi --bits 4 --group-size 64"
    keys, values = (loss(f"{formats} --scheme {k} --v-scheme {v}") for k, v in (("nvfp4", "fp16"), ("fp16", "nvfp4")))
    turbo = "docs/examples/turboquant.py:TurboQuant --bits 4"
    return [
        so(keys > values, f"nvfp4 loses {apart(results.POINTS['nvfp4'], kivi)} than `kivi`, most of it in "
                          "the keys"),
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
        f"every method but `rtn` is within {max(behind):.0f} points of 16 bits",
        so(lost(rtn) > lost(antkv), f"`rtn` at 4 bits has more loss than `antkv` at 2 ({lost(rtn):.3f} and "
                                    f"{lost(antkv):.3f}) but finds {of(rtn):.0f} facts, `antkv` {of(antkv):.0f}"),
        so(lost(pfn) > lost(kivi), f"`pfn` at 3 bits has more loss than `kivi` at 2, but finds {of(pfn):.0f} facts, "
                                   f"`kivi` {of(kivi):.0f}"),
    ]


def tour():
    return [f"$1.5 \\cdot 1 - 3.7 = {1.5 - 3.7:.1f}$", f"`rtn` falls from {cell('README.md', 'rtn', 'ppl'):.1f}"]


def walkthrough():
    d = TALES["head_dim"]
    return [
        f"$1.4 \\cdot 1 - 3.5 = {1.4 - 3.5:.1f}$",
        f"hold codes 0 to {d // 4 - 1}, the next two {d // 4} to {d // 2 - 1}, and so on",
        f"This byte holds channels 0, {d // 4}, {d // 2} and {3 * d // 4} of",
        f"The {d} channels of a head take {2 * d // 8} bytes instead of {2 * d}",
    ]


def embedded_model():
    return [
        f"{TALES['num_hidden_layers']} layers, width {TALES['hidden_size']}, {TALES['num_attention_heads']} query "
        f"heads of {TALES['head_dim']} channels on {WORDS[TALES['num_key_value_heads']]} KV head, "
        f"{TALES['max_position_embeddings']:,} positions and a vocabulary of {TALES['vocab_size']:,}",
    ]


def serving():
    row = results.SERVED["q8_0 keys, q4_0 values, both rotated"]
    keys, values = (loss(f"docs/examples/formats.py:Formats --scheme {k} --v-scheme {v}")
                    for k, v in (("nvfp4", "fp16"), ("fp16", "nvfp4")))
    return [
        so(keys > values, f"With nvfp4 for the keys alone, SmolLM2 loses {keys:.3f} nats, with nvfp4 for the values "
                          f"alone {values:.3f}"),
        so(f"{loss(row):.3f}" == f"{loss(results.EIGHT['fp8']):.3f}",
           f"<code>-ctk q8_0 -ctv q4_0</code> takes {bits(row)} bits and loses {loss(row):.3f}, as much as fp8"),
    ]


COMPUTED = {"README.md": readme, "analysis.md": analysis, "methods.md": methods, "results.md": results_md,
            "own_codec.md": own_codec, "real_models.md": real_models, "tour.md": tour, "walkthrough.md": walkthrough,
            "embedded_model.md": embedded_model, "serving.md": serving}


def of_page(name):
    """The sentences of a page, computed and typed."""
    pages = dict(part.split("\n", 1) for part in TYPED.read_text(encoding="utf-8").split("# ")[1:])
    return [*COMPUTED.get(name, list)(), *filter(None, pages.get(name, "").splitlines())]


if __name__ == "__main__":
    record(*sys.argv[1:])
