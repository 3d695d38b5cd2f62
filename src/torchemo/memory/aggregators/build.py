"""From an option to an aggregator."""

import torch

from torchemo.config.run import AggregatorConfig
from torchemo.core.rng import generator_for
from torchemo.memory.aggregators.aggregator import Aggregator
from torchemo.memory.aggregators.coordinate import CoordinateTransformer
from torchemo.memory.aggregators.gate import GateTransformer
from torchemo.memory.aggregators.linear import Gated, Mean, Sum


def build_aggregator(
    config: AggregatorConfig,
    shapes: dict[str, torch.Size],
    *,
    k: int,
    steps: int,
    head: tuple[str, ...],
    seed: int,
) -> Aggregator:
    """Make the aggregator that ``config`` names.

    Args:
        config: Its options.
        shapes: Names and shapes of the tensors that are remembered.
        k: Neighbours that a full memory recalls.
        steps: Inner steps of training, for gates per step.
        head: Names of the head tensors.
        seed: Seed of its weights.
    """
    generator = generator_for(seed, "aggregator")
    if config.kind == "mean":
        return Mean(k, rescale=config.rescale, pad=config.pad)
    if config.kind == "sum":
        return Sum()
    if config.kind == "gated":
        per_step = max(steps, 1) if config.per_step else None
        return Gated(list(shapes), steps=per_step, learn_own=config.learn_own)
    if config.kind == "gate":
        return GateTransformer(
            shapes,
            generator=generator,
            head=head,
            init=config.init,
            max_neighbors=config.max_neighbors,
            layers=config.layers,
        )
    return CoordinateTransformer(
        generator=generator, init=config.init, max_neighbors=config.max_neighbors
    )
