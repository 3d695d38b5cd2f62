"""Few-shot tasks drawn from an image set: a pure function of seed, split and episode number."""

from dataclasses import dataclass
from typing import NamedTuple, final

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from numpy.typing import NDArray
from torch import Tensor

from torchemo.core.errors import ConfigError, DataError
from torchemo.core.rng import generator_for
from torchemo.core.types import Batch, Episode
from torchemo.data.index import ClassIndex


@final
@dataclass(frozen=True)
class EpisodeSpec:
    """The shape of a task: N-way, K-shot, Q queries per class.

    Choice: with ``rotations`` every class drawn for a task is turned by 0, 90, 180 or 270 degrees,
    one turn for all its images, so that turned classes count as further classes across tasks (the
    Omniglot protocol); a class never meets a turned copy of itself within a task.
    """

    n_way: int = 5
    """Classes of a task, N."""
    n_shot: int = 1
    """Support images per class, K."""
    n_query: int = 15
    """Query images per class, Q."""
    rotations: bool = False
    """Turn every class of a task by its own random multiple of 90 degrees."""

    def __post_init__(self) -> None:
        for field, least in (("n_way", 2), ("n_shot", 1), ("n_query", 1)):
            value = getattr(self, field)
            if value < least:
                raise ConfigError(f"{field} should be at least {least}, got {value}.")

    @property
    def images_per_class(self) -> int:
        """Images a class must have: K + Q."""
        return self.n_shot + self.n_query


class EpisodeIds(NamedTuple):
    """B tasks as image ids: everything about them except the pixels.

    Attributes:
        support: Image ids of the support sets, in the order of the examples.
        support_y: Their labels ``0 .. n_way - 1``.
        query: Image ids of the query sets.
        query_y: Their labels.
        classes: Which class of the index stands behind each label.
        turns: Quarter turns of each label's images, counter-clockwise.
        domain: Domain number of each task, in the order of ``ClassIndex.domains``.
        number: Episode numbers.
    """

    support: Int[Tensor, "task n_support"]
    support_y: Int[Tensor, "task n_support"]
    query: Int[Tensor, "task n_query"]
    query_y: Int[Tensor, "task n_query"]
    classes: Int[Tensor, "task way"]
    turns: Int[Tensor, "task way"]
    domain: Int[Tensor, " task"]
    number: Int[Tensor, " task"]


def sample_episodes(
    index: ClassIndex,
    spec: EpisodeSpec,
    *,
    seed: int,
    split: str,
    start: int,
    count: int,
    domain: str | None = None,
) -> Episode:
    """Draw episodes ``start .. start + count - 1`` of a split.

    Episode i is a function of (seed, split, i) alone: it is the same in any batch, on any rank and
    after any resume. One domain is drawn uniformly, then N of its classes, then K + Q images of
    each; labels follow the random order of the classes and the order of the examples is shuffled.

    Args:
        index: Where the classes come from.
        spec: N, K, Q. More queries per class leave the support sets as they are.
        seed: Seed of the whole stream.
        split: ``train``, ``val`` or ``test``.
        start: Number of the first episode.
        count: How many episodes, B.
        domain: Draw from this domain only.

    Returns:
        Images ``x [B, n, C, H, W]`` in [0, 1] or features ``x [B, n, d]``, labels ``y [B, n]``, domain
        and number of tasks.
    """
    ids = sample_ids(index, spec, seed=seed, split=split, start=start, count=count, domain=domain)
    return gather(index, ids)


def sample_ids(
    index: ClassIndex,
    spec: EpisodeSpec,
    *,
    seed: int,
    split: str,
    start: int,
    count: int,
    domain: str | None = None,
) -> EpisodeIds:
    """Draw the same tasks as `sample_episodes` without touching a pixel."""
    if start < 0 or count < 1:
        raise ConfigError(
            f"episodes are counted from 0 and at least one is drawn: {start=}, {count=}."
        )
    check_fits(index, spec, split=split, domain=domain)
    pools = class_pools(index, split=split, domain=domain)
    tasks = [
        _draw(index, spec, pools, generator=generator_for(seed, "episode", split, i), number=i)
        for i in range(start, start + count)
    ]
    return EpisodeIds(*(torch.stack(column) for column in zip(*tasks, strict=True)))


def gather(index: ClassIndex, ids: EpisodeIds, *, stored: bool = False) -> Episode:
    """Fetch the images of drawn tasks; see `images_of`."""
    support_turns, query_turns = (ids.turns.gather(1, y) for y in (ids.support_y, ids.query_y))
    return Episode(
        Batch(images_of(index, ids.support, turns=support_turns, stored=stored), ids.support_y),
        Batch(images_of(index, ids.query, turns=query_turns, stored=stored), ids.query_y),
        ids.domain,
        ids.number,
        # Turned classes count as further classes.
        ids.classes + ids.turns * len(index.class_names),
    )


def to_unit(images: UInt8[np.ndarray, "*batch c h w"]) -> Float[Tensor, "*batch c h w"]:
    """Turn stored images, 0 .. 255, into what networks see: float32 in [0, 1]."""
    return torch.from_numpy(images).to(torch.float32).div_(255)


