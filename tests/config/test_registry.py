"""Parts by name: resolved, completed, reduced, suggested, and added by other distributions."""

import re
import subprocess
import sys
import textwrap
from dataclasses import fields
from types import NoneType, UnionType
from typing import ClassVar, Literal, Union, get_args, get_origin, get_type_hints

import pytest

from torchemo.config import presets
from torchemo.config.registry import NoOptions, Part, Registry
from torchemo.config.run import RunConfig
from torchemo.config.toml import dumps, loads
from torchemo.core.errors import ConfigError
from torchemo.learners import LEARNERS
from torchemo.memory import MEMORIES
from torchemo.memory.aggregators import AGGREGATORS
from torchemo.memory.controllers import CONTROLLERS
from torchemo.memory.keys import KEYS
from torchemo.models import MODELS

REGISTRIES = {r.section: r for r in (LEARNERS, MODELS, MEMORIES, KEYS, AGGREGATORS, CONTROLLERS)}
EVERY = [(section, name) for section, registry in REGISTRIES.items() for name in registry]


def every_option():
    """Every option of every part, but those that are parts themselves or have one value only."""
    for section, name in EVERY:
        kind = REGISTRIES[section].options_of(name)
        for option, hint in get_type_hints(kind).items():
            choices = get_args(hint) if get_origin(hint) is Literal else (0, 1)
            if hint is not Part and get_origin(hint) is not ClassVar and len(choices) > 1:
                yield section, name, option


def another(hint, value):
    """Return a value of a type other than ``value``."""
    if get_origin(hint) in (Union, UnionType):
        kinds = [part for part in get_args(hint) if part is not NoneType]
        return another(kinds[-1], value)
    if get_origin(hint) is Literal:
        return next((choice for choice in get_args(hint) if choice != value), value)
    if get_origin(hint) is tuple:
        return tuple(part + 1 for part in value)
    if hint is bool:
        return not value
    if hint is int and isinstance(value, int):
        return 2 * value or 1  # a size that others must divide stays one
    if hint in (int, float):
        return hint(3) if not isinstance(value, int | float) else value + hint(1)
    return "elsewhere"


@pytest.mark.parametrize(("section", "name"), EVERY)
def test_every_part_is_resolved_and_its_options_are_a_frozen_dataclass_with_defaults(section, name):
    registry = REGISTRIES[section]
    kind, options = registry.resolve(Part(name))
    assert kind is registry[name]
    assert callable(kind.build)
    own = registry.options_of(name)
    assert options == own()
    assert own.__dataclass_params__.frozen
    inside = {n for n, hint in get_type_hints(own).items() if hint is Part}
    assert set(getattr(own, "PARTS", {})) == inside


@pytest.mark.parametrize(("section", "name"), EVERY)
def test_a_part_is_completed_and_reduced_without_loss(section, name):
    registry = REGISTRIES[section]
    part = Part(name)
    whole = registry.complete(part)
    assert list(whole.options) == [option.name for option in fields(registry.options_of(name))]
    assert None not in whole.options.values()
    assert registry.complete(whole) == whole
    assert registry.reduced(whole) == part
    assert registry.reduced(part) == part
    assert plain(registry, whole) == plain(registry, part)


def plain(registry, part):
    """The options of a part with those of the parts inside it."""
    _, options = registry.resolve(part)
    nested = getattr(type(options), "PARTS", {})
    return {
        option.name: plain(nested[option.name], getattr(options, option.name))
        if option.name in nested
        else getattr(options, option.name)
        for option in fields(options)
    }


@pytest.mark.parametrize(("section", "name", "option"), list(every_option()))
def test_a_changed_option_survives_and_is_all_that_a_reduced_part_names(section, name, option):
    registry = REGISTRIES[section]
    kind = registry.options_of(name)
    default = getattr(kind(), option)
    value = another(get_type_hints(kind)[option], default)
    part = Part(name, {option: value})
    whole = registry.complete(part)
    assert plain(registry, whole) == plain(registry, part)
    assert getattr(registry.resolve(whole)[1], option) == value
    assert registry.reduced(whole) == part
    assert registry.complete(registry.reduced(whole)) == whole


