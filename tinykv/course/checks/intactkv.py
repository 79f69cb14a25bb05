"""Assignment 5, IntactKV: the exact rows of a prefix, Eq. 2, its training."""
import copy

import torch

from tinykv.cache_parts.trace import Trace
from tinykv.course.check import check, expect, expect_tensor, normal, shown
from tinykv.model import Llama, LlamaConfig

NUMBER, TITLE = 5, "IntactKV's prefix, loss and training"
ANSWERS = ("tinykv.methods.intactkv", "train_intact")
BLANKS = {"tinykv/methods/intactkv.py": ("exact_rows", "value_gain", "block_loss"),
          "train_intact.py": ("State.update", "train"), "tests/test_intact.py": None,
          "tests/test_chats.py": None}  # which takes an oracle from test_intact


# ---- models, and the answer in plain torch

def model_of(rng):
    torch.manual_seed(rng.getrandbits(32))
    model = Llama(LlamaConfig(vocab_size=24, hidden_size=16, intermediate_size=24,
                              num_hidden_layers=rng.randint(2, 3), num_attention_heads=4,
                              num_key_value_heads=2, head_dim=4, max_position_embeddings=128))
    with torch.no_grad():
        for block in model.model["layers"]:
            for linear in (block.self_attn.v_proj, block.self_attn.o_proj, block.self_attn.k_proj):
                linear.weight.mul_(4)
    return model


