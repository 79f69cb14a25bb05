"""The KV cache. A layer's keys, and likewise its values, are held in three parts:

    kept | coded | recent

    coded    every token that is old enough, quantized by the method's codec, in token order
    recent   the tokens after those, in full precision
    kept   tokens kept in full precision; when the cache is read, each overwrites whatever stands
             at its position

A kept token is quantized with its neighbours, too, so its position among the coded ones is never
skipped: keys stay in token order, and the codec's groups (tokens or channels that share a scale)
stay aligned. Its code is read only if the token is given up later. "Full precision" is 16 bits: the
model's own dtype if it has 16 bits, fp16 if the model runs in fp32.

Two protocols say when tokens are quantized:

    paper    Quantize, then read. One forward reads one window, a text of the evaluation. A query
             reads the codes of every token that is not kept, its own token included. The papers
             measure perplexity this way.
    stream   Read, then quantize. Tokens arrive in chunks, and are read in full precision first.
             Then whole blocks of `method.block` tokens are quantized, but never the newest
             `method.recent` tokens. Generation works this way. Where blocks fill up only at the
             end of a chunk (`KVCache.next_due`), the numbers are the same as token by token. With
             longer chunks they are not.

A text may begin with a prompt, P tokens that arrive in one forward. The protocol says how the
prompt is read, and the tokens after it arrive as in a stream. So `paper` with a prompt is a
quantized prefill, `stream` with a prompt a prefill in full precision, and decoding follows either.
A method whose `choose` is "prompt" chooses the tokens that it keeps once, at the end of the prompt.
"""
from types import SimpleNamespace

import torch

from tinykv import UserError

PROTOCOLS = ("paper", "stream")
INTEGERS = (torch.int16, torch.int32, torch.int64)


def check_shape(x, shape, call, owner):
    """UserError if x, given by a call of a codec or method, is no float tensor of this shape."""
    if not isinstance(x, torch.Tensor) or not x.is_floating_point() or x.shape != shape:
        found = f"{getattr(x, 'dtype', type(x))} {tuple(getattr(x, 'shape', ()))}"
        raise UserError(f"`{call}` of {owner!r} has to give floating-point numbers {tuple(shape)}; "
                        f"it gave {found}")


