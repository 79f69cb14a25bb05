"""Write the tables and figures of README and of pages that docs/*.json have, and check that no page has others.

    python docs/programs/pages.py            write them
    python docs/programs/pages.py --check    only check

A page is plain Markdown. To add a figure that data have, write the sentence, and add a few of its words to
sentences.py, with the figure as an expression: f"lowers the loss by {less(pfn, rtn)} relative". This program updates
it when data change.
What README, results.md, crossing.md and serving.md print in bold is a conclusion: conclusions.py has its predicates.
A table of docs/results.json is between `<!-- written: NAME -->` and `<!-- end -->`. To add a claim, write the first
two cells of its line; to add a row, the first. tables.py fills the others. Examples (>>>) and outputs of commands are
tests; any other figure is compared with its source by whoever writes it, and the commit says with what.
"""
import re
import sys
from functools import cache

import conclusions
import crossed
import embedded_sinks
import sentences
import tables
from results import ROOT, WRITTEN
from sentences import NUMBER

PAGES = [page for pattern in ("README.md", "docs/*.md", "docs/ladder/*.py") for page in sorted(ROOT.glob(pattern))]


def name_of(page):
    return page.relative_to(ROOT).as_posix().removeprefix("docs/")


@cache
def table(name):
    return (tables.WRITTEN | crossed.WRITTEN | embedded_sinks.WRITTEN)[name]()


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


def wrong_in(page):
    """What is wrong in a page, a line each."""
    text, said = page.read_text(encoding="utf-8"), sentences.of_page(name_of(page))
    wrong = [] if written(page) == text else ["it has other figures than the data"]
    wrong += ["a written table has no end"] * (text.count("<!-- written:") - len(WRITTEN.findall(text)))
    wrong += [f"sentences.py has, but the page does not say: {line}" for line in said if not pattern(line).search(text)]
    wrong += [f"the data do not bear out: {line}" for line in said if sentences.NOT_SO in line]
    wrong += conclusions.wrong_in(name_of(page), WRITTEN.sub("", text))
    return [f"{name_of(page)}: {line}" for line in wrong]


if __name__ == "__main__":
    if "--check" not in sys.argv:
        for page in PAGES:
            page.write_text(written(page), encoding="utf-8")
    if wrong := [line for page in PAGES for line in wrong_in(page)]:
        sys.exit("\n".join(wrong))
