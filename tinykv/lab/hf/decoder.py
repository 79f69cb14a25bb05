"""Any decoder of transformers, behind the calls that this project makes of its own model.

    model, tokenizer = load("path/to/gemma-3-1b-it")
    measure(model, METHODS["kivi"](model.config), windows, "stream")

transformers hands a cache keys after RoPE, and values. A method that stores those needs nothing else, so it needs no
code for a model: not for its RoPE, its norms, its experts, its windows. Hidden states, which `kvsink` looks at, come
from hooks on the layers, and logits from the model's own forward.
"""
import copy
from contextlib import suppress
from functools import partial
from inspect import signature

import torch
import transformers
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from tinykv import UserError, first_line
from tinykv.codecs.base import Codec
from tinykv.hf.config import Unsupported, checkpoint_folder, parse_config
from tinykv.hf.tokenizer import load_tokenizer
from tinykv.lab.hf.hub import local_folder
from tinykv.methods.base import Method
from tinykv.model import PROBED, PROBED_AT, Llama, LlamaConfig, known_by, probe

NAME = "cache" if "cache" in signature(transformers.LlamaModel.forward).parameters else "past_key_values"  # until 5.23


def check_method(method, why="the model runs through transformers"):
    """UserError for a method that needs more than keys after RoPE, values, and hidden states. why: there is no more."""
    needs = ("keys before RoPE" if method.rope == "pre" else "queries" if method.uses_scores
             else "a prefix" if method.prefix is not None else None)
    if needs:
        raise UserError(f"{method!r} needs {needs}, which cannot be had here ({why}); what works: fp16, kivi, ott, "
                        "oscar, and methods with scheme='token-dynamic', or whose keys are stored with rope='post'")


def looks_at_hidden(method):
    return type(method).observe is not Method.observe


# What a model is

def own_config(model):
    """The config that tinykv has for its own implementation of a model of transformers. `Unsupported` without one."""
    return parse_config(model.config.to_dict(), "the model's config")


def config_of(model):
    """A model of transformers -> the config to make a method with: all of it where tinykv implements the model, and
    else a `LlamaConfig` with the shapes that a cache sees."""
    layers_of(model)  # as many as its config says
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
    """What `Llama.identity` is of a model of transformers."""
    return known_by(*computed(model), model.get_input_embeddings().weight)


@torch.no_grad()
def computed(model):
    """What a model computes from the text of `probe`: each layer's keys and values, (1, Hkv, T, d), and logits (1, T,
    vocab). The keys are those of the positions that `Llama.identity` has, if that can be."""
    windows_of(model)  # or the model needs another cache
    cache, given = DynamicCache(), {}  # without a config, it cuts to no window
    tokens = probe(model.config.get_text_config(decoder=True).vocab_size).to(model.device)  # (1, T)
    with suppress(Unsupported):
        own_config(model)
        given["position_ids"] = PROBED_AT + torch.arange(PROBED, device=model.device)[None]  # (1, T)
    logits = model(input_ids=tokens, use_cache=True, **{NAME: cache}, **given).logits
    return [layer.keys.cpu() for layer in cache.layers], [layer.values.cpu() for layer in cache.layers], logits


def windows_of(model):
    """How many tokens each layer sees, None for all: by the layer types of the model's config. UserError where a layer
    has anything but keys and values of its own."""
    text, layers = model.config.get_text_config(decoder=True), DynamicCache(config=model.config).layers
    kinds = getattr(text, "layer_types", None) or ()
    others = {kind for kind in kinds if kind not in ("full_attention", "sliding_attention", "chunked_attention")}
    others |= {type(layer).__name__ for layer in layers if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer)}
    others |= {"recurrent"} if getattr(model, "_is_stateful", False) else set()
    others |= {"MLA"} if getattr(text, "kv_lora_rank", None) else set()
    others |= {"shared"} if len(layers) < text.num_hidden_layers else set()
    if others:
        raise UserError(f"{text.model_type} has layers with something else than keys and values of their own "
                        f"({', '.join(sorted(others))}); a cache here holds nothing else")
    return [getattr(layer, "sliding_window", None) for layer in layers]


