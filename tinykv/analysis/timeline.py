"""Where the key of each token is at any time, from real caches that read a text token by token: recent, coded,
or kept (the three questions, Keep, Code and When, of each method in one picture). A picture of the first six
methods, and a small one of each; position runs to the right and time down.
"""
import torch

from tinykv.cache import KVCache
from tinykv.calibrate import calibrate
from tinykv.evaluate import chunks_of
from tinykv.run.plots import new_figure, title

LONGEST = 512  # tokens of the picture
SHOWN = 6  # methods of the picture
STATES = {"r": ("recent: 16 bits", "#f0a020"), "c": ("coded", "#a6cbe8"), "k": ("kept: 16 bits", "#98001f")}
# with the recent tokens and blocks of the table in README; codebooks that a short text can fit
EXAMPLES = "rtn,pfn,kvsink,kivi,ott,antkv vq=d4m16,skvq,intactkv bits=4,kvquant,cq vq=d4m16"

COLUMNS = {"method": ("method", ""), "tokens": ("tokens", "d"), "recent": ("recent", "d"), "coded": ("coded", "d"),
           "kept": ("of them kept", "d")}


def states_of(rows):
    """The keys, or values, of a cache (`CachedRows`) -> a letter for each token: where its row is in KV head 0."""
    states = ["c"] * rows.n_coded + ["r"] * rows.recent.shape[2]
    if rows.kept_positions is not None:
        for position in rows.kept_positions[0, 0].tolist():
            states[position] = "k"
    return "".join(states)


@torch.no_grad()
def read_text(text, method, tokens, cache_class=KVCache):
    """Calibrate a method and let its cache read tokens (T), in chunks that end where something is quantized: the
    cache, and its history, [(tokens read so far, states of the shown layer's keys)] after each chunk."""
    calibrate(text.model, method, text.calibration)
    if method.prefix is not None:
        method.prefix.fill(text.model, text.model)
    cache, history = cache_class(text.model, method), []
    for chunk in chunks_of(tokens[None], cache):
        text.model(chunk, cache, logits=False)
        history.append((len(cache), states_of(cache.layers[text.layer].keys)))
    return cache, history


def states_at(history, n):
    """The states when n tokens have been read: those after the last chunk, and the tokens since then are recent."""
    before = [states for length, states in history if length <= n]
    return "".join(before[-1:]).ljust(n, "r")


def measure(text):
    """A row for each method, after the whole text."""
    (tokens, _), rows = text.begin(LONGEST), []
    for label, method in text.methods.items():
        _, history = read_text(text, method, tokens)
        states = history[-1][1]
        rows.append({"method": label, "tokens": len(states), "recent": states.count("r"),
                     "coded": len(states) - states.count("r"), "kept": states.count("k"), "history": history})
    return rows


def draw_method(panel, text, row):
    from matplotlib.colors import ListedColormap
    T = row["tokens"]
    image = torch.full((T, T), float("nan"))  # time by position
    for n in range(1, T + 1):
        image[n - 1, :n] = torch.tensor(["rck".index(letter) for letter in states_at(row["history"], n)])
    panel.imshow(image.numpy(), cmap=ListedColormap([colour for _, colour in STATES.values()]), vmin=0, vmax=2,
                 extent=(0, T, T, 0), interpolation="nearest")
    # a column of one token would be too thin to be seen
    times, positions = (image == 2).nonzero().T + 0.5
    panel.scatter(positions, times, s=1.2, color=STATES["k"][1], linewidths=0)
    sinks = text.begin(LONGEST)[1].nonzero()[:, 0].cpu() + 0.5
    panel.plot(sinks, 0 * sinks - 0.03 * T, "v", color="black", markersize=4, clip_on=False)
    panel.grid(False)
    panel.set(xlabel="position of the token", ylabel="tokens read so far", xlim=(-0.02 * T, T),
              ylim=(T, -0.06 * T))
    title(panel, row["method"])


def draw(text, rows):
    """The first six methods, in rows of three."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    n_columns = min(3, len(rows))
    n_rows = -(-len(rows[:SHOWN]) // n_columns)
    figure, panels = new_figure(n_rows, n_columns, 0.6 + 3.6 * n_columns, 1.2 + 3.4 * n_rows,
                                f"Where each token's key is (layer {text.layer}, KV head 0), while a text is read")
    for panel, row in zip(panels, rows):
        draw_method(panel, text, row)
    for panel in panels[len(rows):]:
        panel.axis("off")
    handles = [Patch(color=colour, label=label) for label, colour in STATES.values()]
    handles.append(Line2D([], [], marker="v", color="black", linestyle="", label="a sink"))
    figure.legend(handles=handles, loc="outside lower center", ncol=4, frameon=False)
    return figure


def draw_small(text, row):
    """One method, small."""
    figure, (panel,) = new_figure(1, 1, 2.6, 2.9)
    draw_method(panel, text, row)
    panel.set(xlabel="position", ylabel="tokens read")
    return figure
