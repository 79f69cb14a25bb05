"""What the cache of a cell must hold: the oracles of oracles.py, asked for the cell's method.

`KEPT` and `READ` are the table of the methods once more: which tokens each keeps, and what the others read as. A method
without an oracle (`ORACLES` of cases.py names those that have one) has its own word count for what it keeps and what
its codecs make of a block, and only what every method must do is checked.

What is taken from the project: RoPE, which test_model.py checks, and the tables that calibration found.
"""
import math
from dataclasses import replace
from functools import lru_cache

import numpy as np
import oracles
import torch
from cases import G, L, Watch, calibration_windows, d, rotated_keys

MARGIN = 2e-6  # of the largest anchor score: each is off by less than 1e-6 of that in float32

# of the schemes with uniform grids: axis of K, axis of V, static ranges
UNIFORM = {
    "token-dynamic": ("token", "token", False),
    "token-static": ("token", "token", True),
    "channel-static": ("channel", "token", True),
    "channel-dynamic": ("channel", "token", False),
    "oscar": ("channel", "token", False),
}
# the pair of codecs, of methods that stand on a named one
SCHEME = {"kivi": "channel-dynamic", "ott": "channel-dynamic", "kvquant": "kvquant", "skvq": "skvq",
          "oscar": "oscar"}


def scheme_of(case):
    return SCHEME.get(case.oracle, case.scheme)


def grid_of(case, kind):
    """The axis of a uniform grid, and whether its ranges are calibrated."""
    k_axis, v_axis, static = UNIFORM[scheme_of(case)]
    return k_axis if kind == "k" else v_axis, static


def codec_of(method, layer, kind):
    return getattr(method.codecs[layer], kind)


def bits_of(method, kind):
    return codec_of(method, 0, kind).bits


# ---- Keep

def expected_kept(case, method, watch, layer, kind, events):
    """True (B, Hkv, T) where a layer's keys or values are kept after events."""
    k, _ = watch.exact(layer)
    kept = torch.zeros(k.shape[:3], dtype=torch.bool)
    mark = KEPT.get(case.oracle) if case.known else mark_what_the_cache_says
    if events and mark:
        mark(case, method, watch, layer, kind, events, kept)
    return kept


def mark_first_tokens(case, method, watch, layer, kind, events, kept):
    kept[:, :, :min(case.setting("preserve"), events[-1].seen)] = True


def mark_prefix(case, method, watch, layer, kind, events, kept):
    if bits_of(method, kind) < 16:
        kept[:, :, :len(case.prefix)] = True


def mark_sinks(case, method, watch, layer, kind, events, kept):
    """KVSink: the largest numbers of the outlier channel, or all that reach the threshold, in the layers after the
    emergence layer."""
    emergence_layer, channel = case.setting("emergence_layer"), case.setting("outlier_channel")
    if layer <= emergence_layer:
        return
    hidden = watch.output(emergence_layer)[:, :events[-1].seen]  # (B, seen, D)
    threshold = case.setting("threshold")
    for b, scores in enumerate(hidden[..., channel].abs().tolist()):
        count = case.setting("preserve")
        if threshold is not None:
            count = sum(score >= threshold * max(scores) for score in scores)
        kept[b, :, oracles.top_k(scores, count)] = True


def mark_pools(case, method, watch, layer, kind, events, kept):
    """OTT: the smallest keys, and those evicted by smaller ones; values as their keys."""
    if layer < case.setting("skip_layers"):
        return
    keys, _ = watch.stored(layer)
    scores = keys.double().abs().sum(-1)  # (B, Hkv, T)
    size, room, select = (case.setting(name) for name in ("outlier_num", "extra_pool", "select"))
    for b, h in np.ndindex(scores.shape[:2]):
        pool, extra = oracles.pools(scores[b, h].tolist(), events, size, room, select)
        kept[b, h, pool + extra] = True


def mark_anchors(case, method, watch, layer, kind, events, kept):
    """AnTKV: the largest anchor scores."""
    chunks = chunk_scores(case, watch, layer)[kind]  # (B, Hkv, seen) each
    for b, h in np.ndindex(kept.shape[:2]):
        of_head = [scores[b, h].tolist() for scores in chunks]
        anchors, _ = oracles.anchors(case.setting("anchors"), of_head, events, MARGIN)
        kept[b, h, anchors] = True


def mark_what_the_cache_says(case, method, watch, layer, kind, events, kept):
    for (b, h), marks in np.ndenumerate(watch.kept[layer, kind, events[-1].seen]):
        kept[b, h, list(marks)] = True


KEPT = {
    "pfn": mark_first_tokens, "skvq": mark_first_tokens, "kvquant": mark_first_tokens,
    "intactkv": mark_prefix, "kvsink": mark_sinks, "ott": mark_pools, "antkv": mark_anchors,
}


