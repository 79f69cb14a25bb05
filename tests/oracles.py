"""What the methods must do, computed a second time, in plain lists and numpy.

Nothing is imported from tinykv, and no torch, so a mistake of the project cannot repeat itself here. The formulas are
the papers'. Tables that were calibrated are arguments: how they are found is tested elsewhere.

Shapes: B sequences, Hkv KV heads, T tokens, d channels of a head, C = Hkv * d channels of a token. x (B, Hkv, T, d) is
float32, the keys or values that are quantized; ignore (B, Hkv, T) is True at tokens that are kept. Where a function
computes in float32 and rounds to 16 bits, it does so step for step as a codec does, because results must be equal.
"""
import math
from fractions import Fraction
from typing import NamedTuple

import numpy as np

# ---- When


class Event(NamedTuple):
    """The tokens first .. end - 1 are quantized, when `seen` tokens have been seen."""
    first: int
    end: int
    seen: int


def quantization_events(protocol, sizes, recent, block):
    """[Event] of a text that arrives in chunks. sizes: tokens of each chunk."""
    events, end_of_last, seen = [], 0, 0
    for size in sizes:
        seen += size
        whole_blocks = (seen - recent) // block * block  # without the newest tokens
        end = seen if protocol == "paper" else whole_blocks
        if end > end_of_last:
            events.append(Event(end_of_last, end, seen))
            end_of_last = end
    return events


# ---- Keep

def top_k(scores, k):
    """Positions of the k largest of a list, ties to the earlier one."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:k]


def pools(scores, events, size, room, select="smallest"):
    """OTT's pool, and its extra pool, after events: positions. scores: a list, of one sequence and head.

    Tokens come one by one, the smallest first. One that is smaller than the largest of a full pool of `size` takes its
    place, if the extra pool, which has room for `room`, can take that one in.
    """
    pool, extra = [], []
    scores = [-score if select == "largest" else score for score in scores]
    for event in events:
        for token in sorted(range(event.first, event.end), key=lambda i: (scores[i], i)):
            if len(pool) < size:
                pool.append(token)
                continue
            worst = max(pool, key=lambda i: (scores[i], i), default=None)
            if worst is not None and scores[token] < scores[worst] and len(extra) < room:
                pool.remove(worst)
                pool.append(token)
                extra.append(worst)
    return pool, extra


def attention_scores(q, K, window=None):
    """(B, H, T, S), -inf where a query does not see the key. q (B, H, T, d): the newest queries; K (B, Hkv, S, d); both
    rotated."""
    (T, d), S = q.shape[2:], K.shape[2]
    K = K.repeat(q.shape[1] // K.shape[1], axis=1)  # (B, H, S, d)
    before = np.arange(S - T, S)[:, None] - np.arange(S)  # (T, S): how far the key is before the query
    seen = (before >= 0) & (before < (window or S))
    return np.where(seen, q @ K.swapaxes(2, 3) / d ** 0.5, -np.inf)


def attention(q, K, window=None):
    """A (B, H, T, S)."""
    logits = attention_scores(q, K, window)
    A = np.exp(logits - logits.max(-1, keepdims=True))
    return A / A.sum(-1, keepdims=True)


def of_kv_heads(x, Hkv):
    """x (B, H, S), summed over the query heads of each KV head, (B, Hkv, S)."""
    return x.reshape(len(x), Hkv, -1, x.shape[-1]).sum(2)


def equation_5(q, K, window=None):
    """AnTKV's AnS(K) and AnS(V) of all keys, (B, Hkv, S) both."""
    A = attention(q, K, window)  # (B, H, T, S)
    norm = np.linalg.norm(q, axis=-1, keepdims=True)  # (B, H, T, 1)
    of_queries = norm * A * (1 - A), A  # (B, H, T, S) both
    return [of_kv_heads(scores.sum(2), K.shape[1]) for scores in of_queries]


def anchors(wanted, chunks, events, margin=0.0):
    """AnTKV's anchors after events, the best first, and the accumulated score of every token that ever had one.

    wanted: "3", or a share, "10%". chunks: for each the scores that it adds to the tokens so far: lists, of one
    sequence and head. margin: by what part of the largest score the last anchor has to be ahead of the first token that
    is none. With less, rounding could choose.
    """
    total, kept, quantized = {}, [], 0
    events = {event.seen: event for event in events}
    for scores in chunks:
        seen = len(scores)
        # only tokens in full precision accumulate scores
        for i in [*kept, *range(quantized, seen)]:
            total[i] = total.get(i, 0) + scores[i]
        if seen not in events:
            continue
        first, quantized, _ = events[seen]
        # the anchors of now and the new tokens compete; of equals, anchors come first, then earlier tokens
        ranked = sorted([*kept, *range(first, quantized)], key=lambda i: -total[i])
        count = math.ceil(Fraction(wanted[:-1]) * seen / 100) if wanted.endswith("%") else int(wanted)
        kept = ranked[:count]
        if 0 < count < len(ranked):
            ahead = total[ranked[count - 1]] - total[ranked[count]]
            close = f"tokens {ranked[count - 1:count + 1]} score alike: choose another text"
            assert ahead >= margin * total[ranked[0]], close
    return kept, total


