"""The ledger of the paper tells the truth: every name, test, option and default in it is real."""

import ast
import importlib
import re
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import get_type_hints

import pytest
import torch
from beartype.door import is_bearable

from torchemo.config.run import EMOConfig, LearnerConfig
from torchemo.core.losses import cross_entropy
from torchemo.core.types import Batch, Episode, TaskShape
from torchemo.data.episodes import EpisodeSpec
from torchemo.learners.build import build_learner
from torchemo.learners.gradient.inner import task_gradients
from torchemo.models import MLP, Conv4
from torchemo.runs.build import build_emo
from torchemo.training.step import outer_step
from torchemo.training.trainer import OuterConfig

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
ROOTS = {"learner": LearnerConfig, "outer": OuterConfig, "episode": EpisodeSpec}
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
    """Yield ``(name, default, literal)`` of every option on the page; literal is still text."""
    for row in rows_with("Option"):
        if row["Option"] == "no option":
            continue
        lines = [row[column].split("<br>") for column in ("Option", "Ours", "Literal")]
        assert len({len(part) for part in lines}) == 1, f"{row['Option']}: lines do not match"
        for option, ours, literal in zip(*lines, strict=True):
            yield code(option)[0], value_of(code(ours)[0]), literal


OPTIONS = list(options())


def literal_value(text, learner, shot):
    """The value for a learner and a number of shots: the one that bears its name, else the first."""
    words = re.findall(r"(?:([\w-]+): )?`([^`]+)`", text)
    named = {name: value_of(word) for name, word in words}
    assert "" in named, f"no value for all in '{text}'"
    assert named.keys() <= {"", *LEARNERS, *SHOTS}, f"unknown name in '{text}'"
    return named.get(learner, named.get(shot, named[""]))


def field_of(option):
    """Return the dataclass that holds an option and its field, as the page addresses it."""
    *path, name = option.split(".")
    owner = ROOTS[path.pop(0)] if path[0] in ROOTS else EMOConfig
    for part in path:
        owner = get_type_hints(owner)[part]
    found = [field for field in fields(owner) if field.name == name]
    return owner, found[0] if found else None


def default_of(field: Field):
    return field.default if field.default_factory is MISSING else field.default_factory()


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
        assert any(name.startswith("torchemo.") for name in code(row["Code"])), row
        assert code(row["Shown by"]), row


def test_every_reading_is_there_once_with_an_answer():
    rows = rows_with("Reading")
    assert [row["Reading"] for row in rows] == [f"A{n}" for n in range(1, 35)]
    for row in rows:
        assert row["What is open"].endswith("."), row
        assert row["Ours"] not in ("", "–"), row
        assert row["Option"] == "no option" or code(row["Shown by"]), row


def test_every_dotted_name_can_be_imported():
    names = {name for name in code(TEXT) if name.startswith("torchemo.")}
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


@pytest.mark.parametrize(("option", "ours"), [row[:2] for row in OPTIONS])
def test_every_option_is_a_field_with_the_default_that_is_stated(option, ours):
    _, field = field_of(option)
    assert field is not None, f"{option} is no option"
    default = default_of(field)
    assert type(ours) is type(default), f"{option}: the page says {ours!r}, it is {default!r}"
    assert ours == default, f"{option}: the page says {ours!r}, it is {default!r}"


def test_every_option_of_emo_is_in_the_ledger_exactly_once():
    names = [row[0] for row in OPTIONS]
    assert len(names) == len(set(names))
    groups = get_type_hints(EMOConfig)
    assert all(is_dataclass(group) for group in groups.values())
    every = {f"{name}.{field.name}" for name, group in groups.items() for field in fields(group)}
    assert every <= set(names), f"not in docs/paper.md: {sorted(every - set(names))}"


def test_options_named_in_the_text_are_real_and_those_not_offered_are_not():
    missing = re.search(r"^## What is deliberately not offered\n(.*?)^## ", TEXT, re.M | re.S)[1]
    not_offered = set(re.findall(r"^- `([^`]+)`:", missing, flags=re.MULTILINE))
    assert not_offered == {"key.aux", "value.summary"}
    groups = "|".join([*get_type_hints(EMOConfig), *ROOTS])
    for option in code(TEXT):
        if re.fullmatch(rf"(?:{groups})\.\w+", option):
            assert (field_of(option)[1] is None) == (option in not_offered), option


@pytest.mark.parametrize("shot", SHOTS)
@pytest.mark.parametrize("learner", LEARNERS)
def test_every_literal_value_is_a_legal_one(learner, shot):
    for option, _, text in OPTIONS:
        owner, field = field_of(option)
        value = literal_value(text, learner, shot)
        assert is_bearable(value, get_type_hints(owner)[field.name]), f"{option} = {value!r}"


def literal_reading(learner, shot):
    """The options of the literal column as configs."""
    emo = EMOConfig()
    parts = {"learner": LearnerConfig(name=LEARNERS[learner]), "outer": OuterConfig()}
    parts |= {group: getattr(emo, group) for group in get_type_hints(EMOConfig)}
    parts["episode"] = EpisodeSpec(n_shot=int(shot[0]))
    changes = {group: {} for group in parts}
    for option, _, text in OPTIONS:
        group, name = option.split(".")
        changes[group][name] = literal_value(text, learner, shot)
    made = {group: replace(part, **changes[group]) for group, part in parts.items()}
    own = {group: made.pop(group) for group in ("learner", "outer", "episode")}
    return EMOConfig(**made), own


@pytest.mark.parametrize("shot", SHOTS)
@pytest.mark.parametrize("learner", LEARNERS)
def test_the_literal_reading_can_be_built_and_used(learner, shot):
    config, own = literal_reading(learner, shot)
    spec = own["episode"]
    way, size = 2, 16
    tasks = TaskShape("classification", (3, size, size), way, n_shot=spec.n_shot)
    made = build_learner(own["learner"], Conv4(way, image_size=size, filters=2), tasks)
    emo = build_emo(config, made, tasks)
    params = made.init(torch.Generator().manual_seed(1))
    g = torch.Generator().manual_seed(0)

    def batch(per_class):
        x = torch.rand(2, way * per_class, 3, size, size, generator=g)
        return Batch(x, torch.arange(way).repeat(2, per_class))

    recalled = []
    for _ in range(2):
        step = outer_step(made, params, Episode(batch(spec.n_shot), batch(spec.n_query)), emo=emo)
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
