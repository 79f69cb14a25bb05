"""KVQuant's codec (Hooper et al., 2024): non-uniform levels, and sparse outliers.

All KV heads of a token form one row of C = Hkv * d channels. The keys of a layer share one table of 2^b levels in the
normalized range [-1, 1], and so do its values:

    x' = (x - mid) / half,   q = the index of the nearest level,   x'' = half * level[q] + mid

Keys are quantized per channel (before RoPE), in a static range. Values are quantized per token, in a dynamic range. A
number outside its range is an outlier: it is stored apart, in 16 bits. Calibration has two steps:

1. The range of each channel of K: the percentiles (p, 1 - p), p = outliers / 2; without outliers the smallest and the
   largest number.
2. The levels of K and of V, by weighted k-means over the normalized numbers that are not outliers,
       minimize  sum_e  w_e (x'_e - level(x'_e))^2,   w = F * half^2   (Appendix E),
   where F = (dL/dx)^2 is the number's Fisher information. The factor half^2 turns the error of x'
   into the error of x. `sensitivity` chooses "none" (w = 1), "fisher" (w = F, as in the released
   code) or "fisher-range". The numbers are collected in a histogram of 1,024 bins, each with its
   total weight and its weighted mean.

Q-Norm, for 2 bits: the levels are shifted and scaled, so that the decoded numbers have the mean and the standard
deviation of the numbers that were quantized.

Paper and practice.
- The released code takes percentiles over all tokens, and leaves the first token out of k-means only. The paper says it
  is left out of everything, and here it is.
- In a row of values, the released code calls everything at or beyond two percentiles an outlier: at least two numbers,
  which is 3% of a row of 64. Here it is round(outliers * C) numbers, the furthest from the row's median.
- Q-Norm is on here at 2 bits (turn it off with `q_norm="off"`). In the released code it is off, and crashes if it is
  on: it calls a function with an argument that it does not take.
"""
from typing import Annotated

import numpy as np
import torch

from tinykv import UserError, one_of
from tinykv.codecs.base import Codec, Codes, known_bits, pack, to_heads, to_rows, unpack
from tinykv.kmeans import kmeans, nearest

BINS = 1024
SENSITIVITIES = ("fisher-range", "fisher", "none")


