"""docs/programs/needles.py: numbers in a text, and a table that is copied."""
import needles
import pytest

from tinykv import UserError, hf
from tinykv.evaluate import measure
from tinykv.lab.data import load_windows
from tinykv.methods.fp16 import FP16
from tinykv.methods.registry import METHODS

TEXT = "\n".join(" . ".join(f"The {word} of line {line} went to the market and came home" for word in "abcdefg")
                 for line in range(40))


@pytest.fixture(scope="module")
def loaded():
    return hf.load(hf.EMBEDDED)


def answers(model, method, windows):
    """Those of all windows."""
    of_windows = (needles.answer(model, method, *window) for window in zip(windows.tokens, windows.answers))
    return [seen for of_window in of_windows for seen in of_window]


def test_windows_hold_facts_at_all_depths_and_ask_for_them(loaded, tmp_path):
    """As `eval_ppl.py --data` reads them: full windows, and the program's own count is the evaluation's."""
    model, tokenizer = loaded
    needles.write(tmp_path / "needles.txt", TEXT, tokenizer, context=600, windows=2, facts=10)
    windows = load_windows(tmp_path / "needles.txt", tokenizer, 600, 2, whole=True)
    assert [len(answers) for answers in windows.answers] == [10, 10]
    seen = answers(model, FP16(model.config), windows)
    depths = [depth for depth, _, _ in seen]
    assert all(abs(depths.count(depth) - 4) <= 1 for depth in range(5))  # two of each fifth, but for its borders
    for method in (FP16(model.config), METHODS["kivi"](model.config, k_bits=1, v_bits=1, recent=0)):
        found = answers(model, method, windows)
        assert sum(right for _, right, _ in found) == measure(model, method, windows, "paper").right
        assert (sum(loss for _, _, loss in found) > sum(loss for _, _, loss in seen)) == (not isinstance(method, FP16))
    with pytest.raises(UserError, match="fewer than 99 windows"):
        needles.write(tmp_path / "needles.txt", TEXT, tokenizer, 600, 99, 10)
    with pytest.raises(UserError, match="20 facts and their questions take .* of 600 tokens"):
        needles.write(tmp_path / "needles.txt", TEXT, tokenizer, 600, 2, 20)


def test_a_table_is_copied_up_to_the_first_wrong_token(loaded):
    """As far as greedy generation, token by token, is right."""
    model, tokenizer = loaded
    method, random = FP16(model.config), needles.random.Random(0)
    tokens, begin = needles.table(tokenizer, random)
    tokens = tokens[:begin + 12]  # what the model says to the 3rd token, then something else
    for at in range(begin, begin + 3):
        tokens[at] = model(tokens[None, :at])[0, -1].argmax()
    tokens[begin + 3] = (model(tokens[None, :begin + 3])[0, -1].argmax() + 1) % model.config.vocab_size
    tokens[begin + 4] = model(tokens[None, :begin + 4])[0, -1].argmax()  # right, but too late
    assert needles.copied(model, method, tokens, begin) == 3
    assert needles.table(tokenizer, random)[0].tolist() != tokens.tolist()  # another table


def test_more_windows_begin_with_the_same(loaded):
    """Or a record to which some are added would count a text twice."""
    few, more = (needles.first_windows(TEXT, loaded[1], 600, n, 10) for n in (2, 4))
    assert [(tokens.tolist(), places) for tokens, places in more[:2]] == [(x.tolist(), places) for x, places in few]
    assert len({tuple(tokens.tolist()) for tokens, _ in more}) == 4
