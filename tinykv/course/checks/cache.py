"""Assignment 2: a layer's cache in three parts, two protocols, and PFN."""
import torch

from tinykv.codecs.affine import Affine
from tinykv.course.check import check, expect, expect_tensor, normal

NUMBER, TITLE = 2, "the cache"
ANSWERS = ("tinykv.cache", "tinykv.triton_cache", "tinykv.methods", "tinykv.calibrate")
BLANKS = {"tinykv/cache.py": ("CachedRows.append", "CachedRows.quantize", "CachedRows.read", "CachedRows.keep",
                              "LayerCache.due", "LayerCache.update"),
          "tinykv/methods/pfn.py": ("PFN.keep_keys",)}


# ---- a codec that can be followed by eye, and rows that are right

class Coarse:
    """A codec that rounds to whole numbers. Where a token is ignored it reads as 99."""

    def __init__(self):
        self.ignored = []  # what `encode` was told, call by call

    def encode(self, x, ignore=None):
        self.ignored.append(ignore)
        codes = x.float().round()  # (B, H, n, d)
        if ignore is not None:
            codes = codes.masked_fill(ignore[..., None], 99)
        return CoarseCodes(codes.to(torch.int8))

    def decode(self, codes):
        return codes.numbers.float()


class CoarseCodes:
    def __init__(self, numbers):
        self.numbers = numbers  # (B, H, n, d) int8

    def append(self, other):
        return CoarseCodes(torch.cat([self.numbers, other.numbers], dim=2))

    @property
    def nbytes(self):
        return self.numbers.nbytes


class GivenRows:
    """What `Rows` has to do, in plain steps, so that `Layer` is graded by itself. It notes what
    happens to it."""

    def __init__(self, name, log):
        self.name, self.log = name, log
        self.exact = None  # (B, H, S, d) fp16: all tokens
        self.n_coded, self.kept_positions = 0, None

    @property
    def recent(self):
        return None if self.exact is None else self.exact[:, :, self.n_coded:]

    def append(self, rows):
        rows = rows.half()
        self.exact = rows if self.exact is None else torch.cat([self.exact, rows], dim=2)
        self.log.append((self.name, "append", rows.shape[2]))

    def quantize(self, n):
        self.n_coded += n
        self.log.append((self.name, "quantize", n))

    def read(self):
        rows = self.exact.clone()  # (B, H, S, d)
        rows[:, :, :self.n_coded] = rows[:, :, :self.n_coded].float().round().half()
        if self.kept_positions is not None:
            for b, positions in enumerate(self.kept_positions.tolist()):
                rows[b][:, positions] = self.exact[b][:, positions]
        self.log.append((self.name, "read", rows.shape[2]))
        return rows

    def keep(self, positions):
        self.kept_positions = positions
        self.log.append((self.name, "keep", positions.tolist()))


class Keeps:
    """A method that keeps given tokens, the same in every sequence, and notes when it is asked."""

    def __init__(self, positions, recent=0, block=1):
        self.positions, self.recent, self.block = positions, recent, block
        self.asked = []

    def keep(self, layer, n):
        self.asked.append((n, layer.keys.n_coded, layer.length))
        if self.positions is None:
            return None
        return torch.tensor([self.positions] * len(layer.keys.recent))


def new_layer(submission, method, protocol):
    """A `Layer` of the submission with rows that are right, and the list of what happens to them."""
    layer, log = submission.Layer(Coarse(), Coarse(), method, protocol), []
    layer.keys, layer.values = GivenRows("keys", log), GivenRows("values", log)
    return layer, log


def draw(rng, T, B=2, H=2, d=4):
    """Rows (B, H, T, d), none of whose numbers is near a whole number."""
    whole = (normal(rng, B, H, T, d) * 4).round()
    return whole + torch.where(normal(rng, B, H, T, d) > 0, 0.25, -0.25)


def which_differ(got, want):
    """The tokens at which rows (B, H, S, d) differ, over all sequences and heads."""
    return (got != want).any(-1).flatten(0, 1).any(0).nonzero().flatten().tolist()


