"""Parts by name: which learners, networks, memories, ... there are, and how options choose one.

A registry maps names to classes as text, so that listing names imports nothing. Another distribution adds
a part through an entry point of the registry's group, such as ``torchemo.learners``. A part is a class with
``Options``, a frozen dataclass of its options, and ``build``, which makes it from them.
"""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, final

from torchemo.core.errors import ConfigError


@final
@dataclass(frozen=True)
class Part:
    """A part of a run: its name in a registry, and those of its options that are set.

    Example:
        >>> Part("meta-sgd", {"steps": 3}).set(rate_shape="scalar")
        Part(name='meta-sgd', options={'steps': 3, 'rate_shape': 'scalar'})
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def set(self, **options: Any) -> "Part":
        """Return this part with some options set."""
        return Part(self.name, {**self.options, **options})


@final
@dataclass(frozen=True)
class NoOptions:
    """A part without options."""


@final
class Registry(Mapping[str, Any]):
    """Parts of one kind by name.

    Args:
        what: What they are, in the singular, for messages.
        section: Where a configuration names one: ``learner``, ``memory.key``.
        parts: Name -> ``package.module:Class``.
        group: Entry points of this group are further parts.
        named: ``package.module:function`` that makes a part of any other name with a colon, if there is one.
    """

    def __init__(
        self, what: str, section: str, parts: Mapping[str, str], *, group: str, named: str = ""
    ) -> None:
        self.what = what
        self.section = section
        self.group = group
        self.named = named
        self._own = dict(parts)

    @cached_property
    def _places(self) -> dict[str, str]:
        further = {point.name: point.value for point in entry_points(group=self.group)}
        return {**self._own, **{n: v for n, v in further.items() if n not in self._own}}

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __getitem__(self, name: str) -> Any:
        """Import a part.

        Raises:
            ConfigError: There is none of this name, or it cannot be imported.
        """
        if name not in self._places:
            if self.named and ":" in name:
                place, _, function = self.named.partition(":")
                return getattr(import_module(place), function)(name)
            raise ConfigError(f"there is no {self.what} '{name}'.", hint=self._nearest(name))
        module, _, attribute = self._places[name].partition(":")
        try:
            return getattr(import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"{self.what} '{name}' cannot be imported from {self._places[name]} ({error}).",
                hint="Repair or remove the distribution that registers it.",
            ) from error

    def options_of(self, name: str) -> type:
        """Return the dataclass of a part's options."""
        found: type = getattr(self[name], "Options", NoOptions)
        return found

    def resolve(self, part: Part, *, where: str = "") -> tuple[Any, Any]:
        """Return the class of a part and its options, checked.

        Args:
            part: The part as a configuration names it.
            where: Name of its section, for messages; that of the registry by default.
        """
        from torchemo.config.toml import from_dict  # toml reads parts, too

        section = where or self.section
        kind = self.options_of(part.name)
        try:
            return self[part.name], from_dict(
                part.options, kind, where=f"{self.what} '{part.name}'", path=f"{section}."
            )
        except ConfigError as error:
            raise self._where_it_belongs(part, error) from error

    def complete(self, part: Part) -> Part:
        """Return a part with all of its options, also those that are not set, in plain values."""
        from torchemo.config.toml import to_dict

        _, options = self.resolve(part)
        plain = to_dict(options)
        for name, registry in getattr(type(options), "PARTS", {}).items():
            plain[name] = registry.complete(getattr(options, name))
        return Part(part.name, plain)

    def reduced(self, part: Part) -> Part:
        """Return a part with those options alone that differ from their defaults."""
        _, options = self.resolve(part)
        kind = type(options)
        if kind is NoOptions:
            return Part(part.name)
        default, nested = kind(), getattr(kind, "PARTS", {})
        kept = {}
        for option in fields(kind):
            value = getattr(options, option.name)
            if option.name in nested:
                # A part of another name differs even where all its options are at their defaults.
                value = nested[option.name].reduced(value)
                same = value == nested[option.name].reduced(getattr(default, option.name))
            else:
                same = value == getattr(default, option.name)
            if not same:
                kept[option.name] = value
        return Part(part.name, kept)

    def _nearest(self, name: str) -> str:
        near = difflib.get_close_matches(name, list(self), n=1)
        known = f"There are: {', '.join(sorted(self))}."
        return f"Did you mean '{near[0]}'? {known}" if near else known

    def _where_it_belongs(self, part: Part, error: ConfigError) -> ConfigError:
        """Add to a refused option which other parts of this kind have it."""
        own = {option.name for option in fields(self.options_of(part.name))}
        unknown = [name for name in part.options if name not in own]
        if not unknown:
            return error
        owners = [name for name in self if self._has_option(name, unknown[0])]
        if not owners:
            return error
        return ConfigError(
            error.message,
            hint=f"It is an option of {', '.join(owners)} ({self.section}.name = '{owners[0]}').",
        )

    def _has_option(self, name: str, option: str) -> bool:
        """Return whether a part has an option; one that cannot be imported has none."""
        try:
            return option in {known.name for known in fields(self.options_of(name))}
        except ConfigError:
            return False
