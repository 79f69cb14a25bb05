"""What `tinykv.analysis` measures, against plain lists: sums over tokens as the papers have them.

The model is small and random, has grouped queries, and sees all tokens or a sliding window. Its queries, keys and
values come from a cache that keeps what passes; rotation, attention, grids and averages are computed anew here.
"""
import cmath
import copy
import math
import statistics
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import attention_weights, norm

from tinykv import UserError
from tinykv.analysis import anchors, maps, prefixes, quantization, sinks
from tinykv.analysis.walk import walk
from tinykv.cache import KVCache
from tinykv.methods import antkv
from tinykv.methods.intactkv import IntactKV, Prefix
from tinykv.model import Llama, LlamaConfig
from tinykv.weights import RTN, quantize

L, H, HKV, D, T, W = 3, 4, 2, 4, 22, 2
SINKS = [{0, 9}, {4}]  # of each window


@pytest.fixture(scope="module", params=[None, 6], ids=["all tokens", "sliding window"])
def case(request):
    """A model, windows, marks, and per window and layer what the lists say: {"q", "k", "k_pre", "v", "A", "out"}."""
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=40, hidden_size=12, intermediate_size=20, num_hidden_layers=L, num_attention_heads=H,
        num_key_value_heads=HKV, head_dim=D, max_position_embeddings=64, sliding_window=request.param)
    model = Llama(config)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.7)
    windows = torch.randint(0, 40, (W, T))
    marks = torch.tensor([[t in of_window for t in range(T)] for of_window in SINKS])
    return model, windows, marks, [lists_of(model, window) for window in windows]


class Seen:
    """What some modules are given and what they return, in the forwards that come, by PyTorch's hooks."""

    def __init__(self, modules):
        self.inputs, self.outputs = [], []
        self.hooks = [module.register_forward_hook(self.note) for module in modules]

    def note(self, module, arguments, output):
        self.inputs.append(arguments[0])
        self.outputs.append(output)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for hook in self.hooks:
            hook.remove()


