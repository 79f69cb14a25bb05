"""A method as the cache of a model of transformers: of any decoder.

    cache = MethodCache(model, METHODS["kivi"](config_of(model)))
    model.generate(tokens, past_key_values=cache)

docs/huggingface.md shows it at work, and says what it cannot do.
"""
import copy
import weakref
from functools import partial
from inspect import signature
from threading import get_ident
from types import SimpleNamespace

import torch
from torch.nn.functional import pad
from transformers import GenerationMixin

from tinykv import UserError
from tinykv.cache import KVCache
from tinykv.hf.config import Unsupported
from tinykv.lab.hf import decoder
from tinykv.lab.hf.decoder import AsGiven, Bridge, config_of, hidden_of, identity
from tinykv.model import Rope


class MethodCache(Bridge):
    """`past_key_values` for a batch of texts. `texts` has a KVCache for each, so that no text's codes depend on the
    texts beside it. Shorter texts are padded on the left, and so are their keys and values when attention gets them.

    A method that stores keys after RoPE takes those that transformers hands over, of any decoder. One that needs keys
    before RoPE, queries, or a prefix, reads a model that tinykv implements: there hooks catch what is missing, and a
    text begins with the prefix, of which the model returns nothing.

    protocol, prompt: as of `KVCache`. The hooks hold the cache weakly: it goes, and they with it, when nobody else
    holds it. They act in the thread whose forward it is.
    """

    def __init__(self, model, method, protocol="stream", prompt=None):
        if not (isinstance(model, GenerationMixin) and getattr(method, "codecs", None)):
            raise TypeError("this takes a causal language model of transformers (of a PeftModel, `get_base_model()`) "
                            f"and a method, such as METHODS['kivi'](config); got {type(model).__name__} and "
                            f"{type(method).__name__}")
        super().__init__(model)
        like, self.is_watched = model_like(model, method)
        self.model = model
        self.empty = self.begin_text(KVCache(like, method, protocol, prompt))  # is copied for each text
        self.texts, self.padding = [], []  # KVCaches, and the padding of each text
        self.thread = None  # that of the forward which reads this cache
        self.skip = []  # of each text, how many columns of this forward are padding
        self.fresh = {}  # a layer's new q and k, before RoPE, until its `update`

        base = decoder.decoder_of(model)
        hooks = [base.register_forward_pre_hook(Hook(self.begin), with_kwargs=True),
                 base.register_forward_hook(Hook(self.end))]
        if self.is_watched:
            for layer in model.model.layers:
                attention = layer.self_attn
                q_source = getattr(attention, "q_norm", attention.q_proj)  # a Qwen3 norms every head
                k_source = getattr(attention, "k_norm", attention.k_proj)
                hooks += [q_source.register_forward_hook(Hook(self.see, "q")),
                          k_source.register_forward_hook(Hook(self.see, "k"))]
        if decoder.looks_at_hidden(method):
            hooks += [layer.register_forward_hook(Hook(self.see_hidden, i))
                      for i, layer in enumerate(decoder.layers_of(model))]
        self.remove = weakref.finalize(self, remove_all, hooks)  # takes them off the model: called, or when it goes

    # what the hooks call

    def begin(self, module, args, kwargs):
        """Before a forward: the arguments that it is given -> those that it gets."""
        names = signature(module.forward).parameters
        kwargs = {**dict(zip(names, args)), **kwargs}
        if self not in (kwargs.get("cache"), kwargs.get("past_key_values")):  # new releases, old ones
            if self.thread == get_ident():  # whose forward of this cache was interrupted
                self.thread = None
            return None
        tokens, padding = self.new_tokens(kwargs)  # (B, T), [B]

        # 1. each text reads its new tokens, without padding; a prefix, which it holds already, is in none of them
        texts, skip, seen = self.texts, [0] * len(tokens), self.get_seq_length()
        if not texts:
            texts, skip, seen = [copy.deepcopy(self.empty) for _ in tokens], padding, self.empty.start
        for text, row, n in zip(texts, tokens, skip):
            text.expect(row[None, n:])

        # 2. a token's position is its place in its own text. A prefix is not read again
        columns = torch.arange(seen, self.get_seq_length() + tokens.shape[1])  # (T), from now on without a prefix
        if self.is_watched:
            kwargs["input_ids"] = tokens
        positions = columns - torch.tensor(padding)[:, None]  # (B, T), below 0 in the padding
        given = kwargs.get("position_ids")
        if given is None and "position_ids" in names:
            kwargs["position_ids"] = positions.clamp(min=0).to(tokens.device)
        elif given is not None and given.dim() == 2 and (given[:, -1:].cpu() != positions[:, -1:]).any():
            raise UserError(f"position_ids end at {int(given[0, -1])}, and those of the cache go on to "
                            f"{int(positions[0, -1])}; leave them out, and `reset` it before other texts")
        for name in {"input_ids", "position_ids", "cache_position"} & set(kwargs):  # the last in older releases
            kwargs[name] = None if kwargs[name] is None else kwargs[name][..., -len(columns):]

        # 3. the hooks below see what is read from now on
        self.texts, self.padding, self.skip, self.fresh, self.thread = texts, padding, skip, {}, get_ident()
        for text in texts:
            text.busy = True
        return (), kwargs

    def end(self, module, inputs, output):
        """After a forward that ended well."""
        if self.thread == get_ident():
            self.thread = None
            for text in self.texts:
                text.busy = False

    def new_tokens(self, kwargs):
        """The arguments of a forward -> its tokens (B, T), and the padding of each text. UserError for what the cache
        cannot serve."""
        tokens, held = kwargs.get("input_ids"), self.get_seq_length()
        if kwargs.get("use_cache") is False:
            raise UserError("use_cache is False, in this call or in the model's config: the whole text would be "
                            "read again for every token; give use_cache=True")
        if tokens is None and self.is_watched:
            raise UserError(f"inputs_embeds hide the text from {self.empty.method!r}; give input_ids")
        if tokens is None:
            tokens = torch.zeros_like(kwargs["inputs_embeds"][..., 0], dtype=torch.long)  # which no method looks at
        B, T = tokens.shape
        padding = padding_of(kwargs.get("attention_mask"), B, held + T)
        if T == 0 or self.texts and padding != self.padding:
            raise UserError(f"{B} texts of {T} new tokens, padded by {padding}, do not go on from the cache, which "
                            f"holds {held} tokens of texts padded by {self.padding}; `reset` it before other texts")
        return tokens, padding

    def see(self, name, module, inputs, output):
        """New queries ("q") or keys ("k"), before RoPE: (B, T, heads * d) or (B, T, heads, d)."""
        if self.thread == get_ident():
            by_head = output.reshape(*output.shape[:2], -1, self.empty.config.head_dim)  # (B, T, heads, d)
            self.fresh[name] = by_head.transpose(1, 2)  # (B, heads, T, d)

    def see_hidden(self, layer, module, inputs, output):
        if self.thread == get_ident():
            for text, hidden, n in zip(self.texts, hidden_of(output), self.skip):  # (T, D)
                text.observe(layer, hidden[None, n:])

    # what transformers calls

    def update(self, keys, values, layer_idx, *args, **kwargs):
        """New keys and values (B, Hkv, T, d), keys after RoPE -> those of all S columns."""
        if self.thread != get_ident():
            raise UserError("a MethodCache reads with the model that it was made for, given as past_key_values=cache, "
                            "until `remove`")
        q, k = (self.fresh.pop("q"), self.fresh.pop("k")) if self.is_watched else (keys, keys)  # (B, Hkv, T, d)
        padded = []
        for i, (text, n) in enumerate(zip(self.texts, self.skip)):
            of_text = slice(i, i + 1), slice(None), slice(n, None)
            seen = text.layers[layer_idx].length
            if self.is_watched:
                check_keys(text.rope.rotate(k[of_text], seen), keys[of_text], layer_idx)
            # (1, Hkv, S - padding, d) both
            K, V = self.read(text, layer_idx, q[of_text], k[of_text], values[of_text], seen)
            padded.append([pad(x, (0, 0, self.padding[i], 0)) for x in (K, V)])
        return tuple(torch.cat(x) for x in zip(*padded))  # (B, Hkv, S, d) both

    def get_seq_length(self, layer_idx=0):
        """The columns that the model has read: 0, and not those of a prefix, before a text."""
        if not self.texts:
            return 0
        start, length = self.texts[0].start, self.texts[0].layers[layer_idx].length
        return start if length == start else self.padding[0] + length

    def reset(self):
        self.empty.reset()  # the model, or the method, may have been edited
        self.begin_text(self.empty)
        self.texts, self.padding, self.thread = [], [], None

    def batch_select_indices(self, indices):
        """The texts at `indices` go on. Of one that is named twice, such as a beam, all tokens are copied."""
        chosen = torch.arange(len(self.texts))[torch.as_tensor(indices).cpu()].tolist() if len(indices) else []
        self.texts = [copy.deepcopy(self.texts[i]) if i in chosen[:n] else self.texts[i] for n, i in enumerate(chosen)]
        self.padding = [self.padding[i] for i in chosen]

    reorder_cache = batch_select_indices

    def batch_repeat_interleave(self, repeats):
        self.batch_select_indices([i for i in range(len(self.texts)) for _ in range(repeats)])

    @property
    def is_initialized(self):
        return bool(self.texts)

    # what a user asks

    @property
    def nbytes(self):
        """Bytes of everything that is held."""
        return sum(text.nbytes for text in self.texts)

    def __deepcopy__(self, memo):
        """A cache that goes on by itself from the same tokens, of the same model and method."""
        new = MethodCache(self.model, self.empty.method, self.empty.protocol, self.empty.prompt)
        new.texts, new.padding = copy.deepcopy(self.texts, memo), list(self.padding)
        return new

    __copy__ = copy.deepcopy  # or two caches would have one text

    def __reduce_ex__(self, protocol):
        raise UserError("a MethodCache holds its model, which a file of it would hold as well; read the text again")

    def __repr__(self):
        return f"MethodCache({self.texts or self.empty!r})"


