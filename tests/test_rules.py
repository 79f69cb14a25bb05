"""What a notebook does by mistake ends in one line. Each rule stands in one place of the code."""
import copy
import os

import pytest
import torch

from tinykv import UserError, hf
from tinykv.cache import KVCache
from tinykv.calibrate import calibrate
from tinykv.data import Windows, load_windows
from tinykv.evaluate import measure
from tinykv.files import write
from tinykv.hf import EMBEDDED
from tinykv.methods.intactkv import IntactKV, Prefix
from tinykv.methods.registry import METHODS

MODEL, TOKENIZER = hf.load(EMBEDDED)
CONFIG, BOS = MODEL.config, MODEL.config.bos_token_id
WINDOWS = load_windows("tales", TOKENIZER, 48, 2)
TOKENS = WINDOWS.tokens
FP16 = METHODS["fp16"](CONFIG)


def other():
    model = copy.deepcopy(MODEL)
    for weight in model.parameters():
        weight.data *= 1.2
    return model


def made(name, **settings):
    method = METHODS[name](CONFIG, **settings)
    calibrate(MODEL, method, TOKENS)
    return method


def test_a_cache_reads_with_its_own_model():
    cache = KVCache(MODEL, METHODS["kivi"](CONFIG))
    MODEL(TOKENS, cache)
    with pytest.raises(UserError, match="made for another model"):
        other()(TOKENS[:, :1], cache)
    MODEL(TOKENS[:, :1], cache)


def test_a_cache_that_is_copied_has_the_same_model_and_goes_on_by_itself():
    method = made("rtn", block=8)
    cache = KVCache(MODEL, method)
    MODEL(TOKENS, cache)
    copied = copy.deepcopy(cache)
    assert copied.model is MODEL and copied.method is method
    expected = MODEL(TOKENS[:, :9], cache)
    assert len(copied) == 48 and torch.equal(MODEL(TOKENS[:, :9], copied), expected)


def test_a_text_is_of_one_calibration():
    method = made("rtn", block=8)
    cache = KVCache(MODEL, method)
    calibrate(MODEL, method, TOKENS[:1])  # before the text
    MODEL(TOKENS, cache)
    calibrate(MODEL, method, TOKENS[:1])
    with pytest.raises(UserError, match="calibrated anew"):
        MODEL(TOKENS[:, :1], cache)
    cache.reset()
    MODEL(TOKENS, cache)


@pytest.mark.parametrize("tokens, words", [
    (TOKENS[0], r"ids \(B, T\)"), (TOKENS[None], r"ids \(B, T\)"), (TOKENS.float(), "float32"),
    (TOKENS.tolist(), "list"), (TOKENS.numpy(), "ndarray"), (WINDOWS, "Windows"), (TOKENS[:0], "Tensor"),
    (TOKENS[:, :0], "Tensor"), (TOKENS - 2000, "from 0 to 1023"), (TOKENS + 1023, "from 0 to 1023"),
    (TOKENS.repeat(1, 30), "1024 positions")])
def test_tokens_are_ids(tokens, words):
    cache = KVCache(MODEL, FP16)
    for read in (MODEL, lambda tokens: MODEL(tokens, cache), lambda tokens: MODEL.generate(tokens, 2),
                 lambda tokens: calibrate(MODEL, METHODS["rtn"](CONFIG), tokens)):
        with pytest.raises(UserError, match=words):
            read(tokens)


def test_a_stream_ends_with_the_models_positions():
    cache = KVCache(MODEL, METHODS["kivi"](CONFIG))
    with torch.inference_mode(), pytest.raises(UserError, match="1056 tokens are more than the 1024 positions"):
        for _ in range(22):
            MODEL(TOKENS, cache, logits=False)


def test_generation_does_not_go_on_from_nan():
    model = copy.deepcopy(MODEL)
    model.model["norm"].weight.data *= torch.nan
    with pytest.raises(UserError, match="logits are not finite"):
        model.generate(TOKENS, 2)


@pytest.mark.parametrize("edit", [
    lambda model: setattr(model, "lm_head", torch.nn.Linear(64, 1024, bias=False)),
    lambda model: model.model["norm"].weight.data.mul_(2),
    lambda model: model.model["layers"][-1].mlp.down_proj.weight.data.zero_(),
    lambda model: model.model["layers"][-1].self_attn.o_proj.weight.data.zero_()])