def expect_rows(got, want, tried, hint):
    """got: what the submission gave; want (B, H, S, d) fp16."""
    expect_tensor(got, "numbers", want.shape, f"{tried} What comes back")
    expect(got.dtype == torch.float16, f"{tried} What comes back is {got.dtype}; it should be torch.float16.")
    wrong = which_differ(got, want)
    if not wrong:
        return
    t = wrong[0]
    b, h = (got[:, :, t] != want[:, :, t]).any(-1).nonzero()[0].tolist()
    told = (" Here 99 is a token that the codec was told to ignore: `ignore` is (B, H, n), True where a kept "
            "token stands, and such a token is read from its kept row." if (got[b, h, t] == 99).all() else "")
    expect(False, f"{tried} Tokens {wrong} are wrong: token {t} of sequence {b}, head {h}, reads "
           f"{[round(x, 2) for x in got[b, h, t].tolist()]}; it should be "
           f"{[round(x, 2) for x in want[b, h, t].tolist()]}.{told} {hint}")


def coded(rows):
    """What `Coarse` makes of rows."""
    return rows.half().float().round().half()


# ---- task 1: the parts

@check(points=5)
def append_recent(submission, rng):
    """Rows.append and read: recent tokens, in fp16 and in order"""
    rows = submission.Rows(Coarse())
    x, y = draw(rng, 3) * 1.001, draw(rng, rng.randint(1, 3)) * 1.001
    rows.append(x.clone())
    expect_rows(rows.read(), x.half(), "After append of 3 tokens, read.", "Nothing is quantized yet.")
    rows.append(y.clone())
    expect_rows(rows.read(), torch.cat([x, y], dim=2).half(),
                f"After append of 3 and of {y.shape[2]} tokens, read.", "New tokens come after the old.")


@check(points=6)
def quantize_oldest(submission, rng):
    """Rows.quantize and read: the oldest tokens as their codes, the others exact"""
    rows = submission.Rows(Coarse())
    x, n, more = draw(rng, 8), rng.randint(2, 3), rng.randint(1, 3)
    rows.append(x.clone())
    rows.quantize(n)
    want = torch.cat([coded(x[:, :, :n]), x[:, :, n:].half()], dim=2)
    tried = f"append of 8 tokens, quantize({n}), read: the codec rounds to whole numbers."
    expect_rows(rows.read(), want, tried, f"Tokens 0 .. {n - 1} are read as their codes, the others as "
                "they were.")
    expect(rows.n_coded == n, f"After quantize({n}) n_coded is {rows.n_coded}; it should be {n}.")
    rows.quantize(more)
    done = n + more
    want = torch.cat([coded(x[:, :, :done]), x[:, :, done:].half()], dim=2)
    expect_rows(rows.read(), want, f"Then quantize({more}), whose codes join the others (codes.append returns them), "
                "read.",
                "The new codes are appended to those that are there.")
    expect(rows.n_coded == done, f"Then n_coded is {rows.n_coded}; it should be {done}.")


@check(points=3)
def quantize_frees(submission, rng):
    """Rows.quantize: the memory of quantized rows is free"""
    rows = submission.Rows(Coarse())
    rows.append(draw(rng, 12))
    rows.quantize(rng.randint(8, 10))
    held, needed = rows.recent.untyped_storage().nbytes(), rows.recent.nbytes
    expect(held <= needed, f"After most of 12 tokens are quantized, recent needs {needed} bytes and "
           f"holds {held}: a slice is a view of the whole tensor, and keeps all of it alive.")


@check(points=7)
def pin_and_read(submission, rng):
    """Rows.keep and read: kept tokens are exact, each sequence has its own"""
    rows = submission.Rows(Coarse())
    x, n = draw(rng, 8), rng.randint(5, 7)
    places = [sorted(rng.sample(range(0, 2), 1) + rng.sample(range(2, 5), 1)), [2, 4]]
    rows.append(x.clone())
    rows.keep(torch.tensor(places))
    rows.quantize(n)
    want = torch.cat([coded(x[:, :, :n]), x[:, :, n:].half()], dim=2)
    for b, positions in enumerate(places):
        want[b][:, positions] = x[b][:, positions].half()
    expect_rows(rows.read(), want, f"append of 8 tokens, keep({places}), quantize({n}), read.",
                f"Of sequence 0 tokens {places[0]} are kept, of sequence 1 tokens {places[1]}; kept "
                "rows stand at their positions, in place of what was decoded.")


