"""OTT with other pools.

`POOL_MUTANTS` also fail `check_pools` of test_selection.py.
"""
import torch
from invariants import check_bytes, check_cache_holds_the_expected_rows, check_placeholders_do_not_matter

from mutants.common import KeptAgainAsDecoded, KeptTokensCount
from mutants.mutant import LONG, PAPER, Mutant
from tinykv.methods.ott import OTT


class KeepsTheLargest(OTT):
    def size(self, keys):
        return -super().size(keys)


class ForgetsTheEvicted(OTT):
    def keep_keys(self, layer_cache, n):
        positions = super().keep_keys(layer_cache, n)
        return None if positions is None else positions[..., :self.preserve]


class ElectsWithoutThePool(OTT):
    """The smallest of the new tokens, whatever is in the pool; what was there is evicted."""

    def keep_keys(self, layer_cache, n):
        keys = layer_cache.keys
        if layer_cache.layer < self.skip_layers or keys.kept_positions is None:
            return super().keep_keys(layer_cache, n)
        order = self.size(keys.recent[:, :, :n]).sort(dim=-1, stable=True).indices
        pool, extra = order[..., :self.preserve], keys.kept_positions[..., :self.extra_pool]
        return torch.cat([keys.n_coded + pool, extra], dim=-1)


class PositionsFromTheBlock(OTT):
    """A token's number in its block, for its position."""

    def keep_keys(self, layer_cache, n):
        own, layer_cache.keys.n_coded = layer_cache.keys.n_coded, 0
        positions = super().keep_keys(layer_cache, n)
        layer_cache.keys.n_coded = own
        return positions


class NeverFull(OTT):
    def __init__(self, config, extra_pool=32, **settings):
        super().__init__(config, extra_pool=1000, **settings)


class FullBeforeItIs(OTT):
    """Admits none where not all fit."""

    def keep_keys(self, layer_cache, n):
        positions, before = super().keep_keys(layer_cache, n), layer_cache.keys.kept_positions
        if positions is None or before is None:
            return positions
        own, self.extra_pool = self.extra_pool, 1000
        with_room = super().keep_keys(layer_cache, n)
        self.extra_pool = own
        return positions if torch.equal(with_room, positions) else before


class TiesToTheNewcomer(OTT):
    def size(self, keys):
        size = super().size(keys)
        newcomers = keys.shape[2] > self.preserve
        return size - 1e-3 if newcomers else size


class EuclideanLength(OTT):
    """The length of a key in place of its sum of magnitudes."""

    def size(self, keys):
        return keys.float().norm(dim=-1)


class PoolsInAllLayers(OTT):
    def __init__(self, config, skip_layers=2, **settings):
        super().__init__(config, skip_layers=0, **settings)


class OneHeadForAll(OTT):
    """The first head's pool, in all heads."""

    def keep_keys(self, layer_cache, n):
        positions = super().keep_keys(layer_cache, n)
        return None if positions is None else positions[:, :1].expand_as(positions)


class OneHeadForTheLayer(OTT):
    """A layer's pool by the scores of its first head."""

    def size(self, keys):
        return super().size(keys[:, :1] if self.scope == "layer" else keys)


POOL_MUTANTS = [KeepsTheLargest, ForgetsTheEvicted, ElectsWithoutThePool, PositionsFromTheBlock, NeverFull,
                FullBeforeItIs, TiesToTheNewcomer, PoolsInAllLayers, OneHeadForAll]

MUTANTS = [
    Mutant(OTT, check_cache_holds_the_expected_rows, KeepsTheLargest, PAPER),
    Mutant(OTT, check_cache_holds_the_expected_rows, ForgetsTheEvicted),
    Mutant(OTT, check_placeholders_do_not_matter, ForgetsTheEvicted),
    Mutant(OTT, check_cache_holds_the_expected_rows, ElectsWithoutThePool),
    Mutant(OTT, check_cache_holds_the_expected_rows, PositionsFromTheBlock),
    Mutant(OTT, check_cache_holds_the_expected_rows, NeverFull, LONG),
    Mutant(OTT, check_bytes, NeverFull, LONG),
    Mutant(OTT, check_cache_holds_the_expected_rows, FullBeforeItIs, LONG),
    Mutant(OTT, check_cache_holds_the_expected_rows, EuclideanLength),
    Mutant(OTT, check_cache_holds_the_expected_rows, PoolsInAllLayers, PAPER),
    Mutant(OTT, check_bytes, PoolsInAllLayers),
    Mutant(OTT, check_cache_holds_the_expected_rows, OneHeadForAll, PAPER),
    Mutant(OTT, check_cache_holds_the_expected_rows, OneHeadForTheLayer, PAPER | {"settings": (("scope", "layer"),)}),
    Mutant(OTT, check_cache_holds_the_expected_rows, KeptTokensCount, PAPER),
    Mutant(OTT, check_placeholders_do_not_matter, KeptTokensCount),
    Mutant(OTT, check_cache_holds_the_expected_rows, KeptAgainAsDecoded),
]
