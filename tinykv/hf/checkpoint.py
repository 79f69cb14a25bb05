"""The weights of a checkpoint folder -> Llama, and a Llama with its tokenizer -> a folder."""
import pickle
import re
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode

from tinykv import UserError
from tinykv.hf.config import checkpoint_folder, config_fields, load_config
from tinykv.hf.tokenizer import SentencePieceTokenizer
from tinykv.model import Llama
from tinykv.storage import first_line, listed, read_json, save_tensors, short, write, write_json

WEIGHT_FILES = (  # in transformers' order of preference
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


# A folder -> the model

def load_model(folder, device="cpu", dtype=torch.float32):
    """A checkpoint folder -> Llama on `device`, every weight in `dtype`.

    device: one, or several as in "cuda:0,cuda:1", which the blocks are divided among. What stands
    around the blocks lies on the first, so that tokens go in, and states come out, on one device.
    Tensors are read one by one: there is never more in memory than the model and one tensor, beside
    the pages of the mapped file, which the system takes back as it likes.
    """
    # 1. a model with shapes and no memory
    device, *others = devices = usable_devices(device)
    folder = checkpoint_folder(folder)
    config = load_config(folder)
    with torch.device("meta"), NoInit():
        model = Llama(config)
    model.rope.freq = model.rope.freq.to(device)  # (d/2)
    if others:
        model.devices = place_blocks(model, devices, dtype)

    # 2. every tensor of the folder
    state, not_finite = {}, []
    for name, tensor in read_tensors(folder):
        if name.endswith("rotary_emb.inv_freq"):  # which old versions of transformers saved
            continue
        block = re.match(r"model\.layers\.(\d+)\.", name)
        on = model.devices[int(block[1])] if others and block and int(block[1]) < len(model.devices) else device
        tensor = tensor.to(on, dtype, copy=True, memory_format=torch.contiguous_format)
        low, high = tensor.aminmax() if tensor.numel() else (tensor, tensor)  # NaN if there is one; takes no memory
        if not (low.isfinite().all() and high.isfinite().all()):
            not_finite.append(name)
        state[name] = tensor
    if not_finite:
        raise UserError(f"{folder}: NaN or infinite values, as {dtype}, in {listed(not_finite)}; "
                        "download the weights again, or load them as float32 if it is float16 that cannot hold them")

    # 3. a tied lm_head; a file may hold both, if they are equal
    embedding = state.get("model.embed_tokens.weight")  # (vocab, D)
    if config.tie_word_embeddings and embedding is not None:
        if not torch.equal(state.setdefault("lm_head.weight", embedding), embedding):
            raise UserError(f"{folder}: tie_word_embeddings is true, but lm_head.weight and model.embed_tokens.weight "
                            "are two different tensors; set it to false if both are meant")

    # 4. into the model; torch names what is missing, unexpected, or of another shape
    try:
        model.load_state_dict(state, strict=True, assign=True)
    except RuntimeError as error:
        told = " ".join(str(error).split())[:1000]
        raise UserError(f"{folder}: the weights do not fit config.json, take both from the same checkpoint: "
                        f"{told}") from None
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model["embed_tokens"].weight
    return model.requires_grad_(False)


class NoInit(TorchFunctionMode):
    """Weights made under it are not initialized: on the meta device that only imports a compiler."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__module__", None) != "torch.nn.init":
            return function(*args, **(kwargs or {}))


def place_blocks(model, devices, dtype):
    """The device of each block: neighbours lie together, and each device holds about as many bytes, of
    weights and of the cache of one text as long as the model can read."""
    config, blocks = model.config, model.model["layers"]
    around = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2) * dtype.itemsize
    weights = sum(p.numel() for p in blocks[0].parameters()) * dtype.itemsize
    row = config.num_key_value_heads * config.head_dim * 2  # bytes of a key, or of a value, in 16 bits
    block = weights + 2 * row * config.max_position_embeddings
    share = (around + len(blocks) * block) / len(devices)
    middles = [around + (i + 0.5) * block for i in range(len(blocks))]  # where each block's middle byte is
    return [devices[min(int(middle / share), len(devices) - 1)] for middle in middles]


def usable_devices(names):
    """The torch.devices of "cpu", "cuda" or "cuda:0,cuda:1", or of a list of such names."""
    names = names if isinstance(names, list) else str(names).split(",")
    devices = [usable_device(name) for name in reversed(names)]  # kernels run on the first
    return devices[::-1]


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

def read_tensors(folder):
    """Yields (name, tensor) of a folder's weights. Each file is opened once, and mapped into memory."""
    for path in weight_files(folder):
        for name, tensor in (read_bin(path) if path.suffix == ".bin" else read_safetensors(path)):
            if tensor.dtype not in FLOATS:
                raise UserError(f"{path}: {name} is {tensor.dtype}; weights have to be 16-, 32- or 64-bit floats, "
                                "take a checkpoint that is not quantized")
            yield name, tensor


def weight_files(folder):
    """The files that hold a folder's weights: one, or the shards that an index names."""
    for path in (folder / name for name in WEIGHT_FILES):
        if path.exists() and path.suffix != ".json":
            return [path]
        if path.exists():
            shard_of = read_json(path).get("weight_map")  # {tensor: shard}
            if not isinstance(shard_of, dict) or not all(isinstance(shard, str) for shard in shard_of.values()):
                raise UserError(f"{path}: weight_map is {short(shard_of)} instead of an object of tensor and shard "
                                "names; download it again")
            return [folder / shard for shard in sorted(set(shard_of.values()))]
    raise UserError(f"no weights in {folder}; it must hold one of {', '.join(WEIGHT_FILES)}")


def read_safetensors(path):
    """Yields (name, tensor) of a safetensors file."""
    from safetensors import SafetensorError, safe_open
    try:
        with safe_open(path, framework="pt") as file:  # checks the header against the length of the file
            for name in file.keys():
                yield name, file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is not a whole safetensors file ({first_line(error)}); download it again") from None


def read_bin(path):
    """(name, tensor) of a pytorch_model.bin, a pickle: weights_only reads tensors, refuses code."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError:
        raise UserError(f"{path} holds more than tensors, possibly code, and was not opened; take a checkpoint in "
                        "safetensors format") from None
    except Exception as error:  # torch lets many kinds through
        raise UserError(f"{path} is not a whole file of torch.save ({first_line(error)}); download it again") from None
    if not isinstance(content, dict) or not all(map(has_numbers, content.values())):
        raise UserError(f"{path} is not a dictionary of tensors, or one holds no plain numbers; take the file that "
                        "save_pretrained wrote")
    return content.items()


def has_numbers(tensor):
    """Whether it is a tensor with all of its numbers in the file: not sparse, of shape alone, or expanded."""
    return (isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided and not tensor.is_nested
            and tensor.device.type == "cpu" and tensor.nbytes <= tensor.untyped_storage().nbytes())


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
