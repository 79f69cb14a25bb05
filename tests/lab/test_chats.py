"""Chats with a response mask: the mask is the answers, as the tokenizer says again; what fills up does not count."""
import json
from functools import partial
from itertools import groupby
from operator import itemgetter
from types import SimpleNamespace

import pytest
import torch
from test_cli import refused

import train_intact
from tinykv import UserError, hf
from tinykv.hf import EMBEDDED
from tinykv.lab.data.chats import SYSTEM, load_chats

CHATS = [
    [("Where does Ada live?", "Ada lives in the red house."), ("Why?", "She likes it.")],
    [("Tell me a story.", "Once upon a time there was a fox who lived by the sea. The fox was happy and old.")],
    [("Hi", "Yes.")],
]


def write(path, chats, key="conversations"):
    lines = []
    for chat in chats:
        turns = [{"from": who, "value": text} for pair in chat for who, text in zip(("human", "gpt"), pair)]
        lines.append(json.dumps({"id": 3, key: turns} if key else turns))
    path.write_text("\n".join(lines) + "\n\n", encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def tokenizer():
    return hf.load(EMBEDDED)[1]


@pytest.mark.parametrize("key", ["conversations", None])
@pytest.mark.parametrize("system", ["", SYSTEM])
def test_the_mask_is_the_answers(tmp_path, tokenizer, key, system):
    """The tokens under it decode to the answers, each with the end of its turn, and all others to Vicuna's template."""
    tokens, response = load_chats(write(tmp_path / "c.jsonl", CHATS, key), tokenizer, 3, 10 ** 6, system)
    for chat, ids, mask in zip(CHATS, tokens.tolist(), response.tolist()):
        end = max(i for i, m in enumerate(mask) if m) + 1  # what comes after the last answer is filled up
        # neighbours of one mask together
        parts = [(m, [i for i, _ in pairs]) for m, pairs in groupby(zip(ids[:end], mask[:end]), key=itemgetter(1))]
        assert [m for m, _ in parts] == [False, True] * len(chat)
        for i, (question, answer) in enumerate(chat):
            asked, answered = parts[2 * i][1], parts[2 * i + 1][1]
            assert answered[-1] == tokenizer.eos_id and tokenizer.eos_id not in asked
            before = f"{system} " if system and not i else ""
            assert tokenizer.decode(asked).strip() == f"{before}USER: {question} ASSISTANT:"
            assert tokenizer.decode(answered[:-1]).strip() == answer
        assert not any(ids[end:])


def test_chats_are_cut_and_those_without_an_answer_left_out(tmp_path, tokenizer):
    path = write(tmp_path / "c.jsonl", CHATS)
    whole, response = load_chats(path, tokenizer, 3, 10 ** 6)
    begins = [mask.index(True) for mask in response.tolist()]  # the first token of an answer
    longest = min(begins) + 1
    cut, response = load_chats(path, tokenizer, 1, longest)
    first = begins.index(min(begins))
    assert torch.equal(cut[0], whole[first, :longest]) and response[0].sum() == 1
    with pytest.raises(UserError, match=r"\b0 chats"):
        load_chats(path, tokenizer, 1, min(begins))


@pytest.mark.parametrize("line", ["no json", "3", "[]", '{"text": "x"}', '[{"from": "gpt", "value": "x"}]',
                                  '[{"from": "human", "value": "x"}]', '[{"from": "cat", "value": "x"}]', "[" * 10 ** 5,
                                  '[{"from": "human", "value": "\\ud800"}, {"from": "gpt", "value": "x"}]',
                                  '[{"from": "human", "value": 3}, {"from": "gpt", "value": "x"}]'])
def test_what_is_no_chat_is_named_with_its_line(tmp_path, tokenizer, line):
    path = tmp_path / "c.jsonl"
    path.write_text(f"\n{line}\n")
    with pytest.raises(UserError, match="line 2"):
        load_chats(str(path), tokenizer, 1, 100)


def test_train_intact_on_chats(tmp_path, run, one_layer):
    path = write(tmp_path / "c.jsonl", CHATS * 2)
    command = partial(run, train_intact, "--out", tmp_path / "p.safetensors", "--chats", path, "--samples", "4",
                      "--windows", "2", "--tokens", "120", "--updates", "1", "--accumulate", "1", "--context", "32",
                      "--model", one_layer)
    status, out, err = command()
    assert status == 0 and err == "quantizing weights rtn-3\n" and "trained" in out
    assert {path.name for path in tmp_path.iterdir()} == {"c.jsonl", "p.safetensors"}  # and no state of training
    assert "7" in refused(command, "--samples", "5")
    assert str(tmp_path / "none") in refused(command, "--chats", tmp_path / "none")
    assert "answer" in refused(command, "--tokens", "4")


@pytest.mark.parametrize("n", [1, 7])
def test_a_prefix_counts_among_the_tokens_of_a_chat(tmp_path, tokenizer, n):
    path = write(tmp_path / "c.jsonl", [[("Hi", "A long answer. " * 30)]] * 2)
    args = SimpleNamespace(samples=1, windows=1, chats=path, tokens=150, tokenizer=tokenizer, device="cpu")
    for tokens, _ in train_intact.load_texts(args, list(range(n))):
        assert n + tokens.shape[1] == 150
