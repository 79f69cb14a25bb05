"""Assignment 1: what students get wrong. Each is one change of second.py."""
WRONG = {
    "one_level_too_many": (
        "scale = (hi - lo) / top(bits)", "scale = (hi - lo) / (top(bits) + 1)",
        {"grid_offset": "There are 3 steps between 4 levels", "grid_integer_zero": "the scale is"}),
    "three_levels_are_two_bits": (
        "return 2 if bits == 1.5 else 2 ** bits - 1", "return round(2 ** bits)",
        {"grid_offset": "the scale is", "grid_integer_zero": "the scale is",
         "encode_clamps": "Codes are clamped"}),
    "no_floor": (
        "scale.clamp(min=1e-5, max=6e4).half()", "scale.half()",
        {"grid_constant": "the scale takes its floor"}),
    "no_floor_far_from_zero": (
        "torch.maximum(scale, least).clamp", "scale.clamp",
        {"grid_integer_far": "The scale has to be at least max(|min|, |max|) / 2**13"}),
    "zero_point_clamped_to_codes": (
        "zero.clamp(min=-10000, max=10000)", "zero.clamp(0, top(bits))",
        {"grid_integer_zero": "it is not clamped to the codes", "grid_integer_far": "the zero point is 0"}),
    "zero_point_has_other_sign": (
        "zero = -torch.round", "zero = torch.round",
        {"grid_integer_zero": "z is -round(min X / s)", "grid_integer_far": "the zero point is"}),
    "grid_not_rounded": (
        "scale.clamp(min=1e-5, max=6e4).half(), lo.clamp(min=-65504, max=65504).half()",
        "scale.clamp(min=1e-5, max=6e4), lo.clamp(min=-65504, max=65504)",
        {"grid_offset": "scale is torch.float32; it should be torch.float16",
         "grid_constant": "scale is torch.float32"}),
    "scale_and_zero_swapped": (
        "return scale.clamp(min=1e-5, max=6e4).half(), lo.clamp(min=-65504, max=65504).half()",
        "return lo.clamp(min=-65504, max=65504).half(), scale.clamp(min=1e-5, max=6e4).half()",
        {"grid_offset": "z is min X", "grid_constant": "the scale is"}),
    "truncates": (
        "torch.round((x - z) / s)", "torch.floor((x - z) / s)",
        {"encode_codes": "q = round((x - z) / s)", "encode_half_to_even": "the even neighbour"}),
    "half_up": (
        "torch.round((x - z) / s)", "torch.floor((x - z) / s + 0.5)",
        {"encode_half_to_even": "torch.round takes the even neighbour"}),
    "no_clamp": (
        "q.clamp(0, top(bits)).to(torch.uint8)", "q.to(torch.int32).to(torch.uint8)",
        {"encode_clamps": "Codes are clamped to 0 .. 3"}),
    "decodes_in_uint8": (
        "else (q - z) * s", "else (codes - zero.to(torch.uint8)) * s",
        {"decode_codes": "in uint8 the difference wraps around"}),
    "decodes_one_formula": (
        'return q * s + z if formula == "offset" else (q - z) * s', "return q * s + z",
        {"decode_codes": "formula integer-zero gives"}),
    "channels_that_stand_apart": (
        "x.reshape(B, H, T, d // group, group)", "x.reshape(B, H, T, group, d // group).transpose(-1, -2)",
        {"quantize_tokens": "A group is G neighbouring channels of one token"}),
    "one_grid_for_all_heads": (
        "lo, hi = parts.min(dim=-1).values, parts.max(dim=-1).values",
        "lo, hi = (m.expand(B, H, T, d // group) for m in (parts.amin((1, 4))[:, None], "
        "parts.amax((1, 4))[:, None]))",
        {"quantize_tokens": "Its scale is"}),
    "short_group_filled_with_zeros": (
        "        low, high = x, x\n", "        low = high = torch.nn.functional.pad(x, (0, 0, 0, -T % group))\n",
        {"quantize_short_group": "What fills up the last group must not count"}),
    "drops_the_short_group": (
        "for part in low.split(group, dim=2)]", "for part in low.split(group, dim=2) if part.shape[2] == group]",
        {"quantize_short_group": "Its scale is"}),
    "ignores_nothing": (
        "if ignore is not None:", "if False:",
        {"quantize_ignored": "without the ignored tokens"}),
    "ignored_are_zero": (
        "masked_fill(ignore.unsqueeze(-1), math.inf)", "masked_fill(ignore.unsqueeze(-1), 0)",
        {"quantize_ignored": "Only tokens that are not ignored have a say"}),
    "a_group_of_ignored": (
        "nothing = lo > hi", "nothing = torch.zeros_like(lo, dtype=torch.bool)",
        {"quantize_ignored": "no inf, no NaN"}),
    "reads_with_the_grids_in_turn": (
        "return per_group.repeat_interleave(group, dim=2)[:, :, :T]",
        "return per_group.repeat(1, 1, group, 1)[:, :, :T]",
        {"quantize_channels": "Its codes are", "quantize_short_group": "Its codes are",
         "quantize_ignored": "Its codes are", "dequantize_groups": "your own decode gives"}),
    "high_bits_first": (
        "return (stream * 2 ** torch.arange(8)).sum(-1).to(torch.uint8)",
        "return (stream * 2 ** torch.arange(7, -1, -1)).sum(-1).to(torch.uint8)",
        {"pack_whole_bytes": "The first code of a byte has its lowest bits", "pack_last_byte": "pack of",
         "pack_across_bytes": "pack of"}),
    "codes_lie_within_a_byte": (
        "    stream = torch.stack([codes.int() >> i & 1 for i in range(bits)], dim=-1).flatten(-2)\n",
        "    wide = next(w for w in (1, 2, 4, 8) if w >= bits)\n"
        "    stream = torch.stack([codes.int() >> i & 1 for i in range(wide)], dim=-1).flatten(-2)\n"
        "    bits = wide\n",
        {"pack_across_bytes": "what pack gives has to be a tensor of integers of shape"}),
    "one_stream_for_all_rows": (
        "(stream * 2 ** torch.arange(8)).sum(-1).to(torch.uint8)\n\n\ndef unpack",
        "(stream * 2 ** torch.arange(8)).sum(-1).to(torch.uint8).flatten(0, -2)\n\n\ndef unpack",
        {"pack_last_byte": "what pack gives has to be a tensor of integers of shape"}),
    "three_levels_in_two_bits": (
        "    if bits == 1.5:\n        digits = torch.nn.functional.pad",
        "    if bits == 1.5:\n        bits = 2\n    if bits == 1.5:\n        digits = torch.nn.functional.pad",
        {"pack_three_levels": "what pack gives has to be a tensor of integers of shape"}),
    "unpacks_too_much": (
        "stream = stream[..., :n * bits].unflatten(-1, (n, bits))",
        "stream = stream[..., :stream.shape[-1] // bits * bits].unflatten(-1, (-1, bits))",
        {"unpack_codes": "what unpack gives has to be a tensor of integers of shape (2, 5)"}),
    "forgets_the_zero_points": (
        "+ 32 * groups", "+ 16 * groups",
        {"bits_in_memory": "groups of 16 + 16 bits"}),
    "half_a_byte_is_free": (
        "math.ceil(d / 5) if bits == 1.5", "d / 5 if bits == 1.5",
        {"bits_in_memory": "1.5 bits"}),
}
