"""Configurations of earlier versions, read as those of today.

A run of an earlier version has its memory under ``emo``, where the paper's memory of gradients and the memory
of offsets were one, and lists the options of all learners and networks.
"""

import difflib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from torchemo.config.registry import Part, Registry
from torchemo.config.run import RunConfig
from torchemo.config.toml import UNSET
from torchemo.core.errors import ConfigError
from torchemo.learners import LEARNERS
from torchemo.memory import MEMORIES
from torchemo.memory.aggregators import AGGREGATORS
from torchemo.memory.keys import KEYS
from torchemo.models import MODELS

_GONE: dict[tuple[str, ...], Any] = {
    ("emo", "memory", "insert_ref"): True,
    ("emo", "memory", "update_last"): 0.0,
    ("emo", "memory", "max_age"): UNSET,
    ("emo", "memory", "min_fill"): 1,
    ("emo", "memory", "rekey_every"): UNSET,
    ("emo", "memory", "slot_key_lr"): 3e-3,
    ("emo", "memory", "slot_update"): "dense",
    ("emo", "memory", "novelty"): UNSET,
    ("emo", "retrieval", "probes"): 32,
    ("emo", "retrieval", "temperature"): 0.1,
    ("emo", "key", "recognition_lr"): 1e-3,
    ("emo", "key", "recognition_every"): UNSET,
    ("emo", "value", "recall_step"): "off",
    ("outer", "recognition_after"): 0.2,
}
"""Options that are arguments of classes today, and the values that runs have now."""
_GONE_OF_OFFSETS: dict[tuple[str, ...], Any] = {("emo", "value", "head_align"): "none"}
"""Those of a memory of offsets alone: without the head, it would continue with other slots."""

_LATELY_GONE: dict[tuple[str, ...], Any] = {
    ("memory", "temperature"): 0.1,
    ("memory", "key", "recognition_lr"): 1e-3,
    ("memory", "key", "recognition_every"): UNSET,
}
"""The same for runs that have today's names."""

_RENAMED = {"familiar": "skip_unfamiliar", "trust": "skip_unhelpful", "clip": "value_clip"}
_MOVED = {
    "train.iterations": "train.steps",
    "learner.inner_loss_scale": "learner.inner_loss",
    "emo.memory.write": "memory.name",
    "emo.memory.controller": "memory.controller.name",
    "emo.memory.afterwards": "memory.steps",
    "emo.key.network": "memory.key.name",
    "emo.key.source": "memory.key.name",
    "emo.aggregator.kind": "memory.aggregator.name",
}
_SECTIONS = {
    **dict.fromkeys(("emo.memory", "emo.retrieval", "emo.value"), "memory"),
    "emo.key": "memory.key",
    "emo.aggregator": "memory.aggregator",
}
"""Where options are today."""
_REDUCTIONS = {"mean": "own", "sum": "sum", "n_times_mean": "n_way"}


def is_old(plain: Mapping[str, Any]) -> bool:
    """Return whether a configuration is of an earlier version."""
    train = plain.get("train")
    return "emo" in plain or (isinstance(train, Mapping) and "iterations" in train)


def upgraded(
    plain: Mapping[str, Any], *, where: str, base: RunConfig | None = None
) -> dict[str, Any]:
    """Return a configuration of an earlier version with the names of today; others as they are.

    Args:
        plain: The configuration as plain values.
        where: Name of its file, for messages.
        base: What it is laid over: parts that it does not name are those of the base.
    """
    if not is_old(plain):
        _refuse_gone(plain, where)
        return _without_gone(plain)
    _refuse_leaves(plain, where)
    _refuse_gone(plain, where)
    _refuse_unknown(plain, where)
    under = base or RunConfig()
    train = {("steps" if n == "iterations" else n): v for n, v in plain.get("train", {}).items()}
    memory = {"name": under.memory.name}
    if "emo" in plain and (base is None or _remembers(plain["emo"], base.memory)):
        memory = _memory(plain["emo"], under.memory)
    share = plain.get("emo", {}).get("memory", {}).get("afterwards", UNSET)
    if memory["name"] == "offsets" and share != UNSET:
        steps = train.get("steps", under.train.steps)
        train["steps"] = max(1, round(share * steps))
        memory["steps"] = steps - train["steps"]
    return {
        "learner": _learner(plain.get("learner", {}), under.learner),
        "model": _part(plain.get("model", {}), MODELS, default=under.model.name),
        "memory": memory,
        "outer": {n: v for n, v in plain.get("outer", {}).items() if n != "recognition_after"},
        "data": dict(plain.get("data", {})),
        "train": train,
    }


def refuse_old(path: str) -> None:
    """Refuse an option by the name that it had in an earlier version, and say how it is called today."""
    section, _, name = path.rpartition(".")
    if path in _MOVED:
        today = _MOVED[path]
    elif section in _SECTIONS:
        today = f"{_SECTIONS[section]}.{_RENAMED.get(name, name)}"
    else:
        return
    if tuple(path.split(".")) in _GONE:
        raise ConfigError(
            f"runs no longer have the option '{path}'.", hint="It is an argument of its class."
        )
    raise ConfigError(f"option '{path}' is of an earlier version.", hint=f"It is {today} now.")


def _refuse_leaves(plain: Mapping[str, Any], where: str) -> None:
    """Refuse values where there should be tables."""
    emo = plain.get("emo", {})
    inner = emo if isinstance(emo, Mapping) else {}
    for name, section in {**plain, **{f"emo.{n}": s for n, s in inner.items()}}.items():
        if not isinstance(section, Mapping):
            raise ConfigError(f"{where}: '{name}' should be a table, got {section!r}.")


