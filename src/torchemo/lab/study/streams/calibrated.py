"""Choose on validation classes what decides recall and answers; test classes have no part in it.

A run meets users with tasks of its validation classes. For every setting that may be chosen, the accuracy of
each user is compared with that of no memory. The setting with the largest gain is taken, if the gain is
significant over users; else nothing is recalled. Weights of joined answers are fitted to the same visits.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any, final

import torch
from torch import Tensor

from torchemo.core.stats import mean_interval
from torchemo.data.source import TaskSource
from torchemo.lab.study.streams.game import Game, meet
from torchemo.lab.study.streams.play import Player, Seen
from torchemo.lab.study.streams.users import Users
from torchemo.lab.study.streams.visits import Visits
from torchemo.memory.lifelong.mixture import Mixture
from torchemo.memory.lifelong.shares import NEW, TRUST

SEED = 500
"""Validation users have the seeds of test users and this many more."""
THRESHOLDS = {
    "task ratio": (0.0, 1.0, 2.0, 3.0, 4.0, 6.0),
    "class ratio": (4.0, 8.0, 12.0, 16.0, 20.0),
    "task cosine": (0.5, 0.6, 0.7, 0.8),
    "class cosine": (0.6, 0.7, 0.8, 0.9),
    "likelihood": (-1.2, -0.8, -0.5, -0.3, -0.1),
    "mean": (0.8, 0.85, 0.9, 0.95),
}


def settings_of(visits: Visits) -> list[Visits]:
    """Return what a kind of memory may be, apart from recalling nothing."""
    if visits.find == "shares":
        return [replace(visits, trust=t, new=n) for t, n in product(TRUST, NEW)]
    if visits.find in THRESHOLDS:
        return [replace(visits, threshold=t) for t in THRESHOLDS[visits.find]]
    return [visits]


def told_of(chosen: Visits) -> dict[str, Any]:
    """Return what was chosen, for records."""
    if chosen.find == "nothing":
        return {"recall": "nothing"}
    found: dict[str, Any] = {}
    if chosen.find == "shares":
        found = {"trust": chosen.trust, "new": chosen.new}
    elif chosen.find in THRESHOLDS:
        found = {"threshold": chosen.threshold}
    if chosen.weights:
        found["weights"] = [[round(w, 3) for w in row] for row in chosen.weights]
    return found


@final
class Validation:
    """Visits of validation classes, met once for every setting that is asked for.

    Args:
        player: The trained learner.
        source: Its tasks.
    """

    def __init__(self, player: Player, source: TaskSource) -> None:
        self.player, self.source = player, source
        self._seen: dict[Any, list[Seen]] = {}
        self._chosen: dict[Visits, Visits] = {}
        self._scores: dict[Visits, Tensor] = {}

    def calibrated(self, visits: Visits) -> Visits:
        """Return a kind of memory with what validation visits decide."""
        if not visits.calibrated:
            return visits
        asked = replace(visits.memory, calibrated=False)
        if asked not in self._chosen:
            self._chosen[asked] = self._best(asked)
        chosen = self._chosen[asked]
        weights = self._weights(chosen) if visits.answer == "mixture" else ()
        return replace(chosen, answer=visits.answer, sharpness=visits.sharpness, weights=weights)

    def _best(self, asked: Visits) -> Visits:
        nothing = replace(asked, find="nothing")
        settings = settings_of(asked)
        if len(settings) == 1:
            return asked
        base, *scores = self._scored([nothing, *settings])
        gains = [score - base for score in scores]
        best = max(range(len(gains)), key=lambda i: float(gains[i].mean()))
        interval = mean_interval(gains[best].tolist())
        return settings[best] if interval.low > 0 else nothing

    def _scored(self, kinds: Sequence[Visits]) -> list[Tensor]:
        """Return the mean accuracy of each user over all visits, for several kinds of memory."""
        new = [one for one in dict.fromkeys(kinds) if one not in self._scores]
        if new:
            seen = self._visits(new[0])
            users = len(seen[0].moment.users)
            games = [Game(self.player, [one], users, len(seen)) for one in new]
            totals, number = torch.zeros(len(new), users), torch.zeros(users)
            for one in seen:
                rows = one.moment.users
                for total, (met,) in zip(totals, meet(games, one), strict=True):
                    total.index_add_(0, rows, met.scores[:, -1])
                number.index_add_(0, rows, torch.ones(len(rows)))
            self._scores |= zip(new, totals / number, strict=True)
        return [self._scores[one] for one in kinds]

    def _weights(self, visits: Visits) -> tuple[tuple[float, ...], ...]:
        """Fit the weights of joined answers."""
        noted: list[tuple[Tensor, Tensor, Tensor]] = []

        def watch(parts: list[Tensor], examples: Tensor, y: Tensor) -> None:
            noted.append((torch.stack(parts, 3), examples, y))

        seen = self._visits(visits)
        game = Game(self.player, [visits], len(seen[0].moment.users), len(seen), watch=watch)
        for one in seen:
            game.meet(one)
        parts, examples, y = (torch.cat(column) for column in zip(*noted, strict=True))
        return Mixture.fitted(parts.unbind(3), examples, y).weights

    def _visits(self, visits: Visits) -> Sequence[Seen]:
        streams = replace(visits.streams, split="val", seed=visits.streams.seed + SEED)
        if streams not in self._seen:
            moments = Users(self.source, streams).moments(range(streams.users))
            self._seen[streams] = [self.player.see(moment) for moment in moments]
        return self._seen[streams]
