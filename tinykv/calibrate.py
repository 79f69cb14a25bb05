"""Calibration: the one loop that shows calibration windows to a method and its codecs.

First come the passes of the method itself, since what it keeps must be known before its codecs calibrate: KVSink looks
for its outlier. Then come the passes of the codecs, each of which sees keys, or values, of one layer, without the
tokens that the method keeps: static ranges, KVQuant's levels, SKVQ's groups and clips, codebooks.
"""
import torch
import torch.nn.functional as F

from tinykv import UserError, all_finite
from tinykv.cache import KVCache
from tinykv.files import fingerprint
from tinykv.tracing import Trace


def calibrate(model, method, windows, progress=None, seed=0, fingerprint_of=fingerprint):
    """Calibrate a method on windows (W, T) of token ids.

    progress: what to wrap a loop in, such as tqdm. seed: of k-means. fingerprint_of: the model's, which takes as long
    as to read all weights. UserError if the model's numbers are not finite, or if the method keeps everything.
    """
    progress = progress or iter
    for step in range(method.passes):
        for window in progress(windows):
            watch_blocks(model, method, step, window)
        method.fit(step)

    codecs = method.each_codec()
    for step in range(max(codec.passes for _, _, codec in codecs)):
        active = [(layer, kind, codec) for layer, kind, codec in codecs if step < codec.passes]
        gradients = any(codec.needs_gradient(step) for _, _, codec in active)
        for _, _, codec in active:
            codec.seed = seed
            codec.begin(step, *windows.shape)
        for window in progress(windows):
            recorder = record(model, method, window, gradients)
            for layer, kind, codec in active:
                rows, kept, gradient = recorder.of(layer, kind)
                check_window(layer, rows, kept, gradient)
                codec.collect(step, rows, kept, gradient)
        for _, _, codec in progress(active):
            codec.fit(step)
    method.calibrated_on = fingerprint_of(model)


def check_window(layer, rows, kept, gradient):
    """UserError unless a codec can learn from a window: rows (Hkv, T, d), kept (Hkv, T), gradient as rows or None."""
    all_finite(f"keys or values of layer {layer}", rows)
    if gradient is not None:
        all_finite(f"gradients of layer {layer}", gradient)
    if kept.all(1).any():
        raise UserError(f"calibration windows of {rows.shape[1]} tokens hold no token that the method does not keep; "
                        "use a longer context or keep fewer tokens")


@torch.no_grad()
def watch_blocks(model, method, step, window):
    """Show the method the embedding (layer -1) and every block's output for one window (T)."""
    tokens = window[None]  # (1, T)
    method.collect(step, -1, model.model["embed_tokens"](tokens))
    trace = Trace(model, on_block=lambda layer, hidden: method.collect(step, layer, hidden))
    all_finite("hidden states of the model", model(tokens, trace, logits=False))


def record(model, method, window, gradients):
    """One window (T) in full precision -> the `Recorder` with its keys, values and gradients."""
    recorder = Recorder(model, method, gradients)
    with torch.set_grad_enabled(gradients):
        hidden = model(window[None], recorder, logits=False)  # (1, T, D)
        if gradients:
            logits = model.lm_head(hidden[0, :-1]).float()  # (T - 1, vocab)
            loss = F.cross_entropy(logits, window[1:])
            recorder.gradients = torch.autograd.grad(loss, recorder.leaves)
    return recorder


class Recorder(KVCache):
    """A cache of one window that quantizes nothing. It holds keys and values as the method stores them, keeps what the
    method asks for, and adds to each key and value a zero, through which the loss can be differentiated."""

    def __init__(self, model, method, differentiable):
        super().__init__(model, method)
        self.differentiable = differentiable
        self.leaves = []  # zeros (1, Hkv, T, d): layer 0's keys, its values, layer 1's keys, ...
        self.gradients = None  # of the loss with respect to the leaves

    def without_prefix(self, tokens):
        return tokens

    def update(self, layer, q, k, v, seen):
        of_layer = self.layers[layer]
        if self.differentiable:
            leaf_k = torch.zeros_like(k, requires_grad=True)  # (1, Hkv, T, d)
            leaf_v = torch.zeros_like(v, requires_grad=True)  # (1, Hkv, T, d)
            self.leaves += [leaf_k, leaf_v]
            k, v = k + leaf_k, v + leaf_v
        of_layer.append(k.detach(), v.detach())
        of_layer.keep(of_layer.length, of_layer.length)
        if self.differentiable:  # not through the 16 bits, where a gradient would vanish
            return self.rope.rotate(k, seen), v
        return of_layer.read()

    def of(self, layer, kind):
        """Keys, or values, of a layer as they are stored: rows (Hkv, T, d), kept (Hkv, T), gradient (Hkv, T, d) or
        None."""
        rows = self.layers[layer].keys if kind == "k" else self.layers[layer].values
        kept = rows.is_kept(rows.recent.shape[2])  # (1, Hkv, T)
        if kept is None:
            kept = torch.zeros_like(rows.recent[..., 0], dtype=torch.bool)  # (1, Hkv, T)
        gradient = None
        if self.gradients is not None:
            gradient = self.gradients[2 * layer + (kind == "v")]  # (1, Hkv, T, d)
            if kind == "k" and self.method.rope == "post":  # the gradient is rotated as the key is
                gradient = self.rope.rotate(gradient)
            gradient = gradient[0]
        return rows.recent[0], kept[0], gradient
