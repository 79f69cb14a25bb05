"""What must hold of every method: one `check_` for each invariant.

Each takes a `Case`, which names a method and a cell of the matrix, and builds what it needs from
it.

Checks that compare forwards of different shapes (a batch and its rows, a chunk and its tokens) run
on a float64 model: matrix products of different shapes differ in their last bits, and in float32
these may move a number to the next one of 16 bits, or to the next code.
"""
import copy

import numpy as np
import oracles
import pytest
import torch
from cases import (
    KEEP_ALL,
    MARK,
    WIDE,
    L,
    Watch,
    as_it_comes,
    calibration_windows,
    chunk_of,
    chunk_sizes,
    d,
    rows_of,
    takes,
    tokens_of,
    without_prefix,
)
from expected import (
    MARGIN,
    bits_of,
    chunk_scores,
    expected_bytes,
    expected_kept,
    expected_read,
    mark_what_the_cache_says,
)

from tinykv import UserError
from tinykv.buffer import reserved
from tinykv.calibrate import calibrate
from tinykv.codecs.base import Codec, Pair
from tinykv.codecs.nonuniform import SparseCodes
from tinykv.methods.antkv import AnTKV
from tinykv.methods.kvsink import KVSink
from tinykv.tracing import Trace

NAMES = {"k": "keys", "v": "values"}
# what a codec of one's own can break
OF_CODECS = ["cache_holds_the_expected_rows", "placeholders_do_not_matter", "batch_rows_are_independent",
             "chunks_equal_single_tokens", "codes_are_what_is_claimed", "never_nan"]


# ---- what the cache holds

def check_cache_holds_the_expected_rows(case, sizes=None):
    """In every layer kept and recent tokens are exact, and the others what the method's formula
    makes of them."""
    method = case.method()
    _, watch = case.run_watched(method, case.tokens(), sizes)
    assert len(watch) == case.T
    for layer in range(L):
        for kind in "kv":
            events = watch.events(kind)
            assert rows_of(watch.layers[layer], kind).n_coded == (events[-1].end if events else 0)
        expected = expected_read(case, method, watch, layer)
        for kind, got, want in zip("kv", watch.layers[layer].read(), expected):
            place = f"layer {layer}, {NAMES[kind]}"
            assert got.shape == want.shape, f"{place}: the cache reads {tuple(got.shape)}"
            assert torch.isfinite(got).all(), f"{place}: the cache reads numbers that are not finite"
            # in fp32, of which the last bits depend on the order of the sums
            off = (got - want).abs() > 1e-6 * want.abs().amax(-1, keepdim=True)
            differ = off.any(-1).nonzero().tolist()  # [(sequence, head, token)]
            if differ:
                raise AssertionError(why_rows_differ(case, method, watch, layer, kind, differ, got, want))
    check_bytes(case, method, watch)


def why_rows_differ(case, method, watch, layer, kind, differ, got, want):
    """What to tell the author of a method about rows that are not as expected. differ: where,
    [(sequence, head, token)]; got, want (B, Hkv, T, d)."""
    b, h, t = differ[0]
    place = f"layer {layer}, {NAMES[kind]}, sequence {b}, KV head {h}"
    events, before = watch.events(kind), set()
    for i, event in enumerate(events):
        kept = torch.zeros(got.shape[:3], dtype=torch.bool)
        mark_what_the_cache_says(case, method, watch, layer, kind, events[:i + 1], kept)
        now = set(positions_of(kept[b, h]))
        when = f"{place}: when {event.seen} tokens have come"
        if case.known:
            kept = expected_kept(case, method, watch, layer, kind, events[:i + 1])  # (B, Hkv, T)
            right = set(positions_of(kept[b, h]))
            if now != right:
                return (f"{when}, {tokens_named(now)} kept; {case.oracle.__name__} keeps "
                        f"{sorted(right) or 'none'}")
        late = sorted(token for token in now - before if token < event.first)
        if late:
            return (f"{when}, {tokens_named(late)} kept from now on, but the tokens up to "
                    f"{event.first - 1} were quantized before; keep recent or kept tokens")
        before = now
    n_coded = events[-1].end if events else 0
    numbers = [", ".join(f"{x:.3g}" for x in rows[b, h, t, :4].tolist()) for rows in (got, want)]
    reads = f"{place}: token {t} is {{}} and reads as {numbers[0]}, ... "
    if t in before or t >= n_coded:
        part = "kept" if t in before else "recent"
        return reads.format(part) + f"and not, in full precision, as {numbers[1]}, ..."
    if case.known:
        return reads.format("quantized") + f"and {case.oracle.__name__} makes it {numbers[1]}, ..."
    return (reads.format("quantized") + f"but when its block alone is encoded and decoded again it is "
            f"{numbers[1]}, ...; is something of a text kept in the method or in the codec?")


