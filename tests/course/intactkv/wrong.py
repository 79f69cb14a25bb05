"""Assignment 5, IntactKV: what students get wrong. Each is one change of second.py.

WRONG = {name: (old text, new text, {check that fails: words of its message})}, every other check
passes.
"""
WRONG = {
    "keys_after_rope": (
        "for rows in (trace.k, trace.v)]",
        "for rows in ([full.rope.rotate(k, torch.arange(len(ids))) for k in trace.k], trace.v)]",
        {"rows_of_a_prefix": "Keys are those before RoPE"}),
    "tokens_read_one_by_one": (
        "    return [torch.cat(rows).half().float() for rows in (trace.k, trace.v)]",
        "    traces = [Trace(full) for _ in ids]\n    with torch.no_grad():\n        for i, one in enumerate(traces):\n"
        "            full(torch.tensor([[ids[i]]]), one)\n"
        "    return [torch.cat([torch.cat(r) for r in rows], 2).half().float()\n"
        "            for rows in ([one.k for one in traces], [one.v for one in traces])]",
        {"rows_of_a_prefix": "as one text from its start"}),
    "first_layer_for_all": (
        "torch.cat(rows).half()", "torch.cat([rows[0]] * len(rows)).half()",
        {"rows_of_a_prefix": "In layer 1 the keys"}),
    "not_rounded": (
        ".half().float()", "",
        {"rows_in_16_bits": "A cache keeps 16 bits"}),
    "left_in_fp16": (
        ".half().float()", ".half()",
        {"rows_in_16_bits": "it should be torch.float32"}),
    "with_gradient": (
        "    with torch.no_grad():\n        full(torch.tensor([ids]), trace, logits=False)",
        "    full(torch.tensor([ids]), trace, logits=False)",
        {"rows_in_16_bits": "that require a gradient"}),
    "bos_alone_is_cut": (
        "return tokens[:, n:]", "return tokens[:, 1:]",
        {"text_behind": "What without_prefix gives"}),
    "nothing_behind": (
        "tokens.shape[1] <= n", "tokens.shape[1] < n",
        {"text_refused": "nothing is behind the prefix"}),
    "first_text_alone_is_looked_at": (
        "for row in tokens.tolist()", "for row in tokens.tolist()[:1]",
        {"text_refused": "at all texts"}),
    "first_token_alone_is_looked_at": (
        "row[:n] != list(ids)", "row[0] != ids[0]",
        {"text_refused": "look at all its tokens"}),
    "positions_from_zero": (
        "return torch.arange(T) + n", "return torch.arange(T)",
        {"positions_behind": "The prefix has the positions from 0 on",
         "cache_with_prefix": "Rotate the keys of the prefix by 0 .. n - 1"}),
    "positions_off_by_one": (
        "return torch.arange(T) + n", "return torch.arange(T) + n - 1",
        {"positions_behind": "they should be", "cache_with_prefix": "Rotate the keys"}),
    "prefix_not_rotated": (
        "first_k = rope.rotate(prefix_k, torch.arange(n))", "first_k = prefix_k",
        {"cache_with_prefix": "Rotate the keys of the prefix by 0 .. n - 1"}),
    "values_rotated": (
        "V = [torch.cat([prefix_v, row], dim=1) for row in v]",
        "V = [rope.rotate(torch.cat([prefix_v, row], dim=1), torch.arange(n + T)) for row in v]",
        {"cache_with_prefix": "Values are not rotated"}),
    "prefix_last": (
        "torch.cat([prefix_v, row], dim=1)", "torch.cat([row, prefix_v], dim=1)",
        {"cache_with_prefix": "The prefix comes first"}),
    "no_gain": (
        "return values * gain.view(L, Hkv, 1, d)", "return values",
        {"values_in_scale": "and each is multiplied"}),
    "divided_by_the_gain": (
        "values * gain.view", "values / gain.view",
        {"values_in_scale": "and each is multiplied"}),
    "gain_of_interleaved_heads": (
        "gain.view(L, Hkv, 1, d)", "gain.view(L, d, 1, Hkv).transpose(1, 3)",
        {"values_in_scale": "A head's d numbers stand together"}),
    "no_half": (
        "return total / 2", "return total",
        {"loss_of_blocks": "half of all", "loss_without_prefix": "", "loss_of_counted_tokens": ""}),
    "mean_over_blocks": (
        "return total / 2", "return total / 2 / len(outputs)",
        {"loss_of_blocks": "A sum over blocks", "loss_without_prefix": "", "loss_of_counted_tokens": ""}),
    "sum_over_channels": (
        "squares.mean(dim=2)", "squares.sum(dim=2)",
        {"loss_of_blocks": "the mean over texts, tokens and channels", "loss_without_prefix": "",
         "loss_of_counted_tokens": ""}),
    "no_squares": (
        "(output - target)[:, n:] ** 2", "(output - target)[:, n:].abs()",
        {"loss_of_blocks": "of squares", "loss_without_prefix": "", "loss_of_counted_tokens": "", "training": ""}),
    "prefix_counts": (
        "(output - target)[:, n:] ** 2", "(output - target) ** 2",
        {"loss_without_prefix": "Leave out the first n positions"}),
    "prefix_in_the_mean": (
        "squares.mean(dim=2)", "squares.mean(dim=2) * squares.shape[1] / output.shape[1]",
        {"loss_without_prefix": "the mean is over the T that are left"}),
    "all_tokens_count": (
        "row.mean() if counts is None else row[counts[b]].mean()", "row.mean()",
        {"loss_of_counted_tokens": "first the mean of each text"}),
    "one_mean_for_all_texts": (
        "torch.stack(texts).mean()", "(tokens.mean() if counts is None else tokens[counts].mean())",
        {"loss_of_counted_tokens": "weighs as much as one with five"}),
    "each_clipped_alone": (
        "return [g * largest / norm for g in gradients]",
        "return [g * min(1, largest / g.norm()) for g in gradients]",
        {"gradients_clipped": "of all tensors together", "training": ""}),
    "always_to_the_bound": (
        "    if norm <= largest:\n        return gradients\n", "",
        {"gradients_clipped": "only where the norm is larger"}),
    "each_number_clipped": (
        "return [g * largest / norm for g in gradients]",
        "return [g.clamp(-largest, largest) for g in gradients]",
        {"gradients_clipped": "times largest / norm", "training": ""}),
    "no_correction": (
        "m / (1 - 0.9 ** t), v / (1 - 0.999 ** t)", "m, v",
        {"adam_at_first": "makes up for it", "adam_later": "The new x", "training": "from where they should be"}),
    "t_begins_with_zero": (
        "    t = t + 1\n    m =", "    t = t + 1\n    t = max(1, t - 1)\n    m =",
        {"adam_later": "The new x", "training": "from where they should be"}),
    "no_root": (
        "square.sqrt() + 1e-8", "square + 1e-8",
        {"adam_at_first": "The new x", "adam_later": "The new x", "training": "from where they should be"}),
    "betas_turned_around": (
        "m = 0.9 * m + 0.1 * gradient", "m = 0.1 * m + 0.9 * gradient",
        {"adam_at_first": "The new m", "adam_later": "The new m", "training": "from where they should be"}),
    "up_the_gradient": (
        "return x - lr * mean", "return x + lr * mean",
        {"adam_at_first": "The new x", "adam_later": "The new x", "training": "from where they should be"}),
    "state_begins_anew": (
        "        rows, states = zip(*steps)", "        rows, _ = zip(*steps)",
        {"training": "a state of its own, which goes on"}),
    "trained_rows_for_both": (
        "        loss = block_loss(outputs(quantized, rows), targets, 0)",
        "        loss = block_loss(outputs(quantized, rows), outputs(full, rows), 0)",
        {"training": "full has the exact rows all the time"}),
    "not_clipped": (
        "gradients = clipped(torch.autograd.grad(loss, rows), clip)", "gradients = torch.autograd.grad(loss, rows)",
        {"training": "clip those of keys and values together"}),
    "weights_get_gradients": (
        "        gradients = clipped(torch.autograd.grad(loss, rows), clip)",
        "        loss.backward()\n        gradients = clipped([row.grad for row in rows], clip)",
        {"training": "weights of a model have a gradient"}),
    "one_update_less": (
        "for _ in range(updates)", "for _ in range(updates - 1)",
        {"training": "from where they should be"}),
    "keys_alone": (
        "return 2 * L * Hkv * d * n * 2", "return L * Hkv * d * n * 2",
        {"bytes_of_a_prefix": "keys and values"}),
    "four_bytes": (
        "return 2 * L * Hkv * d * n * 2", "return 2 * L * Hkv * d * n * 4",
        {"bytes_of_a_prefix": "two bytes a number"}),
    "scale_alone": (
        "bits + 32 / d", "bits + 16 / d",
        {"bits_on_average": "the others"}),
    "prefix_with_a_scale": (
        "16 * n +", "(16 + 32 / d) * n +",
        {"bits_on_average": "The prefix has 16 bits and no scale"}),
    "prefix_not_in_the_mean": (
        "(bits + 32 / d) * T) / (n + T)", "(bits + 32 / d) * T) / T",
        {"bits_on_average": "bits for a number"}),
}
