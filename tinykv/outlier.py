"""The search for the outlier that marks attention sinks: the layer after which it emerges, and its channel.

Massive activations (Sun et al., 2024): from one early layer on, sink tokens carry a huge number in one channel of the
hidden state. It is looked for on the calibration windows.
"""
from statistics import median_low, mode


def outlier(hidden):
    """hidden (1, T, D) -> the largest |h|, its ratio to the median token's largest |h|, and its channel."""
    h = hidden[0].float().abs()  # (T, D)
    of_token = h.amax(1)  # (T)
    largest, median = of_token.max(), of_token.median()
    return largest.item(), (largest / median).item(), h.argmax().item() % h.shape[1]


def find_outlier(largest, ratio, channel):
    """Emergence layer and channel of the stable outlier, and how many windows have it; None if there is none.

    largest, ratio, channel (W, L + 1): each window's outlier after the embedding (column 0) and after layer l (column l
    + 1), see `outlier`.
    """
    # the windows that have an outlier: a layer and a channel each
    layers = [find_layer(*window) for window in zip(largest, ratio)]
    places = [(layer, channel[window, layer + 1].item()) for window, layer in enumerate(layers) if layer is not None]
    if not places:
        return None
    # the channel that most of them name; it is stable if more than half of them do
    winner = mode(c for _, c in places)
    layers = [layer for layer, c in places if c == winner]
    if 2 * len(layers) <= len(places):
        return None
    return median_low(layers), winner, len(layers)


def find_layer(largest, ratio):
    """The layer after which one window's outlier has come to stay, or None. largest, ratio (L + 1): as above.

    It is the first layer whose outlier is at least 5 times what the median token has, and does not double in the three
    layers after. Other tokens are the yardstick, as channels that are large in all tokens mark no sink.
    """
    # from here on layer l is number l. The last one cannot be it, as no layer after it could keep its sinks, and
    # says nothing about the others, as a model clears its outlier there
    largest, ratio = largest[1:-1], ratio[1:-1]  # (L - 1) both
    for layer in range(len(ratio)):
        soon = largest[layer:layer + 4].max()
        if ratio[layer] >= 5 and soon <= 2 * largest[layer]:
            return layer
    return None
