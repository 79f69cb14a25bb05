"""A Hugging Face checkpoint folder -> model and tokenizer, and back.

    model, tokenizer = load("path/to/Llama-2-7b-hf", "cuda", torch.bfloat16)

Reads what `save_pretrained` writes: config.json; weights as model.safetensors or pytorch_model.bin, whole or in shards;
the tokenizer (`tokenizer.py`). A fault of the folder is a `UserError` of one line, found before any weight is read
wherever possible. Does not fetch anything, run code that a checkpoint brings, or read weights that are quantized
already.
"""
import hashlib
import json
import pickle
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tinykv import UserError
from tinykv.files import (
    checked,
    first_line,
    listed,
    open_safetensors,
    read_json,
    remedy,
    save_tensors,
    short,
    write,
    write_json,
)
from tinykv.model import Llama, LlamaConfig
from tinykv.tokenizer import SentencePieceTokenizer, load_tokenizer

WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
FLOATS = {"F64", "F32", "F16", "BF16", torch.float64, torch.float32, torch.float16, torch.bfloat16}
# Fields that change what a model computes, with the values that the model here stands for. Anything else is refused;
# absent and null always pass. Left out as harmless: what only training reads (attention_dropout, initializer_range),
# and pretraining_tp, which takes the same sums in another order.
IMPLEMENTED = {"hidden_act": ("silu",), "partial_rotary_factor": (1,), "layer_types": (), "auto_map": (),
               "quantization_config": (), "compression_config": (), "original_max_position_embeddings": ()}
ROPE = {  # rope_type -> its parameters
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")}


def load(folder, device="cpu", dtype=torch.float32):
    """A checkpoint folder -> (Llama, Tokenizer)."""
    config = load_config(folder)
    tokenizer = load_tokenizer(folder, config)  # first: it is small, so its faults show at once
    return load_model(folder, device, dtype), tokenizer


# The configuration

def load_config(folder):
    """A checkpoint folder -> LlamaConfig."""
    path = checked(folder) / "config.json"
    return parse_config(read_json(path), path)


def parse_config(raw, where):
    """The content of a config.json -> LlamaConfig. A field that is absent has the value that transformers gives it."""
    kind = raw.get("model_type")
    names = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}
    if not isinstance(kind, str) or kind not in names:
        raise UserError(f"{where}: model_type is {short(kind)}; tinykv implements {' and '.join(names)}")
    made = raw.get("architectures") or [names[kind]]
    if str(made).lower() != str([names[kind]]).lower():  # LLaMA 1 was LLaMAForCausalLM at first
        raise UserError(f"{where}: architectures is {short(made)}; tinykv implements {short([names[kind]])}")
    check_implemented(raw, where)
    mistral = kind == "mistral"
    for name in ("attention_bias", "mlp_bias") if mistral else ("sliding_window",):
        if raw.get(name):
            raise UserError(f"{where}: {name} is {short(raw[name])}, which a {kind} model does not have; "
                            "set it to null or correct model_type")

    heads = whole(raw, "num_attention_heads", where)
    hidden = whole(raw, "hidden_size", where)
    vocab = whole(raw, "vocab_size", where)
    positions = whole(raw, "max_position_embeddings", where, 131072 if mistral else 2048)
    if raw.get("head_dim") is None and hidden % heads:
        raise UserError(f"{where}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}; "
                        "correct them, or state head_dim")
    # null means as many as query heads; the class of Mistral has a default of its own for a field that is absent
    kv_heads = whole(raw, "num_key_value_heads", where, 8 if mistral and "num_key_value_heads" not in raw else heads)
    if heads % kv_heads:
        raise UserError(f"{where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}; "
                        "query heads share KV heads evenly")
    head_dim = whole(raw, "head_dim", where, hidden // heads)
    if head_dim % 2:
        raise UserError(f"{where}: head_dim is {head_dim}; rotary embedding turns channels in pairs and needs it even")
    theta, scaling = parse_rope(raw, positions, where)
    window = None
    if mistral and raw.get("sliding_window", 4096) is not None:
        window = whole(raw, "sliding_window", where, 4096)
    return LlamaConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=whole(raw, "intermediate_size", where),
        num_hidden_layers=whole(raw, "num_hidden_layers", where), num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=head_dim, max_position_embeddings=positions,
        rms_norm_eps=real(raw, "rms_norm_eps", where, 1e-6), rope_theta=theta, rope_scaling=scaling,
        tie_word_embeddings=flag(raw, "tie_word_embeddings", where), attention_bias=flag(raw, "attention_bias", where),
        mlp_bias=flag(raw, "mlp_bias", where), sliding_window=window, model_type=kind,
        bos_token_id=token(raw, "bos_token_id", vocab, where), eos_token_id=token(raw, "eos_token_id", vocab, where))


