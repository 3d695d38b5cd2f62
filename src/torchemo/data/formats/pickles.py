"""Pickled data sets of others, read without running anything that is in them.

Published few-shot sets come as python pickles, and a pickle is a program. Two gates stand before it: only
instructions that build plain containers are let through, and the only names it may ask for are those by
which NumPy rebuilds arrays, each of them replaced by a stand-in of ours that checks what it is given.
"""

import math
import pickle
import pickletools
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, final

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
_MAX_INSTRUCTIONS = 50_000_000
_MAX_BITS = 4096
_LIGHT = 1 << 20
"""Parts and bytes that any file may unfold to."""


def read_pickle(path: Path) -> Any:
    """Read a pickle of plain containers and arrays.

    A small file may describe something huge by naming one part many times. What comes out is therefore
    bounded by the size of the file, each part counted as often as it appears.

    Returns:
        A structure of dict, list, tuple, str, int, float, bytes, bool, None and NumPy arrays.
    """
    try:
        with path.open("rb") as opened:
            stream = _Clipped(opened)
            _check_instructions(stream)
            stream.seek(0)
            loaded = _Unpickler(stream, encoding="latin1").load()  # as arrays of python 2 need
        finish = _Finish()
        whole = finish(loaded, depth=0)
        _check_weight(finish.weight(loaded), stream.size)
        return whole
    except _Refusal as refusal:
        raise DataError(
            f"{path}: refused, {refusal}.",
            hint="Data need only containers, numbers, strings and arrays; this file contains more.",
        ) from refusal
    except Exception as error:
        # Damaged pickles raise anything; whatever it is, this file caused it.
        raise DataError(
            f"{path}: cannot be read as pickled data ({type(error).__name__})."
        ) from error


@final
class _Refusal(Exception):
    """Says what a pickle asked for that it may not have."""


@final
class _Clipped:
    """A file of which nobody can ask more bytes than it has, so that none are made for them."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.size = stream.seek(0, 2)
        self.seek, self.tell, self.readline = stream.seek, stream.tell, stream.readline
        self.seek(0)

    def read(self, count: int = -1) -> bytes:
        """Read so many bytes, or as many as there are."""
        left = self.size - self.tell()
        return self._stream.read(left if count < 0 else min(count, left))


def _check_instructions(stream: _Clipped) -> None:
    for count, (opcode, argument, _) in enumerate(pickletools.genops(stream)):  # type: ignore[arg-type]
        if opcode.name not in _OPCODES:
            raise _Refusal(f"it contains code (instruction {opcode.name})")
        if count >= _MAX_INSTRUCTIONS:
            raise _Refusal(f"it has more than {_MAX_INSTRUCTIONS} instructions")
        # A pickler numbers its notes one after the other; a huge number would only fill the memory.
        if opcode.name.endswith("PUT") and int(argument or 0) > count:
            raise _Refusal(f"it numbers a note {argument} after {count} instructions")
        if isinstance(argument, int) and argument.bit_length() > _MAX_BITS:
            raise _Refusal(f"it contains a number of {argument.bit_length()} bits")


def _check_weight(weight: int, size: int) -> None:
    most = _LIGHT + 8 * size
    if weight > most:
        raise _Refusal(f"it unfolds to {weight} parts or bytes, {most} at most for {size} bytes")


_Base: Any = vars(pickle)["_Unpickler"]


@final
class _Unpickler(_Base):  # type: ignore[misc]
    """The unpickler in Python: in C, keys of a dict are hashed before anybody can look at them.

    Hashing a tuple of tuples that share their parts takes for ever.
    """

    dispatch: ClassVar[dict[int, Callable[..., None]]] = dict(_Base.dispatch)

    def __init__(self, stream: _Clipped, *, encoding: str) -> None:
        super().__init__(stream, encoding=encoding)
        self._size, self._copied = stream.size, 0

    def _copies(self, arguments: Any) -> None:
        """Bound what is copied: every use of a text as the content of an array makes bytes of it."""
        parts = arguments if isinstance(arguments, tuple) else ()
        self._copied += sum(len(part) for part in parts if isinstance(part, str))
        _check_weight(self._copied, self._size)

    def find_class(self, module: str, name: str) -> Any:
        maker = _MAKERS.get((module.replace("numpy._core", "numpy.core"), name))
        if maker is None:
            raise _Refusal(f"it contains code (asks for {module}.{name})")
        return _Maker(maker)

    def _load_setitem(self) -> None:
        value = self.stack.pop()
        key = self.stack.pop()
        _fill(self.stack[-1], [(key, value)])

    def _load_setitems(self) -> None:
        items = self.pop_mark()
        _fill(self.stack[-1], zip(items[::2], items[1::2], strict=True))

    def _load_dict(self) -> None:
        items = self.pop_mark()
        self.append(_fill({}, zip(items[::2], items[1::2], strict=True)))

    def _load_reduce(self) -> None:
        self._copies(self.stack[-1])
        super().load_reduce()

    def _load_build(self) -> None:
        self._copies(self.stack[-1])
        super().load_build()

    dispatch[pickle.REDUCE[0]] = _load_reduce
    dispatch[pickle.BUILD[0]] = _load_build
    dispatch[pickle.SETITEM[0]] = _load_setitem
    dispatch[pickle.SETITEMS[0]] = _load_setitems
    dispatch[pickle.DICT[0]] = _load_dict


def _fill(target: Any, items: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    if type(target) is not dict:
        raise _Refusal("it sets an item of something that is no dict")
    for key, value in items:
        if not isinstance(key, (str, bytes, int, float)) and key is not None:
            raise _Refusal(f"it contains a dict with a key that is a {type(key).__name__}")
        target[key] = value
    return target


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
    """Replaces the stand-ins in a loaded structure, and weighs it; each shared part once."""

    def __init__(self) -> None:
        self._done: dict[int, Any] = {}
        self._weights: dict[int, int] = {}

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
            parts = [*value, *value.values()] if isinstance(value, dict) else value
            self._weights[id(value)] = 1 + sum(map(self.weight, parts))
        return self._done[id(value)]

    def weight(self, value: Any) -> int:
        """Count the parts of a value, and the bytes of its strings and arrays."""
        if isinstance(value, (str, bytes, bytearray)):
            return 1 + len(value)
        if isinstance(value, _Array) and value.array is not None:
            return 1 + value.array.nbytes
        return self._weights.get(id(value), 1)

    def _rebuilt(self, value: Any, depth: int) -> Any:
        if isinstance(value, dict):
            return {key: self(item, depth=depth) for key, item in value.items()}
        parts: Iterator[Any] = (self(item, depth=depth) for item in value)
        return tuple(parts) if isinstance(value, tuple) else list(parts)
