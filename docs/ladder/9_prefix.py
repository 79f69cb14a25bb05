"""IntactKV on one page: the first token's key and value, from another model. "NEW" marks what is new beside 1_sinks.py.

    python docs/ladder/9_prefix.py           in the repository's folder; less than a minute on a CPU
    diff docs/ladder/1_sinks.py docs/ladder/9_prefix.py           the same in the package: tinykv/methods/intactkv.py

Here the cache has 16 bits, and the weights have 3. All tokens attend to the first one, `<s>`, so a wrong key or value
there is an error in every output. The full-precision model can compute the right ones once, because no text comes
before, and every cache of the rounded model begins with them: a prefix. The prefix can also be trained to make up for
errors elsewhere. But its 256 numbers, trained on 128 texts, can do little against those of 184,000 rounded weights.

The page prints how far the rounded model's layers are from the other's, and perplexity. Rounding raises it from 8.178
to 9.688, the exact prefix lowers it to 9.492, the trained one to 9.487. It recovers an eighth; training adds little.

Shapes: B texts, T tokens each, n of the prefix, L layers, Hkv heads of keys and values, d channels, D of an output.
"""
import copy
import sys

import torch

sys.path.insert(0, __file__.rpartition("docs")[0] or ".")
from tinykv import hf
from tinykv.lab.data import load_windows

BOS = 1  # the prefix: `<s>`, with which every text begins


# Code: NEW: a weight is rounded to one of eight levels, one of which is 0. A cache's numbers are not rounded here
def grid(low, high):  # the smallest and the largest of the weights that share it
    scale = ((high - low) / 7).half().float()  # eight levels, seven steps; stored in 16 bits
    zero = torch.round(-low / scale)  # the code of 0
    return scale, zero


def rounded(weight):  # (out, in) -> the same, as 3 bits hold it
    size = max(n for n in range(1, 129) if weight.shape[1] % n == 0)  # weights of a grid: divides a row, 128 at most
    x = weight.unflatten(1, (-1, size))  # (out, groups, size)
    low, high = x.amin(2, keepdim=True).clamp(max=0), x.amax(2, keepdim=True).clamp(min=0)  # (out, groups, 1) both
    scale, zero = grid(low, high)
    code = (torch.round(x / scale) + zero).clamp(0, 7)  # (out, groups, size)
    return (scale * (code - zero)).flatten(1)


def rounded_model(full):
    model = copy.deepcopy(full)
    for module in model.model["layers"].modules():  # embedding and norms stay as they are
        if isinstance(module, torch.nn.Linear):
            module.weight.data = rounded(module.weight)
    return model


# The cache: attention stores a text's keys and values in it, and then uses what it reads back
class Cache:  # the model calls `expect`, and then in each layer `update` and `observe`
    def __init__(self, rope, prefix=None, bits=16):
        self.rope, self.prefix, self.bits = rope, prefix, bits  # NEW: prefix: its keys, its values (L, Hkv, n, d)
        self.rows = []  # of each layer: keys and values of the text, (B, Hkv, T, d) both
        self.outputs = []  # each layer's, (B, T, D)

    def update(self, layer, q, k, v, seen):  # k, v (B, Hkv, T, d); q and seen are for other pages
        if self.bits == 16:  # a gradient would not fit
            k, v = k.half().float(), v.half().float()
        self.rows.append((k, v))
        if self.prefix is not None:  # NEW: the prefix comes first, the same before every text
            first_k, first_v = (x[layer].expand(len(k), -1, -1, -1) for x in self.prefix)  # (B, Hkv, n, d) both
            k, v = torch.cat([first_k, k], dim=2), torch.cat([first_v, v], dim=2)  # (B, Hkv, n + T, d) both
        return self.rope.rotate(k), v  # RoPE gives keys their positions

    def observe(self, layer, output):  # the model shows it each layer's output
        self.outputs.append(output)

    def expect(self, tokens):  # the model asks which tokens are new, and how many the cache already holds
        return tokens, 0 if self.prefix is None else self.prefix[0].shape[2]


# NEW: the prefix, as a model computes it, without any text
def prefix_of(model):
    cache = Cache(model.rope)
    model(torch.tensor([[BOS]]), cache)
    return [torch.cat(rows) for rows in zip(*cache.rows)]  # keys and values, (L, Hkv, n, d) both


# NEW: the loss that trains it, IntactKV's Eq. 2: how far the outputs of the rounded model's layers are from the other's
def outputs_of(model, prefix, tokens):  # tokens (B, T), after the prefix -> (L, B, T, D)
    cache = Cache(model.rope, prefix, bits=32)
    model(tokens, cache)
    return torch.stack(cache.outputs)


def loss_of(outputs, targets):
    return (outputs - targets).square().mean((1, 2, 3)).sum() / 2  # of each layer the mean; half of their sum


@torch.enable_grad()
def train(quantized, exact, texts, targets, updates):  # texts (N, T); targets (L, N, T, D): the other model's outputs
    prefix = [x.clone().requires_grad_() for x in exact]  # keys and values, (L, Hkv, n, d) both
    # Adam moves each number against its gradient, by about the learning rate whatever the size of the gradient: it
    # divides the mean of its gradients so far by the root of the mean of their squares
    optimizer = torch.optim.AdamW(prefix, lr=2e-4, weight_decay=0)
    rng = torch.Generator().manual_seed(0)
    order = torch.cat([torch.randperm(len(texts), generator=rng) for _ in range(updates)])
    for chosen in order.split(16)[:updates]:  # 16 texts an update
        loss = loss_of(outputs_of(quantized, prefix, texts[chosen]), targets[:, chosen])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(prefix, 0.3)  # an unusual text does not move it further than others
        optimizer.step()
        optimizer.zero_grad()
    return [x.detach().half().float() for x in prefix]  # a prefix takes 16 bits, too


# The table: the loss, and perplexity, of 16 texts, or as many as the command says. Its second number: of updates
torch.set_grad_enabled(False)
full, tokenizer = hf.load(hf.EMBEDDED)
full.requires_grad_(False)  # only the prefix is trained
count = int(sys.argv[1]) if sys.argv[1:] else 16
updates = int(sys.argv[2]) if sys.argv[2:] else 40
other = load_windows("tales", tokenizer, 256, 128, "calibration", prefix=[BOS]).tokens[:, 1:]  # (B, T)
held_out = load_windows("tales", tokenizer, 256, count, "test", prefix=[BOS]).tokens[:, 1:]  # (B, T)
test = load_windows("tales", tokenizer, 1024, count, "test").tokens  # (B, 1 + T)

quantized = rounded_model(full)
exact = prefix_of(full)
targets = outputs_of(full, exact, held_out)  # (L, B, T, D)
first = full(test[:, :1])  # (B, 1, vocabulary): what follows `<s>`; all rows use it, a prefix takes the place of `<s>`
for name, model, prefix in (
        ("full", full, exact),
        ("rounded", quantized, prefix_of(quantized)),
        ("exact", quantized, exact),
        ("trained", quantized, train(quantized, exact, other, outputs_of(full, exact, other), updates))):
    cache = Cache(model.rope, prefix)
    logits = torch.cat([first, model(test[:, 1:], cache)], dim=1)  # (B, 1 + T, vocabulary)
    nats = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), test[:, 1:].flatten())
    loss = loss_of(outputs_of(model, prefix, held_out), targets)
    print(f"{name:8} {loss:7.4f} {nats.exp():7.3f}")
