"""KVQuant's code (Hooper et al., 2024) as a scheme: non-uniform levels, found where they matter, and sparse outliers.

Keys before RoPE, per channel, their ranges learned beforehand; values per token, their ranges taken as they come; for
both, per layer one table of 2**b levels in the normalized range [-1, 1]: `codecs.NonUniform`. Learned in two passes:

1. K's range. Of each channel the percentiles (1 - t, t), t = 1 - outliers / 2; with no outliers the smallest and the
   largest. Only the tails of what was seen are held.
2. The levels. Weighted k-means over the normalized numbers that are no outliers,
       minimize  sum_e  w_e (x'_e - level(x'_e))^2,   w = F * half^2   (Appendix E),
   F the Fisher information (dL/dx)^2 of the number. half^2 makes it an error of x rather than of x'; `sensitivity`
   chooses "none" (w = 1), "fisher" (w = F, what the released code does) or "fisher-range". The numbers are gathered
   in a histogram of 1,024 bins, each with its total weight and weighted mean, so nothing else is held.
Q-Norm, for 2 bits: the table is shifted and scaled so that the decoded numbers have the mean and the deviation of those
that were coded.

Paper and practice.
- The released code takes percentiles over all tokens, and leaves the first token out only of the k-means; the paper
  says it is left out of everything, and here it is.
- It takes as outliers of a value row whatever is at or beyond two percentiles: never fewer than two numbers, which is
  3% of a row of 64. Here it is round(outliers * h) numbers, those furthest from the row's median.
- Its Q-Norm calls a function with an argument that this does not take, and crashes.
"""
import torch

from tinykv import UserError, one_of
from tinykv.calibrate import recorded
from tinykv.codecs import Exact, NonUniform
from tinykv.kmeans import kmeans, nearest

BINS = 1024
SENSITIVITIES = ("fisher-range", "fisher", "none")


class NonUniformScheme:
    """outliers: in per cent. q_norm: "on" or "off"; on for 2 bits unless told otherwise."""
    name, static = "kvquant", True

    def __init__(self, config, k_bits, v_bits, block, outliers=1.0, sensitivity="fisher-range", q_norm=None,
                 rope="pre"):
        if not 0 <= outliers < 50:
            raise UserError(f"outliers are a percentage from 0 to below 50; got {outliers}")
        one_of(SENSITIVITIES, sensitivity=sensitivity)
        one_of(("on", "off"), q_norm=q_norm)
        self.rope, self.block, self.share = rope, block, outliers / 100
        self.sensitivity, self.q_norm = sensitivity, q_norm
        self.codecs = [{"k": self._codec(k_bits, config, "channel"), "v": self._codec(v_bits, config, "token")}
                       for _ in range(config.num_hidden_layers)]

    def _codec(self, bits, config, axis):
        if bits == 16:
            return Exact()
        try:
            return NonUniform(bits, config.num_key_value_heads, config.head_dim, axis, self.share)
        except ValueError as error:
            raise UserError(str(error)) from None

    @torch.no_grad()
    def calibrate(self, model, method, windows, progress=None):
        """Learn ranges and levels from windows (W, T), without the tokens that the method keeps."""
        for layer, tails in zip(self.codecs, self._tails(model, method, windows, progress)):
            if isinstance(layer["k"], NonUniform):
                layer["k"].fix(*tails.percentiles(self.share / 2))
        histograms = [{kind: Histogram(model.lm_head.weight.device) for kind in layer} for layer in self.codecs]
        gradients = self.sensitivity != "none"
        for layer, kind, rows, kept, gradient in recorded(model, method, windows, progress, gradients):
            codec = self.codecs[layer][kind]
            if isinstance(codec, NonUniform):
                skip = None if kept is None else kept[None]  # (1, Hkv, T)
                normal, out, _, half = codec.normalize(rows[None], skip)  # (1, T, h) twice
                weight = torch.ones_like(normal)
                if gradients:
                    weight = gradient.float().pow(2).transpose(0, 1).flatten(1)[None]  # (1, T, h)
                if self.sensitivity == "fisher-range":
                    weight = weight * half.float().pow(2)
                use = torch.ones_like(normal, dtype=torch.bool) if out is None else ~out  # (1, T, h)
                if kept is not None:
                    use &= ~kept.T.repeat_interleave(codec.width, dim=1)
                histograms[layer][kind].add(normal[use], weight[use])
        for layer, of_layer in zip(self.codecs, histograms):
            for kind, codec in layer.items():
                if isinstance(codec, NonUniform):
                    norm = self.q_norm == "on" or (self.q_norm is None and codec.bits == 2)
                    codec.levels = of_layer[kind].levels(2 ** codec.bits, norm)

    def _tails(self, model, method, windows, progress):
        """Per layer the tails of the keys' channels."""
        size = int(self.share / 2 * windows.numel()) + 2
        tails = [Tails(size) for _ in self.codecs]
        for layer, kind, rows, kept, _ in recorded(model, method, windows, progress):
            if kind == "k":
                tails[layer].add(rows, kept)
        return tails


