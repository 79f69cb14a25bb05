"""Assignment 5, SKVQ: groups of similar channels, clipped grids in FP8."""
import pytest
import torch

AXES = "; token, channel or group; text, token, channel or group; text, head, token, channel"  # of tensors
EIGHT = [0.0, 9.0, 0.3, 11.0, 0.6, 10.0, 0.9, 12.0]
CENTRES = (torch.int64, torch.float32)  # as it comes from `CHOICES`, or from a table


def groups_of(rng, C, n):
    """The group of each of C channels, every group at least once."""
    return torch.tensor(rng.sample([*range(n), *rng.choices(range(n), k=C - n)], C))


def renamed(group):
    """Groups in the order in which they first occur."""
    names = {}
    return [names.setdefault(g, len(names)) for g in group.tolist()]


# The page

@pytest.mark.points(14)
def test_page(sub, rng, same):
    """the page: grid, Cache.write"""
    for case in range(6):
        B, C, alpha, dtype = 1 + case // 3, 8, rng.of((0.5, 0.75, 1.0), 3), (torch.half, sub.FP8)[case % 2]
        group = torch.tensor(rng.sample([0, 0, 0, 1, 1, 2, 2, 2], C))
        x = rng.of(range(-99, 100), B, rng.randint(1, 3), C) / 32  # any way of computing gives the same grid
        x[0, 0, group == 0] = 0.5  # a range of 0
        same.call(sub.grid, x, group, alpha, dtype, hint="A share alpha of the range is left, around its middle.",
                  names="scale|zero")
        tables = {(1, "k"): (group, alpha), (1, "v"): (group.flip(0), alpha.flip(0))}
        n_kept, n_recent, least = rng.randint(1, 3), (2, 0, 1)[case % 3], 1801 if case in (2, 4) else -99
        cache = sub.Cache(None, tables, dtype, n_kept, n_recent)
        for i in range(2):
            rows = {kind: (rng.of(range(least, least + 199), B, 3 + n_recent, C) / 32).half() for kind in "kv"}
            cache.recent |= {(1, kind): rows[kind] for kind in "kv"}
            cache.write(1)
            for kind in "kv":
                same([cache.blocks[1, kind][-1], len(cache.blocks[1, kind]), cache.kept[1, kind],
                      cache.recent[1, kind]], f"Cache.write of block {i}, {kind} of {tables}, {dtype}, n_kept = "
                     f"{n_kept}, n_recent = {n_recent}; recent rows {rows[kind].tolist()}",
                     names="block|how many blocks|first rows|recent rows, codes|scale|zero")


# Task 1

@pytest.mark.points(8)
def test_channel_ranges(sub, rng, same):
    """channel_ranges: the smallest and the largest number of each channel, without kept tokens"""
    for _ in range(40):
        N, C = rng.randint(2, 12), rng.randint(1, 6)
        x = (rng.normal(N, C) + rng.choice((-4, 0, 4))) * rng.choice((1, 1, 3e4))
        kept = rng.choice((None, rng.of((False, False, True), N)))
        if kept is not None:
            kept[rng.randrange(N)] = False
            x[kept] *= 100
        same.call(sub.channel_ranges, x, kept, names="lo|hi")


@pytest.mark.points(8)
def test_make_groups(sub, rng, same):
    """make_groups: channels with similar (lo, hi) are a group"""
    for _ in range(40):
        C = rng.randint(3, 12)
        n = rng.randint(1, C - 1)
        lo = rng.normal(C) * rng.choice((1, 10))
        hi = lo + rng.normal(C).abs() * rng.choice((1, 10))
        same.call(sub.make_groups, lo, hi, n, then=lambda group: [renamed(group), torch.is_floating_point(group)],
                  hint="A point is the pair (lo, hi). Groups are renamed here.", names="groups|whether floats, channel")


# Task 2

