"""For the caches that compute attention themselves: a layer whose codecs, kept tokens and pace are told, with the
attention that it has to give; and a text, with what the plain cache makes of it.

`expected` shares nothing with them: rows as the codecs' own `decode` gives them, a loop over kept rows, RoPE and
softmax in float64.
"""
from types import SimpleNamespace

import numpy as np
import oracles
import pytest
import torch
from cases import Case, build_and_calibrate, tokens_of

from tinykv.cache import CachedRows, KVCache
from tinykv.lab.run.settings import settings_of
from tinykv.methods.base import Method
from tinykv.methods.registry import METHODS
from tinykv.model import LlamaConfig, Rope


class Told(Method):
    """kept: {kind: (tokens of each head, ...)}, in turn by sequence."""

    def __init__(self, pair, rope="post", recent=0, block=1, v_block=None, kept=None, window=None):
        super().__init__(SimpleNamespace(sliding_window=window, num_hidden_layers=1))
        self.codecs, self.rope, self.recent, self.kept = [pair], rope, recent, kept or {}
        self.blocks = {"k": block, "v": v_block or block}

    def block_of(self, kind):
        return self.blocks[kind]

    def keep_values(self, layer_cache, n):
        return self.keep_keys(layer_cache, n, "v")

    def keep_keys(self, layer_cache, n, kind="k"):
        if kind in self.kept:
            positions = torch.tensor(self.kept[kind])  # (1 or Hkv, n)
            return torch.stack([positions.roll(b, 0) for b in range(len(layer_cache.keys.recent))])


def told_layer(cls, pair, heads, width, batch, length, new=1, dtype=torch.float16, **told):
    """A layer of class `cls` at the moment of reading: all but `new` of `length` tokens went through it, the new ones
    wait. So that it matters which rows are kept, they change; but one that is recent is what stands among the recent.
    """
    rope = Rope(LlamaConfig(9, 8, 8, 1, heads, heads, width, 32768))
    layer = cls(0, Told(pair, **told), rope, "stream", None)
    rows = torch.randn(2, batch, length, heads, width).to(dtype).transpose(2, 3)  # not contiguous, as attention's are
    first = length - new
    if first:
        layer.for_attention = lambda q, seen: None  # the first tokens' queries do not matter
        layer.update(None, *rows[:, :, :, :first], 0)
        del layer.for_attention
    layer.append(*rows[:, :, :, first:])
    for part in (layer.keys, layer.values):
        if part.kept_rows is not None:
            place = part.kept_positions[..., None]
            part.kept_rows = (part.kept_rows + (place % 3 - 1) * (place < part.n_coded)).to(dtype)
    return layer


def turned(x, positions, rope):
    """RoPE in float64: x (..., T, d), positions (T)."""
    angle = positions[:, None].double() * rope.freq.double()
    a, b = x.double().chunk(2, dim=-1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)


def read(part):
    """All rows of a part (B, Hkv, S, d) in float64."""
    rows = part.recent.double()
    if part.n_coded:
        rows = torch.cat([part.codec.decode(part.codes).double(), rows], dim=2)
    if part.kept_positions is not None:
        positions = part.kept_positions.expand(part.kept_rows.shape[:3])
        for b, h, i in np.ndindex(*positions.shape):
            rows[b, h, positions[b, h, i]] = part.kept_rows[b, h, i].double()
    return rows


def scores(q, K, window):
    """(B, H, T, S): `oracles.attention_scores` of tensors."""
    return torch.from_numpy(oracles.attention_scores(q.double().numpy(), K.double().numpy(), window))


def expected(q, layer):
    """Output (B, H, T, d) and log-sum-exp (B, H, T) in float64."""
    K, V = read(layer.keys), read(layer.values)
    if layer.method.rope == "pre":
        K = turned(K, torch.arange(K.shape[2]), layer.rope)
    s = scores(q, K, layer.method.config.sliding_window)
    return s.softmax(-1) @ V.repeat_interleave(q.shape[1] // V.shape[1], 1), s.logsumexp(-1)


def method_of(name, **settings):
    """A calibrated method in blocks of 8 tokens, with 4 recent ones."""
    cls = METHODS[name]
    return build_and_calibrate(Case(cls, settings_of(cls).get("scheme"), recent=4, settings=tuple(settings.items())))


def text_of(name, batch, T):
    """Tokens (B, T) that begin with the method's prefix, and how many arrive first."""
    case = Case(METHODS[name])
    return case.text(tokens_of(batch, T)), len(case.prefix) + 1


def logits_of(cache_class, attention, model, method, tokens, chunks, protocol="stream", prompt=None):
    """The logits of tokens (B, T) that arrive in chunks, and the cache."""
    model.use_attention(attention)
    cache = cache_class(model, method, protocol, prompt)
    with torch.inference_mode():
        return torch.cat([model(chunk, cache) for chunk in tokens.split(chunks, dim=1)], dim=1), cache


def reads_the_same(cache_class, attention, *run):
    """Logits, and what is held, are those of the plain cache. run: what else `logits_of` takes. The kernels' cache
    decodes no row."""
    want, one = logits_of(KVCache, "fused", *run)
    with pytest.MonkeyPatch.context() as patch:
        if attention == "triton":
            patch.setattr(CachedRows, "read", None)
        got, two = logits_of(cache_class, attention, *run)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)  # of logits of size 10
    assert one.nbytes == two.nbytes and two.layers[0].keys.n_coded > 1
    for a, b in zip(one.layers, two.layers):
        for kind in ("keys", "values"):
            want, got = (getattr(layer, kind) for layer in (a, b))
            torch.testing.assert_close(got.tensors()["kept"], want.tensors()["kept"], rtol=1e-2, atol=1e-2)
            if want.recent_scores is not None:
                torch.testing.assert_close(got.recent_scores, want.recent_scores, rtol=1e-3, atol=1e-5)
