"""Tensors in memory-mapped files: the system keeps in RAM what is used and writes back the rest."""

import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from torchemo.core.errors import ResourceError


def mapped_zeros(shape: Sequence[int], *, dtype: torch.dtype, folder: Path) -> Tensor:
    """Return zeros that live in a nameless file in ``folder``, gone when the tensor is.

    Args:
        shape: Shape.
        dtype: Type of the numbers.
        folder: Where there is room; not a file system in RAM.
    """
    count = math.prod(shape)
    if count == 0:
        return torch.zeros(*shape, dtype=dtype)
    try:
        handle, name = tempfile.mkstemp(prefix="torchemo-", suffix=".values", dir=folder)
        try:
            # Room is claimed at once: a write to a mapped page that has none would end the process.
            os.posix_fallocate(handle, 0, count * dtype.itemsize)
            mapped = torch.from_file(name, shared=True, size=count, dtype=dtype)
        finally:
            os.close(handle)
            os.unlink(name)
    except OSError as error:
        raise ResourceError(
            f"{folder}: no room for {count * dtype.itemsize:,} bytes of values: {error.strerror}.",
            hint="Choose another folder (memory.values_dir) or fewer slots (memory.capacity).",
        ) from error
    return mapped.view(*shape)
