"""Base classes: the classes of the training split, numbered from 0, and batches of images labelled by them.

Turned classes count as further classes: with C training classes, the copy of class c that is turned by t
quarters has number ``c + t C``.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchemo.core.errors import ConfigError
from torchemo.core.rng import generator_for
from torchemo.core.types import BaseClasses, Batch
from torchemo.data.episodes import EpisodeIds, images_of
from torchemo.data.index import ClassIndex

TURNS = 4
"""Quarter turns of a class."""


def base_count(index: ClassIndex, *, rotations: bool) -> int:
    """Return the number of base classes."""
    return len(index.classes(split="train")) * (TURNS if rotations else 1)


def base_classes(index: ClassIndex, ids: EpisodeIds) -> BaseClasses:
    """Return which base class stands behind each label of training tasks."""
    return BaseClasses(_numbers(index, ids.classes, ids.turns))


def sample_batches(
    index: ClassIndex,
    *,
    seed: int,
    start: int,
    count: int,
    size: int,
    rotations: bool = False,
    stored: bool = False,
) -> Batch:
    """Draw batches ``start .. start + count - 1`` of training images, labelled by base class.

    Batch i is a function of (seed, i, size) alone. All images of the training split come once per epoch, in
    an order that is drawn for the epoch; a batch may reach into the next one.

    Args:
        index: Where the images come from.
        seed: Seed of the order.
        start: Number of the first batch.
        count: How many batches.
        size: Images of a batch.
        rotations: Turn every image by its own multiple of 90 degrees, which makes it one of another class.
        stored: Leave images as they are kept, uint8 0 .. 255.

    Returns:
        Images ``x [count, size, C, H, W]`` or features ``[count, size, d]``; labels ``y [count, size]``.
    """
    if start < 0 or count < 1 or size < 1:
        raise ConfigError(
            f"batches are counted from 0 and hold an image or more: {start=}, {count=}, {size=}."
        )
    classes = index.classes(split="train")
    pool = np.concatenate([index.images_of(c) for c in classes])
    places = np.arange(start * size, (start + count) * size)
    chosen, turns = _drawn(pool, places, seed=seed, rotations=rotations)
    shape = (count, size)
    of_image = torch.from_numpy(np.asarray(index.label)[chosen]).view(shape)
    ids, quarters = (torch.from_numpy(a).view(shape) for a in (chosen, turns))
    images = images_of(index, ids, turns=quarters, stored=stored)
    return Batch(images, _numbers(index, of_image, quarters))


def _drawn(
    pool: NDArray[np.int64], places: NDArray[np.int64], *, seed: int, rotations: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return which images have these places in the order of all epochs, and their quarter turns."""
    chosen, turns = np.empty_like(places), np.zeros_like(places)
    for epoch in np.unique(places // len(pool)):
        generator = generator_for(seed, "dense", int(epoch))
        here = places // len(pool) == epoch
        within = places[here] % len(pool)
        order = torch.randperm(len(pool), generator=generator).numpy()
        chosen[here] = pool[order[within]]
        if rotations:
            turned = torch.randint(TURNS, (len(pool),), generator=generator).numpy()
            turns[here] = turned[within]
    return chosen, turns


def _numbers(index: ClassIndex, classes: Tensor, turns: Tensor) -> Tensor:
    """Number classes of the training split from 0; turned copies come after all of them."""
    base = index.classes(split="train")
    place = torch.full((len(index.class_names),), -1)
    place[torch.from_numpy(base)] = torch.arange(len(base))
    return place[classes] + turns * len(base)
