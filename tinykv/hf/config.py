"""config.json of a Hugging Face checkpoint <-> LlamaConfig.

A value that the model does not implement is an error that names it. A field that is absent has the
value that transformers gives it.
"""
import os
import re
from dataclasses import asdict
from pathlib import Path

from tinykv import UserError
from tinykv.model import LlamaConfig
from tinykv.storage import read_json, short

ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}  # model_type -> its class

# Fields that change what a model computes, with the values that the model here implements. Any other
# value is refused; absent and null always pass. Left out as harmless: fields that only training
# reads (attention_dropout, initializer_range), and pretraining_tp, which sums in another order.
IMPLEMENTED = {
    "hidden_act": ("silu",),
    "partial_rotary_factor": (1,),
    "layer_types": (),
    "auto_map": (),
    "quantization_config": (),
    "compression_config": (),
    "original_max_position_embeddings": (),
}
ROPE_PARAMETERS = {  # rope_type -> its parameters
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}

HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")  # owner/model


def checkpoint_folder(folder):
    """The folder as a Path; UserError if there is no such folder."""
    path = Path(folder)
    if os.path.isdir(path):  # unlike Path.is_dir, also for a name that no file can have
        return path
    if os.path.exists(path):
        raise UserError(f"{folder} is a file; give the checkpoint folder that it lies in")
    if HUB_NAME.fullmatch(str(folder)):
        raise UserError(f"no folder {folder}; if it is a name on the Hugging Face hub, download it first with "
                        f"`hf download {folder} --local-dir {path.name}`, then give the folder {path.name}")
    raise UserError(f"no folder {str(folder)[:200]}; give the folder of a checkpoint in Hugging Face format")


# config.json -> LlamaConfig

def load_config(folder):
    """A checkpoint folder -> LlamaConfig."""
    path = checkpoint_folder(folder) / "config.json"
    return parse_config(read_json(path), path)