class NonUniform(Codec):
    """The nearest of 2^b calibrated levels, in a normalized range, and sparse outliers.

    axis "channel" (K): mid and half are static, of each channel. An outlier is what lies outside
        that range.
    axis "token" (V): mid and half are the token's own. The round(outliers * C) numbers furthest
        from its median are outliers, and the range is that of the others. (Of an even number of
        numbers, the median is the lower of the two in the middle.)

    heads, width: Hkv and d. outliers: a share of all numbers. sensitivity: see above. q_norm: "on", "off", or None for
    on at 2 bits.
    """
    tables = ("levels", "mid", "half")  # (2^b), ascending; axis "channel" only: (C), (C)
    needs_text = True

    def __init__(self, bits, heads, width, axis, outliers, sensitivity="fisher-range", q_norm=None):
        self.bits = known_bits(bits, range(1, 9))
        self.width, self.channels = width, heads * width
        if axis == "token" and round(outliers * self.channels) == 0:
            outliers = 0  # a row is too short for even one: nothing has to be listed
        self.axis, self.outliers, self.sensitivity = axis, outliers, sensitivity
        self.needs_gradient = sensitivity != "none"
        self.q_norm = q_norm == "on" or (q_norm is None and bits == 2)
        self.levels = self.mid = self.half = None

    def encode(self, x, ignore=None):
        # 1. normalize, and find the outliers
        normal, outlier, mid, half = self.normalize(x, ignore)  # (B, T, C) twice; see there

        # 2. the index of the nearest level: how many borders between levels lie below
        levels = self.levels.float()
        borders = (levels[1:] + levels[:-1]) / 2  # (2^b - 1)
        q = torch.bucketize(normal, borders).to(torch.uint8)  # (B, T, C)
        packed = pack(q, self.bits)[:, None]  # (B, 1, T, bytes)

        # 3. a dynamic range is stored with the codes, and so are the outliers
        codes = Codes(packed)
        if self.axis == "token":
            codes = Codes(packed, mid=mid[:, None], half=half[:, None])  # (B, 1, T, 1) both
        if not self.outliers:
            return codes
        return SparseCodes(**vars(codes), **sparse(to_rows(x), outlier))

    def decode(self, codes):
        """Codes -> (B, Hkv, T, d) fp32."""
        # 1. from levels back into the range
        q = unpack(codes.packed[:, 0], self.bits, self.channels)  # (B, T, C)
        if self.axis == "token":
            mid, half = codes.mid[:, 0], codes.half[:, 0]  # (B, T, 1) both
        else:
            mid, half = self.mid, self.half  # (C) both
        level = self.levels.float().index_select(0, q.flatten().int()).view(q.shape)  # (B, T, C)
        x = level * half.float() + mid.float()  # (B, T, C)

        # 2. the outliers overwrite what the codes say
        if self.outliers:
            x.view(-1)[codes.places(self.channels)] = codes.values[0, 0].float()
        return to_heads(x, self.width)

    # The normalized range

    def ignored(self, x, ignore):
        """ignore (B, Hkv, T), or None, of x (B, Hkv, T, d) -> the same of each number, (B, T, C)."""
        if ignore is None:
            ignore = torch.zeros(x.shape[:3], dtype=torch.bool, device=x.device)  # (B, Hkv, T)
        return to_rows(ignore[..., None].expand(x.shape))

    def normalize(self, x, ignore=None):
        """x (B, Hkv, T, d) -> x' (B, T, C), outliers (B, T, C) bool, mid and half.

        mid and half are (C) on axis "channel", (B, T, 1) on axis "token".
        """
        ignore = self.ignored(x, ignore)  # (B, T, C)
        x = to_rows(x.float())  # (B, T, C)
        if self.axis == "token":
            mid, half, outlier = self.range_of_tokens(x, ignore)  # (B, T, 1) twice, (B, T, C)
        else:
            # an outlier lies outside its channel's range
            mid, half = self.mid, self.half  # (C) both
            distance = (x - mid.float()).abs()  # (B, T, C)
            outlier = (distance > half.float()) & ~ignore & (self.outliers > 0)  # (B, T, C)
        normal = (x - mid.float()) / half.float()  # (B, T, C)
        return normal, outlier, mid, half

    def range_of_tokens(self, x, ignore):
        """x and ignore (B, T, C) -> mid, half (B, T, 1) and outliers (B, T, C) of each token."""
        # 1. outliers: the numbers furthest from the token's median; of equals, the lower channel
        outlier = torch.zeros_like(ignore)  # (B, T, C)
        count = round(self.outliers * self.channels)
        if count:
            seen = x.masked_fill(ignore, float("nan"))  # (B, T, C)
            median = seen.nanmedian(-1, keepdim=True).values  # (B, T, 1)
            distance = (x - median).abs()  # (B, T, C)
            distance = distance.masked_fill(ignore, -1).nan_to_num(-1)
            order = distance.sort(dim=-1, descending=True, stable=True).indices  # (B, T, C)
            outlier = outlier.scatter(-1, order[..., :count], True)
            outlier = outlier & ~ignore

        # 2. the range of the other numbers. A token that is ignored in all heads gets a range, too:
        #    it is kept now, but may be evicted later, and is then read as its codes
        aside = outlier | ignore  # (B, T, C)
        aside = aside & ~ignore.all(-1, keepdim=True)
        lo = x.masked_fill(aside, float("inf")).amin(-1, keepdim=True)  # (B, T, 1)
        hi = x.masked_fill(aside, float("-inf")).amax(-1, keepdim=True)  # (B, T, 1)
        mid, half = self.middle(lo.nan_to_num(posinf=0), hi.nan_to_num(neginf=0))
        return mid, half, outlier

    def middle(self, lo, hi):
        """The middle of a range and half its length, in the 16 bits in which they are stored."""
        lo, hi = lo.clamp(-65504, 65504), hi.clamp(-65504, 65504)
        mid = (lo + hi) / 2
        half = (hi - lo) / 2
        return mid.half(), half.clamp(min=1e-5).half()

    # Calibration

    def fit(self, rows, kept, gradient=None, seed=0):
        # 1. the range of each channel
        if self.axis == "channel":
            self.mid, self.half = self.middle(*self.percentiles(rows, kept))

        # 2. all numbers, window by window, but the outliers and the tokens that are kept
        histogram = Histogram()
        for w, (x, ignore) in enumerate(zip(rows.split(1), kept.split(1))):  # (1, Hkv, T, d), (1, Hkv, T)
            normal, outlier, _, half = self.normalize(x, ignore)  # (1, T, C) twice
            weight = torch.ones_like(normal)  # (1, T, C)
            if self.sensitivity != "none":
                weight = to_rows(gradient[w:w + 1].float().pow(2))  # (1, T, C): the Fisher information
            if self.sensitivity == "fisher-range":
                weight = weight * half.float().pow(2)
            use = ~outlier & ~self.ignored(x, ignore)  # (1, T, C)
            histogram.add(normal[use], weight[use])

        # 3. the levels
        self.levels = histogram.levels(2 ** self.bits, self.q_norm, seed)

    def percentiles(self, rows, kept):
        """The percentiles (p, 1 - p) of each channel, (C) both, over all windows without kept tokens."""
        p, by_head = self.outliers / 2, []
        for x, is_kept in zip(rows.unbind(1), kept.unbind(1)):  # of each head (W, T, d) and (W, T)
            by_head.append(np.quantile(x[~is_kept].float().cpu().numpy(), [p, 1 - p], axis=0))  # (2, d)
        return torch.from_numpy(np.concatenate(by_head, axis=1)).float().to(rows.device)  # (2, C)


