"""The kinds of memory that studies of tasks that come back compare. No torch here."""

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple, final

from torchemo.lab.study.entry import LIFELONG, Cell, Contrast, Expectation, Role
from torchemo.lab.study.scales import FOUR, ONCE, Scale, rates
from torchemo.lab.study.streams.visits import Streams, Visits

PICTURES = 2.0
"""Mean likelihood ratio from which on a set of classes counts as recognised, chosen on validation classes."""
SHARPNESS = 40.0
"""Factor of cosines beside an adapted network, chosen on validation classes."""

RIGHT = (90, 80, 60, 40)
"""Per cent of the visits for which the right task is told, where others are told wrongly on purpose."""


@final
@dataclass(frozen=True)
class Kind:
    """A kind of memory.

    Attributes:
        title: How it is shown.
        options: What it does (`Visits`).
        role: memory, or control: what is broken on purpose, and bounds.
        once: Also score tasks that are seen once.
    """

    title: str
    options: MappingProxyType[str, Any]
    role: Role = "memory"
    once: bool = False


def _kind(title: str, role: Role = "memory", *, once: bool = False, **options: Any) -> Kind:
    return Kind(title, MappingProxyType(options), role, once)


KINDS: MappingProxyType[str, Kind] = MappingProxyType(
    {
        "none": _kind("no memory", "base", once=True),
        "names": _kind("found by class names", once=True, find="names"),
        "images": _kind("found by images", once=True, find="task ratio", threshold=PICTURES),
        "told": _kind("told which task it is", find="task"),
        "both": _kind(
            "found by names, with class means",
            once=True,
            find="names",
            answer="both",
            sharpness=SHARPNESS,
        ),
        "images both": _kind(
            "found by images, with class means",
            once=True,
            find="task ratio",
            threshold=PICTURES,
            answer="both",
            sharpness=SHARPNESS,
        ),
        "means": _kind("class means alone, by names", once=True, find="names", answer="means"),
        "images means": _kind(
            "class means alone, by images",
            once=True,
            find="task ratio",
            threshold=PICTURES,
            answer="means",
        ),
        "replay": _kind("replay of all images", "control", find="task", replay=True),
        "random": _kind("random visits", "control", find="random"),
        "noise": _kind("random contents", "control", find="task", broken="contents"),
        "wrong labels": _kind("wrong label order", "control", find="task", broken="labels"),
        "secant": _kind("found by names, with curvature", find="names", content="secant"),
        "curvature": _kind("told, with all curvature", find="task", content="gauss_newton"),
        "first once": _kind("told, first gradient at the first step", find="task", first=1),
        "first always": _kind("told, first gradient at all steps", find="task", first=99),
        "sum": _kind("told, Sum", find="task", join="sum"),
        "alone": _kind("told, recall alone", find="task", own=False),
        "k=1": _kind("told, the last visit", find="task", k=1),
        "k=2": _kind("told, the last two visits", find="task", k=2),
        **{
            f"k={k}": _kind(f"told, the last {k} visits", find="task", k=k) for k in (5, 10, 15, 20)
        },
        "same domain": _kind("visits of other tasks of its domain", find="same domain"),
        "other domains": _kind("visits of tasks of other domains", find="other domains"),
        "images sure": _kind(
            "found by images, if sure", once=True, find="task ratio", calibrated=True
        ),
        "shares": _kind("found by images, in shares", once=True, find="shares", calibrated=True),
        "wrong shares": _kind("shares of other classes", "control", find="shares", broken="labels"),
        "shares means": _kind(
            "class means alone, in shares",
            once=True,
            find="shares",
            calibrated=True,
            answer="means",
        ),
        "shares weighed": _kind(
            "in shares, weighed with class means",
            once=True,
            find="shares",
            calibrated=True,
            answer="mixture",
        ),
        "weighed": _kind(
            "found by names, weighed with class means",
            once=True,
            find="names",
            calibrated=True,
            answer="mixture",
        ),
        **{
            f"{share} % right": _kind(
                f"told, {share} % rightly", "control", find="task", right=share / 100
            )
            for share in RIGHT
        },
        "by class": _kind(
            "single classes found by images", once=True, find="class ratio", threshold=12.0
        ),
        "by cosine": _kind("tasks found by cosine", once=True, find="task cosine", threshold=0.6),
        "by classifiers": _kind(
            "found by past classifiers", once=True, find="likelihood", threshold=-0.5
        ),
        "by mean": _kind("found by the order-free mean", once=True, find="mean", threshold=0.9),
    }
)


