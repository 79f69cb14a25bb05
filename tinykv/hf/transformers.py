"""A method as the cache of a model of transformers: a LLaMA, a Mistral, a Qwen2 or a Qwen3.

    cache = MethodCache(model, method)
    model.generate(tokens, past_key_values=cache)

docs/huggingface.md shows it at work, and says what it cannot do.
"""
import copy
from functools import partial
from types import SimpleNamespace

import torch
from transformers import GenerationMixin
from transformers.cache_utils import Cache, DynamicCache

from tinykv import UserError
from tinykv.cache import KVCache
from tinykv.hf.config import parse_config
from tinykv.model import Rope
from tinykv.tables import PROBED_AT, probe


class MethodCache(Cache):
    """`past_key_values` for one text, or for texts of equal length. `inner` is the KVCache.

    A text begins with the method's prefix, if it has one, and the model returns what comes after it. protocol, prompt:
    as of `KVCache`. transformers hands its cache keys after RoPE, and neither queries nor a layer's output; hooks on
    the model catch what is missing.
    """
    is_linear, is_croppable = [False], False  # what `generate` asks: it is attention's, and no token can be taken out

    def __init__(self, model, method, protocol="stream", prompt=None):
        if not (isinstance(model, GenerationMixin) and getattr(method, "codecs", None)):
            raise TypeError("this takes a causal language model of transformers and a method, such "
                            f"as METHODS['kivi'](config); got {type(model).__name__} and {type(method).__name__}")
        super().__init__(layers=[])
        config = parse_config(model.config.to_dict(), "the model's config")
        like = SimpleNamespace(config=config, rope=Rope(config), lm_head=model.lm_head,
                               identity=partial(identity_of, model))
        self.model, self.inner = model, KVCache(like, method, protocol, prompt)
        self.reading = False  # whether what the model reads now is this text
        self.fresh = {}  # a layer's new q and k, before RoPE, until its `update`

        self.hooks = [model.model.register_forward_pre_hook(self.begin, with_kwargs=True)]
        for i, layer in enumerate(model.model.layers):
            attention = layer.self_attn
            q_source = getattr(attention, "q_norm", attention.q_proj)  # a Qwen3 norms every head
            k_source = getattr(attention, "k_norm", attention.k_proj)
            self.hooks += [q_source.register_forward_hook(partial(self.see, "q")),
                           k_source.register_forward_hook(partial(self.see, "k")),
                           layer.register_forward_hook(partial(self.see_hidden, i))]
        # a forward ends with the states, or with the logits of the head
        self.hooks += [model.model.register_forward_hook(partial(self.mark, False)),
                       model.lm_head.register_forward_pre_hook(partial(self.mark, True)),
                       model.lm_head.register_forward_hook(partial(self.mark, False))]

    def begin(self, module, args, kwargs):
        """Before a forward: the arguments that it is given -> those that it gets. UserError for what the cache cannot
        serve."""
        self.reading, self.fresh = False, {}
        if self not in (kwargs.get("cache"), kwargs.get("past_key_values")):  # since transformers 5.24, and before
            return None
        tokens, mask, positions = (kwargs.get(name) for name in ("input_ids", "attention_mask", "position_ids"))
        if kwargs.get("use_cache") is False:
            raise UserError("use_cache=False reads the whole text again for every token; leave it out")
        if tokens is None:
            raise UserError("inputs_embeds hide the text from the method; give input_ids")
        if mask is not None and not (mask.dim() == 2 and mask.all()):
            raise UserError("the attention_mask hides tokens, such as padding; give texts of equal length, without any")
        new, seen = self.inner.expect(tokens)  # (B, T)
        T = new.shape[1]
        expected = torch.arange(seen, seen + T, device=tokens.device)[None]  # (1, T)
        if positions is not None and not (positions[:, -T:] == expected).all():
            raise UserError(f"the positions do not go on from the {seen} tokens that the cache holds; leave "
                            "position_ids out, and `reset` the cache before another text")
        self.reading = self.inner.busy = True
        if "cache_position" in kwargs:  # until transformers 5.0
            kwargs["cache_position"] = expected[0]
        return (), {**kwargs, "input_ids": new, "position_ids": expected}

    def mark(self, busy, *args):
        if self.reading:
            self.inner.busy = busy

    def see(self, name, module, inputs, output):
        """New queries ("q") or keys ("k"), before RoPE: (B, T, heads * d) or (B, T, heads, d)."""
        if self.reading:
            by_head = output.reshape(*output.shape[:2], -1, self.inner.config.head_dim)  # (B, T, heads, d)
            self.fresh[name] = by_head.transpose(1, 2)  # (B, heads, T, d)

    def see_hidden(self, layer, module, inputs, output):
        if self.reading:
            self.inner.observe(layer, output)  # (B, T, D)

    def update(self, keys, values, layer_idx, *args, **kwargs):
        """New keys and values (B, Hkv, T, d), keys after RoPE -> those of all S tokens."""
        q, k = self.fresh.pop("q", None), self.fresh.pop("k", None)
        if k is None:
            raise UserError("a MethodCache reads with the model that it was made for, given as past_key_values=cache, "
                            "until `remove`")
        seen = self.inner.layers[layer_idx].length
        if seen == self.inner.start or keys.shape[2] > 1:
            error = (self.inner.rope.rotate(k, seen) - keys).abs().max()
            if not error <= 2 ** -6 * keys.abs().max():  # more than what 16 bits round
                raise UserError(f"layer {layer_idx} computes other keys than the model's config says; make the cache "
                                "after the last change to the model, do not edit RoPE, and set the dtype in "
                                "from_pretrained (model.to rounds RoPE, too)")
        return self.inner.update(layer_idx, q, k, values, seen)

    def get_seq_length(self, layer_idx=0):
        """The tokens that the model has read: 0, and not those of a prefix, before a text."""
        length = self.inner.layers[layer_idx].length
        self.inner.check_whole()
        return length if self.reading or length > self.inner.start else 0

    def get_mask_sizes(self, query_length, layer_idx):
        if torch.is_tensor(query_length):  # until transformers 5.0, the positions of the new tokens
            query_length = len(query_length)
        return self.get_seq_length(layer_idx) + query_length, 0

    def __len__(self):  # transformers counts layers of its own, and of none an empty container is False
        return len(self.inner.layers)

    def reset(self):
        self.inner.reset()
        self.reading = False

    def remove(self):
        """Take the hooks off the model again."""
        for hook in self.hooks:
            hook.remove()

    def __deepcopy__(self, memo):
        """A cache that goes on by itself from the same tokens, of the same model and method."""
        inner = self.inner
        shared = inner.model, inner.rope, inner.method, *(codec for *_, codec in inner.method.each_codec())
        memo.update({id(one): one for one in shared})
        new = MethodCache(self.model, inner.method, inner.protocol, inner.prompt)
        new.inner = copy.deepcopy(inner, memo)
        return new

    def refuse(self, *args, **kwargs):
        raise UserError("beam search, contrastive search and assisted decoding take tokens out of a cache, or to other "
                        "sequences, and a quantized token cannot leave its block; decode greedily, or sample")

    crop = reorder_cache = batch_repeat_interleave = batch_select_indices = refuse

    def __repr__(self):
        return f"MethodCache({self.inner!r})"


@torch.no_grad()
def identity_of(model):
    """What `tables.identity` is of a model of transformers."""
    tokens, cache = probe(model.config.vocab_size).to(model.device), DynamicCache()
    positions = PROBED_AT + torch.arange(tokens.shape[1], device=model.device)[None]  # (1, T)
    model.model(input_ids=tokens, position_ids=positions, past_key_values=cache)
    keys = torch.cat([layer.keys.cpu() for layer in cache.layers])  # (L, Hkv, T, d)
    values = torch.cat([layer.values.cpu() for layer in cache.layers])  # (L, Hkv, T, d)
    return torch.stack([keys, values])
