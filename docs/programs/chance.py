"""Controls: they keep as many tokens as `kvsink --threshold` or AnTKV, but other ones."""
import torch

from tinykv.methods.antkv import AnTKV
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


class First(AnTKV):
    """AnTKV's codebooks; the first tokens in the place of its anchors."""

    def score(self, layer_cache, q, K):
        numbers = -torch.arange(self.config.max_position_embeddings, dtype=torch.float32)
        return self.once(numbers.expand(K.shape[1], -1), q, K)

    def once(self, numbers, q, K):
        """The scores of a chunk: a token gets its number, (Hkv, positions), when it arrives, and never more."""
        S, T = K.shape[2], q.shape[2]
        scores = torch.zeros(K.shape[:3], dtype=torch.float32, device=K.device)  # (B, Hkv, S)
        scores[:, :, S - T:] = numbers[:, S - T:S].to(K.device)
        return scores, scores


class Random(First):
    """AnTKV's codebooks; random tokens in the place of its anchors, different ones in each head."""

    def score(self, layer_cache, q, K):
        shape, chance = (K.shape[1], self.config.max_position_embeddings), torch.Generator().manual_seed(0)
        return self.once(torch.rand(shape, dtype=torch.float32, generator=chance), q, K)
