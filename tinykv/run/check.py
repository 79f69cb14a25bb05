"""What can be seen to be wrong before anything is computed: with the flags, with a method, with the rows together."""
import copy
from types import SimpleNamespace

import torch

from tinykv import UserError, cli, did_you_mean, one_of
from tinykv.cache import LayerCache
from tinykv.codecs.base import Codes, Pair
from tinykv.methods.base import CHOOSE
from tinykv.model import Rope


def check_flags(args):
    """What can be seen to be wrong before anything is loaded."""
    cli.check_counts(args, 0, "at-bits")
    cli.check_counts(args, 2, "context")
    cli.check_counts(args, 1, "windows", "calib-windows", "draws", "batch", "prompt")
    if hasattr(args, "choose") and not args.prompt:
        raise UserError("--choose is for a text with a prompt; give --prompt, too")
    cli.check_outputs(args, json="tinykv-table", calibration="folder", plot="tinykv-figure")


def check_entries(setup, entries):
    """What can be seen to be wrong with the entries before the model is loaded."""
    args, context = setup.args, setup.context
    for title, entry in entries.items():
        if not entry.method.keeps_share and entry.method.preserve > context:
            raise UserError(f"{title} keeps {entry.method.preserve} tokens, and a window has {context}; keep fewer")
        prefix = len(entry.method.prefix.ids) if entry.method.prefix else 0
        if args.prompt and not prefix < args.prompt < context:
            raise UserError(f"--prompt {args.prompt} has to be longer than the prefix of {title}, {prefix} tokens, "
                            f"and shorter than a window, {context}")
    if args.vs is not None and args.vs not in entries and args.vs not in [title.split()[0] for title in entries]:
        raise UserError(f"--vs {args.vs}: the table has no such row or method; it has {', '.join(entries)}"
                        + did_you_mean(args.vs, entries))


# A method, looked at once, after its constructor: from then on the cache trusts it

OF_A_PREFIX = ("name", "ids", "trained_for", "fill", "rows")  # what is asked of one


def check_method(method, config):
    """UserError for a method that no cache of a model with this config can run."""
    one_of(("pre", "post"), rope=method.rope)
    one_of(CHOOSE, choose=method.choose)
    least = {"recent": 0, "block": 1, "k_bits": 0.01, "v_bits": 0.01, "preserve": 0}
    if method.keeps_share:
        del least["preserve"]  # a share, such as "1%"
    for name in least:
        value = getattr(method, name)
        if not isinstance(value, int | float) or not value >= least[name]:  # nor is NaN
            raise UserError(f"{name} of {type(method).__name__} must be a number from {least[name]} on; got {value!r}")
    if method.prefix is not None and not all(hasattr(method.prefix, name) for name in OF_A_PREFIX):
        raise UserError(f"prefix of {type(method).__name__} must be None, or have {', '.join(OF_A_PREFIX)}, as an "
                        f"intactkv.Prefix has; got {method.prefix!r}")
    check_codecs(method, config)
    if method.uses_scores:
        try_score(method, config)


def check_codecs(method, config):
    """The codecs of each layer, and what they make of a few rows. One that needs calibration is tried after it."""
    name, L = type(method).__name__, config.num_hidden_layers
    if not isinstance(method.codecs, list | tuple) or [type(pair) for pair in method.codecs] != [Pair] * L:
        raise UserError(f"{name}: `codecs` must be a list of {L} codecs.Pair, one a layer; got {method.codecs!r}")
    codecs = [codec for pair in method.codecs for codec in pair]
    codecs = {type(codec): codec for codec in codecs if not codec.needs_text or codec.calibrated()}
    # those of the package are tested by its tests; a breakpoint in one of them stops at a real text first
    codecs = {cls: codec for cls, codec in codecs.items() if not cls.__module__.startswith("tinykv.")}
    for codec in codecs.values():
        try_codec(codec, config, name)


def try_codec(codec, config, name):
    """Encode and decode a few random rows, twice as many tokens as share a scale."""
    codec = copy.deepcopy(codec)  # some remember something of the first rows
    B, Hkv, n, d = 2, config.num_key_value_heads, codec.tokens_per_group, config.head_dim
    tables = list(codec.calibrated().values())
    device = tables[0].device if tables else "cpu"
    rows = torch.randn(B, Hkv, n, d, generator=torch.Generator().manual_seed(0)).half().to(device)

    codes = codec.encode(rows, ignore=None)
    if not isinstance(codes, Codes):
        raise UserError(f"{name}: `encode` of {codec!r} has to give codecs.base.Codes; it gave {codes!r}")
    decoded = codec.decode(codes.followed_by(codec.encode(rows, ignore=None)))
    if not decoded.is_floating_point() or decoded.shape != (B, Hkv, 2 * n, d):
        raise UserError(f"{name}: `decode` of {codec!r} has to give floating-point numbers {(B, Hkv, 2 * n, d)}; it "
                        f"gave {decoded.dtype} {tuple(decoded.shape)}")


def try_score(method, config):
    """The scores of a few tokens, by a few queries."""
    B, H, Hkv, T, d = 2, config.num_attention_heads, config.num_key_value_heads, 4, config.head_dim
    layer = LayerCache(0, method, Rope(config), "stream", SimpleNamespace())
    q, k = torch.ones(B, H, T, d), torch.ones(B, Hkv, T, d)
    layer.append(k, k)
    scores = method.score(layer, q, k)
    if [tuple(of.shape) for of in scores] != [(B, Hkv, T)] * 2:
        raise UserError(f"`score` of {type(method).__name__} has to give the scores of keys and of values, "
                        f"{(B, Hkv, T)} both; it gave {[tuple(of.shape) for of in scores]}")
