"""Checkpoint folders: what loads, to the bit and within its memory, and what each fault of a folder is told as."""
import dataclasses
import json
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_model import REFERENCES
from test_model import tiny as tiny_llama

from tinykv import UserError, hf
from tinykv.cache import KVCache
from tinykv.hf.config import parse_config
from tinykv.lab.hf.save import config_fields, save
from tinykv.lab.tables import fingerprint
from tinykv.lab.weights import quantize
from tinykv.lab.weights.rtn import RTN
from tinykv.methods.registry import METHODS
from tinykv.model import LlamaConfig

PIECES = REFERENCES / "tokenizer_model" / "tokenizer.model"
JSON = REFERENCES / "tokenizer_json" / "tokenizer.json"
WEIGHTS = "model.safetensors"
KEY = "model.layers.0.self_attn.k_proj.weight"


def tiny(**changes):
    return tiny_llama(**{"vocab_size": 384, "bos_token_id": 1, "eos_token_id": 2, **changes})


@pytest.fixture
def folder(tmp_path):
    """A whole checkpoint, to be damaged."""
    save(tiny(), PIECES, tmp_path / "model")
    return tmp_path / "model"


def told(function, *arguments):
    """The error's text: one line, of a bearable length."""
    with pytest.raises(UserError) as caught:
        function(*arguments)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 1500
    return text


def edit_json(path, **changes):
    """Change fields of a JSON file; one that becomes ... is removed."""
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not ...}))


def edit_weights(folder, change):
    """Pass the weights of a folder through `change`, which alters the dict."""
    weights = load_file(folder / WEIGHTS)
    change(weights)
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


def to_shards(folder, count=3):
    """model.safetensors -> shards."""
    weights, of = load_file(folder / WEIGHTS), {}
    (folder / WEIGHTS).unlink()
    for i in range(count):
        file = f"model-{i + 1:05}-of-{count:05}.safetensors"
        part = {name: weights[name] for name in sorted(weights)[i::count]}
        save_file(part, folder / file)
        of.update(dict.fromkeys(part, file))
    return of


def same(a, b):
    a, b = dict(a.named_parameters()), dict(b.named_parameters())
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


# Round trips

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("changes", [
    {}, {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True, "eos_token_id": [2, 3]},
    {"model_type": "mistral", "sliding_window": 7}, {"model_type": "mistral", "num_key_value_heads": 4},
    {"rope_theta": 500000, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}])
def test_saved_and_loaded_is_the_same_to_the_bit(tmp_path, dtype, changes):
    """Also when it is saved over the folder that it came from, and after its file was overwritten."""
    model, folder = tiny(**changes).to(dtype), tmp_path / "new" / "folder"
    save(model, PIECES, folder)
    save(hf.load_model(folder, dtype=dtype), folder / "tokenizer.model", folder)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", WEIGHTS, "tokenizer.model"]
    with safe_open(folder / WEIGHTS, "pt") as file:
        assert file.metadata() == {"format": "pt"}  # transformers before 5.0 reads no file without
    again, tokenizer = hf.load(folder, dtype=dtype)
    with open(folder / WEIGHTS, "r+b") as file:  # in place, as a new download would
        file.write(b"\0" * (folder / WEIGHTS).stat().st_size)
    assert same(model, again) and again.config == model.config
    assert torch.equal(again.rope.freq, model.rope.freq)
    assert not any(t.is_meta for t in [*again.parameters(), *again.buffers(), again.rope.freq])
    assert not any(p.requires_grad for p in again.parameters())  # calibration would hold half as much again
    assert tokenizer.decode(tokenizer.encode("the bell rings")) == "the bell rings"


