"""The doctor finds gradients that are wrong, and says what else is missing."""

from collections import namedtuple

import pytest

from torchemo.lab import doctor
from torchemo.lab.doctor import EQUAL, NEAR, diagnose, gradient_errors
from torchemo.models.fused import Status


def test_gradients_of_this_machine_agree_in_three_ways():
    found = gradient_errors()
    assert found.batched[0] <= EQUAL
    assert 0 < found.finite[0] <= NEAR  # differences are never exact


@pytest.mark.parametrize("batched", [True, False])
def test_a_gradient_that_is_slightly_wrong_in_one_tensor_is_found(monkeypatch, batched):
    real = doctor.outer_step

    def wrong(learner, params, episode, **how):
        result = real(learner, params, episode, **how)
        if how.get("batched", False) == batched:
            result.gradients["conv2.weight"] *= 1 + 1e-4
        return result

    monkeypatch.setattr(doctor, "outer_step", wrong)
    found = gradient_errors()
    assert found.batched == (pytest.approx(1e-4, rel=1e-3), "conv2.weight")
    assert (found.finite[0] > NEAR) == (not batched)
    states = {check.name: check.state for check in doctor._gradients()}
    assert states["tasks together = one by one"] == "bad"
    assert states["meta-gradient = finite differences"] == ("ok" if batched else "bad")


def test_a_gradient_that_is_no_number_is_bad(monkeypatch):
    nothing = (float("nan"), "conv1.weight")
    monkeypatch.setattr(doctor, "gradient_errors", lambda: doctor.GradientErrors(nothing, nothing))
    assert [check.state for check in doctor._gradients()] == ["bad", "bad"]


@pytest.fixture
def no_gradients(monkeypatch):
    good = (0.0, "conv1.weight")
    monkeypatch.setattr(doctor, "gradient_errors", lambda: doctor.GradientErrors(good, good))


def test_a_machine_is_fit_unless_something_is_bad(no_gradients, monkeypatch, tmp_path):
    found = diagnose(tmp_path / "new" / "run")
    assert found.ok
    assert {
        "python",
        "torch",
        "threads",
        "convolutions",
        "allocator",
        "disk",
        "tensorboard",
        "wandb",
        "ann",
    } < {check.name for check in found.checks}
    monkeypatch.setattr(doctor, "OLDEST_PYTHON", (9, 0))
    found = diagnose(tmp_path)
    assert not found.ok
    assert [check.name for check in found.checks if check.state == "bad"] == ["python"]


def test_an_old_torch_is_bad_and_too_many_threads_are_a_note(no_gradients, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor.torch, "__version__", "2.3.1+cpu")
    monkeypatch.setattr(doctor.torch, "get_num_threads", lambda: 4096)
    states = {check.name: check for check in diagnose(tmp_path).checks}
    assert states["torch"].state == "bad"
    assert states["threads"].state == "note"
    assert "OMP_NUM_THREADS=" in states["threads"].detail


def test_missing_extras_are_notes_that_say_what_to_install(no_gradients, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "EXTRAS", {"ann": "no_such_module", "wandb": "json"})
    states = {check.name: check for check in diagnose(tmp_path).checks}
    assert states["ann"].state == "note"
    assert "pip install torchemo[ann]" in states["ann"].detail
    assert states["wandb"].state == "ok"


def test_a_full_disk_is_a_note_and_a_closed_folder_is_bad(no_gradients, monkeypatch, tmp_path):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda place: usage(10**6))
    states = {check.name: check.state for check in diagnose(tmp_path).checks}
    assert states["disk"] == "note"
    monkeypatch.setattr(doctor.os, "access", lambda place, mode: False)
    states = {check.name: check.state for check in diagnose(tmp_path).checks}
    assert states["disk"] == "bad"


def test_the_convolution_path_is_named_and_a_missing_compiler_is_a_note(
    no_gradients, monkeypatch, tmp_path
):
    path = tmp_path / "kernels.so"
    good = Status(True, str(path), "cc", "1234")
    monkeypatch.setattr(doctor.fused, "status", lambda bits=32: good)
    states = {check.name: check for check in diagnose(tmp_path).checks}
    assert states["convolutions"].state == "ok"
    assert "meta-gradient differs" in states["convolutions"].detail
    assert str(path) in states["convolutions"].detail
    monkeypatch.setattr(doctor, "compiled_error", lambda: 1e-6)
    states = {check.name: check.state for check in diagnose(tmp_path).checks}
    assert states["convolutions"] == "bad"
    none = Status(False, "no C compiler found")
    monkeypatch.setattr(doctor.fused, "status", lambda bits=32: none)
    states = {check.name: check for check in diagnose(tmp_path).checks}
    assert states["convolutions"].state == "note"
    assert "install a C compiler" in states["convolutions"].detail


def test_the_allocator_setting_of_commands_is_told(no_gradients, monkeypatch, tmp_path):
    monkeypatch.delenv("TORCHEMO_KEEP_MEMORY", raising=False)
    states = {check.name: check for check in diagnose(tmp_path).checks}
    assert "commands keep freed memory" in states["allocator"].detail
    monkeypatch.setenv("TORCHEMO_KEEP_MEMORY", "0")
    states = {check.name: check for check in diagnose(tmp_path).checks}
    assert "leave it alone" in states["allocator"].detail
