"""Files from strangers: refused by name, quickly, in little memory, and nothing of them is run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import hostile
import pytest

from torchemo.core.errors import CheckpointError
from torchemo.runs.storage.checkpoint import load

pytestmark = pytest.mark.faults


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory):
    """How every file of the corpus was received, by a process of its own."""
    place = tmp_path_factory.mktemp("hostile")
    for name, content in hostile.corpus(str(place / "canary"), place / "scratch"):
        hostile.vouch(place / f"case {name}", content)
    for name, content in hostile.manifests():
        (place / f"case {name}").mkdir()
        (place / f"case {name}" / "manifest.json").write_bytes(content)
    done = subprocess.run(
        [sys.executable, hostile.__file__, str(place)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert not (place / "canary").exists(), "code from a file was run"
    return json.loads(done.stdout)


def test_the_corpus_is_complete_and_its_frame_is_sound(verdicts):
    assert verdicts["warm"]["said"] == [None, None]
    assert len(verdicts) > 45


def test_every_hostile_file_is_refused_by_name(verdicts):
    for case, verdict in verdicts.items():
        if case == "warm":
            continue
        loaded, verified = verdict["said"]
        where = "manifest.json" if "manifest" in case else "state.safetensors"
        assert loaded is not None, case
        assert loaded[0] == "CheckpointError", (case, loaded)
        assert f"{where} of case {case}" in loaded[1]
        assert loaded[1].count("\n") < 6
        assert len(loaded[1]) < 600, case
        assert loaded[1].replace("\n", "").isprintable(), case
        if case not in ("NaN", "infinity"):  # their bytes are what the manifest says
            assert verified is not None, case
            assert verified[0] == "CheckpointError", (case, verified)


def test_no_hostile_file_takes_a_second_or_100_megabytes(verdicts):
    slow = {case: v["seconds"] for case, v in verdicts.items() if v["seconds"] >= 1}
    large = {case: v["megabytes"] for case, v in verdicts.items() if v["megabytes"] >= 100}
    assert slow == {}
    assert large == {}


@pytest.mark.parametrize("case", ["pickle 2", "pickle 4", "pickle 5", "zipped pickle"])
def test_a_renamed_pickle_is_called_one(verdicts, case):
    assert "can contain code: it was not opened" in verdicts[case]["said"][0][1]


def test_numbers_that_are_not_finite_are_named_with_their_tensor(verdicts):
    for case in ("NaN", "infinity"):
        assert "tensor 'w' should be finite" in verdicts[case]["said"][0][1]


@pytest.mark.parametrize("name", ["state.safetensors", "manifest.json"])
def test_pipes_folders_and_devices_are_refused_without_waiting(tmp_path, name):
    good = hostile.file({"w": hostile.entry([2], 0, 8)}, b"\0" * 8)
    hostile.vouch(tmp_path / "case", good)
    makers = (os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path))
    for make in makers:
        path = tmp_path / "case" / name
        path.unlink() if not path.is_dir() or path.is_symlink() else path.rmdir()
        make(path)
        with pytest.raises(CheckpointError, match=f"{name} of case cannot be read"):
            load(tmp_path / "case")


def test_names_cannot_lead_out_of_the_folder(tmp_path):
    (tmp_path / "secret.safetensors").write_bytes(hostile.file({}))
    described = {"size": 10, "sha256": "0" * 64, "tensors": {}}
    for name in ("../secret.safetensors", str(tmp_path / "secret.safetensors"), "..safetensors"):
        folder = tmp_path / "case"
        folder.mkdir(exist_ok=True)
        hostile.seal(folder, {name: described})
        with pytest.raises(CheckpointError, match="not the manifest of a torchemo checkpoint"):
            load(folder)


def test_the_search_path_of_the_corpus_is_this_folder():
    assert Path(hostile.__file__).parent == Path(__file__).parent
