"""Checkpoints: what comes back is what was saved, bit for bit, or a refusal that says why."""

import hashlib
import json
import os
import stat

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from torchemo.core.errors import CheckpointError, ResourceError
from torchemo.runs.storage import durable, manifest
from torchemo.runs.storage.checkpoint import (
    folder_of,
    is_sound,
    load,
    publish,
    published,
    read_manifest,
    size_of,
    step_folder,
    verify,
)

GOLDEN = os.path.join(os.path.dirname(__file__), "..", "faults", "golden")


def state():
    generator = torch.Generator().manual_seed(3)
    return {
        "state": {
            "zeta": torch.randn(4, 3, generator=generator),
            "alpha": torch.randn(2, 5, generator=generator, dtype=torch.float64),
            "half": torch.randn(6, generator=generator).to(torch.bfloat16),
            "scalar": torch.tensor(7, dtype=torch.int64),
            "none": torch.zeros(0, 3),
            "mask": torch.tensor([True, False, True]),
        },
        "memory": {"ages": torch.arange(9, dtype=torch.int32), "bytes": torch.arange(5).byte()},
        "empty": {},
    }


INFO = {"best": 0.1 + 0.2, "history": [1, None, "ünï", {"deep": [True, -1e-300]}], "zz": 1, "aa": 2}


def bits(tensor):
    return (
        tensor.dtype,
        tuple(tensor.shape),
        tensor.contiguous().view(-1).view(torch.uint8).tolist(),
    )


def refused(*words):
    """Expect a CheckpointError whose message has all the words."""
    return pytest.raises(CheckpointError, match="(?s)" + "".join(f"(?=.*{word})" for word in words))


def test_a_checkpoint_comes_back_bit_for_bit_and_in_the_saved_order(tmp_path):
    saved = state()
    path = publish(tmp_path, 12, groups=saved, info=INFO, config_hash="c0ffee")
    back = load(path)
    assert path == tmp_path / "checkpoints" / "step-00000012"
    assert (back.step, back.manifest.config_hash) == (12, "c0ffee")
    assert back.info == INFO
    assert list(back.info) == list(INFO)
    assert list(back.groups) == list(saved)
    for group, tensors in saved.items():
        assert list(back.groups[group]) == list(tensors)
        for name, tensor in tensors.items():
            if tensor.numel():
                assert bits(back.groups[group][name]) == bits(tensor)
            assert back.groups[group][name].shape == tensor.shape


def test_loaded_tensors_are_writable_and_aligned_as_torch_aligns_them(tmp_path):
    back = load(publish(tmp_path, 0, groups=state()))
    for tensor in back.groups["state"].values():
        assert tensor.data_ptr() % 64 == 0
        tensor.zero_()


def test_the_files_are_plain_safetensors_with_the_hashes_that_the_manifest_lists(tmp_path):
    saved = state()
    path = publish(tmp_path, 3, groups=saved)
    listed = json.loads((path / "manifest.json").read_text())["files"]
    assert sorted(listed) == ["empty.safetensors", "memory.safetensors", "state.safetensors"]
    for name, entry in listed.items():
        raw = (path / name).read_bytes()
        assert entry["size"] == len(raw)
        assert entry["sha256"] == hashlib.sha256(raw).hexdigest()
    assert torch.equal(load_file(path / "state.safetensors")["zeta"], saved["state"]["zeta"])
    assert listed["state.safetensors"]["tensors"]["zeta"] == "float32[4,3]"
    assert listed["state.safetensors"]["tensors"]["scalar"] == "int64[]"


def test_equal_states_give_equal_bytes_in_every_file(tmp_path):
    paths = [publish(tmp_path / run, 5, groups=state(), info=INFO) for run in ("a", "b")]
    for name in ("manifest.json", "state.safetensors", "memory.safetensors", "empty.safetensors"):
        assert (paths[0] / name).read_bytes() == (paths[1] / name).read_bytes()


