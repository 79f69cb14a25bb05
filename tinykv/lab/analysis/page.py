"""One HTML page that opens from disk and needs no network: the story of a KV cache in few bits, on a text whose answer
is lost and comes back; and then every method, number of bits and token to try.

The texts are those of --text, the last word of each its answer, or windows of --data, and their questions. The page
tells the story of one: the answer whose probability `kvsink` raises most above that of `rtn`, at any number of bits.
Beside it is what every method makes of all texts.

    python -m tinykv.lab.analysis.page --out cache.html
    python -m tinykv.lab.analysis.page --text texts.txt --data calibration.txt --model path/to/a/model
"""
import base64
import gzip
import inspect
import json
import math
import textwrap
from pathlib import Path

import torch

from tinykv import UserError
from tinykv.cache import KVCache
from tinykv.calibrate import calibrate
from tinykv.codecs.base import Codes, largest_code, pack
from tinykv.evaluate import chunks_of
from tinykv.lab import cli, files, shared_flags
from tinykv.lab.analysis.load import add_flags, load_model
from tinykv.lab.analysis.sinks import attention_map, find_sinks, sink_scores
from tinykv.lab.analysis.walk import walk
from tinykv.lab.data import load_windows
from tinykv.lab.data.questions import Questions, read_questions
from tinykv.methods.registry import METHODS

LONGEST = 192  # tokens of a text
WINDOWS = 48  # of --data, unless told otherwise
BLOCK = 16  # tokens quantized at a time, and recent ones: few enough that something happens in a short text
BITS = (4, 3, 2)
TOP = 5  # most likely tokens that are shown
CHANNELS = 32  # of a key or value that are shown, at most
LEVELS = {"k": 120, "v": 500}  # steps between the smallest and the largest number of the page's rows
TEMPLATE = Path(__file__).with_name("page.html")
LADDER = Path(__file__).parents[3] / "docs" / "ladder"
CODE = {  # of a step: the page of the ladder that does it, and words of the first and the last line to show
    "cache": ("1_sinks.py", "def update", "return self.rope"), "levels": ("1_sinks.py", "def encode", "return c0"),
    "broken": ("1_sinks.py", "def decode", "return scale"), "sinks": ("6_codebooks.py", "scores = q @", "A = scores"),
    "value": ("1_sinks.py", "def read", "return x"), "keep": ("1_sinks.py", "def kvsink", "kept.scatter_"),
    "zero": ("1_sinks.py", "def grid", "return scale"), "own": ("2_window.py", "def grid_of", "return grid"),
    "pool": ("3_pool.py", "def ott", "kept.scatter_"), "codebook": ("6_codebooks.py", "def decode", "return codebook"),
    "bits": ("1_sinks.py", "def bits", "return 8")}
GROUPS = {"recent": BLOCK, "group_size": BLOCK}
SHOWN = {  # what the page calls a method: its name, its settings
    "rtn": ("rtn", {}), "rtn, a level at 0": ("rtn", {"formula": "integer-zero"}), "pfn": ("pfn", {}),
    "kvsink": ("kvsink", {}), "kivi": ("kivi", GROUPS), "ott": ("ott", GROUPS), "skvq": ("skvq", {"recent": BLOCK}),
    "intactkv": ("intactkv", {}), "kvquant": ("kvquant", {}), "cq": ("cq", {}), "antkv": ("antkv", {"recent": BLOCK})}


# One run of a method

def make_methods(model, calibration):
    """Each method of SHOWN, calibrated: {label: {bits: Method}}; and those that the model refuses: {label: why}."""
    methods, refused = {}, {}
    for label, (name, settings) in cli.bar(SHOWN.items(), "calibrating", unit="method"):
        try:
            methods[label] = {bits: make_method(model, calibration, name, bits, settings) for bits in BITS}
        except UserError as error:
            refused[label] = str(error)
    return methods, refused


def make_method(model, calibration, name, bits, settings):
    """Calibrated, with blocks of the page's size where the method's groups allow it."""
    # 4^b centroids for a pair of numbers are b bits for each
    of_bits = {"vq": f"d2m{4 ** bits}"} if name in ("cq", "antkv") else {"k_bits": bits, "v_bits": bits}
    method = METHODS[name](model.config, **of_bits, **settings)
    calibrate(model, method, calibration)
    if method.prefix is not None:
        method.prefix.fill(model, model)
    if all(codec.tokens_per_group <= BLOCK for _, _, codec in method.each_codec()):
        method.block = min(method.block, BLOCK)
    return method


