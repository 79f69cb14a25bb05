"""PFN-N: preserve the first N tokens. What SKVQ (N = 5) and KVQuant (N = 1) do about attention sinks.

    Keep: positions 0 .. N-1, in every layer.   Code: any scheme.   When: at once, in blocks in a stream.

Paper and practice. KVSink compares with N of 0, 5, 10, 15 and 20. The kept tokens are left out of the static ranges,
and of a dynamic channel group's range, or keeping them would protect only themselves and not the others from them. Each
method here calibrates with its own kept tokens out, so pfn and kvsink differ in both their ranges and their kept rows,
as they would in use.
"""
from tinykv import at_least
from tinykv.methods.base import SchemeMethod, first_tokens


class PFN(SchemeMethod):
    compare = ("rtn",)

    def __init__(self, config, preserve=5, **scheme):
        super().__init__(config, **scheme)
        at_least(0, preserve=preserve)
        self.preserve = preserve

    def keep(self, cache, kind, n, state):
        return first_tokens(cache, self.preserve)  # (B, 1, N)
