"""Checkpoint folders: what loads, to the bit and within its memory, and what each fault of a folder is told as."""
import dataclasses
import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tinykv import UserError, hf
from tinykv.data import load_windows
from tinykv.hf.checkpoint import NoInit
from tinykv.hf.config import config_fields, parse_config
from tinykv.model import Llama, LlamaConfig
from tinykv.storage import fingerprint

REFERENCES = Path(__file__).parent / "references"
VARIANTS = sorted(json.loads((REFERENCES / "manifest.json").read_text())["variants"])
PIECES = REFERENCES / "tokenizer_model" / "tokenizer.model"
JSON = REFERENCES / "tokenizer_json" / "tokenizer.json"
KEY = "model.layers.0.self_attn.k_proj.weight"


def tiny(**changes):
    sizes = dict(vocab_size=384, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, head_dim=4, max_position_embeddings=64, bos_token_id=1, eos_token_id=2)
    torch.manual_seed(0)
    return Llama(LlamaConfig(**sizes | changes))


@pytest.fixture
def folder(tmp_path):
    """A whole checkpoint, to be damaged."""
    hf.save(tiny(), PIECES, tmp_path / "model")
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
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def to_shards(folder, count=3, ending="safetensors"):
    """model.safetensors -> shards and their index, whose path is returned."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    stem = {"safetensors": "model", "bin": "pytorch_model"}[ending]
    places = {name: f"{stem}-{i % count + 1:05}-of-{count:05}.{ending}" for i, name in enumerate(sorted(weights))}
    for shard in set(places.values()):
        part = {name: t for name, t in weights.items() if places[name] == shard}
        save_file(part, folder / shard) if ending == "safetensors" else torch.save(part, folder / shard)
    index = folder / f"{stem}.{ending}.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    return index


def to_bin(folder):
    path = folder / "pytorch_model.bin"
    torch.save(load_file(folder / "model.safetensors"), path)
    (folder / "model.safetensors").unlink()
    return path


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
    model = tiny(**changes).to(dtype)
    hf.save(model, PIECES, tmp_path / "new" / "folder")
    again, tokenizer = hf.load(tmp_path / "new" / "folder", dtype=dtype)
    assert same(model, again) and again.config == model.config
    assert fingerprint(again) == fingerprint(model)
    assert torch.equal(again.rope.freq, model.rope.freq)
    assert not any(t.is_meta for t in [*again.parameters(), *again.buffers(), again.rope.freq])
    assert tokenizer.decode(tokenizer.encode("the bell rings")) == "the bell rings"
    assert sorted(p.name for p in (tmp_path / "new" / "folder").iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.model", "tokenizer_config.json"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_config_of_transformers_survives_a_round_trip(variant):
    config = hf.load_config(REFERENCES / variant)
    assert parse_config(config_fields(config, torch.float32), "again") == config


@pytest.mark.parametrize("layout", ["shards", "bin", "bin shards"])
def test_every_layout_loads_the_same_weights(folder, layout):
    model = hf.load_model(folder)
    to_bin(folder) if layout == "bin" else to_shards(folder, ending="bin" if layout == "bin shards" else "safetensors")
    assert same(model, hf.load_model(folder))


def test_safetensors_come_before_bin(folder):
    (folder / "pytorch_model.bin").write_bytes(b"not looked at")
    (folder / "model.safetensors.index.json").write_text("not looked at")
    assert same(hf.load_model(folder), tiny())


def test_a_loaded_model_does_not_hang_on_its_file(folder):
    model = hf.load_model(folder)
    path = folder / "model.safetensors"
    with open(path, "r+b") as file:  # in place, as a new download would
        file.write(b"\0" * path.stat().st_size)
    assert same(model, tiny())


def test_a_loaded_model_keeps_nothing_for_its_weights_gradients(folder):
    """Calibration differentiates through it; with weights that want gradients too it would hold half as much again."""
    model = hf.load_model(folder)
    assert not any(p.requires_grad for p in model.parameters())
    assert not model(torch.tensor([[1, 2]])).requires_grad


def test_what_old_checkpoints_carry_along_is_harmless(folder):
    model = tiny(tie_word_embeddings=True)
    hf.save(model, PIECES, folder)
    def carry(weights):
        weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    edit_weights(folder, carry)
    assert same(hf.load_model(folder), model)


def test_two_different_tensors_for_tied_ends_are_refused(folder):
    edit_json(folder / "config.json", tie_word_embeddings=True)
    text = told(hf.load_model, folder)
    assert "tie_word_embeddings" in text and "lm_head.weight" in text and "model.embed_tokens.weight" in text


def test_the_fingerprint_is_pinned_and_sees_every_change():
    def filled(**changes):
        model = tiny(**changes)
        for i, p in enumerate(model.parameters()):
            p.data = (torch.arange(p.numel()).view(p.shape) + i) / 1024
        return model
    first = fingerprint(filled())
    assert first == "6e258958f0c1bd5e"
    assert fingerprint(filled(rope_theta=10000)) == first  # the same number as 10000.0
    other = filled()
    other.model["norm"].weight.data[3] += 2 ** -12
    rest = [other, filled(rope_theta=10001.0), filled(sliding_window=9), filled().to(torch.bfloat16)]
    assert len({first, *map(fingerprint, rest)}) == 5


# Saving

def test_a_save_that_is_cut_short_leaves_the_old_files(folder, monkeypatch):
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    real = Path.chmod

    def half(path, mode):  # the last step before a file takes its place
        if path.read_bytes()[8:9] == b"{":  # the weights
            os.truncate(path, 100)
            raise KeyboardInterrupt
        real(path, mode)
    monkeypatch.setattr(Path, "chmod", half)
    other = tiny()
    other.lm_head.weight.data += 1
    with pytest.raises(KeyboardInterrupt):
        hf.save(other, PIECES, folder)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


def test_a_save_that_fails_at_the_last_moment_leaves_the_old_files_and_says_so(folder, monkeypatch):
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    def full(source, target):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(os, "replace", full)
    text = told(hf.save, tiny(), PIECES, folder)
    assert "cannot be written (No space left on device)" in text
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


def test_a_model_saves_over_the_folder_that_it_came_from(folder):
    model, _ = hf.load(folder)
    hf.save(model, folder / "tokenizer.model", folder)
    assert same(hf.load_model(folder), model)
    modes = {p.stat().st_mode for p in folder.iterdir()}
    assert len(modes) == 1  # whoever may read one may read all


@pytest.mark.parametrize("changes, word", [
    ({"sliding_window": 7}, "sliding_window"), ({"vocab_size": 300}, "vocabulary"), ({"model_type": "gpt2"}, "gpt2")])
def test_what_would_not_load_again_is_not_written(tmp_path, changes, word):
    assert word in told(hf.save, tiny(**changes), PIECES, tmp_path / "new")
    assert not (tmp_path / "new").exists()


# config.json

def test_absent_fields_have_the_values_of_transformers(folder):
    raw = dict(model_type="llama", vocab_size=9, hidden_size=8, intermediate_size=4, num_hidden_layers=1,
               num_attention_heads=2)
    assert parse_config(raw, "here") == LlamaConfig(
        vocab_size=9, hidden_size=8, intermediate_size=4, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=4, max_position_embeddings=2048, rms_norm_eps=1e-6, rope_theta=10000.0)
    nulls = dict.fromkeys(["num_key_value_heads", "head_dim", "rope_scaling", "sliding_window", "eos_token_id"])
    assert parse_config(raw | nulls, "here") == parse_config(raw, "here")
    mistral = raw | {"model_type": "mistral", "num_attention_heads": 16, "hidden_size": 32}
    config = parse_config(mistral, "here")
    assert (config.num_key_value_heads, config.sliding_window, config.max_position_embeddings) == (8, 4096, 131072)
    config = parse_config(mistral | nulls, "here")  # null is not absent
    assert (config.num_key_value_heads, config.sliding_window) == (16, None)


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize("fields, theta, scaling", [
    ({"rope_theta": 5000, "rope_scaling": None}, 5000.0, None),
    ({"rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 2}}, 5000.0,
     {"rope_type": "linear", "factor": 2.0}),
    ({"rope_scaling": {"rope_type": "linear", "type": "linear", "factor": 2.0}}, 10000.0,
     {"rope_type": "linear", "factor": 2.0}),
    ({"rope_theta": 5000.0, "rope_scaling": {"rope_type": "llama3"} | LLAMA3}, 5000.0,
     {"rope_type": "llama3"} | LLAMA3),
    ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 7.0, "partial_rotary_factor": 1.0} | LLAMA3}, 7.0,
     {"rope_type": "llama3"} | LLAMA3),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}, "rope_theta": 5000.0}, 7.0, None),
    ({"rope_parameters": {"rope_type": "llama3"} | LLAMA3 | {"original_max_position_embeddings": None}}, 10000.0,
     {"rope_type": "llama3"} | LLAMA3 | {"original_max_position_embeddings": 64})])
def test_both_spellings_of_rope(folder, fields, theta, scaling):
    edit_json(folder / "config.json", rope_theta=..., rope_scaling=...)
    edit_json(folder / "config.json", **fields)
    config = hf.load_config(folder)
    assert (config.rope_theta, config.rope_scaling) == (theta, scaling)


@pytest.mark.parametrize("fields, words", [
    ({"model_type": "qwen2"}, ["model_type", '"qwen2"', "llama", "mistral"]),
    ({"model_type": ...}, ["model_type", "null"]),
    ({"architectures": ["LlamaForSequenceClassification"]}, ["architectures", "LlamaForSequenceClassification"]),
    ({"hidden_act": "gelu"}, ["hidden_act", '"gelu"', '"silu"']),
    ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, ["quantization_config", "gptq"]),
    ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
    ({"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types", "sliding_attention"]),
    ({"auto_map": {"AutoModel": "own.Model"}}, ["auto_map", "own.Model"]),
    ({"sliding_window": 512}, ["sliding_window", "512", "llama"]),
    ({"model_type": "mistral", "architectures": ..., "attention_bias": True}, ["attention_bias", "mistral"]),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["rope_type", '"dynamic"', "linear", "llama3"]),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, ["rope_type", '"yarn"']),
    ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1] * 99}}, ["rope_type", '"longrope"']),
    ({"rope_scaling": "linear"}, ["RoPE", '"linear"']),
    ({"rope_scaling": {"type": "linear"}}, ["factor"]),
    ({"rope_scaling": {"type": "linear", "factor": -2}}, ["factor", "-2", "above 0"]),
    ({"rope_scaling": {"type": "linear", "factor": 2.0, "attention_factor": 1.5}}, ["attention_factor", "1.5"]),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, ["partial_rotary_factor", "0.5"]),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["full_attention"]),
    ({"rope_scaling": {"rope_type": "llama3"} | LLAMA3 | {"low_freq_factor": 4.0}}, ["high_freq_factor", "4.0"]),
    ({"rope_scaling": {"rope_type": "llama3"} | LLAMA3 | {"low_freq_factor": None}}, ["low_freq_factor"]),
    ({"rope_theta": 0}, ["rope_theta", "0"]),
    ({"rms_norm_eps": float("nan")}, ["rms_norm_eps", "NaN"]),
    ({"rms_norm_eps": "1e-5"}, ["rms_norm_eps", '"1e-5"']),
    ({"vocab_size": ...}, ["vocab_size"]),
    ({"hidden_size": "16"}, ["hidden_size", '"16"']),
    ({"num_hidden_layers": 0}, ["num_hidden_layers", "0"]),
    ({"num_hidden_layers": True}, ["num_hidden_layers", "true"]),
    ({"num_hidden_layers": 2.0}, ["num_hidden_layers", "2.0"]),
    ({"num_attention_heads": 3, "head_dim": None}, ["hidden_size 16", "num_attention_heads 3", "head_dim"]),
    ({"num_key_value_heads": 3}, ["num_attention_heads 4", "num_key_value_heads 3"]),
    ({"head_dim": 5}, ["head_dim", "5", "even"]),
    ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings", '"yes"']),
    ({"bos_token_id": 384}, ["bos_token_id", "384", "383"]),
    ({"eos_token_id": [2, -1]}, ["eos_token_id", "-1"])])
def test_a_config_that_the_model_does_not_implement_is_refused_by_name(folder, fields, words):
    edit_json(folder / "config.json", **fields)
    text = told(hf.load, folder)
    assert all(word in text for word in ["config.json", *words]), text


@pytest.mark.parametrize("content, word", [
    (b"{", "not JSON"), (b"[1, 2]", "[1, 2]"), (b"\xff\xfe", "not JSON"), (b"", "not JSON"),
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "git lfs pull")])
def test_a_malformed_config_is_told(folder, content, word):
    (folder / "config.json").write_bytes(content)
    text = told(hf.load, folder)
    assert word in text and "config.json" in text


# The folder

def test_a_name_of_the_hub_is_told_how_to_download():
    text = told(hf.load, "some-people/a-model-7b.v1")
    assert "hf download some-people/a-model-7b.v1 --local-dir a-model-7b.v1" in text


@pytest.mark.parametrize("name", ["/nowhere/at/all", "./no/model", "nowhere"])
def test_a_missing_folder_is_told(name):
    text = told(hf.load, name)
    assert f"no folder {name}" in text and "hf download" not in text


def test_a_file_for_a_folder_is_told(folder):
    assert "is a file" in told(hf.load, folder / "config.json")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_told(folder, name):
    (folder / name).unlink()
    text = told(hf.load, folder)
    assert name in text and str(folder) in text


# The weights

def test_every_missing_extra_and_misshapen_tensor_is_named_at_once(folder):
    def spoil(weights):
        del weights["lm_head.weight"]
        weights["score.weight"] = torch.zeros(2)
        weights[KEY] = torch.zeros(16, 8)
        weights["model.norm.weight"] = torch.zeros(16, dtype=torch.int8)
    edit_weights(folder, spoil)
    text = told(hf.load, folder)
    for word in ("missing: lm_head.weight", "unexpected: score.weight", f"{KEY} (16, 8) instead of (8, 16)",
                 "model.norm.weight I8"):
        assert word in text


def test_a_long_list_of_tensors_is_shortened(folder):
    edit_json(folder / "config.json", num_hidden_layers=12)
    text = told(hf.load, folder)
    assert "model.layers.2.input_layernorm.weight" in text or "model.layers.2." in text
    assert "and 82 more" in text  # nine weights in each of ten layers, less the eight named


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("ending", ["safetensors", "bin"])
def test_weights_that_are_not_finite_are_named(folder, value, ending):
    def spoil(weights):
        weights[KEY][3, 5] = value
        weights["model.norm.weight"][0] = value
    edit_weights(folder, spoil)
    if ending == "bin":
        to_bin(folder)
    text = told(hf.load, folder)
    assert KEY in text and "model.norm.weight" in text and "lm_head" not in text


def test_weights_too_large_for_half_precision_are_told(folder):
    edit_weights(folder, lambda weights: weights[KEY].fill_(1e5))
    text = told(hf.load_model, folder, "cpu", torch.float16)
    assert KEY in text and "float16" in text
    hf.load_model(folder, dtype=torch.bfloat16)


def header(path):
    """(the header of a safetensors file, the bytes after it)"""
    content = path.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8:8 + size]), content[8 + size:]


def lie(path, name, **fields):
    """Rewrite what the header says of one tensor."""
    claims, data = header(path)
    claims[name] |= fields
    text = json.dumps(claims).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


DAMAGE = {
    "empty": lambda p: p.write_bytes(b""),
    "a few bytes": lambda p: p.write_bytes(b"\x01\x00"),
    "truncated in the header": lambda p: p.write_bytes(p.read_bytes()[:50]),
    "truncated in the data": lambda p: p.write_bytes(p.read_bytes()[:-100]),
    "longer than it says": lambda p: p.write_bytes(p.read_bytes() + b"\0" * 8),
    "a header longer than the file": lambda p: p.write_bytes(struct.pack("<Q", 2 ** 40) + p.read_bytes()[8:]),
    "a header of 2 ** 64 - 1 bytes": lambda p: p.write_bytes(b"\xff" * 8 + p.read_bytes()[8:]),
    "a header that is not JSON": lambda p: p.write_bytes(p.read_bytes().replace(b'{"', b'["', 1)),
    "offsets beyond the file": lambda p: lie(p, KEY, data_offsets=[0, 10 ** 9]),
    "offsets backwards": lambda p: lie(p, KEY, data_offsets=[512, 0]),
    "a shape larger than its bytes": lambda p: lie(p, KEY, shape=[800, 16]),
    "a dtype larger than its bytes": lambda p: lie(p, KEY, dtype="F64"),
    "a dtype that does not exist": lambda p: lie(p, KEY, dtype="F33"),
    "a web page": lambda p: p.write_bytes(b"<!DOCTYPE html><html>log in first</html>"),
}


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_broken_safetensors_file_is_named(folder, damage, sharded):
    path = folder / "model.safetensors"
    if sharded:
        index = to_shards(folder)
        path = folder / json.loads(index.read_text())["weight_map"][KEY]
    DAMAGE[damage](path)
    text = told(hf.load, folder)
    assert str(path) in text and "not a whole safetensors file" in text and "download it again" in text


@pytest.mark.parametrize("damage", [d for d in DAMAGE if d in ("empty", "truncated in the data", "a web page")])
def test_a_broken_bin_file_is_named(folder, damage):
    path = to_bin(folder)
    DAMAGE[damage](path)
    assert str(path) in told(hf.load, folder)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "tokenizer.model"])
def test_a_git_lfs_pointer_is_recognised(folder, name):
    if name == "pytorch_model.bin":
        to_bin(folder)
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")
    text = told(hf.load, folder)
    assert name in text and "git lfs pull" in text


class Harm:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_bin_with_code_in_it_is_refused_and_not_run(folder, tmp_path, zipped):
    path, trace = to_bin(folder), tmp_path / "it ran"
    if zipped:
        torch.save({"model.norm.weight": Harm(trace)}, path)
    else:
        path.write_bytes(pickle.dumps({"model.norm.weight": Harm(trace)}))
    text = told(hf.load, folder)
    assert str(path) in text and not trace.exists()
    assert not zipped or "possibly code" in text


@pytest.mark.parametrize("content", [[torch.zeros(2)], {"model.norm.weight": 3}, {7: torch.zeros(2)}])
def test_a_bin_of_something_else_is_told(folder, content):
    path = to_bin(folder)
    torch.save(content, path)
    text = told(hf.load, folder)
    assert str(path) in text and "dictionary of tensors" in text


@pytest.mark.parametrize("ending", ["safetensors", "bin"])
def test_absent_shards_are_named(folder, ending):
    index = to_shards(folder, ending=ending)
    gone = sorted(set(json.loads(index.read_text())["weight_map"].values()))[1:]
    for shard in gone:
        (folder / shard).unlink()
    text = told(hf.load, folder)
    assert index.name in text and all(shard in text for shard in gone)


@pytest.mark.parametrize("ending", ["safetensors", "bin"])
def test_an_index_that_names_tensors_its_shards_do_not_hold_is_told(folder, ending):
    index = to_shards(folder, ending=ending)
    places = json.loads(index.read_text())["weight_map"]
    there = places[KEY]
    other = next(shard for shard in places.values() if shard != there)
    index.write_text(json.dumps({"weight_map": places | {KEY: other, "made.up": there}}))
    text = told(hf.load, folder)
    assert f"{KEY} in {other}" in text and f"made.up in {there}" in text and index.name in text


@pytest.mark.parametrize("places", [
    ..., {}, [], {"a": 3}, {"a": "../model-00001-of-00003.safetensors"}, {"a": "pytorch_model.bin"}])
def test_a_malformed_index_is_told(folder, places):
    index = to_shards(folder)
    edit_json(index, weight_map=places)
    text = told(hf.load, folder)
    assert index.name in text and ("weight_map" in text or "shards are .safetensors files" in text)


def test_a_tensor_that_the_index_forgot_is_still_read(folder):
    index = to_shards(folder)
    places = json.loads(index.read_text())["weight_map"]
    del places[KEY]
    index.write_text(json.dumps({"weight_map": places}))
    assert same(hf.load_model(folder), tiny())


@pytest.mark.parametrize("device", ["cuda:77", "nonsense"])
def test_a_device_that_is_not_there_is_told(folder, device):
    text = told(hf.load, folder, device)
    assert repr(device) in text


# Memory and imports, seen from a process of its own

WATCH = """
import json, resource, sys, torch
from tinykv import hf

