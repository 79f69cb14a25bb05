"""Read this first: what quantization does to eight numbers, and what each method does to a short text.

    pytest tests/test_first.py

Every method answers three questions about each token's key and value.
    Keep: which tokens stay in full precision for good?
    Code: how is every other token quantized?
    When: how long does a fresh token stay in full precision, and how many are quantized at a time?
"""
import pytest
import torch

from tinykv.cache import KVCache
from tinykv.calibrate import calibrate
from tinykv.codecs.affine import Affine
from tinykv.codecs.base import pack, unpack
from tinykv.methods.antkv import attention_tiles
from tinykv.methods.intactkv import Prefix
from tinykv.methods.registry import METHODS
from tinykv.model import Llama, LlamaConfig, Trace

# Eight numbers: one key, of a head with eight channels
X = torch.tensor([-1.0, -0.6, -0.1, 0.0, 0.4, 0.9, 1.3, 2.0])


def test_eight_numbers_in_two_bits():
    # Two bits are four codes: 0, 1, 2 and 3.
    #   zero point  z = min = -1             scale  s = (max - min) / 3 = (2 + 1) / 3 = 1
    #   code        q = round((x - z) / s) = round(x + 1)
    #   read as     x' = s q + z = q - 1
    codec = Affine(bits=2, width=8)
    codes = codec.encode(X.view(1, 1, 1, 8))  # (B, Hkv, T, d): one sequence, one head, one token
    assert codes.zero.item() == -1.0 and codes.scale.item() == 1.0
    assert unpack(codes.packed, bits=2, n=8).flatten().tolist() == [0, 0, 1, 1, 1, 2, 2, 3]
    assert codec.decode(codes).flatten().tolist() == [-1, -1, 0, 0, 0, 1, 1, 2]


def test_four_codes_fit_a_byte():
    # Eight codes take two bytes. The first two codes are in the lowest bits of the two bytes, the next two above them:
    # 0 + 4*1 + 16*1 + 64*2 = 148, and 0 + 4*1 + 16*2 + 64*3 = 228.
    assert pack(torch.tensor([0, 0, 1, 1, 1, 2, 2, 3]), bits=2).tolist() == [148, 228]
    # Two bytes of codes, and 16 bits each for the scale and the zero point. In fp16 eight numbers take 16 bytes.
    assert Affine(bits=2, width=8).encode(X.view(1, 1, 1, 8)).nbytes == 6


def test_one_outlier_spoils_its_group():
    # With 59 in the place of 2, the scale is (59 + 1) / 3 = 20, and all seven other numbers get code 0.
    x = torch.tensor([*X[:7], 59.0])
    codec = Affine(bits=2, width=8)
    read = codec.decode(codec.encode(x.view(1, 1, 1, 8)))
    assert read.flatten().tolist() == [-1, -1, -1, -1, -1, -1, -1, 59]


def test_a_kept_token_does_not_spoil_its_group():
    # Now the numbers are one channel of eight tokens, which share a scale. The last token is kept in
    # full precision elsewhere, so its number is ignored: min = -1, max = 1.3, s = 2.3 / 3 = 0.767.
    x = torch.tensor([*X[:7], 59.0]).view(1, 1, 8, 1)
    ignore = torch.tensor([False] * 7 + [True]).view(1, 1, 8)
    codes = Affine(bits=2, width=1, axis="channel").encode(x, ignore)
    assert codes.scale.item() == pytest.approx(0.767, abs=0.001)
    # (x + 1) / 0.767 = 0, 0.52, 1.17, 1.30, 1.83, 2.48, 3
    assert unpack(codes.packed, bits=2, n=1).flatten().tolist()[:7] == [0, 1, 1, 1, 2, 2, 3]


# A text of 20 tokens, and a model with random weights: three layers, two query heads on one KV head.
# Token 9 stands at positions 6 and 13. As an attention sink does, it has a huge number in one channel, 5.

torch.manual_seed(0)
CONFIG = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=3,
                     num_attention_heads=2, num_key_value_heads=1, head_dim=8, max_position_embeddings=64)
MODEL = Llama(CONFIG)
MODEL.model["embed_tokens"].weight.data[9, 5] = 50.0
TOKENS = torch.tensor([[1, 17, 4, 25, 8, 30, 9, 12, 3, 21, 14, 6, 28, 9, 11, 2, 19, 23, 5, 16]])  # (B, T)


@torch.no_grad()
def read(method, protocol="paper"):
    """The cache of each layer, after the model has read the text through it."""
    cache = KVCache(MODEL, method, protocol)
    MODEL(TOKENS, cache)
    return cache.layers


def test_fp16_quantizes_nothing():
    layers = read(METHODS["fp16"](CONFIG))
    # 20 tokens of 8 numbers, 2 bytes each
    assert layers[2].keys.codes.nbytes == 20 * 8 * 2


def test_rtn_quantizes_everything_and_keeps_nothing():
    layers = read(METHODS["rtn"](CONFIG, k_bits=2, v_bits=2, scheme="token-dynamic"))
    assert layers[2].keys.n_coded == 20 and layers[2].keys.kept_positions is None
    # 6 bytes a token, as above
    assert layers[2].keys.codes.nbytes == layers[2].values.codes.nbytes == 20 * 6


