"""AnTKV's anchor scores: how much the attention output changes if one token's key or value does.

Notation of the paper: A (T, S) the attention of T queries to S keys, O = A V its output. Theorem 1 bounds the change
of the output, in L1, for a small error in row j:
    of V:  sum_i A_ij |dV_j|_1                          of K:  sum_i A_ij |V_j - O_i|_1 |Q_i|_2 |dK_j|_1
where |V_j - O_i|_1 A_ij is the paper's |(V^T Diag(A_i) (I - e A_i))_{:,j}|_1. The short scores leave V out (Eq. 5):
    AnS(V_j) = sum_i A_ij                               AnS(K_j) = sum_i A_ij (1 - A_ij) |Q_i|_2
The paper's Algorithm 1 forgets the factor |Q_i|. Sums are over the queries that see the key: an early key has more.

All of this goes over the queries in tiles; no T x S matrix is ever whole.
"""
import torch

TILE = 2 ** 18  # attention weights held at once on a CPU: they then stay in its cache
GPU_TILE = 2 ** 26


def score_tiles(q, k, window=None):
    """The scaled scores in tiles of queries: yields (queries, scores (B, H, tile, keys up to the last query's)).

    q (B, H, T, d), k (B, Hkv, S, d), both rotated; query i stands at position S - T + i. What a query does not see is
    -inf. window: of a sliding-window model.
    """
    B, H, T, d = q.shape
    S, group = k.shape[2], H // k.shape[1]
    q, k = q.float() * d ** -0.5, k.float().transpose(-2, -1)  # (B, H, T, d), (B, Hkv, d, S)
    size = max(1, (GPU_TILE if q.is_cuda else TILE) // (B * H * S))
    for begin in range(0, T, size):
        end = min(begin + size, T)
        last = S - T + end  # keys that any of these queries sees
        rows = q[:, :, begin:end].unflatten(1, (-1, group)).flatten(2, 3)  # (B, Hkv, group * tile, d)
        scores = (rows @ k[..., :last]).unflatten(2, (group, -1)).flatten(1, 2)  # (B, H, tile, last)
        late = torch.ones(end - begin, end - begin, dtype=torch.bool, device=q.device).triu_(1)  # (tile, tile)
        scores[..., begin - end:].masked_fill_(late, float("-inf"))
        if window is not None:
            at = torch.arange(last - (end - begin), last, device=q.device)[:, None]  # (tile, 1): positions
            scores.masked_fill_(torch.arange(last, device=q.device) <= at - window, float("-inf"))
        yield slice(begin, end), scores


def log_sum_exp(q, k, window=None):
    """Of each query's scores, (B, H, T): what a prefill kernel leaves behind."""
    return torch.cat([scores.logsumexp(-1) for _, scores in score_tiles(q, k, window)], dim=2)


def attention_tiles(q, k, lse=None, window=None):
    """As `score_tiles`, the attention weights A instead; from each query's log-sum-exp where it is given."""
    for tile, scores in score_tiles(q, k, window):
        yield tile, scores.softmax(-1) if lse is None else scores.sub_(lse[:, :, tile, None]).exp_()


def anchor_scores(q, k, lse=None, window=None):
    """Eq. 5: AnS(K) and AnS(V), (B, Hkv, S) both, the query heads of a KV head added up. See `score_tiles`."""
    sums = torch.zeros(*q.shape[:2], 2, k.shape[2], device=q.device)  # (B, H, 2, S): of |Q_i| A (1 - A), and of A
    norm = q.float().norm(dim=-1)  # (B, H, T)
    weights = torch.stack([norm, torch.ones_like(norm)], dim=2)  # (B, H, 2, T)
    for tile, A in attention_tiles(q, k, lse, window):
        seen = A.shape[-1]
        sums[..., :seen] += weights[..., tile] @ A  # (B, H, 2, seen)
        sums[:, :, :1, :seen] -= weights[:, :, :1, tile] @ A.square_()
    ans_k, ans_v = sums.unflatten(1, (k.shape[1], -1)).sum(2).unbind(2)
    return ans_k, ans_v


def theorem_1(q, k, v):
    """The full factor of K's error, (B, Hkv, S): sum_i A_ij |V_j - O_i|_1 |Q_i|_2. For comparison; slow."""
    v = v.float().repeat_interleave(q.shape[1] // k.shape[1], dim=1)  # (B, H, S, d)
    factor = torch.zeros(*q.shape[:2], k.shape[2], device=q.device)  # (B, H, S)
    norm = q.float().norm(dim=-1)[..., None]  # (B, H, T, 1)
    for tile, A in attention_tiles(q, k):
        seen = v[:, :, :A.shape[-1]]
        away = torch.cdist(A @ seen, seen, p=1)  # (B, H, tile, seen)
        factor[..., :A.shape[-1]] += (A * away * norm[:, :, tile]).sum(2)
    return factor.unflatten(1, (k.shape[1], -1)).sum(2)


def damage(q, k, v, coded_k, coded_v):
    """What really happens: the L1 change of the attention output if token j alone is read as its code, for every j.

    coded_k, coded_v: the rows as they would be read, rotated as k. Returns the changes by its key and by its value,
    (B, Hkv, S) both. Exact, in closed form: if the score of key j changes by delta, then
        O_i' - O_i = A_ij (e^delta - 1) (V_j - O_i) / (1 + A_ij (e^delta - 1))
    """
    group = q.shape[1] // k.shape[1]
    wide = v.float().repeat_interleave(group, dim=1)  # (B, H, S, d)
    moved = (coded_k.float() - k.float()).repeat_interleave(group, dim=1).transpose(-2, -1)  # (B, H, d, S)
    by_k = torch.zeros(*q.shape[:2], k.shape[2], device=q.device)  # (B, H, S)
    by_v = torch.zeros_like(by_k)
    for tile, A in attention_tiles(q, k):
        seen = A.shape[-1]
        delta = q[:, :, tile].float() @ moved[..., :seen] * q.shape[-1] ** -0.5  # (B, H, tile, seen)
        grown = A * delta.expm1()
        away = torch.cdist(A @ wide[:, :, :seen], wide[:, :, :seen], p=1)  # (B, H, tile, seen)
        by_k[..., :seen] += ((grown / (1 + grown)).abs() * away).sum(2)
        by_v[..., :seen] += A.sum(2)
    by_v *= (coded_v.float() - v.float()).abs().sum(-1).repeat_interleave(group, dim=1)
    return tuple(change.unflatten(1, (k.shape[1], -1)).sum(2) for change in (by_k, by_v))
