"""Make the embedded model: tokenizer, training, checkpoint in HF format.

    python docs/programs/embedded_model.py --out DIR
    python -m tinykv.lab.analysis sinks outliers norms --model DIR   where its sinks are

A LLaMA of 250,000 parameters learns the stories of `data/stories.py` in 4,750 steps, a quarter of an hour on one CPU
core. On one machine the same command gives the same bits. It made the shipped weights.

The loss is the cross-entropy of the next token, where answers and what refrains ask for weigh more. It says nothing
about attention, keys, values or hidden states. Sinks come because most heads are needed at few tokens only
(docs/embedded_model.md). They begin in chants, which teach little else, and stay in the stories; answers are learned
after them.

The rule by which the shipped model was chosen is in docs/embedded_model.md.
"""
import io
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import sentencepiece
import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, processors
from tqdm import trange

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository
from tinykv import UserError
from tinykv.hf.tokenizer import SentencePieceTokenizer
from tinykv.lab.cli import Parser, one_line
from tinykv.lab.data.stories import OFTEN, REFRAINS, WORDS, Rng, Writer, stories
from tinykv.lab.files import write, write_json
from tinykv.lab.hf.save import save as write_folder
from tinykv.model import Llama, LlamaConfig

BOS, EOS = 1, 2  # sentencepiece's own ids
CONFIG = LlamaConfig(
    vocab_size=1024, hidden_size=64, intermediate_size=176, num_hidden_layers=4, num_attention_heads=2,
    num_key_value_heads=1, head_dim=32, max_position_embeddings=1024, rms_norm_eps=1e-5, rope_theta=1e5,
    tie_word_embeddings=True, bos_token_id=BOS, eos_token_id=EOS)
WARMUP = 100  # steps until the learning rate of an optimizer is at its peak
CLIP = 1.0  # largest norm of the gradient
REFRAIN = 3  # weight in the loss of what refrains ask for; other tokens weigh 1


@dataclass
class Phase:
    """One stretch of training."""
    until: int  # the step at which it ends
    rows: int  # windows of a step
    length: int  # tokens of a window
    chants: float  # the share of windows that hold nothing but chants
    people: int  # in a story, at most; 0: there are no stories
    story_chants: bool  # whether stories have chants
    answer: int  # weight of an answer's tokens in the loss
    dropout: float  # the share of values that are 0
    rates: tuple  # the learning rate, from here to there in a straight line
    optimizer: str = ""  # a new one from here on


PHASES = [
    Phase(1500, 8, 128, 1.0, 0, False, 1, 0.30, (5e-3, 4.25e-3), "adamw"),
    Phase(1700, 4, 512, 1.0, 0, False, 1, 0.30, (4.25e-3, 4e-3)),
    Phase(2700, 12, 128, 0.33, 1, False, 5, 0.20, (4e-3, 4.75e-3), "muon"),
    Phase(4250, 6, 512, 0.0, 5, True, 8, 0.15, (4.75e-3, 2.4e-3)),
    Phase(4750, 3, 1024, 0.0, 5, True, 8, 0.15, (2.4e-3, 1e-4)),
]


# Data

def train_tokenizer(path):
    """A sentencepiece BPE model like LLaMA's: byte fallback, digits apart."""
    source = stories("train", seed=10**9)
    texts = (next(source).text for _ in range(5000))
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=texts, model_writer=model, vocab_size=CONFIG.vocab_size, model_type="bpe",
        byte_fallback=True, split_digits=True, normalization_rule_name="identity",
        character_coverage=1.0, minloglevel=2)
    path.write_bytes(model.getvalue())