def test_of_two_savings_the_index_says_which_is_read(folder):
    """The shards of another model lie in the same folder, as a save over an old one leaves them."""
    index = folder / "model.safetensors.index.json"
    edit_weights(folder, lambda weights: [weight.add_(1) for weight in weights.values()])
    model, whole = hf.load_model(folder), (folder / WEIGHTS).read_bytes()
    to_shards(folder, count=2)
    assert same(hf.load_model(folder), model)  # without an index
    save(tiny(), PIECES, folder)
    of = to_shards(folder)
    assert "twice" in told(hf.load_model, folder)
    for broken in (None, [], {}, {KEY: 5}):
        index.write_text(json.dumps({"weight_map": broken}))
        told(hf.load_model, folder)
    index.write_text(json.dumps({"weight_map": of}))
    assert same(hf.load_model(folder), tiny())
    (folder / WEIGHTS).write_bytes(whole)  # which goes before an index, as transformers reads it
    assert same(hf.load_model(folder), model)


def test_a_tied_head_is_the_embedding_or_refused(folder):
    """transformers leaves two that differ untied."""
    model = tiny(tie_word_embeddings=True)
    save(model, PIECES, folder)
    edit_weights(folder, lambda weights: weights.update({  # as old checkpoints carry them
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2),
        "lm_head.weight": weights["model.embed_tokens.weight"].clone()}))
    assert same(hf.load_model(folder), model)
    edit_weights(folder, lambda weights: weights["lm_head.weight"][3, 5].add_(1e-3))
    text = told(hf.load_model, folder)
    assert "lm_head.weight" in text and "tie_word_embeddings" in text
    edit_json(folder / "config.json", tie_word_embeddings=False)
    found = hf.load_model(folder)
    assert not torch.equal(found.lm_head.weight, found.model["embed_tokens"].weight)


def test_the_fingerprint_is_pinned_and_sees_every_change():
    def filled(**changes):
        model = tiny(**changes)
        for i, p in enumerate(model.parameters()):
            p.data = (torch.arange(p.numel()).view(p.shape) + i) / 1024
        return model
    other = filled()
    other.model["norm"].weight.data[3] += 2 ** -12
    models = [filled(), other, filled(rope_theta=10001.0), filled(sliding_window=9), filled().to(torch.bfloat16),
              quantize(filled(), RTN(3)), quantize(filled(), RTN(4))]
    first, *rest = map(fingerprint, models)
    assert first == fingerprint(filled(rope_theta=10000)) == "6e258958f0c1bd5e"  # the same number as 10000.0
    assert len({first, *rest}) == 7


# config.json

def test_absent_fields_have_the_values_of_transformers():
    raw = dict(model_type="llama", vocab_size=9, hidden_size=8, intermediate_size=4, num_hidden_layers=1,
               num_attention_heads=2)
    assert parse_config(raw, "here") == LlamaConfig(**raw, num_key_value_heads=2, head_dim=4, rope_theta=10000.0,
                                                    max_position_embeddings=2048, rms_norm_eps=1e-6)
    nulls = dict.fromkeys(["num_key_value_heads", "head_dim", "rope_scaling", "sliding_window", "eos_token_id"])
    assert parse_config(raw | nulls, "here") == parse_config(raw, "here")
    mistral = {"model_type": "mistral", "num_attention_heads": 16, "hidden_size": 32}
    qwen3 = {"model_type": "qwen3", "num_attention_heads": 64, "sliding_window": 4096, "max_window_layers": 28}
    for changes, wanted in ((mistral, (8, 2, 4096, 131072)), (qwen3, (32, 128, None, 32768)),
                            (mistral | nulls, (16, 2, None, 131072))):  # null is not absent
        found = parse_config(raw | changes, "here")
        assert (found.num_key_value_heads, found.head_dim, found.sliding_window, found.positions) == wanted


LINEAR = {"rope_type": "linear", "factor": 2.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}


@pytest.mark.parametrize("fields, theta, scaling", [
    ({"rope_theta": 5000, "rope_scaling": None}, 5000.0, None),
    ({"rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 2}}, 5000.0, LINEAR),
    ({"rope_scaling": LINEAR | {"type": "linear"}}, 10000.0, LINEAR),
    ({"rope_theta": 5000.0, "rope_scaling": LLAMA3}, 5000.0, LLAMA3),
    ({"rope_parameters": LLAMA3 | {"rope_theta": 7.0, "partial_rotary_factor": 1.0}}, 7.0, LLAMA3),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}, "rope_theta": 5000.0}, 7.0, None),
    ({"rope_parameters": LLAMA3 | {"original_max_position_embeddings": None}}, 10000.0,
     LLAMA3 | {"original_max_position_embeddings": 64})])
