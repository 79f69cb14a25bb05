"""Assignment 6: weighted k-means, a codebook, and AnTKV's anchors."""
import itertools
import math

import torch

from tinykv.cache import KVCache
from tinykv.course.check import check, expect, expect_tensor, normal, shown
from tinykv.model import Llama, LlamaConfig

NUMBER, TITLE = 6, "AnTKV"
ANSWERS = ("tinykv.methods.antkv", "tinykv.methods.cq", "tinykv.codecs.codebook", "tinykv.kmeans",
           "tinykv.analysis.anchors", "kernels", "tinykv.triton_cache")
# tinykv/kmeans.py stays: SKVQ and KVQuant's codec need it, and it has many problems at a time
BLANKS = {"tinykv/methods/antkv.py": ("anchor_scores", "AnTKV.keep_keys", "AnTKV.keep_values", "AnTKV.largest"),
          "tinykv/codecs/codebook.py": ("Codebook.weigh", "Codebook.encode", "Codebook.decode"),
          "kernels.py": ("anchor_lines", "anchor_kernel"),
          "tests/test_anchors.py": None, "tests/test_vectors.py": None}


# ---- what these checks share

def close(given, wanted, tolerance=1e-4):
    """Whether two tensors are equal but for rounding. A NaN equals nothing."""
    return bool(((given.double() - wanted.double()).abs() <= tolerance * (1 + wanted.double().abs())).all())


def squares(point, centre):
    """The squared distance of two lists of numbers."""
    return sum((a - b) ** 2 for a, b in zip(point, centre))


def apart(rng, numbers):
    """Points (N, 2) on a line, at these numbers, somewhere in the plane."""
    x, y = rng.randint(-5, 5), rng.randint(-5, 5)
    return torch.tensor([[x + number, y] for number in numbers]).float()


# ---- task 1: k-means

@check(points=4)
def nearest_centre(submission, rng):
    """nearest: the centre with the smallest squared distance, of equals the first"""
    x, y = rng.randint(-9, 9), rng.randint(-9, 9)
    centres = [[0, 0], [8, 3], [0, 20], [6, 20]]
    rng.shuffle(centres)
    points = [[3, 3], [3, 21], [7, 4], [1, 19], [5, 22]]
    centres, points = ([[x + a, y + b] for a, b in rows] for rows in (centres, points))
    given = submission.nearest(torch.tensor(points).float(), torch.tensor(centres).float())
    expect_tensor(given, "integers", (5,), "What nearest gives")
    for point, got in zip(points, given.tolist()):
        distances = [squares(point, centre) for centre in centres]
        want = distances.index(min(distances))
        expect(got == want,
               f"Centres are {centres}. For the point {point} nearest gives {got}; it should be {want}: the "
               f"squared distances are {distances}. Of equal ones the first centre counts.")


@check(points=4)
def start_by_weight(submission, rng):
    """plus_plus: the first centre is drawn by the weights"""
    points = apart(rng, rng.sample(range(40), 6))
    weights = [rng.randint(1, 3) for _ in range(6)]
    weights[rng.randint(1, 4)] = 30
    weights[5] = 9
    for target in rng.sample(range(6), 6):
        number = (sum(weights[:target]) + weights[target] / 2) / sum(weights)
        given = submission.plus_plus(points.clone(), torch.tensor(weights).float(), [number])
        expect_tensor(given, "numbers", (1, 2), "What plus_plus gives for a list u of one number")
        expect(torch.equal(given[0], points[target]),
               f"Points {shown(points)} have the weights {weights}, and u = [{number:.3g}]. plus_plus draws "
               f"{shown(given[0])}; it should draw point {target}, {shown(points[target])}: u times the sum is "
               f"{number * sum(weights):g}, and the sums up to each point are "
               f"{[sum(weights[:i + 1]) for i in range(6)]}.")
    weights[0] = 0
    given = submission.plus_plus(points.clone(), torch.tensor(weights).float(), [0.0])
    expect(torch.equal(given[0], points[1]),
           f"Points {shown(points)} have the weights {weights}, and u = [0]. plus_plus draws {shown(given[0])}; it "
           f"should draw point 1, {shown(points[1])}: the first at which the sum is larger than u times the sum of "
           "all, not equal to it.")


