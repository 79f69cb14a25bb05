"""The embedded corpus, and windows of every kind of text. Nothing is fetched from beyond this machine."""
import gzip
import hashlib
import http.server
import io
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
import zipfile
from itertools import islice, repeat
from pathlib import Path

import pytest
import sentencepiece
import torch

from tinykv import UserError, hf
from tinykv.data import download, load_windows, windows
from tinykv.data import stories as corpus
from tinykv.data.download import SOURCES, Source, fetch
from tinykv.data.stories import NAMES, SPLITS, TOWNS, Story, split_of, stories
from tinykv.data.windows import answers_in_windows, encode_in_parts
from tinykv.hf.tokenizer import JsonTokenizer
from tinykv.run.cli import EMBEDDED

SCHEMES = download.SCHEMES  # before any test changes them

GOLDEN = {  # of the text that the embedded model was trained on: these never change
    "train": "b4759af1be2d4d6837f2f11b1a0c778e0a3b062e1760e3c11fd7659ab2b238d0",
    "calibration": "5fb2fc2e654000724f21d4d16c5e819fc7b0a403d36e36de7c13d48214176324",
    "test": "831b8028632c465f9f10e2fa5727feff0848a72f501d3838948706f324e74d2c",
}


class Letters:
    """A token a character: what was encoded can be read off the ids."""
    bos_id = 1

    def encode(self, text):
        return [ord(c) + 10 for c in text]

    def encode_with_offsets(self, text):
        return self.encode(text), [(i, i + 1) for i in range(len(text))]

    def decode(self, ids):
        return "".join("<s>" if i == self.bos_id else chr(i - 10) for i in ids)


class Words(Letters):
    """Words and signs, each with the blank before it, as the byte-level tokenizers have them."""

    def encode(self, text):
        return self.encode_with_offsets(text)[0]

    def encode_with_offsets(self, text):
        found = list(re.finditer(r" ?(\w+|[^\w ])", text))
        return [int.from_bytes(m[0].encode(), "big") % 2 ** 31 + 2 for m in found], [m.span() for m in found]


class Pieces:
    """A small sentencepiece model of the tales, as the embedded model has one."""

    def __init__(self):
        model = io.BytesIO()
        source = stories("train", seed=10 ** 9)
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(story.text for story in islice(source, 400)), model_writer=model, vocab_size=1024,
            model_type="bpe", byte_fallback=True, split_digits=True, normalization_rule_name="identity",
            minloglevel=2)
        self.model = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
        self.bos_id = self.model.bos_id()
        self.encode, self.decode = self.model.encode, self.model.decode

    def encode_with_offsets(self, text):
        mapping = self.model.EncodeAsOffsetMapping(text)
        return mapping["ids"], mapping["offsets"]


@pytest.fixture(scope="module")
def pieces():
    return Pieces()


@pytest.fixture(params=["letters", "words", "pieces"])
def tokenizer(request, pieces):
    return {"letters": Letters(), "words": Words(), "pieces": pieces}[request.param]


def digest(split):
    total = hashlib.sha256()
    for story in islice(stories(split), 200):
        total.update(story.text.encode() + b"\n" + repr(story.answers).encode() + b"\n")
    return total.hexdigest()


# The tales

@pytest.mark.parametrize("split", SPLITS)
def test_tales_never_change(split):
    assert digest(split) == GOLDEN[split]


def test_tales_depend_on_seed_and_split_only():
    first = {(split, seed): next(stories(split, seed)).text for split in SPLITS for seed in range(5)}
    assert len(set(first.values())) == 15
    assert first == {key: next(stories(*key)).text for key in first}


@pytest.mark.whole  # a process of its own
def test_nothing_depends_on_the_hash_seed():
    code = ("import test_data as t; w = t.load_windows('tales', t.Words(), 64, 8);"
            "print([t.digest(s) for s in t.SPLITS], w.tokens.sum().item(), w.answers)")
    env = {**os.environ, "PYTHONPATH": f"{Path(__file__).parent}{os.pathsep}{Path(__file__).parents[1]}"}
    run = subprocess.run([sys.executable, "-c", code], env={**env, "PYTHONHASHSEED": "4321"}, text=True,
                         capture_output=True, check=True)
    here = load_windows("tales", Words(), 64, 8)
    assert run.stdout.strip() == f"{[digest(split) for split in SPLITS]} {here.tokens.sum().item()} {here.answers}"