class Hook:
    """A hook that calls a cache's method, if the cache is still there. In a copy of the model it does nothing."""

    def __init__(self, method=None, *given):
        self.method, self.given = method and weakref.WeakMethod(method), given

    def __call__(self, *args):
        if self.method is not None and (call := self.method()) is not None:
            return call(*self.given, *args)

    def __reduce__(self):
        return Hook, ()


def remove_all(hooks):
    for hook in hooks:
        hook.remove()


# UserError for what the cache cannot serve

def padding_of(mask, B, S):
    """How many of S columns each of B texts is padded with, on the left."""
    if mask is None:
        return [0] * B
    if mask.shape != (B, S) or not (mask.bool() == (mask.bool().cumsum(1) > 0)).all() or not mask[:, -1].all():
        raise UserError(f"the attention_mask has to be ({B}, {S}), and hide nothing but padding on the left: "
                        "give the tokenizer padding_side='left'")
    return (S - mask.bool().sum(1)).tolist()


def check_keys(own, keys, layer):
    """Keys of this project and of the model, (1, Hkv, T, d) both: the same but for what 16 bits round."""
    error = (own - keys).abs().max()
    if not error <= 2 ** -6 * keys.abs().max():
        raise UserError(f"layer {layer} computes other keys than the model's config says at these positions; leave out "
                        "position_ids, make the cache after the last change to the model, do not edit RoPE, and set "
                        "the dtype in from_pretrained (model.to rounds RoPE, too)")


# What a KVCache asks of a model

def model_like(model, method):
    """An object with a model's config, RoPE and identity, and whether hooks have to watch it for the method."""
    like = SimpleNamespace(config=config_of(model), rope=AsGiven(), lm_head=model.get_output_embeddings(),
                           identity=partial(identity, model))
    try:
        decoder.check_method(method)
        return like, False
    except UserError:
        try:
            like.rope = Rope(decoder.own_config(model))
        except Unsupported as error:
            decoder.check_method(method, error)
    return like, True
