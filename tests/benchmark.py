"""How long an evaluation takes, as ratios: methods, schemes and protocols against fp16; fp16 against transformers.

    python tests/benchmark.py                on the embedded model
    python tests/benchmark.py --model DIR    on any other

All contenders take turns in every round, so that a machine's changing speed hits them alike; the figure is the median
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
from tinykv import checkpoint
from tinykv.command import EMBEDDED, Parser, check_counts, one_line
from tinykv.data import load_windows
from tinykv.evaluate import evaluate
from tinykv.methods import METHODS
from tinykv.schemes import SCHEMES


def contenders(args):
    """{name: a function that reads all windows once}, the fp16 one-shot evaluation first."""
    model, tokenizer = checkpoint.load(args.model)
    context = min(args.context, model.config.max_position_embeddings)
    windows = load_windows("tales", tokenizer, context, args.windows)
    calibration = load_windows("tales", tokenizer, context, 2, "calibration").tokens

    def reading(method, protocol):
        return lambda: evaluate(model, {"only": method}, windows, protocol, args.batch)

    methods = {name: cls(model.config) for name, cls in METHODS.items()}  # as they are
    for scheme in SCHEMES:
        for name in ("rtn", "kvsink"):
            if methods[name].scheme.name != scheme:
                methods[f"{name} {scheme}"] = METHODS[name](model.config, scheme=scheme)
    runs = {}
    for name, method in methods.items():
        method.calibrate(model, calibration)
        if method.prefix:
            method.prefix.fill(model, model)
        for protocol in ("paper", "stream"):
            runs[f"{name} {protocol}"] = reading(method, protocol)
    if importlib.util.find_spec("transformers"):
        runs["transformers, one shot"] = transformers_run(args.model, windows.tokens, args.batch)
    return runs


def transformers_run(folder, tokens, batch):
    """The same windows through LlamaForCausalLM: logits and the loss of every target, no cache."""
    import transformers
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def read():
        with torch.inference_mode():
            for part in tokens.split(batch):
                logits = model(part, use_cache=False).logits[:, :-1].float()  # (B, T - 1, vocab)
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="none")
                loss.view(len(part), -1).mean(1).tolist(), (logits.argmax(-1) == part[:, 1:]).sum().item()
    return read


def main():
    p = Parser(description=__doc__.splitlines()[0])
    p.add_argument("--model", metavar="DIR", default=str(EMBEDDED), help="a Hugging Face checkpoint folder")
    p.add_argument("--context", metavar="T", type=int, default=1024, help="tokens of a window")
    p.add_argument("--windows", metavar="W", type=int, default=8, help="windows to evaluate on")
    p.add_argument("--batch", metavar="B", type=int, default=4, help="windows at a time")
    p.add_argument("--rounds", metavar="N", type=int, default=7, help="rounds that are measured")
    p.add_argument("--threads", metavar="N", type=int, default=torch.get_num_threads(), help="of torch, on the CPU")
    with one_line(p):
        measure(p.parse_args())


def measure(args):
    check_counts(args, 1, "context", "windows", "batch", "rounds", "threads")
    torch.set_num_threads(args.threads)
    runs = contenders(args)
    seconds = {name: [] for name in runs}
    for turn in tqdm(range(args.rounds + 1), unit="round", disable=not sys.stderr.isatty()):
        for name, read in runs.items():
            clock = time.perf_counter()
            read()
            if turn:  # the first round warms up
                seconds[name].append(time.perf_counter() - clock)
    base = seconds["fp16 paper"]
    print(f"{args.windows} windows of {args.context} tokens, {args.batch} at a time, {args.threads} threads, "
          f"{args.rounds} rounds; time over that of fp16 in one shot: median (smallest - largest)")
    for name, times in seconds.items():
        ratios = [t / b for t, b in zip(times, base)]
        print(f"{name:32} {statistics.median(ratios):5.2f}  ({min(ratios):.2f} - {max(ratios):.2f})")


if __name__ == "__main__":
    main()
