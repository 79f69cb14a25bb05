"""Assignment 4, ott: what students get wrong, each as one change of answer.py: {name: (old text, new text)}."""
WRONG = {
    "one_grid_for_a_head": ("min(group_size, width)", "width"),
    "values_group_longer_than_a_head": ("min(group_size, width)", "group_size"),
    "groups_of_keys_across_all_tokens": ('"channel", group_size)', '"channel", None)'),
    "quantizes_twice": ("length - recent - n_coded", "length - recent"),
    "forgets_the_window": (" + (T - coded) * d * 16", ""),
    "newcomers_in_fp16": ("new = self.size(rows.recent[:, :, :n])", "new = self.size(rows.recent[:, :, :n]).half()"),
    "layers_counted_from_1": ("layer_cache.layer < self.skip_layers", "layer_cache.layer <= self.skip_layers"),
    "two_layers_always": ("layer_cache.layer < self.skip_layers", "layer_cache.layer < 2"),
}

# of the page
PAGE = {
    "euclidean": ("keys.abs().sum(-1)", "keys.norm(dim=-1)"),
    "values_too": ("kept[..., None] & (kind == \"k\")", "kept[..., None]"),
    "kept_keys_count": ("kept[..., None] & (kind == \"k\")", "kept[..., None] & False"),
    "groups_swapped": ("dim = 2 if kind == \"k\" else 3\n    # NEW", "dim = 3 if kind == \"k\" else 2\n    # NEW"),
    "a_layer_early": ("if layer >= 2:", "if layer >= 1:"),
    "coded_tokens_compete": ("rival = kept.clone()", "rival = kept | True"),
    "the_block_alone": ("rival = kept.clone()", "rival = kept & False"),
    "the_largest": ("topk(cache.pool, largest=False)", "topk(cache.pool)"),
    "no_magnitude": ("keys.abs().sum(-1)", "keys.sum(-1)"),
    "one_less": ("topk(cache.pool,", "topk(cache.pool + 1,"),
    "reads_values": ('cache.read(layer, "k")', 'cache.read(layer, "v")'),
    "the_others_leave": (
        "kept.scatter_(2, smallest, True)", "kept[:] = torch.zeros_like(kept).scatter(2, smallest, True)"),
}

# those of the page that change what it prints: a student can hunt them (docs/course/hunt.py)
PRINTED = ["kept_keys_count", "groups_swapped", "a_layer_early", "the_block_alone", "the_largest", "no_magnitude",
           "one_less", "the_others_leave"]