def json_tokenizer(pieces):
    """The same tokenizer as transformers reads it everywhere: a `tokenizers.Tokenizer`, for tokenizer.json.

    Of the merges, the piece that comes first in the vocabulary is made first, as sentencepiece has it.
    """
    vocab = {pieces.id_to_piece(i): i for i in range(pieces.get_piece_size())}
    merges = [(piece[:n], piece[n:]) for piece, i in vocab.items() for n in range(1, len(piece))
              if not (pieces.is_unknown(i) or pieces.is_control(i) or pieces.is_byte(i))]
    merges = [pair for pair in merges if pair[0] in vocab and pair[1] in vocab]
    fast = Tokenizer(models.BPE(vocab, merges, byte_fallback=True))
    fast.normalizer = normalizers.Sequence([
        normalizers.Replace(Regex(r"\A +|[ \u2581]+\z"), ""),
        normalizers.Replace(Regex(" +"), "\u2581"),
        normalizers.Prepend("\u2581")])
    fast.decoder = decoders.Sequence([
        decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    begin, end = pieces.id_to_piece(BOS), pieces.id_to_piece(EOS)
    fast.add_special_tokens([begin, end])
    fast.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", pair=f"{begin} $A {begin} $B", special_tokens=[(begin, BOS)])
    return fast


def save(model, out):
    """The folder, of which transformers reads tokenizer.json."""
    write_folder(model, out / "tokenizer.model", out)
    fast = json_tokenizer(SentencePieceTokenizer(out / "tokenizer.model").pieces)
    write(out / "tokenizer.json", lambda path: fast.save(str(path)))
    write_json(out / "tokenizer_config.json", {
        "bos_token": fast.id_to_token(BOS), "eos_token": fast.id_to_token(EOS), "unk_token": fast.id_to_token(0),
        "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False,
        "model_max_length": model.config.max_position_embeddings})
    write_json(out / "generation_config.json", {"bos_token_id": BOS, "eos_token_id": EOS})


def chants(seed, often):
    """Yield documents that are nothing but a chant. often: the share of refrains."""
    rng = Rng(seed)
    while True:
        writer = Writer(rng)
        writer.chant(30 + rng.below(90), often=often)
        yield writer.story


def batch_of(number, phase, pieces, often=OFTEN):
    """The windows of a step, from its number alone: tokens and weights, (rows, length + 1).

    Every window begins with a document, so that it holds the facts that it asks for. often: the share of refrains in
    documents that are nothing but a chant.
    """
    only_chants = chants(number, often)
    told = stories("train", number, phase.people, chants=phase.story_chants)
    size = phase.length + 1
    windows = []  # of (token, weight)
    for row in range(phase.rows):
        source = only_chants if row < round(phase.rows * phase.chants) else told
        window = []
        while len(window) < size:
            window += encode(next(source), phase, pieces)
        windows.append(window[:size])
    return torch.tensor(windows).unbind(-1)


def encode(document, phase, pieces):
    """A document as [(id, what it weighs in the loss)], `<s>` first."""
    weight = [1] * len(document.text)  # of a token that ends with this character
    for _, start, end in document.answers:
        weight[start:end] = [phase.answer] * (end - start)
    for start, end in document.refrains:
        weight[start:end] = [REFRAIN] * (end - start)
    encoded = pieces.encode(document.text, return_type="offset_mapping")
    return [(BOS, 1), *((token, weight[end - 1]) for token, (_, end) in zip(encoded["ids"], encoded["offsets"]))]


def mask_of_chants(pieces):
    """(vocab): added to logits while there are chants alone; 0 for their pieces, -10,000 for others. Without it the
    first thing to learn is that the others never occur, and sinks move to block 0."""
    known = [BOS, *pieces.encode(" ".join([*WORDS, *REFRAINS]))]
    mask = torch.full((CONFIG.vocab_size,), -1e4)
    mask[known] = 0.0
    return mask


# The model

def new_model(seed, config=CONFIG):
    """Unit gain: a matrix's entries have variance 1 / inputs; those that write to the residual stream have less."""
    torch.manual_seed(seed)
    model = Llama(config)
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            inputs = weight.shape[1]
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                inputs *= 2 * config.num_hidden_layers
            std = 0.05 if "embed_tokens" in name else inputs ** -0.5
            torch.nn.init.normal_(weight, std=std)
    for block in model.model["layers"]:
        block.self_attn.v_proj.register_forward_hook(drop_values)
    return model


def drop_values(layer, inputs, v):
    """In training, a share of the tokens have the value 0, the same ones for every query."""
    kept = F.dropout(torch.ones(*v.shape[:2], 1), layer.dropout if layer.training else 0.0)  # (B, T, 1)
    return v * kept  # (B, T, Hkv * d), with one KV head


def new_optimizers(kind, model):
    """AdamW, with Muon for the blocks' matrices or without."""
    matrices, others = [], []
    for name, weight in model.named_parameters():
        is_matrix = weight.dim() == 2 and "embed_tokens" not in name
        (matrices if is_matrix else others).append(weight)
    if kind == "muon":
        muon = torch.optim.Muon(matrices, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        return [muon, torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0, fused=True)]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return [torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)]


# Training

def train(out, seed=0, steps=PHASES[-1].until):
    """Train for so many steps -> the model."""
    torch.set_num_threads(1)  # with more, sums come out differently
    train_tokenizer(out / "tokenizer.model")
    pieces = SentencePieceTokenizer(out / "tokenizer.model").pieces
    mask = mask_of_chants(pieces)
    model, begin, records = new_model(seed), 0, []  # begin: of the phase
    for phase in PHASES:
        if phase.optimizer:
            optimizers, first = new_optimizers(phase.optimizer, model), begin  # first: its first step
        for step in trange(begin, min(phase.until, steps), disable=None):
            number = seed * 10**5 + step
            torch.manual_seed(number)  # of dropout
            rate = rate_at(step, begin, first, phase)
            loss, asked = train_step(model, optimizers, rate, phase, *batch_of(number, phase, pieces), mask)
            if step < 10 or (step + 1) % 25 == 0:
                records.append(json.dumps({"step": step + 1, "loss": round(loss, 5), "asked": round(asked, 5)}) + "\n")
        begin = phase.until
    (out / "training.jsonl").write_text("".join(records))
    return model.eval()


def rate_at(step, begin, first, phase):
    """The learning rate of a phase's step. begin, first: the first step of the phase, and of its optimizer."""
    start, end = phase.rates
    return (start + (end - start) * (step - begin) / (phase.until - begin)) * min(1, (step + 1 - first) / WARMUP)


def train_step(model, optimizers, rate, phase, tokens, weights, mask):
    """One update. Returns two losses as numbers: of all tokens, and of those that weigh more."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
    for block in model.model["layers"]:
        block.self_attn.v_proj.dropout = phase.dropout

    # cross-entropy
    model.train()
    logits = model(tokens[:, :-1])  # (rows, length, vocab)
    if phase.people == 0:
        logits = logits + mask
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    weight = weights[:, 1:].flatten()  # (rows * length)
    total = (loss * weight).sum() / weight.sum()

    # backward
    for optimizer in optimizers:
        optimizer.zero_grad()
    total.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    for optimizer in optimizers:
        optimizer.step()
    return loss.mean().item(), loss[weight > 1].mean().item()


# The command

def main():
    p = Parser(prog="python docs/programs/embedded_model.py", description="Train the embedded model.")
    p.add_argument("--out", metavar="DIR", required=True, help="where the checkpoint goes")
    p.add_argument("--seed", type=int, default=0, help="of the first weights, the text and dropout")
    with one_line(p):
        args = p.parse_args()
        out = Path(args.out)
        if out.exists():
            raise UserError(f"{out} exists; give a new folder")
        out.mkdir(parents=True)
        save(train(out, args.seed), out)


if __name__ == "__main__":
    main()
