"""One safetensors file: what is written is read, and a header is believed only when it fits the file."""

import json
import os
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from torchemo.core.errors import CheckpointError
from torchemo.runs.storage.tensorfile import (
    DTYPES,
    check_finite,
    decode,
    encode,
    read_specs,
    spec,
    specs_of,
)


def specs_in(path, raw):
    path.write_bytes(raw)
    handle = os.open(path, os.O_RDONLY)
    try:
        return read_specs(handle, len(raw), what="the file")
    finally:
        os.close(handle)


def with_header(text, data=b"\0" * 8):
    return struct.pack("<Q", len(text)) + text.encode() + data


def described(**changes):
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes


def test_a_tensor_is_described_in_one_word():
    assert spec(torch.float32, (32, 3, 3, 3)) == "float32[32,3,3,3]"
    assert specs_of({"n": torch.tensor(1), "b": torch.zeros(0).bool()}) == {
        "n": "int64[]",
        "b": "bool[0]",
    }


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_every_dtype_is_written_as_safetensors_reads_it(tmp_path, dtype):
    tensors = {"x": torch.arange(6).view(2, 3).to(dtype), "y": torch.ones((), dtype=dtype)}
    raw = encode(tensors)
    theirs, ours = load(raw), decode(raw, what="the file")
    for name, tensor in tensors.items():
        assert ours[name].dtype == theirs[name].dtype == dtype
        assert torch.equal(ours[name], tensor)
        assert torch.equal(theirs[name], tensor)
    assert specs_in(tmp_path / "file", raw) == specs_of(tensors)


@settings(max_examples=40, deadline=None)
@given(
    shapes=st.dictionaries(
        st.text('aé.\n\0"[', min_size=1, max_size=8),
        st.lists(st.integers(0, 3), max_size=3),
        max_size=5,
    ),
    dtype=st.sampled_from(list(DTYPES.values())),
)
def test_law_files_of_safetensors_are_believed(tmp_path_factory, shapes, dtype):
    tensors = {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}
    path = tmp_path_factory.getbasetemp() / "law"
    for raw in (encode(tensors), save(tensors, metadata={"format": "pt"})):
        assert specs_in(path, raw) == specs_of(tensors)


@pytest.mark.parametrize(
    "header",
    [
        json.dumps({"": described()}),
        json.dumps({"w": described(shape=[True, 2])}),
        json.dumps({"w": described(shape=[2.0])}),
        json.dumps({"w": described(shape=[-1, -2])}),
        json.dumps({"w": described(shape="2")}),
        json.dumps({"w": described(shape=[1] * 40 + [2])}),
        json.dumps({"w": described(shape=[3])}),
        json.dumps({"w": described(dtype="F33")}),
        json.dumps({"w": described(data_offsets=[0, 4])}),
        json.dumps({"w": described(data_offsets=[0, 8, 16])}),
        json.dumps({"w": described(data_offsets=[False, 8])}),
        json.dumps({"w": described(), "v": described()}),
        json.dumps({"w": described(shape=[1], data_offsets=[4, 8])}),
        json.dumps({"w": described(shape=[1], data_offsets=[0, 4])}),
        json.dumps({"w": described(shape=[1], data_offsets=[0, 4]), "v": described()}),
        json.dumps({"w": 3}),
        json.dumps([described()]),
        '{"w": %s, "w": %s}' % ((json.dumps(described()),) * 2),
        '{"w": {"dtype": "F32", "shape": [2], "shape": [2], "data_offsets": [0, 8]}}',
        "",
        "{",
    ],
)
def test_a_header_that_does_not_fit_its_file_is_not_believed(tmp_path, header):
    with pytest.raises(CheckpointError, match="the file is damaged: its header is malformed"):
        specs_in(tmp_path / "file", with_header(header))


@pytest.mark.parametrize("size", range(8))
def test_a_file_without_room_for_a_length_is_refused(tmp_path, size):
    with pytest.raises(
        CheckpointError, match="the file is damaged: its header should have at most 0"
    ):
        specs_in(tmp_path / "file", b"\0" * size)


def test_bytes_that_safetensors_refuses_are_damage():
    with pytest.raises(CheckpointError, match="the file is damaged"):
        decode(b"nonsense" * 4, what="the file")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("at", [0, 16, 36])
def test_one_number_that_is_not_finite_is_found_anywhere(dtype, bad, at):
    tensor = torch.randn(37, generator=torch.Generator().manual_seed(0)).to(dtype)
    check_finite({"x": tensor, "n": torch.tensor([1]), "none": torch.zeros(0)}, what="state")
    tensor[at] = bad
    with pytest.raises(CheckpointError, match="state: tensor 'x' should be finite, got 1 of 37"):
        check_finite({"x": tensor}, what="state")