def imported():
    return [m for m in ("safetensors", "sentencepiece", "tokenizers", "triton", "sympy") if m in sys.modules]

def peak():  # bytes; of this process alone, which ru_maxrss of Linux is not: it begins with the parent's
    try:
        lines = open("/proc/self/status").read().splitlines()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])

found, models = {"imported": [imported()]}, []
for folder in sys.argv[1:]:  # earlier models stay, so that each adds to the peak
    before = peak()
    models.append(hf.load(folder, dtype=torch.float32)[0])
    found[folder.rpartition("/")[2]] = (peak() - before) / sum(p.nbytes for p in models[-1].parameters())
found["imported"].append(imported())
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """What loading a model of 38 million parameters as float32 takes: 150 MB, stored as bfloat16, three ways."""
    config = LlamaConfig(vocab_size=2048, hidden_size=512, intermediate_size=1536, num_hidden_layers=11,
                         num_attention_heads=8, num_key_value_heads=8, head_dim=64, max_position_embeddings=64)
    with torch.device("meta"), NoInit():
        model = Llama(config).to(torch.bfloat16)
    model = model.to_empty(device="cpu")
    for p in model.parameters():
        p.data.fill_(0.25)
    folders = [tmp_path_factory.mktemp("large") / layout for layout in ("whole", "shards", "bin")]
    for folder in folders:
        hf.save(model, PIECES, folder)
    to_shards(folders[1])
    to_bin(folders[2])
    run = subprocess.run([sys.executable, "-c", WATCH, *map(str, folders)], capture_output=True, text=True, check=True,
                         cwd=Path(__file__).parent.parent)
    for folder in folders:
        shutil.rmtree(folder)
    return json.loads(run.stdout)


