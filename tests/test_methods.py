"""Every method through one matrix: protocols, grouped queries, batches, lengths around a block, schemes.

There is no list of exceptions: what a cell is left out of is said by a property of it, such as "quantizes".

Each `check_` is an invariant. It takes a `Case`, which names a method, a cache and a cell of the matrix, and
builds what it needs from those; so `mutants.py` can put something wrong in the place of either, and a test at
the end shows that every mutant fails. The oracle of what a cache must return is `expected_read`, in numpy and
plain lists; it takes from a method only the tables that were learned, and the formulas from the papers.

Models are random and tiny. One token, MARK, has a huge embedding in one channel, which plants the outlier
that kvsink looks for at positions of our choice. Where a method has a prefix, texts begin with it: T counts its
tokens, and their logits, which are not computed, are zeros. Checks that compare forwards of different shapes (a
batch and its rows, a chunk and its tokens) use a float64 model: matrix products of different shapes differ in their
last bits, and in float32 those may move a value to the next number of 16 bits, or to the next code.

    pytest tests/test_methods.py --method path/to/file.py:Class    puts that method alone through the same matrix
"""
import copy
import math
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

import mutants
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from eval_ppl import load_class, settings_of
from tinykv import UserError, sinks
from tinykv.cache import PROTOCOLS, KVCache, LayerCache, Part
from tinykv.calibrate import kv_ranges
from tinykv.codecs import FORMULAS, Affine, Codebook, Codes, SparseCodes
from tinykv.methods import METHODS
from tinykv.methods.antkv import AnTKV
from tinykv.methods.base import SchemeMethod
from tinykv.methods.cq import CQ
from tinykv.methods.fp16 import FP16
from tinykv.methods.intactkv import Prefix
from tinykv.methods.kivi import KIVI
from tinykv.methods.kvquant import KVQuant
from tinykv.methods.kvsink import KVSink
from tinykv.methods.ott import OTT
from tinykv.methods.pfn import PFN
from tinykv.methods.skvq import SKVQ
from tinykv.model import Llama, LlamaConfig
from tinykv.schemes import SCHEMES, UNIFORM, settings_of_scheme

V, D, L, H, d = 41, 32, 3, 4, 16
MARK, CHANNEL = V - 1, 5  # the token with the planted outlier, and the outlier's channel
G = 8  # tokens of a block
LENGTHS = ["1", "G-1", "G", "G+1", "2G+5"]
SETTINGS = {"k_bits": 2, "v_bits": 3, "group_size": G, "preserve": 3,
            "emergence_layer": 0, "outlier_channel": CHANNEL,
            "outlier_num": 2, "extra_pool": 2, "skip_layers": 1,  # small, so that pools are left and fill up
            "outliers": 5.0,  # 1 to 3 of the channels that a token has here
            "prefix": (11, MARK, 6, 11),
            "vq": "d4m8", "anchors": "4"}  # 12 vectors a centroid; one row's codes, of a single head, are 1.5 bytes
KEEP_ALL = {"preserve": 22, "outlier_num": 22, "skip_layers": 0,  # the calibration windows are longer than that
            "anchors": "100%"}
VARIANTS = [("v_block", 2), ("scope", "layer"), ("anchors", "20%")]  # what takes one goes through it all with it too


# ---- what a cell is made of