@check(points=5)
def pin_again(submission, rng):
    """Rows.keep: a token that stays kept stays exact, one that does not is read as its code"""
    rows = submission.Rows(Coarse())
    x = draw(rng, 8)
    stays, comes = rng.randint(0, 1), rng.randint(5, 7)
    rows.append(x.clone())
    rows.keep(torch.tensor([[stays]] * 2))
    rows.quantize(2)
    rows.keep(torch.tensor([[stays, comes]] * 2))
    rows.quantize(2)
    want = x.half()
    want[:, :, :4] = coded(x[:, :, :4])
    want[:, :, stays] = x[:, :, stays].half()
    tried = (f"append of 8 tokens, keep({stays}), quantize(2), keep({stays}, {comes}), quantize(2), read "
             "(the same in both sequences; the codec reads an ignored token as 99).")
    expect_rows(rows.read(), want, tried, f"Token {stays} was kept all the time: keep the row that "
                "read gives, which is the kept one, not its code.")
    rows.quantize(4)
    rows.keep(torch.tensor([[comes]] * 2))
    read = rows.read()
    expect(read.shape == x.shape and not torch.equal(read[:, :, stays], x[:, :, stays].half()),
           f"{tried} Then quantize(4), keep({comes}): token {stays} is kept no more, and still exact. "
           "keep keeps the given tokens, and no others.")
    expect_rows(read[:, :, comes:comes + 1], x[:, :, comes:comes + 1].half(),
                f"{tried} Then quantize(4), keep({comes}), read of token {comes}.", "It is kept.")


@check(points=6)
def kept_are_ignored(submission, rng):
    """Rows.quantize: the codec is told which tokens are kept"""
    codec = Coarse()
    rows = submission.Rows(codec)
    rows.append(draw(rng, 12))
    rows.quantize(4)
    told = codec.ignored[-1] if codec.ignored else None
    expect(told is None or not told.any(), "quantize(4) with nothing kept: ignore should be None, or "
           "False everywhere.")
    places = [sorted(rng.sample(range(4, 8), 2)), sorted(rng.sample(range(4, 7), 1) + [9])]
    rows.keep(torch.tensor(places))
    rows.quantize(4)
    told = codec.ignored[-1]
    tried = f"4 of 12 tokens are quantized, then keep({places}), quantize(4):"
    expect(told is not None, f"{tried} encode was called without ignore. Kept tokens must not stretch "
           "the range of their group.")
    expect_tensor(told, "booleans", (2, 2, 4), f"{tried} ignore")
    for b, positions in enumerate(places):
        want = [4 + i in positions for i in range(4)]
        for h in range(2):
            expect(told[b, h].tolist() == want,
                   f"{tried} ignore of sequence {b}, head {h}, is {told[b, h].tolist()}; it should be "
                   f"{want}. The four are tokens 4 .. 7: positions count from the start of the text.")


@check(points=5)
def bytes_held(submission, rng):
    """Rows.nbytes: codes, recent rows, kept rows, and their positions"""
    rows = submission.Rows(Coarse())
    T, n = rng.randint(8, 12), rng.randint(4, 6)
    row = 2 * 2 * 4  # numbers of a token in all sequences and heads
    rows.append(draw(rng, T))
    expect(rows.nbytes == 2 * row * T, f"{T} recent tokens of {row} numbers: nbytes is {rows.nbytes}; it "
           f"should be {2 * row * T}, two bytes a number.")
    rows.quantize(n)
    want = row * n + 2 * row * (T - n)
    expect(rows.nbytes == want, f"{n} of {T} tokens are quantized, by a codec that takes a byte for each "
           f"of {row} numbers: nbytes is {rows.nbytes}; it should be {row} x {n} + 2 x {row} x {T - n} "
           f"= {want}.")
    rows.keep(torch.tensor([[T - 2, T - 1]] * 2))
    want += 2 * row * 2 + 2 * 2 * 4
    expect(rows.nbytes == want, f"Then two tokens of each sequence are kept: nbytes is {rows.nbytes}; "
           f"it should be {want}: two more rows in 16 bits, and 2 x 2 positions of four bytes.")


# ---- task 2: two protocols

