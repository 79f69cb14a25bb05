"""The schemes that rtn, pfn and kvsink can stand on: which codec writes the keys, and which the values.

    token-dynamic     K and V per token, the range of each group taken from the token itself
    token-static      K and V per token, the range of each channel group taken from calibration text
    channel-static    K per channel, V per token, both ranges from calibration text
    channel-dynamic   K per channel in groups of tokens, V per token, ranges from the tokens themselves
    kvquant           non-uniform levels and sparse outliers, K per channel and static, V per token: `nonuniform.py`

The first four round to the nearest integer. The zero point is the minimum itself ("offset", as in KIVI and KVQuant), or
an integer ("integer-zero", KVSink's Eq. 10-13, where it comes with general remarks and not with the experiments). The
latter shifts the grid by up to half a step, which at 2 bits costs more than it saves, and it can write 0 exactly, which
flatters tokens whose values are nearly 0, as those of sinks are.

Without a group size, a group is one head of a token, or 128 tokens of a channel; the papers use 128 for both, which is
one head of a LLaMA. A group of channels is never longer than a head.

Keys are coded after RoPE per token, and before RoPE per static channel: KVQuant found each the better of the two, since
RoPE mixes a channel pair over the positions and so widens a channel's range. KVSink does not say what it did. Dynamic
channels are coded after RoPE, as KIVI does: a short group of tokens spans few turns.
"""
from tinykv import UserError, at_least, one_of
from tinykv.calibrate import kv_ranges
from tinykv.codecs import FORMULAS, Affine, Exact
from tinykv.nonuniform import NonUniformScheme

#        name:            K axis,    V axis,  static, RoPE
UNIFORM = {
    "token-dynamic": ("token", "token", False, "post"),
    "token-static": ("token", "token", True, "post"),
    "channel-static": ("channel", "token", True, "pre"),
    "channel-dynamic": ("channel", "token", False, "post"),
}
SCHEMES = (*UNIFORM, "kvquant")
BLOCK = 128  # tokens coded at a time in a stream, and the tokens of a channel group unless told otherwise


def settings_of_scheme(name):
    """The names of a scheme's own settings. UserError for a scheme that is not there."""
    if name not in SCHEMES:
        raise UserError(f"unknown scheme {name!r}; there are {', '.join(SCHEMES)}")
    return ("rope", "group_size", "formula") if name in UNIFORM else ("rope", "outliers", "sensitivity", "q_norm")


def new_scheme(config, name, k_bits, v_bits, **settings):
    """A scheme by its name and its own settings."""
    for setting in settings:
        if setting not in settings_of_scheme(name):
            raise UserError(f"{setting.replace('_', ' ')} is not a setting of the scheme {name}")
    one_of(("pre", "post"), rope=settings.get("rope"))
    if name in UNIFORM:
        return Scheme(config, name, k_bits, v_bits, **settings)
    return NonUniformScheme(config, k_bits, v_bits, block=BLOCK, **settings)


class Scheme:
    """The codecs of every layer's K and V under one of the uniform names above."""

    def __init__(self, config, name, k_bits, v_bits, group_size=None, rope=None, formula="offset"):
        one_of(FORMULAS, formula=formula)
        k_axis, v_axis, self.static, default_rope = UNIFORM[name]
        self.name, self.rope = name, rope or default_rope
        self.block = group_size if group_size and name == "channel-dynamic" else BLOCK
        self.codecs = [{"k": codec(k_bits, config.head_dim, k_axis, group_size, formula, self.static),
                        "v": codec(v_bits, config.head_dim, v_axis, group_size, formula, self.static)}
                       for _ in range(config.num_hidden_layers)]

    def calibrate(self, model, method, windows, progress=None):
        """Fix the static grids, from windows (W, T) and without the tokens that the method keeps."""
        for layer, of_layer in zip(self.codecs, kv_ranges(model, method, windows, progress)):
            for kind, (lo, hi) in of_layer.items():
                if isinstance(layer[kind], Affine):
                    layer[kind].fix(lo, hi)


def codec(bits, width, axis, group_size, formula, static):
    """The codec of one layer's keys or values, or a clear error."""
    at_least(1, group_size=group_size)
    if bits == 16:
        return Exact()
    if axis == "channel":
        group_size = group_size or BLOCK
    elif group_size is not None:
        group_size = min(group_size, width)
    try:
        return Affine(bits, width, axis, group_size, formula, static)
    except ValueError as error:
        raise UserError(str(error)) from None
