"""PFN-N: preserve the first N tokens, as SKVQ (N = 5) and KVQuant (N = 1) do for attention sinks.
The same on a page that runs alone: docs/ladder/1_sinks.py.

    Keep: positions 0 .. N-1, in every layer.   Code: any scheme.
    When: at once, in blocks in a stream.

Paper and practice. KVSink compares with N = 0, 5, 10, 15 and 20; its example, LLaMA-2-7B, has a second sink at token 14
(Figure 1a). The kept tokens are left out of static ranges, and of the range of a dynamic channel group. Otherwise only
the kept tokens would be protected, and not the other tokens from them. Each method here calibrates without its own kept
tokens, so pfn and kvsink differ in their ranges as well as in the tokens they keep, as they would in use.
"""
from tinykv.methods.base import CodecMethod, first_tokens


class PFN(CodecMethod):
    beside = {"rtn": {}}

    def __init__(self, config, preserve=5, **scheme):
        super().__init__(config, **scheme)
        self.preserve = preserve

    def keep_keys(self, layer_cache, n):
        return first_tokens(layer_cache, self.preserve)  # (B, 1, N)
