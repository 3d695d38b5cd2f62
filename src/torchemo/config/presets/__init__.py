"""Presets: ``<learner>``, ``<learner>-emo``, ``<learner>-emo-paper``, ``<learner>-offsets``.

A preset is the sum of three small TOML files beside this module: one of the learner, one of the memory and
one of the kind of tasks. Later files win. A table ``[when.CONDITION]`` applies last and only where the
condition holds: ``regression``, ``pretrained`` (with a memory also ``pretrained-MEMORY``), ``5-shot``, or
the name of a learner. ``[inner]`` holds
options of the inner loop: those of the learner, or of the learner underneath (BMG). ``<learner>-published``
has the published sizes, for images of 84 x 84.

A learner of another distribution (entry point ``torchemo.learners``) has presets of its name without a file.
"""

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import entry_points
from importlib.resources import files
from itertools import takewhile
from typing import Any

from torchemo.config.run import RunConfig
from torchemo.config.toml import from_dict, merged
from torchemo.core.errors import ConfigError

_ROOT = files("torchemo.config.presets")
MEMORIES = ("emo-paper", "emo", "offsets-joint", "offsets")
"""Kinds of memory, longer names before those they begin or end with."""
PUBLISHED = "published"
NO_SECTIONS = ("when", "inner", "inner_loop", "memories", PUBLISHED)
"""Keys of a file that are no sections of a configuration."""
WRAPPERS = ("bmg",)
"""Learners over another one, whose inner loop is that of their ``base``."""


def learners() -> list[str]:
    """List the learners that have presets."""
    files_here = (place.name for place in (_ROOT / "learners").iterdir())
    own = sorted(name.removesuffix(".toml") for name in files_here if name.endswith(".toml"))
    foreign = sorted(point.name for point in entry_points(group="torchemo.learners"))
    return [*own, *(name for name in foreign if name not in own)]


def names() -> list[str]:
    """List the presets."""
    found = []
    for learner in learners():
        given = _read("learners", learner)
        found.append(learner)
        found += [f"{learner}-{memory}" for memory in reversed(given.get("memories", MEMORIES))]
        found += [f"{learner}-{PUBLISHED}"] if PUBLISHED in given else []
    return found


def preset(
    name: str, *, n_shot: int = 1, regression: bool = False, pretrained: str | None = None
) -> RunConfig:
    """Return a preset.

    Args:
        name: ``maml``, ``maml-emo``, ``maml-emo-paper``, ``maml-offsets``, ``anil``, ...
        n_shot: K; the paper's memory and neighbours depend on it.
        regression: For regression tasks: an MLP, smaller rates, keys of pairs.
        pretrained: Name of a pretrained network, whose features the learner sees.

    Example:
        >>> preset("maml-emo").memory.name, preset("maml-offsets").memory.name
        ('gradients', 'offsets')
    """
    if name not in names():
        near = difflib.get_close_matches(name, names(), n=1)
        hint = f"Did you mean '{near[0]}'?" if near else "List them with: torchemo presets"
        raise ConfigError(f"unknown preset '{name}'.", hint=hint)
    if name.endswith(f"-{PUBLISHED}") and regression:
        raise ConfigError(
            f"preset '{name}' is for images.", hint=f"Use '{name.removesuffix('-' + PUBLISHED)}'."
        )
    learner, memory = parts_of(name)
    layers = [_read("learners", learner)]
    layers += [_read("memory", memory)] if memory else []
    layers += [{"model": {"name": pretrained}}] if pretrained else []
    kind = "regression" if regression else "pretrained" if pretrained else "images"
    layers += [_read("tasks", kind)]
    layers += [layers[0][PUBLISHED]] if name.endswith(f"-{PUBLISHED}") else []
    holding = {
        learner,
        *(["regression"] if regression else []),
        *(["pretrained", f"pretrained-{memory}"] if pretrained else []),
        *(["5-shot"] if n_shot >= 5 else []),
    }
    inner = _inner_place(learner) if layers[0].get("inner_loop", True) else None
    plain = merged(_summed(layers, holding, inner=inner), {"data": {"n_shot": n_shot}})
    return from_dict(plain, RunConfig, where=f"preset '{name}'")


def about(name: str) -> str:
    """Describe a preset in a line: the first sentence of the comment on top of each of its files.

    Example:
        >>> about("boil")
        'BOIL adapts the body alone (Oh et al. 2021).'
    """
    learner, memory = parts_of(name)
    said = [first_sentence("learners", learner)]
    said += [first_sentence("memory", memory)] if memory else []
    said += ["Published sizes."] if name.endswith(f"-{PUBLISHED}") else []
    return " ".join(said)


def first_sentence(kind: str, name: str) -> str:
    """Return the first sentence of the comment on top of a file."""
    place = _ROOT / kind / f"{name}.toml"
    if not place.is_file():
        return "A learner of another distribution."
    lines = takewhile(lambda line: line.startswith("#"), place.read_text("utf-8").splitlines())
    text = " ".join(line.lstrip("# ") for line in lines)
    return re.split(r"(?<=\.)\s+(?=[A-Z])", text, maxsplit=1)[0]


def parts_of(name: str) -> tuple[str, str | None]:
    """Split the name of a preset into its learner and its memory, None without one.

    Example:
        >>> parts_of("meta-sgd-emo-paper"), parts_of("maml")
        (('meta-sgd', 'emo-paper'), ('maml', None))
    """
    bare = name.removesuffix(f"-{PUBLISHED}")
    for memory in MEMORIES:
        if bare.endswith(f"-{memory}"):
            return bare.removesuffix(f"-{memory}"), memory
    return bare, None


def _inner_place(learner: str) -> tuple[str, ...]:
    """Return where options of the inner loop belong: to the learner, or to the one underneath."""
    return ("learner", "base") if learner in WRAPPERS else ("learner",)


def _summed(
    layers: Iterable[Mapping[str, Any]], holding: set[str], *, inner: tuple[str, ...] | None
) -> dict[str, Any]:
    """Lay the files over each other, and then what holds under conditions."""
    # Conditions of the tasks and the memory come before those of the learner, which knows best.
    layers = list(layers)
    plain: dict[str, Any] = {}
    for layer in layers:
        plain = _over(plain, layer, inner=inner)
    for layer in reversed(layers):
        for condition, special in layer.get("when", {}).items():
            if condition in holding:
                plain = _over(plain, special, inner=inner)
    return plain


def _over(
    plain: dict[str, Any], layer: Mapping[str, Any], *, inner: tuple[str, ...] | None
) -> dict[str, Any]:
    """Lay one file over another; options of an inner loop go where the learner has them."""
    sections = {n: s for n, s in layer.items() if n not in NO_SECTIONS}
    own: Any = layer.get("inner")
    if own is not None and inner is not None:
        for name in reversed(inner):
            own = {name: {"name": "maml", **own} if name == "base" else own}
        sections = merged(own, sections)
    return merged(plain, sections)


@cache
def _read(kind: str, name: str) -> dict[str, Any]:
    place = _ROOT / kind / f"{name}.toml"
    if kind == "learners" and not place.is_file():
        return {"learner": {"name": name}}
    return tomllib.loads(place.read_text(encoding="utf-8"))
