"""Configurations of earlier versions get the names of today; what runs no longer have is refused."""

import copy
import json
import re
from pathlib import Path

import pytest
import tomli_w

from torchemo.config.presets import preset
from torchemo.config.registry import Part
from torchemo.config.run import RunConfig, TrainConfig
from torchemo.config.toml import dumps, from_dict, merged, to_dict
from torchemo.core.errors import ConfigError
from torchemo.runs.experiment import complete
from torchemo.runs.folder import RunFolder
from torchemo.runs.load import load_config, read_config
from torchemo.runs.upgrade import is_old, refuse_old, upgraded

FOLDER = Path(__file__).parents[1] / "config"
DEFAULTS = json.loads((FOLDER / "old_presets.json").read_text("utf-8"))["defaults"]
"""A complete configuration of commit d6441dc: MAML, and a memory that has no slots."""
GRADIENTS = {"emo": {"memory": {"capacity": 100}}}
OFFSETS = {"emo": {"memory": {"write": "consolidate"}, "value": {"content": "meta"}}}


def nested(path, value):
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


def earlier(*changes):
    """Return a complete configuration of the earlier version with slots and with changes."""
    plain = copy.deepcopy(DEFAULTS)
    for change in (GRADIENTS, *changes):
        plain = merged(plain, change)
    return plain


def today(plain, **more):
    """Return all options that a configuration of the earlier version has today, by their path."""
    config = from_dict(upgraded(plain, where="run.toml", **more), RunConfig, where="run.toml")
    return flat(to_dict(complete(config)))


def flat(plain, path=""):
    found = {}
    for name, value in plain.items():
        found |= flat(value, f"{path}{name}.") if isinstance(value, dict) else {path + name: value}
    return found


SAME = (
    ("emo.memory.capacity", "memory.capacity", 7),
    ("emo.memory.value_dtype", "memory.value_dtype", "float64"),
    ("emo.memory.values_dir", "memory.values_dir", "slots"),
    ("emo.retrieval.k", "memory.k", 3),
    ("emo.retrieval.k", "memory.k", "unset"),
    ("emo.retrieval.null_distance", "memory.null_distance", 0.3),
    ("emo.retrieval.index", "memory.index", "random"),
    ("emo.retrieval.familiar", "memory.skip_unfamiliar", 0.9),
    ("emo.value.recall_dropout", "memory.recall_dropout", 0.2),
    ("emo.value.control", "memory.control", "random_values"),
    ("emo.value.tensors", "memory.tensors", "norm"),
    ("emo.key.dim", "memory.key.dim", 8),
    ("emo.key.layers", "memory.key.layers", 1),
    ("emo.key.heads", "memory.key.heads", 2),
    ("emo.key.ff", "memory.key.ff", 16),
    ("emo.key.use_labels", "memory.key.use_labels", True),
    ("emo.key.embedder", "memory.key.embedder", "shared"),
    ("emo.key.training", "memory.key.training", "self_recognition"),
    ("emo.key.recognition_older", "memory.key.recognition_older", 5),
)
"""Options of every memory: old path, new path, a value."""
OF_GRADIENTS = (
    ("emo.memory.scope", "memory.scope", "group"),
    ("emo.retrieval.weights", "memory.weights", "uniform"),
    ("emo.value.content", "memory.content", "mean"),
    ("emo.value.head_align", "memory.head_align", "drop"),
    ("emo.value.memory_steps", "memory.memory_steps", "all"),
    ("emo.value.memory_steps", "memory.memory_steps", 0.5),
    ("emo.value.clip", "memory.value_clip", 2.0),
    ("emo.memory.controller", "memory.controller.name", "clock"),
    ("emo.aggregator.per_step", "memory.aggregator.per_step", True),
    ("emo.aggregator.learn_own", "memory.aggregator.learn_own", True),
)
OF_OFFSETS = (
    ("emo.memory.slot_lr", "memory.slot_lr", 0.01),
    ("emo.memory.slot_decay", "memory.slot_decay", 0.1),
    ("emo.memory.warmup", "memory.warmup", 9),
    ("emo.retrieval.trust", "memory.skip_unhelpful", 0.0),
)
OF_RUNS = (
    ("learner.inner_lr", "learner.inner_lr", 0.3),
    ("learner.steps", "learner.steps", 2),
    ("learner.rule", "learner.rule", "adam"),
    ("learner.order", "learner.order", 1),
    ("learner.adapt_bn", "learner.adapt_bn", True),
    ("learner.inner_loss_scale", "learner.inner_loss", "n_way"),
    ("model.filters", "model.filters", 8),
    ("model.bn", "model.bn", "running"),
    ("outer.lr", "outer.lr", 0.01),
    ("outer.clip", "outer.clip", "unset"),
    ("outer.schedule", "outer.schedule", "cosine"),
    ("data.n_way", "data.n_way", 3),
    ("data.source", "data.source", ["birds.zip"]),
    ("train.iterations", "train.steps", 77),
    ("train.tasks", "train.tasks", 2),
    ("train.seed", "train.seed", 5),
)


