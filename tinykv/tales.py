"""The embedded corpus: small stories of invented people, written by a seeded generator without end.

The same bytes on every machine and in every Python version. Facts (a town, a trade, a colour, a song, an animal, a
hiding place) are stated once and asked for later, up to about a thousand tokens on, so that what a cache has lost
shows in the answers. The generator knows where every answer stands, and where its fact was stated.

Facts are in telegram style, "Vehul Ravfield.", the answer right behind its owner: a model of this size soon learns to
look up what followed a word, and did not learn to look up what stood three words behind one (docs/embedded_model.md).

Splits are disjoint by construction: a story belongs to the split that its hero's (name, town) pair belongs to, and
every story opens with that pair.
"""
import random
from dataclasses import dataclass, field

SPLITS = ("train", "calibration", "test")

# 480 names and 280 towns of two syllables each, far more than a small vocabulary can hold whole.
BEGINNINGS = "Ba Che Da El Fi Gu Ha Is Jo Ka Lu Mi No Or Pe Qua Ra Si Tu Ul Ve Wo Yu Za".split()
ENDINGS = "bin cor dor fan gel hul jit kus lom mar nik pol ret sha tan ved vik wyn xan zel".split()
NAMES = [a + b for a in BEGINNINGS for b in ENDINGS]
TOWNS = [a + b
         for a in "Arn Bel Corm Dun East Fal Glen Hol Ing Kel Lang Mor Nor Oak Pen Rav Stan Thorn West Yar".split()
         for b in "bury dale field ford gate ham hurst mere mouth stead ton well wick wood".split()]
TRADES = "baker miller tailor potter sailor fisher farmer painter doctor singer weaver hunter".split()
ANIMALS = "cat dog goat hen pony duck mouse crow fox hare lamb owl".split()
COLOURS = "red blue green white black brown grey yellow".split()
THINGS = "key coin ring map bell cup lamp knife book rope drum stone".split()
SPOTS = "bridge oak stairs barn gate church mill bench wall tower cellar shed".split()
DEEDS = ("went to the market", "looked at the river", "told a long story", "ate bread and cheese", "slept under a tree",
         "counted the birds", "lit a small fire", "sang an old song", "waited for the rain to stop",
         "danced until dark")


@dataclass
class Story:
    """One document. All places are in characters.

    answers: (fact, start, end), where the sentence that states the fact ends, and where an answer repeats it.
    facts: {where a sentence that states a fact ends: where it begins}.
    """
    text: str = ""
    answers: list = field(default_factory=list)
    facts: dict = field(default_factory=dict)


class _Dice:
    """Choices from `random.random()` alone: the one method whose stream Python promises never to change."""

    def __init__(self, seed):
        self._random = random.Random(seed).random

    def below(self, n):
        return int(self._random() * n)

    def pick(self, items):
        return items[self.below(len(items))]

    def sample(self, items, n):
        items = list(items)
        for i in range(n):  # the first n steps of Fisher-Yates
            j = i + self.below(len(items) - i)
            items[i], items[j] = items[j], items[i]
        return items[:n]


def split_of(name, town):
    """The split that a hero belongs to: one pair in sixteen is test, one in sixteen calibration, the rest train."""
    return {0: "test", 1: "calibration"}.get((NAMES.index(name) + TOWNS.index(town)) % 16, "train")


class _Writer:
    """Writes one story, and remembers of each fact how it is asked for and where it was stated."""

    def __init__(self, dice, split, people):
        self.dice, self.story, self.facts = dice, Story(), []
        hero, town = dice.pick(NAMES), dice.pick(TOWNS)
        while split_of(hero, town) != split:
            hero, town = dice.pick(NAMES), dice.pick(TOWNS)
        endings = dice.sample([e for e in ENDINGS if not hero.endswith(e)], dice.below(people))
        others = [dice.pick(BEGINNINGS) + ending for ending in endings]  # no two people share their second syllable
        towns = [town] + dice.sample([t for t in TOWNS if t != town], len(others))
        self.cast = [hero] + others
        self.things = dice.sample(THINGS, len(THINGS))  # each is hidden once at most, so its place is unique
        for name, home in zip(self.cast, towns):
            self.introduce(name, home)

    def say(self, sentence):
        self.story.text += " " + sentence if self.story.text else sentence

    def state(self, subject, answer, question):
        """Write the fact "subject answer."; remember how to ask for it."""
        sentence = f"{subject} {answer}."
        self.say(sentence)
        end = len(self.story.text)
        self.story.facts[end] = end - len(sentence)
        self.facts.append((end, subject, answer, question))

    def introduce(self, name, town):
        d = self.dice
        self.state(name, town, f"Where does {name} live?")
        for kind in d.sample(range(4), 1 + d.below(4)):
            if kind == 0:
                self.state(name, d.pick(TRADES), f"What does {name} do?")
            elif kind == 1:
                self.state(name, d.pick(COLOURS), f"What does {name} wear?")
            elif kind == 2:
                self.state(name, " ".join(d.sample(THINGS + SPOTS, 3 + d.below(4))), f"What does {name} sing?")
            else:
                self.state(name, d.pick(ANIMALS), f"What does {name} own?")

    def scene(self):
        d = self.dice
        name = d.pick(self.cast)
        if self.things and d.below(3) == 0:
            thing = self.things.pop()
            self.say(f"{name} hides a {thing}.")
            self.state(f"The {thing}", d.pick(SPOTS), f"Where is the {thing}?")
        else:
            self.say(f"{name} {d.pick(DEEDS)}.")

    def ask(self):
        fact, subject, answer, question = self.dice.pick(self.facts)
        self.say(f'"{question}" asked {self.dice.pick(self.cast)}. "{subject} ')
        start = len(self.story.text)
        self.story.text += f'{answer}."'
        self.story.answers.append((fact, start, start + len(answer)))


def stories(split="train", seed=0, people=5, rounds=7):
    """Yield `Story` after `Story` of one split, for ever; the same ones for the same arguments.

    people: in a story at most. rounds: how long a story may get; with 7 it is 60 to 1,600 tokens, more short than long.
    """
    if split not in SPLITS:
        raise ValueError(f"the corpus has the splits {', '.join(SPLITS)}; got {split!r}")
    dice = _Dice(3 * seed + SPLITS.index(split))
    while True:
        writer = _Writer(dice, split, people)
        for _ in range(1 + dice.below(rounds + 1) * dice.below(rounds + 1)):
            writer.scene()
            for _ in range(dice.below(3)):
                writer.ask()
        for _ in range(2 + dice.below(4)):
            writer.ask()
        yield writer.story
