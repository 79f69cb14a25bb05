"""The KV cache: per layer three parts, `pinned | coded | recent`.

    coded    every token that is old enough, as the method's codec writes it down, in token order
    recent   the tokens after those, exact
    pinned   tokens kept in full precision for good; on reading, each overwrites the slot that it has in `coded`

A pinned token keeps its coded slot, so keys stay in order, groups stay aligned and no token counts twice; what the
slot held does not matter. "Exact" rows are 16-bit: the model's own dtype if that has 16 bits, fp16 if it runs in fp32.

Two protocols, the order of two lines in `update`:
    paper    code, then read: one forward over a window, every token that is not pinned is read as its codes by every
             query, its own included. This is how the papers measure perplexity.
    stream   read, then code: tokens arrive in chunks, the `recent` newest stay exact, and after attention whole blocks
             of `block` older ones are coded. This is what generation does. Chunks that end where a block does (the
             first is longer by `recent` tokens) give exactly what their tokens would give one by one.
"""
import torch

from tinykv import UserError
from tinykv.codecs import Codes

PROTOCOLS = ("paper", "stream")
INTEGERS = (torch.int16, torch.int32, torch.int64)


class Part:
    """The keys (kind "k"), or the values (kind "v"), of one layer, as `method` keeps them."""

    def __init__(self, method, layer, kind):
        self.method, self.layer, self.kind = method, layer, kind
        self.first = 0  # C: tokens coded so far, which is the position of the oldest recent one
        self.index = None  # (B, 1 or Hkv, n) int32: positions of the pinned rows, -1 where a slot is empty
        self.pinned = None  # (B, Hkv, n, d): their rows
        self.coded: Codes | None = None  # tokens 0 .. C-1
        self.recent = None  # (B, Hkv, r, d): tokens C .. C+r-1
        self.pinned_score = self.score = None  # (B, Hkv, n), (B, Hkv, r): what `attend` said of exact rows

    def append(self, rows):
        if self.recent is not None:  # a prefix is one row for all sequences of a batch
            rows = torch.cat([self.recent.expand(len(rows), -1, -1, -1), rows], dim=2)  # (B, Hkv, r + T, d)
        self.recent = rows

    def add_score(self, score):
        """score (B, Hkv, S), of all tokens so far: what it says of those that are exact is added up."""
        pinned = None if self.index is None else score.gather(2, self.index.clamp(min=0).long())  # (B, Hkv, n)
        self.add_exact(score[:, :, self.first:], pinned)

    def add_exact(self, new, pinned):
        """new (B, Hkv, r), of the recent tokens, and pinned (B, Hkv, n) or None, of the pinned ones, are added up."""
        self.score = new if self.score is None else torch.nn.functional.pad(
            self.score, (0, new.shape[-1] - self.score.shape[-1])) + new
        if pinned is not None:
            self.pinned_score = self.pinned_score + pinned

    def pin(self, index):
        """Keep the tokens at `index` (B, 1 or Hkv, n) from now on, no others. Each must be pinned now, or recent."""
        B, Hkv, r, d = self.recent.shape
        shape = tuple(getattr(index, "shape", ()))
        if len(shape) != 3 or shape[0] not in (1, B) or shape[1] not in (1, Hkv) or index.dtype not in INTEGERS:
            found = f"{getattr(index, 'dtype', type(index))} {shape}"
            raise UserError(f"`keep` of {type(self.method).__name__} has to give None or positions, integers "
                            f"(B, 1 or Hkv, n), where B = {B} and Hkv = {Hkv}; it gave {found}")
        index = index.expand(B, -1, -1)  # (B, h, n)
        at, fresh = (index - self.first).clamp(0, r - 1).long(), None  # (B, h, n): where it is among the recent rows
        if self.index is not None:
            before = index[..., :, None] == self.index[..., None, :]  # (B, h, n, n before)
            slot, fresh = before.int().argmax(-1), (index >= self.first) | ~before.any(-1)  # (B, h, n) both

        def take(recent, pinned):  # (B, Hkv, r, d), (B, Hkv, n before, d) -> (B, Hkv, n, d)
            rows = recent.gather(2, at[..., None].expand(B, Hkv, -1, recent.shape[-1]))
            if fresh is None:
                return rows
            kept = pinned.gather(2, slot[..., None].expand(B, Hkv, -1, recent.shape[-1]))
            return torch.where(fresh[..., None], rows, kept)

        self.pinned = take(self.recent, self.pinned)
        if self.score is not None:
            old = None if self.index is None else self.pinned_score[..., None]
            self.pinned_score = take(self.score[..., None], old)[..., 0]
        self.index = index.to(torch.int32, copy=True)

    def code(self, n):
        """Write down the n oldest recent tokens; pinned ones among them do not stretch the range of a group."""
        rows, skip = self.recent[:, :, :n], self.is_pinned(n)  # (B, Hkv, n, d), (B, Hkv, n)
        codes = self.method.encode(self.layer, self.kind, rows, skip)
        self.coded = codes if self.coded is None else self.coded.append(codes)
        self.recent = self.recent[:, :, n:].clone()  # a copy, so that the coded rows are let go
        if self.score is not None:
            self.score = self.score[:, :, n:].clone()
        self.first += n

    def is_pinned(self, n):
        """Which of the n oldest recent tokens are pinned: (B, Hkv, n), or None if nothing is."""
        if self.index is None:
            return None
        positions = torch.arange(self.first, self.first + n, device=self.index.device)  # (n)
        pinned = (positions[:, None] == self.index[..., None, :]).any(-1)  # (B, h, n)
        return pinned.expand(-1, self.recent.shape[1], -1)

    def read(self):
        """All tokens so far (B, Hkv, S, d): decoded, then recent, then the pinned ones put in their slots."""
        rows = self.recent
        if self.coded is not None:
            decoded = self.method.decode(self.layer, self.kind, self.coded)  # (B, Hkv, C, d)
            rows = torch.cat([decoded.to(rows.dtype), rows], dim=2)  # (B, Hkv, S, d)
        if self.index is None:
            return rows
        B, Hkv, S, d = rows.shape
        slot = self.index.where(self.index >= 0, S).long()  # (B, h, n): an empty slot goes to a row behind the last
        rows = torch.nn.functional.pad(rows, (0, 0, 0, 1))  # (B, Hkv, S + 1, d)
        return rows.scatter_(2, slot[..., None].expand(B, Hkv, -1, d), self.pinned)[:, :, :S]

    def tensors(self):
        """What is held, by part."""
        return {"pinned": [t for t in (self.index, self.pinned, self.pinned_score) if t is not None],
                "coded": [] if self.coded is None else [self.coded],
                "recent": [t for t in (self.recent, self.score) if t is not None]}

    def part_bytes(self):
        """Bytes of what is held, by part."""
        return {name: sum(t.nbytes for t in tensors) for name, tensors in self.tensors().items()}


