"""What a cache holds: its tensors, their bytes, and what it prints."""


class HeldRows:
    """The part of `CachedRows` that counts and prints."""

    def tensors(self):
        """What is held, by part: {part: [Codes or tensor]}."""
        parts = {"kept": [self.kept_positions, self.kept_rows, self.kept_scores],
                 "coded": [self.codes],
                 "recent": [self.recent, self.recent_scores]}
        return {part: [t for t in held if t is not None] for part, held in parts.items()}

    def part_bytes(self):
        """Bytes of what is held, by part."""
        return {part: sum(t.nbytes for t in held) for part, held in self.tensors().items()}

    def __repr__(self):
        n_recent = 0 if self.recent is None else self.recent.shape[2]
        heads = [] if self.kept_positions is None else self.kept_positions.flatten(0, 1).tolist()
        parts = []
        for part, n, begin in (("coded", self.n_coded, 0), ("recent", n_recent, self.n_coded)):
            # of the head that keeps the most
            kept = max((len({i for i in head if begin <= i < begin + n}) for head in heads), default=0)
            parts.append(f"{n} {part} ({kept} of them kept)" if kept else f"{n} {part}")
        return (f"CachedRows(layer {self.layer}, {self.kind.upper()}: {self.n_coded + n_recent} tokens: "
                f"{', '.join(parts)})")


class HeldLayers:
    """The part of `KVCache` that counts and prints."""

    def part_bytes(self, kinds="kv"):
        """Bytes held by each part, of all layers' keys (kinds "k"), values ("v"), or both."""
        sums = dict.fromkeys(("kept", "coded", "recent"), 0)
        for layer in self.layers:
            for rows in (layer.keys, layer.values):
                if rows.kind in kinds:
                    for part, held in rows.part_bytes().items():
                        sums[part] += held
        return sums

    def next_length(self):
        """The length of the text at which keys or values are quantized next, in a stream."""
        lengths = []
        layer, recent = self.layers[0], self.method.recent
        for rows in (layer.keys, layer.values):
            block = self.method.block_of(rows.kind)
            old = layer.length - rows.n_coded - recent  # not among the newest `recent`
            full = max(0, old // block)  # blocks of them that are full already: of a prefix
            lengths.append(rows.n_coded + recent + (full + 1) * block)
        return min(lengths)

    @property
    def nbytes(self):
        """Bytes of everything that the cache holds of the text."""
        return sum(self.part_bytes().values())

    def __len__(self):
        """Tokens seen by all layers."""
        return self.layers[-1].length

    def __repr__(self):
        length = self.layers[0].length
        done = sum(layer.length == length for layer in self.layers)
        where = "" if done == len(self.layers) else f" in {done} of {len(self.layers)} layers"  # within a forward
        parts = ", ".join(f"{held} bytes {part}" for part, held in self.part_bytes().items())
        return f"KVCache({self.method!r}, {self.protocol}, {length} tokens{where}: {parts})"
