"""Assignment 5, IntactKV: the project's own answer."""
from types import SimpleNamespace
from unittest import mock

import torch

import train_intact
from tinykv import UserError
from tinykv.cache import KVCache
from tinykv.cache_parts.trace import Trace
from tinykv.methods import intactkv

ASSIGNMENT = "intactkv"


def exact_rows(full, ids):
    return intactkv.exact_rows(full, full, ids)


class Begun(KVCache):
    """A cache that holds its prefix, and nothing else."""

    def __init__(self):
        pass

    def __len__(self):
        return self.start


def without_prefix(tokens, ids):
    cache = Begun()
    cache.method, cache.start = SimpleNamespace(prefix=intactkv.Prefix("given", ids)), len(ids)
    try:
        return KVCache.without_prefix(cache, tokens)
    except UserError as error:
        raise ValueError(str(error)) from None


def text_positions(n, T):
    return torch.arange(n, n + T)


def begin_with(prefix_k, prefix_v, k, v, rope):
    trace = Trace(SimpleNamespace(rope=rope), prefix_k[None], prefix_v[None])
    return trace.update(0, k, k, v, None)


def scaled_values(values, gain):
    L, Hkv, _, d = values.shape
    blocks = [SimpleNamespace(self_attn=SimpleNamespace(
        v_proj=SimpleNamespace(gain=row), n_kv_heads=Hkv, head_dim=d)) for row in gain]
    return values * torch.stack([intactkv.value_gain(block) for block in blocks])


def block_loss(outputs, targets, n, counts=None):
    """The project's takes models: here the blocks' outputs stand in their place."""
    outputs, targets = ([block[:, n:] for block in blocks] for blocks in (outputs, targets))
    B, T, _ = outputs[0].shape
    with mock.patch.object(intactkv, "block_outputs", lambda blocks, *rest: blocks):
        return intactkv.block_loss(targets, outputs, torch.zeros(B, T), (0, 0), (0, 0), counts)


def clipped(gradients, largest):
    parameters = [torch.zeros_like(g) for g in gradients]
    for parameter, gradient in zip(parameters, gradients):
        parameter.grad = gradient.clone()
    torch.nn.utils.clip_grad_norm_(parameters, largest)
    return [parameter.grad for parameter in parameters]


def adam_step(x, gradient, state, lr):
    x = x.clone().requires_grad_()
    x.grad = gradient.clone()
    optimizer = torch.optim.AdamW([x], lr=lr, weight_decay=0)
    if state[2]:
        m, v, t = state
        optimizer.state[x] = {"exp_avg": m.clone(), "exp_avg_sq": v.clone(), "step": torch.tensor(float(t))}
    optimizer.step()
    after = optimizer.state[x]
    return x.detach(), (after["exp_avg"], after["exp_avg_sq"], int(after["step"]))


class State(train_intact.State):
    def save(self):
        """No file."""


def train(full, quantized, tokens, keys, values, updates, lr, clip):
    models = [model.requires_grad_(False) for model in (full, quantized)]
    state = State("there is no such file", "", keys, values, lr)
    for _ in range(updates):
        intactkv.block_loss(*models, tokens, (keys, values), (state.keys, state.values)).backward()
        state.update(clip)
    return state.keys.detach(), state.values.detach()


def prefix_bytes(L, Hkv, d, n):
    return 2 * torch.zeros(L, Hkv, n, d).half().nbytes


def bits_of_a_number(bits, d, n, T):
    return (n * 16 + T * (bits + 32 / d)) / (n + T)