@pytest.mark.parametrize(("old", "new", "value"), [*SAME, *OF_GRADIENTS, *OF_RUNS])
def test_every_option_of_a_run_with_gradients_has_its_place(old, new, value):
    before, after = today(earlier()), today(earlier(nested(old, value)))
    assert before[new] != value
    assert after == before | {new: value}


@pytest.mark.parametrize(("old", "new", "value"), [*SAME, *OF_OFFSETS])
def test_every_option_of_a_run_with_offsets_has_its_place(old, new, value):
    before, after = today(earlier(OFFSETS)), today(earlier(OFFSETS, nested(old, value)))
    assert before["memory.name"] == "offsets"
    assert before[new] != value
    assert after == before | {new: value}


UNUSED = ("emo.memory.controller", "emo.value.memory_steps", "emo.value.clip", "emo.aggregator")


@pytest.mark.parametrize(
    ("old", "value"), [(old, v) for old, _, v in OF_GRADIENTS if old.startswith(UNUSED)]
)
def test_what_offsets_never_used_is_left_out(old, value):
    assert today(earlier(OFFSETS, nested(old, value))) == today(earlier(OFFSETS))


def test_what_a_complete_configuration_becomes():
    found = today(earlier())
    assert found["learner.name"] == "maml"
    assert found["model.name"] == "conv4"
    assert found["memory.name"] == "gradients"
    names = ("key", "aggregator", "controller")
    assert [found[f"memory.{n}.name"] for n in names] == ["transformer", "gated", "lru"]
    assert found["train.steps"] == 1000
    assert "outer.recognition_after" not in found
    assert not any(n.startswith("emo") for n in found)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"kind": "mean", "rescale": "own"}, {"name": "mean", "rescale": "own", "pad": False}),
        ({"kind": "sum"}, {"name": "sum"}),
        ({"kind": "gate", "layers": 2}, {"name": "gate", "init": "own", "layers": 2}),
        (
            {"kind": "coordinate", "max_neighbors": 9},
            {"name": "coordinate", "init": "own", "max_neighbors": 9},
        ),
    ],
)
def test_aggregators_keep_their_own_options_alone(old, new):
    found = today(earlier({"emo": {"aggregator": old}}))
    own = {n.removeprefix("memory.aggregator."): v for n, v in found.items() if ".aggregator." in n}
    assert {n: own[n] for n in new} == new
    assert own.keys() - new.keys() <= {"max_neighbors"}


@pytest.mark.parametrize(
    ("old", "name"),
    [
        ({"network": "mean"}, "mean"),
        ({"network": "statistics", "training": "outer"}, "statistics"),
        ({"network": "learned_statistics"}, "learned-statistics"),
        ({"source": "arml"}, "learner"),
        ({"source": "arml", "network": "mean"}, "learner"),
    ],
)
@pytest.mark.parametrize("memory", [{}, OFFSETS])
def test_keys_are_named_after_their_network_or_the_learner(old, name, memory):
    assert today(earlier(memory, {"emo": {"key": old}}))["memory.key.name"] == name


@pytest.mark.parametrize(
    ("old", "new"), [("mean", "own"), ("sum", "sum"), ("n_times_mean", "n_way")]
)
def test_reductions_say_today_what_is_stored_beside_the_own_gradient(old, new):
    found = today(earlier({"emo": {"value": {"reduction": old}}}))
    assert found["memory.reduction"] == new


