"""A codec of what is left of each channel without its mean in calibration text.

If `k_proj` has a bias, as in Qwen2 and Qwen2.5, the mean of the keys before RoPE contains it. After RoPE it turns with
the position, except in the channels that turn slowest. So `--centre on` quantizes keys before RoPE, unless `--rope
post` says otherwise.
"""
from tinykv import UserError
from tinykv.codecs.base import Codec


class Centred(Codec):
    needs_text = True
    tables = ("mean",)

    def __init__(self, codec):
        if codec.needs_text:
            raise UserError(f"centre=on takes a scheme without tables, such as token-dynamic; {codec!r} has its own, "
                            "which take a mean up")
        self.codec, self.bits, self.mean = codec, codec.bits, None
        self.tokens_per_group = codec.tokens_per_group

    def fit(self, rows, kept, gradient=None, seed=0):
        total = rows.float().masked_fill(kept[..., None], 0).sum((0, 2))  # (Hkv, d)
        n = (~kept).sum((0, 2))  # (Hkv)
        self.mean = (total / n[:, None]).half()[:, None]  # (Hkv, 1, d)

    def encode(self, x, ignore=None):
        return self.codec.encode(x.float() - self.mean, ignore)

    def decode(self, codes):
        return self.codec.decode(codes) + self.mean
