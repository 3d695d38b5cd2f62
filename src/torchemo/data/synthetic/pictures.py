"""The embedded image set: synthetic images that need no download.

Four domains imitate the heterogeneity of birds, textures, aircraft and fungi. It is meant for the demo and
for tests; numbers from it are numbers about synthetic images and say so through the domain names.
"""

import numpy as np
import torch
from torch import Tensor

from torchemo.core.errors import ConfigError
from torchemo.core.rng import generator_for
from torchemo.data.index import ClassIndex
from torchemo.data.splits import Proportions, proportional
from torchemo.data.synthetic.families import DIALS, WORLDS
from torchemo.data.synthetic.shapes import Dials

_CHUNK_PIXELS = 1 << 19


def procedural(
    *,
    image_size: int = 32,
    classes_per_family: int = 60,
    images_per_class: int = 25,
    seed: int = 0,
) -> ClassIndex:
    """Draw the synthetic image set.

    A class is a vector of random numbers (proportions, colours, markings), an image adds its own (pose,
    light, background). Image i of class c of a family depends on (seed, family, c, i) alone.

    Args:
        image_size: Side of the images.
        classes_per_family: Classes of each of the four families; 64 : 16 : 20 of them by split.
        images_per_class: Images of each class.
        seed: Another seed gives other classes.

    Example:
        >>> index = procedural(image_size=16, classes_per_family=5, images_per_class=2)
        >>> index.shape, len(index), index.domains[0]
        ((3, 16, 16), 40, 'synthetic-birds')
    """
    if min(image_size - 7, classes_per_family, images_per_class) < 1:
        raise ConfigError(
            "the synthetic set needs images of 8 pixels or more, and at least one class and image,"
            f" got {image_size=}, {classes_per_family=}, {images_per_class=}."
        )
    names, splits, domains, images = [], [], [], []
    for family in WORLDS:
        members = [f"{family} {c:04d}" for c in range(classes_per_family)]
        drawn = proportional(members, Proportions(seed=seed), domain=family)
        names += members
        splits += [drawn[name] for name in members]
        domains += [family] * classes_per_family
        images.append(
            _draw_family(family, image_size, classes_per_family, images_per_class, seed=seed)
        )
    label = np.repeat(np.arange(len(names)), images_per_class)
    return ClassIndex(np.concatenate(images), label, names, splits, domains)


def _draw_family(
    family: str, size: int, classes: int, images: int, *, seed: int
) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    kind = torch.cat([_units(seed, family, c, "class", rows=1) for c in range(classes)])
    kind = kind.repeat_interleave(images, dim=0)
    shot = torch.cat([_units(seed, family, c, "images", rows=images) for c in range(classes)])
    rows = max(1, _CHUNK_PIXELS // size**2)
    parts = []
    for start in range(0, len(kind), rows):
        chunk = slice(start, start + rows)
        picture = WORLDS[family](Dials(kind[chunk]), Dials(shot[chunk]), size)
        parts.append((picture.clamp(0, 1) * 255).round().to(torch.uint8).numpy())
    return np.concatenate(parts)


def _units(seed: int, family: str, number: int, what: str, *, rows: int) -> Tensor:
    return torch.rand(
        rows, DIALS, generator=generator_for(seed, "procedural", family, number, what)
    )
