"""What can go wrong in any method: caches, layers of a cache, and keys or values that are wrong.

The methods' own files have those that matter for one method only.
"""
from invariants import (
    check_attention_sees_the_cache,
    check_batch_rows_are_independent,
    check_bytes,
    check_cache_holds_the_expected_rows,
    check_chunks_equal_single_tokens,
    check_generation,
    check_low_bits_matter,
    check_no_future_leak,
    check_paper_refuses_a_second_forward,
    check_placeholders_do_not_matter,
    check_same_twice_and_after_reset,
    check_sixteen_bit_models_cache_what_they_compute,
    check_sixteen_bits_are_fp16,
    check_the_trap,
    check_uneven_chunks,
    check_uneven_chunks_of_exact_rows,
)

from mutants.mutant import C_STATIC, CHANNEL, DOUBLE, PAPER, TOKEN, Mutant
from tinykv.cache import CachedRows, KVCache, LayerCache
from tinykv.codecs.affine import Affine
from tinykv.methods.fp16 import FP16
from tinykv.methods.pfn import PFN
from tinykv.methods.rtn import RTN

# ---- codecs


class KeptTokensCount(Affine):
    """Tokens that are kept widen the range of their group."""

    def encode(self, x, ignore=None):
        return super().encode(x, None)


# ---- keys, or values, of a layer

class KeptRowsIgnored(CachedRows):
    def read(self):
        own, self.kept_positions = self.kept_positions, None
        rows = super().read()
        self.kept_positions = own
        return rows


class KeptRowsOfTheFirstSequence(CachedRows):
    """Every sequence gets the first one's kept rows, though in its own positions."""

    def read(self):
        own = self.kept_rows
        self.kept_rows = None if own is None else own[:1].expand_as(own)
        rows = super().read()
        self.kept_rows = own
        return rows


class KeptAgainAsDecoded(CachedRows):
    """A token that stays kept is kept again as it is decoded."""

    def keep(self, positions):
        own = self.kept_positions
        if own is not None:
            self.kept_positions = None
            index = own.long()[..., None].expand_as(self.kept_rows)
            self.kept_rows = self.read().gather(2, index).to(self.recent.dtype)
            self.kept_positions = own
        super().keep(positions)


class KeepsADecodedCopy(CachedRows):
    def quantize(self, n):
        super().quantize(n)
        self.copy = self.read()

    def tensors(self):
        held = super().tensors()
        if self.codes is not None:
            held["coded"].append(self.copy)
        return held


class HoldsRowsBehindAView(CachedRows):
    """The recent tokens are a view, which keeps the quantized ones in memory."""

    def quantize(self, n):
        whole = self.recent
        super().quantize(n)
        self.recent = whole[:, :, n:]


# ---- the cache of a layer

class QuantizesOneTooFew(LayerCache):
    def n_to_quantize(self, rows):
        n = super().n_to_quantize(rows)
        return max(0, n - 1) if self.protocol == "stream" else n


class QuantizesTooMuch(LayerCache):
    """With every block, all that is recent but the newest token."""

    def n_to_quantize(self, rows):
        n = super().n_to_quantize(rows)
        return max(n, self.length - rows.n_coded - 1) if n else 0


class QuantizesPartialBlocks(LayerCache):
    def n_to_quantize(self, rows):
        n = super().n_to_quantize(rows)
        return self.length - rows.n_coded - self.method.recent if n else 0


class StreamQuantizesFirst(LayerCache):
    """A stream that quantizes before it reads: a block's range is known to its first token's
    query."""

    def append(self, k, v, positions):
        super().append(k, v, positions)
        for rows in (self.keys, self.values):
            n = self.n_to_quantize(rows)
            if self.protocol == "stream" and n:
                rows.quantize(n)


class PaperReadsFirst(LayerCache):
    def update(self, q, k, v, positions):
        if self.protocol == "stream":
            return super().update(q, k, v, positions)
        self.append(k, v, positions)
        read = self.read()
        for rows in (self.keys, self.values):
            rows.quantize(self.length)
        return read


