"""How long an evaluation takes, as ratios: methods, schemes and protocols to fp16; fp16 to transformers.

    python tests/benchmark.py                on the embedded model
    python tests/benchmark.py --model DIR    on any other

All of them take turns in every round, so that changes of the machine's speed reach them alike. The figure is the median
of the rounds' ratios. transformers is measured if it is installed.
"""
import importlib.util
import statistics
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parent.parent))
from tinykv import hf
from tinykv.calibrate import calibrate
from tinykv.codecs import SCHEMES
from tinykv.data import load_windows
from tinykv.evaluate import evaluate
from tinykv.methods.registry import METHODS
from tinykv.run.cli import EMBEDDED, Parser, add_attention, check_counts, one_line


class Reading:
    """All windows, read once through the caches of one method."""

    def __init__(self, model, method, windows, protocol, batch):
        self.arguments = model, {"only": method}, windows, protocol, batch

    def __call__(self):
        evaluate(*self.arguments)


class TransformersReading:
    """The same windows through LlamaForCausalLM: logits and the loss of every target, no cache."""

    def __init__(self, folder, tokens, batch):
        import transformers
        self.model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokens, self.batch = tokens, batch

    @torch.inference_mode()
    def __call__(self):
        for part in self.tokens.split(self.batch):  # (B, T)
            targets = part[:, 1:]  # (B, T - 1)
            logits = self.model(part, use_cache=False).logits[:, :-1].float()  # (B, T - 1, vocab)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
            loss.view(len(part), -1).mean(1).tolist()
            (logits.argmax(-1) == targets).sum().item()


def readings(args):
    """{label: what reads all windows once}, fp16 in one forward first."""
    model, tokenizer = hf.load(args.model)
    model.use_attention(args.attention)
    context = min(args.context, model.config.max_position_embeddings)
    windows = load_windows("tales", tokenizer, context, args.windows)
    calibration = load_windows("tales", tokenizer, context, 4, "calibration").tokens

    # every method as it is, and rtn and kvsink under every other scheme
    methods = {name: cls(model.config) for name, cls in METHODS.items()}
    for scheme in SCHEMES:
        for name in ("rtn", "kvsink"):
            if methods[name].scheme != scheme:
                methods[f"{name} {scheme}"] = METHODS[name](model.config, scheme=scheme)

    found = {}
    for name, method in methods.items():
        if method.prefix:  # its own predictions are fp16's, so it can be evaluated only beside fp16
            print(f"{name} is left out: it needs fp16 in the same run")
            continue
        calibrate(model, method, calibration)
        for protocol in ("paper", "stream"):
            found[f"{name} {protocol}"] = Reading(model, method, windows, protocol, args.batch)
    if importlib.util.find_spec("transformers"):
        found["transformers, one forward"] = TransformersReading(args.model, windows.tokens, args.batch)
    return found


def measure(args):
    check_counts(args, 1, "context", "windows", "batch", "rounds", "threads")
    torch.set_num_threads(args.threads)
    found = readings(args)
    seconds = {label: [] for label in found}
    for turn in tqdm(range(args.rounds + 1), unit="round", disable=not sys.stderr.isatty()):
        for label, read in found.items():
            clock = time.perf_counter()
            read()
            if turn > 0:  # the first round warms up
                seconds[label].append(time.perf_counter() - clock)

    print(f"{args.windows} windows of {args.context} tokens, {args.batch} at a time, {args.threads} threads, "
          f"{args.rounds} rounds, attention {args.attention}; time over that of fp16 in one forward: "
          "median (smallest - largest)")
    for label, times in seconds.items():
        ratios = [t / base for t, base in zip(times, seconds["fp16 paper"])]
        print(f"{label:32} {statistics.median(ratios):5.2f}  ({min(ratios):.2f} - {max(ratios):.2f})")


def main():
    p = Parser(description=__doc__.splitlines()[0])
    p.add_argument("--model", metavar="DIR", default=str(EMBEDDED), help="a Hugging Face checkpoint folder")
    p.add_argument("--context", metavar="T", type=int, default=1024, help="tokens of a window")
    p.add_argument("--windows", metavar="W", type=int, default=8, help="windows to evaluate on")
    p.add_argument("--batch", metavar="B", type=int, default=4, help="windows at a time")
    p.add_argument("--rounds", metavar="N", type=int, default=7, help="rounds that are measured")
    p.add_argument("--threads", metavar="N", type=int, default=torch.get_num_threads(), help="of torch, on the CPU")
    add_attention(p)
    with one_line(p):
        measure(p.parse_args())


if __name__ == "__main__":
    main()
