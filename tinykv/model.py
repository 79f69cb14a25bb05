"""LLaMA from scratch: config, RMSNorm, RoPE, attention, MLP, forward, generate.

Modules carry Hugging Face's parameter names (`model.layers.0.self_attn.q_proj.weight`), so a checkpoint loads with no
name map. Shapes: B sequences, T new tokens, S tokens seen in all, H query heads, Hkv KV heads, d head size, D hidden
size. Covers LLaMA 1 to 3.2, Vicuna, TinyLlama, Mistral, Qwen2, Qwen2.5 and Qwen3; `hf/config.py` refuses anything else.

The KV cache is an argument: any object that answers these calls of a forward.

    expect(tokens) -> tokens, seen            the tokens (B, T) that are new to it, and how many it holds already
    update(layer, q, k, v, seen) -> K, V      the new q, k and v, before RoPE -> K (rotated) and V of all S tokens
    observe(layer, hidden)                    a layer's output for the new tokens, (B, T, D)
"""
import math
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import nn

from tinykv import UserError, all_finite, at_least, one_of


@dataclass
class LlamaConfig:
    """The fields of config.json that shape the model, under their Hugging Face names.

    model_type shapes it, too: a "qwen2" has biases only on q, k and v, and a "qwen3" normalizes the queries and keys of
    each head.
    """
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict | None = None  # {"rope_type": "linear" | "llama3", "factor": ..., ...}
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None  # a token sees itself and the sliding_window - 1 before it
    model_type: str = "llama"
    bos_token_id: int | None = None
    eos_token_id: int | list | None = None

    @property
    def positions(self):
        """How many tokens a text may have: RoPE's `linear` stretches the positions of training, as Vicuna 16k's."""
        scaling = self.rope_scaling or {}
        stretched = scaling["factor"] if scaling.get("rope_type") == "linear" else 1
        return int(self.max_position_embeddings * stretched)


