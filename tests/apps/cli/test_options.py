"""presets and options: what can be trained and what can be set, as the files and docstrings say it."""

import re
import subprocess
import sys
import tomllib
from dataclasses import fields
from types import SimpleNamespace

import pytest

from torchemo.config import presets
from torchemo.config.presets import names, preset
from torchemo.config.run import (
    AugmentSpec,
    DataConfig,
    DenseConfig,
    OuterConfig,
    StreamSpec,
    TrainConfig,
)
from torchemo.config.toml import dumps
from torchemo.learners import LEARNERS
from torchemo.memory import MEMORIES
from torchemo.memory.keys import KEYS
from torchemo.models import MODELS
from torchemo.runs.experiment import complete
from torchemo.runs.load import load_config


def flat(text):
    return " ".join(re.sub(r"[│┃]", " ", text).split())


# -- presets -------------------------------------------------------------------------------------


def test_every_preset_is_listed_with_what_its_files_say(torchemo):
    found = torchemo("presets", "--json").json
    assert [one["name"] for one in found] == names()
    about = {one["name"]: one for one in found}
    assert about["boil"]["about"] == "BOIL adapts the body alone (Oh et al. 2021)."
    assert about["meta-sgd-emo-paper"]["learner"] == "meta-sgd"
    assert about["meta-sgd-emo-paper"]["memory"] == "emo-paper"
    assert about["maml-offsets"]["about"] == (
        "MAML, second order (Finn, Abbeel, Levine 2017)."
        " Our memory: slots that learn an offset of the initialisation."
    )
    assert about["maml"]["memory"] is None
    shown = torchemo("presets")
    assert shown.code == 0
    for name in names():
        assert re.search(rf"\b{re.escape(name)}(?![\w-])", shown.out), name
    assert "BOIL adapts the body alone (Oh et al. 2021)." in flat(shown.out)


def test_presets_are_listed_by_learner(torchemo):
    rows = [line.split("│")[1].strip() for line in torchemo("presets").out.splitlines()
            if line.startswith("│")]  # fmt: skip
    listed = [cell for cell in rows if cell and not cell.startswith("-")]
    assert listed == presets.learners()


def test_a_preset_in_full_is_a_file_that_train_takes(torchemo, tmp_path):
    found = torchemo("presets", "maml-emo-paper", "--shot", 5)
    assert found.code == 0
    file = tmp_path / "run.toml"
    file.write_text(found.out)
    wanted = complete(preset("maml-emo-paper", n_shot=5))
    assert complete(load_config(file)) == wanted
    assert dumps(wanted) in found.out
    machine = torchemo("presets", "anil-offsets", "--regression", "--json").json
    assert machine == tomllib.loads(dumps(complete(preset("anil-offsets", regression=True))))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("maml-ofsets",), "Did you mean 'maml-offsets'?"),
        (("zzz",), "List them with: torchemo presets"),
        (("--shot", 5), "belong to a NAME"),
        (("arml-published", "--regression"), "Use 'arml'"),
    ],
)
def test_presets_that_there_are_not_are_refused(torchemo, words, said):
    found = torchemo("presets", *words)
    assert (found.code, found.out) == (2, "")
    assert said in found.err


