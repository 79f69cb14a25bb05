"""Calibration: methods and their codecs learn from windows of text, which the model reads in full precision.

The model reads each window once, for all methods. What its layers compute is held in the memory of the CPU: keys,
values, hidden states, and gradients if a codec asks for them. A method may search for something itself, as KVSink does
for its outlier. That comes first, because codecs learn only from tokens that their method does not keep. Then each
codec fits its tables to all keys, or values, of its layer: static ranges, KVQuant's levels, SKVQ's groups and clips,
codebooks. If all layers take too much memory, some of them are held, and the text is read again for the others.
"""
import torch
import torch.nn.functional as F

from tinykv import UserError, all_finite
from tinykv.cache import KVCache, made_with
from tinykv.codecs.base import sixteen_bits
from tinykv.model import Trace, check_tokens

HELD = 2 ** 34  # bytes of what layers computed, about


def calibrate(model, methods, windows, progress=None, seed=0):
    """Calibrate a method, or a list of methods, on windows (W, T) of token ids.

    progress: what to wrap a loop in, such as tqdm. seed: of k-means. UserError if the model's numbers are not finite,
    or if a method keeps everything.
    """
    check_tokens(windows, model.config)
    progress = progress or iter
    methods = list(methods) if isinstance(methods, list | tuple) else [methods]
    for method in methods:
        if isinstance(method, type) or not hasattr(method, "each_codec"):
            raise UserError(f"calibrate takes methods that are made, such as KIVI(model.config); got {method!r}")
        method.calibrated_on = None  # until the last table is there
    codecs = [codec for method in methods for codec in method.learning()]
    for codec in codecs:  # what a method keeps does not depend on tables of other text
        vars(codec).update(dict.fromkeys(codec.tables))
    gradients = any(codec.needs_gradient for codec in codecs)
    text = Text(model, windows, gradients, progress)

    # 1. What methods have to find themselves
    for method in methods:
        if method.needs_text:
            method.fit(text.hidden())

    # 2. Each codec learns from its keys, or values, of all windows, as the method's cache stores them
    caches = [KVCache(model, method) for method in methods if method.learning()]
    for layer in progress(range(model.config.num_hidden_layers)) if caches else ():
        computed = text[layer]
        for cache in caches:
            for codec, *learned_from in shown(cache, layer, computed):
                if codec.needs_text:
                    codec.fit(*learned_from, seed)
    identity = model.identity()
    for method in methods:
        method.calibrated_on = identity, made_with(method), method.each_codec()


@torch.no_grad()
def shown(cache, layer, computed):
    """Feed one layer's keys and values, of all windows, to a method's cache, and let the method choose what it keeps.
    Call it for layer 0, then 1, and so on.

    Returns what the two codecs learn from, keys first: [(codec, rows (W, Hkv, T, d), kept (W, Hkv, T), gradient (W,
    Hkv, T, d) or None)]. computed: see `Text`. UserError if nothing can be learned from it.
    """
    layer_cache, examples = cache.layers[layer], []
    layer_cache.append(computed["k"], computed["v"])
    layer_cache.keep(layer_cache.length, layer_cache.length)
    cache.observe(layer, computed["hidden"])
    for cached in (layer_cache.keys, layer_cache.values):
        rows = cached.recent[:, :, cache.start:]  # (W, Hkv, T, d), without a prefix
        kept = cached.is_kept(layer_cache.length)  # (W, Hkv, n + T), n tokens of a prefix
        if kept is None:
            kept = torch.zeros_like(cached.recent[..., 0], dtype=torch.bool)
        kept = kept[:, :, cache.start:]  # (W, Hkv, T)
        gradient = computed.get(f"gradient of {cached.kind}")
        if gradient is not None and cached.kind == "k" and cache.method.rope == "post":
            gradient = cache.rope.rotate(gradient, cache.start)  # as the key is
        check(layer, rows, kept, gradient)
        examples.append((cached.codec, rows, kept, gradient))
    cache.layers[layer] = None  # whose rows take memory, and no later layer looks at them
    return examples


