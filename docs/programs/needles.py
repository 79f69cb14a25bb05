"""Facts in a long text that are asked for at its end: how many of them does a method still find?

    python docs/programs/needles.py --model path/to/SmolLM2 --text wikitext2-test.txt --out needles.txt
    python eval_ppl.py --model path/to/SmolLM2 --data needles.txt --context 384 --windows 20
    python docs/programs/needles.py --model path/to/SmolLM2 --text wikitext2-test.txt --measure

Every window is a piece of the text's first half with facts strewn among its sentences, "The secret number of Oslo is
482.", as many in each fifth of its length, and ends with the same ones in another order, their numbers marked as
answers. The first command writes such windows, for the column `answers`, and after them as much of the text's second
half, to calibrate on. The third one measures answers by length and depth, for docs/needles.json, and how much of a
table is copied, for docs/copied.json.
"""
import itertools
import json
import random
import tempfile
from pathlib import Path

import crossing
import torch
from crossing import ASKED
from results import ANTKV, FIVE, MARKED, ROOT, SERVED, calibrate_pair, named, read_data, write_data

from tinykv import UserError, hf
from tinykv.cache import KVCache
from tinykv.lab import files
from tinykv.lab.cli import Parser, one_line
from tinykv.lab.data import load_windows
from tinykv.lab.data.windows import halves, spread

RECORD = ROOT / "docs" / "needles.json"
CITIES = ("Amsterdam Berlin Cairo Dublin Florence Geneva Helsinki Istanbul Jakarta Kyoto Lisbon Madrid Nairobi Oslo "
          "Prague Quito Rome Seoul Tokyo Vienna").split()
FACT = " The secret number of {} is {}."
MARKED_FACT = FACT.format("{}", "<answer>{}</answer>")
TABLE, ITS_COPY = "This table has two numbers for each city:\n", "\nThe same table again:\n"
COPIED = ROOT / "docs" / "copied.json"
DEPTHS = 5
FACTS = 20
SHORT = 384, 20, 5  # of --out: tokens of a window, windows, facts of each
CONTEXTS, TEXTS = (1024, 2048, 4096), 15  # tokens of a text, and texts of each length: about 60 answers of each depth
ROWS = {"fp16": "fp16", "q4_0, rotated": SERVED["q4_0, rotated"], "kivi, 4 bits": SERVED["KIVI, 4 bits"],
        "antkv, 2 bits": ANTKV, "kvsink, 3 bits: 5 kept": FIVE, "kvsink, 3 bits: marked": MARKED}  # {label: row}
# a table that is copied: {label: row}
TABLES = 10
COPIES = {"fp16": "fp16", "kivi, 4 bits": SERVED["KIVI, 4 bits"], "q4_0, rotated": SERVED["q4_0, rotated"],
          "KIVI's grid, 3 bits": crossing.cell(3, "KIVI's"),
          "KIVI's grid, 3 bits, rotated": crossing.cell(3, "KIVI's", rotated=True),
          "kivi, 2 bits": SERVED["KIVI, 2 bits"]}
# what is measured: (tokens of a text, rows, texts)
MEASURED = [*((context, ROWS.values(), TEXTS) for context in CONTEXTS),
            *((context, [named(row, "SmolLM2") for row in rows], 5) for context, rows in ASKED.items())]