# ---- Code: integers

def max_code(bits):
    """The largest code; 1.5 bits are three levels."""
    return np.float32(2 if bits == 1.5 else 2 ** bits - 1)


def float16(x):
    """x rounded to 16 bits."""
    return x.astype(np.float16).astype(np.float32)


def affine_group(g, lo, hi, largest, formula):
    """What the numbers g read as on the grid from lo to hi with codes 0 .. largest."""
    step, floor = (hi - lo) / largest, np.float32(1e-5)
    if formula == "offset":
        s = float16(step.clip(floor, 6e4))
        z = float16(lo)
        return s * np.clip(np.rint((g - z) / s), 0, largest) + z
    floor = np.maximum(np.maximum(np.abs(lo), np.abs(hi)) / np.float32(2 ** 13), floor)
    s = float16(np.clip(step, floor, 1e4))
    z = np.rint(-lo / s)
    return s * (np.clip(np.rint(g / s) + z, 0, largest) - z)


def affine(x, ignore, bits, axis, formula, group, static=None):
    """What x reads as in groups of `group` channels (axis "token") or tokens (axis "channel").

    static: (lo, hi), each (Hkv, d): the range of each channel, where it was calibrated.
    """
    T, d = x.shape[2:]
    everything = slice(None)
    if axis == "token":
        over, groups = -1, [(everything, slice(c, c + group)) for c in range(0, d, group)]
    else:
        over, groups = 2, [(slice(t, min(t + group, T)), everything) for t in range(0, T, group)]
    out = np.empty_like(x)
    for tokens, channels in groups:
        g = x[:, :, tokens, channels]
        lo = hi = g
        if static is not None:
            lo, hi = (end[None, :, None, channels] for end in static)
        elif axis == "channel":  # a token that is kept does not count
            ignored = ignore[:, :, tokens, None]
            lo, hi = np.where(ignored, np.inf, g), np.where(ignored, -np.inf, g)
        lo, hi = lo.min(over, keepdims=True), hi.max(over, keepdims=True)
        lo, hi = np.where(np.isinf(lo), 0, lo), np.where(np.isinf(hi), 0, hi)  # all are kept
        out[:, :, tokens, channels] = affine_group(g, lo, hi, max_code(bits), formula)
    return out


def rotated(x, ignore, bits, axis, formula, group, rotate, scaled):
    """What x (B, Hkv, T, d) reads as in the same groups, times a Hadamard matrix, over the token's norm: that of the
    heads that do not ignore it, or of all."""
    d = x.shape[-1]
    signs = [[(-1) ** (row & column).bit_count() for column in range(d)] for row in range(d)]
    H = np.array(signs) / math.sqrt(d) if rotate else np.eye(d)
    y, norm = x.astype(np.float64) @ H, np.ones(1)
    if scaled:  # torch rounds 64 bits to 16 by way of 32
        counts = ~ignore | ignore.all(1, keepdims=True)  # (B, Hkv, T)
        norm = np.sqrt(((y ** 2).sum(3) * counts).sum(1)).clip(1e-5, 6e4)[:, None, :, None]
        norm = float16(norm.astype(np.float32)).astype(np.float64)
    return affine((y / norm).astype(np.float32), ignore, bits, axis, formula, group) * norm @ H.T


# ---- Code: all heads of a token in one row

def to_rows(x):
    """x (B, Hkv, T, d) -> (B, T, C)."""
    return x.transpose(0, 2, 1, 3).reshape(len(x), x.shape[2], -1)


def to_heads(rows, Hkv):
    """rows (B, T, C) -> (B, Hkv, T, d)."""
    return rows.reshape(*rows.shape[:2], Hkv, -1).transpose(0, 2, 1, 3)


def fp8(x):
    """x rounded to e4m3: 3 bits after the first, exponents from -6."""
    exponent = np.maximum(np.frexp(np.abs(x))[1] - 1, -6)
    quantum = np.ldexp(np.float32(1), exponent - 3)
    return np.rint(x / quantum) * quantum


#           smallest scale, largest number, rounding
METADATA = {"fp8": (2 ** -9, 448, fp8), "fp16": (1e-5, 65504, float16)}


