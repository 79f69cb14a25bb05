"""One layer whole: |H| in the outlier's channel, token by token, with the sinks marked, which is where KVSink looks for
them (Figure 1b); attention output, keys and values, token by channel, and the attention of the first 64 tokens (KVSink
Figure 5f, IntactKV Figure 1); the largest H of each layer; and the share of the keys' variance that lies within
channels, before RoPE and after it (AnTKV Appendix B, Figure 8): a codebook of channels that each keep their own level
has less left to describe.
"""
from tinykv.analysis.sinks import draw_attention
from tinykv.analysis.walk import by_layer, walk
from tinykv.run.plots import draw_map, new_figure, title, tokens_and_sinks

FIRST = 64  # tokens of the attention map

COLUMNS = {"layer": ("layer", "d"), "largest": ("largest H", ".1f"), "token": ("at token", "d"),
           "channel": ("channel", "d"), "pre": ("K before RoPE", ".2f"), "post": ("K after", ".2f")}


def share_within(x):
    """x (Hkv, T, d) -> the variance over tokens of each channel's numbers, over that of all numbers of the head; the
    mean over heads."""
    x = x.double()
    within = x.var(1, correction=0).mean(1)  # (Hkv)
    whole = x.flatten(1).var(1, correction=0)  # (Hkv)
    return (within / whole).mean()


def measure(text):
    rows = by_layer(text, lambda at, sinks: {"pre": share_within(at.k_pre[0]), "post": share_within(at.k[0])})
    # the largest |H| is that of the first window
    for row, at in zip(rows, walk(text.model, text.windows[0])):
        token, channel = divmod(int(at.hidden.abs().argmax()), at.hidden.shape[1])
        row.update(largest=at.hidden[token, channel].item(), token=token, channel=channel)
    return rows


def by_token(x):
    """x (1, Hkv, T, d) -> (T, Hkv * d)."""
    return x[0].transpose(0, 1).flatten(1)


def draw(text, rows):
    at, sinks = text.shown()
    size = at.hidden.float().abs()  # (T, D)
    channel = int(size[sinks].mean(0).argmax()) if sinks.any() else rows[at.layer]["channel"]
    found = size[:, channel].topk(max(1, int(sinks.sum()))).indices  # the largest |H[:, c]|
    figure, panels = new_figure(
        2, 3, 12, 7, f"Layer {at.layer}: {sinks[found].sum()} of the {len(found)} tokens with the largest |H| in "
        f"channel {channel} are sinks")
    tokens_and_sinks(panels[0], size[:, channel], sinks, f"|H[:, {channel}]|")
    title(panels[0], f"|H| in channel {channel}, sinks marked")
    maps = {"attention output": at.attention, "values": by_token(at.v),
            "keys before RoPE": by_token(at.k_pre), "keys after RoPE": by_token(at.k)}
    for panel, (name, x) in zip(panels[1:], maps.items()):
        draw_map(panel, x.abs(), "channel", "magnitude", vmin=0)
        title(panel, name)
    first = walk(text.model, text.windows[0, :FIRST])[text.layer]
    draw_attention(panels[5], first)
    title(panels[5], f"attention of the first {first.q.shape[2]} tokens")
    return figure
