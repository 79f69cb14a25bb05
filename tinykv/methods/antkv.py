"""AnTKV (Li et al., 2025): token-aware codebooks, and anchor tokens in full precision.
The same on a page that runs alone: docs/ladder/6_codebooks.py.

    Keep: of keys and of values, the tokens with the largest anchor scores, 1% of the text.
    Code: codebooks, calibrated with token-aware weights; K before RoPE.
    When: the 32 newest stay in full precision; older ones are quantized in blocks.

There are two stages. Offline, codebooks come from k-means in which each token is weighted by the norm of the loss's
gradient with respect to it (Eq. 2): see `codecs/codebook.py`. Online, the anchor score estimates how much the attention
output changes if one token's key or value does. Let A (T, S) be the attention of T queries to S keys, and O = A V its
output. Theorem 1 bounds the change of O, in L1, for a small error in row j:

    of V:   sum_i A_ij |dV_j|_1
    of K:   sum_i A_ij |V_j - O_i|_1 |Q_i|_2 |dK_j|_1

(|V_j - O_i|_1 A_ij is the paper's |(V^T Diag(A_i) (I - e A_i))_{:,j}|_1.) The anchor scores leave out the errors and V
(Eq. 5). Of V_j - O_i, only the coefficient of V_j is left, 1 - A_ij. The anchors are the top 1% of each:

    AnS(V_j) = sum_i A_ij
    AnS(K_j) = sum_i A_ij (1 - A_ij) |Q_i|_2

Sums are over the queries that see the key, so an early key has more of them.

Paper and practice. No code is public. What the paper leaves open is settled here as follows.
- K and V have their own anchors, per KV head; the scores of its query heads are added up.
- Under the `paper` protocol future queries decide what earlier queries saw in full precision, as in all of the paper's
  perplexities. On LongBench, it reads the prompt in full precision: `stream` with a prompt. Anchors are chosen at the
  prompt's end, among all of its tokens, and later tokens stay in full precision only while they are among the `recent`
  newest.
- With `choose="always"`, and in a stream without a prompt, the scores are sums over the queries seen so far. When its
  block is quantized, a token competes with the current anchors: they may be 1% of the tokens seen. An evicted anchor is
  read as its codes.
- The paper's Algorithm 1 leaves out the factor |Q_i|; it is used here.
- Eq. 5 leaves out the error of each row, but that is known once its block is quantized: `anchors_by="error"` multiplies
  the score by |dK_j|_1, or |dV_j|_1.
- Keys are quantized before RoPE, where their channels keep their ranges (Appendix B); `rope="post"` quantizes them
  after it.
- The paper's bits count neither anchors nor codebooks. `true` counts anchors, their positions and their scores, and no
  codebooks.
"""
import math
import re
from fractions import Fraction
from functools import partial
from typing import Annotated

import torch

from tinykv import UserError, one_of
from tinykv.codecs.base import BLOCK
from tinykv.methods.base import best_tokens
from tinykv.methods.codebooks import CodebookMethod

MAX_SCORES = 2 ** 18  # attention scores held at once on a CPU: they then stay in its cache
MAX_SCORES_GPU = 2 ** 26
MIN_QUERIES = 32  # queries in a tile, even if that exceeds the limits above: each tile reads all keys


class AnTKV(CodebookMethod):
    beside = {"cq": {"sensitivity": "token", "recent": 32}}

    def __init__(self, config, vq=None,
                 anchors: Annotated[str, "tokens kept: a count, such as 64, or a share, such as 1%%"] = "1%",
                 anchors_by: Annotated[str, "attention, or error (times the row's error)"] = "attention",
                 recent=32, block=BLOCK, choose="prompt", rope="pre", sensitivity="token", **codebooks):
        super().__init__(config, vq, sensitivity=sensitivity, **codebooks)
        one_of(("attention", "error"), anchors_by=anchors_by)
        self.recent, self.block, self.choose, self.rope = recent, block, choose, rope
        self.anchors, self.anchors_by = anchors, anchors_by
        self.preserve, self.share = count_or_share(anchors)
        self.keeps_share = self.share > 0
        self.uses_scores = self.preserve > 0 or self.keeps_share

    def score(self, layer_cache, q, K):
        """What the new queries add to each token's AnS(K) and AnS(V), (B, Hkv, S) both."""
        return anchor_scores(q, K, self.config.sliding_window)

    def keep_keys(self, layer_cache, n):
        return self.largest(layer_cache.keys, n, layer_cache.length)  # (B, Hkv, count)

    def keep_values(self, layer_cache, n):
        return self.largest(layer_cache.values, n, layer_cache.length)  # (B, Hkv, count)

    def largest(self, rows, n, length):
        """The current anchors, positions (B, Hkv, count). rows: the `CachedRows` of K or of V. length: tokens seen."""
        count = self.preserve + math.ceil(self.share * length)  # one of the two is 0
        by_error = self.anchors_by == "error" and rows.recent_scores is not None  # None: calibration
        return best_tokens(rows, n, count, partial(code_error, rows.codec) if by_error else None)


