"""Assignment 2: what students get wrong. Each is one change of second.py."""
WRONG = {
    "keeps_32_bits": (
        "rows = rows.to(torch.float16)", "rows = rows.float()",
        {"append_recent": "What comes back is torch.float32", "quantize_oldest": "torch.float32",
         "pin_and_read": "torch.float32", "pin_again": "torch.float32",
         "bytes_held": "two bytes a number", "whole_cache": "torch.float32"}),
    "new_tokens_first": (
        "torch.cat((self.recent, rows), dim=2)", "torch.cat((rows, self.recent), dim=2)",
        {"append_recent": "New tokens come after the old", "whole_cache": "Tokens"}),
    "quantizes_the_newest": (
        "oldest, newer = self.recent[:, :, :n], self.recent[:, :, n:]",
        "newer, oldest = self.recent[:, :, :-n], self.recent[:, :, -n:]",
        {"quantize_oldest": "are read as their codes", "pin_and_read": "Tokens", "pin_again": "Tokens",
         "whole_cache": "Tokens"}),
    "forgets_codes": (
        "self.codes = self.codes.append(codes) if self.codes is not None else codes", "self.codes = codes",
        {"quantize_oldest": "What comes back has to be", "pin_again": "",
         "whole_cache": ""}),
    "appends_codes_in_front": (
        "self.codes.append(codes)", "codes.append(self.codes)",
        {"quantize_oldest": "The new codes are appended to those that are there", "pin_again": "",
         "whole_cache": ""}),
    "a_view_holds_the_memory": (
        "self.recent = newer.clone()", "self.recent = newer",
        {"quantize_frees": "a slice is a view of the whole tensor"}),
    "does_not_count": (
        "        self.n_coded += n\n", "",
        {"quantize_oldest": "n_coded is 0", "pin_again": "", "kept_are_ignored": "",
         "whole_cache": ""}),
    "never_reads_kept": (
        "rows[b, :, positions] = self.kept_rows[b]", "pass",
        {"pin_and_read": "kept rows stand at their positions", "pin_again": "", "whole_cache": ""}),
    "pins_of_the_first_sequence": (
        "rows[b, :, positions] = self.kept_rows[b]", "rows[b, :, positions] = self.kept_rows[0]",
        {"pin_and_read": "Of sequence 0 tokens", "pin_again": "", "whole_cache": ""}),
    "positions_of_the_first_sequence": (
        "for b, positions in enumerate(self.kept_positions.long()):",
        "for b, positions in enumerate(self.kept_positions[:1].repeat(2, 1).long()):",
        {"pin_and_read": "of sequence 1 tokens"}),
    "pins_what_is_decoded": (
        "        rows = self.read()\n", "        self.kept_positions = None\n        rows = self.read()\n",
        {"pin_again": "not its code", "whole_cache": "Tokens"}),
    "adds_kept": (
        "        self.kept_rows = torch.stack(",
        "        if self.kept_positions is not None:\n"
        "            positions = torch.cat([self.kept_positions.long(), positions], dim=1)\n"
        "        self.kept_rows = torch.stack(",
        {"pin_again": "and no others"}),
    "kept_tokens_count": (
        "self.codec.encode(oldest, ignore)", "self.codec.encode(oldest)",
        {"kept_are_ignored": "Kept tokens must not stretch",
         "whole_cache": "without the kept ones in their ranges"}),
    "ignores_by_the_block": (
        "if self.n_coded <= position < self.n_coded + n:\n"
        "                        ignore[b, :, position - self.n_coded] = True",
        "if position < n:\n                        ignore[b, :, position] = True",
        {"kept_are_ignored": "positions count from the start of the text", "pin_again": "",
         "whole_cache": "Tokens"}),
    "positions_of_eight_bytes": (
        "positions.to(torch.int32)", "positions.long()",
        {"bytes_held": "positions of four bytes"}),
    "forgets_the_pins_in_its_bytes": (
        "held = [self.codes, self.recent, self.kept_rows, self.kept_positions]",
        "held = [self.codes, self.recent]",
        {"bytes_held": "two more rows in 16 bits"}),
    "partial_blocks": (
        "return blocks * self.method.block", "return max(0, waiting - self.method.recent)",
        {"due_tokens": "due gives 1; it should be 0", "stream_reads_exact": "", "asks_before_it_quantizes": "",
         "keys_and_values": "", "whole_cache": ""}),
    "one_block_only": (
        "return blocks * self.method.block", "return min(blocks, 1) * self.method.block",
        {"due_tokens": "due gives"}),
    "no_recent_tokens": (
        "max(0, waiting - self.method.recent)", "waiting",
        {"due_tokens": "due gives", "whole_cache": ""}),
    "counts_the_quantized": (
        "waiting = self.length - self.keys.n_coded", "waiting = self.length",
        {"due_tokens": "Tokens that are quantized already are not recent", "stream_reads_exact": "",
         "asks_before_it_quantizes": "", "whole_cache": ""}),
    "blocks_under_paper": (
        'if self.protocol == "paper":', "if False:",
        {"due_tokens": "This protocol knows no recent tokens", "paper_reads_codes": "Quantize, then read"}),
    "paper_reads_first": (
        'if self.protocol == "stream":\n            return exact', "if True:\n            return exact",
        {"paper_reads_codes": "a query reads even its own token's code"}),
    "stream_quantizes_first": (
        'if self.protocol == "stream":\n            return exact', "if False:\n            return exact",
        {"stream_reads_exact": "Read, then quantize"}),
    "pins_after_quantizing": (
        "            if positions is not None:\n"
        "                self.keys.keep(positions)\n"
        "                self.values.keep(positions)\n"
        "            self.keys.quantize(n)\n"
        "            self.values.quantize(n)\n",
        "            self.keys.quantize(n)\n"
        "            self.values.quantize(n)\n"
        "            if positions is not None:\n"
        "                self.keys.keep(positions)\n"
        "                self.values.keep(positions)\n",
        {"asks_before_it_quantizes": "has lost its exact row", "whole_cache": "Tokens [0"}),
    "asks_after_quantizing": (
        "            positions = self.method.keep(self, n)\n            if positions",
        "            self.keys.quantize(n)\n"
        "            self.values.quantize(n)\n"
        "            positions = self.method.keep(self, n)\n"
        "            n = 0\n"
        "            if positions",
        {"asks_before_it_quantizes": "It was asked with [(4, 4, 5)]", "keys_and_values": "with [4, 0]",
         "whole_cache": ""}),
    "asks_always": (
        "if n > 0:", "if True:",
        {"asks_before_it_quantizes": "keep should be asked once"}),
    "values_keep_nothing": (
        "                self.values.keep(positions)\n", "",
        {"keys_and_values": "keep of the values was called with []", "paper_reads_codes": "values",
         "whole_cache": "the values at the end"}),
    "keeps_one_too_many": (
        "min(self.preserve, layer.length)", "min(self.preserve + 1, layer.length)",
        {"first_tokens": "PFN(", "whole_cache": "Tokens"}),
    "keeps_from_one": (
        "torch.arange(min(self.preserve, layer.length))", "torch.arange(min(self.preserve, layer.length)) + 1",
        {"first_tokens": "keeps [0", "whole_cache": "Tokens"}),
    "needs_n_tokens": (
        "torch.arange(min(self.preserve, layer.length))", "torch.arange(self.preserve)",
        {"first_tokens": "has to be a tensor of integers of shape (3, 2)"}),
    "forgets_the_batch": (
        "first.repeat(layer.keys.recent.shape[0], 1)", "first[None]",
        {"first_tokens": "has to be a tensor of integers of shape (3, ", "whole_cache": ""}),
    "an_empty_tensor": (
        "if self.preserve == 0:", "if False:",
        {"first_tokens": "with N = 0 it should be None"}),
}
