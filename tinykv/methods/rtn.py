"""RTN: round to nearest, and keep nothing. Every other method is compared with it.
The same on a page that runs alone: docs/ladder/1_sinks.py.

    Keep: nothing.   Code: any scheme (codecs/schemes.py).   When: at once, in blocks in a stream.

Paper and practice. "At once" is the `paper` protocol, where even a token's own query reads the token as its codes. A
stream cannot quantize a group of tokens before the group is full, so tokens wait until 128 of them, or a whole group,
are there. Every scheme waits alike, which makes the schemes comparable and the stream quick. The papers do not say what
text their static ranges came from; here a range goes from the smallest to the largest number in the calibration
windows.
"""
from tinykv.methods.base import CodecMethod


class RTN(CodecMethod):
    """A pair of codecs, and nothing to add to it."""