def heads_of(x):
    """x (1, T, heads * D) -> per head the rows of all tokens, as lists."""
    return [[row[h * D:(h + 1) * D] for row in x[0].tolist()] for h in range(x.shape[-1] // D)]


@torch.no_grad()
def lists_of(model, window):
    """Per layer what one forward without a cache computes: projections and outputs by hooks, all else from those."""
    blocks = list(model.model["layers"])
    projections = [getattr(block.self_attn, f"{name}_proj") for block in blocks for name in "qkv"]
    with Seen(projections) as projected, Seen(blocks) as out:
        model(window[None])
    layers = []
    for layer in range(L):
        q, k, v = map(heads_of, projected.outputs[3 * layer:3 * layer + 3])
        one = {"q": [rotate(head) for head in q], "k": [rotate(head) for head in k], "v": v, "k_pre": k,
               "out": out.outputs[layer][0].tolist()}
        one["A"] = [attention_weights(head, one["k"][h * HKV // H], model.config.sliding_window)
                    for h, head in enumerate(one["q"])]
        layers.append(one)
    return layers


def rotate(rows):
    """RoPE, half-split, as a complex number times exp(i p theta^(-2j/d))."""
    turned = []
    for p, row in enumerate(rows):
        z = [complex(row[j], row[j + D // 2]) * cmath.exp(1j * p * 10000 ** (-2 * j / D)) for j in range(D // 2)]
        turned.append([x.real for x in z] + [x.imag for x in z])
    return turned


def dot(a, b):
    return sum(x * y for x, y in zip(a, b))


def mean(numbers):
    numbers = list(numbers)
    return sum(numbers) / len(numbers)


def seen(t, sliding):
    return range(max(0, t - sliding + 1) if sliding else 0, t + 1)


def check(rows, name, expected):
    """expected(w, layer) is a number, or None for a window that does not count; a row has the mean over windows."""
    for layer, row in enumerate(rows):
        numbers = [x for x in (expected(w, layer) for w in range(W)) if x is not None]
        if not numbers:
            assert row[name] is None
        else:
            assert row[name] == pytest.approx(mean(numbers), rel=2e-4, abs=1e-6), (name, layer)


# The forward

@torch.no_grad()
def test_the_walk_is_the_forward(case):
    """Each place of Section 3.1 by its equation, from the attention of the lists."""
    model, windows, _, lists = case
    h = model.model["embed_tokens"](windows[0])  # (T, D)
    places = sinks.four_places(model, windows[0])
    blocks = model.model["layers"]
    for at, place, expected, block in zip(walk(model, windows[0]), places, lists[0], blocks, strict=True):
        heads = [[[sum(p * row[c] for p, row in zip(A, expected["v"][i * HKV // H])) for c in range(D)] for A in of]
                 for i, of in enumerate(expected["A"])]  # (H, T, d)
        mid = h + torch.tensor(heads).transpose(0, 1).flatten(1) @ block.self_attn.o_proj.weight.T
        x = mid / (mid.square().mean(-1, keepdim=True) + 1e-6).sqrt() * block.post_attention_layernorm.weight
        gate, up, down = (getattr(block.mlp, f"{name}_proj").weight for name in ("gate", "up", "down"))
        d_in = (x @ gate.T) * torch.sigmoid(x @ gate.T) * (x @ up.T)
        for name, y in (("mid", mid), ("d_in", d_in), ("d_out", d_in @ down.T), ("out", mid + d_in @ down.T)):
            assert torch.allclose(place[name], y, rtol=1e-3, atol=1e-3), name
        for name in ("q", "k", "k_pre", "v"):
            assert torch.allclose(getattr(at, name)[0], torch.tensor(expected[name]), atol=1e-4), name
        h = at.hidden
        assert torch.allclose(h, torch.tensor(expected["out"]), atol=1e-4)


def test_numbers_that_are_not_finite_are_an_error(case):
    model, windows, marks, _ = case
    weight = model.model["layers"][1].mlp.up_proj.weight
    before = weight[0, 0].item()
    with torch.no_grad():
        weight[0, 0] = float("nan")
    with pytest.raises(UserError, match="layer 1"):
        sinks.norms(model, windows, marks)
    with torch.no_grad():
        weight[0, 0] = before


# Where sinks are

def score_of(A, j, span):
    """Attention that token j receives from the `span` queries from its own on, by one head."""
    return mean(A[t][j] for t in range(j, min(j + span, T)))


@pytest.mark.parametrize("tile", [1, 150, 10 ** 6])
def test_sink_scores_and_marks(case, monkeypatch, tile):
    model, windows, _, lists = case
    sliding = model.config.sliding_window
    monkeypatch.setattr(antkv, "MAX_SCORES", tile)
    monkeypatch.setattr(antkv, "MIN_QUERIES", 1)
    monkeypatch.setattr(sinks, "SPAN", 8)
    monkeypatch.setattr(sinks, "FEWEST", 5)
    monkeypatch.setattr(sinks, "HEADS", 0.25)
    scores, marks = sinks.find_sinks(model, windows, threshold=0.2)
    span = min(8, sliding or 8)
    table = [[[[score_of(A, j, span) for j in range(T)] for A in at["A"]] for at in layers] for layers in lists]
    assert torch.allclose(scores, torch.tensor(table), rtol=1e-3, atol=1e-5)
    found = [[T - j >= 5 and mean(x[j] >= 0.2 for of in layers for x in of) >= 0.25 for j in range(T)]
             for layers in table]
    assert marks.tolist() == found and marks.any() and not marks.all()
    rows, example = sinks.attention_received(model, windows, marks, scores, threshold=0.2)
    found_sinks = [{j for j in range(T) if of[j]} for of in found]
    over_heads = [[[mean(x[j] for x in of) for j in range(T)] for of in layers] for layers in table]
    others = [set(range(1, T - 4)) - of for of in found_sinks]

    def of(w, layer, tokens, collect=mean):
        return collect([over_heads[w][layer][j] for j in tokens]) if tokens else None

    check(rows, "first", lambda w, layer: over_heads[w][layer][0])
    check(rows, "later", lambda w, layer: of(w, layer, found_sinks[w] - {0}))
    check(rows, "others", lambda w, layer: of(w, layer, others[w]))
    check(rows, "largest other", lambda w, layer: of(w, layer, others[w], max))
    check(rows, "heads", lambda w, layer: mean(x[j] >= 0.2 for x in table[w][layer] for j in found_sinks[w])
          if found_sinks[w] else None)
    assert example["scores"].shape == (L, T - 4)
    only = torch.zeros_like(marks)
    only[:, 9] = True  # the first token no sink: it has its column all the same
    rows, _ = sinks.attention_received(model, windows, only, scores, threshold=0.2)
    check(rows, "others", lambda w, layer: of(w, layer, set(range(1, T - 4)) - {9}))


def test_the_map_shows_the_largest_of_a_cell(case):
    model, windows, _, lists = case
    cells = sinks.attention_map(model, windows[0], size=5)
    A = lists[0][L // 2]["A"]
    for i in range(5):
        for j in range(5):
            rows, columns = ([t for t in range(T) if t * 5 // T == cell] for cell in (i, j))
            expected = max(mean(of[t][c] for of in A for t in rows) for c in columns)
            assert cells[i, j].item() == pytest.approx(expected, rel=1e-3, abs=1e-6)


# What goes with them

@torch.no_grad()
def test_outliers(case):
    model, windows, marks, lists = case
    rows, _ = sinks.outliers(model, windows, marks)
    walks = [[{place: x.tolist() for place, x in places.items()} for places in sinks.four_places(model, window)]
             for window in windows]  # tested above

    def largest(w, layer, place, tokens):
        return max(abs(x) for t in tokens for x in walks[w][layer][place][t])

    for place in sinks.PLACES:
        check(rows, place, lambda w, layer, place=place: largest(w, layer, place, SINKS[w]))
        check(rows, f"{place} others",
              lambda w, layer, place=place: largest(w, layer, place, set(range(T)) - SINKS[w]))
    size = [[sorted(abs(x) for row in at["out"] for x in row) for at in layers] for layers in lists]
    check(rows, "ratio", lambda w, layer: largest(w, layer, "out", SINKS[w]) / size[w][layer][(T * 12 - 1) // 2])
    votes = [max(range(T * 12), key=lambda i, at=at: abs(at["out"][i // 12][i % 12])) % 12
             for layers in lists for at in layers[:-1]]
    channel = rows[0]["channel"]
    assert votes.count(channel) == max(votes.count(c) for c in votes)
    for place in ("d_out", "out"):
        check(rows, f"{place} c",
              lambda w, layer, place=place: mean(walks[w][layer][place][t][channel] for t in SINKS[w]))


@torch.no_grad()
def test_the_outlier_channel_is_that_of_the_blocks_before_the_last(case):
    model, windows, marks, _ = case
    model = copy.deepcopy(model)
    for layer, channel in ((0, 7), (-1, 3)):
        model.model["layers"][layer].mlp.down_proj.weight[channel] *= 10 ** (4 if layer else 2)
    rows, _ = sinks.outliers(model, windows, marks)
    assert {row["channel"] for row in rows} == {7}


def test_norms(case):
    model, windows, marks, lists = case
    rows, example = sinks.norms(model, windows, marks)
    for kind in "qkv":
        def norms(w, layer, tokens, kind=kind):
            return sorted(norm(head[t]) for head in lists[w][layer][kind] for t in tokens)

        def median(w, layer):  # of an even number, the lower of the two in the middle
            return statistics.median_low(norms(w, layer, set(range(T)) - SINKS[w]))

        check(rows, kind, median)
        check(rows, f"{kind} sinks", lambda w, layer: mean(norms(w, layer, SINKS[w])) / median(w, layer))
        shown = [mean(norm(head[t]) for head in lists[0][L // 2][kind]) for t in range(T)]
        assert example[kind].tolist() == pytest.approx(shown, rel=1e-4)


@pytest.mark.parametrize("tile", [1, 10 ** 6])
def test_cosines(case, monkeypatch, tile):
    model, windows, marks, lists = case
    monkeypatch.setattr(antkv, "MAX_SCORES", tile)
    monkeypatch.setattr(antkv, "MIN_QUERIES", 1)
    rows, example = sinks.cosines(model, windows, marks)
    sliding = model.config.sliding_window

    def cosines(w, layer):
        """Per head and query that is no sink: {key: cosine}."""
        at = lists[w][layer]
        for h, head in enumerate(at["q"]):
            keys = at["k"][h * HKV // H]
            for t in set(range(T)) - SINKS[w]:
                yield {j: dot(head[t], keys[j]) / norm(head[t]) / norm(keys[j]) for j in seen(t, sliding)}

    table = [[list(cosines(w, layer)) for layer in range(L)] for w in range(W)]
    check(rows, "sinks", lambda w, layer: mean(c for of in table[w][layer] for j, c in of.items() if j in SINKS[w]))
    check(rows, "others", lambda w, layer: mean(
        c for of in table[w][layer] for j, c in of.items() if j not in SINKS[w]))
    check(rows, "first", lambda w, layer: mean(
        c for of in table[w][layer] for j, c in of.items() if j == min(SINKS[w])))
    check(rows, "later", lambda w, layer: mean(
        c for of in table[w][layer] for j, c in of.items() if j in SINKS[w] - {min(SINKS[w])}) if w == 0 else None)
    check(rows, "largest", lambda w, layer: mean(max(of, key=of.get) in SINKS[w] for of in table[w][layer]))
    kinds = [{min(of_window): 0, **{j: 1 for j in of_window - {min(of_window)}}} for of_window in SINKS]
    for i, counts in enumerate(example["counts"].tolist()):
        found = [c for w in range(W) for of in table[w][L // 2] for j, c in of.items() if kinds[w].get(j, 2) == i]
        assert sum(counts) == len(found)
        assert sum(counts[:50]) == pytest.approx(sum(c < 0 for c in found), abs=1)


def parts(at, h, tokens):
    """Of head h: sum over i in tokens of p_i^t v_i, for every t, as Eq. 9 writes it."""
    values = at["v"][h * HKV // H]
    return [[sum(A[i] * values[i][c] for i in tokens) for c in range(D)] for A in at["A"][h]]


def agreement(vectors, pairs):
    """Mean cosine of the pairs of vectors; those that are 0 do not count."""
    return mean(dot(vectors[a], vectors[b]) / norm(vectors[a]) / norm(vectors[b]) for a, b in pairs
                if norm(vectors[a]) and norm(vectors[b]))


@pytest.mark.parametrize("tile", [1, 10 ** 6])
def test_biases(case, monkeypatch, tile):
    model, windows, marks, lists = case
    monkeypatch.setattr(antkv, "MAX_SCORES", tile)
    monkeypatch.setattr(antkv, "MIN_QUERIES", 1)
    rows, example = sinks.biases(model, windows, marks)
    pairs = list(combinations(range(T), 2))
    segment = [[sum(j <= t for j in of_window) for t in range(T)] for of_window in SINKS]

    def heads(w, layer, of_sinks=True):
        tokens = SINKS[w] if of_sinks else set(range(T)) - SINKS[w]
        return [parts(lists[w][layer], h, tokens) for h in range(H)]

    others = [sorted(set(range(T)) - of_window) for of_window in SINKS]
    check(rows, "attention", lambda w, layer: mean(sum(A[t][j] for j in SINKS[w]) for A in lists[w][layer]["A"]
                                                   for t in others[w]))
    check(rows, "size", lambda w, layer: mean(norm(b[t]) for b in heads(w, layer) for t in others[w]) / mean(
        norm([x + y for x, y in zip(b[t], r[t])]) for b, r in zip(heads(w, layer), heads(w, layer, False))
        for t in others[w]))
    check(rows, "consistency", lambda w, layer: mean(agreement(b, pairs) for b in heads(w, layer)))
    check(rows, "lowest", lambda w, layer: min(agreement(b, pairs) for b in heads(w, layer)))
    check(rows, "rest", lambda w, layer: mean(agreement(b, pairs) for b in heads(w, layer, False)))
    check(rows, "within", lambda w, layer: mean(
        agreement(b, [(s, t) for s, t in pairs if segment[w][s] == segment[w][t]]) for b in heads(w, layer)))
    assert torch.allclose(example["bias"], torch.tensor(heads(0, L // 2)[example["head"]]), atol=1e-4)
    for i, of_sinks in enumerate((True, False)):
        expected = [[agreement(b, pairs) for b in heads(0, layer, of_sinks)] for layer in range(L)]
        assert torch.allclose(example["heads"][i].float(), torch.tensor(expected), atol=1e-3)


def test_windows_without_a_sink_do_not_count(case):
    model, windows, marks, _ = case
    none = marks.clone()
    none[0] = False
    assert sinks.biases(model, windows, none)[0] == sinks.biases(model, windows[1:], marks[1:])[0]
    rows, _ = sinks.norms(model, windows, none & False)
    assert all(row["q sinks"] is None and row["q"] > 0 for row in rows)


@given(st.integers(1, 5), st.integers(0, 99), st.booleans())
def test_consistency_is_the_mean_over_pairs(n, seed, zero):
    x = torch.randn(1, n + 1, 3, generator=torch.Generator().manual_seed(seed)) * 1e-9
    if zero:
        x[0, -1] = 0
    rows = x[0, :n if zero else n + 1].tolist()
    cosines = [dot(a, b) / norm(a) / norm(b) for a, b in combinations(rows, 2)]
    got = sinks.consistency(x)[0].item()
    assert got == pytest.approx(mean(cosines), abs=1e-6) if cosines else math.isnan(got)


def test_sorted_keys(case):
    model, windows, marks, lists = case
    rows, example = sinks.sorted_keys(model, windows, marks, most=7)

    def heads(w, layer):
        """Per KV head: its tokens by the sum of magnitudes, and (ratio, tokens below it) of the cliff."""
        for head in lists[w][layer]["k"]:
            total = sorted((sum(map(abs, row)), t) for t, row in enumerate(head))
            yield total, max((total[i + 1][0] / total[i][0], i + 1) for i in range(7))

    check(rows, "smallest", lambda w, layer: mean(
        total[0][0] / statistics.median_low(x for x, _ in total) for total, _ in heads(w, layer)))
    check(rows, "cliff", lambda w, layer: mean(cliff for _, (cliff, _) in heads(w, layer)))
    check(rows, "below", lambda w, layer: mean(below for _, (_, below) in heads(w, layer)))
    check(rows, "sinks", lambda w, layer: mean(
        t in SINKS[w] for total, (_, below) in heads(w, layer) for _, t in total[:below]))
    def factors(w, layer):
        """Of each channel: its range over that without the sinks; the text is one group."""
        for head in lists[w][layer]["k"]:
            for numbers in zip(*head):
                others = [x for t, x in enumerate(numbers) if t not in SINKS[w]]
                yield (max(numbers) - min(numbers)) / (max(others) - min(others))

    check(rows, "stretched", lambda w, layer: mean(x > 1 for x in factors(w, layer)))
    def longer(w, layer):
        stretched = [x for x in factors(w, layer) if x > 1]
        return mean(stretched) if stretched else None

    check(rows, "longer", longer)
    keys = lists[0][L // 2]["k"][1]
    channel = max(range(D), key=lambda c: sum(abs(row[c]) for row in keys))
    assert example["channel"][1].tolist() == pytest.approx(sorted(abs(row[channel]) for row in keys), rel=1e-4)
    assert example["total sinks"].sum(1).tolist() == example["channel sinks"].sum(1).tolist() == [2, 2]


def test_a_text_may_be_shorter_than_the_pool(case):
    model, windows, marks, _ = case
    assert len(sinks.sorted_keys(model, windows, marks)[0]) == L


def test_the_report_on_a_model_that_is_trained(case):
    """All marked tokens count alike, in windows of one sink and of two."""
    model, windows, marks, lists = case
    sliding = model.config.sliding_window
    report = sinks.sink_report(model, windows, marks)
    votes = [max(range(T * 12), key=lambda i, at=at: abs(at["out"][i // 12][i % 12])) % 12
             for layers in lists for at in layers[:-1]]
    channel = report["channel"]
    assert votes.count(channel) == max(votes.count(c) for c in votes)
    for layer, row in enumerate(report["layers"]):
        score = [[mean(score_of(A, j, min(64, sliding or 64)) for A in layers[layer]["A"]) for j in range(T)]
                 for layers in lists]
        assert row["first"] == pytest.approx(score[0][0], rel=1e-3)  # only window 0 has a sink there
        assert row["later"] == pytest.approx(mean([score[0][9], score[1][4]]), rel=1e-3)
        outlier, ratio = [], []
        for layers, marked in zip(lists, SINKS):
            out = layers[layer]["out"]
            outlier.append(mean(abs(out[t][channel]) for t in marked))
            ratio.append(outlier[-1] / statistics.median_low(abs(x) for of_token in out for x in of_token))
        assert row["outlier"] == pytest.approx(mean(outlier), rel=1e-3)
        assert row["ratio"] == pytest.approx(mean(ratio), rel=1e-3)
        for kind in "qkv":
            norms = [[[norm(head[t]) for head in layers[layer][kind]] for t in range(T)] for layers in lists]
            expected = [mean(x for t in marked for x in of_window[t]) / statistics.median_low(
                x for t in set(range(T)) - marked for x in of_window[t]) for of_window, marked in zip(norms, SINKS)]
            assert row[kind] == pytest.approx(mean(expected), rel=1e-3)


# Quantization

def half(x):
    return torch.tensor(x).half().item()


def coded(x, lo, hi, bits):
    """The number that x is read as, on the grid from lo to hi: the zero point is lo, both are stored in 16 bits."""
    scale, zero = half(max((hi - lo) / (2 ** bits - 1), 1e-5)), half(lo)
    return scale * min(max(round((x - zero) / scale), 0), 2 ** bits - 1) + zero


GROUP = 2


def ranges_of(lists, kind, layer, sinks_in, calibration_sinks):
    """{(KV head, channel): (smallest, largest)} over the calibration windows."""
    found = {}
    for h in range(HKV):
        for c in range(D):
            x = [row[c] for w, layers in enumerate(lists) for t, row in enumerate(layers[layer][kind][h])
                 if sinks_in or t not in calibration_sinks[w]]
            found[h, c] = min(x), max(x)
    return found


def static(limits, h, c, per_token):
    if not per_token:
        return limits[h, c]
    members = range(c // GROUP * GROUP, c // GROUP * GROUP + GROUP)
    return min(limits[h, m][0] for m in members), max(limits[h, m][1] for m in members)


@pytest.mark.one_in(2)
def test_table_1(case):
    """Every row and column: sums of squares over single numbers, with grids from the definitions."""
    model, windows, marks, lists = case
    rows, _ = quantization.errors(model, windows, marks, windows.flip(0), marks.flip(0), group=GROUP)
    table = {(row["scheme"], row["of"], row["bits"]): row for row in rows}
    assert len(table) == 18
    for (scheme, of, bits), row in table.items():
        per_token = scheme.startswith("token")
        kind = "k_pre" if scheme == "channel-static" else of.lower()
        square = {"overall": [], "without": [], "with": []}
        for layer in range(L):
            every, some = (ranges_of(lists, kind, layer, sinks_in, SINKS) for sinks_in in (True, False))
            for w, layers in enumerate(lists):
                for h, head in enumerate(layers[layer][kind]):
                    for t in range(T):
                        for c in range(D):
                            x = head[t][c]
                            if scheme.endswith("static"):
                                square["overall"].append((x - coded(x, *static(every, h, c, per_token), bits)) ** 2)
                                if t not in SINKS[w]:
                                    square["without"].append((x - coded(x, *static(some, h, c, per_token), bits)) ** 2)
                                continue
                            first = (c if per_token else t) // GROUP * GROUP
                            group = range(first, min(first + GROUP, D if per_token else T))
                            members = [head[t][m] if per_token else head[m][c] for m in group]
                            error = (x - coded(x, min(members), max(members), bits)) ** 2
                            hit = t in SINKS[w] if per_token else bool(SINKS[w] & set(group))
                            square["overall"].append(error)
                            square["with" if hit else "without"].append(error)
        for column, errors in square.items():
            if errors:
                assert row[column] == pytest.approx(mean(errors), rel=1e-3), (scheme, of, bits, column)
            else:
                assert column == "with" and row[column] is None
        before, after = ("overall", "without") if scheme.endswith("static") else ("without", "with")
        assert row["change"] == pytest.approx(mean(square[after]) / mean(square[before]) - 1, rel=1e-2, abs=1e-3)


def test_table_1_without_sinks(case):
    model, windows, marks, _ = case
    rows, _ = quantization.errors(model, windows, marks & False, windows, marks & False, group=GROUP)
    assert all(row["overall"] > 0 and row["without"] is row["with"] is row["change"] is None for row in rows)


def test_figure_7(case, monkeypatch):
    model, windows, marks, lists = case
    monkeypatch.setattr(quantization, "WIDTHS", (2, 5))
    rows, example = quantization.widths(model, windows, marks, windows, marks, group=GROUP)
    assert [(row["bits"], row["kept"]) for row in rows] == [(16, False), (2, False), (5, False), (2, True), (5, True)]
    sliding = model.config.sliding_window

    def numbers(w, layer, bits, kept):
        """(attention to sinks, its change, change of the bias, its size, their cosine) of every head and query."""
        at, sinks = lists[w][layer], SINKS[w]
        now = {"q": at["q"]}
        for kind in "kv":
            limits = ranges_of(lists, kind, layer, not kept, SINKS)
            now[kind] = [[[x if bits == 16 or kept and t in sinks else coded(x, *static(limits, h, c, True), bits)
                           for c, x in enumerate(row)] for t, row in enumerate(head)]
                         for h, head in enumerate(at[kind])]
        now["A"] = [attention_weights(head, now["k"][h * HKV // H], sliding) for h, head in enumerate(at["q"])]
        for h in range(H):
            exact, changed = parts(at, h, sinks), parts(now, h, sinks)
            for t in set(range(T)) - sinks:
                if sinks & set(seen(t, sliding)):
                    mass = [sum(A[h][t][j] for j in sinks) for A in (at["A"], now["A"])]
                    off = norm([x - y for x, y in zip(exact[t], changed[t])])
                    yield (mass[1], abs(mass[1] - mass[0]), off, norm(exact[t]),
                           dot(exact[t], changed[t]) / (norm(exact[t]) * norm(changed[t]) or 1))

    for row in rows:
        case = row["bits"], row["kept"]
        columns = [[[mean(x) for x in zip(*numbers(w, layer, *case))] for layer in range(L)] for w in range(W)]
        by_layer = [mean(columns[w][layer][0] for w in range(W)) for layer in range(L)]
        assert example[case] == pytest.approx(by_layer, rel=2e-3)
        every = [x for of in columns for x in of]
        assert row["attention"] == pytest.approx(mean(x[0] for x in every), rel=2e-3)
        if row["bits"] == 16:
            assert row["off"] is row["bias off"] is row["cosine"] is None
        else:
            assert row["off"] == pytest.approx(mean(x[1] for x in every), rel=2e-3)
            assert row["bias off"] == pytest.approx(mean(x[2] / x[3] for x in every), rel=2e-3)
            assert row["cosine"] == pytest.approx(mean(x[4] for x in every), rel=2e-3)


def test_the_damage_of_a_token_is_not_measured_through_a_sliding_window(case):
    model, windows, _, _ = case
    if model.config.sliding_window:
        with pytest.raises(UserError, match="--context"):
            anchors.anchor_report(model, windows, windows, "d2m4")


@given(st.permutations(range(7)), st.permutations(range(7)))
def test_rank_correlation_is_spearmans(a, b):
    """1 - 6 sum d^2 / (n (n^2 - 1)), whatever the numbers behind the ranks."""
    plain = 1 - 6 * sum((x - y) ** 2 for x, y in zip(a, b)) / (7 * 48)
    numbers = torch.tensor(a).float().exp(), torch.tensor(b).float() * 3 - 100
    assert anchors.rank_correlation(*numbers).item() == pytest.approx(plain, abs=1e-5)


# ---- IntactKV's prefixes

def outputs_of(model, tokens, cache=None):
    """What the last block gives and what each layer's attention adds, for tokens (T): (T, D), L of (T, D).

    What attention adds is what lies between the residuals before a block and before its MLP.
    """
    blocks = list(model.model["layers"])
    with torch.no_grad(), Seen(blocks) as before, Seen([block.post_attention_layernorm for block in blocks]) as after:
        model(tokens[None], cache, logits=False)
    return before.outputs[-1][0], [(b - a)[0] for a, b in zip(before.inputs, after.inputs)]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("n", [0, 1, 7])
def test_errors_by_length(n):
    """Against the same rows in the cache that generates, which rounds them to 16 bits, and PyTorch's own hooks."""
    torch.manual_seed(n)
    model = Llama(LlamaConfig(41, 32, 48, 3, 4, 2, 16, 64)).requires_grad_(False)
    for parameter in model.parameters():
        parameter.mul_(2)  # so that the layers do something
    coded = quantize(model, RTN(3))
    window, behind = torch.randint(0, 41, (20,)), 8
    row, = prefixes.errors_by_length(model, coded, window, [n], behind)
    prefix = Prefix("first", window[:n].tolist())
    prefix.fill(model, coded)
    last, attention = outputs_of(coded, window, KVCache(coded, IntactKV(model.config, prefix)))
    exact_last, exact_attention = outputs_of(model, window)
    wanted = (last[behind - n:] - exact_last[behind:]).pow(2).mean().item()
    assert row["n"] == n and row["last"] == pytest.approx(wanted, rel=0.02)
    wanted = sum((a[behind - n:] - b[behind:]).pow(2).mean().item() for a, b in zip(attention, exact_attention))
    assert row["attention"] == pytest.approx(wanted, rel=0.02) and 0 < row["change"] < row["bound"]


def test_nothing_is_left_where_nothing_is_quantized():
    torch.manual_seed(0)
    model = Llama(LlamaConfig(41, 32, 48, 3, 4, 2, 16, 64)).requires_grad_(False)
    row, = prefixes.errors_by_length(model, model, torch.randint(0, 41, (20,)), [5], 8)
    assert max(row["last"], row["attention"]) < 1e-6 and row["change"] < 1e-3


def test_prefixes_stop_short_of_each_sink_and_past_it():
    torch.manual_seed(0)
    model = Llama(LlamaConfig(41, 32, 48, 2, 4, 2, 16, 64)).requires_grad_(False)
    windows, marks = torch.randint(0, 41, (2, 20)), torch.zeros(2, 20, dtype=torch.bool)
    marks[0, [0, 5, 9]] = marks[1, [0, 7]] = True
    rows, example = prefixes.prefixes(model, quantize(model, RTN(3)), windows, marks, points=4)
    assert [(row["kept"], row["n"]) for row in rows] == [
        ("nothing", 0), ("sink 1 too", 1), ("up to sink 2", 6), ("sink 2 too", 7)]  # means; both windows have two
    assert example["sinks"] == [0, 5] and [row["n"] for row in example["rows"]] == [0, 1, 2, 3, 4, 5, 6]


def test_a_prefix_of_any_length_over_many_texts():
    """A row for each number of exact tokens from 0 to the prefix's, the mean of what each text has alone."""
    torch.manual_seed(0)
    model = Llama(LlamaConfig(41, 32, 48, 2, 4, 2, 16, 64)).requires_grad_(False)
    coded = quantize(model, RTN(3))
    windows, marks = torch.randint(0, 41, (3, 20)), torch.zeros(3, 20, dtype=torch.bool)
    windows[:, :4], marks[0, [0, 2, 9]] = torch.tensor([1, 5, 9, 2]), True
    rows, example = prefixes.prefix_lengths(model, coded, windows, marks, 4)
    assert [row["n"] for row in rows] == [0, 1, 2, 3, 4] and example == {"rows": rows, "sinks": [0, 2]}
    for n in (0, 3):
        alone = [prefixes.errors_by_length(model, coded, window, [n], 4)[0]["last"] for window in windows]
        assert rows[n]["last"] == pytest.approx(statistics.mean(alone))


# ---- maps

def test_maps_of_a_layer(case):
    """Each map is what passes through the block, and its rows those of the table, by PyTorch's own hooks."""
    model, windows, _, _ = case
    rows, example = maps.maps(model, windows, shown=1)
    T = windows.shape[1]
    block = model.model["layers"][1]
    with torch.no_grad(), Seen([block]) as seen, Seen([block.self_attn.o_proj]) as o, Seen(
            [block.self_attn.k_proj]) as k:
        model(windows[0][None], None, logits=False)
    hidden, keys = seen.outputs[0][0], k.outputs[0][0]  # (T, D), (T, Hkv * d)
    assert torch.allclose(example["H, after the block"], hidden.abs(), atol=1e-5)
    assert torch.allclose(example["attention output"], o.inputs[0][0].abs(), atol=1e-5)
    assert torch.allclose(example["keys before RoPE"], keys.abs(), atol=1e-5)
    # a rotation keeps the length of each pair of channels
    length = example["keys after RoPE"].square().sum(1)
    assert torch.allclose(length, keys.square().sum(1), rtol=1e-4)
    assert example["layer"] == 1 and example["tokens"] == T
    assert torch.allclose(example["attention"].sum(1), torch.ones(min(64, T)), atol=1e-5)
    number = max(hidden.flatten().tolist(), key=abs)
    assert rows[1]["largest"] == pytest.approx(number, rel=1e-5)
    assert hidden[rows[1]["token"], rows[1]["channel"]].item() == pytest.approx(number, rel=1e-5)


def test_the_share_within_channels_in_numpy():
    x = torch.randn(2, 30, 6, generator=torch.Generator().manual_seed(0)) + torch.arange(6) * 3
    plain = [np.mean([np.var(head[:, c]) for c in range(6)]) / np.var(head) for head in x.double().numpy()]
    assert maps.share_within(x) == pytest.approx(statistics.mean(plain), rel=1e-6)


def test_a_map_of_a_long_text_holds_the_largest_of_neighbours():
    x = torch.randn(300, 3, generator=torch.Generator().manual_seed(0))
    cells = maps.pooled(x)
    assert cells.shape == (128, 3) and torch.equal(cells.amax(0), x.amax(0))
    rows = x.tolist()
    of_cell = [[rows[t] for t in range(300) if t * 128 // 300 == i] for i in range(128)]
    assert cells.tolist() == [[max(column) for column in zip(*of)] for of in of_cell]


def test_channels_with_outliers():
    at_sinks, at_others = torch.tensor([5.0, 100.0, 11.0, 30.0, 9.9]), torch.tensor([1.0, 2.0, 6.0, 15.0, 0.1])
    assert sinks.outlier_channels(at_sinks, at_others) == [1, 3]
