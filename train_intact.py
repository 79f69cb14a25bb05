"""Train IntactKV's prefix: the keys and values of the first tokens, as parameters of a model with quantized weights.

    python train_intact.py --weights rtn --w-bits 3 --prefix bos --out trained.safetensors
    python eval_ppl.py --method intactkv --weights rtn --w-bits 3 --prefix trained.safetensors
"""
from itertools import islice
from pathlib import Path

import torch

from tinykv import UserError, checkpoint, files
from tinykv.calibrate import Learned
from tinykv.command import (
    Parser,
    add_calibration,
    add_model,
    add_weights,
    add_windows,
    bar,
    batch_of,
    calibration_text,
    check_context,
    check_counts,
    check_folder,
    context_of,
    dtype_of,
    one_line,
    print_columns,
    quantized,
    quantizers_of,
    weights_in_words,
)
from tinykv.data import load_windows
from tinykv.evaluate import evaluate
from tinykv.intact import block_loss, open_prefix, save_prefix
from tinykv.methods.fp16 import FP16
from tinykv.methods.intactkv import IntactKV, Prefix, exact_rows


def parser():
    p = Parser(
        description="Train the keys and values of a prefix, so that a model with quantized weights computes what the "
                    "full-precision model does (IntactKV, Eq. 2).",
        epilog="The state of a run is kept in OUT.state after every update; the same command goes on from there.")
    p.add_argument("--out", metavar="FILE", required=True, help="the trained prefix (.safetensors)")
    p.add_argument("--prefix", metavar="bos|FILE", default="bos",
                   help="what texts begin with: BOS, a text file, or a trained prefix to go on with (.safetensors)")
    add_model(p)
    s = p.add_argument_group("training", "on the calibration part of --data; its test part is held out")
    s.add_argument("--samples", metavar="N", type=int, default=128, help="texts to train on")
    s.add_argument("--tokens", metavar="T", type=int, default=256, help="tokens of each, the prefix included")
    s.add_argument("--updates", metavar="N", type=int, default=160, help="updates in all")
    s.add_argument("--accumulate", metavar="N", type=int, default=16, help="texts of an update")
    s.add_argument("--lr", type=float, default=2e-4, help="learning rate of AdamW, constant")
    s.add_argument("--clip", type=float, default=0.3, help="largest norm of a gradient")
    s.add_argument("--seed", type=int, default=0, help="which tales are read, and in which order the texts come")
    s.add_argument("--batch", metavar="B", type=int, help="texts at a time (default: about 4096 tokens)")
    add_weights(p, several=False)
    s = p.add_argument_group("what the quantizer learns from, and the evaluation: as of eval_ppl.py")
    add_windows(s, windows=16, longest=4096)
    p.set_defaults(bos="replace")  # texts begin with the prefix
    add_calibration(s)
    return p


class State:
    """The prefix's rows as fp32 parameters, their optimizer, and the file that both are kept in."""

    def __init__(self, path, run, keys, values, lr):
        """run: the run in words; a file of another run is refused."""
        self.path, self.run, self.done = Path(path), run, 0
        self.rows = [rows.detach().float().clone().requires_grad_() for rows in (keys, values)]
        self.steps = torch.optim.AdamW(self.rows, lr=lr, weight_decay=0)
        if self.path.exists():
            self.read()

    def read(self):
        saved, notes = files.load_tensors(self.path, "state of a run", self.rows[0].device)
        if notes.get("run") != self.run:
            raise UserError(f"{self.path} is the state of another run ({notes.get('run')}, and not {self.run}); remove "
                            "it to begin anew, or give another --out")
        self.done = int(notes["done"])
        for i, rows in enumerate(self.rows):
            rows.data = saved[f"{i}.rows"]
            self.steps.state[rows] = {key: saved[f"{i}.{key}"] for key in ("step", "exp_avg", "exp_avg_sq")}

    def update(self, clip):
        """One step, written down."""
        torch.nn.utils.clip_grad_norm_(self.rows, clip)
        self.steps.step()
        self.steps.zero_grad()
        self.done += 1
        tensors = {f"{i}.rows": rows for i, rows in enumerate(self.rows)}
        for i, rows in enumerate(self.rows):
            tensors |= {f"{i}.{key}": value for key, value in self.steps.state[rows].items()}
        files.save_tensors(self.path, tensors, {"run": self.run, "done": str(self.done)})


def order(samples, seed):
    """Which text comes next, without end: all of them in a new order, again and again."""
    dice = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(samples, generator=dice).tolist()


def train(full, coded, texts, exact, state, args):
    """texts (N, T), without the prefix; exact: its rows in the full-precision model. state is brought to the end."""
    batch = batch_of(args, args.tokens)
    texts_of = islice(order(len(texts), args.seed), state.done * args.accumulate, None)
    with bar(None, "training", args.updates, unit="update") as progress:
        progress.update(state.done)
        while state.done < args.updates:
            chosen, total = texts[list(islice(texts_of, args.accumulate))], 0.0  # (accumulate, T)
            for part in chosen.split(batch):
                loss = block_loss(full, coded, part, exact, state.rows) * (len(part) / args.accumulate)
                loss.backward()
                total += loss.item()
            state.update(args.clip)
            progress.set_postfix(loss=f"{total:.5f}")
            progress.update()


