"""A model of EleutherAI's lm_eval that reads through the cache of any method: its tasks, under KV-cache quantization.

    python -m tinykv.lab.run.lm_eval --model tinykv --tasks arc_easy,gsm8k \\
        --model_args model=path/to/Llama-2-7b-hf,method=kvsink,bits=2,protocol=stream,prompt=context

model_args are the flags of eval_ppl.py, with `_` for `-`, for one method. protocol and prompt say when a context is
quantized:

    protocol=paper                   before anything reads it; the answer is read as its codes as well
    protocol=paper, prompt=context   before anything reads it; the answer arrives token by token
    protocol=stream                  block by block, as in a stream of tokens from the first one on
    protocol=stream, prompt=context  after the whole context was read exactly, as KIVI's code does

What is generated always follows a context that arrives at once. lm_eval is optional; this file targets version 0.4.13,
and handles one request at a time.
"""
import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from tqdm import tqdm

from tinykv import UserError, hf, one_of
from tinykv.cache import KVCache
from tinykv.evaluate import chunks_of
from tinykv.lab import cli
from tinykv.lab.run import flags
from tinykv.lab.run.calibration import calibrate_all


@register_model("tinykv")
class TinyKV(TemplateLM):
    def __init__(self, method="fp16", prompt=None, max_gen_toks=256, batch_size=1, max_batch_size=None, **settings):
        super().__init__()
        one_of(["context"], prompt=prompt)
        flags.check_effect(settings, "draws", "windows", "json", "plot", "vs", "wide")
        self.args = args = flags.set_up(flags.parse(methods=["fp16", method], given=settings))
        self.prompt, self.max_gen_toks = prompt, max_gen_toks

        # model, tokenizer and method of these flags, calibrated as the command does it
        self.tokenizer = args.tokenizer
        *others, entry = args.entries.values()  # fp16 comes first
        if any((other.name, bool(other.weights)) == (entry.name, bool(entry.weights)) for other in others):
            raise UserError(f"model_args make several rows: {', '.join(args.entries)}; give one value of each setting")
        model = args.loaded[0] if args.loaded else hf.load_model(args.folder, args.devices, args.dtype)
        models = calibrate_all(args, model, {entry.title: entry})
        if entry.error is not None:
            raise entry.error
        self.model, self.method = models[entry.weights], entry.method

        self.prefix = self.method.prefix.ids if self.method.prefix else []
        self.max_length = args.config.positions - len(self.prefix)

    # What lm_eval asks of a tokenizer

    @property
    def eot_token_id(self):
        return self.tokenizer.eos_id

    @property
    def prefix_token_id(self):
        return self.eot_token_id if self.tokenizer.bos_id is None else self.tokenizer.bos_id

    def tok_encode(self, string, add_special_tokens=None, **kwargs):
        return self.tokenizer.encode(string, bos=add_special_tokens is not False)

    def apply_chat_template(self, *args, **kwargs):
        raise UserError("chat templates are not implemented: special tokens in a text are ordinary characters here; "
                        "leave out --apply_chat_template")

    tokenizer_name = property(apply_chat_template)  # of a template, which lm_eval asks for first

    # Likelihoods

    @torch.inference_mode()
    def _loglikelihood_tokens(self, requests, disable_tqdm=False, **kwargs):
        """[(text, context's ids, target's ids)] -> [(log-likelihood of the target, whether it is the most likely)]."""
        results = []
        for _, context, target in tqdm(requests, disable=disable_tqdm):
            n = len(target)
            ids = (context + target)[-self.max_length - 1:-1]  # too long a context loses its beginning
            states = self.read(ids, n_context=len(ids) + 1 - n)  # (1, T', D)
            logits = self.model.lm_head(states[0, -n:]).float()  # (n, vocab)
            chosen = torch.tensor(target, device=logits.device)  # (n)
            logp = logits.log_softmax(-1).gather(1, chosen[:, None]).sum()
            results.append((logp.item(), bool((logits.argmax(-1) == chosen).all())))
        return results

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        raise UserError("eval_ppl.py measures the perplexity of a text")

    def read(self, ids, n_context):
        """The normed hidden states (1, T', D) of a text: of all its tokens, or of those after a prefix."""
        tokens = self.with_prefix(ids)  # (1, T)
        n_context += tokens.shape[1] - len(ids)
        cache = KVCache(self.model, self.method, self.args.protocol, n_context if self.prompt else None)
        states = [self.model(chunk, cache, logits=False) for chunk in chunks_of(tokens, cache)]
        return torch.cat(states, dim=1)

    def with_prefix(self, ids):
        """ids -> tokens (1, T), which begin with the method's prefix, if it has one."""
        if self.prefix and ids[0] == self.tokenizer.bos_id:
            ids = ids[1:]  # the prefix has a BOS of its own
        return torch.tensor([[*self.prefix, *ids]], device=self.args.device)

    # Generation

    def generate_until(self, requests, disable_tqdm=False):
        """[what follows a context, up to one of the texts that end it]."""
        answers = []
        for request in tqdm(requests, disable=disable_tqdm):
            text, settings = request.args
            settings = normalize_gen_kwargs(settings, self.max_gen_toks)
            new = settings["max_gen_toks"]
            ids = self.tok_encode(text)[-max(1, self.max_length - new):]  # too long a context loses its beginning
            tokens = self.with_prefix(ids)  # (1, T)
            before = self.tokenizer.decode(tokens[0].tolist())
            cache = KVCache(self.model, self.method, self.args.protocol, tokens.shape[1])
            tokens = self.model.generate(tokens, new, cache, settings.get("temperature", 0.0),
                                         settings.get("top_p", 1.0), eos=self.eot_token_id)  # (1, T + new)
            answer = self.tokenizer.decode(tokens[0].tolist())[len(before):]
            for end in filter(None, settings["until"]):
                answer = answer.split(end)[0]
            answers.append(answer)
        return answers


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate
    with cli.one_line(cli.Parser(prog="python -m tinykv.lab.run.lm_eval")):
        cli_evaluate()
