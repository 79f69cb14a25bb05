"""Train IntactKV's prefix: the first tokens' keys and values, for a model with quantized weights.

    python train_intact.py --weights rtn --w-bits 3 --prefix bos --out trained.safetensors
    python eval_ppl.py --method intactkv --weights rtn --w-bits 3 --prefix bos,trained.safetensors
"""
import math
from pathlib import Path

from tinykv import UserError, hf  # before torch: it says how torch's threads wait

# isort: split
import torch

from tinykv.lab import cli, shared_flags
from tinykv.lab.data import load_windows
from tinykv.lab.prefixes import FORMAT, open_prefix, save_prefix
from tinykv.lab.run.calibration import fill_prefix, quantized_model, weights_label
from tinykv.lab.tables import Tables, fingerprint, hash_of, load_tensors, save_tensors
from tinykv.methods.intactkv import Prefix, exact_rows
from tinykv.model import Trace

STATE = "tinykv-training"  # what the file of a run says that it is


def parser():
    p = cli.Parser(
        description="Train the keys and values of a prefix, so that a model with quantized weights computes what the\n"
                    "full-precision model does (IntactKV, Eq. 2).",
        epilog="The state of a run is kept in OUT.state after every update; the same command goes on from there.")
    p.add_argument("--out", metavar="FILE", required=True, help="the trained prefix (.safetensors)")
    p.add_argument("--prefix", metavar="bos|FILE", default="bos",
                   help="what texts begin with: BOS, a text file, or a trained prefix to go on with (.safetensors)")
    shared_flags.add_model(p)
    shared_flags.add_attention(p)
    s = p.add_argument_group("training", "on the calibration part of --data; its test part is held out")
    s.add_argument("--samples", metavar="N", type=int, default=128, help="texts to train on")
    s.add_argument("--tokens", metavar="T", type=int, default=256, help="tokens of each, the prefix included")
    s.add_argument("--updates", metavar="N", type=int, default=160, help="updates in all")
    s.add_argument("--accumulate", metavar="N", type=int, default=16, help="texts of an update")
    s.add_argument("--lr", type=float, default=2e-4, help="learning rate of AdamW, constant")
    s.add_argument("--clip", type=float, default=0.3, help="largest norm of a gradient")
    s.add_argument("--seed", type=int, default=0, help="which tales are read, and in which order the texts come")
    s.add_argument("--batch", metavar="B", type=int, help="texts at a time (default: about 4096 tokens)")
    shared_flags.add_weights(p, several=False)
    s = p.add_argument_group("held-out texts, and calibration of the quantizer")
    shared_flags.add_windows(s, windows=16, longest=4096)
    shared_flags.add_calibration(s)
    return p


