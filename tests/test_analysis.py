"""What `tinykv.analysis` measures, against the papers' formulas in numpy.

The model is small and random, has grouped queries, and sees all tokens or a sliding window. Its projections and
outputs come from PyTorch's hooks; rotation, attention, grids and averages are computed anew here.
"""
from types import SimpleNamespace

import numpy as np
import oracles
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tinykv.analysis import anchors, bias, cosine, errors, keys, norms, outliers, prefix, sinks, widths
from tinykv.analysis.walk import Text, recorded, rows_of, walk
from tinykv.cache import KVCache
from tinykv.methods import antkv
from tinykv.methods.intactkv import IntactKV, Prefix
from tinykv.model import Llama, LlamaConfig
from tinykv.weights import RTN, quantize

L, H, HKV, D, T, W = 3, 4, 2, 4, 22, 2
SINKS = [[0, 9], [4]]  # of each window
HEADS = [h * HKV // H for h in range(H)]  # the KV head of each head


@pytest.fixture(scope="module", params=[None, 6], ids=["all tokens", "sliding window"])
def case(request):
    """A text, and of each window and layer what numpy says: q, k, k_pre, v, A, out."""
    torch.manual_seed(5)
    model = Llama(LlamaConfig(40, 12, 20, L, H, HKV, D, 64, sliding_window=request.param)).requires_grad_(False)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.7)
    model.model["layers"][-1].mlp.down_proj.weight[2] *= 100  # the outlier is not looked for after the last block
    windows = torch.randint(0, 40, (W, T))
    marks = torch.tensor([[t in positions for t in range(T)] for positions in SINKS])
    text = Text(model, windows, marks, layer=1, calibration=windows.flip(0))
    return text, [plain(model, window) for window in windows]


@pytest.fixture
def tiles(monkeypatch):
    """Attention in tiles of one query."""
    monkeypatch.setattr(antkv, "MAX_SCORES", 1)
    monkeypatch.setattr(antkv, "MIN_QUERIES", 1)


def plain(model, window):
    """Of each layer the places of Section 3.1 by their equations, from what the projections give."""
    blocks = list(model.model["layers"])
    projections = [getattr(block.self_attn, f"{name}_proj") for block in blocks for name in "qkv"]
    outputs = [out[0].double().numpy() for _, out in recorded([*projections, *blocks], lambda: model(window[None]))]
    layers, h = [], model.model["embed_tokens"](window).numpy()  # (T, D)
    for layer, block in enumerate(blocks):
        *qkv, out = outputs[4 * layer:4 * layer + 4]
        q, k_pre, v = (x.reshape(T, -1, D).swapaxes(0, 1) for x in qkv)  # (heads, T, d)
        q, k = rotate(q), rotate(k_pre)
        A = attention(model, q, k)
        heads = (A @ v[HEADS]).swapaxes(0, 1).reshape(T, -1)
        mid = h + heads @ block.self_attn.o_proj.weight.numpy().T
        x = mid / np.sqrt((mid ** 2).mean(-1, keepdims=True) + 1e-6) * block.post_attention_layernorm.weight.numpy()
        gate, up, down = (getattr(block.mlp, f"{name}_proj").weight.numpy().T for name in ("gate", "up", "down"))
        d_in = x @ gate / (1 + np.exp(-x @ gate)) * (x @ up)
        h = mid + d_in @ down
        assert np.allclose(h, out, atol=1e-3)
        layers.append(SimpleNamespace(q=q, k=k, k_pre=k_pre, v=v, A=A, mid=mid, d_in=d_in, d_out=d_in @ down, hidden=h))
    return layers