@pytest.mark.parametrize(("section", "name"), [(s, n) for s, n in EVERY if "." not in s])
def test_a_completed_part_survives_a_file(section, name):
    registry = REGISTRIES[section]
    config = RunConfig(**{section: registry.complete(Part(name))})
    again = loads(dumps(config), RunConfig, where="test")
    assert plain(registry, getattr(again, section)) == plain(registry, Part(name))
    assert registry.reduced(getattr(again, section)) == Part(name)


def test_a_part_inside_a_part_is_reduced_to_its_name_and_what_differs():
    same = Part("gradients", {"key": Part("transformer"), "aggregator": Part("sum")})
    assert MEMORIES.reduced(same) == Part("gradients")
    key = Part("mean", {"dim": 64, "unit": False})
    found = MEMORIES.reduced(Part("gradients", {"key": key, "capacity": 100, "k": 3}))
    assert found == Part("gradients", {"key": Part("mean", {"unit": False}), "k": 3})
    whole = MEMORIES.complete(Part("offsets", {"key": Part("mean", {"dim": 7})}))
    assert whole.options["key"] == KEYS.complete(Part("mean", {"dim": 7}))
    assert MEMORIES.reduced(whole) == Part("offsets", {"key": Part("mean", {"dim": 7})})


def test_a_set_option_leaves_the_part_as_it_was():
    part = Part("maml", {"steps": 3})
    assert part.set(steps=4, order=1) == Part("maml", {"steps": 4, "order": 1})
    assert part == Part("maml", {"steps": 3})


@pytest.mark.parametrize(
    ("registry", "name", "message", "hint"),
    [
        (LEARNERS, "mamml", "there is no learner 'mamml'", "Did you mean 'maml'? There are: anil,"),
        (MEMORIES, "ofsets", "there is no memory 'ofsets'", "Did you mean 'offsets'?"),
        (KEYS, "learned_statistics", "no key", "Did you mean 'learned-statistics'?"),
        (CONTROLLERS, "zzz", "there is no controller 'zzz'", "There are: clock, fifo, lru."),
    ],
)
def test_an_unknown_name_gets_the_nearest_and_all_that_there_are(registry, name, message, hint):
    with pytest.raises(ConfigError, match=message) as caught:
        registry.resolve(Part(name))
    assert caught.value.hint.startswith(hint)
    assert name not in registry
    if "There are" not in hint:
        assert f"There are: {', '.join(sorted(registry))}." in caught.value.hint


@pytest.mark.parametrize(
    ("registry", "part", "message", "hint"),
    [
        (
            LEARNERS,
            Part("maml", {"subspaces": 2}),
            "learner 'maml': unknown option 'learner.subspaces'",
            "It is an option of musml (learner.name = 'musml').",
        ),
        (
            LEARNERS,
            Part("maml", {"task_dim": 2}),
            "unknown option 'learner.task_dim'",
            "It is an option of arml, hsml (learner.name = 'arml').",
        ),
        (
            MEMORIES,
            Part("none", {"slot_lr": 0.1}),
            "memory 'none': unknown option 'memory.slot_lr'",
            "It is an option of offsets (memory.name = 'offsets').",
        ),
        (
            MEMORIES,
            Part("offsets", {"aggregator": Part("sum")}),
            "unknown option 'memory.aggregator'",
            "It is an option of gradients (memory.name = 'gradients').",
        ),
        (
            KEYS,
            Part("statistics", {"heads": 2}),
            "key 'statistics': unknown option 'memory.key.heads'",
            "It is an option of transformer (memory.key.name = 'transformer').",
        ),
        (
            LEARNERS,
            Part("maml", {"inner_rl": 0.1}),
            "unknown option 'learner.inner_rl'",
            "Did you mean 'learner.inner_lr'?",
        ),
        (
            AGGREGATORS,
            Part("sum", {"zebra": 1}),
            "unknown option 'memory.aggregator.zebra'",
            "Known: .",
        ),
        (
            MODELS,
            Part("conv4", {"filters": "many"}),
            "'model.filters' should be int, got 'many'",
            None,
        ),
    ],
)
def test_a_refused_option_says_where_it_belongs(registry, part, message, hint):
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        registry.resolve(part)
    assert caught.value.hint == hint