def positions_of(marks):
    """marks (T) -> where they are True."""
    return marks.nonzero().flatten().tolist()


def tokens_named(tokens):
    """{0, 1} -> "tokens 0, 1 are"."""
    if not tokens:
        return "no token is"
    named = ", ".join(map(str, sorted(tokens)))
    return f"token {named} is" if len(tokens) == 1 else f"tokens {named} are"


def check_uneven_chunks(case):
    """Chunks that end anywhere, or hold several blocks: only whole blocks are quantized, after they were read."""
    for sizes in ([3, 1, case.T - 10, 6], [case.T - 2, 1, 1]):
        check_cache_holds_the_expected_rows(case, sizes)
        check_attention_sees_the_cache(case, sizes)
        if case.oracle is AnTKV:
            check_scores(case, sizes)


def check_bytes(case, method, watch):
    """`nbytes` is the memory held, and the formula: codes, metadata, kept tokens and positions,
    recent, scores."""
    cache = watch.cache
    tensors = []
    for rows in (rows for layer in cache.layers for rows in (layer.keys, layer.values)):
        tensors += [rows.kept_positions, rows.kept_rows, rows.kept_scores]
        tensors += [rows.recent, rows.buffer, rows.recent_scores]
        if rows.codes is not None:
            tensors += vars(rows.codes).values()
    held = memory_of(tensors)
    held -= reserved(cache)
    assert cache.nbytes == held, (f"`nbytes` says {cache.nbytes} bytes, and the tensors that are held "
                                  f"take {held}; count them all, and keep no view of a larger one")
    assert cache.nbytes == sum(cache.part_bytes().values())

    if case.known:
        for kind in "kv":
            got, want = cache.part_bytes(kind), expected_bytes(case, method, watch, kind)
            assert got == want, f"bytes of all {NAMES[kind]}: {got}; {case.oracle.__name__} has {want}"


def memory_of(tensors):
    """Bytes of the memory behind tensors; two of them may share it. What is no tensor is left out."""
    memory = [t.untyped_storage() for t in tensors if isinstance(t, torch.Tensor)]
    return sum({block.data_ptr(): block.nbytes() for block in memory if block.nbytes()}.values())


