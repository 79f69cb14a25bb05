"""The settings of the methods: defaults, what follows from them, and what is refused."""
import pytest
import torch
from cases import chunk_of, model_of, schemes_of, takes

from tinykv import UserError
from tinykv.codecs.base import Exact
from tinykv.codecs.schemes import SCHEMES
from tinykv.lab.run.entries import combinations
from tinykv.lab.run.settings import settings_of
from tinykv.methods.registry import METHODS

CONFIG = model_of(1).config


@pytest.mark.parametrize("name, k_axis, v_axis, static, rope", [
    ("token-dynamic", "token", "token", False, "post"), ("token-static", "token", "token", True, "post"),
    ("channel-static", "channel", "token", True, "pre"), ("channel-dynamic", "channel", "token", False, "post"),
    ("kvquant", "channel", "token", True, "pre")])
def test_what_the_schemes_are(name, k_axis, v_axis, static, rope):
    method = METHODS["rtn"](CONFIG, scheme=name)
    assert (method.rope, method.needs_calibration) == (rope, static)
    assert [(pair.k.axis, pair.v.axis) for pair in method.codecs] == [(k_axis, v_axis)] * CONFIG.num_hidden_layers


@pytest.mark.parametrize("name, cls", METHODS.items())
def test_where_keys_are_rotated(name, cls):
    """As told, or as the scheme has it; by default, in methods with a codec of their own, as their papers have it."""
    if "rope" in takes(cls):
        assert [cls(CONFIG, rope=rope).rope for rope in ("pre", "post")] == ["pre", "post"]
        assert all(cls(CONFIG, scheme=scheme).rope == SCHEMES[scheme][1] for scheme in schemes_of(cls) if scheme)
    of_papers = {"kivi": "post", "ott": "post", "oscar": "post", "skvq": "pre", "kvquant": "pre", "cq": "pre",
                 "antkv": "pre"}
    assert cls(CONFIG).rope == of_papers.get(name, cls(CONFIG).rope)


def test_which_schemes_a_method_stands_on():
    """Every one, if it takes a scheme; IntactKV's prefix has no rows to calibrate on."""
    for name, cls in METHODS.items():
        dynamic = ["token-dynamic", "channel-dynamic"]
        assert schemes_of(cls) in ([None], dynamic if name == "intactkv" else list(SCHEMES)), name


def test_whole_bits_reach_a_scheme_as_an_integer(monkeypatch):
    given = []
    monkeypatch.setitem(SCHEMES, "mine", (lambda config, kind, bits: given.append(repr(bits)) or Exact(), "pre"))
    METHODS["rtn"](CONFIG, 4.0, 1.5, scheme="mine")
    assert given == ["4", "1.5"] * CONFIG.num_hidden_layers
    with pytest.raises(UserError, match="got 9$"):
        METHODS["rtn"](CONFIG, 9.0)


def test_a_default_of_ones_own_overrides_the_inherited_one():
    class Mine(METHODS["pfn"]):
        def __init__(self, config, preserve=9, scheme="kvquant", **settings):
            super().__init__(config, preserve, scheme=scheme, **settings)
    found = settings_of(Mine)
    assert (found["preserve"], found["scheme"], found["k_bits"]) == (9, "kvquant", 2)
    assert settings_of(METHODS["pfn"])["preserve"] == 5


def test_a_constructor_that_ends_in_a_scheme_takes_its_settings():
    """With the scheme's own defaults, and no other scheme's."""
    class Mine(METHODS["kivi"].__base__):
        def __init__(self, config, k_bits=2, v_bits=2, preserve=1, **kvquant):
            super().__init__(config, k_bits, v_bits, "kvquant", **kvquant)
    assert settings_of(Mine) == {"k_bits": 2, "v_bits": 2, "preserve": 1, "outliers": 1.0,
                                 "sensitivity": "fisher-range", "q_norm": None}
    with pytest.raises(TypeError):
        Mine(CONFIG, group_size=4)


def test_a_baseline_takes_the_settings_of_the_scheme_that_it_is_given():
    """Not those of its own default, where a method is compared with it on another scheme."""
    given = {"clip": ["both", "none"], "outliers": [1.0]}
    for beside, taken in (({}, [{}]), ({"scheme": "kvquant"}, [{"outliers": 1.0}]),
                          ({"scheme": "skvq"}, [{"clip": "both"}, {"clip": "none"}])):
        assert combinations(METHODS["rtn"], given, beside) == taken


def test_all_methods_read_a_stream_in_the_same_chunks():
    """Those that quantize at once; by default, so that tables compare like with like."""
    methods = [cls(CONFIG) for cls in METHODS.values()]
    assert {chunk_of(method) for method in methods if method.recent == 0} == {128}


@pytest.mark.parametrize("name, settings, recent, block, v_block, chunk", [
    ("kivi", {}, 128, 32, None, 32), ("kivi", {"v_block": 1}, 128, 32, 1, 1),
    ("kivi", {"group_size": 16, "v_block": 12, "recent": 0}, 0, 16, 12, 4), ("oscar", {}, 128, 32, None, 32),
    ("skvq", {}, 128, 16, None, 16), ("skvq", {"block": 1, "recent": 3}, 3, 1, None, 1),
    ("cq", {"recent": 32}, 32, 128, None, 128), ("ott", {}, 32, 128, None, 128), ("antkv", {}, 32, 128, None, 128)])
def test_the_pace_of_methods_with_a_window(name, settings, recent, block, v_block, chunk):
    """The defaults; and a stream's chunks end wherever keys or values are quantized."""
    method = METHODS[name](CONFIG, **settings)
    pace = method.recent, method.block, method.block_of("v"), chunk_of(method)
    assert pace == (recent, block, v_block or block, chunk)


@pytest.mark.parametrize("scheme", ["token-dynamic", "token-static", "channel-static", "channel-dynamic"])
@pytest.mark.parametrize("group_size", [None, 4, 16])
def test_a_block_holds_whole_channel_groups(scheme, group_size):
    """128 tokens unless told otherwise; and groups of tokens that are not full can only be a text's last."""
    method = METHODS["rtn"](CONFIG, scheme=scheme, group_size=group_size)
    assert method.block == (group_size if group_size and scheme == "channel-dynamic" else 128)
    for codec in (codec for pair in method.codecs for codec in pair):
        assert codec.axis == "token" or codec.static or method.block == codec.group_size


@pytest.mark.parametrize("name", ["kivi", "ott", "oscar"])
def test_values_are_quantized_a_group_at_a_time_also_beside_exact_keys(name):
    assert METHODS[name](CONFIG, k_bits=16, group_size=8).block == 8


def test_oscars_zero_point_is_an_integer():
    """As in the released code, quarot_utils.py: `zero = torch.round(-xmin / scale)`. So 0 has a level."""
    x = torch.linspace(-1, 2.3, 32)[None, None, :, None].repeat(1, 1, 1, CONFIG.head_dim)  # (1, 1, T, d)
    x[:, :, 7] = 0
    for codec in METHODS["oscar"](CONFIG, rotate="off", scale_tokens="off").codecs[0]:
        assert not codec.decode(codec.encode(x))[:, :, 7].any()


@pytest.mark.parametrize("entry", [max, (max, "before"), ("post", max)])
def test_an_entry_that_is_no_scheme(monkeypatch, entry):
    monkeypatch.setitem(SCHEMES, "mine", entry)
    with pytest.raises(UserError, match=r'SCHEMES\["mine"\] must be a function and "pre" or "post"; got'):
        settings_of(METHODS["kvsink"])
