"""What a memory is built from: runs that fit together, and how much each of them gives."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, final

from torchemo.config.run import RunConfig
from torchemo.config.toml import dumps, from_dict, override, to_dict
from torchemo.core.digest import digest_of
from torchemo.core.errors import CheckpointError, ConfigError, DataError
from torchemo.core.types import Params, TaskShape
from torchemo.data.source import TaskSource
from torchemo.runs.experiment import complete, open_tasks
from torchemo.runs.load import best_checkpoint, check_config, read_config
from torchemo.runs.storage.checkpoint import Checkpoint
from torchemo.runs.storage.info import tasks_of
from torchemo.training.system import memory_state

Take: TypeAlias = Literal["tasks", "slots"]
SLOTS = ("store.", "retrieval.index.")
"""What of a memory's state is about its slots."""
OWN = ("capacity", "controller", "index", "value_dtype", "values_dir")
"""Options of a memory that may differ from those of the first run: none changes what a value is."""
SEED = 1 << 40
"""Added to the seed of a run: its training must not meet these tasks again when it goes on."""


class Giver(NamedTuple):
    """A run that a memory is built from.

    Attributes:
        root: Its folder.
        config: Its configuration.
        saved: Its best checkpoint.
    """

    root: Path
    config: RunConfig
    saved: Checkpoint

    @property
    def shape(self) -> TaskShape:
        """What its tasks look like."""
        return tasks_of(self.saved.manifest)[0]

    @property
    def domains(self) -> tuple[str, ...]:
        """Where its tasks come from."""
        return tasks_of(self.saved.manifest)[1]

    @property
    def memory(self) -> Params:
        """State of its memory."""
        return memory_state(self.saved.groups)

    @property
    def weights(self) -> str:
        """Digest of everything that decides keys and values."""
        memory = {
            n: t for n, t in self.memory.items() if not n.startswith(("store.", "retrieval."))
        }
        kept = {n: t for n, t in memory.items() if not n.startswith("skip_")}
        return digest_of({**self.saved.groups["params"], **kept})


@final
@dataclass(frozen=True)
class Plan:
    """What is built.

    Attributes:
        givers: The runs; the first one gives learner, weights and key network.
        config: Configuration of the store, which is a run.
        take: Tasks of the runs' training data, or the slots that they filled.
        counts: How many tasks or slots each run gives.
    """

    givers: tuple[Giver, ...]
    config: RunConfig
    take: Take
    counts: tuple[int, ...]

    @property
    def total(self) -> int:
        """How many tasks or slots are written in all."""
        return sum(self.counts)

    @property
    def domains(self) -> tuple[str, ...]:
        """Domains of all runs, each once."""
        return tuple(dict.fromkeys(name for giver in self.givers for name in giver.domains))

    @property
    def plain(self) -> dict[str, Any]:
        """The plan as a checkpoint holds it; a build that continues must have the same."""
        return {
            "take": self.take,
            "counts": list(self.counts),
            "config": dumps(self.config),
            "runs": [[str(g.root.resolve()), g.saved.step, g.weights] for g in self.givers],
        }

    def batches(self, done: int) -> Iterator[tuple[int, int, int]]:
        """Yield what is left as (run, first, count), in batches that do not depend on where it was left."""
        size, before = self.config.train.tasks, 0
        for run, count in enumerate(self.counts):
            for first in range(0, count, size):
                part = min(size, count - first)
                if before >= done:
                    yield run, first, part
                before += part


def make_plan(
    roots: Sequence[Path],
    *,
    out: Path,
    take: Take,
    slots: int | None,
    tasks: int | None,
    options: Sequence[str] = (),
) -> Plan:
    """Open the runs and say what will be built; what does not fit together is refused by name.

    Args:
        roots: Folders of the runs.
        out: Folder of the store.
        take: What they give.
        slots: Capacity of the memory; by default as many as are written.
        tasks: Tasks of each run; by default they fill the memory once, in equal parts.
        options: Options of the memory that differ from those of the first run, ``memory.index=ivfpq``.
    """
    twice = next((root for root in roots if roots.count(root) > 1), None)
    if twice is not None:
        raise ConfigError(f"--from names {twice} twice.")
    givers = tuple(_opened(root) for root in roots)
    for other in givers[1:]:
        _check_fits(givers[0], other, take=take)
    counts = _counts(givers, take=take, slots=slots, tasks=tasks)
    capacity = sum(counts) if slots is None else slots
    config = _changed(givers[0], options)
    own: dict[str, Any] = {"capacity": capacity}
    if not any(option.startswith("memory.values_dir=") for option in options):
        own["values_dir"] = str((out / "values").resolve())
    return Plan(givers, complete(replace(config, memory=config.memory.set(**own))), take, counts)