@torch.no_grad()
def mean_loss(full, coded, texts, exact, rows, batch):
    """Eq. 2 over all texts (N, T)."""
    sums = [block_loss(full, coded, part, exact, rows).item() * len(part) for part in texts.split(batch)]
    return sum(sums) / len(texts)


def check(args):
    check_counts(args, 1, "samples", "updates", "accumulate", "windows", "calib-windows", "batch")
    for flag in ("lr", "clip"):
        if not getattr(args, flag) > 0:
            raise UserError(f"--{flag} must be above 0; got {getattr(args, flag)}")
    if Path(args.out).suffix != ".safetensors":
        raise UserError(f"--out is a name that ends in .safetensors; got {args.out}")
    check_folder("out", args.out)
    check_folder("calibration", args.calibration)


def run(args):
    check(args)
    device = checkpoint.usable(args.device)
    config = checkpoint.load_config(args.model)
    context = context_of(args, config, 4096)
    check_context(args.tokens, config, "tokens")
    tokenizer = checkpoint.load_tokenizer(args.model, config)
    prefix = open_prefix(args.prefix, tokenizer, config)
    (name, quantizer), = quantizers_of(args, config).items()
    if (args.calibration or args.calib_data) and not quantizer.needs_text:
        flag = "--calibration" if args.calibration else "--calib-data"
        raise UserError(f"{flag}: {name} learns nothing beforehand")
    full = checkpoint.load_model(args.model, device, dtype_of(args.dtype, device)).requires_grad_(False)
    texts, held_out = (load_windows(args.data, tokenizer, args.tokens, n, split, args.seed, prefix=prefix.ids)
                       .tokens[:, len(prefix.ids):].to(device)  # (n, T - prefix)
                       for n, split in ((args.samples, "calibration"), (args.windows, "test")))
    windows = load_windows(args.data, tokenizer, context, args.windows, "test", args.seed,
                           prefix=prefix.ids if len(prefix.ids) > 1 else [])  # BOS takes a token's place
    text, data = calibration_text(args, tokenizer, context, device) if quantizer.needs_text else (None, "")
    learned = Learned(args.calibration, full, data)
    coded = quantized(full, name, quantizer, text, learned).requires_grad_(False)
    learned.save()

    words = weights_in_words(name, quantizer, data)
    prefix.fill(full, coded, words)
    exact = [rows.to(device) for rows in exact_rows(full, full, prefix.ids)]  # (L, Hkv, n, d) both
    first = [rows.to(device).float() for rows in (prefix.keys, prefix.values)]
    fingerprint = checkpoint.fingerprint(full)
    state = State(f"{args.out}.state", f"model {fingerprint}; {words}; prefix {args.prefix} of {len(prefix.ids)}; "
                  f"{args.data}, {args.samples} x {args.tokens} tokens, {args.accumulate} an update, lr {args.lr:g}, "
                  f"clip {args.clip:g}, seed {args.seed}", *first, args.lr)
    print(f"model {args.model}, weights {words}")
    print(f"prefix {args.prefix}: {len(prefix.ids)} tokens, {sum(x.numel() for x in state.rows):,} parameters")
    if state.done:
        print(f"going on after {state.done} updates ({state.path})")
    train(full, coded, texts, exact, state, args)

    batch = batch_of(args, args.tokens)
    rows = {"none": exact_rows(coded, full, prefix.ids), "exact": first, "trained": state.rows}
    rows = {what: [x.detach().half().float().to(device) for x in of] for what, of in rows.items()}  # as they are kept
    losses = {what: [mean_loss(full, coded, of, exact, x, batch) for of in (texts, held_out)]
              for what, x in rows.items()}
    better = losses["trained"][0] <= losses["exact"][0]
    best = rows["trained" if better else "exact"]
    save_prefix(args.out, Prefix(args.out, prefix.ids, best[0].half(), best[1].half(), fingerprint, words))
    state.path.unlink(missing_ok=True)
    if not better:
        print("training did not lower the loss that it was to lower; the exact prefix is written instead")
    print(f"wrote {args.out}")

    methods = {what: IntactKV(config, Prefix(what, prefix.ids, *x)) for what, x in rows.items()}
    with bar(None, "evaluating", 4 * args.windows) as progress:
        results = evaluate(full, {"fp16": FP16(config), **methods}, windows, batch=batch_of(args, context),
                           bar=progress, models=dict.fromkeys(methods, coded))
    print()
    lines = [[name, what, *(f"{x:.4f}" for x in losses[what])] if what in losses else ["-"] * 4 for what in results]
    print_columns(("weights", "prefix", "loss", "held-out loss", "perplexity", "KL"), [
        [*line, f"{r.ppl:.4f}", f"{r.kl / r.targets:.4f}"] for line, r in zip(lines, results.values())], left=2)


def main():
    p = parser()
    with one_line(p, "stopped; the same command goes on after the last update"):
        run(p.parse_args())


if __name__ == "__main__":
    main()
