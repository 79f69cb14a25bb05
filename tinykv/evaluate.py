"""Perplexity, and what goes with it: each method beside fp16, on the same windows.

fp16 goes first. Its hidden states stay in main memory for the comparison: D numbers a target, however large the
vocabulary V is. The model's own head makes logits of them, and of each method's, a slice at a time.
"""
import copy
import math
import time
from dataclasses import dataclass, field, replace
from statistics import fmean as mean

import torch
import torch.nn.functional as F

from tinykv import UserError, all_finite, at_least
from tinykv.cache import KVCache, made_with
from tinykv.kmeans import argmax
from tinykv.model import same_model

SLICE = 128  # targets whose logits are held at once: few enough for the caches of a CPU
FAR = 128 * 1024  # tokens of the text for the last bit count, the column 128K
LARGEST = 700  # nats: the exponential of a larger loss is no number
STRETCH = 512  # targets whose losses are also averaged by themselves: what a loss is early in a window, and late


@dataclass
class Result:
    """What one method did: sums over windows, and lists of what each window has."""
    nll: list = field(default_factory=list)  # mean negative log-likelihood, in nats
    nll_along: list = field(default_factory=list)  # [the same of each STRETCH targets, the last ones may be fewer]
    kl: list = field(default_factory=list)  # sum over targets of KL(fp16 || method), in nats; [] without fp16
    bits: list = field(default_factory=list)  # per cached number, everything that is held counted, at this length
    bits_far: list = field(default_factory=list)  # the same at 128K tokens
    kept: list = field(default_factory=list)  # tokens that are kept, the mean over layers, KV heads, K and V
    agree: int | None = 0  # targets where the most likely token is fp16's; None without fp16
    right: int = 0  # answers in which every token is the most likely one
    answers: int = 0
    targets: int = 0
    seconds: float = 0.0  # in the forward passes
    method: str = field(default="", compare=False)  # its repr
    settings: str = field(default="", repr=False, compare=False)  # of the method and its codecs, and the protocol
    cache_bytes: int = 0  # of one window, the largest
    reads_codes: int = 0  # windows in which a query reads codes
    exact: list = field(default_factory=list, repr=False, compare=False)  # of fp16: hidden states (T, D) of each window
    windows: object = field(default=None, repr=False, compare=False)  # the `Windows`
    model: list = field(default_factory=list, repr=False, compare=False)  # its `identity`

    @property
    def ppl(self):
        return math.exp(mean(self.nll))


# Measuring

@torch.inference_mode()
def measure(model, method, windows, protocol="paper", batch=1, fp16=None, bar=None, cache_class=KVCache, prompt=None):
    """One method's `Result` on windows (`data.windows.Windows`). UserError where the model, or the method, computes
    numbers that are not finite, and for fp16's Result of other windows, or of another model.

    fp16: the Result of fp16 on the same windows; None: this is it. bar: an object with `update(n)`, called with n, how
    many more windows are finished. cache_class: `KVCache`, or a class of caches that compute attention themselves.
    prompt: P, if the first P tokens of each window arrive at once, and the others as in a stream. They are not
    predicted: give `windows.predicted_from(P)`.
    """
    at_least(1, batch=batch)
    if not hasattr(windows, "answers"):
        raise UserError("measure takes Windows, as load_windows gives them, or Windows(tokens, [[]] * len(tokens)), "
                        f"not a {type(windows).__name__}")
    if windows.start < (prompt or 1):
        raise UserError(f"tokens of the prompt would be predicted; give windows.predicted_from({prompt})")
    result = Result(windows=replace(windows), model=model.identity())  # a copy: the caller may edit theirs
    if fp16 is not None:
        check_reference(fp16, result, model)
    device, cache = model.lm_head.weight.device, cache_class(model, method, protocol, prompt)
    if cache.start and fp16 is None:
        raise UserError("predictions at a prefix are fp16's; give fp16=, the Result of fp16 on these windows")
    result.method = repr(method)
    # without what a calibration found, in which draws may differ
    settings = {name: value for name, value in vars(method).items() if name not in method.found}
    numbers = {name: value for name, value in settings.items() if isinstance(value, str | int | float)}
    result.settings = repr([made_with(method), numbers, protocol, prompt])
    for first in range(0, len(windows.tokens), batch):
        tokens = windows.tokens[first:first + batch].to(device)  # (B, T)
        answers = windows.answers[first:first + batch]
        # of fp16, a list of B; None where this is fp16
        exact = fp16 and [h.to(device) for h in fp16.exact[first:first + batch]]  # (T, D) each

        # 1. read the windows through the method's cache
        if first > 0:
            cache.reset()
        outputs = []
        clock = time.perf_counter()
        for chunk in chunks_of(tokens, cache):
            coded = cache.layers[0].keys.n_coded + cache.layers[0].values.n_coded  # before the last chunk
            outputs.append(model(chunk, cache, logits=False))  # (B, new tokens, D)
        if tokens.is_cuda:
            torch.cuda.synchronize(device)
        result.seconds += time.perf_counter() - clock
        result.reads_codes += len(tokens) * (coded > 0 or cache.layers[0].quantizes_first)
        refuse_overflow(cache, outputs)
        cache.check_unchanged()
        if cache.start:  # predictions at a prefix's own positions are fp16's
            at_prefix = torch.stack([h[:cache.start] for h in exact])  # (B, n, D)
            outputs = [at_prefix, *outputs]
        hidden = torch.cat(outputs, dim=1)  # (B, T, D)
        count_bits(result, cache, tokens)
        kept = [kept_tokens(rows) for layer in cache.layers for rows in (layer.keys, layer.values)]
        result.kept += [mean(kept)] * len(tokens)  # of a batch only the mean is known

        # 2. compare its predictions with the text's tokens and with fp16's predictions
        add_predictions(result, model, hidden, exact, tokens, answers, windows.start)
        if bar is not None:
            bar.update(len(tokens))
    if any(codec.bits < 16 for *_, codec in method.each_codec()) or min(result.bits) < 16:  # said, or held
        result.exact = []  # what is quantized is nobody's fp16
        if fp16 is None:
            result.kl, result.agree = [], None
    return result