class CachedRows:
    """The keys (kind "k"), or the values (kind "v"), of one layer.

    A row is the key, or the value, of one token in one head: d numbers.
    """

    def __init__(self, layer, kind, codec):
        self.layer, self.kind, self.codec = layer, kind, codec
        # coded
        self.n_coded = 0  # C: tokens quantized so far, and the position of the oldest recent token
        self.codes = None  # Codes of the tokens 0 .. C-1
        # recent
        self.recent = None  # (B, Hkv, r, d): the tokens C .. C+r-1
        # kept
        self.kept_positions = None  # (B, 1 or Hkv, p) int32; -1: an unused entry
        self.kept_rows = None  # (B, Hkv, p, d): the keys, or values, at those positions
        # how important tokens are, summed over all queries so far; only if the method `uses_scores`
        self.recent_scores = None  # (B, Hkv, r)
        self.kept_scores = None  # (B, Hkv, p)

    def append(self, rows):
        """New rows (B, Hkv, T, d) join the recent ones."""
        if self.recent is not None:
            # a prefix, which a cache may begin with, is held once for all sequences of a batch
            before = self.recent.expand(len(rows), -1, -1, -1)  # (B, Hkv, r, d)
            rows = torch.cat([before, rows], dim=2)  # (B, Hkv, r + T, d)
        self.recent = rows

    def read(self):
        """The rows of all tokens so far, (B, Hkv, S, d): coded ones decoded, recent ones after
        them, kept ones at their positions."""
        if self.codes is None and self.kept_positions is None:
            return self.recent
        B, Hkv, r, d = self.recent.shape
        C, S = self.n_coded, self.n_coded + r
        # one row too many: an unused entry of the kept ones writes there
        rows = self.recent.new_empty(B, Hkv, S + 1, d)  # (B, Hkv, S + 1, d)
        if self.codes is not None:
            decoded = self.codec.decode(self.codes)  # (B, Hkv, C, d)
            check_shape(decoded, (B, Hkv, C, d), "decode", self.codec)
            rows[:, :, :C] = decoded
        rows[:, :, C:S] = self.recent
        if self.kept_positions is not None:
            at = self.kept_index(unused=S)  # (B, 1 or Hkv, p)
            rows.scatter_(2, at[..., None].expand(B, Hkv, -1, d), self.kept_rows)
        return rows[:, :, :S]

    def kept_index(self, unused):
        """The kept positions as an index (B, 1 or Hkv, p), with `unused` for unused entries."""
        return self.kept_positions.where(self.kept_positions >= 0, unused).long()

    def keep(self, positions, rows):
        """Keep the tokens at `positions` (B, 1 or Hkv, p) from now on, and no others.

        rows (B, Hkv, S, d): what `read` gives now. Methods keep tokens that are recent or kept
        now. Of any other token only the decoded row is left, and that would be kept.
        """
        B, Hkv, S, d = rows.shape
        positions = positions.expand(B, -1, -1)  # (B, 1 or Hkv, p)
        # an unused entry gets a copy of token 0; the copy is never read
        at = positions.clamp(min=0).long().expand(B, Hkv, -1)  # (B, Hkv, p)
        if self.recent_scores is not None:
            self.kept_scores = self.read_scores().gather(2, at)  # (B, Hkv, p)
        self.kept_rows = rows.gather(2, at[..., None].expand(-1, -1, -1, d))  # (B, Hkv, p, d)
        self.kept_positions = positions.to(torch.int32, copy=True)

    def is_kept(self, n):
        """Which of the n oldest recent tokens are kept: (B, Hkv, n); None if nothing is."""
        if self.kept_positions is None:
            return None
        Hkv = self.recent.shape[1]
        oldest = torch.arange(self.n_coded, self.n_coded + n, device=self.recent.device)  # (n)
        same = oldest[:, None] == self.kept_positions[..., None, :]  # (B, 1 or Hkv, n, p)
        return same.any(-1).expand(-1, Hkv, -1)

    def quantize(self, n):
        """Quantize the n oldest recent tokens. Kept ones do not widen their group's range."""
        oldest = self.recent[:, :, :n]  # (B, Hkv, n, d)
        codes = self.codec.encode(oldest, ignore=self.is_kept(n))
        if not (hasattr(codes, "append") and hasattr(codes, "nbytes")):
            raise UserError(f"`encode` of {self.codec!r} has to give an object with `append` and "
                            f"`nbytes`, such as Codes; it gave {type(codes).__name__}")
        self.codes = codes if self.codes is None else self.codes.append(codes)
        self.recent = self.recent[:, :, n:].clone()  # a view would keep the quantized rows alive
        if self.recent_scores is not None:
            self.recent_scores = self.recent_scores[:, :, n:].clone()
        self.n_coded += n

    def add_scores(self, scores):
        """Accumulate the scores (B, Hkv, S) of the tokens in full precision, recent and kept."""
        recent = scores[:, :, self.n_coded:]  # (B, Hkv, r)
        kept = None
        if self.kept_positions is not None:
            at = self.kept_index(unused=0).expand(*scores.shape[:2], -1)  # (B, Hkv, p)
            kept = scores.gather(2, at)  # (B, Hkv, p)
        self.accumulate(recent, kept)

    def accumulate(self, recent, kept):
        """Add scores of the recent tokens (B, Hkv, r) and of the kept ones (B, Hkv, p), or None.

        A cache that never computes the scores of coded tokens calls this in place of `add_scores`.
        """
        if self.recent_scores is not None:
            # tokens that came since the last scores start at 0
            new_tokens = recent.shape[-1] - self.recent_scores.shape[-1]
            recent = torch.nn.functional.pad(self.recent_scores, (0, new_tokens)) + recent
        self.recent_scores = recent
        if kept is not None:
            self.kept_scores = self.kept_scores + kept

    def read_scores(self):
        """Each token's accumulated score, (B, Hkv, S); 0 for a coded token that is not kept."""
        scores = torch.nn.functional.pad(self.recent_scores, (self.n_coded, 1))  # (B, Hkv, S + 1)
        if self.kept_positions is not None:
            S = scores.shape[-1] - 1
            at = self.kept_index(unused=S)  # (B, 1 or Hkv, p)
            scores.scatter_(2, at.expand(*scores.shape[:2], -1), self.kept_scores)
        return scores[:, :, :-1]

    def tensors(self):
        """What is held, by part: {part: [Codes or tensor]}."""
        parts = {
            "kept": [self.kept_positions, self.kept_rows, self.kept_scores],
            "coded": [self.codes],
            "recent": [self.recent, self.recent_scores],
        }
        return {part: [t for t in held if t is not None] for part, held in parts.items()}

    def part_bytes(self):
        """Bytes of what is held, by part."""
        return {part: sum(t.nbytes for t in held) for part, held in self.tensors().items()}

    def __repr__(self):
        kept = 0 if self.kept_positions is None else self.kept_positions.shape[-1]
        recent = 0 if self.recent is None else self.recent.shape[2]
        return (f"CachedRows(layer {self.layer}, {self.kind.upper()}: "
                f"{self.n_coded} coded, {kept} kept, {recent} recent)")


