"""Small images and trees of them, and the real data where they are at hand."""

import io
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image


def small_picture(seed, *, size=8, format="PNG"):
    """An encoded image that no other seed gives."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size, size, 3), np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, format)
    return stream.getvalue()


@pytest.fixture
def picture():
    """Return ``picture(seed, size=8, format="PNG") -> bytes``."""
    return small_picture


@pytest.fixture
def tree(tmp_path):
    """Return ``tree({relative path: bytes}) -> folder``; an int stands for the image of that seed."""

    def write(files, name="set"):
        root = tmp_path / name
        for place, content in files.items():
            path = root / place
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(small_picture(content) if isinstance(content, int) else content)
        return root

    return write


@pytest.fixture
def zipped(tmp_path):
    """Return ``zipped({member name: bytes or seed}) -> archive``."""

    def write(files, name="set.zip", compression=zipfile.ZIP_STORED):
        path = tmp_path / name
        with zipfile.ZipFile(path, "w", compression) as archive:
            for member, content in files.items():
                archive.writestr(
                    member, small_picture(content) if isinstance(content, int) else content
                )
        return path

    return write


@pytest.fixture(scope="session")
def real_data():
    """The folder of real image sets named by TORCHEMO_DATA."""
    root = os.environ.get("TORCHEMO_DATA")
    if not root or not Path(root, "splits.json").is_file():
        pytest.skip("needs real images: set TORCHEMO_DATA to the folder that holds them")
    return Path(root)
