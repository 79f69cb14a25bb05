"""What must hold of every method: one `check_` for each invariant.

Each takes a `Case`, which names a method and a cell of the matrix, and builds what it needs from it.

Checks that compare forwards of different shapes (a batch and its rows, a chunk and its tokens) run on a float64 model:
matrix products of different shapes differ in their last bits, and in float32 these may move a number to the next one of
16 bits, or to the next code.
"""
import copy
import itertools

import numpy as np
import oracles
import pytest
import torch
from cases import MARK, L, as_it_comes, chunk_of, d, each_rows, kept_of, tokens_of
from expected import MARGIN, chunk_scores, expected_bytes, expected_kept, expected_read

from tinykv import UserError
from tinykv.cache import made_with
from tinykv.codecs.base import Codec, Pair
from tinykv.lab.tables import restore_tables, table_bytes, tables_of
from tinykv.model import Trace

NAMES = {"k": "keys", "v": "values"}
# what a codec of one's own can break
OF_CODECS = ["cache_holds_the_expected_rows", "placeholders_do_not_matter", "batch_rows_are_independent",
             "chunks_equal_single_tokens", "codes_are_what_is_claimed", "never_nan"]


# ---- what the cache holds

def check_cache_holds_the_expected_rows(case, sizes=None):
    """In every layer kept and recent tokens are exact, and the others what the method's formula makes of them."""
    method = case.method()
    _, watch = case.run_watched(method, case.tokens(), sizes)
    assert len(watch) == case.T
    assert all(rows.n_coded == watch.n_quantized(kind) for _, kind, rows in each_rows(watch))
    for layer in range(L):
        expected = expected_read(case, method, watch, layer)
        for kind, got, want in zip("kv", watch.layers[layer].read(), expected):
            place = f"layer {layer}, {NAMES[kind]}"
            assert got.shape == want.shape, f"{place}: the cache reads {tuple(got.shape)}"
            assert torch.isfinite(got).all(), f"{place}: the cache reads numbers that are not finite"
            # in fp32, of which the last bits depend on the order of the sums
            off = (got - want).abs() > 1e-6 * want.abs().amax(-1, keepdim=True)
            differ = off.any(-1).nonzero().tolist()  # [(sequence, head, token)]
            assert not differ, why_rows_differ(case, method, watch, layer, kind, differ[0], got, want)
    claims = method.preserve and any(rows.n_coded for *_, rows in each_rows(watch))
    assert not claims or any(rows.kept_positions is not None for *_, rows in each_rows(watch.cache)), (
        f"`preserve` says that {method.preserve} tokens are kept, and none is; does `keep_keys` return positions?")
    check_bytes(case, method, watch)


def why_rows_differ(case, method, watch, layer, kind, where, got, want):
    """What to tell the author of a method about rows that are not as expected. where: (sequence, head, token); got,
    want (B, Hkv, T, d)."""
    b, h, t = where
    place = f"layer {layer}, {NAMES[kind]}, sequence {b}, KV head {h}"
    events, before = watch.events(kind), set()
    for i, event in enumerate(events):
        now = watch.kept[layer, kind, event.seen][b][h]
        right = expected_kept(case, method, watch, layer, kind, events[:i + 1])[b, h].nonzero().flatten().tolist()
        when = f"{place}: when {event.seen} tokens have come"
        if now != set(right):
            return f"{when}, the tokens {sorted(now)} are kept; {case.oracle} keeps {right}"
        late = sorted(token for token in now - before if token < event.first)
        if late:
            return (f"{when}, the tokens {late} are kept from now on, but the tokens up to {event.first - 1} were "
                    "quantized before; keep recent or kept tokens")
        before = now
    numbers, others = (", ".join(f"{x:.3g}" for x in rows[b, h, t, :4].tolist()) for rows in (got, want))
    reads = f"{place}: token {t} is {{}} and reads as {numbers}, ... "
    if t in before or t >= watch.n_quantized(kind):
        return reads.format("kept" if t in before else "recent") + f"and not, in full precision, as {others}, ..."
    if case.known:
        return reads.format("quantized") + f"and {case.oracle} makes it {others}, ..."
    return (reads.format("quantized") + f"but when its block alone is encoded and decoded again it is {others}, ...; "
            "is something of a text kept in the method or in the codec?")