@check(points=6)
def start_by_distance(submission, rng):
    """plus_plus: further centres are drawn by weight times squared distance"""
    places = [0, 1, 3, 10, 11, 30]
    rng.shuffle(places)
    points, weights = apart(rng, places), [rng.randint(2, 4) for _ in places]
    rows = points.tolist()
    weights[rng.randint(0, 5)] = 30
    first = rng.randint(0, 5)

    def odds_of(drawn):
        if not drawn:
            return weights
        return [w * min(squares(row, rows[i]) for i in drawn) for w, row in zip(weights, rows)]

    def number_of(drawn, target):
        odds = odds_of(drawn)
        return (sum(odds[:target]) + odds[target] / 2) / sum(odds)

    tries = list(itertools.permutations(range(6), 2))
    tries += [drawn for drawn in itertools.permutations(range(6), 3) if drawn[0] == first]
    for drawn in map(list, tries):
        u = [number_of(drawn[:i], target) for i, target in enumerate(drawn)]
        given = submission.plus_plus(points.clone(), torch.tensor(weights).float(), u)
        expect_tensor(given, "numbers", (len(u), 2), f"What plus_plus gives for a list u of {len(u)} numbers")
        want = points[drawn]
        expect(torch.equal(given, want),
               f"Points {shown(points)} have the weights {weights}, and u = {shown(u)}. plus_plus gives "
               f"{shown(given)}; it should give {shown(want)}. When the last centre is drawn, the odds are "
               f"{[int(x) for x in odds_of(drawn[:-1])]}: a point's weight times its squared distance to the "
               "nearest of the centres before.")


@check(points=5)
def lloyd_means(submission, rng):
    """lloyd: each centre moves to the weighted mean of its points"""
    numbers = [[0, 1, 3], [20, 24], [50, 51, 57]]
    weights = [[rng.randint(1, 3) for _ in group] for group in numbers]
    for row in weights:
        row[-1] = rng.randint(5, 9)
    order = rng.sample(range(3), 3)
    flat, heavy = sum(numbers, []), sum(weights, [])
    points = apart(rng, flat)
    x = (points[0] - torch.tensor([flat[0], 0])).tolist()  # where 0 lies
    centres = torch.tensor([[x[0] + numbers[i][0] + 1, x[1] + 2] for i in order])
    want = torch.tensor([[x[0] + sum(a * w for a, w in zip(numbers[i], weights[i])) / sum(weights[i]), x[1]]
                         for i in order])
    given = submission.lloyd(points.clone(), torch.tensor(heavy).float(), centres.clone())
    expect_tensor(given, "numbers", (3, 2), "What lloyd gives")
    expect(close(given, want),
           f"Points {shown(points)} have the weights {heavy}, and the centres are {shown(centres)}. lloyd moves "
           f"them to {shown(given)}; it should be {shown(want)}: sum w x / sum w over the points of each centre.")


@check(points=4)
def lloyd_without_points(submission, rng):
    """lloyd: centres without weight move to the furthest points"""
    away = rng.sample((7, 5, 1), 3)
    points = torch.tensor([[0.0, 0.0], [100.0, away[0]], [0.0, away[1]], [100.0, -away[2]], [0.0, 40.0],
                           [100.0, 0.0]])
    weights = torch.tensor([1.0] + [60.0 if y == 1 else 1.0 for y in away] + [0, 2])
    near, empty = [[0.0, 0.0], [100.0, 0.0]], [[-500.0, rng.randint(0, 9)], [500.0, rng.randint(0, 9)]]
    centres = torch.tensor([empty[0], near[0], empty[1], near[1]])
    given = submission.lloyd(points.clone(), weights.clone(), centres.clone())
    expect_tensor(given, "numbers", (4, 2), "What lloyd gives")
    far = sorted((i for i in range(6) if weights[i] > 0),
                 key=lambda i: -min(squares(points[i].tolist(), centre) for centre in near))
    for c, target in ((0, far[0]), (2, far[1])):
        expect(close(given[c], points[target]),
               f"No point is nearest to centre {c}, {shown(centres[c])}, of {shown(centres)}. It becomes "
               f"{shown(given[c])}; it should move to {shown(points[target])}, of the points {shown(points)} with "
               f"the weights {shown(weights)}: the first such centre takes the point that is furthest from its own "
               "centre, the second the next. Points without weight do not count. Other weights play no part.")


