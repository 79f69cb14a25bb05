"""KVSink (Su and Yuan, 2025): find attention sinks by the outlier that marks them, and keep them.
The same on a page that runs alone: docs/ladder/1_sinks.py.

    Keep: the k tokens whose hidden state is largest in one channel, after one early layer.
    Code: any scheme.
    When: at once under `paper`, in blocks of tokens in a stream.

Algorithm 1. There is one layer, the emergence layer lE, with output H^lE. From that output on, sink tokens carry a huge
number in one fixed channel c of the hidden state. So one look at one channel of one layer's output tells where the
sinks are:
    S = top-k of |H^lE[i, c]| over tokens i
    layers l > lE keep K_l, V_l of S in full precision, and quantize the other tokens
Layers up to lE quantize every token: a prefill has stored their keys before S is known.

Paper and practice. No code is public.
- The paper rounds with an integer zero point (Eq. 10-13), `formula="integer-zero"`. The default here is an offset, so
  that the methods differ in nothing but their idea, and the idea shows most. To use static grids of 3 bits, choose the
  integer: SmolLM2 loses less with it, whatever is kept (docs/crossing.md).
- lE and c come from the paper's Table 3 for the models in it, recognised by their config. It counts layers from 0, so
  lE = 1 is the second layer, and lists up to four channels, of which the method uses one: here the first. On any other
  model `find_outlier` looks for both on the calibration windows. If it finds no outlier, the first k tokens are kept,
  as the method `pfn` does.
- k tokens are always kept, though there may be only one to three sinks. The others are harmless, but cost 16 bits a
  number. With static ranges they are left out of the calibration, as the paper asks.
- Algorithm 1 is a quantized prefill, and S stays as it is when decoding goes on: the `paper` protocol with a prompt.
  Without a prompt `paper` chooses S over the whole window, so a later token can take the place of one that an early
  query would have kept.
- With `choose="always"`, and in a stream without a prompt, S is the top-k of the tokens seen so far: a new sink takes
  the place of a weaker one, which is read as its codes from then on. This finds sinks that come after the prompt; the
  paper does not have it.
- If marked tokens come back all through a text, k of them are soon not enough (docs/results.md, "Long texts"). With
  `threshold`, S has as many tokens as the text has marks: those whose |H^lE[i, c]| is at least that share of the
  largest so far. Because the largest only grows, a token that has left S never returns. If S were a share of the text's
  tokens, as in `antkv`, some would return as k grows, when their rows are gone.
"""
from statistics import median_low, mode
from typing import Annotated

import torch

from tinykv import UserError, at_least
from tinykv.methods.base import CodecMethod, first_tokens


class KVSink(CodecMethod):
    beside = {"rtn": {}, "pfn": {}}
    keeps_by = ("preserve", "threshold")
    # by calibration, on a model that Table 3 does not have
    found = ("layer", "channel", "n_marked", "n_windows")

    def __init__(self, config, preserve=5, choose="prompt",
                 emergence_layer: Annotated[int | None, "the layer whose output shows the outlier"] = None,
                 outlier_channel: Annotated[int | None, "the outlier's channel"] = None,
                 threshold: Annotated[float | None, "keep all tokens whose outlier is at least X times the largest so "
                                                    "far, instead of --preserve"] = None, **codec):
        super().__init__(config, **codec)
        at_least(1, preserve=preserve)  # rtn preserves none
        if threshold is not None and not 0 < threshold <= 1:
            raise UserError(f"threshold is a share of the largest outlier, above 0 and up to 1; got {threshold:g}")
        self.preserve, self.choose, self.threshold = preserve, choose, threshold
        self.n_first = preserve  # kept where the model has no outlier
        if threshold is not None:
            self.preserve, self.keeps_share = 0, True  # as many as the text has marks
        # lE and c; None until calibration has looked for them, -1 if it has found none
        self.layer, self.channel, self.source = known_outlier(config, emergence_layer, outlier_channel)
        self.n_marked = self.n_windows = None  # windows that have this outlier, of all calibration windows
        self.needs_text = self.layer is None

    # Algorithm 1

    def begin(self, cache):
        cache.shared.sinks = None  # (B, up to k): positions of the sinks S
        cache.shared.sink_sizes = None  # (B, up to k): their |H^lE[i, c]|

    def observe(self, cache, layer, hidden):
        """S is the top-k of |H^lE[i, c]| over the tokens seen so far, or those that reach the threshold."""
        if layer != self.layer:
            return
        # the new tokens
        B, T, _ = hidden.shape
        size = hidden[..., self.channel].float().abs()  # (B, T)
        end = cache.layers[layer].length  # the position after the last new token
        position = torch.arange(end - T, end, device=hidden.device).expand(B, T)  # (B, T)
        # compete with the sinks so far
        if cache.shared.sinks is not None:
            size = torch.cat([cache.shared.sink_sizes, size], dim=1)  # (B, up to k + T)
            position = torch.cat([cache.shared.sinks, position], dim=1)  # (B, up to k + T)
        if self.threshold is None:
            top = cache.top_k(size, self.preserve)  # (B, up to k); ties: the earlier token
            size = size.gather(1, top)  # (B, up to k)
        else:
            top, size = reached(size, self.threshold)  # (B, k) both
        cache.shared.sink_sizes = size
        cache.shared.sinks = position.gather(1, top)  # (B, up to k)

    def keep_keys(self, layer_cache, n):
        """The keys of S, and so its values: `Method.keep_values` keeps the same tokens."""
        if self.layer == -1:  # a model without outliers: PFN
            return first_tokens(layer_cache, self.n_first)  # (B, 1, k)
        if layer_cache.layer <= self.layer:  # a prefill quantizes these before S is known
            return None
        return layer_cache.shared.sinks[:, None]  # (B, 1, k)

    # Calibration: where the outlier emerges, and in which channel

    def fit(self, hidden):
        profile = [[outlier(window) for window in h.split(1)] for h in hidden]  # after the embedding, after each layer
        largest, ratio, channel = torch.tensor(profile, dtype=torch.float32).permute(2, 1, 0)  # (W, L + 1) each
        self.layer, self.channel, self.n_marked = find_outlier(largest, ratio, channel.long()) or (-1, -1, 0)
        self.n_windows = len(largest)

    def describe(self):
        if self.layer == -1:
            return (f"no stable outlier in {self.n_windows} calibration windows: the first {self.n_first} tokens are "
                    "kept, as pfn does")
        source = self.source or f"found in {self.n_marked} of {self.n_windows} calibration windows"
        return f"emergence layer {self.layer}, outlier channel {self.channel} ({source})"


