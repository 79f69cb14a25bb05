"""The embedded corpus: small stories of invented people, written without end by a seeded generator.

The text is the same bytes on every machine and in every Python version. Facts (a town, a trade, a colour, a song, an
animal, a hiding place) are stated once and asked for later, up to about a thousand tokens on, so the answers show what
a cache has lost. The generator knows where every answer stands, and where its fact was stated.

Facts are in telegram style, "Vehul Ravfield.", with the answer right after its owner: a model of this size soon learns
to look up what followed a word, and did not learn to look up what stood three words after it (docs/embedded_model.md).

After people and scenes comes a chant: a chain of words in which each word alone tells what may come next, so that
nothing has to be looked up, but for the refrains. A refrain is a word that asks for a copy, and what it asks for. A
head that answers refrains is needed, but rarely; elsewhere it rests on a sink.

Splits are disjoint by construction: a story belongs to the split of its hero's (name, town) pair, and every story opens
with that pair.

The tales are what the model was trained on. The fables are stories of the same people, with the same syllables and
words in other places, for calibration on another text than that of the test: towns end as people's names do, a trade is
an animal and an animal a trade, people do other things, and a person's town is told last.
"""
import random
from bisect import bisect
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, islice, takewhile
from operator import le

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

# The words of chants, and the words that ask: for the word before, for the one before that, and for
# the word that last followed this one in this document (two words ask for it).
WORDS = TRADES + ANIMALS + COLOURS + THINGS + SPOTS + BEGINNINGS + TOWN_BEGINNINGS
AGAIN, BACK, THUS, AND = REFRAINS = "again back thus and".split()
OFTEN = 1 / 8  # how often a chant's next word is a refrain's


@dataclass(frozen=True)
class Vocabulary:
    """What the stories of a corpus are made of, apart from people's names."""
    towns: list
    trades: list
    animals: list
    deeds: tuple
    chain: dict  # of chants {word: the chance of WORDS up to each one to follow it}
    town_last: bool = False  # a person's town is the last of their facts, not the first


class Rng:
    """Choices from `random.random()` alone: Python promises never to change its numbers."""

    def __init__(self, seed):
        self.random = random.Random(seed).random
        self.draws = iter(self.random, None)  # the same numbers, without end

    def below(self, n):
        """A whole number from 0 to n - 1."""
        return int(self.random() * n)

    def pick(self, items):
        return items[int(self.random() * len(items))]

    def sample(self, items, n):
        """n different ones: the first n steps of Fisher-Yates."""
        items = list(items)
        for i in range(n):
            j = i + int(self.random() * (len(items) - i))
            items[i], items[j] = items[j], items[i]
        return items[:n]


def chain(seed):
    """{word: cumulative chances of WORDS to follow it}. A few words follow often, most hardly ever."""
    rng = Rng(seed)
    chances = {}
    for word in WORDS:
        weights = list(accumulate(rng.random() ** 20 for _ in WORDS))
        chances[word] = [weight / weights[-1] for weight in weights]
    return chances


TALES = Vocabulary(TOWNS, TRADES, ANIMALS, DEEDS, chain(0))
FABLE_TOWNS = [a + b for a in TOWN_BEGINNINGS for b in ENDINGS]
FABLE_DEEDS = ("went to the river", "looked at the birds", "told an old song", "ate under a tree", "slept until dark",
               "counted the fire", "lit a long story", "sang to the market", "waited for the cheese",
               "danced for the rain")
FABLES = Vocabulary(FABLE_TOWNS, trades=ANIMALS, animals=TRADES, deeds=FABLE_DEEDS, chain=chain(1), town_last=True)


@dataclass
class Story:
    """One document. All places are in characters."""
    text: str = ""
    answers: list = field(default_factory=list)  # [(end of the fact's sentence, start, end)]
    refrains: list = field(default_factory=list)  # [(start, end)] of what a chant's refrains ask for
    facts: dict = field(default_factory=dict)  # {end of a fact's sentence: its beginning}