def layers_of(model):
    """The modules whose outputs are hidden states."""
    n, text = len(windows_of(model)), getattr(model.base_model, "language_model", model.base_model)  # beside images
    for part in text.modules():
        if isinstance(part, torch.nn.ModuleList) and len(part) == n:
            return part
    raise UserError(f"the model has not the {n} layers that its config says; set num_hidden_layers to what it has")


def decoder_of(model):
    """The module from tokens to the states that logits are made of. An OPT's forward calls a part of its base model."""
    base = model.model if model.base_model is model else model.base_model  # a Llama 4 names it otherwise
    return getattr(base, "decoder", base)


def hidden_of(output):
    """A layer's output (B, T, D), of what it returns."""
    return output[0] if isinstance(output, tuple) else output


# Codes of a sliding layer

class Windowed(Codec):
    """A layer's codec where a query sees only the last `window` tokens. Older codes go, and zeros are read in their
    place, which the model's mask hides."""

    def __init__(self, codec, window):
        self.codec, self.window = codec, window
        self.bits, self.tokens_per_group = codec.bits, codec.tokens_per_group

    def encode(self, x, ignore=None):
        return Held(self.codec.encode(x, ignore), x.shape[2], x[:, :, :0].clone())

    def decode(self, held):
        rows = held.none if held.gone == held.n else self.codec.decode(held.codes)  # (B, Hkv, n - gone, d)
        return pad(rows, (0, 0, held.gone, 0))  # (B, Hkv, n, d)

    def drop(self, held, begin):
        """Drop the codes of the tokens before `begin`, in whole groups."""
        G, n = self.tokens_per_group, held.n - held.gone  # tokens whose codes are there
        cut = min(begin - held.gone, n) // G * G
        sizes = {x.shape[2] for x in vars(held.codes).values()}
        if cut > 0 and sizes <= {n, -(-n // G)}:  # not where codes are sparse
            parts = {name: x[:, :, cut if x.shape[2] == n else cut // G:] for name, x in vars(held.codes).items()}
            held.codes = type(held.codes)(**{name: x.clone() for name, x in parts.items()})
            held.gone += cut


class Held:
    """Codes of n tokens, without those of the first `gone`. none (B, Hkv, 0, d): rows of no token."""

    def __init__(self, codes, n, none, gone=0):
        self.codes, self.n, self.none, self.gone = codes, n, none, gone

    def followed_by(self, other):
        codes = other.codes if self.gone == self.n else self.codes.followed_by(other.codes)
        return Held(codes, self.n + other.n, self.none, self.gone)

    @property
    def nbytes(self):
        return self.codes.nbytes


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
    """A cache of transformers whose keys and values KVCaches hold. Attention gets all columns, and the mask, which
    transformers makes as long as `get_mask_sizes` says, hides those outside a layer's window."""
    is_croppable = False  # what `generate` asks: no token can be taken out
    max_cache_len = max_batch_size = -1  # there is none

    def __init__(self, model):
        self.windows = windows_of(model)
        super().__init__(layers=[Coded() for _ in self.windows])

    def begin_text(self, cache):
        """A KVCache without tokens -> the same, whose sliding layers drop codes. (A score is of all tokens.)"""
        for layer, window in zip(cache.layers, self.windows):
            for rows in (layer.keys, layer.values) if window and not cache.method.uses_scores else ():
                rows.codec = Windowed(rows.codec, window)
        return cache

    def read(self, cache, i, *new):
        """New q, k, v of layer i, and how many tokens it has seen -> K and V for attention."""
        attended, layer = cache.update(i, *new), cache.layers[i]
        for rows in (layer.keys, layer.values):
            if rows.codes is not None and rows.codec.window:
                rows.codec.drop(rows.codes, layer.length + 1 - self.windows[i])
        return attended

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
        self.is_coded = hasattr(cache, "method")
        self.cache = self.begin_text(cache) if self.is_coded else cache

    def update(self, keys, values, layer_idx, *args, **kwargs):
        read = partial(self.read, self.cache) if self.is_coded else self.cache.update
        return read(layer_idx, None, keys, values, self.seen)

    def get_seq_length(self, layer_idx=0):
        return self.seen


# The model

class AsGiven:
    """The `Rope` of keys that are rotated already."""

    def rotate(self, x, begin=0):
        return x


class GivenStates(torch.nn.Module):
    """In the place of a decoder: its states are given."""

    def forward(self, input_ids=None, inputs_embeds=None, **kwargs):
        return States(inputs_embeds)


class States:
    """What a decoder returns: states, and nothing else that a model asks for."""

    def __init__(self, h):
        self.last_hidden_state = h

    def __getitem__(self, i):
        return self.last_hidden_state

    def __getattr__(self, name):
        return None


class Head(torch.nn.Module):
    """What a model makes logits with: its own forward around `GivenStates`, with its scale, bias and cap."""

    def __init__(self, model, decoder):
        super().__init__()
        self.around, self.last = around(model, decoder), model.get_output_embeddings()

    @property
    def weight(self):
        return self.last.weight  # (vocab, D)

    def forward(self, h):
        """h (..., D) -> logits (..., vocab)."""
        return self.around(inputs_embeds=h.reshape(1, -1, h.shape[-1])).logits.view(*h.shape[:-1], -1)


def around(module, decoder):
    """A copy of a module with `GivenStates` in the place of its decoder."""
    if module is decoder:
        return GivenStates()
    new = copy.copy(module)
    new._modules = {name: around(part, decoder) if part is not None and decoder in part.modules() else part
                    for name, part in module._modules.items()}
    return new


class Decoder(torch.nn.Module):
    """A causal language model of transformers that answers the calls of `Llama`: a forward through a KVCache, and what
    `evaluate.measure`, `calibrate` and lm_eval ask of a model."""
    generate = Llama.generate

    def __init__(self, model):
        super().__init__()
        self.theirs, self.config, self.rope = model.eval(), config_of(model), AsGiven()
        self.model = {"embed_tokens": model.get_input_embeddings()}
        self.decoder = decoder_of(model)
        self.lm_head = Head(model, self.decoder)

    def forward(self, tokens, cache=None, logits=True):
        """As `Llama.forward`."""
        given, hooks = {"use_cache": False}, []
        if cache is not None:
            if getattr(cache, "model", self) is not self:
                raise UserError("the cache was made for another model; make one for this, KVCache(model, method)")
            tokens, seen = cache.expect(tokens)
            if seen == 0:
                cache.bridge = OneCache(self.theirs, cache)
            cache.busy, cache.bridge.seen = True, seen
            given = {"use_cache": True, NAME: cache.bridge}
            if not cache.bridge.is_coded or looks_at_hidden(cache.method):  # calibration looks at them, too
                hooks = [layer.register_forward_hook(partial(show, cache, i))
                         for i, layer in enumerate(layers_of(self.theirs))]
        try:
            h = self.decoder(tokens, **given)[0]  # (B, T, D), after the last norm
        finally:
            for hook in hooks:
                hook.remove()
        if cache is not None:
            cache.busy = False
        return self.lm_head(h) if logits else h

    def use_attention(self, word):
        if word != "fused":
            raise UserError("attention is transformers' own here; leave out --attention")

    def heading(self):
        """What a table says of it."""
        config = self.config
        return (f"through transformers {transformers.__version__}: {config.model_type}, {config.num_hidden_layers} "
                f"layers with {config.num_key_value_heads} KV heads of {config.head_dim}; sliding layers hold a window")

    check_method = staticmethod(check_method)

    def identity(self):
        return identity(self.theirs)


def show(cache, i, module, inputs, output):
    cache.observe(i, hidden_of(output))


def load(folder, device="cpu", dtype=torch.float32):
    """A checkpoint folder, or a name on the hub -> (Decoder, Tokenizer)."""
    folder = checkpoint_folder(local_folder(folder))
    try:
        model = Decoder(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device))
    except UserError:
        raise
    except Exception as error:  # of many kinds
        raise UserError(f"transformers cannot read {folder} ({first_line(error)})") from None
    return model, load_tokenizer(folder, model.config)
