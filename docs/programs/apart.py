"""What docs/crossing.md needs beside the package's methods: `rtn` and `kvsink` with more schemes and another Keep.

    channel-static-rotated, token-dynamic-rotated   the schemes of these names, of rows times a Hadamard matrix
    quarter                                         channel-static with `/ 4` for `/ 3`: as many steps as levels
"""
from functools import partial
from typing import Annotated

from tinykv import one_of
from tinykv.codecs.affine import Affine
from tinykv.codecs.rotated import Rotated
from tinykv.codecs.schemes import SCHEMES
from tinykv.methods.kvsink import KVSink
from tinykv.methods.rtn import RTN


class RotatedStatic(Rotated):
    """Learns its ranges from rotated rows."""
    tables = ("scale", "zero")

    def __init__(self, codec, width):
        super().__init__(codec, width)
        self.needs_text = codec.needs_text

    def fit(self, rows, kept, gradient=None, seed=0):
        self.codec.fit((rows.double() @ self.H).float(), kept)
        self.scale, self.zero = self.codec.scale, self.codec.zero


class Quarter(Affine):
    def grid(self, lo, hi):
        return super().grid(lo, lo + (hi - lo) * (2 ** self.bits - 1) / 2 ** self.bits)


def rotated(scheme, config, kind, bits, group_size=None, formula="offset"):
    make_codec, _ = SCHEMES[scheme]
    return RotatedStatic(make_codec(config, kind, bits, group_size, formula), config.head_dim)


def quarter(config, kind, bits):
    return Quarter(bits, config.head_dim, "channel" if kind == "k" else "token", static=True)


for scheme in ("channel-static", "token-dynamic"):
    SCHEMES[f"{scheme}-rotated"] = partial(rotated, scheme), SCHEMES[scheme][1]
SCHEMES["quarter"] = quarter, "pre"


class Plain(RTN):
    pass


class Marked(KVSink):
    """kvsink --threshold 0.1, with something else for the marked tokens than 16 bits. For a text that comes at once."""

    def __init__(self, config, threshold=0.1,
                 marked: Annotated[str, "exact: 16 bits; own: a grid of a token's own, of as many bits; range: its "
                                        "code in the grid of the others, whose range leaves it out"] = "exact",
                 **kvsink):
        super().__init__(config, threshold=threshold, **kvsink)
        one_of(("exact", "own", "range"), marked=marked)
        self.marked = marked

    def keep_keys(self, layer_cache, n):
        return self.apart(super().keep_keys(layer_cache, n), layer_cache.keys, self.bits_of("k"))

    def keep_values(self, layer_cache, n):
        return self.apart(super().keep_keys(layer_cache, n), layer_cache.values, self.bits_of("v"))

    def apart(self, positions, rows, bits):
        """What is kept of positions (B, 1, k) or None."""
        if positions is None or self.marked == "exact" or self.needs_calibration:  # ranges are being taken
            return positions
        if self.marked == "range":
            return None
        # round the rows before the cache keeps them
        own = Affine(bits, rows.recent.shape[-1])
        index = positions.long()[..., None].expand(*rows.recent.shape[:2], -1, rows.recent.shape[-1])  # (B, Hkv, k, d)
        coded = own.decode(own.encode(rows.recent.gather(2, index)))
        rows.recent = rows.recent.scatter(2, index, coded.to(rows.recent.dtype))
        return positions
