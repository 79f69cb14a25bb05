"""Any decoder of transformers: its cache, tinykv/lab/transformers.py, and its perplexity, tinykv/lab/decoder.py."""
import copy
import threading
from pathlib import Path

import pytest
import torch
from cases import tokens_of

import eval_ppl
from tinykv import UserError, hf
from tinykv.cache import KVCache
from tinykv.calibrate import calibrate
from tinykv.evaluate import measure
from tinykv.hf import EMBEDDED
from tinykv.lab.data import load_windows
from tinykv.methods.registry import METHODS

transformers = pytest.importorskip("transformers")
decoders = pytest.importorskip("decoders")  # docs/programs/decoders.py
from tinykv.lab.decoder import NAME, Decoder, config_of  # noqa: E402
from tinykv.lab.transformers import MethodCache  # noqa: E402

GREEDY = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
T = 40  # tokens of a prompt, more than a sliding layer sees


def made(name):
    model = decoders.made(name)
    return model or pytest.skip(f"no {name} in transformers {transformers.__version__}")


def generate(model, cache, tokens=None, **given):
    tokens = tokens_of(2, T) if tokens is None else tokens
    return model.generate(tokens, **{"attention_mask": torch.ones_like(tokens), NAME: cache, **GREEDY, **given})


@pytest.mark.parametrize("name", decoders.ZOO)
def test_a_cache_in_16_bits_is_transformers_own_and_one_in_8_is_near(name):
    """And the page says so, of the newest release that it names."""
    model, words = made(name), decoders.answers(name)
    if hasattr(transformers, "Qwen3_5TextConfig"):
        assert decoders.line([name, *words]) in (Path(__file__).parents[2] / "docs/huggingface.md").read_text()
    if words[1] == "no":
        return
    cache = MethodCache(model, decoders.method_of("fp16", model))
    assert torch.equal(generate(model, cache), generate(model, None))
    assert cache.get_seq_length() == T + 29 and cache.is_initialized
    assert words[1] == "yes" and decoders.error(model, MethodCache(model, decoders.method_of("kivi", model, 2))) > 0.005


@pytest.mark.parametrize("name", ["Gemma 3", "LFM2", "Qwen3.5"])
def test_beams_copies_and_a_reset_go_on_also_where_a_layer_has_a_state(name):
    model = made(name)
    beams = {"num_beams": 3, "num_return_sequences": 2}
    try:
        cache = MethodCache(model, decoders.method_of("fp16", model))
    except UserError as error:
        pytest.skip(str(error))
    assert torch.equal(generate(model, cache, **beams), generate(model, None, **beams))
    cache.reset()
    text = generate(model, cache)
    assert torch.equal(text, generate(model, None))
    longer = torch.cat([text, tokens_of(2, 5, seed=3)], dim=1)
    right = generate(model, None, longer)
    for one in (copy.deepcopy(cache), cache):
        assert torch.equal(generate(model, one, longer), right)


@pytest.mark.parametrize("name", ["Gemma 3", "gpt-oss", "Phi-3, Phi-4"])
@pytest.mark.parametrize("method", ["kivi", "kvsink"])
@torch.no_grad()
def test_a_padded_text_is_read_as_it_is_alone(name, method):
    model = made(name)
    method, padding, tokens = decoders.method_of(method, model, bits=2), [7, 0], tokens_of(2, T)
    mask = (torch.arange(T) >= torch.tensor(padding)[:, None]).long()
    cache = MethodCache(model, method)
    text = generate(model, cache, tokens, attention_mask=mask)
    logits = model(tokens, attention_mask=mask, **{NAME: MethodCache(model, method)}).logits[:, -1]
    for i, n in enumerate(padding):
        by_itself = model(tokens[i:i + 1, n:], **{NAME: MethodCache(model, method)}).logits[0, -1]
        torch.testing.assert_close(logits[i], by_itself, atol=1e-3, rtol=1e-3)
        alone = MethodCache(model, method)
        assert torch.equal(generate(model, alone, tokens[i:i + 1, n:])[0], text[i, n:])
        assert alone.texts[0].part_bytes() == cache.texts[i].part_bytes() and alone.texts[0].part_bytes()["coded"]
        for rows, same in zip(cache.texts[i].layers, alone.texts[0].layers):
            torch.testing.assert_close(rows.keys.read(), same.keys.read(), atol=1e-2, rtol=1e-2)


def test_two_threads_read_with_one_model_and_a_cache_each():
    model = made("Llama 2, 3")
    texts, found = [tokens_of(1, T, seed) for seed in (1, 2)], {}
    caches = [MethodCache(model, decoders.method_of("kvsink", model, 2)) for _ in texts]
    turn = threading.Barrier(2)
    for layer in model.model.layers:  # each waits for the other in the middle of every layer
        layer.mlp.register_forward_pre_hook(lambda *given: (turn.wait(timeout=20), None)[1])

    def read(i):
        with torch.no_grad():
            found[i] = model(texts[i], **{NAME: caches[i]}).logits
    threads = [threading.Thread(target=read, args=(i,)) for i in (0, 1)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    for layer in model.model.layers:
        layer.mlp._forward_pre_hooks.clear()
    for i, cache in enumerate(caches):
        cache.reset()
        with torch.no_grad():
            assert torch.equal(found[i], model(texts[i], **{NAME: cache}).logits)


# Perplexity

@pytest.fixture(scope="module")
def tales():
    """The embedded model: tinykv's, with its tokenizer, and transformers'."""
    model = transformers.AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32)
    return *hf.load(EMBEDDED), Decoder(model)


