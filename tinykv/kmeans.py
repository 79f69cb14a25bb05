"""Weighted k-means, many problems at a time.

It finds SKVQ's groups of channels, KVQuant's levels, and the codebooks of CQ and AnTKV.

Everything is torch and batched over the problems, so it runs where the points are. Distances are computed for as many
points at a time as memory should hold, however many points there are.
"""
import torch

MAX_DISTANCES = 2 ** 20  # distances held at once on a CPU: they then stay in its cache
MAX_DISTANCES_GPU = 2 ** 26


def kmeans(points, k, weights=None, iterations=25, tries=1, seed=0, tolerance=0.0):
    """The k centroids with the smallest weighted squared distance to the points that was found.

    points (P, N, n): P independent problems of N points. weights (P, N): 1 where not given; an integer weight is the
    same as that many copies of the point beside it. Returns centroids (P, k, n): for each problem those of the best of
    `tries` k-means++ starts. It ends after `iterations` steps, once no centroid moves, or once a step lowers no
    problem's distance by more than a share `tolerance`.
    """
    P = len(points)
    if weights is None:
        weights = torch.ones_like(points[..., 0])
    # tries are more problems side by side
    points = points.float().repeat(tries, 1, 1)  # (tries * P, N, n)
    weights = weights.float().repeat(tries, 1)  # (tries * P, N)
    rng = torch.Generator().manual_seed(seed)
    centroids = plus_plus(points, k, weights, rng)  # (tries * P, k, n)
    loss = torch.full((tries * P,), float("inf"), dtype=torch.float32, device=points.device)  # (tries * P)
    for _ in range(iterations):
        loss_before, centroids_before = loss, centroids
        centroids, loss = lloyd(points, weights, centroids)
        if torch.equal(centroids, centroids_before) or (loss_before - loss < tolerance * loss).all():
            break
    if tries == 1:
        return centroids
    # the best try of each problem
    square = distance(points, centroids, nearest(points, centroids))  # (tries * P, N)
    loss = (square * weights).sum(1).view(tries, P)
    best = loss.argmin(0)  # (P)
    return centroids.view(tries, P, k, -1)[best, torch.arange(P, device=best.device)]  # (P, k, n)


def plus_plus(points, k, weights, rng):
    """k-means++ start (P, k, n): centroids are points, drawn one after another.

    A point's odds are its weight times its squared distance to the centroids drawn so far. One centroid is drawn at a
    time at first, later an eighth of those that there are; or 4,096 centroids would take 4,096 rounds.
    """
    P, N, n = points.shape
    # the last of the points that weigh anything: a draw on the far edge falls on it
    last = (weights > 0).cumsum(1).argmax(1, keepdim=True)  # (P, 1)
    centroids = points[:, :0]  # (P, 0, n)
    odds = weights  # (P, N)
    least = torch.full_like(weights, float("inf"))  # (P, N): squared distance to the nearest centroid
    while centroids.shape[1] < k:
        count = min(max(1, centroids.shape[1] // 8), k - centroids.shape[1])
        # draw: a random number between 0 and the sum of the odds falls on a point
        sums = odds.double().cumsum(1)  # (P, N)
        u = torch.rand(P, count, dtype=torch.float32, generator=rng).to(points.device)
        drawn = torch.searchsorted(sums, sums[:, -1:] * u, right=True)  # (P, count)
        drawn = drawn.minimum(last)
        new = points.gather(1, drawn[..., None].expand(P, count, n))  # (P, count, n)
        centroids = torch.cat([centroids, new], dim=1)
        # points near to a centroid become unlikely
        least = torch.minimum(least, distance(points, new, nearest(points, new)))
        odds = weights * least
    return centroids


def nearest(points, centroids):
    """The index of each point's nearest centroid, of equals the first.

    points (P, N, n), centroids (P, k, n) -> (P, N).
    """
    # |x - c|^2 is smallest where x c - |c|^2 / 2 is largest: the product of rows (x, -1) and
    # (c, |c|^2 / 2)
    N, k = points.shape[1], centroids.shape[1]
    half_square = centroids.pow(2).sum(-1, keepdim=True) / 2  # (P, k, 1)
    centroids = torch.cat([centroids, half_square], dim=-1).transpose(1, 2)  # (P, n + 1, k)
    points = torch.nn.functional.pad(points, (0, 1), value=-1.0)  # (P, N, n + 1)
    # many small problems at a time, or points of one: products of many short blocks are slow
    size = max(1, (MAX_DISTANCES_GPU if points.is_cuda else MAX_DISTANCES) // k)  # points at a time
    index = []
    for some, c in zip(points.split(max(1, size // N)), centroids.split(max(1, size // N))):
        index.append(torch.cat([argmax(part @ c) for part in some.split(size, dim=1)], dim=1))
    return torch.cat(index)


def argmax(x):
    """The index of the largest number of each row, of equals the first: x (..., k) -> (...)."""
    if x.is_cuda or x.shape[-1] == 1:
        return x.argmax(-1)
    # on a CPU, numpy is several times faster than torch where rows are long, and slower where they are single numbers
    return torch.from_numpy(x.detach().numpy().argmax(-1))


def distance(points, centroids, index):
    """The squared distance (P, N) of each point to the centroid that `index` (P, N) gives it."""
    P, k, n = centroids.shape
    row = index + k * torch.arange(P, device=index.device)[:, None]  # (P, N): among the centroids of all problems
    own = torch.nn.functional.embedding(row, centroids.reshape(-1, n))  # (P, N, n)
    return (points - own).pow(2).sum(-1)


def lloyd(points, weights, centroids):
    """One step: every centroid moves to the weighted mean of the points that are nearest to it.

    A centroid without such points moves to the point that is furthest from its own centroid. Returns the centroids (P,
    k, n), and the weighted squared distance (P) to the centroids before the step.
    """
    P, N, n = points.shape
    k = centroids.shape[1]
    # assign each point to its nearest centroid
    index = nearest(points, centroids)  # (P, N)
    square = distance(points, centroids, index)  # (P, N)
    # weighted mean of each centroid's points, in double
    total = torch.zeros(P, k, dtype=torch.double, device=points.device)
    total.scatter_add_(1, index, weights.double())  # (P, k)
    sums = torch.zeros(P, k, n, dtype=torch.double, device=points.device)
    weighted = (points * weights[..., None]).double()  # (P, N, n)
    sums.scatter_add_(1, index[..., None].expand(P, N, n), weighted)  # (P, k, n)
    moved = (sums / total[..., None]).float()  # (P, k, n)
    # the centroids without any weight move to the furthest points, each to another
    empty = total == 0  # (P, k)
    if empty.any():
        furthest = square.where(weights > 0, -1).topk(min(k, N), dim=1).indices  # (P, k)
        rank = empty.cumsum(1) - 1  # (P, k): 0 for the first empty centroid, 1 for the second, ..
        rank = rank.clamp(0, furthest.shape[1] - 1)
        spare = furthest.gather(1, rank)  # (P, k)
        spare = points.gather(1, spare[..., None].expand(P, k, n))  # (P, k, n)
        moved = torch.where(empty[..., None], spare, moved)
    return moved, (square * weights).sum(1)
