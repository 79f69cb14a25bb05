"""The papers' ideas against the errors of sinks, crossed: docs/crossing.md's numbers, docs/crossing.json.

    python docs/programs/crossing.py --model path/to/SmolLM2-135M-Instruct --data wikitext2-test.txt
    python docs/programs/crossing.py --embedded

A cell is one choice of each factor, at so many bits:

    grid    which numbers share a scale and a zero point, and where it comes from
              static    keys: a channel, before RoPE; values: a head. From other text
              kivi128   keys: 128 tokens of a channel, after RoPE; values: a token. From the numbers themselves
              kivi32    32 of them
              token     keys, after RoPE, and values: a token
    zero    offset (the group's minimum), integer (a whole number of steps), symmetric (llama.cpp's q4_0: 0 is a level
            and the number farthest from it another), quarter (offset, and one step more than there are levels between)
    keep    which tokens are treated apart, and how
              none
              first, found   five, in 16 bits and out of the range of others: the first, or those with the largest marks
              marked         all with a mark of at least 0.1 of the largest (kvsink --threshold 0.1)
              own            the same tokens, with a grid of their own, of as many bits
              range          the same tokens, out of the range of others, but coded with it
              small          the five with the smallest keys, in each head (OTT)
              numbers        1% of all numbers, those that stretch the range (KVQuant); with kivi128 of keys alone
    rotated, normed          a Hadamard matrix over a head's channels; keys divided by their token's norm (OScaR)

A whole text comes at once, and every token that is not kept is read as its codes. Window i reads grids that calibration
draw i made, eight windows each, so an error over windows covers both.
"""
import argparse
import itertools
import math

import torch
import torch.nn.functional as F
from needles import FACTS, first_windows
from results import ROOT, read_data, write_data

from tinykv import hf
from tinykv.data import load_windows
from tinykv.data.windows import halves

RECORD = ROOT / "docs" / "crossing.json"
WINDOWS = {"SmolLM2": 4, "embedded": 16}
DRAW, N, THRESHOLD = 8, 5, 0.1  # calibration windows of a test window; tokens; a mark, of the largest
MARKS = {"SmolLM2": (2, 507), "embedded": (1, 49)}  # layer and channel where the marks of sinks show
GROUPS = {"kivi128": 128, "kivi32": 32}


FOUR, TURNS = [f"{zero} {keep}" for zero in ("offset", "integer") for keep in ("none", "marked")], ("", " rotated")


def crossed(bits, *grids):
    return [f"{bits} {grid} {four}{turn}" for turn in TURNS for grid in grids for four in FOUR]


# {what is crossed: its cells}, the most telling first
CELLS = {
    "3 bits": crossed(3, "static", "kivi128", "token"),
    "3 bits, apart": [f"3 static {rest}" for rest in (
        "offset own", "integer own", "offset range", "symmetric none", "symmetric marked", "quarter none",
        "offset found", "integer found", "offset first", "integer first", "offset numbers", "integer numbers")],
    "2 bits": crossed(2, "kivi128", "kivi32"),
    "2 bits, apart": [f"2 {rest}" for rest in (
        "kivi128 offset own", "kivi128 offset range", "kivi128 offset small", "kivi128 offset numbers",
        "kivi128 symmetric none", "kivi128 offset none normed", "kivi128 offset none rotated normed",
        "kivi128 integer none rotated normed", "kivi128 offset marked rotated normed", "kivi128 offset found",
        "kivi32 offset none normed", "kivi32 offset none rotated normed", "kivi32 offset marked rotated normed",
        "static offset marked", "static integer none", "static integer marked", "token offset none rotated")],
    "4 bits": [f"4 {rest}" for rest in (
        "static offset none", "static offset marked", "static integer none", "static integer marked",
        "kivi128 offset none", "kivi128 offset marked", "kivi128 integer none", "kivi128 offset none rotated",
        "kivi128 offset marked rotated", "token offset none", "token integer none rotated",
        "token offset none rotated")]}
ONLY_EMBEDDED = crossed(2, "static", "token") + [f"2 static {rest}" for rest in (
    "offset own", "integer own", "offset range", "symmetric none", "quarter none", "offset found", "offset first",
    "integer found", "integer first")]
LONG = [f"3 {rest}" for rest in (
    "static offset found", "static offset marked", "static integer none", "static integer marked",
    "kivi128 offset none", "kivi128 offset marked")]
