"""What a method is: answers to three questions about each token's key and value.

    Keep   which tokens stay in full precision, however old they are?
    Code   how is every other token quantized?
    When   how long does a fresh token stay in full precision, and how many are quantized at a time?
"""
import inspect
from typing import Annotated

import torch

from tinykv import UserError, one_of
from tinykv.codecs.base import BLOCK, CALIBRATION_WINDOWS, Pair
from tinykv.codecs.codebook import FEWEST, make_codebooks
from tinykv.codecs.schemes import SCHEMES, make_codecs
from tinykv.tracing import same_model

CHOOSE = ("prompt", "always")  # when a method chooses the tokens that it keeps
OF_A_PREFIX = ("name", "ids", "trained_for", "fill", "rows")  # what is asked of one


class Method:
    """The interface between a method and the cache.

    A method holds its settings and what calibration found, but nothing of any text. What it remembers of a text lives
    on that text's cache, under a name (`cache.shared`). One method can therefore serve any number of caches.

    A subclass's settings are the keyword arguments of its constructor, with the paper's values as defaults. The command
    line offers them under the same names, with `-` for `_`. A constructor that ends in `**name` passes the rest to its
    parent and so inherits the parent's settings. Those that are attributes here have their types and help here.
    """
    # Settings that many methods have, with their types and the help that the command line gives
    k_bits: Annotated[float, "bits per number in keys: 1, 1.5 (three levels), 2 to 8, 16"] = 16
    v_bits: Annotated[float, "bits per number in values"] = 16
    scheme: Annotated[str, f"a pair of codecs: {', '.join(SCHEMES)}"] = None
    rope: Annotated[str, "store keys before or after RoPE: pre or post"] = "post"  # pre: rotated when they are read
    preserve: Annotated[int, "tokens kept in full precision"] = 0
    recent: Annotated[int, "newest tokens that stay in full precision (protocol stream)"] = 0
    block: Annotated[int, "tokens quantized at a time (protocol stream)"] = 1
    choose: Annotated[str, "choose what to keep after the prompt, or at each quantization: prompt or always"] = "always"

    # Keep
    uses_scores = False  # True: the cache asks `score` at every update
    keeps_share = False  # True: `preserve` is a percentage of the text's tokens
    prefix = None  # an `intactkv.Prefix`: given keys and values, which every text begins with
    # Code
    codecs = ()  # [Pair(k, v)], the two codecs of each layer (codecs/schemes.py)
    # Calibration
    config = None  # of the model that it was made for
    needs_text = False  # True: calibration calls `fit`, before that of the codecs
    found = ()  # attributes that `fit` sets, integers or None; they are saved with the codecs' tables
    calibrated_on = None  # (`identity` of the model, `stored_as` of the method) when calibration had ended
    calibration_windows = CALIBRATION_WINDOWS  # how many it should see, unless the user says otherwise
    # In tables
    name = None  # of the method; None: the class's
    # {method: settings}: baselines that the table adds when the user asks for this method only
    beside = {}

    def __init__(self, config):
        self.config = config

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

        n: how many of the oldest recent keys are about to be quantized; if the method chooses once, the whole prompt.

        Returns positions (1 or B, 1 or Hkv, p) of recent or kept tokens, or None for no change. A head that keeps fewer
        than p tokens repeats one of them. The answer depends only on the cache, and does not change it.
        """

    def keep_values(self, layer_cache, n):
        """The same for values; n counts values. By default, the same positions as `keep_keys`."""
        return self.keep_keys(layer_cache, n)

    # Calibration

    def fit(self, hidden):
        """Find what is in `found`. hidden: of all calibration windows the embedding, and each layer's output, (W, T, D)
        each; to be gone through once, as not all may be held in memory."""

    @property
    def needs_calibration(self):
        """Whether `calibrate.calibrate` has to run before the next text."""
        if self.calibrated_on is not None:
            return False
        return self.needs_text or any(codec.needs_text for _, _, codec in self.each_codec())

    def each_codec(self):
        """[(layer, "k" or "v", codec)]."""
        return [(layer, kind, codec) for layer, pair in enumerate(self.codecs) for kind, codec in zip("kv", pair)]

    def calibrated(self):
        """What calibration found, for a file: {"3.k.scale": tensor, ...}."""
        numbers = {name: getattr(self, name) for name in self.found if self.needs_text}
        tables = {name: torch.tensor(number) for name, number in numbers.items() if number is not None}
        for layer, kind, codec in self.each_codec():
            tables |= {f"{layer}.{kind}.{name}": table for name, table in codec.calibrated().items()}
        return tables

    def restore(self, tables, model):
        """Take what `calibrated` returned, instead of calibrating on this model. Names that are not declared are
        ignored. UserError where a codec gets no table at all."""
        self.calibrated_on = None  # until the last table is there
        for name in self.found:
            if name in tables:
                setattr(self, name, tables[name].item())
        for layer, kind, codec in self.each_codec():
            names = {name: f"{layer}.{kind}.{name}" for name in codec.tables}
            own = {name: tables[in_file] for name, in_file in names.items() if in_file in tables}
            if codec.needs_text and not own:
                what = "calibrate it" if codec.tables else f"name what `fit` sets in `tables` of {codec!r}"
                raise UserError(f"{self!r} finds no table for {kind.upper()} of layer {layer}; {what}")
            vars(codec).update(own)
        self.calibrated_on = model.identity(), self.stored_as()

    def stored_as(self):
        """What tables depend on: where keys are stored, and each codec's class and the arguments it was made with."""
        made_with = [self.rope]
        for _, _, codec in self.each_codec():
            names = inspect.signature(type(codec)).parameters
            values = [value for name in names if isinstance(value := getattr(codec, name, None), str | int | float)]
            made_with.append([type(codec), *values])
        return made_with

    def check(self):
        """UserError for what no cache can run. A command asks as soon as the method is made, and every cache asks."""
        name, L = type(self).__name__, self.config.num_hidden_layers
        one_of(("pre", "post"), rope=self.rope)
        one_of(CHOOSE, choose=self.choose)
        preserve = 0 if self.keeps_share else self.preserve  # a share is a text, such as "1%"
        for setting, value, least in (("recent", self.recent, 0), ("block", self.block, 1), ("preserve", preserve, 0)):
            if not (hasattr(value, "__index__") and value >= least):
                raise UserError(f"{setting} of {name} must be a whole number of at least {least}; got {value!r}")
        for setting, value in (("k_bits", self.k_bits), ("v_bits", self.v_bits)):
            if not isinstance(value, int | float) or not value > 0:  # nor is NaN
                raise UserError(f"{setting} of {name} must be a number above 0; got {value!r}")
        if self.prefix is not None and not all(hasattr(self.prefix, part) for part in OF_A_PREFIX):
            raise UserError(f"prefix of {name} must be None, or have {', '.join(OF_A_PREFIX)}, as an intactkv.Prefix "
                            f"has; got {self.prefix!r}")
        if not isinstance(self.codecs, list | tuple) or [type(pair) for pair in self.codecs] != [Pair] * L:
            raise UserError(f"{name}: `codecs` must be a list of {L} codecs.Pair, one a layer; got {self.codecs!r}")
        for _, kind, codec in self.each_codec():
            if (block := self.block_of(kind)) % codec.tokens_per_group:
                raise UserError(f"a block of {block} tokens does not hold whole groups of "
                                f"{codec.tokens_per_group}; give a multiple")
        learning = [codec for *_, codec in self.each_codec() if codec.needs_text]
        if len(set(map(id, learning))) < len(learning):
            raise UserError(f"{name}: each layer, K and V need codecs of their own, as each is calibrated by itself")

    def check_model(self, model):
        """UserError unless the model has the config that the method was made for and, if the method was calibrated,
        computes what that model did; perhaps in another dtype."""
        if self.config != model.config:
            raise UserError(f"{self!r} was made for another config; make it for this model's, as "
                            "`hf.load_config(folder)` reads it, and let its constructor call super().__init__(config)")
        if self.calibrated_on is not None:
            identity, stored_as = self.calibrated_on
            if stored_as != self.stored_as():
                raise UserError(f"{self!r}: rope, or a setting of a codec, has changed since it was calibrated; make a "
                                "new method with these settings, and calibrate it")
            if not same_model(identity, model.identity()):
                raise UserError(f"{self!r} was calibrated on another model; calibrate it on this one")

    @property
    def offline_bytes(self):
        """Bytes of the codecs' tables: found once, shared by all texts. A single number is no table."""
        return sum(table.nbytes for table in self.calibrated().values() if table.dim())

    def describe(self):
        """One line for the user: what was chosen or found."""
        return ""

    def __repr__(self):
        codec = self.scheme or "codec of its own"
        return f"{type(self).__name__}({codec}, {self.k_bits:g}-bit K, {self.v_bits:g}-bit V)"


