"""RTN: round to nearest, nothing kept. What the other methods stand on and are compared with.

    Keep: nothing.   Code: any scheme of `schemes.py`.   When: at once, in blocks in a stream.

Paper and practice. "At once" is the `paper` protocol, where even a token's own query reads it as its code. A stream
cannot code a group of tokens before it is full, so tokens wait until a block of them (128, or the group size) is there;
the same wait is used for every scheme, which makes them comparable and the stream quick. The papers do not say what
their static ranges were calibrated on; here it is the smallest and largest value over the calibration windows.
"""
from tinykv.methods.base import SchemeMethod


class RTN(SchemeMethod):
    """A scheme, and nothing to add to it."""
