"""Assignment 3, kvsink: what students get wrong, each as one change of answer.py: {name: (old text, new text)}."""
WRONG = {
    "forgets_the_magnitude": ("hidden[0].abs().flatten()", "hidden[0].flatten()"),
    "index_for_channel": ("at % channels", "at"),
    "token_for_channel": ("at % channels", "at // channels"),
    "one_bound_is_enough": ("size[i + 1] >= 100 and share", "size[i + 1] >= 100 or share"),
    "column_for_block": ("massive[0]\n", "massive[0] + 1\n"),
    "largest_for_growth": ("size[i + 1] / size[i])", "size[i + 1])"),
    "grows_before_it_qualifies": ("max(qualified, key", "max(candidates, key"),
    "last_block_counts": ("candidates = range(blocks - 1)", "candidates = range(blocks)"),
    "embedding_is_a_block": ("share[1:layer + 1]", "share[:layer + 1]"),
    "every_block_votes": ("channel[:, layer + 1:min(layer + 4, blocks)]", "channel"),
    "four_blocks_vote": ("min(layer + 4, blocks)", "min(layer + 5, blocks)"),
    "most_votes_win": ("if votes.count(winner) >= 0.9 * len(votes) else None", ""),
    "mean_of_windows": ("return sorted(numbers)[(len(numbers) - 1) // 2]", "return sum(numbers) / len(numbers)"),
    "smallest": ("sorted(known, reverse=True)", "sorted(known)"),
    "signed": ("row[:, self.channel].abs().tolist()", "row[:, self.channel].tolist()"),
    "next_channel": ("row[:, self.channel]", "row[:, self.channel - 1]"),
    "any_channel": ("row[:, self.channel].abs().tolist()", "row.abs().amax(-1).tolist()"),
    "on_the_method": (
        "cache.shared.sinks = torch.tensor(sinks)", "self.sinks = cache.shared.sinks = torch.tensor(sinks)"),
    "any_layer": ("if layer != self.layer:", "if self.layer is None:"),
    "sinks_of_the_first_sequence": (
        "cache.shared.sinks = torch.tensor(sinks)", "cache.shared.sinks = torch.tensor(sinks[:1] * len(sinks))"),
    "positions_of_the_chunk": ("start = cache.layers[layer].length - hidden.shape[1]", "start = 0"),
    "forgets_old_sinks": ("if cache.shared.sinks is not None:", "if False:"),
    "keeps_in_lE_too": ("if layer_cache.layer > self.layer:", "if layer_cache.layer >= self.layer:"),
    "keeps_one_sequence_for_all": (
        "layer_cache.shared.sinks.unsqueeze(1)",
        "layer_cache.shared.sinks[:1].unsqueeze(1).expand(len(layer_cache.shared.sinks), 1, -1)"),
    "keeps_everywhere": ("if layer_cache.layer > self.layer:", "if layer_cache.shared.sinks is not None:"),
    "forgets_the_head_dimension": ("layer_cache.shared.sinks.unsqueeze(1)", "layer_cache.shared.sinks"),
    "nothing_without_outlier": ("return first_tokens(layer_cache, self.preserve)", "return None"),
}
