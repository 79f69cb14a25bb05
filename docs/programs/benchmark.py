"""How long an evaluation takes, and a step of decoding, on one thread of a CPU, as ratios.

    python docs/programs/benchmark.py windows                   methods, schemes and protocols to fp16 in one forward
    python docs/programs/benchmark.py steps                     a step of decoding to one with Hugging Face's own cache
    python docs/programs/benchmark.py steps --method fp16,kivi  of some methods

All of them take turns in every round, so that changes of the machine's speed reach them alike. The figure is the median
of the rounds' ratios, of CPU time, which other programs on the machine hardly change. transformers is measured if it is
installed. Before a step, the caches are filled with random keys and values, which cost as much to read as any. Beside a
step stands how many operations of torch the last layer calls, views left out: on a GPU these often set the pace.
"""
import importlib.util
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[2]))
from tinykv import hf, one_of
from tinykv.cache import KVCache
from tinykv.calibrate import calibrate
from tinykv.cli import Parser, one_line
from tinykv.codecs.schemes import SCHEMES
from tinykv.data import load_windows
from tinykv.evaluate import measure
from tinykv.hf import EMBEDDED
from tinykv.methods.registry import METHODS
from tinykv.shared_flags import add_attention, check_counts, list_of


class Calls(TorchDispatchMode):
    """Counts the operations of torch that do something: an output that is a view of an input, or empty, is nothing."""
    number = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        outs = out if isinstance(out, (tuple, list)) else [out]
        inputs = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        is_view = all(x.untyped_storage().data_ptr() in inputs for x in outs if isinstance(x, torch.Tensor))
        is_written = operation._schema.is_mutable  # "copy_": its output is an input, too
        self.number += "empty" not in operation.__name__ and (is_written or not is_view)
        return out


@torch.inference_mode()
def calls_of(block, step):
    """How many operations a block calls in one step."""
    calls = Calls()
    hooks = [block.register_forward_pre_hook(lambda *_: calls.__enter__() and None),
             block.register_forward_hook(lambda *_: calls.__exit__(None, None, None))]
    step()
    for hook in hooks:
        hook.remove()
    return calls.number


@torch.inference_mode()
def time_turns(what, sides, rounds, base, notes=None):
    """Print the time of each of {label: what to call}, over that of the label `base`, and its note."""
    seconds = {label: [] for label in sides}
    for turn in tqdm(range(rounds + 1), what, unit="round", leave=False, disable=not sys.stderr.isatty()):
        for label, side in sides.items():
            clock = time.process_time()
            side()
            if turn > 0:  # the first round warms up
                seconds[label].append(time.process_time() - clock)
    print(f"{what}: median (smallest - largest) of {rounds} rounds, over {base}")
    for label, times in seconds.items():
        ratios = [t / b for t, b in zip(times, seconds[base])]
        print(f"{label:32} {1000 * statistics.median(times):10.2f} ms  {statistics.median(ratios):5.2f}"
              f"  ({min(ratios):.2f} - {max(ratios):.2f}){notes[label] if notes else ''}", flush=True)


def time_windows(args, model, tokenizer, theirs):
    """All windows, read once through the caches of each method."""
    context = min(args.context, model.config.max_position_embeddings)
    windows = load_windows("tales", tokenizer, context, args.windows)
    calibration = load_windows("tales", tokenizer, context, 4, "calibration").tokens

    # every method as it is, and rtn and kvsink under every other scheme
    methods = {name: cls(model.config) for name, cls in METHODS.items()}
    for scheme in SCHEMES:
        for name in ("rtn", "kvsink"):
            if methods[name].scheme != scheme:
                methods[f"{name} {scheme}"] = METHODS[name](model.config, scheme=scheme)
    sides = {}
    for name, method in methods.items():
        if not method.prefix:  # or it can be evaluated only beside fp16
            calibrate(model, method, calibration)
            for protocol in ("paper", "stream"):
                sides[f"{name} {protocol}"] = partial(measure, model, method, windows, protocol, batch=4)
    if theirs is not None:
        sides["transformers, one forward"] = partial(read_windows, theirs, windows.tokens)
    time_turns(f"{args.windows} windows of {context} tokens", sides, args.rounds, "fp16 paper")