FACT_ROWS = (
    "fp16", "4 static offset marked", "4 static integer none", "3 static offset marked", "3 static integer none",
    "3 static integer marked", "4 token offset none", "4 kivi128 offset none", "3 kivi128 offset none",
    "3 kivi128 offset marked", "3 kivi128 offset none rotated", "2 kivi32 offset none",
    "2 kivi32 offset none rotated normed", "2 kivi128 offset marked rotated")


def half(x):
    return x.half().float()


def read_back(x, low, high, bits, zero):
    """Numbers as their codes are read. low, high: the range of those that share a grid."""
    most = 2 ** bits - 1
    if zero == "symmetric":
        far = torch.where(high > -low, high, low)
        scale = half(far / -2 ** (bits - 1))
        scale = torch.where(scale == 0, 1e-5, scale)
        return (x / scale).round().clamp(-2 ** (bits - 1), 2 ** (bits - 1) - 1) * scale
    if zero == "integer":
        scale = torch.maximum((high - low) / most, torch.maximum(low.abs(), high.abs()) / 2 ** 13)
        scale = half(scale.clamp(1e-5))
        z = -torch.round(low / scale)
        return (((x / scale).round() + z).clamp(0, most) - z) * scale
    steps = most + 1 if zero == "quarter" else most
    scale, z = half(((high - low) / steps).clamp(1e-5)), half(low)
    return ((x - z) / scale).round().clamp(0, most) * scale + z


def bounds(x, dim, out):
    """The range over dim, without the numbers in `out`; of none, 0 and 0."""
    low = x.masked_fill(out, torch.inf).amin(dim, keepdim=True)
    high = x.masked_fill(out, -torch.inf).amax(dim, keepdim=True)
    return low.masked_fill(low.isinf(), 0), high.masked_fill(high.isinf(), 0)


def hadamard(d):
    H = torch.ones(1, 1)
    while len(H) < d:
        H = torch.cat([torch.cat([H, H], 1), torch.cat([H, -H], 1)])
    return H / math.sqrt(d)  # its own inverse


class Exact:
    """A cache of 16 bits, and what every cache here is asked."""

    def __init__(self, model, marks):
        self.rope, self.at, self.channel = model.rope, *marks
        self.H = hadamard(model.config.head_dim)
        self.mark = None  # (B, T)

    def expect(self, tokens):
        return tokens, 0

    def observe(self, layer, hidden):
        if layer == self.at:
            self.mark = hidden[..., self.channel].abs()

    def update(self, layer, q, k, v, seen):
        return self.rope.rotate(half(k)), half(v)

    def apart(self, keep, k):
        """Which tokens are treated apart: (B, 1 or Hkv, T)."""
        B, Hkv, T, _ = k.shape
        none = torch.zeros(B, 1, T, dtype=torch.bool)
        if keep == "first":
            none[..., :N] = True
        elif keep == "small":
            smallest = k.abs().sum(-1).topk(N, dim=-1, largest=False).indices  # (B, Hkv, N)
            return none.repeat(1, Hkv, 1).scatter(2, smallest, True)
        elif keep not in ("none", "numbers") and self.mark is not None:  # after the layer that marks
            if keep == "found":
                return none.scatter(2, self.mark.topk(N, dim=1).indices[:, None], True)
            return (self.mark >= THRESHOLD * self.mark.amax(1, keepdim=True))[:, None]
        return none


