"""The codebooks of CQ and AnTKV: learned by weighted k-means from keys before RoPE, and values.

A format is "d{n}m{m}": n channels share one of m centroids, log2(m) / n bits a number. Whatever is learned:
    minimize  sum_j  w_j |x_j - centroid(x_j)|^2
over the sub-vectors x_j of calibration tokens. `sensitivity` says what w_j is, from the gradient g of the loss:
    "none"     1
    "fisher"   the squared norm of g over the sub-vector, the diagonal Fisher information (CQ)
    "token"    the norm of g over the token's whole row of a KV head, the same for all its sub-vectors (AnTKV)
The largest thousandth of the weights is cut down to the rest, or the sinks' gradients would own the codebooks.

`sharing` says who has a book: "own", each layer's K or V, KV head and place in the head; "layer", each layer's K or V
alone. Books of their own code better, and cost 2 h m numbers a layer, whatever n: as much as m tokens of 16 bits.
At most SAMPLES tokens are held to learn from, evenly spread over what is there, in the CPU's memory.
"""
import re

import torch

from tinykv import UserError, one_of
from tinykv.calibrate import recorded
from tinykv.codecs import Codebook
from tinykv.kmeans import kmeans

FORMATS = {4: "d2m256", 2: "d4m256", 1: "d8m256", 0.75: "d16m4096", 0.375: "d32m4096"}  # AnTKV's, by their bits
SENSITIVITIES = ("none", "fisher", "token")
SAMPLES = 2 ** 16


class VectorScheme:
    """The codecs of every layer's K and V in one format."""

    def __init__(self, config, vq, bits, sensitivity, sharing):
        if bits is not None and vq is not None:
            raise UserError("give the bits or the format (vq), not both")
        if bits is not None and bits not in FORMATS:
            raise UserError(f"vector formats are known for {', '.join(f'{b:g}' for b in FORMATS)} bits; got {bits:g}; "
                            "name any other, such as d4m1024, by its format (vq)")
        self.name = vq or FORMATS[bits or 1]
        found = re.fullmatch(r"d(\d+)m(\d+)", self.name)
        if not found:
            raise UserError(f"a vector format is d, channels, m, centroids, such as d8m256; got {self.name!r}")
        n, m = map(int, found.groups())
        if n < 1 or config.head_dim % n:
            raise UserError(f"{self.name}: {n} channels do not divide the {config.head_dim} channels of a head")
        if not 2 <= m <= 4096 or m & (m - 1):
            raise UserError(f"{self.name}: the number of centroids must be a power of two from 2 to 4096; got {m}")
        one_of(SENSITIVITIES, sensitivity=sensitivity)
        one_of(("own", "layer"), sharing=sharing)
        self.n, self.m, self.sensitivity, self.sharing = n, m, sensitivity, sharing
        self.bits = (m.bit_length() - 1) / n
        self.codecs = [{kind: Codebook(n, m, config.num_key_value_heads, config.head_dim) for kind in "kv"}
                       for _ in range(config.num_hidden_layers)]
        self.held = self.vectors = 0  # bytes held while learning; sub-vectors that a book was learned from

    @torch.no_grad()
    def calibrate(self, model, method, windows, progress=None):
        """Learn the codebooks from windows (W, T). Anchors are in it: they are known only where a text is read."""
        W, T = windows.shape
        use = torch.linspace(0, T - 1, max(1, min(T, SAMPLES // W)), device=windows.device).long()  # tokens of a window
        gradients = self.sensitivity != "none"
        parts = [{kind: ([], []) for kind in layer} for layer in self.codecs]  # rows and weights, window by window
        for layer, kind, rows, kept, gradient in recorded(model, method, windows, progress, gradients):
            codec = self.codecs[layer][kind]
            weight = self._weights(codec, rows, gradient)  # (places, T)
            if kept is not None:
                weight *= ~kept.repeat_interleave(codec.places // len(kept), dim=0)
            parts[layer][kind][0].append(rows[None, :, use].cpu())  # (1, Hkv, tokens, d)
            parts[layer][kind][1].append(weight[:, use].cpu())  # (places, tokens)
        self.held = sum(t.nbytes for layer in parts for lists in layer.values() for ts in lists for t in ts)
        jobs = [(codec, *part[kind]) for part, layer in zip(parts, self.codecs) for kind, codec in layer.items()]
        for codec, rows, weights in jobs if progress is None else progress(jobs):
            points = codec.vectors(torch.cat(rows, dim=2).to(windows.device))  # (places, N, n)
            weights = torch.cat(weights, dim=1).to(windows.device)  # (places, N)
            if self.sharing == "layer":
                points, weights = points.flatten(0, 1)[None], weights.flatten()[None]  # (1, places * N, n)
            samples = (weights > 0).sum(1).min()
            if samples < self.m:
                raise UserError(f"{self.name}: {self.m} centroids cannot be learned from {samples} vectors; use more "
                                "or longer calibration windows, or fewer centroids")
            self.vectors = int(samples)
            codec.centroids = kmeans(points, self.m, weights, tolerance=1e-3).to(rows[0].dtype)  # (places or 1, m, n)

    def _weights(self, codec, rows, gradient):
        """rows and gradient (Hkv, T, d) -> the weights of all sub-vectors (places, T)."""
        if self.sensitivity == "none":
            return torch.ones(codec.places, rows.shape[1], device=rows.device)
        square = gradient.float().pow(2).unflatten(-1, (-1, self.n)).sum(-1)  # (Hkv, T, d/n)
        if self.sensitivity == "token":
            square = square.sum(-1, keepdim=True).sqrt().expand_as(square)  # (Hkv, T, d/n)
        weight = square.transpose(1, 2).flatten(0, 1)  # (places, T)
        if not weight.any():  # the loss does not depend on this part at all
            return torch.ones_like(weight)
        return weight.clamp(max=weight.flatten().sort().values[int(0.999 * (weight.numel() - 1))])

    def describe(self):
        own = "a book for each KV head and place" if self.sharing == "own" else "a book for a layer's K, one for its V"
        if not self.vectors:
            return f"{self.name}, {own}"
        return (f"{self.name}, {own}, each learned from {self.vectors:,} vectors; "
                f"{self.held / 2 ** 20:.1f} MiB held to learn from")
