"""What must hold of every method: one `check_` for each invariant.

Each takes a `Case`, which names a method and a cell of the matrix, and builds what it needs from
it. So a case may name something wrong in the place of a method, a codec or a cache, and
test_mutants.py shows that the check fails then.

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
    G,
    L,
    Watch,
    calibration_windows,
    chunk_of,
    chunk_sizes,
    d,
    read,
    rows_of,
    takes,
    tokens_of,
    without_prefix,
)
from expected import (
    MARGIN,
    calibrated_range,
    calibration_rows,
    chunk_scores,
    codec_of,
    expected_bytes,
    expected_kept,
    expected_read,
)

from tinykv import UserError
from tinykv.calibrate import calibrate
from tinykv.codecs import Codec, Pair
from tinykv.codecs.affine import Affine
from tinykv.codecs.codebook import Codebook
from tinykv.codecs.nonuniform import SparseCodes
from tinykv.methods.kvsink import KVSink

# ---- what the cache holds

def check_cache_holds_the_expected_rows(case, sizes=None):
    """In every layer pinned and recent tokens are exact, and the others what the method's formula
    makes of them."""
    method = case.method()
    _, watch = case.run_watched(method, case.tokens(), sizes)
    assert len(watch) == case.T
    for layer in range(L):
        for kind in "kv":
            events = watch.events(kind)
            assert rows_of(watch.layers[layer], kind).n_coded == (events[-1].end if events else 0)
        expected = expected_read(case, method, watch, layer)
        for kind, got, want in zip("KV", read(watch.layers[layer]), expected):
            assert got.shape == want.shape and torch.isfinite(got).all()
            differ = (got != want).any(-1).nonzero().tolist()
            assert not differ, f"layer {layer}, {kind}: (sequence, head, token) {differ[:5]} differ"


def check_uneven_chunks(case):
    """Chunks that end anywhere, or hold several blocks."""
    check_cache_holds_the_expected_rows(case, [3, 1, case.T - 10, 6])


def check_bytes(case):
    """`nbytes` is the memory held, and the formula: codes, metadata, pinned tokens and positions,
    recent, scores."""
    method = case.method()
    _, watch = case.run_watched(method, case.tokens())
    cache = watch.cache

    # the memory behind every tensor that is held; two tensors may share it
    tensors = []
    for rows in (rows for layer in cache.layers for rows in (layer.keys, layer.values)):
        tensors += [rows.pinned_positions, rows.pinned_rows, rows.pinned_scores]
        tensors += [rows.recent, rows.recent_scores]
        if rows.codes is not None:
            tensors += vars(rows.codes).values()
    memory = [t.untyped_storage() for t in tensors if t is not None]
    held = sum({block.data_ptr(): block.nbytes() for block in memory if block.nbytes()}.values())
    assert cache.nbytes == held == sum(cache.part_bytes().values())

    if case.known:
        for kind in "kv":
            assert cache.part_bytes(kind) == expected_bytes(case, method, watch, kind)


def check_scores(case, sizes=None):
    """Every token in full precision, and no other, has a score: of all queries that saw it so. For
    AnTKV."""
    method = case.method()
    _, watch = case.run_watched(method, case.tokens(), sizes)
    for layer, kind in ((layer, kind) for layer in range(L) for kind in "kv"):
        rows, events = rows_of(watch.layers[layer], kind), watch.events(kind)
        assert rows.recent_scores is not None
        assert (rows.pinned_positions is not None) == bool(events)
        assert (rows.pinned_scores is not None) == bool(events)
        chunks = chunk_scores(case, watch, layer)[kind]
        for b, h in np.ndindex(chunks[0].shape[:2]):
            of_head = [scores[b, h].tolist() for scores in chunks]
            anchors, total = oracles.anchors(case.setting("anchors"), of_head, events, MARGIN)
            positions, held = list(range(rows.n_coded, case.T)), rows.recent_scores[b, h].tolist()
            if events:
                pinned = rows.pinned_positions[b, h].tolist()
                assert sorted(anchors) == sorted(pinned)
                positions, held = pinned + positions, rows.pinned_scores[b, h].tolist() + held
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
        after = [read(layer) for layer in watch.layers]
        for layer in range(L):
            exact = watch.exact_read(layer)
            old = before[layer] if before else exact
            for i, got in enumerate(watch.returned[layer][-1]):  # K and V
                if case.protocol == "paper":
                    assert torch.equal(got, after[layer][i].to(got.dtype))
                    continue
                new_tokens, old_tokens = exact[i][:, :, start:], old[i][:, :, :start]
                assert torch.equal(got[:, :, start:], new_tokens.to(got.dtype)), "new tokens not exact"
                assert torch.equal(got[:, :, :start], old_tokens.to(got.dtype)), "older tokens changed"
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
        assert torch.equal(logits[:, :first], exact[:, :first]), "changed before anything was quantized"
    else:
        # a token that is kept may see nothing but tokens that are kept
        first = 0
        for rows in (rows for layer in cache.layers for rows in (layer.keys, layer.values)):
            if rows.pinned_positions is not None:
                first = max(first, int((rows.pinned_positions >= 0).sum(-1).max()))
    change = (logits - exact).abs().amax(-1)  # (B, T)
    unchanged = (change[:, first:] <= 1e-4).nonzero().tolist()
    assert not unchanged, f"(sequence, token) unchanged by quantization: {unchanged}"


def check_the_trap(case):
    """A one-shot stream reports fp16 at any bits, as attention comes before quantization. `paper`
    does not."""
    method, tokens = case.method(), case.tokens()
    exact = case.exact_logits(tokens, [case.T])
    one_shot, _ = case.run(method, tokens, case.new_cache(method, "stream"), sizes=[case.T])
    assert torch.equal(one_shot, exact)
    paper, _ = case.run(method, tokens, case.new_cache(method, "paper"), sizes=[case.T])
    assert not torch.equal(paper, exact)


# ---- what is exact

def check_sixteen_bits_are_fp16(case):
    """Bit for bit, whichever tokens are kept and wherever keys are rotated."""
    tokens = case.tokens()
    for rope in ("pre", "post") if "rope" in takes(case.cls, case.scheme) else (None,):
        settings = {"rope": rope} if rope else {}
        method = case.method(k_bits=16, v_bits=16, **settings)
        logits, _ = case.run(method, tokens)
        exact = case.exact_logits(tokens, chunk_sizes(method, case.protocol, case.T))
        assert torch.equal(logits, exact), f"rope {rope}: off by {(logits - exact).abs().max()}"


def check_sixteen_bits_of_one_kind(case):
    """16 bits for keys leave the keys as they were while values are quantized, and the other way
    round."""
    for sixteen, quantized, settings in ((0, 1, {"k_bits": 16}), (1, 0, {"v_bits": 16})):
        _, watch = case.run_watched(case.method(**settings), case.tokens())
        for layer in range(L):
            same = [torch.equal(got, exact)
                    for got, exact in zip(read(watch.layers[layer]), watch.exact_read(layer))]
            assert same[sixteen] and not same[quantized]


def check_keeping_everything_is_exact(case):
    """Where all tokens are kept, keys and values are fp16's, bit for bit; for kvsink, after the
    emergence layer."""
    method, tokens = case.method(**KEEP_ALL), case.tokens()
    logits, watch = case.run_watched(method, tokens)
    nothing_quantized = not watch.events("k")
    for layer in range(L):
        same = [torch.equal(got, exact)
                for got, exact in zip(read(watch.layers[layer]), watch.exact_read(layer))]
        kept = case.cls is not KVSink or layer > case.setting("emergence_layer")
        assert all(same) == (nothing_quantized or kept)
    if case.cls is not KVSink:
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
    """What the coded slot of a pinned token holds changes nothing: not the logits, nor its group's
    range."""
    method, tokens = case.method(), case.tokens()
    logits, watch = case.run_watched(method, tokens)
    other, other.codecs, anything_kept = copy.copy(method), [], False
    for layer, pair in enumerate(method.codecs):
        # Only tokens that are pinned at the end: one that was evicted before is read as its codes.
        kept_k = expected_kept(case, method, watch, layer, "k", watch.events("k"))  # (B, Hkv, T)
        kept_v = expected_kept(case, method, watch, layer, "v", watch.events("v"))  # (B, Hkv, T)
        other.codecs.append(Pair(k=Scrambled(pair.k, kept_k), v=Scrambled(pair.v, kept_v)))
        anything_kept = anything_kept or bool(kept_k.any() or kept_v.any())
    assert anything_kept or not case.known
    assert torch.equal(case.run(other, tokens)[0], logits)


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
        assert worst < 1e-5, f"{T} tokens: off by {worst}"
    for a, b in zip(one.layers, cache.layers):
        assert (a.keys.n_coded, a.values.n_coded) == (b.keys.n_coded, b.values.n_coded)
        assert all(torch.equal(x, y) for x, y in zip(read(a), read(b)))


def check_uneven_chunks_of_exact_rows(case):
    """The fp16 method reads a text alike in any chunks."""
    method, tokens, T = case.fp16(), case.tokens(), case.T
    whole, _ = case.run(method, tokens, sizes=[T])
    for sizes in ([1, T - 1], [3, 5, T - 8], [T - 1, 1], [2] * (T // 2) + [1]):
        assert (case.run(method, tokens, sizes=sizes)[0] - whole).abs().max() < 1e-4, sizes


def check_no_future_leak(case):
    """A later token never changes an earlier logit, bit for bit."""
    method, tokens = case.method(), case.tokens()
    logits, _ = case.run(method, tokens)
    for p in (1, method.block - 1, method.block + 2, case.T - 1):
        if p < len(case.prefix):
            continue
        for new in (MARK, 0):
            other = tokens.clone()
            other[:, p] = new
            changed, _ = case.run(method, other)
            assert torch.equal(changed[:, :p], logits[:, :p]), f"token {p} changed what came before it"
            assert (tokens[:, p] == new).all() or not torch.equal(changed[:, p:], logits[:, p:])


def check_batch_rows_are_independent(case):
    """A row of a batch gives the logits, the codes and the pinned tokens that it gives alone."""
    method, tokens = case.method(), case.tokens()
    logits, batch = case.run(method, tokens)
    for b in range(case.batch):
        alone, single = case.run(method, tokens[b:b + 1])
        assert (alone - logits[b:b + 1]).abs().max() < 1e-5, f"row {b}"
        for layer, kind in ((layer, kind) for layer in range(L) for kind in "kv"):
            in_batch, own = rows_of(batch.layers[layer], kind), rows_of(single.layers[layer], kind)
            assert torch.equal(in_batch.read()[b], own.read()[0]), f"row {b}"
            assert codes_of(in_batch.codes, b) == codes_of(own.codes, 0), f"row {b}"
            assert pinned_of(in_batch, b) == pinned_of(own, 0), f"row {b}"


def codes_of(codes, b):
    """What is stored of one sequence: its part of each tensor, and its outliers as (token, channel,
    number)."""
    if codes is None:
        return None
    tensors, outliers = dict(vars(codes)), []
    if isinstance(codes, SparseCodes):  # the two lists hold the sequences of a token one after the other
        row_end, values, columns = (tensors.pop(name) for name in ("row_end", "values", "columns"))
        B, _, T, _ = row_end.shape
        ends = [0, *row_end[:, 0, :, 0].T.flatten().tolist()]
        for t in range(T):
            of_row = slice(ends[t * B + b], ends[t * B + b + 1])
            outliers += [(t, c, x) for c, x in zip(columns[of_row].tolist(), values[of_row].tolist())]
    return {name: x if x is None else x[b].tolist() for name, x in tensors.items()}, outliers


def pinned_of(rows, b):
    """By head, the positions that are pinned in one sequence. Slots that are empty in all sequences
    are not held."""
    if rows.pinned_positions is None:
        return None
    return [set(positions) - {-1} for positions in rows.pinned_positions[b].tolist()]


def check_same_twice_and_after_reset(case):
    """A method holds nothing of a text, and a cache that was reset holds nothing at all."""
    method, tokens, others = case.method(), case.tokens(), case.tokens(seed=3)
    logits, cache = case.run(method, tokens)
    size = cache.nbytes
    # another text in between
    case.run(method, others)
    assert torch.equal(case.run(method, tokens)[0], logits)
    # the same text, then another, in a cache that was reset
    cache.reset()
    assert len(cache) == len(case.prefix)
    numbers = len(cache) * L * 2 * case.model.config.num_key_value_heads * d  # K and V of the prefix
    assert cache.nbytes == 2 * numbers
    assert torch.equal(case.run(method, tokens, cache)[0], logits)
    assert cache.nbytes == size
    cache.reset()
    others = others.roll(1, 0)
    assert torch.equal(case.run(method, others, cache)[0], case.run(method, others)[0])


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
    assert torch.equal(cache.without_prefix(tokens), tokens[:, n:])
    for b, t in np.ndindex(case.batch, n):
        other = tokens.clone()
        other[b, t] = 40 - other[b, t]
        assert refuses(cache.without_prefix, other), f"row {b}, token {t} of another text"
    assert refuses(cache.without_prefix, tokens[:, :n])
    assert refuses(cache.without_prefix, tokens[:, :n - 1])


# ---- calibration

def check_static_ranges(case):
    """The grids are those of the calibration tokens that the method does not keep, and of all
    windows."""
    method = case.method()
    for layer, kind in ((layer, kind) for layer in range(L) for kind in "kv"):
        codec = codec_of(method, layer, kind)
        if isinstance(codec, Affine):
            lo, hi = calibrated_range(case, method, layer, kind)
            want = Affine(codec.bits, d, codec.axis, G, case.formula, static=True)
            want.set_range(torch.from_numpy(lo), torch.from_numpy(hi))
            assert torch.equal(codec.scale, want.scale), (layer, kind)
            assert torch.equal(codec.zero, want.zero), (layer, kind)
        elif codec.axis == "channel":  # percentiles
            tail = case.setting("outliers") / 200
            rows = calibration_rows(case, method)[layer][kind].astype(float)  # (Hkv, tokens, d)
            lo, hi = np.quantile(rows, [tail, 1 - tail], axis=1).reshape(2, -1)  # (C) both
            half, mid = codec.half.double().numpy(), codec.mid.double().numpy()
            assert (np.abs(half - (hi - lo) / 2) <= 2e-3 * half).all(), (layer, kind)
            assert (np.abs(mid - (lo + hi) / 2) <= 2e-3 * half).all(), (layer, kind)
        else:
            assert codec.mid is None and codec.half is None


def check_calibration_order_is_no_matter(case):
    """The windows in another order give the same tables.

    Codebooks start from vectors that are drawn by their place, so they differ; but they read each
    window equally well.
    """
    windows = calibration_windows()
    tables, errors = [], []
    for in_order in (windows, windows.flip(0)):
        method = copy.deepcopy(case.method())
        calibrate(case.model, method, in_order)
        found = method.calibrated()
        tables.append({name: found[name] for name in found if not name.endswith("centroids")})
        errors.append(codebook_errors(case, method, len(windows)))
    assert tables[0] or errors[0].all()
    assert tables[0].keys() == tables[1].keys()
    assert all(torch.equal(table, tables[1][name]) for name, table in tables[0].items())
    assert (abs(errors[0] - errors[1]) <= 0.1 * errors[0]).all(), errors


def codebook_errors(case, method, W):
    """The sum of squared errors of each of W calibration windows (W), over all codebooks; 0 without
    codebooks."""
    error, rows = np.zeros(W), calibration_rows(case, case.method())
    for layer, kind in ((layer, kind) for layer in range(L) for kind in "kv"):
        codec = codec_of(method, layer, kind)
        if isinstance(codec, Codebook):
            x = torch.from_numpy(rows[layer][kind])[None]  # (1, Hkv, tokens, d)
            square = (codec.decode(codec.encode(x)) - x).pow(2)
            error += square.unflatten(2, (W, -1)).sum((0, 1, 3, 4)).numpy()
    return error


def check_what_is_calibrated_can_be_restored(case):
    """`calibrated` gives all that a method of the same settings needs, to quantize as if it had
    been calibrated."""
    method, other, tokens = case.method(), case.uncalibrated(), case.tokens()
    tables = method.calibrated()
    other.restore({name: table.clone() for name, table in tables.items()})
    assert torch.equal(case.run(other, tokens)[0], case.run(method, tokens)[0])
    size = sum(table.nbytes for table in tables.values())
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
    assert torch.equal(case.model.generate(prompt, new, case.new_cache(method)), text)


def check_never_nan(case):
    """All tokens equal: constant groups, ties for every sink; also a text shorter than what is
    kept."""
    method = case.method()
    for T in (max(2, len(case.prefix) + 1), case.T):
        for token in (0, MARK):
            logits, cache = case.run(method, case.text(torch.full((case.batch, T), token)))
            assert torch.isfinite(logits).all()
            assert all(torch.isfinite(x).all() for layer in cache.layers for x in read(layer))


def check_sixteen_bit_models_cache_what_they_compute(case):
    """In a bf16 or fp16 model the fp16 cache is no change at all: it keeps the model's own
    numbers."""
    for dtype in (torch.bfloat16, torch.float16):
        model, tokens = copy.deepcopy(case.model).to(dtype), case.tokens()
        with torch.no_grad():
            cached = model(tokens, case.new_cache(case.method(), model=model))
            assert torch.equal(cached, model(tokens)), dtype
