"""Assignment 2: a layer's cache in three parts, two protocols, and PFN.

handout.md explains the tasks. Replace each `raise NotImplementedError`; the lines that are given
work as they stand. Names, arguments and shapes stay as they are. To grade this file:

    python -m tinykv.course.grade docs/course/2-cache/starter.py

Shapes: B sequences, H heads, d channels of a head, T new tokens, S tokens so far, p kept tokens.
A row is the key, or the value, of one token in one head: d numbers. A codec is given:

    codec.encode(x, ignore=None)   x (B, H, n, d), fp16 or fp32 -> codes. ignore (B, H, n),
                                   booleans: True where a token must not stretch its group's range;
                                   None, or False everywhere, if there is none
    codec.decode(codes)            -> (B, H, n, d), fp32
    codes.append(other)            -> new codes: these, and then the others. Changes neither
    codes.nbytes                   bytes that they take
"""
import torch  # noqa: F401

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
        raise NotImplementedError("assignment 2, cache: Rows.append")

    def quantize(self, n):
        """Quantize the n oldest recent tokens. Those that are kept are ignored by the codec. What
        is left of `recent` must not keep the memory of the quantized rows alive."""
        raise NotImplementedError("assignment 2, cache: Rows.quantize")

    def read(self):
        """The rows of all tokens so far, (B, H, S, d) fp16: the coded ones decoded, then the recent
        ones; at the kept positions the kept rows."""
        raise NotImplementedError("assignment 2, cache: Rows.read")

    def keep(self, positions):
        """Keep the tokens at positions (B, p), integers, from now on, and no others. Each of them is
        recent or kept now, and the row that `read` gives of it is kept."""
        raise NotImplementedError("assignment 2, cache: Rows.keep")

    @property
    def nbytes(self):
        """Bytes that all three parts take: codes, recent rows, kept rows, kept positions."""
        raise NotImplementedError("assignment 2, cache: Rows.nbytes")


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
        raise NotImplementedError("assignment 2, cache: Layer.due")

    def update(self, k, v):
        """New keys and values (B, H, T, d), fp32 -> the keys and the values of all tokens so far
        that attention gets, (B, H, S, d) fp16 both.

        The new tokens join keys, values and `length` first.

        Under "paper" quantize, then read. Under "stream" read, then quantize. If n > 0 tokens are
        about to be quantized, first ask `method.keep(self, n)`: positions (B, p), which are kept
        in keys and values, or None, which leaves the kept tokens as they are.
        """
        raise NotImplementedError("assignment 2, cache: Layer.update")


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
        raise NotImplementedError("assignment 2, cache: PFN.keep")
