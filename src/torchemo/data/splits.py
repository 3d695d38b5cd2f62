"""Which class belongs to which split: from a file, from the data itself, or drawn with a seed."""

import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeAlias, final

import torch

from torchemo.core.errors import ConfigError, DataError
from torchemo.core.rng import generator_for
from torchemo.data.index import SPLITS
from torchemo.data.listing import ListedClass

Classes: TypeAlias = Mapping[str, Sequence[str | int]]
"""Class names, patterns of them (``Greek/*``), or their positions in the data, by split."""


@final
@dataclass(frozen=True)
class Proportions:
    """Draw the splits: sorted class names, shuffled with a seed, cut in these proportions.

    ``Proportions(1100, 100, 423)`` on the 1623 Omniglot characters gives exactly these numbers.
    """

    train: int = 64
    val: int = 16
    test: int = 20
    seed: int = 0
    by_set: bool = False
    """Let the name of the set enter the draw, as earlier versions did; else class names alone decide."""

    def __post_init__(self) -> None:
        parts = (self.train, self.val, self.test)
        if min(parts) < 0 or sum(parts) <= 0:
            raise ConfigError(f"proportions of the splits should be positive, got {parts}.")

    @staticmethod
    def read(text: str) -> "Proportions | None":
        """Read ``64:16:20``; None if it is no such text."""
        found = re.fullmatch(r"(\d+):(\d+):(\d+)", text)
        if found is None:
            return None
        train, val, test = map(int, found.groups())
        return Proportions(train, val, test)


@final
@dataclass(frozen=True)
class SplitFile:
    """Read the splits from a JSON file.

    The file holds ``{"train": [...], "val": [...], "test": [...]}``, or several such schemes by name,
    or both once more by the name of the data file or folder. Beside schemes it may sort classes into
    groups, ``"family": {"wren": "wrens", ...}``; a scheme then names whole groups: ``"family:wrens"``.
    """

    path: Path
    scheme: str | None = None


Splits: TypeAlias = Proportions | SplitFile | Classes


def proportional(
    names: Sequence[str], proportions: Proportions, *, domain: str = ""
) -> dict[str, str]:
    """Draw a split for every name; depends on the set of names, the seed and ``domain`` alone."""
    parts = torch.tensor(
        [proportions.train, proportions.val, proportions.test], dtype=torch.float64
    )
    shares = parts / parts.sum() * len(names)
    counts = shares.floor().long()
    # The classes that rounding left over go where most of one was cut off.
    left = len(names) - int(counts.sum())
    counts[(shares - counts).argsort(descending=True, stable=True)[:left]] += 1
    generator = generator_for(proportions.seed, "splits", domain)
    order = torch.randperm(len(names), generator=generator).tolist()
    splits = [split for split, n in zip(SPLITS, counts.tolist(), strict=True) for _ in range(n)]
    ordered = sorted(names)
    return {ordered[place]: split for place, split in zip(order, splits, strict=True)}


def read_split_file(file: SplitFile, *, data_name: str) -> Classes:
    """Read one scheme of a split file."""
    schemes = schemes_for(file.path, data_name=data_name)
    if file.scheme is not None and file.scheme in schemes:
        return schemes[file.scheme]
    if file.scheme is None and len(schemes) == 1:
        return next(iter(schemes.values()))
    asked = "none was chosen" if file.scheme is None else f"{file.scheme!r} is not among them"
    raise DataError(
        f"{file.path}: has {len(schemes)} schemes of splits for {data_name}, and {asked}.",
        hint=f"Choose one: {', '.join(schemes) or 'there is none, name the classes by split'}.",
    )


