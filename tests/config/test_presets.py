"""Presets can be built and run, and are what they were under the names of an earlier version."""

import copy
import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from tests.learners.metric.problems import METRIC
from torchemo.config.presets import MEMORIES, about, learners, names, parts_of, preset
from torchemo.config.registry import Part
from torchemo.config.run import DataConfig, RunConfig
from torchemo.config.toml import from_dict, merged, to_dict
from torchemo.core.errors import ConfigError
from torchemo.core.types import TaskShape
from torchemo.data.source import open_source
from torchemo.learners import LEARNERS
from torchemo.learners.build import build_learner
from torchemo.learners.hosting import host
from torchemo.memory.build import remembered_shapes
from torchemo.models import MLP, MODELS
from torchemo.runs.experiment import build_trainer, complete
from torchemo.runs.upgrade import upgraded

SMALL = DataConfig(image_size=16, classes_per_family=25, n_way=2, n_query=2)
LATER = ("mtl",)
"""Learners with inner steps that came after the earlier version."""
RECIPES = ("adapted-mean", "dense-cosine")
"""Presets that are named after a use of a learner, not after the learner."""
POINTS = TaskShape("regression", (1,), 1, n_shot=5)
EARLIER = json.loads((Path(__file__).parent / "old_presets.json").read_text("utf-8"))
"""Presets of commit d6441dc in plain values: the defaults, and what differs from them by
``<preset> <images or regression> <shots>``; ``-emo-joint`` is what ``at_once`` made of ``-emo``."""


@pytest.fixture(scope="module")
def images():
    return open_source(SMALL)


def quick(part):
    """Give a learner, or the one underneath, one inner step on all of its support set."""
    known = {option.name for option in fields(LEARNERS.options_of(part.name))}
    if "base" in known:
        return part.set(base=quick(part.options["base"]))
    wanted = {"steps": 1, "minibatch": None}
    return part.set(**{n: value for n, value in wanted.items() if n in known})


def narrow(part):
    """Give a network few filters, where it can have them."""
    known = {option.name for option in fields(MODELS.options_of(part.name))}
    return part.set(filters=6) if "filters" in known else part


@pytest.mark.parametrize("name", names())
def test_every_preset_takes_outer_steps_on_images(name, images):
    config = complete(preset(name))
    config = replace(config, model=narrow(config.model), learner=quick(config.learner))
    trainer = build_trainer(config, images.shape)
    for i in range(2):
        report = trainer.step(images.sample("train", seed=0, start=2 * i, count=2))
        assert report.losses.isfinite().all()
    assert (trainer.memory is not None) == (parts_of(name)[1] is not None)


def needs_classes(learner):
    try:
        build_learner(Part(learner), MLP(1), POINTS)
    except ConfigError:
        return True
    return False


def test_learners_that_need_classes_refuse_regression():
    refusing = {learner for learner in LEARNERS if needs_classes(learner)}
    assert refusing == {"proto-maml", *METRIC}
    for learner in refusing:
        with pytest.raises(ConfigError, match="needs classes; these tasks are regression"):
            build_learner(Part(learner), MLP(1), POINTS)


# The paper's settings sum gradients over the support set and step along them at every inner step: on
# regression, where gradients are large, that diverges within two batches for some learners.
FINITE = [
    n
    for n in names()
    if not needs_classes(parts_of(n)[0]) and not n.endswith(("-paper", "-published"))
]


@pytest.mark.parametrize("name", FINITE)
def test_every_preset_of_ours_takes_outer_steps_on_regression(name):
    config = preset(name, regression=True)
    source = open_source(config.data)
    trainer = build_trainer(config, source.shape)
    for i in range(2):
        report = trainer.step(source.sample("train", seed=0, start=4 * i, count=4))
        assert report.losses.isfinite().all()


def test_on_images_slots_of_whole_networks_train_after_the_learner(images):
    config = preset("maml-offsets")
    small = replace(config, model=config.model.set(filters=6))
    made = build_trainer(small, images.shape)
    names = set(remembered_shapes(host(made.learner), "meta"))
    assert names == set(made.learned) == set(made.params)
    alone = preset("maml")
    assert made.memory.warmup == alone.train.steps == config.train.steps == config.outer_steps / 2
    assert made.phases.turn == config.train.steps
    assert (config.learner, config.outer) == (alone.learner, alone.outer)
    rules = (made.memory.skip_unfamiliar.share, made.memory.skip_unhelpful.least)
    assert rules == (0.9, 0.0)
    for other in (preset("maml-offsets", regression=True), preset("musml-offsets")):
        assert other.memory_steps is None
        options = complete(other).memory.options
        assert (options["skip_unfamiliar"], options["skip_unhelpful"]) == ("unset", "unset")


