"""SKVQ (Duanmu et al., 2024): channels regrouped by their ranges, clipped groups, 8-bit metadata, a window.

    Keep: the first 5 tokens.   Code: K and V per token, groups of similar channels, clipped, FP8 scales; K before RoPE.
    When: the 128 newest tokens stay exact.

Four ingredients, each of which can be switched off:
- reorder. k-means over the channels of a layer, all KV heads together, by (smallest, largest value) on calibration
  text; clusters are the groups, of G channels on average. A token's row is gathered in that order before coding.
- clip. A group's range is shrunk by a factor alpha before its grid is laid,
      h = alpha (max(X) - min(X)) / (2^N - 1),  code = clamp(round((X - z) / h), 0, 2^N - 1),  X' = h code + z
  alpha is chosen for each group of a layer: of 1.00, 0.98 .. 0.60 the one that leaves the smallest sum of (X - X')^2
  over the calibration tokens. "endpoint" takes z = alpha min(X); "centre" shrinks around the middle of the range;
  "both" chooses for each group.
- metadata. h and z in FP8 (e4m3), rounded before the codes are computed.
- window. `preserve` first tokens and `recent` newest ones are exact.

Paper and practice.
- The paper does not say what z is; the released code multiplies both ends by alpha. For a group of one sign, which the
  reordering makes, that moves the range instead of shrinking it, hence "centre".
- The released code has one fixed alpha (0.92 or 0.96) for all groups, and no search.
- It computes codes from unrounded metadata and decodes with rounded. e4m3 has no number below 2^-9, so this is the
  floor of h here; the released floor of 1e-5 comes back as 0.
- It collects channel statistics over all tokens; here without the first 5, which are not coded.
- The paper fuses the order into the weights. Groups that cross heads cannot be fused for K, so it is a gather here.
- The released window moves before attention and a token a step; here after attention and `block` tokens at a time.
- 1.5 bits are three levels, five to a byte: 1.6 bits stored, where the released packing takes 2.
"""
import torch

from tinykv import UserError, at_least, one_of
from tinykv.calibrate import kv_ranges, recorded
from tinykv.codecs import TERNARY, Codec, Codes, Exact, pack, unpack
from tinykv.kmeans import kmeans, nearest
from tinykv.methods.base import Method, first_tokens

ALPHAS = [a / 100 for a in range(100, 58, -2)]
#           type, smallest scale, largest number
METADATA = {"fp8": (torch.float8_e4m3fn, 2 ** -9, 448), "fp16": (torch.float16, 1e-5, 65504)}
CLIPS = {"both": (0, 1), "endpoint": (0,), "centre": (1,), "none": ()}  # values of `centre` to choose from