@pytest.mark.whole
def test_every_pair_has_one_split():
    share = [split_of(name, town) for name in NAMES for town in TOWNS]
    assert set(share) == set(SPLITS)
    for split in ("test", "calibration"):
        assert share.count(split) / len(share) == pytest.approx(1 / 16, abs=0.005)


def test_splits_are_disjoint():
    pairs, texts = {}, {}
    for split in SPLITS:
        several = [story.text for seed in (0, 7) for story in islice(stories(split, seed), 500)]
        opening = [re.match(r"(\w+) (\w+)\.", text).groups() for text in several]
        assert all(split_of(*pair) == split for pair in opening)
        pairs[split], texts[split] = set(opening), set(several)
    for a, b in (("train", "test"), ("train", "calibration"), ("calibration", "test")):
        assert not pairs[a] & pairs[b] and not texts[a] & texts[b]


# The fables

def test_fables_are_made_of_the_words_of_tales(pieces):
    """So the tokenizer needs about as many tokens for them."""
    text = {name: " ".join(story.text for story in islice(stories("test", vocabulary=vocabulary), 100))
            for name, vocabulary in (("tales", corpus.TALES), ("fables", corpus.FABLES))}
    words = {name: set(re.findall(r"\b[a-z]+\b", of)) for name, of in text.items()}
    assert words["fables"] <= words["tales"]
    length = {name: len(pieces.encode_with_offsets(of)[0]) / len(of) for name, of in text.items()}
    assert length["fables"] == pytest.approx(length["tales"], rel=0.1)
    assert not set(corpus.FABLES.towns) & set(corpus.TALES.towns)
    assert not set(corpus.FABLES.deeds) & set(corpus.TALES.deeds)


def test_fables_ask_for_what_they_told():
    """A person's town is the last of their facts; and a hero belongs to one split."""
    for split in SPLITS:
        for story in islice(stories(split, vocabulary=corpus.FABLES), 60):
            told, talk = parse(story.text)
            for (_, reply, _), (fact, start, end) in zip(talk, story.answers, strict=True):
                assert told[reply] == (story.facts[fact], fact) and fact < start
                assert reply.endswith(story.text[start:end])
            hero = story.text.split()[0]
            facts = [sentence.split() for sentence in told if sentence.startswith(f"{hero} ")]
            towns = [i for i, words in enumerate(facts) if words[1] in corpus.FABLES.towns]
            assert len(facts) > 1 and len(towns) == 1
            assert split_of(hero, facts[towns[0]][1], corpus.FABLES) == split
            assert towns[0] > 0  # another fact comes first


def test_fables_by_name():
    tokens = {name: load_windows(name, Letters(), 50, 2).tokens.tolist() for name in ("tales", "fables")}
    assert tokens["tales"] != tokens["fables"] and "fables" in load_windows("fables", Letters(), 50, 2).name


def test_unknown_split_of_the_tales():
    with pytest.raises(ValueError, match="validation"):
        next(stories("validation"))


def one_of(words):
    return f"({'|'.join(words)})"


SONG = one_of(corpus.THINGS + corpus.SPOTS)
REPLIES = (  # a question, and how its reply goes
    (r"Where does (\w+) live\?", "{} " + one_of(TOWNS)), (r"What does (\w+) do\?", "{} " + one_of(corpus.TRADES)),
    (r"What does (\w+) wear\?", "{} " + one_of(corpus.COLOURS)),
    (r"What does (\w+) own\?", "{} " + one_of(corpus.ANIMALS)),
    (r"What does (\w+) sing\?", "{} (" + SONG + "(?: " + SONG + "){{2,5}})"),
    (r"Where is the (\w+)\?", "The {} " + one_of(corpus.SPOTS)),
)


def parse(text):
    """({sentence: (begin, end)} of what is told outside of talk, [(question, reply, where the reply begins)])."""
    told, talk, at = {}, [], 0
    for match in re.finditer(r'"([^"]+)" asked \w+\. "([^"]+)\."|([^"]+?)\.(?= |$)', text):
        assert text[at:match.start()].strip() == ""
        at = match.end()
        if match[3] is None:
            talk.append((match[1], match[2], match.start(2)))
        else:
            begin = at - len(match[3].strip()) - 1
            told.setdefault(text[begin:at - 1], (begin, at))
    assert at == len(text)
    return told, talk


