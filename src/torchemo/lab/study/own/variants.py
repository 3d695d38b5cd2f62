"""R1: from the printed variant of EMO to offsets, one hypothesis at a time. Not in the paper."""

from dataclasses import replace

from torchemo.lab.study.entry import MIXED, OFFSETS, REPAIRED, Cell, Contrast, entry, versus
from torchemo.lab.study.paper.cells import (
    FIRST_STEP,
    MEANS,
    MIXED_OPTIONS,
    REPAIRED_OPTIONS,
    SIMILAR,
    base_cell,
)
from torchemo.lab.study.scales import Scale

_PRINTED = {
    MIXED: ("as printed, with mixed reductions", MIXED_OPTIONS),
    "means": ("gradients averaged over the support set", MEANS),
    "first step": ("and recalled at the first step only", FIRST_STEP),
    "similar": ("and keys that tell tasks apart", SIMILAR),
    "gates": ("and a learned gate per tensor", REPAIRED_OPTIONS),
    "meta": ("and meta-gradients as values", (*REPAIRED_OPTIONS, "memory.content=meta")),
}
"""Each changes one thing about the variant above it; ``means`` also clips outer gradients as MAML does."""

_ALIGNED = (
    "aligned",
    "gates, and head gradients matched class by class",
    (*REPAIRED_OPTIONS, "memory.head_align=hungarian"),
)
_PROTO, _PROTO_GATES = "proto-maml", "proto-maml gates"
"""Two ways out of random labels, where tasks have any: recalled heads are put into the task's own order of
classes, or a learner whose head is made of the support set, so that relabelling changes no gradient of its
body, with a memory of that alone."""

_SLOTS = (2, 4, 8, 16, 32)
_PLAIN_KEYS = ("memory.key.name=statistics",)
_TRANSFORMER = (
    *("memory.key.name=transformer", "memory.key.layers=2"),
    "memory.key.training=self_recognition",
)
_OF_OFFSETS = {
    "statistics": ("keys without weights", _PLAIN_KEYS),
    "transformer": ("keys from a Transformer", _TRANSFORMER),
    "through the outer loss": ("keys trained by the outer loss", ("memory.key.training=outer",)),
    "dropout": ("a tenth of the tasks without recall", ("memory.recall_dropout=0.1",)),
    "empty slot": ("and an empty slot for unlike tasks", ("memory.null_distance=1.0",)),
    "decay": ("slots that fade", ("memory.slot_decay=1.0",)),
    **{f"{n} slots": (f"{n} slots", (f"memory.capacity={n}",)) for n in _SLOTS},
}
"""Each changes one thing about our memory of offsets, and keeps its rates."""

_NO_DROPOUT = ("memory.recall_dropout=0.0",)
_ALL_TENSORS = {
    "scales and shifts": ("no task without recall", _NO_DROPOUT),
    "all tensors": (
        "all tensors, no task without recall",
        (*_NO_DROPOUT, "memory.tensors=all"),
    ),
}
"""The same on images, where slots are for normalisation parameters and a fifth of the tasks skip recall."""


def _changes(scale: Scale) -> dict[str, tuple[str, tuple[str, ...]]]:
    if not scale.regression:
        return {**_OF_OFFSETS, **_ALL_TENSORS}
    title, options = _OF_OFFSETS["transformer"]
    return {**_OF_OFFSETS, "transformer": (title, (*options, "memory.key.embedder=pairs"))}


def _cells(scale: Scale) -> tuple[Cell, ...]:
    printed = [_single(scale, name, *about) for name, about in _PRINTED.items()]
    offsets = Cell(OFFSETS, "offsets", "maml-offsets-joint", "memory", tests=scale.elsewhere)
    changed = [
        replace(offsets, name=name, title=f"offsets, {title}", options=options, of=OFFSETS)
        for name, (title, options) in _changes(scale).items()
    ]
    base = base_cell("maml", tests=scale.elsewhere)
    return (base, *printed, offsets, *changed, *_without_label_order(scale))


def _single(scale: Scale, name: str, title: str, options: tuple[str, ...]) -> Cell:
    """Return MAML with a memory of single tasks' gradients."""
    # Where the own gradient keeps its rate at all steps but the first, that of the base learner fits.
    own = scale.name == "paper" or FIRST_STEP[-1] not in options
    return Cell(
        name,
        f"EMO, {title}",
        "maml-emo-paper",
        "memory",
        options=options,
        of=None if own else "maml",
        variant=MIXED if name == MIXED else REPAIRED,
    )


def _without_label_order(scale: Scale) -> tuple[Cell, ...]:
    """Return what makes gradients of single tasks independent of the order of their classes."""
    if scale.regression:
        return ()
    rates = None if scale.name == "paper" else "maml"
    proto = Cell(_PROTO, "Proto-MAML", "proto-maml", "base", of=rates)
    gates = replace(
        proto,
        name=_PROTO_GATES,
        title="Proto-MAML + EMO, a learned gate per tensor",
        preset="proto-maml-emo-paper",
        role="memory",
        options=(*REPAIRED_OPTIONS, "memory.head_align=drop"),
        variant=REPAIRED,
    )
    return (_single(scale, *_ALIGNED), proto, gates)


def _contrasts(scale: Scale) -> tuple[Contrast, ...]:
    found: list[Contrast] = []
    apart = (_PROTO, _PROTO_GATES)
    for cell in (cell for cell in _cells(scale)[1:] if cell.name not in apart):
        found.append(versus(cell.name, "maml", "better"))
        found += [versus(cell.name, "maml", test=test) for test in cell.tests]
    found += [versus(name, OFFSETS) for name in _changes(scale)]
    if not scale.regression:
        found.append(versus(_ALIGNED[0], "gates", "better"))
        found.append(versus(_PROTO, "maml"))
        found.append(versus(_PROTO_GATES, _PROTO, "better"))
    return tuple(found)


R1 = entry("R1", _cells, _contrasts)