def check_uneven_chunks(case):
    """Chunks that end anywhere, or hold several blocks: only whole blocks are quantized, after they were read."""
    for sizes in ([3, 1, case.T - 10, 6], [case.T - 2, 1, 1]):
        check_cache_holds_the_expected_rows(case, sizes)
        check_attention_sees_the_cache(case, sizes)
        if case.oracle == "antkv":
            check_scores(case, sizes)


def check_bytes(case, method, watch):
    """`nbytes` is the memory held, and the formula: codes, metadata, kept tokens and positions, recent, scores."""
    cache, tensors = watch.cache, []
    for _, _, rows in each_rows(cache):
        tensors += [rows.kept_positions, rows.kept_rows, rows.kept_scores, rows.recent, rows.recent_scores]
        if rows.codes is not None:
            tensors += vars(rows.codes).values()
    held = memory_of(tensors)
    assert cache.nbytes == held, (f"`nbytes` says {cache.nbytes} bytes, and the tensors that are held take {held}; "
                                  "count them all, and keep no view of a larger one")
    assert cache.nbytes == sum(cache.part_bytes().values())
    for kind in NAMES if case.known else ():
        got, want = cache.part_bytes(kind), expected_bytes(case, method, watch, kind)
        assert got == want, f"bytes of all {NAMES[kind]}: {got}; {case.oracle} has {want}"


def memory_of(tensors):
    """Bytes of the memory behind tensors; two of them may share it. What is no tensor is left out."""
    memory = [t.untyped_storage() for t in tensors if isinstance(t, torch.Tensor)]
    return sum({block.data_ptr(): block.nbytes() for block in memory if block.nbytes()}.values())


def check_codes_are_what_is_claimed(case):
    """Codes take about the bits that the codecs claim (`bits`), and what they decode to is nearer to the
    keys, and values, than their mean is; of normal numbers they lose little."""
    method, model = as_it_comes(case)
    trace, seeded = Trace(model), torch.Generator().manual_seed(0)
    with torch.no_grad():
        model(tokens_of(1, 256), trace)
    for layer, kind, codec in method.each_codec():
        x = getattr(trace, kind)[layer].half()  # (1, Hkv, T, d)
        if kind == "k" and method.rope == "post":
            x = model.rope.rotate(x)
        name, claimed, shown = NAMES[kind], codec.bits, x.clone()
        codes = codec.encode(shown)
        assert shown.equal(x), f"{name}: `encode` writes into the tensor that it is shown; work on a copy, x.clone()"
        got = codec.decode(codes)  # (1, Hkv, T, d)
        assert got.shape == x.shape, f"{name} of shape {tuple(x.shape)} decode to shape {tuple(got.shape)}"
        if claimed == 16:
            assert torch.equal(got.to(x.dtype), x), (f"{name} are said to have 16 bits (`bits` of {codec!r}), and "
                                                     "decode to other numbers; say how many bits they have")
            continue
        # scales, zero points and outliers take their place, too: as much again for half of the codes
        held, allowed = 8 * memory_of(vars(codes).values()) / x.numel(), 1.5 * claimed + 1.5
        assert held <= allowed, (
            f"you claim {claimed:g} bits for {name} (`bits` of {codec!r}), and a number of the codes takes {held:.1f} "
            f"(256 tokens, heads of {x.shape[-1]} channels); pack the codes")
        if claimed < 1.5:
            continue  # a grid of two levels, the smallest and the largest number, is worse
        spread = x.float().var(dim=2, correction=0).mean().item()  # around each channel's mean
        error = mean_square(got, x)
        assert error < spread, (
            f"layer {layer}: decoded {name} are further from the {name} than their mean is: the mean squared error is "
            f"{error:.3g}, and {spread:.3g} with the mean of each channel in the place of all codes; see how `decode` "
            "undoes `encode`")
        if not codec.needs_text:  # tables are for rows like those that they were found on
            check_loss(codec, name, claimed, torch.randn(x.shape, generator=seeded).half())