@pytest.mark.whole  # a model of 150 MB, loaded in a process of its own
@pytest.mark.parametrize("layout", ["whole", "shards", "bin"])
def test_loading_takes_little_more_memory_than_the_model(watched, layout):
    assert 0.9 < watched[layout] < 1.2  # 1.5 with the mapped file beside the model


@pytest.mark.whole
def test_what_is_not_used_is_not_imported(watched):
    assert watched["imported"] == [[], ["safetensors", "sentencepiece"]]


# Tokenizers

def tokenizer_of(tmp_path, *files, settings=None, **config):
    for file in files:
        shutil.copy(file, tmp_path)
    if settings is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return hf.load_tokenizer(tmp_path, tiny(**config).config)


@pytest.mark.parametrize("name", ["tokenizer_json", "tokenizer_model"])
def test_ids_are_those_of_transformers(name):
    want = json.loads((REFERENCES / name / "expected.json").read_text())
    tokenizer = hf.load_tokenizer(REFERENCES / name, tiny().config)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (want["bos_id"], want["eos_id"], want["size"])
    assert tokenizer.add_bos
    for row in want["rows"]:
        assert tokenizer.encode(row["text"]) == row["ids"]
        assert tokenizer.encode(row["text"], bos=True) == row["with_bos"]
        assert tokenizer.decode(row["ids"]) == row["text"]