class State:
    """The prefix's rows, one parameter, with its optimizer, and the file of both: a run can be stopped at any time.

    keys, values (L, Hkv, n, d): where training begins. made_of: the `hash_of` the run; UserError if the file is
    damaged, or that of another run.
    """

    def __init__(self, path, made_of, keys, values, lr):
        self.path, self.made_of, self.done = Path(path), made_of, 0
        self.rows = torch.nn.Parameter(torch.stack([keys, values]))  # (2, L, Hkv, n, d)
        self.optimizer = torch.optim.AdamW([self.rows], lr=lr, weight_decay=0)
        if self.path.exists():
            self.load()

    def update(self, clip):
        """One step of AdamW, with the norm of the gradient clipped; then save."""
        torch.nn.utils.clip_grad_norm_(self.rows, clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.done += 1
        self.save()

    def save(self):
        notes = {"format": STATE, "made of": self.made_of, "done": str(self.done)}
        save_tensors(self.path, {"rows": self.rows, **self.optimizer.state[self.rows]}, notes)

    def load(self):
        tensors, notes = load_tensors(self.path, STATE, self.rows.device)
        if notes["made of"] != self.made_of:
            raise UserError(f"{self.path} is the state of another run, of other settings, texts or "
                            "source; remove it to begin anew, or give another --out")
        self.done = int(notes["done"])
        self.rows.data = tensors.pop("rows")
        self.optimizer.state[self.rows] = tensors  # the moments


def text_order(samples, seed, length):
    """The order of the texts, `length` indices: all in a random order, then in another, ..."""
    rng, rounds = torch.Generator().manual_seed(seed), math.ceil(length / samples)
    return torch.cat([torch.randperm(samples, generator=rng) for _ in range(rounds)])[:length].tolist()


def train(full, quantized, texts, exact, state, args):
    """Bring `state` to the last update.

    texts: tokens (N, T) after the prefix. exact: the prefix's (keys, values) in the full-precision model.
    """
    batch = shared_flags.batch_of(args.batch, args.tokens)
    order = text_order(len(texts), args.seed, args.updates * args.accumulate)
    with cli.bar(None, "training", args.updates, unit="update") as progress:
        progress.update(state.done)
        while state.done < args.updates:
            # the texts of this update
            begin = state.done * args.accumulate
            chosen = order[begin:begin + args.accumulate]

            # their mean loss, a batch at a time: the gradients of the batches add up
            total = 0.0
            for i in range(0, len(chosen), batch):
                part = chosen[i:i + batch]
                loss = block_loss(full, quantized, texts[part], exact, state.rows)
                loss = loss * (len(part) / args.accumulate)
                loss.backward()
                total += loss.item()
            check_loss(total)

            # one step of AdamW
            state.update(args.clip)
            progress.set_postfix(loss=f"{total:.5f}")
            progress.update()


@torch.no_grad()
def mean_loss(full, quantized, texts, exact, prefix_rows, batch):
    """Eq. 2 over all texts, as in `train`, if the prefix has the (keys, values) `prefix_rows`."""
    total = 0.0
    for part in texts.split(batch):
        total += block_loss(full, quantized, part, exact, prefix_rows).item() * len(part)
    check_loss(total)
    return total / len(texts)


def block_loss(full, quantized, tokens, exact, trained):
    """Eq. 2 as a mean over tokens and channels: how far `quantized`'s blocks are from `full`'s.

    tokens (B, T): a text after the prefix. exact, trained: the prefix's (keys, values), for `full` and for `quantized`,
    (L, Hkv, n, d) each.
    """
    with torch.no_grad():
        targets = block_outputs(full, tokens, *exact)
    outputs = block_outputs(quantized, tokens, *trained)
    loss = 0.0
    for output, target in zip(outputs, targets):
        error = output.float() - target.float()  # (B, T, D)
        loss = loss + error.pow(2).mean()
    return loss / 2


def block_outputs(model, tokens, keys, values):
    """The output of every block, (B, T, D) each, for tokens (B, T) after a prefix."""
    trace = Trace(model, keys, values)
    model(tokens, trace, logits=False)
    return trace.hidden


def check_loss(loss):
    if not math.isfinite(loss):
        raise UserError("the loss is not finite; give a smaller --lr, or another --dtype")


def load_texts(args, prefix):
    """The texts to train on, and those that are held out, both without the prefix: tokens (N, T)."""
    texts = []
    for split, n in (("calibration", args.samples), ("test", args.windows)):
        windows = load_windows(args.data, args.tokenizer, args.tokens, n, split, args.seed, prefix=prefix)
        texts.append(windows.tokens[:, len(prefix):].to(args.device))  # (n, T)
    return texts


def check(args):
    """Refuse what is visibly wrong before anything is loaded."""
    shared_flags.check_counts(args, 1, "samples", "updates", "accumulate", "batch")
    for flag, value in (("lr", args.lr), ("clip", args.clip)):
        if not value > 0:  # refuses NaN as well
            raise UserError(f"--{flag} must be above 0; got {value}")
    if Path(args.out).suffix != ".safetensors":
        raise UserError(f"--out is a name that ends in .safetensors; got {args.out}")
    args.state = f"{args.out}.state"
    shared_flags.check_outputs(args, out=FORMAT, state=STATE, calibration="folder")


def run(args):
    check(args)
    shared_flags.set_up(args, longest=4096)
    shared_flags.check_context(args.tokens, args.config, "tokens")
    prefix = open_prefix(args.prefix, args.tokenizer)
    args.bos = "none" if args.tokenizer.bos_id is None else "replace"  # in texts without the prefix
    (name, quantizer), = shared_flags.quantizers_of(args).items()

    # 1. The full-precision model
    full = hf.load_model(args.folder, args.devices, args.dtype)
    full.use_attention(args.attention)

    # 2. The texts: to train on, and held out, both without the prefix
    texts, held_out = load_texts(args, prefix.ids)

    # 3. The model with quantized weights
    calibration_windows = None
    if quantizer.needs_text:
        calibration_windows = shared_flags.calibration_text(args, test=held_out)  # (C, T)
    quantized = quantized_model(full, name, quantizer, calibration_windows, Tables(args.calibration, full))
    quantized.requires_grad_(False)

    # 4. The prefix's (keys, values), (L, Hkv, n, d) each: exact ones, and those to begin with
    weights = weights_label(name, quantizer, args.calib_data or args.data, calibration_windows)
    fill_prefix(prefix, full, quantized, weights)
    exact = [rows.to(args.device) for rows in exact_rows(full, full, prefix.ids)]
    first = [rows.to(args.device).float() for rows in (prefix.keys, prefix.values)]

    # 5. Train
    trained_for = {"model": fingerprint(full), "weights": weights}
    settings = [args.accumulate, args.lr, args.clip, args.seed]
    made_of = hash_of(trained_for, prefix.ids, *first, texts, settings)
    state = State(args.state, made_of, *first, args.lr)
    print(f"model {args.model}, weights {weights}")
    print(f"prefix {args.prefix}: {len(prefix.ids)} tokens, {state.rows.numel():,} parameters")
    if state.done > args.updates:
        raise UserError(f"{state.path} has {state.done} updates, more than --updates {args.updates}; ask for as many, "
                        "or remove it to begin anew")
    if state.done:
        print(f"going on after {state.done} updates ({state.path})")
    train(full, quantized, texts, exact, state, args)

    # 6. Eq. 2 with the prefix of the quantized model, of the full-precision model, and trained
    keys, values = state.rows.detach().half()  # as the file keeps them
    rows = {
        "none": exact_rows(quantized, full, prefix.ids),
        "exact": exact_rows(full, quantized, prefix.ids),
        "trained": (keys, values),
    }
    batch, lines = shared_flags.batch_of(args.batch, args.tokens), []
    for what, pair in rows.items():
        pair = [x.half().float() for x in pair]
        losses = [mean_loss(full, quantized, part, exact, pair, batch) for part in (texts, held_out)]
        lines.append([what, *(f"{loss:.4f}" for loss in losses)])
    print(cli.Columns(["prefix", "loss", "held-out loss"], lines, left=1))

    # 7. Write the trained prefix
    save_prefix(args.out, Prefix(args.out, prefix.ids, keys, values, trained_for))
    state.path.unlink(missing_ok=True)
    print(f"wrote {args.out}")


def main():
    cli.run(parser(), run, "stopped; the same command goes on after the last update")


if __name__ == "__main__":
    main()