def test_both_spellings_of_rope(folder, fields, theta, scaling):
    edit_json(folder / "config.json", **{"rope_theta": ..., "rope_scaling": ..., **fields})
    config = hf.load_config(folder)
    assert (config.rope_theta, config.rope_scaling) == (theta, scaling)


# Fields of config.json that the model does not implement, and what the line names
CONFIGS = [
    ({"model_type": "gpt2"}, ["model_type", '"gpt2"', "llama", "mistral", "qwen3"]),
    ({"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 9}, ["use_sliding_window", "qwen3"]),
    ({"hidden_act": "gelu"}, ["hidden_act", '"gelu"', "silu"]), ({"is_causal": False}, ["is_causal", "false", "True"]),
    ({"vocab_size": ...}, ["vocab_size"]), ({"num_hidden_layers": True}, ["num_hidden_layers", "true"]),
    ({"num_hidden_layers": 100_000}, ["num_hidden_layers", "1000"]),
    ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, ["quantization_config", "gptq"]),
    ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
    ({"rope_scaling": "linear"}, ["factor"]),
    ({"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types", "sliding_attention"]),
    ({"auto_map": {"AutoModel": "own.Model"}}, ["auto_map", "own.Model"]),
    ({"sliding_window": 512}, ["sliding_window", "512", "llama"]), ({"eos_token_id": [2, -1]}, ["eos_token_id", "-1"]),
    ({"model_type": "mistral", "attention_bias": True}, ["attention_bias", "mistral"]),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["rope_type", '"dynamic"', "linear", "llama3"]),
    ({"rope_scaling": {"type": "linear", "factor": 2.0, "attention_factor": 1.5}}, ["attention_factor", "1.5"]),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, ["partial_rotary_factor", "0.5"]),
    ({"rope_scaling": LLAMA3 | {"low_freq_factor": None}}, ["low_freq_factor"]),
    ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, ["low_freq_factor", "below high_freq_factor"]),
    ({"rms_norm_eps": float("nan")}, ["rms_norm_eps", "NaN"]),
    ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings", '"yes"'])]


# A folder with one fault: what is done to it, and what the line names

def cut(path):
    path.write_bytes(path.read_bytes()[:-9])


def weight(change):
    """The weight KEY becomes another."""
    return lambda folder: edit_weights(folder, lambda weights: weights.update({KEY: change(weights[KEY])}))


def config(fields):
    return lambda folder: edit_json(folder / "config.json", **fields)


def settings(**content):
    return lambda folder: (folder / "tokenizer_config.json").write_text(json.dumps(content))


def tokenizer_file(name, content):
    """The tokenizer's file has this content; another kind, whole, may lie beside it."""
    def spoil(folder):
        shutil.copy(JSON, folder)
        (folder / "tokenizer.model").unlink()
        (folder / name).write_bytes(content)
    return spoil


SECOND = "model-00002-of-00003.safetensors"
PARTS = {"tokenizer.model": PIECES.read_bytes()[:-77], "tokenizer.json": JSON.read_bytes()[:-50]}
FAULTS = [
    # files
    (lambda folder: (folder / "config.json").unlink(), ["config.json"]),
    (lambda folder: (folder / "config.json").write_text("[1]"), ["config.json", "JSON"]),
    (lambda folder: (folder / WEIGHTS).unlink(), [WEIGHTS]),
    (lambda folder: (folder / "tokenizer.model").unlink(), ["tokenizer.model", "tokenizer.json"]),
    # weights
    (lambda folder: cut(folder / WEIGHTS), [WEIGHTS, "download"]),
    (lambda folder: edit_weights(folder, lambda weights: weights.pop(KEY)), [KEY]),
    (weight(lambda w: torch.zeros(16, 8)), [KEY, "[16, 8]", "[8, 16]"]),
    *((weight(lambda w, dtype=dtype: w.to(dtype)), [KEY, str(dtype)])
      for dtype in (torch.int8, torch.float8_e4m3fn)),  # which are not cast
    (lambda folder: [to_shards(folder), (folder / SECOND).unlink()], [KEY]),
    (lambda folder: [to_shards(folder), cut(folder / SECOND)], [SECOND]),
    # config.json
    *((config(fields), ["config.json", *words]) for fields, words in CONFIGS),
    # the tokenizer
    *((settings(**{name: {"content": 5}}), [name, "tokenizer_config.json"]) for name in ("bos_token", "eos_token")),
    *((tokenizer_file(name, part), [f"model/{name}"]) for name, part in PARTS.items())]