class Calibration(Exact):
    """Reads texts in 16 bits, and takes the ranges of static grids."""

    def __init__(self, model, marks):
        super().__init__(model, marks)
        self.ranges = {}  # {(layer, "k" or "v", keep, rotated): (low, high)}

    def update(self, layer, q, k, v, seen):
        for kind, x in (("k", half(k)), ("v", half(v))):
            dims = (0, 2) if kind == "k" else (0, 2, 3)  # (1, Hkv, 1, d) or (1, Hkv, 1, 1)
            for keep, turned in itertools.product(("none", "first", "found", "marked"), (False, True)):
                out = self.apart(keep, k)[..., None]
                self.ranges[layer, kind, keep, turned] = bounds(x @ self.H if turned else x, dims, out)
            rows = x.transpose(0, 1).flatten(1, 2)  # (Hkv, numbers, d)
            rows = rows if kind == "k" else rows.flatten(1)[..., None]  # (Hkv, numbers, d or 1)
            rows, n = rows.sort(1).values[None], rows.shape[1]
            self.ranges[layer, kind, "numbers", False] = rows[:, :, [n // 200]], rows[:, :, [-n // 200]]
        return super().update(layer, q, k, v, seen)


class Cache(Exact):
    def __init__(self, model, marks, cell, ranges):
        super().__init__(model, marks)
        bits, self.grid, self.zero, self.keep, *more = cell.split()
        self.bits, self.rotated, self.normed = int(bits), "rotated" in more, "normed" in more
        self.ranges, self.shares = ranges, []

    def update(self, layer, q, k, v, seen):
        k, v = half(k), half(v)
        if self.grid != "static":
            k = half(self.rope.rotate(k))
        out = self.apart(self.keep, k)  # (B, 1 or Hkv, T)
        self.shares.append(out.float().mean().item())
        K, V = self.read(layer, "k", k, out[..., None]), self.read(layer, "v", v, out[..., None])
        return self.rope.rotate(K) if self.grid == "static" else K, V

    def read(self, layer, kind, x, out):
        """x (B, Hkv, T, d) as it is read. out (B, 1 or Hkv, T, 1): tokens that are treated apart."""
        y = x @ self.H if self.rotated else x
        length = torch.ones(())
        if self.normed and kind == "k":
            length = half(y.norm(dim=(1, 3), keepdim=True).clamp(1e-4))  # (B, 1, T, 1)
        y = y / length
        z = self.coded(layer, kind, y, out) * length
        if self.keep == "own":
            own = read_back(y, y.amin(-1, keepdim=True), y.amax(-1, keepdim=True), self.bits, self.zero)
            z = torch.where(out, own, z)
        z = z @ self.H if self.rotated else z
        return z if self.keep in ("own", "range") else torch.where(out, x, z)

    def coded(self, layer, kind, y, out):
        code = (self.bits, self.zero)
        if self.grid == "static":
            keep = "marked" if self.keep in ("own", "range") else self.keep
            low, high = self.ranges[layer, kind, keep, self.rotated]
            z = read_back(y, low, high, *code)
            return torch.where((y < low) | (y > high), y, z) if self.keep == "numbers" else z
        if self.grid == "token" or kind == "v":
            size = GROUPS["kivi32"] if self.grid == "kivi32" else y.shape[-1]
            g = y.unflatten(-1, (-1, size))
            return read_back(g, g.amin(-1, keepdim=True), g.amax(-1, keepdim=True), *code).flatten(-2)
        blocks = []  # of tokens; the last may be shorter
        for g, o in zip(y.split(GROUPS[self.grid], 2), out.split(GROUPS[self.grid], 2)):
            if self.keep == "numbers":
                o = (g == g.amin(2, keepdim=True)) | (g == g.amax(2, keepdim=True))
            z = read_back(g, *bounds(g, 2, o), *code)
            blocks.append(torch.where(o, g, z) if self.keep == "numbers" else z)
        return torch.cat(blocks, 2)

    def true_bits(self, Hkv, d):
        """Of a number: codes, grids that come with the text, rows in 16 bits and their places."""
        each, share = 16 if self.zero == "symmetric" else 32, sum(self.shares) / len(self.shares)
        total = self.bits + {"static": 0, "token": each / d, "kivi128": each / 256 + each / d / 2,
                             "kivi32": each / 32}[self.grid]
        if self.keep == "numbers":
            return total + 32 * (0.01 if self.grid == "static" else 1 / 128)
        if self.keep == "own":
            return total + share * (self.bits + each / d + 16 / Hkv / d)
        if self.keep != "range":
            total += share * (16 + 16 / d / (1 if self.keep == "small" else Hkv))
        return total + self.normed * 8 / Hkv / d


@torch.inference_mode()
def measure(model, tokens, cache, reference=None, parts=4):
    """[nats of each part of a text], KL from the reference and log-probabilities. tokens (T)."""
    logits = model(tokens[None], cache)[0, :-1]  # (T - 1, vocabulary)
    logp = F.log_softmax(logits, -1)
    loss = -logp.gather(1, tokens[1:, None])[:, 0]
    kl = 0 if reference is None else (reference.exp() * (reference - logp)).sum(-1).mean().item()
    return [round(part.mean().item(), 6) for part in loss.tensor_split(parts)], round(kl, 6), logp


@torch.inference_mode()
def facts(model, tokens, places, cache):
    """[nats before the questions, right answers, nats of an answer]."""
    hidden = model(tokens[None], cache, logits=False)[0]  # (T, D)
    hay = places[0][0] - 8
    logp = F.log_softmax(model.lm_head(hidden[:hay - 1]), -1)
    loss, right, lost = -logp.gather(1, tokens[1:hay, None]).mean().item(), 0, []
    for begin, end in places:
        logp = F.log_softmax(model.lm_head(hidden[begin - 1:end - 1]), -1)
        right += int((logp.argmax(-1) == tokens[begin:end]).all())
        lost.append(-logp.gather(1, tokens[begin:end, None]).sum().item())
    return [round(loss, 5), right, round(sum(lost) / len(lost), 4)]


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("--model", metavar="DIR", default="tinykv/assets/tales")
    p.add_argument("--data", metavar="FILE", default="tales")
    p.add_argument("--embedded", action="store_true", help="the embedded model and its tales")
    p.add_argument("--texts", type=int, default=3, help="texts of facts")
    p.add_argument("--long", type=int, default=2, help="windows of 2,048 tokens")
    args = p.parse_args()
    torch.set_grad_enabled(False)
    name = "embedded" if args.embedded else "SmolLM2"
    model, tokenizer = hf.load(args.model)
    model.use_attention("fused")
    Hkv, d, marks, context = model.config.num_key_value_heads, model.config.head_dim, MARKS[name], 512
    record = read_data(RECORD) if RECORD.exists() else {}
    done = record.setdefault(name, {})
    other = load_windows(args.data, tokenizer, context, WINDOWS[name] * DRAW, "calibration").tokens
    ranges = {}  # {draw: those of its grids}

    def cache_of(cell, i):
        """That reads window i."""
        if cell == "fp16":
            return Exact(model, marks)
        if "static" in cell and i not in ranges:
            calibration = Calibration(model, marks)
            model(other[i * DRAW:(i + 1) * DRAW], calibration, logits=False)
            ranges[i] = calibration.ranges
        return Cache(model, marks, cell, ranges.get(i))

    references = {"": [], " long": []}  # fp16's log-probabilities

    def cross(names, windows, suffix):
        if all(cell + suffix in done for cell in names):
            return
        for tokens in windows[len(references[suffix]):]:
            loss, _, logp = measure(model, tokens, Exact(model, marks))
            references[suffix].append(logp)
            done.setdefault("fp16" + suffix, {"nll": [], "kl": [], "bits": 16})
            if len(done["fp16" + suffix]["nll"]) < len(windows):
                done["fp16" + suffix]["nll"].append(loss)
        for cell in names:
            if cell + suffix in done:
                continue
            found, sizes = {"nll": [], "kl": []}, []
            for i, tokens in enumerate(windows):
                cache = cache_of(cell, i)
                loss, kl, _ = measure(model, tokens, cache, references[suffix][i])
                found["nll"].append(loss)
                found["kl"].append(kl)
                sizes.append(cache.true_bits(Hkv, d))
            done[cell + suffix] = {**found, "bits": round(sum(sizes) / len(sizes), 3)}
            write_data(record, RECORD)
            means = [[sum(x) / len(x) for x in done[row + suffix]["nll"]] for row in (cell, "fp16")]
            lost = sum(a - b for a, b in zip(*means)) / len(windows)
            print(f"{cell + suffix:45} {lost:7.3f} KL {sum(found['kl']) / len(windows):6.3f} "
                  f"{done[cell + suffix]['bits']:6.3f} bits", flush=True)

    short = load_windows(args.data, tokenizer, context, WINDOWS[name]).tokens
    for group in CELLS.values():
        cross(group, short, "")
    if args.embedded:
        cross(ONLY_EMBEDDED, short, "")
    if name == "SmolLM2":
        texts = first_windows(halves(args.data)[0], tokenizer, 1024, 15, FACTS)[:args.texts]
        of_facts = record.setdefault("facts", {})
        for (i, (tokens, places)), row in itertools.product(enumerate(texts), FACT_ROWS):
            if len(of_facts.setdefault(row, [])) == i:
                of_facts[row].append(facts(model, tokens, places, cache_of(row, 0)))
                write_data(record, RECORD)
                print(i, row, of_facts[row][-1], flush=True)
        cross(LONG, load_windows(args.data, tokenizer, 2048, args.long).tokens, " long")


if __name__ == "__main__":
    main()
