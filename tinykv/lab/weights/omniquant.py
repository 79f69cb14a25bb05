"""OmniQuant (Shao et al., 2024): clips and equivalent scales are trained, block by block.

Learnable weight clipping (LWC): two numbers g and b for each group of weights.
    s = (sigmoid(g) max - sigmoid(b) min) / (2**n - 1),   z = -round(sigmoid(b) min / s)
Learnable equivalent transformation (LET): a scale for each channel that a norm or v_proj produces (`base.py`). Both are
trained together by gradient descent, with a straight-through estimator for rounding. The quantized block reads X', the
output of the quantized blocks before it, and should give what the full-precision block gives on X:
    min  |F(W, X) - F(Q(W), X')|^2

Paper and practice, as in the released code for LLaMA and weights only.
- No shifts: RMSNorm has no bias to absorb them. No scale between q and k: it multiplies rows of their weights, and a
  group's own scale undoes that.
- AdamW without decay, rate 1e-2 for clips and 5e-3 for scales, 20 epochs, a window a step. Clips begin at sigmoid(4),
  scales at max|X|**0.5 / max|W|**0.5; here their logarithm is trained.
- The released code does not scale v_proj and o_proj under grouped queries. Here all query heads of a KV head share one
  scale, which is an equivalent transformation as well.
"""
import torch
import torch.nn.functional as F
from torch.func import functional_call

from tinykv.lab.weights.base import Quantizer, transform, transformed
from tinykv.lab.weights.linear import LINEARS, codes_of, grid, groups_of

EPOCHS = 20
CLIP_RATE, SCALE_RATE = 1e-2, 5e-3


def round_through(x):
    """Rounded, with the gradient of x itself (a straight-through estimator)."""
    return x + (x.round() - x).detach()


class OmniQuant(Quantizer):
    needs_text = True

    @torch.enable_grad()
    def quantize(self, block, run, full, quantized):
        block.requires_grad_(False)

        # 1. what the block should give, and where training begins
        with torch.no_grad():
            target = run(block, full)  # (W, T, D)
            clips = self.first_clips(block)
            log_scales = self.first_scales(block, run, full)

        # 2. train clips and scales together
        self.train(block, run, quantized, target, clips, log_scales)

        # 3. fold the scales in, and round on the clipped grids
        with torch.no_grad():
            scales = {name: x.exp() for name, x in log_scales.items()}
            transform(block, scales)
            grids = {}
            for name, clip in clips.items():
                groups = groups_of(block.get_submodule(name).weight, self.group_size)  # (out, in/G, G)
                scale, zero = self.clipped_grid(groups, clip)  # (out, in/G, 1) both
                grids[name] = scale[..., 0], zero[..., 0]  # (out, in/G) both
            self.replace(block, grids=grids, gains={"self_attn.v_proj": 1 / scales["values"]})

    def train(self, block, run, quantized, target, clips, log_scales):
        """Train clips and log_scales, so that the block gives target (W, T, D) on quantized (W, T, D)."""
        for x in (*clips.values(), *log_scales.values()):
            x.requires_grad_()
        rates = [{"params": list(clips.values()), "lr": CLIP_RATE},
                 {"params": list(log_scales.values()), "lr": SCALE_RATE}]
        optimizer = torch.optim.AdamW(rates, weight_decay=0)
        for _ in range(EPOCHS):
            for h, wanted in zip(quantized.split(1), target.split(1)):  # (1, T, D) both
                trial = self.trial_weights(block, clips, log_scales)
                out = run(lambda *given, trial=trial: functional_call(block, trial, given), h)  # (1, T, D)
                loss = F.mse_loss(out.float(), wanted.float())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    def clipped_grid(self, groups, clip):
        """LWC's scale and zero point, (out, in/G, 1) both.

        groups (out, in/G, G): weights; clip (2, out, in/G, 1): their g and b.
        """
        share_of_max, share_of_min = clip.sigmoid()  # (out, in/G, 1) both
        hi = share_of_max * groups.amax(-1, keepdim=True)  # (out, in/G, 1)
        lo = share_of_min * groups.amin(-1, keepdim=True)  # (out, in/G, 1)
        return grid(lo, hi, self.bits, round_through)

    def first_clips(self, block):
        """LWC's g and b as training begins, {linear layer: (2, out, in/G, 1)}: 4, so that sigmoid(4) = 0.98."""
        clips = {}
        for name in LINEARS:
            groups = groups_of(block.get_submodule(name).weight, self.group_size)  # (out, in/G, G)
            clips[name] = groups.new_full((2, *groups.shape[:2], 1), 4.0)
        return clips

    def first_scales(self, block, run, full):
        """The logarithms of LET's scales as training begins: (D) for the norms, (Hkv * d) for v_proj."""
        attn, mlp = block.self_attn, block.mlp

        # 1. what the scaled channels carry
        x = block.input_layernorm(full)  # (W, T, D)
        values = attn.v_proj(x)  # (W, T, Hkv * d)
        y = block.post_attention_layernorm(full + run(attn, x))  # (W, T, D)

        # 2. the largest weight that reads each channel; the heads of a KV head share its channels
        qkv = torch.cat([attn.q_proj.weight, attn.k_proj.weight, attn.v_proj.weight])  # (rows, D)
        shared = (attn.n_kv_heads, -1, attn.head_dim)
        o = attn.o_proj.weight.unflatten(1, shared)  # (D, Hkv, H/Hkv, d)
        gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])  # (2 M, D)
        max_weights = {"attention": qkv.abs().amax(0),  # (D)
                       "values": o.abs().amax((0, 2)).flatten(),  # (Hkv * d)
                       "mlp": gate_up.abs().amax(0)}  # (D)

        # 3. log of max|X|**0.5 / max|W|**0.5
        logs = {}
        for name, inputs in {"attention": x, "values": values, "mlp": y}.items():
            max_x = inputs.float().abs().amax((0, 1)).clamp(min=1e-5)  # (channels)
            max_w = max_weights[name].float().clamp(min=1e-5)  # (channels)
            logs[name] = (max_x / max_w).log() / 2
        return logs

    def trial_weights(self, block, clips, log_scales):
        """The parameters that change, {name: value}: transformed, clipped and rounded, and differentiable."""
        scales = {name: x.exp() for name, x in log_scales.items()}
        weights = transformed(block, scales)
        for name, clip in clips.items():
            weight = weights.get(f"{name}.weight", block.get_submodule(name).weight)  # (out, in)
            groups = groups_of(weight, self.group_size)  # (out, in/G, G)
            scale, zero = self.clipped_grid(groups, clip)  # (out, in/G, 1) both
            codes = codes_of(groups, scale, zero, self.bits, round_through)  # (out, in/G, G)
            decoded = (codes - zero) * scale  # (out, in/G, G)
            weights[f"{name}.weight"] = decoded.flatten(1)  # (out, in)
        for name, weight in weights.items():
            weights[name] = weight.to(block.get_parameter(name).dtype)
        return weights