@pytest.mark.parametrize("name", ["tokenizer_json", "tokenizer_model"])
def test_offsets_cover_the_text_in_order(name):
    tokenizer = hf.load_tokenizer(REFERENCES / name, tiny().config)
    text = "  Zürich's 17 pears 🐝 ring\nthe bell "
    ids, offsets = tokenizer.encode_with_offsets(text)
    assert ids == tokenizer.encode(text) and len(offsets) == len(ids)
    assert sorted(offsets) == offsets and offsets[-1][1] == len(text)
    assert {c for start, end in offsets for c in range(start, end)} == set(range(len(text)))
    at = text.index("bell")
    assert "bell" in "".join(text[s:e] for s, e in offsets if e > at and s < at + 4)
    assert tokenizer.encode_with_offsets("") == ([], [])


@pytest.mark.parametrize("name, special", [
    ("tokenizer_json", "<|end_of_text|>"), ("tokenizer_json", "<|begin_of_text|>"), ("tokenizer_model", "</s>"),
    ("tokenizer_model", "<s>"), ("tokenizer_model", "<unk>"), ("tokenizer_model", "<0x0A>")])
def test_text_that_spells_a_special_token_stays_text(name, special):
    tokenizer = hf.load_tokenizer(REFERENCES / name, tiny().config)
    text = f"the bell {special} rings{special}"
    ids = tokenizer.encode(text)
    assert tokenizer.id_of(special) is not None and tokenizer.id_of(special) not in ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([tokenizer.bos_id, *ids, tokenizer.eos_id]) == text  # the ids themselves leave none


