"""Make the embedded model: tokenizer, training, checkpoint in HF format.

    python -m tinykv.assets.make --out DIR             train, or go on where training was stopped
    python -m tinykv.assets.make --out DIR --report    only report the sinks of the model in DIR

A LLaMA of 1.2M parameters learns the stories of `data/stories.py`: 7,250 steps of 0.4 to 0.8 s on
one CPU core, an hour and a half. On one machine the same command gives the same bits, stopped and
gone on or not; the shipped weights were made so. `--steady 0` and the like leave a penalty out.
Three things do not come by themselves at this size. docs/embedded_model.md tells what was tried.

Recall. Looking up a fact by its owner is learned in a jump that may take very long to come. It
comes when the answer directly follows its owner's name, when every window begins with a story and
so holds the facts that it asks for, and when the first stories are about a single person. Answers
count five to ten times in the loss. Muon on the matrices and an initialization of unit gain make it
come sooner. And it comes with sinks in block 0, which are unlearned once it has come.

Sinks, and keys that have one sign. Small penalties encourage them, see `Penalties`. What then
follows is not asked for by any of them: one channel of the residual stream carries a huge number at
every `<s>`, from the first block on, and values there are small.

Tolerance of few bits. A large model has room to spare; this one learns it from noise on keys and
values.
"""
import hashlib
import io
import json
import os
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import sentencepiece
import torch
import torch.nn.functional as F
from tqdm import tqdm

from tinykv import UserError, at_least, hf
from tinykv.analysis.sinks import sink_report
from tinykv.data import load_windows
from tinykv.data.stories import stories
from tinykv.hf.tokenizer import SentencePieceTokenizer
from tinykv.model import Llama, LlamaConfig
from tinykv.run.cli import Parser, add_device, one_line
from tinykv.storage import check_regular, first_line, write

BOS, EOS = 1, 2  # sentencepiece's own ids
CONFIG = LlamaConfig(
    vocab_size=1024, hidden_size=128, intermediate_size=352, num_hidden_layers=6,
    num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=1024,
    rms_norm_eps=1e-5, tie_word_embeddings=True, bos_token_id=BOS, eos_token_id=EOS)

WARMUP = 200  # steps until the learning rate is at its peak
CLIP = 1.0  # largest norm of the gradient
MARKED = 8  # stories of a window that `attend` can tell apart
# of a key's 32 channels, the 8 that RoPE turns least: hardly at all within 1,024 positions
STEADY = [12, 13, 14, 15, 28, 29, 30, 31]
STEADY_LEVEL = 2.5  # what these channels should be, over the key's root mean square


@dataclass
class Penalties:
    """The weights of the penalties in the loss, and the values that `forward` finds.

    Means over the blocks from the phase's `first_block` on:
    away     attention that is not on the <s> of the query's own story
    update   squared attention output over the squared residual stream that it is added to
    key      squared key norm at <s> over the mean squared key norm
    steady   squared distance of the STEADY key channels, over the key's root mean square, from
             STEADY_LEVEL; not at <s>
    In block 0, whose sinks no method protects, as nothing before it tells where they are:
    early    attention on any <s>
    After the last block:
    last     logarithm of the largest squared channel at <s> over the mean square of other tokens; 0
             where it is no larger
    What a penalty divides by is detached.
    """
    away: float = 0.0
    update: float = 0.0
    key: float = 0.0
    steady: float = 0.0
    early: float = 0.0
    last: float = 0.0


PENALTIES = tuple(field.name for field in fields(Penalties))


@dataclass
class Phase:
    """One stretch of training."""
    until: int  # the step at which it ends
    rows: int  # windows of a step
    length: int  # tokens of a window
    people: int  # in a story, at most
    rounds: int  # how long a story may get
    rate: float  # the learning rate at its end, over its peak; it goes there in a straight line
    penalties: Penalties
    answer: float = 5.0  # weight of an answer's tokens in the loss; other tokens weigh 1
    first_block: int = 0  # the first one that penalties ask something of
    noise: float = 0.0  # on keys and values, at most: over a rounding error of a static 2-bit grid