class RMSNorm(nn.Module):
    def __init__(self, dim, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * h.to(x.dtype)


class Rope:
    """Rotary position embedding, half-split as in Hugging Face: channels i and i + d/2 turn together.

    Angle of pair i at position p: p * theta**(-2i/d), with the frequencies rescaled for `linear` and `llama3`.
    """

    def __init__(self, config):
        d = config.head_dim
        # on the CPU, even under torch.device("meta"), where modules are made without memory
        two_i = torch.arange(0, d, 2, dtype=torch.float32, device="cpu")  # (d/2): 2i of pair i
        freq = config.rope_theta ** (-two_i / d)  # (d/2)
        scaling = config.rope_scaling or {"rope_type": "default"}
        if scaling["rope_type"] == "linear":
            freq = freq / scaling["factor"]
        elif scaling["rope_type"] == "llama3":
            # Pairs that turn less than `low` times within the old context are slowed by `factor`,
            # those that turn more than `high` times are left alone, with a ramp in between.
            old_context = scaling["original_max_position_embeddings"]
            turns = old_context * freq / (2 * math.pi)  # (d/2)
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            unscaled = ((turns - low) / (high - low)).clamp(0, 1)  # (d/2): 1 where it is left alone
            freq = (1 - unscaled) * freq / scaling["factor"] + unscaled * freq
        self.freq = freq

    def rotate(self, x, begin=0):
        """x (..., T, d) at positions begin .. begin + T-1 -> the same shape and dtype, rotated; computed in fp32."""
        return turned(x, *self.cos_sin(begin, begin + x.shape[-2], x.device))  # (T, d) both

    def cos_sin(self, begin, end, device):
        """[cos, cos] and [-sin, sin] of every pair's angle at positions begin .. end-1, (T, d) both."""
        longer = 2 ** (end - 1).bit_length()  # so that a text that grows needs few tables
        cos, sin = cos_sin(tuple(self.freq.tolist()), longer, device)  # (S, d) both
        return cos[begin:end], sin[begin:end]


@lru_cache(maxsize=16)
def cos_sin(freq, S, device):
    """[cos, cos] and [-sin, sin] of every pair's angle at positions 0 .. S-1, (S, d) both. freq: d/2 numbers.

    All layers and forwards use the same tables. They are found by what the frequencies are, which one may edit.
    """
    with torch.inference_mode(False):  # a later forward may need gradients
        freq = torch.tensor(freq, dtype=torch.float32, device=device)  # (d/2)
        angle = torch.arange(S, device=device)[:, None] * freq  # (S, d/2)
        cos, sin = angle.cos(), angle.sin()  # (S, d/2) both
        return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


def turned(x, cos, sin):
    """x, cos, sin (..., T, d): channel i becomes x1 cos - x2 sin, channel i + d/2 becomes x2 cos + x1 sin."""
    x1x2 = x.float()  # (..., T, d)
    x1, x2 = x1x2.chunk(2, dim=-1)  # (..., T, d/2) each
    x2x1 = torch.cat([x2, x1], dim=-1)  # (..., T, d)
    # in place: to write to new memory takes longer than to compute
    x2x1 *= sin
    y = x1x2 * cos  # (..., T, d)
    y += x2x1
    return y.to(x.dtype)


ATTENTIONS = ("plain", "fused", "triton", "compiled")


class Attention(nn.Module):
    """Causal attention with grouped KV heads. The attribute `attention` says how it is computed:

    plain      softmax(q k^T / sqrt(d)) v in visible lines, for reading and stepping
    fused      torch's own kernel, which computes the same
    triton     the cache computes it from its packed codes; only a TritonCache can (triton_cache.py)
    compiled   a CompiledCache computes it for a single new token, in loops that torch compiles (compiled_cache.py);
               several new tokens take the fused lines
    """

    def __init__(self, config):
        super().__init__()
        self.n_heads = config.num_attention_heads  # H
        self.n_kv_heads = config.num_key_value_heads  # Hkv
        self.head_dim = config.head_dim  # d
        D, bias = config.hidden_size, config.attention_bias
        qkv_bias = bias or config.model_type == "qwen2"
        self.q_proj = nn.Linear(D, self.n_heads * self.head_dim, bias=qkv_bias)
        self.k_proj = nn.Linear(D, self.n_kv_heads * self.head_dim, bias=qkv_bias)
        self.v_proj = nn.Linear(D, self.n_kv_heads * self.head_dim, bias=qkv_bias)
        self.o_proj = nn.Linear(self.n_heads * self.head_dim, D, bias=bias)
        self.norms_heads = config.model_type == "qwen3"
        if self.norms_heads:
            self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.attention = "fused"

    def qkv(self, x):
        """x (B, T, D) -> q (B, H, T, d), k and v (B, Hkv, T, d), all before RoPE."""
        B, T, _ = x.shape
        d = self.head_dim
        q = self.q_proj(x).view(B, T, self.n_heads, d).transpose(1, 2)  # (B, H, T, d)
        k = self.k_proj(x).view(B, T, self.n_kv_heads, d).transpose(1, 2)  # (B, Hkv, T, d)
        v = self.v_proj(x).view(B, T, self.n_kv_heads, d).transpose(1, 2)  # (B, Hkv, T, d)
        if self.norms_heads:  # Qwen3: every query and key on its own, before RoPE
            q, k = self.q_norm(q), self.k_norm(k)  # (B, H, T, d), (B, Hkv, T, d)
        return q, k, v

    def forward(self, x, rope, seen, mask, layer, cache=None):
        q, k, v = self.qkv(x)  # (B, H, T, d), (B, Hkv, T, d) twice, before RoPE

        one_token = x.shape[1] == 1 and cache is not None
        if self.attention == "triton" or (self.attention == "compiled" and one_token):
            if not hasattr(cache, "attend"):
                raise UserError(f"attention {self.attention!r} reads the cache that computes it; call "
                                f"use_attention('fused') before {type(cache).__name__} is read")
            out = cache.attend(layer, q, k, v, seen)  # (B, H, T, d)
            return self.o_proj(out.transpose(1, 2).flatten(2))  # (B, T, D)

        # keys and values of all S tokens so far; with a cache, the cache returns them
        if cache is None:
            k = rope.rotate(k, seen)  # (B, Hkv, S = T, d)
        else:
            k, v = cache.update(layer, q, k, v, seen)  # (B, Hkv, S, d) both, k rotated
        q = rope.rotate(q, seen)  # (B, H, T, d)

        # each KV head serves several query heads; torch's kernel needs no copies if there is no mask
        grouped = self.attention != "plain" and mask is None
        if not grouped:
            heads_per_kv = self.n_heads // self.n_kv_heads
            k = k.repeat_interleave(heads_per_kv, dim=1)  # (B, H, S, d)
            v = v.repeat_interleave(heads_per_kv, dim=1)  # (B, H, S, d)

        if self.attention != "plain":
            T = x.shape[1]
            causal = mask is None and T > 1  # one new token sees all keys
            if causal and seen:  # torch's lower triangle begins at token 0: zeros stand for the queries seen before
                q = F.pad(q, (0, 0, seen, 0))  # (B, H, S, d)
            out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=grouped)
            out = out[:, :, -T:]  # (B, H, T, d)
        else:
            scores = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)  # (B, H, T, S)
            scores = scores.masked_fill(~mask, float("-inf"))  # (B, H, T, S)
            p = torch.softmax(scores.float(), dim=-1).to(v.dtype)  # (B, H, T, S)
            out = p @ v  # (B, H, T, d)
        return self.o_proj(out.transpose(1, 2).flatten(2))  # (B, T, D)


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        D, M = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(D, M, bias=config.mlp_bias)
        self.up_proj = nn.Linear(D, M, bias=config.mlp_bias)
        self.down_proj = nn.Linear(M, D, bias=config.mlp_bias)

    def forward(self, x):
        return self.down_proj(self.gated(x))  # (B, T, D)

    def gated(self, x):
        """(B, T, M): what `down_proj` reads, which weight quantizers look at."""
        return F.silu(self.gate_proj(x)) * self.up_proj(x)


