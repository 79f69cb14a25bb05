"""Text -> token windows: the embedded stories, WikiText-2, C4, or any UTF-8 file.

A text is a sequence of documents. Each document is encoded on its own and begins with `<s>` if the tokenizer has one.
The tokens of all documents form one stream, which is cut into windows without overlap. A remainder shorter than a
window is dropped. Calibration and test never see the same text:

    tales, fables   test         stories of the test split
                    calibration  stories of the calibration split
    wikitext2       test         the test split, one document, rows joined by "\\n\\n"
                    calibration  the train split, an article a document
    c4              test         1100 documents of the first validation shard, joined by " "
                    calibration  documents of the first train shard
    FILE            test         windows from all over the first half of its characters, one document
                    calibration  the same of the second half; all of it, if the test is of another text

The windows of one long text (a file, or wikitext2's test split) are spread over it. The first ones may come from two
or three articles, and an error over windows would speak of these alone. The articles of wikitext2's train split are
spread, too. The documents of c4 are pages of the web in no order.

The test texts of wikitext2 and c4 are those of the published numbers. WikiText-2: "\\n\\n".join over the rows of the
Hugging Face dataset, where a row is a line of the raw file with its newline, or "" for a blank line; one document, with
a single `<s>` at the start. C4: what GPTQ calls c4-new, and of which IntactKV measures 256 windows of 2048 tokens. Both
are downloaded from the hub at first use. Calibration text is read document by document, as far as needed. A file is
halved because neither call knows how much of it the other one takes.
"""
import gzip
import io
import json
import math
import os
import re
import zipfile
from array import array
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import islice

import torch
from tqdm import tqdm

from tinykv import UserError, at_least, did_you_mean, one_of
from tinykv.lab.data.stories import FABLES, SPLITS, TALES, Story, stories
from tinykv.lab.files import read_text
from tinykv.lab.hf.hub import HubFile, fetch_file

MOST = 10 ** 8  # tokens of all windows: stories never end


@dataclass
class Windows:
    """Token windows, and the questions that each of them can answer."""
    tokens: torch.Tensor  # (W, T), int64
    answers: list  # per window [(start, end)] in tokens: answers whose fact it states earlier
    start: int = 1  # the first token that is predicted

    def __post_init__(self):
        """A copy of the tokens, as the caller may edit theirs. UserError for answers that are not predicted."""
        self.tokens, (W, T) = self.tokens.clone(), self.tokens.shape
        inside = all(self.start <= start < end <= T for of_window in self.answers for start, end in of_window)
        if not (1 <= self.start < T and len(self.answers) == W and inside):
            raise UserError(f"the first target is from 1 to {T - 1}, and each of the {W} windows has a list of "
                            f"answers, (start, end) from there to {T}; got {self.start}, {str(self.answers)[:80]}")

    def predicted_from(self, start):
        """The same windows, where no token before `start` is predicted."""
        start = max(start, self.start)
        answers = [[place for place in of_window if place[0] >= start] for of_window in self.answers]
        return Windows(self.tokens, answers, start)


