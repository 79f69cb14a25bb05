"""Assignment 6, antkv: what students get wrong, each as one change of answer.py: {name: (old text, new text)}."""
WRONG = {
    "city_blocks": (
        "square = ((points[:, None] - centres[None]) ** 2)", "square = (points[:, None] - centres[None]).abs()"),
    "last_of_equals": ("return square.argmin(dim=1)", "return square.shape[1] - 1 - square.flip(1).argmin(dim=1)"),
    "furthest": ("return square.argmin(dim=1)", "return square.argmax(dim=1)"),
    "first_draw_without_weights": (
        "chosen, odds = [], weights.double()", "chosen, odds = [], torch.ones_like(weights).double()"),
    "distance_not_squared": (
        "odds = weights.double() * square.min(dim=1).values",
        "odds = weights.double() * square.min(dim=1).values.sqrt()"),
    "further_draws_without_weights": (
        "odds = weights.double() * square.min(dim=1).values", "odds = square.double().min(dim=1).values"),
    "distance_to_the_last_centre": ("square.min(dim=1).values", "square[:, -1]"),
    "the_likeliest_point": ("at = int((sums <= number * sums[-1]).sum())", "at = int(odds.argmax())"),
    "empty_centres_stay": ("moved[c] = points[spare.pop(0)]", "pass"),
    "empty_centres_move_together": ("points[spare.pop(0)]", "points[spare[0]]"),
    "points_without_weight_count": ("far[weights == 0] = -1", "pass"),
    "one_step": ("    for _ in range(steps):\n", "    for _ in range(1):\n"),
    "never_stops": ("if torch.equal(before, centres):", "if False:"),
    "stops_when_near": ("torch.equal(before, centres)", "torch.allclose(before, centres, atol=1e-3)"),
    "heads_of_zeros_weigh_1": (
        "    ordered = sorted",
        "    norm = norm.masked_fill(norm.amax(1, keepdim=True) == 0, 1.0)\n    ordered = sorted"),
    "squared_norm": ("gradient.pow(2).sum(-1).sqrt()", "gradient.pow(2).sum(-1)"),
    "sum_of_magnitudes": ("gradient.pow(2).sum(-1).sqrt()", "gradient.abs().sum(-1)"),
    "no_case_for_zero": ("if norm.max() == 0:", "if False:"),
    "one_codebook": ("nearest(points, book) for", "nearest(points, centroids[0]) for"),
    "places_before_tokens": ("book in zip(vectors, centroids)], dim=-1)", "book in zip(vectors, centroids)])"),
    "heads_and_places_mixed": (
        "return x.reshape(B, T, heads, -1).transpose(1, 2)",
        "return x.unflatten(2, (-1, heads)).transpose(2, 3).flatten(3).transpose(1, 2)"),
    "decodes_by_one_codebook": ("centroids[p][codes[..., p]]", "centroids[0][codes[..., p]]"),
    "no_scale": ("/ d ** 0.5", ""),
    "no_mask": ('s.masked_fill(~seen, float("-inf"))', "s"),
    "queries_from_the_start": ("torch.arange(S - T, S)[:, None]", "torch.arange(T)[:, None]"),
    "no_rest": ("A * (1 - A) * norm", "A * norm"),
    "no_norm": ("A * (1 - A) * norm", "A * (1 - A)"),
    "mean_of_heads": ("of_values.view(B, Hkv, -1, S).sum(2)", "of_values.view(B, Hkv, -1, S).mean(2)"),
    "heads_interleaved": ("k.repeat_interleave(H // Hkv, dim=1)", "k.repeat(1, H // Hkv, 1, 1)"),
    "rounded_down": (
        "count = -(-self.percent * layer_cache.length // 100)", "count = self.percent * layer_cache.length // 100"),
    "share_of_the_block": (
        "count = -(-self.percent * layer_cache.length // 100)", "count = -(-self.percent * n // 100)"),
    "anchors_of_keys_for_values": (
        "best_tokens(layer_cache.values, n, share)", "best_tokens(layer_cache.keys, n, share)"),
    "counts_in_floats": (
        "count = -(-self.percent * layer_cache.length // 100)",
        "count = int(-(-self.percent / 100 * layer_cache.length // 1))"),
    "first_point_where_all_odds_are_0": ("chosen.append(min(at, len(points) - 1))", "chosen.append(at % len(points))"),
    "weights_of_16_bits": ("chosen, odds = [], weights.double()", "chosen, odds = [], weights.half().double()"),
}
