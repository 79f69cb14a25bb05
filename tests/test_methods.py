"""Every method through one matrix: protocols, grouped queries, batches, lengths around a block,
schemes.

There is no list of exceptions: what a cell is left out of is said by a property of it, such as
`quantizes`.

    cases.py        a cell, and what is built from it
    oracles.py      what the methods must do, a second time, in plain lists and numpy
    expected.py     what the cache of a cell must hold, by these oracles
    invariants.py   the checks, `check_...`: what must hold of every method
    this file       which cells each check runs on
    faults.py       what is wrong on purpose; test_faults.py shows that the checks fail on it

    pytest tests/test_methods.py                                   the cells of `covering`
    pytest tests/test_methods.py --whole                           all of them, some 4,700
    pytest tests/test_methods.py --method path/to/file.py:Class    the cells of one method of your
                                                                   own; all of them with --whole
    pytest tests/test_methods.py --method path/to/file.py:Class --as pfn
                                                                   it also has to equal the method pfn

A method of your own has no oracle. What it keeps is taken from the cache, and what its codecs make
of a block is asked of them again. The tests stop at the first failure and say what was tried, what
came and what should have come; a flag of pytest's such as --tb=short, --maxfail=9 or --pdb brings
back what pytest does by itself.
"""
from dataclasses import replace

import pytest
import torch
from cases import KEEP_ALL, Case, G, schemes_of, takes, tokens_of
from conftest import runs_whole
from expected import is_static
from invariants import (
    check_a_text_has_to_begin_with_the_prefix,
    check_attention_sees_the_cache,
    check_batch_rows_are_independent,
    check_bytes,
    check_cache_holds_the_expected_rows,
    check_calibration_order_is_no_matter,
    check_chunks_equal_single_tokens,
    check_codes_are_what_is_claimed,
    check_generation,
    check_keeping_everything_is_exact,
    check_low_bits_matter,
    check_never_nan,
    check_no_future_leak,
    check_paper_refuses_a_second_forward,
    check_placeholders_do_not_matter,
    check_same_twice_and_after_reset,
    check_scores,
    check_sixteen_bit_models_cache_what_they_compute,
    check_sixteen_bits_are_fp16,
    check_sixteen_bits_of_one_kind,
    check_static_ranges,
    check_the_trap,
    check_uneven_chunks_of_exact_rows,
    check_what_is_calibrated_can_be_restored,
)

from tinykv import UserError
from tinykv.cache import PROTOCOLS
from tinykv.codecs.affine import FORMULAS, Affine
from tinykv.methods.antkv import AnTKV
from tinykv.methods.fp16 import FP16
from tinykv.methods.kivi import KIVI
from tinykv.methods.kvsink import KVSink
from tinykv.methods.ott import OTT
from tinykv.methods.registry import METHODS
from tinykv.run.runs import load_class

LENGTHS = ["1", "G-1", "G", "G+1", "2G+5"]
SHAPES = {"heads_per_kv": (2, 1, 4), "batch": (3, 1)}
# A method that takes one of these goes through it all with it, too.
VARIANTS = [("v_block", 2), ("scope", "layer"), ("anchors", "20%")]


# ---- the matrix

def cells(where=lambda case: True, **axes):
    """Run a test for every method, or those of --method, in every cell of `axes` that passes
    `where`."""
    def mark(test):
        test.where, test.axes = where, axes
        return test
    return mark


def pytest_generate_tests(metafunc):
    if "case" not in metafunc.fixturenames:
        return
    given, like = metafunc.config.getoption("--method"), metafunc.config.getoption("--as")
    methods = [load_class(name) for name in given] if given else METHODS.values()
    axes, where = metafunc.function.axes, metafunc.function.where
    found = [case for case in all_cells(methods, axes, METHODS.get(like)) if where(case)]
    if not runs_whole(metafunc.config):
        found = covering(found, axes, pairs=bool(given))
    metafunc.parametrize("case", found, ids=str)


