"""The weights of a checkpoint folder -> Llama, and a Llama with its tokenizer -> a folder."""
import os
import pickle
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tinykv import UserError
from tinykv.hf.config import checkpoint_folder, config_fields, load_config
from tinykv.hf.tokenizer import SentencePieceTokenizer
from tinykv.model import Llama
from tinykv.storage import (
    check_regular,
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

WEIGHT_FILES = (  # in transformers' order of preference
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
FLOATS = {"F64", "F32", "F16", "BF16", torch.float64, torch.float32, torch.float16, torch.bfloat16}


# A folder -> the model

@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: its place, and what the file says about it."""
    path: Path
    shape: tuple
    dtype: str | torch.dtype


def load_model(folder, device="cpu", dtype=torch.float32):
    """A checkpoint folder -> Llama on `device`, every weight in `dtype`.

    Tensors are read one by one, and each file is memory-mapped for one tensor at a time: there is
    never more in memory than the model and one tensor as it was stored.
    """
    # 1. what the folder holds
    device = usable_device(device)
    folder = checkpoint_folder(folder)
    config = load_config(folder)
    stored = find_tensors(folder)
    if config.num_hidden_layers > len(stored):  # to name all that is missing, all would be made
        raise UserError(f"{folder}: the weights do not fit config.json; {len(stored)} tensors are not "
                        f"{config.num_hidden_layers} layers; take both from the same checkpoint")

    # 2. a model with shapes and no memory; its parameters must be those of the folder
    with torch.device("meta"), NoInit():
        model = Llama(config)
    model.rope.freq = model.rope.freq.to(device)  # (d/2)
    check_tensors(model, stored, folder)

    # 3. read every parameter; a tied lm_head is not among them
    not_finite = []
    for name in [name for name, _ in model.named_parameters()]:
        tensor = read_tensor(stored[name], name, device, dtype)
        low, high = tensor.aminmax()  # NaN if there is one; unlike isfinite it takes no memory
        if not (low.isfinite() and high.isfinite()):
            not_finite.append(name)
        set_parameter(model, name, tensor)
    if not_finite:
        raise UserError(f"{folder}: NaN or infinite values, as {dtype}, in {listed(not_finite)}; "
                        "download the weights again, or load them as float32 if it is float16 that cannot hold them")

    # 4. the tied lm_head
    if config.tie_word_embeddings:
        tie_embeddings(model, stored, folder)
    return model


class NoInit(TorchFunctionMode):
    """Weights made under it are not initialized: on the meta device that only imports a compiler."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__module__", None) != "torch.nn.init":
            return function(*args, **(kwargs or {}))


def set_parameter(model, name, tensor):
    """Put a tensor in the place of a parameter of the model. It takes no gradient."""
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, nn.Parameter(tensor, requires_grad=False))


def tie_embeddings(model, stored, folder):
    """Make lm_head and embed_tokens one tensor. A file may hold both, if they are equal."""
    shared = model.model["embed_tokens"].weight  # (vocab, D)
    model.lm_head.weight = shared
    if "lm_head.weight" in stored:
        second = read_tensor(stored["lm_head.weight"], "lm_head.weight", shared.device, shared.dtype)
        if not torch.equal(second, shared):
            raise UserError(f"{folder}: tie_word_embeddings is true, but lm_head.weight and model.embed_tokens.weight "
                            "are two different tensors; set it to false if both are meant")


def usable_device(device):
    """The torch.device of that name. One of several GPUs becomes the one that runs kernels, too."""
    try:
        torch.empty(0, device=device)
        if torch.device(device).type == "meta":
            raise RuntimeError("it holds no numbers")
        if torch.device(device).type == "cuda" and torch.device(device).index is not None:
            torch.cuda.set_device(device)
    except (RuntimeError, AssertionError) as error:  # AssertionError: this torch was built for CPUs only
        raise UserError(f"device {str(device)!r} cannot be used ({first_line(error)}); give cpu, or a GPU that torch "
                        "sees") from None
    return torch.device(device)


# The tensors of a folder

def find_tensors(folder):
    """{name: StoredTensor} of the weights in a folder."""
    for name in WEIGHT_FILES:
        path = folder / name
        if path.exists():
            return list_shards(path) if path.suffix == ".json" else list_tensors(path)
    raise UserError(f"no weights in {folder}; it must hold one of {', '.join(WEIGHT_FILES)}")


def list_shards(index):
    """{name: StoredTensor} of the shards that an index names."""
    # 1. the index: {tensor: shard}
    folder = index.parent
    shard_of = read_json(index).get("weight_map")
    if not isinstance(shard_of, dict) or not shard_of or not all(isinstance(s, str) for s in shard_of.values()):
        raise UserError(f"{index}: weight_map is {short(shard_of)} instead of an object of tensor and shard names"
                        f"{remedy(index)}")

    # 2. the shards must be files of the index's kind beside it
    shards = sorted(set(shard_of.values()))
    kind = Path(index.name.removesuffix(".index.json")).suffix
    strange = [shard for shard in shards if Path(shard).name != shard or Path(shard).suffix != kind]
    if strange:
        raise UserError(f"{index} names {listed(strange)}; shards are {kind} files that lie beside their index")
    absent = [shard for shard in shards if not os.path.isfile(folder / shard)]
    if absent:
        raise UserError(f"{index} names {listed(absent)}, not in {folder}; download the missing files")

    # 3. each tensor must be in the shard that the index names
    tensors_of = {shard: list_tensors(folder / shard) for shard in shards}
    lost = [f"{name} in {shard}" for name, shard in shard_of.items() if name not in tensors_of[shard]]
    if lost:
        raise UserError(f"{index} names {listed(lost)}, not there; index and shards are of different downloads, "
                        "download them together")

    # 4. all tensors of all shards; where two shards hold the same one, the index decides
    stored = {}
    for tensors in tensors_of.values():
        stored |= tensors
    for name, shard in shard_of.items():
        stored[name] = tensors_of[shard][name]
    return stored