def test_pfn_keeps_the_first_tokens():
    layers = read(METHODS["pfn"](CONFIG, preserve=2, scheme="token-dynamic"))
    keys = layers[2].keys
    assert keys.kept_positions.tolist() == [[[0, 1]]]
    # When the cache is read, the kept keys are in their places, as they were.
    assert torch.equal(keys.read()[:, :, :2], keys.kept_rows)


def test_kvsink_keeps_the_tokens_with_an_outlier():
    # Algorithm 1: the k tokens with the largest |H[i, c]| after block lE, in the layers after lE.
    method = METHODS["kvsink"](CONFIG, preserve=2, emergence_layer=0, outlier_channel=5, scheme="token-dynamic")
    layers = read(method)
    assert layers[0].keys.kept_positions is None
    assert sorted(layers[1].keys.kept_positions.flatten().tolist()) == [6, 13]
    assert sorted(layers[2].values.kept_positions.flatten().tolist()) == [6, 13]


def test_kivi_waits_for_a_block_to_be_full():
    # The 5 newest tokens stay in full precision, and older ones are quantized 4 at a time. Of 20 tokens
    # 15 are old enough, which is 3 blocks of 4; 8 tokens are recent.
    layers = read(METHODS["kivi"](CONFIG, recent=5, group_size=4), protocol="stream")
    assert layers[2].keys.n_coded == 12 and layers[2].keys.recent.shape[2] == 8
    # Keys per channel: a scale for 4 tokens of each of 8 channels. Values per token: a scale for 4 channels.
    assert layers[2].keys.codes.scale.shape == (1, 1, 3, 1, 8)
    assert layers[2].values.codes.scale.shape == (1, 1, 12, 2, 1)


def test_ott_keeps_the_smallest_keys():
    keys = read(METHODS["ott"](CONFIG, outlier_num=3))[2].keys
    # score(i) = sum_c |K[i, c]|: no other key is smaller than those of the pool.
    score = keys.read()[0, 0].float().abs().sum(-1)  # (T)
    assert sorted(keys.kept_positions.flatten().tolist()) == sorted(score.argsort()[:3].tolist())


def test_skvq_groups_channels_of_similar_range():
    method = METHODS["skvq"](CONFIG, group_size=4, preserve=1, recent=8, block=4)
    calibrate(MODEL, method, TOKENS)
    # Each of the eight channels is in one of two groups.
    assert set(method.codecs[2].k.group.tolist()) == {0, 1}
    # The first token is kept. In a stream the 8 newest wait, and all 3 blocks of 4 before them are quantized.
    keys = read(method, protocol="stream")[2].keys
    assert keys.kept_positions.tolist() == [[[0]]] and keys.n_coded == 12


def test_intactkv_keeps_a_prefix_from_the_full_precision_model():
    prefix = Prefix("bos", [1])  # the token that the text begins with
    prefix.fill(MODEL, MODEL)  # the model in full precision, and the one with quantized weights: here the same
    layers = read(METHODS["intactkv"](CONFIG, prefix, k_bits=2, v_bits=2))
    # The prefix is in the cache before the text is read, and what is read follows it.
    assert layers[2].length == 20 and layers[2].keys.kept_positions.tolist() == [[[0]]]
    assert torch.equal(layers[2].values.kept_rows[0].float(), prefix.values[2])


def test_kvquant_stores_outliers_apart():
    method = METHODS["kvquant"](CONFIG, preserve=1, outliers=12.5)  # per cent: one number of eight
    calibrate(MODEL, method, TOKENS)
    # Two bits are four levels, placed by weighted k-means.
    assert method.codecs[2].v.levels.shape == (4,)
    # Of each token but the first, which is kept, the value furthest from the median is stored in 16 bits.
    assert read(method)[2].values.codes.values.numel() == 19


def test_cq_gives_neighbouring_channels_one_code():
    # d4m16: 4 channels share one of 16 centroids, which takes 4 bits. So 8 channels take one byte.
    method = METHODS["cq"](CONFIG, vq="d4m16")
    calibrate(MODEL, method, TOKENS)
    assert read(method)[2].keys.codes.packed.shape == (1, 1, 20, 1)


def test_antkv_keeps_the_tokens_with_the_largest_anchor_scores():
    method = METHODS["antkv"](CONFIG, vq="d4m16", anchors=2)
    calibrate(MODEL, method, TOKENS)
    layers = read(method)
    # Eq. 5 for values: AnS(V_j) = sum_i A_ij, the attention that token j receives, here from both heads.
    trace = Trace(MODEL)  # a forward in full precision that keeps what passes
    with torch.no_grad():
        MODEL(TOKENS, trace)
    (_, A), = attention_tiles(MODEL.rope.rotate(trace.q[0]), MODEL.rope.rotate(trace.k[0]))  # (1, H, T, T)
    scores = A[0].sum((0, 1))  # (T)
    assert sorted(layers[0].values.kept_positions.flatten().tolist()) == sorted(scores.topk(2).indices.tolist())
