"""What a run needs to recognise classes by their images, learned from its own data and kept beside it.

Training classes teach what tells classes apart (`torchemo.memory.lifelong.ratio`). Users with tasks of
validation classes then decide how much likelihood ratios are trusted, and how much a new class weighs: the
setting whose recall gains most is taken. If its gain is not significant over users, nothing is recalled.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from torchemo.config.run import StreamSpec
from torchemo.core.digest import digest_of
from torchemo.core.errors import CheckpointError, ConfigError
from torchemo.core.rng import generator_for
from torchemo.core.stats import mean_interval
from torchemo.core.task_axis import take
from torchemo.core.tree import expand, select
from torchemo.core.types import Batch, Episode, Params
from torchemo.data.source import PictureTasks
from torchemo.data.streams import StreamTasks
from torchemo.learners.learner import Learner, network_names
from torchemo.memory.lifelong.memory import LifelongMemory
from torchemo.memory.lifelong.ratio import SameClass
from torchemo.memory.lifelong.shares import NEW, TRUST, ByRatio
from torchemo.runs.load import Opened
from torchemo.runs.storage import durable, tensorfile
from torchemo.training.lifelong import Revisit, revisit

FILE = "recognition.safetensors"
MOST = 1 << 26
"""Bytes of the largest file that is read."""
LEARNED_FROM = 20
"""Images of each training class from which is learned what tells classes apart."""
USERS, STREAM, VISITS = 30, StreamSpec(pool=4, law="rounds", once=0.2, labels="shuffled"), 16
"""Validation users, how their tasks come back, and the visits of each."""
QUERIES = 10
_SEED = 500_000
_DIGEST = "digest"


class Gain(NamedTuple):
    """Accuracy gained over no recall on validation classes, with its 95 % interval over users."""

    mean: float
    low: float
    high: float


@final
@dataclass(frozen=True)
class Recognition:
    """How a run recognises classes by their images.

    Attributes:
        same: What tells classes apart.
        space: Space of the examples that are compared.
        trust: Factor of likelihood ratios.
        new: Weight of a class that is new.
        gain: What recall gained on validation classes.
        weights: Digest of the weights it belongs to.
    """

    same: SameClass
    space: str
    trust: float
    new: float
    gain: Gain
    weights: str

    @property
    def helps(self) -> bool:
        """Whether recall gained significantly on validation classes."""
        return self.gain.low > 0

    @property
    def words(self) -> str:
        """Say what was found."""
        points = ", ".join(f"{100 * end:+.1f}" for end in self.gain[1:])
        return (
            f"recall by images gains {100 * self.gain.mean:+.1f} points [{points}] on validation classes"
            f" (trust {self.trust:g}, new {self.new:g})"
        )

    def recogniser(self) -> ByRatio:
        """Make the recogniser of a memory; refuse where recall by images did not help."""
        if self.helps:
            return ByRatio(self.same, self.space, trust=self.trust, new=self.new)
        raise ConfigError(
            f"this run cannot tell classes apart by their images: {self.words}.",
            hint="Recognise classes by names, as stores do by default.",
        )


# -- learn ---------------------------------------------------------------------------------------------


def learned(source: PictureTasks, learner: Learner, params: Params) -> SameClass:
    """Learn from the training classes what tells classes apart, in the space where they are compared."""
    index = source.index
    ids, y = [], []
    for number, c in enumerate(index.classes(split="train").tolist()):
        order = torch.randperm(int(index.counts[c]), generator=generator_for(0, "same class", c))
        places = order[:LEARNED_FROM].numpy() + int(index.starts[c])
        ids.append(torch.from_numpy(index.order[places]))
        y.append(torch.full((len(places),), number))
    x = torch.from_numpy(np.asarray(index.images[torch.cat(ids).numpy()])).float()
    if not index.holds_features:
        theta = expand(select(params, network_names(params)), 1)
        with torch.no_grad():
            x = learner.model.at(0, stored=True).features(theta, (x / 255)[None])[0]
    return SameClass.learned(x, torch.cat(y))


def space_of(source: PictureTasks) -> str:
    """Return where examples are compared: a pretrained network's features, or those of the learner."""
    return "inputs" if source.index.holds_features else "features"


