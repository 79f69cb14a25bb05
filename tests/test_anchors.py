"""AnTKV's anchor scores against plain lists: grouped queries, uneven tiles, windows, queries that come late."""
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import attention_weights, norm

from tinykv.analysis.anchors import damage, theorem_1
from tinykv.cache import KVCache
from tinykv.cache_parts.trace import Trace
from tinykv.calibrate import calibrate
from tinykv.methods import antkv
from tinykv.methods.antkv import AnTKV, anchor_scores, log_sum_exp
from tinykv.methods.cq import CQ
from tinykv.model import Llama, LlamaConfig


@st.composite
def attention(draw):
    """q (B, H, T, d), k and v (B, Hkv, S, d), a sliding window or None, and scores held at once."""
    B, Hkv, group, d = (draw(st.integers(1, n)) for n in (2, 2, 3, 4))
    S = draw(st.integers(1, 9))
    T = draw(st.integers(1, S))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    q, k, v = (torch.randn(B, h, n, d, generator=rng) for h, n in ((Hkv * group, T), (Hkv, S), (Hkv, S)))
    return q, k, v, draw(st.sampled_from([None, None, 1, 3])), draw(st.sampled_from([1, 40, 10 ** 6]))


def heads(q, k, *others):
    """Each query head with its KV head's rows, as lists: (b, h of the KV head, q, k, others...)."""
    group = q.shape[1] // k.shape[1]
    for b in range(len(q)):
        for h in range(q.shape[1]):
            yield b, h // group, q[b, h].tolist(), *(x[b, h // group].tolist() for x in (k, *others))


def close(got, expected):
    return torch.allclose(got.double(), torch.tensor(expected, dtype=torch.double), rtol=1e-4, atol=1e-5)


def zeros(k):
    return torch.zeros(k.shape[:3]).tolist()


def check_scores(case, scores=anchor_scores):
    q, k, _, window, _ = case
    ans_k, ans_v = zeros(k), zeros(k)
    for b, h, rows, keys in heads(q, k):
        for row, A in zip(rows, attention_weights(rows, keys, window)):
            for j, a in enumerate(A):
                ans_v[b][h][j] += a
                ans_k[b][h][j] += a * (1 - a) * norm(row)
    got_k, got_v = scores(q, k, window=window)
    assert close(got_k, ans_k) and close(got_v, ans_v)


@given(attention())
def test_scores_are_equation_5(case):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(antkv, "MAX_SCORES", case[-1])
        patch.setattr(antkv, "MIN_QUERIES", 1)
        check_scores(case)


@given(attention())
def test_values_scores_add_up_to_the_queries(case):
    q, k, _, window, _ = case
    _, ans_v = anchor_scores(q, k, window=window)
    assert torch.allclose(ans_v.sum(-1), torch.tensor(q.shape[2] * q.shape[1] / k.shape[1]))


@given(attention())
def test_keys_scores_are_bounded_by_values_scores(case):
    q, k, _, window, _ = case
    ans_k, ans_v = anchor_scores(q, k, window=window)
    assert (ans_k <= ans_v * q.norm(dim=-1).max() + 1e-5).all()


