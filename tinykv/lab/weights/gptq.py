"""GPTQ (Frantar et al., 2022): the columns still to come make up for each column's rounding error.

If the weights of a layer with inputs X move by dW, the loss is tr(dW H dW^T), H = 2 X^T X / N. With H^-1 = U^T U, U
upper triangular, columns j = 1, 2, .. are rounded one after the other (Eq. 3):
    e = (w_j - w'_j) / U_jj,   w_k -= e U_jk  for all k > j
A group's scale and zero point come from its weights as they are when its first column is due.

Paper and practice.
- The inputs are those of the model whose blocks so far are quantized; within a block q, k, v come first, then o, then
  gate and up, then down. Each stage reads what the quantized stages before it give ("true sequential").
- A hundredth of H's mean diagonal is added to its diagonal. Columns are taken in their order ("act order" is off).
- The errors of a group of columns are handed to the later groups at once, as the paper does with 128 columns.
"""
import torch

from tinykv.lab.weights.base import Quantizer
from tinykv.lab.weights.linear import codes_of, grid, group_of

DAMP = 0.01


class GPTQ(Quantizer):
    needs_text = True

    def quantize(self, block, run, full, quantized):
        attn, mlp = block.self_attn, block.mlp

        # 1. q, k, v
        x = block.input_layernorm(quantized)  # (W, T, D)
        self.stage(block, x, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")

        # 2. o, on what the quantized q, k, v give
        self.stage(block, run.heads(attn, x), "self_attn.o_proj")

        # 3. gate and up, on the output of the quantized attention
        h = quantized + run(attn, x)  # (W, T, D)
        y = block.post_attention_layernorm(h)  # (W, T, D)
        self.stage(block, y, "mlp.gate_proj", "mlp.up_proj")

        # 4. down
        self.stage(block, mlp.gated(y), "mlp.down_proj")

    def stage(self, block, x, *names):
        """Quantize the linear layers that read x (W, T, in)."""
        H = hessian(x.flatten(0, 1))  # (in, in)
        U = inverse_factor(H)  # (in, in)
        for name in names:
            linear = block.get_submodule(name)
            group_size = group_of(linear.in_features, self.group_size)
            weight, scale, zero = compensated(linear.weight, U, self.bits, group_size)
            linear.weight.data = weight  # (out, in), on the grid
            self.replace(block, [name], grids={name: (scale, zero)})


def hessian(x):
    """x (N, in) -> H (in, in), damped."""
    H = torch.zeros(x.shape[1], x.shape[1], dtype=torch.float32, device=x.device)
    for part in x.split(4096):
        part = part.float()  # (n, in)
        H += part.T @ part * (2 / len(x))
    damping = DAMP * H.diagonal().mean().clamp(min=1e-5)  # x may be all zeros
    return H + torch.eye(len(H), dtype=torch.float32, device=H.device) * damping


def inverse_factor(H):
    """U, upper triangular, with U^T U = H^-1."""
    L = torch.linalg.cholesky(H)
    inverse = torch.cholesky_inverse(L)
    return torch.linalg.cholesky(inverse, upper=True)


def compensated(weight, U, bits, group_size):
    """weight (out, in) -> the weight on its grid (out, in), and its grid: scale, zero (out, in/G).

    Columns are rounded one after the other, and later ones move to make up for the error.
    """
    W = weight.detach().float().clone()  # (out, in)
    scales, zeros = [], []
    for begin in range(0, W.shape[1], group_size):
        end = begin + group_size

        # the group's grid, from its weights as they are now
        group = W[:, begin:end]  # (out, G)
        scale, zero = grid(group.amin(1), group.amax(1), bits)  # (out) both

        # round column by column; the group's later columns make up for the error
        errors = []
        for j in range(begin, end):
            code = codes_of(W[:, j], scale, zero, bits)  # (out)
            decoded = (code - zero) * scale  # (out)
            error = (W[:, j] - decoded) / U[j, j]  # (out)
            W[:, j] = decoded
            W[:, j + 1:end] -= error[:, None] * U[j, j + 1:end]  # (out, later columns of the group)
            errors.append(error)

        # the columns of later groups make up for all of the group's errors at once
        errors = torch.stack(errors, dim=1)  # (out, G)
        W[:, end:] -= errors @ U[begin:end, end:]  # (out, columns after the group)
        scales.append(scale)
        zeros.append(zero)
    return W, torch.stack(scales, dim=1), torch.stack(zeros, dim=1)
