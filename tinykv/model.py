"""LLaMA from scratch: config, RMSNorm, RoPE, attention, MLP, forward, generate.

Modules carry Hugging Face's parameter names (`model.layers.0.self_attn.q_proj.weight`), so a checkpoint loads with no
name map. Shapes: B sequences, T new tokens, S tokens seen in all, H query heads, Hkv KV heads, d head size, D hidden
size. Covers LLaMA 1 to 3.2, Vicuna, TinyLlama and Mistral; anything else is refused by `checkpoint.py`.

The KV cache is an argument. Attention hands it q and k, v before RoPE, and sees only what comes back.
"""
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class LlamaConfig:
    """The fields of config.json that shape the model, under their Hugging Face names."""
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
    """Rotary position embedding, half-split as in Hugging Face: channel i turns with channel i + d/2.

    Angle of pair i at position p: p * theta**(-2i/d), with the frequencies rescaled for `linear` and `llama3`.
    """

    def __init__(self, config):
        d = config.head_dim
        pair = torch.arange(0, d, 2, dtype=torch.float32, device="cpu")  # (d/2), real even under "meta"
        freq = config.rope_theta ** (-pair / d)  # (d/2)
        scaling = config.rope_scaling or {"rope_type": "default"}
        if scaling["rope_type"] == "linear":
            freq = freq / scaling["factor"]
        elif scaling["rope_type"] == "llama3":
            # Waves longer than the old context are slowed by `factor`, short ones left alone, a ramp in between.
            turns = scaling["original_max_position_embeddings"] * freq / (2 * math.pi)  # (d/2) turns in the old context
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            keep = ((turns - low) / (high - low)).clamp(0, 1)  # (d/2)
            freq = (1 - keep) * freq / scaling["factor"] + keep * freq
        self.freq = freq

    def rotate(self, x, positions):
        """x (..., T, d) at positions (T) -> the same shape and dtype, rotated; computed in fp32."""
        angle = positions[:, None].float() * self.freq.to(positions.device)  # (T, d/2)
        cos, sin = angle.cos(), angle.sin()  # (T, d/2)
        x1, x2 = x.float().chunk(2, dim=-1)  # (..., T, d/2) each
        return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1).to(x.dtype)  # (..., T, d)


class Attention(nn.Module):
    def __init__(self, config, linear):
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = (
            config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        D, H, Hkv, d, bias = config.hidden_size, self.n_heads, self.n_kv_heads, self.head_dim, config.attention_bias
        self.q_proj = linear(D, H * d, bias=bias)
        self.k_proj = linear(D, Hkv * d, bias=bias)
        self.v_proj = linear(D, Hkv * d, bias=bias)
        self.o_proj = linear(H * d, D, bias=bias)
        self.fused = True  # False: the same attention in visible lines, for reading and stepping

    def qkv(self, x):
        """x (B, T, D) -> q (B, H, T, d), k and v (B, Hkv, T, d), all before RoPE."""
        B, T, _ = x.shape
        q = self.q_proj(x).view(B, T, self.n_heads, self.head_dim).transpose(1, 2)  # (B, H, T, d)
        k = self.k_proj(x).view(B, T, self.n_kv_heads, self.head_dim).transpose(1, 2)  # (B, Hkv, T, d)
        v = self.v_proj(x).view(B, T, self.n_kv_heads, self.head_dim).transpose(1, 2)  # (B, Hkv, T, d)
        return q, k, v

    def forward(self, x, rope, positions, mask, layer, cache=None):
        return self.o_proj(self.heads(x, rope, positions, mask, layer, cache))  # (B, T, D)

    def heads(self, x, rope, positions, mask, layer, cache=None):
        """The heads' outputs side by side, (B, T, H * d): what `o_proj` reads."""
        B, T, _ = x.shape
        q, k, v = self.qkv(x)  # (B, H, T, d), (B, Hkv, T, d) twice
        if hasattr(cache, "attend"):  # a cache that attends by itself, from its packed rows: `kernels.TritonCache`
            out = cache.attend(layer, q, k, v, positions)  # (B, H, T, d)
            return out.transpose(1, 2).reshape(B, T, -1)  # (B, T, H * d)
        if cache is None:
            k = rope.rotate(k, positions)  # (B, Hkv, T, d)
        else:
            k, v = cache.update(layer, q, k, v, positions)  # (B, Hkv, S, d): all tokens so far, k rotated
        q = rope.rotate(q, positions)  # (B, H, T, d)

        group = self.n_heads // self.n_kv_heads  # query heads that share one KV head
        k = k.repeat_interleave(group, dim=1)  # (B, H, S, d)
        v = v.repeat_interleave(group, dim=1)  # (B, H, S, d)
        if self.fused:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)  # (B, H, T, d)
        else:
            scores = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)  # (B, H, T, S)
            if mask is None:
                mask = torch.ones(T, T, dtype=torch.bool, device=x.device).tril()  # (T, S = T)
            scores = scores.masked_fill(~mask, float("-inf"))  # (B, H, T, S)
            p = torch.softmax(scores.float(), dim=-1).to(v.dtype)  # (B, H, T, S)
            out = p @ v  # (B, H, T, d)
        return out.transpose(1, 2).reshape(B, T, -1)  # (B, T, H * d)


