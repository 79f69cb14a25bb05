"""Check every figure of README, of pages and of programs' docstrings against its source, and write those of data.

    python docs/programs/pages.py                  write the tables and figures that have changed, then check
    python docs/programs/pages.py --check          only check
    python docs/programs/pages.py --seal SOURCE    what is new, and nothing computes, was compared with SOURCE: a
                                                   command, "KVSink, Table 2", "definition"; page names may follow

A page is plain Markdown. To add a figure that data have, write the sentence, and a few of its words to sentences.py,
with the figure as an expression: f"lowers the loss by {less(pfn, rtn)} relative". It is written anew when data change.
The rest of a paragraph that makes a claim (CLAIM: a number, "more", "first", ...), an item, a table or an output is
sealed as a whole: docs/sealed.txt has its digest and its source, so each change asks for a look at the source. Whoever
changes a wording says `--seal wording`. Of a program in docs/, docstrings are sealed, and all comments together; of the
package, the heads of files, and what has a measured figure (MEASURED): the rest stands beside code that tests run.

A table of docs/results.json stands between `<!-- written: NAME -->` and `<!-- end -->`. To add a claim, write the first
two cells of its line; to add a row, the first. tables.py fills the others. Examples (>>>) are tests; their comments are
sealed.
"""
import argparse
import re
import sys
from functools import cache
from hashlib import sha256

import crossed
import sentences
import tables
from results import ROOT, WRITTEN, claims_of
from sentences import NUMBER

PAGES = [page for pattern in ("README.md", "docs/*.md", "docs/course/**/*.md", "docs/ladder/*.py", "docs/examples/*.py",
                              "tests/README.md", "*.py", "tinykv/**/*.py") for page in sorted(ROOT.glob(pattern))]
SEALED = ROOT / "docs" / "sealed.txt"  # lines of: page | source | digests
COMPUTED = "\0"  # in the place of what is
# an output, a table, or a paragraph, an item, a heading
BLOCK = re.compile(r"^```.*?^```$|(?:^\|[^\n]*\n)+|^ *\S.*?(?=\n(?:\n|- |\d\. |[#|<]|```)|\Z)",
                   re.M | re.S)
CLAIM = re.compile(r"(?<!\w)[+-]?\d|\0|\b(?:two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|half|twice|"
                   r"third|quarter|hundredth|first|last|only|all|none|never|always|before|after|less|more|fewer|most|least|"
                   r"worse|better|\w+er than|larg\w+|small\w*|high\w*|low\w*|fast\w*|slow\w*|exact\w*|same)\b", re.I)
MEASURED = re.compile(r"\d[\d.,]*\s?(?:%|times|seconds?|minutes?|hours?|ms\b|[KMG]i?B\b|nats)|\d\.\d")


def name_of(page):
    return page.relative_to(ROOT).as_posix().removeprefix("docs/")


def said_by(page):
    """A page's text; of a program, its docstrings, then its comments, without their margins."""
    text = page.read_text(encoding="utf-8")
    if page.suffix != ".py":
        return text
    docstrings = [re.sub("^ +", "", found, flags=re.M) for found in re.findall(r'"{3}.*?"{3}', text, re.S)]
    comments = re.findall(r"(?<=\s)# *(.*)", text)
    if "docs" in page.parts[len(ROOT.parts):]:
        return "\n\n".join([*docstrings, "\n".join(comments)])
    others = [part for found in docstrings[1:] for part in found.split("\n\n")]
    return "\n\n".join([*docstrings[:1], *(part for part in [*others, *comments] if MEASURED.search(part))])


@cache
def table(name):
    return (tables.WRITTEN | crossed.WRITTEN)[name]()


def written(page):
    """A page's text with the tables of the data, and the figures of its sentences."""
    text = WRITTEN.sub(lambda block: f"<!-- written: {block[1]} -->\n{table(block[1])}\n<!-- end -->",
                       page.read_text(encoding="utf-8"))
    for sentence in sentences.of_page(name_of(page)):
        text = with_figures(text, sentence)
    return text