def mean_square(a, b):
    """How far numbers are from others."""
    return (a.float() - b.float()).pow(2).mean().item()


def check_loss(codec, name, bits, x):
    """Of normal numbers, a codec of b bits loses no more than rounding to the nearest loses with one bit less, in
    groups of 32 channels of a token; it makes them neither larger nor smaller, and what was decoded, encoded again,
    hardly moves.

    Floats of 8 bits lose more than integers of 7; so from 5 bits on, rounding has 4. The nearest of a few levels are
    smaller than what they stand for, by as much as is lost."""
    decoded = codec.decode(codec.encode(x)).to(x.dtype)
    groups, steps = x.float().unflatten(-1, (-1, 32)), 2 ** (min(bits, 5) - 1) - 1
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    step = (high - low) / steps
    rounded = low + step * ((groups - low) / step).round()
    loss, bound = mean_square(decoded, x), mean_square(rounded.flatten(-2), x)
    assert loss <= bound, (
        f"a codec of {bits:g} bits loses {loss:.3g} of {name} (mean squared), and rounding with one bit less "
        f"{bound:.3g}; try `encode` on numbers around each level, of both signs")
    size = ((decoded.float() * x.float()).mean() / x.float().pow(2).mean()).item()
    assert abs(size - 1) <= max(0.05, 1.5 * loss), (
        f"decoded {name} are {size:.2f} times what they were, on average; is the scale that codes are made by the one "
        "that is stored?")
    moved = mean_square(codec.decode(codec.encode(decoded)), decoded)
    assert moved <= loss / 2, (
        f"decoded {name}, encoded and decoded again, move by {moved:.3g} (mean squared), and lost {loss:.3g} "
        "before; is what was decoded read as other codes?")


def check_scores(case, sizes=None):
    """Every token in full precision, and no other, has a score: of all queries that saw it so. For AnTKV."""
    _, watch = case.run_watched(case.method(), case.tokens(), sizes)
    for layer, kind, rows in each_rows(watch):
        events, chunks = watch.events(kind), chunk_scores(case, watch, layer)[kind]
        assert rows.recent_scores is not None
        assert (rows.kept_positions is not None) == (rows.kept_scores is not None) == bool(events)
        for b, h in np.ndindex(chunks[0].shape[:2]):
            of_head = [scores[b, h].tolist() for scores in chunks]
            anchors, total = oracles.anchors(case.setting("anchors"), of_head, events, MARGIN)
            positions, held = list(range(rows.n_coded, case.T)), rows.recent_scores[b, h].tolist()
            if events:
                kept = rows.kept_positions[b, h].tolist()
                assert sorted(anchors) == sorted(kept)
                positions, held = kept + positions, rows.kept_scores[b, h].tolist() + held
            want = [total[i] for i in positions]
            assert held == pytest.approx(want, rel=1e-5, abs=1e-5 * max(total.values()))


# ---- what attention sees

def check_attention_sees_the_cache(case, sizes=None):
    """`update` returns what is held: under `paper` the codes, in a stream codes and the new tokens exact.

    This is the trap: a stream that comes at once reports fp16 at any bits, as attention comes before quantization.
    """
    _, watch = case.run_watched(case.method(), case.tokens(), sizes)
    for layer in range(L):
        exact = before = watch.exact_read(layer)  # K and V; of a prefix, which the cache begins with, too
        start = len(case.prefix)
        for returned, held in zip(watch.returned[layer], watch.held[layer]):
            for i, (kind, got) in enumerate(zip("kv", returned)):
                end = got.shape[2]
                what = f"layer {layer}, after {end} tokens: attention gets other {NAMES[kind]}"
                if case.protocol == "paper":
                    assert torch.equal(got, held[i]), f"{what} than the cache holds"
                    continue
                assert torch.equal(got[:, :, start:], exact[i][:, :, start:end]), (
                    f"{what} for the new tokens than in full precision")
                assert torch.equal(got[:, :, :start], before[i][:, :, :start]), (
                    f"{what} for older tokens than the cache held before")
            start, before = end, held


