"""The Triton kernels in the interpreter, each beside torch.

The oracle of an attention is `expected` of told.py: to 1e-4 of outputs of size 1, and where operands are rounded to
fp16, as a GPU does, to 4e-3.
"""
import copy
import math
import random
import re
from collections import defaultdict
from dataclasses import replace
from functools import partial

import oracles
import pytest
import torch
from cases import model_of
from told import expected, method_of, read, reads_the_same, scores, text_of, told_layer

triton = pytest.importorskip("triton")
import bench_kernels  # noqa: E402
import benchmark  # noqa: E402

import kernels  # noqa: E402
from tinykv import UserError  # noqa: E402
from tinykv.cache import KVCache  # noqa: E402
from tinykv.codecs.affine import Affine  # noqa: E402
from tinykv.codecs.base import TERNARY, Exact, Pair, pack  # noqa: E402
from tinykv.codecs.codebook import Codebook  # noqa: E402
from tinykv.lab import triton_cache  # noqa: E402
from tinykv.lab.triton_cache import Attended, TritonCache, TritonLayer  # noqa: E402
from tinykv.methods import antkv  # noqa: E402
from tinykv.methods.registry import METHODS  # noqa: E402
from tinykv.model import Llama, LlamaConfig  # noqa: E402

pytestmark = pytest.mark.usefixtures("interpreted_quickly")
near = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4, check_dtype=False)


# ---- codecs with tables of random numbers

def affine(heads, width, bits, axis="token", group_size=None, formula="offset", static=False):
    codec = Affine(bits, width, axis, group_size, formula, static)
    if static:
        codec.set_range(-1 - torch.rand(heads, width), 1 + torch.rand(heads, width))
    return codec


def book(heads, width, n, m):
    codec = Codebook(n, m, heads, width)
    codec.centroids = torch.randn(codec.slots, m, n).half()
    return codec


STATIC = partial(affine, static=True)
CODECS = {  # {name: a function of heads and width}
    "exact": lambda heads, width: Exact(),
    **{f"{b:g} bits per token": partial(affine, bits=b) for b in (1, 1.5, 2, 3, 4, 5, 6, 7, 8)},
    **{f"{b:g} bits per token in groups": partial(affine, bits=b, group_size=16) for b in (1, 1.5, 2, 3, 4, 8)},
    **{f"{b:g} bits per channel, {g} tokens": partial(affine, bits=b, axis="channel", group_size=g) for b, g in
       ((1, 32), (2, 128), (4, 16), (8, 48), (3, 32), (1.5, 32), (2, 8), (4, 5), (5, 32))},
    "4 bits static per token": partial(STATIC, bits=4),
    "2 bits static per token in groups": partial(STATIC, bits=2, group_size=16),
    "2 bits static per channel": partial(STATIC, bits=2, axis="channel"),
    "3 bits static per channel": partial(STATIC, bits=3, axis="channel"),
    "4 bits integer zero": partial(affine, bits=4, formula="integer-zero"),
    "2 bits integer zero per channel": partial(affine, bits=2, axis="channel", group_size=32, formula="integer-zero"),
    "3 bits integer zero static": partial(STATIC, bits=3, axis="channel", formula="integer-zero"),
    **{f"d{n}m{m}": partial(book, n=n, m=m) for n, m in
       ((1, 16), (2, 256), (4, 256), (32, 4096), (8, 512), (16, 2048))},
}


def divides(name, width):
    """Whether a head of `width` channels is whole vectors; all other codecs take any."""
    return not name.startswith("d") or width % int(name[1:].split("m")[0]) == 0


def layer_of(k, v, heads=1, width=32, batch=1, length=75, new=1, dtype=torch.float16, **told):
    """`told_layer` of two of CODECS."""
    pair = Pair(CODECS[k](heads, width), CODECS[v](heads, width))
    return told_layer(TritonLayer, pair, heads, width, batch, length, new, dtype, **told)


