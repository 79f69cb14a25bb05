"""Tasks of lm_eval through the cache of any method, with questions of the embedded model's own language."""
from itertools import islice
from pathlib import Path

import pytest
import torch

from tinykv import UserError, hf
from tinykv.cache import KVCache
from tinykv.data.stories import stories
from tinykv.data.windows import Windows, encode_documents
from tinykv.evaluate import measure
from tinykv.run.cli import EMBEDDED

lm_eval = pytest.importorskip("lm_eval")
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from tinykv.run.lm_eval import TinyKV  # noqa: E402

CODED = {"method": "rtn", "scheme": "token-dynamic", "bits": 2}  # a token's codes do not hang on later tokens
TASKS = TaskManager(include_path=str(Path(__file__).parent.parent / "docs/lm_eval"), include_defaults=False)


@pytest.fixture(scope="module")
def asked():
    """The first stories of the task `tales`, with answers."""
    several = [story for story in islice(stories("test"), 40) if story.answers and len(story.text) < 2500]
    return several[:2]


def recall(model, stories):
    """(right, answers) as the project counts them, a story a window."""
    right = n = 0
    for story in stories:
        ids, marks = encode_documents([story], model.tokenizer, 1)
        windows = Windows(torch.tensor([list(ids)]), [[(start, end) for _, start, end in marks]], "a story")
        fp16 = model if model.args.method[-1] == "fp16" else TinyKV()
        reference = measure(fp16.model, fp16.method, windows)
        result = reference if fp16 is model else measure(model.model, model.method, windows, fp16=reference)
        right, n = right + result.right, n + result.answers
    return right, n


@pytest.mark.parametrize("settings", [pytest.param({}, marks=pytest.mark.whole), CODED])
def test_the_accuracy_of_a_task_is_the_recall_that_the_project_counts(asked, settings):
    model = TinyKV(**settings)
    right, n = recall(model, asked)
    assert n > 4 and 0 < right
    found = lm_eval.simple_evaluate(model=model, tasks=["tales"], limit=n, bootstrap_iters=0, task_manager=TASKS)
    assert found["results"]["tales"]["acc,none"] == right / n


STREAM = {"method": "kivi", "protocol": "stream", "bits": 2, "recent": 8, "group_size": 8}
SETTINGS = [{**STREAM, "prompt": "context"}, STREAM, {"protocol": "paper", "prompt": "context", **CODED},
            {"method": "intactkv", "bits": 2}, {"method": "pfn", "bits": 3, "calib_windows": 1}]


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


@pytest.mark.parametrize("settings", SETTINGS)
@torch.no_grad()
def test_log_likelihoods_are_those_of_a_direct_forward(asked, settings):
    model = TinyKV(**settings)
    pairs = [(story.text[start - 150:start].rstrip(), " " + story.text[start:end]) for story in asked
             for _, start, end in story.answers[:1]]
    pairs += [(asked[0].text[:at], asked[0].text[at:at + 9]) for at in (101, 103)]  # within a word
    found = model.loglikelihood([Instance("loglikelihood", {}, pair, 0) for pair in pairs], disable_tqdm=True)
    for pair, (logp, _) in zip(pairs, found, strict=True):
        assert logp == pytest.approx(log_likelihood(model, *pair), abs=1e-3)


def test_generation_is_the_models_own(asked):
    model = TinyKV(max_gen_toks=24, **STREAM)
    story = asked[0]
    context = story.text[:200].rstrip()
    ids = torch.tensor([model.tokenizer.encode(context, bos=True)])
    text = model.model.generate(ids, 24, KVCache(model.model, model.method, prompt=ids.shape[1]))
    expected = model.tokenizer.decode(text[0].tolist())[len(model.tokenizer.decode(ids[0].tolist())):]
    def generated(**more):
        return model.generate_until([Instance("generate_until", {}, (context, more), 0)], disable_tqdm=True)[0]
    assert len(expected) > 10 and generated(until=[]) == expected
    assert generated(until=[expected[4:7]]) == expected[:expected.index(expected[4:7])]
    assert expected.startswith(generated(until=[], max_gen_toks=2)) and len(generated(until=[], max_gen_toks=2)) < 20


def test_senseless_arguments_are_refused():
    for settings in ({"prompt": "512"}, {"method": "kvsnik"}, {"method": "fp16", "bits": 2}):
        with pytest.raises((UserError, SystemExit)):
            TinyKV(**settings)


def test_lm_eval_finds_it_by_name():
    from lm_eval.api.registry import get_model
    assert get_model("tinykv") is TinyKV
    assert hf.load_config(EMBEDDED).max_position_embeddings == TinyKV().max_length
