"""config.json of a Hugging Face checkpoint <-> LlamaConfig.

A value that the model does not implement is an error that names it. A field that is absent has the
value that transformers gives it.
"""
import os
import re
from dataclasses import asdict
from pathlib import Path

from tinykv import UserError
from tinykv.hf.hub import fetch_model
from tinykv.model import LlamaConfig
from tinykv.storage import read_json, short

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
DEFAULTS = {  # values of fields that are absent, in every architecture
    "num_key_value_heads": None, "sliding_window": None, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "attention_bias": False, "mlp_bias": False}
NULLABLE = ["num_key_value_heads", "sliding_window"]  # null is a value; elsewhere it means absent

# Fields that change what a model computes, with the values that are implemented. Left out as harmless:
# fields that only training reads, and pretraining_tp, which sums in another order.
IMPLEMENTED = {
    "hidden_act": ["silu"], "partial_rotary_factor": [1], "layer_types": ["full_attention"], "auto_map": [],
    "quantization_config": [], "compression_config": [], "original_max_position_embeddings": []}

# What a field has to be: in words, and as a test
SIZE = "a whole number from 1 to 2^24", lambda x: type(x) is int and 1 <= x <= 2 ** 24
LAYERS = "a whole number from 1 to 1024", lambda x: type(x) is int and 1 <= x <= 1024
NUMBER = "a number above 0", lambda x: type(x) in (int, float) and 0 < x < 1e30  # NaN is not
FLAG = "true or false", lambda x: type(x) is bool
WINDOW = f"null or {SIZE[0]}", lambda x: x is None or SIZE[1](x)
FIELDS = {
    "vocab_size": SIZE, "hidden_size": SIZE, "intermediate_size": SIZE, "num_hidden_layers": LAYERS,
    "num_attention_heads": SIZE, "num_key_value_heads": SIZE, "head_dim": SIZE, "max_position_embeddings": SIZE,
    "rms_norm_eps": NUMBER, "tie_word_embeddings": FLAG, "attention_bias": FLAG, "mlp_bias": FLAG,
    "sliding_window": WINDOW}
ROPE_FIELDS = {  # rope_type -> its parameters
    "default": {},
    "linear": {"factor": NUMBER},
    "llama3": {"factor": NUMBER, "low_freq_factor": NUMBER, "high_freq_factor": NUMBER,
               "original_max_position_embeddings": SIZE}}

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
    cls, defaults, lacks = ARCHITECTURES[kind]
    found = raw.get("architectures") or [cls]
    if str(found).lower() != str([cls]).lower():  # LLaMA 1 was LLaMAForCausalLM at first
        refuse("architectures", found, where, f"tinykv implements {cls}")

    # 2. what the model does not implement
    for name, allowed in IMPLEMENTED.items():
        value = raw.get(name)
        for one in value if isinstance(value, list) else [value]:
            if one is not None and one not in allowed:
                refuse(name, value, where, f"tinykv implements {', '.join(map(str, allowed)) or 'models without it'}")
    for name in lacks:
        if raw.get(name):
            refuse(name, raw[name], where, f"tinykv implements {kind} without it")

    # 3. every field, with its default where it is absent
    given = {name: value for name, value in raw.items() if value is not None or name in NULLABLE}
    given = {**DEFAULTS, **defaults, **given}
    if kind != "mistral":  # a Qwen has a number there, which use_sliding_window turns off
        given["sliding_window"] = None
    heads = checked(given, "num_attention_heads", SIZE, where)
    if given["num_key_value_heads"] is None:
        given["num_key_value_heads"] = heads
    if "head_dim" not in given and checked(given, "hidden_size", SIZE, where) % heads == 0:
        given["head_dim"] = given["hidden_size"] // heads
    fields = {name: checked(given, name, what, where) for name, what in FIELDS.items()}

    # 4. do they fit each other?
    if heads % fields["num_key_value_heads"]:
        refuse("num_key_value_heads", fields["num_key_value_heads"], where,
               f"num_attention_heads, {heads}, has to be a multiple of it")
    if fields["head_dim"] % 2:
        refuse("head_dim", fields["head_dim"], where, "rotary embedding turns channels in pairs and needs it even")

    # 5. what is no plain field: RoPE, and token ids, of which there may be several
    theta, scaling = parse_rope(raw, fields["max_position_embeddings"], where)
    for name in ("bos_token_id", "eos_token_id"):
        value = raw.get(name)
        for one in value if isinstance(value, list) else [value]:
            if one is not None and not (type(one) is int and 0 <= one < fields["vocab_size"]):
                refuse(name, value, where, f"token ids go from 0 to vocab_size - 1 = {fields['vocab_size'] - 1}")
    bos = raw.get("bos_token_id")
    if isinstance(bos, list):
        bos = bos[0] if bos else None
    return LlamaConfig(**fields, rope_theta=theta, rope_scaling=scaling, model_type=kind, bos_token_id=bos,
                       eos_token_id=raw.get("eos_token_id"))


def parse_rope(raw, positions, where):
    """(rope_theta, rope_scaling), from fields of these names (old files) or from rope_parameters."""
    # 1. the type of the scaling, and theta, which lies beside the type in the new spelling
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    rope = rope if isinstance(rope, dict) else {"type": rope}
    kind = rope.get("rope_type") or rope.get("type") or "default"  # older files say "type"
    if kind not in list(ROPE_FIELDS):
        refuse("rope_type", kind, where, f"tinykv implements {', '.join(ROPE_FIELDS)}")
    thetas = {"rope_theta": 10000.0, **raw, **rope}
    theta = float(checked(thetas, "rope_theta", NUMBER, where))

    # 2. its parameters, and no others
    others = set(rope) - set(ROPE_FIELDS[kind]) - {"rope_type", "type", "rope_theta"}
    for name in sorted(others):
        if rope[name] is not None and rope[name] not in IMPLEMENTED.get(name, []):
            refuse(name, rope[name], where, f"rope_type {kind} is implemented without it")
    if kind == "default":
        return theta, None
    if rope.get("original_max_position_embeddings") is None:
        rope = {**rope, "original_max_position_embeddings": positions}
    scaling = {name: checked(rope, name, what, where) for name, what in ROPE_FIELDS[kind].items()}
    if kind == "llama3" and scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
        refuse("high_freq_factor", scaling["high_freq_factor"], where, "it has to be above low_freq_factor")
    return theta, {"rope_type": kind, **scaling}


def checked(fields, name, what, where):
    """The value of a field; UserError if it is not what it has to be, or not there."""
    words, fits = what
    value = fields.get(name)
    if not fits(value):
        refuse(name, value, where, f"it has to be {words}")
    return value


def refuse(name, value, where, instead):
    raise UserError(f"{where}: {name} is {short(value)}; {instead}")


# LlamaConfig -> config.json

def config_fields(config, dtype):
    """LlamaConfig -> the content of config.json, as every version of transformers reads it."""
    fields = {name: value for name, value in asdict(config).items() if value is not None}
    if config.model_type == "mistral":
        fields["sliding_window"] = config.sliding_window  # null is not the same as absent
    fields["hidden_act"] = "silu"
    fields["torch_dtype"] = str(dtype).removeprefix("torch.")
    if parse_config(fields, "this model") != config:
        raise UserError(f"this model is no {config.model_type} as transformers has it, and would not load again")
    fields["architectures"] = [ARCHITECTURES[config.model_type][0]]
    return dict(sorted(fields.items()))