def check(layer, rows, kept, gradient):
    """UserError unless a codec can learn from rows (W, Hkv, T, d), kept (W, Hkv, T), gradient as rows or None."""
    all_finite(f"keys or values of layer {layer}", rows)
    if gradient is not None:
        all_finite(f"gradients of layer {layer}", gradient)
    if kept.all(-1).any():
        raise UserError(f"calibration windows of {rows.shape[2]} tokens hold no token that the method does not keep; "
                        "use a longer context or keep fewer tokens")


class Text:
    """What the model computes of all windows (W, T), by layer: `text[3]` is {"k", "v": (W, Hkv, T, d) before RoPE,
    "hidden": the layer's output (W, T, D)}, and where gradients are asked for, those of each window's loss with respect
    to keys and values, {"gradient of k", "gradient of v"}.

    Asking for a layer that is not in memory reads the windows again, and keeps as many layers as fit.
    """

    def __init__(self, model, windows, gradients=False, progress=iter):
        self.model, self.windows, self.gradients, self.progress = model, windows, gradients, progress
        config, size = model.config, model.lm_head.weight.itemsize
        of_rows = 2 * config.num_key_value_heads * config.head_dim * (2 + gradients * size)  # bytes of a token
        of_layer = windows.numel() * (of_rows + config.hidden_size * size)  # bytes
        self.at_once = max(1, HELD // of_layer)  # layers
        self.held = {}  # {layer: [{"k": (1, Hkv, T, d), ...} of each window]}
        self.devices = {}  # {layer: where it is}

    def __getitem__(self, layer):
        if layer not in self.held:
            self.read(layer)
        windows = self.held[layer]
        return {what: torch.cat([window[what] for window in windows]).to(self.devices[layer]) for what in windows[0]}

    def read(self, first):
        """Read all windows, and hold the layers from `first` on, as many as may be. Keys and values are in 16 bits."""
        L = self.model.config.num_hidden_layers
        self.held = {layer: [] for layer in range(first, min(first + self.at_once, L))}
        for window in self.progress(self.windows):
            recorder = record(self.model, window, self.gradients)
            for layer, windows in self.held.items():
                computed = recorder.of(layer)
                self.devices[layer] = computed["k"].device
                windows.append({what: x.cpu() for what, x in computed.items()})

    def hidden(self):
        """Yield the embedding of all windows, and each layer's output: (W, T, D) each."""
        yield self.model.model["embed_tokens"](self.windows).detach()
        for layer in range(self.model.config.num_hidden_layers):
            yield self[layer]["hidden"]


class Recorder(Trace):
    """A forward in full precision, recorded. The loss can be differentiated with respect to each key and value."""

    gradients = None  # of the loss, (1, Hkv, T, d) each: with respect to the keys of all layers, then to the values

    def update(self, layer, q, k, v, seen):
        return super().update(layer, q, k.requires_grad_(), v.requires_grad_(), seen)

    def of(self, layer):
        """What a layer computed, as in `Text`, of one window."""
        k, v, hidden = (recorded[layer].detach() for recorded in (self.k, self.v, self.hidden))
        computed = {"k": sixteen_bits(k), "v": sixteen_bits(v), "hidden": hidden}
        if self.gradients is not None:
            of_keys, of_values = self.gradients[layer], self.gradients[len(self.k) + layer]
            computed |= {"gradient of k": of_keys, "gradient of v": of_values}
        return computed


def record(model, window, gradients=False):
    """The `Recorder` of a window (T): its keys, values, hidden states, and the loss's gradients if asked for."""
    recorder = Recorder(model)
    with torch.inference_mode(False), torch.set_grad_enabled(gradients):
        window = window.to(torch.long, copy=True)  # tokens of inference mode have no gradients
        hidden = model(window[None], recorder, logits=False)  # (1, T, D)
        if gradients:
            logits = model.lm_head(hidden[0, :-1]).float()  # (T - 1, vocab)
            loss = F.cross_entropy(logits, window[1:])
            recorder.gradients = torch.autograd.grad(loss, recorder.k + recorder.v)
    all_finite("hidden states of the model", hidden)
    return recorder
