"""config.json of a Hugging Face checkpoint <-> LlamaConfig.

A value that the model does not implement is an error that names it. A field that is absent has the
value that transformers gives it.
"""
import json
import os
import re
from dataclasses import MISSING, asdict, fields
from pathlib import Path

from tinykv import UserError
from tinykv.hf.hub import fetch_model
from tinykv.model import LlamaConfig
from tinykv.storage import read_json

#   model_type: (its class in transformers, values of absent fields, fields that it does not have)
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", {"max_position_embeddings": 2048}, ["sliding_window"]),
    "mistral": ("MistralForCausalLM",
                {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
                ["attention_bias", "mlp_bias"]),
    "qwen2": ("Qwen2ForCausalLM", {"max_position_embeddings": 32768, "num_key_value_heads": 32},
              ["attention_bias", "mlp_bias", "use_sliding_window"]),
    "qwen3": ("Qwen3ForCausalLM", {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
              ["mlp_bias", "use_sliding_window"]),
}
# Fields that change what a model computes, with the values that are implemented. Left out as harmless:
# fields that only training reads, and pretraining_tp, which sums in another order.
IMPLEMENTED = {
    "hidden_act": ["silu"], "partial_rotary_factor": [1], "layer_types": ["full_attention"], "auto_map": [],
    "quantization_config": [], "compression_config": [], "original_max_position_embeddings": []}

ROPE_PARAMETERS = {  # of each rope_type
    "default": [],
    "linear": ["factor"],
    "llama3": ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]}

HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")  # owner/model


def checkpoint_folder(name):
    """A folder's path, or a model's name on the hub, which is downloaded -> the folder as a Path."""
    if os.path.isdir(name):  # unlike Path.is_dir, also for a name that no file can have
        return Path(name)
    if HUB_NAME.fullmatch(str(name)) and not os.path.exists(name):
        return fetch_model(str(name))
    raise UserError(f"{str(name)[:200]} is no folder; give the folder of a checkpoint in Hugging Face format, "
                    "or its name on the hub, owner/model")


# config.json -> LlamaConfig

def load_config(folder):
    """A checkpoint folder -> LlamaConfig."""
    path = checkpoint_folder(folder) / "config.json"
    return parse_config(read_json(path), path)


def parse_config(raw, where):
    """The content of a config.json -> LlamaConfig. where: its path, for errors."""
    # 1. the architecture
    kind = raw.get("model_type")
    if kind not in list(ARCHITECTURES):
        refuse("model_type", kind, where, f"tinykv implements {', '.join(ARCHITECTURES)}")
    _, defaults, lacks = ARCHITECTURES[kind]

    # 2. what the model does not implement
    for name, allowed in {**IMPLEMENTED, **dict.fromkeys(lacks, [])}.items():
        value = raw.get(name)
        for one in value if isinstance(value, list) else [value]:
            if one and one not in allowed:
                refuse(name, value, where, f"tinykv implements {', '.join(map(str, allowed)) or f'{kind} without it'}")

    # 3. every field; one that is absent has its default in transformers, or else in LlamaConfig
    nullable = "num_key_value_heads", "sliding_window"  # null is a value; elsewhere it means absent
    given = {name: value for name, value in raw.items() if value is not None or name in nullable}
    given = {**defaults, **given}
    if kind != "mistral":  # a Qwen has a number there, which use_sliding_window turns off
        given["sliding_window"] = None
    heads = wanted(given, "num_attention_heads", where)
    if given.get("num_key_value_heads") is None:
        given["num_key_value_heads"] = heads
    if "head_dim" not in given:
        given["head_dim"] = wanted(given, "hidden_size", where) // heads
    found = {}
    for field in fields(LlamaConfig):
        if field.default is MISSING:
            found[field.name] = wanted(given, field.name, where)
        elif field.name in given:
            found[field.name] = given[field.name]

    # 4. RoPE
    found["rope_theta"], found["rope_scaling"] = parse_rope(raw, found["max_position_embeddings"], where)
    return LlamaConfig(**found)


def parse_rope(raw, positions, where):
    """(rope_theta, rope_scaling), from fields of these names (old files) or from rope_parameters."""
    # 1. the type of the scaling, and theta, which lies beside the type in the new spelling
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    rope = rope if isinstance(rope, dict) else {"type": rope}
    kind = rope.get("rope_type") or rope.get("type") or "default"  # older files say "type"
    if kind not in list(ROPE_PARAMETERS):
        refuse("rope_type", kind, where, f"tinykv implements {', '.join(ROPE_PARAMETERS)}")
    thetas = {"rope_theta": 10000.0, **raw, **rope}
    theta = float(thetas["rope_theta"])

    # 2. its parameters, and no others
    others = set(rope) - set(ROPE_PARAMETERS[kind]) - {"rope_type", "type", "rope_theta"}
    for name in sorted(others):
        if rope[name] is not None and rope[name] not in IMPLEMENTED.get(name, []):
            refuse(name, rope[name], where, f"rope_type {kind} is implemented without it")
    if kind == "default":
        return theta, None
    if rope.get("original_max_position_embeddings") is None:
        rope = {**rope, "original_max_position_embeddings": positions}
    scaling = {name: wanted(rope, name, where) for name in ROPE_PARAMETERS[kind]}
    return theta, {"rope_type": kind, **scaling}


def wanted(given, name, where):
    """The value of a field; UserError if it is not there."""
    if given.get(name) is None:
        refuse(name, None, where, "the model needs it")
    return given[name]


def refuse(name, value, where, instead):
    raise UserError(f"{where}: {name} is {json.dumps(value)[:80]}; {instead}")


# LlamaConfig -> config.json

def config_fields(config, dtype):
    """LlamaConfig -> the content of config.json, as every version of transformers reads it."""
    found = {name: value for name, value in asdict(config).items() if value is not None}
    if config.model_type == "mistral":
        found["sliding_window"] = config.sliding_window  # null is not the same as absent
    found["hidden_act"] = "silu"
    found["torch_dtype"] = str(dtype).removeprefix("torch.")
    found["architectures"] = [ARCHITECTURES[config.model_type][0]]
    return dict(sorted(found.items()))
