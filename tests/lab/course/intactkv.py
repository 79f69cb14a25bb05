"""Assignment 5, intactkv: what students get wrong, each as one change of answer.py: {name: (old text, new text)}."""
WRONG = {
    "keys_after_rope": ("(trace.k, trace.v)", "([full.rope.rotate(k) for k in trace.k], trace.v)"),
    "not_rounded": (".half().float()", ""),
    "left_in_fp16": (".half().float()", ".half()"),
    "bos_alone_is_cut": ("return tokens[:, n:]", "return tokens[:, 1:]"),
    "nothing_behind": ("tokens.shape[1] <= n", "tokens.shape[1] < n"),
    "first_token_alone_is_looked_at": ("row[:n] != list(ids)", "row[0] != ids[0]"),
    "prefix_not_rotated": ("first_k = rope.rotate(prefix_k, torch.arange(n))", "first_k = prefix_k"),
    "prefix_last": ("torch.cat([prefix_v, row], dim=1)", "torch.cat([row, prefix_v], dim=1)"),
    "gain_of_interleaved_heads": ("gain.view(L, Hkv, 1, d)", "gain.view(L, d, 1, Hkv).transpose(1, 3)"),
    "state_begins_anew": ("        rows, states = zip(*steps)", "        rows, _ = zip(*steps)"),
    "not_clipped": ("clipped(torch.autograd.grad(loss, rows), clip)", "torch.autograd.grad(loss, rows)"),
    "clipped_beside_an_epsilon": ("largest / norm", "largest / (norm + 1e-6)"),
    "weights_get_gradients": (
        "        gradients = clipped(torch.autograd.grad(loss, rows), clip)",
        "        loss.backward()\n        gradients = clipped([row.grad for row in rows], clip)"),
}

# of the page
PAGE = {
    "high_without_zero": ("x.amax(2, keepdim=True).clamp(min=0)", "x.amax(2, keepdim=True)"),
    "eight_steps": ("((high - low) / 7)", "((high - low) / 8)"),
    "no_level_at_zero": ("torch.round(-low / scale)", "-low / scale"),
    "range_without_zero": ("x.amin(2, keepdim=True).clamp(max=0)", "x.amin(2, keepdim=True)"),
    "not_clamped": (".clamp(0, 7)", ""),
    "prefix_last": ("torch.cat([first_k, k], dim=2)", "torch.cat([k, first_k], dim=2)"),
    "values_rotated": ("return self.rope.rotate(k), v", "return self.rope.rotate(k), self.rope.rotate(v)"),
    "keys_of_another_layer": ("(x[layer].expand(", "(x[0].expand("),
    "rows_with_the_prefix": (
        "        self.rows.append((k, v))\n        if self.prefix is not None:",
        "        if self.prefix is None:\n            self.rows.append((k, v))\n        if self.prefix is not None:"),
    "another_token": ("torch.tensor([[BOS]])", "torch.tensor([[BOS + 1]])"),
    "a_mean_over_layers": (".mean((1, 2, 3)).sum() / 2", ".mean() / 2"),
}
