"""Calibration: the one loop that shows calibration windows to methods and their codecs.

The model reads each window in full precision, once for all methods. First come the passes of a method itself, since
what it keeps must be known before its codecs calibrate: KVSink looks for its outlier. Then come the passes of its
codecs, each of which sees keys, or values, of one layer, without the tokens that the method keeps: static ranges,
KVQuant's levels, SKVQ's groups and clips, codebooks.
"""
import torch
import torch.nn.functional as F

from tinykv import UserError, all_finite
from tinykv.cache import KVCache
from tinykv.tracing import Trace


def calibrate(model, methods, windows, progress=None, seed=0):
    """Calibrate a method, or a list of methods, on windows (W, T) of token ids.

    progress: what to wrap a loop in, such as tqdm. seed: of k-means. UserError if the model's numbers are not finite,
    or if a method keeps everything.
    """
    progress = progress or iter
    methods = methods if isinstance(methods, list) else [methods]
    for i in range(max(passes_of(method) for method in methods)):
        # 1. Who looks on in this pass: the methods themselves, or the codecs of those that are done
        looking = [method for method in methods if i < method.passes]
        learning = [(method, codecs_in(method, i - method.passes)) for method in methods if i >= method.passes]
        codecs = [(codec, i - method.passes) for method, found in learning for _, _, codec in found]
        for codec, step in codecs:
            codec.seed = seed
            codec.begin(step, *windows.shape)

        # 2. Read each window once, and show it to all of them
        gradients = any(codec.needs_gradient(step) for codec, step in codecs)
        for window in progress(windows):
            recorder = record(model, window, gradients)
            for method in looking:
                method.collect(i, -1, model.model["embed_tokens"](window[None]).detach())
                for layer, hidden in enumerate(recorder.hidden):
                    method.collect(i, layer, hidden)
            for method, found in learning:
                cache = stored(model, method, recorder)
                for layer, kind, codec in found:
                    codec.collect(i - method.passes, *recorder.of(cache, layer, kind))

        # 3. What they have seen is all there is
        for method in looking:
            method.fit(i)
        for codec, step in progress(codecs):
            codec.fit(step)
    for method in methods:
        method.calibrated_on = model.identity()


def passes_of(method):
    """How often a method and its codecs read the windows."""
    return method.passes + max(codec.passes for _, _, codec in method.each_codec())


def codecs_in(method, step):
    """[(layer, "k" or "v", codec)]: the codecs that have a pass `step`."""
    return [(layer, kind, codec) for layer, kind, codec in method.each_codec() if step < codec.passes]


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

    def of(self, cache, layer, kind):
        """Keys, or values, of a layer as a `stored` cache has them, which a codec can learn from: rows (Hkv, T, d),
        kept (Hkv, T), gradient (Hkv, T, d) or None. UserError if it cannot."""
        of_kind = cache.layers[layer].keys if kind == "k" else cache.layers[layer].values
        n = cache.start  # tokens of a prefix, which every text begins with
        rows = of_kind.recent[:, :, n:]  # (1, Hkv, T, d)
        kept = of_kind.is_kept(len(cache))  # (1, Hkv, n + T)
        if kept is None:
            kept = torch.zeros_like(of_kind.recent[..., 0], dtype=torch.bool)  # (1, Hkv, n + T)
        kept = kept[:, :, n:]  # (1, Hkv, T)
        gradient = None
        if self.gradients is not None:
            gradient = self.gradients[2 * layer + (kind == "v")]  # (1, Hkv, T, d)
            if kind == "k" and cache.method.rope == "post":  # the gradient is rotated as the key is
                gradient = cache.rope.rotate(gradient, n)
            gradient = gradient[0]
        check_window(layer, rows[0], kept[0], gradient)
        return rows[0], kept[0], gradient


def record(model, window, gradients):
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


@torch.no_grad()
def stored(model, method, recorder):
    """What a method stores of a window: a cache in which nothing is quantized yet, and the method has chosen what it
    keeps."""
    cache = KVCache(model, method)
    for layer, of_layer in enumerate(cache.layers):
        of_layer.append(recorder.k[layer], recorder.v[layer])
        of_layer.keep(of_layer.length, of_layer.length)
        cache.observe(layer, recorder.hidden[layer])
    return cache


def check_window(layer, rows, kept, gradient):
    """UserError unless a codec can learn from a window: rows (Hkv, T, d), kept (Hkv, T), gradient as rows or None."""
    all_finite(f"keys or values of layer {layer}", rows)
    if gradient is not None:
        all_finite(f"gradients of layer {layer}", gradient)
    if kept.all(1).any():
        raise UserError(f"calibration windows of {rows.shape[1]} tokens hold no token that the method does not keep; "
                        "use a longer context or keep fewer tokens")