def same(layer, R=2, T=1, dtype=torch.float32, **close):
    """The kernels' attention of random queries is the oracle's."""
    B, Hkv, _, d = layer.keys.recent.shape
    q = torch.randn(B, Hkv * R, T, d).to(dtype)
    _, out, lse, _ = layer.attended(q)
    assert out.shape == q.shape and out.dtype == dtype
    near((out, lse), expected(q, layer), **close)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


# ---- KVSink's sinks

@pytest.mark.parametrize("T,k", [(1, 5), (3, 5), (16, 16), (18, 14), (50, 5), (65, 1), (2500, 7)])
def test_topk(T, k):
    """With ties, across programs, too; with NaN, which is the largest, and -inf; of a slice of a larger tensor."""
    hidden = torch.randn(2, T, 12).round().half()[..., 2:10]
    hidden[0, T // 2:, 3] = -math.inf
    hidden[1, T // 2, 3] = math.nan
    found = kernels.topk(hidden[..., 3], k, N=16 if T < 2500 else 1024)
    assert torch.equal(found, KVCache.top_k(None, hidden[..., 3], k)) and found.shape == (2, min(k, T))


def test_kvsink_asks_the_kernel(monkeypatch):
    asked, real, sizes = [], kernels.topk, torch.randn(2, 30).round().abs()
    monkeypatch.setattr(kernels, "topk", lambda *args: asked.append(args) or real(*args))
    cache = TritonCache(tiny(), METHODS["fp16"](model_of(2).config))
    assert torch.equal(cache.top_k(sizes, 7), KVCache.top_k(cache, sizes, 7)) and len(asked) == 1


# ---- rows of codes

def test_scales_and_zero_points_take_no_more_memory_side_by_side():
    codec = CODECS["4 bits integer zero"](2, 32)
    codes = codec.encode(torch.randn(1, 2, 9, 32))
    scale, zero, held = codes.scale.clone(), codes.zero.clone(), codes.nbytes
    words = triton_cache.side_by_side(codes)
    assert words.data_ptr() == codes.scale.data_ptr()
    assert torch.equal(codes.scale, scale) and torch.equal(codes.zero, zero) and codes.nbytes == held == 4 * 18 + 288
    assert torch.equal(words >> 16, zero.int()) and codes.scale.untyped_storage().nbytes() == 4 * 18
    assert torch.equal(triton_cache.side_by_side(codes), words)  # where they already are


def run_ptx(lines, registers):
    """What shifts, masks and unions of 32-bit registers {name: tensor} leave in $0."""
    for line in lines.strip("{ }").split(";")[1:-1]:
        name, out, *terms = re.fullmatch(r" *(\w+)\.b32 (\S+), (\S+?)(?:, (\S+))?", line).groups()
        a, b = (registers[x] if x in registers else int(x or "0", 0) for x in terms)
        ways = {"mov": lambda a, b: a, "shr": lambda a, b: a >> b, "shl": lambda a, b: a << b & 0xffffffff,
                "and": lambda a, b: a & b, "or": lambda a, b: a | b}
        registers[out] = ways[name](a, b)
    return registers["$0"]


@pytest.mark.parametrize("bits", [1, TERNARY, 2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("width, piece", [(128, 128), (128, 64), (128, 32), (128, 16), (64, 32),
                                          (80, 80), (80, 40), (96, 32), (32, 16), (20, 20), (256, 256)])
def test_a_plane_is_of_one_piece(bits, width, piece):
    """Planes hold each channel's code once, and no plane channels of two groups or two halves. The arithmetic of
    `two_words`, which the interpreter cannot run, finds these codes of two words at once."""
    codes = torch.randint(0, 3 if bits == TERNARY else 2 ** bits, (1, 1, 1, width))
    packed = pack(codes, bits)
    cut = triton_cache.planes_of(packed, bits, width, piece)
    # 96 channels, 2 bits: the first bits of all bytes are 24 channels, and these no part of a group. 20 channels, 3
    # bits: the high bits fill two and a half bytes
    apart = bits == TERNARY and piece < width or (width, piece) == (96, 32) and bits not in (TERNARY, 8)
    assert (cut is None) == (apart or width == 20 and bits in (3, 5, 7))
    if cut is None:
        return
    planes, words, step = cut
    row, found = packed.view(torch.uint16 if step == 2 else torch.uint8).flatten().int(), {}
    assert step == 2 or width < 256 or bits == TERNARY
    if bits == TERNARY:
        row = triton_cache.ternary_table(row.device).int()[row]
    for i, plane in enumerate(planes):
        slices, code = [row[n * words:][:words] for n in plane.slices], 0
        for x, shift, mask in zip(slices, plane.shifts, plane.masks):
            code = code | (x * 2.0 ** -shift).int() & mask
        if step == 2:
            lines, operands = kernels.two_words(planes, i)
            assert operands == "=r" + ",r" * len(slices)
            both = run_ptx(lines, {f"${n}": x[::2] | x[1::2].long() << 16 for n, x in enumerate(slices, 1)})
            assert torch.equal(torch.stack([both % 2 ** 16, both >> 16], dim=1).flatten(), code.long())
        channels = [plane.channel + n * step for n in range(len(code))]
        assert len({channel // piece for channel in channels if channel < width}) <= 1  # 0: 20 channels fill no 3 bytes
        assert code.max() < 1024  # a subnormal number
        found |= dict(zip(channels, (code >> plane.low).tolist()))
    assert [found[channel] for channel in range(width)] == codes.flatten().tolist()
    firsts = [plane.channel // piece for plane in planes]
    assert firsts == sorted(firsts)  # group by group


@pytest.mark.parametrize("group, N", [(5, 32), (8, 32), (16, 16), (32, 64), (48, 16), (64, 64), (128, 64)])
def test_a_tile_lies_in_one_group_of_tokens_or_is_two(group, N):
    """Where a channel's scales leave the products: they are loaded once for N tokens, or half of them. A product takes
    16."""
    codec = Affine(4, 32, "channel", group)
    keys = triton_cache.affine_rows(codec, codec.encode(torch.randn(1, 1, 2 * group, 32)), "k", 1)
    values = triton_cache.exact_rows(torch.randn(1, 1, 2 * group, 32).half(), 1)
    assert triton_cache.tiling(keys, values, 1, 1).N == N
    assert (keys.fold.value == "channel") == (group % 16 == 0)


# ---- attention

@pytest.mark.one_in(13)
@pytest.mark.parametrize("rope", ["post", "pre"])
@pytest.mark.parametrize("name, width", [
    (name, width) for name in CODECS for width in (32, 80, 128) if divides(name, width)])
def test_attention_reads_every_codec(name, width, rope):
    """As keys, before and after RoPE, and as values; the last group of tokens is not full."""
    v, heads, batch = (name, 1, 2) if rope == "post" else ("4 bits per token", 2, 1)
    same(layer_of(name, v, heads, width, batch, length=70, rope=rope, block=67), R=1)


@pytest.mark.one_in(25)
@pytest.mark.parametrize("number", range(100))
def test_any_shape(number, monkeypatch):
    """Lengths around the borders of tiles and of pieces, which are short here, so that many are merged; kept rows,
    which differ between heads and between keys and values, and may repeat; windows; one new token, or many."""
    draw = random.Random(number)
    monkeypatch.setattr(triton_cache, "PIECE", draw.choice([64, 128, 512]))
    heads, batch, R = draw.choice([1, 2]), draw.choice([1, 1, 2]), draw.choice([1, 4, 8])
    width = draw.choice([64, 64, 80, 96, 128])
    length = draw.choice([1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 192, 193, 300])
    new = draw.choice([1, 1, 1, draw.randint(1, min(length, 40))])
    names = [name for name in CODECS if divides(name, width)]
    kept = {}
    if length > new:
        kept = {kind: [draw.choices(range(length - new), k=3) for _ in range(draw.choice([1, heads]))]
                for kind in draw.choice(["", "k", "v", "kv"])}
    layer = layer_of(draw.choice(names), draw.choice(names), heads, width, batch, length, new, kept=kept,
                     rope=draw.choice(["pre", "post"]), recent=draw.choice([0, 0, 9]), block=draw.choice([1, 16, 70]),
                     v_block=draw.choice([None, None, 1, 7]), window=draw.choice([None, None, 1, 20, 64, 200]))
    same(layer, R, new)


KEPT = {  # kept tokens, and what else is told
    "of each head its own": dict(kept={"k": [[0, 5, 69], [1, 63, 1]], "v": [[5, 7, 7, 64], [64, 2, 1, 0]]}),
    "keys alone": dict(kept={"k": [[3, 9]]}),
    "values alone": dict(kept={"v": [[65, 0], [7, 8]]}),
    "more than are added at a time": dict(length=101, block=98, kept={"k": [[*range(90)]], "v": [[*range(5, 95)]]}),
    # some tokens have a coded key and a recent value, or the other way round, as in KIVI's released code
    "keys in longer blocks": dict(length=71, recent=9, block=16, v_block=1),
    "values in longer blocks": dict(length=71, recent=9, block=1, v_block=16),
    "keys in longer blocks, and values": dict(length=71, recent=9, block=16, v_block=1, kept={"v": [[3, 48]]}),
    "values in longer blocks, and keys": dict(length=71, recent=9, block=1, v_block=16, kept={"k": [[3, 48]]}),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("rope", ["post", "pre"])
@pytest.mark.parametrize("what", KEPT)
def test_kept_rows_take_their_slots(what, rope):
    """Also where the two heads, or keys and values, do not keep the same tokens; a token counts once."""
    told = {"recent": 1, "block": 70, **KEPT[what]}
    layer = layer_of("1 bits per token", "2 bits per token", 2, batch=2, new=2, rope=rope, **told)
    layer.keys.recent[:] /= 2
    same(layer, T=2)


@pytest.mark.parametrize("kept", [{"v": [[1, 30]]}, {"k": [[30, 1]]}])
def test_the_other_of_a_key_or_a_value_that_is_kept_alone_is_decoded(kept):
    """Also where tokens share a scale, and none of them can be decoded alone."""
    name = "4 bits per channel, 16 tokens"
    same(layer_of(name, name, length=65, block=64, kept=kept))


def test_kept_tokens_are_found_anew_where_something_is_coded():
    """A kept token that is recent is read there, until it is coded; one that is dropped is read from its codes."""
    layer = layer_of("2 bits per token", "exact", 2, length=55, block=20, kept={"k": [[1, 30, 40, 50]]})
    assert layer.keys.n_coded == 40
    same(layer)
    layer.keys.keep(torch.tensor([[[50, 1]]]))
    layer.keys.quantize(15)
    layer.keys.kept_rows += 1
    same(layer)


@pytest.mark.parametrize("length, pieces", [(1600, 6), pytest.param(20_000, 64, marks=pytest.mark.whole)])
def test_a_long_text(length, pieces, monkeypatch):
    """A wide GPU's pieces, none shorter than 256 tokens but the last of a part; the recent tokens are one."""
    counts, real = [], kernels.merge_kernel
    monkeypatch.setattr(triton_cache, "programs", lambda device, warps: 4096)
    monkeypatch.setattr(triton_cache, "MERGED", 4)  # of which more are merged
    monkeypatch.setattr(kernels, "merge_kernel",
                        {(4,): lambda *args, **more: counts.append(args[5]) or real[4,](*args, **more)})
    same(layer_of("2 bits per token", "4 bits per token", length=length, block=100), 4)
    assert counts == [pieces]


def test_frequencies_may_be_edited():
    """The kernels' own angles, and those of kept rows, are of the frequencies as they are now."""
    layer = layer_of("4 bits per token", "exact", rope="pre", block=70, kept={"k": [[3, 60]]})
    same(layer)
    layer.rope.freq /= 4
    same(layer)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_the_model_computes_in(dtype):
    cached = torch.float16 if dtype == torch.float32 else dtype
    close = {"rtol": 2 ** -7, "atol": 1e-2} if dtype == torch.bfloat16 else {"rtol": 1e-3, "atol": 1e-3}
    same(layer_of("4 bits per token", "exact", 2, dtype=cached, rope="pre", recent=3, block=60), dtype=dtype, **close)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("k,v,rope", [
    ("2 bits per token", "2 bits per token", "post"), ("exact", "exact", "post"),
    ("2 bits per channel, 128 tokens", "4 bits per token in groups", "post"),
    ("2 bits static per channel", "1.5 bits per token", "pre"), ("d8m512", "d8m512", "pre")])
def test_products_of_fp16_numbers(k, v, rope, monkeypatch):
    """As on a GPU: operands rounded to fp16, of which codes are the smallest subnormal ones."""
    monkeypatch.setattr(triton_cache, "product_type", lambda *args: torch.float16)
    same(layer_of(k, v, 2, 64, rope=rope, block=70), rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("bits", [8, 4])
def test_small_values_behind_a_sink(bits, monkeypatch):
    """Products of fp16 numbers: weights of e**-10 times scales of 1e-4 are too small for these, unless lifted."""
    monkeypatch.setattr(triton_cache, "product_type", lambda *args: torch.float16)
    layer = layer_of("exact", f"{bits} bits per token", length=301, block=300)
    rows = 0.02 * torch.randn(1, 1, 300, 32)
    rows[:, :, 0] *= 1e-3  # a sink has next to no value
    layer.values.codes = CODECS[f"{bits} bits per token"](1, 32).encode(rows.half())
    layer.keys.codes.packed[:, :, 0] = 5.0
    q = torch.full((1, 1, 1, 32), 0.35)  # the sink's score is 10, and the others' about 0
    out, want = layer.attended(q).out.double(), expected(q, layer)[0]
    assert (out - want).norm() < 0.01 * want.norm()


def test_scores_that_are_all_far_below_zero():
    """e**-400 is 0 in fp32; what counts is how far a score is from the largest one."""
    layer = layer_of("exact", "exact", length=100, block=90)
    layer.keys.codes.packed.fill_(2.0).add_(torch.randn(90, 1) / 8)
    layer.keys.recent.fill_(2.0)
    q = torch.full((1, 1, 1, 32), -35.0)
    _, out, lse, _ = layer.attended(q)
    assert lse.max() < -300
    near((out, lse), expected(q, layer))


def test_the_torch_lines_are_the_kernels():
    """attend_lines piece by piece, then merge_lines, are the oracle's output."""
    layer = layer_of("exact", "exact", 2, length=100, new=5, block=90, kept={"v": [[2, 50]]}, window=60)
    q, K, V = torch.randn(1, 2, 5, 32), read(layer.keys).float(), read(layer.values).float()
    pieces = [kernels.attend_lines(q, K, V, a, b, 60) for a, b in ((0, 30), (30, 64), (64, 100))]
    near(kernels.merge_lines(*(torch.stack(x) for x in zip(*pieces))), expected(q, layer))


# ---- anchor scores

@pytest.mark.one_in(3)
@pytest.mark.parametrize("T,S,window", [(1, 1, None), (1, 65, None), (64, 64, None), (65, 65, None), (30, 130, None),
                                        (70, 70, 20), (5, 100, 64)])
@pytest.mark.parametrize("heads,R,width", [(2, 1, 32), (1, 4, 80)])
def test_anchor_scores(T, S, window, heads, R, width):
    """Eq. 5 of all keys, and of a third of them, in any order, which differs between heads."""
    q = torch.randn(2, heads * R, T, width)
    k = torch.randn(2, S, heads, width).half().transpose(1, 2)
    want = oracles.equation_5(q.double().numpy(), k.double().numpy(), window)
    lse, order = scores(q, k, window).logsumexp(-1).float(), torch.rand(2, heads, S).argsort(-1)
    for positions in (torch.arange(S).expand(2, heads, S), order[:, :, :S // 3 + 1]):
        keys = k.gather(2, positions[..., None].expand(-1, -1, -1, width))
        found = triton_cache.anchor_scores(q, S - T, lse, keys, positions.int(), window)
        near(found, tuple(torch.from_numpy(of_all).gather(2, positions) for of_all in want))


# ---- methods, in a model

def tiny(**more):
    """more: of its config."""
    model = copy.deepcopy(model_of(2))
    model.config = replace(model.config, **more)
    return model.requires_grad_(False)


@pytest.fixture
def tall(monkeypatch):
    """64 rows of queries in a tile, where registers allow a GPU 16, and pieces merged by the kernel's lines: the
    interpreter's time is by the program, and that kernel, which all tests above run, has one for each row."""
    def merged(acc, top, total, out, lse, *sizes, **more):
        for x, found in zip((out, lse), kernels.merge_lines(acc, top, total)):
            x.copy_(found)
    real = triton_cache.tiling
    monkeypatch.setattr(triton_cache, "tiling", lambda *args: real(*args)._replace(M=64))
    monkeypatch.setattr(kernels, "merge_kernel", defaultdict(lambda: merged))


CELLS = [(name, protocol, prompt) for name in METHODS if name not in ("skvq", "kvquant", "oscar")
         for protocol in ("paper", "stream") for prompt in (None, 12)]
QUICK = [("antkv", "stream", 12), ("kvsink", "paper", None)]  # in the interpreter seconds each


@pytest.mark.usefixtures("tall")
@pytest.mark.parametrize("name, protocol, prompt", [
    cell if cell in QUICK else pytest.param(*cell, marks=pytest.mark.whole) for cell in CELLS])
def test_every_method_reads_the_same(name, protocol, prompt):
    """Some in a model with a sliding window."""
    model = tiny(sliding_window=14 if name in ("antkv", "kivi") else None)
    method, (tokens, _) = copy.copy(method_of(name, choose="always")), text_of(name, 1, 24)
    method.config = model.config
    if method.calibrated_on:  # without the window
        method.calibrated_on = model.identity(), *method.calibrated_on[1:]
    chunks = 24 if protocol == "paper" and not prompt else [12, 11, 1]
    reads_the_same(TritonCache, "triton", model, method, tokens, chunks, protocol, prompt)


@pytest.mark.usefixtures("tall")
def test_scores_of_tokens_that_all_heads_keep(monkeypatch):
    """AnTKV keeps some of each head; a method that has its scores may do otherwise."""
    method, real = method_of("antkv", choose="always"), antkv.AnTKV.largest
    monkeypatch.setattr(antkv.AnTKV, "largest", lambda *args: real(*args)[:, :1])
    reads_the_same(TritonCache, "triton", tiny(), method, text_of("antkv", 1, 24)[0], [12, 11, 1])


# ---- what is refused

def test_a_cpu_without_the_interpreter_is_named(monkeypatch):
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    with pytest.raises(UserError, match="GPU.*cpu"):
        TritonCache(tiny(), METHODS["fp16"](model_of(2).config))


def own_codec(config):
    method = METHODS["rtn"](config, scheme="token-dynamic")
    for *_, codec in method.each_codec():
        codec.__class__ = type("Zeros", (Affine,), {})
    return method


@pytest.mark.parametrize("cls,words", [
    (own_codec, "codec Zeros"), (type("OwnScores", (antkv.AnTKV,), {"score": None}), "scores"),
    (type("OwnPace", (antkv.AnTKV,), {"block_of": lambda method, kind: "vk".index(kind)}), "pace"),
    (METHODS["skvq"], "codec ClippedGroups"), (METHODS["kvquant"], "codec NonUniform"),
    (lambda config: METHODS["oscar"](config, rotate="off"), "codec Rotated"),
    (lambda config: METHODS["cq"](config, vq="d3m8"), "vectors of 3")])
def test_what_no_kernel_knows_is_named(cls, words):
    wide = LlamaConfig(41, 32, 48, 2, 4, 2, 24, 256)
    with pytest.raises(UserError, match=words):
        TritonCache(Llama(wide), cls(wide))


# ---- calls

def without_kernels(monkeypatch):
    """What would launch them is done, and nothing is launched."""
    for kernel in ("attend_kernel", "merge_kernel", "anchor_kernel"):
        monkeypatch.setattr(kernels, kernel, defaultdict(lambda: lambda *args, **more: None))


@pytest.mark.parametrize("attention, name, most", [
    ("triton", "fp16", 42), ("triton", "2-bit per token", 42), ("triton", "1-bit codebooks d8m256", 42),
    ("triton", "1-bit antkv, 1% kept", 70), ("fused", "2-bit per token", 64), ("fused", "1-bit codebooks d8m256", 64)])
def test_calls_of_a_layer(attention, name, most, monkeypatch):
    """Operations of torch in a step of decoding, which set the pace of one sequence on a GPU."""
    without_kernels(monkeypatch)
    model = tiny().to(torch.bfloat16)
    model.use_attention(attention)
    method = bench_kernels.method_of(name, model.config, "cpu")
    cache = TritonCache(model, method) if attention == "triton" else KVCache(model, method)
    for layer in cache.layers:
        bench_kernels.filled(layer, model.config, 1, 256, "cpu", torch.bfloat16)
    step = partial(model, torch.zeros(1, 1, dtype=torch.long), cache)
    step()  # makes what is held until codes change
    calls = benchmark.calls_of(model.model["layers"][-1], step)
    assert 25 < calls <= most


def test_rows_of_codes_are_made_where_codes_change(monkeypatch):
    made, real = [], triton_cache.ROWS[Affine]
    monkeypatch.setitem(triton_cache.ROWS, Affine, lambda *args: made.append(args[2]) or real(*args))
    without_kernels(monkeypatch)
    layer = layer_of("2 bits per token", "2 bits per token", length=9, block=8)
    for position in range(9, 18):  # 8 tokens are quantized at the 16th
        layer.update(torch.randn(1, 2, 1, 32), *torch.randn(2, 1, 1, 1, 32), position)
    assert made == ["k", "v"] * 2


# ---- the benchmark

@pytest.fixture
def small(monkeypatch):
    """A shape and a few cases that the interpreter can go through."""
    monkeypatch.setitem(bench_kernels.SHAPES, "tiny", (1, 64, 48, 4, 2, 16, 41, 1e4))
    cases = ("fp16", "2-bit per token", "2-bit kvsink, 5 kept", "1-bit codebooks d8m256")
    monkeypatch.setattr(bench_kernels, "CASES", {name: bench_kernels.CASES[name] for name in cases})
    monkeypatch.setattr(bench_kernels, "best_of", lambda run: 1.0 + 0 * len([run()]))


@pytest.mark.whole
@pytest.mark.usefixtures("small")
def test_the_benchmark_runs_at_tiny_shapes(capsys):
    """Every line of it but the clock, which needs a GPU."""
    cpu = torch.device("cpu")
    bench_kernels.bench_attention("tiny", [256], [1], ["fp16", "2-bit per token", "1-bit codebooks d8m256"], cpu)
    bench_kernels.bench_decoding(bench_kernels.config_of("tiny", positions=512), [256], ["2-bit per token"], cpu, 1)
    out = capsys.readouterr().out
    assert out.count("2-bit per token") == 2 and "tok/s at 256" in out


@pytest.mark.whole
@pytest.mark.usefixtures("small")
def test_what_is_wrong_on_a_device_is_named(monkeypatch, capsys):
    """`check` finds every case near to torch; and says so of those that are not."""
    bench_kernels.check("tiny", torch.device("cpu"), [torch.float16])
    errors = [float(x) for line in capsys.readouterr().out.splitlines()[2:] for x in line.split()[-2:]]
    assert len(errors) == 8 and 0 < max(errors) < 2e-3
    for wrong in (0, math.nan):
        monkeypatch.setattr(TritonLayer, "attended", lambda layer, q, wrong=wrong: Attended(q, wrong * q, None, None))
        with pytest.raises(UserError, match="fp16, 2-bit per token"):
            bench_kernels.check("tiny", torch.device("cpu"), [torch.float16])


@pytest.mark.whole
def test_without_a_gpu_the_benchmark_says_that_nothing_can_be_timed(monkeypatch, run):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "nothing can be timed" in run(bench_kernels, "bench")[2]
