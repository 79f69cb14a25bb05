"""What `tinykv.lab.analysis` measures, against the papers' formulas in numpy.

The model is small and random, has grouped queries, and sees all tokens or a sliding window. What its linear layers give
comes from PyTorch's hooks; rotation, attention, grids and averages are computed anew here.
"""
import itertools
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import oracles
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tinykv.cache import KVCache
from tinykv.lab.analysis import anchors, bias, cosine, errors, keys, norms, outliers, prefix, sinks
from tinykv.lab.analysis.walk import Text, mean, recorded, rows_of, walk
from tinykv.lab.weights import RTN, quantize
from tinykv.lab.weights.linear import LINEARS
from tinykv.methods import antkv
from tinykv.methods.intactkv import IntactKV, Prefix
from tinykv.model import Llama, LlamaConfig

L, H, HKV, D, T, W = 3, 4, 2, 4, 22, 2
SINKS = [[0, 9], [4]]  # of each window
HEADS = [h * HKV // H for h in range(H)]  # the KV head of each head
GROUP, SPAN, FEWEST, MOST = 2, 8, 5, 7  # of quantization; of sinks; of sorted keys


@pytest.fixture(scope="module", params=[None, 4], ids=["all tokens", "sliding window"])
def case(request):
    """A text, and of each window and layer what numpy says."""
    torch.manual_seed(5)
    model = Llama(LlamaConfig(40, 12, 20, L, H, HKV, D, 64, sliding_window=request.param)).requires_grad_(False)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.7)
    model.model["layers"][-1].mlp.down_proj.weight[2] *= 100  # the outlier is not looked for after the last block
    windows = torch.randint(0, 40, (W, T))
    marks = torch.tensor([[t in positions for t in range(T)] for positions in SINKS])
    text = Text(model, windows, marks, layer=1, calibration=windows.flip(0))
    return text, [plain(model, window) for window in windows]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Attention in tiles of one query -> the queries of each tile; numbers that fit so short a text."""
    seen, softmax = [], torch.Tensor.softmax
    monkeypatch.setattr(torch.Tensor, "softmax", lambda x, *a: (seen.append(x.shape[-2]), softmax(x, *a))[1])
    for module, name, number in (
            (antkv, "MAX_SCORES", 1), (antkv, "MIN_QUERIES", 1), (sinks, "SPAN", SPAN), (sinks, "FEWEST", FEWEST),
            (sinks, "HEADS", 0.5), (keys, "MOST", MOST), (errors, "GROUP_SIZE", GROUP)):
        monkeypatch.setattr(module, name, number)
    return seen


def plain(model, window):
    """Of each layer the places of Section 3.1 by their equations, from what the linear layers give."""
    linears = [block.get_submodule(name) for block in model.model["layers"] for name in LINEARS]
    outputs = [out[0].double().numpy() for _, out in recorded(linears, lambda: model(window[None]))]
    layers, hidden = [], model.model["embed_tokens"](window).numpy()  # (T, D)
    distance, sliding = np.arange(T)[:, None] - np.arange(T), model.config.sliding_window or T
    for i in range(0, len(outputs), 7):
        *qkv, o, gate, up, d_out = outputs[i:i + 7]
        q, k_pre, v = (x.reshape(T, -1, D).swapaxes(0, 1) for x in qkv)  # (heads, T, d)
        q, k, mid = rotate(q), rotate(k_pre), hidden + o
        hidden = mid + d_out
        layers.append(SimpleNamespace(q=q, k=k, k_pre=k_pre, v=v, A=attention(model, q, k), mid=mid, d_out=d_out,
                                      d_in=gate / (1 + np.exp(-gate)) * up, hidden=hidden, sliding=sliding,
                                      sees=(distance >= 0) & (distance < sliding)))
    return layers


def rotate(x):
    """RoPE, half-split, as a complex number times exp(i p theta^(-2j/d))."""
    z = x[..., :D // 2] + 1j * x[..., D // 2:]
    z = z * np.exp(1j * np.arange(T)[:, None] * 10000.0 ** (-2 * np.arange(D // 2) / D))
    return np.concatenate([z.real, z.imag], -1)


def attention(model, q, k):
    return oracles.attention(q[None], k[None], model.config.sliding_window)[0]  # (H, T, T)


def low_median(x):
    return np.sort(x, axis=None)[(x.size - 1) // 2]


def norm(x):
    return np.linalg.norm(x, axis=-1)


def largest(x):
    return np.abs(x).max()


def test_the_walk_is_the_forward(case):
    text, layers = case
    for at, p in zip(walk(text.model, text.windows[0]), layers[0], strict=True):
        for name in ("mid", "d_in", "d_out", "hidden", "q", "k", "k_pre", "v"):
            assert np.allclose(getattr(at, name), getattr(p, name), rtol=1e-3, atol=1e-3), name


# The columns of a table, of one layer p of one window with the sinks s (T)

def received(p):
    """What each token receives from the SPAN queries from its own on, by each head: (H, T)."""
    return np.stack([p.A[:, j:j + min(SPAN, p.sliding), j].mean(1) for j in range(T)], 1)


def of_sinks(p, _):
    """In plain lists: a layer has sinks of its own. The first token has a column of its own, sink or not."""
    scores, judged = received(p).tolist(), range(1, T - min(FEWEST, p.sliding) + 1)
    own = [j for j in (0, *judged) if sum(of[j] >= 0.3 for of in scores) / H >= 0.5]
    means = [sum(of[j] for of in scores) / H for j in range(T)]
    others = [means[j] for j in judged if j not in own]
    return {"sinks": len(own), "first": means[0], "later": [means[j] for j in own if j > 0], "others": others,
            "largest other": max(others), "heads": [of[j] >= 0.3 for of in scores for j in own]}


def of_outliers(p, s, channel):
    places = {"d_in": p.d_in, "d_out": p.d_out, "mid": p.mid, "out": p.hidden}
    median, size = low_median(np.abs(p.hidden)), np.abs(p.hidden[s, channel]).mean()
    return {**{name: largest(x[s]) for name, x in places.items()},
            **{f"{name} others": largest(x[~s]) for name, x in places.items()},
            "ratio": largest(p.hidden[s]) / median, "channel": channel, "d_out c": p.d_out[s, channel],
            "out c": p.hidden[s, channel], "size c": size, "ratio c": size / median}


def of_norms(p, s):
    others = {kind: low_median(norm(getattr(p, kind))[:, ~s]) for kind in "qkv"}
    return others | {f"{kind} sinks": norm(getattr(p, kind))[:, s] / others[kind] for kind in "qkv"}


def of_cosine(p, s):
    """Of the queries that are no sinks' with the keys that they see."""
    q, k = (x / norm(x)[..., None] for x in (p.q, p.k[HEADS]))
    c = np.where(p.sees, q @ k.swapaxes(1, 2), np.nan)[:, ~s]  # (H, queries, T)
    return {"sinks": c[..., s], "others": c[..., ~s], "largest": s[np.nanargmax(c, -1)]}


