"""Assignment 4: KIVI's codecs and window, and OTT's pool of tokens with small keys.

Shapes: B sequences, Hkv KV heads, d channels of a head, T tokens. Tokens and layers are counted
from 0. The codec that you need is the project's:

    Affine(bits, width, axis, group)   rounds to `bits` bits. width: d. axis "token": a grid for each
                                       `group` channels of one token; axis "channel": a grid for
                                       each `group` tokens of one channel
"""
import torch

from tinykv.codecs.affine import Affine
from tinykv.codecs.base import Pair
from tinykv.methods.base import CodecMethod, Method

ASSIGNMENT = "ott"


# Task 1: KIVI

def kivi_codecs(k_bits, v_bits, width, group_size):
    """KIVI's two codecs of a layer, Pair(k=..., v=...).

    Keys: a grid for each G = `group_size` tokens of one channel. Values: a grid for each G channels
    of one token, or for the whole head where d = `width` is less than G.
    """
    # answer
    keys = Affine(k_bits, width, "channel", group_size)
    values = Affine(v_bits, width, "token", min(group_size, width))
    return Pair(k=keys, v=values)


def due(length, n_coded, recent, block):
    """How many tokens are quantized now, an int: whole blocks of `block` tokens, but never one of
    the newest `recent` tokens. So far there are `length` tokens, and the first `n_coded` of them
    are quantized already."""
    # answer
    return max(0, length - recent - n_coded) // block * block


def kivi_bits(T, d, bits, group_size, recent):
    """True bits of a number in one head's cache of T tokens, a float.

    The cache holds keys and values, T * d numbers each. They came one by one, and `due` with
    blocks of G = `group_size` tokens said when they were quantized. A quantized number has `bits`
    bits; each group has a scale and a zero point of 16 bits each; every other number has 16 bits.
    G divides d.
    """
    # answer
    coded = due(T, 0, recent, group_size)
    groups = coded * d // group_size
    of_keys = coded * d * bits + groups * 2 * 16 + (T - coded) * d * 16
    return 2 * of_keys / (2 * T * d)


class KIVI(Method):

    # given: a method that needs your codecs, and nothing else. The cache does what `due` says

    def __init__(self, config, k_bits=2, v_bits=2, group_size=32, recent=128):
        super().__init__(config)
        pair = kivi_codecs(k_bits, v_bits, config.head_dim, group_size)
        self.codecs = [Pair(*pair)] * config.num_hidden_layers
        self.scheme = "kivi"
        self.recent, self.block = recent, group_size


class OTT(CodecMethod):

    # given: settings. The codecs are those of KIVI

    def __init__(self, config, k_bits=2, v_bits=2, group_size=128, recent=32, outlier_num=3,
                 extra_pool=32, skip_layers=2):
        super().__init__(config, k_bits, v_bits, "channel-dynamic", group_size=group_size)
        self.recent = recent
        self.preserve = outlier_num  # p, the places of the pool
        self.extra_pool = extra_pool  # E, the places of the extra pool
        self.skip_layers = skip_layers  # the first layers, which have no pool

    # Task 2: the score

    def size(self, keys):
        """The score of each key: the sum of its magnitudes. keys (B, Hkv, n, d), in 16 bits or fp32
        -> (B, Hkv, n) fp32, added up in fp32."""
        # answer
        return keys.float().abs().sum(dim=-1)

    # Task 3: the two pools

    def keep_keys(self, layer_cache, n):
        """Which tokens to keep in full precision, asked when layer `layer_cache.layer` is about to
        quantize its n oldest recent tokens. n is at least p.

        Returns positions (B, Hkv, p + e), integers: in each row first the pool, p tokens, then the
        extra pool, where a place that is not used repeats the row's first token; e is as large as
        you like. None to keep nothing, in the first `skip_layers` layers and where p is 0.

        `rows = layer_cache.keys` has, before this block is quantized:
            rows.recent (B, Hkv, r, d)                  recent keys, the oldest first; r >= n
            rows.n_coded                                the position of the first of them
            rows.kept_positions (B, Hkv, p + e)       what you returned last time; None at first
            rows.kept_rows (B, Hkv, p + e, d)         the keys of these tokens
        Change none of them. Values keep the tokens that keys keep.
        """
        # answer
        if layer_cache.layer < self.skip_layers or self.preserve == 0:
            return None
        rows = layer_cache.keys
        new = self.size(rows.recent[:, :, :n])
        B, heads = new.shape[:2]
        kept = [one_head(self, rows, new, b, h) for b in range(B) for h in range(heads)]
        longest = max(len(positions) for positions in kept)
        kept = [positions + positions[:1] * (longest - len(positions)) for positions in kept]
        return torch.tensor(kept).view(B, heads, longest)


# answer: helpers

def one_head(method, rows, new, b, h):
    p = method.preserve
    start = rows.n_coded
    newcomers = sorted((score, start + i) for i, score in enumerate(new[b, h].tolist()))
    if rows.kept_positions is None:
        return [position for _, position in newcomers[:p]]
    positions = rows.kept_positions[b, h].tolist()
    scores = method.size(rows.kept_rows)[b, h].tolist()
    pool = list(zip(scores, positions))[:p]
    extra = [position for position in positions[p:] if position != positions[0]]
    room = method.extra_pool - len(extra)
    newcomers = newcomers[:room]
    elected = sorted(pool + newcomers)[:p]
    evicted = [position for score, position in pool if (score, position) not in elected]
    return [position for _, position in elected] + extra + evicted