@check(points=5)
def kmeans_settles(submission, rng):
    """kmeans: steps until no centre moves, and no more than `steps`"""
    points = apart(rng, [0, 1, 2, 3, 4, 6, 8, 9, 10, 12, rng.randint(30, 40)])
    weights = torch.tensor([float(rng.randint(1, 2)) for _ in points])
    centres = points[:2]
    path = [centres]  # what your lloyd makes of it
    for _ in range(25):
        path.append(submission.lloyd(points.clone(), weights.clone(), path[-1].clone()))
        if torch.equal(path[-1], path[-2]):
            break
    for steps in (1, 2, 25):
        given = submission.kmeans(points.clone(), weights.clone(), centres.clone(), steps)
        expect_tensor(given, "numbers", (2, 2), "What kmeans gives")
        want = path[min(steps, len(path) - 1)]
        expect(close(given, want),
               f"From the centres {shown(centres)} your lloyd goes to {shown(path[1:4])}, and so on; after "
               f"{len(path) - 1} steps nothing moves. With steps = {steps} kmeans gives {shown(given)}; it should "
               f"give {shown(want)}.")
    if not torch.equal(path[-1], path[-2]):
        return  # a fault of lloyd, which has checks of its own
    calls = []
    was = submission.lloyd
    submission.lloyd = lambda *arguments: calls.append(1) or was(*arguments)
    submission.kmeans(points.clone(), weights.clone(), centres.clone(), 200)
    submission.lloyd = was
    expect(len(calls) <= len(path),
           f"Nothing moves after {len(path) - 1} steps, and with steps = 200 kmeans takes {len(calls)}. "
           "Stop when no centre moves.")


# ---- task 2: a codebook

def gradient_of(norms, rng, d=6):
    """A gradient (Hkv, T, d) whose rows have these norms, a list of lists of multiples of 5."""
    gradient = torch.zeros(len(norms), len(norms[0]), d)
    for h, row in enumerate(norms):
        for t, norm in enumerate(row):
            a, b = rng.sample(range(d), 2)
            gradient[h, t, a], gradient[h, t, b] = -3 * norm / 5, 4 * norm / 5
    return gradient


@check(points=6)
def weights_are_norms(submission, rng):
    """token_weights: the norm of each row of a KV head"""
    T = rng.randint(4, 6)
    norms = [[5 * rng.randint(1, 9) for _ in range(T)] for _ in range(2)]
    for row in norms:
        row[rng.randint(0, T - 1)] = 50  # twice, so nothing is clamped
    given = submission.token_weights(gradient_of(norms, rng))
    expect_tensor(given, "numbers", (2, T), "What token_weights gives")
    expect(close(given, torch.tensor(norms)),
           f"The rows of a gradient (2, {T}, 6) have the norms {norms}. token_weights gives {shown(given)}. A "
           "weight is the L2 norm of a token's row of one KV head, not its square, nor its mean. "
           "Nothing is clamped here, since the two largest of all heads together are equal.")


@check(points=4)
def weights_are_clamped(submission, rng):
    """token_weights: the largest thousandth is clamped"""
    for T in (6, 1000):
        norms = [[5 * (1 + h + 2 * t) for t in range(T)] for h in range(2)]
        for row in norms:
            rng.shuffle(row)
        norms[rng.randint(0, 1)][rng.randint(0, T - 1)] = 50000
        ordered = sorted(norms[0] + norms[1])
        at = int(0.999 * (2 * T - 1))
        largest = ordered[at]
        given = submission.token_weights(gradient_of(norms, rng))
        expect_tensor(given, "numbers", (2, T), "What token_weights gives")
        expect(close(given, torch.tensor(norms).clamp(max=largest)),
               f"{2 * T} rows have norms of 5 to 50,000; the largest weight that token_weights gives is "
               f"{given.max().item():g}, and it should be {largest}. Of {2 * T} sorted norms int(0.999 * {2 * T - 1}) "
               f"= {at} is the place of the largest that stays; those above it are lowered to it.")


@check(points=2)
def weights_of_nothing(submission, rng):
    """token_weights: a gradient of 0 weighs all tokens alike"""
    T = rng.randint(3, 6)
    given = submission.token_weights(torch.zeros(2, T, 4))
    expect_tensor(given, "numbers", (2, T), "What token_weights gives")
    expect(close(given, torch.ones(2, T)),
           f"The whole gradient is 0, and token_weights gives {shown(given)}; it should give 1 everywhere, since "
           "k-means can do nothing with points of no weight.")


