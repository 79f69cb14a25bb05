"""Groups of similar channels, each with its own clipped range: SKVQ's codec.

Three ingredients, and each can be switched off:
- reorder. k-means over the channels of a layer, all KV heads together, by (smallest, largest value) on calibration
  text. The clusters are the groups, of G channels on average.
- clip. A group's range is shrunk by a factor alpha before its grid is laid:
      h = alpha (max(X) - min(X)) / (2^N - 1)
      code = clamp(round((X - z) / h), 0, 2^N - 1)
      X' = h code + z
  alpha is chosen for each group of a layer from 1.00, 0.98 .. 0.60, or down to 0.20 for codes of
  two or three levels: the one that leaves the smallest sum of w (X - X')^2 over the calibration
  tokens. w is the norm of the loss's gradient with respect to the token's row
  (`sensitivity="token"`), or 1 ("none"). "endpoint" takes z = alpha min(X); "centre" shrinks the
  range towards its middle; "both" chooses for each group. A given alpha is that of all groups.
- metadata. h and z are stored in FP8 (e4m3), and rounded before the codes are computed.

Paper and practice.
- The paper does not say what z is; the released code multiplies both ends by alpha. For a group of one sign, which the
  reordering makes, this moves the range instead of shrinking it, hence "centre".
- The paper names no objective for alpha. The released code has one alpha (0.92 or 0.96) for all groups, and no search.
  For perplexity it is 0.96, without a window (`alpha=0.96, clip="endpoint", recent=0`). AnTKV says of its SKVQ only
  that groups have 64 channels and that five sinks are kept.
- The released code computes codes from unrounded metadata and decodes with rounded metadata; here both use rounded
  metadata. The smallest e4m3 number above 0 is 2^-9, so this is the floor of h here; the released floor of 1e-5 is
  rounded to 0.
- It collects channel statistics over all tokens; here without those that the method keeps.
- The paper reorders the channels, and fuses the order into the weights. Groups that cross heads cannot be fused for K.
  Here channels stay in order, and each knows its group: the numbers are the same.
- 1.5 bits are three levels, five to a byte: 1.6 bits stored, where the released packing takes 2.
"""
import itertools
from typing import Annotated

import torch

from tinykv import UserError, at_least, one_of
from tinykv.codecs.base import (
    Codec,
    Codes,
    channel_ranges,
    known_bits,
    largest_code,
    pack,
    to_heads,
    to_rows,
    unpack,
)
from tinykv.kmeans import kmeans, nearest

#           type, smallest scale, largest number
METADATA = {"fp8": (torch.float8_e4m3fn, 2 ** -9, 448), "fp16": (torch.float16, 1e-5, 65504)}
# values of `to_middle` to choose from: 0 shrinks a range towards 0, 1 towards its middle
CLIPS = {"both": (0, 1), "endpoint": (0,), "centre": (1,), "none": ()}
SENSITIVITIES = ("token", "none")


