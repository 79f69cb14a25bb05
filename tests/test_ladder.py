"""docs/ladder/: each page prints the package's own figures, by code of its own."""
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import train_intact
from eval_ppl import compare
from tinykv import hf
from tinykv.codecs.affine import Affine
from tinykv.data import load_windows
from tinykv.hf import EMBEDDED
from tinykv.methods.fp16 import FP16
from tinykv.methods.kivi import KIVI
from tinykv.triton_cache import TritonCache

ROOT = Path(__file__).parent.parent
PAGES = sorted(ROOT.glob("docs/ladder/*.py"))


def run(page, numbers, monkeypatch):
    """Run a page with these numbers on its command line -> what it defines."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [page, *(str(number) for number in numbers)])
    monkeypatch.setattr(sys, "path", sys.path[:])
    with torch.no_grad():  # a page turns gradients off; afterwards they are as they were
        return runpy.run_path(f"docs/ladder/{page}")


def printed(page, texts, monkeypatch, capsys, columns=2):
    """[(method, perplexity)] of a page, or more columns, on so many texts."""
    run(page, [texts], monkeypatch)
    return [tuple(line.split()[:columns]) for line in capsys.readouterr().out.splitlines()]


def measured(methods, columns=2, **given):
    """The same of the package."""
    return [(row["label"], f"{row['ppl']:.3f}", f"{row['bits_true']:.2f}")[:columns]
            for row in compare(methods, **given)]


def test_sinks(monkeypatch, capsys):
    """fp16, rtn, pfn, kvsink, and the bits that they store."""
    assert printed("1_sinks.py", 2, monkeypatch, capsys, 3) == measured("kvsink", 3, windows=2)


def test_stream(monkeypatch, capsys):
    """KIVI without a window of recent tokens, as it is, and beside OTT."""
    rows = []
    for method, group, recent in (("kivi", 128, 0), ("kivi", 32, 128), ("kivi", 128, 32), ("ott", 128, 32)):
        rows += measured(f"fp16,{method}", windows=2, protocol="stream", group_size=group, recent=recent)[1:]
    assert printed("2_stream.py", 2, monkeypatch, capsys) == rows


@pytest.mark.whole  # seconds of k-means
def test_codebooks(monkeypatch, capsys):
    """Without weights in k-means, which need gradients."""
    assert printed("3_codebooks.py", 2, monkeypatch, capsys, 3) == measured(
        "fp16,cq,antkv", 3, windows=2, sensitivity="none")[1:]


def test_topk(monkeypatch, capsys):
    """The kernel's positions are torch's."""
    run("4_topk.py", [2], monkeypatch)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    for line in lines:
        kernel, lines_of_torch = re.findall(r"\[.*?\]", line)
        assert kernel == lines_of_torch and len(json.loads(kernel)) == 5


def test_topk_of_other_numbers(monkeypatch):
    """Of either sign, and with larger ones behind the text."""
    page = run("4_topk.py", [1], monkeypatch)
    torch.manual_seed(0)
    whole = torch.full((2, 600), 9e9)
    whole[:, :259] = torch.randn(2, 259)
    h = whole[:, :259]
    assert page["topk"](h).equal(page["topk_lines"](h))


def test_kernel(monkeypatch, capsys):
    """The package's `--attention triton` on the same two tokens, and the bytes that its cache holds."""
    model, tokenizer = hf.load(EMBEDDED)
    tokens = load_windows("tales", tokenizer, 1024, 1, "test").tokens
    kivi, rows = KIVI(model.config, group_size=128, recent=32), []
    for name, method, attention in (("fp16", FP16(model.config), "fused"), ("torch", kivi, "plain"),
                                    ("kernel", kivi, "triton")):
        cache, logits = TritonCache(model, method), []
        with torch.no_grad():
            model.use_attention("fused")
            for chunk in tokens[:, :-2].split(32, dim=1):
                logits = [model(chunk, cache)[0, -1:]]
            model.use_attention(attention)
            logits.append(model(tokens[:, -2:-1], cache)[0])
            model(tokens[:, -1:], cache)
        loss = torch.nn.functional.cross_entropy(torch.cat(logits), tokens[0, -2:])
        decoded = 2 * 2 * 4 * 1024 * 32 * 4 * (name == "torch")  # fp32 rows, K and V of 4 layers, written and read
        rows.append((name, f"{loss.exp():.3f}", f"{cache.nbytes + decoded:,}"))
    assert printed("4_kernel.py", 2, monkeypatch, capsys, 3) == rows


