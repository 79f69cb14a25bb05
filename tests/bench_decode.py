"""How long one step of decoding takes on a CPU, as a ratio to Hugging Face's own cache.

    python tests/bench_decode.py                     the embedded model's shape, at 1K, 4K and 16K tokens
    python tests/bench_decode.py --method fp16,kivi  other methods

A step reads one new token. The other side is transformers' LlamaForCausalLM with a DynamicCache, on the same weights,
or fp16 of tinykv where transformers is not installed. All take turns, step by step, in one process and on one thread.
Figures are medians, of CPU time, which other programs on the machine hardly change. The caches are filled with random
keys and values, which cost as much to read as any.

At the end: how much longer the scores of `antkv` take in a longer window under `paper`, and how much longer attention
itself takes.
"""
import importlib.util
import statistics
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parent.parent))
from tinykv import UserError, hf, one_of
from tinykv.cache import KVCache
from tinykv.calibrate import calibrate
from tinykv.methods.registry import METHODS
from tinykv.run.cli import EMBEDDED, Parser, add_attention, check_counts, list_of, one_line


class Decoding:
    """A model with the cache of one method, which holds S random tokens."""

    def __init__(self, model, method, S):
        self.model, self.cache = model, KVCache(model, method)
        config = model.config
        for layer in range(config.num_hidden_layers):
            q, k, v = random_qkv(config, S)
            self.cache.update(layer, q, k, v, torch.arange(S))

    def step(self, token):
        return self.model(token, self.cache)


class TransformersDecoding:
    """The same in transformers."""

    def __init__(self, model, S):
        import transformers
        self.model, self.cache = model, transformers.DynamicCache()
        for layer in range(model.config.num_hidden_layers):
            _, k, v = random_qkv(model.config, S)
            self.cache.update(k, v, layer)

    def step(self, token):
        return self.model(token, past_key_values=self.cache, use_cache=True).logits


def random_qkv(config, T):
    """q (1, H, T, d), k and v (1, Hkv, T, d)."""
    rng = torch.Generator().manual_seed(0)
    heads = config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads
    return [torch.randn(1, n, T, config.head_dim, generator=rng) for n in heads]


def made(name, model):
    """A method of that name at its own settings, at 2 bits where it takes bits; calibrated on random tokens."""
    one_of(METHODS, method=name)
    method = METHODS[name](model.config)
    if method.prefix:
        raise UserError(f"{name} needs a prefix's keys and values; leave it out")
    rng = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, model.config.vocab_size, (2, 256), generator=rng)  # (W, T)
    if method.needs_calibration:
        calibrate(model, method, tokens)
    return method


@torch.inference_mode()
def measure_steps(args, methods, model, theirs):
    """Print a step's time at each number of tokens, transformers' first."""
    for S in args.tokens:
        sides = {}  # {label: Decoding}
        if theirs is not None:
            sides["transformers"] = TransformersDecoding(theirs, S)
        for name, method in methods.items():
            sides[name] = Decoding(model, method, S)
        seconds = {label: [] for label in sides}
        token = torch.zeros(1, 1, dtype=torch.long)
        for turn in tqdm(range(args.steps + 2), f"{S} tokens", unit="step", disable=not sys.stderr.isatty(),
                         leave=False):
            for label, side in sides.items():
                clock = time.process_time()
                side.step(token)
                if turn > 1:  # the first steps warm up
                    seconds[label].append(time.process_time() - clock)
        base, *_ = seconds
        for label, times in seconds.items():
            ratios = [t / b for t, b in zip(times, seconds[base])]
            print(f"{S:6} tokens  {label:14} {1000 * statistics.median(times):8.2f} ms"
                  f"  {statistics.median(ratios):5.2f} x {base}", flush=True)


@torch.inference_mode()
def measure_windows(args, model, method):
    """One layer of a window under `paper`, at each length: what antkv's cache takes, and what attention takes."""
    config = model.config
    heads = config.num_attention_heads // config.num_key_value_heads
    seconds = {"attention": [], "antkv": []}
    for T in args.windows:
        q, k, v = random_qkv(config, T)
        clock = time.process_time()
        K, V = KVCache(model, method, "paper").update(0, q, k, v, torch.arange(T))
        seconds["antkv"].append(time.process_time() - clock)
        K, V = K.repeat_interleave(heads, 1), V.repeat_interleave(heads, 1)  # (1, H, T, d) both
        clock = time.process_time()
        torch.nn.functional.scaled_dot_product_attention(q, K, V, is_causal=True)
        seconds["attention"].append(time.process_time() - clock)
    for name, times in seconds.items():
        for T, time_taken in zip(args.windows, times):
            print(f"{T:6} tokens of a window  {name:9} {time_taken:6.2f} s  {time_taken / times[0]:4.1f} x the first")


def measure(args):
    check_counts(args, 1, "steps", "threads")
    torch.set_num_threads(args.threads)
    model, _ = hf.load(args.model)
    model.use_attention(args.attention)
    theirs = None
    if importlib.util.find_spec("transformers"):
        import transformers
        theirs = transformers.LlamaForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    measure_steps(args, {name: made(name, model) for name in args.method}, model, theirs)
    measure_windows(args, model, made("antkv", model))


def main():
    p = Parser(description=__doc__.splitlines()[0])
    p.add_argument("--model", metavar="DIR", default=str(EMBEDDED), help="a Hugging Face checkpoint folder")
    p.add_argument("--method", metavar="NAME,...", type=list_of(str), default=["fp16", "rtn"], help="of tinykv")
    p.add_argument("--tokens", metavar="S,...", type=list_of(int), default=[1024, 4096, 16384],
                   help="in the cache before the first step")
    p.add_argument("--steps", metavar="N", type=int, default=40, help="that are measured")
    p.add_argument("--windows", metavar="T,...", type=list_of(int), default=[8192, 16384],
                   help="lengths of a window that antkv quantizes")
    p.add_argument("--threads", metavar="N", type=int, default=1, help="of torch")
    add_attention(p)
    with one_line(p):
        measure(p.parse_args())


if __name__ == "__main__":
    main()