@pytest.mark.parametrize("spoil, words", FAULTS, ids=[" ".join(words) for _, words in FAULTS])
def test_a_fault_of_a_folder_is_one_line_that_names_it(folder, spoil, words):
    spoil(folder)
    text = told(hf.load, folder)
    assert all(word in text for word in words), text


@torch.no_grad()
def test_a_model_on_two_devices_computes_the_same(folder):
    """Two names for a CPU: the states go from one to the other, and the cache with them."""
    save(tiny(max_position_embeddings=4096), PIECES, folder)
    one, two = hf.load_model(folder), hf.load_model(folder, "cpu,cpu:0")
    assert [str(device) for device in two.devices] == ["cpu", "cpu:0"] and same(one, two)
    tokens = torch.arange(2, 14).view(2, 6)
    assert torch.equal(two(tokens), one(tokens))
    method = METHODS["pfn"](one.config, preserve=2, scheme="token-dynamic")
    assert torch.equal(one(tokens, KVCache(one, method)), two(tokens, KVCache(two, method)))
    edit_json(folder / "config.json", num_hidden_layers=1)  # a layer too many is told, wherever it would go
    assert "model.layers.1." in told(hf.load, folder, "cpu,cpu:0")


# Tokenizers

def tokenizer_of(tmp_path, *files, settings=None, **config):
    for file in files:
        shutil.copy(file, tmp_path)
    if settings is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return hf.load_tokenizer(tmp_path, tiny(**config).config)


@pytest.fixture(params=["tokenizer_json", "tokenizer_model"])
def tokenizer(request):
    """Of each kind, with `expected`: what transformers makes of it."""
    found = hf.load_tokenizer(REFERENCES / request.param, tiny(vocab_size=1000).config)
    found.expected = json.loads((REFERENCES / request.param / "expected.json").read_text())
    return found


def test_ids_are_those_of_transformers(tokenizer):
    want = tokenizer.expected
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (want["bos_id"], want["eos_id"], want["size"])
    for row in want["rows"]:
        text, ids = row["text"], row["ids"]
        assert (tokenizer.encode(text), tokenizer.encode(text, bos=True)) == (ids, row["with_bos"])
        assert text == tokenizer.decode(ids) == tokenizer.decode(torch.tensor(ids))
        assert tokenizer.decode([*ids, 999, tokenizer.vocab_size]) == text  # no text of ids beyond the vocabulary
    assert tokenizer.id_of("no such piece") is None


def test_offsets_cover_the_text_in_order(tokenizer):
    text = "  Zürich's 17 pears 🐝 ring\nthe bell "
    ids, offsets = tokenizer.encode_with_offsets(text)
    assert ids == tokenizer.encode(text) and tokenizer.decode(ids) == text
    assert len(offsets) == len(ids) and sorted(offsets) == offsets and offsets[-1][1] == len(text)
    assert {c for start, end in offsets for c in range(start, end)} == set(range(len(text)))
    assert tokenizer.encode_with_offsets("") == ([], [])


@pytest.mark.parametrize("tokenizer, special", [
    ("tokenizer_json", "<|end_of_text|>"), ("tokenizer_model", "</s>"), ("tokenizer_model", "<unk>"),
    ("tokenizer_model", "<0x0A>")], indirect=["tokenizer"])
