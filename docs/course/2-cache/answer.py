"""Assignment 2: a layer's cache in three parts, two protocols, and PFN.

Shapes: B sequences, H heads, d channels of a head, T new tokens, S tokens so far, p kept tokens.
A row is the key, or the value, of one token in one head: d numbers. A codec is given:

    codec.encode(x, ignore=None)   x (B, H, n, d), fp16 or fp32 -> codes. ignore (B, H, n),
                                   booleans: True where a token must not stretch its group's range;
                                   None, or False everywhere, if there is none
    codec.decode(codes)            -> (B, H, n, d), fp32
    codes.followed_by(other)       -> new codes: these, and then the others. Changes neither
    codes.nbytes                   bytes that they take
"""
import torch

ASSIGNMENT = "cache"


class Rows:
    """The keys, or the values, of one layer: kept | coded | recent."""

    # given

    def __init__(self, codec):
        self.codec = codec
        self.codes, self.n_coded = None, 0  # codes of the tokens 0 .. n_coded - 1
        self.recent = None  # (B, H, r, d) fp16: the tokens after those
        self.kept_positions = None  # (B, p) int32
        self.kept_rows = None  # (B, H, p, d) fp16: the rows at those positions

    # Task 1: the parts

    def append(self, rows):
        """New rows (B, H, T, d), in any float dtype, join the recent ones, in fp16."""
        # answer
        rows = rows.to(torch.float16)
        self.recent = rows if self.recent is None else torch.cat((self.recent, rows), dim=2)

    def quantize(self, n):
        """Quantize the n oldest recent tokens. Those that are kept are ignored by the codec. What
        is left of `recent` must not keep the memory of the quantized rows alive."""
        # answer
        oldest, newer = self.recent[:, :, :n], self.recent[:, :, n:]
        ignore = None
        if self.kept_positions is not None:
            positions = self.n_coded + torch.arange(n)
            kept = (self.kept_positions[:, :, None] == positions).any(dim=1)  # (B, n)
            ignore = kept[:, None].expand(-1, oldest.shape[1], -1)  # (B, H, n)
        codes = self.codec.encode(oldest, ignore)
        self.codes = self.codes.followed_by(codes) if self.codes is not None else codes
        self.recent = newer.clone()
        self.n_coded += n

    def read(self):
        """The rows of all tokens so far, (B, H, S, d) fp16: the coded ones decoded, then the recent
        ones; at the kept positions the kept rows."""
        # answer
        parts = [self.recent]
        if self.codes is not None:
            parts.insert(0, self.codec.decode(self.codes).half())
        rows = torch.cat(parts, dim=2)
        if self.kept_positions is not None:
            for b, positions in enumerate(self.kept_positions.long()):
                rows[b, :, positions] = self.kept_rows[b]
        return rows

    def keep(self, positions):
        """Keep the tokens at positions (B, p), integers, from now on, and no others. Each of them is
        recent or kept now, and the row that `read` gives of it is kept."""
        # answer
        rows = self.read()
        self.kept_rows = torch.stack([rows[b, :, at] for b, at in enumerate(positions.long())])
        self.kept_positions = positions.to(torch.int32)

    @property
    def nbytes(self):
        """Bytes that all three parts take: codes, recent rows, kept rows, kept positions."""
        # answer
        held = [self.codes, self.recent, self.kept_rows, self.kept_positions]
        return sum(part.nbytes for part in held if part is not None)


class Layer:
    """One layer's cache. protocol: "paper" or "stream"."""

    # given

    def __init__(self, k_codec, v_codec, method, protocol):
        self.keys, self.values = Rows(k_codec), Rows(v_codec)
        self.method, self.protocol = method, protocol
        self.length = 0  # tokens so far

    # Task 2: two protocols

    def due(self):
        """How many of the oldest recent tokens are quantized now, after the new tokens have joined.

        paper: all. stream: whole blocks of `method.block` tokens, and never the newest
        `method.recent` tokens.
        """
        # answer
        waiting = self.length - self.keys.n_coded
        if self.protocol == "paper":
            return waiting
        blocks = max(0, waiting - self.method.recent) // self.method.block
        return blocks * self.method.block

    def update(self, k, v):
        """New keys and values (B, H, T, d), fp32 -> the keys and the values of all tokens so far
        that attention gets, (B, H, S, d) fp16 both.

        The new tokens join keys, values and `length` first.

        Under "paper" quantize, then read. Under "stream" read, then quantize. If n > 0 tokens are
        about to be quantized, first ask `method.keep(self, n)`: positions (B, p), which are kept
        in keys and values, or None, which leaves the kept tokens as they are.
        """
        # answer
        self.keys.append(k)
        self.values.append(v)
        self.length += k.shape[2]
        exact = self.keys.read(), self.values.read()
        n = self.due()
        if n > 0:
            positions = self.method.keep(self, n)
            if positions is not None:
                self.keys.keep(positions)
                self.values.keep(positions)
            self.keys.quantize(n)
            self.values.quantize(n)
        if self.protocol == "stream":
            return exact
        return self.keys.read(), self.values.read()


# Task 3: PFN

class PFN:
    """Preserve the first N tokens."""

    # given

    def __init__(self, preserve, recent=0, block=1):
        self.preserve, self.recent, self.block = preserve, recent, block

    def keep(self, layer, n):
        """The positions (B, p) of the first N tokens of `layer`, or of all if there are fewer; None
        if N is 0. `layer.length` and `layer.keys.recent` say how many tokens and sequences there
        are."""
        # answer
        if self.preserve == 0:
            return None
        first = torch.arange(min(self.preserve, layer.length))
        return first.repeat(layer.keys.recent.shape[0], 1)