@given(attention())
def test_scores_from_the_log_sum_exp_of_a_prefill(case):
    q, k, _, window, _ = case
    lse = log_sum_exp(q, k, window)
    for a, b in zip(anchor_scores(q, k, lse, window), anchor_scores(q, k, window=window)):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)
    for b, h in ((0, 0), (len(q) - 1, q.shape[1] - 1)):
        rows, keys = q[b, h], k[b, h * k.shape[1] // q.shape[1]]
        exact = (rows @ keys.T * q.shape[-1] ** -0.5).double()  # (T, S)
        at = torch.arange(len(keys) - len(rows), len(keys))[:, None]
        unseen = torch.arange(len(keys)) > at
        if window is not None:
            unseen |= torch.arange(len(keys)) <= at - window
        assert torch.allclose(lse[b, h].double(), exact.masked_fill(unseen, -math.inf).exp().sum(-1).log(), atol=1e-5)


@given(attention())
def test_the_factor_of_theorem_1(case):
    """Column j of V^T Diag(A_i) (I - e A_i), built entry by entry as the paper writes it."""
    q, k, v, _, _ = case
    factor = zeros(k)
    for b, h, rows, keys, values in heads(q, k, v):
        S, d = len(keys), len(values[0])
        for row, A in zip(rows, attention_weights(rows, keys)):
            for j in range(S):
                column = [sum(values[s][c] * A[s] * ((s == j) - A[j]) for s in range(S)) for c in range(d)]
                factor[b][h][j] += sum(map(abs, column)) * norm(row)
    assert close(theorem_1(q, k, v), factor)


def output(A, values):
    return [[sum(a * value[c] for a, value in zip(row, values)) for c in range(len(values[0]))] for row in A]


def change(a, b):
    return sum(abs(x - y) for one, other in zip(a, b) for x, y in zip(one, other))


@given(attention(), st.sampled_from([1, 30]))  # 30: the largest weight rounds to 1
def test_damage_is_what_happens_if_one_token_is_read_as_its_code(case, sharpness):
    q, k, v, _, _ = case
    q = q * sharpness
    rng = torch.Generator().manual_seed(1)
    coded_k, coded_v = (x + torch.randn(x.shape, generator=rng) / 2 for x in (k, v))
    by_k, by_v, of_weights = zeros(k), zeros(k), zeros(k)
    for b, h, rows, keys, values, other_keys, other_values in heads(q, k, v, coded_k, coded_v):
        exact = output(attention_weights(rows, keys), values)
        for j in range(len(keys)):
            swapped = keys[:j] + [other_keys[j]] + keys[j + 1:]
            by_k[b][h][j] += change(output(attention_weights(rows, swapped), values), exact)
            of_weights[b][h][j] += change(attention_weights(rows, swapped), attention_weights(rows, keys))
            swapped = values[:j] + [other_values[j]] + values[j + 1:]
            by_v[b][h][j] += change(output(attention_weights(rows, keys), swapped), exact)
    got_k, got_v, got_weights = damage(q, k, v, coded_k, coded_v)
    assert close(got_k, by_k) and close(got_v, by_v) and close(got_weights, of_weights)


def test_the_bounds_hold_for_small_errors():
    """Theorem 1 for the sum over tokens of one head: what is bounded is the change when all rows move at once."""
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 24, 8, generator=rng) for _ in range(3))
    dk, dv = (1e-3 * torch.randn(1, 1, 24, 8, generator=rng) for _ in range(2))

    def attend(k, v):
        A = (q @ k.transpose(-2, -1) * 8 ** -0.5).masked_fill(torch.ones(24, 24, dtype=torch.bool).triu(1), -math.inf)
        return A.softmax(-1) @ v

    bound_k = (theorem_1(q, k, v) * dk.abs().sum(-1)).sum()
    bound_v = (anchor_scores(q, k)[1] * dv.abs().sum(-1)).sum()
    changed_k, changed_v = ((attend(*x) - attend(k, v)).abs().sum() for x in ((k + dk, v), (k, v + dv)))
    assert 0.01 * bound_k < changed_k < bound_k and 0.01 * bound_v < changed_v < bound_v


def without_the_norm(q, k, lse=None, window=None):
    """Algorithm 1 as it is printed."""
    ans_k, ans_v = anchor_scores(q, k, lse, window)
    return anchor_scores(q / q.norm(dim=-1, keepdim=True) ** 0.5, k, lse, window)[0], ans_v


def by_query(q, k, lse=None, window=None):
    """Added up into the query's place, as Algorithm 1 has it."""
    ans_k, ans_v = anchor_scores(q, k, lse, window)
    return ans_k, torch.ones_like(ans_v) * q.shape[1] / k.shape[1]