def rounded(model):
    """A copy whose weights have been rounded, roughly."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for block in model.model["layers"]:
            for weight in block.parameters():
                if weight.dim() == 2:
                    step = weight.abs().max() / 3
                    weight.copy_((weight / step).round() * step)
    return model


def tokens_of(rng, *shape):
    if not shape:
        return rng.randint(1, 23)
    return [tokens_of(rng, *shape[1:]) for _ in range(shape[0])]


@torch.no_grad()
def plain_rows(model, ids):
    """What k_proj and v_proj give for the tokens, (L, Hkv, n, d) both."""
    config, found = model.config, {"k": [], "v": []}
    hooks = []
    for block in model.model["layers"]:
        for name, linear in (("k", block.self_attn.k_proj), ("v", block.self_attn.v_proj)):
            hooks.append(linear.register_forward_hook(lambda _, x, out, name=name: found[name].append(out[0])))
    model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    shape = len(ids), config.num_key_value_heads, config.head_dim
    return [torch.stack([row.view(shape).transpose(0, 1) for row in found[name]]) for name in "kv"]


def rows_by(submission, model, ids):
    config = model.config
    shape = config.num_hidden_layers, config.num_key_value_heads, len(ids), config.head_dim
    given = submission.exact_rows(model, list(ids))
    expect(isinstance(given, (tuple, list)) and len(given) == 2, "exact_rows has to return (keys, values).")
    for name, rows in zip(("keys", "values"), given):
        expect_tensor(rows, "numbers", shape, f"What exact_rows gives as {name}")
    return given


def near(found, want, bound=1e-4):
    return bool(((found - want).abs() <= bound * (1 + want.abs())).all())


# ---- task 1: the prefix

@check(points=8)
def rows_of_a_prefix(submission, rng):
    """exact_rows: keys before RoPE, and values, of every layer and token"""
    model, ids = model_of(rng), tokens_of(rng, rng.randint(3, 5))
    given = rows_by(submission, model, ids)
    for name, rows, want in zip(("keys", "values"), given, plain_rows(model, ids)):
        for layer, (found, right) in enumerate(zip(rows.detach(), want)):
            for i in range(len(ids)):
                expect(near(found[:, i], right[:, i], 2e-2),
                       f"The prefix is {ids}. In layer {layer} the {name} of its token {i} are "
                       f"{shown(found[:, i])}, a list for each KV head; they should be {shown(right[:, i])}. Keys "
                       "are those before RoPE, and the model reads the tokens as one text from its start.")


@check(points=4)
def rows_in_16_bits(submission, rng):
    """exact_rows: rounded to fp16, in fp32 again, without gradient"""
    for name, rows in zip(("keys", "values"), rows_by(submission, model_of(rng), tokens_of(rng, 3))):
        expect(rows.dtype == torch.float32, f"exact_rows gives {name} of type {rows.dtype}; it should be "
               "torch.float32.")
        expect(not rows.requires_grad, f"exact_rows gives {name} that require a gradient. Use torch.no_grad().")
        expect(torch.equal(rows, rows.half().float()), f"exact_rows gives {name} that fp16 does not have, such as "
               f"{rows.flatten()[0].item():.8f}. A cache keeps 16 bits: round to them.")


@check(points=5)
def text_behind(submission, rng):
    """without_prefix: what comes behind the prefix"""
    ids, texts = tokens_of(rng, rng.randint(2, 3)), tokens_of(rng, 2, 4)
    whole = [ids + row for row in texts]
    found = submission.without_prefix(torch.tensor(whole), list(ids))
    expect_tensor(found, "integers", (2, 4), f"The prefix is {ids}, the texts are {whole}. What without_prefix gives")
    expect(found.tolist() == texts, f"The prefix is {ids}, the texts are {whole}. Behind it you find "
           f"{found.tolist()}; it should be {texts}.")


@check(points=3)
def text_refused(submission, rng):
    """without_prefix: ValueError for a text without the prefix, or with nothing behind it"""
    ids = tokens_of(rng, 3)
    whole, other = ids + tokens_of(rng, 2), ids + tokens_of(rng, 2)
    other[2] = 0
    for texts, why in (([ids], "nothing is behind the prefix"),
                       ([whole, other], "the second text does not begin with the prefix: look at all its tokens, "
                                        "and at all texts")):
        try:
            submission.without_prefix(torch.tensor(texts), list(ids))
        except ValueError:
            continue
        expect(False, f"The prefix is {ids}, and the texts are {texts}. without_prefix accepts them; it should raise "
               f"ValueError: {why}.")


@check(points=3)
def positions_behind(submission, rng):
    """text_positions: they go on behind the prefix"""
    n, T = rng.randint(2, 6), rng.randint(3, 5)
    found = submission.text_positions(n, T)
    expect_tensor(found, "integers", (T,), "What text_positions gives")
    want = list(range(n, n + T))
    expect(found.tolist() == want, f"A prefix of {n} tokens, and {T} behind it: their positions are {found.tolist()}; "
           f"they should be {want}. The prefix has the positions from 0 on.")


@check(points=8)
def cache_with_prefix(submission, rng):
    """begin_with: the prefix first, for every text, and every key turned to its place"""
    rope = model_of(rng).rope
    n, B, T = rng.randint(2, 3), 2, rng.randint(2, 4)
    first = [normal(rng, 2, n, 4) for _ in "kv"]
    text = [normal(rng, B, 2, T, 4) for _ in "kv"]
    given = submission.begin_with(*(x.clone() for x in first + text), rope)
    expect(isinstance(given, (tuple, list)) and len(given) == 2, "begin_with has to return (K, V).")
    joined = [torch.stack([torch.cat([a, row], 1) for row in b]) for a, b in zip(first, text)]
    for name, found, want, hint in (
            ("K", given[0], rope.rotate(joined[0], torch.arange(n + T)),
             "Rotate the keys of the prefix by 0 .. n - 1, those behind it by n, n + 1, ..., each once."),
            ("V", given[1], joined[1], "Values are not rotated. The prefix comes first.")):
        expect_tensor(found, "numbers", (B, 2, n + T, 4), f"{name} of begin_with")
        for b in range(B):
            for i in range(n + T):
                expect(near(found[b, :, i], want[b, :, i]),
                       f"n = {n}, T = {T}. In text {b}, row {i} of {name} is {shown(found[b, :, i])}, a list for "
                       f"each KV head; it should be {shown(want[b, :, i])}. {hint}")


# ---- task 2: a quantizer that scales values

@check(points=6)
def values_in_scale(submission, rng):
    """scaled_values: each number of each head has a factor of its own"""
    values, gain = normal(rng, 2, 3, 2, 4), normal(rng, 2, 12).abs() + 0.5
    found = submission.scaled_values(values.clone(), gain.clone())
    expect_tensor(found, "numbers", (2, 3, 2, 4), "What scaled_values gives")
    for layer in range(2):
        for head in range(3):
            for i in range(2):
                factors = gain[layer, 4 * head:4 * head + 4]
                want = values[layer, head, i] * factors
                expect(near(found[layer, head, i], want),
                       f"L = 2, Hkv = 3, d = 4: values[{layer}, {head}, {i}] = {shown(values[layer, head, i])} became "
                       f"{shown(found[layer, head, i])}; it should be {shown(want)}, times gain[{layer}, "
                       f"{4 * head}:{4 * head + 4}] = {shown(factors)}. A head's d numbers stand together, and each "
                       "is multiplied.")


# ---- task 3: the loss

def plain_loss(outputs, targets, n, counts):
    """By lists: the sum over blocks of the mean over texts of the mean over tokens that count."""
    total = 0.0
    for output, target in zip(outputs, targets):
        texts = []
        for b in range(len(output)):
            errors = [(x - y) ** 2 for i in range(n, output.shape[1]) if counts[b][i - n]
                      for x, y in zip(output[b, i].tolist(), target[b, i].tolist())]
            texts.append(sum(errors) / len(errors))
        total += sum(texts) / len(texts)
    return total / 2


def try_loss(submission, rng, n, counts, tried, hint):
    B, T, L = len(counts), len(counts[0]), rng.randint(2, 4)
    targets = [normal(rng, B, n + T, 3) for _ in range(L)]
    outputs = [x + normal(rng, B, n + T, 3) for x in targets]
    for x in outputs:
        x[:, :n] += 5
    given = torch.tensor(counts)
    found = submission.block_loss([x.clone() for x in outputs], [x.clone() for x in targets], n,
                                  None if given.all() else given)
    expect_tensor(found, "numbers", (), "What block_loss gives")
    want = plain_loss(outputs, targets, n, counts)
    expect(abs(found.item() - want) < 1e-4 * want,
           f"{L} blocks of {B} texts of {T} tokens, D = 3, {tried}: the loss is {found.item():.4g}; it should be "
           f"{want:.4g}. {hint}")


@check(points=8)
def loss_of_blocks(submission, rng):
    """block_loss: half of the sum over blocks of the mean squared error"""
    try_loss(submission, rng, 0, [[True] * 4] * 2, "n = 0, all count",
             "A sum over blocks; of each the mean over texts, tokens and channels of squares; half of all.")


@check(points=5)
def loss_without_prefix(submission, rng):
    """block_loss: the prefix's positions do not count"""
    n = rng.randint(1, 3)
    try_loss(submission, rng, n, [[True] * 4] * 2, f"n = {n}", "Leave out the first n positions, where errors are "
             "large here; the mean is over the T that are left.")