class LayerCache:
    """One layer's keys and values. shared: the method's notes on this text, one for all layers.

    prompt: P, the tokens of the prompt; None for a text without one.
    """

    def __init__(self, layer, method, rope, protocol, shared, prompt=None):
        self.layer, self.method, self.rope = layer, method, rope
        self.protocol, self.shared, self.prompt = protocol, shared, prompt
        codecs = method.codecs[layer]
        self.keys = CachedRows(layer, "k", codecs.k)
        self.values = CachedRows(layer, "v", codecs.v)
        self.length = 0  # tokens seen
        self.span = torch.zeros(())  # finite if every number so far was; `evaluate` looks at it

    def update(self, q, k, v, positions):
        """New q (B, H, T, d), k and v (B, Hkv, T, d), before RoPE -> K (rotated) and V of all
        tokens so far, (B, Hkv, S, d) both.

        Append; score, where the method scores. Under `paper` quantize, then read. Under `stream`,
        and after a prompt, read, then quantize.
        """
        self.append(k, v, positions)
        # Read: the new tokens in full precision. In a stream attention gets this; under `paper` it
        # is for scores and kept, and attention gets the second read below.
        keys, values = self.keys.read(), self.values.read()  # (B, Hkv, S, d) both

        if self.method.uses_scores and self.is_choosing:
            rotated_q = self.rope.rotate(q, positions)  # (B, H, T, d)
            rotated_k = self.rotated(keys)  # (B, Hkv, S, d)
            of_keys, of_values = self.method.score(self, rotated_q, rotated_k)  # (B, Hkv, S) both
            check_shape(of_keys, keys.shape[:3], "score", self.method)
            check_shape(of_values, keys.shape[:3], "score", self.method)
            self.note(of_keys, of_values)
            self.keys.add_scores(of_keys)
            self.values.add_scores(of_values)

        # When: how many of the oldest recent tokens are quantized now?
        n_keys, n_values = self.due(self.keys), self.due(self.values)
        # Keep: which tokens stay in full precision from now on?
        keep_keys, keep_values = self.to_keep(n_keys, n_values)
        if keep_keys is not None:
            self.keys.keep(keep_keys, keys)
        if keep_values is not None:
            self.values.keep(keep_values, values)
        if self.chooses_once:
            self.forget_scores()
        # Code: quantize the n oldest. A kept one is quantized, too, but read from its own row.
        if n_keys:
            self.keys.quantize(n_keys)
        if n_values:
            self.values.quantize(n_values)

        if self.quantizes_first:
            # Read again: the new tokens as their codes.
            keys, values = self.keys.read(), self.values.read()  # (B, Hkv, S, d) both
        return self.rotated(keys).to(k.dtype), values.to(v.dtype)

    def forget_scores(self):
        """The tokens to keep are chosen for good, and no score is needed any more."""
        for rows in (self.keys, self.values):
            rows.recent_scores = rows.kept_scores = None

    def append(self, k, v, positions):
        """New keys and values (B, Hkv, T, d) join the recent ones, in 16 bits; keys are rotated
        first if the method stores them after RoPE. Then they are rounded twice, before RoPE and
        after it, as in a 16-bit model: one rounding would make two methods' exact keys differ."""
        dtype = k.dtype if k.dtype.itemsize == 2 else torch.float16
        k, v = k.to(dtype), v.to(dtype)
        if self.method.rope == "post":
            k = self.rope.rotate(k, positions)  # (B, Hkv, T, d)
        self.note(k, v)
        self.keys.append(k)
        self.values.append(v)
        self.length += v.shape[2]

    def note(self, *numbers):
        """Make `span` infinite or NaN if one of these tensors holds a number that is not finite.

        No test looks at the numbers themselves: the program would have to wait for the GPU.
        """
        for x in numbers:
            if x.numel():
                low, high = x.aminmax()  # NaN both, if x holds a NaN
                self.span = self.span + high - low

    def rotated(self, keys):
        """Keys of all tokens as attention needs them. keys (B, Hkv, S, d): as they are stored."""
        if self.method.rope == "post":
            return keys
        return self.rope.rotate(keys)  # (B, Hkv, S, d): the token in row t is at position t

    # Whether the newest tokens, which have just been appended, are those of a prompt

    @property
    def in_prompt(self):
        """The newest tokens are the prompt. Under `paper` a window without one is all prompt."""
        if self.prompt is None:
            return self.protocol == "paper"
        return self.length <= self.prompt

    @property
    def quantizes_first(self):
        """The newest tokens are quantized before they are read."""
        return self.protocol == "paper" and self.in_prompt

    @property
    def chooses_once(self):
        """The method chooses the tokens to keep at the end of the prompt, and never again."""
        return self.prompt is not None and self.method.choose == "prompt"

    @property
    def is_choosing(self):
        """The method still chooses tokens to keep."""
        return self.in_prompt or not self.chooses_once

    def due(self, rows):
        """How many of the oldest recent tokens of `rows`, a `CachedRows`, are quantized now."""
        if self.quantizes_first:
            # all of them: a window, or a prompt, is one forward, so nothing is quantized yet
            if self.prompt is None:
                return self.length
            # more tokens will follow, and they cannot join a group that is not full; values wait
            # with their keys
            group = max(rows.codec.tokens_per_group for rows in (self.keys, self.values))
            return self.length - self.length % group
        # the recent part without the newest `method.recent` tokens; of that, whole blocks
        old = self.length - rows.n_coded - self.method.recent
        return max(0, old - old % self.method.block_of(rows.kind))

    def to_keep(self, n_keys, n_values):
        """The positions of the keys, and of the values, that the method keeps; None: no change.

        It is asked for both before anything is kept or quantized. A method that chooses once is
        asked about the whole prompt, even if none of it is quantized yet.
        """
        if self.chooses_once:
            n_keys = n_values = self.length if self.in_prompt else 0
        keep_keys = keep_values = None
        if n_keys:
            keep_keys = self.checked(self.method.keep_keys(self, n_keys))
        if n_values:
            keep_values = self.checked(self.method.keep_values(self, n_values))
        return keep_keys, keep_values

    def checked(self, positions):
        """What `keep_keys` or `keep_values` gave. UserError if it is neither None nor positions."""
        if positions is None:
            return None
        B, Hkv = self.keys.recent.shape[:2]
        shape = tuple(getattr(positions, "shape", ()))
        fits = len(shape) == 3 and shape[0] in (1, B) and shape[1] in (1, Hkv)
        if fits and positions.dtype in INTEGERS:
            low, high = positions.aminmax() if positions.numel() else (-1, -1)
            if low >= -1 and high < self.length:
                return positions
            shape = f"{shape}, from {low} to {high} where there are {self.length} tokens"
        found = f"{getattr(positions, 'dtype', type(positions))} {shape}"
        name = type(self.method).__name__
        raise UserError(f"`keep_keys` and `keep_values` of {name} have to give None or positions, "
                        f"integers (B, 1 or Hkv, p), where B = {B} and Hkv = {Hkv}; one of them "
                        f"gave {found}")

    def __repr__(self):
        return f"LayerCache({self.keys!r}, {self.values!r})"


