"""What a method's class gives, looked at once, after its constructor. From then on the cache trusts it."""
import copy
import math
from types import SimpleNamespace

import torch

from tinykv import UserError
from tinykv.cache import KVCache
from tinykv.methods.base import CHOOSE
from tinykv.model import Rope


def check_method(method, config):
    """UserError for a method that no cache of a model with this config can run."""
    check_settings(method)
    check_codecs(method, config)
    if method.uses_scores:
        check_score(method, config)


def check_settings(method):
    """The words and the numbers of a method."""
    name = type(method).__name__
    for word, choices in (("rope", ("pre", "post")), ("choose", CHOOSE)):
        if getattr(method, word) not in choices:
            raise UserError(f"`{word}` of {name} is one of {', '.join(choices)}; got {getattr(method, word)!r}")

    at_least = {"recent": 0, "passes": 0, "block": 1, "calibration_windows": 1}
    if method.v_block is not None:
        at_least["v_block"] = 1
    if not method.keeps_share:  # else a share, such as "1%"
        at_least["preserve"] = 0
    for count, least in at_least.items():
        value = getattr(method, count)
        if not isinstance(value, int) or value < least:
            raise UserError(f"`{count}` of {name} is a whole number of at least {least}; got {value!r}")

    for bits in (method.k_bits, method.v_bits):
        if not isinstance(bits, int | float) or not 0 < bits < math.inf:  # refuses NaN, too
            raise UserError(f"`k_bits` and `v_bits` of {name} are numbers of bits, such as 2; got {bits!r}")


def check_codecs(method, config):
    """The codecs of each layer, and what they make of a few rows. One that needs calibration is tried after it."""
    name, L = type(method).__name__, config.num_hidden_layers
    if len(method.codecs) != L:
        raise UserError(f"{name}: `codecs` has {len(method.codecs)} pairs for a model of {L} layers; the constructor "
                        "makes one for each")
    codecs = {type(codec): codec for pair in method.codecs for codec in (pair.k, pair.v)
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
    if not hasattr(codes, "append"):
        raise UserError(f"{name}: `encode` of {codec!r} has to give Codes; it gave {type(codes).__name__}")
    decoded = codec.decode(codes.append(codec.encode(rows, ignore=None)))
    if not is_float(decoded, (B, Hkv, 2 * n, d)):
        raise UserError(f"{name}: `decode` of {codec!r} has to give floating-point numbers {(B, Hkv, 2 * n, d)}; it "
                        f"gave {shown(decoded)}")


def check_score(method, config):
    """The scores of a few tokens."""
    method = copy.copy(method)
    method.prefix = None
    cache = KVCache(SimpleNamespace(config=config, rope=Rope(config)), method)
    layer = cache.layers[0]

    # a few tokens in the cache, and queries
    B, H, Hkv, T, d = 2, config.num_attention_heads, config.num_key_value_heads, 4, config.head_dim
    q, k = torch.ones(B, H, T, d), torch.ones(B, Hkv, T, d)
    layer.append(k, k, torch.arange(T))
    K, _ = layer.read()  # (B, Hkv, T, d)

    scores = method.score(layer, q, K)
    is_pair = isinstance(scores, tuple | list) and len(scores) == 2
    for of in scores if is_pair else [None]:
        if not is_float(of, (B, Hkv, T)):
            raise UserError(f"`score` of {type(method).__name__} has to give the scores of keys and of values, "
                            f"floating-point numbers {(B, Hkv, T)} both; it gave {shown(of if is_pair else scores)}")


def is_float(x, shape):
    return isinstance(x, torch.Tensor) and x.is_floating_point() and x.shape == shape


def shown(x):
    """What was found, for a message: "torch.int64 (1, 2, 3)", or "NoneType"."""
    return f"{x.dtype} {tuple(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__
