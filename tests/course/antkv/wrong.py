"""Assignment 6: what students get wrong. Each is one change of second.py."""
SCORES = {"scores_of_values": "AnS(V) is", "scores_of_keys": "AnS(K) is", "scores_of_new_queries": "AnS(V) is",
          "scores_of_heads": "AnS(V) is", "window": "by Eq. 5 it should be"}

WRONG = {
    "city_blocks": (
        "square = ((points[:, None] - centres[None]) ** 2)", "square = (points[:, None] - centres[None]).abs()",
        {"nearest_centre": "the squared distances are"}),
    "last_of_equals": (
        "return square.argmin(dim=1)", "return square.shape[1] - 1 - square.flip(1).argmin(dim=1)",
        {"nearest_centre": "Of equal ones the first centre counts"}),
    "furthest": (
        "return square.argmin(dim=1)", "return square.argmax(dim=1)",
        {"nearest_centre": "should be", "lloyd_means": "sum w x / sum w", "lloyd_without_points": "",
         "encode_each_place": "compared with centroids[p] alone", "codebook_learns": "below 30%"}),
    "first_draw_without_weights": (
        "chosen, odds = [], weights.double()", "chosen, odds = [], torch.ones_like(weights).double()",
        {"start_by_weight": "it should draw point", "start_by_distance": "the odds are"}),
    "distance_not_squared": (
        "odds = weights.double() * square.min(dim=1).values",
        "odds = weights.double() * square.min(dim=1).values.sqrt()",
        {"start_by_distance": "times its squared distance to the nearest"}),
    "further_draws_without_weights": (
        "odds = weights.double() * square.min(dim=1).values", "odds = square.double().min(dim=1).values",
        {"start_by_distance": "a point's weight times"}),
    "distance_to_the_last_centre": (
        "square.min(dim=1).values", "square[:, -1]",
        {"start_by_distance": "nearest of the centres before"}),
    "the_likeliest_point": (
        "at = int((sums <= number * sums[-1]).sum())", "at = int(odds.argmax())",
        {"start_by_weight": "u times the sum is", "start_by_distance": "the odds are"}),
    "mean_without_weights": (
        "(points[mine] * weights[mine, None]).sum(0) / weights[mine].sum()", "points[mine].mean(0)",
        {"lloyd_means": "sum w x / sum w over the points"}),
    "divided_by_the_number": (
        "(points[mine] * weights[mine, None]).sum(0) / weights[mine].sum()",
        "(points[mine] * weights[mine, None]).mean(0)",
        {"lloyd_means": "sum w x / sum w over the points", "codebook_learns": "below 30%"}),
    "empty_centres_stay": (
        "moved[c] = points[spare.pop(0)]", "pass",
        {"lloyd_without_points": "the first such centre takes the point that is furthest"}),
    "empty_centres_become_nan": (
        "if weights[mine].sum() > 0:", "if True:",
        {"lloyd_without_points": "It becomes [nan, nan]"}),
    "empty_centres_move_together": (
        "points[spare.pop(0)]", "points[spare[0]]",
        {"lloyd_without_points": "the second the next"}),
    "points_without_weight_count": (
        "far[weights == 0] = -1", "pass",
        {"lloyd_without_points": "Points without weight do not count"}),
    "one_step": (
        "    for _ in range(steps):\n", "    for _ in range(1):\n",
        {"kmeans_settles": "With steps = 2 kmeans gives"}),
    "never_stops": (
        "if torch.equal(before, centres):", "if False:",
        {"kmeans_settles": "Stop when no centre moves"}),
    "squared_norm": (
        "gradient.pow(2).sum(-1).sqrt()", "gradient.pow(2).sum(-1)",
        {"weights_are_norms": "not its square", "weights_are_clamped": ""}),
    "sum_of_magnitudes": (
        "gradient.pow(2).sum(-1).sqrt()", "gradient.abs().sum(-1)",
        {"weights_are_norms": "L2 norm", "weights_are_clamped": ""}),
    "one_weight_for_all_heads": (
        "norm = gradient.pow(2).sum(-1).sqrt()", "norm = gradient.pow(2).sum((0, 2), keepdim=True).sqrt()[..., 0]"
        ".repeat(len(gradient), 1)",
        {"weights_are_norms": "a token's row of one KV head", "weights_are_clamped": ""}),
    "nothing_clamped": (
        "return norm.clamp(max=ordered[int(0.999 * (len(ordered) - 1))])", "return norm",
        {"weights_are_clamped": "those above it are lowered to it"}),
    "no_case_for_zero": (
        "if norm.max() == 0:", "if False:",
        {"weights_of_nothing": "points of no weight"}),
    "one_codebook": (
        "nearest(points, book) for", "nearest(points, centroids[0]) for",
        {"encode_each_place": "compared with centroids[p] alone", "codebook_learns": "below 30%"}),
    "places_before_tokens": (
        "book in zip(vectors, centroids)], dim=-1)", "book in zip(vectors, centroids)])",
        {"encode_each_place": "its place in the last dimension is p", "codebook_learns": "below 30%"}),
    "heads_and_places_mixed": (
        "return x.reshape(B, T, heads, -1).transpose(1, 2)",
        "return x.unflatten(2, (-1, heads)).transpose(2, 3).flatten(3).transpose(1, 2)",
        {"decode_each_place": "beside each other", "codebook_learns": "below 30%"}),
    "decodes_by_one_codebook": (
        "centroids[p][codes[..., p]]", "centroids[0][codes[..., p]]",
        {"decode_each_place": "the centroids of places", "codebook_learns": "below 30%"}),
    "no_scale": (
        "/ d ** 0.5", "",
        SCORES | {"scores_of_values": "This comes if the scores are not divided by sqrt(d)"}),
    "no_mask": (
        's.masked_fill(~seen, float("-inf"))', "s",
        SCORES | {"scores_of_values": "queries see later keys, too"}),
    "queries_from_the_start": (
        "torch.arange(S - T, S)[:, None]", "torch.arange(T)[:, None]",
        {"scores_of_new_queries": "though it is the first of the T newest"}),
    "no_rest": (
        "A * (1 - A) * norm", "A * norm",
        {"scores_of_keys": "This comes if the factor (1 - A) is missing", "window": "keeps keys"}),
    "no_norm": (
        "A * (1 - A) * norm", "A * (1 - A)",
        {"scores_of_keys": "This comes if the factor |Q_i| is missing", "window": "keeps keys"}),
    "scores_swapped": (
        "return (of_keys.view(B, Hkv, -1, S).sum(2), of_values.view(B, Hkv, -1, S).sum(2))",
        "return (of_values.view(B, Hkv, -1, S).sum(2), of_keys.view(B, Hkv, -1, S).sum(2))",
        SCORES | {"scores_of_keys": "The order is AnS(K), AnS(V)"}),
    "mean_of_heads": (
        "of_values.view(B, Hkv, -1, S).sum(2)", "of_values.view(B, Hkv, -1, S).mean(2)",
        {"scores_of_heads": "query heads 0 and 1 read KV head 0"}),
    "heads_interleaved": (
        "k.repeat_interleave(H // Hkv, dim=1)", "k.repeat(1, H // Hkv, 1, 1)",
        {"scores_of_heads": "query heads 0 and 1 read KV head 0", "window": "by Eq. 5"}),
    "rounded_down": (
        "count = -(-self.percent * layer_cache.length // 100)", "count = self.percent * layer_cache.length // 100",
        {"keep_the_best_keys": "has to be a tensor of integers of shape (2, 2, 3)", "window": "keeps keys"}),
    "share_of_the_block": (
        "count = -(-self.percent * layer_cache.length // 100)", "count = -(-self.percent * n // 100)",
        {"keep_the_best_keys": "has to be a tensor of integers of shape (2, 2, 3)"}),
    "anchors_of_keys_for_values": (
        "best_tokens(layer_cache.values, n, share)", "best_tokens(layer_cache.keys, n, share)",
        {"keep_the_best_values": "layer_cache.values", "window": "keeps values"}),
}
