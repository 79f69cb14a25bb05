"""KIVI with another window, another pace, or other groups."""
from invariants import check_bytes, check_cache_holds_the_expected_rows

from mutants.common import QuantizesOneTooFew
from mutants.mutant import Mutant
from tinykv.codecs import Pair
from tinykv.codecs.affine import Affine
from tinykv.methods.kivi import KIVI


class WindowOffByOne(KIVI):
    def __init__(self, config, **settings):
        super().__init__(config, **settings)
        self.recent += 1


class ValuesAtTheKeysPace(KIVI):
    def __init__(self, config, v_block=None, **settings):
        super().__init__(config, **settings)


class KeysAtTheValuesPace(KIVI):
    def __init__(self, config, v_block=None, **settings):
        super().__init__(config, **settings)
        self.block = v_block or self.block


class KeysGroupedByChannels(KIVI):
    """Of one token, as transformers' cache of that name does."""

    def __init__(self, config, group_size=32, **settings):
        super().__init__(config, group_size=group_size, **settings)
        keys = Affine(self.k_bits, config.head_dim, "token", group_size)
        self.codecs = [Pair(k=keys, v=pair.v) for pair in self.codecs]


V_BLOCK = {"settings": (("v_block", 2),)}

MUTANTS = [
    Mutant(KIVI, check_cache_holds_the_expected_rows, WindowOffByOne, {"recent": 5}),
    Mutant(KIVI, check_bytes, WindowOffByOne, {"recent": 5}),
    Mutant(KIVI, check_cache_holds_the_expected_rows, ValuesAtTheKeysPace, V_BLOCK),
    Mutant(KIVI, check_cache_holds_the_expected_rows, KeysAtTheValuesPace, V_BLOCK),
    Mutant(KIVI, check_cache_holds_the_expected_rows, KeysGroupedByChannels),
    Mutant(KIVI, check_cache_holds_the_expected_rows, QuantizesOneTooFew),
]
