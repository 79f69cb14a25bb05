"""A cell of the matrix, and what is built from it: a tiny model, a text, a calibrated method, a cache.

Models are random. One token, MARK, has a huge embedding in one channel. It plants the outlier that kvsink looks for, at
positions of our choice. Where a method has a prefix, texts begin with it: T counts its tokens, and their logits, which
are not computed, are zeros.
"""
import copy
import functools
import itertools
import math
import os
import sys
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from unittest.mock import patch

import oracles
import pytest
import torch
from planted import few_tries

from tinykv import UserError
from tinykv.cache import KVCache, LayerCache, made_with
from tinykv.calibrate import calibrate
from tinykv.codecs.schemes import SCHEMES
from tinykv.lab.run.settings import load_class, settings_of
from tinykv.methods.base import CodecMethod
from tinykv.methods.fp16 import FP16
from tinykv.methods.intactkv import Prefix
from tinykv.methods.registry import METHODS
from tinykv.model import Llama, LlamaConfig

VOCAB, D, L, H, d = 41, 32, 2, 4, 16
MARK, CHANNEL = VOCAB - 1, 5  # the token with the planted outlier, and the outlier's channel
G = 8  # tokens of a block, and of a group
SETTINGS = {
    "k_bits": 2, "v_bits": 3, "group_size": G, "preserve": 3, "prefix": (11, MARK, 6, 11),
    "emergence_layer": 0, "outlier_channel": CHANNEL, "outliers": 5.0,  # 1 to 3 of the channels that a token has here
    "outlier_num": 2, "extra_pool": 2, "skip_layers": 1,  # small, so that some pools fill up and some do not
    "vq": "d4m8", "anchors": "4",  # 10 vectors a centroid; a token's codes, of one head, are 1.5 bytes
}
# The methods that expected.py has an oracle of. Any other goes through the matrix as a method of one's own does.
ORACLES = "fp16 rtn pfn kvsink kivi ott oscar skvq intactkv kvquant cq antkv".split()
NAMES = {cls: name for name, cls in METHODS.items() if name in ORACLES}
# All tokens of a text, but not all of a calibration window.
KEEP_ALL = {"preserve": 22, "threshold": None, "outlier_num": 22, "skip_layers": 0, "anchors": "100%"}


def pipe(path):
    """A file that may never end."""
    special(lambda: os.mkfifo(path))


def link(path, target):
    special(lambda: path.symlink_to(target))


def special(make):
    try:
        make()
    except (AttributeError, OSError):
        pytest.skip("this system makes no pipe in a folder, or no link")


@contextmanager
def example_of(named):
    """The file of a class, "FILE:Class", which adds schemes that other tests do not know. The blocks of the class are
    as short as the cells' own."""
    load_class.cache_clear()
    with patch.dict(SCHEMES):
        cls = load_class(named)
        cls.block = G
        yield sys.modules[cls.__module__]
    load_class.cache_clear()


# ---- models and texts

