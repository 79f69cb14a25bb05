"""Calibration: methods and their codecs learn from windows of text, which the model reads in full precision.

A method may have something to find itself: KVSink looks for its outlier. That comes first, in a reading of its own, as
the codecs of a method learn only from tokens that it does not keep. Then the model reads each window once, for all
methods and codecs. Its keys, its values, and their gradients where a codec asks for them, are held in the memory of the
CPU; and each codec fits its tables to those of one layer: static ranges, KVQuant's levels, SKVQ's groups and clips,
codebooks. Where all layers take too much memory, some of them are held, and then the text is read again for others.
"""
import torch
import torch.nn.functional as F

from tinykv import UserError, all_finite
from tinykv.cache import KVCache
from tinykv.tracing import Trace

HELD = 2 ** 34  # bytes of keys, values and gradients, about


def calibrate(model, methods, windows, progress=None, seed=0):
    """Calibrate a method, or a list of methods, on windows (W, T) of token ids.

    progress: what to wrap a loop in, such as tqdm. seed: of k-means. UserError if the model's numbers are not finite,
    or if a method keeps everything.
    """
    progress = progress or iter
    methods = methods if isinstance(methods, list) else [methods]
    for method in methods:
        method.calibrated_on = None  # until the last table is there

    # 1. What methods have to find themselves
    searching = [method for method in methods if method.needs_text]
    for window in progress(windows) if searching else ():
        hidden = record(model, window).hidden  # [(1, T, D)]
        for method in searching:
            method.collect([model.model["embed_tokens"](window[None]).detach(), *hidden])
    for method in searching:
        method.fit()

    # 2. Each codec learns from its keys, or values, of all windows, which are read once
    learning = [method for method in methods if learners(method)]
    gradients = any(codec.needs_gradient for method in learning for _, _, codec in learners(method))
    for layers in layers_at_once(model, windows, gradients) if learning else ():
        for text in texts(model, learning, windows, layers, gradients, progress):
            for layer, kind, codec in progress([one for one in learners(text.method) if one[0] in layers]):
                codec.fit(*text.of(layer, kind), seed)
    identity = model.identity()
    for method in methods:
        method.calibrated_on = identity, method.stored_as()


def learners(method):
    """[(layer, "k" or "v", codec)]: the codecs that need text."""
    return [(layer, kind, codec) for layer, kind, codec in method.each_codec() if codec.needs_text]


