"""A cache that quantizes nothing and records: for training, for analysis, for tests."""
import torch


class Trace:
    """A cache that quantizes nothing and records what passes through it in one forward.

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
