"""IntactKV's prefix in a file, its training, and the theorem that it stands on."""
import json
import math
from pathlib import Path

import torch

from tinykv import UserError, files
from tinykv.anchors import attention_tiles
from tinykv.methods.intactkv import Prefix, exact_rows, value_gain

# A file for it

def open_prefix(what, tokenizer, config):
    """"bos", the path of a text file, or of a trained prefix (.safetensors) -> Prefix."""
    if what == "bos":
        if tokenizer.bos_id is None:
            raise UserError("this tokenizer has no BOS; give a text file for a prefix")
        return Prefix(what, [tokenizer.bos_id])
    if what.endswith(".safetensors"):
        return load_prefix(what, config)
    try:
        text = Path(what).read_text(encoding="utf-8").rstrip("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the prefix {what} cannot be read ({getattr(error, 'strerror', error)}); give bos, a UTF-8 "
                        "text file, or a trained prefix (.safetensors)") from None
    if not text:
        raise UserError(f"the prefix {what} is empty; give bos, or a text file that is not")
    return Prefix(what, [*([] if tokenizer.bos_id is None else [tokenizer.bos_id]), *tokenizer.encode(text)])


def save_prefix(path, prefix):
    """Write a trained prefix, whole or not at all."""
    notes = {"format": "tinykv-prefix", "model": prefix.model, "weights": prefix.weights, "ids": json.dumps(prefix.ids)}
    files.save_tensors(path, {"keys": prefix.keys, "values": prefix.values}, notes)


def load_prefix(path, config):
    """What `save_prefix` wrote; UserError if it is no such file, or does not fit the model's config."""
    tensors, notes = files.load_tensors(path, "trained prefix")
    if notes.get("format") != "tinykv-prefix":
        raise UserError(f"{path} is a safetensors file, but not one that train_intact.py wrote")
    try:
        prefix = Prefix(str(path), json.loads(notes["ids"]), tensors["keys"], tensors["values"], notes["model"],
                        notes["weights"])
    except (KeyError, ValueError):
        raise UserError(f"{path} is not whole, or of another version; train it anew") from None
    wanted = (config.num_hidden_layers, config.num_key_value_heads, len(prefix.ids), config.head_dim)
    for rows in (prefix.keys, prefix.values):
        if tuple(rows.shape) != wanted:
            raise UserError(f"the prefix {path} was trained for another model: it has rows of shape "
                            f"{tuple(rows.shape)}, and not {wanted}")
    return prefix


# Training

class Training:
    """A cache for one forward: the prefix's rows, which gradients may reach, then the text's own; nothing is rounded.

    It holds the output of every block, `hidden`.
    """

    def __init__(self, model, keys, values):
        self.rope, self.keys, self.values, self.hidden = model.rope, keys, values, []  # keys (L, Hkv, n, d)

    def __len__(self):
        return self.keys.shape[2]

    def update(self, layer, q, k, v, positions):
        k, v = (torch.cat([rows[layer].to(x.dtype).expand(len(x), -1, -1, -1), x], dim=2)  # (B, Hkv, n + T, d)
                for rows, x in ((self.keys, k), (self.values, v)))
        return self.rope.rotate(k, torch.arange(k.shape[2], device=k.device)), v

    def observe(self, layer, hidden):
        self.hidden.append(hidden)


def outputs(model, tokens, keys, values):
    """The blocks' outputs, L of (B, T, D), for tokens (B, T) that follow a prefix with these rows."""
    cache = Training(model, keys, values)
    model.hidden(tokens, cache)
    return cache.hidden


def block_loss(full, coded, tokens, exact, trained):
    """Eq. 2, as a mean over tokens and channels: 1/2 sum over blocks of |f(w, x) - f(w', x; prefix)|^2.

    tokens (B, T): the text behind the prefix. exact, trained: (keys, values) of the prefix, for full and for coded.
    """
    with torch.no_grad():
        wanted = outputs(full, tokens, *exact)  # L of (B, T, D)
    return sum((h.float() - f.float()).pow(2).mean() for h, f in zip(outputs(coded, tokens, *trained), wanted)) / 2


# What a prefix of each length does: Figure 2, and Theorem 1