def check_low_bits_matter(case):
    """A codec that changes nothing would pass many a test: quantization has to show in the logits."""
    tokens = case.tokens()
    logits, cache = case.run(case.method(), tokens)
    exact = case.exact_logits(tokens)
    if case.protocol == "stream":
        # nothing changes before the first block is quantized
        first = min(case.events(kind, [1] * case.T)[0].seen for kind in "kv")
        assert torch.equal(logits[:, :first], exact[:, :first]), (
            f"the first {first} logits are not fp16's, though no token was quantized before them")
    else:
        # a token that is kept may see nothing but tokens that are kept
        kept = [rows.kept_positions for _, _, rows in each_rows(cache) if rows.kept_positions is not None]
        first = max((positions.shape[-1] for positions in kept), default=0)
    change = (logits - exact).abs().amax(-1)  # (B, T)
    unchanged = (change[:, first:] <= 1e-4).nonzero().tolist()
    assert not unchanged, (f"quantization does not change the logits of (sequence, token) {unchanged[:5]}; "
                           "is anything quantized?")


# ---- what is exact

def check_sixteen_bits_are_fp16(case):
    """Bit for bit, whichever tokens are kept, with keys stored before or after RoPE."""
    tokens = case.tokens()
    for rope in ("pre", "post") if "rope" in case.takes else (None,):
        logits, _ = case.run(case.method(k_bits=16, v_bits=16, **({"rope": rope} if rope else {})), tokens)
        exact = case.exact_logits(tokens, rope=rope)
        assert torch.equal(logits, exact), (f"with k_bits=16 and v_bits=16 (rope {rope}) the logits are off fp16's by "
                                            f"{(logits - exact).abs().max():.3g}")
    for sixteen in "kv":
        for _, kind, codec in case.method(**{f"{sixteen}_bits": 16}).each_codec():
            right = (codec.bits == 16) == (kind == sixteen)
            assert right, f"with {sixteen}_bits=16 {NAMES[kind]} have {codec.bits:g} bits"


class Scrambled(Codec):
    """Another codec that finds garbage where tokens are kept. kept (B, Hkv, T): of all tokens to come."""

    def __init__(self, codec, kept):
        self.codec, self.bits, self.kept, self.seen = codec, codec.bits, kept, 0

    def encode(self, x, **of_cache):
        if not of_cache:  # a method asks what a code would lose
            return self.codec.encode(x)
        start, self.seen = self.seen, self.seen + x.shape[2]
        kept = self.kept[:, :, start:self.seen, None]  # (B, Hkv, n, 1)
        garbage = 3000 * torch.linspace(-1, 2, x.shape[3])  # (d)
        return self.codec.encode(torch.where(kept, garbage.to(x.dtype), x), **of_cache)

    def decode(self, codes):
        return self.codec.decode(codes)


def check_placeholders_do_not_matter(case):
    """What the coded slot of a kept token holds changes nothing: not the logits, nor its group's range."""
    method, tokens = case.method(), case.tokens()
    logits, watch = case.run_watched(method, tokens)
    kept = {key: kept_for_good(case, method, watch, *key) for key in itertools.product(range(L), "kv")}  # (B, Hkv, T)
    assert not case.known or any(marks.any() for marks in kept.values())
    other = copy.copy(method)
    other.codecs = [Pair(*(Scrambled(codec, kept[layer, kind]) for kind, codec in zip("kv", pair)))
                    for layer, pair in enumerate(method.codecs)]
    other.calibrated_on = method.calibrated_on and (method.calibrated_on[0], made_with(other), other.each_codec())
    assert torch.equal(case.run(other, tokens)[0], logits), (
        "other numbers in the places of kept tokens change what is read of the others; `encode` has to leave the "
        "tokens of `ignore` out of every range")