def pattern(sentence, number=None):
    """That finds a sentence across the lines of a page; number: a pattern in the place of each of its numbers."""
    words = [r"\s+".join(map(re.escape, re.split(r"\s+", part))) for part in NUMBER.split(sentence)]
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


def without_computed(page):
    """The blocks of a page that make a claim beside what is computed; and the sentences that it does not say."""
    text = WRITTEN.sub(lambda block: "".join(f"| {' | '.join(claim)} |\n" for claim in claims_of(block[2])),
                         said_by(page))  # only what an author wrote of the tables of data
    said = sentences.of_page(name_of(page))
    missing = [sentence for sentence in said if not pattern(sentence).search(text)]
    for sentence in sorted(said, key=len, reverse=True):  # one may be a part of another
        text = pattern(sentence).sub(COMPUTED, text)
    blocks = [block[0] for block in BLOCK.finditer(text)]
    blocks = ["\n".join(re.findall("#.*", block)) if ">>>" in block else block for block in blocks]
    return [block for block in blocks if CLAIM.search(block) and re.search(r"\w", block)], missing


def digest(block):
    return sha256(" ".join(block.split()).encode()).hexdigest()[:6]


def read_sealed():
    """{page: {digest: source}}"""
    sealed = {}
    for line in SEALED.read_text(encoding="utf-8").splitlines():
        page, source, digests = line.split(" | ")
        sealed.setdefault(page, {}).update(dict.fromkeys(digests.split(), source))
    return sealed


def seal(pages, source):
    """Keep the digests of all blocks, and of those that are new the source."""
    sealed, lines = read_sealed(), []
    for page in PAGES:
        of_page = {}  # {source: digests}
        for block in without_computed(page)[0]:
            printed = re.match(r"```console\n(\$ .*|\(Pdb\))", block)  # it says its source itself
            new = (printed[1] if printed else source) if name_of(page) in pages else None
            if known := sealed.get(name_of(page), {}).get(digest(block), new):
                of_page.setdefault(known, []).append(digest(block))
        lines += [f"{name_of(page)} | {source} | {' '.join(dict.fromkeys(found))}" for source, found in of_page.items()]
    SEALED.write_text("\n".join(lines) + "\n", encoding="utf-8")


def wrong_in(page, sealed):
    """What is wrong in a page, a line each."""
    wrong = [] if written(page) == page.read_text(encoding="utf-8") else ["it has other figures than the data"]
    blocks, missing = without_computed(page)
    wrong += [f"sentences.py has, but the page does not say: {sentence}" for sentence in missing]
    wrong += [f"the data do not bear out: {sentence}" for sentence in sentences.of_page(name_of(page))
              if sentences.NOT_SO in sentence]
    wrong += [f"new, and without a source: {' '.join(block.replace(COMPUTED, '...').split())[:100]}"
              for block in blocks if digest(block) not in sealed.get(name_of(page), {})]
    gone = set(sealed.get(name_of(page), {})) - set(map(digest, blocks))
    wrong += [f"sealed, and no longer said: {found}" for found in sorted(gone)]
    return [f"{name_of(page)}: {line}" for line in wrong]


def main():
    p = argparse.ArgumentParser(description="Check, and write, the figures of README and docs/*.md.")
    p.add_argument("pages", nargs="*", default=list(map(name_of, PAGES)), help="what to seal (default: all pages)")
    p.add_argument("--check", action="store_true", help="write nothing")
    p.add_argument("--seal", metavar="SOURCE", help="with what the new paragraphs, tables and outputs were compared")
    args = p.parse_args()
    if not args.check:
        for page in PAGES:
            page.write_text(written(page), encoding="utf-8")
        seal(args.pages if args.seal else [], args.seal)
    wrong = [line for page in PAGES for line in wrong_in(page, read_sealed())]
    if wrong:
        sys.exit("\n".join(wrong))
    print(f"every figure of {len(PAGES)} pages has its source")


if __name__ == "__main__":
    main()
