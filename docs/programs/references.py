"""Makes tests/references/: small random checkpoints, and what transformers computes from them.

    pip install torch transformers sentencepiece protobuf   # in an environment of its own
    python docs/programs/references.py

The tests read the result and need no transformers. Weights are random, on such a scale that a model which leaves out a
feature of its variant gives clearly different logits; norms and biases are random too, so none can be forgotten. Logits
are those of the folder as it was loaded back, in float32.
"""
import io
import json
import shutil
from pathlib import Path

import sentencepiece
import tokenizers
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Regex, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaTokenizer

OUT = Path(__file__).parents[2] / "tests" / "references"
ROWS, LENGTH, NEW = 2, 48, 20
SMALL = dict(vocab_size=80, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=4, max_position_embeddings=256, rms_norm_eps=0.05, bos_token_id=1, eos_token_id=2)
GROUPED = SMALL | {"num_key_value_heads": 2}
WIDE = SMALL | {"num_attention_heads": 2, "num_key_value_heads": 1}  # heads of 16: eight frequencies
# A context of 32 leaves one of eight frequencies alone, ramps one, and slows six by the factor.
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32, "rope_theta": 10000.0}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
VARIANTS = {  # name -> (kind of model, settings, dtype on disk, format)
    "mha": ("llama", SMALL, torch.float32, "safetensors"),
    "gqa": ("llama", GROUPED, torch.bfloat16, "safetensors"),
    "tied": ("llama", SMALL | {"tie_word_embeddings": True}, torch.float16, "safetensors"),
    "head_dim": ("llama", WIDE | {"head_dim": 24}, torch.float16, "safetensors"),
    "rope_llama3": ("llama", WIDE | {"rope_parameters": LLAMA3}, torch.float16, "safetensors"),
    "rope_linear": ("llama", WIDE | {"rope_parameters": LINEAR}, torch.float16,
                    "safetensors, config.json in the old spelling"),
    "rope_theta": ("llama", WIDE | {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
                   torch.float16, "safetensors"),
    "biases": ("llama", SMALL | {"attention_bias": True, "mlp_bias": True}, torch.float16, "safetensors"),
    "mistral": ("mistral", GROUPED | {"sliding_window": 8}, torch.float16, "safetensors"),
    "sharded": ("llama", SMALL, torch.float16, "safetensors in shards"),
    "qwen2": ("qwen2", GROUPED | {"tie_word_embeddings": True}, torch.float16, "safetensors"),
    "qwen3": ("qwen3", GROUPED | {"head_dim": 16}, torch.float16, "safetensors"),
}
LINES = ["the ferryman of Aldermoor counts seventeen crates of pears before the bell", "a tall widow sells 40 lanterns",
         "nobody in the harbour has seen the blue kite since Tuesday", "Orrin's ledger says: pears 17, lanterns 40.",
         "the bell rings twice for the ferry and three times for fog", "seven sisters keep bees above the mill road"]
# None begins with a blank: there transformers 5 leaves out the one that sentencepiece itself puts before a text.
TEXTS = ["the ferryman sells 17 lanterns", "a  double  space, and a blank ", "", "\n", "line one\nline two\n\tthree",
         "Zürich 蜂 🐝 naïve", "the <s> bell </s> and <|begin_of_text|> pears <|end_of_text|>", "Orrin's 2024: 3.14!?"]


def randomized(config, seed):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    embedding = 0.2 if config.tie_word_embeddings else 1.0  # logits of the same size, tied or not
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("bias"):
                p.normal_(0, 0.5)
            elif p.dim() == 1:
                p.uniform_(0.4, 1.6)  # norms
            else:
                sharp = 2.0 if "q_proj" in name or "k_proj" in name else 1.0  # attention that is not near uniform
                p.normal_(0, embedding if "embed" in name else sharp * p.shape[1] ** -0.5)
    return model


def old_spelling(path):
    """config.json as transformers 4 wrote it: rope_theta beside rope_scaling, whose "type" is linear."""
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope["rope_theta"]
    config["rope_scaling"] = {"type": rope["rope_type"], "factor": rope["factor"]}
    config["torch_dtype"] = config.pop("dtype")
    path.write_text(json.dumps(config, indent=2) + "\n")


def make_variant(name, seed):
    kind, settings, dtype, layout = VARIANTS[name]
    config = AutoConfig.for_model(kind, **settings)
    folder = OUT / name
    shard = "30KB" if layout == "safetensors in shards" else "1GB"
    randomized(config, seed).to(dtype).save_pretrained(folder, max_shard_size=shard)
    (folder / "generation_config.json").unlink()
    if "old spelling" in layout:
        old_spelling(folder / "config.json")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    tokens = torch.randint(config.vocab_size, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))  # (B, T)
    with torch.no_grad():
        logits = model(tokens).logits  # (B, T, vocab)
        text = tokens[:, :9]
        for _ in range(NEW):
            text = torch.cat([text, model(text).logits[:, -1:].argmax(-1)], 1)  # (B, T + 1)
    save_file({"tokens": tokens.to(torch.int16), "logits": logits, "greedy": text.to(torch.int16)},
              folder / "expected.safetensors")
    return {"stored": f"{layout}, {str(dtype).removeprefix('torch.')}", "seed": seed}


