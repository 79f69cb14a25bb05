"""One HTML page that opens from disk and needs no network: a text coloured by where each token's key is (when),
each key and value exact and as attention reads it, with its bytes and codes (what), and the attention that each
token receives, with the outlier's |H| (why).
"""
import base64
import gzip
import json
import math
from pathlib import Path

import torch

from tinykv import files
from tinykv.analysis import outliers
from tinykv.analysis.sinks import sink_scores
from tinykv.analysis.timeline import read_text
from tinykv.analysis.walk import Text, walk
from tinykv.cache import KVCache
from tinykv.codecs.base import row_bytes, unpack

LONGEST = 128  # tokens of the page
MOST = 250_000  # numbers of the page, so that it has less than 500 KB
TEMPLATE = Path(__file__).with_name("page.html")
# blocks small enough that something happens in a short text
EXAMPLES = ("rtn block=16,pfn block=16,kvsink block=16 choose=always,kivi recent=32 group_size=16,"
            "ott recent=16 group_size=32")


class ExactRows(KVCache):
    """A cache that also takes down every row as it comes, as the method stores it, before it is quantized."""

    def reset(self):
        self.exact = {}  # (layer, "k" or "v"): [(1, Hkv, T, d) of each chunk]
        super().reset()

    def update(self, layer, q, k, v, positions):
        dtype = k.dtype if k.dtype.itemsize == 2 else torch.float16
        stored = k.to(dtype)
        if self.method.rope == "post":
            stored = self.rope.rotate(stored, positions)
        self.exact.setdefault((layer, "k"), []).append(stored)
        self.exact.setdefault((layer, "v"), []).append(v.to(dtype))
        return super().update(layer, q, k, v, positions)


def digits(row):
    """Numbers (d) to three digits of the largest: [exponent, whole numbers ..], each times 10**exponent."""
    largest = row.abs().max().item()
    exponent = math.floor(math.log10(largest)) - 2 if largest > 0 else 0
    return [exponent, *(round(x / 10 ** exponent) for x in row.tolist())]


def rows_of(cache, layer, kind, head):
    """One KV head's rows after the whole text: exact, as they are read, and what is held of the coded ones."""
    held = getattr(cache.layers[layer], "keys" if kind == "k" else "values")
    read = held.read()[0, head].float()  # (T, d)
    exact = torch.cat(cache.exact[layer, kind], dim=2)[0, head].float()  # (T, d), or without a prefix
    exact = torch.cat([read[:len(read) - len(exact)], exact])  # (T, d)
    found = {"exact": [digits(row) for row in exact], "read": [digits(row) for row in read], "bytes": [], "codes": []}
    if held.codes is not None:
        packed = held.codes.packed[0]  # (1 or Hkv, C, bytes)
        packed = packed[min(head, len(packed) - 1)].cpu()  # (C, bytes)
        bits, d = held.codec.bits, exact.shape[1]
        if packed.dtype == torch.uint8:
            found["bytes"] = [bytes(row.tolist()).hex() for row in packed]
        # one code a channel, each below 10, so that a digit stands for it
        if bits <= 3 and packed.shape[1] == row_bytes(d, bits):
            found["codes"] = ["".join(map(str, row)) for row in unpack(packed, bits, d).tolist()]
    return found


def words_of(ids, tokenizer):
    """The text of each token, with the blanks around it."""
    words, before = [], ""
    for i, token in enumerate(ids):
        read = tokenizer.decode(ids[:i + 1])
        words.append("<s>" if token == tokenizer.bos_id else read[len(before):])
        before = read
    return words


def shown_of(text, n_methods, T):
    """The layers, around the shown one, and the KV heads whose rows the page holds: not more than MOST numbers."""
    config = text.model.config
    n_pairs = MOST // (n_methods * 4 * T * config.head_dim)  # of a layer and a head: K and V, exact and read
    heads = list(range(max(1, min(config.num_key_value_heads, n_pairs))))
    n_layers = max(1, min(config.num_hidden_layers, n_pairs // len(heads)))
    first = min(text.layer, config.num_hidden_layers - n_layers)
    return list(range(first, first + n_layers)), heads


def content(text, tokenizer):
    """All that the page shows."""
    tokens, marks = text.begin(LONGEST)  # (T) both
    first = Text(text.model, tokens[None], marks[None], text.layer)
    channel = outliers.measure(first)[0]["channel"] if marks.any() else 0
    layers, heads = shown_of(text, len(text.methods), len(tokens))
    blocks = walk(text.model, tokens)[layers[0]:layers[-1] + 1]
    page = {
        "tokens": words_of(tokens.tolist(), tokenizer),
        "sinks": marks.nonzero()[:, 0].tolist(),
        "layers": layers, "heads": heads, "shown": text.layer,
        "channel": channel,
        "attention": {at.layer: [[round(x, 3) for x in head] for head in sink_scores(at).tolist()] for at in blocks},
        "sizes": {at.layer: [round(x, 2) for x in at.hidden[:, channel].abs().tolist()] for at in blocks},
        "methods": {},
    }
    for label, method in text.methods.items():
        cache, history = read_text(text, method, tokens, ExactRows)
        rows = {layer: {kind: {head: rows_of(cache, layer, kind, head) for head in heads} for kind in "kv"}
                for layer in layers}
        page["methods"][label] = {"history": history, "bits": f"{method.k_bits:g}", "rows": rows}
    return page


def write(path, text, tokenizer, name):
    """Write the page of a model of this name, whole or not at all."""
    page = {"about": f"Model {name}; where the keys of layer {text.layer} are.", **content(text, tokenizer)}
    data = json.dumps(page, separators=(",", ":")).encode()
    packed = base64.b64encode(gzip.compress(data, mtime=0)).decode()
    html = TEMPLATE.read_text().replace("DATA", packed, 1)
    files.write(path, lambda part: part.write_text(html), "tinykv-page")
    return page