def test_a_memory_without_slots_is_none():
    for kind in ({}, OFFSETS):
        found = today(earlier(kind, {"emo": {"memory": {"capacity": 0}}}))
        assert {n: v for n, v in found.items() if n.startswith("memory")} == {"memory.name": "none"}


@pytest.mark.parametrize(
    ("iterations", "share", "learner", "memory"),
    [(2000, 0.5, 1000, 1000), (9, 0.25, 2, 7), (10, 0.01, 1, 9), (7, 0.5, 4, 3)],
)
def test_slots_that_trained_after_the_learner_have_steps_of_their_own(
    iterations, share, learner, memory
):
    change = {"train": {"iterations": iterations}, "emo": {"memory": {"afterwards": share}}}
    found = today(earlier(OFFSETS, change))
    assert (found["train.steps"], found["memory.steps"]) == (learner, memory)
    config = from_dict(
        upgraded(earlier(OFFSETS, change), where="run.toml"), RunConfig, where="run.toml"
    )
    assert config.outer_steps == iterations


def test_slots_that_trained_jointly_do_so_today():
    assert today(earlier(OFFSETS))["memory.steps"] == "joint"


LEARNER_OPTIONS = {
    "meta-sgd": {"rate_shape": "scalar", "rate_init": [0.1, 0.2], "rate_memory": 0.0},
    "reptile": {"minibatch": 4},
    "maml++": {"multi_step_loss": False, "learned_rates": False, "first_order_epochs": 3},
    "arml": {"task_dim": 8, "task_width": 3.0, "aux_weight": 0.5, "vertices": 2},
    "hsml": {"task_dim": 8, "task_width": 3.0, "aux_weight": 0.5, "tree": [3, 2]},
    "tsa-maml": {"groups": 2, "first_stage": 9, "cluster_tasks": 8, "cluster_on": "all"},
    "musml": {"subspaces": 2, "subspace_dim": 3, "temperature": [2.0, 0.5], "anneal": 10},
    "anil": {},
    "boil": {},
    "fomaml": {},
    "proto-maml": {},
}


@pytest.mark.parametrize("name", LEARNER_OPTIONS)
def test_of_the_one_list_of_options_every_learner_keeps_its_own(name):
    every = {n: v for options in LEARNER_OPTIONS.values() for n, v in options.items()}
    found = today(earlier({"learner": {"name": name, "inner_lr": 0.2, **every}}))
    own = {n.removeprefix("learner."): v for n, v in found.items() if n.startswith("learner.")}
    assert (own["name"], own["inner_lr"]) == (name, 0.2)
    wanted = LEARNER_OPTIONS[name]
    assert {n: own[n] for n in wanted} == wanted
    foreign = every.keys() - wanted.keys()
    assert not foreign & own.keys()


@pytest.mark.parametrize("base", ["maml", "anil", "meta-sgd", "arml"])
def test_the_learner_under_bmg_takes_the_options_of_its_inner_loop(base):
    given = {"name": "bmg", "base": base, "match": "l2", "target_steps": 3, "target_rate": 0.1}
    inner = {"inner_lr": 0.2, "steps": 2, "inner_loss_scale": "n_way", "task_dim": 8}
    found = today(earlier({"learner": {**given, **inner}}))
    own = {n.removeprefix("learner."): v for n, v in found.items() if n.startswith("learner.")}
    assert [own[n] for n in ("name", "match", "target_steps", "target_rate")] == [
        "bmg",
        "l2",
        3,
        0.1,
    ]
    assert own["base.name"] == base
    assert (own["base.inner_lr"], own["base.steps"], own["base.inner_loss"]) == (0.2, 2, "n_way")
    assert own.get("base.task_dim") == (8 if base == "arml" else None)
    assert "inner_lr" not in own


