"""What is wrong on purpose: of a file of tinykv/, one text in the place of another, and who has to notice.

    FAULTS = {file: [(old text, new text, check, ...), ...]}

The old text occurs once. Each check passes as the project is, and fails with the new text. A fault that survives is a
hole in the tests: see test_faults.py.
"""
from functools import partial

import invariants
import test_codecs
import test_learning
import test_selection
import test_vectors
import torch
from cases import Case
from test_codecs import TERNARY, Affine, D

from tinykv.methods.antkv import AnTKV
from tinykv.methods.cq import CQ
from tinykv.methods.fp16 import FP16
from tinykv.methods.intactkv import IntactKV
from tinykv.methods.kivi import KIVI
from tinykv.methods.kvquant import KVQuant
from tinykv.methods.kvsink import KVSink
from tinykv.methods.ott import OTT
from tinykv.methods.pfn import PFN
from tinykv.methods.rtn import RTN
from tinykv.methods.skvq import SKVQ

TOKEN, CHANNEL, T_STATIC, C_STATIC = "token-dynamic", "channel-dynamic", "token-static", "channel-static"
HOLDS = "cache_holds_the_expected_rows"
PAPER, LONG, DOUBLE = {"protocol": "paper"}, {"length": "6G+3"}, {"dtype": torch.float64}


def cell(check, cls, scheme=None, **others):
    """A check of invariants.py in one cell of the matrix."""
    return partial(getattr(invariants, f"check_{check}"), Case(cls, scheme, **others))


def settings(**given):
    return {"settings": tuple(given.items())}


def formula(*arguments):
    return partial(test_codecs.check_formula, *arguments)


def constant(*arguments):
    return partial(test_codecs.test_a_constant_group_comes_back, *arguments)


def append(codec):
    return partial(test_codecs.test_append_is_concatenation, codec)


def anchors(count):
    return partial(test_selection.check_anchors, AnTKV, test_selection.CHUNKS, count)


half_to_even = test_codecs.test_rounding_is_half_to_even
pack = partial(partial, test_codecs.check_pack)
top_k = partial(test_selection.check_running_top_k, KVSink, test_selection.SIZES)
pools = partial(test_selection.check_pools, OTT, test_selection.BLOCKS, 2, 3)

