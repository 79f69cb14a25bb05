"""AnTKV's anchor scores, and what they are for: against numpy (oracles.py), and token by token."""
from functools import lru_cache

import numpy as np
import oracles
import pytest
import torch
from cases import d, model_of, new_layer, quantize_oldest
from chance import First, Random
from hypothesis import example, given
from hypothesis import strategies as st

from tinykv.analysis.anchors import damage
from tinykv.cache import KVCache
from tinykv.calibrate import calibrate
from tinykv.methods import antkv
from tinykv.methods.antkv import AnTKV, anchor_scores, attention_tiles, equation_5
from tinykv.model import LlamaConfig
from tinykv.tracing import Trace


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
    A, V = oracles.attention(q, k, window), v.repeat(q.shape[1] // Hkv, axis=1)
    for j in range(S):
        only = (np.arange(S) == j)[:, None]
        A_j = oracles.attention(q, np.where(only, coded_k, k), window)
        V_j = np.where(only, coded_v, v).repeat(q.shape[1] // Hkv, axis=1)
        changes = [(A_j - A) @ V, A @ (V_j - V), A_j - A]  # by the key, by the value; of the weights
        for x, change in zip(got, changes):
            total = np.abs(change).sum((2, 3))[..., None]  # (B, H, 1)
            assert close(x[..., j:j + 1], oracles.of_kv_heads(total, Hkv))


# ---- AnTKV's settings: what anchors are kept for

TEXT = torch.randint(0, 41, (1, 30), generator=torch.Generator().manual_seed(2))


@lru_cache
def model_and_codebooks():
    model = model_of(2, width=8)
    method = AnTKV(model.config, "d2m8")
    calibrate(model, method, torch.randint(0, 41, (4, 40), generator=torch.Generator().manual_seed(1)))
    return model, method.calibrated()


def anchors_of(text=TEXT, protocol="paper", method_class=AnTKV, **settings):
    """{(layer, "k" or "v"): positions, sorted, by head} of an AnTKV with 3 anchors, its model and itself."""
    model, codebooks = model_and_codebooks()
    method = method_class(model.config, "d2m8", anchors="3", recent=0, **settings)
    method.restore(codebooks, model)
    cache = KVCache(model, method, protocol)
    with torch.no_grad():
        for chunk in (text.split(method.block, dim=1) if protocol == "stream" else [text]):
            model(chunk, cache)
    found = {}
    for layer in cache.layers:
        for rows in (layer.keys, layer.values):
            kept = rows.kept_positions
            found[layer.layer, rows.kind] = None if kept is None else [sorted(of) for of in kept[0].tolist()]
    return found, model, method


def test_the_controls():
    """The first tokens, and random ones: the same in every run, of each head its own, in a stream as in one chunk."""
    kept = anchors_of(method_class=First)[0]
    assert all(positions == [[0, 1, 2]] * 2 for positions in kept.values())
    kept = anchors_of(method_class=Random)[0]
    for positions in kept.values():
        assert positions == kept[0, "k"] and [0, 1, 2] not in positions and positions[0] != positions[1]
    assert kept == anchors_of(method_class=Random)[0] != anchors_of()[0]
    text = torch.randint(0, 41, (1, 256), generator=torch.Generator().manual_seed(3))
    for control in (First, Random):
        assert anchors_of(text, "paper", control)[0] == anchors_of(text, "stream", control)[0]


@pytest.mark.parametrize("control", [First, Random])
def test_the_controls_of_a_16_bit_model(control):
    """Their scores are those of an fp32 model: in 16 bits, later tokens would tie."""
    method, K = control(LlamaConfig(41, 32, 48, 2, 4, 2, 8, 512), "d2m8"), torch.zeros(1, 2, 400, 8)
    for exact, scores in zip(method.score(None, K, K), method.score(None, K.bfloat16(), K.bfloat16())):
        assert torch.equal(scores, exact)


def test_the_score_times_the_error_of_the_row():
    """In layer 0, which has met no code yet: AnS of each token times the L1 distance to its nearest vectors."""
    found, model, method = anchors_of(anchors_by="error")
    trace = Trace(model)
    with torch.no_grad():
        model(TEXT, trace)
    k, v = trace.k[0].half().float(), trace.v[0].half().float()  # as they are stored
    of_keys_and_values = oracles.equation_5(*arrays(*(model.rope.rotate(x) for x in (trace.q[0], k))))
    for kind, x, ans in zip("kv", (k, v), of_keys_and_values):
        codec = getattr(method.codecs[0], kind)
        read = codec.decode(codec.encode(x)).numpy()
        nearest = oracles.nearest_centroids(x.numpy(), codec.centroids.double().numpy(), read)
        scores = ans * np.abs(x.numpy() - nearest).sum(-1)  # (1, 2, 30)
        assert found[0, kind] == [sorted(oracles.top_k(of_head.tolist(), 3)) for of_head in scores[0]]
    assert found != anchors_of()[0]


# ---- the anchors, chunk by chunk, against plain lists. Scores are small whole numbers, so there are many ties

def check_anchors(chunks, anchors):
    """The anchors, and all scores held, after each chunk are what plain lists say, ties included.

    chunks: for each the tokens that come, the tokens that are quantized then, and for every
    sequence, head, and K or V, whole numbers: what the chunk adds to the score of each token so
    far.
    """
    method = AnTKV(model_of(2).config, "d4m8", anchors=anchors)
    for codec in (codec for pair in method.codecs for codec in pair):
        codec.centroids = torch.zeros(codec.slots, codec.m, codec.n).half()
    layer, seen, quantized, events, added = new_layer(method, 0), 0, 0, [], []
    for new, n, scores in chunks:
        scores = torch.tensor(scores, dtype=torch.float)  # (B, Hkv, 2, seen)
        B, Hkv = scores.shape[:2]
        positions = torch.arange(seen, seen + new)
        rows = (1 + positions)[:, None].expand(B, Hkv, new, d).half()  # each token holds its position
        layer.append(rows, -rows)
        seen += new
        added.append(scores)
        layer.keys.add_scores(scores[:, :, 0])
        layer.values.add_scores(scores[:, :, 1])
        if n:
            quantize_oldest(layer, n)
            events.append(oracles.Event(quantized, quantized + n, seen))
            quantized += n

        for kind, b, h in np.ndindex(2, B, Hkv):
            rows, sign = ((layer.keys, 1), (layer.values, -1))[kind]
            kept, total = oracles.anchors(anchors, [x[b, h, kind].tolist() for x in added], events)
            assert rows.recent_scores[b, h].tolist() == [total[i] for i in range(quantized, seen)]
            if events:
                assert rows.kept_positions[b, h].tolist() == kept
                assert rows.kept_scores[b, h].tolist() == [total[i] for i in kept]
                assert rows.kept_rows[b, h, :, 0].tolist() == [sign * (1 + i) for i in kept]


@st.composite
def chunks_with_scores(draw):
    B, seen, quantized, chunks = draw(st.integers(1, 2)), 0, 0, []
    for _ in range(draw(st.integers(1, 5))):
        new = draw(st.integers(1, 5))
        seen += new
        n = draw(st.integers(0, seen - quantized))
        quantized += n
        row = st.lists(st.integers(0, 5), min_size=seen, max_size=seen)
        chunks.append((new, n, [[[draw(row) for _ in "kv"] for _ in range(2)] for _ in range(B)]))
    return chunks


CHUNKS = [(3, 0, [[[[4, 1, 2], [0, 1, 5]], [[2, 2, 2], [9, 1, 0]]]]),
          (3, 4, [[[[0, 1, 1, 6, 0, 0], [1, 1, 1, 3, 4, 4]], [[0, 0, 1, 0, 0, 0], [0, 0, 9, 9, 0, 0]]]]),
          (4, 4, [[[[0, 0, 0, 0, 6, 7, 6, 9, 9, 9], [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]],
                   [[0, 0, 1, 0, 4, 5, 2, 3, 1, 1], [1, 2, 3, 0, 9, 9, 9, 9, 9, 9]]]])]


@given(chunks_with_scores(), st.sampled_from(["1", "2", "4", "10%", "30%", "50%", "100%"]))
@example(CHUNKS, "2")
def test_anchors(chunks, anchors):
    check_anchors(chunks, anchors)


@pytest.mark.parametrize("percent", [1, 7, 14, 55])
def test_a_share_of_a_hundred_tokens(percent):
    """As many as it says, and not one more by the rounding of a float."""
    check_anchors([(100, 100, [[[list(range(100))] * 2] * 2])], f"{percent}%")
