"""Assignment 5, SKVQ: groups of similar channels, clipped ranges, scales in FP8."""
import torch

from tinykv.course.check import check, expect, expect_tensor, normal, shown

NUMBER, TITLE = 5, "SKVQ's clip and reorder"
ANSWERS = ("tinykv.codecs.clipped", "tinykv.methods.skvq")
BLANKS = {"tinykv/codecs/clipped.py": ("ClippedGroups.collect_ranges", "ClippedGroups.make_groups",
                                       "ClippedGroups.losses", "ClippedGroups.ranges", "ClippedGroups.coded",
                                       "ClippedGroups.grid", "ClippedGroups.quantize", "ClippedGroups.dequantize"),
          "tinykv/methods/skvq.py": ()}  # its worked example goes, too

FP8 = torch.float8_e4m3fn


# ---- the answer in plain numbers

def fp8(x):
    return torch.tensor(x).to(FP8).float().item()


def plain_grid(lo, hi, bits, alpha, centre):
    h = alpha * (hi - lo) / (2 ** bits - 1)
    z = (lo + hi) / 2 - alpha * (hi - lo) / 2 if centre else alpha * lo
    return min(max(h, 2 ** -9), 448.0), min(max(z, -448.0), 448.0)


def plain_group(numbers, bits, alpha, centre):
    """One group of one token -> (codes, h, z), h and z as they are stored."""
    h, z = (fp8(x) for x in plain_grid(min(numbers), max(numbers), bits, alpha, centre))
    return [min(max(round((x - z) / h), 0), 2 ** bits - 1) for x in numbers], h, z


def plain_read(x, group, bits, clips):
    """x (N, C) -> what it is read as, a tensor. clips: (alpha, centre) of each group."""
    read = torch.zeros(x.shape)
    for i, row in enumerate(x.tolist()):
        for g, clip in enumerate(clips):
            members = [c for c, label in enumerate(group) if label == g]
            codes, h, z = plain_group([row[c] for c in members], bits, *clip)
            for c, q in zip(members, codes):
                read[i, c] = h * q + z
    return read


def plain_losses(x, group, bits, choices, weight):
    """[choice][group]"""
    n = max(group) + 1
    found = []
    for choice in choices:
        errors = (x - plain_read(x, group, bits, [choice] * n)).pow(2) * weight[:, None]
        found.append([errors[:, torch.tensor(group) == g].sum().item() for g in range(n)])
    return found


def group_of(rng, n, size):
    """Labels of n groups of `size` channels, in any order: a list."""
    return rng.sample([g for g in range(n) for _ in range(size)], n * size)


def encoded(submission, x, group, bits, clips):
    """What encode gives: lists of codes, h and z."""
    n = len(clips)
    alpha, centre = torch.tensor(clips, dtype=torch.float32).unbind(-1)
    given = submission.encode(x.clone(), torch.tensor(group), bits, alpha, centre)
    expect(isinstance(given, tuple) and len(given) == 3, f"encode has to return (codes, h, z); yours gives {given!r}.")
    codes, h, z = given
    expect_tensor(codes, "integers", x.shape, "What encode gives as codes")
    expect_tensor(h, "numbers", (len(x), n), "What encode gives as h")
    expect_tensor(z, "numbers", (len(x), n), "What encode gives as z")
    return codes.tolist(), h.float().tolist(), z.float().tolist()


# ---- task 1: groups

@check(points=6)
def ranges_of_channels(submission, rng):
    """channel_ranges: the smallest and the largest number of each channel"""
    x = normal(rng, rng.randint(3, 5), 4)
    given = submission.channel_ranges(x.clone(), None)
    expect(isinstance(given, (tuple, list)) and len(given) == 2, "channel_ranges has to return (lo, hi).")
    columns = x.T.tolist()
    for name, found, pick in (("lo", given[0], min), ("hi", given[1], max)):
        expect_tensor(found, "numbers", (4,), f"{name} of channel_ranges")
        want = [pick(column) for column in columns]
        expect(found.tolist() == want, f"For x = {shown(x)}, a list for each token, {name} is {shown(found)}; it "
               f"should be {shown(want)}: over the tokens, for each channel.")