@pytest.mark.parametrize("name", ["tokenizer_json", "tokenizer_model"])
def test_ids_beyond_the_vocabulary_and_tensors_decode(name):
    tokenizer = hf.load_tokenizer(REFERENCES / name, tiny(vocab_size=1000).config)
    ids = tokenizer.encode("two pears")
    assert tokenizer.decode([*ids, 999, tokenizer.vocab_size]) == "two pears"
    assert tokenizer.decode(torch.tensor(ids)) == "two pears"
    assert tokenizer.id_of("no such piece") is None


def test_a_leading_blank_is_kept():
    tokenizer = hf.load_tokenizer(REFERENCES / "tokenizer_model", tiny().config)
    assert tokenizer.decode(tokenizer.encode(" pears")) == " pears"


def test_tokenizer_model_comes_first_if_it_is_sentencepiece(tmp_path):
    assert tokenizer_of(tmp_path, PIECES, JSON).vocab_size == 360


TIKTOKEN = b"IQ== 0\nIg== 1\nIw== 2\n"


def test_a_tiktoken_file_leaves_it_to_tokenizer_json(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(TIKTOKEN)
    assert "tiktoken" in told(tokenizer_of, tmp_path)
    assert tokenizer_of(tmp_path, JSON).vocab_size == 342


@pytest.mark.parametrize("content", [b"", b"\x00" * 64, b"ordinary text, no model\n", PIECES.read_bytes()[:-77]])
def test_a_broken_tokenizer_model_is_told_and_not_passed_over(tmp_path, content):
    (tmp_path / "tokenizer.model").write_bytes(content)
    text = told(tokenizer_of, tmp_path, JSON)
    assert str(tmp_path / "tokenizer.model") in text and "sentencepiece" in text


@pytest.mark.parametrize("content", [b"{", b"{}", b"[]", b"\xff", JSON.read_bytes()[:-50]])
def test_a_broken_tokenizer_json_is_told(tmp_path, content):
    (tmp_path / "tokenizer.json").write_bytes(content)
    text = told(tokenizer_of, tmp_path)
    assert str(tmp_path / "tokenizer.json") in text and "not a tokenizer" in text


def test_a_folder_without_a_tokenizer_is_told(folder):
    (folder / "tokenizer.model").unlink()
    text = told(hf.load, folder)
    assert "no tokenizer" in text and "tokenizer.model" in text and "tokenizer.json" in text


@pytest.mark.parametrize("file, size", [(PIECES, 360), (JSON, 342)])
def test_a_vocabulary_larger_than_the_embedding_is_refused_a_smaller_one_is_not(tmp_path, file, size):
    text = told(lambda: tokenizer_of(tmp_path, file, vocab_size=size - 1))
    assert "wrong tokenizer vocabulary" in text and str(size) in text and str(size - 1) in text
    assert tokenizer_of(tmp_path, file, vocab_size=size).vocab_size == size


def test_a_malformed_tokenizer_config_is_told(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text("{")
    assert "tokenizer_config.json" in told(tokenizer_of, tmp_path, PIECES)


@pytest.mark.parametrize("file, settings, config, want", [
    # sentencepiece: its own ids; the names in tokenizer_config.json before them; config.json for names it lacks
    (PIECES, None, {}, (1, 2, True)),
    (PIECES, {"bos_token": "", "eos_token": None}, {"bos_token_id": 0, "eos_token_id": 1}, (1, 2, True)),
    (PIECES, {"bos_token": {"content": "</s>"}, "eos_token": "<s>"}, {}, (2, 1, True)),
    (PIECES, {"eos_token": "<|end|>"}, {"eos_token_id": [370, 2]}, (1, 370, True)),
    (PIECES, {"eos_token": "<|end|>"}, {"eos_token_id": []}, (1, None, True)),
    (PIECES, {"add_bos_token": False}, {}, (1, 2, False)),
    # tokenizer.json has no ids of its own: names, else config.json; its post-processor says whether BOS is added
    (JSON, {"bos_token": "<|begin_of_text|>"}, {"eos_token_id": [341, 2]}, (340, 341, True)),
    (JSON, None, {"bos_token_id": 340, "eos_token_id": 0}, (340, 0, True)),
    (JSON, None, {"bos_token_id": 5}, (5, 2, False)),
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


# ---- odd files

@pytest.mark.parametrize("odd", [
    lambda t: t.to_sparse(), lambda t: t.to("meta"), lambda t: torch.nested.nested_tensor([t[0], t[1, :2]])])
def test_a_bin_of_tensors_without_plain_numbers_is_told(folder, odd):
    path = to_bin(folder)
    tensors = torch.load(path)
    tensors[KEY] = odd(tensors[KEY])
    torch.save(tensors, path)
    assert str(path) in told(hf.load, folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "model.safetensors.index.json"])
def test_json_that_is_nested_too_deeply_is_told(folder, name):
    if "index" in name:
        (folder / "model.safetensors").unlink()
    (folder / name).write_text('{"a": ' + "[" * 200_000)
    assert name in told(hf.load, folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "tokenizer.model", "model.safetensors"])
def test_a_pipe_in_the_place_of_a_file_is_told(folder, name):
    """And not waited for."""
    (folder / name).unlink()
    os.mkfifo(folder / name)
    assert name in told(hf.load, folder) and (folder / name).is_fifo()


@pytest.mark.parametrize("field", ["vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings"])
@pytest.mark.parametrize("value", [2 ** 63, 10 ** 400])
def test_sizes_beyond_all_models_are_told(folder, field, value):
    edit_json(folder / "config.json", **{field: value})
    assert field in told(hf.load, folder)


def test_more_layers_than_tensors_are_told_at_once(folder, monkeypatch):
    edit_json(folder / "config.json", num_hidden_layers=1000)
    monkeypatch.setattr("tinykv.hf.checkpoint.Llama", None)  # no module is made
    assert "1000 layers" in told(hf.load, folder)


def test_names_of_shards_that_no_file_can_have_are_told(folder):
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {KEY: "x" * 300 + ".safetensors"}}))
    assert "not in" in told(hf.load, folder)
    told(hf.load, "x" * 5000)
    told(hf.load, "nul\0")


@pytest.mark.parametrize("piece", ["\ud800", {"content": "\udfff"}])
def test_a_special_token_that_is_no_text_is_told(folder, piece):
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token": piece}))
    told(hf.load, folder)


def test_a_list_of_one_bos_is_that_one(folder):
    edit_json(folder / "config.json", bos_token_id=[1])
    assert hf.load(folder)[0].config.bos_token_id == 1


def test_layers_of_full_attention_only_are_read(folder):
    edit_json(folder / "config.json", layer_types=["full_attention"] * 2)
    hf.load(folder)
    edit_json(folder / "config.json", layer_types=["full_attention", "sliding_attention"])
    assert "layer_types" in told(hf.load, folder)


def test_a_tokenizer_that_makes_no_tokens_is_told(tmp_path):
    """And not asked for ever."""
    class Mute:
        bos_id = None

        def encode(self, text):
            return []

        def encode_with_offsets(self, text):
            return [], []
    assert "no tokens" in told(lambda: load_windows("tales", Mute(), 16, 1, bos="none"))
