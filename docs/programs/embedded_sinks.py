"""Grow a model with attention sinks in about a minute, or one without, and look at it.

    python docs/programs/embedded_sinks.py --triggers 0.12      where its sinks are (docs/embedded_model.md)
    python docs/programs/embedded_sinks.py --compare            four attentions, and what 2 bits cost each: five minutes
    python docs/programs/embedded_sinks.py --measure            what docs/sinkless.md says: PLAN, two hours
    python docs/programs/embedded_sinks.py --plot               draw its figure

The first steps of the embedded model's training, on chants alone: a chain of words in which nothing has to be looked up
but what a refrain asks for. Whether sinks come depends on how often that is, and on the attention:

    softmax   p = softmax(s)                                    LLaMA
    plus one  p = softmax([s, 0]) without its last share        one more logit, 0, of no token
    logit     p = softmax([s, b]) without its last share        b: a learned number for each head, as in gpt-oss
    gate      p v * sigmoid(G x), channel by channel            G: a learned matrix, as in Qwen3-Next

All else is equal: first weights, text, dropout. The gate's model has 155 channels in its MLPs for the others' 176, so
that it has as many parameters.

--measure writes docs/sinkless.jsonl, a row for each model, whole after each model; a run that was stopped goes on where
it was. A row has, by layer, averaged over the test windows: the share of attention that tokens spend on any <s>, and on
nothing; the mark, the largest |h| at <s> over the median |h|; the norms of <s>'s key and value over the others'. And it
has the loss of fp16, and what static grids of 2 and 3 bits add to it, in nats, a number for each draw of the
calibration.
"""
import json
import math
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
from torch import nn
from tqdm import trange

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository
import embedded_model

from tinykv import UserError, hf
from tinykv.calibrate import calibrate
from tinykv.evaluate import measure
from tinykv.hf import EMBEDDED
from tinykv.lab.analysis import norms, outliers, sinks
from tinykv.lab.analysis.walk import Text, print_table, rows_of
from tinykv.lab.cli import Columns, Parser, one_line
from tinykv.lab.data.windows import Windows
from tinykv.lab.differences import paired
from tinykv.lab.files import write
from tinykv.lab.plots import legend, new_figure, save, style
from tinykv.methods.registry import METHODS
from tinykv.model import Attention, Trace

RECORD = Path(__file__).parents[1] / "sinkless.jsonl"
KINDS = ("softmax", "plus one", "logit", "gate")
STEPS = 600
EARLIER = (50, 100, 150, 200, 250, 300, 400, 500)  # steps at which PLAN's first models are looked at, too
DRAWS = 3  # of the calibration; one at earlier steps
LOOK = replace(embedded_model.PHASES[0], rows=16)  # windows of 128 tokens for a look at the model, and a calibration
TEST = replace(LOOK, rows=64)  # windows on which a loss is measured
WAYS = {  # out of a grid that a sink breaks: {column: method, flags}
    "rtn": ("rtn", {}), "pfn": ("pfn", {}), "kvsink": ("kvsink", {}),
    "level at 0": ("rtn", {"formula": "integer-zero"}), "KIVI's grid": ("rtn", {"scheme": "channel-dynamic"})}


class Setting(NamedTuple):
    """What is grown."""
    kind: str = "softmax"
    seed: int = 0  # of the first weights, the text and dropout
    chance: float = 0.12  # of a refrain, a word that asks for a copy, at each step of a chant
    dropout: float = embedded_model.PHASES[0].dropout  # the share of values that are 0
    decay: float = 0.1  # of the weights


# In order of worth, written down before it was run. What is tested, by two-sided t tests over the first models' eight
# seeds, paired by seed, at 2 bits; the gain of keeping is rtn's loss less kvsink's, means over draws:
#     with softmax, keeping gains; with a learned logit, it gains less; and less is lost by rtn (Holm's correction of 3)
#     with a learned logit, it gains nothing: the 95% interval lies within a tenth of softmax's mean gain
#     the mark is there before the sink: half of what it is at the end, at an earlier step, in more seeds (a sign test)
# All else is description, with its error over seeds.
PLAN = [
    *(Setting(kind, seed) for seed in range(8) for kind in ("softmax", "logit")),
    *(Setting(kind, seed) for seed in range(8) for kind in ("plus one", "gate")),
    *(Setting(kind, seed, chance) for seed in range(3) for chance in (0.04, 0.25) for kind in ("softmax", "logit")),
    *(Setting(kind, seed, dropout=0.0) for seed in range(3) for kind in ("softmax", "logit")),
    *(Setting(kind, seed, decay=0.0) for seed in range(3) for kind in ("softmax", "logit")),
    *(Setting("softmax", seed, 0.0) for seed in range(3))]  # added later: a softmax that needs no sink


