"""A codec of what is left of each channel without its mean in calibration text.

If `k_proj` has a bias, as in Qwen2 and Qwen2.5, the mean of the keys before RoPE contains it (`--rope pre`). After RoPE
it turns with the position, except in the channels that turn slowest.
"""
from tinykv.codecs.base import Codec


class Centred(Codec):
    needs_text = True
    tables = ("mean",)

    def __init__(self, codec):
        self.codec, self.bits, self.mean = codec, codec.bits, None
        self.tokens_per_group = codec.tokens_per_group

    def fit(self, rows, kept, gradient=None, seed=0):
        total = rows.float().masked_fill(kept[..., None], 0).sum((0, 2))  # (Hkv, d)
        n = (~kept).sum((0, 2)).clamp(min=1)  # (Hkv)
        self.mean = (total / n[:, None]).half()[:, None]  # (Hkv, 1, d)

    def encode(self, x, ignore=None):
        return self.codec.encode(x.float() - self.mean, ignore)

    def decode(self, codes):
        return self.codec.decode(codes) + self.mean
