"""The outlier's way through the layers: the largest magnitude in the four places of KVSink Section 3.1, at the sinks
and at other tokens (Figure 4): the input of the down-projection (Eq. 7), its output (Eq. 8), the residual H' after
attention (Eq. 2), and H after the layer (Eq. 1); ratio: of H's to its median; channel: that of the outlier, and X_d,out
and H in it at the sinks; outliers in: the channels that have some, the five largest.
"""
import torch

from tinykv.lab.analysis.walk import by_layer, largest, mean
from tinykv.lab.plots import label_ends, lines_by_layer, new_figure, title

OUTLIER = 0.1  # of the largest channel: the share from which a channel has outliers, too
MOST = 5  # channels that are listed

COLUMNS = {"layer": ("layer", "d"), "d_in": ("X_d,in", ".1f"), "d_in others": ("others", ".1f"),
           "d_out": ("X_d,out", ".1f"), "d_out others": ("others", ".1f"), "mid": ("H'", ".1f"),
           "mid others": ("others", ".1f"), "out": ("H", ".1f"), "out others": ("others", ".1f"),
           "ratio": ("ratio", ".0f"), "channel": ("channel", "d"), "d_out c": ("X_d,out", ".1f"),
           "out c": ("H", ".1f"), "channels": ("outliers in", "d")}


def look(at, sinks):
    """The largest magnitudes; and by channel: means at the sinks with their sign, and of the size of H."""
    places = {"d_in": at.d_in, "d_out": at.d_out, "mid": at.mid, "out": at.hidden}  # (T, D or M) each
    row = {}
    for place, x in places.items():
        row[place] = largest(x[sinks])
        row[f"{place} others"] = largest(x[~sinks])
    size = at.hidden.float().abs()  # (T, D)
    median = size.median()
    return {
        **row,
        "ratio": row["out"] / median,
        "d_out of": at.d_out[sinks].float().mean(0),  # (D)
        "out of": at.hidden[sinks].float().mean(0),  # (D)
        "size of": size[sinks].mean(0),  # (D)
        "others of": size[~sinks].mean(0),  # (D)
        "ratio of": size[sinks].mean(0) / median,  # (D)
    }


def outlier_channels(at_sinks, at_others):
    """The channels with outliers, the largest first: those where |H| at the sinks is at least OUTLIER of that in the
    largest channel, and twice that at other tokens or more. KVSink's Table 3 lists two to four.

    at_sinks, at_others (D): the mean |H| there.
    """
    is_outlier = (at_sinks >= OUTLIER * at_sinks.max()) & (at_sinks >= 2 * at_others)  # (D)
    is_outlier[at_sinks.argmax()] = True
    order = at_sinks.argsort(descending=True)  # (D)
    return [c for c in order.tolist() if is_outlier[c]][:MOST]


def measure(text):
    rows = by_layer(text, look)
    before = rows[:-1] or rows  # the last layer takes the outlier away
    at_sinks, at_others = (torch.tensor(mean([row[name] for row in before])) for name in ("size of", "others of"))
    channels = outlier_channels(at_sinks, at_others)
    for row in rows:
        row.update({"channel": channels[0], "channels": channels})
        for name in ("d_out", "out", "size", "ratio"):
            row[f"{name} c"] = row.pop(f"{name} of")[channels[0]]
        del row["others of"]
    return rows


def draw(text, rows):
    """The largest magnitude in the four places by layer, and the outlier's channel with its sign."""
    channel, largest_row = rows[0]["channel"], max(rows, key=lambda row: abs(row["out c"]))
    figure, (left, middle, right) = new_figure(
        1, 3, 13, 4.2, f"At the sinks, channel {channel} of H holds {largest_row['out c']:.0f} after layer "
        f"{largest_row['layer']}: {largest_row['ratio c']:.0f} times the median")
    places = {"d_out": "X_d,out", "out": "H", "d_in": "X_d,in", "mid": "H'"}  # the first two in each panel
    middle.sharey(left)
    for panel, suffix, where in ((left, "", "at the sinks"), (middle, " others", "at all other tokens")):
        lines_by_layer(panel, rows, {place + suffix: label for place, label in places.items()})
        panel.set(yscale="log", ylabel="largest magnitude")
        title(panel, where)
    lines_by_layer(right, rows, {"d_out c": "X_d,out", "out c": "H"})
    right.axhline(0, color="grey", linewidth=1)
    right.set(ylabel="value, mean over the sinks")
    title(right, f"channel {channel} at the sinks")
    for panel in (left, middle, right):
        label_ends(panel)
    return figure