def code_error(codec, x):
    """What the code of each row loses, |dK_j|_1 or |dV_j|_1: x (B, Hkv, m, d) -> (B, Hkv, m)."""
    decoded = codec.decode(codec.encode(x))  # (B, Hkv, m, d)
    return (decoded - x.float()).abs().sum(-1)


def count_or_share(anchors):
    """"64" -> (64, 0); "1%" -> (0, 1/100)."""
    text = str(anchors)
    if re.fullmatch(r"\d+", text):
        return int(text), 0
    if re.fullmatch(r"\d+(\.\d+)?%", text) and Fraction(text[:-1]) <= 100:
        return 0, Fraction(text[:-1]) / 100
    raise UserError(f"anchors are a count, such as 64, or a share of 0% to 100%, such as 1%; got {anchors!r}")


# Eq. 5, as it is written and in tiles

def equation_5(A, q_norm):
    """Eq. 5 as it is written: A (B, H, T, S), |Q_i| (B, H, T) -> AnS(K_j) and AnS(V_j), (B, H, S) both. `anchor_scores`
    computes the same without holding A as a whole."""
    ans_v = A.sum(2)  # (B, H, S)
    of_queries = A * (1 - A) * q_norm[..., None]  # (B, H, T, S)
    ans_k = of_queries.sum(2)  # (B, H, S)
    return ans_k, ans_v


def anchor_scores(q, k, window=None):
    """Eq. 5: AnS(K) and AnS(V), (B, Hkv, S) both. The arguments are those of `score_tiles`."""
    (B, H), (Hkv, S) = q.shape[:2], k.shape[1:3]
    q_norm = q.float().norm(dim=-1)  # (B, H, T)
    factors = torch.stack([q_norm, torch.ones_like(q_norm)], dim=2)  # (B, H, 2, T)
    sums = torch.zeros(B, H, 2, S, dtype=torch.float32, device=q.device)  # of keys, and of values
    for tile, A in attention_tiles(q, k, window):  # A (B, H, tile, seen)
        seen = A.shape[-1]
        # over the tile's queries: |Q_i| A_ij for keys, A_ij for values
        sums[..., :seen] += factors[..., tile] @ A  # (B, H, 2, seen)
        # less |Q_i| A_ij^2 for keys
        squares = q_norm[:, :, None, tile] @ A.square()  # (B, H, 1, seen)
        sums[:, :, 0, :seen] -= squares[:, :, 0]
    # add up the query heads of each KV head
    sums = sums.unflatten(1, (Hkv, -1)).sum(2)  # (B, Hkv, 2, S)
    ans_k, ans_v = sums.unbind(2)  # (B, Hkv, S) both
    return ans_k, ans_v


def attention_tiles(q, k, window=None):
    """As `score_tiles`, but the attention weights A."""
    for tile, scores in score_tiles(q, k, window):
        yield tile, scores.softmax(-1)


def score_tiles(q, k, window=None):
    """The scaled attention scores, a tile of queries at a time.

    q (B, H, T, d), k (B, Hkv, S, d), both rotated; query i is at position S - T + i. window: of a sliding-window model.
    Yields the tile, as a slice of the queries, and its scores (B, H, tile, seen), where `seen` counts the keys up to
    the tile's last query. A score is -inf where the query does not see the key.
    """
    B, H, T, d = q.shape
    Hkv, S = k.shape[1:3]
    q = q.float() * d ** -0.5  # (B, H, T, d)
    k = k.float().transpose(-2, -1)  # (B, Hkv, d, S)
    limit = MAX_SCORES_GPU if q.is_cuda else MAX_SCORES
    size = max(MIN_QUERIES, limit // (B * H * S))  # queries of a tile
    for begin in range(0, T, size):
        end = min(begin + size, T)
        seen = S - T + end  # keys that the tile's last query sees
        # one product for all query heads of a KV head
        queries = q[:, :, begin:end].unflatten(1, (Hkv, -1))  # (B, Hkv, H/Hkv, tile, d)
        queries = queries.flatten(2, 3)  # (B, Hkv, H/Hkv * tile, d)
        scores = queries @ k[..., :seen]  # (B, Hkv, H/Hkv * tile, seen)
        scores = scores.unflatten(2, (H // Hkv, -1)).flatten(1, 2)  # (B, H, tile, seen)
        # causal mask, and the sliding window
        query_at = torch.arange(S - T + begin, seen, device=q.device)[:, None]  # (tile, 1)
        key_at = torch.arange(seen, device=q.device)  # (seen)
        unseen = key_at > query_at  # (tile, seen)
        if window is not None:
            unseen = unseen | (key_at <= query_at - window)
        yield slice(begin, end), scores.masked_fill_(unseen, float("-inf"))
