"""A method as the cache of a model of transformers: a LLaMA, a Mistral, a Qwen2 or a Qwen3.

    cache = MethodCache(model, method)
    model.generate(tokens, past_key_values=cache)

docs/huggingface.md shows it at work, and says what it cannot do.
"""
from types import SimpleNamespace

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from tinykv import UserError
from tinykv.cache import KVCache
from tinykv.hf.config import parse_config
from tinykv.model import Rope


class MethodCache(Cache):
    """`past_key_values` for one text, or for texts of equal length. `inner` is the KVCache.

    protocol, prompt: as of `KVCache`.
    """

    def __init__(self, model, method, protocol="stream", prompt=None):
        config = parse_config(model.config.to_dict(), "the model's config")
        like = SimpleNamespace(config=config, rope=Rope(config), lm_head=model.lm_head)
        self.inner = KVCache(like, method, protocol, prompt)
        blocks = model.model.layers
        super().__init__(layers=[MethodLayer(self.inner, i, block) for i, block in enumerate(blocks)])

    def remove(self):
        """Take the hooks off the model again."""
        for hook in (hook for layer in self.layers for hook in layer.hooks):
            hook.remove()

    def refuse(self, *args, **kwargs):
        raise UserError("beam search, contrastive search and assisted decoding take tokens out of a cache, or to other "
                        "sequences, and a quantized token cannot leave its block; decode greedily, or sample")

    crop = reorder_cache = batch_repeat_interleave = batch_select_indices = refuse


class MethodLayer(CacheLayerMixin):
    """One layer. transformers hands its cache keys after RoPE, and neither queries nor a block's
    output; hooks on the model catch what is missing."""
    is_sliding = is_croppable = False

    def __init__(self, inner, i, block):
        super().__init__()
        self.inner, self.i, self.is_initialized = inner, i, True
        attention = block.self_attn
        q_source = getattr(attention, "q_norm", attention.q_proj)  # a Qwen3 norms every head
        k_source = getattr(attention, "k_norm", attention.k_proj)
        self.hooks = [q_source.register_forward_hook(self.see_q), k_source.register_forward_hook(self.see_k),
                      block.register_forward_hook(self.see_hidden)]

    def see_q(self, module, inputs, output):
        self.q = self.by_head(output)  # (B, H, T, d), before RoPE

    def see_k(self, module, inputs, output):
        self.k = self.by_head(output)  # (B, Hkv, T, d), before RoPE

    def see_hidden(self, module, inputs, output):
        self.inner.observe(self.i, output)  # (B, T, D)

    def by_head(self, x):
        """x (B, T, heads * d) or (B, T, heads, d) -> (B, heads, T, d)."""
        return x.reshape(*x.shape[:2], -1, self.inner.config.head_dim).transpose(1, 2)

    def update(self, keys, values, *args, **kwargs):
        """New keys and values (B, Hkv, T, d), keys after RoPE -> those of all S tokens."""
        seen, T = self.get_seq_length(), keys.shape[2]
        positions = torch.arange(seen, seen + T, device=keys.device)  # (T)
        if self.i == 0:
            self.check_positions(keys, positions)
        return self.inner.update(self.i, self.q, self.k, values, positions)

    def check_positions(self, keys, positions):
        """UserError if transformers rotated these keys (B, Hkv, T, d) to other positions (T)."""
        rotated = self.inner.rope.rotate(self.k, positions)  # (B, Hkv, T, d)
        difference = (keys - rotated).abs().amax((0, 1, 2))  # (d)
        if (difference > 0.1 * rotated.abs().amax((0, 1, 2))).any():  # two 16-bit roundings differ by a hundredth
            raise UserError("the tokens are not at positions 0, 1, 2, ...: a batch with padding, or position_ids of "
                            "one's own; give texts of equal length, without padding")

    def get_seq_length(self):
        return self.inner.layers[self.i].length

    def get_mask_sizes(self, query_length):
        return self.get_seq_length() + query_length, 0

    def get_max_length(self):
        return -1  # no limit

    def lazy_initialization(self, keys, values):
        pass

    def reset(self):
        if self.i == 0:
            self.inner.reset()