@check(points=6)
def loss_of_counted_tokens(submission, rng):
    """block_loss: of each text the mean is over the tokens that count"""
    counts = [rng.sample([True] * k + [False] * (6 - k), 6) for k in (2, 5)]
    try_loss(submission, rng, 0, counts, f"n = 0, counts = {counts}", "A text with two tokens that count weighs as "
             "much as one with five: first the mean of each text over its own, then the mean of the texts.")


# ---- task 4: training

@check(points=4)
def gradients_clipped(submission, rng):
    """clipped: one factor for all, and none below the bound"""
    gradients = [normal(rng, 4), normal(rng, 3) * 3]
    norm = torch.cat(gradients).norm().item()
    for largest in (norm / 2, norm * 2):
        given = submission.clipped([g.clone() for g in gradients], largest)
        factor = min(1, largest / norm)
        expect(isinstance(given, (list, tuple)) and len(given) == 2, "clipped has to return a list, as it gets one.")
        for found, gradient in zip(given, gradients):
            expect_tensor(found, "numbers", gradient.shape, "What clipped gives")
            expect(near(found, gradient * factor, 1e-3),
                   f"{shown(gradients)} have the norm {norm:.4g} together, and largest = {largest:.4g}. "
                   f"{shown(gradient)} became {shown(found)}; it should be {shown(gradient * factor)}: times "
                   "largest / norm, of all tensors together, and only where the norm is larger.")


def try_adam(submission, rng, begin, hint):
    lr = rng.choice((0.01, 0.1))
    x, gradient = normal(rng, 3), normal(rng, 3)
    m, v, t = begin
    given = submission.adam_step(x.clone(), gradient.clone(), (m.clone(), v.clone(), t), lr)
    right_shape = isinstance(given, tuple) and len(given) == 2 and len(given[1]) == 3
    expect(right_shape, "adam_step has to return (x, (m, v, t)).")
    found, (new_m, new_v, new_t) = given
    tried = f"x = {shown(x)}, gradient = {shown(gradient)}, state = ({shown(m)}, {shown(v)}, {t}), lr = {lr}."
    right_m, right_v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient.square()
    scale = (right_v / (1 - 0.999 ** (t + 1))).sqrt() + 1e-8
    want = x - lr * right_m / (1 - 0.9 ** (t + 1)) / scale
    for name, got, right in (("m", new_m, right_m), ("v", new_v, right_v), ("x", found, want)):
        expect_tensor(got, "numbers", (3,), f"{name} of adam_step")
        expect(bool(((got - right).abs() <= 1e-4 * right.abs() + 1e-6).all()),
               f"{tried} The new {name} is {shown(got, 4)}; it should be {shown(right, 4)}. {hint}")
    expect(int(new_t) == t + 1, f"{tried} The new t is {int(new_t)}; it should be {t + 1}.")


@check(points=4)
def adam_at_first(submission, rng):
    """adam_step: the first step is lr, against the gradient's sign"""
    try_adam(submission, rng, (torch.zeros(3), torch.zeros(3), 0), "m and v begin with zeros; dividing by 1 - beta^t, "
             "with t = 1 at the first step, makes up for it.")