def all_cells(methods, axes, like=None):
    """Every method on every scheme that it can stand on, and with each variant that it takes, in
    every cell of `axes`. like: the built-in method that each has to equal."""
    found = []
    for cls in methods:
        found += [Case(cls, scheme, like=like) for scheme in schemes_of(cls)]
        if cls in METHODS.values() or like:
            found += [Case(cls, settings=(variant,), like=like) for variant in VARIANTS
                      if variant[0] in takes(cls)]
    for axis, values in axes.items():
        found = [replace(case, **{axis: value}) for case in found for value in values
                 if axis != "formula" or value == "offset" or has("formula")(case)]
    return list(dict.fromkeys(found))


def covering(found, axes, pairs=False):
    """Some of the cells: each method; and each protocol, length and scheme, and each value of the
    other axes, with some method. pairs: each scheme with each protocol, and with each batch, too.

    The cell that shows the most new things comes next. Of equals, the first whose method is new on
    its scheme.
    """
    shows = {}
    for case in found:
        shows[case] = {case.cls, ("protocol", case.protocol), ("length", case.length)}
        shows[case] |= {case.scheme, case.settings}
        shows[case] |= {(axis, getattr(case, axis)) for axis in axes}
        if pairs:
            shows[case] |= {(case.scheme, case.protocol), (case.scheme, case.batch)}
    missing, chosen, seen = set().union(*shows.values()), [], set()
    while missing:
        best = max(found, key=lambda case: (len(shows[case] & missing),
                                            (case.cls, case.scheme) not in seen))
        chosen.append(best)
        missing -= shows[best]
        seen.add((best.cls, best.scheme))
    return chosen


# ---- what cells are told apart by

def has(*settings):
    return lambda case: takes(case.cls, case.scheme) >= set(settings)


def has_the_settings(case):
    """A method that we know nothing about may give other values, or another meaning, to settings."""
    return case.known and has(*dict(case.settings))(case)


def quantizes(case):
    method = case.uncalibrated()
    return method.k_bits < 16 or method.v_bits < 16


def is_fp16(case):
    return case.oracle is FP16


def keeps(case):
    """It has settings that say how many tokens it keeps."""
    return case.known and not takes(case.cls, case.scheme).isdisjoint(KEEP_ALL)


def begins(case):
    """Every text begins with a prefix."""
    return bool(case.prefix)


def may_keep(case):
    """It keeps tokens, or is a method that we know nothing about."""
    return keeps(case) or begins(case) or not case.known


def calibrates(case):
    return case.uncalibrated().needs_calibration


def calibrates_as_a_sum(case):
    """The order of the windows is no matter."""
    return case.known and calibrates(case)


def static(case):
    return case.known and is_static(case)


def chooses(case):
    """What is kept depends on the text, and may change from one event to the next."""
    return not case.known or case.oracle in (KVSink, OTT, AnTKV)


def scores(case):
    """Tokens in full precision have scores, and what is kept depends on these."""
    return case.oracle is AnTKV


def causal_in_paper(case):
    """Two kinds of cell are acausal under `paper`, by definition. A dynamic channel group takes its
    range from all its tokens, of which an early query reads the early ones. And a method that
    chooses does so over the whole window, so a late token can take the place of an early one that
    an early query reads."""
    if not case.known or chooses(case):
        return False
    for codec in case.uncalibrated().codecs[0]:
        if isinstance(codec, Affine) and codec.axis == "channel" and not codec.static:
            return False
    return True


# ---- what the cache holds

@pytest.mark.whole
@cells()
def test_codes_are_what_is_claimed(case):
    check_codes_are_what_is_claimed(case)


@cells(protocol=PROTOCOLS, length=LENGTHS, **SHAPES)
def test_cache_holds_the_expected_rows(case):
    check_cache_holds_the_expected_rows(case)


@cells(has("formula"), formula=["integer-zero"], protocol=PROTOCOLS, length=["G+1", "2G+5"], batch=(1, 3))
def test_cache_holds_the_expected_rows_with_an_integer_zero(case):
    check_cache_holds_the_expected_rows(case)
    check_bytes(case)


@cells(length=["2G+5"], recent=[1, 6], batch=(1, 3))
def test_a_recent_window_stays_exact(case):
    check_cache_holds_the_expected_rows(case)
    check_attention_sees_the_cache(case)
    check_bytes(case)


