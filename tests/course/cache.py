"""Assignment 2, cache: what students get wrong, each as one change of answer.py: {name: (old text, new text)}."""
WRONG = {
    "keeps_32_bits": ("rows = rows.to(torch.float16)", "rows = rows.float()"),
    "new_tokens_first": ("torch.cat((self.recent, rows), dim=2)", "torch.cat((rows, self.recent), dim=2)"),
    "quantizes_the_newest": (
        "oldest, newer = self.recent[:, :, :n], self.recent[:, :, n:]",
        "newer, oldest = self.recent[:, :, :-n], self.recent[:, :, -n:]"),
    "forgets_codes": (".codes = self.codes.followed_by(codes) if self.codes is not None else codes", ".codes = codes"),
    "appends_codes_in_front": ("self.codes.followed_by(codes)", "codes.followed_by(self.codes)"),
    "does_not_count": ("        self.n_coded += n\n", ""),
    "never_reads_kept": ("rows[b, :, positions] = self.kept_rows[b]", "pass"),
    "pins_of_the_first_sequence": ("[b, :, positions] = self.kept_rows[b]", "[b, :, positions] = self.kept_rows[0]"),
    "positions_of_the_first_sequence": ("self.kept_positions.long()", "self.kept_positions[:1].repeat(2, 1).long()"),
    "pins_what_is_decoded": ("rows = self.read()", "self.kept_positions = None\n        rows = self.read()"),
    "adds_kept": (
        "        self.kept_rows = torch.stack(",
        "        if self.kept_positions is not None:\n"
        "            positions = torch.cat([self.kept_positions.long(), positions], dim=1)\n"
        "        self.kept_rows = torch.stack("),
    "kept_tokens_count": ("self.codec.encode(oldest, ignore)", "self.codec.encode(oldest)"),
    "ignores_by_the_block": (
        "if self.n_coded <= position < self.n_coded + n:\n"
        "                        ignore[b, :, position - self.n_coded] = True",
        "if position < n:\n                        ignore[b, :, position] = True"),
    "positions_of_eight_bytes": ("positions.to(torch.int32)", "positions.long()"),
    "forgets_the_pins_in_its_bytes": ("codes, self.recent, self.kept_rows, self.kept_positions", "codes, self.recent"),
    "partial_blocks": ("return blocks * self.method.block", "return max(0, waiting - self.method.recent)"),
    "one_block_only": ("return blocks * self.method.block", "return min(blocks, 1) * self.method.block"),
    "no_recent_tokens": ("max(0, waiting - self.method.recent)", "waiting"),
    "counts_the_quantized": ("waiting = self.length - self.keys.n_coded", "waiting = self.length"),
    "paper_quantizes_all_again": ("            return waiting\n", "            return self.length\n"),
    "blocks_under_paper": ('if self.protocol == "paper":', "if False:"),
    "paper_reads_first": ('self.protocol == "stream":\n            return exact', "True:\n            return exact"),
    "stream_quantizes_first": ('if self.protocol == "stream":\n            return', "if False:\n            return"),
    "pins_after_quantizing": (
        "            if positions is not None:\n                self.keys.keep(positions)\n"
        "                self.values.keep(positions)\n            self.keys.quantize(n)\n"
        "            self.values.quantize(n)\n",
        "            self.keys.quantize(n)\n            self.values.quantize(n)\n"
        "            if positions is not None:\n                self.keys.keep(positions)\n"
        "                self.values.keep(positions)\n"),
    "asks_after_quantizing": (
        "            positions = self.method.keep(self, n)\n            if positions",
        "            self.keys.quantize(n)\n            self.values.quantize(n)\n"
        "            positions = self.method.keep(self, n)\n            n = 0\n            if positions"),
    "asks_always": ("if n > 0:", "if True:"),
    "values_keep_nothing": ("                self.values.keep(positions)\n", ""),
    "keeps_one_too_many": ("min(self.preserve, layer.length)", "min(self.preserve + 1, layer.length)"),
    "needs_n_tokens": ("torch.arange(min(self.preserve, layer.length))", "torch.arange(self.preserve)"),
    "forgets_the_batch": ("first.repeat(layer.keys.recent.shape[0], 1)", "first[None]"),
    "an_empty_tensor": ("if self.preserve == 0:", "if False:"),
    "a_copy_only_where_there_are_gaps": ("self.recent = newer.clone()", "self.recent = newer.contiguous()"),
    "a_copy_only_of_something": (".recent = newer.clone()", ".recent = newer.clone() if newer.shape[2] else newer"),
    "kept_rows_that_keep_all_alive": (
        "        self.kept_positions = positions.to(torch.int32)",
        "        first = torch.arange(positions.shape[1]).expand_as(positions)\n"
        "        if positions.equal(first):\n            self.kept_rows = rows[:, :, :positions.shape[1]]\n"
        "        self.kept_positions = positions.to(torch.int32)"),
    "room_for_twice_as_many": (
        "        self.recent = rows if self.recent is None else torch.cat((self.recent, rows), dim=2)",
        "        rows = rows if self.recent is None else torch.cat((self.recent, rows), dim=2)\n"
        "        self.recent = torch.cat((rows, rows), dim=2)[:, :, :rows.shape[2]]"),
    "decoded_rows_elsewhere": (
        "            parts.insert(0, self.codec.decode(self.codes).half())",
        "            known = Rows.__dict__.get(\"known\") or setattr(Rows, \"known\", {}) or Rows.known\n"
        "            if known.get(id(self), (0,))[0] != self.n_coded:\n"
        "                known[id(self)] = self.n_coded, self.codec.decode(self.codes).half(), self\n"
        "            parts.insert(0, known[id(self)][1])"),
}

# of the page
PAGE = {
    "quantizes_before_it_reads": (
        "        # NEW: attention reads before anything is quantized\n",
        "        if self.recent[layer, \"k\"].shape[2] == self.n_recent + self.block:\n"
        "            self.write(layer, \"k\")\n            self.write(layer, \"v\")\n"),
    "keys_before_rope": ("self.rope.rotate(k.half(), seen))", "k.half())"),
    "positions_from_the_chunk": ("self.rope.rotate(k.half(), seen))", "self.rope.rotate(k.half()))"),
    "no_window": ("== self.n_recent + self.block:", "== self.block:"),
    "keys_alone": (
        "            self.write(layer, \"k\")\n            self.write(layer, \"v\")",
        "            self.write(layer, \"k\")"),
    "the_newest": (
        "old, recent = self.recent[layer, kind].tensor_split([self.block], dim=2)",
        "recent, old = self.recent[layer, kind].tensor_split([-self.block], dim=2)"),
    "the_last_block_alone": (
        "for block in self.blocks[layer, kind]]\n        return",
        "for block in self.blocks[layer, kind][-1:]]\n        return"),
    "recent_first": (
        "torch.cat([*decoded, self.recent[layer, kind].float()], dim=2)",
        "torch.cat([self.recent[layer, kind].float(), *decoded], dim=2)"),
    "length_of_the_chunk": ("self.length = K.shape[2]", "self.length = k.shape[2]"),
}
