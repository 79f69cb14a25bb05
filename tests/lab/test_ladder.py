"""docs/ladder/: each page prints the package's own figures, by code of its own."""
import json
import re
import runpy
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import train_intact
from docs.course import compiles
from docs.course.conftest import load
from eval_ppl import compare
from tinykv import hf
from tinykv.cache import KVCache, LayerCache
from tinykv.codecs.affine import Affine
from tinykv.codecs.clipped import ClippedGroups
from tinykv.codecs.codebook import Codebook
from tinykv.codecs.nonuniform import Histogram, NonUniform
from tinykv.hf import EMBEDDED
from tinykv.kmeans import kmeans
from tinykv.lab.data import load_windows
from tinykv.methods.antkv import anchor_scores
from tinykv.methods.fp16 import FP16
from tinykv.methods.kivi import KIVI
from tinykv.methods.ott import OTT
from tinykv.model import Rope

pytest.importorskip("triton")  # of two pages
from tinykv.lab.triton_cache import TritonCache  # noqa: E402

ROOT = Path(__file__).parents[2]
PAGES = sorted(ROOT.glob("docs/ladder/*.py"))
pytestmark = pytest.mark.usefixtures("interpreted_quickly")


@pytest.fixture
def printed(monkeypatch, capsys, tmp_path):
    """A function that runs a page, in another folder, with these numbers on its command line -> the words of each
    line."""
    def printed(page, *numbers):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [page, *map(str, numbers)])
        monkeypatch.setattr(sys, "path", sys.path[:])
        with torch.no_grad():  # a page turns gradients off; afterwards they are as they were
            runpy.run_path(str(ROOT / "docs" / "ladder" / page))
        assert Path(sys.path[0]) == ROOT
        return [line.split() for line in capsys.readouterr().out.splitlines()]
    return printed


def shorten(monkeypatch, length, most=16):
    """Texts of so many tokens, and so many of them at most, for a page's table."""
    def load_less(data, tokenizer, context, windows, split):
        return load_windows(data, tokenizer, length, min(windows, most), split)
    monkeypatch.setattr("tinykv.lab.data.load_windows", load_less)


def defined(page):
    """The module of what a page defines, above its table."""
    return load(ROOT / "docs" / "ladder" / page)


def measured(methods, **given):
    """[[label, perplexity, bits]], as a page prints them, of the package."""
    return [[row["label"], f"{row['ppl']:.3f}", f"{row['bits_true']:.2f}"] for row in compare(methods, **given)]


def test_sinks(printed, monkeypatch):
    """fp16, rtn, pfn, kvsink, and the bits that they store."""
    shorten(monkeypatch, 256, most=4)
    assert printed("1_sinks.py", 2) == measured("kvsink", windows=2, calib_windows=4, context=256)


def test_window(printed):
    """KIVI without a window of recent tokens, with one in small blocks, and as OTT has it."""
    rows = [measured("fp16,kivi", windows=1, protocol="stream", group_size=group, recent=recent)[1]
            for group, recent in ((128, 0), (32, 128), (128, 32))]
    assert [line[:3] for line in printed("2_window.py", 1)] == rows


def test_pool(printed):
    """OTT without a pool, which is KIVI, with a pool of one, and with its own."""
    rows = measured("fp16,ott", windows=1, outlier_num="0,1,3", protocol="stream", group_size=128, recent=32)[1:]
    assert [line[1:] for line in printed("3_pool.py", 1)] == [[n, *row[1:]] for n, row in zip("013", rows)]


def test_every_grid_is_finite():
    """Also the one that fp16 does not need, where a debugger stops first."""
    page = defined("1_sinks.py")
    exact = SimpleNamespace(stored={(0, "k"): torch.randn(2, 3, 40, 32)})
    assert all(x.isfinite().all() for x in page.calibrate(exact, page.fp16)[0, "k"])


def test_sinks_of_other_numbers():
    """A sink has either sign, and all heads of its text keep it."""
    h = torch.zeros(2, 40, 64)
    h[0, 7, 49], h[1, 9, 49], h[:, 20:, 3] = -90, 90, 200  # as large in another channel
    kept = torch.zeros(2, 3, 40, dtype=torch.bool)
    defined("1_sinks.py").kvsink(SimpleNamespace(outputs=[h, h]), 2, kept)
    assert kept[0, :, 7].all() and kept[1, :, 9].all() and kept.sum() == 2 * 3 * 5


