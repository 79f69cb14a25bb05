"""Assignment 5, intactkv: what students get wrong, each as one change of answer.py: {name: (old text, new text)}."""
WRONG = {
    "keys_after_rope": (
        "for rows in (trace.k, trace.v)]",
        "for rows in ([full.rope.rotate(k, torch.arange(len(ids))) for k in trace.k], trace.v)]"),
    "tokens_read_one_by_one": (
        "    return [torch.cat(rows).half().float() for rows in (trace.k, trace.v)]",
        "    traces = [Trace(full) for _ in ids]\n    with torch.no_grad():\n"
        "        for i, one in enumerate(traces):\n            full(torch.tensor([[ids[i]]]), one)\n"
        "    return [torch.cat([torch.cat(r) for r in rows], 2).half().float()\n"
        "            for rows in ([one.k for one in traces], [one.v for one in traces])]"),
    "first_layer_for_all": ("torch.cat(rows).half()", "torch.cat([rows[0]] * len(rows)).half()"),
    "not_rounded": (".half().float()", ""),
    "left_in_fp16": (".half().float()", ".half()"),
    "with_gradient": (
        "    with torch.no_grad():\n        full(torch.tensor([ids]), trace, logits=False)",
        "    full(torch.tensor([ids]), trace, logits=False)"),
    "bos_alone_is_cut": ("return tokens[:, n:]", "return tokens[:, 1:]"),
    "nothing_behind": ("tokens.shape[1] <= n", "tokens.shape[1] < n"),
    "first_text_alone_is_looked_at": ("for row in tokens.tolist()", "for row in tokens.tolist()[:1]"),
    "first_token_alone_is_looked_at": ("row[:n] != list(ids)", "row[0] != ids[0]"),
    "positions_from_zero": ("return torch.arange(T) + n", "return torch.arange(T)"),
    "positions_off_by_one": ("return torch.arange(T) + n", "return torch.arange(T) + n - 1"),
    "prefix_not_rotated": ("first_k = rope.rotate(prefix_k, torch.arange(n))", "first_k = prefix_k"),
    "values_rotated": (
        "V = [torch.cat([prefix_v, row], dim=1) for row in v]",
        "V = [rope.rotate(torch.cat([prefix_v, row], dim=1), torch.arange(n + T)) for row in v]"),
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
    "no_correction": ("m / (1 - 0.9 ** t), v / (1 - 0.999 ** t)", "m, v"),
    "t_begins_with_zero": ("    t = t + 1\n    m =", "    t = t + 1\n    t = max(1, t - 1)\n    m ="),
    "no_root": ("square.sqrt() + 1e-8", "square + 1e-8"),
    "betas_turned_around": ("m = 0.9 * m + 0.1 * gradient", "m = 0.1 * m + 0.9 * gradient"),
    "up_the_gradient": ("return x - lr * mean", "return x + lr * mean"),
    "state_begins_anew": ("        rows, states = zip(*steps)", "        rows, _ = zip(*steps)"),
    "trained_rows_for_both": (
        "        loss = block_loss(outputs(quantized, rows), targets, 0)",
        "        loss = block_loss(outputs(quantized, rows), outputs(full, rows), 0)"),
    "not_clipped": (
        "gradients = clipped(torch.autograd.grad(loss, rows), clip)", "gradients = torch.autograd.grad(loss, rows)"),
    "weights_get_gradients": (
        "        gradients = clipped(torch.autograd.grad(loss, rows), clip)",
        "        loss.backward()\n        gradients = clipped([row.grad for row in rows], clip)"),
    "one_update_less": ("for _ in range(updates)", "for _ in range(updates - 1)"),
    "keys_alone": ("return 2 * L * Hkv * d * n * 2", "return L * Hkv * d * n * 2"),
    "four_bytes": ("return 2 * L * Hkv * d * n * 2", "return 2 * L * Hkv * d * n * 4"),
    "scale_alone": ("bits + 32 / d", "bits + 16 / d"),
    "prefix_with_a_scale": ("16 * n +", "(16 + 32 / d) * n +"),
    "prefix_not_in_the_mean": ("(bits + 32 / d) * T) / (n + T)", "(bits + 32 / d) * T) / T"),
}
