"""KVSink: the models of its paper are recognised, and on others the outlier is found, or found
missing."""
import copy
import random
from dataclasses import replace
from functools import lru_cache
from types import SimpleNamespace

import numpy as np
import oracles
import pytest
import torch
from cases import CHANNEL, MARK, SETTINGS, VOCAB, Case, D, G, H, L, calibration_windows, d, model_of, tokens_of
from chance import Chance
from hypothesis import example, given
from hypothesis import strategies as st
from planted import few_tries

from tinykv import UserError, hf
from tinykv.cache import PROTOCOLS, KVCache
from tinykv.calibrate import calibrate
from tinykv.codecs.schemes import SCHEMES, settings_of_scheme
from tinykv.data import load_windows
from tinykv.hf import EMBEDDED
from tinykv.methods.kvsink import KVSink
from tinykv.methods.pfn import PFN
from tinykv.model import Llama, LlamaConfig
from tinykv.outlier import find_outlier, outlier

# ---- Table 3


def on_real(changes, scheme="token-dynamic", **settings):
    """KVSink on the config of LLaMA-2-7B, with changes."""
    return KVSink(replace(LlamaConfig(32000, 4096, 11008, 32, 32, 32, 128, 4096), **changes), scheme=scheme, **settings)


# what KVSink looks at in a config
LLAMA_2_13B = {"num_hidden_layers": 40, "hidden_size": 5120, "intermediate_size": 13824, "num_key_value_heads": 40}
MISTRAL_7B = {"model_type": "mistral", "intermediate_size": 14336, "num_key_value_heads": 8,
              "max_position_embeddings": 32768}
LLAMA_3 = {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072}
LLAMA_3_1_8B = {**LLAMA_3, "intermediate_size": 14336}
LLAMA_3_2 = {**LLAMA_3, "intermediate_size": 8192}


@pytest.mark.parametrize("changes, layer, channel", [
    pytest.param({}, 1, 2533, id="llama-2-7b"),
    pytest.param(LLAMA_2_13B, 3, 4743, id="llama-2-13b"),
    pytest.param(MISTRAL_7B, 1, 2070, id="mistral-7b"),
    pytest.param({**LLAMA_3_1_8B, "max_position_embeddings": 8192}, 1, 788, id="llama-3-8b"),
    pytest.param(LLAMA_3_1_8B, 1, 788, id="llama-3.1-8b"),
    pytest.param({**LLAMA_3_2, "num_hidden_layers": 16, "hidden_size": 2048}, 1, 400, id="llama-3.2-1b"),
    pytest.param({**LLAMA_3_2, "num_hidden_layers": 28, "hidden_size": 3072}, 1, 588, id="llama-3.2-3b"),
    pytest.param({"max_position_embeddings": 2048}, None, None, id="llama-1-7b"),
    pytest.param({"vocab_size": 64000, "num_key_value_heads": 4}, None, None, id="another of the shape, 4 KV heads"),
    pytest.param({**LLAMA_2_13B, "max_position_embeddings": 2048}, None, None, id="llama-1-13b"),
    pytest.param({**MISTRAL_7B, "vocab_size": 32768}, None, None, id="mistral-7b-v0.3"),
    pytest.param({"model_type": "mistral"}, None, None, id="another type")])
def test_the_papers_models_are_recognised(changes, layer, channel):
    """And others of their shape are not."""
    method = on_real(changes)
    assert (method.layer, method.channel, method.needs_calibration) == (layer, channel, layer is None)
    assert ("Table 3" in method.describe()) == (layer is not None)


def test_given_layer_and_channel_come_first():
    method = on_real({}, emergence_layer=4, outlier_channel=17)
    assert (method.layer, method.channel) == (4, 17)


@pytest.mark.parametrize("settings", [
    {"preserve": 0}, {"threshold": 0}, {"threshold": 1.1}, {"threshold": float("nan")},
    {"emergence_layer": 0}, {"outlier_channel": 0}, {"emergence_layer": L, "outlier_channel": 0},
    {"emergence_layer": 0, "outlier_channel": D}, {"emergence_layer": -1, "outlier_channel": 0}])
def test_settings_that_cannot_be_are_refused(settings):
    with pytest.raises(UserError):
        KVSink(model_of(1).config, **settings)