def check_codes_are_what_is_claimed(case):
    """Codes take about the bits that the method claims (`k_bits`, `v_bits`), and what they decode to
    is nearer to the keys, and values, than their mean is; of normal numbers they lose little."""
    method, model = as_it_comes(case)
    tokens, seeded = tokens_of(1, 256), torch.Generator().manual_seed(0)
    trace = Trace(model)
    with torch.no_grad():
        model(tokens, trace)
    for layer, pair in enumerate(method.codecs):
        k, v = trace.k[layer].half(), trace.v[layer].half()  # (1, Hkv, T, d) both
        if method.rope == "post":
            k = model.rope.rotate(k)
        for kind, x in (("k", k), ("v", v)):
            name, codec, claimed = NAMES[kind], getattr(pair, kind), bits_of(method, kind)
            codes = codec.encode(x)
            got = codec.decode(codes)  # (1, Hkv, T, d)
            assert got.shape == x.shape, (f"{name} of shape {tuple(x.shape)} decode to shape "
                                          f"{tuple(got.shape)}")
            if claimed == 16:
                assert torch.equal(got.to(x.dtype), x), (
                    f"{name} are said to have 16 bits (`{kind}_bits`), and decode to other numbers; "
                    f"say how many bits they have")
                continue
            # scales, zero points and outliers take their place, too: as much again for half of the codes
            held, allowed = 8 * memory_of(vars(codes).values()) / x.numel(), 1.5 * claimed + 1.5
            assert held <= allowed, (
                f"you claim {claimed:g} bits for {name} (`{kind}_bits`), and a number of the codes "
                f"takes {held:.1f} (256 tokens, heads of {WIDE} channels); pack the codes")
            if claimed < 1.5:
                continue  # a grid of two levels, the smallest and the largest number, is worse
            error = (got.float() - x.float()).pow(2).mean().item()
            spread = x.float().var(dim=2, correction=0).mean().item()  # around each channel's mean
            assert error < spread, (
                f"layer {layer}: decoded {name} are further from the {name} than their mean is: the "
                f"mean squared error is {error:.3g}, and {spread:.3g} with the mean of each channel in "
                "the place of all codes; see how `decode` undoes `encode`")
            if not codec.passes:  # tables are for rows like those that they were found on
                check_loss(codec, name, claimed, torch.randn(x.shape, generator=seeded).half())


def check_loss(codec, name, bits, x):
    """Of normal numbers, a codec of b bits loses no more than rounding to the nearest loses with one
    bit less, in groups of 32 channels of a token; it makes them neither larger nor smaller, and what
    was decoded, encoded again, hardly moves.

    Floats of 8 bits lose more than integers of 7; so from 5 bits on, rounding has 4. The nearest of a
    few levels are smaller than what they stand for, by as much as is lost."""
    decoded = codec.decode(codec.encode(x)).to(x.dtype)
    again = codec.decode(codec.encode(decoded))
    groups, steps = x.float().unflatten(-1, (-1, 32)), 2 ** (min(bits, 5) - 1) - 1
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    step = (high - low) / steps
    rounded = low + step * ((groups - low) / step).round()
    loss, bound, moved = ((a.float() - b.float()).pow(2).mean().item() for a, b in (
        (decoded, x), (rounded.flatten(-2), x), (again, decoded)))
    assert loss <= bound, (
        f"a codec of {bits:g} bits loses {loss:.3g} of {name} (mean squared), and rounding with one bit less "
        f"{bound:.3g}; try `encode` on numbers around each level, of both signs")
    size = ((decoded.float() * x.float()).mean() / x.float().pow(2).mean()).item()
    assert abs(size - 1) <= max(0.05, 1.5 * loss), (
        f"decoded {name} are {size:.2f} times what they were, on average; is the scale that codes are made by the one "
        "that is stored?")
    assert moved <= loss / 2, (
        f"decoded {name}, encoded and decoded again, move by {moved:.3g} (mean squared), and lost {loss:.3g} "
        "before; is what was decoded read as other codes?")


