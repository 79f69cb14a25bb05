"""A method as the cache of a model of transformers: a LLaMA, a Mistral, a Qwen2 or a Qwen3.

    cache = MethodCache(model, method)
    model.generate(tokens, past_key_values=cache)

docs/huggingface.md shows it at work, and says what it cannot do.
"""
import copy
import weakref
from functools import partial
from types import SimpleNamespace

import torch
from torch.nn.functional import pad
from transformers import GenerationMixin
from transformers.cache_utils import Cache, DynamicCache

from tinykv import UserError
from tinykv.cache import KVCache
from tinykv.hf.config import parse_config
from tinykv.identity import PROBED_AT, identity_of, probe
from tinykv.model import Rope


class MethodCache(Cache):
    """`past_key_values` for a batch of texts. `texts` has a KVCache for each, so that no text's codes depend on the
    texts beside it. Shorter texts are padded on the left, and so are their keys and values when attention gets them.

    A text begins with the method's prefix, if it has one, and the model returns what comes after it. protocol, prompt:
    as of `KVCache`. transformers hands its cache keys after RoPE, and neither queries nor a layer's output; hooks on
    the model catch what is missing. They hold the cache weakly: it goes, and they with it, when nobody else holds it.
    """
    is_linear, is_croppable = [False], False  # what `generate` asks: it is attention's, and no token can be taken out

    def __init__(self, model, method, protocol="stream", prompt=None):
        if not (isinstance(model, GenerationMixin) and getattr(method, "codecs", None)):
            more = "; of a PeftModel, give get_base_model()" if hasattr(model, "get_base_model") else ""
            raise TypeError("this takes a causal language model of transformers and a method, such "
                            f"as METHODS['kivi'](config); got {type(model).__name__} and {type(method).__name__}{more}")
        super().__init__(layers=[])
        config = parse_config(model.config.to_dict(), "the model's config")
        like = SimpleNamespace(config=config, rope=Rope(config), lm_head=model.lm_head,
                               identity=partial(identity, model))
        self.model, self.empty = model, KVCache(like, method, protocol, prompt)  # the latter is copied for each text
        self.texts, self.padding = [], []  # KVCaches, and the padding of each text
        self.reading = False  # whether what the model reads now are these texts
        self.skip = []  # of the columns that it reads, how many are padding in each text
        self.fresh = {}  # a layer's new q and k, before RoPE, until its `update`

        hook = partial(Hook, weakref.ref(self))
        self.hooks = [model.model.register_forward_pre_hook(hook("begin"), with_kwargs=True)]
        for i, layer in enumerate(model.model.layers):
            attention = layer.self_attn
            q_source = getattr(attention, "q_norm", attention.q_proj)  # a Qwen3 norms every head
            k_source = getattr(attention, "k_norm", attention.k_proj)
            self.hooks += [q_source.register_forward_hook(hook("see", "q")),
                           k_source.register_forward_hook(hook("see", "k")),
                           layer.register_forward_hook(hook("see_hidden", i))]
        # a forward ends with the states, or with the logits of the head
        self.hooks += [model.model.register_forward_hook(hook("mark", False)),
                       model.lm_head.register_forward_pre_hook(hook("mark", True)),
                       model.lm_head.register_forward_hook(hook("mark", False))]
        weakref.finalize(self, remove_all, self.hooks)

    def begin(self, module, args, kwargs):
        """Before a forward: the arguments that it is given -> those that it gets. UserError for what the cache cannot
        serve."""
        self.reading, self.fresh = False, {}
        if self not in (kwargs.get("cache"), kwargs.get("past_key_values")):  # new releases, old ones
            return None
        tokens, mask, positions = (kwargs.get(name) for name in ("input_ids", "attention_mask", "position_ids"))
        if kwargs.get("use_cache") is False:
            raise UserError("use_cache=False reads the whole text again for every token; leave it out")
        if tokens is None:
            raise UserError("inputs_embeds hide the text from the method; give input_ids")
        held = self.get_seq_length()  # columns
        texts = self.texts or [copy.deepcopy(self.empty) for _ in tokens]
        if tokens.shape[1] == 0 or len(tokens) != len(texts):
            raise UserError(f"{len(tokens)} texts of {tokens.shape[1]} new tokens do not go on from the cache, which "
                            f"holds {len(texts)} of {held}; `reset` it before other texts")
        padding = padding_of(mask, len(tokens), held + tokens.shape[1])
        if self.texts and padding != self.padding:
            raise UserError(f"the attention_mask hides {padding} tokens of each text, and before {self.padding}; "
                            "`reset` the cache before other texts")

        # each text reads its new tokens, without padding and prefix
        skip = [0] * len(texts) if self.texts else padding
        given = [text.expect(row[None, n:]) for text, row, n in zip(texts, tokens, skip)]  # [(new, tokens held)]
        T = given[0][0].shape[1] + skip[0]  # columns, without those of a prefix
        columns, seen, pads = torch.arange(T), torch.tensor([seen for _, seen in given]), torch.tensor(skip)
        expected = (seen - pads)[:, None] + columns  # (B, T)
        is_padding = (columns < pads[:, None]).to(tokens.device)  # (B, T)
        expected = expected.clamp(min=0).to(tokens.device)
        if positions is not None:
            positions = positions[:, -T:]
            if positions.shape[1] != T or not (is_padding | (positions == expected)).all():
                raise UserError(f"the positions do not go on from the {held} tokens that the cache holds; leave "
                                "position_ids out, and `reset` the cache before another text")
        self.texts, self.padding, self.skip, self.reading = texts, padding, skip, True
        self.mark(True)
        if "cache_position" in kwargs:  # in older releases
            kwargs["cache_position"] = self.get_seq_length() + columns.to(tokens.device)
        return (), {**kwargs, "input_ids": tokens[:, -T:], "position_ids": expected}

    def mark(self, busy, *args):
        if self.reading:
            for text in self.texts:
                text.busy = busy

    def see(self, name, module, inputs, output):
        """New queries ("q") or keys ("k"), before RoPE: (B, T, heads * d) or (B, T, heads, d)."""
        if self.reading:
            by_head = output.reshape(*output.shape[:2], -1, self.empty.config.head_dim)  # (B, T, heads, d)
            self.fresh[name] = by_head.transpose(1, 2)  # (B, heads, T, d)

    def see_hidden(self, layer, module, inputs, output):
        if self.reading:
            for text, hidden, n in zip(self.texts, output, self.skip):  # (T, D)
                text.observe(layer, hidden[None, n:])

    def update(self, keys, values, layer_idx, *args, **kwargs):
        """New keys and values (B, Hkv, T, d), keys after RoPE -> those of all S columns."""
        q, k = self.fresh.pop("q", None), self.fresh.pop("k", None)
        if k is None:
            raise UserError("a MethodCache reads with the model that it was made for, given as past_key_values=cache, "
                            "until `remove`")
        padded = []
        for i, (text, n) in enumerate(zip(self.texts, self.skip)):
            of_text = slice(i, i + 1), slice(None), slice(n, None)
            seen = text.layers[layer_idx].length
            if seen == text.start or keys.shape[2] > 1:
                self.compare(text.rope.rotate(k[of_text], seen), keys[of_text], layer_idx)
            K, V = text.update(layer_idx, q[of_text], k[of_text], values[of_text], seen)  # (1, Hkv, S - padding, d)
            padded.append([pad(x, (0, 0, self.padding[i], 0)) for x in (K, V)])
        return tuple(torch.cat(x) for x in zip(*padded))  # (B, Hkv, S, d) both

    def compare(self, own, keys, layer):
        """UserError unless these are the same keys but for what 16 bits round."""
        error = (own - keys).abs().max()
        if not error <= 2 ** -6 * keys.abs().max():
            raise UserError(f"layer {layer} computes other keys than the model's config says; make the cache after "
                            "the last change to the model, do not edit RoPE, and set the dtype in from_pretrained "
                            "(model.to rounds RoPE, too)")

    def get_seq_length(self, layer_idx=0):
        """The columns that the model has read: 0, and not those of a prefix, before a text."""
        if not self.texts:
            return 0
        start, length = self.texts[0].start, self.texts[0].layers[layer_idx].length
        return start if length == start else self.padding[0] + length

    def get_mask_sizes(self, query_length, layer_idx):
        if torch.is_tensor(query_length):  # in older releases, the positions of the new tokens
            query_length = len(query_length)
        return self.get_seq_length(layer_idx) + query_length, 0

    def __len__(self):  # transformers counts layers of its own, and of none an empty container is False
        return len(self.empty.layers)

    @property
    def nbytes(self):
        """Bytes of everything that is held."""
        return sum(text.nbytes for text in self.texts)

    def reset(self):
        self.texts, self.reading = [], False

    def remove(self):
        """Take the hooks off the model again."""
        remove_all(self.hooks)

    def __deepcopy__(self, memo):
        """A cache that goes on by itself from the same tokens, of the same model and method."""
        new = MethodCache(self.model, self.empty.method, self.empty.protocol, self.empty.prompt)
        new.texts, new.padding = copy.deepcopy(self.texts, memo), list(self.padding)
        return new

    def batch_select_indices(self, indices):
        """The texts at `indices` go on. Of one that is named twice, such as a beam, all tokens are copied."""
        chosen = [int(i) for i in indices]
        self.texts = [copy.deepcopy(self.texts[i]) if i in chosen[:n] else self.texts[i] for n, i in enumerate(chosen)]
        self.padding = [self.padding[i] for i in chosen]

    reorder_cache = batch_select_indices

    def batch_repeat_interleave(self, repeats):
        self.batch_select_indices([i for i in range(len(self.texts)) for _ in range(repeats)])

    def crop(self, *args):
        raise UserError("contrastive search and assisted decoding take tokens out of a cache, and a quantized token "
                        "cannot leave its block; decode greedily, with beams, or sample")

    def __reduce_ex__(self, protocol):
        raise UserError("a MethodCache holds its model, which a file of it would hold as well; read the text again")

    def __repr__(self):
        return f"MethodCache({self.texts or self.empty!r})"


