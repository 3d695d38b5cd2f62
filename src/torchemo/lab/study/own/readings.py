"""R1: from the literal reading of EMO to ours, one hypothesis at a time. Not in the paper."""

from dataclasses import replace

from torchemo.lab.study.entry import Cell, Contrast, Entry
from torchemo.lab.study.paper.cells import (
    FIRST_STEP,
    MEANS,
    MENDED_OPTIONS,
    SIMILAR,
    base_cell,
)
from torchemo.lab.study.paper.published import Published
from torchemo.lab.study.scales import Scale

_LITERAL = {
    "literal": ("as printed", ()),
    "means": ("gradients averaged over the support set", MEANS),
    "first step": ("and recalled at the first step only", FIRST_STEP),
    "similar": ("and keys that tell tasks apart", SIMILAR),
    "gates": ("and a learned gate per tensor", MENDED_OPTIONS),
    "meta": ("and meta-gradients as values", (*MENDED_OPTIONS, "emo.value.content=meta")),
}
"""Each changes one thing about the reading above it."""

_ALIGNED = (
    "aligned",
    "gates, and head gradients matched class by class",
    (*MENDED_OPTIONS, "emo.value.head_align=hungarian"),
)
_PROTO, _PROTO_GATES = "proto-maml", "proto-maml gates"
"""Two ways out of random labels, where tasks have any: recalled heads are put into the task's own order of
classes, or a learner whose head is made of the support set, so that relabelling changes no gradient of its
body, with a memory of that alone."""

_SLOTS = (2, 4, 8, 16, 32)
_PLAIN_KEYS = ("emo.key.network=statistics", "emo.key.training=none")
_TRANSFORMER = ("emo.key.network=transformer", "emo.key.layers=2")
_CONSOLIDATED = {
    "statistics": ("keys without weights", _PLAIN_KEYS),
    "transformer": ("keys from a Transformer", _TRANSFORMER),
    "through the outer loss": ("keys trained by the outer loss", ("emo.key.training=outer",)),
    "dropout": ("a tenth of the tasks without recall", ("emo.value.recall_dropout=0.1",)),
    "empty slot": ("and an empty slot for unlike tasks", ("emo.retrieval.null_distance=1.0",)),
    "decay": ("slots that fade", ("emo.memory.slot_decay=1.0",)),
    **{f"{n} slots": (f"{n} slots", (f"emo.memory.capacity={n}",)) for n in _SLOTS},
}
"""Each changes one thing about our reading, and keeps its rates."""

_NO_DROPOUT = ("emo.value.recall_dropout=0.0",)
_ALL_TENSORS = {
    "scales and shifts": ("no task without recall", _NO_DROPOUT),
    "all tensors": (
        "all tensors, no task without recall",
        (*_NO_DROPOUT, "emo.value.tensors=all"),
    ),
}
"""The same on pictures, where our slots hold scales and shifts only and a fifth of the tasks go without."""


def _changes(scale: Scale) -> dict[str, tuple[str, tuple[str, ...]]]:
    return _CONSOLIDATED if scale.regression else {**_CONSOLIDATED, **_ALL_TENSORS}


def _cells(scale: Scale) -> tuple[Cell, ...]:
    literal = [_single(scale, name, *about) for name, about in _LITERAL.items()]
    ours = Cell("ours", "EMO (ours)", "maml-emo", "emo", tests=scale.elsewhere)
    changed = [
        replace(ours, name=name, title=f"{ours.title}, {title}", options=options, of=ours.name)
        for name, (title, options) in _changes(scale).items()
    ]
    base = base_cell("maml", tests=scale.elsewhere)
    return (base, *literal, ours, *changed, *_without_label_order(scale))


def _single(scale: Scale, name: str, title: str, options: tuple[str, ...]) -> Cell:
    """Return MAML with a memory of single tasks' gradients."""
    # Where the own gradient keeps its rate at all steps but the first, that of the base learner fits.
    own = scale.name == "paper" or FIRST_STEP[-1] not in options
    return Cell(
        name,
        f"EMO, {title}",
        "maml-emo-paper",
        "emo",
        options=options,
        of=None if own else "maml",
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
        role="emo",
        options=(*MENDED_OPTIONS, "emo.value.head_align=drop"),
    )
    return (_single(scale, *_ALIGNED), proto, gates)


def _contrasts(scale: Scale) -> tuple[Contrast, ...]:
    found: list[Contrast] = []
    apart = (_PROTO, _PROTO_GATES)
    for cell in (cell for cell in _cells(scale)[1:] if cell.name not in apart):
        found.append(Contrast(f"{cell.name} vs maml", cell.name, "maml", "better"))
        found += [
            Contrast(f"{cell.name} vs maml, {test}", cell.name, "maml", test=test)
            for test in cell.tests
        ]
    found += [Contrast(f"{name} vs ours", name, "ours") for name in _changes(scale)]
    if not scale.regression:
        found.append(Contrast(f"{_ALIGNED[0]} vs gates", _ALIGNED[0], "gates", "better"))
        found.append(Contrast(f"{_PROTO} vs maml", _PROTO, "maml"))
        found.append(Contrast(f"{_PROTO_GATES} vs {_PROTO}", _PROTO_GATES, _PROTO, "better"))
    return tuple(found)


R1 = Entry(
    "R1",
    "Readings of EMO for MAML",
    "Not in the paper: which change of the literal reading makes memory help?",
    Published(""),
    _cells,
    _contrasts,
    "forest",
)
