"""Text -> token windows: the embedded corpus, WikiText-2, C4, or any UTF-8 file.

A text is a row of documents. Each is encoded on its own and begins with `<s>` where the tokenizer has one; the tokens
of all of them form one stream, which is cut into windows without overlap. A rest shorter than a window is dropped.
What is calibrated on and what is tested on never overlap:

| data | test | calibration |
|---|---|---|
| tales | stories of the test split | stories of the calibration split |
| wikitext2 | the test split as one document, rows joined by a blank line | the train split, an article a document |
| c4 | the first 1100 documents of the first validation shard, joined by " " | documents of the first train shard |
| FILE | the first half of its characters, one document | the second half, one document |

The test texts of wikitext2 and c4 are those of the published numbers. WikiText-2: "\\n\\n".join over the rows of the
Hugging Face dataset, where a row is a line of the raw file with its newline, or "" for a line of nothing but blanks;
encoded once, with a single `<s>` at the start. C4: what GPTQ calls c4-new, and IntactKV measures 256 windows of 2048
of. Calibration text is read document by document, as far as needed: to encode all of it takes long, and gigabytes.
A file is halved because neither call knows how much of it the other one takes.

WikiText-2 and C4 are fetched once, over https, into $TINYKV_CACHE or ~/.cache/tinykv. Size and SHA-256 are checked on
every use, so a file that was put there by hand is as good. The checksums are those that Hugging Face's `datasets`
library recorded for these files.
"""
import gzip
import hashlib
import http.client
import io
import json
import os
import tempfile
import urllib.request
import zipfile
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from urllib.parse import urlsplit

import torch
from tqdm import tqdm

from tinykv import UserError
from tinykv.tales import SPLITS, Story, stories

SCHEMES = ("https",)  # what may be fetched from, redirections included
CHUNK = 2 ** 20  # bytes


@dataclass
class Windows:
    """Token windows, and what each window lets one know."""
    tokens: torch.Tensor  # (W, T), int64
    answers: list  # per window [(start, end)] in tokens: answers whose fact the same window states before
    name: str  # of the text
    start: int = 1  # the first token that is to be predicted


@dataclass(frozen=True)
class Source:
    """A file that is fetched once. size in bytes."""
    url: str
    size: int
    sha256: str


C4 = "https://huggingface.co/datasets/allenai/c4/resolve/1588ec454efa1a09f29cd18ddd04fe05fc8653a2/en/"
SOURCES = {
    "wikitext2": Source("https://wikitext.smerity.com/wikitext-2-raw-v1.zip", 4721645,
                        "ef7edb566e3e2b2d31b29c1fdb0c89a4cc683597484c3dc2517919c615435a11"),
    "c4 test": Source(C4 + "c4-validation.00000-of-00008.json.gz", 40471190,
                      "1f25b6af12da84115301d4ee93ea5246c8fea5bb4a2008472794d95b917cc97f"),
    "c4 calibration": Source(C4 + "c4-train.00000-of-01024.json.gz", 319308785,
                             "8ef8d75b0e045dec4aa5123a671b4564466b0707086a7ed1ba8721626dfffbc9"),
}


def load_windows(data, tokenizer, context, windows, split="test", seed=0, bos="replace", prefix=()):
    """`windows` windows of `context` tokens of "tales", "wikitext2", "c4" or a file -> Windows.

    tokenizer: has `encode(text)` -> ids, `encode_with_offsets(text)` -> (ids, [(start, end)] in characters), both
    without special tokens, and `bos_id`, which may be None. seed: which tales are read; other texts have one order.
    bos: "replace" makes every window's first token `<s>`, as IntactKV evaluates; "none" leaves windows as they were
    cut, as KVQuant and SKVQ do. prefix: tokens that are put before each window's text, in place of bos; they count to
    the `context` tokens, and are not predicted.
    """
    if context < 2 or windows < 1:
        raise UserError(f"{windows} windows of {context} tokens were asked for; ask for 1 or more, of 2 tokens or more")
    if bos not in ("replace", "none"):
        raise UserError(f"bos is {bos!r}; it is 'replace' or 'none'")
    if bos == "replace" and tokenizer.bos_id is None:
        raise UserError("this tokenizer has no <s> to begin every window with; use bos 'none', windows as they are cut")
    if len(prefix) > context - 2:
        raise UserError(f"a prefix of {len(prefix)} tokens leaves no text in windows of {context}; use longer ones")
    own = context - len(prefix)  # tokens of a window's text
    need = windows * own
    name, documents = read(data, split, seed)
    ids, marks = encode(documents, tokenizer, need)
    if len(ids) < need:
        raise UserError(f"{name} has {len(ids)} tokens, {len(ids) // own} windows of {own}; {windows} windows "
                        f"need {need} tokens: ask for fewer or shorter ones, or give a longer text")
    tokens = torch.tensor(ids[:need]).view(windows, own)  # (W, T - n)
    answers = known(marks, windows, own, lost=int(bos == "replace" and not prefix))
    if prefix:
        tokens = torch.cat([torch.tensor(prefix).expand(windows, -1), tokens], dim=1)  # (W, T)
        answers = [[(start + len(prefix), end + len(prefix)) for start, end in row] for row in answers]
    elif bos == "replace":
        tokens[:, 0] = tokenizer.bos_id
    return Windows(tokens, answers, name, start=max(1, len(prefix)))


