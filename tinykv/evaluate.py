"""Perplexity, and what goes with it: each method beside fp16 on the same windows, in one pass.

For every batch of windows the fp16 cache goes first, then each method; their final hidden states are turned into logits
a slice at a time. So memory is bounded by one batch, whatever the number of windows and the size of the vocabulary.
"""
import math
import time
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from tinykv.cache import KVCache

SLICE = 2 ** 24  # logits held at once, in numbers
FAR = 128 * 1024  # the length at which the third bit count is given


@dataclass
class Result:
    """What one method did. Sums over targets, and the means that are derived from them."""
    nll: list = field(default_factory=list)  # per window: mean negative log-likelihood of a target, in nats
    kl: float = 0.0  # sum over targets of KL(fp16 || method), in nats
    agree: int = 0  # targets where the most likely token is fp16's
    right: int = 0  # answers of which every token is the most likely one
    answers: int = 0
    targets: int = 0
    tokens: int = 0
    seconds: float = 0.0  # in the forward passes
    bits: float = 0.0  # per cached number, everything that is held counted, at this length
    bits_far: float = 0.0  # the same at 128K tokens
    cache_bytes: int = 0  # of one window

    @property
    def ppl(self):
        return math.exp(sum(self.nll) / len(self.nll))

    @property
    def ppl_se(self):
        """Standard error of the perplexity, from the spread of the windows' mean losses; None for one window."""
        if len(self.nll) == 1:
            return None
        return self.ppl * torch.tensor(self.nll).std().item() / math.sqrt(len(self.nll))

    @property
    def recall(self):
        """Share of answers got right, or None where the text has none."""
        return self.right / self.answers if self.answers else None


@torch.inference_mode()
def evaluate(model, methods, windows, protocol="paper", batch=1, bar=None, models=None, cache_class=KVCache):
    """methods {name: Method}, fp16's first -> {name: Result}. windows: see `data.Windows`.

    bar: an object with `update(n)`, told of every window that a method has finished. models {name: Llama}: for methods
    that another one runs, with quantized weights; their embedding and head must be model's. cache_class: a KVCache, or
    one that attends by itself.
    """
    results = {name: Result() for name in methods}
    for start in range(0, len(windows.tokens), batch):
        tokens = windows.tokens[start:start + batch].to(model.lm_head.weight.device)  # (B, T)
        answers = windows.answers[start:start + batch]
        hidden = {}
        for name, method in methods.items():
            clock = time.perf_counter()
            runs = (models or {}).get(name, model)
            cache = cache_class(runs, method, protocol)
            hidden[name] = read(runs, tokens, cache)  # (B, T - rows that the cache began with, D)
            if tokens.is_cuda:
                torch.cuda.synchronize(tokens.device)
            results[name].seconds += time.perf_counter() - clock
            results[name].tokens += tokens.numel()
            count_bits(results[name], cache, tokens)
            if bar is not None:
                bar.update(len(tokens))
        for name, h in hidden.items():  # what fp16 says of a prefix is kept with the prefix
            hidden[name] = torch.cat([next(iter(hidden.values()))[:, :tokens.shape[1] - h.shape[1]], h], dim=1)
        score(model, hidden, tokens, answers, results, windows.start)
    return results


def read(model, tokens, cache):
    """The final hidden states of the tokens behind the cache's prefix, (B, T - n, D).

    In one forward, or in chunks that end where the method codes a block.
    """
    tokens = cache.rest(tokens)  # (B, T - n)
    if cache.protocol == "paper":
        return model.hidden(tokens, cache)
    chunk, first = cache.method.chunk, cache.method.recent + cache.method.chunk - len(cache)
    first = first if first > 0 else first % chunk or chunk  # a prefix may be longer
    chunks = [tokens[:, :first], *tokens[:, first:].split(chunk, dim=1)]
    return torch.cat([model.hidden(part, cache) for part in chunks if part.numel()], dim=1)


def score(model, hidden, tokens, answers, results, start=1):
    """Add a batch to the results. hidden {name: (B, T, D)}, the reference first; position t predicts token t + 1.

    start: the first token that is a target.
    """
    size = max(1, SLICE // model.config.vocab_size)
    hidden = {name: h[:, start - 1:] for name, h in hidden.items()}  # (B, T - start + 1, D)
    for row, target in enumerate(tokens[:, start:]):  # (T - start)
        nll = dict.fromkeys(hidden, 0.0)
        hits = {name: [] for name in hidden}
        for begin in range(0, len(target), size):
            part = target[begin:begin + size]  # (n)
            reference = best = None
            for name, h in hidden.items():
                logits = model.lm_head(h[row, begin:begin + len(part)]).float()  # (n, vocab)
                logp = F.log_softmax(logits, dim=-1)  # (n, vocab)
                top = logp.argmax(-1)  # (n)
                if reference is None:
                    reference, best = logp, top
                else:
                    results[name].kl += F.kl_div(logp, reference, log_target=True, reduction="sum").item()
                nll[name] -= logp.gather(1, part[:, None]).double().sum().item()
                results[name].agree += (top == best).sum().item()
                hits[name].append(top == part)
        for name, result in results.items():
            result.nll.append(nll[name] / len(target))
            result.targets += len(target)
            hit = torch.cat(hits[name])  # (T - start)
            result.right += sum(bool(hit[a - start:b - start].all()) for a, b in answers[row])
            result.answers += len(answers[row])


def count_bits(result, cache, tokens):
    """Bits for each cached number, from the bytes that are really held."""
    B, T = tokens.shape
    config = cache.config
    numbers = config.num_hidden_layers * config.num_key_value_heads * config.head_dim  # of one token's keys, or values
    result.cache_bytes = max(result.cache_bytes, cache.nbytes // B)
    result.bits = 8 * cache.nbytes / (2 * B * T * numbers)
    result.bits_far = 0.0
    for kind in ("k", "v"):
        held, coded = cache.part_bytes(kind), getattr(cache.layers[0], kind).first  # coded: tokens
        if not coded:
            result.bits_far += 16.0 / 2
            continue
        pinned = held["pinned"] * (FAR / T if cache.method.keeps_share else 1)  # a share grows with the text
        far = held["coded"] / coded * FAR + pinned + held["recent"]  # bytes
        result.bits_far += 8 * far / (B * numbers * FAR) / 2