class SparseCodes(Codes):
    """Codes, and the outliers as a sparse matrix in CSR format.

    The matrix has T * B rows, token by token, and C columns. `values` (1, 1, outliers) in 16 bits and `columns` (1, 1,
    outliers) int16 list its outliers row by row; `row_end` (B, 1, T, 1) int32 says where each row ends in the two.
    """

    def followed_by(self, other):
        # the other's rows come after all of these
        row_end = other.row_end + self.values.shape[2]
        return super().followed_by(SparseCodes(**{**vars(other), "row_end": row_end}))

    def places(self, C):
        """Where the outliers stand among numbers (B, T, C) in one list: (outliers)."""
        B, _, T, _ = self.row_end.shape
        row_end = self.row_end.flatten(1).T.flatten()  # (T * B)
        count = row_end.diff(prepend=row_end.new_zeros(1))  # (T * B): outliers of each row
        row = torch.repeat_interleave(count, output_size=self.values.shape[2])  # (outliers): that of each outlier
        sequence, token = row % B, row // B  # (outliers) both
        return (sequence * T + token) * C + self.columns[0, 0]


def sparse(numbers, outlier):
    """The outliers of numbers (B, T, C), where `outlier` is True: row_end, values and columns, as `SparseCodes` has
    them."""
    numbers, outlier = numbers.transpose(0, 1), outlier.transpose(0, 1)  # (T, B, C) both
    values = numbers[outlier]  # (outliers), row by row
    columns = outlier.nonzero()[:, 2].to(torch.int16)  # (outliers)
    count = outlier.sum(-1)  # (T, B): outliers of each row
    row_end = count.flatten().cumsum(0).to(torch.int32)  # (T * B)
    row_end = row_end.view_as(count).T[:, None, :, None]  # (B, 1, T, 1)
    return {"row_end": row_end.contiguous(), "values": values[None, None], "columns": columns[None, None]}


class Histogram:
    """Numbers in [-1, 1], in bins. Five sums of each bin: of 1, x, x^2, w and w x."""

    def __init__(self):
        self.sums = torch.zeros(5, BINS, dtype=torch.double)

    def add(self, x, w):
        """x and w (N): numbers and their weights."""
        x, w = x.double(), w.double()
        self.sums = self.sums.to(x.device)
        # find each number's bin, and add to its five sums
        bins = ((x + 1) / 2 * BINS).long().clamp(0, BINS - 1)  # (N)
        for sums, terms in zip(self.sums, (torch.ones_like(x), x, x * x, w, w * x)):
            sums.index_add_(0, bins, terms)

    def levels(self, n, q_norm, seed=0):
        """n levels (n), ascending, in the 16 bits in which they are stored."""
        filled = self.sums[0] > 0  # (BINS)
        count, x, square, weight, weighted_x = self.sums[:, filled]  # (bins) each
        mean = x / count  # (bins)
        if not weight.any():  # no gradient at all: every number counts alike
            weight, weighted_x = count, x

        # weighted k-means, in which a bin stands for its weighted mean
        points = weighted_x / weight.clamp(min=1e-300)  # (bins)
        weight = weight / weight.max()
        centroids = kmeans(points[None, :, None], n, weight[None], iterations=100, tries=40, seed=seed)
        levels = centroids[0, :, 0].double()  # (n)

        if q_norm:
            # mean and deviation of the numbers as they are
            total = count.sum()
            all_mean = x.sum() / total
            variance = square.sum() / total - all_mean ** 2
            deviation = variance.clamp(min=0).sqrt()
            # mean and deviation of the levels that they are read as
            index = nearest(mean[None, :, None].float(), levels[None, :, None].float())[0]  # (bins)
            read = levels[index]  # (bins)
            read_mean = (read * count).sum() / total
            read_variance = ((read - read_mean).pow(2) * count).sum() / total
            read_deviation = read_variance.sqrt()
            # shift and scale the levels from the latter to the former
            if read_deviation > 0:
                levels = (levels - read_mean) * deviation / read_deviation + all_mean
        return levels.sort().values.half()


def kvquant(config, kind, bits,
            outliers: Annotated[float, "per cent of the numbers that are stored apart"] = 1.0,
            sensitivity="fisher-range",
            q_norm: Annotated[str | None, "correct the mean and the deviation of the levels: on or off"] = None):
    """The codec of a layer's keys (kind "k"), or values. Other settings as of `NonUniform`."""
    if not 0 <= outliers < 50:
        raise UserError(f"outliers are a percentage from 0 to below 50; got {outliers}")
    one_of(SENSITIVITIES, sensitivity=sensitivity)
    one_of(("on", "off"), q_norm=q_norm)
    axis = "channel" if kind == "k" else "token"
    return NonUniform(bits, config.num_key_value_heads, config.head_dim, axis, outliers / 100, sensitivity, q_norm)