@torch.inference_mode()
def read(model, method, tokens, exact=None, layer=0, head=0):
    """Read tokens (B, T) as in generation -> the cache, log-probabilities (B, T, vocab) of what follows each token, and
    the history: [(tokens read, states of a layer's keys)].

    exact: the log-probabilities in 16 bits, which are those at a prefix's own positions.
    """
    cache, parts, history = KVCache(model, method), [], []
    for chunk in chunks_of(tokens, cache):
        parts.append(model(chunk, cache).float().log_softmax(-1))
        history.append((len(cache), states_of(cache.layers[layer].keys, head)))
    if cache.start:
        parts.insert(0, exact[:, :cache.start])
    return cache, torch.cat(parts, dim=1), history


def states_of(rows, head=0):
    """The keys, or values, of a cache (`CachedRows`) -> where each token's is: "r" recent, "c" coded, "k" kept."""
    states = ["c"] * rows.n_coded + ["r"] * rows.recent.shape[2]
    if rows.kept_positions is not None:
        of_heads = rows.kept_positions[0]  # (1 or Hkv, p)
        for position in of_heads[min(head, len(of_heads) - 1)].tolist():
            states[position] = "k"
    return "".join(states)


def losses(logp, tokens):
    """Of each token but the first, in nats: (B, T - 1)."""
    return -logp[:, :-1].gather(2, tokens[:, 1:, None])[..., 0]


@torch.inference_mode()
def written(model, method, tokens, exact, n=5):
    """The n tokens that the model writes after tokens (T), each time the most likely one."""
    cache, _, _ = read(model, method, tokens[None, :-1], exact)
    return model.generate(tokens[None, -1:], n, cache)[0, 1:].tolist()


# All texts, and the one that is shown

def measure(model, method, texts, exact=None):
    """What a method makes of all texts: its loss in nats a token, how many answers are right, the probability of each
    answer's first token, and the log-probabilities. exact: those of 16 bits."""
    tokens, T = texts.tokens, texts.tokens.shape[1]
    is_text = torch.arange(1, T) < torch.tensor(texts.lengths)[:, None]  # (W, T - 1): no filling
    places = [(w, a, b) for w, spans in enumerate(texts.answers) for a, b in spans]
    _, logp, _ = read(model, method, tokens, exact)
    nll = losses(logp, tokens).cpu()  # (W, T - 1)
    hit = (logp[:, :-1].argmax(-1) == tokens[:, 1:]).cpu()  # (W, T - 1)
    right = sum(bool(hit[w, a - 1:b - 1].all()) for w, a, b in places)
    return round(nll[is_text].mean().item(), 3), right, [math.exp(-nll[w, a - 1]) for w, a, _ in places], logp


def pick(texts, results, chances):
    """The text, the position before its answer, and the bits of the story. Without questions the first text, and the
    bits at which kvsink's loss is furthest below rtn's."""
    places = [(w, a - 1) for w, spans in enumerate(texts.answers) for a, _ in spans]
    if not places:
        return 0, None, max(BITS, key=lambda bits: results["rtn"][bits][0] - results["kvsink"][bits][0])
    gains = {(i, bits): min(chances["fp16", 16][i], chances["kvsink", bits][i]) - chances["rtn", bits][i]
             for i in range(len(places)) for bits in BITS}
    i, bits = max(gains, key=gains.get)
    return *places[i], bits


# What the page holds

