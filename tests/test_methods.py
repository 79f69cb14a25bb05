"""Every method through one matrix: protocols, grouped queries, batches, lengths around a block, schemes.

Each `check_` is an invariant. It takes a `Case`, which names a method, a cache and a cell of the matrix, and
builds what it needs from those; so `mutants.py` can put something wrong in the place of either, and a test at
the end shows that every mutant fails. The oracle of what a cache must return is `expected_read`, in numpy.

Models are random and tiny. One token, MARK, has a huge embedding in one channel, which plants the outlier
that kvsink looks for at positions of our choice. Checks that compare forwards of different shapes (a batch
and its rows, a chunk and its tokens) use a float64 model: matrix products of different shapes differ in their
last bits, and in float32 those may move a value to the next number of 16 bits, or to the next code.

    pytest tests/test_methods.py --method path/to/file.py:Class    puts another method through the same matrix
"""
import copy
from dataclasses import dataclass, replace
from functools import lru_cache

import mutants
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eval_ppl import load_class, settings_of
from tinykv import UserError, sinks
from tinykv.cache import PROTOCOLS, KVCache, LayerCache, Part
from tinykv.calibrate import kv_ranges
from tinykv.codecs import FORMULAS, Affine, Codes
from tinykv.methods import METHODS
from tinykv.methods.base import SchemeMethod
from tinykv.methods.fp16 import FP16
from tinykv.methods.kvsink import KVSink
from tinykv.methods.pfn import PFN
from tinykv.model import Llama, LlamaConfig
from tinykv.schemes import SCHEMES

V, D, L, H, d = 41, 32, 3, 4, 16
MARK, CHANNEL = V - 1, 5  # the token with the planted outlier, and the outlier's channel
G = 8  # tokens of a block
LENGTHS = ["1", "G-1", "G", "G+1", "2G+5"]
SETTINGS = {"k_bits": 2, "v_bits": 3, "group_size": G, "preserve": 3,
            "emergence_layer": 0, "outlier_channel": CHANNEL}


# ---- what a cell is made of

