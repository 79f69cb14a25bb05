"""Named pairs of codecs: one for the keys and one for the values of each layer. The papers call
them schemes.

    token-dynamic     K and V per token; each group's range is taken from the token itself
    token-static      K and V per token; each channel group's range is taken from calibration text
    channel-static    K per channel, V per token; both ranges are taken from calibration text
    channel-dynamic   K per channel in groups of tokens, V per token; ranges are taken from the
                      tokens themselves
    kvquant           non-uniform levels and sparse outliers (`nonuniform.py`), K per channel and
                      static, V per token
    skvq              regrouped channels and clipped ranges (`clipped.py`), K and V per token

Any method whose own idea is which tokens to keep can stand on any of these pairs. The first four
round to integers (`affine.py`). Without a group size, a group is one head of a token, or 128 tokens
of a channel. The papers use 128 for both, which is one head of a LLaMA; here a group of channels is
never longer than a head.

Paper and practice. Keys are quantized after RoPE per token and per dynamic channel (as KIVI does: a
group of 128 tokens spans few turns), and before RoPE per static channel. KVQuant found each the
better of the two: RoPE mixes a pair of channels over the positions, and so widens a channel's
range. KVSink does not say what it did.
"""
import inspect
from typing import NamedTuple

from tinykv import UserError, at_least, one_of
from tinykv.codecs.affine import FORMULAS, Affine
from tinykv.codecs.base import Codec, Exact

BLOCK = 128  # tokens quantized at a time in a stream, and in a channel group by default


class Pair(NamedTuple):
    """The two codecs of one layer."""
    k: Codec
    v: Codec


# Each function makes the two codecs of one layer. Its settings are its arguments after `v_bits`.

def token_dynamic(config, k_bits, v_bits, group_size=None, formula="offset"):
    return Pair(k=integers(config, k_bits, "token", False, group_size, formula),
                v=integers(config, v_bits, "token", False, group_size, formula))


def token_static(config, k_bits, v_bits, group_size=None, formula="offset"):
    return Pair(k=integers(config, k_bits, "token", True, group_size, formula),
                v=integers(config, v_bits, "token", True, group_size, formula))


def channel_static(config, k_bits, v_bits, group_size=None, formula="offset"):
    return Pair(k=integers(config, k_bits, "channel", True, group_size, formula),
                v=integers(config, v_bits, "token", True, group_size, formula))


def channel_dynamic(config, k_bits, v_bits, group_size=None, formula="offset"):
    return Pair(k=integers(config, k_bits, "channel", False, group_size, formula),
                v=integers(config, v_bits, "token", False, group_size, formula))


def kvquant(config, k_bits, v_bits, outliers=1.0, sensitivity="fisher-range", q_norm=None):
    # imported here, so that rounding to integers does not need k-means
    from tinykv.codecs.nonuniform import non_uniform
    return Pair(k=non_uniform(config, k_bits, "channel", outliers, sensitivity, q_norm),
                v=non_uniform(config, v_bits, "token", outliers, sensitivity, q_norm))


def skvq(config, k_bits, v_bits, group_size=None, reorder="on", clip="both", alpha=None,
         metadata="fp8", metadata_order="rounded-first", sensitivity="token"):
    from tinykv.codecs.clipped import clipped_groups
    settings = group_size, reorder, clip, alpha, metadata, metadata_order, sensitivity
    return Pair(k=clipped_groups(config, k_bits, *settings),
                v=clipped_groups(config, v_bits, *settings))


def integers(config, bits, axis, static, group_size, formula):
    """An integer codec with a grid per token, in groups of channels, or per channel, in groups of
    tokens."""
    one_of(FORMULAS, formula=formula)
    at_least(1, group_size=group_size)
    if bits == 16:
        return Exact()
    width = config.head_dim
    if axis == "channel":
        group_size = group_size or BLOCK
    else:
        group_size = min(group_size or width, width)
        if width % group_size:
            raise UserError(f"group size {group_size} does not divide the {width} channels of a head")
    return Affine(bits, width, axis, group_size, formula, static)


#   name:              (what makes a layer's codecs, where keys are quantized unless told otherwise)
SCHEMES = {
    "token-dynamic": (token_dynamic, "post"),
    "token-static": (token_static, "post"),
    "channel-static": (channel_static, "pre"),
    "channel-dynamic": (channel_dynamic, "post"),
    "kvquant": (kvquant, "pre"),
    "skvq": (skvq, "pre"),
}


def make_codecs(config, scheme, k_bits, v_bits, **settings):
    """[Pair] of all layers. settings: the scheme's own; UserError for one that it does not have."""
    known = settings_of_scheme(scheme)
    for setting in settings:
        if setting not in known:
            raise UserError(f"{setting.replace('_', ' ')} is not a setting of the scheme {scheme}, "
                            f"which has {', '.join(known)}")
    make_pair, _ = SCHEMES[scheme]
    return [make_pair(config, k_bits, v_bits, **settings) for _ in range(config.num_hidden_layers)]


def settings_of_scheme(name):
    """The names of a scheme's settings. UserError for a scheme that is not there."""
    one_of(SCHEMES, scheme=name)
    make_pair, _ = SCHEMES[name]
    return list(inspect.signature(make_pair).parameters)[3:]  # after config, k_bits and v_bits


def settings_of_codecs():
    """The settings that any scheme has, {name: None}: None stands for the scheme's own default."""
    return {setting: None for scheme in SCHEMES for setting in settings_of_scheme(scheme)}
