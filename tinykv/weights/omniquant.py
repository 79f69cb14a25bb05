"""OmniQuant (Shao et al., 2024): clips and equivalent scales are learned, block by block.

Learnable weight clipping (LWC), for each group of weights two numbers g and b:
    s = (sigmoid(g) max - sigmoid(b) min) / (2**n - 1),   z = -round(sigmoid(b) min / s)
Learnable equivalent transformation (LET), a scale for each channel that the norms, and v_proj, hand on (`base.py`).
Both are trained together by gradient descent, rounding passed straight through, so that the quantized block, reading
what the quantized blocks before it give, has the output of the full-precision block:
    min  |F(W, X) - F(Q(W), X')|^2

Paper and practice, as in the released code for LLaMA and weights only.
- No shifts: RMSNorm has no bias to take them. No scale between q and k: it multiplies rows of their weights, which
  a group's own scale takes back.
- AdamW without decay, rate 1e-2 for clips and 5e-3 for scales, 20 epochs, a window a step; sigmoid(4) to begin with.
  Scales begin at max|X|**0.5 / max|W|**0.5, and are learned as their logarithm here.
- The released code leaves v_proj and o_proj alone under grouped queries; a scale that all query heads of a KV head
  share is as good, and is used here.
"""
import torch
import torch.nn.functional as F
from torch.func import functional_call

from tinykv.weights.base import Quantizer, transform, transformed
from tinykv.weights.linear import LINEARS, codes_of, grid, group_of

EPOCHS = 20
CLIP_RATE, SCALE_RATE = 1e-2, 5e-3


def round_through(x):
    """Rounded, with the gradient of x itself (a straight-through estimator)."""
    return x + (x.round() - x).detach()


class OmniQuant(Quantizer):
    needs_text = True

    @torch.enable_grad()
    def quantize(self, block, read, full, coded):
        block.requires_grad_(False)
        with torch.no_grad():
            wanted = read(block, full)  # (W, T, D)
            logs = self.first_scales(block, read, full)
        clips = {name: torch.full((2, *self.groups(block.get_submodule(name).weight).shape[:2], 1), 4.0,
                                  device=full.device) for name in LINEARS}  # each (2, out, in/G, 1)
        parameters = [x.requires_grad_() for x in (*clips.values(), *logs.values())]
        steps = torch.optim.AdamW([{"params": parameters[:len(clips)], "lr": CLIP_RATE},
                                   {"params": parameters[len(clips):], "lr": SCALE_RATE}], weight_decay=0)

        def trial(*args):
            return functional_call(block, self.trial(block, clips, logs), args)

        for _ in range(EPOCHS):
            for h, target in zip(coded.split(1), wanted.split(1)):  # (1, T, D) both
                out = read(trial, h)  # (1, T, D)
                loss = F.mse_loss(out.float(), target.float())
                steps.zero_grad()
                loss.backward()
                steps.step()
        with torch.no_grad():
            scales = {name: x.exp() for name, x in logs.items()}
            transform(block, scales)
            grids = {}
            for name, clip in clips.items():
                scale, zero = self.clipped_grid(self.groups(block.get_submodule(name).weight), clip)
                grids[name] = scale[..., 0], zero[..., 0]  # (out, in/G) both
            self.replace(block, grids=grids, gains={"self_attn.v_proj": 1 / scales["values"]})

    def groups(self, weight):
        """weight (out, in) -> (out, in/G, G) fp32"""
        return weight.float().unflatten(1, (-1, group_of(weight.shape[1], self.group_size)))

    def clipped_grid(self, groups, clip):
        """LWC: scale and zero point of groups (out, in/G, G), (out, in/G, 1) both; clip (2, out, in/G, 1): g and b."""
        high, low = clip.sigmoid()  # (out, in/G, 1) both
        return grid(low * groups.amin(-1, keepdim=True), high * groups.amax(-1, keepdim=True), self.bits, round_through)

    def first_scales(self, block, read, full):
        """The logarithms of LET's scales as training begins: (D) for the two norms, (Hkv * d) for the values."""
        attn, mlp = block.self_attn, block.mlp
        x = block.input_layernorm(full)  # (W, T, D)
        y = block.post_attention_layernorm(full + read(attn, x))  # (W, T, D)
        shared = attn.o_proj.weight.unflatten(1, (attn.n_kv_heads, -1, attn.head_dim)).abs().amax((0, 2))  # (Hkv, d)
        qkv = torch.cat([attn.q_proj.weight, attn.k_proj.weight, attn.v_proj.weight]).abs().amax(0)  # (D)
        gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).abs().amax(0)  # (D)
        pairs = {"attention": (x, qkv), "values": (attn.v_proj(x), shared.flatten()), "mlp": (y, gate_up)}
        return {name: (x.float().abs().amax((0, 1)).clamp(min=1e-5) / w.float().clamp(min=1e-5)).log() / 2
                for name, (x, w) in pairs.items()}

    def trial(self, block, clips, logs):
        """{name: value} of the block's parameters, transformed, clipped, rounded; differentiable in clips and logs."""
        weights = transformed(block, {name: x.exp() for name, x in logs.items()})
        for name, clip in clips.items():
            groups = self.groups(weights[f"{name}.weight"] if f"{name}.weight" in weights
                                 else block.get_submodule(name).weight)
            scale, zero = self.clipped_grid(groups, clip)
            code = codes_of(groups, scale, zero, self.bits, round_through)
            weights[f"{name}.weight"] = ((code - zero) * scale).flatten(1)
        return {name: weight.to(block.get_parameter(name).dtype) for name, weight in weights.items()}