@pytest.mark.parametrize("page, numbers, layer, method", [
    ("2_window.py", (32, 128), 0, partial(KIVI, group_size=128, recent=32)), ("3_pool.py", (3, 32, 128), 2, OTT)])
def test_a_growing_text_of_other_shapes(page, numbers, layer, method):
    """Several heads, chunks shorter than a block, keys of all sizes: as the package, chunk by chunk, and its bytes."""
    config = replace(hf.load_config(EMBEDDED), num_attention_heads=3, num_key_value_heads=3)
    torch.manual_seed(0)
    k, v = torch.randn(2, 2, 3, 400, 32)
    k = k * torch.rand(2, 3, 400, 1)
    ours = LayerCache(layer, method(config), Rope(config), "stream", SimpleNamespace())
    theirs = defined(page).Cache(Rope(config), *numbers)
    for begin in range(0, 400, 8):
        new = [x[:, :, begin:begin + 8] for x in (k, k, v)]
        want, found = ours.update(*new, begin), theirs.update(layer, *new, begin)
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(want, found))
    # 256 tokens are coded; the window has its mean
    numbers, waiting, both = 2 * 3 * 32, 32 + 127 / 2, (ours.keys, ours.values)
    held = 2 * 2 * numbers * waiting + sum(rows.codes.nbytes for rows in both) / 256 * (400 - waiting)
    if page == "3_pool.py":
        assert theirs.kept[2].sum() > 2 * 3 * 3  # some lost their place
        held += sum(rows.kept_positions.nbytes + rows.kept_rows.nbytes for rows in both)
    assert theirs.bits() == pytest.approx(8 * held / (2 * numbers * 400))


def test_groups(printed, monkeypatch):
    """SKVQ, one ingredient after another."""
    shorten(monkeypatch, 512, most=1)
    rows, settings = [], {"reorder": "off", "clip": "none", "metadata": "fp16", "recent": 0, "preserve": 0}
    settings |= {"protocol": "paper", "group_size": 16, "block": 128, "sensitivity": "none", "calib_windows": 1}
    for added in ({}, {"reorder": "on"}, {"clip": "centre"}, {"metadata": "fp8"}, {"preserve": 5},
                  {"recent": 128, "protocol": "stream"}):
        settings |= added
        rows += measured("fp16,skvq", windows=1, context=512, **settings)[1:]
    assert [row[1:] for row in printed("4_groups.py", 1)] == [row[1:] for row in rows]


def test_groups_of_other_shapes():
    """Groups cross heads, and have clips of their own: the package's codes, numbers and bytes."""
    page = defined("4_groups.py")
    torch.manual_seed(0)
    x = torch.randn(2, 3, 40, 32) * torch.rand(3, 1, 32)
    codec = ClippedGroups(2, 3, 32, 16, clip="centre", sensitivity="none")
    rows = x.transpose(1, 2).flatten(2)  # (B, T, C)
    codec.fit(x, torch.zeros(2, 3, 40, dtype=torch.bool))
    group, alpha = page.calibrate(rows, True, True, page.FP8)
    assert group.equal(codec.group.long()) and alpha.equal(codec.alpha.float()) and len(set(alpha.tolist())) > 2
    scale, zero = page.grid(rows, group, alpha, page.FP8)
    codes, want = page.encode(rows, scale, zero, group), codec.encode(x)
    assert codes.equal(want.packed[:, 0]) and codes.nbytes + scale.nbytes + zero.nbytes == want.nbytes
    read = page.decode(codes, scale, zero, group).unflatten(-1, (3, 32)).transpose(1, 2)
    assert torch.allclose(read, codec.decode(want), atol=1e-6)


def test_levels(printed, monkeypatch):
    """KVQuant, one ingredient after another. The package has no equal levels, so k-means is made to find them."""
    shorten(monkeypatch, 512, most=1)
    for name in ("tinykv.kmeans.kmeans", "tinykv.codecs.nonuniform.kmeans"):
        monkeypatch.setattr(name, lambda *given, **more: kmeans(*given, **more | {"tries": 1}))
    few = {"windows": 1, "context": 512, "calib_windows": 1}
    rows, settings = [], {"q_norm": "off", "sensitivity": "none", "outliers": 0.0, "preserve": 0}
    with monkeypatch.context() as patch:
        patch.setattr(Histogram, "levels", lambda *_: torch.linspace(-1, 1, 4).half())
        rows += measured("fp16,kvquant", **settings, **few)[1:]
    for added in ({}, {"sensitivity": "fisher-range"}, {"outliers": 100 / 32}, {"preserve": 1}):
        settings |= added
        rows += measured("fp16,kvquant", **settings, **few)[1:]
    assert [row[1:] for row in printed("5_levels.py", 1)] == [row[1:] for row in rows]


