"""Assignment 6, antkv: what students get wrong, each as one change of answer.py: {name: (old text, new text)}."""
WRONG = {
    "empty_centres_move_together": ("points[spare.pop(0)]", "points[spare[0]]"),
    "points_without_weight_count": ("far[weights == 0] = -1", "pass"),
    "stops_when_near": ("torch.equal(before, centres)", "torch.allclose(before, centres, rtol=1e-3)"),
    "heads_of_zeros_weigh_1": (
        "    ordered = sorted",
        "    norm = norm.masked_fill(norm.amax(1, keepdim=True) == 0, 1.0)\n    ordered = sorted"),
    "counts_in_floats": (
        "count = -(-self.percent * layer_cache.length // 100)",
        "count = int(-(-self.percent / 100 * layer_cache.length // 1))"),
    "first_point_where_all_odds_are_0": ("chosen.append(min(at, len(points) - 1))", "chosen.append(at % len(points))"),
    "weights_of_16_bits": ("chosen, odds = [], weights.double()", "chosen, odds = [], weights.half().double()"),
    "gradient_squared_in_place": ("gradient.pow(2)", "gradient.pow_(2)"),
}

# of the page
PAGE = {
    "slots_of_a_place": (").permute(1, 3, 0, 2, 4)", ").permute(3, 1, 0, 2, 4)"),
    "one_codebook": ("return codebook[slot, code", "return codebook[0, code"),
    "high_bits_first": (">> torch.arange(0, 8, n)", ">> torch.arange(8 - n, -1, -n)"),
    "no_norm": (" * q.norm(dim=-1, keepdim=True)", ""),
    "not_the_derivative": ("A * (1 - A)", "A"),
    "heads_in_another_order": (".unflatten(2, (-1, heads_per_kv)).sum(3)", ".unflatten(2, (heads_per_kv, -1)).sum(2)"),
    "keys_for_values": ("torch.stack([of_key, of_value])", "torch.stack([of_key, of_key])"),
    "rounded_down": ("math.ceil(score.shape[-1] / 100)", "max(1, score.shape[-1] // 100)"),
}