def mean_of_heads(q, k, lse=None, window=None):
    return tuple(x / (q.shape[1] // k.shape[1]) for x in anchor_scores(q, k, lse, window))


def without_one_minus_a(q, k, lse=None, window=None):
    ans_k, ans_v = anchor_scores(q, k, lse, window)
    return ans_v, ans_v


@pytest.mark.parametrize("wrong", [without_the_norm, by_query, mean_of_heads, without_one_minus_a])
def test_mutant_fails(wrong):
    rng = torch.Generator().manual_seed(0)
    case = torch.randn(1, 4, 6, 4, generator=rng), torch.randn(1, 2, 6, 4, generator=rng), None, None, None
    check_scores(case)
    with pytest.raises(AssertionError):
        check_scores(case, wrong)


# ---- AnTKV's settings: what anchors are kept for, and of what. All of it in plain lists.

def small_model():
    torch.manual_seed(0)
    return Llama(LlamaConfig(41, 32, 48, 2, 4, 2, 8, 256))


def anchors_of(settings, text, protocol="paper"):
    """{(layer, "k" or "v"): positions, sorted, by head} of an AnTKV with 3 anchors, and its cache."""
    model = small_model()
    method = AnTKV(model.config, "d2m8", anchors="3", recent=0, **settings)
    calibrate(model, method, torch.randint(0, 41, (4, 40), generator=torch.Generator().manual_seed(1)))
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


TEXT = torch.randint(0, 41, (1, 30), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("of, kept", [("both", "kv"), ("keys", "k"), ("values", "v")])
def test_anchors_of_keys_or_values_alone(of, kept):
    found, _, _ = anchors_of({"anchors_of": of}, TEXT)
    both, _, _ = anchors_of({}, TEXT)
    for (layer, kind), positions in found.items():
        assert positions == (both[layer, kind] if kind in kept and layer == 0 else positions)
        assert (positions is not None) == (kind in kept)


def test_the_first_tokens_are_a_control():
    for protocol in ("paper", "stream"):
        found, _, _ = anchors_of({"anchors_by": "first"}, TEXT, protocol)
        expected = [[0, 1, 2]] * 2 if protocol == "paper" else None  # 30 tokens do not fill a block
        assert all(positions == expected for positions in found.values())


def test_random_tokens_are_a_control():
    """Other tokens than the score's and the first, the same in every run, and of each head its own."""
    found, _, _ = anchors_of({"anchors_by": "random"}, TEXT)
    again, _, _ = anchors_of({"anchors_by": "random"}, TEXT)
    by_score, _, _ = anchors_of({}, TEXT)
    assert found == again != by_score
    first = found[0, "k"]
    assert first[0] != first[1] and [0, 1, 2] not in first and all(positions == first for positions in found.values())


def test_random_and_first_tokens_in_a_stream_are_those_of_one_chunk():
    text = torch.randint(0, 41, (1, 256), generator=torch.Generator().manual_seed(3))
    for by in ("first", "random"):
        assert anchors_of({"anchors_by": by}, text)[0] == anchors_of({"anchors_by": by}, text, "stream")[0]


def test_the_score_times_the_error_of_the_row():
    """In layer 0, which has met no code yet: AnS of each token times the L1 distance to its nearest vectors."""
    found, model, method = anchors_of({"anchors_by": "error"}, TEXT)
    trace = Trace(model)
    with torch.no_grad():
        model(TEXT, trace)
    positions = torch.arange(30)
    k_pre, v = trace.k[0].half().float(), trace.v[0].half().float()
    q, k = model.rope.rotate(trace.q[0], positions), model.rope.rotate(k_pre, positions)
    ans = {"k": zeros(k), "v": zeros(k)}
    for b, h, rows, keys in heads(q, k):
        for row, A in zip(rows, attention_weights(rows, keys)):
            for j, a in enumerate(A):
                ans["k"][b][h][j] += a * (1 - a) * norm(row)
                ans["v"][b][h][j] += a
    for kind, x in (("k", k_pre), ("v", v)):
        books = getattr(method.codecs[0], kind).centroids.tolist()
        for h in range(2):
            scores = []
            for t in range(30):
                error = 0.0
                for p in range(4):
                    part = x[0, h, t, 2 * p:2 * p + 2].tolist()
                    nearest = min(books[4 * h + p], key=lambda c: sum((i - j) ** 2 for i, j in zip(part, c)))
                    error += sum(abs(i - j) for i, j in zip(part, nearest))
                scores.append(ans[kind][0][h][t] * error)
            assert found[0, kind][h] == sorted(sorted(range(30), key=lambda t: -scores[t])[:3])
    assert found != anchors_of({}, TEXT)[0]


def test_keys_may_be_quantized_after_rope():
    """Then a cache holds rotated keys, and codebooks are those of rotated keys."""
    model = small_model()
    text = torch.randint(0, 41, (4, 40), generator=torch.Generator().manual_seed(1))
    for cls in (CQ, AnTKV):
        pre, post = (cls(model.config, "d2m8", sensitivity="none", recent=0, rope=rope) for rope in ("pre", "post"))
        for method in (pre, post):
            calibrate(model, method, text)
            cache = KVCache(model, method, "paper")
            with torch.no_grad():
                model(TEXT, cache)
            trace = Trace(model)
            with torch.no_grad():
                model(TEXT, trace)
            k = trace.k[0].half()
            if method is post:
                k = model.rope.rotate(k, torch.arange(30))
            # 7 of 8 rows and more are read as vectors of the codebook that is nearest to the stored key
            read = method.codecs[0].k.decode(cache.layers[0].keys.codes)
            books = method.codecs[0].k.centroids.float()
            vectors = k[0].float().unflatten(-1, (4, 2)).permute(0, 2, 1, 3).flatten(0, 1)  # (places, T, n)
            at = (vectors[:, :, None] - books[:, None]).pow(2).sum(-1).argmin(-1)  # (places, T)
            want = books.gather(1, at[..., None].expand(-1, -1, 2)).unflatten(0, (2, 4)).permute(0, 2, 1, 3).flatten(2)
            assert (read[0] == want).all(-1).float().mean() > 0.98
        assert torch.equal(pre.codecs[0].v.centroids, post.codecs[0].v.centroids)
        assert not torch.equal(pre.codecs[0].k.centroids, post.codecs[0].k.centroids)