def test_levels_of_other_shapes():
    """Several heads share levels, and a row's outliers: what the package reads, and the bytes that it holds."""
    page = defined("5_levels.py")
    torch.manual_seed(0)
    x, rope = torch.randn(2, 3, 40, 32).half() * 3, SimpleNamespace(rotate=lambda K: K)
    x.requires_grad_().grad = torch.rand_like(x)
    kept, held, tables, want = torch.zeros(2, 3, 40, dtype=torch.bool), 0, {}, []
    kept[:, :, :2] = True
    for kind, axis in (("k", "channel"), ("v", "token")):
        codec = NonUniform(2, 3, 32, axis, 1 / 32, q_norm="off")
        codec.fit(x.detach(), kept, x.grad)
        tables[0, kind] = page.calibrate(kind, x, True, True, 1 / 32, 2)
        assert torch.allclose(tables[0, kind][1], codec.levels.float(), atol=1e-3)
        tables[0, kind] = tables[0, kind][0], codec.levels.float()
        codes = codec.encode(x.detach(), kept)
        want.append(codec.decode(codes).where(~kept[..., None], x.float()))
        held += codes.nbytes + 2 * 2 * (3 * 32 * 2 + 4)  # two texts' two tokens, and their places
    cache = page.Cache(rope, tables, 1 / 32, 2)
    found = cache.update(0, x.detach(), x.detach(), x.detach(), 0)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(want, found))
    assert cache.bits() == pytest.approx(8 * held / (2 * x.numel()))


@pytest.mark.parametrize("method, sensitivity", [("cq", "fisher"), ("antkv", "token")])
@pytest.mark.parametrize("n", [1, 8])
def test_weights_of_codebooks(n, method, sensitivity):
    """Of two texts, each clamped by itself."""
    page, gradient = defined("6_codebooks.py"), torch.randn(2, 3, 700, 16).exp()  # (B, Hkv, T, d)
    codec = Codebook(n, 2 ** n, 3, 16, sensitivity)
    want = [codec.weigh(g, torch.zeros(3, 700, dtype=torch.bool), g) for g in gradient]
    assert torch.allclose(page.weights(gradient, n, vars(page)[method]), torch.cat(want, dim=1))


def test_anchors_of_other_shapes():
    """A head of keys has its own, by all of its queries; those of its values are others."""
    torch.manual_seed(0)
    q, K = torch.randn(2, 6, 250, 16) * 3 * torch.rand(2, 6, 250, 1), torch.randn(2, 3, 250, 16)
    kept = torch.zeros(2, 2, 3, 250, dtype=torch.bool)
    defined("6_codebooks.py").antkv(q, K, kept)
    anchors = torch.stack(anchor_scores(q, K)).topk(3).indices  # (2, B, Hkv, 1% of T, rounded up)
    assert kept.equal(torch.zeros_like(kept).scatter(3, anchors, True))


def test_codebooks(printed, monkeypatch):
    """CQ with 1 to 8 channels for a code, and AnTKV; codebooks of all vectors, also where the package draws some."""
    shorten(monkeypatch, 256, most=4)
    monkeypatch.setattr("tinykv.codecs.codebook.DRAWN", 1024)
    few, rows = {"windows": 1, "context": 256, "calib_windows": 4}, []
    for n in (1, 2, 4):
        rows.append(measured("fp16,cq", vq=f"d{n}m{2 ** n}", **few)[1])
    rows += measured("fp16,cq,antkv", **few)[1:]
    assert [[name, *figures] for name, _, *figures in printed("6_codebooks.py", 1)] == rows


def test_topk(printed):
    """The kernel's positions are torch's."""
    first, *lines = [" ".join(words) for words in printed("7_topk.py", 2)]
    assert len(lines) == 2 and first.endswith("difference from torch: 0.0")
    for line in lines:
        kernel, lines_of_torch = re.findall(r"\[.*?\]", line)
        assert kernel == lines_of_torch and len(json.loads(kernel)) == 5


