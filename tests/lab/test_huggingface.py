"""Any method as the cache of transformers' own models: tinykv/lab/hf/transformers.py, and the page about it."""
import copy
import doctest
import functools
import gc
import pickle
import re
import sys
import weakref
from itertools import islice
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from cases import takes, tokens_of
from torch.nn.functional import pad

from tinykv import UserError, hf
from tinykv.cache import KVCache, LayerCache
from tinykv.calibrate import calibrate
from tinykv.hf import EMBEDDED
from tinykv.lab.data.stories import stories
from tinykv.methods.intactkv import Prefix
from tinykv.methods.registry import METHODS

transformers = pytest.importorskip("transformers")
MethodCache = pytest.importorskip("tinykv.lab.hf.transformers").MethodCache  # which asks for more of it
from tinykv.lab.hf.decoder import NAME, AsGiven  # noqa: E402

ROOT = Path(__file__).parents[2]
T, NEW = 11, 6  # tokens of a prompt and of an answer, while which a block of 8 is quantized
GREEDY = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
QUICK = ("kvsink", "antkv", "intactkv", "kivi")  # what the others need, these need, too


def generate(theirs, tokens, cache=None, **settings):
    """Greedily. Without a mask, transformers takes every pad_token_id for padding."""
    return theirs.generate(tokens, **{"attention_mask": torch.ones_like(tokens), NAME: cache, **GREEDY, **settings})


@pytest.fixture(autouse=True)
def rotated_first(monkeypatch):
    """In fp32, keys that are stored after RoPE are rounded to 16 bits before it, too: but not those that transformers
    has rotated. Here none are, and those that are coded are rounded to eighths: as those are that transformers has
    rotated, which differ in a last bit."""
    append = LayerCache.append

    def round_once(self, k, v):
        rope = self.rope
        if self.method.rope == "post":
            k, self.rope = rope.rotate(k, self.length), AsGiven()
            k = k if self.method.bits_of("k") == 16 else (8 * k).round() / 8
        append(self, k, v)
        self.rope = rope
    monkeypatch.setattr(LayerCache, "append", round_once)


@functools.cache
def load(folder, dtype):
    """A tiny model here, and the same of transformers."""
    folder = ROOT / "tests/references" / folder
    return hf.load_model(folder, dtype=dtype), transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


@pytest.fixture(scope="module", params=["gqa", "qwen3", *[
    pytest.param(name, marks=pytest.mark.whole) for name in ("mistral", "qwen2")]])
def models(request):
    """In fp32. Two query heads share a KV head; the Mistral has a sliding window."""
    return load(request.param, torch.float32)


SMALL = {"k_bits": 2, "v_bits": 3, "preserve": 3, "emergence_layer": 0, "outlier_channel": 5, "outlier_num": 2,
         "skip_layers": 1, "vq": "d4m8", "anchors": "4", "recent": 4, "group_size": 8}


@functools.cache
def built(name, own, **changes):
    """A method with small blocks, calibrated for a model here."""
    cls = METHODS[name]
    settings = {**SMALL, **changes, "prefix": Prefix("two tokens", [11, 40])}
    method = cls(own.config, **{key: value for key, value in settings.items() if key in takes(cls)})
    method.block = 8
    if method.needs_calibration:
        calibrate(own, method, tokens_of(4, 24, seed=7))
    if method.prefix:
        method.prefix.fill(own, own)
    return method


def held(cache):
    """Tokens, and bytes by part."""
    return len(cache), cache.part_bytes()


def rows_of(cache):
    """What a KVCache is read as: keys and values of each layer."""
    return [rows.read() for layer in cache.layers for rows in (layer.keys, layer.values)]


def prompt_of(method, batch=2, T=T):
    tokens = tokens_of(batch, T)
    if method.prefix:
        tokens[:, :2] = torch.tensor(method.prefix.ids)
    return tokens


# the second model norms queries and keys by hooks of its own: there, those that look at queries or at hidden states
MODELS = [pytest.param(model, name, marks=() if name in (QUICK if model == "gqa" else QUICK[:2]) and model in (
    "gqa", "qwen3") else pytest.mark.whole) for model in ("gqa", "qwen3", "mistral", "qwen2") for name in METHODS]


