"""Where tasks come from: embedded images, embedded regression, or image sets on disk."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, cast, final, runtime_checkable

from torchemo.config.run import DataConfig
from torchemo.core.errors import ConfigError, DataError
from torchemo.core.types import Episode, TaskShape
from torchemo.data.episodes import EpisodeSpec, check_fits, sample_episodes
from torchemo.data.features import FeatureNetwork, cache_folder, cached_features
from torchemo.data.index import SPLITS, ClassIndex, merge
from torchemo.data.listing import Progress, listing_of
from torchemo.data.load import find, load, splits_for
from torchemo.data.packed import is_packed, made_by
from torchemo.data.splits import SplitFile
from torchemo.data.streams import ClassVisits, FunctionVisits, StreamTasks
from torchemo.data.synthetic.pictures import procedural
from torchemo.data.synthetic.regression import FAMILIES, Group, RegressionSpec, sample_regression

PROCEDURAL = "procedural"
REGRESSION = "regression:"


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


@final
@dataclass(frozen=True)
class PictureTasks:
    """N-way K-shot tasks from classes of images."""

    index: ClassIndex
    spec: EpisodeSpec

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
        )

    @property
    def domains(self) -> tuple[str, ...]:
        """Names of the image sets."""
        return self.index.domains

    @property
    def fingerprint(self) -> str:
        """Digest of images, classes and splits."""
        return self.index.fingerprint()

    @property
    def visited(self) -> ClassVisits:
        """How images of classes that come back are drawn."""
        return ClassVisits(self.index, self.spec)

    def sample(
        self, split: str, *, seed: int, start: int, count: int, n_query: int | None = None
    ) -> Episode:
        """Draw tasks; turned classes are for training only."""
        turned = self.spec.rotations and split == "train"
        spec = replace(self.spec, rotations=turned, n_query=n_query or self.spec.n_query)
        return sample_episodes(self.index, spec, seed=seed, split=split, start=start, count=count)


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
    network: FeatureNetwork | None = None,
    progress: Progress | None = None,
) -> TaskSource:
    """Open what ``config.source`` names and check that the tasks fit.

    Args:
        config: Which tasks.
        needed: Splits that tasks will be drawn from; training needs all three.
        network: A frozen network: tasks are then made of its features, computed once and kept in
            `cache_folder`.
        progress: Called with (images done, images in all) while features are computed.
    """
    source = _open(config, needed, network, progress)
    return StreamTasks(source, config.stream) if config.stream.pool else source


def open_stream(config: DataConfig, *, needed: Sequence[str] = SPLITS) -> StreamTasks:
    """Open tasks that come back; `open_source` for ``config.stream`` with a pool."""
    return StreamTasks(_open(config, needed), config.stream)


def _open(
    config: DataConfig,
    needed: Sequence[str],
    network: FeatureNetwork | None = None,
    progress: Progress | None = None,
) -> PictureTasks | RegressionTasks:
    if any(name.startswith(REGRESSION) for name in config.source):
        return _regression(config)
    spec = EpisodeSpec(config.n_way, config.n_shot, config.n_query, config.rotations)
    found = _pictures(config) if network is None else _features(config, network, progress)
    tasks = PictureTasks(found, spec)
    for split in needed:
        check_fits(tasks.index, spec, split=split)
    return tasks


def _regression(config: DataConfig) -> RegressionTasks:
    group = config.source[0].removeprefix(REGRESSION)
    if len(config.source) > 1 or group not in FAMILIES:
        raise ConfigError(
            f"data.source: unknown regression tasks {list(config.source)}.",
            hint=f"One of: {', '.join(REGRESSION + name for name in FAMILIES)}.",
        )
    n_shot = config.n_shot if config.n_shot > 1 else 10
    return RegressionTasks(RegressionSpec(cast(Group, group), n_shot, config.n_query))


def _pictures(config: DataConfig) -> ClassIndex:
    if config.source == (PROCEDURAL,):
        return procedural(
            image_size=config.image_size, classes_per_family=config.classes_per_family
        )
    if PROCEDURAL in config.source:
        raise ConfigError("data.source: 'procedural' does not go together with image sets.")
    sets = [
        load(path, image_size=config.image_size, channels=config.channels, splits=splits)
        for path, splits in _with_splits(config)
    ]
    return sets[0] if len(sets) == 1 else merge(sets)


def _features(config: DataConfig, network: FeatureNetwork, progress: Progress | None) -> ClassIndex:
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
            listing = find(path, splits=splits)
            sets.append(cached_features(listing, network, cache_folder(), progress=progress))
            continue
        _check_maker(path, made, network.described())
        sets.append(load(path, splits=splits))
    return sets[0] if len(sets) == 1 else merge(sets)


def _with_splits(config: DataConfig) -> Iterable[tuple[str, SplitFile | None]]:
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
