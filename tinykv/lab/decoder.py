"""Any decoder of transformers, behind the calls that this project makes of its own model.

    model, tokenizer = load("path/to/gemma-3-1b-it")
    measure(model, METHODS["kivi"](model.config), windows, "stream")

transformers hands a cache keys after RoPE, and values. A method that stores those needs nothing else, so it needs no
code for a model: not for its RoPE, its norms, its experts, its window. Hidden states, which `kvsink` looks at, come
from hooks on the layers.
"""
from contextlib import suppress
from functools import partial
from inspect import signature

import torch
import torch.nn.functional as F
import transformers
from transformers import AutoModelForCausalLM
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from tinykv import UserError, first_line
from tinykv.hf.config import Unsupported, checkpoint_folder, parse_config
from tinykv.hf.tokenizer import load_tokenizer
from tinykv.identity import PROBED_AT, identity_of, probe
from tinykv.model import LlamaConfig

NAME = "cache" if "cache" in signature(transformers.LlamaModel.forward).parameters else "past_key_values"  # until 5.23


# What a method needs

def check_method(method, why="the model runs through transformers"):
    """UserError for a method that needs more than keys after RoPE, values, and hidden states. why: there is no more."""
    needs = ("keys before RoPE" if method.rope == "pre" else "queries" if method.uses_scores
             else "a prefix" if method.prefix is not None else None)
    if needs:
        raise UserError(f"{method!r} needs {needs}, which are not to be had ({why}); what works: fp16, kivi, ott, "
                        "oscar, and methods with scheme='token-dynamic', or whose keys are stored with rope='post'")


def looks_at_hidden(method):
    from tinykv.methods.base import Method  # only now: what reads a folder knows no method
    return type(method).observe is not Method.observe


# What a model is

def own_config(model):
    """The config that tinykv has for its own implementation of a model of transformers. `Unsupported` without one."""
    return parse_config(model.config.to_dict(), "the model's config")


def config_of(model):
    """A model of transformers -> the config to make a method with: all of it where tinykv implements the model, and
    else a `LlamaConfig` with the shapes that a cache sees."""
    with suppress(Unsupported):
        return own_config(model)
    keys, values, _ = computed(model)
    text, found = model.config.get_text_config(decoder=True), {x.shape[1::2] for x in keys + values}
    if len(found) != 1:
        shapes = ", ".join(f"{heads} heads of {d}" for heads, d in sorted(found))
        raise UserError(f"{text.model_type} has keys and values of several shapes ({shapes}); a cache here has one")
    (heads, d), = found
    others = {"intermediate_size": 0, "max_position_embeddings": 2 ** 24, "bos_token_id": None, "eos_token_id": None}
    return LlamaConfig(vocab_size=text.vocab_size, hidden_size=text.hidden_size, num_hidden_layers=len(keys),
                       num_attention_heads=text.num_attention_heads, num_key_value_heads=heads, head_dim=d,
                       model_type=text.model_type,
                       **{name: getattr(text, name, None) or value for name, value in others.items()})


def identity(model):
    """What `identity.identity` is of a model of transformers."""
    keys, values, logits = computed(model)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight  # (vocab, D) both
    return identity_of(torch.cat(keys), torch.cat(values), logits, embedding, head)


@torch.no_grad()
def computed(model):
    """Of the text of `identity.probe`: keys and values, (1, Hkv, T, d) of each layer that has them, and logits (1, T,
    vocab). It begins where `identity.identity` begins it, if that can be."""
    layers, given = layers_of_cache(model), {}
    cache = DynamicCache(config=model.config) if any(layers) else DynamicCache()  # the former cuts to a window
    tokens = probe(model.config.get_text_config(decoder=True).vocab_size).to(model.device)  # (1, T)
    with suppress(Unsupported):
        given["position_ids"] = own_config(model) and PROBED_AT + torch.arange(4, device=model.device)[None]  # (1, T)
    logits = model(input_ids=tokens, use_cache=True, **{NAME: cache}, **given).logits
    held = [layer for layer, other in zip(cache.layers, layers) if other is None]
    return [layer.keys.cpu() for layer in held], [layer.values.cpu() for layer in held], logits