class Layer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, h, rope, seen, mask, layer, cache=None):
        x = self.input_layernorm(h)  # (B, T, D)
        h = h + self.self_attn(x, rope, seen, mask, layer, cache)  # (B, T, D)
        x = self.post_attention_layernorm(h)  # (B, T, D)
        return h + self.mlp(x)  # (B, T, D)


class Llama(nn.Module):
    """A stack of layers between an embedding and a head. `forward` reads new tokens through a cache."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.rope = Rope(config)
        self.model = nn.ModuleDict({
            "embed_tokens": nn.Embedding(config.vocab_size, config.hidden_size),
            "layers": nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers)),
            "norm": RMSNorm(config.hidden_size, config.rms_norm_eps),
        })
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.devices = None  # of each layer, where they lie on several
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model["embed_tokens"].weight

    def use_attention(self, word):
        """Which lines of `Attention.forward` run from now on: one of ATTENTIONS."""
        one_of(ATTENTIONS, attention=word)
        for layer in self.model["layers"]:
            layer.self_attn.attention = word

    def forward(self, tokens, cache=None, logits=True):
        """tokens (B, T) -> logits (B, T, vocab), or with logits=False the normed hidden states (B, T, D).

        With a cache, the tokens follow those that it holds. A cache may begin with a prefix: a fixed text whose keys
        and values it holds from the start. `tokens` must then begin with that text; only the tokens after it have an
        output.
        """
        seen = 0
        if cache is None:
            check_tokens(tokens, self.config)
        else:
            if getattr(cache, "model", self).model is not self.model:  # also where torch.compile wraps it
                raise UserError("the cache was made for another model; make one for this, KVCache(model, method)")
            tokens, seen = cache.expect(tokens)
            cache.busy = True  # until this forward has ended
        T = tokens.shape[1]
        mask = self.mask(seen, T, tokens.device)  # (T, S), or None where none is needed
        h = self.model["embed_tokens"](tokens)  # (B, T, D)
        for i, layer in enumerate(self.model["layers"]):
            if self.devices is not None:  # the layer may be on another device, to which its input moves
                device = self.devices[i]
                h = h.to(device)
                mask = None if mask is None else mask.to(device)
            h = layer(h, self.rope, seen, mask, i, cache)  # (B, T, D)
            if cache is not None:
                cache.observe(i, h)  # a layer's output may tell which tokens to keep (kvsink)
        h = self.model["norm"](h.to(tokens.device))  # (B, T, D)
        out = self.lm_head(h) if logits else h  # (B, T, vocab) or (B, T, D)
        if cache is not None:
            cache.busy = False
        return out

    def mask(self, seen, T, device):
        """(T, S): True where new token i may look at token j, S = seen + T.

        Returns None where torch's own attention needs no mask: for a lower triangle, even after a prefix shorter than
        the new tokens, and for a single new token, which sees every key.
        """
        S, window = seen + T, self.config.sliding_window
        is_plain = self.model["layers"][0].self_attn.attention == "plain"
        is_known = (seen < T or T == 1) and (window is None or window >= S)
        if is_known and not is_plain:
            return None
        key_at = torch.arange(S, device=device)[None]  # (1, S): positions of the keys
        query_at = torch.arange(seen, S, device=device)[:, None]  # (T, 1): of the queries
        visible = key_at <= query_at  # (T, S)
        if window is not None:
            visible = visible & (key_at > query_at - window)  # (T, S)
        return visible

    @torch.no_grad()
    def identity(self):
        """What the model is known by: see `known_by`."""
        trace, attention = Trace(self), self.model["layers"][0].self_attn.attention
        tokens = probe(self.config.vocab_size).to(self.lm_head.weight.device)  # (1, T)
        try:
            self.use_attention("fused")  # a `Trace` has no codes that triton could read
            hidden = self(tokens, trace, logits=False)  # (1, T, D)
        finally:
            self.use_attention(attention)
        keys = [self.rope.rotate(k, PROBED_AT) for k in trace.k]  # (1, Hkv, T, d) each
        return known_by(keys, trace.v, self.lm_head(hidden[:, -1:]), self.model["embed_tokens"].weight)

    @torch.no_grad()
    def generate(self, tokens, max_new_tokens, cache=None, temperature=0.0, top_p=1.0, seed=None, eos=None):
        """Continue tokens (B, T) by up to max_new_tokens: greedy at temperature 0, else sampled from the top-p nucleus.

        Returns (B, T + new). Stops early once every row has produced `eos`, an id or several; a row that is done
        repeats the first of them. Texts of a batch are equally long: padding is read as text. Without a cache the whole
        text is read again for every token. With one, give only tokens that it has not read: never a prompt that a
        forward has read; after a `generate`, the last token of its output, and what comes after it.
        """
        if not (cache is None or hasattr(cache, "expect")):
            raise UserError(f"generate takes a cache, such as KVCache(model, method); got {cache!r}")
        at_least(0, max_new_tokens=max_new_tokens)
        new, seen = (tokens, 0) if cache is None else cache.expect(tokens)
        check_tokens(new, self.config, seen + max_new_tokens - 1)  # the last new token is not read
        bos = self.config.bos_token_id
        for row in tokens.tolist() if seen == 0 else ():
            padding = row[:row.index(bos)] if bos in row else []
            if len(set(padding)) == 1:
                raise UserError(f"{len(padding)} times token {padding[0]} before BOS would be read as text; give texts "
                                "of equal length, without padding")
        if temperature is None or not (temperature >= 0 and 0 < top_p <= 1):  # refuses NaN as well
            raise UserError(f"temperature is from 0 on, and top_p above 0 and up to 1; got {temperature} and {top_p}")
        ends = torch.tensor([] if eos is None else eos, device=tokens.device).flatten()  # a config may have several
        rng = None if seed is None else torch.Generator(tokens.device).manual_seed(seed)
        done = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)  # (B)
        unread = tokens  # (B, T): what the cache has not seen yet
        try:
            for _ in range(max_new_tokens):
                logits = self(tokens if cache is None else unread, cache)[:, -1].float()  # (B, vocab)
                all_finite("logits", logits)
                new = pick_token(logits, temperature, top_p, rng)  # (B, 1)
                if len(ends):
                    new = torch.where(done[:, None], ends[0], new)  # (B, 1)
                    done |= torch.isin(new[:, 0], ends)
                tokens = torch.cat([tokens, new], dim=1)  # (B, T + 1)
                unread = new
                if done.all():
                    break
        except BaseException:  # such as Ctrl-C: the caller lacks tokens that the cache holds
            if cache is not None:
                cache.busy = True
            raise
        if cache is not None and max_new_tokens:
            cache.unread = unread  # (B, 1)
        return tokens


def check_tokens(tokens, config, seen=0):
    """UserError unless tokens are ids (B, T) of this vocabulary, and the model has positions for them after those
    seen; and under torch.autocast. A single token may be the model's own, and on a GPU to look at it would take a
    step's time."""
    shape, dtype = tuple(getattr(tokens, "shape", ())), str(getattr(tokens, "dtype", ""))
    if len(shape) != 2 or 0 in shape or dtype not in ("torch.int64", "torch.int32"):
        raise UserError(f"tokens have to be a tensor of ids (B, T), int64; got {type(tokens).__name__} {shape} {dtype}")
    if torch.is_autocast_enabled(tokens.device.type):
        raise UserError("torch.autocast rounds what codecs compute; leave it out, and load the model in 16 bits, with "
                        "hf.load(folder, dtype=torch.bfloat16)")
    if seen + shape[1] > config.positions:
        raise UserError(f"{seen + shape[1]} tokens are more than the {config.positions} positions that this model was "
                        "made for; ask for fewer, `reset` the cache, or set max_position_embeddings in the config")
    if shape[1] > 1 and not 0 <= tokens.min() <= tokens.max() < config.vocab_size:
        raise UserError(f"token ids go from 0 to {config.vocab_size - 1}; these go from {tokens.min()} to "
                        f"{tokens.max()}; take the model's own tokenizer")


