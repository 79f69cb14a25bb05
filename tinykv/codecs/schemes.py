"""Named pairs of codecs: one for the keys and one for the values of each layer. The papers call them schemes.

    token-dynamic     K and V per token; each group's range is taken from the token itself
    token-static      K and V per token; each channel group's range is taken from calibration text
    channel-static    K per channel, V per token; both ranges are taken from calibration text
    channel-dynamic   K per channel in groups of tokens, V per token; ranges are taken from the
                      tokens themselves
    kvquant           non-uniform levels and sparse outliers (`nonuniform.py`), K per channel and
                      static, V per token
    skvq              regrouped channels and clipped ranges (`clipped.py`), K and V per token
    oscar             as channel-dynamic, rotated, and with keys of one length (`rotated.py`)

To add a codec, write a file with a class of `encode` and `decode` (`base.py`) and a function that makes it, and add its
line to SCHEMES: `--scheme NAME` then gives it to any method.

Any method whose own idea is which tokens to keep can stand on any of these pairs. The first four round to integers
(`affine.py`). For these four, without a group size, a group is one head of a token, or 128 tokens of a channel. The
papers use 128 for both, which is one head of a LLaMA; here a group of channels is never longer than a head.

Paper and practice. RoPE turns each pair of channels with the position, and so widens a channel's range. KVQuant found
keys per channel and static better before RoPE, and keys per token better after it; so they are here. Per dynamic
channel they are quantized after it, as KIVI does. Within a group of 128 tokens, half of the channels make less than a
quarter of a turn, and a third more than a whole one (theta = 10,000). KVSink does not say what it did.
"""
from functools import partial
from typing import Annotated

from tinykv import UserError, at_least, one_of
from tinykv.codecs.affine import Affine
from tinykv.codecs.base import BLOCK, Exact, Pair
from tinykv.codecs.centred import Centred
from tinykv.codecs.clipped import skvq
from tinykv.codecs.nonuniform import kvquant
from tinykv.codecs.rotated import Rotated


def integers(k_axis, static, config, kind, bits,
             group_size: Annotated[int | None, "numbers that share a scale: tokens of a channel, or channels"] = None,
             formula: Annotated[str, "zero point of uniform schemes: offset or integer-zero"] = "offset"):
    """K has a grid per token, in groups of channels, or per channel, in groups of tokens; V per token."""
    at_least(1, group_size=group_size)
    axis = k_axis if kind == "k" else "token"
    width = config.head_dim
    if axis == "channel":
        group_size = group_size or BLOCK
    else:
        group_size = min(group_size or width, width)
        if width % group_size:
            raise UserError(f"group size {group_size} does not divide the {width} channels of a head")
    return Affine(bits, width, axis, group_size, formula, static)


def oscar(config, kind, bits, group_size=None, formula="offset",
          rotate: Annotated[str, "multiply keys and values by a Hadamard matrix first: on or off"] = "on",
          scale_tokens: Annotated[str, "divide a token's keys by their norm: on or off"] = "on"):
    """The codecs of channel-dynamic, of rotated rows."""
    one_of(("on", "off"), rotate=rotate, scale_tokens=scale_tokens)
    codec = integers("channel", False, config, kind, bits, group_size, formula)
    return Rotated(codec, config.head_dim, rotate == "on", kind == "k" and scale_tokens == "on")


#   name:              (what makes a layer's codec of K or of V, where keys are quantized unless told otherwise)
#                       of integers: the axis of K, and whether ranges are static
SCHEMES = {
    "token-dynamic": (partial(integers, "token", False), "post"),
    "token-static": (partial(integers, "token", True), "post"),
    "channel-static": (partial(integers, "channel", True), "pre"),
    "channel-dynamic": (partial(integers, "channel", False), "post"),
    "kvquant": (kvquant, "pre"),
    "skvq": (skvq, "pre"),
    "oscar": (oscar, "post"),
}


def make_codecs(config, scheme, k_bits, v_bits, centre="off", **settings):
    """[Pair] of all layers. settings: the scheme's own."""
    one_of(SCHEMES, scheme=str(scheme))  # None is none of them
    one_of(("off", "on"), centre=centre)
    make_codec, _ = SCHEMES[scheme]

    def codec(kind, bits):
        if isinstance(bits, float) and bits.is_integer():  # so that 2 ** bits is an integer
            bits = int(bits)
        made = make_codec(config, kind, 8 if bits == 16 else bits, **settings)  # which refuses what cannot be
        if centre == "on" and kind == "k":
            made = Centred(made)
        return Exact() if bits == 16 else made
    return [Pair(k=codec("k", k_bits), v=codec("v", v_bits)) for _ in range(config.num_hidden_layers)]