class MLP(nn.Module):
    def __init__(self, config, linear):
        super().__init__()
        D, M = config.hidden_size, config.intermediate_size
        self.gate_proj = linear(D, M, bias=config.mlp_bias)
        self.up_proj = linear(D, M, bias=config.mlp_bias)
        self.down_proj = linear(M, D, bias=config.mlp_bias)

    def forward(self, x):
        return self.down_proj(self.gated(x))  # (B, T, D)

    def gated(self, x):
        """(B, T, M): what `down_proj` reads."""
        return F.silu(self.gate_proj(x)) * self.up_proj(x)


class Block(nn.Module):
    def __init__(self, config, linear=nn.Linear):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, linear)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config, linear)

    def forward(self, h, rope, positions, mask, layer, cache=None):
        h = h + self.self_attn(self.input_layernorm(h), rope, positions, mask, layer, cache)  # (B, T, D)
        return h + self.mlp(self.post_attention_layernorm(h))  # (B, T, D)


class Llama(nn.Module):
    """linear: the class of the blocks' linear layers, called as nn.Linear is (`weights/` has one that is quantized)."""

    def __init__(self, config, linear=nn.Linear):
        super().__init__()
        self.config = config
        self.rope = Rope(config)
        self.model = nn.ModuleDict({
            "embed_tokens": nn.Embedding(config.vocab_size, config.hidden_size),
            "layers": nn.ModuleList(Block(config, linear) for _ in range(config.num_hidden_layers)),
            "norm": RMSNorm(config.hidden_size, config.rms_norm_eps),
        })
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model["embed_tokens"].weight

    def forward(self, tokens, cache=None):
        """tokens (B, T) -> logits (B, T, vocab). With a cache, the tokens follow those that it holds."""
        return self.lm_head(self.hidden(tokens, cache))

    def hidden(self, tokens, cache=None):
        """tokens (B, T) -> the final hidden state (B, T, D), normed: what `lm_head` reads."""
        seen = 0 if cache is None else len(cache)
        T = tokens.shape[1]
        positions = torch.arange(seen, seen + T, device=tokens.device)  # (T)
        mask = self.mask(seen, T, tokens.device)  # (T, S), or None for a plain causal square
        h = self.model["embed_tokens"](tokens)  # (B, T, D)
        for layer, block in enumerate(self.model["layers"]):
            h = block(h, self.rope, positions, mask, layer, cache)  # (B, T, D)
            if cache is not None:
                cache.observe(layer, h)
        return self.model["norm"](h)  # (B, T, D)

    def mask(self, seen, T, device):
        """True where query i of T, which stands behind `seen` tokens, may see key j. (T, S); None: a causal square."""
        window, end = self.config.sliding_window, seen + T
        if seen == 0 and (window is None or window >= end):
            return None
        k = torch.arange(end, device=device)[None]  # (1, S)
        q = k.T[seen:]  # (T, 1): positions
        seen = k <= q  # (T, S)
        return seen if window is None else seen & (k > q - window)

    @torch.no_grad()
    def generate(self, tokens, max_new_tokens, cache=None, temperature=0.0, top_p=1.0, seed=None, eos=None):
        """Continue tokens (B, T) by up to max_new_tokens: greedy at temperature 0, else sampled from the top-p nucleus.

        Returns (B, T + new). Stops early once every row has produced `eos`; a row that is done repeats it.
        Without a cache the whole text is read again for every token.
        """
        if not 0 <= temperature < math.inf or not 0 < top_p <= 1:  # true for NaN, too
            raise ValueError(f"temperature must be 0 or more and top_p in (0, 1]; got {temperature} and {top_p}")
        dice = None if seed is None else torch.Generator(tokens.device).manual_seed(seed)
        done = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)  # (B)
        new = tokens  # what the cache has not seen yet
        for _ in range(max_new_tokens):
            logits = self(new if cache is not None else tokens, cache)[:, -1].float()  # (B, vocab)
            new = pick_token(logits, temperature, top_p, dice)  # (B, 1)
            if eos is not None:
                new = torch.where(done[:, None], eos, new)  # (B, 1)
                done |= new[:, 0] == eos
            tokens = torch.cat([tokens, new], dim=1)  # (B, T + 1)
            if eos is not None and done.all():
                break
        return tokens


def pick_token(logits, temperature, top_p, dice):
    """logits (B, vocab) -> the next token (B, 1): the best one, or one drawn from the smallest set of mass top_p."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    p, order = torch.softmax(logits / temperature, dim=-1).sort(-1, descending=True)  # (B, vocab) both
    p = p.masked_fill(p.cumsum(-1) - p >= top_p, 0)  # keeps the token that crosses top_p
    return order.gather(1, torch.multinomial(p, 1, generator=dice))  # (B, 1)
