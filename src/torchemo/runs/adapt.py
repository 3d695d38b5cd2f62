"""A trained run on images of your own: adapt to a support folder, answer a folder of queries."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, final

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from torchemo.core.errors import ConfigError, DataError
from torchemo.core.rng import generator_for
from torchemo.core.types import Batch, Recall, Statistics
from torchemo.data.episodes import to_unit
from torchemo.data.formats.archive import is_zip, list_part
from torchemo.data.formats.folder import list_folder, picture_file
from torchemo.data.formats.images import PictureForm
from torchemo.data.listing import BadPicture, ListedClass, Picture, arrange, decode_some
from torchemo.learners.learner import steps_of
from torchemo.runs.load import Trained
from torchemo.runs.visits.seen import Seen
from torchemo.training.classes import for_classes, for_shots
from torchemo.training.predict import Classifier, classifier
from torchemo.training.system import System

QUERIES_AT_ONCE = 200
"""Queries of one call of the network: bounds the memory, and changes no answer."""


class Prediction(NamedTuple):
    """What one query image is taken for.

    Attributes:
        file: Its name within the folder of queries.
        predicted: The most probable class.
        probability: Its probability.
        runner_up: The second most probable class; None if there is one class only.
        runner_up_probability: Its probability.
        probabilities: Of all classes, in the order of `Answers.classes`.
    """

    file: str
    predicted: str
    probability: float
    runner_up: str | None
    runner_up_probability: float | None
    probabilities: tuple[float, ...]


class RecalledSlot(NamedTuple):
    """A remembered task that had a say.

    Attributes:
        slot: Its number.
        distance: Distance of its key from that of the task at hand.
        weight: Its recall weight.
        age: Batches of meta-training since it was written.
        domain: Where it came from, if that is remembered.
    """

    slot: int
    distance: float
    weight: float
    age: int
    domain: str | None


@final
@dataclass(frozen=True)
class Answers:
    """A folder of queries, answered.

    Attributes:
        method: The learner and how it remembers.
        step: Outer steps of meta-training behind it.
        inner_steps: Gradient steps on the support images.
        classes: Class names in label order.
        shots: Support images of each class.
        predictions: One for each query image.
        recalled: What was recalled for this task, nearest first.
        familiar: Whether the task is like those of training; if not, it skips recall. None if the memory
            does not ask, or if there is none.
        helpful: Whether the slots it recalls passed validation; if not, it skips recall. None as above.
        seen: What a store of past visits said of the classes; None if none was asked.
        without: The predictions without the past visits; None if none was asked.
        remembers: Whether the run has a memory.
        left_out: Images of both folders that could not be read, and why.
    """

    method: str
    step: int
    inner_steps: int
    classes: tuple[str, ...]
    shots: tuple[int, ...]
    predictions: tuple[Prediction, ...]
    recalled: tuple[RecalledSlot, ...]
    familiar: bool | None
    helpful: bool | None = None
    seen: Seen | None = None
    without: tuple[Prediction, ...] | None = None
    remembers: bool = False
    left_out: tuple[BadPicture, ...] = ()
    statistics: ClassVar[Statistics] = "inductive"
    """Every query was answered by itself."""

    def __repr__(self) -> str:
        names = ", ".join(self.classes)
        return f"Answers({self.method}: {len(self.predictions)} images among {names})"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{escape(p.file)}</td><td>{escape(p.predicted)}</td><td>{p.probability:.3f}</td></tr>"
            for p in self.predictions
        )
        head = "<tr><th>file</th><th>predicted</th><th>probability</th></tr>"
        return f"<table>{head}{rows}</table>"

    def to_dict(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        return {
            **vars(self),
            "statistics": self.statistics,
            "classes": dict(zip(self.classes, self.shots, strict=True)),
            "predictions": self._plain(self.predictions),
            "recalled": [slot._asdict() for slot in self.recalled],
            "left_out": [bad._asdict() for bad in self.left_out],
            "seen": None if self.seen is None else self.seen.to_dict(),
            "without": None if self.without is None else self._plain(self.without),
        }

    def _plain(self, predictions: Sequence[Prediction]) -> list[dict[str, Any]]:
        return [
            {**p._asdict(), "probabilities": dict(zip(self.classes, p.probabilities, strict=True))}
            for p in predictions
        ]


@final
@dataclass(frozen=True)
class Adapted:
    """A run fitted to a support set, once; it answers queries as they come, each by itself.

    Attributes:
        trained: The run.
        classifier: What was fitted to the support set.
        form: Size and channels of the images that it takes.
        inner_steps: Gradient steps on the support images.
        classes: Class names in label order.
        shots: Support images of each class.
        seen: What a store of past visits said of the classes; None if none was asked.
        without: The same without the past visits; None if none was asked.
        left_out: Support images that could not be read, and why.
    """

    trained: Trained
    classifier: Classifier
    form: PictureForm
    inner_steps: int
    classes: tuple[str, ...]
    shots: tuple[int, ...]
    seen: Seen | None = None
    without: "Adapted | None" = None
    left_out: tuple[BadPicture, ...] = ()

    def predict(self, query: str | Path, *, strict: bool = False) -> Answers:
        """Answer the images of a folder, or one image; those that cannot be read are left out and named.

        Raises:
            DataError: No image can be read, or with ``strict`` one of them cannot.
        """
        return self.answer(query_pictures(Path(query)), strict=strict)

    def answer(self, queries: Mapping[str, Picture], *, strict: bool = False) -> Answers:
        """Answer images by name."""
        named = [picture._replace(name=name) for name, picture in queries.items()]
        readable, x, bad = _decoded(self.trained, named, self.form, strict=strict)
        return Answers(
            self.trained.system.title,
            self.trained.system.iteration,
            self.inner_steps,
            self.classes,
            self.shots,
            self._predictions(readable, x),
            *recalled(self.trained, self.classifier.recall),
            seen=self.seen,
            without=None if self.without is None else self.without._predictions(readable, x),
            remembers=self.trained.system.memory is not None,
            left_out=(*self.left_out, *bad),
        )

    def _predictions(self, names: Iterable[str], x: Tensor) -> tuple[Prediction, ...]:
        rows = self.probabilities(x)
        return tuple(_prediction(*one, self.classes) for one in zip(names, rows, strict=True))

    def probabilities(self, x: Float[Tensor, "n ..."]) -> Float[Tensor, "n way"]:
        """Return the probabilities of all classes for what the learner sees of images."""
        return torch.cat(
            [self.classifier(part).softmax(1) for part in torch.split(x, QUERIES_AT_ONCE)]
        )

    def __repr__(self) -> str:
        return f"Adapted({self.trained.system.title}, classes {', '.join(self.classes)})"


def adapt(
    trained: Trained,
    support: Path,
    *,
    steps: int | None = None,
    invert: bool = False,
    strict: bool = False,
) -> Adapted:
    """Fit a run to the images in ``support/<class>/``; the memory is read and not changed.

    Labels follow the sorted class names; classes may have different numbers of images.

    Args:
        trained: The run.
        support: Folder of class folders.
        steps: Inner steps; those of training by default.
        invert: Swap dark and light in all images.
        strict: Refuse images that cannot be read, instead of leaving them out.

    Raises:
        ConfigError: The run cannot take so many classes, or it was not trained on images.
        DataError: No image of a class can be read, or the folder does not hold what it should.
    """
    classes = support_classes(support)
    return adapt_to(trained, classes, steps=steps, invert=invert, strict=strict)


def adapt_to(
    trained: Trained,
    classes: Sequence[ListedClass],
    *,
    steps: int | None = None,
    invert: bool = False,
    strict: bool = False,
) -> Adapted:
    """Fit a run to classes of images; see `adapt`."""
    form = form_of(trained, invert=invert)
    images, bad = decoded_classes(trained, classes, form, strict=strict)
    return replace(fit(trained, images, form, steps=steps), left_out=bad)


def decoded_classes(
    trained: Trained, classes: Sequence[ListedClass], form: PictureForm, *, strict: bool = False
) -> tuple[dict[str, Float[Tensor, "n ..."]], tuple[BadPicture, ...]]:
    """Return what the learner sees of the images of each class, and the images that cannot be read."""
    found = {c.name: _decoded(trained, c.pictures, form, strict=strict) for c in classes}
    bad = tuple(one for _, _, left_out in found.values() for one in left_out)
    return {name: x for name, (_, x, _) in found.items()}, bad


def fit(
    trained: Trained,
    classes: Mapping[str, Float[Tensor, "n ..."]],
    form: PictureForm,
    *,
    steps: int | None = None,
    memory: bool = True,
) -> Adapted:
    """Fit a run to what its learner sees of the images of each class, with its memory or without."""
    system, shots = system_for(trained, len(classes)), tuple(len(x) for x in classes.values())
    learner, used = for_shots(system.learner, shots), system.memory if memory else None
    if used is not None:
        used.eval()
    support = support_batch(classes)
    return Adapted(
        trained,
        classifier(learner, system.params, support, memory=used, steps=steps),
        form,
        steps_of(learner) if steps is None else steps,
        tuple(classes),
        shots,
    )


def query_pictures(query: Path) -> dict[str, Picture]:
    """List the query images of a folder or zip by name."""
    if query.is_file() and not is_zip(query):
        return {query.name: picture_file(query)}
    pictures, _ = _listed(query, "query")
    found = {"/".join((*folders, Path(p.name).name)): p for folders, p in pictures}
    if not found:
        raise DataError(f"{query}: there are no images in it.")
    return found


def support_classes(support: Path) -> tuple[ListedClass, ...]:
    """List the classes of a support folder or zip, in label order."""
    pictures, empty = _listed(support, "support")
    classes = arrange(pictures, empty=empty, domain="support", where=str(support))
    bare = [c.name for c in classes if not c.pictures]
    if bare:
        raise DataError(f"{support}: class {bare[0]!r} has no images.")
    return classes


def _listed(
    folder: Path, part: str
) -> tuple[list[tuple[tuple[str, ...], Picture]], list[tuple[str, ...]]]:
    if is_zip(folder):
        return list_part(folder, part), []
    if not folder.is_dir():
        raise DataError(f"{folder}: there is no such folder.")
    return list_folder(folder)


def form_of(trained: Trained, *, invert: bool = False) -> PictureForm:
    """Return size and channels of the images that a run takes."""
    if trained.network is not None:
        return PictureForm(trained.network.size, trained.network.size, 3, invert=invert)
    if len(trained.shape.x) != 3:
        raise ConfigError("this run was trained on numbers, not on images.")
    channels, height, width = trained.shape.x
    return PictureForm(height, width, channels, invert=invert)


def system_for(trained: Trained, n_way: int) -> System:
    """Return learner, parameters and memory for this number of classes."""
    return trained.system if n_way == trained.shape.n_out else for_classes(trained.system, n_way)


def support_batch(classes: Mapping[str, Float[Tensor, "n ..."]]) -> Batch:
    """Return the support set of one task of these classes, whose labels follow their order."""
    x = torch.cat(list(classes.values()))
    y = torch.arange(len(classes)).repeat_interleave(
        torch.tensor([len(c) for c in classes.values()])
    )
    # Learners that take examples in turn expect them in random order.
    order = torch.randperm(len(y), generator=generator_for(0, "support-order"))
    return Batch(x[order][None], y[order][None])


def seen(trained: Trained, images: UInt8[np.ndarray, "n c h w"]) -> Float[Tensor, "n ..."]:
    """Return what the learner sees: images, or their features where a pretrained network comes first."""
    return to_unit(images) if trained.network is None else torch.from_numpy(trained.network(images))


def _decoded(
    trained: Trained, pictures: Sequence[Picture], form: PictureForm, *, strict: bool
) -> tuple[list[str], Float[Tensor, "n ..."], tuple[BadPicture, ...]]:
    """Return names of readable images, what the learner sees of them, and the other images."""
    good, bad = decode_some(pictures, form, strict=strict)
    if not good:
        raise DataError(
            f"{bad[0].name}: {bad[0].reason}",
            hint=None
            if len(bad) == 1
            else f"None of {len(bad)} images can be read, this is the first.",
        )
    return [p.name for p, _ in good], seen(trained, np.stack([x for _, x in good])), bad


def recalled(
    trained: Trained, recall: Recall | None
) -> tuple[tuple[RecalledSlot, ...], bool | None, bool | None]:
    """Return what was recalled, and whether the task is familiar and its slots passed validation."""
    memory = trained.system.memory
    if memory is None or recall is None:
        return (), None, None
    active, rules = bool(recall.active[0]), (memory.skip_unfamiliar, memory.skip_unhelpful)
    familiar = None if rules[0] is None else bool(rules[0].allows(recall)[0])
    helpful = None if rules[1] is None or familiar is False else active
    if not active:
        return (), familiar, helpful
    known = (recall.notes or {}).get("domain")
    slots = tuple(
        RecalledSlot(
            slot=int(slot),
            distance=float(recall.distances[0, j]),
            weight=float(recall.weights[0, j]),
            age=int(memory.store.ages[slot]),
            domain=None if known is None else domain_name(trained.domains, int(known[0, j])),
        )
        for j, slot in enumerate(recall.slots[0])
    )
    return slots, familiar, helpful


def domain_name(domains: Sequence[str], number: int) -> str | None:
    """Return the name of a domain by its number; None if it has none."""
    return domains[number] if 0 <= number < len(domains) else None


def _prediction(file: str, row: Tensor, classes: Sequence[str]) -> Prediction:
    order = row.argsort(descending=True, stable=True).tolist()
    second = order[1] if len(order) > 1 else None
    return Prediction(
        file,
        classes[order[0]],
        float(row[order[0]]),
        None if second is None else classes[second],
        None if second is None else float(row[second]),
        tuple(row.tolist()),
    )
