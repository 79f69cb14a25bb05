"""The class of docs/huggingface.md: any method as the cache of transformers' own LLaMA and Mistral."""
import doctest
import re
import sys
from pathlib import Path

import pytest
import torch
from cases import takes, tokens_of

from tinykv import hf
from tinykv.cache import KVCache
from tinykv.calibrate import calibrate
from tinykv.methods.intactkv import Prefix
from tinykv.methods.registry import METHODS

transformers = pytest.importorskip("transformers")
ROOT = Path(__file__).parent.parent
CLASS, SESSION = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs/huggingface.md").read_text(),
                            re.MULTILINE | re.DOTALL)
NEW = 24  # tokens


@pytest.fixture(scope="module")
def bridge(tmp_path_factory):
    """The module that the page asks to be saved."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "quantized_cache.py").write_text(CLASS)
    sys.path.insert(0, str(folder))
    import quantized_cache
    yield quantized_cache
    sys.path.remove(str(folder))


@pytest.fixture(scope="module", params=["gqa", "mistral"])
def models(request):
    """A tiny LLaMA or Mistral here, and the same of transformers. Two query heads share a KV head;
    the Mistral has a sliding window."""
    folder = ROOT / "tests/references" / request.param
    own = hf.load_model(folder, "cpu", torch.float32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert (own.config.sliding_window is None) == (request.param == "gqa")
    return own, theirs


def generate(theirs, tokens, cache=None):
    settings = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return theirs.generate(tokens, attention_mask=torch.ones_like(tokens), past_key_values=cache, **settings)


SMALL = {"k_bits": 2, "v_bits": 3, "preserve": 3, "emergence_layer": 0, "outlier_channel": 5, "outlier_num": 2,
         "skip_layers": 1, "vq": "d4m8", "anchors": "4", "recent": 4, "group_size": 8}


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


def test_fp16_is_transformers_own_generation(bridge, models):
    own, theirs = models
    tokens = tokens_of(2, 9)
    cache = bridge.QuantizedCache(theirs, built("fp16", own))
    text = generate(theirs, tokens, cache)
    cache.remove()
    assert len(cache.inner) == 9 + NEW - 1
    assert torch.equal(text, generate(theirs, tokens))


@pytest.mark.parametrize("name", [name if name in ("kvsink", "antkv", "intactkv", "kivi")
                                  else pytest.param(name, marks=pytest.mark.whole) for name in METHODS])
def test_every_method_generates_as_it_does_here(name, bridge, models):
    """The same tokens, and the same parts of the cache."""
    own, theirs = models
    method, tokens = built(name, own), tokens_of(2, 9)
    if method.prefix:
        tokens[:, :2] = torch.tensor(method.prefix.ids)
    mine = KVCache(own, method)
    expected = own.generate(tokens, NEW, mine)
    cache = bridge.QuantizedCache(theirs, method)
    text = generate(theirs, tokens, cache)
    cache.remove()
    assert torch.equal(text, expected)
    assert repr(cache.inner) == repr(mine)
    if name != "fp16":
        assert cache.inner.part_bytes()["coded"] > 0
    cache.reset()
    assert cache.get_seq_length() == len(method.prefix.ids if method.prefix else [])


def test_a_prompt_may_be_quantized_before_it_is_read(bridge, models):
    own, theirs = models
    method, tokens = built("kvsink", own), tokens_of(2, 9)
    expected = own.generate(tokens, NEW, KVCache(own, method, "paper", prompt=9))
    cache = bridge.QuantizedCache(theirs, method, "paper", prompt=9)
    text = generate(theirs, tokens, cache)
    cache.remove()
    assert torch.equal(text, expected)


def test_hooks_are_taken_off(bridge, models):
    own, theirs = models
    bridge.QuantizedCache(theirs, built("fp16", own)).remove()
    assert not any(module._forward_hooks for module in theirs.modules())


def test_beam_search_is_refused(bridge, models):
    """Whichever way transformers does it."""
    own, theirs = models
    cache = bridge.QuantizedCache(theirs, built("fp16", own))
    with pytest.raises(Exception):  # noqa: B017
        theirs.generate(tokens_of(1, 9), past_key_values=cache, num_beams=2, max_new_tokens=4)
    cache.remove()


def test_the_session_is_what_the_page_says(bridge, monkeypatch):
    monkeypatch.chdir(ROOT)
    said = []
    session = doctest.DocTestParser().get_doctest(SESSION, {}, "huggingface.md", None, 0)
    doctest.DocTestRunner(verbose=False).run(session, out=said.append)
    assert not said, "".join(said)
