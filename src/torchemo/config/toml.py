"""Configs as TOML: written in full, read strictly, with a suggestion for every misspelt key."""

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import tomli_w

from torchemo.config.registry import Part
from torchemo.core.errors import ConfigError

T = TypeVar("T")

MOST_WHOLE, MOST = 10**15, 1e30
"""The largest whole number and the largest number that an option takes."""

UNSET = "unset"
"""How an option that is None is written."""


def to_dict(config: Any) -> dict[str, Any]:
    """Turn nested dataclasses into plain values; None becomes ``UNSET``, as TOML has no null."""
    plain: dict[str, Any] = {}
    for field in fields(config):
        value = getattr(config, field.name)
        if isinstance(value, Part):
            plain[field.name] = part_dict(value)
        elif is_dataclass(value):
            plain[field.name] = to_dict(value)
        elif value is None:
            plain[field.name] = UNSET
        else:
            plain[field.name] = list(value) if isinstance(value, tuple) else value
    return plain


def part_dict(part: Part) -> dict[str, Any]:
    """Turn a part into plain values: its name, and the options that are set."""
    plain = {n: part_dict(v) if isinstance(v, Part) else v for n, v in part.options.items()}
    return {
        "name": part.name,
        **{
            n: UNSET if v is None else list(v) if isinstance(v, tuple) else v
            for n, v in plain.items()
        },
    }


def dumps(config: Any) -> str:
    """Write a config as TOML.

    Example:
        >>> from torchemo.config.run import TrainConfig
        >>> print(dumps(TrainConfig(steps=5)).splitlines()[0])
        steps = 5
    """
    return tomli_w.dumps(to_dict(config))


def loads(text: str, kind: type[T], *, where: str, base: T | None = None) -> T:
    """Read a config from TOML; keys that are not given keep their defaults."""
    try:
        given = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where}: not a TOML file: {error}.") from error
    return from_dict(given if base is None else merged(to_dict(base), given), kind, where=where)


def read(path: Path) -> dict[str, Any]:
    """Read a TOML file into plain values."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: there is no such file.") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not a TOML file: {error}.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is not a text file that can be read ({error}).") from error


def load(path: Path, kind: type[T], *, base: T | None = None) -> T:
    """Read a config file; see `loads`."""
    given = read(path)
    whole = given if base is None else merged(to_dict(base), given)
    return from_dict(whole, kind, where=str(path))


def override(plain: dict[str, Any], option: str) -> None:
    """Set ``a.b.c=value`` in nested plain values; the value is read as TOML, or taken as text.

    Example:
        >>> plain = {"train": {"steps": 1}}
        >>> override(plain, "train.steps=5")
        >>> plain
        {'train': {'steps': 5}}
    """
    path, equals, text = option.partition("=")
    if not equals:
        raise ConfigError(f"option '{option}' should be KEY=VALUE, such as train.steps=500.")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    given: Any = value
    for name in reversed(path.split(".")):
        given = {name: given}
    _refuse_leaves(plain, path)
    plain.update(merged(plain, given))


def _refuse_leaves(plain: Mapping[str, Any], path: str) -> None:
    place: Any = plain
    for table in path.split(".")[:-1]:
        place = place.get(table, {})
        if not isinstance(place, Mapping):
            raise ConfigError(f"option '{path}': '{table}' is not a group of options.")


def merged(base: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Lay plain values over others; a part of another name brings its own options alone.

    Example:
        >>> merged({"model": {"name": "conv4", "filters": 8}}, {"model": {"name": "mlp"}})
        {'model': {'name': 'mlp'}}
    """
    found = dict(base)
    for key, value in given.items():
        inner = found.get(key)
        if isinstance(inner, Mapping) and isinstance(value, Mapping) and not _renames(inner, value):
            value = merged(inner, value)
        found[key] = value
    return found


def _renames(inner: Mapping[str, Any], value: Mapping[str, Any]) -> bool:
    return "name" in inner and value.get("name", inner["name"]) != inner["name"]


def from_dict(given: Mapping[str, Any], kind: type[T], *, where: str, path: str = "") -> T:
    """Make a dataclass from plain values, strictly."""
    hints = _hints(kind)  # type: ignore[arg-type]
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"Did you mean '{path}{near[0]}'?" if near else f"Known: {', '.join(known)}."
            raise ConfigError(f"{where}: unknown option '{path}{key}'.", hint=hint)
    made = {}
    for name, value in given.items():
        if hints[name] is Part and isinstance(value, Mapping) and "name" not in value:
            value = {"name": getattr(kind(), name).name, **value}  # options of the default part
        made[name] = _value(value, hints[name], where=where, path=f"{path}{name}")
    return kind(**made)


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _value(value: Any, hint: Any, *, where: str, path: str) -> Any:
    if hint is Part:
        return _part(value, where=where, path=path)
    if is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where}: '{path}' should be a table, got {value!r}.")
        return from_dict(value, hint, where=where, path=f"{path}.")  # type: ignore[arg-type]
    if value == UNSET and NoneType in get_args(hint):
        return None
    if get_origin(hint) is tuple and isinstance(value, list):
        value = tuple(value)
    if not _fits(value, hint):
        raise ConfigError(f"{where}: '{path}' should be {type_words(hint)}, got {value!r:.200}.")
    if not _bounded(value):
        raise ConfigError(
            f"{where}: '{path}' should be finite, at most {MOST:g}, or {MOST_WHOLE:g} for whole numbers,"
            f" got {value!s:.60}."
        )
    return float(value) if hint is float else value


def _bounded(value: Any) -> bool:
    """Return whether every number is one that arithmetic can work with: not NaN, infinite or huge."""
    if isinstance(value, tuple):
        return all(map(_bounded, value))
    if isinstance(value, int):
        return abs(value) <= MOST_WHOLE
    return not isinstance(value, float) or abs(value) <= MOST


def _part(value: Any, *, where: str, path: str) -> Part:
    if isinstance(value, Part):
        return value
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        raise ConfigError(
            f"{where}: '{path}' should be a table with a name, got {value!r}.",
            hint=f"Choose the part by {path}.name.",
        )
    return Part(value["name"], {n: v for n, v in value.items() if n != "name"})


def _fits(value: Any, hint: Any) -> bool:
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, part) for part in get_args(hint))
    if origin is Literal:
        return value in get_args(hint) and type(value) in {type(v) for v in get_args(hint)}
    if origin is tuple:
        parts = get_args(hint)
        if not isinstance(value, tuple):
            return False
        if len(parts) == 2 and parts[1] is ...:
            return all(_fits(v, parts[0]) for v in value)
        return len(value) == len(parts) and all(map(_fits, value, parts))
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def type_words(hint: Any) -> str:
    """Say in words which values an option takes.

    Example:
        >>> type_words(Literal["a", "b"] | None)
        "one of 'a', 'b' or 'unset'"
    """
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(repr, get_args(hint)))
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(type_words(part) for part in get_args(hint))
    if get_origin(hint) is tuple:
        items = [part for part in get_args(hint) if part is not ...]
        return f"a list of {' and '.join(type_words(part) for part in items)}"
    return f"'{UNSET}'" if hint is NoneType else getattr(hint, "__name__", str(hint))
