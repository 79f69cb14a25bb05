"""Assignment 2: an answer."""
import torch

ASSIGNMENT = "cache"


class Rows:
    def __init__(self, codec):
        self.codec = codec
        self.codes, self.n_coded = None, 0
        self.recent = None
        self.kept_positions = None
        self.kept_rows = None

    def append(self, rows):
        rows = rows.to(torch.float16)
        self.recent = rows if self.recent is None else torch.cat((self.recent, rows), dim=2)

    def quantize(self, n):
        oldest, newer = self.recent[:, :, :n], self.recent[:, :, n:]
        ignore = None
        if self.kept_positions is not None:
            B, H = oldest.shape[:2]
            ignore = torch.zeros(B, H, n, dtype=torch.bool)
            for b, positions in enumerate(self.kept_positions.tolist()):
                for position in positions:
                    if self.n_coded <= position < self.n_coded + n:
                        ignore[b, :, position - self.n_coded] = True
        codes = self.codec.encode(oldest, ignore)
        self.codes = self.codes.append(codes) if self.codes is not None else codes
        self.recent = newer.clone()
        self.n_coded += n

    def read(self):
        parts = [self.recent]
        if self.codes is not None:
            parts.insert(0, self.codec.decode(self.codes).half())
        rows = torch.cat(parts, dim=2)
        if self.kept_positions is not None:
            for b, positions in enumerate(self.kept_positions.long()):
                rows[b, :, positions] = self.kept_rows[b]
        return rows

    def keep(self, positions):
        rows = self.read()
        self.kept_rows = torch.stack([rows[b, :, at] for b, at in enumerate(positions.long())])
        self.kept_positions = positions.to(torch.int32)

    @property
    def nbytes(self):
        held = [self.codes, self.recent, self.kept_rows, self.kept_positions]
        return sum(part.nbytes for part in held if part is not None)


class Layer:
    def __init__(self, k_codec, v_codec, method, protocol):
        self.keys, self.values = Rows(k_codec), Rows(v_codec)
        self.method, self.protocol = method, protocol
        self.length = 0

    def due(self):
        waiting = self.length - self.keys.n_coded
        if self.protocol == "paper":
            return waiting
        blocks = max(0, waiting - self.method.recent) // self.method.block
        return blocks * self.method.block

    def update(self, k, v):
        self.keys.append(k)
        self.values.append(v)
        self.length += k.shape[2]
        exact = self.keys.read(), self.values.read()
        n = self.due()
        if n > 0:
            positions = self.method.keep(self, n)
            if positions is not None:
                self.keys.keep(positions)
                self.values.keep(positions)
            self.keys.quantize(n)
            self.values.quantize(n)
        if self.protocol == "stream":
            return exact
        return self.keys.read(), self.values.read()


class PFN:
    def __init__(self, preserve, recent=0, block=1):
        self.preserve, self.recent, self.block = preserve, recent, block

    def keep(self, layer, n):
        if self.preserve == 0:
            return None
        first = torch.arange(min(self.preserve, layer.length))
        return first.repeat(layer.keys.recent.shape[0], 1)
