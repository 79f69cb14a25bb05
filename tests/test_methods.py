"""Every method through one matrix: protocols, grouped queries, batches, lengths around a block, schemes.

There is no list of exceptions: what a cell is left out of is said by a property of it, such as `quantizes`.

    cases.py        a cell, and what is built from it
    oracles.py      what the methods must do, a second time, in plain lists and numpy
    expected.py     what the cache of a cell must hold, by these oracles
    invariants.py   the checks, `check_...`: what must hold of every method
    this file       which cells each check runs on

    pytest tests/test_methods.py                                   the cells of `covering`
    pytest tests/test_methods.py --whole                           all of them, some 4,400
    pytest tests/test_methods.py --method path/to/file.py:Class    the cells of one method of your own; all of them with
                                                                   --whole
    pytest tests/test_methods.py --method path/to/file.py:Class --as pfn
                                                                   it also has to equal the method pfn

A method of your own has no oracle, nor has a new one of registry.py. What it keeps is taken from the cache, and what
its codecs make of a block is asked of them again. With --method the tests stop at the first failure. A line says what
came and what should have come, and the test's name which cell was tried; --tb=short, --maxfail=9 or --pdb show more.
"""
from dataclasses import replace

import invariants
import pytest
import torch
from cases import KEEP_ALL, Case, G, schemes_of, takes
from conftest import runs_whole

from tinykv.cache import PROTOCOLS
from tinykv.codecs.affine import FORMULAS
from tinykv.lab.run.settings import load_class
from tinykv.methods.registry import METHODS

LENGTHS = ["1", "G-1", "G", "G+1", "2G+5"]
SHAPES = {"heads_per_kv": (2, 1, 4), "batch": (3, 1)}
# A method that takes one of these goes through it all with it, too.
VARIANTS = [("v_block", 2), ("anchors", "20%"), ("threshold", 0.3)]


# ---- the matrix

def pytest_generate_tests(metafunc):
    """Every invariant for every method, or those of --method, in every cell of its axes that it runs on."""
    cells = [pytest.param(check, case, id=f"{check}-{case}", marks=marks) for check, where, axes, *marks in INVARIANTS
             for case in cells_of(where, axes, metafunc.config)]
    metafunc.parametrize("check, case", cells)


def cells_of(where, axes, config):
    given, like = config.getoption("--method"), config.getoption("--as")
    methods = [load_class(name) for name in given] if given else METHODS.values()
    found = [case for case in all_cells(methods, axes, METHODS.get(like)) if where(case)]
    return found if runs_whole(config) else covering(found, axes, pairs=bool(given))


def all_cells(methods, axes, like=None):
    """Every method on every scheme that it can stand on, and with each variant that it takes, in every cell of `axes`.
    like: the built-in method that each has to equal."""
    found = []
    for cls in methods:
        found += [Case(cls, scheme, like=like) for scheme in schemes_of(cls)]
        variants = VARIANTS if found[-1].known else []
        found += [Case(cls, schemes_of(cls)[0], settings=(variant,), like=like)
                  for variant in variants if variant[0] in takes(cls)]
    for axis, values in axes.items():
        found = [replace(case, **{axis: value}) for case in found for value in values
                 if axis != "formula" or value == "offset" or has("formula")(case)]
    return list(dict.fromkeys(found))


def covering(found, axes, pairs=False):
    """Some of the cells: each method; and each protocol, length and scheme, and each value of the other axes, with some
    method. pairs: each scheme with each protocol, and with each batch, too.

    The cell that shows the most new things comes next. Of equals, the first whose method is new on its scheme.
    """
    shows = {}
    for case in found:
        shows[case] = {case.cls, ("protocol", case.protocol), ("length", case.length), case.scheme, case.settings}
        shows[case] |= {(axis, getattr(case, axis)) for axis in axes}
        if pairs:
            shows[case] |= {(case.scheme, case.protocol), (case.scheme, case.batch)}
    missing, chosen, seen = set().union(*shows.values()), [], set()
    while missing:
        best = max(found, key=lambda case: (len(shows[case] & missing), (case.cls, case.scheme) not in seen))
        chosen.append(best)
        missing -= shows[best]
        seen.add((best.cls, best.scheme))
    return chosen


