"""Assignment 5, SKVQ: what students get wrong. Each is one change of second.py.

WRONG = {name: (old text, new text, {check that fails: words of its message})}, every other check
passes.
"""
WRONG = {
    "ranges_over_channels": (
        "return rows.min(dim=0).values, rows.max(dim=0).values",
        "return rows.min(dim=1).values, rows.max(dim=1).values",
        {"ranges_of_channels": "", "ranges_without_kept_tokens": "it should be", "calibration": ""}),
    "largest_magnitude": (
        "rows.max(dim=0).values", "rows.abs().max(dim=0).values",
        {"ranges_of_channels": "over the tokens, for each channel"}),
    "kept_tokens_count": (
        "if kept is None or not kept[i]", "if True",
        {"ranges_without_kept_tokens": "Leave the token out"}),
    "kept_tokens_as_zeros": (
        "rows = [row for i, row in enumerate(x) if kept is None or not kept[i]]",
        "rows = [row if kept is None or not kept[i] else row * 0 for i, row in enumerate(x)]",
        {"ranges_without_kept_tokens": "a 0 in its place would count, too"}),
    "groups_by_the_largest_number": (
        "torch.stack([lo, hi], dim=1)", "torch.stack([hi, hi], dim=1)",
        {"groups": "A point is the pair (lo, hi)"}),
    "groups_by_the_width": (
        "torch.stack([lo, hi], dim=1)", "torch.stack([hi - lo], dim=1)",
        {"groups": "A point is the pair (lo, hi)", "calibration": ""}),
    "no_reorder": (
        "return clusters(torch.stack([lo, hi], dim=1), n)", "return torch.arange(len(lo)) * n // len(lo)",
        {"groups": "A point is the pair (lo, hi)", "calibration": ""}),
    "powers_of_two": (
        "steps = 2 ** bits - 1", "steps = 2 ** bits",
        {"grid_towards_zero": "h = alpha (hi - lo)", "grid_towards_the_middle": "h is", "grid_bounds": "",
         "codes_of_groups": "Its h and z",
         "codes_are_clamped": "Its h and z", "codes_from_stored_grids": "in FP8 they should be",
         "losses_of_choices": "", "losses_with_weights": ""}),
    "alpha_for_the_step_alone": (
        "towards_zero = alpha * lo", "towards_zero = lo",
        {"grid_towards_zero": "z = alpha lo", "losses_of_choices": "centre = 0", "losses_with_weights": "centre = 0"}),
    "no_alpha_in_the_step": (
        "h = alpha * (hi - lo) / steps", "h = (hi - lo) / steps",
        {"grid_towards_zero": "h = alpha (hi - lo)", "grid_towards_the_middle": "h is",
         "codes_are_clamped": "Its h and z",
         "losses_of_choices": "", "losses_with_weights": ""}),
    "always_towards_zero": (
        "z = centre * towards_middle + (1 - centre) * towards_zero", "z = towards_zero + 0 * centre",
        {"grid_towards_the_middle": "stays where it is", "codes_are_clamped": "Its h and z",
         "losses_of_choices": "centre = 1",
         "losses_with_weights": "centre = 1"}),
    "centre_turned_around": (
        "z = centre * towards_middle + (1 - centre) * towards_zero",
        "z = (1 - centre) * towards_middle + centre * towards_zero",
        {"grid_towards_zero": "z = alpha lo", "grid_towards_the_middle": "stays where it is",
         "codes_are_clamped": "Its h and z", "losses_of_choices": "", "losses_with_weights": ""}),
    "the_middle_for_z": (
        "towards_middle = (lo + hi) / 2 - alpha * (hi - lo) / 2", "towards_middle = (lo + hi) / 2",
        {"grid_towards_the_middle": "the new lo is", "codes_are_clamped": "Its h and z", "losses_of_choices": "",
         "losses_with_weights": ""}),
    "no_smallest_step": (
        "h.clamp(SMALLEST, LARGEST)", "h",
        {"grid_bounds": "h is at least 2^-9"}),
    "no_largest_zero": (
        "z.clamp(-LARGEST, LARGEST)", "z",
        {"grid_bounds": "FP8 ends at 448"}),
    "zero_is_not_negative": (
        "z.clamp(-LARGEST, LARGEST)", "z.clamp(0, LARGEST)",
        {"grid_towards_zero": "", "grid_bounds": "FP8 ends at 448", "codes_of_groups": "Its h and z",
         "losses_of_choices": "",
         "losses_with_weights": "", "codes_are_clamped": "", "calibration": ""}),
    "neighbours_for_groups": (
        "members = group == g", "members = torch.arange(len(group)) * (int(group.max()) + 1) // len(group) == g",
        {"codes_of_groups": "Its h and z", "losses_of_choices": "", "losses_with_weights": "", "calibration": ""}),
    "one_grid_for_all_tokens": (
        "low, high = part.min(dim=1).values, part.max(dim=1).values",
        "low, high = part.min().expand(len(x)), part.max().expand(len(x))",
        {"codes_of_groups": "Its h and z", "losses_of_choices": "", "losses_with_weights": ""}),
    "one_alpha_for_all_groups": (
        "h, z = grid(low, high, bits, alpha[g], centre[g])", "h, z = grid(low, high, bits, alpha[0], centre[0])",
        {"codes_are_clamped": "Its h and z"}),
    "codes_in_the_order_of_groups": (
        "    return codes, torch.stack",
        "    codes = codes[:, group.argsort(stable=True)]\n    return codes, torch.stack",
        {"codes_of_groups": "Codes stand at the places of their channels", "losses_of_choices": "",
         "losses_with_weights": "", "calibration": ""}),
    "rounds_down": (
        "real.round()", "real.floor()",
        {"codes_of_groups": "its codes are", "codes_are_clamped": "its codes are", "codes_from_stored_grids": "",
         "losses_of_choices": "", "losses_with_weights": ""}),
    "codes_that_wrap": (
        ".clamp(0, 2 ** bits - 1).to(torch.uint8)", ".remainder(2 ** bits).to(torch.uint8)",
        {"codes_are_clamped": "Clamp the codes", "codes_from_stored_grids": "", "losses_of_choices": "",
         "losses_with_weights": ""}),
    "codes_before_rounding": (
        "        h, z = h.to(FP8), z.to(FP8)\n        real = (part - z.float()[:, None]) / h.float()[:, None]\n",
        "        real = (part - z[:, None]) / h[:, None]\n        h, z = h.to(FP8), z.to(FP8)\n",
        {"codes_from_stored_grids": "Round h and z to FP8 first", "losses_of_choices": "", "losses_with_weights": ""}),
    "stored_in_16_bits": (
        "h, z = h.to(FP8), z.to(FP8)", "h, z = h.half(), z.half()",
        {"stored_in_fp8": "it should have torch.float8_e4m3fn", "codes_from_stored_grids": "in FP8 they should be",
         "losses_of_choices": "", "losses_with_weights": ""}),
    "codes_of_32_bits": (
        "    return codes, torch.stack", "    return codes.int(), torch.stack",
        {"stored_in_fp8": "it should have torch.uint8"}),
    "zero_in_steps": (
        "return codes.float() * h[:, group] + z[:, group]", "return (codes.float() + z[:, group]) * h[:, group]",
        {"decoding": "It is read as", "losses_of_choices": "", "losses_with_weights": "", "calibration": ""}),
    "decodes_in_the_order_of_groups": (
        "return codes.float() * h[:, group] + z[:, group]",
        "group = group.sort().values\n    return codes.float() * h[:, group] + z[:, group]",
        {"decoding": "It is read as", "losses_of_choices": "", "losses_with_weights": "", "calibration": ""}),
    "no_squares": (
        "(x - decode(codes, h, z, group)) ** 2 * weight", "(x - decode(codes, h, z, group)).abs() * weight",
        {"losses_of_choices": "Sum (X - X')^2", "losses_with_weights": ""}),
    "mean_for_the_sum": (
        "errors[:, group == g].sum()", "errors[:, group == g].mean()",
        {"losses_of_choices": "Sum (X - X')^2", "losses_with_weights": ""}),
    "all_groups_together": (
        "errors[:, group == g].sum()", "errors.sum()",
        {"losses_of_choices": "Sum (X - X')^2", "losses_with_weights": ""}),
    "no_weights": (
        " * weight[:, None]", "",
        {"losses_with_weights": "Multiply each token's squared errors"}),
    "weights_squared": (
        " * weight[:, None]", " * weight[:, None] ** 2",
        {"losses_with_weights": "Multiply each token's squared errors"}),
    "first_choice_for_all": (
        "torch.full((n,), alpha), torch.full((n,), float(centre))",
        "torch.full((n,), choices[0][0]), torch.full((n,), float(choices[0][1]))",
        {"losses_of_choices": "alpha = 0.75", "losses_with_weights": "alpha = 0.75"}),
}
