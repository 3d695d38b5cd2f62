"""Runs and configuration files of earlier versions: they open, with a note, and give what they gave."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from torchemo.apps.cli.train import TrainCommand
from torchemo.config.presets import preset
from torchemo.memory.interface import current_names
from torchemo.runs import events
from torchemo.runs.experiment import complete
from torchemo.runs.load import read_config
from torchemo.runs.storage import checkpoint

GOLDEN = Path(__file__).parent / "golden" / "earlier-run"
"""Written by commit d6441dc: ``torchemo train --preset maml-emo --data regression:hsml4 --options
train.iterations=8 train.tasks=2 train.validate_every=4 train.validation_tasks=4 data.n_shot=4 data.n_query=4
model.hidden=[4] learner.steps=1 emo.memory.capacity=3 emo.memory.afterwards=0.5 emo.retrieval.familiar=0.9
emo.retrieval.trust=0.0 emo.key.dim=4``, then ``torchemo eval --tasks 6``."""

pytestmark = pytest.mark.filterwarnings("default:.*earlier version")


@pytest.fixture
def earlier(tmp_path):
    return shutil.copytree(GOLDEN, tmp_path / "run")


def note(root):
    words = "is of an earlier version; its memory is what is called 'offsets' now."
    return f"torchemo: note: {root / 'config.toml'} {words}\n"


def test_an_earlier_run_scores_as_it_did_and_says_what_it_is_called_now(torchemo, earlier):
    before = json.loads((GOLDEN / "eval-test-standard.json").read_text())
    found = torchemo("eval", earlier, "--tasks", 6, "--json")
    assert (found.code, found.err) == (0, note(earlier))
    assert found.json["method"] == "MAML + offsets"
    assert found.json["data"] == before["data"]
    assert found.json["recalled"] == before["familiar"]
    assert found.json["failed"] == before["doubted"] == [0]
    assert torch.allclose(
        torch.tensor(found.json["per_task"]), torch.tensor(before["per_task"]), rtol=1e-4
    )


def test_the_memory_of_an_earlier_run_is_shown_and_sound(torchemo, earlier):
    found = torchemo("memory", "show", earlier, "--json")
    assert (found.code, found.err) == (0, note(earlier))
    saved = checkpoint.load(GOLDEN / "checkpoints" / "step-00000008").groups["emo"]
    assert [slot["recalls"] for slot in found.json["slots"]] == saved[
        "memory.ledger.recalls"
    ].tolist()
    assert found.json["failed"] == saved["trust.doubted"].nonzero().flatten().tolist()
    shown = torchemo("memory", "show", earlier)
    assert "slots that failed validation, and are skipped in evaluation: 0" in shown.out
    found = torchemo("memory", "verify", earlier)
    assert (found.code, found.out.count("memory is sound")) == (0, 2)
    assert torchemo("checkpoint", "verify", earlier).code == 0


def test_an_earlier_run_continues_as_it_would_have(torchemo, earlier):
    shutil.rmtree(earlier / "checkpoints" / "step-00000008")
    found = torchemo("train", "--resume", earlier)
    assert found.code == 0
    assert found.err.startswith(note(earlier))
    assert found.out.startswith("finished after 8 steps")
    step = Path("checkpoints") / "step-00000008"
    then, now = (checkpoint.load(root / step).groups for root in (GOLDEN, earlier))
    for group, state in (("params", then["params"]), ("memory", current_names(dict(then["emo"])))):
        assert state.keys() == now[group].keys()
        for name, tensor in state.items():
            assert torch.allclose(tensor.double(), now[group][name].double(), rtol=1e-4), name


def test_an_earlier_run_is_reported(torchemo, earlier):
    found = torchemo("report", earlier)
    assert (found.code, found.err) == (0, note(earlier))
    page = (earlier / "report.html").read_text()
    assert "MAML + offsets on regression:hsml4" in page
    assert "The learner trained for 4 of 4 outer steps; then it is frozen" in page
    assert "they had 4 of 4 steps." in page
    assert "16.7 % of the tasks skip recall." in page  # of the result of then


def test_earlier_results_say_nothing_of_outer_steps(torchemo, earlier, tmp_path):
    assert torchemo("compare", GOLDEN, GOLDEN).out.count("outer steps") == 0
    other = tmp_path / "other.json"
    record = json.loads((GOLDEN / "eval-test-standard.json").read_text())
    other.write_text(json.dumps({**record, "outer_steps": 9}))
    assert torchemo("compare", GOLDEN, other).out.count("outer steps") == 0
    found = torchemo("compare", GOLDEN, other, "--against", other, other)
    assert (found.code, found.out.count("outer steps")) == (0, 0)


def test_an_earlier_file_starts_the_same_run(torchemo, tmp_path):
    found = torchemo("train", "--out", tmp_path / "new", "--config", GOLDEN / "config.toml")
    assert found.code == 0
    assert found.err.startswith(note(GOLDEN))
    assert found.err.count("torchemo: note:") == 1
    then, now = (
        [e["loss"] for e in events.read(root / "events.jsonl") if e["event"] == "step"]
        for root in (GOLDEN, tmp_path / "new")
    )
    assert now == pytest.approx(then, rel=1e-4)
    assert "[emo" not in (tmp_path / "new" / "config.toml").read_text()


def test_a_run_without_memory_has_none_to_speak_of(torchemo, earlier):
    text = (earlier / "config.toml").read_text()
    (earlier / "config.toml").write_text(text.replace("capacity = 3", "capacity = 0"))
    found = torchemo("memory", "show", earlier)
    assert found.code == 2
    assert f"torchemo: note: {earlier / 'config.toml'} is of an earlier version.\n" in found.err
    assert "has no memory" in found.err


@pytest.mark.parametrize(
    ("name", "text", "changed"),
    [
        ("anil", "[train]\niterations = 7", ("train.steps=7",)),
        ("bmg", "[train]\niterations = 7", ("train.steps=7",)),
        ("bmg", "[learner]\ninner_lr = 0.5\n[emo]", ("learner.base.inner_lr=0.5",)),
        ("maml-emo-paper", "[emo.memory]\ncapacity = 9", ("memory.capacity=9",)),
        ("meta-sgd-emo-paper", "[emo.memory]\ncapacity = 9", ("memory.capacity=9",)),
        ("maml-offsets", "[emo.retrieval]\ntrust = 0.1", ("memory.skip_unhelpful=0.1",)),
        (
            "anil-emo-paper",
            "[emo.aggregator]\nmax_neighbors = 4",
            ("memory.aggregator.max_neighbors=4",),
        ),
        ("maml-offsets", "[emo.key]\ndim = 8", ("memory.key.dim=8",)),
        ("maml-emo", "[emo.memory]\ncapacity = 0", ("memory.name=none",)),
        ("maml", "[emo.retrieval]\nk = 3\n[train]\nseed = 3", ("train.seed=3",)),
        (
            "maml-offsets",
            "[train]\niterations = 100\n[emo.memory]\nafterwards = 0.7",
            ("train.steps=70", "memory.steps=30"),
        ),
    ],
    ids=lambda value: value.replace("\n", " ") if isinstance(value, str) else "",
)
def test_an_earlier_file_over_a_preset_changes_what_it_names(tmp_path, name, text, changed):
    file = tmp_path / "old.toml"
    file.write_text(text + "\n")
    with pytest.warns(UserWarning, match="earlier version"):
        found = TrainCommand(preset=name, config=file).resolved()
    asked = TrainCommand(preset=name, options=changed).resolved()
    assert complete(found) == complete(asked) != complete(preset(name))


def test_an_earlier_file_alone_has_the_defaults_of_then(tmp_path):
    (tmp_path / "config.toml").write_text("[train]\niterations = 7\n")
    with pytest.warns(UserWarning, match="earlier version"):
        config = read_config(tmp_path)
    assert (config.memory.name, config.train.steps) == ("none", 7)
    (tmp_path / "config.toml").write_text("[emo.retrieval]\nk = 3\n")
    with pytest.warns(UserWarning, match="called 'gradients' now"):
        config = read_config(tmp_path)
    assert (config.memory.name, config.memory.options["k"]) == ("gradients", 3)
    assert config.memory.options["aggregator"].name == "gated"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[emo.memory]\ncapcity = 5", "Did you mean 'emo.memory.capacity'?"),
        ("[emo.retrival]\nk = 5", "Did you mean 'emo.retrieval.k'?"),
        ("[emo.memory]\nmax_age = 5", "runs no longer have the option 'emo.memory.max_age'"),
        ("emo = 5", "'emo' should be a table, got 5"),
        ("emo.memory = 5", "'emo.memory' should be a table, got 5"),
        ("train = 5", "'train' should be a table, got 5"),
    ],
)
def test_what_is_wrong_in_an_earlier_file_is_named(torchemo, tmp_path, text, said):
    file = tmp_path / "old.toml"
    file.write_text(text + "\n")
    found = torchemo("train", "--out", tmp_path / "run", "--config", file)
    assert found.code == 2
    assert str(file) in found.err
    assert said in found.err
    assert not (tmp_path / "run").exists()
