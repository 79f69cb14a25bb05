"""Grow a model with attention sinks in about a minute, and look at them.

    python -m tinykv.assets.sinks --triggers 0.12

The first steps of the embedded model's training, on chants alone: a chain of words in which nothing
has to be looked up but what a refrain asks for. Whether sinks come depends on how often that is
(docs/embedded_model.md).
"""
import sys

import torch
from tqdm import tqdm

from tinykv import UserError, hf
from tinykv.analysis.walk import walk
from tinykv.assets import make
from tinykv.run.cli import EMBEDDED, Parser, one_line

STEPS = 600


def grow(triggers, seed, steps=STEPS):
    """A model trained on chants, where this share of the words are refrains. With text for a look: tokens (W, T), and
    asks (W, T), True at a refrain."""
    torch.set_num_threads(1)
    pieces = hf.load(EMBEDDED)[1].pieces
    phase, mask = make.PHASES[0], make.mask_of_chants(pieces)
    model = make.new_model(seed)
    optimizers = make.new_optimizers("adamw", model)
    for step in tqdm(range(steps), unit="step", disable=not sys.stderr.isatty()):
        number = seed * 10**5 + step
        torch.manual_seed(number)  # of dropout
        batch = make.batch_of(number, phase, pieces, triggers)
        make.train_step(model, optimizers, make.rate_at(step, 0, 0, phase), phase, *batch, mask)
    tokens, weights = make.batch_of(10**9, phase, pieces, triggers)
    return model.eval(), tokens[:, :-1], weights[:, 1:] > 1


@torch.no_grad()
def attention_on_sinks(model, tokens, asks):
    """What queries spend on any <s>: (L, H) of refrains, and (L, H) of all other tokens."""
    of_refrains, of_others = [], []
    for window, is_refrain in zip(tokens, asks):
        shares = torch.stack([spent_on(window == make.BOS, at) for at in walk(model, window)])  # (L, H, T)
        of_refrains.append(shares[..., is_refrain])
        of_others.append(shares[..., ~is_refrain & (window != make.BOS)])
    return torch.cat(of_refrains, -1).mean(-1), torch.cat(of_others, -1).mean(-1)


def spent_on(marked, at):
    """The attention that each query of a block spends on the marked tokens (T): (H, T)."""
    T, d = at.q.shape[2:]
    scores = at.q[0] @ at.k[0].transpose(-1, -2) / d ** 0.5  # (H, T, T), with one KV head
    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    p = scores.masked_fill(future, float("-inf")).softmax(-1)  # (H, T, T)
    return p[..., marked].sum(-1)


def main():
    p = Parser(prog="python -m tinykv.assets.sinks", description="Grow a model with attention sinks in about a minute.")
    p.add_argument("--triggers", type=float, default=0.12, help="the share of words that ask for a copy or a recall")
    p.add_argument("--seed", type=int, default=0, help="of the first weights, the text and dropout")
    with one_line(p):
        args = p.parse_args()
        if not 0 <= args.triggers <= 1:
            raise UserError(f"--triggers is a share, from 0 to 1; got {args.triggers}")
        model, tokens, asks = grow(args.triggers, args.seed)
        make.print_sinks(model, tokens)
        if asks.any():
            print("\nattention on <s>, by head: of refrains, and of all other queries")
            for layer, heads in enumerate(torch.stack(attention_on_sinks(model, tokens, asks), -1).tolist()):
                print(f"{layer:5}  " + "   ".join(f"{rare:.2f} {other:.2f}" for rare, other in heads))


if __name__ == "__main__":
    main()