def codebooks_of(rng, heads=2, d=8, n=4, m=4):
    """Centroids (places, m, n), no two of them close."""
    places = heads * d // n
    numbers = rng.sample(range(-40, 40), places * m)
    return torch.tensor(numbers).view(places, m, 1).float() + 0.25 * normal(rng, places, m, n).clamp(-1, 1)


def plain_decode(codes, centroids, heads):
    """Lists, number by number."""
    codes, books = codes.tolist(), centroids.tolist()
    per_head = len(books) // heads
    return torch.tensor([[[sum((books[h * per_head + i][token[h * per_head + i]] for i in range(per_head)), [])
                           for token in sequence] for h in range(heads)] for sequence in codes])


@check(points=6)
def encode_each_place(submission, rng):
    """encode: each place has a codebook of its own"""
    B, T = 2, rng.randint(3, 5)
    centroids = codebooks_of(rng)
    codes = torch.tensor([[[rng.randint(0, 3) for _ in range(4)] for _ in range(T)] for _ in range(B)])
    x = plain_decode(codes, centroids, 2) + 0.1 * normal(rng, B, 2, T, 8).clamp(-1, 1)
    given = submission.encode(x.clone(), centroids.clone())
    expect_tensor(given, "integers", (B, T, 4), "What encode gives")
    for b in range(B):
        for t in range(T):
            got, want = given[b, t].tolist(), codes[b, t].tolist()
            expect(got == want,
                   f"B = {B}, Hkv = 2, T = {T}, d = 8, n = 4. Token {t} of sequence {b} has the codes {got}; they "
                   f"should be {want}. Place p is compared with centroids[p] alone, and its place in the last "
                   "dimension is p; sub_vectors has the order of places, sequences and tokens.")


@check(points=4)
def decode_each_place(submission, rng):
    """decode: the sub-vectors of a token become the rows of its heads"""
    B, T = 2, rng.randint(3, 5)
    centroids = codebooks_of(rng)
    codes = torch.tensor([[[rng.randint(0, 3) for _ in range(4)] for _ in range(T)] for _ in range(B)])
    given = submission.decode(codes.clone(), centroids.clone(), 2)
    expect_tensor(given, "numbers", (B, 2, T, 8), "What decode gives")
    want = plain_decode(codes, centroids, 2)
    wrong = (~torch.isclose(given, want)).nonzero()
    if len(wrong):
        b, h, t, _ = wrong[0].tolist()
        expect(False, f"Token {t} of sequence {b} has the codes {codes[b, t].tolist()}. Its row of KV head {h} is "
               f"{shown(given[b, h, t])}; it should be {shown(want[b, h, t])}: the centroids of places {2 * h} and "
               f"{2 * h + 1} beside each other.")


@check(points=4)
def codebook_learns(submission, rng):
    """A codebook is learned: codes of calibration tokens lose little"""
    config = config_of(heads=2, kv_heads=2)
    codec = submission.AnTKV(config, vq="d4m8").codecs[0].k
    shape = (2, 96, 8)
    places = 40 * normal(rng, 4, 8, 4)  # true centres, 8 for each place
    numbers = torch.tensor([[rng.randint(0, 7) for _ in range(4)] for _ in range(shape[1])])
    rows = plain_decode(numbers[None], places, 2)[0] + 0.5 * normal(rng, *shape)
    codec.begin(0, 1, shape[1])
    codec.collect(0, rows.clone(), None, normal(rng, *shape).abs() + 1)
    codec.fit(0)
    expect_tensor(codec.centroids, "numbers", (4, 8, 4), "After calibration the codec's table `centroids`")
    decoded = codec.decode(codec.encode(rows[None]))[0]
    expect_tensor(decoded, "numbers", shape, "What the codec decodes")
    share = ((decoded - rows).square().mean() / (rows - rows.mean(1, keepdim=True)).square().mean()).item()
    expect(share < 0.3, "The sub-vectors of 96 tokens lie in 8 clusters at each place. After calibration with "
           f"d4m8 the codes lose {100 * share:.0f}% of their variance; below 30% it should be. Are all four "
           "functions of k-means right, and encode and decode?")