def check_reference(fp16, result, model):
    """UserError unless two `Result`s are of the same targets and of one model. The model of quantized weights is
    unknown, and not checked."""
    same = torch.equal(fp16.windows.tokens, result.windows.tokens) and fp16.windows.start == result.windows.start
    if not same or len(fp16.exact) != len(fp16.windows.tokens):
        raise UserError("the Result of fp16 is of other windows, or of another method; measure fp16 on these")
    is_quantized = any(hasattr(part, "bits") for part in model.modules())
    if not is_quantized and not same_model(fp16.model, result.model):
        raise UserError("the Result of fp16 is of another model; measure fp16 on this one")


def refuse_overflow(cache, outputs):
    """UserError if something is not finite after a forward. outputs: normed hidden states (B, T, D).

    The norm of a residual whose square overflows is 0, so a state of zeros is a fault, too.
    """
    size = torch.cat([h.float().abs().amax(-1) for h in outputs], dim=1)  # (B, T): NaN if one is
    overflows = not ((size > 0) & size.isfinite()).all()
    for rows in [rows for layer in cache.layers for rows in (layer.keys, layer.values)]:
        here = [x for x in (rows.recent, rows.recent_scores, rows.kept_scores) if x is not None]
        if not (rows.finite and all(x.isfinite().all() for x in here)):  # what was quantized, and what is here
            raise UserError(f"layer {rows.layer} computes keys, values or scores that are not finite, or "
                            "too large for 16 bits; use another --dtype, or other weights")
        if overflows:  # the first layer where something is wrong is to blame
            all_finite(f"what {rows.codec!r} decodes in layer {rows.layer}, {rows.kind.upper()},", rows.read())
    if overflows:
        raise UserError("the last layer's output overflows; use another --dtype, or other weights")


def chunks_of(tokens, cache):
    """Yield the chunks in which a cache reads tokens (B, T), each cut only when it is needed: first the prompt, or the
    whole window under `paper` without a prompt; then chunks that end where the method's blocks end."""
    begin = 0
    while begin < tokens.shape[1]:
        if begin == 0 and cache.prompt is not None:
            end = cache.prompt
        elif cache.protocol == "paper" and cache.prompt is None:
            end = tokens.shape[1]
        else:
            end = cache.layers[0].next_length()
        yield tokens[:, begin:end]  # a prefix belongs to the first chunk
        begin = end


