"""L5 to L7: other learners and shots, other streams, and the paper's claims where tasks come back."""

from dataclasses import replace
from functools import partial

from torchemo.lab.study.entry import Cell, Contrast, Expectation, entry, versus
from torchemo.lab.study.scales import ONCE, Scale, rates
from torchemo.lab.study.streams.entries import (
    COMPARED,
    CONTROLLERS,
    FEW,
    GAINS,
    TITLES,
    UNHARMED,
    drawn,
    first_learner,
    whole_streams,
)
from torchemo.lab.study.streams.kinds import (
    cell_name,
    cells_of,
    paired,
    streams_of,
    where,
    worlds_of,
)

FIVE = " 5-shot"


def _other_cells(scale: Scale) -> tuple[Cell, ...]:
    found: list[Cell] = []
    few, users = streams_of(scale, users=20), streams_of(scale)
    for world in worlds_of(scale):
        found += cells_of("meta-sgd", scale, world, FEW, title="Meta-SGD", streams=few)
        found += cells_of(
            *("anil", scale, world, (*FEW, "means")),
            title="ANIL",
            streams=users,
            suffix=FIVE,
            n_shot=5,
        )
    return tuple(found)


def _other_contrasts(scale: Scale) -> tuple[Contrast, ...]:
    found: list[Contrast] = []
    for learner, suffix in (("meta-sgd", ""), ("anil", FIVE)):
        found += paired(learner, scale, GAINS, claims=("C1",), suffix=suffix)
        found += paired(learner, scale, COMPARED, suffix=suffix)
        found += paired(learner, scale, UNHARMED, suffix=suffix, test=ONCE)
    return drawn(scale, tuple(found), _other_cells)


L5 = entry("L5", _other_cells, _other_contrasts)

SHARES = {"none": 0.0, "half": 0.5}
"""How many of the visits belong to tasks that are seen once; a fifth in L1."""
LAWS = ("uniform", "bursts", "drift")
"""Zipf's law is L4's."""
SLOTS = (2, 5, 10, 20, 40)
NEIGHBOURS = (1, 2, 5, 10, 15, 20)


def _one_world(scale: Scale) -> tuple[str, ...]:
    """Return the one task set of studies with very many cells: birds, or all families of curves."""
    return worlds_of(scale)[:1]


def _stream_cells(scale: Scale) -> tuple[Cell, ...]:
    learner, found = first_learner(scale), list[Cell]()
    title = TITLES[learner]
    for world in _one_world(scale):
        kinds = partial(cells_of, learner, scale, world, title=title)
        found += kinds(("none",))  # whose runs the others share
        for name, share in SHARES.items():
            streams = streams_of(scale, users=20, once=share)
            found += kinds(
                ("none", "names", "images", "told"), streams=streams, suffix=f", {name} once"
            )
        for law in LAWS:
            streams = streams_of(scale, users=20, pool=20, law=law, once=0.0, length=100)
            found += whole_streams(
                kinds(("none", "names", "told"), streams=streams, suffix=f", {law}")
            )
            for controller in CONTROLLERS:
                suffix = f", {law} {controller}"
                full = kinds(
                    ("told",), streams=streams, suffix=suffix, slots=10, controller=controller
                )
                found += whole_streams(full)
        zipf = streams_of(scale, users=20, pool=20, law="zipf", once=0.0, length=100)
        found += whole_streams(kinds(("none", "told"), streams=zipf, suffix=", zipf"))
        for slots in SLOTS:
            few = kinds(("told",), streams=zipf, suffix=f", zipf T={slots}", slots=slots)
            found += whole_streams(few)
        often = streams_of(scale, users=50, pool=2, visits=21, once=0.0)
        every = ("none", *(f"k={k}" for k in NEIGHBOURS))
        found += kinds(every, streams=often, suffix=", 21 visits")
    return tuple(found)


def _stream_contrasts(scale: Scale) -> tuple[Contrast, ...]:
    found: list[Contrast] = []
    learner, worlds = first_learner(scale), _one_world(scale)
    for name in SHARES:
        suffix = f", {name} once"
        found += paired(learner, scale, GAINS, worlds=worlds, suffix=suffix)
        found += paired(learner, scale, UNHARMED[:2], worlds=worlds, suffix=suffix, test=ONCE)
    for world in worlds:
        place = where(scale, world)
        told, none = (cell_name(learner, place, kind) for kind in ("told", "none"))
        for law in LAWS:
            found += _by_controller(told, none, law)
        found += _by_size(told, none)
        found += _by_neighbours(cell_name(learner, place, "k="), none)
    return drawn(scale, tuple(found), _stream_cells)