def _changed(first: Giver, options: Sequence[str]) -> RunConfig:
    """Return the configuration of a run with other options of its memory; refuse any but these."""
    plain = to_dict(first.config)
    for option in options:
        override(plain, option)
    config = complete(from_dict(plain, RunConfig, where="the options"))
    before = {name: first.config.memory.options[name] for name in OWN}
    if dumps(replace(config, memory=config.memory.set(**before))) != dumps(first.config):
        raise ConfigError(
            f"a memory is built with the options of {first.root}, got {', '.join(options)}.",
            hint=f"These may differ: {', '.join('memory.' + name for name in OWN[1:])}.",
        )
    return config


def _opened(root: Path) -> Giver:
    config = read_config(root)
    if not config.memory.options.get("capacity"):
        raise ConfigError(
            f"{root} has no memory.", hint="Name runs with a memory of gradients, such as maml-emo."
        )
    if "content" not in config.memory.options:
        raise ConfigError(
            f"{root} has a memory of {config.memory.name}, whose slots are trained and not filled.",
            hint="Name runs with a memory of gradients, such as maml-emo.",
        )
    saved = best_checkpoint(root)
    check_config(root, config, saved.manifest)
    return Giver(root, config, saved)


def _check_fits(first: Giver, other: Giver, *, take: Take) -> None:
    ours, theirs = first.shape, other.shape
    # Their number of queries is no matter: a memory keeps gradients of support sets.
    if replace(ours, n_query=1) != replace(theirs, n_query=1):
        raise ConfigError(
            f"{other.root} has {_words(theirs)}, {first.root} has {_words(ours)}.",
            hint="Build a memory from runs on tasks of the same shape.",
        )
    if take == "slots" and other.weights != first.weights:
        raise ConfigError(
            f"{other.root} has other weights than {first.root}, and a gradient fits only the weights that"
            " it was computed with.",
            hint="Take tasks instead (--take tasks): their gradients are computed with the weights of the"
            " first run.",
        )


def _counts(
    givers: Sequence[Giver], *, take: Take, slots: int | None, tasks: int | None
) -> tuple[int, ...]:
    if take == "slots":
        if tasks is not None:
            raise ConfigError("--tasks is for --take tasks; slots are taken all.")
        return tuple(int(giver.memory["store.ledger.filled"]) for giver in givers)
    if tasks is None and slots is None:
        raise ConfigError("build needs --slots, the size of the memory, or --tasks of each run.")
    if tasks is not None:
        return (tasks,) * len(givers)
    most = slots or 0
    shares = [most // len(givers) + (i < most % len(givers)) for i in range(len(givers))]
    return tuple(shares)


def tasks_from(giver: Giver) -> TaskSource:
    """Open the training tasks of a run; changed data are refused."""
    source = open_tasks(giver.config, needed=("train",))
    if giver.saved.info.get("data") not in (None, source.fingerprint):
        raise DataError(
            f"{giver.root}: the data differ from those the run was trained on.",
            hint="Restore the data, or leave this run out.",
        )
    return source


def whole_number(text: str, option: str) -> int:
    """Read a number of slots or tasks, such as 1e6."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 1 <= number <= 1e9 or number != int(number):
        raise ConfigError(
            f"{option} should be a whole number from 1 to 1e9, such as 1e6, got {text!r:.40}."
        )
    return int(number)


def without_slots(memory: Params) -> Params:
    """Return the state of a memory without what is about its slots."""
    return {name: t for name, t in memory.items() if not name.startswith(SLOTS)}


def unfinished(path: Path, found: Mapping[str, Any], plan: Plan) -> None:
    """Refuse to continue a build that was begun otherwise."""
    names = [name for name, value in plan.plain.items() if found.get(name) != value]
    if names:
        raise CheckpointError(
            f"{path} was begun with other {', '.join(names)}.",
            hint="Give the same arguments to continue, or choose another --out.",
        )


def _words(shape: TaskShape) -> str:
    size = " x ".join(map(str, shape.x))
    if shape.kind == "regression":
        return f"regression tasks of {shape.n_shot} points with {size} inputs"
    return f"{shape.n_out}-way {shape.n_shot}-shot tasks of {size} images"
