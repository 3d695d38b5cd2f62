"""Scores of a trained run on tasks that come back: all kinds of memory in one pass over the visits."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchemo.core.errors import ConfigError
from torchemo.core.rng import generator_for
from torchemo.core.tree import expand, select
from torchemo.data.source import PictureTasks
from torchemo.data.streams import ONCE
from torchemo.lab.study.streams.calibrated import Validation, told_of
from torchemo.lab.study.streams.game import Game, Met
from torchemo.lab.study.streams.play import Player
from torchemo.lab.study.streams.users import Moment, Users
from torchemo.lab.study.streams.visits import Asked, Streams, Visits
from torchemo.learners.hosting import remembered_by
from torchemo.learners.learner import network_names
from torchemo.memory.lifelong.ratio import SameClass
from torchemo.runs.load import Opened

GROUP_BYTES = 600_000_000
"""What the memories of users that are played at once may take."""
LEARNED_FROM = 20
"""Images of each training class from which is learned what tells classes apart."""


def score_streams(opened: Opened, asked: Sequence[Asked]) -> list[dict[str, Any]]:
    """Return a record for each kind of memory, like those of `torchemo.runs.score.score_tasks`."""
    records: dict[Asked, dict[str, Any]] = {}
    for streams in dict.fromkeys(one.visits.streams for one in asked):
        together = [one for one in asked if one.visits.streams == streams]
        records |= zip(together, _scored(opened, streams, together), strict=True)
    return [records[one] for one in asked]


def _scored(opened: Opened, streams: Streams, asked: Sequence[Asked]) -> list[dict[str, Any]]:
    opened = one_visit(opened)
    users = Users(opened.source, streams)
    kinds = list(dict.fromkeys((one.visits, one.report == "steps") for one in asked))
    player = _player(opened, any(visits.needs_ratio for visits, _ in kinds))
    played = _calibrated(player, opened, [visits for visits, _ in kinds])
    logs: dict[tuple[Visits, bool], list[_Log]] = {kind: [] for kind in kinds}
    size = _group(player, users, [visits.content for visits, _ in kinds])
    for first in range(0, streams.users, size):
        group = range(first, min(first + size, streams.users))
        moments = users.moments(group)
        seen = [player.see(moment) for moment in moments]
        # One kind after the other: the memory of one is there at a time.
        for alike in _sharing(kinds, played):
            game = Game(
                player,
                [played[visits] for visits, _ in alike],
                len(group),
                len(moments),
                every_step=alike[0][1],
            )
            for one in seen:
                for kind, met in zip(alike, game.meet(one), strict=True):
                    logs[kind].append(_Log(one.moment.without_examples(), first, met))
    return [
        _record(opened, streams, one, logs[one.visits, one.report == "steps"], played[one.visits])
        for one in asked
    ]


def _calibrated(player: Player, opened: Opened, kinds: Sequence[Visits]) -> dict[Visits, Visits]:
    """Choose settings on validation visits, whose examples are let go before test users are met."""
    validation = Validation(player, opened.source)
    return {visits: validation.calibrated(visits) for visits in kinds}


def one_visit(opened: Opened) -> Opened:
    """Return a run with the support sets of one visit, if it was trained on those of several."""
    visits, source = opened.config.learner.options.get("visits", 1), opened.source
    if visits == 1 or not isinstance(source, PictureTasks):
        return opened
    spec = replace(source.spec, n_shot=source.spec.n_shot // visits)
    return opened._replace(source=replace(source, spec=spec))


def _sharing(
    kinds: Sequence[tuple[Visits, bool]], played: Mapping[Visits, Visits]
) -> list[list[tuple[Visits, bool]]]:
    """Put kinds together that differ in what answers alone."""
    groups: dict[tuple[Visits, bool], list[tuple[Visits, bool]]] = {}
    for visits, every_step in kinds:
        groups.setdefault((played[visits].memory, every_step), []).append((visits, every_step))
    return list(groups.values())


def _player(opened: Opened, ratio: bool) -> Player:
    system, shape = opened.system, opened.source.shape
    way = shape.n_way or 1
    same = _same_class(opened) if ratio else None
    return Player(system.learner, system.params, way, same)


def _same_class(opened: Opened) -> SameClass:
    """Learn from the training classes what tells classes apart, in the space where they are compared."""
    if not isinstance(opened.source, PictureTasks):
        raise ConfigError("tasks without classes are not recognised by likelihood ratios.")
    index = opened.source.index
    ids, y = [], []
    for number, c in enumerate(index.classes(split="train").tolist()):
        order = torch.randperm(int(index.counts[c]), generator=generator_for(0, "same class", c))
        places = order[:LEARNED_FROM].numpy() + int(index.starts[c])
        ids.append(torch.from_numpy(index.order[places]))
        y.append(torch.full((len(places),), number))
    rows = index.images[torch.cat(ids).numpy()]
    x = torch.from_numpy(rows).float()
    if not index.holds_features:
        learner, params = opened.system.learner, opened.system.params
        theta = expand(select(params, network_names(params)), 1)
        with torch.no_grad():
            x = learner.model.at(0, stored=True).features(theta, (x / 255)[None])[0]
    return SameClass.learned(x, torch.cat(y))


def _group(player: Player, users: Users, contents: Sequence[str]) -> int:
    """Return how many users are played at once."""
    numbers = sum(s.numel() for s in remembered_by(player.learner, "per_step").values())
    shape = users.source.shape
    steps = getattr(player.learner, "steps", 1)
    factors = {"secant": 3 * steps, "gauss_newton": 2 + shape.support * shape.n_out}
    steps = max(factors.get(content, steps) for content in contents)
    s = users.streams
    length = s.length or int(s.pool * s.visits / max(1e-3, 1 - s.once) * 1.3)
    inputs = torch.Size(users.source.shape.x).numel() * (s.n_query + 1) * player.way
    return max(1, min(100, GROUP_BYTES // (4 * length * (numbers * steps + inputs))))


# -- records -------------------------------------------------------------------------------------------


class _Log(NamedTuple):
    moment: Moment
    first: int
    met: Met


def _record(
    opened: Opened, streams: Streams, asked: Asked, log: Sequence[_Log], played: Visits
) -> dict[str, Any]:
    source = opened.source
    if not all(bool(one.met.scores.isfinite().all()) for one in log):
        return {"diverged": "a score is not finite"}
    if asked.report == "once":
        domain, scores, noted = _once(log)
    elif asked.report == "stream":
        domain, scores, noted = _whole(streams, log)
    else:
        domain, scores, noted = _by_visit(streams, log, asked.report == "steps")
    return {
        "method": opened.system.title,
        "data": source.fingerprint,
        "domains": list(source.domains),
        "metric": "mse" if source.shape.kind == "regression" else "accuracy",
        "domain": domain.tolist(),
        "per_task": [[round(float(v), 7) for v in row] for row in scores],
        "visits": {
            **noted,
            "ms": round(1e3 * sum(one.met.seconds for one in log) / len(log), 3),
            "bytes": log[-1].met.bytes,
            **({"chosen": told_of(played)} if asked.visits.calibrated else {}),
        },
    }


def _by_visit(
    streams: Streams, log: Sequence[_Log], every_step: bool
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Lay out scores by user and task, visit after visit, or step after step of the last visit."""
    pool, visits = streams.pool, streams.visits
    counts = torch.zeros(4, visits)
    columns = log[0].met.scores.shape[1] if every_step else visits
    table = torch.full((streams.users * pool, columns), torch.nan)
    domain = torch.zeros(len(table), dtype=torch.int64)
    for one in log:
        m = one.moment
        rows = (m.users + one.first) * pool + m.task
        ours = (m.task != ONCE) & (m.visit < visits)
        domain[rows[ours]] = m.domain[ours]
        if every_step:
            last = ours & (m.visit == visits - 1)
            table[rows[last]] = one.met.scores[last]
        else:
            table[rows[ours], m.visit[ours]] = one.met.scores[ours, -1]
        for i, v in enumerate(_counts(one.met, m.classes.shape[1])):
            counts[i].index_add_(0, m.visit[ours], v[ours])
    return domain, table, _rates(counts)