def add_predictions(result, model, hidden, exact, tokens, answers, start=1):
    """Add a batch to the result. hidden (B, T, D): position t predicts token t + 1. start: the first token that is a
    target.

    exact: fp16's hidden states (T, D) for each of the B windows; None: these are they, and the result keeps them.
    Logits are computed in fp32 whatever the model's dtype.
    """
    head, weight = model.lm_head, model.lm_head.weight  # (vocab, D)
    if weight.dtype != torch.float32:
        head = copy.deepcopy(head).float()
    for row, target in enumerate(tokens[:, start:]):  # (T - start)
        kl, losses, hits = 0.0, [], []
        for begin in range(0, len(target), SLICE):
            part = target[begin:begin + SLICE]  # (n)
            positions = slice(start - 1 + begin, start - 1 + begin + len(part))  # that predict them
            logits = head(hidden[row, positions].float())  # (n, vocab)
            logp = F.log_softmax(logits, dim=-1)  # (n, vocab)
            losses.append(-logp.gather(1, part[:, None])[:, 0].double())  # (n): of the text's own tokens
            if not logits.sum().isfinite():  # also where the text's own tokens have finite ones
                losses[-1].fill_(math.nan)
            top = top_fp16 = argmax(logp)  # (n)
            if exact is not None:
                logp_fp16 = F.log_softmax(head(exact[row][positions].float()), dim=-1)  # (n, vocab)
                top_fp16 = argmax(logp_fp16)  # (n)
                kl += F.kl_div(logp, logp_fp16, reduction="none", log_target=True).sum(dtype=torch.double).item()
            result.agree += (top == top_fp16).sum().item()
            hits.append(top == part)

        losses = torch.cat(losses)  # (T - start)
        loss = losses.mean().item()
        if not math.isfinite(loss + kl) or loss > LARGEST:
            raise UserError(f"its logits are not finite, or its loss of {loss:g} nats has no perplexity; "
                            "use another --dtype, or other weights")
        result.nll.append(loss)
        result.nll_along.append([part.mean().item() for part in losses.split(STRETCH)])
        result.kl.append(kl)
        if exact is None:
            result.exact.append(hidden[row].cpu())
        result.targets += len(target)
        # an answer is right if each of its tokens is the most likely one
        hit = torch.cat(hits)  # (T - start)
        result.right += sum(bool(hit[a - start:b - start].all()) for a, b in answers[row])
        result.answers += len(answers[row])


def count_bits(result, cache, tokens):
    """Bits per cached number, from the bytes that are held: at this length, and at 128K tokens.

    In a stream the recent part grows from R to R + block - 1 tokens and shrinks to R again. It is counted at its mean
    over that cycle, so that no length flatters a method. The other tokens count as quantized. A text that is too short
    for any token to be quantized counts as it is, and as 16 bits at 128K. A layer with a sliding window drops codes
    that no later query sees. The `gone` tokens count nowhere, and at 128K it holds a window.
    """
    (B, T), method = tokens.shape, cache.method
    result.cache_bytes = max(result.cache_bytes, cache.nbytes // B)
    total = total_far = numbers = numbers_far = 0  # bytes, and the numbers that they hold
    for layer in cache.layers:
        for rows in (layer.keys, layer.values):
            parts = rows.tensors()
            held = {part: sum(t.nbytes for t in tensors) for part, tensors in parts.items()}  # of all sequences
            of_token = B * cache.config.num_key_value_heads * cache.config.head_dim  # numbers
            n = T if rows.codes is None else T - rows.codes.gone  # tokens
            n_far = min(FAR, max(n, rows.codec.window or FAR))
            numbers, numbers_far = numbers + n * of_token, numbers_far + n_far * of_token
            if rows.n_coded == T - n:  # no codes are held
                total, total_far = total + sum(held.values()), total_far + 2 * n_far * of_token
                continue
            # none, where a window is quantized as a whole
            n_recent = 0 if layer.quantizes_first else method.recent + (method.block_of(rows.kind) - 1) / 2
            coded = held["coded"] / (rows.n_coded - T + n)  # bytes of a quantized token
            recent = sum(  # bytes of a recent token: a row, and its score where there is one
                x.element_size() * x.shape[:2].numel() * x.shape[3:].numel() for x in parts["recent"])
            kept = held["kept"]
            total += coded * (n - n_recent) + recent * n_recent + kept
            if method.keeps_share and not layer.chooses_once:
                kept = kept / T * FAR  # it grows with the text
            total_far += coded * (n_far - n_recent) + recent * n_recent + kept
    # of a batch only the mean is known
    result.bits += [8 * total / numbers] * B
    result.bits_far += [8 * total_far / numbers_far] * B


def kept_tokens(rows):
    """How many tokens a `CachedRows` keeps: the mean over sequences and KV heads."""
    heads = [[]] if rows.kept_positions is None else rows.kept_positions.flatten(0, 1).tolist()
    return mean([len(set(head)) for head in heads])