@pytest.mark.parametrize("protocol", ["paper", "stream"])
@pytest.mark.parametrize("name, settings", [
    ("fp16", {}), ("kivi", {"group_size": 8, "recent": 16}), ("ott", {"group_size": 8, "recent": 16}),
    ("skvq", {"rope": "post"}), ("kvsink", {"scheme": "token-static", "rope": "post"})])
def test_the_embedded_model_has_the_perplexity_that_it_has_here(name, settings, protocol, tales):
    """Calibrated there as well. In fp32, keys are rounded once there and twice here, so a code may differ."""
    own, tokenizer, decoder = tales
    windows, found = load_windows("tales", tokenizer, 128, 2), []
    for model in (own, decoder):
        exact = measure(model, METHODS["fp16"](model.config), windows, protocol)
        method = METHODS[name](model.config, **settings)
        if method.needs_calibration:
            calibrate(model, method, load_windows("tales", tokenizer, 128, 4, "calibration").tokens)
        found.append(measure(model, method, windows, protocol, batch=2, fp16=exact))
    here, there = found
    assert there.nll == pytest.approx(here.nll, abs=2e-3 if name == "fp16" else 0.04)
    assert (there.bits, there.cache_bytes, there.targets) == (here.bits, here.cache_bytes, here.targets)


@pytest.mark.parametrize("name", ["Gemma 3", "Granite", "Phi-2", "Llama 4", "Qwen3.5"])
def test_a_loss_is_that_of_the_models_own_logits(name):
    """Where a head has a bias (Phi-2) or a scale (Granite), a layer a window or a state; and codes cost something."""
    decoder = Decoder(made(name))
    windows = load_windows(str(Path(__file__)), hf.load_tokenizer(EMBEDDED, hf.load_config(EMBEDDED)), 64, 2)
    windows.tokens %= decoder.config.vocab_size
    exact = measure(decoder, METHODS["fp16"](decoder.config), windows, "stream", batch=2)
    with torch.no_grad():
        logits = decoder.theirs(windows.tokens).logits[:, :-1].transpose(1, 2)  # (W, vocab, T - 1)
    own = torch.nn.functional.cross_entropy(logits, windows.tokens[:, 1:], reduction="none").mean(1)  # (W)
    assert exact.nll == pytest.approx(own.tolist(), abs=2e-3)
    coded = measure(decoder, decoders.method_of("kivi", decoder.theirs, 2), windows, "stream", batch=2, fp16=exact)
    assert sum(coded.kl) > 0.01 and coded.bits[0] < 12


def save(model, folder):
    """A folder of a model, with the embedded model's tokenizer."""
    model.save_pretrained(folder)
    for name in ("tokenizer.model", "tokenizer_config.json"):
        (folder / name).write_bytes((EMBEDDED / name).read_bytes())
    return str(folder)


def test_the_command_runs_what_tinykv_lacks_through_transformers(tmp_path, monkeypatch):
    monkeypatch.setitem(decoders.SMALL, "vocab_size", hf.load_config(EMBEDDED).vocab_size)
    folder = save(made("Gemma 3"), tmp_path / "gemma")
    short = {"model": folder, "windows": 2, "context": 64, "protocol": "stream"}
    table = eval_ppl.compare("all", **short, group_size=8, recent=8)
    said = str(table)
    assert f"through transformers {transformers.__version__}: gemma3_text, 3 layers with 2 KV heads of 16" in said
    assert {row["method"] for row in table} == {"fp16", "kivi", "ott", "oscar"}
    assert "kvquant is left out" in said and "keys before RoPE" in said
    assert [row["fault"] for row in table] == [None] * 4 and table[1]["bits_true"] < 12
    for refused, given in (("keys before RoPE", {}), ("--attention", {"attention": "plain"}),
                           ("--calibration", {"calibration": str(tmp_path)}), ("tinykv implements llama", {
                               "through": "tinykv"})):
        with pytest.raises(UserError, match=refused) as error:
            eval_ppl.compare("kvquant", **short, **given)
        assert "\n" not in str(error.value)


# Refusals

def refuse_kvquant(tmp_path):
    model = made("Gemma 3")
    MethodCache(model, METHODS["kvquant"](config_of(model)))


def press(tmp_path):
    """As kvpress does it after a layer."""
    model = made("Gemma 3")
    return MethodCache(model, decoders.method_of("fp16", model)).layers[0].keys


def read_a_copy(tmp_path):
    model = made("Gemma 3")
    cache = MethodCache(model, decoders.method_of("fp16", model))
    model(tokens_of(1, 4), **{NAME: cache})
    copy.deepcopy(model)(tokens_of(1, 4), **{NAME: cache})


def read_with_another(tmp_path):
    decoder = Decoder(made("Gemma 3"))
    Decoder(decoder.theirs)(tokens_of(1, 4), KVCache(decoder, decoders.method_of("fp16", decoder.theirs)))


@pytest.mark.parametrize("word, use", [
    ("keys before RoPE, which are not to be had .*gemma3_text.*; what works: fp16, kivi", refuse_kvquant),
    ("kvpress", press),
    ("model that it was made for", read_a_copy),
    ("made for another model", read_with_another),
    ("caps its logits", lambda tmp_path: Decoder(made("Gemma 2"))),
    ("several shapes", lambda tmp_path: config_of(made("Gemma 4"))),
    ("hidden states are not found", lambda tmp_path: MethodCache(
        made("Qwen3.5"), decoders.method_of("kvsink", made("Qwen3.5"))))])
def test_what_it_cannot_do_is_refused_in_one_line(word, use, tmp_path):
    with pytest.raises(UserError, match=word) as error:
        use(tmp_path)
    assert "\n" not in str(error.value)