def layers_of_cache(model):
    """The layers that transformers' cache of a model has: None for those of keys and values; others, such as
    convolutions, hold a state."""
    layers = DynamicCache(config=model.config).layers
    kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ["attention"] * len(layers)
    for i, (kind, layer) in enumerate(zip(kinds, layers)):
        if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) and kind not in ("conv", "linear_attention"):
            layers[i] = None
        elif isinstance(layer, CacheLayerMixin):  # older releases have one for each layer
            raise UserError(f"a layer of {model.config.model_type}, {kind}, is cached in {type(layer).__name__} of "
                            f"transformers {transformers.__version__}; a cache here holds keys and values, and other "
                            "layers' states only as newer releases have them")
    return layers


def layers_of(model):
    """The modules whose outputs are hidden states. UserError where they are not found, or not all have attention."""
    of_cache = layers_of_cache(model)
    lists = [m for m in model.base_model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == len(of_cache)]
    if any(of_cache) or not lists:
        raise UserError(f"hidden states are not found in a {model.config.model_type}, or some of its layers have no "
                        "attention; methods that need neither them nor calibration work: fp16, kivi, ott, oscar")
    return lists[0]


def hidden_of(output):
    """A layer's output (B, T, D), of what it returns."""
    return output[0] if isinstance(output, tuple) else output


# Caches of transformers

class Coded:
    """In `layers` of a `Bridge`: a layer whose keys and values a KVCache holds."""
    is_compileable = is_sliding = is_croppable = supports_early_init = False

    @property
    def keys(self):
        raise UserError("keys and values are coded, and `update` alone gives them; a press of kvpress takes tokens out "
                        "of a cache, and a quantized token cannot leave its block")
    values = keys


class Bridge(Cache):
    """A cache of transformers whose keys and values are held by KVCaches. A sliding layer holds all tokens: the mask,
    which transformers makes as long as `get_mask_sizes` says, hides the old ones. States of other layers are
    transformers' own."""
    is_croppable = False  # what `generate` asks: no token can be taken out
    max_cache_len = max_batch_size = -1  # there is none

    def __init__(self, model):
        super().__init__(layers=[layer or Coded() for layer in layers_of_cache(model)])
        with_attention = [i for i, layer in enumerate(self.layers) if isinstance(layer, Coded)]
        self.places = {i: n for n, i in enumerate(with_attention)}  # of layers in KVCaches

    def get_mask_sizes(self, query_length, layer_idx):
        if torch.is_tensor(query_length):  # in older releases, the positions of the new tokens
            query_length = len(query_length)
        return self.get_seq_length(layer_idx) + query_length, 0

    def get_max_length(self, layer_idx=None):
        return -1  # there is none

    get_max_cache_shape = get_max_length  # in older releases

    def crop(self, *args):
        raise UserError("contrastive search and assisted decoding take tokens out of a cache, and a quantized token "
                        "cannot leave its block; decode greedily, with beams, or sample")


class OneCache(Bridge):
    """A KVCache, or what answers its calls, for one batch of texts of equal length."""
    seen = 0  # tokens before those of this forward

    def __init__(self, model, cache):
        super().__init__(model)
        self.cache = cache

    def update(self, keys, values, layer_idx, *args, **kwargs):
        return self.cache.update(self.places[layer_idx], None, keys, values, self.seen)

    def get_seq_length(self, layer_idx=0):
        return self.seen


# The model

class AsGiven:
    """The `Rope` of keys that are rotated already."""

    def rotate(self, x, begin=0):
        return x