def content(model, tokenizer, texts, calibration):
    """All that the page shows."""
    config = model.config
    methods, refused = make_methods(model, calibration)
    methods = {"fp16": {16: METHODS["fp16"](config)}, **methods}
    results, chances, exact = {label: {} for label in methods}, {}, None
    for label, by_bits in methods.items():
        for bits, method in by_bits.items():
            loss, right, chances[label, bits], logp = measure(model, method, texts, exact)
            results[label][bits] = [loss, right]
            exact = logp if exact is None else exact  # 16 bits go first
    w, at, bits = pick(texts, results, chances)
    tokens = texts.tokens[w, :texts.lengths[w]]  # (T)
    sinks = find_sinks(model, tokens[None])[0].cpu().nonzero()[:, 0].tolist()
    layer, head, attention = shown_layer(model, tokens, sinks)

    # every method on the text
    runs, pieces, rows, exact = {}, {}, {}, None
    for label, by_bits in methods.items():
        for b, method in by_bits.items():
            cache, logp, history = read(model, method, tokens[None], exact, layer, head)
            exact = logp if exact is None else exact
            top = logp[0].topk(TOP)
            runs[f"{label} {b}"] = run = {
                "loss": [round(100 * x) for x in losses(logp, tokens[None])[0].tolist()],
                "top": [[pieces.setdefault(t, len(pieces)) for t in of_token] for of_token in top.indices.tolist()],
                "p": [[round(1000 * x) for x in of_token] for of_token in top.values.exp().tolist()],
                "history": history, "bytes": cache.nbytes, "rope": method.rope}
            rows[f"{label} {b}"] = shown_rows(cache, layer, head)
            if at is not None:
                run["answer"] = logp[0, at].exp()
                run["writes"] = tokenizer.decode(written(model, method, tokens[:at + 1], exact))

    # what is the same for all of them
    words = [] if at is None else [int(tokens[at + 1])]  # the answer's first token, and other likely ones
    for name in ("fp16 16", f"rtn {bits}", f"kvsink {bits}") if words else ():
        words += runs[name]["answer"].topk(3).indices.tolist()
    words = [*dict.fromkeys(words)][:6]
    bounds = {kind: [min(of_run[kind].min().item() for of_run in rows.values()),
                     max(of_run[kind].max().item() for of_run in rows.values())] for kind in "kv"}
    for name, run in runs.items():
        run |= {kind: characters(rows[name][kind], *bounds[kind], LEVELS[kind]) for kind in "kv"}
        if at is not None:
            run["answer"] = [round(run["answer"][t].item(), 4) for t in words]
    levels = {label: {b: levels_of(method.codecs[layer].v, head) for b, method in by_bits.items()}
              for label, by_bits in methods.items() if label.startswith(("rtn", "pfn", "kvsink"))}
    return {
        "tokens": words_of(tokens.tolist(), tokenizer), "sinks": sinks, "at": at, "bits": bits,
        "layer": layer, "head": head, "layers": config.num_hidden_layers, "heads": config.num_key_value_heads,
        "d": config.head_dim, "channels": min(config.head_dim, CHANNELS), "attention": attention,
        "exact": rows_of_fp16(model, tokens, layer, head), "levels": levels, "runs": runs,
        "bounds": {kind: [*bounds[kind], LEVELS[kind]] for kind in "kv"}, "all": results,
        "pieces": [tokenizer.decode([t]) for t in pieces], "answer": [tokenizer.decode([t]) for t in words],
        "texts": len(texts.tokens), "answers": sum(map(len, texts.answers)), "refused": refused,
        "about": {label: by_bits[min(by_bits)].describe() for label, by_bits in methods.items()},
        "code": {step: lines_of(*where) for step, where in CODE.items()},
        "what": {label: inspect.getmodule(METHODS[name]).__doc__.splitlines()[0] for label, (name, _) in SHOWN.items()}}


