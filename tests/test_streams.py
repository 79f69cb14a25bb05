"""KIVI, OTT and SKVQ against a cache of plain Python lists, token by token.

`Plain` is the whole method once more: what is kept, what is elected, how numbers are rounded, and when. It knows no
tensors, and rounds every step as the cache does (plain.py). So what attention sees has to be equal, not close, after
every token.
"""
import math
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from cases import chunk_of
from hypothesis import given, settings
from hypothesis import strategies as st
from plain import clip, f8, f16, f32, max_code, plain_code, plain_grid

from tinykv.cache import PROTOCOLS, KVCache, LayerCache
from tinykv.codecs import Pair
from tinykv.codecs.affine import Affine
from tinykv.methods.ott import OTT
from tinykv.methods.registry import METHODS
from tinykv.model import Llama, LlamaConfig, Rope

NAMES = ["kivi", "ott", "skvq"]
MOST = 64  # tokens


def test_eight_bit_rounding_of_the_oracle():
    x = torch.cat([torch.linspace(-448, 448, 4001), torch.logspace(-12, 2.6, 4001), -torch.logspace(-12, 2.6, 99)])
    assert [f8(v) for v in x.tolist()] == x.to(torch.float8_e4m3fn).float().tolist()


# Two rotations: the real one, and one by quarter turns, which leaves a key's magnitudes as they are

class QuarterTurns:
    """Pair i turns by i + 1 right angles a position."""
    def rotate(self, x, positions=None):
        half = x.shape[-1] // 2
        if positions is None:
            positions = torch.arange(x.shape[-2])  # (T)
        turns = positions[:, None] * (1 + torch.arange(half)) % 4  # (T, d/2)
        cos, sin = torch.tensor([1.0, 0, -1, 0])[turns], torch.tensor([0.0, 1, 0, -1])[turns]
        a, b = x.float().chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def rope_of(case):
    return QuarterTurns() if case.quarters else Rope(config_of(case.heads, case.width))


def config_of(heads, width, layers=3):
    return LlamaConfig(29, heads * width, 24, layers, heads, heads, width, 512)


# One setting of one method

@dataclass(frozen=True)
class Case:
    name: str
    k_bits: float = 2
    v_bits: float = 2
    group: int = 4  # kivi, ott: tokens of a block
    recent: int = 0
    v_block: int | None = None  # kivi
    pool: int = 0  # ott
    extra: int = 0
    by_layer: bool = False
    layer: int = 0
    skip_layers: int = 0
    block: int = 4  # skvq
    first: int = 0
    metadata: str = "fp8"
    rope: str = "post"
    clips: tuple = ()  # skvq, of K and of V: (channels of each group, (alpha, centre) of each group)
    heads: int = 1
    width: int = 4
    batch: int = 1
    quarters: bool = False

    def method(self):
        bits = {"k_bits": self.k_bits, "v_bits": self.v_bits, "recent": self.recent}
        config = config_of(self.heads, self.width)
        if self.name == "kivi":
            return METHODS["kivi"](config, **bits, group_size=self.group, v_block=self.v_block)
        if self.name == "ott":
            return METHODS["ott"](config, **bits, group_size=self.group, outlier_num=self.pool, extra_pool=self.extra,
                                  skip_layers=self.skip_layers, scope="layer" if self.by_layer else "head")
        method = METHODS["skvq"](config, **bits, group_size=2, preserve=self.first, block=self.block,
                                 metadata=self.metadata, rope=self.rope)
        for kind, (groups, choices) in zip("kv", self.clips):
            getattr(method.codecs[self.layer], kind).restore({
                "order": torch.tensor([c for g in groups for c in g], dtype=torch.int32),
                "group": torch.tensor([i for i, g in enumerate(groups) for _ in g], dtype=torch.int32),
                "alpha": torch.tensor([a for a, _ in choices], dtype=torch.float16),
                "centre": torch.tensor([c for _, c in choices], dtype=torch.uint8)})
        return method

    def cache(self, protocol, method=None, prompt=None):
        return LayerCache(self.layer, method or self.method(), rope_of(self), protocol, SimpleNamespace(), prompt)


