"""OTT (Su et al., 2025): KIVI's codes, without the tokens whose keys are smallest.
The same on a page that runs alone: docs/ladder/3_pool.py.

    Keep: keys and values of a pool of `outlier_num` tokens with the smallest keys, and of an extra
    pool of tokens that were evicted from it.
    Code: K per channel in groups of G tokens, V per token.
    When: the 32 newest tokens stay in full precision, older ones are quantized G = 128 at a time.

In a channel where all keys are large, a token whose key is nearly zero stretches the range of its group, and all other
tokens of the group lose precision. Such a token has a small key in all channels, so the sum of magnitudes finds it.
Whenever n tokens are about to be quantized, they compete with the pool:
    score(i) = sum_c |K[i, c]|
    pool = the `outlier_num` tokens with the smallest scores, ties to the earlier token
A token that loses its place goes to the extra pool and stays in full precision: its group's range was chosen without
it, so its code may be far off. The extra pool takes 32 tokens; once it is full, the pool stays as it is. The first two
layers have no pool: they have no such tokens.

Kept tokens fill slots. Here p = `outlier_num` is 3, and another head has three tokens in its extra pool:
                  pool       | extra pool
    slot          0   1   2  |  3   4   5
    position     17   4  23  |  9  12  17     an empty slot repeats slot 0

Paper and practice. The paper names a repository that could not be reached, so these points were settled here.
- Each KV head has its own pools. Scores are after RoPE.
- The paper replaces a kept token by the mean of all tokens before quantizing. Here kept tokens are left out of the
  range. The others get the same codes if that mean is within their range.
- A text that comes at once (a prompt, or a window under `paper`) gets its pool in one election, so no token is evicted.
  Fed in block by block, it ends with the same pool, as long as the extra pool is not full. If that has room for
  fewer tokens than would be evicted, only as many newcomers are admitted, the best first.
- Values are quantized together with the keys, G at a time; the code of KIVI's authors quantizes the values of one token
  per step. With `outlier_num=0` this equals the method `kivi` here with the same `group_size` and `recent`.
- `select="largest"` is the paper's counter-example.
"""
from typing import Annotated

import torch

from tinykv import at_least, one_of
from tinykv.methods.base import CodecMethod


class OTT(CodecMethod):
    beside = {"kivi": {"group_size": 128, "recent": 32}}

    def __init__(self, config, k_bits=2, v_bits=2, group_size=128, recent=32,
                 outlier_num: Annotated[int, "tokens in the pool"] = 3,
                 extra_pool: Annotated[int, "places for tokens that the pool gives up"] = 32,
                 skip_layers: Annotated[int, "first layers without a pool"] = 2,
                 select: Annotated[str, "which keys are kept: smallest or largest"] = "smallest"):
        super().__init__(config, k_bits, v_bits, "channel-dynamic", group_size=group_size, block=group_size)
        at_least(0, outlier_num=outlier_num, extra_pool=extra_pool, skip_layers=skip_layers)
        one_of(("smallest", "largest"), select=select)
        self.recent, self.preserve = recent, outlier_num
        self.extra_pool, self.skip_layers, self.select = extra_pool, skip_layers, select

    def keep_keys(self, layer_cache, n):
        """Positions (B, Hkv, slots) as drawn above."""
        if self.preserve == 0 or layer_cache.layer < self.skip_layers:
            return None
        keys, p = layer_cache.keys, self.preserve  # p: outlier_num

        # 1. Candidates: the p smallest keys among those that are about to be quantized.
        score = self.size(keys.recent[:, :, :n])  # (B, Hkv, n)
        smallest = score.sort(dim=-1, stable=True)  # ties: the earlier token
        candidate_scores = smallest.values[..., :p]  # (B, Hkv, up to p)
        candidates = keys.n_coded + smallest.indices[..., :p]  # (B, Hkv, up to p): positions
        if keys.kept_positions is None:
            return candidates  # the first pool

        # 2. The pool as it is, and its scores.
        pool = keys.kept_positions[..., :p]  # (B, Hkv, up to p)
        n_pool = pool.shape[-1]  # p, or less if the first election had fewer candidates
        pool_scores = self.size(keys.kept_rows[:, :, :n_pool])  # (B, Hkv, n_pool)
        extra = keys.kept_positions[..., p:]  # (B, Hkv, e)
        extra = extra.masked_fill(extra == pool[..., :1], -1)  # -1: an empty slot

        # 3. Admit no more candidates than there are free places, in the pool and in the extra pool.
        extra_used = (extra >= 0).sum(-1, keepdim=True)  # (B, Hkv, 1)
        free = self.extra_pool - extra_used + p - n_pool  # (B, Hkv, 1)
        # a candidate without a place gets inf: it loses to every other
        rank = torch.arange(candidates.shape[-1], device=candidates.device)  # (up to p)
        candidate_scores = candidate_scores.masked_fill(rank >= free, float("inf"))

        # 4. Elect the p smallest of both. The pool comes first: its tokens are earlier, and win ties.
        both = torch.cat([pool, candidates], dim=-1)  # (B, Hkv, up to 2p)
        scores = torch.cat([pool_scores, candidate_scores], dim=-1)  # (B, Hkv, up to 2p)
        order = scores.sort(dim=-1, stable=True).indices  # (B, Hkv, up to 2p)
        winners = both.gather(-1, order[..., :p])  # (B, Hkv, up to p)

        # 5. The pool's losers go to the extra pool. A candidate that lost is quantized: -1.
        losers = order[..., p:]  # (B, Hkv, up to p): places in `both`
        evicted = both.gather(-1, losers).where(losers < n_pool, -1)  # (B, Hkv, up to p)
        extra = torch.cat([extra, evicted], dim=-1)  # (B, Hkv, e + up to p)

        # 6. Empty slots last, and no more slots than the fullest head needs.
        empty = extra < 0  # (B, Hkv, e + up to p)
        extra = extra.gather(-1, empty.sort(dim=-1, stable=True).indices)
        extra = extra[..., :(~empty).sum(-1).max()]  # (B, Hkv, used)
        extra = extra.where(extra >= 0, winners[..., :1])
        return torch.cat([winners, extra], dim=-1)  # (B, Hkv, p + used)

    def size(self, keys):
        """score(i) of keys (B, Hkv, n, d): the sum of their magnitudes, (B, Hkv, n). To select the largest it is
        negated."""
        score = keys.float().abs().sum(-1)  # (B, Hkv, n)
        return score if self.select == "smallest" else -score
