"""Assignment 1, affine: what students get wrong, each as one change of answer.py: {name: (old text, new text)}."""
WRONG = {
    "a_group_of_one_number_is_nothing": ("nothing = lo > hi", "nothing = lo >= hi"),
    "no_floor": ("scale.clamp(min=1e-5, max=6e4).half()", "scale.half()"),
    "no_floor_far_from_zero": ("torch.maximum(scale, least).clamp", "scale.clamp"),
    "half_up": ("torch.round((x - z) / s)", "torch.floor((x - z) / s + 0.5)"),
    "no_clamp": ("q.clamp(0, top(bits)).to(torch.uint8)", "q.to(torch.int32).to(torch.uint8)"),
    "decodes_in_uint8": ("else (q - z) * s", "else (codes - zero.to(torch.uint8)) * s"),
    "one_grid_for_all_heads": (
        "lo, hi = parts.min(dim=-1).values, parts.max(dim=-1).values",
        "lo, hi = (m.expand(B, H, T, d // group) for m in (parts.amin((1, 4))[:, None], parts.amax((1, 4))[:, None]))"),
    "drops_the_short_group": ("in low.split(group, dim=2)", "in low.split(group, dim=2) if part.shape[2] == group"),
    "ignored_are_zero": ("masked_fill(ignore.unsqueeze(-1), math.inf)", "masked_fill(ignore.unsqueeze(-1), 0)"),
    "a_group_of_ignored": ("nothing = lo > hi", "nothing = torch.zeros_like(lo, dtype=torch.bool)"),
    "reads_with_the_grids_in_turn": (".repeat_interleave(group, dim=2)[:, :, :T]", ".repeat(1, 1, group, 1)[:, :, :T]"),
    "three_levels_in_two_bits": ("digits = torch.", "bits = 2\n    if bits == 1.5:\n        digits = torch."),
    "unpacks_too_much": (":n * bits].unflatten(-1, (n", ":stream.shape[-1] // bits * bits].unflatten(-1, (-1"),
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
