"""Checkpoints changed together with their checksums and seal: every command refuses them with code 4."""

import shutil

import pytest
import torch

from torchemo.runs.storage import checkpoint


def progress(**changes):
    return lambda groups, info: info["progress"].update(changes)


def tasks(**changes):
    return lambda groups, info: info["tasks"].update(changes)


def tensor(group, name, make):
    def change(groups, info):
        groups[group][name] = make(groups[group].get(name))

    return change


def without(group):
    return lambda groups, info: groups.pop(group)


def info_is(**changes):
    return lambda groups, info: info.update(changes)


CHANGES = {
    "slots that there are not": tensor("memory", "store.ledger.filled", lambda _: torch.tensor(99)),
    "slots less than none": tensor("memory", "store.ledger.filled", lambda _: torch.tensor(-1)),
    "a hand outside the clock": tensor("memory", "store.ledger.hand", lambda _: torch.tensor(7)),
    "slots of the future": tensor("memory", "store.ledger.born", lambda t: t + 1000),
    "no progress": info_is(progress=None),
    "progress that is a list": info_is(progress=[1]),
    "one field too many": progress(mood="good"),
    "one field missing": lambda groups, info: info["progress"].pop("skipped"),
    "a best step that is text": progress(best_step="4"),
    "a best step to come": progress(best_step=10**9),
    "a best step below zero": progress(best_step=-2),
    "a best score that is text": progress(best_score="high"),
    "skipped steps that are a number": progress(skipped=5),
    "skipped steps that are text": progress(skipped=["a"]),
    "domains that are a number": info_is(domains=5),
    "domains that are numbers": info_is(domains=[5]),
    "no tasks": info_is(tasks=None),
    "tasks of no kind": tasks(kind="poetry"),
    "tasks of size zero": tasks(n_out=0),
    "tasks of a shape without end": tasks(x=[1] * 99),
    "one task field too many": tasks(colour="red"),
    "tensors of another step": tensor("progress", "iteration", lambda t: t + 1),
    "a step of two numbers": tensor("progress", "iteration", lambda t: torch.stack([t, t])),
    "no step": without("progress"),
    "no parameters": without("params"),
    "parameters of another dtype": lambda groups, info: groups.update(
        params={name: p.double() for name, p in groups["params"].items()}
    ),
    "no memory": without("memory"),
    "a configuration that is no TOML": info_is(config="["),
    "a configuration that is no text": info_is(config=5),
    "a configuration of no option": info_is(config="mood = 1"),
    "a configuration of bad values": info_is(config='train = "x"'),
}
"""Noticed by every command that opens the state."""

OF_TRAINING = {
    "an optimizer entry that is none": tensor("optimizer", "mood.step", lambda _: torch.tensor(1)),
    "an optimizer entry without a name": tensor("optimizer", "0", lambda _: torch.tensor(1)),
    "an optimizer entry for nothing": tensor("optimizer", "999.step", lambda _: torch.tensor(1.0)),
    "a moment of another shape": tensor("optimizer", "0.exp_avg", lambda t: t[:1].clone()),
    "a moment that is not kept": tensor("optimizer", "0.mood", lambda _: torch.tensor(1.0)),
    "a moment that is missing": lambda groups, info: groups["optimizer"].pop("0.exp_avg_sq"),
    "moments of no optimizer": tensor("optimizer", "0.step", lambda t: torch.stack([t, t])),
}
"""Noticed by the training that would take them over."""


@pytest.fixture
def resealed(point_runs, tmp_path):
    """Return ``resealed(change) -> run`` whose only checkpoint was changed and saved with right checksums."""

    def make(change):
        root = shutil.copytree(point_runs / "memory", tmp_path / "run")
        *older, newest = checkpoint.published(root)
        saved = checkpoint.load(newest)
        groups = {name: dict(group) for name, group in saved.groups.items()}
        info = {**saved.info, "tasks": dict(saved.info["tasks"])}
        info["progress"] = {**saved.info["progress"], "best_step": saved.step}
        change(groups, info)
        for path in (*older, newest):
            shutil.rmtree(path)
        step, seal = saved.step, saved.manifest.config_hash
        checkpoint.publish(root, step, groups=groups, info=info, config_hash=seal)
        return root

    return make


def shown(result):
    assert result.code == 4, result
    assert "Traceback" not in result.err
    assert result.err.count("\n") < 6
    return result.err


@pytest.mark.parametrize("name", CHANGES)
def test_a_state_that_no_run_has_is_refused(torchemo, resealed, name):
    root = resealed(CHANGES[name])
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    for words in (("eval", root, "--tasks", 4), ("train", "--resume", root)):
        shown(torchemo(*words))
    after = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    assert {p: c for p, c in after.items() if p.name not in (".lock", ".owner")} == {
        p: c for p, c in before.items() if p.name not in (".lock", ".owner")
    }


@pytest.mark.parametrize("name", OF_TRAINING)
def test_a_state_that_cannot_be_trained_on_is_refused(torchemo, resealed, name):
    root = resealed(OF_TRAINING[name])
    shown(torchemo("train", "--resume", root))


@pytest.mark.parametrize("name", ["no progress", "domains that are a number", "no step"])
def test_verify_finds_a_state_that_no_run_has(torchemo, resealed, name):
    root = resealed(CHANGES[name])
    found = torchemo("checkpoint", "verify", root)
    assert found.code == 4
    assert "step 6 cannot be used" in found.out.replace(chr(10), " ")


def test_the_frame_is_sound(torchemo, resealed):
    root = resealed(lambda groups, info: None)
    assert torchemo("checkpoint", "verify", root).code == 0
    assert torchemo("eval", root, "--tasks", 4).code == 0
    assert torchemo("train", "--resume", root).code == 0
