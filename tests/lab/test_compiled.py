"""The cache whose decoding step torch compiles, beside `expected` of told.py, which reads the same codes and kept rows:
to 1e-4 of numbers of size 1, as an angle of RoPE's is a sum of two; outputs of 16 bits are the nearest. Most tests call
the functions as they are (conftest.py): to compile them takes seconds.
"""
import copy
import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cases import model_of, tokens_of
from conftest import compile_for_real
from told import expected, logits_of, method_of, reads_the_same, text_of, told_layer, turned

import eval_ppl
from tinykv import UserError
from tinykv.cache import KVCache, LayerCache
from tinykv.codecs.affine import FORMULAS, Affine
from tinykv.codecs.base import Exact, Pair
from tinykv.codecs.clipped import ClippedGroups
from tinykv.codecs.codebook import Codebook
from tinykv.codecs.nonuniform import NonUniform
from tinykv.codecs.rotated import Rotated
from tinykv.evaluate import chunks_of
from tinykv.lab import compiled_cache
from tinykv.lab.compiled_cache import CompiledCache, CompiledLayer, check_compiler
from tinykv.lab.pieces import apart, pieces, rotation
from tinykv.methods.registry import METHODS
from tinykv.model import LlamaConfig, Rope


@pytest.fixture
def few(monkeypatch):
    """They are called from the first coded token on."""
    monkeypatch.setattr(compiled_cache, "LEAST", 1)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


# ---- a layer

def same(pair, heads, R, batch, length, dtype=torch.float32, close=1e-4, **told):
    """The output for the last of `length` tokens is the oracle's."""
    layer = told_layer(CompiledLayer, pair, heads, 16, batch, length, dtype=dtype, **told)
    q = torch.randn(batch, heads * R, 1, 16).to(dtype)
    out = layer.for_attention(q, length - 1)
    want, _ = expected(layer.rope.rotate(q, length - 1), layer)
    assert out.shape == q.shape and out.dtype == dtype
    torch.testing.assert_close(out.double(), want, rtol=close, atol=close)


KEPT = {"one for all": {"k": [[0, 3]], "v": [[0, 3]]}, "keys alone": {"k": [[2, 5, 2]]},
        "heads apart": {"k": [[0, 7, 7], [1, 2, 30]], "v": [[5, 5, 5], [3, 36, 0]]}}


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("kept", [None, *KEPT])
@pytest.mark.parametrize("rope", ["pre", "post"])
@pytest.mark.parametrize("R, batch, recent, block, v_block, window", [
    (1, 1, 0, 1, 1, None), (3, 2, 5, 8, 1, None), (2, 3, 9, 16, 8, 20), (2, 1, 50, 8, 8, 20), (4, 1, 0, 32, 1, 3)])
def test_a_layer_attends_to_what_it_reads(kept, rope, R, batch, recent, block, v_block, window):
    pair = Pair(Affine(2, 16, "channel", 8) if block > 1 else Affine(3, 16), Affine(2, 16, group_size=8))
    same(pair, 2, R, batch, 40, rope=rope, recent=recent, block=block, v_block=v_block, kept=KEPT.get(kept),
         window=window)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("rope", ["pre", "post"])
def test_rotated_rows(rope):
    """A rotation of the query commutes with no RoPE of the keys."""
    pair = Pair(Rotated(Affine(2, 16, "channel", 8), 16, scaled=True), Rotated(Affine(2, 16), 16))
    same(pair, 2, 2, 2, 40, rope=rope, recent=5, block=8, kept=KEPT["heads apart"])


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("length", [1, 2, 3, 5])
@pytest.mark.parametrize("kept", [None, {"k": [[0]], "v": [[0]]}])
def test_few_tokens(length, kept):
    same(Pair(Affine(2, 16), Exact()), 1, 2, 2, length, rope="pre", recent=1, kept=kept)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("dtype, close", [(torch.bfloat16, 2 ** -8), (torch.float16, 2 ** -11)])
def test_models_of_16_bits(dtype, close):
    same(Pair(Affine(4, 16), Affine(4, 16)), 2, 2, 2, 40, dtype, close, rope="pre", recent=5)


def test_angles_of_long_texts():
    """The sum of two angles is RoPE's angle to what fp32 has left of it at 16,384."""
    rope = Rope(LlamaConfig(9, 8, 8, 1, 2, 1, 16, 32768))
    K, q = torch.randn(1, 1, 16384, 16), torch.randn(1, 1, 1, 16)
    cos, sin = rope.cos_sin(0, 16384, "cpu")
    got = compiled_cache.scores(q, Exact(), Exact().encode(K), cos[:, 8:], sin[:, 8:])
    torch.testing.assert_close(got, q @ rope.rotate(K).transpose(-2, -1), rtol=0, atol=2e-3)


