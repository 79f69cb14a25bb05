"""IntactKV with another prefix, or a cache that begins with it in another way."""
import torch
from invariants import (
    check_a_text_has_to_begin_with_the_prefix,
    check_attention_sees_the_cache,
    check_batch_rows_are_independent,
    check_bytes,
    check_cache_holds_the_expected_rows,
    check_paper_refuses_a_second_forward,
    check_placeholders_do_not_matter,
    check_same_twice_and_after_reset,
    check_sixteen_bits_are_fp16,
    check_the_trap,
)

from mutants.common import KeptTokensCount, ReadsOn
from mutants.mutant import CHANNEL, DOUBLE, PAPER, TOKEN, Mutant
from tinykv.cache import KVCache
from tinykv.methods.intactkv import IntactKV, Prefix, exact_rows
from tinykv.weights import RTN as RTNWeights
from tinykv.weights import quantize

# ---- the prefix: keys and values (L, Hkv, n, d) from elsewhere


class RowsOfTheQuantizedModel(Prefix):
    def fill(self, full, quantized):
        self.keys, self.values = exact_rows(quantize(full, RTNWeights(3)), quantized, self.ids)


class RowsOfTheNextPositions(Prefix):
    """As if there were a token before the prefix."""

    def fill(self, full, quantized):
        keys, values = exact_rows(full, quantized, [0, *self.ids])
        self.keys, self.values = keys[:, :, 1:], values[:, :, 1:]


class RowsRotatedTwice(Prefix):
    def fill(self, full, quantized):
        keys, self.values = exact_rows(full, quantized, self.ids)
        self.keys = full.rope.rotate(keys, torch.arange(len(self.ids)))


class RowsOfTokensAlone(Prefix):
    """Each token as if it were the first."""

    def fill(self, full, quantized):
        of_tokens = [exact_rows(full, quantized, [token]) for token in self.ids]
        self.keys = torch.cat([keys for keys, _ in of_tokens], dim=2)
        self.values = torch.cat([values for _, values in of_tokens], dim=2)


class RowsOfTheFirstLayer(Prefix):
    def fill(self, full, quantized):
        keys, values = exact_rows(full, quantized, self.ids)
        self.keys, self.values = keys[:1].expand_as(keys), values[:1].expand_as(values)


class RowsSwapped(Prefix):
    def fill(self, full, quantized):
        self.values, self.keys = exact_rows(full, quantized, self.ids)


# ---- the method

class PrefixQuantized(IntactKV):
    def keep_keys(self, layer_cache, n):
        return None

    def keep_values(self, layer_cache, n):
        return None


class PrefixOneShort(IntactKV):
    def keep_keys(self, layer_cache, n):
        return super().keep_keys(layer_cache, n)[..., :-1]

    def keep_values(self, layer_cache, n):
        return super().keep_values(layer_cache, n)[..., :-1]


class PrefixOneLong(IntactKV):
    """The first token of the text is kept, too."""

    def __init__(self, config, **settings):
        super().__init__(config, **settings)
        self.preserve += 1


class PrefixOfKeysOnly(IntactKV):
    def keep_values(self, layer_cache, n):
        return None


class OffsetForInteger(IntactKV):
    """A real zero point where an integer is asked for, and the other way round."""

    def __init__(self, config, formula="integer-zero", **settings):
        other = {"offset": "integer-zero", "integer-zero": "offset"}
        super().__init__(config, formula=other[formula], **settings)


# ---- the cache

class ResetForgetsThePrefix(KVCache):
    """It is there the first time only."""

    def reset(self):
        again = hasattr(self, "layers")
        super().reset()
        if again:
            self.layers = [self.new_layer(i) for i in range(len(self.layers))]
            self.start = 0


class PrefixReadTwice(KVCache):
    """The text keeps the tokens that the cache begins with."""

    def without_prefix(self, tokens):
        return tokens


class PrefixFromPositionOne(KVCache):
    def reset(self):
        super().reset()
        if self.start:
            for layer in self.layers:
                layer.keys.recent = self.rope.rotate(layer.keys.recent, torch.ones(self.start))


class PrefixNotRotated(KVCache):
    def reset(self):
        super().reset()
        if self.start:
            for layer in self.layers:
                layer.keys.recent = self.rope.rotate(layer.keys.recent, -torch.arange(self.start))


