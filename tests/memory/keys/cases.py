"""Small support sets, embedders and key networks for the tests of task keys."""

from typing import get_args

import torch

from torchemo.core.rng import generator_for
from torchemo.core.types import Batch
from torchemo.memory.keys.embedders import FrozenRandom, OwnConv, PairEmbedder, SharedTrunk
from torchemo.memory.keys.statistics import StatisticsKey, StatisticsNetwork
from torchemo.memory.keys.transformer import EmbedderName, MeanKey, TransformerKey
from torchemo.models.conv4 import Conv4

SIZE, WAY, DIM = 16, 3, 8
LEARNER = Conv4(n_way=WAY, in_channels=3, image_size=SIZE, filters=4)
EMBEDDERS = get_args(EmbedderName)


def images(tasks=3, shots=2, seed=0):
    x = torch.rand(tasks, WAY * shots, 3, SIZE, SIZE, generator=generator_for(seed, "x")).double()
    return Batch(x, torch.arange(WAY).repeat(tasks, shots))


def pairs(tasks=3, n=7, seed=0):
    g = generator_for(seed, "pairs")
    return Batch(
        torch.randn(tasks, n, 2, generator=g).double(),
        torch.randn(tasks, n, 1, generator=g).double(),
    )


def theta(seed=0):
    return {name: p.double() for name, p in LEARNER.init(generator_for(seed, "theta")).items()}


def embedder(name, seed=0):
    g = generator_for(seed, "embedder")
    if name == "shared":
        return SharedTrunk(LEARNER, generator=g, dim=DIM)
    if name == "pairs":
        return PairEmbedder(2, 1, generator=g, dim=DIM)
    kind = {"own": OwnConv, "frozen_random": FrozenRandom}[name]
    return kind(3, SIZE, generator=g, filters=4, dim=DIM)


def transformer(name="own", seed=0, **options):
    options = {"dim": DIM, "layers": 2, "heads": 2, "ff": 16} | options
    g = generator_for(seed, "transformer")
    return TransformerKey(embedder(name, seed), generator=g, **options).double()


def build(encoder, name):
    if encoder == "statistics":
        return StatisticsKey(2, 1) if name == "pairs" else StatisticsKey(3)
    if encoder == "learned-statistics":
        sizes = (2, 1) if name == "pairs" else (3, None)
        return StatisticsNetwork(*sizes, generator=generator_for(0, "network"), dim=DIM).double()
    return transformer(name) if encoder == "transformer" else MeanKey(embedder(name)).double()


def data_for(name):
    return pairs() if name == "pairs" else images()


def choose(batch, order):
    return Batch(batch.x[:, order], batch.y[:, order])
