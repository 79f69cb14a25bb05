"""One pass over calibration windows, for whatever a method learns beforehand."""
import torch

from tinykv import UserError
from tinykv.cache import KVCache


class RangeRecorder(KVCache):
    """A cache that codes nothing and notes, per layer, the smallest and largest value of each channel of K and V.

    Keys are seen as the method stores them (before or after RoPE), and the tokens that it would keep are left out.
    """

    def __init__(self, model, method):
        super().__init__(model, method)
        self.ranges = [{} for _ in self.layers]

    def update(self, layer, q, k, v, positions):
        cache = self.layers[layer]
        cache.append(k, v, positions)
        index = self.method.keep(cache, self.state)  # (B, 1 or Hkv, n) or None
        for kind, part in (("k", cache.k), ("v", cache.v)):
            lo = hi = part.recent.float()  # (B, Hkv, T, d)
            if index is not None:
                part.pin(index, 0)
                out = part.is_pinned(cache.length, 0)[..., None]  # (B, Hkv, T, 1)
                lo, hi = lo.masked_fill(out, float("inf")), hi.masked_fill(out, float("-inf"))
            lo, hi = lo.amin((0, 2)), hi.amax((0, 2))  # (Hkv, d) both
            if kind in self.ranges[layer]:
                old_lo, old_hi = self.ranges[layer][kind]
                lo, hi = torch.minimum(lo, old_lo), torch.maximum(hi, old_hi)
            self.ranges[layer][kind] = lo, hi
        K, V = cache.read()  # (B, Hkv, T, d)
        return K.to(k.dtype), V.to(v.dtype)


@torch.no_grad()
def kv_ranges(model, method, windows, progress=None):
    """windows (W, T) -> per layer {"k": (lo, hi), "v": (lo, hi)}, each (Hkv, d): without what the method keeps."""
    recorder = RangeRecorder(model, method)
    for window in windows if progress is None else progress(windows):
        recorder.reset()
        model.hidden(window[None], recorder)
    if not all(torch.isfinite(t).all() for layer in recorder.ranges for pair in layer.values() for t in pair):
        raise UserError(f"calibration windows of {windows.shape[1]} tokens leave nothing beside the tokens that are "
                        "kept; use a longer context or keep fewer")
    return recorder.ranges