class ClippedGroups(Codec):
    """The codec of one layer's K or V. All heads of a token are one row of h channels, n groups."""
    tables = ("order", "group", "alpha", "centre")  # (h), (h) of the channel at each place; (n), (n) of each group

    def __init__(self, bits, heads, width, group_size, metadata, learns):
        if bits not in (1, TERNARY, 2, 3, 4, 5, 6, 7, 8):
            raise UserError(f"bits must be 1, 1.5 (three levels), 2 to 8 or 16; got {bits:g}")
        self.bits, self.width, self.h = bits if bits == TERNARY else int(bits), width, heads * width
        self.levels = 2 if bits == TERNARY else 2 ** self.bits - 1
        self.dtype, self.floor, self.largest = METADATA[metadata]
        self.group_size, self.learns = group_size, learns
        self.order = self.group = self.alpha = self.centre = None

    def regroup(self, labels):
        """labels (h): the group of each channel."""
        labels = labels.unique(return_inverse=True)[1]  # without empty groups
        self.order = labels.argsort(stable=True).to(torch.int32)  # (h)
        self.group = labels[self.order].to(torch.int32)  # (h)
        self.alpha = torch.ones(int(labels.max()) + 1, dtype=torch.float16, device=labels.device)  # (n)
        self.centre = torch.zeros_like(self.alpha, dtype=torch.uint8)  # (n): 1 where it shrinks around the middle

    def rows(self, x):
        """x (B, Hkv, T, d) -> (B, T, h) fp32, channels in order."""
        if self.order is None:
            if self.learns:
                raise UserError("skvq has learned no groups yet; call its `calibrate` first")
            self.regroup(torch.arange(self.h, device=x.device) // self.group_size)
        return x.float().transpose(1, 2).flatten(2)[..., self.order]

    def ranges(self, rows):
        """rows (B, T, h) -> the smallest and the largest number of each group, (B, T, n) both."""
        at = self.group.long().expand_as(rows)
        lo = rows.new_full((*rows.shape[:2], len(self.alpha)), float("inf")).scatter_reduce_(-1, at, rows, "amin")
        hi = rows.new_full((*rows.shape[:2], len(self.alpha)), -float("inf")).scatter_reduce_(-1, at, rows, "amax")
        return lo, hi

    def grid(self, lo, hi, alpha, centre):
        """Clipped ranges -> h and z in the bits that they are stored in. (B, T, n) all, alpha and centre (n)."""
        middle = centre * (lo + hi) / 2  # (B, T, n): what the range shrinks towards
        lo, hi = alpha * lo + (1 - alpha) * middle, alpha * hi + (1 - alpha) * middle
        h = ((hi - lo) / self.levels).clamp(self.floor, self.largest)
        return h.to(self.dtype), lo.clamp(-self.largest, self.largest).to(self.dtype)

    def codes(self, rows, h, z):
        """The numbers (B, T, h) that are stored, before packing."""
        at = self.group
        h, z = h.float().index_select(-1, at), z.float().index_select(-1, at)  # (B, T, h) both
        return ((rows - z) / h).round().clamp(0, self.levels)

    def values(self, code, h, z):
        at = self.group
        return code * h.float().index_select(-1, at) + z.float().index_select(-1, at)  # (B, T, h)

    def encode(self, x, skip=None):
        rows = self.rows(x)  # (B, T, h)
        h, z = self.grid(*self.ranges(rows), self.alpha.float(), self.centre)
        q = pack(self.codes(rows, h, z).to(torch.uint8), self.bits)  # (B, T, bytes)
        return Codes(q[:, None], h[:, None], z[:, None])  # (B, 1, T, bytes), (B, 1, T, n) twice

    def decode(self, codes):
        code = unpack(codes.q[:, 0], self.bits, self.h).float()  # (B, T, h)
        rows = self.values(code, codes.scale[:, 0], codes.zero[:, 0])  # (B, T, h)
        x = torch.empty_like(rows)
        x[..., self.order] = rows
        return x.unflatten(-1, (-1, self.width)).transpose(1, 2)  # (B, Hkv, T, d)

    def losses(self, x, kept, choices):
        """What each of the choices (alpha, centre) leaves of x (Hkv, T, d), beside the kept rows: (choices, n)."""
        rows = self.rows(x[None])  # (1, T, h)
        lo, hi = self.ranges(rows)  # (1, T, n)
        used = torch.ones_like(rows[0]) if kept is None else 1 - kept.T.float().repeat_interleave(self.width, 1)
        used = used[:, self.order]  # (T, h)
        sums = []
        for alpha, centre in choices:
            h, z = self.grid(lo, hi, alpha, centre)  # (1, T, n) both
            error = (rows - self.values(self.codes(rows, h, z), h, z))[0].pow(2) * used  # (T, h)
            sums.append(torch.zeros(len(self.alpha), device=x.device).index_add_(0, self.group, error.sum(0)))
        return torch.stack(sums)


class SKVQ(Method):
    compare = ("kivi",)

    def __init__(self, config, k_bits=2, v_bits=2, group_size=None, preserve=5, recent=128, block=16, reorder="on",
                 clip="both", metadata="fp8", rope="pre"):
        at_least(0, preserve=preserve, recent=recent)
        at_least(1, block=block, group_size=group_size)
        one_of(("on", "off"), reorder=reorder)
        one_of(CLIPS, clip=clip)
        one_of(METADATA, metadata=metadata)
        one_of(("pre", "post"), rope=rope)
        heads, width = config.num_key_value_heads, config.head_dim
        self.group_size = group_size or min(64, width)
        if heads * width % self.group_size:
            raise UserError(f"group size {self.group_size} does not divide the {heads * width} channels of a token")
        self.k_bits, self.v_bits, self.preserve, self.recent, self.block = k_bits, v_bits, preserve, recent, block
        self.reorder, self.clip, self.rope = reorder == "on", CLIPS[clip], rope
        self.needs_calibration = self.reorder or bool(self.clip)
        settings = heads, width, self.group_size, metadata, self.needs_calibration
        self.codecs = [{kind: Exact() if bits == 16 else ClippedGroups(bits, *settings)
                        for kind, bits in (("k", k_bits), ("v", v_bits))} for _ in range(config.num_hidden_layers)]

    @torch.no_grad()
    def calibrate(self, model, windows, progress=None):
        for codec in (codec for layer in self.codecs for codec in layer.values() if isinstance(codec, ClippedGroups)):
            codec.regroup(torch.arange(codec.h, device=windows.device) // self.group_size)
        if self.reorder:
            self._reorder(kv_ranges(model, self, windows, progress))
        if self.clip:
            self._choose_clips(recorded(model, self, windows, progress))

    def _reorder(self, ranges):
        """ranges: of each channel, see `kv_ranges`."""
        for kind in ("k", "v"):
            points = torch.stack([torch.stack(layer[kind], -1).flatten(0, 1) for layer in ranges])  # (L, h, 2)
            groups = points.shape[1] // self.group_size
            labels = nearest(points, kmeans(points, groups, tries=10))  # (L, h)
            for layer, of_layer in zip(self.codecs, labels):
                if isinstance(layer[kind], ClippedGroups):
                    layer[kind].regroup(of_layer)

    def _choose_clips(self, parts):
        """parts: what `recorded` yields."""
        choices = torch.tensor([(alpha, centre) for alpha in ALPHAS for centre in self.clip]).half()
        sums = [dict.fromkeys("kv", 0) for _ in self.codecs]  # (choices, n) each
        for layer, kind, rows, kept, _ in parts:
            if isinstance(self.codecs[layer][kind], ClippedGroups):
                sums[layer][kind] += self.codecs[layer][kind].losses(rows, kept, choices.tolist())
        for layer, of_layer in zip(self.codecs, sums):
            for kind, codec in layer.items():
                if isinstance(codec, ClippedGroups):
                    best = choices.to(codec.alpha.device)[of_layer[kind].argmin(0)]  # (n, 2); ties: the least clipped
                    codec.alpha, codec.centre = best[:, 0].contiguous(), best[:, 1].to(torch.uint8)

    def keep(self, cache, kind, n, state):
        return first_tokens(cache, self.preserve)  # (B, 1, N)
