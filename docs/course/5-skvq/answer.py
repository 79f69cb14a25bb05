"""Assignment 5, SKVQ: groups of similar channels, each with its own clipped range.

Shapes: N tokens, C channels of a token (those of all its KV heads), n groups. `group` (C), integers
from 0 to n - 1, says which group a channel is in; every group has one at least. `bits` is a whole
number from 1 to 8. All numbers are fp32 unless it says otherwise.
"""
import torch

from tinykv.codecs.base import Codec, Codes, Pair, pack, to_heads, to_rows, unpack
from tinykv.methods.base import Method, first_tokens

ASSIGNMENT = "skvq"
FP8 = torch.float8_e4m3fn
SMALLEST, LARGEST = 2 ** -9, 448.0  # the smallest scale, and the largest number, that FP8 has
CHOICES = [(alpha / 32, centre) for alpha in range(32, 18, -1) for centre in (0, 1)]


# Task 1: groups of similar channels

def clusters(points, n):  # given
    """Clusters of points (P, dim): begins with one for each point, and merges the two whose union costs least, as
    the sum of squared distances to its mean, until n are left. Returns the cluster of each point, (P)."""
    label, means, sizes = torch.arange(len(points)), points.double(), torch.ones(len(points)).double()
    while len(means) > n:
        share = sizes[:, None] * sizes / (sizes[:, None] + sizes)  # (clusters, clusters)
        cost = share * (means[:, None] - means).pow(2).sum(-1)
        cost.fill_diagonal_(torch.inf)
        first, last = sorted(divmod(int(cost.argmin()), len(means)))
        means[first] = (sizes[first] * means[first] + sizes[last] * means[last]) / (sizes[first] + sizes[last])
        sizes[first] += sizes[last]
        rest = torch.arange(len(means)) != last
        label[label == last] = first
        label[label > last] -= 1
        means, sizes = means[rest], sizes[rest]
    return label


def channel_ranges(x, kept):
    """The smallest and the largest number of each channel, (lo, hi), (C) each. x (N, C). kept (N),
    booleans, or None: True at tokens that are never quantized, and do not count."""
    # answer
    rows = x if kept is None else x[~kept]
    return rows.min(dim=0).values, rows.max(dim=0).values


def make_groups(lo, hi, n):
    """Cluster the channels by (lo, hi), (C) each, into n groups -> the group of each, (C) integers,
    with `clusters`."""
    # answer
    return clusters(torch.stack([lo, hi], dim=1), n)


# Task 2: the clipped grid

def grid(lo, hi, bits, alpha, centre):
    """The step h and the zero point z of groups whose numbers lie between lo and hi, before they are
    rounded to FP8: (h, z), both of the shape of lo.

    lo, hi: of one shape. alpha, centre: of a shape that broadcasts to it; centre holds 0 and 1. The
    range is shrunk by the factor alpha, towards 0 where centre is 0, towards its own middle where
    centre is 1. h is at least SMALLEST and at most LARGEST, z between -LARGEST and LARGEST.
    """
    # answer
    steps = 2 ** bits - 1
    h = alpha * (hi - lo) / steps
    towards_zero = alpha * lo
    towards_middle = (lo + hi) / 2 - alpha * (hi - lo) / 2
    z = centre * towards_middle + (1 - centre) * towards_zero
    return h.clamp(SMALLEST, LARGEST), z.clamp(-LARGEST, LARGEST)


# Task 3: codes

def encode(x, group, bits, alpha, centre):
    """Quantize x (N, C). alpha, centre (n): of each group.

    Returns (codes, h, z): codes (N, C) uint8, from 0 to 2^bits - 1, channels in their own order;
    h and z (N, n) in FP8, for each token and group. Codes are computed from h and z as they are
    stored, and rounded half to even.
    """
    # answer
    codes = torch.zeros(x.shape, dtype=torch.uint8)
    all_h, all_z = [], []
    for g in range(int(group.max()) + 1):
        members = group == g
        part = x[:, members]
        low, high = part.min(dim=1).values, part.max(dim=1).values
        h, z = grid(low, high, bits, alpha[g], centre[g])
        h, z = h.to(FP8), z.to(FP8)
        real = (part - z.float()[:, None]) / h.float()[:, None]
        codes[:, members] = real.round().clamp(0, 2 ** bits - 1).to(torch.uint8)
        all_h.append(h)
        all_z.append(z)
    return codes, torch.stack(all_h, dim=1), torch.stack(all_z, dim=1)


