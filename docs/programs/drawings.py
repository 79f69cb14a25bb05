"""Draw what each method keeps, and which numbers share a grid: docs/figures/methods/*.svg, for docs/methods.md.

    python docs/programs/drawings.py

A drawing is a cache of twelve tokens with four channels of keys above four of values; tokens 0 and 5 are sinks. A box
is what shares a grid, or a code. K: kept; x: recent.
"""
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository
from tinykv.lab.files import write
from tinykv.lab.plots import COLOUR_OF

FIGURES = Path(__file__).parents[1] / "figures" / "methods"
TOKENS, CHANNELS = 12, (0, 1, 2, 3)
SIZE, LEFT, TOPS = 20, 58, (22, 112)  # in pixels: of a number, and where keys and values begin
FIRST, SINKS = (0, 1), (0, 5)


# Which numbers share a grid: coded tokens -> [(tokens, channels)]

def by_channel(tokens):
    return [(tokens, [c]) for c in CHANNELS]


def by_head(tokens):
    return [(tokens, CHANNELS)]


def by_token(tokens):
    return [([t], CHANNELS) for t in tokens]


def by_block(tokens):
    return [(tokens[i:i + 4], [c]) for i in range(0, len(tokens), 4) for c in CHANNELS]


def by_pair(tokens):
    return [([t], [c, c + 1]) for t in tokens for c in (0, 2)]


def by_likeness(tokens):
    return [([t], c) for t in tokens for c in ([0, 2], [1, 3])]


class Half(NamedTuple):
    """Keys or values of a drawing."""
    grids: object  # one of the functions above
    note: str
    kept: tuple = ()  # tokens
    exact: tuple = ()  # single numbers that are kept: (token, channel)


STATIC_K, STATIC_V = "a grid for each channel, from other text", "one grid, from other text"
KIVI_K, KIVI_V = "a grid for each channel and block", "a grid for each token"
DRAWN = {  # {method: (keys, values, recent tokens)}
    "rtn": (Half(by_channel, STATIC_K), Half(by_head, STATIC_V), 0),
    "pfn": (Half(by_channel, STATIC_K, FIRST), Half(by_head, STATIC_V, FIRST), 0),
    "kvsink": (Half(by_channel, STATIC_K, SINKS), Half(by_head, STATIC_V, SINKS), 0),
    "kivi": (Half(by_block, KIVI_K), Half(by_token, KIVI_V), 4),
    "ott": (Half(by_block, KIVI_K, SINKS), Half(by_token, KIVI_V, SINKS), 4),
    "oscar": (Half(by_block, "rotated, divided by its norm"), Half(by_token, "rotated"), 4),
    "skvq": (Half(by_likeness, "a grid for channels of like range", FIRST), Half(by_likeness, "the same", FIRST), 4),
    "intactkv": (Half(by_token, "a prefix of the exact model", FIRST), Half(by_token, KIVI_V, FIRST), 0),
    "kvquant": (Half(by_channel, "uneven levels; outliers apart", (0,), ((3, 1), (8, 2))),
                Half(by_token, "the same, for each token", (0,), ((4, 0), (9, 3))), 0),
    "cq": (Half(by_pair, "one code for several channels"), Half(by_pair, "the same"), 0),
    "antkv": (Half(by_pair, "codes as cq; anchors kept", SINKS), Half(by_pair, "values have their own", (0, 7)), 4)}


def box(tokens, channels, top, fill, edge="#ffffff"):
    """A rectangle around neighbouring numbers."""
    x, y = LEFT + SIZE * tokens[0], top + SIZE * channels[0]
    width, height = SIZE * (tokens[-1] + 1 - tokens[0]), SIZE * (channels[-1] + 1 - channels[0])
    return (f'<rect x="{x + 1}" y="{y + 1}" width="{width - 2}" height="{height - 2}" rx="4" fill="{fill}" '
            f'stroke="{edge}"/>')


def text(x, y, words, size=12, colour="#222222"):
    return f'<text x="{x}" y="{y}" font-size="{size}" font-family="sans-serif" fill="{colour}">{words}</text>'


def letter(token, top, word, colour):
    """In the middle of a token's numbers."""
    return text(LEFT + SIZE * token + 6, top + 44, word, colour=colour)


def drawing(name):
    """The SVG of a method."""
    keys, values, recent = DRAWN[name]
    colour, coded = COLOUR_OF[name], list(range(TOKENS - recent))
    parts = [text(LEFT + SIZE * t + 3, TOPS[0] - 5, t, 10) for t in range(TOKENS)]
    for what, half, top in zip(("keys", "values"), (keys, values), TOPS):
        parts += [text(4, top + 44, what), text(LEFT + SIZE * TOKENS + 8, top + 44, half.note)]
        for i, (tokens, channels) in enumerate(half.grids(coded)):
            faint = f"{colour}{'40' if i % 2 else '88'}"  # neighbours differ
            if channels[-1] - channels[0] >= len(channels):  # no neighbours: a box a number, in one shade
                parts += [box(tokens, [c], top, faint) for c in channels]
            else:
                parts.append(box(tokens, channels, top, faint))
        parts += [box([t], CHANNELS, top, "#ffffff", "#777777") for t in range(TOKENS - recent, TOKENS)]
        parts += [letter(t, top, "x", "#777777") for t in range(TOKENS - recent, TOKENS)]
        parts += [box([t], CHANNELS, top, "#222222") + letter(t, top, "K", "#ffffff") for t in half.kept]
        parts += [box([t], [c], top, "#222222") for t, c in half.exact]
    words = f"{name}: {keys.note}; values: {values.note}"
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="560" height="200" role="img"><title>{words}</title>'
            f'<rect width="560" height="200" fill="#ffffff"/>\n' + "\n".join(parts) + "\n</svg>\n")


def main():
    for name in DRAWN:
        svg = drawing(name)
        write(FIGURES / f"{name}.svg", lambda part, svg=svg: part.write_text(svg, encoding="utf-8"))


if __name__ == "__main__":
    main()