def parts(p, s):
    """Eq. 9, by head: sum over i in S of p_i^t v_i, and the sum over all other tokens, (H, T, d) both."""
    v = p.v[HEADS]
    return p.A[..., s] @ v[:, s], p.A[..., ~s] @ v[:, ~s]


def agreement(x):
    """(H): the mean cosine over all pairs of the vectors of each head that are not 0."""
    found = []
    for of in x:
        u = of[norm(of) > 0] / norm(of[norm(of) > 0])[:, None]
        found.append((u @ u.T)[np.triu_indices(len(u), 1)].mean())
    return found


def of_bias(p, s):
    of_s, of_others = parts(p, s)
    return {"attention": p.A[:, ~s][..., s].sum(-1), "consistency": agreement(of_s), "rest": agreement(of_others),
            "size": norm(of_s[:, ~s]).mean() / norm((of_s + of_others)[:, ~s]).mean()}


def of_keys(p, s):
    sizes, order = np.sort(np.abs(p.k).sum(-1)), np.abs(p.k).sum(-1).argsort()  # (Hkv, T)
    ratios = (sizes[:, 1:] / sizes[:, :-1])[:, :MOST]
    below = ratios.argmax(-1) + 1  # (Hkv)
    return {"smallest": [x[0] / low_median(x) for x in sizes], "cliff": ratios.max(-1), "below": below,
            "sinks": np.concatenate([s[of[:n]] for of, n in zip(order, below)])}


@pytest.mark.parametrize("phenomenon, of", [(sinks, of_sinks), (outliers, of_outliers), (norms, of_norms),
                                            (cosine, of_cosine), (bias, of_bias), (keys, of_keys)])
def test_a_number_is_the_mean_over_windows_of_what_the_formula_gives(case, small, phenomenon, of):
    """Each window counts once, and one that has no such number, as no sink, does not. No T x T matrix is ever whole."""
    text, layers = case
    rows, more = rows_of(phenomenon, text), {}
    if phenomenon is outliers:
        sizes = [[np.abs(p.hidden[s]).mean(0) for p in of_window[:-1]] for of_window, s in zip(layers, text.marks)]
        more = {"channel": np.mean(sizes, (0, 1)).argmax()}
        assert all(row["channels"][0] == more["channel"] for row in rows)
    for layer, row in enumerate(rows):
        numbers = defaultdict(list)
        for of_window, s in zip(layers, text.marks.numpy()):
            for name, x in of(of_window[layer], s, **more).items():
                x = np.asarray(x, dtype=float)
                numbers[name] += [np.nanmean(x)] if np.isfinite(x).any() else []
        assert {*phenomenon.COLUMNS} - {"layer", "channels"} <= {*numbers}
        for name, of_name in numbers.items():
            assert row[name] == (pytest.approx(np.mean(of_name), rel=2e-4, abs=1e-6) if of_name else None), name
    assert {*small} == ({1} if phenomenon in (sinks, bias) else set())