def test_a_learner_of_two_stages_may_not_be_frozen_before_the_second(images):
    config = preset("tsa-maml-offsets")
    assert build_trainer(config, images.shape).phases.turn == 1000
    short = replace(config, train=replace(config.train, steps=500))
    with pytest.raises(
        ConfigError, match="forms its groups at step 564, but it is frozen at step 500"
    ):
        build_trainer(short, images.shape)


def test_jointly_slots_hold_scales_and_shifts(images):
    config = preset("maml-offsets-joint")
    made = build_trainer(replace(config, model=config.model.set(filters=6)), images.shape)
    shapes = remembered_shapes(host(made.learner), "meta", tensors=made.memory.tensors)
    assert set(shapes) == set(made.learner.model.norm)
    assert made.memory.recall_dropout == 0.2
    assert made.phases.turn is None
    # What has no scales and shifts trains jointly anyway.
    assert complete(preset("musml-offsets-joint")) == complete(preset("musml-offsets"))
    points = preset("maml-offsets-joint", regression=True)
    assert complete(points) == complete(preset("maml-offsets", regression=True))


def test_published_sizes_are_refused_for_regression():
    with pytest.raises(ConfigError, match="for images"):
        preset("arml-published", regression=True)


@pytest.mark.parametrize("name", names())
def test_every_preset_says_what_it_is(name):
    assert about(name).endswith(".")
    learner, memory = parts_of(name)
    assert name.removesuffix("-published") == (learner if memory is None else f"{learner}-{memory}")


def test_every_learner_has_a_preset_and_those_with_inner_steps_one_for_every_memory():
    assert set(learners()) == {*LEARNERS, *RECIPES}
    for learner in LEARNERS:
        kinds = {
            memory
            for name in names()
            if (memory := parts_of(name)[1]) and name == f"{learner}-{memory}"
        }
        inner = hasattr(LEARNERS.options_of(learner), "steps") or learner == "bmg"
        assert kinds == (set(MEMORIES) if inner else set()), learner


# -- as they were --------------------------------------------------------------------------------------


def renamed(name):
    """Return what a preset of the earlier version is called."""
    if name.endswith("-emo-joint"):
        return name.removesuffix("-emo-joint") + "-offsets-joint"
    return name.removesuffix("-emo") + "-offsets" if name.endswith("-emo") else name


def flat(plain, path=""):
    found = {}
    for name, value in plain.items():
        found |= flat(value, f"{path}{name}.") if isinstance(value, dict) else {path + name: value}
    return found


def values(config):
    """Return all options of a configuration by their path; steps of a memory as a number."""
    found = flat(to_dict(complete(config)))
    if found.get("memory.steps") == "same":
        found["memory.steps"] = found["train.steps"]
    return found


def deliberate(key):
    """Return what is meant to differ from the earlier version, and its value now."""
    name, kind, _ = key.split(" ")
    if name.endswith("-emo-paper"):
        # Both gradients are summed, and the learner keeps its clip. Reptile never had one.
        inner = "learner.base.inner_loss" if name.startswith("bmg") else "learner.inner_loss"
        clip = {} if name.startswith("reptile") else {"outer.clip": 10.0}
        return {inner: "sum", "memory.reduction": "own", **clip}
    if name.endswith("-emo-joint") and kind == "images" and not name.startswith("musml"):
        # As before slots trained after the learner: as long as the learner alone, and none is judged.
        return {"train.steps": 1000, "train.validation_tasks": 100}
    return {}


@pytest.mark.parametrize("key", EARLIER["presets"])
def test_presets_are_those_of_the_earlier_version(key):
    name, kind, shots = key.split(" ")
    plain = merged(copy.deepcopy(EARLIER["defaults"]), EARLIER["presets"][key])
    then = from_dict(upgraded(plain, where="test"), RunConfig, where="test")
    now = preset(renamed(name), n_shot=int(shots), regression=kind == "regression")
    before, changes = values(then), deliberate(key)
    assert all(before[option] != value for option, value in changes.items())
    assert values(now) == before | changes


def test_no_preset_of_the_earlier_version_is_gone_and_these_are_new():
    then = {renamed(key.split(" ")[0]) for key in EARLIER["presets"]}
    new = set(names()) - then
    assert then <= set(names())
    earlier = {name for name in then if parts_of(name)[1] is None and "-published" not in name}
    recipes = {name for name in names() if parts_of(name)[0] in RECIPES}
    systems = {name for name in names() if parts_of(name)[0] in (*METRIC, *LATER)}
    assert new == {f"{learner}-emo" for learner in earlier} | systems | recipes
    assert recipes == {"adapted-mean", "adapted-mean-offsets", "dense-cosine"}


