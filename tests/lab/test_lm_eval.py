"""Tasks of lm_eval through the cache of any method, with questions of the embedded model's own language."""
from itertools import islice
from pathlib import Path

import pytest
import torch

from tinykv import UserError
from tinykv.cache import KVCache
from tinykv.evaluate import measure
from tinykv.lab.data.stories import stories
from tinykv.lab.data.windows import Windows, encode_documents
from tinykv.methods.registry import METHODS

lm_eval = pytest.importorskip("lm_eval")
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from tinykv.lab.run.lm_eval import TinyKV  # noqa: E402

CODED = {"method": "rtn", "scheme": "token-dynamic", "bits": 2}  # a token's codes do not hang on later tokens
TASKS = TaskManager(include_path=str(Path(__file__).parents[2] / "docs/lm_eval"), include_defaults=False)


@pytest.fixture(scope="module")
def asked():
    """The first stories of the task `tales`, with answers."""
    return [story for story in islice(stories("test"), 40) if story.answers and len(story.text) < 2500][:2]


def answers(model, stories):
    """(right, answers) as the project counts them, a story a window."""
    right = n = 0
    for story in stories:
        ids, marks = encode_documents([story], model.tokenizer, 1)
        windows = Windows(torch.tensor([list(ids)]), [[(start, end) for _, start, end in marks]])
        reference = measure(model.model, METHODS["fp16"](model.model.config), windows)
        result = measure(model.model, model.method, windows, fp16=reference)
        right, n = right + result.right, n + result.answers
    return right, n


@pytest.mark.parametrize("settings", [pytest.param({}, marks=pytest.mark.whole), CODED])
def test_the_accuracy_of_a_task_is_the_share_that_the_project_counts(asked, settings, monkeypatch):
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)  # which asks other programs
    model = TinyKV(**settings)
    right, n = answers(model, asked)
    assert n > 4 and 0 < right
    found = lm_eval.simple_evaluate(model=model, tasks=["tales"], limit=n, bootstrap_iters=0, task_manager=TASKS)
    assert found["results"]["tales"]["acc,none"] == right / n


STREAM = {"method": "kivi", "protocol": "stream", "bits": 2, "recent": 8, "group_size": 8}


def log_likelihoods(model, *pairs):
    """[(log-likelihood of the target, whether it is the most likely)] of each (context, target)."""
    return model.loglikelihood([Instance("loglikelihood", {}, pair, 0) for pair in pairs], disable_tqdm=True)


def log_likelihood(model, context, target):
    """By hand: every token read by itself in a stream, and what the protocol says before that. A target's tokens are
    those of the whole text after as many as the context has alone."""
    before, whole = (model.tokenizer.encode(text, bos=True) for text in (context, context + target))
    ids = torch.tensor([before + whole[len(before):]])
    n = len(whole) - len(before)
    cache = KVCache(model.model, model.method, model.args.protocol, ids.shape[1] - n if model.prompt else None)
    first = ids.shape[1] - n if model.prompt else ids.shape[1] - 1 if model.args.protocol == "paper" else 2
    states = [model.model(ids[:, :first], cache)]
    states += [model.model(ids[:, i:i + 1], cache) for i in range(first, ids.shape[1] - 1)]
    logits = torch.cat(states, 1)[0, -n:]
    return logits.log_softmax(-1).gather(1, ids[0, -n:, None]).sum().item()


@pytest.mark.parametrize("settings", [
    {**STREAM, "prompt": "context"}, STREAM, {"protocol": "paper", "prompt": "context", **CODED},
    {"method": "intactkv", "bits": 2}, {"method": "pfn", "bits": 3, "calib_windows": 1}])
@torch.no_grad()
def test_log_likelihoods_are_those_of_a_direct_forward(asked, settings):
    model = TinyKV(**settings)
    pairs = [(story.text[start - 150:start].rstrip(), " " + story.text[start:end]) for story in asked
             for _, start, end in story.answers[:1]]
    pairs += [(asked[0].text[:at], asked[0].text[at:at + 9]) for at in (101, 103)]  # within a word
    for pair, (logp, _) in zip(pairs, log_likelihoods(model, *pairs), strict=True):
        assert logp == pytest.approx(log_likelihood(model, *pair), abs=1e-3)