def decode(codes, h, z, group):
    """What `encode` gave -> the numbers that it is read as, (N, C)."""
    # answer
    h, z = h.float(), z.float()
    return codes.float() * h[:, group] + z[:, group]


# Task 4: how much to clip

def clip_losses(x, group, bits, choices, weight):
    """What each choice costs each group: the sum of w (X - X')^2 over its numbers, (choices, n).

    x (N, C). choices: a list of pairs (alpha, centre), of which each is tried for all groups. weight
    (N): w of each token. X' is what `encode` and `decode` make of X.
    """
    # answer
    n = int(group.max()) + 1
    losses = torch.zeros(len(choices), n)
    for i, (alpha, centre) in enumerate(choices):
        codes, h, z = encode(x, group, bits, torch.full((n,), alpha), torch.full((n,), float(centre)))
        errors = (x - decode(codes, h, z, group)) ** 2 * weight[:, None]
        for g in range(n):
            losses[i, g] = errors[:, group == g].sum()
    return losses


# given: the codec of one layer's K or V that calls your functions, and the method

class Regrouped(Codec):
    needs_text = needs_gradient = True  # of calibration
    tables = ("group", "alpha", "centre")

    def __init__(self, bits, heads, width, group_size):
        self.bits, self.width = bits, width
        self.n = heads * width // group_size
        self.group = self.alpha = self.centre = None

    def fit(self, rows, kept, gradient, seed=0):
        x = to_rows(rows.float()).flatten(0, 1)  # (N, C), N = W * T
        kept = kept.all(1).flatten()  # (N)
        # 1. groups
        labels = make_groups(*channel_ranges(x, kept), self.n)  # (C)
        self.group = labels.unique(return_inverse=True)[1]  # without empty groups
        # 2. clips: a token whose row the loss feels more weighs more
        weight = gradient.float().pow(2).sum((1, 3)).sqrt().flatten()  # (N)
        weight = weight.masked_fill(kept, 0)
        loss = clip_losses(x, self.group, self.bits, CHOICES, weight)  # (choices, n)
        self.alpha, self.centre = torch.tensor(CHOICES)[loss.argmin(0)].unbind(-1)  # (n) both

    def encode(self, x, ignore=None):
        rows = to_rows(x.float())  # (B, T, C)
        codes, h, z = encode(rows.flatten(0, 1), self.group, self.bits, self.alpha, self.centre)
        packed, h, z = (part.view(len(x), 1, -1, part.shape[1]) for part in (pack(codes, self.bits), h, z))
        return Codes(packed, scale=h, zero=z)

    def decode(self, codes):
        q = unpack(codes.packed, self.bits, len(self.group))  # (B, 1, T, C)
        flat, h, z = (part.flatten(0, 2) for part in (q, codes.scale, codes.zero))
        rows = decode(flat, h, z, self.group)  # (N, C)
        return to_heads(rows.unflatten(0, (len(q), -1)), self.width)


class SKVQ(Method):
    rope = "pre"
    block = 16

    def __init__(self, config, k_bits=2, v_bits=2, group_size=32, preserve=5, recent=128):
        super().__init__(config)
        shape = config.num_key_value_heads, config.head_dim, group_size
        self.codecs = [Pair(Regrouped(k_bits, *shape), Regrouped(v_bits, *shape))
                       for _ in range(config.num_hidden_layers)]
        self.scheme = "skvq"
        self.preserve, self.recent = preserve, recent

    def keep_keys(self, layer_cache, n):
        return first_tokens(layer_cache, self.preserve)
