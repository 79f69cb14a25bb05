"""Assignment 4: the project's own answer."""
from types import SimpleNamespace

import torch

from tinykv.cache import LayerCache
from tinykv.codecs import channel_dynamic
from tinykv.methods import kivi
from tinykv.methods.base import Method
from tinykv.methods.ott import OTT  # noqa: F401
from tinykv.model import LlamaConfig

ASSIGNMENT = "ott"
KIVI = kivi.KIVI


def config_of(width):
    return LlamaConfig(vocab_size=8, hidden_size=width, intermediate_size=8, num_hidden_layers=1,
                       num_attention_heads=1, num_key_value_heads=1, head_dim=width,
                       max_position_embeddings=64)


def kivi_codecs(k_bits, v_bits, width, group_size):
    return channel_dynamic(config_of(width), k_bits, v_bits, group_size)


def due(length, n_coded, recent, block):
    method = Method(config=None)
    method.recent, method.block = recent, block
    layer_cache = SimpleNamespace(quantizes_first=False, length=length, method=method)
    return LayerCache.due(layer_cache, SimpleNamespace(kind="k", n_coded=n_coded))


def kivi_bits(T, d, bits, group_size, recent):
    """Counted in a cache."""
    method = KIVI(config_of(d), bits, bits, group_size, recent)
    rope = SimpleNamespace(rotate=lambda x, positions: x)
    cache = LayerCache(0, method, rope, "stream", SimpleNamespace())
    for i in range(T):
        x = torch.zeros(1, 1, 1, d)
        cache.update(x, x, x, torch.tensor([i]))
    nbytes = sum(cache.keys.part_bytes().values()) + sum(cache.values.part_bytes().values())
    return 8 * nbytes / (2 * T * d)
