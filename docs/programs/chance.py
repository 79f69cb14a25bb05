"""A control of `kvsink --threshold`: as many tokens are kept, but chance says which."""
import torch

from tinykv.methods.kvsink import KVSink


class Chance(KVSink):
    """The five tokens with the largest outliers, and others by chance, until there are as many as reach the threshold.
    For a text that comes at once."""

    def keep_keys(self, layer_cache, n):
        marked = super().keep_keys(layer_cache, n)  # (B, 1, k), the largest first
        if marked is None:
            return None
        five = marked[..., :5]  # (B, 1, 5)
        chance = torch.Generator().manual_seed(0)
        order = torch.randperm(layer_cache.length, generator=chance)  # (T)
        drawn = order[:max(0, marked.shape[-1] - 5)].expand(len(marked), 1, -1)  # (B, 1, k - 5)
        return torch.cat([five, drawn], dim=-1)  # (B, 1, k): chance may draw one of the five, too