BEGINNING = Penalties(away=0.02, update=0.05, key=0.004)
RECALL = Penalties(away=0.05, update=0.05, key=0.004)  # five people
UNLEARN = Penalties(away=0.05, update=0.05, key=0.004, early=0.05)  # the sinks in block 0
CLEARED = Penalties(away=0.05, update=0.10, key=0.03, early=0.05, last=0.02)
SIGNED = Penalties(away=0.05, update=0.10, key=0.03, steady=0.01, early=0.05, last=0.02)
SMALL = Penalties(away=0.05, update=0.15, key=0.10, steady=0.05, early=0.05, last=0.02)
LAST = Penalties(away=0.10, update=0.15, key=0.10, steady=0.05, early=0.05, last=0.02)
PHASES = [
    Phase(700, 32, 128, people=1, rounds=1, rate=0.98, penalties=BEGINNING),
    Phase(1400, 32, 128, people=2, rounds=2, rate=0.91, penalties=BEGINNING),
    Phase(2450, 16, 256, people=5, rounds=3, rate=0.73, penalties=RECALL),
    Phase(2800, 16, 256, people=5, rounds=3, rate=0.67, first_block=1, penalties=UNLEARN),
    Phase(3400, 8, 512, people=5, rounds=7, rate=0.57, first_block=1, penalties=CLEARED),
    Phase(4000, 8, 512, people=5, rounds=7, rate=0.50, first_block=1, penalties=SIGNED),
    Phase(4600, 8, 512, people=5, rounds=7, rate=0.44, first_block=1, noise=0.3, penalties=SMALL),
    Phase(5400, 8, 512, people=5, rounds=7, rate=0.36, first_block=1, noise=0.6, penalties=LAST),
    Phase(6000, 4, 1024, people=5, rounds=7, rate=0.28, first_block=1, noise=0.6, penalties=LAST),
    Phase(7250, 4, 1024, people=5, rounds=7, rate=0.03, first_block=1, noise=0.6, penalties=LAST,
          answer=10),
]


# Data

def train_tokenizer(path, pieces=CONFIG.vocab_size, count=5000):
    """A sentencepiece BPE model like LLaMA's: byte fallback, digits apart."""
    source = stories("train", seed=10**9)
    texts = (next(source).text for _ in range(count))
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=texts, model_writer=model, vocab_size=pieces, model_type="bpe",
        byte_fallback=True, split_digits=True, normalization_rule_name="identity",
        character_coverage=1.0, minloglevel=2)
    write(path, lambda part: part.write_bytes(model.getvalue()))


def batch_of(step, phase, tokenizer):
    """The windows of a step, from its number alone: tokens and answer marks, (rows, length + 1).

    Every window begins with a story, so that it holds the facts that it asks for.
    """
    source = stories("train", step, phase.people, phase.rounds)
    size = phase.length + 1
    windows = []
    for _ in range(phase.rows):
        ids, marks = [], []
        while len(ids) < size:
            story_ids, story_marks = encode(next(source), tokenizer)
            ids += story_ids
            marks += story_marks
        windows.append(torch.tensor([ids[:size], marks[:size]]))  # (2, size)
    return torch.stack(windows, dim=1)  # (2, rows, size)


def encode(story, tokenizer):
    """`<s>` and a story's tokens; and for each of these 1 if it belongs to an answer, else 0."""
    # mark the characters of answers
    inside = bytearray(len(story.text))
    for _, start, end in story.answers:
        inside[start:end] = b"\1" * (end - start)
    # a token belongs to an answer if its last character does
    pieces = tokenizer.encode(story.text, return_type="offset_mapping")
    marks = [inside[end - 1] for _, end in pieces["offsets"]]
    return [BOS, *pieces["ids"]], [0, *marks]


# The model, and what is asked of it

def noise_of(step, phase):
    """What `forward` adds to keys and values, from the step's number alone, or None.

    -> (layers, 2, rows, Hkv, length, d), uniform as rounding errors are, in units of a grid's step.
    How large it is, up to the phase's `noise` of a rounding error, is drawn anew for every step.
    """
    if phase.noise == 0:
        return None
    rng = torch.Generator().manual_seed(step)
    size = phase.noise * torch.rand((), generator=rng)
    heads = (phase.rows, CONFIG.num_key_value_heads, phase.length, CONFIG.head_dim)
    error = torch.rand((CONFIG.num_hidden_layers, 2, *heads), generator=rng) - 0.5
    return size * error


