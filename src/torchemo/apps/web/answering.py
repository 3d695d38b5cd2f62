"""A trained run answers the board of a session: fitted once to its classes, then query by query."""

import secrets
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from torchemo.apps.web.saved import png
from torchemo.apps.web.session import Answered, Job, Session
from torchemo.apps.web.visits import Visits
from torchemo.core.errors import ConfigError, TorchemoError
from torchemo.models.alone import alone
from torchemo.runs.adapt import Adapted, RecalledSlot, fit, form_of, recalled, seen
from torchemo.runs.load import Trained
from torchemo.runs.notes import thumbnails
from torchemo.runs.run import Run

AT_ONCE = 8
"""Queries between two looks at whether to stop."""
SIDES = (("with memory", "without memory"), ("with past visits", "without past visits"))
"""What stands side by side: the run's own memory, or what came back."""
JOINED = ("No past visit helped.", "The gradients of past visits joined every inner step.")
"""What is said where the store alone is asked."""
NEAREST = 3
"""Support images that are named as having decided."""


@final
class Answering:
    """Answers sessions, one at a time.

    Args:
        run: The trained run.
        invert: Swap dark and light in all images.
        visits: The store of past visits; None remembers nothing.
    """

    def __init__(self, run: Run, *, invert: bool = False, visits: Visits | None = None) -> None:
        self.run, self.visits = run, visits
        self.form = form_of(
            run.trained
        )  # saved and shown as they came, inverted for the network alone
        self.invert = invert
        self._thumbnails = thumbnails.load(run.root, step=run.trained.system.iteration)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="answer")

    def start(self, session: Session) -> None:
        """Begin to answer the queries that have no answer yet."""
        with session.lock:
            if session.job is not None and session.job.running:
                return
            answered = session.answered
            waiting = [q for q in session.board.queries if q not in answered.queries]
            if len(session.board.support) < 2:
                raise ConfigError("give images to at least two classes first.")
            session.job = Job(len(waiting))
        self._pool.submit(self._work, session, session.job, answered, waiting)

    def cancel(self, session: Session) -> None:
        """Stop answering after the queries at hand; what is answered stays."""
        if session.job is not None:
            session.job.cancelled = True

    def thumbnails(self, slot: int) -> list[bytes]:
        """Return the thumbnails of training tasks behind a slot, where the run has any."""
        if self._thumbnails is None:
            return []
        return [png(image.numpy()) for image in self._thumbnails.of(slot)]

    @property
    def about(self) -> dict[str, Any]:
        """Return what the page says about the run."""
        trained = self.run.trained
        return {
            "name": self.run.root.resolve().name,
            "method": trained.system.title,
            "steps": trained.system.iteration,
            "data": [Path(name).name for name in self.run.config.data.source],
            "classes": trained.shape.n_out,
            "size": [self.form.height, self.form.width],
            "memory": trained.system.memory is not None,
            "remember": self.visits is not None,
        }

    def remember(self, session: Session) -> None:
        """Keep what is on the board as one visit, in the place of an earlier one of the same images."""
        if self.visits is None:
            raise ConfigError("this page keeps nothing.", hint="Start it with --remember STORE.")
        with session.lock:
            support, same = session.board.support, session.same_visits
        if len(support) < 2:
            raise ConfigError("give images to at least two classes first.")
        classes = {name: self._seen(session, images) for name, images in support}
        made = self.visits.keep(classes, self.form, instead_of=same)
        with session.lock:
            session.visits = {v: k for v, k in session.visits.items() if v not in same}
            session.visits[made] = frozenset(key for _, images in support for key in images)

    def _work(self, session: Session, job: Job, answered: Answered, waiting: Sequence[str]) -> None:
        try:
            task = self._fit(session)
            for slot in task.about["recalled"]:
                slot["images"] = len(self.thumbnails(slot["slot"]))
            answered.task = task.about
            for first in range(0, len(waiting), AT_ONCE):
                if job.cancelled:
                    break
                part = waiting[first : first + AT_ONCE]
                found = task.answer(self._seen(session, part))
                with session.lock:
                    answered.queries |= dict(zip(part, found, strict=True))
                    job.done += len(part)
        except TorchemoError as error:
            job.error = str(error)
        except Exception as error:
            # Whatever it is, the page must hear of it, and the server must live on.
            job.error = f"the queries could not be answered ({type(error).__name__}: {error})."
        finally:
            job.running = False

    def _fit(self, session: Session) -> "Task":
        support = session.board.support
        classes = {name: self._seen(session, images) for name, images in support}
        keys = [key for _, images in support for key in images]
        return Task(self.run.trained, classes, keys, visits=self.visits, same=session.same_visits)

    def _seen(self, session: Session, keys: Sequence[str]) -> Tensor:
        pixels = np.stack([session.images[key].image.pixels for key in keys])
        return seen(self.run.trained, 255 - pixels if self.invert else pixels)


