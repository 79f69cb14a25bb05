"""AnTKV's anchor scores, the damage that they estimate, and anchors of equal scores, which no text of the matrix has:
against numpy and plain lists (oracles.py)."""
from functools import lru_cache

import numpy as np
import oracles
import pytest
import torch
from cases import d, model_of, new_layer, quantize_oldest, take_tables
from chance import First, Random
from hypothesis import given
from hypothesis import strategies as st

from tinykv.cache import KVCache
from tinykv.calibrate import calibrate
from tinykv.lab.analysis.anchors import damage
from tinykv.methods import antkv
from tinykv.methods.antkv import AnTKV, anchor_scores, attention_tiles, equation_5
from tinykv.model import Trace


@st.composite
def attention(draw):
    """q (B, H, T, d), k and v (B, Hkv, S, d), a sliding window or None, and scores held at once."""
    B, Hkv, group, d = (draw(st.integers(1, n)) for n in (2, 2, 3, 4))
    S = draw(st.integers(1, 9))
    T = draw(st.integers(1, S))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    q, k, v = (torch.randn(B, h, n, d, generator=rng) for h, n in ((Hkv * group, T), (Hkv, S), (Hkv, S)))
    return q, k, v, draw(st.sampled_from([None, None, 1, 3])), draw(st.sampled_from([1, 40, 10 ** 6]))


def arrays(*tensors):
    return [x.double().numpy() for x in tensors]


def close(got, want):
    return np.allclose(got.double().numpy(), want, rtol=1e-4, atol=1e-5)


# ---- the scores

@given(attention())
def test_scores_are_equation_5(case):
    """In tiles of any size, and in the plain lines."""
    q, k, _, window, held = case
    want = oracles.equation_5(*arrays(q, k), window)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(antkv, "MAX_SCORES", held)
        patch.setattr(antkv, "MIN_QUERIES", 1)
        got = anchor_scores(q, k, window)
    assert all(map(close, got, want))
    (_, A), = attention_tiles(q, k, window)
    plain = equation_5(A, q.norm(dim=-1))  # (B, H, S) both
    assert all(close(x, y) for x, y in zip([x.unflatten(1, (k.shape[1], -1)).sum(2) for x in plain], want))


