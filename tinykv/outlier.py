"""The search for the outlier that marks attention sinks: the layer after which it emerges, and its channel.

Massive activations (Sun et al., 2024): from one early layer on, sink tokens carry a huge number in one channel of the
hidden state. It is looked for on the calibration windows.
"""
import torch


def columns(profile, n_layers):
    """The `outlier` of each window after the embedding and after each layer, in order -> largest, ratio, channel
    (W, L + 1) of `find_outlier`."""
    table = torch.tensor(profile).unflatten(0, (-1, n_layers + 1))  # (W, L + 1, 3)
    largest, ratio, channel = table.unbind(-1)  # (W, L + 1) each
    return largest, ratio, channel.long()


def outlier(hidden):
    """hidden (1, T, D) -> the largest |h|, its ratio to the median |h|, and its channel."""
    h = hidden[0].float().abs()  # (T, D)
    largest, median = h.max(), h.median()
    return largest.item(), (largest / median).item(), h.argmax().item() % h.shape[1]


def find_outlier(largest, ratio, channel):
    """Emergence layer and channel of the stable outlier, or None if the model has none.

    largest, ratio, channel (W, L + 1): each window's outlier after the embedding (column 0) and
    after layer l (column l + 1), see `outlier`.
    """
    layer = find_layer(largest.median(0).values, ratio.median(0).values)
    if layer is None:
        return None
    # each window votes for a channel in up to three layers from there on; 90% have to agree. The last layer has no
    # vote: there the outlier is cleared
    of_layers = channel[:, 1:-1]  # (W, L - 1)
    votes = of_layers[:, layer:layer + 3]  # (W, up to 3)
    winner = int(votes.flatten().mode().values)
    agreement = (votes == winner).float().mean()
    return (layer, winner) if agreement >= 0.9 else None


def find_layer(largest, ratio):
    """The layer after which the outlier stands out, or None. largest, ratio (L + 1): as above.

    A large model has massive activations, by the criterion of Sun et al. (2024): the first layer
    whose outlier is at least 100, and at least 1,000 times the median |h|, is the emergence layer.
    A small model has the same thing smaller. Layers qualify whose ratio is at least 30, and three
    times the median ratio of the layers before, of which layer 0 has none. The emergence layer is the
    one of them at which the outlier grows most. Growth alone would pick layer 0, as an embedding is small.
    """
    # from here on layer l is number l. The last one cannot be it, as no layer after it could keep its sinks
    growth = largest[1:-1] / largest[:-2]  # (L - 1)
    largest, ratio = largest[1:-1], ratio[1:-1]  # (L - 1) both
    is_massive = (largest >= 100) & (ratio >= 1000)  # (L - 1)
    if is_massive.any():
        return int(is_massive.int().argmax())
    for layer in range(len(growth)):
        stands_out = layer == 0 or ratio[layer] >= 3 * ratio[:layer].median()
        if ratio[layer] < 30 or not stands_out:
            growth[layer] = 0  # does not qualify
    return int(growth.argmax()) if growth.any() else None
