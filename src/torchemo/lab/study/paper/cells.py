"""Cells that several entries share."""

from torchemo.lab.study.entry import Cell, Contrast

LEARNERS = {"maml": "MAML", "anil": "ANIL", "meta-sgd": "Meta-SGD"}
"""The base learners of the paper, by preset, and what the tables call them."""

IN_TABLES = {"maml": "MAML", "anil": "ANIL", "meta-sgd": "MetaSGD"}

READINGS = {"-emo-paper": "EMO (literal)", "-emo": "EMO (ours)"}
"""The paper's reading with its printed choices, and the one we use ourselves."""


MEANS = ("emo.value.reduction=mean", "outer.clip=10.0")
FIRST_STEP = (*MEANS, "emo.value.memory_steps=first")
SIMILAR = (*FIRST_STEP, "emo.key.network=statistics", "emo.key.training=none")
MENDED_OPTIONS = (*SIMILAR, "emo.aggregator.kind=gated")
"""What R1 changes about the literal reading, one after the other: gradients as large as the own one (and
outer ones clipped, as those of base learners are), recalled where they belong, by keys that tell tasks apart,
beside the own gradient with a gate per tensor that begins at zero. The last is still a memory of single
tasks' gradients, and the first that does no harm."""


def suffix(n_shot: int) -> str:
    """Tell cells of several shots apart."""
    return "" if n_shot == 1 else f" {n_shot}-shot"


def base_cell(
    learner: str, *, world: str = "mixed", tests: tuple[str, ...] = (), n_shot: int = 1
) -> Cell:
    """Return a base learner."""
    return Cell(
        f"{learner}{suffix(n_shot)}",
        LEARNERS[learner] + suffix(n_shot),
        learner,
        "base",
        world=world,
        tests=tests,
        n_shot=n_shot,
    )


def emo_cells(
    learner: str, *, world: str = "mixed", tests: tuple[str, ...] = (), n_shot: int = 1
) -> tuple[Cell, ...]:
    """Return a base learner with memory in both readings."""
    return tuple(
        Cell(
            f"{learner}{kind}{suffix(n_shot)}",
            f"{LEARNERS[learner]} + {title}{suffix(n_shot)}",
            f"{learner}{kind}",
            "emo",
            world=world,
            tests=tests,
            n_shot=n_shot,
        )
        for kind, title in READINGS.items()
    )


def our_cell(learner: str, *, tests: tuple[str, ...] = ()) -> Cell:
    """Return a base learner with memory in the reading we use ourselves."""
    return next(cell for cell in emo_cells(learner, tests=tests) if is_ours(cell))


def is_ours(cell: Cell) -> bool:
    """Whether a cell has memory in the reading we use ourselves."""
    return cell.preset.endswith("-emo")


def rule_cells(*, world: str = "mixed", n_shot: int = 1) -> tuple[Cell, ...]:
    """Return MAML with three inner rules and with memory in both readings (T2, F1, F2)."""
    rules = {"momentum": "Momentum", "adam": "Adam"}
    others = tuple(
        Cell(
            f"maml {rule}{suffix(n_shot)}",
            f"MAML, {title}{suffix(n_shot)}",
            "maml",
            "base",
            options=(f"learner.rule={rule}",),
            world=world,
            n_shot=n_shot,
        )
        for rule, title in rules.items()
    )
    where = {"world": world, "n_shot": n_shot}
    return (base_cell("maml", **where), *others, *emo_cells("maml", **where))  # type: ignore[arg-type]


def gain(
    learner: str,
    kind: str,
    *,
    n_shot: int = 1,
    paper: float | None = None,
    claims: tuple[str, ...] = (),
) -> Contrast:
    """Set a learner with memory against the same learner without."""
    cell = f"{learner}{kind}{suffix(n_shot)}"
    return Contrast(
        f"{cell} vs {learner}",
        cell,
        f"{learner}{suffix(n_shot)}",
        "better",
        paper=paper,
        claims=claims,
    )
