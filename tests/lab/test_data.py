"""Windows of every kind of text, with tokenizers of three kinds."""
import re
from itertools import islice
from pathlib import Path

import pytest
import torch

from tinykv import UserError, hf
from tinykv.hf import EMBEDDED
from tinykv.lab.data import load_windows
from tinykv.lab.data.stories import SPLITS, stories
from tinykv.lab.data.windows import read_documents


class Letters:
    """A token a character: what was encoded can be read off the ids."""
    bos_id = 1

    def encode(self, text):
        return [ord(c) + 10 for c in text]

    def encode_with_offsets(self, text):
        return self.encode(text), [(i, i + 1) for i in range(len(text))]

    def decode(self, ids):
        return "".join("<s>" if i == self.bos_id else chr(i - 10) for i in ids)


class Bare(Letters):
    bos_id = None


class Words:
    """Words and signs, each with the blank before it, as the byte-level tokenizers have them."""
    bos_id = 1

    def encode_with_offsets(self, text):
        found = list(re.finditer(r" ?(\w+|[^\w ])", text))
        return [int.from_bytes(m[0].encode(), "big") % 2 ** 31 + 2 for m in found], [m.span() for m in found]


@pytest.fixture(scope="module")
def pieces():
    return hf.load_tokenizer(EMBEDDED, hf.load_config(EMBEDDED))


@pytest.fixture(params=["letters", "words", "pieces"])
def tokenizer(request, pieces):
    return {"letters": Letters(), "words": Words(), "pieces": pieces}[request.param]


def spelled(windows):
    """The text of windows of letters, one after another."""
    return Letters().decode(windows.tokens.flatten().tolist())


# Windows

def flat(tokenizer, split, need, seed=0):
    """The stream, spelled out: a list of (id, story or None, begin, end), with one entry a token."""
    stream = []
    for story in read_documents("tales", split, seed)[1]:
        stream.append((tokenizer.bos_id, None, 0, 0))
        stream += [(i, story, *span) for i, span in zip(*tokenizer.encode_with_offsets(story.text))]
        if len(stream) >= need:
            return stream[:need]


@pytest.mark.parametrize("split", SPLITS)
def test_windows_are_the_stream_in_pieces(tokenizer, split):
    ids = [t[0] for t in flat(tokenizer, split, 40 * 100, seed=2)]
    cut = load_windows("tales", tokenizer, 100, 40, split, seed=2, bos="none").tokens
    assert cut.dtype == torch.int64 and cut.shape == (40, 100)
    assert cut.flatten().tolist() == ids and ids.count(tokenizer.bos_id) > 1
    replaced = load_windows("tales", tokenizer, 100, 40, split, seed=2)
    assert (replaced.tokens[:, 0] == tokenizer.bos_id).all() and (replaced.tokens[:, 1:] == cut[:, 1:]).all()


