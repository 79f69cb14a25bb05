"""The bias of a model's `k_proj`, and what quantized keys lose with a large one: docs/serving.md.

    python docs/programs/key_bias.py path/to/model                    its norm, a layer a line; no more of it is read
    python docs/programs/key_bias.py path/to/SmolLM2-135M-Instruct --data wikitext2-test.txt

With --data, the second plants a bias in the keys of the first and the last layer, where Qwen2.5 has its largest: in
every head SIZE and SIZE / 2 in the two channels that RoPE turns slowest. A query sees nearly the same in all keys, so
the loss in 16 bits does not change, but a grid has to hold it. docs/results.json keeps the rows.
"""
from statistics import fmean as mean

import torch
from results import BIASED, BIASES, UNIT, WINDOWS, biased, entry_of, read_data, witness, write_data

from tinykv import hf
from tinykv.calibrate import calibrate
from tinykv.evaluate import measure
from tinykv.hf.checkpoint import read_tensors
from tinykv.hf.config import checkpoint_folder
from tinykv.lab import cli
from tinykv.lab.data import load_windows


def norms(folder):
    """The norm of each bias of a checkpoint, {layer: norm}."""
    return {int(name.split(".")[2]): tensor.float().norm().item()
            for name, tensor in read_tensors(checkpoint_folder(folder)) if name.endswith("k_proj.bias")}


def plant(model, size):
    """Give the keys of the first and the last layer a bias."""
    config, d = model.config, model.config.head_dim
    bias = torch.zeros(config.num_key_value_heads, d)
    bias[:, d // 2 - 1], bias[:, d - 1] = size, size / 2
    for layer in (model.model.layers[0], model.model.layers[-1]):
        layer.self_attn.k_proj.bias = torch.nn.Parameter(bias.flatten(), requires_grad=False)


def measure_all(loaded, text, size, data):
    """Measure the rows that the data have not, and write each as soon as it is there."""
    model, tokenizer = loaded
    plant(model, size)
    windows = load_windows(text, tokenizer, 512, WINDOWS)
    learning = load_windows(text, tokenizer, 512, WINDOWS, "calibration").tokens
    for label in ["fp16", *BIASES[size]]:
        row = biased(label, size)
        if row not in data["SmolLM2"]:
            method = entry_of(BIASED.get(label, label), "SmolLM2", loaded)[1].method
            if method.needs_calibration:
                calibrate(model, method, learning)
            found = measure(model, method, windows)
            data["SmolLM2"][row] = {"bits": round(mean(found.bits), 3), "windows": witness(windows.tokens),
                                    "nll": [[round(loss / UNIT) for loss in found.nll]]}
            write_data(data)
            print(f"{row}: {mean(found.nll):.3f}", flush=True)


def main():
    p = cli.Parser(description=__doc__)
    p.add_argument("model", metavar="DIR|OWNER/NAME")
    p.add_argument("--data", metavar="FILE", help="plant a bias, and measure")
    with cli.one_line(p):
        args = p.parse_args()
        if args.data is None:
            lines = [f"layer {layer}: {norm:.1f}" for layer, norm in sorted(norms(args.model).items())]
            print("\n".join(lines) or "its keys have no bias")
            return
        loaded, data = hf.load(args.model), read_data()
        loaded[0].use_attention("fused")
        for size in BIASES:
            measure_all(loaded, args.data, size, data)


if __name__ == "__main__":
    main()
