"""What a method is: answers to three questions about each token's key and value.

Keep: which tokens stay in full precision for good? Code: how is every other token written down? When: how long does a
fresh token stay exact, and how many are coded at a time?
"""
import torch

from tinykv.calibrate import kv_ranges
from tinykv.schemes import Scheme


class Method:
    """The interface between a method and the cache. A method holds what it has learned; what it has seen of a text
    is in the cache and in the `state` that `observe` hands on, so one method serves any number of caches.

    A subclass's settings are its constructor's keyword arguments, with the paper's values as defaults; the command line
    offers them under the same names, with `-` for `_`.
    """
    rope = "post"  # keys are stored after RoPE ("post"), or before it and rotated on reading ("pre")
    recent = 0  # tokens that stay exact (protocol stream)
    block = 1  # tokens coded at a time (protocol stream)
    compare = ()  # names of methods to show beside this one when it is asked for alone
    needs_calibration = False  # True: `calibrate` has to be called before the first use

    def calibrate(self, model, windows, progress=None):
        """Learn from calibration windows (W, T) whatever is needed before the first text.

        progress: what to wrap a loop over the windows in, such as tqdm.
        """

    def observe(self, state, layer, hidden, start):
        """Look at the output of block `layer`, hidden (B, T, D), for tokens from position `start` on -> new state."""
        return state

    def keep(self, cache, state):
        """Positions to keep in this layer from now on: (B, 1 or Hkv, n), -1 for an empty slot, or None for none.

        Asked when tokens are about to be coded. cache is the `LayerCache`: every position that is pinned now, or
        recent (from `cache.first` up to `cache.length`), can be kept.
        """
        return None

    def encode(self, layer, kind, rows, skip):
        """rows (B, Hkv, T, d) of kind "k" or "v"; skip (B, Hkv, T) marks pinned rows, or is None -> Codes."""
        raise NotImplementedError

    def decode(self, layer, kind, codes):
        """Codes -> rows (B, Hkv, T, d)."""
        raise NotImplementedError

    @property
    def offline_bytes(self):
        """Bytes of tables learned once and shared by all texts."""
        return 0

    def describe(self):
        """One line for the user: what was chosen or found."""
        return ""


def first_tokens(cache, n):
    """What `keep` returns to keep the first n tokens, or all where there are fewer: (B, 1, n)."""
    rows = cache.k.recent  # (B, Hkv, r, d)
    return torch.arange(min(n, cache.length), device=rows.device).expand(len(rows), 1, -1)


class SchemeMethod(Method):
    """A method whose codec is any of the schemes, and whose own idea is what to keep."""

    def __init__(self, config, k_bits=2, v_bits=2, scheme="channel-static", group_size=None, rope=None,
                 formula="offset"):
        self.k_bits, self.v_bits = k_bits, v_bits
        self.scheme = Scheme(config, scheme, k_bits, v_bits, group_size, rope, formula)
        self.rope, self.block = self.scheme.rope, self.scheme.block
        self.needs_calibration = self.scheme.static

    def calibrate(self, model, windows, progress=None):
        if self.scheme.static:
            self.scheme.fit(kv_ranges(model, self, windows, progress))  # without the tokens that `keep` keeps

    def encode(self, layer, kind, rows, skip):
        return self.scheme.encode(layer, kind, rows, skip)

    def decode(self, layer, kind, codes):
        return self.scheme.decode(layer, kind, codes)

    @property
    def offline_bytes(self):
        return self.scheme.offline_bytes
