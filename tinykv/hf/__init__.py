"""A Hugging Face checkpoint folder -> model and tokenizer, and back.

    model, tokenizer = load("path/to/Llama-2-7b-hf", "cuda", torch.bfloat16)

Reads what `save_pretrained` writes: config.json (`config.py`); weights as model.safetensors or
pytorch_model.bin, whole or in shards (`checkpoint.py`); the tokenizer (`tokenizer.py`). A fault of
the folder is a `UserError` of one line, raised before any weight is read wherever possible. Does
not download anything, run code that a checkpoint brings, or read weights that are quantized
already.
"""
import torch

from tinykv.hf.checkpoint import load_model, save, usable_device, usable_devices
from tinykv.hf.config import load_config
from tinykv.hf.tokenizer import load_tokenizer

__all__ = ["load", "load_config", "load_model", "load_tokenizer", "save", "usable_device", "usable_devices"]


def load(folder, device="cpu", dtype=torch.float32):
    """A checkpoint folder -> (Llama, Tokenizer)."""
    config = load_config(folder)
    tokenizer = load_tokenizer(folder, config)  # before the model: it is small, so its faults show at once
    model = load_model(folder, device, dtype)
    return model, tokenizer
