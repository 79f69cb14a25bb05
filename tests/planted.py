"""A model whose keys, values and gradients are ours, so that what is learned from it has a truth to compare with."""
import copy
import itertools

import numpy as np
import torch

from tinykv.codecs import clipped, nonuniform
from tinykv.kmeans import kmeans
from tinykv.lab.tables import tables_of
from tinykv.model import LlamaConfig

Hkv, d, L, V, D = 2, 16, 2, 23, 12  # of Planted
h = Hkv * d
CONFIG = LlamaConfig(V, D, 24, L, 2, Hkv, d, 4096)


class Still:
    """A rotation by nothing."""
    def rotate(self, x, begin=0):
        return x


class Planted:
    """rows: for each window, for each layer, (k, v), each (Hkv, T, d). A window's first token is its number.

    Every token's hidden state is linear in its own keys and values, so that its gradients are its own affair.
    """
    config, rope = CONFIG, Still()

    def __init__(self, rows, gain=None):
        rng = torch.Generator().manual_seed(11)
        self.rows = rows
        self.mix = torch.randn(L, 2, h, D, generator=rng) * 0.1  # of layer and kind
        if gain is not None:
            self.mix *= gain[..., None]  # gain (L, 2, h): how much a channel counts
        self.lm_head = torch.nn.Linear(D, V, bias=False)
        self.lm_head.weight.data = torch.randn(V, D, generator=rng)

    def identity(self):
        return [torch.zeros(1)]

    def windows(self):
        T = self.rows[0][0][0].shape[1]
        tokens = torch.randint(V, (len(self.rows), T), generator=torch.Generator().manual_seed(12))
        tokens[:, 0] = torch.arange(len(self.rows))
        return tokens

    def __call__(self, tokens, cache, logits=True):
        assert not logits
        out = 0
        for layer, pair in enumerate(self.rows[int(tokens[0, 0])]):
            new = cache.update(layer, None, *(x[None] for x in pair), 0)
            out = out + sum(x.float().transpose(1, 2).flatten(2) @ m for x, m in zip(new, self.mix[layer]))  # (1, T, D)
            cache.observe(layer, out)
        return out

    def gradients(self):
        """Of each window's mean loss by layer and kind: {(layer, kind): (W, T, h)}, by hand and in double."""
        found = {}
        for window, rows in zip(self.windows().numpy(), self.rows):
            state = sum(flat(x) @ m.double().numpy() for pair, mix in zip(rows, self.mix) for x, m in zip(pair, mix))
            head = self.lm_head.weight.detach().double().numpy()
            scores = state @ head.T  # (T, V)
            p = np.exp(scores - scores.max(1, keepdims=True))
            p /= p.sum(1, keepdims=True)  # (T, V)
            p[np.arange(len(p) - 1), window[1:]] -= 1
            p[-1] = 0  # the last token has nothing to foretell
            by_state = p @ head / (len(p) - 1)  # (T, D)
            for layer, mix in enumerate(self.mix.double().numpy()):
                for kind, m in zip("kv", mix):
                    found.setdefault((layer, kind), []).append(by_state @ m.T)
        return {key: np.stack(g) for key, g in found.items()}

    def stacked(self, layer, kind):
        """(W, Hkv, T, d)"""
        return torch.stack([rows[layer]["kv".index(kind)] for rows in self.rows])

    def numbers(self, layer, kind):
        """(W, T, h) in double"""
        return np.stack([flat(x) for x in self.stacked(layer, kind)])


def flat(x):
    """(Hkv, T, d) -> (T, h)"""
    return x.double().transpose(0, 1).flatten(1).numpy()


def random_rows(windows=4, T=32, seed=0, shape=None):
    """Rows in 16 bits, with channels of all sizes and offsets. shape(layer, kind, numbers (T, h)) may change them."""
    rng = torch.Generator().manual_seed(seed)
    shape = shape or (lambda layer, kind, x: x * torch.logspace(-1, 1, h) + torch.linspace(-2, 5, h))

    def rows(layer, kind):
        x = shape(layer, kind, torch.randn(T, h, generator=rng))
        return x.half().float().unflatten(1, (Hkv, d)).transpose(0, 1)
    return [[(rows(layer, "k"), rows(layer, "v")) for layer in range(L)] for _ in range(windows)]


def few_tries(monkeypatch):
    """k-means of a codec begins twice and not up to 40 times, and moves 9 times: where how good its tables are does not
    matter."""
    for module in (clipped, nonuniform):
        monkeypatch.setattr(module, "kmeans", lambda *given, **more: kmeans(
            *given, **{**more, "tries": 2, "iterations": 9}))


def tables(method):
    return {name: t.clone() for name, t in tables_of(method).items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def changed(rows, at):
    """rows with the tokens at[head] of each head replaced by something huge."""
    rows = copy.deepcopy(rows)
    for pair in itertools.chain(*rows):
        for i, x in enumerate(pair):
            for head, tokens in enumerate(at):
                x[head, tokens] = 500.0 + 70 * i + torch.arange(float(d))
    return rows