def check_scores(case, sizes=None):
    """Every token in full precision, and no other, has a score: of all queries that saw it so. For
    AnTKV."""
    method = case.method()
    _, watch = case.run_watched(method, case.tokens(), sizes)
    for layer, kind in ((layer, kind) for layer in range(L) for kind in "kv"):
        rows, events = rows_of(watch.layers[layer], kind), watch.events(kind)
        assert rows.recent_scores is not None
        assert (rows.kept_positions is not None) == bool(events)
        assert (rows.kept_scores is not None) == bool(events)
        chunks = chunk_scores(case, watch, layer)[kind]
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
    """`update` returns what is held: under `paper` the codes, in a stream codes and the new tokens
    exact."""
    method, tokens = case.method(), case.tokens()
    watch = Watch(case, case.new_cache(method))
    sizes = sizes or chunk_sizes(method, case.protocol, case.T)
    sizes = without_prefix(len(case.prefix), sizes)
    start, before = len(case.prefix), None  # tokens so far; what each layer held of them
    for size in sizes:
        chunk = tokens[:, start:start + size]
        if start == len(case.prefix):
            chunk = tokens[:, :start + size]  # the cache strips the prefix
        case.feed(watch, chunk, chunk.shape[1])
        after = [layer.read() for layer in watch.layers]
        for layer in range(L):
            exact = watch.exact_read(layer)
            old = before[layer] if before else exact
            for i, got in enumerate(watch.returned[layer][-1]):  # K and V
                what = f"layer {layer}, after {start + size} tokens: attention gets other {NAMES['kv'[i]]}"
                if case.protocol == "paper":
                    assert torch.equal(got, after[layer][i].to(got.dtype)), f"{what} than the cache holds"
                    continue
                new_tokens, old_tokens = exact[i][:, :, start:], old[i][:, :, :start]
                assert torch.equal(got[:, :, start:], new_tokens.to(got.dtype)), (
                    f"{what} for the new tokens than in full precision")
                assert torch.equal(got[:, :, :start], old_tokens.to(got.dtype)), (
                    f"{what} for older tokens than the cache held before")
        start, before = start + size, after


def check_low_bits_matter(case):
    """A codec that changes nothing would pass many a test: quantization has to show in the
    logits."""
    method, tokens = case.method(), case.tokens()
    logits, cache = case.run(method, tokens)
    exact = case.exact_logits(tokens, chunk_sizes(method, case.protocol, case.T))
    if case.protocol == "stream":
        # nothing changes before the first block is quantized
        first = min(case.events(kind, [1] * case.T)[0].seen for kind in "kv")
        assert torch.equal(logits[:, :first], exact[:, :first]), (
            f"the first {first} logits are not fp16's, though no token was quantized before them")
    else:
        # a token that is kept may see nothing but tokens that are kept
        first = 0
        for rows in (rows for layer in cache.layers for rows in (layer.keys, layer.values)):
            if rows.kept_positions is not None:
                first = max(first, rows.kept_positions.shape[-1])
    change = (logits - exact).abs().amax(-1)  # (B, T)
    unchanged = (change[:, first:] <= 1e-4).nonzero().tolist()
    assert not unchanged, (f"quantization does not change the logits of (sequence, token) {unchanged[:5]}; "
                           "is anything quantized?")


def check_the_trap(case):
    """A one-shot stream reports fp16 at any bits, as attention comes before quantization. `paper`
    does not."""
    method, tokens = case.method(), case.tokens()
    exact = case.exact_logits(tokens, [case.T])
    one_shot, _ = case.run(method, tokens, case.new_cache(method, "stream"), sizes=[case.T])
    assert torch.equal(one_shot, exact), "a text that comes at once is read in full precision in a stream"
    paper, _ = case.run(method, tokens, case.new_cache(method, "paper"), sizes=[case.T])
    assert not torch.equal(paper, exact), "under `paper` the logits are fp16's; is anything quantized?"


# ---- what is exact

def check_sixteen_bits_are_fp16(case):
    """Bit for bit, whichever tokens are kept, with keys stored before or after RoPE."""
    tokens = case.tokens()
    for rope in ("pre", "post") if "rope" in takes(case.cls, case.scheme) else (None,):
        settings = {"rope": rope} if rope else {}
        method = case.method(k_bits=16, v_bits=16, **settings)
        logits, _ = case.run(method, tokens)
        exact = case.exact_logits(tokens, chunk_sizes(method, case.protocol, case.T), rope)
        assert torch.equal(logits, exact), (f"with k_bits=16 and v_bits=16 (rope {rope}) the logits are off "
                                            f"fp16's by {(logits - exact).abs().max():.3g}")


