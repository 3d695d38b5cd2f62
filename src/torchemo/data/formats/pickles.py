"""Pickled data sets of others, read without running anything that is in them.

Published few-shot sets come as python pickles, and a pickle is a program. Two gates stand before it: only
instructions that build plain containers are let through, and the only names it may ask for are those by
which NumPy rebuilds arrays, each of them replaced by a stand-in of ours that checks what it is given.
"""

import math
import pickle
import pickletools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, final

import numpy as np
from numpy.typing import NDArray

from torchemo.core.errors import DataError

_OPCODES = frozenset(
    (
        *("PROTO", "FRAME", "STOP", "MARK", "POP", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT"),
        *("GET", "BINGET", "LONG_BINGET", "NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT"),
        *("BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "STRING"),
        *("BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
        *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "LIST", "EMPTY_LIST"),
        *("APPEND", "APPENDS", "TUPLE", "EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
        *("DICT", "EMPTY_DICT", "SETITEM", "SETITEMS", "GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD"),
    )
)
_SIMPLE_TYPE = re.compile(r"[biufSU]\d{1,9}")
_MAX_DEPTH = 32


def read_pickle(path: Path, *, encoding: str = "latin1") -> Any:
    """Read a pickle of plain containers and arrays.

    Args:
        path: The file.
        encoding: How strings of python 2 are read; arrays of python 2 need ``latin1``.

    Returns:
        A structure of dict, list, tuple, str, int, float, bytes, bool, None and NumPy arrays.
    """
    try:
        with path.open("rb") as stream:
            _check_instructions(stream)
            stream.seek(0)
            loaded = _Unpickler(stream, encoding=encoding).load()
        return _Finish()(loaded, depth=0)
    except _Refusal as refusal:
        raise DataError(
            f"{path}: refused, {refusal}.",
            hint="Data need only containers, numbers, strings and arrays; this file contains more.",
        ) from refusal
    except Exception as error:
        # Damaged pickles raise anything; whatever it is, this file caused it.
        raise DataError(f"{path}: cannot be read as pickled data ({error!r}).") from error


@final
class _Refusal(Exception):
    """Says what a pickle asked for that it may not have."""


def _check_instructions(stream: BinaryIO) -> None:
    for count, (opcode, argument, _) in enumerate(pickletools.genops(stream)):
        if opcode.name not in _OPCODES:
            raise _Refusal(f"it contains code (instruction {opcode.name})")
        # A pickler numbers its notes one after the other; a huge number would only fill the memory.
        if opcode.name.endswith("PUT") and int(argument or 0) > count:
            raise _Refusal(f"it numbers a note {argument} after {count} instructions")


@final
class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        maker = _MAKERS.get((module.replace("numpy._core", "numpy.core"), name))
        if maker is None:
            raise _Refusal(f"it contains code (asks for {module}.{name})")
        return _Maker(maker)


@final
class _Maker:
    """Stands for a name; can be called, and cannot be changed by the pickle."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make

    def __call__(self, *arguments: Any) -> Any:
        return self._make(*arguments)

    def __setstate__(self, state: object) -> None:
        raise _Refusal("it tries to change a function")


@final
class _Type:
    """Stands for a NumPy type: a plain number or string of fixed size."""

    __slots__ = ("order", "spec")

    def __init__(self, spec: Any, *_: Any) -> None:
        self.spec, self.order = str(spec), "="
        if not _SIMPLE_TYPE.fullmatch(self.spec):
            raise _Refusal(f"it contains an array of {self.spec!r}")

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, tuple) or len(state) < 5 or state[1] not in ("<", ">", "|", "="):
            raise _Refusal("it contains a type of array that is not simple")
        if any(part is not None for part in state[2:5]):
            raise _Refusal("it contains an array of records")
        self.order = state[1]

    def resolve(self) -> np.dtype[Any]:
        return np.dtype(self.spec).newbyteorder("=" if self.order == "|" else self.order)  # type: ignore[arg-type]


@final
class _Array:
    """Stands for a NumPy array, which is made when its bytes have been checked."""

    __slots__ = ("array",)

    def __init__(self) -> None:
        self.array: NDArray[Any] | None = None

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, tuple) or len(state) != 5:
            raise _Refusal("it contains an array in an unknown form")
        _, shape, kind, column_order, data = state
        self.fill(data, kind, shape, "F" if column_order else "C")

    def fill(self, data: Any, kind: Any, shape: Any, order: Any) -> "_Array":
        data = data.encode("latin1") if isinstance(data, str) else data
        sound = (
            isinstance(data, (bytes, bytearray))
            and isinstance(kind, _Type)
            and isinstance(shape, tuple)
            and all(isinstance(n, int) and n >= 0 for n in shape)
            and order in ("C", "F")
        )
        if not sound:
            raise _Refusal("it contains an array that is not of plain numbers")
        dtype = kind.resolve()
        if math.prod(shape) * dtype.itemsize != len(data):
            raise _Refusal("it contains an array whose shape does not fit its bytes")
        self.array = np.frombuffer(data, dtype).reshape(shape, order=order)
        return self


def _empty_array(*_: Any) -> _Array:
    return _Array()


def _array_from_buffer(data: Any, kind: Any, shape: Any, order: Any, *_: Any) -> _Array:
    return _Array().fill(data, kind, shape, order)


def _scalar(kind: Any, data: Any) -> Any:
    filled = _Array().fill(data, kind, (), "C").array
    return None if filled is None else filled.item()


def _encode(text: Any, encoding: Any) -> bytes:
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise _Refusal("it contains bytes in an unknown form")
    return text.encode("latin1")


def _no_bytes() -> bytes:
    return b""


_MAKERS: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy", "dtype"): _Type,
    ("numpy", "ndarray"): _empty_array,
    ("numpy.core.multiarray", "_reconstruct"): _empty_array,
    ("numpy.core.multiarray", "scalar"): _scalar,
    ("numpy.core.numeric", "_frombuffer"): _array_from_buffer,
    ("_codecs", "encode"): _encode,
    ("builtins", "bytes"): _no_bytes,
    ("__builtin__", "bytes"): _no_bytes,
}
"""Everything a pickle may name, and what it gets instead."""


@final
class _Finish:
    """Replaces the stand-ins in a loaded structure, each shared part once."""

    def __init__(self) -> None:
        self._done: dict[int, Any] = {}

    def __call__(self, value: Any, *, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise _Refusal("it is nested too deep, or contains itself")
        if isinstance(value, _Array):
            if value.array is None:
                raise _Refusal("it contains an array without content")
            return value.array
        if isinstance(value, (_Maker, _Type)):
            raise _Refusal("it contains functions or types as data")
        if not isinstance(value, (dict, list, tuple)):
            return value
        if id(value) not in self._done:
            self._done[id(value)] = self._rebuilt(value, depth + 1)
        return self._done[id(value)]

    def _rebuilt(self, value: Any, depth: int) -> Any:
        if isinstance(value, dict):
            return {key: self(item, depth=depth) for key, item in value.items()}
        parts: Iterator[Any] = (self(item, depth=depth) for item in value)
        return tuple(parts) if isinstance(value, tuple) else list(parts)
