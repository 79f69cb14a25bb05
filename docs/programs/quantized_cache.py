"""transformers' own QuantizedCache beside KIVI, as generation reads them: docs/serving.md.

    pip install transformers optimum-quanto
    python docs/programs/quantized_cache.py --model path/to/SmolLM2-135M-Instruct --data wikitext2-test.txt

Of each window of 512 tokens, 256 are read in one forward, and then one at a time. The loss is that of the latter 256,
above that of transformers' plain cache. True bits are those at the end of a window. docs/results.json keeps the rows.
"""
import argparse

import torch
from results import OWN, UNIT, WINDOWS, read_data, write_data
from torch.nn.functional import cross_entropy

from tinykv import hf
from tinykv.lab.data import load_windows
from tinykv.methods.registry import METHODS

T, PROMPT = 512, 256
# {row: (backend, settings) of transformers, or a method of this project and its settings}
ROWS = {"plain": None}
for bits in (4, 2):
    ROWS |= {f"quanto, {bits} bits": ("quanto", {"nbits": bits}),
             f"`kivi --group-size 64 --recent 64`, {bits} bits":
                 ("kivi", {"k_bits": bits, "v_bits": bits, "group_size": 64, "recent": 64})}
ROWS |= {"quanto, 4 bits, <code>axis_key=-1</code>": ("quanto", {"nbits": 4, "axis_key": -1})}


def cache_of(row, model, config):
    """A cache of transformers, and a function that gives its true bits when it is full."""
    from transformers import DynamicCache, QuantizedCache

    from tinykv.lab.transformers import MethodCache
    if row is None:
        return DynamicCache(config=model.config), lambda: 16
    name, settings = row
    if name not in METHODS:
        cache = QuantizedCache(name, model.config, **settings)
        group, newest = 64, (T - 1 - PROMPT) % 128  # a group has 16 bits of scale and 16 of zero point
        return cache, lambda: settings["nbits"] + 32 / group + (16 - settings["nbits"] - 32 / group) * newest / (T - 1)
    cache = MethodCache(model, METHODS[name](config, **settings))
    numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * (T - 1)  # of a window
    return cache, lambda: 8 * cache.nbytes / (numbers * len(cache.texts))


@torch.no_grad()
def losses(model, cache, tokens):
    """The mean loss of each window's tokens after the prompt: (windows)."""
    found, logits = [], model(tokens[:, :PROMPT], past_key_values=cache).logits
    for t in range(PROMPT, T):
        found.append(cross_entropy(logits[:, -1], tokens[:, t], reduction="none"))
        if t < T - 1:
            logits = model(tokens[:, t:t + 1], past_key_values=cache).logits
    return torch.stack(found).mean(0)


def main():
    from transformers import AutoModelForCausalLM
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("--model", required=True, metavar="DIR")
    p.add_argument("--data", required=True, metavar="FILE")
    args = p.parse_args()
    config, data = hf.load_config(args.model), read_data()
    tokens = load_windows(args.data, hf.load_tokenizer(args.model, config), T, WINDOWS, "test").tokens
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    for row, settings in ROWS.items():
        cache, true_bits = cache_of(settings, model, config)
        found = (losses(model, cache, tokens) / UNIT).round().int().tolist()
        data["SmolLM2"][OWN + row] = {"bits": round(true_bits(), 3), "nll": [found]}
        write_data(data)
        print(f"{row:24} {true_bits():5.2f} {UNIT * sum(found) / len(found):.3f}", flush=True)
        if hasattr(cache, "remove"):
            cache.remove()


if __name__ == "__main__":
    main()