# ---- task 3: anchor scores

def plain_scores(q, k, scale=True, causal=True, late=True, rest=True, norm=True):
    """Eq. 5 number by number -> AnS(K), AnS(V), (B, Hkv, S) both. The flags leave something out."""
    B, H, T, d = q.shape
    Hkv, S = k.shape[1:3]
    of_keys, of_values = (torch.zeros(B, Hkv, S, dtype=torch.double) for _ in range(2))
    for b in range(B):
        for h in range(H):
            kv = h * Hkv // H
            for i in range(T):
                row = q[b, h, i].tolist()
                length = math.sqrt(sum(x * x for x in row)) if norm else 1.0
                at = i + S - T if late else i
                seen = at + 1 if causal else S
                logits = [sum(x * y for x, y in zip(row, key)) / (math.sqrt(d) if scale else 1)
                          for key in k[b, kv, :seen].tolist()]
                top = max(logits)
                weights = [math.exp(x - top) for x in logits]
                for j, weight in enumerate(weights):
                    A = weight / sum(weights)
                    of_values[b, kv, j] += A
                    of_keys[b, kv, j] += A * (1 - A if rest else 1) * length
    return of_keys, of_values


SLIPS = {
    "scale": "the scores are not divided by sqrt(d)",
    "causal": "queries see later keys, too",
    "late": "the first query counts as the first token, though it is the first of the T newest",
    "rest": "the factor (1 - A) is missing",
    "norm": "the factor |Q_i| is missing",
}


def try_scores(submission, q, k, kind, tried):
    """kind: 0 for keys, 1 for values."""
    given = submission.anchor_scores(q.clone(), k.clone())
    expect(isinstance(given, (tuple, list)) and len(given) == 2,
           "anchor_scores has to return two tensors, AnS(K) and AnS(V).")
    name = ("AnS(K)", "AnS(V)")[kind]
    want = plain_scores(q, k)[kind]
    expect_tensor(given[kind], "numbers", want.shape, f"{name} of anchor_scores")
    if close(given[kind], want, 1e-3):
        return
    why = ""
    for slip, words in SLIPS.items():
        if close(given[kind], plain_scores(q, k, **{slip: False})[kind], 1e-3):
            why = f" This comes if {words}."
    if not why and close(given[1 - kind], want, 1e-3):
        why = " The order is AnS(K), AnS(V)."
    expect(False, f"{tried} {name} is {shown(given[kind])}; it should be {shown(want)}.{why}")


@check(points=5)
def scores_of_values(submission, rng):
    """anchor_scores: AnS(V), the attention that a token receives"""
    S = rng.randint(4, 5)
    try_scores(submission, 2 * normal(rng, 1, 1, S, 4), normal(rng, 1, 1, S, 4), 1,
               f"One head of 4 channels, {S} queries and {S} keys.")


@check(points=5)
def scores_of_keys(submission, rng):
    """anchor_scores: AnS(K)"""
    S = rng.randint(4, 5)
    try_scores(submission, 2 * normal(rng, 1, 1, S, 4), normal(rng, 1, 1, S, 4), 0,
               f"One head of 4 channels, {S} queries and {S} keys.")


@check(points=4)
def scores_of_new_queries(submission, rng):
    """anchor_scores: the T queries are those of the newest tokens"""
    S, T = rng.randint(5, 6), rng.randint(2, 3)
    try_scores(submission, 2 * normal(rng, 1, 1, T, 4), normal(rng, 1, 1, S, 4), 1,
               f"{S} keys, and the queries of the {T} newest tokens.")


@check(points=4)
def scores_of_heads(submission, rng):
    """anchor_scores: the query heads of a KV head are added up"""
    S = rng.randint(3, 4)
    q, k = 2 * normal(rng, 2, 4, S, 4), normal(rng, 2, 2, S, 4)
    try_scores(submission, q, k, 1, f"Two sequences of {S} tokens, 4 query heads and 2 KV heads: query heads 0 and 1 "
               "read KV head 0.")


# ---- task 3: anchors

def config_of(heads=4, kv_heads=2, layers=2):
    return LlamaConfig(vocab_size=24, hidden_size=32, intermediate_size=48, num_hidden_layers=layers,
                       num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=8,
                       max_position_embeddings=512)


