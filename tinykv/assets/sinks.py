"""Grow a model with attention sinks in about a minute, and look at them.

    python -m tinykv.assets.sinks --triggers 0.12

The first steps of the embedded model's training, on chants alone: a chain of words in which only
the word after a refrain has to be looked up. Whether sinks come depends on how often that is
(docs/embedded_model.md): with 0 and with 0.9 there are none.
"""
import argparse
import sys

import torch
from tqdm import tqdm

from tinykv import hf
from tinykv.analysis.sinks import sink_report
from tinykv.analysis.walk import walk
from tinykv.assets import EMBEDDED
from tinykv.assets.make import BOS, PHASES, batch_of, mask_of_chants, new_model, new_optimizers, rate_at, train_step

STEPS = 600


def grow(triggers, seed, steps=STEPS):
    """A model trained on chants of which this share are refrains; and the chants' text for a look, (W, T)."""
    torch.set_num_threads(1)
    pieces = hf.load_tokenizer(EMBEDDED).pieces
    phase, mask = PHASES[0], mask_of_chants(pieces)
    model = new_model(seed)
    optimizers = new_optimizers("adamw", model)
    for step in tqdm(range(steps), unit="step", disable=not sys.stderr.isatty()):
        number = seed * 10**5 + step
        torch.manual_seed(number)  # of dropout
        batch = batch_of(number, phase, pieces, triggers)
        train_step(model, optimizers, rate_at(step, 0, phase), phase, *batch, mask)
    tokens, weights = batch_of(10**9, phase, pieces, triggers)
    return model.eval().requires_grad_(False), tokens[:, :-1], weights[:, 1:] > 1


@torch.no_grad()
def attention_on_sinks(model, tokens, asked):
    """What queries spend on any `<s>`, (L, H) each: those of refrains, and all others.

    tokens (W, T). asked (W, T): True at a refrain, whose next token is what it asks for.
    """
    of_refrains, of_others = [], []
    for window, is_refrain in zip(tokens, asked):
        shares = torch.stack([share_on_sinks(at, window == BOS) for at in walk(model, window)])  # (L, H, T)
        of_refrains.append(shares[:, :, is_refrain])
        of_others.append(shares[:, :, ~is_refrain & (window != BOS)])
    return torch.cat(of_refrains, -1).mean(-1), torch.cat(of_others, -1).mean(-1)
