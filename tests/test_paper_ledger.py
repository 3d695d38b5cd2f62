"""The ledger of the paper tells the truth: every name, test, option and default in it is real."""

import ast
import importlib
import inspect
import re
from dataclasses import fields, replace
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import get_type_hints

import pytest
import torch
from beartype.door import is_bearable

from torchemo.config.presets import preset
from torchemo.config.registry import Part
from torchemo.config.run import OuterConfig, RunConfig
from torchemo.core.losses import cross_entropy
from torchemo.core.types import Batch, Episode, TaskShape
from torchemo.data.episodes import EpisodeSpec
from torchemo.learners import LEARNERS as LEARNER_PARTS
from torchemo.learners.build import build_learner
from torchemo.learners.gradient.inner import task_gradients
from torchemo.learners.hosting import host
from torchemo.memory import MEMORIES
from torchemo.memory.aggregators import AGGREGATORS
from torchemo.memory.controllers import CONTROLLERS, LRU, Clock
from torchemo.memory.emo import EMO, EMOOptions
from torchemo.memory.keys import KEYS
from torchemo.memory.offsets import OffsetMemory
from torchemo.memory.recall import Retrieval
from torchemo.memory.scale.approximate import ApproximateIndex
from torchemo.memory.scale.compressed import CompressedIndex
from torchemo.memory.slots import SlotAdam
from torchemo.models import MLP, Conv4
from torchemo.training.step import outer_step

ROOT = Path(__file__).parents[1]
MODULES = ("torchemo.", "tests.reference.")
TEXT = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
PARTS = {
    "learner": LEARNER_PARTS,
    "memory": MEMORIES,
    "memory.key": KEYS,
    "memory.aggregator": AGGREGATORS,
    "memory.controller": CONTROLLERS,
}
"""Sections of a configuration that choose a part by name."""
USUAL = {
    "learner": "maml",
    "memory": "gradients",
    "memory.key": EMOOptions().key.name,
    "memory.aggregator": EMOOptions().aggregator.name,
    "memory.controller": EMOOptions().controller.name,
}
"""Whose defaults the page states: those of this part, or of the first other one that has the option."""
OTHERS = {"outer": OuterConfig, "episode": EpisodeSpec}
CLASSES = {
    kind.__name__: kind
    for kind in (
        EMO,
        OffsetMemory,
        Retrieval,
        ApproximateIndex,
        CompressedIndex,
        SlotAdam,
        LRU,
        Clock,
    )
}
"""Classes whose arguments the page names, which are no options of runs."""
NOTHING = "–"
LEARNERS = {"MAML": "maml", "ANIL": "anil", "Meta-SGD": "meta-sgd"}
SHOTS = ("1-shot", "5-shot")


# -- reading the page --------------------------------------------------------------------------------


def tables():
    """Yield every table as a list of rows ``{column: cell}``."""
    for block in re.findall(r"(?:^\|.*\n)+", TEXT + "\n", flags=re.MULTILINE):
        rows = [[c.strip() for c in line.strip("|").split("|")] for line in block.splitlines()]
        assert {len(row) for row in rows} == {len(rows[0])}, f"ragged table {rows[0]}"
        yield [dict(zip(rows[0], row, strict=True)) for row in rows[2:]]


def rows_with(column):
    return [row for table in tables() for row in table if column in row]


def code(text):
    return re.findall(r"`([^`]+)`", text)


def value_of(word):
    """A value as the page writes it: a number, true or false, unset, or a word."""
    known = {"true": True, "false": False, "unset": None}
    if word in known:
        return known[word]
    try:
        return ast.literal_eval(word)
    except (ValueError, SyntaxError):
        return word


def options():
    """Yield ``(name, default, paper)`` of every option on the page; the paper's value is still text."""
    for row in rows_with("Option"):
        if row["Option"] == "no option":
            continue
        lines = [row[column].split("<br>") for column in ("Option", "Default", "Paper")]
        assert len({len(part) for part in lines}) == 1, f"{row['Option']}: lines do not match"
        for option, default, paper in zip(*lines, strict=True):
            yield code(option)[0], value_of(code(default)[0]), paper


OPTIONS = list(options())


def paper_value(text, learner, shot):
    """The value for a learner and a number of shots: the one that bears its name, else the first."""
    words = re.findall(r"(?:([\w-]+): )?`([^`]+)`", text)
    named = {name: value_of(word) for name, word in words}
    assert "" in named, f"no value for all in '{text}'"
    assert named.keys() <= {"", *LEARNERS, *SHOTS}, f"unknown name in '{text}'"
    return named.get(learner, named.get(shot, named[""]))


def has(kind, name):
    return name in {field.name for field in fields(kind)}