def rotate(x):
    """RoPE, half-split, as a complex number times exp(i p theta^(-2j/d))."""
    z = x[..., :D // 2] + 1j * x[..., D // 2:]
    z = z * np.exp(1j * np.arange(T)[:, None] * 10000.0 ** (-2 * np.arange(D // 2) / D))
    return np.concatenate([z.real, z.imag], -1)


def visible(model):
    distance = np.arange(T)[:, None] - np.arange(T)
    return (distance >= 0) & (distance < (model.config.sliding_window or T))


def attention(model, q, k):
    return oracles.attention(q[None], k[None], model.config.sliding_window)[0]  # (H, T, T)


def check(case, rows, name, expected, marks=None):
    """expected(p, s): of a layer of one window, s (T) True at the sinks; a row has the mean over windows."""
    text, layers = case
    for layer, row in enumerate(rows):
        numbers = [expected(of[layer], s.numpy()) for of, s in zip(layers, text.marks if marks is None else marks)]
        numbers = [x for x in numbers if x is not None]
        assert row[name] == (pytest.approx(np.mean(numbers), rel=2e-4, abs=1e-6) if numbers else None), (name, layer)


def low_median(x):
    return np.sort(x, axis=None)[(x.size - 1) // 2]


# The forward

def test_the_walk_is_the_forward(case):
    text, layers = case
    for at, p in zip(walk(text.model, text.windows[0]), layers[0], strict=True):
        for name in ("mid", "d_in", "d_out", "hidden", "q", "k", "k_pre", "v"):
            assert np.allclose(getattr(at, name), getattr(p, name), rtol=1e-3, atol=1e-3), name


# Where sinks are

@pytest.mark.parametrize("tile", [1, 10 ** 6])
def test_sink_scores_and_marks(case, monkeypatch, tile):
    text, layers = case
    monkeypatch.setattr(antkv, "MAX_SCORES", tile)
    monkeypatch.setattr(antkv, "MIN_QUERIES", 1)
    for name, number in (("SPAN", 8), ("FEWEST", 5), ("HEADS", 0.25), ("THRESHOLD", 0.2)):
        monkeypatch.setattr(sinks, name, number)
    near = min(8, text.model.config.sliding_window or 8)
    marks = sinks.find_sinks(text.model, text.windows)
    for p in sum(layers, []):  # what each token receives from the `near` queries from its own on, by each head
        p.scores = np.stack([p.A[:, j:j + near, j].mean(1) for j in range(T)], 1).tolist()  # (H, T)
    scores = np.array([[p.scores for p in of] for of in layers])  # (W, L, H, T)
    found = ((scores >= 0.2).mean((1, 2)) >= 0.25) & (np.arange(T) <= T - 5)
    assert marks.tolist() == found.tolist() and marks.any() and not marks.all()

    # a layer's own sinks, in plain lists, whatever those of the text are
    def own_sinks(p):
        return [j for j in range(T - 4) if sum(head[j] >= 0.2 for head in p.scores) / H >= least]

    def of(tokens, collect=np.mean):
        def expected(p, _):
            means = [sum(head[j] for head in p.scores) / H for j in tokens(own_sinks(p))]
            return collect(means) if means else None
        return expected

    def share(p, _):
        hits = [head[j] >= 0.2 for head in p.scores for j in own_sinks(p)]
        return sum(hits) / len(hits) if hits else None

    for least in (0.25, 0.5):  # in a layer, most often the first token is a sink; then it is none
        monkeypatch.setattr(sinks, "HEADS", least)
        assert len({tuple(own_sinks(p)) for p in layers[0]}) > 1
        rows = rows_of(sinks, Text(text.model, text.windows, ~marks, 1))
        check(case, rows, "sinks", lambda p, _: len(own_sinks(p)))
        check(case, rows, "first", of(lambda s: [0]))
        check(case, rows, "later", of(lambda s: [j for j in s if j > 0]))
        check(case, rows, "others", of(lambda s: [j for j in range(1, T - 4) if j not in s]))
        check(case, rows, "largest other", of(lambda s: [j for j in range(1, T - 4) if j not in s], max))
        check(case, rows, "heads", share)


def test_the_map_shows_the_largest_of_a_cell(case):
    text, layers = case
    cells = sinks.attention_map(text.shown()[0], size=5)
    cell = np.arange(T) * 5 // T
    A = layers[0][1].A.mean(0)
    for i in range(5):
        for j in range(5):
            wanted = A[cell == i].mean(0)[cell == j].max()
            assert cells[i, j].item() == pytest.approx(wanted, rel=1e-3, abs=1e-6)


# What goes with them

def test_outliers(case):
    text, layers = case
    rows = outliers.measure(text)
    sizes = [[np.abs(p.hidden[s]).mean(0) for p in of[:-1]] for of, s in zip(layers, text.marks.numpy())]
    channel, = {row["channel"] for row in rows}
    assert channel == np.mean(sizes, (0, 1)).argmax() == rows[0]["channels"][0]
    for column, place in {"d_in": "d_in", "d_out": "d_out", "mid": "mid", "out": "hidden"}.items():
        check(case, rows, column, lambda p, s, place=place: np.abs(getattr(p, place)[s]).max())
        check(case, rows, f"{column} others", lambda p, s, place=place: np.abs(getattr(p, place)[~s]).max())

    def size(p, s):
        return np.abs(p.hidden[s, channel]).mean()

    check(case, rows, "d_out c", lambda p, s: p.d_out[s, channel].mean())
    check(case, rows, "out c", lambda p, s: p.hidden[s, channel].mean())
    check(case, rows, "size c", size)
    check(case, rows, "ratio", lambda p, s: np.abs(p.hidden[s]).max() / low_median(np.abs(p.hidden)))
    check(case, rows, "ratio c", lambda p, s: size(p, s) / low_median(np.abs(p.hidden)))


def test_channels_with_outliers():
    at_sinks, at_others = torch.tensor([5.0, 100.0, 11.0, 30.0, 9.9]), torch.tensor([1.0, 2.0, 6.0, 15.0, 0.1])
    assert outliers.outlier_channels(at_sinks, at_others) == [1, 3]


def test_norms(case):
    rows = rows_of(norms, case[0])
    for kind in "qkv":
        def sizes(p, kind=kind):
            return np.linalg.norm(getattr(p, kind), axis=-1)  # (heads, T)

        check(case, rows, kind, lambda p, s: low_median(sizes(p)[:, ~s]))
        check(case, rows, f"{kind} sinks", lambda p, s: sizes(p)[:, s].mean() / low_median(sizes(p)[:, ~s]))


def test_cosines(case, tiles):
    rows, looks = rows_of(cosine, case[0]), visible(case[0].model)

    def cosines(p, s, keys):
        """Of the queries that are no sinks' with some of the keys that they see."""
        q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (p.q, p.k[HEADS]))
        return np.where(looks, q @ k.swapaxes(1, 2), np.nan)[:, ~s][..., keys]

    def mean_of(pick):
        def expected(p, s):
            c = cosines(p, s, pick(s))
            return np.nanmean(c) if np.isfinite(c).any() else None
        return expected

    check(case, rows, "sinks", mean_of(lambda s: s))
    check(case, rows, "others", mean_of(lambda s: ~s))
    check(case, rows, "largest", lambda p, s: s[np.nanargmax(cosines(p, s, s | True), -1)].mean())


def parts(p, s):
    """Eq. 9, by head: sum over i in S of p_i^t v_i, and the sum over all other tokens, (H, T, d) both."""
    v = p.v[HEADS]
    return p.A[..., s] @ v[:, s], p.A[..., ~s] @ v[:, ~s]


def agreement(x):
    """(H): the mean cosine over all pairs of the vectors of each head that are not 0."""
    found = []
    for of in x:
        of = of[np.linalg.norm(of, axis=-1) > 0]
        u = of / np.linalg.norm(of, axis=-1, keepdims=True)
        found.append((u @ u.T)[np.triu_indices(len(u), 1)].mean())
    return np.array(found)


def test_biases(case, tiles):
    rows = rows_of(bias, case[0])
    check(case, rows, "attention", lambda p, s: p.A[:, ~s][..., s].sum(-1).mean())
    check(case, rows, "size", lambda p, s: np.linalg.norm(parts(p, s)[0][:, ~s], axis=-1).mean()
          / np.linalg.norm(sum(parts(p, s))[:, ~s], axis=-1).mean())
    check(case, rows, "consistency", lambda p, s: agreement(parts(p, s)[0]).mean())
    check(case, rows, "rest", lambda p, s: agreement(parts(p, s)[1]).mean())


def test_windows_without_a_sink_do_not_count(case):
    text, _ = case
    none = text.marks.clone()
    none[0] = False
    one = rows_of(bias, Text(text.model, text.windows[1:], text.marks[1:], 1))
    assert rows_of(bias, Text(text.model, text.windows, none, 1)) == one
    rows = rows_of(norms, Text(text.model, text.windows, none & False, 1))
    assert all(row["q sinks"] is None and row["q"] > 0 for row in rows)


def test_sorted_keys(case, monkeypatch):
    monkeypatch.setattr(keys, "MOST", 7)
    rows = rows_of(keys, case[0])

    def sizes(p):
        return np.sort(np.abs(p.k).sum(-1))  # (Hkv, T)

    def ratios(p):
        return (sizes(p)[:, 1:] / sizes(p)[:, :-1])[:, :7]

    check(case, rows, "smallest", lambda p, s: np.mean([x[0] / low_median(x) for x in sizes(p)]))
    check(case, rows, "cliff", lambda p, s: ratios(p).max(-1).mean())
    check(case, rows, "below", lambda p, s: (ratios(p).argmax(-1) + 1).mean())
    check(case, rows, "sinks", lambda p, s: np.concatenate(
        [s[np.abs(k).sum(-1).argsort()[:n + 1]] for k, n in zip(p.k, ratios(p).argmax(-1))]).mean())


# Quantization

GROUP = 2


@pytest.fixture
def small_groups(case, monkeypatch):
    """And the sinks of the calibration windows, which are the text's own."""
    def find_sinks(model, windows):
        return torch.stack([text.marks[(text.windows == window).all(1)][0] for window in windows])
    text, _ = case
    monkeypatch.setattr(errors, "find_sinks", find_sinks)
    monkeypatch.setattr(errors, "GROUP_SIZE", GROUP)


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


def test_table_1(case, small_groups):
    """Every row and column, with grids from the definitions; windows count by their tokens."""
    text, layers = case
    rows = errors.measure(text)
    assert len(rows) == 18
    for row in rows:
        scheme, bits = row["scheme"], row["bits"]
        kind = "k_pre" if scheme == "channel-static" else row["of"].lower()
        found = {"overall": [], "without": [], "with": []}
        for layer in range(L):
            for w, s in enumerate(text.marks.numpy()):
                x = getattr(layers[w][layer], kind)
                square = 100 * (x - as_read(layers, layer, w, kind, scheme, bits, True)) ** 2
                hit = s if scheme != "channel-dynamic" else s.reshape(-1, GROUP).any(1).repeat(GROUP)
                found["overall"].append(square.ravel())
                found["with"].append(square[:, hit].ravel())
                square = 100 * (x - as_read(layers, layer, w, kind, scheme, bits, False)) ** 2
                found["without"].append(square[:, ~hit].ravel())
        wanted = {name: np.concatenate(x).mean() for name, x in found.items()}
        for name, number in wanted.items():
            assert row[name] == pytest.approx(number, rel=1e-3), (scheme, bits, name)
        before, after = ("overall", "without") if scheme.endswith("static") else ("without", "with")
        assert row["change"] == pytest.approx(wanted[after] / wanted[before] - 1, rel=1e-2, abs=1e-3)


def test_figure_7(case, small_groups, monkeypatch):
    text, layers = case
    monkeypatch.setattr(widths, "WIDTHS", (2, 5))
    rows = widths.measure(text)
    assert [(row["bits"], row["kept"]) for row in rows] == [
        (16, "nothing"), (2, "nothing"), (5, "nothing"), (2, "sinks"), (5, "sinks")]
    for row in rows:
        found = []
        for layer in range(L):
            for w, s in enumerate(text.marks.numpy()):
                p, now, kept = layers[w][layer], {}, row["kept"] == "sinks"
                for kind in "kv":
                    x = read = getattr(p, kind)
                    if row["bits"] < 16:
                        read = as_read(layers, layer, w, kind, "token-static", row["bits"], not kept)
                    now[kind] = np.where(s[:, None] & kept, x, read)
                new = SimpleNamespace(v=now["v"], A=attention(text.model, p.q, now["k"]))
                sees = visible(text.model)[:, s].any(1) & ~s  # (T)
                exact, changed = parts(p, s)[0][:, sees], parts(new, s)[0][:, sees]
                mass, new_mass = (x.A[:, sees][..., s].sum(-1) for x in (p, new))
                cosines = (exact * changed).sum(-1) / np.linalg.norm(exact, axis=-1) / np.linalg.norm(changed, axis=-1)
                change = np.linalg.norm(changed - exact, axis=-1).mean() / np.linalg.norm(exact, axis=-1).mean()
                found.append([new_mass.mean(), np.abs(new_mass - mass).mean(), change, cosines.mean()])
        for name, number in zip(("attention", "change", "bias change", "cosine"), np.mean(found, 0)):
            exact = row["bits"] == 16 and name != "attention"
            assert row[name] == (None if exact else pytest.approx(number, rel=2e-3))


@given(st.permutations(range(7)), st.permutations(range(7)))
def test_rank_correlation_is_spearmans(a, b):
    """1 - 6 sum d^2 / (n (n^2 - 1)), whatever the numbers behind the ranks."""
    wanted = 1 - 6 * sum((x - y) ** 2 for x, y in zip(a, b)) / (7 * 48)
    numbers = torch.tensor(a).float().exp(), torch.tensor(b).float() * 3 - 100
    assert anchors.rank_correlation(*numbers).item() == pytest.approx(wanted, abs=1e-5)


def test_anchors_are_ranked_by_their_damage():
    """The table by the measurements themselves, of one window and KV head: Spearman's correlation, and the top tokens'
    share."""
    torch.manual_seed(0)
    model = Llama(LlamaConfig(41, 32, 48, 2, 4, 1, 16, 256)).requires_grad_(False)
    text = Text(model, torch.randint(0, 41, (1, 200)), torch.zeros(1, 200, dtype=torch.bool), layer=1,
                calibration=torch.randint(0, 41, (2, 200)))
    rows = {(row["of"], row["ranked by"]): row for row in anchors.measure(text, "d8m16")}
    assert len(rows) == 9
    for (of, by), row in rows.items():
        ceiling = rows[of, "itself (ceiling)"]
        assert by != "itself (ceiling)" or row["rank by layer"] == pytest.approx([1, 1])
        assert all(0 <= x <= most + 1e-6 for x, most in zip(row["top by layer"], ceiling["top by layer"]))
        assert row["rank"] == pytest.approx(np.mean(row["rank by layer"]))
        damage, score = (np.array(row["first window"][name]) for name in ("damage", "score"))
        assert damage.shape == (200,) and row["top by layer"][text.layer] == pytest.approx(
            damage[score.argsort()[-2:]].sum() / damage.sum(), rel=1e-4)  # 1% of 200 tokens
    assert min(rows["V", "score x error"]["rank by layer"]) > 0.99  # of values the bound of one token is exact


# IntactKV's prefixes

def small_text(W=2, layers=2):
    torch.manual_seed(0)
    model = Llama(LlamaConfig(41, 32, 48, layers, 4, 2, 16, 64)).requires_grad_(False)
    for parameter in model.parameters():
        parameter.mul_(2)  # so that the layers do something
    marks = torch.zeros(W, 20, dtype=torch.bool)
    return Text(model, torch.randint(0, 41, (W, 20)), marks, 1)


@pytest.mark.parametrize("n", [0, 7])
def test_errors_by_length(n):
    """Against the same rows in the cache that generates, which rounds them to 16 bits, and PyTorch's own hooks."""
    text, start = small_text(layers=3), 8
    quantized = quantize(text.model, RTN(3))
    row, = prefix.errors_by_length(text.model, quantized, text.windows[0], [n], start)

    def outputs(model, tokens, cache=None):
        """What the last block gives, and what attention adds: from before a block to before its MLP."""
        blocks = list(model.model["layers"])
        calls = recorded([m for b in blocks for m in (b.post_attention_layernorm, b)],
                         lambda: model(tokens[None], cache, logits=False))
        return calls[-1][1][0], [(mid[0] - given[0]) for (mid, _), (given, _) in zip(calls[::2], calls[1::2])]

    exact_rows = Prefix("first", text.windows[0][:n].tolist())
    exact_rows.fill(text.model, quantized)
    cache = KVCache(quantized, IntactKV(text.model.config, exact_rows))
    last, attention = outputs(quantized, text.windows[0], cache)
    exact_last, exact_attention = outputs(text.model, text.windows[0])
    assert row["last"] == pytest.approx((last[start - n:] - exact_last[start:]).pow(2).mean().item(), rel=0.02)
    wanted = sum((a[start - n:] - b[start:]).pow(2).mean().item() for a, b in zip(attention, exact_attention))
    assert row["n"] == n and row["attention"] == pytest.approx(wanted, rel=0.02)
    row, = prefix.errors_by_length(text.model, text.model, text.windows[0], [n], start)
    assert max(row["last"], row["attention"]) < 1e-4  # 16 bits of the prefix, doubled in each layer


def test_prefixes_stop_short_of_each_sink_and_past_it():
    text = small_text()
    text.marks[0, [0, 5, 9]] = text.marks[1, [0, 7]] = True
    rows = prefix.measure(text)
    assert [(row["kept"], row["n"]) for row in rows] == [
        ("nothing", 0), ("sink 1 too", 1), ("up to sink 2", 6), ("sink 2 too", 7)]  # means; both windows have two
    alone = [prefix.errors_by_length(text.model, quantize(text.model, RTN(3)), window, [n], start)[0]["last"]
             for window, n, start in zip(text.windows, (5, 7), (6, 8))]
    assert rows[2]["last"] == pytest.approx(np.mean(alone))