def calibrate(
    opened: Opened,
    weights: str,
    *,
    users: int | None = None,
) -> Recognition:
    """Learn what tells classes apart, and choose on validation classes how much it is trusted.

    Args:
        opened: The run, with its data.
        weights: Digest of its weights.
        users: How many validation users; `USERS` by default.
    """
    source, system = opened.source, opened.system
    if not isinstance(source, PictureTasks):
        raise ConfigError("tasks without classes are not recognised by images.")
    same, space = learned(source, system.learner, system.params), space_of(source)
    settings = [ByRatio(same, space, t, n) for t, n in product(TRUST, NEW)]
    gains = torch.stack([_gains(opened, source, settings, user) for user in range(users or USERS)])
    best = int(gains.mean(0).argmax())
    found = mean_interval(gains[:, best].tolist())
    gain = Gain(found.value, found.low, found.high)
    return Recognition(same, space, settings[best].trust, settings[best].new, gain, weights)


def _gains(opened: Opened, source: PictureTasks, settings: list[ByRatio], user: int) -> Tensor:
    """Return what each setting gains over no recall, on average over the visits of a user."""
    drawn = StreamTasks(source, STREAM).sample(
        "val", seed=_SEED + user, start=0, count=VISITS, n_query=QUERIES
    )
    head = opened.system.learner.model.head
    memories = [LifelongMemory(setting, head=head) for setting in settings]
    total = torch.zeros(len(settings))
    for number in range(VISITS):
        visit = take(drawn, slice(number, number + 1))
        # Of every visit is kept what the learner alone makes of it, as stores do.
        alone = _met(opened, visit, LifelongMemory(settings[0], head=head))
        kept = alone.remember()[0]
        base = _accuracy(alone, visit.query)
        for i, memory in enumerate(memories):
            found = _met(opened, visit, memory)
            total[i] += _accuracy(found, visit.query) - base
            memory.remember(kept.sight, found.recognised[0], kept.values)
    return total / VISITS


def _met(opened: Opened, visit: Episode, memory: LifelongMemory) -> Revisit:
    system = opened.system
    if system.memory is not None:
        system.memory.eval()
    return revisit(system.learner, system.params, visit.support, memory, own_memory=system.memory)


def _accuracy(found: Revisit, query: Batch) -> float:
    return float((found.outputs(query.x).argmax(2) == query.y).float().mean())


# -- keep ----------------------------------------------------------------------------------------------


def save(run: Path, found: Recognition) -> Path:
    """Keep it beside the run, in the place of an earlier one."""
    about = {
        "space": found.space,
        "unit": found.same.unit,
        "trust": found.trust,
        "new": found.new,
        "gain": list(found.gain),
        "weights": found.weights,
    }
    tensors = {
        "centre": found.same.centre,
        "directions": found.same.directions,
        "spread": found.same.spread,
        "about": torch.tensor(list(json.dumps(about).encode()), dtype=torch.uint8),
    }
    digest = torch.tensor(list(bytes.fromhex(digest_of(tensors))), dtype=torch.uint8)
    durable.replace_file(run / FILE, tensorfile.encode({**tensors, _DIGEST: digest}))
    return run / FILE


def load(run: Path, *, weights: str) -> Recognition | None:
    """Read what a run has; None if it was never calibrated, or for other weights."""
    path = run / FILE
    if not path.is_file():
        return None
    try:
        if path.stat().st_size > MOST:
            raise ValueError("it is too large")
        tensors = tensorfile.decode(durable.read_regular(path), what=str(path))
        said = bytes(tensors.pop(_DIGEST).tolist()).hex()
        if said != digest_of(tensors):
            raise ValueError("it was changed")
        about = json.loads(bytes(tensors.pop("about").tolist()))
        found = _recognition(about, tensors)
    except (OSError, CheckpointError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} is damaged ({error!s:.200}).",
            hint=f"Make it anew with: torchemo memory calibrate {run}",
        ) from error
    return found if found.weights == weights else None


def _recognition(about: Mapping[str, Any], tensors: Params) -> Recognition:
    same = SameClass(
        tensors["centre"], tensors["directions"], tensors["spread"], bool(about["unit"])
    )
    shape = (*same.centre.shape, *same.spread.shape)
    if len(shape) != 2 or same.directions.shape != shape or bool((same.spread <= 0).any()):
        raise ValueError("its directions do not fit")
    tensorfile.check_finite(tensors, what=FILE)
    gain = Gain(*(float(number) for number in about["gain"]))
    trust, new = float(about["trust"]), float(about["new"])
    return Recognition(same, str(about["space"]), trust, new, gain, str(about["weights"]))
