"""The cache whose decoding step torch compiles: `--attention compiled`.

A step of decoding reads every cached token once. To decode the codes, write the numbers to memory and read them again
for the products takes longer than to read 16 bits. `torch.compile` makes one loop of a codec's `pieces` (pieces.py) and
of the sums below: up to 16 neighbours of a row live in a register, as in kernels.py, but without a kernel by hand. It
needs a C++ compiler on a CPU, and Triton on a GPU. What is compiled is `scores` and `outputs`: sums over coded keys,
and over coded values.
"""
import math
import warnings
from copy import copy
from functools import cache
from weakref import WeakKeyDictionary

import torch
from torch.nn.functional import scaled_dot_product_attention

from tinykv import UserError
from tinykv.cache import KVCache, LayerCache
from tinykv.lab.pieces import SIMDLEN, apart, decoded, pieces, rotation
from tinykv.methods.antkv import AnTKV, equation_5
from tinykv.model import turned

LEAST = 2 ** 18  # coded numbers of the keys; fewer are decoded, and torch's own attention reads them sooner
APART = WeakKeyDictionary()  # {codes: their matrix of `sparse`, or None}; no cache holds it, as torch cannot copy it
TILE = 64  # tokens whose cosines and sines stay in the processor's cache
# no part of a loop is written to memory because it is long, and a product and a sum are one instruction
SETTINGS = dict.fromkeys(["realize_reads_threshold", "realize_opcount_threshold", "realize_cpu_opcount_threshold",
                          "realize_acc_reads_threshold", "realize_cpu_acc_reads_threshold"], 2 ** 20)
SETTINGS["cpp.enable_floating_point_contract_flag"] = "fast"
SETTINGS["assert_indirect_indexing"] = False  # a code of b bits is below the 2^b centroids of its codebook


