"""The four weight quantizers against plain arithmetic, brute force and their own claims.

Models are random and tiny, with a few channels that carry much more than others, which is what AWQ and OmniQuant live
on.
"""
import copy
import itertools
import math
from functools import cache

import numpy as np
import oracles
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from tinykv import UserError
from tinykv.lab.weights import QUANTIZERS, awq, gptq, omniquant, quantize, restore, weight_bytes
from tinykv.lab.weights.awq import AWQ
from tinykv.lab.weights.base import FOLDS, BlockRunner, transform
from tinykv.lab.weights.gptq import GPTQ
from tinykv.lab.weights.linear import LINEARS, QuantLinear, group_of, groups_of, rounded
from tinykv.lab.weights.omniquant import OmniQuant
from tinykv.lab.weights.rtn import RTN
from tinykv.model import Llama, LlamaConfig

V, D, M, L, H, d = 41, 32, 48, 2, 4, 8
SHAPES = [(sharing, bias) for sharing in (1, 2, 4) for bias in (False, True)]


def tiny(sharing=2, bias=False, seed=0):
    """A random model, `sharing` query heads to a KV head; some channels of each norm, and of the values, are large."""
    torch.manual_seed(seed)
    model = Llama(LlamaConfig(V, D, M, L, H, H // sharing, d, 512, attention_bias=bias, mlp_bias=bias))
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(std=1.2 * p.shape[-1] ** -0.5 if p.dim() == 2 else 0.3)
            if "norm" in name:
                p.add_(1)
                p[:3] *= 8
            if "v_proj" in name:
                p[::3] *= 4
    return model.requires_grad_(False)


def text(windows=3, T=16, seed=5):
    return torch.randint(0, V, (windows, T), generator=torch.Generator().manual_seed(seed))


def correlated(n, width, seed):
    """Inputs (n, width), mixtures of a few, and some noise."""
    rng = torch.Generator().manual_seed(seed)
    few, mix = torch.randn(n, width // 4, generator=rng), torch.randn(width // 4, width, generator=rng)
    return few @ mix + 0.3 * torch.randn(n, width, generator=rng)


def uneven(n, width, seed):
    """Inputs (n, width), some much larger than others."""
    rng = torch.Generator().manual_seed(seed)
    size = torch.logspace(-1, 1, width)[torch.randperm(width, generator=rng)]
    return torch.randn(n, width, generator=rng) * size


def linears_of(model):
    """The linear layers of all blocks, block by block."""
    return [block.get_submodule(name) for block in model.model["layers"] for name in LINEARS]


def random_linear(out, width, seed, bias=False):
    torch.manual_seed(seed)
    linear = nn.Linear(width, out, bias=bias).requires_grad_(False)
    linear.weight.normal_(std=0.2)
    return linear


# ---- the grid

def plain_grid(group, bits):
    """A group's scale, in 16 bits, and zero point."""
    levels = 2 ** bits - 1
    lo, hi = min(0, *group), max(0, *group)
    step = max(np.float32(hi) - np.float32(lo), np.float32(1e-5)) / np.float32(levels)
    s = np.float32(np.float16(min(step, np.float32(6e4))))
    return s, min(levels, max(0, np.rint(-np.float32(lo) / s)))


def plain_codes(group, s, z, bits):
    return [min(2 ** bits - 1, max(0, np.rint(np.float32(w) / s) + z)) for w in group]


def plain_rounded(row, bits, G):
    """What a row of weights reads as, in plain lists."""
    read = []
    for i in range(0, len(row), G):
        s, z = plain_grid(row[i:i + G], bits)
        read += [float((c - z) * s) for c in plain_codes(row[i:i + G], s, z, bits)]
    return read


def six(lo, hi):
    return st.lists(st.floats(lo, hi, width=32), min_size=6, max_size=6)


GROUPS = st.one_of(six(-100, 100), six(2 ** -7, 3), six(-3, -2 ** -7), six(-2 ** -20, 2 ** -20), six(-2 ** 20, 2 ** 20),
                   st.floats(-100, 100, width=32).map(lambda x: [x] * 6), st.just([0.0] * 6))


@given(st.lists(st.tuples(GROUPS, GROUPS), min_size=1, max_size=3), st.integers(2, 8),
       st.sampled_from([1, 2, 3, 4, 12]))
@example([([1.0] * 6, [-1.0] * 6)], 2, 6)
@example([([0.0] * 6, [1e-8] * 6)], 3, 4)
@example([([-1e6] * 6, [1e6] * 6)], 2, 6)
def test_decoded_weights_are_those_of_the_formula_and_a_forward_multiplies_by_them(rows, bits, G):
    weight = torch.tensor([[*a, *b] for a, b in rows])  # (out, 12)
    linear, x = random_linear(len(rows), 12, bits, bias=bits % 2), torch.randn(2, 3, 12)
    linear.weight.data = weight
    found, expected = QuantLinear(linear, bits, G), [plain_rounded(row, bits, G) for row in weight.tolist()]
    assert found.weight.tolist() == rounded(groups_of(weight, G), bits).flatten(1).tolist() == expected
    assert found.weight.dtype == torch.float32 and found.weight.isfinite().all()
    assert torch.equal(found(x), F.linear(x, found.weight, linear.bias))
    assert linear.bias is None or found.bias.data_ptr() != linear.bias.data_ptr()


@pytest.mark.parametrize("inputs", [32, 128, 256, 352, 4096, 11008, 131, 129, 1])
def test_a_group_is_the_largest_divisor_up_to_128(inputs):
    assert group_of(inputs) == max(g for g in range(1, 129) if inputs % g == 0)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("name, G", [("rtn", 16), ("rtn", None), ("rtn", 1), ("gptq", 8), ("awq", 16)])
def test_bytes_are_those_of_the_formula(name, bits, G):
    """Codes and zero points packed by row, 16 bits a scale, and whatever is not quantized."""
    model = tiny(2, bias=True)
    coded = quantize(model, QUANTIZERS[name](bits, G), text())
    size = sum(p.nbytes for p in {id(p): p for p in model.parameters()}.values())
    for linear in linears_of(model):
        out, inputs = linear.weight.shape
        groups = inputs // (G or max(g for g in range(1, 129) if inputs % g == 0))
        size += out * (oracles.code_bytes(inputs, bits) + oracles.code_bytes(groups, bits) + 2 * groups)
        size -= linear.weight.nbytes
    assert weight_bytes(coded) == size


# ---- the walk through the blocks

@pytest.fixture(autouse=True)
def hurry(monkeypatch):
    """OmniQuant trains for 2 epochs, not for 20."""
    monkeypatch.setattr(omniquant, "EPOCHS", 2)


@cache
def coded_of(name, sharing, bias):
    """A model, and the same at 3 bits."""
    model = tiny(sharing, bias)
    return model, quantize(model, QUANTIZERS[name](3, 16), text())


def of_each_quantizer(test):
    cases = [(name, *shape) for name in QUANTIZERS for shape in ((1, True), (2, False))]
    return pytest.mark.one_in(3)(pytest.mark.parametrize("name, sharing, bias", cases)(test))


def outputs(*models):
    with torch.no_grad():
        return [model(text(2, 12, 9)) for model in models]


@of_each_quantizer
def test_the_model_stays_as_it_is_and_what_was_made_can_be_restored(name, sharing, bias):
    model, coded = coded_of(name, sharing, bias)
    kept = model.state_dict()
    assert all(torch.equal(t, kept[name]) for name, t in tiny(sharing, bias).state_dict().items())
    tensors = {name: t.clone() for name, t in coded.model["layers"].state_dict().items()}
    again = restore(model, QUANTIZERS[name](3, 16), tensors)
    for made in (coded, again):
        assert made.lm_head is model.lm_head and made.config is model.config
        assert all(made.model[name] is model.model[name] for name in ("embed_tokens", "norm"))
        assert {(type(linear), linear.bits) for linear in linears_of(made)} == {(QuantLinear, 3)}
    full, a, b = outputs(model, coded, again)
    assert torch.equal(a, b) and a.isfinite().all() and not torch.allclose(a, full, atol=1e-2)
    found = again.model["layers"].state_dict()
    assert found.keys() == tensors.keys() and all(torch.equal(found[name], t) for name, t in tensors.items())


@of_each_quantizer
def test_a_model_of_16_bits_is_quantized_like_one_of_32(name, sharing, bias):
    model, coded = coded_of(name, sharing, bias)
    coded_half = quantize(copy.deepcopy(model).bfloat16(), QUANTIZERS[name](3, 16), text())
    full, a, b = outputs(model, coded, coded_half)
    assert b.dtype == torch.bfloat16 and coded_half.model["layers"][0].mlp.up_proj.scale.dtype == torch.float16
    assert (a - b.float()).norm() < (a - full).norm()


class Overflows(RTN):
    needs_text = True

    def quantize(self, block, run, full, quantized):
        block.mlp.down_proj.weight.fill_(1e38)


@pytest.mark.parametrize("which, quantizer, weight", [("block 0 in full precision", AWQ(4), 1e38),
                                                      ("quantized block 0", Overflows(4), 1)])
def test_numbers_that_are_not_finite_are_an_error(which, quantizer, weight):
    """Also where no later block reads them."""
    model = tiny()
    del model.model["layers"][1:]
    model.model["layers"][0].mlp.down_proj.weight.fill_(weight)
    with pytest.raises(UserError, match=f"{which} .*finite"):
        quantize(model, quantizer, text())


# ---- gptq

def plain_obq(W, Hessian, bits, G):
    """Column by column; after each, the weights still free go where they make the loss least, found from scratch."""
    W, columns = W.copy(), W.shape[1]
    for j in range(columns):
        if j % G == 0:
            grids = [plain_grid(row[j:j + G].tolist(), bits) for row in W]
        for row, (s, z) in zip(W, grids):
            code, = plain_codes([row[j]], s, z, bits)
            moved = float((code - z) * s) - row[j]
            row[j] += moved
            if j + 1 < columns:
                rest = slice(j + 1, columns)
                row[rest] -= np.linalg.solve(Hessian[rest, rest], Hessian[rest, j] * moved)
    return W


@pytest.mark.parametrize("seed, bits, G, tokens", [(0, 3, 12, 100), (1, 2, 4, 9000), (2, 4, 1, 100), (3, 8, 6, 100)])
def test_gptq_is_the_brute_force_of_its_paper(seed, bits, G, tokens):
    x, linear = correlated(tokens, 12, seed), random_linear(6, 12, seed)
    hessian = gptq.hessian(x)  # of many tokens, a part at a time
    found, scale, zero = gptq.compensated(linear.weight, gptq.inverse_factor(hessian), bits, G)
    x = x.double().numpy()
    H = 2 * x.T @ x / len(x)
    H += np.eye(12) * 0.01 * H.diagonal().mean()
    assert np.allclose(hessian.numpy(), H, rtol=1e-4)
    assert np.abs(found.numpy() - plain_obq(linear.weight.double().numpy(), H, bits, G)).max() < 1e-4
    linear.weight.data = found
    assert torch.equal(QuantLinear(linear, bits, G, scale, zero).weight, found)  # what is left is on the grid


def inputs_of(block, model, h):
    """What each linear layer of a block reads when the block reads h: {name: (W, T, in)}."""
    found, hooks = {}, []
    for name in LINEARS:
        def note(_, args, name=name):
            found[name] = args[0]
        hooks.append(block.get_submodule(name).register_forward_pre_hook(note))
    with torch.no_grad():
        out = BlockRunner(model, batch=len(h))(block, h)
    for hook in hooks:
        hook.remove()
    return found, out


def noted(monkeypatch, owner, name):
    """What each call of a function was given, and what it gave."""
    calls, real = [], getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *given: calls.append((*given, real(*given))) or calls[-1][-1])
    return calls


def test_gptq_looks_at_what_the_quantized_layers_before_give(monkeypatch):
    """Of the blocks before, and of the stages before in the same block. It stores what is left of the weights, on the
    grid that each group had when its first column was due; what is left may not reach both of its ends."""
    model, seen, stored = tiny(), noted(monkeypatch, gptq, "hessian"), noted(monkeypatch, gptq, "compensated")
    coded = quantize(model, GPTQ(3, 16), text())
    h, stages = model.model["embed_tokens"](text()), []
    for block in coded.model["layers"]:
        inputs, h = inputs_of(block, model, h)
        stages += [inputs[name] for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")]
    for (x, _), y in zip(seen, stages, strict=True):
        assert torch.allclose(x, y.flatten(0, 1), atol=1e-5)
    for linear, (*_, (left, scale, _)) in zip(linears_of(coded), stored, strict=True):
        assert torch.equal(linear.weight, left) and torch.equal(linear.scale.float(), scale)


# ---- equivalent transformations

@pytest.mark.parametrize("sharing, bias", SHAPES)
def test_a_transformed_model_computes_the_same(sharing, bias):
    """By each transformation alone, and by all of them."""
    model, size = tiny(sharing, bias), {"attention": D, "values": H // sharing * d, "mlp": D, "gated": M}
    expected, = outputs(model)
    for names in (*([name] for name in FOLDS), FOLDS):
        transformed = copy.deepcopy(model)
        for block in transformed.model["layers"]:
            transform(block, {name: 4 ** (2 * torch.rand(size[name]) - 1) for name in names})
        assert (outputs(transformed)[0] - expected).abs().max() < 1e-4 * expected.abs().max()


def fold(monkeypatch, model, quantizer, windows):
    """Quantize: -> the quantized model, and the full-precision model with the transformations alone."""
    calls = [noted(monkeypatch, module, "transform") for module in (awq, omniquant)]
    coded, equivalent = quantize(model, quantizer, windows), copy.deepcopy(model)
    calls = list(itertools.chain(*calls))
    blocks = dict(zip(dict.fromkeys(block for block, *_ in calls), equivalent.model["layers"]))
    for block, scales, _ in calls:
        transform(blocks[block], scales)
    assert len(blocks) in (0, L)
    return coded, equivalent


# ---- awq

def plain_scales(x, weight, bits, G):
    """The s of each of the 20 ratios, and the error that the layer's output has with it: in numpy and plain lists."""
    x, W = x.double().numpy(), weight.double().numpy()
    found = []
    for r in range(20):
        s = np.maximum(np.abs(x).mean(0) ** (r / 20), 1e-4)
        s = s / np.sqrt(s.max() * s.min())
        Q = np.array([plain_rounded(row, bits, G) for row in (W * s).astype(np.float32).tolist()]) / s
        found.append((s, ((x @ (Q - W).T) ** 2).mean()))
    return found


@pytest.mark.parametrize("bits, seed", [(2, 1), (3, 0), (3, 3), (4, 5)])
def test_awq_finds_the_best_of_its_twenty_ratios(bits, seed):
    x = uneven(60, 16, seed) if seed % 2 else torch.randn(60, 16, generator=torch.Generator().manual_seed(seed))
    linear = random_linear(10, 16, seed)
    before, outputs = linear.weight.clone(), []
    found = AWQ(bits, 8).scales(x[None], [linear], lambda: outputs.append(linear(x[None])) or outputs[-1])
    assert torch.equal(linear.weight, before) and len(outputs) == 1 + 20  # as if nothing had been tried
    tried = plain_scales(x, linear.weight, bits, 8)
    least = min(error for _, error in tried)
    chosen = [error for s, error in tried if np.allclose(s, found.numpy(), rtol=1e-4)]
    assert chosen and min(chosen) <= least * (1 + 1e-4)
    if seed % 2:
        assert least < 0.8 * tried[0][1]  # scales help where some inputs are large


@pytest.mark.parametrize("sharing", [1, 2])
def test_what_awq_tries_scales_on(monkeypatch, sharing):
    """All layers that read the same input together, and the output of what comes next."""
    model, seen, run, scales = tiny(sharing), [], AWQ.quantize, AWQ.scales

    def quantize_block(self, block, *arguments):
        self.block = block
        run(self, block, *arguments)

    def noted(self, x, linears, output):
        attn, mlp = self.block.self_attn, self.block.mlp
        names = [name for name in LINEARS if any(linear is self.block.get_submodule(name) for linear in linears)]
        compared = {"self_attn.q_proj": lambda: BlockRunner(model)(attn, x), "mlp.gate_proj": lambda: mlp(x),
                    "self_attn.o_proj": lambda: attn.o_proj(x), "mlp.down_proj": lambda: mlp.down_proj(x)}[names[0]]
        seen.append(names)
        assert len(linears) == len(names) and torch.equal(output(), compared())
        return scales(self, x, linears, output)

    monkeypatch.setattr(AWQ, "quantize", quantize_block)
    monkeypatch.setattr(AWQ, "scales", noted)
    quantize(model, AWQ(3, 16), text())
    qkv, o, gate_up, down = list(LINEARS[:3]), [LINEARS[3]], list(LINEARS[4:6]), [LINEARS[6]]
    assert seen == ([qkv, o, gate_up, down] if sharing == 1 else [qkv, gate_up, down]) * L


@pytest.mark.parametrize("tokens", [40, 1300])
@pytest.mark.parametrize("bits", [2, 3])
def test_awq_finds_the_best_of_its_ten_clips(bits, tokens):
    """Of each group, by what it contributes to the output on up to 512 of the tokens."""
    x, weight = uneven(tokens, 16, bits), random_linear(7, 16, bits).weight
    weight[:, ::5] *= 3
    found = AWQ(bits, 8).clips(x, weight)[..., 0]  # (7, 2)
    groups, x = weight.unflatten(1, (2, 8)), x[::2][:512] if tokens > 512 else x  # (7, 2, 8), (n, 16)
    most = groups.abs().amax(-1) * (1 - torch.arange(10) / 20).view(10, 1, 1)  # (10, 7, 2)
    moved = rounded(groups.clamp(-most[..., None], most[..., None]), bits) - groups  # (10, 7, 2, 8)
    errors = torch.einsum("ngi,cogi->cogn", x.unflatten(1, (2, 8)), moved).square().mean(-1)  # (10, 7, 2)
    chosen = errors.where((most - found).abs() < 1e-6, math.inf).amin(0)  # (7, 2)
    assert (chosen <= errors.amin(0) * (1 + 1e-4) + 1e-9).all()
    assert 0 < (found < most[0]).sum() < 14 or bits == 2


def test_awq_clips_what_it_finds_in_the_full_precision_model(monkeypatch):
    """Clips are searched on what the layers read there once the scales are folded in; those of q and k are not."""
    model, seen, clips = tiny(1), [], AWQ.clips

    def noted_before(self, x, weight):  # which then becomes another
        seen.append((x, weight.clone(), clips(self, x, weight)))
        return seen[-1][2]

    monkeypatch.setattr(AWQ, "clips", noted_before)
    coded, equivalent = fold(monkeypatch, model, AWQ(3, 16), text())
    h, expected = model.model["embed_tokens"](text()), []
    for block, new in zip(equivalent.model["layers"], coded.model["layers"]):
        inputs, h = inputs_of(block, model, h)
        expected += [(inputs[name].flatten(0, 1), block.get_submodule(name).weight, new.get_submodule(name).weight)
                     for name in LINEARS[2:]]
    for (x, weight, most), (y, other, found) in zip(seen, expected, strict=True):
        assert torch.allclose(weight, other, rtol=1e-4, atol=1e-6)
        assert (x - y).abs().max() < 1e-4 * y.abs().max()
        groups = weight.unflatten(1, (-1, 16))  # (out, in/G, G)
        clipped = groups.clamp(-most, most)
        assert torch.equal(found, rounded(clipped, 3).flatten(1)) and not torch.equal(clipped, groups)


# ---- omniquant

@pytest.mark.parametrize("bits", [2, 3, 4])
def test_the_gradient_of_a_clip_is_the_straight_through_estimators(bits):
    """By finite differences of the formula, in which what rounding adds to a number stays as it is."""
    rng, max_code = torch.Generator().manual_seed(bits), 2 ** bits - 1
    groups, weights = torch.randn(2, 6, 2, 8, generator=rng)  # (out, in/G, G) both
    clip = (torch.randn(2, 6, 2, 1, generator=rng) + 0.5).requires_grad_()  # some weights are clipped
    scale, zero = OmniQuant(bits, 8).clipped_grid(groups, clip)
    code = omniquant.codes_of(groups, scale, zero, bits, omniquant.round_through)
    ((code - zero) * scale * weights).sum().backward()

    def exact(clip, of_scale=0, of_zero=0, of_code=0, is_clipped=None):
        hi, lo = clip.sigmoid() * torch.stack([groups.amax(-1, True).clamp(min=0), groups.amin(-1, True).clamp(max=0)])
        s = (hi - lo) / max_code + of_scale  # (out, in/G, 1)
        z, w = -lo / s + of_zero, groups / s + of_code  # (out, in/G, 1), (out, in/G, G)
        code = w + z if is_clipped is None else torch.where(is_clipped, (w + z).clamp(0, max_code), w + z)
        return s, z, w, ((code - z) * s * weights).sum(-1)  # the last of each group
    groups, weights, at = groups.double(), weights.double(), clip.detach().double()
    added = [exact(at)[0].half() - exact(at)[0]]
    added += [x.round() - x for x in exact(at, *added)[1:3]]
    _, z, w, _ = exact(at, *added)
    added.append((w + z - max_code / 2).abs() > max_code / 2 + 0.5)
    for kind in (0, 1):
        step = torch.zeros_like(at)
        step[kind] = 1e-6
        slope = (exact(at + step, *added)[-1] - exact(at - step, *added)[-1]) / 2e-6  # (out, in/G)
        torch.testing.assert_close(clip.grad[kind, ..., 0].double(), slope, rtol=1e-3, atol=1e-3)


def test_omniquant_imitates_the_full_model_from_what_the_quantized_blocks_before_give():
    model, seen = tiny(), []
    block, full = copy.deepcopy(model.model["layers"][0]), model.model["embed_tokens"](text(3))
    coded = full + 0.1 * torch.randn(full.shape, generator=torch.Generator().manual_seed(0))

    def run(module, h):
        seen.append((module, h))
        return BlockRunner(model)(module, h)

    OmniQuant(4, 16).quantize(block, run, full, coded)
    trials = [h for module, h in seen if not isinstance(module, nn.Module)]
    assert [h is full for module, h in seen if module is block] == [True]
    assert len(trials) == 2 * 3 and all(torch.equal(h, coded[i % 3][None]) for i, h in enumerate(trials))


def test_omniquant_trains_clips_and_scales(monkeypatch):
    """What it hands on is the transformed weight on the clipped grid: no scale is as it began, and no clip. The first
    block's error is less than with one epoch, and than rounding to nearest."""
    model, errors = tiny(1), []
    for quantizer, epochs in ((RTN(4, 16), None), (OmniQuant(4, 16), 1), (OmniQuant(4, 16), 8)):
        monkeypatch.setattr(omniquant, "EPOCHS", epochs)
        with monkeypatch.context() as patch:
            coded, equivalent = fold(patch, model, quantizer, text())
        h, run = model.model["embed_tokens"](text()), BlockRunner(model)
        errors.append(F.mse_loss(*(run(of.model["layers"][0], h) for of in (model, coded))).item())
    assert errors == sorted(errors, reverse=True), errors
    block, new = equivalent.model["layers"][0], coded.model["layers"][0]
    first = model.model["layers"][0]
    values = first.self_attn.v_proj(first.input_layernorm(model.model["embed_tokens"](text()))).abs().amax((0, 1))
    begun = (values / first.self_attn.o_proj.weight.abs().amax(0)).sqrt()
    ratio = begun * new.self_attn.v_proj.gain  # of the scale as it began to the one that was learned
    assert 1e-4 < (ratio - 1).abs().max() < 0.1
    for name in LINEARS:
        groups = block.get_submodule(name).weight.unflatten(1, (-1, 16))
        full = (groups.amax(-1).clamp(min=0) - groups.amin(-1).clamp(max=0)) / 15  # (out, in/G)
        share = new.get_submodule(name).scale.float() / full
        assert ((0.9 < share) & (share < 1)).all()
        assert (share - torch.tensor(4.0).sigmoid()).abs().max() > 7e-4  # as training begins, it is fp16's rounding
