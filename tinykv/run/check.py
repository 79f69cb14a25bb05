"""What a method's class gives, looked at once, after its constructor. From then on the cache trusts it."""
import copy

import torch

from tinykv import UserError, at_least, one_of
from tinykv.methods.base import CHOOSE


def check_method(method, config):
    """UserError for a method that no cache of a model with this config can run."""
    one_of(("pre", "post"), rope=method.rope)
    one_of(CHOOSE, choose=method.choose)
    at_least(0, recent=method.recent)
    at_least(1, block=method.block, v_block=method.v_block)
    if not method.keeps_share:  # else a share, such as "1%"
        at_least(0, preserve=method.preserve)
    check_codecs(method, config)


def check_codecs(method, config):
    """The codecs of each layer, and what they make of a few rows. One that needs calibration is tried after it."""
    name, L = type(method).__name__, config.num_hidden_layers
    if len(method.codecs) != L:
        raise UserError(f"{name}: `codecs` has {len(method.codecs)} pairs for a model of {L} layers; the constructor "
                        "makes one for each")
    codecs = {type(codec): codec for pair in method.codecs for codec in pair
              if not codec.passes or codec.calibrated()}
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
    decoded = codec.decode(codes.append(codec.encode(rows, ignore=None)))
    if not decoded.is_floating_point() or decoded.shape != (B, Hkv, 2 * n, d):
        raise UserError(f"{name}: `decode` of {codec!r} has to give floating-point numbers {(B, Hkv, 2 * n, d)}; it "
                        f"gave {decoded.dtype} {tuple(decoded.shape)}")