@pytest.mark.parametrize(
    ("name", "options"),
    [("mlp", {"hidden": [3, 4]}), ("resnet12", {}), ("conv4", {"filters": 4})],
)
def test_networks_keep_their_own_options_alone(name, options):
    found = today(earlier({"model": {"name": name, "hidden": [3, 4], "filters": 4}}))
    own = {n.removeprefix("model."): v for n, v in found.items() if n.startswith("model.")}
    assert {n: own[n] for n in options} == options
    assert ("hidden" in own, "filters" in own) == (name == "mlp", name == "conv4")


GONE = (
    ("emo.memory.insert_ref", False),
    ("emo.memory.update_last", 0.1),
    ("emo.memory.max_age", 5),
    ("emo.memory.min_fill", 2),
    ("emo.memory.rekey_every", 10),
    ("emo.memory.slot_key_lr", 0.1),
    ("emo.memory.slot_update", "lazy"),
    ("emo.memory.novelty", 0.5),
    ("emo.retrieval.probes", 8),
    ("emo.retrieval.temperature", 0.4),
    ("emo.key.recognition_lr", 0.01),
    ("emo.key.recognition_every", 4),
    ("emo.value.recall_step", "always"),
    ("outer.recognition_after", 0.5),
)


@pytest.mark.parametrize("memory", [{}, OFFSETS])
@pytest.mark.parametrize(("option", "value"), GONE)
def test_an_option_that_runs_no_longer_have_is_refused_with_its_value(option, value, memory):
    words = f"run.toml: runs no longer have the option '{option}', got {value!r}."
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        upgraded(earlier(memory, nested(option, value)), where="run.toml")
    assert "argument of its class" in caught.value.hint
    usual = flat(DEFAULTS)[option]
    assert upgraded(earlier(memory, nested(option, usual)), where="run.toml")
    # A file that has nothing but this option is refused as well.
    with pytest.raises(ConfigError, match="no longer have"):
        upgraded(merged({"train": {"iterations": 5}}, nested(option, value)), where="run.toml")


def test_offsets_without_the_head_are_refused_and_gradients_without_it_are_not():
    without = {"emo": {"value": {"head_align": "drop"}}}
    with pytest.raises(ConfigError, match=r"no longer have the option 'emo\.value\.head_align'"):
        upgraded(earlier(OFFSETS, without), where="run.toml")
    assert today(earlier(without))["memory.head_align"] == "drop"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"learner": {"stepz": 1}}, r"unknown option 'learner\.stepz'"),
        ({"emo": {"memory": {"capasity": 1}}}, r"unknown option 'emo\.memory\.capasity'"),
        ({"emo": {"key": {"zebra": 1}}}, r"unknown option 'emo\.key\.zebra'"),
        ({"emo": {"zebra": {"x": 1}}}, r"unknown option 'emo\.zebra"),
        ({"emo": 3}, "'emo' should be a table, got 3"),
        ({"emo": {"memory": 3}}, r"'emo\.memory' should be a table, got 3"),
        ({"train": {"iterations": 5, "zebra": 1}}, r"unknown option 'train\.zebra'"),
        ({"outer": {"zebra": 1}}, r"unknown option 'outer\.zebra'"),
    ],
)
def test_mistakes_are_refused_by_the_names_of_then(change, words):
    with pytest.raises(ConfigError, match=words):
        today({**earlier(), **change} if change.get("emo") == 3 else earlier(change))


# -- parts of configurations ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plain", "old"),
    [
        ({}, False),
        ({"train": {"steps": 3}}, False),
        ({"train": 3}, False),
        ({"memory": {"name": "offsets"}}, False),
        ({"train": {"iterations": 3}}, True),
        ({"emo": {}}, True),
    ],
)
def test_a_configuration_of_an_earlier_version_is_known_by_its_names(plain, old):
    assert is_old(plain) is old


def test_one_of_today_is_left_as_it_is():
    plain = to_dict(complete(preset("maml-offsets")))
    found = upgraded(plain, where="run.toml")
    assert found == plain
    assert found is not plain


def test_a_file_that_names_a_few_options_changes_those_of_its_base_alone():
    base = preset("anil-offsets")
    plain = {
        "train": {"iterations": 7},
        "learner": {"inner_lr": 0.3},
        "emo": {"retrieval": {"k": 2}},
    }
    found = upgraded(plain, where="run.toml", base=base)
    whole = merged(to_dict(base), found)
    config = complete(from_dict(whole, RunConfig, where="run.toml"))
    expected = flat(to_dict(complete(base)))
    expected |= {"train.steps": 7, "learner.inner_lr": 0.3, "memory.k": 2}
    assert flat(to_dict(config)) == expected