class KVCache:
    """The cache of a batch of sequences of equal length: `model(tokens, cache)`.

    A method may have a `prefix`. Then the cache begins with the prefix's keys and values, and a
    text that is read is cut down to what follows the prefix (`without_prefix`).

    prompt: P, if the text begins with a prompt: its first P tokens, a prefix included, arrive in
    one forward, and the others later.
    """

    def __init__(self, model, method, protocol="stream", prompt=None):
        if protocol not in PROTOCOLS:
            raise ValueError(f"the protocol is one of {', '.join(PROTOCOLS)}; got {protocol!r}")
        self.model, self.method, self.protocol = model, method, protocol
        self.prompt = prompt
        self.config, self.rope = model.config, model.rope
        self.reset()

    def reset(self):
        """Forget every token, except those of the method's prefix."""
        self.shared = SimpleNamespace()  # what the method knows of this text, by name
        self.method.begin(self)
        self.layers = [self.new_layer(i) for i in range(self.config.num_hidden_layers)]
        if self.method.prefix is not None:
            weight = self.model.lm_head.weight  # where the model is, and in what dtype
            positions = torch.arange(len(self.method.prefix.ids), device=weight.device)  # (n)
            keys, values = self.method.prefix.rows(weight)  # by layer, (1, Hkv, n, d) each
            for layer, k, v in zip(self.layers, keys, values):
                layer.append(k, v, positions)
        self.start = len(self)  # tokens of the prefix

    def new_layer(self, layer):
        return LayerCache(layer, self.method, self.rope, self.protocol, self.shared, self.prompt)

    def without_prefix(self, tokens):
        """The text (B, T) without the prefix that this cache began with. The text has to begin with
        it, too. A later chunk of a text is returned as it is."""
        if self.start == 0 or len(self) > self.start:
            return tokens
        prefix = torch.tensor(self.method.prefix.ids, device=tokens.device)  # (n)
        if tokens.shape[1] <= len(prefix):
            raise UserError(f"a text of {tokens.shape[1]} tokens has none after a prefix of "
                            f"{len(prefix)}")
        if not (tokens[:, :len(prefix)] == prefix).all():
            raise UserError(f"the text does not begin with the {len(prefix)} tokens of the prefix "
                            f"{self.method.prefix.name}")
        return tokens[:, len(prefix):]

    def update(self, layer, q, k, v, positions):
        """Add new tokens to a layer -> K (rotated) and V of all tokens: see `LayerCache.update`."""
        self.check_order(layer, v.shape[2])
        return self.layers[layer].update(q, k, v, positions)

    def check_order(self, layer, T):
        """ValueError if T new tokens are not what comes next: a whole window, or the prompt."""
        seen = self.layers[layer].length
        if self.prompt is None and self.protocol == "paper" and seen > self.start:
            raise ValueError("the paper protocol reads a window in one forward; use "
                             "protocol='stream', or give the prompt's length, to go on from it")
        if self.prompt is not None and seen == self.start and seen + T != self.prompt:
            raise ValueError(f"the first forward reads the prompt, {self.prompt} tokens; it got "
                             f"{seen + T}")

    def observe(self, layer, hidden):
        """The output of a block for the new tokens, hidden (B, T, D)."""
        if self.layers[layer].is_choosing:
            self.method.observe(self, layer, hidden)

    def next_due(self):
        """The length of the text at which keys or values are quantized next, in a stream."""
        lengths = []
        method, layer = self.method, self.layers[0]
        for rows in (layer.keys, layer.values):
            block = method.block_of(rows.kind)
            old = layer.length - rows.n_coded - method.recent  # not among the newest `recent`
            full = max(0, old // block)  # blocks of them that are full already: of a prefix
            lengths.append(rows.n_coded + method.recent + (full + 1) * block)
        return min(lengths)

    def part_bytes(self, kinds="kv"):
        """Bytes held by each part, of all layers' keys (kinds "k"), values ("v"), or both."""
        sums = dict.fromkeys(("kept", "coded", "recent"), 0)
        for layer in self.layers:
            for rows in (layer.keys, layer.values):
                if rows.kind in kinds:
                    for part, held in rows.part_bytes().items():
                        sums[part] += held
        return sums

    @property
    def nbytes(self):
        """Bytes of everything that the cache holds of the text."""
        return sum(self.part_bytes().values())

    def __len__(self):
        """Tokens seen by all layers."""
        return self.layers[-1].length

    def __bool__(self):
        """True also with no tokens, where Python would take len() == 0 for False."""
        return True

    def __repr__(self):
        parts = ", ".join(f"{held} bytes {part}" for part, held in self.part_bytes().items())
        return f"KVCache({self.method!r}, {self.protocol}, {len(self)} tokens: {parts})"


class Trace:
    """A cache that quantizes nothing and records what passes through it in one forward.

    q (B, H, T, d), k and v (B, Hkv, T, d), all before RoPE, and hidden (B, T, D), the blocks'
    outputs, are lists with an entry per layer. keys, values (L, Hkv, n, d): a prefix of n tokens
    before the window, in each of the L layers; keys before RoPE. Both may require gradients.
    watch: a function of (layer, hidden), called with each block's output in place of recording.
    """

    def __init__(self, model, keys=None, values=None, watch=None):
        self.rope, self.keys, self.values, self.watch = model.rope, keys, values, watch
        self.q, self.k, self.v, self.hidden = [], [], [], []

    def __len__(self):
        return 0 if self.keys is None else self.keys.shape[2]

    def __bool__(self):
        return True

    def without_prefix(self, tokens):
        return tokens

    def update(self, layer, q, k, v, positions):
        """K (rotated) and V of the prefix and the window, (B, Hkv, n + T, d)."""
        if self.watch is None:
            self.q.append(q)
            self.k.append(k)
            self.v.append(v)
        if self.keys is not None:
            prefix_k = self.keys[layer].to(k.dtype).expand(len(k), -1, -1, -1)  # (B, Hkv, n, d)
            prefix_v = self.values[layer].to(v.dtype).expand(len(v), -1, -1, -1)  # (B, Hkv, n, d)
            k = torch.cat([prefix_k, k], dim=2)  # (B, Hkv, n + T, d)
            v = torch.cat([prefix_v, v], dim=2)  # (B, Hkv, n + T, d)
            positions = torch.arange(k.shape[2], device=k.device)  # (n + T)
        return self.rope.rotate(k, positions), v

    def observe(self, layer, hidden):
        if self.watch is None:
            self.hidden.append(hidden)
        else:
            self.watch(layer, hidden)

    def attention(self, layer):
        """A layer's attention weights (B, H, T, T); a prefix and a sliding window are ignored."""
        q, k = self.q[layer], self.k[layer]
        positions = torch.arange(q.shape[2], device=q.device)  # (T)
        q, k = self.rope.rotate(q, positions), self.rope.rotate(k, positions)
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)  # (B, H, T, d)
        scores = (q @ k.transpose(-2, -1)).float() * q.shape[-1] ** -0.5  # (B, H, T, T)
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)  # (T, T)
        return scores.masked_fill(future, float("-inf")).softmax(-1)
