"""A pass over calibration windows, for whatever a method learns beforehand; and a file to keep what was learned."""
import json
from pathlib import Path

import torch
import torch.nn.functional as F

from tinykv import UserError, checkpoint, files
from tinykv.cache import KVCache


class Recorder(KVCache):
    """A cache that codes nothing. It holds a window's keys and values as the method would store them, and which of them
    the method would keep; with `gradients`, also a leaf beside each, through which a loss can be differentiated."""

    def __init__(self, model, method, gradients=False):
        super().__init__(model, method)
        self.gradients = gradients
        self.kept, self.leaves = [], []  # per layer and kind: (1, Hkv, T) or None; (1, Hkv, T, d)

    def update(self, layer, q, k, v, positions):
        cache = self.layers[layer]
        if self.gradients:
            self.leaves += [torch.zeros_like(k, requires_grad=True), torch.zeros_like(v, requires_grad=True)]
            k, v = k + self.leaves[-2], v + self.leaves[-1]
        cache.append(k.detach(), v.detach(), positions)
        for part in (cache.k, cache.v):
            index = self.method.keep(cache, part.kind, cache.length, self.state)  # (1, 1 or Hkv, n) or None
            if index is not None:
                part.pin(index)
            self.kept.append(part.is_pinned(cache.length))
        if self.gradients:  # not by way of 16 bits, where a gradient would vanish
            return self.rope.rotate(k, positions), v
        K, V = cache.read()  # (1, Hkv, T, d)
        return K.to(k.dtype), V.to(v.dtype)


def recorded(model, method, windows, progress=None, gradients=False):
    """Run each of windows (W, T) in full precision; yields (layer, kind, rows, kept, gradient) for each of its parts.

    rows (Hkv, T, d): keys or values as the method stores them; kept (Hkv, T): what it would keep, or None; gradient
    (Hkv, T, d): of the window's mean loss with respect to rows, or None if gradients are not asked for. UserError if
    the model's numbers are not finite, or if everything is kept.
    """
    free = {}  # (layer, kind): whether there was a token that is not kept, for each KV head
    for window in windows if progress is None else progress(windows):
        recorder = Recorder(model, method, gradients)
        with torch.set_grad_enabled(gradients):
            hidden = model.hidden(window[None], recorder)  # (1, T, D)
            found = [None] * len(recorder.kept)
            if gradients:
                loss = F.cross_entropy(model.lm_head(hidden[0, :-1]).float(), window[1:])
                found = torch.autograd.grad(loss, recorder.leaves)
        parts = [(i, part) for i, layer in enumerate(recorder.layers) for part in (layer.k, layer.v)]
        for (layer, part), kept, gradient in zip(parts, recorder.kept, found):
            if not torch.isfinite(part.recent).all():
                raise UserError(f"layer {layer} computes numbers that are not finite, or too large for 16 bits; use "
                                "another --dtype, or another model")
            if gradient is not None:
                if not torch.isfinite(gradient).all():
                    raise UserError(f"the loss has no finite gradient in layer {layer}; use another --dtype, or "
                                    "learn without gradients")
                if part.kind == "k" and method.rope == "post":
                    gradient = model.rope.rotate(gradient, torch.arange(gradient.shape[2], device=gradient.device))
                gradient = gradient[0]
            free[layer, part.kind] = free.get((layer, part.kind), False) | (kept is None or ~kept.all(2))
            yield layer, part.kind, part.recent[0], None if kept is None else kept[0], gradient
    if not all(torch.as_tensor(any_left).all() for any_left in free.values()):
        raise UserError(f"calibration windows of {windows.shape[1]} tokens leave nothing beside the tokens that are "
                        "kept; use a longer context or keep fewer")


@torch.no_grad()
def kv_ranges(model, method, windows, progress=None):
    """windows (W, T) -> per layer {"k": (lo, hi), "v": (lo, hi)}, each (Hkv, d): without what the method keeps."""
    ranges = [{} for _ in range(model.config.num_hidden_layers)]
    for layer, kind, rows, kept, _ in recorded(model, method, windows, progress):
        lo = hi = rows.float()  # (Hkv, T, d)
        if kept is not None:
            lo = lo.masked_fill(kept[..., None], float("inf"))
            hi = hi.masked_fill(kept[..., None], float("-inf"))
        lo, hi = lo.amin(1), hi.amax(1)  # (Hkv, d) both
        if kind in ranges[layer]:
            lo, hi = torch.minimum(lo, ranges[layer][kind][0]), torch.maximum(hi, ranges[layer][kind][1])
        ranges[layer][kind] = lo, hi
    return ranges


class Learned:
    """What has been learned for a model, {name: {table: tensor}}; with a path, also in a file. data: from what text."""

    def __init__(self, path, model, data):
        self.path, self.model, self.data = path, model, data
        self.tables = load_learned(path, model, data) if path else {}
        self.saved = len(self.tables)

    def take(self, name, learn):
        """The tables of that name; if there are none yet, learn() gives them."""
        if name not in self.tables:
            self.tables[name] = learn()
        return self.tables[name]

    def save(self):
        if self.path and len(self.tables) > self.saved:
            save_learned(self.path, self.model, self.data, self.tables)


def save_learned(path, model, data, learned):
    """Write what methods have learned, whole or not at all.

    data: what it was learned on, in words. learned {name: {table: tensor}}; the name says the method and its settings.
    """
    tensors = {f"{name}/{table}": tensor for name, tables in learned.items() for table, tensor in tables.items()}
    notes = {"format": "tinykv-calibration", "model": checkpoint.fingerprint(model), "data": data,
             "names": json.dumps(list(learned))}
    files.save_tensors(path, tensors, notes)


def load_learned(path, model, data):
    """What `save_learned` wrote, {name: {table: tensor}}, on the model's device; {} where there is no such file.

    UserError if it is not such a file, or was learned on another model or other data.
    """
    if not Path(path).exists():
        return {}
    tensors, notes = files.load_tensors(path, "calibration file", model.lm_head.weight.device)
    if notes.get("format") != "tinykv-calibration":
        raise UserError(f"{path} is a safetensors file, but not one that --calibration wrote")
    learned = {name: {} for name in json.loads(notes.get("names", "[]"))}
    tables = [(*key.rpartition("/")[::2], tensor) for key, tensor in tensors.items()]  # name, table, tensor
    if not {"model", "data"} <= notes.keys() or {name for name, _, _ in tables} - learned.keys():
        raise UserError(f"{path} is not whole, or of another version; remove it to learn anew")
    for what, found, wanted in (("model", notes["model"], checkpoint.fingerprint(model)),
                                ("data", notes["data"], data)):
        if found != wanted:
            raise UserError(f"{path} was learned on another {what}: {found}, and not {wanted}; give another file name")
    for name, table, tensor in tables:
        learned[name][table] = tensor
    return learned