def test_a_file_without_a_memory_keeps_that_of_its_base():
    for name in ("maml", "maml-emo", "maml-offsets"):
        base = preset(name)
        found = upgraded({"train": {"iterations": 7}}, where="run.toml", base=base)
        config = from_dict(merged(to_dict(base), found), RunConfig, where="run.toml")
        assert complete(config).memory == complete(base).memory
        assert config.train.steps == 7


def test_a_share_of_the_training_is_one_of_the_base_where_the_file_has_no_length():
    base = RunConfig(memory=Part("offsets"), train=TrainConfig(steps=40))
    plain = {"emo": {"memory": {"write": "consolidate", "afterwards": 0.25}}}
    found = upgraded(plain, where="run.toml", base=base)
    assert (found["train"]["steps"], found["memory"]["steps"]) == (10, 30)


def test_another_kind_of_memory_than_that_of_the_base_brings_its_own_options_alone():
    base = preset("maml-emo")
    plain = {"emo": {"memory": {"write": "consolidate", "capacity": 4}}}
    found = upgraded(plain, where="run.toml", base=base)
    memory = complete(from_dict(merged(to_dict(base), found), RunConfig, where="run.toml")).memory
    assert memory.name == "offsets"
    assert (memory.options["capacity"], memory.options["weights"]) == (4, "softmax")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("train.iterations", "It is train.steps now"),
        ("learner.inner_loss_scale", "It is learner.inner_loss now"),
        ("emo.memory.capacity", "It is memory.capacity now"),
        ("emo.memory.write", "It is memory.name now"),
        ("emo.retrieval.trust", "It is memory.skip_unhelpful now"),
        ("emo.value.clip", "It is memory.value_clip now"),
        ("emo.key.dim", "It is memory.key.dim now"),
        ("emo.aggregator.kind", "It is memory.aggregator.name now"),
        ("emo.memory.novelty", "It is an argument of its class"),
    ],
)
def test_an_option_typed_by_its_old_name_is_told_its_new_one(path, words):
    with pytest.raises(ConfigError, match=words):
        refuse_old(path)


def test_names_of_today_are_not_refused():
    for path in ("train.steps", "memory.k", "learner.base.steps", "outer.lr", "zebra"):
        refuse_old(path)


# -- files ------------------------------------------------------------------------------------------------


def old_file(tmp_path, *changes):
    path = RunFolder(tmp_path).config
    path.write_text(tomli_w.dumps(earlier(*changes)))
    return path


@pytest.mark.parametrize(("changes", "kind"), [((), "gradients"), ((OFFSETS,), "offsets")])
def test_a_run_of_an_earlier_version_is_read_with_a_warning(tmp_path, changes, kind):
    path = old_file(tmp_path, *changes)
    with pytest.warns(UserWarning, match=f"earlier version.*'{kind}'"):
        config = read_config(tmp_path)
    assert config == complete(config)
    assert flat(to_dict(config)) == today(earlier(*changes))
    with pytest.warns(UserWarning, match="earlier version"):
        assert complete(load_config(path)) == config
    # Written again, it is of today and says nothing.
    path.write_text(dumps(config))
    assert read_config(tmp_path) == config


@pytest.mark.parametrize(
    ("option", "usual", "other"),
    [
        ("memory.temperature", 0.1, 0.4),
        ("memory.key.recognition_lr", 0.001, 0.01),
        ("memory.key.recognition_every", "unset", 4),
    ],
)
def test_a_run_with_the_names_of_today_may_have_options_that_left_later(option, usual, other):
    plain = to_dict(preset("maml-offsets"))
    assert upgraded(merged(plain, nested(option, usual)), where="run.toml") == plain
    with pytest.raises(ConfigError, match=re.escape(f"'{option}', got {other!r}")):
        upgraded(merged(plain, nested(option, other)), where="run.toml")