@check(points=4)
def adam_later(submission, rng):
    """adam_step: later steps go on with m and v"""
    try_adam(submission, rng, (normal(rng, 3), normal(rng, 3).square() + 0.1, rng.randint(2, 9)),
             "m = beta1 m + (1 - beta1) g, v = beta2 v + (1 - beta2) g^2.")


def plain_training(full, quantized, tokens, keys, values, updates, lr, clip):
    rows = [x.clone().requires_grad_() for x in (keys, values)]
    optimizer = torch.optim.AdamW(rows, lr=lr, weight_decay=0)

    def outputs(model, rows):
        trace = Trace(model, *rows)
        model(tokens, trace, logits=False)
        return torch.stack(trace.hidden)

    losses = []
    for _ in range(updates):
        targets = outputs(full, (keys, values)).detach()
        loss = (outputs(quantized, rows) - targets).square().mean((1, 2, 3)).sum() / 2
        losses.append(loss.item())
        for row, gradient in zip(rows, torch.autograd.grad(loss, rows)):
            row.grad = gradient
        torch.nn.utils.clip_grad_norm_(rows, clip)
        optimizer.step()
    return [row.detach() for row in rows], losses


@check(points=5)
def training(submission, rng):
    """train: all of it, and the models stay as they are"""
    full = model_of(rng)
    quantized, ids = rounded(full), tokens_of(rng, 2)
    before = [p.detach().clone() for model in (full, quantized) for p in model.parameters()]
    keys, values = plain_rows(full, ids)
    tokens, lr, updates = torch.tensor(tokens_of(rng, 2, 6)), 0.02, rng.randint(4, 5)
    # a clip that changes nothing, and one that leaves less than Adam's epsilon
    for clip, hint in ((100.0, "full has the exact rows all the time, quantized the trained ones; each tensor has a "
                               "state of its own, which goes on."),
                       (3e-8, "With this clip the gradients are about as large as Adam's epsilon: clip those of keys "
                              "and values together, before the step.")):
        given = submission.train(full, quantized, tokens, keys.clone(), values.clone(), updates, lr, clip)
        expect(isinstance(given, (tuple, list)) and len(given) == 2, "train has to return (keys, values).")
        parameters = [p for model in (full, quantized) for p in model.parameters()]
        expect(all(torch.equal(p, old) for p, old in zip(parameters, before)), "train changes weights of a model; "
               "only the prefix's keys and values are trained.")
        expect(all(p.grad is None for p in parameters), "After train, weights of a model have a gradient. Take the "
               "gradient for keys and values alone, by torch.autograd.grad, or freeze the models.")
        want, losses = plain_training(full, quantized, tokens, keys, values, updates, lr, clip)
        for name, found, right, begin in zip(("keys", "values"), given, want, (keys, values)):
            expect_tensor(found, "numbers", right.shape, f"What train gives as {name}")
            expect(not found.requires_grad, f"train gives {name} that require a gradient; detach them.")
            move, error = (right - begin).abs().mean().item(), (found - right).abs().mean().item()
            expect(error < 0.02 * move,
                   f"After {updates} updates with lr = {lr} and clip = {clip} the {name} have moved by "
                   f"{(found - begin).abs().mean().item():.3g} on average; it should be {move:.3g}, and they are "
                   f"{error:.3g} from where they should be. The loss should go from {losses[0]:.5f} to "
                   f"{losses[-1]:.5f}. {hint}")


# ---- task 5: what it costs

@check(points=3)
def bytes_of_a_prefix(submission, rng):
    """prefix_bytes: keys and values of all layers and heads in 16 bits"""
    L, Hkv, d, n = rng.randint(2, 40), rng.choice((2, 4, 8)), rng.choice((32, 64, 128)), rng.randint(1, 60)
    found, want = submission.prefix_bytes(L, Hkv, d, n), 2 * 2 * L * Hkv * d * n
    expect(found == want, f"L = {L}, Hkv = {Hkv}, d = {d}, n = {n}: a prefix takes {found} bytes; it should be {want}: "
           "keys and values, two bytes a number.")


@check(points=4)
def bits_on_average(submission, rng):
    """bits_of_a_number: the prefix in 16 bits, the others with a scale and a zero point"""
    bits, d, n, T = rng.randint(2, 4), rng.choice((32, 64)), rng.randint(2, 40), rng.randint(100, 900)
    found = submission.bits_of_a_number(bits, d, n, T)
    coded = bits + 32 / d
    want = (16 * n + coded * T) / (n + T)
    expect(abs(found - want) < 1e-6, f"{bits} bits, d = {d}, n = {n}, T = {T}: {found:.5g} bits for a number; it "
           f"should be {want:.5g}. The prefix has 16 bits and no scale, the others {bits} + 32 / {d} = {coded:g}.")