class Watched(Training):
    """Holds what each layer's attention adds, too: `attention`, per layer (B, T, D); and its q, K and V, `heads`."""

    def __init__(self, model, keys, values):
        super().__init__(model, keys, values)
        self.model, self.attention, self.heads = model, [], []

    def update(self, layer, q, k, v, positions):
        K, V = super().update(layer, q, k, v, positions)  # (B, Hkv, S, d) both
        q = self.rope.rotate(q, positions)  # (B, H, T, d)
        tiles = [(A.unflatten(1, (K.shape[1], -1)) @ V[:, :, None, :A.shape[-1]].float()).flatten(1, 2)  # (B, H, t, d)
                 for _, A in attention_tiles(q, K, window=self.model.config.sliding_window)]
        out = torch.cat(tiles, dim=2).transpose(1, 2).flatten(2)  # (B, T, H * d)
        self.attention.append(self.model.model["layers"][layer].self_attn.o_proj(out.to(q.dtype)))
        self.heads.append((q, K, V))
        return K, V


@torch.no_grad()
def errors_by_length(full, coded, window, lengths, behind):
    """What is left of the error if the first n tokens' keys and values are exact, for each n of `lengths`.

    window (T); errors are means over the tokens from position `behind` on, which is at least the largest n. A row of
    each n: `last`, the squared error of the last block's output; `attention`, that of what attention adds, summed over
    layers (Figure 2); `change` and `bound` of a head's output by `theorem_1`, means over the heads of the middle layer,
    for the window's last query.
    """
    def watched(model, n):
        cache = Watched(model, *exact_rows(full, model, window[:n].tolist()))
        model.hidden(window[None, n:], cache)
        return cache

    exact, rows = watched(full, 0), []
    for n in lengths:
        seen = watched(coded, n)
        last, *attention = [(a[:, behind - n:].float() - b[:, behind:].float()).pow(2).mean().item() for a, b in
                            zip((seen.hidden[-1], *seen.attention), (exact.hidden[-1], *exact.attention))]
        change, bound = head_changes(full, exact, seen, full.config.num_hidden_layers // 2)
        rows.append({"n": n, "last": last, "attention": sum(attention), "change": change, "bound": bound})
    return rows


def head_changes(model, exact, seen, layer):
    """Theorem 1 for the last query: |dh|_2 and the bound, means over heads, if K and V are those that `seen` has."""
    attn = model.model["layers"][layer].self_attn
    group = attn.n_heads // attn.n_kv_heads
    q = exact.heads[layer][0][0, :, -1].float()  # (H, d)
    gain = value_gain(seen.model.model["layers"][layer])  # (Hkv, 1, d)
    K, V, coded_K, coded_V = (x.float().repeat_interleave(group, dim=0) for x in (  # (H, S, d) each
        exact.heads[layer][1][0], exact.heads[layer][2][0], seen.heads[layer][1][0], seen.heads[layer][2][0] / gain))
    W_o = attn.o_proj.weight.float().unflatten(1, (attn.n_heads, -1)).transpose(0, 1)  # (H, D, d)
    change, bound = theorem_1(q, K, V, coded_K - K, coded_V - V, W_o)
    return change.mean().item(), bound.mean().item()


def theorem_1(q, K, V, dK, dV, W_o):
    """How much a head's output changes, and the bound: |dh|_2, bound.

    q (.., d), K, V, dK, dV (.., n, d), of one head and one query each; W_o (.., D, d), the head's columns of o_proj.
    The proof uses the condition number of softmax, which holds for small changes.
    """
    d, n = q.shape[-1], K.shape[-2]

    def head(K, V):
        scores = (K @ q[..., None])[..., 0] / math.sqrt(d)  # (.., n)
        return (scores.softmax(-1)[..., None, :] @ V @ W_o.transpose(-2, -1))[..., 0, :]  # (.., D)

    c3 = torch.linalg.matrix_norm(W_o, 2)  # (..)
    c1 = n ** 1.5 / math.sqrt(d) * c3 * q.norm(dim=-1)  # (..)
    c2 = c1 * torch.linalg.matrix_norm(V, 2)  # (..)
    most, all_of_v = dK.norm(dim=-1).amax(-1), dV.norm(dim=(-2, -1))  # (..) both: |dK|_2,inf and |dV|_F
    return (head(K + dK, V + dV) - head(K, V)).norm(dim=-1), c1 * most * all_of_v + c2 * most + c3 * all_of_v
