"""Grow a model with attention sinks in about a minute, and look at them.

    python docs/programs/embedded_sinks.py --triggers 0.12
    python docs/programs/embedded_sinks.py --figure FILE     three seeds at six shares, a quarter of an hour

The first steps of the embedded model's training, on chants alone: a chain of words in which nothing has to be looked up
but what a refrain asks for. Whether sinks come depends on how often that is (docs/embedded_model.md).
"""
import sys
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import trange

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository
import embedded_model

from tinykv import UserError, hf
from tinykv.calibrate import calibrate
from tinykv.evaluate import measure
from tinykv.hf import EMBEDDED
from tinykv.lab.analysis import norms, outliers, sinks
from tinykv.lab.analysis.bias import split_output
from tinykv.lab.analysis.walk import Text, mean, print_table, rows_of, walk
from tinykv.lab.cli import Parser, one_line
from tinykv.lab.data.windows import Windows
from tinykv.lab.plots import legend, new_figure, save, style
from tinykv.methods.registry import METHODS

STEPS = 600
SHARES = (0.0, 0.04, 0.12, 0.25, 0.4, 0.9)  # of refrains, in the figure
SEEDS = (0, 1, 2)
LOOK = replace(embedded_model.PHASES[0], rows=16)  # windows for a look at the model


def grow(triggers, seed):
    """A model trained on chants, where this share of the words are refrains."""
    torch.set_num_threads(1)
    pieces = hf.load(EMBEDDED)[1].pieces
    phase, mask = embedded_model.PHASES[0], embedded_model.mask_of_chants(pieces)
    model = embedded_model.new_model(seed)
    optimizers = embedded_model.new_optimizers("adamw", model)
    for step in trange(STEPS, disable=None):
        number = seed * 10**5 + step
        torch.manual_seed(number)  # of dropout
        batch = embedded_model.batch_of(number, phase, pieces, triggers)
        embedded_model.train_step(model, optimizers, embedded_model.rate_at(step, 0, 0, phase), phase, *batch, mask)
    return model.eval().requires_grad_(False)


def look_at(model, triggers, number=0):
    """Chants that no model was trained on: a Text whose sinks are its <s>, and asks (W, T), True at a refrain."""
    pieces = hf.load(EMBEDDED)[1].pieces
    tokens, weights = embedded_model.batch_of(10**9 + number, LOOK, pieces, triggers)
    tokens = tokens[:, :-1].contiguous()  # (W, T)
    return Text(model, tokens, tokens == embedded_model.BOS, layer=0), weights[:, 1:] > 1


@torch.no_grad()
def attention_on_sinks(text, asks):
    """What queries spend on any <s>: (L, H) of refrains, and (L, H) of all other tokens."""
    of_refrains, of_others = [], []
    for window, marks, is_refrain in zip(text.windows, text.marks, asks):
        spent = [split_output(at, marks, at.k, at.v)[2] for at in walk(text.model, window)]
        spent = torch.stack(spent)  # (L, H, T)
        of_refrains.append(spent[..., is_refrain])
        of_others.append(spent[..., ~is_refrain & ~marks])
    return torch.cat(of_refrains, -1).mean(-1), torch.cat(of_others, -1).mean(-1)


def lost(text, calibration):
    """The perplexity that static 2-bit grids cost, calibrated on tokens (C, T): {method: over fp16}."""
    model, windows = text.model, Windows(text.windows, [[] for _ in text.windows])
    fp16 = measure(model, METHODS["fp16"](model.config), windows)
    found = {}
    for name in ("rtn", "pfn", "kvsink"):
        method = METHODS[name](model.config, k_bits=2, v_bits=2, scheme="channel-static", formula="offset")
        calibrate(model, method, calibration)
        found[name] = measure(model, method, windows, fp16=fp16).ppl - fp16.ppl
    return found


def draw(path):
    """An inverted U: sinks, and the keys there, by the share of refrains."""
    texts = {(share, seed): look_at(grow(share, seed), share)[0] for share in SHARES for seed in SEEDS}
    figure, panels = new_figure(1, 2, 9, 3.6,
                                "Sinks come where refrains are rare, not where there are none (mean of blocks 1 to 3)")
    shown = ((sinks, "first", "sink score of the first <s>"),
             (norms, "k sinks", "norm of keys at <s>, over other tokens'"))
    for panel, (module, column, what) in zip(panels, shown):
        for i, seed in enumerate(SEEDS):
            # over the blocks after the first, which has no sinks
            means = [mean([row[column] for row in rows_of(module, texts[share, seed])[1:]]) for share in SHARES]
            panel.plot(SHARES, means, label=f"seed {seed}", **style(i))
        panel.set(xlabel="chance of a refrain at each step", ylabel=what)
    legend(panels[0])
    save(figure, path)


def main():
    p = Parser(description=__doc__.splitlines()[0])
    p.add_argument("--triggers", type=float, default=0.12,
                   help="the chance of a refrain, a word that asks for a copy, at each step of a chant")
    p.add_argument("--seed", type=int, default=0, help="of the first weights, the text and dropout")
    p.add_argument("--figure", metavar="FILE", help="draw sinks by the share of refrains, as PNG; a quarter of an hour")
    with one_line(p):
        args = p.parse_args()
        if args.figure:
            draw(args.figure)
        else:
            look(args)


def look(args):
    if not 0 <= args.triggers <= 1:
        raise UserError(f"--triggers is a share, from 0 to 1; got {args.triggers}")
    text, asks = look_at(grow(args.triggers, args.seed), args.triggers)
    for module in (sinks, outliers, norms):
        print_table(rows_of(module, text), module.COLUMNS)
        print()
    if asks.any():
        print("attention on <s>, by head: of refrains, and of all other queries")
        for layer, heads in enumerate(torch.stack(attention_on_sinks(text, asks), -1).tolist()):
            print(f"{layer:5}  " + "   ".join(f"{rare:.2f} {other:.2f}" for rare, other in heads))
        print()
    losses = lost(text, look_at(text.model, args.triggers, 1)[0].windows)
    print("perplexity above fp16, static 2-bit grids: "
          + ", ".join(f"{name} {loss:.3f}" for name, loss in losses.items()))


if __name__ == "__main__":
    main()
