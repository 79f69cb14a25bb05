"""How long an evaluation takes, and a step of decoding, on one thread of a CPU, as ratios.

    python docs/programs/benchmark.py windows                   methods, schemes and protocols to fp16 in one forward
    python docs/programs/benchmark.py steps                     a step of decoding to one with Hugging Face's own cache
    python docs/programs/benchmark.py steps --method fp16,kivi  of some methods

All of them take turns in every round, so that changes of the machine's speed reach them alike. The figure is the median
of the rounds' ratios, of CPU time, which other programs on the machine hardly change. transformers is measured if it is
installed, and so is its QuantizedCache of 2 bits, if optimum-quanto is. Before a step, the caches are filled with the
model's own keys and values of text, window after window. Beside a step stand the bits of a cached number, everything
counted, and how many operations of torch the last layer calls, views left out: on a GPU these often set the pace.
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
from tinykv.tracing import Trace


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
    windows = load_windows(args.data, tokenizer, context, args.windows)
    calibration = load_windows(args.data, tokenizer, context, 4, "calibration").tokens

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
    rows = {name: (name, {}) for name in args.method}
    if "kivi" in rows:  # the format of quanto's cache, too
        rows["rtn, KIVI's groups, per token"] = "rtn", METHODS["kivi"].beside["rtn"]
    token = torch.zeros(1, 1, dtype=torch.long)
    context = min(args.context, min(args.tokens), model.config.max_position_embeddings)
    calibration = load_windows(args.data, tokenizer, context, 4, "calibration").tokens  # (W, T)
    for S in args.tokens:
        text = load_windows(args.data, tokenizer, context, -(-S // context)).tokens  # (W, T)
        filled = list(rows_of_text(model, text, S))
        sides, notes = {}, {}
        for label, (cache, numbers) in their_caches(theirs).items():
            for layer, (_, k, v, _) in enumerate(filled):
                cache.update(model.rope.rotate(k), v, layer)
            sides[label] = partial(theirs, token, past_key_values=cache, use_cache=True)
            notes[label] = f"{numbers:6.2f} bits {calls_of(theirs.model.layers[-1], sides[label]):5} calls a layer"
        for label, (name, settings) in rows.items():
            method = METHODS[name](model.config, **settings)
            calibrate(model, method, calibration)
            cache = KVCache(model, method)
            for layer, (q, k, v, hidden) in enumerate(filled):
                cache.update(layer, q, k, v, 0)
                cache.observe(layer, hidden)
            numbers = 8 * cache.nbytes / sum(k.numel() + v.numel() for _, k, v, _ in filled)
            sides[label] = partial(model, token, cache)
            notes[label] = f"{numbers:6.2f} bits {calls_of(model.model['layers'][-1], sides[label]):5} calls a layer"
        time_turns(f"a step after {S} tokens", sides, args.rounds, next(iter(sides)), notes)


def their_caches(theirs):
    """{label: (a cache of transformers, the bits of its numbers)}, of those that are installed."""
    if theirs is None:
        return {}
    from transformers import DynamicCache, QuantizedCache
    found = {"DynamicCache": (DynamicCache(), 32)}  # in the model's fp32
    if importlib.util.find_spec("optimum.quanto"):
        settings = {"nbits": 2, "q_group_size": 32, "residual_length": 128}
        bits = 2 + 2 * 32 / 32  # scale and zero point in fp32
        found["QuantizedCache, quanto"] = QuantizedCache("quanto", theirs.config, **settings), bits
    return found


@torch.no_grad()
def rows_of_text(model, text, S):
    """Of each layer, q (1, H, S, d), k and v (1, Hkv, S, d) before RoPE, and its output (1, S, D): those of windows
    (W, T), one after another."""
    traces = []
    for window in text:
        traces.append(Trace(model))
        model(window[None], traces[-1], logits=False)
    for layer in range(model.config.num_hidden_layers):
        windows = [(of.q[layer], of.k[layer], of.v[layer], of.hidden[layer]) for of in traces]
        yield [torch.cat(parts, dim=-2)[..., :S, :] for parts in zip(*windows)]


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
    p.add_argument("--data", metavar="TEXT", default="tales", help="what is read: tales, wikitext2 or a file")
    p.add_argument("--context", metavar="T", type=int, default=1024, help="tokens that are read in one forward")
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
