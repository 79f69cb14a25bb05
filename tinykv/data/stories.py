"""The embedded corpus: small stories of invented people, written without end by a seeded generator.

The text is the same bytes on every machine and in every Python version. Facts (a town, a trade, a
colour, a song, an animal, a hiding place) are stated once and asked for later, up to about a
thousand tokens on, so the answers show what a cache has lost. The generator knows where every
answer stands, and where its fact was stated.

Facts are in telegram style, "Vehul Ravfield.", with the answer right after its owner: a model of
this size soon learns to look up what followed a word, and did not learn to look up what stood three
words after it (docs/embedded_model.md).

Splits are disjoint by construction: a story belongs to the split of its hero's (name, town) pair,
and every story opens with that pair.

The tales are what the model was trained on. The fables are stories of the same people, with the same
syllables and words in other places, for calibration on another text than that of the test: towns
end as people's names do, a trade is an animal and an animal a trade, people do other things, and a
person's town is told last.
"""
import random
from dataclasses import dataclass, field

SPLITS = ("train", "calibration", "test")

# 480 names and 280 towns of two syllables each, far more than a small vocabulary can hold whole.
BEGINNINGS = "Ba Che Da El Fi Gu Ha Is Jo Ka Lu Mi No Or Pe Qua Ra Si Tu Ul Ve Wo Yu Za".split()
ENDINGS = "bin cor dor fan gel hul jit kus lom mar nik pol ret sha tan ved vik wyn xan zel".split()
NAMES = [a + b for a in BEGINNINGS for b in ENDINGS]
TOWN_BEGINNINGS = "Arn Bel Corm Dun East Fal Glen Hol Ing Kel Lang Mor Nor Oak Pen Rav Stan Thorn West Yar".split()
TOWN_ENDINGS = "bury dale field ford gate ham hurst mere mouth stead ton well wick wood".split()
TOWNS = [a + b for a in TOWN_BEGINNINGS for b in TOWN_ENDINGS]

TRADES = "baker miller tailor potter sailor fisher farmer painter doctor singer weaver hunter".split()
ANIMALS = "cat dog goat hen pony duck mouse crow fox hare lamb owl".split()
COLOURS = "red blue green white black brown grey yellow".split()
THINGS = "key coin ring map bell cup lamp knife book rope drum stone".split()
SPOTS = "bridge oak stairs barn gate church mill bench wall tower cellar shed".split()
DEEDS = ("went to the market", "looked at the river", "told a long story", "ate bread and cheese", "slept under a tree",
         "counted the birds", "lit a small fire", "sang an old song", "waited for the rain to stop",
         "danced until dark")


@dataclass(frozen=True)
class Vocabulary:
    """What the stories of a corpus are made of, apart from people's names."""
    towns: list
    trades: list
    animals: list
    deeds: tuple
    town_last: bool = False  # a person's town is the last of their facts, not the first


TALES = Vocabulary(TOWNS, TRADES, ANIMALS, DEEDS)
FABLE_TOWNS = [a + b for a in TOWN_BEGINNINGS for b in ENDINGS]
FABLE_DEEDS = ("went to the river", "looked at the birds", "told an old song", "ate under a tree", "slept until dark",
               "counted the fire", "lit a long story", "sang to the market", "waited for the cheese",
               "danced for the rain")
FABLES = Vocabulary(FABLE_TOWNS, trades=ANIMALS, animals=TRADES, deeds=FABLE_DEEDS, town_last=True)


@dataclass
class Story:
    """One document. All places are in characters."""
    text: str = ""
    answers: list = field(default_factory=list)  # [(end of the fact's sentence, start, end)]
    facts: dict = field(default_factory=dict)  # {end of a fact's sentence: its beginning}


def stories(split="train", seed=0, people=5, rounds=7, vocabulary=TALES, shortest=0):
    """Yield `Story` after `Story` of one split, for ever; the same ones for the same arguments.

    people: in a story at most. rounds: how long a story may get; with 7 it is 60 to 1,600 tokens,
    more short than long. shortest: stories of fewer characters are left out.
    """
    if split not in SPLITS:
        raise ValueError(f"the corpus has the splits {', '.join(SPLITS)}; got {split!r}")
    rng = Rng(3 * seed + SPLITS.index(split))
    while True:
        writer = Writer(rng, split, people, vocabulary)
        # scenes, with some questions after each of them
        for _ in range(1 + rng.below(rounds + 1) * rng.below(rounds + 1)):
            writer.scene()
            for _ in range(rng.below(3)):
                writer.ask()
        # and more questions at the end
        for _ in range(2 + rng.below(4)):
            writer.ask()
        if len(writer.story.text) >= shortest:
            yield writer.story


