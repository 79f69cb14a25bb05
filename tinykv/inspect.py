"""Look at what the methods stand on, on any model and text: figures, and the numbers behind them.

    python -m tinykv.inspect anchors --out docs/figures

anchors: how well AnTKV's short scores rank the tokens by the damage that coding them really does (its Appendix D).
"""
import argparse
import json
import sys
from pathlib import Path

import torch
from tqdm import tqdm

from tinykv import UserError, anchors, checkpoint, figures
from tinykv.data import load_windows
from tinykv.methods.antkv import AnTKV
from tinykv.sinks import Probe

EMBEDDED = Path(__file__).parent / "assets" / "tales"


def ranks(x):
    """x (..., n) -> the rank of each number, (..., n)."""
    return x.argsort(-1).argsort(-1).float()


def rank_correlation(a, b):
    """Spearman's, over the last dimension."""
    a, b = (ranks(x) - (x.shape[-1] - 1) / 2 for x in (a, b))
    return (a * b).sum(-1) / (a.pow(2).sum(-1) * b.pow(2).sum(-1)).sqrt()


@torch.no_grad()
def anchor_damage(model, window, method):
    """Of one window (T): scores and damage of every token, per layer and KV head.

    Returns {"k": {...}, "v": {...}} of tensors (L, Hkv, T): `damage`, the L1 change of the attention output if the
    token alone is read as its code; `score`, its AnS; `bound` (of keys only), the full factor of Theorem 1; `error`,
    |d|_1 of its row.
    """
    probe = Probe(model)
    model.hidden(window[None], probe)
    positions = torch.arange(len(window), device=window.device)
    found = {kind: {"damage": [], "score": [], "error": [], **({"bound": []} if kind == "k" else {})} for kind in "kv"}
    for layer, (q, k, v) in enumerate(zip(probe.q, probe.k, probe.v)):
        coded = [method.decode(layer, kind, method.encode(layer, kind, x, None)) for kind, x in (("k", k), ("v", v))]
        q, k, coded_k = (model.rope.rotate(x, positions) for x in (q, k, coded[0].to(k.dtype)))  # (1, H or Hkv, T, d)
        damage = anchors.damage(q, k, v, coded_k, coded[1])
        score = anchors.anchor_scores(q, k)
        errors = (coded_k - k).abs().sum(-1), (coded[1] - v).abs().sum(-1)  # (1, Hkv, T) both
        found["k"]["bound"].append(anchors.theorem_1(q, k, v)[0])
        for i, kind in enumerate("kv"):
            for name, x in (("damage", damage[i]), ("score", score[i]), ("error", errors[i])):
                found[kind][name].append(x[0].float())
    return {kind: {name: torch.stack(rows) for name, rows in of.items()} for kind, of in found.items()}


def report_anchors(model, windows, calibration, vq):
    """The table, as rows of numbers, and what the figure needs: a window's damage and scores."""
    method = AnTKV(model.config, vq)
    method.calibrate(model, calibration)
    bar = tqdm(windows, unit="window", leave=False, delay=1, disable=not sys.stderr.isatty())
    tables = [anchor_damage(model, window, method) for window in bar]
    rows = []
    for kind in "kv":
        for name in ("score", "bound", "score x error", "bound x error"):
            if kind == "v" and name.startswith("bound"):
                continue
            values, shares = [], []
            for table in tables:
                of = table[kind]
                x = of[name.split()[0]] * (of["error"] if "error" in name else 1)  # (L, Hkv, T)
                values.append(rank_correlation(x, of["damage"]).mean(1))  # (L)
                top = x.topk(max(1, x.shape[-1] // 100), -1).indices  # (L, Hkv, 1%)
                shares.append((of["damage"].gather(-1, top).sum(-1) / of["damage"].sum(-1)).mean(1))  # (L)
            rows.append({"of": kind.upper(), "ranked by": name,
                         "rank correlation": torch.stack(values).mean(0).tolist(),
                         "damage in the top 1%": torch.stack(shares).mean(0).tolist()})
    return rows, tables[0]


def print_rows(rows):
    layers = len(rows[0]["rank correlation"])
    for name, form in (("rank correlation", ".2f"), ("damage in the top 1%", ".0%")):
        print(f"\n{name} with the damage, by layer" if form == ".2f" else f"\n{name} of the tokens, by layer")
        print("of  ranked by      " + "".join(f"{layer:7}" for layer in range(layers)) + "     mean")
        for row in rows:
            numbers = "".join(f"{x:7{form}}" for x in row[name])
            print(f"{row['of']:3} {row['ranked by']:15}{numbers}  {sum(row[name]) / layers:7{form}}")


def main():
    p = argparse.ArgumentParser(prog="python -m tinykv.inspect", description=__doc__.split("\n\n")[0],
                                epilog=__doc__.split("\n\n")[2], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("what", choices=["anchors"], help="what to look at")
    p.add_argument("--model", metavar="DIR", default=str(EMBEDDED), help="a Hugging Face checkpoint folder")
    p.add_argument("--data", metavar="tales|wikitext2|c4|FILE", default="tales", help="the text")
    p.add_argument("--context", metavar="T", type=int, default=1024, help="tokens of a window")
    p.add_argument("--windows", metavar="W", type=int, default=4, help="windows to look at")
    p.add_argument("--calib-windows", metavar="C", type=int, default=16, help="windows to learn codebooks from")
    p.add_argument("--vq", metavar="dNmM", default="d8m256", help="format of the codebooks")
    p.add_argument("--out", metavar="DIR", help="where figures go (default: none are drawn)")
    p.add_argument("--json", metavar="PATH", help="also write the numbers as JSON")
    args = p.parse_args()
    try:
        config = checkpoint.load_config(args.model)
        if args.context > config.max_position_embeddings:
            raise UserError(f"--context {args.context} is longer than the {config.max_position_embeddings} positions "
                            "that this model was made for; ask for fewer tokens")
        if args.json and not Path(args.json).absolute().parent.is_dir():
            raise UserError(f"--json {args.json}: there is no folder {Path(args.json).parent}")
        model, tokenizer = checkpoint.load(args.model)
        windows, calibration = (load_windows(args.data, tokenizer, args.context, n, split).tokens
                                for n, split in ((args.windows, "test"), (args.calib_windows, "calibration")))
        rows, table = report_anchors(model, windows, calibration, args.vq)
        print_rows(rows)
        if args.out:
            figures.anchors(table, Path(args.out, "anchors.png"))
        if args.json:
            checkpoint.write(Path(args.json), lambda part: part.write_text(json.dumps(rows, indent=1) + "\n"))
    except UserError as error:
        p.exit(2, f"{p.prog}: error: {error}\n")


if __name__ == "__main__":
    main()