def test_aliases_views_and_parameters_are_saved_as_values(tmp_path):
    weight = nn.Parameter(torch.arange(12.0).view(3, 4))
    tensors = {
        "w": weight,
        "tied": weight,
        "rows": weight[1:],
        "t": weight.T,
        "e": weight[0].expand(2, 4),
    }
    back = load(publish(tmp_path, 0, groups={"state": tensors})).groups["state"]
    for name, tensor in tensors.items():
        assert torch.equal(back[name], tensor)
        assert not back[name].requires_grad
    back["w"].zero_()
    assert torch.equal(back["tied"], weight)


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_files_have_the_permissions_of_the_umask(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        path = publish(tmp_path, 0, groups=state())
    finally:
        os.umask(before)
    for file in path.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == mode
    assert stat.S_IMODE(path.stat().st_mode) == mode | (mode & 0o444) >> 2


def test_a_step_is_never_overwritten(tmp_path):
    path = publish(tmp_path, 1, groups=state())
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    with refused("step 1 is saved already", "rewind"):
        publish(tmp_path, 1, groups={"state": {"w": torch.ones(1)}})
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    assert os.listdir(folder_of(tmp_path)) == [path.name]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"step": -1}, ["step", "-1"]),
        ({"groups": {"../state": {}}}, ["'../state'"]),
        ({"groups": {"State": {}}}, ["'State'"]),
        ({"groups": {"state": {"": torch.zeros(1)}}}, ["name of a tensor"]),
        ({"groups": {"state": {"__metadata__": torch.zeros(1)}}}, ["__metadata__"]),
        ({"groups": {"state": {"w": torch.zeros(1, dtype=torch.complex64)}}}, ["'w'", "complex64"]),
        ({"groups": {"state": {"w": torch.eye(2).to_sparse()}}}, ["'w'", "sparse"]),
        ({"groups": {"state": {"v": torch.tensor([1, float("nan")])}}}, ["'v'", "1 of 2"]),
        ({"groups": {"state": {"v": torch.tensor(float("-inf"))}}}, ["'v'", "1 of 1"]),
        ({"info": {"loss": float("nan")}}, ["info", "JSON"]),
        ({"info": {"pair": (1, 2)}}, ["'pair'"]),
        ({"info": {"table": {1: 2}}}, ["'table'"]),
        ({"info": {"tensor": torch.zeros(1)}}, ["info"]),
    ],
)
def test_what_cannot_be_saved_is_refused_before_anything_is_written(tmp_path, changes, words):
    arguments = {"step": 4, "groups": state(), "info": {}} | changes
    with refused(*words):
        publish(tmp_path, arguments["step"], groups=arguments["groups"], info=arguments["info"])
    assert os.listdir(tmp_path) == []


def test_more_than_can_be_read_back_is_refused_and_leaves_nothing(tmp_path):
    with refused("manifest", "MB"):
        publish(tmp_path, 0, groups={}, info={"text": "x" * manifest.MAX_MANIFEST})
    many = {f"{'long name ' * 500}{i}": torch.zeros(1) for i in range(125)}
    with refused("125 tensors", "MB"):
        publish(tmp_path, 0, groups={"state": many})
    assert os.listdir(folder_of(tmp_path)) == []


def test_groups_may_be_allowed_to_hold_what_is_not_finite(tmp_path):
    groups = {"state": {"w": torch.ones(1)}, "scores": {"best": torch.tensor([float("-inf")])}}
    path = publish(tmp_path, 0, groups=groups, nonfinite_ok=["scores"])
    with refused("scores.safetensors", "'best'", "finite"):
        load(path)
    assert load(path, nonfinite_ok=["scores"]).groups["scores"]["best"].item() == float("-inf")


@pytest.mark.parametrize(
    ("expected", "words"),
    [
        ({"zeta": torch.zeros(4, 4)}, ["'state'", "'zeta'", r"float32\[4,4\]", r"float32\[4,3\]"]),
        ({"zeta": torch.zeros(4, 3).double()}, [r"float64\[4,3\]", r"got float32\[4,3\]"]),
        ({"new": torch.zeros(1)}, ["'new'", "got nothing"]),
        ({"zeta": None}, ["'zeta'", "absent"]),
    ],
)
def test_a_state_of_another_network_is_refused_by_tensor_name(tmp_path, expected, words):
    path = publish(tmp_path, 0, groups=state())
    like = {name: t for name, t in (state()["state"] | expected).items() if t is not None}
    with refused(*words):
        load(path, like={"state": like})
    with refused("group 'other'"):
        load(path, like={"other": {}})


def test_a_state_of_the_same_network_fits_in_any_order_of_names(tmp_path):
    path = publish(tmp_path, 0, groups=state())
    like = dict(reversed(state()["state"].items()))
    assert load(path, like={"state": like}).step == 0


def test_shapes_are_compared_before_any_tensor_is_read(tmp_path):
    path = publish(tmp_path, 0, groups=state())
    (path / "state.safetensors").unlink()
    with refused("'zeta'"):
        load(path, like={"state": {"zeta": torch.zeros(1)}})


def test_a_missing_file_is_named(tmp_path):
    path = publish(tmp_path, 2, groups=state())
    (path / "memory.safetensors").unlink()
    for check in (verify, load):
        with refused("memory.safetensors of step-00000002 is missing"):
            check(path)
    assert not is_sound(path)
    with refused("manifest.json of nowhere is missing"):
        load(tmp_path / "nowhere")


def test_a_renamed_folder_is_found_out_and_a_copied_one_is_welcome(tmp_path):
    path = publish(tmp_path, 2, groups=state())
    os.rename(path, step_folder(tmp_path, 3))
    with refused("step-00000003 holds step 2"):
        verify(step_folder(tmp_path, 3))
    os.rename(step_folder(tmp_path, 3), tmp_path / "the best one")
    assert load(tmp_path / "the best one").step == 2


