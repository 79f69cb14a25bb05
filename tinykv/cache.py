"""The KV cache. Each layer holds its keys as drawn here, and its values in the same way:

    position    0   1   2   3   4   5   6   7   8   9  10  11
    coded       c   c   c   c   c   c   c   c                  old tokens: the codec's codes, in order
    recent                                      x   x   x   x  the newest tokens, in 16 bits
    kept        K           K                                  tokens that the method keeps, in 16 bits
                -----------------------------------------------
    read        K   c'  c'  K   c'  c'  c'  c'  x   x   x   x  what attention gets; c': decoded

A kept token has a code as well, which is read only if the method drops the token later. So no position is skipped, and
groups of tokens that share a scale stay aligned. "16 bits" is the model's dtype, or fp16 if the model runs in fp32.

`LayerCache.update` is the whole idea; docs/ladder/ has it on a page. It appends the new tokens and calls `quantize`,
which answers When, Keep and Code. The protocol says whether attention reads before or after `quantize`:

    paper    Quantize, then read. The papers measure perplexity this way. One forward reads one text, and every query
             reads the codes of every token that is not kept, even of its own.
    stream   Read, then quantize. Generation works this way. Queries see new tokens in full precision. Then whole blocks
             of `method.block` tokens are quantized, but never the newest `method.recent` tokens.

If the text has a prompt, its first P tokens arrive in one forward, under either protocol, and the rest as a stream.
Under `paper`, prompt tokens that do not fill a group stay recent. A method whose `choose` is "prompt" chooses the
tokens it keeps once, at the end of the prompt.
"""
import copy
import inspect
import math
from collections import ChainMap
from types import SimpleNamespace

import torch

from tinykv import UserError, at_least, one_of
from tinykv.codecs.base import Pair, sixteen_bits
from tinykv.model import check_tokens, same_model

PROTOCOLS = ("paper", "stream")