def check_fits(
    index: ClassIndex, spec: EpisodeSpec, *, split: str, domain: str | None = None
) -> None:
    """Raise `DataError` naming the domain or class that cannot supply a task of this shape."""
    pools = class_pools(index, split=split, domain=domain)
    if not pools:
        where = "" if domain is None else f" of domain {domain!r}"
        raise DataError(
            f"no class{where} has split {split!r}.",
            hint="Move some class folders there, or draw splits of all classes: --splits 64:16:20.",
        )
    for pool in pools:
        _check_pool(index, spec, pool, split=split)
    if spec.rotations and index.holds_features:
        raise DataError(
            "features cannot be turned by 90 degrees.", hint="Set data.rotations = false."
        )
    if spec.rotations and index.shape[1] != index.shape[2]:
        raise DataError(
            f"images of {index.shape[1]}x{index.shape[2]} pixels cannot be turned by 90 degrees.",
            hint="Load square images, or switch rotations off.",
        )


def _check_pool(
    index: ClassIndex, spec: EpisodeSpec, pool: NDArray[np.int64], *, split: str
) -> None:
    if len(pool) < spec.n_way:
        raise DataError(
            f"domain {index.class_domain[pool[0]]!r} has {len(pool)} classes in split {split!r};"
            f" {spec.n_way}-way needs {spec.n_way}.",
            hint=f"Lower --way (data.n_way), or give more classes: {spec.n_way}-way takes about"
            f" {6 * spec.n_way}, or a file of splits (docs/data.md).",
        )
    smallest = pool[index.counts[pool].argmin()]
    if index.counts[smallest] < spec.images_per_class:
        raise DataError(
            f"class {index.class_names[smallest]!r} has {index.counts[smallest]} images;"
            f" {spec.n_shot}-shot + {spec.n_query} query needs {spec.images_per_class}.",
            hint="Lower n_query (data.n_query of a run), or leave the class out.",
        )


def class_pools(
    index: ClassIndex, *, split: str, domain: str | None = None
) -> list[NDArray[np.int64]]:
    """Return the classes of each domain that has any in this split."""
    classes = index.classes(split=split, domain=domain)
    domains = index.domain_of_class[classes]
    return [classes[domains == number] for number in np.unique(domains)]


def _draw(
    index: ClassIndex,
    spec: EpisodeSpec,
    pools: list[NDArray[np.int64]],
    *,
    generator: torch.Generator,
    number: int,
) -> tuple[Tensor, ...]:
    """Draw one task; the fields of `EpisodeIds` without their task axis."""
    n, k, q = spec.n_way, spec.n_shot, spec.n_query
    pool = pools[int(torch.randint(len(pools), (), generator=generator))]
    classes = pool[torch.randperm(len(pool), generator=generator)[:n].numpy()]
    chosen = torch.from_numpy(_choose(index, classes, k + q, generator=generator))
    turns = torch.randint(4, (n,), generator=generator) * int(spec.rotations)
    # Queries are shuffled last, so that n_query has no say in the support set.
    by_label = torch.arange(n)
    support_y, query_y = by_label.repeat_interleave(k), by_label.repeat_interleave(q)
    support_order = torch.randperm(n * k, generator=generator)
    query_order = torch.randperm(n * q, generator=generator)
    return (
        chosen[:, :k].reshape(-1)[support_order],
        support_y[support_order],
        chosen[:, k:].reshape(-1)[query_order],
        query_y[query_order],
        torch.from_numpy(classes),
        turns,
        torch.tensor(index.domain_of_class[classes[0]]),
        torch.tensor(number),
    )


def _choose(
    index: ClassIndex, classes: NDArray[np.int64], images: int, *, generator: torch.Generator
) -> NDArray[np.int64]:
    """Choose different images of each class, ``[way, images]``: the smallest of random keys."""
    counts = index.counts[classes]
    widest = int(counts.max())
    keys = torch.rand(len(classes), widest, generator=generator, dtype=torch.float64).numpy()
    keys[np.arange(widest) >= counts[:, None]] = np.inf
    places = np.argsort(keys, axis=1, kind="stable")[:, :images]
    chosen: NDArray[np.int64] = index.order[index.starts[classes][:, None] + places]
    return chosen


def images_of(index: ClassIndex, ids: Tensor, *, turns: Tensor, stored: bool = False) -> Tensor:
    """Fetch images by id, each turned by its own number of quarters; or features, which are not turned.

    With ``stored`` images stay as they are kept, uint8 0 .. 255: who uses them scales them.
    """
    pixels = index.images[ids.numpy()]
    if index.holds_features:
        return torch.from_numpy(pixels).to(torch.float32)
    for quarter in range(1, 4):
        rows = turns.numpy() == quarter
        if rows.any():
            pixels[rows] = np.rot90(pixels[rows], quarter, axes=(-2, -1))
    return torch.from_numpy(pixels) if stored else to_unit(pixels)