def list_tensors(path):
    """{name: StoredTensor} of one file. No weight is read."""
    stored = {}
    if path.suffix == ".bin":
        for name, tensor in open_bin(path).items():
            stored[name] = StoredTensor(path, tuple(tensor.shape), tensor.dtype)
    else:
        with open_safetensors(path) as file:
            for name in file.keys():
                header = file.get_slice(name)
                stored[name] = StoredTensor(path, tuple(header.get_shape()), header.get_dtype())
    return stored


def read_tensor(stored, name, device, dtype):
    """One tensor, as a copy: its file is mapped into memory only here."""
    if stored.path.suffix == ".bin":
        tensor = open_bin(stored.path)[name]
    else:
        with open_safetensors(stored.path) as file:
            tensor = file.get_tensor(name)
    return tensor.to(device=device, dtype=dtype, copy=True, memory_format=torch.contiguous_format)


def open_bin(path):
    """{name: tensor} of a pytorch_model.bin, a pickle: weights_only reads tensors, refuses code."""
    check_regular(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError:
        raise UserError(f"{path} holds more than tensors, possibly code, and was not opened; take a checkpoint in "
                        "safetensors format") from None
    except Exception as error:  # torch lets many kinds through
        raise UserError(f"{path} is not a whole file of torch.save ({first_line(error)}){remedy(path)}") from None
    if isinstance(content, dict):
        names_are_text = all(isinstance(name, str) for name in content)
        if names_are_text and all(map(is_plain, content.values())):
            return content
    raise UserError(f"{path} is not a dictionary of tensors, or one holds no plain numbers; take the file that "
                    "save_pretrained wrote")


def is_plain(value):
    """Whether a value is a tensor with its numbers in memory: not sparse, nested, or of shape alone."""
    return (isinstance(value, torch.Tensor) and value.layout is torch.strided
            and not value.is_nested and value.device.type == "cpu")


def check_tensors(model, stored, folder):
    """UserError if the tensors are not the model's parameters. It names everything that is wrong."""
    wanted = {name: tuple(p.shape) for name, p in model.named_parameters()}
    faults = {"missing": [], "unexpected": [], "of another shape": [], "not 16-, 32- or 64-bit floats": []}

    # parameters: there, of the right shape, and floats
    for name, shape in wanted.items():
        if name not in stored:
            faults["missing"].append(name)
            continue
        found = stored[name]
        if found.shape != shape:
            faults["of another shape"].append(f"{name} {found.shape} instead of {shape}")
        if found.dtype not in FLOATS:
            faults["not 16-, 32- or 64-bit floats"].append(f"{name} {found.dtype}")

    # tensors that are no parameters: only those that are known to be redundant
    for name in stored:
        tied_head = model.config.tie_word_embeddings and name == "lm_head.weight"
        rope_table = name.endswith("rotary_emb.inv_freq")  # which old versions of transformers saved
        if name not in wanted and not tied_head and not rope_table:
            faults["unexpected"].append(name)

    found = "; ".join(f"{fault}: {listed(names)}" for fault, names in faults.items() if names)
    if found:
        raise UserError(f"{folder}: the weights do not fit config.json; {found}; take both from the same checkpoint")


# The model -> a folder

def save(model, tokenizer_model_path, folder):
    """Write a folder that `load` reads, and transformers' AutoModelForCausalLM and AutoTokenizer.

    tokenizer_model_path: a sentencepiece model. Each file is written whole or not at all. Of a
    Mistral folder without tokenizer.json, transformers 5 encodes the first word of a text without
    its blank, unlike sentencepiece and load.
    """
    # 1. check everything before a file is written
    folder, config = Path(folder), model.config
    fields = config_fields(config, next(model.parameters()).dtype)
    tokenizer = SentencePieceTokenizer(Path(tokenizer_model_path))
    if tokenizer.vocab_size > config.vocab_size:
        raise UserError(f"{tokenizer_model_path}: wrong tokenizer vocabulary, {tokenizer.vocab_size} tokens for a "
                        f"model of {config.vocab_size}")

    # 2. the tokenizer, which may come from the same folder
    proto = tokenizer.pieces.serialized_model_proto()
    write(folder / "tokenizer.model", lambda path: path.write_bytes(proto))

    # 3. the weights; a tied lm_head is not among them
    save_tensors(folder / "model.safetensors", dict(model.named_parameters()), {"format": "pt"})

    # 4. the settings
    generation = {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id}
    write_json(folder / "tokenizer_config.json", tokenizer_fields(tokenizer.pieces, config))
    write_json(folder / "generation_config.json", generation)
    write_json(folder / "config.json", fields)


def tokenizer_fields(pieces, config):
    """The content of tokenizer_config.json, for a sentencepiece model."""
    ids = {"bos_token": pieces.bos_id(), "eos_token": pieces.eos_id(), "unk_token": pieces.unk_id()}
    fields = {name: pieces.id_to_piece(i) for name, i in ids.items() if i >= 0}
    fields["tokenizer_class"] = "LlamaTokenizer"
    fields["add_bos_token"] = "bos_token" in fields
    fields["add_eos_token"] = False
    fields["legacy"] = False
    fields["clean_up_tokenization_spaces"] = False
    fields["model_max_length"] = config.max_position_embeddings
    return fields