@given(attention(), st.sampled_from([1, 10]))  # 10: weights round to 1 in 32 bits
def test_damage_is_what_happens_if_one_token_is_read_as_its_code(case, sharpness):
    q, k, v, window, _ = case
    q, rng = q * sharpness, torch.Generator().manual_seed(1)
    coded_k, coded_v = (x + torch.randn(x.shape, generator=rng) / 2 for x in (k, v))
    got = damage(q, k, v, coded_k, coded_v, window)  # (B, Hkv, S) each
    q, k, v, coded_k, coded_v = arrays(q, k, v, coded_k, coded_v)
    Hkv, S = k.shape[1:3]
    A, v, coded_v = oracles.attention(q, k, window), *(x.repeat(q.shape[1] // Hkv, axis=1) for x in (v, coded_v))
    for j in range(S):
        only = (np.arange(S) == j)[:, None]
        A_j, v_j = oracles.attention(q, np.where(only, coded_k, k), window), np.where(only, coded_v, v)
        for x, change in zip(got, [(A_j - A) @ v, A @ (v_j - v), A_j - A]):  # by the key, by the value; of the weights
            total = np.abs(change).sum((2, 3))[..., None]  # (B, H, 1)
            assert close(x[..., j:j + 1], oracles.of_kv_heads(total, Hkv))


# ---- the anchors of a text

TEXT = torch.randint(0, 41, (1, 256), generator=torch.Generator().manual_seed(2))


@lru_cache
def model_and_codebooks():
    model = model_of(2, width=8)
    method = AnTKV(model.config, "d2m8")
    calibrate(model, method, torch.randint(0, 41, (4, 40), generator=torch.Generator().manual_seed(1)))
    return model, method


def anchors_of(text, method_class=AnTKV, protocol="paper", **settings):
    """{(layer, "k" or "v"): positions, sorted, by head} of an AnTKV with 3 anchors, and itself."""
    model, codebooks = model_and_codebooks()
    method = method_class(model.config, "d2m8", anchors="3", recent=0, **settings)
    take_tables(method, codebooks)  # the controls take them, too
    cache = KVCache(model, method, protocol)
    with torch.no_grad():
        for chunk in text.split(method.block if protocol == "stream" else text.shape[1], dim=1):
            model(chunk, cache)
    return {(rows.layer, rows.kind): [sorted(of_head) for of_head in rows.kept_positions[0].tolist()]
            for layer in cache.layers for rows in (layer.keys, layer.values)}, method


@pytest.mark.parametrize("control", [First, Random])
def test_the_controls(control):
    """The first tokens, and random ones, of each head its own: the same in every run, in a stream as in one chunk, and
    in a 16-bit model, where later tokens would tie."""
    kept, method = anchors_of(TEXT, control)
    assert kept == anchors_of(TEXT, control)[0] == anchors_of(TEXT, control, "stream")[0] != anchors_of(TEXT)[0]
    of_heads = kept[0, "k"]
    assert all(positions == of_heads for positions in kept.values())
    assert (of_heads == [[0, 1, 2]] * 2) == (control is First) == (of_heads[0] == of_heads[1])
    K = torch.zeros(1, 2, 250, 8)
    for exact, scores in zip(method.score(None, K, K), method.score(None, K.bfloat16(), K.bfloat16())):
        assert torch.equal(scores, exact)


def test_the_score_times_the_error_of_the_row():
    """In layer 0, which has met no code yet: AnS of each token times the L1 distance to its nearest vectors."""
    text, (model, _) = TEXT[:, :30], model_and_codebooks()
    found, method = anchors_of(text, anchors_by="error")
    trace = Trace(model)
    with torch.no_grad():
        model(text, trace)
    k, v = trace.k[0].half().float(), trace.v[0].half().float()  # as they are stored
    of_keys_and_values = oracles.equation_5(*arrays(*(model.rope.rotate(x) for x in (trace.q[0], k))))
    for kind, x, ans in zip("kv", (k, v), of_keys_and_values):
        codec = getattr(method.codecs[0], kind)
        read = codec.decode(codec.encode(x)).numpy()
        nearest = oracles.nearest_centroids(x.numpy(), codec.centroids.double().numpy(), read)
        scores = ans * np.abs(x.numpy() - nearest).sum(-1)  # (1, 2, 30)
        assert found[0, kind] == [sorted(oracles.top_k(of_head.tolist(), 3)) for of_head in scores[0]]
    assert found != anchors_of(text)[0]


# ---- ties: scores are small whole numbers

def layer_of(anchors):
    method = AnTKV(model_of(2).config, "d4m8", anchors=anchors)
    for *_, codec in method.each_codec():
        codec.centroids = torch.zeros(codec.slots, codec.m, codec.n).half()
    return new_layer(method, 0)


@given(st.sampled_from(["1", "2", "4", "10%", "30%", "50%", "100%"]), st.data())
def test_anchors_against_plain_lists(anchors, data):
    """After each chunk: which tokens are kept, the best first, their rows and scores, and the recent tokens' scores."""
    layer, B, seen, quantized, events, added = layer_of(anchors), data.draw(st.integers(1, 2)), 0, 0, [], []
    for new in data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=5)):
        seen += new
        numbers = st.lists(st.integers(0, 5), min_size=B * 4 * seen, max_size=B * 4 * seen)
        added.append(torch.tensor(data.draw(numbers), dtype=torch.float).view(B, 2, 2, seen))  # of head, of K or V
        rows = torch.arange(seen - new, seen)[:, None].expand(B, 2, new, d).half()  # each token holds its position
        layer.append(rows, -rows)
        layer.keys.add_scores(added[-1][:, :, 0])
        layer.values.add_scores(added[-1][:, :, 1])
        if n := data.draw(st.integers(0, seen - quantized)):
            quantize_oldest(layer, n)
            events.append(oracles.Event(quantized, quantized + n, seen))
            quantized += n
        for kind, b, h in np.ndindex(2, B, 2):
            rows, sign = ((layer.keys, 1), (layer.values, -1))[kind]
            kept, total = oracles.anchors(anchors, [scores[b, h, kind].tolist() for scores in added], events)
            assert rows.recent_scores[b, h].tolist() == [total[i] for i in range(quantized, seen)]
            if events:
                assert rows.kept_positions[b, h].tolist() == kept
                assert rows.kept_scores[b, h].tolist() == [total[i] for i in kept]
                assert rows.kept_rows[b, h, :, 0].tolist() == [sign * i for i in kept]


@pytest.mark.parametrize("percent", [1, 7, 14, 55])
def test_a_share_of_a_hundred_tokens(percent):
    """As many as it says, and not one more by the rounding of a float."""
    layer = layer_of(f"{percent}%")
    layer.append(torch.ones(1, 2, 100, d), torch.ones(1, 2, 100, d))
    for rows in (layer.keys, layer.values):
        rows.add_scores(torch.ones(1, 2, 100))
    quantize_oldest(layer, 100)
    assert layer.keys.kept_positions.shape == layer.values.kept_positions.shape == (1, 2, percent)