# ---- the search for the outlier

@lru_cache
def emerging_model(layer, channel, layers=5, size=400.0):
    """MARK writes an outlier into `channel` in the MLP of block `layer`, and nowhere before.

    Channel 0 is MARK's own: no other token and no block writes to it, and one neuron of that MLP
    reads it.
    """
    torch.manual_seed(3)
    model = Llama(LlamaConfig(VOCAB, D, 48, layers, H, H, d, 512))
    with torch.no_grad():
        embedding = model.model["embed_tokens"].weight
        embedding[:, 0] = 0
        embedding[MARK] = 0
        embedding[MARK, 0] = 3.0
        for block in model.model["layers"]:
            block.self_attn.o_proj.weight[[0, channel]] *= 0
            block.mlp.down_proj.weight[[0, channel]] *= 0
        mlp = model.model["layers"][layer].mlp
        mlp.gate_proj.weight[0], mlp.up_proj.weight[0] = 0, 0
        mlp.gate_proj.weight[0, 0] = mlp.up_proj.weight[0, 0] = 4.0
        mlp.down_proj.weight[:, 0] = 0
        mlp.down_proj.weight[channel, 0] = size / 100
    return model


def calibrated(model, windows=None):
    """KVSink on a model, after its search."""
    method = KVSink(model.config, scheme="token-dynamic")
    calibrate(model, method, tokens_of(6, 24, seed=2) if windows is None else windows)
    return method


def outlier_of(model, windows=None):
    """Emergence layer and channel that calibration finds, or None."""
    method = calibrated(model, windows)
    return None if method.layer == -1 else (method.layer, method.channel)


@pytest.mark.parametrize("layer, channel, layers", [
    (0, 9, 5), (1, 9, 5), (2, 30, 5), (3, 1, 5), (4, 9, 5), (0, 9, 1), (0, 9, 2), (0, 9, 3), (1, 9, 3), (2, 9, 4),
    (8, 9, 12)])
def test_a_planted_outlier_is_found(layer, channel, layers):
    """In models of any depth; where it is as large as a small model's, or as an LLM's. One of the last block marks
    nothing: no layer is left that could keep the tokens that it marks."""
    for size in (400.0, 1e5):
        found = outlier_of(emerging_model(layer, channel, layers, size))
        assert found == (None if layer == layers - 1 else (layer, channel))


def test_a_late_outlier_is_found_behind_a_channel_that_is_large_in_all_tokens():
    """Channel 5 is 100 times what the other channels have, in every token and after every block: it marks no sink."""
    model = copy.deepcopy(emerging_model(8, 9, layers=12, size=1e5))
    model.model["embed_tokens"].weight.data[:, 5] = 60
    assert outlier_of(model) == (8, 9)


def test_windows_without_a_sink_do_not_matter():
    """A second search forgets the first; and what either has found can be restored, also of the first block."""
    model, windows = emerging_model(0, 9), tokens_of(10, 40, seed=2)
    windows[windows == MARK] = 0
    method, other = (KVSink(model.config, scheme="token-dynamic") for _ in range(2))
    for place, found in (((-1, -1), "no stable outlier in 10"), ((0, 9), "channel 9 (found in 3 of 10")):
        calibrate(model, method, windows)
        assert (method.layer, method.channel) == place and f"{found} calibration windows" in method.describe()
        other.restore(method.calibrated(), model)
        assert (other.layer, other.channel, other.describe()) == (*place, method.describe())
        windows[[2, 5, 6], 20] = MARK


@pytest.mark.parametrize("context, bos, least, most", [(256, "replace", 2, 2), (64, "none", 1, 6)])
def test_the_embedded_model_has_one(context, bos, least, most):
    """Stories are longer than 64 tokens, so most windows that short have no sink."""
    model, tokenizer = hf.load(EMBEDDED)
    windows = load_windows("tales", tokenizer, context, 2 if most == 2 else 16, "calibration", bos=bos).tokens
    method = calibrated(model, windows)
    assert (method.layer, method.channel) == (1, 49)
    assert least <= method.n_marked <= most