class LayerCache:
    """One layer's keys and values."""

    def __init__(self, layer, method, rope, protocol):
        self.layer, self.method, self.rope, self.protocol = layer, method, rope, protocol
        self.k, self.v = Part(method, layer, "k"), Part(method, layer, "v")
        self.length = 0  # tokens seen

    def update(self, q, k, v, positions, state):
        """New q (B, H, T, d), k and v (B, Hkv, T, d), before RoPE -> K and V (B, Hkv, S, d) of all, K rotated."""
        self.append(k, v, positions)
        K, V = self.read()  # (B, Hkv, S, d): the new rows exact
        scores = self.method.attend(self, q, K, positions)  # (B, Hkv, S) twice, or None
        if scores is not None:
            self.k.add_score(scores[0])
            self.v.add_score(scores[1])
        if self.protocol == "paper":
            self.code_all(state)
            K, V = self.read()  # (B, Hkv, S, d): the new rows as their codes
        if self.protocol == "stream":
            self.code_due(state)
        return K.to(k.dtype), V.to(v.dtype)

    def append(self, k, v, positions):
        """New rows join the recent ones, in 16 bits, keys rotated if that is how the method stores them."""
        exact = k.dtype if k.dtype.itemsize == 2 else torch.float16
        k, v = k.to(exact), v.to(exact)
        self.k.append(self.rope.rotate(k, positions) if self.method.rope == "post" else k)
        self.v.append(v)
        self.length += k.shape[2]

    def read(self):
        """K, rotated, and V of all tokens so far, (B, Hkv, S, d) in 16 bits."""
        K, V = self.k.read(), self.v.read()
        if self.method.rope == "pre":
            K = self.rope.rotate(K, torch.arange(self.length, device=K.device))
        return K, V

    def code_all(self, state):
        """Protocol paper: every token is written down."""
        for part in (self.k, self.v):
            self.code(part, self.length, state)

    def code_due(self, state):
        """Protocol stream: whole blocks of what is no longer among the `recent` newest are written down."""
        for part, block in ((self.k, self.method.block), (self.v, self.method.v_block or self.method.block)):
            due = self.length - part.first - self.method.recent
            if due >= block:
                self.code(part, due - due % block, state)

    def code(self, part, n, state):
        """A coding event: the method says what to keep, then the n oldest recent tokens are written down."""
        index = self.method.keep(self, part.kind, n, state)
        if index is not None:
            part.pin(index)
        part.code(n)