class ClippedGroups(Codec):
    """The codec of one layer's K or V: n groups of channels, each with its own clipped range.

    All KV heads of a token are one row of C = Hkv * d channels. heads, width: Hkv and d. group_size: G. reorder:
    whether k-means makes the groups; if not, neighbours are a group. clip: where ranges may shrink to, see CLIPS.
    alpha: that of all groups; None: chosen for each. sensitivity: what the errors of a token weigh in that choice.
    """
    tables = ("group", "alpha", "to_middle")  # (C), (n) twice: see `regroup`

    def __init__(self, bits, heads, width, group_size, metadata="fp8", reorder=True,
                 clip="both", alpha=None, sensitivity="token"):
        self.bits = known_bits(bits)
        self.width, self.channels, self.group_size = width, heads * width, group_size
        self.dtype, self.floor, self.largest = METADATA[metadata]
        self.sensitivity = sensitivity
        self.group = self.alpha = self.to_middle = None
        self.reorder, self.clips = reorder, clip != "none"
        self.needs_text = self.reorder or self.clips
        self.needs_gradient = self.clips and sensitivity == "token"
        # the clips to choose from, alpha in the 16 bits in which it is stored
        lowest = 60 if self.bits >= 2 else 20  # %
        alphas = [percent / 100 for percent in range(100, lowest - 1, -2)] if alpha is None else [alpha]
        self.choices = list(itertools.product(torch.tensor(alphas, dtype=torch.float16).tolist(), CLIPS[clip]))

    def encode(self, x, ignore=None):
        rows = self.rows(x)  # (B, T, C)
        # 1. the range of each group; heads that keep the token do not widen it
        if ignore is not None:
            ignore = to_rows(ignore[..., None].expand(x.shape))  # (B, T, C)
        lo, hi = self.ranges(rows, ignore)  # (B, T, n) both
        # 2. clip it, and round to its grid
        code, h, z = self.coded(rows, lo, hi, self.alpha.float(), self.to_middle)  # h, z (B, T, n)
        packed = pack(code.to(torch.uint8), self.bits)  # (B, T, bytes)
        # one row for all heads: (B, 1, T, bytes) and (B, 1, T, n)
        return Codes(packed[:, None], scale=h[:, None], zero=z[:, None])

    def decode(self, codes):
        """Codes -> (B, Hkv, T, d) fp32."""
        code = unpack(codes.packed[:, 0], self.bits, self.channels)  # (B, T, C)
        h, z = codes.scale[:, 0], codes.zero[:, 0]  # (B, T, n) both
        rows = self.dequantize(code, h, z)  # (B, T, C)
        return to_heads(rows, self.width)

    # The clipped grid

    def coded(self, rows, lo, hi, alpha, to_middle):
        """rows (B, T, C), ranges (B, T, n) -> codes (B, T, C) before packing, and h and z (B, T, n) as they are stored.
        alpha and to_middle (n)."""
        h, z = self.grid(lo, hi, alpha, to_middle)  # (B, T, n) both
        # round them first: the codes then make up for their error
        h, z = h.to(self.dtype), z.to(self.dtype)  # as they are stored
        code = torch.round((rows - self.of_channels(z)) / self.of_channels(h))  # (B, T, C)
        return code.clamp(0, largest_code(self.bits)), h, z

    def grid(self, lo, hi, alpha, to_middle):
        """Ranges (B, T, n) -> clipped, h and z (B, T, n). alpha and to_middle (n)."""
        # shrink the range towards its middle (to_middle = 1) or towards 0
        goal = to_middle * (lo + hi) / 2  # (B, T, n)
        lo = alpha * lo + (1 - alpha) * goal
        hi = alpha * hi + (1 - alpha) * goal
        # the step, and the zero point
        h = ((hi - lo) / largest_code(self.bits)).clamp(self.floor, self.largest)
        z = lo.clamp(-self.largest, self.largest)
        return h, z

    def dequantize(self, code, h, z):
        """Codes (B, T, C), h and z (B, T, n) -> rows (B, T, C)."""
        rows = self.of_channels(h)  # (B, T, C)
        # in place: to write to new memory takes longer than to compute
        rows *= code
        rows += self.of_channels(z)
        return rows

    # Groups of channels

    def rows(self, x):
        """x (B, Hkv, T, d) -> (B, T, C) fp32."""
        if self.group is None:  # without reordering
            self.regroup(torch.arange(self.channels, device=x.device) // self.group_size)
        return to_rows(x.float())

    def regroup(self, labels):
        """Make groups that are not clipped. labels (C): the group of each channel."""
        # number the groups without empty ones
        _, labels = labels.unique(return_inverse=True)  # (C)
        n = int(labels.max()) + 1
        self.group = labels.to(torch.int32)  # (C): the group of each channel
        # the whole range of each group
        self.alpha = torch.ones(n, dtype=torch.float16, device=labels.device)  # (n)
        self.to_middle = torch.zeros(n, dtype=torch.uint8, device=labels.device)  # (n)

    def of_channels(self, of_groups):
        """What each group has, (B, T, n) -> what each of its channels has, (B, T, C)."""
        # a product with zeros and a single one: a channel has what its group has. It is faster than looking that up
        group = torch.arange(of_groups.shape[-1], device=of_groups.device)[:, None]  # (n, 1)
        is_member = (group == self.group).float()  # (n, C)
        return of_groups.float() @ is_member

    def ranges(self, rows, ignore=None):
        """rows (B, T, C) -> the smallest and the largest number of each group, (B, T, n) both.

        ignore (B, T, C): True at numbers that do not count, unless their group has no other.
        """
        lo, hi = self.smallest_and_largest(rows, rows)  # (B, T, n) both
        if ignore is None:
            return lo, hi
        above = rows.masked_fill(ignore, float("inf"))  # (B, T, C)
        below = rows.masked_fill(ignore, float("-inf"))  # (B, T, C)
        seen_lo, seen_hi = self.smallest_and_largest(above, below)  # (B, T, n) both
        nothing = seen_lo > seen_hi  # (B, T, n): every number of the group is ignored
        return lo.where(nothing, seen_lo), hi.where(nothing, seen_hi)

    def smallest_and_largest(self, x, y):
        """The smallest of x and the largest of y (B, T, C) in each group, (B, T, n) both."""
        B, T, _ = x.shape
        n = len(self.alpha)
        # each channel's number goes to its group, which keeps the smallest, or the largest
        group = self.group.long().expand_as(x)  # (B, T, C)
        lo = x.new_full((B, T, n), float("inf")).scatter_reduce(-1, group, x, "amin")
        hi = y.new_full((B, T, n), float("-inf")).scatter_reduce(-1, group, y, "amax")
        return lo, hi

    # Calibration

    def fit(self, rows, kept, gradient=None, seed=0):
        # 1. groups: cluster the channels by their ranges
        if self.reorder:
            lo, hi = channel_ranges(rows, kept)  # (Hkv, d) both
            points = torch.stack([lo.flatten(), hi.flatten()], dim=-1)[None]  # (1, C, 2)
            means = kmeans(points, self.channels // self.group_size, tries=10, seed=seed)  # (1, C/G, 2)
            self.regroup(nearest(points, means)[0])

        # 2. clips: for each group the choice of the smallest loss; of equals, the first
        if self.clips:
            loss = sum(self.losses(x, is_kept, self.weigh(x, None if gradient is None else gradient[w]))
                       for w, (x, is_kept) in enumerate(zip(rows, kept)))  # (choices, n)
            best = loss.argmin(0)  # (n)
            choices = torch.tensor(self.choices, dtype=torch.float16, device=best.device)[best]  # (n, 2)
            self.alpha, self.to_middle = choices[:, 0].contiguous(), choices[:, 1].to(torch.uint8)  # (n) both

    def weigh(self, rows, gradient):
        """What each token of a window weighs, (T): w. Without any gradient, all weigh the same."""
        if self.sensitivity == "token" and gradient.any():
            return gradient.float().pow(2).sum((0, 2)).sqrt()
        return torch.ones(rows.shape[1], dtype=torch.float32, device=rows.device)

    def losses(self, x, kept, weight):
        """The sum of w (X - X')^2 of each group, for each choice of (alpha, to_middle): (choices, n).

        Summed over a window x (Hkv, T, d) without the tokens that are kept (Hkv, T). weight (T): w.
        """
        rows = self.rows(x[None])  # (1, T, C)
        lo, hi = self.ranges(rows)  # (1, T, n) both
        # kept tokens do not count
        kept = kept.T.repeat_interleave(self.width, dim=1)  # (T, C)
        used = weight[:, None].expand_as(kept).masked_fill(kept, 0)  # (T, C)
        # quantize with each choice, and add up the squared errors of each group
        sums = []
        for alpha, to_middle in self.choices:
            code, h, z = self.coded(rows, lo, hi, alpha, to_middle)
            read = self.dequantize(code, h, z)  # (1, T, C)
            error = (rows - read)[0].pow(2) * used  # (T, C)
            of_group = torch.zeros(len(self.alpha), dtype=torch.float32, device=x.device)  # (n)
            sums.append(of_group.index_add_(0, self.group, error.sum(0)))
        return torch.stack(sums)


def skvq(config, kind, bits, group_size=None,
         reorder: Annotated[str, "regroup the channels: on or off"] = "on",
         clip: Annotated[str, "both, endpoint, centre or none"] = "both",
         alpha: Annotated[float | None, "shrink all ranges by this factor, such as 0.92, without a search"] = None,
         metadata: Annotated[str, "scales and offsets: fp8 or fp16"] = "fp8",
         sensitivity="token"):
    """The codec of a layer's keys, or values: both kinds alike. Settings as of `ClippedGroups`."""
    at_least(1, group_size=group_size)
    one_of(("on", "off"), reorder=reorder)
    one_of(CLIPS, clip=clip)
    one_of(METADATA, metadata=metadata)
    one_of(SENSITIVITIES, sensitivity=sensitivity)
    if alpha is not None and (not 0 < alpha <= 1 or clip == "none"):
        raise UserError(f"alpha must be above 0 and at most 1, and clip not none; got alpha {alpha}, clip {clip}")
    heads, width = config.num_key_value_heads, config.head_dim
    group_size = group_size or min(64, width)
    if heads * width % group_size:
        raise UserError(f"group size {group_size} does not divide the {heads * width} channels of a token")
    return ClippedGroups(bits, heads, width, group_size, metadata, reorder == "on", clip, alpha, sensitivity)