def kept_for_good(case, method, watch, layer, kind):
    """True (B, Hkv, T) at tokens that are kept from when they were quantized to the end.

    One that was evicted is read as its codes. A codec may have one range for all heads of a token, so a token that was
    evicted in any head is left out.
    """
    events = watch.events(kind)
    kept = expected_kept(case, method, watch, layer, kind, events)  # (B, Hkv, T)
    evicted = torch.zeros_like(kept)
    for i in range(len(events)):
        evicted |= expected_kept(case, method, watch, layer, kind, events[:i + 1]) & ~kept
    return kept & ~evicted.any(1, keepdim=True)


# ---- what does not depend on what

def check_chunks_equal_single_tokens(case):
    """A stream in blocks is decoding token by token; every length in between is a prefix of the same run."""
    method, tokens = case.method(), case.tokens()
    single, one = case.run(method, tokens, sizes=[1] * case.T)
    chunk, block = chunk_of(method), method.block
    lengths = {1, chunk - 1, chunk, block - 1, block, block + 1, case.T}
    for T in sorted(length for length in lengths if length > len(case.prefix)):
        logits, cache = case.run(method, tokens[:, :T])
        worst = (logits - single[:, :T]).abs().max()
        assert worst < 1e-5, (f"a text of {T} tokens in chunks of {chunk} has other logits than token by token, by "
                              f"{worst:.3g}; does the choice depend on more than the cache?")
    for (layer, kind, a), (_, _, b) in zip(each_rows(one), each_rows(cache)):
        assert a.n_coded == b.n_coded and torch.equal(a.read(), b.read()), (
            f"layer {layer}: in chunks of {chunk} the cache holds other {NAMES[kind]} than token by token")


def check_no_future_leak(case):
    """A later token never changes an earlier logit, bit for bit."""
    method, tokens = case.method(), case.tokens()
    logits, _ = case.run(method, tokens)
    for p, new in ((1, MARK), (method.block - 1, 0), (method.block + 2, MARK), (case.T - 1, 0)):
        if p < len(case.prefix):
            continue
        other = tokens.clone()
        other[:, p] = new
        changed, _ = case.run(method, other)
        assert torch.equal(changed[:, :p], logits[:, :p]), (
            f"another token at position {p} changes the logits of tokens before it")
        assert (tokens[:, p] == new).all() or not torch.equal(changed[:, p:], logits[:, p:]), (
            f"another token at position {p} changes no logits; does something of a text stay in the method?")


def check_batch_rows_are_independent(case):
    """A row of a batch gives the logits, the codes and the kept tokens that it gives alone."""
    method, tokens = case.method(), case.tokens()
    logits, batch = case.run(method, tokens)
    for b in range(case.batch):
        alone, single = case.run(method, tokens[b:b + 1])
        for (layer, kind, in_batch), (_, _, own) in zip(each_rows(batch), each_rows(single)):
            place = f"layer {layer}, {NAMES[kind]}, sequence {b} of {case.batch}"
            got, want = kept_of(in_batch)[b], kept_of(own)[0]
            assert got == want, f"{place}: kept are {got} by head, and alone {want}"
            if own.codes is not None:  # those of kept tokens, which are not read, too
                got, want = (rows.codec.decode(rows.codes) for rows in (in_batch, own))
                assert torch.equal(got[b], want[0]), f"{place}: other codes than alone"
            assert torch.equal(in_batch.read()[b], own.read()[0]), f"{place}: other numbers than alone"
        worst = (alone - logits[b:b + 1]).abs().max()
        assert worst < 1e-5, f"sequence {b} of {case.batch}: the logits are off by {worst:.3g} alone"