class Hook:
    """Calls a method of a cache, if that is still there."""

    def __init__(self, cache, name, *given):
        self.cache, self.name, self.given = cache, name, given  # the first a weak reference

    def __call__(self, *args):
        if (cache := self.cache()) is not None:
            return getattr(cache, self.name)(*self.given, *args)


def remove_all(hooks):
    for hook in hooks:
        hook.remove()


def padding_of(mask, B, S):
    """How many of S columns each of B texts is padded with, on the left."""
    if mask is None:
        return [0] * B
    if mask.shape != (B, S) or not (mask.bool() == (mask.bool().cumsum(1) > 0)).all() or not mask[:, -1].all():
        raise UserError(f"the attention_mask has to be ({B}, {S}), and hide nothing but padding on the left: "
                        "give the tokenizer padding_side='left'")
    return (S - mask.bool().sum(1)).tolist()


@torch.no_grad()
def identity(model):
    """What `identity.identity` is of a model of transformers."""
    tokens, cache = probe(model.config.vocab_size).to(model.device), DynamicCache()
    positions = PROBED_AT + torch.arange(tokens.shape[1], device=model.device)[None]  # (1, T)
    logits = model(input_ids=tokens, position_ids=positions, past_key_values=cache).logits
    keys = torch.cat([layer.keys.cpu() for layer in cache.layers])  # (L, Hkv, T, d)
    values = torch.cat([layer.values.cpu() for layer in cache.layers])  # (L, Hkv, T, d)
    return identity_of(keys, values, logits)