@lru_cache(maxsize=L)
def chunk_scores(case, watch, layer):
    """{kind: [what the queries of each chunk add to the scores of all tokens so far, (B, Hkv, seen)]}."""
    rope, scores, seen = case.model.rope, {"k": [], "v": []}, 0
    for q, (K, _) in zip(watch.queries[layer], watch.returned[layer]):
        if case.protocol == "paper":  # what comes back is quantized, but scores come before that
            K = rope.rotate(watch.exact(layer)[0].float(), seen)
        q = rope.rotate(q, seen)
        seen += q.shape[2]
        of_keys, of_values = oracles.equation_5(q.double().numpy(), K.double().numpy())
        scores["k"].append(of_keys)
        scores["v"].append(of_values)
    return scores


# ---- Code

def expected_quantized(case, method, layer, kind, rows, kept):
    """What rows (B, Hkv, n, d) that are quantized at once read as. kept (B, Hkv, n)."""
    codec = codec_of(method, layer, kind)
    if not case.known or case.oracle == "fp16":
        return codec.decode(codec.encode(rows, kept)).float()
    if bits_of(method, kind) == 16:
        return rows.float()
    x, ignore = rows.float().numpy(), kept.numpy()
    mean = calibrated_mean(case, method, layer) if kind == "k" and case.setting("centre") == "on" else 0
    x = x - mean
    if case.oracle in READ:
        out = READ[case.oracle](case, codec, x, ignore)
    elif scheme_of(case) == "kvquant":
        out, _ = nonuniform(case, codec, x, ignore)
    elif scheme_of(case) == "skvq":
        out = read_clipped_groups(case, codec, x, ignore)
    elif scheme_of(case) == "oscar":
        rotate, scale = (case.setting(name) != "off" for name in ("rotate", "scale_tokens"))
        axis, _ = grid_of(case, kind)
        out = oracles.rotated(x, ignore, bits_of(method, kind), axis, case.formula, G, rotate, scale and kind == "k")
    else:
        axis, static = grid_of(case, kind)
        calibrated = calibrated_range(case, method, layer, kind) if static else None
        out = oracles.affine(x, ignore, bits_of(method, kind), axis, case.formula, G, calibrated)
    return torch.from_numpy(out + mean).float()


def read_clipped_groups(case, codec, x, ignore):
    tables = (codec.group, codec.alpha.float(), codec.to_middle)
    metadata = case.setting("metadata") or "fp8"
    return oracles.clipped_groups(x, codec.bits, metadata, *(table.numpy() for table in tables))


def read_nearest_centroids(case, codec, x, ignore):
    chosen = codec.decode(codec.encode(torch.from_numpy(x)))
    return oracles.nearest_centroids(x, codec.centroids.double().numpy(), chosen.numpy())


def nonuniform(case, codec, x, ignore):
    """What x reads as on KVQuant's levels, and where its outliers are, (B, T, C)."""
    levels, share = codec.levels.double().numpy(), case.setting("outliers") / 100
    if codec.mid is None:
        return oracles.nonuniform(x, ignore, levels, share)
    mid, half = codec.mid.float().numpy(), codec.half.float().numpy()
    return oracles.nonuniform(x, ignore, levels, share, mid, half)


READ = {"cq": read_nearest_centroids, "antkv": read_nearest_centroids}


# ---- the whole cache

def expected_events(case, method, watch, layer, kind):
    """For each event its tokens, a slice, with their rows (B, Hkv, n, d) in full precision, and which of them are kept
    by then, (B, Hkv, n)."""
    rows = dict(zip("kv", watch.stored(layer)))[kind]
    events = watch.events(kind)
    for i, event in enumerate(events):
        tokens = slice(event.first, event.end)
        kept = expected_kept(case, method, watch, layer, kind, events[:i + 1])  # (B, Hkv, T)
        yield tokens, rows[:, :, tokens], kept[:, :, tokens]


def expected_read(case, method, watch, layer):
    """K, rotated, and V (B, Hkv, T, d) that attention must read of a layer."""
    out = []
    for kind, exact in zip("kv", watch.stored(layer)):
        quantized = exact.float()  # (B, Hkv, T, d): recent tokens stay as they are
        for tokens, rows, kept in expected_events(case, method, watch, layer, kind):
            quantized[:, :, tokens] = expected_quantized(case, method, layer, kind, rows, kept)
        # what counts is what is kept after the last event
        kept = expected_kept(case, method, watch, layer, kind, watch.events(kind))  # (B, Hkv, T)
        out.append(torch.where(kept[..., None], exact.float(), quantized))
    K, V = out
    return rotated_keys(case.model, method, K), V.to(case.dtype)


# ---- its bytes