@pytest.mark.whole  # 150 stories of each split
def test_answers_repeat_what_was_stated():
    kinds = set()
    for split in SPLITS:
        for story in islice(stories(split, seed=3), 150):
            told, talk = parse(story.text)
            assert len(talk) == len(story.answers)
            for (question, reply, begin), (fact, start, end) in zip(talk, story.answers):
                asked, form = next((re.fullmatch(q, question), r) for q, r in REPLIES if re.fullmatch(q, question))
                answer = re.fullmatch(form.format(asked[1]), reply)
                assert (start, end) == (begin + answer.start(1), begin + answer.end(1))
                assert story.text[start:end] == answer[1]
                assert told[reply] == (story.facts[fact], fact) and fact < start
                kinds.add(form)
    assert len(kinds) == len(REPLIES)


def test_a_subject_is_stated_once():
    """Of each person one town, one trade and so on, and of each thing one place: no question has two answers."""
    for story in islice(stories("test", seed=1), 100):
        told = [story.text[begin:end - 1] for end, begin in story.facts.items()]
        for _, form in REPLIES:
            subjects = [sentence.split()[:1 + sentence.startswith("The ")] for sentence in told
                        if re.fullmatch(form.format(r"\w+"), sentence)]
            assert len({tuple(words) for words in subjects}) == len(subjects)


def test_people_of_a_story_differ_in_their_second_syllable():
    for story in islice(stories("test", seed=2, chants=False), 100):
        people = set(re.findall(r"(?:^|[.\"] )([A-Z]\w+) (?=[A-Z])", story.text))
        endings = {next(e for e in corpus.ENDINGS if name.endswith(e)) for name in people}
        assert people <= set(NAMES) and len(endings) == len(people) > 0


def test_questions_reach_far(pieces):
    reach = []
    for story in islice(stories("test"), 300):
        starts = [start for start, _ in pieces.encode_with_offsets(story.text)[1]]
        reach += [sum(fact <= s < answer for s in starts) for fact, answer, _ in story.answers]
    assert max(reach) > 1000 and sum(r > 500 for r in reach) > 50 and sum(r < 100 for r in reach) > 50


# Windows

def flat(tokenizer, split, need, seed=0):
    """The stream, spelled out: a list of (id, story or None, begin, end), with one entry a token."""
    stream = []
    for story in stories(split, seed):
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
    assert split in replaced.name and "tales" in replaced.name


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


@pytest.mark.whole
def test_a_fact_under_the_replaced_token_is_not_known():
    found = 0
    for seed in range(20):
        story = next(stories("test", seed))
        for fact, start, end in story.answers:
            border = story.facts[fact] + 1  # of windows of which the second begins with the fact's sentence; 1 for <s>
            if border >= 2 and end + 1 <= 2 * border:
                place = (start + 1 - border, end + 1 - border)
                cut, replaced = (load_windows("tales", Letters(), border, 2, "test", seed, bos).answers
                                 for bos in ("none", "replace"))
                assert place in cut[1] and place not in replaced[1]
                earlier = load_windows("tales", Letters(), border - 1, 3, "test", seed).answers
                assert (place[0] + 1, place[1] + 1) in earlier[1] or place[1] + 1 > border - 1
                found += 1
    assert found > 10


def test_answers_up_to_the_borders():
    marks = [(0, 2, 4), (1, 2, 4), (3, 4, 6), (4, 5, 8), (5, 7, 8), (6, 7, 9), (8, 10, 12)]
    assert answers_in_windows(marks, 2, 4, n_replaced=0) == [[(2, 4), (2, 4)], [(1, 4), (3, 4)]]
    assert answers_in_windows(marks, 2, 4, n_replaced=1) == [[(2, 4)], [(3, 4)]]


def test_answers_decode(tokenizer):
    got = load_windows("tales", tokenizer, 900, 24)
    known = {story.text[a:b] for story in islice(stories("test"), 100) for _, a, b in story.answers}
    if isinstance(tokenizer, Words):
        known = {tuple(tokenizer.encode(" " + answer)) for answer in known}
    for tokens, answers in zip(got.tokens.tolist(), got.answers):
        for start, end in answers:
            ids = tokens[start:end]
            assert (tuple(ids) if isinstance(tokenizer, Words) else tokenizer.decode(ids).strip()) in known
    assert sum(map(len, got.answers)) > 10


