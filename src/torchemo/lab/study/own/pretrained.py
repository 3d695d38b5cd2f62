"""P1, P2: what meta-training and memory gain on features of a pretrained network. Not in the paper."""

from dataclasses import replace
from types import MappingProxyType

from torchemo.lab.study.entry import Cell, Contrast, entry, versus
from torchemo.lab.study.paper.cells import suffix
from torchemo.lab.study.scales import FOUR, Scale

NETWORK = "efficientnet-lite0"
SHOTS = (1, 5)

_COMMON = ("model.size=160", "data.version=2", "data.drop_duplicates=true")
_OFFSETS = (
    *("memory.name=offsets", "memory.capacity=8", "memory.k=unset", "memory.steps=same"),
    *("memory.slot_lr=3e-4", "memory.skip_unfamiliar=0.9", "memory.skip_unhelpful=0.0"),
    *("memory.key.name=learned-statistics", "memory.key.training=self_recognition"),
)
"""The memory of the presets ``-offsets``, for learners whose presets have none: a declared experiment."""

BASES: MappingProxyType[str, str] = MappingProxyType(
    {
        "nearest-mean": "Nearest mean",
        "adapted-mean": "Adapted mean",
        "protonet": "ProtoNet",
        "metaoptnet-ridge": "MetaOptNet, ridge",
        "anil": "ANIL",
        "maml": "MAML",
    }
)
MEMORIES: MappingProxyType[str, tuple[str, ...]] = MappingProxyType(
    {
        "adapted-mean": ("-offsets",),
        "protonet": ("-offsets",),
        "metaoptnet-ridge": ("-offsets",),
        "anil": ("-emo", "-offsets"),
        "maml": ("-emo", "-offsets"),
    }
)
WITHOUT_PRESET = ("protonet", "metaoptnet-ridge")


def _cells(scale: Scale) -> tuple[Cell, ...]:
    found = []
    for n_shot in SHOTS:
        for learner in BASES:
            found.append(_cell(scale, learner, "", n_shot))
            found += [_cell(scale, learner, kind, n_shot) for kind in MEMORIES.get(learner, ())]
    return tuple(found)


def _cell(scale: Scale, learner: str, kind: str, n_shot: int) -> Cell:
    own = kind != "" and learner in WITHOUT_PRESET
    title = {"": "", "-emo": " + EMO", "-offsets": " + offsets"}[kind]
    return Cell(
        f"{learner}{kind}{suffix(n_shot)}",
        f"{BASES[learner]}{title}{suffix(n_shot)}",
        learner if own else f"{learner}{kind}",
        "memory" if kind else "base",
        options=(*_COMMON, *(_OFFSETS if own else ())),
        tests=scale.textures,
        n_shot=n_shot,
        grid=((),),
        network=NETWORK,
    )


def _contrasts(scale: Scale) -> tuple[Contrast, ...]:
    pairs = []
    for n_shot in SHOTS:
        end = suffix(n_shot)
        for learner in BASES:
            kinds = ("", *MEMORIES.get(learner, ()))
            pairs += [(f"{learner}{kind}{end}", f"nearest-mean{end}") for kind in kinds]
            pairs += [(f"{learner}{kind}{end}", f"{learner}{end}") for kind in kinds[1:]]
    return tuple(
        versus(cell, against, test=test)
        for cell, against in pairs
        if cell != against
        for test in (None, *scale.textures)
    )


P1 = entry("P1", _cells, _contrasts)

_LONG = ("train.steps=1500", "train.validate_every=250")
_OUTER = tuple((f"outer.lr={rate}",) for rate in (0.002, 0.0005))
"""Learners with an inner loop train longer than in P1, and choose their outer rate on validation tasks."""


def _own_cells(scale: Scale) -> tuple[Cell, ...]:
    return tuple(
        _own_cell(scale, world, learner, kind, n_shot)
        for n_shot in SHOTS
        for world in FOUR
        for learner in BASES
        for kind in ("", *(k for k in MEMORIES.get(learner, ()) if k == "-emo"))
    )


def _own_cell(scale: Scale, world: str, learner: str, kind: str, n_shot: int) -> Cell:
    """Return the cell of a learner that is trained for one set alone."""
    mixed = _cell(scale, learner, kind, n_shot)
    looped = "-emo" in MEMORIES.get(learner, ())
    place = scale.only_set(world)
    return replace(
        mixed,
        name=f"{learner}{kind} {place}{suffix(n_shot)}",
        title=f"{mixed.title}, {place}",
        world=world,
        options=(*mixed.options, *(_LONG if looped else ())),
        tests=(),
        of=f"{learner} {place}{suffix(n_shot)}" if kind else None,
        grid=() if kind else _OUTER if looped else ((),),
    )


def _own_contrasts(scale: Scale) -> tuple[Contrast, ...]:
    cells = {cell.name for cell in _own_cells(scale)}
    pairs = []
    for end in (f" {scale.only_set(world)}{suffix(n)}" for world in FOUR for n in SHOTS):
        pairs += [(f"{learner}{end}", f"nearest-mean{end}") for learner in BASES]
        pairs += [(f"{learner}-emo{end}", f"{learner}{end}") for learner in BASES]
    return tuple(
        versus(cell, against) for cell, against in pairs if cell != against and cell in cells
    )


P2 = entry("P2", _own_cells, _own_contrasts)