class PrefixOfTheFirstSequence(KVCache):
    """The other sequences of a batch begin with nothing."""

    def update(self, layer, q, k, v, positions):
        for rows in (self.layers[layer].keys, self.layers[layer].values):
            if rows.recent is not None and len(rows.recent) == 1 < len(k):
                rows.recent = torch.nn.functional.pad(rows.recent, (0, 0, 0, 0, 0, 0, 0, len(k) - 1))
        return super().update(layer, q, k, v, positions)


class TextFromPositionZero(KVCache):
    """The text's positions begin anew after the prefix."""

    def update(self, layer, q, k, v, positions):
        return super().update(layer, q, k, v, positions - self.start)


class AnyBeginningWillDo(KVCache):
    """A text that does not begin with the prefix is cut all the same."""

    def without_prefix(self, tokens):
        return tokens[:, self.start:] if len(self) == self.start else tokens


INTEGER = {"formula": "integer-zero"}

MUTANTS = [
    Mutant(IntactKV, check_cache_holds_the_expected_rows, RowsOfTheQuantizedModel, TOKEN),
    Mutant(IntactKV, check_sixteen_bits_are_fp16, RowsOfTheQuantizedModel, TOKEN),
    Mutant(IntactKV, check_the_trap, RowsOfTheQuantizedModel, TOKEN),
    Mutant(IntactKV, check_cache_holds_the_expected_rows, RowsOfTheNextPositions, TOKEN),
    Mutant(IntactKV, check_cache_holds_the_expected_rows, RowsRotatedTwice, TOKEN | PAPER),
    Mutant(IntactKV, check_sixteen_bits_are_fp16, RowsRotatedTwice, TOKEN | PAPER),
    Mutant(IntactKV, check_cache_holds_the_expected_rows, RowsOfTokensAlone, TOKEN),
    Mutant(IntactKV, check_cache_holds_the_expected_rows, RowsOfTheFirstLayer, TOKEN),
    Mutant(IntactKV, check_cache_holds_the_expected_rows, RowsSwapped, TOKEN),
    Mutant(IntactKV, check_cache_holds_the_expected_rows, PrefixQuantized, TOKEN),
    Mutant(IntactKV, check_cache_holds_the_expected_rows, PrefixQuantized, CHANNEL | PAPER),
    Mutant(IntactKV, check_bytes, PrefixQuantized, TOKEN),
    Mutant(IntactKV, check_placeholders_do_not_matter, PrefixQuantized, TOKEN),
    Mutant(IntactKV, check_cache_holds_the_expected_rows, PrefixOneShort, TOKEN),
    Mutant(IntactKV, check_bytes, PrefixOneShort, TOKEN | PAPER),
    Mutant(IntactKV, check_placeholders_do_not_matter, PrefixOneShort, TOKEN),
    Mutant(IntactKV, check_cache_holds_the_expected_rows, PrefixOneLong, TOKEN),
    Mutant(IntactKV, check_cache_holds_the_expected_rows, PrefixOfKeysOnly, TOKEN),
    Mutant(IntactKV, check_cache_holds_the_expected_rows, KeptTokensCount, CHANNEL),
    Mutant(IntactKV, check_placeholders_do_not_matter, KeptTokensCount, CHANNEL),
    Mutant(IntactKV, check_cache_holds_the_expected_rows, OffsetForInteger, TOKEN | INTEGER),
    Mutant(IntactKV, check_same_twice_and_after_reset, ResetForgetsThePrefix, TOKEN),
    Mutant(IntactKV, check_cache_holds_the_expected_rows, PrefixReadTwice, TOKEN),
    Mutant(IntactKV, check_cache_holds_the_expected_rows, PrefixFromPositionOne, TOKEN),
    Mutant(IntactKV, check_attention_sees_the_cache, PrefixFromPositionOne, TOKEN),
    Mutant(IntactKV, check_cache_holds_the_expected_rows, PrefixNotRotated, TOKEN),
    Mutant(IntactKV, check_cache_holds_the_expected_rows, PrefixOfTheFirstSequence, TOKEN),
    Mutant(IntactKV, check_batch_rows_are_independent, PrefixOfTheFirstSequence, TOKEN | DOUBLE),
    Mutant(IntactKV, check_cache_holds_the_expected_rows, TextFromPositionZero, TOKEN),
    Mutant(IntactKV, check_sixteen_bits_are_fp16, TextFromPositionZero, TOKEN),
    Mutant(IntactKV, check_a_text_has_to_begin_with_the_prefix, AnyBeginningWillDo, TOKEN),
    Mutant(IntactKV, check_paper_refuses_a_second_forward, ReadsOn, TOKEN | PAPER),
]