@st.composite
def groups_with_clips(draw, h):
    """A permutation of h channels cut into groups of any sizes, and a clip for each."""
    order = draw(st.permutations(range(h)))
    cuts = sorted({0, h, *draw(st.lists(st.integers(1, h - 1), max_size=3))})
    groups = tuple(tuple(order[a:b]) for a, b in zip(cuts, cuts[1:]))
    choice = st.tuples(st.sampled_from([f16(a / 100) for a in range(60, 102, 2)]), st.integers(0, 1))
    return groups, tuple(draw(choice) for _ in groups)


@st.composite
def cases(draw, name):
    bits = st.sampled_from([1, 1.5, 2, 3])
    case = Case(name, draw(bits), draw(bits), draw(st.sampled_from([4, 8])), draw(st.integers(0, 10)),
                heads=draw(st.integers(1, 2)), width=draw(st.sampled_from([4, 8])), batch=draw(st.integers(1, 2)),
                quarters=draw(st.booleans()))
    if name == "kivi":
        return replace(case, v_block=draw(st.sampled_from([None, 1, 2, 3])))
    if name == "ott":
        return replace(case, pool=draw(st.integers(0, 5)), extra=draw(st.integers(0, 5)), layer=draw(st.integers(1, 2)),
                       skip_layers=draw(st.integers(0, 2)), by_layer=draw(st.booleans()), quarters=draw(st.booleans()))
    clips = groups_with_clips(case.heads * case.width)
    return replace(case, block=draw(st.integers(1, 6)), first=draw(st.integers(0, 3)), clips=(draw(clips), draw(clips)),
                   metadata=draw(st.sampled_from(["fp8", "fp16"])), rope=draw(st.sampled_from(["pre", "post"])))


@st.composite
def texts(draw):
    """(length, seed, kind of numbers)"""
    return draw(st.integers(1, 60)), draw(st.integers(0, 999)), draw(st.sampled_from(["normal", "coarse", "constant"]))


def rows_of(case, text):
    """k and v (B, Hkv, T, d) as attention hands them over: channels of all sizes, some tokens with small keys.

    "coarse" numbers are quarters, so that magnitudes tie, and their sums are exact.
    """
    T, seed, kind = text
    rng = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, case.batch, case.heads, T, case.width, generator=rng)
    small = torch.rand(case.batch, 1, T, 1, generator=rng) < 0.15
    if kind == "constant":
        k, v = torch.full_like(k, 1.5), torch.full_like(v, -0.1)
    elif kind == "coarse":
        k, v = (2 * k).round() / 4, (2 * v).round() / 4
    else:
        k = k * torch.logspace(-2, 1, case.width) + torch.linspace(-3, 3, case.width)
    return torch.where(small, k / 8, k), v


# The same in lists

