"""Assignment 3: an answer."""
import torch

from tinykv.methods.base import CodecMethod, first_tokens

ASSIGNMENT = "kvsink"


def outlier(hidden):
    magnitudes = hidden[0].abs().flatten().tolist()
    largest, channels = max(magnitudes), hidden.shape[-1]
    at = magnitudes.index(largest)
    return largest, largest / middle(magnitudes), at % channels


def middle(numbers):
    """The median; of two middle numbers the lower one."""
    return sorted(numbers)[(len(numbers) - 1) // 2]


def find_outlier(largest, ratio, channel):
    windows, columns = largest.shape
    blocks = columns - 1
    size = [middle(largest[:, i].tolist()) for i in range(columns)]
    share = [middle(ratio[:, i].tolist()) for i in range(columns)]
    candidates = range(blocks - 1)
    massive = [i for i in candidates if size[i + 1] >= 100 and share[i + 1] >= 1000]
    if massive:
        layer = massive[0]
    else:
        qualified = []
        for layer in candidates:
            before = share[1:layer + 1]
            stands_out = not before or share[layer + 1] >= 3 * middle(before)
            if share[layer + 1] >= 30 and stands_out:
                qualified.append(layer)
        if not qualified:
            return None
        layer = max(qualified, key=lambda i: size[i + 1] / size[i])
    votes = channel[:, layer + 1:min(layer + 4, blocks)].flatten().tolist()
    winner = max(set(votes), key=votes.count)
    return (layer, winner) if votes.count(winner) >= 0.9 * len(votes) else None


class KVSink(CodecMethod):
    def __init__(self, config, preserve=5, emergence_layer=None, outlier_channel=None,
                 **codec_settings):
        super().__init__(config, **codec_settings)
        self.preserve = preserve
        self.n_layers = config.num_hidden_layers
        self.layer, self.channel = emergence_layer, outlier_channel
        self.passes = 1 if emergence_layer is None else 0
        self.profile = []

    def collect(self, step, layer, hidden):
        self.profile.append(outlier(hidden))

    def fit(self, step):
        table = torch.tensor(self.profile).unflatten(0, (-1, self.n_layers + 1))
        self.profile = []
        largest, ratio, channel = table.unbind(-1)
        self.layer, self.channel = find_outlier(largest, ratio, channel.long()) or (None, None)

    def begin(self, cache):
        cache.shared.sinks = None
        cache.shared.sink_sizes = None

    def observe(self, cache, layer, hidden):
        if layer != self.layer:
            return
        start = cache.layers[layer].length - hidden.shape[1]
        sinks, sizes = [], []
        for b, row in enumerate(hidden):
            known = []
            if cache.shared.sinks is not None:
                known = list(zip(cache.shared.sink_sizes[b].tolist(), cache.shared.sinks[b].tolist()))
            numbers = row[:, self.channel].abs().tolist()
            known += [(number, start + i) for i, number in enumerate(numbers)]
            best = sorted(known, reverse=True)[:self.preserve]
            sizes.append([size for size, _ in best])
            sinks.append([position for _, position in best])
        cache.shared.sinks = torch.tensor(sinks)
        cache.shared.sink_sizes = torch.tensor(sizes)

    def keep_keys(self, layer_cache, n):
        if self.layer is None:
            return first_tokens(layer_cache, self.preserve)
        if layer_cache.layer > self.layer:
            return layer_cache.shared.sinks.unsqueeze(1)
        return None