def expected_bytes(case, method, watch, kind):
    """{part: bytes} of all layers' keys, or values."""
    B, Hkv = case.batch, case.model.config.num_key_value_heads
    # a token in full precision: its row in 16 bits, and its score in 32
    scored = case.oracle == "antkv" and case.setting("anchors") != "0"
    row = 2 * d + (4 if scored else 0)
    # its position in 32 bits, once for each head that chooses for itself
    position = 4 * Hkv if case.oracle in ("antkv", "ott") else 4
    coded = held = 0
    for layer in range(L):
        coded += expected_code_bytes(case, method, watch, layer, kind)
        kept = expected_kept(case, method, watch, layer, kind, watch.events(kind))  # (B, Hkv, T)
        slots = int(kept.sum(-1).max())  # of the sequence and head with the most
        held += B * slots * (Hkv * row + position)
    return {"coded": coded, "kept": held, "recent": L * B * Hkv * (case.T - watch.n_quantized(kind)) * row}


def expected_code_bytes(case, method, watch, layer, kind):
    """Bytes of a layer's codes, and of whatever is stored with them."""
    events = list(expected_events(case, method, watch, layer, kind))
    codec, scheme, bits = codec_of(method, layer, kind), scheme_of(case), bits_of(method, kind)
    B, Hkv = case.batch, case.model.config.num_key_value_heads
    tokens = B * sum(rows.shape[2] for _, rows, _ in events)
    if bits == 16:
        return tokens * Hkv * d * 2

    if scheme == "skvq":  # groups cross heads; each has a scale and a zero point
        groups = len(codec.alpha)
        assert groups <= Hkv * d // G
        size = 2 if case.setting("metadata") == "fp16" else 1
        return tokens * (oracles.code_bytes(Hkv * d, bits) + 2 * size * groups)

    if case.oracle in READ:  # all the codes of a token together
        return tokens * oracles.code_bytes(Hkv * d // codec.n, int(math.log2(codec.m)))

    if scheme == "kvquant":
        # of each token; a row of values has a pointer to its outliers unless it is too short for one
        share = case.setting("outliers") / 100
        has_outliers = share > 0 if kind == "k" else round(share * Hkv * d) > 0
        mid_and_half, pointer = 4 if kind == "v" else 0, 4 if has_outliers else 0
        size = tokens * (oracles.code_bytes(Hkv * d, bits) + mid_and_half + pointer)
        for _, rows, kept in events:  # a number and a channel for each outlier
            _, outlier = nonuniform(case, codec, rows.float().numpy(), kept.numpy())
            size += 4 * int(outlier.sum())
        return size

    axis, static = grid_of(case, kind)
    groups = tokens * Hkv * d // G
    if axis == "channel":
        groups = sum(math.ceil(rows.shape[2] / G) for _, rows, _ in events) * B * Hkv * d
    grids = 0 if static else 4 * groups  # a 16-bit scale and a 16-bit zero point
    norms = 2 * tokens if scheme == "oscar" and kind == "k" and case.setting("scale_tokens") != "off" else 0
    return tokens * Hkv * oracles.code_bytes(d, bits) + grids + norms


# ---- calibration

class InFullPrecision(Watch):
    """A window's attention reads its keys and values as they are, not rounded to 16 bits."""

    def update(self, layer, q, k, v, seen):
        super().update(layer, q, k, v, seen)
        return self.case.model.rope.rotate(k), v


@lru_cache
def calibration_rows(case, method):
    """[{kind: (Hkv, tokens, d)}] by layer: what calibration windows have, without the tokens that the method keeps."""
    fp16, by_layer = case.fp16(method.rope), [{"k": [], "v": []} for _ in range(L)]
    for window in calibration_windows():
        watch, event = InFullPrecision(case, case.new_cache(fp16)), oracles.Event(0, len(window), len(window))
        case.run(fp16, window[None], watch)
        for layer, rows in enumerate(by_layer):
            for kind, x in zip("kv", watch.stored(layer)):
                kept = expected_kept(case, method, watch, layer, kind, [event])[0, 0]  # (T)
                rows[kind].append(x[0, :, ~kept])
    return [{kind: torch.cat(x, dim=1).float().numpy() for kind, x in rows.items()} for rows in by_layer]


def calibrated_range(case, method, layer, kind):
    """(lo, hi), each (Hkv, d): the smallest and the largest number of each channel."""
    rows = calibration_rows(replace(case.recipe(), protocol="paper"), method)[layer][kind]
    return rows.min(1), rows.max(1)


def calibrated_mean(case, method, layer):
    """The mean of each channel of the keys, (Hkv, 1, d), as the codec has it, in 16 bits."""
    rows = calibration_rows(replace(case.recipe(), protocol="paper"), method)[layer]["k"]
    mean = codec_of(method, layer, "k").mean.float().numpy()
    assert np.allclose(mean, rows.mean(1, keepdims=True), rtol=1e-3, atol=1e-3)
    return mean