def clipped_groups(x, bits, metadata, group, alpha, to_middle):
    """What x reads as in SKVQ's groups. group (C): that of each channel. alpha, to_middle (n): how the range of each
    group is clipped."""
    floor, largest, rounded = METADATA[metadata]
    rows = to_rows(x)  # (B, T, C)
    out = np.empty_like(rows)
    for i, (a, c) in enumerate(zip(alpha, to_middle)):
        channels = group == i  # (C)
        g = rows[..., channels]
        # the range, shrunk around its middle or towards zero
        lo, hi = g.min(-1, keepdims=True), g.max(-1, keepdims=True)
        middle = (lo + hi) / 2 if c else np.zeros_like(lo)
        lo, hi = (a * end + (1 - a) * middle for end in (lo, hi))
        # the grid
        s = rounded(np.clip((hi - lo) / max_code(bits), np.float32(floor), np.float32(largest)))
        z = rounded(np.clip(lo, np.float32(-largest), np.float32(largest)))
        out[..., channels] = s * np.clip(np.rint((g - z) / s), 0, max_code(bits)) + z
    return to_heads(out, x.shape[1])


def token_range(row, counted, share):
    """The middle of a token's range, half of it, and its outliers (C). row (C): its numbers; counted: which of them are
    not ignored; share: that of the outliers among all."""
    outlier = np.zeros(len(row), bool)
    if len(counted):
        median = np.sort(row[counted])[(len(counted) - 1) // 2]
        furthest = sorted(counted, key=lambda c: (-np.abs(row[c] - median), c))
        outlier[furthest[:round(share * len(row))]] = True
    else:  # kept, for now: it has no outliers; if it is given up, it is read in its own range
        counted = np.arange(len(row))
    inside = row[counted][~outlier[counted]]
    lo, hi = (inside.min(), inside.max()) if len(inside) else (np.float32(0),) * 2
    mid = np.float32(np.float16((lo + hi) / 2))
    half = np.float32(np.float16(max((hi - lo) / 2, np.float32(1e-5))))
    return mid, half, outlier


def nonuniform(x, ignore, levels, share, mid=None, half=None):
    """What x reads as on KVQuant's levels, and where its outliers are, (B, T, C).

    mid, half (C): the calibrated range of each channel (keys); None where each token has its own (values). share: of a
    token's numbers, those that are outliers.
    """
    rows = to_rows(x)  # (B, T, C)
    ignored = ignore.transpose(0, 2, 1).repeat(x.shape[3], axis=2)  # (B, T, C)
    outlier, read = np.zeros_like(ignored), np.zeros_like(rows)
    for b, t in np.ndindex(rows.shape[:2]):
        row = rows[b, t]  # (C)
        if mid is None:
            m, h, outlier[b, t] = token_range(row, np.flatnonzero(~ignored[b, t]), share)
        else:
            m, h = mid, half
            outlier[b, t] = ~ignored[b, t] & (np.abs(row - m) > h) & (share > 0)
        normal = ((row - m) / h).astype(np.float64)
        code = np.abs(normal[:, None] - levels).argmin(1)  # ties: the smaller level
        read[b, t] = np.where(outlier[b, t], row, levels[code].astype(np.float32) * h + m)
    return to_heads(read, x.shape[1]), outlier


def nearest_centroids(x, centroids, chosen):
    """What x reads as by the nearest of m centroids, of n channels each. centroids (slots or 1, m, n).

    chosen (B, Hkv, T, d): what the codec made of x. It has the choice where two centroids are equally near, as far as
    32 bits can tell.
    """
    B, Hkv, T, d = x.shape
    m, n = centroids.shape[1:]
    books = np.broadcast_to(centroids, (Hkv * d // n, m, n)).reshape(Hkv, d // n, m, n)
    vectors = x.reshape(B, Hkv, T, d // n, n).astype(float)
    chosen = chosen.reshape(vectors.shape)
    out = np.empty(vectors.shape, np.float32)
    for h, p in np.ndindex(Hkv, d // n):
        book, vector = books[h, p], vectors[:, h, :, p]  # (m, n), (B, T, n)
        distance = ((vector[:, :, None] - book) ** 2).sum(-1)  # (B, T, m)
        best = distance.argmin(-1)  # (B, T)
        # equally near: the codec's choice, if it is one of those
        tolerance = 1e-6 * ((vector ** 2).sum(-1) + 1)  # (B, T)
        near = distance - distance.min(-1, keepdims=True) <= tolerance[..., None]  # (B, T, m)
        allowed = near & (chosen[:, h, :, p, None] == book).all(-1)  # (B, T, m)
        best = np.where((near.sum(-1) > 1) & allowed.any(-1), allowed.argmax(-1), best)
        out[:, h, :, p] = book[best]
    return out.reshape(x.shape)


# ---- Bytes

def code_bytes(width, bits):
    """Bytes of `width` packed codes; three levels are packed five to a byte, and 3 bits as 2 and 1."""
    if bits == 1.5:
        return math.ceil(width / 5)
    return sum(math.ceil(width * 2 ** i / 8) for i in range(4) if bits >> i & 1)
