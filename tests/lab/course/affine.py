"""Assignment 1, affine: what students get wrong, each as one change of answer.py: {name: (old text, new text)}."""
WRONG = {
    "a_group_of_one_number_is_nothing": ("nothing = lo > hi", "nothing = lo >= hi"),
    "half_up": ("torch.round((x - z) / s)", "torch.floor((x - z) / s + 0.5)"),
    "one_grid_for_all_heads": (
        "lo, hi = parts.min(dim=-1).values, parts.max(dim=-1).values",
        "lo, hi = (m.expand(B, H, T, d // group) for m in (parts.amin((1, 4))[:, None], parts.amax((1, 4))[:, None]))"),
    "ignored_are_zero": ("masked_fill(ignore.unsqueeze(-1), math.inf)", "masked_fill(ignore.unsqueeze(-1), 0)"),
    "half_a_byte_is_free": ("math.ceil(d / 5) if bits == 1.5", "d / 5 if bits == 1.5"),
    "quantize_changes_x": ("    B, H, T, d = x.shape\n", "    B, H, T, d = x.clamp_(-65504, 65504).shape\n"),
}

# of the page
PAGE = {
    "four_steps": ("scale, zero = (high - low) / 3, low", "scale, zero = (high - low) / 4, low"),
    "not_stored": ("return scale.half().float(), zero.half().float()", "return scale, zero"),
    "zero_in_the_middle": ("/ 3, low  #", "/ 3, (low + high) / 2  #"),
    "high_bits_first": (
        "torch.cat([codes & 3, codes >> 2 & 3, codes >> 4 & 3, codes >> 6], dim=-1)",
        "torch.cat([codes >> 6, codes >> 4 & 3, codes >> 2 & 3, codes & 3], dim=-1)"),
    "neighbours_in_a_byte": (
        "codes >> 6], dim=-1)  #", "codes >> 6], dim=-1).unflatten(-1, (4, -1)).transpose(-1, -2).flatten(-2)  #"),
    "zero_in_steps": ("return scale * code + zero", "return scale * (code + zero)"),
}

# those of the page that change what it prints: a student can hunt them (docs/course/hunt.py)
PRINTED = ["not_stored", "zero_in_the_middle", "high_bits_first", "neighbours_in_a_byte", "zero_in_steps"]
