"""Scores of a trained run on tasks that come back: all kinds of memory in one pass over the visits."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchemo.core.errors import ConfigError
from torchemo.data.source import PictureTasks
from torchemo.data.streams import ONCE
from torchemo.lab.study.streams.calibrated import Validation, told_of
from torchemo.lab.study.streams.game import Game, Met, meet
from torchemo.lab.study.streams.play import Player
from torchemo.lab.study.streams.users import Moment, Users
from torchemo.lab.study.streams.visits import Asked, Streams, Visits
from torchemo.learners.hosting import remembered_by
from torchemo.memory.lifelong.ratio import SameClass
from torchemo.runs.load import Opened
from torchemo.runs.visits.recognition import learned

GROUP_BYTES = 600_000_000
"""What the memories of users that are played at once may take."""
_SAME: dict[str, SameClass] = {}
"""What tells classes apart, by the data."""


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
    size = _group(player, users, [alike[0][0] for alike in _sharing(kinds, played)])
    for first in range(0, streams.users, size):
        group = range(first, min(first + size, streams.users))
        together, length = _sharing(kinds, played), users.length(group)
        games = [
            Game(player, [played[v] for v, _ in alike], len(group), length, every_step=alike[0][1])
            for alike in together
        ]
        for moment in users.moments(group):
            seen, told = player.see(moment), moment.without_examples()
            for alike, found in zip(together, meet(games, seen), strict=True):
                for kind, met in zip(alike, found, strict=True):
                    logs[kind].append(_Log(told, first, met))
    about = {
        "method": opened.system.title,
        "data": opened.source.fingerprint,
        "domains": list(opened.source.domains),
        "metric": "mse" if opened.source.shape.kind == "regression" else "accuracy",
    }
    return [
        _record(about, streams, one, logs[one.visits, one.report == "steps"], played[one.visits])
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
    return Player(system.learner, system.params, way, same, _table(opened))


def _table(opened: Opened) -> Tensor | None:
    """Return the features of all images, where a pretrained network made them."""
    source = opened.source
    if not isinstance(source, PictureTasks) or not source.index.holds_features:
        return None
    return torch.tensor(source.index.images[:], dtype=torch.float32)


def _same_class(opened: Opened) -> SameClass:
    """Learn what tells classes apart; where features are given, runs on the same data share it."""
    source, system = opened.source, opened.system
    if not isinstance(source, PictureTasks):
        raise ConfigError("tasks without classes are not recognised by likelihood ratios.")
    if not source.index.holds_features:
        return learned(source, system.learner, system.params)
    if source.fingerprint not in _SAME:
        _SAME[source.fingerprint] = learned(source, system.learner, system.params)
    return _SAME[source.fingerprint]


def _group(player: Player, users: Users, kinds: Sequence[Visits]) -> int:
    """Return how many users are played at once."""
    numbers = sum(s.numel() for s in remembered_by(player.learner, "per_step").values())
    shape, steps = users.source.shape, getattr(player.learner, "steps", 1)
    factors = {"secant": 3 * steps, "gauss_newton": 2 + shape.support * shape.n_out}
    kept = [one for one in kinds if one.find != "nothing" and not one.replay]
    numbers *= sum(factors.get(one.content, steps) for one in kept)
    numbers += torch.Size(shape.x).numel() * player.way  # of replay
    s = users.streams
    length = s.length or int(s.pool * s.visits / max(1e-3, 1 - s.once) * 1.3)
    return max(1, min(100, GROUP_BYTES // (4 * length * numbers)))


# -- records -------------------------------------------------------------------------------------------


class _Log(NamedTuple):
    moment: Moment
    first: int
    met: Met


def _record(
    about: Mapping[str, Any], streams: Streams, asked: Asked, log: Sequence[_Log], played: Visits
) -> dict[str, Any]:
    if not all(bool(one.met.scores.isfinite().all()) for one in log):
        return {"diverged": "a score is not finite"}
    if asked.report == "once":
        domain, scores, noted = _once(log)
    elif asked.report == "stream":
        domain, scores, noted = _whole(streams, log)
    else:
        domain, scores, noted = _by_visit(streams, log, asked.report == "steps")
    return {
        **about,
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
