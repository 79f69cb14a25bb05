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

from tinykv import UserError, storage
from tinykv.analysis.outliers import channels_of
from tinykv.analysis.sinks import sink_scores
from tinykv.analysis.timeline import read_text, states_of
from tinykv.analysis.walk import Text, walk
from tinykv.cache import KVCache
from tinykv.codecs.base import row_bytes, unpack

LONGEST = 128  # tokens of the page
LARGEST = 500_000  # bytes of the page
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


def content(text, methods, tokenizer):
    """All that the page shows. methods: {label: Method}."""
    tokens, marks = text.begin(LONGEST)  # (T) both
    first, config = Text(text.model, tokens[None], marks[None], text.layer), text.model.config
    channel = channels_of(first)[0] if marks.any() else 0
    blocks = walk(text.model, tokens)
    layers, heads = list(range(config.num_hidden_layers)), list(range(config.num_key_value_heads))
    page = {
        "tokens": words_of(tokens.tolist(), tokenizer),
        "sinks": marks.nonzero()[:, 0].tolist(),
        "layers": layers, "heads": heads, "shown": text.layer,
        "channel": channel,
        "attention": {at.layer: [[round(x, 3) for x in head] for head in sink_scores(at).tolist()] for at in blocks},
        "sizes": {at.layer: [round(x, 2) for x in at.hidden[:, channel].abs().tolist()] for at in blocks},
        "methods": {},
    }
    for label, method in methods.items():
        history = []
        for cache in read_text(text, method, tokens, ExactRows):
            history.append((len(cache), states_of(cache.layers[text.layer].keys)))
        rows = {layer: {kind: {head: rows_of(cache, layer, kind, head) for head in heads} for kind in "kv"}
                for layer in layers}
        page["methods"][label] = {"history": history, "bits": f"{method.k_bits:g}", "rows": rows}
    return page


def write(path, text, methods, tokenizer, about):
    """Write the page, whole or not at all. It holds as many layers, and then heads, as fit in LARGEST bytes.

    about: a line below the title.
    """
    page = {"about": about, **content(text, methods, tokenizer)}
    while len(html := html_of(page)) > LARGEST:
        if not smaller(page):
            raise UserError(f"the page takes {len(html):,} bytes with one layer and one head, and may take "
                            f"{LARGEST:,}; give fewer methods")
    storage.write(path, lambda part: Path(part).write_text(html))
    return page


def smaller(page):
    """Leave out a layer, but not the shown one, or else a head; False if there is but one of each."""
    others = [layer for layer in page["layers"] if layer != page["shown"]]
    if others:
        page["layers"].remove(others[0])
        for method in page["methods"].values():
            del method["rows"][others[0]]
        return True
    if len(page["heads"]) > 1:
        head = page["heads"].pop()
        for method in page["methods"].values():
            for kind in "kv":
                del method["rows"][page["shown"]][kind][head]
        return True
    return False


def html_of(page):
    data = json.dumps(page, separators=(",", ":")).encode()
    packed = base64.b64encode(gzip.compress(data, mtime=0)).decode()
    return TEMPLATE.read_text().replace("DATA", packed, 1)
