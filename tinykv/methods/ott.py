"""OTT (Su et al., 2025): KIVI's codes, and the tokens with the smallest keys kept out of them.

    Keep: a pool of `outlier_num` tokens with the smallest keys, and those that it had to let go.
    Code: K per channel in groups of G tokens, V per token.
    When: the 32 newest stay exact, older ones are coded G = 128 at a time.

In a channel where all keys are large, a token whose key is nearly zero stretches the range of its group, and all others
of the group pay for it. Such tokens have small keys in all channels, so the sum of magnitudes finds them. At every
coding event, among the tokens to be coded and the pool:
    score(i) = sum_c |K[i, c]|,  pool = the outlier_num smallest, ties to the earlier token
A token that has to leave the pool goes to the extra pool, exact too, as its slot was coded without regard to it. The
extra pool takes 32; once it is full the pool stays as it is. None of this in the first two layers, which have no such
tokens.

Paper and practice. No released code was found; what the summary of the paper leaves open is settled here as follows.
- Each KV head has its own pools (`scope="head"`); `scope="layer"` adds the scores over heads. Scores are after RoPE.
- The paper puts the mean of all tokens in the place of a kept token before coding. Whatever lies within the range of
  the others gives the same codes, so here the kept tokens are left out of the range and nothing is put there.
- A text that comes at once (a prompt, the `paper` protocol) is one coding event: the pool is elected among all its
  tokens and none is let go. Block by block the same pool comes out, as long as the extra pool is not full.
- An event that would let go more tokens than the extra pool can still take admits the best newcomers, as many as fit.
- Values go with the keys, G at a time; KIVI lets one go each step. With `outlier_num=0` this is `kivi` with the same
  G and R.
- `select="largest"` is the paper's counter-example.
"""
import torch

from tinykv import at_least, one_of
from tinykv.methods.base import SchemeMethod


class OTT(SchemeMethod):
    compare = ("kivi",)

    def __init__(self, config, k_bits=2, v_bits=2, group_size=128, recent=32, outlier_num=3, extra_pool=32,
                 skip_layers=2, scope="head", select="smallest"):
        super().__init__(config, k_bits, v_bits, "channel-dynamic", group_size)
        at_least(0, recent=recent, outlier_num=outlier_num, extra_pool=extra_pool, skip_layers=skip_layers)
        one_of(("head", "layer"), scope=scope)
        one_of(("smallest", "largest"), select=select)
        self.recent, self.preserve, self.extra_pool, self.skip_layers = recent, outlier_num, extra_pool, skip_layers
        self.scope, self.select = scope, select

    def keep(self, cache, kind, n, state):
        """The pool in the first `outlier_num` places, the extra pool behind: (B, 1 or Hkv, up to both)."""
        if self.preserve == 0 or cache.layer < self.skip_layers:
            return None
        if kind == "v":
            return cache.k.index  # elected when the keys were coded, just now
        part, p = cache.k, self.preserve
        score = self._score(part.recent[:, :, :n])  # (B, h, n); h is Hkv, or 1 if the scope is the layer
        best = score.sort(dim=-1, stable=True)
        new_score, new = best.values[..., :p], part.first + best.indices[..., :p]  # (B, h, up to p) both
        if part.index is None:
            return new
        pool, extra = part.index[..., :p], part.index[..., p:]  # (B, h, up to p), (B, h, e)
        pool_score = self._score(part.pinned[:, :, :pool.shape[-1]])  # (B, h, up to p)
        room = self.extra_pool - (extra >= 0).sum(-1, keepdim=True) + p - pool.shape[-1]  # (B, h, 1)
        rank = torch.arange(new.shape[-1], device=new.device)  # (up to p)
        new_score = new_score.masked_fill(rank >= room, float("inf"))

        both, scores = torch.cat([pool, new], -1), torch.cat([pool_score, new_score], -1)  # (B, h, up to 2p) both
        order = scores.sort(dim=-1, stable=True).indices  # the pool's come first, and are earlier tokens
        winners, losers = both.gather(-1, order[..., :p]), order[..., p:]  # (B, h, up to p) both
        gone = torch.where(losers < pool.shape[-1], both.gather(-1, losers), -1)  # (B, h, up to p)
        extra = torch.cat([extra, gone], -1)  # (B, h, e + up to p)
        extra = extra.gather(-1, (extra < 0).sort(dim=-1, stable=True).indices)  # the empty places last
        used = int((extra >= 0).sum(-1).max()) if extra.numel() else 0
        return torch.cat([winners, extra[..., :used]], -1)

    def _score(self, keys):
        """keys (B, Hkv, n, d) -> the sum of their magnitudes in fp32 (B, Hkv or 1, n), small for those to be kept."""
        score = keys.float().abs().sum(-1)  # (B, Hkv, n)
        if self.scope == "layer":
            score = score.sum(1, keepdim=True)  # (B, 1, n)
        return score if self.select == "smallest" else -score
