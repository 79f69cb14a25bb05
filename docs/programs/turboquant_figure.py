"""Where TurboQuant breaks: the embedded model with biased keys, as a table and a picture.

    python docs/programs/turboquant_figure.py --out docs/figures

The bias is in the two channels of a head that RoPE turns slowest. It adds nearly the same number to all scores of a
query, which the softmax does not see: in full precision the model stays what it was.
"""
import argparse
import math
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # the repository

from eval_ppl import compare  # noqa: E402
from tinykv import hf  # noqa: E402
from tinykv.lab import cli, plots  # noqa: E402
from tinykv.lab.data import load_windows  # noqa: E402
from tinykv.lab.run.settings import load_class  # noqa: E402
from tinykv.tracing import Trace  # noqa: E402

METHOD = f"{ROOT / 'docs' / 'examples' / 'turboquant.py'}:TurboQuant"
SIZES = (0, 3, 10, 30, 100)  # of the bias, in either channel; without it a key has a norm of about 10
#   row of `compare`: what the table and the picture call it
ROWS = {
    "kivi bits=2": "kivi, 2 bits",
    "TurboQuant bits=2 centre=off": "TurboQuant, 2 bits",
    "TurboQuant bits=4 centre=off": "TurboQuant, 4 bits",
    "TurboQuant bits=2 centre=on": "centred, 2 bits",
    "TurboQuant bits=4 centre=on": "centred, 4 bits",
}


def biased(size):
    """The embedded model with a bias on the keys of every layer, and its tokenizer."""
    model, tokenizer = hf.load(hf.EMBEDDED)
    Hkv, d = model.config.num_key_value_heads, model.config.head_dim
    for block in model.model["layers"]:
        bias = torch.zeros(Hkv, d)
        bias[:, [d // 2 - 1, d - 1]] = size  # the pair of channels that turns slowest
        block.self_attn.k_proj.bias = torch.nn.Parameter(bias.flatten())
    return model, tokenizer


def losses(size, windows=8):
    """fp16's perplexity, and {label: nats a token above it}."""
    rows = compare(["kivi", METHOD], model=biased(size), bits=[2, 4], centre=["off", "on"], windows=windows,
                   calib_windows=4)
    found = {row["label"]: math.log(row["ppl"] / rows[0]["ppl"]) for row in rows}
    return rows[0]["ppl"], {label: found[label] for label in ROWS}


def rounded(size):
    """What TurboQuant rounds: the rotated keys of a text in the last layer, (T, d)."""
    model, tokenizer = biased(size)
    trace = Trace(model)
    with torch.no_grad():
        model(load_windows("tales", tokenizer, 512, 1).tokens, trace)
    keys = model.rope.rotate(trace.k[-1])[0, 0].double()  # (T, d)
    R = load_class(METHOD)(model.config).codecs[-1].k.R  # (d, d)
    return math.sqrt(len(R)) * keys / keys.norm(dim=-1, keepdim=True) @ R.T


def draw(found):
    """found: {size: losses}."""
    figure, panels = plots.new_figure(1, 3, 13, 3.8)
    levels = load_class(METHOD)(hf.load_config(hf.EMBEDDED), k_bits=2).codecs[0].k.levels
    # what is rounded, with and without a bias: three channels of the rotated keys
    for panel, size in zip(panels, (0, 30)):
        y = rounded(size)  # (T, d)
        for i in range(3):
            panel.scatter(range(len(y)), y[:, i], s=4, color=plots.COLOURS[i], label=f"rotated channel {i}")
        for edge in (levels[1:] + levels[:-1]) / 2:
            panel.axhline(edge, color=plots.COLOURS[4], linewidth=0.8)
        panel.set(xlabel="position (tokens)", ylim=(-3.5, 3.5))
        plots.title(panel, f"bias {size}: what is rounded, and the edges between 4 levels")
    plots.legend(panels[0], loc="lower left")
    # the loss against the bias
    for i, label in enumerate(ROWS):
        losses_of_row = [loss[label] for _, loss in found.values()]
        panels[2].plot(range(len(found)), losses_of_row, label=ROWS[label], **plots.style(i))
    panels[2].set(yscale="log", xlabel="bias of two key channels", ylabel="nats a token above fp16")
    panels[2].set_xticks(range(len(found)), list(map(str, found)))
    plots.title(panels[2], "what the bias costs")
    plots.legend(panels[2])
    return figure


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", metavar="DIR", help="also draw DIR/turboquant.png")
    args = p.parse_args()
    found = {size: losses(size) for size in SIZES}
    lines = [[str(size), f"{ppl:.3f}", *(f"{x:.3f}" for x in loss.values())] for size, (ppl, loss) in found.items()]
    print(cli.Columns(["bias", "fp16, ppl", *ROWS.values()], lines, left=0))
    if args.out:
        plots.save(draw(found), str(Path(args.out, "turboquant.png")))


if __name__ == "__main__":
    main()