def test_topk_of_other_numbers():
    """Of either sign, and with larger ones behind the text."""
    page = defined("7_topk.py")
    torch.manual_seed(0)
    whole = torch.full((2, 600), 9e9)
    whole[:, :259] = torch.randn(2, 259)
    h = whole[:, :259]
    assert page.topk(h).equal(page.topk_lines(h))


def test_kernel(printed, monkeypatch):
    """The package's `--attention triton` on the same two tokens, and the bytes that its cache holds."""
    model, tokenizer = hf.load(EMBEDDED)
    tokens = load_windows("tales", tokenizer, 290, 1, "test").tokens  # 256 of them are coded
    kivi, rows = KIVI(model.config, group_size=128, recent=32), []
    for name, method, attention in (("fp16", FP16(model.config), "fused"), ("decoded", kivi, "plain"),
                                    ("kernel", kivi, "triton")):
        cache, logits = KVCache(model, method), []
        with torch.no_grad():
            model.use_attention("fused")
            for chunk in tokens[:, :-2].split(32, dim=1):
                logits = [model(chunk, cache)[0, -1:]]
            model.use_attention(attention)
            if attention == "triton":  # goes on with what the other has read
                kernel = TritonCache(model, method)
                for ours, read in zip(kernel.layers, cache.layers):
                    vars(ours).update(vars(read))
                cache = kernel
            logits.append(model(tokens[:, -2:-1], cache)[0])
            model(tokens[:, -1:], cache)
        loss = torch.nn.functional.cross_entropy(torch.cat(logits), tokens[0, -2:])
        decoded = 2 * 2 * 4 * 290 * 32 * 4 * (name == "decoded")  # fp32 rows, K and V of 4 layers, written and read
        rows.append([name, f"{loss.exp():.3f}", f"{cache.nbytes + decoded:,}"])
    shorten(monkeypatch, 290)
    assert printed("8_kernel.py", 2) == rows


@pytest.mark.parametrize("bits", [2, 4])
def test_kernel_of_other_shapes(bits):
    """Several heads of keys and values, each read by several queries, a rest of a piece: as torch, on decoded rows."""
    page = defined("8_kernel.py")
    torch.manual_seed(0)
    q, K, V = torch.randn(6, 64), torch.randn(1, 2, 384, 64) * 3, torch.randn(1, 2, 384, 64)
    codecs = Affine(bits, 64, "channel", 128), Affine(bits, 64)
    codes = [codec.encode(x) for codec, x in zip(codecs, (K, V))]
    K, V = (codec.decode(x)[0].repeat_interleave(3, 0) for codec, x in zip(codecs, codes))  # (H, T, d) both
    want = torch.softmax(q[:, None] @ K.transpose(1, 2) / 8, dim=-1) @ V  # (H, 1, d)
    pieces = page.attend_codes(q, *codes)
    assert pieces[0].shape == (6, 2, 64)
    assert torch.allclose(page.merge(*pieces), want[:, 0], atol=1e-5)
    assert all(part.isfinite().all() for part in page.attend(100 * q, K, V))  # the top is that of the scores
    # scores that fall by hundreds within a piece: without a running maximum 2**s overflows
    codes[0].zero[0, :, 0] *= 200
    codes[0].scale[0, :, 0] *= 200
    assert all(part.isfinite().all() for part in page.attend_codes(q, *codes))


def test_a_block_that_fills_up():
    """Keys and values are quantized while the kernel reads: the next token reads their codes."""
    page = defined("8_kernel.py")
    model, tokenizer = hf.load(EMBEDDED)
    tokens = load_windows("tales", tokenizer, 291, 1, "test").tokens
    method = KIVI(model.config, group_size=128, recent=34)  # of 290 tokens, 256 are quantized
    outputs = []
    for cache, attention in ((KVCache(model, method), "plain"), (page.KernelCache(model, method), "triton")):
        with torch.no_grad():
            model.use_attention("fused")
            model(tokens[:, :288], cache)
            model.use_attention(attention)
            outputs.append(torch.cat([model(token, cache) for token in tokens[:, 288:].split(1, dim=1)]))
        assert cache.layers[0].keys.n_coded == cache.layers[3].values.n_coded == 256
    assert torch.allclose(*outputs, atol=1e-4)