def scores(q, codec, codes, cos=None, sin=None):
    """Queries q (B, Hkv, R, d) times the n coded keys: (B, Hkv, R, n). cos, sin (n, d/2): RoPE's tables, if keys are
    stored before it. Sums, not `@`: a product of matrices would need the keys in memory."""
    d, turn = q.shape[-1], rotation(codec)
    # RoPE turns the keys themselves, which no rotation of the query replaces
    K = (pieces if turn is None or cos is None else decoded)(codec, codes, d // 2)  # (B, Hkv, tokens, P, w)
    if turn is not None and cos is None:
        q = q @ turn.to(q)
    *tokens, P, w = K.shape[2:]
    of_row = K.unbind(-2)  # (B, Hkv, tokens, w) each
    if cos is not None:
        # the angle of position i is that of the last multiple of TILE and that of the rest: two small tables
        i = torch.arange(len(cos), device=q.device)  # (n)
        cos_a, sin_a = cos[::TILE][i // TILE], sin[::TILE][i // TILE]  # (n, d/2) both
        cos_b, sin_b = cos[:TILE][i % TILE], sin[:TILE][i % TILE]  # (n, d/2) both
        cos, sin = cos_a * cos_b - sin_a * sin_b, sin_a * cos_b + cos_a * sin_b  # (n, d/2) both
        cos, sin = (x.view(*tokens, P // 2, w) for x in (cos, sin))
        x, y = K.chunk(2, dim=-2)  # (B, Hkv, tokens, P/2, w) both
        of_row = *(x * cos - y * sin).unbind(-2), *(y * cos + x * sin).unbind(-2)
    # a sum for each query head: one loop for all of them, which decodes a number once
    of_heads = []
    for of_head in q.unbind(2):  # (B, Hkv, d)
        of_head = of_head.view(*of_head.shape[:2], *[1] * len(tokens), d).split(w, dim=-1)
        terms = sum(x * y for x, y in zip(of_head, of_row))  # (B, Hkv, tokens, w)
        of_heads.append(terms.sum(-1))  # (B, Hkv, tokens)
    return torch.stack(of_heads, dim=2).flatten(3)


def outputs(p, codec, codes):
    """Weights p (B, Hkv, R, n) times the n coded values: (B, Hkv, R, d)."""
    of_row, turn = pieces(codec, codes, 0).unbind(-2), rotation(codec)  # (B, Hkv, tokens, w) each
    of_heads = []
    for of_head in p.unbind(2):  # (B, Hkv, n)
        of_head = of_head.view(*of_row[0].shape[:-1], 1)  # (B, Hkv, tokens, 1)
        sums = [(of_head * x).flatten(2, -2).sum(2) for x in of_row]  # (B, Hkv, w) each
        of_heads.append(torch.cat(sums, dim=-1))  # (B, Hkv, d)
    out = torch.stack(of_heads, dim=2)
    return out if turn is None else out @ turn.to(out)


@cache
def compiled(function, simdlen):
    """`scores` or `outputs` as torch compiles it: a loop for each kind of codec, whose numbers are its constants."""
    from torch._inductor.compile_fx import compile_fx  # only now: it takes seconds
    settings = {name: value for name, value in SETTINGS.items() if name in torch._inductor.list_options()}

    def compile_graph(graph, inputs):
        # sums of any length are plain loops: in sums that are known to be long, torch calls a helper for each number
        with torch.fx.experimental._config.patch(backed_size_oblivious=True):
            return compile_fx(graph, inputs, config_patches=settings | {"cpp.simdlen": simdlen})
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    return torch.compile(function, backend=compile_graph, dynamic=False)


def run(function, x, rows, *tables):
    """`scores` or `outputs` of the coded tokens of a CachedRows: compiled, once for all lengths, and a matrix of what
    `pieces` leave out, made when tokens are quantized."""
    if rows.codes not in APART:
        found = apart(rows.codec, rows.codes)
        APART[rows.codes] = found and sparse(*found, rows.recent.shape, rows.n_coded, rows.kind, *tables)
    # integer zero points become floats before the loop: torch makes no vectors of int16
    codes = rows.codes
    if getattr(codes, "zero", codes.packed).dtype == torch.int16:
        codes = copy(codes)
        codes.zero = codes.zero.float()
    for tensor in vars(codes).values():
        torch._dynamo.maybe_mark_dynamic(tensor, 2)
    for table in tables:
        torch._dynamo.maybe_mark_dynamic(table, 0)
    if function is outputs:
        torch._dynamo.maybe_mark_dynamic(x, 3)
    out = compiled(function, SIMDLEN.get(type(rows.codec)))(x, rows.codec, codes, *tables)
    return out if (matrix := APART[rows.codes]) is None else out + product(matrix, x)


def sparse(places, x, shape, n, kind, cos=None, sin=None):
    """Numbers x at places in (B, Hkv, n, d) as a matrix for `product`: (B * Hkv * n, B * Hkv * d) of keys; of values it
    is transposed. shape: (B, Hkv, .., d). cos, sin (n, d/2): of keys before RoPE, whose numbers it turns."""
    B, Hkv, _, d = shape
    row, channel = places // d, places % d  # (N) both
    if cos is not None:  # each number also reaches the other channel of its pair
        token, pair = row % n, channel % (d // 2)  # (N) both
        cos, sin = cos[token, pair], sin[token, pair] * torch.where(channel < d // 2, 1, -1)  # (N) both
        x = torch.cat([x * cos, x * sin])  # (2 N)
        row, channel = row.repeat(2), torch.cat([channel, (channel + d // 2) % d])  # (2 N) both
    index = torch.stack([row, row // n * d + channel])  # (2, N or 2 N)
    size = B * Hkv * n, B * Hkv * d
    if kind == "v":
        index, size = index.flip(0), size[::-1]
    with warnings.catch_warnings():  # torch calls these matrices a beta
        warnings.simplefilter("ignore")
        return torch.sparse_coo_tensor(index, x, size, check_invariants=False).to_sparse_csr()


def product(matrix, x):
    """A matrix of `sparse` times x (B, Hkv, R, columns) -> (B, Hkv, R, rows)."""
    B, Hkv, R, _ = x.shape
    out = matrix @ x.transpose(2, 3).reshape(-1, R)  # (B * Hkv * rows, R)
    return out.view(B, Hkv, -1, R).transpose(2, 3)


class CompiledLayer(LayerCache):
    """A layer whose `update` returns, for one new token of each sequence, the attention's output (B, H, 1, d)."""

    def for_attention(self, q, seen):
        if q.shape[2] > 1:
            return self.read()
        H, Hkv, d = q.shape[1], self.keys.recent.shape[1], q.shape[3]
        window = self.method.config.sliding_window or self.length
        q = self.rope.rotate(q, seen)  # (B, H, 1, d)
        if self.is_short:
            K, V = (x[:, :, -window:] for x in self.read())  # (B, Hkv, up to window, d) both
            return scaled_dot_product_attention(q, K, V, enable_gqa=True)
        q = q.float() / math.sqrt(d)
        q = q.reshape(-1, Hkv, H // Hkv, d)  # (B, Hkv, R, d)
        s = self.scores(q)  # (B, Hkv, R, S)
        s[..., :max(0, self.length - window)] = -math.inf
        p = s.softmax(-1)
        if self.is_choosing and type(self.method).score is AnTKV.score:
            self.sum_scores(p, q.norm(dim=-1) * math.sqrt(d))  # before `output` writes into p
        return self.output(p).reshape(-1, H, 1, d).to(self.dtype)

    def scores(self, q):
        """q (B, Hkv, R, d) -> (B, Hkv, R, S): coded | recent, and on top of them the kept tokens, as in
        `CachedRows.read`."""
        rows, n, tables = self.keys, self.keys.n_coded, ()
        recent, kept = rows.recent.float(), rows.kept_rows  # (B, Hkv, r, d), (B, Hkv, p, d)
        if self.method.rope == "pre":
            cos, sin = self.rope.cos_sin(0, self.length, q.device)  # (S, d) both
            recent = turned(recent, cos[n:], sin[n:])
            tables = [x[:n, x.shape[1] // 2:] for x in (cos, sin)]  # (n, d/2) both
        s = q @ recent.transpose(-2, -1)  # (B, Hkv, R, r)
        if n:
            s = torch.cat([run(scores, q, rows, *tables), s], dim=-1)  # (B, Hkv, R, S)
        if kept is not None:
            index = places(rows, q)  # (B, Hkv, R, p)
            kept = kept.float()
            if self.method.rope == "pre":
                kept = turned(kept, cos[index[:, :, 0]], sin[index[:, :, 0]])
            s.scatter_(-1, index, q @ kept.transpose(-2, -1))
        return s

    def output(self, p):
        """p (B, Hkv, R, S) -> the weighted sum of the values, (B, Hkv, R, d)."""
        rows, n, out = self.values, self.values.n_coded, 0
        if rows.kept_rows is not None:
            index = places(rows, p)  # (B, Hkv, R, p)
            first = index[:, :, :1]  # (B, Hkv, 1, p)
            times = (first[..., :, None] == first[..., None, :]).sum(-1)  # (B, Hkv, 1, p): how often a head names it
            out = p.gather(-1, index) / times @ rows.kept_rows.float()
            p.scatter_(-1, index, 0)
        out = out + p[..., n:] @ rows.recent.float()  # (B, Hkv, R, d)
        if n:
            out = out + run(outputs, p[..., :n].contiguous(), rows)
        return out

    def next_length(self):
        """An evaluation, too, reads a stream token by token."""
        return self.length + 1

    @property
    def is_short(self):
        """Whether a loop gains nothing."""
        B, Hkv, _, d = self.keys.recent.shape
        return B * Hkv * d * min(self.keys.n_coded, self.values.n_coded) < LEAST

    def sum_scores(self, p, q_norm):
        """AnTKV's scores of the tokens in full precision, of weights p (B, Hkv, R, S) and |q| (B, Hkv, R)."""
        for i, rows in enumerate((self.keys, self.values)):
            parts = [p[..., rows.n_coded:]]  # recent | kept
            if rows.kept_rows is not None:
                parts.append(p.gather(-1, places(rows, p)))  # (B, Hkv, R, p)
            scores = [equation_5(A, q_norm)[i] for A in parts]  # (B, Hkv, r or p) each
            rows.finite = rows.finite & torch.stack([x.isfinite().all() for x in scores]).all()
            rows.accumulate(scores[0], scores[1] if scores[1:] else None)

    def score(self, q, seen, attended):
        if q.shape[2] > 1 or self.is_short or type(self.method).score is not AnTKV.score:
            super().score(q, seen, self.read() if isinstance(attended, torch.Tensor) else attended)


def places(rows, q):
    """Each kept token's position: (B, Hkv, R, p)."""
    return rows.kept_positions.long()[:, :, None].expand(*q.shape[:3], -1)  # kept_positions (B, 1 or Hkv, p)


class CompiledCache(KVCache):
    """A KVCache that returns the output of attention for one new token, and keys and values for more."""
    layer_class = CompiledLayer
    attend = KVCache.update  # one new token of each sequence -> the attention's output for it, (B, H, 1, d)

    def update(self, layer, q, k, v, seen):
        attended = super().update(layer, q, k, v, seen)
        if isinstance(attended, torch.Tensor):  # an output, which would be taken apart into keys and values
            raise UserError('a CompiledCache computes attention; call model.use_attention("compiled") first')
        return attended

    def reset(self):
        check_compiler(self.model.lm_head.weight.device)
        super().reset()


@cache
def check_compiler(device):
    """UserError where torch cannot compile for the device."""
    try:
        torch.compile(lambda x: x + 1)(torch.zeros(2, device=device))
    except Exception as error:
        first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UserError("--attention compiled needs a C++ compiler, such as g++, and Python's header files, or on a "
                        f"GPU Triton; use --attention fused. torch says: {first}") from error