def check_sixteen_bits_of_one_kind(case):
    """16 bits for keys leave the keys as they were while values are quantized, and the other way
    round."""
    for sixteen, quantized, settings in ((0, 1, {"k_bits": 16}), (1, 0, {"v_bits": 16})):
        method = case.method(**settings)
        _, watch = case.run_watched(method, case.tokens())
        check_bytes(case, method, watch)
        for layer in range(L):
            same = [torch.equal(got, exact)
                    for got, exact in zip(watch.layers[layer].read(), watch.exact_read(layer))]
            given, = settings
            assert same[sixteen], f"layer {layer}: with {given}=16 the {NAMES['kv'[sixteen]]} change"
            assert not same[quantized], f"layer {layer}: with {given}=16 no {NAMES['kv'[quantized]]} change"


def check_keeping_everything_is_exact(case):
    """Where all tokens are kept, keys and values are fp16's, bit for bit; for kvsink, after the
    emergence layer."""
    method, tokens = case.method(**KEEP_ALL), case.tokens()
    logits, watch = case.run_watched(method, tokens)
    nothing_quantized = not watch.events("k")
    for layer in range(L):
        same = [torch.equal(got, exact)
                for got, exact in zip(watch.layers[layer].read(), watch.exact_read(layer))]
        kept = case.oracle is not KVSink or layer > case.setting("emergence_layer")
        assert all(same) == (nothing_quantized or kept)
    if case.oracle is not KVSink:
        assert torch.equal(logits, case.exact_logits(tokens, chunk_sizes(method, case.protocol, case.T)))


class Scrambled(Codec):
    """Another codec that finds garbage where tokens are kept. kept (B, Hkv, T): of all tokens to
    come."""

    def __init__(self, codec, kept):
        self.codec, self.kept, self.seen = codec, kept, 0

    def encode(self, x, ignore=None):
        start, self.seen = self.seen, self.seen + x.shape[2]
        kept = self.kept[:, :, start:self.seen, None]  # (B, Hkv, n, 1)
        garbage = 3000 * torch.linspace(-1, 2, x.shape[3])  # (d)
        return self.codec.encode(torch.where(kept, garbage.to(x.dtype), x), ignore)

    def decode(self, codes):
        return self.codec.decode(codes)


def check_placeholders_do_not_matter(case):
    """What the coded slot of a kept token holds changes nothing: not the logits, nor its group's
    range."""
    method, tokens = case.method(), case.tokens()
    logits, watch = case.run_watched(method, tokens)
    other, other.codecs, anything_kept = copy.copy(method), [], False
    for layer, pair in enumerate(method.codecs):
        kept_k = kept_for_good(case, method, watch, layer, "k")  # (B, Hkv, T)
        kept_v = kept_for_good(case, method, watch, layer, "v")  # (B, Hkv, T)
        other.codecs.append(Pair(k=Scrambled(pair.k, kept_k), v=Scrambled(pair.v, kept_v)))
        anything_kept = anything_kept or bool(kept_k.any() or kept_v.any())
    assert anything_kept or not case.known
    assert torch.equal(case.run(other, tokens)[0], logits), (
        "other numbers in the places of kept tokens change what is read of the others; `encode` has to "
        "leave the tokens of `ignore` out of every range")


def kept_for_good(case, method, watch, layer, kind):
    """True (B, Hkv, T) at tokens that are kept from when they were quantized to the end.

    One that was evicted is read as its codes. A codec may have one range for all heads of a token,
    so a token that was evicted in any head is left out.
    """
    events = watch.events(kind)
    kept = expected_kept(case, method, watch, layer, kind, events)  # (B, Hkv, T)
    evicted = torch.zeros_like(kept)
    for i in range(len(events)):
        evicted |= expected_kept(case, method, watch, layer, kind, events[:i + 1]) & ~kept
    return kept & ~evicted.any(1, keepdim=True)


# ---- what does not depend on what