def noted_cache(submission, rng, length):
    """A layer's cache of `length` tokens, whose keys and values have scores."""
    model = Llama(config_of())
    method = submission.AnTKV(model.config, vq="d4m4", anchors="10%", recent=4, block=8)
    layer_cache = KVCache(model, method, "stream").layers[0]
    zeros = torch.zeros(2, 2, length, 8)
    layer_cache.append(zeros, zeros, torch.arange(length))
    for rows in (layer_cache.keys, layer_cache.values):
        rows.recent_scores = torch.tensor([[rng.sample(range(1, 100), length) for _ in range(2)]
                                           for _ in range(2)]).float()
    return method, layer_cache


def expect_anchors(given, scores, n, count, tried):
    expect_tensor(given, "integers", (2, 2, count), f"{tried} What it gives")
    for b in range(2):
        for h in range(2):
            row = scores[b, h, :n].tolist()
            want = sorted(sorted(range(n), key=lambda i: -row[i])[:count])
            got = sorted(given[b, h].tolist())
            expect(got == want, f"{tried} Of sequence {b} and KV head {h} it gives {got}; it should give {want}.")


@check(points=3)
def keep_the_best_keys(submission, rng):
    """keep_keys: a share of the tokens seen, rounded up"""
    length, n = rng.randint(24, 28), 16
    method, layer_cache = noted_cache(submission, rng, length)
    count = -(-length // 10)
    expect_anchors(method.keep_keys(layer_cache, n), layer_cache.keys.recent_scores, n, count,
                   f"{length} tokens were seen, of which the {n} oldest are due, and anchors are 10%: {count} tokens. "
                   "keep_keys is asked.")


@check(points=2)
def keep_the_best_values(submission, rng):
    """keep_values: values have anchors of their own"""
    length, n = rng.randint(24, 28), 16
    method, layer_cache = noted_cache(submission, rng, length)
    count = -(-length // 10)
    expect_anchors(method.keep_values(layer_cache, n), layer_cache.values.recent_scores, n, count,
                   "Keys and values have different scores. keep_values is asked, which has to look at "
                   "layer_cache.values.")


@check(points=3)
@torch.no_grad()
def window(submission, rng):
    """A whole window (protocol paper): the anchors are in full precision"""
    torch.manual_seed(rng.getrandbits(32))
    model = Llama(config_of())
    model.model["embed_tokens"].weight.normal_()
    for block in model.model["layers"]:
        for linear in (block.self_attn.q_proj, block.self_attn.k_proj):
            linear.weight.normal_(std=0.3)  # queries look at few tokens
    method = submission.AnTKV(model.config, vq="d4m4", anchors="10%")
    for pair in method.codecs:
        for codec in pair:
            codec.centroids = 0.3 * normal(rng, 4, 4, 4)
    cache, seen = KVCache(model, method, "paper"), []
    score = method.score
    method.score = lambda layer_cache, q, K: seen.append((q, K)) or score(layer_cache, q, K)
    T = rng.randint(21, 29)
    model(torch.tensor([[rng.randint(0, 23) for _ in range(T)] for _ in range(2)]), cache)
    expect(len(seen) == 2, f"A model of 2 layers reads {T} tokens, and `score` was called {len(seen)} times. Leave the "
           "lines that are given as they are.")
    for layer, (layer_cache, (q, K)) in enumerate(zip(cache.layers, seen)):
        for rows, scores, kind in zip((layer_cache.keys, layer_cache.values), plain_scores(q, K), ("keys", "values")):
            expect(rows.kept_positions is not None, f"Layer {layer} keeps no {kind} in full precision.")
            for b in range(2):
                for h in range(2):
                    row = scores[b, h].tolist()
                    want = sorted(range(T), key=lambda i: -row[i])[:3]
                    got = [i for i in rows.kept_positions.expand(2, 2, -1)[b, h].tolist() if i >= 0]
                    right = len(got) == 3 and max(got) < T
                    right = right and abs(sum(row[i] for i in got) - sum(row[i] for i in want)) < 1e-3
                    expect(right, f"A model reads two texts of {T} tokens with 10% anchors. Layer {layer} keeps {kind} "
                           f"{sorted(got)} of sequence {b} and KV head {h}; by Eq. 5 it should be {sorted(want)}.")
