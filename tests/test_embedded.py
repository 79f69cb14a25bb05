"""The embedded model shows what the papers study. Every claim of README and docs/embedded_model.md, on test text."""
import math
from dataclasses import replace
from functools import cache
from itertools import islice

import pytest
import torch
from conftest import runs_whole

from tinykv.analysis.sinks import sink_report
from tinykv.cache import KVCache
from tinykv.cache_parts.tracing import Trace
from tinykv.calibrate import calibrate
from tinykv.data import load_windows
from tinykv.data.stories import stories
from tinykv.data.windows import Windows
from tinykv.evaluate import evaluate
from tinykv.hf import load
from tinykv.methods.registry import METHODS
from tinykv.run.cli import EMBEDDED

CONTEXT, WINDOWS = 1024, 16  # the defaults of eval_ppl.py


@pytest.fixture(scope="module")
def embedded(request):
    """The model; test windows; calibration windows (W, T); the token that begins each story, <s>.

    The test windows are half of those that --whole takes.
    """
    model, tokenizer = load(EMBEDDED)
    test = load_windows("tales", tokenizer, CONTEXT, WINDOWS)
    if not runs_whole(request.config):
        test = replace(test, tokens=test.tokens[:WINDOWS // 2], answers=test.answers[:WINDOWS // 2])
    calibration = load_windows("tales", tokenizer, CONTEXT, WINDOWS, "calibration")
    return model, test, calibration.tokens, tokenizer.bos_id


@pytest.fixture(scope="module")
def report(embedded):
    """What analysis says of the tokens <s>."""
    model, test, _, bos = embedded
    return sink_report(model, test.tokens, test.tokens == bos)


@pytest.fixture(scope="module")
def outlier(embedded):
    """Where KVSink finds the outlier: (emergence layer, channel)."""
    model, _, calibration, _ = embedded
    method = METHODS["kvsink"](model.config, scheme="token-dynamic")
    calibrate(model, method, calibration)
    return method.layer, method.channel


@pytest.fixture(scope="module")
def table(embedded, outlier):
    """A function of a scheme, bits and formula -> {method: Result}, at five preserved tokens; each is measured once."""
    model, test, calibration, _ = embedded
    known = {"kvsink": {"emergence_layer": outlier[0], "outlier_channel": outlier[1]}}

    @cache
    def results_of(scheme, bits, formula="offset"):
        methods = {"fp16": METHODS["fp16"](model.config)}
        for name in ("rtn", "pfn", "kvsink"):
            settings = {"scheme": scheme, "formula": formula, **known.get(name, {})}
            methods[name] = METHODS[name](model.config, k_bits=bits, v_bits=bits, **settings)
            calibrate(model, methods[name], calibration)
        return evaluate(model, methods, test, "paper", batch=4)

    return results_of


@pytest.fixture(scope="module")
def loss_of(embedded):
    """A function of {label: (method, settings)} -> {label: perplexity lost to fp16}."""
    model, test, calibration, _ = embedded

    def losses(variants, windows=test, protocol="paper"):
        methods = {"fp16": METHODS["fp16"](model.config)}
        for label, (name, settings) in variants.items():
            methods[label] = METHODS[name](model.config, **settings)
            calibrate(model, methods[label], calibration)
        results = evaluate(model, methods, windows, protocol, batch=4)
        return {label: results[label].ppl - results["fp16"].ppl for label in variants}

    return losses


@pytest.fixture(scope="module")
def others(embedded):
    """{protocol: {method: Result}} of the methods with codecs of their own, as they are at 2 bits."""
    model, test, calibration, _ = embedded
    methods = {name: METHODS[name](model.config) for name in ("fp16", "kivi", "ott", "skvq", "kvquant")}
    for method in methods.values():
        calibrate(model, method, calibration[:4])
    return {protocol: evaluate(model, methods, test, protocol, batch=4) for protocol in ("paper", "stream")}


def mean(rows, name):
    return sum(row[name] for row in rows) / len(rows)


def test_it_is_small():
    assert sum(file.stat().st_size for file in EMBEDDED.iterdir()) < 12e6


def test_there_are_sinks_at_the_start_and_later(report):
    middle = report["layers"][1:-2]
    assert mean(middle, "first") > 0.3 and mean(middle, "later") > 0.3


@pytest.mark.whole
def test_other_tokens_are_no_sinks(embedded):
    """The same score for the word after each <s>: the report does not call just any token a sink."""
    model, test, _, bos = embedded
    after = torch.zeros_like(test.tokens, dtype=torch.bool)  # (W, T)
    after[:, 1:] = test.tokens[:, :-1] == bos
    other = sink_report(model, test.tokens, after)["layers"][1:-2]
    assert mean(other, "later") < 0.1


def test_one_channel_is_huge_at_the_sinks_from_an_early_block_to_the_last_but_one(outlier, report):
    layer, channel = outlier
    assert layer <= 1 and channel == report["channel"]
    rows = report["layers"][layer:-1]
    assert rows[0]["ratio"] >= 30 and mean(rows, "ratio") >= 30 and all(row["ratio"] >= 25 for row in rows)
    before, last = report["layers"][-2]["ratio"], report["layers"][-1]["ratio"]
    assert last < before / 3  # it dissipates in the last block


def test_keys_and_values_at_the_sinks_are_small(report):
    middle = report["layers"][1:-1]
    assert mean(middle, "k") < 0.4 and mean(middle, "v") < 0.4


@torch.no_grad()
def test_keys_have_channels_of_one_sign(embedded):
    """OTT's premise, in the blocks that have sinks: eight of a KV head's 32 channels have a mean of three spreads."""
    model, test, _, bos = embedded
    trace = Trace(model)
    model(test.tokens, trace, logits=False)
    for k in trace.k[1:]:  # (W, Hkv, T, d)
        rows = k.transpose(1, 2)[test.tokens != bos]  # (n, Hkv, d)
        steady = rows.mean(0).abs() / rows.std(0)  # (Hkv, d)
        assert (steady.sort(dim=-1).values[:, -8:] > 3).all()


def test_facts_are_recalled(table):
    fp16 = table("channel-static", 2)["fp16"]
    assert fp16.answers > 90 and fp16.recall > 0.95


def clearly_worse(a, b, errors=3):
    """Whether one result loses more than another, by so many standard errors of the windows' differences."""
    difference = torch.tensor(a.nll) - torch.tensor(b.nll)
    return difference.mean() > errors * difference.std() / math.sqrt(len(difference))


@pytest.mark.parametrize("bits, formula", [
    (2, "offset"),
    pytest.param(3, "offset", marks=pytest.mark.whole),
    pytest.param(2, "integer-zero", marks=pytest.mark.whole),
    pytest.param(3, "integer-zero", marks=pytest.mark.whole)])
def test_static_grids_need_their_sinks(table, bits, formula):
    """Keeping nothing, or the first five tokens, is clearly worse than keeping the five that KVSink finds."""
    results = table("channel-static", bits, formula)
    assert clearly_worse(results["rtn"], results["kvsink"]) and clearly_worse(results["pfn"], results["kvsink"])


def test_the_first_tokens_are_a_part_of_them(table):
    results = table("channel-static", 2)
    assert clearly_worse(results["rtn"], results["pfn"])


def test_facts_are_recalled_from_two_bits_with_the_sinks_kept(table):
    assert table("channel-static", 2)["kvsink"].recall > 0.7


@pytest.mark.whole
@pytest.mark.parametrize("formula", ["offset", "integer-zero"])
@pytest.mark.parametrize("bits, share", [(3, 0.1), (4, 0.03)])
def test_static_scales_are_nearly_free_with_the_sinks_kept(table, bits, share, formula):
    results = table("channel-static", bits, formula)
    assert results["kvsink"].ppl < results["fp16"].ppl * (1 + share)


@pytest.mark.whole
def test_keys_want_a_grid_for_each_channel(loss_of):
    """KIVI: at 2 bits, rounding keys and values loses more than twice as much with a grid for each token's key."""
    loss = loss_of({scheme: ("rtn", {"k_bits": 2, "v_bits": 2, "scheme": scheme})
                    for scheme in ("token-dynamic", "channel-dynamic")})
    assert loss["token-dynamic"] > 2 * loss["channel-dynamic"]


@pytest.mark.whole
@pytest.mark.parametrize("of_one_story, pool", [(True, 1), (False, 6)])
def test_otts_pool_wins_half_of_the_loss_back(embedded, loss_of, of_one_story, pool):
    """Keys only: one token where a window has one sink, a few where it has several. The largest keys win nothing."""
    test = embedded[1]
    windows = one_story_windows(embedded) if of_one_story else test
    settings = {"k_bits": 2, "v_bits": 16, "group_size": 128, "skip_layers": 1}
    loss = loss_of({"none": ("ott", {**settings, "outlier_num": 0}),
                    "smallest": ("ott", {**settings, "outlier_num": pool}),
                    "largest": ("ott", {**settings, "outlier_num": pool, "select": "largest"})}, windows)
    assert loss["smallest"] < loss["none"] / 2 and loss["largest"] > 0.8 * loss["none"]


def one_story_windows(embedded, length=512):
    """As many windows as there are test windows, each the beginning of one long story of the test split."""
    model, test, _, bos = embedded
    tokenizer = load(EMBEDDED)[1]
    long = ([bos, *ids] for ids in (tokenizer.encode(story.text) for story in stories("test", seed=77))
            if len(ids) >= length)
    rows = torch.tensor([ids[:length] for ids in islice(long, len(test.tokens))])  # (W, T)
    return Windows(rows, [[] for _ in rows], "one story")


@pytest.mark.whole
def test_kvquants_code_gains_from_the_sinks(loss_of):
    """KVSink's Table 2, without outliers: with its five tokens kept, at most a quarter of what is lost with the first
    five. Where 1% of the numbers are kept apart as outliers, either loses next to nothing."""
    settings = {"k_bits": 2, "v_bits": 2, "scheme": "kvquant", "outliers": 0.0, "preserve": 5}
    loss = loss_of({name: (name, settings) for name in ("pfn", "kvsink")})
    assert loss["kvsink"] < 0.25 * loss["pfn"]


@pytest.mark.whole
def test_skvqs_parts_gain(loss_of):
    """Reordered channels; clipped ranges, after that; and the window, in a stream."""
    keep = {"metadata": "fp16", "preserve": 0}
    loss = loss_of({(reorder, clip): ("skvq", {**keep, "reorder": reorder, "clip": clip})
                    for reorder in ("off", "on") for clip in ("none", "both")})
    assert loss["on", "both"] < loss["on", "none"] < loss["off", "none"] and loss["on", "both"] < loss["off", "both"]
    loss = loss_of({recent: ("skvq", {"recent": recent}) for recent in (0, 128)}, protocol="stream")
    assert loss[128] < loss[0]


@pytest.mark.whole
@pytest.mark.parametrize("codebook", ["d8m256", "d16m256"])
def test_anchors_win_back_a_quarter(loss_of, codebook):
    """AnTKV, at 1 bit and at half a bit; anchors cost 0.19 bits."""
    loss = loss_of({anchors: ("antkv", {"vq": codebook, "anchors": anchors}) for anchors in ("0%", "1%")})
    assert loss["1%"] < 0.75 * loss["0%"]


@pytest.mark.whole  # `table` takes 2 s or more for each scheme and number of bits
@pytest.mark.parametrize("scheme", ["channel-dynamic", "token-dynamic"])
def test_dynamic_schemes_hardly_do(table, scheme):
    results = table(scheme, 3)
    assert abs(math.log(results["rtn"].ppl / results["kvsink"].ppl)) < 0.1


@pytest.mark.whole  # `others` takes 10 s
@pytest.mark.parametrize("name", ["kivi", "skvq", "kvquant"])
def test_better_codecs_need_no_sinks_kept(table, others, name):
    """At 2 bits they lie far below plain rounding to static grids, and are not free."""
    result, rtn = others["paper"][name], table("channel-static", 2)["rtn"]
    assert others["paper"]["fp16"].ppl < result.ppl < rtn.ppl / 2


@pytest.mark.whole  # `others` takes 10 s
@pytest.mark.parametrize("name", ["kivi", "ott", "skvq", "kvquant"])
def test_a_stream_is_closer_to_fp16(others, name):
    """Its newest tokens are in full precision, and so is what a query sees of its own block."""
    paper, stream = others["paper"][name], others["stream"][name]
    assert stream.kl / stream.targets < paper.kl / paper.targets


@torch.no_grad()
def test_the_smallest_keys_are_those_of_the_sinks(embedded):
    """OTT's claim and KVSink's meet: the pool, elected by keys alone, is where <s> is, in every layer that has a pool.

    Two thirds are asked for: three places are few where a window has four <s>, or where <s> is no sink yet.
    """
    model, test, _, bos = embedded
    ott = KVCache(model, METHODS["ott"](model.config, outlier_num=3, scope="layer"), "paper")
    model(test.tokens, ott, logits=False)
    for layer in ott.layers[2:-1]:
        pool = layer.keys.kept_positions[:, 0].long()  # (W, 3)
        found = (test.tokens.gather(1, pool) == bos).sum(1)  # (W)
        there = (test.tokens == bos).sum(1).clamp(max=3)  # (W)
        assert found.sum() >= there.sum() * 2 / 3
