"""fp16: every key and value in 16 bits. The baseline of all other methods.

    Keep: nothing needs to be kept.   Code: 16 bits, nothing is quantized.   When: at once.

"fp16" is the papers' word. A model that runs in bf16 caches bf16. A model that runs in fp32 on a CPU caches fp16, so
the baseline is a real 16-bit cache in any case.
"""
from tinykv.codecs.base import BLOCK, Exact, Pair
from tinykv.methods.base import Method


class FP16(Method):
    block = BLOCK  # as the other methods; a token is the same in either part of the cache

    def __init__(self, config):
        super().__init__(config)
        self.codecs = [Pair(k=Exact(), v=Exact()) for _ in range(config.num_hidden_layers)]
