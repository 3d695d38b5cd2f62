"""Sample tasks solved again with the best checkpoint, for the reader to look at."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from torchemo.core.types import Batch, Episode
from torchemo.data.episodes import sample_ids
from torchemo.data.source import PictureTasks
from torchemo.report.run.images import Thumbnails
from torchemo.report.run.probe import Probe, first_of_each_domain, validation_tasks
from torchemo.runs.load import Opened
from torchemo.runs.train import VALIDATION_SEED

MAX_PICTURE_TASKS = 4
MAX_POINT_TASKS = 6
MAX_SUPPORT = 25
MAX_QUERY = 10
"""Limits that keep a report below 2 MB."""

_GRID = 101


class Recalled(NamedTuple):
    """A slot that a task recalls, and with which weight."""

    slot: int
    weight: float


class Picture(NamedTuple):
    """An image of a task.

    Attributes:
        uri: The image itself, as a data URI; empty if it cannot be shown.
        label: Its true label, counted from 1.
        answer: The predicted label after adaptation; None for support images.
    """

    uri: str
    label: int
    answer: int | None = None


class PictureSample(NamedTuple):
    """A solved task of images; ``right`` counts all its queries, after 0, 1, ..., S steps."""

    number: int
    domain: str
    classes: list[str]
    support: list[Picture]
    query: list[Picture]
    queries: int
    right: list[int]
    recalled: list[Recalled]


class PointSample(NamedTuple):
    """A solved regression task.

    Attributes:
        number: Which validation task.
        domain: Its family.
        support: Support inputs and targets.
        query: Query inputs and targets.
        grid: Inputs of the curves; empty if inputs have more than one dimension.
        curves: Predictions on ``grid`` before and after adaptation.
        answers: Predictions at the queries before and after adaptation.
        errors: Mean squared error after 0, 1, ..., S steps.
        recalled: What it recalls most.
    """

    number: int
    domain: str
    support: Batch
    query: Batch
    grid: Float[Tensor, " grid"]
    curves: tuple[Tensor, Tensor]
    answers: tuple[Tensor, Tensor]
    errors: list[float]
    recalled: list[Recalled]


def sample_tasks(opened: Opened, probe: Probe | None) -> list[PictureSample] | list[PointSample]:
    """Solve one validation task of each domain again."""
    source = opened.source
    if isinstance(source, PictureTasks):
        numbers = first_of_each_domain(source, at_most=MAX_PICTURE_TASKS)
        return [_pictures(opened, source, n, _recalled(probe, n)) for n in numbers]
    numbers = first_of_each_domain(source, at_most=MAX_POINT_TASKS)
    return [_points(opened, n, _recalled(probe, n)) for n in numbers]


def _pictures(
    opened: Opened, source: PictureTasks, number: int, recalled: list[Recalled]
) -> PictureSample:
    episode = validation_tasks(source, start=number, count=1)
    ids = sample_ids(
        source.index, source.spec, seed=VALIDATION_SEED, split="val", start=number, count=1
    )
    truth = episode.query.y[0]
    answers = [out[0].argmax(-1) for out in opened.system.predict(episode).outputs]
    order = torch.argsort(episode.support.y[0], stable=True)[:MAX_SUPPORT]
    image = Thumbnails(source, opened.config.data)
    return PictureSample(
        number=number,
        domain=source.domains[int(ids.domain[0])],
        classes=[source.index.class_names[c] for c in ids.classes[0].tolist()],
        support=[
            Picture(image(int(ids.support[0, i])), int(episode.support.y[0, i]) + 1) for i in order
        ],
        query=[
            Picture(image(int(i)), int(y) + 1, int(a) + 1)
            for i, y, a in list(zip(ids.query[0], truth, answers[-1], strict=True))[:MAX_QUERY]
        ],
        queries=len(truth),
        right=[int((answer == truth).sum()) for answer in answers],
        recalled=recalled,
    )


def _points(opened: Opened, number: int, recalled: list[Recalled]) -> PointSample:
    episode = validation_tasks(opened.source, start=number, count=1)
    answers = [out[0] for out in opened.system.predict(episode).outputs]
    grid, curves = torch.empty(0), (torch.empty(0), torch.empty(0))
    if episode.query.x.shape[-1] == 1:
        inputs = torch.cat([episode.support.x, episode.query.x], 1)
        grid = torch.linspace(float(inputs.min()), float(inputs.max()), _GRID)
        asked = Batch(grid.view(1, -1, 1), torch.zeros(1, _GRID, 1))
        drawn = Episode(episode.support, asked, episode.domain, episode.index)
        lines = opened.system.predict(drawn).outputs
        curves = (lines[0].flatten(), lines[-1].flatten())
    domain = -1 if episode.domain is None else int(episode.domain[0])
    return PointSample(
        number=number,
        domain=opened.source.domains[domain],
        support=Batch(episode.support.x[0], episode.support.y[0]),
        query=Batch(episode.query.x[0], episode.query.y[0]),
        grid=grid,
        curves=curves,
        answers=(answers[0].flatten(), answers[-1].flatten()),
        errors=[float((out - episode.query.y[0]).square().mean()) for out in answers],
        recalled=recalled,
    )


def _recalled(probe: Probe | None, number: int) -> list[Recalled]:
    """Return the three slots that a task recalls most, down to half a percent."""
    if probe is None or probe.weights.shape[1] == 0:
        return []
    weights, slots = probe.weights[number].topk(min(3, probe.weights.shape[1]))
    found = zip(slots.tolist(), weights.tolist(), strict=True)
    return [Recalled(slot, weight) for slot, weight in found if weight >= 0.005]
