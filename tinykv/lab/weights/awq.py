"""AWQ (Lin et al., 2023): channels that carry large inputs are scaled up before rounding.

For the linear layers that share an input X, s makes the weights of large inputs larger, so that they are rounded finer:
    s = mean|X|**a,  scaled so that sqrt(max s * min s) = 1,   W' = Q(W diag(s)) diag(s)^-1
    a in {0, 0.05, .., 0.95}: the one that least changes the output of attention, MLP or the layer
The scales are folded into what comes before (`base.py`). Then each group of weights, except those of q and k, is
clipped at 1, 0.95, .., or 0.55 times its largest |w|: whichever least changes what the group contributes to the output.

Paper and practice, as in the released code.
- The inputs are those of the full-precision model. Clips are searched on 512 tokens.
- o_proj is scaled, by way of v_proj's rows, only where each query head has a KV head of its own.
- Scaling v_proj's rows changes the values in the cache. `QuantLinear.gain` holds the factor, which IntactKV needs.
"""
import torch

from tinykv.lab.weights.base import Quantizer, transform
from tinykv.lab.weights.linear import groups_of, rounded

RATIOS = [r / 20 for r in range(20)]
SHRINKS = [1 - i / 20 for i in range(10)]
TOKENS = 512  # that clips are searched on


class AWQ(Quantizer):
    needs_text = True

    def quantize(self, block, run, full, quantized):
        attn, mlp = block.self_attn, block.mlp
        gains = {}

        # 1. scale what q, k and v read
        x = block.input_layernorm(full)  # (W, T, D)
        s = self.scales(x, [attn.q_proj, attn.k_proj, attn.v_proj], lambda: run(attn, x))  # (D)
        transform(block, {"attention": s})

        # 2. scale what o reads, the values, where each query head has a KV head of its own
        heads = run.heads(attn, block.input_layernorm(full))  # (W, T, H * d)
        if attn.n_heads == attn.n_kv_heads:
            s = self.scales(heads, [attn.o_proj], lambda: attn.o_proj(heads))  # (H * d)
            transform(block, {"values": s})
            gains["self_attn.v_proj"] = 1 / s
            heads = (heads / s).to(heads.dtype)  # (W, T, H * d)
        h = full + attn.o_proj(heads)  # (W, T, D)

        # 3. scale what gate and up read
        y = block.post_attention_layernorm(h)  # (W, T, D)
        s = self.scales(y, [mlp.gate_proj, mlp.up_proj], lambda: mlp(y))  # (D)
        transform(block, {"mlp": s})

        # 4. scale what down reads
        gated = mlp.gated(block.post_attention_layernorm(h))  # (W, T, M)
        s = self.scales(gated, [mlp.down_proj], lambda: mlp.down_proj(gated))  # (M)
        transform(block, {"gated": s})

        # 5. clip the weights of all but q and k, on the inputs after scaling
        x_scaled = block.input_layernorm(full)  # (W, T, D)
        y_scaled = block.post_attention_layernorm(h)  # (W, T, D)
        inputs = {"self_attn.v_proj": x_scaled, "self_attn.o_proj": heads,
                  "mlp.gate_proj": y_scaled, "mlp.up_proj": y_scaled,
                  "mlp.down_proj": mlp.gated(y_scaled)}
        for name, of_layer in inputs.items():
            linear = block.get_submodule(name)
            most = self.clips(of_layer.flatten(0, 1), linear.weight)  # (out, in/G, 1)
            groups = linear.weight.unflatten(1, (most.shape[1], -1))  # (out, in/G, G)
            linear.weight.data = groups.clamp(-most, most).flatten(1)  # (out, in)

        # 6. round what came out
        self.replace(block, gains=gains)

    def scales(self, x, linears, output):
        """s (in) for the linear layers that read x (W, T, in).

        output: a function that runs the part of the block whose output is compared.
        """
        mean_size = x.float().abs().flatten(0, 1).mean(0)  # (in)
        weights = [linear.weight.data for linear in linears]
        wanted = output()  # in full precision

        best, least = None, float("inf")
        for ratio in RATIOS:
            # the scales of this ratio
            s = mean_size.pow(ratio).clamp(min=1e-4)  # (in)
            s = s / (s.max() * s.min()).sqrt()

            # the output with weights that are scaled, rounded and scaled back
            for linear, weight in zip(linears, weights):
                groups = groups_of(weight.float() * s, self.group_size)  # (out, in/G, G)
                trial = rounded(groups, self.bits).flatten(1) / s  # (out, in)
                linear.weight.data = trial.to(weight.dtype)
            error = (output() - wanted).float().pow(2).mean().item()
            if error < least:
                best, least = s, error

        for linear, weight in zip(linears, weights):
            linear.weight.data = weight
        return best

    def clips(self, x, weight):
        """The largest |w| to keep of each group, (out, in/G, 1). x (N, in), weight (out, in)."""
        # 512 tokens at even distances; inputs and weights by group
        x = x[::max(1, len(x) // TOKENS)][:TOKENS]  # (n, in)
        x = groups_of(x, self.group_size).transpose(0, 1)  # (in/G, n, G)
        groups = groups_of(weight, self.group_size).transpose(0, 1)  # (in/G, out, G)

        top = groups.abs().amax(-1, keepdim=True)  # (in/G, out, 1)
        best, least = top, torch.full_like(top, float("inf"))
        for shrink in SHRINKS:
            # the weights, clipped and rounded
            most = top * shrink  # (in/G, out, 1)
            clipped = groups.clamp(-most, most)  # (in/G, out, G)
            decoded = rounded(clipped, self.bits)  # (in/G, out, G)

            # how much that changes what the group contributes to the output
            moved = decoded - groups  # (in/G, out, G)
            change = x @ moved.transpose(1, 2)  # (in/G, n, out)
            error = change.pow(2).mean(1)[..., None]  # (in/G, out, 1)

            best = torch.where(error < least, most, best)
            least = torch.minimum(error, least)
        return best.transpose(0, 1).to(weight.dtype)