@pytest.mark.parametrize("name", METHODS)
def test_pieces_of_every_method(name):
    for codec in method_of(name).codecs[0]:
        same_numbers(codec, 2, 16)


def random_codec(rng):
    """A codec of any kind, of random settings -> it, heads, width and tokens; odd lengths, too."""
    heads, width = rng.choice([1, 2, 3, 5]), rng.choice([16, 32, 64])
    bits, group = rng.choice([1, 1.5, 2, 3, 4, 5, 6, 7, 8]), rng.choice([8, 16])
    codec = rng.choice([
        lambda: Exact(),
        lambda: Affine(bits, width, "token", group, rng.choice(FORMULAS), rng.random() < 0.5),
        lambda: Affine(bits, width, "channel", group, rng.choice(FORMULAS), rng.random() < 0.5),
        lambda: Rotated(Affine(bits, width, "channel", group), width, scaled=True),
        lambda: ClippedGroups(bits, heads, width, group, alpha=0.9, sensitivity="none"),
        lambda: NonUniform(int(bits), heads, width, rng.choice(["channel", "token"]), rng.choice([0, 0.1]), "none"),
        lambda: Codebook(rng.choice([2, 4, 8]), rng.choice([4, 16]), heads, width, "none"),
    ])()
    return codec, heads, width, rng.randint(1, 71)


