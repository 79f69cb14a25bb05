"""Assignment 4: what students get wrong. Each is one change of second.py.

WRONG = {name: (old text, new text, {check that fails: words of its message})}, every other check
passes.
"""
WRONG = {
    "keys_per_token": (
        'keys = Affine(k_bits, width, "channel", group_size)',
        'keys = Affine(k_bits, width, "token", group_size if group_size < width else None)',
        {"codec_of_keys": "consecutive tokens of one channel"}),
    "values_per_channel": (
        'Affine(v_bits, width, "token", min(group_size, width))', 'Affine(v_bits, width, "channel", group_size)',
        {"codec_of_values": "consecutive channels of one token"}),
    "bits_of_keys_for_both": (
        "values = Affine(v_bits,", "values = Affine(k_bits,",
        {"codec_of_values": "It is read as"}),
    "one_grid_for_a_head": (
        "min(group_size, width)", "width",
        {"codec_of_values": "consecutive channels of one token"}),
    "values_group_longer_than_a_head": (
        "min(group_size, width)", "group_size",
        {"codec_of_values": "group size 32 does not divide the 8 channels"}),
    "groups_of_keys_across_all_tokens": (
        '"channel", group_size)', '"channel", None)',
        {"codec_of_keys": "consecutive tokens of one channel"}),
    "one_block_at_a_time": (
        "    while n_coded", "    if n_coded",
        {"due_blocks": "all whole blocks are due", "true_bits": "kivi_bits gives"}),
    "blocks_that_are_not_full": (
        "    return n\n", "    return max(0, length - recent - n_coded)\n",
        {"due_blocks": "all whole blocks are due", "due_window": "still among the newest R",
         "true_bits": "kivi_bits gives"}),
    "no_window": (
        "<= length - recent:", "<= length:",
        {"due_window": "The window is full", "true_bits": "kivi_bits gives"}),
    "window_one_too_large": (
        "<= length - recent:", "< length - recent:",
        {"due_window": "The window is full", "true_bits": "kivi_bits gives"}),
    "quantizes_twice": (
        "while n_coded + n + block", "while n + block",
        {"due_blocks": "quantized already are not due", "due_window": "due gives"}),
    "scales_of_32_bits_in_all": (
        "groups * 2 * 16", "groups * 16",
        {"true_bits": "a scale and a zero point of 16 bits"}),
    "forgets_the_window": (
        " + (T - coded) * d * 16", "",
        {"true_bits": "each number that waits has 16 bits"}),
    "no_magnitudes": (
        "keys.float().abs().sum(dim=-1)", "keys.float().sum(dim=-1)",
        {"size_of_keys": "of |K[i, c]|", "size_in_fp32": "has size", "stream": "it should keep"}),
    "euclidean": (
        "keys.float().abs().sum(dim=-1)", "keys.float().norm(dim=-1)",
        {"size_of_keys": "of |K[i, c]|", "size_in_fp32": "has size", "stream": ""}),
    "added_up_in_fp16": (
        "keys.float().abs().sum(dim=-1)", "keys.abs().sum(dim=-1)",
        {"size_in_fp32": "fp16 ends at 65504"}),
    "largest_keys": (
        "newcomers = sorted((score, start + i) for i, score in enumerate(new[b, h].tolist()))",
        "newcomers = sorted(((score, start + i) for i, score in enumerate(new[b, h].tolist())), reverse=True)",
        {"first_pool": "The smallest scores win", "heads_and_sequences": "By sequence and head", "ties": "",
         "eviction": "", "little_room": "the smaller, comes in", "no_room": "", "stream": "it should keep"}),
    "one_too_many": (
        "return [position for _, position in newcomers[:p]]",
        "return [position for _, position in newcomers[:p + 1]]",
        {"first_pool": "keep_keys keeps", "heads_and_sequences": "By sequence and head", "ties": "", "stream": ""}),
    "tokens_that_are_not_due": (
        "new = self.size(rows.recent[:, :, :n])", "new = self.size(rows.recent)",
        {"first_pool": "Only the n oldest recent tokens compete", "stream": "it should keep"}),
    "one_pool_for_all_heads": (
        "new = self.size(rows.recent[:, :, :n])",
        "new = self.size(rows.recent[:, :, :n])\n        new = new.sum(1, keepdim=True).expand_as(new)",
        {"heads_and_sequences": "By sequence and head", "stream": ""}),
    "first_sequence_for_all": (
        "kept.append(self.one_head(rows, new, b, h))", "kept.append(self.one_head(rows, new, 0, h))",
        {"heads_and_sequences": "By sequence and head", "stream": "sequence 1"}),
    "ties_to_the_later": (
        "newcomers = sorted((score, start + i) for i, score in enumerate(new[b, h].tolist()))",
        "newcomers = sorted(((score, start + i) for i, score in enumerate(new[b, h].tolist())), "
        "key=lambda pair: (pair[0], -pair[1]))",
        {"ties": "Sort with stable=True"}),
    "newcomers_win_ties": (
        "elected = sorted(pool + newcomers)[:p]",
        "elected = sorted(pool + newcomers, key=lambda pair: (pair[0], -pair[1]))[:p]",
        {"ties": "a newcomer of equal score does not take a place"}),
    "pool_does_not_compete": (
        "elected = sorted(pool + newcomers)[:p]", "elected = newcomers[:p]",
        {"ties": "", "pool_stays": "compete with the new ones", "eviction": "", "stream": ""}),
    "pool_is_never_changed": (
        "elected = sorted(pool + newcomers)[:p]", "elected = pool",
        {"eviction": "has the smallest score of all", "little_room": "", "no_room": "In head 1", "stream": ""}),
    "positions_of_the_block": (
        "start = rows.n_coded", "start = 0",
        {"eviction": "n_coded = 4, not 0", "little_room": "", "no_room": "", "stream": ""}),
    "evicted_tokens_are_dropped": (
        " + extra + evicted", " + extra",
        {"eviction": "goes to the extra pool", "little_room": "", "no_room": "In head 1", "stream": ""}),
    "extra_pool_is_forgotten": (
        " + extra + evicted", " + evicted",
        {"eviction": "A token never leaves the extra pool", "little_room": "", "no_room": "In head 0", "stream": ""}),
    "extra_pool_without_an_end": (
        "newcomers = newcomers[:room]", "pass",
        {"little_room": "there is room for one evicted token", "no_room": "The extra pool is full", "stream": ""}),
    "all_or_none": (
        "newcomers = newcomers[:room]", "newcomers = newcomers if room >= p else []",
        {"little_room": "there is room for one evicted token", "no_room": "In head 1", "stream": ""}),
    "unused_entries_count": (
        "room = self.extra_pool - len(extra)", "room = self.extra_pool - len(positions[p:])",
        {"no_room": "In head 1", "stream": ""}),
    "drops_what_finds_no_room": (
        "newcomers = newcomers[:room]", "evicted_fit = room",
        {"little_room": "there is room for one evicted token", "no_room": "", "stream": ""}),
    "layers_counted_from_1": (
        "layer_cache.layer < self.skip_layers", "layer_cache.layer <= self.skip_layers",
        {"layers_without_a_pool": "Layers are counted from 0", "stream": "nothing is in full precision"}),
    "a_pool_in_every_layer": (
        "if layer_cache.layer < self.skip_layers:", "if False:",
        {"layers_without_a_pool": "it should be None"}),
}