def parse_config(raw, where):
    """The content of a config.json -> LlamaConfig. where: its path, for errors."""
    # 1. refuse what the model does not implement
    kind = parse_model_type(raw, where)
    mistral = kind == "mistral"
    check_implemented(raw, where)
    for name in ("attention_bias", "mlp_bias") if mistral else ("sliding_window",):
        if raw.get(name):
            raise UserError(f"{where}: {name} is {short(raw[name])}, which a {kind} model does not have; "
                            "set it to null or correct model_type")

    # 2. the sizes
    heads = positive_int(raw, "num_attention_heads", where)
    hidden = positive_int(raw, "hidden_size", where)
    vocab = positive_int(raw, "vocab_size", where)
    positions = positive_int(raw, "max_position_embeddings", where, 131072 if mistral else 2048)
    if raw.get("head_dim") is None and hidden % heads:
        raise UserError(f"{where}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}; "
                        "correct them, or state head_dim")
    kv_heads = parse_kv_heads(raw, heads, mistral, where)
    head_dim = positive_int(raw, "head_dim", where, hidden // heads)
    if head_dim % 2:
        raise UserError(f"{where}: head_dim is {head_dim}; rotary embedding turns channels in pairs and needs it even")

    # 3. positions: RoPE and the sliding window
    theta, scaling = parse_rope(raw, positions, where)
    window = None
    if mistral and raw.get("sliding_window", 4096) is not None:
        window = positive_int(raw, "sliding_window", where, 4096)

    # 4. the other fields
    return LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=positive_int(raw, "intermediate_size", where),
        num_hidden_layers=positive_int(raw, "num_hidden_layers", where, largest=1024),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=positions,
        rms_norm_eps=positive_float(raw, "rms_norm_eps", where, 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=flag(raw, "tie_word_embeddings", where),
        attention_bias=flag(raw, "attention_bias", where),
        mlp_bias=flag(raw, "mlp_bias", where),
        sliding_window=window,
        model_type=kind,
        bos_token_id=first_of(token_id(raw, "bos_token_id", vocab, where)),
        eos_token_id=token_id(raw, "eos_token_id", vocab, where))


def parse_model_type(raw, where):
    """"llama" or "mistral"."""
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise UserError(f"{where}: model_type is {short(kind)}; tinykv implements {' and '.join(ARCHITECTURES)}")
    wanted = [ARCHITECTURES[kind]]
    found = raw.get("architectures") or wanted
    if str(found).lower() != str(wanted).lower():  # LLaMA 1 was LLaMAForCausalLM at first
        raise UserError(f"{where}: architectures is {short(found)}; tinykv implements {short(wanted)}")
    return kind


def parse_kv_heads(raw, heads, mistral, where):
    """The number of KV heads, which divides the number of query heads."""
    default = heads  # null means as many as query heads
    if mistral and "num_key_value_heads" not in raw:
        default = 8  # transformers' MistralConfig has a default of its own for an absent field
    kv_heads = positive_int(raw, "num_key_value_heads", where, default)
    if heads % kv_heads:
        raise UserError(f"{where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}; "
                        "query heads share KV heads evenly")
    return kv_heads


def parse_rope(raw, positions, where):
    """(rope_theta, rope_scaling), from fields of these names (old files) or from rope_parameters."""
    # 1. the type of the scaling
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise UserError(f"{where}: the scaling of RoPE is {short(rope)} instead of an object with a rope_type")
    kind = rope.get("rope_type") or rope.get("type") or "default"  # older files say "type"
    if not isinstance(kind, str) or kind not in ROPE_PARAMETERS:
        raise UserError(f"{where}: rope_type is {short(kind)}; tinykv implements {', '.join(ROPE_PARAMETERS)}")

    # 2. refuse parameters that are not of this type
    parameters = ROPE_PARAMETERS[kind]
    others = {name: value for name, value in rope.items() if name not in parameters}
    check_implemented(others, where)
    for name, value in others.items():
        if name not in ("rope_type", "type", "rope_theta", *IMPLEMENTED) and value is not None:
            raise UserError(f"{where}: {name} of the scaling of RoPE is {short(value)}; rope_type {kind!r} is "
                            "implemented without it")

    # 3. theta: in the new spelling it lies beside the type
    theta_is_in = raw if rope.get("rope_theta") is None else rope
    theta = positive_float(theta_is_in, "rope_theta", where, 10000.0)
    if kind == "default":
        return theta, None

    # 4. the parameters of the scaling
    scaling = {"rope_type": kind, "factor": positive_float(rope, "factor", where)}
    if kind == "llama3":
        low = positive_float(rope, "low_freq_factor", where)
        high = positive_float(rope, "high_freq_factor", where)
        if high <= low:
            raise UserError(f"{where}: high_freq_factor {high} is not above low_freq_factor {low}; correct them")
        scaling["low_freq_factor"] = low
        scaling["high_freq_factor"] = high
        scaling["original_max_position_embeddings"] = positive_int(
            rope, "original_max_position_embeddings", where, positions)
    return theta, scaling


def check_implemented(raw, where):
    """UserError if a field has a value that the model does not implement."""
    for name, values in IMPLEMENTED.items():
        if raw.get(name) is None or raw[name] in values:
            continue
        if name == "layer_types" and set(map(str, raw[name])) <= {"full_attention"}:
            continue
        instead = f"; it implements {' and '.join(map(short, values))}" if values else ""
        raise UserError(f"{where}: {name} is {short(raw[name])}, which tinykv does not implement{instead}; "
                        "take a plain checkpoint of this model")


# One field of the JSON object, checked. A field without a default must be there.

def positive_int(raw, name, where, default=None, largest=2 ** 24):
    value = field(raw, name, where, default)
    if type(value) is not int or not 1 <= value <= largest:
        raise UserError(f"{where}: {name} is {short(value)}; it must be a whole number from 1 to "
                        f"{largest}")
    return value


def positive_float(raw, name, where, default=None):
    value = field(raw, name, where, default)
    if type(value) not in (int, float) or not 0 < value < 1e30:  # the comparison is false for NaN
        raise UserError(f"{where}: {name} is {short(value)}; it must be a number above 0")
    return float(value)


def flag(raw, name, where):
    value = field(raw, name, where, False)
    if type(value) is not bool:
        raise UserError(f"{where}: {name} is {short(value)}; it must be true or false")
    return value


def token_id(raw, name, vocab, where):
    """A token id, a list of them (Llama 3 has several that end a text), or None."""
    value = raw.get(name)
    if value is None:
        return None
    for one in value if isinstance(value, list) else [value]:
        if type(one) is not int or not 0 <= one < vocab:
            raise UserError(f"{where}: {name} is {short(value)}; token ids go from 0 to vocab_size - 1 = {vocab - 1}")
    return value


def first_of(value):
    """The first of a list, or None if it is empty; what is no list, as it is."""
    if isinstance(value, list):
        return value[0] if value else None
    return value


def field(raw, name, where, default):
    """The value of a field, or its default where it is absent or null."""
    value = raw.get(name)
    if value is None:
        value = default
    if value is None:
        raise UserError(f"{where} has no {name}, which shapes the model; take the checkpoint's own config.json")
    return value


# LlamaConfig -> config.json

def config_fields(config, dtype):
    """LlamaConfig -> the content of config.json, as every version of transformers reads it."""
    fields = {name: value for name, value in asdict(config).items() if value is not None}
    fields["architectures"] = [ARCHITECTURES.get(config.model_type, ARCHITECTURES["llama"])]
    fields["hidden_act"] = "silu"
    fields["torch_dtype"] = str(dtype).removeprefix("torch.")
    if config.model_type == "mistral":
        fields["sliding_window"] = config.sliding_window  # null is not the same as absent
    parse_config(fields, "this model")  # an error, rather than a folder that does not load again
    return dict(sorted(fields.items()))
