"""How the embedded model is made: the recipe that its making taught (docs/embedded_model.md tells what was run).

    python -m tinykv.pretrain --out DIR             tokenizer, training, checkpoint in Hugging Face format
    python -m tinykv.pretrain --out DIR --report    only the report on the sinks of a model that is there

A LLaMA of 1.2M parameters on the stories of `tales.py`: 7,000 steps of 0.3 to 0.5 s on 2 CPU cores, and it goes on from
where it was stopped. Two things do not come by themselves at this size.

Recall. Looking a fact up by its owner is learned in a jump that may take for ever to come. It comes when the answer
stands right behind its owner's name, when a window begins with a story and so holds the facts that it asks for, and
when the first stories are of a single person. Answers count five times in the loss. Muon on the matrices and a start of
unit gain make everything come sooner.

Sinks. Small penalties encourage them, see `forward`. What then follows is not asked for by any of them: one channel of
the residual that carries a huge value at every `<s>`, from the first block on.
"""
import io
import json
import math
import sys
from functools import partial
from pathlib import Path

import sentencepiece
import torch
import torch.nn.functional as F
from tqdm import tqdm

from tinykv import UserError, at_least, checkpoint, files
from tinykv.command import Parser, add_device, one_line
from tinykv.data import load_windows
from tinykv.model import Llama, LlamaConfig
from tinykv.sinks import sink_report
from tinykv.tales import stories

BOS, EOS = 1, 2  # sentencepiece's own numbers
CONFIG = LlamaConfig(
    vocab_size=1024, hidden_size=128, intermediate_size=352, num_hidden_layers=6, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=1024, rms_norm_eps=1e-5, tie_word_embeddings=True,
    bos_token_id=BOS, eos_token_id=EOS)
ANSWER = 5.0  # weight of an answer's tokens in the loss

# until step, windows, tokens of a window, people in a story at most, rounds, weights of the penalties
PENALTIES = ("away", "update", "key", "last")
PHASES = [
    (700, 32, 128, 1, 1, (0.02, 0.05, 0.004, 0.0)),
    (1400, 32, 128, 2, 2, (0.02, 0.05, 0.004, 0.0)),
    (2800, 16, 256, 5, 3, (0.05, 0.05, 0.004, 0.0)),
    (6300, 8, 512, 5, 7, (0.05, 0.10, 0.03, 0.02)),
    (7000, 4, 1024, 5, 7, (0.05, 0.10, 0.03, 0.02)),
]
STEPS = PHASES[-1][0]


def train_tokenizer(path, pieces=CONFIG.vocab_size, count=5000):
    """A sentencepiece BPE model as LLaMA's: byte fallback, digits apart. Written whole or not at all."""
    source = stories("train", seed=10**9)
    text = (next(source).text for _ in range(count))
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=text, model_writer=model, vocab_size=pieces, model_type="bpe", byte_fallback=True,
        split_digits=True, normalization_rule_name="identity", character_coverage=1.0, minloglevel=2)
    files.write(path, lambda part: part.write_bytes(model.getvalue()))


def batch_of(step, phase, tokenizer):
    """The windows of a step, from its number alone: tokens and answer marks, (rows, length + 1) each.

    Every window begins with a story, so that it holds the facts that it asks for.
    """
    _, rows, length, people, rounds, _ = phase
    source = stories("train", step, people, rounds)
    windows = []  # (2, length + 1) each
    for _ in range(rows):
        ids, marks = [], []
        while len(ids) < length + 1:
            story = next(source)
            pieces = tokenizer.encode(story.text, return_type="offset_mapping")
            inside = bytearray(len(story.text))  # per character, whether it belongs to an answer
            for _, start, end in story.answers:
                inside[start:end] = b"\1" * (end - start)
            ids += [BOS, *pieces["ids"]]
            marks += [0, *(inside[end - 1] for _, end in pieces["offsets"])]
        windows.append(torch.tensor([ids[:length + 1], marks[:length + 1]]))
    return torch.stack(windows, dim=1)  # (2, rows, length + 1)