def load_windows(data, tokenizer, context, windows, split="test", seed=0, bos="replace", prefix=(), whole=False):
    """`windows` windows of `context` tokens of "tales", "fables", "wikitext2", "c4" or a file -> Windows. None: all
    that the text has.

    tokenizer: has `encode(text)` -> ids and `encode_with_offsets(text)` -> (ids, [(start, end)] in characters), both
    without special tokens, and `bos_id`, which may be None. seed: which stories are read; other texts have one order.
    bos: "replace" makes `<s>` the first token of every window; "given" does the same, and does not count the prediction
    of the token after it (or after the prefix), as IntactKV evaluates; "none" leaves windows as they were cut, as
    KVQuant and SKVQ do. prefix: tokens put before each window's text, in place of bos; they count towards the `context`
    tokens and are not predicted. whole: of a file, read all of it and not the half of this split; the other split is
    another text.
    """
    at_least(1, windows=windows, context=context)
    one_of(("replace", "given", "none"), bos=bos)
    one_of(SPLITS, split=split)
    n, replace_first = len(prefix), bos != "none" and not prefix
    if replace_first and tokenizer.bos_id is None:
        raise UserError("this tokenizer has no <s> to begin every window with; use bos 'none', windows as they are cut")
    if n > context - 2:
        raise UserError(f"a prefix of {n} tokens leaves no text in windows of {context}; use longer ones")

    # 1. the stream: the tokens of as many documents as are needed
    text_length = context - n  # tokens of text in a window
    need = MOST if windows is None else windows * text_length
    if need > MOST or windows is None and data in VOCABULARIES:
        what = f"all of {data}" if windows is None else f"{windows} windows of {text_length} tokens"
        raise UserError(f"{what} are more than {MOST:,} tokens; ask for fewer windows")
    name, documents = read_documents(data, split, seed, whole)
    ids, marks = encode_documents(documents, tokenizer, need)
    if windows is None:
        windows = max(1, len(ids) // text_length)
        need = windows * text_length
    if len(ids) < need:
        raise UserError(f"{name} has {len(ids)} tokens, {len(ids) // text_length} windows of {text_length}; "
                        f"{windows} windows need {need} tokens: ask for fewer or shorter ones, or give a "
                        "longer text")

    # 2. the windows: of many documents the first ones, of one long text some from all over it
    n_full = len(ids) // text_length  # windows that the stream has
    is_one_text = data not in TEXTS or (data, split) == ("wikitext2", "test")
    chosen = (spread(n_full) if is_one_text else list(range(n_full)))[:windows]
    tokens = torch.frombuffer(ids, dtype=torch.int64)[:n_full * text_length]
    tokens = tokens.view(n_full, text_length)[chosen]  # (W, T - n)
    answers = answers_in_windows(marks, n_full, text_length, n_replaced=int(replace_first))
    answers = [answers[window] for window in chosen]
    if replace_first:
        tokens[:, 0] = tokenizer.bos_id

    # 3. the prefix before each of them
    repeated = torch.tensor(prefix, dtype=torch.int64).expand(windows, -1)  # (W, n)
    tokens = torch.cat([repeated, tokens], dim=1)  # (W, T)
    answers = [[(start + n, end + n) for start, end in of_window] for of_window in answers]
    return Windows(tokens, answers, start=max(1, n) + (bos == "given"))


def share_text(a, b, n=32):
    """Whether windows a (W, T) and b (W', T') have n tokens in a row in common, or all but the first of one."""
    n = min(n, a.shape[1] - 1, b.shape[1] - 1)
    of_a, of_b = ({hash(tuple(ids[i:i + n])) for ids in windows.tolist() for i in range(len(ids) - n + 1)}
                  for windows in (a, b))
    return not of_a.isdisjoint(of_b)


def spread(n):
    """The indices 0 .. n - 1 in an order in which any that follow each other, as a draw's do, lie evenly over all n:
    each is a golden section of n after the last one, modulo n."""
    step = round(0.618 * n)
    while math.gcd(step, n) != 1:  # else some would come twice
        step += 1
    return [i * step % n for i in range(n)]


def encode_documents(documents, tokenizer, need):
    """Documents -> the stream's ids, at least `need` if the text has as many, and a mark per answer.

    A mark is (fact, start, end), places in the stream: the first token of the sentence that states the fact, the first
    token of the answer, and the token after its last.
    """
    ids, marks = array("q"), []  # 8 bytes an id
    # disable=None: no bar where there is no terminal
    for document in tqdm(documents, unit="document", desc="reading text", leave=False, delay=1, disable=None):
        if tokenizer.bos_id is not None:
            ids.append(tokenizer.bos_id)
        new, offsets = tokenizer.encode_with_offsets(document.text)
        marks += mark_answers(document, offsets, len(ids))
        ids.extend(new)
        if len(ids) >= need:
            break
    return ids, marks


def mark_answers(document, offsets, base):
    """The marks of a document's answers. base: the place of the document's first token.

    A token belongs to an answer, or a sentence, if they share a character: it may also hold the blank before the word.
    """
    if not document.answers or not offsets:
        return []
    starts, ends = zip(*offsets)  # in characters, one of each per token
    marks = []
    for fact, start, end in document.answers:
        first_of_fact = bisect_right(ends, document.facts[fact])  # the first to end after it begins
        first_of_answer = bisect_right(ends, start)
        after_answer = bisect_left(starts, end)  # the first to begin at the answer's end or later
        marks.append((base + first_of_fact, base + first_of_answer, base + after_answer))
    return marks


def answers_in_windows(marks, windows, context, n_replaced):
    """Per window [(start, end)]: the answers that it holds whole, together with their facts.

    n_replaced: tokens replaced at a window's start; a fact that begins among them is not whole.
    """
    answers = [[] for _ in range(windows)]
    for fact, start, end in marks:
        window = start // context
        begin = window * context  # the window's first token
        if window < windows and fact >= begin + n_replaced and end <= begin + context:
            answers[window].append((start - begin, end - begin))
    return answers


# The texts

VOCABULARIES = {"tales": TALES, "fables": FABLES}
TEXTS = ("tales", "fables", "wikitext2", "c4")  # all other data are files
C4 = "1588ec454efa1a09f29cd18ddd04fe05fc8653a2"
HUB_FILES = {
    "wikitext2": HubFile("ggml-org/ci", "wikitext-2-raw-v1.zip",
                         "ef7edb566e3e2b2d31b29c1fdb0c89a4cc683597484c3dc2517919c615435a11"),
    "c4 test": HubFile("allenai/c4", "en/c4-validation.00000-of-00008.json.gz",
                       "1f25b6af12da84115301d4ee93ea5246c8fea5bb4a2008472794d95b917cc97f", C4),
    "c4 calibration": HubFile("allenai/c4", "en/c4-train.00000-of-01024.json.gz",
                              "8ef8d75b0e045dec4aa5123a671b4564466b0707086a7ed1ba8721626dfffbc9", C4),
}


def read_documents(data, split, seed, whole=False):
    """A split of a text -> its name, and its documents. Only stories have answers."""
    if data in VOCABULARIES:
        return f"{data} ({split})", stories(split, seed, vocabulary=VOCABULARIES[data])
    if data == "wikitext2":
        return f"wikitext2 ({split})", map(Story, wikitext2(split))
    if data == "c4":
        return f"c4 ({split})", map(Story, c4(split))
    first, second = halves(data)
    if whole:
        return f"{data} (whole)", [marked(first + second)]
    return f"{data} ({split})", [marked(first if split == "test" else second)]


def marked(text):
    """A text of a file -> Story, without its marks: an <answer>word</answer> repeats one of a sentence before it."""
    story = Story()
    for i, part in enumerate(re.split("<answer>(.*?)</answer>", text)):
        if i % 2 == 1:  # an answer
            fact = story.text.rfind(part)
            if not part or fact < 0:
                raise UserError(f"<answer>{part}</answer> repeats nothing that the text says before it; mark what does")
            story.facts[fact] = 1 + max(story.text.rfind(end, 0, fact) for end in ".\n")
            story.answers.append((fact, len(story.text), len(story.text) + len(part)))
        story.text += part
    return story


def wikitext2(split):
    """The test split as one text, or the articles of the train split, spread."""
    member = f"wikitext-2-raw/wiki.{'test' if split == 'test' else 'train'}.raw"
    with zipfile.ZipFile(fetch_file(HUB_FILES["wikitext2"])) as archive, archive.open(member) as raw:
        lines = io.TextIOWrapper(raw, encoding="utf-8")
        rows = [line if line.strip() else "" for line in lines]
    if split == "test":
        return ["\n\n".join(rows)]
    texts = list(articles(rows))
    return [texts[i] for i in spread(len(texts))]


def articles(lines):
    """The text of each article. Its title looks like " = Title = ", a section " = = Section = = "."""
    article = []
    for line in lines:
        is_title = line.startswith(" = ") and not line.startswith(" = = ")
        if is_title and any(article):
            yield "\n\n".join(article)
            article = []
        article.append(line)
    yield "\n\n".join(article)


def c4(split):
    """Yield the first 1100 test documents as one text, or the documents of the first train shard. A line is read when
    it is needed: a shard of 300 MB unpacks to 800 MB."""
    with gzip.open(fetch_file(HUB_FILES[f"c4 {split}"])) as lines:
        texts = (json.loads(line)["text"] for line in lines)
        yield from [" ".join(islice(texts, 1100))] if split == "test" else texts


def halves(path):
    """The text of a file in two, of equal length in characters."""
    if not os.path.exists(path):
        raise UserError(f"no data called {path!r}, and no such file; give {', '.join(TEXTS)} or the "
                        f"path of a text file{did_you_mean(path, TEXTS)}")
    text = read_text(path)
    if not text.strip():
        raise UserError(f"{path} holds no text; give another file")
    middle = len(text) // 2
    return text[:middle], text[middle:]