# The four attentions

class OtherAttention(Attention):
    """Attention in plain lines, where a head may attend to nothing: `extra` (H) is a logit of no token, or None; `gate`
    is a Linear, or None."""

    def forward(self, x, rope, seen, mask, layer, cache=None):
        q, k, v = self.qkv(x)  # (B, H, T, d), (B, Hkv, T, d) twice, before RoPE
        k, v = (rope.rotate(k, seen), v) if cache is None else cache.update(layer, q, k, v, seen)  # (B, Hkv, S, d) both
        q = rope.rotate(q, seen)  # (B, H, T, d)
        heads_per_kv = self.n_heads // self.n_kv_heads
        k = k.repeat_interleave(heads_per_kv, dim=1)  # (B, H, S, d)
        v = v.repeat_interleave(heads_per_kv, dim=1)  # (B, H, S, d)

        scores = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)  # (B, H, T, S)
        T, S = scores.shape[2:]
        visible = torch.ones(T, S, dtype=torch.bool).tril(S - T)  # (T, S)
        scores = scores.masked_fill(~visible, float("-inf"))  # (B, H, T, S)
        if self.extra is not None:  # one more logit
            extra = self.extra[:, None, None].expand(len(x), -1, T, 1)  # (B, H, T, 1)
            scores = torch.cat([scores, extra], dim=-1)  # (B, H, T, S + 1)
        self.p = torch.softmax(scores, dim=-1)  # (B, H, T, S or S + 1)
        out = self.p[..., :S] @ v  # (B, H, T, d): what the extra logit gets is of nothing
        out = out.transpose(1, 2).flatten(2)  # (B, T, H * d)
        if self.gate is not None:
            out = out * torch.sigmoid(self.gate(x))  # (B, T, H * d)
        return self.o_proj(out)  # (B, T, D)


def new_model(kind, seed):
    """The embedded model's first weights, and another attention."""
    config = embedded_model.CONFIG
    if kind == "gate":
        config = replace(config, intermediate_size=155)
    model = embedded_model.new_model(seed, config)
    for layer in model.model["layers"]:
        attention = layer.self_attn
        attention.__class__ = OtherAttention  # its weights, and the hook that drops values, stay
        attention.extra = attention.gate = None
        if kind == "plus one":
            attention.extra = torch.zeros(attention.n_heads)
        if kind == "logit":
            attention.extra = nn.Parameter(torch.zeros(attention.n_heads))
        if kind == "gate":
            attention.gate = nn.Linear(config.hidden_size, attention.n_heads * attention.head_dim, bias=False)
            nn.init.normal_(attention.gate.weight, std=config.hidden_size ** -0.5)
    return model


def grow(setting, at=(STEPS,)):
    """Train a model on chants -> yields it after each of these steps, as (step, model)."""
    torch.set_num_threads(1)
    pieces = pieces_of_chants()
    phase, mask = replace(embedded_model.PHASES[0], dropout=setting.dropout), embedded_model.mask_of_chants(pieces)
    model = new_model(setting.kind, setting.seed)
    optimizers = embedded_model.new_optimizers("adamw", model)
    optimizers[0].param_groups[0]["weight_decay"] = setting.decay
    for step in trange(max(at), disable=None):
        number = setting.seed * 10**5 + step
        torch.manual_seed(number)  # of dropout
        batch = embedded_model.batch_of(number, phase, pieces, setting.chance)
        embedded_model.train_step(model, optimizers, embedded_model.rate_at(step, 0, 0, phase), phase, *batch, mask)
        if step + 1 in at:
            done = new_model(setting.kind, setting.seed)
            done.load_state_dict(model.state_dict())
            yield step + 1, done.eval().requires_grad_(False)


@cache
def pieces_of_chants():
    return hf.load(EMBEDDED)[1].pieces


