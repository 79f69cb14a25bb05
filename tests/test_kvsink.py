"""KVSink: Table 3, the search for the outlier on other models, and the sinks that it keeps."""
from dataclasses import fields
from types import SimpleNamespace

import oracles
import pytest
import torch
from cases import MARK, VOCAB, Case, D, G, H, L, calibration_windows, d, model_of, tokens_of
from chance import Chance
from hypothesis import given
from hypothesis import strategies as st

from tinykv import hf
from tinykv.cache import PROTOCOLS, KVCache
from tinykv.calibrate import calibrate
from tinykv.hf import EMBEDDED
from tinykv.lab.data import load_windows
from tinykv.lab.tables import restore_tables, tables_of
from tinykv.methods.kvsink import TABLE_3, KVSink, find_outlier, outlier
from tinykv.methods.pfn import PFN
from tinykv.model import Llama, LlamaConfig

# ---- Table 3

KEY = ("model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "num_key_value_heads", "vocab_size",
       "max_position_embeddings")  # what a model is recognised by
KNOWN = [(1, 2533), (3, 4743), (1, 2070), (1, 788), (1, 788), (1, 400), (1, 588)]  # the paper's, LLaMA-2-7B first


def config_of(key):
    rest = {"num_attention_heads": 32, "head_dim": 128} | dict(zip(KEY, key))
    return LlamaConfig(**{f.name: rest[f.name] for f in fields(LlamaConfig) if f.name in rest})


def test_the_papers_models_are_recognised_and_models_that_differ_in_one_size_are_not():
    for key, place in zip(TABLE_3, KNOWN, strict=True):
        method = KVSink(config_of(key), scheme="channel-static")  # whose ranges are calibrated all the same
        assert (method.layer, method.channel, method.needs_text) == (*place, False) and method.needs_calibration
        assert "Table 3" in method.describe() and not tables_of(method)
        for i in range(len(key)):
            other = KVSink(config_of([*key[:i], "qwen2" if i == 0 else key[i] + 16, *key[i + 1:]]))
            assert (other.layer, other.channel, other.needs_text) == (None, None, True)


# ---- the search: the rule on numbers made up, after the embedding and then after each layer

@pytest.mark.parametrize("largest, ratio, layer", [
    ([1, 2, 60, 70, 20], [2, 2, 9, 8, 7], 1),  # the first that stands out, not the largest
    ([1, 2, 20, 25, 5], [2, 2, 4.9, 4.8, 9], None), ([1, 2, 20, 25, 5], [2, 2, 5, 4.8, 9], 1),  # a ratio of 5 or more
    ([1, 10, 21, 22, 5], [2, 6, 9, 9, 9], 1), ([1, 10, 20, 20, 5], [2, 6, 9, 9, 9], 0),  # it at most doubles
    ([1, 10, 11, 12, 21, 22, 9], [2, 6, 7, 8, 9, 9, 9], 1),  # up to the third layer after
    ([1, 10, 11, 12, 13, 30, 9], [2, 6, 7, 8, 9, 9, 9], 0),  # what grows later is another generation of sinks
    ([9, 1, 2, 40, 10], [90, 2, 2, 9, 9], 2), ([1, 1, 40, 40, 900], [2, 2, 9, 9, 9], 1),  # neither embedding nor last
    ([1, 39, 290, 769, 766, 761, 754, 380, 115, 24920, 24911, 4420],
     [2, 2, 9, 21, 20, 19, 17, 5, 2, 341, 331, 7], 2)])  # SmolLM2 in fewer layers
def test_which_layer_an_outlier_emerges_in(largest, ratio, layer):
    numbers = [torch.tensor([row] * 6) for row in (largest, ratio, [7] * len(largest))]
    assert find_outlier(*numbers) == (None if layer is None else (layer, 7, 6))


@pytest.mark.parametrize("windows, found", [  # of each window its layer and channel
    ([(1, 7), (2, 7), (0, 7)], (1, 7, 3)), ([(1, 7), (2, 7)], (1, 7, 2)),  # the median layer, of two the lower
    ([(1, 7), (1, 7), (1, 8)], (1, 7, 2)), ([(1, 7), (1, 8)], None),  # the channel of more than half
    ([(1, 7), None, None], (1, 7, 1)), ([None], None)])  # of those that have any
def test_windows_vote(windows, found):
    largest, ratio, channel = torch.ones(len(windows), 6), torch.ones(len(windows), 6), torch.zeros(len(windows), 6)
    for w, place in enumerate(windows):
        if place:
            largest[w, place[0] + 1:], ratio[w, place[0] + 1:], channel[w] = 50, 9, place[1]
    assert find_outlier(largest, ratio, channel.long()) == found


def test_an_outlier_stands_out_among_the_tokens():
    """Its size, its ratio to the median token's (of four the second), and its channel."""
    hidden = torch.tensor([[[1., 2., 0.], [4., -40., 3.], [-1., 4., 2.], [6., 0., 5.]]])
    assert outlier(hidden) == (40, 10, 1)


# ---- the search on models

def emerging_model(layer, channel, layers=5, size=400.0, everywhere=0):
    """MARK writes an outlier into `channel` in the MLP of block `layer`, and nowhere before: one neuron reads channel
    0, which is MARK's own. everywhere: what all tokens have in channel 5."""
    torch.manual_seed(3)
    model = Llama(LlamaConfig(VOCAB, D, 48, layers, H, H, d, 512))
    with torch.no_grad():
        embedding = model.model["embed_tokens"].weight
        embedding[:, 0] = embedding[MARK] = 0
        embedding[MARK, 0] = 3.0
        embedding[:, 5] += everywhere
        for block in model.model["layers"]:
            block.self_attn.o_proj.weight[[0, channel]] = block.mlp.down_proj.weight[[0, channel]] = 0
        mlp = model.model["layers"][layer].mlp
        mlp.gate_proj.weight[0] = mlp.up_proj.weight[0] = mlp.down_proj.weight[:, 0] = 0
        mlp.gate_proj.weight[0, 0] = mlp.up_proj.weight[0, 0] = 4.0
        mlp.down_proj.weight[channel, 0] = size / 100
    return model


