"""The embedded corpus: the same text everywhere, disjoint splits, and answers that were told."""
import hashlib
import re
from itertools import islice

import pytest

from tinykv.lab.data import stories as corpus
from tinykv.lab.data.stories import SPLITS, split_of, stories

GOLDEN = {  # of the text that the embedded model was trained on: these never change
    "train": "b4759af1be2d4d6837f2f11b1a0c778e0a3b062e1760e3c11fd7659ab2b238d0",
    "calibration": "5fb2fc2e654000724f21d4d16c5e819fc7b0a403d36e36de7c13d48214176324",
    "test": "831b8028632c465f9f10e2fa5727feff0848a72f501d3838948706f324e74d2c",
}
LANGUAGES = {"tales": corpus.TALES, "fables": corpus.FABLES}


@pytest.mark.parametrize("split", SPLITS)
def test_tales_never_change(split):
    total = hashlib.sha256()
    for story in islice(stories(split), 200):
        total.update(story.text.encode() + b"\n" + repr(story.answers).encode() + b"\n")
    assert total.hexdigest() == GOLDEN[split]


def test_splits_are_disjoint():
    pairs, texts = {}, {}
    for split in SPLITS:
        several = [story.text for seed in (0, 1, 7) for story in islice(stories(split, seed), 70)]
        opening = [re.match(r"(\w+) (\w+)\.", text).groups() for text in several]
        assert all(split_of(*pair) == split for pair in opening)
        pairs[split], texts[split] = set(opening), set(several)
        assert len(texts[split]) == 3 * 70  # each seed has stories of its own
    for a, b in (("train", "test"), ("train", "calibration"), ("calibration", "test")):
        assert not pairs[a] & pairs[b] and not texts[a] & texts[b]


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("split", SPLITS)
def test_answers_repeat_what_was_stated(language, split):
    """In the sentence that is their fact, and nowhere is another fact of its beginning stated."""
    told = 0
    for story in islice(stories(split, seed=3, vocabulary=LANGUAGES[language]), 60):
        facts = [story.text[begin:end] for end, begin in story.facts.items()]
        for fact, start, end in story.answers:
            sentence, answer = story.text[story.facts[fact]:fact], story.text[start:end]
            assert fact < start and sentence.endswith(f" {answer}.")
            assert story.text[:end].endswith(sentence.removesuffix("."))  # the reply is that sentence again
            told += 1
        assert len(set(facts)) == len(facts)
    assert told > 100


def test_fables_are_made_of_the_words_of_tales():
    """So the tokenizer needs about as many tokens for them."""
    text = {name: " ".join(story.text for story in islice(stories("test", vocabulary=vocabulary), 100))
            for name, vocabulary in LANGUAGES.items()}
    words = {name: set(re.findall(r"\b[a-z]+\b", of)) for name, of in text.items()}
    assert words["fables"] <= words["tales"]
    assert not set(corpus.FABLES.towns) & set(corpus.TALES.towns)
    assert not set(corpus.FABLES.deeds) & set(corpus.TALES.deeds)
