"""Three scales, as ``scales.toml`` describes them."""

import tomllib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, final, get_args

from torchemo.core.errors import ConfigError

ScaleName: TypeAlias = Literal["smoke", "cpu", "paper"]
Tasks: TypeAlias = Literal["images", "features", "regression"]
TASKS: tuple[Tasks, ...] = get_args(Tasks)
OLD_TASKS = "pictures"
"""What tasks of images were called in commands and records before."""

SEEN = "seen classes"
"""Not a task set but a test: tasks of the classes a run was trained on, which show how far it fits them."""

ONCE = "tasks seen once"
"""No task set either: the tasks of a stream that do not come back."""

OWN_WORLDS = MappingProxyType(
    {
        "surfaces": "2-D families",
        "diverse": "diverse sets",
        "omniglot": "Omniglot alone",
        "cifar-fs": "CIFAR-FS",
    }
)
"""Task sets beside the paper's, where a scale has them, and their titles."""

FOUR = ("first", "second", "third", "fourth")
"""Task sets of one domain each, in the order of the mixed set."""


@final
@dataclass(frozen=True)
class Scale:
    """How large the runs of a study are.

    Attributes:
        name: smoke, cpu or paper.
        tasks: images, features of images, or regression.
        options: Options of every run, where its parts have them.
        memory_options: Options of their memory.
        worlds: Names of the datasets of each task set (`torchemo.lab.study.datasets`).
        image_size: Side of the images.
        grid: Rates that are tried on validation tasks, as options; the first stands for "not tuned".
        own_grids: The same for learners whose inner rates mean something else, by preset: Meta-SGD learns
            them from a range, MUSML's move coordinates in which all weights move together.
        base_rates: Whether learners with offsets take the rates chosen for the learner without, which
            can only be to their disadvantage and saves a grid each.
        seeds: Training seeds.
        test_tasks: Test tasks of every cell.
        protocol: standard, or the paper's own (A14).
        diagnosed: Tasks on which recalls are looked at.
        capacities: Memory sizes of the sweep over T, memories of gradients.
        neighbours: Sizes of the sweep over k, memories of gradients.
        own_capacities: Memory sizes of the sweep over T, memories of offsets.
        own_neighbours: Sizes of the sweep over k, memories of offsets; the last is all of its slots.
        longer: How many times the usual outer steps base learners get, by name, to take as much CPU time as
            with memory.
        costs: CPU time of a run by method, relative to MAML's of as many outer steps, where learners are also
            compared in equal CPU time (T7; `torchemo bench step --cases 'methods, 32 px*'` for ANIL, Meta-SGD
            and MUSML).
        seconds: What an outer step takes on one core of a small machine, for estimates.
        network: The pretrained network that images go through, whose features tasks are made of.
    """

    name: ScaleName
    tasks: Tasks
    options: tuple[str, ...]
    memory_options: tuple[str, ...]
    worlds: MappingProxyType[str, tuple[str, ...]]
    image_size: int
    grid: tuple[tuple[str, ...], ...]
    own_grids: MappingProxyType[str, tuple[tuple[str, ...], ...]]
    base_rates: bool
    seeds: tuple[int, ...]
    test_tasks: int
    protocol: Literal["standard", "paper"]
    diagnosed: int
    capacities: tuple[int, ...]
    neighbours: tuple[int, ...]
    own_capacities: tuple[int, ...]
    own_neighbours: tuple[int, ...]
    longer: Mapping[str, float]
    costs: Mapping[str, float]
    seconds: float
    network: str | None = None

    @property
    def regression(self) -> bool:
        """Whether the tasks are regression."""
        return self.tasks == "regression"

    @property
    def steps(self) -> int:
        """Outer steps of a run."""
        return self._number("train.steps")

    @property
    def validation_tasks(self) -> int:
        """Tasks of a validation."""
        return self._number("train.validation_tasks")

    def _number(self, name: str) -> int:
        given = next(option for option in self.options if option.startswith(f"{name}="))
        return int(given.split("=")[1])

    @property
    def shots(self) -> tuple[int, ...]:
        """Support examples per class that tables are made for."""
        return (1, 5) if self.name == "paper" else (1,)

    @property
    def outside(self) -> tuple[str, ...]:
        """Task sets that are only tested on."""
        return tuple(name for name in self.worlds if name.startswith("outside"))

    def only_set(self, world: str) -> str:
        """Name the one dataset of a task set."""
        return self.worlds[world][0].split(":")[-1]

    @property
    def textures(self) -> tuple[str, ...]:
        """The task set of textures, which is only tested on, where a scale has it."""
        return tuple(name for name in self.outside if "textures" in name)

    @property
    def elsewhere(self) -> tuple[str, ...]:
        """Further tests of what is trained on images: outside, and on the classes it has seen."""
        return () if self.regression else (*self.outside, SEEN)


def outer_rate(rate: float) -> tuple[str, str]:
    """Set the outer rate, which slots of offsets take too: the outer loop trains them."""
    return f"outer.lr={rate}", f"memory.slot_lr={rate}"


def rates(*points: Sequence[float]) -> tuple[tuple[str, ...], ...]:
    """Return rates as options: (inner, outer), or (low, high, outer) for inner rates from a range."""
    return tuple((_inner_rate(*inner), *outer_rate(outer)) for *inner, outer in points)


def _inner_rate(first: float, last: float | None = None) -> str:
    return f"learner.inner_lr={first}" if last is None else f"learner.rate_init=[{first}, {last}]"


def _read() -> dict[str, Scale]:
    text = files("torchemo.lab.study").joinpath("scales.toml").read_text("utf-8")
    given: dict[str, Any] = tomllib.loads(text)
    grids = {name: rates(*points) for name, points in given.pop("grids").items()}
    for about in given.values():
        about |= {**given.get(about.pop("like", ""), {}), **about}
    return {name: _scale(name, about, grids) for name, about in given.items()}


def _scale(where: str, about: Mapping[str, Any], grids: Mapping[str, Any]) -> Scale:
    name, tasks = where.split("/")
    fixed: dict[str, Any] = {
        n: tuple(v) if isinstance(v, list) else v for n, v in about.items() if n != "sets"
    }
    sets = about["sets"]
    worlds = {"mixed": sets, **{w: [one] for w, one in zip(FOUR, sets, strict=True)}}
    worlds |= about["worlds"]
    fixed |= {
        "name": name,
        "tasks": tasks,
        "worlds": MappingProxyType({world: tuple(names) for world, names in worlds.items()}),
        "grid": grids[about["grid"]],
        "own_grids": MappingProxyType({n: grids[v] for n, v in about["own_grids"].items()}),
    }
    return Scale(**fixed)


SCALES: MappingProxyType[str, Scale] = MappingProxyType(_read())


def scale_of(name: str, tasks: str) -> Scale:
    """Return a scale."""
    found = SCALES.get(f"{name}/{tasks}")
    if found is None:
        raise ConfigError(
            f"there is no scale '{name}' for {tasks}.", hint=f"There are: {', '.join(SCALES)}."
        )
    return found


def tasks_of(word: str) -> Tasks:
    """Return the kind of tasks that a person names; the earlier word for images is noted and understood."""
    if word == OLD_TASKS:
        warnings.warn(f"tasks are called images now, not {OLD_TASKS}.", stacklevel=2)
        return "images"
    found: Tasks | None = next((known for known in TASKS if known == word), None)
    if found is None:
        raise ValueError(f"invalid choice: {word!r} (choose from {', '.join(TASKS)})")
    return found