class KeysLeftUnrotated(LayerCache):
    """Keys that are stored before RoPE are read as they are."""

    def read(self, *_):
        return self.keys.read().to(self.dtype), self.values.read().to(self.dtype)


class ChunkPositionsFromZero(LayerCache):
    def append(self, k, v, positions):
        super().append(k, v, positions - positions[0])


class ExactIn32Bits(LayerCache):
    """The model's own 32 bits in a cache that says 16."""

    def append(self, k, v, positions):
        self.dtype = k.dtype
        self.keys.append(self.rope.rotate(k, positions))
        self.values.append(v)
        self.length += k.shape[2]


class AlwaysHalf(LayerCache):
    """fp16 also where the model runs in bf16."""

    def append(self, k, v, positions):
        super().append(k.half(), v.half(), positions)


# ---- the whole cache

class ResetKeepsLayers(KVCache):
    def reset(self):
        layers = getattr(self, "layers", None)
        super().reset()
        if layers:
            self.layers[0] = layers[0]


class ReadsOn(KVCache):
    """After its one window, too."""

    def without_prefix(self, tokens):
        return tokens


MUTANTS = [
    Mutant(PFN, check_cache_holds_the_expected_rows, KeptRowsIgnored, TOKEN),
    Mutant(PFN, check_placeholders_do_not_matter, KeptRowsIgnored, CHANNEL | PAPER),
    Mutant(PFN, check_batch_rows_are_independent, KeptRowsOfTheFirstSequence, TOKEN | DOUBLE),
    Mutant(PFN, check_cache_holds_the_expected_rows, KeptAgainAsDecoded, TOKEN),
    Mutant(RTN, check_bytes, KeepsADecodedCopy, TOKEN),
    Mutant(FP16, check_bytes, HoldsRowsBehindAView, {"batch": 1, "heads_per_kv": 4, "recent": 5}),
    Mutant(RTN, check_cache_holds_the_expected_rows, QuantizesOneTooFew, TOKEN),
    Mutant(RTN, check_bytes, QuantizesOneTooFew, TOKEN),
    Mutant(RTN, check_generation, QuantizesOneTooFew, TOKEN),
    Mutant(RTN, check_cache_holds_the_expected_rows, QuantizesTooMuch, TOKEN | {"recent": 5}),
    Mutant(RTN, check_uneven_chunks, QuantizesPartialBlocks, CHANNEL),
    Mutant(RTN, check_attention_sees_the_cache, StreamQuantizesFirst, TOKEN),
    Mutant(RTN, check_no_future_leak, StreamQuantizesFirst, CHANNEL),
    Mutant(RTN, check_low_bits_matter, StreamQuantizesFirst, TOKEN),
    Mutant(RTN, check_the_trap, StreamQuantizesFirst, TOKEN),
    Mutant(RTN, check_chunks_equal_single_tokens, StreamQuantizesFirst, TOKEN | DOUBLE),
    Mutant(RTN, check_attention_sees_the_cache, PaperReadsFirst, TOKEN | PAPER),
    Mutant(RTN, check_the_trap, PaperReadsFirst, TOKEN),
    Mutant(RTN, check_sixteen_bits_are_fp16, KeysLeftUnrotated, TOKEN | PAPER),
    Mutant(RTN, check_cache_holds_the_expected_rows, KeysLeftUnrotated, C_STATIC),
    Mutant(FP16, check_uneven_chunks_of_exact_rows, ChunkPositionsFromZero, DOUBLE),
    Mutant(RTN, check_cache_holds_the_expected_rows, ChunkPositionsFromZero, TOKEN),
    Mutant(FP16, check_bytes, ExactIn32Bits),
    Mutant(FP16, check_sixteen_bit_models_cache_what_they_compute, AlwaysHalf, PAPER),
    Mutant(RTN, check_same_twice_and_after_reset, ResetKeepsLayers, TOKEN),
    Mutant(RTN, check_paper_refuses_a_second_forward, ReadsOn, TOKEN | PAPER),
]