def test_kernel_of_other_shapes(monkeypatch):
    """Several heads of keys and values, each read by several queries, a rest of a piece: as torch, on decoded rows."""
    page = run("4_kernel.py", [1], monkeypatch)
    torch.manual_seed(0)
    q, K, V = torch.randn(12, 64), torch.randn(1, 3, 640, 64) * 3, torch.randn(1, 3, 640, 64)
    codecs = Affine(2, 64, "channel", 128), Affine(2, 64)
    codes = [codec.encode(x) for codec, x in zip(codecs, (K, V))]
    K, V = (codec.decode(x)[0].repeat_interleave(4, 0) for codec, x in zip(codecs, codes))  # (H, T, d) both
    want = torch.softmax(q[:, None] @ K.transpose(1, 2) / 8, dim=-1) @ V  # (H, 1, d)
    pieces = page["attend_codes"](q, *codes)
    assert pieces[0].shape == (12, 3, 64)
    assert torch.allclose(page["merge"](*pieces), want[:, 0], atol=1e-5)


def test_a_block_that_fills_up(monkeypatch):
    """Keys and values are quantized while the kernel reads: the next token reads their codes."""
    page = run("4_kernel.py", [1], monkeypatch)
    model, tokenizer = hf.load(EMBEDDED)
    tokens = load_windows("tales", tokenizer, 291, 1, "test").tokens
    method = KIVI(model.config, group_size=128, recent=34)  # of 290 tokens, 256 are quantized
    outputs = []
    for cache, attention in ((TritonCache(model, method), "plain"), (page["KernelCache"](model, method), "triton")):
        with torch.no_grad():
            model.use_attention("fused")
            model(tokens[:, :288], cache)
            model.use_attention(attention)
            outputs.append(torch.cat([model(token, cache) for token in tokens[:, 288:].split(1, dim=1)]))
        assert cache.layers[0].keys.n_coded == cache.layers[3].values.n_coded == 256
    assert torch.allclose(*outputs, atol=1e-4)


KERNELS = {
    "4_topk.py": {"topk_kernel": ({"h": "*fp32", "size": "*fp32", "place": "*i64", "T": "i32", "to_text": "i32",
                                   "to_token": "i32"}, {"K": 5, "N": 256})},
    "4_kernel.py": {"attend_kernel": (
        {"q": "*fp32", "k": "*u8", "k_scale": "*fp16", "k_zero": "*fp16", "v": "*u8", "v_scale": "*fp16",
         "v_zero": "*fp16", "sums": "*fp32", "top": "*fp32", "total": "*fp32", "C": "i32", "factor": "fp32"},
        {"R": 4, "D": 128, "N": 64, "GROUP": 128, "PIECE": 256})},
}


@pytest.mark.whole  # seconds of a compiler
@pytest.mark.parametrize("page", KERNELS)
def test_kernels_compile(page):
    """For a GPU, which need not be there."""
    found = subprocess.run([sys.executable, "-m", "docs.course.compiles", f"docs/ladder/{page}"], cwd=ROOT, text=True,
                           input=json.dumps(KERNELS[page]), capture_output=True)
    assert json.loads(found.stdout.splitlines()[-1]) == dict.fromkeys(KERNELS[page], "")


@pytest.mark.whole  # seconds of training
def test_prefix(tmp_path, monkeypatch, capsys):
    """train_intact.py: the loss of held-out texts, and perplexity, with each prefix."""
    run("5_prefix.py", [2, 3], monkeypatch)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    monkeypatch.setattr(sys, "argv", [
        "train_intact.py", "--weights", "rtn", "--w-bits", "3", "--updates", "3", "--windows", "2",
        "--out", str(tmp_path / "trained.safetensors")])
    train_intact.main()
    want = [line.split() for line in capsys.readouterr().out.splitlines()[-4:]]
    assert [row[0] for row in rows] == ["full", "rounded", "exact", "trained"]
    for (_, loss, ppl), (*_, held_out, want_ppl, _) in zip(rows, want):
        assert loss == held_out.replace("-", "0.0000")
        assert ppl == f"{float(want_ppl):.3f}"


@pytest.mark.whole
@pytest.mark.parametrize("page", ["2_stream.py", "3_codebooks.py"])
def test_a_page_says_what_it_prints(page, monkeypatch, capsys):
    """To its last digit, or what k-means makes of another machine's rounding."""
    said = (ROOT / "docs/ladder" / page).read_text().split('"""')[1]
    lines = printed(page, 16, monkeypatch, capsys, 3)[-2:]
    figures = [float(number) for line in lines for number in line[1:] if re.match(r"\d+\.\d+", number)]
    said = [float(number) for number in re.findall(r"\d+\.\d+", said) if number != "8.178"]
    assert said == (figures if page == "2_stream.py" else pytest.approx(figures, rel=0.005))


@pytest.mark.whole
def test_the_prefix_page_says_what_it_prints(monkeypatch, capsys):
    rows = printed("5_prefix.py", 16, monkeypatch, capsys, 3)
    said = (ROOT / "docs/ladder/5_prefix.py").read_text().split('"""')[1]
    assert re.findall(r"\d\.\d{3}", said) == [ppl for _, _, ppl in rows]


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