def make_json_tokenizer(folder):
    """Byte-level BPE as Llama 3 has it: pieces split by an expression, special tokens last, BOS by post-processor."""
    fast = tokenizers.Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(r"\d{1,3}| ?\p{L}+|\s+|[^\s\p{L}\d]+"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    fast.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    fast.train_from_iterator(LINES, trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet, show_progress=False))
    begin, end = "<|begin_of_text|>", "<|end_of_text|>"
    fast.add_special_tokens([begin, end])
    fast.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", pair=f"{begin} $A {begin} $B", special_tokens=[(begin, fast.token_to_id(begin))])
    folder.mkdir()
    fast.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": begin, "eos_token": end, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return AutoTokenizer.from_pretrained(folder)


def make_sentencepiece(folder):
    """BPE with byte fallback, spaces and digits apart, as LLaMA 1 and 2 have it."""
    proto = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_writer=proto, vocab_size=360, model_type="bpe", byte_fallback=True,
        split_digits=True, normalization_rule_name="identity", remove_extra_whitespaces=False, character_coverage=1.0,
        allow_whitespace_only_pieces=True, minloglevel=2)
    folder.mkdir()
    (folder / "tokenizer.model").write_bytes(proto.getvalue())
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "tokenizer_class": "LlamaTokenizer",
                "add_bos_token": True, "add_eos_token": False, "legacy": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return LlamaTokenizer.from_pretrained(folder)


def encodings(tokenizer):
    """What transformers makes of the texts: special tokens in them as text, as its split_special_tokens has it."""
    rows = []
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        full = tokenizer(text, split_special_tokens=True)["input_ids"]
        rows.append({"text": text, "ids": ids, "with_bos": full})
    return {"bos_id": tokenizer.bos_token_id, "eos_id": tokenizer.eos_token_id, "size": len(tokenizer), "rows": rows}


def main():
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    manifest = {"versions": {m.__name__: m.__version__ for m in (torch, transformers, tokenizers, sentencepiece)},
                "variants": {name: make_variant(name, seed) for seed, name in enumerate(VARIANTS)}}
    for name, make in {"tokenizer_json": make_json_tokenizer, "tokenizer_model": make_sentencepiece}.items():
        expected = encodings(make(OUT / name))
        (OUT / name / "expected.json").write_text(json.dumps(expected, indent=1, ensure_ascii=True) + "\n")
    (OUT / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    size = sum(f.stat().st_size for f in OUT.rglob("*") if f.is_file())
    print(f"{OUT}: {size} bytes, made with", ", ".join(f"{n} {v}" for n, v in manifest["versions"].items()))


if __name__ == "__main__":
    main()
