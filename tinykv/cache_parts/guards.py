"""Texts that a cache refuses, and calibration windows."""
import torch

from tinykv import UserError


def check_text(cache, T):
    """UserError if the method is not calibrated; ValueError if T new tokens are not what comes next: one text under
    `paper`, or the prompt."""
    seen = len(cache)
    if seen == cache.start and cache.method.needs_calibration:
        raise UserError(f"{cache.method!r} knows nothing of this model yet; run calibrate(model, method, windows) "
                        "first")
    if cache.prompt is None and cache.protocol == "paper" and seen > cache.start:
        raise ValueError("the paper protocol reads a text in one forward; use protocol='stream', or give the "
                         "prompt's length, to go on from it")
    if cache.prompt is not None and seen == cache.start and T != cache.prompt:
        raise ValueError(f"the first forward reads the prompt, {cache.prompt} tokens; it got {T}")


def check_prefix(tokens, prefix):
    """UserError if a text (B, T) does not begin with the prefix, or has nothing after it."""
    ids = torch.tensor(prefix.ids, device=tokens.device)  # (n)
    if tokens.shape[1] <= len(ids):
        raise UserError(f"a text of {tokens.shape[1]} tokens has none after a prefix of {len(ids)}")
    if not (tokens[:, :len(ids)] == ids).all():
        raise UserError(f"the text does not begin with the {len(ids)} tokens of the prefix {prefix.name}")


class CheckedWindows:
    """What codecs see of calibration windows: finite numbers, and in each KV head a token that is not kept."""

    def __init__(self):
        self.has_others = {}  # {(layer, kind): which KV heads have had a token that is not kept}

    def look(self, layer, kind, rows, kept, gradient):
        """At one window's rows (Hkv, T, d), kept (Hkv, T) or None, gradient (Hkv, T, d) or None."""
        if not torch.isfinite(rows).all():
            raise UserError(f"layer {layer} computes numbers that are not finite, or too large for 16 bits; use "
                            "another --dtype, or another model")
        if gradient is not None and not torch.isfinite(gradient).all():
            raise UserError(f"the loss has no finite gradient in layer {layer}; use another --dtype, or calibrate "
                            "without gradients")
        others = torch.tensor(True) if kept is None else ~kept.all(1).cpu()  # () or (Hkv)
        self.has_others[layer, kind] = self.has_others.get((layer, kind), False) | others

    def check(self, T):
        """All windows, of T tokens each, have been seen."""
        if not all(heads.all() for heads in self.has_others.values()):
            raise UserError(f"calibration windows of {T} tokens hold no token that the method does not keep; use a "
                            "longer context or keep fewer tokens")