class Decoder:
    """A causal language model of transformers that answers the calls of `Llama`: a forward through a KVCache, and what
    `evaluate.measure` and `calibrate` read of a model."""

    def __init__(self, model):
        self.theirs, self.config, self.rope = model.eval(), config_of(model), AsGiven()
        self.model = {"embed_tokens": model.get_input_embeddings()}
        found = model.base_model
        self.decoder = model.model if found is model else found  # a Llama 4 names it otherwise
        self.lm_head = self.head()

    @torch.no_grad()
    def head(self):
        """A linear layer without bias that makes the model's logits of what a forward gives. UserError if there is
        none: where logits are capped."""
        head, tokens = self.theirs.get_output_embeddings(), probe(self.config.vocab_size).to(self.theirs.device)
        self.has_bias, weight = getattr(head, "bias", None) is not None, head.weight  # (vocab, D)
        if self.has_bias:  # is a column of the weight, and every state has a 1 at its end
            weight = torch.cat([weight, head.bias[:, None]], dim=1)  # (vocab, D + 1)
        logits = self.theirs(tokens).logits.double()  # (1, T, vocab)
        linear = F.linear(self(tokens, logits=False), weight).double()  # (1, T, vocab)
        scale = (logits * linear).sum() / linear.square().sum()  # as of a Granite
        error = (logits - scale * linear).abs().max() / logits.abs().max()
        is_capped = getattr(self.theirs.config.get_text_config(), "final_logit_softcapping", None)
        if is_capped or not error <= (1e-4 if weight.dtype == torch.float32 else 2 ** -5):
            raise UserError(f"{self.config.model_type} caps its logits, or computes them by more than a product with "
                            "its head; perplexity is measured only on models that do not")
        if abs(scale - 1) > 1e-3:
            weight = weight * scale.to(weight.dtype)
        made = torch.nn.Linear(*reversed(weight.shape), bias=False, device="meta")
        made.weight = torch.nn.Parameter(weight, requires_grad=False)
        return made

    def __call__(self, tokens, cache=None, logits=True):
        """As `Llama.forward`. A state has a 1 at its end where the head has a bias."""
        given, hooks = {"use_cache": False}, []
        if cache is not None:
            if getattr(cache, "model", self) is not self:
                raise UserError("the cache was made for another model; make one for this, KVCache(model, method)")
            tokens, seen = cache.expect(tokens)
            if seen == 0:
                cache.bridge = OneCache(self.theirs, cache)
            cache.busy, cache.bridge.seen = True, seen
            given = {"use_cache": True, NAME: cache.bridge}
            if not hasattr(cache, "method") or looks_at_hidden(cache.method):  # calibration looks at them, too
                hooks = [layer.register_forward_hook(partial(show, cache, i))
                         for i, layer in enumerate(layers_of(self.theirs))]
        try:
            h = self.decoder(tokens, **given)[0]  # (B, T, D), after the last norm
        finally:
            for hook in hooks:
                hook.remove()
        if cache is not None:
            cache.busy = False
        if self.has_bias:
            h = F.pad(h, (0, 1), value=1.0)  # (B, T, D + 1)
        return self.lm_head(h) if logits else h

    def use_attention(self, word):
        if word != "fused":
            raise UserError("attention is transformers' own here; leave out --attention")

    def heading(self):
        """What a table says of it."""
        config = self.config
        return (f"through transformers {transformers.__version__}: {config.model_type}, {config.num_hidden_layers} "
                f"layers with {config.num_key_value_heads} KV heads of {config.head_dim}; fp16 holds all of their keys "
                "and values in 16 bits, a sliding layer's, too")

    def check_method(self, method):
        check_method(method)
        if looks_at_hidden(method) or method.needs_calibration:
            layers_of(self.theirs)

    def identity(self):
        return identity(self.theirs)

    def parameters(self):
        return self.theirs.parameters()

    def buffers(self):
        return ()  # none of them is a weight

    def modules(self):
        return self.theirs.modules()


def show(cache, i, module, inputs, output):
    cache.observe(i, hidden_of(output))


def load(folder, device="cpu", dtype=torch.float32):
    """A checkpoint folder, or a name on the hub -> (Decoder, Tokenizer)."""
    folder = checkpoint_folder(folder)
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device)
    except Exception as error:  # of many kinds
        raise UserError(f"transformers cannot read {folder} ({first_line(error)})") from None
    model = Decoder(model)
    return model, load_tokenizer(folder, model.config)