FAULTS = {
    "codecs/base.py": [
        ("planes[..., i, :] * place", "planes.flip(-2)[..., i, :] * place", pack(2)),
        ("padding = -codes.shape[-1] % len(places)", "padding = 8", pack(2)),
        ("-single_bits.shape[-1] % 8", "8", pack(3)),
        ("single_bits[..., i] << i", "single_bits[..., -1 - i] << i", pack(5)),
        ("return [1, 3, 9, 27, 81]", "return [1, 4, 16, 64]", pack(TERNARY)),
        ("name: torch.cat([mine[name], theirs[name]], dim=2)",
         "name: torch.cat([mine[name], theirs[name]], dim=2) if name == 'packed' else mine[name]",
         append(Affine(2, D, "channel", 8))),
        ("Codes(x.clone())", "Codes(x.clone().bfloat16().half())",
         partial(test_codecs.test_sixteen_bits_change_nothing, torch.float16)),
        ("lo.amin(1), hi.amax(1)", "lo.amin(1), hi.amin(1)", cell(HOLDS, RTN, T_STATIC)),
    ],
    "codecs/affine.py": [
        ("torch.round((g - z) / s)", "torch.floor((g - z) / s + 0.5)", partial(half_to_even, "offset")),
        ("torch.round(g / s) + z", "torch.floor(g / s + 0.5) + z", partial(half_to_even, "integer-zero")),
        ("s = (hi - lo) / self.max_code", "s = (hi - lo) / (self.max_code + 1)", formula(2, "token", "offset")),
        ("self.range_of(g, x.shape[2], ignore)", "self.range_of(g, x.shape[2], None)",
         formula(2, "channel", "integer-zero"), cell("placeholders_do_not_matter", PFN, CHANNEL)),
        ("groups * size - T), value=True", "groups * size - T), value=False", formula(2, "channel", "offset")),
        ("s.clamp(1e-5, 6e4).half()", "s.half()", formula(2, "channel", "offset")),
        ("torch.maximum(s, floor)", "s", constant("integer-zero", "token", 2, 1.0)),
        ("zero = lo.clamp(-65504, 65504).half()", "zero = lo", formula(8, "token", "offset")),
        ("s, z = grid.scale.float(), grid.zero.float()", "z, s = grid.scale.float(), grid.zero.float()",
         formula(2, "channel", "offset")),
        ("g = g - z", "g = g + z * -3", formula(2, "token", "integer-zero")),
        ("self.scale, self.zero = self.grid(lo, hi)",
         "self.scale, self.zero = self.grid(lo.amin(0, True).expand_as(lo), hi.amax(0, True).expand_as(hi))",
         formula(2, "channel", "offset", 8, True)),
        ("axis, formula, static\n", "{'token': 'channel', 'channel': 'token'}[axis], formula, static\n",
         formula(2, "channel", "offset")),
        ("channel_ranges(rows, kept)", "channel_ranges(rows, kept & False)", cell(HOLDS, PFN, C_STATIC)),
        ("torch.stack(self.lo).amin(0)", "self.lo[-1]", cell(HOLDS, PFN, T_STATIC)),
        ("self.bits, self.max_code = known_bits(bits)", "self.bits, self.max_code = 8, 3", cell(HOLDS, RTN, TOKEN)),
        ("g = self.to_groups(x.float())",
         "self.seen = max(getattr(self, 'seen', 0), x.max().item()); g = self.to_groups(x.float() + self.seen * 1e-2)",
         cell("same_twice_and_after_reset", RTN, TOKEN, **PAPER)),
        ("hi.masked_fill(nothing, 0)", "hi.masked_fill(nothing, 0).amax(0, keepdim=True).expand_as(hi)",
         cell("batch_rows_are_independent", RTN, CHANNEL, **PAPER, **DOUBLE)),
    ],
    "codecs/__init__.py": [
        ("Exact() if bits == 16 else", "Exact() if True else", cell(HOLDS, RTN, TOKEN),
         cell("low_bits_matter", RTN, TOKEN, **PAPER), cell("the_trap", RTN, TOKEN),
         cell("sixteen_bits_of_one_kind", RTN, TOKEN, **PAPER), cell("codes_are_what_is_claimed", RTN, TOKEN)),
        ('codec("k", k_bits)', 'codec("k", v_bits)', cell(HOLDS, RTN, TOKEN)),
        ('k_axis if kind == "k"', '"token" if kind == "k"', cell(HOLDS, KIVI)),
    ],
    "codecs/clipped.py": [
        ("x[..., self.order] = rows", "x = rows", cell(HOLDS, SKVQ, **PAPER)),
        ('if self.metadata_order == "rounded-first":', "if False:", cell(HOLDS, SKVQ, **PAPER)),
        ("lo, hi, self.alpha.float(), self.centre)", "lo, hi, 1.0, self.centre)", cell(HOLDS, SKVQ, **PAPER)),
        ("lo, hi, self.alpha.float(), self.centre)", "lo, hi, self.alpha.float(), 0)", cell(HOLDS, SKVQ, **PAPER)),
        ("exact_h.to(self.dtype), exact_z.to(self.dtype)", "exact_h.half(), exact_z.half()",
         cell(HOLDS, SKVQ, **PAPER)),
        ("(rows - read)[0].pow(2)", "(rows - read)[0].abs()",
         partial(test_learning.check_clips, "none", "off", "both", "fp16")),
        ("pow(2).sum((0, 2)).sqrt()", "pow(2).sum((0, 2))",
         test_learning.test_losses_weigh_tokens_and_leave_out_what_is_kept_in_each_head),
        ("expand_as(kept).masked_fill(kept, 0)", "expand_as(kept)",
         test_learning.test_losses_weigh_tokens_and_leave_out_what_is_kept_in_each_head),
        ("torch.stack([lo, hi], dim=-1)[None]", "torch.stack([lo, lo], dim=-1)[None]",
         test_learning.test_channels_of_like_range_share_a_group),
        ("lo.where(nothing, seen_lo)", "lo", test_codecs.test_ignored_heads_do_not_count),
    ],
    "codecs/codebook.py": [
        ("q.T.unflatten(0, (len(x), -1))", "q.T.unflatten(0, (len(x), -1)).flip(-1)", cell(HOLDS, CQ, **PAPER)),
        ("packed = pack(q, self.code_bits)", "q[..., -1] = 0\n        packed = pack(q, self.code_bits)",
         cell(HOLDS, CQ, **PAPER)),
        ("place % len(self.centroids)", "place.flip(0) % len(self.centroids)", cell(HOLDS, CQ, **PAPER)),
        ("self.code_bits = m.bit_length() - 1", "self.code_bits = 8", cell(HOLDS, CQ)),
        ("self.rows.append(rows[:, held].cpu())", "self.rows[:], self.weights[:] = [rows[:, held].cpu()], []",
         test_vectors.test_calibration_holds_no_more_than_it_says),
    ],
    "codecs/nonuniform.py": [
        ("x[codes.places()] = codes.values[0, 0].float()", "pass", cell(HOLDS, KVQuant, **PAPER)),
        ("row % B, row // B,", "row // T, row % T,", cell(HOLDS, KVQuant, **PAPER)),
        ("row_end=other.row_end + self.values.shape[2]", "row_end=other.row_end", cell(HOLDS, KVQuant)),
        ("= self.normalize(x, ignore)  # (B, T, C) twice; see there", "= self.normalize(x, None)",
         cell(HOLDS, KVQuant, **PAPER)),
        ("borders = (levels[1:] + levels[:-1]) / 2", "borders = levels[1:]", cell(HOLDS, KVQuant, **PAPER)),
        ("aside = outlier | ignore", "aside = ignore", cell(HOLDS, KVQuant, **PAPER)),
        ("distance = (x - median).abs()", "distance = x - median", cell(HOLDS, KVQuant, **PAPER)),
        ("self.kept.append(kept.cpu())", "self.kept.append((kept & False).cpu())",
         partial(test_learning.test_ranges_of_keys, 1.0, 5)),
        ("weight = weight * half.float().pow(2)", "weight = weight * half.float()",
         partial(test_learning.test_levels_are_a_fixed_point_on_the_raw_numbers, "fisher-range", 4.0)),
        ("w, w * x)", "w, w * (x + 1))",
         partial(test_learning.test_levels_of_a_few_numbers, [0.0005, 0.0015, -0.5], [1, 3.0, 1], 2, [-0.5, 0.00125])),
        ("deviation / read_deviation + all_mean", "deviation / read_deviation",
         test_learning.test_q_norm_keeps_mean_and_deviation),
        ('"channel" if kind == "k"', '"token" if kind == "k"',
         partial(test_learning.test_ranges_of_keys, 0.0, 0)),
    ],
    "methods/base.py": [
        ('tables[f"{layer}.{kind}.{name}"])', 'tables[f"0.{kind}.{name}"])',
         cell("what_is_calibrated_can_be_restored", KVQuant)),
        ('tables[f"{layer}.{kind}.{name}"])', 'tables[f"{layer}.v.{name}"])',
         cell("what_is_calibrated_can_be_restored", CQ)),
        ("return self.keep_keys(layer_cache, n)", "return None", cell(HOLDS, SKVQ, **PAPER)),
        ("scores.sort(dim=-1, descending=True", "scores.sort(dim=-1, descending=False", anchors("2")),
        ("    if rows.kept_positions is not None:\n", "    if False:\n", anchors("2")),
        ("kept_scores * rows.kept_scores", "kept_scores * rows.kept_scores - 1e-3", anchors("2")),
        ("positions.gather(-1, order[..., :count])",
         "positions.gather(-1, order[:, :1, :count].expand(-1, positions.shape[1], -1))", anchors("2")),
    ],
    "methods/pfn.py": [
        ("first_tokens(layer_cache, self.preserve)",
         "(first_tokens(layer_cache, self.preserve) + 1).clamp(max=layer_cache.length - 1)", cell(HOLDS, PFN, TOKEN),
         cell("keeping_everything_is_exact", PFN, TOKEN, **PAPER)),
        ("first_tokens(layer_cache, self.preserve)",
         "first_tokens(layer_cache, self.preserve) if layer_cache.layer == 0 else None",
         cell(HOLDS, PFN, C_STATIC, **PAPER)),
    ],
    "methods/kvsink.py": [
        ("if layer_cache.layer <= self.layer:", "if layer_cache.layer < self.layer:", cell(HOLDS, KVSink, TOKEN)),
        ("layer_cache.shared.sinks[:, None]", "layer_cache.shared.sinks[:1, None]",
         cell(HOLDS, KVSink, TOKEN, **PAPER)),
        ("hidden[..., self.channel]", "hidden[..., self.channel - 1]", top_k),
        ("        if layer != self.layer:\n", "        if layer != self.layer or cache.shared.sinks is not None:\n",
         top_k, cell("chunks_equal_single_tokens", KVSink, TOKEN, **DOUBLE)),
        ("end = cache.layers[layer].length", "end = T", top_k),
        ("hidden[..., self.channel].float().abs()", "hidden[..., self.channel].float()", top_k),
        ("        if cache.shared.sinks is not None:\n", "        if False:\n", top_k),
    ],
    "methods/kivi.py": [
        ("= recent, v_block", "= recent + 1, v_block", cell(HOLDS, KIVI, recent=5)),
        ("= recent, v_block", "= recent, None", cell(HOLDS, KIVI, **settings(v_block=2))),
    ],
    "methods/ott.py": [
        ('return score if self.select == "smallest" else -score', "return -score", pools),
        ("return torch.cat([winners, extra], dim=-1)", "return winners", pools),
        ("self.size(keys.kept_rows[:, :, :n_pool])", "self.size(keys.kept_rows[:, :, :n_pool]) + 1e6", pools),
        ("keys.n_coded + smallest.indices", "smallest.indices", pools),
        ("free = self.extra_pool - extra_used", "free = 1000 - extra_used", pools),
        ("rank >= free,", "(rank >= free) | (free < candidates.shape[-1]),", pools),
        ("torch.cat([pool_scores, candidate_scores]", "torch.cat([pool_scores + 1e-3, candidate_scores]", pools),
        ("keys.float().abs().sum(-1)", "keys.float().norm(dim=-1)", cell(HOLDS, OTT)),
        ("layer_cache.layer < self.skip_layers", "layer_cache.layer < 0", pools),
        ("extra == pool[..., :1], -1", "extra == -2, -1", pools),
    ],
    "methods/skvq.py": [
        ("= preserve, recent", "= preserve, 0", cell(HOLDS, SKVQ, recent=6)),
        ("return first_tokens(layer_cache, self.preserve)", "return None", cell(HOLDS, SKVQ)),
    ],
    "methods/antkv.py": [
        ("return best_tokens(rows, n, count)\n",
         "return best_tokens(rows, n, count) if rows.kept_positions is None else rows.kept_positions\n", anchors("2")),
        ("return best_tokens(rows, n, count)\n", "return best_tokens(rows, rows.recent.shape[2], count)\n",
         anchors("2")),
        ("math.ceil(self.share * length)", "math.ceil(self.share * n)", anchors("20%")),
        ("math.ceil(self.share * length)", "int(self.share * length)", anchors("20%")),
        ("    q_norm = q.float().norm(dim=-1)", "    q_norm = torch.ones(q.shape[:3])", cell(HOLDS, AnTKV, **PAPER)),
        ("sums[:, :, 0, :seen] -= squares[:, :, 0]", "pass", cell(HOLDS, AnTKV, **PAPER)),
        ("ans_k, ans_v = sums.unbind(2)", "ans_k = ans_v = sums[:, :, 0]", cell(HOLDS, AnTKV, **PAPER)),
        ("sums.unflatten(1, (Hkv, -1)).sum(2)", "sums.unflatten(1, (Hkv, -1))[:, :, 0]", cell(HOLDS, AnTKV, **PAPER)),
        ("anchor_scores(q, K, self.window)", "anchor_scores(q[:, :, -1:], K, self.window)",
         cell(HOLDS, AnTKV, **PAPER)),
    ],
    "methods/intactkv.py": [
        ("self.k_bits < 16", "False", cell(HOLDS, IntactKV, TOKEN)),
        ("self.v_bits < 16", "False", cell(HOLDS, IntactKV, TOKEN)),
        ("len(self.prefix.ids)\n", "len(self.prefix.ids) - 1\n", cell(HOLDS, IntactKV, TOKEN)),
        ("formula=formula)", 'formula="offset")', cell(HOLDS, IntactKV, TOKEN, formula="integer-zero")),
        ("return keys, values\n", "return values, keys\n", cell(HOLDS, IntactKV, TOKEN)),
        ("return keys, values\n", "return 1.01 * keys, values\n", cell(HOLDS, IntactKV, TOKEN)),
    ],
    "calibrate.py": [
        ("cache.append(k.detach(), v.detach(), positions)", "cache.append(k.detach(), v.detach(), 0 * positions)",
         cell(HOLDS, RTN, T_STATIC)),
    ],
    "cache.py": [
        ("if len(cache) > cache.start:", "if False:", cell("paper_refuses_a_second_forward", RTN, TOKEN, **PAPER)),
        ("tokens[:, :cache.start].tolist() == ", "True or ", cell("a_text_has_to_begin_with_the_prefix", IntactKV, TOKEN)),
        ('"coded": [self.codes]', '"coded": [self.codes, self.recent]', cell(HOLDS, RTN, TOKEN)),
        ("(0, new_tokens)) + recent", "(0, new_tokens)) * 0 + recent", anchors("2")),
        ("self.kept_scores = self.kept_scores + kept", "pass", cell(HOLDS, AnTKV, **LONG)),
        ("self.recent_scores = self.recent_scores[:, :, n:].clone()", "pass", cell(HOLDS, AnTKV, **PAPER)),
        ("x.sort(dim=1, descending=True, stable=True).indices[:, :k]",
         "x.shape[1] - 1 - x.flip(1).sort(dim=1, descending=True, stable=True).indices[:, :k]", top_k),
        ("x.sort(dim=1, descending=True", "x.sort(dim=1, descending=False", top_k),
        ("            rows.scatter_(2, index, self.kept_rows.to(rows.dtype))", "            pass",
         cell(HOLDS, PFN, TOKEN)),
        ("self.kept_rows.to(rows.dtype)", "self.kept_rows[:1].expand_as(self.kept_rows).to(rows.dtype)",
         cell("batch_rows_are_independent", PFN, TOKEN, **DOUBLE)),
        ("torch.cat([decoded, self.recent], dim=2)", "torch.cat([decoded.half(), self.recent], dim=2)",
         cell(HOLDS, RTN, TOKEN)),
        ("self.recent[:, :, n:].clone()", "self.recent[:, :, n:]",
         cell(HOLDS, FP16, batch=1, heads_per_kv=4, recent=5)),
        ("old - old % self.method.block_of(rows.kind))", "old - old % self.method.block_of(rows.kind) - 1)",
         cell(HOLDS, RTN, TOKEN), cell("generation", RTN, TOKEN)),
        ("old - old % self.method.block_of(rows.kind))",
         "old >= self.method.block_of(rows.kind) and self.length - rows.n_coded - 1)",
         cell(HOLDS, RTN, TOKEN, recent=5)),
        ("old - old % self.method.block_of(rows.kind))", "old >= self.method.block_of(rows.kind) and old)",
         cell("uneven_chunks", RTN, CHANNEL)),
        ('self.protocol == "paper" and self.prefills:  #', "True:  #",
         cell("attention_sees_the_cache", RTN, TOKEN), cell("no_future_leak", RTN, CHANNEL)),
        ('self.protocol == "paper" and self.prefills:  #', "False:  #",
         cell("attention_sees_the_cache", RTN, TOKEN, **PAPER)),
        ('if self.method.rope == "pre":', "if False:", cell(HOLDS, RTN, C_STATIC)),
        ("k = self.rope.rotate(k, positions)", "k = self.rope.rotate(k, positions - positions[0])",
         cell("uneven_chunks", FP16)),
        ("dtype = k.dtype if k.dtype.itemsize == 2 else torch.float16", "dtype = k.dtype", cell(HOLDS, FP16)),
        ("dtype = k.dtype if k.dtype.itemsize == 2 else torch.float16", "dtype = torch.float16",
         cell("sixteen_bit_models_cache_what_they_compute", FP16, **PAPER)),
        ("q = self.rope.rotate(q, positions)", "pass", cell(HOLDS, AnTKV, **PAPER)),
        ("before = self.recent.to(rows.device).expand(len(rows), -1, -1, -1)",
         "before = self.recent * (torch.arange(len(rows)) == 0).view(-1, 1, 1, 1)", cell(HOLDS, IntactKV, TOKEN)),
        ("self.layers = [self.new_layer(i)", "self.layers = getattr(self, 'layers', None) or [self.new_layer(i)",
         cell("same_twice_and_after_reset", RTN, TOKEN)),
        ("        self.method.begin(self)\n", "        hasattr(self, 'layers') or self.method.begin(self)\n",
         cell("same_twice_and_after_reset", KVSink, TOKEN, **PAPER)),
        ("if self.method.prefix is not None:", "if self.method.prefix is not None and not hasattr(self, 'start'):",
         cell("same_twice_and_after_reset", IntactKV, TOKEN)),
        ("(len(self.method.prefix.ids), device=weight.device)", "(len(self.method.prefix.ids)) * 0",
         cell(HOLDS, IntactKV, TOKEN)),
        ("return tokens[:, self.start:]", "return tokens", cell(HOLDS, IntactKV, TOKEN)),
        ("return self.method.uses_scores and", "return False and", cell("scores", AnTKV, recent=5)),
        ('if self.layers[layer].is_choosing():',
         "if self.layers[layer].length == hidden.shape[1]:", cell(HOLDS, KVSink, TOKEN)),
    ],
}
