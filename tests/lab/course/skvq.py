"""Assignment 5, skvq: what students get wrong, each as one change of answer.py: {name: (old text, new text)}."""
WRONG = {
    "kept_tokens_as_zeros": ("x[~kept]", "x * ~kept[:, None]"),
    "no_largest_zero": ("z.clamp(-LARGEST, LARGEST)", "z"),
    "mean_for_the_sum": ("errors[:, group == g].sum()", "errors[:, group == g].mean()"),
    "changes_its_argument": ("    return h.clamp(SMALLEST", "    hi -= lo\n    return h.clamp(SMALLEST"),
    "small_weights_cleared_in_place": ("(len(choices), n)\n", "(len(choices), n)\n    weight[weight < 0.1] = 0\n"),
}

# of the page
PAGE = {
    "groups_of_keys_for_values": ("self.tables[layer, kind]  # (B, block", "self.tables[layer, \"k\"]  # (B, block"),
    "one_group": ("x[..., group == g]", "x[..., group >= 0]"),
    "clipped_towards_zero": ("middle = (low + high) / 2", "middle = 0 * low"),
    "not_clipped": ("low, high = alpha * low", "low, high = low"),
    "first_of_each_block": (
        "self.kept.setdefault((layer, kind), old[:, :self.n_kept])", "self.kept[layer, kind] = old[:, :self.n_kept]"),
    "one_more_kept": ("(layer, kind), old[:, :self.n_kept])", "(layer, kind), old[:, :self.n_kept + 1])"),
    "the_last_block_alone": (".append((encode", ".clear() or self.blocks[layer, kind].append((encode"),
}
