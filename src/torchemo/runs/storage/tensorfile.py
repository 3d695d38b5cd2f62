"""One safetensors file of named tensors: encode, look at its header with distrust, decode.

safetensors executes nothing, but it has no checksum, accepts a header of 100 MB and lets one of two equal
names win. Here a header is small, every name is there once, and the tensors fill the file exactly.
"""

import itertools
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from torchemo.core.errors import CheckpointError
from torchemo.runs.storage.durable import read_at

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
MAX_HEADER = 1 << 19
"""Bytes of the largest header that is read: some five thousand tensors, parsed in no time."""

_MAX_DIMS = 32
_RESERVED = "__metadata__"


def spec(dtype: torch.dtype, shape: Iterable[int]) -> str:
    """Describe a tensor in one word.

    Example:
        >>> spec(torch.float32, (32, 3, 3, 3))
        'float32[32,3,3,3]'
    """
    return f"{str(dtype).removeprefix('torch.')}[{','.join(map(str, shape))}]"


def specs_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Describe every tensor, in order."""
    return {name: spec(tensor.dtype, tensor.shape) for name, tensor in tensors.items()}


def check_encodable(tensors: Mapping[str, Tensor], *, what: str) -> None:
    """Raise `CheckpointError` naming the tensor that this format cannot hold."""
    for name, tensor in tensors.items():
        if not name or name == _RESERVED:
            raise CheckpointError(f"{what}: {name!r} cannot be the name of a tensor.")
        if tensor.dtype not in DTYPES.values() or tensor.layout != torch.strided:
            raise CheckpointError(
                f"{what}: tensor '{name}' is {tensor.dtype} ({tensor.layout}).",
                hint=f"Save dense tensors of {', '.join(str(d)[6:] for d in DTYPES.values())}.",
            )


def check_finite(tensors: Mapping[str, Tensor], *, what: str) -> None:
    """Raise `CheckpointError` naming the first tensor that holds NaN or infinity."""
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        extremes = torch.stack(tensor.detach().aminmax())  # one pass; NaN is always an extreme
        if not bool(extremes.isfinite().all()):
            bad = int((~tensor.isfinite()).sum())
            raise CheckpointError(
                f"{what}: tensor {name!r:.100} should be finite,"
                f" got {bad} of {tensor.numel()} numbers that are NaN or infinite."
            )


def encode(tensors: Mapping[str, Tensor]) -> bytes:
    """Lay tensors out as one safetensors file; the same tensors give the same bytes."""
    seen: set[int] = set()
    dense = {}
    for name, tensor in tensors.items():
        flat = tensor.detach().cpu().contiguous()
        # The format refuses two names for one storage; ours are values, so the second is a copy.
        storage = flat.untyped_storage().data_ptr()
        dense[name] = flat.clone() if storage in seen else flat
        seen.add(storage)
    return bytes(safetensors.torch.save(dense))


def decode(data: bytes, *, what: str) -> dict[str, Tensor]:
    """Build the tensors of a file whose header has been checked."""
    try:
        loaded = safetensors.torch.load(data)
    except SafetensorError as error:
        raise CheckpointError(f"{what} is damaged: {error}.") from error
    # Kernels may round differently on memory that torch did not align, and resuming is bitwise.
    return {name: loaded.pop(name).clone() for name in list(loaded)}


def read_specs(handle: int, size: int, *, what: str) -> dict[str, str]:
    """Read and check the header of an open file of ``size`` bytes; touch no tensor data.

    Returns:
        ``{name: spec}`` in file order.
    """
    length = int.from_bytes(read_at(handle, 8, 0), "little")
    if size < 8 or length > min(MAX_HEADER, size - 8):
        raise CheckpointError(
            f"{what} is damaged: its header should have at most"
            f" {max(0, min(MAX_HEADER, size - 8))} bytes, got {length}.",
            hint=_warn_of_code(read_at(handle, 2, 0)),
        )
    try:
        header = json.loads(read_at(handle, length, 8), object_pairs_hook=_once)
        if not isinstance(header, dict):
            raise ValueError(f"it is a {type(header).__name__}")
        entries = {name: entry for name, entry in header.items() if name != _RESERVED}
        _check_offsets(entries, size - 8 - length)
        return {
            name: spec(DTYPES[entry["dtype"]], entry["shape"]) for name, entry in entries.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{what} is damaged: its header is malformed ({error!r:.200})."
        ) from error


def _warn_of_code(start: bytes) -> str | None:
    if start == b"PK" or (start[:1] == b"\x80" and start[1:] in (b"\2", b"\3", b"\4", b"\5")):
        return "It looks like a pickle, which can contain code: it was not opened."
    return None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs) or "" in found:
        raise ValueError("a name is empty or appears twice")
    return found


def _check_offsets(entries: Mapping[str, Any], size: int) -> None:
    """Check that the tensors lie end to end and fill ``size`` bytes."""
    spans = []
    for name, entry in entries.items():
        shape, (start, stop) = entry["shape"], entry["data_offsets"]
        if not all(type(n) is int and n >= 0 for n in itertools.chain(shape, (start, stop))):
            raise ValueError(f"tensor {name!r} has sizes or offsets that are not natural numbers")
        if len(shape) > _MAX_DIMS:
            raise ValueError(f"tensor {name!r} has {len(shape)} axes")
        if stop - start != math.prod(shape) * DTYPES[entry["dtype"]].itemsize:
            raise ValueError(f"tensor {name!r} has another size than its shape")
        spans.append((start, stop))
    end = 0
    for start, stop in sorted(spans):
        if start != end:
            raise ValueError(f"tensors overlap or leave a hole at byte {min(start, end)}")
        end = stop
    if end != size:
        raise ValueError(f"tensors fill {end} of {size} bytes")
