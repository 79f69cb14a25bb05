"""What a method is: answers to three questions about each token's key and value.

    Keep   which tokens stay in full precision, however old they are?
    Code   how is every other token quantized?
    When   how long does a fresh token stay in full precision, and how many are quantized at a time?
"""
import copy
from statistics import fmean
from typing import Annotated

import torch

from tinykv import UserError
from tinykv.codecs.base import BLOCK, CALIBRATION_WINDOWS
from tinykv.codecs.schemes import SCHEMES, make_codecs


class Method:
    """The interface between a method and the cache.

    A method holds its settings and what calibration found, but nothing of any text. What it remembers of a text lives
    on that text's cache, under a name (`cache.shared`). One method can therefore serve any number of caches.

    A subclass's settings are the keyword arguments of its constructor, with the paper's values as defaults. The command
    line offers them under the same names, with `-` for `_`. A constructor that ends in `**name` passes the rest to its
    parent and so inherits the parent's settings. The attributes here only give types and help to settings of their
    names: such a setting is a constructor's argument that the constructor keeps, `self.recent = recent`; bits are those
    of `codecs`.
    """
    config = None  # of the model that it is made for

    # Settings that many methods have
    k_bits: Annotated[float, "bits per number in keys: 1, 1.5 (three levels), 2 to 8, 16"]
    v_bits: Annotated[float, "bits per number in values"]
    scheme: Annotated[str, f"a pair of codecs: {', '.join(SCHEMES)}; fp8 and other formats: docs/own_codec.md"] = None
    rope: Annotated[str, "store keys before or after RoPE: pre or post"] = "post"  # pre: rotated when they are read
    preserve: Annotated[int, "tokens kept in full precision"] = 0
    recent: Annotated[int, "newest tokens that stay in full precision (protocol stream)"] = 0
    block: Annotated[int, "tokens quantized at a time (protocol stream)"] = 1
    choose: Annotated[str, "choose what to keep after the prompt, or at each quantization: prompt or always"] = "always"

    # Keep
    uses_scores = False  # True: the cache asks `score` at every update
    keeps_share = False  # True: not `preserve` tokens, but more in a longer text, as the column 128K counts
    keeps_by = ("preserve",)  # settings that decide what calibration keeps
    prefix = None  # an `intactkv.Prefix`: given keys and values, which every text begins with
    # Code
    codecs = ()  # [Pair(k, v)], the two codecs of each layer (codecs/base.py)
    # Calibration
    needs_text = False  # True: calibration calls `fit`, before that of the codecs
    found = ()  # attributes that `fit` sets, integers or None; they are tables, as those of codecs are
    calibrated_on = None  # when calibration had ended: the model's `identity`, `made_with` of the method, its codecs
    calibration_windows = CALIBRATION_WINDOWS  # how many it sees unless the user says otherwise
    # In tables
    name = None  # of the method; None: the name of its class
    # {method: settings}: baselines that the table adds when this is the only method asked for
    beside = {}

    def __init__(self, config):
        if not hasattr(config, "num_hidden_layers"):
            raise UserError(f"a method is made for a model's config, such as model.config; got {config!r}")
        self.config = config

    __copy__ = copy.deepcopy  # or to calibrate one would change the tables of the other

    # Code

    def bits_of(self, kind):
        """Nominal bits of a number in keys (kind "k"), or values ("v"): those of the codecs, the mean over the
        layers."""
        return fmean(getattr(pair, kind).bits for pair in self.codecs)

    def each_codec(self):
        """[(layer, "k" or "v", codec)]."""
        return [(layer, kind, codec) for layer, pair in enumerate(self.codecs) for kind, codec in zip("kv", pair)]

    def learning(self):
        """[codec] of those that calibration gives their tables."""
        return [codec for _, _, codec in self.each_codec() if codec.needs_text]

    # When

    def block_of(self, kind):
        """How many keys (kind "k"), or values ("v"), are quantized at a time in a stream. KIVI's may differ."""
        return self.block

    # Keep

    def begin(self, cache):
        """A new text begins in cache, a KVCache: name what the method will remember of it (`cache.shared`)."""

    def observe(self, cache, layer, hidden):
        """Look at the layer's output for the new tokens, hidden (B, T, D); cache: a KVCache."""

    def score(self, layer_cache, q, K):
        """Score all tokens, given new queries q (B, H, T, d) and all keys K (B, Hkv, S, d), both rotated.

        Returns scores of the tokens' keys and of their values, (B, Hkv, S) both. For tokens in full precision, the
        cache sums them: `recent_scores` and `kept_scores` of `CachedRows`.
        """
        raise NotImplementedError

    def keep_keys(self, layer_cache, n):
        """Choose the keys to keep from now on; all others are quantized.

        n: how many of the oldest recent keys are about to be quantized. A method that chooses once, after the prompt,
        gets the prompt's length.

        Returns positions (1 or B, 1 or Hkv, p) of recent or kept tokens, or None for no change. A head that keeps fewer
        than p tokens repeats one of them. It must only read: the cache calls it for keys and, unless you override
        `keep_values`, again for values.

        Calibration calls it as well, when a codec that `needs_text` has no tables yet.
        """

    def keep_values(self, layer_cache, n):
        """The same for values; n counts values. By default, the same positions as `keep_keys`."""
        return self.keep_keys(layer_cache, n)

    # Calibration

    @property
    def needs_calibration(self):
        """Whether `calibrate.calibrate` has to run before the next text."""
        return bool(self.needs_text or self.learning()) and self.calibrated_on is None

    def fit(self, hidden):
        """Set the attributes in `found`. hidden yields the embedding, then each layer's output, of all calibration
        windows, (W, T, D) each. Loop over it only once: it may not fit in memory."""

    def describe(self):
        """One line for the user: what was chosen or found."""
        return ""

    def __repr__(self):
        codec = self.scheme or "codec of its own"
        return f"{type(self).__name__}({codec}, {self.bits_of('k'):g}-bit K, {self.bits_of('v'):g}-bit V)"