def check_chunks_equal_single_tokens(case):
    """A stream in blocks is decoding token by token; every length in between is a prefix of the
    same run."""
    method, tokens = case.method(), case.tokens()
    single, one = case.run(method, tokens, sizes=[1] * case.T)
    chunk, block = chunk_of(method), method.block
    lengths = {1, chunk - 1, chunk, block - 1, block, block + 1, case.T}
    for T in sorted(length for length in lengths if length > len(case.prefix)):
        logits, cache = case.run(method, tokens[:, :T])
        worst = (logits - single[:, :T]).abs().max()
        assert worst < 1e-5, (f"a text of {T} tokens in chunks of {chunk} has other logits than token "
                              f"by token, by {worst:.3g}; does the choice depend on more than the cache?")
    for a, b in zip(one.layers, cache.layers):
        assert (a.keys.n_coded, a.values.n_coded) == (b.keys.n_coded, b.values.n_coded)
        assert all(torch.equal(x, y) for x, y in zip(a.read(), b.read())), (
            f"layer {a.layer}: in chunks of {chunk} the cache holds other numbers than token by token")


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
        for layer, kind in ((layer, kind) for layer in range(L) for kind in "kv"):
            in_batch, own = rows_of(batch.layers[layer], kind), rows_of(single.layers[layer], kind)
            place = f"layer {layer}, {NAMES[kind]}, sequence {b} of {case.batch}"
            got, want = kept_of(in_batch, b), kept_of(own, 0)
            assert got == want, f"{place}: kept are {got} by head, and alone {want}"
            assert codes_of(in_batch.codes, b) == codes_of(own.codes, 0), f"{place}: other codes than alone"
            assert torch.equal(in_batch.read()[b], own.read()[0]), f"{place}: other numbers than alone"
        worst = (alone - logits[b:b + 1]).abs().max()
        assert worst < 1e-5, f"sequence {b} of {case.batch}: the logits are off by {worst:.3g} alone"


def codes_of(codes, b):
    """What is stored of one sequence: its part of each tensor, and its outliers as (token, channel,
    number)."""
    if codes is None:
        return None
    tensors, outliers = dict(vars(codes)), []
    if isinstance(codes, SparseCodes):  # the two lists hold the sequences of a token one after the other
        row_end = tensors.pop("row_end")
        values, columns = tensors.pop("values")[0, 0], tensors.pop("columns")[0, 0]
        B, _, T, _ = row_end.shape
        ends = [0, *row_end[:, 0, :, 0].T.flatten().tolist()]
        for t in range(T):
            of_row = slice(ends[t * B + b], ends[t * B + b + 1])
            outliers += [(t, c, x) for c, x in zip(columns[of_row].tolist(), values[of_row].tolist())]
    return {name: x if x is None else x[b].tolist() for name, x in tensors.items()}, outliers


def kept_of(rows, b):
    """By head, the positions that are kept in one sequence."""
    if rows.kept_positions is None:
        return None
    return [set(positions) for positions in rows.kept_positions[b].tolist()]


def check_same_twice_and_after_reset(case):
    """A method holds nothing of a text, and a cache that was reset holds nothing at all."""
    method, tokens, others = case.method(), case.tokens(), case.tokens(seed=3)
    logits, cache = case.run(method, tokens)
    size = cache.nbytes
    # another text in between
    case.run(method, others)
    assert torch.equal(case.run(method, tokens)[0], logits), (
        "a text that is read twice has other logits the second time; a method holds nothing of a text")
    # the same text, then another, in a cache that was reset
    cache.reset()
    assert len(cache) == len(case.prefix)
    numbers = len(cache) * L * 2 * case.model.config.num_key_value_heads * d  # K and V of the prefix
    assert cache.nbytes == 2 * numbers
    after_reset = "after `cache.reset()` a text has other {}; `begin` has to name anew what `observe` notes"
    assert torch.equal(case.run(method, tokens, cache)[0], logits), after_reset.format("logits")
    assert cache.nbytes == size, after_reset.format("bytes")
    cache.reset()
    others = others.roll(1, 0)
    again = case.run(method, others, cache)[0]
    assert torch.equal(again, case.run(method, others)[0]), after_reset.format("logits")


# ---- what is refused

def refuses(call, *arguments, error=UserError, word=""):
    """Whether the call raises such an error, with that word in its message."""
    try:
        with torch.no_grad():
            call(*arguments)
    except error as raised:
        return word in str(raised)
    return False


