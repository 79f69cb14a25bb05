"""Assignment 5, IntactKV: a prefix of exact keys and values, and its training.

Shapes: L layers, Hkv KV heads of d numbers, a prefix of n tokens, B texts of T tokens behind it, D
channels of a hidden state. All numbers are fp32 unless it says otherwise. The project has a cache
that records one forward, of the tokens alone or behind a prefix:

    trace = Trace(model, keys, values)     keys, before RoPE, and values (L, Hkv, n, d); None: no prefix
    model(tokens, trace, logits=False)     tokens (B, T)
    trace.k, trace.v                       by layer, (B, Hkv, T, d), keys before RoPE
    trace.hidden                           by layer, the block's output (B, T, D)
"""
import torch

from tinykv.methods.base import CodecMethod, first_tokens
from tinykv.model import Trace

ASSIGNMENT = "intactkv"
UPDATES = 0  # of the prefix's training, for question 3


# Task 1: the prefix

def exact_rows(full, ids):
    """Keys, before RoPE, and values of the tokens `ids` (a list) as the model `full` computes them
    when it reads them from the start of a text: (L, Hkv, n, d) both.

    They are rounded to fp16, and are fp32 again. They require no gradient.
    """
    # answer
    trace = Trace(full)
    with torch.no_grad():
        full(torch.tensor([ids]), trace, logits=False)
    return [torch.cat(rows).half().float() for rows in (trace.k, trace.v)]


def without_prefix(tokens, ids):
    """The texts, integers (B, n + T), without the prefix's tokens `ids` (a list): (B, T).

    ValueError if one of the texts does not begin with the prefix, or if nothing is behind it.
    """
    # answer
    n = len(ids)
    if tokens.shape[1] <= n:
        raise ValueError("nothing is behind the prefix")
    if any(row[:n] != list(ids) for row in tokens.tolist()):
        raise ValueError("a text does not begin with the prefix")
    return tokens[:, n:]


def text_positions(n, T):
    """The positions, for RoPE, of T tokens behind a prefix of n: integers (T). A text's first token
    of all has position 0."""
    # answer
    return torch.arange(T) + n


def begin_with(prefix_k, prefix_v, k, v, rope):
    """What one layer's queries attend to: (K, V), (B, Hkv, n + T, d) both, the prefix first, keys
    after RoPE.

    prefix_k, prefix_v (Hkv, n, d): one prefix for all B texts. k, v (B, Hkv, T, d). Both keys are
    before RoPE. rope.rotate(x, positions) turns x (..., T, d) to the positions (T).
    """
    # answer
    n, T = prefix_k.shape[1], k.shape[2]
    first_k = rope.rotate(prefix_k, torch.arange(n))
    text_k = rope.rotate(k, text_positions(n, T))
    K = [torch.cat([first_k, row], dim=1) for row in text_k]
    V = [torch.cat([prefix_v, row], dim=1) for row in v]
    return torch.stack(K), torch.stack(V)


# Task 2: a quantizer that scales values

def scaled_values(values, gain):
    """The prefix's values (L, Hkv, n, d) in the scale of a model whose weight quantizer multiplied
    the output of each layer's v_proj, Hkv * d numbers with the first head's d first, by gain
    (L, Hkv * d)."""
    # answer
    L, Hkv, n, d = values.shape
    return values * gain.view(L, Hkv, 1, d)


# Task 3: the loss

def block_loss(outputs, targets, n, counts=None):
    """Eq. 2: half of the sum over blocks of the mean squared error, a tensor without dimensions.

    outputs, targets: by block, (B, n + T, D), of the quantized model and of the full-precision one.
    The first n positions are the prefix, and do not count. counts (B, T), booleans: which tokens
    behind it do, at least one of each text; None: all. Of each text the mean is over its own tokens
    that count, and all channels; then the mean over the texts.
    """
    # answer
    total = 0
    for output, target in zip(outputs, targets):
        squares = (output - target)[:, n:] ** 2
        tokens = squares.mean(dim=2)
        texts = [row.mean() if counts is None else row[counts[b]].mean() for b, row in enumerate(tokens)]
        total = total + torch.stack(texts).mean()
    return total / 2


# Task 4: training

def clipped(gradients, largest):
    """A list of tensors, multiplied by one factor so that the norm of all their numbers together is
    at most `largest`: a list. Where it is no larger, they stay as they are."""
    # answer
    norm = sum((g ** 2).sum() for g in gradients) ** 0.5
    if norm <= largest:
        return gradients
    return [g * largest / norm for g in gradients]