@pytest.mark.parametrize("bos", ["replace", "none"])
@pytest.mark.parametrize("context, windows", [(33, 60), (100, 40), (700, 9)])
def test_answers_that_a_window_lets_one_know(tokenizer, context, windows, bos):
    stream = flat(tokenizer, "test", windows * context)
    of_story = {}
    for t, (_, story, begin, end) in enumerate(stream):
        if story is not None:
            of_story.setdefault(id(story), (story, []))[1].append((t, begin, end))
    expected, dropped = [[] for _ in range(windows)], 0
    for story, places in of_story.values():
        for fact, start, end in story.answers:
            answer = {t for t, a, b in places if a < end and b > start}
            sentence = {t for t, a, b in places if a < fact and b > story.facts[fact]}
            if not answer or places[-1][2] < end:
                continue  # beyond the last window
            window = min(answer) // context
            whole = {t // context for t in answer | sentence} == {window}
            if whole and not (bos == "replace" and any(t % context == 0 for t in sentence)):
                first = min(answer) % context
                expected[window].append((first, first + len(answer)))
            else:
                dropped += 1
    got = load_windows("tales", tokenizer, context, windows, bos=bos)
    assert got.answers == expected and dropped
    assert any(expected) or context == 33 or isinstance(tokenizer, Letters)


def test_the_first_prediction_after_what_is_given_does_not_count():
    for prefix, first in ((), 2), ((11, 12, 13), 4):
        given, replaced = (load_windows("tales", Letters(), 50, 3, bos=bos, prefix=prefix)
                           for bos in ("given", "replace"))
        assert given.tokens.equal(replaced.tokens) and given.start == first == replaced.start + 1


def test_a_tokenizer_without_bos():
    text = "".join(story.text for story in islice(stories("test"), 20))[:300]
    assert spelled(load_windows("tales", Bare(), 100, 3, bos="none")) == text
    with pytest.raises(UserError, match="<s>.*none"):
        load_windows("tales", Bare(), 100, 3)
    windows = load_windows("tales", Bare(), 104, 3, prefix=[7, 8, 9, 7])  # no window begins with <s> then
    assert windows.tokens[:, :4].tolist() == [[7, 8, 9, 7]] * 3
    assert Letters().decode(windows.tokens[:, 4:].flatten().tolist()) == text
    with pytest.raises(UserError, match=r"prefix.*\b7\b"):
        load_windows("tales", Letters(), 8, 1, prefix=range(7))


# Files

def test_file_halves(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes("abcdé\r\nghijk\nlmnopq".encode())  # 18 characters, as a line ends in one
    test = load_windows(str(path), Letters(), 5, 2, bos="none")
    calibration = load_windows(str(path), Letters(), 5, 2, "calibration", bos="none")
    assert spelled(test) == "<s>abcdé\nghi" and spelled(calibration) == "<s>jk\nlmnopq"
    assert test.answers == calibration.answers == [[], []]
    assert spelled(load_windows(path, Letters(), 5, 2)) == "<s>abcd<s>\nghi"
    for split in ("test", "calibration"):  # where the other one is of another text, either is all of it
        whole = load_windows(str(path), Letters(), 19, 1, split, bos="none", whole=True)
        assert spelled(whole) == "<s>abcdé\nghijk\nlmnopq"
        with pytest.raises(UserError, match=f"^{re.escape(str(path))}.*whole.* has 19 tokens"):  # a text has a name
            load_windows(str(path), Letters(), 19, 2, split, bos="none", whole=True)


@pytest.mark.parametrize("n", [40, 41, 97, 100])
def test_windows_of_a_file_lie_all_over_its_half(tmp_path, n):
    """And so does each draw of the calibration. No text comes twice, and all n windows are the half."""
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{i:04}" for i in range(2 * n)))  # a window of 4 letters is its own number
    tokens = load_windows(str(path), Bare(), 4, n, bos="none").tokens
    place = [int(Letters().decode(window)) for window in tokens.tolist()]
    assert sorted(place) == list(range(n))
    assert tokens[:8].equal(load_windows(str(path), Bare(), 4, 8, bos="none").tokens)
    for draw in range(4):  # of 8 windows: no part of the text without one is longer than two and a half eighths
        ends = sorted(place[8 * draw:8 * draw + 8])
        gaps = [b - a for a, b in zip(ends, [*ends[1:], ends[0] + n])]
        assert max(gaps) <= 2.5 * n / 8


def test_file_too_short(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("x" * 58)  # 29 letters and <s> are a half
    assert load_windows(str(path), Letters(), 30, 1).tokens.shape == (1, 30)
    for T, n, split, said in ((31, 1, "test", "30 tokens, 0 windows of 31; 1 windows need 31"),
                              (9, 4, "calibration", "30 tokens, 3 windows of 9; 4 windows need 36")):
        with pytest.raises(UserError, match=said):
            load_windows(str(path), Letters(), T, n, split)


# Marked answers of a file

@pytest.mark.parametrize("context", [16, 24, 40, 64, 96])
def test_a_file_marks_its_answers(tmp_path, context):
    """One counts in the window that has its word once more before it, from that sentence's beginning on, wherever the
    window stands among the others."""
    text = "It has 482. And so on; it has <answer>482</answer>. Rome has 517.\nRome has <answer>517</answer>. "
    text = f"482{'x' * 42}\n{text}{'x' * 96}"
    Path(tmp_path, "marked.txt").write_text(text)
    stream = "\0" + re.sub("</?answer>", "", text)  # <s> is a token, too
    n = len(stream) // context  # all windows of the text, in their order
    windows = load_windows(str(tmp_path / "marked.txt"), Letters(), context, n, bos="none", whole=True)
    cut = [stream[i * context:(i + 1) * context] for i in range(n)]
    texts = [Letters().decode(ids).replace("<s>", "\0") for ids in windows.tokens.tolist()]
    assert sorted(texts) == sorted(cut)
    wanted = [[] for _ in cut]
    for word, fact in {"482": "It has", "517": " Rome"}.items():
        begin, start = stream.index(fact), stream.rindex(word)
        if begin // context == (start + 2) // context:
            wanted[begin // context].append((start % context, start % context + 3))
    assert [wanted[cut.index(text)] for text in texts] == windows.answers


@pytest.mark.parametrize("word", ["", "519"])
def test_an_answer_that_repeats_nothing_is_refused(tmp_path, word):
    Path(tmp_path, "marked.txt").write_text(f"It has 482. It has <answer>{word}</answer>.")
    with pytest.raises(UserError, match=f"<answer>{word}</answer> repeats nothing"):
        load_windows(str(tmp_path / "marked.txt"), Letters(), 8, 1, whole=True)