def owner_of(option):
    """Return the class whose options or arguments hold an option as the page addresses it, or None."""
    section, _, name = option.rpartition(".")
    if section in CLASSES:
        return CLASSES[section] if name in inspect.signature(CLASSES[section]).parameters else None
    if section in OTHERS:
        return OTHERS[section] if has(OTHERS[section], name) else None
    if section not in PARTS:
        return None
    kinds = [PARTS[section].options_of(part) for part in (USUAL[section], *PARTS[section])]
    return next((kind for kind in kinds if has(kind, name)), None)


def chooses_part(option):
    section, _, name = option.rpartition(".")
    return name == "name" and section in PARTS


def is_real(option):
    return chooses_part(option) or owner_of(option) is not None


def default_of(option):
    section, _, name = option.rpartition(".")
    if chooses_part(option):
        return RunConfig().memory.name if section == "memory" else USUAL[section]
    owner = owner_of(option)
    if section in CLASSES:
        return inspect.signature(owner).parameters[name].default
    return getattr(owner(), name)


def is_legal(option, value):
    section, _, name = option.rpartition(".")
    if chooses_part(option):
        return value in PARTS[section]
    owner = owner_of(option)
    hints = get_type_hints(owner)
    return is_bearable(
        value, hints[name] if name in hints else get_type_hints(owner.__init__)[name]
    )