def forward(model, tokens, noise=None, first_block=0):
    """tokens (B, T) -> logits (B, T, vocab), and the values of the Penalties {name: scalar}."""
    is_bos = tokens == BOS  # (B, T)
    story = (is_bos.cumsum(1) - 1) % MARKED  # (B, T): a window seldom has more stories
    marks = F.one_hot(story, MARKED) * is_bos[..., None]  # (B, T, 8): which story's <s> a token is
    penalties = dict.fromkeys(PENALTIES, 0.0)

    h = model.model["embed_tokens"](tokens)  # (B, T, D)
    for layer, block in enumerate(model.model["layers"]):
        q, k, v = block.self_attn.qkv(block.input_layernorm(h))  # before RoPE
        noisy_k, noisy_v = k, v
        if noise is not None:
            noisy_k = add_noise(k, noise[layer, 0], is_bos, shared=(0, 2))  # a grid for a channel
            noisy_v = add_noise(v, noise[layer, 1], is_bos, shared=(0, 2, 3))  # and for a head
        out, on_bos = attend(block.self_attn, model.rope, q, noisy_k, noisy_v, marks)

        if layer == 0:
            penalties["early"] = on_bos.sum(-1).mean()
        if layer >= first_block:
            penalties["away"] += away_penalty(on_bos, story)
            penalties["update"] += (squared_norm(out) / squared_norm(h.detach())).mean()
            penalties["key"] += key_penalty(k, is_bos)
            penalties["steady"] += steady_penalty(k, is_bos)

        h = h + out  # (B, T, D)
        h = h + block.mlp(block.post_attention_layernorm(h))  # (B, T, D)

    for name in ("away", "update", "key", "steady"):
        penalties[name] = penalties[name] / (model.config.num_hidden_layers - first_block)
    penalties["last"] = last_penalty(h, is_bos)
    logits = model.lm_head(model.model["norm"](h))  # (B, T, vocab)
    return logits, penalties


def add_noise(x, noise, is_bos, shared):
    """x (B, Hkv, T, d) with noise of the same shape, in steps of a static 2-bit grid; none at <s>.

    shared: the dimensions that share a grid, from the smallest to the largest value of tokens that
    are not <s>. The gradient reaches these two values, so the model learns to narrow its ranges.
    """
    at_bos = is_bos[:, None, :, None]  # (B, 1, T, 1)
    low = x.float().masked_fill(at_bos, float("inf")).amin(shared, keepdim=True)
    high = x.float().masked_fill(at_bos, float("-inf")).amax(shared, keepdim=True)
    step = (high - low) / 3  # four levels
    return (x + noise * step * ~at_bos).to(x.dtype)


def away_penalty(on_bos, story):
    """on_bos (B, H, T, 8) as `attend` gives it; story (B, T), each token's."""
    own = story[:, None, :, None].expand(*on_bos.shape[:3], 1)  # (B, H, T, 1)
    return (1 - on_bos.gather(3, own)).mean()


def key_penalty(k, is_bos):
    """k (B, Hkv, T, d), is_bos (B, T)."""
    size = squared_norm(k).mean(1)  # (B, T)
    return mean_where(is_bos, size) / size.mean().detach()


def steady_penalty(k, is_bos):
    """k (B, Hkv, T, d), is_bos (B, T)."""
    k = k.float()
    rms = k.detach().pow(2).mean(-1, keepdim=True).sqrt()  # (B, Hkv, T, 1)
    level = k[..., STEADY] / (rms + 1e-6)  # (B, Hkv, T, 8)
    distance = (level - STEADY_LEVEL).pow(2).mean((1, 3))  # (B, T)
    return mean_where(~is_bos, distance)


def last_penalty(h, is_bos):
    """h (B, T, D), is_bos (B, T)."""
    square = h.float().pow(2)  # (B, T, D)
    others = mean_where(~is_bos, square.mean(-1)).detach()
    excess = (square.amax(-1) / others).log().relu()  # (B, T)
    return mean_where(is_bos, excess)


def mean_where(mask, x):
    """The mean of x where the mask is True; both (B, T)."""
    return (x * mask).sum() / mask.sum()


