"""Memories built from many runs: what is in them, stopping and continuing, runs that do not fit."""

from dataclasses import replace

import pytest
import torch

from tests.runs.small import config, stop_after
from torchemo.apps.cli.build import BuildMemory
from torchemo.config.registry import Part
from torchemo.core.errors import CheckpointError, ConfigError, DataError
from torchemo.runs.building import build as building
from torchemo.runs.building.build import build
from torchemo.runs.building.plan import SEED, make_plan, whole_number
from torchemo.runs.experiment import open_tasks
from torchemo.runs.load import load_best, load_trained, read_config
from torchemo.runs.score import Protocol, score_tasks
from torchemo.runs.storage import checkpoint, history
from torchemo.runs.train import train_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs of different seeds, and one like the first whose controller forgets otherwise."""
    root = tmp_path_factory.mktemp("runs")
    for name, seed in (("one", 0), ("two", 1)):
        train_run(root / name, config(seed=seed))
    return root


def plan_of(runs, out, names=("one", "two"), *, take="tasks", slots=12, tasks=None, options=()):
    roots = [runs / name for name in names]
    return make_plan(roots, out=out, take=take, slots=slots, tasks=tasks, options=options)


def held(root):
    store = load_trained(root).system.memory.store
    return store, {**store.values, "keys": store.keys[: len(store)]}


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def test_every_run_gives_tasks_and_slots_hold_what_training_would_remember(runs, tmp_path):
    out = tmp_path / "big"
    assert build(plan_of(runs, out), out) == (12, 12, 0, 12)
    store, _ = held(out)
    first = load_best(runs / "one").system
    # Support gradients at the start of tasks, drawn again here and differentiated by autograd alone.
    for run, name in enumerate(("one", "two")):
        source = open_tasks(read_config(runs / name))
        episode = source.sample("train", seed=SEED + run, start=0, count=6)
        keys = first.memory.encode(episode.support, first.params)
        assert torch.allclose(store.keys[6 * run : 6 * run + 6], keys, atol=1e-6)
        for b in range(6):
            theta = {n: p[None].clone().requires_grad_() for n, p in first.params.items()}
            x, y = episode.support.x[b : b + 1], episode.support.y[b : b + 1]
            loss = (first.learner.model(theta, x) - y).square().mean()
            expected = torch.autograd.grad(loss, list(theta.values()))
            for (tensor, value), row in zip(store.values.items(), expected, strict=True):
                close = torch.allclose(value[6 * run + b], row[0], rtol=1e-3, atol=1e-5)
                assert close, (name, b, tensor)


def test_what_is_built_is_a_run_that_is_evaluated_and_goes_on_training(runs, tmp_path):
    out = tmp_path / "big"
    build(plan_of(runs, out, slots=20), out)
    found = score_tasks(load_best(out), Protocol(tasks=4))
    assert found
    before = checkpoint.step_of(checkpoint.published(out)[-1])
    assert train_run(out).ended == "finished"
    assert checkpoint.step_of(checkpoint.published(out)[-1]) == 9 > before


@pytest.mark.parametrize("take", ["tasks", "slots"])
def test_a_build_that_is_stopped_and_continued_ends_bit_for_bit_as_one_that_is_not(
    runs, tmp_path, take, monkeypatch
):
    monkeypatch.setattr(building, "KEEP_EVERY", 3)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    how = {"take": take, "slots": 9, "names": ("one", "two") if take == "tasks" else ("one",)}
    build(plan_of(runs, whole, **how), whole)
    for cut in (1, 1):
        found = build(plan_of(runs, parts, **how), parts, should_stop=stop_after(cut))
        assert 0 < found.done < found.total
        with pytest.raises(ConfigError, match="is not a run"):
            read_config(parts)
    assert build(plan_of(runs, parts, **how), parts).done == found.total
    assert_same(held(whole)[1], held(parts)[1])
    assert not (parts / "building").exists()
    assert len(list((parts / "values").glob("version-*"))) == 1


def test_a_crash_between_any_two_saves_loses_at_most_what_came_after(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(building, "KEEP_EVERY", 2)
    whole, out = tmp_path / "whole", tmp_path / "out"
    build(plan_of(runs, whole), whole)
    for call in ("publish", "prune", "remove"):
        owner = {"publish": checkpoint, "prune": history, "remove": building.durable}[call]
        real, seen = getattr(owner, call), []

        def crash(*given, real=real, seen=seen, **named):
            real(*given, **named)
            seen.append(1)
            if len(seen) == 2 or given[0] == out / "building":
                raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(owner, call, crash)
            with pytest.raises(KeyboardInterrupt):
                build(plan_of(runs, out), out)
        if call != "remove":
            assert history.latest(out / "building").path is not None
    if (out / "building").exists():
        build(plan_of(runs, out), out)
    assert_same(held(whole)[1], held(out)[1])


def test_slots_of_runs_with_the_same_weights_are_copied_oldest_first(runs, tmp_path):
    out = tmp_path / "big"
    plan = plan_of(runs, out, ("one",), take="slots", slots=None)
    assert build(plan, out).filled == 5
    old, new = load_trained(runs / "one").system.memory.store, held(out)[0]
    order = old.ledger.written.argsort()
    assert torch.equal(new.keys, old.keys[order])
    for name, value in old.values.items():
        assert torch.equal(new.values[name], value[order])
    with pytest.raises(ConfigError, match=r"two has other weights than .*one") as told:
        plan_of(runs, tmp_path / "x", take="slots", slots=None)
    assert "--take tasks" in told.value.hint


def test_options_of_the_memory_may_differ_and_no_others(runs, tmp_path):
    out = tmp_path / "big"
    options = ("memory.controller.name=fifo", "memory.value_dtype=bfloat16", "memory.index=random")
    build(plan_of(runs, out, slots=6, tasks=5, options=options), out)
    memory = load_trained(out).system.memory
    assert (memory.store.capacity, memory.store.value_dtype) == (6, torch.bfloat16)
    assert type(memory.store.controller).__name__ == "FIFO"
    assert int(memory.store.ledger.generation.sum()) == 10
    for wrong in ("memory.k=2", "train.seed=4", "memory.key.dim=4"):
        with pytest.raises(ConfigError, match="is built with the options of"):
            plan_of(runs, out, options=(wrong,))


def test_runs_that_do_not_fit_are_refused_by_name(runs, tmp_path):
    offsets, shots, none = (tmp_path / name for name in ("offsets", "shots", "none"))
    train_run(offsets, config(memory="offsets"))
    train_run(none, config(memory="none"))
    other = config()
    train_run(shots, replace(other, data=replace(other.data, n_shot=5)))
    out = tmp_path / "out"
    for name, root, match in (
        ("slots that learn", offsets, "whose slots are trained and not filled"),
        ("no memory", none, "has no memory"),
        ("other shape", shots, r"shots has regression tasks of 5 points .*one has .* of 4 points"),
        ("twice", runs / "one", "twice"),
        ("no run", tmp_path / "nowhere", "is not a run"),
    ):
        with pytest.raises(ConfigError, match=match):
            make_plan([runs / "one", root], out=out, take="tasks", slots=4, tasks=None)
        assert not out.exists(), name
    with pytest.raises(ConfigError, match="needs --slots"):
        plan_of(runs, out, slots=None)
    with pytest.raises(ConfigError, match="--tasks is for --take tasks"):
        plan_of(runs, out, ("one",), take="slots", tasks=3)


def test_a_folder_with_something_else_and_another_build_are_refused(runs, tmp_path):
    with pytest.raises(ConfigError, match="holds a run already"):
        build(plan_of(runs, runs / "one"), runs / "one")
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"thesis\.txt"):
        build(plan_of(runs, foreign), foreign)
    out = tmp_path / "out"
    build(plan_of(runs, out), out, should_stop=stop_after(1))
    with pytest.raises(CheckpointError, match="was begun with other counts"):
        build(plan_of(runs, out, slots=14), out)


def test_changed_data_are_refused(runs, tmp_path, monkeypatch):
    out = tmp_path / "out"
    plan = plan_of(runs, out)
    saved = plan.givers[1].saved.manifest.info
    monkeypatch.setitem(saved, "data", "something else")
    with pytest.raises(DataError, match="two: the data differ"):
        build(plan, out)


@pytest.mark.parametrize("text", ["0", "-3", "1.5", "many", "nan", "1e10"])
def test_numbers_that_nothing_can_be_built_of_are_refused(text):
    with pytest.raises(ConfigError, match=r"--slots should be a whole number .* got"):
        whole_number(text, "--slots")
    assert whole_number("1e6", "--slots") == 1_000_000


def test_tasks_without_a_finite_gradient_are_left_out_and_counted(runs, tmp_path, monkeypatch):
    out = tmp_path / "out"
    real, seen = building.outer_step, []

    def sometimes(*given, **named):
        found = real(*given, **named)
        seen.append(1)
        if len(seen) == 2:
            found = found._replace(values={n: v * torch.nan for n, v in found.values.items()})
        return found

    monkeypatch.setattr(building, "outer_step", sometimes)
    assert build(plan_of(runs, out), out) == (12, 12, 2, 10)


def test_the_command_says_what_it_did(runs, tmp_path, capsys):
    made = BuildMemory(runs=(runs / "one",), out=tmp_path / "out", slots="4")
    assert made.run() == 0
    assert "4 slots filled" in capsys.readouterr().out
    assert isinstance(read_config(tmp_path / "out").memory, Part)