def parse_rope(raw, positions, where):
    """(rope_theta, rope_scaling) from the old spelling (rope_theta, rope_scaling) or the new one (rope_parameters)."""
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise UserError(f"{where}: the scaling of RoPE is {short(rope)} instead of an object with a rope_type")
    kind = rope.get("rope_type") or rope.get("type") or "default"  # "type" in older files
    if not isinstance(kind, str) or kind not in ROPE:
        raise UserError(f"{where}: rope_type is {short(kind)}; tinykv implements {', '.join(ROPE)}")
    check_implemented({name: value for name, value in rope.items() if name not in ROPE[kind]}, where)
    known = {"rope_type", "type", "rope_theta", *ROPE[kind], *IMPLEMENTED}
    for name, value in rope.items():
        if name not in known and value is not None:
            raise UserError(f"{where}: {name} of the scaling of RoPE is {short(value)}; rope_type {kind!r} is "
                            "implemented without it")
    theta = real(rope if rope.get("rope_theta") is not None else raw, "rope_theta", where, 10000.0)
    if kind == "default":
        return theta, None
    scaling = {"rope_type": kind, "factor": real(rope, "factor", where)}
    if kind == "llama3":
        low, high = real(rope, "low_freq_factor", where), real(rope, "high_freq_factor", where)
        if high <= low:
            raise UserError(f"{where}: high_freq_factor {high} is not above low_freq_factor {low}; correct them")
        old = whole(rope, "original_max_position_embeddings", where, positions)
        scaling |= {"low_freq_factor": low, "high_freq_factor": high, "original_max_position_embeddings": old}
    return theta, scaling


def check_implemented(raw, where):
    for name, values in IMPLEMENTED.items():
        if raw.get(name) is not None and raw[name] not in values:
            instead = f"; it implements {' and '.join(map(short, values))}" if values else ""
            raise UserError(f"{where}: {name} is {short(raw[name])}, which tinykv does not implement{instead}; "
                            "take a plain checkpoint of this model")


def whole(raw, name, where, default=None):
    value = present(raw, name, where, default)
    if type(value) is not int or value < 1:
        raise UserError(f"{where}: {name} is {short(value)}; it must be a whole number from 1")
    return value


def real(raw, name, where, default=None):
    value = present(raw, name, where, default)
    if type(value) not in (int, float) or not 0 < value < 1e30:  # false for NaN, too
        raise UserError(f"{where}: {name} is {short(value)}; it must be a number above 0")
    return float(value)


def flag(raw, name, where):
    value = present(raw, name, where, False)
    if type(value) is not bool:
        raise UserError(f"{where}: {name} is {short(value)}; it must be true or false")
    return value


def token(raw, name, vocab, where):
    """A token id, a list of them (Llama 3 ends a text in several ways), or None."""
    value = raw.get(name)
    if value is None:
        return None
    for one in value if isinstance(value, list) else [value]:
        if type(one) is not int or not 0 <= one < vocab:
            raise UserError(f"{where}: {name} is {short(value)}; token ids go from 0 to vocab_size - 1 = {vocab - 1}")
    return value


def present(raw, name, where, default):
    value = default if raw.get(name) is None else raw[name]
    if value is None:
        raise UserError(f"{where} has no {name}, which shapes the model; take the checkpoint's own config.json")
    return value


# The weights

@dataclass(frozen=True)
class Stored:
    """Where a tensor lies, and what its file says of it."""
    path: Path
    shape: tuple
    dtype: str | torch.dtype


def load_model(folder, device="cpu", dtype=torch.float32):
    """A checkpoint folder -> Llama on `device`, every weight in `dtype`.

    Reads tensor by tensor, each file memory-mapped for one tensor at a time: besides the model itself there is never
    more in memory than one tensor as it was stored.
    """
    device = usable(device)
    folder = checked(folder)
    config = load_config(folder)
    stored = find_tensors(folder)
    with torch.device("meta"), NoInit():  # shapes without memory
        model = Llama(config)
    model.rope.freq = model.rope.freq.to(device)  # (d/2)
    check_tensors(model, stored, folder)
    faults = []
    for name in [name for name, _ in model.named_parameters()]:  # a tied lm_head is not among them
        tensor = read_tensor(stored[name], name, device, dtype)
        low, high = tensor.aminmax()  # carries NaN along, and needs no memory
        if not (low.isfinite() and high.isfinite()):
            faults.append(name)
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, nn.Parameter(tensor, requires_grad=False))  # read, not trained
    if faults:
        raise UserError(f"{folder}: NaN or infinite values, as {dtype}, in {listed(faults)}; "
                        "download the weights again, or load them as float32 if it is float16 that cannot hold them")
    if config.tie_word_embeddings:
        tie(model, stored, folder)
    return model


