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
    if tokens.shape[1] <= len(ids) or not (tokens[:, :len(ids)] == ids).all():
        raise UserError(f"a text begins with the {len(ids)} tokens of the prefix {prefix.name} and goes on after them; "
                        f"this one of {tokens.shape[1]} tokens does not")


def check_window(layer, rows, kept, gradient):
    """UserError unless a codec can learn from a calibration window: rows (Hkv, T, d), kept (Hkv, T), gradient (Hkv,
    T, d) or None."""
    check_numbers(f"keys or values of layer {layer}", rows)
    if gradient is not None:
        check_numbers(f"gradients of layer {layer}", gradient)
    if kept.all(1).any():
        raise UserError(f"calibration windows of {rows.shape[1]} tokens hold no token that the method does not keep; "
                        "use a longer context or keep fewer tokens")


def check_numbers(what, numbers):
    """UserError if they are not all finite."""
    if not numbers.isfinite().all():
        raise UserError(f"{what} are not finite, or too large for 16 bits; use another --dtype, or another model")