def chants(phase, chance, number=0):
    """(W, T): windows that no model was trained on."""
    tokens, _ = embedded_model.batch_of(10**9 + number, phase, pieces_of_chants(), chance)
    return tokens[:, :-1].contiguous()


# A row of the record

@torch.no_grad()
def row_of(model, chance, draws):
    windows = chants(TEST, chance)  # (W, T)
    row = seen_in(model, windows)
    windows = Windows(windows, [[] for _ in windows])
    fp16 = measure(model, METHODS["fp16"](model.config), windows, batch=64)
    row["fp16"] = fmean(fp16.nll)
    for bits in (2, 3):
        for draw in range(draws):
            static = {"k_bits": bits, "v_bits": bits, "scheme": "channel-static"}
            methods = {way: METHODS[name](model.config, **static | flags) for way, (name, flags) in WAYS.items()}
            calibrate(model, list(methods.values()), chants(LOOK, chance, 1 + draw))
            for way, method in methods.items():
                more = fmean(measure(model, method, windows, batch=64, fp16=fp16).nll) - row["fp16"]
                row.setdefault(f"{way}, {bits} bits", []).append(more)
            row["found"] = [methods["kvsink"].layer, methods["kvsink"].channel]  # -1: no outlier
    return row


def seen_in(model, windows):
    """What attention, hidden states, keys and values have at <s>: {name: a number for each layer}."""
    trace, row = Trace(model), {name: [] for name in ("on <s>", "on nothing", "mark", "key", "value")}
    model(windows, trace, logits=False)
    at_s = windows == embedded_model.BOS  # (W, T)
    for i, layer in enumerate(model.model["layers"]):
        p = layer.self_attn.p.mean(1)  # (W, T, S or S + 1)
        on_s = (p[..., :len(windows[0])] * at_s[:, None]).sum(-1)  # (W, T)
        on_nothing = p[..., len(windows[0]):].sum(-1)  # (W, T)
        row["on <s>"].append(on_s[~at_s].mean())
        row["on nothing"].append(on_nothing[~at_s].mean())
        size = trace.hidden[i].abs()  # (W, T, D)
        row["mark"].append(size[at_s].amax(-1).mean() / size.median())
        for name, x in (("key", trace.k[i]), ("value", trace.v[i])):
            norm = x[:, 0].norm(dim=-1)  # (W, T), of the one KV head
            row[name].append(norm[at_s].mean() / norm[~at_s].mean())
    return {name: torch.stack(numbers).tolist() for name, numbers in row.items()}


def rounded(row):
    return {name: [round(x, 5) for x in value] if isinstance(value, list) else
            round(value, 5) if isinstance(value, float) else value for name, value in row.items()}


def measure_all(path, plan):
    """Grow what the record has not yet."""
    rows = read(path)
    for setting in plan:
        of_setting = setting._asdict()
        if any(of_setting.items() <= {name: row[name] for name in of_setting}.items() for row in rows):
            continue
        earlier = EARLIER if setting in PLAN[:16] else ()
        for step, model in grow(setting, (*earlier, STEPS)):
            row = row_of(model, setting.chance, draws=DRAWS if step == STEPS else 1)
            rows.append(of_setting | {"step": step} | rounded(row))
        text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)
        write(path, lambda part, text=text: part.write_text(text, encoding="utf-8"))
        print_rows(rows[-1:])


def read(path=RECORD):
    """The rows of the record; none if there is no such file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def print_rows(rows, with_head=True):
    head = ["attention", "seed", "chance", "16 bits", "on <s>", "nothing", "mark", *WAYS]
    lines = [[row["kind"], str(row["seed"]), f"{row['chance']:g}", f"{row['fp16']:.3f}", f"{on_s(row):.3f}",
              f"{on_nothing(row):.3f}", f"{mark(row):.0f}", *(f"{lost(way)(row):.4f}" for way in WAYS)] for row in rows]
    table = Columns(head, lines, 1, widths=[9, *(max(7, len(name)) for name in head[1:])])
    print(table if with_head else "\n".join(map(table.line, lines)))


# What docs/sinkless.md says of the record

def models(kind, step=STEPS, **setting):
    """The rows of a kind, by seed: those of PLAN's first models, or of another setting."""
    wanted = Setting(kind)._asdict() | setting | {"step": step}
    rows = [row for row in read() if {**row, "seed": 0}.items() >= {**wanted, "seed": 0}.items()]
    return sorted(rows, key=lambda row: row["seed"])


