"""Weighted k-means, many problems at a time: SKVQ's channels, KVQuant's levels, the codebooks of CQ and AnTKV.

Everything is torch and batched over the problems, so it runs where the points are. Distances are computed in tiles:
memory is bounded by the size of a tile, whatever the number of points.
"""
import torch

TILE = 2 ** 20  # distances held at once on a CPU: they then stay in its cache
GPU_TILE = 2 ** 26


def kmeans(points, k, weights=None, iterations=25, tries=1, seed=0, tolerance=0.0):
    """The k centres with the smallest weighted squared distance, as found from k-means++ starts.

    points (P, N, n): P independent problems of N points; weights (P, N), 1 where not given. Returns centres (P, k, n),
    of the best of `tries` starts for each problem. A centre that loses all its points moves to the point that is
    furthest from its own. An integer weight is the same as that many copies of the point beside it. It ends after
    `iterations`, once no centre moves, or once a step lowers no problem's distance by more than a share `tolerance`.
    """
    P = len(points)
    weights = torch.ones_like(points[..., 0]) if weights is None else weights
    points, weights = points.float().repeat(tries, 1, 1), weights.float().repeat(tries, 1)  # tries are more problems
    centres = plus_plus(points, k, weights, torch.Generator().manual_seed(seed))  # (tries * P, k, n)
    loss = torch.full((tries * P,), float("inf"), device=points.device)  # (tries * P): before the last step
    for _ in range(iterations):
        before, last = loss, centres
        centres, loss = lloyd(points, weights, centres)
        if torch.equal(centres, last) or (before - loss < tolerance * loss).all():
            break
    loss = (distance(points, centres, nearest(points, centres)) * weights).sum(1).view(tries, P)
    return centres.view(tries, P, k, -1)[loss.argmin(0), torch.arange(P, device=loss.device)]


def plus_plus(points, k, weights, dice):
    """k-means++ start (P, k, n): centres are points, drawn with odds weight * squared distance to those drawn so far.

    One at a time at first, then an eighth of what there is in each round, or 4,096 centres would take 4,096 rounds.
    """
    P, N, n = points.shape
    last = (weights > 0).cumsum(1).argmax(1, keepdim=True)  # (P, 1): of the points that weigh anything, the last
    odds, centres = weights, points[:, :0]  # (P, N), (P, 0, n)
    least = torch.full_like(weights, float("inf"))  # (P, N): squared distance to the nearest centre so far
    while centres.shape[1] < k:
        count = min(max(1, centres.shape[1] // 8), k - centres.shape[1])
        u = torch.rand(P, count, generator=dice).to(points.device)
        sums = odds.double().cumsum(1)  # (P, N)
        pick = torch.searchsorted(sums, sums[:, -1:] * u, right=True).minimum(last)  # (P, count)
        new = points.gather(1, pick[..., None].expand(P, count, n))  # (P, count, n)
        least = torch.minimum(least, distance(points, new, nearest(points, new)))
        odds, centres = weights * least, torch.cat([centres, new], dim=1)
    return centres


def nearest(points, centres):
    """The number of each point's nearest centre. points (P, N, n), centres (P, k, n) -> (P, N)."""
    # |x - c|^2 is smallest where x c - |c|^2 / 2 is largest: one product, with a column more
    centres = torch.cat([centres, centres.pow(2).sum(-1, keepdim=True) / 2], dim=-1).transpose(1, 2)  # (P, n + 1, k)
    points = torch.nn.functional.pad(points, (0, 1), value=-1.0)  # (P, N, n + 1)
    numbers, size = [], GPU_TILE if points.is_cuda else TILE
    for tile in points.split(max(1, size // (len(points) * centres.shape[2])), dim=1):  # (P, tile, n + 1)
        numbers.append(argmax(tile @ centres))
    return torch.cat(numbers, dim=1)


def argmax(x):
    """x.argmax(-1); of long rows in a CPU's memory numpy finds it several times faster than torch."""
    return x.argmax(-1) if x.device.type != "cpu" else torch.from_numpy(x.numpy().argmax(-1))


def distance(points, centres, index):
    """Squared distance (P, N) of each point to the centre of its number."""
    return (points - centres.gather(1, index[..., None].expand_as(points))).pow(2).sum(-1)


def lloyd(points, weights, centres):
    """One step: every centre moves to the weighted mean of the points that are nearest to it.

    Returns the centres (P, k, n), and the weighted squared distance (P) to those before.
    """
    (P, N, n), k = points.shape, centres.shape[1]
    index = nearest(points, centres)  # (P, N)
    square = distance(points, centres, index)  # (P, N)
    total = torch.zeros(P, k, dtype=torch.double, device=points.device)
    total.scatter_add_(1, index, weights.double())  # (P, k)
    sums = torch.zeros(P, k, n, dtype=torch.double, device=points.device)
    sums.scatter_add_(1, index[..., None].expand(P, N, n), (points * weights[..., None]).double())
    moved = (sums / total[..., None]).float()  # (P, k, n)
    empty = total == 0  # (P, k)
    if empty.any():
        far = square.where(weights > 0, -1)  # (P, N)
        far = far.topk(min(k, N), dim=1).indices  # (P, k): another point for each empty centre
        spare = far.gather(1, (empty.cumsum(1) - 1).clamp(0, far.shape[1] - 1))  # (P, k)
        moved = torch.where(empty[..., None], points.gather(1, spare[..., None].expand(P, k, n)), moved)
    return moved, (square * weights).sum(1)
