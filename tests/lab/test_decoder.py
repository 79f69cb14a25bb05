"""Any decoder of transformers: its cache, and its perplexity, transformers.py and decoder.py of tinykv/lab/hf/."""
import copy
from pathlib import Path

import pytest
import torch
from cases import tokens_of

import eval_ppl
from tinykv import UserError, hf
from tinykv.cache import KVCache
from tinykv.calibrate import calibrate
from tinykv.evaluate import FAR, measure
from tinykv.hf import EMBEDDED
from tinykv.lab.data import load_windows
from tinykv.methods.registry import METHODS

transformers = pytest.importorskip("transformers")
decoders = pytest.importorskip("decoders")  # docs/programs/decoders.py
from tinykv.lab.hf.decoder import NAME, Decoder, config_of  # noqa: E402
from tinykv.lab.hf.transformers import MethodCache  # noqa: E402

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
    """And the page says so, of every release that it names."""
    model, words = made(name), decoders.answers(name)
    assert decoders.line([name, *words]) in (Path(__file__).parents[2] / "docs/huggingface.md").read_text()
    if words[1] == "no":
        return
    cache = MethodCache(model, decoders.method_of("fp16", model))
    assert torch.equal(generate(model, cache), generate(model, None))
    assert cache.get_seq_length() == T + 29 and cache.is_initialized
    assert words[1] == "yes" and decoders.error(model, MethodCache(model, decoders.method_of("kivi", model, 2))) > 0.005


@pytest.mark.parametrize("read", [Decoder, lambda model: MethodCache(model, METHODS["fp16"](config_of(model)))])
def test_a_model_without_one_of_its_layers_is_refused(read):
    model = made("Llama 2, 3")
    del model.model.layers[-1]
    with pytest.raises(UserError, match="has not the 3 layers that its config says"):
        read(model)


@pytest.mark.parametrize("name", ["Gemma 3", "Llama 4"])
def test_beams_copies_and_a_reset_go_on_beyond_the_window(name):
    model = made(name)
    beams = {"num_beams": 3, "num_return_sequences": 2}
    cache = MethodCache(model, decoders.method_of("fp16", model))
    assert torch.equal(generate(model, cache, **beams), generate(model, None, **beams))
    cache.reset()
    text = generate(model, cache)
    assert torch.equal(text, generate(model, None))
    longer = torch.cat([text, tokens_of(2, 5, seed=3)], dim=1)
    right = generate(model, None, longer)
    for one in (copy.deepcopy(cache), cache):
        assert torch.equal(generate(model, one, longer), right)


@pytest.mark.parametrize("window", [1, 24])
@pytest.mark.parametrize("name", ["Gemma 3", "gpt-oss", "Mistral"])
def test_codes_that_no_later_query_sees_are_neither_read_nor_held_nor_counted(name, window, monkeypatch):
    """Also by a window of 1, of which transformers' own cache holds all."""
    config, given = decoders.ZOO[name]
    monkeypatch.setitem(decoders.ZOO, name, (config, {**given, "sliding_window": window}))
    model, T = made(name), decoders.CUTS[-1]
    for method in ("kivi", "kvsink"):
        method = decoders.method_of(method, model)
        cache = MethodCache(model, method)
        decoders.error(model, cache)
        cache.reset()
        assert decoders.error(model, cache) < 0.05
        text = cache.texts[0]
        for layer, sees in zip(text.layers, cache.windows):
            G = layer.keys.codec.tokens_per_group
            gone = (T + 1 - window) // G * G if sees else 0
            assert (layer.keys.codes.gone if layer.keys.codes else 0) == min(gone, layer.keys.n_coded)
            codes = layer.keys.codes.codes if sees else layer.keys.codes
            assert codes.packed.shape[2] == layer.keys.n_coded - min(gone, layer.keys.n_coded)
        assert {bool(sees) for sees in cache.windows} == {True, name == "Mistral"}
        full = [layer for layer, sees in zip(text.layers, cache.windows) if not sees]
        assert all(rows.tensors()["coded"][0].nbytes > 20 * 16 for layer in full for rows in (layer.keys, layer.values))


@pytest.mark.parametrize("name, method", [("Gemma 3", "kivi"), ("gpt-oss", "kvsink"), ("Phi-3, Phi-4", "kivi")])
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


def test_a_copy_and_a_file_of_a_model_have_no_cache(tmp_path):
    """Though the model's hooks hold one."""
    model, tokens = made("Gemma 3"), tokens_of(1, 9)
    cache = MethodCache(model, decoders.method_of("kvsink", model, 2))
    torch.save(model, tmp_path / "model.pt")
    for other in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        assert torch.equal(other(tokens).logits, model(tokens).logits)
        with pytest.raises(UserError, match="model that it was made for"):
            other(tokens, **{NAME: cache})
    assert (cache.max_cache_len, cache.max_batch_size, cache.get_max_cache_shape()) == (-1, -1, -1)
    assert not cache.is_initialized and len(cache) == 3


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