# ---- what cells are told apart by

def every(case):
    return True


def has(*settings):
    return lambda case: case.takes >= set(settings)


def has_the_settings(case):
    """A method that we know nothing about may give other values, or another meaning, to settings."""
    return case.known and has(*dict(case.settings))(case)


def quantizes(case):
    method = case.uncalibrated()
    return min(method.bits_of("k"), method.bits_of("v")) < 16


def is_one_of(*names):
    return lambda case: case.oracle in names


def keeps(case):
    """It has settings that say how many tokens it keeps."""
    return case.known and not case.takes.isdisjoint(KEEP_ALL)


def begins(case):
    """Every text begins with a prefix."""
    return bool(case.prefix)


def may_keep(case):
    """It keeps tokens, or is a method that we know nothing about."""
    return keeps(case) or begins(case) or not case.known


def can_be_centred(case):
    """Its codecs have no tables."""
    plain = replace(case, settings=())
    return case.known and has("centre")(case) and not any(c.needs_text for *_, c in plain.uncalibrated().each_codec())


def calibrates(case):
    return case.uncalibrated().needs_calibration


def chooses(case):
    """What is kept depends on the text, and may change from one event to the next."""
    return not case.known or case.oracle in ("kvsink", "ott", "antkv")


def causal_in_paper(case):
    """Two kinds of cell are acausal under `paper`, by definition. A dynamic channel group takes its range from all its
    tokens, of which an early query reads the early ones. And a method that chooses does so over the whole window, so a
    late token can take the place of an early one that an early query reads."""
    return not chooses(case) and all(codec.tokens_per_group == 1 for *_, codec in case.uncalibrated().each_codec())


# ---- what holds of every method

SETTINGS = [
    (("metadata", "fp16"), ("clip", "none")),
    (("metadata", "fp16"), ("clip", "centre"), ("k_bits", 4)),
    (("reorder", "off"), ("clip", "endpoint")),
    (("reorder", "off"), ("clip", "none"), ("rope", "post")),
    (("clip", "both"), ("k_bits", 1.5), ("v_bits", 1)),
    (("outliers", 0.0), ("rope", "post")),
    (("outliers", 20.0), ("q_norm", "off"), ("sensitivity", "fisher")),
    (("outliers", 1.0), ("sensitivity", "none"), ("k_bits", 4)),
    (("outlier_num", 4), ("extra_pool", 0), ("skip_layers", 0)),
    (("select", "largest"), ("skip_layers", 0)),
    (("v_block", 1),),
    (("rotate", "off"), ("scale_tokens", "off")),
    (("rotate", "off"), ("v_bits", 16)),
    (("scale_tokens", "off"), ("k_bits", 4)),
    (("vq", "d2m4"), ("sensitivity", "token")),
    (("vq", "d16m16"), ("sensitivity", "none")),
    (("vq", "d2m64"), ("sensitivity", "fisher")),
    (("anchors", "0"),),
    (("anchors", "30%"), ("vq", "d8m2")),
    (("prefix", ()),),
    (("prefix", (5,)), ("k_bits", 4), ("v_bits", 16)),
    (("prefix", (*range(G + 3),)),),  # more than a block
]
# tokens are evicted, and pools are full: in a stream, which comes first in the cells of `covering`
MANY_TIMES = dict(protocol=("stream", "paper"), length=["6G+3"], heads_per_kv=(2, 4))
INTEGER_ZERO = dict(formula=["integer-zero"], protocol=PROTOCOLS, length=["G+1", "2G+5"], batch=(1, 3))
RECENT = dict(length=["2G+5"], recent=[1, 6], batch=(1, 3))
ONE_KIND = dict(protocol=["paper"], settings=[(("k_bits", 16),), (("v_bits", 16),)])
WITHOUT_A_POOL = dict(protocol=PROTOCOLS, recent=[0, 6], settings=[(("outlier_num", 0),)])  # that is kivi

