"""Methods as a student may hand them in: three that are right, and others with one thing wrong.

    pytest tests/test_methods.py --method tests/wrong_methods.py:OneTooMany --as pfn

test_own_method.py shows what is said of each.
"""
from functools import partial

import torch

from tinykv.codecs.affine import Affine
from tinykv.codecs.base import Codec, Codes, Pair
from tinykv.methods.antkv import anchor_scores, code_error
from tinykv.methods.base import CodecMethod, Method, best_tokens, first_tokens
from tinykv.methods.kvsink import KVSink
from tinykv.methods.pfn import PFN

# ---- right

class HeavyHitters(CodecMethod):
    """Keeps the tokens that have received the most attention so far; drops one for a better one."""
    uses_scores = True

    def __init__(self, config, preserve=3, **codec):
        super().__init__(config, **codec)
        self.preserve = preserve

    def score(self, layer_cache, q, K):
        _, received = anchor_scores(q, K)  # (B, Hkv, S)
        return received, received

    def keep_keys(self, layer_cache, n):
        return best_tokens(layer_cache.keys, n, self.preserve)


class LastOfTheBlock(CodecMethod):
    """Keeps the newest token of those that are due, and drops it at the next event."""

    def keep_keys(self, layer_cache, n):
        keys = layer_cache.keys.recent  # (B, Hkv, r, d)
        newest = torch.tensor([layer_cache.keys.n_coded + n - 1], device=keys.device)  # (1)
        return newest.expand(len(keys), 1, 1)


class WorstCoded(CodecMethod):
    """Keeps the tokens whose code loses most. In calibration a static codec has no grid yet, and nothing is kept."""
    preserve = 3

    def keep_keys(self, layer_cache, n):
        codec = layer_cache.keys.codec
        if codec.needs_text and not codec.calibrated():
            return None
        return best_tokens(layer_cache.keys, n, self.preserve, partial(code_error, codec))


# ---- wrong: what is kept

class OneTooMany(PFN):
    def keep_keys(self, layer_cache, n):
        return first_tokens(layer_cache, self.preserve + 1)


class NotThere(CodecMethod):
    def keep_keys(self, layer_cache, n):
        return layer_cache.length + first_tokens(layer_cache, 1)


class FirstSequenceChooses(KVSink):
    """The sinks of sequence 0 are kept in all sequences of the batch."""

    def keep_keys(self, layer_cache, n):
        positions = super().keep_keys(layer_cache, n)
        return None if positions is None else positions[:1].expand_as(positions)


class Remembers(CodecMethod):
    """Another token of each block in turn, where the count goes on from one text to the next."""
    asked = []

    def keep_keys(self, layer_cache, n):
        self.asked.append(n)
        keys = layer_cache.keys
        position = torch.tensor([keys.n_coded + len(self.asked) % (n - 1)])  # (1)
        return position.expand(len(keys.recent), 1, 1)

    def keep_values(self, layer_cache, n):
        return None


# ---- wrong: they write into what they are shown

class Observes(CodecMethod):
    def observe(self, cache, layer, hidden):
        hidden.mul_(2)


class Scores(CodecMethod):
    uses_scores = True

    def score(self, layer_cache, q, K):
        return [K.mul_(2)[..., 0]] * 2


class Clears(CodecMethod):
    def keep_keys(self, layer_cache, n):
        layer_cache.values.recent.zero_()


# ---- wrong: how tokens are quantized

class OtherCodec(CodecMethod):
    """Integers of 4 bits by a codec of another class."""

    def __init__(self, config):
        super().__init__(config, 4, 4, "token-dynamic", block=8)
        for _, _, codec in self.each_codec():
            codec.__class__ = self.codec


class Swapped(OtherCodec):
    """Scale and zero point in each other's place."""
    class codec(Affine):
        def decode(self, codes):
            return super().decode(Codes(codes.packed, scale=codes.zero, zero=codes.scale))


class SignLost(OtherCodec):
    """Numbers a little below 0 become positive."""
    class codec(Affine):
        def encode(self, x, ignore=None):
            return super().encode(torch.where((x > -0.6) & (x < 0), -x, x))


class Doubles(OtherCodec):
    """Doubles what it is shown."""
    class codec(Affine):
        def encode(self, x, ignore=None):
            return super().encode(x.mul_(2))


class Unstored(OtherCodec):
    """Codes are made by another scale than is stored."""
    class codec(Affine):
        def encode(self, x, ignore=None):
            return super().encode(1.1 * x)


class WideCodec(Affine):
    def encode(self, x, ignore=None):
        return super().encode(x)


class KeptTokensCount(CodecMethod):
    """Tokens that are kept widen their group's range."""

    def __init__(self, config, k_bits=2, v_bits=2, group_size=8):
        super().__init__(config, k_bits, v_bits, "channel-dynamic", group_size=group_size)
        for _, _, codec in self.each_codec():
            codec.__class__ = WideCodec

    def keep_keys(self, layer_cache, n):
        return first_tokens(layer_cache, 3)


class OneCodec(Method):
    """All keys and values by one codec."""
    block = 8

    def __init__(self, config):
        super().__init__(config)
        self.codecs = [Pair(self.codec(), self.codec()) for _ in range(config.num_hidden_layers)]


class Silent(OneCodec):
    """Rounded numbers in 32 bits, said to be 16."""
    class codec(Codec):
        bits = 16

        def encode(self, x, ignore=None):
            z = x.float().amin(-1, keepdim=True)
            s = (x.float().amax(-1, keepdim=True) - z) / 3
            return Codes(((x.float() - z) / s.clamp(min=1e-5)).round() * s + z)

        def decode(self, codes):
            return codes.packed


class Fake(Silent):
    """The same, said to be 2 bits."""
    class codec(Silent.codec):
        bits = 2


class Forgets(CodecMethod):
    """Keeps nothing, whatever `preserve` says, and does not remember its `recent`."""

    def __init__(self, config, preserve=3, recent=0, **codec):
        super().__init__(config, **codec)
        self.preserve = preserve