@check(points=8)
def due_tokens(submission, rng):
    """Layer.due: whole blocks, and never the newest tokens"""
    for recent, block in ((0, 4), (3, 4), (5, 2), (0, 1)):
        for length in (1, recent, recent + block - 1, recent + block, recent + 2 * block + 1, 23):
            if length == 0:
                continue
            layer, _ = new_layer(submission, Keeps(None, recent, block), "stream")
            for rows in (layer.keys, layer.values):
                rows.append(draw(rng, length))
            layer.length = length
            want = max(0, length - recent) // block * block
            given = layer.due()
            expect(given == want, f"stream, recent = {recent}, block = {block}, {length} tokens, none "
                   f"quantized: due gives {given}; it should be {want}. Leave the newest {recent} out, then "
                   f"take whole blocks of {block}.")
    block, recent = rng.randint(3, 5), rng.randint(1, 2)
    layer, _ = new_layer(submission, Keeps(None, recent, block), "stream")
    for rows in (layer.keys, layer.values):
        rows.append(draw(rng, 4 * block + recent))
        rows.quantize(2 * block)
    layer.length = 4 * block + recent
    given = layer.due()
    expect(given == 2 * block, f"stream, recent = {recent}, block = {block}, {layer.length} tokens, "
           f"{2 * block} quantized: due gives {given}; it should be {2 * block}. Tokens that are "
           "quantized already are not recent.")
    layer, _ = new_layer(submission, Keeps(None, 3, 4), "paper")
    for rows in (layer.keys, layer.values):
        rows.append(draw(rng, 9))
    layer.length = 9
    expect(layer.due() == 9, f"paper, 9 tokens: due gives {layer.due()}; it should be 9. This protocol "
           "knows no recent tokens and no blocks.")


@check(points=8)
def paper_reads_codes(submission, rng):
    """Layer.update, protocol paper: every token that is not kept is read as its code"""
    T, places = rng.randint(6, 9), sorted(rng.sample(range(6), 2))
    layer, _ = new_layer(submission, Keeps(places, 3, 4), "paper")
    k, v = draw(rng, T), draw(rng, T)
    K, V = layer.update(k.clone(), v.clone())
    for name, got, x in (("keys", K, k), ("values", V, v)):
        want = coded(x)
        want[:, :, places] = x[:, :, places].half()
        expect_rows(got, want, f"paper, {T} tokens at once, the method keeps {places}: update, {name}.",
                    "Quantize, then read: a query reads even its own token's code, and the kept tokens "
                    "as they were, in keys and values.")
    expect(layer.length == T, f"After {T} tokens layer.length is {layer.length}.")


@check(points=8)
def stream_reads_exact(submission, rng):
    """Layer.update, protocol stream: new tokens are read exactly, and quantized afterwards"""
    layer, _ = new_layer(submission, Keeps(None, 0, 4), "stream")
    sizes = [4, rng.randint(1, 3), 4, 3]
    k, v = draw(rng, sum(sizes)), draw(rng, sum(sizes))
    seen = 0
    for size in sizes:
        before = seen // 4 * 4  # tokens that are quantized when the chunk comes
        chunk = slice(seen, seen + size)
        seen += size
        K, V = layer.update(k[:, :, chunk].clone(), v[:, :, chunk].clone())
        for name, got, x in (("keys", K, k), ("values", V, v)):
            want = torch.cat([coded(x[:, :, :before]), x[:, :, before:seen].half()], dim=2)
            expect_rows(got, want, f"stream, blocks of 4, chunks of {sizes}: update gives, after {seen} "
                        f"tokens, {name}.", f"Read, then quantize: {before} tokens were quantized by the "
                        "chunks before.")
        expect(layer.length == seen, f"After {seen} tokens layer.length is {layer.length}.")


@check(points=4)
def asks_before_it_quantizes(submission, rng):
    """Layer.update: the method is asked once, before anything is quantized, and only if it is due"""
    method = Keeps([0], 0, 4)
    layer, log = new_layer(submission, method, "stream")
    for size in (3, 2, 2):
        layer.update(draw(rng, size), draw(rng, size))
    expect(method.asked == [(4, 0, 5)],
           "stream, blocks of 4, chunks of 3, 2 and 2: keep should be asked once, for n = 4, with nothing "
           "quantized yet and 5 tokens seen, which is (4, 0, 5). It was asked with "
           f"{method.asked or 'nothing: never'}.")
    events = [event[:2] for event in log if event[1] in ("keep", "quantize")]
    expect(events.index(("keys", "keep")) < events.index(("keys", "quantize")) if
           ("keys", "keep") in events and ("keys", "quantize") in events else False,
           f"The keys should be kept, and then quantized; with them you do {events}. A token that is "
           "quantized before it is kept has lost its exact row.")