def test_published_lists_whole_steps_in_numeric_order(tmp_path):
    for step in (100_000_000, 5, 99_999_999):
        publish(tmp_path, step, groups={})
    for name in (".tmp-step-00000001-x", "step-12", "step-000000012", "notes"):
        (folder_of(tmp_path) / name).mkdir()
    assert [path.name for path in published(tmp_path)] == [
        "step-00000005",
        "step-99999999",
        "step-100000000",
    ]
    assert published(tmp_path / "elsewhere") == []


def test_a_checkpoint_that_does_not_fit_the_disk_is_refused_with_sizes(tmp_path, monkeypatch):
    publish(tmp_path, 1, groups=state())
    usage = durable.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(durable.shutil, "disk_usage", lambda _: usage._replace(free=100))
    with pytest.raises(ResourceError, match="100 bytes free") as caught:
        publish(tmp_path, 2, groups=state())
    assert caught.value.exit_code == 6
    assert [path.name for path in published(tmp_path)] == ["step-00000001"]


def test_a_run_starts_only_with_room_for_three_checkpoints(tmp_path, monkeypatch):
    size = size_of(state())
    assert size == 4 * 12 + 8 * 10 + 2 * 6 + 8 + 3 + 4 * 9 + 5
    usage = durable.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(durable.shutil, "disk_usage", lambda _: usage._replace(free=3 * size))
    durable.require_space(tmp_path / "not" / "yet", size, times=3)
    monkeypatch.setattr(durable.shutil, "disk_usage", lambda _: usage._replace(free=3 * size - 1))
    with pytest.raises(ResourceError, match=f"3 x {size} bytes needed, {3 * size - 1} bytes free"):
        durable.require_space(tmp_path / "not" / "yet", size, times=3)


def test_a_checkpoint_larger_than_the_machine_is_refused_before_it_is_read(tmp_path, monkeypatch):
    path = publish(tmp_path, 0, groups=state())
    monkeypatch.setattr(os, "sysconf", lambda name: 10, raising=False)
    with pytest.raises(ResourceError, match="this machine has 100 bytes"):
        load(path)


def test_checkpoints_of_format_1_are_read_for_ever():
    back = load(os.path.join(GOLDEN, "format-1"))
    assert (back.step, back.manifest.config_hash, back.info) == (1240, "ab" * 8, {"best": 0.5})
    assert back.groups["state"]["w"].tolist() == [[0.0, 0.5], [-1.0, 2.0]]
    assert back.groups["state"]["n"].item() == 3
    assert back.groups["memory"]["keys"].dtype == torch.bfloat16
    assert back.groups["memory"]["keys"].tolist() == [1.5, -2.5, 0.0]


def reseal(path, **changes):
    """Change a manifest as a stranger's program would: with a seal that is right."""
    body = json.loads((path / "manifest.json").read_text())
    body |= changes
    del body["seal"]
    text = json.dumps(body, indent=1) + "\n"
    body["seal"] = hashlib.sha256(text.encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(body, indent=1) + "\n")


def test_a_newer_format_is_refused_with_advice(tmp_path):
    path = publish(tmp_path, 0, groups=state())
    reseal(path, format_version=2, versions={"torchemo": "9.1"}, files="in another way")
    with refused("format 2", "torchemo '9.1'", "up to 1"):
        load(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"format": "something else"},
        {"format_version": 0},
        {"format_version": True},
        {"step": -1},
        {"step": "1"},
        {"step": 10**30},
        {"config_hash": None},
        {"versions": {"torch": 2}},
        {"info": []},
        {"files": []},
        {"files": {"state.safetensors": 3}},
        {"files": {"../state.safetensors": {"size": 1, "sha256": "0" * 64, "tensors": {}}}},
        {"files": {"state.bin": {"size": 1, "sha256": "0" * 64, "tensors": {}}}},
        {"files": {"state.safetensors": {"size": 1, "sha256": "x", "tensors": {}}}},
        {"files": {"state.safetensors": {"size": 1, "sha256": "0" * 64, "tensors": {"w": 1}}}},
    ],
)
def test_a_malformed_manifest_with_a_right_seal_is_refused(tmp_path, changes):
    path = publish(tmp_path, 0, groups=state())
    reseal(path, **changes)
    with refused("manifest.json of step-00000000 is not the manifest"):
        read_manifest(path)


def test_a_manifest_spelled_differently_is_refused(tmp_path):
    path = publish(tmp_path, 0, groups=state(), info={"name": "é"})
    text = (path / "manifest.json").read_text()
    assert "\\u00e9" in text
    for other in (text.replace("\\u00e9", "\\u00E9"), text.rstrip(), json.dumps(json.loads(text))):
        (path / "manifest.json").write_text(other)
        with refused("manifest.json of step-00000000 is damaged"):
            verify(path)
