"""Where tasks come from: embedded images, embedded regression, or image sets on disk."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeAlias, cast, final, runtime_checkable

import torch

from torchemo.config.run import AugmentSpec, DataConfig
from torchemo.core.errors import ConfigError, DataError
from torchemo.core.rng import generator_for
from torchemo.core.types import Batch, Episode, TaskShape
from torchemo.data.augment import augmented
from torchemo.data.dense import base_classes, base_count, sample_batches
from torchemo.data.duplicates import refuse_leaks
from torchemo.data.episodes import EpisodeSpec, check_fits, gather, sample_ids
from torchemo.data.features import FeatureNetwork, cache_folder, cached_features
from torchemo.data.index import SPLITS, ClassIndex, merge
from torchemo.data.listing import BadPicture, Progress, listing_of
from torchemo.data.load import find, load, splits_for
from torchemo.data.packed import is_packed, made_by
from torchemo.data.splits import Proportions, SplitFile
from torchemo.data.streams import ClassVisits, FunctionVisits, StreamTasks
from torchemo.data.synthetic.pictures import procedural
from torchemo.data.synthetic.regression import FAMILIES, Group, RegressionSpec, sample_regression

PROCEDURAL = "procedural"
REGRESSION = "regression:"
PLAIN = AugmentSpec()

OnBad: TypeAlias = Callable[[BadPicture], None] | None


@runtime_checkable
class TaskSource(Protocol):
    """Tasks of three splits; episode i of a split under a seed never changes."""

    @property
    def shape(self) -> TaskShape:
        """What the tasks look like."""
        ...

    @property
    def domains(self) -> tuple[str, ...]:
        """Names of the domains that `Episode.domain` counts."""
        ...

    @property
    def fingerprint(self) -> str:
        """A digest of everything the tasks depend on."""
        ...

    def sample(
        self, split: str, *, seed: int, start: int, count: int, n_query: int | None = None
    ) -> Episode:
        """Return episodes ``start .. start + count - 1`` of a split."""
        ...


@runtime_checkable
class BatchSource(Protocol):
    """A source of images of base classes; batch i under a seed never changes."""

    def batches(self, *, seed: int, start: int, count: int, size: int) -> Batch:
        """Return batches ``start .. start + count - 1`` of ``size`` training images."""
        ...


@final
@dataclass(frozen=True)
class PictureTasks:
    """N-way K-shot tasks from classes of images."""

    index: ClassIndex
    spec: EpisodeSpec
    left_out: tuple[BadPicture, ...] = ()
    """Images that cannot be read, with the reason."""
    dropped: int = 0
    """Copies of other images that were dropped."""
    augment: AugmentSpec = PLAIN
    """What is done to images of training tasks."""
    training: EpisodeSpec | None = None
    """What training tasks look like, if not like the others."""
    stored: bool = False
    """Leave images as they are kept, uint8 0 .. 255, where nothing changes them."""

    @property
    def shape(self) -> TaskShape:
        """Classification of images or of their features."""
        spec = self.spec
        return TaskShape(
            "classification",
            self.index.shape,
            spec.n_way,
            n_shot=spec.n_shot,
            n_query=spec.n_query,
            base_classes=base_count(self.index, rotations=spec.rotations),
        )

    @property
    def domains(self) -> tuple[str, ...]:
        """Names of the image sets."""
        return self.index.domains

    @property
    def class_names(self) -> dict[str, list[str]]:
        """Names of the classes of each split."""
        names = self.index.class_names
        return {split: [names[c] for c in self.index.classes(split=split)] for split in SPLITS}

    @property
    def fingerprint(self) -> str:
        """Digest of images, classes and splits."""
        return self.index.fingerprint()

    @property
    def visited(self) -> ClassVisits:
        """How images of classes that come back are drawn."""
        return ClassVisits(self.index, self.spec, self.stored)

    def sample(
        self, split: str, *, seed: int, start: int, count: int, n_query: int | None = None
    ) -> Episode:
        """Draw tasks; turned classes, changed images and base classes are for training only."""
        train = split == "train"
        spec = self.training or self.spec if train else self.spec
        turned = self.spec.rotations and train
        spec = replace(spec, rotations=turned, n_query=n_query or spec.n_query)
        ids = sample_ids(self.index, spec, seed=seed, split=split, start=start, count=count)
        episode = gather(self.index, ids, stored=self._stays(train=train))
        if not train:
            # No such task may know its classes: a learner that read them would know the answers.
            return episode
        numbers = range(start, start + count)
        support = self._changed(episode.support, (seed, "augment", "support"), numbers)
        query = self._changed(episode.query, (seed, "augment", "query"), numbers)
        return replace(episode, support=support, query=query, base=base_classes(self.index, ids))

    def batches(self, *, seed: int, start: int, count: int, size: int) -> Batch:
        """Draw batches of training images, labelled by base class."""
        drawn = sample_batches(
            self.index,
            seed=seed,
            start=start,
            count=count,
            size=size,
            rotations=self.spec.rotations,
            stored=self._stays(train=True),
        )
        numbers = range(start, start + count)
        return self._changed(drawn, (seed, "augment", "batch"), numbers)

    def _stays(self, *, train: bool) -> bool:
        """Return whether images stay as they are kept; those to be augmented are scaled first."""
        return self.stored and not (train and self.augment != PLAIN)

    def _changed(self, batch: Batch, path: tuple[int, str, str], numbers: range) -> Batch:
        """Augment the images of tasks or batches with these numbers, each by a generator of its own."""
        if self.augment == PLAIN:
            return batch
        each = (
            augmented(x, self.augment, generator=generator_for(*path, number))
            for x, number in zip(batch.x, numbers, strict=True)
        )
        return Batch(torch.stack(list(each)), batch.y)


@final
@dataclass(frozen=True)
class RegressionTasks:
    """Tasks from families of functions."""

    spec: RegressionSpec

    @property
    def shape(self) -> TaskShape:
        """Regression of one number."""
        spec = self.spec
        return TaskShape(
            "regression", (spec.input_dim,), 1, n_shot=spec.n_shot, n_query=spec.n_query
        )

    @property
    def domains(self) -> tuple[str, ...]:
        """Names of the families."""
        return self.spec.families

    @property
    def fingerprint(self) -> str:
        """The families are formulas: their description is their digest."""
        return repr(self.spec)

    @property
    def visited(self) -> FunctionVisits:
        """How points of a function that comes back are drawn."""
        return FunctionVisits(self.spec)

    def sample(
        self, split: str, *, seed: int, start: int, count: int, n_query: int | None = None
    ) -> Episode:
        """Draw tasks."""
        spec = replace(self.spec, n_query=n_query or self.spec.n_query)
        return sample_regression(spec, seed, split=split, start=start, count=count)


def open_source(
    config: DataConfig,
    *,
    needed: Sequence[str] = SPLITS,
    strict: bool = False,
    network: FeatureNetwork | None = None,
    progress: Progress | None = None,
) -> TaskSource:
    """Open what ``config.source`` names and check that the tasks fit.

    Args:
        config: Which tasks.
        needed: Splits that tasks will be drawn from; training needs all three.
        strict: Refuse a set with images that cannot be read, instead of leaving them out.
        network: A frozen network: tasks are then made of its features, computed once and kept in
            `cache_folder`.
        progress: Called with (images done, images in all) while features are computed.

    Raises:
        DataError: A set cannot be used, a class is too small, or an image is in two splits; names it.
    """
    source = _open(config, needed, strict, network, progress)
    return StreamTasks(source, config.stream) if config.stream.pool else source


def sent_to(source: TaskSource, device: torch.device) -> TaskSource:
    """Return the same tasks as they travel to a device: images in uint8, a quarter of the bytes.

    `torchemo.training.device.to_device` scales them there. On the CPU nothing travels.
    """
    if device.type == "cpu":
        return source
    if isinstance(source, StreamTasks) and isinstance(source.source, PictureTasks):
        return replace(source, source=replace(source.source, stored=True))
    return replace(source, stored=True) if isinstance(source, PictureTasks) else source


def open_stream(config: DataConfig, *, needed: Sequence[str] = SPLITS) -> StreamTasks:
    """Open tasks that come back; `open_source` for ``config.stream`` with a pool."""
    return StreamTasks(_open(config, needed), config.stream)


def _open(
    config: DataConfig,
    needed: Sequence[str],
    strict: bool = False,
    network: FeatureNetwork | None = None,
    progress: Progress | None = None,
) -> PictureTasks | RegressionTasks:
    if any(name.startswith(REGRESSION) for name in config.source):
        return _regression(config)
    spec = EpisodeSpec(config.n_way, config.n_shot, config.n_query, config.rotations)
    bad: list[BadPicture] = []
    on_bad = None if strict else bad.append
    index = (
        _pictures(config, on_bad)
        if network is None
        else _features(config, network, on_bad, progress)
    )
    dropped = 0
    if not embedded(config.source) and (config.version > 1 or config.drop_duplicates):
        index, dropped = refuse_leaks(index, drop=config.drop_duplicates)
    training = _training(config, spec)
    tasks = PictureTasks(index, spec, tuple(bad), dropped, config.augment, training)
    _check_changes(config, tasks)
    for split in needed:
        own = training if training is not None and split == "train" else spec
        check_fits(tasks.index, own, split=split)
    return tasks


def _training(config: DataConfig, spec: EpisodeSpec) -> EpisodeSpec | None:
    """Return what training tasks look like; None if like the others."""
    if config.train_way is None and config.train_shot is None:
        return None
    way, shot = config.train_way or spec.n_way, config.train_shot or spec.n_shot
    return replace(spec, n_way=way, n_shot=shot)


def _check_changes(config: DataConfig, tasks: PictureTasks) -> None:
    """Refuse options of training images and tasks where nothing would follow them."""
    if config.augment != PLAIN and tasks.index.holds_features:
        raise ConfigError(
            "data.augment changes images, and these are features of a pretrained network.",
            hint="Leave data.augment at its defaults.",
        )
    own = config.augment != PLAIN or tasks.training is not None
    if own and config.stream.pool:
        raise ConfigError(
            "tasks that come back have the images and sizes of data.stream alone.",
            hint="Leave data.augment, data.train_way and data.train_shot at their defaults.",
        )


def embedded(source: Sequence[str]) -> bool:
    """Return whether tasks come with the package: none of its images lies on disk."""
    return all(name == PROCEDURAL or name.startswith(REGRESSION) for name in source)


def _regression(config: DataConfig) -> RegressionTasks:
    group = config.source[0].removeprefix(REGRESSION)
    if len(config.source) > 1 or group not in FAMILIES:
        raise ConfigError(
            f"data.source: unknown regression tasks {list(config.source)}.",
            hint=f"One of: {', '.join(REGRESSION + name for name in FAMILIES)}.",
        )
    n_shot = config.n_shot if config.n_shot > 1 else 10
    return RegressionTasks(RegressionSpec(cast(Group, group), n_shot, config.n_query))


def _pictures(config: DataConfig, on_bad: OnBad) -> ClassIndex:
    if config.source == (PROCEDURAL,):
        return procedural(
            image_size=config.image_size, classes_per_family=config.classes_per_family
        )
    if PROCEDURAL in config.source:
        raise ConfigError("data.source: 'procedural' does not go together with image sets.")
    sets = [
        load(
            path,
            image_size=config.image_size,
            channels=config.channels,
            splits=splits,
            by_set=config.version < 2,
            on_bad=on_bad,
        )
        for path, splits in _with_splits(config)
    ]
    return sets[0] if len(sets) == 1 else merge(sets)


def _features(
    config: DataConfig, network: FeatureNetwork, on_bad: OnBad, progress: Progress | None
) -> ClassIndex:
    """Open sets of features, and compute those of image sets."""
    if config.source == (PROCEDURAL,):
        images = procedural(
            image_size=config.image_size, classes_per_family=config.classes_per_family
        )
        listing = listing_of(images, name=PROCEDURAL)
        return cached_features(listing, network, cache_folder(), progress=progress)
    sets = []
    for path, splits in _with_splits(config):
        made = made_by(path) if is_packed(Path(path)) else None
        if made is None:
            listing = find(path, splits=splits, by_set=config.version < 2)
            cached = cached_features(
                listing, network, cache_folder(), on_bad=on_bad, progress=progress
            )
            sets.append(cached)
            continue
        _check_maker(path, made, network.described())
        sets.append(load(path, splits=splits))
    return sets[0] if len(sets) == 1 else merge(sets)


def _with_splits(config: DataConfig) -> Iterable[tuple[str, SplitFile | Proportions | None]]:
    file = None if config.splits is None else Path(config.splits)
    splits = splits_for(config.source, file=file, scheme=config.scheme)
    return zip(config.source, splits, strict=True)


def _check_maker(path: str, made: Mapping[str, object], wanted: Mapping[str, object]) -> None:
    """Refuse features of another network than the one that later images will go through."""
    for what, words in (("name", "network"), ("size", "image size"), ("digest", "weights")):
        if made.get(what) != wanted[what]:
            raise DataError(
                f"{path}: its features were made with the {words} {made.get(what)!r}, the run's network"
                f" has {wanted[what]!r}.",
                hint="Set model.name and model.size (--model, --size) as they were when it was packed,"
                " or give the images themselves.",
            )
