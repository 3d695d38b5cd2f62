"""A trained run on images of your own: adapt to a support folder, answer a folder of queries."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from torchemo.core.errors import ConfigError, DataError
from torchemo.core.rng import generator_for
from torchemo.core.types import Batch, Episode, Recall
from torchemo.data.episodes import to_unit
from torchemo.data.formats.folder import list_folder, picture_file
from torchemo.data.formats.images import PictureForm, decode
from torchemo.data.listing import ListedClass, Picture, arrange
from torchemo.learners.learner import AnyWay, Learner, steps_of
from torchemo.runs.load import Trained
from torchemo.training.predict import predict

QUERIES_AT_ONCE = 200
"""Queries of one call; more are spread over several calls, like cards dealt to players.

A network that normalises queries together (``model.bn = transductive``) sees all of them at once,
or hands that are each as mixed as the whole folder.
"""


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
            "classes": dict(zip(self.classes, self.shots, strict=True)),
            "predictions": [
                {
                    **p._asdict(),
                    "probabilities": dict(zip(self.classes, p.probabilities, strict=True)),
                }
                for p in self.predictions
            ],
            "recalled": [slot._asdict() for slot in self.recalled],
        }


def answer_folder(
    trained: Trained,
    support: Path,
    *,
    query: Path,
    steps: int | None = None,
    invert: bool = False,
) -> Answers:
    """Adapt to the images in ``support/<class>/`` and answer those in ``query``.

    Labels follow the sorted class names; classes may have different numbers of images. The memory is
    read and not changed.
    """
    form, classes = _form(trained, invert=invert), support_classes(support)
    queries, names = query_pictures(query), tuple(c.name for c in classes)
    learner = learner_for(trained, len(names))
    task = _support(trained, [c.pictures for c in classes], form)
    pixels = _pixels(trained, list(queries.values()), form)
    outputs, recall = _answer(trained, learner, task, pixels, steps=steps)
    return Answers(
        trained.system.title,
        trained.system.iteration,
        steps_of(learner) if steps is None else steps,
        names,
        tuple(len(c.pictures) for c in classes),
        tuple(_prediction(*one, names) for one in zip(queries, outputs, strict=True)),
        *recalled(trained, recall),
    )


def query_pictures(query: Path) -> dict[str, Picture]:
    """List the query images of a folder by name."""
    if query.is_file():
        return {query.name: picture_file(query)}
    pictures, _ = _listed(query)
    found = {"/".join((*folders, Path(p.name).name)): p for folders, p in pictures}
    if not found:
        raise DataError(f"{query}: there are no images in it.")
    return found


def support_classes(support: Path) -> tuple[ListedClass, ...]:
    """List the classes of a support folder, in label order."""
    pictures, empty = _listed(support)
    classes = arrange(pictures, empty=empty, domain="support", where=str(support))
    bare = [c.name for c in classes if not c.pictures]
    if bare:
        raise DataError(f"{support}: class {bare[0]!r} has no images.")
    return classes


def _listed(
    folder: Path,
) -> tuple[list[tuple[tuple[str, ...], Picture]], list[tuple[str, ...]]]:
    if not folder.is_dir():
        raise DataError(f"{folder}: there is no such folder.")
    return list_folder(folder)


def _form(trained: Trained, *, invert: bool) -> PictureForm:
    if trained.network is not None:
        return PictureForm(trained.network.size, trained.network.size, 3, invert=invert)
    if len(trained.shape.x) != 3:
        raise ConfigError("this run was trained on numbers, not on images.")
    channels, height, width = trained.shape.x
    return PictureForm(height, width, channels, invert=invert)


def learner_for(trained: Trained, n_way: int) -> Learner:
    """Return the learner for this number of classes."""
    learner, known = trained.system.learner, trained.shape.n_out
    if n_way == known:
        return learner
    if not isinstance(learner, AnyWay):
        raise ConfigError(
            f"the support folder has {n_way} classes, the run was trained for {known}.",
            hint=f"Give {known} classes, or train with --preset proto-maml, which takes any number.",
        )
    _check_memory_fits(trained, n_way)
    return learner.for_classes(n_way)


def _check_memory_fits(trained: Trained, n_way: int) -> None:
    memory = trained.system.memory
    if memory is None:
        return
    labelled = getattr(memory.encoder, "labels", None) is not None
    heads = any(name in memory.store.values for name in memory.head)
    if labelled or memory.keeps_prototypes or heads:
        raise ConfigError(
            f"the support folder has {n_way} classes, the run's memory holds heads of"
            f" {trained.shape.n_out}.",
            hint="Give as many classes, or train with memory.head_align=drop.",
        )


def _support(trained: Trained, classes: Sequence[Sequence[Picture]], form: PictureForm) -> Batch:
    x = _pixels(trained, [picture for pictures in classes for picture in pictures], form)
    y = torch.arange(len(classes)).repeat_interleave(torch.tensor([len(c) for c in classes]))
    # Learners that take examples in turn expect them in random order.
    order = torch.randperm(len(y), generator=generator_for(0, "support-order"))
    return Batch(x[order][None], y[order][None])


def _pixels(
    trained: Trained, pictures: Sequence[Picture], form: PictureForm
) -> Float[Tensor, "n ..."]:
    """Return what the learner sees: images, or their features where a pretrained network comes first."""
    images = [decode(p.read(), form, name=p.name) for p in pictures]
    if trained.network is None:
        return to_unit(np.stack(images))
    return torch.from_numpy(trained.network(np.stack(images)))


def _answer(
    trained: Trained, learner: Learner, support: Batch, x: Tensor, *, steps: int | None
) -> tuple[Float[Tensor, "n way"], Recall | None]:
    """Return the probabilities of all classes for each query, and what was recalled for the task."""
    system = trained.system
    if system.memory is not None:
        system.memory.eval()
    hands = math.ceil(len(x) / QUERIES_AT_ONCE)
    answers: list[Tensor] = [x.new_zeros(0)] * len(x)
    recall = None
    for hand in range(hands):
        part = x[hand::hands]
        unknown = torch.zeros(1, len(part), dtype=torch.int64)
        episode = Episode(support, Batch(part[None], unknown))
        (out,), recall = predict(
            learner, system.params, episode, memory=system.memory, steps=steps, every_step=False
        )
        answers[hand::hands] = list(out[0].softmax(1))
    return torch.stack(answers), recall


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
            domain=None if known is None else _name(trained.domains, int(known[0, j])),
        )
        for j, slot in enumerate(recall.slots[0])
    )
    return slots, familiar, helpful


def _name(domains: Sequence[str], number: int) -> str | None:
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
