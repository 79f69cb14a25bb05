"""Vector codebooks: the codec against numpy, its calibration, and what is refused."""
import itertools
import math
from collections import defaultdict
from functools import lru_cache, partial

import oracles
import pytest
import torch
from cases import MARK, L, model_of
from hypothesis import given
from hypothesis import strategies as st

from tinykv import UserError
from tinykv.cache import KVCache
from tinykv.calibrate import Text, calibrate, shown
from tinykv.codecs import codebook
from tinykv.codecs.codebook import FORMATS, Codebook, make_codebooks
from tinykv.lab.tables import table_bytes
from tinykv.methods.antkv import AnTKV
from tinykv.methods.cq import CQ
from tinykv.model import LlamaConfig

HKV, d = 2, 8
tiny = partial(model_of, 2, width=d)


def windows(W=4, T=40, seed=0):
    return torch.randint(0, MARK, (W, T), generator=torch.Generator().manual_seed(seed))


@st.composite
def books(draw):
    """A codec with random centroids, and rows for it."""
    heads, n, slots, m = (draw(st.sampled_from(x)) for x in ((1, 2, 3), (1, 2, 4), (1, 2, 3), (2, 4, 8, 512)))
    B, T = draw(st.integers(1, 2)), draw(st.integers(1, 5))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    codec = Codebook(n, m, heads, n * slots)
    codec.centroids = torch.randn(heads * slots, m, n, generator=rng).half()
    return codec, torch.randn(B, heads, T, n * slots, generator=rng).half()