@pytest.mark.parametrize("models, name", MODELS, indirect=["models"])
@torch.no_grad()
def test_each_text_of_a_batch_is_read_as_it_is_here_alone(name, models):
    """The same tokens, and the same parts of the cache, over two turns of a chat, whatever stands in the padding. So
    does a copy of the cache, which is transformers' recipe for reuse, with another second turn."""
    own, theirs = models
    method, padding = built(name, own), [0, 3, 8, 5]
    tokens = tokens_of(4, 19)
    mask = (torch.arange(19) >= torch.tensor(padding)[:, None]).long()
    if method.prefix:
        for row, n in zip(tokens, padding):
            row[n:n + 2] = torch.tensor(method.prefix.ids)
    cache = MethodCache(theirs, method)
    text = generate(theirs, tokens, cache, attention_mask=mask)
    turns = []
    for seed, one in ((1, copy.deepcopy(cache)), (3, cache)):
        longer = torch.cat([text, tokens_of(4, 5, seed)], 1)
        answer = generate(theirs, longer, one, attention_mask=pad(mask, (0, NEW + 5), value=1))
        turns += [(n, *each) for n, *each in zip(padding, one.texts, longer, answer)]
        one.remove()
    for i, (n, one, longer, answer) in enumerate(turns):
        alone = KVCache(own, method)
        assert torch.equal(own.generate(longer[None, n:19], NEW, alone)[0], text[i % 4, n:])
        unread = longer[None, n + len(alone):]  # `Llama.generate` begins with all of its tokens
        assert torch.equal(own.generate(unread, NEW, alone)[0, -NEW:], answer[-NEW:])
        # tokens whose codes a sliding layer has dropped
        gone = max(rows.codes.gone if rows.codes else 0 for rows in (one.layers[0].keys, one.layers[0].values))
        (length, parts), right = held(one), held(alone)
        coded, all_coded = parts["coded"], right[1]["coded"]
        assert (length, {**parts, "coded": all_coded}) == right and (name == "fp16" or all_coded > 0)
        assert coded < all_coded if gone else coded == all_coded
        assert not (gone and method.uses_scores)  # a score is of all tokens
        codec = one.layers[0].keys.codec
        assert getattr(codec, "codec", codec) is method.codecs[0].k  # no copy of its tables
        for rows, same in zip(rows_of(one), rows_of(alone)):  # (1, Hkv, S, d): 16 bits, rotated back by some methods
            rows, same = rows[:, :, gone:], same[:, :, gone:]
            assert ((rows - same).norm(dim=-1) <= 1e-3 * (rows.shape[-1] ** 0.5 + same.norm(dim=-1))).all()


def logits_of(model, text, new=NEW, **settings):
    """Of the prompt, and then of each new token of a text by itself."""
    found = [model(chunk, **settings) for chunk in (text[:, :-new], *text[:, -new:].split(1, dim=1))]
    return torch.cat([getattr(logits, "logits", logits)[:, -1:] for logits in found], 1).float()  # (B, 1 + new, vocab)


def round_once(theirs, patch):
    """transformers rounds cos, sin, both products and their sum to 16 bits; here a rotated query is rounded once. And
    attention adds up the heads that share a KV head in another order there, and here, if a mask hides some keys."""
    attend = torch.nn.functional.scaled_dot_product_attention
    patch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda q, k, v, *given, **named:
                  attend(q.double(), k.double(), v.double(), *given, **named).to(q.dtype))
    modeling, angles = sys.modules[type(theirs).__module__], theirs.model.rotary_emb.forward
    rotate = modeling.apply_rotary_pos_emb
    patch.setattr(theirs.model.rotary_emb, "forward", lambda x, position_ids: angles(x.float(), position_ids))
    patch.setattr(modeling, "apply_rotary_pos_emb",
                  lambda q, k, *angles: [x.to(q.dtype) for x in rotate(q, k, *angles)])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("name", QUICK + tuple(
    pytest.param(name, marks=pytest.mark.whole) for name in METHODS if name not in QUICK))
@torch.no_grad()
def test_in_bf16_only_the_rounding_of_queries_differs(name, bits, models, monkeypatch):
    """With queries and attention that are rounded once, every logit of every method is the one here, bit for bit."""
    own, theirs = load(models[0].config.model_type.replace("llama", "gqa"), torch.bfloat16)
    round_once(theirs, monkeypatch)
    method = built(name, models[0], k_bits=bits, v_bits=bits)
    text = own.generate(prompt_of(method), NEW, KVCache(own, method))
    found = logits_of(theirs, text, past_key_values=MethodCache(theirs, method))
    assert torch.equal(found, logits_of(own, text, cache=KVCache(own, method)))