def split_of(name, town, vocabulary=TALES):
    """The split of a hero: one pair in sixteen is test, one in sixteen calibration, others train."""
    residue = (NAMES.index(name) + vocabulary.towns.index(town)) % 16
    return {0: "test", 1: "calibration"}.get(residue, "train")


class Rng:
    """Choices from `random.random()` alone: Python promises never to change its numbers."""

    def __init__(self, seed):
        self.random = random.Random(seed).random

    def below(self, n):
        """A whole number from 0 to n - 1."""
        return int(self.random() * n)

    def pick(self, items):
        return items[self.below(len(items))]

    def sample(self, items, n):
        """n different ones: the first n steps of Fisher-Yates."""
        items = list(items)
        for i in range(n):
            j = i + self.below(len(items) - i)
            items[i], items[j] = items[j], items[i]
        return items[:n]


class Writer:
    """Writes one story, and remembers for each fact where it was stated and how to ask for it."""

    def __init__(self, rng, split, people, vocabulary=TALES):
        self.rng, self.words = rng, vocabulary
        towns = vocabulary.towns
        self.story = Story()
        self.facts = []  # (end of the sentence, subject, answer, question)

        # the hero, of the right split
        hero, town = rng.pick(NAMES), rng.pick(towns)
        while split_of(hero, town, vocabulary) != split:
            hero, town = rng.pick(NAMES), rng.pick(towns)

        # the other people: no two of a story share their second syllable or their town
        endings = rng.sample([e for e in ENDINGS if not hero.endswith(e)], rng.below(people))
        others = [rng.pick(BEGINNINGS) + ending for ending in endings]
        other_towns = rng.sample([t for t in towns if t != town], len(others))
        self.people = [hero, *others]

        # what can be hidden: each thing at most once, so its place is unique
        self.things = rng.sample(THINGS, len(THINGS))

        for name, home in zip(self.people, [town, *other_towns]):
            self.introduce(name, home)

    def say(self, sentence):
        if self.story.text:
            self.story.text += " "
        self.story.text += sentence

    def state(self, subject, answer, question):
        """Write the fact "subject answer."; remember how to ask for it."""
        sentence = f"{subject} {answer}."
        self.say(sentence)
        end = len(self.story.text)
        self.story.facts[end] = end - len(sentence)
        self.facts.append((end, subject, answer, question))

    def introduce(self, name, town):
        """A person's town, and one to four other facts."""
        rng, words = self.rng, self.words
        where = f"Where does {name} live?"
        if not words.town_last:
            self.state(name, town, where)
        for kind in rng.sample(range(4), 1 + rng.below(4)):
            if kind == 0:
                self.state(name, rng.pick(words.trades), f"What does {name} do?")
            elif kind == 1:
                self.state(name, rng.pick(COLOURS), f"What does {name} wear?")
            elif kind == 2:
                song = rng.sample(THINGS + SPOTS, 3 + rng.below(4))
                self.state(name, " ".join(song), f"What does {name} sing?")
            else:
                self.state(name, rng.pick(words.animals), f"What does {name} own?")
        if words.town_last:
            self.state(name, town, where)

    def scene(self):
        """Somebody hides a thing, or does something that nobody asks for."""
        rng = self.rng
        name = rng.pick(self.people)
        if self.things and rng.below(3) == 0:
            thing = self.things.pop()
            self.say(f"{name} hides a {thing}.")
            self.state(f"The {thing}", rng.pick(SPOTS), f"Where is the {thing}?")
        else:
            self.say(f"{name} {rng.pick(self.words.deeds)}.")

    def ask(self):
        """Somebody asks for a fact, and the answer repeats it."""
        fact, subject, answer, question = self.rng.pick(self.facts)
        asker = self.rng.pick(self.people)
        self.say(f'"{question}" asked {asker}. "{subject} ')
        start = len(self.story.text)
        self.story.text += f'{answer}."'
        self.story.answers.append((fact, start, start + len(answer)))