def window(sentences, draw, n_tokens, context, facts):
    """One window's text: sentences in their order, facts among them, questions at the end, up to `context` - 1 tokens.

    sentences: yields more of the text. n_tokens: of a text.
    """
    pairs = [(city, draw.randrange(100, 1000)) for city in draw.sample(CITIES, facts)]
    questions = "".join(FACT.format(*pair) for pair in pairs)
    if (n := n_tokens(questions * 2)) > context - 64:
        raise UserError(f"{facts} facts and their questions take {n} of {context} tokens")
    hay = []
    while n_tokens("".join(hay) + questions * 2) < context - 1:
        hay.append(next(sentences))
    # cut the last sentences to the length, word by word
    words = "".join(hay).split(" ")
    while n_tokens(" ".join(words) + questions * 2) > context - 1:
        words.pop()
    n = context - 1 - n_tokens(" ".join(words) + questions * 2)
    text = " ".join(words) + " so" * n
    ends = [i + 1 for i in range(len(text) - 1) if text[i:i + 2] == ". "]
    by_depth = [[end for end in ends if end * DEPTHS // len(text) == depth] for depth in range(DEPTHS)]
    places = [draw.choice(by_depth[i % DEPTHS] or ends) for i in range(facts)]
    for place, pair in sorted(zip(places, draw.sample(pairs, facts)), reverse=True):
        text = text[:place] + FACT.format(*pair) + text[place:]
    # some tokenizers cut words in another way now: then the first words go
    while n_tokens(text + questions) > context - 1:
        text = text.split(" ", 1)[1]
    return text + "".join(MARKED_FACT.format(*pair) for pair in pairs)


def write(path, text, tokenizer, context, windows, facts):
    """Write so many windows of a text."""
    lines = [line.strip() for line in text.splitlines() if len(line) > 200]
    sentences = (sentence + ". " for line in lines for sentence in line.split(" . "))
    draw = random.Random(0)
    try:
        found = [window(sentences, draw, lambda t: len(tokenizer.encode(t)), context, facts) for _ in range(windows)]
    except StopIteration:
        raise UserError(f"the text has sentences for fewer than {windows} windows; give a longer one") from None
    files.write(path, lambda part: part.write_text("\n".join(found), encoding="utf-8"))


def first_windows(text, tokenizer, context, n, facts):
    """The n windows that `write` begins with, [(tokens (T), places of the answers)], in the order of the file: of more
    windows the first ones are the same."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder, "needles.txt"), text, tokenizer, context, n, facts)
        windows = load_windows(Path(folder, "needles.txt"), tokenizer, context, n, whole=True)
    return [(windows.tokens[i], windows.answers[i]) for i in sorted(range(n), key=spread(n).__getitem__)]


@torch.inference_mode()
def answer(model, method, tokens, places):
    """[depth, whether the answer is right, its loss in nats] of each question in a window, tokens (T)."""
    found = []
    cache, ids = KVCache(model, method, "paper"), tokens.tolist()
    hidden = model(tokens[None], cache, logits=False)[0]  # (T, D)
    for begin, end in places:
        key = ids[begin - 3:end]  # the city's last letters, "is", the number
        fact = next(t for t in range(len(ids)) if ids[t:t + len(key)] == key)
        logp = model.lm_head(hidden[begin - 1:end - 1]).log_softmax(-1)  # (n, vocab)
        answer = tokens[begin:end]  # (n)
        loss = -logp.gather(1, answer[:, None]).sum().item()
        found.append([fact * DEPTHS // places[0][0], int((logp.argmax(-1) == answer).all()), round(loss, 3)])
    return found


def table(tokenizer, draw):
    """A table of 20 lines, and its copy: tokens (T), and where the copy's second line begins."""
    lines = [f"{city} {draw.randrange(100, 1000)} {draw.randrange(100, 1000)}\n" for city in draw.sample(CITIES, 20)]
    given = tokenizer.encode(TABLE + "".join(lines) + ITS_COPY + lines[0])
    asked = tokenizer.encode("".join(lines[1:]))
    return torch.tensor([tokenizer.bos_id, *given, *asked]), 1 + len(given)


@torch.inference_mode()
def copied(model, method, tokens, begin):
    """How many of the tokens (T) from `begin` on come before the first that is not the most likely one: so many would
    be generated right."""
    hidden = model(tokens[None], KVCache(model, method, "paper"), logits=False)[0]  # (T, D)
    right = model.lm_head(hidden[begin - 1:-1]).argmax(-1) == tokens[begin:]  # (n)
    return int(right.long().cumprod(0).sum())


def measure_copies(loaded, path):
    """Measure the rows that docs/copied.json has not: what each copies of each table."""
    record, (model, tokenizer) = read_data(COPIED), loaded
    rows = [row for row in COPIES.values() if row not in record]
    methods, draw = calibrate_pair(loaded, path, rows, 0), random.Random(0)
    tables = [table(tokenizer, draw) for _ in range(TABLES)]
    model.use_attention("fused")
    for row in rows:
        record[row] = [copied(model, methods[row], *of_table) for of_table in tables]
        print(f"{row}: {record[row]}", flush=True)
    lines = ",\n".join(f"{json.dumps(row)}: {found}" for row, found in record.items())
    files.write(COPIED, lambda part: part.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8"))


def measure(loaded, path):
    """Measure the answers that docs/needles.json has not, text by text, with the tables of the first draw."""
    (text, _), record, (model, tokenizer) = halves(path), read_data(RECORD), loaded
    model.use_attention("fused")
    methods = calibrate_pair(loaded, path, [row for _, rows, _ in MEASURED for row in rows], 0)
    for context, rows, n in MEASURED:
        windows = first_windows(text, tokenizer, context, n, FACTS)
        for i, row in itertools.product(range(n), rows):
            found = record.setdefault(str(context), {}).setdefault(row, [])
            if len(found) == i * FACTS:
                found += answer(model, methods[row], *windows[i])
                write_data(record, RECORD)
                print(f"{context} {row}: {sum(right for _, right, _ in found)} of {len(found)}", flush=True)


def main():
    p = Parser(prog="python docs/programs/needles.py", description=__doc__)
    p.add_argument("--model", metavar="DIR", help="whose tokens are counted")
    p.add_argument("--text", metavar="FILE", help="its first half is what the facts are strewn in")
    p.add_argument("--out", metavar="FILE", type=Path, help="the windows, and what calibrates")
    p.add_argument("--measure", action="store_true", help="measure the rows that the records have not")
    with one_line(p):
        args = p.parse_args()
        if (args.out or args.measure) and not (args.model and args.text):
            raise UserError("--out and --measure need --model and --text")
        if args.out:
            text, other = halves(args.text)
            write(args.out, text, hf.load_tokenizer(args.model, hf.load_config(args.model)), *SHORT)
            windows = args.out.read_text(encoding="utf-8")
            files.write(args.out, lambda part: part.write_text(windows + other[:len(windows)], encoding="utf-8"))
        if args.measure:
            loaded = hf.load(args.model)
            measure(loaded, args.text)
            measure_copies(loaded, args.text)


if __name__ == "__main__":
    main()