def adam_step(x, gradient, state, lr):
    """One step of Adam: (the new x, the new state), and x stays as it is.

    state: (m, v, t) after the last step, m and v of the shape of x; zeros and t = 0 before the
    first. beta1 = 0.9, beta2 = 0.999, epsilon = 1e-8, which is added to the square root.
    """
    # answer
    m, v, t = state
    t = t + 1
    m = 0.9 * m + 0.1 * gradient
    v = 0.999 * v + 0.001 * gradient ** 2
    mean, square = m / (1 - 0.9 ** t), v / (1 - 0.999 ** t)
    return x - lr * mean / (square.sqrt() + 1e-8), (m, v, t)


def train(full, quantized, tokens, keys, values, updates, lr, clip):
    """Train the prefix: (keys, values) after so many updates, (L, Hkv, n, d) both, without gradient.

    tokens (B, T): the texts behind the prefix; all are read at each update. keys, values
    (L, Hkv, n, d): exact rows, which `full` has all the time, and `quantized` before the first
    update. An update: the block_loss of both models' outputs, the gradients of its keys and values
    clipped together to `clip`, a step of Adam for each. No weight of a model is changed, or gets a
    gradient.
    """
    # answer
    def outputs(model, rows):
        trace = Trace(model, *rows)
        model(tokens, trace, logits=False)
        return trace.hidden

    with torch.no_grad():
        targets = outputs(full, (keys, values))
    rows = [keys, values]
    states = [(torch.zeros_like(row), torch.zeros_like(row), 0) for row in rows]
    for _ in range(updates):
        rows = [row.detach().clone().requires_grad_() for row in rows]
        loss = block_loss(outputs(quantized, rows), targets, 0)
        gradients = clipped(torch.autograd.grad(loss, rows), clip)
        with torch.no_grad():
            steps = [adam_step(*parts, lr) for parts in zip(rows, gradients, states)]
        rows, states = zip(*steps)
    return tuple(row.detach() for row in rows)


# Task 5: what it costs

def prefix_bytes(L, Hkv, d, n):
    """Bytes of the keys and values of a prefix, in 16 bits each: a whole number."""
    # answer
    return 2 * L * Hkv * d * n * 2


def bits_of_a_number(bits, d, n, T):
    """Bits of a number of a cache on average: n tokens of a prefix, and T behind it, quantized per
    token and head (d numbers) at `bits` with a scale and a zero point of 16 bits each."""
    # answer
    return (16 * n + (bits + 32 / d) * T) / (n + T)


# given: a prefix of BOS that calls your functions, and the method

class Prefix:
    name, trained_for = "bos", None

    def __init__(self, ids):
        self.ids = ids

    def fill(self, full, quantized, weights=""):
        self.keys, values = exact_rows(full, self.ids)
        gains = [getattr(block.self_attn.v_proj, "gain", None) for block in quantized.model["layers"]]
        L, Hkv, _, d = values.shape
        ones = torch.ones(Hkv * d, device=values.device)
        self.values = scaled_values(values, torch.stack([ones if g is None else g for g in gains]))
        if UPDATES:  # on texts that the full-precision model writes itself
            begin = torch.tensor([self.ids] * 8, device=values.device)
            texts = without_prefix(full.generate(begin, 64, temperature=1.0, seed=0), self.ids)
            # its values are in the scale of `full`, which is that of a quantizer without gains
            self.keys, self.values = train(full, quantized, texts, self.keys, self.values, UPDATES, 2e-3, 0.3)

    def rows(self, like):
        return [[row[None] for row in rows.to(like)] for rows in (self.keys, self.values)]


class IntactKV(CodecMethod):
    def __init__(self, config, k_bits=16, v_bits=16, scheme="token-dynamic", group_size=None):
        super().__init__(config, k_bits, v_bits, scheme, group_size=group_size, formula="integer-zero")
        self.prefix = Prefix([config.bos_token_id])
        self.preserve = 1

    def keep_keys(self, layer_cache, n):
        return None if self.bits_of("k") == 16 else first_tokens(layer_cache, 1)

    def keep_values(self, layer_cache, n):
        return None if self.bits_of("v") == 16 else first_tokens(layer_cache, 1)