def test_no_more_is_encoded_than_needed(pieces):
    class Counting(Words):
        calls = 0

        def encode_with_offsets(self, text):
            self.calls += 1
            return super().encode_with_offsets(text)

    counting = Counting()
    load_windows("tales", counting, 2, 1)
    assert counting.calls == 1


def test_a_tokenizer_without_bos():
    class Bare(Letters):
        bos_id = None

    text = "".join(story.text for story in islice(stories("test"), 20))[:300]
    assert Letters().decode(load_windows("tales", Bare(), 100, 3, bos="none").tokens.flatten().tolist()) == text
    with pytest.raises(UserError, match="no <s>.*'none'"):
        load_windows("tales", Bare(), 100, 3)


@pytest.mark.parametrize("context, windows", [(1, 4), (0, 4), (-5, 4), (8, 0), (8, -1)])
def test_senseless_sizes(context, windows):
    with pytest.raises(UserError, match=f"{windows} windows of {context} tokens"):
        load_windows("tales", Letters(), context, windows)


def test_senseless_options():
    with pytest.raises(UserError, match="bos is 'add'"):
        load_windows("tales", Letters(), 8, 1, bos="add")
    with pytest.raises(UserError, match="tales has no split 'validation'; it has train, calibration, test"):
        load_windows("tales", Letters(), 8, 1, "validation")
    with pytest.raises(UserError, match="c4 has no split 'train'; it has calibration, test"):
        load_windows("c4", Letters(), 8, 1, "train")


# Files