@lru_cache
def model_of(sharing, dtype=torch.float32):
    """`sharing` query heads to a KV head."""
    torch.manual_seed(sharing)
    model = Llama(LlamaConfig(V, D, 48, L, H, H // sharing, d, 512))
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.normal_(std=1.5 * p.shape[1] ** -0.5)
        model.model["embed_tokens"].weight.normal_()
        model.model["embed_tokens"].weight[MARK, CHANNEL] = 40.0
    return model.to(dtype)


def tokens_of(batch, T, seed=0):
    """Random tokens (B, T), with marks at positions that differ from row to row: some early, some late."""
    dice = torch.Generator().manual_seed(100 * seed + T)
    tokens = torch.randint(0, MARK, (batch, T), generator=dice)
    for row in tokens:
        row[torch.randint(0, T, (1 + T // 8,), generator=dice)] = MARK
    return tokens


def calibration_windows():
    return tokens_of(4, 24, seed=7)


@lru_cache
def build(cls, sharing, scheme, formula, recent, dtype, settings):
    """A method, calibrated, in blocks of G. One object serves all caches, as the interface promises."""
    model = model_of(sharing, dtype)
    wanted = {**SETTINGS, "scheme": scheme, "formula": formula, **dict(settings)}
    if not issubclass(cls, SchemeMethod):  # a method that we know nothing about keeps its own bits
        wanted = {k: v for k, v in wanted.items() if k in dict(settings) or k not in ("k_bits", "v_bits")}
    method = cls(model.config, **{k: v for k, v in wanted.items() if k in settings_of(cls)})
    if issubclass(cls, (SchemeMethod, FP16)):
        method.block, method.recent = G, recent
    if method.needs_calibration:
        with torch.no_grad():
            method.calibrate(model, calibration_windows())
    return method


@dataclass(frozen=True)
class Case:
    """One cell of the matrix."""
    cls: type
    scheme: str | None = None
    formula: str = "offset"
    protocol: str = "stream"
    sharing: int = 2
    batch: int = 3
    length: str = "2G+5"
    recent: int = 0
    cache: type = KVCache
    dtype: torch.dtype = torch.float32
    known: type | None = None  # whose oracle applies: one of METHODS, or None for a method given by --method

    def __str__(self):
        recent = f"recent{self.recent}" if self.recent else None
        formula = self.formula if self.formula != "offset" else None
        shape = (f"gqa{self.sharing}", f"b{self.batch}", recent, self.length)
        cell = (self.scheme, formula, self.protocol, *shape)
        return "-".join([self.cls.__name__.lower(), *filter(None, cell)])

    @property
    def model(self):
        return model_of(self.sharing, self.dtype)

    def method(self, **settings):
        settings = tuple(settings.items())
        return build(self.cls, self.sharing, self.scheme, self.formula, self.recent, self.dtype, settings)

    @property
    def T(self):
        block = self.method().block
        return {"1": 1, "G-1": block - 1, "G": block, "G+1": block + 1, "2G+5": 2 * block + 5}[self.length]

    def tokens(self):
        return tokens_of(self.batch, self.T)

    def new_cache(self, method, protocol=None):
        return self.cache(self.model, method, protocol or self.protocol)

    def exact_twin(self):
        """The fp16 method beside this cell's: the same blocks, the same model."""
        return build(FP16, self.sharing, None, None, self.recent, self.dtype, ())

    def run(self, method, tokens, cache=None, sizes=None):
        """-> logits (B, T, V) and the cache. sizes: tokens of each chunk, if not as `chunk_sizes` says."""
        cache = self.new_cache(method) if cache is None else cache
        sizes = sizes or chunk_sizes(method, cache.protocol, tokens.shape[1])
        with torch.no_grad():
            return torch.cat([self.model(chunk, cache) for chunk in tokens.split(sizes, dim=1)], dim=1), cache


def chunk_sizes(method, protocol, T):
    """One forward under `paper`; in a stream, chunks that end where a block is coded."""
    if protocol == "paper":
        return [T]
    sizes = [min(T, method.recent + method.block)]
    while sum(sizes) < T:
        sizes.append(min(method.block, T - sum(sizes)))
    return sizes


class Watch:
    """Before a cache class: notes what goes into each layer, what comes back, and every block's output."""

    def reset(self):
        super().reset()
        self.given, self.returned, self.outputs = ([[] for _ in range(L)] for _ in range(3))

    def update(self, layer, q, k, v, positions):
        self.given[layer].append((k, v))
        K, V = super().update(layer, q, k, v, positions)
        self.returned[layer].append((K, V))
        return K, V

    def observe(self, layer, hidden):
        self.outputs[layer].append(hidden)
        super().observe(layer, hidden)

    def sizes(self):
        """Tokens of each chunk."""
        return [k.shape[2] for k, _ in self.given[0]]

    def exact(self, layer):
        """The rows of a layer in 16 bits, before RoPE, and the output of its block."""
        k, v = (torch.cat(rows, dim=2) for rows in zip(*self.given[layer]))
        k, v = (x if x.dtype.itemsize == 2 else x.half() for x in (k, v))
        return k, v, torch.cat(self.outputs[layer], dim=1)


def watched(case):
    return replace(case, cache=type("Watched", (Watch, case.cache), {}))


# ---- what a cache has to return, by other means

def top_k(scores, k):
    """Positions of the k largest of a list, ties to the earlier one."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:k]


def expected_pins(case, method, cache, layer, seen):
    """True (B, Hkv, T) where a layer keeps the token after `seen` tokens; for an unknown method, its word."""
    k, _, _ = cache.exact(layer)
    pins = torch.zeros(k.shape[:3], dtype=torch.bool)
    if case.known is PFN:
        pins[:, :, :min(method.preserve, seen)] = True
    elif case.known is KVSink and layer > SETTINGS["emergence_layer"]:
        h = torch.cat(cache.outputs[SETTINGS["emergence_layer"]], dim=1)
        for b, scores in enumerate(h[:, :seen, CHANNEL].abs().tolist()):
            pins[b, :, top_k(scores, method.preserve)] = True
    elif case.known is None and cache.layers[layer].k.index is not None:
        index = cache.layers[layer].k.index.expand(-1, k.shape[1], -1).tolist()  # (B, Hkv, n)
        for b, h in np.ndindex(k.shape[:2]):
            pins[b, h, [i for i in index[b][h] if i >= 0]] = True
    return pins


def coding_events(method, protocol, sizes):
    """[(first, end, seen)]: tokens first .. end - 1 are coded after a chunk, when `seen` have been seen."""
    events, coded, seen = [], 0, 0
    for size in sizes:
        seen += size
        end = seen if protocol == "paper" else (seen - method.recent) // method.block * method.block
        if end > coded:
            events.append((coded, end, seen))
            coded = end
    return events


def plain_group(g, lo, hi, levels, formula):
    """What g reads as on the grid from lo to hi."""
    step, floor = (hi - lo) / levels, np.float32(1e-5)
    if formula == "offset":
        s = step.clip(floor, 6e4).astype(np.float16).astype(np.float32)
        z = lo.astype(np.float16).astype(np.float32)
        return s * np.clip(np.rint((g - z) / s), 0, levels) + z
    floor = np.maximum(np.maximum(np.abs(lo), np.abs(hi)) / np.float32(2 ** 13), floor)
    s = np.clip(step, floor, 1e4).astype(np.float16).astype(np.float32)
    z = np.rint(-lo / s)
    return s * (np.clip(np.rint(g / s) + z, 0, levels) - z)


def plain_affine(x, skip, bits, axis, formula, fixed=None):
    """What x (B, Hkv, T, d) reads as in groups of G, in numpy. fixed: (lo, hi), each (Hkv, d)."""
    out, (T, width) = np.empty_like(x), x.shape[2:]
    spans = [(slice(None), slice(c, c + G)) for c in range(0, width, G)] if axis == "token" else \
            [(slice(t, min(t + G, T)), slice(None)) for t in range(0, T, G)]
    over = -1 if axis == "token" else 2
    for tokens, channels in spans:
        g = x[:, :, tokens, channels]
        lo = hi = g
        if fixed is not None:
            lo, hi = (r[None, :, None, channels] for r in fixed)
        elif axis == "channel":  # a pinned row does not count
            gone = skip[:, :, tokens, None]
            lo, hi = np.where(gone, np.inf, g), np.where(gone, -np.inf, g)
        lo, hi = lo.min(over, keepdims=True), hi.max(over, keepdims=True)
        lo, hi = np.where(np.isinf(lo), 0, lo), np.where(np.isinf(hi), 0, hi)
        out[:, :, tokens, channels] = plain_group(g, lo, hi, np.float32(2 ** bits - 1), formula)
    return out


def stored(method, rope, k):
    """Keys as the method stores them. k (B, Hkv, T, d) before RoPE."""
    return rope.rotate(k, torch.arange(k.shape[2])) if method.rope == "post" else k


@lru_cache
def plain_ranges(case, method):
    """Per layer and kind (lo, hi), each (Hkv, d), of the calibration windows' rows that are not kept."""
    ranges = []
    case = watched(replace(case, cache=KVCache, protocol="paper"))
    caches = [case.run(case.exact_twin(), w[None])[1] for w in calibration_windows()]
    for layer in range(L):
        kept = {"k": [], "v": []}
        for cache in caches:
            k, v, _ = cache.exact(layer)
            free = ~expected_pins(case, method, cache, layer, k.shape[2])[0, 0]  # (T)
            kept["k"].append(stored(method, case.model.rope, k)[0, :, free])
            kept["v"].append(v[0, :, free])
        rows = {kind: torch.cat(x, dim=1).float().numpy() for kind, x in kept.items()}  # (Hkv, tokens, d)
        ranges.append({kind: (x.min(1), x.max(1)) for kind, x in rows.items()})
    return ranges


def plain_decoded(case, method, layer, kind, rows, skip):
    """What one coding event makes of rows: in numpy where we know the codec, else by the method's own."""
    if case.known is None or case.known is FP16:
        return method.decode(layer, kind, method.encode(layer, kind, rows, skip)).to(rows.dtype)
    bits = method.k_bits if kind == "k" else method.v_bits
    if bits == 16:
        return rows
    axis = SCHEMES[method.scheme.name][0 if kind == "k" else 1]
    fixed = plain_ranges(case, method)[layer][kind] if method.scheme.static else None
    read = plain_affine(rows.float().numpy(), skip.numpy(), bits, axis, case.formula, fixed)
    return torch.from_numpy(read).to(rows.dtype)


def expected_read(case, method, cache, layer):
    """K, rotated, and V (B, Hkv, T, d) in 16 bits that a watched cache must hold for a layer."""
    k, v, _ = cache.exact(layer)
    out = []
    for kind, rows in (("k", stored(method, case.model.rope, k)), ("v", v)):
        read, pins = rows.clone(), torch.zeros(rows.shape[:3], dtype=torch.bool)
        for first, end, seen in coding_events(method, case.protocol, cache.sizes()):
            pins = expected_pins(case, method, cache, layer, seen)  # (B, Hkv, T); in the end the last event's
            part = slice(first, end)
            read[:, :, part] = plain_decoded(case, method, layer, kind, rows[:, :, part], pins[:, :, part])
        out.append(torch.where(pins[..., None], rows, read))
    if method.rope == "pre":
        out[0] = case.model.rope.rotate(out[0], torch.arange(out[0].shape[2]))
    return out


# ---- invariants

def check_cache_holds_the_expected_rows(case, sizes=None):
    """In every layer pinned and recent rows are exact, and coded rows what the formula makes of them."""
    method = case.method()
    _, cache = watched(case).run(method, case.tokens(), sizes=sizes)
    assert len(cache) == case.T
    coded = [0, *(end for _, end, _ in coding_events(method, case.protocol, cache.sizes()))][-1]
    assert all(layer.first == coded for layer in cache.layers)
    for layer in range(L):
        expected = expected_read(case, method, cache, layer)
        for kind, got, want in zip("KV", cache.layers[layer].read(), expected):
            assert got.shape == want.shape and torch.isfinite(got).all()
            differ = (got != want).any(-1).nonzero().tolist()
            assert not differ, f"layer {layer}, {kind}: (sequence, head, token) {differ[:5]} differ"


def check_attention_sees_the_cache(case, sizes=None):
    """`update` returns what is held: under `paper` the codes, in a stream codes and the new tokens exact."""
    method, tokens = case.method(), case.tokens()
    case = watched(case)
    cache, start, held = case.new_cache(method), 0, [None] * L
    for chunk in tokens.split(sizes or chunk_sizes(method, case.protocol, case.T), dim=1):
        case.run(method, chunk, cache, [chunk.shape[1]])
        for layer in range(L):
            k, v, _ = cache.exact(layer)
            k = case.model.rope.rotate(k, torch.arange(k.shape[2]))
            after = cache.layers[layer].read()
            for got, exact, old, new in zip(cache.returned[layer][-1], (k, v), held[layer] or (k, v), after):
                exact, old, new = (x.to(got.dtype) for x in (exact, old, new))
                if case.protocol == "paper":
                    assert torch.equal(got, new)
                else:
                    assert torch.equal(got[:, :, start:], exact[:, :, start:]), "new tokens are not exact"
                    assert torch.equal(got[:, :, :start], old[:, :, :start]), "older tokens changed"
            held[layer] = after
        start += chunk.shape[1]


def check_bytes(case):
    """`nbytes` is the storage held, and the formula: codes, metadata, pinned rows and indices, recent."""
    method = case.method()
    _, cache = case.run(method, case.tokens())
    parts = [part for layer in cache.layers for part in (layer.k, layer.v)]
    held = [t for p in parts for t in (p.index, p.pinned, p.recent)]
    held += [t for p in parts if p.coded for t in vars(p.coded).values()]
    storage = sum(t.untyped_storage().nbytes() for t in held if t is not None)
    assert cache.nbytes == storage == sum(cache.part_bytes().values())
    if case.known is None:
        return
    B, Hkv, T = case.batch, case.model.config.num_key_value_heads, case.T
    events = coding_events(method, case.protocol, chunk_sizes(method, case.protocol, T))
    coded, seen = (events[-1][1], events[-1][2]) if events else (0, 0)
    bits, kept, keeping = 0, 0, 0
    for kind in "kv":
        b = getattr(method, f"{kind}_bits")
        bits += L * B * Hkv * coded * d * b
        if b < 16 and not method.scheme.static:  # a 16-bit scale and a 16-bit zero point a group
            channel = SCHEMES[method.scheme.name][0 if kind == "k" else 1] == "channel"
            bits += L * B * Hkv * 32 * (-(-coded // G) * d if channel else coded * d // G)
    if case.known in (PFN, KVSink):
        kept = min(method.preserve, seen)
        keeping = L if case.known is PFN else L - SETTINGS["emergence_layer"] - 1
    pinned = 2 * keeping * B * kept * (Hkv * d * 2 + 4)
    recent = 2 * L * B * Hkv * (T - coded) * d * 2
    assert cache.part_bytes() == {"coded": bits / 8, "pinned": pinned, "recent": recent}


def check_low_bits_matter(case):
    """A codec that changes nothing would pass many a test: codes have to show in the logits."""
    method, tokens = case.method(), case.tokens()
    logits, _ = case.run(method, tokens)
    sizes = chunk_sizes(method, case.protocol, case.T)
    exact, _ = replace(case, cache=KVCache).run(case.exact_twin(), tokens, sizes=sizes)
    change = (logits - exact).abs().amax(-1)  # (B, T)
    first = method.recent + method.block if case.protocol == "stream" else 0
    assert torch.equal(logits[:, :first], exact[:, :first]), "changed before anything was coded"
    if case.protocol == "paper":
        first = getattr(method, "preserve", 0)  # a token that is kept may see nothing but kept ones
    unchanged = (change[:, first:] <= 1e-4).nonzero().tolist()
    assert not unchanged, f"(sequence, token) unchanged by the codes: {unchanged}"


def check_sixteen_bits_are_fp16(case):
    """Bit for bit, whichever tokens are kept and wherever keys are rotated."""
    takes, tokens = settings_of(case.cls), case.tokens()
    exact, _ = replace(case, cache=KVCache).run(case.exact_twin(), tokens)
    for rope in ("pre", "post") if "rope" in takes else (None,):
        logits, _ = case.run(case.method(k_bits=16, v_bits=16, **({"rope": rope} if rope else {})), tokens)
        assert torch.equal(logits, exact), f"rope {rope}: off by {(logits - exact).abs().max()}"


def check_sixteen_bits_of_one_kind(case):
    """16 bits for keys leave the keys as they were while values are coded, and the other way round."""
    for kind, settings in ((0, {"k_bits": 16}), (1, {"v_bits": 16})):
        method = case.method(**settings)
        _, cache = watched(case).run(method, case.tokens())
        for layer in range(L):
            k, v, _ = cache.exact(layer)
            exact = case.model.rope.rotate(k, torch.arange(case.T)), v
            same = [torch.equal(a, b) for a, b in zip(cache.layers[layer].read(), exact)]
            assert same[kind] and not same[1 - kind]


def check_keeping_everything_is_exact(case):
    """Where all tokens are kept the rows are fp16's, bit for bit; for kvsink, after the emergence layer."""
    method = case.method(preserve=22)  # the calibration windows are longer than that
    tokens = case.tokens()
    logits, cache = watched(case).run(method, tokens)
    untouched = not coding_events(method, case.protocol, cache.sizes())
    for layer in range(L):
        k, v, _ = cache.exact(layer)
        exact = case.model.rope.rotate(k, torch.arange(case.T)), v
        same = all(torch.equal(a, b) for a, b in zip(cache.layers[layer].read(), exact))
        assert same == (untouched or case.known is not KVSink or layer > SETTINGS["emergence_layer"])
    if case.known is not KVSink:
        assert torch.equal(logits, replace(case, cache=KVCache).run(case.exact_twin(), tokens)[0])


def scrambled(method, pins):
    """The same method, but it finds garbage in pinned rows when it codes. pins: per layer (B, Hkv, T)."""
    other, coded = copy.copy(method), {}

    def encode(layer, kind, rows, skip):
        first = coded.get((layer, kind), 0)
        coded[layer, kind] = end = first + rows.shape[2]
        garbage = (3000 * torch.linspace(-1, 2, d)).to(rows.dtype)  # (d)
        rows = torch.where(pins[layer][:, :, first:end, None], garbage, rows)
        return method.encode(layer, kind, rows, skip)

    other.encode = encode
    return other


def check_placeholders_do_not_matter(case):
    """What the coded slot of a pinned token holds changes nothing: not the logits, nor its group's range."""
    method, tokens = case.method(), case.tokens()
    logits, cache = watched(case).run(method, tokens)
    events = coding_events(method, case.protocol, cache.sizes())
    # Only tokens that stay pinned to the end: one that kvsink lets go later is read as its code.
    pins = [expected_pins(case, method, cache, layer, events[-1][2]) for layer in range(L)]
    assert any(layer.any() for layer in pins)
    assert torch.equal(case.run(scrambled(method, pins), tokens)[0], logits)


def check_chunks_equal_single_tokens(case):
    """A stream in blocks is decoding token by token; every length in between is a prefix of the same run."""
    method, tokens = case.method(), case.tokens()
    single, one = case.run(method, tokens, sizes=[1] * case.T)
    for T in {1, method.block - 1, method.block, method.block + 1, case.T}:
        logits, cache = case.run(method, tokens[:, :T])
        worst = (logits - single[:, :T]).abs().max()
        assert worst < 1e-5, f"{T} tokens: off by {worst}"
    for a, b in zip(one.layers, cache.layers):
        assert a.first == b.first
        for x, y in zip(a.read(), b.read()):
            assert torch.equal(x, y)


def check_uneven_chunks_of_exact_rows(case):
    method, tokens = case.exact_twin(), case.tokens()
    whole, _ = case.run(method, tokens, sizes=[case.T])
    for sizes in ([1, case.T - 1], [3, 5, case.T - 8], [case.T - 1, 1], [2] * (case.T // 2) + [1]):
        assert (case.run(method, tokens, sizes=sizes)[0] - whole).abs().max() < 1e-4, sizes


def check_no_future_leak(case):
    """A later token never changes an earlier logit, bit for bit."""
    method, tokens = case.method(), case.tokens()
    logits, _ = case.run(method, tokens)
    for p in {1, method.block - 1, method.block + 2, case.T - 1}:
        for new in (MARK, 0):
            other = tokens.clone()
            other[:, p] = new
            changed, _ = case.run(method, other)
            assert torch.equal(changed[:, :p], logits[:, :p]), f"token {p} changed what came before it"
            assert (tokens[:, p] == new).all() or not torch.equal(changed[:, p:], logits[:, p:])


def check_batch_rows_are_independent(case):
    """A row of a batch gives the logits, the codes and the pinned tokens that it gives alone."""
    method, tokens = case.method(), case.tokens()
    logits, cache = case.run(method, tokens)
    for b in range(case.batch):
        alone, single = case.run(method, tokens[b:b + 1])
        assert (alone - logits[b:b + 1]).abs().max() < 1e-5, f"row {b}"
        for together, own in zip(cache.layers, single.layers):
            for x, y in ((together.k, own.k), (together.v, own.v)):
                codes = zip(vars(x.coded).values(), vars(y.coded).values()) if x.coded else ()
                for a, c in [(x.index, y.index), *codes]:
                    same = c is None if a is None else torch.equal(a[b:b + 1], c)
                    assert same, f"row {b}"


def check_same_twice_and_after_reset(case):
    """A method holds nothing of a text, and a cache that was reset holds nothing at all."""
    method, tokens = case.method(), case.tokens()
    logits, cache = case.run(method, tokens)
    size = cache.nbytes
    case.run(method, tokens_of(case.batch, case.T, seed=3))  # another text in between
    assert torch.equal(case.run(method, tokens)[0], logits)
    cache.reset()
    assert len(cache) == 0 and cache.nbytes == 0
    assert torch.equal(case.run(method, tokens, cache)[0], logits)
    assert cache.nbytes == size
    cache.reset()
    other = tokens_of(case.batch, case.T, seed=3).roll(1, 0)
    assert torch.equal(case.run(method, other, cache)[0], case.run(method, other)[0])


def check_paper_refuses_a_second_forward(case):
    method, tokens = case.method(), case.tokens()
    _, cache = case.run(method, tokens)
    with torch.no_grad():
        try:
            case.model(tokens[:, :1], cache)
        except ValueError as error:
            assert "one forward" in str(error)
            return
    raise AssertionError("read on after the window")


def check_uneven_chunks(case):
    check_cache_holds_the_expected_rows(case, [3, 1, case.T - 10, 6])


def check_the_trap(case):
    """A one-shot stream reports fp16 at any bits, as attention comes before coding. `paper` does not."""
    method, tokens = case.method(), case.tokens()
    exact, _ = case.run(case.exact_twin(), tokens, KVCache(case.model, case.exact_twin()), sizes=[case.T])
    one_shot, _ = case.run(method, tokens, case.new_cache(method, "stream"), sizes=[case.T])
    assert torch.equal(one_shot, exact)
    paper, _ = case.run(method, tokens, case.new_cache(method, "paper"), sizes=[case.T])
    assert not torch.equal(paper, exact)


def check_static_ranges(case):
    """The grids are those of the calibration tokens that the method does not keep, and of all windows."""
    method = case.method()
    for layer, codecs in enumerate(method.scheme.codecs):
        for kind in "kv":
            lo, hi = plain_ranges(case, method)[layer][kind]
            c = Affine(codecs[kind].bits, d, codecs[kind].axis, G, case.formula)
            c.fix(torch.from_numpy(lo), torch.from_numpy(hi))
            assert torch.equal(codecs[kind].scale, c.scale), (layer, kind)
            assert torch.equal(codecs[kind].zero, c.zero), (layer, kind)


def check_calibration_order_is_no_matter(case):
    grids = []
    for windows in (calibration_windows(), calibration_windows().flip(0)):
        method = copy.deepcopy(case.method())
        with torch.no_grad():
            method.calibrate(case.model, windows)
        grids.append([(c.scale, c.zero) for layer in method.scheme.codecs for c in layer.values()])
    assert all(torch.equal(a, b) for x, y in zip(*grids) for a, b in zip(x, y))


def check_running_top_k(cls, chunks, k=3):
    """After each chunk the state is what plain lists say. chunks: rows of whole numbers, with ties."""
    method = cls(model_of(1).config, preserve=k, emergence_layer=1, outlier_channel=2)
    state, seen = None, [[] for _ in chunks[0]]
    for chunk in chunks:
        start = len(seen[0])
        hidden = torch.full((len(chunk), len(chunk[0]), D), 1e4)  # other channels do not count
        hidden[..., 2] = torch.tensor(chunk, dtype=torch.float)
        before = state
        state = method.observe(state, 0, hidden, start)
        assert state is before, "looked at another layer"
        state = method.observe(state, 1, hidden, start)
        for row, new in zip(seen, chunk):
            row += [abs(x) for x in new]
        assert state[1].tolist() == [top_k(row, k) for row in seen]


def check_generation(case):
    """A packed cache serves generation: it sees every token but the last one made, and codes the old ones."""
    method, prompt = case.method(), tokens_of(case.batch, 5)
    new = method.recent + method.block + 4
    cache = case.new_cache(method)
    text = case.model.generate(prompt, new, cache)
    assert text.shape == (case.batch, 5 + new) and torch.equal(text[:, :5], prompt)
    assert len(cache) == 5 + new - 1
    events = coding_events(method, "stream", [1] * len(cache))
    assert all(layer.first == events[-1][1] > 0 for layer in cache.layers)
    assert torch.equal(case.model.generate(prompt, new, case.new_cache(method)), text)


def check_never_nan(case):
    """All tokens equal: constant groups, ties for every sink; also a text shorter than what is kept."""
    method = case.method()
    for T in (2, case.T):
        for token in (0, MARK):
            logits, cache = case.run(method, torch.full((case.batch, T), token))
            assert torch.isfinite(logits).all()
            assert all(torch.isfinite(x).all() for layer in cache.layers for x in layer.read())


def check_sixteen_bit_models_cache_what_they_compute(case):
    """In a bf16 or fp16 model the fp16 cache is no change at all: it keeps the model's own numbers."""
    for dtype in (torch.bfloat16, torch.float16):
        model = copy.deepcopy(case.model).to(dtype)
        tokens = case.tokens()
        with torch.no_grad():
            cached = model(tokens, case.cache(model, case.method(), case.protocol))
            assert torch.equal(cached, model(tokens)), dtype


# ---- the matrix

def cells(where=lambda case: True, **axes):
    """Run a test for every method, extra ones included, in every cell of `axes` that passes `where`."""
    def mark(test):
        test.where, test.axes = where, axes
        return test
    return mark


def pytest_generate_tests(metafunc):
    if "case" not in metafunc.fixturenames:
        return
    cases = []
    for cls in [*METHODS.values(), *map(load_class, metafunc.config.getoption("--method"))]:
        known = cls if cls in METHODS.values() else None
        schemes = SCHEMES if "scheme" in settings_of(cls) else [None]
        cases += [Case(cls, scheme, known=known) for scheme in schemes]
    for axis, values in metafunc.function.axes.items():
        cases = [replace(case, **{axis: value}) for case in cases for value in values
                 if axis != "formula" or value == "offset" or has("formula")(case)]
    metafunc.parametrize("case", list(filter(metafunc.function.where, cases)), ids=str)


def has(*settings):
    return lambda case: all(s in settings_of(case.cls) for s in settings)


def quantizes(case):
    return case.cls is not FP16


def keeps(case):
    return "preserve" in settings_of(case.cls)


def static(case):
    return case.known is not None and case.scheme is not None and SCHEMES[case.scheme][2]


SHAPES = {"sharing": (1, 2, 4), "batch": (1, 3)}


@cells(protocol=PROTOCOLS, length=LENGTHS, **SHAPES)
def test_cache_holds_the_expected_rows(case):
    check_cache_holds_the_expected_rows(case)


@cells(has("formula"), formula=["integer-zero"], protocol=PROTOCOLS, length=["G+1", "2G+5"], batch=(1, 3))
def test_cache_holds_the_expected_rows_with_an_integer_zero(case):
    check_cache_holds_the_expected_rows(case)
    check_bytes(case)


@cells(length=["2G+5"], recent=[1, 6], batch=(1, 3))
def test_a_recent_window_stays_exact(case):
    check_cache_holds_the_expected_rows(case)
    check_attention_sees_the_cache(case)
    check_bytes(case)


@cells(protocol=PROTOCOLS, length=["1", "G+1", "2G+5"])
def test_attention_sees_the_cache(case):
    check_attention_sees_the_cache(case)


@cells(recent=[0, 5], batch=(1, 3))
def test_uneven_chunks(case):
    """Chunks that end anywhere, or hold several blocks: only whole blocks are coded, after they were read."""
    for sizes in ([3, 1, case.T - 10, 6], [case.T - 2, 1, 1]):
        check_cache_holds_the_expected_rows(case, sizes)
        check_attention_sees_the_cache(case, sizes)


@cells(protocol=PROTOCOLS, length=LENGTHS, sharing=(1, 4))
def test_bytes(case):
    check_bytes(case)


@cells(quantizes, protocol=PROTOCOLS)
def test_low_bits_matter(case):
    check_low_bits_matter(case)


@cells(has("k_bits", "v_bits"), protocol=PROTOCOLS, length=LENGTHS, sharing=(1, 2, 4))
def test_sixteen_bits_are_fp16(case):
    check_sixteen_bits_are_fp16(case)


@cells(has("k_bits", "v_bits"))
def test_sixteen_bits_of_one_kind(case):
    check_sixteen_bits_of_one_kind(replace(case, protocol="paper"))


@cells(keeps, protocol=PROTOCOLS, length=["G-1", "2G+5"])
def test_keeping_everything_is_exact(case):
    check_keeping_everything_is_exact(case)


@cells(keeps, protocol=PROTOCOLS, formula=FORMULAS, sharing=(1, 4), batch=(1, 3))
def test_placeholders_do_not_matter(case):
    check_placeholders_do_not_matter(case)


@cells(dtype=[torch.float64], recent=[0, 5], sharing=(1, 4), batch=(1, 3))
def test_chunks_equal_single_tokens(case):
    check_chunks_equal_single_tokens(case)


@cells(lambda case: case.cls is FP16, recent=[0, 5], dtype=[torch.float64], **SHAPES)
def test_uneven_chunks_of_exact_rows(case):
    check_uneven_chunks_of_exact_rows(case)


@cells(sharing=(1, 4), recent=[0, 5])
def test_no_future_leak_in_a_stream(case):
    check_no_future_leak(case)


def causal_in_paper(case):
    """Two kinds of cell are acausal under `paper`, by definition. A dynamic channel group takes its range
    from all its tokens, of which an early query reads the early ones. And kvsink chooses over the whole
    window, so a late sink can take the place of an early token that an early query reads."""
    return case.known not in (None, KVSink) and case.scheme != "channel-dynamic"


@cells(causal_in_paper, protocol=["paper"], sharing=(1, 4))
def test_no_future_leak_on_paper(case):
    check_no_future_leak(case)


@cells(protocol=PROTOCOLS, length=["1", "G+1", "2G+5"], sharing=(1, 4), dtype=[torch.float64])
def test_batch_rows_are_independent(case):
    check_batch_rows_are_independent(case)


@cells(protocol=PROTOCOLS)
def test_same_twice_and_after_reset(case):
    check_same_twice_and_after_reset(case)


@cells(protocol=["paper"], length=["1", "2G+5"])
def test_paper_refuses_a_second_forward(case):
    check_paper_refuses_a_second_forward(case)


@cells(quantizes, sharing=(1, 2, 4))
def test_the_trap(case):
    check_the_trap(case)


@cells(static, sharing=(1, 4), formula=FORMULAS)
def test_static_ranges(case):
    check_static_ranges(case)


@cells(static)
def test_calibration_order_is_no_matter(case):
    check_calibration_order_is_no_matter(case)


@cells(sharing=(1, 4))
def test_generation(case):
    check_generation(case)


@cells(has("k_bits", "v_bits"), sharing=(1, 4))
def test_generation_in_sixteen_bits_is_plain_generation(case):
    """In float32 the cache rounds to 16 bits: the same tokens come out if no two are about equally likely."""
    prompt = tokens_of(2, 9, seed=21)
    text = case.model.generate(prompt, 8)
    with torch.no_grad():
        logits = case.model(text[:, :-1])[:, 8:]  # what each new token was chosen from
    best = logits.topk(2).values
    exact = case.method(k_bits=16, v_bits=16)
    cached, _ = case.run(exact, text[:, :-1])
    rounding = (cached[:, 8:] - logits).abs().max()
    assert (best[..., 0] - best[..., 1]).min() > 10 * rounding, "choose another prompt"
    assert torch.equal(case.model.generate(prompt, 8, case.new_cache(exact)), text)


@cells(protocol=PROTOCOLS, formula=FORMULAS)
def test_never_nan(case):
    check_never_nan(case)


@pytest.mark.parametrize("name, k_axis, v_axis, static, rope", [
    ("token-dynamic", "token", "token", False, "post"),
    ("token-static", "token", "token", True, "post"),
    ("channel-static", "channel", "token", True, "pre"),
    ("channel-dynamic", "channel", "token", False, "post"),
])
def test_what_the_schemes_are(name, k_axis, v_axis, static, rope):
    method = METHODS["rtn"](model_of(1).config, scheme=name)
    assert (method.rope, method.needs_calibration) == (rope, static)
    assert [(c["k"].axis, c["v"].axis) for c in method.scheme.codecs] == [(k_axis, v_axis)] * L


def test_all_methods_read_a_stream_in_the_same_chunks():
    """By default, so that tables compare like with like."""
    assert {(m.recent, m.block) for m in (cls(model_of(1).config) for cls in METHODS.values())} == {(0, 128)}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("group_size", [None, 4, 16])
def test_a_block_holds_whole_channel_groups(scheme, group_size):
    """128 tokens unless told otherwise; and groups of tokens that are not full can only be a text's last."""
    method = METHODS["rtn"](model_of(1).config, scheme=scheme, group_size=group_size)
    own = group_size is not None and scheme == "channel-dynamic"
    assert method.block == (group_size if own else 128)
    for codecs in method.scheme.codecs:
        for codec in codecs.values():
            assert codec.axis == "token" or method.scheme.static or method.block == codec.group


@cells(lambda case: case.cls is FP16, protocol=PROTOCOLS, sharing=(1, 4))
def test_sixteen_bit_models_cache_what_they_compute(case):
    check_sixteen_bit_models_cache_what_they_compute(case)


# ---- kvsink

@st.composite
def chunks_of_scores(draw):
    B = draw(st.integers(1, 3))
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    score = st.integers(-4, 4)
    return [[draw(st.lists(score, min_size=n, max_size=n)) for _ in range(B)] for n in sizes]


@given(chunks_of_scores(), st.integers(1, 8))
def test_running_top_k(chunks, k):
    check_running_top_k(KVSink, chunks, k)


def test_a_displaced_sink_is_read_as_its_code():
    """And one that is found late is kept from then on: what a stream pins follows the outlier."""
    case = watched(Case(KVSink, "token-dynamic", batch=1))
    method = case.method(preserve=1)
    tokens = torch.randint(0, MARK, (1, 2 * G), generator=torch.Generator().manual_seed(1))
    tokens[0, [1, G + 3]] = MARK
    model = copy.deepcopy(case.model)
    first, embedding = model.model["layers"][0], model.model["embed_tokens"].weight
    first.self_attn.o_proj.weight.data[CHANNEL] = 0  # the channel holds only what the token itself brings
    first.mlp.down_proj.weight.data[CHANNEL] = 0
    embedding.data[7, CHANNEL] = 50.0  # more than MARK
    tokens[0, G + 3] = 7
    cache = case.cache(model, method)
    with torch.no_grad():
        model(tokens[:, :G], cache)
        assert cache.layers[0].k.index is None
        assert [layer.k.index.tolist() for layer in cache.layers[1:]] == [[[[1]]]] * 2
        early = cache.layers[1].read()
        model(tokens[:, G:], cache)
    assert [layer.v.index.tolist() for layer in cache.layers[1:]] == [[[[G + 3]]]] * 2
    late = cache.layers[1].read()
    assert not torch.equal(late[0][:, :, 1], early[0][:, :, 1])
    k, v, _ = cache.exact(1)
    assert torch.equal(late[1][:, :, G + 3], v[:, :, G + 3])


def real_config(**changes):
    """The config of LLaMA-2-7B, with changes."""
    return LlamaConfig(**{"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
                          "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
                          "head_dim": 128, "max_position_embeddings": 4096, **changes})


LLAMA_2_13B = {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40,
               "num_attention_heads": 40, "num_key_value_heads": 40}
MISTRAL_7B = {"intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 32768,
              "sliding_window": 4096, "model_type": "mistral"}
LLAMA_3_8B = {"intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 128256,
              "max_position_embeddings": 8192, "rope_theta": 500000.0}
LLAMA_3_2 = {"vocab_size": 128256, "intermediate_size": 8192, "num_key_value_heads": 8,
             "max_position_embeddings": 131072, "rope_theta": 500000.0, "tie_word_embeddings": True}


@pytest.mark.parametrize("changes, layer, channel", [
    ({}, 1, 2533),
    (LLAMA_2_13B, 3, 4743),
    (MISTRAL_7B, 1, 2070),
    (LLAMA_3_8B, 1, 788),
    ({**LLAMA_3_8B, "max_position_embeddings": 131072}, 1, 788),
    ({**LLAMA_3_2, "num_hidden_layers": 16, "hidden_size": 2048, "head_dim": 64}, 1, 400),
    ({**LLAMA_3_2, "num_hidden_layers": 28, "hidden_size": 3072, "num_attention_heads": 24}, 1, 588),
], ids=["llama-2-7b", "llama-2-13b", "mistral-7b", "llama-3-8b", "llama-3.1-8b", "llama-3.2-1b",
        "llama-3.2-3b"])
def test_the_papers_models_are_recognised(changes, layer, channel):
    method = KVSink(real_config(**changes), scheme="token-dynamic")
    assert (method.layer, method.channel, method.needs_calibration) == (layer, channel, False)
    assert "Table 3" in method.describe()


@pytest.mark.parametrize("changes", [
    {"max_position_embeddings": 2048},
    {"vocab_size": 64000, "num_key_value_heads": 4},
    {**LLAMA_2_13B, "max_position_embeddings": 2048},
    {**MISTRAL_7B, "vocab_size": 32768},
    {"model_type": "mistral"},
], ids=["llama-1-7b", "another of the shape, 4 KV heads", "llama-1-13b", "mistral-7b-v0.3", "another type"])
def test_other_models_of_their_shape_are_not(changes):
    method = KVSink(real_config(**changes), scheme="token-dynamic")
    assert method.layer is None and method.needs_calibration


def test_given_layer_and_channel_come_first():
    method = KVSink(real_config(), emergence_layer=4, outlier_channel=17)
    assert (method.layer, method.channel) == (4, 17)


@pytest.mark.parametrize("settings", [
    {"preserve": 0}, {"emergence_layer": 0}, {"outlier_channel": 0},
    {"emergence_layer": L, "outlier_channel": 0},
    {"emergence_layer": 0, "outlier_channel": D}, {"emergence_layer": -1, "outlier_channel": 0}])
def test_kvsink_refuses(settings):
    with pytest.raises(UserError):
        KVSink(model_of(1).config, **settings)


@lru_cache
def emerging_model(layer, channel, layers=5, size=400.0):
    """MARK writes an outlier into `channel` in the MLP of block `layer`, and nowhere before.

    Channel 0 is MARK's own: no other token and no block writes to it, and one neuron of that MLP reads it.
    """
    torch.manual_seed(3)
    model = Llama(LlamaConfig(V, D, 48, layers, H, H, d, 512))
    with torch.no_grad():
        embedding = model.model["embed_tokens"].weight
        embedding[:, 0] = 0
        embedding[MARK] = 0
        embedding[MARK, 0] = 3.0
        for block in model.model["layers"]:
            block.self_attn.o_proj.weight[[0, channel]] *= 0
            block.mlp.down_proj.weight[[0, channel]] *= 0
        mlp = model.model["layers"][layer].mlp
        mlp.gate_proj.weight[0], mlp.up_proj.weight[0] = 0, 0
        mlp.gate_proj.weight[0, 0] = mlp.up_proj.weight[0, 0] = 4.0
        mlp.down_proj.weight[:, 0] = 0
        mlp.down_proj.weight[channel, 0] = size / 100
    return model


@pytest.mark.parametrize("layer, channel", [(0, 9), (1, 9), (2, 30), (3, 1)])
@pytest.mark.parametrize("size", [400.0, 1e5], ids=["small-model", "llm"])
def test_a_planted_outlier_is_found(layer, channel, size):
    model = emerging_model(layer, channel, size=size)
    assert sinks.find_outlier(model, tokens_of(10, 40, seed=2)) == (layer, channel)


def test_an_outlier_of_the_last_block_marks_nothing():
    """No layer is left that could keep the tokens that it marks."""
    for size in (400.0, 1e5):
        for model in (emerging_model(4, 9, size=size), emerging_model(0, 9, layers=1, size=size)):
            assert sinks.find_outlier(model, tokens_of(10, 40, seed=2)) is None


@pytest.mark.parametrize("sharing", [1, 4])
def test_a_plain_random_model_has_no_outlier(sharing):
    torch.manual_seed(sharing)
    model = Llama(LlamaConfig(V, D, 48, 4, H, H // sharing, d, 512))
    assert sinks.find_outlier(model, tokens_of(10, 40, seed=2)) is None


def test_an_outlier_that_moves_between_channels_is_not_stable():
    model = copy.deepcopy(emerging_model(1, 9))
    with torch.no_grad():
        mlp = model.model["layers"][1].mlp
        mlp.down_proj.weight[10, 0] = mlp.down_proj.weight[9, 0]
        model.model["embed_tokens"].weight[MARK - 1] = model.model["embed_tokens"].weight[MARK]
        model.model["embed_tokens"].weight[MARK, 9] = model.model["embed_tokens"].weight[MARK - 1, 10] = 1.0
    windows = torch.randint(0, MARK - 1, (10, 40), generator=torch.Generator().manual_seed(0))
    windows[:5, 20], windows[5:, 20] = MARK, MARK - 1
    assert sinks.find_outlier(model, windows) is None


@pytest.mark.parametrize("largest, ratio, layer", [
    ([1, 2, 60, 70, 20], [3, 4, 100, 90, 20], 1),  # where it grows most, not where it is largest
    ([1, 2, 20, 25, 5], [3, 4, 29, 28, 9], None),  # a ratio below 30
    ([1, 1, 2, 40, 10], [3, 20, 20, 50, 20], None),  # less than three times what was there before
    ([1, 1, 2, 40, 10], [90, 10, 12, 50, 20], 2),  # the embedding is no layer
    ([1, 200, 300, 5000, 10], [3, 500, 2000, 5000, 9], 1),  # massive: the first over both bounds,
    ([1, 50, 300, 5000, 10], [3, 2000, 2000, 5000, 9], 1),  # not over one of them
    ([1, 1, 1, 1, 5000], [3, 3, 3, 3, 5000], None),  # only in the last block
])
def test_which_layer_an_outlier_emerges_in(monkeypatch, largest, ratio, layer):
    """The rule on numbers made up: of the embedding, then of each of four blocks; the same in all windows."""
    rows = [torch.tensor(x, dtype=torch.float).repeat(6, 1) for x in (largest, ratio)]
    monkeypatch.setattr(sinks, "outlier_profile", lambda *_: (*rows, torch.full((6, 5), 7)))
    expected = None if layer is None else (layer, 7)
    assert sinks.find_outlier(emerging_model(1, 9), None) == expected


@pytest.mark.parametrize("scheme", SCHEMES)
def test_kvsink_finds_what_it_needs_by_itself(scheme):
    model = emerging_model(1, 9)
    method = KVSink(model.config, scheme=scheme, group_size=G, preserve=2)
    assert method.needs_calibration
    method.calibrate(model, tokens_of(10, 40, seed=2))
    assert (method.layer, method.channel) == (1, 9)
    assert "layer 1" in method.describe() and "channel 9" in method.describe()
    text = torch.randint(0, MARK, (1, 30), generator=torch.Generator().manual_seed(8))
    text[0, [11, 23]] = MARK
    cache = KVCache(model, method, "paper")
    with torch.no_grad():
        model(text, cache)
    for i, layer in enumerate(cache.layers):
        assert (layer.k.index is None) if i <= 1 else sorted(layer.k.index[0, 0].tolist()) == [11, 23]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_kvsink_without_an_outlier_is_pfn(scheme, protocol):
    model, case = model_of(2), Case(PFN, scheme, protocol=protocol)
    method = KVSink(model.config, 2, 3, scheme, G, preserve=3)
    method.block = G
    random = copy.deepcopy(model)
    with torch.no_grad():
        random.model["embed_tokens"].weight[MARK, CHANNEL] = 0.5
        method.calibrate(random, calibration_windows())
        assert method.layer is None and "no stable outlier" in method.describe()
        method.calibrate(model, calibration_windows())
    tokens = case.tokens()
    assert torch.equal(case.run(method, tokens)[0], case.run(case.method(), tokens)[0])


@cells(lambda case: case.known is not None and case.scheme is not None)
def test_a_method_is_refused_where_its_calibration_was_forgotten(case):
    method = case.cls(case.model.config, scheme=case.scheme)
    if method.needs_calibration:
        with pytest.raises(UserError, match="calibrate"):
            case.model.generate(tokens_of(1, 140), 1, case.new_cache(method))
    else:
        assert case.model.generate(tokens_of(1, 140), 1, case.new_cache(method)).shape == (1, 141)


def test_calibration_needs_more_tokens_than_are_kept():
    model = model_of(1)
    method = PFN(model.config, scheme="token-static", preserve=30)
    with pytest.raises(UserError, match="leave nothing"):
        kv_ranges(model, method, tokens_of(2, 30))


# ---- the parts of a cache, for methods that keep other tokens in each head or leave slots empty

class Negating:
    """A codec that anything coded can be told by: rows come back with the other sign."""
    def encode(self, layer, kind, rows, skip):
        return Codes(-rows)

    def decode(self, layer, kind, codes):
        return codes.q


@given(st.data())
def test_part_against_plain_lists(data):
    """Append, pin and code in any order; pinned tokens may differ by sequence and head, come and go."""
    B, heads = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2))
    part, rows, length, first = Part(Negating(), 0, "k"), torch.empty(B, 2, 0, 2), 0, 0
    pinned = [[set() for _ in range(2)] for _ in range(B)]
    for _ in range(data.draw(st.integers(1, 4))):
        n = data.draw(st.integers(1, 4))
        numbers = torch.arange(1.0, 1 + B * 2 * n * 2).view(B, 2, n, 2) + 100 * length
        part.append(numbers)
        rows = torch.cat([rows, numbers], dim=2)
        length += n
        if data.draw(st.booleans()):
            slots = data.draw(st.integers(1, 3))
            index = torch.full((B, heads, slots), -1)
            for b in range(B):
                for h in range(heads):
                    able = sorted(pinned[b][h] | set(range(first, length)))
                    chosen = data.draw(st.lists(st.sampled_from(able), max_size=slots, unique=True))
                    index[b, h, :len(chosen)] = torch.tensor(chosen, dtype=torch.long)
                    for other in range(2) if heads == 1 else [h]:
                        pinned[b][other] = set(chosen)
            part.pin(index, first)
        n = data.draw(st.integers(0, length - first))
        if n:
            part.code(n, first)
            first += n
        expected = rows.clone()
        for b in range(B):
            for h in range(2):
                for t in set(range(first)) - pinned[b][h]:
                    expected[b, h, t] *= -1
        assert torch.equal(part.read(), expected)


def test_unknown_protocol_is_refused():
    with pytest.raises(ValueError, match="protocol"):
        KVCache(model_of(1), METHODS["fp16"](model_of(1).config), "Paper")


def test_layer_cache_is_what_the_model_uses():
    cache = KVCache(model_of(1), METHODS["fp16"](model_of(1).config))
    assert all(type(layer) is LayerCache for layer in cache.layers) and len(cache.layers) == L


# ---- the tests are tested

@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda m: m.name)
def test_mutant_fails(mutant):
    check = globals()[mutant.check]
    cell = Case(mutant.real, known=mutant.real, **mutant.cell)
    check(cell)
    with pytest.raises(AssertionError):
        check(replace(cell, cls=mutant.cls or mutant.real, cache=mutant.cache or KVCache))


SCORES = [[[1, -3, 2, 3, 0, 3]], [[2, 3, -4]]]


@pytest.mark.parametrize("cls", mutants.TOP_K_MUTANTS)
def test_top_k_mutant_fails(cls):
    check_running_top_k(KVSink, SCORES)
    with pytest.raises(AssertionError):
        check_running_top_k(cls, SCORES)
