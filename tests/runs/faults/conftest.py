"""Shared by the fault tests: a folder in memory where the disk itself is not the point."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest


@pytest.fixture
def ram(tmp_path):
    """A folder of its own in memory, where there is one; hundreds of trials need no device."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="torchemo-test-"))
    yield folder
    shutil.rmtree(folder)
