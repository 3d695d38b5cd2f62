"""Runs of an earlier version: opened, resumed bit for bit, and evaluated as that version did."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.runs.small import final_state, stop_after
from torchemo.core.errors import ConfigError
from torchemo.runs.environment import differences, environment
from torchemo.runs.experiment import open_experiment
from torchemo.runs.load import load_best, load_trained, read_config
from torchemo.runs.score import Protocol, score_tasks
from torchemo.runs.train import train_run

pytestmark = [
    pytest.mark.faults,
    pytest.mark.filterwarnings("ignore:.*is of an earlier version:UserWarning"),
]

GOLDEN = Path(__file__).parent / "faults" / "golden" / "format-1-memory"
"""Runs of commit d6441dc that were stopped on the way, and what that version made of them
(``expected.json``: parameters and memory at the end under the names of today, and a test result).

gradients: the paper's memory, with gates and keys that the outer loss trains. offsets-joint: offsets that
train jointly with the learner; that version gave them an aggregator, which nothing used, so that all keys
have higher numbers in its optimizer. offsets-after: offsets that train alone from step 3 on.
"""
KINDS = {"gradients": "gradients", "offsets-joint": "offsets", "offsets-after": "offsets"}
STOPPED = {"gradients": 4, "offsets-joint": 4, "offsets-after": 2}


@pytest.fixture(autouse=True)
def one_thread():
    """Sums of several threads have other bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def earlier(kind, tmp_path):
    return Path(shutil.copytree(GOLDEN / kind, tmp_path / "run"))


def expected(kind):
    return json.loads((GOLDEN / kind / "expected.json").read_text())


def same_bits(root):
    """Whether this machine computes the bits of the one that made the runs."""
    return not differences(json.loads((root / "environment.json").read_text()), environment())


def assert_ended_as_expected(root, kind):
    saved, right, digest, norms = final_state(root), expected(kind), hashlib.sha256(), {}
    for group in ("params", "memory"):
        for name, tensor in sorted(saved.groups[group].items()):
            raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            digest.update(f"{group}/{name}".encode() + raw)
            norms[f"{group}/{name}"] = float(tensor.double().norm())
    assert saved.step == right["step"]
    assert norms.keys() == right["norms"].keys()
    for name, norm in right["norms"].items():
        assert norms[name] == pytest.approx(norm, rel=1e-3, abs=1e-4), name
    if same_bits(root):
        assert digest.hexdigest() == right["sha256"]


def test_it_says_once_that_it_is_of_an_earlier_version_and_what_its_memory_is_called(earlier, kind):
    with pytest.warns(UserWarning, match=f"earlier version.*'{KINDS[kind]}'") as said:
        config = read_config(earlier)
    assert len(said) == 1
    assert config.memory.name == KINDS[kind]
    assert config.outer_steps == 6
    assert config.memory_steps == (3 if kind == "offsets-after" else None)


def test_it_resumes_bit_for_bit(earlier, kind):
    assert train_run(earlier).ended == "finished"
    assert_ended_as_expected(earlier, kind)


def test_it_resumes_bit_for_bit_in_pieces_of_the_present_version(earlier, kind):
    """The first new checkpoint has the names and numbers of today, and is resumed in turn."""
    while train_run(earlier, should_stop=stop_after(1)).ended == "stopped":
        saved = final_state(earlier)
        assert "memory" in saved.groups
        assert "emo" not in saved.groups
    assert_ended_as_expected(earlier, kind)


def test_every_moment_of_its_optimizer_finds_its_parameter(earlier):
    trainer = open_experiment(read_config(earlier)).trainer
    groups = {name: dict(group) for name, group in final_state(earlier).groups.items()}
    trainer.load_state_dict(groups)
    known = {id(p): n for n, p in (trainer.learned | trainer.memory_learned).items()}
    state = {known[id(p)]: (p, moments) for p, moments in trainer.optimizer.state.items()}
    for name, (parameter, moments) in state.items():
        assert moments["exp_avg"].shape == parameter.shape, name
    assert trainer.learned.keys() <= state.keys()
    unused = [n for n in groups["emo"] if n.startswith("aggregator.")]
    kept = len(unused) if trainer.memory.offsets_start else 0
    assert 3 * (len(state) + kept) == len(groups["optimizer"])


def test_it_is_evaluated_as_that_version_did(earlier, kind):
    train_run(earlier)
    right = expected(kind)["result"]
    record = score_tasks(load_best(earlier), Protocol("paper", tasks=4))
    assert torch.allclose(torch.tensor(record["per_task"]), torch.tensor(right["per_task"]))
    if same_bits(earlier):
        assert record["per_task"] == right["per_task"]
    assert (record["step"], record["recalled"]) == (right["step"], right["recalled"])
    assert record["failed"] == right["failed"]


def test_it_opens_for_tasks_of_your_own_where_it_was_stopped(earlier, kind):
    trained = load_trained(earlier)
    groups = final_state(earlier).groups
    assert trained.system.iteration == STOPPED[kind]
    assert trained.shape.n_shot == trained.config.data.n_shot
    for name, tensor in groups["params"].items():
        assert torch.equal(trained.system.params[name], tensor)
    store = trained.system.memory.store
    assert torch.equal(store.keys, groups["emo"]["memory.keys"])
    assert trained.system.title == f"MAML + {'EMO' if kind == 'gradients' else 'offsets'}"


@pytest.mark.parametrize("which", ["offsets-joint", "offsets-after"])
def test_offsets_without_the_head_are_refused(which, tmp_path):
    text = (GOLDEN / which / "config.toml").read_text()
    (tmp_path / "config.toml").write_text(
        text.replace('head_align = "none"', 'head_align = "drop"')
    )
    with pytest.raises(ConfigError, match=r"no longer have the option 'emo\.value\.head_align'"):
        train_run(tmp_path)
