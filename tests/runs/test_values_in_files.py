"""Runs whose memory keeps its values in files: the same bits, versions in checkpoints, damage by name."""

import gc
import os
import re
import shutil
import signal
import time
from dataclasses import replace

import pytest
import torch

from tests.runs.small import config, final_state, log, offset_memory, paper_memory, stop_after
from torchemo.apps.cli.memory import ShowMemory, VerifyMemory
from torchemo.config.toml import dumps
from torchemo.core.errors import CheckpointError, ResourceError
from torchemo.runs.experiment import complete
from torchemo.runs.load import load_best, load_trained
from torchemo.runs.score import Protocol, score_tasks
from torchemo.runs.sharing.strip import write_stripped
from torchemo.runs.storage import checkpoint, versions
from torchemo.runs.train import train_run

MEMORIES = {"gradients": paper_memory, "offsets": offset_memory}


def in_files(folder, memory="gradients", **options):
    folder.mkdir(exist_ok=True)
    made = MEMORIES[memory](**options).set(values_dir=str(folder))
    return replace(config(), memory=made)


def values_of(root, step=None):
    """All slots of a run's memory, read where they are."""
    system = load_trained(root, step=step).system
    return system.memory.store.values


def assert_same_values(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def assert_same_end(one, other):
    """Two runs have the same last state, but for the names of versions."""
    first, second = final_state(one), final_state(other)
    assert first.step == second.step
    plain = {"memory": ("store.version", "store.values.")}
    for group, tensors in first.groups.items():
        skipped = plain.get(group, ())
        kept = {n: t for n, t in tensors.items() if not n.startswith(skipped or "/")}
        rest = {n: t for n, t in second.groups[group].items() if not n.startswith(skipped or "/")}
        assert kept.keys() == rest.keys()
        for name, tensor in kept.items():
            assert torch.equal(tensor, rest[name]), (group, name)
    assert_same_values(values_of(one), values_of(other))
    assert log(one) == log(other)


def version_folders(folder):
    return {path.name for path in folder.glob("version-*")}


@pytest.mark.parametrize("memory", MEMORIES)
def test_a_run_with_values_in_files_ends_as_in_ram_and_resumes_bit_for_bit(tmp_path, memory):
    train_run(tmp_path / "ram", replace(config(), memory=MEMORIES[memory]()))
    chosen = in_files(tmp_path / "values", memory)
    train_run(tmp_path / "parts", chosen, should_stop=stop_after(3))
    train_run(tmp_path / "parts", should_stop=stop_after(4))
    assert train_run(tmp_path / "parts").ended == "finished"
    assert_same_end(tmp_path / "ram", tmp_path / "parts")
    opened = final_state(tmp_path / "parts").groups["memory"]
    assert not [name for name in opened if name.startswith("store.values.")]


def test_only_versions_that_checkpoints_name_stay_and_a_copied_run_keeps_its_own(tmp_path):
    values = tmp_path / "values"
    chosen = in_files(values)
    train_run(tmp_path / "run", chosen, should_stop=stop_after(5))
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    before = {p.name: values_of(tmp_path / "copy", step=checkpoint.step_of(p)) for p in
              checkpoint.published(tmp_path / "copy")}  # fmt: skip
    train_run(tmp_path / "copy")
    manifests = [checkpoint.read_manifest(p) for p in checkpoint.published(tmp_path / "run")]
    assert {m.info["values"] for m in manifests} <= version_folders(values)
    train_run(tmp_path / "run")
    named = {
        checkpoint.read_manifest(path).info["values"]
        for run in ("run", "copy")
        for path in checkpoint.published(tmp_path / run)
    }
    assert named == version_folders(values)
    assert before
    assert_same_end(tmp_path / "run", tmp_path / "copy")
    gc.collect()
    assert list(values.glob(".*")) == []  # nothing of the process is left


def test_a_damaged_checkpoint_keeps_every_version(tmp_path):
    values = tmp_path / "values"
    train_run(tmp_path / "run", in_files(values), should_stop=stop_after(5))
    kept = version_folders(values)
    last = checkpoint.published(tmp_path / "run")[-1]
    (last / "manifest.json").write_bytes(b"{}")
    assert versions.collect(tmp_path / "run", values) == []
    assert version_folders(values) == kept


def test_values_may_be_moved_and_a_run_says_where_it_looked(tmp_path):
    values = tmp_path / "values"
    train_run(tmp_path / "run", in_files(values))
    expected = values_of(tmp_path / "run")
    values.rename(tmp_path / "moved")
    with pytest.raises(CheckpointError, match=r"not in .*values: it has no") as error:
        load_trained(tmp_path / "run")
    assert "memory.values_dir" in error.value.hint
    path = tmp_path / "run" / "config.toml"
    path.write_text(path.read_text().replace(str(values), str(tmp_path / "moved")))
    assert_same_values(values_of(tmp_path / "run"), expected)


def test_evaluation_reads_values_in_files_and_adds_none(tmp_path):
    values = tmp_path / "values"
    train_run(tmp_path / "run", in_files(values))
    train_run(tmp_path / "ram", config())
    kept = version_folders(values)
    run, ram = (
        score_tasks(load_best(tmp_path / name), Protocol(tasks=4)) for name in ("run", "ram")
    )
    same = {name: run[name] for name in run if name != "memory_sha256"}
    assert same == {name: ram[name] for name in same}
    assert version_folders(values) == kept


def test_a_folder_that_cannot_take_the_values_is_refused_before_a_run_is_made(tmp_path):
    chosen = in_files(tmp_path / "values")
    (tmp_path / "values").rmdir()
    with pytest.raises(ResourceError, match="no folder"):
        train_run(tmp_path / "run", chosen)
    assert not (tmp_path / "run").exists()


def test_memory_verify_names_the_slot_of_a_damaged_row(tmp_path, capsys):
    values = tmp_path / "values"
    train_run(tmp_path / "run", in_files(values))
    assert VerifyMemory(tmp_path / "run").run() == 0
    assert ShowMemory(tmp_path / "run").run() == 0
    files = {f.stat().st_ino: f for f in values.glob("version-*/*.rows")}  # one file, several names
    for file in files.values():
        data = bytearray(file.read_bytes())
        data[1] ^= 1
        file.write_bytes(bytes(data))
    capsys.readouterr()
    assert VerifyMemory(tmp_path / "run").run() == 4
    assert re.search(r"the value of slot \d is damaged", capsys.readouterr().out)


def test_a_shared_run_takes_its_values_along(tmp_path):
    train_run(tmp_path / "run", in_files(tmp_path / "values"))
    expected = values_of(tmp_path / "run")
    write_stripped(tmp_path / "run", tmp_path / "out")
    shutil.rmtree(tmp_path / "values")
    assert_same_values(values_of(tmp_path / "out"), expected)
    assert str(tmp_path) not in (tmp_path / "out" / "config.toml").read_text()


@pytest.mark.faults
def test_a_run_that_is_killed_resumes_bit_for_bit(warm, tmp_path):
    values = tmp_path / "values"
    chosen = in_files(values)
    chosen = replace(chosen, train=replace(chosen.train, steps=60, validate_every=5))
    train_run(tmp_path / "whole", chosen)
    (tmp_path / "config.toml").write_text(dumps(complete(chosen)))
    root = tmp_path / "run"
    seen = 0
    for turn in range(4):
        where = ["--config", tmp_path / "config.toml", "--out"] if turn == 0 else ["--resume"]
        process = warm.start("train", *where, root)
        until = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < until:
            done = checkpoint.published(root)
            if done and checkpoint.step_of(done[-1]) >= seen + 10:
                os.kill(process.pid, signal.SIGKILL)
                break
            time.sleep(0.01)
        process.wait()
        seen = checkpoint.step_of(checkpoint.published(root)[-1])
    train_run(root)
    first, last = final_state(tmp_path / "whole"), final_state(root)
    assert first.step == last.step == 60
    assert_same_values(values_of(tmp_path / "whole"), values_of(root))
    for name, tensor in first.groups["params"].items():
        assert torch.equal(tensor, last.groups["params"][name])