@functools.cache
def model_of(heads_per_kv, dtype=torch.float32, width=d):
    """width: channels of a head."""
    torch.manual_seed(heads_per_kv)
    model = Llama(LlamaConfig(VOCAB, D, 48, L, H, H // heads_per_kv, width, 4096, bos_token_id=1))
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.normal_(std=1.5 * p.shape[1] ** -0.5)
        model.model["embed_tokens"].weight.normal_()
        model.model["embed_tokens"].weight[MARK, CHANNEL] = 40.0
    return model.to(dtype)


def tokens_of(batch, T, seed=0):
    """Random tokens (B, T), with marks at positions that differ from row to row: some early, some late."""
    rng = torch.Generator().manual_seed(100 * seed + T)
    tokens = torch.randint(0, MARK, (batch, T), generator=rng)
    for row in tokens:
        row[torch.randint(0, T, (1 + T // 8,), generator=rng)] = MARK
    return tokens


def calibration_windows():
    return tokens_of(2, 40, seed=7)


# ---- methods

@functools.cache
def takes(cls, scheme=None):
    """The names of a method's settings, without those of other schemes."""
    return set(settings_of(cls, scheme))


def schemes_of(cls):
    """The schemes that a method can stand on; [None] if it takes none."""
    if "scheme" not in settings_of(cls):
        return [None]
    found = []
    for scheme in SCHEMES:
        try:
            cls(model_of(1).config, scheme=scheme)
        except UserError:
            continue
        found.append(scheme)
    return found


def build(case):
    """A case's method as its constructor leaves it, in blocks of G tokens."""
    cls, given = case.cls, dict(case.settings)
    wanted = {**SETTINGS, "recent": case.recent, "block": G, "scheme": case.scheme, "formula": case.formula, **given}
    wanted["prefix"] = Prefix("a few tokens", list(wanted["prefix"]))
    settings = {name: value for name, value in wanted.items() if name in case.takes}
    # the bits of a method that we know nothing about are its own, and a codec of one's own may have other bits
    bits_of_its_own = {name: value for name, value in settings.items() if name not in {"k_bits", "v_bits"} - set(given)}
    config, ours = model_of(case.heads_per_kv).config, case.known or issubclass(cls, CodecMethod)
    try:
        method = cls(config, **(settings if ours else bits_of_its_own))
    except UserError:
        if case.known:
            raise
        method = cls(config, **bits_of_its_own)
    if ours and "recent" not in case.takes:
        method.recent = case.recent
    if ours and "block" not in case.takes:
        method.block = G
    return method


def take_tables(method, other):
    """What calibration found for another method, which may have other settings, or 16 bits of one kind."""
    vars(method).update({name: getattr(other, name) for name in method.found})
    for (_, _, codec), (_, _, calibrated) in zip(method.each_codec(), other.each_codec()):
        vars(codec).update({name: getattr(calibrated, name) for name in codec.tables})
    method.calibrated_on = other.calibrated_on[0], made_with(method), method.each_codec()


@functools.cache
def build_and_calibrate(case):
    """The same, calibrated in float32. One object serves all caches, as the interface promises."""
    method, model = build(case), model_of(case.heads_per_kv)
    # neither the newest tokens nor 16 bits of the other kind change what is calibrated
    same_tables = replace(case, recent=0, settings=tuple(s for s in case.settings if s[1] != 16))
    if method.needs_calibration and case.known and same_tables != case:
        take_tables(method, build_and_calibrate(same_tables))
    elif method.needs_calibration:
        with pytest.MonkeyPatch.context() as patch:
            few_tries(patch)
            calibrate(model, method, calibration_windows())
    if method.prefix:
        method.prefix.fill(model, model)
    return method


@functools.cache
def as_it_comes(case):
    """A case's method with its own bits, groups and blocks, and a model with heads as wide as those of a small LLaMA,
    for which it is calibrated. Scales and zero points are few then."""
    model, settings = model_of(case.heads_per_kv, width=64), {"scheme": case.scheme, "vq": "d4m8"}
    method = case.cls(model.config, **{name: value for name, value in settings.items() if name in case.takes})
    if method.needs_calibration:
        calibrate(model, method, tokens_of(4, 256, seed=7))
    return method, model


# ---- a cell

@dataclass(frozen=True)
class Case:
    """One cell of the matrix."""
    cls: type  # one of METHODS, or a class given by --method
    scheme: str | None = None
    formula: str = "offset"
    protocol: str = "stream"
    heads_per_kv: int = 2  # query heads that share a KV head
    batch: int = 3
    length: str = "2G+5"
    recent: int = 0
    settings: tuple = ()  # (name, value) of others than SETTINGS has
    dtype: torch.dtype = torch.float32  # of the model
    like: type | None = None  # given by --as: the built-in method that `cls` has to equal

    def __str__(self):
        recent = f"recent{self.recent}" if self.recent else None
        formula = self.formula if self.formula != "offset" else None
        settings = [f"{name}={value}" for name, value in self.settings if name in self.takes]
        shape = [f"gqa{self.heads_per_kv}", f"b{self.batch}", recent, self.length]
        words = [self.cls.__name__.lower(), self.scheme, formula, *settings, self.protocol, *shape]
        return "-".join(word for word in words if word)

    @property
    def oracle(self):
        """The name of the method whose answers are known; None for one that has no oracle."""
        return NAMES.get(self.cls, NAMES.get(self.like))

    @property
    def known(self):
        return self.oracle is not None

    @property
    def takes(self):
        """The names of its method's settings, without those of other schemes."""
        return takes(self.cls, self.scheme)

    # its model and its text

    @property
    def model(self):
        return model_of(self.heads_per_kv, self.dtype)

    def setting(self, name):
        return {**SETTINGS, **dict(self.settings)}.get(name)

    @property
    def T(self):
        G = self.method().block
        lengths = {"1": 1, "G-1": G - 1, "G": G, "G+1": G + 1, "2G+5": 2 * G + 5, "6G+3": 6 * G + 3}
        return max(lengths[self.length], len(self.prefix) + 1)

    @property
    def prefix(self):
        """The tokens that the method has every text begin with."""
        return self.setting("prefix") if "prefix" in self.takes else ()

    def text(self, tokens):
        """Tokens (B, T), made to begin with the prefix."""
        n = len(self.prefix)
        prefix = torch.tensor(self.prefix, dtype=torch.long).expand(len(tokens), n)
        return torch.cat([prefix, tokens[:, n:]], dim=1)

    def tokens(self, seed=0):
        return self.text(tokens_of(self.batch, self.T, seed))

    # its method

    def method(self, **settings):
        """The method, calibrated. settings: others than the cell's."""
        return build_and_calibrate(self.recipe(**settings))

    def uncalibrated(self):
        """A method of its own, as the constructor leaves it."""
        return build(self.recipe())

    def recipe(self, **settings):
        """This case with the fields that decide how a method is built, and no others, so that cells share methods."""
        settings = {**dict(self.settings), **settings}
        settings = tuple((name, value) for name, value in settings.items() if name in self.takes)
        return Case(self.cls, self.scheme, self.formula, heads_per_kv=self.heads_per_kv, recent=self.recent,
                    settings=settings, like=self.like)

    def fp16(self, rope="post"):
        """The fp16 method beside this cell's: the same blocks, the same model, keys stored alike."""
        method = copy.copy(build_and_calibrate(Case(FP16, heads_per_kv=self.heads_per_kv, recent=self.recent)))
        method.rope = rope
        return method

    def events(self, kind, sizes):
        """When keys, or values, are quantized if a text comes in chunks of these sizes: [oracles.Event]."""
        recent, block = self.recent, (kind == "v" and self.setting("v_block")) or G
        if not self.known:
            method = self.method()
            recent, block = method.recent, method.block_of(kind)
        return oracles.quantization_events(self.protocol, sizes, recent, block)

    # its cache

    def new_cache(self, method, model=None):
        return KVCache(model or self.model, method, self.protocol)

    def run(self, method, tokens, cache=None, sizes=None):
        """-> logits (B, T, vocab) of a text, and its cache. sizes: tokens of each chunk, if not as `chunk_sizes`."""
        cache = self.new_cache(method) if cache is None else cache
        n = len(method.prefix.ids) if method.prefix else 0
        assert torch.equal(cache.expect(tokens)[0], tokens[:, n:])
        sizes = sizes or chunk_sizes(method, cache.protocol, tokens.shape[1])
        # the prefix comes with the first chunk, and the cache strips it
        ends = [end for end in itertools.accumulate(sizes) if end > n]
        with torch.no_grad():
            logits = torch.cat([self.model(chunk, cache) for chunk in tokens.tensor_split(ends[:-1], dim=1)], dim=1)
        return torch.nn.functional.pad(logits, (0, 0, n, 0)), cache

    def run_watched(self, method, tokens, sizes=None):
        """The same, with a `Watch` in the place of the cache."""
        return self.run(method, tokens, Watch(self, self.new_cache(method)), sizes)

    def exact_logits(self, tokens, rope=None):
        """The logits that the fp16 method gives of the same text after the same prefix, read in the same chunks. rope:
        where keys are stored, if not as the cell's method has it."""
        own = self.method()
        method = self.fp16(rope or own.rope)
        method.prefix = own.prefix
        return self.run(method, tokens, sizes=chunk_sizes(own, self.protocol, self.T))[0]


def chunk_sizes(method, protocol, T):
    """One chunk under `paper`; in a stream, chunks that end where a block is quantized."""
    if protocol == "paper":
        return [T]
    chunk = chunk_of(method)
    sizes = [min(T, method.recent + chunk)]
    while sum(sizes) < T:
        sizes.append(min(chunk, T - sum(sizes)))
    return sizes


def chunk_of(method):
    """Chunks of this many tokens, the first longer by `recent`, end wherever keys or values are quantized."""
    return math.gcd(method.block_of("k"), method.block_of("v"))


def rotated_keys(model, method, k):
    """Keys as attention reads them. k (B, Hkv, T, d), as they are stored, or decoded."""
    if method.rope == "pre":
        k = model.rope.rotate(k.float())
    return k.to(model.lm_head.weight.dtype)


def each_rows(cache):
    """[(layer, "k" or "v", its `CachedRows`)]."""
    layers = enumerate(cache.layers)
    return [(i, kind, rows) for i, layer in layers for kind, rows in (("k", layer.keys), ("v", layer.values))]


def kept_of(rows):
    """The positions that are kept, by sequence and head."""
    B, Hkv = rows.recent.shape[:2]
    if rows.kept_positions is None:
        return [[set()] * Hkv] * B
    return [[set(positions) for positions in heads] for heads in rows.kept_positions.expand(B, Hkv, -1).tolist()]


# ---- what happened in a cell

class Watch:
    """A cache, with notes: what goes into each layer, what comes back, and every block's output."""

    def __init__(self, case, cache):
        self.case, self.cache, self.protocol = case, cache, cache.protocol
        # by layer, a list with an entry for each chunk: q, (k, v), (K, V), what `read` gave then, a block's output
        self.queries, self.given, self.returned, self.held, self.outputs = (defaultdict(list) for _ in range(5))
        self.kept = {}  # (layer, kind, tokens seen): what was kept then, as `kept_of` has it

    # what a model asks of its cache

    def __len__(self):
        return len(self.cache)

    def expect(self, tokens):
        return self.cache.expect(tokens)

    def update(self, layer, q, k, v, seen):
        self.queries[layer].append(q)
        self.given[layer].append((k, v))
        self.returned[layer].append(self.cache.update(layer, q, k, v, seen))
        now = self.layers[layer]
        self.held[layer].append(now.read())
        self.kept[layer, "k", now.length], self.kept[layer, "v", now.length] = kept_of(now.keys), kept_of(now.values)
        return self.returned[layer][-1]

    def observe(self, layer, hidden):
        self.outputs[layer].append(hidden)
        self.cache.observe(layer, hidden)

    # what the notes say

    @property
    def layers(self):
        return self.cache.layers

    def exact(self, layer):
        """All keys, before RoPE, and values of a layer, (B, Hkv, T, d) both, in 16 bits."""
        k, v = (torch.cat(chunks, dim=2) for chunks in zip(*self.given[layer]))
        if k.dtype.itemsize != 2:
            k, v = k.half(), v.half()
        if self.case.prefix:
            of_prefix = prefix_rows(self.case.heads_per_kv, self.case.prefix)[layer]
            k, v = (torch.cat([p.expand(len(x), -1, -1, -1), x], dim=2) for p, x in zip(of_prefix, (k, v)))
        return k, v

    def stored(self, layer):
        """The same, with keys as the method stores them."""
        k, v = self.exact(layer)
        stored_k = self.case.model.rope.rotate(k) if self.cache.method.rope == "post" else k
        return stored_k, v

    def exact_read(self, layer):
        """The same as `LayerCache.read` would give them, if nothing were quantized."""
        k, v = self.stored(layer)
        return rotated_keys(self.case.model, self.cache.method, k), v.to(self.case.dtype)

    def output(self, layer):
        """The output of a block for all tokens after the prefix, (B, T, D)."""
        return torch.cat(self.outputs[layer], dim=1)

    def events(self, kind):
        """When keys, or values, were quantized: [oracles.Event]."""
        first, *others = [k.shape[2] for k, _ in self.given[0]]
        return self.case.events(kind, [len(self.case.prefix) + first, *others])  # the prefix is in the first chunk

    def n_quantized(self, kind):
        """How many keys, or values, of a layer are quantized at the end."""
        return max((event.end for event in self.events(kind)), default=0)


@functools.cache
def prefix_rows(heads_per_kv, ids):
    """By layer, k and v (1, Hkv, n, d) of the tokens in 16 bits, before RoPE: what the model hands to a cache."""
    case = Case(FP16, heads_per_kv=heads_per_kv)
    _, watch = case.run_watched(case.fp16(), torch.tensor([ids]), sizes=[len(ids)])
    return [watch.exact(layer) for layer in range(L)]


# ---- a layer without its model

def new_layer(method, layer):
    return LayerCache(layer, method, model_of(2).rope, "stream", SimpleNamespace())


def quantize_oldest(layer, n):
    """What `LayerCache.update` does when n tokens are to be quantized."""
    layer.keep(n, n)
    layer.keys.quantize(n)
    layer.values.quantize(n)
