"""Assignment 3: KVSink. Find attention sinks by the outlier that marks them, and keep them.

Shapes: B sequences, T new tokens, D channels of a hidden state, Hkv KV heads, L blocks, W windows.
Blocks, tokens and channels are counted from 0.
"""
import torch

from tinykv.methods.base import CodecMethod, first_tokens

ASSIGNMENT = "kvsink"


# Task 1: where the outlier is

def outlier(hidden):
    """The outlier of one block's output. hidden (1, T, D).

    Returns (largest, ratio, channel): the largest |h| of all numbers, its ratio to the median over
    the tokens of each one's largest |h|, and the channel in which it stands, 0 .. D-1. Two floats
    and an int.
    """
    # answer
    tokens = hidden[0].abs().tolist()
    of_token = [max(token) for token in tokens]
    largest = max(of_token)
    token = tokens[of_token.index(largest)]
    return largest, largest / middle(of_token), token.index(largest)


def find_outlier(largest, ratio, channel):
    """The emergence layer and the outlier channel of a model, (lE, c), two ints; None if the model
    has no stable outlier. The rule is in the handout.

    largest, ratio, channel (W, L + 1): what `outlier` gave for each of W windows, in column 0 after
    the embedding and in column l + 1 after block l.
    """
    # answer
    named = []
    for sizes, ratios, channels in zip(largest.tolist(), ratio.tolist(), channel.tolist()):
        blocks = list(zip(sizes, ratios, channels))[1:-1]
        for layer, (size, share, c) in enumerate(blocks):
            doubles = any(later[0] > 2 * size for later in blocks[layer + 1:layer + 4])
            if share >= 5 and not doubles:
                named.append((layer, c))
                break
    votes = [c for _, c in named]
    winner = max(votes, key=votes.count, default=None)
    if 2 * votes.count(winner) <= len(votes):
        return None
    return middle([layer for layer, c in named if c == winner]), winner


class KVSink(CodecMethod):

    # given: settings

    def __init__(self, config, preserve=5, emergence_layer=None, outlier_channel=None,
                 **codec_settings):
        super().__init__(config, **codec_settings)
        self.preserve = preserve  # k
        self.layer, self.channel = emergence_layer, outlier_channel  # lE and c
        self.needs_text = emergence_layer is None  # of calibration

    # given: calibration, which calls your two functions

    def fit(self, hidden):
        profile = [[outlier(window) for window in h.split(1)] for h in hidden]
        largest, ratio, channel = torch.tensor(profile).permute(2, 1, 0)  # (W, L + 1) each
        place = find_outlier(largest, ratio, channel.long())
        self.layer, self.channel = place or (None, None)  # None: this model has no outlier

    def describe(self):
        return f"emergence layer {self.layer}, outlier channel {self.channel}"

    # given: what is remembered of a text. `observe` keeps both up to date

    def begin(self, cache):
        cache.shared.sinks = None  # (B, up to k), integers: positions of the sinks so far, S
        cache.shared.sink_sizes = None  # (B, up to k), floats: |H[i, c]| of each, in the same order

    # Task 2: look

    def observe(self, cache, layer, hidden):
        """After block `layer`: hidden (B, T, D) is its output for the T new tokens.

        After block lE, and after no other, make `cache.shared.sinks` the k tokens with the largest
        |H[i, c]| of all tokens so far, and `cache.shared.sink_sizes` their |H[i, c]|. If there are
        fewer than k tokens, take all. A position is counted from the start of the text:
        `cache.layers[layer].length` tokens have been seen, with the T new ones.
        """
        # answer
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

    # Task 3: keep

    def keep_keys(self, layer_cache, n):
        """Which tokens to keep in full precision, asked when layer `layer_cache.layer` is about to
        quantize its n oldest recent tokens.

        Returns positions (B, 1, p), or None to keep nothing: None up to layer lE, S after it. In a
        model without an outlier (`self.layer` is None) keep the first k tokens in every layer;
        `first_tokens(layer_cache, k)` has the right shape. `layer_cache.shared` is `cache.shared`.
        """
        # answer
        if self.layer is None:
            return first_tokens(layer_cache, self.preserve)
        if layer_cache.layer > self.layer:
            return layer_cache.shared.sinks.unsqueeze(1)
        return None


# answer: helpers

def middle(numbers):
    """The median; of two middle numbers the lower one."""
    return sorted(numbers)[(len(numbers) - 1) // 2]
