"""IntactKV (Liu et al., 2024): the first tokens' keys and values from the full-precision model.
The same on a page that runs alone: docs/ladder/9_prefix.py.

    Keep: a prefix, [BOS] or a text that all texts begin with.
    Code: 16 bits, or integers per token and head.
    When: at once under `paper`, in blocks of tokens in a stream.

All tokens attend to the first ones. A model with quantized weights computes wrong keys and values for them, before any
cache rounds anything. So the full-precision model computes them once, every cache begins with them, and the text goes
on from there. Theorem 1 bounds the change of a head's output by the errors of keys and values; a token whose key and
value are exact drops out of it:
    |dh|_2 <= C1 |dK|_2,inf |dV|_F + C2 |dK|_2,inf + C3 |dV|_F
The prefix can also be trained (train_intact.py). Its keys and values are then parameters. The loss is how far the
blocks f of the quantized model w' are from those of the full-precision model w (Eq. 2):
    L = 1/2 sum over blocks l of |f_l(w, x) - f_l(w', x; prefix)|^2

Paper and practice, as in the released code, unless a point says otherwise.
- Prefix_[B] is BOS alone, Prefix_[P] a system prompt. Both begin at the first token.
- Keys and values of other tokens stay in 16 bits, or are quantized per token with an integer zero point, keys after
  RoPE.
- Where the weight quantizer scaled the values (`QuantLinear.gain`), the prefix is scaled alike.
- Here keys are held before RoPE, and trained there in fp32; the released code has them after it, in fp16.
- The loss is a mean, not Eq. 2's sum, over all tokens after the prefix. The paper trains on chats, of which only the
  answers count.
- In the paper, Theorem 1's C1 has n^(3/2), but the last line of its proof n^(2/3), a slip.
- Predictions at the prefix's own positions are those of the full-precision model.
"""
from dataclasses import dataclass
from typing import Annotated

import torch

from tinykv import UserError, all_finite, one_of
from tinykv.codecs.base import sixteen_bits
from tinykv.methods.base import CodecMethod, first_tokens
from tinykv.model import Trace


class IntactKV(CodecMethod):
    """A named pair of codecs, and a prefix in full precision. Settings: see `CodecMethod`."""

    def __init__(self, config,
                 prefix: Annotated[str, "what texts begin with: bos, or a text's or a trained prefix's file"] = None,
                 k_bits=16, v_bits=16, scheme="token-dynamic", group_size=None, formula="integer-zero"):
        one_of(("token-dynamic", "channel-dynamic"), scheme=scheme)
        if isinstance(prefix, str) and prefix != "bos":
            raise UserError(f"prefix is 'bos', or what lab.prefixes.open_prefix({prefix!r}, tokenizer) gives")
        prefix = None if prefix == "bos" else prefix
        if prefix is None and config.bos_token_id is None:
            raise UserError("this model has no BOS token, which is IntactKV's prefix by default; give another prefix")
        super().__init__(config, k_bits, v_bits, scheme, group_size=group_size, formula=formula)
        self.prefix = prefix or Prefix("bos", [config.bos_token_id])
        self.preserve = len(self.prefix.ids)

    # The prefix, (B, 1, preserve), unless every key, or value, is in full precision anyway

    def keep_keys(self, layer_cache, n):
        return first_tokens(layer_cache, self.preserve if self.bits_of("k") < 16 else 0)

    def keep_values(self, layer_cache, n):
        return first_tokens(layer_cache, self.preserve if self.bits_of("v") < 16 else 0)


# The prefix

@dataclass
class Prefix:
    """Tokens that every text begins with, and their keys, before RoPE, and values."""
    name: str  # what the user calls it: "bos", or a path
    ids: list  # n tokens
    keys: torch.Tensor | None = None  # (L, Hkv, n, d); None until `fill`
    values: torch.Tensor | None = None  # (L, Hkv, n, d)
    trained_for: dict | None = None  # trained prefixes only: the model, and its quantized weights
    filled_for: tuple | None = None  # untrained ones only: the ids, and the model's `identity` at `fill`

    def fill(self, full, quantized):
        """Compute keys and values for `quantized`: `full` with quantized weights, or `full` itself."""
        self.keys, self.values = exact_rows(full, quantized, self.ids)
        self.filled_for = list(self.ids), quantized.identity()

    def rows(self, like):
        """Keys by layer, and values by layer, (1, Hkv, n, d) each; device and dtype of `like`."""
        if self.keys is None:
            raise UserError(f"the prefix {self.name} has no keys and values yet; call its `fill` first")
        return self.keys.to(like)[:, None], self.values.to(like)[:, None]

    def __str__(self):
        return self.name


@torch.no_grad()
def exact_rows(full, quantized, ids):
    """Keys, before RoPE, and values of tokens `ids` as `full` computes them: (L, Hkv, n, d) both.

    They have been rounded to the 16 bits of a cache, and are fp32 again. Values have the scale of `quantized`'s.
    """
    # 1. Let the full-precision model read the tokens
    trace = SixteenBits(full)
    tokens = torch.tensor([ids], dtype=torch.long, device=full.lm_head.weight.device)  # (1, n)
    full(tokens, trace, logits=False)

    # 2. Take its keys and values
    keys = torch.cat(trace.k).float()  # (L, Hkv, n, d)
    values = torch.cat(trace.v).float()  # (L, Hkv, n, d)
    all_finite("keys or values of the prefix", torch.stack([keys, values]))

    # 3. Bring the values to the scale of the quantized model's
    for layer, block in enumerate(quantized.model["layers"]):
        gain = getattr(block.self_attn.v_proj, "gain", None)  # (Hkv * d), see `QuantLinear.gain`
        if gain is not None:
            values[layer] = values[layer] * gain.view(values.shape[1], 1, -1)  # (Hkv, n, d)
    return keys, values


class SixteenBits(Trace):
    """A forward that reads keys and values in 16 bits, as with the fp16 method, and records them, keys before RoPE."""

    def update(self, layer, q, k, v, seen):
        k, v = super().update(layer, q, sixteen_bits(k), sixteen_bits(v), seen)
        return k.to(q.dtype), v.to(q.dtype)
