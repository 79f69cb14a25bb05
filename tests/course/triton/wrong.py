"""Assignment 7: what students get wrong. Each is one change of second.py."""
WRONG = {
    "forgets_the_magnitude": (
        "tl.where(real, tl.abs(x), -1.0)", "tl.where(real, x, -1.0)",
        {"topk_of_magnitudes": "The magnitude counts"}),
    "later_of_equals": (
        "at = tl.argmax(x, axis=0, tie_break_left=True)",
        "at = tl.max(tl.where(x == tl.max(x, axis=0), tl.arange(0, N), -1), axis=0)",
        {"topk_of_equals": "Of equal ones the earlier"}),
    "crosses_out_all_equals": (
        "tl.where(tl.arange(0, N) == at, -2.0, x)", "tl.where(x == tl.max(x, axis=0), -2.0, x)",
        {"topk_of_equals": "each is taken once"}),
    "crosses_nothing_out": (
        "tl.where(tl.arange(0, N) == at, -2.0, x)", "x",
        {"topk_of_one_piece": "writes the positions", "topk_of_magnitudes": "", "topk_of_equals": "",
         "topk_of_pieces": "", "topk_of_a_batch": "", "topk_at_the_end": ""}),
    "positions_of_the_piece": (
        "tl.store(position + row + i, first + at)", "tl.store(position + row + i, at)",
        {"topk_of_pieces": "Program (1, 0) writes the positions"}),
    "first_piece_for_all": (
        "first = piece * N\n", "first = 0\n",
        {"topk_of_pieces": "Program (1, 0) writes the positions"}),
    "all_pieces_write_one_place": (
        "row = (b * tl.num_programs(0) + piece) * K", "row = b * tl.num_programs(0) * K",
        {"topk_of_pieces": "Program (0, 0) writes the positions"}),
    "sequence_forgotten": (
        "h + b * sequence + t * token", "h + t * token",
        {"topk_of_a_batch": "Program (0, 1) writes the positions"}),
    "sequences_write_one_place": (
        "row = (b * tl.num_programs(0) + piece) * K", "row = piece * K",
        {"topk_of_a_batch": "Program (0, 0) writes the positions"}),
    "numbers_are_neighbours": (
        "h + b * sequence + t * token", "h + b * sequence + t",
        {"topk_of_a_batch": "The next token is 15 numbers away"}),
    "no_mask": (
        "x = tl.load(h + b * sequence + t * token, mask=real, other=0.0)\n    x = tl.where(real, tl.abs(x), -1.0)",
        "x = tl.abs(tl.load(h + b * sequence + t * token))",
        {"topk_at_the_end": "is no token"}),
    "missing_tokens_are_zero": (
        "tl.where(real, tl.abs(x), -1.0)", "tl.abs(x)",
        {"topk_at_the_end": "those that are left should be negative"}),
    "one_too_few": (
        "for i in range(K):", "for i in range(K - 1):",
        {"topk_of_one_piece": "-9", "topk_of_magnitudes": "", "topk_of_equals": "", "topk_of_pieces": "",
         "topk_of_a_batch": "", "topk_at_the_end": ""}),
    "high_bits_first": (
        "tl.store(codes + t * 4 * W + 4 * w + i, (byte", "tl.store(codes + t * 4 * W + 4 * w + 3 - i, (byte",
        {"unpack_codes": "The first code has the lowest two bits", "unpack_at_the_end": "your kernel writes"}),
    "quarters_of_the_row": (
        "codes + t * 4 * W + 4 * w + i", "codes + t * 4 * W + i * W + w",
        {"unpack_codes": "your kernel writes", "unpack_at_the_end": "your kernel writes"}),
    "shift_of_one_bit": (
        "(byte >> (2 * i)) & 3, mask", "(byte >> i) & 3, mask",
        {"unpack_codes": "your kernel writes", "unpack_at_the_end": "your kernel writes"}),
    "not_masked_out": (
        "(byte >> (2 * i)) & 3, mask", "byte >> (2 * i), mask",
        {"unpack_codes": "your kernel writes", "unpack_at_the_end": "your kernel writes"}),
    "stores_past_the_end": (
        "& 3, mask=real)", "& 3)",
        {"unpack_at_the_end": "Your kernel writes before or after its tensor"}),
    "zero_times_code": (
        "return q * scale, q @ zero", "return q * (scale + zero), 0 * (q @ zero)",
        {"fold_into_the_query": "what is multiplied by c, and what is not?"}),
    "zero_scaled": (
        "return q * scale, q @ zero", "return q * scale, (q * scale) @ zero",
        {"fold_into_the_query": "Write out the sum"}),
    "offset_of_the_sums": (
        "return q * scale, q @ zero", "return q * scale, q.sum(1) * zero.sum()",
        {"fold_into_the_query": "Write out the sum"}),
    "no_root": (
        "total / tl.sqrt(4.0 * W)", "total",
        {"scores_of_one_group": "This comes if the scores are not divided by sqrt(d)", "scores_of_groups": "",
         "scores_of_heads": "", "scores_at_the_end": ""}),
    "root_of_the_bytes": (
        "tl.sqrt(4.0 * W)", "tl.sqrt(1.0 * W)",
        {"scores_of_one_group": "it should be", "scores_of_groups": "", "scores_of_heads": "",
         "scores_at_the_end": ""}),
    "no_zero_point": (
        " + tl.sum(x * z, axis=0)", "",
        {"scores_of_one_group": "This comes if the zero points are left out", "scores_of_groups": "",
         "scores_of_heads": "", "scores_at_the_end": ""}),
    "scores_high_bits_first": (
        "code = ((byte >> (2 * i)) & 3)", "code = ((byte >> (6 - 2 * i)) & 3)",
        {"scores_of_one_group": "is taken from its highest bits", "scores_of_groups": "", "scores_of_heads": "",
         "scores_at_the_end": ""}),
    "scale_of_the_first_group": (
        "grid = (kv * tl.num_programs(0) + piece) * 4 * W", "grid = kv * tl.num_programs(0) * 4 * W",
        {"scores_of_groups": "This comes if every group has the scale of group 0", "scores_at_the_end": ""}),
    "heads_interleaved": (
        "kv = head // R", "kv = head % (tl.num_programs(1) // R)",
        {"scores_of_heads": "query head h reads KV head h % Hkv"}),
    "a_kv_head_for_each_head": (
        "kv = head // R", "kv = 0",
        {"scores_of_heads": "Query head 2 and token 0"}),
    "scores_past_the_end": (
        "total / tl.sqrt(4.0 * W), mask=j < tokens)", "total / tl.sqrt(4.0 * W))",
        {"scores_at_the_end": "Your kernel writes before or after its tensor"}),
}