@cells(recent=[0, 5], batch=(1, 3))
def test_uneven_chunks(case):
    """Chunks that end anywhere, or hold several blocks: only whole blocks are quantized, after they
    were read."""
    for sizes in ([3, 1, case.T - 10, 6], [case.T - 2, 1, 1]):
        check_cache_holds_the_expected_rows(case, sizes)
        check_attention_sees_the_cache(case, sizes)


@cells(chooses, protocol=PROTOCOLS, length=["6G+3"], heads_per_kv=(1, 4))
def test_a_choice_that_is_made_many_times(case):
    """Long enough that tokens are evicted and that pools are full, in some sequence, head or
    layer."""
    check_cache_holds_the_expected_rows(case)
    check_bytes(case)


@cells(has_the_settings, protocol=PROTOCOLS, settings=[
    (("metadata", "fp16"), ("clip", "none")),
    (("metadata", "fp16"), ("clip", "centre"), ("k_bits", 4)),
    (("reorder", "off"), ("clip", "endpoint")),
    (("reorder", "off"), ("clip", "none"), ("rope", "post")),
    (("clip", "both"), ("k_bits", 1.5), ("v_bits", 1)),
    (("outliers", 0.0), ("rope", "post")),
    (("outliers", 20.0), ("q_norm", "off"), ("sensitivity", "fisher")),
    (("outliers", 1.0), ("sensitivity", "none"), ("k_bits", 4)),
    (("outlier_num", 0),),
    (("outlier_num", 4), ("extra_pool", 0), ("skip_layers", 2)),
    (("select", "largest"), ("skip_layers", 0)),
    (("v_block", 1),),
    (("vq", None), ("bits", 4), ("sharing", "layer")),
    (("vq", "d2m4"), ("sensitivity", "token")),
    (("vq", "d16m16"), ("sensitivity", "none")),
    (("vq", "d2m1024"), ("sharing", "layer"), ("sensitivity", "fisher")),
    (("anchors", "0"),),
    (("anchors", "30%"), ("vq", "d8m2")),
    (("prefix", ()),),
    (("prefix", (5,)), ("k_bits", 4), ("v_bits", 16)),
    (("prefix", (*range(G + 3),)),),  # more than a block
])
def test_settings(case):
    """Whatever changes what is kept or how tokens are quantized is in the oracles, too."""
    check_cache_holds_the_expected_rows(case)
    check_bytes(case)


@cells(protocol=PROTOCOLS, length=LENGTHS, heads_per_kv=(1, 4))
def test_bytes(case):
    check_bytes(case)


@cells(scores, protocol=PROTOCOLS, recent=[0, 5], length=["1", "G", "2G+5"], heads_per_kv=(1, 4))
def test_scores(case):
    check_scores(case)


@cells(scores, recent=[0, 5])
def test_scores_of_uneven_chunks(case):
    for sizes in ([3, 1, case.T - 10, 6], [1, case.T - 3, 1, 1]):
        check_scores(case, sizes)


# ---- what attention sees

@cells(protocol=PROTOCOLS, length=["1", "G+1", "2G+5"])
def test_attention_sees_the_cache(case):
    check_attention_sees_the_cache(case)


@cells(quantizes, protocol=PROTOCOLS)
def test_low_bits_matter(case):
    check_low_bits_matter(case)


@cells(quantizes, heads_per_kv=(1, 2, 4))
def test_the_trap(case):
    check_the_trap(case)


# ---- what is exact

@cells(has("k_bits", "v_bits"), protocol=PROTOCOLS, length=["1", "G", "G+1", "2G+5"], heads_per_kv=(1, 4))
def test_sixteen_bits_are_fp16(case):
    check_sixteen_bits_are_fp16(case)


@cells(has("k_bits", "v_bits"), protocol=["paper"])
def test_sixteen_bits_of_one_kind(case):
    check_sixteen_bits_of_one_kind(case)


@cells(is_fp16, protocol=PROTOCOLS, heads_per_kv=(1, 4))
def test_sixteen_bit_models_cache_what_they_compute(case):
    check_sixteen_bit_models_cache_what_they_compute(case)


@cells(keeps, protocol=PROTOCOLS, length=["G-1", "2G+5"])
def test_keeping_everything_is_exact(case):
    check_keeping_everything_is_exact(case)