@final
class Task:
    """The run adapted to the classes of a board, with memory and without.

    Args:
        trained: The run.
        classes: What the learner sees of the images of each class.
        keys: Keys of these images.
        visits: The store of past visits.
        same: Ids of visits of images on this board: they count once.
    """

    def __init__(
        self,
        trained: Trained,
        classes: dict[str, Tensor],
        keys: list[str],
        *,
        visits: Visits | None = None,
        same: Collection[str] = (),
    ) -> None:
        memory = trained.system.memory
        self._adapted, self._without = _both(trained, classes, visits, same)
        seen = self._adapted.seen
        system, learner = trained.system, self._adapted.classifier.learner
        params = {n: p[None] for n, p in system.params.items() if "/" not in n}
        support = torch.cat(list(classes.values()))
        with torch.no_grad():
            self._model = alone(learner.model, params, support[None])
        self._keys, self._known = keys, self._features(support)
        self._labels = [i for i, n in enumerate(self._adapted.shots) for _ in range(n)]
        slots, familiar, helpful = recalled(trained, self._adapted.classifier.recall)
        self.about: dict[str, Any] = {
            "version": secrets.token_hex(4),
            "classes": list(classes),
            "memory": words(memory is not None, slots, familiar, helpful)
            if memory is not None or seen is None
            else JOINED[seen.visits > 0],
            "recalled": [slot._asdict() for slot in slots],
            "seen": None if seen is None else seen.to_dict(),
            "sides": SIDES[seen is not None and seen.visits > 0],
        }

    def answer(self, x: Tensor) -> list[dict[str, Any]]:
        """Answer queries."""
        rows = self._adapted.probabilities(x).tolist()
        own = None if self._without is None else self._without.probabilities(x).tolist()
        near = self._nearest(x)
        return [
            {"probabilities": row, "without": None if own is None else own[i], "nearest": near[i]}
            for i, row in enumerate(rows)
        ]

    def _nearest(self, x: Tensor) -> list[list[dict[str, Any]]]:
        """Return the support images whose features are most like those of each query, by cosine."""
        similar = self._features(x) @ self._known.T
        values, places = similar.topk(min(NEAREST, len(self._keys)), dim=1)
        return [
            [
                {"image": self._keys[j], "class": self._labels[j], "similarity": v}
                for v, j in zip(row, where, strict=True)
            ]
            for row, where in zip(values.tolist(), places.tolist(), strict=True)
        ]

    def _features(self, x: Tensor) -> Tensor:
        model, params = self._model
        with torch.no_grad():
            return torch.nn.functional.normalize(model.features(params, x[None])[0], dim=1)


def _both(
    trained: Trained, classes: dict[str, Tensor], visits: Visits | None, same: Collection[str]
) -> tuple[Adapted, Adapted | None]:
    """Return what answers, and what answers without past visits, or without the run's own memory."""
    form = form_of(trained)
    adapted = (
        fit(trained, classes, form)
        if visits is None
        else visits.fit(classes, form, besides=same).adapted
    )
    if adapted.seen is not None and adapted.seen.visits:
        return adapted, adapted.without
    if trained.system.memory is None:
        return adapted, None
    return adapted, fit(trained, classes, form, memory=False)


def words(
    memory: bool, slots: Sequence[RecalledSlot], familiar: bool | None, helpful: bool | None
) -> str:
    """Say what the memory did for a task, and why it did nothing."""
    if not memory:
        return "This run has no memory."
    if familiar is False:
        return "Recall was skipped: these images are unlike the tasks of training."
    if helpful is False:
        return "Recall was skipped: the slots for such tasks failed validation."
    if not slots:
        return "Nothing was recalled: the memory is empty."
    return f"{len(slots)} remembered tasks were recalled, the nearest first."
