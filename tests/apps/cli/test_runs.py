"""train, eval, compare: what a run prints, refuses and leaves behind; Ctrl-C saves."""

import contextlib
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import types

import numpy as np
import pytest

from tests.apps.cli.conftest import (
    COMMAND,
    MEMORY,
    PICTURES,
    POINTS,
    flip_a_bit,
    strict_json,
    write_colours,
)
from torchemo.apps.cli.evaluate import _show_result
from torchemo.apps.cli.train import TrainCommand
from torchemo.config.presets import names, preset
from torchemo.runs import events
from torchemo.runs.load import read_config
from torchemo.runs.storage import checkpoint


def test_training_says_how_large_it_is_how_it_goes_and_what_to_do_next(torchemo, tmp_path):
    found = torchemo(
        "train", "--out", tmp_path / "run", "--preset", "maml-emo-paper", *POINTS, *MEMORY
    )
    assert found.code == 0
    # An MLP 1-4-1 has 13 parameters; 5 slots of 13 values and a key of 8 in float32, a domain (int64),
    # five 32-bit counters and a bit: 13 * 4 + 8 * 4 + 8 + 21 bytes.
    first, second = found.err.splitlines()[:2]
    assert first.startswith("MAML + EMO on ")
    assert first.endswith("6 outer steps")
    assert second.startswith("13 parameters, ")
    assert "memory of 5 slots x 113 bytes = 565 bytes" in found.err
    assert "step 6, validation: loss " in found.err
    assert found.out.startswith("finished after 6 steps, best ")
    assert f"torchemo eval {tmp_path / 'run'}" in found.out
    start = events.read(tmp_path / "run" / "events.jsonl")[0]
    assert (start["event"], start["step"], start["memory_bytes"]) == ("start", 0, 565)


@pytest.mark.slow
def test_on_a_terminal_training_is_one_live_line(tmp_path):
    words = (*POINTS, *MEMORY, "train.steps=200", "train.validate_every=200")
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "train", "--out", tmp_path / "run", "--preset", "maml-emo-paper", *words],
        stderr=theirs,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "COLUMNS": "140", "TERM": "xterm"},
    )
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # a terminal that nobody holds any more ends so
        while piece := os.read(ours, 4096):
            shown += piece
    assert process.wait() == 0
    live = re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", shown).decode()
    line = r"\d+/200 .+ steps/s  loss \S+  slots 5  age \S+  same domain \S+"
    assert re.search(line, live), live


def test_training_for_machines_is_one_json_object_per_line(torchemo, tmp_path):
    found = torchemo("train", "--out", tmp_path / "run", "--preset", "maml", "--json", *POINTS)
    lines = [strict_json(line) for line in found.out.splitlines()]
    assert (found.code, found.err) == (0, "")
    kinds = [line["event"] for line in lines]
    assert kinds[0] == "start"
    assert kinds.count("step") == 6
    assert kinds.count("validation") == kinds.count("saved") == 3
    assert lines[-1]["event"] == "end"
    assert lines[-1]["ended"] == "finished"
    assert lines[0]["memory_bytes"] == 0


