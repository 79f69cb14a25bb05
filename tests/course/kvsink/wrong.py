"""Assignment 3: what students get wrong. Each is one change of second.py.

WRONG = {name: (old text, new text, {check that fails: words of its message})}, every other check
passes.
"""
WRONG = {
    "forgets_the_magnitude": (
        "hidden[0].abs().flatten()", "hidden[0].flatten()",
        {"outlier_of_a_block": "The median is of |h|", "outlier_below_zero": "Take magnitudes",
         "calibration_finds_it": "ZeroDivisionError"}),
    "index_for_channel": (
        "at % channels", "at",
        {"outlier_of_a_block": "An index into all", "outlier_below_zero": "An index into all",
         "calibration_finds_it": "has an outlier of about"}),
    "token_for_channel": (
        "at % channels", "at // channels",
        {"outlier_of_a_block": "outlier gives channel", "outlier_below_zero": "outlier gives channel",
         "calibration_finds_it": "has an outlier of about"}),
    "one_bound_is_enough": (
        "size[i + 1] >= 100 and share", "size[i + 1] >= 100 or share",
        {"massive_outlier": "Both bounds have to be reached"}),
    "column_for_block": (
        "massive[0]\n", "massive[0] + 1\n",
        {"massive_outlier": "Column l + 1 belongs to block l", "votes_for_the_channel": "(1, ",
         "calibration_finds_it": "After calibrate"}),
    "largest_for_growth": (
        "size[i + 1] / size[i])", "size[i + 1])",
        {"growing_outlier": "the largest number grows most in block 1"}),
    "grows_before_it_qualifies": (
        "max(qualified, key", "max(candidates, key",
        {"growing_outlier": "does not qualify"}),
    "last_block_counts": (
        "candidates = range(blocks - 1)", "candidates = range(blocks)",
        {"no_outlier": "the outlier comes in the last block"}),
    "embedding_is_a_block": (
        "share[1:layer + 1]", "share[:layer + 1]",
        {"no_outlier": "is no block"}),
    "every_block_votes": (
        "channel[:, layer + 1:layer + 4]", "channel",
        {"votes_for_the_channel": "have no vote", "calibration_finds_it": "layer None"}),
    "most_votes_win": (
        "if votes.count(winner) >= 0.9 * len(votes) else None", "",
        {"votes_for_the_channel": "less than 90%"}),
    "mean_of_windows": (
        "return sorted(numbers)[(len(numbers) - 1) // 2]", "return sum(numbers) / len(numbers)",
        {"median_of_the_windows": "the median over the windows decides"}),
    "smallest": (
        "sorted(known, reverse=True)", "sorted(known)",
        {"observe_top_k": "Sort by hidden", "observe_magnitudes": "k = 2", "observe_one_layer": "k",
         "observe_batch": "k = 2", "observe_chunks": "k = 2", "window": "full precision",
         "generation": "full precision"}),
    "signed": (
        "row[:, self.channel].abs().tolist()", "row[:, self.channel].tolist()",
        {"observe_magnitudes": "The paper sorts by |H[i, c]|"}),
    "next_channel": (
        "row[:, self.channel]", "row[:, self.channel - 1]",
        {"observe_top_k": "Sort by hidden", "observe_magnitudes": "", "observe_one_layer": "",
         "observe_batch": "", "observe_chunks": "", "window": "", "generation": ""}),
    "any_channel": (
        "row[:, self.channel].abs().tolist()", "row.abs().amax(-1).tolist()",
        {"observe_top_k": "Sort by hidden"}),
    "any_layer": (
        "if layer != self.layer:", "if self.layer is None:",
        {"observe_one_layer": "Look at block lE, and at no other", "observe_top_k": "",
         "observe_few_tokens": "", "window": "", "generation": ""}),
    "sinks_of_the_first_sequence": (
        "cache.shared.sinks = torch.tensor(sinks)",
        "cache.shared.sinks = torch.tensor(sinks[:1] * len(sinks))",
        {"observe_batch": "of sequence 1", "window": "", "generation": ""}),
    "positions_of_the_chunk": (
        "start = cache.layers[layer].length - hidden.shape[1]", "start = 0",
        {"observe_chunks": "Count positions from the start of the text", "generation": ""}),
    "forgets_old_sinks": (
        "if cache.shared.sinks is not None:", "if False:",
        {"observe_chunks": "neither of the two is forgotten", "generation": ""}),
    "first_chunk_only": (
        "if layer != self.layer:", "if layer != self.layer or cache.shared.sinks is not None:",
        {"observe_chunks": "neither of the two is forgotten", "generation": ""}),
    "one_too_many": (
        "[:self.preserve]", "[:self.preserve + 1]",
        {"observe_top_k": "has to be a tensor of integers of shape (1, ", "observe_magnitudes": "",
         "observe_one_layer": "", "observe_batch": "", "observe_chunks": "", "window": "",
         "generation": ""}),
    "keeps_in_lE_too": (
        "if layer_cache.layer > self.layer:", "if layer_cache.layer >= self.layer:",
        {"keep_after_the_layer": "Layers up to lE have stored their keys before", "window": "AttributeError",
         "generation": "AttributeError"}),
    "keeps_one_sequence_for_all": (
        "layer_cache.shared.sinks.unsqueeze(1)",
        "layer_cache.shared.sinks[:1].unsqueeze(1).expand(len(layer_cache.shared.sinks), 1, -1)",
        {"keep_after_the_layer": "Each sequence of a batch keeps its own", "window": "",
         "generation": ""}),
    "keeps_everywhere": (
        "if layer_cache.layer > self.layer:", "if layer_cache.shared.sinks is not None:",
        {"keep_after_the_layer": "it should give None", "generation": "Layer 0"}),
    "forgets_the_head_dimension": (
        "layer_cache.shared.sinks.unsqueeze(1)", "layer_cache.shared.sinks",
        {"keep_after_the_layer": "What keep_keys gives has to be a tensor of integers of shape (2, 1, 2)",
         "window": "could not be used", "generation": "could not be used"}),
    "nothing_without_outlier": (
        "return first_tokens(layer_cache, self.preserve)", "return None",
        {"keep_without_outlier": "it should keep the first"}),
}