def generate(model, context, **more):
    return model.generate_until([Instance("generate_until", {}, (context, {"until": [], **more}), 0)],
                                disable_tqdm=True)[0]


def continued(model, ids, protocol):
    """What the model itself says in 24 tokens after a context that arrives at once."""
    cache = KVCache(model.model, model.method, protocol, prompt=len(ids))
    text = model.model.generate(torch.tensor([ids]), 24, cache, eos=2)[0].tolist()
    whole, before = model.tokenizer.decode(text), model.tokenizer.decode(ids)
    assert whole.startswith(before) and len(whole) > len(before) + 10
    return whole.removeprefix(before)


def test_generation_is_the_models_own(asked):
    model = TinyKV(max_gen_toks=24, **STREAM)
    context = asked[0].text[:200].rstrip()
    expected = continued(model, model.tokenizer.encode(context, bos=True), "stream")
    end = expected[4:7]
    assert generate(model, context) == expected
    assert generate(model, context, until=[end]) == expected[:expected.index(end)]
    short = generate(model, context, max_gen_toks=2)
    assert expected.startswith(short) and len(short) < 20


@pytest.fixture
def prefixed(tmp_path):
    """Under a prefix of some words."""
    (tmp_path / "prefix.txt").write_text("Mara lives in the old mill by the river.")
    model = TinyKV(method="intactkv", bits=8, prefix=tmp_path / "prefix.txt", max_gen_toks=24)
    assert len(model.prefix) > 5
    return model


def test_an_answer_begins_after_the_context_under_a_prefix_too(asked, prefixed):
    context = asked[0].text[:200].rstrip()
    ids = prefixed.prefix + prefixed.tokenizer.encode(context)
    assert generate(prefixed, context) == continued(prefixed, ids, "paper")


def test_prefix_context_and_answer_share_the_positions(asked, prefixed, monkeypatch):
    """Too long a context loses its beginning; what leaves no room for one is refused."""
    n = prefixed.model.config.max_position_embeddings
    long = " ".join(story.text for story in asked) * 3
    assert len(prefixed.tokenizer.encode(long)) > n
    caches = []
    monkeypatch.setattr("tinykv.lab.run.lm_eval.KVCache", lambda *how: caches.append(KVCache(*how)) or caches[-1])
    log_likelihoods(prefixed, (long, " bell"))
    generate(prefixed, long, max_gen_toks=7)
    assert [len(cache) for cache in caches] == [n, n - 1]  # the last token of an answer is not read
    prefixed.prompt = "context"  # the first chunk: the prefix, which has a BOS of its own, and the context
    log_likelihoods(prefixed, ("Mara lives", " in"))
    assert caches[-1].prompt == len(prefixed.prefix) + len(prefixed.tokenizer.encode("Mara lives"))
    for new in (n - len(prefixed.prefix) + 1, n, 5000):
        with pytest.raises(UserError, match=f"tokens are more than the {n} positions"):
            generate(prefixed, "Mara", max_gen_toks=new)


@pytest.mark.parametrize("settings, words", [
    ({"prompt": "512"}, "prompt"), ({"method": "kvsnik"}, "did you mean kvsink"),
    ({"method": "rtn", "vs": "fp16", "draws": 2}, "draws, vs: no effect here"),
    ({"method": "rtn", "bits": "2,3"}, "several rows: fp16, rtn bits=2, rtn bits=3")])
def test_senseless_arguments_are_refused(settings, words):
    with pytest.raises(UserError, match=words):
        TinyKV(**settings)


def test_a_chat_template_is_refused_by_name():
    with pytest.raises(UserError, match="--apply_chat_template"):
        lm_eval.simple_evaluate(model="tinykv", tasks=["tales"], limit=1, task_manager=TASKS, apply_chat_template=True)
