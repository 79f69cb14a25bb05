"""Assignment 3, kvsink: what students get wrong, each as one change of answer.py: {name: (old text, new text)}."""
WRONG = {
    "median_of_all_numbers": ("middle(of_token)", "middle(sum(tokens, []))"),
    "median_of_the_channel": ("middle(of_token)", "middle([t[token.index(largest)] for t in tokens])"),
    "first_window_decides": ("winner = max(votes, key=votes.count, default=None)", "winner = (votes or [None])[0]"),
    "layer_of_all_windows": ("for layer, c in named if c == winner", "for layer, c in named"),
    "keeps_one_sequence_for_all": (".unsqueeze(1)", "[:1].unsqueeze(1).expand(len(layer_cache.shared.sinks), 1, -1)"),
    "positions_in_fp16": (".sinks = torch.tensor(sinks)", ".sinks = torch.tensor(sinks, dtype=torch.float16).long()"),
    "no_median_below_one": ("largest / middle(of_token)", "largest / max(middle(of_token), 1.0)"),
}

# of the page
PAGE = {
    "no_magnitude": ("[..., CHANNEL].abs()", "[..., CHANNEL]"),
    "layer_off": ("if layer > LAYER:", "if layer >= LAYER + 2:"),
    "the_last_output": ("cache.outputs[LAYER]", "cache.outputs[-1]"),
    "one_text": ("topk(N, dim=1).indices  #", "topk(N, dim=1).indices[:1].expand(len(size), -1)  #"),
    "one_head": ("sinks[:, None].expand(-1, kept.shape[1], -1), True)", "sinks[:, None], True)"),
    "any_channel": ("[..., CHANNEL].abs()", ".abs().amax(-1)"),
    "smallest": ("size.topk(N, dim=1)", "size.topk(N, dim=1, largest=False)"),
    "one_more": ("size.topk(N, dim=1)", "size.topk(N + 1, dim=1)"),
    "pfn_of_the_first_text": ("kept[:, :, :N] = True", "kept[:1, :, :N] = True"),
    "pfn_the_last": ("kept[:, :, :N] = True", "kept[:, :, -N:] = True"),
}

# those of the page that change what it prints: a student can hunt them (docs/course/hunt.py)
PRINTED = ["layer_off", "the_last_output", "one_text", "smallest", "one_more", "pfn_of_the_first_text", "pfn_the_last"]
