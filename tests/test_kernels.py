"""The Triton kernels in the interpreter, each beside torch.

The oracle of an attention is `expected`: rows as the codecs' own `decode` gives them, RoPE and
softmax in float64, a loop over kept rows. It shares nothing with kernels.py. What is decoded has
to agree bit for bit; sums in fp32 to 1e-4, of outputs of size 1; where operands are rounded to
fp16, as a GPU does, to 4e-3.
"""
import math
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

triton = pytest.importorskip("triton")
import bench_kernels  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.runtime.interpreter import InterpretedFunction  # noqa: E402

import kernels  # noqa: E402
from tinykv import UserError, triton_cache  # noqa: E402
from tinykv.cache import CachedRows, KVCache  # noqa: E402
from tinykv.calibrate import calibrate  # noqa: E402
from tinykv.codecs import Pair  # noqa: E402
from tinykv.codecs.affine import Affine  # noqa: E402
from tinykv.codecs.base import TERNARY, Codec, Exact, pack, unpack  # noqa: E402
from tinykv.codecs.clipped import ClippedGroups  # noqa: E402
from tinykv.codecs.codebook import Codebook  # noqa: E402
from tinykv.codecs.nonuniform import NonUniform  # noqa: E402
from tinykv.methods import antkv  # noqa: E402
from tinykv.methods.base import Method  # noqa: E402
from tinykv.methods.registry import METHODS  # noqa: E402
from tinykv.model import Llama, LlamaConfig, Rope  # noqa: E402
from tinykv.triton_cache import TritonCache, TritonLayer  # noqa: E402

CLOSE = {"rtol": 1e-4, "atol": 1e-4}


# ---- codecs with tables of random numbers

def affine(bits, axis="token", group=None, formula="offset", static=False):
    def make(heads, width):
        codec = Affine(bits, width, axis, group, formula, static)
        if static:
            codec.set_range(-1 - torch.rand(heads, width), 1 + torch.rand(heads, width))
        return codec
    return make


def nonuniform(bits, axis, outliers):
    def make(heads, width):
        codec = NonUniform(bits, heads, width, axis, outliers)
        codec.levels = torch.linspace(-1, 1, 2 ** bits).pow(3).half()
        codec.set_range(-1 - torch.rand(heads * width), 1 + torch.rand(heads * width))
        return codec
    return make


