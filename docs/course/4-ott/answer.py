"""Assignment 4: an answer."""
import torch

from tinykv.codecs import Pair
from tinykv.codecs.affine import Affine
from tinykv.methods.base import CodecMethod, Method

ASSIGNMENT = "ott"


def kivi_codecs(k_bits, v_bits, width, group_size):
    keys = Affine(k_bits, width, "channel", group_size)
    values = Affine(v_bits, width, "token", min(group_size, width))
    return Pair(k=keys, v=values)


def due(length, n_coded, recent, block):
    n = 0
    while n_coded + n + block <= length - recent:
        n += block
    return n


def kivi_bits(T, d, bits, group_size, recent):
    coded = due(T, 0, recent, group_size)
    groups = coded * d // group_size
    of_keys = coded * d * bits + groups * 2 * 16 + (T - coded) * d * 16
    return 2 * of_keys / (2 * T * d)


class KIVI(Method):
    def __init__(self, config, k_bits=2, v_bits=2, group_size=32, recent=128):
        pair = kivi_codecs(k_bits, v_bits, config.head_dim, group_size)
        self.codecs = [Pair(*pair)] * config.num_hidden_layers
        self.k_bits, self.v_bits, self.scheme = k_bits, v_bits, "kivi"
        self.recent, self.block = recent, group_size


class OTT(CodecMethod):
    def __init__(self, config, k_bits=2, v_bits=2, group_size=128, recent=32, outlier_num=3,
                 extra_pool=32, skip_layers=2):
        super().__init__(config, k_bits, v_bits, "channel-dynamic", group_size=group_size)
        self.recent = recent
        self.preserve = outlier_num
        self.extra_pool = extra_pool
        self.skip_layers = skip_layers

    def size(self, keys):
        return keys.float().abs().sum(dim=-1)

    def keep_keys(self, layer_cache, n):
        if layer_cache.layer < self.skip_layers:
            return None
        if self.preserve == 0:
            return None
        rows = layer_cache.keys
        new = self.size(rows.recent[:, :, :n])
        B, heads = new.shape[:2]
        kept = []
        for b in range(B):
            for h in range(heads):
                kept.append(self.one_head(rows, new, b, h))
        longest = max(len(positions) for positions in kept)
        kept = [positions + [-1] * (longest - len(positions)) for positions in kept]
        return torch.tensor(kept).view(B, heads, longest)

    def one_head(self, rows, new, b, h):
        p = self.preserve
        start = rows.n_coded
        newcomers = sorted((score, start + i) for i, score in enumerate(new[b, h].tolist()))
        if rows.kept_positions is None:
            return [position for _, position in newcomers[:p]]
        positions = rows.kept_positions[b, h].tolist()
        scores = self.size(rows.kept_rows)[b, h].tolist()
        pool = list(zip(scores, positions))[:p]
        extra = [position for position in positions[p:] if position >= 0]
        room = self.extra_pool - len(extra)
        newcomers = newcomers[:room]
        elected = sorted(pool + newcomers)[:p]
        evicted = [position for score, position in pool if (score, position) not in elected]
        return [position for _, position in elected] + extra + evicted