@pytest.mark.points(13)
def test_grid(sub, rng, same):
    """grid: the step and the zero point of a range that is clipped towards 0, or towards its middle; bounds"""
    for lo, hi, alpha, centre in ((9, 12, 1.0, 0), (9, 12, 0.75, 0), (9, 12, 0.75, 1), (2, 2, 1.0, 0),
                                  (-3000, 3000, 1.0, 1), (500, 600, 1.0, 0)):
        ends = torch.tensor([float(lo)]), torch.tensor([float(hi)])
        same.call(sub.grid, *ends, 2, torch.tensor([alpha]), torch.tensor([centre]))
    for _ in range(100):
        bits, n = rng.randint(1, 8), rng.randint(1, 3)
        # multiples of a power of two, so that any way of computing gives the same
        scale = rng.choice((2 ** -9, 1 / 8, 1 / 8, 32))
        lo = (rng.of(range(-16, 17), 2, n) + rng.choice((-72, 0, 72))) * scale
        hi = lo + rng.of(range(20), 2, n) * rng.choice((0, 1, 1, 9)) * scale
        alpha, centre = rng.of((0.5, 0.75, 0.875, 1.0), n), rng.of((0, 1), n).to(rng.choice(CENTRES))
        h, z = same.call(sub.grid, lo, hi, bits, alpha, centre, names="h|z")
        for i, j in ((i, j) for i in range(2) for j in range(n)):
            same([h[i, j], z[i, j]], f"grid of lo = {lo[i, j]:g}, hi = {hi[i, j]:g} in {bits} bits, alpha = "
                 f"{alpha[j]:g}, centre = {centre[j]:g}: (h, z), before FP8", names="h|z")


# Task 3

@pytest.mark.points(7)
def test_codes_of_eight_numbers(sub, rng, same):
    """encode, decode: the handout's eight numbers"""
    x = torch.tensor([EIGHT])
    half = torch.tensor([[0.0, 3.0, 0.5, 1.5, 2.5]])  # in the middle between two codes
    neighbours, mixed = [0] * 4 + [1] * 4, [0, 1] * 4
    for numbers, group, alpha, centre in ((x, neighbours, 1.0, 0), (x, mixed, 1.0, 0), (half, [0] * 5, 1.0, 0),
                                          (x, mixed, 0.75, 0), (x, mixed, 0.75, 1), (rng.normal(1, 8), mixed, 1.0, 0)):
        group = torch.tensor(group)
        n = int(group.max()) + 1
        codes = sub.encode(numbers, group, 2, torch.full((n,), alpha), torch.full((n,), centre))
        same([codes, sub.decode(*codes, group)], f"{numbers.tolist()} in the groups {group.tolist()}, 2 bits, alpha = "
             f"{alpha}, centre = {centre}. Codes come from the stored h and z.", names="encode|decode, codes|h|z")


@pytest.mark.points(20)
def test_codes(sub, rng, same):
    """encode, decode: any groups, bits and clips"""
    for _ in range(80):
        N, C, bits = rng.randint(1, 4), rng.choice((*range(2, 10), 48)), rng.choice((1, 2, 2, 3, 4, 8))
        n = rng.choice((1, rng.randint(1, C), C))
        group = groups_of(rng, C, n)
        x = rng.normal(N, C) * rng.choice((0.1, 1, 5, 400)) + rng.choice((-6, 0, 3))
        alpha, centre = rng.of((0.6, 0.75, 1.0), n), rng.of((0, 1), n).to(rng.choice(CENTRES))
        same.call(sub.encode, x, group, bits, alpha, centre, hint="Codes stand in the channels' own order.",
                  names="codes|h|z")
        codes = rng.of(range(2 ** bits), N, C).to(torch.uint8)
        h = rng.of((0.25, 1, 3, 448), N, n).to(torch.float8_e4m3fn)
        z = rng.of((-20, 0, 1.5), N, n).to(torch.float8_e4m3fn)
        same.call(sub.decode, codes, h, z, group)


# Task 4

@pytest.mark.points(10)
def test_clip_losses(sub, rng, same):
    """clip_losses: what each choice costs each group"""
    for _ in range(25):
        N, C, bits = rng.randint(1, 6), rng.randint(2, 8), rng.choice((1, 2, 3))
        n = rng.randint(1, C)
        group, weight = groups_of(rng, C, n), rng.of((0, 0.03125, 0.5, 1, 3), N)
        x = rng.normal(N, C) + rng.choice((0, 5))
        choices = [(rng.choice((0.5, 0.75, 1.0)), rng.choice((0, 1))) for _ in range(rng.randint(1, 4))]
        same.call(sub.clip_losses, x, group, bits, choices, weight, hint="Sums of w (X-X')^2.", names="; choice, group")