def streams_of(scale: Scale, **options: Any) -> Streams:
    """Return the users of a study at a scale."""
    small = {"users": 2, "pool": 2, "visits": 2, "n_query": 2}
    usual = small if scale.name == "smoke" else {"users": 60}
    given = {**usual, **options}
    if scale.name == "smoke":
        given |= small
    if scale.regression:
        given["labels"] = "kept"
    return Streams(**given)


def worlds_of(scale: Scale) -> tuple[str, ...]:
    """Return what learners are trained on: each set of features by itself, all sets of images together."""
    return FOUR if scale.network is not None else ("mixed",)


def where(scale: Scale, world: str) -> str:
    """Name a task set in the names of cells."""
    return scale.only_set(world) if world in FOUR else world


def cell_name(learner: str, place: str, kind: str) -> str:
    """Name a cell."""
    return f"{learner} {place} {kind}"


def cells_of(
    learner: str,
    scale: Scale,
    world: str,
    kinds: tuple[str, ...],
    *,
    title: str,
    streams: Streams | None = None,
    suffix: str = "",
    n_shot: int = 1,
    **options: Any,
) -> list[Cell]:
    """Return one cell per kind of memory; all share the runs of the learner without memory."""
    base = cell_name(learner, where(scale, world), "none") + (
        "" if n_shot == 1 else f" {n_shot}-shot"
    )
    shown = streams_of(scale) if streams is None else streams
    found = []
    for name in kinds:
        kind = KINDS[name]
        if scale.regression and not _for_functions(kind):
            continue
        called = cell_name(learner, where(scale, world), name) + suffix
        cell = Cell(
            called,
            f"{title}, {_shown(kind, scale)}{suffix}",
            learner,
            kind.role,
            options=_own(learner, scale),
            world=world,
            tests=(ONCE,) if kind.once and shown.once else (),
            n_shot=n_shot,
            of=None if called == base else base,
            grid=grid_of(scale),
            variant=None if kind.role == "base" else LIFELONG,
            visits=Visits(shown, **{**kind.options, **options}),
        )
        found.append(cell)
    return found


def grid_of(scale: Scale) -> tuple[tuple[str, ...], ...]:
    """Return the rates where there is no grid: those that earlier studies and the demo chose."""
    if scale.name == "smoke" or scale.network is not None:
        return ()
    return rates((0.003, 0.006)) if scale.regression else rates((0.1, 0.006))


def _own(learner: str, scale: Scale) -> tuple[str, ...]:
    """Let all classes begin with the same row of the head, where it is learned."""
    if scale.regression:
        return ("data.n_shot=5",)
    options = () if learner == "protonet" else ("learner.shared_row=true",)
    normalised = scale.tasks == "images"
    return (*options, "model.bn=support") if normalised else options


def _shown(kind: Kind, scale: Scale) -> str:
    """Return the title of a kind; functions have points where classes have images."""
    return kind.title.replace("images", "points") if scale.regression else kind.title


def _for_functions(kind: Kind) -> bool:
    """Return whether a kind of memory makes sense where there are no classes."""
    answers = kind.options.get("answer", "adapted") == "adapted"
    # A function has one name, and to find it by that is to be told which it is.
    told = kind.options.get("find", "nothing") in ("nothing", "task", "random")
    return answers and told and kind.options.get("broken") != "labels"


class Pair(NamedTuple):
    """Two kinds of memory to compare."""

    kind: str
    against: str
    expect: Expectation = "shown"


def paired(
    learner: str,
    scale: Scale,
    pairs: tuple[Pair, ...],
    *,
    worlds: tuple[str, ...] | None = None,
    suffix: str = "",
    test: str | None = None,
    claims: tuple[str, ...] = (),
) -> list[Contrast]:
    """Return contrasts at the last visit, in every task set."""
    found = []
    for world in worlds or worlds_of(scale):
        place = where(scale, world)
        for kind, against, expect in pairs:
            first, second = (cell_name(learner, place, k) + suffix for k in (kind, against))
            named = f"{first} vs {against}" + ("" if test is None else ", seen once")
            found.append(Contrast(named, first, second, expect, test=test, claims=claims))
    return found


def by_visit(contrasts: list[Contrast], visit: int) -> list[Contrast]:
    """Return contrasts at an earlier visit, counted from 1."""
    return [
        replace(
            c, name=f"{c.name}, visit {visit}", step=visit - 1, against_step=visit - 1, claims=()
        )
        for c in contrasts
    ]