class KVCache:
    """The cache of a batch of sequences of equal length: `model(tokens, cache)`.

    A method may have a `prefix`: then the cache begins with its rows, and is given what follows (`rest`).
    The model knows `update`, `observe` and `len`; where a cache has an `attend`, it is asked for the attention's output
    in the place of `update` (`kernels.TritonCache`). A method's `observe` may carry a `state` from layer to layer and
    from chunk to chunk (kvsink: the best outliers so far).
    """

    def __init__(self, model, method, protocol="stream"):
        if protocol not in PROTOCOLS:
            raise ValueError(f"the protocol is one of {', '.join(PROTOCOLS)}; got {protocol!r}")
        self.model, self.method, self.protocol = model, method, protocol
        self.config, self.rope = model.config, model.rope
        self.reset()

    def reset(self):
        """Forget every token, but those that the method's prefix begins every text with."""
        self.layers = [self.new_layer(i) for i in range(self.config.num_hidden_layers)]
        self.state = None
        if self.method.prefix is not None:
            weight = self.model.lm_head.weight  # where the model is, and in what dtype
            positions = torch.arange(len(self.method.prefix.ids), device=weight.device)  # (n)
            for layer, k, v in zip(self.layers, *self.method.prefix.rows(weight)):
                layer.append(k, v, positions)  # (1, Hkv, n, d) both
        self.start = len(self)

    def new_layer(self, layer):
        return LayerCache(layer, self.method, self.rope, self.protocol)

    def rest(self, tokens):
        """A text (B, T) without the prefix that the cache begins with, which the text must begin with, too."""
        prefix = torch.tensor(self.method.prefix.ids if self.start else [], device=tokens.device)  # (n)
        if tokens.shape[1] <= len(prefix):
            raise UserError(f"a text of {tokens.shape[1]} tokens leaves none behind a prefix of {len(prefix)}")
        if not (tokens[:, :len(prefix)] == prefix).all():
            raise UserError(f"the text does not begin with the {len(prefix)} tokens of the prefix "
                            f"{self.method.prefix.name}")
        return tokens[:, len(prefix):]

    def __len__(self):
        """Tokens seen by all layers."""
        return self.layers[-1].length

    def update(self, layer, q, k, v, positions):
        """Add new tokens to a layer; returns K (rotated) and V of all tokens so far: see `LayerCache.update`."""
        self.check_one_window(layer)
        return self.layers[layer].update(q, k, v, positions, self.state)

    def check_one_window(self, layer):
        if self.protocol == "paper" and self.layers[layer].length > self.start:
            raise ValueError("the paper protocol reads a window in one forward; use protocol='stream' to go on from it")

    def observe(self, layer, hidden):
        """The output of a block for the new tokens, hidden (B, T, D)."""
        start = self.layers[layer].length - hidden.shape[1]
        self.state = self.method.observe(self.state, layer, hidden, start)

    def part_bytes(self, kinds="kv"):
        """Bytes held by each of the three parts, of all layers' keys (kinds "k"), values ("v"), or both."""
        sums = dict.fromkeys(("pinned", "coded", "recent"), 0)
        for part in (getattr(layer, kind) for layer in self.layers for kind in kinds):
            for name, held in part.part_bytes().items():
                sums[name] += held
        return sums

    @property
    def nbytes(self):
        return sum(self.part_bytes().values())
