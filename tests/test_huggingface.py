"""Any method as the cache of transformers' own models: tinykv/hf/transformers.py, and the page about it."""
import doctest
import re
from pathlib import Path

import pytest
import torch
from cases import takes, tokens_of

from tinykv import UserError, hf
from tinykv.cache import KVCache
from tinykv.calibrate import calibrate
from tinykv.methods.intactkv import Prefix
from tinykv.methods.registry import METHODS

transformers = pytest.importorskip("transformers")
from tinykv.hf.transformers import MethodCache  # noqa: E402

ROOT = Path(__file__).parent.parent
NEW = 16  # tokens
GREEDY = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
SMALL = {"k_bits": 2, "v_bits": 3, "preserve": 3, "emergence_layer": 0, "outlier_channel": 5, "outlier_num": 2,
         "skip_layers": 1, "vq": "d4m8", "anchors": "4", "recent": 4, "group_size": 8}
QUICK = ("kvsink", "antkv", "intactkv", "kivi")  # what the others need, these need, too


@pytest.fixture(scope="module", params=["gqa", "mistral", "qwen2", "qwen3"])
def models(request):
    """A tiny model here, and the same of transformers. Two query heads share a KV head; the Mistral has
    a sliding window."""
    folder = ROOT / "tests/references" / request.param
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return hf.load_model(folder), theirs


def built(name, own):
    """A method with small blocks, calibrated for a model here."""
    cls = METHODS[name]
    settings = {**SMALL, "prefix": Prefix("two tokens", [11, 40])}
    method = cls(own.config, **{key: value for key, value in settings.items() if key in takes(cls)})
    method.block = 8
    if method.needs_calibration:
        calibrate(own, method, tokens_of(4, 24, seed=7))
    if method.prefix:
        method.prefix.fill(own, own)
    return method


def prompt_of(method, batch=2, T=9):
    tokens = tokens_of(batch, T)
    if method.prefix:
        tokens[:, :2] = torch.tensor(method.prefix.ids)
    return tokens


def test_fp16_is_transformers_own_generation(models):
    own, theirs = models
    tokens = tokens_of(2, 9)
    cache = MethodCache(theirs, built("fp16", own))
    text = theirs.generate(tokens, past_key_values=cache, **GREEDY)
    cache.remove()
    assert len(cache.inner) == 9 + NEW - 1
    assert torch.equal(text, theirs.generate(tokens, **GREEDY))
    assert not any(module._forward_hooks for module in theirs.modules())


def every_method(models, name):
    """The same tokens as here, and the same parts of the cache, over two turns of a chat."""
    own, theirs = models
    method = built(name, own)
    tokens = prompt_of(method)
    mine = KVCache(own, method)
    expected = own.generate(tokens, NEW, mine)
    cache = MethodCache(theirs, method)
    text = theirs.generate(tokens, past_key_values=cache, **GREEDY)
    assert torch.equal(text, expected)
    assert repr(cache.inner) == repr(mine)
    if name != "fp16":
        assert cache.inner.part_bytes()["coded"] > 0

    longer = torch.cat([text, tokens_of(2, 5, seed=3)], 1)
    text = theirs.generate(longer, past_key_values=cache, **GREEDY)
    cache.remove()
    unread = longer[:, len(mine):]
    for _ in range(NEW):
        unread = own(unread, mine)[:, -1:].argmax(-1)
        longer = torch.cat([longer, unread], 1)
    assert torch.equal(text, longer) and repr(cache.inner) == repr(mine)
    cache.reset()
    assert cache.get_seq_length() == len(method.prefix.ids if method.prefix else [])


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.whole)
                                  for name in METHODS])
@torch.no_grad()
def test_every_method_generates_as_it_does_here(name, models):
    every_method(models, name)


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.whole)
                                  for name in METHODS])
@torch.no_grad()
def test_every_method_generates_as_it_does_here_in_bf16(name, models):
    own, theirs = models
    method = built(name, own)
    own.to(torch.bfloat16), theirs.to(torch.bfloat16)
    try:
        every_method_bf16(own, theirs, method)
    finally:
        own.float(), theirs.float()


def every_method_bf16(own, theirs, method):
    tokens = prompt_of(method)
    expected = own.generate(tokens, NEW, KVCache(own, method))
    cache = MethodCache(theirs, method)
    text = theirs.generate(tokens, past_key_values=cache, **GREEDY)
    cache.remove()
    assert torch.equal(text, expected)


@torch.no_grad()
def test_a_prompt_may_be_quantized_before_it_is_read(models):
    own, theirs = models
    method = built("kvsink", own)
    tokens = prompt_of(method)
    cache = MethodCache(theirs, method, "paper", prompt=9)
    text = theirs.generate(tokens, past_key_values=cache, **GREEDY)
    cache.remove()
    assert torch.equal(text, own.generate(tokens, NEW, KVCache(own, method, "paper", prompt=9)))


PADDED = {"attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])}


@pytest.mark.parametrize("word, use", [
    ("padding", lambda model, cache: model.generate(tokens_of(2, 6), past_key_values=cache, **PADDED, **GREEDY)),
    ("position_ids", lambda model, cache: model(tokens_of(1, 6), past_key_values=cache,
                                                position_ids=torch.tensor([[0, 1, 2, 3, 5, 6]]))),
    ("beam search", lambda model, cache: model.generate(tokens_of(1, 6), past_key_values=cache, num_beams=2, **GREEDY)),
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