@given(books())
def test_codes_are_the_nearest_centroids(case):
    codec, x = case
    codes = codec.encode(x)
    read = codec.decode(codes).numpy()
    B, heads, T, width = x.shape
    assert codes.packed.shape == (B, 1, T, oracles.code_bytes(heads * width // codec.n, codec.code_bits))
    assert (read == oracles.nearest_centroids(x.float().numpy(), codec.centroids.double().numpy(), read)).all()


@pytest.mark.parametrize("bits, name", FORMATS.items())
def test_the_papers_formats(bits, name):
    config = LlamaConfig(41, 128, 48, L, 4, 2, 32, 256)
    for codec in (*make_codebooks(config, bits=bits)[0], *make_codebooks(config, vq=name)[0]):
        assert codec.name == name and codec.bits == bits == math.log2(codec.m) / codec.n


@lru_cache
def calibrated(sensitivity="none", vq="d2m8"):
    method = CQ(tiny().config, vq, sensitivity=sensitivity)
    calibrate(tiny(), method, windows())
    return method


@lru_cache
def parts():
    """{(layer, kind): (sub-vectors (slots, N, 2), gradients (Hkv, N, d))} over the calibration windows."""
    found, cache, text = {}, KVCache(tiny(), CQ(tiny().config)), Text(tiny(), windows(), gradients=True)
    for layer in range(L):
        for kind, (_, rows, _, gradient) in zip("kv", shown(cache, layer, text[layer])):  # (W, Hkv, T, d)
            vectors = rows.float().unflatten(-1, (-1, 2)).permute(1, 3, 0, 2, 4)  # (Hkv, d/2, W, T, 2)
            found[layer, kind] = vectors.flatten(2, 3).flatten(0, 1), gradient.transpose(0, 1).flatten(1, 2)
    return found


def weights_of(gradient, sensitivity):
    """Weights (slots, N) of sub-vectors of 2 channels, before the largest are cut. gradient (Hkv, N, d)."""
    parts = [gradient[h, :, c:c + 2] if sensitivity.startswith("fisher") else gradient[h]
             for h in range(HKV) for c in range(0, d, 2)]
    norms = torch.stack([part.norm(dim=-1) for part in parts])
    return norms ** 2 if sensitivity in ("fisher", "token-squared") else norms


def test_books_are_fixed_points():
    """Every centroid is about the mean of the sub-vectors that are nearest to it; all are counted, in 16 bits."""
    method = calibrated()
    for (layer, kind), (vectors, _) in parts().items():
        books = getattr(method.codecs[layer], kind).centroids.float()
        assert books.shape == (HKV * d // 2, 8, 2)
        for points, book in zip(vectors, books):
            near = (points[:, None] - book).pow(2).sum(-1).argmin(1)
            for c in range(8):
                assert torch.allclose(points[near == c].mean(0), book[c], atol=0.1)
    assert table_bytes(method) == 2 * L * 2 * books.numel()


def test_calibration_sees_no_more_than_it_says(monkeypatch):
    """A sample of the tokens, evenly spread, where there are more than SAMPLES."""
    monkeypatch.setattr(codebook, "SAMPLES", 12)
    codec, seen = Codebook(2, 4, 1, 2, "none"), []
    monkeypatch.setattr(codebook, "kmeans", lambda points, *given, **more: seen.append(points) or points[:, :4])
    codec.fit(torch.arange(80.0).view(1, 1, 40, 2).repeat(2, 1, 1, 1), torch.zeros(2, 1, 40, dtype=torch.bool))
    assert seen[0][0, :, 0].tolist() == [0, 14, 30, 46, 62, 78] * 2 and codec.samples == 12


def test_kept_tokens_weigh_nothing():
    """In the heads that keep them."""
    codec, gradient = Codebook(2, 4, 2, 4), torch.ones(2, 6, 4)
    kept = torch.tensor([[True, False, False, False, True, False], [False, True, False, False, False, False]])
    weights = codec.weigh(gradient, kept, gradient)
    assert weights.bool().tolist() == [*[(~kept[0]).tolist()] * 2, *[(~kept[1]).tolist()] * 2]


def test_too_few_vectors_are_refused():
    with pytest.raises(UserError, match="160 vectors"):
        calibrated(vq="d2m256")


# ---- how much weighted vectors are worth

@pytest.mark.parametrize("sensitivity", ["fisher", "token", "fisher-root", "token-squared"])
def test_effective_vectors_are_kish_s(sensitivity):
    """(sum w)^2 / sum w^2 of the codebook that has the fewest, in plain lists."""
    method, weights = calibrated(sensitivity), defaultdict(list)  # by (layer, kind, place)
    for (layer, kind), (_, gradients) in parts().items():
        for gradient in gradients.split(40, dim=1):
            of_window = weights_of(gradient, sensitivity).tolist()
            # the largest thousandth of the layer's weights in a window is cut down
            every = sorted(itertools.chain(*of_window))
            limit = every[int(0.999 * (len(every) - 1))]
            for place, of_place in enumerate(of_window):
                weights[layer, kind, place] += [min(w, limit) for w in of_place]
    for layer, pair in enumerate(method.codecs):
        for kind in "kv":
            of_codec = [w for key, w in weights.items() if key[:2] == (layer, kind)]
            fewest = min(sum(w) ** 2 / sum(x * x for x in w) for w in of_codec)
            assert getattr(pair, kind).effective.item() == pytest.approx(fewest, rel=1e-3)


def test_few_effective_vectors_are_warned_of():
    """160 vectors for 8 centroids are enough, for 64 they are not; equal weights are worth all of them."""
    enough, few = calibrated("token").describe(), calibrated("token", vq="d2m64").describe()
    assert "156 vectors" in enough and "--calib-windows" not in enough
    assert "few (below 4 a centroid), so give more --calib-windows" in few
    assert calibrated("none").describe().endswith("worth 160 or more")


@pytest.mark.parametrize("sensitivity, n", [("none", 16), ("fisher", 64), ("token", 64)])
def test_codebooks_with_weights_ask_for_more_text(sensitivity, n):
    for cls in (CQ, AnTKV):
        assert cls(tiny().config, "d2m8", sensitivity=sensitivity).calibration_windows == n
    assert CQ(tiny().config, "d2m1024").calibration_windows == 64
    assert CQ(LlamaConfig(41, 128, 48, L, 4, 2, 32, 256), "d32m4096").calibration_windows == 16  # k-means stays quick


@given(st.integers(1, 40), st.integers(1, 60), st.integers(0, 99))
def test_points_are_drawn_by_their_weights(N, n, seed):
    """Each as often as its weight says, to within one, in order; and the weights have the same sum."""
    rng = torch.Generator().manual_seed(seed)
    weights = torch.rand(2, N, generator=rng).square() * (torch.rand(2, N, generator=rng) < 0.7)
    weights[:, N // 2] += 0.1
    points, new = codebook.drawn(torch.arange(N).expand(2, N)[..., None].float(), weights, n)
    for row, w, v in zip(points[..., 0].tolist(), weights.tolist(), new.tolist()):
        assert row == sorted(row) and len(row) == n and sum(v) == pytest.approx(sum(w), rel=1e-4)
        for i in range(N):
            assert abs(row.count(i) - n * w[i] / sum(w)) < 1.001
            assert w[i] or i not in row