@check(points=4)
def keys_and_values(submission, rng):
    """Layer.update: keys and values keep the same tokens"""
    places = sorted(rng.sample(range(5), 2))
    layer, log = new_layer(submission, Keeps(places, 0, 4), "stream")
    layer.update(draw(rng, 6), draw(rng, 6))
    for name in ("keys", "values"):
        kept = [event[2] for event in log if event[:2] == (name, "keep")]
        expect(kept == [[places] * 2], f"The method keeps {places} in both sequences. keep of the {name} "
               f"was called with {kept}; it should be called once, with {[places] * 2}.")
        amounts = [event[2] for event in log if event[:2] == (name, "quantize")]
        expect(amounts == [4], f"Blocks of 4, 6 tokens: quantize of the {name} was called with {amounts}; it "
               "should be called once, with 4.")
    layer, log = new_layer(submission, Keeps(None, 0, 4), "stream")
    layer.update(draw(rng, 6), draw(rng, 6))
    kept = [event for event in log if event[1] == "keep"]
    expect(not kept, f"The method's keep gives None, and you keep {kept}. None leaves the kept tokens as they are.")


# ---- task 3: PFN

@check(points=5)
def first_tokens(submission, rng):
    """PFN.keep: the first N tokens, or all if there are fewer"""
    for T, N in ((8, rng.randint(1, 5)), (2, 5)):
        method = submission.PFN(N)
        layer, _ = new_layer(submission, method, "stream")
        for rows in (layer.keys, layer.values):
            rows.append(draw(rng, T, B=3))
        layer.length = T
        given = method.keep(layer, T)
        want = list(range(min(N, T)))
        expect_tensor(given, "integers", (3, len(want)), f"PFN({N}).keep with {T} tokens")
        for b in range(3):
            expect(given[b].tolist() == want, f"PFN({N}).keep with {T} tokens keeps {given[b].tolist()} of "
                   f"sequence {b}; PFN with N = {N} keeps {want}.")
    layer, _ = new_layer(submission, submission.PFN(0), "stream")
    layer.keys.append(draw(rng, 4))
    layer.values.append(draw(rng, 4))
    layer.length = 4
    given = layer.method.keep(layer, 4)
    expect(given is None, f"PFN(0).keep gives {type(given).__name__}; with N = 0 it should be None.")


# ---- all of it

@check(points=6)
def whole_cache(submission, rng):
    """All of it: PFN in a stream, on the project's 4-bit codec per channel"""
    N, block, recent = rng.randint(1, 2), 4, rng.randint(1, 3)
    sizes = [recent + block, block, block, block - 1]
    k, v = normal(rng, 2, 2, sum(sizes), 8), normal(rng, 2, 2, sum(sizes), 8)
    k[:, :, :N] *= 30  # so that the kept tokens would stretch every range
    codecs = [Affine(4, 8, "channel", block) for _ in range(2)]
    layer = submission.Layer(*codecs, submission.PFN(N, recent, block), "stream")
    for part_k, part_v in zip(k.split(sizes, dim=2), v.split(sizes, dim=2)):
        layer.update(part_k.clone(), part_v.clone())
    end = 3 * block
    ignore = torch.zeros(2, 2, end, dtype=torch.bool)
    ignore[:, :, :N] = True
    codec = Affine(4, 8, "channel", block)
    for name, rows, x in (("keys", layer.keys, k), ("values", layer.values, v)):
        want = x.half()
        want[:, :, :end] = codec.decode(codec.encode(x[:, :, :end].half(), ignore)).half()
        want[:, :, :N] = x[:, :, :N].half()
        expect_rows(rows.read(), want, f"stream, chunks of {sizes}, PFN with N = {N}, recent = {recent}, "
                    f"block = {block}: the {name} at the end.", f"{end} tokens are quantized, without the "
                    "kept ones in their ranges.")
