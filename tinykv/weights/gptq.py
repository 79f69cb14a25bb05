"""GPTQ (Frantar et al., 2022): each column's rounding error is made good by the columns still to come.

For inputs X of a layer the loss of moving its weights by dW is tr(dW H dW^T), H = 2 X^T X / N. With H^-1 = U^T U,
U upper triangular, columns j = 1, 2, .. are rounded one after the other (Eq. 3 of the paper):
    e = (w_j - w'_j) / U_jj,   w_k -= e U_jk  for all k > j
A group's scale and zero point are taken from the weights as they are when its first column is due.

Paper and practice.
- The inputs are those of the model whose blocks so far are quantized; within a block q, k, v come first, then o, then
  gate and up, then down, each stage reading what the quantized ones before it give ("true sequential").
- A hundredth of H's mean diagonal is added to it. Columns are taken in their order ("act order" off).
- The errors of a group of columns are handed to the rest at once, as the paper does with 128 columns.
"""
import torch

from tinykv import UserError
from tinykv.weights.base import Quantizer
from tinykv.weights.linear import codes_of, grid, group_of

DAMP = 0.01


class GPTQ(Quantizer):
    needs_text = True

    def quantize(self, block, read, full, coded):
        attn, mlp = block.self_attn, block.mlp
        x = block.input_layernorm(coded)  # (W, T, D)
        self.stage(block, x, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self.stage(block, read(attn.heads, x), "self_attn.o_proj")
        x = block.post_attention_layernorm(coded + read(attn, x))
        self.stage(block, x, "mlp.gate_proj", "mlp.up_proj")
        self.stage(block, mlp.gated(x), "mlp.down_proj")

    def stage(self, block, x, *names):
        """The linear layers that read x (W, T, in)."""
        inverse = inverse_factor(hessian(x.flatten(0, 1)))  # (in, in)
        for name in names:
            linear = block.get_submodule(name)
            group_size = group_of(linear.in_features, self.group_size)
            linear.weight.data, *of_groups = compensated(linear.weight, inverse, self.bits, group_size)
            self.replace(block, [name], {name: of_groups})


def hessian(x):
    """x (N, in) -> H (in, in), damped."""
    H = torch.zeros(x.shape[1], x.shape[1], device=x.device)
    for part in x.split(4096):
        H += part.float().T @ part.float() * (2 / len(x))
    return H + torch.eye(len(H), device=H.device) * (DAMP * H.diagonal().mean())


def inverse_factor(H):
    """U, upper triangular, with U^T U = H^-1."""
    try:
        return torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(H)), upper=True)
    except torch.linalg.LinAlgError:
        raise UserError("the Hessian of a layer's inputs is singular, or not finite; calibrate on more text") from None


def compensated(weight, U, bits, group_size):
    """weight (out, in) -> what is left of it on the grid (out, in), and the grid: scale, zero (out, in/G)."""
    W, scales, zeros = weight.detach().float().clone(), [], []
    for begin in range(0, W.shape[1], group_size):
        end = begin + group_size
        group, errors = W[:, begin:end], []  # (out, G), a view; each (out)
        scale, zero = grid(group.amin(1), group.amax(1), bits)  # (out) both
        for j in range(begin, end):
            snapped = (codes_of(W[:, j], scale, zero, bits) - zero) * scale  # (out)
            errors.append((W[:, j] - snapped) / U[j, j])
            W[:, j] = snapped
            W[:, j + 1:end] -= errors[-1][:, None] * U[j, j + 1:end]  # (out, columns of the group still to come)
        W[:, end:] -= torch.stack(errors, dim=1) @ U[begin:end, end:]  # (out, columns behind the group)
        scales.append(scale)
        zeros.append(zero)
    return W, torch.stack(scales, dim=1), torch.stack(zeros, dim=1)