def attend(attention, rope, q, k, v, marks):
    """The attention's output (B, T, D), and the attention to each story's <s>, (B, H, T, 8).

    The latter comes out of torch's fused attention as eight more value channels, the marks. Queries
    and keys get as many zeros.
    """
    T, d = q.shape[2:]
    positions = torch.arange(T, device=q.device)  # (T)
    q, k = rope.rotate(q, positions), rope.rotate(k, positions)
    # eight more channels
    q, k = F.pad(q, (0, MARKED)), F.pad(k, (0, MARKED))  # (B, H or Hkv, T, d + 8)
    marks = marks[:, None].expand(-1, v.shape[1], -1, -1)  # (B, Hkv, T, 8)
    v = torch.cat([v, marks.to(v.dtype)], dim=-1)  # (B, Hkv, T, d + 8)
    # each KV head serves several query heads
    heads_per_kv = attention.n_heads // attention.n_kv_heads
    k = k.repeat_interleave(heads_per_kv, dim=1)  # (B, H, T, d + 8)
    v = v.repeat_interleave(heads_per_kv, dim=1)  # (B, H, T, d + 8)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=d ** -0.5)
    heads, on_bos = out[..., :d], out[..., d:].float()  # (B, H, T, d), (B, H, T, 8)
    return attention.o_proj(heads.transpose(1, 2).flatten(2)), on_bos


def squared_norm(x):
    """x (..., n) -> (...)."""
    return x.float().pow(2).sum(-1)


def new_model(seed):
    """Unit gain: a matrix's entries have variance 1 / inputs; those that write to the residual
    stream have less."""
    torch.manual_seed(seed)
    model = Llama(CONFIG)
    for name, weight in model.named_parameters():
        if weight.dim() != 2:
            continue
        inputs = weight.shape[1]
        if "embed_tokens" in name:
            std = 0.05
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            std = (inputs * (2 * CONFIG.num_hidden_layers)) ** -0.5
        else:
            std = inputs ** -0.5
        torch.nn.init.normal_(weight, std=std)
    return model


# Training

