"""From what a person chooses (a preset, data, a few numbers) to the configuration of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

from torchemo.config.presets import preset
from torchemo.config.run import DataConfig, RunConfig
from torchemo.config.toml import from_dict, merged, override, to_dict
from torchemo.core.errors import ConfigError
from torchemo.data.source import embedded
from torchemo.models import is_pretrained
from torchemo.runs.load import load_config
from torchemo.runs.upgrade import refuse_old

SHORT = {
    "model": ("model", "name"),
    "steps": ("train", "steps"),
    "seed": ("train", "seed"),
    "size": ("data", "image_size"),
    "way": ("data", "n_way"),
    "shot": ("data", "n_shot"),
    "splits": ("data", "splits"),
    "scheme": ("data", "scheme"),
    "drop_duplicates": ("data", "drop_duplicates"),
    "allow_leak": ("model", "allow_leak"),
}
"""Short names of the options that people set most, and where they belong."""


@final
@dataclass(frozen=True)
class Choices:
    """What a person chooses for a run; later ones win.

    Attributes:
        preset: Name of a preset; None starts from the defaults.
        config: A TOML file.
        data: Image sets, ``procedural`` or ``regression:GROUP``; empty keeps those of preset or file.
        short: Options by their short names (`SHORT`); None leaves one as it is.
        options: Any options as ``section.option=value``.
    """

    preset: str | None = None
    config: Path | None = None
    data: tuple[str, ...] = ()
    short: Mapping[str, Any] = field(default_factory=dict)
    options: tuple[str, ...] = ()

    def resolved(self) -> RunConfig:
        """Return the configuration."""
        base = RunConfig() if self.preset is None else preset(self.preset)
        config = self._over(base)
        regression = any(name.startswith("regression:") for name in config.data.source)
        if regression:
            self._refuse_image_options(config.data.source[0])
        if self.preset is not None:
            # A preset depends on the tasks and the network, which may be set by anything that comes after it.
            network = config.model.name
            base = preset(
                self.preset,
                n_shot=config.data.n_shot,
                regression=regression,
                pretrained=network if is_pretrained(network) else None,
            )
        if not embedded(config.data.source):  # recorded studies keep the rules of their time
            base = replace(base, data=replace(base.data, version=2))
        return self._over(base)

    def _refuse_image_options(self, source: str) -> None:
        for name in ("size", "way"):
            if self.short.get(name) is not None:
                raise ConfigError(
                    f"{name} is for image tasks, and {source} has none, got {self.short[name]}.",
                    hint=f"Leave {name} out.",
                )

    def _over(self, config: RunConfig) -> RunConfig:
        if self.config is not None:
            config = load_config(self.config, base=config)
        plain = to_dict(config)
        if self.data:
            plain = merged(plain, {"data": {"source": list(self.data)}})
        for name, value in self.short.items():
            section, option = SHORT[name]
            if name == "size" and is_pretrained(plain["model"]["name"]):
                section, option = "model", "size"  # it resizes images itself
            if value is not None:
                plain = merged(plain, {section: {option: value}})
        for option in sorted(self.options, key=_names_first):
            refuse_old(option.partition("=")[0])
            override(plain, option)
        return from_dict(plain, RunConfig, where="the chosen options")


def stream_options(given: Sequence[str]) -> tuple[str, ...]:
    """Turn what was given for a stream into options of a run; the pool alone may be a bare number.

    Example:
        >>> stream_options(["100", "law=zipf"])
        ('data.stream.pool=100', 'data.stream.law=zipf')
    """
    return tuple(f"data.stream.{'pool=' if one.isdigit() else ''}{one}" for one in given)


def with_stream(data: DataConfig, given: Sequence[str]) -> DataConfig:
    """Return where tasks come from with other options of the stream."""
    plain = {"data": to_dict(data)}
    for option in stream_options(given):
        override(plain, option)
    return from_dict(plain["data"], DataConfig, where="--stream", path="data.")


def _names_first(option: str) -> tuple[bool, int]:
    """Order options so that parts are chosen, outer ones first, before their own options are set."""
    path = option.partition("=")[0].split(".")
    return (False, len(path)) if path[-1] == "name" else (True, 0)
