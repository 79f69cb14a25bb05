"""The weights of a checkpoint folder -> Llama."""
import re
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch.overrides import TorchFunctionMode

from tinykv import UserError, first_line
from tinykv.hf.config import check_file, checkpoint_folder, load_config, read_json
from tinykv.model import Llama

# A folder -> the model

def load_model(folder, device="cpu", dtype=torch.float32):
    """A checkpoint folder -> Llama on `device`, every weight in `dtype`.

    device: one, or several as in "cuda:0,cuda:1", which the layers are divided among. Whatever is not a layer is on
    the first, so tokens go in, and states come out, on one device. Tensors are read one by one: memory never holds
    more than the model and one tensor, beside the pages of the mapped file, which the system takes back as it likes.
    """
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1):
        raise UserError(f"dtype is one of torch's, of 16 or 32 bits, such as torch.bfloat16; got {dtype!r}")
    # 1. a model with shapes and no memory
    device, *others = devices = usable_devices(device)
    folder = checkpoint_folder(folder)
    config = load_config(folder)
    with torch.device("meta"), NoInit():
        model = Llama(config)
    model.rope.freq = model.rope.freq.to(device)  # (d/2)
    if others:
        n_layers = config.num_hidden_layers
        model.devices = [devices[i * len(devices) // n_layers] for i in range(n_layers)]  # neighbours lie together

    # 2. every tensor of the folder
    state, wanted = {}, model.state_dict()
    tied = {"lm_head.weight": "model.embed_tokens.weight"} if config.tie_word_embeddings else {}
    for name, tensor in read_tensors(folder):
        name = tied.get(name, name)
        block = re.match(r"model\.layers\.(\d+)\.", name)
        # a layer that config.json has not goes anywhere: torch names it below
        on = model.devices[int(block[1]) % n_layers] if others and block else device
        if not tensor.is_floating_point() or tensor.itemsize < 2:  # codes, which mean little without their scales
            raise UserError(f"{folder}: {name} is {tensor.dtype}; give a checkpoint in 16 or 32 bits")
        if name in wanted and wanted[name].shape == tensor.shape:  # else torch names it below, and it takes no memory
            tensor = tensor.to(on, dtype, copy=True)
        if name in state and not torch.equal(state[name], tensor):
            raise UserError(f"{folder} holds {name} twice, with different numbers; keep the files of one checkpoint, "
                            "and set tie_word_embeddings to false if lm_head.weight is not the embedding")
        state[name] = torch.nn.Parameter(tensor, requires_grad=False)

    # 3. into the model, as they are: so a tied lm_head is the embedding. torch names what is missing, or unexpected
    state |= {name: state[source] for name, source in tied.items() if source in state}
    try:
        model.load_state_dict(state, strict=True, assign=True)
    except RuntimeError as error:
        raise UserError(f"{folder}: the weights do not fit config.json, take both, and all files, from the same "
                        f"checkpoint: {' '.join(str(error).split())[:1000]}") from None
    return model.requires_grad_(False)


class NoInit(TorchFunctionMode):
    """Weights made under it are not initialized: on the meta device that only imports a compiler."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__module__", None) != "torch.nn.init":
            return function(*args, **(kwargs or {}))


def usable_devices(names):
    """The torch.devices of "cpu", "cuda" or "cuda:0,cuda:1", or of a list of such names."""
    names = names if isinstance(names, list) else str(names).split(",")
    return [usable_device(name) for name in reversed(names)][::-1]  # the first comes last: kernels run on it


def usable_device(name):
    """The torch.device of that name. One of several GPUs becomes the one that runs kernels, too."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)
    except (RuntimeError, AssertionError) as error:  # AssertionError: this torch was built for CPUs only
        why = first_line(error).replace("Expected one of cpu, cuda", "it is not one of cpu, cuda")[:80]
        raise UserError(f"device {str(name)!r} cannot be used ({why}); give cpu, cuda, or cuda:1, a GPU that torch sees"
                        ) from None
    return device


# The tensors of a folder

def read_tensors(folder):
    """Yields (name, tensor) of model.safetensors, or of the shards that its index names, or without an index of all
    shards model-00001-of-00003.safetensors, ..."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    files = [whole] if whole.exists() else sorted(folder.glob("model-*.safetensors"))
    if index.exists() and not whole.exists():
        shard_of = read_json(index).get("weight_map")  # {name of a tensor: name of a file}
        names = shard_of.values() if isinstance(shard_of, dict) else []
        files = sorted({folder / Path(str(name)).name for name in names})  # of this folder
    if not files:
        raise UserError(f"no weights in {folder}; it must hold model.safetensors, or its shards, as save_pretrained "
                        "writes them (of .bin files: load and save them with transformers)")
    for path in files:
        check_file(path, 2 ** 50)
        try:
            file = safe_open(path, "pt")  # checks the header against the length of the file
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} is not a whole safetensors file ({first_line(error)}); download it "
                            "again") from None
        with file:
            for name in file.keys():
                if not name.endswith("rotary_emb.inv_freq"):  # which old versions of transformers saved
                    yield name, file.get_tensor(name)