@lru_cache
def model_of(sharing, dtype=torch.float32):
    """`sharing` query heads to a KV head."""
    torch.manual_seed(sharing)
    model = Llama(LlamaConfig(V, D, 48, L, H, H // sharing, d, 512, bos_token_id=1))
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


def takes(cls, scheme=None):
    """The names of a method's settings, without those of other schemes."""
    names = set(settings_of(cls))
    if scheme is None:
        return names
    return names - ({s for other in SCHEMES for s in settings_of_scheme(other)} - set(settings_of_scheme(scheme)))


def schemes_of(cls):
    """The schemes that a method can stand on."""
    def fits(scheme):
        try:
            return cls(model_of(1).config, scheme=scheme)
        except UserError:
            return None
    return list(filter(fits, SCHEMES)) if "scheme" in settings_of(cls) else [None]


@lru_cache
def new(cls, sharing, scheme, formula, recent, settings):
    """A method as its constructor leaves it, in blocks of G."""
    names, ours = takes(cls, scheme), issubclass(cls, (SchemeMethod, *METHODS.values()))
    pace = {"recent": recent, "block": G}
    wanted = {**SETTINGS, **pace, "scheme": scheme, "formula": formula, **dict(settings)}
    wanted["prefix"] = Prefix("a few tokens", list(wanted["prefix"]))
    if not ours:  # a method that we know nothing about keeps its own bits
        wanted = {k: v for k, v in wanted.items() if k in dict(settings) or k not in ("k_bits", "v_bits")}
    method = cls(model_of(sharing).config, **{k: v for k, v in wanted.items() if k in names})
    for name in pace.keys() - names if ours else ():
        setattr(method, name, pace[name])
    return method


@lru_cache
def build(cls, sharing, scheme, formula, recent, settings):
    """The same, calibrated in float32. One object serves all caches, as the interface promises."""
    method = new(cls, sharing, scheme, formula, recent, settings)
    if method.needs_calibration and recent and issubclass(cls, tuple(METHODS.values())):
        method.restore(build(cls, sharing, scheme, formula, 0, settings).learned())
    elif method.needs_calibration:
        with torch.no_grad():
            method.calibrate(model_of(sharing), calibration_windows())
    if method.prefix:
        method.prefix.fill(model_of(sharing), model_of(sharing))
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
    settings: tuple = ()  # (name, value) of others, in the place of SETTINGS'
    cache: type = KVCache
    dtype: torch.dtype = torch.float32
    known: type | None = None  # whose oracle applies: one of METHODS, or None for a method given by --method

    def __str__(self):
        recent = f"recent{self.recent}" if self.recent else None
        formula = self.formula if self.formula != "offset" else None
        shape = (f"gqa{self.sharing}", f"b{self.batch}", recent, self.length)
        settings = (f"{name}={value}" for name, value in self.settings)
        cell = (self.scheme, formula, *settings, self.protocol, *shape)
        return "-".join([self.cls.__name__.lower(), *filter(None, cell)])

    @property
    def model(self):
        return model_of(self.sharing, self.dtype)

    def method(self, make=build, **settings):
        settings = {**dict(self.settings), **settings}
        settings = tuple((k, v) for k, v in settings.items() if k in takes(self.cls, self.scheme))
        return make(self.cls, self.sharing, self.scheme, self.formula, self.recent, settings)

    def setting(self, name):
        return {**SETTINGS, **dict(self.settings)}.get(name)

    @property
    def T(self):
        block = self.method().block
        lengths = {"1": 1, "G-1": block - 1, "G": block, "G+1": block + 1, "2G+5": 2 * block + 5, "6G+3": 6 * block + 3}
        return max(lengths[self.length], len(self.prefix) + 1)

    @property
    def prefix(self):
        """The tokens that the method has every text begin with."""
        return self.setting("prefix") if "prefix" in takes(self.cls, self.scheme) else ()

    def text(self, tokens):
        """Tokens (B, T) that begin with the prefix."""
        n = len(self.prefix)
        return torch.cat([torch.tensor(self.prefix, dtype=torch.long).expand(len(tokens), n), tokens[:, n:]], dim=1)

    def tokens(self, seed=0):
        return self.text(tokens_of(self.batch, self.T, seed))

    def new_cache(self, method, protocol=None):
        return self.cache(self.model, method, protocol or self.protocol)

    def exact_twin(self):
        """The fp16 method beside this cell's: the same blocks, the same model."""
        return build(FP16, self.sharing, None, None, self.recent, ())

    def run(self, method, tokens, cache=None, sizes=None):
        """-> logits (B, T, V) and the cache. sizes: tokens of each chunk, if not as `chunk_sizes` says."""
        cache = self.new_cache(method) if cache is None else cache
        sizes, rest = sizes or chunk_sizes(method, cache.protocol, tokens.shape[1]), cache.rest(tokens)
        n = len(method.prefix.ids) if method.prefix else 0
        assert torch.equal(rest, tokens[:, n:])
        return self.feed(cache, rest, behind(n, sizes)), cache

    def feed(self, cache, tokens, sizes):
        """The logits of tokens in chunks, behind zeros for those that the cache holds already."""
        zeros = torch.zeros(len(tokens), len(cache), V, dtype=self.dtype)
        with torch.no_grad():
            return torch.cat([zeros, *(self.model(chunk, cache) for chunk in tokens.split(sizes, dim=1))], dim=1)

    def exact(self, tokens, sizes):
        """The logits that the fp16 method gives of the same text, read in the same chunks.

        A prefix is one of its own, and one row for the batch: as the method reads it, so that the last bits agree.
        """
        n, protocol = len(self.prefix), "stream" if self.prefix else self.protocol
        cache = KVCache(self.model, self.exact_twin(), protocol)
        if n:
            self.feed(cache, tokens[:1, :n], [n])
        return self.feed(cache, tokens[:, n:], behind(n, sizes))

    def generate(self, prompt, new, cache):
        """The prompt and what follows."""
        text = self.model.generate(cache.rest(prompt), new, cache)
        return torch.cat([prompt[:, :prompt.shape[1] + new - text.shape[1]], text], dim=1)


def chunk_sizes(method, protocol, T):
    """One forward under `paper`; in a stream, chunks that end where a block is coded. The first has the prefix, too."""
    if protocol == "paper":
        return [T]
    sizes = [min(T, method.recent + method.chunk)]
    while sum(sizes) < T:
        sizes.append(min(method.chunk, T - sum(sizes)))
    return sizes


def behind(n, sizes):
    """The chunks without the first n tokens."""
    left = []
    for size in sizes:
        left.append(size - min(n, size))
        n -= min(n, size)
    return [size for size in left if size]


@lru_cache
def prefix_rows(sharing, ids):
    """Per layer, k and v (1, Hkv, n, d) of the tokens in 16 bits, before RoPE: what the model hands to a cache."""
    case = watched(Case(FP16, sharing=sharing, known=FP16))
    _, cache = case.run(case.method(), torch.tensor([ids]), sizes=[len(ids)])
    return [cache.exact(layer)[:2] for layer in range(L)]


class Watch:
    """Before a cache class: notes what goes into each layer, what comes back, and every block's output."""

    def reset(self):
        super().reset()
        self.asked, self.given, self.returned, self.outputs = ([[] for _ in range(L)] for _ in range(4))

    def update(self, layer, q, k, v, positions):
        self.asked[layer].append(q)
        self.given[layer].append((k, v))
        K, V = super().update(layer, q, k, v, positions)
        self.returned[layer].append((K, V))
        return K, V

    def observe(self, layer, hidden):
        self.outputs[layer].append(hidden)
        super().observe(layer, hidden)

    def sizes(self):
        """Tokens of each chunk, with the prefix in the first."""
        first, *others = [k.shape[2] for k, _ in self.given[0]]
        return [len(self.case.prefix) + first, *others]

    def exact(self, layer):
        """The rows of a layer in 16 bits, before RoPE, and the output of its block."""
        k, v = (torch.cat(rows, dim=2) for rows in zip(*self.given[layer]))
        k, v = (x if x.dtype.itemsize == 2 else x.half() for x in (k, v))
        if self.case.prefix:
            first = (x.expand(len(k), -1, -1, -1) for x in prefix_rows(self.case.sharing, self.case.prefix)[layer])
            k, v = (torch.cat(pair, dim=2) for pair in zip(first, (k, v)))  # (B, Hkv, T, d) both
        return k, v, torch.cat(self.outputs[layer], dim=1)


def watched(case):
    return replace(case, cache=type("Watched", (Watch, case.cache), {"case": case}))


# ---- what a cache has to return, by other means

def top_k(scores, k):
    """Positions of the k largest of a list, ties to the earlier one."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:k]


FIRST = (PFN, SKVQ, KVQuant)  # methods that keep the first `preserve` tokens
MARGIN = 2e-6  # of the largest score: each is off by less than 1e-6 of that in float32
BOOKS = (CQ, AnTKV)  # methods with codebooks
SCHEME_OF = {KIVI: "channel-dynamic", OTT: "channel-dynamic", KVQuant: "kvquant"}  # those that take no other


def plain_pools(case, scores, events):
    """Tokens in OTT's pool, and in its extra pool, after events. scores: a list, of one sequence and head.

    Newcomers come one by one, the smallest first. One that is smaller than the largest of a full pool takes its place,
    if the extra pool can take that one in.
    """
    pool, extra, size = [], [], case.setting("outlier_num")
    if case.setting("select") == "largest":
        scores = [-score for score in scores]
    for first, end, _ in events:
        for token in sorted(range(first, end), key=lambda i: (scores[i], i)):
            worst = max(pool, key=lambda i: (scores[i], i), default=None)
            if len(pool) < size:
                pool.append(token)
            elif worst is not None and scores[token] < scores[worst] and len(extra) < case.setting("extra_pool"):
                pool.remove(worst)
                pool.append(token)
                extra.append(worst)
    return pool, extra


@lru_cache(maxsize=L)
def plain_scores(case, cache, layer):
    """Eq. 5 of each chunk's queries, by kind: what it adds to all tokens so far, (B, Hkv, seen), in numpy."""
    k, _, _ = cache.exact(layer)
    scores, seen = {"k": [], "v": []}, 0
    for q, (K, _) in zip(cache.asked[layer], cache.returned[layer]):  # in a stream K is what attention reads
        at = torch.arange(seen, seen + q.shape[2])
        seen += q.shape[2]
        if case.protocol == "paper":  # its codes, but scores come before them
            K = case.model.rope.rotate(k, at)
        q, K = case.model.rope.rotate(q, at).double().numpy(), K.double().numpy().repeat(case.sharing, axis=1)
        x = np.where(at.numpy()[:, None] >= np.arange(seen), q @ K.swapaxes(2, 3) / d ** 0.5, -np.inf)
        A = np.exp(x - x.max(-1, keepdims=True))
        A /= A.sum(-1, keepdims=True)  # (B, H, T, seen)
        length = np.sqrt((q ** 2).sum(-1, keepdims=True))  # (B, H, T, 1)
        for kind, terms in (("k", length * A * (1 - A)), ("v", A)):
            scores[kind].append(terms.sum(2).reshape(len(A), -1, case.sharing, seen).sum(2))
    return scores


def plain_anchors(anchors, chunks, events, margin=0.0):
    """AnTKV's anchors after events, the best first, and what all tokens' scores came to while they were exact.

    chunks: of each the scores that it adds to the tokens so far: lists, of one sequence and head. margin: what
    part of the largest score the last anchor has to be ahead of the first that is none, or rounding could choose.
    """
    total, pins, coded = {}, [], 0
    events = {seen: (first, end) for first, end, seen in events}
    for scores in chunks:
        seen = len(scores)
        for i in [*pins, *range(coded, seen)]:
            total[i] = total.get(i, 0) + scores[i]
        if seen in events:
            first, coded = events[seen]
            able = sorted([*pins, *range(first, coded)], key=lambda i: -total[i])  # ties: anchors, then in order
            count = int(anchors) if anchors[-1] != "%" else math.ceil(Fraction(anchors[:-1]) * seen / 100)
            pins = able[:count]
            if 0 < count < len(able):
                ahead = total[able[count - 1]] - total[able[count]]
                assert ahead >= margin * total[able[0]], f"tokens {able[count - 1:count + 1]}: choose another text"
    return pins, total


def expected_pins(case, method, cache, layer, kind, events):
    """True (B, Hkv, T) where a layer's keys or values are kept after coding events; for an unknown method, its word."""
    k, _, _ = cache.exact(layer)
    pins, seen = torch.zeros(k.shape[:3], dtype=torch.bool), events[-1][2] if events else 0
    if case.known in FIRST:
        pins[:, :, :min(case.setting("preserve"), seen)] = True
    elif case.prefix and events and getattr(method, f"{kind}_bits") < 16:
        pins[:, :, :len(case.prefix)] = True
    elif case.known is KVSink and layer > SETTINGS["emergence_layer"] and events:
        h = torch.cat(cache.outputs[SETTINGS["emergence_layer"]], dim=1)
        for b, scores in enumerate(h[:, :seen, CHANNEL].abs().tolist()):
            pins[b, :, top_k(scores, case.setting("preserve"))] = True
    elif case.known is OTT and layer >= case.setting("skip_layers"):
        scores = stored(method, case.model.rope, k).double().abs().sum(-1)  # (B, Hkv, T)
        if case.setting("scope") == "layer":
            scores = scores.sum(1, keepdim=True).expand_as(scores)
        for b, h in np.ndindex(k.shape[:2]):
            pins[b, h, sum(plain_pools(case, scores[b, h].tolist(), events), [])] = True
    elif case.known is AnTKV and events:
        chunks = plain_scores(case, cache, layer)[kind]
        for b, h in np.ndindex(k.shape[:2]):
            kept, _ = plain_anchors(case.setting("anchors"), [x[b, h].tolist() for x in chunks], events, MARGIN)
            pins[b, h, kept] = True
    elif case.known is None and getattr(cache.layers[layer], kind).index is not None:
        index = getattr(cache.layers[layer], kind).index.expand(-1, k.shape[1], -1).tolist()  # (B, Hkv, n)
        for b, h in np.ndindex(k.shape[:2]):
            pins[b, h, [i for i in index[b][h] if i >= 0]] = True
    return pins


def coding_events(case, method, kind, protocol, sizes):
    """[(first, end, seen)]: tokens first .. end - 1 are coded after a chunk, when `seen` have been seen."""
    recent, block = case.recent, (kind == "v" and case.setting("v_block")) or G
    if case.known is None:
        recent, block = method.recent, (kind == "v" and method.v_block) or method.block
    events, coded, seen = [], 0, 0
    for size in sizes:
        seen += size
        end = seen if protocol == "paper" else (seen - recent) // block * block
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


def channels_and_centroids(case):
    """n and m of a format d{n}m{m}, which is the one of 4 bits where only bits are given."""
    assert case.setting("vq") or case.setting("bits") == 4
    return [int(x) for x in (case.setting("vq") or "d2m256")[1:].split("m")]


def plain_heads(rows, Hkv):
    """rows (B, T, h), all heads of a token in one -> (B, Hkv, T, d)."""
    return rows.reshape(*rows.shape[:2], Hkv, -1).transpose(0, 2, 1, 3)


def plain_fp8(x):
    """x rounded to e4m3: 3 bits behind the first, exponents from -6."""
    exponent = np.maximum(np.frexp(np.abs(x))[1] - 1, -6)
    quantum = np.ldexp(np.float32(1), exponent - 3)
    return np.rint(x / quantum) * quantum


def plain_clipped(x, codec, bits, metadata):
    """What x (B, Hkv, T, d) reads as in SKVQ's groups, in numpy, by the tables that the codec has learned."""
    floor, largest, rounded = {"fp8": (2 ** -9, 448, plain_fp8),
                               "fp16": (1e-5, 65504, lambda x: x.astype(np.float16).astype(np.float32))}[metadata]
    order, group, alpha, centre = (t.numpy() for t in (codec.order, codec.group, codec.alpha.float(), codec.centre))
    rows = x.transpose(0, 2, 1, 3).reshape(len(x), x.shape[2], -1)
    levels = np.float32(2 if bits == 1.5 else 2 ** bits - 1)
    assert sorted(order) == list(range(rows.shape[-1])), "a channel is in no group, or in two"
    out = np.empty_like(rows)
    for i, (a, c) in enumerate(zip(alpha, centre)):
        g = rows[..., order[group == i]]
        lo, hi = g.min(-1, keepdims=True), g.max(-1, keepdims=True)
        middle = (lo + hi) / 2 if c else np.zeros_like(lo)
        lo, hi = (a * end + (1 - a) * middle for end in (lo, hi))
        s = rounded(np.clip((hi - lo) / levels, np.float32(floor), np.float32(largest)))
        z = rounded(np.clip(lo, np.float32(-largest), np.float32(largest)))
        out[..., order[group == i]] = s * np.clip(np.rint((g - z) / s), 0, levels) + z
    return plain_heads(out, x.shape[1])


def plain_nonuniform(x, skip, codec, share):
    """What x (B, Hkv, T, d) reads as on KVQuant's levels, in numpy, and where its outliers are (B, T, h).

    Keys by the range that the codec has learned for each channel, values by their own.
    """
    levels = codec.levels.double().numpy()
    rows = x.transpose(0, 2, 1, 3).reshape(len(x), x.shape[2], -1)  # (B, T, h)
    free = ~skip.transpose(0, 2, 1).repeat(x.shape[3], axis=2)  # (B, T, h)
    out, read = np.zeros_like(free), np.zeros_like(rows)
    for b, t in np.ndindex(rows.shape[:2]):
        row = rows[b, t]
        if codec.mid is not None:
            mid, half = codec.mid.float().numpy(), codec.half.float().numpy()
            out[b, t] = free[b, t] & (np.abs(row - mid) > half) & (share > 0)
        else:
            if free[b, t].all():
                median = np.sort(row)[(len(row) - 1) // 2]
                furthest = sorted(range(len(row)), key=lambda c: (-np.abs(row[c] - median), c))
                out[b, t, furthest[:round(share * len(row))]] = True
            else:  # kept, for now: no outliers, but if it is let go it has to be read in its own range
                assert not free[b, t].any()
            lo, hi = (end(row[~out[b, t]]) for end in (np.min, np.max))
            mid, half = (np.float32(np.float16(y)) for y in ((lo + hi) / 2, max((hi - lo) / 2, np.float32(1e-5))))
        code = np.abs(((row - mid) / half).astype(np.float64)[:, None] - levels).argmin(1)  # ties: the smaller level
        read[b, t] = np.where(out[b, t], row, levels[code].astype(np.float32) * half + mid)
    return plain_heads(read, x.shape[1]), out


def plain_nearest(x, codec, n):
    """What x (B, Hkv, T, d) reads as by the nearest centroids of n channels each, in numpy.

    Where two are equally near, as far as 32 bits can tell, the codec has the choice.
    """
    B, Hkv, T, _ = x.shape
    books = codec.centroids.double().numpy()
    books = np.broadcast_to(books, (Hkv * d // n, *books.shape[1:])).reshape(Hkv, d // n, -1, n)
    vectors, out = x.reshape(B, Hkv, T, d // n, n).astype(float), np.empty((B, Hkv, T, d // n, n), np.float32)
    own = None
    for h, p in np.ndindex(Hkv, d // n):
        far = ((vectors[:, h, :, p, None] - books[h, p]) ** 2).sum(-1)  # (B, T, m)
        best = far.argmin(-1)
        least, second = np.sort(far)[..., :2].transpose(2, 0, 1)
        close = second - least <= 1e-6 * ((vectors[:, h, :, p] ** 2).sum(-1) + 1)
        if close.any():
            own = codec.decode(codec.encode(torch.from_numpy(x))).numpy().reshape(out.shape) if own is None else own
            chosen = (own[:, h, :, p, None] == books[h, p]).all(-1)  # (B, T, m)
            allowed = far - least[..., None] <= 1e-6 * ((vectors[:, h, :, p, None] ** 2).sum(-1) + 1)
            best = np.where(close & (chosen & allowed).any(-1), chosen.argmax(-1), best)
        out[:, h, :, p] = books[h, p][best]
    return out.reshape(x.shape)


def stored(method, rope, k):
    """Keys as the method stores them. k (B, Hkv, T, d) before RoPE."""
    return rope.rotate(k, torch.arange(k.shape[2])) if method.rope == "post" else k


def plain_learning(case, method):
    """Per layer {kind: rows (Hkv, tokens, d)}: what the calibration windows have and the method does not keep."""
    cell = Case(case.cls, case.scheme, protocol="paper", sharing=case.sharing, settings=case.settings, known=case.known)
    return plain_learning_of(cell, method)


@lru_cache
def plain_learning_of(case, method):
    learning, case = [], watched(case)
    caches = [case.run(case.exact_twin(), w[None])[1] for w in calibration_windows()]
    for layer in range(L):
        rows = {"k": [], "v": []}
        for cache in caches:
            k, v, _ = cache.exact(layer)
            T = k.shape[2]
            for kind, x in (("k", stored(method, case.model.rope, k)), ("v", v)):
                free = ~expected_pins(case, method, cache, layer, kind, [(0, T, T)])[0, 0]  # (T)
                rows[kind].append(x[0, :, free])
        learning.append({kind: torch.cat(x, dim=1).float().numpy() for kind, x in rows.items()})
    return learning


def plain_ranges(case, method, layer, kind):
    """(lo, hi), each (Hkv, d)."""
    rows = plain_learning(case, method)[layer][kind]
    return rows.min(1), rows.max(1)


def plain_decoded(case, method, layer, kind, rows, skip):
    """What one coding event makes of rows: in numpy where we know the codec, else by the method's own."""
    if case.known is None or case.known is FP16:
        return method.decode(layer, kind, method.encode(layer, kind, rows, skip)).to(rows.dtype)
    bits = method.k_bits if kind == "k" else method.v_bits
    if bits == 16:
        return rows
    codec, x, scheme = method.codecs[layer][kind], rows.float().numpy(), SCHEME_OF.get(case.known, case.scheme)
    if case.known is SKVQ:
        read = plain_clipped(x, codec, bits, case.setting("metadata") or "fp8")
    elif case.known in BOOKS:
        read = plain_nearest(x, codec, channels_and_centroids(case)[0])
    elif scheme == "kvquant":
        read, _ = plain_nonuniform(x, skip.numpy(), codec, case.setting("outliers") / 100)
    else:
        k_axis, v_axis, static, _ = UNIFORM[scheme]
        axis, fixed = k_axis if kind == "k" else v_axis, plain_ranges(case, method, layer, kind) if static else None
        read = plain_affine(x, skip.numpy(), bits, axis, case.formula, fixed)
    return torch.from_numpy(read).to(rows.dtype)


def expected_events(case, method, cache, layer, kind):
    """Of each coding event the rows (B, Hkv, n, d) exact, and which of them are kept (B, Hkv, n); its tokens."""
    k, v, _ = cache.exact(layer)
    rows = stored(method, case.model.rope, k) if kind == "k" else v
    events = coding_events(case, method, kind, case.protocol, cache.sizes())
    for i, (first, end, _) in enumerate(events):
        part = slice(first, end)
        pins = expected_pins(case, method, cache, layer, kind, events[:i + 1])  # (B, Hkv, T)
        yield part, rows[:, :, part], pins[:, :, part]


def expected_read(case, method, cache, layer):
    """K, rotated, and V (B, Hkv, T, d) in 16 bits that a watched cache must hold for a layer."""
    k, v, _ = cache.exact(layer)
    out = []
    for kind, rows in (("k", stored(method, case.model.rope, k)), ("v", v)):
        read = rows.clone()
        for part, exact, pins in expected_events(case, method, cache, layer, kind):
            read[:, :, part] = plain_decoded(case, method, layer, kind, exact, pins)
        events = coding_events(case, method, kind, case.protocol, cache.sizes())
        pins = expected_pins(case, method, cache, layer, kind, events)  # (B, Hkv, T): those of the last event
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
    for kind in "kv":
        coded = [0, *(end for _, end, _ in coding_events(case, method, kind, case.protocol, cache.sizes()))][-1]
        assert all(getattr(layer, kind).first == coded for layer in cache.layers)
    for layer in range(L):
        expected = expected_read(case, method, cache, layer)
        for kind, got, want in zip("KV", cache.layers[layer].read(), expected):
            assert got.shape == want.shape and torch.isfinite(got).all()
            differ = (got != want).any(-1).nonzero().tolist()
            assert not differ, f"layer {layer}, {kind}: (sequence, head, token) {differ[:5]} differ"


def check_scores(case, sizes=None):
    """Every exact row, and no other, has a score: of all queries that saw it so."""
    method, case = case.method(), watched(case)
    _, cache = case.run(method, case.tokens(), sizes=sizes)
    for layer, kind in ((layer, kind) for layer in range(L) for kind in "kv"):
        part, chunks = getattr(cache.layers[layer], kind), plain_scores(case, cache, layer)[kind]
        events = coding_events(case, method, kind, case.protocol, cache.sizes())
        assert part.score is not None and (part.index is not None) == (part.pinned_score is not None) == bool(events)
        for b, h in np.ndindex(chunks[0].shape[:2]):
            kept, total = plain_anchors(case.setting("anchors"), [x[b, h].tolist() for x in chunks], events, MARGIN)
            at, held = list(range(part.first, case.T)), part.score[b, h].tolist()
            if events:
                assert sorted(kept) == sorted(part.index[b, h].tolist())
                at, held = part.index[b, h].tolist() + at, part.pinned_score[b, h].tolist() + held
            assert held == pytest.approx([total[i] for i in at], rel=1e-5, abs=1e-5 * max(total.values()))


def check_attention_sees_the_cache(case, sizes=None):
    """`update` returns what is held: under `paper` the codes, in a stream codes and the new tokens exact."""
    method, tokens = case.method(), case.tokens()
    case = watched(case)
    cache, start, held = case.new_cache(method), len(case.prefix), [None] * L
    sizes = behind(start, sizes or chunk_sizes(method, case.protocol, case.T))
    for chunk in cache.rest(tokens).split(sizes, dim=1):
        case.feed(cache, chunk, chunk.shape[1])
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


def code_bytes(width, bits):
    """Of `width` codes in a row; three levels are packed five to a byte."""
    return -(-width // 5) if bits == 1.5 else -(-width * bits // 8)


def expected_code_bytes(case, method, cache, layer, kind):
    """Of a layer's keys or values: the codes, and whatever is written down with them."""
    events = list(expected_events(case, method, cache, layer, kind))
    scheme, codec = SCHEME_OF.get(case.known, case.scheme), method.codecs[layer][kind]
    b = getattr(method, f"{kind}_bits")
    B, Hkv, _, _ = cache.given[layer][0][0].shape
    tokens = B * sum(rows.shape[2] for _, rows, _ in events)
    if b == 16:
        return tokens * Hkv * d * 2
    if case.known is SKVQ:  # the groups cross heads; of each a scale and a zero point
        assert len(codec.alpha) <= Hkv * d // G
        size = 2 if case.setting("metadata") == "fp16" else 1
        return tokens * (code_bytes(Hkv * d, b) + 2 * size * len(codec.alpha))
    if case.known in BOOKS:
        n, m = channels_and_centroids(case)
        return tokens * -(-Hkv * d // n * int(math.log2(m)) // 8)
    if scheme == "kvquant":
        size = tokens * (code_bytes(Hkv * d, b) + (4 if kind == "v" else 0))  # a token's mid and half
        share = case.setting("outliers") / 100
        if share:  # a pointer a token, and of each outlier the number and its channel
            outs = [plain_nonuniform(x.float().numpy(), p.numpy(), codec, share)[1].sum() for _, x, p in events]
            size += 4 * tokens + 4 * int(sum(outs))
        return size
    size = tokens * Hkv * code_bytes(d, b)
    k_axis, v_axis, static, _ = UNIFORM[scheme]
    if not static:  # a 16-bit scale and a 16-bit zero point a group
        channel = (k_axis if kind == "k" else v_axis) == "channel"
        size += 4 * (sum(-(-rows.shape[2] // G) for _, rows, _ in events) * B * Hkv * d if channel
                     else tokens * Hkv * d // G)
    return size


def check_bytes(case):
    """`nbytes` is the storage held, and the formula: codes, metadata, pinned rows and indices, recent, scores."""
    case = watched(case)
    method = case.method()
    _, cache = case.run(method, case.tokens())
    parts = [part for layer in cache.layers for part in (layer.k, layer.v)]
    held = [t for p in parts for t in (p.index, p.pinned, p.pinned_score, p.recent, p.score)]
    held += [t for p in parts if p.coded for t in vars(p.coded).values()]
    storage = [t.untyped_storage() for t in held if t is not None]
    storage = sum({s.data_ptr(): s.nbytes() for s in storage if s.nbytes()}.values())  # two may share one
    assert cache.nbytes == storage == sum(cache.part_bytes().values())
    if case.known is None:
        return
    B, Hkv = case.batch, case.model.config.num_key_value_heads
    scored = case.known is AnTKV and case.setting("anchors") != "0"  # of every exact row, in 32 bits
    own = scored or (case.known is OTT and case.setting("scope") != "layer")  # each head chooses for itself
    for kind in "kv":
        events = coding_events(case, method, kind, case.protocol, cache.sizes())
        coded = pinned = 0
        for layer in range(L):
            coded += expected_code_bytes(case, method, cache, layer, kind)
            pins = expected_pins(case, method, cache, layer, kind, events)  # (B, Hkv, T)
            slots = int(pins.sum(-1).max())  # of the row with the most
            pinned += B * slots * (Hkv * (d * 2 + 4 * scored) + (Hkv if own else 1) * 4)
        recent = L * B * Hkv * (case.T - (events[-1][1] if events else 0)) * (d * 2 + 4 * scored)
        assert cache.part_bytes(kind) == {"coded": coded, "pinned": pinned, "recent": recent}


def check_low_bits_matter(case):
    """A codec that changes nothing would pass many a test: codes have to show in the logits."""
    method, tokens = case.method(), case.tokens()
    logits, cache = case.run(method, tokens)
    exact = case.exact(tokens, chunk_sizes(method, case.protocol, case.T))
    change = (logits - exact).abs().amax(-1)  # (B, T)
    paces = [coding_events(case, method, kind, "stream", [1] * case.T)[0][2] for kind in "kv"]
    first = min(paces) if case.protocol == "stream" else 0
    assert torch.equal(logits[:, :first], exact[:, :first]), "changed before anything was coded"
    if case.protocol == "paper":  # a token that is kept may see nothing but kept ones
        index = [part.index for layer in cache.layers for part in (layer.k, layer.v) if part.index is not None]
        first = max([int((i >= 0).sum(-1).max()) for i in index], default=0)
    unchanged = (change[:, first:] <= 1e-4).nonzero().tolist()
    assert not unchanged, f"(sequence, token) unchanged by the codes: {unchanged}"


def check_sixteen_bits_are_fp16(case):
    """Bit for bit, whichever tokens are kept and wherever keys are rotated."""
    tokens = case.tokens()
    for rope in ("pre", "post") if has("rope")(case) else (None,):
        method = case.method(k_bits=16, v_bits=16, **({"rope": rope} if rope else {}))
        logits, _ = case.run(method, tokens)
        exact = case.exact(tokens, chunk_sizes(method, case.protocol, case.T))
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
    method = case.method(**KEEP_ALL)
    tokens = case.tokens()
    logits, cache = watched(case).run(method, tokens)
    untouched = not coding_events(case, method, "k", case.protocol, cache.sizes())
    for layer in range(L):
        k, v, _ = cache.exact(layer)
        exact = case.model.rope.rotate(k, torch.arange(case.T)), v
        same = all(torch.equal(a, b) for a, b in zip(cache.layers[layer].read(), exact))
        assert same == (untouched or case.known is not KVSink or layer > SETTINGS["emergence_layer"])
    if case.known is not KVSink:
        assert torch.equal(logits, case.exact(tokens, chunk_sizes(method, case.protocol, case.T)))


def scrambled(method, pins):
    """The same method, but it finds garbage in pinned rows when it codes. pins: per layer {kind: (B, Hkv, T)}."""
    other, coded = copy.copy(method), {}

    def encode(layer, kind, rows, skip):
        first = coded.get((layer, kind), 0)
        coded[layer, kind] = end = first + rows.shape[2]
        garbage = (3000 * torch.linspace(-1, 2, d)).to(rows.dtype)  # (d)
        rows = torch.where(pins[layer][kind][:, :, first:end, None], garbage, rows)
        return method.encode(layer, kind, rows, skip)

    other.encode = encode
    return other


def check_placeholders_do_not_matter(case):
    """What the coded slot of a pinned token holds changes nothing: not the logits, nor its group's range."""
    method, tokens = case.method(), case.tokens()
    logits, cache = watched(case).run(method, tokens)
    events = {kind: coding_events(case, method, kind, case.protocol, cache.sizes()) for kind in "kv"}
    # Only tokens that stay pinned to the end: one that kvsink or antkv lets go later is read as its code.
    pins = [{kind: expected_pins(case, method, cache, layer, kind, events[kind]) for kind in "kv"}
            for layer in range(L)]
    assert case.known is None or any(kept.any() for layer in pins for kept in layer.values())
    assert torch.equal(case.run(scrambled(method, pins), tokens)[0], logits)


def check_chunks_equal_single_tokens(case):
    """A stream in blocks is decoding token by token; every length in between is a prefix of the same run."""
    method, tokens = case.method(), case.tokens()
    single, one = case.run(method, tokens, sizes=[1] * case.T)
    lengths = {1, method.chunk - 1, method.chunk, method.block - 1, method.block, method.block + 1, case.T}
    for T in sorted(lengths - set(range(len(case.prefix) + 1))):
        logits, cache = case.run(method, tokens[:, :T])
        worst = (logits - single[:, :T]).abs().max()
        assert worst < 1e-5, f"{T} tokens: off by {worst}"
    for a, b in zip(one.layers, cache.layers):
        assert (a.k.first, a.v.first) == (b.k.first, b.v.first)
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
    for p in {1, method.block - 1, method.block + 2, case.T - 1} - set(range(len(case.prefix))):
        for new in (MARK, 0):
            other = tokens.clone()
            other[:, p] = new
            changed, _ = case.run(method, other)
            assert torch.equal(changed[:, :p], logits[:, :p]), f"token {p} changed what came before it"
            assert (tokens[:, p] == new).all() or not torch.equal(changed[:, p:], logits[:, p:])


def codes_of(codes, b):
    """What is written down of one sequence, by name; its outliers as (token, channel, number)."""
    fields, outliers = dict(vars(codes)), []
    if isinstance(codes, SparseCodes):  # the lists hold the sequences of a token one after the other
        value, channel, end = (fields.pop(name) for name in ("value", "channel", "end"))
        ends, B = [0, *end[:, 0, :, 0].T.flatten().tolist()], len(end)
        outliers = [(t, channel[i].item(), value[i].item()) for t in range(end.shape[2])
                    for i in range(ends[t * B + b], ends[t * B + b + 1])]
    return {name: x if x is None else x[b].tolist() for name, x in fields.items()}, outliers


def check_batch_rows_are_independent(case):
    """A row of a batch gives the logits, the codes and the pinned tokens that it gives alone."""
    method, tokens = case.method(), case.tokens()
    logits, cache = case.run(method, tokens)
    for b in range(case.batch):
        alone, single = case.run(method, tokens[b:b + 1])
        assert (alone - logits[b:b + 1]).abs().max() < 1e-5, f"row {b}"
        for together, own in zip(cache.layers, single.layers):
            for x, y in ((together.k, own.k), (together.v, own.v)):
                assert torch.equal(x.read()[b], y.read()[0]), f"row {b}"
                assert (x.coded is None) == (y.coded is None) and (x.index is None) == (y.index is None)
                if x.coded is not None:
                    assert codes_of(x.coded, b) == codes_of(y.coded, 0), f"row {b}"
                if x.index is not None:  # places that are empty in all rows are not held
                    pins = [[set(head) - {-1} for head in index.tolist()] for index in (x.index[b], y.index[0])]
                    assert pins[0] == pins[1], f"row {b}"


def check_same_twice_and_after_reset(case):
    """A method holds nothing of a text, and a cache that was reset holds nothing at all."""
    method, tokens = case.method(), case.tokens()
    logits, cache = case.run(method, tokens)
    size = cache.nbytes
    case.run(method, case.tokens(seed=3))  # another text in between
    assert torch.equal(case.run(method, tokens)[0], logits)
    cache.reset()
    assert len(cache) == len(case.prefix)
    assert cache.nbytes == len(cache) * L * case.model.config.num_key_value_heads * d * 2 * 2  # 16 bits, K and V
    assert torch.equal(case.run(method, tokens, cache)[0], logits)
    assert cache.nbytes == size
    cache.reset()
    other = case.tokens(seed=3).roll(1, 0)
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


def check_a_text_has_to_begin_with_the_prefix(case):
    """In every row; and something has to follow."""
    cache, tokens, n = case.new_cache(case.method()), case.tokens(), len(case.prefix)
    assert torch.equal(cache.rest(tokens), tokens[:, n:])
    for b, t in np.ndindex(case.batch, n):
        other = tokens.clone()
        other[b, t] = 40 - other[b, t]
        assert refuses(cache.rest, other), f"row {b}, token {t} of another text"
    assert refuses(cache.rest, tokens[:, :n]) and refuses(cache.rest, tokens[:, :n - 1])


def refuses(call, *arguments):
    try:
        call(*arguments)
    except UserError:
        return True
    return False


def check_uneven_chunks(case):
    check_cache_holds_the_expected_rows(case, [3, 1, case.T - 10, 6])


def check_the_trap(case):
    """A one-shot stream reports fp16 at any bits, as attention comes before coding. `paper` does not."""
    method, tokens = case.method(), case.tokens()
    exact = case.exact(tokens, [case.T])
    one_shot, _ = case.run(method, tokens, case.new_cache(method, "stream"), sizes=[case.T])
    assert torch.equal(one_shot, exact)
    paper, _ = case.run(method, tokens, case.new_cache(method, "paper"), sizes=[case.T])
    assert not torch.equal(paper, exact)


def check_static_ranges(case):
    """The grids are those of the calibration tokens that the method does not keep, and of all windows."""
    method = case.method()
    for layer, codecs in enumerate(method.codecs):
        for kind, codec in codecs.items():
            if isinstance(codec, Affine):
                lo, hi = plain_ranges(case, method, layer, kind)
                c = Affine(codec.bits, d, codec.axis, G, case.formula, static=True)
                c.fix(torch.from_numpy(lo), torch.from_numpy(hi))
                assert torch.equal(codec.scale, c.scale), (layer, kind)
                assert torch.equal(codec.zero, c.zero), (layer, kind)
            elif codec.axis == "channel":
                tail = case.setting("outliers") / 200
                ends = np.quantile(plain_learning(case, method)[layer][kind].astype(float), [tail, 1 - tail], axis=1)
                lo, hi = ends.reshape(2, -1)  # (h) both
                half, mid = codec.half.double().numpy(), codec.mid.double().numpy()
                assert (np.abs(half - (hi - lo) / 2) <= 2e-3 * half).all(), (layer, kind)
                assert (np.abs(mid - (lo + hi) / 2) <= 2e-3 * half).all(), (layer, kind)
            else:
                assert codec.mid is None and codec.half is None


def check_calibration_order_is_no_matter(case):
    """Not at all; but books start from vectors that are drawn by their place, so they code each window equally well."""
    tables, errors = [], np.zeros((2, len(calibration_windows())))
    for windows, error in zip((calibration_windows(), calibration_windows().flip(0)), errors):
        method = copy.deepcopy(case.method())
        with torch.no_grad():
            method.calibrate(case.model, windows)
        tables.append({name: table for name, table in method.learned().items() if not name.endswith("centroids")})
        for rows, codecs in zip(plain_learning(case, method), method.codecs):
            for kind, codec in codecs.items():
                if isinstance(codec, Codebook):
                    x = torch.from_numpy(rows[kind])[None]  # (1, Hkv, tokens, d)
                    far = (codec.decode(codec.encode(x)) - x).pow(2)
                    error += far.unflatten(2, (len(error), -1)).sum((0, 1, 3, 4)).numpy()
    assert (tables[0] or errors.all()) and tables[0].keys() == tables[1].keys()
    assert all(torch.equal(table, tables[1][name]) for name, table in tables[0].items())
    assert (abs(errors[0] - errors[1]) <= 0.1 * errors[0]).all(), errors


def check_what_is_learned_can_be_restored(case):
    """`learned` says all that a method of the same settings needs, to code as if it had been calibrated."""
    method, other, tokens = case.method(), case.method(new.__wrapped__), case.tokens()
    other.restore({name: table.clone() for name, table in method.learned().items()})
    assert torch.equal(case.run(other, tokens)[0], case.run(method, tokens)[0])
    assert other.offline_bytes == method.offline_bytes == sum(t.nbytes for t in method.learned().values()) > 0


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


def check_pools(cls, events, size=2, room=2, scope="head", select="smallest"):
    """OTT's pools after each coding event are what plain lists say, and in their places.

    events: of each, for every sequence and head, whole numbers, one a token: as long as its key is.
    """
    method = cls(model_of(2).config, outlier_num=size, extra_pool=room, skip_layers=1, scope=scope, select=select)
    case = Case(OTT, settings=(("outlier_num", size), ("extra_pool", room), ("select", select)), known=OTT)
    layers, coded, so_far = [LayerCache(i, method, case.model.rope, "stream") for i in range(2)], [], None
    for event in events:
        lengths = torch.tensor(event)  # (B, Hkv, n)
        so_far = lengths if so_far is None else torch.cat([so_far, lengths], dim=2)  # (B, Hkv, T)
        coded.append((so_far.shape[2] - lengths.shape[2], so_far.shape[2], so_far.shape[2]))
        keys = torch.stack([lengths, -lengths, 2 * lengths, 0 * lengths], dim=-1).half()
        keys = torch.nn.functional.pad(keys, (0, d - 4))  # (B, Hkv, n, d)
        for layer in layers:
            layer.k.append(keys)
            layer.v.append(-keys)
            layer.length += keys.shape[2]
            for part in (layer.k, layer.v):
                layer.code(part, keys.shape[2], None)
        assert layers[0].k.index is None and layers[0].v.index is None
        for b, h in np.ndindex(so_far.shape[:2]):
            scores = (so_far[b].sum(0) if scope == "layer" else so_far[b, h]).tolist()
            pool, extra = plain_pools(case, scores, coded)
            for part, sign in ((layers[1].k, 1), (layers[1].v, -1)):
                index = part.index[b, 0 if scope == "layer" else h].tolist()
                assert set(index[:len(pool)]) == set(pool) and set(index[len(pool):]) - {-1} == set(extra)
                assert len(pool) + len(extra) == sum(i >= 0 for i in index), "a token is held twice"
                held = part.pinned[b, h, :, 0].tolist()
                assert all(x == sign * so_far[b, h, i] for i, x in zip(index, held) if i >= 0)


def check_anchors(cls, chunks, anchors="2"):
    """AnTKV's anchors, and all scores held, after each chunk are what plain lists say, ties included.

    chunks: (tokens that come, tokens that are coded then, for every sequence, head and kind whole numbers: what the
    chunk adds to the score of each token so far).
    """
    method, seen, coded, events = cls(model_of(2).config, "d4m8", anchors=anchors), 0, 0, []
    for codec in (codec for layer in method.codecs for codec in layer.values()):
        codec.centroids = torch.zeros(codec.places, codec.m, codec.n).half()
    layer, added = LayerCache(0, method, model_of(2).rope, "stream"), []
    for fresh, n, scores in chunks:
        scores = torch.tensor(scores, dtype=torch.float)  # (B, Hkv, 2, seen)
        at = torch.arange(seen, seen + fresh)
        rows = (1 + at)[:, None].expand(*scores.shape[:2], fresh, d).half()  # its position is in every row
        layer.append(rows, -rows, at)
        seen += fresh
        added.append(scores)
        for part, score in zip((layer.k, layer.v), scores.unbind(2)):
            part.add_score(score)
            if n:
                layer.code(part, n, None)
        if n:
            events.append((coded, coded + n, seen))
            coded += n
        for kind, b, h in np.ndindex(2, *scores.shape[:2]):
            part = (layer.k, layer.v)[kind]
            kept, total = plain_anchors(anchors, [x[b, h, kind].tolist() for x in added], events)
            assert part.score[b, h].tolist() == [total[i] for i in range(coded, seen)]
            if events:
                assert part.index[b, h].tolist() == kept
                assert part.pinned_score[b, h].tolist() == [total[i] for i in kept]
                assert part.pinned[b, h, :, 0].tolist() == [(1 - 2 * kind) * (1 + i) for i in kept]


def check_generation(case):
    """A packed cache serves generation: it sees every token but the last one made, and codes the old ones."""
    method, prompt = case.method(), case.text(tokens_of(case.batch, 5))
    new = method.recent + method.block + 4
    cache = case.new_cache(method)
    text = case.generate(prompt, new, cache)
    assert text.shape == (case.batch, 5 + new) and torch.equal(text[:, :5], prompt)
    assert len(cache) == 5 + new - 1
    for kind in "kv":
        events = coding_events(case, method, kind, "stream", [1] * len(cache))
        assert all(getattr(layer, kind).first == events[-1][1] > 0 for layer in cache.layers)
    assert torch.equal(case.generate(prompt, new, case.new_cache(method)), text)


def check_never_nan(case):
    """All tokens equal: constant groups, ties for every sink; also a text shorter than what is kept."""
    method = case.method()
    for T in (max(2, len(case.prefix) + 1), case.T):
        for token in (0, MARK):
            logits, cache = case.run(method, case.text(torch.full((case.batch, T), token)))
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
    """Run a test for every method, or those of --method, in every cell of `axes` that passes `where`."""
    def mark(test):
        test.where, test.axes = where, axes
        return test
    return mark


def pytest_generate_tests(metafunc):
    if "case" not in metafunc.fixturenames:
        return
    cases = []
    for cls in [load_class(name) for name in metafunc.config.getoption("--method")] or METHODS.values():
        known, names = cls if cls in METHODS.values() else None, settings_of(cls)
        cases += [Case(cls, scheme, known=known) for scheme in schemes_of(cls)]
        cases += [Case(cls, known=known, settings=(variant,)) for variant in VARIANTS if variant[0] in names]
    for axis, values in metafunc.function.axes.items():
        cases = [replace(case, **{axis: value}) for case in cases for value in values
                 if axis != "formula" or value == "offset" or has("formula")(case)]
    metafunc.parametrize("case", list(filter(metafunc.function.where, dict.fromkeys(cases))), ids=str)


def has(*settings):
    return lambda case: takes(case.cls, case.scheme) >= set(settings)


def has_the_settings(case):
    return has(*dict(case.settings))(case)


def quantizes(case):
    return case.cls is not FP16


def keeps(case):
    return not takes(case.cls, case.scheme).isdisjoint(KEEP_ALL)


def begins(case):
    """Every text begins with a prefix."""
    return bool(case.prefix)


def may_keep(case):
    """`keeps`, or `begins`, or a method that we know nothing about."""
    return keeps(case) or begins(case) or case.known is None


def learns(case):
    return case.known is not None and case.method(new).needs_calibration


def static(case):
    scheme = getattr(case.method(new), "scheme", None)
    return case.known is not None and getattr(scheme, "static", False)


def chooses(case):
    """What is kept depends on the text, and may change from one coding event to the next."""
    return case.known in (KVSink, OTT, AnTKV)


def scores(case):
    """Exact tokens have scores, and those choose."""
    return case.known is AnTKV


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


@cells(has("k_bits", "v_bits"), protocol=PROTOCOLS, length=["1", "G", "G+1", "2G+5"], sharing=(1, 4))
def test_sixteen_bits_are_fp16(case):
    check_sixteen_bits_are_fp16(case)


@cells(has("k_bits", "v_bits"))
def test_sixteen_bits_of_one_kind(case):
    check_sixteen_bits_of_one_kind(replace(case, protocol="paper"))


@cells(keeps, protocol=PROTOCOLS, length=["G-1", "2G+5"])
def test_keeping_everything_is_exact(case):
    check_keeping_everything_is_exact(case)


@cells(may_keep, protocol=PROTOCOLS, formula=FORMULAS, sharing=(1, 4), batch=(1, 3))
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
    from all its tokens, of which an early query reads the early ones. And a method that chooses does so over the
    whole window, so a late token can take the place of an early one that an early query reads."""
    codecs = case.method(new).codecs[0].values() if case.known else ()
    acausal = any(isinstance(c, Affine) and c.axis == "channel" and not c.static for c in codecs)
    return case.known is not None and not acausal and not chooses(case)


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


@cells(begins, batch=(1, 3))
def test_a_text_has_to_begin_with_the_prefix(case):
    check_a_text_has_to_begin_with_the_prefix(case)


@cells(quantizes, sharing=(1, 2, 4))
def test_the_trap(case):
    check_the_trap(case)


@cells(static, sharing=(1, 4), formula=FORMULAS)
def test_static_ranges(case):
    check_static_ranges(case)


@cells(learns)
def test_what_is_learned_can_be_restored(case):
    check_what_is_learned_can_be_restored(case)


@cells(learns)
def test_calibration_order_is_no_matter(case):
    check_calibration_order_is_no_matter(case)


@cells(sharing=(1, 4))
def test_generation(case):
    check_generation(case)


@cells(has("k_bits", "v_bits"), sharing=(1, 4))
def test_generation_in_sixteen_bits_is_plain_generation(case):
    """In float32 the cache rounds to 16 bits: the same tokens come out if no two are about equally likely."""
    prompt = case.text(tokens_of(2, 9, seed=108))
    text = case.model.generate(prompt, 8)
    with torch.no_grad():
        logits = case.model(text[:, :-1])[:, 8:]  # what each new token was chosen from
    best = logits.topk(2).values
    exact = case.method(k_bits=16, v_bits=16)
    cached, _ = case.run(exact, text[:, :-1])
    rounding = (cached[:, 8:] - logits).abs().max()
    assert (best[..., 0] - best[..., 1]).min() > 10 * rounding, "choose another prompt"
    assert torch.equal(case.generate(prompt, 8, case.new_cache(exact)), text)


@cells(chooses, protocol=PROTOCOLS, length=["6G+3"], sharing=(1, 4))
def test_a_choice_that_is_made_many_times(case):
    """Long enough that tokens are let go and that pools are full, in some sequence, head or layer."""
    check_cache_holds_the_expected_rows(case)
    check_bytes(case)


@cells(scores, protocol=PROTOCOLS, recent=[0, 5], length=["1", "G", "2G+5"], sharing=(1, 4))
def test_scores(case):
    check_scores(case)


@cells(scores, recent=[0, 5])
def test_scores_of_uneven_chunks(case):
    for sizes in ([3, 1, case.T - 10, 6], [1, case.T - 3, 1, 1]):
        check_scores(case, sizes)


@cells(has_the_settings, protocol=PROTOCOLS, settings=[
    (("metadata", "fp16"), ("clip", "none")),
    (("metadata", "fp16"), ("clip", "centre"), ("k_bits", 4)),
    (("reorder", "off"), ("clip", "endpoint")),
    (("reorder", "off"), ("clip", "none"), ("rope", "post")),
    (("clip", "both"), ("k_bits", 1.5), ("v_bits", 1)),
    (("outliers", 0.0), ("rope", "post")),
    (("outliers", 20.0), ("q_norm", "off"), ("sensitivity", "fisher")),
    (("outliers", 1.0), ("sensitivity", "none"), ("k_bits", 4)),
    (("outlier_num", 0),),
    (("outlier_num", 4), ("extra_pool", 0), ("skip_layers", 2)),
    (("select", "largest"), ("skip_layers", 0)),
    (("v_block", 1),),
    (("vq", None), ("bits", 4), ("sharing", "layer")),
    (("vq", "d2m4"), ("sensitivity", "token")),
    (("vq", "d16m16"), ("sensitivity", "none")),
    (("vq", "d2m1024"), ("sharing", "layer"), ("sensitivity", "fisher")),
    (("anchors", "0"),),
    (("anchors", "30%"), ("vq", "d8m2")),
    (("prefix", ()),),
    (("prefix", (5,)), ("k_bits", 4), ("v_bits", 16)),
    (("prefix", (*range(G + 3),)),),  # more than a block
])
def test_settings(case):
    """Whatever changes what is kept or how it is coded is in the oracle too."""
    check_cache_holds_the_expected_rows(case)
    check_bytes(case)


@cells(protocol=PROTOCOLS, formula=FORMULAS)
def test_never_nan(case):
    check_never_nan(case)


@pytest.mark.parametrize("name, k_axis, v_axis, static, rope", [
    ("token-dynamic", "token", "token", False, "post"),
    ("token-static", "token", "token", True, "post"),
    ("channel-static", "channel", "token", True, "pre"),
    ("channel-dynamic", "channel", "token", False, "post"),
    ("kvquant", "channel", "token", True, "pre"),
])
def test_what_the_schemes_are(name, k_axis, v_axis, static, rope):
    method = METHODS["rtn"](model_of(1).config, scheme=name)
    assert (method.rope, method.needs_calibration) == (rope, static)
    assert [(c["k"].axis, c["v"].axis) for c in method.scheme.codecs] == [(k_axis, v_axis)] * L


@pytest.mark.parametrize("name, rope", [("fp16", "post"), ("kivi", "post"), ("ott", "post"), ("skvq", "pre"),
                                        ("kvquant", "pre"), ("cq", "pre"), ("antkv", "pre"),
                                        ("intactkv", "post")])
def test_where_keys_are_rotated(name, rope):
    """By default; and as told, where a method takes it."""
    cls = METHODS[name]
    assert cls(model_of(1).config).rope == rope
    if "rope" in takes(cls):
        assert {cls(model_of(1).config, rope=other).rope for other in ("pre", "post")} == {"pre", "post"}


def test_which_schemes_a_method_stands_on():
    assert {name: schemes_of(cls) for name, cls in METHODS.items() if schemes_of(cls) != [None]} == {
        **dict.fromkeys(["rtn", "pfn", "kvsink"], list(SCHEMES)), "intactkv": ["token-dynamic", "channel-dynamic"]}


def test_all_methods_read_a_stream_in_the_same_chunks():
    """Those that code at once; by default, so that tables compare like with like."""
    methods = {name: cls(model_of(1).config) for name, cls in METHODS.items()}
    at_once = {name: m.chunk for name, m in methods.items() if m.recent == 0}
    assert at_once == dict.fromkeys(["fp16", "rtn", "pfn", "kvsink", "kvquant", "cq", "intactkv"], 128)


@pytest.mark.parametrize("name, settings, recent, block, v_block, chunk", [
    ("kivi", {}, 128, 32, None, 32),
    ("kivi", {"v_block": 1}, 128, 32, 1, 1),
    ("kivi", {"group_size": 16, "v_block": 12, "recent": 0}, 0, 16, 12, 4),
    ("ott", {}, 32, 128, None, 128),
    ("skvq", {}, 128, 16, None, 16),
    ("skvq", {"block": 1, "recent": 3}, 3, 1, None, 1),
    ("cq", {"recent": 32}, 32, 128, None, 128),
    ("antkv", {}, 32, 128, None, 128),
])
def test_the_pace_of_methods_with_a_window(name, settings, recent, block, v_block, chunk):
    """The defaults; and a stream's chunks end wherever keys or values are coded."""
    m = METHODS[name](model_of(1).config, **settings)
    assert (m.recent, m.block, m.v_block, m.chunk) == (recent, block, v_block, chunk)


@pytest.mark.parametrize("scheme", UNIFORM)
@pytest.mark.parametrize("group_size", [None, 4, 16])
def test_a_block_holds_whole_channel_groups(scheme, group_size):
    """128 tokens unless told otherwise; and groups of tokens that are not full can only be a text's last."""
    method = METHODS["rtn"](model_of(1).config, scheme=scheme, group_size=group_size)
    own = group_size is not None and scheme == "channel-dynamic"
    assert method.block == (group_size if own else 128)
    for codecs in method.scheme.codecs:
        for codec in codecs.values():
            assert codec.axis == "token" or method.scheme.static or method.block == codec.group


@pytest.mark.parametrize("name, settings", [
    ("rtn", {"scheme": "token-dynamic", "outliers": 1.0}), ("pfn", {"scheme": "channel-static", "q_norm": "on"}),
    ("kvsink", {"scheme": "kvquant", "group_size": 8}), ("rtn", {"scheme": "kvquant", "formula": "offset"}),
    ("kivi", {"recent": -1}), ("kivi", {"v_block": 0}), ("kivi", {"group_size": 0}),
    ("ott", {"outlier_num": -1}), ("ott", {"extra_pool": -1}), ("ott", {"scope": "token"}), ("ott", {"select": "any"}),
    ("skvq", {"block": 0}), ("skvq", {"group_size": 24}), ("skvq", {"clip": "all"}), ("skvq", {"k_bits": 2.5}),
    ("kvquant", {"outliers": 50.0}), ("kvquant", {"k_bits": 1.5}), ("kvquant", {"sensitivity": "all"}),
    ("kvquant", {"preserve": -1}), ("cq", {"recent": -1}), ("cq", {"sensitivity": "any"}), ("cq", {"vq": "d32m8"}),
    ("antkv", {"sharing": "head"}), ("antkv", {"recent": -1}), ("antkv", {"anchors": "-1"}),
    ("intactkv", {"scheme": "token-static"}), ("intactkv", {"formula": "clamped"}), ("intactkv", {"k_bits": 9})])
def test_settings_that_cannot_be_are_refused(name, settings):
    with pytest.raises(UserError):
        METHODS[name](model_of(1).config, **settings)


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


@st.composite
def coding_of_scores(draw):
    B, sizes = draw(st.integers(1, 2)), draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    score = st.integers(0, 5)
    return [[[draw(st.lists(score, min_size=n, max_size=n)) for _ in range(2)] for _ in range(B)] for n in sizes]


@given(coding_of_scores(), st.integers(1, 4), st.integers(0, 4), st.sampled_from(["head", "layer"]),
       st.sampled_from(["smallest", "largest"]))
@example([[[[5], [5]]], [[[1, 2, 3], [0, 9, 9]]]], 2, 1, "head", "smallest")  # a pool that is not full yet
def test_pools(events, size, room, scope, select):
    check_pools(OTT, events, size, room, scope, select)


@st.composite
def chunks_with_scores(draw):
    B, seen, coded, chunks = draw(st.integers(1, 2)), 0, 0, []
    for _ in range(draw(st.integers(1, 5))):
        fresh = draw(st.integers(1, 5))
        seen += fresh
        n = draw(st.integers(0, seen - coded))
        coded += n
        row = st.lists(st.integers(0, 5), min_size=seen, max_size=seen)
        chunks.append((fresh, n, [[[draw(row) for _ in "kv"] for _ in range(2)] for _ in range(B)]))
    return chunks


@given(chunks_with_scores(), st.sampled_from(["1", "2", "4", "10%", "30%", "50%", "100%"]))
def test_anchors(chunks, anchors):
    check_anchors(AnTKV, chunks, anchors)


@pytest.mark.parametrize("percent", [1, 7, 14, 55])
def test_a_share_of_a_hundred_tokens(percent):
    """As many as it says, and not one more by the rounding of a float."""
    check_anchors(AnTKV, [(100, 100, [[[list(range(100))] * 2] * 2])], f"{percent}%")


@cells(lambda case: case.known is OTT, protocol=PROTOCOLS, recent=[0, 5])
def test_ott_without_a_pool_is_kivi(case):
    kivi, tokens = replace(case, cls=KIVI, known=KIVI), case.tokens()
    assert torch.equal(case.run(case.method(outlier_num=0), tokens)[0], kivi.run(kivi.method(), tokens)[0])


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
    method = KVSink(model.config, scheme=scheme, preserve=2, **({"group_size": G} if scheme in UNIFORM else {}))
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
    of_scheme = {name: SETTINGS[name] for name in settings_of_scheme(scheme) if name in SETTINGS}
    method = KVSink(model.config, k_bits=2, v_bits=3, scheme=scheme, preserve=3, **of_scheme)
    method.block = G
    random = copy.deepcopy(model)
    with torch.no_grad():
        random.model["embed_tokens"].weight[MARK, CHANNEL] = 0.5
        method.calibrate(random, calibration_windows())
        assert method.layer is None and "no stable outlier" in method.describe()
        method.calibrate(model, calibration_windows())
    tokens = case.tokens()
    assert torch.equal(case.run(method, tokens)[0], case.run(case.method(), tokens)[0])


@cells(lambda case: case.known is not None)
def test_a_method_is_refused_where_its_calibration_was_forgotten(case):
    method = case.cls(case.model.config, **({"scheme": case.scheme} if case.scheme else {}))
    T = method.recent + method.block + 1  # so that something is coded
    if method.prefix:
        with pytest.raises(UserError, match="fill"):
            case.new_cache(method)
    elif method.needs_calibration:
        with pytest.raises(UserError, match="calibrate"):
            case.model.generate(tokens_of(1, T), 1, case.new_cache(method))
    else:
        assert case.model.generate(tokens_of(1, T), 1, case.new_cache(method)).shape == (1, T + 1)


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
            part.pin(index)
        n = data.draw(st.integers(0, length - first))
        if n:
            part.code(n)
            first += n
        assert part.first == first
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


ANCHOR_CHUNKS = [(3, 0, [[[[4, 1, 2], [0, 1, 5]], [[2, 2, 2], [9, 1, 0]]]]),
                 (3, 4, [[[[0, 1, 1, 6, 0, 0], [1, 1, 1, 3, 4, 4]], [[0, 0, 1, 0, 0, 0], [0, 0, 9, 9, 0, 0]]]]),
                 (4, 4, [[[[0, 0, 0, 0, 6, 7, 6, 9, 9, 9], [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]],
                          [[0, 0, 1, 0, 4, 5, 2, 3, 1, 1], [1, 2, 3, 0, 9, 9, 9, 9, 9, 9]]]])]


@pytest.mark.parametrize("cls, anchors", [(cls, anchors) for cls, which in mutants.ANCHOR_MUTANTS for anchors in which])
def test_anchor_mutant_fails(cls, anchors):
    check_anchors(AnTKV, ANCHOR_CHUNKS, anchors)
    with pytest.raises(AssertionError):
        check_anchors(cls, ANCHOR_CHUNKS, anchors)


POOL_EVENTS = [[[[4, 4, 5, 6], [3, 9, 9, 9]]], [[[4, 2, 7, 9], [1, 2, 8, 7]]], [[[0, 1, 1, 0], [0, 0, 5, 5]]]]


@pytest.mark.parametrize("cls", mutants.POOL_MUTANTS)
def test_pool_mutant_fails(cls):
    check_pools(OTT, POOL_EVENTS, 2, 3)
    with pytest.raises(AssertionError):
        check_pools(cls, POOL_EVENTS, 2, 3)