def new_optimizers(model, rate):
    """Muon for the blocks' matrices, AdamW for the embedding and the norms."""
    matrices, others = [], []
    for name, weight in model.named_parameters():
        is_matrix = weight.dim() == 2 and "embed_tokens" not in name
        (matrices if is_matrix else others).append(weight)
    muon = torch.optim.Muon(matrices, lr=rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    return [muon, adamw]


def rate_at(step):
    """Learning rate over its peak: up in WARMUP steps, and then as the phases say."""
    begin, rate = 0, 1.0
    for phase in PHASES:
        if step < phase.until:
            break
        begin, rate = phase.until, phase.rate
    share = (step - begin) / (phase.until - begin)  # how far the phase has come
    return min(1.0, (step + 1) / WARMUP) * (rate + share * (phase.rate - rate))


def train(args):
    """Train from the last saved state, or from the start; returns the model."""
    tokenizer_path = Path(args.out, "tokenizer.model")
    state_path = Path(args.out, "training.pt")
    if not tokenizer_path.exists():
        train_tokenizer(tokenizer_path)
    tokenizer = SentencePieceTokenizer(tokenizer_path).pieces
    if tokenizer.get_piece_size() != CONFIG.vocab_size:
        raise UserError(f"{tokenizer_path} has {tokenizer.get_piece_size()} pieces, and not the "
                        f"{CONFIG.vocab_size} of this model; remove it to train it anew")
    torch.set_num_threads(1)  # with more, sums come out differently
    device = torch.device(args.device)
    model = new_model(args.seed).to(device)
    optimizers = new_optimizers(model, args.lr)
    begin = load_state(state_path, model, optimizers, device) if state_path.exists() else 0
    compiled = torch.compile(forward, dynamic=False)

    end = min(args.steps, PHASES[-1].until)
    steps = tqdm(range(begin, end), initial=begin, total=end, unit="step",
                 disable=not sys.stderr.isatty())
    with open(Path(args.out, "training.jsonl"), "a") as log:
        for step in steps:
            phase = next(phase for phase in PHASES if step < phase.until)
            record = train_step(compiled, model, optimizers, step, phase, tokenizer, args)
            done = step + 1
            if done <= 10 or done % 25 == 0:
                log.write(json.dumps({"step": done, **record}) + "\n")
                log.flush()
            if done % 100 == 0 or done == end:
                save_state(state_path, model, optimizers, done)
    return model


def train_step(forward, model, optimizers, step, phase, tokenizer, args):
    """One update. Returns the losses as numbers, for the log."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = args.lr * rate_at(step)

    # forward
    tokens, marks = batch_of(step, phase, tokenizer).to(args.device)  # (rows, length + 1) both
    noise = noise_of(step, phase)
    if noise is not None:
        noise = noise.to(args.device)
    with torch.autocast(tokens.device.type, dtype=torch.bfloat16):
        logits, penalties = forward(model, tokens[:, :-1].contiguous(), noise, phase.first_block)

    # the loss, in which answers weigh more, and the penalties
    logits = logits.float().flatten(0, 1)  # (rows * length, vocab)
    loss = F.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="none")  # (rows * length)
    is_answer = marks[:, 1:].flatten().float()  # (rows * length)
    weight = 1 + (phase.answer - 1) * is_answer
    total = (loss * weight).sum() / weight.sum()
    for name, penalty_weight in asdict(phase.penalties).items():
        total = total + penalty_weight * getattr(args, name) * penalties[name]

    # backward
    for optimizer in optimizers:
        optimizer.zero_grad()
    total.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    for optimizer in optimizers:
        optimizer.step()
    answers = (loss * is_answer).sum() / is_answer.sum().clamp(min=1)
    numbers = {"loss": loss.mean(), "answers": answers, **penalties}
    return {name: round(number.item(), 5) for name, number in numbers.items()}


def save_state(path, model, optimizers, step):
    state = {"model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers],
             "step": step}
    file = io.BytesIO()
    torch.save(state, file)
    digest = hashlib.sha256(file.getbuffer()).digest()
    write(path, lambda part: part.write_bytes(file.getvalue() + digest))


def load_state(path, model, optimizers, device):
    """Restore the model and the optimizers; returns the step to go on with."""
    check_regular(path)
    content = path.read_bytes()
    file, digest = content[:-32], content[-32:]
    if hashlib.sha256(file).digest() != digest:
        raise UserError(f"{path} is damaged, or of another version; remove it to train anew")
    try:
        state = torch.load(io.BytesIO(file), weights_only=True, map_location=device)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"]):
            optimizer.load_state_dict(saved)
    except (RuntimeError, ValueError, KeyError) as error:
        raise UserError(f"{path} is the state of another model ({first_line(error)}); remove it to "
                        "train anew") from None
    return state["step"]


# The command

def print_report(folder):
    """Where the sinks of a trained model are, on test stories."""
    model, tokenizer = hf.load(folder)
    windows = load_windows("tales", tokenizer, CONFIG.max_position_embeddings, 8).tokens
    report = sink_report(model, windows, windows == BOS)
    print(f"outlier channel {report['channel']}; sink score at position 0, and at a later <s>; "
          "|h| of the channel\nat <s>, and its ratio to the layer's median; norms at <s> over the "
          "median of the others")
    print("layer  first  later  outlier  ratio     q      k      v")
    for layer, row in enumerate(report["layers"]):
        print(f"{layer:5}  {row['first']:5.2f}  {row['later']:5.2f}  {row['outlier']:7.2f}"
              f"  {row['ratio']:5.1f}  {row['q']:5.2f}  {row['k']:5.2f}  {row['v']:5.2f}")


def check(args):
    """Refuse bad arguments before anything is computed, then make sure of the folder."""
    at_least(1, **{"--steps": args.steps})
    if not args.lr > 0:
        raise UserError(f"--lr must be above 0; got {args.lr}")
    hf.usable_device(args.device)
    out = Path(args.out)
    if (out / "model.safetensors").exists() and not (out / "training.pt").exists():
        raise UserError(f"{out} holds a model, and no state to go on from (training.pt); give "
                        "another folder, or --report")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out} cannot be a folder ({error.strerror}); "
                        "give another") from None
    if not os.access(out, os.W_OK):
        raise UserError(f"--out {out} cannot be written to; give another folder")


def main():
    p = Parser(prog="python -m tinykv.assets.make",
               description="Train a model of the embedded model's kind, or report on its sinks.")
    p.add_argument("--out", metavar="DIR", required=True,
                   help="where the checkpoint goes, and the state to go on from")
    p.add_argument("--report", action="store_true",
                   help="train nothing; report on the sinks of the model in DIR")
    p.add_argument("--steps", type=int, default=PHASES[-1].until,
                   help="stop after this many steps, to go on later")
    p.add_argument("--lr", type=float, default=6e-3, help="peak learning rate")
    for name in PENALTIES:
        p.add_argument(f"--{name}", type=float, default=1.0,
                       help=f"factor on the penalty {name!r}; 0: without it")
    p.add_argument("--seed", type=int, default=0, help="of the first weights")
    add_device(p)
    with one_line(p, "stopped; the same command goes on from the last state that was saved"):
        args = p.parse_args()
        if not args.report:
            check(args)
            hf.save(train(args), Path(args.out, "tokenizer.model"), args.out)
        print_report(args.out)


if __name__ == "__main__":
    main()