def check_paper_refuses_a_second_forward(case):
    tokens = case.tokens()
    _, cache = case.run(case.method(), tokens)
    refused = refuses(case.model, tokens[:, :1], cache, error=ValueError, word="one forward")
    assert refused, "read on after the window"


def check_a_text_has_to_begin_with_the_prefix(case):
    """In every row; and something has to follow."""
    cache, tokens, n = case.new_cache(case.method()), case.tokens(), len(case.prefix)
    assert torch.equal(cache.expect(tokens)[0], tokens[:, n:])
    for b, t in np.ndindex(case.batch, n):
        other = tokens.clone()
        other[b, t] = 40 - other[b, t]
        assert refuses(cache.expect, other), f"row {b}, token {t} of another text"
    assert refuses(cache.expect, tokens[:, :n])
    assert refuses(cache.expect, tokens[:, :n - 1])


# ---- calibration

def check_calibration_order_is_no_matter(case):
    """The windows in another order give the same tables."""
    windows, tables = calibration_windows(), []
    for in_order in (windows, windows.flip(0)):
        method = case.uncalibrated()
        calibrate(case.model, method, in_order)
        tables.append(method.calibrated())
    assert tables[0] and tables[0].keys() == tables[1].keys()
    assert all(torch.equal(table, tables[1][name]) for name, table in tables[0].items())


def check_what_is_calibrated_can_be_restored(case):
    """`calibrated` gives all that a method of the same settings needs, to quantize as if it had
    been calibrated."""
    method, other, tokens = case.method(), case.uncalibrated(), case.tokens()
    tables = method.calibrated()
    other.restore({name: table.clone() for name, table in tables.items()})
    assert torch.equal(case.run(other, tokens)[0], case.run(method, tokens)[0]), (
        "a method that takes over what `calibrated` gives (`restore`) has other logits than the calibrated "
        "one; name all that calibration finds")
    size = sum(table.nbytes for table in tables.values())
    if case.known:
        assert other.offline_bytes == method.offline_bytes == size > 0


# ---- in use

def check_generation(case):
    """A packed cache serves generation: it sees every token but the last one made, and quantizes
    the old ones."""
    method, prompt = case.method(), case.text(tokens_of(case.batch, 5))
    new = method.recent + method.block + 4
    cache = case.new_cache(method)
    text = case.model.generate(prompt, new, cache)
    assert text.shape == (case.batch, 5 + new) and torch.equal(text[:, :5], prompt)
    assert len(cache) == 5 + new - 1
    for kind in "kv":
        quantized = case.events(kind, [1] * len(cache), "stream")[-1].end
        assert all(rows_of(layer, kind).n_coded == quantized > 0 for layer in cache.layers)
    again = case.model.generate(prompt, new, case.new_cache(method))
    assert torch.equal(again, text), "a second generation from the same prompt gives other tokens"


def check_never_nan(case):
    """All tokens equal: constant groups, ties for every sink; also a text shorter than what is
    kept."""
    method = case.method()
    for T in (max(2, len(case.prefix) + 1), case.T):
        for token in (0, MARK):
            logits, cache = case.run(method, case.text(torch.full((case.batch, T), token)))
            text = f"{T} times the token {token}"
            assert torch.isfinite(logits).all(), f"the logits of {text} are not finite"
            assert all(torch.isfinite(x).all() for layer in cache.layers for x in layer.read()), (
                f"the cache of {text} reads numbers that are not finite; does a range of one number divide by 0?")


def check_sixteen_bit_models_cache_what_they_compute(case):
    """In a bf16 or fp16 model the fp16 cache is no change at all: it keeps the model's own
    numbers."""
    for dtype in (torch.bfloat16, torch.float16):
        model, tokens = copy.deepcopy(case.model).to(dtype), case.tokens()
        with torch.no_grad():
            cached = model(tokens, case.new_cache(case.method(), model=model))
            assert torch.equal(cached, model(tokens)), dtype
