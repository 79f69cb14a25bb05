"""IntactKV (Liu et al., 2024): the first tokens' keys and values as the full-precision model computes them.

    Keep: a prefix, [BOS] or a text that all texts begin with, taken over from the model before its weights were
    quantized.   Code: 16 bits, or integers per token and head.   When: at once, in blocks in a stream.

For a model with quantized weights, the first tokens, which all others look at, would be computed wrong before any cache
rounds them. Their rows are computed once, in full precision, and every cache begins with them; positions go on from
there. They can also be trained (`intact.py`, `train_intact.py`), to make good what the quantized model does to later
tokens. Theorem 1 bounds the change of a head's output; a row that is exact leaves the bound:
    |dh|_2 <= C1 |dK|_2,inf |dV|_F + C2 |dK|_2,inf + C3 |dV|_F

Paper and practice, as in the released code.
- Prefix_[B] is BOS alone, Prefix_[P] a system prompt. It begins at the first token, and has no gaps.
- Keys and values of the rest are left alone, or coded dynamically, with an integer zero point, keys after RoPE.
- Where the quantizer scaled what is cached (`QuantLinear.gain`), the prefix is scaled alike.
- What the full-precision model says of the prefix is kept with it: predictions there are its own.
"""
from dataclasses import dataclass

import torch

from tinykv import UserError, checkpoint, one_of
from tinykv.calibrate import Recorder
from tinykv.methods.base import Method, SchemeMethod, first_tokens

EXACT = "full precision"  # what a model is called whose weights are not quantized


@dataclass
class Prefix:
    """Tokens that every text begins with, and their keys, before RoPE, and values."""
    name: str  # what the user calls it: "bos", or a path
    ids: list  # n tokens
    keys: torch.Tensor | None = None  # (L, Hkv, n, d); None until `fill`
    values: torch.Tensor | None = None
    model: str = ""  # for which model it was trained: its fingerprint,
    weights: str = ""  # and how its weights were quantized, in words

    def __str__(self):
        return self.name

    def fill(self, full, coded, weights=EXACT):
        """Compute the rows for `coded`, which is the model `full` with its weights quantized (or full itself).

        Rows that a file brought along are checked instead: they must have been trained for this model, and `weights`.
        """
        if self.model:
            for what, found, wanted in (("model", self.model, checkpoint.fingerprint(full)),
                                        ("quantizer", self.weights, weights)):
                if found != wanted:
                    raise UserError(f"the prefix {self.name} was trained for another {what}: {found}, and not {wanted}")
        else:
            self.keys, self.values = exact_rows(full, coded, self.ids)

    def rows(self, like):
        """Per layer keys (1, Hkv, n, d), and values, where and in the dtype that tensor `like` is."""
        if self.keys is None:
            raise UserError(f"the prefix {self.name} has no keys and values yet; call its `fill` first")
        return [[row[None] for row in rows.to(like)] for rows in (self.keys, self.values)]


class Unrotated(Method):
    """Keys are stored before RoPE; nothing is coded."""
    rope = "pre"


@torch.no_grad()
def exact_rows(full, coded, ids):
    """Keys, before RoPE, and values of tokens `ids` as `full` computes them, scaled as `coded` has them.

    (L, Hkv, n, d) both, fp32 that hold the 16 bits of an exact cache. UserError where the ids are none of the model's.
    """
    if not all(0 <= token < full.config.vocab_size for token in ids):
        raise UserError(f"the prefix has tokens that this model, of {full.config.vocab_size} tokens, does not know")
    if not ids:
        shape = full.config.num_hidden_layers, full.config.num_key_value_heads, 0, full.config.head_dim
        return torch.zeros(2, *shape, device=full.lm_head.weight.device).unbind()
    recorder = Recorder(full, Unrotated(full.config))
    full.hidden(torch.tensor([ids], device=full.lm_head.weight.device), recorder)
    keys = torch.cat([layer.k.recent for layer in recorder.layers]).float()  # (L, Hkv, n, d)
    values = torch.cat([layer.v.recent for layer in recorder.layers]).float()
    return keys, values * torch.stack([value_gain(block) for block in coded.model["layers"]])


def value_gain(block):
    """What the block's values are multiplied by, (Hkv, 1, d): see `QuantLinear.gain`. Keys are left as they are."""
    attn = block.self_attn
    gain = getattr(attn.v_proj, "gain", None)  # (Hkv * d)
    if gain is None:
        gain = torch.ones(attn.n_kv_heads * attn.head_dim, device=attn.v_proj.weight.device)
    return gain.view(attn.n_kv_heads, 1, attn.head_dim)


class IntactKV(SchemeMethod):
    def __init__(self, config, prefix=None, k_bits=16, v_bits=16, scheme="token-dynamic", group_size=None,
                 formula="integer-zero"):
        one_of(("token-dynamic", "channel-dynamic"), scheme=scheme)
        super().__init__(config, k_bits, v_bits, scheme, group_size, formula=formula)
        if prefix is None and config.bos_token_id is None:
            raise UserError("this model has no BOS token, which is IntactKV's prefix by default; give another prefix")
        self.prefix = prefix or Prefix("bos", [config.bos_token_id])
        self.preserve = len(self.prefix.ids)

    def keep(self, cache, kind, n, state):
        bits = self.k_bits if kind == "k" else self.v_bits
        return None if bits == 16 else first_tokens(cache, self.preserve)