def clipped(bits, metadata="fp8"):
    def make(heads, width):
        codec = ClippedGroups(bits, heads, width, 16, metadata, reorder=False)
        # groups of any size, across heads
        codec.regroup(torch.randint(0, heads * width // 16, (heads * width,)))
        return codec
    return make


def book(n, m, shared=False):
    def make(heads, width):
        codec = Codebook(n, m, heads, width)
        codec.centroids = torch.randn(1 if shared else codec.places, m, n).half()
        return codec
    return make


def exact(heads, width):
    return Exact()


CODECS = {
    "exact": exact,
    **{f"{b:g} bits per token": affine(b) for b in (1, 1.5, 2, 3, 4, 8)},
    **{f"{b:g} bits per token in groups": affine(b, group=16) for b in (1, 1.5, 2, 3, 4, 8)},
    **{f"{b:g} bits per channel, {g} tokens": affine(b, "channel", g) for b, g in
       ((1, 32), (2, 128), (4, 16), (8, 48), (3, 32), (1.5, 32), (2, 8), (4, 5))},
    "4 bits static per token": affine(4, static=True),
    "2 bits static per token in groups": affine(2, group=16, static=True),
    "2 bits static per channel": affine(2, "channel", static=True),
    "3 bits static per channel": affine(3, "channel", static=True),
    "4 bits integer zero": affine(4, formula="integer-zero"),
    "2 bits integer zero per channel": affine(2, "channel", 32, "integer-zero"),
    "3 bits integer zero static": affine(3, "channel", None, "integer-zero", True),
    **{f"{b} bits nonuniform per {a}, {o:.0%} out": nonuniform(b, a, o) for b, a, o in
       ((2, "channel", 0.05), (3, "channel", 0), (3, "token", 0.05), (4, "token", 0))},
    "2 bits clipped": clipped(2), "1.5 bits clipped": clipped(1.5),
    "3 bits clipped fp16": clipped(3, "fp16"),
    **{f"d{n}m{m}{' shared' * s}": book(n, m, s) for n, m, s in
       ((1, 16, False), (2, 256, False), (4, 256, True), (8, 512, False), (16, 2048, False),
        (32, 4096, True))},
}


def divides(name, width):
    """Whether a head of `width` channels is whole vectors; all other codecs take any."""
    return not name.startswith("d") or width % int(name[1:].split("m")[0]) == 0


class Plain(Method):
    """Codecs, and kept tokens as they are told: {kind: (tokens of each head, ...)}."""

    def __init__(self, k, v, heads, width, rope="post", recent=0, block=1, v_block=None, kept=None):
        self.codecs, self.rope = [Pair(CODECS[k](heads, width), CODECS[v](heads, width))], rope
        self.recent, self.block, self.v_block, self.kept = recent, block, v_block, kept or {}

    def keep_keys(self, layer_cache, n):
        return self.told("k", layer_cache)

    def keep_values(self, layer_cache, n):
        return self.told("v", layer_cache)

    def told(self, kind, layer_cache):
        if kind not in self.kept:
            return None
        return torch.tensor(self.kept[kind]).expand(len(layer_cache.keys.recent), -1, -1)


def layer_of(method, heads, width, batch, length, new, dtype=torch.float16, window=None):
    """A TritonLayer at the moment of reading: all but `new` of `length` tokens went through it,
    the new ones wait.
    """
    config = LlamaConfig(9, 8, 8, 1, heads, heads, width, 4096)
    layer = TritonLayer(0, method, Rope(config), "stream", None, None, window)
    # not contiguous, as attention's are
    rows = torch.randn(2, batch, length, heads, width).to(dtype).transpose(2, 3)
    for part in (torch.arange(length - new), torch.arange(length - new, length)):
        if len(part):
            layer.append(*rows[:, :, :, part], part)
            if part[-1] < length - 1:
                layer.quantize()
    return layer


def turned(x, positions, rope):
    """RoPE in float64: x (..., T, d), positions (T)."""
    angle = positions[:, None].double() * rope.freq.double()
    a, b = x.double().chunk(2, dim=-1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)


def read(part):
    """All rows of a part (B, Hkv, S, d) in float64."""
    rows = part.recent.double()
    if part.n_coded:
        rows = torch.cat([part.codec.decode(part.codes).double(), rows], dim=2)
    rows = rows.clone()
    if part.kept_positions is not None:
        B, Hkv, n, _ = part.kept_rows.shape
        for b in range(B):
            for h in range(Hkv):
                for i, at in enumerate(part.kept_positions.expand(B, Hkv, n)[b, h].tolist()):
                    if at >= 0:
                        rows[b, h, at] = part.kept_rows[b, h, i].double()
    return rows


def expected(q, layer, window=None):
    """Output (B, H, T, d) and log-sum-exp (B, H, T) in float64."""
    K, V = read(layer.keys), read(layer.values)
    T, S, R = q.shape[2], K.shape[2], q.shape[1] // K.shape[1]
    if layer.method.rope == "pre":
        K = turned(K, torch.arange(S), layer.rope)
    K, V = K.repeat_interleave(R, 1), V.repeat_interleave(R, 1)
    s = q.double() @ K.transpose(-2, -1) / math.sqrt(q.shape[-1])
    for t in range(T):
        at = S - T + t
        s[:, :, t, at + 1:] = -math.inf
        if window:
            s[:, :, t, :max(0, at - window + 1)] = -math.inf
    return s.softmax(-1) @ V, s.logsumexp(-1)


def same(layer, R=2, T=1, window=None, dtype=torch.float32, **close):
    """The kernels' attention of random queries is the oracle's."""
    B, Hkv, _, d = layer.keys.recent.shape
    q = torch.randn(B, Hkv * R, T, d).to(dtype)
    layer.window = window
    out, lse, _, _ = layer.attention(q)
    want, want_lse = expected(q, layer, window)
    assert out.shape == q.shape and out.dtype == dtype
    close = {**CLOSE, **close}
    torch.testing.assert_close(out.double(), want, **close)
    torch.testing.assert_close(lse.double(), want_lse, **close)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def prepared_once():
    """A launch in the interpreter prepares triton.language; each call of a function within it does
    so again, 0.2 ms, and is spared that here: half of this file's time."""
    original, prepared = InterpretedFunction.__call__, {kernels.__name__}

    def call(self, *args, **kwargs):
        if self.fn.__module__ in prepared:
            return self.rewrite()(*args, **kwargs)
        prepared.add(self.fn.__module__)  # one of Triton's own modules, which no launch prepares
        return original(self, *args, **kwargs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedFunction, "__call__", call)
        yield


# ---- KVSink's scores

@pytest.mark.parametrize("T,k", [(1, 5), (3, 5), (30, 7), (64, 64), (200, 5), (257, 1)])
def test_topk(T, k):
    """Of 64 tokens a program; with ties, across programs, too; and of a slice of a larger
    tensor.
    """
    hidden = torch.randn(2, T, 12).round().half()[..., 2:10]
    found, lines = kernels.topk_outliers(hidden, 3, k, N=64), kernels.topk_lines(hidden, 3, k)
    for got, want in zip(found, lines):
        assert torch.equal(got, want) and got.shape == (2, min(k, T))


def test_topk_are_kvsinks():
    hidden = torch.randn(2, 30, 8).round()  # with ties
    method = METHODS["kvsink"](config(2), preserve=7, emergence_layer=0, outlier_channel=3)
    cache = SimpleNamespace(shared=SimpleNamespace())
    cache.layers = [SimpleNamespace(length=30), SimpleNamespace(length=30)]
    method.begin(cache)
    method.observe(cache, 0, hidden)
    assert torch.equal(kernels.topk_outliers(hidden, 3, 7)[1], cache.shared.sinks.long())


# ---- decoding, bit for bit

@triton.jit
def write_rows(rows, out, T, h, N: tl.constexpr):
    words = ()
    for j0 in range(0, T, N):
        j = j0 + tl.arange(0, N)
        ok = j < T
        if rows.fold != "":
            words = kernels.words_of(rows, 1, h, j, ok)
        for i in tl.static_range(rows.n_planes):
            channel, there = kernels.channels_of(rows, i)
            if rows.fold == "":
                x = kernels.decoded(rows, 1, h, j0, j, ok, i)
            else:
                column = channel // rows.grid.channels
                scale, zero = kernels.grid_of(rows.grid, 1, h, j0, j, ok, column, there)
                low = kernels.TO_INTEGER * 0.5 ** kernels.of_plane(rows.planes, i, "low")
                x = kernels.codes_of_plane(rows, words, i).to(tl.float32) * low * scale + zero
            tl.store(out + j[:, None] * rows.width + channel[None], x, ok[:, None] & there[None])


QUANTIZED = [name for name in CODECS if name != "exact"]


@pytest.mark.one_in(11)
@pytest.mark.parametrize("name, width", [
    (name, width) for name in QUANTIZED for width in (32, 80, 128) if divides(name, width)])
def test_rows_are_decoded_bit_for_bit(name, width):
    """The second head of the second sequence, from codes that lie inside a larger tensor."""
    codec, T = CODECS[name](2, width), 67
    codes = codec.encode(torch.randn(2, 2, T, width).half())
    want = codec.decode(codes)[1, 1]
    codes.packed = torch.cat([codes.packed[:, :, :3], codes.packed, codes.packed[:, :, :2]],
                             dim=2)[:, :, 3:-2]
    rows = triton_cache.ROWS[type(codec)](codec, codes, "k", 1)
    N = triton_cache.tiling(rows, rows, 1, 1).N
    out = torch.full((T, width), math.nan)
    write_rows[1,](rows, out, T, 1, N)
    assert torch.equal(out, want.float())


def test_three_levels_are_looked_up():
    byte = torch.arange(243, dtype=torch.uint8)
    found = triton_cache.ternary_table(byte.device).int()[:243, None] >> torch.arange(0, 10, 2) & 3
    assert torch.equal(found.to(torch.uint8), unpack(byte[:, None], TERNARY, 5))


def test_the_bits_of_a_small_integer_are_a_small_number():
    code = torch.arange(1024)
    assert torch.equal(kernels.number_lines(code).double() * kernels.TO_INTEGER.value, code.double())


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_a_gpu_unpacks_two_words_at_once(bits):
    """The arithmetic of `two_words`, which the interpreter cannot run, finds the codes of two
    words in their channels, `low` bits up."""
    codes = torch.randint(0, 2 ** bits, (1, 1, 1, 512 // bits))
    packed = pack(codes, bits)  # 64 bytes
    words, fields = triton_cache.planes_of(packed, bits, codes.shape[3], codes.shape[3])
    assert words.dtype == torch.uint16 and len(fields["planes"]) == 16 // bits
    pairs = words.int().flatten().unflatten(0, (-1, 2))  # (16, 2)
    pairs = pairs[:, 0] | pairs[:, 1].long() << 16  # (16)
    for i, plane in enumerate(fields["planes"]):
        shift, mask = re.search(r"\$1, (\d+); and.b32 .*, (0x[0-9a-f]+);",
                                kernels.two_words(bits, fields["planes"], i)).groups()
        both = pairs >> int(shift) & int(mask, 16)
        found = torch.stack([both % 2 ** 16, both >> 16], dim=1).flatten()  # (32)
        assert found.max() < 1024
        want = codes.flatten()[plane.channel::fields["step"]][:32]
        assert torch.equal(found, want << plane.low)


@pytest.mark.parametrize("bits", triton_cache.BITS)
@pytest.mark.parametrize("width, piece", [(128, 128), (128, 64), (128, 32), (128, 16), (64, 32),
                                          (80, 80), (80, 40), (96, 32), (32, 16)])
def test_a_plane_is_of_one_piece(bits, width, piece):
    """Planes hold each channel's code once, and no plane channels of two groups or two halves."""
    codes = torch.randint(0, 3 if bits == TERNARY else 2 ** bits, (1, 1, 1, width))
    data, fields = triton_cache.planes_of(pack(codes, bits), bits, width, piece)
    # 96 channels, 2 bits: the first bits of all bytes are 24 channels, and these no part of a group
    assert (data is None) == (bits == TERNARY and piece < width
                              or (width, piece) == (96, 32) and bits in (1, 2, 4))
    if data is None:
        return
    row, found = data.flatten().int(), {}
    if bits == 3:
        row = row[0::3] | row[1::3] << 8 | row[2::3] << 16
    elif bits == TERNARY:
        row = triton_cache.ternary_table(row.device).int()[row]
    for plane in fields["planes"]:
        words = row[plane.slice * fields["words"]:][:fields["words"]]
        channels = [plane.channel + n * fields["step"] for n in range(len(words))]
        assert len({channel // piece for channel in channels if channel < width}) == 1
        mask = 2 ** math.ceil(bits) - 1
        assert mask << plane.low < 1024  # a subnormal number
        read = (words >> plane.shift + plane.low) & mask
        found |= dict(zip(channels, read.tolist()))
    assert [found[channel] for channel in range(width)] == codes.flatten().tolist()
    firsts = [plane.channel // piece for plane in fields["planes"]]
    assert firsts == sorted(firsts)  # group by group


def test_scales_leave_the_products():
    """Each of `fold_lines` is what decoded rows give."""
    q, p, c = torch.randn(3, 8), torch.rand(3, 5), torch.randint(0, 4, (5, 8)).float()
    (s, z), (S, Z) = torch.randn(2, 5, 1), torch.randn(2, 1, 8)
    by_token, by_channel, output = kernels.fold_lines(q, p, c, s, z, S, Z)
    torch.testing.assert_close(by_token, q @ (c * s + z).T)
    torch.testing.assert_close(by_channel, q @ (c * S + Z).T)
    torch.testing.assert_close(output, p @ (c * s + z))


# ---- attention

@pytest.mark.one_in(9)
@pytest.mark.parametrize("rope", ["post", "pre"])
@pytest.mark.parametrize("name", CODECS)
def test_attention_reads_every_codec(name, rope):
    """As keys, before and after RoPE; as values with keys of another."""
    other = "4 bits per token" if rope == "post" else "exact"
    k, v = (name, other) if rope == "pre" else (name, name)
    heads, coded = (2, 30) if rope == "pre" else (1, 40)
    same(layer_of(Plain(k, v, heads, 32, rope, block=coded), heads, 32, 1, coded + 3, 1), R=1)


@pytest.mark.one_in(9)
@pytest.mark.parametrize("R", [1, 4, 8])
@pytest.mark.parametrize("width", [32, 64, 80, 128])
def test_head_sizes_and_groups_of_query_heads(width, R):
    rope = "pre" if R == 4 else "post"
    same(layer_of(Plain("2 bits static per channel", "4 bits per token", 2, width, rope, 4, 8), 2,
                  width, 2, 45, 1), R)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 300])
def test_lengths_around_the_borders_of_a_tile(length):
    same(layer_of(Plain("2 bits per token", "3 bits per token", 1, 32), 1, 32, 1, length, 1))
    same(layer_of(Plain("2 bits per channel, 128 tokens", "exact", 1, 32, block=128), 1, 32, 1,
                  length, 1))


@settings(max_examples=5)
@given(st.data())
def test_any_shape(data):
    draw = data.draw
    heads, batch = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    R = draw(st.sampled_from([1, 2, 3]))
    width, length = draw(st.sampled_from([32, 48])), draw(st.integers(1, 140))
    names = [name for name in CODECS if not name.startswith("d") or "32" not in name]
    new = draw(st.integers(1, min(length, 40)))
    method = Plain(draw(st.sampled_from(names)), draw(st.sampled_from(names)), heads, width,
                   draw(st.sampled_from(["pre", "post"])), draw(st.integers(0, 9)),
                   draw(st.integers(1, 70)), draw(st.sampled_from([None, 1, 7])))
    window = draw(st.sampled_from([None, None, 1, 20, 64, 200]))
    same(layer_of(method, heads, width, batch, length, new), R, new, window)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("window", [None, 5, 64])
@pytest.mark.parametrize("new", [7, 23])
def test_new_queries_see_no_later_key(new, window):
    method = Plain("2 bits per token", "2 bits per token", 1, 32, "pre", block=50)
    same(layer_of(method, 1, 32, 1, 105, new), 3, new, window)


def test_pieces_of_a_long_text_are_put_together(monkeypatch):
    monkeypatch.setattr(triton_cache, "programs", lambda device, warps: 200)
    same(layer_of(Plain("1 bits per token", "4 bits per token", 1, 32, block=100), 1, 32, 1, 1100,
                  1), 4)


KEPT = {"both": {"k": [[2, 40, -1, 64]], "v": [[2, 40, -1, 64]]},
        "own": {"k": [[0, 5, 69], [1, 63, -1]], "v": [[5, -1, 7, 64], [64, 2, 1, 0]]},
        "keys": {"k": [[3, 9]]}, "values": {"v": [[65, 0], [7, 8]]}}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("rope", ["post", "pre"])
@pytest.mark.parametrize("kept", KEPT)
def test_kept_rows_take_their_slots(kept, rope):
    """Also where the two heads, or keys and values, do not keep the same tokens; a token counts
    once.
    """
    method = Plain("1 bits per token", "2 bits per token", 2, 32, rope, recent=1, block=70,
                   kept=KEPT[kept])
    layer = layer_of(method, 2, 32, 2, 75, 3)
    layer.keys.recent[:] /= 2
    for part in (layer.keys, layer.values):
        if part.kept_rows is not None:
            part.kept_rows += 1  # so that it matters
    same(layer, 2, 3)


def test_more_kept_rows_than_a_tile():
    kept = {"k": [list(range(0, 90))], "v": [list(range(5, 95))]}
    layer = layer_of(Plain("1 bits per token", "1 bits per token", 1, 32, block=100, kept=kept), 1,
                     32, 1, 101, 1)
    layer.values.kept_rows += 1
    same(layer)


def test_no_token_counts_twice():
    """All values 1: whatever the weights, the output is 1."""
    layer = layer_of(Plain("2 bits per token", "exact", 2, 32, recent=1, block=70,
                           kept=KEPT["own"]), 2, 32, 1, 75, 1)
    layer.values.codes.packed[:], layer.values.recent[:], layer.values.kept_rows[:] = 1, 1, 1
    out = layer.attention(torch.randn(1, 4, 1, 32)).out
    torch.testing.assert_close(out, torch.ones_like(out))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_what_the_model_computes_in(dtype):
    cached = torch.float16 if dtype == torch.float32 else dtype
    method = Plain("4 bits per token", "exact", 2, 32, "pre", recent=3, block=60)
    close = {"rtol": 1e-3, "atol": 1e-3}
    if dtype == torch.bfloat16:
        close = {"rtol": 2 ** -7, "atol": 1e-2}
    same(layer_of(method, 2, 32, 1, 75, 1, cached), 2, 1, None, dtype, **close)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("k,v,rope", [
    ("2 bits per token", "2 bits per token", "post"), ("exact", "exact", "post"),
    ("2 bits per channel, 128 tokens", "4 bits per token in groups", "post"),
    ("1 bits per token", "1.5 bits per token", "pre"), ("d8m512", "d8m512", "pre")])
def test_products_of_fp16_numbers(k, v, rope, monkeypatch):
    """As on a GPU: operands rounded to fp16, of which codes are the smallest subnormal ones."""
    monkeypatch.setattr(triton_cache, "product_type", lambda *args: torch.float16)
    same(layer_of(Plain(k, v, 2, 64, rope, block=70), 2, 64, 1, 75, 1), rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("bits", [8, 4])
def test_small_values_behind_a_sink(bits, monkeypatch):
    """Products of fp16 numbers: weights of e**-10 times scales of 1e-4 are too small for these,
    unless lifted.
    """
    monkeypatch.setattr(triton_cache, "product_type", lambda *args: torch.float16)
    layer = layer_of(Plain("exact", f"{bits} bits per token", 1, 32, block=300), 1, 32, 1, 301, 1)
    rows = 0.02 * torch.randn(1, 1, 300, 32)
    rows[:, :, 0] *= 1e-3  # a sink has next to no value
    layer.values.codes = CODECS[f"{bits} bits per token"](1, 32).encode(rows.half())
    layer.keys.codes.packed[:, :, 0] = 5.0
    q = torch.full((1, 1, 1, 32), 0.35)  # the sink's score is 10, and the others' about 0
    out, want = layer.attention(q).out.double(), expected(q, layer)[0]
    assert (out - want).norm() < 0.01 * want.norm()


def test_the_torch_lines_are_the_kernels():
    """attend_lines piece by piece, then merge_lines, are the kernels' output."""
    layer = layer_of(Plain("exact", "exact", 2, 32, block=90), 2, 32, 1, 100, 5)
    q, (K, V) = torch.randn(1, 2, 5, 32), (layer.keys.read(), layer.values.read())
    pieces = [kernels.attend_lines(q, K.float(), V.float(), a, b, 60) for a,
              b in ((0, 30), (30, 64), (64, 100))]
    out, lse = kernels.merge_lines(*(torch.stack(x) for x in zip(*pieces)))
    layer.window = 60
    got, got_lse, _, _ = layer.attention(q)
    torch.testing.assert_close(got, out, **CLOSE)
    torch.testing.assert_close(got_lse, lse, **CLOSE)


# ---- anchor scores

def log_sum_exp(q, k, window=None):
    """Of each query's scores, (B, H, T)."""
    return torch.cat([scores.logsumexp(-1) for _, scores in antkv.score_tiles(q, k, window)], dim=2)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("T,S,window",
                         [(1, 1, None), (1, 65, None), (64, 64, None), (65, 65, None),
                          (30, 130, None), (70, 70, 20), (5, 100, 64)])
@pytest.mark.parametrize("heads,R,width", [(2, 1, 32), (1, 4, 80)])
def test_anchor_scores(T, S, window, heads, R, width):
    q = torch.randn(2, heads * R, T, width)
    k = torch.randn(2, S, heads, width).half().transpose(1, 2)
    lse = log_sum_exp(q, k, window)
    for got, want in zip(triton_cache.anchor_scores(q, k, lse, window),
                         antkv.anchor_scores(q, k, window)):
        torch.testing.assert_close(got, want, **CLOSE)


def test_anchor_scores_of_the_newest_keys_alone():
    q, k = torch.randn(1, 4, 20, 32), torch.randn(1, 2, 150, 32)
    lse = log_sum_exp(q, k)
    for got, want in zip(triton_cache.anchor_scores(q, k[:, :, 90:], lse),
                         antkv.anchor_scores(q, k)):
        torch.testing.assert_close(got, want[:, :, 90:], **CLOSE)


def test_slots_are_mapped_anew_where_something_is_coded_or_kept():
    """Of the coded tokens; a kept one that is recent has no place among them yet."""
    def kept():
        coded = layer.slots(layer.keys, 1)[0, 0, :layer.keys.n_coded].tolist()
        return {i: row for i, row in enumerate(coded) if row >= 0}
    layer = layer_of(Plain("2 bits per token", "exact", 2, 32, block=20,
                           kept={"k": [[1, 30, -1]]}), 2, 32, 1, 55, 1)
    assert layer.keys.n_coded == 40 and kept() == {1: 0, 30: 1}
    assert layer.slots(layer.keys, 1) is layer.slots(layer.keys, 1)
    triton_cache.keep(layer.keys, torch.tensor([[[50, 1]]]))
    assert kept() == {1: 1}
    layer.keys.quantize(15)
    assert layer.keys.n_coded == 55 and kept() == {1: 1, 50: 0}


# ---- methods, in a model

def config(layers, **more):
    return LlamaConfig(41, 32, 48, layers, 4, 2, 16, 256, bos_token_id=1, **more)


def tiny(layers=2, **more):
    torch.manual_seed(1)
    model = Llama(config(layers, **more))
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.normal_(std=1.5 * p.shape[1] ** -0.5)
    return model.requires_grad_(False)


class Twice(TritonCache):
    """Asks the kernels and torch the same, and goes on with what torch says: a difference would
    change later codes.
    """

    def reset(self):
        super().reset()
        self.largest = 0.0

    def attend(self, layer, q, k, v, positions):
        out = super().attend(layer, q, k, v, positions)
        K, V = self.twin.update(layer, q, k, v, positions)
        q, R = self.rope.rotate(q, positions), q.shape[1] // K.shape[1]
        j, at = torch.arange(K.shape[2])[None], positions[:, None]
        mask = (j <= at) & (j > at - (self.config.sliding_window or K.shape[2]))
        want = torch.nn.functional.scaled_dot_product_attention(
            q, K.repeat_interleave(R, 1), V.repeat_interleave(R, 1), attn_mask=mask)
        self.largest = max(self.largest, (out - want).abs().max().item())
        mine, twin = self.layers[layer], self.twin.layers[layer]
        for one, two in ((mine.keys, twin.keys), (mine.values, twin.values)):
            for name in ("kept_positions", "kept_rows"):
                same_or_none(getattr(one, name), getattr(two, name), rtol=0, atol=0)
            for name in ("recent_scores", "kept_scores"):
                same_or_none(getattr(one, name), getattr(two, name), rtol=1e-2, atol=1e-3)
            assert one.codes is None or torch.equal(one.codes.packed, two.codes.packed)
        return want

    def observe(self, layer, hidden):
        super().observe(layer, hidden)
        self.twin.observe(layer, hidden)


def same_or_none(one, two, **close):
    assert (one is None) == (two is None)
    if one is not None:
        torch.testing.assert_close(one, two, **close)


SMALL = {"kvsink": {"emergence_layer": 0, "outlier_channel": 5},
         "kivi": {"group_size": 16, "recent": 4},
         "ott": {"group_size": 16, "recent": 4, "outlier_num": 2, "extra_pool": 2,
                 "skip_layers": 1},
         "skvq": {"recent": 4, "v_bits": 1.5, "clip": "none"}, "cq": {"vq": "d4m8"},
         "intactkv": {"k_bits": 2, "v_bits": 2},
         "antkv": {"vq": "d4m8", "anchors": "10%", "recent": 4}}


def method_of(model, name, **more):
    method = METHODS[name](model.config, **{**SMALL.get(name, {}), **more})
    calibrate(model, method, torch.randint(0, 41, (3, 40),
                                           generator=torch.Generator().manual_seed(2)))
    method.block = min(method.block, 16)
    if method.prefix:
        method.prefix.fill(model, model)
    return method


@pytest.fixture
def tall(monkeypatch):
    """64 rows of queries in a tile, where registers allow a GPU 16: the interpreter's time is by
    the tile.
    """
    real = triton_cache.tiling
    monkeypatch.setattr(triton_cache, "tiling", lambda *args: real(*args)._replace(M=64))


@pytest.mark.one_in(11)
@pytest.mark.usefixtures("tall")
@pytest.mark.parametrize("protocol", ["paper", "stream"])
@pytest.mark.parametrize("name", METHODS)
def test_every_method_on_both_backends(name, protocol):
    """The same codes, kept and scores; outputs, of size 1 to 5, within what rounding decoded rows
    to fp16 changes.
    """
    model = tiny(sliding_window=24 if name in ("antkv", "kivi") else None)
    method = method_of(model, name)
    cache = Twice(model, method, protocol)
    cache.twin = KVCache(model, method, protocol)
    tokens = torch.randint(0, 41, (1, 27 if protocol == "paper" else 33))
    if method.prefix:
        tokens[:, 0] = 1
    model.use_attention("triton")
    chunks = [tokens.shape[1]] if protocol == "paper" else [tokens.shape[1] - 17, 16, 1]
    for chunk in tokens.split(chunks, dim=1):
        model(chunk, cache)
    assert 0 < cache.largest < 5e-3
    assert cache.nbytes == cache.twin.nbytes and cache.layers[0].keys.n_coded


@pytest.mark.one_in(2)
@pytest.mark.usefixtures("tall")
@pytest.mark.parametrize("name", ["fp16", "kivi", "antkv"])
def test_logits_agree(name):
    """One layer, whose codes cannot differ; the logits' size is 3."""
    model, tokens = tiny(1), torch.randint(0, 41, (1, 40))
    method = method_of(model, name)
    for protocol in ("paper", "stream"):
        one, two = KVCache(model, method, protocol), TritonCache(model, method, protocol)
        torch.testing.assert_close(triton_logits(model, tokens, two), model(tokens, one), rtol=0,
                                   atol=1e-2)
    step = tokens[:, :1]
    torch.testing.assert_close(triton_logits(model, step, two), model(step, one), rtol=0, atol=1e-2)


def triton_logits(model, tokens, cache):
    model.use_attention("triton")
    logits = model(tokens, cache)
    model.use_attention("fused")
    return logits


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["kivi", "pfn", "antkv"])
def test_generation_decodes_no_row_and_codes_each_once(name, monkeypatch):
    model, prompt = tiny(1), torch.randint(0, 41, (1, 28))
    method, coded = method_of(model, name), []
    want = model.generate(prompt, 6, KVCache(model, method))

    def never(*args):
        raise AssertionError("rows were decoded")
    real = CachedRows.quantize

    def quantize(self, n):
        coded.append(n)
        return real(self, n)
    monkeypatch.setattr(CachedRows, "quantize", quantize)
    monkeypatch.setattr(CachedRows, "read", never)
    for cls in (Codec, Exact, Affine, Codebook):
        monkeypatch.setattr(cls, "decode", never)
    model.use_attention("triton")
    cache = TritonCache(model, method)
    assert torch.equal(model.generate(prompt, 6, cache), want)
    assert sum(coded) == cache.layers[0].keys.n_coded + cache.layers[0].values.n_coded > 0


# ---- what is refused

def test_a_cpu_without_the_interpreter_is_named(monkeypatch):
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    with pytest.raises(UserError, match="needs a GPU, and the model is on cpu"):
        TritonCache(tiny(), METHODS["fp16"](config(2)))


class OwnScores(antkv.AnTKV):
    def score(self, layer_cache, q, K):
        raise AssertionError("it was asked")


class OwnPace(antkv.AnTKV):
    v_block = 1


class OwnCodec(Method):
    class Zeros(Affine):
        pass

    def __init__(self, config):
        self.codecs = [Pair(self.Zeros(2, 16), Exact())]


class FiveBits(Method):
    def __init__(self, config):
        self.codecs = [Pair(Affine(5, 16), Exact())]


@pytest.mark.parametrize("cls,words", [(OwnCodec, "OwnCodec quantizes by Zeros"),
                                       (OwnScores,
                                        "OwnScores has its own `score`, which reads all keys"),
                                       (OwnPace, "OwnPace quantizes values at another pace"),
                                       (FiveBits,
                                        "codes of 1, 1.5, 2, 3, 4, 8 and 16 bits; these have 5")])
def test_what_no_kernel_knows_is_named(cls, words):
    with pytest.raises(UserError, match=words):
        TritonCache(tiny(), cls(config(2)))


def test_vectors_of_three_are_named():
    wide = LlamaConfig(41, 32, 48, 1, 2, 2, 24, 64)
    with pytest.raises(UserError, match="vectors of 1, 2, 4, 8 ... channels; these have 3"):
        TritonCache(Llama(wide), METHODS["cq"](wide, vq="d3m8"))


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
    bench_kernels.bench_attention("tiny", [256], [1],
                                  ["fp16", "2-bit per token", "1-bit codebooks d8m256"], cpu)
    bench_kernels.bench_scores("tiny", [64], cpu)
    bench_kernels.bench_decoding(bench_kernels.config_of("tiny", positions=512), [256],
                                 ["2-bit per token"], cpu, 1, 2)
    out = capsys.readouterr().out
    assert out.count("2-bit per token") == 2 and "tok/s at 256" in out


@pytest.mark.whole
@pytest.mark.usefixtures("small")
def test_what_is_wrong_on_a_device_is_named(monkeypatch, capsys):
    """`check` finds every case near to torch; and says so of those that are not."""
    bench_kernels.check("tiny", torch.device("cpu"), [torch.float16])
    errors = [float(x) for line in capsys.readouterr().out.splitlines()[2:]
              for x in line.split()[-2:]]
    assert len(errors) == 8 and 0 < max(errors) < 2e-3
    for wrong in (0, math.nan):
        monkeypatch.setattr(TritonLayer, "attention", lambda self, q,
                            wrong=wrong: SimpleNamespace(out=wrong * q))
        with pytest.raises(UserError, match="wrong on this device for fp16, 2-bit per token"):
            bench_kernels.check("tiny", torch.device("cpu"), [torch.float16])


@pytest.mark.whole
def test_without_a_gpu_the_benchmark_says_that_nothing_was_measured(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["bench_kernels.py", "bench"])
    bench_kernels.main()
    assert "nothing was measured" in capsys.readouterr().out