def lines_of(file, first, last):
    """Lines of a page of the ladder, and the first of them that the debugger can stop at."""
    lines = (LADDER / file).read_text(encoding="utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if first in line)
    end = next(i for i, line in enumerate(lines) if i >= start and last in line)
    stop = next(i for i in range(start, end + 1) if not lines[i].lstrip().startswith(("def", "#")))
    return {"file": f"docs/ladder/{file}", "line": stop + 1, "text": textwrap.dedent("\n".join(lines[start:end + 1]))}


def shown_rows(cache, layer, head):
    """The keys, as they are stored, and the values of one layer and KV head: {"k", "v"}, each (T, channels)."""
    held = {"k": cache.layers[layer].keys, "v": cache.layers[layer].values}
    return {kind: rows.read()[0, head, :, :CHANNELS].float().cpu() for kind, rows in held.items()}


def rows_of_fp16(model, tokens, layer, head):
    """Keys before and after RoPE, and values, in 16 bits: lists of `digits`."""
    numbers = {}
    for rope in ("pre", "post"):
        method = METHODS["fp16"](model.config)
        method.rope = rope
        cache, _, _ = read(model, method, tokens[None])
        rows = shown_rows(cache, layer, head)
        numbers |= {rope: [digits(row) for row in rows["k"]], "v": [digits(row) for row in rows["v"]]}
    return numbers


def shown_layer(model, tokens, sinks):
    """The layer and KV head whose weakest sink receives most, and the layer's attention in percent, mean over heads."""
    layers = walk(model, tokens)
    n_heads = model.config.num_key_value_heads
    scores = torch.stack([sink_scores(at) for at in layers])  # (L, H, T)
    scores = scores.unflatten(1, (n_heads, -1)).mean(2)  # (L, Hkv, T)
    weakest = scores[:, :, sinks or [0]].amin(-1)  # (L, Hkv)
    layer, head = divmod(weakest.argmax().item(), n_heads)
    A = attention_map(layers[layer], len(tokens))  # (T, T)
    return layer, head, [[round(100 * x) for x in A[i, :i + 1].tolist()] for i in range(len(tokens))]


def levels_of(codec, head):
    """The levels of a static grid of values, of one KV head."""
    codes = torch.arange(codec.width) % (largest_code(codec.bits) + 1)  # (d): every code
    packed = pack(codes.to(codec.scale.device, torch.uint8).expand(1, len(codec.scale), 1, -1), codec.bits)
    return codec.decode(Codes(packed))[0, head, 0].unique().tolist()


def digits(row):
    """Numbers (d) to three digits of the largest: [exponent, whole numbers ..], each times 10**exponent."""
    largest = row.abs().max().item()
    exponent = math.floor(math.log10(largest)) - 2 if largest > 0 else 0
    return [exponent, *(round(x / 10 ** exponent) for x in row.tolist())]


def characters(rows, lo, hi, levels):
    """Rows (T, d) -> a string, a character a number: steps of (hi - lo) / levels from U+0100 on."""
    steps = ((rows - lo) / (hi - lo) * levels).round().int()  # (T, d)
    return "".join(chr(0x100 + x) for x in steps.T.flatten().tolist())  # a channel after the other: it packs better


def words_of(ids, tokenizer):
    """The text of each token, with the blanks around it."""
    texts = [tokenizer.decode(ids[:n]) for n in range(len(ids) + 1)]
    words = zip(ids, texts, texts[1:])
    return ["<s>" if token == tokenizer.bos_id else now[len(before):] for token, before, now in words]


def write(path, page):
    """Write the page of this content, whole or not at all."""
    data = json.dumps(page, separators=(",", ":"), ensure_ascii=False).encode()
    packed = base64.b64encode(gzip.compress(data, mtime=0)).decode()
    html = TEMPLATE.read_text().replace("DATA", packed, 1)
    files.write(path, lambda part: part.write_text(html), "tinykv-page")


# The command

def parser():
    p = cli.Parser(prog="python -m tinykv.lab.analysis.page", description=__doc__)
    add_flags(p, windows=WINDOWS, longest=LONGEST)
    p.add_argument("--text", metavar="FILE",
                   help="texts to choose from, a blank line between them; the last word of each is the answer to its "
                        "question (default: windows of --data)")
    p.add_argument("--out", metavar="FILE", default="cache.html", help="the page")
    return p


def write_page(args):
    shared_flags.check_outputs(args, out="tinykv-page")
    model = load_model(args, LONGEST)
    if args.text:
        texts = read_questions(args.text, args.tokenizer, LONGEST)
    else:
        windows = load_windows(args.data, args.tokenizer, args.context, args.windows, "test", bos=args.bos)
        texts = Questions(windows.tokens, [args.context] * args.windows, windows.answers)
    texts.tokens = texts.tokens.to(args.device)  # (W, T)
    about = content(model, args.tokenizer, texts, shared_flags.calibration_text(args))
    write(args.out, {"model": Path(args.model).absolute().name, **about})
    print(f"wrote {args.out}")


def main():
    cli.run(parser(), write_page)


if __name__ == "__main__":
    main()
