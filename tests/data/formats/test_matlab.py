"""MATLAB files: the labels come out as scipy wrote them, damage is refused by name."""

import numpy as np
import pytest
import scipy.io

from torchemo.core.errors import DataError
from torchemo.data.formats.matlab import read_numbers

LABELS = np.arange(1, 200, dtype=np.uint8)[None]


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("dtype", ["u1", "i2", "u2", "i4", "f4", "f8", "i8"])
def test_numbers_are_those_scipy_wrote(tmp_path, compressed, dtype):
    path = tmp_path / "labels.mat"
    content = {"other": np.ones((2, 2)), "labels": LABELS.astype(dtype), "few": np.array([[1, 2]])}
    scipy.io.savemat(path, content, do_compression=compressed)
    assert read_numbers(path, "labels").tolist() == LABELS[0].tolist()
    assert read_numbers(path, "few").tolist() == [1, 2]


def test_a_missing_array_and_a_damaged_file_are_named(tmp_path):
    path = tmp_path / "labels.mat"
    scipy.io.savemat(path, {"labels": LABELS}, do_compression=True)
    with pytest.raises(DataError, match=r"labels\.mat: has no array 'setid'"):
        read_numbers(path, "setid")
    good = path.read_bytes()
    for cut in range(130, len(good), 7):
        path.write_bytes(good[:cut])
        with pytest.raises(DataError, match=r"labels\.mat: "):
            read_numbers(path, "labels")
    with pytest.raises(DataError, match=r"nothing\.mat: cannot be read"):
        read_numbers(tmp_path / "nothing.mat", "labels")
