"""Attention sinks and the outliers that mark them: measured on a model, and found for KVSink.

Terms. The outlier of a layer is the largest |h| in a block's output; its ratio is that over the median |h| of the
layer. The sink score of token j is the attention that it receives, averaged over heads and over the queries from j on
(Gu et al., 2024); a token is called a sink from 0.3.
"""
import torch


class Probe:
    """An exact cache for one forward over a window that keeps what passes by: q, k, v and each block's output."""

    def __init__(self, model):
        self.rope = model.rope
        self.q, self.k, self.v, self.hidden = [], [], [], []  # per layer (B, H, T, d), (B, Hkv, T, d) x 2, (B, T, D)

    def __len__(self):
        return 0

    def update(self, layer, q, k, v, positions):
        self.q.append(q)
        self.k.append(k)
        self.v.append(v)
        return self.rope.rotate(k, positions), v

    def observe(self, layer, hidden):
        self.hidden.append(hidden)

    def attention(self, layer):
        """The attention weights of a layer, (B, H, T, T); sliding windows are not applied."""
        q, k = self.q[layer], self.k[layer]
        positions = torch.arange(q.shape[2], device=q.device)
        q, k = self.rope.rotate(q, positions), self.rope.rotate(k, positions)
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)  # (B, H, T, d)
        scores = (q @ k.transpose(-2, -1)).float() * q.shape[-1] ** -0.5  # (B, H, T, T)
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)  # (T, T)
        return scores.masked_fill(future, float("-inf")).softmax(-1)


class OutlierProbe(Probe):
    """Of each block's output no more than its outlier: a window of a large model need not be held layer by layer."""

    def update(self, layer, q, k, v, positions):
        return self.rope.rotate(k, positions), v

    def observe(self, layer, hidden):
        self.hidden.append(outlier(hidden))


def outlier(hidden):
    """hidden (1, T, D) -> its largest |h|, that over the median |h|, and the channel it is in."""
    h = hidden[0].float().abs()  # (T, D)
    return h.max().item(), (h.max() / h.median()).item(), h.argmax().item() % h.shape[1]


def outlier_profile(model, windows):
    """How the outlier goes through the layers, per window of windows (W, T).

    Returns largest (W, L + 1), ratio (W, L + 1) and channel (W, L + 1); column 0 is the embedding, column l + 1 the
    output of block l.
    """
    rows = []
    for window in windows:
        probe = OutlierProbe(model)
        model.hidden(window[None], probe)
        rows.append([outlier(model.model["embed_tokens"](window[None])), *probe.hidden])
    table = torch.tensor(rows)  # (W, L + 1, 3)
    return table[..., 0], table[..., 1], table[..., 2].long()


@torch.no_grad()
def find_outlier(model, windows, large=100.0, ratio=1000.0):
    """Emergence layer and channel of the stable outlier, or None if this model has none.

    First the criterion of Sun et al. (2024) for LLMs: the first layer whose outlier exceeds 100 and 1,000 times the
    median. A small model has the same thing smaller: there it is the layer at which the outlier grows most, provided
    that its ratio is at least 30, and three times the median ratio of the layers before it. The channel is the one that
    wins in at least nine windows out of ten over the three layers from there on.
    """
    if model.config.num_hidden_layers == 1:
        return None
    top, rel, channel = outlier_profile(model, windows)
    top, rel = top.median(0).values, rel.median(0).values  # (L + 1) both
    massive = (top[1:-1] >= large) & (rel[1:-1] >= ratio)  # (L - 1): the last block has none after it to mark sinks for
    if massive.any():
        layer = int(massive.int().argmax())
    else:
        layer = int((top[1:-1] / top[:-2]).argmax())
        if rel[layer + 1] < 30 or (layer and rel[layer + 1] < 3 * rel[1:layer + 1].median()):
            return None
    votes = channel[:, layer + 1:layer + 4]  # (W, up to 3)
    winner = int(votes.flatten().mode().values)
    return (layer, winner) if (votes == winner).float().mean() >= 0.9 else None


@torch.no_grad()
def sink_report(model, windows, is_sink, span=64):
    """The numbers of a model's sinks, per layer, over windows (W, T); is_sink (W, T) marks the tokens looked at.

    Of each layer: `first` and `later`, the mean sink score (over the `span` queries from the token on, as Gu et al. use
    64) of the marked tokens at position 0 and at later positions; `outlier` and `ratio`, |h| of the marked tokens'
    outlier channel and its ratio to the layer's median; `q`, `k`, `v`, the mean norm of the marked tokens over the
    median norm of all others.
    """
    layers = []
    probes = []
    for window in windows:
        probe = Probe(model)
        model.hidden(window[None], probe)
        probes.append(probe)
    channel = int(torch.stack([h[0].abs().amax(0).argmax() for p in probes for h in p.hidden[:-1]]).mode().values)
    for layer in range(model.config.num_hidden_layers):
        first, later, size, ratio, norms = [], [], [], [], {"q": [], "k": [], "v": []}
        for probe, marks in zip(probes, is_sink):
            A = probe.attention(layer)[0]  # (H, T, T)
            for j in marks.nonzero()[:, 0].tolist():
                (later if j else first).append(A[:, j:j + span, j].mean().item())
            h = probe.hidden[layer][0].float().abs()  # (T, D)
            size.append(h[marks, channel].mean().item())
            ratio.append(size[-1] / h.median().item())
            for kind, x in (("q", probe.q), ("k", probe.k), ("v", probe.v)):
                norm = x[layer][0].float().norm(dim=-1)  # (H or Hkv, T)
                norms[kind].append((norm[:, marks].mean() / norm[:, ~marks].median()).item())
        mean = {"first": first, "later": later, "outlier": size, "ratio": ratio, **norms}
        layers.append({name: sum(v) / len(v) for name, v in mean.items() if v})
    return {"channel": channel, "layers": layers}
