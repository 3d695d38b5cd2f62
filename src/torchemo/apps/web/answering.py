"""A trained run answers the board of a session: fitted once to its classes, then query by query."""

import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from torchemo.apps.web.session import Answered, Job, Session
from torchemo.core.errors import ConfigError, TorchemoError
from torchemo.core.rng import generator_for
from torchemo.core.types import Batch
from torchemo.data.episodes import to_unit
from torchemo.data.formats.images import PictureForm
from torchemo.memory.interface import TaskMemory
from torchemo.models.alone import alone
from torchemo.runs.adapt import RecalledSlot, learner_for, recalled
from torchemo.runs.run import Run
from torchemo.training.predict import Classifier, classifier

AT_ONCE = 8
"""Queries between two looks at whether to stop."""
NEAREST = 3
"""Support images that are named as having decided."""


@final
class Answering:
    """Answers sessions, one at a time.

    Args:
        run: The trained run.
        invert: Swap dark and light in all images.
    """

    def __init__(self, run: Run, *, invert: bool = False) -> None:
        shape = run.trained.shape
        if len(shape.x) != 3:
            raise ConfigError("this run was trained on numbers, not on images.")
        channels, height, width = shape.x
        self.run = run
        self.form = PictureForm(height, width, channels)
        self.invert = invert
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

    @property
    def about(self) -> dict[str, Any]:
        """Return what the page says about the run."""
        trained = self.run.trained
        _, height, width = trained.shape.x
        return {
            "name": self.run.root.resolve().name,
            "method": trained.system.title,
            "steps": trained.system.iteration,
            "data": list(self.run.config.data.source),
            "classes": trained.shape.n_out,
            "size": [height, width],
            "memory": trained.system.memory is not None,
        }

    def _work(self, session: Session, job: Job, answered: Answered, waiting: Sequence[str]) -> None:
        try:
            task = self._fit(session)
            answered.task = task.about
            for first in range(0, len(waiting), AT_ONCE):
                if job.cancelled:
                    break
                part = waiting[first : first + AT_ONCE]
                found = task.answer(self._pixels(session, part))
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
        keys = [key for _, images in support for key in images]
        labels = [label for label, (_, images) in enumerate(support) for _ in images]
        return Task(
            self.run, [name for name, _ in support], keys, self._pixels(session, keys), labels
        )

    def _pixels(self, session: Session, keys: Sequence[str]) -> Tensor:
        pixels = np.stack([session.images[key].image.pixels for key in keys])
        return to_unit(255 - pixels if self.invert else pixels)


@final
class Task:
    """The run adapted to the classes of a board, with its memory and without."""

    def __init__(
        self, run: Run, classes: list[str], keys: list[str], x: Tensor, labels: list[int]
    ) -> None:
        self._system = run.trained.system
        self._learner = learner_for(run.trained, len(classes))
        order = torch.randperm(len(keys), generator=generator_for(0, "support-order"))
        self._keys, y = [keys[i] for i in order], torch.tensor(labels)[order]
        self._labels = y.tolist()
        self._support = Batch(x[order][None], y[None])
        memory = self._system.memory
        self._answers = self._fitted(memory)
        self._without = None if memory is None else self._fitted(None)
        slots, familiar, helpful = recalled(run.trained, self._answers.recall)
        self.about = {
            "version": secrets.token_hex(4),
            "classes": classes,
            "memory": words(run, slots, familiar, helpful),
            "recalled": [{**slot._asdict(), "images": 0} for slot in slots],
            "seen": None,
        }

    def answer(self, x: Tensor) -> list[dict[str, Any]]:
        """Answer queries."""
        rows = self._answers(x).softmax(1)
        own = None if self._without is None else self._without(x).softmax(1).tolist()
        near = self._nearest(x)
        return [
            {"probabilities": row, "without": None if own is None else own[i], "nearest": near[i]}
            for i, row in enumerate(rows.tolist())
        ]

    def _fitted(self, memory: TaskMemory | None) -> Classifier:
        return classifier(self._learner, self._system.params, self._support, memory=memory)

    def _nearest(self, x: Tensor) -> list[list[dict[str, Any]]]:
        """Return the support images whose features are most like those of each query, by cosine."""
        params = {n: p[None] for n, p in self._system.params.items() if "/" not in n}
        with torch.no_grad():
            model, params = alone(self._learner.model, params, self._support.x)
            seen = model.features(params, torch.cat([self._support.x, x[None]], 1))[0]
        seen = torch.nn.functional.normalize(seen, dim=1)
        similar = seen[len(self._keys) :] @ seen[: len(self._keys)].T
        values, places = similar.topk(min(NEAREST, len(self._keys)), dim=1)
        return [
            [
                {"image": self._keys[j], "class": self._labels[j], "similarity": v}
                for v, j in zip(row, where, strict=True)
            ]
            for row, where in zip(values.tolist(), places.tolist(), strict=True)
        ]


def words(
    run: Run, slots: Sequence[RecalledSlot], familiar: bool | None, helpful: bool | None
) -> str:
    """Say what the memory did for a task, and why it did nothing."""
    if run.memory is None:
        return "This run has no memory."
    if familiar is False:
        return "Recall was skipped: these images are unlike the tasks of training."
    if helpful is False:
        return "Recall was skipped: the slots for such tasks failed validation."
    if not slots:
        return "Nothing was recalled: the memory is empty."
    return f"{len(slots)} remembered tasks were recalled, the nearest first."
