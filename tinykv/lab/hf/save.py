"""A Llama with its tokenizer -> a checkpoint folder, which `hf.load` reads, and transformers."""
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save as to_bytes

from tinykv import UserError
from tinykv.hf.checkpoint import NoInit
from tinykv.hf.config import ARCHITECTURES
from tinykv.hf.tokenizer import SentencePieceTokenizer, opened
from tinykv.lab.files import write, write_json
from tinykv.model import Llama


def save(model, tokenizer_model, folder):
    """Write a folder that `load` reads, and transformers' AutoModelForCausalLM.

    tokenizer_model: the path of a sentencepiece model. Each file is written whole or not at all.
    """
    with torch.device("meta"), NoInit():
        like = Llama(model.config)
    same = parts_of(model) == parts_of(like) and torch.allclose(model.rope.freq.cpu(), like.rope.freq)
    if not same:
        raise UserError("the model is not what its config says: its weights are quantized, untied or parametrized, a "
                        "module, RoPE or an eps was edited, or has a hook; the folder would be read as another model")
    opened(SentencePieceTokenizer, tokenizer_model)
    folder = Path(folder)
    pieces = Path(tokenizer_model).read_bytes()  # before anything is written: it may come from the same folder
    write(folder / "tokenizer.model", lambda path: path.write_bytes(pieces))
    # a tied lm_head is not among the parameters
    weights = {name: weight.detach().contiguous().cpu() for name, weight in model.named_parameters()}
    write(folder / "model.safetensors", lambda path: path.write_bytes(to_bytes(weights, {"format": "pt"})))
    write_json(folder / "config.json", config_fields(model.config, next(model.parameters()).dtype))


def parts_of(model):
    """What shows an edit: the names of its parameters; each module's class, attributes, numbers and hooks."""
    parts = [{name: value if isinstance(value, int | float) else "hook" in name and bool(value)
              for name, value in vars(part).items() if name not in ("training", "attention")}
             for part in model.modules()]
    return [*dict(model.named_parameters())], [type(part) for part in model.modules()], parts


def config_fields(config, dtype):
    """LlamaConfig -> the content of config.json, as every version of transformers reads it."""
    content = {name: value for name, value in asdict(config).items() if value is not None}
    if config.model_type == "mistral":
        content["sliding_window"] = config.sliding_window  # null is not the same as absent
    content["hidden_act"] = "silu"
    content["torch_dtype"] = str(dtype).removeprefix("torch.")
    content["architectures"] = [ARCHITECTURES[config.model_type][0]]
    return dict(sorted(content.items()))