def stories(split="train", seed=0, people=5, vocabulary=TALES, chants=True):
    """Yield `Story` after `Story` of one split, for ever; the same ones for the same arguments.

    people: in a story at most. chants: whether there are any. With the defaults nearly every story has 140 to 1,100
    tokens, more of them few than many.
    """
    rng = Rng(3 * seed + SPLITS.index(split))
    while True:
        writer = Writer(rng, vocabulary)
        # people, with what is known of each
        writer.invite(split, people)
        for name, home in writer.homes.items():
            writer.introduce(name, home)
            if chants:
                writer.chant(20 + rng.below(50), end=".")
        # scenes, with some questions after each of them
        for _ in range(1 + rng.below(4) * rng.below(4)):
            writer.scene()
            if chants:
                writer.chant(20 + rng.below(50), end=".")
            for _ in range(rng.below(3)):
                writer.ask()
        # and more questions at the end
        for _ in range(2 + rng.below(4)):
            writer.ask()
        yield writer.story


def split_of(name, town, vocabulary=TALES):
    """The split of a hero: one pair in sixteen is test, one in sixteen calibration, others train."""
    return {0: "test", 1: "calibration"}.get((NAMES.index(name) + vocabulary.towns.index(town)) % 16, "train")


class Writer:
    """Writes one story, and remembers for each fact where it was stated and how to ask for it."""

    def __init__(self, rng, vocabulary=TALES):
        self.rng, self.words = rng, vocabulary
        self.story = Story()
        self.facts = []  # (end of the sentence, subject, answer, question)
        self.followed = {}  # {word: what last followed it in a chant}

    def invite(self, split, people):
        """Decide who is in the story: a hero of this split, and others."""
        rng, towns = self.rng, self.words.towns
        hero, town = rng.pick(NAMES), rng.pick(towns)
        while split_of(hero, town, self.words) != split:
            hero, town = rng.pick(NAMES), rng.pick(towns)

        # the other people: no two of a story share their second syllable or their town
        endings = rng.sample([e for e in ENDINGS if not hero.endswith(e)], rng.below(people))
        others = [rng.pick(BEGINNINGS) + ending for ending in endings]
        other_towns = list(towns)
        other_towns.remove(town)
        other_towns = rng.sample(other_towns, len(others))
        self.people = [hero, *others]
        self.homes = dict(zip(self.people, [town, *other_towns]))

        # what can be hidden: each thing at most once, so its place is unique
        self.things = rng.sample(THINGS, len(THINGS))

    def say(self, sentence):
        self.story.text = f"{self.story.text} {sentence}".lstrip()

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
        told = [(town, f"Where does {name} live?")]
        known = {"do": words.trades, "wear": COLOURS, "sing": THINGS + SPOTS, "own": words.animals}
        for verb in rng.sample(known, 1 + rng.below(4)):
            some = known[verb]
            answer = " ".join(rng.sample(some, 3 + rng.below(4))) if verb == "sing" else rng.pick(some)
            told.append((answer, f"What does {name} {verb}?"))
        for answer, question in told[1:] + told[:1] if words.town_last else told:
            self.state(name, answer, question)

    def chant(self, length, end="", often=OFTEN):
        """A chain of about `length` words, with refrains."""
        rng, chances = self.rng, self.words.chain
        words = [rng.pick(WORDS)]
        while True:
            # words that follow each other, as long as a draw does not ask for a refrain
            word, draws = words[0], takewhile(partial(le, often), islice(rng.draws, length - 1))
            words += [word := WORDS[bisect(chances[word], rng.random())] for _ in draws]
            self.followed |= zip(words, words[1:])
            if len(words) >= length:
                break
            # a refrain, and what it asks for, from which the chant goes on
            refrain = rng.pick(REFRAINS)
            asked_for = {AGAIN: word, BACK: words[-2:][0]}.get(refrain, self.followed.get(word, word))
            self.say(" ".join([*words, refrain]))
            start = len(self.story.text) + 1
            self.story.refrains.append((start, start + len(asked_for)))
            length = max(1, length - len(words) - 1)  # of those that are still to come
            words = [asked_for]
        self.say(" ".join(words) + end)

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