def _refuse_gone(plain: Mapping[str, Any], where: str) -> None:
    offsets = plain.get("emo", {}).get("memory", {}).get("write") == "consolidate"
    gone = {**_GONE, **_LATELY_GONE, **(_GONE_OF_OFFSETS if offsets else {})}
    for path, usual in gone.items():
        value: Any = plain
        for name in path:
            value = value.get(name, usual) if isinstance(value, Mapping) else usual
            if value is usual:
                break
        if value != usual:
            raise ConfigError(
                f"{where}: runs no longer have the option '{'.'.join(path)}', got {value!r}.",
                hint="It is an argument of its class: build the memory in Python, or use an earlier version.",
            )


def _without_gone(plain: Mapping[str, Any], path: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        name: _without_gone(value, (*path, name)) if isinstance(value, Mapping) else value
        for name, value in plain.items()
        if (*path, name) not in _LATELY_GONE
    }


def _refuse_unknown(plain: Mapping[str, Any], where: str) -> None:
    """Refuse options that no part of any kind has or had; other sections are read strictly anyway."""
    gone = {path[-1] for path in _GONE}
    slots = _names(MEMORIES) | _RENAMED.keys() | gone | {"write", "controller", "afterwards"}
    known = {
        "learner": _names(LEARNERS) | {"inner_loss_scale"},
        "model": _names(MODELS),
        **dict.fromkeys(("emo.memory", "emo.retrieval", "emo.value"), slots),
        "emo.key": _names(KEYS) | gone | {"network", "source"},
        "emo.aggregator": _names(AGGREGATORS) | {"kind"},
    }
    every = {f"{section}.{name}" for section, names in known.items() for name in names}
    given = {"learner": plain.get("learner", {}), "model": plain.get("model", {})}
    given |= {f"emo.{name}": section for name, section in plain.get("emo", {}).items()}
    for path in (f"{section}.{name}" for section, options in given.items() for name in options):
        if path not in every:
            near = difflib.get_close_matches(path, sorted(every), n=1)
            hint = f"Did you mean '{near[0]}'?" if near else None
            raise ConfigError(f"{where}: unknown option '{path}'.", hint=hint)


def _names(registry: Registry) -> set[str]:
    """Return the names of all options that parts of a kind have."""
    return {"name", *(o.name for name in registry for o in fields(registry.options_of(name)))}


def _learner(given: Mapping[str, Any], under: Part) -> dict[str, Any]:
    options = dict(given)
    if "inner_loss_scale" in given:
        options["inner_loss"] = given["inner_loss_scale"]
    found = _part(options, LEARNERS, default=under.name)
    if "base" in getattr(LEARNERS.options_of(found["name"]), "PARTS", {}):
        name = given.get("base", _name_within(under, "base", "maml"))
        found["base"] = _part({**options, "name": name}, LEARNERS, default="maml")
    return found


def _remembers(emo: Mapping[str, Any], under: Part) -> bool:
    """Return whether a file speaks of a memory that is there, or switches one on."""
    return under.name != "none" or "capacity" in emo.get("memory", {})


def _memory(emo: Mapping[str, Any], under: Part) -> dict[str, Any]:
    memory = emo.get("memory", {})
    if memory.get("capacity") == 0:
        return {"name": "none"}
    kept = under.name if under.name in ("gradients", "offsets") else "gradients"
    kinds = {"replace": "gradients", "consolidate": "offsets"}
    name = kinds.get(memory.get("write"), kept)
    flat = {**memory, **emo.get("retrieval", {}), **emo.get("value", {})}
    options = {_RENAMED.get(n, n): v for n, v in flat.items()}
    if "reduction" in options:
        options["reduction"] = _REDUCTIONS[options["reduction"]]
    found = _part({**options, "name": name}, MEMORIES, default=name)
    # Laid over a memory of the same kind, a file changes what it names. Else all are the defaults of then.
    alone = name != under.name
    if alone or "key" in emo:
        found["key"] = _key(emo.get("key", {}), _name_within(under, "key", "transformer"))
    if name == "gradients" and (alone or "aggregator" in emo):
        aggregator = emo.get("aggregator", {})
        usual = _name_within(under, "aggregator", "gated")
        kind = {**aggregator, "name": aggregator.get("kind", usual)}
        found["aggregator"] = _part(kind, AGGREGATORS, default=usual)
    if name == "gradients" and (alone or "controller" in memory):
        found["controller"] = {"name": memory.get("controller", "lru")}
    return found


def _key(key: Mapping[str, Any], usual: str) -> dict[str, Any]:
    if key.get("source", "emo") != "emo":  # the learner describes its tasks
        return {"name": "learner"}
    name = key.get("network", usual).replace("_", "-")
    # Plain statistics have nothing to train, and only say so today.
    fixed = getattr(KEYS.options_of(name)(), "training", None) == "none"
    plain = {n: v for n, v in key.items() if n != "training" or not fixed}
    return _part({**plain, "name": name}, KEYS, default=name)


def _name_within(part: Part, which: str, usual: str) -> str:
    """Return the name of a part of a part."""
    inner = part.options.get(which)
    if isinstance(inner, Part):
        return inner.name
    return str(inner.get("name", usual)) if isinstance(inner, Mapping) else usual


def _part(given: Mapping[str, Any], registry: Registry, *, default: str) -> dict[str, Any]:
    """Keep the name of a part and the options that it has today."""
    name = given.get("name", default)
    own = {option.name for option in fields(registry.options_of(name))}
    return {"name": name, **{n: v for n, v in given.items() if n in own}}