@pytest.mark.parametrize("name", QUICK)
@torch.no_grad()
def test_beams_are_whole_texts(name, models):
    """Each beam has the score that it has alone, through all of its tokens; those of an exact cache are transformers'
    own, so they are the best."""
    own, theirs = models
    beams = {"num_beams": 4, "num_return_sequences": 3, "return_dict_in_generate": True, "output_scores": True,
             "length_penalty": 0.0}
    for method in (built("fp16", own), built(name, own)):
        tokens = prompt_of(method)
        found = generate(theirs, tokens, MethodCache(theirs, method), **beams)
        if method.name == "fp16":
            assert torch.equal(found.sequences, generate(theirs, tokens, **beams).sequences)
            assert any(len(set(beam)) > 1 for beam in found.beam_indices.tolist())
        for text, score in zip(found.sequences, found.sequences_scores):
            logits = logits_of(own, text[None, :-1], cache=KVCache(own, method), new=NEW - 1)  # (1, NEW, vocab)
            alone = logits[0].log_softmax(-1).gather(1, text[-NEW:, None]).sum()
            torch.testing.assert_close(score, alone, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_cache_goes_when_nobody_holds_it(models):
    """And its hooks with it; a model that a cache watches can be copied, and a cache without its model."""
    own, theirs = models
    caches = [MethodCache(theirs, built("fp16", own)) for _ in range(3)]
    for cache in caches:
        theirs(tokens_of(1, 6), past_key_values=cache)
    assert copy.deepcopy(theirs) is not theirs
    assert copy.deepcopy(caches[0].texts[0]).model is caches[0].texts[0].model
    seen = list(map(weakref.ref, caches))
    del cache, caches
    gc.collect()
    assert not any(one() for one in seen)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in theirs.modules())


@torch.no_grad()
def test_a_prompt_may_be_quantized_before_it_is_read(models):
    own, theirs = models
    method = built("kvsink", own)
    text = generate(theirs, tokens_of(2, T), MethodCache(theirs, method, "paper", prompt=T))
    assert torch.equal(text, own.generate(tokens_of(2, T), NEW, KVCache(own, method, "paper", prompt=T)))


@pytest.mark.parametrize("name", QUICK)
@torch.no_grad()
def test_another_text_between_two_tokens_changes_nothing(name, models):
    """Whether it is read without a cache, with one of transformers, or with a second one of these."""
    own, theirs = models
    method, other = built(name, own), built(name, own, k_bits=4, v_bits=4)
    text, cache, second = prompt_of(method, T=30), MethodCache(theirs, method), MethodCache(theirs, other)
    chunks, found, alone = [text[:, :20], *text[:, 20:].split(1, dim=1)], [], KVCache(own, method)
    for i, chunk in enumerate(chunks):
        found.append(theirs(chunk, past_key_values=cache).logits[:, -1:])
        for between in (second, None, transformers.DynamicCache(config=theirs.config)):
            theirs(tokens_of(2, 1, seed=i) if i else text, past_key_values=between)
    expected = [own(chunk, alone)[:, -1:] for chunk in chunks]
    torch.testing.assert_close(torch.cat(found, 1), torch.cat(expected, 1), atol=1e-3, rtol=1e-3)


# Refusals


def wrap(model):
    """As an adapter does it: the layer that the cache watches is a part of another."""
    for block in model.model.layers:
        linear = block.self_attn.k_proj
        norm = torch.nn.LayerNorm(linear.out_features, dtype=linear.weight.dtype)
        block.self_attn.k_proj = torch.nn.Sequential(linear, norm)


