"""Which model is it? It is known by what it computes from a fixed text. Tables and results of another are refused.

A name or a path does not show that a model was edited, and a hash of its weights does not show a hook.
"""
import torch

from tinykv.tracing import Trace

PROBED_AT = 1000  # the position of the probe's first token: there RoPE's slow pairs have turned, too


def identity(model):
    """What identifies a model: the keys (rotated), the values and the logits that it computes from a fixed text with
    its weights, hooks and RoPE, and sums over its embedding and its head: (2, L + 2, Hkv, T, d). See `same_model`.

    They are remembered on the model until it is edited.
    """
    state = state_of(model)
    if model.known is None or model.known[0] != state:
        model.known = state, probed(model)
    return model.known[1]


def state_of(model):
    """What changes when a model is edited: the attributes and hooks of its modules; where each tensor lies, how often
    it was written to, and, as torch does not count writes through `.data`, a sum with one number of each row and each
    column. So a single number that is written through `.data` is not seen, nor what is patched outside its modules."""
    state = []
    for part in (model.rope, *model.model.modules(), *model.lm_head.modules()):
        for value in vars(part).values():
            held = [*value, *value.values()] if isinstance(value, dict) else [value]  # of hooks, also their numbers
            state.append([x if isinstance(x, int | float | str) else id(x) for x in held])
    tensors = [model.rope.freq, *model.parameters(), *model.buffers()]
    state.append([(x.data_ptr(), 0 if x.is_inference() else x._version) for x in tensors])
    some = [x.detach().flatten()[::min(x.shape) + 1 if x.dim() > 1 else 1] for x in tensors]  # along diagonals
    sums = [x.sum(dtype=torch.double).to(model.rope.freq.device) for x in some]
    state.append(torch.stack(sums).tolist())  # waits for a GPU once
    return state


@torch.no_grad()
def probed(model):
    """Its identity, computed layer by layer, so that a breakpoint on `Llama.forward` stops only in a text."""
    recorder, attention = Trace(model), model.model["layers"][0].self_attn.attention
    tokens = probe(model.config.vocab_size).to(model.lm_head.weight.device)  # (1, T)
    try:
        model.use_attention("fused")  # a `Trace` has no codes that triton could read
        h = model.model["embed_tokens"](tokens)  # (1, T, D)
        for i, layer in enumerate(model.model["layers"]):
            h = h if model.devices is None else h.to(model.devices[i])
            h = layer(h, model.rope, 0, model.mask(0, tokens.shape[1], h.device), i, recorder)  # (1, T, D)
        logits = model.lm_head(model.model["norm"](h.to(tokens.device)))  # (1, T, vocab)
    finally:
        model.use_attention(attention)
    keys = torch.cat([model.rope.rotate(k, PROBED_AT).cpu() for k in recorder.k])  # (L, Hkv, T, d)
    values = torch.cat([v.cpu() for v in recorder.v])  # (L, Hkv, T, d)
    return identity_of(keys, values, logits, model.model["embed_tokens"].weight, model.lm_head.weight)


def identity_of(keys, values, logits, embedding, head):
    """keys, values (L, Hkv, T, d), logits (1, T, vocab), embedding and head (vocab, D) -> (2, L + 2, Hkv, T, d).

    Some logits, taken from all over the vocabulary, fill one more layer. A text has few tokens, and of the others'
    rows, sums fill another one: each row counts by a factor of its own."""
    _, Hkv, T, d = keys.shape
    some = torch.arange(Hkv * d) * logits.shape[-1] // (Hkv * d)  # (Hkv * d)
    last = logits.cpu()[..., some].view(1, T, Hkv, d).transpose(1, 2)  # (1, Hkv, T, d)
    identities = []
    for computed, rows in ((keys, embedding), (values, head)):
        factors = torch.arange(1, 1 + len(rows), device=rows.device).float().sin().to(rows.dtype)  # (vocab)
        sums = (factors @ rows).cpu()  # (D)
        sums = sums[torch.arange(Hkv * T * d) % len(sums)].view(1, Hkv, T, d)
        identities.append(torch.cat([computed, last, sums]))  # (L + 2, Hkv, T, d)
    return torch.stack(identities)


def probe(vocab_size):
    """The text by which models are known: 4 tokens (1, T), spread over the vocabulary."""
    return torch.arange(1, 5)[None] * vocab_size // 5


def same_model(one, other):
    """Whether two `Llama.identity` come from the same model, whatever its dtype or device. Rounding changes a layer's
    keys, or values, by less than 1e-5 in fp32, and by a few per cent in 16 bits."""
    if one.shape != other.shape:
        return False
    tolerance = 1e-3 if min(one.dtype.itemsize, other.dtype.itemsize) > 2 else 1 / 8
    one, other = one.double(), other.double()  # (2, L, Hkv, T, d) both
    error = (one - other).square().sum((2, 3, 4)).sqrt()  # (2, L)
    size = other.square().sum((2, 3, 4)).sqrt()  # (2, L)
    return bool((error <= tolerance * size).all())  # nor is NaN
