"""Assignment 6: the project's own answer."""
from unittest.mock import patch

import torch

from tinykv import kmeans as module
from tinykv.codecs.base import Codes, pack, unpack
from tinykv.codecs.codebook import Codebook
from tinykv.methods import antkv
from tinykv.methods.antkv import anchor_scores  # noqa: F401

ASSIGNMENT = "antkv"


def nearest(points, centres):
    return module.nearest(points[None], centres[None])[0]


def plus_plus(points, weights, u):
    """The project draws its numbers itself; here it is given them."""
    numbers = iter(u)

    def rand(P, count, generator):
        return torch.tensor([[next(numbers) for _ in range(count)]])

    with patch("torch.rand", rand):
        return module.plus_plus(points[None], len(u), weights[None], None)[0]


def lloyd(points, weights, centres):
    return module.lloyd(points[None], weights[None], centres[None])[0][0]


def kmeans(points, weights, centres, steps=25):
    with patch.object(module, "plus_plus", lambda *arguments: centres[None]):
        return module.kmeans(points[None], len(centres), weights[None], iterations=steps)[0]


def token_weights(gradient):
    heads, _, d = gradient.shape
    return Codebook(d, 2, heads, d, sensitivity="token").weigh(gradient, gradient)


def codec_of(centroids, heads):
    places, m, n = centroids.shape
    codec = Codebook(n, m, heads, places * n // heads)
    codec.centroids = centroids
    return codec


def encode(x, centroids):
    codec = codec_of(centroids, x.shape[1])
    return unpack(codec.encode(x).packed[:, 0], codec.code_bits, codec.places).long()


def decode(codes, centroids, heads):
    codec = codec_of(centroids, heads)
    return codec.decode(Codes(pack(codes, codec.code_bits)[:, None]))


AnTKV = antkv.AnTKV