def test_text_that_spells_a_special_token_stays_text(tokenizer, special):
    text = f"the bell {special} rings{special}"
    ids = tokenizer.encode(text)
    assert tokenizer.id_of(special) is not None and tokenizer.id_of(special) not in ids
    assert text == tokenizer.decode(ids) == tokenizer.decode([tokenizer.bos_id, *ids, tokenizer.eos_id])


@pytest.mark.parametrize("file, size", [(PIECES, 360), (JSON, 342)])
def test_a_vocabulary_larger_than_the_embedding_is_refused_a_smaller_one_is_not(tmp_path, file, size):
    text = told(lambda: tokenizer_of(tmp_path, file, vocab_size=size - 1))
    assert "vocabulary" in text and str(size) in text and str(size - 1) in text
    assert tokenizer_of(tmp_path, file, vocab_size=size).vocab_size == size


@pytest.mark.parametrize("file, settings, config, want", [
    # sentencepiece: its own ids; the names in tokenizer_config.json before them; config.json for names it lacks
    (PIECES, None, {}, (1, 2, True)),
    (PIECES, {"bos_token": "", "eos_token": None}, {"bos_token_id": 0, "eos_token_id": 1}, (1, 2, True)),
    (PIECES, {"bos_token": {"content": "</s>"}, "eos_token": "<s>"}, {}, (2, 1, True)),
    (PIECES, {"eos_token": "<|end|>"}, {"eos_token_id": [370, 2]}, (1, 370, True)),
    (PIECES, {"eos_token": "<|end|>"}, {"eos_token_id": []}, (1, None, True)),
    (PIECES, {"add_bos_token": False}, {}, (1, 2, False)),
    (PIECES, {"add_bos_token": None}, {}, (1, 2, True)),  # null is as absent
    # tokenizer.json has no ids of its own: names, else config.json; its post-processor says whether BOS is added
    (JSON, {"bos_token": "<|begin_of_text|>"}, {"eos_token_id": [341, 2]}, (340, 341, True)),
    (JSON, None, {"bos_token_id": 340, "eos_token_id": 0}, (340, 0, True)),
    (JSON, None, {"bos_token_id": 5}, (5, 2, False)),
    (JSON, {"bos_token": None}, {"bos_token_id": 340}, (None, 2, False)),  # as a Qwen has it
    (JSON, {"add_bos_token": True}, {"bos_token_id": None}, (None, 2, False)),
    (JSON, {"bos_token": "<|begin_of_text|>", "add_bos_token": False}, {}, (340, 2, False))])
def test_where_special_ids_come_from(tmp_path, file, settings, config, want):
    tokenizer = tokenizer_of(tmp_path, file, settings=settings, **config)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.add_bos) == want
    begin = [tokenizer.bos_id] if tokenizer.add_bos else []
    assert tokenizer.encode("pears", bos=True) == begin + tokenizer.encode("pears")


def test_the_truncation_and_padding_that_a_file_carries_are_left_out(tmp_path):
    from tokenizers import Tokenizer
    fast = Tokenizer.from_file(str(JSON))
    fast.enable_truncation(4)
    fast.enable_padding(length=64)
    fast.save(str(tmp_path / "tokenizer.json"))
    tokenizer = tokenizer_of(tmp_path)
    text = "the ferryman counts seventeen crates"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_configs_name_every_field_of_the_model():
    """A new field of LlamaConfig must be read and written, too."""
    values = {"vocab_size": 400, "hidden_size": 24, "intermediate_size": 5, "num_hidden_layers": 3,
              "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8, "max_position_embeddings": 77,
              "rms_norm_eps": 0.5, "rope_theta": 9.0, "rope_scaling": {"rope_type": "linear", "factor": 3.0},
              "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "sliding_window": 5,
              "model_type": "mistral", "bos_token_id": 3, "eos_token_id": 4}
    assert set(values) == {field.name for field in dataclasses.fields(LlamaConfig)}
    for changes in ({"sliding_window": None, "model_type": "llama"}, {"attention_bias": False, "mlp_bias": False}):
        config = LlamaConfig(**values | changes)
        assert parse_config(config_fields(config, torch.float32), "again") == config
