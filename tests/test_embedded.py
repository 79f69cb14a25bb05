"""The embedded model shows what the papers study. Every claim of README and docs/embedded_model.md, on test text."""
import math
from dataclasses import replace
from functools import cache

import pytest
import torch
from conftest import runs_whole

from tinykv.analysis.sinks import sink_report
from tinykv.cache import KVCache
from tinykv.calibrate import calibrate
from tinykv.cli import EMBEDDED
from tinykv.data import load_windows
from tinykv.evaluate import evaluate
from tinykv.hf import load
from tinykv.methods.registry import METHODS

CONTEXT, WINDOWS = 1024, 8


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
    """A function of a scheme and bits -> {method: Result}, at five preserved tokens; each is measured once."""
    model, test, calibration, _ = embedded
    known = {"kvsink": {"emergence_layer": outlier[0], "outlier_channel": outlier[1]}}

    @cache
    def results_of(scheme, bits):
        methods = {"fp16": METHODS["fp16"](model.config)}
        for name in ("rtn", "pfn", "kvsink"):
            settings = known.get(name, {})
            methods[name] = METHODS[name](model.config, k_bits=bits, v_bits=bits, scheme=scheme, **settings)
            calibrate(model, methods[name], calibration)
        return evaluate(model, methods, test, "paper", batch=4)

    return results_of


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
    assert all(row["ratio"] >= 30 for row in report["layers"][layer:-1])
    before, last = report["layers"][-2]["ratio"], report["layers"][-1]["ratio"]
    assert last < before / 3  # it dissipates in the last block


def test_keys_and_values_at_the_sinks_are_small(report):
    middle = report["layers"][1:-1]
    assert mean(middle, "k") < 0.5 and mean(middle, "v") < 0.5


def test_facts_are_recalled(table):
    fp16 = table("channel-static", 2)["fp16"]
    assert fp16.answers > 100 and fp16.recall > 0.95


@pytest.mark.parametrize("scheme, bits", [
    ("channel-static", 2),
    pytest.param("token-static", 3, marks=pytest.mark.whole),
    pytest.param("channel-static", 3, marks=pytest.mark.whole),
    pytest.param("token-static", 2, marks=pytest.mark.whole)])
def test_static_schemes_need_their_sinks(table, scheme, bits):
    """Keeping nothing is clearly worse than keeping the first five, and these than the five that KVSink finds."""
    results = table(scheme, bits)
    rtn, pfn, kvsink = (math.log(results[name].ppl) for name in ("rtn", "pfn", "kvsink"))
    assert rtn - pfn > 0.05 and pfn - kvsink > 0.05


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
    assert stream.ppl - others["stream"]["fp16"].ppl < paper.ppl - others["paper"]["fp16"].ppl


@torch.no_grad()
def test_the_smallest_keys_are_those_of_the_sinks(embedded):
    """OTT's claim and KVSink's meet: the pool, elected by keys alone, is where <s> is, in every layer that has a pool.

    Two thirds are asked for: three places are few where a window has four <s>, or where <s> is no sink yet.
    """
    model, test, _, bos = embedded
    ott = KVCache(model, METHODS["ott"](model.config, outlier_num=3, scope="layer"), "paper")
    model(test.tokens, ott, logits=False)
    for layer in ott.layers[2:-1]:
        pool = layer.keys.pinned_positions[:, 0].long()  # (W, 3)
        found = (test.tokens.gather(1, pool) == bos).sum(1)  # (W)
        there = (test.tokens == bos).sum(1).clamp(max=3)  # (W)
        assert found.sum() >= there.sum() * 2 / 3