def test_a_sink_of_the_text_is_one_in_a_share_of_all_heads(case):
    text, layers = case
    scores = np.array([[received(p) for p in of_window] for of_window in layers])  # (W, L, H, T)
    judged = np.arange(T) <= T - min(FEWEST, layers[0][0].sliding)
    marks = sinks.find_sinks(text.model, text.windows)
    assert marks.tolist() == (((scores >= 0.3).mean((1, 2)) >= 0.5) & judged).tolist()
    assert marks.any() and not marks.all()


def test_a_window_without_a_sink_does_not_count(case):
    text, _ = case
    none = text.marks.clone()
    none[0] = False
    one = rows_of(bias, Text(text.model, text.windows[1:], text.marks[1:], 1))
    assert rows_of(bias, Text(text.model, text.windows, none, 1)) == one
    rows = rows_of(norms, Text(text.model, text.windows, none & False, 1))
    assert all(row["q sinks"] is None and row["q"] > 0 for row in rows)
    assert mean([torch.tensor([1.0, 2.0]), torch.tensor([3.0, torch.nan])]) == [1, 2]


def test_the_map_shows_the_largest_of_a_cell(case):
    text, layers = case
    cells = sinks.attention_map(text.shown()[0], size=5)
    A, cell = layers[0][1].A.mean(0), np.arange(T) * 5 // T
    for i, j in itertools.product(range(5), range(5)):
        wanted = A[cell == i].mean(0)[cell == j].max()
        assert cells[i, j].item() == pytest.approx(wanted, rel=1e-3, abs=1e-6)


def test_channels_with_outliers():
    at_sinks, at_others = torch.tensor([5.0, 100.0, 11.0, 30.0, 9.9]), torch.tensor([1.0, 2.0, 6.0, 15.0, 0.1])
    assert outliers.outlier_channels(at_sinks, at_others) == [1, 3]


# Quantization

@pytest.fixture
def known_sinks(case, monkeypatch):
    """The sinks of the calibration windows are the text's own."""
    text, _ = case
    monkeypatch.setattr(errors, "find_sinks", lambda model, windows: torch.stack(
        [text.marks[(text.windows == window).all(1)][0] for window in windows]))
    return case


def as_read(layers, layer, w, kind, scheme, bits, with_sinks):
    """Keys or values of a window (Hkv, T, d) as they are read. with_sinks: whether they count in static ranges."""
    axis, when = scheme.split("-")
    static = None
    if when == "static":
        rows = [getattr(of[layer], kind)[:, [with_sinks or t not in s for t in range(T)]]
                for of, s in zip(layers, SINKS)]
        rows = np.concatenate(rows, 1)
        static = rows.min(1), rows.max(1)  # (Hkv, d) both
    x = getattr(layers[w][layer], kind)[None]
    return oracles.affine(x, np.zeros(x.shape[:3], bool), bits, axis, "offset", GROUP, static)[0]


def test_table_1(known_sinks):
    """Every row and column, with grids from the definitions; windows count by their tokens."""
    text, layers = known_sinks
    rows = errors.measure(text)
    assert len(rows) == 18
    for row in rows:
        scheme, bits, found = row["scheme"], row["bits"], defaultdict(list)
        kind = "k_pre" if scheme == "channel-static" else row["of"].lower()
        for layer, (w, s) in itertools.product(range(L), enumerate(text.marks.numpy())):
            hit = s if scheme != "channel-dynamic" else s.reshape(-1, GROUP).any(1).repeat(GROUP)
            for column, with_sinks, tokens in (("overall", True, s | True), ("with", True, hit),
                                               ("without", False, ~hit)):
                read = as_read(layers, layer, w, kind, scheme, bits, with_sinks)
                found[column].append(100 * (getattr(layers[w][layer], kind) - read)[:, tokens].ravel() ** 2)
        wanted = {column: np.concatenate(squares).mean() for column, squares in found.items()}
        before, after = ("overall", "without") if scheme.endswith("static") else ("without", "with")
        assert {column: row[column] for column in wanted} == pytest.approx(wanted, rel=1e-3), (scheme, bits)
        assert row["change"] == pytest.approx(wanted[after] / wanted[before] - 1, rel=1e-2, abs=1e-3)