class CodecMethod(Method):
    """A method on a named pair of codecs. Its own idea is what to keep and when to quantize.

    codec: settings of the pair, such as `group_size`; the functions of SCHEMES declare them.
    """

    def __init__(self, config, k_bits=2, v_bits=2, scheme="channel-static", rope=None, block=None,
                 centre: Annotated[str, "subtract from keys the mean of each channel: off or on"] = "off", **codec):
        super().__init__(config)
        self.codecs = make_codecs(config, scheme, k_bits, v_bits, centre, **codec)
        self.scheme = scheme
        _, default_rope = SCHEMES[scheme]
        self.rope = rope or ("pre" if centre == "on" else default_rope)
        # where groups run along the tokens, quantize as many tokens at a time as fill one group
        tokens_per_group = self.codecs[0].k.tokens_per_group
        if block is None:
            block = tokens_per_group if tokens_per_group > 1 else BLOCK
        self.block = block


def first_tokens(layer_cache, count):
    """What `keep_keys` returns to keep the first `count` tokens, or all if there are fewer: (B, 1, count)."""
    if count == 0:
        return None
    rows = layer_cache.keys.recent  # (B, Hkv, r, d)
    positions = torch.arange(min(count, layer_cache.length), device=rows.device)  # (count)
    return positions.expand(len(rows), 1, -1)  # (B, 1, count)


def best_tokens(rows, n, count, score=None):
    """What `keep_keys` returns to keep the `count` tokens with the largest scores so far.

    Kept tokens compete with the n oldest recent tokens, which are about to be quantized. rows: the `CachedRows` of K or
    of V. score: a function from keys or values (B, Hkv, m, d) to scores (B, h, m), where h is 1 or Hkv. It multiplies
    the scores that the cache sums, if there are any; without it, these are used as they are.

    Returns positions (B, h, up to count), the best first; of equal scores, kept tokens win over newer ones. Returns
    None, and so keeps nothing, if there are no scores: unless the method `uses_scores`, and during calibration.
    """
    accumulates = rows.recent_scores is not None
    if score is None and not accumulates:
        return None
    # the tokens that are about to be quantized
    scores = 1 if score is None else score(rows.recent[:, :, :n])  # (B, h, n)
    if accumulates:
        scores = scores * rows.recent_scores[:, :, :n]  # (B, h, n)
    positions = torch.arange(rows.n_coded, rows.n_coded + n, device=scores.device)  # (n)
    positions = positions.expand_as(scores)  # (B, h, n)

    # the kept ones stand first, so they win ties against newer tokens
    if rows.kept_positions is not None:
        kept_scores = 1 if score is None else score(rows.kept_rows)  # (B, h, p)
        if accumulates:
            kept_scores = kept_scores * rows.kept_scores  # (B, h, p)
        kept_positions = rows.kept_positions.expand_as(kept_scores)  # (B, h, p)
        scores = torch.cat([kept_scores, scores], dim=-1)  # (B, h, p + n)
        positions = torch.cat([kept_positions, positions], dim=-1)  # (B, h, p + n)

    order = scores.sort(dim=-1, descending=True, stable=True).indices  # (B, h, p + n)
    return positions.gather(-1, order[..., :count])  # (B, h, up to count)
