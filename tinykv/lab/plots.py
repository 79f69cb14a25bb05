"""What the figures share.

Figures are made without pyplot, so the backend of a notebook stays as it is; it shows a Figure that is the last line of
a cell. Lines differ in marker as well as in colour, and all eyes can tell the colours apart.
"""
import io
from functools import partial
from hashlib import sha256
from pathlib import Path

import torch

from tinykv import UserError
from tinykv.lab import files

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#000000",
           "#56b4e9", "#e69f00", "#7f7f7f", "#8c564b", "#17806d")
GREY = "#8a8a8a"
COLOUR_OF = {  # of a method or a format, in all figures
    "rtn": "#000000", "pfn": "#e69f00", "kvsink": "#d55e00", "kivi": "#0072b2", "ott": "#56b4e9", "oscar": "#009e73",
    "skvq": "#66a61e", "intactkv": "#17806d", "kvquant": "#e7298a", "cq": "#7a7a00", "antkv": "#6a3d9a",
    "TurboQuant": "#8c564b", "nvfp4": GREY, "mxfp4": GREY, "q4_0": GREY}
MARKERS = "osD^vP*Xdh"
KIND = "tinykv-figure"  # what the file says that it is
# {suffix: how it says so, and no date}
FORMATS = {".png": {"Software": KIND}, ".pdf": {"Creator": KIND, "CreationDate": None},
           ".svg": {"Creator": KIND, "Date": None}}
BETWEEN = 0.055  # of the height of a panel: between two labels of lines


def new_figure(rows, columns, width, height, title=None):
    """A Figure of rows x columns panels with a light grid, and the panels as a list.

    width, height: in inches. title: what the figure shows, in a sentence.
    """
    from matplotlib.figure import Figure  # only now: nothing else needs matplotlib
    figure = Figure(figsize=(width, height), layout="constrained")
    figure._repr_png_ = partial(png, figure)  # a notebook asks for it
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize="large")
    panels = figure.subplots(rows, columns, squeeze=False)
    for panel in panels.flat:
        panel.grid(alpha=0.3)
    return figure, list(panels.flat)


def png(figure):
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def suffix_of(path):
    """The format of a figure, as the end of its file's name says."""
    suffix = Path(path).suffix.lower()
    if suffix not in FORMATS:
        raise UserError(f"{path}: a figure's name ends in {', '.join(FORMATS)}")
    return suffix


def save(figure, path):
    """Write a Figure as PNG, PDF or SVG, whole or not at all. A PNG says what it shows."""
    suffix = suffix_of(path)
    about = FORMATS[suffix] | ({"Comment": shown(figure)} if suffix == ".png" else {})
    files.write(path, lambda part: figure.savefig(part, format=suffix[1:], dpi=150, metadata=about), KIND)


def shown(figure):
    """A digest of the words that a figure shows, and of its numbers to three digits; its looks do not count."""
    said = [figure.get_suptitle()]
    for panel in figure.axes:
        said += [panel.get_title("left"), panel.get_xlabel(), panel.get_ylabel()]
        said += [text.get_text() for text in panel.texts]
        numbers = [*(line.get_xydata() for line in panel.lines), *(dots.get_offsets() for dots in panel.collections),
                   *(image.get_array() for image in panel.images)]
        said += [f"{number:.3g}" for part in numbers for number in part.flatten()]
    return sha256("\n".join(said).encode()).hexdigest()[:16]


def style(i, method=""):
    """Colour and marker of line i: the colour is the method's, or the format's, if it is one's."""
    colour = COLOUR_OF.get(method, COLOURS[i % len(COLOURS)])
    return {"color": colour, "marker": MARKERS[i % len(MARKERS)], "markersize": 5}


def title(panel, text):
    panel.set_title(text, fontsize="medium", loc="left")


def legend(panel, **where):
    panel.legend(fontsize="small", **where)


def plain_ticks(panel):
    """1, 2, 5, 10, 20, ... along a logarithmic y axis, written as plain numbers."""
    from matplotlib.ticker import LogLocator
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=99))
    panel.yaxis.set_major_formatter("{x:g}")
    panel.minorticks_off()


def label_ends(panel):
    """Write each line's label beside its right end, in its colour; labels do not overlap."""
    panel.get_xlim(), panel.get_ylim()  # this scales the panel to its lines
    to_panel = panel.transScale + panel.transLimits  # data -> shares of the panel's width and height
    ends = []
    for line in panel.lines:
        if not line.get_label().startswith("_"):
            x, y = max(point for point in zip(*line.get_data()) if point[1] == point[1])
            ends.append((to_panel.transform((x, y)), line))
    ends.sort(key=lambda end: end[0][1])
    lowest = -1.0
    for (x, y), line in ends:
        lowest = max(y, lowest + BETWEEN)
        panel.annotate(line.get_label(), (x, y), (1.03, lowest), xycoords="axes fraction", fontsize="small",
                       color=line.get_color(), va="center", annotation_clip=False,
                       arrowprops={"arrowstyle": "-", "color": line.get_color(), "linewidth": 0.5, "relpos": (0, 0.5)})


def lines_by_layer(panel, rows, labels):
    """A line over the layers for each column in labels {column: label}; a missing number is a gap. With many layers,
    only some have markers, at other layers on each line, so that overlapping lines can be told apart."""
    layers, step = [row["layer"] for row in rows], 1 + len(rows) // 12
    for i, (column, label) in enumerate(labels.items()):
        panel.plot(layers, [row[column] for row in rows], label=label, markevery=(i % step, step), **style(i))
    panel.set(xlabel="layer")
    panel.xaxis.get_major_locator().set_params(integer=True)


def tokens_and_sinks(panel, numbers, sinks, label):
    """A dot for each token by position, the sinks among them larger. numbers, sinks (T)."""
    numbers, sinks = numbers.cpu(), sinks.cpu()
    panel.scatter(range(len(numbers)), numbers, label="tokens", s=5, color=COLOURS[5], linewidths=0)
    panel.scatter(sinks.nonzero()[:, 0], numbers[sinks], label="sinks", s=32, color=COLOURS[1], marker="D")
    panel.set(xlabel="position (tokens)", ylabel=label, ylim=(0, None))


def draw_map(panel, x, xlabel, label, **how):
    """x (T, C) as a map, a token a row; in a long text a row of pixels is several tokens, `pooled`."""
    T, C = x.shape
    cells = pooled(x.float()).cpu().numpy()  # (up to 128, C)
    how = {"cmap": "viridis", "aspect": "auto", "extent": (0, C, T, 0), **how}
    image = panel.imshow(cells, interpolation="nearest", **how)
    panel.grid(False)
    panel.set(xlabel=xlabel, ylabel="position (tokens)")
    panel.figure.colorbar(image, ax=panel, label=label)


def pooled(x, size=128):
    """x (T, C) -> (up to `size`, C): the number of largest magnitude of neighbouring tokens, with its sign, so that a
    sink stays visible."""
    size = min(size, len(x))
    cell = torch.arange(len(x), device=x.device) * size // len(x)  # (T): the cell of each token
    cells = [x[cell == i] for i in range(size)]  # each (tokens of the cell, C)
    return torch.stack([tokens.gather(0, tokens.abs().argmax(0, keepdim=True))[0] for tokens in cells])


def span(numbers, form=".0%"):
    """"30% to 80%": the smallest and the largest of some numbers, None left out; "-" of none."""
    numbers = [x for x in numbers if x is not None]
    low, high = (format(f(numbers), form) if numbers else "-" for f in (min, max))
    return low if low == high else f"{low} to {high}"
