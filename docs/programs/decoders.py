"""Which methods read which models of transformers: the table of docs/huggingface.md.

    pip install transformers
    python docs/programs/decoders.py

A model here is small and random, and made by its config. A method works on it if the model's logits through a
MethodCache are those of one forward without a cache: within what 16 bits round for fp16, and near them for kivi at 8
bits. tests/lab/test_decoder.py asks the same.
"""
import sys
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository
from tinykv import UserError
from tinykv.lab import cli
from tinykv.lab.hf.decoder import NAME, Decoder, config_of
from tinykv.lab.hf.transformers import MethodCache
from tinykv.methods.registry import METHODS

SMALL = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2,
         "pad_token_id": 0}
WINDOW = 24  # tokens that a sliding layer sees
SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
# model: (class of its config, settings beside SMALL)
ZOO = {
    "Llama 2, 3": ("LlamaConfig", {}),
    "Mistral": ("MistralConfig", {"sliding_window": WINDOW}),
    "Qwen2": ("Qwen2Config", {"num_key_value_heads": 4}),
    "Qwen3": ("Qwen3Config", {"head_dim": 16}),
    "Qwen3-MoE": ("Qwen3MoeConfig", {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
                                     "moe_intermediate_size": 16}),
    "Qwen3-Next": ("Qwen3NextConfig", {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
                                       "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}),
    "Qwen3.5": ("Qwen3_5TextConfig", {"head_dim": 16, "num_hidden_layers": 4}),
    "SmolLM3": ("SmolLM3Config", {}),
    "Phi-2": ("PhiConfig", {}),
    "Phi-3, Phi-4": ("Phi3Config", {}),
    "OLMo 2": ("Olmo2Config", {}),
    "OLMo 3": ("Olmo3Config", SLIDING),
    "Gemma 2": ("Gemma2Config", {"head_dim": 16, **SLIDING}),
    "Gemma 3": ("Gemma3TextConfig", {"head_dim": 16, **SLIDING}),
    "Gemma 3 with images": ("Gemma3Config", {
        "text_config": {**SMALL, "head_dim": 16, **SLIDING}, "mm_tokens_per_image": 4,
        "vision_config": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2,
                          "image_size": 28, "patch_size": 14}}),
    "Gemma 4": ("Gemma4TextConfig", {"head_dim": 16, "vocab_size_per_layer_input": 97}),
    "gpt-oss": ("GptOssConfig", {"head_dim": 16, "num_local_experts": 4, **SLIDING}),
    "Ministral": ("MinistralConfig", {"head_dim": 16, **SLIDING}),
    "Mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "GLM-4": ("Glm4Config", {"head_dim": 16}),
    "Granite": ("GraniteConfig", {"logits_scaling": 2.0, "residual_multiplier": 0.3, "attention_multiplier": 0.25}),
    "Llama 4": ("Llama4TextConfig", {"attention_chunk_size": WINDOW}),
    "LFM2": ("Lfm2Config", {"layer_types": ["conv", "full_attention", "conv"]}),
    "Falcon": ("FalconConfig", {}),
    "GPT-2": ("GPT2Config", {}),
    "OPT": ("OPTConfig", {"ffn_dim": 80, "word_embed_proj_dim": 64}),
    "GPT-NeoX, Pythia": ("GPTNeoXConfig", {}),
    "DeepSeek-V3": ("DeepseekV3Config", {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16,
                                         "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
                                         "n_routed_experts": 4, "moe_intermediate_size": 16, "n_group": 1,
                                         "topk_group": 1, "num_experts_per_tok": 2}),
}
MOST = {"fp16": 0.002, "kivi": 0.05, "kvsink": 0.15, "rtn": 0.15}  # errors of a method that works
CUTS = [0, 60, *range(90, 101)]  # a prompt, a second turn, and then token by token


def made(model):
    """One of ZOO, random, in fp32; None where this transformers has it not."""
    name, settings = ZOO[model]
    if not hasattr(transformers, name):
        return None
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(getattr(transformers, name)(**{**SMALL, **settings})).float().eval()
    for name, weight in model.named_parameters():  # so that a token looks at others, and layers and biases matter
        if weight.dim() > 1 or name.endswith("bias"):
            torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    return model


def method_of(name, model, bits=8):
    """A method that quantizes early."""
    settings = {"fp16": {}, "kivi": {"k_bits": bits, "v_bits": bits, "group_size": 4, "recent": 4},
                "kvsink": {"k_bits": bits, "v_bits": bits, "scheme": "token-dynamic", "block": 4, "emergence_layer": 0,
                           "outlier_channel": 5},
                "rtn": {"k_bits": bits, "v_bits": bits, "scheme": "token-dynamic", "block": 4, "rope": "pre"}}
    return METHODS[name](config_of(model), **settings[name])


@torch.no_grad()
def error(model, cache):
    """The error of logits through a cache, in deviations of those without any."""
    tokens = torch.randint(3, 97, (1, CUTS[-1]), generator=torch.Generator().manual_seed(0))
    read = [model(input_ids=tokens[:, a:b], **{NAME: cache}).logits for a, b in zip(CUTS, CUTS[1:])]
    found, right = torch.cat(read, dim=1), model(input_ids=tokens, use_cache=False).logits  # (1, T, vocab) both
    return ((found - right).square().mean().sqrt() / right.std()).item()


def answers(name):
    """The words of a line of the table, after the model's name."""
    model, words = made(name), []
    if model is None:
        return None
    for method, most in MOST.items():
        try:
            worst = error(model, MethodCache(model, method_of(method, model)))
            words.append("yes" if worst < most else f"no: off by {worst:.4f}")
        except UserError:
            words.append("no")
    try:
        Decoder(model)
        words.append("yes")
    except UserError:
        words.append("no")
    both = "; ".join(dict.fromkeys(words[:2]))
    return [model.config.get_text_config().model_type, both, *words[2:]]


def line(words):
    return f"| {' | '.join(words)} |"


def main():
    head = ["model", "`model_type`", "`fp16`, `kivi`, `ott`, `oscar`", "`kvsink`, with keys after RoPE", "all others",
            "`eval_ppl.py`"]
    print(line(head), line(["---"] * len(head)), sep="\n")
    for name in ZOO:
        print(line([name, *(answers(name) or ["not in this transformers"])]), flush=True)


if __name__ == "__main__":
    parser = cli.Parser(description=__doc__)
    cli.run(parser, lambda args: main())
