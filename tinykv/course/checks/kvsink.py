"""Assignment 3: KVSink's outlier search, `observe` and `keep_keys`."""
import torch

from tinykv.cache import KVCache
from tinykv.calibrate import calibrate
from tinykv.course.check import check, expect, expect_tensor, normal, shown
from tinykv.model import Llama, LlamaConfig

NUMBER, TITLE = 3, "KVSink"
ANSWERS = ("tinykv.methods.kvsink",)
BLANKS = {"tinykv/methods/kvsink.py": ("outlier", "find_outlier", "KVSink.observe", "KVSink.keep_keys"),
          "tests/test_kvsink.py": None}

SINK = 0  # the token that carries the outlier; no other token does
D = 32  # channels of a hidden state


# ---- the models and texts of these checks

def config_of(rng, layers=None):
    """Four or five blocks, and query heads that share KV heads."""
    return LlamaConfig(vocab_size=24, hidden_size=D, intermediate_size=48,
                       num_hidden_layers=layers or rng.randint(4, 5), num_attention_heads=4,
                       num_key_value_heads=rng.choice((1, 2)), head_dim=8,
                       max_position_embeddings=512)


def model_with_outlier(rng, size):
    """A model, and its lE and c: the MLP of block lE writes a number of about `size` into channel c
    of the token SINK, and of no other.

    Channel 0 is the mark by which that MLP knows the token.
    """
    torch.manual_seed(rng.getrandbits(32))
    model = Llama(config_of(rng))
    layer, channel = rng.randint(0, 1), rng.randint(1, D - 1)
    with torch.no_grad():
        embedding = model.model["embed_tokens"].weight
        embedding.normal_()
        embedding[:, 0], embedding[SINK] = 0, 0
        embedding[SINK, 0] = 3.0
        for block in model.model["layers"]:
            for linear in (block.self_attn.o_proj, block.mlp.down_proj):
                linear.weight[[0, channel]] = 0  # no other block writes into the two channels
        mlp = model.model["layers"][layer].mlp
        mlp.gate_proj.weight[0], mlp.up_proj.weight[0] = 0, 0
        mlp.gate_proj.weight[0, 0] = mlp.up_proj.weight[0, 0] = 1.0
        mlp.down_proj.weight[:, 0] = 0
        mlp.down_proj.weight[channel, 0] = size / D
    return model, layer, channel


def text(rng, B, T, sinks):
    """Tokens (B, T), with SINK at `sinks` places of each sequence."""
    rows = []
    for _ in range(B):
        row = [rng.randint(1, 23) for _ in range(T)]
        for place in rng.sample(range(T), sinks):
            row[place] = SINK
        rows.append(row)
    return torch.tensor(rows)


class Watched(KVCache):
    """A cache that notes the hidden states that it is shown."""

    def observe(self, layer, hidden):
        self.seen = getattr(self, "seen", {})
        self.seen.setdefault(layer, []).append(hidden)
        super().observe(layer, hidden)


def top_k(sizes, k):
    """The positions of the k largest numbers of a list."""
    return sorted(sorted(range(len(sizes)), key=lambda i: -sizes[i])[:k])


# ---- task 1: outlier

def grid_of_halves(rng, T):
    """Numbers (1, T, 5) between -2 and 2, in steps of a half, without 0. T is odd, so the median is
    one of them."""
    halves = (-2.0, -1.5, -1.0, -0.5, 0.5, 1.0, 1.5, 2.0)
    return torch.tensor([[[rng.choice(halves) for _ in range(5)] for _ in range(T)]])