def reached(size, threshold):
    """The tokens whose size (B, n) is at least a share `threshold` of the largest: their indices and sizes (B, k), the
    largest first. k is that of the sequence with the most; another one repeats its largest, with a size of -1."""
    size, order = size.sort(dim=1, descending=True, stable=True)  # (B, n) both
    reaches = size >= threshold * size[:, :1]  # (B, n)
    k = int(reaches.sum(1).max())
    return order.where(reaches, order[:, :1])[:, :k], size.where(reaches, -1)[:, :k]


# The search for the outlier on the calibration windows. It is a massive activation (Sun et al., 2024): from one early
# layer on, sink tokens carry a huge number in one channel of the hidden state

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


# Table 3: emergence layer and outlier channel (the first one listed), by model type, layers, hidden
# size, MLP size, KV heads, vocabulary and positions. The last three tell LLaMA-2 from LLaMA-1 and
# from other models of the same shape.
TABLE_3 = {
    ("llama", 32, 4096, 11008, 32, 32000, 4096): (1, 2533),  # LLaMA-2-7B; its chat model has the same config
    ("llama", 40, 5120, 13824, 40, 32000, 4096): (3, 4743),  # LLaMA-2-13B
    ("mistral", 32, 4096, 14336, 8, 32000, 32768): (1, 2070),  # Mistral-7B
    ("llama", 32, 4096, 14336, 8, 128256, 8192): (1, 788),  # LLaMA-3-8B
    ("llama", 32, 4096, 14336, 8, 128256, 131072): (1, 788),  # LLaMA-3.1-8B-instruct; so has the base model
    ("llama", 16, 2048, 8192, 8, 128256, 131072): (1, 400),  # LLaMA-3.2-1B
    ("llama", 28, 3072, 8192, 8, 128256, 131072): (1, 588),  # LLaMA-3.2-3B
}


def known_outlier(config, layer, channel):
    """Emergence layer, channel, and where they come from; three times None where calibration has to look for them."""
    if layer is None and channel is None:
        shape = (config.model_type, config.num_hidden_layers, config.hidden_size, config.intermediate_size,
                 config.num_key_value_heads, config.vocab_size, config.max_position_embeddings)
        if shape in TABLE_3:
            return *TABLE_3[shape], "the paper's Table 3"
        return None, None, None
    layers, channels = config.num_hidden_layers, config.hidden_size
    if layer not in range(layers - 1) or channel not in range(channels):  # layers after it keep the sinks
        raise UserError(f"give both the emergence layer and the outlier channel, of layers 0 to {layers - 2} and "
                        f"channels 0 to {channels - 1}; got {layer} and {channel}")
    return layer, channel, "given"
