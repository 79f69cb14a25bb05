"""Assignment 5, intactkv: what students get wrong, each as one change of answer.py: {name: (old text, new text)}."""
WRONG = {
    "keys_after_rope": (
        "for rows in (trace.k, trace.v)]",
        "for rows in ([full.rope.rotate(k, torch.arange(len(ids))) for k in trace.k], trace.v)]"),
    "not_rounded": (".half().float()", ""),
    "left_in_fp16": (".half().float()", ".half()"),
    "bos_alone_is_cut": ("return tokens[:, n:]", "return tokens[:, 1:]"),
    "nothing_behind": ("tokens.shape[1] <= n", "tokens.shape[1] < n"),
    "first_text_alone_is_looked_at": ("for row in tokens.tolist()", "for row in tokens.tolist()[:1]"),
    "first_token_alone_is_looked_at": ("row[:n] != list(ids)", "row[0] != ids[0]"),
    "positions_from_zero": ("return torch.arange(T) + n", "return torch.arange(T)"),
    "positions_off_by_one": ("return torch.arange(T) + n", "return torch.arange(T) + n - 1"),
    "prefix_not_rotated": ("first_k = rope.rotate(prefix_k, torch.arange(n))", "first_k = prefix_k"),
    "prefix_last": ("torch.cat([prefix_v, row], dim=1)", "torch.cat([row, prefix_v], dim=1)"),
    "no_gain": ("return values * gain.view(L, Hkv, 1, d)", "return values"),
    "divided_by_the_gain": ("values * gain.view", "values / gain.view"),
    "gain_of_interleaved_heads": ("gain.view(L, Hkv, 1, d)", "gain.view(L, d, 1, Hkv).transpose(1, 3)"),
    "no_half": ("return total / 2", "return total"),
    "mean_over_blocks": ("return total / 2", "return total / 2 / len(outputs)"),
    "sum_over_channels": ("squares.mean(dim=2)", "squares.sum(dim=2)"),
    "no_squares": ("(output - target)[:, n:] ** 2", "(output - target)[:, n:].abs()"),
    "prefix_counts": ("(output - target)[:, n:] ** 2", "(output - target) ** 2"),
    "prefix_in_the_mean": ("squares.mean(dim=2)", "squares.mean(dim=2) * squares.shape[1] / output.shape[1]"),
    "all_tokens_count": ("row.mean() if counts is None else row[counts[b]].mean()", "row.mean()"),
    "one_mean_for_all_texts": (
        "torch.stack(texts).mean()", "(tokens.mean() if counts is None else tokens[counts].mean())"),
    "each_clipped_alone": (
        "return [g * largest / norm for g in gradients]", "return [g * min(1, largest / g.norm()) for g in gradients]"),
    "always_to_the_bound": ("    if norm <= largest:\n        return gradients\n", ""),
    "each_number_clipped": (
        "return [g * largest / norm for g in gradients]", "return [g.clamp(-largest, largest) for g in gradients]"),
    "t_begins_with_zero": ("    t = t + 1\n    m =", "    t = t + 1\n    t = max(1, t - 1)\n    m ="),
    "no_root": ("square.sqrt() + 1e-8", "square + 1e-8"),
    "up_the_gradient": ("return x - lr * mean", "return x + lr * mean"),
    "state_begins_anew": ("        rows, states = zip(*steps)", "        rows, _ = zip(*steps)"),
    "not_clipped": (
        "gradients = clipped(torch.autograd.grad(loss, rows), clip)", "gradients = torch.autograd.grad(loss, rows)"),
    "weights_get_gradients": (
        "        gradients = clipped(torch.autograd.grad(loss, rows), clip)",
        "        loss.backward()\n        gradients = clipped([row.grad for row in rows], clip)"),
    "one_update_less": ("for _ in range(updates)", "for _ in range(updates - 1)"),
    "keys_alone": ("return 2 * L * Hkv * d * n * 2", "return L * Hkv * d * n * 2"),
    "scale_alone": ("bits + 32 / d", "bits + 16 / d"),
    "prefix_with_a_scale": ("16 * n +", "(16 + 32 / d) * n +"),
}