class Plain:
    """A layer's keys and values of one sequence: each token as it came and, once it is quantized, as it is read."""

    def __init__(self, case, paper=False, prompt=None):
        self.case, self.paper, self.prompt, self.length = case, paper, prompt, 0
        self.exact = {kind: [[] for _ in range(case.heads)] for kind in "kv"}  # by head and token
        self.read = {kind: [[] for _ in range(case.heads)] for kind in "kv"}  # those that are quantized
        self.coded = {"k": 0, "v": 0}  # tokens that are quantized
        self.kept = [set() for _ in range(case.heads)]
        self.pool = [[] for _ in range(case.heads)]  # ott: by head, or the first alone for all heads
        self.extra = [[] for _ in range(case.heads)]
        self.keys_after_rope = case.name != "skvq" or case.rope == "post"
        # the cosines of each position, then its sines: what the rotation makes of (1, .., 1, 0, .., 0)
        unit = torch.cat([torch.ones(MOST, case.width // 2), torch.zeros(MOST, case.width // 2)], dim=-1)
        self.turns = rope_of(case).rotate(unit, torch.arange(MOST)).tolist()

    def turn(self, row, position):
        half = len(row) // 2
        cosines, sines = self.turns[position][:half], self.turns[position][half:]
        first, second = [], []
        for a, b, cos, sin in zip(row[:half], row[half:], cosines, sines):
            first.append(f32(f32(a * cos) - f32(b * sin)))
            second.append(f32(f32(b * cos) + f32(a * sin)))
        return first + second

    def feed(self, k, v):
        """k, v: lists by head, token, channel. -> K and V that attention sees."""
        for h in range(self.case.heads):
            for i, (key, value) in enumerate(zip(k[h], v[h])):
                key = [f16(x) for x in key]
                if self.keys_after_rope:
                    key = [f16(x) for x in self.turn(key, self.length + i)]
                self.exact["k"][h].append(key)
                self.exact["v"][h].append([f16(x) for x in value])
        self.length += len(k[0])

        if self.paper and self.prompt is None:
            self.quantize("k", self.length)
            self.quantize("v", self.length)
            return self.seen()
        if self.paper and self.length == self.prompt:
            # a group that is not full waits for the tokens that follow
            full = self.length if self.case.name == "skvq" else self.length // self.case.group * self.case.group
            if full:
                self.quantize("k", full)
                self.quantize("v", full)
            return self.seen()
        seen = self.seen()
        for kind in "kv":
            block = self.case.block if self.case.name == "skvq" else self.case.group
            if kind == "v" and self.case.v_block:
                block = self.case.v_block
            blocks = (self.length - self.coded[kind] - self.case.recent) // block
            if blocks > 0:
                self.quantize(kind, blocks * block)
        return seen

    def seen(self):
        """K and V of all tokens so far, as attention sees them: lists by head, token, channel."""
        out = {"k": [], "v": []}
        for kind in "kv":
            for h, rows in enumerate(self.exact[kind]):
                of_head = []
                for t, row in enumerate(rows):
                    if t < self.coded[kind] and t not in self.kept[h]:
                        row = self.read[kind][h][t]
                    if kind == "k" and not self.keys_after_rope:
                        row = self.turn(row, t)
                    of_head.append(row)
                out[kind].append(of_head)
        return out["k"], out["v"]

    def quantize(self, kind, n):
        """The n oldest tokens that are not quantized yet."""
        block = range(self.coded[kind], self.coded[kind] + n)
        self.keep(kind, block)
        rows = [[head[t] for t in block] for head in self.exact[kind]]
        if self.case.name == "skvq":
            read = self.clipped(kind, rows)
        elif kind == "k":
            read = [self.by_channel(head, [t in kept for t in block]) for head, kept in zip(rows, self.kept)]
        else:
            read = [self.by_token(head) for head in rows]
        for before, new in zip(self.read[kind], read):
            before += new
        self.coded[kind] += n

    # keep

    def keep(self, kind, block):
        case = self.case
        if case.name == "skvq":
            self.kept = [set(range(min(case.first, self.length))) for _ in self.kept]
        elif case.name == "ott" and kind == "k" and case.layer >= case.skip_layers:
            for h in [0] if case.by_layer else range(case.heads):
                self.elect(h, block)
            for h in range(case.heads):
                of = 0 if case.by_layer else h
                self.kept[h] = {*self.pool[of], *self.extra[of]}

    def score(self, h, t):
        heads = self.exact["k"] if self.case.by_layer else [self.exact["k"][h]]
        return math.fsum(abs(x) for head in heads for x in head[t])

    def elect(self, h, block):
        """As many of the best new tokens stand for the pool as the extra pool has room for those evicted."""
        pool, extra = self.pool[h], self.extra[h]
        best = sorted(block, key=lambda t: (self.score(h, t), t))
        for n in reversed(range(len(best) + 1)):
            elected = sorted([*pool, *best[:n]], key=lambda t: (self.score(h, t), t))[:self.case.pool]
            evicted = [t for t in pool if t not in elected]
            if len(extra) + len(evicted) <= self.case.extra:
                self.pool[h], self.extra[h] = elected, extra + evicted
                return

    # quantize

    @staticmethod
    def rounded(numbers, counted, bits):
        """numbers, as they are read from the grid of those that count"""
        s, z = plain_grid(counted, bits, "offset")
        return [plain_code(x, s, z, bits, "offset")[1] for x in numbers]

    def by_channel(self, rows, kept):
        out, bits = [], self.case.k_bits
        for i in range(0, len(rows), self.case.group):
            part, kept_here = rows[i:i + self.case.group], kept[i:i + self.case.group]
            columns = []
            for column in zip(*part):
                counted = [x for x, is_kept in zip(column, kept_here) if not is_kept]
                columns.append(self.rounded(column, counted, bits))
            out += [list(row) for row in zip(*columns)]
        return out

    def by_token(self, rows):
        size = min(self.case.group, self.case.width)
        out = []
        for row in rows:
            groups = [row[c:c + size] for c in range(0, self.case.width, size)]
            out.append([x for group in groups for x in self.rounded(group, group, self.case.v_bits)])
        return out

    def clipped(self, kind, rows):
        case = self.case
        groups, choices = case.clips["kv".index(kind)]
        top = max_code(case.k_bits if kind == "k" else case.v_bits)
        metadata, least, most = (f8, 2 ** -9, 448) if case.metadata == "fp8" else (f16, f32(1e-5), 65504)
        out = [[] for _ in rows]
        for t in range(len(rows[0])):
            flat = [x for head in rows for x in head[t]]  # all heads are one row
            read = [0.0] * len(flat)
            for channels, (alpha, centre) in zip(groups, choices):
                lo, hi = min(flat[c] for c in channels), max(flat[c] for c in channels)
                towards = f32(f32(1 - alpha) * f32(f32(lo + hi) / 2)) if centre else 0.0
                lo, hi = f32(f32(alpha * lo) + towards), f32(f32(alpha * hi) + towards)
                s = metadata(clip(f32(f32(hi - lo) / top), least, most))
                z = metadata(clip(lo, -most, most))
                for c in channels:
                    read[c] = f32(f32(s * clip(round(f32(f32(flat[c] - z) / s)), 0, top)) + z)
            for h, head in enumerate(out):
                head.append(read[h * case.width:(h + 1) * case.width])
        return out


# The comparison

def read(cache):
    """K and V of all tokens so far, as attention would see them now."""
    return cache.read()


def compare(case, text, sizes, protocol, prompt=None):
    """Feed chunks of these sizes; what is returned must be what the lists say."""
    k, v = rows_of(case, text)
    cache = case.cache(protocol, prompt=prompt)
    plain = [Plain(case, protocol == "paper", prompt) for _ in range(case.batch)]
    start = 0
    for n in sizes:
        new = slice(start, start + n)
        K, V = cache.update(None, k[:, :, new], v[:, :, new], torch.arange(start, start + n))
        assert K.dtype == k.dtype and V.dtype == v.dtype
        for b, of in enumerate(plain):
            keys, values = of.feed(k[b, :, new].tolist(), v[b, :, new].tolist())
            assert K[b].tolist() == keys, f"keys after {start + n} tokens"
            assert V[b].tolist() == values, f"values after {start + n} tokens"
        start += n
    return cache, plain


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", NAMES)
def test_token_by_token(name):
    @given(cases(name), texts())
    def check(case, text):
        compare(case, text, [1] * text[0], "stream")
    check()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", NAMES)
def test_in_chunks_of_any_size(name):
    """Attention reads a chunk before it is quantized, and all of its full blocks are quantized at once."""
    @given(cases(name), texts(), st.lists(st.integers(1, 30), min_size=60, max_size=60))
    def check(case, text, sizes):
        ends = [min(sum(sizes[:i + 1]), text[0]) for i in range(60)]
        compare(case, text, [b - a for a, b in zip([0, *ends], ends) if b > a], "stream")
    check()


@pytest.mark.parametrize("name", NAMES)
def test_the_paper_protocol(name):
    @given(cases(name), texts())
    def check(case, text):
        compare(case, text, [text[0]], "paper")
    check()


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", NAMES)
def test_a_prompt(name, protocol):
    """It arrives at once, quantized before it is read or after; then come single tokens."""
    @settings(max_examples=12)
    @given(cases(name), texts(), st.integers(1, 60))
    def check(case, text, prompt):
        prompt = min(prompt, text[0])
        compare(case, text, [prompt] + [1] * (text[0] - prompt), protocol, prompt)
    check()


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", NAMES)
def test_aligned_chunks_are_token_by_token(name):
    """Every token of a chunk sees what it would have seen had it come alone."""
    @given(cases(name), texts())
    def check(case, text):
        k, v = rows_of(case, text)
        method = case.method()
        sizes = [method.recent + chunk_of(method)] + [chunk_of(method)] * 60
        cache, plain, start = case.cache("stream", method), [Plain(case) for _ in range(case.batch)], 0
        for n in sizes:
            new = slice(start, min(start + n, text[0]))
            if new.start >= new.stop:
                break
            K, V = cache.update(None, k[:, :, new], v[:, :, new], torch.arange(new.start, new.stop))
            for t in range(new.start, new.stop):
                for b, of in enumerate(plain):
                    keys, values = of.feed(k[b, :, t:t + 1].tolist(), v[b, :, t:t + 1].tolist())
                    assert K[b, :, :t + 1].tolist() == keys and V[b, :, :t + 1].tolist() == values
            start += n
        for got, want in zip(read(cache), zip(*(of.seen() for of in plain))):
            assert got.tolist() == list(want)
    check()


PLAIN_CLIPS = ((((0, 1), (2, 3)), ((1.0, 0), (1.0, 0))),) * 2
SKVQ = Case("skvq", clips=PLAIN_CLIPS)


@pytest.mark.parametrize("case", [Case("kivi", v_block=1), Case("ott", pool=2, extra=2), replace(SKVQ, first=2)],
                         ids=NAMES)
def test_the_comparison_is_of_quantized_tokens(case):
    """In a text of 60 tokens many are quantized: the tests above compare more than rows in full precision."""
    k, v = rows_of(case, (60, 0, "normal"))
    for protocol in PROTOCOLS:
        cache, plain = compare(case, (60, 0, "normal"), [60] if protocol == "paper" else [1] * 60, protocol)
        for rows in (plain[0].exact["k"][0], plain[0].exact["v"][0]):
            assert len({tuple(r) for r in rows}) == 60
        K, V = read(cache)
        assert (V != v.half()).any(-1).sum() > 40
        assert (K != rope_of(case).rotate(k.half(), torch.arange(60))).any(-1).sum() > 40


# OTT

def elected(cache, p):
    """Of the first sequence's heads, the pool."""
    return [sorted(row) for row in cache.keys.kept_positions[0, :, :p].tolist()]


@given(texts(), st.integers(1, 4), st.booleans())
def test_the_pool_holds_the_smallest_keys_so_far(text, p, by_layer):
    """However a text comes, as long as the extra pool is not full."""
    case = Case("ott", pool=p, extra=100, heads=2, by_layer=by_layer, quarters=True)
    T = max(4, text[0] // 4 * 4)
    k, v = rows_of(case, (T, text[1], "coarse"))
    size = k[0].abs().sum(-1).tolist()  # by head and token
    size = [[a + b for a, b in zip(*size)]] if by_layer else size
    best = [sorted(sorted(range(T), key=lambda t: (head[t], t))[:p]) for head in size]
    for protocol, n in (("stream", 1), ("stream", 4), ("stream", T), ("paper", T)):
        cache = case.cache(protocol)
        for start in range(0, T, n):
            new = slice(start, start + n)
            cache.update(None, k[:, :, new], v[:, :, new], torch.arange(T)[new])
        assert elected(cache, p) == best


@pytest.mark.one_in(5)
@pytest.mark.parametrize("extra", [0, 1, 3])
@pytest.mark.parametrize("p", [3, 5])
def test_a_pool_that_takes_several_blocks_to_fill(p, extra):
    """As long as it has places of its own, newcomers need none of the extra pool's."""
    for seed in range(5):
        compare(Case("ott", group=2, pool=p, extra=extra, recent=1), (24, seed, "normal"), [1] * 24, "stream")


def test_the_largest_keys_can_be_kept_instead():
    """The paper's counter-example."""
    case = Case("ott", heads=2)
    k, v = rows_of(case, (8, 0, "normal"))
    method = OTT(config_of(2, 4), group_size=4, recent=0, outlier_num=3, skip_layers=0, select="largest")
    cache = case.cache("paper", method)
    cache.update(None, k, v, torch.arange(8))
    size = rope_of(case).rotate(k.half(), torch.arange(8)).float().abs().sum(-1)[0]
    assert elected(cache, 3) == [sorted(row) for row in size.topk(3).indices.tolist()]


class StandIns(Affine):
    """As the paper has it: something else takes the place of a kept token before its group is quantized."""

    def __init__(self, stand_in, codec):
        super().__init__(codec.bits, codec.width, codec.axis, codec.group, codec.formula)
        self.stand_in = stand_in  # a function of the other tokens of a group (n, d)

    def encode(self, x, ignore=None):
        x = x.clone()  # (B, Hkv, T, d)
        for b in range(len(x)):
            for h in range(x.shape[1]):
                for i in range(0, x.shape[2], 8):
                    block, kept = x[b, h, i:i + 8], ignore[b, h, i:i + 8]  # (8, d), (8)
                    if not kept.all():
                        block[kept] = self.stand_in(block[~kept].float()).to(x.dtype)
        return super().encode(x)


def mean(others):
    return others.mean(0)


def median(others):
    return others.median(0).values


def copy_of_the_last(others):
    return others[-1]


@pytest.mark.parametrize("protocol, T", [("stream", 59), ("paper", 56), ("paper", 59)])
@pytest.mark.parametrize("stand_in", [mean, median, copy_of_the_last])
def test_what_stands_in_for_a_kept_token_does_not_matter(stand_in, protocol, T):
    """Whatever lies within the range of the others gives the same metadata, and the same codes of the others."""
    case = Case("ott", heads=2, width=8, batch=2)
    settings = {"group_size": 8, "recent": 3, "outlier_num": 3, "extra_pool": 6, "skip_layers": 0}
    ours, papers = OTT(config_of(2, 8), **settings), OTT(config_of(2, 8), **settings)
    papers.codecs = [Pair(StandIns(stand_in, pair.k), StandIns(stand_in, pair.v)) for pair in papers.codecs]

    # attention sees the same
    k, v = rows_of(case, (T, 5, "normal"))
    caches = [case.cache(protocol, method) for method in (ours, papers)]
    for chunk in torch.arange(T).split(1 if protocol == "stream" else T):
        one, two = (cache.update(None, k[:, :, chunk], v[:, :, chunk], chunk) for cache in caches)
        assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])

    # the same tokens are kept, and the others have the same codes
    one, two = (cache.keys for cache in caches)
    assert torch.equal(one.kept_positions, two.kept_positions) and one.kept_positions.shape[-1] >= 3
    assert torch.equal(one.codes.scale, two.codes.scale) and torch.equal(one.codes.zero, two.codes.zero)
    kept = torch.arange(one.n_coded)[:, None] == one.kept_positions[..., None, :]  # (B, Hkv, coded, p)
    kept = kept.any(-1)  # (B, Hkv, coded)
    assert kept.any() and torch.equal(one.codes.packed[~kept], two.codes.packed[~kept])
    assert not torch.equal(one.codes.packed[kept], two.codes.packed[kept])  # the slots do hold something else


def tiny_model():
    torch.manual_seed(0)
    model = Llama(LlamaConfig(29, 32, 24, 3, 4, 2, 8, 512)).double()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.normal_(std=1.5 * p.shape[1] ** -0.5)
    return model


def logits(model, method, protocol, tokens, sizes):
    cache = KVCache(model, method, protocol)
    with torch.no_grad():
        return torch.cat([model(chunk, cache) for chunk in tokens.split(sizes, dim=1)], dim=1)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("protocol, sizes", [("paper", [45]), ("stream", [1] * 45), ("stream", [11, 8, 8, 8, 8, 2])])
@pytest.mark.parametrize("off", [{"outlier_num": 0, "skip_layers": 0}, {"skip_layers": 3}])
def test_ott_without_a_pool_is_kivi(protocol, sizes, off):
    model, tokens = tiny_model(), torch.randint(29, (2, 45), generator=torch.Generator().manual_seed(1))
    kivi = METHODS["kivi"](model.config, group_size=8, recent=3)
    plain = logits(model, kivi, protocol, tokens, sizes)
    assert torch.equal(logits(model, OTT(model.config, group_size=8, recent=3, **off), protocol, tokens, sizes), plain)
    pooled = logits(model, OTT(model.config, group_size=8, recent=3), protocol, tokens, sizes)  # only the last layer
    assert not torch.equal(pooled, plain)
    assert not torch.equal(logits(model, OTT(model.config, group_size=8, recent=3, skip_layers=1), protocol, tokens,
                                  sizes), pooled)


@pytest.mark.parametrize("name", NAMES)
def test_aligned_chunks_give_the_logits_of_single_tokens(name):
    """Through a whole model, in float64: products of other shapes must not move a number to its next code."""
    model, tokens = tiny_model(), torch.randint(29, (2, 45), generator=torch.Generator().manual_seed(2))
    given = {"kivi": {"group_size": 8, "v_block": 4}, "ott": {"group_size": 4, "skip_layers": 1, "extra_pool": 4},
             "skvq": {"block": 4, "preserve": 2, "reorder": "off", "clip": "none"}}[name]
    method = METHODS[name](model.config, recent=3, **given)
    assert chunk_of(method) == 4
    one = logits(model, method, "stream", tokens, [1] * 45)
    many = logits(model, method, "stream", tokens, [7, *[4] * 9, 2])
    assert torch.allclose(one, many, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(one, logits(model, METHODS["fp16"](model.config), "stream", tokens, [45]), atol=1e-2)