def test_file_halves(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes("abcdé\r\nghijk\nlmnopq".encode())  # 18 characters, as a line ends in one
    test = load_windows(str(path), Letters(), 5, 2, bos="none")
    calibration = load_windows(str(path), Letters(), 5, 2, "calibration", bos="none")
    assert Letters().decode(test.tokens.flatten().tolist()) == "<s>abcdé\nghi"
    assert Letters().decode(calibration.tokens.flatten().tolist()) == "<s>jk\nlmnopq"
    assert test.answers == calibration.answers == [[], []]
    assert "first half" in test.name and "second half" in calibration.name and str(path) in test.name
    replaced = load_windows(path, Letters(), 5, 2)
    assert Letters().decode(replaced.tokens.flatten().tolist()) == "<s>abcd<s>\nghi"


def test_a_whole_file(tmp_path):
    """Either split is all of it, where the other one is of another text."""
    path = tmp_path / "text.txt"
    path.write_text("abcdefghijk")
    for split in ("test", "calibration"):
        whole = load_windows(str(path), Letters(), 6, 2, split, bos="none", whole=True)
        assert Letters().decode(whole.tokens.flatten().tolist()) == "<s>abcdefghijk" and "whole" in whole.name


def test_file_too_short(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("x" * 58)
    assert load_windows(str(path), Letters(), 30, 1).tokens.shape == (1, 30)
    with pytest.raises(UserError, match="has 30 tokens, 0 windows of 31; 1 windows need 31 tokens"):
        load_windows(str(path), Letters(), 31, 1)
    with pytest.raises(UserError, match="has 30 tokens, 3 windows of 9; 4 windows need 36 tokens"):
        load_windows(str(path), Letters(), 9, 4, "calibration")
    path.write_text("")
    with pytest.raises(UserError, match="has 1 tokens, 0 windows"):
        load_windows(str(path), Letters(), 9, 4)


def test_file_faults(tmp_path):
    latin = tmp_path / "latin.txt"
    latin.write_bytes("vier Bücher".encode("latin-1"))
    for name, message in ((tmp_path / "none.txt", "no data called .*none.txt.*tales, fables, wikitext2, c4"),
                          ("wikitext-2", "no data called 'wikitext-2'"), (tmp_path, "is a folder"),
                          (latin, r"is not UTF-8 \(byte 6\)"), (latin / "below", "no such file")):
        with pytest.raises(UserError, match=message) as error:
            load_windows(str(name), Letters(), 8, 1)
        assert "\n" not in str(error.value)


# WikiText-2 and C4, in small

@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TINYKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(download, "SCHEMES", ("http",))  # of the server below
    return tmp_path / "cache"


@pytest.fixture
def site(cache):
    """A web server: {path: bytes, or the address to go on to, or None for a failure}, and the requests it got."""
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            server.requests.append(self.path)
            body = server.files.get(self.path)
            if body is None:
                return self.send_error(404)
            self.send_response(302 if isinstance(body, str) else 200)
            if isinstance(body, str):
                self.send_header("Location", body)
                body = b""
            self.send_header("Content-Length", server.announced or len(body))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    server.files, server.requests, server.announced = {}, [], None
    server.at = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def offer(site, name, body):
    """The source of a file that the site has."""
    site.files[f"/{name}"] = body
    return Source(f"{site.at}/{name}", len(body), hashlib.sha256(body).hexdigest())


def zipped(**members):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, text in members.items():
            archive.writestr(f"wikitext-2-raw/wiki.{name}.raw", text.encode())
    return out.getvalue()


def shard(texts, tail=b""):
    return gzip.compress(b"".join(json.dumps({"text": t, "url": "u"}).encode() + b"\n" for t in texts) + tail)


def text_of(*args, **kwargs):
    return Letters().decode(load_windows(*args, **kwargs, bos="none").tokens.flatten().tolist())


def test_wikitext2(site, monkeypatch):
    test = " \n = Tea = \n \n A\u2028b\x85c \r\n\t\n = = Leaf = = \n last"
    train = " \n = One = \n x \n = = Sub = = \n = Two = \n y \n \n = Three = \n z \n"
    monkeypatch.setitem(SOURCES, "wikitext2", offer(site, "w.zip", zipped(test=test, train=train)))
    # A row is a line with its newline, or "": line by line, joined by two newlines.
    rows = ["", " = Tea = \n", "", " A\u2028b\x85c \n", "", " = = Leaf = = \n", " last"]
    want = "<s>" + "\n\n".join(rows)
    length = len(Letters().encode(want)) - 2
    assert text_of("wikitext2", Letters(), length, 1) == want
    with pytest.raises(UserError, match=f"has {length} tokens"):
        load_windows("wikitext2", Letters(), length + 1, 1)
    want = ("<s>\n\n = One = \n\n\n x \n\n\n = = Sub = = \n<s> = Two = \n\n\n y \n\n\n<s> = Three = \n\n\n z \n")
    assert text_of("wikitext2", Letters(), len(want) - 6, 1, "calibration") == want
    assert site.requests == ["/w.zip"]


def test_c4(site, monkeypatch):
    texts = [f"t{i}\n\u2028é" for i in range(1103)]
    monkeypatch.setitem(SOURCES, "c4 test", offer(site, "v.json.gz", shard(texts)))
    monkeypatch.setitem(SOURCES, "c4 calibration", offer(site, "t.json.gz", shard(["one", "two", "xyz"], b"{")))
    want = "<s>" + " ".join(texts[:1100])
    assert text_of("c4", Letters(), len(want) - 2, 1) == want
    with pytest.raises(UserError, match=rf"c4 \(test\) has {len(want) - 2} tokens"):
        load_windows("c4", Letters(), len(want) - 1, 1)
    # Read no further than needed: the fourth line, which is broken, would be an error.
    assert text_of("c4", Letters(), 2, 5, "calibration") == "<s>one<s>two<s>x"
    assert site.requests == ["/v.json.gz", "/t.json.gz"]


def test_the_published_sources():
    assert set(SOURCES) == {"wikitext2", "c4 test", "c4 calibration"}
    for source in SOURCES.values():
        assert re.fullmatch(r"https://[\w.-]+/[\w./-]+\.(zip|json\.gz)", source.url)
        assert re.fullmatch(r"[0-9a-f]{64}", source.sha256) and source.size > 4e6
    assert SOURCES["c4 test"].url != SOURCES["c4 calibration"].url


# Fetching

def refused(source, match):
    """Fetching fails with one line, which says where the file can be put by hand, and leaves nothing behind."""
    with pytest.raises(UserError, match=match) as error:
        fetch(source)
    folder = Path(os.environ["TINYKV_CACHE"])
    assert "\n" not in str(error.value) and source.sha256 in str(error.value)
    assert str(folder / source.url.rpartition("/")[2]) in str(error.value)
    assert not folder.is_dir() or list(folder.iterdir()) == []


def test_fetched_once(site, cache, capfd):
    source = offer(site, "f.bin", os.urandom(3_000_000))
    path = fetch(source)
    assert path == cache / "f.bin" and path.read_bytes() == site.files["/f.bin"]
    assert fetch(source) == path and site.requests == ["/f.bin"]
    assert list(cache.iterdir()) == [path]
    assert capfd.readouterr() == ("", "")  # no bar where there is no terminal


def test_a_bar_on_a_terminal(site, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    fetch(offer(site, "f.bin", b"x" * 1000))
    assert "f.bin: 100%" in sys.stderr.getvalue()


def test_put_there_by_hand(site, cache):
    source = offer(site, "f.bin", b"0123456789")
    cache.mkdir()
    for content, fault in ((b"01234", "has 5 bytes instead of 10"), (b"012345678x", "has SHA-256 .* instead of")):
        (cache / "f.bin").write_bytes(content)
        with pytest.raises(UserError, match=f"f.bin {fault}.*; delete it"):
            fetch(source)
        assert (cache / "f.bin").read_bytes() == content  # it is not ours to delete
    (cache / "f.bin").write_bytes(b"0123456789")
    assert fetch(source) == cache / "f.bin" and site.requests == []


@pytest.mark.parametrize("make", [lambda: zipped(test="x", train="y"), lambda: shard(["x"] * 50)])
def test_cut_short(site, monkeypatch, make):
    whole = make()
    source = offer(site, "f", whole)
    site.files["/f"] = whole[:-7]
    refused(source, f"has {len(whole) - 7} bytes instead of {len(whole)}")
    site.announced = len(whole)  # the connection breaks off
    refused(source, "bytes instead of|cannot be fetched")
    monkeypatch.setitem(SOURCES, "wikitext2", source)
    with pytest.raises(UserError):
        load_windows("wikitext2", Letters(), 8, 1)


def test_wrong_bytes(site):
    source = offer(site, "f", b"0123456789")
    site.files["/f"] = b"012345678x"
    refused(source, "has SHA-256 .* instead of")
    site.files["/f"] = b"0123456789x"
    refused(source, "has 11 bytes instead of 10")


def test_no_more_is_taken_than_announced(site, monkeypatch):
    monkeypatch.setattr(download, "CHUNK", 16)
    source = offer(site, "f", b"x" * 100)
    site.files["/f"] = b"x" * 10_000
    refused(source, "has 112 bytes instead of 100")


def test_no_such_page(site):
    refused(Source(f"{site.at}/f", 10, "0" * 64), "cannot be fetched .*404")


def test_no_network(cache):
    with http.server.HTTPServer(("127.0.0.1", 0), None) as closed:
        port = closed.server_port
    refused(Source(f"http://127.0.0.1:{port}/f", 10, "0" * 64), "cannot be fetched .*refused")


def test_https_only(site, monkeypatch):
    source = offer(site, "f", b"0123456789")
    for elsewhere in ("ftp://127.0.0.1/f", "https://127.0.0.1:1/f"):
        site.files["/f"] = elsewhere
        refused(source, f"cannot be fetched .*{elsewhere} is not http")
    site.files.update({"/f": "/g", "/g": b"0123456789"})
    assert fetch(source).read_bytes() == b"0123456789"
    fetch(source).unlink()
    monkeypatch.setattr(download, "SCHEMES", SCHEMES)
    asked = len(site.requests)
    refused(source, f"cannot be fetched .*{source.url} is not https")
    assert SCHEMES == ("https",) and len(site.requests) == asked


@pytest.mark.parametrize("how", [KeyboardInterrupt, SystemExit])
def test_interrupted(site, cache, monkeypatch, how):
    def interrupted(source, path):
        path.write_bytes(b"01234")
        assert [p.suffix for p in cache.iterdir()] == [".tmp"]
        raise how

    source = offer(site, "f", b"0123456789")
    with monkeypatch.context() as patch:
        patch.setattr(download, "copy", interrupted)
        with pytest.raises(how):
            fetch(source)
    assert list(cache.iterdir()) == []
    assert fetch(source).read_bytes() == b"0123456789"


def test_a_folder_that_cannot_be(site, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TINYKV_CACHE", str(tmp_path / "file"))
    refused(offer(site, "f", b"x"), "cannot be fetched .*File exists")


def test_the_usual_folder(site, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TINYKV_CACHE", "")
    assert fetch(offer(site, "f", b"x")) == tmp_path / ".cache" / "tinykv" / "f"


def texts_of_parts():
    rng = random.Random(0)
    words = ["Balo", "lives", "Eastwick", "where", "he", "said", "17", "Bücher", "東京", "e\u0301te", "\U0001f600"]
    some = [rng.choice(words) for _ in range(800)]
    return {
        "prose": " ".join(some), "lines": "\n".join(some), "no blanks": "".join(some),
        "signs": "".join(word + rng.choice([" ", ".", ". ", ",", "  ", "\n", " \n", "?! "]) for word in some),
        "letters": "".join(rng.choices("abcdefgh", k=4000)),
        "Chinese": "".join(rng.choices("東京都中国人一二三", k=3000)),
        "blanks": " " * 3000 + "Balo" + " " * 700 + "lives"}


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    folder = Path(__file__).parent / "references" / "tokenizer_json"
    return JsonTokenizer(folder / "tokenizer.json")


@pytest.mark.parametrize("name", texts_of_parts())
@pytest.mark.parametrize("size", [100, 333])
def test_parts_have_the_ids_of_the_whole(tokenizer, byte_level, monkeypatch, name, size):
    """With cuts every few words, wherever that may be."""
    monkeypatch.setattr(windows, "PART", size)
    text = texts_of_parts()[name]
    for one in (tokenizer, byte_level):
        if isinstance(one, Words) and name in ("no blanks", "letters", "Chinese"):
            continue  # a token of the whole text
        parts = list(encode_in_parts(text, one))
        assert len(parts) > 3 and [i for part in parts for i in part] == one.encode(text)


def test_where_no_token_ends(pieces, monkeypatch):
    """Between equal letters, pairs of which are tokens: as few cuts as can be, and no letter is lost."""
    monkeypatch.setattr(windows, "PART", 101)
    text = "l" * 1000
    ids = [i for part in encode_in_parts(text, pieces) for i in part]
    assert pieces.decode(ids).replace(" ", "") == text and len(ids) <= len(pieces.encode(text)) + 20


@pytest.mark.parametrize("line", ["x", "\n", " ", "東"])
def test_a_long_line_takes_no_time(tmp_path, line):
    """Of a character without end only a part is ever encoded."""
    _, tokenizer = hf.load(EMBEDDED)
    encode, lengths = tokenizer.encode, []
    tokenizer.encode = lambda part: lengths.append(len(part)) or encode(part)
    path = tmp_path / "line.txt"
    path.write_text(line * 3_000_000 if line != " " else "Balo" + line * 3_000_000)
    load_windows(str(path), tokenizer, 4, 1, bos="none")
    assert max(lengths) < 70_000 and sum(lengths) < 80_000


def test_a_word_while_much_is_read(capsys, monkeypatch):
    """On a terminal, before the windows are full; and it can be stopped."""
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    def endless(*settings, **more):
        yield Story("Balo lives in Eastwick. ")
        time.sleep(1.1)
        yield from map(Story, repeat("Balo lives in Eastwick. ", 500))
        raise KeyboardInterrupt
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    monkeypatch.setattr(windows, "stories", endless)
    with pytest.raises(KeyboardInterrupt):
        load_windows("tales", Letters(), 1000, 10 ** 6)
    assert "reading text" in terminal.getvalue() and "/1000000000" in terminal.getvalue()


def test_of_a_long_text_only_the_beginning_is_encoded(tmp_path):
    """To the tokens that the whole text begins with."""
    _, tokenizer = hf.load(EMBEDDED)
    text = " ".join(f"Balo{i} lives in  Eastwick, he says.\nWhere?" for i in range(20_000))
    path = tmp_path / "long.txt"
    path.write_text(text)
    encoded, encode = [], tokenizer.encode
    tokenizer.encode = lambda part: encoded.append(len(part)) or encode(part)
    found = load_windows(str(path), tokenizer, 64, 30, bos="none").tokens.flatten().tolist()
    whole = [tokenizer.bos_id, *encode(text[:len(text) // 2])]
    assert found == whole[:64 * 30] and sum(encoded) < len(text) // 4
