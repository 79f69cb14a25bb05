"""Perplexity, and what goes with it: each method beside fp16, on the same windows, in one pass.

For every batch of windows the fp16 cache goes first, then each method. Their final hidden states
are turned into logits a slice at a time. So memory is bounded by one batch, whatever the number of
windows and the size of the vocabulary.
"""
import contextlib
import io
import math
import time
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from tinykv import UserError
from tinykv.cache import KVCache

SLICE = 2 ** 24  # logits held at once, in numbers
FAR = 128 * 1024  # tokens of the text for the last bit count, the column 128K
LARGEST = 700  # nats: the exponential of a larger loss is no number


@dataclass
class Result:
    """What one method did: sums and lists over windows, and the means that follow from them.

    What is not whole numbers is listed window by window. Parts of the windows, measured by several
    processes (`ranks.py`), then add up to the same sum, digit by digit.

    fault: what was not finite. Then the sums are those up to there, and no result.
    """
    fault: str | None = None
    nll: list = field(default_factory=list)  # per window: mean negative log-likelihood, in nats
    window_kl: list = field(default_factory=list)  # sum over targets of KL(fp16 || method), in nats
    window_bits: list = field(default_factory=list)  # `bits`
    window_bits_far: list = field(default_factory=list)  # `bits_far`
    window_coded_bits: list = field(default_factory=list)  # `coded_bits`
    agree: int = 0  # targets where the most likely token is fp16's
    right: int = 0  # answers of which every token is the most likely one
    answers: int = 0
    targets: int = 0
    tokens: int = 0
    seconds: float = 0.0  # in the forward passes
    cache_bytes: int = 0  # of one window, the largest

    @property
    def bits(self):
        """Per cached number, everything that is held counted, at this length."""
        return mean(self.window_bits)

    @property
    def bits_far(self):
        """The same at 128K tokens."""
        return mean(self.window_bits_far)

    @property
    def coded_bits(self):
        """Per quantized number, of the codes alone; 0 where nothing is quantized."""
        return mean(self.window_coded_bits) if self.window_coded_bits else 0.0

    @property
    def kl(self):
        """Sum over all targets of KL(fp16 || method), in nats."""
        return sum(self.window_kl)

    @property
    def ppl(self):
        return math.exp(mean(self.nll))

    @property
    def ppl_se(self):
        """Standard error of the perplexity, from the spread of the windows' losses, or None."""
        if len(self.nll) == 1:
            return None
        return self.ppl * torch.tensor(self.nll).std().item() / math.sqrt(len(self.nll))

    @property
    def recall(self):
        """Share of answers got right, or None where the text has none."""
        return self.right / self.answers if self.answers else None

    def add(self, other):
        """Take in the `Result` of the windows that follow."""
        if self.fault:
            return
        for name in ("nll", "window_kl", "window_bits", "window_bits_far", "window_coded_bits",
                     "agree", "right", "answers", "targets", "tokens", "seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.cache_bytes = max(self.cache_bytes, other.cache_bytes)
        self.fault = other.fault


def mean(numbers):
    return sum(numbers) / len(numbers)


@torch.inference_mode()
def evaluate(model, methods, windows, protocol="paper", batch=1, bar=None, models=None,
             cache_class=KVCache, prompt=None):
    """methods {name: Method}, fp16's first -> {name: Result}. windows: see `data.windows.Windows`.

    bar: an object with `update(n)`, told of every window that a method has finished. models {name:
    Llama}: for methods that run on another model, with quantized weights; its embedding and head
    must be model's. cache_class: `KVCache`, or a class of caches that compute attention themselves.
    prompt: P, if the first P tokens of each window arrive at once, and the others as in a stream.

    A method that computes numbers that are not finite has a `fault`, and the others go on.
    UserError if it is fp16, or if no other method is left.
    """
    results = {name: Result() for name in methods}
    for start in range(0, len(windows.tokens), batch):
        tokens = windows.tokens[start:start + batch].to(model.lm_head.weight.device)  # (B, T)
        answers = windows.answers[start:start + batch]

        # 1. read the windows through each method's cache
        hidden = {}  # {name: (B, T, D)}
        for name, method in methods.items():
            if bar is not None:
                bar.update(len(tokens))
            if results[name].fault:
                continue
            clock = time.perf_counter()
            runs = (models or {}).get(name, model)
            cache = cache_class(runs, method, protocol, prompt)
            outputs = []
            try:
                for chunk in chunks_of(tokens, cache):
                    outputs.append(runs(chunk, cache, logits=False))  # (B, new tokens, D)
            except UserError as error:
                raise UserError(f"{name}: {error}") from None
            if tokens.is_cuda:
                torch.cuda.synchronize(tokens.device)
            results[name].seconds += time.perf_counter() - clock
            results[name].tokens += tokens.numel()
            results[name].fault = fault_of(cache, outputs)
            if results[name].fault:
                check_left(results)
                continue
            if cache.start:  # predictions at a prefix's own positions are fp16's
                if not hidden:
                    raise ValueError(f"{name} begins with a prefix; evaluate fp16 before it")
                fp16 = next(iter(hidden.values()))  # (B, T, D)
                outputs = [fp16[:, :cache.start], *outputs]
            hidden[name] = torch.cat(outputs, dim=1)  # (B, T, D)
            count_bits(results[name], cache, tokens)

        # 2. compare their predictions with the text's tokens and with fp16's predictions
        score(model, hidden, tokens, answers, results, windows.start)
        check_left(results)
    return results


def fault_of(cache, outputs):
    """What is not finite after a forward; None if all is. outputs: normed hidden states (B, T, D).

    The norm of a residual whose square overflows is 0, so a state of zeros is a fault, too.
    """
    size = torch.cat([h.float().abs().amax(-1) for h in outputs], dim=1)  # (B, T): NaN if one is
    finite = all(layer.finite for layer in cache.layers)
    if finite and ((size > 0) & size.isfinite()).all():
        return None
    # something is wrong: find the first layer where it is
    for layer in cache.layers:
        if not layer.finite:
            return (f"layer {layer.layer} computes keys, values or scores that are not finite, or "
                    "too large for 16 bits; use another --dtype, or other weights")
        for rows in (layer.keys, layer.values):
            if not rows.read().isfinite().all():
                return (f"layer {rows.layer} decodes {rows.kind.upper()} to numbers that are not "
                        f"finite; see to {rows.codec!r}")
    return "the last block's output overflows; use another --dtype, or other weights"


def check_left(results):
    """UserError if fp16, or every other method, has a fault."""
    first, *others = results
    if results[first].fault:
        raise UserError(f"{first}: {results[first].fault}")
    if others and all(results[name].fault for name in others):
        raise UserError(f"{others[0]}: {results[others[0]].fault}")


def chunks_of(tokens, cache):
    """The chunks in which a cache reads tokens (B, T), each cut off when it is asked for: the
    prompt, under `paper` without one the whole window, and then chunks that end where the method's
    blocks end."""
    begin = 0
    while begin < tokens.shape[1]:
        if begin == 0 and cache.prompt is not None:
            end = cache.prompt
        elif cache.protocol == "paper" and cache.prompt is None:
            end = tokens.shape[1]
        else:
            end = cache.next_length()
        yield tokens[:, begin:end]  # a prefix belongs to the first chunk
        begin = end


def score(model, hidden, tokens, answers, results, start=1):
    """Add a batch to the results. hidden {name: (B, T, D)}, fp16's first; position t predicts token
    t + 1.

    start: the first token that is a target.
    """
    size = max(1, SLICE // model.config.vocab_size)  # targets at a time
    for row, target in enumerate(tokens[:, start:]):  # (T - start)
        nll, kl = dict.fromkeys(hidden, 0.0), dict.fromkeys(hidden, 0.0)
        hits = {name: [] for name in hidden}
        for begin in range(0, len(target), size):
            part = target[begin:begin + size]  # (n)
            reference = best = None  # fp16's log-probabilities, and its most likely tokens
            for name, states in hidden.items():
                states = states[row, start - 1 + begin:start - 1 + begin + len(part)]  # (n, D)
                logits = model.lm_head(states).float()  # (n, vocab)
                logp = F.log_softmax(logits, dim=-1)  # (n, vocab)
                top = logp.argmax(-1)  # (n)
                if reference is None:
                    reference, best = logp, top
                else:
                    divergence = F.kl_div(logp, reference, log_target=True, reduction="sum")
                    kl[name] += divergence.item()
                if not logits.sum().isfinite():
                    nll[name] = math.nan
                nll[name] -= logp.gather(1, part[:, None]).double().sum().item()
                results[name].agree += (top == best).sum().item()
                hits[name].append(top == part)
        for name in hidden:
            result = results[name]
            loss = nll[name] / len(target)
            if not math.isfinite(loss + kl[name]) or loss > LARGEST:
                result.fault = result.fault or (
                    f"its logits are not finite, or its loss of {loss:g} nats has no perplexity; "
                    "use another --dtype, or other weights")
            result.nll.append(loss)
            result.window_kl.append(kl[name])
            result.targets += len(target)
            # an answer is right if each of its tokens is the most likely one
            hit = torch.cat(hits[name])  # (T - start)
            result.right += sum(bool(hit[a - start:b - start].all()) for a, b in answers[row])
            result.answers += len(answers[row])


def count_bits(result, cache, tokens):
    """Bits per cached number, from the bytes that are held: at this length, and at 128K tokens.

    In a stream the recent part grows from R to R + block - 1 tokens and shrinks to R again. It is
    counted at its mean over that cycle, so that no length flatters a method. The other tokens
    count as quantized. A text that is too short for any token to be quantized counts as it is.
    """
    B, T = tokens.shape
    config, method = cache.config, cache.method
    # numbers in one token's keys, or values, over all layers
    numbers = config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    result.cache_bytes = max(result.cache_bytes, cache.nbytes // B)
    bits, bits_far, coded_bits = 0.0, 0.0, 0.0  # means over the batch's windows
    layer = cache.layers[0]
    for rows in (layer.keys, layer.values):
        held = cache.part_bytes(rows.kind)  # of all layers and sequences
        if rows.n_coded == 0:
            bits += 8 * sum(held.values()) / (B * numbers * T) / 2
            bits_far += 16.0 / 2
            continue
        n_recent = method.recent + (method.block_of(rows.kind) - 1) / 2
        if layer.in_prompt:  # `paper`: a window that is quantized as a whole
            n_recent = 0
        coded = held["coded"] / rows.n_coded  # bytes of a quantized token
        recent = config.num_hidden_layers * recent_token_bytes(rows)
        kept = held["kept"]
        total = coded * (T - n_recent) + recent * n_recent + kept  # bytes
        if method.keeps_share and layer.choose == "always":
            kept = kept / T * FAR  # it grows with the text
        total_far = coded * (FAR - n_recent) + recent * n_recent + kept
        # a half each of the bits of K and of V
        bits += 8 * total / (B * numbers * T) / 2
        bits_far += 8 * total_far / (B * numbers * FAR) / 2
        coded_bits += 8 * coded / (B * numbers) / 2
    # of a batch only the mean is known
    result.window_bits += [bits] * B
    result.window_bits_far += [bits_far] * B
    result.window_coded_bits += [coded_bits] * B


def recent_token_bytes(rows):
    """Bytes that a recent token takes in a `CachedRows`: a row, and its score where there is one."""
    size = 0
    for held in rows.tensors()["recent"]:  # (B, Hkv, r, d) or (B, Hkv, r)
        size += held.element_size() * held.shape[:2].numel() * held.shape[3:].numel()
    return size


# For Python and notebooks

class Table(list):
    """The rows of `compare`, dicts. It is shown as the command would print it."""

    def __init__(self, rows, printed):
        super().__init__(rows)
        self.printed = printed

    def __repr__(self):
        return self.printed


def compare(methods, **flags):
    """What eval_ppl.py measures -> a `Table` of its rows, fp16's first, as its JSON has them.

        compare("pfn,kvsink", bits=2)
        compare("mine.py:Mine", preserve=[1, 5], protocol="stream", windows=4, json="out.json")

    flags: those of the command, with `_` for `-`; a list is a flag's list, and True is a flag that
    takes no value. UserError for what the command refuses.
    """
    import eval_ppl  # only here: the command stands above this module
    from tinykv.run.runs import load_class, own_errors, own_settings

    def refuse(message):  # where the command would end
        raise UserError(message)

    # 1. the command's own words
    words = [f"--method={methods}"]
    for name, value in {"wide": True, **flags}.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, list | tuple):
            value = ",".join(map(str, value))
        if value is True:
            words.append(flag)
        elif value is not None and value is not False:
            words.append(f"{flag}={value}")

    # 2. run the command, and keep what it prints
    load_class.cache_clear()  # a file may have been edited since
    with own_errors(methods), contextlib.redirect_stdout(io.StringIO()) as printed:
        parser = eval_ppl.parser(own_settings(methods))
        parser.error = refuse
        rows = eval_ppl.run(parser.parse_args(words))
    return Table(rows, printed.getvalue().rstrip())
