"""What a method is: answers to three questions about each token's key and value.

Keep: which tokens stay in full precision for good? Code: how is every other token written down? When: how long does a
fresh token stay exact, and how many are coded at a time?
"""
import math

import torch

from tinykv import at_least
from tinykv.schemes import BLOCK, new_scheme
from tinykv.vectors import VectorScheme


class Method:
    """The interface between a method and the cache. A method holds what it has learned; what it has seen of a text
    is in the cache and in the `state` that `observe` hands on, so one method serves any number of caches.

    A subclass's settings are its constructor's keyword arguments, with the paper's values as defaults; the command line
    offers them under the same names, with `-` for `_`, those of a class in a file of the user's, too. `**name` in a
    constructor stands for its parent's settings.
    """
    codecs = ()  # per layer {"k": Codec, "v": Codec}
    k_bits = v_bits = 16  # nominal bits of a number, for the table
    rope = "post"  # keys are stored after RoPE ("post"), or before it and rotated on reading ("pre")
    recent = 0  # tokens that stay exact (protocol stream)
    block = 1  # tokens coded at a time (protocol stream)
    v_block = None  # values coded at a time, where that is another number
    preserve = 0  # tokens kept, for the table
    prefix = None  # an `intact.Prefix`: the tokens that every text begins with, and the rows that a cache begins with
    keeps_share = False  # True: that is a share of the text, and not a number
    compare = ()  # names of methods to show beside this one when it is asked for alone
    anchor_scores = False  # True: what `attend` returns is Eq. 5 of AnTKV, which a backend may compute in its own way
    needs_calibration = False  # True: `calibrate`, or `restore`, has to be called before the first use

    def __init__(self, config):
        pass

    @property
    def chunk(self):
        """A stream may arrive in chunks of this many tokens, the first `recent` longer, as if token by token."""
        return math.gcd(self.block, self.v_block or self.block)

    def calibrate(self, model, windows, progress=None):
        """Learn from calibration windows (W, T) whatever is needed before the first text.

        progress: what to wrap a loop over the windows in, such as tqdm.
        """

    def observe(self, state, layer, hidden, start):
        """Look at the output of block `layer`, hidden (B, T, D), for tokens from position `start` on -> new state."""
        return state

    def attend(self, cache, q, K, positions):
        """Look at new queries, q (B, H, T, d) before RoPE, and all keys K (B, Hkv, S, d), rotated, new ones exact.

        Returns scores of the tokens as keys and as values, (B, Hkv, S) both, or None. The cache adds them up for those
        that are exact: `score` of its parts, (B, Hkv, recent tokens), and `pinned_score`.
        """
        return None

    def keep(self, cache, kind, n, state):
        """Positions to keep from now on: (B, 1 or Hkv, slots), -1 for an empty slot, or None for no change.

        Asked when the n oldest recent tokens of this layer's keys (kind "k"), then of its values (kind "v"), are about
        to be coded. cache is the `LayerCache`: whatever is pinned now or recent can be kept.
        """
        return None

    def encode(self, layer, kind, rows, skip):
        """rows (B, Hkv, T, d) of kind "k" or "v"; skip (B, Hkv, T) marks pinned rows, or is None -> Codes.

        `codecs.Codes`, or anything that has its `nbytes` and its `append` of later codes.
        """
        return self.codecs[layer][kind].encode(rows, skip)

    def decode(self, layer, kind, codes):
        """Codes -> rows (B, Hkv, T, d)."""
        return self.codecs[layer][kind].decode(codes)

    @property
    def offline_bytes(self):
        """Bytes of tables learned once and shared by all texts."""
        return sum(codec.offline_bytes for layer in self.codecs for codec in layer.values())

    def learned(self):
        """What `calibrate` found, as tensors with names, to be saved."""
        return {f"{i}.{kind}.{name}": table for i, layer in enumerate(self.codecs)
                for kind, codec in layer.items() for name, table in codec.learned().items()}

    def restore(self, learned):
        """Take over what `learned` gave, instead of calibrating."""
        for i, layer in enumerate(self.codecs):
            for kind, codec in layer.items():
                prefix = f"{i}.{kind}."
                for key in learned:
                    if key.startswith(prefix):
                        setattr(codec, key.removeprefix(prefix), learned[key])

    def describe(self):
        """One line for the user: what was chosen or found."""
        return ""


def first_tokens(cache, n):
    """What `keep` returns to keep the first n tokens, or all where there are fewer: (B, 1, n), or None for none."""
    if n == 0:
        return None
    rows = cache.k.recent  # (B, Hkv, r, d)
    return torch.arange(min(n, cache.length), device=rows.device).expand(len(rows), 1, -1)


class SchemeMethod(Method):
    """A method whose codec is any of the schemes, and whose own idea is what to keep."""

    def __init__(self, config, k_bits=2, v_bits=2, scheme="channel-static", group_size=None, rope=None, formula=None,
                 outliers=None, sensitivity=None, q_norm=None):
        self.k_bits, self.v_bits = k_bits, v_bits
        given = {"group_size": group_size, "rope": rope, "formula": formula, "outliers": outliers,
                 "sensitivity": sensitivity, "q_norm": q_norm}
        self.scheme = new_scheme(config, scheme, k_bits, v_bits, **{k: v for k, v in given.items() if v is not None})
        self.codecs, self.rope, self.block = self.scheme.codecs, self.scheme.rope, self.scheme.block
        self.needs_calibration = self.scheme.static

    def calibrate(self, model, windows, progress=None):
        if self.scheme.static:
            self.scheme.calibrate(model, self, windows, progress)  # without the tokens that `keep` keeps


class VectorMethod(Method):
    """A method whose codec is a vector codebook, and whose own idea is what to keep."""
    rope, block, needs_calibration = "pre", BLOCK, True

    def __init__(self, config, vq=None, bits=None, sensitivity="fisher", sharing="own", recent=0):
        at_least(0, recent=recent)
        self.scheme, self.recent = VectorScheme(config, vq, bits, sensitivity, sharing), recent
        self.codecs, self.k_bits, self.v_bits = self.scheme.codecs, self.scheme.bits, self.scheme.bits

    def calibrate(self, model, windows, progress=None):
        self.scheme.calibrate(model, self, windows, progress)

    def describe(self):
        return self.scheme.describe()
