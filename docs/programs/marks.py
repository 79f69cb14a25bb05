"""How SmolLM2's marked tokens act in the model: the figure of docs/analysis.md, and numbers by layer.

    python docs/programs/marks.py --model path/to/SmolLM2-135M-Instruct --data wikitext2-test.txt
    python docs/programs/marks.py --model path/to/SmolLM2-135M-Instruct --data wikitext2-test.txt --keys

A token is marked if `kvsink --threshold 0.1` would keep it. In one window, a query's attention is split into that to
the five tokens with the largest marks, which `kvsink` keeps, to the other marked tokens, and to all others. For
each of the three, the values' rounding errors at 3 bits are summed with the same weights: this is what they add to the
attention's output.

--keys: why the five's keys matter, by layer, in eight windows of 512 tokens: what a key's rounding error at 3 bits adds
to the logits of the queries after it, and how much of this is the same for all of them.
"""
import argparse

import torch
from results import ROOT

from tinykv import hf
from tinykv.calibrate import calibrate
from tinykv.lab import plots
from tinykv.lab.analysis.bias import consistency, split_output
from tinykv.lab.analysis.errors import read_back
from tinykv.lab.analysis.walk import walk
from tinykv.lab.data import load_windows
from tinykv.methods.kvsink import KVSink

GROUPS = ("five largest marks", "other marks", "other tokens")
CONTEXT = 4096
EARLY = range(3, 11)  # of the figure: from layer 12 on, the first token alone has what marks have before


@torch.no_grad()
def look(at, groups, codec, stretch=512):
    """A layer: shares and errors (stretches, groups), and the mean cosine of two errors of each group.

    groups: masks (T) of tokens.
    """
    error = read_back(codec, at.v) - at.v  # (1, Hkv, T, d)
    shares, added, cosines = [], [], []
    for tokens in groups:
        moved, _, share = split_output(at, tokens, at.k, error)  # (H, T, d), (H, T)
        shares.append(share.mean(0).unflatten(0, (-1, stretch)).mean(1))  # (stretches)
        added.append(moved.norm(dim=-1).mean(0).unflatten(0, (-1, stretch)).mean(1))  # (stretches)
        cosines.append(consistency(error[0][:, tokens]).mean().item())
    return torch.stack(shares, 1), torch.stack(added, 1), cosines


@torch.no_grad()
def look_at_keys(at, five, codec, rope):
    """A layer: the five tokens' keys over the others', their norm and their rounding error; the five's share of the
    attention; of a key's squared logit errors the share that all queries have in common, of the five and of others; and
    these errors, the five's over the others'. five (T)."""
    Hkv, T, d = at.k.shape[1:]
    error = (rope.rotate(read_back(codec, at.k_pre)) - at.k)[0]  # (Hkv, T, d)
    queries = at.q[0].unflatten(0, (Hkv, -1))  # (Hkv, H / Hkv, T, d)
    after = torch.ones(T, T, dtype=torch.bool).tril()  # (queries, keys)
    moved = (queries @ error[:, None].mT / d ** 0.5) * after  # (Hkv, H / Hkv, T, T): of logits
    n = after.sum(0)  # (T): queries after a key
    common = (moved.sum(2) / n).square()  # (Hkv, H / Hkv, T)
    whole = moved.square().sum(2) / n  # (Hkv, H / Hkv, T)
    _, _, share = split_output(at, five, at.k, at.v)  # (H, T)
    judged = n >= 64  # the last keys have few queries
    of_five, others = five & judged, ~five & judged
    ratio = [x[:, of_five].mean() / x[:, others].mean() for x in (at.k[0].norm(dim=-1), error.norm(dim=-1))]
    alike = [common[..., tokens].sum() / whole[..., tokens].sum() for tokens in (of_five, others)]
    return [x.item() for x in (*ratio, share.mean(), *alike, (whole[..., of_five].mean() / whole[..., others].mean()))]


def marks_of(layers, method):
    """Which tokens of a window are marked, and which are the five with the largest marks: (T) both."""
    size = layers[method.layer].hidden[:, method.channel].abs()  # (T)
    five = torch.zeros_like(size, dtype=torch.bool)
    five[size.topk(5).indices] = True
    return size >= 0.1 * size.max(), five


def keys_of_sinks(model, method, windows):
    """Print the means over layers 3 to 28, with errors over windows."""
    found = []
    for window in windows:
        layers = walk(model, window)
        _, five = marks_of(layers, method)
        found.append([look_at_keys(at, five, method.codecs[at.layer].k, model.rope) for at in layers[3:29]])
    found = torch.tensor(found)  # (windows, layers, numbers)
    names = ("norm over others'", "rounding error over others'", "share of the attention",
             "common share of squared logit errors", "the same of others", "squared logit errors over others'")
    for name, numbers in zip(names, found.unbind(-1)):
        of_windows = numbers.mean(1)
        print(f"{name}: {of_windows.mean():.3f} ± {of_windows.std() / len(found) ** 0.5:.3f}; by layer "
              f"{format_all(numbers.mean(0).tolist())}")


def format_all(numbers):
    return " ".join(f"{number:.2f}" for number in numbers)


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("--model", metavar="DIR", required=True)
    p.add_argument("--data", metavar="FILE", required=True)
    p.add_argument("--keys", action="store_true", help="look at the keys of the five")
    args = p.parse_args()
    model, tokenizer = hf.load(args.model)
    model.use_attention("fused")
    method = KVSink(model.config, k_bits=3, v_bits=3)
    calibrate(model, method, load_windows(args.data, tokenizer, 512, 2, "calibration").tokens)
    if args.keys:
        keys_of_sinks(model, method, load_windows(args.data, tokenizer, 512, 8).tokens)
        return
    window = load_windows(args.data, tokenizer, CONTEXT, 1).tokens[0]
    layers = walk(model, window)
    marked, five = marks_of(layers, method)
    groups = five, marked & ~five, ~marked
    print(f"{int(marked.sum())} of {len(window)} tokens are marked: channel {method.channel}, layer {method.layer}")
    found = []
    for at in layers[EARLY.start:EARLY.stop + 2]:
        shares, added, cosines = look(at, groups, method.codecs[at.layer].v)
        norms = [at.v[0][:, tokens].norm(dim=-1).mean().item() for tokens in groups]
        found.append((shares, added))
        ends = [" ".join(f"{x[part, i]:.3f}" for i in range(3) for part in (0, -1)) for x in (shares, added)]
        print(f"layer {at.layer}: attention {ends[0]} | error {ends[1]} | cosine {format_all(cosines)} | "
              f"|v| {format_all(norms)}", flush=True)
    shares, added = (torch.stack(of_layers).mean(0) for of_layers in zip(*found[:len(EARLY)]))  # (stretches, groups)
    for part, (share, error) in enumerate(zip(shares.tolist(), added.tolist())):
        print(f"layers 3 to 10, tokens {512 * part} on: attention {format_all(share)} | error {format_all(error)}")
    figure, panels = plots.new_figure(1, 2, 9.2, 3.8, "SmolLM2-135M in a window of 4,096 tokens, layers 3 to 10")
    for panel, numbers, label in zip(panels, (shares, added), ("share of the attention", "error added to the output")):
        for i, name in enumerate(GROUPS):
            panel.plot([512 * part + 256 for part in range(len(numbers))], numbers[:, i], label=name, **plots.style(i))
        panel.set(ylim=(0, None), xlim=(0, CONTEXT), ylabel=label, xlabel="position of the query (tokens)")
    panels[0].legend()
    plots.save(figure, ROOT / "docs" / "figures" / "marks.png")


if __name__ == "__main__":
    main()