def try_outlier(submission, rng, sign):
    T = rng.choice((3, 5))
    hidden, at = grid_of_halves(rng, T), (rng.randint(1, T - 1), rng.randint(0, 4))
    other = (0, (at[1] + 1) % 5)
    hidden[0][at] = sign * rng.randint(30, 90)
    hidden[0][other] = 20.0
    numbers = sorted(abs(x) for row in hidden[0].tolist() for x in row)
    largest, median = numbers[-1], numbers[len(numbers) // 2]
    given = submission.outlier(hidden.clone())
    expect(isinstance(given, tuple) and len(given) == 3,
           f"outlier has to return three numbers (largest, ratio, channel); yours gives {given!r}.")
    given = tuple(float(x) for x in given)
    tried = (f"In a hidden state (1, {T}, 5) the number with the largest magnitude is "
             f"{sign * largest:g}, at token {at[0]} in channel {at[1]}; the median |h| is {median:g}.")
    expect(abs(given[0] - largest) < 1e-4,
           f"{tried} outlier gives {given[0]:g} as the largest |h|; it should be {largest:g}. "
           "Take magnitudes before you look for the largest.")
    expect(abs(given[1] - largest / median) < 1e-3,
           f"{tried} outlier gives a ratio of {given[1]:g}; it should be {largest:g} / {median:g} = "
           f"{largest / median:g}. The median is of |h|, over all tokens and channels.")
    expect(given[2] == at[1],
           f"{tried} outlier gives channel {given[2]:g}; it should be {at[1]}. An index into all "
           f"{5 * T} numbers is not a channel yet: a token has 5 channels.")


@check(points=4)
def outlier_of_a_block(submission, rng):
    """outlier: the largest number of a hidden state, its ratio to the median, and its channel"""
    try_outlier(submission, rng, sign=1)


@check(points=3)
def outlier_below_zero(submission, rng):
    """outlier: a number far below zero is an outlier, too"""
    try_outlier(submission, rng, sign=-1)


# ---- task 1: find_outlier

def try_search(submission, largest, ratio, expected, why, channel=7, windows=6):
    """Lists of L + 1 numbers, the same in all windows; channel: one, or a table (W, L + 1)."""
    W, columns = windows, len(largest)
    table = torch.full((W, columns), channel) if isinstance(channel, int) else channel
    given = submission.find_outlier(torch.tensor(largest).float().repeat(len(table), 1),
                                    torch.tensor(ratio).float().repeat(len(table), 1), table.clone())
    judge_search(given, expected, f"With largest = {shown(largest)} and ratio = {shown(ratio)} in "
                 f"every window (first the embedding, then blocks 0 .. {columns - 2})", why)


def judge_search(given, expected, tried, why):
    if given is not None:
        expect(isinstance(given, tuple) and len(given) == 2,
               f"find_outlier has to return (layer, channel) or None; yours gives {given!r}.")
        given = tuple(int(x) for x in given)
    expect(given == expected,
           f"{tried} find_outlier gives {given}; it should be {expected}: {why}")


def small(rng, n):
    """n numbers as a model has them that is nowhere special."""
    return [rng.randint(2, 6) for _ in range(n)]


@check(points=5)
def massive_outlier(submission, rng):
    """find_outlier: the first block whose outlier is massive"""
    c = rng.randint(0, 30)
    first, later = rng.randint(110, 400), rng.randint(2000, 9000)
    try_search(submission, [*small(rng, 2), first, later, 5], [*small(rng, 2), 1500, 9000, 5], (1, c),
               "block 1 is the first with largest >= 100 and ratio >= 1000. Column l + 1 belongs to "
               "block l, and a later block may be larger.", c)
    try_search(submission, [*small(rng, 1), 300, first, later, 5], [4, 500, 2000, 9000, 5], (1, c),
               "block 0 has a ratio below 1000. Both bounds have to be reached.", c)
    try_search(submission, [*small(rng, 1), 60, first, later, 5], [4, 1800, 2000, 9000, 5], (1, c),
               "block 0 has a largest number below 100. Both bounds have to be reached.", c)


@check(points=5)
def growing_outlier(submission, rng):
    """find_outlier: with no massive outlier, the block where it grows most"""
    c, grown = rng.randint(0, 30), rng.randint(40, 70)
    try_search(submission, [1, 2, grown, grown + 15, 20], [3, 4, 100, 110, 20], (1, c),
               f"nothing is massive, and the largest number grows most in block 1, from 2 to {grown}, "
               "though it is larger after block 2.", c)
    try_search(submission, [1, grown, grown + 9, 20], [3, 90, 80, 20], (0, c),
               f"it grows most in block 0, from 1 after the embedding to {grown}.", c)
    try_search(submission, [1, 9, 10, grown, 20], [3, 5, 6, 90, 20], (2, c),
               "block 0 grows most, from 1 to 9, but its ratio is 5, so it does not qualify. Of the "
               "blocks that do, block 2 grows most.", c)


@check(points=6)
def no_outlier(submission, rng):
    """find_outlier: None where no block before the last has an outlier that stands out"""
    try_search(submission, [1, 2, 20, 25, 5], [3, 4, 29, 28, 9], None,
               "it grows most in block 1, but the ratio there is 29, below 30.")
    before = rng.randint(20, 24)
    try_search(submission, [1, 1, 2, 40, 10], [3, before, before, 50, 20], None,
               f"the ratio in block 2 is 50, less than three times the median before, {before}.")
    try_search(submission, [1, 1, 2, 40, 10], [90, 10, 20, 50, 20], (2, 7),
               "the ratio in block 2 is 50, and torch.median of the blocks before, 10 and 20, is 10. "
               "The embedding, with 90, is no block.")
    try_search(submission, [1, 1, 1, 1, 5000], [3, 3, 3, 3, 5000], None,
               "the outlier comes in the last block, and no block after it could keep its tokens.")
    try_search(submission, [1, 5000], [3, 5000], None, "the only block is the last one.")


@check(points=4)
def votes_for_the_channel(submission, rng):
    """find_outlier: the windows vote for the channel in up to three blocks, and 90% must agree"""
    c, wrong = rng.sample(range(30), 2)
    largest, ratio = [1, 2, 500, 600, 700, 5], [3, 4, 2000, 2000, 2000, 9]
    places = [(window, column) for window in range(10) for column in (2, 3, 4)]
    votes = torch.full((10, 6), wrong)
    votes[:, 2:5] = c  # what stands in other columns is no vote
    for window, column in rng.sample(places, 3):
        votes[window, column] = wrong
    try_search(submission, largest, ratio, (1, c),
               f"in blocks 1, 2 and 3 of 10 windows, 27 of 30 votes are for channel {c}, and 3 for "
               f"{wrong}. The other blocks, and the embedding, have no vote.", votes)
    votes[:, 2:5] = c
    for window, column in rng.sample(places, 5):
        votes[window, column] = wrong
    try_search(submission, largest, ratio, None,
               f"only 25 of the 30 votes of blocks 1, 2 and 3 are for channel {c}: less than 90%.",
               votes)


@check(points=3)
def median_of_the_windows(submission, rng):
    """find_outlier: one odd window of five does not decide"""
    c = rng.randint(0, 30)
    largest = torch.tensor([1.0, 2, 60, 50, 20]).repeat(5, 1)  # (W, L + 1)
    ratio = torch.tensor([3.0, 4, 100, 90, 20]).repeat(5, 1)  # (W, L + 1)
    odd = rng.randint(0, 4)
    largest[odd, 1], ratio[odd, 1] = 9000.0, 90000.0
    given = submission.find_outlier(largest, ratio, torch.full((5, 5), c))
    judge_search(given, (1, c), "Four windows have largest = [1, 2, 60, 50, 20]; in the fifth, block 0 "
                 "has 9000.", "the median over the windows decides, not the mean or one window.")


@check(points=4)
def calibration_finds_it(submission, rng):
    """The whole search: calibrate() finds lE and c of a model"""
    for size in (-rng.randint(80, 120), rng.randint(2000, 4000)):
        model, layer, channel = model_with_outlier(rng, size)
        method = submission.KVSink(model.config, scheme="token-dynamic")
        calibrate(model, method, text(rng, 6, 24, sinks=2))
        expect((method.layer, method.channel) == (layer, channel),
               f"A model of {model.config.num_hidden_layers} blocks has an outlier of about {size} "
               f"from block {layer} on, in channel {channel}. After calibrate(...) your method has "
               f"layer {method.layer} and channel {method.channel}.")


# ---- task 2: observe

def method_of(submission, rng, k, layer=1, layers=4):
    """A method that is told lE and c, and a cache for it."""
    model = Llama(config_of(rng, layers))
    channel = rng.randint(0, D - 1)
    method = submission.KVSink(model.config, preserve=k, emergence_layer=layer,
                               outlier_channel=channel, scheme="token-dynamic")
    return method, KVCache(model, method, "stream")


def show(cache, method, rng, sizes, elsewhere=1.0):
    """A chunk of tokens passes the model: sizes (B, T) stand in channel c after block lE.

    elsewhere: how large numbers are in other channels, and after other blocks.
    """
    sizes = torch.tensor(sizes)  # (B, T)
    B, T = sizes.shape
    config = cache.config
    zeros = torch.zeros(B, config.num_key_value_heads, T, config.head_dim)
    start = len(cache)
    for layer, layer_cache in enumerate(cache.layers):
        layer_cache.append(zeros, zeros, torch.arange(start, start + T))
        hidden = normal(rng, B, T, D) * elsewhere
        if layer == method.layer:
            hidden[..., method.channel] = sizes
        cache.observe(layer, hidden)


def distinct(rng, T, largest=9.0):
    """T numbers between 0.1 and `largest`, all different."""
    steps = int(largest * 10)
    return [x / 10 for x in rng.sample(range(1, steps), T)]


def expect_sinks(cache, k, expected, tried, hint):
    """expected: a list of positions for each sequence."""
    sinks = getattr(cache.shared, "sinks", None)
    length = cache.layers[0].length
    count = min(k, length)
    expect(sinks is not None, f"{tried} cache.shared.sinks is still None. Set it, on the cache and not on the "
           f"method, after block lE. {hint}")
    expect_tensor(sinks, "integers", (len(expected), count), "cache.shared.sinks")
    found = [sorted(row) for row in sinks.tolist()]
    for b, (got, want) in enumerate(zip(found, expected)):
        where = f" of sequence {b}" if len(expected) > 1 else ""
        expect(got[-1] < length, f"{tried} The sinks{where} are {got}; they should be {want}. There "
               f"are {length} tokens so far: `cache.layers[layer].length` counts the new ones, too.")
        expect(got == want, f"{tried} The sinks{where} are {got}; they should be {want}. {hint}")


@check(points=5)
def observe_top_k(submission, rng):
    """observe: the sinks are the k tokens with the largest numbers in channel c"""
    k = rng.randint(2, 3)
    method, cache = method_of(submission, rng, k)
    sizes = distinct(rng, 8)
    show(cache, method, rng, [sizes], elsewhere=30)
    expect_sinks(cache, k, [top_k(sizes, k)],
                 f"k = {k}, and channel c of eight tokens has {shown(sizes)}; other channels have "
                 "larger numbers.", "Sort by hidden[..., self.channel] alone, the largest first, and look "
                 "after block lE alone.")


@check(points=3)
def observe_magnitudes(submission, rng):
    """observe: a number far below zero marks a sink, too"""
    method, cache = method_of(submission, rng, 2)
    sizes = distinct(rng, 8, largest=5.0)
    low, other = rng.sample(range(8), 2)
    sizes[low], sizes[other] = -32.0, 22.0
    show(cache, method, rng, [sizes])
    expect_sinks(cache, 2, [sorted([low, other])],
                 f"k = 2, and channel c of eight tokens has {shown(sizes)}.",
                 "The paper sorts by |H[i, c]|, the magnitude.")


@check(points=4)
def observe_one_layer(submission, rng):
    """observe: only the output of block lE counts"""
    method, cache = method_of(submission, rng, 2)
    sizes = distinct(rng, 6)
    cache.layers[0].append(torch.zeros(1, cache.config.num_key_value_heads, 6, 8),
                           torch.zeros(1, cache.config.num_key_value_heads, 6, 8), torch.arange(6))
    cache.observe(0, 30 * normal(rng, 1, 6, D))
    expect(cache.shared.sinks is None,
           "lE = 1, and cache.shared.sinks is set after block 0. Look at block lE, and at no other.")
    cache.reset()
    show(cache, method, rng, [sizes], elsewhere=1e-3)
    expect_sinks(cache, 2, [top_k(sizes, 2)],
                 f"lE = 1, and after block 1 channel c of six tokens has {shown(sizes)}; after blocks "
                 "0, 2 and 3 it has other numbers.", "Blocks other than lE must change nothing.")


@check(points=4)
def observe_batch(submission, rng):
    """observe: each sequence of a batch has its own sinks"""
    k = 2
    method, cache = method_of(submission, rng, k)
    peaks = [[0, 3], [1, 5], [2, 4]]
    rng.shuffle(peaks)
    sizes = [distinct(rng, 6, largest=5.0) for _ in peaks]
    for row, places in zip(sizes, peaks):
        row[places[0]], row[places[1]] = 20.0, 10.0
    show(cache, method, rng, sizes)
    expect_sinks(cache, k, peaks, f"k = 2 and a batch of three sequences; channel c has {shown(sizes)}.",
                 "Sort along the tokens, the last dimension of (B, T).")


@check(points=8)
def observe_chunks(submission, rng):
    """observe: a text that comes in chunks has the sinks that it has as a whole"""
    method, cache = method_of(submission, rng, 2)
    sizes = distinct(rng, 12, largest=5.0)
    first, third = rng.randint(0, 3), rng.randint(8, 11)
    sizes[first] = 30.0
    # second stands in its chunk where the first chunk has none of its two largest
    second = 4 + rng.choice([i for i in range(4) if i not in top_k(sizes[:4], 2)])
    sizes[second], sizes[third] = 20.0, 25.0
    tried = f"k = 2, and tokens come in chunks of 4; channel c has {shown(sizes)}."
    show(cache, method, rng, [sizes[:4]])
    show(cache, method, rng, [sizes[4:8]])
    found = [] if cache.shared.sinks is None else cache.shared.sinks[0].tolist()
    expect(second - 4 not in found,
           f"{tried} After the second chunk your sinks are {sorted(found)}; they should be "
           f"{[first, second]}. Count positions from the start of the text, not of the chunk.")
    expect_sinks(cache, 2, [[first, second]], f"{tried} After the second chunk:",
                 "New tokens compete with the sinks so far: neither of the two is forgotten.")
    show(cache, method, rng, [sizes[8:]])
    expect_sinks(cache, 2, [[first, third]], f"{tried} After the third chunk:",
                 f"Token {third}, with 25, takes the place of token {second}, with 20.")


@check(points=2)
def observe_few_tokens(submission, rng):
    """observe: of fewer than k tokens all are sinks"""
    method, cache = method_of(submission, rng, 5)
    show(cache, method, rng, [distinct(rng, 3)])
    expect_sinks(cache, 5, [[0, 1, 2]], "k = 5 and a text of three tokens.",
                 "A slice [:, :k] takes what there is; topk needs min(k, T).")


# ---- task 3: keep_keys

def positions_of(given, B, Hkv, what):
    """What `keep_keys` gave -> a sorted list of positions for each sequence."""
    fits = isinstance(given, torch.Tensor) and given.dim() == 3 and len(given) == B
    shape = (B, given.shape[1] if fits and given.shape[1] == Hkv else 1, given.shape[2] if fits else 2)
    expect_tensor(given, "integers", shape, what)
    return [sorted({i for i in row.flatten().tolist() if i >= 0}) for row in given]


@check(points=6)
def keep_after_the_layer(submission, rng):
    """keep_keys: layers after lE keep the sinks, layers up to lE nothing"""
    lE = rng.randint(1, 2)
    method, cache = method_of(submission, rng, 2, layer=lE, layers=5)
    zeros = torch.zeros(2, cache.config.num_key_value_heads, 8, 8)
    for layer_cache in cache.layers:
        layer_cache.append(zeros, zeros, torch.arange(8))
    sinks = [sorted(rng.sample(range(8), 2)) for _ in range(2)]
    if sinks[0] == sinks[1]:
        sinks[1] = [i for i in range(8) if i not in sinks[0]][:2]
    cache.shared.sinks, cache.shared.sink_sizes = torch.tensor(sinks), torch.ones(2, 2)
    for layer, layer_cache in enumerate(cache.layers):
        given = method.keep_keys(layer_cache, 8)
        tried = f"lE = {lE}, and cache.shared.sinks is {sinks}. In layer {layer} keep_keys"
        if layer <= lE:
            expect(given is None, f"{tried} gives positions; it should give None. Layers up to lE have "
                   "stored their keys before the sinks are known.")
            continue
        expect(given is not None, f"{tried} gives None; layers after lE keep the sinks.")
        found = positions_of(given, 2, cache.config.num_key_value_heads, "What keep_keys gives")
        expect(found[0] == sinks[0], f"{tried} keeps {found[0]} of sequence 0; it should keep {sinks[0]}.")
        expect(found[1] == sinks[1], f"{tried} keeps {found[1]} of sequence 1; it should keep {sinks[1]}. "
               "Each sequence of a batch keeps its own sinks.")


@check(points=3)
def keep_without_outlier(submission, rng):
    """keep_keys: a model without an outlier keeps the first k tokens"""
    k = rng.randint(2, 4)
    model = Llama(config_of(rng, layers=3))
    method = submission.KVSink(model.config, preserve=k, scheme="token-dynamic")
    method.layer = method.channel = None
    cache = KVCache(model, method, "stream")
    zeros = torch.zeros(1, model.config.num_key_value_heads, 8, 8)
    for layer, layer_cache in enumerate(cache.layers):
        layer_cache.append(zeros, zeros, torch.arange(8))
        given = method.keep_keys(layer_cache, 8)
        tried = f"self.layer is None and k = {k}. In layer {layer} keep_keys"
        expect(given is not None, f"{tried} gives None; it should keep the first {k} tokens, as PFN.")
        found = positions_of(given, 1, model.config.num_key_value_heads, "What keep_keys gives")
        expect(found[0] == list(range(k)), f"{tried} keeps {found[0]}; it should keep {list(range(k))}.")


# ---- all of it

def kept(layer_cache, kind):
    """By sequence, the positions that a layer's keys, or values, have in full precision."""
    rows = layer_cache.keys if kind == "keys" else layer_cache.values
    if rows.kept_positions is None:
        return None
    return [sorted({i for i in row.flatten().tolist() if i >= 0}) for row in rows.kept_positions]


def expect_kept(cache, lE, sizes, k, tried):
    """sizes: for each sequence, a list of |H[i, c]|. Tokens of equal size are equally right."""
    for layer, layer_cache in enumerate(cache.layers):
        for kind in ("keys", "values"):
            found = kept(layer_cache, kind)
            what = f"{tried} Layer {layer} holds {kind} of tokens {found} in full precision"
            if layer <= lE:
                expect(found is None, f"{what}; up to lE it should be None.")
                continue
            expect(found is not None, f"{what}; after lE it should be the sinks.")
            for b, (got, row) in enumerate(zip(found, sizes)):
                want = top_k(row, k)
                right = len(got) == k and max(got) < len(row)
                right = right and sorted(row[i] for i in got) == sorted(row[i] for i in want)
                expect(right, f"{what} (a list for each sequence); of sequence {b} it should be {want}.")


@check(points=6)
@torch.no_grad()
def window(submission, rng):
    """A whole window (protocol paper): the right tokens are in full precision"""
    model, lE, channel = model_with_outlier(rng, size=500)
    k = rng.randint(2, 4)
    method = submission.KVSink(model.config, preserve=k, emergence_layer=lE, outlier_channel=channel,
                               scheme="token-dynamic")
    cache = Watched(model, method, "paper")
    tokens = text(rng, 2, 20, sinks=4)
    model(tokens, cache)
    sizes = cache.seen[lE][0][..., channel].abs().tolist()  # [sequence][token]
    places = [[i for i, token in enumerate(row) if token == SINK] for row in tokens.tolist()]
    expect_kept(cache, lE, sizes, k,
                  f"A model reads two texts of 20 tokens, with sinks at {places}; lE = {lE}, k = {k}.")


@check(points=5)
@torch.no_grad()
def generation(submission, rng):
    """A stream: tokens that come in chunks, quantized in blocks of 8"""
    model, lE, channel = model_with_outlier(rng, size=500)
    k = 2
    method = submission.KVSink(model.config, preserve=k, emergence_layer=lE, outlier_channel=channel,
                               scheme="token-dynamic")
    method.block = 8
    cache = Watched(model, method, "stream")
    tokens = text(rng, 2, 28, sinks=7)
    for chunk in tokens.split(8, dim=1):
        model(chunk, cache)
    # the last block is quantized when 24 tokens have been seen
    hidden = torch.cat(cache.seen[lE], dim=1)[:, :24]  # (B, 24, D)
    sizes = hidden[..., channel].abs().tolist()  # [sequence][token]
    expect_kept(cache, lE, sizes, k,
                  f"28 tokens come in chunks of 8, k = {k}, lE = {lE}. The last whole block ends at "
                  "token 23, so the sinks are the top-k of tokens 0 .. 23.")