def encode(documents, tokenizer, need):
    """The stream's ids, at least `need` of them if there are as many, and of each answer (fact, start, end) in tokens.

    fact: the first token of the sentence that states what the answer repeats.
    """
    ids, marks = [], []
    for document in documents:
        if tokenizer.bos_id is not None:
            ids.append(tokenizer.bos_id)
        base = len(ids)
        if document.answers:
            pieces, offsets = tokenizer.encode_with_offsets(document.text)
            starts, ends = zip(*offsets)
            for fact, start, end in document.answers:
                # Tokens that share a character with the text: a token may begin with the blank before a word.
                marks.append((base + bisect_right(ends, document.facts[fact]),
                              base + bisect_right(ends, start), base + bisect_left(starts, end)))
        else:
            pieces = tokenizer.encode(document.text)
        ids.extend(pieces)
        if len(ids) >= need:
            break
    return ids, marks


def known(marks, windows, context, lost):
    """Per window, the answers that it holds whole together with their facts. lost: tokens replaced at its start."""
    answers = [[] for _ in range(windows)]
    for fact, start, end in marks:
        window = start // context
        begin = window * context
        if window < windows and fact >= begin + lost and end <= begin + context:
            answers[window].append((start - begin, end - begin))
    return answers


# What the texts are

def read(data, split, seed):
    """(name, documents as `Story`) of a split of a text; a text without known answers is a story without questions."""
    splits = SPLITS if data == "tales" else ("calibration", "test")
    if split not in splits:
        raise UserError(f"{data} has no split {split!r}; it has {', '.join(splits)}")
    if data == "tales":
        return f"tales ({split})", stories(split, seed)
    texts = {"wikitext2": wikitext2, "c4": c4}.get(data)
    if texts:
        return f"{data} ({split})", map(Story, texts(split))
    first, second = halves(data)
    return (f"{data} (first half)", [Story(first)]) if split == "test" else (f"{data} (second half)", [Story(second)])


def wikitext2(split):
    with zipfile.ZipFile(fetch(SOURCES["wikitext2"])) as archive:
        with archive.open(f"wikitext-2-raw/wiki.{'test' if split == 'test' else 'train'}.raw") as raw:
            rows = [row if row.strip() else "" for row in io.TextIOWrapper(raw, encoding="utf-8")]
    return ["\n\n".join(rows)] if split == "test" else articles(rows)


def articles(rows):
    """The articles' texts. A title looks like " = Title = ", a section's like " = = Section = = "."""
    article = []
    for row in rows:
        if row.startswith(" = ") and not row.startswith(" = = ") and any(article):
            yield "\n\n".join(article)
            article = []
        article.append(row)
    yield "\n\n".join(article)


def c4(split):
    texts = json_lines(fetch(SOURCES[f"c4 {split}"]))
    return [" ".join(islice(texts, 1100))] if split == "test" else texts


def json_lines(path):
    """The "text" of each line, one at a time: a shard of 300 MB unpacks to 800 MB, and the first lines will do."""
    with gzip.open(path) as lines:
        for line in lines:
            yield json.loads(line)["text"]


def halves(path):
    """A file's text in two, of equal length in characters."""
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise UserError(f"no data called {path!r}, and no such file; give tales, wikitext2, c4 or the path of a text "
                        "file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 (byte {error.start}); convert it first, with iconv for one") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); give a text file") from None
    return text[:len(text) // 2], text[len(text) // 2:]


# Fetching

def fetch(source):
    """The path of the file, which is fetched if it is not there, and has the size and checksum that it should."""
    folder = Path(os.environ.get("TINYKV_CACHE") or "~/.cache/tinykv").expanduser()
    path = folder / source.url.rpartition("/")[2]
    if not path.exists():
        download(source, path)
    elif fault := fault_of(path, source):
        raise UserError(f"{path} {fault}; delete it, and it is fetched anew")
    return path


def fault_of(path, source):
    """What is wrong with the file, in words, or None."""
    size = path.stat().st_size
    if size != source.size:
        return f"has {size} bytes instead of {source.size}"
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    if digest.hexdigest() != source.sha256:
        return f"has SHA-256 {digest.hexdigest()} instead of {source.sha256}"


def download(source, path):
    """Fetch under a temporary name, check, rename: whatever happens, `path` is whole or not there at all."""
    part = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(prefix=path.name + ".", suffix=".part", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            copy(source, file, path.name)
        fault = fault_of(Path(part), source)
        if not fault:
            os.replace(part, path)
    except (OSError, http.client.HTTPException) as error:
        fault = f"cannot be fetched ({error})"
    finally:
        if part:
            Path(part).unlink(missing_ok=True)
    if fault:
        raise UserError(f"{source.url} {fault}; put that file, with SHA-256 {source.sha256}, at {path}")


def copy(source, file, name):
    """From the network into an open file, no further than one chunk past the size it should have."""
    opener = urllib.request.build_opener(Redirections)
    request = urllib.request.Request(secure(source.url), headers={"User-Agent": "tinykv"})
    with opener.open(request, timeout=60) as reply, \
            tqdm(total=source.size, unit="B", unit_scale=True, desc=name, disable=None) as bar:  # None: on a terminal
        while file.tell() <= source.size and (chunk := reply.read(CHUNK)):
            file.write(chunk)
            bar.update(len(chunk))


def secure(url):
    if urlsplit(url).scheme not in SCHEMES:
        raise OSError(f"{url} is not {' or '.join(SCHEMES)}")
    return url


class Redirections(urllib.request.HTTPRedirectHandler):
    """Follows a redirection, as long as it leads to https again."""

    def redirect_request(self, req, fp, code, msg, headers, newurl):
        return super().redirect_request(req, fp, code, msg, headers, secure(newurl))
