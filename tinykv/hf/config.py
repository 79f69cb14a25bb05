"""config.json of a Hugging Face checkpoint -> LlamaConfig.

A value that the model does not implement is an error that names it. A field that is absent has the value that
transformers gives it.
"""
import json
import os
from dataclasses import MISSING, fields
from pathlib import Path

from tinykv import UserError, first_line
from tinykv.model import LlamaConfig

#   model_type: (its class in transformers, values of absent fields, fields that it does not have)
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", {"max_position_embeddings": 2048}, ["sliding_window"]),
    "mistral": ("MistralForCausalLM",
                {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
                ["attention_bias", "mlp_bias", "layer_types"]),
    "qwen2": ("Qwen2ForCausalLM", {"max_position_embeddings": 32768, "num_key_value_heads": 32},
              ["attention_bias", "mlp_bias", "use_sliding_window"]),
    "qwen3": ("Qwen3ForCausalLM", {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
              ["mlp_bias", "use_sliding_window"]),
}
# Fields that change what a model computes, with the values that are implemented. Left out as harmless:
# fields that only training reads, and pretraining_tp, which sums in another order.
ABSENT = [False, {}]  # beside null
IMPLEMENTED = {
    "hidden_act": ["silu"], "is_causal": [True], "partial_rotary_factor": [1], "layer_types": ["full_attention"],
    "auto_map": ABSENT, "quantization_config": ABSENT, "compression_config": ABSENT,
    "original_max_position_embeddings": ABSENT}

ROPE_PARAMETERS = {  # of each rope_type
    "default": [],
    "linear": ["factor"],
    "llama3": ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]}

# What the value of a field of some type has to be: in words, and as a test
KINDS = {
    int: ("a whole number from 1 to 2^24", lambda x: type(x) is int and 1 <= x <= 2 ** 24),
    float: ("a number above 0", lambda x: type(x) in (int, float) and 0 < x < 1e30),  # NaN is not
    bool: ("true or false", lambda x: type(x) is bool)}

class Unsupported(UserError):
    """Of a model that is not implemented here; see `lab/hf/decoder.py`."""


def checkpoint_folder(name):
    """A folder's path -> the folder as a Path."""
    if not isinstance(name, str | os.PathLike):
        raise UserError(f"the folder of a checkpoint is a path; got {name!r}")
    if os.path.isdir(name):  # unlike Path.is_dir, also for a name that no file can have
        return Path(name)
    raise UserError(f"{str(name)[:200]} is no folder; give the folder of a checkpoint in Hugging Face format (of a "
                    ".gguf file: load and save it with transformers); `--model` also takes a name on the hub, "
                    "owner/model")


def read_json(path):
    """The object in a JSON file of the folder, as a dict."""
    check_file(path)
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON ({first_line(error)}); download it again") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no JSON object; download it again")
    return content


def check_file(path, largest=2 ** 30):
    """UserError unless it is a regular file (a pipe may never end) of at most `largest` bytes."""
    if not os.path.isfile(path) or os.path.getsize(path) > largest:
        raise UserError(f"{path} is no file, or none of at most {largest:,} bytes; give a folder as save_pretrained "
                        "writes it")


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
        refuse("model_type", kind, where, f"tinykv implements {', '.join(ARCHITECTURES)}", Unsupported)
    _, defaults, lacks = ARCHITECTURES[kind]

    # 2. what the model does not implement
    for name, allowed in {**IMPLEMENTED, **dict.fromkeys(lacks, ABSENT)}.items():
        value = raw.get(name)
        known = f"{kind} without it" if allowed is ABSENT else ", ".join(map(str, allowed))
        for one in value if isinstance(value, list) else [value]:
            if one is not None and one not in allowed:
                refuse(name, value, where, f"tinykv implements {known}", Unsupported)

    # 3. every field; one that is absent has its default in transformers, or else in LlamaConfig
    nullable = "num_key_value_heads", "sliding_window"  # null is a value; elsewhere it means absent
    given = defaults | {name: value for name, value in raw.items() if value is not None or name in nullable}
    if kind != "mistral":  # a Qwen has a number there, which use_sliding_window turns off
        given["sliding_window"] = None
    heads = checked(given, "num_attention_heads", int, where)
    if given.get("num_key_value_heads") is None:
        given["num_key_value_heads"] = heads
    if "head_dim" not in given:
        given["head_dim"] = checked(given, "hidden_size", int, where) // heads
    config = {"model_type": kind}
    for field in fields(LlamaConfig):
        if field.type in KINDS and (field.name in given or field.default is MISSING):
            config[field.name] = checked(given, field.name, field.type, where)
    if config["num_hidden_layers"] > 1000:  # to make them would take minutes
        refuse("num_hidden_layers", config["num_hidden_layers"], where, "no model has more than 1000")
    if given.get("sliding_window") is not None:
        config["sliding_window"] = checked(given, "sliding_window", int, where)

    # 4. RoPE, and token ids, of which there may be several
    config["rope_theta"], config["rope_scaling"] = parse_rope(raw, config["max_position_embeddings"], where)
    for name in ("bos_token_id", "eos_token_id"):
        value = raw.get(name)
        for one in value if isinstance(value, list) else [value]:
            if one is not None and not (type(one) is int and 0 <= one < config["vocab_size"]):
                refuse(name, value, where, f"token ids go from 0 to vocab_size - 1 = {config['vocab_size'] - 1}")
        config[name] = value
    return LlamaConfig(**config)


def parse_rope(raw, positions, where):
    """(rope_theta, rope_scaling), from fields of these names (old files) or from rope_parameters."""
    # 1. the type of the scaling, and theta, which lies beside the type in the new spelling
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    rope = rope if isinstance(rope, dict) else {"type": rope}
    kind = rope.get("rope_type") or rope.get("type") or "default"  # older files say "type"
    if kind not in list(ROPE_PARAMETERS):
        refuse("rope_type", kind, where, f"tinykv implements {', '.join(ROPE_PARAMETERS)}", Unsupported)
    thetas = {"rope_theta": 10000.0, **raw, **rope}
    theta = float(checked(thetas, "rope_theta", float, where))

    # 2. its parameters, and no others
    others = set(rope) - set(ROPE_PARAMETERS[kind]) - {"rope_type", "type", "rope_theta"}
    for name in sorted(others):
        if rope[name] is not None and rope[name] not in IMPLEMENTED.get(name, []):
            refuse(name, rope[name], where, f"rope_type {kind} is implemented without it", Unsupported)
    if kind == "default":
        return theta, None
    given = {"original_max_position_embeddings": positions} | {k: x for k, x in rope.items() if x is not None}
    scaling = {name: checked(given, name, float, where) for name in ROPE_PARAMETERS[kind]}
    if kind == "llama3" and not scaling["low_freq_factor"] < scaling["high_freq_factor"]:
        refuse("low_freq_factor", scaling["low_freq_factor"], where, "it has to be below high_freq_factor")
    return theta, {"rope_type": kind, **scaling}


def checked(given, name, kind, where):
    """The value of a field; UserError if it is not there, or not of its kind, a key of KINDS."""
    words, fits = KINDS[kind]
    value = given.get(name)
    if not fits(value):
        refuse(name, value, where, f"it has to be {words}")
    return value


def refuse(name, value, where, instead, kind=UserError):
    raise kind(f"{where}: {name} is {json.dumps(value)[:80]}; {instead}")