# AnTKV's scores

@given(st.permutations(range(7)), st.permutations(range(7)))
def test_rank_correlation_is_spearmans(a, b):
    """1 - 6 sum d^2 / (n (n^2 - 1)), whatever the numbers behind the ranks."""
    wanted = 1 - 6 * sum((x - y) ** 2 for x, y in zip(a, b)) / (7 * 48)
    numbers = torch.tensor(a).float().exp(), torch.tensor(b).float() * 3 - 100
    assert anchors.rank_correlation(*numbers).item() == pytest.approx(wanted, abs=1e-5)


def test_anchors_are_ranked_by_their_damage(case):
    """The table by the measurements themselves, of one window and KV head: Spearman's correlation, and the top tokens'
    share. What is read as it was does no damage."""
    torch.manual_seed(0)
    model = Llama(LlamaConfig(41, 32, 48, 2, 4, 1, 16, 256)).requires_grad_(False)
    text = Text(model, torch.randint(0, 41, (1, 200)), torch.zeros(1, 200, dtype=torch.bool), layer=1,
                calibration=torch.randint(0, 41, (2, 200)))
    rows = {(row["of"], row["ranked by"]): row for row in anchors.measure(text, "d8m16")}
    assert len(rows) == 6
    for (of, by), row in rows.items():
        ceiling = rows[of, "itself (ceiling)"]
        assert by != "itself (ceiling)" or row["rank by layer"] == pytest.approx([1, 1])
        assert all(0 <= x <= most + 1e-6 for x, most in zip(row["top by layer"], ceiling["top by layer"]))
        assert row["rank"] == pytest.approx(np.mean(row["rank by layer"]))
        damage, score = (np.array(row["first window"][name]) for name in ("damage", "score"))
        assert damage.shape == (200,) and row["top by layer"][text.layer] == pytest.approx(
            damage[score.argsort()[-2:]].sum() / damage.sum(), rel=1e-4)  # 1% of 200 tokens
    assert min(rows["V", "score x error"]["rank by layer"]) > 0.99  # of values the bound of one token is exact
    exact = SimpleNamespace(encode=lambda x: x, decode=lambda x: x)
    at = walk(model, text.windows[0])[1]
    for damage, _, error in anchors.rankings(at, SimpleNamespace(k=exact, v=exact), model.rope).values():
        assert not damage.any() and not error.any()


# IntactKV's prefixes

def test_errors_by_length(case):
    """Against the same rows in the cache that generates, which rounds them to 16 bits, and PyTorch's own hooks."""
    text, _ = case
    model, quantized, window, start = text.model, quantize(text.model, RTN(3)), text.windows[0], 8
    for n in (0, 7):
        row, = prefix.errors_by_length(model, quantized, window, [n], start)

        def outputs(model, tokens, cache=None):
            """What the last block gives, and what attention adds: from before a block to before its MLP."""
            modules = [m for block in model.model["layers"] for m in (block.post_attention_layernorm, block)]
            calls = recorded(modules, lambda: model(tokens[None], cache, logits=False))
            return calls[-1][1][0], [(mid[0] - given[0]) for (mid, _), (given, _) in zip(calls[::2], calls[1::2])]

        exact_rows = Prefix("first", window[:n].tolist())
        exact_rows.fill(model, quantized)
        last, added = outputs(quantized, window, KVCache(quantized, IntactKV(model.config, exact_rows)))
        exact_last, exact_added = outputs(model, window)
        assert row["last"] == pytest.approx((last[start - n:] - exact_last[start:]).pow(2).mean().item(), rel=0.02)
        wanted = sum((a[start - n:] - b[start:]).pow(2).mean().item() for a, b in zip(added, exact_added))
        assert row["n"] == n and row["attention"] == pytest.approx(wanted, rel=0.02)


def test_prefixes_stop_short_of_each_sink_and_past_it(case):
    """Of those sinks that all windows have; errors are of the tokens after the longest prefix."""
    text, _ = case
    text = Text(text.model, text.windows, text.marks.clone(), 1)
    text.marks[0, 12], text.marks[1] = True, torch.isin(torch.arange(T), torch.tensor([0, 7]))
    rows = prefix.measure(text)
    assert [(row["kept"], row["n"]) for row in rows] == [
        ("nothing", 0), ("sink 1 too", 1), ("up to sink 2", 8), ("sink 2 too", 9)]  # means
    alone = [prefix.errors_by_length(text.model, quantize(text.model, RTN(3)), window, [n], n + 1)[0]["last"]
             for window, n in zip(text.windows, (9, 7))]
    assert rows[2]["last"] == pytest.approx(np.mean(alone))
