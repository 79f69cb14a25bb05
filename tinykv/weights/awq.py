"""AWQ (Lin et al., 2023): channels that carry large inputs are scaled up before rounding.

For the linear layers that share an input X, s makes the weights of large inputs larger, so they are rounded finer:
    s = mean|X|**a,  scaled so that sqrt(max s * min s) = 1,   W' = Q(W diag(s)) diag(s)^-1
    a in {0, 0.05, .., 0.95}, the one that changes least the output of what comes next: attention, MLP or the layer
The scales are folded into what comes before (`base.py`). Then each group of weights, except those of q and k, is
clipped at the share 1, 0.95, .., 0.55 of its largest |w| that changes least what the group contributes to the output.

Paper and practice, as in the released code.
- The inputs are those of the full-precision model. Clips are searched on 512 tokens.
- o_proj is scaled, by way of v_proj's rows, only where each query head has a KV head of its own.
- Scaling v_proj's rows changes the values that are cached: `QuantLinear.gain` says by how much, and IntactKV minds it.
"""
import torch

from tinykv.weights.base import Quantizer, transform
from tinykv.weights.linear import codes_of, grid, group_of, rounded

RATIOS = [r / 20 for r in range(20)]
SHRINKS = [1 - i / 20 for i in range(10)]
TOKENS = 512  # that clips are searched on
ROWS = 256  # outputs at a time in that search


class AWQ(Quantizer):
    needs_text = True

    def quantize(self, block, read, full, coded):
        attn, mlp, gains = block.self_attn, block.mlp, {}
        x = block.input_layernorm(full)  # (W, T, D)
        transform(block, {"attention": self.scales(x, [attn.q_proj, attn.k_proj, attn.v_proj], lambda: read(attn, x))})
        heads = read(attn.heads, block.input_layernorm(full))  # (W, T, H * d)
        if attn.n_heads == attn.n_kv_heads:
            s = self.scales(heads, [attn.o_proj], lambda: attn.o_proj(heads))
            transform(block, {"values": s})
            gains["self_attn.v_proj"] = 1 / s
            heads = heads / s
        middle = full + attn.o_proj(heads)  # (W, T, D)
        y = block.post_attention_layernorm(middle)
        transform(block, {"mlp": self.scales(y, [mlp.gate_proj, mlp.up_proj], lambda: mlp(y))})
        gated = mlp.gated(block.post_attention_layernorm(middle))  # (W, T, M)
        transform(block, {"gated": self.scales(gated, [mlp.down_proj], lambda: mlp.down_proj(gated))})

        x, y = block.input_layernorm(full), block.post_attention_layernorm(middle)
        inputs = {"self_attn.v_proj": x, "self_attn.o_proj": heads,
                  "mlp.gate_proj": y, "mlp.up_proj": y, "mlp.down_proj": mlp.gated(y)}
        for name, x in inputs.items():
            linear = block.get_submodule(name)
            most = self.clips(x.flatten(0, 1), linear.weight)  # (out, in/G, 1)
            groups = linear.weight.unflatten(1, (most.shape[1], -1))  # (out, in/G, G)
            linear.weight.data = groups.clamp(-most, most).flatten(1)
        self.replace(block, gains=gains)

    def scales(self, x, linears, output):
        """s (in) for the linear layers that read x (W, T, in); output() runs the part of the block that is compared."""
        size = x.float().abs().flatten(0, 1).mean(0)  # (in)
        wanted, weights = output(), [linear.weight.data for linear in linears]
        group_size = group_of(len(size), self.group_size)
        best, least = None, float("inf")
        for ratio in RATIOS:
            s = size.pow(ratio).clamp(min=1e-4)  # (in)
            s = s / (s.max() * s.min()).sqrt()
            for linear, weight in zip(linears, weights):
                linear.weight.data = (rounded(weight.float() * s, self.bits, group_size) / s).to(weight.dtype)
            error = (output() - wanted).float().pow(2).mean().item()
            if error < least:
                best, least = s, error
        for linear, weight in zip(linears, weights):
            linear.weight.data = weight
        return best

    def clips(self, x, weight):
        """The largest |w| to keep of each group, (out, in/G, 1). x (N, in), weight (out, in)."""
        group_size = group_of(weight.shape[1], self.group_size)
        x = x[::max(1, len(x) // TOKENS)][:TOKENS].float()  # (n, in)
        x = x.unflatten(1, (-1, group_size)).transpose(0, 1)  # (in/G, n, G)
        found = []
        for rows in weight.float().unflatten(1, (-1, group_size)).transpose(0, 1).split(ROWS, dim=1):  # (in/G, rows, G)
            top = rows.abs().amax(-1, keepdim=True)  # (in/G, rows, 1)
            best, least = top, torch.full_like(top, float("inf"))
            for shrink in SHRINKS:
                most = top * shrink
                cut = rows.clamp(-most, most)
                scale, zero = grid(cut.amin(-1, keepdim=True), cut.amax(-1, keepdim=True), self.bits)
                moved = (codes_of(cut, scale, zero, self.bits) - zero) * scale - rows  # (in/G, rows, G)
                error = (x @ moved.transpose(1, 2)).pow(2).mean(1)[..., None]  # (in/G, rows, 1)
                best, least = torch.where(error < least, most, best), torch.minimum(error, least)
            found.append(best.transpose(0, 1))
        return torch.cat(found).to(weight.dtype)
