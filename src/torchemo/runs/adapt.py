"""A trained run on pictures of the user's own: adapt to a support folder, answer a folder of queries."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from torchemo.core.errors import ConfigError, DataError
from torchemo.core.rng import generator_for
from torchemo.core.types import Batch, Episode
from torchemo.data.episodes import to_unit
from torchemo.data.formats.folder import list_folder, picture_file
from torchemo.data.formats.images import PictureForm, decode
from torchemo.data.listing import ListedClass, Picture, arrange
from torchemo.learners import Learner, ProtoMAML
from torchemo.runs.load import Trained
from torchemo.runs.score import method_name
from torchemo.training.step import look_up, predict

QUERIES_AT_ONCE = 200
"""Queries of one call; more are spread over several calls, like cards dealt to players.

Reading: a network that normalises queries together (``model.bn = transductive``) sees all of them at once,
or hands that are each as mixed as the whole folder.
"""


class Prediction(NamedTuple):
    """What one query picture is taken for.

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
        inner_steps: Gradient steps on the support pictures.
        classes: Class names in label order.
        shots: Support pictures of each class.
        predictions: One for each query picture.
        recalled: What was recalled for this task, nearest first.
        familiar: Whether the memory takes the task for one like those of training; if not, nothing of it is
            used. None where it does not judge, or where there is none.
        trusted: Whether what it recalls helped on validation tasks; if not, nothing of it is used. None as
            above.
    """

    method: str
    step: int
    inner_steps: int
    classes: tuple[str, ...]
    shots: tuple[int, ...]
    predictions: tuple[Prediction, ...]
    recalled: tuple[RecalledSlot, ...]
    familiar: bool | None
    trusted: bool | None = None

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
    """Adapt to the pictures in ``support/<class>/`` and answer those in ``query``.

    Labels follow the sorted class names; classes may have different numbers of pictures. The memory is
    read and not changed.

    Args:
        trained: The run.
        support: Folder of class folders.
        query: Folder of pictures, or one picture.
        steps: Inner steps; those of training by default.
        invert: Swap dark and light in all pictures.

    Raises:
        ConfigError: The run was trained for another number of classes, or not on pictures.
        DataError: A picture cannot be read, or a folder does not hold what it should.
    """
    if trained.trainer.emo is not None:
        trained.trainer.emo.eval()
    form, classes, queries = (
        _form(trained, invert=invert),
        support_classes(support),
        query_pictures(query),
    )
    names = tuple(c.name for c in classes)
    learner = _learner(trained, len(names))
    shown = _support([c.pictures for c in classes], form)
    outputs = _answer(trained, learner, shown, _pixels(list(queries.values()), form), steps=steps)
    recalled, familiar, trusted = _recalled(trained, shown)
    return Answers(
        method=method_name(trained.trainer),
        step=trained.trainer.iteration,
        inner_steps=learner.loop.steps if steps is None else steps,
        classes=names,
        shots=tuple(len(c.pictures) for c in classes),
        predictions=tuple(_prediction(*one, names) for one in zip(queries, outputs, strict=True)),
        recalled=recalled,
        familiar=familiar,
        trusted=trusted,
    )


def query_pictures(query: Path) -> dict[str, Picture]:
    """List the query pictures of a folder by name."""
    if query.is_file():
        return {query.name: picture_file(query)}
    pictures, _ = _listed(query)
    found = {"/".join((*folders, Path(p.name).name)): p for folders, p in pictures}
    if not found:
        raise DataError(f"{query}: there are no pictures in it.")
    return found


def support_classes(support: Path) -> tuple[ListedClass, ...]:
    """List the classes of a support folder, in label order."""
    pictures, empty = _listed(support)
    classes = arrange(pictures, empty=empty, domain="support", where=str(support))
    bare = [c.name for c in classes if not c.pictures]
    if bare:
        raise DataError(f"{support}: class {bare[0]!r} has no pictures.")
    return classes


def _listed(
    folder: Path,
) -> tuple[list[tuple[tuple[str, ...], Picture]], list[tuple[str, ...]]]:
    if not folder.is_dir():
        raise DataError(f"{folder}: there is no such folder.")
    return list_folder(folder)


def _form(trained: Trained, *, invert: bool) -> PictureForm:
    if len(trained.shape.x) != 3:
        raise ConfigError("this run was trained on numbers, not on pictures.")
    channels, height, width = trained.shape.x
    return PictureForm(height, width, channels, invert=invert)


def _learner(trained: Trained, n_way: int) -> Learner:
    """Return the learner for this number of classes; only Proto-MAML's head is made per task."""
    learner, known = trained.trainer.learner, trained.shape.n_out
    if n_way == known:
        return learner
    if not isinstance(learner, ProtoMAML):
        raise ConfigError(
            f"the support folder has {n_way} classes, the run was trained for {known}.",
            hint=f"Give {known} classes, or train with --preset proto-maml, which takes any number.",
        )
    _check_memory_fits(trained, n_way)
    model: Any = learner.loop.model
    loop = replace(learner.loop, model=replace(model, n_way=n_way))
    return replace(learner, loop=loop, n_way=n_way)