def layers_at_once(model, windows, gradients):
    """The model's layers, as many at a time as may be held: [range]."""
    config, size = model.config, 2 + gradients * model.lm_head.weight.itemsize  # bytes of a number
    of_layer = 2 * windows.numel() * config.num_key_value_heads * config.head_dim * size
    n, L = max(1, HELD // of_layer), config.num_hidden_layers
    return [range(first, min(first + n, L)) for first in range(0, L, n)]


class Recorder(Trace):
    """A forward in full precision, recorded. It adds to each key and value a zero, through which the loss can be
    differentiated."""

    def __init__(self, model):
        super().__init__(model)
        self.leaves = []  # zeros (1, Hkv, T, d): layer 0's keys, its values, layer 1's keys, ...
        self.gradients = None  # of the loss with respect to the leaves

    def update(self, layer, q, k, v, seen):
        leaf_k = torch.zeros_like(k, requires_grad=True)  # (1, Hkv, T, d)
        leaf_v = torch.zeros_like(v, requires_grad=True)  # (1, Hkv, T, d)
        self.leaves += [leaf_k, leaf_v]
        return super().update(layer, q, k + leaf_k, v + leaf_v, seen)

    def of(self, layers):
        """Keys, values and gradients of these layers in the memory of the CPU, keys and values in 16 bits:
        {(layer, "k", "v", or as "gradient of k"): (1, Hkv, T, d)}."""
        found, dtype = {}, self.k[0].dtype if self.k[0].dtype.itemsize == 2 else torch.float16
        for layer in layers:
            for i, (kind, rows) in enumerate((("k", self.k), ("v", self.v))):
                found[layer, kind] = rows[layer].to("cpu", dtype)
                if self.gradients is not None:
                    found[layer, f"gradient of {kind}"] = self.gradients[2 * layer + i].cpu()
        return found


def record(model, window, gradients=False):
    """The `Recorder` of a window (T): its keys, values, hidden states, and the loss's gradients if asked for."""
    recorder = Recorder(model)
    with torch.set_grad_enabled(gradients):
        hidden = model(window[None], recorder, logits=False)  # (1, T, D)
        if gradients:
            logits = model.lm_head(hidden[0, :-1]).float()  # (T - 1, vocab)
            loss = F.cross_entropy(logits, window[1:])
            recorder.gradients = torch.autograd.grad(loss, recorder.leaves)
    all_finite("hidden states of the model", hidden)
    for held in (recorder.k, recorder.v, recorder.hidden):
        held[:] = [x.detach() for x in held]
    return recorder


def texts(model, methods, windows, layers, gradients=False, progress=iter):
    """Read each window (W, T) once -> the `Text` of each method, which holds some layers."""
    recorded = []
    found = [Text(model, method, recorded) for method in methods]
    for window in progress(windows):
        recorder = record(model, window, gradients)
        for text in found:
            text.choose(recorder)
        recorded.append(recorder.of(layers))
    return found


class Text:
    """What a method stores of the windows, before anything is quantized. recorded: see `Recorder.of`, by window."""

    def __init__(self, model, method, recorded):
        self.model, self.method, self.recorded = model, method, recorded
        self.kept = []  # of each window: {(layer, "k" or "v"): (1, Hkv, T)}, True at tokens that the method keeps

    @torch.no_grad()
    def choose(self, recorder):
        """Let the method choose what it keeps of a window."""
        cache, kept = KVCache(self.model, self.method), {}
        self.devices = [k.device for k in recorder.k]  # of each layer
        for i, layer in enumerate(cache.layers):
            layer.append(recorder.k[i], recorder.v[i])
            layer.keep(layer.length, layer.length)
            cache.observe(i, recorder.hidden[i])
            for rows in (layer.keys, layer.values):
                of_rows = rows.is_kept(layer.length)  # (1, Hkv, n + T), n tokens of a prefix
                if of_rows is None:
                    of_rows = torch.zeros_like(rows.recent[..., 0], dtype=torch.bool)
                kept[i, rows.kind] = of_rows[:, :, cache.start:].cpu()
        self.kept.append(kept)

    @torch.no_grad()
    def of(self, layer, kind):
        """What a codec learns from, on the layer's device: rows (W, Hkv, T, d), as the method stores them, kept (W,
        Hkv, T), gradient (W, Hkv, T, d) or None. UserError if it cannot learn from them."""
        cache = KVCache(self.model, self.method)
        cache.layers[layer].append(self.all(layer, "k"), self.all(layer, "v"))
        rows = cache.layers[layer].keys if kind == "k" else cache.layers[layer].values
        rows = rows.recent[:, :, cache.start:]  # (W, Hkv, T, d)
        kept = torch.cat([of[layer, kind] for of in self.kept]).to(rows.device)  # (W, Hkv, T)
        gradient = None
        if (layer, f"gradient of {kind}") in self.recorded[0]:
            gradient = self.all(layer, f"gradient of {kind}")
            if kind == "k" and self.method.rope == "post":  # the gradient is rotated as the key is
                gradient = self.model.rope.rotate(gradient, cache.start)
        check(layer, rows, kept, gradient)
        return rows, kept, gradient

    def all(self, layer, what):
        """Of all windows, on the layer's device: (W, Hkv, T, d)."""
        return torch.cat([of[layer, what] for of in self.recorded]).to(self.devices[layer])


def check(layer, rows, kept, gradient):
    """UserError unless a codec can learn from rows (W, Hkv, T, d), kept (W, Hkv, T), gradient as rows or None."""
    all_finite(f"keys or values of layer {layer}", rows)
    if gradient is not None:
        all_finite(f"gradients of layer {layer}", gradient)
    if kept.all(-1).any():
        raise UserError(f"calibration windows of {rows.shape[2]} tokens hold no token that the method does not keep; "
                        "use a longer context or keep fewer tokens")
