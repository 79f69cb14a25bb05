"""A Hugging Face checkpoint folder -> model and tokenizer.

    model, tokenizer = load("path/to/Llama-2-7b-hf", "cuda", torch.bfloat16)

Reads what `save_pretrained` writes: config.json (`config.py`); weights as safetensors, whole or in shards
(`checkpoint.py`); the tokenizer (`tokenizer.py`). A fault of the folder is a `UserError` of one line. Weights that are
quantized already are not read.
"""
from pathlib import Path

import torch

from tinykv.hf.checkpoint import load_model, usable_devices
from tinykv.hf.config import load_config
from tinykv.hf.tokenizer import load_tokenizer

EMBEDDED = Path(__file__).parents[1] / "assets" / "tales"  # the model of this repository

__all__ = ["EMBEDDED", "load", "load_config", "load_model", "load_tokenizer", "usable_devices"]


def load(folder, device="cpu", dtype=torch.float32):
    """A checkpoint folder -> (Llama, Tokenizer)."""
    config = load_config(folder)
    tokenizer = load_tokenizer(folder, config)  # before the model: it is small, so its faults show at once
    return load_model(folder, device, dtype), tokenizer