def schemes_for(path: Path, *, data_name: str) -> dict[str, Classes]:
    """Return the schemes a split file offers for a data file or folder, by name."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read as a file of splits ({error}).") from error
    if isinstance(content, dict) and isinstance(content.get(data_name), dict):
        content = content[data_name]
    if not isinstance(content, dict):
        return {}
    groups = {name: value for name, value in content.items() if _is_grouping(value)}
    rest = {name: value for name, value in content.items() if name not in groups}
    schemes = {"default": rest} if _is_scheme(rest) else rest
    return {n: _expanded(scheme, groups) for n, scheme in schemes.items() if _is_scheme(scheme)}


def assign(
    classes: Sequence[ListedClass],
    splits: Proportions | Classes | None,
    *,
    by_set: bool = False,
) -> tuple[ListedClass, ...]:
    """Give every class its split and sort classes by domain and split.

    Classes that a list does not name are left out. Without ``splits`` the data's own count; data
    without any are cut by default `Proportions`, ``by_set`` or by class names alone.
    """
    if splits is None and any(c.split is not None for c in classes):
        return _in_order([c for c in classes if c.split is not None])
    merged = _merge_same(classes)
    if splits is None or isinstance(splits, Proportions):
        return _in_order(_by_proportions(merged, splits or Proportions(by_set=by_set)))
    return _in_order(_by_list(merged, splits))


def _is_scheme(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and len(value) > 0
        and set(value) <= set(SPLITS)
        and all(isinstance(names, list) for names in value.values())
        and all(isinstance(name, (str, int)) for names in value.values() for name in names)
    )


def _is_grouping(value: Any) -> bool:
    """Return whether a value sorts classes into groups: class name -> group."""
    return (
        isinstance(value, dict) and bool(value) and all(isinstance(v, str) for v in value.values())
    )


def _expanded(scheme: Classes, groups: Mapping[str, Mapping[str, str]]) -> Classes:
    """Write the classes of a group in place of ``grouping:group``."""
    members: dict[str, list[str]] = {}
    for grouping, group_of in groups.items():
        for name, group in group_of.items():
            members.setdefault(f"{grouping}:{group}", []).append(name)
    return {
        split: [
            n
            for name in names
            for n in (members.get(name, [name]) if isinstance(name, str) else [name])
        ]
        for split, names in scheme.items()
    }


def _by_proportions(classes: Sequence[ListedClass], proportions: Proportions) -> list[ListedClass]:
    drawn = {}
    for domain in dict.fromkeys(c.domain for c in classes):
        names = [c.name for c in classes if c.domain == domain]
        drawn[domain] = proportional(
            names, proportions, domain=domain if proportions.by_set else ""
        )
    return [c._replace(split=drawn[c.domain][c.name]) for c in classes]


def _by_list(classes: Sequence[ListedClass], listed: Classes) -> list[ListedClass]:
    split_of: dict[str | int, str] = {}
    for split, names in listed.items():
        for name in names:
            for key in _named(classes, name):
                if split_of.setdefault(key, split) != split:
                    raise DataError(
                        f"class {key!r} is listed in the splits {split_of[key]!r} and {split!r}.",
                        hint="A class belongs to one split.",
                    )
    known = {c.name for c in classes} | set(range(len(classes)))
    missing = [name for name in split_of if name not in known]
    if missing:
        raise DataError(
            f"{len(missing)} listed classes are not in the data, the first is {missing[0]!r}.",
            hint="Compare the names in the list of splits with those in the data; a group of classes is"
            " written GROUPING:GROUP, a pattern Greek/*.",
        )
    found = [
        c._replace(split=split_of.get(c.name, split_of.get(place)))
        for place, c in enumerate(classes)
    ]
    return [c for c in found if c.split is not None]


def _named(classes: Sequence[ListedClass], name: str | int) -> list[str | int]:
    """Return the classes that an entry of a list means: one, or all that fit a pattern."""
    if isinstance(name, int):
        return [name]
    key = unicodedata.normalize("NFC", name)
    names = [c.name for c in classes]
    if key in names or "*" not in key:
        return [key]
    return [n for n in names if fnmatchcase(n, key)] or [key]


def _merge_same(classes: Sequence[ListedClass]) -> list[ListedClass]:
    """Join images of one class that lie in several split folders (a split by image)."""
    merged: dict[tuple[str, str], ListedClass] = {}
    for c in classes:
        key = (c.domain, c.name)
        before = merged[key].pictures if key in merged else ()
        merged[key] = c._replace(pictures=(*before, *c.pictures), split=None)
    return list(merged.values())


def _in_order(classes: Sequence[ListedClass]) -> tuple[ListedClass, ...]:
    owner: dict[tuple[str, str], str | None] = {}
    for c in classes:
        if (c.domain, c.name) in owner:
            raise DataError(
                f"class {c.name!r} lies in the splits {owner[c.domain, c.name]!r} and {c.split!r}:"
                " the data are split by image, few-shot learning needs splits by class.",
                hint="Join them and draw splits of classes (--splits 64:16:20), or list classes in a file.",
            )
        owner[c.domain, c.name] = c.split
    domains = list(dict.fromkeys(c.domain for c in classes))
    position = {split: i for i, split in enumerate(map(str, SPLITS))}
    return tuple(sorted(classes, key=lambda c: (domains.index(c.domain), position[c.split or ""])))