def listed_outlier(hidden):
    """`outlier` of tokens by channels, in plain lists."""
    of_token = [max(abs(number) for number in token) for token in hidden]
    largest = max(of_token)
    middle = sorted(of_token)[(len(of_token) - 1) // 2]
    token = hidden[of_token.index(largest)]
    return largest, largest / middle, [abs(number) for number in token].index(largest)


def test_an_outlier_stands_out_among_the_tokens():
    rng = np.random.default_rng(0)
    for _ in range(100):
        size = rng.integers(1, 7, 2)  # tokens, channels
        hidden = rng.choice(98, size, replace=False) + 1
        hidden *= rng.choice((-1, 1), size)
        assert outlier(torch.tensor(hidden)[None]) == pytest.approx(listed_outlier(hidden.tolist()))


def listed_place(largest, ratio, channel):
    """`find_outlier` in plain lists, one for each window."""
    named = []
    for sizes, ratios, channels in zip(largest, ratio, channel):
        blocks = list(zip(sizes, ratios, channels))[1:-1]  # without the embedding and the last one
        for layer, (size, share, c) in enumerate(blocks):
            doubles = any(later > 2 * size for later, _, _ in blocks[layer + 1:layer + 4])
            if share >= 5 and not doubles:
                named.append((c, layer))
                break
    for c in {c for c, _ in named}:
        layers = sorted(layer for other, layer in named if other == c)
        if len(layers) > len(named) - len(layers):
            return layers[(len(layers) - 1) // 2], c, len(layers)
    return None


def find(largest, ratio, channel):
    return find_outlier(torch.tensor(largest).float(), torch.tensor(ratio).float(), torch.tensor(channel))


def test_the_search_equals_the_rule_in_lists():
    rng, seen = random.Random(1), set()
    for _ in range(600):
        W, layers = rng.randint(1, 5), rng.randint(1, 9)
        sizes, ratios, channels = rng.choice((
            ((1, 2, 3, 4), (4, 5), (7,)), ((1, 10, 20, 21), (2, 4, 5, 90), (7, 7, 8))))
        largest, ratio, channel = ([rng.choices(numbers, k=layers + 1) for _ in range(W)]
                                   for numbers in (sizes, ratios, channels))
        place = listed_place(largest, ratio, channel)
        assert find(largest, ratio, channel) == place
        seen.add(place and place[0])
    assert seen > {None, 0, 1, 2, 3, 4}


@pytest.mark.parametrize("largest, ratio, layer", [
    ([1, 2, 60, 70, 20], [2, 2, 9, 8, 7], 1),  # the first that stands out, not the largest
    ([1, 2, 20, 25, 5], [2, 2, 4.9, 4.8, 9], None),  # a ratio below 5
    ([1, 10, 21, 22, 5], [2, 6, 9, 9, 9], 1),  # it still doubles
    ([1, 10, 20, 20, 5], [2, 6, 9, 9, 9], 0),  # at most
    ([1, 10, 11, 12, 21, 22, 9], [2, 6, 7, 8, 9, 9, 9], 1),  # in the third layer after
    ([1, 10, 11, 12, 13, 30, 9], [2, 6, 7, 8, 9, 9, 9], 0),  # what grows later is another generation of sinks
    ([9, 1, 2, 40, 10], [90, 2, 2, 9, 9], 2),  # the embedding is no layer
    ([1, 1, 40, 40, 900], [2, 2, 9, 9, 9], 1),  # the last layer says nothing of the others
    ([1, 39, 290, 769, 766, 761, 754, 380, 115, 24920, 24911, 4420],
     [2, 2, 9, 21, 20, 19, 17, 5, 2, 341, 331, 7], 2),  # SmolLM2 in fewer layers: two generations
])
def test_which_layer_an_outlier_emerges_in(largest, ratio, layer):
    """The rule on numbers made up: after the embedding, then after each block; the same in 6 windows."""
    found = find([largest] * 6, [ratio] * 6, [[7] * len(largest)] * 6)
    assert found == (None if layer is None else (layer, 7, 6))


# ---- the method after the search

@pytest.mark.one_in(5)
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_kvsink_without_an_outlier_is_pfn(scheme, protocol, monkeypatch):
    """Also in its ranges: they leave out the first tokens. A second calibration forgets the first one's ranges."""
    few_tries(monkeypatch)  # as `Case` does
    model, case = model_of(2), Case(PFN, scheme, protocol=protocol)
    of_scheme = {name: SETTINGS[name] for name in settings_of_scheme(scheme) if name in SETTINGS}
    method = KVSink(model.config, k_bits=2, v_bits=3, scheme=scheme, preserve=3, **of_scheme)
    method.block = G
    plain = copy.deepcopy(model)
    plain.model["embed_tokens"].weight.data[MARK, CHANNEL] = 0.5
    calibrate(plain, method, calibration_windows())
    assert method.layer == -1 and "no stable outlier" in method.describe()
    method.needs_text, method.calibrated_on = False, None  # the search is over
    if any(codec.needs_text for pair in method.codecs for codec in pair):
        calibrate(model, method, calibration_windows())
    tokens = case.tokens()
    assert torch.equal(case.run(method, tokens)[0], case.run(case.method(), tokens)[0])


# ---- the sinks so far, against plain lists. Sizes are small whole numbers, so there are many ties

@st.composite
def chunks_of_sizes(draw):
    """For each chunk, a list of whole numbers a sequence."""
    B = draw(st.integers(1, 3))
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    size = st.integers(-4, 4)
    return [[draw(st.lists(size, min_size=n, max_size=n)) for _ in range(B)] for n in lengths]


def sinks_of(chunks, **settings):
    """After each chunk: |sizes| so far, a list a sequence, and the sinks that KVSink has found (B, up to k)."""
    method = KVSink(model_of(1).config, emergence_layer=1, outlier_channel=2, **settings)
    cache = SimpleNamespace(shared=SimpleNamespace(), layers=[SimpleNamespace(length=0) for _ in range(L)])
    cache.top_k = lambda x, k: KVCache.top_k(cache, x, k)
    method.begin(cache)
    seen = [[] for _ in chunks[0]]
    for chunk in chunks:
        # other channels, and other layers, do not count
        hidden = torch.full((len(chunk), len(chunk[0]), D), 1e4)
        hidden[..., 2] = torch.tensor(chunk, dtype=torch.float)
        for layer in cache.layers:
            layer.length += hidden.shape[1]
        before = cache.shared.sinks
        method.observe(cache, 0, hidden)
        assert cache.shared.sinks is before, "looked at another layer"
        method.observe(cache, 1, hidden)
        for sizes, new in zip(seen, chunk):
            sizes += [abs(x) for x in new]
        yield seen, cache.shared.sinks.tolist()


@given(chunks_of_sizes(), st.integers(1, 8))
@example([[[1, -3, 2, 3, 0, 3]], [[2, 3, -4]]], 3)
def test_running_top_k(chunks, k):
    for seen, sinks in sinks_of(chunks, preserve=k):
        assert sinks == [oracles.top_k(sizes, k) for sizes in seen]


@given(chunks_of_sizes(), st.sampled_from((0.25, 0.5, 0.75, 1)))
@example([[[1, 1, 4], [4, 2, 3]], [[3, 1, 0], [2, 2, 4]], [[4], [0]]], 0.5)
def test_all_that_reach_the_threshold(chunks, threshold):
    """However the text is cut; no sequence has more places than the one with the most sinks needs."""
    for seen, sinks in sinks_of(chunks, threshold=threshold):
        reached = [{i for i, size in enumerate(sizes) if size >= threshold * max(sizes)} for sizes in seen]
        assert list(map(set, sinks)) == reached
        assert len(sinks[0]) == max(map(len, reached))


def test_the_control_keeps_as_many_tokens():
    """The five largest, and others by chance; as many places as there are marks."""
    method = Chance(model_of(1).config, emergence_layer=1, outlier_channel=2, threshold=0.5)
    for marks in ([3, 1, 7, 8, 9, 2, 4], [3, 1]):
        text = SimpleNamespace(layer=2, length=20, shared=SimpleNamespace(sinks=torch.tensor([marks])))
        kept, = method.keep_keys(text, 20)[0].tolist()
        assert kept[:5] == marks[:5] and len(kept) == len(marks) and set(kept) <= set(range(20))


def test_a_model_of_table_3_still_calibrates_its_static_ranges():
    """Layer and channel are known without calibration, so they do not count as what calibration has found."""
    method = on_real({}, scheme="channel-static")
    assert (method.layer, method.channel) == (1, 2533) and not method.needs_text
    assert method.needs_calibration and not method.calibrated()