def test_adapted_mean_is_nearest_mean_until_an_adapter_is_trained():
    network = "efficientnet-lite0"
    alone, slots = (preset(n, pretrained=network) for n in ("adapted-mean", "adapted-mean-offsets"))
    for config in (alone, slots):
        assert config.learner == preset("nearest-mean", pretrained=network).learner
        assert config.model.options["adapter"] == "residual"
        assert config.train.validate_start
    # Only the slots are trained, and tasks without a slot that helps are nearest mean's.
    assert (alone.outer.lr, slots.outer.lr) == (0.0005, 0.0)
    assert slots.memory_steps == 200
    assert slots.memory.options["skip_unhelpful"] == 0.0
    assert slots.memory.options["skip_unfamiliar"] == 0.9


# -- the paper's memory --------------------------------------------------------------------------------

PAPER = {
    "memory.name": "gradients",
    "memory.capacity": 100,
    "memory.k": 20,
    "memory.weights": "uniform",
    "memory.null_distance": "unset",
    "memory.index": "exact",
    "memory.tensors": "all",
    "memory.recall_dropout": 0.0,
    "memory.control": "none",
    "memory.skip_unfamiliar": "unset",
    "memory.value_dtype": "float32",
    "memory.values_dir": "unset",
    "memory.content": "first",
    "memory.reduction": "own",
    "memory.value_clip": "unset",
    "memory.head_align": "none",
    "memory.memory_steps": "all",
    "memory.scope": "shared",
    "memory.key.name": "transformer",
    "memory.key.training": "outer",
    "memory.key.embedder": "shared",
    "memory.key.unit": False,
    "memory.key.dim": 64,
    "memory.key.layers": 6,
    "memory.key.heads": 4,
    "memory.aggregator.name": "mean",
    "memory.aggregator.rescale": "none",
    "memory.aggregator.pad": False,
    "memory.controller.name": "lru",
}
"""The paper's settings as printed, for MAML and one shot."""
COORDINATE = {"name": "coordinate", "init": "own", "max_neighbors": 9}


def memory_of(name, **more):
    found = values(preset(name, **more))
    return {n: v for n, v in found.items() if n.startswith("memory.")}


def test_the_paper_is_as_printed():
    found = memory_of("maml-emo-paper")
    assert {n: found[n] for n in PAPER} == PAPER
    # What is not listed above are sizes and rates of keys that train otherwise.
    assert all(n.startswith("memory.key.") for n in found.keys() - PAPER.keys())
    config = preset("maml-emo-paper")
    assert config.learner == Part("maml", {"inner_lr": 0.001, "inner_loss": "sum"})
    assert (config.outer.lr, config.outer.clip, config.outer.optimizer) == (0.01, 10.0, "adam")


@pytest.mark.parametrize(
    ("learner", "aggregator", "controller"),
    [("maml", "mean", "lru"), ("anil", "coordinate", "lru"), ("meta-sgd", "coordinate", "clock")],
)
def test_aggregator_and_controller_are_those_that_the_paper_picks(learner, aggregator, controller):
    found = complete(preset(f"{learner}-emo-paper")).memory.options
    assert (found["aggregator"].name, found["controller"].name) == (aggregator, controller)
    if aggregator == "coordinate":
        kind = found["aggregator"]
        assert {"name": kind.name, **kind.options} == COORDINATE
    rates = complete(preset(f"{learner}-emo-paper")).learner.options
    assert rates["inner_lr"] == 0.001
    assert rates.get("rate_memory", 0.0) == (0.001 if learner == "meta-sgd" else 0.0)


@pytest.mark.parametrize("kind", ["emo", "emo-paper"])
@pytest.mark.parametrize("learner", ["maml", "anil", "meta-sgd", "arml", "bmg"])
def test_with_five_shots_the_paper_has_more_slots_and_fewer_neighbours(learner, kind):
    one, five = (memory_of(f"{learner}-{kind}", n_shot=shots) for shots in (1, 5))
    assert five == one | {"memory.capacity": 200, "memory.k": 15}


@pytest.mark.parametrize("regression", [False, True])
@pytest.mark.parametrize("learner", [n for n in learners() if f"{n}-emo" in names()])
def test_emo_is_the_paper_with_sum_at_the_first_step_and_the_rates_of_the_learner(
    learner, regression
):
    alone = preset(learner, regression=regression)
    config = preset(f"{learner}-emo", regression=regression)
    assert replace(config, memory=Part("none")) == alone
    found = memory_of(f"{learner}-emo", regression=regression)
    printed = memory_of(f"{learner}-emo-paper", regression=regression)
    picked = {n for n in found | printed if n.startswith("memory.aggregator.")}
    changed = {n for n in found.keys() | printed if found.get(n) != printed.get(n)}
    assert changed - picked == {"memory.memory_steps"}
    assert found["memory.memory_steps"] == "first"
    assert {n: found[n] for n in picked if n in found} == {"memory.aggregator.name": "sum"}