def test_the_numbers_of_a_training_go_to_the_logs_that_are_asked_for(
    torchemo, tmp_path, monkeypatch
):
    drawn, sent = [], []

    class SummaryWriter:
        def __init__(self, log_dir):
            drawn.append(log_dir)

        def add_scalar(self, name, value, global_step):
            drawn.append((name, global_step))

        flush = close = lambda self: None

    run = types.SimpleNamespace(
        log=lambda numbers, step: sent.append((step, numbers)), finish=lambda: None
    )
    wandb = types.SimpleNamespace(init=lambda project, name: sent.append((project, name)) or run)
    board = types.SimpleNamespace(SummaryWriter=SummaryWriter)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    out = tmp_path / "run"
    found = torchemo(
        "train", "--out", out, "--preset", "maml", "--log", "tensorboard", "wandb", *POINTS
    )
    assert found.code == 0, found.err
    assert (drawn[0], sent[0]) == (str(out / "tensorboard"), ("torchemo", "run"))
    steps = [step for name, step in drawn[1:] if name == "step/loss"]
    assert steps == [step for step, numbers in sent[1:] if "step/loss" in numbers]
    assert len(steps) == 6


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--preset", "maml-emu"), 2, "Did you mean 'maml-emo'?"),
        (("--preset", "zzz"), 2, "List them with: torchemo presets"),
        (("--options", "train.step=5"), 2, "Did you mean 'train.steps'?"),
        (("--options", "train.steps"), 2, "should be KEY=VALUE"),
        (("--options", "train.steps=many"), 2, "should be int, got 'many'"),
        (("--options", "train.steps=0"), 2, "1 or more"),
        (("--steps", "0"), 2, "1 or more"),
        (("--options", "memory=5"), 2, "'memory' should be a table"),
        (("--options", "memory.name=offset"), 2, "Did you mean 'offsets'?"),
        (("--options", "memory.capacity=5"), 2, "It is an option of gradients, offsets"),
        (("--options", "memory.name=offsets", "memory.capcity=5"), 2, "'memory.capacity'?"),
        (("--options", "train.iterations=5"), 2, "It is train.steps now."),
        (("--options", "emo.memory.capacity=5"), 2, "It is memory.capacity now."),
        (("--options", "emo.retrieval.trust=0"), 2, "It is memory.skip_unhelpful now."),
        (("--options", "emo.memory.max_age=5"), 2, "runs no longer have the option"),
        (("--config", "nowhere.toml"), 2, "there is no such file"),
        (("--data", "nowhere"), 3, "nowhere: there is no such file or folder"),
        (("--data", "nowhere"), 3, "a run keeps the paths it was trained with"),
        (("--data", "/nowhere"), 3, "/nowhere: there is no such file or folder.\n"),
        (("--data", "regression:hsml5"), 2, "regression:hsml4"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_run_that_cannot_start_says_why(torchemo, tmp_path, monkeypatch, words, code, said):
    monkeypatch.chdir(tmp_path)
    found = torchemo("train", "--out", "run", *words)
    assert found.code == code
    assert said in found.err
    assert found.out == ""
    assert not (tmp_path / "run").exists()


def test_a_misspelt_key_of_a_file_is_suggested(torchemo, tmp_path):
    file = tmp_path / "run.toml"
    for section, said in (
        ('[memory]\nname = "gradients"', "memory.capacity"),
        ("[emo.memory]", "emo.memory.capacity"),  # of an earlier version
    ):
        file.write_text(f"{section}\ncapcity = 5\n")
        found = torchemo("train", "--out", tmp_path / "run", "--config", file)
        assert found.code == 2
        assert str(file) in found.err
        assert f"Did you mean '{said}'?" in found.err


def test_a_file_that_is_no_text_is_refused_by_name(torchemo, tmp_path):
    file = tmp_path / "run.toml"
    file.write_bytes(b"\xff\xfe\x00")
    found = torchemo("train", "--out", tmp_path / "run", "--config", file)
    assert found.code == 2
    assert f"{file}: is not a text file" in found.err


def test_a_class_with_too_few_pictures_is_named(torchemo, tmp_path):
    data = write_colours(tmp_path / "colours", images=3)
    (data / "val" / "cyan" / "02.png").unlink()
    found = torchemo("train", "--out", tmp_path / "run", "--data", data, "--options", *PICTURES)
    assert found.code == 3
    assert "class 'cyan' has 2 images" in found.err


def test_a_folder_is_new_or_old_and_an_old_one_keeps_its_configuration(
    torchemo, point_runs, tmp_path
):
    for words in ((), ("--out", tmp_path / "a", "--resume", tmp_path / "b")):
        found = torchemo("train", *words)
        assert found.code == 2
        assert "--out FOLDER" in found.err
    words = ("--preset", "anil", "--scheme", "a", *POINTS)
    found = torchemo("train", "--resume", point_runs / "base", *words)
    assert found.code == 2
    assert "--preset --data --scheme --options" in found.err
    found = torchemo("train", "--out", point_runs / "base", "--preset", "maml", *POINTS)
    assert found.code == 2
    assert "holds a run already" in found.err
    assert torchemo("train", "--resume", tmp_path / "nothing").code == 2
    assert list(tmp_path.iterdir()) == []


def test_a_preset_fits_the_tasks_wherever_they_are_set(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('[data]\nsource = ["regression:sinusoid"]\n')
    points = TrainCommand(preset="maml-offsets", config=file).resolved()
    assert points.model.name == "mlp"
    assert points.data.source == ("regression:sinusoid",)
    five = TrainCommand(preset="maml-emo-paper", options=("data.n_shot=5",)).resolved()
    assert five == preset("maml-emo-paper", n_shot=5)
    assert five.memory.options["capacity"] == 200
    asked = TrainCommand(preset="maml-emo-paper", options=("data.n_shot=5", "memory.capacity=7"))
    assert asked.resolved().memory.options["capacity"] == 7


def test_an_option_that_fits_its_preset_alone_is_taken(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('[memory]\nname = "offsets"\n')
    assert TrainCommand(preset="maml-offsets", config=file).resolved() == preset("maml-offsets")
    options = ("memory.name=offsets",)
    assert TrainCommand(preset="maml-offsets", options=options).resolved() == preset("maml-offsets")


def test_flags_stand_between_the_file_and_the_options(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        "[train]\nsteps = 5\nseed = 5\n[data]\nimage_size = 50\nn_way = 6\nn_shot = 6\n"
    )
    asked = TrainCommand(preset="maml", config=file).resolved()
    assert (asked.train.steps, asked.train.seed) == (5, 5)
    assert (asked.data.image_size, asked.data.n_way, asked.data.n_shot) == (50, 6, 6)
    flags = {"steps": 7, "seed": 0, "size": 20, "way": 3, "shot": 2}
    asked = TrainCommand(preset="maml", config=file, **flags).resolved()
    assert (asked.train.steps, asked.train.seed) == (7, 0)
    assert (asked.data.image_size, asked.data.n_way, asked.data.n_shot) == (20, 3, 2)
    options = (
        "train.steps=9",
        "train.seed=9",
        "data.image_size=9",
        "data.n_way=9",
        "data.n_shot=9",
    )
    asked = TrainCommand(preset="maml", config=file, **flags, options=options).resolved()
    assert (asked.train.steps, asked.train.seed) == (9, 9)
    assert (asked.data.image_size, asked.data.n_way, asked.data.n_shot) == (9, 9, 9)


def test_a_preset_fits_the_shots_of_the_flag():
    asked = TrainCommand(preset="maml-emo-paper", shot=5).resolved()
    assert asked == preset("maml-emo-paper", n_shot=5)


@pytest.mark.parametrize("flag", ["--steps", "--seed", "--size", "--way", "--shot"])
def test_flags_of_a_new_run_are_refused_for_an_old_one(torchemo, point_runs, flag):
    found = torchemo("train", "--resume", point_runs / "base", flag, 0)
    assert found.code == 2
    assert f"own configuration, got {flag} too" in found.err


def test_a_memory_that_trains_after_the_learner_is_announced(torchemo, point_runs, tmp_path):
    words = (*POINTS, "memory.capacity=3", "memory.key.dim=8")
    line = "6 steps of the learner, then 2 of its memory (learner frozen)"
    run = tmp_path / "after"
    found = torchemo(*("train", "--out", run, "--preset", "maml-offsets", *words, "memory.steps=2"))
    assert found.code == 0
    lines = found.err.splitlines()
    assert lines.index(line) < next(i for i, one in enumerate(lines) if one.startswith("step "))
    assert found.out.startswith("finished after 8 steps")
    joint = torchemo("train", "--out", tmp_path / "joint", "--preset", "maml-offsets", *words)
    assert "learner frozen" not in joint.err
    assert joint.out.startswith("finished after 6 steps")
    for name in ("after", "joint"):
        assert torchemo("eval", tmp_path / name, "--tasks", 12).code == 0
    told = "They had different numbers of outer steps: MAML 6, MAML + offsets 8."
    assert told in torchemo("compare", point_runs / "base", run).out.splitlines()
    alike = torchemo("compare", point_runs / "base", tmp_path / "joint").out
    assert "different numbers of outer steps" not in alike
    cost = r"training: MAML 6 and [\d.]+, MAML \+ offsets 6 and [\d.]+"
    assert re.search(f"outer steps and CPU seconds of a {cost}", " ".join(alike.split()))
    (machine,) = torchemo("compare", point_runs / "base", run, "--json").json
    assert (machine["base"]["outer_steps"], machine["other"]["outer_steps"]) == ([6], [8])
    twice = (point_runs / "base", point_runs / "base", "--against", tmp_path / "joint", run)
    assert "MAML 6, MAML + offsets 6 or 8." in torchemo("compare", *twice).out


def test_every_preset_is_known_to_train():
    for name in names():
        assert TrainCommand(preset=name).resolved() == preset(name)


def test_ctrl_c_saves_and_the_run_goes_on_from_there(torchemo, tmp_path):
    root = tmp_path / "run"
    words = [*POINTS, "train.steps=900", "train.validate_every=900"]
    process = subprocess.Popen(
        [*COMMAND, "train", "--out", root, "--preset", "maml", *words],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert "MAML on" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    (saved,) = checkpoint.published(root)
    step = checkpoint.step_of(saved)
    assert 1 <= step < 900
    assert f"saved step {step}; continue with: torchemo train --resume {root}" in err
    # Shorten what is left: the number of steps decides nothing before the last one.
    text = (root / "config.toml").read_text()
    (root / "config.toml").write_text(text.replace("\nsteps = 900", f"\nsteps = {step + 5}"))
    assert torchemo("checkpoint", "accept-config", root).code == 0
    found = torchemo("train", "--resume", root)
    assert found.code == 0
    assert found.out.startswith(f"finished after {step + 5} steps")
    logged = [e["step"] for e in events.read(root / "events.jsonl") if e["event"] == "step"]
    assert logged == list(range(1, step + 6))


def test_resuming_names_a_damaged_checkpoint_and_goes_on_from_the_one_before(
    torchemo, point_runs, tmp_path
):
    root = shutil.copytree(point_runs / "base", tmp_path / "run")
    newest = checkpoint.published(root)[-1]
    flip_a_bit(newest / "params.safetensors")
    found = torchemo("train", "--resume", root)
    assert found.code == 0
    assert str(newest) in found.err
    assert "finished after 6 steps" in found.out


def test_diverging_is_told_with_its_own_code(torchemo, tmp_path):
    words = [*POINTS, "train.steps=40", "learner.inner_lr=1e30", "learner.steps=3"]
    found = torchemo("train", "--out", tmp_path / "run", "--preset", "maml", *words)
    assert found.code == 5
    assert "non-finite" in found.err


# -- which splits --------------------------------------------------------------------------------


@pytest.fixture
def schemes(tmp_path):
    """Nine dark classes with two schemes of splits in a file beside them."""
    images = np.random.default_rng(0).integers(0, 60, (9 * 18, 16, 16, 3), np.uint8)
    np.savez(tmp_path / "dark.npz", images=images, label=np.arange(9 * 18) // 18)
    thirds = [list(range(3 * i, 3 * i + 3)) for i in range(3)]
    both = {
        "up": dict(zip(("train", "val", "test"), thirds, strict=True)),
        "down": dict(zip(("test", "val", "train"), thirds, strict=True)),
        "only_test": {"test": list(range(9))},
    }
    (tmp_path / "splits.json").write_text(json.dumps({"dark.npz": both}))
    return tmp_path / "dark.npz"


def test_a_run_is_told_which_of_several_schemes_of_splits_to_take(torchemo, schemes, tmp_path):
    words = ("train", "--preset", "maml", "--data", schemes, "--options", *PICTURES)
    refused = torchemo(*words, "--out", tmp_path / "run")
    assert refused.code == 3
    assert "Choose one: up, down, only_test" in refused.err
    wrong = torchemo(*words, "--out", tmp_path / "run", "--scheme", "dwon")
    assert wrong.code == 3
    assert "dark.npz: has no splits called 'dwon'" in wrong.err
    assert "Did you mean 'down'?" in wrong.err
    missing = torchemo(*words, "--out", tmp_path / "run", "--splits", tmp_path / "none.json")
    assert missing.code == 2
    assert "none.json: there is no such file of splits" in missing.err
    assert not (tmp_path / "run").exists()
    assert torchemo(*words, "--out", tmp_path / "run", "--scheme", "down").code == 0
    assert read_config(tmp_path / "run").data.scheme == "down"
    assert torchemo("eval", tmp_path / "run", "--tasks", 2).code == 0
    assert torchemo(*words, "data.scheme=up", "--out", tmp_path / "other").code == 0
    assert torchemo("eval", tmp_path / "other", "--tasks", 2).code == 0
    found = torchemo("compare", tmp_path / "run", tmp_path / "other")
    assert found.code == 3
    assert "their data differs" in found.err


def test_a_run_is_tested_on_a_domain_it_has_never_seen(torchemo, picture_runs, schemes, tmp_path):
    run = shutil.copytree(picture_runs / "memory", tmp_path / "run")
    words = ("eval", run, "--tasks", 3, "--data", schemes, "--scheme", "only_test")
    found = torchemo(*words)
    assert found.code == 0
    assert "on test tasks of dark (standard, inductive)" in " ".join(found.out.split())
    file = run / "eval-test-standard-dark.json"
    assert f"written: {file}" in found.out
    kept = json.loads(file.read_text())
    assert kept.pop("sha256")
    assert torchemo(*words, "--json").json == kept
    assert not (run / "eval-test-standard.json").exists()
    assert torchemo("compare", file, file).code == 0
    refused = torchemo(*words, "--split", "val")
    assert refused.code == 3
    assert "no class has split 'val'" in refused.err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--scheme", "up"), 2, "belong to --data"),
        (("--data", "regression:hsml4"), 2, "these data give 10-point regression tasks"),
        (("--data", "nowhere"), 3, "nowhere: there is no such file or folder"),
        (("--data", "nowhere", "--scheme", "up"), 3, "nowhere: there is no such file or folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_other_data_that_cannot_be_used_are_refused(torchemo, picture_runs, words, code, said):
    found = torchemo("eval", picture_runs / "memory", *words)
    assert found.code == code
    assert said in found.err


# -- eval ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("share", "said"), [(None, False), (1.0, False), (0.25, True)], ids=["no", "all", "some"]
)
def test_that_some_tasks_skip_recall_is_said(capsys, share, said):
    last = {"value": 0.5, "low": 0.4, "high": 0.6, "n": 8}
    summary = {"last": last, "per_domain": {}, "per_step": [0.2, 0.5]}
    protocol = {"split": "test", "name": "standard", "statistics": "inductive"}
    about = {"metric": "accuracy", "method": "M", "on": None, "protocol": protocol}
    about |= {"summary": summary, "recalled": share, "skips": {"birds": 0.5, "fungi": 1.0}}
    _show_result({**about, "failed": None})
    words = "75.0 % of the tasks skip recall (birds 50 %, fungi 100 %): they are unlike those of training."
    assert (words in " ".join(capsys.readouterr().out.split())) is said
    _show_result({**about, "failed": [2]})
    failed = "they are unlike those of training, or recall slots that failed validation."
    assert (failed in " ".join(capsys.readouterr().out.split())) is said


def test_a_learner_without_inner_steps_has_no_line_of_them(torchemo, colours, tmp_path):
    words = [word for word in PICTURES if not word.startswith("learner.")]
    run = tmp_path / "run"
    asked = ("--preset", "protonet", "--data", colours, "--options", *words)
    assert torchemo("train", "--out", run, *asked).code == 0
    found = torchemo("eval", run, "--tasks", 3)
    assert "ProtoNet: accuracy, % on test tasks (standard, inductive)" in " ".join(
        found.out.split()
    )
    assert "after inner step" not in found.out


def test_a_result_is_shown_and_lies_beside_the_run(torchemo, point_runs):
    found = torchemo("eval", point_runs / "memory", "--tasks", 12)
    assert found.code == 0
    assert "MAML + EMO: mean squared error on test tasks (standard, inductive)" in " ".join(
        found.out.split()
    )
    assert "after inner step  0: " in found.out
    machine = torchemo("eval", point_runs / "memory", "--tasks", 12, "--json")
    saved = json.loads((point_runs / "memory" / "eval-test-standard.json").read_text())
    assert saved.pop("sha256")
    assert machine.json == saved
    assert len(saved["per_task"]) == 12


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--tasks", "0"), 2, "at least one test task"),
        (("--step", "5"), 4, "Saved steps: "),
        (("--split", "train"), 2, "train"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_evaluated_says_why(torchemo, point_runs, words, code, said):
    found = torchemo("eval", point_runs / "base", *words)
    assert found.code == code
    assert said in found.err


def test_tasks_of_another_size_are_evaluated_into_a_file_of_their_own(
    torchemo, picture_runs, tmp_path
):
    root = shutil.copytree(picture_runs / "memory", tmp_path / "run")
    asked = ("--way", "3", "--shot", "2", "--tasks", "4")
    found = torchemo("eval", root, *asked, "--json").json
    assert (found["protocol"]["way"], found["protocol"]["shot"]) == (3, 2)
    assert found["summary"]["per_step"][0] == pytest.approx(1 / 3, abs=0.05)
    shown = torchemo("eval", root, *asked)
    assert "3-way, 2-shot" in shown.out
    assert "eval-test-standard-3way-2shot.json" in shown.out
    assert torchemo("report", root).code == 0
    assert "3-way 2-shot" in (root / "report.html").read_text()
    ordinary = torchemo("eval", root, "--tasks", "4", "--json").json
    assert "way" not in ordinary["protocol"]
    written = [root / f"eval-test-standard{size}.json" for size in ("", "-3way-2shot")]
    mixed = torchemo("compare", *written)
    assert (mixed.code, "way" in mixed.err) == (3, True)
    refused = (("--way", "4"), ("--way", "1"), ("--shot", "0"))
    assert [torchemo("eval", root, *words).code for words in refused] == [3, 2, 2]


def test_regression_has_no_classes(torchemo, point_runs):
    found = torchemo("eval", point_runs / "base", "--way", "3")
    assert (found.code, "no classes" in found.err) == (2, True)


def test_a_folder_without_a_run_is_no_run(torchemo, tmp_path):
    for command in (("eval",), ("memory", "show"), ("memory", "verify"), ("checkpoint", "list"),
                    ("checkpoint", "verify")):  # fmt: skip
        found = torchemo(*command, tmp_path)
        assert found.code == 2
        assert "is not a run" in found.err


def test_a_run_without_a_sound_checkpoint_is_not_evaluated(torchemo, point_runs, tmp_path):
    root = shutil.copytree(point_runs / "base", tmp_path / "run")
    for path in checkpoint.published(root):
        flip_a_bit(path / "params.safetensors")
    found = torchemo("eval", root)
    assert found.code == 4
    assert f"torchemo checkpoint verify {root}" in found.err


def test_a_damaged_best_checkpoint_is_not_evaluated(torchemo, point_runs, tmp_path):
    root = shutil.copytree(point_runs / "base", tmp_path / "run")
    newest = checkpoint.published(root)[-1]
    best = checkpoint.read_manifest(newest).info["progress"]["best_step"]
    flip_a_bit(checkpoint.step_folder(root, best) / "params.safetensors")
    found = torchemo("eval", root, "--step", best)
    assert found.code == 4
    assert "params.safetensors" in found.err


# -- compare -------------------------------------------------------------------------------------


def test_two_runs_are_compared_in_pairs(torchemo, point_runs):
    found = torchemo("compare", point_runs / "base", point_runs / "memory")
    assert found.code == 0
    assert "MAML + EMO minus MAML (mse, inductive, paired)" in " ".join(found.out.split())
    assert "12 tasks, 1 seed(s)" in found.out
    (machine,) = torchemo("compare", point_runs / "base", point_runs / "memory", "--json").json
    results = [
        json.loads((point_runs / name / "eval-test-standard.json").read_text())["per_task"]
        for name in ("base", "memory")
    ]
    pairs = [b[-1] - a[-1] for a, b in zip(*results, strict=True)]
    assert machine["difference"]["difference"]["value"] == pytest.approx(sum(pairs) / 12)


def test_seeds_are_compared_one_to_one(torchemo, point_runs):
    base, other = point_runs / "base", point_runs / "memory"
    found = torchemo("compare", base, base, "--against", other, other)
    assert found.code == 0
    assert "over seeds and tasks" in found.out
    found = torchemo("compare", base, base, "--against", other)
    assert found.code == 3
    assert "one to one" in found.err


def test_results_on_other_tasks_are_not_compared(torchemo, point_runs, tmp_path):
    other = shutil.copytree(point_runs / "memory", tmp_path / "run")
    assert torchemo("eval", other, "--tasks", 6).code == 0
    found = torchemo("compare", point_runs / "base", other)
    assert found.code == 3
    assert "cannot be paired" in found.err


def test_a_run_that_was_not_evaluated_is_not_compared(torchemo, point_runs, tmp_path):
    other = shutil.copytree(point_runs / "memory", tmp_path / "run")
    (other / "eval-test-standard.json").unlink()
    found = torchemo("compare", point_runs / "base", other)
    assert found.code == 3
    assert f"torchemo eval {other}" in found.err
    found = torchemo("compare", point_runs / "base")
    assert found.code == 2
    assert "two runs or more" in found.err


def test_a_run_is_read_back_as_it_was_asked_for(point_runs):
    config = read_config(point_runs / "memory")
    assert config.memory.options["capacity"] == 5
    assert config.model.options["hidden"] == [4]
