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
from torchemo.models.alone import alone
from torchemo.runs.adapt import RecalledSlot, fit, form_of, recalled, seen
from torchemo.runs.load import Trained
from torchemo.runs.run import Run

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
        self.run = run
        self.form = form_of(
            run.trained
        )  # saved and shown as they came, inverted for the network alone
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
        return {
            "name": self.run.root.resolve().name,
            "method": trained.system.title,
            "steps": trained.system.iteration,
            "data": list(self.run.config.data.source),
            "classes": trained.shape.n_out,
            "size": [self.form.height, self.form.width],
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
        return Task(self.run.trained, classes, [key for _, images in support for key in images])

    def _seen(self, session: Session, keys: Sequence[str]) -> Tensor:
        pixels = np.stack([session.images[key].image.pixels for key in keys])
        return seen(self.run.trained, 255 - pixels if self.invert else pixels)


@final
class Task:
    """The run adapted to the classes of a board, with its memory and without."""

    def __init__(self, trained: Trained, classes: dict[str, Tensor], keys: list[str]) -> None:
        form = form_of(trained)
        self._adapted = fit(trained, classes, form)
        memory = trained.system.memory
        self._without = None if memory is None else fit(trained, classes, form, memory=False)
        system, learner = trained.system, self._adapted.classifier.learner
        params = {n: p[None] for n, p in system.params.items() if "/" not in n}
        support = torch.cat(list(classes.values()))
        with torch.no_grad():
            self._model = alone(learner.model, params, support[None])
        self._keys, self._known = keys, self._features(support)
        self._labels = [i for i, n in enumerate(self._adapted.shots) for _ in range(n)]
        slots, familiar, helpful = recalled(trained, self._adapted.classifier.recall)
        self.about = {
            "version": secrets.token_hex(4),
            "classes": list(classes),
            "memory": words(memory is not None, slots, familiar, helpful),
            "recalled": [{**slot._asdict(), "images": 0} for slot in slots],
            "seen": None,
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