@cells(may_keep, protocol=PROTOCOLS, formula=FORMULAS, heads_per_kv=(1, 4), batch=(1, 3))
def test_placeholders_do_not_matter(case):
    check_placeholders_do_not_matter(case)


# ---- what does not depend on what

@cells(dtype=[torch.float64], recent=[0, 5], heads_per_kv=(1, 4), batch=(1, 3))
def test_chunks_equal_single_tokens(case):
    check_chunks_equal_single_tokens(case)


@cells(is_fp16, recent=[0, 5], dtype=[torch.float64], **SHAPES)
def test_uneven_chunks_of_exact_rows(case):
    check_uneven_chunks_of_exact_rows(case)


@cells(heads_per_kv=(1, 4), recent=[0, 5])
def test_no_future_leak_in_a_stream(case):
    check_no_future_leak(case)


@cells(causal_in_paper, protocol=["paper"], heads_per_kv=(1, 4))
def test_no_future_leak_on_paper(case):
    check_no_future_leak(case)


@cells(protocol=PROTOCOLS, length=["1", "G+1", "2G+5"], heads_per_kv=(1, 4), dtype=[torch.float64])
def test_batch_rows_are_independent(case):
    check_batch_rows_are_independent(case)


@cells(protocol=PROTOCOLS)
def test_same_twice_and_after_reset(case):
    check_same_twice_and_after_reset(case)


@cells(lambda case: case.oracle is OTT, protocol=PROTOCOLS, recent=[0, 5])
def test_ott_without_a_pool_is_kivi(case):
    kivi, tokens = replace(case, cls=KIVI, like=None), case.tokens()
    logits, _ = case.run(case.method(outlier_num=0), tokens)
    assert torch.equal(logits, kivi.run(kivi.method(), tokens)[0])


# ---- what is refused

@cells(protocol=["paper"], length=["1", "2G+5"])
def test_paper_refuses_a_second_forward(case):
    check_paper_refuses_a_second_forward(case)


@cells(begins, batch=(1, 3))
def test_a_text_has_to_begin_with_the_prefix(case):
    check_a_text_has_to_begin_with_the_prefix(case)


@cells(lambda case: case.known)
def test_a_method_is_refused_where_its_calibration_was_forgotten(case):
    method = case.cls(case.model.config, **({"scheme": case.scheme} if case.scheme else {}))
    T = method.recent + method.block + 1  # so that something is quantized
    if method.prefix:
        with pytest.raises(UserError, match="fill"):
            case.new_cache(method)
    elif method.needs_calibration:
        with pytest.raises(UserError, match="calibrate"):
            case.model.generate(tokens_of(1, T), 1, case.new_cache(method))
    else:
        assert case.model.generate(tokens_of(1, T), 1, case.new_cache(method)).shape == (1, T + 1)


# ---- calibration

@cells(static, heads_per_kv=(1, 4), formula=FORMULAS)
def test_static_ranges(case):
    check_static_ranges(case)


@cells(calibrates)
def test_what_is_calibrated_can_be_restored(case):
    check_what_is_calibrated_can_be_restored(case)


@cells(calibrates_as_a_sum)
def test_calibration_order_is_no_matter(case):
    check_calibration_order_is_no_matter(case)


# ---- in use

@cells(heads_per_kv=(1, 4))
def test_generation(case):
    check_generation(case)


@cells(has("k_bits", "v_bits"), heads_per_kv=(1, 4))
def test_generation_in_sixteen_bits_is_plain_generation(case):
    """In float32 the cache rounds to 16 bits: the same tokens come out if no two are about equally
    likely."""
    prompt = case.text(tokens_of(2, 9, seed=108))
    text = case.model.generate(prompt, 8)
    with torch.no_grad():
        logits = case.model(text[:, :-1])[:, 8:]  # what each new token was chosen from
    best, second = logits.topk(2).values.unbind(-1)
    exact = case.method(k_bits=16, v_bits=16)
    cached, _ = case.run(exact, text[:, :-1])
    rounding = (cached[:, 8:] - logits).abs().max()
    assert (best - second).min() > 10 * rounding, "choose another prompt"
    assert torch.equal(case.model.generate(prompt, 8, case.new_cache(exact)), text)


@cells(protocol=PROTOCOLS, formula=FORMULAS)
def test_never_nan(case):
    check_never_nan(case)