@cache
def functions_of(file):
    """Return the test functions of a file and the source of their decorators."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {f.name: " ".join(map(ast.unparse, f.decorator_list)) for f in functions}


# -- what the page says ------------------------------------------------------------------------------


def test_every_equation_and_algorithm_is_there_once_with_code_and_a_test():
    rows = rows_with("Number")
    expected = [f"({n})" for n in range(1, 21)] + ["Algorithm 1", "Algorithm 2"]
    assert [row["Number"] for row in rows] == expected
    for row in rows:
        assert any(name.startswith(MODULES) for name in code(row["Code"])), row
        assert code(row["Tested by"]), row


def test_every_open_point_is_there_once_with_an_answer():
    rows = rows_with("Point")
    assert [row["Point"] for row in rows] == [f"A{n}" for n in range(1, 35)]
    for row in rows:
        assert row["What is open"].endswith("."), row
        assert row["Default"] not in ("", NOTHING), row
        assert row["Option"] == "no option" or code(row["Tested by"]), row


def test_every_dotted_name_can_be_imported():
    names = {name for name in code(TEXT) if name.startswith(MODULES)}
    assert len(names) > 30
    for name in sorted(names):
        parts = name.split(".")
        for cut in range(len(parts), 0, -1):
            try:
                found = importlib.import_module(".".join(parts[:cut]))
            except ModuleNotFoundError:
                continue
            break
        for part in parts[cut:]:
            assert hasattr(found, part), f"{name}: {found} has no {part}"
            found = getattr(found, part)


def test_every_test_named_exists_and_is_expected_to_pass():
    named = [name for name in code(TEXT) if "::" in name]
    assert len(named) > 60
    for name in named:
        file, function = name.split("::")
        assert (ROOT / file).is_file(), name
        assert function in functions_of(file), name
        assert not re.search(r"xfail|mark\.skip\b", functions_of(file)[function]), name


def test_every_file_named_exists():
    for name in code(TEXT):
        if name.endswith((".py", ".md")):
            assert (ROOT / name).is_file(), name


@pytest.mark.parametrize(("option", "stated"), [row[:2] for row in OPTIONS])
def test_every_option_is_there_with_the_default_that_is_stated(option, stated):
    assert is_real(option), f"{option} is no option"
    default = default_of(option)
    assert type(stated) is type(default), f"{option}: the page says {stated!r}, it is {default!r}"
    assert stated == default, f"{option}: the page says {stated!r}, it is {default!r}"


def test_every_option_of_a_memory_is_in_the_ledger_exactly_once():
    names = [row[0] for row in OPTIONS]
    assert len(names) == len(set(names))
    memory = {section: registry for section, registry in PARTS.items() if section != "learner"}
    every = {
        f"{section}.{field.name}"
        for section, registry in memory.items()
        for part in registry
        for field in fields(registry.options_of(part))
        if f"{section}.{field.name}" not in memory
    } | {f"{section}.name" for section in memory}
    assert len(every) > 40
    assert every <= set(names), f"not in docs/paper.md: {sorted(every - set(names))}"


def test_options_named_in_the_text_are_real_and_those_not_offered_are_not():
    missing = re.search(r"^## What is deliberately not offered\n(.*?)^## ", TEXT, re.M | re.S)[1]
    not_offered = set(re.findall(r"^- `([^`]+)`:", missing, flags=re.MULTILINE))
    assert not_offered == {"memory.key.aux", "memory.summary"}
    sections = "|".join(map(re.escape, [*PARTS, *OTHERS, *CLASSES]))
    named = [option for option in code(TEXT) if re.fullmatch(rf"(?:{sections})\.\w+", option)]
    assert len(named) > len(OPTIONS)
    for option in named:
        assert is_real(option) == (option not in not_offered), option


@pytest.mark.parametrize("shot", SHOTS)
@pytest.mark.parametrize("learner", LEARNERS)
def test_every_value_of_the_paper_is_a_legal_one(learner, shot):
    for option, _, text in OPTIONS:
        if text != NOTHING:
            value = paper_value(text, learner, shot)
            assert is_legal(option, value), f"{option} = {value!r}"


def paper_variant(learner, shot):
    """Return the column *Paper* as ``(memory part, {learner: part, outer: ..., episode: ...})``."""
    values = {o: paper_value(text, learner, shot) for o, _, text in OPTIONS if text != NOTHING}
    parts = {section: Part(values.get(f"{section}.name", USUAL[section])) for section in PARTS}
    parts["learner"] = Part(LEARNERS[learner])
    own = {"outer": OuterConfig(), "episode": EpisodeSpec(n_shot=int(shot[0]))}
    for option, value in values.items():
        section, _, name = option.rpartition(".")
        if section in own:
            own[section] = replace(own[section], **{name: value})
        elif section in CLASSES or (
            name != "name" and not has(PARTS[section].options_of(parts[section].name), name)
        ):
            # Runs cannot set it, or the chosen part does not have it: it must not ask for anything.
            assert value == default_of(option), option
        elif name != "name":
            parts[section] = parts[section].set(**{name: value})
    inner = {name: parts[f"memory.{name}"] for name in ("key", "aggregator", "controller")}
    return parts["memory"].set(**inner), {"learner": parts["learner"], **own}


@pytest.mark.parametrize("shot", SHOTS)
@pytest.mark.parametrize("learner", LEARNERS)
def test_the_paper_variant_is_the_preset_of_that_name(learner, shot):
    memory, own = paper_variant(learner, shot)
    config = preset(f"{LEARNERS[learner]}-emo-paper", n_shot=int(shot[0]))
    assert MEMORIES.complete(config.memory) == MEMORIES.complete(memory)
    assert LEARNER_PARTS.complete(config.learner) == LEARNER_PARTS.complete(own["learner"])
    assert config.outer == own["outer"]


@pytest.mark.parametrize("shot", SHOTS)
@pytest.mark.parametrize("learner", LEARNERS)
def test_the_paper_variant_can_be_built_and_used(learner, shot):
    memory, own = paper_variant(learner, shot)
    spec = own["episode"]
    way, size = 2, 16
    tasks = TaskShape("classification", (3, size, size), way, n_shot=spec.n_shot)
    made = build_learner(own["learner"], Conv4(way, image_size=size, filters=2), tasks)
    kind, options = MEMORIES.resolve(memory)
    emo = kind.build(options, host(made), tasks)
    params = made.init(torch.Generator().manual_seed(1))
    g = torch.Generator().manual_seed(0)

    def batch(per_class):
        x = torch.rand(2, way * per_class, 3, size, size, generator=g)
        return Batch(x, torch.arange(way).repeat(2, per_class))

    recalled = []
    for _ in range(2):
        step = outer_step(
            made, params, Episode(batch(spec.n_shot), batch(spec.n_query)), memory=emo
        )
        emo.remember(step.recall, step.values)
        recalled.append(step.recall.m)
        assert all(gradient.isfinite().all() for gradient in step.gradients.values())
    assert recalled == [0, 2]


# -- the second fact ---------------------------------------------------------------------------------


def test_averaged_over_label_orders_a_support_gradient_asks_for_uniform_answers():
    """The loss is linear in its targets, so the mean over all label orders has uniform targets."""
    way, shot = 4, 2
    model = MLP(way, n_in=3, hidden=(5,), initializer="kaiming", activation="tanh")
    g = torch.Generator().manual_seed(0)
    start = {name: p.double()[None] for name, p in model.init(g).items()}
    x = torch.randn(1, way * shot, 3, generator=g, dtype=torch.float64)
    y = torch.arange(way).repeat(1, shot)

    def gradient(loss):
        theta = {name: p.clone().requires_grad_() for name, p in start.items()}
        return task_gradients(loss(model(theta, x)), theta)

    orders = [torch.tensor(order) for order in permutations(range(way))]
    each = [gradient(lambda out, o=order: cross_entropy(out, o[y])) for order in orders]
    uniform = gradient(lambda out: -out.log_softmax(-1).mean((1, 2)))
    for name, expected in uniform.items():
        mean = torch.stack([one[name] for one in each]).mean(0)
        torch.testing.assert_close(mean, expected, rtol=1e-12, atol=1e-15)
        if name.endswith("weight"):  # with as many examples of each class, head biases see no order
            assert (each[0][name] - expected).norm() > 0.1 * expected.norm()