def _by_controller(told: str, none: str, law: str) -> list[Contrast]:
    """Return the contrasts of C3 under another law than Zipf's, and what the law leaves to gain."""
    fifo, lru, clock = (f"{told}, {law} {controller}" for controller in CONTROLLERS)
    return [
        versus(f"{told}, {law}", f"{none}, {law}", "better"),
        versus(lru, fifo, "better", claims=("C3",)),
        versus(clock, fifo, "better", claims=("C3",)),
        versus(fifo, f"{none}, {law}", "worse", claims=("C3",)),
    ]


def _by_size(told: str, none: str) -> list[Contrast]:
    """Return the contrasts of C4: more slots are better, up to where they are not."""
    sizes = {slots: f"{told}, zipf T={slots}" for slots in SLOTS}
    grows = [
        (sizes[2], f"{none}, zipf"),
        *((sizes[b], sizes[a]) for a, b in ((2, 5), (5, 10), (10, 20))),
    ]
    found = [versus(first, second, "better", claims=("C4",)) for first, second in grows]
    return [*found, versus(f"{told}, zipf", sizes[40], "no better", claims=("C4",))]


def _by_neighbours(cell: str, none: str) -> list[Contrast]:
    """Return the contrasts of C5: more visits are better up to 15, and 20 no better than these."""
    end = ", 21 visits"
    pairs: list[tuple[str, str, Expectation]] = [
        (f"{cell}1{end}", f"{none}{end}", "better"),
        *((f"{cell}{b}{end}", f"{cell}{a}{end}", "better") for a, b in ((1, 5), (5, 15))),
        (f"{cell}20{end}", f"{cell}15{end}", "no better"),
    ]
    return [versus(*pair, claims=("C5",)) for pair in pairs]


L6 = entry("L6", _stream_cells, _stream_contrasts)

COMPANY = ("none", "told", "images", "same domain", "other domains")
RULES = {"momentum": "Momentum", "adam": "Adam"}


def _claimed_cells(scale: Scale) -> tuple[Cell, ...]:
    streams = streams_of(scale, users=20, pool=8)
    learner = first_learner(scale)
    found = cells_of(learner, scale, "mixed", COMPANY, title=TITLES[learner], streams=streams)
    for world in _one_world(scale):
        if world == "mixed":
            base = found[0]
        else:
            own = cells_of(learner, scale, world, ("none", "told"), title=TITLES[learner])
            found += own
            base = own[0]
        found += [_with_rule(base, rule, scale) for rule in RULES]
    return tuple(found)


def _with_rule(cell: Cell, rule: str, scale: Scale) -> Cell:
    """Return a learner without memory whose inner steps follow another rule, at rates of its own."""
    (inner, outer) = (0.003, 0.006) if scale.regression else (0.1, 0.006)
    if scale.network is not None:
        inner, outer = 0.02, 0.001
    return replace(
        cell,
        name=f"{cell.name} {rule}",
        title=f"{cell.title}, {RULES[rule]}",
        options=(*cell.options, f"learner.rule={rule}"),
        tests=(),
        grid=rates((inner, outer), (inner / 8, outer)),
    )


def _claimed_contrasts(scale: Scale) -> tuple[Contrast, ...]:
    learner = first_learner(scale)
    found: list[Contrast] = []
    if not scale.regression:
        none = cell_name(learner, "mixed", "none")
        pairs: dict[str, Expectation] = {
            "same domain": "better", "other domains": "worse", "told": "shown", "images": "shown",
        }  # fmt: skip
        for kind, expect in pairs.items():
            claims = () if expect == "shown" else ("C6",)
            found.append(versus(cell_name(learner, "mixed", kind), none, expect, claims=claims))
    for world in _one_world(scale):
        told, none = (cell_name(learner, where(scale, world), k) for k in ("told", "none"))
        momentum, adam = (f"{none} {rule}" for rule in RULES)
        for first, second in ((told, none), (none, momentum), (momentum, adam)):
            found.append(versus(first, second, "better", claims=("C7",)))
    return drawn(scale, tuple(found), _claimed_cells)


L7 = entry("L7", _claimed_cells, _claimed_contrasts)
