"""Check every figure of README and docs/*.md against what was recorded, and write those that have changed.

    python docs/programs/pages.py            write the figures that the data have; runs nothing
    python docs/programs/pages.py --check    only say what is wrong
    python docs/programs/pages.py --seal     tables that no program here writes are right as they stand

To add a figure: write the sentence into the page, and the same words into sentences.py, with the figure computed. If
only figures differ, those of the page are written anew. A number that no sentence has, or a word such as "less" beside
one that has none, is an error, unless it stands in an example of its section, which a test runs, or is of a kind that
needs no data (FREE).

A table of docs/results.json stands between `<!-- written: NAME -->` and `<!-- end -->`. Other tables, and what commands
have printed, have a digest in docs/sealed.json: whoever has compared a new one with its source seals it.
"""
import argparse
import json
import re
import sys
from functools import partial
from hashlib import sha256

import results
import sentences
from results import CLAIMS, CODECS, NAMES, ROOT, SHOWN, claims_table, count, rows_table
from sentences import NUMBER

PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
SEALED = ROOT / "docs" / "sealed.json"  # {page: {digest: first line}}
GONE = "\0"  # in the place of a sentence

WRITTEN = re.compile(r"<!-- written: (.+?) -->\n.*?<!-- end -->", re.DOTALL)
CODE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TABLE = re.compile(r"^\|.*\n(?:\|.*\n)+", re.MULTILINE)
# equations, powers, sets, names in backticks, targets of links, headings, numbers of a list
SILENT = re.compile(r"\$\$.*?\$\$|\w?\^\w|\\\{.*?\\\}|(?<!`)`[^`]+`(?!`)|\]\([^)]*\)|^#.*?$|^\d\. ",
                    re.DOTALL | re.MULTILINE)
# numbers that need no data: of parts of a paper, and widths in bits
FREE = re.compile(r"(?:Figures?|Tables?|Eq\.|Sections?|Algorithm|Theorem|Appendix|lines) [\d.]+[a-e]?"
                  r"(?:(?:, | and | to |-)\d[\d.]*[a-e]?)*|\d+(?:, \d+)*(?: and \d+| or \d+)?[ -]bits?\b")
# a word that says which way, at most two words from a sentence with a figure
SIDE = r"\b(?:less|more|fewer|worse|better|larger|smaller|higher|lower|faster|slower|ahead|behind|falls?|rises?)\b"
NEAR = r"(?:[^\w.:]+\w+){0,2}[^\w.:]*"
SIDES = rf"{SIDE}(?={NEAR}{GONE})|{GONE}{NEAR}{SIDE}"


def written(page, data):
    """A page's text with the tables of the data, and the figures of its sentences."""
    parts = {section: partial(claims_table, section, data) for section in CLAIMS}
    parts |= {model: partial(rows_table, model, data, SHOWN) for model in NAMES}
    parts |= {"count": partial(count, data), "codecs": partial(rows_table, "SmolLM2", data, CODECS),
              "lengths": partial(results.lengths_table, data), "served": partial(results.served_table, data)}

    def table(block):
        return f"<!-- written: {block[1]} -->\n{parts[block[1]]()}\n<!-- end -->"
    text = WRITTEN.sub(table, page.read_text())
    for sentence in sentences.of_page(page.name):
        text = with_figures(text, sentence)
    return text


def pattern(sentence, number=None):
    """That finds a sentence across the lines of a page; number: a pattern in the place of each of its numbers."""
    words = [re.escape(part).replace(r"\ ", r"\s+") for part in NUMBER.split(sentence)]
    numbers = [number or re.escape(found) for found in NUMBER.findall(sentence)]
    return re.compile("".join(a + b for a, b in zip(words, [*numbers, ""])))


def with_figures(text, sentence):
    """A page's text; a sentence that differs from this one in nothing but figures gets its figures."""
    found = list(pattern(sentence, NUMBER.pattern).finditer(text))
    if pattern(sentence).search(text) or len(found) != 1:
        return text
    figures = iter(NUMBER.findall(sentence))
    start, end = found[0].span()
    return text[:start] + NUMBER.sub(lambda _: next(figures), found[0][0]) + text[end:]


def without_sentences(page):
    """A page's text without what is written, GONE for each of its sentences; and the sentences that it does not say."""
    text, said = WRITTEN.sub("", page.read_text()), sentences.of_page(page.name)
    missing = [sentence for sentence in said if not pattern(sentence).search(text)]
    for sentence in sorted(said, key=len, reverse=True):  # one may be a part of another
        text = pattern(sentence).sub(GONE, text)
    return text, missing


def without_examples(text):
    """A page without its code, and without those numbers of a section that its examples have: tests run these."""
    sections = []
    for section in re.split(r"^(?=## )", text, flags=re.MULTILINE):
        tested = [code for _, code in CODE.findall(section) if ">>>" in code or "(Pdb)" in code]
        has = {float(number) for number in re.findall(r"-?\d+(?:\.\d+)?", " ".join(tested))}
        sections.append(re.sub(r"(?<![\w.,])-?\d+(?:\.\d+)?(?![\w,]*\d)",
                               lambda number, has=has: " " if float(number[0]) in has else number[0],
                               CODE.sub(" ", section)))
    return "".join(sections)


def digests(text):
    """{digest: first line} of the tables and outputs that no program here writes."""
    blocks = [code for kind, code in CODE.findall(text) if kind in ("", "console", "text")]
    blocks += TABLE.findall(CODE.sub("", text))
    counted = [block for block in blocks if re.search(r"\d", block)]
    return {sha256(block.encode()).hexdigest()[:8]: block.splitlines()[0] for block in counted}


def wrong_in(page, data, sealed):
    """What is wrong in a page, a line each."""
    # 1. what the data say of it
    wrong = [] if written(page, data) == page.read_text() else ["it has other figures than the data"]
    text, missing = without_sentences(page)
    wrong += [f"it does not say: {sentence}" for sentence in missing]

    # 2. what no program here writes
    old, new = sealed.get(page.name, {}), digests(text)
    changed = {(old | new)[digest] for digest in old.keys() ^ new.keys()}
    wrong += [f"a table or an output has changed: {line}" for line in changed]

    # 3. what is left
    text = SILENT.sub(" ", TABLE.sub(" ", without_examples(text)))
    text = FREE.sub(" ", " ".join(text.split()))
    for found in re.finditer(rf"(?<![\w.,/-]){NUMBER.pattern}(?![\w/])|{SIDES}", text):
        near = text[max(0, found.start() - 40):found.end() + 40].replace(GONE, "...")
        what = found[0].replace(GONE, "").strip()
        wrong.append(f"sentences.py has no {what}: ...{near}...")
    return [f"{page.name}: {line}" for line in wrong]


def main():
    p = argparse.ArgumentParser(description="Check, and write, the figures of README and docs/*.md.")
    p.add_argument("--check", action="store_true", help="write nothing")
    p.add_argument("--seal", action="store_true", help="the tables that no program here writes are right as they stand")
    args = p.parse_args()
    data = results.read_data()
    for page in [] if args.check else PAGES:
        page.write_text(written(page, data))
    if args.seal:
        now = {page.name: digests(without_sentences(page)[0]) for page in PAGES}
        SEALED.write_text(json.dumps(now, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    sealed = json.loads(SEALED.read_text(encoding="utf-8"))
    wrong = [line for page in PAGES for line in wrong_in(page, data, sealed)]
    if wrong:
        sys.exit("\n".join(wrong))
    print(f"every figure is of the data: {', '.join(page.name for page in PAGES)}")


if __name__ == "__main__":
    main()