def _check_memory_fits(trained: Trained, n_way: int) -> None:
    emo, config = trained.trainer.emo, trained.config.emo
    if emo is None:
        return
    bound = config.key.use_labels or config.value.head_align == "hungarian"
    if bound or any(name in emo.memory.values for name in emo.head):
        raise ConfigError(
            f"the support folder has {n_way} classes, the run's memory holds heads of"
            f" {trained.shape.n_out}.",
            hint="Give as many classes, or train with emo.value.head_align=drop.",
        )


def _support(classes: Sequence[Sequence[Picture]], form: PictureForm) -> Batch:
    x = _pixels([picture for pictures in classes for picture in pictures], form)
    y = torch.arange(len(classes)).repeat_interleave(torch.tensor([len(c) for c in classes]))
    # Learners that take examples in turn expect them in random order.
    order = torch.randperm(len(y), generator=generator_for(0, "support-order"))
    return Batch(x[order][None], y[order][None])


def _pixels(pictures: Sequence[Picture], form: PictureForm) -> Float[Tensor, "n c h w"]:
    return to_unit(np.stack([decode(p.read(), form, name=p.name) for p in pictures]))


def _answer(
    trained: Trained, learner: Learner, support: Batch, x: Tensor, *, steps: int | None
) -> Float[Tensor, "n way"]:
    trainer = trained.trainer
    hands = math.ceil(len(x) / QUERIES_AT_ONCE)
    answers: list[Tensor] = [x.new_zeros(0)] * len(x)
    for hand in range(hands):
        part = x[hand::hands]
        unknown = torch.zeros(1, len(part), dtype=torch.int64)
        episode = Episode(support, Batch(part[None], unknown))
        (out,) = predict(
            learner, trainer.params, episode, emo=trainer.emo, steps=steps, every_step=False
        )
        answers[hand::hands] = list(out[0].softmax(1))
    return torch.stack(answers)


def _recalled(
    trained: Trained, support: Batch
) -> tuple[tuple[RecalledSlot, ...], bool | None, bool | None]:
    """Return what was recalled, and whether the memory finds the task familiar and trusts its slots."""
    emo, trainer = trained.trainer.emo, trained.trainer
    if emo is None:
        return (), None, None
    recall = look_up(trainer.learner, trainer.params, Episode(support, support), emo=emo)
    active = bool(recall.active[0])
    familiar = None if emo.familiarity is None else bool(emo.familiarity(recall.keys)[0])
    trusted = None if emo.trust is None or familiar is False else active
    if not active:
        return (), familiar, trusted
    known = (recall.notes or {}).get("domain")
    slots = tuple(
        RecalledSlot(
            slot=int(slot),
            distance=float(recall.distances[0, j]),
            weight=float(recall.weights[0, j]),
            age=int(emo.memory.ages[slot]),
            domain=None if known is None else _name(trained.domains, int(known[0, j])),
        )
        for j, slot in enumerate(recall.slots[0])
    )
    return slots, familiar, trusted


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
