"""Which options a part has: name, type, default, and what the docstring below each says.

Needs no torch beyond what importing the part brings.
"""

import ast
import inspect
import re
import textwrap
from dataclasses import MISSING, fields, is_dataclass
from itertools import pairwise
from typing import Any, NamedTuple, get_type_hints

from torchemo.config.registry import Part
from torchemo.config.toml import UNSET, type_words
from torchemo.core.errors import ConfigError

MOST_LAYERS = 1000
"""No network of this library is deeper; a file could ask for more than memory holds."""


class Option(NamedTuple):
    """One option of a part.

    Attributes:
        name: How it is typed, below its section.
        type: Which values it takes, in words.
        default: Its default in plain values, as TOML holds them; the name of a part for a part.
        help: What it does, in one line.
    """

    name: str
    type: str
    default: Any
    help: str


def options_of(kind: type) -> list[Option]:
    """List the options of a dataclass in their order.

    Example:
        >>> from torchemo.config.run import TrainConfig
        >>> options_of(TrainConfig)[0].name, options_of(TrainConfig)[0].default
        ('steps', 1000)
    """
    hints, told = get_type_hints(kind), attribute_docstrings(kind)
    parts = getattr(kind, "PARTS", {})
    found = []
    for field in fields(kind):
        name, hint = field.name, hints[field.name]
        if is_dataclass(hint) and hint is not Part:
            continue  # a section of its own
        of = parts.get(name)
        words = type_words(hint) if of is None else f"a part: one of {', '.join(of)}"
        found.append(Option(name, words, _default(field), told.get(name, "")))
    return found


def attribute_docstrings(kind: type) -> dict[str, str]:
    """Return what stands below each attribute of a class and of those it inherits from, in one line."""
    found: dict[str, str] = {}
    for owner in reversed(kind.__mro__[:-1]):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(owner)))
        except (OSError, TypeError, SyntaxError):
            continue  # its source is not at hand
        found |= _told(tree.body[0])
    return found


def _told(owner: ast.stmt) -> dict[str, str]:
    body = owner.body if isinstance(owner, ast.ClassDef) else []
    found = {}
    for named, after in pairwise(body):
        if not isinstance(named, ast.AnnAssign) or not isinstance(named.target, ast.Name):
            continue
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            found[named.target.id] = _as_typed(str(after.value.value))
    return found


def _as_typed(docstring: str) -> str:
    """Put a docstring into one line, with None as a configuration writes it."""
    line = " ".join(docstring.split()).replace("``", "'")
    return re.sub(r"\bNone\b", UNSET, line)


def _default(field: Any) -> Any:
    value = field.default if field.default_factory is MISSING else field.default_factory()
    if value is MISSING:
        return None
    if isinstance(value, Part):
        return value.name
    if value is None:
        return UNSET
    return list(value) if isinstance(value, tuple) else value


def refuse_below(least: float, options: object, *names: str, where: str) -> None:
    """Raise `ConfigError` naming the first of these options that is smaller than it can be."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not value >= least:
            raise ConfigError(f"{where}.{name} should be {least:g} or more, got {value}.")


def refuse_above(most: float, options: object, *names: str, where: str) -> None:
    """Raise `ConfigError` naming the first of these options that is larger than it can be."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not value <= most:
            raise ConfigError(f"{where}.{name} should be {most:g} or less, got {value}.")