def test_messages_name_the_section_that_is_asked_for():
    with pytest.raises(ConfigError, match=r"unknown option 'learner\.base\.stepz'"):
        LEARNERS.resolve(Part("maml", {"stepz": 1}), where="learner.base")


# -- other distributions ------------------------------------------------------------------------------

MODULE = """
    from dataclasses import dataclass
    from torchemo.learners.gradient.base import GradientLearner
    from torchemo.learners.gradient.loop import LoopOptions

    @dataclass(frozen=True)
    class PlainOptions(LoopOptions):
        warmth: float = 0.5

    @dataclass(frozen=True)
    class Plain(GradientLearner):
        title = "Plain"
        Options = PlainOptions
"""


@pytest.fixture
def distribution(tmp_path, monkeypatch):
    """Install a distribution that registers learners, and forget it afterwards."""

    def install(points, module=MODULE):
        name = f"fake_{tmp_path.name}".replace("-", "_")
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(module))
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        lines = "\n".join(f"{n} = {value.format(name)}" for n, value in points.items())
        (info / "entry_points.txt").write_text(f"[torchemo.learners]\n{lines}\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        LEARNERS.__dict__.pop("_places", None)
        return name

    yield install
    LEARNERS.__dict__.pop("_places", None)
    for name in [n for n in sys.modules if n.startswith("fake_")]:
        del sys.modules[name]


def test_an_entry_point_adds_a_part_that_is_imported_when_it_is_used(distribution):
    name = distribution({"plain": "{}:Plain"})
    assert "plain" in LEARNERS
    assert list(LEARNERS)[-1] == "plain"  # after our own
    assert len(LEARNERS) == len(list(LEARNERS))
    assert name not in sys.modules
    kind, options = LEARNERS.resolve(Part("plain", {"warmth": 2, "steps": 3}))
    assert (kind.title, options.warmth, options.steps) == ("Plain", 2.0, 3)
    assert name in sys.modules
    assert LEARNERS.reduced(LEARNERS.complete(Part("plain"))) == Part("plain")
    with pytest.raises(ConfigError) as caught:
        LEARNERS.resolve(Part("maml", {"warmth": 1.0}))
    assert caught.value.hint == "It is an option of plain (learner.name = 'plain')."


def test_a_learner_of_another_distribution_has_presets_without_a_file(distribution):
    distribution({"plain": "{}:Plain"})
    assert {"plain", "plain-emo", "plain-emo-paper", "plain-offsets"} <= set(presets.names())
    assert presets.preset("plain").learner == Part("plain")
    assert presets.preset("plain-offsets").memory == presets.preset("maml-offsets").memory


def test_our_own_name_wins_over_that_of_another_distribution(distribution):
    distribution({"maml": "{}:Plain"})
    assert LEARNERS["maml"].title == "MAML"


@pytest.mark.parametrize("value", ["no_such_module:Plain", "{}:Nothing"])
def test_a_broken_distribution_is_named_and_disturbs_nothing_else(distribution, value):
    distribution({"broken": value})
    with pytest.raises(ConfigError, match="learner 'broken' cannot be imported") as caught:
        LEARNERS.resolve(Part("broken"))
    assert "Repair or remove the distribution" in caught.value.hint
    assert LEARNERS.resolve(Part("maml"))[0].title == "MAML"
    with pytest.raises(ConfigError) as caught:
        LEARNERS.resolve(Part("maml", {"subspaces": 2}))
    assert caught.value.hint == "It is an option of musml (learner.name = 'musml')."


def test_a_part_without_options_takes_none():
    registry = Registry("thing", "thing", {"path": "pathlib:PurePath"}, group="torchemo.things")
    assert registry.options_of("path") is NoOptions
    assert registry.complete(Part("path")) == registry.reduced(Part("path")) == Part("path")
    with pytest.raises(ConfigError, match=r"thing 'path': unknown option 'thing\.x'"):
        registry.resolve(Part("path", {"x": 1}))


def test_listing_parts_imports_none_of_them():
    code = (
        "import sys, torchemo.learners, torchemo.memory, torchemo.memory.keys\n"
        "names = [*torchemo.learners.LEARNERS, *torchemo.memory.MEMORIES]\n"
        "assert 'maml' in names and 'maml' in torchemo.learners.LEARNERS\n"
        "print([m for m in sys.modules if m == 'torch' or 'gradient' in m])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