class CachedRows:
    """The keys (kind "k") or the values (kind "v") of one layer.

    A row is the key or the value of one token in one head: d numbers. If the method uses scores, the cache sums what
    `Method.score` returns over all queries so far, as long as the method chooses. Only rows in full precision have such
    a sum.
    """

    def __init__(self, layer, kind, codec):
        self.layer, self.kind, self.codec = layer, kind, codec
        self.n_coded = 0  # C: tokens quantized so far, and the position of the oldest recent token
        self.codes = None  # Codes of the tokens 0 .. C-1
        self.recent = None  # (B, Hkv, r, d): the tokens C .. C+r-1
        self.recent_scores = None  # (B, Hkv, r)
        self.kept_positions = None  # (B, 1 or Hkv, p) int32; a head that keeps fewer than p repeats one of its own
        self.kept_rows = None  # (B, Hkv, p, d): the rows at those positions
        self.kept_scores = None  # (B, Hkv, p)
        self.finite = torch.tensor(True)  # False once a number that is quantized, or a score, was not finite

    def append(self, rows):
        """New rows (B, Hkv, T, d) join the recent ones."""
        if self.recent is not None:
            recent = self.recent.expand(len(rows), -1, -1, -1)  # a prefix is held once for all sequences of a batch
            rows = torch.cat([recent, rows], dim=2)  # (B, Hkv, r + T, d)
        self.recent = rows

    def keep(self, positions):
        """Keep the tokens at `positions` (1 or B, 1 or Hkv, p) from now on, and no others."""
        B, Hkv, _, d = self.recent.shape
        shape, dtype = tuple(getattr(positions, "shape", ())), str(getattr(positions, "dtype", ""))
        fits = len(shape) == 3 and shape[0] in (1, B) and shape[1] in (1, Hkv)
        if not fits or not dtype.startswith(("torch.int", "torch.uint")):
            raise UserError("`keep_keys` and `keep_values` have to give integers (1 or B, 1 or Hkv, p), with B = "
                            f"{B} and Hkv = {Hkv}, not a {type(positions).__name__} {shape} {dtype}: {self!r}")
        positions = positions.to(self.recent.device, torch.int64).expand(B, -1, -1)  # (B, 1 or Hkv, p)

        # the rows in full precision, recent | kept, and where each token is among them
        rows, scores = self.recent, self.recent_scores  # (B, Hkv, r, d), (B, Hkv, r)
        if self.kept_positions is not None:
            rows = torch.cat([rows, self.kept_rows], dim=2)  # (B, Hkv, r + n, d)
            if scores is not None:
                scores = torch.cat([scores, self.kept_scores], dim=2)  # (B, Hkv, r + n)
        index, is_exact = self.find(positions)  # (B, 1 or Hkv, p) both
        if not is_exact.all():
            raise UserError(f"`keep_keys` or `keep_values` gave token {int(positions[~is_exact][0])}, which is neither "
                            f"recent nor kept: {self!r}")

        index = index.long().expand(B, Hkv, -1)  # (B, Hkv, p)
        self.kept_rows = rows.gather(2, index[..., None].expand(-1, -1, -1, d))  # (B, Hkv, p, d)
        if scores is not None:
            self.kept_scores = scores.gather(2, index)  # (B, Hkv, p)
        self.kept_positions = positions.to(torch.int32, copy=True)

    def find(self, positions):
        """Where the tokens at `positions` (B, 1 or Hkv, p) are among the rows in full precision, recent | kept, and
        whether they are there: (B, 1 or Hkv, p) both."""
        index, r = positions - self.n_coded, self.recent.shape[2]  # (B, 1 or Hkv, p)
        is_exact = (index >= 0) & (index < r)  # (B, 1 or Hkv, p): the token is recent
        if self.kept_positions is not None:
            same = positions[..., :, None] == self.kept_positions[..., None, :]  # (B, 1 or Hkv, p, n)
            index = torch.where(is_exact, index, r + same.int().argmax(-1))  # a kept one stands after the recent ones
            is_exact = is_exact | same.any(-1)
        return index, is_exact

    def quantize(self, n):
        """Quantize the n oldest recent tokens. Kept ones do not widen their group's range."""
        oldest = self.recent[:, :, :n]  # (B, Hkv, n, d)
        self.finite = self.finite & oldest.isfinite().all()
        codes = self.codec.encode(oldest, ignore=self.is_kept(n))
        if not hasattr(codes, "followed_by"):
            raise UserError(f"`encode` of {self.codec!r} has to give codecs.base.Codes; it gave {type(codes).__name__}")
        self.codes = codes if self.codes is None else self.codes.followed_by(codes)
        self.recent = self.recent[:, :, n:].clone()  # a view would keep the quantized rows alive
        if self.recent_scores is not None:
            self.recent_scores = self.recent_scores[:, :, n:].clone()
        self.n_coded += n

    def is_kept(self, n):
        """Which of the n oldest recent tokens are kept: (B, Hkv, n); None if nothing is."""
        if self.kept_positions is None:
            return None
        oldest = torch.arange(self.n_coded, self.n_coded + n, device=self.recent.device)  # (n)
        same = oldest[:, None] == self.kept_positions[..., None, :]  # (B, 1 or Hkv, n, p)
        return same.any(-1).expand(-1, self.recent.shape[1], -1)

    def read(self):
        """The rows of all tokens so far, (B, Hkv, S, d): decoded | recent, and on top of them the kept ones."""
        if self.codes is None:
            return self.recent  # nothing is coded yet: kept tokens are among the recent ones
        decoded = self.codec.decode(self.codes)  # (B, Hkv, C, d) in fp32, or in 16 bits where codes are exact
        B, Hkv, _, d = self.recent.shape
        if not decoded.is_floating_point() or decoded.shape != (B, Hkv, self.n_coded, d):
            raise UserError(f"`decode` of {self.codec!r} has to give floating-point numbers "
                            f"{(B, Hkv, self.n_coded, d)}; it gave {decoded.dtype} {tuple(decoded.shape)}")
        rows = torch.cat([decoded, self.recent], dim=2)  # (B, Hkv, S, d)
        if self.kept_positions is not None:
            index = self.kept_positions.long()[..., None].expand_as(self.kept_rows)  # (B, Hkv, p, d)
            rows.scatter_(2, index, self.kept_rows.to(rows.dtype))
        return rows

    def add_scores(self, scores):
        """Add scores (B, Hkv, S) of all tokens."""
        kept = None
        if self.kept_positions is not None:
            kept = scores.gather(2, self.kept_positions.long().expand(*scores.shape[:2], -1))  # (B, Hkv, p)
        self.accumulate(scores[:, :, self.n_coded:], kept)

    def accumulate(self, recent, kept):
        """Add scores of the recent tokens (B, Hkv, r) and of the kept ones (B, Hkv, p), or None."""
        if self.recent_scores is None:
            self.recent_scores = recent.clone()  # keys and values may have the same scores
        else:
            new_tokens = recent.shape[2] - self.recent_scores.shape[2]
            self.recent_scores = torch.nn.functional.pad(self.recent_scores, (0, new_tokens)) + recent
        if kept is not None:
            self.kept_scores = self.kept_scores + kept

    def tensors(self):
        """What is held, by part: {part: [Codes or tensor]}."""
        parts = {"kept": [self.kept_positions, self.kept_rows, self.kept_scores],
                 "coded": [self.codes],
                 "recent": [self.recent, self.recent_scores]}
        return {part: [t for t in held if t is not None] for part, held in parts.items()}

    def __repr__(self):
        n_recent = 0 if self.recent is None else self.recent.shape[2]
        heads = [] if self.kept_positions is None else self.kept_positions.flatten(0, 1).tolist()
        parts = []
        for part, n, begin in (("coded", self.n_coded, 0), ("recent", n_recent, self.n_coded)):
            # of the head that keeps the most
            kept = max((len({i for i in head if begin <= i < begin + n}) for head in heads), default=0)
            parts.append(f"{n} {part} ({kept} of them kept)" if kept else f"{n} {part}")
        return (f"CachedRows(layer {self.layer}, {self.kind.upper()}: {self.n_coded + n_recent} tokens: "
                f"{', '.join(parts)})")