@pytest.mark.whole  # seconds of a compiler
def test_topk_compiles(tmp_path):
    """For a GPU, which need not be there. The grader compiles the other page's kernel."""
    kernels = {
        "abs_kernel": ({"x": "*fp32", "out": "*fp32", "n": "i32"}, {"N": 256}),
        "topk_kernel": ({"h": "*fp32", "size": "*fp32", "token": "*i64", "T": "i32", "to_text": "i32",
                         "to_token": "i32"}, {"K": 5, "N": 256})}
    assert compiles.errors(ROOT / "docs/ladder/7_topk.py", kernels, ROOT, tmp_path) == dict.fromkeys(kernels, "")


def test_prefix(printed, tmp_path, monkeypatch, capsys):
    """train_intact.py's loss of held-out texts, and eval_ppl.py's perplexity, with each prefix."""
    def load_less(data, tokenizer, context, windows, split, **given):
        return load_windows(data, tokenizer, {256: 64, 1024: 256}[context], min(windows, 16), split, **given)
    with monkeypatch.context() as patch:
        patch.setattr("tinykv.lab.data.load_windows", load_less)
        rows = printed("9_prefix.py", 2, 2)
    path, how = str(tmp_path / "trained.safetensors"), {"weights": "rtn", "w_bits": 3, "windows": 2, "context": 256}
    monkeypatch.setattr(sys, "argv", [
        "train_intact.py", "--weights", "rtn", "--w-bits", "3", "--updates", "2", "--samples", "16", "--tokens", "64",
        "--windows", "2", "--out", path])
    train_intact.main()
    held_out = [line.split()[-1] for line in capsys.readouterr().out.splitlines()[-4:-1]]
    want = compare("intactkv", prefix=["bos", path], **how)
    assert [row[0] for row in rows] == ["full", "rounded", "exact", "trained"]
    assert [row[1] for row in rows] == ["0.0000", *held_out]
    full, rounded, *with_prefix = [row["ppl"] for row in want]
    assert [row[2] for row in rows if row[0] != "rounded"] == [f"{ppl:.3f}" for ppl in (full, *with_prefix)]
    assert float(rows[1][2]) == pytest.approx(rounded, rel=5e-4)  # the page holds this prefix in 16 bits, too


@pytest.mark.whole
@pytest.mark.parametrize("page", [page.name for page in PAGES if page.stem[0] in "1234569"])
def test_a_page_says_what_it_prints(page, printed):
    """Its perplexities, which are above 1, but for what k-means makes of another machine's rounding."""
    said = {float(number) for number in re.findall(r"\b[1-9]\d?\.\d{2,3}\b", head_of(page))}
    found = [float(word) for line in printed(page, 16) for word in line if re.fullmatch(r"\d+\.\d{3}", word)]
    found.append(8.178)  # of 16 bits
    assert said and all(any(number == pytest.approx(other, rel=0.002) for other in found) for number in said)


def head_of(page):
    return (ROOT / "docs/ladder" / page).read_text().split('"""')[1]


@pytest.mark.parametrize("page", ["7_topk.py", "8_kernel.py"])
def test_where_there_is_no_triton_its_page_says_so(page, printed, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(SystemExit, match="needs? Triton, which runs on Linux"):
        printed(page)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_stands_alone(page):
    """On 140 lines; it reads the model, the tokenizer, texts and k-means of the package; it names its file there, which
    names it."""
    text = page.read_text()
    assert len(text.splitlines()) <= 140
    read = set(re.findall(r"^from (tinykv\S*)", text, re.MULTILINE))
    assert page.stem == "8_kernel" or read <= {"tinykv", "tinykv.lab.data", "tinykv.kmeans"}
    names = re.findall(r"\w+\.py", head_of(page.name))
    files = [file for name in names for file in (ROOT / name, ROOT / "tinykv/methods" / name) if file.exists()]
    assert files and all(page.name in file.read_text() for file in files)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_breakpoints_are_in_update(page):
    """The number of a line that the page, or the tour, gives to the debugger: where `update` begins."""
    lines = page.read_text().splitlines()
    numbers = re.findall(r"`b (\d+)", page.read_text())
    if page.name == "1_sinks.py":
        numbers += re.findall(r"\(Pdb\) b (\d+)", (ROOT / "docs/tour.md").read_text())
    for number in numbers:
        begin = next(i for i, line in enumerate(lines) if "def update" in line)
        assert "kept = " in lines[int(number) - 1] and begin < int(number) - 1 <= begin + 2