def test_listing_presets_does_not_wait_for_torch():
    code = (
        "import sys; from torchemo.apps.cli import main\n"
        "try: main(['presets'])\n"
        "except SystemExit as left: assert left.code == 0\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_a_learner_of_another_distribution_has_a_preset_without_words(torchemo, monkeypatch):
    theirs = SimpleNamespace(name="theirs")
    monkeypatch.setattr(presets, "entry_points", lambda group: [theirs])
    found = {one["name"]: one["about"] for one in torchemo("presets", "--json").json}
    assert found["theirs"] == "A learner of another distribution."


# -- options -------------------------------------------------------------------------------------


def test_sections_are_listed_with_their_parts(torchemo):
    found = torchemo("options", "--json").json
    assert found["learner"] == found["learner.base"] == list(LEARNERS)
    assert found["memory.key"] == list(KEYS)
    assert found["memory.controller"] == ["fifo", "lru", "clock"]
    assert found["train"] == []
    shown = flat(torchemo("options").out)
    for name in (*LEARNERS, *MODELS, *MEMORIES, *KEYS, "memory.aggregator", "outer", "data"):
        assert name in shown, name


def test_a_section_of_parts_says_what_each_part_is(torchemo):
    found = torchemo("options", "model", "--json").json
    assert list(found["model"]) == list(MODELS)
    for name, line in found["model"].items():
        assert line == MODELS[name].__doc__.strip().splitlines()[0].replace("``", "'")
        assert line in flat(torchemo("options", "model").out)


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ("train", TrainConfig),
        ("data", DataConfig),
        ("outer", OuterConfig),
        ("data.stream", StreamSpec),
        ("data.augment", AugmentSpec),
        ("train.dense", DenseConfig),
    ]
    + [(f"learner.{name}", LEARNERS.options_of(name)) for name in LEARNERS]
    + [(f"memory.{name}", MEMORIES.options_of(name)) for name in MEMORIES]
    + [(f"memory.key.{name}", KEYS.options_of(name)) for name in KEYS]
    + [(f"model.{name}", MODELS.options_of(name)) for name in MODELS],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_option_of_every_part_has_words(torchemo, part, kind):
    found = torchemo("options", part, "--json").json
    assert [one["name"] for one in found["options"]] == [
        field.name
        for field in fields(kind)
        if field.type not in (AugmentSpec, DenseConfig, StreamSpec)
    ]
    for one in found["options"]:
        assert one["help"].strip(), one
        assert one["type"], one
        assert "\n" not in one["help"]
    assert torchemo("options", part).code == 0


def test_an_option_is_shown_as_it_is_typed(torchemo):
    found = {one["name"]: one for one in torchemo("options", "memory.offsets", "--json").json[
        "options"]}  # fmt: skip
    assert found["slot_lr"] == {
        "name": "slot_lr",
        "type": "float",
        "default": 0.001,
        "help": "Adam rate of the slots.",
    }
    assert found["skip_unhelpful"]["default"] == "unset"
    assert found["skip_unhelpful"]["help"].endswith("unset uses all slots.")
    assert found["key"]["type"].startswith("a part: one of transformer, ")
    assert found["steps"]["type"] == "one of 'joint', 'same' or int"
    shown = torchemo("options", "memory.offsets").out
    for typed in ("memory.slot_lr", "memory.key.name", "memory.steps"):
        assert typed in shown
    assert "[0.005, 0.1]" in torchemo("options", "learner.meta-sgd").out
    assert "learner.base.inner_lr" in torchemo("options", "learner.base.maml").out
    assert "it has no options" in torchemo("options", "memory.none").out


def test_what_is_listed_can_be_set(torchemo, tmp_path):
    """Take every default of a part from the list and write it into a file."""
    options = torchemo("options", "memory.gradients", "--json").json["options"]
    plain = "\n".join(
        f"{one['name']} = {default!r}".replace("True", "true").replace("False", "false")
        for one in options
        if not one["type"].startswith("a part") and (default := one["default"]) is not None
    )
    file = tmp_path / "run.toml"
    file.write_text(f'[memory]\nname = "gradients"\n{plain}\n')
    config = complete(load_config(file))
    assert config.memory == MEMORIES.complete(config.memory.__class__("gradients"))


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("meta-sgd", "Did you mean learner.meta-sgd?"),
        ("mean", "Did you mean memory.key.mean or memory.aggregator.mean?"),
        ("lerner.maml", "learner.maml"),
        ("transfromer", "Did you mean memory.key.transformer?"),
        ("trian", "Did you mean train"),
        ("memory.ofsets", "memory.offsets"),
        ("memory.capacity", "'memory.capacity' is an option, not a part"),
        ("train.steps", "torchemo options train"),
        ("xyzzy", "List them with: torchemo options"),
    ],
)
def test_a_part_that_there_is_not_is_answered_with_the_nearest(torchemo, word, said):
    found = torchemo("options", word)
    assert (found.code, found.out) == (2, "")
    assert said in found.err