def forward(model, tokens):
    """Logits (B, T, vocab), and the four penalties; the first three are means over layers.

    away: mean attention that is not on the <s> of the query's own story. The mass on each <s> comes out of the fused
          attention call as more value columns, an indicator for each story; queries and keys are padded with zeros.
    update: squared attention output over the squared residual that it is added to, the residual detached.
    key: squared key norm at <s> over the mean squared key norm, the mean detached.
    last: of the last block's output: the logarithm of the largest squared entry at <s> over the mean squared entry of
          the other tokens, the latter detached; 0 where it is no larger.
    """
    is_bos = tokens == BOS  # (B, T)
    story = (is_bos.cumsum(1) - 1) % 8  # (B, T): counted modulo eight, which is seldom reached
    mark = F.one_hot(story, 8) * is_bos[..., None]  # (B, T, 8)
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    away = update = key = 0.0
    h = model.model["embed_tokens"](tokens)  # (B, T, D)
    for block in model.model["layers"]:
        attn = block.self_attn
        d, group = attn.head_dim, attn.n_heads // attn.n_kv_heads
        q, k, v = attn.qkv(block.input_layernorm(h))  # (B, H, T, d), (B, Hkv, T, d) twice
        size = k.float().pow(2).sum(-1)  # (B, Hkv, T)
        key = key + size.mean(1)[is_bos].mean() / size.mean().detach()
        q, k = model.rope.rotate(q, positions), model.rope.rotate(k, positions)
        q = F.pad(q, (0, 8))  # (B, H, T, d + 8)
        k = F.pad(k, (0, 8)).repeat_interleave(group, 1)  # (B, H, T, d + 8)
        v = torch.cat([v, mark[:, None].expand(-1, v.shape[1], -1, -1).to(v.dtype)], -1)  # (B, Hkv, T, d + 8)
        v = v.repeat_interleave(group, 1)  # (B, H, T, d + 8)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=d ** -0.5)  # (B, H, T, d + 8)
        own = out[..., d:].gather(3, story[:, None, :, None].expand(*out.shape[:3], 1))  # (B, H, T, 1)
        away = away + (1 - own.float()).mean()
        out = attn.o_proj(out[..., :d].transpose(1, 2).flatten(2))  # (B, T, D)
        update = update + (out.float().pow(2).sum(-1) / h.detach().float().pow(2).sum(-1)).mean()
        h = h + out
        h = h + block.mlp(block.post_attention_layernorm(h))  # (B, T, D)
    square = h.float().pow(2)  # (B, T, D)
    last = (square[is_bos].amax(-1) / square[~is_bos].mean().detach()).log().relu().mean()
    n = model.config.num_hidden_layers
    return model.lm_head(model.model["norm"](h)), {"away": away / n, "update": update / n, "key": key / n, "last": last}


def new_model(seed):
    """Unit gain at the start: a matrix's entries have variance 1 / inputs, those that write to the residual less."""
    torch.manual_seed(seed)
    model = Llama(CONFIG)
    for name, p in model.named_parameters():
        if p.dim() == 2:
            writes = name.endswith(("o_proj.weight", "down_proj.weight"))
            std = (p.shape[1] * (2 * CONFIG.num_hidden_layers if writes else 1)) ** -0.5
            torch.nn.init.normal_(p, std=0.05 if "embed_tokens" in name else std)
    return model


def new_optimizers(model, rate):
    """Muon for the blocks' matrices, AdamW for the embedding and the norms."""
    inner = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed_tokens" not in n]
    outer = [p for n, p in model.named_parameters() if p.dim() != 2 or "embed_tokens" in n]
    return [torch.optim.Muon(inner, lr=rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(outer, lr=rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)]


def rate_at(step, steps):
    """Learning rate over its peak: 200 steps up, then a cosine down to a twentieth."""
    return min(1.0, (step + 1) / 200) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def train(args):
    """Train from the last saved state, or from the start; returns the model."""
    tokenizer_path, state_path = Path(args.out, "tokenizer.model"), Path(args.out, "training.pt")
    if not tokenizer_path.exists():
        train_tokenizer(tokenizer_path)
    tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer_path))
    device = torch.device(args.device)
    model = new_model(args.seed).to(device)
    optimizers, begin = new_optimizers(model, args.lr), 0
    if state_path.exists():
        state = torch.load(state_path, weights_only=True, map_location=device)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"]):
            optimizer.load_state_dict(saved)
        begin = state["step"]
    with open(Path(args.out, "training.jsonl"), "a") as log:
        steps = range(begin, min(args.steps, STEPS))
        for step in tqdm(steps, initial=begin, total=steps.stop, unit="step", disable=not sys.stderr.isatty()):
            phase = next(p for p in PHASES if step < p[0])
            record = train_step(model, optimizers, step, phase, tokenizer, args)
            if (step + 1) % 25 == 0:
                log.write(json.dumps({"step": step + 1, **record}) + "\n")
                log.flush()
            if (step + 1) % 100 == 0 or step + 1 == steps.stop:
                state = {"model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers],
                         "step": step + 1}
                files.write(state_path, partial(torch.save, state))
    return model