def check_same_twice_and_after_reset(case):
    """A method holds nothing of a text, and a cache that was reset holds nothing at all."""
    method, tokens, others = case.method(), case.tokens(), case.tokens(seed=3)
    logits, cache = case.run(method, tokens)
    # another text in between
    of_others, other_cache = case.run(method, others)
    assert torch.equal(case.run(method, tokens)[0], logits), (
        "a text that is read twice has other logits the second time; a method holds nothing of a text")
    # the same text, then another, in a cache that was reset
    expected = (tokens, logits, cache.nbytes), (others, of_others, other_cache.nbytes)
    for text, want, size in expected:
        cache.reset()
        assert len(cache) == len(case.prefix)
        numbers = len(cache) * L * 2 * case.model.config.num_key_value_heads * d  # K and V of the prefix
        assert cache.nbytes == 2 * numbers
        assert torch.equal(case.run(method, text, cache)[0], want) and cache.nbytes == size, (
            "after `cache.reset()` a text has other logits or bytes; `begin` has to name anew what `observe` notes")


# ---- what is refused

def check_a_text_has_to_begin_with_the_prefix(case):
    """In every row; and something has to follow."""
    cache, tokens, n = case.new_cache(case.method()), case.tokens(), len(case.prefix)
    others = [tokens[:, :n], tokens[:, :n - 1]]
    for b, t in np.ndindex(case.batch, n):
        others.append(tokens.clone())
        others[-1][b, t] = 40 - tokens[b, t]
    for other in others:
        with pytest.raises(UserError, match="a text begins with"):
            cache.expect(other)


# ---- calibration

def check_what_is_calibrated_can_be_restored(case):
    """`tables_of` gives all that a method of the same settings needs, to quantize as if it had been calibrated. One
    that has neither is refused."""
    method, other, tokens = case.method(), case.uncalibrated(), case.tokens()
    with pytest.raises(UserError, match="is not calibrated"):
        case.run(other, tokens)
    tables = tables_of(method)
    restore_tables(other, tables, case.model)
    assert torch.equal(case.run(other, tokens)[0], case.run(method, tokens)[0]), (
        "a method that takes over what `tables_of` gives (`restore_tables`) has other logits than the calibrated one; "
        "name all that calibration finds")
    size = sum(table.nbytes for table in tables.values() if table.dim())  # a count, such as `samples`, is no table
    if case.known:
        assert table_bytes(other) == table_bytes(method) == size > 0


# ---- in use

def check_generation(case):
    """A packed cache serves generation: it sees every token but the last one made, and quantizes the old ones."""
    method, prompt = case.method(), case.text(tokens_of(case.batch, 5))
    new, cache = method.recent + method.block + 4, case.new_cache(method)
    text = case.model.generate(prompt, new, cache)
    assert text.shape == (case.batch, 5 + new) and torch.equal(text[:, :5], prompt)
    assert len(cache) == 5 + new - 1
    for _, kind, rows in each_rows(cache):
        assert rows.n_coded == case.events(kind, [1] * len(cache))[-1].end > 0
    again = case.model.generate(prompt, new, case.new_cache(method))
    assert torch.equal(again, text), "a second generation from the same prompt gives other tokens"


def check_never_nan(case):
    """All tokens equal: constant groups, ties for every sink; also a text shorter than what is kept."""
    for T, token in itertools.product((max(2, len(case.prefix) + 1), case.T), (0, MARK)):
        logits, cache = case.run(case.method(), case.text(torch.full((case.batch, T), token)))
        text = f"{T} times the token {token}"
        assert torch.isfinite(logits).all(), f"the logits of {text} are not finite"
        assert all(torch.isfinite(rows.read()).all() for _, _, rows in each_rows(cache)), (
            f"the cache of {text} reads numbers that are not finite; does a range of one number divide by 0?")


def check_sixteen_bit_models_cache_what_they_compute(case):
    """In a bf16 or fp16 model the fp16 cache is no change at all: it keeps the model's own numbers."""
    for dtype in (torch.bfloat16, torch.float16):
        model, tokens = copy.deepcopy(case.model).to(dtype), case.tokens()
        with torch.no_grad():
            cached = model(tokens, case.new_cache(case.method(), model=model))
            assert torch.equal(cached, model(tokens)), dtype