@check(points=4)
def ranges_without_kept_tokens(submission, rng):
    """channel_ranges: kept tokens do not count"""
    x = normal(rng, 4, 3) + 5
    at = rng.randint(0, 3)
    x[at] = torch.tensor([-50.0, 50.0, 0.0])
    kept = torch.arange(4) == at
    lo, hi = submission.channel_ranges(x.clone(), kept)
    others = [row for i, row in enumerate(x.tolist()) if i != at]
    want = [[pick(column) for column in zip(*others)] for pick in (min, max)]
    found = [lo.tolist(), hi.tolist()]
    expect(found == want, f"Token {at} is kept, with {shown(x[at])}. (lo, hi) is {shown(found)}; it should be "
           f"{shown(want)}. Leave the token out; a 0 in its place would count, too.")


@check(points=8)
def groups(submission, rng):
    """make_groups: channels with similar (lo, hi) are together"""
    places = [(-1.0, 1.0), (-1.0, 20.0), (-20.0, 1.0)]  # two agree in lo, and two in hi
    group = group_of(rng, 3, 4)
    lo, hi = (torch.tensor([places[g][end] + rng.uniform(-0.3, 0.3) for g in group]) for end in (0, 1))
    labels = submission.make_groups(lo.clone(), hi.clone(), 3)
    expect_tensor(labels, "integers", (12,), "What make_groups gives")
    found = labels.tolist()
    low, high = min(found), max(found)
    expect(low >= 0 and high < 3, f"n = 3, and make_groups gives labels from {low} to {high}; they should lie between "
           "0 and 2.")
    for a in range(12):
        for b in range(a):
            same = group[a] == group[b]
            expect((found[a] == found[b]) == same,
                   f"Channel {a} has the range {shown([lo[a], hi[a]])}, channel {b} {shown([lo[b], hi[b]])}; n = 3. "
                   f"They are {'not ' if same else ''}in the same group, and should{'' if same else ' not'} be. A "
                   "point is the pair (lo, hi).")


# ---- task 2: the grid

def try_grid(submission, lo, hi, bits, alpha, centre, hint):
    given = submission.grid(torch.tensor([lo]), torch.tensor([hi]), bits, torch.tensor([alpha]),
                            torch.tensor([float(centre)]))
    expect(isinstance(given, (tuple, list)) and len(given) == 2, "grid has to return (h, z).")
    want = plain_grid(lo, hi, bits, alpha, centre)
    for name, found, right in zip("hz", given, want):
        expect_tensor(found, "numbers", (1,), f"{name} of grid")
        expect(abs(found.item() - right) <= 1e-4 * max(abs(right), 1e-3),
               f"lo = {lo:.4g}, hi = {hi:.4g}, {bits} bits, alpha = {alpha:g}, centre = {centre}: {name} is "
               f"{found.item():.4g}; it should be {right:.4g}. {hint}")


@check(points=6)
def grid_towards_zero(submission, rng):
    """grid: centre = 0 multiplies both ends by alpha"""
    for bits in (2, 3):
        lo = rng.uniform(-9, -2)
        try_grid(submission, lo, rng.uniform(3, 9), bits, rng.choice((0.625, 0.75)), 0,
                 "h = alpha (hi - lo) / (2^bits - 1), z = alpha lo.")


@check(points=6)
def grid_towards_the_middle(submission, rng):
    """grid: centre = 1 shrinks the range around its middle"""
    lo = rng.uniform(5, 8)
    try_grid(submission, lo, lo + rng.uniform(3, 6), rng.choice((2, 3)), rng.choice((0.625, 0.75)), 1,
             "The middle of the range stays where it is: the new lo is the middle minus alpha (hi - lo) / 2.")


@check(points=4)
def grid_bounds(submission, rng):
    """grid: what FP8 cannot hold is moved to what it can"""
    x = rng.uniform(2, 9)
    try_grid(submission, x, x, 2, 1.0, 0, "The range is a single number, and a step of 0 would divide by 0: h is at "
             "least 2^-9.")
    try_grid(submission, -rng.uniform(600, 900), 5.0, 2, 1.0, 0, "FP8 ends at 448.")


# ---- task 3: codes

def easy_groups(rng, n, size, bits):
    """Numbers of n groups of one token whose h and z are exact in FP8: a list of lists."""
    drawn = []
    for _ in range(n):
        h, z, top = rng.choice((0.25, 0.5, 1.0)), rng.randint(-8, 8), 2 ** bits - 1
        codes = [0, top, *(rng.randint(1, top - 1) + rng.choice((-0.25, 0.25)) for _ in range(size - 2))]
        drawn.append([z + h * q for q in rng.sample(codes, size)])
    return drawn


