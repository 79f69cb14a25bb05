"""The outlier's way through the layers: the largest magnitude in the four places of KVSink Section
3.1, at the sinks and at other tokens (Figure 4): the input of the down-projection (Eq. 7), its
output (Eq. 8), the residual H' after attention (Eq. 2), and H after the block (Eq. 1); ratio: of H's
to its median; channel: that of the outlier, and X_d,out and H in it at the sinks; outliers in: the
channels that have some, the five largest.
"""
import torch

from tinykv.analysis.figures import COLOURS, label_ends, lines_by_layer, new_figure, style, title
from tinykv.analysis.walk import by_layer, largest, means

OUTLIER = 0.1  # of the largest channel: the share from which a channel has outliers, too
MOST = 5  # channels that are listed

COLUMNS = {"layer": ("layer", "d"), "d_in": ("X_d,in", ".1f"), "d_in others": ("others", ".1f"),
           "d_out": ("X_d,out", ".1f"), "d_out others": ("others", ".1f"), "mid": ("H'", ".1f"),
           "mid others": ("others", ".1f"), "out": ("H", ".1f"), "out others": ("others", ".1f"),
           "ratio": ("ratio", ".0f"), "channel": ("channel", "d"), "d_out c": ("X_d,out", ".1f"),
           "out c": ("H", ".1f"), "channels": ("outliers in", "d")}


def look(at, sinks, channels):
    """The largest magnitudes, and what channels[0] holds: with its sign, and as a size.

    `out by channel`: the mean of H at the sinks in each of the channels.
    """
    places = {"d_in": at.d_in, "d_out": at.d_out, "mid": at.mid, "out": at.hidden}  # (T, D or M) each
    row = {}
    for place, x in places.items():
        row[place] = largest(x[sinks])
        row[f"{place} others"] = largest(x[~sinks])
    channel, median = channels[0], at.hidden.float().abs().median()
    out = at.hidden[sinks].float()  # (sinks, D)
    size = out[:, channel].abs().mean()
    return {
        **row,
        "ratio": row["out"] / median,
        "d_out c": at.d_out[sinks].float().mean(0)[channel],
        "out c": out.mean(0)[channel],
        "size c": size,
        "ratio c": size / median,
        "out by channel": out.mean(0)[channels],
    }


def outlier_channels(at_sinks, at_others):
    """The channels with outliers, the largest first: those where |H| at the sinks is at least OUTLIER
    of that in the largest channel, and twice that at other tokens or more. KVSink's Table 3 lists two
    to four.

    at_sinks, at_others (D): the mean |H| there.
    """
    is_outlier = (at_sinks >= OUTLIER * at_sinks.max()) & (at_sinks >= 2 * at_others)  # (D)
    is_outlier[at_sinks.argmax()] = True
    order = at_sinks.argsort(descending=True)  # (D)
    return [c for c in order.tolist() if is_outlier[c]]


def channels_of(text):
    """The channels with outliers, by the mean |H| over windows and all blocks but the last."""
    last = text.model.config.num_hidden_layers - 1

    def sizes(at, sinks):
        size = at.hidden.float().abs()  # (T, D)
        which = "last" if at.layer == last > 0 else "before"
        return {(which, "sinks"): size[sinks].mean(0), (which, "others"): size[~sinks].mean(0)}

    found = means(text, sizes)
    return outlier_channels(torch.tensor(found["before", "sinks"]), torch.tensor(found["before", "others"]))


def measure(text):
    channels = channels_of(text)[:MOST]
    rows = by_layer(text, lambda at, sinks: look(at, sinks, channels))
    return [{**row, "channel": channels[0], "channels": channels} for row in rows]


def draw(text, rows):
    """The largest magnitude in the four places by layer, and the outlier's channel with its sign."""
    channel, largest_row = rows[0]["channel"], max(rows, key=lambda row: abs(row["out c"]))
    figure, (left, middle, right) = new_figure(
        1, 3, 13, 4.2, f"At the sinks, channel {channel} of H holds {largest_row['out c']:.0f} after layer "
        f"{largest_row['layer']}: {largest_row['ratio c']:.0f} times the median")
    places = {"d_in": "X_d,in", "d_out": "X_d,out", "mid": "H'", "out": "H"}
    middle.sharey(left)
    lines_by_layer(left, rows, places)
    lines_by_layer(middle, rows, {f"{place} others": label for place, label in places.items()})
    for panel, where in ((left, "at the sinks"), (middle, "at all other tokens")):
        panel.set(yscale="log", ylabel="largest magnitude")
        title(panel, where)

    lines_by_layer(right, rows, {"d_out c": f"X_d,out in {channel}"})
    for i, c in enumerate(rows[0]["channels"]):
        label = f"H in {c}" if i < 2 else "_"  # the others, which are small, are grey
        how = {**style(i + 1), "color": COLOURS[i + 1]} if i < 2 else {"color": COLOURS[7], "linewidth": 1}
        right.plot([row["out by channel"][i] for row in rows], label=label, **how)
    right.axhline(0, color="grey", linewidth=1)
    right.set(ylabel="value, mean over the sinks")
    title(right, "outlier channels at the sinks")
    for panel in (left, middle, right):
        label_ends(panel)
    return figure