def _once(log: Sequence[_Log]) -> tuple[Tensor, Tensor, dict[str, Any]]:
    parts, counts = [], torch.zeros(4, 1)
    for one in log:
        ours = one.moment.task == ONCE
        parts.append((one.moment.domain[ours], one.met.scores[ours, -1:]))
        for i, v in enumerate(_counts(one.met, one.moment.classes.shape[1])):
            counts[i, 0] += v[ours].sum()
    return torch.cat([d for d, _ in parts]), torch.cat([s for _, s in parts]), _rates(counts)


def _whole(streams: Streams, log: Sequence[_Log]) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Average all visits of each user but the first of each task and those of tasks that come once."""
    total, number = torch.zeros(streams.users), torch.zeros(streams.users)
    domain = torch.zeros(streams.users, dtype=torch.int64)
    counts = torch.zeros(4, 1)
    for one in log:
        m = one.moment
        ours = (m.task != ONCE) & (m.visit > 0)
        users = m.users[ours] + one.first
        total.index_add_(0, users, one.met.scores[ours, -1])
        number.index_add_(0, users, torch.ones(len(users)))
        domain[m.users + one.first] = m.domain
        for i, v in enumerate(_counts(one.met, m.classes.shape[1])):
            counts[i, 0] += v[ours].sum()
    return domain, (total / number)[:, None], _rates(counts)


def _counts(met: Met, way: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    whole = torch.full_like(met.known, way).float()
    return whole, met.known.float(), met.right.float(), met.wrong.float()


def _rates(counts: Tensor) -> dict[str, Any]:
    """Return by visit: classes that were known, found of these, and taken rightly of those recalled."""
    whole, known, right, wrong = counts
    return {
        "known": _shares(known, whole),
        "hits": _shares(right, known),
        "precision": _shares(right, right + wrong),
    }


def _shares(part: Tensor, whole: Tensor) -> list[float | None]:
    return [round(float(a / b), 4) if b else None for a, b in zip(part, whole, strict=True)]