class LayerCache:
    """One layer's keys and values. shared: what the method remembers of this text, one object for all layers."""

    def __init__(self, layer, method, rope, protocol, shared, prompt=None):
        self.layer, self.method, self.rope = layer, method, rope
        self.protocol, self.shared, self.prompt = protocol, shared, prompt
        codecs = method.codecs[layer]
        self.keys = CachedRows(layer, "k", codecs.k)
        self.values = CachedRows(layer, "v", codecs.v)
        self.length = 0  # tokens seen
        self.dtype = None  # the model's
        self.chooses_once = prompt is not None and method.choose == "prompt"  # it chooses at the end of the prompt
        # `append` sets these for the newest tokens
        self.quantizes_first = False  # whether they are quantized before they are read
        self.is_choosing = True  # whether the method still chooses tokens to keep

    def update(self, q, k, v, seen):
        """Add new tokens; return the keys and values that their queries attend to.

        q (B, H, T, d), k and v (B, Hkv, T, d): the new tokens' own, before RoPE. Returns K (rotated) and V of all
        tokens so far, (B, Hkv, S, d) both.
        """
        self.append(k, v)

        # quantize, then read: a query reads even its own token from its codes
        if self.quantizes_first:
            if self.is_choosing and self.method.uses_scores:
                self.score(q, seen, self.for_attention(q, seen))
            self.quantize()
            return self.for_attention(q, seen)

        # read, then quantize: queries see the new tokens in full precision
        attended = self.for_attention(q, seen)
        if self.is_choosing and self.method.uses_scores:
            self.score(q, seen, attended)
        self.quantize()
        return attended

    def for_attention(self, q, seen):
        """K and V, (B, Hkv, S, d) both. (A `TritonLayer` returns the attention's output, which it computes itself.)"""
        return self.read()

    def quantize(self):
        """Answer the three questions: When, Keep, Code."""
        n_keys, n_values = self.n_to_quantize(self.keys), self.n_to_quantize(self.values)  # When
        self.keep(n_keys, n_values)  # Keep
        if n_keys:  # Code
            self.keys.quantize(n_keys)
        if n_values:
            self.values.quantize(n_values)

    def append(self, k, v):
        """New keys and values (B, Hkv, T, d) join the recent ones, in 16 bits. Keys that are stored after RoPE are
        rounded, rotated, and rounded again, as in a 16-bit model."""
        self.dtype, k, v = k.dtype, sixteen_bits(k), sixteen_bits(v)
        if self.method.rope == "post":
            k = self.rope.rotate(k, self.length)  # (B, Hkv, T, d)
        self.keys.append(k)
        self.values.append(v)
        self.length += v.shape[2]
        # are the newest tokens the prompt? Under `paper` a text without one counts as one
        in_prompt = self.protocol == "paper" if self.prompt is None else self.length <= self.prompt
        self.quantizes_first = self.protocol == "paper" and in_prompt
        self.is_choosing = in_prompt or not self.chooses_once

    def read(self):
        """K (rotated) and V of all tokens so far, (B, Hkv, S, d) both."""
        K, V = self.keys.read(), self.values.read()  # (B, Hkv, S, d) both
        if self.method.rope == "pre":
            K = self.rope.rotate(K.float())  # the token in row t is at position t
        return K.to(self.dtype), V.to(self.dtype)

    def score(self, q, seen, attended):
        """Add the method's scores, given the new queries and what they attend to: K and V (B, Hkv, S, d), in full
        precision where they still are."""
        q, K = self.rope.rotate(q, seen), attended[0]  # (B, H, T, d), (B, Hkv, S, d)
        of_keys, of_values = self.method.score(self, q, K)  # (B, Hkv, S) both
        if not of_keys.shape == of_values.shape == K.shape[:3]:
            raise UserError(f"`score` of {type(self.method).__name__} has to give the scores of keys and of values, "
                            f"{tuple(K.shape[:3])} both; it gave {tuple(of_keys.shape)}, {tuple(of_values.shape)}")
        self.keys.finite = self.keys.finite & of_keys.isfinite().all() & of_values.isfinite().all()
        self.keys.add_scores(of_keys)
        self.values.add_scores(of_values)

    def n_to_quantize(self, rows):
        """When: how many of the oldest recent tokens are quantized now. rows: the keys or the values."""
        if self.quantizes_first:
            if self.prompt is None:
                return self.length  # a whole text, none of which is coded yet
            # cut keys and values at the same token: a later token cannot join a group that is not full
            group = math.lcm(self.keys.codec.tokens_per_group, self.values.codec.tokens_per_group)
            return self.length - self.length % group
        # leave the newest `method.recent` tokens; of the others, take whole blocks
        old = max(0, self.length - rows.n_coded - self.method.recent)
        return old - old % self.method.block_of(rows.kind)

    def next_length(self):
        """The length of text at which a stream quantizes keys or values next."""
        recent, lengths = self.method.recent, []
        for rows in (self.keys, self.values):
            block = self.method.block_of(rows.kind)
            full = max(0, (self.length - rows.n_coded - recent) // block)  # whole blocks of a long prefix wait
            lengths.append(rows.n_coded + recent + (full + 1) * block)
        return min(lengths)

    def keep(self, n_keys, n_values):
        """Ask the method which tokens to keep, and keep them.

        It is asked when tokens are about to be quantized: for keys and for values, before either changes. A method that
        chooses once is asked about the whole prompt, even if none of it is quantized yet.
        """
        if self.chooses_once:
            n_keys = n_values = self.length if self.is_choosing else 0
        keep_keys = self.method.keep_keys(self, n_keys) if n_keys else None
        keep_values = self.method.keep_values(self, n_values) if n_values else None
        if keep_keys is not None:
            self.keys.keep(keep_keys)
        if keep_values is not None:
            self.values.keep(keep_values)
        if self.chooses_once:  # the choice is final, so scores are no longer needed
            for rows in (self.keys, self.values):
                rows.recent_scores = rows.kept_scores = None

    def __repr__(self):
        return f"LayerCache({self.keys!r}, {self.values!r})"


class KVCache:
    """The cache of a batch of sequences of equal length, one `LayerCache` a layer: `model(tokens, cache)`.

    protocol: what the queries of one forward see of its own tokens. "stream": full precision, so that the perplexity of
    a single forward is fp16's, whatever the method; "paper": what will be held, as `evaluate.measure` has it.
    prompt: P, if the text begins with a prompt. Its first P tokens, including a prefix, arrive in one forward. If the
    method has a `prefix`, the cache begins with its keys and values, and the model reads only what follows the prefix.
    """
    layer_class = LayerCache

    def __init__(self, model, method, protocol="stream", prompt=None):
        one_of(PROTOCOLS, protocol=str(protocol))  # None is none of them
        at_least(1, prompt=prompt)
        if isinstance(method, str | type):
            raise UserError(f"a cache takes a method that is made, such as KIVI(model.config); got {method!r}")
        self.model = getattr(model, "_orig_mod", model)  # of what torch.compile wraps
        self.method, self.protocol, self.prompt = method, protocol, prompt
        self.config = model.config
        self.reset()

    def reset(self):
        """Forget every token, except those of the method's prefix."""
        self.busy = True  # while this or a forward is running; the model sets it for a forward
        check_method(self.method)
        check_model(self.method, self.model)
        self.rope = self.model.rope
        self.shared = SimpleNamespace()  # what the method knows of this text, by name
        self.method.begin(self)
        self.layers = [self.layer_class(i, self.method, self.rope, self.protocol, self.shared, self.prompt)
                       for i in range(self.config.num_hidden_layers)]
        if self.method.prefix is not None:
            weight = self.model.lm_head.weight  # where the model is, and in what dtype
            keys, values = self.method.prefix.rows(weight)  # by layer, (1, Hkv, n, d) each
            for layer, k, v in zip(self.layers, keys, values):
                layer.append(k, v)
        self.start = len(self)  # tokens of the prefix
        self.unread = None  # (B, 1): the last token of a `generate`, until the next forward
        self.begun_with, self.made_for = self.reads_with(), self.what_layers_hold()
        self.busy = False

    def expect(self, tokens):
        """New tokens (B, T) -> those after the prefix, which every text begins with, and how many tokens are held.
        Later chunks have no prefix. UserError if the tokens are not what comes next."""
        goes_on = len(self) > self.start
        check_tokens(tokens, self.config, len(self) if goes_on else 0)
        T, prefix = tokens.shape[1], self.method.prefix
        if self.busy:
            raise UserError(f"a forward has begun and not ended, so some tokens are read in part: {self!r}; "
                            "`reset` the cache, or make a new one")
        if goes_on:
            self.check_unchanged()
            if self.prompt is None and self.protocol == "paper":
                raise UserError("the paper protocol reads a text in one forward; use protocol='stream', or give the "
                                "prompt's length, to go on from it")
            if len(tokens) != (held := len(self.layers[0].keys.recent)):
                raise UserError(f"the cache holds {held} texts, but tokens for {len(tokens)} were given; give tokens "
                                "for all of them, or make a new cache")
            if self.unread is not None and not tokens[:, :1].equal(self.unread):
                raise UserError("after `generate`, a text goes on with the last token that it gave, as the cache holds "
                                "all others already; give output[:, -1:], and what comes after it")
            self.unread = None
            return tokens, len(self)
        if self.what_layers_hold() != self.made_for:  # edited since: the layers were made for something else
            self.reset()
        if self.method.needs_calibration:
            raise UserError(f"{self.method!r} is not calibrated on this model yet; run "
                            "calibrate(model, method, windows) first")
        if self.prompt is not None and T != self.prompt:
            raise UserError(f"the first forward reads the prompt, {self.prompt} tokens; it got {T}")
        if prefix and not (T > self.start and tokens[:, :self.start].tolist() == [prefix.ids] * len(tokens)):
            raise UserError(f"a text begins with the {len(prefix.ids)} tokens of the prefix {prefix.name} and goes on "
                            f"after them; this one of {T} tokens does not")
        self.begun_with = self.reads_with()
        return tokens[:, self.start:], self.start

    def reads_with(self):
        """What a text is read with, from its beginning to its end: all that the method has, {name: value}."""
        of_all = ChainMap(vars(self.method), *map(vars, type(self.method).__mro__))
        return {name: value for name, value in of_all.items() if value is not None}

    def what_layers_hold(self):
        """What `reset` makes the layers of."""
        return self.method, self.protocol, self.prompt, made_with(self.method), self.method.each_codec()

    def check_unchanged(self):
        """UserError if the method is no longer what this text has begun with."""
        now = self.reads_with()
        changed = [name for name, value in self.begun_with.items() if now.get(name) is not value]
        if changed:
            raise UserError(f"{self.method!r} was calibrated, or edited, after this text had begun: "
                            f"{', '.join(changed)}; `reset` the cache. What a method remembers of a text, it has to "
                            "put into `cache.shared`")

    def __deepcopy__(self, memo):
        """A cache that goes on by itself from the same tokens, of the same model, method and tables."""
        codecs = [codec for *_, codec in self.method.each_codec()]
        shared = self.model, self.rope, self.method, *self.begun_with.values(), *codecs
        memo.update({id(one): one for one in shared})
        new = memo[id(self)] = object.__new__(type(self))
        vars(new).update(copy.deepcopy(vars(self), memo))
        return new

    __copy__ = copy.deepcopy  # or two caches would have one text

    def update(self, layer, q, k, v, seen):
        """Add new tokens to a layer -> K (rotated) and V of all tokens: see `LayerCache.update`."""
        return self.layers[layer].update(q, k, v, seen)

    def observe(self, layer, hidden):
        """Show a layer's output for the new tokens, hidden (B, T, D), to a method that still chooses."""
        if self.layers[layer].is_choosing:
            self.method.observe(self, layer, hidden)

    def top_k(self, x, k):
        """Indices of the k largest of x (B, n), largest first, the earlier of equals: (B, up to k). Triton has a
        kernel for it."""
        return x.sort(dim=1, descending=True, stable=True).indices[:, :k]

    def part_bytes(self, kinds="kv"):
        """Bytes held by each part of all layers' keys (kinds "k"), values ("v"), or both."""
        tensors = [rows.tensors() for layer in self.layers for rows in (layer.keys, layer.values) if rows.kind in kinds]
        return {part: sum(t.nbytes for held in tensors for t in held[part]) for part in ("kept", "coded", "recent")}

    @property
    def nbytes(self):
        """Bytes of everything that the cache holds."""
        return sum(self.part_bytes().values())

    def __getattr__(self, name):
        raise AttributeError(f"a KVCache has no {name!r}; transformers takes a MethodCache (docs/huggingface.md)")

    def __len__(self):
        """Tokens seen by all layers."""
        return self.layers[-1].length

    def __bool__(self):
        """True, also of an empty cache: `cache or KVCache(...)` is the cache."""
        return True

    def __repr__(self):
        length = self.layers[0].length
        done = sum(layer.length == length for layer in self.layers)
        where = "" if done == len(self.layers) else f" in {done} of {len(self.layers)} layers"  # within a forward
        parts = ", ".join(f"{held} bytes {part}" for part, held in self.part_bytes().items())
        return f"KVCache({self.method!r}, {self.protocol}, {length} tokens{where}: {parts})"


# Which methods a cache takes

def check_method(method):
    """UserError for what no cache can run. A command asks as soon as the method is made, and every cache asks."""
    name = type(method).__name__
    if method.config is None:
        raise UserError(f"{name} has no config; let its constructor call super().__init__(config)")
    L = method.config.num_hidden_layers
    one_of(("pre", "post"), rope=method.rope)
    one_of(("prompt", "always"), choose=method.choose)
    for setting, least in (("recent", 0), ("block", 1), ("preserve", 0)):
        value = getattr(method, setting)
        if not (hasattr(value, "__index__") and value >= least):
            raise UserError(f"{setting} of {name} must be a whole number of at least {least}; got {value!r}")
    if not isinstance(method.codecs, list | tuple) or [type(pair) for pair in method.codecs] != [Pair] * L:
        raise UserError(f"{name}: `codecs` must be a list of {L} codecs.Pair, one a layer; got {method.codecs!r}")
    for _, kind, codec in method.each_codec():
        if codec.bits is None:
            raise UserError(f"{type(codec).__name__} has no `bits`; set its nominal bits of a number, such as 4")
        if (block := method.block_of(kind)) % codec.tokens_per_group:
            raise UserError(f"a block of {block} tokens does not hold whole groups of "
                            f"{codec.tokens_per_group}; give a multiple")
    if len(set(map(id, method.learning()))) < len(method.learning()):
        raise UserError(f"{name}: each layer, K and V need codecs of their own, as each is calibrated by itself")


def check_model(method, model):
    """UserError unless the model has the config that the method was made for and, if the method was calibrated,
    computes what that model did; perhaps in another dtype."""
    if method.config != model.config:
        raise UserError(f"{method!r} was made for another config; make it for this model's, as "
                        "`hf.load_config(folder)` reads it")
    parts, L = getattr(model, "model", ()), method.config.num_hidden_layers
    if "layers" in parts and len(parts["layers"]) != L:
        raise UserError(f"the model has {len(parts['layers'])} layers, and its config says {L}; set "
                        "num_hidden_layers before the method is made")
    if method.calibrated_on is not None:
        identity, settings, codecs = method.calibrated_on
        same = all(now is was for (*_, now), (*_, was) in zip(method.each_codec(), codecs))
        if not same or settings != made_with(method):
            raise UserError(f"{method!r}: rope, preserve, a codec, or a setting of one, has changed since it was "
                            "calibrated; make a new method with these settings, and calibrate it")
        if not same_model(identity, model.identity()):
            raise UserError(f"{method!r} was calibrated on another model; calibrate it on this one")
    filled_for = getattr(method.prefix, "filled_for", None)
    if filled_for and not (filled_for[0] == method.prefix.ids and same_model(filled_for[1], model.identity())):
        raise UserError(f"the prefix {method.prefix.name} was filled for other tokens, or another model; call its "
                        "`fill` for this one")


def made_with(method):
    """What calibrated tables depend on besides the model and the text: the method's class and what it keeps, `rope`,
    and each codec's class and constructor arguments (those that it stores as text or numbers)."""
    keeps = () if method.uses_scores else method.keeps_by  # calibration has no scores
    given = () if method.needs_text else method.found  # not searched for
    settings = [type(method).__name__, method.rope, *(getattr(method, name) for name in (*keeps, *given))]
    for _, _, codec in method.each_codec():
        names = inspect.signature(type(codec)).parameters
        values = [value for name in names if isinstance(value := getattr(codec, name, None), str | int | float)]
        settings.append([str(type(codec)), *values])
    return settings
