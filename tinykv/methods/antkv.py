"""AnTKV (Li et al., 2025): vector codebooks that mind each token's weight, and anchor tokens kept exact.

    Keep: of keys and of values, the tokens with the largest anchor scores, 1% of the text.
    Code: vector codebooks, learned with token-aware weights; K before RoPE.
    When: the 32 newest stay exact, older ones are coded in blocks.

Two stages. Offline, codebooks by k-means, each token weighted by the norm of the loss's gradient with respect to it
(Eq. 2), see `vectors.py`. Online, the short scores of Eq. 5, see `anchors.py`:
    AnS(V_j) = sum_i A_ij,   AnS(K_j) = sum_i A_ij (1 - A_ij) |Q_i|,   anchors = the top 1% of each

Paper and practice. No code is public. What the paper leaves open is settled here as follows.
- K and V have anchors of their own, per KV head, the scores of its query heads added up. Scores are of what the layer
  sees, which under the `paper` protocol is the stream of the quantized cache, its own keys still exact.
- Under that protocol future queries decide what earlier ones saw exactly, as in all perplexities of the paper. In a
  stream the scores are sums over the queries seen so far; a token competes when its block is coded, with the anchors
  of that time, for 1% of what has been seen. One that has to leave is read as its code.
- Eq. 2 is linear in the gradient and k-means is quadratic; the norm is taken over the token's row of a KV head.
- The paper's bits count neither anchors nor codebooks. `true` counts anchors, their indices and their scores.
"""
import math
from fractions import Fraction

import torch

from tinykv import UserError
from tinykv.anchors import anchor_scores
from tinykv.methods.base import VectorMethod


class AnTKV(VectorMethod):
    compare = ("cq",)

    def __init__(self, config, vq=None, bits=None, sensitivity="token", sharing="own", anchors="1%", recent=32):
        super().__init__(config, vq, bits, sensitivity, sharing, recent)
        self.window = config.sliding_window
        try:
            self.share = Fraction(anchors[:-1]) / 100 if str(anchors).endswith("%") else None
            self.count = None if self.share is not None else int(anchors)
        except ValueError:
            raise UserError(f"anchors are a count, such as 64, or a share, such as 1%; got {anchors!r}") from None
        self.keeps_share, self.preserve = self.share is not None, anchors if self.count is None else self.count
        if not 0 <= (self.count if self.share is None else self.share) or (self.share or 0) > 1:
            raise UserError(f"anchors are a count of at least 0, or a share of 0% to 100%; got {anchors!r}")

    @property
    def anchor_scores(self):
        return bool(self.count or self.share)

    def attend(self, cache, q, K, positions):
        """The new queries' share of each token's AnS(K) and AnS(V), (B, Hkv, S) both."""
        if not self.anchor_scores:
            return None
        return anchor_scores(cache.rope.rotate(q, positions), K, window=self.window)

    def keep(self, cache, kind, n, state):
        """The tokens with the largest scores, among the anchors of now and the n to be coded: (B, Hkv, count)."""
        part = cache.k if kind == "k" else cache.v
        if part.score is None:
            return None
        count = math.ceil(self.share * cache.length) if self.count is None else self.count
        at = part.first + torch.arange(n, device=part.score.device)  # (n)
        at = at.expand(*part.score.shape[:2], n)  # (B, Hkv, n)
        score = part.score[:, :, :n]  # (B, Hkv, n)
        if part.index is not None:
            at, score = torch.cat([part.index, at], -1), torch.cat([part.pinned_score, score], -1)  # (B, Hkv, p + n)
        best = score.sort(dim=-1, descending=True, stable=True).indices[..., :count]  # (B, Hkv, count)
        return at.gather(-1, best)
