"""Assignment 3: KVSink. Find attention sinks by the outlier that marks them, and keep them.

handout.md explains the tasks. Replace each `raise NotImplementedError`; the lines that are given
work as they stand. Names, arguments and shapes stay as they are. To grade this file:

    python -m tinykv.course.grade docs/course/3-kvsink/starter.py

Shapes: B sequences, T new tokens, D channels of a hidden state, Hkv KV heads, L blocks, W windows.
Blocks, tokens and channels are counted from 0.
"""
import torch

from tinykv.methods.base import CodecMethod, first_tokens  # noqa: F401

ASSIGNMENT = "kvsink"


# Task 1: where the outlier is

def outlier(hidden):
    """The outlier of one block's output. hidden (1, T, D).

    Returns (largest, ratio, channel): the largest |h| of all numbers, its ratio to the median over
    the tokens of each one's largest |h|, and the channel in which it stands, 0 .. D-1. Two floats
    and an int.
    """
    raise NotImplementedError("assignment 3, kvsink: outlier")


def find_outlier(largest, ratio, channel):
    """The emergence layer and the outlier channel of a model, (lE, c), two ints; None if the model
    has no stable outlier. The rule is in the handout.

    largest, ratio, channel (W, L + 1): what `outlier` gave for each of W windows, in column 0 after
    the embedding and in column l + 1 after block l.
    """
    raise NotImplementedError("assignment 3, kvsink: find_outlier")


class KVSink(CodecMethod):

    # given: settings

    def __init__(self, config, preserve=5, emergence_layer=None, outlier_channel=None,
                 **codec_settings):
        super().__init__(config, **codec_settings)
        self.preserve = preserve  # k
        self.n_layers = config.num_hidden_layers  # L
        self.layer, self.channel = emergence_layer, outlier_channel  # lE and c
        self.passes = 1 if emergence_layer is None else 0  # over the calibration windows
        self.profile = []  # while calibrating: `outlier` of each column, window after window

    # given: calibration, which calls your two functions

    def collect(self, step, layer, hidden):
        self.profile.append(outlier(hidden))

    def fit(self, step):
        table = torch.tensor(self.profile).unflatten(0, (-1, self.n_layers + 1))  # (W, L + 1, 3)
        self.profile = []
        largest, ratio, channel = table.unbind(-1)  # (W, L + 1) each
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
        raise NotImplementedError("assignment 3, kvsink: observe")

    # Task 3: keep

    def keep_keys(self, layer_cache, n):
        """Which tokens to keep in full precision, asked when layer `layer_cache.layer` is about to
        quantize its n oldest recent tokens.

        Returns positions (B, 1, p), or None to keep nothing: None up to layer lE, S after it. In a
        model without an outlier (`self.layer` is None) keep the first k tokens in every layer;
        `first_tokens(layer_cache, k)` has the right shape. `layer_cache.shared` is `cache.shared`.
        """
        raise NotImplementedError("assignment 3, kvsink: keep_keys")
