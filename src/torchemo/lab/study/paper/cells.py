"""Cells that several entries share."""

from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from torchemo.lab.study.entry import MIXED, Cell, Contrast

LEARNERS = {"maml": "MAML", "anil": "ANIL", "meta-sgd": "Meta-SGD"}
"""The base learners of the paper, by preset, and what the tables call them."""

IN_TABLES = {"maml": "MAML", "anil": "ANIL", "meta-sgd": "MetaSGD"}

MEANS = ("learner.inner_loss=mean",)
FIRST_STEP = (*MEANS, "memory.memory_steps=first")
SIMILAR = (*FIRST_STEP, "memory.key.name=statistics", "memory.key.unit=false")
REPAIRED_OPTIONS = (*SIMILAR, "memory.aggregator.name=gated")
"""What R1 changes about the printed variant, one after the other: gradients that are averaged over the
support set, recalled where they belong, by keys that tell tasks apart, beside the own gradient with a gate
per tensor that begins at zero. The last is still a memory of single tasks' gradients, and the first that does
no harm."""
MIXED_OPTIONS = (*MEANS, "memory.reduction=sum", "outer.clip=unset")
"""The printed variant as it was recorded: stored gradients are summed over the support set, the own gradient
is averaged, and outer gradients are not clipped."""


class Kind(NamedTuple):
    """A kind of memory in cells.

    Attributes:
        title: How it is shown.
        preset: Ending of the preset it starts from.
        options: What it changes about that.
        variant: Its name as a variant of EMO, where the preset does not say it.
    """

    title: str
    preset: str
    options: tuple[str, ...] = ()
    variant: str | None = None

    def beside(self, learner: str) -> str:
        """Return the title of a learner with this memory."""
        return f"{learner} + {self.title}"


KINDS: MappingProxyType[str, Kind] = MappingProxyType(
    {
        "-emo-mixed": Kind("EMO (paper, mixed reductions)", "-emo-paper", MIXED_OPTIONS, MIXED),
        "-emo-paper": Kind("EMO (paper)", "-emo-paper"),
        "-emo": Kind("EMO", "-emo"),
        "-offsets": Kind("offsets", "-offsets-joint"),
    }
)
"""Kinds of memory by the ending of a cell's name: three of the paper's, and ours, trained together with the
learner."""
RECORDED = ("-emo-mixed", "-offsets")
"""Those of all studies; only T1 knows the others, which were not recorded yet."""


def suffix(n_shot: int) -> str:
    """Tell cells of several shots apart."""
    return "" if n_shot == 1 else f" {n_shot}-shot"


def base_cell(learner: str, *, n_shot: int = 1, **where: Any) -> Cell:
    """Return a base learner; ``where`` are `Cell.world` and `Cell.tests`."""
    shots = suffix(n_shot)
    title = LEARNERS[learner] + shots
    return Cell(f"{learner}{shots}", title, learner, "base", n_shot=n_shot, **where)


def memory_cell(learner: str, kind: str, *, n_shot: int = 1, **where: Any) -> Cell:
    """Return a base learner with a kind of memory; ``where`` are `Cell.world` and `Cell.tests`."""
    base, memory = base_cell(learner, n_shot=n_shot, **where), KINDS[kind]
    return replace(
        base,
        name=f"{learner}{kind}{suffix(n_shot)}",
        title=memory.beside(LEARNERS[learner]) + suffix(n_shot),
        preset=f"{learner}{memory.preset}",
        role="memory",
        options=memory.options,
        variant=memory.variant,
    )


def rule_cells(*, world: str = "mixed", n_shot: int = 1) -> tuple[Cell, ...]:
    """Return MAML with three inner rules and with memory (T2, F1, F2)."""
    base = base_cell("maml", world=world, n_shot=n_shot)
    others = (
        replace(
            base,
            name=f"maml {rule}{suffix(n_shot)}",
            title=f"MAML, {title}{suffix(n_shot)}",
            options=(f"learner.rule={rule}",),
        )
        for rule, title in (("momentum", "Momentum"), ("adam", "Adam"))
    )
    remembering = (memory_cell("maml", kind, world=world, n_shot=n_shot) for kind in RECORDED)
    return (base, *others, *remembering)


def gain(learner: str, kind: str, *, n_shot: int = 1, **more: Any) -> Contrast:
    """Set a learner with memory against the same learner without."""
    cell, base = f"{learner}{kind}{suffix(n_shot)}", f"{learner}{suffix(n_shot)}"
    return Contrast(f"{cell} vs {learner}", cell, base, "better", **more)