def pick_token(logits, temperature, top_p, rng):
    """logits (B, vocab) -> the next token (B, 1): the most likely one at temperature 0, else one drawn from the
    smallest set of tokens with probability mass top_p."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    p = torch.softmax(logits / temperature, dim=-1)  # (B, vocab)
    p, order = p.sort(-1, descending=True)  # (B, vocab) both
    mass_before = p.cumsum(-1) - p  # (B, vocab)
    p = p.masked_fill(mass_before >= top_p, 0)  # keeps the token that crosses top_p
    drawn = torch.multinomial(p, 1, generator=rng)  # (B, 1)
    return order.gather(1, drawn)


class Trace:
    """The simplest cache: it quantizes nothing, and records what passes through it in one forward.

    q (B, H, T, d), k and v (B, Hkv, T, d), all before RoPE, and hidden (B, T, D), the layers' outputs, are lists with
    an entry per layer. keys, values (L, Hkv, n, d): a prefix of n tokens before the window, in each of the L layers;
    keys before RoPE. Both may require gradients.
    """

    def __init__(self, model, keys=None, values=None):
        self.rope, self.keys, self.values = model.rope, keys, values
        self.q, self.k, self.v, self.hidden = [], [], [], []

    def expect(self, tokens):
        return tokens, 0 if self.keys is None else self.keys.shape[2]

    def update(self, layer, q, k, v, seen):
        """K (rotated) and V of the prefix and the window, (B, Hkv, n + T, d)."""
        self.q.append(q)
        self.k.append(k)
        self.v.append(v)
        if self.keys is not None:
            prefix_k = self.keys[layer].to(k.dtype).expand(len(k), -1, -1, -1)  # (B, Hkv, n, d)
            prefix_v = self.values[layer].to(v.dtype).expand(len(v), -1, -1, -1)  # (B, Hkv, n, d)
            k = torch.cat([prefix_k, k], dim=2)  # (B, Hkv, n + T, d)
            v = torch.cat([prefix_v, v], dim=2)  # (B, Hkv, n + T, d)
        return self.rope.rotate(k), v

    def observe(self, layer, hidden):
        self.hidden.append(hidden)


# Which model is it? A name or a path does not show that it was edited, and a hash of its weights does not show a hook.
# So a model is known by what it computes from a fixed text

PROBED = 16  # tokens of that text
PROBED_AT = 1000  # the position of the first one, as far as keys show it: there RoPE's slow pairs have turned, too


def probe(vocab_size):
    """The text by which models are known: tokens (1, T), spread over the vocabulary."""
    return torch.arange(PROBED)[None] * vocab_size // PROBED


def known_by(keys, values, logits, embedding):
    """Each layer's keys (rotated) and values (1, Hkv, T, d), the last token's logits (vocab), and a sum over the
    embedding (D), in a list. In the sum each row of embedding (vocab, D) counts by a factor of its own, since a text
    has few of them. logits (1, T, vocab)."""
    factors = torch.arange(1, 1 + len(embedding), device=embedding.device).float().sin()  # (vocab)
    of_rows = factors.to(embedding.dtype) @ embedding  # (D)
    return [x.cpu() for x in (*keys, *values, logits[0, -1], of_rows)]


def same_model(one, other):
    """Whether two `known_by` are of the same model, whatever its dtype or device. Rounding changes a layer's keys, or
    values, by less than 1e-5 in fp32, and by a few per cent in 16 bits."""
    if [x.shape for x in one] != [x.shape for x in other]:
        return False
    tolerance = 1e-3 if min(one[0].itemsize, other[0].itemsize) > 2 else 1 / 8
    pairs = [(x.double(), y.double()) for x, y in zip(one, other)]
    return all((x - y).norm() <= tolerance * y.norm() for x, y in pairs)  # nor is NaN
