"""How long a step of decoding takes on one thread of a CPU, over one that reads 16 bits.

    python docs/programs/benchmark.py
    python docs/programs/benchmark.py --method fp16,kivi --tokens 4096

The caches are filled with the model's own keys and values of text, window after window, and take turns in every round,
so that changes of the machine's speed reach them alike. The figure is the median of the rounds' ratios, of CPU time,
which other programs on the machine hardly change. It is over fp16 with `compiled`, if that is measured: over 16 bits in
the same loop. transformers' caches are measured if it is installed, its QuantizedCache of 2 bits if optimum-quanto, or
hqq, is. Beside a step stand the bits of a cached number, everything counted, and how many operations of torch the last
layer calls, views left out: on a GPU these often set the pace. What torch compiles calls none.
"""
import importlib.util
import statistics
import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from tinykv import hf, one_of  # before torch: it says how torch's threads wait

# isort: split
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm import trange

from tinykv.cache import KVCache
from tinykv.calibrate import calibrate
from tinykv.hf import EMBEDDED
from tinykv.lab.cli import Parser, one_line
from tinykv.lab.compiled_cache import CompiledCache
from tinykv.lab.data import load_windows
from tinykv.lab.shared_flags import list_of
from tinykv.methods.registry import METHODS
from tinykv.model import Trace

ROUNDS, WINDOW = 7, 1024  # WINDOW: tokens that are read in one forward
TOKEN = torch.zeros(1, 1, dtype=torch.long)  # that a step reads
CACHES = {"fused": KVCache, "compiled": CompiledCache}


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
def time_turns(what, steps, notes):
    """Print the time of each of {label: what to call} over that of fp16, or of the first, and its note."""
    seconds = {label: [] for label in steps}
    for turn in trange(ROUNDS + 1, desc=what, unit="round", leave=False, disable=None):
        for label, step in steps.items():
            clock = time.process_time()
            step()
            if turn > 0:  # the first round warms up
                seconds[label].append(time.process_time() - clock)
    first = "fp16 compiled" if "fp16 compiled" in steps else next(iter(steps))
    print(f"{what}: median (smallest - largest) of {ROUNDS} rounds, over {first}")
    for label, times in seconds.items():
        ratios = [t / base for t, base in zip(times, seconds[first])]
        print(f"{label:32} {1000 * statistics.median(times):10.2f} ms  {statistics.median(ratios):5.2f}"
              f"  ({min(ratios):.2f} - {max(ratios):.2f}){notes[label]}", flush=True)


def compare(args, model, tokenizer, theirs):
    """One more token, read through a cache of S tokens."""
    context = min(WINDOW, *args.tokens, model.config.max_position_embeddings)
    # how long a step takes does not depend on what the model was made for
    model.config.max_position_embeddings = max(model.config.max_position_embeddings, *args.tokens) + 1000
    calibration = load_windows(args.data, tokenizer, context, 4, "calibration").tokens  # (W, T)
    for S in args.tokens:
        filled = list(rows_of_text(model, load_windows(args.data, tokenizer, context, -(-S // context)).tokens, S))
        steps, notes = {}, {}
        for label, block, step, bits in [*their_steps(theirs, model, filled),
                                         *steps_of(args.method, model, filled, calibration, args.attention)]:
            calls = "" if label.endswith(" compiled") else f" {calls_of(block, step):5} calls a layer"
            steps[label], notes[label] = step, f"{bits:6.2f} bits{calls}"
        time_turns(f"a step after {S} tokens", steps, notes)


def steps_of(names, model, filled, calibration, attentions=("fused",)):
    """Yield of each method, and each attention, its label, the last layer, what takes a step, and the bits of a number.
    filled: of `rows_of_text`."""
    rows = {name: (name, {}) for name in names}
    if "kivi" in rows:  # the format of quanto's cache, too
        rows["rtn, KIVI's groups, per token"] = "rtn", METHODS["kivi"].beside["rtn"]
    for label, (name, settings) in rows.items():
        method = METHODS[name](model.config, **settings)
        calibrate(model, method, calibration)
        for attention in attentions:
            cache = CACHES[attention](model, method)
            for layer, (q, k, v, hidden) in enumerate(filled):
                cache.update(layer, q, k, v, 0)
                cache.observe(layer, hidden)
            bits = 8 * cache.nbytes / sum(k.numel() + v.numel() for _, k, v, _ in filled)
            words = label if attention == "fused" else f"{label} {attention}"
            yield words, model.model["layers"][-1], partial(step_of, model, cache, attention), bits


def step_of(model, cache, attention):
    """One more token."""
    model.use_attention(attention)
    return model(TOKEN, cache)


def their_steps(theirs, model, filled):
    """The same of the caches of transformers that are installed."""
    if theirs is None:
        return
    from transformers import DynamicCache, QuantizedCache
    caches = {"DynamicCache": (DynamicCache(), 32)}  # in the model's fp32
    for backend, package, axis in (("quanto", "optimum", 0), ("hqq", "hqq", 1)):
        if importlib.util.find_spec(package):
            settings = {"nbits": 2, "q_group_size": 32, "residual_length": 128, "axis_key": axis, "axis_value": axis}
            bits = 2 + 2 * 32 / 32  # scale and zero point in fp32
            caches[f"QuantizedCache, {backend}"] = QuantizedCache(backend, theirs.config, **settings), bits
    for label, (cache, bits) in caches.items():
        for layer, (_, k, v, _) in enumerate(filled):
            cache.update(model.rope.rotate(k), v, layer)
        yield label, theirs.model.layers[-1], partial(theirs, TOKEN, past_key_values=cache, use_cache=True), bits


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


def main():
    p = Parser(description=__doc__.splitlines()[0])
    p.add_argument("--model", metavar="DIR", default=str(EMBEDDED), help="a Hugging Face checkpoint folder")
    p.add_argument("--data", metavar="TEXT", default="tales", help="what is read: tales, wikitext2 or a file")
    p.add_argument("--method", metavar="NAME,...", type=list_of(str),
                   default=[name for name in METHODS if name != "intactkv"],
                   help="of which (default: all but intactkv, which needs a prefix)")
    p.add_argument("--attention", metavar="WORD,...", type=list_of(str), default=list(CACHES),
                   help="fused, compiled (default: both)")
    p.add_argument("--tokens", metavar="S,...", type=list_of(int), default=[1024, 4096, 16384],
                   help="tokens in the cache before the first one")
    with one_line(p):
        args = p.parse_args()
        for name in args.method:
            one_of(METHODS, method=name)
        for word in args.attention:
            one_of(CACHES, attention=word)
        torch.set_num_threads(1)
        model, tokenizer = hf.load(args.model)
        theirs = None
        if importlib.util.find_spec("transformers"):
            from transformers import LlamaForCausalLM
            theirs = LlamaForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
        compare(args, model, tokenizer, theirs)


if __name__ == "__main__":
    main()