@pytest.mark.parametrize("name", ["Gemma 3", "Granite", "Phi-2", "Llama 4", "Gemma 2"])
def test_a_loss_is_that_of_the_models_own_logits(name):
    """Where a head has a bias (Phi-2), a scale (Granite) or a cap (Gemma 2); and codes cost something."""
    decoder = Decoder(made(name))
    windows = load_windows(str(Path(__file__)), hf.load_tokenizer(EMBEDDED, hf.load_config(EMBEDDED)), 64, 2)
    windows.tokens %= decoder.config.vocab_size
    exact = measure(decoder, METHODS["fp16"](decoder.config), windows, "stream", batch=2)
    with torch.no_grad():
        logits = decoder.theirs(windows.tokens).logits[:, :-1].transpose(1, 2)  # (W, vocab, T - 1)
    own = torch.nn.functional.cross_entropy(logits, windows.tokens[:, 1:], reduction="none").mean(1)  # (W)
    assert exact.nll == pytest.approx(own.tolist(), abs=2e-3)
    coded = measure(decoder, decoders.method_of("kivi", decoder.theirs, 2), windows, "stream", batch=2, fp16=exact)
    assert sum(coded.kl) > 0.01 and coded.bits[0] < 12 and exact.bits + exact.bits_far == 4 * [16]
    if name.startswith("Gemma"):  # two sliding layers, of which keys go in groups of 4 tokens, and a full one
        for found, tokens in ((coded.bits, [24, 24, 64, 23, 23, 64]), (coded.bits_far, [24, 24, FAR] * 2)):
            # 10 bits a number with its share of a group's range, 16 of those of 5.5 recent tokens
            bits = [10 * (n - 5.5) + 16 * 5.5 for n in tokens]
            assert found == 2 * [pytest.approx(sum(bits) / sum(tokens), rel=1e-9)]


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


def test_lm_eval_asks_any_decoder(tmp_path, monkeypatch):
    """Log-likelihoods through kivi, of a Gemma 3: those of a forward for each token."""
    pytest.importorskip("lm_eval")
    pytest.importorskip("lm_eval.tasks", exc_type=ImportError)  # its datasets need a huggingface_hub of their own
    from lm_eval.api.instance import Instance

    from tinykv.lab.run.lm_eval import TinyKV
    monkeypatch.setitem(decoders.SMALL, "vocab_size", hf.load_config(EMBEDDED).vocab_size)
    theirs = made("Gemma 3")
    model = TinyKV(model=save(theirs, tmp_path / "gemma"), method="kivi", bits=2, group_size=8, recent=8,
                   protocol="stream")
    context, target = "Anna went to the river, and Ben went to the wood, and then they", " came home."
    (found, _), = model.loglikelihood([Instance("loglikelihood", {}, (context, target), 0)], disable_tqdm=True)
    whole, n = model.tokenizer.encode(context + target, bos=True), len(model.tokenizer.encode(context, bos=True))
    ids, cache = torch.tensor([whole]), MethodCache(theirs, model.method)
    with torch.no_grad():
        logits = torch.cat([theirs(ids[:, i:i + 1], **{NAME: cache}).logits for i in range(len(whole) - 1)], dim=1)
        plain = theirs(ids[:, :-1]).logits
    own, exact = (x[0, n - 1:].log_softmax(-1).gather(1, ids[0, n:, None]).sum().item() for x in (logits, plain))
    assert found == pytest.approx(own, abs=1e-3) and abs(found - exact) > 0.01
    assert model.generate_until([Instance("generate_until", {}, (context, {"max_gen_toks": 4, "until": []}), 0)])


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
    ("keys before RoPE, which cannot be had here .*gemma3_text.*; what works: fp16, kivi", refuse_kvquant),
    ("kvpress", press),
    ("model that it was made for", read_a_copy),
    ("made for another model", read_with_another),
    ("several shapes", lambda tmp_path: config_of(made("Gemma 4"))),
    ("deepseek_v3 has layers with something else .*MLA", lambda tmp_path: config_of(made("DeepSeek-V3"))),
    *((f"{name} has layers with something else than keys and values of their own", lambda tmp_path, zoo=zoo:
       config_of(made(zoo)))
      for name, zoo in (("qwen3_next", "Qwen3-Next"), ("lfm2", "LFM2"), ("qwen3_5_text", "Qwen3.5")))])
def test_what_it_cannot_do_is_refused_in_one_line(word, use, tmp_path):
    with pytest.raises(UserError, match=word) as error:
        use(tmp_path)
    assert "\n" not in str(error.value)
