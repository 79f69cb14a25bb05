"""Assignment 7, triton: what students get wrong, each as one change of answer.py: {name: (old text, new text)}."""
WRONG = {
    "compares_in_16_bits": ("tl.argmax(x, axis", "tl.argmax(x.to(tl.float16), axis"),
    "any_of_equals": ("tie_break_left=True", "tie_break_left=False"),
    "unpacks_past_the_end": ("tl.load(packed + t * W + w, mask=real, other=0)", "tl.load(packed + t * W + w)"),
    "offset_of_the_sums": ("return q * scale, q @ zero", "return q * scale, q.sum(1) * zero.sum()"),
    "heads_interleaved": ("kv = head // R", "kv = head % (tl.num_programs(1) // R)"),
    "scores_past_the_end": ("total / tl.sqrt(4.0 * W), mask=j < tokens)", "total / tl.sqrt(4.0 * W))"),
    "loads_in_16_bits": ("t * token, mask=real, other=0.0)", "t * token, mask=real, other=0.0).to(tl.float16)"),
    "bytes_of_the_next_token": ("(j < tokens)[:, None] & (w < W)[None]", "((j < tokens)[:, None] & (w < P)[None])"),
    "channels_of_the_next_head": ("head * 4 * W + c, mask=c < 4 * W, other=0", "head * 4 * W + c"),
    "rows_of_P_bytes": ("(kv * tokens + j)[:, None] * W", "(kv * tokens + j)[:, None] * P"),
    "divided_by_what_is_read": ("total / tl.sqrt(4.0 * W)", "total / tl.sqrt(4.0 * P)"),
    "a_token_of_the_next_program": (
        "(byte >> (2 * i)) & 3, mask=real)\n",
        "(byte >> (2 * i)) & 3, mask=real)\n"
        "    tl.store(codes + (t + N) * 4 * W + 4 * w, byte & 3, mask=t + N < tokens)\n"),
}

# of the page
PAGE = {
    "masked_for_2_bits": ("& (2 ** BITS - 1)", "& 3"),
    "quarters_of_the_head": ("c % W, c // W", "c % (D // 4), c // (D // 4)"),
    "the_first_group": ("(kv * C + first) // GROUP * D + c", "kv * C // GROUP * D + c"),
    "sums_do_not_fade": ("acc = acc * fade +", "acc = acc +"),
}
