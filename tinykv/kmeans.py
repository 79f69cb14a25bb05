"""Weighted k-means, many problems at a time: SKVQ's channels, KVQuant's levels.

Everything is torch and batched over the problems, so it runs where the points are. Distances are computed in tiles:
memory is bounded by `TILE` numbers, whatever the number of points.
"""
import torch

TILE = 2 ** 24  # distances held at once


def kmeans(points, k, weights=None, iterations=50, tries=1, seed=0):
    """The k centres with the smallest weighted squared distance, as found from k-means++ starts.

    points (P, N, n): P independent problems of N points; weights (P, N), 1 where not given. Returns centres (P, k, n),
    of the best of `tries` starts for each problem. A centre that loses all its points moves to the point that has the
    largest weighted distance. An integer weight is the same as that many copies of the point beside it.
    """
    points = points.float()
    weights = torch.ones_like(points[..., 0]) if weights is None else weights.float()
    dice = torch.Generator().manual_seed(seed)
    best = best_loss = None
    for _ in range(tries):
        centres = plus_plus(points, k, weights, dice)  # (P, k, n)
        for _ in range(iterations):
            moved = lloyd(points, weights, centres)
            if torch.equal(moved, centres):
                break
            centres = moved
        loss = (nearest(points, centres)[1] * weights).sum(1)  # (P)
        if best is None:
            best, best_loss = centres, loss
        better = loss < best_loss  # (P)
        best, best_loss = torch.where(better[:, None, None], centres, best), torch.where(better, loss, best_loss)
    return best


def plus_plus(points, k, weights, dice):
    """k-means++ start (P, k, n): each next centre is a point drawn with odds weight * squared distance so far."""
    P, N, n = points.shape
    odds, centres = weights, []  # (P, N)
    distance = torch.full_like(weights, float("inf"))  # (P, N): to the nearest centre so far
    for u in torch.rand(k, P, generator=dice).to(points.device):
        sums = odds.double().cumsum(1)  # (P, N)
        pick = torch.searchsorted(sums, sums[:, -1:] * u[:, None], right=True).clamp(max=N - 1)  # (P, 1)
        centres.append(points.gather(1, pick[..., None].expand(P, 1, n)))  # (P, 1, n)
        distance = torch.minimum(distance, (points - centres[-1]).pow(2).sum(-1))
        odds = weights * distance
    return torch.cat(centres, dim=1)


def nearest(points, centres):
    """The number of each point's nearest centre, ties to the first, and its squared distance: (P, N) both."""
    size = max(1, TILE // (len(points) * centres.shape[1] * centres.shape[2]))
    index, distance = [], []
    for tile in points.split(size, dim=1):  # (P, tile, n)
        square = (tile[:, :, None] - centres[:, None]).pow(2).sum(-1)  # (P, tile, k)
        best = square.min(-1)
        index.append(best.indices)
        distance.append(best.values)
    return torch.cat(index, dim=1), torch.cat(distance, dim=1)


def lloyd(points, weights, centres):
    """One step: every centre moves to the weighted mean of the points that are nearest to it. (P, k, n)"""
    (P, N, n), k = points.shape, centres.shape[1]
    index, distance = nearest(points, centres)
    total = torch.zeros(P, k, dtype=torch.double, device=points.device)
    total.scatter_add_(1, index, weights.double())  # (P, k)
    sums = torch.zeros(P, k, n, dtype=torch.double, device=points.device)
    sums.scatter_add_(1, index[..., None].expand(P, N, n), (points * weights[..., None]).double())
    moved = (sums / total[..., None]).float()  # (P, k, n)
    empty = total == 0  # (P, k)
    if empty.any():
        worst = (distance * weights).topk(min(k, N), dim=1).indices  # (P, k): a different point for each empty centre
        spare = worst.gather(1, (empty.cumsum(1) - 1).clamp(0, worst.shape[1] - 1))  # (P, k)
        moved = torch.where(empty[..., None], points.gather(1, spare[..., None].expand(P, k, n)), moved)
    return moved
