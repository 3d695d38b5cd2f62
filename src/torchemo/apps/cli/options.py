"""``torchemo options``: which options a run has, part by part."""

import difflib
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, final, get_type_hints

import tyro

from torchemo.config.options import Option, options_of
from torchemo.config.registry import Part
from torchemo.config.run import RunConfig
from torchemo.core.errors import ConfigError
from torchemo.report.terminal import print_json, print_table, say

if TYPE_CHECKING:
    from torchemo.config.registry import Registry


@final
@dataclass(frozen=True)
class OptionsCommand:
    """List the sections of a configuration and their parts, or the options of one of them."""

    part: tyro.conf.Positional[Annotated[str | None, tyro.conf.arg(metavar="PART")]] = None
    """A section (train, data, data.stream, outer) or a part, such as learner.meta-sgd or
    memory.key.transformer."""
    json: bool = False
    """Print as JSON."""

    def run(self) -> int:
        """Run the command."""
        registries = _registries()
        if self.part is None:
            _list(registries, as_json=self.json)
        elif self.part in registries:
            _list_parts(self.part, registries[self.part], as_json=self.json)
        else:
            _describe(self.part, registries, as_json=self.json)
        return 0


def _sections() -> dict[str, type]:
    """Return the sections of a configuration that have options of their own."""
    found: dict[str, type] = {}
    for name, kind in get_type_hints(RunConfig).items():
        if kind is not Part:
            found[name] = kind
            inner: dict[str, type] = get_type_hints(kind)
            found |= {f"{name}.{n}": k for n, k in inner.items() if is_dataclass(k)}
    return found


def _registries() -> dict[str, "Registry"]:
    """Return the kinds of parts by section, those within parts too: ``memory.key``."""
    from torchemo.runs.experiment import PARTS

    found = dict(PARTS)
    for section, registry in PARTS.items():
        for name in registry:
            inner = getattr(registry.options_of(name), "PARTS", {})
            found |= {f"{section}.{option}": kind for option, kind in inner.items()}
    return found


def _list(registries: dict[str, "Registry"], *, as_json: bool) -> None:
    sections = [*registries, *_sections()]
    if as_json:
        print_json({name: list(registries.get(name, ())) for name in sections})
        return
    rows = [[name, _parts(name, registries)] for name in sections]
    print_table("Sections of a configuration", ["section", "parts"], rows)
    say("options of a section or a part: torchemo options train, torchemo options learner.maml")


def _parts(section: str, registries: dict[str, "Registry"]) -> str:
    registry = registries.get(section)
    if registry is None:
        return "(no parts)"
    first = next(name for name, one in registries.items() if one is registry)
    return ", ".join(registry) if first == section else f"(those of {first})"


def _list_parts(section: str, registry: "Registry", *, as_json: bool) -> None:
    found = {name: _first_line(registry[name]) for name in registry}
    if as_json:
        print_json({section: found})
        return
    print_table(section, ["part", "what it is"], [[name, line] for name, line in found.items()])
    example = next(iter(found))
    say(f"choose one by its name, such as {section}.name={example}")
    say(f"its options: torchemo options {section}.{example}")


def _first_line(kind: type) -> str:
    return (kind.__doc__ or "").strip().partition("\n")[0].replace("``", "'")


def _describe(asked: str, registries: dict[str, "Registry"], *, as_json: bool) -> None:
    section, _, name = asked.rpartition(".")
    if asked in _sections():
        prefix, kind = asked, _sections()[asked]
        about = _first_line(kind)
    elif section in registries and name in registries[section]:
        prefix, kind = section, registries[section].options_of(name)
        about = _first_line(registries[section][name])
    else:
        raise _unknown(asked, registries)
    found = options_of(kind)
    if as_json:
        print_json({"part": asked, "options": [option._asdict() for option in found]})
        return
    if not found:
        say(f"{asked}: {about}\nit has no options")
        return
    rows = [[f"{prefix}.{_typed(o)}", o.type, _written(o.default), o.help] for o in found]
    print_table(f"{asked}: {about}", ["option", "type", "default", "what it does"], rows)


def _typed(option: Option) -> str:
    """Return how an option is set; a part is chosen by its name."""
    return f"{option.name}.name" if option.type.startswith("a part") else option.name


def _written(default: Any) -> str:
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, list):
        return f"[{', '.join(_written(value) for value in default)}]"
    return str(default)


def _unknown(asked: str, registries: dict[str, "Registry"]) -> ConfigError:
    having = _having(asked, registries)
    if having:
        return ConfigError(
            f"'{asked}' is an option, not a part.",
            hint=f"It is described with: torchemo options {having[0]}",
        )
    own = {id(registry): section for section, registry in reversed(registries.items())}
    known = {f"{own[id(parts)]}.{name}": name for parts in registries.values() for name in parts}
    every = [*_sections(), *registries, *known]
    near = difflib.get_close_matches(asked, every, n=3)
    if not near:  # perhaps a name without its section
        close = difflib.get_close_matches(asked, set(known.values()), n=1)
        near = [path for path, name in known.items() if name in close]
    hint = f"Did you mean {' or '.join(near)}?" if near else "List them with: torchemo options"
    return ConfigError(f"there is no part '{asked}'.", hint=hint)


def _having(asked: str, registries: dict[str, "Registry"]) -> list[str]:
    """Return the sections or parts that have an option of this name."""
    section, _, name = asked.rpartition(".")
    if section in _sections():
        return [section] if name in {field.name for field in fields(_sections()[section])} else []
    registry = registries.get(section)
    if registry is None:
        return []
    return [
        f"{section}.{part}"
        for part in registry
        if name in {field.name for field in fields(registry.options_of(part))}
    ]