def test_fp16s_result_is_of_this_head_and_last_layer(edit):
    exact, edited = measure(MODEL, FP16, WINDOWS), copy.deepcopy(MODEL)
    edit(edited)
    with pytest.raises(UserError, match="of another model"):
        measure(edited, METHODS["kivi"](CONFIG), WINDOWS, fp16=exact)


def test_a_quantized_method_is_nobodys_fp16():
    kivi = METHODS["kivi"](CONFIG)
    with pytest.raises(UserError, match="of another method"):
        measure(MODEL, kivi, WINDOWS, fp16=measure(MODEL, kivi, WINDOWS))


def test_windows_that_are_edited_in_place_are_others():
    windows = load_windows("tales", TOKENIZER, 48, 2)
    exact = measure(MODEL, FP16, windows)
    windows.tokens[:, 5:] = 7
    with pytest.raises(UserError, match="of other windows"):
        measure(MODEL, FP16, windows, fp16=exact)


@pytest.mark.parametrize("answers, start", [([[(47, 49)], []], 1), ([[(-2, 3)], []], 1), ([[(9, 9)], []], 1),
                                            ([[]], 1), ([[], []], 0), ([[], []], -5), ([[], []], 48)])
def test_what_is_predicted_lies_in_the_window(answers, start):
    with pytest.raises(UserError, match="the first target is from 1 to 47"):
        Windows(TOKENS, answers, start)


@pytest.mark.parametrize("wrong", [{"windows": -1}, {"context": 0}, {"bos": "Replace"}])
def test_windows_are_asked_for_in_words_that_exist(wrong):
    with pytest.raises(UserError):
        load_windows(**{"data": "tales", "tokenizer": TOKENIZER, "context": 48, "windows": 2, **wrong})


@pytest.mark.parametrize("edit", [lambda prefix: prefix.fill(other(), other()), lambda prefix: prefix.ids.append(9)])
def test_a_prefix_is_of_its_model_and_ids(edit):
    prefix = Prefix("two", [BOS, 5])
    prefix.fill(MODEL, MODEL)
    KVCache(MODEL, IntactKV(CONFIG, prefix))
    edit(prefix)
    with pytest.raises(UserError, match="filled for other tokens, or another model"):
        KVCache(MODEL, IntactKV(CONFIG, prefix))


@pytest.mark.parametrize("name, one, two", [
    ("rtn", {"k_bits": 2}, {"k_bits": 4}), ("rtn", {"scheme": "token-static"}, {"scheme": "channel-static"}),
    ("rtn", {"rope": "pre"}, {"rope": "post"}), ("pfn", {"preserve": 1}, {"preserve": 9}),
    ("skvq", {"group_size": 16}, {"group_size": 32}), ("cq", {"vq": "d2m16"}, {"vq": "d2m8"})])
def test_tables_serve_the_settings_and_the_model_that_they_were_made_with(name, one, two):
    tables = made(name, **one).calibrated()
    METHODS[name](CONFIG, **one).restore(tables, MODEL)
    with pytest.raises(UserError, match="changed since it was calibrated"):
        METHODS[name](CONFIG, **two).restore(tables, MODEL)
    with pytest.raises(UserError, match="on another model"):
        METHODS[name](CONFIG, **one).restore(tables, other())


@pytest.mark.parametrize("positions", [torch.arange(2), torch.arange(2)[None], torch.arange(1).view(1, 1, 1, 1)])
def test_what_is_kept_has_a_shape(positions):
    method = METHODS["rtn"](CONFIG, scheme="token-dynamic")
    method.keep_keys = lambda layer_cache, n: positions
    with pytest.raises(UserError, match="of the shape"):
        MODEL(TOKENS, KVCache(MODEL, method, "paper"))


def test_a_link_under_a_temporary_name_is_not_written_to(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    os.symlink(victim, tmp_path / f".out.{os.getpid()}.tmp")
    write(tmp_path / "out", lambda part: part.write_text("new"))
    assert victim.read_text() == "precious" and (tmp_path / "out").read_text() == "new"