# `check_NAME` of invariants.py, which cells it runs on, their axes, and marks
INVARIANTS = [
    ("cache_holds_the_expected_rows", every, dict(protocol=PROTOCOLS, length=LENGTHS, **SHAPES)),
    ("cache_holds_the_expected_rows", has("formula"), INTEGER_ZERO),
    ("cache_holds_the_expected_rows", every, RECENT),
    ("cache_holds_the_expected_rows", chooses, MANY_TIMES),
    ("cache_holds_the_expected_rows", has_the_settings, dict(protocol=PROTOCOLS, settings=SETTINGS)),
    ("cache_holds_the_expected_rows", has_the_settings, ONE_KIND),
    ("cache_holds_the_expected_rows", is_one_of("ott"), WITHOUT_A_POOL),
    ("cache_holds_the_expected_rows", keeps, dict(protocol=PROTOCOLS, settings=[tuple(KEEP_ALL.items())])),
    ("cache_holds_the_expected_rows", can_be_centred, dict(protocol=PROTOCOLS, settings=[(("centre", "on"),)])),
    ("uneven_chunks", every, dict(recent=[0, 5], batch=(1, 3))),
    ("scores", is_one_of("antkv"),
     dict(protocol=PROTOCOLS, recent=[0, 5], length=["1", "G", "2G+5"], heads_per_kv=(2, 4))),
    # what attention sees
    ("attention_sees_the_cache", every, dict(protocol=PROTOCOLS, length=["1", "G+1", "2G+5"])),
    ("attention_sees_the_cache", every, RECENT),
    ("low_bits_matter", quantizes, dict(protocol=PROTOCOLS)),
    # what is exact
    ("sixteen_bits_are_fp16", has("k_bits", "v_bits"),
     dict(protocol=PROTOCOLS, length=["1", "G", "G+1", "2G+5"], heads_per_kv=(2, 4))),
    ("sixteen_bit_models_cache_what_they_compute", is_one_of("fp16"), dict(protocol=PROTOCOLS, heads_per_kv=(2, 4))),
    ("placeholders_do_not_matter", may_keep,
     dict(protocol=PROTOCOLS, formula=FORMULAS, heads_per_kv=(2, 4), batch=(1, 3))),
    # what does not depend on what
    ("chunks_equal_single_tokens", every,
     dict(dtype=[torch.float64], recent=[0, 5], heads_per_kv=(2, 4), batch=(1, 3))),
    ("no_future_leak", every, dict(heads_per_kv=(2, 4), recent=[0, 5])),
    ("no_future_leak", causal_in_paper, dict(protocol=["paper"], heads_per_kv=(2, 4))),
    ("batch_rows_are_independent", every,
     dict(protocol=PROTOCOLS, length=["1", "G+1", "2G+5"], heads_per_kv=(2, 4), dtype=[torch.float64])),
    ("same_twice_and_after_reset", every, dict(protocol=PROTOCOLS)),
    # what is refused
    ("a_text_has_to_begin_with_the_prefix", begins, dict(batch=(1, 3))),
    # calibration
    ("what_is_calibrated_can_be_restored", calibrates, {}),
    # in use
    ("generation", every, dict(heads_per_kv=(2, 4))),
    ("never_nan", every, dict(protocol=PROTOCOLS, formula=FORMULAS)),
    ("codes_are_what_is_claimed", every, {}, pytest.mark.whole),
]


def test_invariant(check, case):
    getattr(invariants, f"check_{check}")(case)


test_invariant.axes = {}  # a test of cells, which --method selects