class NoInit(TorchFunctionMode):
    """Modules made under it keep out random numbers: on the meta device they do nothing but import a compiler."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__module__", None) != "torch.nn.init":
            return function(*args, **(kwargs or {}))


def tie(model, stored, folder):
    """One tensor for both ends. A file may hold it twice, but not two different ones."""
    shared = model.model["embed_tokens"].weight
    model.lm_head.weight = shared
    if "lm_head.weight" in stored:
        second = read_tensor(stored["lm_head.weight"], "lm_head.weight", shared.device, shared.dtype)
        if not torch.equal(second, shared):
            raise UserError(f"{folder}: tie_word_embeddings is true, but lm_head.weight and model.embed_tokens.weight "
                            "are two different tensors; set it to false if both are meant")


def usable(device):
    """The device as torch has it. If it is one GPU of several, it becomes the one that kernels are started on."""
    try:
        torch.empty(0, device=device)
        if torch.device(device).type == "cuda" and torch.device(device).index is not None:
            torch.cuda.set_device(device)
    except (RuntimeError, AssertionError) as error:  # the latter from a torch that was built for CPUs only
        raise UserError(f"device {str(device)!r} cannot be used ({first_line(error)}); give cpu, or a GPU that torch "
                        "sees") from None
    return torch.device(device)


def find_tensors(folder):
    """{name: Stored} of the weights in a folder, in the order of preference that transformers has."""
    for name in WEIGHTS:
        if (folder / name).exists():
            return index_tensors(folder / name) if name.endswith(".json") else list_tensors(folder / name)
    raise UserError(f"no weights in {folder}; it must hold one of {', '.join(WEIGHTS)}")


def index_tensors(index):
    """{name: Stored} of the shards that an index names."""
    folder, places = index.parent, read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(p, str) for p in places.values()):
        raise UserError(f"{index}: weight_map is {short(places)} instead of an object of tensor and shard names"
                        f"{remedy(index)}")
    shards = sorted(set(places.values()))
    kind = Path(index.name.removesuffix(".index.json")).suffix
    strange = [shard for shard in shards if Path(shard).name != shard or Path(shard).suffix != kind]
    if strange:
        raise UserError(f"{index} names {listed(strange)}; shards are {kind} files that lie beside their index")
    absent = [shard for shard in shards if not (folder / shard).exists()]
    if absent:
        raise UserError(f"{index} names {listed(absent)}, not in {folder}; download the missing files")
    held = {shard: list_tensors(folder / shard) for shard in shards}
    lost = [f"{name} in {shard}" for name, shard in places.items() if name not in held[shard]]
    if lost:
        raise UserError(f"{index} names {listed(lost)}, not there; index and shards are of different downloads, "
                        "download them together")
    stored = {name: one for shard in shards for name, one in held[shard].items()}
    return stored | {name: held[shard][name] for name, shard in places.items()}  # the index decides between two


def list_tensors(path):
    """{name: Stored} of one file. No weight is read."""
    if path.suffix == ".bin":
        return {name: Stored(path, tuple(t.shape), t.dtype) for name, t in open_bin(path).items()}
    with open_safetensors(path) as file:
        slices = {name: file.get_slice(name) for name in file.keys()}
        return {name: Stored(path, tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}


def read_tensor(stored, name, device, dtype):
    """One tensor, as a copy: its file is mapped into memory here and let go again, and with it the pages read."""
    if stored.path.suffix == ".bin":
        tensor = open_bin(stored.path)[name]
    else:
        with open_safetensors(stored.path) as file:
            tensor = file.get_tensor(name)
    return tensor.to(device=device, dtype=dtype, copy=True, memory_format=torch.contiguous_format)


def open_bin(path):
    """{name: tensor} of a pytorch_model.bin: a pickle, of which weights_only reads tensors and refuses code."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError:
        raise UserError(f"{path} holds more than tensors, possibly code, and was not opened; take a checkpoint in "
                        "safetensors format") from None
    except Exception as error:  # torch lets many kinds through
        raise UserError(f"{path} is not a whole file of torch.save ({first_line(error)}){remedy(path)}") from None
    if not isinstance(content, dict) or not all(
            isinstance(name, str) and isinstance(t, torch.Tensor) for name, t in content.items()):
        raise UserError(f"{path} is not a dictionary of tensors; take the file that save_pretrained wrote")
    return content