class CodecMethod(Method):
    """A method on a named pair of codecs. Its own idea is what to keep and when to quantize.

    codec: settings of the pair, such as `group_size`; the functions of SCHEMES declare them.
    """

    def __init__(self, config, k_bits=2, v_bits=2, scheme="channel-static", rope=None, block=None, **codec):
        super().__init__(config)
        self.codecs = make_codecs(config, scheme, k_bits, v_bits, **codec)
        self.scheme, self.k_bits, self.v_bits = scheme, k_bits, v_bits
        _, default_rope = SCHEMES[scheme]
        self.rope = rope or default_rope
        # where groups run along the tokens, quantize as many tokens at a time as fill one group
        tokens_per_group = self.codecs[0].k.tokens_per_group
        if block is None:
            block = tokens_per_group if tokens_per_group > 1 else BLOCK
        self.block = block


class CodebookMethod(Method):
    """A method on codebooks: CQ and AnTKV. Its own idea is what to keep and when to quantize."""

    def __init__(self, config, vq, bits, sensitivity, sharing):
        super().__init__(config)
        self.codecs = make_codebooks(config, vq, bits, sensitivity, sharing)
        codec = self.codecs[0].k
        self.scheme, self.k_bits, self.v_bits = codec.name, codec.bits, codec.bits
        # weights need four times as much text; but 4,096 centroids would take minutes
        if codec.needs_gradient and codec.m <= 1024:
            self.calibration_windows = 4 * CALIBRATION_WINDOWS

    def describe(self):
        """The format, and what the codebook that has the fewest vectors was calibrated on."""
        codecs = [codec for *_, codec in self.each_codec()]
        line = f"{codecs[0].name}, codebooks of a {codecs[0].sharing}"
        if self.calibrated_on is not None:
            least, samples = min(codecs, key=lambda codec: codec.effective), min(codec.samples for codec in codecs)
            line += f", each calibrated on {samples:,.0f} vectors"
            line += f"; by their weights worth {least.effective:,.0f} or more"
            if least.effective < FEWEST * least.m:
                line += f": few (below {FEWEST} a centroid), so give more --calib-windows, or fewer centroids"
        return line


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
    of V. score: a function from keys or values (B, Hkv, m, d) to scores (B, h, m), where h is 1 or Hkv. If the cache
    sums scores, they are multiplied by it, or used as they are without it.

    Returns positions (B, h, up to count), the best first; of equal scores, kept tokens win over newer ones. Returns
    None if there are no scores: during calibration, queries are not scored.
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
