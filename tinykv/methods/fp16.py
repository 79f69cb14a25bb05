"""fp16: every key and value in 16 bits. The reference that all others are measured against.

    Keep: nothing needs it.   Code: 16 bits, as they are.   When: at once.

"fp16" is the papers' word. A model that runs in bf16 keeps bf16; one that runs in fp32 on a CPU rounds what it caches
to fp16, so the baseline is a real 16-bit cache in any case.
"""
from tinykv.codecs import Exact
from tinykv.methods.base import Method


class FP16(Method):
    block = 128  # as long as the other methods' blocks: exact rows are the same in either part of the cache

    def __init__(self, config):
        self.codecs = [{"k": Exact(), "v": Exact()} for _ in range(config.num_hidden_layers)]