def on_s(row):
    """Attention on <s> in layers 1 to 3."""
    return fmean(row["on <s>"][1:])


def on_nothing(row):
    return fmean(row["on nothing"][1:])


def mark(row):
    return max(row["mark"])


def lost(way, bits=2):
    """Nats that a way loses, the mean over draws: a function of a row."""
    return lambda row: fmean(row[f"{way}, {bits} bits"])


def gain(bits=2):
    """Of keeping: what rtn loses less what kvsink loses."""
    return lambda row: lost("rtn", bits)(row) - lost("kvsink", bits)(row)


def over_seeds(number, rows, form=".3f"):
    """Mean and standard error over seeds."""
    found = torch.tensor([number(row) for row in rows], dtype=torch.float64)
    return f"{found.mean():{form}} ± {found.std() / len(found) ** 0.5:{form}}"


def attentions_table():
    """At 2 bits, PLAN's first models."""
    lines = [[kind, over_seeds(lambda row: row["fp16"], models(kind)), over_seeds(on_s, models(kind), ".2f"),
              over_seeds(on_nothing, models(kind), ".2f") if kind in ("plus one", "logit") else "-",
              over_seeds(mark, models(kind), ".0f"), *(over_seeds(lost(way), models(kind)) for way in WAYS),
              over_seeds(gain(), models(kind), ".4f")] for kind in KINDS]
    return markdown(["attention", "16 bits", "on `<s>`", "on nothing", "mark", "`rtn`", "`pfn`", "`kvsink`",
                     "level at 0", "KIVI's grid", "gain of keeping"], lines)


def elsewhere_table():
    """The gain of keeping in other settings."""
    settings = {"chance of a refrain 0": {"chance": 0.0}, "chance .04": {"chance": 0.04},
                "chance .25": {"chance": 0.25}, "no dropout on values": {"dropout": 0.0},
                "no weight decay": {"decay": 0.0}}
    lines = []
    for label, setting in settings.items():
        cells = [label, str(len(models("softmax", **setting)))]
        for kind in ("softmax", "logit"):
            if rows := models(kind, **setting):
                cells += [over_seeds(on_s, rows, ".2f"), over_seeds(lost("rtn"), rows), over_seeds(gain(), rows)]
            else:
                cells += ["-"] * 3
        lines.append(cells)
    three = [cell for kind in ("softmax", "logit") for cell in (
        over_seeds(on_s, models(kind), ".2f"), over_seeds(lost("rtn", 3), models(kind)),
        over_seeds(gain(3), models(kind)))]
    lines.insert(0, ["as above, at 3 bits", str(len(models("softmax"))), *three])
    return markdown(["", "seeds", "softmax: on `<s>`", "`rtn`", "gain", "logit: on `<s>`", "`rtn`", "gain"], lines)


def steps_table():
    """When the sink comes, and when the mark."""
    lines = [[str(step), *(over_seeds(number, models(kind, step), form) for number, form in (
        (on_s, ".2f"), (mark, ".1f"), (lost("rtn"), ".3f")) for kind in ("softmax", "logit"))]
        for step in (100, 200, 300, 400, STEPS)]
    return markdown(["step", "on `<s>`: softmax", "logit", "mark: softmax", "logit", "`rtn` loses: softmax", "logit"],
                    lines)


def tests_table():
    """What PLAN tests, paired by seed."""
    softmax, logit = models("softmax"), models("logit")
    pairs = {"softmax: `rtn` loses more than `kvsink`": ([lost("rtn")(row) for row in softmax],
                                                         [lost("kvsink")(row) for row in softmax]),
             "keeping gains more with softmax than with a learned logit": (list(map(gain(), softmax)),
                                                                           list(map(gain(), logit))),
             "`rtn` loses more with softmax than with a learned logit": (list(map(lost("rtn"), softmax)),
                                                                         list(map(lost("rtn"), logit))),
             "learned logit: `rtn` loses more than `kvsink`": ([lost("rtn")(row) for row in logit],
                                                               [lost("kvsink")(row) for row in logit])}
    lines = []
    for claim, (first, second) in pairs.items():
        difference, error, _, p, lower = paired([first], [second])
        lines.append([claim, f"{difference:.4f} ± {error:.4f}", f"{p:.4f}", f"{len(first) - lower} of {len(first)}"])
    return markdown(["tested", "nats", "p", "seeds"], lines)


