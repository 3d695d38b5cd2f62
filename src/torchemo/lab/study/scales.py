"""Three scales: seconds for tests, hours on two cores, and the published sizes."""

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, TypeAlias, final

from torchemo.core.errors import ConfigError

ScaleName: TypeAlias = Literal["smoke", "cpu", "paper"]
Tasks: TypeAlias = Literal["pictures", "regression"]

SEEN = "seen classes"
"""Not a world but a test: tasks of the classes a run was trained on, which show how far it fits them."""

OWN_WORLDS = MappingProxyType(
    {"surfaces": "2-D families", "diverse": "diverse sets", "omniglot": "Omniglot alone"}
)
"""Worlds beside the paper's, where a scale has them, and how they are shown."""

FOUR = ("first", "second", "third", "fourth")
"""Worlds of one domain each, in the order of the mixed world."""


@final
@dataclass(frozen=True)
class Scale:
    """How large the runs of a study are.

    Attributes:
        name: smoke, cpu or paper.
        tasks: pictures (images) or regression.
        options: Options of every run, where its parts have them.
        memory_options: Options of their memory.
        worlds: Names of the data sets of each world (`torchemo.lab.study.datasets`).
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
    longer: MappingProxyType[str, float]
    costs: MappingProxyType[str, float]
    seconds: float

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
    def outside(self) -> tuple[str, ...]:
        """Worlds that are only tested on."""
        return tuple(name for name in self.worlds if name.startswith("outside"))

    def only_set(self, world: str) -> str:
        """Name the one set of a world."""
        return self.worlds[world][0].split(":")[-1]

    @property
    def elsewhere(self) -> tuple[str, ...]:
        """Further tests of what is trained on images: outside, and on the classes it has seen."""
        return () if self.regression else (*self.outside, SEEN)


def _rates(*pairs: tuple[float, float]) -> tuple[tuple[str, ...], ...]:
    return tuple((f"learner.inner_lr={inner}", *outer_rate(outer)) for inner, outer in pairs)


def _ranges(*triples: tuple[float, float, float]) -> tuple[tuple[str, ...], ...]:
    return tuple(
        (f"learner.rate_init=[{low}, {high}]", *outer_rate(outer)) for low, high, outer in triples
    )


def outer_rate(rate: float) -> tuple[str, str]:
    """Set the outer rate, which slots of offsets take too: the outer loop trains them."""
    return f"outer.lr={rate}", f"memory.slot_lr={rate}"


def _worlds(*sets: str, **more: tuple[str, ...]) -> MappingProxyType[str, tuple[str, ...]]:
    singles = {name: (one,) for name, one in zip(FOUR, sets, strict=True)}
    return MappingProxyType({"mixed": sets, **singles, **more})


_FAMILIES = tuple(f"regression:{name}" for name in ("sine", "line", "quadratic", "cubic"))
_HSML = MappingProxyType(
    {
        "mixed": ("regression:hsml4",),
        "narrow": ("regression:hsml4",),
        **{name: (one,) for name, one in zip(FOUR, _FAMILIES, strict=True)},
    }
)
_SMALL_KEYS = ("memory.key.dim=8", "memory.key.heads=2", "memory.key.ff=8", "memory.key.layers=1")

_SMOKE = Scale(
    name="smoke",
    tasks="pictures",
    options=(
        *("train.steps=4", "train.tasks=2", "train.validate_every=2"),
        *("train.validation_tasks=2", "data.n_way=2", "data.n_query=2", "model.filters=2"),
        "learner.steps=2",
    ),
    memory_options=(
        *_SMALL_KEYS,
        *("memory.key.recognition_older=4", "memory.warmup=2"),
        *("memory.capacity=6", "memory.k=3"),
    ),
    worlds=_worlds(
        "synthetic-birds",
        "synthetic-textures",
        "synthetic-aircraft",
        "synthetic-fungi",
        narrow=("synthetic-birds",),
    ),
    image_size=16,
    grid=_rates((0.05, 1e-3), (0.2, 1e-3)),
    own_grids=MappingProxyType({"meta-sgd": _ranges((0.005, 0.1, 1e-3), (0.05, 0.3, 1e-3))}),
    base_rates=False,
    seeds=(0, 1),
    test_tasks=12,
    protocol="standard",
    diagnosed=8,
    capacities=(2, 4),
    neighbours=(2, 4),
    own_capacities=(2, 4),
    own_neighbours=(1, 2),
    longer=MappingProxyType({"maml": 1.5, "anil": 1.5, "meta-sgd": 1.5}),
    costs=MappingProxyType({}),
    seconds=0.05,
)

_CPU = replace(
    _SMOKE,
    name="cpu",
    options=(
        *("train.steps=2500", "train.tasks=4", "train.validate_every=500"),
        *("train.validation_tasks=200", "data.n_query=5", "model.filters=16"),
        "outer.schedule=cosine",
    ),
    # All studies but R3, R6 and R7 measure recall itself, also where the preset would skip it. (Smoke
    # measures nothing.)
    memory_options=("memory.skip_unfamiliar=unset",),
    worlds=_worlds(
        "birds84",
        "aircraft84_47classes",
        "fungi84_27classes",
        "flowers84",
        narrow=("miniimagenet84",),
        diverse=(
            *("birds84", "flowers84"),
            *("cifar100_32#cifar_fs", "omniglot28#vinyals_class_index"),
        ),
        omniglot=("omniglot28#vinyals_class_index",),
        **{
            "outside textures": ("textures84_10classes#test_only",),
            "outside cifar100": ("cifar100_32#cifar_fs",),
            "outside omniglot": ("omniglot28#vinyals_class_index",),
        },
    ),
    image_size=32,
    # Two points are there for the printed variant: the printed rates, for gradients that are summed over the
    # support set, and twenty times the best of base learners, as a mean over twenty neighbours leaves a
    # 21st of the own gradient (A8).
    grid=_rates((0.1, 6e-3), (0.1, 3e-3), (0.1, 0.012), (0.3, 3e-3), (0.001, 0.01), (2.0, 6e-3)),
    own_grids=MappingProxyType(
        {
            "meta-sgd": _ranges(
                *((0.05, 0.15, 6e-3), (0.05, 0.15, 3e-3), (0.05, 0.15, 0.012)),
                *((0.1, 0.5, 3e-3), (0.0005, 0.002, 0.01), (1.0, 3.0, 6e-3)),
            )
        }
    ),
    base_rates=True,
    seeds=(0, 1, 2),
    test_tasks=1000,
    diagnosed=100,
    capacities=(20, 50, 100, 200, 500),
    neighbours=(1, 5, 10, 20, 35),
    own_capacities=(2, 4, 8, 16, 32),
    own_neighbours=(1, 2, 4, 8),
    longer=MappingProxyType({"maml": 1.2, "anil": 1.2, "meta-sgd": 1.2}),
    costs=MappingProxyType(
        {
            **{"maml": 1.0, "maml-offsets": 1.13, "anil": 0.29, "anil-offsets": 0.35},
            **{"meta-sgd": 0.67, "meta-sgd-offsets": 0.7, "bmg": 1.76, "bmg-offsets": 1.87},
            **{"hsml": 1.6, "hsml-offsets": 1.64, "arml": 1.59, "arml-offsets": 1.66},
            **{"tsa-maml": 1.62, "tsa-maml-offsets": 1.71, "musml": 5.48, "musml-offsets": 6.3},
        }
    ),
    seconds=0.1,
)

_PAPER = replace(
    _CPU,
    name="paper",
    options=(
        *("train.steps=50000", "train.validate_every=1000", "train.validation_tasks=200"),
        *("data.n_query=15", "model.filters=32"),
    ),
    worlds=_worlds(
        "plainmulti/CUB_Bird",
        "plainmulti/DTD_Texture",
        "plainmulti/FGVC_Aircraft",
        "plainmulti/FGVCx_Fungi",
        narrow=("miniimagenet",),
        tiered=("tieredimagenet",),
    ),
    image_size=84,
    base_rates=False,
    protocol="paper",
    capacities=(20, 50, 100, 200, 500, 1000, 10000),
    neighbours=(5, 10, 15, 20, 25, 30, 35),
    costs=MappingProxyType({}),
    seconds=2.0,
)

# Higher and lower on both sides of what base learners choose; gradients that are summed over ten shots need a
# tenth of the inner rate, with outer rates low and high.
_POINT_RATES = _rates(
    *((0.003, 3e-3), (0.001, 3e-3), (0.003, 6e-3), (0.003, 0.012), (0.003, 0.024)),
    *((0.01, 3e-3), (0.0003, 3e-3), (0.001, 0.012), (0.0003, 0.012)),
)
_POINT_RANGES = _ranges(
    *((0.001, 0.005, 3e-3), (0.0003, 0.0015, 3e-3), (0.001, 0.005, 6e-3), (0.001, 0.005, 0.012)),
    *((0.001, 0.005, 0.024), (0.003, 0.015, 3e-3), (0.0001, 0.0005, 3e-3)),
    *((0.0003, 0.0015, 0.012), (0.0001, 0.0005, 0.012)),
)
_COORDINATE_RATES = _rates(
    *((0.0003, 3e-3), (0.0001, 3e-3), (0.0003, 6e-3), (0.0003, 0.012), (0.0003, 0.024)),
    *((0.001, 3e-3), (0.0001, 0.012), (0.00003, 3e-3), (0.00003, 0.012)),
)

SCALES: MappingProxyType[str, Scale] = MappingProxyType(
    {
        "smoke/pictures": _SMOKE,
        "smoke/regression": replace(
            _SMOKE,
            tasks="regression",
            options=(
                *("train.steps=4", "train.tasks=2", "train.validate_every=2"),
                *("train.validation_tasks=2", "data.n_query=4", "model.hidden=[4]"),
                "learner.steps=2",
            ),
            worlds=_HSML,
            grid=_POINT_RATES[:2],
            own_grids=MappingProxyType({"meta-sgd": _POINT_RANGES[:2]}),
            seconds=0.02,
        ),
        "cpu/pictures": _CPU,
        "cpu/regression": replace(
            _CPU,
            tasks="regression",
            options=(
                *("train.steps=2000", "train.tasks=16", "train.validate_every=400"),
                *("train.validation_tasks=400", "data.n_shot=10", "outer.schedule=cosine"),
            ),
            worlds=MappingProxyType({**_HSML, "surfaces": ("regression:arml6",)}),
            grid=_POINT_RATES,
            own_grids=MappingProxyType({"meta-sgd": _POINT_RANGES, "musml": _COORDINATE_RATES}),
            base_rates=False,
            own_neighbours=(1, 2, 4, 8, 16),
            longer=MappingProxyType({"maml": 2.0, "anil": 4.0, "meta-sgd": 2.0}),
            costs=MappingProxyType({}),
            seconds=0.02,
        ),
        "paper/pictures": _PAPER,
    }
)


def scale_of(name: str, tasks: str) -> Scale:
    """Return a scale."""
    found = SCALES.get(f"{name}/{tasks}")
    if found is None:
        raise ConfigError(
            f"there is no scale '{name}' for {tasks}.", hint=f"There are: {', '.join(SCALES)}."
        )
    return found