@pytest.mark.one_in(7)
@pytest.mark.parametrize("seed", range(300))
def test_a_block_of_codes_is_what_decode_gives(seed):
    """Scores of queries in 16 bits, before RoPE or after it, and outputs: products with what `decode` gives."""
    rng = random.Random(seed)
    codec, heads, width, n = random_codec(rng)
    dtype, B, R = rng.choice([torch.float16, torch.bfloat16]), rng.choice([1, 2]), rng.choice([1, 3])
    x = torch.randn(B, heads, n, width)
    if codec.needs_text:
        codec.fit(torch.randn(2, heads, 128, width), torch.zeros(2, heads, 128, dtype=torch.bool))
    codes, rope = codec.encode(x), Rope(LlamaConfig(9, 8, 8, 1, heads, heads, width, 128))
    q, p = torch.randn(B, heads, R, width).to(dtype).float(), torch.rand(B, heads, R, n)
    cos, sin = rope.cos_sin(0, n, "cpu")
    tables = [x[:, width // 2:] for x in (cos, sin)] if rng.random() < 0.5 else []
    decoded = codec.decode(codes).double()
    K = turned(decoded, torch.arange(n), rope) if tables else decoded

    got = {"k": compiled_cache.scores(q, codec, codes, *tables), "v": compiled_cache.outputs(p, codec, codes)}
    if (more := apart(codec, codes)) is not None:
        got["k"] += compiled_cache.product(compiled_cache.sparse(*more, x.shape, n, "k", *tables), q)
        got["v"] += compiled_cache.product(compiled_cache.sparse(*more, x.shape, n, "v"), p)
    for kind, want in (("k", q.double() @ K.transpose(-2, -1)), ("v", p.double() @ decoded)):
        assert (got[kind] - want).abs().max() < 1e-5 * want.std(correction=0).clamp(min=1), codec


def same_numbers(codec, heads, width):
    x = torch.randn(2, heads, 48, width)
    if codec.needs_text and not codec.calibrated():
        codec.fit(x, torch.zeros(2, heads, 48, dtype=torch.bool))
    codes = codec.encode(x)
    got = pieces(codec, codes, width // 2).flatten(2, -3).flatten(-2).contiguous()  # (B, Hkv, n, d)
    want = codec.decode(codes).float()
    if (found := apart(codec, codes)) is not None:
        places, more = found
        got.view(-1)[places] += more
    if (turn := rotation(codec)) is not None:
        got = got @ turn
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


# ---- methods

@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("protocol, prompt", [("stream", None), ("stream", 12), ("paper", 12)])
@pytest.mark.parametrize("name", METHODS)
def test_every_method_reads_the_same(name, protocol, prompt):
    """Of texts that are read token by token. `antkv` chooses all the while."""
    tokens, first = text_of(name, 2, 40)
    first = max(first, prompt or 1)
    reads_the_same(CompiledCache, "compiled", model_of(2), method_of(name, choose="always"), tokens,
                   [first] + [1] * (40 - first), protocol, prompt)


def test_scores_decode_nothing(monkeypatch):
    """AnTKV's are sums of the weights that attention has: to decode all keys for them took most of a step."""
    monkeypatch.setattr(LayerCache, "read", None)
    monkeypatch.setattr(compiled_cache, "LEAST", 0)
    logits_of(CompiledCache, "compiled", model_of(2), method_of("antkv", choose="always"), tokens_of(1, 20), 1)


@pytest.mark.usefixtures("few")
def test_a_copy_goes_on_by_itself():
    """torch copies no sparse matrix, such as that of KVQuant's outliers."""
    model, tokens = model_of(2), tokens_of(2, 31)
    _, cache = logits_of(CompiledCache, "compiled", model, method_of("kvquant"), tokens[:, :30], 1)
    with torch.inference_mode():
        assert torch.equal(model(tokens[:, 30:], copy.copy(cache)), model(tokens[:, 30:], cache))


def test_an_evaluation_reads_token_by_token():
    model, sizes = model_of(2), []
    model.use_attention("compiled")
    cache = CompiledCache(model, method_of("kivi"))
    for chunk in chunks_of(tokens_of(1, 40), cache):
        model(chunk, cache)
        sizes.append(chunk.shape[1])
    assert sizes == [1] * 40


# ---- compiling

@pytest.fixture
def compiling(monkeypatch):
    """torch compiles; a function of how many graphs it has compiled since. Skipped where it cannot."""
    monkeypatch.setattr(torch, "compile", compile_for_real)
    check_compiler.cache_clear()
    try:
        check_compiler(torch.device("cpu"))
    except UserError as error:
        pytest.skip(str(error))
    torch.compiler.reset()
    compiled_cache.compiled.cache_clear()
    config = model_of(2).config
    monkeypatch.setattr(compiled_cache, "LEAST", 256 * config.num_key_value_heads * config.head_dim)  # 256 tokens
    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    yield lambda: graphs["unique_graphs"] - before
    compiled_cache.compiled.cache_clear()


@pytest.mark.parametrize("name", [name if name in ("kvsink", "kivi") else pytest.param(name, marks=pytest.mark.whole)
                                  for name in METHODS])
def test_one_loop_for_all_lengths(name, compiling):
    """`scores` and `outputs` are compiled once each, for all layers, lengths and caches, whatever is kept."""
    method = method_of(name)
    for T in (300, 500):
        tokens, first = text_of(name, 1, T)
        got, want = (logits_of(cls, way, model_of(2), method, tokens, [first] + [1] * (T - first))[0][:, 250:300]
                     for cls, way in ((CompiledCache, "compiled"), (KVCache, "fused")))
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)  # of logits of size 10
    assert compiling() == 2


def test_a_codec_s_loop_is_its_own(compiling, monkeypatch):
    """Which numbers of a graph are not constants, sizes of tokens, does not depend on the codecs before it: where bits
    and groups were not, a loop took 12 to 20 times as long. Nor is a text's second length compiled anew."""
    found = []

    def compile_fx(graph, inputs, config_patches):
        found.append([type(x) for x in inputs].count(torch.SymInt))
        return graph.forward
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    codecs = [Affine(2, 16), Affine(3, 16, group_size=8), Affine(2, 16, "channel", 32), Affine(4, 16, "channel", 16)]
    for alone in (True, False):
        for codec in codecs:
            if alone:
                torch.compiler.reset()
            for n in (512, 1024):
                rows = SimpleNamespace(codec=codec, n_coded=n, codes=codec.encode(torch.randn(1, 2, n, 16)))
                compiled_cache.run(compiled_cache.outputs, torch.rand(1, 2, 3, n), rows)
        torch.compiler.reset()
    assert len(found) == 8 and found[:4] == found[4:]


def test_without_a_compiler_a_line_says_so(run, monkeypatch):
    def fails(function):
        raise RuntimeError("\nno g++\nhere")
    monkeypatch.setattr(torch, "compile", fails)
    check_compiler.cache_clear()
    status, _, err = run(eval_ppl, "--attention", "compiled")
    assert status == 2 and err.count("\n") == 1 and "C++" in err and "--attention fused" in err and "no g++" in err


def test_a_compiled_cache_under_another_attention():
    """Of two texts, the output would pass for keys and values."""
    model = model_of(2)
    model.use_attention("fused")
    with pytest.raises(UserError, match="use_attention"):
        model(tokens_of(2, 1), CompiledCache(model, METHODS["kivi"](model.config)))


@pytest.mark.parametrize("program", ["eval_ppl.py", "train_intact.py", "docs/programs/benchmark.py"])
def test_threads_wait_asleep(program):
    """OMP_WAIT_POLICY is set when a program first asks for torch, which reads it once."""
    asked = ("import os, runpy, sys\n"
             "class Asked:\n"
             "    def find_spec(name, *others):\n"
             "        if name == 'torch':\n"
             "            sys.exit(os.environ.get('OMP_WAIT_POLICY') != 'PASSIVE')\n"
             "sys.meta_path.insert(0, Asked)\n"
             "runpy.run_path(sys.argv[1], run_name='__main__')")
    environ = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", asked, program], cwd=root, env=environ | {"PYTHONPATH": str(root)})
    assert done.returncode == 0