def train_step(model, optimizers, step, phase, tokenizer, args):
    """One update. Returns the losses, as numbers, for the log."""
    tokens, marks = (t.to(args.device) for t in batch_of(step, phase, tokenizer))  # (rows, length + 1) both
    for group in (g for o in optimizers for g in o.param_groups):
        group["lr"] = args.lr * rate_at(step, STEPS)
    with torch.autocast(tokens.device.type, dtype=torch.bfloat16):
        logits, penalties = forward(model, tokens[:, :-1])
    loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    answer = marks[:, 1:].flatten().float()
    weight = 1 + (ANSWER - 1) * answer
    penalty = sum(w * getattr(args, name) * penalties[name] for w, name in zip(phase[-1], PENALTIES))
    for optimizer in optimizers:
        optimizer.zero_grad()
    ((loss * weight).sum() / weight.sum() + penalty).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
    return {"loss": loss.mean().item(), "answers": ((loss * answer).sum() / answer.sum().clamp(min=1)).item(),
            **{name: penalty.item() for name, penalty in penalties.items()}}


def print_report(folder):
    """Where the sinks of a trained model are, on test stories."""
    model, tokenizer = checkpoint.load(folder)
    windows = load_windows("tales", tokenizer, CONFIG.max_position_embeddings, 8).tokens
    report = sink_report(model, windows, windows == BOS)
    print(f"outlier channel {report['channel']}; sink score at position 0, and at a later <s>; |h| of the channel\n"
          "at <s>, and its ratio to the layer's median; norms at <s> over the median of the others")
    print("layer  first  later  outlier  ratio     q      k      v")
    for layer, row in enumerate(report["layers"]):
        print(f"{layer:5}  {row['first']:5.2f}  {row['later']:5.2f}  {row['outlier']:7.2f}  {row['ratio']:5.1f}"
              f"  {row['q']:5.2f}  {row['k']:5.2f}  {row['v']:5.2f}")


def check(args):
    """What can be seen to be wrong before anything is computed; then there is a folder to write to."""
    at_least(1, **{"--steps": args.steps})
    if not args.lr > 0:
        raise UserError(f"--lr must be above 0; got {args.lr}")
    checkpoint.usable(args.device)
    out = Path(args.out)
    if (out / "model.safetensors").exists() and not (out / "training.pt").exists():
        raise UserError(f"{out} holds a model, and no state to go on from (training.pt); give another folder, or "
                        "--report")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out} cannot be a folder ({error.strerror}); give another") from None


def main():
    p = Parser(prog="python -m tinykv.pretrain", description="Train the embedded model, or report on its sinks.")
    p.add_argument("--out", metavar="DIR", required=True, help="where the checkpoint goes, and the state to go on from")
    p.add_argument("--report", action="store_true", help="train nothing; report on the sinks of the model in DIR")
    p.add_argument("--steps", type=int, default=STEPS, help="stop after this many steps, to go on later")
    p.add_argument("--lr", type=float, default=6e-3, help="peak learning rate")
    for name in PENALTIES:
        p.add_argument(f"--{name}", type=float, default=1.0, help=f"factor on the penalty {name!r}; 0: without it")
    p.add_argument("--seed", type=int, default=0, help="of the first weights")
    add_device(p)
    with one_line(p, "stopped; the same command goes on from the last state that was saved"):
        args = p.parse_args()
        if not args.report:
            check(args)
            checkpoint.save(train(args), Path(args.out, "tokenizer.model"), args.out)
        print_report(args.out)


if __name__ == "__main__":
    main()