def check_tensors(model, stored, folder):
    """Are the tensors there, and only they, with the right shapes? Everything that is wrong goes into one line."""
    wanted = {name: tuple(p.shape) for name, p in model.named_parameters()}
    spare = {name for name in stored if name.endswith("rotary_emb.inv_freq")}  # a table that old versions wrote out
    if model.config.tie_word_embeddings:
        spare.add("lm_head.weight")
    both = [name for name in wanted if name in stored]
    faults = {
        "missing": [name for name in wanted if name not in stored],
        "unexpected": [name for name in stored if name not in wanted and name not in spare],
        "of another shape": [f"{name} {stored[name].shape} instead of {wanted[name]}" for name in both
                             if stored[name].shape != wanted[name]],
        "not 16-, 32- or 64-bit floats": [f"{name} {stored[name].dtype}" for name in both
                                          if stored[name].dtype not in FLOATS]}
    found = "; ".join(f"{what}: {listed(names)}" for what, names in faults.items() if names)
    if found:
        raise UserError(f"{folder}: the weights do not fit config.json; {found}; take both from the same checkpoint")


# Back to a folder

def save(model, tokenizer_model_path, folder):
    """Write a folder that `load`, and transformers' AutoModelForCausalLM and AutoTokenizer, read as it is.

    tokenizer_model_path: a sentencepiece model. Each file is written whole or not at all. Of a Mistral folder without
    tokenizer.json, transformers 5 encodes the first word of a text without its blank, unlike sentencepiece and load.
    """
    folder, config = Path(folder), model.config
    fields = config_fields(config, next(model.parameters()).dtype)
    tokenizer = SentencePieceTokenizer(Path(tokenizer_model_path))
    if tokenizer.vocab_size > config.vocab_size:
        raise UserError(f"{tokenizer_model_path}: wrong tokenizer vocabulary, {tokenizer.vocab_size} tokens for a "
                        f"model of {config.vocab_size}")
    proto = tokenizer.pieces.serialized_model_proto()
    write(folder / "tokenizer.model", lambda path: path.write_bytes(proto))
    weights = dict(model.named_parameters())  # a tied lm_head only once
    save_tensors(folder / "model.safetensors", weights, {"format": "pt"})
    write_json(folder / "tokenizer_config.json", tokenizer_fields(tokenizer.pieces, config))
    write_json(folder / "generation_config.json",
               {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id})
    write_json(folder / "config.json", fields)


def config_fields(config, dtype):
    """LlamaConfig -> the content of config.json, in the spelling that every version of transformers reads."""
    fields = {name: value for name, value in asdict(config).items() if value is not None}
    fields["architectures"] = ["MistralForCausalLM" if config.model_type == "mistral" else "LlamaForCausalLM"]
    fields |= {"hidden_act": "silu", "torch_dtype": str(dtype).removeprefix("torch.")}
    if config.model_type == "mistral":
        fields["sliding_window"] = config.sliding_window  # null is not the same as absent
    parse_config(fields, "this model")  # what would not load again is not written
    return dict(sorted(fields.items()))


def tokenizer_fields(pieces, config):
    ids = {"bos_token": pieces.bos_id(), "eos_token": pieces.eos_id(), "unk_token": pieces.unk_id()}
    names = {name: pieces.id_to_piece(i) for name, i in ids.items() if i >= 0}
    return names | {"tokenizer_class": "LlamaTokenizer", "add_bos_token": "bos_token" in names, "add_eos_token": False,
                    "legacy": False, "clean_up_tokenization_spaces": False,
                    "model_max_length": config.max_position_embeddings}


def fingerprint(model):
    """16 hex digits of the SHA-256 over config and weights as they are in memory, dtype included, on any device."""
    numbers = json.loads(json.dumps(asdict(model.config)), parse_int=float)  # 10000 and 10000.0 are one theta
    digest = hashlib.sha256(json.dumps(numbers, sort_keys=True).encode())
    for name, p in sorted(model.named_parameters()):
        digest.update(f"{name} {tuple(p.shape)} {p.dtype}".encode())
        digest.update(p.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())  # (bytes)
    return digest.hexdigest()[:16]
