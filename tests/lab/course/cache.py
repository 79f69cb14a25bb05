"""Assignment 2, cache: what students get wrong, each as one change of answer.py: {name: (old text, new text)}."""
WRONG = {
    "none_keeps_nothing": (
        "            if positions is not None:\n",
        "            if positions is None: self.keys.kept_positions = None\n            if positions is not None:\n"),
    "asks_always": ("if n > 0:", "if True:"),
    "remembers_a_text_in_the_method": (
        "first = torch.arange(min(self.preserve, layer.length))",
        "self.n = min(getattr(self, 'n', self.preserve), layer.length)\n        first = torch.arange(self.n)"),
    "a_copy_only_where_there_are_gaps": ("self.recent = newer.clone()", "self.recent = newer.contiguous()"),
    "a_copy_only_of_something": (".recent = newer.clone()", ".recent = newer.clone() if newer.shape[2] else newer"),
    "kept_rows_that_keep_all_alive": (
        "        self.kept_positions = positions.to(torch.int32)",
        "        if (positions == torch.arange(positions.shape[1])).all():\n"
        "            self.kept_rows = rows[:, :, :positions.shape[1]]\n"
        "        self.kept_positions = positions.to(torch.int32)"),
}

# of the page
PAGE = {
    "quantizes_before_it_reads": (
        "        # NEW: attention reads before anything is quantized\n",
        "        if self.recent[layer, 'k'].shape[2] == self.n_recent + self.block:\n"
        "            [self.write(layer, kind) for kind in 'kv']\n"),
    "keys_before_rope": ("self.rope.rotate(k.half(), seen))", "k.half())"),
    "positions_from_the_chunk": ("self.rope.rotate(k.half(), seen))", "self.rope.rotate(k.half()))"),
    "no_window": ("== self.n_recent + self.block:", "== self.block:"),
    "keys_alone": ("\n            self.write(layer, \"v\")", ""),
    "the_newest": (".tensor_split([self.block], dim=2)", ".tensor_split([-self.block], dim=2)[::-1]"),
    "length_of_the_chunk": ("self.length = K.shape[2]", "self.length = k.shape[2]"),
}
