"""Any method as the cache of transformers' own models: tinykv/hf/transformers.py, and the page about it."""
import doctest
import re
import sys
from pathlib import Path

import pytest
import torch
from cases import tokens_of
from test_model import built

from tinykv import UserError, hf
from tinykv.cache import KVCache
from tinykv.methods.registry import METHODS

transformers = pytest.importorskip("transformers")
from tinykv.hf.transformers import MethodCache  # noqa: E402

ROOT = Path(__file__).parent.parent
NEW = 16  # tokens
GREEDY = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
QUICK = ("kvsink", "antkv", "intactkv", "kivi")  # what the others need, these need, too


def generate(theirs, tokens, cache=None, **settings):
    """Greedily. Without a mask, transformers takes every pad_token_id for padding."""
    return theirs.generate(tokens, **{"attention_mask": torch.ones_like(tokens), "past_key_values": cache, **GREEDY,
                                      **settings})


def load(folder, dtype):
    """A tiny model here, and the same of transformers."""
    folder = ROOT / "tests/references" / folder
    return hf.load_model(folder, dtype=dtype), transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


@pytest.fixture(scope="module", params=["gqa", "qwen3", *[
    pytest.param(name, marks=pytest.mark.whole) for name in ("mistral", "qwen2")]])
def models(request):
    """In fp32. Two query heads share a KV head; the Mistral has a sliding window."""
    return load(request.param, torch.float32)


def prompt_of(method, batch=2, T=9):
    tokens = tokens_of(batch, T)
    if method.prefix:
        tokens[:, :2] = torch.tensor(method.prefix.ids)
    return tokens


def test_fp16_is_transformers_own_generation(models):
    own, theirs = models
    tokens = tokens_of(2, 9)
    cache = MethodCache(theirs, built("fp16", own))
    text = generate(theirs, tokens, cache)
    cache.remove()
    assert len(cache.inner) == 9 + NEW - 1
    assert torch.equal(text, generate(theirs, tokens))
    assert not any(module._forward_hooks for module in theirs.modules())


EVERY = [name if name in QUICK else pytest.param(name, marks=pytest.mark.whole) for name in METHODS]


@pytest.mark.parametrize("name", EVERY)
@torch.no_grad()
def test_every_method_generates_as_it_does_here(name, models):
    """The same tokens as here, and the same parts of the cache, over two turns of a chat."""
    own, theirs = models
    method = built(name, own)
    tokens = prompt_of(method)
    mine, cache = KVCache(own, method), MethodCache(theirs, method)
    text = generate(theirs, tokens, cache)
    assert torch.equal(text, own.generate(tokens, NEW, mine)) and repr(cache.inner) == repr(mine)
    if name != "fp16":
        assert cache.inner.part_bytes()["coded"] > 0

    longer = torch.cat([text, tokens_of(2, 5, seed=3)], 1)
    text = generate(theirs, longer, cache)
    unread = longer[:, len(mine):]  # `Llama.generate` begins with all of its tokens
    assert torch.equal(text[:, longer.shape[1]:], own.generate(unread, NEW, mine)[:, unread.shape[1]:])
    assert repr(cache.inner) == repr(mine)
    cache.reset()
    assert cache.get_seq_length() == len(method.prefix.ids if method.prefix else [])
    cache.remove()


def logits_of(model, text, **settings):
    """Of the prompt, and then of each token of a text by itself."""
    found = [model(chunk, **settings) for chunk in (text[:, :-NEW], *text[:, -NEW:].split(1, dim=1))]
    return torch.cat([getattr(logits, "logits", logits)[:, -1:] for logits in found], 1).float()  # (B, 1 + NEW, vocab)


def rotate_in_fp32(theirs, patch):
    """transformers rounds cos, sin, both products and their sum to 16 bits; here a rotated query is rounded once."""
    modeling, angles = sys.modules[type(theirs).__module__], theirs.model.rotary_emb.forward
    rotate = modeling.apply_rotary_pos_emb
    patch.setattr(theirs.model.rotary_emb, "forward", lambda x, position_ids: angles(x.float(), position_ids))
    patch.setattr(modeling, "apply_rotary_pos_emb",
                  lambda q, k, *angles: [x.to(q.dtype) for x in rotate(q, k, *angles)])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("name", EVERY)
@torch.no_grad()
def test_in_bf16_only_the_rounding_of_queries_differs(name, bits, models, monkeypatch):
    """With queries that are rounded once, every logit of every method is the one here, bit for bit."""
    own, theirs = load(models[0].config.model_type.replace("llama", "gqa"), torch.bfloat16)
    rotate_in_fp32(theirs, monkeypatch)
    method = built(name, models[0], k_bits=bits, v_bits=bits)
    text = own.generate(prompt_of(method), NEW, KVCache(own, method))
    cache = MethodCache(theirs, method)
    found = logits_of(theirs, text[:, cache.get_seq_length():], past_key_values=cache)
    assert torch.equal(found, logits_of(own, text, cache=KVCache(own, method)))


@torch.no_grad()
def test_in_bf16_the_rounding_of_queries_is_small(models):
    """Without a codec, which turns a small difference into another code: about as much as bf16 differs from fp32."""
    own, theirs = load(models[0].config.model_type.replace("llama", "gqa"), torch.bfloat16)
    method = built("fp16", own)
    text = tokens_of(2, 9 + NEW)
    found = logits_of(theirs, text, past_key_values=MethodCache(theirs, method))
    expected = logits_of(own, text, cache=KVCache(own, method))
    exact = logits_of(models[0], text, cache=KVCache(models[0], method))
    assert 0 < (found - expected).abs().mean() < 2 * (expected - exact).abs().mean()


@torch.no_grad()
def test_a_prompt_may_be_quantized_before_it_is_read(models):
    own, theirs = models
    method = built("kvsink", own)
    tokens = prompt_of(method)
    cache = MethodCache(theirs, method, "paper", prompt=9)
    text = generate(theirs, tokens, cache)
    cache.remove()
    assert torch.equal(text, own.generate(tokens, NEW, KVCache(own, method, "paper", prompt=9)))


PADDED = {"attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])}


@pytest.mark.parametrize("word, use", [
    ("padding", lambda model, cache: generate(model, tokens_of(2, 6), cache, **PADDED)),
    ("position_ids", lambda model, cache: model(tokens_of(1, 6), past_key_values=cache,
                                                position_ids=torch.tensor([[0, 1, 2, 3, 5, 6]]))),
    ("beam search", lambda model, cache: generate(model, tokens_of(1, 6), cache, num_beams=2)),
    ("beam search", lambda model, cache: cache.reorder_cache(torch.tensor([0]))),
    ("assisted decoding", lambda model, cache: cache.crop(-1))])
def test_what_it_cannot_do_is_refused_in_one_line(models, word, use):
    own, theirs = models
    cache = MethodCache(theirs, built("fp16", own))
    with pytest.raises(UserError, match=word) as error:
        use(theirs, cache)
    cache.remove()
    assert "\n" not in str(error.value)


def test_the_session_is_what_the_page_says(monkeypatch):
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs/huggingface.md").read_text()
    session, = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    said = []
    test = doctest.DocTestParser().get_doctest(session, {}, "huggingface.md", None, 0)
    doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS).run(test, out=said.append)
    assert not said, "".join(said)
