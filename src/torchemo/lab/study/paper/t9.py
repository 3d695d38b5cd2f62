"""T9: every system of the paper's last table, on one trunk and by one recipe."""

from dataclasses import replace
from types import MappingProxyType

from torchemo.lab.study.entry import Cell, Contrast, entry, versus
from torchemo.lab.study.paper.cells import suffix
from torchemo.lab.study.paper.t7_to_t8 import remembering, sizes
from torchemo.lab.study.scales import Scale

SYSTEMS: MappingProxyType[str, str] = MappingProxyType(
    {
        "protonet": "ProtoNet",
        "dense-cosine": "Dense cosine classifier, then nearest mean",
        "matchingnet": "MatchingNet",
        "relationnet": "RelationNet",
        "metaoptnet-ridge": "MetaOptNet, ridge",
        "metaoptnet-svm": "MetaOptNet, SVM",
        "dynamic-fs": "Dynamic FS",
        "tadam": "TADAM",
        "tapnet": "TapNet",
        "can": "CAN",
        "ctm": "CTM, our reading",
        "snail": "SNAIL",
        "variational-fsl": "VariationalFSL, our reading",
        "hvm": "HVM, our reading",
    }
)
"""Systems without an inner loop, by preset."""

LOOPED: MappingProxyType[str, tuple[str, ...]] = MappingProxyType(
    {"anil": ("-emo-paper",), "mtl": ("-emo",), "arml": ("-emo-paper", "-offsets")}
)
"""Systems with one, and the memories they are also run with."""

TITLES = {"anil": "ANIL", "mtl": "MTL", "arml": "ARML"}
BASELINES = ("protonet", "dense-cosine")
"""What every system is compared with."""

TRUNKS: MappingProxyType[str, tuple[str, ...]] = MappingProxyType(
    {
        "": ("model.name=conv4", "model.filters=64"),
        " on resnet12": ("model.name=resnet12", "model.channels=narrow"),
    }
)
"""Networks of the small comparison: 64 filters, and a ResNet-12 of 8.0 million parameters."""

_WIDE = ("model.name=resnet12", "model.channels=wide")
_TINY = ("model.filters=8",)
_DENSE_FIRST = ("ctm", "dynamic-fs", "mtl")
"""Systems whose networks see all base classes at once before the episodes, by default hundreds of times."""
_BRIEFLY = ("train.dense.steps=4", "train.dense.batch=16")
_AT_ONCE = (("learner.bn_over=batch",),)
"""All tasks of a step in one pass of the network; TADAM's tasks have networks of their own."""
_RECIPE = ("train.steps=100", "train.validate_every=100", "train.validation_tasks=20")
_DENSE = (
    *("train.dense.steps=all", "train.dense.batch=120", "train.dense.lr=0.003"),
    "train.dense.schedule=cosine",
)
"""The baseline: as many images per step as tasks of five classes with five queries bring, all base classes at
once, and no episode."""
PRESETS = {"dense-cosine": "nearest-mean"}
"""Systems that are a preset trained in another way."""


def _cells(scale: Scale) -> tuple[Cell, ...]:
    return tuple(
        cell
        for world, n_shot, trunk in _settings(scale)
        for learner in (*SYSTEMS, *LOOPED)
        for cell in _with_memories(_base(learner, world, n_shot, trunk, scale))
    )


def _settings(scale: Scale) -> tuple[tuple[str, int, str], ...]:
    """List task set, shots and trunk of every part of the table."""
    if scale.name == "smoke":
        return (("narrow", 1, ""),)
    if scale.name == "cpu":
        return tuple(("cifar-fs", n_shot, trunk) for trunk in TRUNKS for n_shot in (1, 5))
    return tuple((world, n_shot, "") for world in ("narrow", "tiered") for n_shot in (1, 5))


def _base(learner: str, world: str, n_shot: int, trunk: str, scale: Scale) -> Cell:
    where = f" on {world}" if scale.name == "paper" else trunk
    options = {
        "smoke": _TINY,
        "cpu": (*TRUNKS[trunk], *_RECIPE),
        "paper": (*_WIDE, *sizes(learner, scale)),
    }[scale.name]
    # The networks of systems without an inner loop keep running averages, as published.
    options += ("model.bn=running",) if learner in SYSTEMS else ()
    options += _DENSE if learner == "dense-cosine" else ()
    options += _BRIEFLY if learner in _DENSE_FIRST and scale.name == "smoke" else ()
    return Cell(
        f"{learner}{where}{suffix(n_shot)}",
        f"{(SYSTEMS | TITLES)[learner]}{where}{suffix(n_shot)}",
        PRESETS.get(learner, learner),
        "base",
        options=options,
        world=world,
        n_shot=n_shot,
        grid=_grid(learner, scale),
    )


def _grid(learner: str, scale: Scale) -> tuple[tuple[str, ...], ...]:
    """Return the rates that a base may choose among: one choice where there is no inner loop."""
    if learner in SYSTEMS:
        return ((),) if learner == "tadam" else _AT_ONCE
    return scale.grid[:1] if scale.name == "cpu" else ()


def _with_memories(base: Cell) -> tuple[Cell, ...]:
    kinds = LOOPED.get(base.preset, ())
    made = (remembering(base, TITLES[base.preset], kind) for kind in kinds)
    return (base, *(replace(cell, of=base.name, grid=()) for cell in made))


def _contrasts(scale: Scale) -> tuple[Contrast, ...]:
    cells = _cells(scale)
    found = []
    for cell in cells:
        system, space, where = cell.name.partition(" ")
        others = [f"{base}{space}{where}" for base in BASELINES if base != system]
        found += [versus(cell.name, other) for other in others]
        if cell.of is not None:
            found.append(versus(cell.name, cell.of, "better"))
    return tuple(found)


T9 = entry("T9", _cells, _contrasts)