@torch.no_grad()
@pytest.mark.parametrize("change", [
    wrap, lambda model: model.model.rotary_emb.inv_freq.div_(4),
    lambda model: setattr(model.model.rotary_emb, "attention_scaling", 1.3)], ids=["wrapped", "slower", "scaled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_is_changed_behind_the_cache_is_refused(dtype, change):
    own, theirs = load.__wrapped__("gqa", dtype)  # one that no other test reads with
    cache = MethodCache(theirs, built("rtn", own))
    theirs(tokens_of(2, 9), past_key_values=cache)
    cache.reset()
    change(theirs)
    with pytest.raises(UserError, match="layer 0 computes other keys"):
        theirs(tokens_of(2, 9), past_key_values=cache)


def test_a_method_that_was_calibrated_on_other_weights_is_refused():
    own, theirs = load.__wrapped__("gqa", torch.float32)
    method = METHODS["rtn"](own.config)
    calibrate(own, method, tokens_of(2, 40))
    for model in (theirs, copy.deepcopy(theirs).to(torch.bfloat16)):
        cache = MethodCache(model, method)  # those weights, perhaps rounded
        model.model.layers[0].self_attn.k_proj.weight.data *= 1.5
        for use in (cache.reset, lambda model=model: MethodCache(model, method)):
            with pytest.raises(UserError, match="calibrated on another model"):
                use()


def call(**given):
    return lambda model, cache: model(**{"input_ids": tokens_of(1, 6), "past_key_values": cache, **given})


def interrupted(model, cache):
    """Behind the last key that is stored."""
    stop = model.model.layers[1].mlp.register_forward_pre_hook(Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        generate(model, tokens_of(1, 6), cache)
    stop.remove()
    return call()(model, cache)


def one_by_one(*shapes):
    return lambda model, cache: [generate(model, tokens_of(*shape), cache) for shape in shapes]


@torch.no_grad()
@pytest.mark.parametrize("word, use", [
    ("padding_side='left'", call(attention_mask=torch.tensor([[1, 1, 1, 1, 0, 0]]))),
    ("padding_side='left'", call(attention_mask=torch.tensor([[0, 1, 0, 1, 1, 1]]))),
    ("padding_side='left'", call(attention_mask=torch.zeros(1, 6))),
    ("attention_mask", call(attention_mask=torch.ones(1, 1, 6, 6, dtype=torch.bool))),
    ("position_ids", call(position_ids=torch.tensor([[0, 1, 2, 3, 5, 6]]))),
    ("give input_ids", call(input_ids=None, inputs_embeds=torch.ones(1, 6, 32))),
    ("use_cache=True", call(use_cache=False)),
    ("model that it was made for", lambda model, cache: call()(type(model)(model.config), cache)),
    ("until `remove`", lambda model, cache: [cache.remove(), call()(model, cache)]),
    ("calibrate", lambda model, cache: call()(model, MethodCache(model, METHODS["kvsink"](cache.empty.config)))),
    ("begun and not ended", interrupted),
    *(pytest.param("`reset` it before other texts", one_by_one((1, 20), (1, n)), marks=pytest.mark.skipif(
        NAME != "cache", reason="transformers itself ended in an IndexError until 5.0")) for n in (6, 20)),
    ("`reset` it before other texts", one_by_one((1, 6), (2, 20))),
    ("`reset` it before other texts", lambda model, cache: [
        call()(model, cache), call(attention_mask=torch.tensor([[0] * 2 + [1] * 10]))(model, cache)]),
    ("holds its model", lambda model, cache: pickle.dumps(cache)),
    ("assisted", lambda model, cache: cache.crop(-1))])
def test_what_it_cannot_do_is_refused_in_one_line(models, word, use):
    own, theirs = models
    cache = MethodCache(theirs, built("kvsink", own))
    with pytest.raises(UserError, match=word) as error:
        use(theirs, cache)
    assert "\n" not in str(error.value)


def test_a_text_without_the_prefix_is_refused_and_leaves_the_cache_empty(models):
    own, theirs = models
    cache = MethodCache(theirs, built("intactkv", own))
    with pytest.raises(UserError, match="begins with the 2 tokens of the prefix"):
        theirs(tokens_of(2, T), past_key_values=cache)
    assert not cache.texts and not cache.skip


def test_transformers_reads_the_embedded_models_tokenizer_as_it_is_read_here():
    """`AutoTokenizer`, special tokens in a text as text; ours reads sentencepiece's own file."""
    theirs, own = transformers.AutoTokenizer.from_pretrained(EMBEDDED), hf.load(EMBEDDED)[1]
    assert (theirs.bos_token_id, theirs.eos_token_id, len(theirs)) == (own.bos_id, own.eos_id, own.vocab_size)
    texts = ["", " ", "  a  b ", "a\n\nb \n", "\n", "\ta\r\n", "é漢字 \U0001f600", "<s> hi </s> <unk>",
             "a\u2581b\u2581", *(story.text for story in islice(stories("test"), 50))]
    for text in texts:
        ids = own.encode(text, bos=True)
        assert theirs(text, split_special_tokens=True)["input_ids"] == ids, text
        if "\u2581" not in text:
            assert theirs.decode(ids, skip_special_tokens=True) == own.decode(ids)


def test_the_session_is_what_the_page_says(monkeypatch):
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs/huggingface.md").read_text()
    session, = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    said = []
    test = doctest.DocTestParser().get_doctest(session, {}, "huggingface.md", None, 0)
    doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS).run(test, out=said.append)
    assert not said, "".join(said)