def rows_of(rng, N, group, n, size, bits):
    """Numbers (N, C) such that each group of each token is one of `easy_groups`."""
    rows = []
    for _ in range(N):
        numbers = easy_groups(rng, n, size, bits)
        rows.append([numbers[g].pop() for g in group])
    return torch.tensor(rows)


def judge_codes(found, x, group, bits, clips, hint):
    codes, h, z = found
    for i, row in enumerate(x.tolist()):
        for g, clip in enumerate(clips):
            members = [c for c, label in enumerate(group) if label == g]
            numbers = [row[c] for c in members]
            want, right_h, right_z = plain_group(numbers, bits, *clip)
            tried = (f"Group {g} of token {i}, channels {members}, has {shown(numbers, 4)}; {bits} bits, alpha = "
                     f"{clip[0]:g}, centre = {clip[1]}.")
            expect((h[i][g], z[i][g]) == (right_h, right_z), f"{tried} Its h and z are {h[i][g]:g} and {z[i][g]:g}; "
                   f"they should be {right_h:g} and {right_z:g}.")
            got = [codes[i][c] for c in members]
            expect(got == want, f"{tried} With h = {right_h:g} and z = {right_z:g} its codes are {got}; they should be "
                   f"{want}. {hint}")


@check(points=8)
def codes_of_groups(submission, rng):
    """encode: each group of each token has its own grid, and channels stay in place"""
    bits, n, size = rng.choice((2, 3)), 3, 4
    group = group_of(rng, n, size)
    x = rows_of(rng, 3, group, n, size, bits)
    clips = [(1.0, 0)] * n
    judge_codes(encoded(submission, x, group, bits, clips), x, group, bits, clips,
                "Codes stand at the places of their channels.")


@check(points=6)
def codes_are_clamped(submission, rng):
    """encode: numbers beyond a clipped range get the first or the last code"""
    s, k = rng.choice((0.25, 0.5, 1.0)), rng.randint(-6, -4)
    lo = s * k
    clipped = [lo, lo + 6 * s, *(lo + s * (q + 0.25) for q in rng.sample(range(1, 6), 4))]
    x = torch.tensor([clipped + easy_groups(rng, 1, 6, 2)[0]])
    group, clips = [0] * 6 + [1] * 6, [(0.5, 1), (1.0, 0)]
    judge_codes(encoded(submission, x, group, 2, clips), x, group, 2, clips, "Clamp the codes to 0 .. 2^bits - 1.")


@check(points=8)
def codes_from_stored_grids(submission, rng):
    """encode: codes are computed from h and z as FP8 holds them"""
    base = rng.choice((8, 9, 10, 12))
    lo = base + 0.4  # FP8 has whole numbers here, and rounds to the base
    x = torch.tensor([[lo, lo + 2.25, base + 1.0, base + 1.7]])
    clips = [(1.0, 0)]
    codes, h, z = encoded(submission, x, [0] * 4, 2, clips)
    want, right_h, right_z = plain_group(x[0].tolist(), 2, 1.0, 0)
    tried = f"A group has {shown(x[0], 4)}, 2 bits, alpha = 1."
    expect((h[0][0], z[0][0]) == (right_h, right_z), f"{tried} h and z are {h[0][0]:g} and {z[0][0]:g}; in FP8 they "
           f"should be {right_h:g} and {right_z:g}.")
    expect(codes[0] == want, f"{tried} z is rounded from {lo:g} to {right_z:g}, and the codes are {codes[0]}; they "
           f"should be {want}. Round h and z to FP8 first: codes then make up for the rounding.")


@check(points=4)
def stored_in_fp8(submission, rng):
    """encode: codes are uint8, h and z FP8"""
    given = submission.encode(normal(rng, 2, 4), torch.tensor([0, 1, 1, 0]), 2, torch.ones(2), torch.zeros(2))
    for name, part, dtype in zip(("codes", "h", "z"), given, (torch.uint8, FP8, FP8)):
        expect(part.dtype == dtype, f"What encode gives as {name} has the type {part.dtype}; it should have {dtype}.")


