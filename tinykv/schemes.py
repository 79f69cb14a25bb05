"""The schemes that rtn, pfn and kvsink can stand on: which codec writes the keys, and which the values.

    token-dynamic     K and V per token, the range of each group taken from the token itself
    token-static      K and V per token, the range of each channel group taken from calibration text
    channel-static    K per channel, V per token, both ranges from calibration text
    channel-dynamic   K per channel in groups of tokens, V per token, ranges from the tokens themselves

All four round to the nearest integer. The zero point is the minimum itself ("offset", as in KIVI and KVQuant), or an
integer ("integer-zero", KVSink's Eq. 10-13, where it comes with general remarks and not with the experiments). The
latter shifts the grid by up to half a step, which at 2 bits costs more than it saves, and it can write 0 exactly, which
flatters tokens whose values are nearly 0, as those of sinks are.

Without a group size, a group is one head of a token, or 128 tokens of a channel; the papers use 128 for both, which is
one head of a LLaMA.

Keys are coded after RoPE per token, and before RoPE per static channel: KVQuant found each the better of the two, since
RoPE mixes a channel pair over the positions and so widens a channel's range. KVSink does not say what it did. Dynamic
channels are coded after RoPE, as KIVI does: a short group of tokens spans few turns.
"""
from tinykv import UserError
from tinykv.codecs import FORMULAS, Affine, Exact

#        name:            K axis,    V axis,  static, RoPE
SCHEMES = {
    "token-dynamic": ("token", "token", False, "post"),
    "token-static": ("token", "token", True, "post"),
    "channel-static": ("channel", "token", True, "pre"),
    "channel-dynamic": ("channel", "token", False, "post"),
}
BLOCK = 128  # tokens coded at a time in a stream, and the tokens of a channel group unless told otherwise


class Scheme:
    """The codecs of every layer's K and V under one of the names above."""

    def __init__(self, config, name, k_bits, v_bits, group_size=None, rope=None, formula="offset"):
        if name not in SCHEMES:
            raise UserError(f"unknown scheme {name!r}; there are {', '.join(SCHEMES)}")
        if rope not in (None, "pre", "post"):
            raise UserError(f"rope is 'pre' or 'post'; got {rope!r}")
        if formula not in FORMULAS:
            raise UserError(f"formula is one of {', '.join(FORMULAS)}; got {formula!r}")
        if group_size is not None and group_size < 1:
            raise UserError(f"the group size must be at least 1; got {group_size}")
        k_axis, v_axis, self.static, default_rope = SCHEMES[name]
        self.name, self.rope = name, rope or default_rope
        self.block = group_size if group_size and name == "channel-dynamic" else BLOCK
        self.codecs = [{"k": codec(k_bits, config.head_dim, k_axis, group_size, formula),
                        "v": codec(v_bits, config.head_dim, v_axis, group_size, formula)}
                       for _ in range(config.num_hidden_layers)]

    def fit(self, ranges):
        """Fix the static grids. ranges: per layer {"k": (lo, hi), "v": (lo, hi)}, each (Hkv, d)."""
        for layer, of_layer in zip(self.codecs, ranges):
            for kind, (lo, hi) in of_layer.items():
                if isinstance(layer[kind], Affine):
                    layer[kind].fix(lo, hi)

    def encode(self, layer, kind, rows, skip):
        c = self.codecs[layer][kind]
        if self.static and isinstance(c, Affine) and c.scale is None:
            raise UserError(f"scheme {self.name} has no ranges yet; call the method's `calibrate` first")
        return c.encode(rows, skip)

    def decode(self, layer, kind, codes):
        return self.codecs[layer][kind].decode(codes)

    @property
    def offline_bytes(self):
        return sum(c.offline_bytes for layer in self.codecs for c in layer.values())


def codec(bits, width, axis, group_size, formula):
    """The codec of one layer's keys or values, or a clear error."""
    if bits == 16:
        return Exact()
    if group_size is None and axis == "channel":
        group_size = BLOCK
    try:
        return Affine(int(bits) if bits == int(bits) else bits, width, axis, group_size, formula)
    except ValueError as error:
        raise UserError(str(error)) from None