@pytest.mark.parametrize("layer, channel, layers, size, everywhere", [
    (0, 9, 2, 400, 0), (1, 9, 5, 1e5, 0), (2, 30, 5, 400, 0), (8, 9, 12, 1e5, 0),
    (8, 9, 12, 1e5, 60),  # behind a channel that is large in all tokens, and marks no sink
    (4, 9, 5, 400, 0), (0, 9, 1, 400, 0)])  # of the last block it marks nothing: no later layer could keep its tokens
def test_a_planted_outlier_is_found_in_the_windows_that_have_it(layer, channel, layers, size, everywhere):
    """A second calibration forgets the first, and what it found can be restored."""
    model, windows = emerging_model(layer, channel, layers, size, everywhere), tokens_of(10, 40, seed=2)
    windows[windows == MARK] = 0
    method, other = (KVSink(model.config, scheme="token-dynamic") for _ in range(2))
    for n in (0, 3):
        windows[[2, 5, 6][:n], 20] = MARK
        calibrate(model, method, windows)
        exists = n > 0 and layer < layers - 1
        place = (layer, channel) if exists else (-1, -1)
        said = f"channel {channel} (found in 3 of 10" if exists else "no stable outlier in 10"
        assert (method.layer, method.channel) == place and said in method.describe()
        restore_tables(other, tables_of(method), model)
        assert (other.layer, other.channel, other.describe()) == (method.layer, method.channel, method.describe())


def test_the_embedded_model_has_one_also_where_most_windows_have_no_sink():
    model, tokenizer = hf.load(EMBEDDED)
    method = KVSink(model.config, scheme="token-dynamic")
    calibrate(model, method, load_windows("tales", tokenizer, 64, 16, "calibration", bos="none").tokens)
    assert (method.layer, method.channel) == (1, 49) and method.n_marked <= 6


# ---- the sinks

@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_kvsink_without_an_outlier_is_pfn(protocol):
    """Also in its ranges, which leave out the first tokens."""
    case = Case(PFN, "channel-static", protocol=protocol)
    method = KVSink(case.model.config, k_bits=2, v_bits=3, scheme="channel-static", preserve=3, group_size=G, block=G)
    method.layer, method.needs_text = -1, False  # the search is over
    calibrate(case.model, method, calibration_windows())
    tokens = case.tokens()
    assert torch.equal(case.run(method, tokens)[0], case.run(case.method(), tokens)[0])


@pytest.mark.parametrize("threshold", [None, 0.5])
def test_a_model_without_an_outlier_keeps_first_tokens(threshold):
    method = KVSink(model_of(1).config, 3, threshold=threshold)
    method.fit([torch.ones(2, 9, D)] * (L + 1))  # (W, T, D): no token stands out
    kept = method.keep_keys(SimpleNamespace(layer=1, length=9, keys=SimpleNamespace(recent=torch.ones(1, 1, 9, d))), 9)
    assert kept.flatten().tolist() == [0, 1, 2] and "the first 3 tokens are kept" in method.describe()


@pytest.mark.parametrize("threshold", [None, 0.25, 0.5, 1])
@given(st.data())
def test_the_sinks_so_far_against_plain_lists(threshold, data):
    """However the text is cut; with many ties. Other layers and channels do not count, and layers up to the one that
    shows the outlier keep nothing."""
    B, k = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 8)))
    method = KVSink(model_of(1).config, k, emergence_layer=0, outlier_channel=2, threshold=threshold)
    layers = [SimpleNamespace(layer=i, length=0, shared=SimpleNamespace()) for i in range(L)]
    cache = SimpleNamespace(shared=layers[1].shared, layers=layers, top_k=lambda x, k: KVCache.top_k(None, x, k))
    method.begin(cache)
    seen = torch.zeros(B, 0)
    for n in data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=5)):
        sizes = torch.tensor(data.draw(st.lists(st.lists(st.integers(-4, 4), min_size=n, max_size=n), min_size=B,
                                                max_size=B)), dtype=torch.float)
        seen = torch.cat([seen, sizes.abs()], dim=1)
        hidden = torch.full((B, n, D), 1e4)
        hidden[..., 2] = sizes
        for layer in layers:
            layer.length += n
            method.observe(cache, layer.layer, hidden if layer.layer == 0 else 9 - hidden)
        sinks = method.keep_keys(layers[1], n)[:, 0].tolist()
        assert method.keep_keys(layers[0], n) is None
        if threshold is None:
            assert sinks == [oracles.top_k(row, k) for row in seen.tolist()]
        else:
            reached = [{i for i, size in enumerate(row) if size >= threshold * max(row)} for row in seen.tolist()]
            assert list(map(set, sinks)) == reached and len(sinks[0]) == max(map(len, reached))


def test_the_control_keeps_as_many_tokens():
    """The five largest, and others by chance; as many places as there are marks."""
    method = Chance(model_of(1).config, emergence_layer=0, outlier_channel=2, threshold=0.5)
    for marks in ([3, 1, 7, 8, 9, 2, 4], [3, 1]):
        text = SimpleNamespace(layer=2, length=20, shared=SimpleNamespace(sinks=torch.tensor([marks])))
        kept, = method.keep_keys(text, 20)[0].tolist()
        assert kept[:5] == marks[:5] and len(kept) == len(marks) and set(kept) <= set(range(20))