@check(points=6)
def decoding(submission, rng):
    """decode: each channel takes h and z of its group"""
    N, n, size = 2, 3, 2
    group = group_of(rng, n, size)
    codes = torch.tensor([[rng.randint(0, 3) for _ in group] for _ in range(N)])
    h = torch.tensor([rng.sample((0.25, 0.5, 1.0), n) for _ in range(N)])
    z = torch.tensor([[float(x) for x in rng.sample(range(-8, 9), n)] for _ in range(N)])
    found = submission.decode(codes.to(torch.uint8), h.to(FP8), z.to(FP8), torch.tensor(group))
    expect_tensor(found, "numbers", (N, len(group)), "What decode gives")
    for i in range(N):
        want = [(h[i, g] * q + z[i, g]).item() for g, q in zip(group, codes[i].tolist())]
        expect(found[i].tolist() == want, f"group = {group}; token {i} has codes {codes[i].tolist()}, "
               f"h = {shown(h[i])} and z = {shown(z[i])}. It is read as {shown(found[i])}; it should be {shown(want)}.")


# ---- task 4: clips

def try_losses(submission, rng, weight, hint):
    N, n, size, bits = len(weight), 2, 4, 2
    group, choices = group_of(rng, n, size), [(1.0, 0), (0.75, 0), (0.75, 1), (0.5, 1)]
    x = normal(rng, N, n * size) * 2 + torch.tensor([(-1.0, 10.0)[g] for g in group])
    weight = torch.tensor(weight)
    found = submission.clip_losses(x.clone(), torch.tensor(group), bits, choices, weight.clone())
    expect_tensor(found, "numbers", (len(choices), n), "What clip_losses gives")
    want = plain_losses(x, group, bits, choices, weight)
    for choice, row, right in zip(choices, found.tolist(), want):
        near = all(abs(a - b) <= 1e-3 * b + 1e-4 for a, b in zip(row, right))
        expect(near, f"{N} tokens with weights {shown(weight)}, group = {group}, 2 bits: alpha = {choice[0]} and "
               f"centre = {choice[1]} cost the groups {shown(row, 4)}; it should be {shown(right, 4)}. {hint}")


@check(points=5)
def losses_of_choices(submission, rng):
    """clip_losses: the sum of squared errors of each group, for each choice"""
    try_losses(submission, rng, [1.0] * rng.randint(7, 9), "Sum (X - X')^2 over the tokens and the group's channels.")


@check(points=3)
def losses_with_weights(submission, rng):
    """clip_losses: each token's errors count with its weight"""
    weight = [float(w) for w in rng.sample((0, 0, 1, 1, 2, 2, 3, 3), 8)]
    try_losses(submission, rng, weight, "Multiply each token's squared errors by its weight; one of weight 0 does not "
               "count.")


# ---- all of it

@check(points=6)
def calibration(submission, rng):
    """All of it: the codec is calibrated, and reads what it should"""
    heads, width, n, bits = 2, 6, 3, 2
    C = heads * width
    group = group_of(rng, n, C // n)
    middle = torch.tensor([(0.0, -9.0, 9.0)[g] for g in group])
    windows = normal(rng, 2, 10, C) + middle  # (W, T, C)
    gradients = normal(rng, 2, 10, C)
    codec = submission.Regrouped(bits, heads, width, C // n)
    for step in range(2):
        codec.begin(step, 2, 10)
        for x, gradient in zip(windows, gradients):
            parts = (t.view(10, heads, width).transpose(0, 1) for t in (x, gradient))
            rows, gradient = parts
            codec.collect(step, rows.clone(), None, gradient)
        codec.fit(step)
    x = (normal(rng, 3, C) + middle).view(1, 3, heads, width)
    read = codec.decode(codec.encode(x.transpose(1, 2)))
    expect_tensor(read, "numbers", (1, heads, 3, width), "What the codec reads")
    found = read.transpose(1, 2).reshape(3, C)
    want = plain_read(x.view(3, C), group, bits, [(1.0, 0)] * n)  # about
    exact = x.reshape(3, C)
    error, right = (found - exact).norm().item(), (want - exact).norm().item()
    expect(error < 3 * right,
           f"Calibrated on two windows of {C} channels, whose groups should be {group}, the codec reads "
           f"{shown(exact[0])} as {shown(found[0])}; it should be about {shown(want[0])}. Each function has checks "
           "of its own.")