def first_at_half(numbers):
    """How often the first of two numbers of a softmax model reaches half of what it is in the end before the other, the
    other before it, and neither."""
    steps = []
    for number in numbers:
        at_step = {step: list(map(number, models("softmax", step))) for step in (*EARLIER, STEPS)}
        steps.append([next(step for step in at_step if at_step[step][seed] >= last / 2)
                      for seed, last in enumerate(at_step[STEPS])])
    order = [(a > b) - (a < b) for a, b in zip(*steps)]
    return order.count(-1), order.count(1), order.count(0)


def n_found(kind):
    """In how many models KVSink's search finds a mark."""
    return sum(row["found"] != [-1, -1] for row in models(kind))


def markdown(head, lines):
    return "\n".join([f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines)])


WRITTEN = {"attentions": attentions_table, "elsewhere": elsewhere_table, "steps": steps_table,
           "attention tests": tests_table}


def plot(path):
    """Attention on <s>, and what 2 bits lose: a dot a seed."""
    figure, (left, right) = new_figure(1, 2, 9.6, 3.6, "Where a head may attend to nothing, there is no sink to keep")
    for x, kind in enumerate(KINDS):
        rows = models(kind)
        left.plot([x] * len(rows), list(map(on_s, rows)), linestyle="none", **style(0))
        for i, (way, label) in enumerate((("rtn", "all rounded (rtn)"), ("kvsink", "marked tokens kept (kvsink)"))):
            right.plot([x - 0.12 + 0.24 * i] * len(rows), list(map(lost(way), rows)), linestyle="none",
                       label=label if x == 0 else "_", **style(i, way))
    for panel, label in ((left, "share of attention on <s>, layers 1 to 3"), (right, "nats lost at 2 bits")):
        panel.set(ylabel=label, xticks=range(len(KINDS)), xlim=(-0.5, len(KINDS) - 0.5))
        panel.set_xticklabels(["softmax", "one more\nlogit, 0", "a learned\nlogit", "a gate"])
    left.set_ylim(0, None)
    right.set_ylim(0, None)
    legend(right)
    save(figure, path)


# A look at a single model

def look_at(model, triggers):
    """Chants that no model was trained on: a Text whose sinks are its <s>."""
    tokens = chants(LOOK, triggers)
    return Text(model, tokens, tokens == embedded_model.BOS, layer=0)


def grown(triggers, seed):
    (_, model), = grow(Setting(seed=seed, chance=triggers))
    return model


def look(args):
    text = look_at(grown(args.triggers, args.seed), args.triggers)
    for module in (sinks, outliers, norms):
        print_table(rows_of(module, text), module.COLUMNS)
        print()


def main():
    p = Parser(description=__doc__.splitlines()[0])
    p.add_argument("--triggers", type=float, default=0.12,
                   help="the chance of a refrain, a word that asks for a copy, at each step of a chant")
    p.add_argument("--seed", type=int, default=0, help="of the first weights, the text and dropout")
    p.add_argument("--compare", action="store_true", help="the four attentions, a row each; five minutes")
    p.add_argument("--plot", action="store_true", help="draw figures/sinkless.png")
    p.add_argument("--measure", action="store_true", help="measure what docs/sinkless.jsonl has not yet; two hours")
    with one_line(p):
        args = p.parse_args()
        if not 0 <= args.triggers <= 1:
            raise UserError(f"--triggers is a share, from 0 to 1; got {args.triggers}")
        if args.plot:
            plot(RECORD.parent / "figures" / "sinkless.png")
        elif args.compare:
            for kind in KINDS:
                setting = Setting(kind, args.seed, args.triggers)
                (_, model), = grow(setting)
                print_rows([setting._asdict() | row_of(model, setting.chance, draws=1)], with_head=kind == KINDS[0])
        elif args.measure:
            measure_all(RECORD, PLAN)
        else:
            look(args)


if __name__ == "__main__":
    main()