class Tails:
    """The `size` smallest and largest numbers of each channel, of all that were added."""

    def __init__(self, size):
        self.size, self.low, self.high, self.count = size, None, None, 0

    def add(self, rows, kept):
        """rows (Hkv, T, d); kept (Hkv, T) are left out, or None."""
        low = high = rows.float()  # (Hkv, T, d)
        if kept is not None:
            low = low.masked_fill(kept[..., None], float("inf"))
            high = high.masked_fill(kept[..., None], float("-inf"))
        gone = 0 if kept is None else kept.sum(1)[:, None]  # (Hkv, 1)
        self.count = self.count + rows.shape[1] - gone + torch.zeros_like(rows[:, 0], dtype=torch.long)  # (Hkv, d)
        if self.low is not None:
            low, high = torch.cat([self.low, low], dim=1), torch.cat([self.high, high], dim=1)
        size = min(self.size, low.shape[1])
        self.low = low.topk(size, dim=1, largest=False).values  # (Hkv, size, d), ascending
        self.high = high.topk(size, dim=1).values  # (Hkv, size, d), descending

    def percentiles(self, p):
        """The p and 1 - p quantiles of each channel, between neighbours by proportion: (h) both, heads joined."""
        place = (p * (self.count - 1)).clamp(max=self.low.shape[1] - 1)  # (Hkv, d)
        under = place.long()
        over = (under + 1).clamp(max=self.low.shape[1] - 1)
        share = (place - under).float()
        ends = []
        for tail in (self.low, self.high):
            a, b = (tail.gather(1, at[:, None])[:, 0] for at in (under, over))  # (Hkv, d)
            ends.append(torch.where(share > 0, a + share * (b - a), a).flatten())  # (h)
        return ends


class Histogram:
    """Numbers in [-1, 1] in bins: how many, their sums, and the same by weight."""

    def __init__(self, device):
        self.sums = torch.zeros(5, BINS, dtype=torch.double, device=device)  # 1, x, x^2, w, w x

    def add(self, x, w):
        """x and w (N)."""
        x, w = x.double(), w.double()
        at = ((x + 1) / 2 * BINS).long().clamp(0, BINS - 1)  # (N)
        for row, values in zip(self.sums, (torch.ones_like(x), x, x * x, w, w * x)):
            row.index_add_(0, at, values)

    def levels(self, n, norm):
        """n levels, ascending, in the 16 bits that they are stored in; norm: Q-Norm."""
        count, x, square, weight, wx = self.sums[:, self.sums[0] > 0]  # (bins that hold something)
        if not weight.any():  # no gradient at all
            weight, wx = count, x
        points = torch.where(weight > 0, wx / weight.clamp(min=1e-300), x / count)  # (bins)
        weight = weight / weight.max()
        levels = kmeans(points[None, :, None], n, weight[None], iterations=100, tries=40)[0, :, 0].double()  # (n)
        if norm:
            mean = x.sum() / count.sum()
            deviation = (square.sum() / count.sum() - mean ** 2).clamp(min=0).sqrt()
            coded = levels[nearest((x / count)[None, :, None].float(), levels[None, :, None].float())[0]]  # (bins)
            coded_mean = (coded * count).sum() / count.sum()
            coded_deviation = ((coded - coded_mean).pow(2) * count).sum().div(count.sum()).sqrt()
            if coded_deviation > 0:
                levels = (levels - coded_mean) * deviation / coded_deviation + mean
        return levels.sort().values.half()