def read_windows(theirs, tokens):
    """The same windows (W, T) through LlamaForCausalLM: logits and the loss of every target, no cache."""
    for part in tokens.split(4):  # (B, T)
        targets = part[:, 1:]  # (B, T - 1)
        logits = theirs(part, use_cache=False).logits[:, :-1].float()  # (B, T - 1, vocab)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        loss.view(len(part), -1).mean(1).tolist()
        (logits.argmax(-1) == targets).sum().item()


def time_steps(args, model, tokenizer, theirs):
    """One more token, read through a cache of S tokens."""
    for name in args.method:
        one_of(METHODS, method=name)
    token = torch.zeros(1, 1, dtype=torch.long)
    rng = torch.Generator().manual_seed(0)
    text = torch.randint(0, model.config.vocab_size, (2, 256), generator=rng)  # (W, T)
    for S in args.tokens:
        sides, notes = {}, {}
        if theirs is not None:
            import transformers
            cache = transformers.DynamicCache()
            for layer, (_, k, v) in enumerate(random_rows(model.config, S)):
                cache.update(k, v, layer)
            sides["transformers"] = partial(theirs, token, past_key_values=cache, use_cache=True)
            notes["transformers"] = calls_of(theirs.model.layers[-1], sides["transformers"])
        for name in args.method:
            method = METHODS[name](model.config)
            calibrate(model, method, text)
            cache = KVCache(model, method)
            for layer, (q, k, v) in enumerate(random_rows(model.config, S)):
                cache.update(layer, q, k, v, 0)
            sides[name] = partial(model, token, cache)
            notes[name] = calls_of(model.model["layers"][-1], sides[name])
        notes = {label: f"{number:5} calls a layer" for label, number in notes.items()}
        time_turns(f"a step after {S} tokens", sides, args.rounds, next(iter(sides)), notes)


def random_rows(config, T):
    """Of each layer, q (1, H, T, d), k and v (1, Hkv, T, d)."""
    rng = torch.Generator().manual_seed(0)
    heads = config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads
    for _ in range(config.num_hidden_layers):
        yield [torch.randn(1, n, T, config.head_dim, generator=rng) for n in heads]


def compare(args):
    check_counts(args, 1, "context", "windows", "rounds")
    torch.set_num_threads(1)
    model, tokenizer = hf.load(args.model)
    model.use_attention(args.attention)
    theirs = None
    if importlib.util.find_spec("transformers"):
        import transformers
        theirs = transformers.LlamaForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    {"windows": time_windows, "steps": time_steps}[args.what](args, model, tokenizer, theirs)


def main():
    p = Parser(description=__doc__.splitlines()[0])
    p.add_argument("what", choices=["windows", "steps"], help="an evaluation, or a step of decoding")
    p.add_argument("--model", metavar="DIR", default=str(EMBEDDED), help="a Hugging Face checkpoint folder")
    p.add_argument("--rounds", metavar="N", type=int, default=7, help="rounds that are measured")
    p.add_argument("--context", metavar="T", type=int, default=1024, help="windows: tokens of one")
    p.add_argument("--windows", metavar="W", type=int, default=8, help="windows: to evaluate on")
    without_prefix = [name for name in METHODS if name != "intactkv"]
    p.add_argument("--method", metavar="NAME,...", type=list_of(str), default=without_prefix,
                   help="steps: of which (default: all but intactkv, which needs a prefix)")
    p.add_argument("--tokens", metavar="S,...", type=list_of(int), default=[1024, 4096, 16384],
                   help="steps: tokens in the cache before the first one")
    add_attention(p)
    with one_line(p):
        compare(p.parse_args())


if __name__ == "__main__":
    main()
