"""One array of numbers out of a MATLAB level 5 file: Flowers-102 keeps its labels in one.

Not by SciPy, whose reader crashes the interpreter on some damaged files.
"""

import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchemo.core.errors import DataError

_MATRIX, _COMPRESSED = 14, 15
_NUMBERS = {
    1: "i1",
    2: "u1",
    3: "i2",
    4: "u2",
    5: "i4",
    6: "u4",
    7: "f4",
    9: "f8",
    12: "i8",
    13: "u8",
}
_MAX_BYTES = 1 << 26


def read_numbers(path: Path, name: str) -> NDArray[Any]:
    """Return the array called ``name``, flattened in the order of the file."""
    try:
        data = path.read_bytes()
        order = "<" if data[126:128] == b"IM" else ">"
        at = 128
        while at < len(data):
            kind, body, at = _element(data, at, order)
            if kind == _COMPRESSED:
                kind, body, _ = _element(
                    zlib.decompressobj().decompress(body, _MAX_BYTES), 0, order
                )
            if kind == _MATRIX:
                found, numbers = _matrix(body, order)
                if found == name:
                    return numbers
    except (OSError, struct.error, zlib.error, KeyError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as a MATLAB file ({error!r}).") from error
    raise DataError(f"{path}: has no array {name!r}.")


def _element(data: bytes, at: int, order: str) -> tuple[int, bytes, int]:
    """Return type and content of the element at a place, and where the next one is."""
    kind, size = struct.unpack_from(f"{order}2I", data, at)
    if kind >> 16:
        # Up to four bytes are stored inside the tag.
        return kind & 0xFFFF, data[at + 4 : at + 4 + (kind >> 16)], at + 8
    if at + 8 + size > len(data):
        raise ValueError("it ends too early")
    padding = 0 if kind == _COMPRESSED else -size % 8
    return kind, data[at + 8 : at + 8 + size], at + 8 + size + padding


def _matrix(body: bytes, order: str) -> tuple[str, NDArray[Any]]:
    """Return the name and the numbers of a matrix: flags, sizes, name, then the numbers."""
    at, parts = 0, []
    for _ in range(4):
        kind, part, at = _element(body, at, order)
        parts.append((kind, part))
    kind, numbers = parts[3]
    return parts[2][1].decode("ascii"), np.frombuffer(numbers, order + _NUMBERS[kind])
