"""Assignment 7, triton: what students get wrong, each as one change of answer.py: {name: (old text, new text)}."""
WRONG = {
    "forgets_the_magnitude": ("tl.where(real, tl.abs(x), -1.0)", "tl.where(real, x, -1.0)"),
    "later_of_equals": (
        "at = tl.argmax(x, axis=0, tie_break_left=True)",
        "at = tl.max(tl.where(x == tl.max(x, axis=0), tl.arange(0, N), -1), axis=0)"),
    "crosses_out_all_equals": ("tl.where(tl.arange(0, N) == at, -2.0, x)", "tl.where(x == tl.max(x, axis=0), -2.0, x)"),
    "crosses_nothing_out": ("tl.where(tl.arange(0, N) == at, -2.0, x)", "x"),
    "positions_of_the_piece": ("tl.store(position + row + i, first + at)", "tl.store(position + row + i, at)"),
    "first_piece_for_all": ("first = piece * N\n", "first = 0\n"),
    "all_pieces_write_one_place": ("row = (b * tl.num_programs(0) + piece) * K", "row = b * tl.num_programs(0) * K"),
    "sequence_forgotten": ("h + b * sequence + t * token", "h + t * token"),
    "sequences_write_one_place": ("row = (b * tl.num_programs(0) + piece) * K", "row = piece * K"),
    "numbers_are_neighbours": ("h + b * sequence + t * token", "h + b * sequence + t"),
    "no_mask": (
        "x = tl.load(h + b * sequence + t * token, mask=real, other=0.0)\n    x = tl.where(real, tl.abs(x), -1.0)",
        "x = tl.abs(tl.load(h + b * sequence + t * token))"),
    "missing_tokens_are_zero": ("tl.where(real, tl.abs(x), -1.0)", "tl.abs(x)"),
    "one_too_few": ("for i in range(K):", "for i in range(K - 1):"),
    "high_bits_first": (
        "tl.store(codes + t * 4 * W + 4 * w + i, (byte", "tl.store(codes + t * 4 * W + 4 * w + 3 - i, (byte"),
    "quarters_of_the_row": ("codes + t * 4 * W + 4 * w + i", "codes + t * 4 * W + i * W + w"),
    "shift_of_one_bit": ("(byte >> (2 * i)) & 3, mask", "(byte >> i) & 3, mask"),
    "not_masked_out": ("(byte >> (2 * i)) & 3, mask", "byte >> (2 * i), mask"),
    "stores_past_the_end": ("& 3, mask=real)", "& 3)"),
    "zero_times_code": ("return q * scale, q @ zero", "return q * (scale + zero), 0 * (q @ zero)"),
    "zero_scaled": ("return q * scale, q @ zero", "return q * scale, (q * scale) @ zero"),
    "offset_of_the_sums": ("return q * scale, q @ zero", "return q * scale, q.sum(1) * zero.sum()"),
    "no_root": ("total / tl.sqrt(4.0 * W)", "total"),
    "root_of_the_bytes": ("tl.sqrt(4.0 * W)", "tl.sqrt(1.0 * W)"),
    "no_zero_point": (" + tl.sum(x * z, axis=0)", ""),
    "scores_high_bits_first": ("code = ((byte >> (2 * i)) & 3)", "code = ((byte >> (6 - 2 * i)) & 3)"),
    "scale_of_the_first_group": (
        "grid = (kv * tl.num_programs(0) + piece) * 4 * W", "grid = kv * tl.num_programs(0) * 4 * W"),
    "heads_interleaved": ("kv = head // R", "kv = head % (tl.num_programs(1) // R)"),
    "a_kv_head_for_each_head": ("kv = head // R", "kv = 0"),
    "scores_past_the_end": ("total / tl.sqrt(4.0 * W), mask=j < tokens)", "total / tl.sqrt(4.0 * W))"),
}
