"""The page's central moment as a GIF: a sink's value in 16 bits, rounded, and with five tokens kept, the first ones if
these bring the answer back, else those that are found; beside it what the model then says.

    python docs/programs/gif.py docs/cache.html docs/figures/sink.gif
"""
import base64
import gzip
import io
import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository
from tinykv import files
from tinykv.cli import Parser, one_line
from tinykv.plots import KIND, new_figure

MOVE = 8  # frames from one stop to the next
STEP, HOLD = 60, 1800  # milliseconds: of a frame that moves, and at a stop
GREY, BLUE, RED, ORANGE = "#767676", "#2f77b4", "#98001f", "#d9480f"


def write(path, page):
    """Write the GIF of a page's content, whole or not at all."""
    from PIL import Image  # matplotlib brings it; nothing else needs either
    asked = "".join(page["tokens"][:(page["at"] or 0) + 1]).splitlines()[-2:]
    figure, panels = new_figure(1, 2, 7.6, 3.6, "\n".join(line[-80:] for line in asked) + " …")
    stops, frames, times = stops_of(page), [], []
    for stop in range(len(stops)):
        for i in range(1, MOVE + 1):
            draw(panels, page, stops, stop, i / MOVE)
            drawn = io.BytesIO()
            figure.savefig(drawn, format="png", dpi=100)
            frames.append(Image.open(drawn).convert("P", palette=Image.Palette.ADAPTIVE, colors=64))
            times.append(HOLD if i == MOVE else STEP)
    # begin where the first stop holds: what does not play a GIF shows its first frame
    frames, times = frames[MOVE - 1:] + frames[:MOVE - 1], times[MOVE - 1:] + times[:MOVE - 1]
    first, *others = frames
    files.write(path, lambda part: first.save(part, format="GIF", save_all=True, append_images=others, duration=times,
                                              loop=0, comment=KIND.encode()), KIND)


def stops_of(page):
    """What the GIF shows one after the other: (title, the value's numbers, run, colour)."""
    bits, token = page["bits"], (page["sinks"] or [0])[-1]
    is_back = said(page["runs"][f"pfn {bits}"]) == said(page["runs"]["fp16 16"])
    kept = ("first five kept", f"pfn {bits}") if is_back else ("five kept", f"kvsink {bits}")
    states = page["runs"][kept[1]]["history"][-1][1]  # a letter for each token that has been read
    marked = sum(states[i] == "k" for i in page["sinks"])
    stops = [("in 16 bits", "fp16 16", GREY), (f"{bits} bits: {2 ** bits} levels", f"rtn {bits}", BLUE),
             (f"{bits} bits, {kept[0]} ({marked} {'is a sink' if marked == 1 else 'are sinks'})", kept[1], RED)]
    return [(title, row_of(page, run, token), page["runs"][run], colour) for title, run, colour in stops]


def said(run):
    """The first words that the model writes."""
    return re.split(r'[.\n"]', run.get("writes", "").strip())[0]


def row_of(page, run, token):
    """The value of a token as a run reads it."""
    lo, hi, steps = page["bounds"]["v"]
    letters = page["runs"][run]["v"][token::len(page["tokens"])]
    return [lo + (hi - lo) / steps * (ord(letter) - 0x100) for letter in letters]


def draw(panels, page, stops, stop, t):
    """One frame: t of the way from the stop before to this one. Only a stop was measured, and has figures."""
    t, at_stop = t * t * (3 - 2 * t), t == 1
    left, right = panels
    name, now, run, colour = stops[stop]
    _, before, old, _ = stops[stop - 1]

    # the value's numbers, and the levels
    left.clear()
    levels = page["levels"]["rtn"][str(page["bits"])]
    for level in levels:
        left.axvline(level, color=ORANGE, lw=1.5)
    left.axvline(0, color=GREY, lw=1, ls="--")
    left.scatter([a + (b - a) * t for a, b in zip(before, now)], range(len(now)), s=16, color=colour, zorder=3)
    far = 1.1 * max(map(abs, levels))
    left.set(yticks=[], xlim=(-far, far), xlabel="a sink's value, and the levels (orange)")
    left.set_title(name, loc="left", fontsize=12, fontweight="bold")

    # the next word
    right.clear()
    right.spines[["top", "right"]].set_visible(False)
    if "answer" not in run:
        return
    chances = [a + (b - a) * t for a, b in zip(old["answer"], run["answer"])]
    right.barh(range(len(chances)), chances, color=[BLUE] + ["#bbb"] * (len(chances) - 1))
    right.set(xlim=(0, 1), yticks=range(len(chances)), xticks=[0, 0.5, 1], xlabel="how likely the next word is")
    right.set_yticklabels([word.strip() or "blank" for word in page["answer"]])
    right.text(chances[0] + 0.02, 0, f"{chances[0]:.0%}" if at_stop else "", va="center")
    right.invert_yaxis()
    right.set_title(f"“{said(run if t >= 0.5 else old)}”", loc="left", fontsize=11, fontweight="bold")


def main():
    p = Parser(description=__doc__)
    p.add_argument("page", type=Path, metavar="PAGE.html", help="as `python -m tinykv.analysis.page` writes it")
    p.add_argument("gif", type=Path, metavar="OUT.gif")
    with one_line(p):
        args = p.parse_args()
        packed = re.search(r"H4sI[\w+/=]+", files.read_text(args.page))[0]  # gzip's first bytes, in base64
        write(args.gif, json.loads(gzip.decompress(base64.b64decode(packed))))


if __name__ == "__main__":
    main()
